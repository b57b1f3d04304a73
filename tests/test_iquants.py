"""i-quants and ternary types: bytes against ggml's own encoder, vectors against every one there is, error
feedback against the sweep written out."""

import hashlib
import json
from pathlib import Path

import ggml_library
import pytest
import torch
from nights import by_day
from reference_gptq import vector_sweep
from test_ggml import WIDTH, importances, weights

from quantkit.grids.ggml import iquants, named
from quantkit.grids.grid import QuantizedWeight
from quantkit.layouts.ggml.blocks import encode_rows
from quantkit.quantize.solvers import loss
from quantkit.quantize.solvers.gptq import GptqSolver, sweep
from quantkit.quantize.solvers.hessian import factorize, unit_upper

BOOKS = tuple(iquants.GRIDS)
TYPES = (*BOOKS, "TQ1_0", "TQ2_0")
NEEDY = ("IQ2_XXS", "IQ2_XS")  # without importance ggml's encoder ends the process
LIVE = ("IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0")  # ggml takes seconds to make the other types' tables
needs_ggml = pytest.mark.skipif(ggml_library.library() is None, reason="xllamacpp is not installed")
DIGESTS = Path(__file__).parent / "data" / "ggml_digests.json"


def rows() -> torch.Tensor:
    """Weights `[rows, 512]`, the same on every machine: sums of integers, in the units of powers of two."""
    generator = torch.Generator().manual_seed(9)
    normal = torch.randint(-4096, 4097, (12, 32, WIDTH), generator=generator).sum(0) * 2.0**-19
    normal[8:16] *= 2.0 ** torch.randint(-6, 7, (8, WIDTH), generator=generator)
    normal[16:20] *= torch.randint(0, 2, (4, WIDTH), generator=generator)
    normal[20:24] *= 2.0 ** torch.randint(-40, 1, (4, WIDTH // 16), generator=generator).repeat_interleave(
        16, 1
    )
    normal[24, :256], normal[25, 32:64], normal[26, 3::5] = 0, 0, -0.0
    normal[28], normal[29], normal[30] = 0.25, -0.25, 0
    normal[31] *= 2.0**-45
    return normal


def costs(kind: str) -> torch.Tensor | None:
    """What columns count, `[512]`."""
    generator = torch.Generator().manual_seed(10)
    wide = 2.0 ** torch.randint(-10, 11, (WIDTH,), generator=generator)
    kinds = {"none": None, "wide": wide, "zeros": wide * torch.randint(0, 2, (WIDTH,), generator=generator)}
    return kinds[kind] if kind != "all zero" else torch.zeros(WIDTH)


def digest(encoded: torch.Tensor) -> str:
    return hashlib.sha256(encoded.numpy().tobytes()).hexdigest()[:16]


CASES = [
    (name, kind)
    for name in TYPES
    for kind in ("none", "wide", "zeros", "all zero")
    if kind != "none" or name not in NEEDY
]


@pytest.mark.parametrize(("name", "kind"), by_day(CASES, [case for case in CASES if case[1] == "wide"]))
def test_bytes_equal_those_of_ggmls_encoder(name, kind):
    """As scripts/ggml.py digests found them, which asks ggml itself."""
    weight = whole_sub_blocks(rows()) if name == "IQ3_S" else rows()
    assert digest(encode_rows(name, weight, costs(kind))) == json.loads(DIGESTS.read_text())[f"{name} {kind}"]


def whole_sub_blocks(weight: torch.Tensor) -> torch.Tensor:
    """Rows without a sub-block of zeros, behind which ggml's IQ3_S puts what follows in wrong places."""
    return weight[(weight.view(len(weight), -1, 32).abs().amax(2) > 0).all(1)]


@needs_ggml
@pytest.mark.parametrize("name", LIVE)
@pytest.mark.parametrize("kind", by_day(importances(), ["none", "zeros"]))
def test_bytes_equal_ggmls_encoder_on_every_kind_of_row(name, kind):
    weight, importance = weights(), importances()[kind]
    weight = whole_sub_blocks(weight) if name == "IQ3_S" else weight
    wanted = ggml_library.encode(name, weight, importance)
    assert (encode_rows(name, weight, importance) != wanted).any(1).nonzero()[:, 0].tolist() == []


def test_zeros_leave_what_follows_in_its_place():
    weight = torch.randn(2, 256, generator=torch.Generator().manual_seed(1))
    weight[:, 32:64] = 0
    codes, params = named("IQ3_S").quantize(weight)
    values = QuantizedWeight(named("IQ3_S"), codes, params).values()
    missed = (values - weight).square().view(2, 8, 32).sum(2) / weight.square().sum(1, keepdim=True)
    assert missed.max() < 0.01


@pytest.mark.parametrize("name", ("IQ2_XXS", "IQ3_S"))
def test_neighbours_are_those_at_the_smallest_distances(name):
    grid = named(name)
    book = grid.book()
    starts, counts, ids = book.neighbours
    for number in range(0, len(book.found), 997):
        point = torch.tensor([number // book.base**k % book.base for k in range(book.size)])
        distance = (book.digits - point[:, None]).square().sum(0)
        reach = distance.unique()[grid.distances - 1]
        wanted = sorted((int(d), k) for k, d in enumerate(distance) if d <= reach)
        start, count = starts[number], counts[number]
        assert ids[start : start + count].tolist() == [k for _, k in wanted]
    assert torch.equal(book.found[book.number(book.digits)], torch.arange(book.digits.shape[1]))


def metric(seed: int) -> torch.Tensor:
    """Of eight columns that depend on each other."""
    mix = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
    return mix @ mix.T + 0.1 * torch.eye(8)


def every_vector(grid) -> torch.Tensor:
    """Levels `[vectors, 8]` of all that can be stored for eight weights (of IQ2_XXS 32,768)."""
    magnitudes = (grid.book().magnitudes * grid.unit)[grid.book().digits].t()
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    signs = 1.0 - 2 * bits[bits.sum(1) % 2 == 0]
    return (magnitudes[:, None] * signs).flatten(0, 1)


def test_the_search_comes_near_the_best_of_all_vectors():
    grid, M = named("IQ2_XXS"), metric(2)
    y = torch.randn(8, 64, generator=torch.Generator().manual_seed(3)) * 6
    every = every_vector(grid)
    search = grid.search_in(M)
    found = search.nearest(y)
    least = ((every @ M) * every).sum(1, keepdim=True) - 2 * every @ M @ y
    best = least.amin(0) + ((y.t() @ M) * y.t()).sum(1)
    cost = search.cost(y - found)
    assert torch.all(cost >= best * 0.999) and cost.sum() < 1.25 * best.sum()
    naive = grid.search_in(torch.eye(8)).nearest(y)
    assert cost.sum() < 0.8 * search.cost(y - naive).sum()


@pytest.mark.parametrize("name", BOOKS)
def test_what_is_found_can_be_stored(name):
    grid = named(name)
    y = torch.randn(8, 300, generator=torch.Generator().manual_seed(4)) * 5 * grid.unit / 0.25
    levels = grid.search_in(metric(5)).nearest(y)
    codes = torch.empty(levels.shape, dtype=torch.uint8)
    grid.codes(levels, codes)
    assert torch.equal(grid.levels(codes), levels)
    places = grid.book().found[
        grid.book().number((codes >> 1).long().view(-1, grid.book().size, 300).transpose(0, 1))
    ]
    assert (places >= 0).all()
    if grid.even:
        assert ((codes & 1).sum(0) % 2 == 0).all()
    assert grid.search_in(metric(5)).nearest(y, levels).equal(levels)


def problem(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and the Hessian of correlated inputs."""
    generator = torch.Generator().manual_seed(6)
    mix = torch.randn(width, width, generator=generator) / width**0.5
    x = torch.randn(4 * width, width, generator=generator) @ (mix + 0.3 * torch.eye(width))
    return torch.randn(rows, width, generator=generator) * 0.02, 2 * x.t() @ x / len(x)


@pytest.mark.parametrize("name", by_day(BOOKS, ["IQ2_XXS", "IQ3_S"]))
def test_the_sweep_is_the_one_written_out(name):
    grid, (weight, H) = named(name), problem(3, 512)
    A, *_ = factorize(H, 0.01, torch.arange(512))
    chosen = sweep(weight.t().contiguous(), *unit_upper(A), grid)
    damped = H + 0.01 * H.diagonal().mean() * torch.eye(len(H))
    steps = torch.cat([grid.steps(params)[0] for params in chosen.params]).repeat_interleave(grid.sub_size, 0)
    wanted = vector_sweep(weight, damped, steps.t(), lambda metric, y: grid.search_in(metric).nearest(y))
    values = grid.levels(chosen.codes) * steps
    torch.testing.assert_close(chosen.E, weight.t() - values, rtol=0, atol=1e-6)
    differing = ((values.t() - wanted).abs() > 1e-5).float().mean()
    assert differing < 0.02  # a tie in float32 falls another way in float64, and is then fed back
    assert loss(values.t() - weight, damped) == pytest.approx(chosen.lost.sum().item(), rel=1e-3)


@pytest.mark.parametrize("name", by_day(BOOKS, ["IQ2_S"]))
def test_error_feedback_loses_less_than_ggmls_encoder(name):
    grid, (weight, H) = named(name), problem(32, 512)
    codes, params = grid.quantize(weight, H.diagonal().contiguous())
    theirs = loss(QuantizedWeight(grid, codes, params).values() - weight, H)
    swept = GptqSolver(act_order="none", refine=0).quantize([weight], grid, H.clone())
    refined = GptqSolver(act_order="none", refine=2).quantize([weight], grid, H.clone())
    ours = [loss(each.weights[0].values() - weight, H) for each in (swept, refined)]
    assert ours[0] < 0.75 * theirs and ours[1] < 0.95 * ours[0]
    lost, damping = refined.lost[:, 0].sum(1).tolist()
    assert lost - damping == pytest.approx(ours[1], rel=1e-3)
