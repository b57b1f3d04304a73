"""What `quantkit inspect` says, against what quantkit itself decodes and what was written."""

import json
import shutil
import weakref
from pathlib import Path

import families
import gguf_files
import jobs
import pytest
import torch
from safetensors.torch import load_file, save_file
from stand_in_hub import Elsewhere

from quantkit.inspection.record import describe
from quantkit.models.files import safetensors_folder
from quantkit.models.files.headers import open_contents
from quantkit.models.files.open import open_checkpoint
from quantkit.models.skeleton.loading import Loader

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
RTN = {"solver": "rtn"}
NF4 = "weight.quant_state.bitsandbytes__nf4"
PAIR = [f"model.layers.{block}.mlp.up_proj.weight" for block in (0, 1)]  # headers alone do not miss both
Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"
STRAY = "these tensors belong to no whole quantized linear"
NORMS = "input", "post_attention"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a model and what each method makes of it."""
    folder = tmp_path_factory.mktemp("made")
    plain = families.save_tokenizer(families.save_model(folder / "plain", "llama", dtype="float16", **SIZES))
    text = jobs.calibration(folder)
    for name, method, options, more in (
        ("gptq", "gptq", RTN | {"group_size": 64}, {}),
        ("mixed", "gptq", RTN, {"override": ("down_proj=8,32",), "exclude": (r"layers\.0\.self_attn",)}),
        ("ct", "gptq", RTN | {"layout": "compressed-tensors", "sym": False}, {"override": ("up_proj=8",)}),
        ("int8", "int8", {}, {}),
        ("nf4", "nf4", {}, {}),
        ("awq", "awq", {"group_size": 32}, {"calibration": text}),
    ):
        jobs.quantize(method, plain, folder / name, options, **more)
    return folder


def inspected(path: Path) -> dict:
    return describe(open_contents(str(path)))


CODES = {"gptq": "qweight", "mixed": "qweight", "ct": "weight_packed", "awq": "qweight"}
STORED = {
    "gptq": {"4 bit, groups of 64": 14},
    "mixed": {"4 bit, groups of 128": 8, "8 bit, groups of 32": 2},
    "ct": {"4 bit, groups of 128": 12, "8 bit, groups of 128": 2},
    "int8": {"int8, whole rows": 14},
    "nf4": {"nf4": 14},
    "awq": {"4 bit, groups of 32": 14},
}


@pytest.mark.parametrize("name", STORED)
def test_every_layout_is_told_from_its_headers(made, name):
    folder = made / name
    found, tensors = inspected(folder), jobs.tensors(folder)
    checkpoint = open_checkpoint(str(folder))
    quantization = found["quantization"]
    assert quantization["stored"] == STORED[name]
    assert quantization["linears"] == len(checkpoint.packed)
    packed = {stored for linear in checkpoint.packed for stored in checkpoint.stored_as(f"{linear}.weight")}
    nbytes = {stored: tensors[stored].nbytes for stored in packed}
    weights = sum(checkpoint.read(f"{linear}.weight").numel() for linear in checkpoint.packed)
    assert quantization["bits_per_weight"] == 8 * sum(nbytes.values()) / weights
    total = sum(tensor.nbytes for tensor in tensors.values())
    parameters = sum(checkpoint.read(each).numel() for each in checkpoint.names)
    model = found["model"]
    assert (model["bytes"], model["parameters"]) == (total, parameters)
    assert model["bits_per_weight"] == 8 * total / parameters
    parts = found["parts"]
    assert sum(part["bytes"] for part in parts) == total
    assert sum(part["parameters"] for part in parts) == parameters
    codes = [stored for stored in packed if stored.endswith(f".{CODES.get(name, 'weight')}")]
    assert sum(part["code_bytes"] for part in parts) == sum(nbytes[stored] for stored in codes)
    assert sum(part["code_bytes"] + part["scale_bytes"] for part in parts) == sum(nbytes.values())
    assert found["integrity"] == {"deep": False, "tensors": len(tensors), "problems": [], "warnings": []}


@pytest.mark.parametrize("name", STORED)
def test_the_tables_hold_every_weight_once(made, name):
    found, checkpoint = inspected(made / name), open_checkpoint(str(made / name))
    told = {}
    for row in found["tensors"]:
        for block in row["blocks"] or [None]:
            prefix = "" if block is None else f"model.layers.{block}."
            told[prefix + row["name"]] = row["shape"]
    assert told == {each: list(checkpoint.read(each).shape) for each in checkpoint.names}
    assert sum(row["bytes"] for row in found["tensors"]) == found["model"]["bytes"]
    assert sum(row["count"] for row in found["tensors"]) == len(checkpoint.names)


def test_what_is_kept_is_told_with_the_reason(made):
    kept = inspected(made / "mixed")["quantization"]["kept"]
    assert {row["name"] for row in kept} == {f"self_attn.{each}_proj.weight" for each in "qkvo"}
    assert all(row["blocks"] == [0] and row["stored"] == "F16" for row in kept)
    assert {row["why"] for row in kept} == {r"--exclude layers\.0\.self_attn"}


def test_a_plain_checkpoint(made):
    found = inspected(made / "plain")
    assert found["quantization"] is None and found["provenance"] is None
    assert [part["part"] for part in found["parts"]] == ["embeddings", "attention", "mlp", "norms", "head"]
    assert found["model"] == {
        "model_type": "llama", "blocks": 2, "hidden_size": 128, "vocab_size": 512, "tied": False,
        "parameters": 426624, "bytes": 853248, "bits_per_weight": 16.0,
    }  # fmt: skip
    assert found["positions"]["context"] == 256
    assert found["tokenizer"]["kind"] == "BPE" and found["tokenizer"]["tokens"] == 512


def test_provenance_is_the_manifests(made):
    found = inspected(made / "awq")["provenance"]
    manifest = json.loads((made / "awq" / "quantkit.json").read_text())
    assert found["tool"].startswith("quantkit ") and found["method"] == "awq"
    assert found["source"] == {"name": "plain", "sha256": open_checkpoint(str(made / "plain")).sha256()}
    assert found["calibration"]["sha256"] == manifest["job"]["calibration"]["sha256"]
    errors = [row["error"] for row in manifest["linears"]]
    assert found["error"] == sum(errors) / len(errors)


# ---- GGUF


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4.5), ("Q8_0", 8.5)])
def test_a_gguf_file(made, tmp_path, kind, bits):
    manifest = {"quantkit": "9", "method": "gguf", "source": {"name": "plain", "sha256": "0"}, "linears": []}
    extra = {"quantkit.manifest": json.dumps(manifest)}
    path = gguf_files.export(made / "plain", tmp_path / "model.gguf", kind, extra)
    found = inspected(path)
    quantization = found["quantization"]
    assert quantization["stored"] == {kind: 16} and quantization["file_type"] == kind
    assert quantization["bits_per_weight"] == bits and quantization["bits"] == [int(bits)]
    assert found["model"]["parameters"] == 426624 and found["model"]["blocks"] == 2
    assert found["provenance"]["tool"] == "quantkit 9"
    assert found["tokenizer"]["tokens"] == 512 and found["positions"]["context"] == 256
    assert [part["part"] for part in found["parts"]] == ["embeddings", "attention", "mlp", "norms", "head"]
    coded = sum(part["code_bytes"] for part in found["parts"])
    assert coded == (426624 - 5 * 128) * int(bits) // 8
    assert found["integrity"]["problems"] == []
    assert {row["client"] for row in found["clients"] if row["loads"]} >= {"llama.cpp", "transformers"}


# ---- the hub


@pytest.mark.nightly
def test_of_a_hub_id_the_headers_are_enough(made, hub_server, tmp_path):
    """Twice the size of what is fetched of the weights, and the same record as of the folder."""
    folder = tmp_path / "big"
    shutil.copytree(made / "gptq", folder)
    tensors = jobs.tensors(folder) | {"model.extra.weight": torch.zeros(1000, 1000)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub_server.add("models/org/name", files)
    hub_server.add("models/org/gguf", {"config.json": b"{}", "name-Q4_0.gguf": b"GGUF"})
    with Elsewhere(tmp_path, hub_server.url) as process:
        done = process.ask(do="run", arguments=["inspect", "org/name", "--json"])
        missing = process.ask(do="run", arguments=["inspect", "org/none", "--json"])
        other = process.ask(do="run", arguments=["inspect", "org/gguf"])
    assert done["code"] == 0, done["err"]
    assert hub_server.sent["model.safetensors"] <= 100_001 < len(files["model.safetensors"]) // 2
    assert "tokenizer.json" not in hub_server.sent
    told, local = json.loads(done["out"]), inspected(folder)
    for key in ("model", "quantization", "parts", "tensors", "positions", "provenance", "clients", "files"):
        assert told[key] == json.loads(json.dumps(local[key])), key
    assert told["integrity"] == local["integrity"]
    assert missing["code"] == json.loads(missing["out"])["error"]["exit_code"] == 3
    assert other["code"] == 4 and "hf download org/gguf name-Q4_0.gguf" in other["err"]


# ---- integrity


@pytest.fixture
def copy(made, tmp_path):
    """`copy("gptq", change)`: a copy whose tensors were changed by `change(tensors)`."""

    def make(name: str, change=same, **config) -> Path:
        folder = tmp_path / name
        shutil.copytree(made / name, folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        text = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(text))
        return folder

    return make


def same(tensors: dict) -> None:
    """Change nothing."""


def replace(name: str, change):
    return lambda tensors: tensors.update({name: change(tensors[name])})


def remove(*gone: str):
    return lambda tensors: [tensors.pop(name) for name in gone]


@pytest.mark.parametrize(
    ("name", "change", "config", "words"),
    [
        ("gptq", replace(f"{Q}.scales", lambda t: t[:, :64].clone()), {}, f"{Q}: qweight [16, 128]"),
        ("gptq", same, {"quantization_config": None}, "config.json says nothing of the codes in"),
        ("gptq", same, {"num_hidden_layers": 3}, "of 3 blocks, 1 without tensors: 2"),
        ("gptq", same, {"num_hidden_layers": 1}, "there are tensors of block 1"),
        ("plain", same, {"hidden_size": 64}, "has 128 columns, the configuration says 64"),
        ("plain", same, {"hidden_size": "128"}, "config.json: hidden_size is the text '128', not a number"),
        ("plain", same, {"vocab_size": 600}, "has 512 rows, the configuration says 600 tokens"),
        (
            "plain", replace("model.embed_tokens.weight", lambda t: t[:500].clone()), {"vocab_size": 500},
            "the tokenizer has 512 tokens, model.embed_tokens.weight only 500 rows",
        ),
    ],
)  # fmt: skip
def test_what_headers_give_away(copy, name, change, config, words):
    problems = inspected(copy(name, change, **config))["integrity"]["problems"]
    assert any(words in problem for problem in problems), problems


def quantized(name: str, **changes):
    """`quantization_config` of what `made` writes by that name, with changes."""
    told = {"gptq": {"bits": 4, "group_size": 64}, "awq": {"bits": 4, "group_size": 32, "version": "gemm"}}
    return {"quantization_config": {"quant_method": name} | told[name] | changes}


@pytest.mark.parametrize(
    ("name", "change", "config", "problem"),
    [
        ("gptq", remove(f"{Q}.qzeros"), {}, f"{Q}: qzeros is absent"),
        ("gptq", remove(f"{Q}.qweight"), {}, f"{STRAY}: {Q}.g_idx, {Q}.qzeros, {Q}.scales"),
        (
            "gptq", same, quantized("gptq", bits=8),
            ", ".join(f"model.layers.0.{name}_proj" for name in ("mlp.down", "mlp.gate", "mlp.up"))
            + " and 11 more: quantization_config says 8 bit in groups of 64, "
            "the tensors have 4 bit in groups of 64",
        ),
        (
            "gptq", same, quantized("gptq", dynamic={r"+:.*\.1\.self_attn\.q": {"group_size": 32}}),
            f"{Q}: quantization_config says 4 bit in groups of 32, the tensors have 4 bit in groups of 64",
        ),
        (
            "awq", lambda t: [t.pop(name) for name in list(t) if "_proj" in name and Q not in name],
            quantized("awq", group_size=64),
            f"{Q}: quantization_config says 4 bit in groups of 64, the tensors have 4 bit in groups of 32",
        ),
        ("nf4", remove(f"{Q}.weight.absmax"), {}, f"{Q}: weight.absmax is absent"),
        ("nf4", remove(f"{Q}.weight.nested_absmax"), {}, f"{Q}: weight.nested_absmax is absent"),
        (
            "nf4", replace(f"{Q}.weight.absmax", lambda t: t[:200].clone()), {},
            f"{Q}: weight.absmax is U8 [200] instead of U8 [256]",
        ),
        (
            "nf4", remove(f"{Q}.{NF4}"), {},
            f"{STRAY}: {Q}.weight, {Q}.weight.absmax, {Q}.weight.nested_absmax and 2 more",
        ),
        ("int8", remove(f"{Q}.SCB"), {}, f"{STRAY}: {Q}.weight, {Q}.weight_format"),
        ("ct", remove(f"{Q}.weight_shape"), {}, f"{Q}: weight_shape is absent"),
        ("plain", lambda t: t.clear(), {}, "there are no tensors"),
        ("gptq", same, quantized("gptq", group_size=0), "quantization_config says groups of 0"),
        (
            "gptq", same, {"quantization_config": "gptq"},
            "quantization_config says no bits and no group_size",
        ),
        (
            "gptq", replace(f"{Q}.qweight", torch.Tensor.long), {},
            f"{Q}: qweight is I64 [16, 128] instead of I32 [16, 128]",
        ),
    ],
)  # fmt: skip
def test_what_no_client_can_load(copy, quantkit, name, change, config, problem):
    """Is a problem, the exit code 1, and no client's "yes"."""
    folder = copy(name, change, **config)
    found = inspected(folder)
    assert problem in found["integrity"]["problems"]
    assert not any(row["loads"] for row in found["clients"])
    assert quantkit("inspect", folder, "-q").code == 1


@pytest.mark.parametrize("groups", [{}, None])
def test_codes_that_are_not_understood_are_printed_all_the_same(copy, quantkit, groups):
    folder = copy("ct")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"] = groups
    (folder / "config.json").write_text(json.dumps(config))
    done = quantkit("inspect", folder, "-q")
    assert done.code == 1 and "it has no config_groups" in done.err and "checkpoint " in done.out


def test_what_cannot_be_decoded_is_told_of_by_its_headers(copy, quantkit):
    folder = copy("gptq", **quantized("gptq", checkpoint_format="marlin"))
    done = quantkit("inspect", folder, "--deep", "-q")
    assert done.code == 4 and "checkpoint_format 'marlin'" in done.err
    record = json.loads(quantkit("inspect", folder, "--deep", "--json", "-q").out)
    assert record["error"]["exit_code"] == 4 and record["quantization"]["linears"] == 0


def test_groups_of_compressed_tensors_are_those_of_a_config_group(copy):
    folder = copy("ct")
    config = json.loads((folder / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["weights"]["group_size"] = 64
    (folder / "config.json").write_text(json.dumps(config))
    downs = ", ".join(f"model.layers.{block}.mlp.down_proj" for block in (0, 1))
    problem = f"{downs}: weight_scale is F16 [128, 2] instead of F16 [128, 4]"
    assert any(words.startswith(problem[:-20]) for words in inspected(folder)["integrity"]["problems"])


def test_one_g_idx_and_none(copy):
    """Without any, GPTQModel and vLLM know what is meant: the table says who does not."""
    found = inspected(copy("gptq", lambda t: [t.pop(name) for name in list(t) if name.endswith(".g_idx")]))
    assert found["integrity"]["problems"] == []
    assert {row["client"] for row in found["clients"] if row["loads"]} == {"GPTQModel", "vLLM", "AutoGPTQ"}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tokenizer.json", "{}", "tokenizer.json holds no tokenizer"),
        (
            "tokenizer.json",
            "version https://git-lfs.github.com/spec/v1\n",
            "tokenizer.json is a Git LFS pointer",
        ),
        ("config.json", "{", "config.json is not JSON"),
    ],
)
def test_small_files_that_are_broken(copy, name, text, words):
    folder = copy("plain")
    (folder / name).write_text(text)
    found = inspected(folder)
    assert found["integrity"]["problems"][0].startswith(words)
    assert not any(row["loads"] for row in found["clients"])


def test_what_is_rarely_meant_is_a_warning(copy, quantkit):
    folder = copy("plain")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    done = quantkit("inspect", folder, "-q")
    assert done.code == 0 and "nothing is wrong" in done.out
    assert "warning: there is no tokenizer" in done.out


def test_of_a_missing_shard_the_others_are_told(made, tmp_path, quantkit):
    checkpoint = open_checkpoint(str(made / "gptq"))
    folder = tmp_path / "sharded"
    shutil.copytree(made / "gptq", folder)
    (folder / "model.safetensors").unlink()
    safetensors_folder.write_folder(folder, checkpoint.infos.values(), 100_000)
    shards = sorted(folder.glob("model-*.safetensors"))
    shards[1].unlink()
    for arguments in ((), ("--deep",)):
        done = quantkit("inspect", folder, "--json", "-q", *arguments)
        record = json.loads(done.out)
        (problem,) = record["integrity"]["problems"]
        assert problem.endswith(f"are absent: {shards[1].name}") and problem.startswith(f"1 of {len(shards)}")
        assert done.code == record["error"]["exit_code"] == 1
        assert 0 < record["integrity"]["tensors"] < len(checkpoint.infos)
        assert not any(row["loads"] for row in record["clients"])
    assert record["integrity"]["notes"] == ["values were not read: the checkpoint is damaged"]
    second = quantkit("inspect", made / "gptq", folder, "--deep", "--json", "-q")
    assert json.loads(second.out)["integrity"] == record["integrity"]
    for shard in shards[2:] + shards[:1]:
        shard.unlink()
    assert quantkit("inspect", folder, "-q").code == 3  # nothing is left to tell of


def test_an_index_that_is_incomplete(made, tmp_path):
    checkpoint = open_checkpoint(str(made / "plain"))
    folder = tmp_path / "sharded"
    shutil.copytree(made / "plain", folder)
    (folder / "model.safetensors").unlink()
    safetensors_folder.write_folder(folder, checkpoint.infos.values(), 300_000)
    assert inspected(folder)["integrity"]["problems"] == []
    path = folder / safetensors_folder.INDEX
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    assert inspected(folder)["integrity"]["problems"] == [
        f"{safetensors_folder.INDEX} leaves out 1 tensor: model.norm.weight",
    ]


def nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[3] = float("nan")
    return tensor


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gptq", replace(f"{Q}.scales", nan), f"{Q}.weight holds NaN"),
        ("int8", replace(f"{Q}.SCB", nan), f"{Q}.weight holds NaN"),
        ("nf4", replace(f"{Q}.weight.nested_absmax", lambda t: t / 0), f"{Q}.weight holds NaN"),
        ("awq", replace("model.norm.weight", nan), "model.norm.weight holds NaN"),
        ("plain", remove(*PAIR), f"{PAIR[0]} is absent"),
        ("gptq", replace(f"{Q}.g_idx", lambda t: t + 1), f"{Q}: g_idx names groups 1 to 2, there are 2"),
    ],
)
def test_values_are_looked_at_when_asked(copy, quantkit, name, change, words):
    folder = copy(name, change)
    assert quantkit("inspect", folder, "-q").code == 0
    done = quantkit("inspect", folder, "--deep", "-q")
    assert done.code == 1 and done.err.startswith("error: ") and words in done.err
    assert words in done.out and ("2 problems" if PAIR[0] in words else "1 problem\n") in done.out


@pytest.mark.parametrize("name", [*STORED, "plain"])
def test_all_is_well_with_what_quantkit_writes(made, make, name):
    record = make("inspect", made / name, "--deep")
    assert record["integrity"]["problems"] == [] and record["integrity"]["notes"] == []


def test_a_model_that_transformers_cannot_build_is_read_as_it_is_stored(tiny_model, quantkit):
    folder = tiny_model("mixtral", tokenizer=True)
    record = json.loads(quantkit("inspect", folder, "--deep", "--json", "-q").out)
    assert record["integrity"]["deep"]
    assert {part["part"] for part in record["parts"]} >= {"mlp", "attention"}


# ---- two of them


def test_the_difference_of_two(made, make):
    record = make("inspect", made / "plain", made / "gptq")
    found = record["weights"]
    plain, gptq = (open_checkpoint(str(made / name)) for name in ("plain", "gptq"))
    lost = norm = 0.0
    for row in found["differences"]:
        a, b = (checkpoint.read(row["name"], torch.float64) for checkpoint in (plain, gptq))
        assert row["relative"] == pytest.approx(((a - b).norm() / a.norm()).item(), rel=1e-5, abs=1e-12)
        assert row["largest"] == pytest.approx((a - b).abs().max().item(), rel=1e-5, abs=1e-12)
        lost, norm = lost + ((a - b) ** 2).sum().item(), norm + (a**2).sum().item()
    assert found["relative"] == pytest.approx((lost / norm) ** 0.5, rel=1e-5)
    assert (found["compared"], found["equal"], found["only"], found["unlike"]) == (21, 7, [[], []], [])
    relative = [row["relative"] for row in found["differences"]]
    assert relative == sorted(relative, reverse=True) and relative[0] > 0.05
    assert record["tokenizers"] == "equal"


def test_scales_of_a_job_are_divided_out(made, make, quantkit):
    """AWQ multiplies columns and divides norms: neither counts as a difference."""
    found = make("inspect", made / "plain", made / "awq")["weights"]
    divided = {f"model.layers.{block}.{norm}_layernorm.weight" for block in (0, 1) for norm in NORMS}
    assert set(found["divided"]) == divided and found["compared"] == 21 - len(divided)
    rows = {row["name"]: row for row in found["differences"]}
    assert not divided & rows.keys() and {row["largest"] for row in rows.values()} == {0, None}
    linears = json.loads((made / "awq/quantkit.json").read_text())["linears"]
    for row in linears:
        error = row["weight_error_up_to_scales"]
        assert rows[f"{row['name']}.weight"]["relative"] ** 2 == pytest.approx(error, rel=1e-3)
    assert found["relative"] < 0.12
    shown = quantkit("inspect", made / "plain", made / "awq", "-q").out
    assert "up to scales" in shown and "4 vectors divided by scales" in shown


@pytest.mark.parametrize(("arguments", "held"), [(["--deep"], 0), (["plain"], 1)])
def test_no_more_than_one_weight_of_each_is_held(made, make, monkeypatch, arguments, held):
    """Of those read before, while the next one is read."""
    whole, read, most = Loader.read, [], []

    def watched(self, *rest):
        most.append(sum(reference() is not None for reference in read))
        values = whole(self, *rest)
        read.append(weakref.ref(values))
        return values

    monkeypatch.setattr(Loader, "read", watched)
    monkeypatch.chdir(made)
    make("inspect", "gptq", *arguments)
    assert len(read) == 21 * (1 + held) and max(most) == held


@pytest.mark.parametrize("name", ["nf4", "awq"])  # awq divided vectors by scales
def test_a_checkpoint_is_equal_to_itself(made, quantkit, name):
    done = quantkit("inspect", made / name, made / name, "-q")
    assert done.code == 0 and "21 compared, 21 equal" in done.out
    assert done.out.splitlines()[-1] == "A and B      equal in tokenizer and every weight"
    assert "─" not in done.out  # no table without a row


def test_conv1d_is_turned_before_it_is_compared(tiny_model, tmp_path, make):
    """GPT-2's square matrices have the same shape either way."""
    source = tiny_model("gpt2")
    jobs.quantize("gptq", source, tmp_path / "out", RTN | {"bits": 8, "group_size": -1})
    rows = {row["name"]: row for row in make("inspect", source, tmp_path / "out")["weights"]["differences"]}
    assert 0 < rows["transformer.h.0.attn.c_proj.weight"]["relative"] < 0.02


def test_a_gguf_file_and_its_source_are_equal(made, tmp_path, make):
    """Permuted rows are put back."""
    path = gguf_files.export(made / "plain", tmp_path / "model.gguf")
    found = make("inspect", made / "plain", path)["weights"]
    assert (found["compared"], found["equal"]) == (21, 21)


def test_other_models_are_refused(made, tiny_model, refuse):
    error, hint = refuse(4, "inspect", made / "plain", tiny_model("gpt2"))
    assert "no weight of the same name and shape" in error and "different models" in hint


def test_names_cannot_steer_the_terminal(made, tmp_path, quantkit):
    folder = tmp_path / "evil"
    shutil.copytree(made / "plain", folder)
    tensors = load_file(folder / "model.safetensors") | {"a\x1b[31m\x9b.weight": torch.zeros(1)}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "llama\x1b]0;x\x07"}
    (folder / "config.json").write_text(json.dumps(config))
    done = quantkit("inspect", folder)
    assert done.code == 0 and "a\ufffd[31m\ufffd" in done.out
    assert not set(done.out + done.err) & set("\x1b\x07\x9b")


def test_what_is_not_there(refuse, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "holds no config.json" in refuse(3, "inspect", "empty")[0]
    (tmp_path / "empty/a.gguf").touch()
    assert "give a checkpoint folder, empty/a.gguf or a hub id" == refuse(3, "inspect", "empty")[1]
    (tmp_path / "text.txt").write_text("text")
    assert "is a file" in refuse(3, "inspect", "text.txt")[0]
    (tmp_path / "short.gguf").write_bytes(b"GGUF\3\0\0\0")
    assert "short.gguf" in refuse(1, "inspect", "short.gguf")[0]
