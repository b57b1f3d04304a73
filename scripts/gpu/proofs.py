"""Stages of scripts/gpu_day about the experiments of scripts/sweep, and the tests. Functions of a `Run`."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as xml
from collections.abc import Callable
from contextlib import nullcontext

import torch
from accelerator import NAME
from gpu.on_device import problem, seconds
from gpu.worker import ROOT, Run, Skipped

# sweep


def sweep(run: Run) -> None:
    """GPTQ as it is, captured and as a kernel: seconds, launches and whether they choose the same."""
    shapes = [(4, 256)] if run.rehearse else [(4096, 4096), (28672, 4096), (4096, 14336)]
    for rows, columns in shapes:
        plain: dict = {}
        for name, way in ways(run):
            run.row(f"{name}, {rows} x {columns}", one_way, run, way, (rows, columns), plain)


def ways(run: Run) -> list[tuple[str, Callable]]:
    from sweep import graph, interpreter

    found = [("plain", nullcontext), ("graph", graph.plugged)]
    if why := interpreter.unavailable(run.device):

        def absent():
            raise Skipped(why)

        return [*found, ("triton", absent)]
    from sweep import triton_sweep as kernel

    tried = [(4, 4)] if run.rehearse else [(rows, warps) for warps in kernel.WARPS for rows in kernel.BLOCKS]
    return found + [(f"triton {b} rows {w} warps", lambda b=b, w=w: kernel.plugged(b, w)) for b, w in tried]


def one_way(run: Run, way: Callable, size: tuple[int, int], plain: dict) -> dict:
    from quantkit.grids.affine import AffineGrid
    from quantkit.quantize.solvers.gptq import GptqSolver

    grid, found = AffineGrid(4, 128), {}
    weight, statistics = problem(run, *size)

    def solved(refine: int):
        return GptqSolver(refine=refine, target="own").solve([weight], [grid], statistics)[0]

    if not plain:
        with torch.inference_mode():
            first = solved(2)
        plain |= {"codes": first.weight.codes, "error": first.error}
    with way(), torch.inference_mode():
        for refine in (0, 2):
            found[f"seconds_refine_{refine}"] = seconds(run, lambda refine=refine: solved(refine))
        last = solved(2)
        if run.device != "cpu":
            found["launches_per_column"] = launched(lambda: solved(2)) / size[1]
    same = (plain["codes"] == last.weight.codes).float().mean().item()
    return found | {"same_codes": same, "loss_ratio": last.error / plain["error"]}


def launched(work: Callable[[], object]) -> int:
    """Return how many kernels ran on the device, copies included, a graph's as well."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    return sum(1 for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA)


# tests

FILES = ("test_accelerator.py", "test_bench.py", "test_sweep_experiments.py")


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
    basetemp = run.work / "pytest"
    pytest.main(
        ["-q", "-p", "no:cacheprovider", f"--basetemp={basetemp}", f"--junitxml={report}", "-k", only,
         f"--rootdir={ROOT}", str(ROOT / "tests" / name)]
    )  # fmt: skip
    cases = list(xml.parse(report).iter("testcase"))
    failed = [
        case.get("name")
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = [case.get("name") for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(failed) - len(skipped)
    return {"device": NAME, "passed": passed, "left_out": len(skipped), "failed": failed}
