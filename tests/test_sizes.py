"""Size and bits per weight: one figure under one name, whichever command reports it."""

import json
import re

import pytest
from nights import nightly


def measured(quantkit, output, text) -> dict:
    """What eval and inspect report of an output, after a check that inspect prints the same figures."""
    evaluated = quantkit("eval", "llama", output, "--text", text, "--ctx", 64, "--limit", 600, "--json", "-q")
    assert evaluated.code == 0, evaluated.err
    size = json.loads(evaluated.out)["models"][1]["size"]
    inspected = json.loads(quantkit("inspect", output, "--json").out)
    model, coded = inspected["model"], inspected["quantization"]
    found = (size["weight_bytes"], size["bits_per_quantized_weight"], size["bits_per_weight"])
    assert (model["bytes"], coded["bits_per_weight"], model["bits_per_weight"]) == pytest.approx(found)
    printed = quantkit("inspect", output).out
    assert f"{found[2]:.2f} bits per weight over the whole model" in printed
    assert f"{found[1]:.2f} bits per weight (" in printed
    return size


@pytest.fixture
def text(tiny_model, tmp_path) -> str:
    tiny_model("llama", tokenizer=True, hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    (tmp_path / "text.txt").write_text("".join(f"the sea {n} is deep, {n % 31} waves. " for n in range(900)))
    return "text.txt"


CALIBRATED = ["--samples", "4", "--seqlen", "32", "--calibration", "text.txt"]


@pytest.mark.parametrize(("method", "output"), [("gptq", "out"), ("gguf", "out.gguf")])
def test_job_dry_run_eval_and_inspect_agree(quantkit, text, method, output):
    arguments = [method, "llama", "-o", output, *CALIBRATED]
    planned = json.loads(quantkit(*arguments, "--dry-run", "--json").out)["plan"]
    done = json.loads(quantkit(*arguments, "--json", "-q").out)
    size = measured(quantkit, output, text)
    for record in (planned, done):
        found = (record["output_bytes"], record["bits_per_weight"], record["bits_per_weight_model"])
        expected = (size["weight_bytes"], size["bits_per_quantized_weight"], size["bits_per_weight"])
        assert found == pytest.approx(expected)


@pytest.mark.parametrize(("engine", "output"), nightly(("transformers", "out"), ("llama.cpp", "out.gguf")))
def test_auto_eval_and_inspect_agree(quantkit, tiny_model, text, engine, output, few_tokens):
    tiny_model("llama", tokenizer=True, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    search = ["auto", "llama", "--engine", engine, "--bpw", "5", "--search-tokens", "32", *CALIBRATED]
    done = quantkit(*search, "-o", output, "--json", "-q")
    record = json.loads(done.out)
    kept, size = record[record["kept"]], measured(quantkit, output, text)
    assert kept["output_bytes"] == size["weight_bytes"]
    assert kept["bits_per_weight"] == pytest.approx(size["bits_per_quantized_weight"])
    assert kept["bits_per_weight_model"] == pytest.approx(size["bits_per_weight"])


def test_a_file_without_quantized_matrices_has_bits_over_the_whole_model_only(quantkit, text):
    done = quantkit("gguf", "llama", "-t", "F16", "-o", "out.gguf")
    assert done.code == 0, done.err
    assert re.search(r"^bits/weight  16\.\d\d over the whole model$", done.out, re.M), done.out
