"""The speed of this machine, measured by a benchmark of a few seconds.

The benchmark does what jobs consist of: products of matrices, the other operations of a decoder block, second
moments, error feedback. `plan` runs it once and keeps the result in the user's cache folder, by processor,
dtype and version of quantkit. It runs in one thread and counts CPU time, so that other processes do not
change the result; `SERIAL` says what more threads give.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit import __version__
from quantkit.models.files.atomic import replacing
from quantkit.models.machine import processor

if TYPE_CHECKING:
    from torch import Tensor

TOKENS, SEQLEN, HEAD = 2048, 256, 64  # of the block that the benchmark runs
HIDDEN, INNER = 512, 1536
FEW, MANY = 256, 2048  # rows of the two matrices that are solved
REPEATS = 3
SERIAL = {  # share of the time of one thread that more threads do not divide
    "product": 0.05, "float32": 0.05, "moment": 0.05, "value": 0.2, "column": 1.0, "weight": 0.5, "byte": 0.3
}  # fmt: skip
BYTES = 1 << 27  # read to measure the bandwidth


@dataclass(frozen=True)
class Speed:
    """Seconds of a unit of work.

    product: a multiplication and an addition in a product of matrices, in the dtype of the job. float32: the
    same in float32. moment: the same in second moments. value: a value that enters or leaves a linear of a
    block, for all operations but products. column, weight: of a matrix that error feedback quantizes. byte:
    read from memory.
    """

    product: float
    float32: float
    moment: float
    value: float
    column: float
    weight: float
    byte: float

    def with_threads(self, threads: int) -> Speed:
        """Return the speed of this many threads, from that of one."""
        shares = {name: serial + (1 - serial) / threads for name, serial in SERIAL.items()}
        return Speed(**{name: share * getattr(self, name) for name, share in shares.items()})


def of_machine(dtype: str) -> Speed:
    """Return the speed of one thread of this machine; measured unless the cache folder has it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "quantkit" / "speed.json"
    speeds: dict = {}
    try:
        speeds = json.loads(cache.read_text(encoding="utf-8"))
        return Speed(**{name: float(speeds[key(dtype)][name]) for name in SERIAL})
    except (OSError, ValueError, TypeError, LookupError):  # new, damaged, or of another machine or version
        speeds = speeds if isinstance(speeds, dict) else {}
    speed = measure(dtype)
    with contextlib.suppress(OSError):  # a read-only home: the next plan measures again
        cache.parent.mkdir(parents=True, exist_ok=True)
        with replacing(cache) as temporary:
            temporary.write_text(json.dumps(speeds | {key(dtype): asdict(speed)}, indent=1), encoding="utf-8")
    return speed


def key(dtype: str) -> str:
    """Return the name of this machine's speed in the cache folder."""
    return f"{processor.name()}, {dtype}, quantkit {__version__}"


def measure(dtype: str) -> Speed:
    """Run the benchmark."""
    import torch

    from quantkit.grids.affine import AffineGrid
    from quantkit.quantize.calibrate.capture import SiteSums
    from quantkit.quantize.solvers.gptq import GptqSolver

    def seconds(run: Callable[[], object]) -> float:
        times = []
        for _ in range(1 + REPEATS):  # the first run allocates and warms up
            start = time.thread_time()
            run()
            times.append(time.thread_time() - start)
        return min(times)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            X = torch.randn(TOKENS, INNER, generator=torch.Generator().manual_seed(0))
            W, inputs = X[:INNER], X.to(getattr(torch, dtype))
            weight = W.to(inputs.dtype)
            statistics, solver, grid = SiteSums(INNER, X.device), GptqSolver(), AffineGrid(4, HEAD)
            H = X[:, :HIDDEN].T @ X[:, :HIDDEN]
            few, many = (
                seconds(lambda rows=rows: solver.solve([X[:rows, :HIDDEN]], [grid], H))
                for rows in (FEW, MANY)
            )
            products = X.numel() * INNER
            hidden, inner = inputs[:, :HIDDEN].contiguous(), inputs
            memory = torch.ones(BYTES // 4)
            return Speed(
                product=seconds(lambda: inputs @ weight) / products,
                float32=seconds(lambda: X @ W) / products,
                moment=seconds(lambda: statistics.add(inputs)) / products,
                value=seconds(lambda: _without_products(hidden, inner)) / TOKENS / (8 * HIDDEN + 3 * INNER),
                column=max(0.0, MANY * few - FEW * many) / (MANY - FEW) / HIDDEN,
                weight=max(0.0, many - few) / (MANY - FEW) / HIDDEN,
                byte=seconds(memory.sum) / BYTES,
            )
    finally:
        torch.set_num_threads(threads)


def _without_products(hidden: Tensor, inner: Tensor) -> Tensor:
    """Run the operations of a decoder block that are not products with weights: norms in float32, residuals,
    positions, attention and gate. hidden: `[TOKENS, HIDDEN]`. inner: `[TOKENS, INNER]`."""
    import torch
    from torch.nn import functional as F

    for _ in range(2):
        rows = hidden.float()
        hidden = hidden + (rows * rows.square().mean(-1, keepdim=True).rsqrt()).to(hidden.dtype)
    heads = hidden.view(-1, SEQLEN, HIDDEN // HEAD, HEAD).transpose(1, 2)
    first, second = heads.chunk(2, -1)
    query, key = (heads * turn + torch.cat([-second, first], -1) * turn for turn in (0.6, 0.8))
    F.scaled_dot_product_attention(query, key, heads, is_causal=True)
    return F.silu(inner) * inner
