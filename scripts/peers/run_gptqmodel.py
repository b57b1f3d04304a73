"""GPTQModel's GPTQ and AWQ with default options: `python run_gptqmodel.py JOB.json` (see job.py)."""

import os

import job as jobs

job = jobs.start()
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # on two cores its own choice is zero, and it refuses

import torch  # noqa: E402
from gptqmodel import BACKEND, GPTQModel  # noqa: E402
from gptqmodel.quantization import AWQConfig, GPTAQConfig, GPTQConfig  # noqa: E402


def config() -> GPTQConfig | AWQConfig:
    """The tool's own defaults, apart from what the job says."""
    shared = {"bits": job.bits, "group_size": job.group_size, "sym": job.sym, "device": "cpu"}
    if job.method == "awq":
        return AWQConfig(**shared)
    if job.desc_act:
        shared["desc_act"] = True
    if job.gptaq:
        shared["gptaq"] = GPTAQConfig(device="cpu")
    return GPTQConfig(mse=job.mse, **shared)


def main() -> None:
    torch.set_num_threads(job.threads)
    clock = jobs.Clock()
    with clock("load"):
        # its AWQ layer takes 16 bit alone
        dtype = "auto" if job.method == "awq" else getattr(torch, job.dtype)
        model = GPTQModel.load(job.model, config(), dtype=dtype)
    rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in job.rows()]
    # its choice for AWQ wants CUDA, to pack; what is searched and solved does not depend on it
    backend = BACKEND.AWQ_TORCH if job.method == "awq" else BACKEND.AUTO
    with clock("quantize"):
        model.quantize(rows, batch_size=1, backend=backend)
    with clock("save"):
        model.save(job.out)
    clock.finish("gptqmodel", "torch", "transformers")


if __name__ == "__main__":
    main()
