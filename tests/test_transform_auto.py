"""--transform: what it takes, and `auto` by slow literal references and in whole jobs."""

import re

import blocks
import jobs
import pytest
import torch
from nights import nightly

from quantkit.errors import QuantkitError
from quantkit.grids.affine import AffineGrid
from quantkit.models.files.gguf_file import read_header
from quantkit.models.machine import expert_share
from quantkit.quantize import methods, solving
from quantkit.quantize.calibrate.statistics import retarget
from quantkit.quantize.solvers.gptq import GptqSolver
from quantkit.quantize.transforms.auto import FedReader, FeedbackScaling, candidate, spread
from quantkit.quantize.transforms.awq import AwqScaling
from quantkit.quantize.transforms.scaling import Reader

RUN = {"batch_size": 2, "dtype": "float32"}
SMALL = {"group_size": 32}
NORMS = "input_layernorm", "post_attention_layernorm"


@pytest.fixture
def twin(tiny_model):
    """`twin("llama")`: a tiny model with a few channels that its norms make large and its linears small."""

    def make(family: str, **arguments):
        return jobs.spread(tiny_model(family, tokenizer=True, num_hidden_layers=2, **arguments))

    return make


# ---- what --transform says


@pytest.mark.parametrize("value", ["quip", "rotate", "awq+auto"])
def test_unknown_transforms_are_refused(value):
    for method in ("gptq", "nf4", "gguf", "w8a8"):
        with pytest.raises(QuantkitError, match=f"--transform {re.escape(value)}: no such transform"):
            methods.create(method, transform=value).check()


@pytest.mark.parametrize("method", ["gptq", "nf4"])
def test_a_method_with_a_solver_composes_it(method):
    def built(**options):
        return methods.create(method, **options).build()

    assert isinstance(built(solver="gptq").transform, FeedbackScaling)
    assert built(solver="gptq", transform="none").transform is None
    assert isinstance(built(solver="gptq", transform="awq").transform, AwqScaling)
    assert isinstance(built(solver="rtn", transform="awq").transform, AwqScaling)
    assert not built(solver="rtn").needs  # auto is about error feedback: without it, no text
    names = {methods.create(method, transform=value).suffix for value in ("none", "awq", "auto")}
    assert len(names) == 3


def test_tensors_that_ggml_encodes_are_not_scaled():
    methods.create("gguf", solver="rtn").check()
    with pytest.raises(QuantkitError, match="--transform awq is for --solver gptq"):
        methods.create("gguf", solver="rtn", transform="awq").check()


# ---- the estimate


def moments(features: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, features, generator=generator) @ torch.randn(features, features, generator=generator)
    return 2 / 400 * x.T @ x


def test_pivots_are_what_elimination_from_the_last_column_leaves():
    H, solver = moments(12), GptqSolver(damp=0.01, act_order="none")
    left = H.double() + 0.01 * H.diagonal().mean() * torch.eye(12)
    expected = []
    for j in reversed(range(12)):
        expected.append(left[j, j].item())
        left = left[:j, :j] - torch.outer(left[:j, j], left[j, :j]) / left[j, j]
    found = solver.pivots(H, AffineGrid(4, 4))
    assert found.tolist() == pytest.approx(expected[::-1], rel=1e-3)
    order = torch.argsort(H.diagonal(), descending=True)
    moved = GptqSolver(act_order="full").pivots(H, AffineGrid(4, 4))
    direct = solver.pivots(H[order][:, order], AffineGrid(4, 4))
    torch.testing.assert_close(moved[order], direct)


def test_a_loss_is_the_sum_of_pivots_times_squared_rounding_errors():
    generator = torch.Generator().manual_seed(2)
    weight, scale = torch.randn(5, 16, generator=generator), torch.rand(16, generator=generator) + 0.5
    grid, H, share = AffineGrid(3, 8), moments(16), torch.tensor([1.0, 0.5, 2.0])
    pivots = GptqSolver().pivots(H, grid)
    reader = FeedbackScaling(GptqSolver()).reader(
        Reader(weight, grid, H, share.repeat(2)[:5]).rows(slice(None, None, 2))
    )
    expected = 0.0
    for row, count in zip(weight[::2], (1.0, 2.0, 0.5), strict=True):
        for low in (0, 8):
            span = slice(low, low + 8)
            part = (row * scale)[span][None]
            values = grid.decode(*rounded(grid, part, (pivots / scale**2)[span]))
            expected += count * ((values - part)[0] ** 2 * (pivots / scale**2)[span]).sum().item()
    # a fit is the same whether rows come alone or together
    assert reader.loss(scale).item() == pytest.approx(expected, rel=1e-5)


def rounded(grid, part, importance):
    params = grid.fit(part, importance)
    return grid.round(part, params), params


def test_candidates_undo_what_a_norm_did_to_the_columns():
    """Columns divided by 32, whose inputs are as much larger: scales take back all of it if b + a = 1."""
    weight, grid, factor = torch.randn(8, 16), AffineGrid(4, 16), torch.ones(16)
    factor[[3, 7]] = 32
    H = moments(16)
    for b, a in ((1.0, 0.0), (0.5, 0.5)):
        plain, made = (
            candidate([FedReader(w, grid, h, torch.ones(len(w)), pivots=h.diagonal())], b, a)
            for w, h in ((weight, H), (weight / factor, H * factor * factor[:, None]))
        )
        torch.testing.assert_close(made - plain, factor.log(), rtol=1e-4, atol=1e-4)


def test_the_block_computes_the_same_and_its_columns_are_alike(twin):
    bench = blocks.load(twin("llama"))
    before = bench.run()
    view = bench.view(lambda name: AffineGrid(4, 32), bench.statistics())
    transformed = FeedbackScaling(GptqSolver()).apply(view)
    torch.testing.assert_close(bench.run(), before, rtol=1e-4, atol=1e-4)
    columns = bench.block.mlp.gate_proj.weight.square().mean(0).sqrt()
    assert columns.max() / columns.min() < 6 and transformed.facts["mlp.gate_proj"]["scaled"]["spread"] > 16
    assert transformed.facts["mlp.gate_proj"]["scaled"]["loss"] < 0.9
    assert transformed.facts["mlp.gate_proj"]["scaled"]["into"] == NORMS[1]


def test_the_spread_of_columns_is_that_of_all_linears_together_without_empty_columns():
    first, second = torch.zeros(2, 4), torch.zeros(3, 4)
    first[0] = torch.tensor([3.0, 0.5, 0.0, 1e-5])
    second[1] = torch.tensor([4.0, 0.0, 0.0, 0.0])
    assert spread([first, second]) == pytest.approx(5 / 0.5)
    assert spread([first.bfloat16(), second]) == pytest.approx(5 / 0.5)
    assert spread([torch.zeros(2, 4)]) == 1


# ---- whole jobs


def test_blocks_whose_columns_are_alike_are_skipped(tiny_model, tmp_path):
    def change(name: str, tensor: torch.Tensor) -> None:
        if name == "model.layers.1.post_attention_layernorm.weight":
            tensor[3] *= 32
        elif name in ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"):
            tensor[:, 3] /= 32

    model = jobs.rewrite(tiny_model("llama", tokenizer=True, num_hidden_layers=2), change)
    text = jobs.calibration(tmp_path)
    summary = jobs.quantize("gptq", model, tmp_path / "out", SMALL, calibration=text, **RUN)
    assert summary.scaled and all(name.startswith("model.layers.1.") for name in summary.scaled)
    rows = jobs.manifest(tmp_path / "out")
    assert "weight_error" in rows["model.layers.0.mlp.up_proj"]
    assert "weight_error_up_to_scales" in rows["model.layers.1.mlp.up_proj"]


@pytest.mark.processor
def test_auto_loses_less_on_outlier_channels_and_says_what_it_did(twin, tmp_path):
    model, text = twin("llama", dtype="bfloat16"), jobs.calibration(tmp_path)
    run = {"batch_size": 2, "dtype": "bfloat16", "calibration": text}  # weights wait in float32 beside it
    plain = jobs.quantize("gptq", model, tmp_path / "none", SMALL | {"transform": "none"}, **run)
    prepared = jobs.prepare("gptq", model, tmp_path / "auto", SMALL, **run)
    auto = jobs.loop.run([prepared], jobs.Progress())[0]
    assert auto.error < 0.9 * plain.error and not plain.scaled
    rows = jobs.manifest(tmp_path / "auto")
    scaled = {name for name, row in rows.items() if row.get("scaled")}
    assert scaled == set(auto.scaled) and len([n for n in scaled if n.endswith(("q_proj", "up_proj"))]) == 4
    repeated = tmp_path / "repeated"
    jobs.quantize("gptq", model, repeated, SMALL, sequential="repeat", **run)
    both = jobs.tensors(tmp_path / "auto"), jobs.tensors(repeated)
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0])
    norms = [name for name in both[0] if name.endswith(NORMS[1] + ".weight")]
    source = jobs.tensors(model)
    assert all(not torch.equal(both[0][name], source[name]) for name in norms)


@pytest.mark.nightly
def test_gguf_files_hold_the_divided_norms(twin, tmp_path):
    """The job reads the file back and compares what it computes; here: the norms are not the source's."""
    model, text = twin("llama", hidden_size=256, intermediate_size=512), jobs.calibration(tmp_path)
    place = tmp_path / "auto.gguf"
    options = {"type": ("Q4_0",), "pre_tokenizer": "default"}
    summary = jobs.quantize("gguf", model, place, options, calibration=text, **RUN)
    info = read_header(place)[1]["blk.0.ffn_norm.weight"]
    with place.open("rb") as file:
        file.seek(info.offset)
        norm = torch.frombuffer(bytearray(file.read(info.nbytes)), dtype=torch.float32)
    source = jobs.tensors(model)["model.layers.0.post_attention_layernorm.weight"].float()
    assert (source / norm).max() / (source / norm).min() > 8
    assert summary.scaled["model.layers.0.mlp.up_proj"]["spread"] > 8


def test_where_nothing_folds_the_job_says_so_and_writes_what_none_writes(twin, tmp_path):
    model, text = twin("olmo2"), jobs.calibration(tmp_path)
    options = SMALL | {"bits": 4}
    summary = jobs.quantize(
        "gptq", model, tmp_path / "auto", options, calibration=text, exclude=("o_proj|down_proj",), **RUN
    )
    assert len(summary.scaled) == 10 and not any(row["into"] for row in summary.scaled.values())
    options |= {"transform": "none"}
    jobs.quantize(
        "gptq", model, tmp_path / "none", options, calibration=text, exclude=("o_proj|down_proj",), **RUN
    )
    both = jobs.tensors(tmp_path / "auto"), jobs.tensors(tmp_path / "none")
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[1])


@pytest.mark.parametrize("streamed", [False, *nightly(True)])
def test_experts_stay_as_they_are(twin, tmp_path, monkeypatch, streamed):
    monkeypatch.setattr(expert_share, "streams", lambda *_: streamed)
    model, text = twin("mixtral"), jobs.calibration(tmp_path)
    summary = jobs.quantize("gptq", model, tmp_path / "out", SMALL, calibration=text, **RUN)
    scaled = {name for name, row in summary.scaled.items() if row["into"]}
    assert scaled and not any("expert" in name for name in scaled)
    source, written = jobs.tensors(model), jobs.tensors(tmp_path / "out")
    norm = "model.layers.0.post_attention_layernorm.weight"
    assert torch.equal(source[norm], written[norm])


def test_the_original_beside_is_divided_as_the_block_is(twin, tmp_path, monkeypatch):
    """What enters the first site of all is the original's: behind a scale, too, nothing drifts there."""
    seen = []

    def listen(weights, drift, damp):
        seen.append((drift.halves.abs().max(), drift.hessian.abs().max()))
        return retarget(weights, drift, damp)

    monkeypatch.setattr(solving, "retarget", listen)
    jobs.quantize(
        "gptq", twin("llama"), tmp_path / "out", SMALL, calibration=jobs.calibration(tmp_path), **RUN
    )
    found = jobs.manifest(tmp_path / "out")
    assert found["model.layers.0.self_attn.q_proj"]["scaled"]["spread"] > 8
    assert seen[0][0] < 1e-5 * seen[0][1] and all(drift > 1e-4 * hessian for drift, hessian in seen[1:])
