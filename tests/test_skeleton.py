"""Streaming a model block by block: the same logits as the whole model, and the right statistics."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from blocks import open_skeleton, streamed
from families import FAMILIES, WINDOW
from nights import by_day
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.grids.affine import AffineGrid
from quantkit.layouts import LinearSpec, Statistic
from quantkit.layouts.gptq import GptqLayout
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.models.skeleton.recording import SHAPES
from quantkit.quantize.calibrate.capture import KINDS, SiteSums
from quantkit.quantize.calibrate.forwards import SuspendedForward, repeated
from quantkit.quantize.calibrate.sites import Site, find_sites
from quantkit.quantize.prepare import linears

CPU = torch.device("cpu")
SCRIPTS = Path(__file__).parents[1] / "scripts"
TOKENS = 40  # more than the sliding window of mistral, gemma2 and gemma3
STALE = {  # buffers that old checkpoints of these families carry
    "gpt2": {"attn.bias": (1, 1, 256, 256), "attn.masked_bias": ()},
    "gpt_neox": {
        "attention.bias": (1, 1, 256, 256),
        "attention.masked_bias": (),
        "attention.rotary_emb.inv_freq": (8,),
    },
}
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
LLAMA = [QKV, ("self_attn.o_proj",), GATE_UP, ("mlp.down_proj",)]
GPT2 = [("attn.c_attn",), ("attn.c_proj",), ("mlp.c_fc",), ("mlp.c_proj",)]
SITES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"), LLAMA),
    **dict.fromkeys(("stablelm", "olmo2", "granite"), LLAMA),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), GPT2),
    "phi3": [("self_attn.qkv_proj",), ("self_attn.o_proj",), ("mlp.gate_up_proj",), ("mlp.down_proj",)],
    "opt": [QKV, ("self_attn.out_proj",), ("fc1",), ("fc2",)],
    "starcoder2": [QKV, ("self_attn.o_proj",), ("mlp.c_fc",), ("mlp.c_proj",)],
    "bloom": [
        ("self_attention.query_key_value",),
        ("self_attention.dense",),
        ("mlp.dense_h_to_4h",),
        ("mlp.dense_4h_to_h",),
    ],
    "gpt_neox": [  # attention and MLP are parallel, but each has its own norm
        ("attention.query_key_value",),
        ("attention.dense",),
        ("mlp.dense_h_to_4h",),
        ("mlp.dense_4h_to_h",),
    ],
    "falcon": [  # one norm feeds attention and MLP
        ("self_attention.query_key_value", "mlp.dense_h_to_4h"),
        ("self_attention.dense",),
        ("mlp.dense_4h_to_h",),
    ],
    "cohere": [(*QKV, *GATE_UP), ("self_attn.o_proj",), ("mlp.down_proj",)],
}


def tokens(batch: int = 2, count: int = TOKENS, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 512, (batch, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def whole(folder, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the model as transformers loads and runs it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids, use_cache=False).logits


def assert_same_logits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert want.std() > 0.02  # the models are not so small that anything would pass
    assert (got - want).abs().max() <= 1e-4


def rewrite(folder, change) -> None:
    """Replace the checkpoint's tensors by `change(tensors)`."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def resolve(skeleton: Skeleton, exclude: list[str]) -> list[LinearSpec]:
    return linears.resolve(skeleton, lambda *shape: AffineGrid(4, 32), GptqLayout(4, 32), exclude, [])


def refused(folder) -> QuantkitError:
    """The error that streaming the checkpoint ends in."""
    with pytest.raises(QuantkitError) as caught:
        streamed(open_skeleton(folder), tokens())
    return caught.value


# The forward pass


DAY = ("llama", "gpt2", "gemma3", "phi3", "falcon")


@pytest.mark.parametrize("family", by_day(FAMILIES, [*DAY, "bloom", "opt"]))
def test_streamed_logits_equal_the_whole_models(tiny_model, family):
    folder = tiny_model(family)
    skeleton = open_skeleton(folder)
    for seed in (0, 1):  # recorded arguments serve other tokens of the same shape
        ids = tokens(seed=seed)
        assert_same_logits(streamed(skeleton, ids), whole(folder, ids))
    single = streamed(skeleton, ids[1:])
    assert (single - streamed(skeleton, ids)[1:]).abs().max() <= 1e-5


@pytest.mark.parametrize("family", by_day(FAMILIES, DAY))
def test_arguments_of_a_shape_that_were_forgotten_are_recorded_again(tiny_model, family):
    skeleton = open_skeleton(tiny_model(family))
    hidden = skeleton.embed(tokens())
    skeleton.load_block(1)
    expected = skeleton.run_block(1, hidden)
    for count in range(1, 2 * SHAPES):  # one more shape each
        skeleton.embed(tokens(1, count))
    assert torch.equal(skeleton.run_block(1, hidden), expected)


@pytest.mark.parametrize("family", by_day(FAMILIES, DAY))
def test_names_without_the_base_models_prefix(tiny_model, family):
    folder, ids = tiny_model(family), tokens()
    want = whole(folder, ids)
    prefix = open_skeleton(folder).model.base_model_prefix + "."

    def strip(tensors: dict) -> dict:
        stripped = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        assert stripped.keys() != tensors.keys()
        return stripped

    rewrite(folder, strip)
    assert_same_logits(streamed(open_skeleton(folder), ids), want)


@pytest.mark.parametrize(("family", "prefix"), [("gpt2", "h"), ("gpt_neox", "gpt_neox.layers")])
def test_stale_buffers_are_ignored(tiny_model, family, prefix):
    folder, ids = tiny_model(family), tokens()
    want = whole(folder, ids)
    base = "transformer." if family == "gpt2" else ""  # GPT-2 on the hub has neither prefix nor head
    stale = {
        f"{prefix}.{block}.{name}": torch.full(shape, 7.0)
        for block in range(3)
        for name, shape in STALE[family].items()
    }
    rewrite(folder, lambda tensors: {name.removeprefix(base): t for name, t in tensors.items()} | stale)
    assert_same_logits(streamed(open_skeleton(folder), ids), want)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
def test_sliding_windows_matter_in_these_tests(tiny_model, family):
    narrow, wide = tiny_model(family), tiny_model(family, name="wide", sliding_window=256)
    first, second = (streamed(open_skeleton(folder), tokens()) for folder in (narrow, wide))
    same = (first - second).abs().amax((0, 2)) <= 1e-4
    assert same[:WINDOW].all() and not same[WINDOW:].any()


def test_a_model_of_one_block(tiny_model):
    folder = tiny_model("llama", num_hidden_layers=1)
    assert_same_logits(streamed(open_skeleton(folder), tokens()), whole(folder, tokens()))


@pytest.mark.parametrize("family", by_day(FAMILIES, DAY))
def test_tied_embeddings_stay_one_tensor(tiny_model, family):
    skeleton = open_skeleton(tiny_model(family))
    model = skeleton.model
    shared = model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert shared == skeleton.checkpoint.config.tie_word_embeddings


def test_a_head_that_differs_is_not_tied_away(tiny_model):
    """transformers uses a stored head that differs from the embeddings, whatever the configuration says."""
    folder = tiny_model("llama", tie_word_embeddings=True)
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2})
    assert_same_logits(streamed(open_skeleton(folder), tokens()), whole(folder, tokens()))


def test_a_stored_head_serves_as_embeddings_where_they_are_tied(tiny_model):
    folder, ids = tiny_model("llama", tie_word_embeddings=True), tokens()
    want = whole(folder, ids)
    rename = {"model.embed_tokens.weight": "lm_head.weight"}
    rewrite(folder, lambda tensors: {rename.get(name, name): tensor for name, tensor in tensors.items()})
    assert_same_logits(whole(folder, ids), want)
    assert_same_logits(streamed(open_skeleton(folder), ids), want)


def test_names_in_the_plan_are_the_stored_ones(tiny_model):
    folder = tiny_model("gpt2")
    rewrite(folder, lambda tensors: {name.removeprefix("transformer."): t for name, t in tensors.items()})
    rows = resolve(open_skeleton(folder), ["c_proj"])
    assert [(row.name, row.out_features, row.in_features, row.grid is None) for row in rows[:4]] == [
        ("h.0.attn.c_attn", 192, 64, False),
        ("h.0.attn.c_proj", 64, 64, True),
        ("h.0.mlp.c_fc", 256, 64, False),
        ("h.0.mlp.c_proj", 64, 256, True),
    ]


# What must be refused


@pytest.mark.parametrize(
    ("model_type", "words"), [("bert", "it is an encoder"), ("t5", "is not a causal language model")]
)
def test_what_predicts_no_next_token_is_refused(tiny_model, model_type, words):
    """Tokens of an encoder see those behind them: no perplexity, and nothing to calibrate by."""
    folder = tiny_model("llama")
    config = {"model_type": model_type, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    error = refused(folder)
    assert error.exit_code == UNSUPPORTED and words in error.message


def test_an_encoder_with_a_decoder_is_refused(tiny_model):
    folder = tiny_model("bart")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_encoder_decoder": True}))
    error = refused(folder)
    assert error.exit_code == UNSUPPORTED and "an encoder and a decoder" in error.message


def test_a_missing_tensor_is_named(tiny_model):
    folder, name = tiny_model("llama"), "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: {key: t for key, t in tensors.items() if key != name})
    assert refused(folder).message == f"the checkpoint lacks 1 tensor of the model: {name}"


def test_a_configuration_of_a_deeper_model_names_what_is_missing(tiny_model):
    folder = tiny_model("gpt2", num_hidden_layers=2)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"n_layer": 2', '"n_layer": 3'))
    message = refused(folder).message
    assert "lacks 12 tensors" in message and "transformer.h.2.attn.c_attn.weight" in message
    assert "h.1." not in message


@pytest.mark.parametrize(
    ("family", "name", "cut", "got", "wanted"),
    [  # GPT-2 stores [in, out]; everything said about it is [out, in]
        ("llama", "model.layers.2.mlp.up_proj.weight", (100, 64), [100, 64], [128, 64]),
        ("llama", "model.embed_tokens.weight", (500, 64), [500, 64], [512, 64]),
        ("gpt2", "transformer.h.0.mlp.c_fc.weight", (64, 128), [128, 64], [256, 64]),
    ],
)
def test_a_wrong_shape_is_named(tiny_model, family, name, cut, got, wanted):
    folder = tiny_model(family)
    rows, columns = cut
    rewrite(folder, lambda tensors: tensors | {name: tensors[name][:rows, :columns].contiguous()})
    assert refused(folder).message == f"{name} is {got}, the configuration says {wanted}"


def test_every_wrong_shape_is_named_before_anything_is_loaded(tiny_model, monkeypatch):
    folder = tiny_model("llama")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"intermediate_size": 128', '"intermediate_size": 96'))
    monkeypatch.setattr(Checkpoint, "load", lambda *_: pytest.fail("a tensor was loaded"))
    error = refused(folder)
    wrong = "model.layers.{}.mlp.{}.weight is {}, the configuration says {}"
    assert error.message.startswith(wrong.format(0, "gate_proj", [128, 64], [96, 64]) + "; ")
    assert wrong.format(2, "up_proj", [128, 64], [96, 64]) in error.message and "1 more" in error.message


# Sites


@pytest.mark.parametrize("family", by_day(FAMILIES, [*DAY, "bloom", "opt"]))
def test_sites(tiny_model, family):
    skeleton = open_skeleton(tiny_model(family))
    hidden = skeleton.embed(tokens(1, 8))
    for index in range(2):
        skeleton.load_block(index)
        found = find_sites(skeleton.blocks[index], lambda index=index: skeleton.run_block(index, hidden))
        assert [site.linears for site in found] == SITES[family]


class Toy(nn.Module):
    """Four linears, called as `forward` says."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.forward = lambda x: forward(self, x)


@pytest.mark.parametrize(
    ("forward", "wanted"),
    [
        (lambda toy, x: toy.c(toy.a(x)) + toy.b(x), [(("d",), 0), (("a", "b"), 1), (("c",), 1)]),
        (
            lambda toy, x: toy.d(toy.c(toy.c(toy.b(toy.a(x))))),
            [(("a",), 1), (("b",), 1), (("c",), 2), (("d",), 1)],
        ),
        (
            lambda toy, x: toy.b(h := toy.b(x)) + toy.c(x) + toy.c(h),  # the same inputs at both calls
            [(("a",), 0), (("d",), 0), (("b", "c"), 2)],
        ),
    ],
)
def test_how_often_linears_are_called(forward, wanted):
    toy = Toy(forward)
    found = find_sites(toy, lambda: toy(torch.ones(3, 8)))
    assert [(site.linears, site.calls) for site in found] == wanted


def test_inputs_of_several_calls_add_up():
    """Each batch's, as the whole forward shows them."""
    toy, batches = Toy(lambda toy, x: toy.b(toy.a(toy.a(x)))), [torch.ones(3, 8), torch.full((2, 8), 2.0)]
    with torch.no_grad():
        sites = [site for site in find_sites(toy, lambda: toy(batches[0])) if site.calls]
        seen = [
            list(repeated(toy.get_submodule(site.module), lambda k: toy(batches[k]), 2, whole=site.whole))
            for site in sites
        ]
        want = [part for x in batches for part in (x, toy.a(x))], [toy.a(toy.a(x)) for x in batches]
    for inputs, expected in zip(seen, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(inputs, expected, strict=True))


def test_a_site_is_one_input_not_one_address():
    def forward(toy, x):
        kept = toy.a(x) + toy.b(x)
        x.mul_(2)  # the same memory, other values
        return toy.c(x) + toy.d(kept[:, :8]) + kept

    toy = Toy(forward)
    with torch.no_grad():
        found = find_sites(toy, lambda: toy(torch.ones(3, 8)))
    assert [site.linears for site in found] == [("a", "b"), ("c",), ("d",)]


# Statistics


@pytest.mark.parametrize("width", [1, 7, 128, 130, 300, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hessian_is_twice_the_mean_outer_product(width, dtype):
    generator = torch.Generator().manual_seed(width)
    mixing = torch.randn(width, generator=generator)
    batches = [
        (torch.randn(*shape, width, generator=generator) * mixing + mixing / 2).to(dtype)
        for shape in [(2, 9), (5,), (1, 3)]
    ]
    accumulator = SiteSums(width, CPU, (*KINDS,)[:4])
    for batch in batches:
        accumulator.add(batch)
    statistics = accumulator.finish()
    got = statistics.hessian
    rows = torch.cat([batch.reshape(-1, width) for batch in batches]).double()
    want = 2 * rows.T @ rows / 26
    assert accumulator.tokens == 26
    assert got.dtype == torch.float32
    assert torch.equal(got, got.T)
    assert (got - want).norm() <= 1e-5 * want.norm()
    assert (got.diagonal() - want.diagonal()).abs().max() <= 1e-5 * want.diagonal().max()
    magnitude = rows.abs().mean(0)
    assert (statistics[Statistic.MAGNITUDE] - magnitude).abs().max() <= 1e-5 * magnitude.max()
    assert torch.equal(statistics[Statistic.PEAK].double(), rows.abs().amax(0))
    square = rows.square().mean(0)
    assert statistics[Statistic.SQUARE].dtype == torch.float32
    assert ((statistics[Statistic.SQUARE] - square).abs() <= 1e-6 * square).all()


class Repeated:
    """The block runs again for every site."""

    def __init__(self, block, sites, run, count):
        self.inputs = lambda site: repeated(block.get_submodule(site.module), run, count)
        self.outputs = lambda: map(run, range(count))


def passes(skeleton: Skeleton, forward_class, batches):
    """Inputs of every site, and outputs of block 1."""
    block = skeleton.load_block(1)
    sites = [Site(linears) for linears in SITES[skeleton.checkpoint.config.model_type]]
    forward = forward_class(block, sites, lambda k: skeleton.run_block(1, batches[k]), len(batches))
    seen = [[inputs.clone() for inputs in forward.inputs(site)] for site in sites]
    return seen, list(forward.outputs())


def states(skeleton: Skeleton) -> list[torch.Tensor]:
    """What enters the first block: three batches, the last one smaller."""
    return [skeleton.embed(tokens(batch, seed=batch)) for batch in (2, 2, 1)]


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon", "bloom"])
@pytest.mark.parametrize("forward_class", [SuspendedForward, Repeated])
def test_sites_see_what_a_plain_forward_shows_them(tiny_model, family, forward_class):
    skeleton = open_skeleton(tiny_model(family))
    batches = states(skeleton)
    block = skeleton.load_block(1)
    want: dict[str, list] = {}
    handles = [
        block.get_submodule(names[0]).register_forward_pre_hook(
            lambda module, args, name=names[0]: want.setdefault(name, []).append(args[0].clone())
        )
        for names in SITES[family]
    ]
    outputs = [skeleton.run_block(1, hidden) for hidden in batches]
    for handle in handles:
        handle.remove()
    seen, got = passes(skeleton, forward_class, batches)
    assert all(torch.equal(a, b) for a, b in zip(got, outputs, strict=True))
    for inputs, expected in zip(seen, want.values(), strict=True):
        assert [i.shape for i in inputs] == [e.shape for e in expected]
        assert all(torch.equal(i, e) for i, e in zip(inputs, expected, strict=True))
    assert not any(module._forward_pre_hooks for module in block.modules())


@pytest.mark.parametrize("enabled", [True, False])
def test_suspended_forwards_leave_grad_mode_alone(tiny_model, enabled):
    skeleton = open_skeleton(tiny_model("llama"))
    batches = states(skeleton)
    with torch.set_grad_enabled(enabled):
        passes(skeleton, SuspendedForward, batches)
        assert torch.is_grad_enabled() == enabled


@pytest.mark.parametrize(
    ("family", "status", "reason"),
    [("minimax", "taken", ""), ("xlstm", "refused", "multiply bfloat16 with another precision")],
)
def test_families_that_mix_precisions_in_bfloat16(family, status, reason, monkeypatch):
    """MiniMax has buffers that a transform moves to float32; xLSTM multiplies float32 and bfloat16."""
    monkeypatch.syspath_prepend(SCRIPTS)
    spec = importlib.util.spec_from_file_location("all_families", SCRIPTS / "families.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    row = script.examined(family, ["gptq"], "bfloat16")
    assert row["status"] == status and reason in row["reason"], row
