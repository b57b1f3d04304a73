"""Linears that others' tools write and no layout here decodes, as headers show them."""

from __future__ import annotations

import math

from quantkit.layouts._headers import WORD, Codes, Headers, Mark, Parts, Stored, number


def _mxfp4_experts(parts: Parts, stored: Stored) -> Codes:
    """gpt-oss: `blocks [experts, out, groups, 16]`."""
    return Codes("mxfp4", 4, 32, None, 2 * parts["blocks"].nbytes)


def _mlx(parts: Parts, stored: Stored) -> Codes:
    """`weight [..., out, in * bits / 32]` as words, `scales` and `biases` `[..., out, groups]`; experts stand
    first. Linears may have bits of their own, so they are counted."""
    words, scales = parts["weight"], parts["scales"].shape
    size = number(stored.quantization, "group_size")
    fits = words.dtype == "U32" and len(scales) >= 2 and words.shape[:-1] == scales[:-1]
    if not (fits and size and scales[-1]):
        return Codes("mlx", 0, None, None, 0, f"scales {list(scales)} do not fit weight {list(words.shape)}")
    shape = (*scales[:-1], scales[-1] * size)
    bits = words.shape[-1] * WORD / shape[-1]
    why = "" if bits in (2, 3, 4, 5, 6, 8) else f"{bits:g} bits a weight by groups of {size}"
    matrix = (shape[0], shape[1]) if len(shape) == 2 else None
    return Codes("mlx", bits, size, matrix, math.prod(shape), why)


HEADERS = Headers(
    marks=(
        Mark("blocks", "blocks", ("scales",), _mxfp4_experts, separator="_"),
        Mark("scales", "weight", ("weight", "biases"), _mlx),
    )
)
