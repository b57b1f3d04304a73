"""Whether quantized linears are stored whole, and as `quantization_config` says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from quantkit.errors import QuantkitError, name_all
from quantkit.inspection.stored import FP4, NF4, Weight
from quantkit.layouts._rules import rule_of, stored_rules
from quantkit.models.headers import Contents

# What every linear of a form is stored with, or none: some tools leave it out of all of them.
SHARED = {"gptq": ("qzeros", "g_idx"), "awq": ("qzeros",), "pack-quantized": ("weight_shape",)}
OF_4_BIT = ("weight.absmax", "weight.quant_map")
NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
# Parts that mean nothing without the others; those of 4 bit lie beside a `weight` that looks like a plain one
TELLING = (".qzeros", ".g_idx", ".SCB", ".weight_scale", ".weight_shape", ".weight_zero_point",
           *(f".{part}" for part in (*OF_4_BIT, *NESTED, NF4, FP4)))  # fmt: skip
CODE_TYPES = ("I8", "U8", "F8_E4M3", "F8_E5M2")
Numbers = tuple[int, int | None]  # bits, and columns of a group: None for whole rows


def problems(contents: Contents, weights: Sequence[Weight]) -> Iterator[str]:
    """Parts that are absent, and bits and groups that contradict the configuration."""
    coded = {weight.name.removesuffix(".weight"): weight for weight in weights if weight.codes}
    for linear, weight in coded.items():
        if weight.codes.problem:
            yield f"{linear}.weight: {weight.codes.problem}"
    yield from _absent_parts(contents, coded)
    yield from _headless(contents, weights, coded)
    yield from _flags(contents.quantization, coded)
    yield from _numbers(contents, coded)


def _flags(config: Mapping[str, Any], coded: Mapping[str, Weight]) -> Iterator[str]:
    """What kind of codes the configuration announces, against those that are there."""
    forms = {weight.codes.form for weight in coded.values()}
    four, eight = bool(config.get("load_in_4bit")), bool(config.get("load_in_8bit"))
    if forms & {"nf4", "fp4"} and not four:
        yield f"quantization_config does not say load_in_4bit, the weights are {name_all(sorted(forms))}"
    if "int8" in forms and config.get("quant_method") == "bitsandbytes" and not eight:
        yield "quantization_config does not say load_in_8bit, the weights are int8"
    if forms & {"gptq", "awq"} and config.get("group_size", -1) in (0, None, ""):
        yield f"quantization_config says groups of {config['group_size']!r}"
    wide = [
        linear
        for linear, weight in coded.items()
        if weight.codes.form in ("gptq", "awq") and weight.dtype not in ("I32", "U32")
    ]
    if wide and config.get("pack_dtype", "int32") == "int32":
        yield f"the codes of {name_all(wide, 3)} are no 32-bit words"


def _absent_parts(contents: Contents, coded: Mapping[str, Weight]) -> Iterator[str]:
    names = contents.infos.keys() | contents.absent
    forms = {linear: weight.codes.form for linear, weight in coded.items()}
    shared = {
        (form, part)
        for linear, form in forms.items()
        for part in SHARED.get(form, ())
        if f"{linear}.{part}" in names
    }
    lost: dict[str, list[str]] = {}
    for linear, form in forms.items():
        parts = [part for known, part in shared if known == form]
        if form in ("nf4", "fp4"):
            absmax = contents.infos.get(f"{linear}.{OF_4_BIT[0]}")
            parts += OF_4_BIT + (NESTED if absmax is not None and absmax.dtype == "U8" else ())
        for part in parts:
            if f"{linear}.{part}" not in names:
                lost.setdefault(part, []).append(linear)
    for part, linears in sorted(lost.items()):
        yield f"{part}, which clients need, is absent from {name_all(linears, 3)}"


def _headless(contents: Contents, weights: Sequence[Weight], coded: Mapping[str, Weight]) -> Iterator[str]:
    """Scales without codes, codes without scales."""
    if contents.absent:  # the rest may lie in a shard that could not be read
        return
    types = {weight.dtype for weight in coded.values()} & {*CODE_TYPES}
    lost = {
        weight.name.removesuffix(part)
        for weight in weights
        for part in TELLING
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
    try:
        promised = _promised(contents.quantization)
    except QuantkitError as error:
        yield error.message
        return
    unlike: dict[tuple[str, str], list[str]] = {}
    for linear, weight in coded.items():
        codes = weight.codes
        told = promised(linear) if promised and codes.form in SHARED else None
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


def _promised(config: Mapping[str, Any]) -> Callable[[str], list[Numbers]] | None:
    """What the configuration says of a linear: one of these. None for one that is not understood here.

    Raises QuantkitError for rules that are none.
    """
    method = config.get("quant_method")
    if method == "compressed-tensors":
        groups = config.get("config_groups")
        found = [_group(group) for group in groups.values()] if isinstance(groups, dict) else []
        return (lambda linear: [told for told in found if told]) if found and all(found) else None
    bits, size = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
    form = config.get("checkpoint_format") or config.get("format") or "gptq"
    if type(bits) is not int or type(size) is not int or size == 0:
        return None
    if method == "awq":
        return lambda linear: [(bits, size if size > 0 else None)]
    if method != "gptq" or form not in ("gptq", "gptq_v2") or config.get("pack_dtype", "int32") != "int32":
        return None
    rules = stored_rules(config)

    def of_linear(linear: str) -> list[Numbers]:
        told = {"bits": bits, "group_size": size} | rule_of(rules, linear)
        known = type(told["bits"]) is type(told["group_size"]) is int and told["group_size"]
        return [(told["bits"], told["group_size"] if told["group_size"] > 0 else None)] if known else []

    return of_linear


def _group(group: Any) -> Numbers | None:
    """A config group of compressed-tensors, where its strategy is one of columns or whole rows."""
    told = group.get("weights") if isinstance(group, dict) else None
    told = told if isinstance(told, dict) else {}
    bits, size = told.get("num_bits"), told.get("group_size")
    if type(bits) is not int:
        return None
    if told.get("strategy") == "channel":
        return bits, None
    return (bits, size) if told.get("strategy") == "group" and type(size) is int and size > 0 else None


def _groups(size: int | None, columns: int) -> int:
    """Groups of a row; at least one, where they are wider than that."""
    return -(-columns // size) if size else 1


def _words(numbers: Numbers) -> str:
    bits, size = numbers
    return f"{bits} bit in groups of {size}" if size else f"{bits} bit in whole rows"
