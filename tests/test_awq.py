"""AWQ against the paper's idea by hand, and against searches that go through the tokens one by one."""

from types import SimpleNamespace

import blocks
import pytest
import torch
from nights import by_day
from sums import assert_sums

from quantkit.grids.affine import AffineGrid
from quantkit.layouts import Statistic
from quantkit.quantize import solvers
from quantkit.quantize.calibrate.capture import SiteSums
from quantkit.quantize.calibrate.sites import Site
from quantkit.quantize.solvers import loss, row_losses, rtn
from quantkit.quantize.solvers.gptq import GptqSolver
from quantkit.quantize.solvers.rtn import SHRINKS, RtnSolver, clipped_ranges
from quantkit.quantize.transforms import awq, scaling
from quantkit.quantize.transforms.awq import AwqScaling, search
from quantkit.quantize.transforms.scaling import Losses, Reader

CPU = torch.device("cpu")


# ---- the paper's idea


def test_on_the_affine_grid_too():
    """Its steps are 2 / 15 of the largest: 1.4 and 1.8 are 2.6 and 3.4 steps, doubled 5.25 and 6.75."""
    weight, salient = [-4.0, 1.4, 1.8, 0.6, -2.4], (1, 2)

    def error(scale: float) -> torch.Tensor:
        factors = torch.tensor([1, scale, scale, 1, 1])
        values = rtn.quantize(torch.tensor([weight]) * factors, AffineGrid(4, 5, search=False)).values()
        return (values / factors - torch.tensor([weight])).abs()[0]

    for k in salient:
        assert error(2)[k] < 0.4 * error(1)[k]
    others = [0, 3, 4]
    assert torch.equal(error(2)[others], error(1)[others])  # their codes stay as they were
    assert error(6)[others].sum() > 2 * error(1)[others].sum()


# ---- the searches


def inputs(in_features: int, tokens: int, seed: int) -> torch.Tensor:
    """Correlated, with channels of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, in_features, generator=generator)
    x = x @ (torch.eye(in_features) + torch.randn(in_features, in_features, generator=generator) / 8)
    return x * torch.exp(1.2 * torch.randn(in_features, generator=generator))


def statistics(x: torch.Tensor):
    sums = SiteSums(x.shape[1], CPU, (Statistic.HESSIAN, Statistic.MAGNITUDE))
    for part in x.split(7):
        sums.add(part)
    return sums.finish()


def weight_of(out_features: int, in_features: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(out_features, in_features, generator=generator) / 10


def rounded(group: torch.Tensor, symmetric: bool, bound: float = torch.inf) -> torch.Tensor:
    """One row's group to nearest in 4 bit, covering its range, or what of it lies within `bound`."""
    low, high = (min(bound, max(0.0, (sign * group).max().item())) for sign in (-1, 1))
    low = -low
    step = max(-low, high) * 2 / 15 if symmetric else (high - low) / 15
    zero = 8 if symmetric else min(15, max(0, round(-low / step)))
    step = torch.tensor(step).half().float()
    return ((group / step).round() + zero).clamp(0, 15).sub(zero) * step


def rounded_matrix(weight: torch.Tensor, group_size: int, symmetric: bool) -> torch.Tensor:
    rows = [[rounded(group, symmetric) for group in row.split(group_size)] for row in weight]
    return torch.stack([torch.cat(row) for row in rows])


def token_by_token(x: torch.Tensor, delta: torch.Tensor) -> float:
    """`Σ |dW x|²` over the tokens."""
    return sum((delta.double() @ token.double()).square().sum().item() for token in x)


@pytest.mark.parametrize("symmetric", (True, False))
@pytest.mark.parametrize("seed", range(4))
def test_the_search_finds_what_a_search_through_the_tokens_finds(monkeypatch, symmetric, seed):
    monkeypatch.setattr("quantkit.grids.parallel.CACHEFUL", 4 * 32)
    monkeypatch.setattr(scaling, "SCALED_ROWS", 4)  # so that candidates are given up on the way
    x = inputs(32, 40, seed)
    weights = [weight_of(12, 32, seed), weight_of(6, 32, seed + 50)]
    grids, gathered, n_grid = [AffineGrid(4, 16, symmetric, search=False)] * 2, statistics(x), 8
    parts = zip(weights, grids, strict=True)
    site = Losses([Reader(w, grid, gathered.hessian, torch.ones(len(w))) for w, grid in parts])

    losses = {}
    for k in range(n_grid):
        scale = x.abs().mean(0) ** (k / (n_grid - 1))
        scale = scale / (scale.max() * scale.min()).sqrt()
        total = 0.0
        for weight in weights:
            total += token_by_token(x, rounded_matrix(weight * scale, 16, symmetric) / scale - weight)
        losses[k] = total, scale
        ours = site.of(scale)
        assert ours * len(x) / 2 == pytest.approx(total, rel=1e-4)
        assert ours / 2 < site.of(scale, limit=ours / 2) <= ours == site.of(scale, ours)

    best = min(losses, key=lambda k: losses[k][0])
    found = search(site, gathered[Statistic.MAGNITUDE], n_grid)
    assert float(sum(site.plain)) * len(x) / 2 == pytest.approx(losses[0][0], rel=1e-4)
    assert best > 0 and losses[best][0] < 0.97 * losses[0][0]  # the test's own: there is something to find
    torch.testing.assert_close(found, losses[best][1], rtol=1e-5, atol=0)
    assert (found.max() * found.min()).item() == pytest.approx(1, rel=1e-5)


def test_nothing_is_scaled_where_nothing_is_gained():
    """Whole numbers from -7 to 8 in every group: exact as they are."""
    weight = torch.tensor([[-7.0, 8, 1, -3, 0, 5, 2, 4] * 2] * 3)
    gathered, grid = statistics(inputs(16, 20, 0)), AffineGrid(4, 8, symmetric=False, search=False)
    losses = Losses([Reader(weight, grid, gathered.hessian, torch.ones(len(weight)))])
    assert search(losses, gathered[Statistic.MAGNITUDE], 20) is None
    dead = torch.zeros(16)  # channels without any input are not scaled to nothing
    assert awq.candidate(dead, 0.5).isfinite().all()


@pytest.mark.parametrize("symmetric", (True, False))
@pytest.mark.parametrize("seed", range(2))
def test_ranges_are_cut_as_by_a_search_through_the_tokens(symmetric, seed):
    x, weight, size = inputs(48, 40, seed), weight_of(6, 48, seed), 16
    weight[:, ::11] *= 3
    if not symmetric:
        weight.clamp_(
            min=-0.03
        )  # cut off on both sides, the zero point would be 7.5: either neighbour is right
    params = clipped_ranges(weight, AffineGrid(4, size, symmetric, search=False), statistics(x).hessian)
    values = rtn.nearest(weight, AffineGrid(4, size, symmetric, search=False), params).values()
    cut = 0
    for row in range(6):
        for g in range(3):
            span = slice(g * size, (g + 1) * size)
            group, found = weight[row, span], None
            for shrink in SHRINKS:
                bound = group.abs().max().item() * shrink
                candidate = rounded(group, symmetric, bound)
                cost = token_by_token(x[:, span], (candidate - group)[None])
                if found is None or cost < found[0]:
                    found = cost, candidate, shrink
            torch.testing.assert_close(values[row, span], found[1], rtol=1e-5, atol=1e-7)
            cut += found[2] < 1
    assert 3 < cut < 18 and SHRINKS == pytest.approx([1 - 0.05 * k for k in range(10)])


def test_losses_are_sums_over_tokens_however_wide_the_matrix():
    """600 columns: full blocks of columns and a part, each with what is left of it."""
    x, delta = inputs(600, 30, 0), weight_of(5, 600, 0)
    hessian = statistics(x).hessian
    literal = [token_by_token(x, row[None]) * 2 / len(x) for row in delta]
    assert row_losses(delta, hessian).tolist() == pytest.approx(literal, rel=1e-4)
    assert loss(delta, hessian) == pytest.approx(sum(literal), rel=1e-4)


@pytest.mark.parametrize("rows, step", ((8, 1), (9, 2), (16, 2), (17, 3)))
def test_errors_are_those_of_an_even_sample_of_rows(monkeypatch, rows, step):
    """By round to nearest and by error feedback, through the tokens one by one."""
    monkeypatch.setattr(solvers, "MEASURED_ROWS", 8)
    x, weight, grid = inputs(32, 50, 3), weight_of(rows, 32, 3), AffineGrid(4, 16, search=False)
    whole = token_by_token(x, weight[::step])
    nearest = token_by_token(x, (rtn.quantize(weight, grid).values() - weight)[::step]) / whole
    for solver in (RtnSolver(weighted=True), GptqSolver()):
        (solved,) = solver.solve([weight], [grid], statistics(x).hessian)
        error = token_by_token(x, (solved.weight.values() - weight)[::step]) / whole
        assert solved.error == pytest.approx(error, rel=1e-3)
        assert solved.rtn_error == pytest.approx(nearest, rel=1e-3)
    assert solved.error < 0.8 * nearest


def test_scales_are_searched_on_the_same_sample(monkeypatch):
    """Each row stands for as many as the sample leaves out, so a linear of many rows counts as much."""
    monkeypatch.setattr(solvers, "MEASURED_ROWS", 8)
    x, site = inputs(32, 50, 3), Site(("q", "k"))
    block = torch.nn.ModuleDict({name: torch.nn.Linear(32, rows) for name, rows in (("q", 20), ("k", 6))})
    grids = dict.fromkeys(block, AffineGrid(4, 16, search=False, clip=True))
    view = SimpleNamespace(statistics={site: statistics(x)}, block=block, grids=grids)
    readers = scaling._readers(view, site)
    scale = awq.candidate(x.abs().mean(0), 0.5)
    expected = 0.0
    for name, step, stands_for in (("q", 3, 20 / 7), ("k", 1, 1)):
        weight = block[name].weight.detach()[::step]
        delta = rounded_matrix(weight * scale, 16, True) / scale - weight
        expected += stands_for * token_by_token(x, delta)
    assert Losses(readers).of(scale) * len(x) / 2 == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("symmetric", (True, False))
def test_clipping_is_kept_only_where_the_outputs_gain(symmetric):
    x = inputs(64, 50, 3)
    hessian = statistics(x).hessian
    weight = weight_of(10, 64, 3)
    clip, plain = (AffineGrid(4, 32, symmetric, search=False, clip=flag) for flag in (True, False))
    (with_clip,), (without,) = (RtnSolver(weighted=True).solve([weight], [g], hessian) for g in (clip, plain))
    relative = token_by_token(x, with_clip.weight.values() - weight) / token_by_token(x, weight)
    assert with_clip.error == pytest.approx(relative, rel=1e-4)
    assert_sums(with_clip.rtn_error, without.error)
    assert with_clip.error <= without.error
    assert torch.equal(without.weight.values(), rtn.quantize(weight, plain).values())


# ---- blocks


FAMILIES = ("llama", "gemma2", "opt", "phi3", "gpt2", "gpt_neox", "falcon", "cohere", "olmo2")


def with_outliers(bench: blocks.Bench) -> blocks.Bench:
    """A few channels of what enters the sites are large, as in real models."""
    for name, parameter in bench.block.named_parameters():
        if (
            parameter.ndim == 1
            and name.endswith(("layernorm.weight", "layer_norm.weight"))
            or name in ("ln_1.weight", "ln_2.weight")
        ):
            parameter.data[[3, 40]] = 12
        if parameter.ndim == 2 and any(part in name for part in ("v_proj", "up_proj", "fc1")):
            parameter.data[::9] *= 8
    return bench


@pytest.mark.parametrize("family", by_day(FAMILIES, ["llama", "gemma3", "gpt2"]))
def test_no_site_ends_up_worse_than_rounded_to_nearest(tiny_model, family):
    """Site by site, the others left alone: their errors are measured with their own inputs."""
    folder = tiny_model(family)
    gained = {}
    for k in range(len(blocks.load(folder).sites)):
        bench = with_outliers(blocks.load(folder, shape=(4, 24)))
        site = bench.sites[k]
        gathered = {site: bench.statistics()[site]}
        weights = [bench.block.get_submodule(name).weight for name in site.linears]
        originals = [weight.clone() for weight in weights]
        full = [loss(weight, gathered[site].hessian) for weight in weights]
        plain = [
            rtn.quantize(weight, AffineGrid(4, 32, search=False)).values() - weight for weight in weights
        ]
        before = [loss(delta, gathered[site].hessian) for delta in plain]

        view = bench.view(lambda name: AffineGrid(4, 32, search=False, clip=True), gathered)
        transformed = AwqScaling(10).apply(view)
        weights = [bench.block.get_submodule(name).weight for name in site.linears]
        grids = [view.grids[name] for name in site.linears]
        solved = RtnSolver(weighted=True).solve(weights, grids, transformed.statistics[site].hessian)
        known = [transformed.facts[name] for name in site.linears]
        rtn_errors = [loss / whole for loss, whole in zip(before, full, strict=True)]
        assert [facts["rtn_error"] for facts in known] == pytest.approx(rtn_errors, rel=1e-3)
        after = sum(one.error * whole for one, whole in zip(solved, full, strict=True))
        assert after <= sum(before) * (1 + 1e-5), site
        told = any("nothing to fold" in note for facts in known for note in facts.get("notes", ()))
        if any(not torch.equal(a, b) for a, b in zip(originals, weights, strict=True)):
            assert not told
            gained[site] = after / sum(before)
    assert min(gained.values()) < 0.9


@pytest.mark.parametrize("stored", ("float32", "bfloat16"))
@pytest.mark.parametrize(
    "family, excluded",
    by_day(
        [(family, None) for family in FAMILIES]
        + [("llama", "k_proj"), ("llama", "v_proj"), ("gemma2", "k_proj")],
        [("llama", None), ("phi3", None), ("gpt2", None), ("llama", "v_proj"), ("gemma2", "k_proj")],
    ),
)
def test_the_block_computes_what_it_computed(tiny_model, monkeypatch, family, stored, excluded):
    """Every site that can be scaled is, whether it gains or not. Norms stored in bfloat16 are rounded
    first and the columns take what that leaves; only the weights of excluded linears lose anything."""
    scaled = []

    def choose(losses, magnitude, n_grid):
        scaled.append(awq.candidate(magnitude, 0.6))
        return scaled[-1]

    monkeypatch.setattr(Losses, "of", lambda self, scale, limit: 0.0)
    monkeypatch.setattr(awq, "search", choose)
    bench = blocks.load(tiny_model(family, dtype=stored), shape=(2, 16))
    if stored == "bfloat16":  # biases are divided, too, and rounded: nothing can make up for that
        for name, parameter in bench.block.named_parameters():
            parameter.data *= not name.endswith("bias")
    before, gathered = bench.run(), bench.statistics()
    weights = {name: part.clone() for name, part in bench.block.named_parameters()}
    grids = lambda name: None if excluded and excluded in name else AffineGrid(4, 16)  # noqa: E731
    transformed = AwqScaling().apply(bench.view(grids, gathered))

    difference = (bench.run() - before).norm() / before.norm()
    lossy = excluded and stored == "bfloat16"
    assert difference < (5e-3 if lossy else 1e-5)
    moved = {n for n, part in bench.block.named_parameters() if not torch.equal(part, weights[n])}
    assert len(scaled) >= 2 and len(moved) >= 4
    kept = {name for name in moved if not bench.view(grids).grids.get(name.removesuffix(".weight"))}
    zeros = {name for name in transformed.changed if not bench.block.get_parameter(name).any()}
    assert transformed.changed - zeros == kept
    if excluded:
        assert f"self_attn.{excluded}.weight" in kept
    for name in kept:
        part = bench.block.get_parameter(name)
        assert torch.equal(part, part.to(getattr(torch, stored)).float()), name

    after = bench.statistics()
    for site, now in transformed.statistics.items():
        ratio = torch.linalg.matrix_norm(now.hessian - after[site].hessian)
        assert ratio < (1e-2 if lossy else 1e-4) * torch.linalg.matrix_norm(after[site].hessian), site
