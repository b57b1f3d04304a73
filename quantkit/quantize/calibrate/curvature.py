"""What an error in a linear's outputs costs at the end of the model: the curvature on the output side.

For a linear with outputs `y [tokens, out]` it is `G = Σ g gᵀ`, `[out, out]`, with g the gradient by y of the
log-likelihood of a next token that is drawn from the model itself. That makes it Fisher information, by which
the KL divergence grows as `½ δᵀ F δ` for a small change δ. With `H = Σ x xᵀ` of its inputs, a linear's own
part of F is about `H ⊗ G` (K-FAC, Martens and Grosse 2015, arXiv:1503.05671, section 3), and the divergence
that an error `dW` costs about `tr(G dW H dWᵀ)`, which YAQA rounds by (Tseng et al. 2025, arXiv:2505.22988).

One pass forward through the unquantized model, and one back, a block at a time (`backward`). What enters each
block lies in files until it is needed again, so memory does not grow with the number of blocks; their pages
stay in the system's cache while there is room. The curvatures of a block lie in a file of the staging
folder until it is quantized; they are read from there even right after they were made, so that a job which is
resumed computes with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from quantkit.errors import RESOURCES, UNSUPPORTED, QuantkitError, first_line
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import walk
from quantkit.quantize.calibrate.backward import chunk_tokens, through_block, through_head
from quantkit.quantize.calibrate.capture import Statistics
from quantkit.quantize.calibrate.sites import PROBE_TOKENS
from quantkit.quantize.calibrate.states import Place, States, embedded
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging.blocks import Scratch
from quantkit.quantize.timings import Timings

STEPS = "gradients"  # what the progress calls it
BACK = 3  # forward passes that a block takes on the way back: once more forward, twice as much for gradients
SEED = 0  # of the tokens that are drawn


class Curvatures:
    """Of the linears of a job, by block, in the job's staging folder."""

    def __init__(self, scratch: Scratch, device: torch.device):
        self._scratch, self._device = scratch, device
        self._loaded: tuple[int, dict[str, Tensor]] = -1, {}

    def of(self, block: int, local: str) -> Tensor | None:
        """G of one linear, float32 `[out, out]`, its mean diagonal 1; None where no gradient reached it."""
        if self._loaded[0] != block:
            self._loaded = block, self._scratch.read(_file(block))
        found = self._loaded[1].get(local)
        return None if found is None else found.to(self._device).float()

    def done_with(self, block: int) -> None:
        """Its curvatures are needed no more."""
        self._loaded = -1, {}
        self._scratch.remove(_file(block))


def gather(
    skeleton: Skeleton,
    wanted: Mapping[int, Sequence[str]],
    batches: Sequence[Tensor],
    scratch: Scratch,
    timings: Timings,
    progress: Progress,
    place: Place | None = None,
) -> Curvatures:
    """The curvatures of the linears `wanted`, by block, unless an earlier run has made those of all of these
    blocks. What lies outside the blocks is loaded, and none of them. place: where states and gradients wait.

    Raises QuantkitError for a model that gradients do not flow back through.
    """
    curvatures = Curvatures(scratch, skeleton.device)
    if not wanted or scratch.is_complete(map(_file, wanted)):
        return curvatures
    progress.phase("gradients of the unquantized model")
    streams, skeleton.streams = skeleton.streams, False  # autograd keeps a block's weights until it is back
    try:
        with timings(STEPS):
            _refuse_without_gradients(skeleton)
            _Pass(skeleton, batches, scratch, progress, place).run(wanted)
        scratch.complete(map(_file, wanted))
    except torch.OutOfMemoryError as error:
        hint = "start again with a smaller --batch-size and --overwrite, or with --solver gptq"
        message = f"{skeleton.device} ran out of memory while gradients flowed back"
        raise QuantkitError(message, hint, RESOURCES) from error
    finally:
        skeleton.streams = streams
    return curvatures


class _Pass:
    """Forward, then back to the first block that is wanted."""

    def __init__(
        self,
        skeleton: Skeleton,
        batches: Sequence[Tensor],
        scratch: Scratch,
        progress: Progress,
        place: Place | None,
    ):
        self.skeleton, self.batches, self.scratch, self.progress = skeleton, batches, scratch, progress
        self.place = place
        self.steps = self.total = 0

    def run(self, names: Mapping[int, Sequence[str]]) -> None:
        """names: of the linears that are wanted, by block."""
        skeleton, depth = self.skeleton, len(self.skeleton.blocks)
        first = min(names)
        self.total = depth + BACK * (depth - first)
        self._step(0)
        states = embedded(self.batches, skeleton.embed, skeleton.device, self.place)
        for index, _ in walk.blocks(skeleton, _source):
            if index >= first:
                for k, hidden in enumerate(states):
                    self.scratch.write(_entering(index, k), {"states": hidden.cpu()})
            states.advance(skeleton.outputs(index, states))
            self._step(1)
        self._back_through_head(states)
        for index, block in walk.blocks(skeleton, _source, only=range(depth - 1, first - 1, -1)):
            self._back(index, block, states, names.get(index, ()))
            self._step(BACK)

    def _step(self, steps: int) -> None:
        self.steps += steps
        self.progress.counting(STEPS, self.steps, self.total)

    def _back_through_head(self, states: States) -> None:
        """The gradients of the final hidden states take their place."""
        generator = torch.Generator().manual_seed(SEED)
        size = chunk_tokens(self.skeleton.checkpoint.text_config.vocab_size)

        def loss(hidden: Tensor, span: slice) -> Tensor:
            logits = self.skeleton.logits(hidden, {}).float()
            drawn = draw(logits.detach(), generator)
            return nn.functional.cross_entropy(logits, drawn, reduction="sum")

        for k, hidden in enumerate(states):
            states[k] = through_head(hidden, size, loss)

    def _back(self, index: int, block: nn.Module, gradients: States, names: Sequence[str]) -> None:
        """From the gradients of what leaves a block to those of what enters it, which take their place."""
        linears = {name: block.get_submodule(name) for name in names}
        sums = {
            name: Statistics(linear.out_features, self.skeleton.device) for name, linear in linears.items()
        }
        run = partial(self.skeleton.trace_block, index, values={})
        with ExitStack() as stack:
            for name, linear in linears.items():
                stack.callback(linear.register_forward_hook(_listen(sums[name])).remove)
            for k, gradient in enumerate(gradients):
                entered = self.scratch.read(_entering(index, k))
                hidden = entered["states"].to(self.skeleton.device)
                gradients[k] = _flowing(through_block, run, hidden, gradient, what=type(block).__name__)
        self.scratch.write(
            _file(index), {name: _stored(name, part) for name, part in sums.items() if part.tokens}
        )
        for k in range(len(gradients)):
            self.scratch.remove(_entering(index, k))


def _listen(sums: Statistics) -> Callable[[nn.Module, tuple, Tensor], None]:
    """A hook that adds the gradients of a linear's outputs."""

    def hook(module: nn.Module, args: tuple, out: Tensor) -> None:
        if out.requires_grad and out.numel():
            out.register_hook(lambda gradient: sums.add(gradient.detach()))

    return hook


def draw(logits: Tensor, generator: torch.Generator) -> Tensor:
    """A token of each row's distribution, int64 `[rows]`, for `logits [rows, vocabulary]`; the random numbers
    are the host's, so that they are the same whatever computes."""
    level = torch.rand(len(logits), 1, generator=generator).to(logits.device)
    below = torch.softmax(logits, -1).cumsum_(-1) < level
    return below.sum(-1).clamp(max=logits.shape[-1] - 1)


def _stored(name: str, sums: Statistics) -> Tensor:
    """G as it lies in the file, float16 with a mean diagonal of 1: what it is damped by is far above what
    rounding it takes away."""
    found = sums.finish().hessian
    mean = found.diagonal().mean()
    if not torch.isfinite(found).all():
        raise QuantkitError(
            f"gradients at the outputs of {name} are not finite",
            hint="try --dtype float32, or --solver gptq, which needs none",
        )
    found = found.div_(mean) if mean > 0 else found.fill_diagonal_(1.0)
    return found.half().cpu()


def _refuse_without_gradients(skeleton: Skeleton) -> None:
    """Try a few tokens on one block of every kind, before the hours that may lie in front of the first."""
    kinds: dict[tuple, int] = {}
    for index, block in enumerate(skeleton.blocks):
        kinds.setdefault(tuple(type(part) for part in block.modules()), index)
    ids = torch.arange(PROBE_TOKENS)[None] % skeleton.checkpoint.text_config.vocab_size
    for index, block in walk.blocks(skeleton, _source, only=list(kinds.values())):
        hidden = skeleton.embed(ids)
        run = partial(skeleton.trace_block, index, values={})
        _flowing(through_block, run, hidden, torch.ones_like(hidden), what=type(block).__name__)


def _flowing(step: Callable[..., Tensor | None], *arguments: object, what: str) -> Tensor:
    """The gradient that a step gives. Raises QuantkitError where there is none."""
    try:
        found = step(*arguments)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        raise _unfit(f"gradients do not flow back through {what}: {first_line(error)}") from error
    if found is None:
        raise _unfit(f"no gradient flows back through {what}")
    return found


def _source(index: int) -> walk.Source:
    """Where blocks are read from: as their weights are, whatever a layout does to activations."""
    return None, True


def _unfit(message: str) -> QuantkitError:
    return QuantkitError(message, "use --solver gptq, which needs no gradients", UNSUPPORTED)


def _file(block: int) -> str:
    return f"curvature-{block:05d}"


def _entering(block: int, batch: int) -> str:
    return f"entering-{block:05d}-{batch:05d}"
