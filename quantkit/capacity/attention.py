"""What each layer keeps of the tokens it has seen, by type: full, sliding, latent or recurrent.

Rules of the families' own code (transformers), tensor for tensor. What is not known is refused: a cache
that is guessed wrong is off by a factor, not by a percent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.capacity.parameters import Parameters
from quantkit.capacity.settings import Settings

# Families whose layers keep a key and a value of every token, as many as config.json says kv heads. The
# number: every so many layers attention is full, in the others it slides (0: it slides in all of them),
# provided that config.json names a window and no layer types.
FAMILIES: dict[str, int] = {
    **dict.fromkeys(
        (
            "llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma", "phi", "gpt2", "gpt_neox", "gptj",
            "gpt_bigcode", "bloom", "falcon", "RefinedWeb", "RefinedWebModel", "opt", "mpt", "stablelm",
            "olmo", "olmo2", "olmoe", "cohere", "granite", "granitemoe", "smollm3", "nemotron", "glm",
            "glm4", "glm4_moe", "seed_oss", "arcee", "helium", "persimmon", "ernie4_5", "hunyuan_v1_dense",
            "apertus", "codegen", "minimax_m2", "llama4_text",
        ),
        1,
    ),
    **dict.fromkeys(("mistral", "mixtral", "ministral", "phi3", "phimoe", "starcoder2"), 0),
    "gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "olmo3": 4, "cohere2": 4,
}  # fmt: skip
# Keys that say that something else is going on, where no family below knows what.
UNUSUAL = re.compile(
    r"mamba|ssm|rwkv|lora_rank|linear_|attn_layer|block_types|layers_block_type|num_kv_shared|global_head_dim"
    r"|index_|compress|recurrent|lru_|conv_|hybrid|attention_window|share|cross_attention|is_encoder_decoder"
)
MAMBA2 = {  # heads, width of a head, groups, state, kernel, expansion
    "bamba": (
        "mamba_n_heads",
        "mamba_d_head",
        "mamba_n_groups",
        "mamba_d_state",
        "mamba_d_conv",
        "mamba_expand",
    ),
    "nemotron_h": (
        "mamba_num_heads",
        "mamba_head_dim",
        "n_groups",
        "ssm_state_size",
        "conv_kernel",
        "expand",
    ),
    "mamba2": ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", "expand"),
}
MAMBA2["granitemoehybrid"] = MAMBA2["falcon_h1"] = MAMBA2["bamba"]
LATENT = ("deepseek_v2", "deepseek_v3")


class Unsupported(Exception):
    """Why the cache of a model is not known."""


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps of a sequence.

    kind: full, sliding, chunked, latent, recurrent, hybrid, shared (it reads another layer's) or none.
    values: numbers per token; window: tokens at most, None for all of them. conv, state: numbers kept
    whatever the length, of the last inputs of a convolution and of a recurrence.
    """

    kind: str
    values: int = 0
    window: int | None = None
    conv: int = 0
    state: int = 0

    def tokens(self, length: int) -> int:
        """How many of `length` tokens it keeps."""
        return length if self.window is None else min(length, self.window)


def layer_caches(settings: Settings, parameters: Parameters | None = None) -> list[LayerCache]:
    """One per decoder block. Raises Unsupported with the reason where the rules of a model are not known."""
    family = settings.model_type
    if family in ("mamba", "falcon_mamba", "jamba"):
        return _mamba1(settings)
    if family in MAMBA2:
        return _mamba2(settings)
    if family in ("lfm2", "qwen3_next", "gemma3n_text"):
        return {"lfm2": _lfm2, "qwen3_next": _qwen3_next, "gemma3n_text": _gemma3n}[family](settings)
    if family in LATENT:
        latent = settings.size("kv_lora_rank") + settings.size("qk_rope_head_dim")
        return [LayerCache("latent", latent)] * settings.layers
    if odd := sorted(key for key, value in settings.values.items() if value and UNUSUAL.search(key)):
        raise Unsupported(f"{family} is not known, and config.json says {', '.join(odd[:4])}")
    kinds = _kinds(settings)
    values = _values(settings, parameters)
    return [_attention(kind, count, settings) for kind, count in zip(kinds, values, strict=True)]


def _kinds(settings: Settings) -> list[str]:
    """`full`, `sliding` or `chunked`, layer by layer."""
    count, family = settings.layers, settings.model_type
    stated = settings.get("layer_types")
    if stated is not None:
        if not isinstance(stated, list) or len(stated) != count:
            raise Unsupported(f"config.json names types of other layers than its {count}")
        known = {"full_attention": "full", "sliding_attention": "sliding", "chunked_attention": "chunked"}
        if unknown := sorted({str(kind) for kind in stated} - known.keys()):
            raise Unsupported(f"layers of type {', '.join(unknown)} are not known")
        return [known[kind] for kind in stated]
    if family == "llama4_text":  # layers with rotary positions attend in chunks
        stated = settings.get("no_rope_layers") or [(k + 1) % 4 for k in range(count)]
        if not isinstance(stated, list) or len(stated) != count:
            raise Unsupported(f"config.json names positions of other layers than its {count}")
        return ["chunked" if rotary else "full" for rotary in stated]
    if family.startswith("qwen") and not settings.flag("use_sliding_window"):
        return ["full"] * count
    if settings.get("sliding_window") is None:
        return ["full"] * count
    if family in ("qwen2", "qwen3"):
        first = settings.get("max_window_layers", default=28)
        return ["sliding" if k >= first else "full" for k in range(count)]
    period = FAMILIES.get(family)
    if period is None or family.startswith("qwen"):
        raise Unsupported(f"which layers of {family} slide is not known: config.json names no layer_types")
    if family in ("gemma2", "gemma3_text", "cohere2") and isinstance(
        stated := settings.get("sliding_window_pattern"), int
    ):
        period = stated
    if period == 0:
        return ["sliding"] * count
    return ["sliding" if (k + 1) % period else "full" for k in range(count)]


def _values(settings: Settings, parameters: Parameters | None) -> list[int]:
    """Numbers that keys and values of one token take, layer by layer.

    By the rules of a known family; of any other as wide as its stored projections, where it has such.
    """
    stored = _projections(parameters, settings.layers)
    if settings.model_type not in FAMILIES:
        if stored is None:
            raise Unsupported(f"{settings.model_type} is not known, and no k_proj and v_proj show its heads")
        return stored
    values = 2 * settings.kv_heads * settings.head_dim
    if stored and any(width != values for width in stored):
        raise Unsupported(
            f"config.json says {values} numbers a token and layer, k_proj and v_proj {stored[0]}"
        )
    return [values] * settings.layers


def _projections(parameters: Parameters | None, layers: int) -> list[int] | None:
    """Widths of k_proj and v_proj together, where every block has both."""
    if parameters is None or not parameters.exact:
        return None
    widths: dict[int, dict[str, int]] = {}
    for tensor in parameters.linears:
        leaf = tensor.local.removesuffix(".weight").rpartition(".")[2]
        if leaf in ("k_proj", "v_proj"):
            widths.setdefault(tensor.block, {})[leaf] = tensor.out_features
    found = [widths.get(k, {}) for k in range(layers)]
    return [sum(pair.values()) for pair in found] if all(len(pair) == 2 for pair in found) else None


def _attention(kind: str, values: int, settings: Settings) -> LayerCache:
    if kind == "full":
        return LayerCache("full", values)
    name = "sliding_window" if kind == "sliding" else "attention_chunk_size"
    if settings.get(name) is None:
        raise Unsupported(f"config.json names {kind} layers but no {name}")
    return LayerCache(kind, values, settings.size(name))


def _full(settings: Settings) -> LayerCache:
    return LayerCache("full", 2 * settings.kv_heads * settings.head_dim)


def _gemma3n(settings: Settings) -> list[LayerCache]:
    """The last layers read the keys and values of earlier ones."""
    kinds, values = _kinds(settings), 2 * settings.kv_heads * settings.head_dim
    own = settings.layers - settings.get("num_kv_shared_layers", default=0)
    caches = [_attention(kind, values, settings) for kind in kinds]
    return [cache if k < own else LayerCache("shared") for k, cache in enumerate(caches)]


def _qwen3_next(settings: Settings) -> list[LayerCache]:
    """Gated delta net in most layers."""
    keys = settings.size("linear_num_key_heads") * settings.size("linear_key_head_dim")
    heads, width = settings.size("linear_num_value_heads"), settings.size("linear_value_head_dim")
    recurrent = LayerCache(
        "recurrent",
        conv=(2 * keys + heads * width) * settings.size("linear_conv_kernel_dim"),
        state=heads * settings.size("linear_key_head_dim") * width,
    )
    every = settings.size("full_attention_interval", default=4)
    stated = settings.get("layer_types") or [
        "linear_attention" if (k + 1) % every else "full_attention" for k in range(settings.layers)
    ]
    return _choose(stated, {"linear_attention": recurrent, "full_attention": _full(settings)}, settings)


def _lfm2(settings: Settings) -> list[LayerCache]:
    """Short convolutions in most layers."""
    conv = LayerCache("recurrent", conv=settings.hidden * settings.size("conv_L_cache", default=3))
    full = settings.get("full_attn_idxs")
    stated = settings.get("layer_types") or [
        "full_attention" if full is None or k in full else "conv" for k in range(settings.layers)
    ]
    return _choose(stated, {"conv": conv, "full_attention": _full(settings)}, settings)


def _mamba1(settings: Settings) -> list[LayerCache]:
    inner = settings.size("mamba_expand", "expand", default=2) * settings.hidden
    inner = settings.size("intermediate_size") if settings.model_type != "jamba" else inner
    recurrent = LayerCache(
        "recurrent",
        conv=inner * settings.size("mamba_d_conv", "conv_kernel", default=4),
        state=inner * settings.size("mamba_d_state", "state_size", default=16),
    )
    if settings.model_type != "jamba":
        return [recurrent] * settings.layers
    period, offset = settings.size("attn_layer_period"), settings.get("attn_layer_offset", default=0)
    return [_full(settings) if k % period == offset else recurrent for k in range(settings.layers)]


def _mamba2(settings: Settings) -> list[LayerCache]:
    heads, width, groups, state, kernel, expand = MAMBA2[settings.model_type]
    count = settings.size(heads)
    inner = settings.size(expand, default=2) * settings.hidden
    each = inner // count if settings.get(width) in (None, "auto") else settings.size(width)
    if settings.model_type in ("falcon_h1", "nemotron_h"):
        inner = settings.size("mamba_d_ssm", default=count * each)
    size = settings.size(state)
    conv = (inner + 2 * settings.size(groups) * size) * settings.size(kernel)
    recurrent = LayerCache("recurrent", conv=conv, state=count * each * size)
    if settings.model_type == "mamba2":
        return [recurrent] * settings.layers
    full = _full(settings)
    if settings.model_type == "falcon_h1":
        return [LayerCache("hybrid", full.values, None, recurrent.conv, recurrent.state)] * settings.layers
    if settings.model_type == "bamba":
        places = settings.get("attn_layer_indices", default=[])
        return [full if k in places else recurrent for k in range(settings.layers)]
    kinds = (
        dict.fromkeys(("M", "mamba", "linear_attention"), recurrent)
        | dict.fromkeys(("*", "attention", "full_attention"), full)
        | dict.fromkeys(("-", "E", "mlp", "moe"), LayerCache("none"))
    )
    stated = settings.get("layers_block_type", "layer_types", "hybrid_override_pattern", default=[])
    return _choose(stated, kinds, settings)


def _choose(stated: Sequence[str], kinds: dict[str, LayerCache], settings: Settings) -> list[LayerCache]:
    if unknown := sorted({str(kind) for kind in stated} - kinds.keys()):
        raise Unsupported(f"{settings.model_type}: layers of type {', '.join(unknown)} are not known")
    if len(stated) != settings.layers:
        raise Unsupported(
            f"config.json names types of {len(stated)} layers and says there are {settings.layers}"
        )
    return [kinds[kind] for kind in stated]
