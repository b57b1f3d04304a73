"""A quantized key/value cache: what each engine's rounds to, and what attention then computes."""

import json

import families
import pytest
import torch
import transformers as hf
from nights import by_day
from torch import Tensor

from quantkit.errors import QuantkitError
from quantkit.evaluation.kv_cache import rounding_of, sylvester
from quantkit.evaluation.stream import StreamedModel
from quantkit.models import kv_types
from quantkit.models.files.open import open_checkpoint

CPU = torch.device("cpu")
TOKENS = 140
IDS = torch.arange(TOKENS)[None] * 7 % families.VOCABULARY


def some(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 4, shape[-1])


def streamed(folder, kv_dtype: str | None = None) -> StreamedModel:
    return StreamedModel.open(open_checkpoint(str(folder)), torch.float32, CPU, None, kv_dtype)


def states(model: StreamedModel, ids: Tensor = IDS) -> Tensor:
    return model.states([ids], lambda *_: None)[0]


@pytest.mark.parametrize("name", by_day(["q8_0", "q4_0", "fp8", "float16"], ["q4_0", "fp8"]))
@pytest.mark.parametrize(
    "family", by_day(["llama", "gpt2", "falcon", "gemma2", "bloom"], ["llama", "falcon", "gemma2"])
)
def test_attention_reads_what_is_rounded(tiny_model, family, name):
    """transformers with a cache that rounds, all tokens at once, against the streamed model."""
    wide = {"head_dim": 32} if family in ("llama", "gemma2") else {"num_attention_heads": 2}
    folder = tiny_model(family, **wide)
    rounding = rounding_of(name)

    class Rounded(hf.DynamicCache):
        def update(self, keys, values, *args, **kwargs):
            return super().update(rounding.keys(keys), rounding.values(values), *args, **kwargs)

    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = IDS[:, :24]
    with torch.no_grad():
        expected = model(ids, past_key_values=Rounded(config=model.config)).logits[0].log_softmax(-1)
        plain = model(ids).logits[0].log_softmax(-1)
    own = streamed(folder, name)
    found = own.skeleton.logits(states(own, ids)[0]).log_softmax(-1)
    assert (found - expected).abs().max() < 1e-5
    assert (plain - expected).abs().max() > (found - expected).abs().max()
    assert own.kv["layers"] == own.kv["blocks"] == 3


def test_what_llama_cpp_rounds_is_rotated_where_heads_are_whole_64s():
    for width, turns in ((32, (None, None)), (64, (64, 64)), (192, (64, 64)), (256, (256, 64))):
        x = some(1, 2, 5, width)
        both = rounding_of("q8_0")
        for rounded, size in zip((both.keys, both.values), turns, strict=True):
            turn = sylvester(size, CPU) if size else torch.eye(width)
            turned = (x.unflatten(-1, (-1, len(turn))) @ turn).reshape(-1, 32)
            scale = turned.abs().amax(1, keepdim=True) / 127
            codes = torch.round(turned / scale)
            read = (codes * scale.half().float()).view(1, 2, 5, -1, len(turn)) @ turn
            assert torch.allclose(rounded(x), read.flatten(-2), atol=1e-6)


def test_a_hadamard_matrix_turns_back():
    turn = sylvester(64, CPU)
    assert torch.equal(turn, turn.T) and torch.allclose(turn @ turn, torch.eye(64), atol=1e-6)
    assert turn.abs().unique().tolist() == [0.125]


def test_fp8_is_cut_off_at_its_largest_value():
    x = torch.tensor([0.0, 1.06, -3.0, 460.0, -1e6]).view(1, 1, 1, 5)
    assert rounding_of("fp8").keys(x).flatten().tolist() == [0.0, 1.0, -3.0, 448.0, -448.0]


def test_bits_of_a_value_with_its_scales():
    bits = {name: 8 * kind.nbytes for name, kind in kv_types.TYPES.items()}
    assert bits == {
        "float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "int8": 8.5, "q8_0": 8.5, "q4_0": 4.5,
        "int4": 4.5,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "width"), [("q4_0", 48), ("q8_0", 24)])
def test_heads_that_the_engine_refuses(name, width):
    with pytest.raises(QuantkitError, match="not a multiple"):
        rounding_of(name).keys(some(1, 1, 5, width))


@pytest.mark.parametrize(
    ("family", "layers"), [("bamba", 1), ("qwen3_next", 1), ("gemma3n", 2), ("glm_moe_dsa", 3)]
)
def test_blocks_without_keys_and_values_are_counted(tmp_path, family, layers):
    """Recurrent ones, and those that read another block's."""
    folder = families.save_model(tmp_path, family)
    exact, model = streamed(folder), streamed(folder, "fp8")
    before, after = states(exact, IDS[:, :16]), states(model, IDS[:, :16])
    assert not torch.equal(before, after)
    assert (model.kv["layers"], model.kv["blocks"]) == (layers, len(model.skeleton.blocks))


def test_a_model_without_a_cache_is_refused(tmp_path):
    config = hf.MambaConfig(vocab_size=families.VOCABULARY, hidden_size=64, num_hidden_layers=2, state_size=8)
    hf.MambaForCausalLM(config).save_pretrained(tmp_path)
    model = streamed(tmp_path, "q8_0")
    states(model, IDS[:, :8])
    with pytest.raises(QuantkitError, match="keeps no keys and values"):
        _ = model.kv


def test_the_command(quantkit, demo_model, tmp_path):
    """Rows of every model with and without; gates judge them, the schema takes them."""
    text = tmp_path / "text.txt"
    text.write_text("It was a dark night, and the sea was loud. " * 40)
    short = ["--text", text, "--ctx", "64", "--limit", "192", "--metrics", "kld", "--json"]
    done = quantkit("eval", demo_model, "--as", "nf4", *short, "--kv-dtype", "q4_0", "--max-kld", "0.001")
    assert done.code == 7
    record = json.loads(done.out)
    rows = {model["source"].removeprefix(str(demo_model)): model for model in record["models"]}
    assert list(rows) == ["", ", kv q4_0", " as nf4", " as nf4, kv q4_0"]
    assert rows[""]["kv"] is None
    assert rows[", kv q4_0"]["kv"] == {
        "dtype": "q4_0", "keeper": "llama.cpp", "bytes_per_value": 0.5625, "layers": 6, "blocks": 6,
    }  # fmt: skip
    losses = [row["metrics"]["kld"]["mean"] for row in list(rows.values())[1:]]
    assert 0 < losses[0] < losses[1] < losses[2]
    assert len(record["gates"]) == 3


def test_an_unknown_type_is_refused_before_anything_is_loaded(quantkit, tmp_path):
    done = quantkit("eval", tmp_path, "--text", tmp_path, "--kv-dtype", "q4_1")
    assert done.code == 2 and "did you mean" in done.err
    assert "choose one of float32, bfloat16, float16, fp8, q8_0, q4_0\n" in done.err  # which eval measures


def test_caches_of_transformers_are_not_measured():
    with pytest.raises(QuantkitError, match="caches of transformers are not measured"):
        rounding_of("int4")


def test_a_cache_that_llama_cpp_lacks_is_refused_before_the_first_pass(quantkit, tiny_model):
    source = tiny_model("llama", tokenizer=True, hidden_size=80, num_attention_heads=2, num_key_value_heads=2)
    done = quantkit("eval", source, "--kv-dtype", "q8_0", "--limit", 64, "--ctx", 32, "-q")
    assert done.code == 4 and done.err.startswith(
        "error: a q8_0 cache needs heads whose width is a multiple of 32, unlike "
    )
