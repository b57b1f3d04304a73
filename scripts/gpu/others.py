"""Stages of scripts/gpu_day with engines, other tools and several processes, each a function of a `Run`."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from common import DEMO, first_record, run_script
from common import run as run_logged
from gpu.on_device import JOBS, few, made, shape
from gpu.worker import ROOT, Failed, Run, Skipped, command

from quantkit.models.machine.device import give_back

MODEL = "Llama-3-8B"  # its blocks, see `on_device.SHAPES`


def written(run: Run, name: str) -> Path:
    """Return what the stage `blocks` wrote, or write it. Raises Failed."""
    folder = made(run, MODEL, name)
    if not (folder / "config.json").exists():
        method, *options = JOBS[name].split()
        options += few(run, JOBS[name])
        command(method, shape(run, MODEL), *options, "-o", folder, "--overwrite", "--device", run.device)
        give_back(torch.device(run.device))  # another process needs it
    return folder


def environment(run: Run, name: str, package: str, setup: str) -> str:
    """Return the python of another environment, or this one's if it has the package. Raises Skipped."""
    python = run.environments / name / "bin/python"
    if python.exists():
        return str(python)
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    raise Skipped(f"no {name} with {package}: scripts/clients-setup.sh {setup}")


# vllm

SERVED = ("gptq", "awq", "gptq ct", "gptq ct 8", "fp8", "w8a8", "fp4", "fp4 inputs")
BLACKWELL = 10  # capability from which a device multiplies in 4 bit


def vllm(run: Run) -> None:
    """Log probabilities against quantkit's own decode, then tokens a second of the same checkpoints."""
    python = environment(run, ".venv-vllm", "vllm", "vllm (with a GPU: pip install vllm)")
    without = {}
    if run.device == "cpu" or torch.cuda.get_device_capability()[0] < BLACKWELL:
        without["fp4 inputs"] = "the device has no products in 4 bit"
    if run.device == "cpu":
        without["gptq ct 8"] = "vLLM's CPU build has no kernel for integers of 8 bits"
        without["fp4"] = "vLLM's CPU build has no kernel for 4-bit floats"
    for name, why in without.items():
        run.result["rows"].setdefault(name, {"skipped": why})
    kept = [name for name in SERVED if name not in without]
    for name in ("original", *kept):
        run.row(name, agrees, run, python, name)
    for name in ("original", *kept):
        run.row(f"served {name}", served, run, python, name)


def agrees(run: Run, python: str, name: str) -> dict:
    """Differences of log probabilities in nats, from vLLM's kernels to quantkit's decode."""
    import clients

    source = shape(run, MODEL)
    folder = source if name == "original" else written(run, name)
    place = run.work / "vllm" / name.replace(" ", "-")
    request = {"ids": clients.IDS, "new_tokens": clients.NEW_TOKENS, "top": clients.TOP, "as_is": False}
    result = place.with_suffix(".result.json")
    request["jobs"] = [{"folder": str(folder), "dtype": "float16", "result": str(result)}]
    run_script(python, ROOT / "scripts/clients/run_vllm.py", request, place.with_suffix(".json"), threads=8)
    found = json.loads(result.read_text())
    if "error" in found:
        raise Failed(found["error"])
    cells = clients.compare(folder, source, found, clients.SHARE)
    names = ("verdict", "mean", "largest", "compression", "likeliest_equal", "greedy_equal")
    return dict(zip(names, cells, strict=True)) | {"versions": found["versions"]}


def served(run: Run, python: str, name: str, engine: str = "vllm") -> dict:
    """Tokens a second of `quantkit serve`, by users at once."""
    folder = shape(run, MODEL) if name == "original" else written(run, name)
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    env.pop("TORCHDYNAMO_DISABLE", None)  # vLLM does not start without its compiler
    argv = [sys.executable, "-m", "quantkit", "serve", str(folder), "--engine", engine, "--port", "0"]
    argv += ["--device", run.device, "--json", "-q"]
    with (run.work / "serve.log").open("w") as log:
        server = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True, env=env, cwd=run.work)
    try:
        told = first_record(server)
        if "url" not in told:
            raise Failed(" ".join((run.work / "serve.log").read_text().split())[-300:])
        users = (1, 2) if run.rehearse else (1, 8, 32)
        words, tokens = (8, 4) if run.rehearse else (128, 128)
        rates = {str(number): under_load(told, number, words, tokens) for number in users}
        return {"started_seconds": told["proof"]["started_seconds"], "tokens_per_second": rates}
    finally:
        server.terminate()
        server.wait(60)


def under_load(told: dict, users: int, words: int, tokens: int) -> float:
    """Return the new tokens a second of all users together; each sends four requests, one after the other."""

    def answered(number: int) -> int:
        body = {"model": told["model"], "max_tokens": tokens, "ignore_eos": True}
        body["prompt"] = f"{users} {number}" + " time" * words  # no two share a cached prefix
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{told['url']}/completions", data, headers)
        with urllib.request.urlopen(asked, timeout=300) as response:
            return json.load(response)["usage"]["completion_tokens"]

    began = time.perf_counter()
    with ThreadPoolExecutor(users) as pool:
        made = sum(pool.map(answered, range(4 * users)))
    return made / (time.perf_counter() - began)


# peers

PEERS = {  # row: environment, package, its name for clients-setup.sh, job
    "llm-compressor gptq": (
        ".venv-peers/llmcompressor",
        "llmcompressor",
        "llmcompressor",
        {"method": "gptq", "batch_size": 8},
    ),
    "GPTQModel gptq": (".venv-clients", "gptqmodel", "clients", {"method": "gptq", "batch_size": 8}),
    "quantkit gptq": ("", "quantkit", "", {"method": "gptq"}),
    "quantkit gptq unscaled": ("", "quantkit", "", {"method": "gptq", "options": {"transform": "none"}}),
    "llm-compressor awq": (
        ".venv-peers/llmcompressor",
        "llmcompressor",
        "llmcompressor",
        {"method": "awq", "sym": False, "batch_size": 8},
    ),
    "GPTQModel awq": (
        ".venv-clients",
        "gptqmodel",
        "clients",
        {"method": "awq", "sym": False, "batch_size": 8},
    ),
    "quantkit awq": ("", "quantkit", "", {"method": "awq", "sym": False}),
}


def peers(run: Run) -> None:
    """Seconds of quantization alone, on the same tokens, of other tools and of quantkit run like them."""
    for name in PEERS:
        run.row(name, peer, run, name)


def peer(run: Run, name: str) -> dict:
    place, package, setup, job = PEERS[name]
    python = environment(run, place, package, setup) if place else sys.executable
    path = run.work / "peers" / f"{name.replace(' ', '-')}.json"
    request = {"tool": package, "model": str(shape(run, MODEL)), "tokens": str(tokens(run))}
    request |= {"out": str(path.with_suffix("")), "device": run.device, **job}
    request |= {"threads": 1 if run.rehearse else min(16, os.cpu_count() or 1)}
    pythonpath = str(ROOT) if package == "quantkit" else ""
    run_script(python, ROOT / "scripts/peers/run.py", request, path, request["threads"], pythonpath)
    found = json.loads(path.with_suffix(".result.json").read_text())
    return {
        "phases": {phase: both["wall"] for phase, both in found["phases"].items()},
        "device_bytes": found.get("device_bytes"),
        "versions": found["versions"],
    }


def tokens(run: Run) -> Path:
    """Write the calibration tokens that quantkit's defaults cut, for every tool the same."""
    from quantkit.models.files.open import open_checkpoint
    from quantkit.options import CalibrationOptions
    from quantkit.text import calibration

    path = run.work / "peers/tokens.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        options = CalibrationOptions(samples=4, seqlen=32) if run.rehearse else CalibrationOptions()
        cut = calibration.load(open_checkpoint(str(shape(run, MODEL))), options)
        path.write_text(json.dumps(cut.tokens.tolist()))
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
    """Seconds and memory of a prefill, by implementation and length."""
    flash = importlib.util.find_spec("flash_attn") is not None and run.device != "cpu"
    asked = flags(run, "--prompt-tokens 1024,2048,4096,8000", "--prompt-tokens 16,32 -n 2 --repeats 1")
    asked += ["--implementations", "eager,sdpa" + (",flash_attention_2" if flash else "")]
    rows = []
    for one in command("bench", "attention", shape(run, MODEL), *asked)["rows"]:
        rows.append({key: one[key] for key in ("attention", "length", "kernel", "prefill_bytes", "refused")})
        if one["seconds"]:
            rows[-1]["seconds"] = statistics.median(one["seconds"])
    return {"measured": rows, "flash_attn": "measured" if flash else "not installed"}


def batching(run: Run) -> dict:
    """Tokens a second of the three ways to batch."""
    asked = flags(run, "", f"{FEW} --requests 2 --rate 100")
    found = command("bench", "batching", shape(run, MODEL), *asked)["outcomes"]
    rates = {one["strategy"]: (one["figures"] or {}).get("tokens_per_second") for one in found}
    return {"tokens_per_second": rates, "refused": [one["refused"] for one in found if one["refused"]]}


def specdec(run: Run) -> dict:
    """Whether drafts of the bundled model pay: its texts are language, a random model's are not."""
    target, draft = shape(run, MODEL) if run.rehearse else DEMO, run.work / "made/demo-gptq"
    command("gptq", target, *few(run, "gptq"), "-o", draft, "--overwrite", "--device", run.device)
    asked = flags(run, "", f"{FEW} --prompts 1 --k 2")
    rows = []
    for one in command("specdec", target, draft, "prompt-lookup", *asked)["drafts"]:
        rows.append({key: one[key] for key in ("draft", "alpha", "cost", "measured")})
        rows[-1]["alike"] = one["proof"]["alike"]
    return {"drafts": rows}


def decode(run: Run) -> dict:
    """Tokens a second in transformers, a process a model."""
    names = ("nf4",) if run.rehearse else ("nf4", "gptq", "fp8")
    asked = flags(run, "--batch 1,16", f"{FEW} --rounds 1 --warmup 0")
    models = [shape(run, MODEL), *(written(run, name) for name in names)]
    found = {}
    for one in command("bench", *models, *asked)["models"]:
        points = {str(at["batch"]): at["decode"] and at["decode"]["median"] for at in one["points"]}
        found[one["label"]] = {"engine": one["engine"], "tokens_per_second": points, "error": one["error"]}
    return {"models": found}


# ranks


def ranks(run: Run) -> None:
    """Two processes write a checkpoint that has lost as much as one process's."""
    count = run.ranks or (0 if run.device == "cpu" else min(2, torch.cuda.device_count()))
    if count < 2:
        raise Skipped("one device: two processes need two")
    for each in (1, count):
        run.row(str(each), ranked, run, each)


def ranked(run: Run, count: int) -> dict:
    out = run.work / f"ranks-{count}"
    line = ["gptq", str(shape(run, MODEL)), "-o", str(out), "--overwrite", "--device", run.device, "-q"]
    line += [*few(run, "gptq"), "--batch-size", "1"] if run.rehearse else []
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(count)] if count > 1 else []
    argv = [sys.executable, *launcher, "-m", "quantkit", *line]
    run_logged(argv, run.work / f"ranks-{count}.log", 1 if run.rehearse else 8, PYTHONPATH=str(ROOT))
    timings = json.loads((out / "quantkit-timings.json").read_text())
    linears = json.loads((out / "quantkit.json").read_text())["linears"]
    lost = [row["error"] for row in linears if row.get("error") is not None]
    return {"phases": timings["seconds"], "loss": sum(lost) / len(lost)}
