"""Values of config.json, checked before they are believed, under whichever name a family has for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.capacity import defaults
from quantkit.errors import UNSUPPORTED, QuantkitError

LARGEST = 1 << 40  # of any size; above this config.json is damaged
MOST_LAYERS = 10_000
HEADS, VOCABULARY, CONTEXT, *_ = defaults.SYNONYMS


@dataclass(frozen=True)
class Settings:
    """The part of a config.json that describes the decoder."""

    values: Mapping[str, Any]

    @staticmethod
    def of(config: Mapping[str, Any]) -> Settings:
        """`text_config` where a model has other parts, too; what it leaves out as transformers fills it in.

        Raises QuantkitError (exit code 4) without a model_type.
        """
        text = config.get("text_config")
        values = dict(text) if isinstance(text, dict) else dict(config)
        values.setdefault("model_type", config.get("model_type"))
        values.setdefault("tie_word_embeddings", config.get("tie_word_embeddings"))
        if not isinstance(values["model_type"], str):
            raise QuantkitError(
                "config.json names no model_type", "give the config.json of a language model", UNSUPPORTED
            )
        return Settings(defaults.fill(values))

    @property
    def model_type(self) -> str:
        return self.values["model_type"]

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these that is there and not null."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), default)

    def size(self, *names: str, default: int | None = None, most: int = LARGEST) -> int:
        """A whole number from 1 to `most`. Raises QuantkitError for anything else, and without a default."""
        value = self.get(*names, default=default)
        if value is None:
            raise QuantkitError(
                f"config.json says no {names[0]}, and {self.model_type} has no default for it",
                hint="give a complete config.json",
                exit_code=UNSUPPORTED,
            )
        if type(value) is not int or not 1 <= value <= most:
            name = next((name for name in names if self.values.get(name) is not None), names[0])
            raise QuantkitError(
                f"config.json: {name} is {value!r}, not a number from 1 to {most}", "download it again"
            )
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """A switch."""
        return bool(self.get(name, default=default))

    # ---- what all families have

    @property
    def hidden(self) -> int:
        return self.size("hidden_size", "n_embd", "d_model", "n_embed", "dim")

    @property
    def layers(self) -> int:
        listed = len(self.get("layers_block_type", default=())) or None  # how transformers saves nemotron_h
        return self.size(
            "num_hidden_layers", "n_layer", "n_layers", "num_layers", default=listed, most=MOST_LAYERS
        )

    @property
    def heads(self) -> int:
        return self.size(*HEADS)

    @property
    def head_dim(self) -> int:
        """Width of a head; where nothing is said, the heads share the hidden width."""
        return self.size("head_dim", default=max(1, self.hidden // self.heads))

    @property
    def kv_heads(self) -> int:
        """Heads that keys and values have: as many as queries where nothing is said."""
        if self.model_type == "gpt_bigcode":
            return 1 if self.flag("multi_query", True) else self.heads
        if self.model_type in (
            "falcon",
            "RefinedWeb",
            "RefinedWebModel",
        ):  # multi_query files may say num_kv_heads, too
            if self.flag("new_decoder_architecture", self.model_type == "RefinedWeb"):
                return self.size("num_kv_heads", "n_head_kv", default=self.heads)
            return 1 if self.flag("multi_query", True) else self.heads
        if self.model_type == "mpt":
            attention = Settings(dict(self.get("attn_config", default={})))
            single = attention.get("attn_type") == "multiquery_attention"
            return attention.size("kv_n_heads", default=1 if single else self.heads)
        return self.size("num_key_value_heads", default=self.heads)

    @property
    def context(self) -> int | None:
        """Longest sequence the model was made for, in tokens; None where it has no limit."""
        return None if self.get(*CONTEXT) is None else self.size(*CONTEXT)

    @property
    def vocabulary(self) -> int:
        return self.size(*VOCABULARY)

    @property
    def stored_dtype(self) -> str:
        """Precision of the stored weights, `bfloat16` where config.json does not say."""
        value = self.get("dtype", "torch_dtype", default="bfloat16")
        return value if value in ("float32", "float16", "bfloat16") else "bfloat16"
