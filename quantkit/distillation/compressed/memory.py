"""Memory of a distillation, estimated from shapes."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.distillation.compressed.blocks import Text
from quantkit.distillation.compressed.student import Student
from quantkit.distillation.options import DistillOptions
from quantkit.models.machine.device import free_memory
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate.backward import CHUNK_BYTES, CHUNK_TOKENS
from quantkit.quantize.prepare.plan import check_memory

FLOAT32 = 4
TRACED = 1 + 4 * FLOAT32  # bytes a weight of the block that runs: code, level, value, and two gradients
HELD = 2  # bytes a weight of all blocks: its code, and less for trained floats and their moments
ROOM = 0.8  # share of the free memory beyond which codes are read again instead of kept


@dataclass(frozen=True)
class Memory:
    """Peak bytes above the interpreter: of the stage by blocks, and of that end to end, 0 where it is left
    out; hold: whether the codes of all blocks are in memory there."""

    blocks: int
    whole: int
    hold: bool


def plan(teacher: Skeleton, student: Student, text: Text, options: DistillOptions) -> Memory:
    """Return the peak memory of both stages, and whether the codes of all blocks fit in memory.

    Raises QuantkitError (exit code 5) if not even one block's codes fit.
    """
    element, free = teacher.dtype.itemsize, free_memory(teacher.device)
    sizes = [sum(p.numel() for p in block.parameters()) for block in student.skeleton.blocks]
    inside, largest = sum(sizes), max(sizes)
    outside = sum(one.parameters - inside for one in (teacher, student.skeleton)) * element
    batch = text.train[0].numel()
    train, held_out = (sum(part.numel() for part in parts) for parts in (text.train, text.held_out))
    width = teacher.checkpoint.text_config.hidden_size * element
    matrices = [p.shape for p in student.skeleton.blocks[0].parameters() if p.ndim == 2]
    tracing = largest * TRACED + 3 * FLOAT32 * batch * sum(sum(shape) for shape in matrices)
    states = width * (2 * train + 3 * held_out + batch * (student.depth + 2))
    logits = 4 * min(FLOAT32 * CHUNK_TOKENS * student.checkpoint.text_config.vocab_size, CHUNK_BYTES)
    need = outside + tracing + states + logits
    hold = bool(options.epochs) and need + HELD * inside <= ROOM * free
    remedy = "fewer --samples, shorter --seqlen or a smaller --batch-size"
    check_memory(need, free, remedy, teacher.device)
    return Memory(need, need + HELD * inside * hold if options.epochs else 0, hold)
