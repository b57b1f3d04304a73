"""quantkit w8a8: the layout there and back, smoothing by slow literal references, and whole jobs; weights
evaluated without the rounding of activations."""

import json
from pathlib import Path

import jobs
import pytest
import torch
from sums import assert_sums

from quantkit import layouts
from quantkit.errors import USAGE, QuantkitError
from quantkit.evaluation import evaluate
from quantkit.evaluation import windows as windows_of
from quantkit.evaluation.comparison.record import pareto
from quantkit.grids.affine import AffineGrid
from quantkit.layouts import LinearSpec, Statistic
from quantkit.layouts.compressed_tensors import CompressedTensorsLayout
from quantkit.layouts.compressed_tensors.integers import IntQuantized
from quantkit.models.files.open import open_checkpoint
from quantkit.quantize import methods
from quantkit.quantize.calibrate.capture import KEPT_INPUTS, SiteSums
from quantkit.quantize.solvers import rtn
from quantkit.quantize.solvers.gptq import GptqSolver
from quantkit.quantize.transforms.fold import Producer
from quantkit.quantize.transforms.scaling import Losses, Reader
from quantkit.quantize.transforms.smooth import QUIET, UNSEEN, SmoothReader, SmoothScaling, candidates

OUT, IN = 24, 32
CPU = torch.device("cpu")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded(inputs: torch.Tensor) -> torch.Tensor:
    """Token by token, as compressed-tensors does: the largest value is 127.5 steps."""
    scale = inputs.abs().amax(-1, keepdim=True) / 127.5
    return (inputs / scale).clamp(-128, 127).round() * scale


# ---- layout


def test_a_linear_is_read_as_it_was_written():
    layout = CompressedTensorsLayout(IntQuantized())
    weight = rtn.quantize(randn(OUT, IN), AffineGrid(8, IN))
    spec = LinearSpec("model.layers.0.mlp.up_proj", 0, "mlp.up_proj", OUT, IN, weight.grid)
    tensors = layout.encode(weight)
    assert layout.check(spec) is None and jobs.table(tensors) == layout.tensors(spec)
    assert tensors["weight"].dtype == torch.int8 and tensors["weight_scale"].dtype == torch.float16
    assert torch.equal(tensors["weight"].float() * tensors["weight_scale"].float(), weight.values())
    config = json.loads(json.dumps({"quantization_config": layout.config([spec])}))
    reader = layouts.detect(config).at(spec.name)
    inputs = randn(3, 5, IN, seed=1)
    for one in (layout, reader):
        assert torch.equal(one.decode(tensors).values(), weight.values()) and one.rounds_inputs
        assert_sums(
            one.module(tensors, None, one.values(tensors), False)(inputs), rounded(inputs) @ weight.values().T
        )
    grouped = LinearSpec("a", 0, "a", OUT, IN, AffineGrid(8, 16))
    assert "one scale for each row" in layout.check(grouped)


# ---- statistics


def test_fourth_moments_are_those_of_tokens_of_equal_size_in_either_half():
    batches = [randn(2, 10, IN, seed=seed) * (seed + 1) for seed in range(4)]
    sums = SiteSums(IN, CPU, {Statistic.FOURTH, Statistic.INPUTS})
    for batch in batches:
        sums.add(batch)
    found = sums.finish()
    rows = torch.cat([batch.view(-1, IN) for batch in batches])
    assert torch.equal(found[Statistic.INPUTS], rows)
    for half, part in enumerate(rows.split(40)):
        for channel in (0, 7):
            expected = sum((row[channel] / row.square().mean().sqrt()) ** 4 for row in part) / 40
            assert found[Statistic.FOURTH][half, channel].item() == pytest.approx(expected.item(), rel=1e-5)


def test_inputs_are_an_even_sample_of_a_long_text():
    sums = SiteSums(1, CPU, {Statistic.INPUTS})
    for start in range(0, 4 * KEPT_INPUTS, 64):
        sums.add(torch.arange(start, start + 64.0)[:, None])
    steps = sums.finish()[Statistic.INPUTS][:, 0].diff()
    assert KEPT_INPUTS // 2 <= len(steps) < KEPT_INPUTS and steps.unique().tolist() == [4]


# ---- the choice


def reader(weight: torch.Tensor, inputs: torch.Tensor, solver=None) -> SmoothReader:
    hessian = 2 * inputs.T @ inputs / len(inputs)
    transform = SmoothScaling(solver or GptqSolver(), rounded)
    plain = Reader(weight, AffineGrid(8, weight.shape[1]).plain(), hessian, torch.ones(len(weight)), inputs)
    return transform.reader(plain)


@pytest.mark.parametrize("fed", (True, False))
def test_a_loss_is_what_both_roundings_lose(fed):
    """In loops; without error feedback an error costs what the diagonal says."""
    weight, inputs, scale = randn(5, 16), randn(12, 16, seed=1), randn(16, seed=2).exp()
    solver = GptqSolver() if fed else rtn.RtnSolver(weighted=True)
    found = reader(weight, inputs, solver)
    outputs = [(row @ weight.T).square().sum() for row in inputs]
    mean = sum(outputs) / 12
    count = [mean / (each + QUIET * mean) for each in outputs]
    hessian = 2 * inputs.T @ inputs / 12
    cost = UNSEEN * solver.pivots(hessian, found.grid) if fed else hessian.diagonal()
    grid, total = AffineGrid(8, 16, search=False), 0.0
    for row in weight * scale:
        values = grid.decode(grid.round(row[None], params := grid.fit(row[None])), params)[0]
        for j in range(16):
            heard = (
                sum(c * x[j] ** 2 for c, x in zip(count, inputs, strict=True)) / inputs[:, j].square().sum()
            )
            total += cost[j] * heard / scale[j] ** 2 * (values[j] - row[j]) ** 2
    for c, x in zip(count, inputs, strict=True):
        total += c * 2 / 12 * (weight @ ((rounded(x / scale) - x / scale) * scale)).square().sum()
    assert found.loss(scale).item() == pytest.approx(total.item(), rel=1e-4)
    halves = [reader(weight, inputs, solver) for _ in range(2)]
    assert halves[0].crossed(scale, scale).item() == pytest.approx(halves[1].loss(scale).item(), rel=1e-5)


def test_scales_of_models_that_differ_by_scales_differ_by_these():
    """Of the candidates that know the columns: they undo what a norm was multiplied by."""
    fourth, column, by = randn(IN).square() + 0.1, randn(IN, seed=1).square() + 0.1, randn(IN, seed=2).exp()
    plain, other = (
        list(found) for found in (candidates(fourth, column), candidates(fourth * by**4, column / by))
    )
    half = len(plain) // 2
    for one, two in zip(plain[half:], other[half:], strict=True):
        torch.testing.assert_close(one * by, two)


def searched(weight: torch.Tensor, inputs: torch.Tensor) -> tuple[torch.Tensor | None, Losses]:
    sums = SiteSums(weight.shape[1], CPU, {Statistic.HESSIAN, Statistic.INPUTS, Statistic.FOURTH})
    for part in inputs.split(64):
        sums.add(part)
    statistics, transform = sums.finish(), SmoothScaling(GptqSolver(), rounded)
    share, few = torch.ones(len(weight)), statistics[Statistic.INPUTS]
    losses = transform.losses([Reader(weight, AffineGrid(8, IN), statistics.hessian, share, few)])
    return transform.search(losses, Producer("norm", torch.arange(IN)), [(statistics, 1.0)]), losses


def test_large_channels_are_divided_and_even_ones_left():
    weight, inputs = randn(OUT, IN), randn(512, IN, seed=1)
    scale, _ = searched(weight, inputs)
    assert scale is None or scale.max() / scale.min() < 1.6
    inputs[:, 3] *= 60
    scale, losses = searched(weight, inputs)
    assert scale.argmax() == 3 and scale[3] > 3 * scale.median()
    assert losses.of(scale) < 0.3 * float(sum(losses.plain))


def test_a_channel_that_speaks_in_one_half_only_is_not_trusted():
    """Silent in the first half, it would be scaled up by that, and be the largest in the second."""
    weight, inputs = randn(OUT, IN), randn(512, IN, seed=1)
    inputs[:256, :16] *= 0.01
    inputs[256:, 16:] *= 0.01
    scale, losses = searched(weight, inputs)
    if scale is not None:
        assert scale.max() / scale.min() < 3


# ---- options and jobs


def test_options_that_make_no_sense():
    for method, value in (("w8a8", "awq"), ("w8a8", "auto"), ("gptq", "smooth"), ("w8a8", "smooth+smooth")):
        with pytest.raises(QuantkitError) as raised:
            methods.create(method, transform=value).check()
        assert raised.value.exit_code == USAGE
    plain = methods.create("w8a8", solver="rtn", transform="none")
    assert not plain.build().needs
    assert plain.suffix == "w8a8-rtn-none"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return jobs.calibration(tmp_path_factory.mktemp("text"), samples=8)


def divergences(folders: list, text, **arguments) -> dict[str, float]:
    checkpoints = [open_checkpoint(str(folder)) for folder in folders]
    windows = windows_of.load(checkpoints[0], Path(text.calibration), 32, None, 512)
    chosen = frozenset({"kld"})
    found = evaluate.evaluate(checkpoints, windows, torch.float32, CPU, chosen=chosen, **arguments)
    return {model["source"]: model["metrics"]["kld"]["mean"] for model in found["models"][1:]}


def test_smoothed_jobs_lose_less_where_channels_are_large(tiny_model, tmp_path, text):
    model = jobs.spread(tiny_model("llama", tokenizer=True, num_hidden_layers=2))
    for name, options in {"smooth": {}, "plain": {"transform": "none"}}.items():
        jobs.quantize("w8a8", model, tmp_path / name, options, calibration=text, dtype="float32")
    lost = divergences([model, tmp_path / "smooth", tmp_path / "plain"], text)
    assert lost[str(tmp_path / "smooth")] < 0.2 * lost[str(tmp_path / "plain")]
    rows = jobs.manifest(tmp_path / "smooth")
    assert rows["model.layers.0.self_attn.q_proj"]["scaled"]["into"] == "input_layernorm"
    assert rows["model.layers.1.mlp.gate_proj"]["scaled"]["spread"] > 8


def test_weights_alone_are_those_of_a_plain_checkpoint(tiny_model, tmp_path, text):
    model = tiny_model("llama", tokenizer=True, num_hidden_layers=2)
    options = {"solver": "rtn", "transform": "none"}
    jobs.quantize("w8a8", model, tmp_path / "made", options)
    made = open_checkpoint(str(tmp_path / "made"))
    decoded = jobs.rewrite(
        tiny_model("llama", tokenizer=True, num_hidden_layers=2),
        lambda name, tensor: made.read(name).to(tensor.dtype) if tensor.ndim == 2 else None,
    )
    both = divergences([model, tmp_path / "made"], text, weights_only=True, trials=("int8",))
    made_alone, names = f"{tmp_path / 'made'}, weights only", [f"{tmp_path / 'made'}", f"{model} as int8"]
    assert list(both) == [names[0], made_alone, names[1], f"{names[1]}, weights only"]
    assert all(both[f"{name}, weights only"] < 0.7 * both[name] for name in names)
    assert both[made_alone] == pytest.approx(divergences([model, decoded], text)[str(decoded)], rel=0.02)


def test_weights_only_adds_no_row_where_nothing_else_is_quantized(tiny_model, text):
    model = tiny_model("llama", tokenizer=True, num_hidden_layers=1)
    assert divergences([model, model], text, weights_only=True) == {str(model): 0}


def test_weights_alone_are_on_no_front():
    sizes = [
        {"source": name, "size": {"weight_bytes": size}} for name, size in (("a", 4), ("b", 2), ("b, w", 2))
    ]
    models = [
        row | {"metrics": {"kld": {"mean": lost}}} for row, lost in zip(sizes, (None, 0.2, 0.1), strict=True)
    ]
    models[2]["weights_only"] = True
    assert sorted(pareto(models)["models"]) == ["a", "b"]
