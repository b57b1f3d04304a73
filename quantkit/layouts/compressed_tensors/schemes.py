"""What a compressed-tensors configuration says of each linear.

`config_groups` pair a scheme with targets: exact module names, patterns (`re:` before a regular expression
that matches from the start), or class names. A linear's scheme is that of the best target in this order;
of equal targets the later group counts, and patterns are tried in alphabetical order.
Source: compressed-tensors 0.20 `utils/match.py: match_targets`, `lifecycle/apply.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quantkit.errors import UNSUPPORTED, QuantkitError, first_line
from quantkit.layouts.compressed_tensors import forms

NAIVE = "naive-quantized"  # what int-quantized and float-quantized are called besides
CLASSES = ("Linear", "Module")  # of an nn.Linear
PATTERN = "re:"
STRATEGIES = {
    "weights": ("tensor", "channel", "group", "block", "tensor_group"),
    "activations": ("tensor", "token", "group", "tensor_group"),
}
FP4_GROUPS = {"tensor_group": 16, "group": 32}  # NVFP4, MXFP4
LOCAL = "local"  # dynamic scales of groups, under a stored one of the tensor
FLOAT8_CACHE = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor",
    "group_size": None,
    "dynamic": False,
    "observer": "minmax",
}
CACHE_KEYS = ("num_bits", "type", "strategy", "dynamic")  # of it, those that say what is computed
WIDTHS = {"int": range(2, 9), "float": range(8, 9)}


@dataclass(frozen=True)
class Numbers:
    """How weights or activations become numbers of `bits` bits. kind: `int`, or `float` (e4m3).

    group_size: columns of one group; None unless strategy is `group` or `tensor_group`, which has a scale of
    the tensor besides. block: rows and columns of strategy `block`. dynamic: scales follow from the values at
    run time, instead of being stored.
    """

    bits: int
    kind: str
    symmetric: bool
    strategy: str
    group_size: int | None = None
    block: tuple[int, int] | None = None
    dynamic: bool = False

    @property
    def is_fp4(self) -> bool:
        """Whether they are NVFP4 or MXFP4."""
        return (self.bits, self.kind) == (4, "float")


@dataclass(frozen=True)
class Scheme:
    """weights: None where they tell by themselves; activations: None where the inputs of a linear stay as
    they are. form: its `format`."""

    weights: Numbers | None
    activations: Numbers | None = None
    form: str = ""


Targets = tuple[tuple[str, Scheme], ...]


def parse(config: dict) -> Targets:
    """Each target with its scheme, in the order of the configuration.

    Raises QuantkitError for what quantkit would misread, with the reason, and for malformed groups.
    """
    if (cache := config.get("kv_cache_scheme")) and not _is_float8_cache(cache):
        raise _unread("kv_cache_scheme", "of caches those of 8-bit floats by stored scales are read")
    for key, why in (
        ("sparsity_config", "sparse weights are not read"),
        ("transform_config", "rotations at run time are not read"),
    ):
        value = config.get(key)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise _unread(key, why)
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _malformed("it has no config_groups")
    return tuple(
        (target, scheme)
        for name, group in groups.items()
        for targets, scheme in [_group(name, group, config.get("format"))]
        for target in targets
    )


def _is_float8_cache(told: object) -> bool:
    """Whether keys and values are quantized as FLOAT8_CACHE says. What is computed here is without it:
    `eval --kv-dtype fp8` measures such a cache."""
    return isinstance(told, dict) and all(told.get(key) == FLOAT8_CACHE[key] for key in CACHE_KEYS)


def find(targets: Targets, linear: str) -> Scheme:
    """The scheme of a linear. Raises QuantkitError when no target matches it."""
    schemes = dict(targets)
    patterns = sorted(target for target in schemes if target.startswith(PATTERN))
    matching = [pattern for pattern in patterns if re.match(pattern.removeprefix(PATTERN), linear)]
    for target in (linear, *matching, *CLASSES):
        if target in schemes:
            return schemes[target]
    raise _malformed(f"{linear} is quantized, but no target of config_groups matches it")


def _group(name: str, group: object, stored_format: object) -> tuple[list[str], Scheme]:
    if not isinstance(group, dict):
        raise _unread(f"config group {name!r}", "presets named instead of spelled out are not read")
    form = group.get("format") or stored_format
    if form not in (formats := [*(module.NAME for module in forms.modules()), NAIVE]):
        raise _unread(f"format {form!r}", f"quantkit reads {', '.join(formats)}")
    if group.get("output_activations"):
        raise _unread(f"config group {name!r}", "quantized outputs are not read")
    targets = group.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise _malformed(f"targets of config group {name!r} are no list of names")
    for target in targets:
        try:
            re.compile(target.removeprefix(PATTERN) if target.startswith(PATTERN) else "")
        except re.error as error:
            raise _malformed(f"target {target!r} is no regular expression: {first_line(error)}") from error
    weights = numbers("weights", group.get("weights"))
    activations = group.get("input_activations")
    scheme = Scheme(weights, numbers("activations", activations) if activations else None, form)
    return targets, scheme


def numbers(what: str, entry: object) -> Numbers:
    """What a config group says of its weights or activations (`what`)."""
    if not isinstance(entry, dict):
        raise _malformed(f"a config group says nothing of its {what}")
    bits, kind = entry.get("num_bits", 8), entry.get("type", "int")
    size, block = entry.get("group_size"), entry.get("block_structure")
    strategy = entry.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    fp4 = (bits, kind) == (4, "float") and FP4_GROUPS.get(strategy) == size
    known = kind in list(WIDTHS) and bits in WIDTHS[kind] and strategy != "tensor_group"
    if strategy not in STRATEGIES[what] or not (fp4 or known):
        raise _unread(
            f"{what} of {bits} bit {kind} by {strategy}",
            "quantkit reads 2 to 8 bit int, 8 bit float, 4 bit float in groups of 16 (nvfp4) or 32 (mxfp4)",
        )
    dynamic = entry.get("dynamic", False)
    dynamic = True if fp4 and strategy == "tensor_group" and dynamic == LOCAL else dynamic
    if what == "activations" and (dynamic not in (True, False) or not dynamic and strategy != "tensor"):
        raise _unread(f"activations by {strategy}, dynamic {dynamic!r}", "stored scales are read per tensor")
    if strategy == "group" and not (type(size) is int and size > 0):
        raise _malformed(f"group_size of {what} is {size!r}")
    if strategy == "block" and not (
        isinstance(block, list) and len(block) == 2 and all(type(side) is int and side > 0 for side in block)
    ):
        raise _malformed(f"block_structure of {what} is {block!r}")
    return Numbers(
        bits=bits,
        kind=kind,
        symmetric=bool(entry.get("symmetric", True)),
        strategy=strategy,
        group_size=size if strategy in FP4_GROUPS else None,
        block=tuple(block) if strategy == "block" else None,
        dynamic=bool(dynamic),
    )


def _unread(what: str, why: str) -> QuantkitError:
    return QuantkitError(f"compressed-tensors: {what} is not understood", hint=why, exit_code=UNSUPPORTED)


def _malformed(why: str) -> QuantkitError:
    return QuantkitError(
        f"quantization_config (compressed-tensors) is malformed: {why}", hint="download config.json again"
    )
