"""Numbers of well-known models, as their config.json and their makers state them."""


def gated(family: str, hidden: int, inner: int, layers: int, heads: int, kv: int, vocabulary: int, **more):
    """config.json of a family that names its sizes as Llama does."""
    return {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
    } | more


CONFIGS = {
    "Llama-2-7b": gated("llama", 4096, 11008, 32, 32, 32, 32000, max_position_embeddings=4096),
    "Llama-2-13b": gated("llama", 5120, 13824, 40, 40, 40, 32000, max_position_embeddings=4096),
    "Llama-2-70b": gated("llama", 8192, 28672, 80, 64, 8, 32000, max_position_embeddings=4096),
    "Llama-3-8B": gated("llama", 4096, 14336, 32, 32, 8, 128256, max_position_embeddings=8192),
    "Mistral-7B": gated("mistral", 4096, 14336, 32, 32, 8, 32000, sliding_window=4096),
    "Mixtral-8x7B": gated(
        "mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2
    ),
    "gemma-7b": gated("gemma", 3072, 24576, 28, 16, 16, 256000, head_dim=256),
    "gemma-2-9b": gated("gemma2", 3584, 14336, 42, 16, 8, 256000, head_dim=256, sliding_window=4096),
    "Qwen2-7B": gated("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "Phi-3-mini": gated("phi3", 3072, 8192, 32, 32, 32, 32064),
    "gpt-neox-20b": gated("gpt_neox", 6144, 24576, 44, 64, 64, 50432),
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "bloom": {
        "model_type": "bloom",
        "n_embed": 14336,
        "n_layer": 70,
        "num_attention_heads": 112,
        "vocab_size": 250880,
    },
    "octocoder": {  # StarCoder's shapes
        "model_type": "gpt_bigcode",
        "n_embd": 6144,
        "n_inner": 24576,
        "n_layer": 40,
        "n_head": 48,
        "n_positions": 8192,
        "vocab_size": 49152,
        "multi_query": True,
    },
}
PARAMETERS = {  # counted from the published checkpoints
    "Llama-2-7b": 6_738_415_616,
    "Llama-2-13b": 13_015_864_320,
    "Llama-2-70b": 68_976_648_192,
    "Llama-3-8B": 8_030_261_248,
    "Mistral-7B": 7_241_732_096,
    "Mixtral-8x7B": 46_702_792_704,
    "gemma-7b": 8_537_680_896,
    "gemma-2-9b": 9_241_705_984,
    "Qwen2-7B": 7_615_616_512,
    "Phi-3-mini": 3_821_079_552,
    "gpt-neox-20b": 20_554_567_680,
    "gpt2": 124_439_808,
    "bloom": 176_247_271_424,
    "octocoder": 15_517_456_384,
}
