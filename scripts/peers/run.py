"""Run one tool on one job and measure its quantization phase.

    python run.py JOB.json    # leaves JOB.result.json

In the environment of the tool: a function below imports what it drives, the rest is the standard library. All
compute with the tool's own default options, apart from what the job says.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """One quantization. tokens: a JSON file of token id rows, the same block for every tool."""

    tool: str
    model: str
    tokens: str
    out: str
    method: str
    bits: int = 4
    group_size: int = 128
    sym: bool = True
    desc_act: bool = False
    mse: float = 0.0  # GPTQModel's range search
    iterations: int = 200  # AutoRound's
    options: dict = field(default_factory=dict)  # quantkit's, by the names of its method's Options
    libraries: str = ""  # a prebuilt llama.cpp's folder
    threads: int = 1
    batch_size: int = 1  # sequences a forward pass, of gptqmodel and llmcompressor: their default
    device: str = "cpu"  # of autoround, gptqmodel, llmcompressor and quantkit; the others: on a CPU alone

    @property
    def dtype(self):
        """The dtype of the weights, in which every tool computes: some take 16 bit unasked."""
        import torch

        config = json.loads((Path(self.model) / "config.json").read_text())
        return getattr(torch, config.get("dtype") or config["torch_dtype"])

    def rows(self) -> list[list[int]]:
        """Calibration sequences."""
        return json.loads(Path(self.tokens).read_text())

    def masked_rows(self) -> list[dict[str, list[int]]]:
        """Calibration sequences with masks, as some tools take them."""
        return [{"input_ids": row, "attention_mask": [1] * len(row)} for row in self.rows()]


def cpu_seconds() -> float:
    """Return user and system time of this process and of the children it waited for."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in usage)


class Clock:
    """Wall and CPU seconds of named phases."""

    def __init__(self, device: str = "cpu") -> None:
        self.phases: dict[str, dict[str, float]] = {}
        self.device = device

    def ready(self) -> None:
        """Make the device's context and its libraries' handles before time is taken; call it after a tool is
        imported, since some set the allocator up as they are."""
        if self.device != "cpu":
            import torch

            torch.linalg.cholesky(torch.eye(64, device=self.device) @ torch.eye(64, device=self.device))
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), cpu_seconds()
        yield
        if self.device != "cpu":
            import torch

            torch.cuda.synchronize()
        self.phases[phase] = {"wall": time.perf_counter() - wall, "cpu": cpu_seconds() - cpu}
        if self.device != "cpu":  # so far: what `save` takes is not the quantization's
            self.phases[phase]["device_bytes"] = torch.cuda.max_memory_allocated()


# The tools. Each returns versions that no package's metadata has under these names.


def autoround(job: Job, clock: Clock) -> dict[str, str]:
    import torch
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    clock.ready()
    with clock("load"):
        model = AutoModelForCausalLM.from_pretrained(job.model, dtype=job.dtype)
        tokenizer = AutoTokenizer.from_pretrained(job.model)
        rows = torch.tensor(job.rows())
    with clock("quantize"):
        rounder = AutoRound(
            model,
            tokenizer,
            scheme=f"W{job.bits}A16",
            group_size=job.group_size,
            sym=job.sym,
            iters=job.iterations,
            dataset=[{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in rows],
            nsamples=rows.shape[0],
            seqlen=rows.shape[1],
            device_map=job.device,
            enable_torch_compile=False,
        )
        rounder.quantize()
    with clock("save"):
        rounder.save_quantized(job.out, format="auto_gptq")
    return {"autoround": metadata.version("auto-round")}


def bitsandbytes(job: Job, clock: Clock) -> None:
    """Through transformers, saved as it loads. method: int8, nf4 or nf4-double."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    if job.method == "int8":
        config = {"load_in_8bit": True}
    else:
        config = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"}
        config["bnb_4bit_use_double_quant"] = job.method == "nf4-double"
    with clock("quantize"):
        model = AutoModelForCausalLM.from_pretrained(
            job.model, quantization_config=BitsAndBytesConfig(**config), dtype=torch.float16
        )
    with clock("save"):
        model.save_pretrained(job.out)
        AutoTokenizer.from_pretrained(job.model).save_pretrained(job.out)


def gptqmodel(job: Job, clock: Clock) -> None:
    """GPTQ and AWQ."""
    if (os.cpu_count() or 1) < 4:
        os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its own choice is too few: it refuses
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.quantization import AWQConfig, GPTQConfig

    shared = {"bits": job.bits, "group_size": job.group_size, "sym": job.sym, "device": job.device}
    if job.method == "awq":
        config = AWQConfig(**shared)
    else:
        shared |= {"desc_act": True} if job.desc_act else {}
        config = GPTQConfig(mse=job.mse, **shared)
    clock.ready()
    with clock("load"):  # its AWQ layer takes 16 bit alone
        model = GPTQModel.load(job.model, config, dtype="auto" if job.method == "awq" else job.dtype)
    rows = job.masked_rows()
    # its choice for AWQ wants CUDA, to pack; what is searched and solved does not depend on it
    backend = BACKEND.AWQ_TORCH if job.method == "awq" and job.device == "cpu" else BACKEND.AUTO
    with clock("quantize"):
        model.quantize(rows, batch_size=job.batch_size, backend=backend)
    with clock("save"):
        model.save(job.out)


def llamacpp(job: Job, clock: Clock) -> dict[str, str]:
    """llama-quantize with an importance matrix. method: a type, such as Q4_K_M; libraries: as
    `ggml.py` takes them. In quantkit's environment: what llama-quantize reads is quantkit's, a
    32-bit GGUF file and an importance matrix of the job's tokens."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import ggml

    from quantkit.models.gguf import file_types, imatrix

    def quantkit(*arguments: object) -> None:
        command = [sys.executable, "-m", "quantkit", *map(str, arguments), "--quiet"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    library = ggml.Library(Path(job.libraries))
    source, measured = Path(f"{job.out}.f32.gguf"), Path(f"{job.out}.imatrix.gguf")
    rows = job.rows()
    text = ["--samples", len(rows), "--seqlen", len(rows[0])]
    with clock("load"):
        quantkit("gguf", job.model, "-t", "F32", "-o", source)
    with clock("quantize"):  # an importance matrix is part of it, as a Hessian is
        quantkit("imatrix", job.model, *text, "-o", measured)
        kept = {name: values.numpy() for name, values in imatrix.read(measured).values().items()}
        if not library.quantize(source, Path(job.out), file_types.number(job.method), kept):
            raise SystemExit(f"llama.cpp does not quantize: {''.join(library.log[-3:])}")
    source.unlink()
    measured.unlink()
    return {"llamacpp": ggml.VERSION}


def llmcompressor(job: Job, clock: Clock) -> None:
    """method: gptq, awq, or a scheme by its name."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not torch.cuda.is_available():  # 0.14.0.1: its AWQ pins memory, which raises where there is no GPU
        torch.Tensor.pin_memory = lambda self, *args: self
    weights = {"num_bits": job.bits, "type": "int", "symmetric": job.sym}
    weights |= {"strategy": "group", "group_size": job.group_size}
    scope = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}
    named = {"targets": "Linear", "ignore": ["lm_head"]}
    recipe = {
        "gptq": lambda: [GPTQModifier(**scope)],
        "awq": lambda: [AWQModifier(), QuantizationModifier(**scope)],
    }
    clock.ready()
    with clock("load"):
        model = AutoModelForCausalLM.from_pretrained(job.model, dtype="auto")
        rows = job.masked_rows()
        dataset = Dataset.from_list(rows)
    calibration = {}
    if job.method in recipe:
        calibration = {
            "dataset": dataset,
            "max_seq_length": len(rows[0]["input_ids"]),
            "num_calibration_samples": len(rows),
            "shuffle_calibration_samples": False,
            "batch_size": job.batch_size,
        }
    scheme = lambda: [QuantizationModifier(scheme=job.method, **named)]  # noqa: E731
    with clock("quantize"):
        oneshot(model=model, recipe=recipe.get(job.method, scheme)(), **calibration)
    with clock("save"):
        model.save_pretrained(job.out, save_compressed=True)
        AutoTokenizer.from_pretrained(job.model).save_pretrained(job.out)


def quantkit(job: Job, clock: Clock) -> dict[str, str]:
    """`quantize` ends where the last block is solved and staged; `save` is writing and verification. The
    method's defaults, apart from what the job says; its `options` have the last word."""
    from quantkit import __version__
    from quantkit.models.files.open import open_checkpoint
    from quantkit.options import CalibrationOptions, RunOptions
    from quantkit.quantize import job as requests
    from quantkit.quantize import loop, methods
    from quantkit.quantize.progress import Progress
    from quantkit.text import calibration

    rows, fields = job.rows(), methods.load(job.method).Options.__dataclass_fields__
    chosen = {"bits": job.bits, "group_size": job.group_size, "sym": job.sym, "zero_point": not job.sym}
    chosen = {key: chosen[key] for key in chosen if key in fields} | job.options
    if "type" in chosen:  # as a JSON file has it
        chosen["type"] = tuple(chosen["type"])
    text = CalibrationOptions(samples=len(rows), seqlen=len(rows[0]))
    tokens = calibration.load(open_checkpoint(job.model), text)
    assert tokens.tokens.tolist() == rows, "other calibration tokens than the peers'"
    calibration.load = lambda *arguments: tokens  # cut already, as the peers are given theirs
    run = RunOptions(threads=job.threads, device=job.device)
    request = requests.Request(
        job.model, methods.create(job.method, **chosen), text, run, output=Path(job.out)
    )
    clock.ready()
    with clock("load"):
        prepared = requests.prepare(request, Progress())
    finish = loop.finish.finish
    with ExitStack() as solving:
        solving.enter_context(clock("quantize"))

        def timed_finish(*arguments):
            solving.close()
            with clock("save"):
                return finish(*arguments)

        loop.finish.finish = timed_finish
        loop.run([prepared], Progress())
    return {"quantkit": f"{__version__} computing in {prepared.plan.execution.dtype}"}


TOOLS = {
    tool.__name__: tool for tool in (autoround, bitsandbytes, gptqmodel, llamacpp, llmcompressor, quantkit)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", type=Path, metavar="JOB.json")
    path = parser.parse_args().job
    job = Job(**json.loads(path.read_text()))
    clock = Clock(job.device)
    os.environ["OMP_NUM_THREADS"] = str(job.threads)  # before anything else is imported
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # a first forward otherwise compiles for many seconds
    if job.tool == "quantkit":
        os.environ |= {"OMP_WAIT_POLICY": "passive", "THP_MEM_ALLOC_ENABLE": "1"}  # as its command line does
    if job.tool != "llamacpp":
        import torch

        torch.set_num_threads(job.threads)
    found = TOOLS[job.tool](job, clock) or {}
    named = (job.tool, "compressed-tensors", "torch", "transformers")
    installed = {each.metadata["Name"].lower() for each in metadata.distributions()}
    found = {name: metadata.version(name) for name in named if name in installed} | found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {"phases": clock.phases, "peak_bytes": peak, "versions": found}
    if job.device != "cpu":
        result["device_bytes"] = clock.phases["quantize"]["device_bytes"]
    path.with_suffix(".result.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
