"""Grids of ggml's block types (llama.cpp, ggml/src/ggml-common.h and ggml-quants.c), the types of GGUF files.

A block of 32 weights has one scale; a super-block of 256 has a float16 scale for the small integer scales
of its sub-blocks. `quantize` chooses what ggml's own encoder does; `fit` and `round` serve error feedback.

Begin with `params.py` (what is stored) and `block.py` (what a block type is, but for its encoder). Then the
encoders: `legacy.py`, the plainest, `kquants.py`, `iq4.py`. They choose scales with `search.py`, ggml's own
searches to the bit.

`iquants.py` takes vectors from a `codebook.py`, by way of their neighbours as ggml does;
`nearest.py` is what error feedback looks for them with. `fp4.py` has 4-bit floats.
"""

from __future__ import annotations

import importlib

from quantkit.grids.ggml.block import BlockGrid

MODULES = {
    "legacy": ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    "kquants": ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    "iq4": ("IQ4_NL", "IQ4_XS"),
    "iquants": ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
    "fp4": ("MXFP4", "NVFP4"),
}
TYPES = tuple(name for names in MODULES.values() for name in names)


def named(name: str) -> BlockGrid:
    """Return the grid of a ggml type, one of TYPES. Raises KeyError for another name."""
    for module, names in MODULES.items():
        if name in names:
            return importlib.import_module(f"{__name__}.{module}").GRIDS[name]
    raise KeyError(name)
