"""AutoAWQ's AWQ with default options: `python run_autoawq.py JOB.json` (see job.py)."""

import shutil
from pathlib import Path

import job as jobs

job = jobs.start()

import torch  # noqa: E402
from awq import AutoAWQForCausalLM  # noqa: E402

# It keeps the weights it scales for trial by `.cpu()`, which on a CPU is no copy: each searched linear then
# stays scaled by the first trial, and the perplexity doubles.
torch.Tensor.cpu = torch.Tensor.clone


def main() -> None:
    torch.set_num_threads(job.threads)
    clock = jobs.Clock()
    with clock("load"):
        dtype = getattr(torch, job.dtype)
        model = AutoAWQForCausalLM.from_pretrained(job.model, torch_dtype=dtype, device_map="cpu")
        rows = job.rows()
    config = {"zero_point": not job.sym, "q_group_size": job.group_size, "w_bit": job.bits, "version": "GEMM"}
    with clock("quantize"):
        model.quantize(
            None,  # the tokenizer: the calibration set is tokens already
            quant_config=config,
            calib_data=rows,
            max_calib_samples=len(rows),
            max_calib_seq_len=len(rows[0]),
        )
    with clock("save"):
        model.save_quantized(job.out)
        for path in Path(job.model).glob("tokenizer*"):  # of a class that this transformers does not know
            shutil.copy(path, job.out)
    clock.finish("autoawq", "torch", "transformers")


if __name__ == "__main__":
    main()
