"""Parse a compressed-tensors configuration: the scheme of each linear.

`config_groups` pair a scheme with targets. A target is an exact module name, a pattern (`re:` and a regular
expression that matches from the start), or a class name. Exact names take precedence over patterns, and
patterns over classes. Of equal targets the later group counts; patterns are tried in alphabetical order.
Source: compressed-tensors 0.20 `utils/match.py: match_targets`, `lifecycle/apply.py`.
"""

import re
from dataclasses import dataclass

from quantkit.errors import RUNTIME, UNSUPPORTED, QuantkitError, compiled, require
from quantkit.layouts.compressed_tensors.floats import FloatQuantized, MxFp4Packed, MxFp8, NvFp4Packed
from quantkit.layouts.compressed_tensors.forms import Form, Numbers, described
from quantkit.layouts.compressed_tensors.integers import IntQuantized, PackQuantized

FORMS: dict[str, type[Form]] = {
    form.NAME: form for form in (PackQuantized, IntQuantized, FloatQuantized, MxFp8, MxFp4Packed, NvFp4Packed)
}
CLASSES = ("Linear", "Module")  # classes of an nn.Linear
PATTERN = "re:"
FLOAT8_CACHE = described(8, "float", "tensor")
CACHE_KEYS = ("num_bits", "type", "strategy", "dynamic")  # keys that change the computation
MALFORMED, AGAIN = "quantization_config (compressed-tensors) is malformed", "download config.json again"
PRESETS = "quantkit reads what llm-compressor's presets make: W4A16, W8A16, W8A8, FP8, MXFP8, NVFP4, MXFP4"


@dataclass(frozen=True)
class Scheme:
    """A parsed config group. activations: number format of inputs; None if inputs are not quantized."""

    form: Form
    activations: Numbers | None = None


Targets = tuple[tuple[str, Scheme], ...]


def parse(config: dict) -> Targets:
    """Return each target with its scheme, in the order of the configuration.

    Raises QuantkitError for malformed groups, and for features that quantkit does not support.
    """
    cache = config.get("kv_cache_scheme") or FLOAT8_CACHE
    # quantkit computes without the cache that it describes; `eval --kv-dtype fp8` measures an 8-bit cache
    if not isinstance(cache, dict) or any(cache.get(key) != FLOAT8_CACHE[key] for key in CACHE_KEYS):
        raise _unread("kv_cache_scheme", "of caches those of 8-bit floats by stored scales are read")
    for key, why in (
        ("sparsity_config", "sparse weights are not read"),
        ("transform_config", "rotations at run time are not read"),
    ):
        value = config.get(key)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise _unread(key, why)
    groups = config.get("config_groups")
    _well(isinstance(groups, dict) and groups, "it has no config_groups")
    return tuple(
        (target, scheme)
        for name, group in groups.items()
        for targets, scheme in [_group(name, group, config.get("format"))]
        for target in targets
    )


def find(targets: Targets, linear: str) -> Scheme:
    """Return the scheme of a linear. Raises QuantkitError when no target matches it."""
    schemes = dict(targets)
    patterns = sorted(target for target in schemes if target.startswith(PATTERN))
    matching = [pattern for pattern in patterns if re.match(pattern.removeprefix(PATTERN), linear)]
    scheme = next((schemes[target] for target in (linear, *matching, *CLASSES) if target in schemes), None)
    _well(scheme, f"{linear} is quantized, but no target of config_groups matches it")
    return scheme


def _group(name: str, group: object, stored_format: object) -> tuple[list[str], Scheme]:
    if not isinstance(group, dict):
        raise _unread(f"config group {name!r}", "presets named instead of spelled out are not read")
    form = group.get("format") or stored_format
    if form not in list(FORMS):
        raise _unread(f"format {form!r}", f"quantkit reads {', '.join(FORMS)}")
    if group.get("output_activations"):
        raise _unread(f"config group {name!r}", "quantized outputs are not read")
    targets = group.get("targets")
    named = isinstance(targets, list) and all(isinstance(target, str) for target in targets)
    _well(named, f"targets of config group {name!r} are no list of names")
    for target in targets:
        if target.startswith(PATTERN):
            compiled(target.removeprefix(PATTERN), f"{MALFORMED}: target {target!r}", AGAIN, RUNTIME)
    weights, inputs = numbers("weights", group.get("weights")), group.get("input_activations")
    activations = numbers("activations", inputs) if inputs else None
    if (parsed := FORMS[form].like(weights, activations)) is None:
        what = f"{weights.bits} bit {weights.kind} weights by {weights.strategy}"
        what = what if weights.symmetric else f"asymmetric {what}"
        if activations:
            scales = "" if activations.dynamic else " of stored scales"
            what += f" with {activations.bits} bit {activations.kind} inputs{scales}"
        raise _unread(f"{what} in {form}", PRESETS)
    return targets, Scheme(parsed, activations)


def numbers(what: str, entry: object) -> Numbers:
    """Return the parsed number format of a config group's `what`: "weights" or "activations"."""
    _well(isinstance(entry, dict), f"a config group says nothing of its {what}")
    size, block = entry.get("group_size"), entry.get("block_structure")
    strategy = entry.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    grouped, square = strategy in ("group", "tensor_group"), strategy == "block"
    _well(not grouped or type(size) is int and size > 0, f"group_size of {what} is {size!r}")
    sides = block if square and isinstance(block, list) and len(block) == 2 else [0]
    whole = all(type(side) is int and side > 0 for side in sides)
    _well(not square or whole, f"block_structure of {what} is {block!r}")
    dynamic = entry.get("dynamic", False)
    parsed = Numbers(
        bits=entry.get("num_bits", 8),
        kind=entry.get("type", "int"),
        symmetric=bool(entry.get("symmetric", True)),
        strategy=strategy,
        group_size=size if grouped else None,
        block=tuple(block) if square else None,
        dynamic=dynamic in (True, "local"),
        power_of_two=entry.get("scale_dtype") == MxFp4Packed.SCALE_DTYPE,
    )
    if what == "activations" and not _computed(parsed):
        when = f"dynamic {dynamic!r}" + ("" if parsed.symmetric else ", asymmetric")
        raise _unread(f"activations of {parsed.bits} bit {parsed.kind} by {strategy}, {when}", PRESETS)
    return parsed


def _computed(inputs: Numbers) -> bool:
    """Return whether quantkit computes with such inputs: scaled at run time, or 8 bit by a stored scale."""
    if inputs.is_fp4:
        return (inputs.strategy, inputs.group_size) in (("tensor_group", 16), ("group", 32))
    plain = inputs.symmetric and inputs.bits == 8 and inputs.kind in ("int", "float")
    return plain and inputs.strategy in (("token", "group") if inputs.dynamic else ("tensor",))


def _unread(what: str, why: str) -> QuantkitError:
    return QuantkitError(f"compressed-tensors: {what} is not supported", hint=why, exit_code=UNSUPPORTED)


def _well(formed: object, why: str) -> None:
    require(formed, f"{MALFORMED}: {why}", AGAIN)
