"""The file types of llama-quantize: a base type, and the rules for what gets more bits than that.

Source: llama.cpp, `src/llama-quant.cpp`, `llama_tensor_get_type_impl`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from quantkit.errors import USAGE, QuantkitError

BLOCKS = {  # type -> weights and bytes of a block; asking gguf would make `plan` half as slow again
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
}
NEED_IMPORTANCE = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"}  # but for embedding and output
SCALED = {"NVFP4"}  # a float32 of the whole matrix lies beside it: `NAME.scale` of `NAME.weight`
OWN = {"MXFP4", "NVFP4"}  # file types that llama-quantize does not make
NO_FEEDBACK = {"IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0"}  # error feedback knows no way with them
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}


class Model(NamedTuple):
    """What the choice depends on, names and shapes aside. architecture: `general.architecture`."""

    architecture: str
    blocks: int
    heads: int
    kv_heads: int
    experts: int = 0

    @property
    def grouped(self) -> bool:
        """Whether four or more heads share keys and values: the matrices that make those are small."""
        return self.kv_heads > 0 and self.heads // self.kv_heads >= 4

    @property
    def is_70b(self) -> bool:
        """Whether llama.cpp takes it for a 70B: a Llama with grouped heads, or any Qwen 2, of 80 blocks."""
        if self.architecture == "llama":
            return self.blocks == 80 and self.heads != self.kv_heads
        return self.blocks == 80 and self.architecture == "qwen2"


class Place(NamedTuple):
    """Where a tensor stands: it is the `index`-th of `count` of its kind."""

    index: int
    count: int
    model: Model
    has_imatrix: bool

    def early(self, share: int) -> bool:
        """Among the first `1 / share`."""
        return self.index < self.count // share

    @property
    def more(self) -> bool:
        """The first eighth, the last one, and every third between (llama.cpp's `use_more_bits`)."""
        eighth = self.count // 8
        return self.index < eighth or self.index >= 7 * self.count // 8 or (self.index - eighth) % 3 == 2

    @property
    def falcon(self) -> bool:
        return self.model.architecture == "falcon"


Rule = Callable[[Place], str | None]  # None: the base type


def _base(at: Place) -> None:
    return None


@dataclass(frozen=True)
class FileType:
    """A file type: `base` is the type of what no rule names.

    values: of attention's values, or q, k and v in one. queries, keys: of attention's. attention: of its
    output; eight_experts: the same in models of eight experts. down, wide: of the feed-forward's way down,
    and of its two ways up. embedding: of one that is not the output, too. output: of the output matrix.
    experts: of the matrices of experts. sparing: so few bits that eight experts get no Q8_0; ways down are
    counted, not numbered by their blocks.
    """

    base: str
    values: Rule = _base
    down: Rule = _base
    attention: Rule = _base
    eight_experts: str | None = None
    queries: Rule = _base
    keys: Rule = _base
    wide: Rule = _base
    embedding: str | None = None
    output: str = "Q6_K"
    experts: str | None = None
    sparing: bool = False


def _iq4(base: str) -> FileType:
    return FileType(
        base,
        values=lambda at: "Q5_K" if at.model.grouped else None,
        down=lambda at: "Q5_K" if at.early(8) and not at.has_imatrix else None,
        eight_experts="Q5_K",
    )


def _legacy(base: str, better: str) -> FileType:
    return FileType(base, down=lambda at: better if at.early(8) and at.has_imatrix else None)


def _two_bits(base: str, better: str, embedding: str, attention: str | None) -> FileType:
    """The i-quants of one and two bits. better: of values and of the first ways down."""
    return FileType(
        base,
        values=lambda at: "Q4_K" if at.model.grouped or at.model.experts >= 4 else better,
        down=lambda at: better if at.early(8) else None,
        attention=lambda at: "Q5_K" if at.model.experts == 8 else attention,
        keys=lambda at: "Q4_K" if at.model.experts == 8 else None,
        embedding=embedding,
        output="Q5_K",
        sparing=True,
    )


def _values_iq3_xxs(at: Place) -> str | None:
    if at.model.grouped:
        return "Q4_K"
    return None if at.has_imatrix else "IQ3_S"


def _down_iq3_xxs(at: Place) -> str | None:
    if at.has_imatrix:
        return None
    return "Q4_K" if at.early(8) else "Q3_K"


FILE_TYPES = {
    "F32": FileType("F32"),
    "F16": FileType("F16"),
    "BF16": FileType("BF16"),
    "Q4_0": _legacy("Q4_0", "Q4_1"),
    "Q5_0": _legacy("Q5_0", "Q5_1"),
    "Q8_0": FileType("Q8_0"),
    "Q2_K": FileType(
        "Q2_K",
        values=lambda at: "Q4_K" if at.model.grouped else "Q3_K",
        down=lambda at: "Q3_K",
        attention=lambda at: None if at.falcon else "Q3_K",
        eight_experts="Q5_K",
    ),
    "Q3_K_S": FileType("Q3_K", eight_experts="Q5_K"),
    "Q3_K_M": FileType(
        "Q3_K",
        values=lambda at: "Q5_K" if at.index < 2 else "Q4_K",
        down=lambda at: "Q5_K" if at.early(16) else "Q4_K" if at.more or not at.falcon else None,
        attention=lambda at: None if at.falcon else "Q4_K",
        eight_experts="Q5_K",
    ),
    "Q3_K_L": FileType(
        "Q3_K",
        values=lambda at: "Q5_K",
        down=lambda at: "Q4_K" if at.falcon else "Q5_K",
        attention=lambda at: "Q4_K" if at.falcon else "Q5_K",
    ),
    "Q4_K_S": FileType(
        "Q4_K",
        values=lambda at: "Q5_K" if at.index < 4 else None,
        down=lambda at: "Q5_K" if at.early(8) and not at.falcon else None,
        eight_experts="Q5_K",
    ),
    "Q4_K_M": FileType(
        "Q4_K",
        values=lambda at: "Q6_K" if at.more else None,
        down=lambda at: ("Q5_K" if at.falcon and not at.early(16) else "Q6_K") if at.more else None,
        eight_experts="Q5_K",
    ),
    "Q5_K_S": FileType("Q5_K"),
    "Q5_K_M": FileType(
        "Q5_K",
        values=lambda at: "Q6_K" if at.more else None,
        down=lambda at: "Q6_K" if at.more else None,
    ),
    "Q6_K": FileType("Q6_K"),
    "IQ4_NL": _iq4("IQ4_NL"),
    "IQ4_XS": _iq4("IQ4_XS"),
    "IQ3_M": FileType(
        "IQ3_S",
        values=lambda at: "Q4_K",
        down=lambda at: "Q4_K" if at.early(8) or at.model.experts == 8 and at.more else None,
        attention=lambda at: None if at.falcon else "Q4_K",
        eight_experts="Q5_K",
    ),
    "IQ3_S": FileType("IQ3_S", values=lambda at: "Q4_K" if at.model.grouped else None, eight_experts="Q5_K"),
    "IQ3_XS": FileType(
        "IQ3_S",
        values=lambda at: "Q4_K" if at.model.grouped else None,
        queries=lambda at: "IQ3_XXS",
        keys=lambda at: "IQ3_XXS",
        wide=lambda at: "IQ3_XXS" if at.count // 8 <= at.index < 7 * at.count // 8 else None,
        eight_experts="Q5_K",
    ),
    "IQ3_XXS": FileType(
        "IQ3_XXS",
        values=_values_iq3_xxs,
        down=_down_iq3_xxs,
        attention=lambda at: None if at.falcon else "IQ3_S",
        queries=lambda at: "IQ2_S",
        keys=lambda at: "IQ2_S",
        embedding="IQ3_S",
        output="Q5_K",
        eight_experts="Q5_K",
    ),
    "IQ2_M": _two_bits("IQ2_S", "IQ3_S", "IQ3_S", "IQ3_S"),
    "IQ2_S": _two_bits("IQ2_XS", "IQ3_S", "IQ3_S", "IQ3_S"),
    "IQ2_XS": _two_bits("IQ2_XS", "Q2_K", "Q2_K", None),
    "IQ2_XXS": _two_bits("IQ2_XXS", "Q2_K", "Q2_K", None),
    "IQ1_M": _two_bits("IQ1_M", "Q2_K", "Q2_K", "IQ2_XXS"),
    "IQ1_S": _two_bits("IQ1_S", "Q2_K", "Q2_K", "IQ2_XXS"),
    "TQ1_0": FileType("TQ1_0", embedding="Q4_K"),
    "TQ2_0": FileType("TQ2_0", embedding="Q4_K"),
    "MXFP4_MOE": FileType("Q8_0", experts="MXFP4"),
    "MXFP4": FileType("MXFP4", embedding="Q6_K"),
    "NVFP4": FileType("NVFP4", embedding="Q6_K"),
}


def number(file_type: str) -> int:
    """How `general.file_type` names it."""
    from gguf import LlamaFileType

    names = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}
    return LlamaFileType[names.get(file_type, f"MOSTLY_{file_type}")].value


def parse_file_type(text: str) -> str:
    """The file type a user names, in llama-quantize's spelling. Raises QuantkitError for an unknown one."""
    return _known(ALIASES.get(text.upper(), text.upper()), FILE_TYPES, f"no file type {text!r}")


def parse_type(text: str, flag: str) -> str:
    """The ggml type a user names after `flag`. Raises QuantkitError for an unknown one."""
    return _known(text.upper(), BLOCKS, f"{flag}: no type {text!r}")


def _known(name: str, names: Collection[str], complaint: str) -> str:
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, 1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise QuantkitError(complaint, f"{meant}choose one of {', '.join(names)}", USAGE)
