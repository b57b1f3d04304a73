"""The architectures that llama.cpp runs and quantkit writes and reads: one row of data each.

A row relates llama.cpp's metadata to fields of transformers' configuration, in both directions, and says
what llama.cpp takes for granted. Sources: the loaders of llama.cpp (src/models) for keys and for what is
computed whatever the file says, transformers' configurations for the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quantkit.errors import UNSUPPORTED, QuantkitError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")  # llama.cpp has the tanh form for all of them
SILU = ("silu", "swish")
Fields = Mapping[str, str | tuple[str, ...] | None]

# Metadata key below the architecture's name -> field of the configuration; of several, the first that is
# set. None: llama.cpp reads the key, the configuration has no field for it.
COMMON: Fields = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "vocab_size": "vocab_size",
}
RMS: Fields = COMMON | {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
EPSILON = "attention.layer_norm_epsilon"
MULTI_HEAD: Fields = COMMON | {"attention.head_count_kv": None, EPSILON: "layer_norm_epsilon"}
GPT2: Fields = MULTI_HEAD | {"feed_forward_length": "n_inner"}
SHARED_LENGTH = "expert_shared_feed_forward_length"
DEFAULTS: dict[str, Callable[[PretrainedConfig], int]] = {  # where the field is absent or None
    "context_length": lambda config: 2048,
    "feed_forward_length": lambda config: 4 * config.hidden_size,
    "attention.head_count_kv": lambda config: kv_heads(config),
    "attention.key_length": lambda config: head_dim(config),
    "attention.value_length": lambda config: head_dim(config),
    SHARED_LENGTH: lambda config: config.moe_intermediate_size * config.moe_num_shared_experts or None,
}


@dataclass(frozen=True)
class Architecture:
    """What llama.cpp calls `name`; a mixture of experts may have the name of a dense one.

    model_types: of transformers; a file is read as the first. fields: see COMMON. fixed: field -> values
    that give what llama.cpp computes. flags: field -> tensor whose presence says it is true ("not" before
    the name: absence). rows: GGUF tensor -> order of its rows (see `tensors`). norm_shift: what llama.cpp
    wants added to norms. rope: scalings of rotary embeddings it can express; None for other positions.
    partial_rotary: heads may be rotated in part. free_head_dim: heads need not fill the hidden size.
    window: it knows sliding attention, in all but the last of so many blocks unless told. wide_blocks: at
    this depth it takes hidden size per head, not the head's size, for the scale of attention. head:
    output.weight must exist ("always"), is left out when tied, or is never read. refuse: further reasons
    against a configuration. restore: further fields, from the keys of a file and the names of its tensors.
    """

    name: str
    model_types: tuple[str, ...]
    fields: Fields
    fixed: Mapping[str, tuple] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    norm_shift: float = 0.0
    rope: tuple[str, ...] | None = ("linear", "yarn")
    partial_rotary: bool = False
    free_head_dim: bool = False
    window: int | None = None
    wide_blocks: int | None = None
    head: str = "tied"
    refuse: Callable[[PretrainedConfig], str | None] = lambda config: None
    restore: Callable[[Mapping[str, Any], Collection[str]], dict[str, Any]] | None = None

    @property
    def mixture(self) -> bool:
        return "expert_count" in self.fields

    def experts(self, config: PretrainedConfig) -> int:
        """Of a layer, 0 of a dense model."""
        return getattr(config, self.fields["expert_count"]) if self.mixture else 0


def _falcon(keys: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The oldest form has one key/value head; the newer one says how many, and may have a second norm."""
    kv_heads = _kv_heads(keys)
    two_norms = "blk.0.attn_norm_2.weight" in names
    if kv_heads == 1 and not two_norms:
        return {"multi_query": True}
    return {
        "new_decoder_architecture": True,
        "num_kv_heads": kv_heads,
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
    }


def _kv_heads(keys: Mapping[str, Any]) -> int:
    """Of a file."""
    return keys.get("attention.head_count_kv", keys.get("attention.head_count"))


def _ernie(keys: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Shared experts are one matrix; all blocks behind the first dense ones may have experts."""
    shared, width = keys.get(SHARED_LENGTH, 0), keys.get("expert_feed_forward_length")
    if type(shared) is not int or type(width) is not int or width < 1:
        return {}
    return {"moe_num_shared_experts": shared // width, "moe_layer_end_index": -1}


def _dense_at_the_end(config: PretrainedConfig) -> str | None:
    last = config.moe_layer_end_index
    return f"moe_layer_end_index {last}" if 0 <= last < config.num_hidden_layers - 1 else None


def _without_capping(config: PretrainedConfig) -> str | None:
    caps = config.attn_logit_softcapping, config.final_logit_softcapping
    return "scores and logits without soft-capping" if None in caps else None


def _norms_by_depth(config: PretrainedConfig) -> str | None:
    """Its loader looks for norms of queries and keys in the models of 64 blocks and more, and only there."""
    expected = config.num_hidden_layers >= 64
    return None if config.use_qk_norm == expected else f"use_qk_norm {config.use_qk_norm} at this depth"


def _grouped_heads(config: PretrainedConfig) -> str | None:
    """Its loader wants as many keys as queries, or numbers in the norm of the keys."""
    few = kv_heads(config) < config.num_attention_heads
    return f"{kv_heads(config)} key/value heads of {config.num_attention_heads}" if few else None


SWIGLU: Mapping[str, tuple] = {"hidden_act": SILU}
SWIGLU_NO_BIAS = SWIGLU | {"attention_bias": (False,)}
GPT2_FIXED: Mapping[str, tuple] = {
    "activation_function": GELU,
    "scale_attn_weights": (True,),
    "add_cross_attention": (False,),
}
GEMMA: Fields = RMS | {
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
GEMMA_FIXED: Mapping[str, tuple] = {
    "hidden_activation": GELU,
    "attention_bias": (False,),
    "use_bidirectional_attention": (None, False),
}
ROTARY = {"attn_q": "rotary_q", "attn_k": "rotary_kv"}
GROUPED = {"attn_qkv": "grouped"}
BIASES = {"attention_bias": "blk.0.attn_q.bias"}
LLAMA_SCALINGS = ("linear", "yarn", "longrope", "llama3")
EXPERTS: Fields = RMS | {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
WIDTH: Fields = {"expert_feed_forward_length": "moe_intermediate_size"}
DEEP: Fields = (  # as in DeepSeek 3: the first blocks dense, shared experts beside those that are chosen
    EXPERTS
    | WIDTH
    | {
        "expert_count": "n_routed_experts",
        "expert_shared_count": "n_shared_experts",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob",
        "leading_dense_block_count": "first_k_dense_replace",
    }
)
ONE_GROUP: Mapping[str, tuple] = {"n_group": (1,), "topk_group": (1,)}
SIGMOID = 2  # of llama.cpp's gating functions
ALL_SPARSE: Mapping[str, tuple] = {"mlp_only_layers": ([], None), "decoder_sparse_step": (1,)}

TABLE = (
    Architecture(
        "llama",
        ("llama", "mistral"),
        RMS,
        fixed=SWIGLU,
        flags=BIASES | {"mlp_bias": "blk.0.ffn_up.bias"},
        rows=ROTARY,
        rope=LLAMA_SCALINGS,
        free_head_dim=True,
    ),
    Architecture(
        "llama",
        ("mixtral",),
        EXPERTS,
        fixed=SWIGLU,
        rows=ROTARY,
        rope=LLAMA_SCALINGS,
        free_head_dim=True,
    ),
    Architecture("qwen2", ("qwen2",), RMS, fixed=SWIGLU),
    Architecture(
        "qwen2moe",
        ("qwen2_moe",),
        EXPERTS | WIDTH | {SHARED_LENGTH: "shared_expert_intermediate_size"},
        fixed=SWIGLU | ALL_SPARSE | {"norm_topk_prob": (False,)},
        flags={"qkv_bias": "blk.0.attn_q.bias"},
    ),
    Architecture("qwen3", ("qwen3",), RMS, fixed=SWIGLU_NO_BIAS, free_head_dim=True),
    Architecture(
        "qwen3moe",
        ("qwen3_moe",),
        EXPERTS | WIDTH,
        fixed=SWIGLU_NO_BIAS | ALL_SPARSE | {"norm_topk_prob": (True,)},
        free_head_dim=True,
        restore=lambda keys, names: {"norm_topk_prob": True},
    ),
    Architecture(
        "gemma2",
        ("gemma2",),
        RMS | {"attn_logit_softcapping": "attn_logit_softcapping"} | GEMMA,
        fixed=GEMMA_FIXED,
        norm_shift=1.0,
        free_head_dim=True,
        window=2,
        wide_blocks=46,
        head="never",
        refuse=_without_capping,
    ),
    Architecture(
        "gemma3",
        ("gemma3_text",),
        GEMMA,
        fixed=GEMMA_FIXED | {"attn_logit_softcapping": (None,)},
        norm_shift=1.0,
        rope=("linear",),
        free_head_dim=True,
        window=6,
        wide_blocks=62,
    ),
    Architecture(
        "phi3",
        ("phi3",),
        RMS
        | {
            "attention.sliding_window": "sliding_window",
            "rope.scaling.original_context_length": "original_max_position_embeddings",
        },
        fixed=SWIGLU,
        rope=("longrope",),
        partial_rotary=True,
    ),
    Architecture(
        "gpt2",
        ("gpt2",),
        GPT2,
        fixed=GPT2_FIXED | {"scale_attn_by_inverse_layer_idx": (False,)},
        rope=None,
    ),
    Architecture(
        "gptneox",
        ("gpt_neox",),
        COMMON
        | {
            "attention.head_count_kv": None,
            EPSILON: "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
        },
        fixed={"hidden_act": GELU, "attention_bias": (True,)},
        rows=GROUPED,
        partial_rotary=True,
        head="always",
    ),
    Architecture(
        "bloom",
        ("bloom",),
        MULTI_HEAD | {"context_length": "seq_length", "feed_forward_length": None},
        fixed={"apply_residual_connection_post_layernorm": (False,)},
        rows=GROUPED,
        rope=None,
    ),
    Architecture(
        "falcon",
        ("falcon",),
        MULTI_HEAD | {"feed_forward_length": "ffn_hidden_size"},
        fixed={"activation": GELU, "alibi": (False,), "bias": (False,), "parallel_attn": (True,)},
        rows=GROUPED,
        constants={"tensor_data_layout": "jploski"},
        restore=_falcon,
    ),
    Architecture(
        "starcoder",
        ("gpt_bigcode",),
        GPT2,
        fixed=GPT2_FIXED,
        rows=GROUPED,
        rope=None,
        restore=lambda keys, names: {"multi_query": _kv_heads(keys) == 1},
    ),
    Architecture(
        "starcoder2",
        ("starcoder2",),
        COMMON | {EPSILON: "norm_epsilon"},
        fixed={"hidden_act": GELU, "use_bias": (True,)},
    ),
    Architecture("olmo2", ("olmo2",), RMS, fixed=SWIGLU_NO_BIAS, head="always"),
    Architecture(
        "olmoe",
        ("olmoe",),
        EXPERTS,
        fixed=SWIGLU_NO_BIAS | {"norm_topk_prob": (False,), "clip_qkv": (None,)},
        head="always",
        refuse=_grouped_heads,
    ),
    Architecture(
        "ernie4_5-moe",
        ("ernie4_5_moe",),
        EXPERTS
        | WIDTH
        | {
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            SHARED_LENGTH: None,
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        fixed=SWIGLU | {"use_bias": (False,)},
        refuse=_dense_at_the_end,
        restore=_ernie,
    ),
    Architecture(
        "dots1",
        ("dots1",),
        DEEP,
        fixed=SWIGLU_NO_BIAS | ONE_GROUP,
        constants={"expert_gating_func": SIGMOID},
        free_head_dim=True,
        head="always",
        refuse=_grouped_heads,
    ),
    Architecture(
        "minimax-m2",
        ("minimax_m2",),
        EXPERTS | {"expert_feed_forward_length": "intermediate_size"},
        fixed=SWIGLU,
        constants={"expert_gating_func": SIGMOID},
        partial_rotary=True,
        free_head_dim=True,
        head="always",
    ),
    Architecture(
        "glm4moe",
        ("glm4_moe",),
        DEEP,
        fixed=SWIGLU | ONE_GROUP,
        flags=BIASES | {"use_qk_norm": "blk.0.attn_q_norm.weight"},
        constants={"expert_gating_func": SIGMOID},
        partial_rotary=True,
        free_head_dim=True,
    ),
    Architecture(
        "granite",
        ("granite",),
        RMS
        | {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        fixed=SWIGLU,
        flags=BIASES | {"mlp_bias": "blk.0.ffn_up.bias"},
        rows=ROTARY,
        rope=LLAMA_SCALINGS,
        free_head_dim=True,
    ),
    Architecture(
        "stablelm",
        ("stablelm",),
        COMMON | {EPSILON: "layer_norm_eps"},
        fixed=SWIGLU,
        flags={
            "use_qkv_bias": "blk.0.attn_q.bias",
            "qk_layernorm": "blk.0.attn_q_norm.weight",
            "use_parallel_residual": "not blk.0.ffn_norm.weight",
        },
        partial_rotary=True,
        head="always",
    ),
    Architecture(
        "command-r",
        ("cohere",),
        COMMON
        | {
            "context_length": ("model_max_length", "max_position_embeddings"),
            EPSILON: "layer_norm_eps",
            "logit_scale": "logit_scale",
        },
        fixed=SWIGLU_NO_BIAS,
        flags={"use_qk_norm": "blk.0.attn_q_norm.weight"},
        head="never",
        refuse=_norms_by_depth,
    ),
)


def of_config(config: PretrainedConfig) -> Architecture:
    """The row of a configuration's model_type. Raises QuantkitError (exit code 4) when there is none."""
    for row in TABLE:
        if config.model_type in row.model_types:
            return row
    known = sorted(kind for row in TABLE for kind in row.model_types)
    raise QuantkitError(
        f"GGUF of {config.model_type} is not supported",
        hint=f"quantkit knows what llama.cpp expects of: {', '.join(known)}",
        exit_code=UNSUPPORTED,
    )


def of_file(metadata: Mapping[str, Any]) -> Architecture:
    """The row that a file's `general.architecture` names. Raises QuantkitError (exit code 4) for another."""
    name = metadata.get("general.architecture")
    experts = metadata.get(f"{name}.expert_count")
    if row := named(name, experts):
        return row
    if experts and named(name):
        raise QuantkitError(
            f"the GGUF file holds a mixture of {experts} experts",
            hint=f"quantkit reads mixtures of: {', '.join(row.name for row in TABLE if row.mixture)}",
            exit_code=UNSUPPORTED,
        )
    raise QuantkitError(
        f"GGUF files of {name or 'no architecture'} are not read",
        hint=f"quantkit reads: {', '.join(sorted(row.name for row in TABLE))}",
        exit_code=UNSUPPORTED,
    )


def named(name: str, experts: object = None) -> Architecture | None:
    """The row of an architecture of llama.cpp, of so many experts; None where there is none."""
    return next((row for row in TABLE if row.name == name and row.mixture == bool(experts)), None)


def kv_heads(config: PretrainedConfig) -> int:
    """Key/value heads of attention, whatever the configuration calls them."""
    if getattr(config, "new_decoder_architecture", False):
        return config.num_kv_heads
    if hasattr(config, "multi_query"):  # GPTBigCode's num_key_value_heads may be wrong
        return 1 if config.multi_query else config.num_attention_heads
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def head_dim(config: PretrainedConfig) -> int:
    """Size of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def inexpressible(row: Architecture, what: str) -> QuantkitError:
    """The error for a model that llama.cpp would compute otherwise."""
    return QuantkitError(
        f"llama.cpp's {row.name} does not know {what}",
        hint="only models that it computes as transformers does are written",
        exit_code=UNSUPPORTED,
    )
