"""Grids of the types in GGUF files (llama.cpp, ggml/src/ggml-common.h and ggml-quants.c).

A ggml block of 32 weights has one scale; a super-block of 256 weights has a float16 scale for the small
integer scales of its sub-blocks. `quantize` makes the same choice as ggml's own encoder; `fit` and `round`
serve error feedback.

Begin with `params.py` (stored parameters) and `block.py` (base class of the types). Encoders: `legacy.py`
(the simplest), `kquants.py`, `iq4.py`; they choose scales with `search.py`, bit for bit as ggml does.

`iquants.py` takes vectors from a `codebook.py` by ggml's search among neighbours; error feedback finds
vectors with `nearest.py`. `fp4.py` has 4-bit floats.
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
