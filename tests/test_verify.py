"""`quantkit verify`: what was changed since it was written, or is farther from its source than it says."""

import json
import shutil
from pathlib import Path

import families
import jobs
import pytest
import torch
from nights import nightly
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from quantkit.errors import NOT_FOUND, UNSUPPORTED, VERIFICATION
from quantkit.evaluation import served
from quantkit.grids.distance import error_up_to_scales, token_distances, weight_error
from quantkit.inspection import verify
from quantkit.models.files import checksums

TEXT = ["--samples", 4, "--seqlen", 32, "--group-size", 32]


def test_the_distance_of_tokens():
    zeros, ones = torch.zeros(4), torch.ones(4)
    expected = torch.stack([zeros, zeros, ones, 1000 * ones, ones])
    found = torch.stack([zeros, ones, 1.5 * ones, 1000 * ones, ones * float("nan")])
    assert token_distances(found, expected)[:4].tolist() == [0, float("inf"), 0.5, 0]
    assert not token_distances(found, expected).max() <= 1


def test_a_mixture_of_zeros_is_verified(tiny_model, quantkit):
    folder = tiny_model("mixtral")
    zeros = {name: tensor * 0 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(zeros, folder / "model.safetensors", {"format": "pt"})
    assert quantkit("nf4", folder, "-o", "out", "-q").code == 0


def test_the_error_up_to_scales_is_blind_to_them():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 80, generator=generator)
    rows, columns = (torch.randn(n, generator=generator).exp() for n in weight.shape)
    scaled = rows[:, None] * weight * columns
    values = scaled + 0.1 * scaled.abs().mean() * torch.randn(96, 80, generator=generator)
    assert error_up_to_scales(scaled, scaled.bfloat16()) < 1e-5
    error = error_up_to_scales(scaled, values)
    assert error_up_to_scales(weight, values) == pytest.approx(error, rel=1e-4)
    r, c = torch.ones(96, dtype=torch.double), torch.ones(80, dtype=torch.double)
    for _ in range(24):  # the same least squares, in float64 and at once
        near = weight.double() * c
        r = (near * values).sum(1) / near.square().sum(1)
        near = weight.double() * r[:, None]
        c = (near * values).sum(0) / near.square().sum(0)
    near = weight.double() * r[:, None] * c
    assert error == pytest.approx(weight_error(near, values.double()), rel=1e-3)


def test_named_chat_templates_are_kept_and_verified(tiny_model, make, quantkit, tmp_path):
    folder, name = tiny_model("llama", tokenizer=True), "additional_chat_templates/tool_use.jinja"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {"default": "D", "tool_use": "T"}
    tokenizer.save_pretrained(folder)
    assert (folder / name).read_text() == "T"
    make("gptq", folder, "--solver", "rtn", "--group-size", 32, "-o", "out")
    make("convert", "out", "--to", "compressed-tensors", "-o", "converted")
    for made in ("out", "converted"):
        assert AutoTokenizer.from_pretrained(tmp_path / made).chat_template == tokenizer.chat_template
        assert {"name": name, "state": "same"} in make("verify", made)["files"]
    (tmp_path / "out" / name).write_text("changed")
    assert f"error: {name} was changed" in quantkit("verify", "out").err
    (tmp_path / "out" / name).unlink()
    assert f"error: {name} is absent" in quantkit("verify", "out").err


def test_the_error_up_to_scales_survives_outliers():
    """Least squares alone are led astray by the few weights that hold most of the squares."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 64, generator=generator)
    weight *= (1.5 * torch.randn(64, 64, generator=generator)).exp()
    scaled = weight * torch.randn(64, generator=generator).exp()
    values = scaled + scaled.abs().amax(1, keepdim=True) * torch.randn(64, 64, generator=generator) / 440
    error = weight_error(scaled, values)
    assert error_up_to_scales(scaled, values) == pytest.approx(error, rel=0.05)
    assert error_up_to_scales(weight, values) == pytest.approx(error, rel=0.15)


def test_outliers_that_were_scaled_are_as_far_as_the_manifest_says(tiny_model, make):
    """The fit of scales begins at the source's weight in the job as well."""
    model = tiny_model("llama", tokenizer="bos")
    tensors, generator = load_file(model / "model.safetensors"), torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            tensor *= (1.5 * torch.randn(tensor.shape, generator=generator)).exp()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    make("w8a8", model, "-o", "out", *TEXT[:4])
    rows = make("verify", "out", "--base", model)["linears"]
    assert any(row["measure"] == "weight_error_up_to_scales" for row in rows)
    assert max(abs(row["error"] / row["recorded"] - 1) for row in rows) < 1e-5


@pytest.mark.parametrize(
    "family, method, options",
    [
        ("llama", "gptq", TEXT),
        ("llama", "gguf", ["-t", "Q8_0", *TEXT[:4]]),
        ("mixtral", "gguf", ["-t", "Q8_0", *TEXT[:4]]),  # the file has no block_sparse_moe
        *nightly(
            ("gpt2", "gptq", [*TEXT, "--transform", "none"]),
            ("mixtral", "gptq", [*TEXT, "--layout", "compressed-tensors", "--experts", "all"]),
        ),
    ],
)
def test_errors_are_those_of_the_manifest(tiny_model, make, tmp_path, family, method, options):
    model, output = (
        tiny_model(family, tokenizer="bos"),
        tmp_path / ("out.gguf" if method == "gguf" else "out"),
    )
    make(method, model, "-o", output, *options)
    found = make("verify", output, "--base", model)
    assert found["schema"] == "quantkit.verify/2" and found["problems"] == []
    rows = found["linears"]
    assert rows and all(row["agrees"] and row["error"] > 0 for row in rows)
    assert {row["state"] for row in found["files"]} == {"same"}


@pytest.fixture(scope="module")
def nf4(tmp_path_factory):
    """A model, and what nf4 made of it."""
    folder = tmp_path_factory.mktemp("nf4")
    model = families.save_tokenizer(families.save_model(folder / "llama", "llama"), bos=True)
    jobs.quantize("nf4", model, folder / "out", loss_tokens=None)
    return model, folder / "out"


@pytest.fixture
def written(nf4, tmp_path):
    """A model, a copy of what nf4 made of it, and the file of its weights."""
    model, made = nf4
    output = Path(shutil.copytree(made, tmp_path / "out"))
    return model, output, output / "model.safetensors"


def reseal(output) -> None:
    """What somebody does who changes a file and its sum."""
    manifest = json.loads((output / "quantkit.json").read_text())
    sums = checksums.of_folder(output)
    manifest["files"] = {name: sums[name] for name in sums.keys() - verify.WRITTEN_LATER}
    (output / "quantkit.json").write_text(json.dumps(manifest))


def test_a_changed_bit_and_an_absent_file_are_named(written, quantkit):
    _, output, weights = written
    data = bytearray(weights.read_bytes())
    data[-3] ^= 4
    weights.write_bytes(data)
    (output / "tokenizer.json").unlink()
    done = quantkit("verify", output)
    assert done.code == VERIFICATION
    assert "error: model.safetensors was changed (and 1 more problem)\n" in done.err
    assert "hint: the checkpoint is incomplete or damaged" in done.err
    assert "wrong: tokenizer.json is absent\n" in done.out and "wrong: model.safetensors" not in done.out
    found = json.loads(quantkit("verify", output, "--json").out)
    assert [row["state"] for row in found["files"] if row["name"] == "config.json"] == ["same"]


@pytest.mark.parametrize("damage", ["truncated", "no configuration"])
def test_what_cannot_be_opened_any_more_is_a_problem_like_others(written, quantkit, damage):
    _, output, weights = written
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    else:
        (output / "config.json").unlink()
    done = quantkit("verify", output, "--json")
    found = json.loads(done.out)
    assert done.code == found["error"]["exit_code"] == VERIFICATION
    assert found["schema"] == verify.SCHEMA and len(found["problems"]) == 1
    assert {"truncated": "is truncated", "no configuration": "config.json"}[damage] in found["problems"][0]


@pytest.mark.parametrize(
    "key, value, where",
    [
        ("linears", 5, "$.linears"),
        ("linears", [5], "$.linears[0]"),
        ("source", "x", "$.source"),
        ("job", {"execution": 5}, "$.job.execution"),
        ("files", {"a": 5}, "$.files.a"),
    ],
)
def test_a_manifest_that_is_none_is_a_problem_like_others(written, quantkit, key, value, where):
    _, output, _ = written
    path = output / "quantkit.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    done = quantkit("verify", output, "--json", "-q")
    assert done.code == VERIFICATION
    assert json.loads(done.out)["problems"][0].startswith(f"quantkit.json: {where}: ")
    path.write_text('{"format": 3}')
    done = quantkit("verify", output, "--json", "-q")
    assert done.code == VERIFICATION
    assert json.loads(done.out)["problems"] == ["quantkit.json holds nothing that quantkit writes"]


def test_a_file_that_came_later_is_told(written, make):
    _, output, _ = written
    (output / "notes.txt").write_text("mine")
    found = make("verify", output)
    assert found["notes"] == ["1 file came later: notes.txt"] and found["problems"] == []
    heard: list[tuple] = []
    verify.verify(str(output), None, lambda *step: heard.append(step))
    assert ("hashing, in MB", 1, 1) in heard


def test_weights_that_were_exchanged_are_found_by_their_error(written, quantkit):
    """Two linears of one shape change places: sums and values are sound."""
    model, output, weights = written
    tensors = load_file(weights)
    one, other = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    suffixes = {name.removeprefix(one) for name in tensors if name.startswith(one)}
    for suffix in suffixes:
        tensors[one + suffix], tensors[other + suffix] = tensors[other + suffix], tensors[one + suffix]
    save_file(tensors, weights, {"format": "pt"})
    reseal(output)
    assert quantkit("verify", output).code == 0
    done = quantkit("verify", output, "--base", model, "--json")
    found = json.loads(done.out)
    wrong = [row["name"] for row in found["linears"] if not row["agrees"]]
    assert done.code == VERIFICATION and sorted(wrong) == sorted(
        name.removesuffix(".weight") for name in (one, other)
    )


def test_values_that_are_no_numbers_are_found(written, quantkit):
    _, output, weights = written
    tensors = load_file(weights)
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, weights, {"format": "pt"})
    reseal(output)
    done = quantkit("verify", output)
    assert done.code == VERIFICATION and "model.norm.weight holds NaN or infinite values" in done.err


def test_another_base_is_named(written, tiny_model, quantkit, refuse):
    model, output, _ = written
    other = tiny_model("llama", name="other", tokenizer="bos", seed=5)
    done = quantkit("verify", output, "--base", other)
    assert done.code == VERIFICATION and "other is not the source that the manifest names" in done.err
    assert "hint: no file was changed: " in done.err
    problems = json.loads(quantkit("verify", output, "--base", other, "--json").out)["problems"]
    assert len(problems) == 22 and done.out.count("wrong: ") == 9  # the source, and 7 linears of 3 blocks
    assert "wrong: 13 more, which --json lists\n" in done.out
    larger = tiny_model("gpt2", name="larger", tokenizer="bos")
    error, _ = refuse(UNSUPPORTED, "verify", output, "--base", larger)
    assert "do not share" in error
    refuse(NOT_FOUND, "verify", model.parent / "none")


def test_missing_tensors_are_damage_also_with_a_base(written, quantkit):
    model, output, _ = written
    tensors = load_file(output / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up_proj" not in name}
    assert len(kept) < len(tensors)
    save_file(kept, output / "model.safetensors", {"format": "pt"})
    reseal(output)
    done = quantkit("verify", output, "--base", model)
    assert done.code == VERIFICATION and "model.layers.1.mlp.up_proj.weight is absent" in done.err
    assert "note: errors were not measured" in done.out


def test_a_gguf_file_carries_its_sum(tiny_model, make, quantkit, tmp_path):
    model, output = tiny_model("llama", tokenizer="bos"), tmp_path / "out.gguf"
    make("gguf", model, "-t", "Q8_0", "--solver", "rtn", "-o", output)
    assert make("verify", output)["files"] == [{"name": "out.gguf", "state": "same"}]
    written = output.read_bytes()
    assert b'"kld": ' in written  # the loss came after the sum
    for place in (-5, written.index(b"layer_norm_rms_epsilon") + 28):  # of a tensor, and of a number
        changed = bytearray(written)
        changed[place] ^= 1
        output.write_bytes(changed)
        done = quantkit("verify", output)
        assert done.code == VERIFICATION and "error: out.gguf was changed\n" in done.err


def test_what_others_wrote_is_read_all_the_same(tiny_model, make, quantkit):
    model = tiny_model("llama", tokenizer="bos")
    found = make("verify", model)
    assert found["files"] == [] and found["problems"] == []
    assert "files were not compared with sums: it has no quantkit.json" in found["notes"]
    assert quantkit("verify", model).out.endswith("There are no checksums to compare the files with.\n")


def test_what_was_distilled_has_sums_and_no_errors_of_before(written, tiny_model, make, tmp_path):
    model, output, _ = written
    folder = tmp_path / "taught"
    text = ["--samples", 6, "--seqlen", 16, "--epochs", 1]
    make("distill", model, output, "-o", folder, *text)
    found = make("verify", folder, "--base", model)
    assert {row["state"] for row in found["files"]} == {"same"} and found["linears"] == []
    shutil.rmtree(folder)


def test_an_engine_that_sends_probabilities_as_text_gets_fewer_tokens():
    """262,144 of them took 3.5 seconds a token."""
    assert [served.length("llama.cpp", size) for size in (4096, 49_152, 151_936, 262_144)] == [64, 64, 27, 16]
    assert served.length("vllm", 262_144) == 256
