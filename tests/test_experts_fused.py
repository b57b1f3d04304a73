"""Checkpoints that hold all experts of a layer in one tensor: read in slices, written one by one."""

import re
from pathlib import Path

import families
import jobs
import pytest
import torch
import transformers as hf
from nights import nightly
from safetensors.torch import load_file
from sums import assert_sums
from test_skeleton import assert_same_logits, open_skeleton, rewrite, streamed, tokens, whole

from quantkit.errors import QuantkitError

EXPERTS = 4
MIXTURE = {**families.GROUPED, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}
MIXTURES = {
    "gpt_oss": (  # transposed, gate and up in turn, with biases
        hf.GptOssConfig,
        {**MIXTURE, "head_dim": 16, "sliding_window": families.WINDOW},
    ),
    "granitemoe": (hf.GraniteMoeConfig, MIXTURE),  # stored under other names
    "granitemoeshared": (hf.GraniteMoeSharedConfig, {**MIXTURE, "shared_intermediate_size": 64}),
    "aria_text": (  # transposed, stored as fc1 and fc2
        hf.AriaTextConfig,
        {**families.GROUPED, "moe_num_experts": EXPERTS, "moe_topk": 2, "pad_token_id": 0},
    ),
    "llama4": (  # every expert is given every token; the second block is dense
        hf.Llama4TextConfig,
        {
            **MIXTURE,
            "head_dim": 16,
            "intermediate_size_mlp": 128,
            "num_experts_per_tok": 1,
            "moe_layers": [0, 2],
            "attention_chunk_size": families.WINDOW,
            "pad_token_id": 0,
        },
    ),
}
FUSED = {
    "gpt_oss": "model.layers.0.mlp.experts.gate_up_proj",
    "granitemoe": "model.layers.0.block_sparse_moe.input_linear.weight",
    "granitemoeshared": "model.layers.0.block_sparse_moe.input_linear.weight",
    "aria_text": "model.layers.0.mlp.experts.fc1.weight",
    "llama4": "model.layers.0.feed_forward.experts.gate_up_proj",
}
PLACES = {
    "gpt_oss": "model.layers.0.mlp.experts",
    "granitemoe": "model.layers.0.block_sparse_moe.experts",
    "granitemoeshared": "model.layers.0.block_sparse_moe.experts",
    "llama4": "model.layers.0.feed_forward.experts",
}


@pytest.fixture
def mixture(tiny_model, monkeypatch):
    """`tiny_model` of one of MIXTURES; it is stored with its experts fused."""
    monkeypatch.setattr(families, "FAMILIES", families.FAMILIES | MIXTURES)

    def make(family: str, **arguments) -> Path:
        folder = tiny_model(family, **arguments)
        assert load_file(folder / "model.safetensors")[FUSED[family]].shape[0] == EXPERTS
        return folder

    return make


@pytest.mark.parametrize("family", MIXTURES)
def test_streamed_logits_equal_the_whole_models(mixture, family):
    folder = mixture(family)
    skeleton = open_skeleton(folder)
    for seed in (0, 1):
        ids = tokens(seed=seed)
        assert_same_logits(streamed(skeleton, ids), whole(folder, ids))


@pytest.mark.parametrize(
    ("method", "family"),
    [
        ("nf4", "granitemoe"),
        ("gptq", "gpt_oss"),
        ("nf4", "llama4"),  # its ids move to the device of the embedding's weight, which stays on disk
        *nightly(("nf4", "gpt_oss"), ("gptq", "llama4")),
    ],
)
def test_what_is_written_has_experts_one_by_one_and_evaluates(mixture, make, tmp_path, family, method):
    folder = mixture(family, tokenizer=True, dtype="bfloat16")
    text = tmp_path / "calibration.txt"
    calibration = jobs.calibration(tmp_path)
    options = jobs.GPTQ if method == "gptq" else {}
    kept, output = f"{PLACES[family]}.1.down_proj", tmp_path / "written"
    jobs.quantize(method, folder, output, options, exclude=(re.escape(kept),), calibration=calibration)
    written, source = jobs.tensors(output), jobs.tensors(folder)
    assert not source.keys() & {name for name in written if "experts." in name or "_linear" in name}
    name = f"{PLACES[family]}.0.gate_proj"
    assert written[f"{name}.{'qweight' if method == 'gptq' else 'weight'}"].dtype in (
        torch.int32,
        torch.uint8,
    )
    down = source[FUSED[family].replace("gate_up_proj", "down_proj").replace("input_linear", "output_linear")]
    assert torch.equal(written[f"{kept}.weight"], down[1] if family == "granitemoe" else down[1].t())
    if family == "gpt_oss":
        biases = source[f"{FUSED[family]}_bias"][2]
        assert torch.equal(written[f"{PLACES[family]}.2.up_proj.bias"], biases[1::2])
    scored = make("eval", folder, output, "--text", text, "--ctx", 32, "--limit", 640)
    assert 0 < scored["models"][1]["metrics"]["kld"]["mean"] < 0.02


@pytest.mark.parametrize(("family", "configured"), [("gpt_oss", 2), ("granitemoe", 8), ("llama4", 8)])
def test_a_number_of_experts_that_is_not_the_configurations_is_refused(mixture, refuse, family, configured):
    folder = mixture(family, tokenizer=True)
    jobs.configure(folder, num_local_experts=configured)
    before = sorted(folder.parent.rglob("*"))
    error, _ = refuse(1, "nf4", folder, "-o", folder.parent / "written")
    assert f"{FUSED[family]} is [{EXPERTS}, " in error
    assert f"{EXPERTS} experts instead of {configured}" in error
    assert sorted(folder.parent.rglob("*")) == before


def test_families_that_store_experts_one_by_one_may_have_them_fused(tiny_model):
    """As Qwen3.5-MoE is published: transformers reads both; what is written keeps the family's spelling."""
    one_by_one = tiny_model("qwen3_moe")
    ids = tokens()
    skeleton = open_skeleton(one_by_one)
    expected, names = streamed(skeleton, ids), skeleton.checkpoint.names
    model = hf.AutoModelForCausalLM.from_pretrained(one_by_one, dtype=torch.float32)
    rewrite(one_by_one, lambda stored: {name: tensor.clone() for name, tensor in model.state_dict().items()})
    skeleton = open_skeleton(one_by_one)
    assert_sums(streamed(skeleton, ids), expected, 1e-5)
    assert set(skeleton.checkpoint.names) == set(names)


def test_matrices_that_are_stored_the_other_way_round_are_read(mixture):
    """As Qwen3-VL-MoE's may be: transformers looks at the shapes, too."""
    folder = mixture("granitemoe")
    expected = streamed(open_skeleton(folder), tokens())
    rewrite(folder, lambda stored: {
        name: tensor.transpose(1, 2).contiguous() if tensor.ndim == 3 else tensor
        for name, tensor in stored.items()
    })  # fmt: skip
    assert_sums(streamed(open_skeleton(folder), tokens()), expected, 1e-5)


def test_nan_in_one_expert_is_named(mixture):
    folder = mixture("gpt_oss")

    def spoil(stored: dict) -> dict:
        stored[FUSED["gpt_oss"]][2, 5, 7] = torch.nan  # an odd output: of up
        return stored

    rewrite(folder, spoil)
    with pytest.raises(QuantkitError, match=r"layers\.0\.mlp\.experts\.2\.up_proj\.weight holds NaN"):
        streamed(open_skeleton(folder), tokens())
