"""A checkpoint's weights and tokenizer, read from headers and small files: shapes, formats and sizes.

Each layout finds and checks its quantized linears (`Layout.checked_spec`), given headers instead of tensors.
This file counts two formats that no layout decodes: gpt-oss's experts, and floats with scales.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from quantkit import layouts
from quantkit.errors import QuantkitError
from quantkit.layouts import Layout, OutOfReach
from quantkit.models.files.headers import Contents
from quantkit.models.files.safetensors_folder import TensorInfo, raw

SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
GGUF_KINDS = {"gpt2": "BPE", "llama": "SentencePiece", "bert": "WordPiece", "t5": "Unigram"}
PLAIN = re.compile(r"(F|BF|I)\d+$")  # types of GGUF files whose values are not coded
OF_CACHE = (".k_scale", ".v_scale")  # scales of keys and values belong to no linear
TENSOR_BYTES = 1 << 12  # maximum size of tensors that are read to describe others
UNPACKED = {"U8": "B", "I64": "q"}  # format codes for `memoryview.cast`


@dataclass(frozen=True)
class Codes:
    """How a weight is quantized. form: layout or ggml type. bits: per code. group_size: columns that share a
    scale; None for whole rows or if unknown. problem: why its layout cannot decode it."""

    form: str
    bits: int
    group_size: int | None = None
    problem: str = ""

    def describe(self) -> str:
        """Return a phrase such as `4 bit, groups of 128`, or only the type's name, such as `Q4_K`."""
        if self.form.isupper() or self.form == "nf4":  # upper case: a ggml type
            return self.form
        form = f"{self.bits} bit" if self.form in ("gptq", "awq", "mlx", "pack-quantized") else self.form
        return f"{form}, groups of {self.group_size}" if self.group_size else f"{form}, whole rows"


@dataclass(frozen=True)
class Weight:
    """A parameter of the model. name, shape: as in a plain checkpoint. parameters: number of values.
    plain_bytes: bytes if not quantized. scale_bytes: scales, zero points, column orders. codes: None if not
    quantized."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    parameters: int
    plain_bytes: int = 0
    code_bytes: int = 0
    scale_bytes: int = 0
    codes: Codes | None = None

    @property
    def nbytes(self) -> int:
        return self.plain_bytes + self.code_bytes + self.scale_bytes

    @property
    def stored(self) -> str:
        """The format in words, such as `4 bit, groups of 128`, or a dtype."""
        return self.codes.describe() if self.codes else self.dtype


@dataclass(frozen=True)
class _Part(TensorInfo):
    """A header with the method of a tensor that layouts call. local: its file is on this disk."""

    local: bool

    def tolist(self) -> list[int]:
        """Return the values of a small local tensor. Raises OutOfReach for large ones and on the hub."""
        if not self.local or self.nbytes > TENSOR_BYTES or self.dtype not in UNPACKED:
            raise OutOfReach
        return memoryview(b"".join(raw(self))).cast(UNPACKED[self.dtype]).tolist()


def weights_of(contents: Contents) -> list[Weight]:
    """Return every parameter of the model, in the order of the file."""
    if contents.container == "gguf":
        return list(_of_gguf(contents.infos))
    layout = None
    with suppress(QuantkitError):
        layout = layouts.detect(contents.config)
    infos = layout.unstacked(contents.infos) if layout else contents.infos
    rest, local = dict(infos), contents.path is not None
    coded = list(_packed(layout, rest, local) if layout else _foreign(rest))
    return [*map(_plain, rest.values()), *coded]


def _plain(info: TensorInfo) -> Weight:
    if info.name.endswith(OF_CACHE):
        return Weight(info.name, info.dtype, info.shape, 0, scale_bytes=info.nbytes)
    return Weight(info.name, info.dtype, info.shape, math.prod(info.shape), plain_bytes=info.nbytes)


def _coded(
    linear: str, infos: list[TensorInfo], codes: Codes, shape: tuple[int, ...] | None, parameters: int
) -> Weight:
    """Return a quantized weight. infos: its tensors, that of the codes first."""
    dtype, code_bytes = infos[0].dtype, infos[0].nbytes
    scale_bytes = sum(info.nbytes for info in infos[1:])
    return Weight(f"{linear}.weight", dtype, shape, parameters, 0, code_bytes, scale_bytes, codes)


def _packed(layout: Layout, rest: dict[str, TensorInfo], local: bool) -> Iterator[Weight]:
    """Yield the linears of a layout, and take their tensors out of `rest`. local: see `_Part`."""
    for linear, names in layouts.group_by_linear(layout, rest).items():
        infos = {part: rest.pop(name) for part, name in names.items()}
        linear_layout, codes, shape, parameters = layout, Codes(layout.label, 0), None, 0
        try:
            linear_layout = layout.at(linear)
            parts = {part: _Part(**vars(info), local=local) for part, info in infos.items()}
            codes, shape, parameters = _codes(linear_layout, parts)
        except KeyError as error:
            codes = replace(codes, problem=f"{error.args[0]} is absent")
        except QuantkitError as error:
            codes = replace(codes, problem=error.message)
        first = linear_layout.code_part if linear_layout.code_part in infos else layout.marker
        yield _coded(linear, [infos.pop(first), *infos.values()], codes, shape, parameters)


def _codes(layout: Layout, parts: Mapping[str, Any]) -> tuple[Codes, tuple[int, int] | None, int]:
    """Check a linear's headers with its layout; return its codes, its shape and the number of its weights.
    Raises KeyError or QuantkitError, as decoding would."""
    configured = layout.numbers
    try:
        spec = layout.checked_spec(parts)
    except OutOfReach:  # nf4 stores the shape in JSON, which was not read
        return Codes(layout.label, 4), None, 2 * math.prod(parts[layout.code_part].shape)
    size, columns = configured[1] if configured else spec.grid.group_size, spec.in_features
    whole = size is None or size > columns or (configured is None and size == columns)
    codes = Codes(layout.label, spec.grid.bits, None if whole else size)
    return codes, (spec.out_features, columns), spec.weights


def _foreign(rest: dict[str, TensorInfo]) -> Iterator[Weight]:
    """Yield linears that no layout here decodes, and take their tensors out of `rest`: gpt-oss's experts,
    `blocks [experts, out, groups, 16]`, and modelopt's floats with `weight_scale`, of 8 bits or of 4 bits
    (two per byte)."""
    for name, info in list(rest.items()):
        linear, per_byte = name.removesuffix(".weight"), 2 if info.dtype == "U8" else 1
        base = name.removesuffix("_blocks")
        if base != name and f"{base}_scales" in rest:
            shape = (*info.shape[:2], 32 * info.shape[2]) if len(info.shape) == 4 else None
            stored = [rest.pop(name), rest.pop(f"{base}_scales")]
            yield _coded(base, stored, Codes("mxfp4", 4, 32), shape, 2 * info.nbytes)
        elif linear != name and (scale := rest.get(f"{name}_scale")) and len(info.shape) == 2:
            rows, columns = info.shape[0], per_byte * info.shape[1]
            groups = scale.shape[1] if len(scale.shape) == 2 else 1
            size = -(-columns // groups) if groups > 1 else None
            codes = Codes("nvfp4" if per_byte == 2 else "float8", 8 // per_byte, size)
            parts = (name, f"{name}_scale", f"{name}_scale_2", f"{linear}.input_scale")
            stored = [rest.pop(part) for part in parts if part in rest]
            yield _coded(linear, stored, codes, (rows, columns), rows * columns)


def _of_gguf(infos: Mapping[str, TensorInfo]) -> Iterator[Weight]:
    """Yield every tensor of a GGUF file. ggml blocks contain codes and scales; scale tensors of NVFP4
    matrices are counted with the matrix."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    extra_bytes, rest = Counter(), dict(infos)
    for name, info in infos.items():
        owner = infos.get(re.sub(r"\.(input_)?scale$", ".weight", name), info)
        if owner is not info and owner.dtype == "NVFP4":
            extra_bytes[owner.name] += rest.pop(name).nbytes
    for name, info in rest.items():
        weight = _plain(info)
        if not PLAIN.match(info.dtype):
            block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[info.dtype]]
            digits = re.match(r"(?:MX|NV)?[A-Z]*(\d)", info.dtype)
            codes = Codes(info.dtype, int(digits[1]) if digits else 8, block)
            code_bytes = min(info.nbytes, weight.parameters * codes.bits // 8)
            scale_bytes = info.nbytes - code_bytes + extra_bytes[name]
            stored = {"plain_bytes": 0, "code_bytes": code_bytes, "scale_bytes": scale_bytes}
            weight = replace(weight, codes=codes, **stored)
        yield weight


def tokenizer_of(contents: Contents) -> dict[str, Any] | None:
    """Return the tokenizer's kind, its number of tokens and the chat template's sha256, read from files; None
    without a tokenizer."""
    tokenizer = _of_metadata(contents) if contents.container == "gguf" else _of_files(contents)
    if tokenizer is None:
        return None
    kind, tokens, template = tokenizer
    sha256 = hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else None
    return {"kind": kind, "tokens": tokens, "chat_template_sha256": sha256}


def _of_files(contents: Contents) -> tuple[str, int | None, Any] | None:
    config, whole = contents.json("tokenizer_config.json"), contents.json("tokenizer.json")
    pieces = any(name in contents.files for name in SENTENCEPIECE)
    if config is None and not pieces and "tokenizer.json" not in contents.files:
        return None
    model = (whole or {}).get("model")
    if whole is not None and not isinstance(model, dict):
        contents.problems.append("tokenizer.json holds no tokenizer")
    kind = "SentencePiece" if pieces else (config or {}).get("tokenizer_class", "of unknown kind")
    kind = model.get("type") if isinstance(model, dict) else kind
    data = contents.read("chat_template.jinja")
    template = (config or {}).get("chat_template") if data is None else data.decode("utf-8", "replace")
    return str(kind), _tokens(whole or {}), template


def _tokens(whole: dict[str, Any]) -> int | None:
    """Return the number of tokens in tokenizer.json: the largest id plus one."""
    model, added = whole.get("model"), whole.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids: list[Any] = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    if isinstance(vocabulary, list):  # Unigram: in order
        ids = [len(vocabulary) - 1]
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    return max((value for value in ids if isinstance(value, int)), default=-1) + 1 or None


def _of_metadata(contents: Contents) -> tuple[str, int | None, Any] | None:
    metadata = contents.metadata
    if "tokenizer.ggml.model" not in metadata:
        return None
    model, tokens = str(metadata["tokenizer.ggml.model"]), metadata.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list) else 0
    return GGUF_KINDS.get(model, model), count or None, metadata.get("tokenizer.chat_template")
