"""Forms: how compressed-tensors lays a linear out, by the `format` of its config group.

Here is what all have in common; `integers.py` and `floats.py` have what llm-compressor's presets make. torch
is imported where tensors are made. Format: compressed-tensors 0.20 `compressors`, `quant_scheme.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.layouts import LinearSpec, Width, spec_of_shape

if TYPE_CHECKING:
    from torch import Tensor


Tensors = Mapping[str, "Tensor"]


@dataclass(frozen=True)
class Numbers:
    """A number format of weights or activations. kind: `int`, or `float` (e4m3 or e2m1).

    group_size: columns of one group; None unless strategy is `group` or `tensor_group`, which has a scale of
    the tensor besides. block: rows and columns of strategy `block`. dynamic: scales follow from the values at
    run time, instead of being stored.
    """

    bits: int
    kind: str
    symmetric: bool
    strategy: str
    group_size: int | None = None
    block: tuple[int, int] | None = None
    dynamic: bool = False

    @property
    def is_fp4(self) -> bool:
        """True for NVFP4 and MXFP4."""
        return (self.bits, self.kind) == (4, "float")


def described(
    bits: int, kind: str, strategy: str, group_size: int | None = None, dynamic: bool | str = False,
    observer: str | None = "minmax", symmetric: bool = True, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return `weights`, `input_activations` or `kv_cache_scheme` as a configuration spells them."""
    numbers = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy}
    return numbers | {"group_size": group_size, **more, "dynamic": dynamic, "observer": observer}


class Form:
    """The tensors and configuration of a linear. A frozen dataclass with the options of its method.

    A subclass has `like(weights, inputs)`, the form of a config group that says this, or None; `tensors`,
    `encode` and `decode`, as layouts do; and `weights()` of its config group. Linears of equal forms are one
    config group.

    NAME: the `format` of a config group; LABEL: what `inspect` calls it. SUFFIXES: the tensors of a linear
    that it may store. CODES: the one that holds codes, and its type. optional: those that may be there.
    floats: of the suffixes, those that hold what is stored in floating point. needs: which statistics of a
    linear's inputs it writes something of (see SiteStatistics); `peak` comes as `QuantizedWeight.input_peak`.
    """

    NAME: str
    LABEL: str
    SUFFIXES: tuple[str, ...]
    CODES: tuple[str, str]
    optional: tuple[str, ...] = ()
    floats: tuple[str, ...] = ("weight_scale",)
    needs: frozenset[str] = frozenset()
    no_experts: str | None = None  # why no client reads experts in it

    def of(self, spec: LinearSpec) -> Form:
        """Return the form of one linear, with its own bits and groups."""
        return self

    def check(self, spec: LinearSpec) -> str | None:
        """Return why this form cannot hold `spec`, with the fix; None when it can."""

    def activations(self) -> dict[str, Any] | None:
        """Return `input_activations` of the config group; None where inputs stay as they are."""
        return None

    def fitting(self, tensors: Tensors) -> Form:
        """Return a copy with what a configuration would say of a linear just encoded."""
        return self

    def sizes(self, tensors: Tensors) -> LinearSpec:
        """Return the shape of a linear from its stored tensors."""
        rows, columns = tensors[self.CODES[0]].shape
        return spec_of_shape(rows, columns, Width(8, columns))
