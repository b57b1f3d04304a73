"""Whether quantized linears are stored whole, and as `quantization_config` says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from quantkit.errors import QuantkitError, name_all
from quantkit.inspection.stored import Weight, all_headers
from quantkit.layouts._headers import Numbers
from quantkit.models.headers import Contents

CODE_TYPES = {"I8", "U8", "F8_E4M3", "F8_E5M2"}  # of weights that mean nothing without scales


def problems(contents: Contents, weights: Sequence[Weight]) -> Iterator[str]:
    """Parts that are absent, and bits and groups that contradict the configuration."""
    coded = {weight.name.removesuffix(".weight"): weight for weight in weights if weight.codes}
    for linear, weight in coded.items():
        if weight.codes.problem:
            yield f"{linear}.weight: {weight.codes.problem}"
    yield from _absent_parts(contents, coded)
    yield from _headless(contents, weights, coded)
    told = {linear: (weight.dtype, weight.codes) for linear, weight in coded.items()}
    for headers in all_headers():
        yield from headers.contradicted(contents.quantization, told)
    yield from _numbers(contents, coded)


def _absent_parts(contents: Contents, coded: Mapping[str, Weight]) -> Iterator[str]:
    names = contents.infos.keys() | contents.absent
    forms = {linear: weight.codes.form for linear, weight in coded.items()}
    lost: dict[str, list[str]] = {}
    for headers in all_headers():
        shared = {
            (form, part)
            for linear, form in forms.items()
            for part in headers.shared.get(form, ())
            if f"{linear}.{part}" in names
        }
        for linear, form in forms.items():
            parts = [part for known, part in shared if known == form]
            if form in headers.needed:
                ending = f"{linear}."
                own = {n.removeprefix(ending): i for n, i in contents.infos.items() if n.startswith(ending)}
                parts += headers.needed[form](own)
            for part in parts:
                if f"{linear}.{part}" not in names:
                    lost.setdefault(part, []).append(linear)
    for part, linears in sorted(lost.items()):
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


def _numbers(contents: Contents, coded: Mapping[str, Weight]) -> Iterator[str]:
    """Bits and groups, as shapes tell them, against the configuration."""
    unlike: dict[tuple[str, str], list[str]] = {}
    for headers in all_headers():
        try:
            promised = headers.promised(contents.quantization)
        except QuantkitError as error:
            yield error.message
            continue
        for linear, weight in coded.items():
            codes = weight.codes
            told = promised(linear) if promised and codes.form in headers.shared else None
            if not told or codes.problem or codes.shape is None:
                continue
            columns, stored = codes.shape[1], (int(codes.bits), codes.group_size)
            if all((bits, _groups(size, columns)) != (codes.bits, _groups(codes.group_size, columns))
                   for bits, size in told):  # fmt: skip
                words = " or ".join(map(_words, dict.fromkeys(told)))
                unlike.setdefault((words, _words(stored)), []).append(linear)
    for (words, stored), linears in unlike.items():
        verb = "holds" if len(linears) == 1 else "hold"
        yield f"quantization_config says {words}, but {name_all(linears, 3)} {verb} {stored}"


def _groups(size: int | None, columns: int) -> int:
    """Groups of a row; at least one, where they are wider than that."""
    return -(-columns // size) if size else 1


def _words(numbers: Numbers) -> str:
    bits, size = numbers
    return f"{bits} bit in groups of {size}" if size else f"{bits} bit in whole rows"
