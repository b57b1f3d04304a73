"""What each layer keeps of the tokens it has seen.

Of most families a key and a value of every token, as wide as the stored projections are: that takes no more
than headers. Everything else is measured on the model that transformers builds (meta.py), which takes
seconds. What neither tells is refused: a cache that is guessed wrong is off by a factor, not by a percent.
"""

from __future__ import annotations

import re

from quantkit.capacity import Unsupported
from quantkit.capacity.kv_cache import LayerCache
from quantkit.capacity.parameters import Parameters
from quantkit.capacity.settings import Settings

# Families that need not be measured. The number: every so many layers attention is full, in the others it
# slides (0: it slides in all of them), where config.json names a window and no layer types.
FAMILIES: dict[str, int | None] = {
    **dict.fromkeys(
        (
            "llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma", "phi", "gpt2", "gpt_neox", "gptj",
            "gpt_bigcode", "bloom", "falcon", "RefinedWeb", "RefinedWebModel", "opt", "mpt", "stablelm",
            "olmo", "olmo2", "olmoe", "cohere", "granite", "granitemoe", "smollm3", "nemotron", "glm",
            "glm4", "glm4_moe", "seed_oss", "arcee", "helium", "persimmon", "ernie4_5", "hunyuan_v1_dense",
            "apertus", "codegen", "minimax_m2",
        ),
        None,
    ),
    **dict.fromkeys(("mistral", "mixtral", "ministral", "phi3", "phimoe", "starcoder2"), 0),
    "gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "olmo3": 4, "cohere2": 4,
}  # fmt: skip
KINDS = {"full_attention": "full", "sliding_attention": "sliding"}
# Keys that say that something else is going on.
UNUSUAL = re.compile(
    r"mamba|ssm|rwkv|lora_rank|linear_|attn_layer|block_types|layers_block_type|num_kv_shared|global_head_dim"
    r"|index_|compress|recurrent|lru_|conv_|hybrid|attention_window|attention.chunk"
    r"|(?<!expert_)share(?!d_expert)"
    r"|cross_attention|is_encoder_decoder"
)


def layer_caches(settings: Settings, parameters: Parameters | None = None) -> list[LayerCache]:
    """One per decoder block. Raises Unsupported with the reason where it is not known."""
    family, kinds = settings.model_type, _kinds(settings)
    widths = parameters and parameters.key_value_widths(fused=family in FAMILIES)
    odd = sorted(key for key, value in settings.values.items() if value and UNUSUAL.search(key))
    if odd or not kinds or not widths or family not in FAMILIES:
        measured, reason = _measured(settings)
        if measured:
            return measured
        if odd:
            raise Unsupported(f"{reason} (config.json says {', '.join(odd[:4])})")
        if not kinds:
            raise Unsupported(f"{reason}; which of its layers slide is not known")
        if not widths:
            raise Unsupported(f"{reason}; no k_proj and v_proj show its heads")
    elif any(width != (told := 2 * settings.kv_heads * settings.head_dim) for width in widths):
        raise Unsupported(f"config.json says {told} numbers a token and layer, k_proj and v_proj {widths[0]}")
    window = settings.size("sliding_window") if "sliding" in kinds else None
    return [
        LayerCache(kind, width, window if kind == "sliding" else None)
        for kind, width in zip(kinds, widths, strict=True)
    ]


def _measured(settings: Settings) -> tuple[list[LayerCache] | None, str]:
    """What transformers keeps; None, and the reason, where it cannot tell."""
    if settings.config is None:
        return None, f"{settings.model_type} is not known"
    from quantkit.capacity import meta

    try:
        return meta.caches(settings.config), ""
    except Unsupported as error:
        return None, str(error)


def _kinds(settings: Settings) -> list[str] | None:
    """`full` or `sliding`, layer by layer; None where config.json does not say it in the usual words."""
    count, family, period = settings.layers, settings.model_type, FAMILIES.get(settings.model_type)
    window, stated = settings.get("sliding_window"), settings.get("layer_types")
    if stated is not None:
        told = [KINDS.get(str(kind)) for kind in stated] if isinstance(stated, list) else []
        known = len(told) == count and None not in told and (window or "sliding" not in told)
        return told if known else None
    if period is not None and "sliding_window" not in settings.values:
        return None  # its class fills one in
    if window is None or (family.startswith("qwen") and not settings.get("use_sliding_window")):
        return ["full"] * count
    if isinstance(settings.get("sliding_window_pattern"), int) and period:
        period = settings.get("sliding_window_pattern")
    if period is None:
        return None
    return ["sliding" if period == 0 or (k + 1) % period else "full" for k in range(count)]
