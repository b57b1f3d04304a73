"""What config.json leaves out, against what transformers fills in."""

import json

import pytest
import torch
import transformers as hf

from quantkit.capacity import attention, defaults, source
from quantkit.capacity.attention import layer_caches
from quantkit.capacity.families import FAMILIES
from quantkit.capacity.settings import Settings
from quantkit.errors import QuantkitError

OLD = ("RefinedWeb", "RefinedWebModel")  # names that transformers no longer has
CONFIGS = hf.CONFIG_MAPPING
NAMES = sorted({*defaults.DEFAULTS, *attention.FAMILIES, *FAMILIES} - {*OLD})
SHAPE = {"hidden_size": 768, "num_attention_heads": 6}


@pytest.mark.parametrize("family", NAMES)
def test_what_is_left_out_is_what_transformers_fills_in(family):
    """Of a model of 768 columns and 6 heads, of which the file says nothing else."""
    config = CONFIGS[family](**SHAPE)
    found = Settings.of({"model_type": family, **SHAPE})
    assert found.vocabulary == config.vocab_size
    contexts = [getattr(config, name) for name in defaults.SYNONYMS[2] if getattr(config, name, None)]
    assert found.context == (contexts[0] if contexts and family != "bloom" else None)
    if family not in ("falcon", "gpt_bigcode", "mpt"):  # whose own names for it the cache's tests compare
        assert found.kv_heads == (getattr(config, "num_key_value_heads", None) or 6)
    if family not in attention.LATENT:
        assert found.head_dim == (getattr(config, "head_dim", None) or 128)
    if not family.startswith("qwen"):  # which slide on demand
        assert found.get("sliding_window") == getattr(config, "sliding_window", None)


@pytest.mark.parametrize("family", defaults.DEFAULTS)
def test_every_default_is_that_of_the_configuration_class(family):
    config = CONFIGS[family]()
    for key, value in defaults.DEFAULTS[family].items():
        names = next((group for group in defaults.SYNONYMS if key in group), (key,))
        stated = [getattr(config, name) for name in names if getattr(config, name, None) is not None]
        assert stated and set(stated) == {value}, key


def test_a_family_without_a_default_says_what_is_absent():
    with pytest.raises(QuantkitError, match="says no num_attention_heads, and strange has no") as refused:
        _ = Settings.of({"model_type": "strange"}).heads
    assert refused.value.exit_code == 4


def test_null_is_no_omission():
    """As transformers has it: as many key/value heads as heads, and no window."""
    told = {"model_type": "mistral", "num_attention_heads": 16, "hidden_size": 1024, "num_hidden_layers": 1}
    assert Settings.of(told).kv_heads == 8 and layer_caches(Settings.of(told))[0].window == 4096
    null = Settings.of(told | {"num_key_value_heads": None, "sliding_window": None})
    assert null.kv_heads == 16 and layer_caches(null)[0].kind == "full"


def test_a_number_under_another_name_is_not_filled_in():
    told = Settings.of({"model_type": "qwen3_moe", "num_experts": 64, "n_head": 7})
    assert told.size("num_local_experts", "num_experts") == 64 and told.heads == 7


@pytest.mark.parametrize(
    "text, cache",
    [
        (  # Gemma 3 4B, as published: no vocabulary, no heads
            {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
            2 * 4 * 256 * (29 * 1024 + 5 * 8192),
        ),
        (  # Gemma 3 27B
            {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62}
            | {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128},
            2 * 16 * 128 * (52 * 1024 + 10 * 8192),
        ),
    ],
)
def test_gemma_3_as_published(tmp_path, text, cache):
    text = text | {"sliding_window": 1024}
    path = tmp_path / "config.json"
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **text}}
    path.write_text(json.dumps(config | {"vision_config": {"hidden_size": 1152}}))
    found = source.read(str(path))
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(hf.Gemma3TextConfig(**text))
    assert found.parameters.count == sum(parameter.numel() for parameter in model.parameters())
    assert "only the language model is counted" in found.notes[0]
    layers = layer_caches(found.settings)
    assert sum(layer.values * layer.tokens(8192) for layer in layers) == cache
