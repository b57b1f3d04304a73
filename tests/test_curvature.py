"""Curvatures at the outputs of linears: streamed block by block, against autograd through the whole model."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from quantkit.models.files.open import open_checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import curvature
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging.blocks import StagedBlocks
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
    """The same from one backward pass through all of transformers' own model, in float64 sums; and the
    gradients, `[tokens, out]`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inside = {f"{skeleton.names.blocks}.{k}.{name}": (k, name) for k in names for name in names[k]}
    rows = {key: [] for key in inside.values()}

    def listen(key):
        def add(gradient):
            rows[key].append(gradient.flatten(0, -2).double())

        return lambda module, args, out: out.register_hook(add) and None

    for name, key in inside.items():
        model.get_submodule(name).register_forward_hook(listen(key))
    generator = torch.Generator().manual_seed(curvature.SEED)
    for batch in ids:
        logits = model(batch, use_cache=False).logits.flatten(0, 1)
        drawn = curvature.draw(logits.detach(), generator)
        nn.functional.cross_entropy(logits, drawn, reduction="sum").backward()
    rows = {key: torch.cat(parts) for key, parts in rows.items()}
    sums = {key: found.t() @ found for key, found in rows.items()}
    return {key: (found / found.diagonal().mean()).float() for key, found in sums.items()}, rows


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_are_those_of_the_whole_model(tiny_model, tmp_path, ids, family):
    folder = tiny_model(family, num_hidden_layers=2)
    skeleton = opened(folder)
    names = linears(skeleton)
    found = gathered(skeleton, names, ids, tmp_path)
    sums, rows = of_whole_model(folder, skeleton, names, ids)
    for (block, name), wanted in sums.items():
        torch.testing.assert_close(found.of(block, name), wanted, rtol=2e-3, atol=2e-3)
        squares = rows[block, name].square().sum(1)
        assert_weights(found.weights(block, [name]), squares)
    pair = names[1][:2]
    mean = sum(squares / squares.mean() for squares in (rows[1, name].square().sum(1) for name in pair))
    assert_weights(found.weights(1, pair), mean)


def assert_weights(found, squares):
    lengths = squares.sqrt()
    torch.testing.assert_close(found, (lengths / lengths.mean()).float(), rtol=2e-3, atol=2e-3)


def test_no_token_outweighs_the_others(tmp_path):
    """One gradient is a million times as long as the rest. Without squares there are no weights."""
    staged = StagedBlocks(tmp_path)
    squares = torch.ones(100)
    squares[3] = 1e12
    staged.save(0, {"a": torch.eye(2), curvature.TOKENS.format("a"): squares, "b": torch.eye(2)}, [])
    found = curvature.Curvatures(staged, torch.device("cpu"))
    assert found.weights(0, ["a"])[3] == curvature.LIMIT
    assert found.weights(0, ["a", "b"]) is None


def test_draws_by_the_distribution():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(8000, 4)
    drawn = curvature.draw(logits, torch.manual_seed(0))
    torch.testing.assert_close(torch.bincount(drawn, minlength=4) / 8000, logits[0].exp(), rtol=0, atol=0.02)
    assert curvature.draw(logits, torch.manual_seed(0)).equal(drawn)
