"""Tiny random checkpoints of the families the tests run on, and a tiny tokenizer. Made, never downloaded."""

import functools
import itertools
import random
from pathlib import Path

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 512
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
GATED = {**SHAPE, "intermediate_size": 128}
GROUPED = {**GATED, "num_key_value_heads": 2}
WINDOW = 16  # of the families with sliding attention: shorter than the sequences of the tests
FAMILIES = {  # name -> (configuration class, its arguments)
    "llama": (hf.LlamaConfig, GROUPED),
    "mistral": (hf.MistralConfig, {**GROUPED, "sliding_window": WINDOW}),
    "qwen2": (hf.Qwen2Config, GROUPED),
    "qwen3": (hf.Qwen3Config, {**GROUPED, "head_dim": 16}),
    "gemma2": (hf.Gemma2Config, {**GROUPED, "head_dim": 16, "sliding_window": WINDOW}),
    "gemma3": (
        hf.Gemma3TextConfig,
        {
            **GROUPED,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3": (hf.Phi3Config, {**GROUPED, "pad_token_id": 0}),
    "gpt2": (hf.GPT2Config, SHAPE),
    "opt": (hf.OPTConfig, {**SHAPE, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "gpt_neox": (hf.GPTNeoXConfig, GATED),
    "bloom": (hf.BloomConfig, {key: SHAPE[key] for key in SHAPE if key != "max_position_embeddings"}),
    "falcon": (hf.FalconConfig, SHAPE),
    "gpt_bigcode": (hf.GPTBigCodeConfig, SHAPE),
    "stablelm": (hf.StableLmConfig, GROUPED),
    "olmo2": (hf.Olmo2Config, GROUPED),
    "cohere": (hf.CohereConfig, GROUPED),
    "granite": (hf.GraniteConfig, GROUPED),
    "starcoder2": (hf.Starcoder2Config, GROUPED),
}
FURTHER = {  # of which only GGUF files are tested
    "glm": (hf.GlmConfig, {**GROUPED, "head_dim": 16, "pad_token_id": 0}),
    "glm4": (hf.Glm4Config, {**GROUPED, "head_dim": 32, "pad_token_id": 0}),
    "exaone4": (
        hf.Exaone4Config,
        {**GROUPED, "sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "smollm3": (hf.SmolLM3Config, {**GROUPED, "num_hidden_layers": 5, "pad_token_id": 0}),
    "nemotron": (hf.NemotronConfig, GROUPED),
    "qwen3_5": (
        hf.Qwen3_5TextConfig,
        {
            **GROUPED, "head_dim": 32, "num_hidden_layers": 4, "linear_num_key_heads": 4,
            "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        },
    ),
}  # fmt: skip
PER_LAYER = {
    **GROUPED,
    "head_dim": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}
EXPERTS = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
KINDS = {  # of blocks beside the plain ones: mixtures and hybrids
    "mixtral": (hf.MixtralConfig, {**GROUPED, "num_local_experts": 4}),
    "qwen3_moe": (hf.Qwen3MoeConfig, EXPERTS),
    "qwen2_moe": (hf.Qwen2MoeConfig, {**EXPERTS, "shared_expert_intermediate_size": 64}),
    "deepseek_v3": (  # a dense block, then experts with a shared one
        hf.DeepseekV3Config,
        {
            **GATED, "num_key_value_heads": 4, "moe_intermediate_size": 64, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
    "mamba2": (  # no attention at all
        hf.Mamba2Config,
        {
            "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8,
            "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16,
        },
    ),
    "jamba": (  # state-space blocks between attention, experts between dense layers
        hf.JambaConfig,
        {
            **GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 3,
            "attn_layer_offset": 2, "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 16,
            "mamba_dt_rank": 64, "use_mamba_kernels": False, "pad_token_id": 0,
        },
    ),
    "bamba": (hf.BambaConfig, {**GROUPED, **MAMBA, "mamba_chunk_size": 16, "attn_layer_indices": [1]}),
    "qwen3_next": (  # linear attention, convolutions and experts
        hf.Qwen3NextConfig,
        {
            **EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 64, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "olmo_hybrid": (  # whose convolutions transformers joins while it loads them
        hf.OlmoHybridConfig,
        {
            **GROUPED, "num_key_value_heads": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16, "pad_token_id": 0,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "bart": (  # as a decoder alone: its cross-attention is never called
        hf.BartConfig,
        {
            "vocab_size": VOCABULARY, "d_model": 64, "decoder_layers": 2, "decoder_ffn_dim": 128,
            "decoder_attention_heads": 4, "max_position_embeddings": 256, "is_encoder_decoder": False,
        },
    ),
}  # fmt: skip
STREAMS = {  # blocks that pass more than one stream of hidden states
    "gemma4": (  # blocks also read embeddings of the tokens, and keys and values of earlier blocks
        hf.Gemma4TextConfig,
        {
            **PER_LAYER,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 16,
            "num_kv_shared_layers": 2,
        },
    ),
    "gemma3n": (  # several streams of hidden states
        hf.Gemma3nTextConfig,
        {
            **PER_LAYER,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "intermediate_size": [128, 128],
            "activation_sparsity_pattern": [0.0, 0.0],
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "num_kv_shared_layers": 0,
        },
    ),
    "glm_moe_dsa": (  # a block may attend to the tokens that the one before has chosen
        hf.GlmMoeDsaConfig,
        {
            **KINDS["deepseek_v3"][1],
            "indexer_types": ["full", "shared", "full"],
            "index_topk": 8,
            "index_head_dim": 32,
            "index_n_heads": 2,
        },
    ),
}


def save_model(folder: Path, family: str, dtype: str = "float32", seed: int = 0, **overrides) -> Path:
    """Write a random model of `family` to `folder`. `overrides` go into its configuration.

    No parameter has a value it would have by default: matrices are normal(0, 0.05), norms and biases
    are 0.1 away from theirs, so that one that is lost, swapped or left out shows.
    """
    make, arguments = (FAMILIES | FURTHER | KINDS | STREAMS)[family]
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(make(**arguments | overrides), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.05)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def sentences(count: int = 400, seed: int = 0) -> list[str]:
    """Generated English-like sentences, and some in Hangul: the same for the same seed."""
    source = random.Random(seed)
    syllables = ["".join(pair) for pair in itertools.product("bdklmnprst", "aeiou")]
    words = ["".join(source.choices(syllables, k=source.randint(1, 3))) for _ in range(300)]
    hangul = ["".join(chr(source.randint(0xAC00, 0xAFFF)) for _ in range(3)) for _ in range(40)]
    pools = [hangul if k % 8 == 7 else words for k in range(count)]
    return [" ".join(source.choices(pool, k=source.randint(6, 12))).capitalize() + "." for pool in pools]


def save_tokenizer(folder: Path, bos: bool = False, seed: int = 0) -> Path:
    """Write a byte-level BPE tokenizer of 512 tokens, trained on `sentences(seed=seed)`, to `folder`; with
    `bos`, it begins texts with `<s>`."""
    _tokenizer(bos, seed).save_pretrained(folder)
    return folder


@functools.cache
def _tokenizer(bos: bool, seed: int) -> hf.PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(seed=seed), trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
