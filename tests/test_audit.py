"""`quantkit verify --reproduce`: blocks of an output, solved again from its source."""

import json
import shutil
import struct
from dataclasses import replace

import families
import pytest
import torch
from nights import by_day, nightly
from safetensors.torch import load_file, save_file
from test_verify import reseal

from quantkit import api
from quantkit.cli.verify import _again
from quantkit.errors import NOT_FOUND, UNSUPPORTED, USAGE, VERIFICATION
from quantkit.models.files import gguf_file, gguf_writer
from quantkit.quantize.calibrate import capture
from quantkit.quantize.progress import SILENT
from quantkit.quantize.transforms import smooth

GPTQ = {"samples": 4, "seqlen": 32, "group_size": 32}
TEXT = "a text of letters " * 400
METHODS = {
    "awq": ("awq", GPTQ),
    "gguf": ("gguf", {"type": ["Q8_0"], "samples": 4, "seqlen": 32}),
    "mlx": ("gptq", GPTQ | {"layout": "mlx", "embedding": 8, "target": "own", "transform": "none"}),
    "yaqa": ("gptq", GPTQ | {"solver": "yaqa", "transform": "none"}),
    "w8a8": ("w8a8", {"samples": 4, "seqlen": 32}),
    "nf4": ("nf4", {}),
    "int8": ("int8", {}),
    "fp8": ("fp8", {}),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, another one, a text, and what gptq makes of the model: on the shipped text, on
    the other one, and rounded to nearest."""
    folder = tmp_path_factory.mktemp("place")
    for name, seed in (("model", 0), ("other", 5)):
        families.save_model(folder / name, "llama", seed=seed, num_hidden_layers=2)
        families.save_tokenizer(folder / name, bos=True)
    (folder / "other.txt").write_text(TEXT)
    further = {"out": {}, "claimed": {"calibration": str(folder / "other.txt")}, "worse": {"solver": "rtn"}}
    for name, options in further.items():
        if name == "worse":
            options |= {"transform": "none"}
        make(folder, name, "gptq", GPTQ | options)
    return folder


def make(place, name, method, options, to=None):
    output = (to or place) / name
    api.quantize(method, place / "model", output=output, progress=SILENT, loss_tokens=0, **options)
    return output


@pytest.fixture
def audit(quantkit):
    """`audit(output, model, "all")` -> exit code, problems, and the statement."""

    def run(output, model, blocks, *options):
        done = quantkit("verify", output, "--base", model, "--reproduce", blocks, *options, "--json", "-q")
        record = json.loads(done.out)
        if done.code == VERIFICATION:  # a copy would not help
            assert record["error"]["hint"].startswith("no file was changed: ")
        return done.code, record["problems"], record.get("reproduction")

    return run


@pytest.mark.parametrize("name", by_day(METHODS, ["gguf", "int8"]))
def test_an_honest_output_is_reproduced(place, audit, tmp_path, name):
    output = make(place, f"out{'.gguf' * (name == 'gguf')}", *METHODS[name], tmp_path)
    code, problems, made = audit(output, place / "model", 1, "--seed", 3)
    assert (code, problems) == (0, [])
    assert made["verdict"] == "identical" and made["seed"] == 3
    assert len(made["blocks"]) == 1 < made["of_blocks"]
    assert sum(row["codes"] for row in made["linears"]) and not any(r["different"] for r in made["linears"])
    (block,) = made["blocks"]
    assert _again(made).startswith(f"1 of {made['of_blocks']} blocks (block {block + 1}; seed 3): ")


def test_a_file_with_other_names_than_its_source_is_reproduced(audit, tmp_path):
    families.save_model(tmp_path / "model", "mixtral", num_hidden_layers=1)
    families.save_tokenizer(tmp_path / "model", bos=True)
    name, options = METHODS["gguf"]
    output = tmp_path / "out.gguf"
    api.quantize(name, tmp_path / "model", output=output, progress=SILENT, loss_tokens=0, **options)
    code, problems, made = audit(output, tmp_path / "model", 1)
    assert (code, problems, made["verdict"]) == (0, [], "identical")
    assert any("block_sparse_moe" in row["name"] for row in made["linears"])


@pytest.fixture
def written(place, tmp_path):
    """The model, and a copy of what gptq made of it."""
    shutil.copytree(place / "out", tmp_path / "out")
    return place / "model", tmp_path / "out"


@pytest.fixture
def elsewhere(monkeypatch):
    """Calling it makes this another kind of machine: its sums round differently, and so do scales."""
    mean, digits = capture.Hessian.mean, smooth.in_few_digits

    def rounded(self, tokens):
        hessian, generator = mean(self, tokens), torch.Generator().manual_seed(0)
        noise = 1e-4 * torch.randn(hessian.shape, generator=generator)
        return hessian.mul_(1 + noise + noise.t())

    def start():
        monkeypatch.setattr(capture.Hessian, "mean", rounded)
        monkeypatch.setattr(smooth, "in_few_digits", lambda scale: (1.004 * digits(scale)).bfloat16().float())
        monkeypatch.setattr("quantkit.evaluation.audit.machine_of", lambda device: "another")

    return start


def changed(output, name, change) -> None:
    """Change a stored linear, and its file's sum in the manifest. change: of its tensors by suffix."""
    tensors = load_file(output / "model.safetensors")
    change({part: tensors[key] for key in tensors for part in [key.removeprefix(f"{name}.")] if part != key})
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    reseal(output)


def offenders(problems) -> set[str]:
    return {problem.split()[0] for problem in problems if "not solved so" in problem}


@pytest.mark.parametrize("name", ["gptq", "w8a8", "gguf", *nightly("awq", "mlx", "yaqa")])
def test_another_machine_passes_within_the_bounds(place, audit, elsewhere, tmp_path, name):
    file = f"out{'.gguf' * (name == 'gguf')}"
    output = place / "out" if name == "gptq" else make(place, file, *METHODS[name], tmp_path)
    elsewhere()
    code, problems, made = audit(output, place / "model", "all")
    assert (code, problems) == (0, [])
    assert made["verdict"] == ("identical" if all(r["identical"] for r in made["linears"]) else "equivalent")
    assert name != "gptq" or made["verdict"] == "equivalent"


@pytest.mark.parametrize("machine", ["the same", *nightly("another")])
def test_one_row_of_codes_is_found(written, audit, elsewhere, machine):
    model, output = written
    name = "model.layers.1.mlp.gate_proj"
    changed(output, name, lambda parts: parts["qweight"][:, 5].bitwise_not_())
    if machine == "another":
        elsewhere()
    code, problems, made = audit(output, model, "all")
    assert (code, made["verdict"]) == (VERIFICATION, "different")
    assert offenders(problems) == {name} or (machine == "another" and name in offenders(problems))
    (row,) = (row for row in made["linears"] if row["name"] == name)
    assert (row["rows"] == 1 and row["different"] == 64) or machine == "another"


@pytest.mark.parametrize("machine", ["another", *nightly("the same")])
def test_a_worse_rounding_is_found(place, written, audit, elsewhere, machine):
    model, output = written
    name = "model.layers.0.mlp.up_proj"
    worse = load_file(place / "worse" / "model.safetensors")

    def replace(parts):
        for part, tensor in parts.items():
            tensor.copy_(worse[f"{name}.{part}"])

    changed(output, name, replace)
    if machine == "another":
        elsewhere()
    code, problems, _ = audit(output, model, "all")
    assert code == VERIFICATION
    assert offenders(problems) == {name} or (machine == "another" and name in offenders(problems))


def test_another_text_than_the_manifest_names_is_found(place, written, audit, elsewhere):
    model, output = written
    code, problems, made = audit(output, model, 1, "--calibration", place / "other.txt")
    assert (code, made["linears"]) == (VERIFICATION, [])
    assert problems == ["the tokens of other.txt are not those that the manifest names (sha256)"]

    manifest, honest = (json.loads((place / n / "quantkit.json").read_text()) for n in ("claimed", "out"))
    manifest["job"]["calibration"] = honest["job"]["calibration"]
    shutil.rmtree(output)
    shutil.copytree(place / "claimed", output)
    (output / "quantkit.json").write_text(json.dumps(manifest))
    elsewhere()
    code, problems, made = audit(output, model, "all")
    assert code == VERIFICATION and len(offenders(problems)) > len(made["linears"]) / 2


def test_a_text_of_a_file_is_asked_for(place, audit, refuse):
    model, output = place / "model", place / "claimed"
    error, hint = refuse(NOT_FOUND, "verify", output, "--base", model, "--reproduce", 1)
    assert "other.txt" in error and "--calibration" in hint
    code, _, made = audit(output, model, 1, "--calibration", place / "other.txt")
    assert (code, made["verdict"], made["calibration"]["source"]) == (0, "identical", "other.txt")


def test_a_text_for_a_job_without_one_is_refused(place, refuse, tmp_path):
    output = make(place, "out", "nf4", {}, tmp_path)
    text = "--reproduce", 1, "--calibration", place / "other.txt"
    said = refuse(UNSUPPORTED, "verify", output, "--base", place / "model", *text)
    assert said == ("the job of out used no calibration text", "leave out --calibration")


def test_another_source_and_tensors_that_are_not_the_sources_are_found(place, written, audit):
    model, output = written
    code, problems, made = audit(output, place / "other", 1)
    assert (code, made["verdict"], made["linears"]) == (VERIFICATION, "different", [])
    assert any("is not the source that the manifest names" in problem for problem in problems)

    changed(output, "model.norm", lambda parts: parts["weight"].mul_(2))
    code, problems, _ = audit(output, model, 1)
    assert (code, problems) == (VERIFICATION, ["model.norm.weight is not the source's"])


FORGERIES = {
    "config.json (rms_norm_eps) is not as the job writes it": (
        "config.json",
        '"rms_norm_eps": 1',
        '"rms_norm_eps": 2',
    ),
    "tokenizer.json (model) is not as the job writes it": (
        "tokenizer.json",
        '"vocab": {',
        '"vocab": {"new": 63,',
    ),
    "adapter_config.json was added: it is in neither the source nor the job": (
        "adapter_config.json",
        "",
        "{}",
    ),
}


@pytest.mark.parametrize("problem", FORGERIES)
def test_changed_and_added_files_are_found(written, audit, problem):
    model, output = written
    name, old, new = FORGERIES[problem]
    content = (output / name).read_text() if (output / name).exists() else ""
    assert old in content
    (output / name).write_text(content.replace(old, new, 1))
    reseal(output)
    code, problems, made = audit(output, model, 1)
    assert (code, problems) == (VERIFICATION, [problem])
    assert made["verdict"] == "different" and all(row["identical"] for row in made["linears"])
    assert made["output"]["files"].keys() >= {"config.json", "model.safetensors"}


def test_added_tensors_are_found(written, audit):
    model, output = written
    tensors = load_file(output / "model.safetensors")
    names = [
        "layers.1.input_layernorm.weight",  # as in a block, but of none
        "model.layers.0.mlp.up_proj.bias",
        "model.layers.0.mlp.up_proj.weight",  # beside its codes
    ]
    added = {name: torch.ones(64, dtype=torch.bfloat16) for name in names}
    assert not tensors.keys() & added.keys()
    save_file(tensors | added, output / "model.safetensors", {"format": "pt"})
    reseal(output)
    code, problems, _ = audit(output, model, 1)
    assert code == VERIFICATION
    assert problems == [f"tensors were added, which neither the source nor the job has: {', '.join(added)}"]


def test_changed_metadata_of_a_gguf_file_are_found(place, audit, tmp_path):
    output = make(place, "out.gguf", *METHODS["gguf"], tmp_path)
    data, key = output.read_bytes(), b"llama.attention.layer_norm_rms_epsilon"
    start = data.index(key) + len(key) + 4  # after the type
    output.write_bytes(data[:start] + struct.pack("<f", 0.5) + data[start + 4 :])
    gguf_writer.with_text(output, tmp_path / "forged.gguf", "general.sampling.sequence", "k")
    gguf_writer.seal(tmp_path / "forged.gguf")
    code, problems, _ = audit(tmp_path / "forged.gguf", place / "model", 1)
    changed = "general.sampling.sequence", key.decode()
    named = [f"the metadata {name} is not as the job writes it" for name in changed]
    assert (code, problems) == (VERIFICATION, named)


def test_an_embedding_of_another_type_is_found(place, refuse, tmp_path):
    output = make(place, "out.gguf", *METHODS["gguf"], tmp_path)
    (metadata, infos), data, name = gguf_file.read_header(output), output.read_bytes(), "token_embd.weight"
    kept = [gguf_writer.Entry(info.name, info.dtype, info.shape) for info in infos.values()]
    changed = [replace(entry, type="F16") if entry.name == name else entry for entry in kept]
    with gguf_writer.writing(tmp_path / "forged.gguf", metadata, changed) as write:
        for entry, before in zip(changed, kept, strict=True):
            start = infos[entry.name].offset
            same = data[start : start + before.nbytes]
            write(entry.name, [bytes(entry.nbytes) if entry.name == name else same])
    gguf_writer.seal(tmp_path / "forged.gguf")
    command = "verify", tmp_path / "forged.gguf", "--base", place / "model", "--reproduce", 1
    error, _ = refuse(VERIFICATION, *command)
    assert error.endswith(f"stores {name} in F16, which is not the type of its job")


def test_changed_factors_of_rope_are_found(audit, tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    model, output = tmp_path / "model", tmp_path / "out.gguf"
    families.save_model(model, "llama", num_hidden_layers=1, rope_parameters=rope)
    families.save_tokenizer(model, bos=True)
    api.quantize("gguf", model, output=output, progress=SILENT, loss_tokens=0, **METHODS["gguf"][1])
    assert audit(output, model, 1)[:2] == (0, [])
    factors = gguf_file.read_header(output)[1]["rope_freqs.weight"]
    data = bytearray(output.read_bytes())
    data[factors.offset : factors.offset + 4] = struct.pack("<f", 64.0)
    output.write_bytes(data)
    gguf_writer.seal(output)
    code, problems, _ = audit(output, model, 1)
    assert (code, problems) == (VERIFICATION, ["rope_freqs.weight is not as the job writes it"])


def test_another_scale_of_inputs_is_found_also_elsewhere(place, audit, elsewhere, tmp_path):
    options = {"activations": True, "samples": 4, "seqlen": 32}
    output = make(place, "out", "fp4", options, tmp_path)
    tensors = load_file(output / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.input_global_scale"
    tensors[name] *= 16
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    reseal(output)
    elsewhere()
    code, problems, _ = audit(output, place / "model", "all")
    assert code == VERIFICATION
    assert f"{name} is not scaled as when its block was solved again" in problems


def test_a_column_of_the_text_is_named_in_the_manifest(place, audit, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "not this", "body": TEXT}) + "\n")
    output = make(place, "out", "gptq", GPTQ | {"calibration": str(text), "text_column": "body"}, tmp_path)
    code, problems, made = audit(output, place / "model", 1, "--calibration", text)
    assert (code, problems, made["verdict"]) == (0, [], "identical")
    assert json.loads((output / "quantkit.json").read_text())["job"]["calibration"]["text_column"] == "body"


def test_shards_of_a_gguf_file_are_reproduced(place, audit, tmp_path):
    make(place, "out.gguf", "gguf", METHODS["gguf"][1] | {"max_shard_gb": 5e-5}, tmp_path)
    first, *others = sorted(tmp_path.glob("out-*.gguf"))
    assert others
    code, problems, made = audit(first, place / "model", 1)
    assert (code, problems, made["verdict"]) == (0, [], "identical")


def test_what_cannot_be_audited_is_refused(place, written, quantkit, refuse):
    model, output = written
    options = "--base", model, "--reproduce"
    make(place, "nearest.gguf", "gguf", {"type": ["Q4_0"], "solver": "rtn", "imatrix": "none"}, output.parent)
    error, _ = refuse(UNSUPPORTED, "verify", "nearest.gguf", *options, "all")
    assert "tensor by tensor" in error
    assert quantkit("convert", output, "--to", "compressed-tensors", "-o", "new", "-q").code == 0
    error, _ = refuse(UNSUPPORTED, "verify", "new", *options, 1)
    assert "new was converted" in error
    error, _ = refuse(UNSUPPORTED, "verify", model, *options, 1)
    assert "records no job" in error
    refuse(USAGE, "verify", output, *options, 0)
    error, _ = refuse(USAGE, "verify", output, *options, 99)
    assert error.endswith("has 2 quantized blocks")
    refuse(USAGE, "verify", output, "--reproduce", 1)
