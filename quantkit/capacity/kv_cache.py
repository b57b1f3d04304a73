"""The KV cache: the number of values that each layer keeps per token, and their bytes.

    bytes = 2 · bytes_per_value · layers · kv_heads · head_dim · tokens · batch

The formula holds if every layer keeps a key and a value of every token; the headers then give both widths.
Other families are measured on the model that transformers builds (meta.py), which takes seconds. Unknown
caches are refused, since a wrong guess could be off by a factor. Pages of a paged cache: Kwon et al. 2023
(PagedAttention, arXiv:2309.06180), section 3.1.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from quantkit.capacity import Unsupported
from quantkit.capacity.parameters import Parameters
from quantkit.capacity.settings import Settings

CONV_BYTES, STATE_BYTES = 2, 4  # bytes per value: convolution inputs 16 bit, recurrent states float32
PAGE = 16  # tokens per block of a paged cache, vLLM's default
# Families with a known cache: all layers are equal, unless config.json names their types.
FULL = (
    "llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma", "phi", "gpt2", "gpt_neox", "gptj",
    "gpt_bigcode", "bloom", "falcon", "RefinedWeb", "RefinedWebModel", "opt", "mpt", "stablelm", "olmo",
    "olmo2", "olmoe", "cohere", "granite", "granitemoe", "smollm3", "nemotron", "glm", "glm4", "glm4_moe",
    "seed_oss", "arcee", "helium", "persimmon", "ernie4_5", "hunyuan_v1_dense", "apertus", "codegen",
    "minimax_m2",
)  # fmt: skip
# Families with a window: every so many layers attention is full; 0: all layers slide.
PERIODS = {
    **dict.fromkeys(("mistral", "mixtral", "ministral", "phi3", "phimoe", "starcoder2"), 0),
    "gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "olmo3": 4, "cohere2": 4,
}  # fmt: skip
KINDS = {"full_attention": "full", "sliding_attention": "sliding"}
# Keys of unusual attention.
UNUSUAL = re.compile(
    r"mamba|ssm|rwkv|lora_rank|linear_|attn_layer|block_types|layers_block_type|num_kv_shared|global_head_dim"
    r"|index_|compress|recurrent|lru_|conv_|hybrid|attention_window|attention.chunk"
    r"|(?<!expert_)share(?!d_expert)"
    r"|cross_attention|is_encoder_decoder"
)


@dataclass(frozen=True)
class LayerCache:
    """The cache of one layer for one sequence.

    kind: full, sliding, chunked, latent, recurrent, hybrid, shared (with another layer) or none. values:
    number of values per token. window: most tokens that are kept, None for all. conv, state: numbers of
    values for a convolution's last inputs and for a recurrent state, whatever the length.
    """

    kind: str
    values: int = 0
    window: int | None = None
    conv: int = 0
    state: int = 0

    def tokens(self, length: int) -> int:
        """Return how many of `length` tokens the layer keeps."""
        return length if self.window is None else min(length, self.window)


def values(caches: Sequence[LayerCache], tokens: int) -> int:
    """Return the number of values in the caches of all layers for a sequence of `tokens` tokens."""
    return sum(cache.values * cache.tokens(tokens) for cache in caches)


def sequence_bytes(
    caches: Sequence[LayerCache], tokens: int, bytes_per_value: Fraction, page: int = 1
) -> int:
    """Return the bytes of the cache of one sequence, in whole pages of `page` tokens."""
    paged = sum(cache.values * -(-cache.tokens(tokens) // page) * page for cache in caches)
    states = sum(CONV_BYTES * cache.conv + STATE_BYTES * cache.state for cache in caches)
    return int(paged * bytes_per_value) + states


def attention_scores(heads: int, tokens: int, bytes_per_value: int = 2) -> int:
    """Return the bytes of `softmax(Q Kᵀ) [heads, N, N]` of one layer and sequence, N being `tokens`.
    FlashAttention (Dao et al. 2022, arXiv:2205.14135) never stores this matrix."""
    return heads * bytes_per_value * tokens**2


def layer_caches(settings: Settings, parameters: Parameters | None = None) -> list[LayerCache]:
    """Return the cache of each block. Raises Unsupported, with the reason, if a cache is unknown."""
    known, kinds = settings.model_type in (*FULL, *PERIODS), _kinds(settings)
    widths = parameters and parameters.key_value_widths(fused=known)
    odd = sorted(key for key, value in settings.values.items() if value and UNUSUAL.search(key))
    if odd or not kinds or not widths or not known:
        try:
            return _measured(settings)
        except Unsupported as error:
            if odd:
                raise Unsupported(f"{error} (config.json says {', '.join(odd[:4])})") from error
            if not kinds:
                raise Unsupported(f"{error}; the sliding layers are unknown") from error
            if not widths:
                raise Unsupported(f"{error}; no k_proj and v_proj give the heads") from error
    elif any(width != (both := 2 * settings.kv_heads * settings.head_dim) for width in widths):
        raise Unsupported(f"config.json says {both} values a token and layer, k_proj and v_proj {widths[0]}")
    window = settings.size("sliding_window") if "sliding" in kinds else None
    return [
        LayerCache(kind, width, window if kind == "sliding" else None)
        for kind, width in zip(kinds, widths, strict=True)
    ]


def _measured(settings: Settings) -> list[LayerCache]:
    """Return the caches measured on transformers' model. Raises Unsupported if they cannot be measured."""
    if settings.config is None:
        raise Unsupported(f"{settings.model_type} is not known")
    from quantkit.capacity import meta

    return [LayerCache(*layer) for layer in meta.caches(settings.config)]


def _kinds(settings: Settings) -> list[str] | None:
    """Return `full` or `sliding` for each layer; None if config.json does not give the types."""
    count, family, period = settings.layers, settings.model_type, PERIODS.get(settings.model_type)
    window, stated = settings.get("sliding_window"), settings.get("layer_types")
    if stated is not None:
        kinds = [KINDS.get(str(kind)) for kind in stated] if isinstance(stated, list) else []
        known = len(kinds) == count and None not in kinds and (window or "sliding" not in kinds)
        return kinds if known else None
    if period is not None and "sliding_window" not in settings.values:
        return None  # the configuration's class sets a window
    if window is None or (family.startswith("qwen") and not settings.get("use_sliding_window")):
        return ["full"] * count
    if period is None:
        return None
    period = period and settings.size("sliding_window_pattern", default=period)
    return ["sliding" if period == 0 or (k + 1) % period else "full" for k in range(count)]
