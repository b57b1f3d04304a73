"""Peak memory of a job against the number of experts: it must not grow.

    python scripts/bench_experts_memory.py [--jobs gptq nf4 --experts 8 64 --free 300]

Each job runs in a process of its own on a random Qwen3-MoE of one block. What is printed is the most
anonymous memory of the process (RssAnon, looked at every few milliseconds) above what it held after the
imports, before the job: pages of files that are mapped for reading are not counted, as the system takes them
back when it likes. `gptq repeat` is told that so many MiB are free, and plans its passes for that: where more
is free it takes more, to run fewer.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DEMO = Path(__file__).parent.parent / "tests/data/demo-llama-6m"
JOBS = {
    "gptq": ("gptq", {}, "suspend"),
    "gptq repeat": ("gptq", {}, "repeat"),
    "nf4": ("nf4", {}, "auto"),
    "int8": ("int8", {}, "auto"),
    "awq": ("awq", {}, "auto"),
    "gguf": ("gguf", {"solver": "rtn", "imatrix": "none"}, "auto"),
}
CHILD = """
import json, sys, threading, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from quantkit.quantize import job, methods, loop, room
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.quantize.progress import Progress

def anonymous():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("RssAnon"))
    return int(line.split()[1]) / 1024

def prepare(model):
    return job.prepare(job.Request(
        source=model, method=method, options=methods.load(method).Options(**options), output=Path(out),
        calibration=CalibrationOptions(samples=samples, seqlen=seqlen),
        run=RunOptions(threads=1, sequential=mode, batch_size=2, allow_unread=True), overwrite=True,
    ), Progress())

peak, over = 0, threading.Event()
def watch():
    global peak
    while not over.wait(0.003):
        peak = max(peak, anonymous())

method, options, mode, tiny, model, out, samples, seqlen, free = json.loads(sys.argv[1])
loop.run(prepare(tiny), Progress())  # what is imported on the way
if free and mode == "repeat":
    room.free_memory = lambda device: free << 20
baseline, began = anonymous(), time.monotonic()
watcher = threading.Thread(target=watch)
watcher.start()
prepared = prepare(model)
loop.run(prepared, Progress())
over.set()
watcher.join()
at_once = prepared.plan.execution.at_once
print(baseline, peak - baseline, prepared.plan.memory_bytes / 2**20, at_once, time.monotonic() - began)
"""


def make(folder: Path, hidden: int, inner: int, experts: int, layers: int = 1) -> int:
    """Save a random mixture in `folder`; returns the bytes of its weights."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.Qwen3MoeConfig(
        hidden_size=hidden,
        intermediate_size=hidden,
        moe_intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        num_experts=experts,
        num_experts_per_tok=2,
        vocab_size=4096,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return sum(parameter.nbytes for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--seqlen", type=int, default=128)
    parser.add_argument("--free", type=int, default=300, help="MiB that `gptq repeat` is to think free")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder) / "tiny", 256, 256, 2, 1)
        sizes = {e: make(Path(folder) / f"model-{e}", args.hidden, args.inner, e) for e in args.experts}
        for name in args.jobs:
            peaks = []
            for experts in args.experts:
                made = run(name, folder, experts, args)
                peaks.append(made[1])
                print(
                    f"{name:12s} {experts:3d} experts, model {sizes[experts] / 2**20:6.1f} MiB: peak "
                    f"{made[1]:6.1f} MiB above {made[0]:.0f} MiB, predicted {made[2]:.1f}; "
                    f"{made[3]:.0f} at once, {made[4]:.0f} s",
                    flush=True,
                )
            print(f"{name:12s} growth: {100 * (peaks[-1] / peaks[0] - 1):+.1f} %", flush=True)


def run(name: str, folder: str, experts: int, args: argparse.Namespace) -> list[float]:
    """What the job's process says of itself."""
    import json

    method, options, mode = JOBS[name]
    out = f"{folder}/out.gguf" if method == "gguf" else f"{folder}/out"
    places = [f"{folder}/tiny", f"{folder}/model-{experts}", out]
    arguments = json.dumps([method, options, mode, *places, args.samples, args.seqlen, args.free])
    command = [sys.executable, "-c", CHILD, arguments]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [float(word) for word in output.split()]


if __name__ == "__main__":
    main()
