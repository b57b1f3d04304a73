"""`gptq --head`: the model's head is solved as a last block, from what the quantized model feeds it.
`--embedding`: the embedding is quantized before the first block."""

import json

import jobs
import pytest
import torch
from nights import nightly
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quantkit.capacity import formats
from quantkit.capacity.source import read
from quantkit.errors import QuantkitError
from quantkit.grids.affine import AffineGrid
from quantkit.grids.biased import BiasedGrid
from quantkit.inspection.record import describe
from quantkit.models.files.headers import open_contents
from quantkit.models.files.open import open_checkpoint
from quantkit.quantize.outputs import outside
from quantkit.quantize.solvers import SiteStatistics, rtn
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


def moments(model, tokens):
    """Second moments of the inputs of the head, by transformers."""
    seen = []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        model(tokens)
    inputs = torch.cat(seen)
    return inputs.T @ inputs * (2 / len(inputs))


def test_the_head_is_solved_from_the_quantized_model(source, tmp_path):
    """Error feedback on second moments that transformers computes, of the inputs of the head."""
    text = jobs.calibration(tmp_path)
    job = jobs.prepare("gptq", source, tmp_path / "out", OPTIONS, calibration=text, **RUN)
    tokens = torch.cat(job.batches)
    jobs.loop.run(job, jobs.Progress())
    model, made = decoded(tmp_path / "out", source, tmp_path)
    hessian = moments(model, tokens)
    weight = load_file(source / "model.safetensors")["lm_head.weight"].float()
    grid = AffineGrid(8, 32, True, 1)
    solver = GptqSolver(0.01, "group", 0, "own")
    (wanted,) = solver.solve([weight], [grid], SiteStatistics(hessian, None, tokens.numel()))
    assert torch.equal(made.read("lm_head.weight", torch.float32), wanted.weight.values())


@pytest.mark.parametrize("layout", ["gptq", "compressed-tensors", "mlx"])
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
    summary = jobs.loop.run(job, jobs.Progress())
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    weight = original.get_input_embeddings().weight.detach().clone()
    statistics = SiteStatistics(moments(original, tokens), None, tokens.numel())
    solver = GptqSolver(1.0, "group", 0, "own")
    parts = weight.split(rows_at_once(original.state_dict()))
    solved = [solver.solve([part], [GRID], statistics)[0].weight.values() for part in parts]
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
    ("tied", "plan", "options"),
    [
        (True, "mlx", {"layout": "mlx", "group_size": 64, "embedding": 8}),
        (False, "mlx", {"layout": "mlx", "group_size": 64, "embedding": 8}),
        (False, "gptq-head8", {"head": 8, "group_size": 128}),
    ],
)
def test_plan_knows_the_bytes(tiny_model, tmp_path, tied, plan, options):
    wide = {"hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": tied}
    source = tiny_model("llama", tokenizer=True, dtype="bfloat16", **wide)
    job = jobs.prepare("gptq", source, tmp_path / "out", options)
    found = read(str(source))
    assert formats.weights(plan, found.parameters, found.settings).bytes == job.plan.output_bytes
