"""Importance matrices as llama-imatrix writes them: how much each input column of a matrix matters.

A GGUF file holds, for every matrix, Σx² of each input column over the calibration tokens (`NAME.in_sum2`) and
the number of these tokens (`NAME.counts`). Source: llama.cpp, `tools/imatrix/imatrix.cpp` and
`common/imatrix-loader.cpp`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from quantkit.errors import USAGE, QuantkitError, name_all, require, unreadable
from quantkit.models.files import gguf_file, gguf_writer, reading
from quantkit.models.files.safetensors_folder import TensorInfo

DATASETS, CHUNK_COUNT, CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
SUMS, COUNTS = ".in_sum2", ".counts"
HINT = "make one with quantkit imatrix MODEL -o FILE.gguf, or with llama-imatrix"


@dataclass(frozen=True)
class Imatrix:
    """An importance matrix. sums: Σx² float32 `[in]`, by GGUF name; counts: tokens, float32 `[1]`.

    Stacked experts have sums `[experts, in]` and counts `[experts]`. chunk_count: sequences of `chunk_size`
    tokens; 0 if unknown. datasets: names of the texts.
    """

    sums: Mapping[str, Tensor]
    counts: Mapping[str, Tensor]
    datasets: tuple[str, ...] = ()
    chunk_count: int = 0
    chunk_size: int = 0

    def values(self) -> dict[str, Tensor]:
        """Return the mean of x² per column, by name, as llama-quantize uses it; 1 without tokens."""
        means = {}
        for name, sums in self.sums.items():
            counts = self.counts[name][:, None]
            rows = torch.where(counts > 0, sums.reshape(len(counts), -1) / counts, 1.0)
            means[name] = rows.reshape(sums.shape)
        return means

    def metadata(self, file: str) -> dict[str, Any]:
        """Return the keys by which llama-quantize records the importance matrix `file` that it used."""
        dataset = {"quantize.imatrix.dataset": self.datasets[0]} if self.datasets else {}
        chunks = {"quantize.imatrix.chunks_count": self.chunk_count} if self.chunk_count else {}
        entries = {"quantize.imatrix.entries_count": len(self.sums)}
        return {"quantize.imatrix.file": file} | dataset | entries | chunks


def write(path: Path, imatrix: Imatrix) -> None:
    """Write a GGUF file, completely or not at all. `read` returns the same sums and counts.

    For experts llama-imatrix writes sums `[experts, in]` and counts `[experts, 1]`.
    """
    metadata = {
        "general.type": "imatrix",
        DATASETS: list(imatrix.datasets),
        CHUNK_COUNT: imatrix.chunk_count,
        CHUNK_SIZE: imatrix.chunk_size,
    }
    tensors = {}
    for name in sorted(imatrix.sums):
        tensors[name + SUMS] = imatrix.sums[name]
        counts = imatrix.counts[name]
        tensors[name + COUNTS] = counts if len(counts) == 1 else counts[:, None]
    entries = [gguf_writer.Entry(name, "F32", tuple(tensor.shape)) for name, tensor in tensors.items()]
    with gguf_writer.writing(path, metadata, entries) as write:
        for name, tensor in tensors.items():
            write(name, [tensor.numpy()])


def read(path: Path) -> Imatrix:
    """Read an importance matrix in GGUF. Raises QuantkitError if the file is another kind or damaged."""
    try:
        with open(path, "rb") as file:
            magic = file.read(len(gguf_file.MAGIC))
    except OSError as error:
        raise unreadable(f"importance matrix {path}", error, HINT) from error
    hint = f"if it is an older .dat file: llama-imatrix --in-file {path} -o NEW.gguf; else {HINT}"
    require(magic == gguf_file.MAGIC, f"{path} is not an importance matrix in GGUF", hint, USAGE)
    metadata, infos = gguf_file.read_header(path)
    names = _names(path, metadata, infos)
    sums = {name: _load(path, infos[name + SUMS]) for name in names}
    counts = {name: _load(path, infos[name + COUNTS]).flatten().add(0.5).floor() for name in names}
    for name in names:
        if sums[name].numel() % counts[name].numel():
            _refuse(path, f"{name} has {sums[name].numel()} sums and {counts[name].numel()} counts")
        sums[name] = sums[name].reshape(counts[name].numel(), -1).squeeze(0)
        finite = torch.isfinite(sums[name]).all() and torch.isfinite(counts[name]).all()
        if not finite or sums[name].min() < 0:
            _refuse(path, f"{name} has values that are no sums of squares")
    datasets = metadata[DATASETS] if isinstance(metadata[DATASETS], list) else [metadata[DATASETS]]
    return Imatrix(sums, counts, tuple(map(str, datasets)), metadata[CHUNK_COUNT], metadata[CHUNK_SIZE])


def of_model(path: Path, shapes: Mapping[str, Sequence[int]]) -> Imatrix:
    """Return the importance matrix at `path`. Raises QuantkitError if it belongs to another model. shapes: of
    the model's tensors, by GGUF name."""
    imatrix = read(path)
    matrices = {name: shape for name, shape in shapes.items() if len(shape) > 1 and "_norm." not in name}
    foreign = [
        f"{name} ({sums.numel()})"
        for name, sums in imatrix.sums.items()
        if name not in matrices or sums.numel() != math.prod(shapes[name]) // shapes[name][-2]
    ]
    what = f"{path} is an importance matrix of another model: {name_all(foreign)}"
    require(not foreign, what, "make one of this model with quantkit imatrix", USAGE)
    return imatrix


def _refuse(path: Path, why: str) -> NoReturn:
    raise QuantkitError(f"{path} is not an importance matrix, or a damaged one: {why}", HINT, USAGE)


def _names(path: Path, metadata: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> list[str]:
    """Return the names of the matrices. Raises QuantkitError if keys or tensors are missing."""
    names = sorted(name.removesuffix(SUMS) for name in infos if name.endswith(SUMS))
    if not names:
        what = metadata.get("general.architecture")
        _refuse(path, f"it is a model, of architecture {what}" if what else f"no tensor ends in {SUMS}")
    missing = [key for key in (DATASETS, CHUNK_COUNT, CHUNK_SIZE) if key not in metadata]
    counted = [name.removesuffix(COUNTS) for name in infos if name.endswith(COUNTS)]
    missing += [name + COUNTS for name in sorted({*names} ^ {*counted})]
    if missing:
        _refuse(path, f"half of it is missing: {name_all(missing)}")
    if not all(type(metadata[key]) is int for key in (CHUNK_COUNT, CHUNK_SIZE)):
        _refuse(path, f"{CHUNK_COUNT} and {CHUNK_SIZE} are no whole numbers")
    return names


def _load(path: Path, info: TensorInfo) -> Tensor:
    """Return the float32 tensor at a checked location."""
    if info.dtype != "F32":
        _refuse(path, f"{info.name} is {info.dtype}, not F32")
    return reading.tensor(info)
