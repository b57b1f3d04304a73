"""Rotations folded into the weights: R1 of the residual stream, R2 of the values inside attention.

Products with an orthogonal matrix spread outliers over all channels, and grids become finer (QuaRot,
arXiv:2404.00456; SpinQuant, arXiv:2405.16406, section 3). Both rotations are exact in the file, so clients
need not know of them.

The source is read through the rotations (`reading.Rewritten`), tensor by tensor, rounded to the precision of
the stored tensor. Loop, solvers, outputs and memory are as for any other checkpoint.

The stream and heads are found on one block of each kind (`stream`). Before the job begins, the whole model
runs without and with the rotation, in float32, and both must give the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from quantkit.errors import UNSUPPORTED, QuantkitError, count
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.reading import Rewritten
from quantkit.models.skeleton import Skeleton
from quantkit.models.skeleton.names import Names
from quantkit.quantize.calibrate import walk
from quantkit.quantize.calibrate.sites import find_sites
from quantkit.quantize.calibrate.view import BlockView
from quantkit.quantize.progress import Progress
from quantkit.quantize.transforms.fold import find_folds
from quantkit.quantize.transforms.probe import probing
from quantkit.quantize.transforms.rotation import edits, outside, stream
from quantkit.quantize.transforms.rotation.edits import Edit
from quantkit.quantize.transforms.rotation.orthogonal import random
from quantkit.quantize.transforms.rotation.stream import Heads, NotRotatable, Stream

PROOF_TOKENS = 8  # of the proofs
SAME = 1e-3  # relative difference of a whole model's logits in float32; measured: 1e-6 to 1e-5
SEED = 0


@dataclass(frozen=True)
class Rotated:
    """The checkpoint as read through the rotations. record: for the manifest; notes: for the user."""

    checkpoint: Checkpoint
    record: dict
    notes: tuple[str, ...] = ()


def rotate(skeleton: Skeleton, transform: str, progress: Progress, prove: bool = True) -> Rotated:
    """Find the rotations of a model and, with `prove`, prove them. transform: `rotate`, or `rotate-v` for R2
    only.

    Raises QuantkitError if the model cannot be rotated or is already quantized.
    """
    checkpoint = skeleton.checkpoint
    if checkpoint.quantized:
        raise QuantkitError(
            f"{checkpoint.source} is quantized already: --transform {transform} would round it once more",
            hint="start from the original checkpoint, or leave the rotation out",
            exit_code=UNSUPPORTED,
        )
    progress.phase("finding what can be rotated")
    try:
        finder = _Finder(Skeleton(checkpoint, torch.float32, skeleton.device), transform == "rotate")
        found = finder.rotated()
        if prove:
            progress.phase("checking the rotation: comparing the model before and after")
            finder.refuse_unlike(found)
    except NotRotatable as reason:
        hint = "rotate attention's values alone: --transform rotate-v" if transform == "rotate" else None
        message = f"{checkpoint.source} cannot be rotated: {reason}"
        raise QuantkitError(message, hint or "leave the rotation out", UNSUPPORTED) from reason
    turned = []
    if width := found.record["residual"]:
        kind = "Hadamard" if finder.turns.is_hadamard else "random orthogonal"
        turned.append(f"the residual stream of {width} channels ({kind})")
    if blocks := found.record["values"]:
        turned.append(f"attention's values in {count(blocks, 'block')} of {len(finder.kinds)}")
    progress.phase(f"rotated: {' and '.join(turned)}")
    return found


class _Finder:
    """Finds the rotations of a model on one block of each kind, in float32. residual: also find R1.

    kinds: for each block, the heads that can be rotated, and with R1 the stream.
    """

    def __init__(self, skeleton: Skeleton, residual: bool):
        self.skeleton, self.residual = skeleton, residual
        skeleton.load_rest()
        config = skeleton.checkpoint.text_config
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(config.vocab_size, (1, PROOF_TOKENS), generator=generator)
        self.turns = random(config.hidden_size, SEED)
        self.kinds = self._kinds(config.hidden_size)
        self.outside = outside.find(skeleton, self.turns) if residual else None
        skeleton.model.to("meta")  # gives its memory back

    def _kinds(self, width: int) -> list[tuple[list[Heads], Stream | None]]:
        known: dict[tuple, tuple[list[Heads], Stream | None]] = {}
        found = []
        skeleton, hidden = self.skeleton, self.skeleton.embed(self.ids)
        for index, block in enumerate(skeleton.blocks):
            parts = ((name, tuple(part.shape)) for name, part in block.named_parameters())
            kind = (tuple(type(module) for module in block.modules()), *parts)
            if kind not in known:
                skeleton.load_block(index, decoded=True)
                run = partial(skeleton.run_block, index)
                if not hidden.shape == run(hidden).shape == (1, PROOF_TOKENS, width):
                    raise NotRotatable("blocks pass more than hidden states to one another")
                known[kind] = self._look(index, run, hidden)
                skeleton.free_block(index)
            found.append(known[kind])
        return found

    def _look(
        self, index: int, run: Callable[[Tensor], Tensor], hidden: Tensor
    ) -> tuple[list[Heads], Stream | None]:
        """Return heads and stream of a loaded block. Raises NotRotatable if R1 is impossible."""
        skeleton, block = self.skeleton, self.skeleton.blocks[index]
        sites = [site for site in find_sites(block, lambda: run(hidden)) if site.linears]
        away, stored = skeleton.away(index), lambda name, tensor: tensor
        view = BlockView(block, sites, {}, {}, lambda: run(hidden), stored, away)
        with probing(view) as probe:
            folds = find_folds(probe)
            turning: dict[str, Heads] = {}
            for one in stream.heads(probe, folds, skeleton.checkpoint.text_config):
                made: dict[str, Edit] = {}
                edits.of_heads(made, one, _shapes(block), random(one.width, SEED))
                if one.values not in turning and edits.turned_heads(probe, made, one.reads):
                    turning[one.values] = one
            heads = list(turning.values())
            if not self.residual:
                return heads, None
            found, made = stream.find(probe, folds, run, hidden), {}
            edits.of_stream(made, found, _shapes(block), self.turns)
            if not edits.turned_stream(probe, made, run, hidden, self.turns):
                raise NotRotatable(
                    "what linears add to the hidden states passes something else first: a norm?"
                )
            return heads, found

    def rotated(self) -> Rotated:
        """Return the checkpoint as read through the rotations. Raises NotRotatable if there is none."""
        checkpoint, names = self.skeleton.checkpoint, self.skeleton.names
        source, rewritten = checkpoint, {}

        def rewrite(stored: str, of: str, name: str, edit: Edit, full: Callable[[str], str]) -> None:
            values, info = (
                partial(_values, source, names, of, name, edit, full),
                source.plain(source.infos[of]),
            )
            place = info.dtype, info.shape, info.file, info.offset, info.nbytes
            rewritten[stored] = Rewritten(stored, *place, of, values)

        for index, (heads, turning) in enumerate(self.kinds):
            shapes, made = _shapes(self.skeleton.blocks[index]), {}
            for one in heads:
                edits.of_heads(made, one, shapes, random(one.width, SEED))
            if turning:
                edits.of_stream(made, turning, shapes, self.turns)
            full = partial(names.of_block, index)
            for local, edit in made.items():
                stored = names.stored[full(local)]
                rewrite(stored, stored, full(local), edit, full)
        if self.outside:
            checkpoint, outer = self.outside
            for stored, (name, of, edit) in outer.items():
                rewrite(stored, of, name, edit, str)
        if not rewritten:
            raise NotRotatable("no linear reads attention's values as they are")
        found = replace(checkpoint, infos=checkpoint.infos | rewritten)
        untied = sum(info.nbytes for info in found.infos.values()) - found.stored_bytes
        record = {
            "residual": self.turns.width if self.residual else None,
            "values": sum(bool(heads) for heads, _ in self.kinds),
            "seed": SEED,
            "untied_bytes": untied,
        }
        note = (
            "embedding and head are no longer one tensor, because the final norm's weight goes into the "
            f"head: {untied / 1e6:,.1f} MB more (--transform rotate-v leaves them)"
        )
        return Rotated(found, record, (note,) if untied else ())

    def refuse_unlike(self, found: Rotated) -> None:
        """Raise NotRotatable unless the model computes the same with the rotations, in float32, block by
        block."""
        infos = {
            name: replace(info, exact=True) if isinstance(info, Rewritten) else info
            for name, info in found.checkpoint.infos.items()
        }
        logits = []
        for checkpoint in (self.skeleton.checkpoint, replace(found.checkpoint, infos=infos)):
            skeleton = Skeleton(checkpoint, torch.float32, self.skeleton.device)
            skeleton.names.check_complete()
            skeleton.load_rest()
            (hidden,) = walk.through(skeleton, [self.ids], decoded=True)
            logits.append(skeleton.logits(hidden[0]))
            skeleton.model.to("meta")  # one at a time
        if not edits.difference(logits[1], logits[0]) <= SAME:
            raise NotRotatable("the model computes otherwise when it is rotated")


def _values(
    checkpoint: Checkpoint,
    names: Names,
    of: str,
    name: str,
    edit: Edit,
    full: Callable[[str], str],
    exact: bool,
) -> Tensor:
    """Return the new values of the model's parameter `name`, computed from the stored tensor `of`, in its
    precision, or in float32 if `exact`. full: maps names in the edit to names in the model."""

    def get(other: str) -> Tensor:
        return checkpoint.read(names.stored[full(other)], torch.float32)

    tensor = checkpoint.load(of)
    dtype = torch.float32 if exact else tensor.dtype
    if name in names.transposed:
        return edit.of(tensor.t(), get, dtype).t().contiguous()
    return edit.of(tensor, get, dtype)


def _shapes(block: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(part.shape) for name, part in block.named_parameters()}
