"""Curvature on the output side: how much an error in a linear's outputs costs at the end of the model.

For a linear with outputs `y [tokens, out]` the curvature is `G = Σ g gᵀ`, `[out, out]`. g is the gradient by
y of the log-likelihood of a next token drawn from the model itself. A small change δ of the weights raises
the KL divergence by `½ δᵀ F δ`, where F is the Fisher information. With `H = Σ x xᵀ` of the linear's inputs,
the linear's block of F is about `H ⊗ G` (K-FAC, Martens and Grosse 2015, arXiv:1503.05671, section 3), so an
error `dW` costs about `tr(G dW H dWᵀ)`. YAQA minimises this cost (Tseng et al. 2025, arXiv:2505.22988).

The product of two means forgets that tokens differ in both factors: where g is small, an error of the outputs
costs little, whatever x is. So each token counts in H by its g (`Curvatures.weights`), as in YAQA's sketch B.

One forward and one backward pass run through the unquantized model, a block at a time (`backward`). Each
block's inputs are stored in files, so memory does not grow with the number of blocks. Curvatures and squared
gradients stay in a file of the staging folder until their block is quantized; they are always read from
there, so that a resumed job computes with the same numbers.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from quantkit.errors import RESOURCES, UNSUPPORTED, QuantkitError, first_line, require
from quantkit.models.files import reading
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import walk
from quantkit.quantize.calibrate.backward import Run, chunk_tokens, through_block, through_head
from quantkit.quantize.calibrate.capture import SiteSums
from quantkit.quantize.calibrate.states import Place, States, embedded
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging.blocks import StagedBlocks
from quantkit.quantize.staging.folder import GRADIENTS
from quantkit.quantize.timings import Timings

STEPS = "gradients"  # name of the stage
BACK = 3  # forward passes that a block's backward pass costs: 1 to run the block again, 2 for gradients
SEED = 0  # for drawing tokens from the model's predictions
POWER = 0.5  # of a token's squared gradient; the whole of it leaves few tokens in H, and their noise
LIMIT = 20.0  # largest weight of a token
TOKENS = "{}.tokens"  # stored name of the squared gradients at a linear's outputs


class Curvatures:
    """Curvatures of a job's linears and weights of its tokens, by block, in files of its staging folder."""

    def __init__(self, blocks: StagedBlocks, device: torch.device):
        self._blocks, self._device = blocks, device

    def of(self, block: int, local: str) -> Tensor | None:
        """Return G of one linear, float32 `[out, out]`, mean diagonal 1; None if no gradient reached it."""
        info = self._blocks.infos(block).get(local)
        return info and reading.tensor(info).to(self._device).float()

    def weights(self, block: int, linears: Sequence[str]) -> Tensor | None:
        """Return how much each token counts in H of a site with these linears, float32 `[tokens]`. That is
        the squared length of g, its mean over the linears, to the POWER; relative to the mean, at most LIMIT.
        None if one is unknown."""
        infos = self._blocks.infos(block)
        names = [TOKENS.format(name) for name in linears]
        if not all(name in infos for name in names):
            return None
        squares = torch.stack([reading.tensor(infos[name]) for name in names]).mean(0)
        weights = squares.pow(POWER)
        return (weights / weights.mean()).clamp(max=LIMIT).to(self._device)

    def done_with(self, block: int) -> None:
        """Delete the curvatures of a block."""
        self._blocks.forget(block)


@dataclass
class OutputGradients:
    """The gradients at the outputs of a linear. squares: their squared lengths, token by token."""

    sums: SiteSums
    squares: list[Tensor] = field(default_factory=list)

    def listen(self, linear: nn.Module, args: tuple, out: Tensor) -> None:
        """Add the gradients of `out` as soon as they are known; a forward hook."""
        if out.requires_grad and out.numel():
            out.register_hook(self._add)

    def _add(self, gradient: Tensor) -> None:
        self.sums.add(gradient.detach())
        self.squares.append(gradient.detach().float().square().sum(-1).flatten())

    def stored(self, name: str, tokens: int) -> dict[str, Tensor]:
        """Return tensors of the linear `name`: G with mean diagonal 1 in float16, whose rounding errors are
        far below the damping, and the squared lengths with mean 1 if there is one for each of the `tokens`.
        Nothing if no gradient arrived. Uses the sums up."""
        if not self.squares:
            return {}
        curvature, squares = self.sums.finish().hessian, torch.cat(self.squares)
        mean = curvature.diagonal().mean()
        what = f"gradients at the outputs of {name} are not finite"
        hint = "try --dtype float32, or --solver gptq, which needs none"
        require(torch.isfinite(curvature).all(), what, hint)
        curvature = curvature.div_(mean) if mean > 0 else curvature.fill_diagonal_(1.0)
        found = {name: curvature.half().cpu()}
        if len(squares) == tokens and mean > 0:
            found[TOKENS.format(name)] = (squares / squares.mean()).cpu()
        return found


def gather(
    skeleton: Skeleton,
    chosen: Mapping[int, Sequence[str]],
    batches: Sequence[Tensor],
    folder: Path,
    timings: Timings,
    progress: Progress,
    place: Place | None = None,
) -> Curvatures:
    """Compute the curvatures of the linears `chosen`, by block, unless an earlier run has computed all of
    them. The skeleton is loaded without its blocks. folder: staging folder; place: where hidden states and
    gradients are kept.

    Raises QuantkitError if gradients do not flow back through the model.
    """
    staged = StagedBlocks(folder / GRADIENTS)
    staged.lasting = False
    curvatures = Curvatures(staged, skeleton.device)
    if all(map(staged.is_done, chosen)):
        return curvatures
    staged.folder.mkdir(exist_ok=True)
    progress.phase("gradients of the unquantized model")
    streams, skeleton.streams = skeleton.streams, False  # autograd keeps weights until the backward pass
    try:
        with timings(STEPS):
            states = embedded(skeleton, batches, place)
            tokens = sum(ids.numel() for ids in batches)
            _pass(skeleton, chosen, states, tokens, staged, progress)
    except torch.OutOfMemoryError as error:
        hint = "start again with a smaller --batch-size and --overwrite, or with --solver gptq"
        message = f"{skeleton.device} ran out of memory while gradients flowed back"
        raise QuantkitError(message, hint, RESOURCES) from error
    finally:
        skeleton.streams = streams
        if not all(map(staged.is_done, chosen)):
            shutil.rmtree(staged.folder)
    return curvatures


def _pass(
    skeleton: Skeleton,
    chosen: Mapping[int, Sequence[str]],
    states: States,
    tokens: int,
    staged: StagedBlocks,
    progress: Progress,
) -> None:
    """Run forward, then backward to the first chosen block, and write the curvatures of each block."""
    depth, first = skeleton.depth, min(chosen)
    total = depth + BACK * (depth - first)
    entered: dict[int, States] = {}
    for index, _ in walk.blocks(skeleton, only=range(depth)):
        progress.counting(STEPS, index, total)
        if index >= first:
            entered[index] = States(states, skeleton.device, Place("disk", staged.folder))
        states.advance(skeleton.outputs(index, states))
    _back_through_head(skeleton, states)
    for index, block in walk.blocks(skeleton, only=range(depth - 1, first - 1, -1)):
        progress.counting(STEPS, total - BACK * (index + 1 - first), total)
        run = partial(skeleton.trace_block, index, values={})
        found = _back(run, block, entered.pop(index), states, chosen.get(index, ()))
        stored: dict[str, Tensor] = {}
        for name, gradients in found.items():
            stored |= gradients.stored(name, tokens)
        staged.save(index, stored, [])
    progress.counting(STEPS, total, total)


def _back_through_head(skeleton: Skeleton, states: States) -> None:
    """Replace the final hidden states by their gradients."""
    generator = torch.Generator().manual_seed(SEED)
    size = chunk_tokens(skeleton.checkpoint.text_config.vocab_size)

    def loss(hidden: Tensor, span: slice) -> Tensor:
        logits = skeleton.logits(hidden, {}).float()
        drawn = draw(logits.detach(), generator)
        return nn.functional.cross_entropy(logits, drawn, reduction="sum")

    for k, hidden in enumerate(states):
        states[k] = through_head(hidden, size, loss)


def _back(
    run: Run, block: nn.Module, entered: States, gradients: States, names: Sequence[str]
) -> dict[str, OutputGradients]:
    """Run a block backward. Return what is kept of the gradients of the outputs of linears `names`. Gradients
    of the block's outputs are replaced by those of its inputs. entered: the inputs.

    Raises QuantkitError if gradients do not flow back.
    """
    linears = {name: block.get_submodule(name) for name in names}
    device = next(block.parameters()).device
    found = {name: OutputGradients(SiteSums(part.out_features, device)) for name, part in linears.items()}
    with ExitStack() as stack:
        for name, linear in linears.items():
            stack.enter_context(linear.register_forward_hook(found[name].listen))
        for k, gradient in enumerate(gradients):
            try:
                entering = through_block(run, entered[k], gradient)
            except (RuntimeError, NotImplementedError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise _unfit(block, first_line(error)) from error
            if entering is None:
                raise _unfit(block, "it has none")
            gradients[k] = entering
    return found


def draw(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a token from each row's distribution: int64 `[rows]`, for `logits [rows, vocabulary]`. Random
    numbers are drawn on the host, so that every device gets the same."""
    level = torch.rand(len(logits), 1, generator=generator).to(logits.device)
    below = torch.softmax(logits, -1).cumsum_(-1) < level
    return below.sum(-1).clamp(max=logits.shape[-1] - 1)


def _unfit(block: nn.Module, reason: str) -> QuantkitError:
    message = f"gradients do not flow back through {type(block).__name__}: {reason}"
    return QuantkitError(message, "use --solver gptq, which needs no gradients", UNSUPPORTED)
