"""`gptq --head`: the model's head is solved as a last block, from what the quantized model feeds it.
`--embedding`: the embedding is quantized before the first block. What the head is gets decided when a
checkpoint is opened."""

import json

import jobs
import pytest
import torch
from nights import nightly
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantkit.capacity import formats
from quantkit.capacity.source import read
from quantkit.errors import QuantkitError
from quantkit.grids.affine import AffineGrid
from quantkit.grids.biased import BiasedGrid
from quantkit.grids.distance import weight_error
from quantkit.inspection.record import describe
from quantkit.models.files.head import decide
from quantkit.models.files.headers import open_contents
from quantkit.models.files.open import open_checkpoint
from quantkit.models.gguf.tensors import of_checkpoint
from quantkit.quantize.convert import convert
from quantkit.quantize.outputs import outside
from quantkit.quantize.solvers import rtn
from quantkit.quantize.solvers.gptq import GptqSolver
from quantkit.quantize.staging.folder import Staging

OPTIONS = jobs.GPTQ | {"head": 8, "target": "own"}
RUN = {"dtype": "float32", "batch_size": 6}


@pytest.fixture
def source(tiny_model):
    return tiny_model("llama", tokenizer=True)


def decoded(folder, source, tmp_path):
    """transformers' model of a folder: every weight as quantkit decodes it."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    made = open_checkpoint(str(folder))
    state = {name: made.read(name, torch.float32) for name in model.state_dict() if name in made.names}
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    return model.eval(), made


def with_prior(hessian, tokens):
    """Of as many further tokens as there are channels, whose channels are uncorrelated."""
    share = tokens / (tokens + len(hessian))
    return share * hessian + (1 - share) * torch.diag(hessian.diagonal())


def moments(model, tokens):
    """Second moments of the inputs of the head, by transformers, with the solver's prior."""
    seen = []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        model(tokens)
    inputs = torch.cat(seen)
    return with_prior(inputs.T @ inputs * (2 / len(inputs)), len(inputs))


def test_the_head_is_solved_from_the_quantized_model(source, tmp_path):
    """Error feedback on second moments that transformers computes, of the inputs of the head."""
    text = jobs.calibration(tmp_path)
    job = jobs.prepare("gptq", source, tmp_path / "out", OPTIONS, calibration=text, **RUN)
    tokens = torch.cat(job.batches)
    jobs.loop.run([job], jobs.Progress())
    model, made = decoded(tmp_path / "out", source, tmp_path)
    hessian = moments(model, tokens)
    weight = load_file(source / "model.safetensors")["lm_head.weight"].float()
    grid = AffineGrid(8, 32, True, 1, signed=True)
    solver = GptqSolver(0.05, "group", 0, "own")
    (wanted,) = solver.solve([weight], [grid], hessian)
    assert torch.equal(made.read("lm_head.weight", torch.float32), wanted.weight.values())


def test_a_head_that_rounds_its_inputs_is_solved(source, tmp_path):
    options = {"head": 8, "layout": "compressed-tensors", "activations": "int8", "group_size": 32}
    text = jobs.calibration(tmp_path)
    job = jobs.prepare("gptq", source, tmp_path / "out", options, calibration=text, **RUN)
    jobs.loop.run([job], jobs.Progress())
    model, made = decoded(tmp_path / "out", source, tmp_path)
    head = load_file(source / "model.safetensors")["lm_head.weight"].float()
    assert weight_error(head, made.read("lm_head.weight", torch.float32)) < 1e-4
    assert torch.equal(model.lm_head.weight.float(), made.read("lm_head.weight", torch.float32))


@pytest.mark.parametrize("layout", ["gptq", "compressed-tensors", *nightly("mlx")])
def test_every_layout_says_that_the_head_is_packed(source, tmp_path, layout):
    options = OPTIONS | {"layout": layout, "head": 4, "target": "original"}
    jobs.quantize("gptq", source, tmp_path / "out", options, calibration=jobs.calibration(tmp_path), **RUN)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    stored = config["quantization_config"]
    if layout == "gptq":
        assert stored["lm_head"] is True and "dynamic" not in stored
    elif layout == "compressed-tensors":
        assert stored["config_groups"]["group_0"]["targets"] == ["Linear", "lm_head"]
        assert stored["ignore"] == [r"re:(?!(.*\.)?layers\.\d+\.|lm_head$)"]
    found = describe(open_contents(str(tmp_path / "out")))["tensors"]
    assert [row["stored"] for row in found if row["name"].startswith("lm_head")] == ["4 bit, groups of 32"]


def test_yaqa_solves_the_head_without_curvature(source, tmp_path):
    text = jobs.calibration(tmp_path)
    made = [
        jobs.quantize(
            "gptq", source, tmp_path / solver, OPTIONS | {"solver": solver}, calibration=text, **RUN
        )
        for solver in ("gptq", "yaqa")
    ]
    assert [summary.linears for summary in made] == [22, 22]
    assert "lm_head" not in made[1].notes


def test_a_head_that_is_the_embedding_is_refused(demo_model, tmp_path):
    with pytest.raises(QuantkitError, match="has no head of its own") as refused:
        jobs.prepare("gptq", demo_model, tmp_path / "out", {"head": 4})
    assert "leave out --head" in refused.value.hint
    with pytest.raises(QuantkitError, match="--head 9: no such width"):
        jobs.prepare("gptq", demo_model, tmp_path / "out", {"head": 9})


def rows_at_once(tensors):
    """As many rows of the embedding as a block's largest linear has weights."""
    inside = (tensor.numel() for name, tensor in tensors.items() if "_proj." in name)
    return max(inside) // tensors["model.embed_tokens.weight"].shape[1]


GRID = BiasedGrid(4, 32, "bfloat16")  # so short that the order of sums does not show
MLX = OPTIONS | {"layout": "mlx", "head": 0, "embedding": 4, "group_size": 32}


def test_an_embedding_is_rounded_to_nearest(tiny_model, tmp_path):
    source = tiny_model("llama", tokenizer=True, dtype="bfloat16")
    text = jobs.calibration(tmp_path)
    jobs.quantize("gptq", source, tmp_path / "out", MLX, calibration=text, **RUN)
    original = load_file(source / "model.safetensors")
    made, name = open_checkpoint(str(tmp_path / "out")), "model.embed_tokens.weight"
    parts = original[name].float().split(rows_at_once(original))
    wanted = torch.cat([rtn.quantize(part, GRID).values() for part in parts])
    assert torch.equal(made.read(name), wanted) and not made.is_quantized("lm_head.weight")


def test_an_embedding_that_is_the_head_is_solved_by_moments_of_the_original(tiny_model, tmp_path):
    source = tiny_model("llama", tokenizer=True, dtype="bfloat16", tie_word_embeddings=True)
    text = jobs.calibration(tmp_path)
    job = jobs.prepare("gptq", source, tmp_path / "out", MLX, calibration=text, **RUN)
    tokens = torch.cat(job.batches)
    summary = jobs.loop.run([job], jobs.Progress())[0]
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    weight = original.get_input_embeddings().weight.detach().clone()
    hessian = moments(original, tokens)
    solver = GptqSolver(1.0, "group", 0, "own")
    parts = weight.split(rows_at_once(original.state_dict()))
    solved = [solver.solve([part], [GRID], hessian)[0].weight.values() for part in parts]
    made = open_checkpoint(str(tmp_path / "out"))
    assert torch.equal(made.read("model.embed_tokens.weight"), torch.cat(solved))
    assert summary.linears == 22 and made.infos.keys().isdisjoint({"lm_head.weight", "lm_head.scales"})


@pytest.mark.parametrize("options", [OPTIONS, *nightly(MLX | {"head": 4})])
def test_a_job_that_died_after_the_head_goes_on(source, tmp_path, monkeypatch, options):
    text = jobs.calibration(tmp_path)
    jobs.quantize("gptq", source, tmp_path / "whole", options, calibration=text, **RUN)
    with monkeypatch.context() as patched:
        patched.setattr(Staging, "assemble", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            jobs.quantize("gptq", source, tmp_path / "again", options, calibration=text, **RUN)
    monkeypatch.setattr(outside, "solved_rows", None)  # the embedding is staged
    jobs.quantize("gptq", source, tmp_path / "again", options, calibration=text, resume=True, **RUN)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "again"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("gptq", {"embedding": 4}, "--embedding 4: clients of --layout gptq read no packed embedding"),
        ("gptq", {"embedding": 9, "layout": "mlx"}, "--embedding 9: no such width"),
        ("gptq", {"embedding": 7, "layout": "mlx"}, "MLX has 2, 3, 4, 5, 6 or 8 bits"),
        ("awq", {"head": 4}, "--head 4: clients of --layout awq read no packed head"),
    ],
)
def test_what_no_client_reads_is_refused(source, tmp_path, method, options, message):
    with pytest.raises(QuantkitError, match=message):
        jobs.prepare(method, source, tmp_path / "out", {"group_size": 32} | options)


@pytest.mark.parametrize(
    ("name", "plan", "options"),
    [
        ("tied", "mlx", {"layout": "mlx", "group_size": 64, "embedding": 8}),
        ("unlike", "mlx", {"layout": "mlx", "group_size": 64, "embedding": 8}),
        ("unlike", "gptq-head8", {"head": 8, "group_size": 128}),
    ],
)
def test_plan_knows_the_bytes(form, tmp_path, name, plan, options):
    source = form(name, hidden_size=128, intermediate_size=256)
    job = jobs.prepare("gptq", source, tmp_path / "out", options)
    found = read(str(source))
    assert formats.weights(plan, found.parameters).bytes == job.plan.output_bytes


# ---- what the head is


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FORMS = {  # what is stored of head and embedding, where config.json ties them
    "tied": lambda embedding: {EMBEDDING: embedding},
    "copy": lambda embedding: {EMBEDDING: embedding, HEAD: embedding.clone()},
    "alone": lambda embedding: {HEAD: embedding},
    "unlike": lambda embedding: {EMBEDDING: embedding, HEAD: embedding.flip(0).contiguous()},
}
RTN = {"solver": "rtn", "group_size": 32}


@pytest.fixture
def form(tiny_model):
    """`form("copy")` -> folder of a model in this form; config.json ties head and embedding in all."""

    def make(name, **sizes):
        folder = tiny_model(
            "llama", tokenizer=True, name=name, dtype="bfloat16", tie_word_embeddings=True, **sizes
        )
        stored = load_file(folder / "model.safetensors")
        stored |= FORMS[name](stored.pop(EMBEDDING))
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def configured(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", FORMS)
def test_everything_asks_one_fact(form, name):
    folder, tied = form(name), name != "unlike"
    contents, checkpoint = open_contents(str(folder)), open_checkpoint(str(folder))
    assert (contents.head.kind, contents.head.tied, contents.head.packed) == (name, tied, False)
    made, plan = describe(contents), read(str(folder)).parameters
    assert (made["model"]["tied"], plan.is_tied, checkpoint.config.tie_word_embeddings) == (tied,) * 3
    assert {HEAD, EMBEDDING}.intersection(checkpoint.names) == {EMBEDDING} | ({HEAD} if not tied else set())
    assert made["model"]["parameters"] == plan.count
    assert bool(checkpoint.notes) == (name in ("copy", "unlike"))
    assert [*checkpoint.notes] == made["integrity"]["warnings"] and not made["integrity"]["problems"]
    target = {target.name: target.stored for target in of_checkpoint(checkpoint)}
    assert target["token_embd.weight"] == (EMBEDDING,) and target.get("output.weight") == (
        None if tied else (HEAD,)
    )


@pytest.mark.parametrize("name", ["copy", *nightly("alone")])
def test_another_form_of_a_tied_model_gives_the_same_files(form, tmp_path, name):
    """With its own head, verification compared logits of a rounded embedding with those of the copy."""
    options = RTN | {"layout": "mlx", "embedding": 4}
    heard = jobs.Listener()
    for one in ("tied", name):
        job = jobs.prepare("gptq", form(one), tmp_path / f"{one}-out", options, progress=heard)
        jobs.loop.run([job], jobs.Progress())
    one, other = (tmp_path / f"{folder}-out" / "model.safetensors" for folder in ("tied", name))
    assert one.read_bytes() == other.read_bytes()
    said = "lm_head is an equal copy of the embedding, to which config.json ties it: quantkit leaves it out "
    assert heard.warnings == [f"{said}(0.1 MB)"] * (name == "copy")
    with pytest.raises(QuantkitError, match="has no head of its own"):
        jobs.prepare("gptq", form(name), tmp_path / "out", RTN | {"head": 4})


def test_a_head_unlike_its_embedding_is_no_longer_tied(form, tmp_path):
    """transformers cannot load a packed head while config.json ties it; other clients would skip it."""
    folder, out, options = form("unlike"), tmp_path / "out", RTN | {"bits": 4, "head": 4}
    job = jobs.prepare("gptq", folder, out, options | {"layout": "compressed-tensors"})
    jobs.loop.run([job], jobs.Progress())
    found = read(str(folder))
    assert found.parameters.count == read(str(out)).parameters.count
    assert configured(folder)["tie_word_embeddings"] and configured(out)["tie_word_embeddings"] is False
    assert describe(open_contents(str(out)))["clients"][0]["loads"]
    config = configured(out) | {"tie_word_embeddings": True}  # as it was written once
    (out / "config.json").write_text(json.dumps(config))
    made = describe(open_contents(str(out)))
    assert not any(row["loads"] for row in made["clients"]) and not made["integrity"]["problems"]
    (out / "quantkit.json").unlink()  # which knows another config.json
    convert(str(out), "gptq", tmp_path / "converted", False, jobs.Progress())
    assert configured(tmp_path / "converted")["tie_word_embeddings"] is False
    one, other = (open_checkpoint(str(path)) for path in (out, tmp_path / "converted"))
    assert torch.equal(one.read(HEAD, torch.float32), other.read(HEAD, torch.float32))


def test_files_on_the_hub_count_as_equal(form):
    """Their headers are known, their values are not."""
    contents = open_contents(str(form("unlike")))
    assert decide(contents.infos, lambda: True, stored=False).kind == "copy"
    assert decide(contents.infos, lambda: False).kind == "own"


def test_a_plan_lists_the_embedding_outside_the_blocks(quantkit, short_demo):
    asked = "gptq", short_demo, "--layout", "mlx", "--embedding", "8", "--group-size", "64"
    *_, block, embedding = json.loads(quantkit(*asked, "--dry-run", "--json", "-q").out)["matrices"]
    assert (block["name"], block["block"]) == ("mlp.down_proj", 1)
    assert (embedding["name"], embedding["block"]) == ("model.embed_tokens", None)
