"""Packed linears of bitsandbytes as their headers show them: codes, shapes and what is missing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping

from quantkit.errors import name_all
from quantkit.layouts._headers import Codes, Config, Headers, Mark, Parts, Stored

STATE, STATE_OF_FP4 = (f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
BLOCK, NESTED_BLOCK = 64, 256
OF_4_BIT = ("weight.absmax", "weight.quant_map")
NESTED = ("weight.nested_absmax", "weight.nested_quant_map")


def _read_int8(parts: Parts, stored: Stored) -> Codes:
    shape, scales = parts["weight"].shape, parts["SCB"].shape
    fits = len(shape) == 2 and scales == shape[:1]
    why = "" if fits else f"SCB {list(scales)} does not fit weight {list(shape)}"
    return Codes("int8", 8, None, tuple(shape) if fits else None, math.prod(shape), why)


def _read_4_bit(form: str, state: str) -> Mark:
    def read(parts: Parts, stored: Stored) -> Codes:
        """The shape stands in a JSON text beside the codes, which a hub's headers do not show."""
        weights = 2 * parts["weight"].nbytes
        text = stored.small_tensor(parts[state].name)
        try:
            told = json.loads(text) if text is not None else {}
            shape = tuple(map(int, told["shape"])) if "shape" in told else None
            block = int(told.get("blocksize", BLOCK))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return Codes(form, 4, None, None, weights, "its quantization state is not understood")
        why = "" if shape is None or math.prod(shape) == weights else f"{weights} codes for {list(shape)}"
        scales = parts.get("weight.absmax")
        held = math.prod(scales.shape) if scales else None
        if text is not None and held not in (None, -(-weights // max(1, block))):
            why = why or f"{held} scales for {weights} codes in blocks of {block}"
        return Codes(form, 4, block, shape, weights, why)

    return Mark(state, "weight", ("weight", *OF_4_BIT, *NESTED), read)


def _needed(parts: Parts) -> tuple[str, ...]:
    absmax = parts.get("weight.absmax")
    return OF_4_BIT + (NESTED if absmax is not None and absmax.dtype == "U8" else ())


def _contradicted(config: Config, coded: Mapping[str, tuple[str, Codes]]) -> Iterator[str]:
    """What kind of codes the configuration announces, against those that are there."""
    forms = {codes.form for _, codes in coded.values()}
    if forms & {"nf4", "fp4"} and not config.get("load_in_4bit"):
        yield f"quantization_config does not say load_in_4bit, the weights are {name_all(sorted(forms))}"
    ours = config.get("quant_method") == "bitsandbytes"
    if "int8" in forms and ours and not config.get("load_in_8bit"):
        yield "quantization_config does not say load_in_8bit, the weights are int8"


HEADERS = Headers(
    marks=(
        Mark("SCB", "weight", ("weight", "weight_format"), _read_int8),
        _read_4_bit("nf4", STATE),
        _read_4_bit("fp4", STATE_OF_FP4),
    ),
    needed={"nf4": _needed, "fp4": _needed},
    telling=(".SCB", *(f".{part}" for part in (*OF_4_BIT, *NESTED, STATE, STATE_OF_FP4))),
    contradicted=_contradicted,
)
