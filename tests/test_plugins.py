"""A new grid, layout or method is one file: those of tests/toys lie outside the package, and all runs."""

import json
from pathlib import Path

import families
import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit import grids, layouts
from quantkit.capacity import formats
from quantkit.quantize import methods

TOYS = Path(__file__).parent / "toys"


@pytest.fixture
def toys(monkeypatch):
    """The packages, as if each had one file more."""
    for package, folder in ((grids, "grids"), (layouts, "layouts"), (methods, "methods")):
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(TOYS / folder)])
    formats._packed.cache_clear()
    yield
    formats._packed.cache_clear()


@pytest.fixture
def model(toys, tiny_model):
    return tiny_model("llama", tokenizer=True, hidden_size=64, num_hidden_layers=2)


def test_a_toy_is_quantized_planned_inspected_and_evaluated(model, make, quantkit, tmp_path):
    assert "ternary" in quantkit("--help").out
    planned = make("plan", model, "--ctx", "64")
    promised = make("ternary", model, "--dry-run")
    made = make("ternary", model, "-o", "toy")
    tensors = load_file(tmp_path / "toy" / "model.safetensors")

    linears = [name for name in tensors if name.endswith(".trits")]
    assert len(linears) == made["linears"] == 14
    packed = sum(tensor.nbytes for name, tensor in tensors.items() if "trit" in name)
    weights = sum(4 * tensors[name].numel() for name in linears)
    assert 8 * packed / weights == made["bits_per_weight"] == 2.5
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert planned["weights"]["ternary"]["bytes"] == promised["plan"]["output_bytes"] == total
    assert planned["weights"]["ternary"]["bits_per_weight"] == 8 * total / planned["parameters"]["count"]
    assert planned["job"]["ternary"]["above_interpreter_bytes"] == promised["plan"]["memory_bytes"]

    found = make("inspect", "toy")
    assert found["quantization"]["stored"] == {"trit, groups of 32": 14}
    assert found["quantization"]["bits_per_weight"] == 2.5
    assert not found["integrity"]["problems"]
    assert not any(row["loads"] for row in found["clients"])

    (tmp_path / "text.txt").write_text(" ".join(families.sentences()))
    told = make("eval", model, "toy", "--text", "text.txt", "--ctx", "32")
    assert told["models"][1]["metrics"]["kld"]["mean"] > 0


def test_damage_to_a_toy_is_found(model, make, quantkit, tmp_path):
    make("ternary", model, "-o", "toy")
    path = tmp_path / "toy" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.self_attn.q_proj.trits"]
    save_file(tensors, path, metadata={"format": "pt"})
    done = quantkit("inspect", "toy", "--json")
    problems = json.loads(done.out)["integrity"]["problems"]
    assert any(
        "no whole quantized linear: model.layers.0.self_attn.q_proj.trit_scale" in words for words in problems
    )


def test_error_feedback_takes_the_toy_grid(model, make, tmp_path):
    """No more code, and less error: the idea of the design."""
    (tmp_path / "text.txt").write_text("\n".join(families.sentences()))
    small = ["--calibration", "text.txt", "--samples", "6", "--seqlen", "32"]
    made = make("ternary", model, "--solver", "gptq", "-o", "fed", *small)
    rows = json.loads((tmp_path / "fed" / "quantkit.json").read_text())["linears"]
    assert made["linears"] == 14
    assert sum(row["error"] for row in rows) < 0.9 * sum(row["rtn_error"] for row in rows)
    assert all(
        torch.isfinite(t.float()).all() for t in load_file(tmp_path / "fed/model.safetensors").values()
    )
