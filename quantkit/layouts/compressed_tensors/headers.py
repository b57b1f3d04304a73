"""compressed-tensors linears as headers show them; modelopt's, too, which have the same names. No torch."""

from __future__ import annotations

import math

from quantkit.layouts._headers import (
    WORD,
    Codes,
    Config,
    Headers,
    Mark,
    Parts,
    Stored,
    group_size,
    number,
    words,
)

PARTS = (
    "weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
    "weight_global_scale", "weight_scale_2", "input_scale", "input_global_scale", "input_zero_point",
)  # fmt: skip


def _read(parts: Parts, stored: Stored) -> Codes:
    """Packed integers or floats with `weight_scale`, or `weight` itself of 8 bits, which of modelopt are two
    4-bit floats a byte."""
    scales = parts["weight_scale"].shape if "weight_scale" in parts else ()
    groups = scales[1] if len(scales) == 2 else 1
    packed = parts.get("weight_packed")
    if packed is None:
        return _unpacked(parts["weight"].shape, parts["weight"].dtype, scales, groups)
    if len(packed.shape) != 2 or not scales or scales[0] not in (1, packed.shape[0]):
        return Codes("pack-quantized", 0, None, None, 0, f"weight_scale {list(scales)} does not fit")
    if packed.dtype == "U8":  # two 4-bit floats a byte
        shape = (packed.shape[0], 2 * packed.shape[1])
        form = "nvfp4" if "weight_global_scale" in parts else "mxfp4"
        return Codes(form, 4, group_size(shape[1], groups), shape, math.prod(shape))
    return _packed_integers(parts, groups, stored)


def _unpacked(shape: tuple[int, ...], dtype: str, scales: tuple[int, ...], groups: int) -> Codes:
    if dtype == "U8" and len(shape) == 2 and shape[:1] == scales[:1]:
        shape = (shape[0], 2 * shape[1])
        return Codes("nvfp4", 4, group_size(shape[1], groups), shape, math.prod(shape))
    form = "float8" if dtype.startswith("F8") else "int8"
    fits = len(shape) == 2 and (len(scales) < 2 or scales[0] in (1, shape[0]) or scales[0] < shape[0])
    why = "" if fits else f"weight_scale {list(scales)} does not fit weight {list(shape)}"
    size = group_size(shape[1], groups) if fits else None
    return Codes(form, 8, size, tuple(shape) if fits else None, math.prod(shape), why)


def _packed_integers(parts: Parts, groups: int, stored: Stored) -> Codes:
    """Of how many bits a linear's codes are, is what its words, its shape and some config group agree on."""
    packed = parts["weight_packed"]
    held, widths = packed.shape[1], _widths(stored.quantization)
    lacks = () if "weight_shape" in parts else ("weight_shape",)
    told = stored.small_tensor(parts["weight_shape"].name) if "weight_shape" in parts else None
    if told is not None and len(told) == 16:
        shape = tuple(int.from_bytes(told[at : at + 8], "little") for at in (0, 8))
        fits = [bits for bits in widths if shape[0] == packed.shape[0] and words(shape[1], bits) == held]
    else:
        columns = {bits: groups * size if size > 0 else held * WORD // bits for bits, size in widths.items()}
        fits = [bits for bits in widths if words(columns[bits], bits) == held]
        shape = (packed.shape[0], columns[fits[0]]) if fits else tuple(packed.shape)
    if not fits:
        why = f"weight_packed {list(packed.shape)} does not fit weight_shape {list(shape)}"
        return Codes("pack-quantized", 0, None, None, 0, why, lacks)
    size = group_size(shape[1], groups, widths[fits[0]])
    return Codes("pack-quantized", fits[0], size, shape, math.prod(shape), lacks=lacks)


def _widths(config: Config) -> dict[int, int]:
    """Bits that config groups name, with the group size of the first that does."""
    widths: dict[int, int] = {}
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        told = group.get("weights") if isinstance(group, dict) else None
        if isinstance(told, dict) and 2 <= (bits := number(told, "num_bits")) <= 8:
            widths.setdefault(bits, number(told, "group_size"))
    return widths


HEADERS = Headers(
    marks=(
        Mark("weight_packed", "weight_packed", PARTS, _read),
        Mark("weight_scale", "weight", PARTS, _read),
    ),
    telling=(".weight_scale", ".weight_shape", ".weight_zero_point"),
    of_cache=(".k_scale", ".v_scale"),
    counted="pack-quantized",
)
