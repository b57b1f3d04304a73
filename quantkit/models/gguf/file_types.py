"""The file types of llama-quantize: a base type, and rules that give some tensors more bits.

Source of file_types.json: llama.cpp, `src/llama-quant.cpp`, `llama_tensor_get_type_impl`. Sizes of ggml
blocks are copied from `gguf.GGML_QUANT_SIZES`, because importing gguf takes a fifth of a second.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from quantkit.errors import one_of

_stored = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
BLOCKS = {type: tuple(block) for type, block in _stored["blocks"].items()}  # weights and bytes of a block
FALLBACKS: dict[str, str] = _stored["fallbacks"]  # used if blocks of a type do not divide the columns
NEED_IMPORTANCE = {"IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"}  # embedding and output need none
SCALED = {"NVFP4"}  # types with one float32 scale per matrix: `NAME.scale` for `NAME.weight`
NO_FEEDBACK = {"TQ1_0", "TQ2_0"}  # types without error feedback
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}


class Model(NamedTuple):
    """The numbers of a model on which types depend. architecture: the file's `general.architecture`."""

    architecture: str
    blocks: int
    heads: int
    kv_heads: int
    experts: int = 0

    @property
    def grouped(self) -> bool:
        """Return whether at least four query heads share a key/value head, so that k and v are small."""
        return self.kv_heads > 0 and self.heads // self.kv_heads >= 4

    @property
    def is_70b(self) -> bool:
        """Return whether llama.cpp treats the model as a 70B: 80 blocks, and Llama with grouped heads or any
        Qwen 2."""
        if self.architecture == "llama":
            return self.blocks == 80 and self.heads != self.kv_heads
        return self.blocks == 80 and self.architecture == "qwen2"


def facts(index: int, count: int, model: Model, has_imatrix: bool) -> dict[str, bool]:
    """Return whether each word of the conditions in file_types.json is true of a tensor: number `index` among
    `count` tensors of its kind."""
    eighth, last_eighth = count // 8, 7 * count // 8
    return {
        "else": True,
        "first2": index < 2,
        "first4": index < 4,
        "early8": index < eighth,
        "early16": index < count // 16,
        "middle": eighth <= index < last_eighth,
        # the first and the last eighth, and every third between (llama.cpp's `use_more_bits`)
        "more": index < eighth or index >= last_eighth or (index - eighth) % 3 == 2,
        "falcon": model.architecture == "falcon",
        "imatrix": has_imatrix,
        "grouped": model.grouped,
        "experts4": model.experts >= 4,
        "experts8": model.experts == 8,
    }


@dataclass(frozen=True)
class FileType:
    """A file type. base: type of all tensors without a rule. A rule maps conditions to types; the first true
    one counts.

    The other fields hold types for tensors. values: attention v, or fused q, k and v. queries, keys:
    attention q and k. attention: the output projection; eight_experts: the output projection with eight
    experts. down: the MLP's down; wide: gate and up. embedding: a token embedding that is not the output
    matrix. output: the output matrix. experts: experts' matrices. sparing: eight experts do not raise types
    to Q8_0, and MLP matrices are numbered by a counter instead of their blocks.
    """

    base: str
    values: Mapping[str, str] = field(default_factory=dict)
    down: Mapping[str, str | None] = field(default_factory=dict)
    attention: Mapping[str, str | None] = field(default_factory=dict)
    eight_experts: str | None = None
    queries: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    wide: Mapping[str, str] = field(default_factory=dict)
    embedding: str | None = None
    output: str = "Q6_K"
    experts: str | None = None
    sparing: bool = False

    def by_rule(self, kind: str, facts: Mapping[str, bool]) -> str | None:
        """Return the type that the rule of a kind of tensors gives; None if the base type applies. "!" before
        a word of a condition negates it."""
        for condition, type in getattr(self, kind).items():
            if all(facts[word.lstrip("!")] != word.startswith("!") for word in condition.split()):
                return type
        return None


FILE_TYPES = {name: FileType(**fields) for name, fields in _stored["file_types"].items()}


def number(file_type: str) -> int:
    """Return the number that `general.file_type` has for a file type."""
    from gguf import LlamaFileType

    names = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}
    return LlamaFileType[names.get(file_type, f"MOSTLY_{file_type}")].value


def parse_file_type(text: str) -> str:
    """Return llama-quantize's spelling of a file type. Raises QuantkitError if it is unknown."""
    return one_of(text.upper(), FILE_TYPES, f"no file type {text!r}", ALIASES)


def parse_type(text: str, flag: str) -> str:
    """Return the ggml type that the user gave for `flag`. Raises QuantkitError if it is unknown."""
    return one_of(text.upper(), BLOCKS, f"{flag}: no type {text!r}")
