"""Tensors of a model from its headers, and from config.json alone."""

import json
import math

import jobs
import pytest
import torch
import transformers as hf
from families import FAMILIES, GROUPED, KINDS, save_model
from nights import by_day
from published import CONFIGS, PARAMETERS

from quantkit.capacity import parameters, source
from quantkit.capacity.settings import Settings
from quantkit.errors import QuantkitError


@pytest.mark.parametrize("family, blocks", [("mixtral", 3), ("qwen3_moe", 3), ("deepseek_v3", 2)])
def test_experts_are_counted(family, blocks):
    """transformers fuses them as it loads; the hub's files hold them one by one."""
    make, arguments = KINDS[family]
    config = make(**arguments)
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    found = source.from_config(json.loads(config.to_json_string()))
    assert found.count == sum(parameter.numel() for parameter in model.parameters())
    experts = [tensor for tensor in found.tensors if ".experts." in tensor.name]
    assert found.active == found.count - sum(tensor.size for tensor in experts) // 2
    assert len(experts) == blocks * 4 * 3 and all(tensor.is_linear for tensor in experts)
    routers = [t for t in found.tensors if t.name.endswith("gate.weight")]
    assert len(routers) == blocks and not any(t.is_linear for t in routers)


def test_experts_that_are_no_list_are_counted_too():
    """Granite's lie in one tensor; without a word on how many a token meets, the active ones are unknown."""
    settings = Settings({**GROUPED, "model_type": "granitemoe", "num_local_experts": 4} | {"moe_topk": 1})
    stored = {"model.embed_tokens.weight": (512, 64)}
    for block in range(3):
        mixture = f"model.layers.{block}.block_sparse_moe"
        stored |= {
            f"{mixture}.input_linear.weight": (4, 256, 64),
            f"{mixture}.output_linear.weight": (4, 64, 128),
        }
        stored[f"{mixture}.router.layer.weight"] = 4, 64
    infos = [parameters.Tensor(name, shape, 2 * math.prod(shape)) for name, shape in stored.items()]
    found = parameters.from_headers(infos, settings)
    assert found.active == found.count - 3 * 3 * (256 * 64 + 64 * 128)
    shapes = {linear.shape for linear in found.linears}
    assert shapes == {(128, 64), (64, 128)} and len(found.linears) == 3 * 4 * 3
    for odd in ((10**9, 0, 64), (0, 64, 64), (4, 64, 5), (10**5, 64, 64)):
        other = parameters.Tensor("model.layers.0.mlp.experts.down_proj", odd, 2 * math.prod(odd))
        assert parameters.from_headers([*infos, other], settings).count == found.count + math.prod(odd)
    unsaid = Settings({key: value for key, value in settings.values.items() if "experts" not in key})
    assert parameters.from_headers(infos, unsaid).active is None


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_counts(name):
    assert source.from_config(CONFIGS[name]).count == PARAMETERS[name]


@pytest.mark.parametrize("family", by_day(FAMILIES, ["llama", "gpt2", "phi3", "gemma3", "bloom", "falcon"]))
def test_headers_and_configuration_agree(family, tmp_path):
    folder = save_model(tmp_path / family, family)
    found = source.read(str(folder))
    assert found.basis == "safetensors headers" and found.parameters.exact
    computed = source.read(str(folder / "config.json"))
    assert computed.basis == "config.json" and not computed.parameters.exact
    assert found.parameters.count == computed.parameters.count
    assert found.parameters.stored_bytes == computed.parameters.stored_bytes
    linears = {(t.local, t.block, t.out_features, t.in_features) for t in found.parameters.linears}
    assert linears == {(t.local, t.block, t.out_features, t.in_features) for t in computed.parameters.linears}


def test_buffers_and_copies_of_a_tied_head_are_no_parameters(tmp_path):
    folder = save_model(tmp_path / "m", "gpt2")
    before = source.read(str(folder)).parameters
    with jobs.edited(folder) as stored:
        stored["transformer.h.0.attn.bias"] = torch.ones(1, 1, 256, 256)
        stored["transformer.h.0.attn.masked_bias"] = torch.ones(())
        stored["lm_head.weight"] = stored["transformer.wte.weight"].clone()
    found = source.read(str(folder)).parameters
    assert (found.count, found.stored_bytes) == (before.count, before.stored_bytes) and found.is_tied


@pytest.mark.parametrize(
    "change, words",
    [
        ({"num_hidden_layers": 5}, "5 blocks, but no stored lists are so long"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers is 'three'"),
        ({"num_hidden_layers": 10**9}, "not a number from 1 to 10000"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_local_experts": 10**9}, "num_local_experts is 1000000000, not a number"),
        ({"model_type": None}, "names no model_type"),
    ],
)
def test_a_broken_configuration_is_refused(change, words, tmp_path):
    folder = save_model(tmp_path / "m", "llama")
    jobs.configure(folder, **change)
    with pytest.raises(QuantkitError, match=words):
        source.read(str(folder))
        source.read(str(folder / "config.json"))


def test_an_unknown_family_needs_headers(tmp_path):
    folder = save_model(tmp_path / "m", "llama")
    jobs.configure(folder, model_type="strange")
    assert source.read(str(folder)).parameters.exact
    with pytest.raises(QuantkitError, match="parameters of strange cannot be computed") as refused:
        source.read(str(folder / "config.json"))
    assert refused.value.exit_code == 4 and "--params" in refused.value.hint


def test_counts_in_words():
    written = ("175B", "1.5b", "350M", "12,000", "1.5e9", "7E+9", "7.e9")
    found = [source.parse_count(text)[0] for text in written]
    assert found == [175 * 10**9, 1_500_000_000, 350 * 10**6, 12000, 1_500_000_000, 7 * 10**9, 7 * 10**9]
    assert source.parse_count("671B") == (671 * 10**9, 671 * 10**9)
    assert source.parse_count("30.5B-A3.3b") == (30_500_000_000, 3_300_000_000)
    for text in ("", "B", "-7B", "0", "1e99", "9" * 40, "7B-A", "-A3B", "3B-A7B", "7e-9", "nan", "inf"):
        with pytest.raises(QuantkitError, match="no number of parameters"):
            source.parse_count(text)
    with pytest.raises(QuantkitError, match="--params 70 is no more than 70 parameters") as refused:
        source.parse_count("70")
    assert "--params 70B" in refused.value.hint
