"""llm-compressor's GPTQ, AWQ and data-free schemes: `python run_llmcompressor.py JOB.json` (see job.py)."""

import job as jobs

job = jobs.start()

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from llmcompressor import oneshot  # noqa: E402
from llmcompressor.modifiers.gptq import GPTQModifier  # noqa: E402
from llmcompressor.modifiers.quantization import QuantizationModifier  # noqa: E402
from llmcompressor.modifiers.transform.awq import AWQModifier  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

if not torch.cuda.is_available():  # 0.14.0.1: its AWQ pins memory, which raises where there is no GPU
    torch.Tensor.pin_memory = lambda self, *args: self


CALIBRATED = ("gptq", "awq", "awq-gptq")


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
