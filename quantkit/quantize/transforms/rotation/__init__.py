"""Rotations that are folded into the weights: R1 of the residual stream, R2 of the values inside attention.

Products with an orthogonal matrix spread outliers over all channels, and grids become finer (QuaRot,
arXiv:2404.00456; SpinQuant, arXiv:2405.16406, section 3). Only those are made that are exact in the file: no
client has to know of them.

The source is read through them (`Checkpoint.rewritten`), tensor by tensor: whatever reads a block, the
embeddings or the head finds them turned, rounded to the precision that they are stored in. So the loop,
its solvers and outputs are those of any other checkpoint, and so is its memory.

Where a block's stream or heads turn is found on one block of each kind (`stream`, `heads`), and that the
whole model computes the same is shown before the job begins, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quantkit.errors import UNSUPPORTED, QuantkitError, count
from quantkit.models.checkpoint import Checkpoint, Rewrite
from quantkit.models.skeleton import Skeleton
from quantkit.quantize import walk
from quantkit.quantize.capture import find_sites
from quantkit.quantize.progress import Progress
from quantkit.quantize.transforms import BlockView
from quantkit.quantize.transforms.fold import find_folds
from quantkit.quantize.transforms.probe import probing
from quantkit.quantize.transforms.rotation import edits, heads, outside, proof, stream
from quantkit.quantize.transforms.rotation.edits import Edit
from quantkit.quantize.transforms.rotation.orthogonal import Orthogonal, random
from quantkit.quantize.transforms.rotation.stream import Untouchable

TOKENS = 8  # that the proofs are made with
SAME = 1e-3  # relative difference of a whole model's logits in float32; measured: 1e-6 to 1e-5
SEED = 0


@dataclass(frozen=True)
class Kind:
    """What was found of one block, for all that are built like it. refused: why its stream does not turn."""

    stream: stream.Stream | None
    heads: list[heads.Heads]
    refused: str = ""


@dataclass(frozen=True)
class Rotated:
    """The checkpoint as it is read through the rotations. record: what the manifest says of them; notes: for
    the user."""

    checkpoint: Checkpoint
    record: dict
    notes: tuple[str, ...] = ()


def rotate(skeleton: Skeleton, asked: str, progress: Progress, prove: bool = True) -> Rotated:
    """Find what turns, and prove it unless told not to. asked: `rotate`, or `rotate-v` for R2 alone.

    Raises QuantkitError for a model of which nothing turns, and for one that is quantized.
    """
    checkpoint = skeleton.checkpoint
    if checkpoint.quantized:
        raise QuantkitError(
            f"{checkpoint.source} is quantized already: --transform {asked} would round it once more",
            hint="start from the original checkpoint, or leave the rotation out",
            exit_code=UNSUPPORTED,
        )
    progress.phase("looking for what can be rotated")
    finder = _Finder(Skeleton(checkpoint, torch.float32, skeleton.device), asked == "rotate")
    refused = finder.refused() if finder.residual else ""
    for residual in [True, False] if finder.residual and not refused else [False]:
        found = finder.rotated(residual, refused)
        if found and (not prove or finder.same(found, progress)):
            return found
        if residual:
            refused = "the model computes otherwise when they are rotated"
    reason = refused or "no linear reads attention's values as they are"
    raise QuantkitError(
        f"nothing of {checkpoint.source} can be rotated: {reason}", "leave the rotation out", UNSUPPORTED
    )


class _Finder:
    """A model in float32, one block of each kind of which has been looked at. residual: R1 is wanted, too."""

    def __init__(self, skeleton: Skeleton, residual: bool, seed: int = SEED):
        self.skeleton, self.residual, self.seed = skeleton, residual, seed
        skeleton.load_rest()
        config = skeleton.checkpoint.text_config
        self.width = config.hidden_size
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(config.vocab_size, (1, TOKENS), generator=generator)
        self.turns = random(self.width, seed)
        self.kinds = self._kinds()
        streams = [kind.stream for kind in self.kinds if kind.stream]
        rest = outside.norms(skeleton.model, self.width)
        if any(norm.means for found in streams for norm in found.norms.values()) or any(
            stream.subtracts_mean(module, self.width) for module in rest.values()
        ):
            self.turns = self.turns.keeping_means()

    def _kinds(self) -> list[Kind]:
        """One of each block."""
        known: dict[tuple, Kind] = {}
        found = []
        skeleton, hidden = self.skeleton, self.skeleton.embed(self.ids)
        plain = hidden.shape[-1] == self.width
        for index, block in enumerate(skeleton.blocks):
            parts = ((name, tuple(part.shape)) for name, part in block.named_parameters())
            kind = (tuple(type(module) for module in block.modules()), *parts)
            if kind not in known or not plain:
                skeleton.load_block(index, decoded=True)
            if not index:
                plain = plain and skeleton.run_block(0, hidden).shape == hidden.shape
            if kind not in known:
                known[kind] = self._look(index, hidden, plain)
            if not plain:
                hidden = skeleton.run_block(index, hidden)
            skeleton.free_block(index)
            found.append(known[kind])
        return found

    def _look(self, index: int, hidden: Tensor, plain: bool) -> Kind:
        """What turns of a loaded block."""
        skeleton, block = self.skeleton, self.skeleton.blocks[index]
        run = partial(skeleton.run_block, index)
        sites = [site for site in find_sites(block, lambda: run(hidden)) if site.linears]
        view = BlockView(
            block, sites, {}, {}, lambda: run(hidden), lambda name, tensor: tensor, skeleton.away(index)
        )
        shapes = {name: tuple(part.shape) for name, part in block.named_parameters()}
        with probing(view) as probe:
            folds = find_folds(probe)
            turning = []
            for one in heads.candidates(probe, folds, skeleton.checkpoint.text_config):
                by = random(one.width, self.seed)
                known = {one.values for one in turning}
                if one.values not in known and proof.turned_heads(
                    probe, edits.of_heads(one, shapes, by), one.reads
                ):
                    turning.append(one)
            if not self.residual:
                return Kind(None, turning)
            try:
                if not plain:
                    raise Untouchable("blocks pass more than hidden states to one another")
                found = stream.find(probe, folds, run, hidden)
                by = self.turns
                if any(norm.means for norm in found.norms.values()):
                    by = by.keeping_means()
                if not proof.turned_stream(probe, edits.of_stream(found, shapes, by), run, hidden, by):
                    raise Untouchable(
                        "what linears write into the hidden states passes something on its way, such as a norm"
                    )
            except Untouchable as reason:
                return Kind(None, turning, f"{skeleton.names.blocks}.{index}: {reason}")
        return Kind(found, turning)

    def refused(self) -> str:
        """Why the residual stream does not turn; "" where it does."""
        refused = next((kind.refused for kind in self.kinds if kind.refused), "")
        return refused or outside.refused(self.skeleton, self.turns)

    def rotated(self, residual: bool, refused: str) -> Rotated | None:
        """The checkpoint read through what turns; None where nothing does."""
        skeleton, found = self.skeleton, {}
        checkpoint, names = skeleton.checkpoint, skeleton.names
        turned = 0
        for index, kind in enumerate(self.kinds):
            shapes = {name: tuple(p.shape) for name, p in skeleton.blocks[index].named_parameters()}
            parts = [edits.of_heads(one, shapes, random(one.width, self.seed)) for one in kind.heads]
            turned += bool(parts)
            if residual and kind.stream:
                parts.append(edits.of_stream(kind.stream, shapes, self.turns))
            for local, edit in edits.joined(*parts).items():
                found[names.of_block(index, local)] = edit, partial(names.of_block, index)
        untied = 0
        if residual:
            rest, checkpoint = outside.edits_of(skeleton, self.turns)
            untied = sum(i.nbytes for n, i in checkpoint.infos.items() if n not in skeleton.checkpoint.infos)
            found |= {name: (edit, lambda local: local) for name, edit in rest.items()}
        if not found:
            return None
        rewritten = {
            stored: Rewrite(source, partial(self._values, name, edit, full))
            for name, (edit, full) in found.items()
            for stored, source in [outside.stored(skeleton, name)]
        }
        record = {
            "residual": self.width if residual else None,
            "values": turned,
            "seed": self.seed,
            "untied_bytes": untied,
        }
        notes = [f"rotated: {', '.join(_told(record, self.turns, len(self.kinds)))}"]
        if self.residual and not residual:
            notes.append(f"the residual stream is not rotated: {refused}")
        if untied:
            notes.append(
                f"embedding and head are no longer one tensor, because the final norm's weight goes into the "
                f"head: {untied / 1e6:,.1f} MB more (--transform rotate-v leaves them)"
            )
        return Rotated(replace(checkpoint, rewritten=rewritten), record, tuple(notes))

    def _values(self, name: str, edit: Edit, full: Callable, exact: bool, tensor: Tensor) -> Tensor:
        """A stored tensor's new values, in the precision it is stored in, or `exact` in float32."""
        skeleton = self.skeleton
        dtype = torch.float32 if exact else tensor.dtype

        def get(local: str) -> Tensor:
            return skeleton.checkpoint.read(skeleton.names.stored[full(local)], torch.float32)

        if name in skeleton.names.transposed:
            return edit.of(tensor.t(), get, dtype).t().contiguous()
        return edit.of(tensor, get, dtype)

    def same(self, found: Rotated, progress: Progress) -> bool:
        """Whether the model computes the same, in float32: before and after, block by block."""
        progress.phase("proving the rotation: the model before and after")
        exact = {name: replace(one, exact=True) for name, one in found.checkpoint.rewritten.items()}
        after = Skeleton(replace(found.checkpoint, rewritten=exact), torch.float32, self.skeleton.device)
        after.names.check_complete()
        after.load_rest()
        logits = []
        for skeleton in (self.skeleton, after):
            (hidden,) = walk.through(skeleton, [self.ids], decoded=True)
            logits.append(skeleton.logits(hidden[0]))
        return proof.difference(logits[1], logits[0]) <= SAME


def _told(record: Mapping, turns: Orthogonal, blocks: int) -> Sequence[str]:
    """What was turned, in words."""
    found = []
    if record["residual"]:
        kind = "Hadamard" if turns.is_hadamard else "random orthogonal"
        found.append(f"the residual stream of {record['residual']} channels ({kind})")
    if record["values"]:
        found.append(f"attention's values in {count(record['values'], 'block')} of {blocks}")
    return found
