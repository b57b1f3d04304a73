"""Tensors of the known families: what config.json implies where there are no headers to read.

A line is the name of a module and the sizes of its weight, as stored. `+bias`: it has a bias; `+KEY`: it
has one where config.json says so; `?KEY`, `!KEY`: the module is there, or is not, where it says so. `*`
stands for every expert. Sizes: h hidden, q and kv all heads of queries and of keys, n and k their numbers,
d one head, f and m intermediate of the block and of an expert, e experts, v vocabulary, p positions,
w width of the embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """blocks: name of the list of decoder blocks; block: the lines of one; rest: those of everything else.

    tied: whether the head is the embedding where config.json does not say. defaults: of the switches in
    the lines. head: the module that a tie leaves out.
    """

    blocks: str
    block: str
    rest: str
    tied: bool = False
    defaults: Mapping[str, bool] = field(default_factory=dict)
    head: str = "lm_head"


QKVO = """
self_attn.q_proj q h +{0}
self_attn.k_proj kv h +{0}
self_attn.v_proj kv h +{0}
self_attn.o_proj h q +{1}
"""
QK_NORMS = """
self_attn.q_norm d
self_attn.k_norm d
"""
GATED = """
mlp.gate_proj f h +{0}
mlp.up_proj f h +{0}
mlp.down_proj h f +{0}
"""
TWO_NORMS = """
input_layernorm h
post_attention_layernorm h
"""
FOUR_NORMS = """
input_layernorm h
post_attention_layernorm h
pre_feedforward_layernorm h
post_feedforward_layernorm h
"""
REST = """
model.embed_tokens v h
model.norm h
lm_head v h
"""
GPT = """
ln_1 h +bias
ln_2 h +bias
"""
GPT_REST = """
transformer.wte v h
transformer.wpe p h
transformer.ln_f h +bias
lm_head v h
"""
BLOOM_MLP = """
mlp.dense_h_to_4h f h +{0}
mlp.dense_4h_to_h h f +{0}
"""
LAYERS = "model.layers"
ATTENTION = QKVO.format("attention_bias", "attention_bias")
LLAMA = Family(LAYERS, ATTENTION + GATED.format("mlp_bias") + TWO_NORMS, REST)
GEMMA = Family(LAYERS, LLAMA.block, REST, tied=True)
EXPERTS = """
mlp.gate e h
mlp.experts.*.gate_proj m h
mlp.experts.*.up_proj m h
mlp.experts.*.down_proj h m
"""

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "ministral": LLAMA,
    "granite": LLAMA,
    "smollm3": GEMMA,
    "gemma": GEMMA,
    "qwen2": Family(LAYERS, QKVO.format("bias", "none") + GATED.format("none") + TWO_NORMS, REST),
    "qwen3": Family(LAYERS, ATTENTION + QK_NORMS + GATED.format("none") + TWO_NORMS, REST),
    "gemma2": Family(LAYERS, ATTENTION + GATED.format("none") + FOUR_NORMS, REST, tied=True),
    "gemma3_text": Family(LAYERS, ATTENTION + QK_NORMS + GATED.format("none") + FOUR_NORMS, REST, tied=True),
    "olmo": Family(LAYERS, ATTENTION + GATED.format("none"), "model.embed_tokens v h\nlm_head v h"),
    "olmo2": Family(
        LAYERS,
        ATTENTION + GATED.format("none") + "self_attn.q_norm q\nself_attn.k_norm kv\n"
        "post_attention_layernorm h\npost_feedforward_layernorm h",
        REST,
    ),
    "cohere": Family(
        LAYERS,
        ATTENTION + GATED.format("none") + "input_layernorm h\n"
        "self_attn.q_norm n d ?use_qk_norm\nself_attn.k_norm k d ?use_qk_norm",
        REST,
        tied=True,
    ),
    "stablelm": Family(
        LAYERS,
        QKVO.format("use_qkv_bias", "none")
        + GATED.format("none")
        + "input_layernorm h +bias\npost_attention_layernorm h +bias !use_parallel_residual",
        REST.replace("model.norm h", "model.norm h +bias"),
    ),
    "phi": Family(
        LAYERS,
        QKVO.replace("o_proj", "dense").format("bias", "bias")
        + "mlp.fc1 f h +bias\nmlp.fc2 h f +bias\ninput_layernorm h +bias",
        "model.embed_tokens v h\nmodel.final_layernorm h +bias\nlm_head v h +bias",
    ),
    "phi3": Family(
        LAYERS,
        "self_attn.qkv_proj q+2kv h\nself_attn.o_proj h q\nmlp.gate_up_proj 2f h\nmlp.down_proj h f"
        + TWO_NORMS,
        REST,
    ),
    "starcoder2": Family(
        LAYERS,
        QKVO.format("use_bias", "use_bias") + "mlp.c_fc f h +use_bias\nmlp.c_proj h f +use_bias\n"
        "input_layernorm h +bias\npost_attention_layernorm h +bias",
        REST.replace("model.norm h", "model.norm h +bias"),
        tied=True,
        defaults={"use_bias": True},
    ),
    "mixtral": Family(
        LAYERS,
        ATTENTION + TWO_NORMS + "block_sparse_moe.gate e h\nblock_sparse_moe.experts.*.w1 f h\n"
        "block_sparse_moe.experts.*.w2 h f\nblock_sparse_moe.experts.*.w3 f h",
        REST,
    ),
    "qwen3_moe": Family(LAYERS, ATTENTION + QK_NORMS + TWO_NORMS + EXPERTS, REST),
    "gpt2": Family(
        "transformer.h",
        GPT + "attn.c_attn h 3h +bias\nattn.c_proj h h +bias\nmlp.c_fc h f +bias\nmlp.c_proj f h +bias",
        GPT_REST,
        tied=True,
    ),
    "gpt_bigcode": Family(
        "transformer.h",
        GPT + "attn.c_attn q+2kv h +bias\nattn.c_proj h h +bias\nmlp.c_fc f h +bias\nmlp.c_proj h f +bias",
        GPT_REST,
        tied=True,
    ),
    "gptj": Family(
        "transformer.h",
        "ln_1 h +bias\nattn.q_proj h h\nattn.k_proj h h\nattn.v_proj h h\nattn.out_proj h h\n"
        "mlp.fc_in f h +bias\nmlp.fc_out h f +bias",
        "transformer.wte v h\ntransformer.ln_f h +bias\nlm_head v h +bias",
    ),
    "gpt_neox": Family(
        "gpt_neox.layers",
        "attention.query_key_value 3h h +attention_bias\nattention.dense h h +attention_bias\n"
        "input_layernorm h +bias\npost_attention_layernorm h +bias" + BLOOM_MLP.format("bias"),
        "gpt_neox.embed_in v h\ngpt_neox.final_layer_norm h +bias\nembed_out v h",
        defaults={"attention_bias": True},
        head="embed_out",
    ),
    "bloom": Family(
        "transformer.h",
        "self_attention.query_key_value 3h h +bias\nself_attention.dense h h +bias\n"
        "input_layernorm h +bias\npost_attention_layernorm h +bias" + BLOOM_MLP.format("bias"),
        "transformer.word_embeddings v h\ntransformer.word_embeddings_layernorm h +bias\n"
        "transformer.ln_f h +bias\nlm_head v h",
        tied=True,
    ),
    "falcon": Family(
        "transformer.h",
        "self_attention.query_key_value q+2kv h +qkv_bias\nself_attention.dense h h +qkv_bias\n"
        "ln_attn h +bias ?two_norms\nln_mlp h +bias ?two_norms\ninput_layernorm h +bias !two_norms\n"
        "post_attention_layernorm h +bias !parallel_attn" + BLOOM_MLP.format("qkv_bias"),
        "transformer.word_embeddings v h\ntransformer.ln_f h +bias\nlm_head v h",
        tied=True,
        defaults={"parallel_attn": True},
    ),
    "mpt": Family(
        "transformer.blocks",
        "norm_1 h\nattn.Wqkv q+2kv h\nattn.out_proj h h\nnorm_2 h\nffn.up_proj f h\nffn.down_proj h f",
        "transformer.wte v h\ntransformer.norm_f h\nlm_head v h",
        tied=True,
    ),
    "opt": Family(
        "model.decoder.layers",
        QKVO.replace("o_proj", "out_proj").format("enable_bias", "enable_bias")
        + "fc1 f h +enable_bias\nfc2 h f +enable_bias\n"
        "self_attn_layer_norm h +bias\nfinal_layer_norm h +bias",
        "model.decoder.embed_tokens v w\nmodel.decoder.embed_positions p+2 h\n"
        "model.decoder.project_in h w ?projects\nmodel.decoder.project_out w h ?projects\n"
        "model.decoder.final_layer_norm h +bias ?do_layer_norm_before\nlm_head v w",
        tied=True,
        defaults={"enable_bias": True, "do_layer_norm_before": True},
    ),
}
FAMILIES["olmo3"] = FAMILIES["olmo2"]
