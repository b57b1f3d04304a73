"""Layouts: the tensors of one quantized linear for a client. One file per layout, found by its name.

A file holds the class of a layout; NAME, its name in configurations; and `detect(config)`, which returns the
layout of a stored configuration. inspection/clients.yaml lists the clients. torch is imported when tensors
are encoded and decoded, so that plans do without (`_late.py`).
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.layouts._late import grids, torch

DTYPES = {  # names in headers of safetensors files, by torch's names
    **{f"float{n}": f"F{n}" for n in (16, 32, 64)} | {"bfloat16": "BF16", "bool": "BOOL", "complex64": "C64"},
    **{f"int{n}": f"I{n}" for n in (8, 16, 32, 64)} | {f"uint{n}": f"U{n}" for n in (8, 16, 32, 64)},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"},
}
# Names begin with the bits of a value, except BOOL.
DTYPE_BYTES = {name: int(re.search(r"\d+|$", name)[0] or 8) // 8 for name in DTYPES.values()}
Numbers = tuple[int, int | None]  # bits, and columns of a group: None for whole rows
FLOATS = {"F64", "F32", "F16", "BF16", "F8_E8M0"}  # dtypes in which a scale may be stored
Tensors = Mapping[str, "torch.Tensor"]  # of a linear, by suffix
Table = dict[str, tuple[str, tuple[int, ...]]]  # suffix -> dtype and shape of a linear's tensor

# Linears that serving engines fuse, by the name of the fused linear.
FUSIONS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Statistic(Enum):
    """A statistic of calibration text that a solver, a transform, a layout or an output needs."""

    HESSIAN = "2 XᵀX / tokens of a site's inputs X"
    DRIFT = "original model's inputs and hidden states at a site, minus the quantized model's"
    CURVATURE = "second moments of the gradients at a linear's outputs"
    MAGNITUDE = "mean |x| of each channel"
    PEAK = "largest |x| of each channel"
    SQUARE = "mean x² of each channel"
    FOURTH = "mean (x / rms x)⁴ of each channel, for each half of the tokens"
    INPUTS = "a few rows of X, evenly spaced"
    CACHE = "largest keys and values of each attention"


@dataclass(frozen=True)
class LinearSpec:
    """One linear of a decoder block.

    name: stored module path, such as `model.layers.0.mlp.up_proj`. block: number of the block. local: name in
    the block. grid: grid that the solver rounds to; None for a kept linear, or if the output encodes the
    weight. kept: reason for 16 bit; None if quantized. conv1d: the model has a Conv1D here (GPT-2); some
    clients replace only nn.Linear. module: transformers' name if a multimodal wrapper changes it; engines use
    the stored name. head: the linear is the model's head, which counts as a last block. embedding: the matrix
    is the model's embedding, whose block is staged after all others and quantized before them.
    """

    name: str
    block: int
    local: str
    out_features: int
    in_features: int
    grid: grids.Grid | Width | None
    kept: str | None = None
    conv1d: bool = False
    module: str | None = None
    head: bool = False
    embedding: bool = False

    @property
    def spellings(self) -> tuple[str, ...]:
        """Return the one or two names that clients use for the linear."""
        return (self.name,) if self.module in (None, self.name) else (self.name, self.module)

    @property
    def weights(self) -> int:
        return self.out_features * self.in_features


@dataclass(frozen=True)
class Width:
    """Bits, group size and symmetry of a grid: enough to compute sizes without torch."""

    bits: int
    group_size: int
    symmetric: bool = True


class OutOfReach(LookupError):
    """Raised when the values of a tensor are read, but only its header was downloaded."""


class Layout(ABC):
    """The storage of a quantized linear for a client. `encode` and `decode` are exact inverses.

    A linear X is packed if the tensor `X.<marker>` is stored. suffixes: all tensors of X; code_part: the
    tensor with the codes. label: the name of these codes in `inspect`. fused: engines merge several linears
    into one. experts_note: a note for models with experts. takes_matrices: engines treat other matrices of a
    block, such as routers, as linears unless `outside` names them. floats: suffixes with floating-point
    parameters. needs: statistics that the layout stores. rounds_inputs: `module` quantizes inputs of some
    linears. optional: suffixes that may be absent. texts: suffixes whose length `tensors` estimates. outside:
    matrices outside the blocks that clients read packed. cache_scales: names of the scales of keys and values
    in an attention module.
    """

    marker: str
    suffixes: tuple[str, ...]
    label: str
    code_part = "weight"
    fused = True
    experts_note = ""
    takes_matrices = False
    floats: tuple[str, ...] = ()
    needs: frozenset[Statistic] = frozenset()
    rounds_inputs = False
    optional: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    outside: frozenset[str] = frozenset()
    cache_scales = ("k_scale", "v_scale")

    def at(self, linear: str) -> Layout:
        """Return the layout of one linear in a stored checkpoint; itself if all linears share one layout."""
        return self

    def unstacked(self, infos: dict[str, Any]) -> dict[str, Any]:
        """Return a file's tensors, by name, with one tensor per expert."""
        return infos

    def stacks(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return which tensors clients want as one: {name of the stack: names of its parts in order}."""
        return {}

    def of_job(self, specs: Sequence[LinearSpec]) -> Layout:
        """Return the layout for the linears of a job; overridden where tensors do not show the bits."""
        return self

    def grid(self, grid: grids.Grid, dtype: torch.dtype | None) -> grids.Grid:
        """Return the grid that the layout stores: a method's grid, or a replacement. dtype: the model's."""
        return grid

    def check(self, spec: LinearSpec) -> str | None:
        """Return why this layout cannot hold `spec`, with the fix; None if it can."""
        return None

    def check_model(self, model_type: str) -> str | None:
        """Return why clients cannot read this model type in this layout, with the fix; None if they can."""
        return None

    def check_experts(self, linears: int) -> str | None:
        """Return why no client reads experts with this number of linears; None if a client does."""
        return None

    @abstractmethod
    def tensors(self, spec: LinearSpec) -> Table:
        """Return the tensors stored for one linear: {suffix: (dtype, shape)}; estimates for `texts`."""

    @abstractmethod
    def sizes(self, tensors: Mapping[str, Any]) -> LinearSpec:
        """Return shape, bits and group size of a linear, from its stored tensors or their headers. Raises
        ValueError or ArithmeticError for impossible shapes; `checked_spec` checks the rest."""

    @property
    def numbers(self) -> Numbers | None:
        """Return bits and group size (None: one group per row) in a stored configuration, or None."""
        return None

    def checked_spec(self, tensors: Mapping[str, Any]) -> LinearSpec:
        """Return shape, bits and groups of a linear after comparing its stored tensors with `tensors`.

        Scales may have any float type, and a scalar may replace a tensor with one number. Decoders check
        nothing else. Raises QuantkitError if a tensor differs, or if the bits or groups contradict the
        configuration.
        """
        try:
            spec = self.sizes(tensors)
            table = self.tensors(spec)
        except (ArithmeticError, IndexError, ValueError) as error:
            shapes = ", ".join(f"{suffix} {list(tensor.shape)}" for suffix, tensor in tensors.items())
            raise damaged(tensors, f"{shapes} do not fit one another") from error
        wrong = [f"{suffix} is not expected" for suffix in tensors.keys() - table.keys() - set(self.optional)]
        for suffix in tensors.keys() & table.keys() - set(self.texts):
            (dtype, shape), (needed, size) = stored_as(tensors[suffix]), table[suffix]
            if (dtype != needed and not {dtype, needed} <= FLOATS) or (shape or (1,)) != (size or (1,)):
                wrong.append(f"{suffix} is {dtype} {list(shape)} instead of {needed} {list(size)}")
        if wrong:
            raise damaged(tensors, ", ".join(sorted(wrong)))
        for suffix in table.keys() - tensors.keys() - set(self.optional):
            tensors[suffix]  # raises the mapping's own error
        if configured := self.numbers:
            actual, columns = (spec.grid.bits, spec.grid.group_size), spec.in_features
            groups = [-(-columns // (size or columns)) for _, size in (configured, actual)]
            if configured[0] != actual[0] or groups[0] != groups[1]:
                why = f"quantization_config says {in_words(configured)}, the tensors have {in_words(actual)}"
                raise damaged(tensors, why)
        return spec

    def nbytes(self, spec: LinearSpec) -> int:
        """Return the bytes that one quantized linear takes on disk."""
        return sum(DTYPE_BYTES[dtype] * math.prod(shape) for dtype, shape in self.tensors(spec).values())

    @abstractmethod
    def encode(self, weight: grids.QuantizedWeight) -> dict[str, torch.Tensor]:
        """Return the tensors of one linear as the client expects them: {suffix: tensor}."""

    @abstractmethod
    def decode(self, tensors: Tensors) -> grids.QuantizedWeight:
        """Return the weight that the stored tensors hold. Raises QuantkitError if they do not fit one
        another."""

    def with_floats(self, tensors: Tensors, floats: Tensors) -> dict[str, torch.Tensor]:
        """Return a linear's stored tensors with new floating-point parameters, rounded to the stored
        precision. floats: keyed as in the grid's `floats`. Codes and sizes stay the same."""
        weight = self.decode(tensors)
        encoded = self.encode(weight.with_floats(weight.grid.storable(floats)))
        return {name: encoded[name] if name in self.floats else tensors[name] for name in tensors}

    def values(self, tensors: Tensors) -> torch.Tensor:
        """Return the dequantized weight, float32 `[out, in]`: the same as `decode(tensors).values()`."""
        return self.decode(tensors).values()

    def module(
        self, tensors: Tensors, bias: torch.Tensor | None, values: torch.Tensor, products: bool
    ) -> torch.nn.Module | None:
        """Return a module that quantizes its inputs as clients do; None if clients only multiply with the
        decoded weight. values: the decoded weight, in the precision of the input to save a conversion.
        products: the processor multiplies int8 fast."""
        return None

    @abstractmethod
    def config(self, specs: Sequence[LinearSpec], outside: Sequence[str] = ()) -> dict:
        """Return `quantization_config` of config.json. outside: names of modules outside the language model,
        such as towers of other modalities; they are not quantized."""

    def configured(self, config: Mapping[str, Any], quantization: dict) -> dict:
        """Return config.json with `quantization`, the result of `config`, where clients look for it."""
        rest = {key: value for key, value in config.items() if key != "quantization"}
        return rest | {"quantization_config": quantization}

    def files(self, specs: Sequence[LinearSpec], outside: Sequence[str] = ()) -> dict[str, dict]:
        """Return further JSON files that clients look for, by file name."""
        return {}


def available() -> list[str]:
    """Return the names of the layouts: the files of this package that do not begin with `_`."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in names if not name.startswith("_"))


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `quantization_config` of config.json, or MLX's `quantization`; {} if there is neither."""
    stored, mlx = config.get("quantization_config"), config.get("quantization")
    if isinstance(mlx, dict) and not (isinstance(stored, dict) and "quant_method" in stored):
        return {"quant_method": "mlx"} | mlx
    return stored if isinstance(stored, dict) else {} if stored is None else {"quant_method": stored}


def modules() -> list[ModuleType]:
    """Return the modules of all layouts."""
    return [importlib.import_module(f"{__name__}.{name}") for name in available()]


def detect(config: dict) -> Layout | None:
    """Return the layout of a stored checkpoint; None if it is not quantized.

    Raises QuantkitError (exit code 4) if no layout knows the quantization.
    """
    stored = quantization_of(config)
    if not stored:
        return None
    for module in modules():
        if (layout := module.detect(stored)) is not None:
            return layout
    what = f"quantization {stored.get('quant_method', stored)!r} is not supported"
    raise QuantkitError(what, f"quantkit reads: {', '.join(available()).replace('_', '-')}", UNSUPPORTED)


def group_by_linear(layout: Layout | None, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the stored names of each packed linear, such as
    `{"model.layers.0.mlp.up_proj": {"scales": …}}`."""
    if layout is None:
        return {}
    names = set(names)
    linears = [name.removesuffix(f".{layout.marker}") for name in names if name.endswith(f".{layout.marker}")]
    return {
        linear: {suffix: f"{linear}.{suffix}" for suffix in layout.suffixes if f"{linear}.{suffix}" in names}
        for linear in sorted(linears)
    }


@contextmanager
def naming_errors(linear: str, tensors: Tensors) -> Iterator[None]:
    """Turn errors of decoding into QuantkitError with the names of the linear and its tensors: downloaded
    files may hold any types and shapes. Out-of-memory errors pass unchanged."""
    try:
        yield
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if "memory" in str(error):
            raise
        stored = ", ".join(f"{suffix} {str(t.dtype)[6:]} {list(t.shape)}" for suffix, t in tensors.items())
        what = f"tensors of {linear} do not fit its layout: {stored}"
        raise QuantkitError(what, "download the checkpoint again", UNSUPPORTED) from error


def damaged(tensors: Tensors, why: str) -> QuantkitError:
    """Return the error for a linear with invalid stored tensors."""
    linear = getattr(tensors, "linear", "")
    hint = "the file is damaged, or config.json belongs to another checkpoint: download both again"
    return QuantkitError(f"{linear}: {why}" if linear else why, hint)


def stored_as(tensor: Any) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape of a tensor or header; the dtype as in safetensors headers, such as `BF16`."""
    dtype = tensor.dtype if isinstance(tensor.dtype, str) else DTYPES[str(tensor.dtype)[len("torch.") :]]
    return dtype, tuple(tensor.shape)


def in_words(numbers: Numbers) -> str:
    """Return `4 bit in groups of 128` or `4 bit in whole rows`."""
    bits, size = numbers
    return f"{bits} bit in groups of {size}" if size else f"{bits} bit in whole rows"


def spec_of_shape(out_features: int, in_features: int, grid: grids.Grid | Width) -> LinearSpec:
    """Return a LinearSpec with a shape and a grid but no name: enough for `Layout.tensors`."""
    return LinearSpec("", 0, "", out_features, in_features, grid)


def kept_names(specs: Sequence[LinearSpec]) -> list[str]:
    """Return the names by which clients know the linears that stay in 16 bit."""
    return [name for spec in specs if spec.grid is None for name in spec.spellings]


def not_converted(specs: Sequence[LinearSpec], outside: Sequence[str]) -> list[str] | None:
    """Return the modules that transformers must not convert. None also keeps the head as it is; a list must
    name the head, or transformers (4.49 to 4.51, awq) converts it."""
    kept = [*outside, *kept_names(specs)]
    return [*kept, "lm_head"] if kept else None


def fusions(specs: Sequence[LinearSpec]) -> dict[str, list[LinearSpec]]:
    """Return the linears that engines fuse, by fused name:
    `{"model.layers.0.mlp.gate_up_proj": [gate, up]}`."""
    by_name = {spec.name: spec for spec in specs}
    fused_linears = {}
    for name in by_name:
        owner, dot, leaf = name.rpartition(".")
        for fused, members in FUSIONS.items():
            if leaf == members[0]:
                names = [f"{owner}{dot}{member}" for member in members]
                fused_linears[f"{owner}{dot}{fused}"] = [by_name[name] for name in names if name in by_name]
    return fused_linears
