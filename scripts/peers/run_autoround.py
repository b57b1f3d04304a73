"""AutoRound's SignRound with its default options: `python run_autoround.py JOB.json` (see job.py)."""

from importlib import metadata

import job as jobs

job = jobs.start()

import torch  # noqa: E402
from auto_round import AutoRound  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402


def main() -> None:
    torch.set_num_threads(job.threads)
    clock = jobs.Clock()
    with clock("load"):
        model = AutoModelForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.dtype))
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
            device_map="cpu",
            enable_torch_compile=False,
        )
        rounder.quantize()
    with clock("save"):
        rounder.save_quantized(job.out, format="auto_gptq")
    clock.finish("torch", "transformers", autoround=metadata.version("auto-round"))


if __name__ == "__main__":
    main()
