"""Memory of an evaluation, estimated from shapes, and where to store its hidden states."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.machine.device import is_accelerator
from quantkit.models.skeleton import Skeleton
from quantkit.models.skeleton.linears import linears
from quantkit.quantize.calibrate.states import HERE, Place
from quantkit.quantize.prepare.memory import COMFORT, LOADED_LATER_BYTES, forward_memory
from quantkit.quantize.prepare.plan import FreeMemory, check_disk, check_memory, shapes_of
from quantkit.quantize.prepare.shapes import FLOAT32

CHUNK_BYTES = 1 << 26  # logits in memory at a time, per model
CHUNKS = 4  # in memory: two models' logits, and two copies where a model caps its logits


def need(
    checkpoints: Sequence[Checkpoint], dtype: torch.dtype, device: torch.device, tokens: int, batch: int,
    compared: bool, spilled: bool = False,
) -> tuple[int, int]:  # fmt: skip
    """Return (peak bytes above the interpreter on the computing device, bytes of one model's hidden states).

    The models run one after another over `tokens` tokens, `batch` tokens at a time. compared: there are
    several models; the first one's head and states then stay in memory. spilled: states are in a file.
    """
    most, base, states = 0, 0, 0
    for number, checkpoint in enumerate(checkpoints):
        skeleton = Skeleton(checkpoint, dtype, device)
        skeleton.names.check_complete()
        shapes = shapes_of(skeleton, linears(skeleton), tokens, batch)
        rest = shapes.rest * shapes.element
        in_memory = shapes.moving if spilled else shapes.states
        running = max(forward_memory(shapes, spilled), rest + shapes.largest)
        running += FLOAT32 * 4 * shapes.largest_linear if checkpoint.quantized else 0
        scoring = rest + in_memory + CHUNKS * CHUNK_BYTES
        most = max(most, (base if number else 0) + max(running, scoring))
        if not number:
            base, states = rest + (0 if spilled else in_memory), shapes.states
            most = max(most, base + max(running, scoring)) if compared else most
    return LOADED_LATER_BYTES + most, states


def decide(
    checkpoints: Sequence[Checkpoint], dtype: torch.dtype, device: torch.device, tokens: int, batch: int,
    compared: bool, max_memory: str | None,
) -> Place:  # fmt: skip
    """Return where to store the hidden states. Raises QuantkitError (exit code 5) if the evaluation does not
    fit the memory."""
    given = checkpoints, dtype, device, tokens, batch, compared
    free, accelerated = FreeMemory.of(device, max_memory), is_accelerator(device)
    here, states = need(*given)
    kept = (2 if compared else 1) * states
    if here <= COMFORT * free.computing:
        return HERE
    there, _ = need(*given, spilled=True)
    if accelerated and there <= free.computing and kept <= COMFORT * free.host:
        return Place("host")
    remedy = "--dtype bfloat16 or " * (dtype == torch.float32) + "a --device with more memory"
    if free.limit and not accelerated:
        remedy = free.limit.raised(there)
    check_memory(there, free.computing, remedy, device, free.limit, "the evaluation")
    durable = "TMPDIR" not in os.environ and os.access("/var/tmp", os.W_OK)  # /tmp is often in memory
    folder = Path("/var/tmp" if durable else tempfile.gettempdir())
    check_disk(folder, kept)
    return Place("disk", folder)
