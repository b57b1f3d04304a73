"""Tiny random models of transformers' families, their configurations shrunk by rules for settings' names.

There is no table of architectures: a rule of `SIZES` serves every family that has such a setting. Where the
settings do not fit together then, repairs are tried one after another. `SPECIAL` names what no rule finds.
"""

from __future__ import annotations

import re
from pathlib import Path

VOCABULARY, TOKENS, HEAD = 512, 24, 16
WEIGHTS = 12_000_000  # of a tiny model
SIZES = [  # (what a setting's name matches, its value); the first counts
    (r"\w*vocab(_size\w*)?|num_embeddings|codebook_size", VOCABULARY),
    (r"n_embd|dim|d_model|emb_dim|embedding_size|lru_width|output_proj_dims|hidden_size_per_layer_input", 64),
    (r"num_key_value_heads|num_kv_heads|n_head_kv|linear_num_key_heads|\w+_key_value_heads", 2),
    (r"mamba_n_heads|mamba_num_heads|\w*linear_num_value_heads", 8),
    (r"num_attention_heads|num_heads|n_heads?|\w+_num_heads|\w+_n_heads?|\w+_attention_heads", 4),
    (r"rotary_dim|qk_rope_head_dim", 16),
    (r"head_dim|mamba_d_head|mamba_headdim|kv_channels|head_size|\w+_head_dim|d_head", 16),
    (r"(\w*intermediate_size\w*|ffn_dim|n_inner|d_ff|\w*ffn_hidden_size|mamba_d_ssm)", 128),
    (r"time_step_rank|mamba_dt_rank", 8),
    (r"base_channels", 32),
    (r"\w*(hidden|embed(ding)?|output|input|model|proj|projection|projector|adapter|attn|bottleneck)_?"
     r"(size|dim)|\w*(_rank|low_rank\w*)", 64),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|num_selected_experts|top_k_experts|top_?k|(moe|num)_(top_?)?k", 2),
    (r"n_groups?|num_expert_group|topk_group|mamba_n_groups|first_k_dense_replace|n_shared_experts", 1),
    (r"state_size|mamba_d_state|ssm_state_size", 16),
    (r"attn_layer_period|expert_layer_period", 2),
    (r"attn_layer_offset|expert_layer_offset", 1),
    (r"chunk_size|mamba_chunk_size", 16),
    (r"max_position_embeddings|n_positions|max_seq_len|max_sequence_length", 256),
    (r"sliding_window|attention_window_size|attention_chunk_size", 16),
]  # fmt: skip
DEPTH = r"num_hidden_layers|n_layers?|num_layers|decoder_layers|encoder_layers|depth|num_blocks"
SHARED = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
          "num_kv_shared_layers": 2}  # fmt: skip
SPECIAL = {  # settings that no rule finds, by model type
    "cohere_compass_text": {"rope_parameters": {
        kind: {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [4, 2, 2]}
        for kind in ("full_attention", "sliding_attention")}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "emu3": {"vocabulary_map": {"<|extra_200|>": 3, "<image>": 4}},
    "gemma3n_text": SHARED | {"activation_sparsity_pattern": [0.5, 0.0] * 2, "intermediate_size": 128},
    "gemma4_text": SHARED,
    "gemma4_unified_text": SHARED,
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "granite4_vision": {"deepstack_layer_map": [], "spatial_target_layers": [], "downsample_rate": "1/2"},
    "hunyuan_vl_text": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 16, "qk_head_dim": 32},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
                       "indexer_budget": 8, "indexer_compress_ratio": 4},
    "reformer": {"axial_pos_embds": False},
    "step3p5": {"sliding_window": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2,
              "attention_hidden_size": 128},
}  # fmt: skip
REPAIRS = (  # tried one after another where a configuration does not fit together
    {}, {"num_heads": 8}, {"num_key_value_heads": 4}, {"head_dim": 32}, {"head_dim": 64, "num_heads": 2},
    {"rope_parameters": None}, {"rope_scaling": None}, {"num_attention_heads": 2},
    {"sections": [4, 2, 2]}, {"sections": [2, 1, 1]}, {"fill": True}, {"head_dim": 8}, {"blocks": 4},
    {"blocks": 8}, {"mamba_d_head": 16},
)  # fmt: skip
OTHER_INPUTS = r"pixel_values|image_embed|inputs_embeds|positional argument"  # models that do not run on text


def families() -> dict[str, str]:
    """Model type -> `text` or `wrapper`, which holds a language model beside other things."""
    from transformers.models.auto import modeling_auto as auto

    wrappers = dict.fromkeys(auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, "wrapper")
    return dict.fromkeys(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "text") | wrappers


def built(family: str):
    """A random model whose parameters have no value they would have by default.

    Tries one repair after another until the settings fit together; raises what was wrong first.
    """
    import torch
    import transformers

    make = transformers.CONFIG_MAPPING[family]
    kind = "MultimodalLM" if families()[family] == "wrapper" else "CausalLM"
    auto = getattr(transformers, f"AutoModelFor{kind}")
    first, model = None, None
    for repair in REPAIRS:
        torch.manual_seed(0)
        try:
            config = make(**shrunk(make(), repair))
            with torch.device("meta"):
                check_tiny(auto.from_config(config))
            model = auto.from_config(config, dtype=torch.float32).eval()
            with torch.no_grad():
                model(input_ids=torch.arange(TOKENS)[None] + 8, use_cache=False)
            break
        except Exception as error:
            first = first or error
    else:
        if model is None or not re.search(OTHER_INPUTS, str(first)):
            raise first
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.05)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def check_tiny(model) -> None:
    """Raise ValueError for a model that its settings did not shrink."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    if weights > WEIGHTS:
        largest = max(model.named_parameters(), key=lambda pair: pair[1].numel())
        raise ValueError(f"{weights} weights are too many: {largest[0]} is {list(largest[1].shape)}")


def shrunk(config, repair: dict) -> dict:
    """Settings that make a model of `config`'s kind tiny, those of sub-configurations included."""
    settings = config.to_dict()
    depth = next((settings[key] for key in settings if re.fullmatch(DEPTH, key)), 2)
    kinds = [value for value in settings.values() if isinstance(value, list) and len(value) == depth]
    first = [kind.index(value) for kind in kinds for value in kind if isinstance(value, str)]
    blocks = repair.get("blocks") or min(max([2, *(index + 1 for index in first)]), 8)
    found = {}
    for key, value in settings.items():
        sub = vars(config).get(key)
        if hasattr(sub, "to_dict"):
            found[key] = {"model_type": sub.model_type} | shrunk(sub, repair)
        elif re.fullmatch(DEPTH, key):
            found[key] = min(blocks, value) if isinstance(value, int) else value
        elif isinstance(value, list) and len(value) == depth and depth > 2:
            found[key] = value[:blocks]
        else:
            found |= smaller(key, value, bool(repair.get("fill")))
    if "qk_nope_head_dim" in settings:  # the others follow from it
        found = {key: value for key, value in found.items() if key not in ("head_dim", "qk_head_dim")}
        found["num_key_value_heads"] = 4
    if repair.get("sections") and isinstance(settings.get("rope_parameters"), dict):
        found["rope_parameters"] = settings["rope_parameters"] | {"mrope_section": repair["sections"]}
    return (
        found
        | {key: value for key, value in repair.items() if key in settings}
        | SPECIAL.get(config.model_type, {})
    )


def smaller(key: str, value, filled: bool) -> dict:
    """A setting with a value for a tiny model, or none where the default does."""
    size = next((size for pattern, size in SIZES if re.fullmatch(pattern, key)), None)
    if key == "is_decoder":
        return {key: True}
    if isinstance(value, dict) and (sections := value.get("mrope_section")):
        last = [HEAD // 2 * part // sum(sections) for part in sections[1:]]
        return {key: value | {"mrope_section": [HEAD // 2 - sum(last), *last]}}
    if re.search(r"feature_layers?$|layer_ind|visual_indexes$", key) and isinstance(value, (list, int)):
        return {key: [0] if isinstance(value, list) else min(value, 0)}
    if not isinstance(value, int) or isinstance(value, bool):
        return (
            {key: size}
            if value is None and filled and size and re.search("expert|group|moe|head_dim", key)
            else {}
        )
    if key.endswith(("token_id", "token_index")):
        return {key: value % 8}
    return {key: min(size or value, value)} if value > 0 else {}


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of single bytes."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(["<s>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<s>").save_pretrained(folder)
