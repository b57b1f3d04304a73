"""Grids of the types in GGUF files (llama.cpp, ggml/src/ggml-common.h and ggml-quants.c).

A ggml block of 32 weights has one scale; a super-block of 256 weights has a float16 scale for the small
integer scales of its sub-blocks. `quantize` makes the same choice as ggml's own encoder; `fit` and `round`
serve error feedback.

Begin with `block.py` (stored parameters, base class of the types). Encoders: `legacy.py` (the simplest),
`kquants.py`, `iq4.py`; they choose scales with `search.py`, bit for bit as ggml does.

`iquants.py` takes vectors from a `codebook.py` by ggml's search among neighbours; error feedback finds
vectors with `nearest.py`. `fp4.py` has 4-bit floats.
"""

from quantkit.grids.ggml import fp4, iq4, iquants, kquants, legacy
from quantkit.grids.ggml.block import BlockGrid

GRIDS: dict[str, BlockGrid] = legacy.GRIDS | kquants.GRIDS | iq4.GRIDS | iquants.GRIDS | fp4.GRIDS
TYPES = tuple(GRIDS)


def named(name: str) -> BlockGrid:
    """Return the grid of a ggml type, one of TYPES. Raises KeyError for another name."""
    return GRIDS[name]
