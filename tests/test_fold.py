"""quantkit.quantize.transforms.fold: what is found in every family is what its architecture says."""

import blocks
import families
import pytest
import torch
from nights import by_day
from torch import nn
from torch.nn.functional import leaky_relu

from quantkit.quantize.calibrate.sites import Site, find_sites
from quantkit.quantize.calibrate.view import BlockView
from quantkit.quantize.transforms import fold
from quantkit.quantize.transforms.fold import Fold, Producer, find_folds
from quantkit.quantize.transforms.probe import probing

# All families have a hidden size of 64, 4 heads of 16, and 2 or 4 heads of keys and values, or 1.
GROUPED = torch.arange(32).view(2, 1, 16).expand(2, 2, 16).flatten()  # two heads follow the rows of one
SINGLE = torch.arange(16).repeat(4)
INTERLEAVED = (48 * torch.arange(4)[:, None] + 32 + torch.arange(16)).flatten()  # q, k, v head by head
ALL = None  # row by row
GATED = {  # first linear of a site -> its producer, rows, whether its weight acts as 1 + w
    "self_attn.q_proj": ("input_layernorm", ALL),
    "self_attn.o_proj": ("self_attn.v_proj", GROUPED),
    "mlp.gate_proj": ("post_attention_layernorm", ALL),
    "mlp.down_proj": ("mlp.up_proj", ALL),
}
GEMMA = GATED | {
    "self_attn.q_proj": ("input_layernorm", ALL, True),
    "mlp.gate_proj": ("pre_feedforward_layernorm", ALL, True),
}
GPT2 = {
    "attn.c_attn": ("ln_1", ALL),
    "attn.c_proj": ("attn.c_attn", 128 + torch.arange(64)),
    "mlp.c_fc": ("ln_2", ALL),
    "mlp.c_proj": None,  # behind a GELU
}
FUSED_HEADS = {
    "query_key_value": ("input_layernorm", ALL),
    "dense": ("query_key_value", INTERLEAVED),
    "mlp.dense_h_to_4h": ("post_attention_layernorm", ALL),
    "mlp.dense_4h_to_h": None,
}


def under(attention: str, table: dict) -> dict:
    """Names of attention's linears with those of the module that holds them."""

    def place(name: str) -> str:
        return f"{attention}.{name}" if name in ("query_key_value", "dense") else name

    return {place(site): found and (place(found[0]), *found[1:]) for site, found in table.items()}


PRODUCERS = {
    **dict.fromkeys(["llama", "mistral", "qwen2", "qwen3", "stablelm", "granite"], GATED),
    **dict.fromkeys(["gemma2", "gemma3"], GEMMA),
    "phi3": {
        "self_attn.qkv_proj": ("input_layernorm", ALL),
        "self_attn.o_proj": ("self_attn.qkv_proj", 96 + GROUPED),
        "mlp.gate_up_proj": ("post_attention_layernorm", ALL),
        "mlp.down_proj": ("mlp.gate_up_proj", 128 + torch.arange(128)),
    },
    "gpt2": GPT2,
    "gpt_bigcode": GPT2 | {"attn.c_proj": ("attn.c_attn", 80 + SINGLE)},
    "opt": {
        "self_attn.q_proj": ("self_attn_layer_norm", ALL),
        "self_attn.out_proj": ("self_attn.v_proj", ALL),
        "fc1": ("final_layer_norm", ALL),
        "fc2": ("fc1", ALL),  # through a ReLU
    },
    "gpt_neox": under("attention", FUSED_HEADS),
    "bloom": under("self_attention", FUSED_HEADS),
    "falcon": {  # attention and MLP read the same norm
        "self_attention.query_key_value": ("input_layernorm", ALL),
        "self_attention.dense": ("self_attention.query_key_value", 80 + SINGLE),
        "mlp.dense_4h_to_h": None,
    },
    "olmo2": GATED | {"self_attn.q_proj": None, "mlp.gate_proj": None},  # these read the residual stream
    "cohere": {name: found for name, found in GATED.items() if name != "mlp.gate_proj"},
    "starcoder2": {
        "self_attn.q_proj": ("input_layernorm", ALL),
        "self_attn.o_proj": ("self_attn.v_proj", GROUPED),
        "mlp.c_fc": ("post_attention_layernorm", ALL),
        "mlp.c_proj": None,
    },
}


def folds_of(view: BlockView) -> list[Fold]:
    with probing(view) as probe:
        return find_folds(probe)


def producers_of(view: BlockView) -> dict[Site, Producer | None]:
    found = {site: fold.producer for fold in folds_of(view) for site in fold.sites}
    return {site: found.get(site) for site in view.sites}


DAY = ("llama", "phi3", "gpt2", "gemma3", "bloom", "opt")  # the others are built like one of them


@pytest.mark.parametrize("family", by_day(families.FAMILIES, DAY))
def test_producers_of_every_family(tiny_model, family):
    folder = tiny_model(family)
    for dtype in (torch.float32, torch.bfloat16):
        bench = blocks.load(folder, dtype)
        bench.block.float()  # as it is when pairs are proven
        bench.inputs = bench.inputs.float()
        before = {name: (part, part.clone()) for name, part in bench.block.named_parameters()}
        found = {site.linears[0]: producer for site, producer in producers_of(bench.view()).items()}
        assert found.keys() == PRODUCERS[family].keys()
        for name, expected in PRODUCERS[family].items():
            producer = found[name]
            if expected is None:
                assert producer is None, (dtype, name)
                continue
            module, rows, *one_plus = expected
            assert (producer.name, producer.one_plus) == (module, bool(one_plus)), (dtype, name)
            rows = torch.arange(len(producer.rows)) if rows is ALL else rows
            assert torch.equal(producer.rows, rows), (dtype, name)

        after = dict(bench.block.named_parameters())
        assert after.keys() == before.keys()
        for name, (part, values) in before.items():
            assert after[name] is part and torch.equal(part, values), name
        assert not any(module._forward_pre_hooks for module in bench.block.modules())


# ---- wrong candidates


def site_of(bench: blocks.Bench, linear: str) -> Site:
    return next(site for site in bench.sites if linear in site.linears)


def only(monkeypatch, *candidates: Producer) -> None:
    monkeypatch.setattr(fold, "guesses", lambda *_: iter(candidates))


def test_wrong_candidates_are_turned_down(tiny_model, monkeypatch):
    bench = blocks.load(tiny_model("llama"))
    view, site = bench.view(), site_of(bench, "self_attn.o_proj")
    right = producers_of(view)[site]
    wrong = [
        Producer("input_layernorm", torch.arange(64)),
        Producer("self_attn.v_proj", GROUPED.flip(0)),
        Producer("self_attn.k_proj", GROUPED),
        Producer("self_attn.q_proj", torch.arange(64)),
    ]
    for candidate in wrong:
        only(monkeypatch, candidate)
        assert producers_of(view)[site] is None
    only(monkeypatch, *wrong, right)
    assert producers_of(view)[site] is right


@pytest.mark.parametrize("family, one_plus", [("llama", True), ("gemma2", False)])
def test_how_a_norms_weight_acts_is_proven_too(tiny_model, monkeypatch, family, one_plus):
    bench = blocks.load(tiny_model(family))
    only(monkeypatch, Producer("input_layernorm", torch.arange(64), one_plus))
    assert producers_of(bench.view())[bench.sites[0]] is None
    right = Producer("input_layernorm", torch.arange(64), not one_plus)
    only(monkeypatch, right)
    assert producers_of(bench.view())[bench.sites[0]] is right


# ---- blocks made to mislead


class Block(nn.Module):
    """norm, fc1, what `between` does, fc2; `residual` says what else the norm's output feeds."""

    def __init__(self, between, residual=lambda normed: 0.0):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)
        self.between, self.residual = between, residual
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))

    def forward(self, x):
        normed = self.norm(x)
        return x + self.residual(normed) + self.fc2(self.between(self.fc1(normed)))


class Forked(Block):
    """Another linear reads what `seen` makes of the norm's output; what it says happens not to count."""

    def __init__(self, seen):
        super().__init__(torch.relu)
        self.fc3, self.seen = nn.Linear(16, 16), seen

    def forward(self, x):
        return super().forward(x) + 0 * self.fc3(self.seen(self.norm(x)))


def view_of(block: nn.Module, massive: float = 1.0) -> BlockView:
    """massive: how much larger than the others the first token is."""
    x = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(0))
    x[:, 0] *= massive
    block.requires_grad_(False)
    sites = find_sites(block, lambda: block(x))
    stored = lambda name, tensor: tensor  # noqa: E731
    return BlockView(block, sites, {}, {}, lambda: block(x), stored, block.get_submodule)


def producers(block: Block, massive: float = 1.0) -> list[str | None]:
    return [producer and producer.name for producer in producers_of(view_of(block, massive)).values()]


@pytest.mark.parametrize(
    "block, expected",
    [
        (Block(torch.relu), ["norm", "fc1"]),
        (Block(lambda h: h), ["norm", "fc1"]),
        (Block(torch.relu, lambda normed: normed), [None, "fc1"]),  # something else reads the norm
        (Block(torch.relu, lambda normed: normed.sum(-1, keepdim=True)), [None, "fc1"]),
        (Block(lambda h: torch.relu(h) ** 2), ["norm", None]),  # scales by the square
        (Block(torch.tanh), ["norm", None]),
        (Block(lambda h: h / h.norm(dim=-1, keepdim=True)), ["norm", None]),
        (Block(lambda h: leaky_relu(h).roll(1, -1)), ["norm", "fc1"]),  # found by following rows
        (Block(lambda h: h * torch.sigmoid(h.flip(-1))), ["norm", None]),  # up and gate in one
    ],
)  # fmt: skip
def test_only_what_is_linear_in_single_channels_counts(block, expected):
    assert producers(block) == expected


def test_one_massive_token_hides_no_other():
    """As in many models: alone it would say whether the output moved."""
    assert producers(Block(torch.relu, lambda normed: normed), massive=1e7) == [None, "fc1"]


def test_inputs_of_other_sites_must_not_move_even_if_the_output_does_not():
    assert producers(Forked(torch.tanh)) == [None, "fc1", None]


def test_sites_that_read_the_same_norm_share_a_fold():
    block = Forked(torch.clone)
    assert producers(block) == ["norm", "fc1", "norm"]
    (norm, _) = folds_of(view_of(block))
    assert norm.columns == ("fc1.weight", "fc3.weight")


def test_rows_are_followed_through_a_permutation():
    order = torch.randperm(32, generator=torch.Generator().manual_seed(2))
    view = view_of(Block(lambda h: leaky_relu(h[..., order])))
    assert torch.equal(producers_of(view)[view.sites[1]].rows, order)


def test_channels_that_share_a_row_take_their_mean():
    producer = Producer("v", torch.tensor([3, 4, 3, 4, 6]))
    assert producer.tied(torch.tensor([1.0, 2, 5, 8, 7])).tolist() == [3, 5, 3, 5, 7]
