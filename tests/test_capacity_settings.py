"""What config.json leaves out: transformers fills it in, if anything needs it."""

import json

import pytest
import torch
import transformers as hf

from quantkit.capacity import Unsupported, meta, source
from quantkit.capacity.kv_cache import layer_caches
from quantkit.capacity.settings import Settings
from quantkit.errors import QuantkitError


def test_a_family_without_a_default_says_what_is_absent():
    with pytest.raises(QuantkitError, match="has no num_attention_heads, and strange has no") as refused:
        _ = Settings.of({"model_type": "strange"}).heads
    assert refused.value.exit_code == 4


def test_a_language_model_that_the_family_does_not_have():
    config = {"model_type": "llama", "num_hidden_layers": 2, "text_config": {"a": 1}}
    with pytest.raises(Unsupported, match="is invalid for llama: it has no part that is called text_config"):
        meta.settings(config)


def test_null_is_no_omission():
    """As many key/value heads as heads, and no window."""
    told = {"model_type": "mistral", "num_attention_heads": 16, "hidden_size": 1024, "num_hidden_layers": 1}
    found = source.from_config(told)
    settings = found.settings
    assert settings.kv_heads == 8 and layer_caches(settings, found)[0].window == 4096
    assert Settings.of(told | {"num_key_value_heads": None}).kv_heads == 16
    null = source.from_config(told | {"sliding_window": None})
    assert layer_caches(null.settings, null)[0].kind == "full"


def test_what_is_left_out_is_filled_in_unless_it_is_said_under_another_name():
    told = Settings.of({"model_type": "qwen3_moe", "num_experts": 64, "n_head": 7})
    assert told.size("num_local_experts", "num_experts") == 64 and told.heads == 7
    assert told.context == 32768 and told.filled("num_experts_per_tok") == 8
    assert Settings.of({"model_type": "falcon"}).context == 2048
    assert Settings.of({"model_type": "bloom"}).context is None
    assert Settings.of({"model_type": "gpt2", "n_ctx": 512}).context == 512


def test_gemma_3_as_published(tmp_path):
    """The 4B, whose file names neither a vocabulary nor heads."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    path = tmp_path / "config.json"
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **text}}
    path.write_text(json.dumps(config | {"vision_config": {"hidden_size": 1152}}))
    found = source.read(str(path))
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(hf.Gemma3TextConfig(**text))
    assert found.parameters.count == sum(parameter.numel() for parameter in model.parameters())
    assert "only the language model is counted" in found.notes[0]
    layers = layer_caches(found.settings, found.parameters)
    assert sum(layer.values * layer.tokens(8192) for layer in layers) == 2 * 4 * 256 * (29 * 1024 + 5 * 8192)
    assert layers == layer_caches(Settings.of(config))  # measured
