"""bitsandbytes through transformers, saved as it loads: `python run_bitsandbytes.py JOB.json` (see job.py).

method: int8, nf4 or nf4-double.
"""

import job as jobs

job = jobs.start()

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig  # noqa: E402

CONFIGS = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"},
}
CONFIGS["nf4-double"] = CONFIGS["nf4"] | {"bnb_4bit_use_double_quant": True}


def main() -> None:
    torch.set_num_threads(job.threads)
    clock = jobs.Clock()
    with clock("quantize"):
        model = AutoModelForCausalLM.from_pretrained(
            job.model, quantization_config=BitsAndBytesConfig(**CONFIGS[job.method]), dtype=torch.float16
        )
    with clock("save"):
        model.save_pretrained(job.out)
        AutoTokenizer.from_pretrained(job.model).save_pretrained(job.out)
    clock.finish("bitsandbytes", "torch", "transformers")


if __name__ == "__main__":
    main()
