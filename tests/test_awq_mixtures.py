"""AWQ in mixtures: the norm that a router, all experts and a shared one read, and what is inside experts."""

import blocks
import families
import jobs
import pytest
import torch
from nights import by_day, nightly
from test_experts_fused import MIXTURES
from torch.nn import functional
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from quantkit.grids.affine import AffineGrid
from quantkit.models.skeleton.experts import Experts
from quantkit.quantize.solvers import loss, rtn
from quantkit.quantize.transforms import awq, scaling
from quantkit.quantize.transforms.awq import AwqScaling
from quantkit.quantize.transforms.fold import Fold, find_folds, find_in_expert
from quantkit.quantize.transforms.probe import probing
from quantkit.quantize.transforms.scaling import UNFOLDED, Losses

NORM = "post_attention_layernorm"
SHARED = {  # beside the experts: linears, and the router where it is none
    "mixtral": {"mlp.gate.weight"},
    "qwen3_moe": {"mlp.gate.weight"},
    "qwen2_moe": {"mlp.gate.weight", "mlp.shared_expert_gate.weight"}
    | {f"mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up")},
    "deepseek_v3": {"mlp.gate.weight"}
    | {f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up")},
    "gpt_oss": {"mlp.router.weight"},  # with a bias
    "llama4": {"feed_forward.router.weight"}  # a linear, whose result scales what enters the experts
    | {f"feed_forward.shared_expert.{part}_proj.weight" for part in ("gate", "up")},
}


@pytest.fixture
def bench(tiny_model, monkeypatch):
    """A block of a mixture; `spread`: a few channels of what its experts read are large."""
    monkeypatch.setattr(families, "FAMILIES", families.FAMILIES | MIXTURES)

    def make(family: str, spread: bool = False, **arguments) -> blocks.Bench:
        folder = tiny_model(family, **arguments)
        made = blocks.load(folder, shape=(4, 24), index=0 if family == "llama4" else 1)
        if spread:
            made.block.get_submodule(NORM).weight.data[[3, 40]] = 12
        return made

    return make


def folds_of(bench: blocks.Bench) -> list[Fold]:
    with probing(bench.view()) as probe:
        return find_folds(probe)


ROUTERS = {name.removesuffix(".weight") for names in SHARED.values() for name in names if "proj" not in name}


def transform(bench: blocks.Bench, quantized=lambda name: name not in ROUTERS):
    """What AWQ makes of the block."""
    grid = AffineGrid(4, 32, search=False)
    view = bench.view(lambda name: grid if quantized(name) else None, bench.statistics())
    return view, AwqScaling(8).apply(view)


@pytest.mark.parametrize("family", SHARED)
def test_all_that_reads_the_norm_shares_its_fold(bench, family):
    made = bench(family)
    before = {name: part.clone() for name, part in made.block.named_parameters()}
    (fold,) = [fold for fold in folds_of(made) if fold.producer.name == NORM]
    experts = {
        f"{name}.weight"
        for site in made.sites
        for name in site.linears
        if str(site.pool).endswith("entering")
    }
    experts = {name for name in experts if not name.startswith("self_attention") and "output" not in name}
    assert set(fold.columns) == SHARED[family] | experts and len(experts) >= 4
    for name, part in made.block.named_parameters():
        assert torch.equal(part, before[name])
    assert not any("forward" in vars(module) for module in made.block.modules())


@pytest.mark.parametrize(
    "family, stored",
    by_day(
        [(family, "float32") for family in SHARED] + [("qwen2_moe", "bfloat16")],
        [("mixtral", "float32"), ("deepseek_v3", "float32"), ("qwen2_moe", "bfloat16")],
    ),
)
def test_the_block_computes_what_it_computed(bench, monkeypatch, family, stored):
    """Scaled whether it gains or not: by powers of two in bfloat16, which round nothing."""

    def choose(losses, magnitude, n_grid):
        scale = awq.candidate(magnitude, 0.6)
        return scale if stored == "float32" else torch.exp2(scale.log2().round())

    monkeypatch.setattr(Losses, "of", lambda self, scale, limit: 0.0)
    monkeypatch.setattr(awq, "search", choose)
    made = bench(family, spread=True, dtype=stored)
    for name, part in made.block.named_parameters():
        part.data *= stored == "float32" or not name.endswith("bias")  # divided, too, and rounded
    before = made.run()
    weights = {name: part.clone() for name, part in made.block.named_parameters()}
    view, transformed = transform(made)
    assert (made.run() - before).norm() <= 1e-5 * before.norm()
    moved = {name for name, part in made.block.named_parameters() if not torch.equal(part, weights[name])}
    assert SHARED[family] <= moved
    kept = {name for name in moved if not view.grids.get(name.removesuffix(".weight"))}
    assert kept - transformed.changed == set() and f"{NORM}.weight" in kept
    told = {name for name, facts in transformed.facts.items() if UNFOLDED in facts.get("notes", ())}
    down = {name for name in view.grids if ".down_proj" in name} if family == "gpt_oss" else set()  # up + 1
    assert told == down
    after = made.statistics()
    for site, now in transformed.statistics.items():
        whole = torch.linalg.matrix_norm(after[site].hessian)
        assert torch.linalg.matrix_norm(now.hessian - after[site].hessian) <= 1e-4 * whole, site


def test_experts_that_no_token_of_the_probe_reaches_are_proven_all_the_same(bench):
    """8 tokens, one expert each of 32: alone, gate_proj would look as if it could be scaled, too."""
    made = bench("llama4", num_local_experts=32)
    made.inputs = made.inputs[:1, :8]
    with probing(made.view()) as probe:
        entering = probe.run().inputs
    view = made.view(lambda name: AffineGrid(4, 32), made.statistics())
    known, expert = {}, "feed_forward.experts.{}.{}"
    found = [fold for each in view.experts(entering, ()) for fold in find_in_expert(each, known)]
    assert [fold.producer.name for fold in found] == [expert.format(e, "up_proj") for e in range(32)]
    assert [fold.columns for fold in found] == [(expert.format(e, "down_proj.weight"),) for e in range(32)]


@pytest.mark.parametrize("family", ["mixtral", *nightly("qwen2_moe", "qwen3_moe", "deepseek_v3")])
@pytest.mark.parametrize("searched", [4096, 40])
def test_experts_lose_less_with_the_norm_folded(bench, monkeypatch, family, searched):
    """Σ tokens · tr(dW H dWᵀ) over experts with their own H, of every reader of the norm."""
    monkeypatch.setattr(scaling, "SEARCHED", searched)
    made = bench(family, spread=True)
    (fold,) = [fold for fold in folds_of(made) if fold.producer.name == NORM]
    gathered, grid = made.statistics(), AffineGrid(4, 32, search=False)
    weights = {name: part.clone() for name, part in made.block.named_parameters()}
    transform(made, lambda name: f"{name}.weight" in fold.columns and name not in ROUTERS)
    scale = weights[f"{NORM}.weight"] / made.block.get_parameter(f"{NORM}.weight")
    assert (scale[[3, 40]] > 1.2).all() and scale.median() < 1
    plain = scaled = 0.0
    for site in fold.sites:
        for name in site.linears:
            now, own = made.block.get_submodule(name).weight, weights[f"{name}.weight"]
            torch.testing.assert_close(now, own * scale)
            tokens, hessian = gathered[site].tokens, gathered[site].hessian
            scaled += tokens * loss(rtn.quantize(now, grid).values() / scale - own, hessian)
            plain += tokens * loss(rtn.quantize(own, grid).values() - own, hessian)
    assert 0 < scaled < 0.8 * plain


def test_a_search_looks_at_an_even_sample_of_rows(bench, monkeypatch):
    made = bench("mixtral")
    (fold,) = [fold for fold in folds_of(made) if fold.producer.name == NORM]
    view = made.view(lambda name: AffineGrid(4, 32), made.statistics())
    sites, entering = list(fold.sites), {site: view.statistics[site] for site in map(view.shared, fold.sites)}
    (whole,) = scaling._sampled(view, sites, entering, plain=True)
    monkeypatch.setattr(scaling, "SEARCHED", 256)
    (part,) = scaling._sampled(view, sites, entering, plain=True)
    assert len(whole.weight) == 4 * 2 * 128 and torch.equal(part.weight, whole.weight[::4])
    tokens = [view.statistics[site].tokens for site in sites]
    assert whole.share.view(4, -1)[:, 0].tolist() == pytest.approx([count / 96 for count in tokens])
    assert sum(tokens) == 2 * 96


def test_a_router_that_cannot_make_up_for_scales_leaves_the_norm_alone(bench, monkeypatch):
    """It sees the direction of the hidden states alone, which scales bend."""
    original = MixtralTopKRouter.forward
    monkeypatch.setattr(
        MixtralTopKRouter,
        "forward",
        lambda self, hidden: original(self, functional.normalize(hidden, dim=-1)),
    )
    made = bench("mixtral", spread=True)
    assert NORM not in {fold.producer.name for fold in folds_of(made)}
    before = {name: made.block.get_parameter(name).clone() for name in ("mlp.gate.weight", f"{NORM}.weight")}
    view, transformed = transform(made)
    told = {name for name, facts in transformed.facts.items() if UNFOLDED in facts.get("notes", ())}
    assert told == {f"mlp.experts.{e}.{part}" for e in range(4) for part in ("w1", "w3")}
    assert all(torch.equal(made.block.get_parameter(name), part) for name, part in before.items())


def test_a_router_that_only_ranks_is_still_scaled(bench, monkeypatch):
    """With one expert a token, weighted 1, logits that are off by a little would route 8 tokens as before."""
    made = bench("mixtral", num_experts_per_tok=1)
    (fold,) = [fold for fold in folds_of(made) if fold.producer.name == NORM]
    assert "mlp.gate.weight" in fold.columns


def test_an_expert_alone_is_what_it_is_in_its_layer(bench):
    made = bench("mixtral")
    (layer,) = [module for module in made.block.modules() if isinstance(module, Experts)]
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    everyone = torch.full((5, 1), 2), torch.ones(5, 1)
    torch.testing.assert_close(layer.alone(2, hidden), layer(hidden, *everyone))


@pytest.mark.parametrize("kind", ["qwen2_moe", *nightly("mixtral", "deepseek_v3")])
def test_routers_are_written_as_they_were_stored(tiny_model, tmp_path, kind):
    """The columns of a router are multiplied by what its norm is divided by, under the source's names, and it
    is reported as kept; the job verifies that what it wrote computes what it saw."""
    folder = tiny_model(kind, tokenizer=True, dtype="bfloat16", num_hidden_layers=2)

    def spread(name: str, tensor: torch.Tensor) -> None:
        if name.endswith(f"{NORM}.weight"):
            tensor[[3, 40]] = 15

    jobs.rewrite(folder, spread)
    text, output = jobs.calibration(tmp_path), tmp_path / "out"
    summary = jobs.quantize(
        "awq", folder, output, {"group_size": 32, "candidates": 8}, calibration=text, dtype="float32"
    )
    source, written = jobs.tensors(folder), jobs.tensors(output)
    routers = [name for name in source if name.endswith((".gate.weight", ".shared_expert_gate.weight"))]
    assert len(routers) == {"mixtral": 2, "qwen2_moe": 4, "deepseek_v3": 1}[kind]
    for name in routers:
        norm = f"{'.'.join(name.split('.')[:3])}.{NORM}.weight"
        assert written[name].dtype == written[norm].dtype == torch.bfloat16
        scale = source[norm].double() / written[norm].double()
        assert scale.max() > 1.5
        torch.testing.assert_close(written[name].double(), source[name].double() * scale, rtol=2**-8, atol=0)
    kept = {row["name"] for row in summary.kept_parameters}
    assert {name for name in routers if ".gate." in name} == kept
    rows = jobs.manifest(output)
    assert all("kept" in rows[name.removesuffix(".weight")] for name in routers if "shared" in name)
    assert not any(UNFOLDED in row.get("notes", ()) for row in rows.values())
    assert summary.error < 0.8 * summary.rtn_error
