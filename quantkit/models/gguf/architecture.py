"""What a row of `architectures.TABLE` says of a family, and what rows have in common."""

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
GRANITE: Fields = RMS | {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
GATE = "expert_gating_func"
SHARED_LENGTH = "expert_shared_feed_forward_length"
ROPE_SECTIONS = "rope.dimension_sections"  # of heads, by time, height and width: one position for text
DEFAULTS: dict[str, Callable[[PretrainedConfig], Any]] = {  # where the field is absent or None
    "context_length": lambda config: 2048,
    "feed_forward_length": lambda config: 4 * config.hidden_size,
    "attention.head_count_kv": lambda config: kv_heads(config),
    "attention.key_length": lambda config: head_dim(config),
    "attention.value_length": lambda config: head_dim(config),
    SHARED_LENGTH: lambda config: config.moe_intermediate_size * config.moe_num_shared_experts or None,
    "ssm.inner_size": lambda config: config.linear_num_value_heads * config.linear_value_head_dim,
    "full_attention_interval": lambda config: config.layer_types.index("full_attention") + 1,
    ROPE_SECTIONS: lambda config: [*config.rope_parameters.get("mrope_section", (11, 11, 10)), 0],
}


@dataclass(frozen=True)
class Architecture:
    """What llama.cpp calls `name`; a mixture of experts may have the name of a dense one.

    model_types: of transformers; a file is read as the first. fields: see COMMON. fixed: field -> values
    that give what llama.cpp computes. flags: field -> tensor whose presence says it is true ("not" before
    the name: absence). rows: GGUF tensor -> order of its rows (see `tensors`). norm_shift: what llama.cpp
    wants added to norms. rope: scalings of rotary embeddings it can express; None for other positions.
    partial_rotary: heads may be rotated in part. free_head_dim: heads need not fill the hidden size.
    window: it knows sliding attention, in all but the last of so many blocks unless told; window_depth: at
    this depth alone. wide_blocks: at
    this depth it takes hidden size per head, not the head's size, for the scale of attention. head:
    output.weight must exist ("always"), is left out when tied, or is never read. refuse: further reasons
    against a configuration. computed: keys that no one field says. splits: GGUF tensor -> how it is several
    (see `tensors`). latent: keys and values are made from one vector of each token (MLA). truncate: yarn
    has whole dimensions as bounds, which llama.cpp takes for granted. restore: further fields, from the keys
    of a file and the names of its tensors.
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
    window_depth: int | None = None
    wide_blocks: int | None = None
    head: str = "tied"
    computed: Mapping[str, Callable[[PretrainedConfig], Any]] = field(default_factory=dict)
    splits: Mapping[str, str] = field(default_factory=dict)
    latent: bool = False
    truncate: bool = True
    refuse: Callable[[PretrainedConfig], str | None] = lambda config: None
    restore: Callable[[Mapping[str, Any], Collection[str]], dict[str, Any]] | None = None

    def period(self, blocks: int) -> int | None:
        """Of so many blocks the last attends to all tokens, unless the file says otherwise."""
        return self.window if self.window_depth in (None, blocks) else 1

    @property
    def hybrid(self) -> bool:
        """Whether some blocks keep a state instead of attending."""
        return "ssm.state_size" in self.fields

    @property
    def mixture(self) -> bool:
        return "expert_count" in self.fields

    def experts(self, config: PretrainedConfig) -> int:
        """Of a layer, 0 of a dense model."""
        return getattr(config, self.fields["expert_count"]) if self.mixture else 0


def _grouped_heads(config: PretrainedConfig) -> str | None:
    """Its loader wants as many keys as queries, or numbers in the norm of the keys."""
    few = kv_heads(config) < config.num_attention_heads
    return f"{kv_heads(config)} key/value heads of {config.num_attention_heads}" if few else None


SWIGLU: Mapping[str, tuple] = {"hidden_act": SILU}
SWIGLU_NO_BIAS = SWIGLU | {"attention_bias": (False,)}
ROTARY = {"attn_q": "rotary_q", "attn_k": "rotary_kv"}
GROUPED = {"attn_qkv": "grouped"}
BIASES = {"attention_bias": "blk.0.attn_q.bias"}
LLAMA_SCALINGS = ("linear", "yarn", "longrope", "llama3")


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
