"""Stages of scripts/gpu_day with engines, other tools and several processes, each a function of a `Run`."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
from pathlib import Path

import torch
from common import DEMO, ROOT, run_script, served
from common import run as run_logged
from gpu.on_device import JOBS, few, made, shape
from gpu.run import Run, Skipped, command
from peers.jobs import ENVIRONMENTS, python_of, run_job, setup_of, write_tokens

from quantkit.models.machine.device import give_back

MODEL = "Llama-3-8B"  # its blocks, see `on_device.SHAPES`


def written(run: Run, name: str) -> Path:
    """Return the checkpoint of the stage `blocks`; write it if it is absent. Raises Failed."""
    folder = made(run, MODEL, name)
    if not (folder / "config.json").exists():
        method, *options = JOBS[name].split()
        options += few(run, JOBS[name])
        command(method, shape(run, MODEL), *options, "-o", folder, "--overwrite", "--device", run.device)
        give_back(torch.device(run.device))  # another process needs it
    return folder


def environment(run: Run, tool: str, note: str = "") -> Path:
    """Return the python of a tool, this one if it has the tool. Raises Skipped."""
    python = python_of(tool, run.environments)
    if python.exists():
        return python
    if importlib.util.find_spec(tool) is not None:
        return Path(sys.executable)
    setup = f"scripts/clients-setup.sh {setup_of(tool)}{note}"
    raise Skipped(f"no {ENVIRONMENTS[tool]} with {tool}: {setup}")


# vllm

ON_A_GPU = ("mxfp8", "w4a8 fp8", "gptq head 8", "fp4 modelopt")  # vLLM's CPU build has no kernel for them
CHECKPOINTS = (
    "gptq", "awq", "gptq ct", "gptq ct 8", "w4a8 int8", "fp8", "w8a8", "fp4", "fp4 inputs",
    "fp8 modelopt", *ON_A_GPU
)  # fmt: skip
NO_FP4 = "vLLM's CPU build has no kernel for 4-bit floats"
BLACKWELL = 10  # capability from which a device multiplies in 4 bit


def vllm(run: Run) -> None:
    """Probabilities by vLLM's kernels against those of quantkit's own decode."""
    python = environment(run, "vllm", " (with a GPU: pip install vllm)")
    without = {}
    if run.device == "cpu" or torch.cuda.get_device_capability()[0] < BLACKWELL:
        without["fp4 inputs"] = "the device has no products in 4 bit"
    if run.device == "cpu":
        without["gptq ct 8"] = "vLLM's CPU build has no kernel for integers of 8 bits"
        without["fp4"] = NO_FP4
        without |= dict.fromkeys(ON_A_GPU, "vLLM's CPU build has no kernel for it")
    for name, why in without.items():
        run.result["rows"].setdefault(name, {"skipped": why})
    for name in ("original", *CHECKPOINTS):
        if name not in without:
            run.row(name, agrees, run, python, name)


def agrees(run: Run, python: Path, name: str) -> dict:
    """Return KL divergences in nats per token: vLLM from quantkit's decode, the decode from the original."""
    models = [shape(run, MODEL), *([] if name == "original" else [written(run, name)])]
    log = run.work / "vllm" / f"{name.replace(' ', '-')}.log"
    few_tokens = "--ctx", "128", "--limit", "256", "--engine-option", "gpu_memory_utilization=0.5"
    record = served(models, log, "vllm", python, *few_tokens, "--device", run.device)
    engine = record["models"][-1]["engine"]
    changed = record["models"][2]["metrics"]["kld"]["mean"] if models[1:] else 0.0
    return engine | {"difference": engine["difference"]["mean"], "compression": changed}


# throughput

RATES = ROOT / "scripts/gpu/vllm_rates.py"
SIZES = {"prompt": 128, "new": 129, "batches": [1, 8, 64]}
SPEEDS = ("original", "gptq", "awq", "fp8", "fp4")


def throughput(run: Run) -> None:
    """Tokens a second in vLLM, of several sequences at once, without their prompts."""
    python = environment(run, "vllm", " (with a GPU: pip install vllm)")
    for name in SPEEDS:
        run.row(name, rates, run, python, name)


def rates(run: Run, python: Path, name: str) -> dict:
    """Return tokens a second of a checkpoint, and of its prompts, by number of sequences."""
    if run.device == "cpu" and name == "fp4":
        raise Skipped(NO_FP4)
    model = shape(run, MODEL) if name == "original" else written(run, name)
    sizes = {"prompt": 16, "new": 4, "batches": [1, 2]} if run.rehearse else SIZES
    options = {"enforce_eager": True} if run.rehearse else {"gpu_memory_utilization": 0.5}
    path = run.work / f"throughput/{name}.json"
    run_script(str(python), RATES, {"model": str(model), "options": options, **sizes}, path)
    return json.loads(path.with_suffix(".rates.json").read_text())


# peers

PEERS = {  # row: tool, job
    "llm-compressor gptq": ("llmcompressor", {"method": "gptq", "batch_size": 8}),
    "GPTQModel gptq": ("gptqmodel", {"method": "gptq", "batch_size": 8}),
    "quantkit gptq": ("quantkit", {"method": "gptq"}),
    "quantkit gptq unscaled": ("quantkit", {"method": "gptq", "options": {"transform": "none"}}),
    "llm-compressor awq": ("llmcompressor", {"method": "awq", "sym": False, "batch_size": 8}),
    "GPTQModel awq": ("gptqmodel", {"method": "awq", "sym": False, "batch_size": 8}),
    "quantkit awq": ("quantkit", {"method": "awq", "sym": False}),
    "llm-compressor gptq, whole": ("llmcompressor", {"method": "gptq", "batch_size": 8}),
}


def peers(run: Run) -> None:
    """Seconds of quantization alone, on the same tokens, of other tools and of quantkit run like them."""
    for name in PEERS:
        run.row(name, peer, run, name)


def peer(run: Run, name: str) -> dict:
    tool, options = PEERS[name]
    python = environment(run, tool) if tool in ENVIRONMENTS else python_of(tool)
    out = run.work / "peers" / name.replace(" ", "-")
    threads = 1 if run.rehearse else min(16, os.cpu_count() or 1)
    model = f"whole {MODEL}" if name.endswith("whole") else MODEL
    job = shape(run, model), tokens(run), out, python, threads
    result = run_job(tool, *job, device=run.device, **options)
    return {
        "phases": {phase: both["wall"] for phase, both in result["phases"].items()},
        "device_bytes": result.get("device_bytes"),
        "versions": result["versions"],
    }


def tokens(run: Run) -> Path:
    """Return the file of calibration tokens that quantkit's defaults cut, the same for all tools."""
    path = run.work / "peers/tokens.json"
    if not path.exists():
        write_tokens(shape(run, MODEL), path, *((4, 32) if run.rehearse else ()))
    return path


# bench

FEW = "--tokens 4 --prompt-tokens 4 --repeats 1"


def flags(run: Run, real: str, rehearsed: str) -> list[str]:
    return [*(rehearsed if run.rehearse else real).split(), "--device", run.device]


def bench(run: Run) -> None:
    """quantkit's own benchmarks."""
    run.row("attention", attention, run)
    run.row("batching", batching, run)
    run.row("specdec", specdec, run)
    run.row("decode", decode, run)


def attention(run: Run) -> dict:
    """Return seconds of a prefill, or the refusal, by implementation and length."""
    flash = importlib.util.find_spec("flash_attn") is not None and run.device != "cpu"
    options = flags(run, "--prompt-tokens 1024,2048,4096,8000", "--prompt-tokens 16,32 -n 2 --repeats 1")
    options += ["--implementations", "eager,sdpa" + (",flash_attention_2" if flash else "")]
    return {
        f"{row['attention']}, {row['length']} tokens": statistics.median(row["seconds"])
        if row["seconds"]
        else f"refused: {row['refused']}"
        for row in command("bench", "attention", shape(run, MODEL), *options)["rows"]
    }


def batching(run: Run) -> dict:
    """Return tokens a second of the three ways to batch, or the refusal."""
    options = flags(run, "", f"{FEW} --requests 2 --rate 100")
    return {
        row["strategy"]: row["figures"]["tokens_per_second"] if row["figures"] else row["refused"]
        for row in command("bench", "batching", shape(run, MODEL), *options)["outcomes"]
    }


def specdec(run: Run) -> dict:
    """Return speed-ups of drafts of the bundled model: it writes language, a random model does not."""
    target, draft = shape(run, MODEL) if run.rehearse else DEMO, run.work / "made/demo-gptq"
    command("gptq", target, *few(run, "gptq"), "-o", draft, "--overwrite", "--device", run.device)
    options = flags(run, "", f"{FEW} --prompts 1 --k 2")
    return {
        f"speed-up, {Path(row['draft']).name}": (row["measured"] or {}).get("speedup")
        for row in command("specdec", target, draft, "prompt-lookup", *options)["drafts"]
    }


def decode(run: Run) -> dict:
    """Return tokens a second in transformers, or the error, by model and batch."""
    names = ("nf4",) if run.rehearse else ("nf4", "gptq", "fp8")
    options = flags(run, "--batch 1,16", f"{FEW} --rounds 1 --warmup 0")
    models = [shape(run, MODEL), *(written(run, name) for name in names)]
    rates = {}
    for model in command("bench", *models, *options)["models"]:
        if model["error"]:
            rates[model["label"]] = model["error"]
        for point in model["points"]:
            rate = point["decode"] and point["decode"]["median"]
            rates[f"tokens/s, {model['label']}, batch {point['batch']}"] = rate
    return rates


# ranks


def ranks(run: Run) -> None:
    """Loss and seconds of a checkpoint by two processes and by one."""
    count = run.ranks or (0 if run.device == "cpu" else min(2, torch.cuda.device_count()))
    if count < 2:
        raise Skipped("one device: two processes need two")
    for processes in (1, count):
        run.row(str(processes), ranked, run, processes)


def ranked(run: Run, count: int) -> dict:
    out = run.work / f"ranks-{count}"
    line = ["gptq", str(shape(run, MODEL)), "-o", str(out), "--overwrite", "--device", run.device, "-q"]
    line += [*few(run, "gptq"), "--batch-size", "1"] if run.rehearse else []
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(count)] if count > 1 else []
    argv = [sys.executable, *launcher, "-m", "quantkit", *line]
    run_logged(argv, run.work / f"ranks-{count}.log", 1 if run.rehearse else 8, PYTHONPATH=str(ROOT))
    timings = json.loads((out / "quantkit-timings.json").read_text())
    linears = json.loads((out / "quantkit.json").read_text())["linears"]
    errors = [linear["error"] for linear in linears if linear.get("error") is not None]
    return {"phases": timings["seconds"], "loss": sum(errors) / len(errors)}
