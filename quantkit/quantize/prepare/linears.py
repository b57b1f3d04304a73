"""Resolve options to one LinearSpec per linear: its grid, or the reason why it stays in 16 bit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, compiled, count, name_all, require
from quantkit.layouts import Layout, LinearSpec, fusions
from quantkit.models.skeleton import Skeleton
from quantkit.models.skeleton.experts import Experts
from quantkit.models.skeleton.linears import embedding as embedding_of
from quantkit.models.skeleton.linears import linears
from quantkit.quantize.methods import (
    ESCAPE,
    GROUP_SIZES,
    SMALL,
    MakeGrid,
    Override,
    parse_override,
    with_groups,
)

UNDIVIDED = " does not divide {} columns"


def resolve(
    skeleton: Skeleton,
    make_grid: MakeGrid,
    layout: Layout,
    exclude: Sequence[str],
    override: Sequence[str],
    open_groups: bool = False,
) -> list[LinearSpec]:
    """Return every linear of every block with its grid, from shapes alone: no weights are loaded.

    make_grid: see Method; it returns None if the output encodes the weight. exclude: patterns of linears that
    stay in 16 bit; they win over `override`, of which the first match counts. Routers stay in 16 bit, and so
    do small linears that grid or layout cannot hold, and with `open_groups` (no group size was typed) all
    that do not split into groups. Raises QuantkitError naming every other linear that does not fit, and every
    pattern that is malformed or matches nothing.
    """
    if reason := layout.check_model(skeleton.checkpoint.text_config.model_type):
        raise QuantkitError(reason, "or choose another method", UNSUPPORTED)
    specs, named = [], set()
    for row, other in _selected(skeleton, exclude, override):
        grid = None if row.kept else make_grid(row.name, row.out_features, row.in_features, other)
        specs.append(replace(row, grid=grid))
        named |= {row.name} if other else set()
    specs = _without_unfit(skeleton, specs, named, layout, open_groups)
    _refuse_unfit([spec for spec in specs if spec.grid is not None], layout)
    return specs


def fitted(skeleton: Skeleton, options: Any, exclude: Sequence[str], override: Sequence[str]) -> Any:
    """Return a method's options with the group size for this model (`methods.with_groups`). Linears with a
    group size of their own do not count."""
    rows = [row for row, other in _selected(skeleton, exclude, override) if not (other and other.group_size)]
    rows += [embedding_of(skeleton)] if options.embedding else []
    return with_groups(options, ((row.in_features, row.weights) for row in rows if not row.kept))


def group_notes(specs: Sequence[LinearSpec], size: int) -> tuple[str, ...]:
    """Return a line on a group size below the usual one, and a line on linears that no group size divides."""
    found, usual = [], GROUP_SIZES[0]
    odd = [row for row in specs if row.grid and row.in_features % (2 * size)]
    if size != usual and odd:
        columns = f"{odd[0].in_features} columns of {odd[0].name}"
        found = [f"groups of {size}: {usual} does not divide the {columns}"]
    if kept := undivided(specs):
        found.append(f"kept in 16 bit, as {_by_reason([(row, row.kept) for row in kept])}")
    return tuple(found)


def undivided(specs: Sequence[LinearSpec]) -> list[LinearSpec]:
    """Return the linears that stay in 16 bit because no group size divides their columns."""
    return [row for row in specs if row.kept and row.kept.endswith(UNDIVIDED.format(row.in_features))]


def _selected(
    skeleton: Skeleton, exclude: Sequence[str], override: Sequence[str]
) -> list[tuple[LinearSpec, Override | None]]:
    """Return every linear, with the reason if it stays in 16 bit, and its override."""
    patterns = {text: compiled(text, f"--exclude {text!r}", ESCAPE) for text in exclude}
    overrides, rows = [parse_override(text) for text in override], []
    for row in linears(skeleton):
        kept = next((f"--exclude {text}" for text, p in patterns.items() if p.search(row.name)), row.kept)
        other = next((o for o in overrides if o.pattern.search(row.name)), None)
        rows.append((replace(row, kept=kept), other))
    typed = {f"--exclude {text}": pattern for text, pattern in patterns.items()}
    typed |= {other.flag: other.pattern for other in overrides}
    unused = [flag for flag, pattern in typed.items() if not any(pattern.search(row.name) for row, _ in rows)]
    if unused:
        hint = f"names look like {rows[0][0].name} and {rows[-1][0].name}; --dry-run lists them all"
        raise QuantkitError(f"no linear matches {name_all(unused)}", hint, USAGE)
    return rows


def embedding(skeleton: Skeleton, make_grid: MakeGrid, layout: Layout, bits: int) -> LinearSpec:
    """Return the model's embedding with its grid. Raises QuantkitError if it does not fit."""
    row = embedding_of(skeleton)
    override = parse_override(f"^{re.escape(row.name)}$={bits}")
    row = replace(row, grid=make_grid(row.name, row.out_features, row.in_features, override))
    _refuse_unfit([row], layout)
    return row


def _without_unfit(
    skeleton: Skeleton, specs: Sequence[LinearSpec], named: Collection[str], layout: Layout, open_groups: bool
) -> list[LinearSpec]:
    """Keep linears in 16 bit, unless an override names them: small ones that grid or layout cannot hold, such
    as the step sizes of a state-space model, and with `open_groups` all that do not split into groups."""
    found, small = [], _small(skeleton, specs)
    for spec in specs:
        reason = _unfit(spec, layout) if spec.grid and spec.name not in named else None
        if reason and spec.name in small:
            spec = replace(spec, grid=None, kept=f"small; {reason}")
        elif reason and open_groups and spec.in_features % spec.grid.group_size:
            size = spec.grid.group_size if spec.in_features % GROUP_SIZES[-1] == 0 else GROUP_SIZES[-1]
            spec = replace(spec, grid=None, kept=f"{size}{UNDIVIDED.format(spec.in_features)}")
        found.append(spec)
    return found


def _small(skeleton: Skeleton, rows: Sequence[LinearSpec]) -> set[str]:
    """Return the names of linears with a small share of their block's parameters."""
    weights = [sum(parameter.numel() for parameter in block.parameters()) for block in skeleton.blocks]
    return {row.name for row in rows if row.weights < SMALL * weights[row.block]}


def _unfit(spec: LinearSpec, layout: Layout) -> str | None:
    if spec.in_features % spec.grid.group_size:
        return f"{spec.in_features} columns do not split into groups of {spec.grid.group_size}"
    return layout.check(spec)


def refuse_unread_experts(skeleton: Skeleton, specs: Sequence[LinearSpec], layout: Layout) -> str:
    """Return the layout's note on quantized experts; "" if there are none.

    Raises QuantkitError if no client reads them.
    """
    found: list[tuple[str, str]] = []  # a linear, and why no client reads it
    note = ""
    for index, block in enumerate(skeleton.blocks):
        rows = {row.local: row for row in specs if row.block == index and row.grid}
        for place, layer in block.named_modules():
            inside = [local for local in rows if isinstance(layer, Experts) and local.startswith(f"{place}.")]
            each = Counter(local.removeprefix(f"{place}.").partition(".")[0] for local in inside)
            note = layout.experts_note if each else note
            if each and (reason := layout.check_experts(max(each.values()))):
                found += [(rows[local].name, reason) for local in inside]
    if found:
        name, reason = found[0]
        raise QuantkitError(
            f"{count(len(found), 'linear')} of experts, {name} the first: {reason}",
            hint="use quantkit gptq --layout compressed-tensors, keep them in 16 bit with "
            rf"--exclude '\.{name.split('.')[-3]}\.\d+', or write them all the same with --allow-unread",
            exit_code=UNSUPPORTED,
        )
    return note


def split_fusions(specs: Sequence[LinearSpec]) -> list[str]:
    """Return fused linears and experts with parts of different bits or groups: engines need equal ones."""
    groups = fusions(specs)
    for row in specs:
        if expert := re.match(r".*\.experts\.\d+(?=\.)", row.name):
            groups.setdefault(expert[0], []).append(row)
    formats = {row.name: row.grid and (row.grid.bits, row.grid.group_size) for row in specs}
    return [name for name, rows in groups.items() if len({formats[row.name] for row in rows}) > 1]


def _refuse_unfit(specs: Sequence[LinearSpec], layout: Layout) -> None:
    refused = [(spec, reason) for spec in specs if (reason := _unfit(spec, layout))]
    hint = "keep these linears in 16 bit with --exclude"
    if odd := [row for row, _ in refused if row.in_features % row.grid.group_size]:
        fits = [g for g in (256, 128, 64, 32, 16, 8) if not any(spec.in_features % g for spec in specs)]
        if all("group_size" in vars(row.grid) for row in odd):
            hint = f"these group sizes divide all of them: {', '.join(map(str, [*fits, -1]))}; or {hint}"
        raise QuantkitError(_by_reason(refused), hint, USAGE)
    what = f"the layout cannot hold {count(len(refused), 'linear')}: {_by_reason(refused)}"
    require(not refused, what, f"change the options as shown, or {hint}", UNSUPPORTED)


def _by_reason(rows: Sequence[tuple[LinearSpec, str]]) -> str:
    """Return a text such as `576 columns do not split into groups of 128: mlp.up_proj in 30 blocks`."""
    equal: dict[str, dict[str, list[str]]] = {}  # reason -> name in a block -> full names
    for row, reason in rows:
        equal.setdefault(reason, {}).setdefault(row.local, []).append(row.name)
    parts = []
    for reason, found in equal.items():
        each = (
            full[0] if len(full) == 1 else f"{local} in {len(full)} blocks" for local, full in found.items()
        )
        parts.append(f"{reason}: {name_all(each)}")
    return "; ".join(parts)
