"""A GGUF file as a checkpoint: tensors have the names, shapes and values that transformers uses."""

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quantkit.errors import UNSUPPORTED, QuantkitError, first_line, name_all, require
from quantkit.grids.ggml import TYPES
from quantkit.layouts.ggml import GgmlLayout
from quantkit.layouts.ggml.blocks import PLAIN, decode_rows
from quantkit.models.files import checksums, gguf_shards, reading
from quantkit.models.files.checkpoint import Checkpoint, PackedLinear
from quantkit.models.files.headers import Contents
from quantkit.models.files.reading import DTYPES, Computed
from quantkit.models.files.safetensors_folder import DTYPE_BYTES, TensorInfo
from quantkit.models.gguf import configuration, rope, tensors
from quantkit.models.gguf.file_types import SCALED
from quantkit.models.gguf.mixtures import scale_of
from quantkit.models.gguf.tensors import Target

NO_WEIGHTS = ("F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K")  # types of intermediate results
INPUT_SCALE = ".input_scale"
CHUNK = 1 << 20  # weights decoded at a time


@dataclass(frozen=True)
class GgmlTensor(TensorInfo):
    """One of transformers' tensors, with its name and shape, in a GGUF file, with its ggml type as dtype.

    target: how the file stores it. scale: one factor per matrix; None for types without scales. pieces: set
    for a tensor that is stored in several pieces, each with its own target.
    """

    target: Target = field(compare=False, repr=False)
    scale: Tensor | None = field(default=None, compare=False, repr=False)
    pieces: tuple[Self, ...] = field(default=(), compare=False, repr=False)

    def values(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values in the order and orientation of transformers. dtype: by default float16 or
        bfloat16 if the file stores this type, else float32."""
        if self.pieces:
            parts = [piece._decoded(dtype) for piece in self.pieces]
            whole = torch.empty(self.shape, dtype=parts[0].dtype)
            for piece, values in zip(self.pieces, parts, strict=True):
                piece.target.part.of(whole).copy_(values)
            return whole
        target = self.target
        if target.changed:  # in float32: Gemma's norms are stored with 1 added
            values = target.to_hf(self._decoded(torch.float32)).to(dtype or torch.float32)
        else:
            values = self._decoded(dtype)
        if target.single:
            values = values[:, None]
        return values.t().contiguous() if target.conv1d else values

    def part(self, rows: slice) -> Self:
        """Return some rows of a tensor; see `GgufCheckpoint.stores_rows`."""
        shape, size = (rows.stop - rows.start, *self.shape[1:]), self.nbytes // self.shape[0]
        place = {"offset": self.offset + rows.start * size, "nbytes": shape[0] * size}
        return replace(self, shape=shape, target=replace(self.target, shape=shape), **place)

    def _decoded(self, dtype: torch.dtype | None) -> Tensor:
        """Return the stored values in `target.shape`. Rows are in the model's order."""
        shape = self.target.shape
        encoded = reading.octets(self.file, self.offset, self.nbytes, self.name)
        if self.target.index is not None:
            encoded = self.target.to_hf(encoded.view(shape[0], -1))
        encoded = encoded.view(math.prod(shape[:-1]), -1)
        if self.dtype in PLAIN:
            values = encoded.view(DTYPES[self.dtype])
            return values.to(dtype or values.dtype).view(shape)
        values = torch.empty(len(encoded), shape[-1], dtype=dtype or torch.float32)
        step = max(1, CHUNK // shape[-1])
        for start in range(0, len(encoded), step):
            chunk = slice(start, start + step)
            rows = decode_rows(self.dtype, encoded[chunk], shape[-1])
            if self.scale is not None:
                rows *= self.scale.repeat_interleave(len(encoded) // len(self.scale))[chunk, None]
            values[chunk] = rows
        return values.view(shape)


@dataclass(frozen=True)
class GgufCheckpoint(Checkpoint):
    """An open GGUF file: the header is read and checked, and factors and scales are loaded. infos: a
    GgmlTensor for each tensor of the file, by transformers' name."""

    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """Return the model's name in the metadata, or else the file's name without suffix."""
        name = self.metadata.get("general.name")
        return name if isinstance(name, str) and name else gguf_shards.whole(self.folder).stem

    @property
    def quantized(self) -> bool:
        return bool(self.coded_bytes())

    def coded_bytes(self) -> dict[str, int]:
        stored = {name: info for name, info in self.infos.items() if isinstance(info, GgmlTensor)}
        return {name: info.nbytes for name, info in stored.items() if info.dtype not in PLAIN}

    def manifest(self) -> str | None:
        manifest = self.metadata.get("quantkit.manifest")
        return manifest if isinstance(manifest, str) else None

    def coded(self, linears: Collection[str]) -> Self:
        """Return a copy in which these linears are packed linears of GgmlLayout. Types without a grid, types
        with a separate scale, and tensors in several pieces stay as they are."""
        infos = {name: self.infos.get(f"{name}.weight") for name in linears}
        packed = {
            name: {GgmlLayout.marker: info.name}
            for name, info in infos.items()
            if info and info.dtype in TYPES and info.dtype not in SCALED and not info.pieces
        }
        return replace(self, layout=GgmlLayout(), packed=packed)

    def parts(self, name: str) -> PackedLinear:
        """Return the ggml blocks `[out, row_bytes]` of a packed linear (`X.weight`), rows in the model's
        order, and the number of their type."""
        info = self.infos[name]
        raw = reading.octets(info.file, info.offset, info.nbytes, info.name)
        rows = info.target.to_hf(raw.view(info.target.shape[-2], -1))
        number = torch.tensor(GGMLQuantizationType[info.dtype].value, dtype=torch.int32)
        parts = {"ggml": rows.contiguous(), "ggml_type": number}
        return PackedLinear(name.removesuffix(".weight"), parts)

    def placed(self, name: str, tensor: Tensor) -> tuple[int, bytes]:
        """Return the offset of a tensor in the file and its new bytes. tensor: ggml blocks, or a vector."""
        info = self.infos[name]
        stored = info.target.to_gguf(tensor)
        if tensor.dtype != torch.uint8:
            stored = stored.to(DTYPES[info.dtype])
        data = stored.contiguous().view(torch.uint8).numpy().tobytes()
        assert len(data) == info.nbytes, f"{name}: {len(data)} bytes for {info.nbytes}"
        return info.offset, data

    def stores_rows(self, name: str) -> bool:
        """See `Checkpoint.stores_rows`; rows of codes are decoded. Rows of the file must be the model's."""
        if not isinstance(info := self.infos[name], GgmlTensor):
            return super().stores_rows(name)
        target = info.target
        moved = info.pieces or target.index is not None or target.changed or target.conv1d
        return len(info.shape) == 2 and not moved

    def _values(self, info: TensorInfo, dtype: torch.dtype | None, rows: slice | None) -> Tensor:
        if not isinstance(info, GgmlTensor):
            return super()._values(info, dtype, rows)
        return (info if rows is None else info.part(rows)).values(dtype)

    def plain(self, info: TensorInfo) -> TensorInfo:
        """Return a tensor as a safetensors file will hold it; types that safetensors lacks become float32."""
        if not isinstance(info, GgmlTensor):
            return info
        dtype = info.dtype if info.dtype in PLAIN and not info.target.changed else "F32"
        nbytes = math.prod(info.shape) * DTYPE_BYTES[dtype]
        values = partial(info.values, DTYPES[dtype])
        return Computed(info.name, dtype, info.shape, info.file, info.offset, nbytes, values)

    @cached_property
    def tokenizer(self) -> transformers.PreTrainedTokenizerBase:
        """Return the tokenizer in the metadata. Raises QuantkitError if it is absent or unsupported."""
        from quantkit.models.gguf import tokenizer

        return tokenizer.from_metadata(self.metadata)

    def write_companions(self, target: Path) -> None:
        """Write tokenizer files made from the metadata; none if the file has no tokenizer."""
        if "tokenizer.ggml.model" in self.metadata:
            self.tokenizer.save_pretrained(target)

    def sha256(self) -> str:
        """Return the hash of the file, or of its shards one after another."""
        digest = hashlib.sha256()
        for path in gguf_shards.of(self.folder):
            checksums.add(digest, path)
        return digest.hexdigest()


def of_contents(contents: Contents) -> GgufCheckpoint:
    """Open a GGUF file. Raises QuantkitError naming tensors that are absent, unknown or misshapen."""
    source, path, metadata, stored = contents.source, contents.path, contents.metadata, contents.infos
    factors = {
        name: reading.tensor(stored[name])
        for name in (rope.LONG, rope.SHORT, rope.FREQUENCIES)
        if name in stored and stored[name].dtype == "F32" and len(stored[name].shape) == 1
    }
    config, targets = _described(source, metadata, stored, factors)
    scales = _scales(stored, targets)
    unused = {name for name in stored if name.endswith(INPUT_SCALE)}  # for engines that round activations
    _check(path, stored, targets, {*factors, *(info.name for info in scales.values()), *unused})
    infos: dict[str, GgmlTensor] = {}
    pieces: dict[str, list[GgmlTensor]] = {}
    for target in targets:
        scale = reading.tensor(scales[target.name]) if target.name in scales else None
        for info in _tensors(target, stored[target.name], scale):
            infos[info.name] = info
            if target.part:
                pieces.setdefault(info.name, []).append(info)
    for name, parts in pieces.items():
        nbytes, shape = sum(piece.nbytes for piece in parts), parts[0].target.part.shape
        infos[name] = replace(parts[0], shape=shape, nbytes=nbytes, pieces=tuple(parts))
    return GgufCheckpoint(
        source=source,
        folder=path,
        raw_config=json.loads(config.to_json_string()),
        config=config,
        infos=infos,
        layout=None,
        metadata=metadata,
    )


def _scales(stored: Mapping[str, TensorInfo], targets: list[Target]) -> dict[str, TensorInfo]:
    """Return the scales of tensors by the tensors' names. Raises QuantkitError for a scale whose shape does
    not fit its tensor."""
    scales = {}
    for target in targets:
        owner = stored.get(target.name)
        scale = owner and scale_of(target.name, owner.dtype, target.shape)
        if scale and scale[0] in stored:
            info, shape = stored[scale[0]], scale[1]
            what = f"{info.name} is {info.dtype} {list(info.shape)} instead of F32 {list(shape)}"
            require(info.dtype == "F32" and info.shape == shape, what, "download the file again")
            scales[target.name] = info
    return scales


def _described(
    source: str, metadata: Mapping[str, Any], stored: Mapping[str, TensorInfo], factors: Mapping[str, Tensor]
) -> tuple[transformers.PretrainedConfig, list[Target]]:
    """Return the configuration of the model and the tensors that the file should hold."""
    try:
        config = configuration.to_config(metadata, stored, factors)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        return config, [target for target in tensors.of_config(config, source) if target.parameters]
    except QuantkitError:
        raise
    except Exception as error:  # inconsistent values raise many types
        what = f"the metadata of {source} describe no model: {first_line(error)}"
        raise QuantkitError(what, "download the file again") from error


def _check(path: Path, stored: Mapping[str, TensorInfo], targets: list[Target], factors: set[str]) -> None:
    """Raise QuantkitError unless the file holds exactly the tensors of the model."""
    expected = {target.name: target for target in targets}
    absent = [name for name in expected if name not in stored]
    require(not absent, f"{path} lacks {name_all(absent)}", "it holds no whole model; download it again")
    unknown = [name for name in stored if name not in expected and name not in factors]
    hint = "quantkit reads plain language models of the architectures that it writes"
    require(not unknown, f"{path} holds unknown tensors: {name_all(unknown)}", hint, UNSUPPORTED)
    wrong = [
        f"{name} is {list(stored[name].shape)} instead of {list(target.shape)}"
        for name, target in expected.items()
        if _matrix(stored[name].shape) != _matrix(target.shape)
    ]
    require(not wrong, f"{path}: {name_all(wrong)}", "metadata and tensors belong to different models")
    types = [
        f"{name} ({stored[name].dtype})"
        for name, target in expected.items()
        if stored[name].dtype in NO_WEIGHTS or (len(target.shape) == 1 and stored[name].dtype not in PLAIN)
    ]
    what = f"{path} holds weights of unknown types: {name_all(types)}"
    require(not types, what, "convert the model again", UNSUPPORTED)


def _matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without leading dimensions of 1, because ggml does not store them."""
    return shape[1:] if len(shape) > 1 and shape[0] == 1 else shape


def _tensors(target: Target, info: TensorInfo, scale: Tensor | None) -> Iterator[GgmlTensor]:
    """Yield each of transformers' tensors that one tensor of the file holds."""
    parts = target.parts
    nbytes = info.nbytes // len(parts)
    scales = [None] * len(parts) if scale is None else scale.chunk(len(parts))
    for index, part in enumerate(parts):
        shape = part.shape[::-1] if part.conv1d else part.shape
        shape = (shape[0], 1, shape[1]) if part.single else shape
        located = info.file, info.offset + index * nbytes, nbytes
        yield GgmlTensor(part.parameters[0], info.dtype, shape, *located, part, scales[index])
