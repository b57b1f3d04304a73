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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from quantkit.errors import UNSUPPORTED, QuantkitError, count
from quantkit.models.files.checkpoint import Checkpoint, Rewrite
from quantkit.models.skeleton import Skeleton
from quantkit.models.skeleton.names import Names
from quantkit.quantize.calibrate import walk
from quantkit.quantize.calibrate.residual import Run
from quantkit.quantize.calibrate.sites import find_sites
from quantkit.quantize.progress import Progress
from quantkit.quantize.transforms import BlockView
from quantkit.quantize.transforms.fold import find_folds
from quantkit.quantize.transforms.probe import Probe, probing
from quantkit.quantize.transforms.rotation import edits, outside, stream
from quantkit.quantize.transforms.rotation.edits import Edit
from quantkit.quantize.transforms.rotation.orthogonal import random
from quantkit.quantize.transforms.rotation.stream import Heads, Stream, Untouchable

TOKENS = 8  # that the proofs are made with
SAME = 1e-3  # relative difference of a whole model's logits in float32; measured: 1e-6 to 1e-5
SEED = 0


@dataclass(frozen=True)
class Kind:
    """What was found of one block, for all that are built like it. refused: why its stream does not turn."""

    stream: Stream | None
    heads: list[Heads]
    refused: str = ""


@dataclass(frozen=True)
class Rotated:
    """The checkpoint as it is read through the rotations. turned: what is, in words; record: what the
    manifest says of it; notes: what else the user should know."""

    checkpoint: Checkpoint
    turned: str
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
    finder.skeleton.model.to("meta")  # gives its memory back
    refused = finder.refused
    for residual in [True, False] if finder.rest else [False]:
        found = finder.rotated(residual, refused)
        if found and (not prove or finder.same(found, progress)):
            progress.phase(f"rotated: {found.turned}")
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
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(config.vocab_size, (1, TOKENS), generator=generator)
        self.turns = random(config.hidden_size, seed)
        self.kinds = self._kinds(config.hidden_size)
        streams = [kind.stream for kind in self.kinds if kind.stream]
        means = any(norm.means for found in streams for norm in found.norms.values())
        if means or outside.subtracts_mean(skeleton.model, config.hidden_size):
            self.turns = self.turns.keeping_means()
        refused = next((kind.refused for kind in self.kinds if kind.refused), "")
        self.rest, self.refused = (None, refused) if refused or not residual else self._outside()

    def _outside(self) -> tuple[outside.Outside | None, str]:
        try:
            return outside.find(self.skeleton, self.turns), ""
        except Untouchable as reason:
            return None, str(reason)

    def _kinds(self, width: int) -> list[Kind]:
        """One of each block."""
        known: dict[tuple, Kind] = {}
        found = []
        skeleton, hidden = self.skeleton, self.skeleton.embed(self.ids)
        plain = hidden.shape[-1] == width
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
        away, stored = skeleton.away(index), lambda name, tensor: tensor
        view = BlockView(block, sites, {}, {}, lambda: run(hidden), stored, away)
        with probing(view) as probe:
            folds = find_folds(probe)
            turning: dict[str, Heads] = {}
            for one in stream.heads(probe, folds, skeleton.checkpoint.text_config):
                made = edits.of_heads(one, _shapes(block), random(one.width, self.seed))
                if one.values not in turning and edits.turned_heads(probe, made, one.reads):
                    turning[one.values] = one
            found = list(turning.values())
            if not self.residual:
                return Kind(None, found)
            try:
                if not plain:
                    raise Untouchable("blocks pass more than hidden states to one another")
                return Kind(self._stream(stream.find(probe, folds, run, hidden), probe, run, hidden), found)
            except Untouchable as reason:
                return Kind(None, found, f"{skeleton.names.blocks}.{index}: {reason}")

    def _stream(self, found: Stream, probe: Probe, run: Run, hidden: Tensor) -> Stream:
        """The same stream. Raises Untouchable unless it turns."""
        means = any(norm.means for norm in found.norms.values())
        by = self.turns.keeping_means() if means else self.turns
        if not edits.turned_stream(probe, edits.of_stream(found, _shapes(probe.block), by), run, hidden, by):
            raise Untouchable("what linears add to the hidden states passes something else first: a norm?")
        return found

    def rotated(self, residual: bool, refused: str) -> Rotated | None:
        """The checkpoint read through what turns, or through R2 alone; None where nothing does."""
        skeleton, checkpoint = self.skeleton, self.skeleton.checkpoint
        source, rewritten = Source(checkpoint, skeleton.names), {}
        for index, kind in enumerate(self.kinds):
            shapes = _shapes(skeleton.blocks[index])
            parts = [edits.of_heads(one, shapes, random(one.width, self.seed)) for one in kind.heads]
            parts += [edits.of_stream(kind.stream, shapes, self.turns)] if residual else []
            full = partial(skeleton.names.of_block, index)
            rewritten |= {
                skeleton.names.stored[full(local)]: source.rewrite(full(local), edit, full)
                for local, edit in edits.joined(*parts).items()
            }
        if residual:
            checkpoint, made = self.rest.checkpoint, self.rest.edits
            for name, edit in made.items():
                stored, of = self.rest.stored(name)
                rewritten[stored] = source.rewrite(name, edit, str, of)
        if not rewritten:
            return None
        found = replace(checkpoint, rewritten=rewritten)
        record = {
            "residual": self.turns.width if residual else None,
            "values": sum(bool(kind.heads) for kind in self.kinds),
            "seed": self.seed,
            "untied_bytes": sum(i.nbytes for i in found.infos.values()) - found.stored_bytes,
        }
        return Rotated(found, self._turned(record), record, tuple(self._notes(record, refused)))

    def _turned(self, record: Mapping) -> str:
        turned = []
        if width := record["residual"]:
            kind = "Hadamard" if self.turns.is_hadamard else "random orthogonal"
            turned.append(f"the residual stream of {width} channels ({kind})")
        if blocks := record["values"]:
            turned.append(f"attention's values in {count(blocks, 'block')} of {len(self.kinds)}")
        return " and ".join(turned)

    def _notes(self, record: Mapping, refused: str) -> Iterator[str]:
        """What the user should know beside that."""
        if self.residual and not record["residual"]:
            yield f"the residual stream is not rotated: {refused}"
        if untied := record["untied_bytes"]:
            yield (
                "embedding and head are no longer one tensor, because the final norm's weight goes into the "
                f"head: {untied / 1e6:,.1f} MB more (--transform rotate-v leaves them)"
            )

    def same(self, found: Rotated, progress: Progress) -> bool:
        """Whether the model computes the same, in float32: before and after, block by block."""
        progress.phase("proving the rotation: the model before and after")
        exact = {name: replace(one, exact=True) for name, one in found.checkpoint.rewritten.items()}
        logits = []
        for checkpoint in (self.skeleton.checkpoint, replace(found.checkpoint, rewritten=exact)):
            skeleton = Skeleton(checkpoint, torch.float32, self.skeleton.device)
            skeleton.names.check_complete()
            skeleton.load_rest()
            (hidden,) = walk.through(skeleton, [self.ids], decoded=True)
            logits.append(skeleton.logits(hidden[0]))
            skeleton.model.to("meta")  # one at a time
        return edits.difference(logits[1], logits[0]) <= SAME


@dataclass(frozen=True)
class Source:
    """Where values come from that are turned. `names` of the model whose checkpoint it is."""

    checkpoint: Checkpoint
    names: Names

    def rewrite(self, name: str, edit: Edit, full: Callable[[str], str], source: str = "") -> Rewrite:
        """Of the model's parameter `name`; `full` makes names in the model of those that the edit gives."""
        return Rewrite(source or self.names.stored[name], partial(self._values, name, edit, full))

    def _values(
        self, name: str, edit: Edit, full: Callable[[str], str], exact: bool, tensor: Tensor
    ) -> Tensor:
        """A stored tensor's new values, in the precision it is stored in, or `exact` in float32."""

        def get(other: str) -> Tensor:
            return self.checkpoint.read(self.names.stored[full(other)], torch.float32)

        dtype = torch.float32 if exact else tensor.dtype
        if name in self.names.transposed:
            return edit.of(tensor.t(), get, dtype).t().contiguous()
        return edit.of(tensor, get, dtype)


def _shapes(block: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(part.shape) for name, part in block.named_parameters()}
