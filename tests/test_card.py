"""The model card: what huggingface_hub reads from it, offline."""

import json
import re

import gguf
import jobs
import pytest
import yaml
from huggingface_hub import EvalResult, ModelCard

from quantkit.models.files import card
from quantkit.quantize.prepare import recipe

BASE = """---
license: other
license_name: tiny
license_link: https://example.com/licence
language: [en, ko]
pipeline_tag: text-generation
tags: [mine]
---
# Original
"""


@pytest.fixture
def original(tiny_model, tmp_path):
    """A model in the hub's cache, with a card."""
    folder = tiny_model("llama", name="models--org--tiny/snapshots/0123", tokenizer=True, num_hidden_layers=1)
    (folder / "README.md").write_text(BASE)
    return folder


def test_a_card_declares_its_origin_and_how_to_load_it(make, original, tmp_path):
    text = jobs.calibration(tmp_path)
    options = ("--calibration", text.calibration, "--samples", 6, "--seqlen", 32, "--group-size", 32)
    make("gptq", original, "-o", "out", *options, "--exclude", "mlp")
    found = ModelCard.load(tmp_path / "out" / "README.md")
    assert found.data.to_dict() == {
        "base_model": "org/tiny",
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "other",
        "license_name": "tiny",
        "license_link": "https://example.com/licence",
        "language": ["en", "ko"],
        "quantized_by": "quantkit",
        "tags": ["quantkit", "gptq"],
    }
    assert "- vLLM: `vllm serve out`\n" in found.text
    loads = "- transformers: `AutoModelForCausalLM.from_pretrained('out')` after `pip install "
    assert loads in found.text
    (block,) = re.findall(r"```yaml\n(.*?)```", found.text, re.DOTALL)
    again = recipe.merge(recipe.parse("card", "card", block), [], {"model": "m"})
    job = json.loads((tmp_path / "out" / "quantkit.json").read_text())["job"]
    assert vars(again.method.options) == job["options"] and again.run.exclude == ("mlp",)
    assert again.run.dtype == job["execution"]["dtype"]
    assert (again.calibration.samples, again.calibration.seqlen) == (6, 32)


def test_the_card_of_a_gguf_file_lies_next_to_it(make, original, tmp_path):
    (tmp_path / "own.gguf.md").write_text("my notes")
    for name in ("model.gguf", "own.gguf"):
        make("gguf", original, "-t", "Q8_0", "--solver", "rtn", "-o", name)
    assert (tmp_path / "own.gguf.md").read_text() == "my notes"
    found = ModelCard.load(tmp_path / "model.gguf.md")
    assert found.data.base_model == "org/tiny" and found.data.library_name == "gguf"
    assert "- llama.cpp: `llama-server -m model.gguf`\n" in found.text
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    general = {name[8:]: row.contents() for name, row in fields.items() if name.startswith("general.")}
    expected = {
        "quantized_by": "quantkit",
        "license": "other",
        "license.name": "tiny",
        "license.link": "https://example.com/licence",
        "languages": ["en", "ko"],
        "base_model.count": 1,
        "base_model.0.name": "tiny",
        "base_model.0.organization": "org",
        "base_model.0.repo_url": "https://huggingface.co/org/tiny",
    }
    assert {name: general.get(name) for name in expected} == expected


@pytest.mark.parametrize("head", ["license: [1, 2]", "license: 'a\tb'", "license: !!x y", "- a", "{" * 9999])
def test_a_strange_card_declares_nothing(tmp_path, head):
    (tmp_path / "README.md").write_text(f"---\n{head}\n---\ntext")
    assert card.inherited(tmp_path) == {}


def test_results_are_a_table_and_an_index_of_the_hub(make, quantkit, original, tmp_path):
    """Of `--card`, twice: the second replaces the first, and nothing else changes."""
    make("nf4", original, "-o", "out")
    text = jobs.calibration(tmp_path).calibration
    before = card.read(tmp_path / "out" / "README.md")
    for ctx in (16, 32):
        made = make("eval", original, "out", "--text", text, "--ctx", ctx, "--card", "out")
    found = ModelCard.load(tmp_path / "out" / "README.md")
    metrics = made["models"][1]["metrics"]
    args = {"ctx": 32, "stride": 32, "tokens": made["data"]["tokens"], "sha256": made["data"]["sha256"]}
    names = {"perplexity": metrics["ppl"]["value"], "kl_divergence": metrics["kld"]["mean"]}
    names["top1_agreement"] = metrics["top1"]
    assert {row.metric_type: row.metric_value for row in found.data.eval_results} == names
    for row in found.data.eval_results:
        assert isinstance(row, EvalResult) and row.task_type == "text-generation"
        assert row.dataset_name == "calibration.txt" and row.dataset_args == args
    assert found.data.model_name == "out"
    assert found.text.count("| out |") == 1 and ", context 32, " in found.text
    head, body = card.read(tmp_path / "out" / "README.md")
    assert {key: head[key] for key in before[0]} == before[0]
    assert body.partition("## Loss")[0] == before[1].partition("## Loss")[0]
    assert yaml.safe_load(yaml.safe_dump(head)) == head
    again = quantkit("eval", original, "out", "--text", text, "--ctx", 32, "--card", "out")
    assert again.out.endswith("\nwrote out/README.md\n")
    manifest = make("verify", "out")
    assert manifest["problems"] == []


def test_a_card_needs_its_model_among_those_measured(refuse, original, make, tmp_path):
    make("nf4", original, "-o", "out")
    text = jobs.calibration(tmp_path).calibration
    error, hint = refuse(2, "eval", original, "--text", text, "--card", "out")
    assert error == "--card out is not one of the models" and "out" in hint
    error, hint = refuse(2, "eval", original, "out", "--text", text, "--card", original)
    assert "the others are compared with this model" in error


def test_a_job_with_eval_writes_its_results(make, original, tmp_path):
    text = jobs.calibration(tmp_path).calibration
    made = make("nf4", original, "-o", "out", "--eval", text)
    (row,) = [
        one
        for one in ModelCard.load(tmp_path / "out" / "README.md").data.eval_results
        if one.metric_type == "perplexity"
    ]
    assert row.metric_value == made["eval"]["models"][1]["metrics"]["ppl"]["value"]
