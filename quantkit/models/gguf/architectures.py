"""The architectures that llama.cpp runs and quantkit writes and reads: one row of architectures.json each.

A row relates llama.cpp's metadata to fields of transformers' configuration, in both directions, and says
what llama.cpp takes for granted. Sources: the loaders of llama.cpp (src/models) for keys and for what is
computed whatever the file says, transformers' configurations for the fields. Nothing here imports torch:
plans and inspections ask, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.models.gguf import variants
from quantkit.models.gguf.variants import ROPE_SECTIONS, SHARED_LENGTH, head_dim, kv_heads

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GATE = "expert_gating_func"
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
    """An architecture of llama.cpp called `name`; a mixture of experts may have the name of a dense one.

    model_types: of transformers; a file is read as the first. fields: metadata key below the name -> field of
    the configuration, in the order in which they are written; of several fields, the first that is set; None:
    llama.cpp reads the key, the configuration has no field for it. fixed: field -> values that give what
    llama.cpp computes, such as all forms of GELU, as it has the tanh form for each. flags: field -> tensor
    whose presence says it is true ("not" before the name: absence). rows: GGUF tensor -> order of its rows
    (see `tensors`). constants: keys that are the same in every file. norm_shift: what llama.cpp wants added
    to norms. rope: scalings of rotary embeddings it can express; None for other positions. partial_rotary:
    heads may be rotated in part. free_head_dim: heads need not fill the hidden size. window: it knows sliding
    attention, in all but the last of so many blocks by default; window_depth: at this depth alone.
    wide_blocks: at this depth it takes hidden size per head, not the head's size, for the scale of attention.
    head: output.weight must exist ("always"), is left out when tied, or is never read. latent: keys and
    values are made from one vector of each token (MLA). truncate: yarn has whole dimensions as bounds, which
    llama.cpp takes for granted. refuse: of `variants`, further reasons against a configuration; restore:
    further fields of the configuration that a file describes.
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
        """Return the period of blocks that attend to all tokens, for a model of so many, unless the file says
        otherwise."""
        return self.window if self.window_depth in (None, blocks) else 1

    @property
    def hybrid(self) -> bool:
        """Return whether some blocks keep a state instead of attending."""
        return "ssm.state_size" in self.fields

    @property
    def mixture(self) -> bool:
        """Return whether blocks have experts."""
        return "expert_count" in self.fields

    def experts(self, config: PretrainedConfig) -> int:
        """Return the experts of a layer; 0 for a dense model."""
        return getattr(config, self.fields["expert_count"]) if self.mixture else 0

    def inexpressible(self, what: str) -> QuantkitError:
        """Return the error for a model that llama.cpp would compute otherwise."""
        return QuantkitError(f"llama.cpp's {self.name} does not know {what}", ALIKE, UNSUPPORTED)


ALIKE = "quantkit writes models that llama.cpp computes as transformers does"
_stored = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def _whole(part: Any) -> Any:
    """Return a part of a row with groups replaced by their content; in a list of mappings later ones win."""
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
    """Return the row of a configuration's model_type. Raises QuantkitError (exit code 4) if there is none."""
    kind = config.model_type
    for row in TABLE:
        if kind in row.model_types:
            return row
    if otherwise := _stored["unlike"].get(kind):
        what = f"GGUF of {kind} is not supported: llama.cpp computes {otherwise}"
        raise QuantkitError(what, ALIKE, UNSUPPORTED)
    known = sorted(kind for row in TABLE for kind in row.model_types)
    raise QuantkitError(
        f"GGUF of {kind} is not supported",
        hint=f"quantkit knows what llama.cpp expects of: {', '.join(known)}",
        exit_code=UNSUPPORTED,
    )


def of_file(metadata: Mapping[str, Any]) -> Architecture:
    """Return row that a file's `general.architecture` names. Raises QuantkitError for another."""
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
    """Return the row of an architecture of llama.cpp, by the keys below its name; None if there is none.

    Of two mixtures with one name, the one whose router computes as the file says; the first if it says
    nothing.
    """
    rows = [row for row in TABLE if row.name == name and row.mixture == bool(keys.get("expert_count"))]
    gate = keys.get(GATE)
    return next((row for row in rows if row.constants.get(GATE) == gate), rows[0] if rows else None)
