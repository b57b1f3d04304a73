"""Values of config.json, found under the names of every family and checked before use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quantkit.capacity import Unsupported
from quantkit.errors import UNSUPPORTED, QuantkitError, require
from quantkit.inspection.names import CONTEXT

LARGEST_SIZE = 1 << 40  # largest plausible size; larger ones mean a damaged config.json
MOST_LAYERS = 10_000
# Names of one number in different families; a file needs only one of them.
HEADS = ("num_attention_heads", "n_head", "n_heads")


@dataclass(frozen=True)
class Settings:
    """The values of a config.json that describe the decoder. config: the complete file, from which
    transformers derives missing values; None if there is no file."""

    values: Mapping[str, Any]
    config: Mapping[str, Any] | None = None

    @staticmethod
    def of(config: Mapping[str, Any]) -> Settings:
        """Return the settings of the language model; multimodal models have them in `text_config`. Raises
        QuantkitError (exit code 4) if there is no model_type."""
        text = config.get("text_config")
        values = dict(text) if isinstance(text, dict) else dict(config)
        values = {key: config[key] for key in ("model_type", "tie_word_embeddings") if key in config} | values
        named, hint = isinstance(values.get("model_type"), str), "give the config.json of a language model"
        require(named, "config.json names no model_type", hint, UNSUPPORTED)
        return Settings(values, config)

    @property
    def model_type(self) -> str:
        return self.values["model_type"]

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first value, by these names, that is not null; else `default`."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), default)

    def filled(self, *names: str) -> Any:
        """Return the first value, by these names, that is not null. If the file has none of the names, return
        transformers' default, which takes seconds to import. An explicit null gives None."""
        present = any(name in self.values for name in names)
        return self.get(*names) if present else next(filter(None, map(self.defaults.get, names)), None)

    @cached_property
    def defaults(self) -> Mapping[str, Any]:
        """Return transformers' configuration with defaults filled in; {} for an unknown family."""
        if self.config is None:
            return {}
        from quantkit.capacity import meta

        try:
            return meta.settings(self.config)
        except Unsupported:
            return {}

    def size(self, *names: str, default: int | None = None, most: int = LARGEST_SIZE) -> int:
        """Return the value, by these names: a whole number from 1 to `most`. Else raises QuantkitError."""
        value = self.filled(*names) if default is None else self.get(*names, default=default)
        what = f"config.json has no {names[0]}, and {self.model_type} has no default for {names[0]}"
        require(value is not None, what, "give a complete config.json", UNSUPPORTED)
        if type(value) is not int or not 1 <= value <= most:
            name = next((name for name in names if self.values.get(name) is not None), names[0])
            what = f"config.json: {name} is {value!r}, not a number from 1 to {most}"
            raise QuantkitError(what, "download it again")
        return value

    @property
    def hidden(self) -> int:
        return self.size("hidden_size", "n_embd", "d_model", "n_embed", "dim")

    @property
    def layers(self) -> int:
        return self.size("num_hidden_layers", "n_layer", "n_layers", "num_layers", most=MOST_LAYERS)

    @property
    def heads(self) -> int:
        return self.size(*HEADS)

    @property
    def head_dim(self) -> int:
        """Return the width of a head; by default the hidden size divided by the number of heads."""
        return self.size("head_dim", default=max(1, self.hidden // self.heads))

    @property
    def kv_heads(self) -> int:
        """Return the number of key/value heads; by default the number of query heads."""
        return self.size("num_key_value_heads", default=self.heads)

    @property
    def context(self) -> int | None:
        """Return the model's maximum number of tokens; None if there is no limit."""
        return None if self.filled(*CONTEXT) is None else self.size(*CONTEXT)

    @property
    def stored_dtype(self) -> str:
        """Return the dtype of the stored weights; `bfloat16` by default."""
        value = self.get("dtype", "torch_dtype", default="bfloat16")
        return value if value in ("float32", "float16", "bfloat16") else "bfloat16"
