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
DEFAULTS: Computed = {  # where the field is absent or None
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
LATENT: Computed = {  # of multi-head latent attention: of a token's vector, whatever the heads
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

    @property
    def hybrid(self) -> bool:
        """Return whether some blocks have a recurrent state instead of attention."""
        return "ssm.state_size" in self.fields

    @property
    def mixture(self) -> bool:
        """Return whether blocks have experts."""
        return "expert_count" in self.fields

    def experts(self, config: PretrainedConfig) -> int:
        """Return the number of experts of a layer; 0 for a dense model."""
        return getattr(config, self.fields["expert_count"]) if self.mixture else 0

    def inexpressible(self, what: str) -> QuantkitError:
        """Return the error for a model that llama.cpp would compute differently."""
        return QuantkitError(f"llama.cpp's {self.name} does not know {what}", SAME_RESULT, UNSUPPORTED)


SAME_RESULT = "quantkit writes models that llama.cpp computes as transformers does"
_stored = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def _whole(part: Any) -> Any:
    """Return a part of a row with names of groups replaced by their content; in a list later mappings win."""
    part = _stored["groups"].get(part) if isinstance(part, str) else part
    if not isinstance(part, list):
        return part
    return {key: value for one in part for key, value in _whole(one).items()}


MAPPINGS = ("fields", "fixed", "flags", "rows", "constants")
COMMON = _whole("common")
TABLE = tuple(
    Architecture(**row | {key: _whole(row[key]) for key in MAPPINGS if key in row})
    for row in _stored["architectures"]
)


def of_config(config: PretrainedConfig) -> Architecture:
    """Return the row for a configuration's model_type. Raises QuantkitError (exit code 4) without one."""
    kind = config.model_type
    for row in TABLE:
        if kind in row.model_types:
            return row
    if otherwise := _stored["unlike"].get(kind):
        what = f"GGUF of {kind} is not supported: llama.cpp computes {otherwise}"
        raise QuantkitError(what, SAME_RESULT, UNSUPPORTED)
    known = sorted(kind for row in TABLE for kind in row.model_types)
    what = f"GGUF of {kind} is not supported"
    raise QuantkitError(what, f"quantkit knows what llama.cpp expects of: {', '.join(known)}", UNSUPPORTED)


def of_file(metadata: Mapping[str, Any]) -> Architecture:
    """Return the row for a file's `general.architecture`. Raises QuantkitError if there is none."""
    name = metadata.get("general.architecture")
    keys = {key.removeprefix(f"{name}."): value for key, value in metadata.items()}
    if row := named(str(name), keys):
        return row
    if named(str(name), {}):
        what = f"the GGUF file holds a mixture of {keys['expert_count']} experts"
        known = f"mixtures of: {', '.join(row.name for row in TABLE if row.mixture)}"
    else:
        what = f"GGUF files of {name or 'no architecture'} are not read"
        known = ", ".join(sorted({row.name for row in TABLE}))
    raise QuantkitError(what, f"quantkit reads {known}", UNSUPPORTED)


def named(name: str, keys: Mapping[str, Any]) -> Architecture | None:
    """Return the row of a llama.cpp architecture; None if there is none. keys: metadata without the name.

    If two mixtures have the name, the router's function in `keys` decides; without it, the first is returned.
    """
    rows = [row for row in TABLE if row.name == name and row.mixture == bool(keys.get("expert_count"))]
    gate = keys.get(GATE)
    return next((row for row in rows if row.constants.get(GATE) == gate), rows[0] if rows else None)


# ---- the metadata of a file as a config.json: transformers' names for what llama.cpp calls otherwise
#
# Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, the architecture before each. An
# architecture without a row keeps the keys of its metadata, so that what is unusual about it shows.
# `configuration.to_config` builds on `config_fields`.

# Architectures that are no row of the table, whose caches are those of a family that is known.
FURTHER = {"gemma": "gemma"}
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
FACTORS = {"rope_freqs.weight": "llama3", "rope_factors_long.weight": "longrope"}  # may stand for the type
PATTERN = "attention.sliding_window_pattern"  # every so many blocks attend to all, or a switch for each
FULL, SLIDING = "full_attention", "sliding_attention"


def refuse_other(source: str | Path, metadata: Mapping[str, Any]) -> None:
    """Raise QuantkitError (exit code 4) if a GGUF file is an importance matrix or an adapter."""
    kind = metadata.get("general.type")
    require(kind != "imatrix", f"{source} is an importance matrix, not a model", "use --imatrix", UNSUPPORTED)
    hint = "merge it into its base model: llama-export-lora -m BASE.gguf --lora ADAPTER.gguf -o NEW.gguf"
    require(kind != "adapter", f"{source} is an adapter (LoRA), not a model", hint, UNSUPPORTED)


def config_of(metadata: Mapping[str, Any], infos: Infos) -> dict[str, Any]:
    """Return the contents of config.json that a GGUF file of any architecture describes."""
    name = str(metadata.get("general.architecture", "unknown"))
    prefix = f"{name}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    config = {field: own[key] for key, field in PLAIN.items() if key in own}
    row = named(name, own)
    if row:
        config |= {"model_type": row.model_types[0]} | config_fields(row, own, infos)
    else:
        config = own | config | {"model_type": FURTHER.get(name, f"{name} (GGUF)")}
    if not config.get("sliding_window"):  # 0: none
        config["sliding_window"] = None
    elif row and (kinds := layer_types(row, own, len(infos))):
        config["layer_types"] = kinds
    scaling = {field: own[key] for key, field in SCALING.items() if key in own}
    for tensor, kind in FACTORS.items():
        if tensor in infos:
            scaling.setdefault("rope_type", kind)
    if scaling.get("rope_type", "none") != "none":
        config["rope_scaling"] = scaling
    if "vocab_size" not in config and isinstance(tokens := metadata.get("tokenizer.ggml.tokens"), list):
        config["vocab_size"] = len(tokens)
    return _uniform(config) | {"tie_word_embeddings": "output.weight" not in infos, "dtype": dtype(infos)}


def config_fields(row: Architecture, keys: Mapping[str, Any], infos: Infos) -> dict[str, Any]:
    """Return the fields of the configuration that keys and tensor names give by the row."""
    found: dict[str, Any] = {
        names if isinstance(names, str) else names[-1]: keys[key]
        for key, names in row.fields.items()
        if names is not None and keys.get(key) is not None
    }
    for name, tensor in row.flags.items():
        found[name] = (tensor.removeprefix("not ") in infos) != tensor.startswith("not ")
    if row.restore:
        found |= getattr(variants, row.restore)(keys, infos.keys())
    return found


def layer_types(row: Architecture, keys: Mapping[str, Any], most: int) -> list[str] | None:
    """Return the kind of attention of every block; None if it is not given, or for more than `most`
    blocks."""
    blocks = keys.get("block_count")
    period = keys.get(PATTERN, row.period(blocks))
    if isinstance(period, list):
        return [SLIDING if slides else FULL for slides in period] if len(period) == blocks else None
    if type(period) is not int or type(blocks) is not int or period < 1 or blocks > most:
        return None
    return variants.every(period, blocks, FULL, SLIDING)


def dtype(infos: Infos) -> str:
    """Return the dtype to compute in: float16 or bfloat16 if all matrices are stored so, else float32."""
    stored = {info.dtype for info in infos.values()} - {"F32"}
    return {frozenset({"F16"}): "float16", frozenset({"BF16"}): "bfloat16"}.get(frozenset(stored), "float32")


def _uniform(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with one number in place of a list of equal numbers; other lists are
    dropped."""
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim"):
        if isinstance(config.get(key), list):
            values = set(config.pop(key))
            if len(values) == 1:
                config[key] = values.pop()
            elif key != "intermediate_size":
                config["num_attention_heads"] = None
    # what llama.cpp takes where its file says nothing, which is not what transformers would fill in
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    return {"head_dim": None} | config
