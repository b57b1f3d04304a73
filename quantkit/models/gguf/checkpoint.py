"""A GGUF file as a checkpoint: tensors have the names, shapes and values that transformers uses."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quantkit.errors import UNSUPPORTED, QuantkitError, first_line, name_all, require
from quantkit.grids.ggml import TYPES
from quantkit.layouts.ggml import GgmlLayout
from quantkit.layouts.ggml.blocks import decode_rows
from quantkit.models.files import checksums, gguf_file, gguf_shards, reading
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.reading import DTYPES
from quantkit.models.files.safetensors_folder import DTYPE_BYTES, TensorInfo
from quantkit.models.gguf import configuration, rope, tensors
from quantkit.models.gguf.architectures import refuse_other
from quantkit.models.gguf.file_types import SCALED
from quantkit.models.gguf.mixtures import scale_of
from quantkit.models.gguf.tensors import Target

PLAIN = ("F32", "F16", "BF16")
NO_WEIGHTS = ("F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K")  # ggml computes with these, it stores none
INPUT_SCALE = ".input_scale"
CHUNK = 1 << 20  # weights decoded at a time


@dataclass(frozen=True)
class GgufCheckpoint(Checkpoint):
    """An open GGUF file: the header is read and checked, and the factors of rotary embeddings are loaded.

    infos: transformers' names and shapes, ggml's dtype, and file and offset. targets: how the file stores
    each tensor (Target), by transformers' name. pieces: for a tensor stored in several pieces, all of them;
    `infos` has the first. scales: factors of a tensor's matrices, by the tensor's name in the file.
    """

    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)
    targets: Mapping[str, Target] = field(default_factory=dict, repr=False)
    pieces: Mapping[str, list[tuple[Target, TensorInfo]]] = field(default_factory=dict, repr=False)
    scales: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """Return the model's name in the metadata, or else the file's name without suffix."""
        name = self.metadata.get("general.name")
        return name if isinstance(name, str) and name else gguf_shards.whole(self.folder).stem

    @property
    def quantized(self) -> bool:
        """Return whether any tensor is stored in quantized ggml blocks."""
        return bool(self.coded_bytes())

    def coded_bytes(self) -> dict[str, int]:
        """Return the bytes of every tensor that is stored in quantized ggml blocks."""
        stored = {name: info for name, info in self.infos.items() if self._is_own(info)}
        return {name: info.nbytes for name, info in stored.items() if info.dtype not in PLAIN}

    def _is_own(self, info: TensorInfo) -> bool:
        """Return whether a tensor is stored in this file and read without changes."""
        return info.file in gguf_shards.of(self.folder) and not isinstance(info, reading.OTHERWISE)

    def manifest(self) -> str | None:
        """Return the manifest that quantkit wrote into the file."""
        found = self.metadata.get("quantkit.manifest")
        return found if isinstance(found, str) else None

    def coded(self, linears: Collection[str]) -> GgufCheckpoint:
        """Return a copy in which these linears are packed linears of GgmlLayout. Types without a grid, types
        with a separate scale, and tensors in several pieces stay as they are."""
        infos = {name: self.infos.get(f"{name}.weight") for name in linears}
        packed = {
            name: {GgmlLayout.marker: info.name}
            for name, info in infos.items()
            if info and info.dtype in TYPES and info.dtype not in SCALED and info.name not in self.pieces
        }
        return replace(self, layout=GgmlLayout(), _quantized=packed)

    def parts(self, name: str) -> dict[str, Tensor]:
        """Return the ggml blocks `[out, row_bytes]` of a packed linear (`X.weight`), rows in the model's
        order, and the number of their type."""
        info, target = self.infos[name], self.targets[name]
        raw = reading.octets(info.file, info.offset, info.nbytes, info.name)
        rows = target.to_hf(raw.view(target.shape[-2], -1))
        number = torch.tensor(GGMLQuantizationType[info.dtype].value, dtype=torch.int32)
        return {"ggml": rows.contiguous(), "ggml_type": number}

    def placed(self, name: str, tensor: Tensor) -> tuple[int, bytes]:
        """Return the offset of a tensor in the file and its new bytes. tensor: ggml blocks as `parts` returns
        them, or the values of a vector."""
        info, target = self.infos[name], self.targets[name]
        moved = target.to_gguf(tensor)
        if tensor.dtype != torch.uint8:
            moved = moved.to(DTYPES[info.dtype])
        data = moved.contiguous().view(torch.uint8).numpy().tobytes()
        assert len(data) == info.nbytes, f"{name}: {len(data)} bytes for {info.nbytes}"
        return info.offset, data

    @property
    def disk_bytes(self) -> int:
        """Return the size of the file, or of all its shards."""
        return sum(path.stat().st_size for path in gguf_shards.of(self.folder))

    def load(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor's values in the order and orientation of transformers.

        dtype: default float16 or bfloat16 if stored so, else float32.
        """
        info = self.infos[name]
        if not self._is_own(info):
            return super().load(name, dtype)
        if name in self.pieces:
            return self._joined(name, info.shape, dtype)
        target = self.targets[name]
        shape = target.shape if target.parameters == (name,) else info.shape
        values = _decode(info, shape, dtype, target, self._scale(target, name))
        if target.changed:
            values = target.to_hf(values).to(dtype or torch.float32)
        if target.single:
            values = values[:, None]
        return values.t().contiguous() if target.conv1d else values

    def _joined(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        values = [
            _decode(info, target.shape, dtype, target, self._scale(target))
            for target, info in self.pieces[name]
        ]
        whole = torch.empty(shape, dtype=values[0].dtype)
        for (target, _), part in zip(self.pieces[name], values, strict=True):
            target.part.of(whole).copy_(part)
        return whole

    def _scale(self, target: Target, name: str | None = None) -> Tensor | None:
        """Return the scales of a tensor's matrices, or only that of parameter `name`; None without scales."""
        scale = self.scales.get(target.name)
        alone = scale is None or len(target.parameters) == 1 or name is None
        return scale if alone else scale[[target.parameters.index(name)]]

    def plain(self, info: TensorInfo) -> TensorInfo:
        """Return dtype, shape and bytes of a tensor in a safetensors file; types that safetensors lacks
        become float32."""
        if not self._is_own(info):
            return info
        dtype = info.dtype if info.dtype in PLAIN and not self.targets[info.name].changed else "F32"
        return replace(info, dtype=dtype, nbytes=math.prod(info.shape) * DTYPE_BYTES[dtype])

    def data(self, info: TensorInfo) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the tensor that `plain` describes."""
        if not self._is_own(info):
            yield from super().data(info)
        else:
            yield self.load(info.name, DTYPES[info.dtype]).view(torch.uint8).numpy().data

    @cached_property
    def tokenizer(self) -> transformers.PreTrainedTokenizerBase:
        """Return the tokenizer in the metadata. Raises QuantkitError if it is absent or unsupported."""
        from quantkit.models.gguf import tokenizer

        return tokenizer.from_metadata(self.metadata)

    def write_companions(self, place: Path) -> None:
        """Write tokenizer files made from the metadata; none if the file has no tokenizer."""
        if "tokenizer.ggml.model" in self.metadata:
            self.tokenizer.save_pretrained(place)

    def sha256(self, progress: Callable[[int], None] = lambda nbytes: None) -> str:
        """Return the hash of the file, or of its shards one after another."""
        digest = hashlib.sha256()
        for path in gguf_shards.of(self.folder):
            checksums.add(digest, path, listen=progress)
        return digest.hexdigest()


def open_file(source: str, path: Path) -> GgufCheckpoint:
    """Open a GGUF file. Raises QuantkitError naming tensors that are absent, unknown or misshapen."""
    metadata, stored = gguf_file.read_header(path)
    refuse_other(source, metadata)
    factors = {
        name: _decode(stored[name], stored[name].shape)
        for name in (rope.LONG, rope.SHORT, rope.FREQUENCIES)
        if name in stored and stored[name].dtype == "F32" and len(stored[name].shape) == 1
    }
    config, targets = _understood(source, metadata, stored, factors)
    scales = _scales(stored, targets)
    unused = {name for name in stored if name.endswith(INPUT_SCALE)}  # of engines that round inputs, too
    _check(path, stored, targets, {*factors, *scales, *unused})
    whole = [target for target in targets if target.part is None]
    infos = {name: info for target in whole for name, info in _parts(target, stored[target.name])}
    pieces: dict[str, list[tuple[Target, TensorInfo]]] = {}
    for target in targets:
        if target.part:
            pieces.setdefault(target.parameters[0], []).append((target, stored[target.name]))
    for name, parts in pieces.items():
        (target, first), nbytes = parts[0], sum(info.nbytes for _, info in parts)
        infos[name] = replace(first, name=name, shape=target.part.shape, nbytes=nbytes)
    return GgufCheckpoint(
        source=source,
        folder=path,
        raw_config=json.loads(config.to_json_string()),
        config=config,
        infos=infos,
        layout=None,
        metadata=metadata,
        targets={name: target for target in targets for name in target.parameters},
        pieces=pieces,
        scales={f"{name.removesuffix('.scale')}.weight": scale for name, scale in scales.items()},
    )


def _scales(stored: Mapping[str, TensorInfo], targets: list[Target]) -> dict[str, Tensor]:
    """Return the scales of tensors by the tensors' names. Raises QuantkitError for a scale whose shape does
    not fit its tensor."""
    found = {}
    for target in targets:
        owner = stored.get(target.name)
        if owner is None or (place := scale_of(target.name, owner.dtype, target.shape)) is None:
            continue
        name, shape = place
        if name not in stored:
            continue
        what = f"{name} is {stored[name].dtype} {list(stored[name].shape)} instead of F32 {list(shape)}"
        require(stored[name].dtype == "F32" and stored[name].shape == shape, what, "download the file again")
        found[name] = _decode(stored[name], shape)
    return found


def _understood(
    source: str,
    metadata: gguf_file.Metadata,
    stored: Mapping[str, TensorInfo],
    factors: Mapping[str, Tensor],
) -> tuple[transformers.PretrainedConfig, list[Target]]:
    """Return the configuration of the model and the tensors that the file should hold."""
    try:
        config = configuration.to_config(metadata, stored, factors)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        return config, [target for target in tensors.of_config(config, source) if target.parameters]
    except QuantkitError:
        raise
    except Exception as error:  # values that do not go together end in many kinds of errors
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
    odd = [
        f"{name} is {list(stored[name].shape)} instead of {list(target.shape)}"
        for name, target in expected.items()
        if _matrix(stored[name].shape) != _matrix(target.shape)
    ]
    require(not odd, f"{path}: {name_all(odd)}", "metadata and tensors belong to different models")
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


def _parts(target: Target, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    """Yield name and location of each of transformers' tensors that one GGUF tensor holds."""
    if len(target.parameters) == 1:
        name = target.parameters[0]
        shape = target.shape[::-1] if target.conv1d else target.shape
        yield name, replace(info, name=name, shape=(shape[0], 1, shape[1]) if target.single else shape)
        return
    nbytes = info.nbytes // len(target.parameters)
    for row, name in enumerate(target.parameters):
        start = info.offset + row * nbytes
        yield name, replace(info, name=name, shape=info.shape[1:], offset=start, nbytes=nbytes)


def _decode(
    info: TensorInfo,
    shape: tuple[int, ...],
    dtype: torch.dtype | None = None,
    target: Target | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Return values of `shape`. Rows are put into the model's order before they are decoded. scale: one
    factor per matrix."""
    encoded = reading.octets(info.file, info.offset, info.nbytes, info.name)
    if target is not None and target.index is not None:
        encoded = target.to_hf(encoded.view(shape[0], -1))
    encoded = encoded.view(math.prod(shape[:-1]), -1)
    if info.dtype in PLAIN:
        values = encoded.view(DTYPES[info.dtype])
        return values.to(dtype or values.dtype).view(shape)
    values = torch.empty(len(encoded), shape[-1], dtype=dtype or torch.float32)
    step = max(1, CHUNK // shape[-1])
    for start in range(0, len(encoded), step):
        part = slice(start, start + step)
        rows = decode_rows(info.dtype, encoded[part], shape[-1])
        if scale is not None:
            rows *= scale.repeat_interleave(len(encoded) // len(scale))[part, None]
        values[part] = rows
    return values.view(shape)
