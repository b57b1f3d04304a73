"""Convert a checkpoint of integers to another layout. Codes and scales stay, so no weight changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import (
    UNSUPPORTED,
    USAGE,
    VERIFICATION,
    QuantkitError,
    count,
    name_all,
    refuse_problems,
    require,
)
from quantkit.grids.affine import AffineGrid
from quantkit.grids.biased import BiasedGrid, BiasedParams
from quantkit.grids.grid import QuantizedWeight
from quantkit.inspection import verify
from quantkit.layouts import DTYPE_BYTES, Layout, LinearSpec, quantization_of
from quantkit.layouts.awq import AwqLayout
from quantkit.layouts.compressed_tensors import CompressedTensorsLayout
from quantkit.layouts.compressed_tensors.integers import PackQuantized
from quantkit.layouts.gptq import SPLIT, GptqLayout
from quantkit.layouts.mlx import MlxLayout
from quantkit.models.files import checksums, safetensors_folder, untrusted
from quantkit.models.files.checkpoint import MANIFEST, Checkpoint
from quantkit.models.files.open import open_checkpoint, watched
from quantkit.models.files.reading import Rewritten
from quantkit.models.skeleton import Skeleton
from quantkit.models.skeleton.linears import linears
from quantkit.options import RunOptions
from quantkit.quantize.outputs import Material
from quantkit.quantize.outputs.finish import FAULTY
from quantkit.quantize.outputs.folder import write_json
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging import may_replace
from quantkit.quantize.staging.folder import Staging, disk_errors

SHARD_BYTES = int(RunOptions.max_shard_gb * 1e9)
TO = ("gptq", "awq", "compressed-tensors", "mlx")
READ, WRITTEN = "reading the linears", "checking the linears that were written"


def convert(source: str, to: str, output: Path, overwrite: bool, progress: Progress) -> dict[str, Any]:
    """Write the checkpoint `source` to the folder `output` in the layout `to`, and return a record.

    Codes and scales are packed anew, all other tensors are copied. The output is read back: every weight must
    be the source's, bit for bit. MLX's kernels round products to float16, so for `mlx` scales, offsets and
    codes are compared instead. Raises QuantkitError naming every linear that the layout cannot hold exactly.
    """
    require(to in TO, f"--to {to}: no such layout", f"choose {', '.join(TO)}", USAGE)
    checkpoint = open_checkpoint(source)
    stored = quantization_of(checkpoint.raw_config).get("quant_method")
    what = f"{source} is in the layout {stored}" if checkpoint.quantized else f"{source} is not quantized"
    readable = stored in ("gptq", "awq", "compressed-tensors") and checkpoint.folder.is_dir()
    require(
        readable, what, "convert reads folders in the gptq, awq and compressed-tensors layouts", UNSUPPORTED
    )
    what = f"{source} also rounds the inputs of linears, which convert does not keep"
    require(
        not checkpoint.layout.rounds_inputs, what, "quantize the original model for this layout", UNSUPPORTED
    )
    staging = Staging(output)
    may_replace.check_source(output, checkpoint.folder)
    staging.check(False, overwrite)
    refuse_problems({}, verify.verify(source, None, progress.counting)["problems"], VERIFICATION)
    with disk_errors(staging.folder, "run the same command again"), watched(checkpoint):
        identity = {"quantkit": "convert", "source_sha256": None, "source": source, "to": to}
        with staging.opened(identity, resume=False, lasting=False):
            material = _material(checkpoint, to, staging, progress)
            with staging.assemble() as place:
                _write(material, to, place)
            _compare(material, to, open_checkpoint(str(place)), progress)
            staging.publish()
    packed = [row for row in material.specs if row.grid]
    return {
        "schema": "quantkit.convert/1",
        "source": source,
        "output": str(output),
        "from": stored,
        "to": to,
        "linears": len(packed),
        "source_bytes": checkpoint.stored_bytes,
        "output_bytes": open_checkpoint(str(output)).stored_bytes,
    }


def _material(checkpoint: Checkpoint, to: str, staging: Staging, progress: Progress) -> Material:
    """Return the source's linears with the grids that the new layout stores. Raises QuantkitError for
    linears that do not fit."""
    skeleton = Skeleton(checkpoint, torch.float32, torch.device("cpu"))
    skeleton.names.check_complete()
    packed = set(checkpoint.packed)
    if packed - {row.name for row in linears(skeleton)} and not checkpoint.text_config.tie_word_embeddings:
        skeleton.add_head()
    rows, grids, zeros = linears(skeleton), {}, set()  # zeros: those that are not in the middle
    outside = packed - {row.name for row in rows}
    refused = {name: "no linear of a block and no head" for name in outside}
    for done, row in enumerate(found := [row for row in rows if row.name in packed]):
        progress.counting(READ, done, len(found))
        weight = _weight(checkpoint, row)
        if not isinstance(weight.grid, AffineGrid):
            refused[row.name] = "no integers with zero points"
        elif weight.column_group is not None and to != "gptq":
            refused[row.name] = "the order of columns (--act-order full)"
        else:
            grids[row.name], zero = weight.grid, weight.params.zero
            zeros |= set(zero.unique().tolist()) - {1 << weight.grid.bits - 1}
    grids = {name: replace(grid, symmetric=not zeros) for name, grid in grids.items()}
    kept = {row.name: None if row.name in grids else "16 bit" for row in rows}
    specs = [replace(row, grid=grids.get(row.name), kept=kept[row.name]) for row in rows]
    layout = _layout(to, [row for row in specs if row.grid], 0 in zeros) if grids else None
    for row in (row for row in specs if row.grid):
        weight = _weight(checkpoint, row)
        if reason := layout.check(row):
            refused[row.name] = reason
        elif not _same(weight, layout.of_job([row]).at(row.name).decode(_encoded(layout, to, weight))):
            refused[row.name] = "scales or offsets need more than float16"
    if refused:
        reasons = dict.fromkeys(refused[name] for name in sorted(refused))
        named = {why: name_all(sorted(n for n in refused if refused[n] == why)) for why in reasons}
        why = "; ".join(f"{reason}: {names}" for reason, names in named.items())
        message = f"{to} cannot hold {count(len(refused), 'linear')} of {checkpoint.source} exactly: {why}"
        raise QuantkitError(message, "quantize the original model for this layout", UNSUPPORTED)
    if to == "mlx":
        specs = [replace(row, grid=row.grid and _biased(row.grid)) for row in specs]
    return Material(skeleton, specs, layout.of_job(specs), staging, SHARD_BYTES, False)


def _biased(grid: AffineGrid) -> BiasedGrid:
    """Return MLX's grid with scales of the same type."""
    return BiasedGrid(grid.bits, grid.group_size, "float16")


def _layout(to: str, specs: Sequence[LinearSpec], has_zero: bool) -> Layout:
    """Return the layout with the bits and the group size of most linears. has_zero: a zero point is 0."""
    whole = all(spec.grid.group_size == spec.in_features for spec in specs)
    sizes = Counter((spec.grid.bits, -1 if whole else spec.grid.group_size) for spec in specs)
    (bits, size), symmetric = sizes.most_common(1)[0][0], specs[0].grid.symmetric
    if to == "gptq":
        version = 3 if bits in SPLIT else 2 if has_zero else 1
        return GptqLayout(bits, size, symmetric, desc_act=False, damp_percent=0.01, version=version)
    if to == "awq":
        return AwqLayout(size, not symmetric)
    if to == "mlx":
        return MlxLayout(bits, size)
    return CompressedTensorsLayout(PackQuantized(bits, size, symmetric))


def _weight(checkpoint: Checkpoint, row: LinearSpec) -> QuantizedWeight:
    """Return a linear as stored, with the symmetry that the new layout has for all."""
    weight = checkpoint.layout.at(row.name).decode(checkpoint.parts(f"{row.name}.weight"))
    return replace(weight, grid=row.grid) if isinstance(row.grid, AffineGrid) else weight


def _encoded(layout: Layout, to: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors of a linear in the new layout."""
    if to == "mlx":
        scale, zero = weight.params.scale, weight.params.zero
        params = BiasedParams(scale.half(), (-scale * zero).half())
        weight = QuantizedWeight(_biased(weight.grid), weight.codes, params)
    return layout.encode(weight)


def _same(weight: QuantizedWeight, other: QuantizedWeight) -> bool:
    """Return whether two weights are equal, before kernels round products."""
    if not isinstance(other.params, BiasedParams):
        return torch.equal(weight.values(), other.values())
    scale, offset = other.params.scale.float(), other.params.bias.float()
    same = torch.equal(scale, weight.params.scale) and torch.equal(offset, -scale * weight.params.zero)
    return same and torch.equal(weight.codes, other.codes)


def _write(material: Material, to: str, place: Path) -> None:
    """Write the folder. A linear is packed when its tensors are written."""
    checkpoint, layout = material.checkpoint, material.layout
    encoded = lru_cache(1)(lambda row: _encoded(layout.at(row.name), to, _weight(checkpoint, row)))
    infos = material.untouched()
    for row in (spec for spec in material.specs if spec.grid):
        for part, (dtype, shape) in layout.tensors(row).items():
            name, size = f"{row.name}.{part}", DTYPE_BYTES[dtype] * torch.Size(shape).numel()
            values = lambda exact, row=row, part=part: encoded(row)[part]  # noqa: E731
            infos[name] = Rewritten(name, dtype, shape, checkpoint.folder, 0, size, name, values)
    place.mkdir()
    made = checkpoint.with_tensors(infos, layout)
    safetensors_folder.write_folder(place, infos.values(), material.shard_bytes, made.data)
    checkpoint.write_companions(place)
    write_json(place / "config.json", layout.configured(checkpoint.raw_config, material.config))
    for name, content in material.files.items():
        write_json(place / name, content)
    if stored := checkpoint.manifest():
        manifest = untrusted.parse(stored.encode()) | {"converted": {"to": to}}
        write_json(place / MANIFEST, manifest | {"files": checksums.of_folder(place, ())})


def _compare(material: Material, to: str, written: Checkpoint, progress: Progress) -> None:
    """Raise QuantkitError (exit code 6) unless the linears read back are the source's."""
    packed = [row for row in material.specs if row.grid]
    for done, row in enumerate(packed):
        progress.counting(WRITTEN, done, len(packed))
        own = written.layout.at(row.name).decode(written.parts(f"{row.name}.weight"))
        if not _same(_weight(material.checkpoint, row), own):
            raise QuantkitError(f"{row.name} reads back as other values", FAULTY, VERIFICATION)
