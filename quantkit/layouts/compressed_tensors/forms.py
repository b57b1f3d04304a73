"""Base of the forms. A form stores a linear as compressed-tensors does for one `format` of a config group.

`integers.py` and `floats.py` have the forms of llm-compressor's presets. Format: compressed-tensors 0.20
`compressors`, `quant_scheme.py`.
"""

from dataclasses import dataclass
from typing import Any, Self

from quantkit.layouts import Layout, LinearSpec, Statistic, Tensors, Width, spec_of_shape


@dataclass(frozen=True)
class Numbers:
    """A number format of weights or activations. kind: `int`, or `float` (e4m3 or e2m1).

    strategy: which values share a scale. group_size: columns per group, for the strategies `group` and
    `tensor_group` (which adds a scale of the tensor). block: rows and columns, for the strategy `block`.
    dynamic: scales are computed from the values at run time instead of being stored. power_of_two: scales are
    powers of two, as in MX.
    """

    bits: int
    kind: str
    symmetric: bool
    strategy: str
    group_size: int | None = None
    block: tuple[int, int] | None = None
    dynamic: bool = False
    power_of_two: bool = False

    @property
    def is_fp4(self) -> bool:
        """True for NVFP4 and MXFP4."""
        return (self.bits, self.kind) == (4, "float")


def described(
    bits: int, kind: str, strategy: str, group_size: int | None = None, dynamic: bool | str = False,
    observer: str | None = "minmax", symmetric: bool = True, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return the dictionary of a number format as `quantization_config` stores it."""
    numbers = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy}
    return numbers | {"group_size": group_size, **more, "dynamic": dynamic, "observer": observer}


class Form:
    """The tensors and configuration of a linear: a frozen dataclass with the options of its method.

    A subclass defines `like(weights, inputs)`, which returns the form of a config group or None; `tensors`,
    `encode` and `decode(tensors, spec)` as in Layout; `weights()`, the entry of that name in a config group.
    Linears with equal forms share a config group.

    NAME: `format` of the config group. LABEL: name in `inspect`. SUFFIXES: all tensors it may store. CODES:
    the tensor with the codes, and its dtype. optional, floats, needs: as in Layout.
    """

    NAME: str
    LABEL: str
    SUFFIXES: tuple[str, ...]
    CODES: tuple[str, str]
    optional: tuple[str, ...] = ()
    floats: tuple[str, ...] = ("weight_scale",)
    needs: frozenset[Statistic] = frozenset()
    block: int | None = None  # rows and columns that share a scale; None: one scale per row
    no_experts: str | None = None  # why no client reads experts in this form
    checked_spec, texts, numbers = Layout.checked_spec, (), None

    def of(self, spec: LinearSpec) -> Self:
        """Return the form of one linear, with its own bits and groups."""
        return self

    def check(self, spec: LinearSpec) -> str | None:
        """Return why this form cannot hold `spec`, with the fix; None if it can."""

    def activations(self) -> dict[str, Any] | None:
        """Return `input_activations` of the config group; None if inputs are not quantized."""
        return None

    def fitting(self, tensors: Tensors) -> Self:
        """Return a copy with the options, such as bits and group size, that the tensors of a linear show."""
        return self

    def sizes(self, tensors: Tensors) -> LinearSpec:
        """Return the shape of a linear from its stored tensors, and the columns that share a scale."""
        rows, columns = tensors[self.CODES[0]].shape
        return spec_of_shape(rows, columns, Width(8, min(self.block or columns, columns)))
