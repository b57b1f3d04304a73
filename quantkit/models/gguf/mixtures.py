"""Choose a ggml type for every tensor of a GGUF file as llama-quantize does.

A file type has a base type and gives more bits to some tensors: attention v, the output projection, the MLP's
down, the output matrix. If the ggml blocks of a type do not divide a matrix's columns, another type replaces
it. Source: llama.cpp, `src/llama-quant.cpp`; `scripts/ggml.py mixtures` compares every choice with
`llama_model_quantize`'s.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quantkit.errors import UNSUPPORTED, USAGE, compiled, name_all, require
from quantkit.models.gguf import file_types
from quantkit.models.gguf.file_types import BLOCKS, FILE_TYPES, SCALED, FileType, Model, parse_type

SCALING = ("llama", "qwen3", "qwen3moe", "qwen35")  # architectures in which llama.cpp applies scales
SCALES = re.compile(  # matrices whose scales llama.cpp reads
    r"blk\.\d+\.(attn_(q|k|v|output|qkv)|ffn_(gate|up|down)(_exps|_shexp)?)\.weight$"
)
LAST_RESORT = "F16"  # if the fallback's blocks do not divide the columns either
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
FLOATS = (
    "_norm.weight", "ffn_gate_inp.weight", "position_embd.weight", "token_types.weight", "ssm_conv1d.weight",
)  # fmt: skip
VALUES, KEYS, QUERIES, ATTENTION = "values", "keys", "queries", "attention"
DOWN, UP, GATE = "down", "up", "gate"
WIDE = {UP: "wide", GATE: "wide"}  # a file type has one rule for both
KINDS = {  # text in a tensor's name -> kind of tensor for the rules; the first match counts
    "attn_qkv.weight": VALUES,
    "attn_kv_b.weight": VALUES,
    "attn_v.weight": VALUES,
    "attn_k.weight": KEYS,
    "attn_q.weight": QUERIES,
    "attn_output.weight": ATTENTION,
    "ffn_up": UP,
    "ffn_gate": GATE,
    "ffn_down": DOWN,
}


@dataclass(frozen=True)
class Wishes:
    """The types that a user asks for, named as llama-quantize's options.

    tensor_type: texts `REGEX=TYPE`, searched for in GGUF names; the first match counts. pure: use the base
    type for all other tensors. exact: types by GGUF name, which win over all others.
    """

    tensor_type: tuple[str, ...] = ()
    output_tensor_type: str | None = None
    token_embedding_type: str | None = None
    pure: bool = False
    exact: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """The type of one tensor.

    first_choice: the type that `type` replaces, if any; reason: why it does not fit; cost_bytes: how many
    bytes more `type` takes than `first_choice` would.
    """

    name: str
    type: str
    first_choice: str | None = None
    reason: str | None = None
    cost_bytes: int = 0


def order(name: str) -> tuple[int, str]:
    """Return a sort key of llama-quantize's order: tensors outside blocks by name, then blocks by number."""
    block = re.match(r"blk\.(\d+)\.", name)
    return (int(block[1]) if block else -1, name)


def stays_float(name: str, shape: Sequence[int]) -> bool:
    """Return whether a tensor is float32 in every file: vectors, biases, norms, position embeddings,
    routers."""
    is_matrix = any(size > 1 for size in shape[:-1])  # ggml drops leading dimensions of 1
    return not is_matrix or not name.endswith(".weight") or any(ending in name for ending in FLOATS)


def without_importance(choices: Sequence[Choice]) -> list[Choice]:
    """Return the tensors whose types llama-quantize refuses to make without an importance matrix."""
    return [c for c in choices if c.type in file_types.NEED_IMPORTANCE and c.name not in (EMBEDDING, OUTPUT)]


def scale_of(name: str, type: str, shape: Sequence[int]) -> tuple[str, tuple[int]] | None:
    """Return name and shape of the separate scale of a tensor `[..., out, in]`; None if its type has none."""
    if type not in SCALED:
        return None
    return f"{name.removesuffix('.weight')}.scale", (shape[0] if len(shape) == 3 else 1,)


def nbytes(type: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor, also if the type's ggml blocks do not divide its rows."""
    weights, size = BLOCKS[type]
    return math.prod(shape) * size // weights


def of_file(path: Path) -> tuple[str | None, dict[str, str]]:
    """Return the file type that a GGUF file names, None if quantkit does not write it, and the types of its
    tensors, without separate scales. Raises QuantkitError naming tensors of types that are not written."""
    from quantkit.models.files import gguf_file  # imports gguf

    metadata, infos = gguf_file.read_header(path)
    read_only = [f"{name} ({info.dtype})" for name, info in infos.items() if info.dtype not in BLOCKS]
    what = f"{path} has types that quantkit reads but does not write: {name_all(read_only)}"
    require(not read_only, what, f"choose a file with types among {', '.join(BLOCKS)}", UNSUPPORTED)
    named = (name for name in FILE_TYPES if file_types.number(name) == metadata.get("general.file_type"))
    return next(named, None), {n: info.dtype for n, info in sorted(infos.items()) if not n.endswith("scale")}


def choose(
    file_type: str,
    model: Model,
    tensors: Sequence[tuple[str, Sequence[int]]],
    has_imatrix: bool = False,
    wishes: Wishes | None = None,
) -> list[Choice]:
    """Return the type of every tensor in llama-quantize's order. tensors: (GGUF name, shape `[..., in]`).

    Where llama-quantize stops or ignores a wish, this function goes on: a matrix that no ggml block fits
    becomes F16, and wishes also count in unquantized files. Raises QuantkitError naming every wish that is
    malformed or matches no tensor that could be quantized.
    """
    names, wishes = [name for name, shape in tensors if not stays_float(name, shape)], wishes or Wishes()
    requested = _requested(wishes, names)
    mixture = _Mixture(FILE_TYPES[file_type], model, has_imatrix, names, pure=wishes.pure)
    choices, biases = [], {name for name, _ in tensors if name.endswith(".bias")}
    for name, shape in tensors:
        if stays_float(name, shape) and name not in requested:
            choices.append(Choice(name, "F32"))
        else:
            first_choice = requested.get(name) or mixture.type(name, shape[-1])
            unscaled = _unscaled(name, model, biases) if first_choice in SCALED else None
            choices.append(_fitting(name, shape, first_choice, unscaled))
    return choices


def _unscaled(name: str, model: Model, biases: Collection[str]) -> str | None:
    """Return why llama.cpp would not apply the separate scale of a matrix; None if it would."""
    if model.architecture not in SCALING:
        return f"llama.cpp leaves out scales in {model.architecture}"
    if not SCALES.match(name):
        return "llama.cpp looks for no scale of it"
    if f"{name.removesuffix('.weight')}.bias" in biases:
        return "llama.cpp would scale its bias, too"
    return None


def _requested(wishes: Wishes, names: Sequence[str]) -> dict[str, str]:
    """Return the types that the user asks for, by name. A tied embedding is the output. Raises QuantkitError
    naming wishes that match no tensor."""
    patterns = [_parse_wish(text) for text in wishes.tensor_type]
    lost = [text for text, pattern, _ in patterns if not any(map(pattern.search, names))]
    what = f"--tensor-type matches no tensor that is quantized: {name_all(lost)}"
    hint = "it is searched for in the names of the GGUF file, such as blk.0.attn_v.weight"
    require(not lost, what, hint, USAGE)
    types = {name: type for _, pattern, type in reversed(patterns) for name in names if pattern.search(name)}
    if wishes.output_tensor_type:
        output = parse_type(wishes.output_tensor_type, "--output-tensor-type")
        types = types | {OUTPUT: output} if OUTPUT in names else {EMBEDDING: output} | types
    if wishes.token_embedding_type:
        types[EMBEDDING] = parse_type(wishes.token_embedding_type, "--token-embedding-type")
    return types | dict(wishes.exact)


def _parse_wish(text: str) -> tuple[str, re.Pattern, str]:
    """Return `(text, REGEX, TYPE)` of `REGEX=TYPE`."""
    pattern, equals, type = text.rpartition("=")
    example = r"for example --tensor-type 'blk\.0\.ffn_down=Q8_0'"
    require(pattern and type, f"--tensor-type {text!r} is not REGEX=TYPE", example, USAGE)
    flag = f"--tensor-type {text!r}"
    return text, compiled(pattern, flag, example), parse_type(type, flag)


class _Mixture:
    """Types by the rules of a file type. Rules count tensors, so the order of calls matters.

    Tensors whose type the user asked for are not counted, as in llama-quantize.
    """

    def __init__(self, chosen: FileType, model: Model, has_imatrix: bool, names: Sequence[str], pure: bool):
        self.chosen = chosen
        self.model = model
        self.has_imatrix = has_imatrix
        self.plain = pure or BLOCKS[chosen.base][0] == 1
        self.output = OUTPUT if OUTPUT in names else EMBEDDING
        self.count = dict.fromkeys((DOWN, UP, GATE), model.blocks)
        self.count[VALUES] = sum(_kind(name) == VALUES for name in names)
        self.seen = Counter()

    def type(self, name: str, columns: int) -> str:
        """Return the type by the rules; that of the output matrix also depends on its number of columns."""
        if self.plain:
            return self.chosen.base
        if self.chosen.experts and "_exps." in name:
            return self.chosen.experts
        if name == self.output:
            wide = self.chosen.base == "Q8_0" or self.model.architecture == "falcon"
            fits = columns % BLOCKS[self.chosen.output][0] == 0
            return "Q8_0" if wide else self.chosen.output if fits else "Q6_K"
        if name == EMBEDDING and self.chosen.embedding:
            return self.chosen.embedding
        return self._by_rule(name, _kind(name)) or self.chosen.base

    def _by_rule(self, name: str, kind: str | None) -> str | None:
        chosen, index = self.chosen, self.seen[kind]
        self.seen[kind] += 1
        if kind in (DOWN, UP, GATE) and self.model.experts > 1 and not chosen.sparing:
            index = int(name.split(".")[1])  # one tensor per expert: the number in the name is the block
        eight = self.model.experts == 8 and not chosen.sparing
        if eight and kind in (VALUES, KEYS):
            return "Q8_0"
        if eight and kind == ATTENTION and self.model.architecture != "falcon":
            return chosen.eight_experts
        if kind is None:
            return None
        true = file_types.facts(index, self.count.get(kind, 0), self.model, self.has_imatrix)
        type = chosen.by_rule(WIDE.get(kind, kind), true)
        if kind == VALUES and self.model.is_70b and not chosen.sparing:
            return "Q5_K" if (type or chosen.base) in ("Q3_K", "Q4_K") else type
        return type


def _kind(name: str) -> str | None:
    return next((kind for text, kind in KINDS.items() if text in name), None)


def _fitting(name: str, shape: Sequence[int], first_choice: str, unscaled: str | None = None) -> Choice:
    """Return the type itself, or a replacement if its ggml blocks do not divide the columns or llama.cpp
    ignores its scale."""
    columns, block = shape[-1] if len(shape) > 1 else 1, BLOCKS[first_choice][0]  # a vector is one column
    if not unscaled and columns % block == 0:
        return Choice(name, first_choice)
    type = file_types.FALLBACKS.get(first_choice, LAST_RESORT)
    if columns % BLOCKS[type][0]:
        type = LAST_RESORT
    reason = unscaled or f"{columns} columns are no multiple of {block}"
    return Choice(name, type, first_choice, reason, nbytes(type, shape) - nbytes(first_choice, shape))
