"""A GGUF file of the integers that another layout stores: Q4_0 and Q8_0 hold their codes and scales.

Both types have groups of 32 and a float16 scale: `d * (code - 8)`, and `d * (code - 128)` (ggml-common.h).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quantkit.errors import UNSUPPORTED, name_all, require
from quantkit.grids.affine import AffineGrid
from quantkit.grids.ggml import named
from quantkit.grids.ggml.block import BlockGrid
from quantkit.grids.ggml.params import Scale
from quantkit.grids.grid import QuantizedWeight
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.gguf.file_types import number
from quantkit.quantize.methods import gguf
from quantkit.quantize.outputs import Material
from quantkit.quantize.outputs.gguf import GgufOutput
from quantkit.quantize.progress import Progress

FILES = {"q4_0": "Q4_0", "q8_0": "Q8_0"}  # --to -> file type


def grid_of(to: str, grid: AffineGrid) -> BlockGrid:
    """Return the type that stores a grid's codes: more than 4 bits are Q8_0 in a file of Q4_0 as well."""
    return named("Q8_0" if grid.bits > 4 else FILES[to])


def blocks(weight: QuantizedWeight, grid: BlockGrid) -> QuantizedWeight:
    """Return a weight with affine codes in ggml blocks. What does not fit the type is another value then."""
    zero = weight.params.zero.repeat_interleave(weight.grid.group_size, 1)
    codes = (weight.codes - zero + grid.offset).clamp(0, 2 * grid.offset - 1).to(torch.uint8)
    scale = weight.params.scale.repeat_interleave(weight.grid.group_size, 1)[:, :: grid.group_size]
    return QuantizedWeight(grid, codes, Scale(scale.half().float()))


def file_of(to: str, material: Material, progress: Progress) -> GgufOutput:
    """Return the file's output: staged linears keep their types, and other matrices the type that they have.

    Raises QuantkitError naming linears that llama.cpp stores in parts, and experts of several types.
    """
    options = gguf.Options(type=("F16",), solver="rtn", imatrix="none")
    method, checkpoint = gguf.build(options, skeleton=material.skeleton), material.checkpoint
    for note in method.notes:
        progress.warn(note)
    output, chosen = method.output, dict(method.output.chosen)
    types = {f"{row.name}.weight": row.grid.name for row in material.specs if row.grid}
    hint = "quantize the original model with quantkit gguf"
    for target in output.targets:
        found = {types.get(name) or checkpoint.plain_dtype(name) for name in target.stored}
        if chosen[target.name] == "F16":  # a matrix
            what = f"llama.cpp stores {name_all(target.stored, 3)} in another way: as {target.name}"
            whole = len(found) == 1 and not (target.part and found.intersection(types.values()))
            require(whole, what, hint, UNSUPPORTED)
            (chosen[target.name],) = found
    metadata = output.metadata | {"general.file_type": number(FILES[to])}
    return replace(output, chosen=chosen, metadata=metadata)


def names_in(output: GgufOutput, written: Checkpoint) -> dict[str, str]:
    """Return the names of the file's tensors when it is opened, by their names in the source."""
    found = {target.name: target.parameters for target in written.targets.values()}
    rows = (row for row in output.targets if row.stored and row.name in found)
    return {name: own for row in rows for name, own in zip(row.stored, found[row.name], strict=True)}
