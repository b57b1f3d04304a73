"""--target original: error feedback that makes up for what was lost before (`retarget`)."""

from dataclasses import replace
from functools import partial

import blocks
import families
import jobs
import pytest
import torch
from sums import assert_sums
from torch import Tensor

from quantkit.errors import QuantkitError
from quantkit.grids.affine import AffineGrid
from quantkit.layouts import Statistic
from quantkit.models.files.open import open_checkpoint
from quantkit.models.machine import expert_share
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import walk
from quantkit.quantize.calibrate.capture import Counterpart, SiteSums
from quantkit.quantize.calibrate.residual import find_writers
from quantkit.quantize.calibrate.statistics import SiteStatistics, retarget
from quantkit.quantize.prepare import memory
from quantkit.quantize.progress import Progress
from quantkit.quantize.solvers import MEASURED_ROWS
from quantkit.quantize.solvers.gptq import GptqSolver
from quantkit.quantize.solving import solve

WIDTH, ROWS, TOKENS = 24, 16, 4000
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TWO_BITS = {"bits": 2, "group_size": 32}


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def site(signal: float, tokens: int = TOKENS, missing: bool = True):
    """W, X, and what its outputs are to be: X̃ Wᵀ + R, of which `signal` follows from X; the statistics."""
    weight, inputs = (
        randn(ROWS, WIDTH, seed=0),
        randn(tokens, WIDTH, seed=1) @ (torch.eye(WIDTH) + 0.1 * randn(WIDTH, WIDTH, seed=2)),
    )
    theirs = inputs + signal * inputs @ randn(WIDTH, WIDTH, seed=3) + 0.5 * randn(tokens, WIDTH, seed=4)
    short = signal * inputs @ randn(WIDTH, ROWS, seed=5) + 0.5 * randn(tokens, ROWS, seed=6)
    sums = SiteSums(WIDTH, torch.device("cpu"))
    for part in (slice(0, tokens // 3), slice(tokens // 3, tokens)):
        alone = (weight, short[part]) if missing else ()
        sums.add(inputs[part], Counterpart(theirs[part], *alone))
    meant = theirs @ weight.T + (short if missing else 0)
    return weight, inputs, meant, sums.finish()


def move(weights: list[Tensor], statistics: SiteStatistics) -> list[Tensor]:
    return retarget(weights, statistics[Statistic.DRIFT], 1e-7)


@pytest.mark.parametrize("missing", [True, False])
def test_a_move_is_the_least_squares_answer_as_far_as_it_is_real(missing):
    weight, inputs, meant, statistics = site(signal=1.0, missing=missing)
    (moved,) = move([weight], statistics)
    answer = torch.linalg.lstsq(inputs.double(), meant.double()).solution.T
    shift, full = moved.double() - weight, answer - weight
    share = ((shift * full).sum() / full.square().sum()).item()
    torch.testing.assert_close(shift, share * full, rtol=0, atol=2e-3 * full.abs().max().item())
    assert 0.99 < share < 1
    before, after = ((inputs @ w.T - meant).square().sum() for w in (weight, moved))
    assert after < 0.3 * before


def test_the_plan_knows_how_many_rows_are_sampled():
    assert memory.SAMPLED == MEASURED_ROWS


@pytest.mark.parametrize("missing", [True, False])
def test_the_share_of_some_rows_counts_for_all(missing, monkeypatch):
    weight, _, _, statistics = site(signal=0.3, missing=missing)
    (whole,) = move([weight], statistics)
    monkeypatch.setattr("quantkit.quantize.calibrate.statistics.measured", lambda rows: slice(1, None, 3))
    (sampled,) = move([weight], statistics)
    one, other = sampled - weight, whole - weight
    share = (one * other).sum() / other.square().sum()
    torch.testing.assert_close(one, share * other, rtol=0, atol=1e-5)
    drift = statistics[Statistic.DRIFT]
    part = replace(drift, halves=drift.halves[:, 1::3]) if missing else drift
    monkeypatch.undo()
    (alone,) = retarget([weight[1::3]], part, 1e-7)
    torch.testing.assert_close(sampled[1::3], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_massive_tokens_do_not_decide_the_move(dtype):
    """Errors count relative to the hidden states that the output is added to; H is that of all tokens."""
    weight, inputs = randn(ROWS, WIDTH, seed=0), randn(TOKENS, WIDTH, seed=1).to(dtype)
    short = inputs.float() @ randn(WIDTH, ROWS, seed=5) + 0.5 * randn(TOKENS, ROWS, seed=6)
    scale = torch.ones(TOKENS)
    scale[::50] = 1000
    short[::50] = 1000 * inputs[::50].float() @ randn(WIDTH, ROWS, seed=7)
    sums = SiteSums(WIDTH, torch.device("cpu"))
    for part in cut(torch.arange(TOKENS), TOKENS):
        batch, missing = inputs[part], short[part]
        sums.add(batch, Counterpart(batch, weight, missing, scale[part]))
        assert torch.equal(batch, inputs[part]) and torch.equal(missing, short[part]), "the model's own"
    statistics, inputs = sums.finish(), inputs.float()
    assert_sums(statistics.hessian, 2 * inputs.T @ inputs / TOKENS, rel=1e-5)
    (moved,) = move([weight], statistics)
    meant = inputs @ weight.T + short
    divided = [(side / scale[:, None]).double() for side in (inputs, meant)]
    full = torch.linalg.lstsq(*divided).solution.T - weight
    shift = moved.double() - weight
    share = ((shift * full).sum() / full.square().sum()).item()
    torch.testing.assert_close(shift, share * full, rtol=0, atol=2e-3 * full.abs().max().item())
    assert 0.9 < share < 1
    usual = scale == 1
    before, after = ((inputs @ w.T - meant)[usual].square().sum() for w in (weight, moved))
    assert after < 0.3 * before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaled", [True, False])
def test_weights_of_tokens_change_the_hessian_alone(dtype, scaled):
    weight, inputs = randn(ROWS, WIDTH, seed=0), 100 * randn(TOKENS, WIDTH, seed=1).to(dtype)
    theirs, count = 100 * randn(TOKENS, WIDTH, seed=2).to(dtype), 1e3 * randn(TOKENS, seed=3).exp()
    alone = (weight, randn(TOKENS, ROWS, seed=4), torch.rand(TOKENS) + 1) if scaled else ()
    plain = SiteSums(WIDTH, torch.device("cpu"))
    weighted = SiteSums(WIDTH, torch.device("cpu"), weights=count)
    for part in cut(torch.arange(TOKENS), TOKENS):
        counterpart = Counterpart(theirs[part], *(alone and (weight, alone[1][part], alone[2][part])))
        plain.add(inputs[part].clone(), counterpart)
        weighted.add(inputs[part].clone(), counterpart)
    plain, weighted = plain.finish(), weighted.finish()
    wanted = 2 * inputs.double().T @ (inputs.double() * count[:, None]) / TOKENS
    assert_sums(weighted.hessian, wanted.float(), rel=1e-5 if dtype.itemsize == 4 else 1e-2)
    found, meant = (statistics[Statistic.DRIFT] for statistics in (weighted, plain))
    assert_sums(found.hessian, meant.hessian, rel=1e-5)
    assert_sums(found.halves, meant.halves, rel=1e-5)


def test_a_linear_alone_has_the_same_answer_as_one_of_several():
    """W (X̃ - X)ᵀX is one product with W or two without."""
    weight, inputs, _, several = site(signal=1.0, missing=False)
    sums = SiteSums(WIDTH, torch.device("cpu"))
    theirs = inputs + inputs @ randn(WIDTH, WIDTH, seed=3) + 0.5 * randn(TOKENS, WIDTH, seed=4)
    for part in cut(torch.arange(TOKENS), TOKENS):
        sums.add(inputs[part], Counterpart(theirs[part], weight))
    (one,), (other,) = move([weight], sums.finish()), move([weight], several)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def test_batches_without_a_counterpart_count_for_the_hessian_alone():
    weight, inputs, _, paired = site(signal=1.0)
    sums, more = SiteSums(WIDTH, torch.device("cpu")), 3 * randn(500, WIDTH, seed=7)
    meant = inputs + inputs @ randn(WIDTH, WIDTH, seed=3) + 0.5 * randn(TOKENS, WIDTH, seed=4)
    short = inputs @ randn(WIDTH, ROWS, seed=5) + 0.5 * randn(TOKENS, ROWS, seed=6)
    first, last = cut(torch.arange(TOKENS), TOKENS)
    sums.add(inputs[first], Counterpart(meant[first], weight, short[first]))
    sums.add(more)
    sums.add(inputs[last], Counterpart(meant[last], weight, short[last]))
    found = sums.finish()
    everything = torch.cat([inputs, more]).double()
    torch.testing.assert_close(
        found.hessian.double(), 2 * everything.T @ everything / (TOKENS + 500), rtol=1e-4, atol=1e-4
    )
    drift, other = found[Statistic.DRIFT], paired[Statistic.DRIFT]
    torch.testing.assert_close(drift.hessian, paired.hessian)
    torch.testing.assert_close(retarget([weight], drift, 0.01), retarget([weight], other, 0.01))
    assert other.hessian is paired.hessian, "H of all is that of the pairs"


def test_the_share_that_is_real_is_what_two_halves_say_alike():
    weight, inputs, meant, statistics = site(signal=0.05, tokens=200)
    (moved,) = move([weight], statistics)
    parts = [
        torch.cat([p[: len(p) // 2] for p in cut(inputs, 200)]),
        torch.cat([p[len(p) // 2 :] for p in cut(inputs, 200)]),
    ]
    shorts = [
        torch.cat([p[: len(p) // 2] for p in cut(meant - inputs @ weight.T, 200)]),
        torch.cat([p[len(p) // 2 :] for p in cut(meant - inputs @ weight.T, 200)]),
    ]
    H = (inputs.T @ inputs).double()
    one, two = (
        torch.linalg.solve(H, (x.T @ short).double()).T for x, short in zip(parts, shorts, strict=True)
    )
    share = 4 * torch.trace(one @ H @ two.T) / torch.trace((one + two) @ H @ (one + two).T)
    assert 0 < share < 0.9
    torch.testing.assert_close(moved, (weight + share * (one + two)).float(), rtol=0, atol=1e-4)


def cut(rows: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The batches of `site`."""
    return rows[: tokens // 3], rows[tokens // 3 :]


def test_noise_moves_nothing():
    weight, inputs, meant, statistics = site(signal=0.0, tokens=200)
    (moved,) = move([weight], statistics)
    answer = torch.linalg.lstsq(inputs, meant).solution.T
    assert (moved - weight).norm() < 0.3 * (answer - weight).norm()


def test_scaled_inputs_move_scaled_weights_alike():
    weight, _, _, statistics = site(signal=1.0)
    (moved,) = move([weight], statistics)
    scale = 2.0 ** torch.randint(-3, 4, (WIDTH,), generator=torch.Generator().manual_seed(0))
    (scaled,) = move([weight * scale], site(signal=1.0)[3].divided(scale))
    torch.testing.assert_close(scaled / scale, moved, rtol=0, atol=2e-3)


def test_the_prior_is_uncorrelated_tokens():
    _, _, _, statistics = site(signal=1.0, tokens=200)
    drift = replace(statistics[Statistic.DRIFT], hessian=2 * statistics.hessian, tokens=50)
    statistics[Statistic.DRIFT] = drift
    before, apart = statistics.hessian.clone(), drift.hessian.clone()
    for _ in range(2):  # only once
        statistics.shrink()
        for now, then, tokens in ((statistics.hessian, before, 200), (drift.hessian, apart, 50)):
            means = then * (tokens / (tokens + WIDTH))
            means.diagonal().copy_(then.diagonal())
            torch.testing.assert_close(now, means)
    mixed = SiteStatistics({Statistic.HESSIAN: before.clone()}, 200).mixed(statistics, "routed")
    mixed.shrink()  # an expert's prior is its layer
    torch.testing.assert_close(mixed.hessian, before)


@pytest.mark.parametrize("missing", [True, False])
def test_few_tokens_move_as_far_as_with_the_pseudo_tokens(missing):
    """The tokens are alike. Against H with the prior and a drift without it, the move would be too long."""
    tokens, common = 12, randn(1, WIDTH, seed=1)
    weight, inputs = randn(ROWS, WIDTH, seed=0), common + 0.1 * randn(tokens, WIDTH, seed=2)
    theirs = inputs + 0.3 * common
    short = inputs @ randn(WIDTH, ROWS, seed=5) if missing else torch.zeros(tokens, ROWS)
    sums = SiteSums(WIDTH, torch.device("cpu"))
    sums.add(inputs, Counterpart(theirs, *((weight, short) if missing else ())))
    statistics = sums.finish()
    statistics.shrink()
    (moved,) = move([weight], statistics)
    pseudo = (inputs.square().mean(0) * WIDTH).sqrt().diag()  # H of these is diagonal
    apart = (theirs - inputs) @ weight.T + short
    padded = (torch.cat(parts).double() for parts in ((inputs, pseudo), (apart, torch.zeros(WIDTH, ROWS))))
    full = torch.linalg.lstsq(*padded).solution.T
    shift = moved.double() - weight
    share = ((shift * full).sum() / full.square().sum()).item()
    torch.testing.assert_close(shift, share * full, rtol=0, atol=2e-3 * full.abs().max().item())
    assert 0.9 < share <= 1.001
    before, after = ((inputs @ (w - weight).T - apart).square().sum() for w in (weight, moved))
    assert after < before


def test_few_tokens_do_not_decide_the_rounding():
    """Of other inputs of the same kind, less is lost with the prior."""
    mix, weight, lost = randn(WIDTH, WIDTH, seed=1), randn(ROWS, WIDTH, seed=2), {}
    few, others = (randn(count, WIDTH, seed=seed) @ mix for count, seed in ((WIDTH, 3), (4096, 4)))
    for has_prior in (True, False):
        moments = {Statistic.HESSIAN: 2 * few.T @ few / len(few)}
        statistics = SiteStatistics(moments, len(few), has_prior=not has_prior)
        (solved,) = solve(GptqSolver(), [weight], [AffineGrid(4, 8)], statistics)
        lost[has_prior] = (others @ (solved.weight.values() - weight).T).square().mean().item()
    assert lost[True] < 0.9 * lost[False]


def test_error_feedback_comes_nearer_to_the_original():
    weight, inputs, meant, statistics = site(signal=1.0)
    grid = AffineGrid(4, 8)
    errors = {}
    own = SiteStatistics({Statistic.HESSIAN: statistics.hessian.clone()}, statistics.tokens)
    for name, known in (("own", own), ("original", statistics)):
        (solved,) = solve(GptqSolver(), [weight], [grid], known)
        assert solved.fallback is None
        errors[name] = (inputs @ solved.weight.values().T - meant).square().sum()
    assert errors["original"] < 0.5 * errors["own"]
    assert GptqSolver().needs == {Statistic.HESSIAN, Statistic.DRIFT}
    assert GptqSolver(target="own").needs == {Statistic.HESSIAN}


WRITERS = {
    "llama": ["self_attn.o_proj", "mlp.down_proj"],
    "phi3": ["self_attn.o_proj", "mlp.down_proj"],
    "gpt2": ["attn.c_proj", "mlp.c_proj"],
    "falcon": ["self_attention.dense", "mlp.dense_4h_to_h"],
    "mixtral": ["self_attn.o_proj"],
    "mamba2": ["mixer.out_proj"],
    "gemma2": [],
    "gemma3": [],
    "olmo2": [],
}


def writers(bench: blocks.Bench) -> list[str]:
    run = partial(bench.skeleton.trace_block, bench.index)
    return find_writers(bench.block, bench.sites, run, bench.inputs)


@pytest.mark.parametrize("family", WRITERS)
def test_writers_are_found(tmp_path, family):
    bench = blocks.load(families.save_model(tmp_path, family))
    assert writers(bench) == WRITERS[family]
    assert not any("forward" in vars(module) for module in bench.block.modules())


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "olmo2"])
def test_a_massive_first_token_hides_no_other(tmp_path, family):
    """In bfloat16, a few roundings of one value of the first token exceed all other tokens, as in Gemma 3."""
    bench = blocks.load(families.save_model(tmp_path, family, hidden_size=640), torch.bfloat16)
    before = {name: (p.dtype, p.clone()) for name, p in bench.block.named_parameters()}
    bench.inputs[:, 0, 3] = 1e5 * bench.inputs.abs().max()
    assert writers(bench) == WRITERS[family]
    for name, parameter in bench.block.named_parameters():
        dtype, values = before[name]
        assert parameter.dtype == dtype and torch.equal(parameter, values), name


def test_a_multiplier_behind_a_linear_is_noticed(tmp_path):
    folder = families.save_model(tmp_path, "granite", residual_multiplier=0.5)
    bench = blocks.load(folder)
    assert writers(bench) == []


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama", tokenizer=True, **SIZES)


def final_states(folder, tokens: Tensor) -> Tensor:
    skeleton = Skeleton(open_checkpoint(str(folder)), torch.float32, torch.device("cpu"))
    skeleton.load_rest()
    return walk.through(skeleton, [tokens])[0]


def test_a_job_ends_nearer_to_the_original(model, tmp_path):
    arguments = {"calibration": jobs.calibration(tmp_path, 16, 64), "dtype": "float32", "batch_size": 4}
    tokens = jobs.prepare("gptq", model, tmp_path / "x", TWO_BITS, **arguments).calibration.tokens
    wanted = final_states(model, tokens)
    errors = {}
    for name in ("own", "original"):
        jobs.quantize("gptq", model, tmp_path / name, {**TWO_BITS, "target": name}, **arguments)
        errors[name] = (final_states(tmp_path / name, tokens) - wanted).square().mean().item()
    assert errors["original"] < 0.9 * errors["own"]


def test_experts_that_are_streamed_and_those_in_memory_become_the_same(tmp_path, monkeypatch):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_local_experts": 4}
    folder = families.save_model(tmp_path / "mixtral", "mixtral", **sizes)
    families.save_tokenizer(folder)
    arguments = {"calibration": jobs.calibration(tmp_path), "batch_size": 2}
    files = []
    for name in ("streamed", "resident"):
        monkeypatch.setattr(expert_share, "streams", lambda nbytes, free, name=name: name == "streamed")
        made = tmp_path / name / "out"
        jobs.quantize("gptq", folder, made, TWO_BITS, **arguments)
        files.append(jobs.tensors(made))
    own = tmp_path / "own"
    jobs.quantize("gptq", folder, own, {**TWO_BITS, "target": "own"}, **arguments)
    for name, tensor in files[0].items():
        assert torch.equal(tensor, files[1][name]), name
    name = next(name for name in files[0] if "layers.1.self_attn.o_proj" in name and "weight" in name)
    assert not torch.equal(files[0][name], jobs.tensors(own)[name])


def test_an_unknown_target_is_refused(model, tmp_path):
    with pytest.raises(QuantkitError, match="--target none: no such target"):
        jobs.prepare("gptq", model, tmp_path / "out", {"target": "none"}, progress=Progress())
