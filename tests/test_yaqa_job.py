"""Jobs with `--solver yaqa`: resumed, of mixtures, refused, and behind a transform."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from quantkit.quantize import loop
from quantkit.quantize.calibrate import curvature
from quantkit.quantize.calibrate.measure import Measuring
from quantkit.quantize.calibrate.view import Transformed
from quantkit.quantize.solvers.yaqa import UNREACHED
from quantkit.quantize.staging.blocks import StagedBlocks

OPTIONS = "--solver yaqa --group-size 32 --samples 4 --seqlen 16 --batch-size 2 --threads 1 -q".split()
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


@pytest.mark.nightly
def test_goes_on_with_the_gradients_of_the_run_before(tiny_model, quantkit, monkeypatch, tmp_path):
    model = tiny_model("llama", tokenizer=True, **SIZES)
    assert quantkit("gptq", model, *OPTIONS, "-o", "whole").code == 0
    quantize = loop.Loop._quantize

    def stop(self, index, module):
        if index == 1:
            raise KeyboardInterrupt
        quantize(self, index, module)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "_quantize", stop)
        assert quantkit("gptq", model, *OPTIONS, "-o", "out").code
    monkeypatch.setattr(curvature, "_pass", None)  # nothing is gathered again
    done = quantkit("gptq", model, *OPTIONS, "-o", "out", "--resume")
    assert done.code == 0, done.err
    whole, out = (tmp_path / name / "model.safetensors" for name in ("whole", "out"))
    assert whole.read_bytes() == out.read_bytes()


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_second_moments_are_of_the_weighted_tokens(tiny_model, quantkit, monkeypatch, method):
    """All weights but one are 0, so every H of the blocks has rank 1."""
    ranks, finished = {}, Measuring.finished

    def weights(self, block, names):
        return torch.zeros(64).index_fill(0, torch.tensor([37]), 1.0)

    def rank(self, site, sums):
        statistics = finished(self, site, sums)
        ranks[self.block.index, site] = torch.linalg.matrix_rank(statistics.hessian, rtol=1e-4).item()
        return statistics

    monkeypatch.setattr(curvature.Curvatures, "weights", weights)
    monkeypatch.setattr(Measuring, "finished", rank)
    model = tiny_model("llama", tokenizer=True, **SIZES)
    done = quantkit(method, model, *OPTIONS, "-o", "out")
    assert done.code == 0, done.err
    assert len(ranks) == 8 and set(ranks.values()) == {1}


def test_a_file_that_was_changed_is_noticed(tmp_path):
    staged = StagedBlocks(tmp_path)
    staged.save(0, {"a": torch.ones(3)}, [])
    assert StagedBlocks(tmp_path).is_done(0)
    save_file({"a": torch.zeros(3)}, staged.path(0))
    assert not StagedBlocks(tmp_path).is_done(0)
    staged.forget(0)
    assert not staged.is_done(0)


@pytest.mark.nightly
def test_experts_that_no_gradient_reached_say_so(tiny_model, quantkit, tmp_path):
    """Of eight experts each token goes to one, and there are few tokens."""
    sizes = {"num_local_experts": 8, "num_experts_per_tok": 1, "num_hidden_layers": 1}
    model = tiny_model("mixtral", tokenizer=True, **{**SIZES, **sizes})
    few = [*OPTIONS, "--samples", "1", "--seqlen", "4", "--allow-unread", "-o", "out"]
    done = quantkit("gptq", model, *few)
    assert done.code == 0, done.err
    rows = json.loads((tmp_path / "out" / "quantkit.json").read_text())["linears"]
    starved = [row for row in rows if row.get("tokens") == 0]
    assert starved
    assert all(UNREACHED in row["notes"] for row in starved)
    assert any(row.get("tokens") and UNREACHED not in row["notes"] for row in rows)


def test_a_block_that_gradients_do_not_pass_is_refused(tiny_model, quantkit, monkeypatch, tmp_path):
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x.detach().clone()) + one_way(x))
    model = tiny_model("llama", tokenizer=True, **SIZES)
    done = quantkit("gptq", model, *OPTIONS, "-o", "out")
    assert done.code == 4
    assert "gradients do not flow back through LlamaDecoderLayer" in done.err
    assert "--solver gptq" in done.err
    assert not (tmp_path / "out.partial").exists()


class OneWay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError("no formula for the gradient of OneWay")


one_way = OneWay.apply


@pytest.mark.parametrize("factor", [torch.tensor([2.0, 0.5, 1.0, 4.0])])
def test_rows_that_were_scaled_have_the_curvature_of_what_they_give_now(factor):
    """Against autograd, of two linears with a ReLU in between."""
    torch.manual_seed(0)
    first, second, inputs = torch.randn(4, 3), torch.randn(2, 4), torch.randn(50, 3)

    def curved(first, second):
        between = inputs @ first.t()
        between.requires_grad_()
        nn.functional.cross_entropy(between.relu() @ second.t(), torch.zeros(50).long()).backward()
        return between.grad.t() @ between.grad

    made = Transformed({}, row_factors={"fc1": factor})
    found = made.curvature("fc1", curved(first, second))
    wanted = curved(first * factor[:, None], second / factor)
    torch.testing.assert_close(found, wanted)
    assert made.curvature("fc2", None) is None
