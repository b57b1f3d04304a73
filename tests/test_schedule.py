"""Schedules: later sites are measured on the outputs of those that were installed."""

import pytest
import torch
from torch import nn

from quantkit.grids.affine import AffineGrid
from quantkit.layouts import LinearSpec, Statistic
from quantkit.models.files.open import open_checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import schedule
from quantkit.quantize.calibrate.measure import Execution, Measuring
from quantkit.quantize.calibrate.sites import PROBE_TOKENS, Block, find_sites
from quantkit.quantize.calibrate.states import States
from quantkit.quantize.timings import Timings

CPU = torch.device("cpu")


def visited(folder, sequential: str, install: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Hessians in the order of visits, and the hidden states afterwards. install: rounds visited weights."""
    skeleton = Skeleton(open_checkpoint(str(folder)), torch.float32, CPU)
    skeleton.load_rest()
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(500, (size, 8), generator=generator) for size in (2, 2, 1)]
    states = States(map(skeleton.embed, ids), CPU)
    module, probe = skeleton.load_block(0), states[0][:1, :PROBE_TOKENS].clone()
    sites = find_sites(module, lambda: skeleton.run_block(0, probe))
    specs = {
        name: LinearSpec(name, 0, name, linear.out_features, linear.in_features, AffineGrid(4, 32))
        for name, linear in module.named_modules()
        if isinstance(linear, nn.Linear)
    }
    measuring = Measuring(
        skeleton,
        Block(0, module, specs, sites, probe),
        states,
        Execution("float32", "cpu", 2, sequential, 1, at_once=3),
        frozenset({Statistic.HESSIAN}),
        "shrink",
        Timings(),
        len(states),
    )
    hessians = []
    for visit in schedule.visits(measuring, states.advance):
        for site, statistics in visit.items():
            hessians.append(statistics.hessian.clone())
            for name in site.linears if install else ():
                weight = module.get_submodule(name).weight
                weight.copy_((weight * 8).round() / 8)
    return hessians, list(states)


@pytest.mark.parametrize("family", ["llama", "falcon", "mixtral"])
@torch.no_grad()
def test_both_ways_measure_what_was_installed(tiny_model, family):
    folder = tiny_model(family)
    suspended, repeated, plain = (
        visited(folder, sequential, install)
        for sequential, install in (("suspend", True), ("repeat", True), ("suspend", False))
    )
    for ours, theirs in zip((*suspended[0], *suspended[1]), (*repeated[0], *repeated[1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert torch.equal(suspended[0][0], plain[0][0]), "nothing was installed before the first site"
    later = zip((*suspended[0][1:], *suspended[1]), (*plain[0][1:], *plain[1]), strict=True)
    assert all((ours - theirs).abs().max() > 1e-3 for ours, theirs in later)
