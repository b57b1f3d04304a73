"""Whether quantized linears are stored whole, and as `quantization_config` says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from quantkit import layouts
from quantkit.errors import UNSUPPORTED, QuantkitError, name_all
from quantkit.inspection.stored import Weight, all_headers
from quantkit.layouts._headers import Codes
from quantkit.models.files.headers import Contents

CODE_TYPES = {"I8", "U8", "F8_E4M3", "F8_E5M2"}  # of weights that mean nothing without scales


def problems(contents: Contents, weights: Sequence[Weight]) -> Iterator[str]:
    """Parts that are absent, and bits and groups that contradict the configuration."""
    coded = {weight.name.removesuffix(".weight"): weight for weight in weights if weight.codes}
    codes = {linear: weight.codes for linear, weight in coded.items()}
    yield from (f"{linear}.weight: {one.problem}" for linear, one in codes.items() if one.problem)
    yield from _absent_parts(contents, codes)
    yield from _headless(contents, weights, coded)
    for headers in all_headers():
        yield from headers.contradicted(contents.quantization, codes)
    yield from _numbers(contents, codes)


def _absent_parts(contents: Contents, coded: Mapping[str, Codes]) -> Iterator[str]:
    """What a linear's table names and no file holds; of parts that linears have all or none, once some do."""
    optional = {part for headers in all_headers() for part in headers.optional}
    lost: dict[str, list[str]] = {}
    for linear, codes in coded.items():
        for part in codes.lacks:
            if f"{linear}.{part}" not in contents.absent:
                lost.setdefault(part, []).append(linear)
    for part, linears in sorted(lost.items()):
        if part not in optional or len(linears) < len(coded):
            yield f"{part}, which clients need, is absent from {name_all(linears, 3)}"


def _headless(contents: Contents, weights: Sequence[Weight], coded: Mapping[str, Weight]) -> Iterator[str]:
    """Scales without codes, codes without scales."""
    if contents.absent:  # the rest may lie in a shard that could not be read
        return
    types = {weight.dtype for weight in coded.values()} & CODE_TYPES
    telling = {part for headers in all_headers() for part in headers.telling}
    lost = {
        weight.name.removesuffix(part)
        for weight in weights
        for part in telling
        if not weight.codes and weight.name.endswith(part)
    }
    lost |= {
        weight.name.removesuffix(".weight")
        for weight in weights
        if not weight.codes and weight.dtype in types and weight.name.endswith(".weight")
    }
    if lost:
        yield f"of a quantized linear's tensors, only some are stored: {name_all(sorted(lost), 3)}"


def _numbers(contents: Contents, coded: Mapping[str, Codes]) -> Iterator[str]:
    """Bits and groups, as shapes tell them, against the configuration."""
    contradicted: dict[tuple[str, str], list[str]] = {}
    for module in layouts.modules():
        counted = {linear: codes for linear, codes in coded.items() if codes.form == module.HEADERS.counted}
        try:
            layout = module.detect(contents.quantization) if counted else None
            for linear, codes in counted.items() if layout else ():
                told = None if codes.problem or codes.shape is None else layout.at(linear).numbers
                if told and layouts.unlike(told, codes.numbers, codes.shape[1]):
                    said = layouts.in_words(told), layouts.in_words(codes.numbers)
                    contradicted.setdefault(said, []).append(linear)
        except QuantkitError as error:
            if error.exit_code != UNSUPPORTED:  # no damage: others may understand it
                yield error.message
    for (told, stored), linears in contradicted.items():
        verb = "holds" if len(linears) == 1 else "hold"
        yield f"quantization_config says {told}, but {name_all(linears, 3)} {verb} {stored}"
