"""Stages of scripts/gpu_day about the solver's fast paths, and the tests. Functions of a `Run`."""

from __future__ import annotations

import importlib.util
import os
import xml.etree.ElementTree as xml
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import torch
from accelerator import NAME
from common import ROOT
from gpu.on_device import problem, seconds
from gpu.run import Run, Skipped

# sweep

WAYS = {  # name -> the parts that are switched off
    "plain": ("replays", "kernel"), "replayed": ("kernel",), "kernel": ("replays",), "both": (),
}  # fmt: skip


def sweep(run: Run) -> None:
    """GPTQ with and without replays and the kernel: seconds, launches and whether they choose the same."""
    for size in [(4, 256)] if run.rehearse else [(4096, 4096), (28672, 4096), (4096, 14336)]:
        plain: dict = {}
        for name in WAYS:
            run.row(f"{name}, {size[0]} x {size[1]}", one_way, run, name, size, plain)


@contextmanager
def without(parts: tuple[str, ...]) -> Iterator[None]:
    """Run the solver without these parts."""
    from quantkit.quantize.solvers import columns
    from quantkit.quantize.solvers.gptq import GptqSolver

    with ExitStack() as stack:
        if "replays" in parts:
            stack.enter_context(mock.patch.object(GptqSolver, "_replays", None))
        if "kernel" in parts:
            stack.enter_context(mock.patch.object(columns, "triton_kernel", lambda device, load: None))
        yield


def one_way(run: Run, way: str, size: tuple[int, int], plain: dict) -> dict:
    from quantkit.grids.affine import AffineGrid
    from quantkit.quantize.solvers.gptq import GptqSolver

    grid, row = AffineGrid(4, 128, signed=True), {}
    weight, hessian = problem(run, *size)
    with without(WAYS[way]), torch.inference_mode():
        for refine in (0, 2):
            solver = GptqSolver(refine=refine, target="own")
            solve = partial(solver.solve, [weight], [grid], hessian)
            solve()  # records the graph that is replayed
            row[f"seconds_refine_{refine}"] = seconds(run, solve)
        (last,) = solve()
        if run.device != "cpu":
            row["launches_per_column"] = launched(solve) / size[1]
    if not plain:
        plain |= {"codes": last.weight.codes, "error": last.error}
    same = (plain["codes"] == last.weight.codes).float().mean().item()
    return row | {"same_codes": same, "loss_ratio": last.error / plain["error"]}


def launched(work: Callable[[], object]) -> int:
    """Return how often the host launched a kernel, a copy or a graph."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    started = ("cudaLaunch", "cuLaunch", "cudaMemcpyAsync", "cudaGraphLaunch", "cudaMemsetAsync")
    return sum(event.count for event in seen.key_averages() if event.key.startswith(started))


# tests

FILES = ("test_accelerator.py", "test_bench.py", "test_chain.py")


def tests(run: Run) -> None:
    """The tests that run on QUANTKIT_DEVICE, a file a row."""
    if importlib.util.find_spec("pytest") is None:
        raise Skipped("pytest is not installed")
    for name in FILES[:1] if run.rehearse else FILES:
        run.row(name, tested, run, name)


def tested(run: Run, name: str) -> dict:
    """Return counts and the names of failed tests."""
    import pytest

    report = run.work / f"{name}.xml"
    only = {"test_bench.py": "accelerator"}.get(name, "")
    if run.rehearse:
        only = "bytes_of_the_cpu and nf4 and single"
    line = ["-q", "-p", "no:cacheprovider", f"--basetemp={run.work / 'pytest'}", f"--junitxml={report}"]
    if importlib.util.find_spec("xdist") and not run.rehearse:
        line += ["-n", str(min(8, os.cpu_count() or 1))]
    pytest.main([*line, "-k", only, f"--rootdir={ROOT}", str(ROOT / "tests" / name)])
    cases = list(xml.parse(report).iter("testcase"))
    names = {
        kind: [case.get("name") for case in cases if case.find(kind) is not None]
        for kind in ("failure", "error", "skipped")
    }
    failed, skipped = names["failure"] + names["error"], names["skipped"]
    passed = len(cases) - len(failed) - len(skipped)
    return {"device": NAME, "passed": passed, "left_out": len(skipped), "failed": failed}
