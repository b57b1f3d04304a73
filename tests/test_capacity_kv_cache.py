"""The cache of keys and values: textbook cases, and the tensors that transformers really keeps."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import transformers as hf
from families import FAMILIES, FURTHER, GROUPED, KINDS, STREAMS, save_model
from nights import by_day
from published import CONFIGS

from quantkit.capacity import Unsupported, kv_cache, source
from quantkit.capacity.kv_cache import LayerCache, layer_caches
from quantkit.capacity.settings import Settings
from quantkit.models import kv_types

GIB = 1 << 30
TOKENS = 40  # longer than the windows of the tests


def caches(name: str, **changes) -> list[LayerCache]:
    return layer_caches(Settings.of(CONFIGS[name] | changes))


# ---- textbook


def test_grouped_heads_share():
    """Llama 2 70B has 64 heads and keeps 8."""
    grouped = kv_cache.sequence_bytes(caches("Llama-2-70b"), 4096, Fraction(2))
    assert grouped == 1.25 * GIB
    assert (
        kv_cache.sequence_bytes(caches("Llama-2-70b", num_key_value_heads=64), 4096, Fraction(2))
        == 8 * grouped
    )


def test_a_window_bounds_the_cache():
    mistral = caches("Mistral-7B")
    assert kv_cache.values(mistral, 4096) == kv_cache.values(mistral, 100_000) == 4096 * 32 * 2 * 8 * 128
    gemma = caches("gemma-2-9b")  # every other layer slides
    assert [cache.kind for cache in gemma[:3]] == ["sliding", "full", "sliding"]
    assert kv_cache.values(gemma, 8192) == 21 * 2 * 8 * 256 * (4096 + 8192)


def test_precision_of_the_cache():
    kept = caches("Llama-2-13b")
    for dtype, factor in (("float32", 2), ("fp8", 0.5), ("q8_0", 34 / 64), ("q4_0", 18 / 64)):
        found = kv_cache.sequence_bytes(kept, 4096, kv_types.TYPES[dtype].nbytes)
        assert found == factor * 3.125 * GIB, dtype


# ---- the tensors that transformers keeps

KNOWN = FAMILIES | FURTHER | KINDS | STREAMS
OTHERWISE = {  # numbers that are equal there
    "bamba": {"mamba_n_groups": 2},
    "deepseek_v3": {"qk_rope_head_dim": 8},
    "gemma3n": {},
    "gemma4": {},
    "jamba": {},
    "mamba2": {"n_groups": 2},
    "mixtral": {},
    "qwen3_next": {"linear_value_head_dim": 24},
    "smollm3": {},
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
WITHOUT_LAYERS = {key: value for key, value in GROUPED.items() if key != "num_hidden_layers"}
MORE = {
    "qwen2 sliding": (
        hf.Qwen2Config,
        {**GROUPED, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "olmo3": (hf.Olmo3Config, {**GROUPED, "sliding_window": 16, "num_hidden_layers": 5}),
    "cohere2": (hf.Cohere2Config, {**GROUPED, "sliding_window": 16, "num_hidden_layers": 5}),
    "gpt_oss": (hf.GptOssConfig, {**GROUPED, "head_dim": 16, "sliding_window": 16, "num_local_experts": 4}),
    "gemma3n shared": (
        hf.Gemma3nTextConfig,
        STREAMS["gemma3n"][1]
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "intermediate_size": [128] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
            "num_kv_shared_layers": 2,
            "sliding_window": 16,
        },
    ),
    "llama4": (
        hf.Llama4TextConfig,
        {
            **WITHOUT_LAYERS,
            "num_hidden_layers": 5,
            "head_dim": 16,
            "intermediate_size_mlp": 128,
            "num_local_experts": 2,
            "attention_chunk_size": 16,
            "no_rope_layers": [],
        },
    ),
    "deepseek_v2": (
        hf.DeepseekV2Config,
        KINDS["deepseek_v3"][1] | {"qk_rope_head_dim": 8, "topk_method": "greedy"},
    ),
    "granitemoehybrid": (
        hf.GraniteMoeHybridConfig,
        {
            **GROUPED,
            **MAMBA,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "shared_intermediate_size": 64,
        },
    ),
    "falcon_h1": (hf.FalconH1Config, {**GROUPED, **MAMBA, "mamba_d_ssm": 128}),
    "nemotron_h": (
        hf.NemotronHConfig,
        {
            **WITHOUT_LAYERS,
            "head_dim": 16,
            "layers_block_type": ["mamba", "mlp", "attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
        },
    ),
    "lfm2": (
        hf.Lfm2Config,
        {**GROUPED, "layer_types": ["conv", "conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "mamba": (hf.MambaConfig, {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}),
}
CASES = FAMILIES | MORE | {name: (KNOWN[name][0], KNOWN[name][1] | more) for name, more in OTHERWISE.items()}


def kept_by_transformers(config) -> list[int]:
    """Numbers that each layer of a random model keeps of TOKENS tokens; of windows one token more.

    A sliding layer drops the token that the next one pushes out before that one comes.
    """
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        cache = model(torch.arange(TOKENS)[None] % 500, use_cache=True)
    cache = getattr(cache, "past_key_values", None) or cache.cache_params
    found = []
    for layer in cache.layers:
        count = 0
        for name in ("keys", "values"):
            tensor = getattr(layer, name, None)
            if tensor is not None and tensor.numel():
                window = getattr(layer, "is_sliding", False) and tensor.shape[-2] < TOKENS
                count += tensor.numel() * (tensor.shape[-2] + window) // tensor.shape[-2]
        for states in (getattr(layer, "conv_states", None), getattr(layer, "recurrent_states", None)):
            each = states.values() if isinstance(states, dict) else states or []
            count += sum(tensor.numel() for tensor in each if tensor is not None)
        found.append(count)
    return found


DAY = ("llama", "mistral", "gemma3", "gemma3n shared", "gpt_oss", "llama4", "deepseek_v3", "jamba", "mamba2")
DAY += ("falcon_h1", "qwen3_next", "lfm2", "gpt2", "falcon")


@pytest.mark.parametrize("name", by_day(CASES, DAY))
def test_layers_keep_what_transformers_keeps(name):
    make, arguments = CASES[name]
    config = make(**arguments)
    found = layer_caches(Settings.of(config.to_dict()))
    counts = [cache.values * cache.tokens(TOKENS) + cache.conv + cache.state for cache in found]
    assert counts == kept_by_transformers(config)


@pytest.mark.parametrize("name", by_day(FAMILIES, DAY))
def test_headers_tell_what_the_model_keeps(name, tmp_path):
    found = source.read(str(save_model(tmp_path / "m", name)))
    told = layer_caches(replace(found.settings, config=None), found.parameters)
    assert told == layer_caches(found.settings)  # measured, without the stored projections


# ---- refused rather than guessed


@pytest.mark.parametrize(
    "config, words",
    [
        ((hf.RecurrentGemmaConfig, {"num_hidden_layers": 3}), "recurrent_gemma is not known"),
        ((hf.RwkvConfig, {"num_hidden_layers": 3}), "rwkv is not known"),
        ((hf.MiniMaxConfig, {}), "caches of 31 of its 32 layers"),
    ],
)
def test_unknown_kinds_of_attention_are_refused(config, words):
    make, arguments = config
    with pytest.raises(Unsupported, match=words):
        layer_caches(Settings.of(make(**arguments).to_dict()))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"layer_types": ["full_attention"] * 31}, "must be equal to the number of `layer_types`"),
        ({"layer_types": ["new_attention"] * 32}, "`layer_types` entries must be in"),
        ({"layer_types": ["sliding_attention"] * 32, "sliding_window": None}, "cannot run its mistral"),
        ({"model_type": "strange", "sliding_window": 64}, "the sliding layers are unknown"),
        ({"model_type": "strange", "sliding_window": None}, "strange is not known"),
        ({"model_type": "strange", "sliding_window": None, "kv_lora_rank": 64}, "says kv_lora_rank"),
    ],
)
def test_half_known_layers_are_refused(changes, words):
    with pytest.raises(Unsupported, match=words):
        caches("Mistral-7B", **changes)


def test_an_unknown_family_is_known_by_its_projections(tmp_path):
    folder = save_model(tmp_path / "m", "qwen3")
    found = source.read(str(folder))
    strange = Settings(found.settings.values | {"model_type": "strange"})
    assert layer_caches(strange, found.parameters) == layer_caches(found.settings, found.parameters)
    fused = source.read(str(save_model(tmp_path / "f", "phi3")))
    with pytest.raises(Unsupported, match="no k_proj and v_proj give the heads"):
        layer_caches(Settings(fused.settings.values | {"model_type": "strange"}), fused.parameters)


def test_weights_of_another_shape_than_the_configuration_says(tmp_path):
    found = source.read(str(save_model(tmp_path / "m", "llama")))
    other = Settings(found.settings.values | {"num_key_value_heads": 4})
    with pytest.raises(
        Unsupported, match="config.json says 128 values a token and layer, k_proj and v_proj 64"
    ):
        layer_caches(other, found.parameters)


def test_layers_of_llama_4_where_its_file_does_not_name_their_types():
    make, arguments = MORE["llama4"]
    told = make(**arguments).to_dict()
    expected = layer_caches(Settings.of(told))
    assert [cache.kind for cache in expected] == ["chunked"] * 3 + ["full", "chunked"]
    published = {key: value for key, value in told.items() if key not in ("layer_types", "no_rope_layers")}
    assert layer_caches(Settings.of(published)) == expected
    assert layer_caches(Settings.of(published | {"no_rope_layers": [1, 1, 1, 0, 1]})) == expected
    with pytest.raises(Unsupported, match="must be equal to the number of `layer_types`"):
        layer_caches(Settings.of(published | {"no_rope_layers": [1, 0]}))
