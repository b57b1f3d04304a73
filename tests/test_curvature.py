"""Curvatures at the outputs of linears: streamed block by block, against autograd through the whole model."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from quantkit.models.files.open import open_checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import curvature
from quantkit.quantize.progress import Progress
from quantkit.quantize.timings import Timings


@pytest.fixture
def ids():
    return list(torch.randint(100, (6, 9), generator=torch.manual_seed(1)).split(2))


def opened(folder):
    skeleton = Skeleton(open_checkpoint(str(folder)), torch.float32, torch.device("cpu"))
    skeleton.load_rest()
    return skeleton


def linears(skeleton, wanted=None):
    """Names of all linears, by block."""
    blocks = range(len(skeleton.blocks)) if wanted is None else wanted
    return {
        k: [name for name, part in skeleton.blocks[k].named_modules() if isinstance(part, nn.Linear)]
        for k in blocks
    }


def gathered(skeleton, names, ids, folder):
    return curvature.gather(skeleton, names, ids, folder, Timings(), Progress())


def of_whole_model(folder, skeleton, names, ids):
    """The same from one backward pass through all of transformers' own model, in float64 sums."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inside = {f"{skeleton.names.blocks}.{k}.{name}": (k, name) for k in names for name in names[k]}
    sums = dict.fromkeys(inside.values(), 0)

    def listen(key):
        def add(gradient):
            rows = gradient.flatten(0, -2).double()
            sums[key] = sums[key] + rows.t() @ rows

        return lambda module, args, out: out.register_hook(add) and None

    for name, key in inside.items():
        model.get_submodule(name).register_forward_hook(listen(key))
    generator = torch.Generator().manual_seed(curvature.SEED)
    for batch in ids:
        logits = model(batch, use_cache=False).logits.flatten(0, 1)
        drawn = curvature.draw(logits.detach(), generator)
        nn.functional.cross_entropy(logits, drawn, reduction="sum").backward()
    return {key: (found / found.diagonal().mean()).float() for key, found in sums.items()}


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_are_those_of_the_whole_model(tiny_model, tmp_path, ids, family):
    folder = tiny_model(family, num_hidden_layers=2)
    skeleton = opened(folder)
    names = linears(skeleton)
    found = gathered(skeleton, names, ids, tmp_path)
    for (block, name), wanted in of_whole_model(folder, skeleton, names, ids).items():
        torch.testing.assert_close(found.of(block, name), wanted, rtol=2e-3, atol=2e-3)


def test_draws_by_the_distribution():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(8000, 4)
    drawn = curvature.draw(logits, torch.manual_seed(0))
    torch.testing.assert_close(torch.bincount(drawn, minlength=4) / 8000, logits[0].exp(), rtol=0, atol=0.02)
    assert curvature.draw(logits, torch.manual_seed(0)).equal(drawn)
