"""Resolve options to one LinearSpec per linear: its grid, or the reason why it stays in 16 bit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, compiled, count, name_all, require
from quantkit.layouts import Layout, LinearSpec, fusions
from quantkit.models.skeleton import Skeleton
from quantkit.models.skeleton.experts import Experts
from quantkit.models.skeleton.linears import embedding as embedding_of
from quantkit.models.skeleton.linears import linears
from quantkit.quantize.methods import MakeGrid, Override

ESCAPE = r"escape dots and parentheses, as in 'layers\.0\.'"
SMALL = 1 / 20  # share of its block's parameters below which a linear may stay in 16 bit by default


def resolve(
    skeleton: Skeleton,
    make_grid: MakeGrid,
    layout: Layout,
    exclude: Sequence[str],
    override: Sequence[str],
) -> list[LinearSpec]:
    """Return every linear of every block with its grid, from shapes alone: no weights are loaded.

    make_grid: see Method; it returns None if the output encodes the weight. exclude: patterns of linears that
    stay in 16 bit; they win over `override`, of which the first match counts. Routers stay in 16 bit, and so
    do small linears that grid or layout cannot hold. Raises QuantkitError naming every other linear that does
    not fit, and every pattern that is malformed or matches nothing.
    """
    patterns = {text: compiled(text, f"--exclude {text!r}", ESCAPE) for text in exclude}
    overrides = [parse_override(text) for text in override]
    specs = []
    if reason := layout.check_model(skeleton.checkpoint.text_config.model_type):
        raise QuantkitError(reason, "or choose another method", UNSUPPORTED)
    for row in linears(skeleton):
        kept = next((f"--exclude {text}" for text, p in patterns.items() if p.search(row.name)), row.kept)
        other = next((o for o in overrides if o.pattern.search(row.name)), None)
        grid = None if kept else make_grid(row.name, row.out_features, row.in_features, other)
        specs.append(replace(row, grid=grid, kept=kept))
    typed = {f"--exclude {text}": pattern for text, pattern in patterns.items()}
    typed |= {other.flag: other.pattern for other in overrides}
    unused = [flag for flag, pattern in typed.items() if not any(pattern.search(row.name) for row in specs)]
    if unused:
        hint = f"names look like {specs[0].name} and {specs[-1].name}; --dry-run lists them all"
        raise QuantkitError(f"no linear matches {name_all(unused)}", hint, USAGE)
    specs = _without_small_unfit(skeleton, specs, overrides, layout)
    _refuse_unfit([spec for spec in specs if spec.grid is not None], layout)
    return specs


def embedding(skeleton: Skeleton, make_grid: MakeGrid, layout: Layout, bits: int) -> LinearSpec:
    """Return the model's embedding with its grid. Raises QuantkitError if it does not fit."""
    row = embedding_of(skeleton)
    override = parse_override(f"^{re.escape(row.name)}$={bits}")
    row = replace(row, grid=make_grid(row.name, row.out_features, row.in_features, override))
    _refuse_unfit([row], layout)
    return row


def _without_small_unfit(
    skeleton: Skeleton, specs: Sequence[LinearSpec], overrides: Sequence[Override], layout: Layout
) -> list[LinearSpec]:
    """Keep small linears in 16 bit that grid or layout cannot hold, such as the step sizes of a state-space
    model, unless an override names them."""
    weights = [sum(parameter.numel() for parameter in block.parameters()) for block in skeleton.blocks]
    found = []
    for spec in specs:
        named = any(override.pattern.search(spec.name) for override in overrides)
        small = spec.weights < SMALL * weights[spec.block]
        reason = _unfit(spec, layout) if spec.grid and small and not named else None
        found.append(replace(spec, grid=None, kept=f"small; {reason}") if reason else spec)
    return found


def _unfit(spec: LinearSpec, layout: Layout) -> str | None:
    if spec.in_features % spec.grid.group_size:
        return f"group size {spec.grid.group_size} does not divide {spec.in_features}"
    return layout.check(spec)


def parse_override(text: str) -> Override:
    """Parse `REGEX=bits[,group_size]`. Raises QuantkitError if malformed."""
    parts = re.fullmatch(r"(.+)=(\d+)(?:,(-?\d+))?", text)
    what = f"--override {text!r} is not REGEX=bits or REGEX=bits,group_size"
    require(parts, what, r"for example --override 'layers\.0\.=8' or --override 'down_proj$=4,32'", USAGE)
    pattern, bits, group_size = parts.groups()
    found = compiled(pattern, f"--override {pattern!r}", ESCAPE)
    return Override(text, found, int(bits), None if group_size is None else int(group_size))


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
    refused: dict[tuple[str, str], list[LinearSpec]] = {}  # the same in all blocks: reported once
    for spec in specs:
        if reason := _unfit(spec, layout):
            refused.setdefault((spec.local, reason), []).append(spec)
    if not refused:
        return
    found = [
        f"{rows[0].name if len(rows) == 1 else local + ' in ' + count(len(rows), 'block')} ({reason})"
        for (local, reason), rows in refused.items()
    ]
    hint, code = "change the options as shown, or keep these linears in 16 bit with --exclude", UNSUPPORTED
    rows = [row for group in refused.values() for row in group]
    if any(row.in_features % row.grid.group_size for row in rows):
        code = USAGE
        fits = [g for g in (256, 128, 64, 32, 16, 8) if not any(spec.in_features % g for spec in specs)]
        hint = "keep these linears in 16 bit with --exclude"
        if all("group_size" in vars(row.grid) for row in rows):
            hint = f"these group sizes divide all of them: {', '.join(map(str, [*fits, -1]))}; or {hint}"
    raise QuantkitError(f"the layout cannot hold {count(len(rows), 'linear')}: {name_all(found)}", hint, code)
