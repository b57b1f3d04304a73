"""Mixtures of experts: linears out of fused parameters, and statistics of experts that see few tokens."""

import json

import families
import jobs
import pytest
import torch
from nights import by_day, nightly
from safetensors.torch import load_file

from quantkit.layouts import Statistic
from quantkit.models.files.open import open_checkpoint
from quantkit.models.skeleton import Skeleton, linears
from quantkit.quantize.calibrate import capture
from quantkit.quantize.calibrate.capture import SiteSums
from quantkit.quantize.calibrate.sites import Site, find_sites
from quantkit.quantize.calibrate.statistics import SiteStatistics, borrowed

MIXTURES = ("mixtral", "qwen3_moe")
WIDE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
IDS = torch.arange(24).view(2, 12) * 5 % 90 + 4


def save(folder, family: str):
    inner = {"moe_intermediate_size": 64} if family == "qwen3_moe" else {}
    place = families.save_model(folder / family, family, **WIDE, **inner)
    families.save_tokenizer(place)
    return place


@pytest.fixture
def mixture(tmp_path):
    return lambda family="mixtral": save(tmp_path, family)


def skeleton_of(folder) -> Skeleton:
    skeleton = Skeleton(open_checkpoint(str(folder)), torch.float32, torch.device("cpu"))
    skeleton.names.check_complete()
    skeleton.load_rest()
    return skeleton


def test_every_expert_is_linears_with_the_checkpoints_names(mixture):
    rows = linears.linears(skeleton_of(mixture("mixtral")))
    names = {row.name for row in rows if ".0.block_sparse_moe." in row.name}
    assert names == {
        f"model.layers.0.block_sparse_moe.experts.{e}.{part}" for e in range(4) for part in ("w1", "w2", "w3")
    }
    assert not [row for row in rows if "gate.weight" in row.name]


def loaded(folder):
    skeleton = skeleton_of(folder)
    block = skeleton.load_block(0)
    hidden = skeleton.embed(IDS)
    sites = find_sites(block, lambda: skeleton.run_block(0, hidden[:1, :2]))
    return skeleton, block, hidden, sites


def test_sites_of_experts_without_tokens_stay_apart(mixture):
    """Two probe tokens reach two to four of the experts; gate and up are a site, down another, and both kinds
    stand behind the module that sees the inputs of all."""
    _, _, _, sites = loaded(mixture("mixtral"))
    place = "mlp.experts"
    inside = [site for site in sites if site.pool]
    assert inside[0] == Site((), f"{place}.entering")
    assert [site.linears for site in inside[1:5]] == [
        (f"{place}.{e}.w1", f"{place}.{e}.w3") for e in range(4)
    ]
    assert inside[5] == Site((), f"{place}.between")
    assert [site.linears for site in inside[6:]] == [(f"{place}.{e}.w2",) for e in range(4)]
    assert {site.pool for site in inside[6:]} == {f"{place}.between"}


def test_the_layers_statistics_are_those_of_all_experts_together(mixture):
    """Σ n_e H_e = n H of what passes `between`; for `entering`, which sees each token once, twice as much:
    two experts are chosen for each token."""
    skeleton, block, hidden, sites = loaded(mixture("mixtral"))
    sums = {site: SiteSums(site.in_features, skeleton.device) for site in sites}
    capture.gather(block, sums, lambda: skeleton.run_block(0, hidden))
    found = {site: part.finish() for site, part in sums.items()}
    for pool, times in (("entering", 2), ("between", 1)):
        name = f"mlp.experts.{pool}"
        layer = found[Site((), name)]
        own = [statistics for site, statistics in found.items() if site.pool == name and site.linears]
        assert sum(part.tokens for part in own) == times * layer.tokens == (48 if times == 1 else 2 * 24)
        together = sum(part.tokens * part.hessian for part in own) / sum(part.tokens for part in own)
        torch.testing.assert_close(together, layer.hessian, rtol=1e-4, atol=1e-6)


SUMMED = Statistic.HESSIAN, Statistic.MAGNITUDE, Statistic.PEAK, Statistic.SQUARE


def statistics(tokens: int, seed: int, width: int = 8) -> SiteStatistics:
    sums = SiteSums(width, torch.device("cpu"), SUMMED)
    sums.add(torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)))
    return sums.finish()


def test_shrinkage_is_the_posterior_mean():
    own, layer = statistics(24, 1), statistics(500, 2)
    wanted = (24 * own.hessian + 8 * layer.hessian) / (24 + 8)
    peak = own[Statistic.PEAK].clone()
    mixed = own.mixed(layer, "shrink")
    torch.testing.assert_close(mixed.hessian, wanted)
    assert torch.equal(mixed[Statistic.PEAK], peak) and mixed.tokens == 24


@pytest.mark.parametrize(("choice", "tokens", "share"), [
    ("shrink", 0, 1.0), ("shrink", 8, 0.5), ("shrink", 72, 0.1),
    ("routed", 3, 0.0), ("routed", 0, 1.0), ("all", 72, 1.0),
])  # fmt: skip
def test_how_much_an_expert_borrows(choice, tokens, share):
    assert borrowed(tokens, 8, choice) == pytest.approx(share)


def test_an_expert_that_nobody_reached_has_the_layers_statistics():
    own, layer = statistics(0, 1), statistics(500, 2)
    found = own.mixed(layer, "routed")
    assert all(torch.equal(found[statistic], layer[statistic]) for statistic in SUMMED)
    assert found.hessian.data_ptr() != layer.hessian.data_ptr()  # solvers use theirs up


@pytest.mark.parametrize("family", by_day(MIXTURES, ["mixtral"]))
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("gptq", jobs.GPTQ),
        *nightly(("gptq", jobs.GPTQ | {"layout": "compressed-tensors"}), ("nf4", {}), ("int8", {})),
        ("awq", {"group_size": 32, "candidates": 4}),
    ],
)
def test_jobs_take_mixtures(family, method, options, mixture, tmp_path):
    """Verified by the job itself; routers keep their bytes where awq does not scale them, and gptq beats
    rounding on the routed tokens."""
    folder, text = mixture(family), jobs.calibration(tmp_path)
    allowed = {"allow_unread": method == "int8"}  # which no client reads
    summary = jobs.quantize(method, folder, tmp_path / "out", options, calibration=text, **allowed)
    assert summary.linears == 2 * (4 + 4 * 3)
    source, written = load_file(folder / "model.safetensors"), jobs.tensors(tmp_path / "out")
    routers = [name for name in source if name.endswith("gate.weight")]
    assert len(routers) == 2
    for name in routers:
        assert torch.equal(source[name], written[name]) or method == "awq", name
    rows = [row for row in jobs.manifest(tmp_path / "out").values() if "experts" in row["name"]]
    if method == "gptq":
        assert summary.error < 0.6 * summary.rtn_error
        tokens = 6 * 32  # two experts for each, three linears an expert
        assert sum(row["tokens"] for row in rows if ".layers.0." in row["name"]) == 3 * 2 * tokens


def test_the_choice_of_statistics_is_part_of_the_job(mixture, tmp_path):
    folder, text = mixture(), jobs.calibration(tmp_path)
    for choice in ("shrink", "routed", "all"):
        jobs.quantize("gptq", folder, tmp_path / choice, jobs.GPTQ, calibration=text, experts=choice)
    record = json.loads((tmp_path / "routed" / "quantkit.json").read_text())
    assert record["job"]["experts"] == "routed"
    name = "model.layers.0.block_sparse_moe.experts.1.w1.qweight"
    made = [jobs.tensors(tmp_path / choice)[name] for choice in ("shrink", "routed", "all")]
    assert not torch.equal(made[0], made[1]) and not torch.equal(made[1], made[2])


def test_experts_of_several_schemes_are_told(mixture, tmp_path):
    """`--override` knows experts; engines want one scheme for the three linears of each."""
    listener = jobs.Listener()
    options = {"group_size": 32, "solver": "rtn"}
    made = jobs.prepare(
        "gptq", mixture(), tmp_path / "out", options, progress=listener, override=(r"experts\.1\.w2=8",)
    )
    bits = {row.name.partition("experts.")[2]: row.grid.bits for row in made.specs if "experts" in row.name}
    assert {name for name, width in bits.items() if width == 8} == {"1.w2"}
    (warning,) = [text for text in listener.warnings if "are quantized differently" in text]
    assert "model.layers.0.block_sparse_moe.experts.1" in warning
