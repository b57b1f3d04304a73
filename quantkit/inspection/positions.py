"""How a model knows the places of its tokens, and how many it was trained for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

CONTEXT = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx"
)  # fmt: skip
TABLES = ("wpe.weight", "embed_positions.weight", "position_embd.weight")
THETA = ("rope_theta", "rotary_emb_base")
ROTARY = (*THETA, "rope_parameters", "rope_scaling", "rotary_pct", "rotary_dim", "partial_rotary_factor")
ALIBI = ("bloom", "mpt")
UNSCALED_LIMIT = 16384  # tokens: no known model goes further with a base of 10,000 and unscaled positions
SMALL_THETA = 10000.0
UNLIMITED = 10**9  # tokenizers say 1e30 where they mean that they do not know


@dataclass(frozen=True)
class Positions:
    """kind: rope, learned, alibi or unknown. context: tokens the configuration promises; trained: tokens it
    says the model was trained on before its positions were scaled. scaling: the rope's, {} where unscaled.
    """

    kind: str
    context: int | None
    trained: int | None
    theta: float | None
    scaling: dict[str, Any]
    sliding_window: int | None
    warnings: list[str]

    def describe(self) -> str:
        """`2048 tokens, rope of base 10000`."""
        parts = [f"{self.context} tokens" if self.context else "no limit is told"]
        kinds = {"learned": "learned positions", "alibi": "ALiBi", "unknown": "positions of unknown kind"}
        parts.append(kinds.get(self.kind, f"rope of base {self.theta:g}" if self.theta else "rope"))
        if self.scaling:
            factor = self.scaling.get("factor")
            parts.append(
                f"scaled: {kind_of(self.scaling)}" + (f" × {factor:g}" if _is_number(factor) else "")
            )
            parts += [f"trained on {self.trained}"] if self.trained else []
        parts += [f"attention over {self.sliding_window}"] if self.sliding_window else []
        return ", ".join(parts)


def positions(
    config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...] | None], tokenizer_limit: Any = None
) -> Positions:
    """`config`: of the language model. `tensors`: shapes by name. `tokenizer_limit`: its model_max_length."""
    rope = _rope(config)
    table = next((shape for name, shape in tensors.items() if name.endswith(TABLES) and shape), None)
    kind = _kind(config, table is not None, tensors)
    context = _number(next((config[key] for key in CONTEXT if config.get(key)), None))
    trained = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    trained = _number(trained)
    theta = rope.get("rope_theta") or next((config[key] for key in THETA if config.get(key)), None)
    theta = float(theta) if _is_number(theta) else None
    scaling = rope if kind == "rope" and kind_of(rope) != "default" else {}
    window = _number(config.get("sliding_window")) if config.get("use_sliding_window", True) else None
    made = Positions(kind, context, trained, theta, scaling, window, [])
    made.warnings.extend(_warnings(made, table, tokenizer_limit))
    return made


def kind_of(rope: Mapping[str, Any]) -> str:
    """`default` where positions are not scaled."""
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope's parameters; those of full attention where kinds of layers have their own."""
    stored = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(stored, dict):
        return {}
    nested = stored.get("full_attention")
    return nested if isinstance(nested, dict) else stored


def _kind(config: Mapping[str, Any], learned: bool, names: Iterable[str]) -> str:
    if learned:
        return "learned"
    attention = config.get("attn_config")
    if config.get("alibi") or config.get("model_type") in ALIBI:
        return "alibi"
    if isinstance(attention, dict) and attention.get("alibi"):
        return "alibi"
    rotates = any(config.get(key) for key in ROTARY) or any("rope_freqs" in name for name in names)
    return "rope" if rotates or any(".self_attn.q_proj." in name for name in names) else "unknown"


def _warnings(found: Positions, table: tuple[int, ...] | None, tokenizer_limit: Any) -> list[str]:
    """Reasons to doubt that the model computes well, or at all, up to its context."""
    context, trained, warnings = found.context, found.trained, []
    limit = _number(tokenizer_limit)
    if context and limit and context < limit < UNLIMITED:
        warnings.append(f"the tokenizer takes {limit} tokens, the model {context}")
    if table and context and table[0] < context:
        warnings.append(f"the configuration promises {context} tokens, positions are stored for {table[0]}")
    if found.kind != "rope" or not context:
        return warnings
    if not found.scaling:
        if trained and trained < context:
            warnings.append(
                f"the configuration promises {context} tokens of a model trained on {trained}, and nothing "
                f"scales its positions: expect nonsense beyond {trained}"
            )
        elif (found.theta or SMALL_THETA) <= SMALL_THETA and context > UNSCALED_LIMIT:
            warnings.append(
                f"{context} tokens with a rope of base {found.theta or SMALL_THETA:g}, not scaled: "
                "few models were trained so far out; try a long text before you rely on it"
            )
        return warnings
    factor = found.scaling.get("factor")
    reach = trained * factor if trained and _is_number(factor) else None
    if reach and context > 1.01 * reach:
        warnings.append(
            f"the configuration promises {context} tokens; {kind_of(found.scaling)} × {factor:g} carries a "
            f"model trained on {trained} to {reach:.0f}"
        )
    return warnings


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any) -> int | None:
    return int(value) if _is_number(value) and 0 < value < 1e18 else None
