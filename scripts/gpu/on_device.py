"""Stages of scripts/gpu_day that quantkit and torch run alone. Each is a function of a `Run`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from accelerator import NAME, far_apart, present
from common import DEMO, HELDOUT, ROOT, random_model
from gpu.run import Run, command


def seconds(run: Run, work: Callable[[], object], repeats: int = 1) -> float:
    """Return the seconds of one call, the device's work included; the first call is not counted."""
    from quantkit.models.machine.device import synchronize

    device = torch.device(run.device)
    work()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (time.perf_counter() - began) / repeats


# device


def device(run: Run) -> None:
    """The device, and rates of the operations that jobs consist of."""
    run.row("doctor", lambda: {"checks": command("doctor")["checks"]["machine"]})
    run.row("torch", torch_of, run)
    run.row("rates", rates, run)
    run.row("experts", experts, run)
    size = 256 if run.rehearse else 4096
    for columns in (size,) if run.rehearse else (size, 8192, 14336):
        run.row(f"factor {columns}", factor, run, columns)


def torch_of(run: Run) -> dict:
    row = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": run.device}
    if run.device != "cpu":
        about = torch.cuda.get_device_properties(0)
        row |= {"device": about.name, "capability": f"{about.major}.{about.minor}"}
        row |= {"memory_bytes": about.total_memory, "devices": torch.cuda.device_count()}
    return row


def rates(run: Run) -> dict:
    """Return seconds of a launch among many, FLOPS of products, bytes a second of copies."""
    size, device = (128, run.device) if run.rehearse else (8192, run.device)
    small, count = torch.ones(1024, device=device), 100 if run.rehearse else 10_000

    def launches() -> None:
        for _ in range(count):
            small.add_(1)

    rates = {"launch_seconds": seconds(run, launches) / count}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.randn(size, size, device=device).to(dtype)
        took = seconds(run, lambda matrix=matrix: matrix @ matrix, 3)
        rates[f"flops_{str(dtype).removeprefix('torch.')}"] = 2 * size**3 / took
    target, host = torch.empty(size, size, device=device), torch.empty(size, size)
    host = host.pin_memory() if device != "cpu" else host
    copied = seconds(run, lambda: torch.empty_like(target).copy_(target))
    rates["copy_bytes_per_second"] = target.nbytes / copied
    rates["to_device_bytes_per_second"] = host.nbytes / seconds(run, lambda: target.copy_(host))
    return rates


def experts(run: Run) -> dict:
    """Return seconds of one projection of 128 experts, expert by expert as jobs compute it and in one grouped
    product, the copy into one tensor included: what a grouped product would save."""
    count, each, hidden, inner = (4, 8, 128, 64) if run.rehearse else (128, 512, 2048, 768)
    made = {"device": run.device, "dtype": torch.bfloat16}
    weights = [torch.randn(inner, hidden, **made) for _ in range(count)]
    rows = torch.randn(count * each, hidden, **made)
    ends = torch.arange(1, count + 1, device=run.device, dtype=torch.int32) * each

    def singly() -> torch.Tensor:
        return torch.cat([part @ weight.t() for part, weight in zip(rows.split(each), weights, strict=True)])

    def grouped() -> torch.Tensor:
        return torch._grouped_mm(rows, torch.stack(weights).mT, ends)

    apart = (singly().float() - grouped().float()).abs().max().item()
    return {
        "seconds_singly": seconds(run, singly, 3),
        "seconds_grouped": seconds(run, grouped, 3),
        "apart": apart,
    }


def factor(run: Run, columns: int) -> dict:
    """Return seconds of the Cholesky factor of a Hessian."""
    from quantkit.quantize.solvers.hessian import factorize

    _, hessian = problem(run, 1, columns)
    order = torch.arange(columns, device=run.device)
    return {"seconds": seconds(run, lambda: factorize(hessian, 0.01, order))}


def problem(run: Run, rows: int, columns: int):
    """Return a weight and the Hessian of correlated inputs, on the device."""
    generator = torch.Generator(run.device).manual_seed(0)
    made = {"generator": generator, "device": run.device}
    inputs = torch.randn(2 * columns, columns, **made) * (torch.rand(columns, **made) + 0.1)
    inputs[:, 1:] += 0.5 * inputs[:, :-1].clone()
    hessian = 2 * inputs.T @ inputs / len(inputs)
    return 0.02 * torch.randn(rows, columns, **made), hessian


# methods

METHODS = [
    "gptq", "gptq --transform none", "gptq --act-order full", "gptq --bits 3 --no-sym", "gptq --solver rtn",
    "gptq --layout compressed-tensors", "awq", "awq --solver gptq", "nf4", "nf4 --solver gptq", "int8", "fp8",
    "fp8 --solver gptq", "fp8 --static --kv-cache", "w8a8", "fp4", "fp4 --activations", "fp4 --format mxfp4",
    "gguf -t Q4_K_M", "gguf -t Q4_K_M --solver rtn", "gguf -t IQ4_XS",
]  # fmt: skip


def methods(run: Run) -> None:
    """Every method on the CPU and on the device: the same bytes, or the same loss."""
    model = shape(run, "Llama-3-70B") if run.rehearse else DEMO
    for line in METHODS:
        run.row(line, both, run, model, line)


def few(run: Run, line: str, samples: str = "", seqlen: str = "") -> list[str]:
    """Return flags for less calibration text: always if sizes are given, else in a rehearsal."""
    method = line.split()[0]
    if (method in ("nf4", "int8") and "gptq" not in line) or not (run.rehearse or samples):
        return []
    samples, seqlen = ("4", "32") if run.rehearse else (samples, seqlen)
    return ["--samples", samples, "--seqlen", seqlen]


def both(run: Run, model: Path, line: str) -> dict:
    method, *options = line.split() + few(run, line, "16", "128")
    options += ["--dtype", "float32", "--overwrite"]
    end = ".gguf" if method == "gguf" else ""
    copies, took = [], []
    for name, device in (("cpu", "cpu"), ("device", NAME)):
        copies.append(run.work / "methods" / f"{line.replace(' ', '')}-{name}{end}")
        began = time.monotonic()
        with present():
            command(method, model, *options, "-o", copies[-1], "--device", device)
        took.append(time.monotonic() - began)
    stored = [path if end else path / "model.safetensors" for path in copies]
    limit = 256 if run.rehearse else 4096
    options = ["--text", HELDOUT, "--ctx", 64 if run.rehearse else 256, "--limit", limit, "--metrics", "kld"]
    record = command("eval", model, *copies, *options, "--dtype", "float32", "--device", run.device)
    kl = [copy["metrics"]["kld"]["mean"] for copy in record["models"][1:]]
    return {
        "same_bytes": not end and stored[0].read_bytes() == stored[1].read_bytes(),
        "other_weights": far_apart(*copies),
        "kl_cpu": kl[0], "kl_device": kl[1], "seconds_cpu": took[0], "seconds_device": took[1],
    }  # fmt: skip


# blocks, large, whole

SHAPES = {  # hidden, inner, blocks, heads, key_values, experts
    "Llama-3-8B": (4096, 14336, 2, 32, 8, 0),
    "Llama-3-70B": (8192, 28672, 1, 64, 8, 0),
    "Qwen3-30B-A3B": (2048, 768, 1, 32, 4, 128),
    "whole Llama-3-8B": (4096, 14336, 32, 32, 8, 0),
}
TINY = {
    "Llama-3-8B": (128, 128, 2, 2, 1, 0),
    "Llama-3-70B": (128, 128, 1, 2, 1, 0),
    "Qwen3-30B-A3B": (128, 128, 1, 2, 1, 2),
    "whole Llama-3-8B": (128, 128, 2, 2, 1, 0),
}
JOBS = {
    "gptq": "gptq", "gptq host": "gptq --states host", "gptq unscaled": "gptq --transform none",
    "awq": "awq", "gguf": "gguf -t Q4_K_M",
    "nf4": "nf4", "nf4 gptq": "nf4 --solver gptq", "fp8": "fp8", "fp4": "fp4",
    "fp4 inputs": "fp4 --activations", "gptq ct": "gptq --layout compressed-tensors", "w8a8": "w8a8",
    "gptq 2048": "gptq --seqlen 2048",
    "gptq ct 8": "gptq --layout compressed-tensors --bits 8", "mxfp4": "fp4 --format mxfp4",
    "mxfp8": "fp8 --format mxfp8", "w4a8 int8": "gptq --layout compressed-tensors --activations int8",
    "w4a8 fp8": "gptq --layout compressed-tensors --activations fp8",
    "gptq head 8": "gptq --head 8", "fp8 modelopt": "fp8 --layout modelopt",
    "fp4 modelopt": "fp4 --layout modelopt",
}  # fmt: skip
LARGE = ("gptq", "gptq host", "gguf", "nf4", "fp8", "awq", "mxfp4")
WHOLE = ("gptq", "gptq host", "gguf", "nf4", "fp8", "fp4", "awq")


def shape(run: Run, name: str) -> Path:
    """Return the folder of a random model of that shape, made unless it is there. It has a head of its own,
    which a row quantizes."""
    folder = run.work / "models" / name
    shapes = (TINY if run.rehearse else SHAPES)[name]
    whole = {"vocabulary": 128256} if name.startswith("whole") and not run.rehearse else {}
    made_on = "cpu" if run.rehearse else run.device
    active = 2 if run.rehearse else 8
    random_model(folder, *shapes, active=active, spread=True, device=made_on, tied=False, **whole)
    return folder


def blocks(run: Run) -> None:
    for name in JOBS:
        run.row(f"{name}, Llama-3-8B", job, run, "Llama-3-8B", name)


def large(run: Run) -> None:
    for name in LARGE:
        for model in ("Llama-3-70B", "Qwen3-30B-A3B"):
            run.row(f"{name}, {model}", job, run, model, name)


def whole(run: Run) -> None:
    for name in WHOLE:
        run.row(f"{name}, whole Llama-3-8B", job, run, "whole Llama-3-8B", name)
    run.row("eval, whole Llama-3-8B", evaluated, run, "whole Llama-3-8B")


def evaluated(run: Run, model: str) -> dict:
    """Return seconds of `eval` of what `whole` wrote, and the KL divergence of each."""
    copies = [path for name in WHOLE if (path := made(run, model, name)).exists()]
    options = [
        "--text",
        HELDOUT,
        "--ctx",
        64 if run.rehearse else 512,
        "--limit",
        256 if run.rehearse else 4096,
    ]
    began = time.monotonic()
    record = command("eval", shape(run, model), *copies, *options, "--metrics", "kld", "--device", run.device)
    row = {"seconds": time.monotonic() - began}
    losses = [one["metrics"]["kld"]["mean"] for one in record["models"][1:]]
    return row | {path.name: loss for path, loss in zip(copies, losses, strict=True)}


def made(run: Run, model: str, name: str) -> Path:
    return run.work / "made" / f"{model}-{name.replace(' ', '-')}{'.gguf' if name == 'gguf' else ''}"


def job(run: Run, model: str, name: str) -> dict:
    """Return seconds by phase, peak and planned memory, loss, and the launches that the double counts."""
    method, *options = JOBS[name].split()
    if name == "gptq 2048":  # the shipped text is shorter; what random weights compute does not depend on it
        text = run.work / "long.txt"
        shipped = [path.read_text() for path in sorted((ROOT / "calibration").glob("*.txt"))]
        text.write_text("\n".join(shipped) * 5)
        options += ["--calibration", text]
    options += few(run, JOBS[name])
    output = made(run, model, name)
    line = [method, shape(run, model), *options, "-o", output, "--overwrite", "--device", NAME]
    with present():
        planned = command(*line, "--dry-run")["plan"]
    with present() as device:
        began = time.monotonic()
        done = command(*line)
        took = time.monotonic() - began
        peak, launches = device.peak, device.launches.total()
    row = {"seconds": took, "phases": done["seconds"], "peak_bytes": peak}
    row |= {"planned_bytes": planned["memory_bytes"], "execution": planned["execution"]}
    row |= {"loss": done["error"], "rtn_loss": done["rtn_error"]}
    return row | {"steps_down": done["steps_down"], "launches": launches if run.rehearse else None}
