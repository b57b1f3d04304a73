"""llm-compressor's GPTQ, AWQ, SmoothQuant and schemes: `python run_llmcompressor.py JOB.json` (see job.py).

method: gptq, awq, awq-gptq; smoothquant-gptq, its example of W8A8; or a scheme by its name, such as NVFP4.
"""

import job as jobs

job = jobs.start()

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from llmcompressor import oneshot  # noqa: E402
from llmcompressor.modifiers.gptq import GPTQModifier  # noqa: E402
from llmcompressor.modifiers.quantization import QuantizationModifier  # noqa: E402
from llmcompressor.modifiers.transform.awq import AWQModifier  # noqa: E402
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

if not torch.cuda.is_available():  # 0.14.0.1: its AWQ pins memory, which raises where there is no GPU
    torch.Tensor.pin_memory = lambda self, *args: self


CALIBRATED = ("gptq", "awq", "awq-gptq", "smoothquant-gptq", "NVFP4")  # NVFP4: global scales of activations


def recipe() -> list:
    """The tool's own defaults, apart from what the job says. Methods that are no methods are schemes."""
    weights = {"num_bits": job.bits, "type": "int", "symmetric": job.sym}
    weights |= {"strategy": "group", "group_size": job.group_size}
    scope = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}
    if job.method == "gptq":
        return [GPTQModifier(**scope)]
    if job.method == "awq":
        return [AWQModifier(), QuantizationModifier(**scope)]
    if job.method == "awq-gptq":
        return [AWQModifier(), GPTQModifier(**scope)]
    if job.method == "smoothquant-gptq":  # as examples/quantization_w8a8_int8 has it
        return [
            SmoothQuantModifier(smoothing_strength=0.8),
            GPTQModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"]),
        ]
    return [QuantizationModifier(targets="Linear", scheme=job.method, ignore=["lm_head"])]


def main() -> None:
    torch.set_num_threads(job.threads)
    clock = jobs.Clock()
    with clock("load"):
        model = AutoModelForCausalLM.from_pretrained(job.model, dtype="auto")
        rows = job.rows()
        dataset = Dataset.from_list([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows])
    calibration = {
        "dataset": dataset,
        "max_seq_length": len(rows[0]),
        "num_calibration_samples": len(rows),
        "shuffle_calibration_samples": False,
    }
    with clock("quantize"):
        oneshot(model=model, recipe=recipe(), **(calibration if job.method in CALIBRATED else {}))
    with clock("save"):
        model.save_pretrained(job.out, save_compressed=True)
        AutoTokenizer.from_pretrained(job.model).save_pretrained(job.out)
    clock.finish("llmcompressor", "compressed-tensors", "torch", "transformers")


if __name__ == "__main__":
    main()
