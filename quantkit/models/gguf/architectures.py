"""The architectures that llama.cpp runs and quantkit reads and writes: one row of architectures.json each.

A row maps llama.cpp's metadata keys to fields of transformers' configuration, in both directions, and lists
what llama.cpp assumes without a key. Sources: the loaders of llama.cpp (src/models), transformers'
configurations. Nothing here imports torch, because `plan` and `inspect` use it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import UNSUPPORTED, QuantkitError, require
from quantkit.models.gguf import variants
from quantkit.models.gguf.variants import ROPE_SECTIONS, SHARED_LENGTH, head_dim, kv_heads

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from quantkit.models.files.safetensors_folder import TensorInfo

GATE = "expert_gating_func"
Infos = Mapping[str, "TensorInfo"]
Computed = Mapping[str, Callable[["PretrainedConfig"], Any]]
DEFAULTS: Computed = {  # for fields that are absent or None
    "context_length": lambda config: 2048,
    "feed_forward_length": lambda config: 4 * config.hidden_size,
    "attention.head_count_kv": kv_heads,
    "attention.key_length": head_dim,
    "attention.value_length": head_dim,
    SHARED_LENGTH: lambda config: config.moe_intermediate_size * config.moe_num_shared_experts or None,
    "ssm.inner_size": lambda config: config.linear_num_value_heads * config.linear_value_head_dim,
    "full_attention_interval": lambda config: config.layer_types.index("full_attention") + 1,
    ROPE_SECTIONS: variants.rope_sections,
}
LATENT: Computed = {  # multi-head latent attention: sizes of a token's vector, for any number of heads
    "attention.key_length": lambda config: config.kv_lora_rank + config.qk_rope_head_dim,
    "attention.value_length": lambda config: config.kv_lora_rank,
    "attention.head_count_kv": lambda config: 1,
    "attention.key_length_mla": lambda config: config.qk_nope_head_dim + config.qk_rope_head_dim,
    "attention.q_lora_rank": lambda config: config.q_lora_rank or 0,
}


@dataclass(frozen=True)
class Architecture:
    """An architecture that llama.cpp calls `name`. A mixture of experts may share the name of a dense one.

    model_types: transformers' names; a file is read as the first. fields: metadata key without the name ->
    field of the configuration, in the order of writing; of several fields, the first that is set; None:
    llama.cpp reads the key, but no field corresponds. fixed: field -> values for which llama.cpp computes the
    same, such as all forms of GELU. flags: field -> tensor whose presence means True (absence with "not"
    before the name). rows: GGUF tensor -> order of its rows (see `tensors`). constants: keys with the same
    value in every file. norm_shift: number added to weights of norms in the file. rope: supported scalings of
    rotary embeddings; None: other position embeddings. partial_rotary: only a part of each head may be
    rotated. free_head_dim: heads need not fill the hidden size. window: default period of blocks with full
    attention, if others have sliding attention; window_depth: only models with this many blocks have it.
    wide_blocks: with this many blocks, attention is scaled by hidden size per head instead of the head size.
    head: output.weight is required ("always"), omitted if tied ("tied"), or never read. latent: keys and
    values are computed from one vector per token (MLA). truncate: llama.cpp assumes YaRN with integer bounds.
    refuse, restore: functions in `variants` that return a reason against a configuration, and further fields
    of the configuration of a file.
    """

    name: str
    model_types: Sequence[str]
    fields: Mapping[str, str | Sequence[str] | None]
    fixed: Mapping[str, Sequence] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    norm_shift: float = 0.0
    rope: Sequence[str] | None = ("linear", "yarn")
    partial_rotary: bool = False
    free_head_dim: bool = False
    window: int | None = None
    window_depth: int | None = None
    wide_blocks: int | None = None
    head: str = "tied"
    latent: bool = False
    truncate: bool = True
    refuse: str | None = None
    restore: str | None = None

    def period(self, blocks: int) -> int | None:
        """Return n if every nth block has full attention in a model with `blocks` blocks; None without
        sliding attention. A key of the file may override it."""
        return self.window if self.window_depth in (None, blocks) else 1

    def score_scalar(self, blocks: int, hidden: int, heads: int, head_dim: int) -> int:
        """Return n if llama.cpp divides attention scores by the square root of n."""
        return hidden // heads if blocks == self.wide_blocks else head_dim

    @property
    def mixture(self) -> bool:
        return "expert_count" in self.fields

    def experts(self, config: PretrainedConfig) -> int:
        """Return the number of experts of a layer; 0 for a dense model."""
        return getattr(config, self.fields["expert_count"]) if self.mixture else 0

    def inexpressible(self, what: str) -> QuantkitError:
        """Return the error for a model that llama.cpp would compute differently."""
        return QuantkitError(f"llama.cpp's {self.name} does not know {what}", SAME_RESULT, UNSUPPORTED)


SAME_RESULT = "quantkit writes models that llama.cpp computes as transformers does"
_stored = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def _expanded(entry: Any) -> Any:
    """Return an entry with names of groups replaced by their content; in a list later mappings win."""
    entry = _stored["groups"].get(entry) if isinstance(entry, str) else entry
    if not isinstance(entry, list):
        return entry
    return {key: value for inner in entry for key, value in _expanded(inner).items()}


MAPPINGS = ("fields", "fixed", "flags", "rows", "constants")
COMMON = _expanded("common")
TABLE = tuple(
    Architecture(**row | {key: _expanded(row[key]) for key in MAPPINGS if key in row})
    for row in _stored["architectures"]
)


def of_config(config: PretrainedConfig) -> Architecture:
    """Return the row for a configuration's model_type. Raises QuantkitError (exit code 4) without one."""
    kind = config.model_type
    for arch in TABLE:
        if kind in arch.model_types:
            return arch
    what = f"GGUF of {kind} is not supported"
    if difference := _stored["unlike"].get(kind):
        raise QuantkitError(f"{what}: llama.cpp computes {difference}", SAME_RESULT, UNSUPPORTED)
    supported = ", ".join(sorted(kind for arch in TABLE for kind in arch.model_types))
    raise QuantkitError(what, f"quantkit knows what llama.cpp expects of: {supported}", UNSUPPORTED)


def of_file(metadata: Mapping[str, Any]) -> Architecture:
    """Return the row for a file's `general.architecture`. Raises QuantkitError if there is none."""
    name = metadata.get("general.architecture")
    keys = {key.removeprefix(f"{name}."): value for key, value in metadata.items()}
    if arch := named(str(name), keys):
        return arch
    if named(str(name), {}):
        what = f"the GGUF file holds a mixture of {keys['expert_count']} experts"
        supported = f"mixtures of: {', '.join(arch.name for arch in TABLE if arch.mixture)}"
    else:
        what = f"GGUF files of {name or 'no architecture'} are not read"
        supported = ", ".join(sorted({arch.name for arch in TABLE}))
    raise QuantkitError(what, f"quantkit reads {supported}", UNSUPPORTED)


def named(name: str, keys: Mapping[str, Any]) -> Architecture | None:
    """Return the row of a llama.cpp architecture; None if there is none. keys: metadata without the name.

    If two mixtures have the name, the router's function in `keys` decides; without it, the first is returned.
    """
    mixture, gate = bool(keys.get("expert_count")), keys.get(GATE)
    archs = [arch for arch in TABLE if arch.name == name and arch.mixture == mixture]
    return next((arch for arch in archs if arch.constants.get(GATE) == gate), archs[0] if archs else None)


# ---- the metadata of a file as a config.json: transformers' names for what llama.cpp calls otherwise
#
# Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, the architecture before each. An
# architecture without a row keeps the keys of its metadata, so that what is unusual about it shows.
# `configuration.to_config` builds on `config_fields`.

PLAIN = {key: name for key, name in COMMON.items() if key != "attention.value_length"} | {
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
}
SCALING = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
FACTORS = {"rope_freqs.weight": "llama3", "rope_factors_long.weight": "longrope"}  # imply a scaling
PATTERN = "attention.sliding_window_pattern"  # a period of full attention, or a flag per block
FULL, SLIDING = "full_attention", "sliding_attention"


IMATRIX = "it is for quantkit gguf MODEL --imatrix FILE, or for llama-quantize --imatrix"


def refuse_other(source: str | Path, metadata: Mapping[str, Any]) -> None:
    """Raise QuantkitError (exit code 4) if a GGUF file is an importance matrix or an adapter."""
    kind = metadata.get("general.type")
    require(kind != "imatrix", f"{source} is an importance matrix, not a model", IMATRIX, UNSUPPORTED)
    hint = "merge it into its base model: llama-export-lora -m BASE.gguf --lora ADAPTER.gguf -o NEW.gguf"
    require(kind != "adapter", f"{source} is an adapter (LoRA), not a model", hint, UNSUPPORTED)


def config_of(metadata: Mapping[str, Any], infos: Infos) -> dict[str, Any]:
    """Return the contents of config.json that a GGUF file of any architecture describes."""
    name = str(metadata.get("general.architecture", "unknown"))
    prefix = f"{name}."
    keys = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    config = {field: keys[key] for key, field in PLAIN.items() if key in keys}
    arch = named(name, keys)
    if arch:
        config |= {"model_type": arch.model_types[0]} | config_fields(arch, keys, infos)
    else:  # gemma is no row of the table, but `plan` knows the family's cache
        config = keys | config | {"model_type": name if name == "gemma" else f"{name} (GGUF)"}
    if not config.get("sliding_window"):  # 0: none
        config["sliding_window"] = None
    elif arch and (kinds := layer_types(arch, keys, len(infos))):
        config["layer_types"] = kinds
    scaling = {field: keys[key] for key, field in SCALING.items() if key in keys}
    for tensor, kind in FACTORS.items():
        if tensor in infos:
            scaling.setdefault("rope_type", kind)
    if scaling.get("rope_type", "none") != "none":
        config["rope_scaling"] = scaling
    if "vocab_size" not in config and isinstance(tokens := metadata.get("tokenizer.ggml.tokens"), list):
        config["vocab_size"] = len(tokens)
    return _uniform(config) | {"tie_word_embeddings": "output.weight" not in infos, "dtype": dtype(infos)}


def config_fields(arch: Architecture, keys: Mapping[str, Any], infos: Infos) -> dict[str, Any]:
    """Return the fields of the configuration that follow from keys and tensor names."""
    fields: dict[str, Any] = {
        names if isinstance(names, str) else names[-1]: keys[key]
        for key, names in arch.fields.items()
        if names is not None and keys.get(key) is not None
    }
    for name, tensor in arch.flags.items():
        fields[name] = (tensor.removeprefix("not ") in infos) != tensor.startswith("not ")
    if arch.restore:
        whole = {key: value for key, value in keys.items() if type(value) is int}
        fields |= getattr(variants, arch.restore)(whole, infos.keys())
    return fields


def layer_types(arch: Architecture, keys: Mapping[str, Any], limit: int) -> list[str] | None:
    """Return the kind of attention of each block; None if it is unknown, or for more than `limit` blocks."""
    blocks = keys.get("block_count")
    period = keys.get(PATTERN, arch.period(blocks))
    if isinstance(period, list):
        return [SLIDING if slides else FULL for slides in period] if len(period) == blocks else None
    if type(period) is not int or type(blocks) is not int or period < 1 or blocks > limit:
        return None
    return variants.periodic(period, blocks, FULL, SLIDING)


def dtype(infos: Infos) -> str:
    """Return the dtype to compute in: float16 or bfloat16 if all matrices are stored so, else float32."""
    stored = {info.dtype for info in infos.values()} - {"F32"}
    return {frozenset({"F16"}): "float16", frozenset({"BF16"}): "bfloat16"}.get(frozenset(stored), "float32")


def _uniform(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with one number in place of a list of equal numbers, without other lists."""
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim"):
        if isinstance(config.get(key), list):
            values = set(config.pop(key))
            if len(values) == 1:
                config[key] = values.pop()
            elif key != "intermediate_size":
                config["num_attention_heads"] = None
    # llama.cpp's default, which differs from transformers'
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    return {"head_dim": None} | config
