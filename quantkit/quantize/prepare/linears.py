"""Resolve options to one LinearSpec per linear: its grid, or the reason why it stays in 16 bit."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, compiled, count, name_all, require
from quantkit.layouts import Layout, LinearSpec, fusions
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.models.skeleton.experts import Experts
from quantkit.models.skeleton.linears import embedding as embedding_of
from quantkit.models.skeleton.linears import linears
from quantkit.quantize.methods import GROUP_SIZES, SMALL, BuiltMethod, MakeGrid, Method
from quantkit.quantize.methods._override import ESCAPE, Override
from quantkit.quantize.prepare.request import Request

UNDIVIDED = " does not divide {} columns"


def of_job(skeleton: Skeleton, request: Request) -> tuple[BuiltMethod, list[LinearSpec]]:
    """Return the built method of a job, and every linear with its grid, head and embedding included if their
    options say so. Raises QuantkitError if no linear is quantized."""
    options, run = request.method.options, request.run
    method = request.method.build(skeleton, request.calibration.calibration is not None)
    override = run.override
    if options.head:
        override = (f"^{skeleton.add_head()}$={options.head}", *override)
    chosen = run.exclude, override, request.open_groups
    specs = resolve(skeleton, method.make_grid, method.layout, *chosen)
    if options.embedding:
        specs.append(_embedding(skeleton, method, options.embedding))
    outside = set(skeleton.checkpoint.packed) - {spec.name for spec in specs}
    what = f"modules besides the blocks' linears are quantized: {name_all(sorted(outside))}"
    require(not outside, what, "start from the original checkpoint", UNSUPPORTED)
    what, hint = f"no linear can be quantized: {specs[0].kept}", "choose --group-size 16 or 8, or -1"
    if run.exclude:
        what, hint = "--exclude leaves nothing to quantize", "narrow the pattern"
    require(not all(spec.kept for spec in specs), what, hint, USAGE)
    notes = _group_notes(specs, options.group_size) if request.open_groups else ()
    layout, output = method.layout.of_job(specs), method.output.of_job(skeleton.checkpoint, specs)
    return replace(method, layout=layout, output=output, notes=(*method.notes, *notes)), specs


def resolve(
    skeleton: Skeleton,
    make_grid: MakeGrid,
    layout: Layout,
    exclude: Sequence[str],
    override: Sequence[str],
    open_groups: bool = False,
) -> list[LinearSpec]:
    """Return every linear of every block with its grid, from shapes alone: no weights are loaded.

    make_grid: see BuiltMethod. exclude: patterns of linears that stay in 16 bit; they win over `override`, of
    which the first match counts. Routers stay in 16 bit, and so do, unless an override names them, small
    linears that grid or layout cannot hold, such as the step sizes of a state-space model, and with
    `open_groups` (no group size was typed) all that do not split into groups. Raises QuantkitError naming
    every other linear that does not fit, and every pattern that is malformed or matches nothing.
    """
    if reason := layout.check_model(skeleton.checkpoint.text_config.model_type):
        raise QuantkitError(reason, "or choose another method", UNSUPPORTED)
    selected, specs = _selected(skeleton, exclude, override), []
    weights = [sum(parameter.numel() for parameter in block.parameters()) for block in skeleton.blocks]
    for spec, other in selected:
        grid, kept = None if spec.kept else make_grid(spec.name, spec.in_features, other), spec.kept
        spec = replace(spec, grid=grid)
        reason = _unfit(spec, layout) if grid and not other else None
        if reason and spec.weights < SMALL * weights[spec.block]:
            kept = f"small; {reason}"
        elif reason and open_groups and spec.in_features % grid.group_size:
            size = grid.group_size if spec.in_features % GROUP_SIZES[-1] == 0 else GROUP_SIZES[-1]
            kept = f"{size}{UNDIVIDED.format(spec.in_features)}"
        specs.append(replace(spec, grid=None, kept=kept) if kept else spec)
    _refuse_unfit([spec for spec in specs if spec.grid is not None], layout)
    return specs


def settled(request: Request, checkpoint: Checkpoint | None = None) -> Request:
    """Return the request with the group size for its model, which its output's name and identity contain."""
    if request.method.options.group_size is not None:
        return request
    skeleton = Skeleton(checkpoint or request.open(), torch.float32, torch.device("cpu"))
    skeleton.names.check_complete()
    if request.method.options.head:
        skeleton.add_head()
    method = fitted(skeleton, request.method, request.run.exclude, request.run.override)
    return replace(request, method=method, open_groups=True)


def fitted(skeleton: Skeleton, method: Method, exclude: Sequence[str], override: Sequence[str]) -> Method:
    """Return a method with the group size for this model, not counting linears with a size of their own."""
    selected = _selected(skeleton, exclude, override)
    specs = [spec for spec, other in selected if not (other and other.group_size)]
    specs += [embedding_of(skeleton)] if method.options.embedding else []
    return method.with_groups((spec.in_features, spec.weights) for spec in specs if not spec.kept)


def undivided(specs: Sequence[LinearSpec]) -> list[LinearSpec]:
    """Return the linears that stay in 16 bit because no group size divides their columns."""
    return [spec for spec in specs if spec.kept and spec.kept.endswith(UNDIVIDED.format(spec.in_features))]


def _group_notes(specs: Sequence[LinearSpec], size: int) -> tuple[str, ...]:
    """Return a line on a group size below the usual one, and a line on linears that no group size divides."""
    notes, usual = [], GROUP_SIZES[0]
    odd = [spec for spec in specs if spec.grid and spec.in_features % (2 * size)]
    if size != usual and odd:
        columns = f"{odd[0].in_features} columns of {odd[0].name}"
        notes = [f"groups of {size}: {usual} does not divide the {columns}"]
    if kept := undivided(specs):
        notes.append(f"kept in 16 bit, as {_by_reason([(spec, spec.kept) for spec in kept])}")
    return tuple(notes)


def _selected(
    skeleton: Skeleton, exclude: Sequence[str], override: Sequence[str]
) -> list[tuple[LinearSpec, Override | None]]:
    """Return every linear, with the reason if it stays in 16 bit, and its override."""
    patterns = {f"--exclude {text}": compiled(text, f"--exclude {text!r}", ESCAPE) for text in exclude}
    overrides, selected = [Override.parse(text) for text in override], []
    for spec in linears(skeleton):
        kept = next((flag for flag, pattern in patterns.items() if pattern.search(spec.name)), spec.kept)
        other = next((other for other in overrides if other.pattern.search(spec.name)), None)
        selected.append((replace(spec, kept=kept), other))
    names = [spec.name for spec, _ in selected]
    patterns |= {other.flag: other.pattern for other in overrides}
    unused = [flag for flag, pattern in patterns.items() if not any(map(pattern.search, names))]
    if unused:
        hint = f"names look like {names[0]} and {names[-1]}; --dry-run lists them all"
        raise QuantkitError(f"no linear matches {name_all(unused)}", hint, USAGE)
    return selected


def _embedding(skeleton: Skeleton, method: BuiltMethod, bits: int) -> LinearSpec:
    """Return the model's embedding with its grid. Raises QuantkitError if it does not fit."""
    spec = embedding_of(skeleton)
    override = Override.parse(f"^{re.escape(spec.name)}$={bits}")
    spec = replace(spec, grid=method.make_grid(spec.name, spec.in_features, override))
    _refuse_unfit([spec], method.layout)
    return spec


def _unfit(spec: LinearSpec, layout: Layout) -> str | None:
    if spec.in_features % spec.grid.group_size:
        return f"{spec.in_features} columns do not split into groups of {spec.grid.group_size}"
    return layout.check(spec)


def refuse_unread_experts(skeleton: Skeleton, specs: Sequence[LinearSpec], layout: Layout) -> str:
    """Return the layout's note on quantized experts; "" if there are none.

    Raises QuantkitError if no client reads them.
    """
    refused: list[tuple[str, str]] = []  # a linear, and why no client reads it
    note = ""
    for index, block in enumerate(skeleton.blocks):
        specs_of_block = {spec.local: spec for spec in specs if spec.block == index and spec.grid}
        for path, layer in block.named_modules():
            if not isinstance(layer, Experts):
                continue
            inside = [local for local in specs_of_block if local.startswith(f"{path}.")]
            each = Counter(local.removeprefix(f"{path}.").partition(".")[0] for local in inside)
            note = layout.experts_note if each else note
            if each and (reason := layout.check_experts(max(each.values()))):
                refused += [(specs_of_block[local].name, reason) for local in inside]
    if refused:
        name, reason = refused[0]
        what = f"{count(len(refused), 'linear')} of experts, {name} the first: {reason}"
        hint = "use quantkit gptq --layout compressed-tensors, keep them in 16 bit with "
        hint += rf"--exclude '\.{name.split('.')[-3]}\.\d+', or write them all the same with --allow-unread"
        raise QuantkitError(what, hint, UNSUPPORTED)
    return note


def split_fusions(specs: Sequence[LinearSpec]) -> list[str]:
    """Return fused linears and experts with parts of different bits or groups: engines need equal ones."""
    groups = fusions(specs)
    for spec in specs:
        if expert := re.match(r".*\.experts\.\d+(?=\.)", spec.name):
            groups.setdefault(expert[0], []).append(spec)

    def formats(group: list[LinearSpec]) -> set:
        sizes = [(spec.grid.bits, spec.grid.group_size, spec.in_features) for spec in group if spec.grid]
        whole = all(size == columns for _, size, columns in sizes)  # experts' linears differ in columns
        made: set = {(bits, -1 if whole else size) for bits, size, _ in sizes}
        return made | {None for spec in group if not spec.grid}

    return [name for name, group in groups.items() if len(formats(group)) > 1]


def _refuse_unfit(specs: Sequence[LinearSpec], layout: Layout) -> None:
    refused = [(spec, reason) for spec in specs if (reason := _unfit(spec, layout))]
    hint = "keep these linears in 16 bit with --exclude"
    if odd := [spec for spec, _ in refused if spec.in_features % spec.grid.group_size]:
        fits = [g for g in (256, 128, 64, 32, 16, 8) if not any(spec.in_features % g for spec in specs)]
        if all("group_size" in vars(spec.grid) and not spec.grid.spans_matrix for spec in odd):
            hint = f"these group sizes divide all of them: {', '.join(map(str, [*fits, -1]))}; or {hint}"
        raise QuantkitError(_by_reason(refused), hint, USAGE)
    reasons = [(spec, reason.partition(": ")[0]) for spec, reason in refused]  # advice follows the colon
    advice = {reason.partition(": ")[2] for _, reason in refused} - {""}
    what = f"the layout cannot hold {count(len(refused), 'linear')}: {_by_reason(reasons)}"
    require(not refused, what, "; or ".join([*sorted(advice), hint]), UNSUPPORTED)


def _by_reason(refused: Sequence[tuple[LinearSpec, str]]) -> str:
    """Return a text such as `576 columns do not split into groups of 128: mlp.up_proj in 30 blocks`."""
    equal: dict[str, dict[str, list[str]]] = {}  # reason -> name in a block -> full names
    for spec, reason in refused:
        equal.setdefault(reason, {}).setdefault(spec.local, []).append(spec.name)

    def named(local: str, names: list[str]) -> str:
        return names[0] if len(names) == 1 else f"{local} in {len(names)} blocks"

    listed = {reason: [named(*item) for item in names.items()] for reason, names in equal.items()}
    return "; ".join(f"{reason}: {name_all(names)}" for reason, names in listed.items())
