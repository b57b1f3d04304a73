"""One GGUF file, also in shards: staged tensors are copied, all others encoded while the file is written.

If no linear has a solver (`--solver rtn`, or floats), the whole file is encoded in this way: one pass over
the source, one tensor at a time, for all requested files.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import USAGE, QuantkitError, count, name_all
from quantkit.grids.ggml import TYPES, named
from quantkit.layouts import Layout, LinearSpec, Statistic
from quantkit.layouts.ggml.blocks import PLAIN, decode_rows, encode_rows, separate_scale, vanished
from quantkit.models.files import card, checksums, gguf_file, gguf_shards, gguf_writer, reading
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.gguf_writer import Entry, in_files, in_shards
from quantkit.models.files.headers import LOSS, Contents
from quantkit.models.files.reading import Computed
from quantkit.models.files.safetensors_folder import TensorInfo
from quantkit.models.gguf.imatrix import Imatrix
from quantkit.models.gguf.mixtures import EMBEDDING, OUTPUT, scale_of, stays_float
from quantkit.models.gguf.tensors import Target
from quantkit.models.machine import distributed
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.outputs import Draft, Material, MeasureHead, Planned, Sizes, Summary
from quantkit.quantize.outputs.folder import Output, model_card
from quantkit.quantize.outputs.outside import replace_parameter, solved_rows
from quantkit.quantize.progress import Progress
from quantkit.quantize.solvers import Solver
from quantkit.quantize.staging.folder import Staging

FEW = 0.01  # share of weights too small for a float type that is not worth a warning: many models have some
UNREAD = re.compile(  # metadata of origin, which depend on names and folders
    r"general\.(name|quantized_by|license|languages|base_model)|quantkit\.|quantize\.|split\."
).match
LOSS_ROOM = 2048  # bytes reserved in the metadata for the loss, which is measured later


@dataclass(frozen=True)
class GgufOutput(Output):
    """See `Output`. targets: tensors of the file. types: of these, by name. metadata: of the file.

    imatrix: importance of input columns for encoding; None: all equal, or not measured yet. gathers: it is
    measured on calibration text first. origin: where the importance comes from.
    """

    targets: tuple[Target, ...]
    types: Mapping[str, str]
    metadata: Mapping[str, Any]
    imatrix: Imatrix | None = None
    gathers: bool = False
    origin: str = ""

    @property
    def needs(self) -> frozenset[Statistic]:
        return frozenset({Statistic.SQUARE} if self.gathers else ())

    @property
    def linears(self) -> dict[str, str]:
        """Stored name of a linear -> name of its weight in the file, for weights that are one tensor."""
        return {
            name.removesuffix(".weight"): target.name
            for target in self.targets
            for name in target.stored
            if target.part is None
        }

    def of_job(self, checkpoint: Checkpoint, specs: Sequence[LinearSpec]) -> GgufOutput:
        """Return the output with 16-bit types for kept linears."""
        kept = {f"{spec.name}.weight" for spec in specs if spec.kept}
        types = dict(self.types)
        for target in self.targets:
            if kept.intersection(target.stored) and not stays_float(target.name, target.shape):
                if others := sorted(set(target.stored) - kept):
                    what = f"{target.name} holds all experts in one type: {count(len(others), 'expert')} of "
                    what += f"it would be quantized, such as {others[0].removesuffix('.weight')}"
                    raise QuantkitError(what, "exclude all experts of a projection, or none", USAGE)
                info = checkpoint.infos.get(target.stored[0])
                types[target.name] = "BF16" if info and info.dtype == "BF16" else "F16"
        return replace(self, types=types)

    def rounded(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the source with tensors that the file holds in 16 bit rounded to their type."""
        infos = {}
        for target in self.targets:
            type = self.types[target.name]
            for name in target.stored if type in ("F16", "BF16") else ():
                info = checkpoint.infos.get(name)
                if info and info.dtype != type and target.part is None:
                    stored = type, info.shape, info.file, info.offset, info.nbytes
                    values = partial(_narrow, target, type, checkpoint, name)
                    infos[name] = Computed(name, *stored, values)
        return replace(checkpoint, infos=checkpoint.infos | infos) if infos else checkpoint

    def sizes(self, checkpoint: Checkpoint, specs: Sequence[LinearSpec], layout: Layout) -> Sizes:
        """Return the exact sizes of the output, computed from the types of all tensors."""
        entries = self._entries()
        packed = {entry.name: math.prod(entry.shape) for entry in entries if entry.type not in PLAIN}
        coded = packed.keys() | {f"{name.removesuffix('.weight')}.scale" for name in packed}
        return Sizes(
            total=sum(entry.nbytes for entry in entries),
            quantized=sum(entry.nbytes for entry in entries if entry.name in coded),
            weights=sum(packed.values()),
            matrices=len(packed),
        )

    def paths(self, material: Material) -> list[Path]:
        """Return the paths of the file, or of its shards."""
        shards = in_shards(self._entries(), material.shard_bytes)
        return gguf_shards.paths(material.staging.output, len(shards))

    def encoding(self, checkpoint: Checkpoint) -> int:
        """Return the bytes needed to encode the largest tensor or expert: its source and its codes twice."""
        largest = 0
        for target in self.targets:
            read = sum(checkpoint.infos[name].nbytes for name in target.stored if name in checkpoint.infos)
            read = 4 * math.prod(target.shape) if checkpoint.quantized else read  # decoded to float32
            codes = Entry(target.name, self.types[target.name], target.shape).nbytes
            largest = max(largest, (read + 2 * codes) // max(1, len(target.parts)))
        return largest

    def parameters(self, skeleton: Skeleton) -> int:
        """Return the number of parameters of the language model."""
        written = {name for target in self.targets for name in target.parameters}
        return sum(math.prod(shape) for name, shape in skeleton.names.shapes.items() if name in written)

    def planned(self, specs: Sequence[LinearSpec]) -> list[Planned]:
        """Return every matrix with its type, by its name in the file."""
        matrices = []
        for target in self.targets:
            if len(target.shape) >= 2:
                block = re.fullmatch(r"blk\.(\d+)\.(.+)", target.name)
                name, index = (block[2], int(block[1])) if block else (target.name, None)
                matrices.append(Planned(name, index, target.shape, self.types[target.name]))
        return matrices

    def install_rest(
        self, material: Material, solver: Solver, measure_head: MeasureHead, progress: Progress
    ) -> None:
        """Encode embedding and head before the first block, so that all blocks run with the encoded ones."""
        skeleton, checkpoint, staged = material.skeleton, material.checkpoint, material.staging
        types, outside = self.types, dict(skeleton.model.named_parameters(remove_duplicate=False))
        rest = [t for t in self.targets if len(t.shape) == 2 and t.parameters and t.parameters[0] in outside]
        if not distributed.broadcast(lambda: bool(staged.rest())):
            head = next(t for name in (OUTPUT, EMBEDDING) for t in rest if t.name == name)
            has_solver = types[head.name] in TYPES
            encoded = [target for target in rest if target is not head or not has_solver]
            if encoded:
                progress.phase("encoding " + name_all(target.name for target in encoded))
            blobs = {
                target.name: self._encoded(target, checkpoint, [types[target.name]], None, progress)[0][0]
                for target in encoded
            }
            if has_solver:
                progress.phase("measuring inputs of the output matrix")
                statistics = measure_head()
                progress.phase(f"solving {head.name}")
                weight, tied, grid = head.read(checkpoint), head.name == EMBEDDING, named(types[head.name])
                layout = material.layout
                solved, fallback = solved_rows(weight, grid, layout, material, solver, statistics, tied)
                blobs[head.name] = solved[layout.marker]
                _warn_of_lost(head, types[head.name], [weight], [blobs[head.name]], progress)
                if fallback:
                    progress.warn(f"{head.name}: {fallback}")
            staged.write_rest(blobs)
        own = {name for target in rest for name in target.parameters}
        for target in rest:
            (name,) = target.parameters
            coded = types[target.name], _staged_rows(staged, target.name), target.shape[1]
            replace_parameter(skeleton, name, own, partial(_decoded, *coded, skeleton.dtype))

    def write(self, drafts: Sequence[Draft], progress: Progress) -> None:
        """Write the files of one model in one pass over the source. Staged tensors require a single file."""
        material = drafts[0].material
        imatrix = next((draft.output.imatrix for draft in drafts if draft.output.imatrix), None)
        importance = imatrix.values() if imatrix else {}
        tensors, rest = material.staging.tensors(), material.staging.rest()
        staged, staged_scales = (_of_weights(tensors, part) for part in (".ggml", ".ggml_scale"))
        staged |= {target.stored[0]: rest[target.name] for target in self.targets if target.name in rest}
        # such as scaled norms, which the job changed but did not encode
        changed = {name: info for name, info in tensors.items() if name in material.checkpoint.names}
        source = material.checkpoint.with_changed(changed)
        with ExitStack() as stack:
            writers = []
            for draft in drafts:
                shards = in_shards(draft.output._entries(), draft.material.shard_bytes)
                metadata = draft.output._metadata(draft.manifest)
                sums = {checksums.IN_SHARD if len(shards) > 1 else checksums.IN_FILE: checksums.BLANK}
                writers.append(
                    stack.enter_context(in_files(draft.material.staging.assembled, metadata, shards, sums))
                )
            for position, target in enumerate(self.targets):
                progress.counting("writing tensors", position, len(self.targets))
                types = [draft.output.types[target.name] for draft in drafts]
                weights = _per_part(importance.get(target.name), len(target.parts))
                scales: list[list[float]] = [[] for _ in writers]
                for expert, matrix in enumerate(target.parts):
                    if matrix.stored and matrix.stored[0] in staged:
                        scale = staged_scales.get(matrix.stored[0])
                        added = [] if scale is None else reading.tensor(scale).tolist()
                        encoded = [(reading.tensor(staged[matrix.stored[0]]), added)]
                    else:
                        encoded = self._encoded(matrix, source, types, weights[expert], progress)
                    for write, (rows, added), file_scales in zip(writers, encoded, scales, strict=True):
                        moved = rows if target.index is None else rows.index_select(0, target.index)
                        write(target.name, [moved.contiguous().numpy()])
                        file_scales += added
                for write, type, file_scales in zip(writers, types, scales, strict=True):
                    if scale := scale_of(target.name, type, target.shape):
                        write(scale[0], [np.array(file_scales, np.float32)])
            progress.counting("writing tensors", len(self.targets), len(self.targets))
        for draft in drafts:
            for path in gguf_shards.existing(draft.material.staging.assembled):
                gguf_writer.seal(path)

    def unlike(self, material: Material, made: Contents) -> Iterator[str]:
        """See `Output`. The model's name and origin may differ."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "header.gguf"
            with gguf_writer.writing(path, self.metadata, ()):
                pass
            first = gguf_shards.first(made.path)
            again, there = (dict(_entries_of(side)) for side in (path, first))
        for key in sorted(key for key in again | there if again.get(key) != there.get(key)):
            yield f"the metadata {key} is not as the job writes it"
        if added := sorted(made.infos.keys() - {entry.name for entry in self._entries()}):
            yield f"tensors were added, which the job does not write: {name_all(added, 3)}"
        for target in (target for target in self.targets if target.values is not None):
            stored = made.infos.get(target.name)
            if not stored or not torch.equal(reading.tensor(stored).flatten(), target.values.flatten()):
                yield f"{target.name} is not as the job writes it"

    def describe(self, draft: Draft, summary: Summary) -> None:
        """Add the loss, and write the model card next to the file, but not over a card of another writer."""
        path = gguf_shards.first(draft.material.staging.assembled)
        if summary.loss:
            gguf_writer.fill(path, LOSS, json.dumps(asdict(summary.loss), ensure_ascii=False))
        card.write_own(card.path_of(Path(summary.output)), *model_card(path, draft, summary))

    def _encoded(
        self,
        target: Target,
        checkpoint: Checkpoint,
        types: Sequence[str],
        importance: Tensor | None,
        progress: Progress,
    ) -> list[tuple[Tensor, list[float]]]:
        """Return a tensor in each type: rows uint8 `[out, bytes]` in the model's order, and the separate
        scales of its matrices, if the type has them. Warns of weights that are too small for a type.

        Raises QuantkitError if weights are too large for a type.
        """
        values = target.read(checkpoint)
        if target.changed:
            values = target.to_gguf(values)
        matrices = values if values.ndim == 3 else [values if values.ndim == 2 else values[:, None]]
        weights = _per_part(importance, len(matrices))
        encoded = []
        for name in types:
            rows = [encode_rows(name, *pair) for pair in zip(matrices, weights, strict=True)]
            _warn_of_lost(target, name, matrices, rows, progress)
            scales = [separate_scale(name, matrix) for matrix in matrices]
            whole = torch.cat(rows) if len(rows) > 1 else rows[0]
            encoded.append((whole, [scale for scale in scales if scale is not None]))
        return encoded

    def _metadata(self, manifest: dict) -> dict[str, Any]:
        """Return the file's metadata including the manifest, without the sum of its tensors."""
        return {
            **self.metadata,
            **(self.imatrix.metadata(self.origin) if self.imatrix else {}),
            "quantkit.manifest": json.dumps(manifest, ensure_ascii=False),
            LOSS: " " * LOSS_ROOM,
        }

    def _entries(self) -> list[Entry]:
        """Return all tensors of the file in the order of writing."""
        entries = []
        for target in self.targets:
            entries.append(Entry(target.name, self.types[target.name], target.shape))
            if scale := scale_of(target.name, self.types[target.name], target.shape):
                entries.append(Entry(scale[0], "F32", scale[1]))
        return entries


def _entries_of(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the keys of metadata that clients compute with, and the bytes of their entries, with types."""
    header = gguf_file.read_whole_header(path)
    with path.open("rb") as file:
        data = file.read(header.end)
    for key, (start, end) in header.places.items():
        if not UNREAD(key):
            yield key, data[start:end]


def _of_weights(tensors: Mapping[str, TensorInfo], part: str) -> dict[str, TensorInfo]:
    """Return one kind of staged tensors, by the stored name of the linear's weight."""
    infos = ((name.removesuffix(part), info) for name, info in tensors.items() if name.endswith(part))
    return {f"{linear}.weight": info for linear, info in infos}


def _staged_rows(staged: Staging, name: str) -> Callable[[tuple[slice]], Tensor]:
    """Return a function that returns the bytes of some rows. Only rank 0 can read what is staged: several
    ranks keep all rows in memory."""
    if distributed.count() == 1:
        return partial(reading.tensor, staged.rest()[name])
    return distributed.broadcast(lambda: reading.tensor(staged.rest()[name])).__getitem__


def _decoded(
    type_name: str, stored: Callable[[tuple[slice]], Tensor], width: int, dtype: torch.dtype, rows: slice
) -> Tensor:
    """Return the values of some rows `[rows, width]`. stored: returns their bytes."""
    return decode_rows(type_name, stored((rows,)), width).to(dtype)


def _narrow(target: Target, type_name: str, checkpoint: Checkpoint, name: str) -> Tensor:
    """Return a tensor in a 16-bit type. Raises QuantkitError if weights are too large for the type."""
    exact = checkpoint.read(name)
    values = exact.to(reading.DTYPES[type_name])
    _vanished(target, type_name, exact.flatten(1), values.flatten(1).contiguous().view(torch.uint8))
    return values


def _warn_of_lost(
    target: Target, type_name: str, matrices: Sequence[Tensor], rows: Sequence[Tensor], progress: Progress
) -> None:
    """Warn of weights that are too small for a type. Raises QuantkitError if others are too large."""
    lost = sum(_vanished(target, type_name, *pair) for pair in zip(matrices, rows, strict=True))
    few = FEW * sum(matrix.numel() for matrix in matrices) if type_name in PLAIN else 0
    if lost > few:
        progress.warn(f"{target.name}: {count(lost, 'weight')} became 0, too small for {type_name}")


def _vanished(target: Target, type_name: str, weight: Tensor, rows: Tensor) -> int:
    """Return `vanished`, with the tensor's name in errors."""
    try:
        return vanished(type_name, weight, rows)
    except QuantkitError as error:
        hint = f"add --tensor-type '{re.escape(target.name)}=BF16'"
        raise QuantkitError(f"{target.name}: {error.message}", hint, error.exit_code) from error


def _per_part(importance: Tensor | None, parts: int) -> Sequence[Tensor | None]:
    """Return the importance of the input columns of each expert's matrix, `[in]`."""
    return [None] * parts if importance is None else importance.reshape(parts, -1)
