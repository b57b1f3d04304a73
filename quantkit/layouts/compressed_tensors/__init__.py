"""The compressed-tensors layout, read by vLLM, SGLang and transformers.

A linear lies in one of several forms, a file each in `forms`; `weight_scale` is the one tensor that all have.
What is said of linears in common stands here: config groups, their targets, what is ignored.
Format: compressed-tensors 0.20 `quantization/quant_config.py`, `compressors`.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quantkit.errors import QuantkitError
from quantkit.layouts import Layout, LinearSpec, Table, fusions
from quantkit.layouts.compressed_tensors import forms, schemes
from quantkit.layouts.compressed_tensors.forms import DECODED, PACKAGE, Form
from quantkit.layouts.compressed_tensors.forms.pack_quantized import PackQuantized
from quantkit.layouts.compressed_tensors.headers import HEADERS as HEADERS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from quantkit.grids.grid import Grid, QuantizedWeight
    from quantkit.layouts import Width
    from quantkit.layouts.compressed_tensors.stored import StoredWeight

NAME = "compressed-tensors"
MIXED = "mixed-precision"  # its name for config groups of several forms


@dataclass(frozen=True)
class CompressedTensorsLayout(Layout):
    """form: how linears are written; others: how those are that it does not hold, if there are such. cache:
    `k_scale` and `v_scale`, bfloat16 `[1]`, are written of each attention, by which keys and values become
    8-bit floats in an engine's cache.

    targets: what a stored configuration says, and scheme what it says of one linear (see `at`).
    """

    form: Form = PackQuantized()
    others: tuple[Form, ...] = ()
    targets: schemes.Targets = ()
    scheme: schemes.Scheme | None = None
    cache: bool = False
    marker = "weight_scale"
    takes_matrices = True  # vLLM makes linears of routers, which its target "Linear" takes
    suffixes = forms.suffixes()

    @property
    def floats(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part for form in (self.form, *self.others) for part in form.floats))

    @property
    def rounds_inputs(self) -> bool:
        """Whether a stored configuration says so of any target, or any form that is written."""
        if self.targets:
            return any(scheme.activations for _, scheme in self.targets)
        return any(form.activations(form.common) for form in (self.form, *self.others))

    @property
    def needs(self) -> frozenset[str]:
        """Statistics of inputs of which something is stored."""
        own = frozenset({"cache"} if self.cache else ())
        return own.union(*(form.needs for form in (self.form, *self.others)))

    def at(self, linear: str) -> CompressedTensorsLayout:
        """With the scheme of one linear, where a stored configuration gives it one."""
        if not self.targets:
            return self
        scheme = schemes.find(self.targets, linear)
        module = next((module for module in forms.modules() if module.NAME == scheme.form), None)
        form = module.like(scheme) if hasattr(module, "like") else self.form
        return replace(self, scheme=scheme, form=form)

    def form_of(self, grid: Grid | Width) -> Form:
        """How weights on a grid are written."""
        return next((form for form in (self.form, *self.others) if form.holds(grid)), self.form)

    def check(self, spec: LinearSpec) -> str | None:
        """What its form cannot hold."""
        if spec.conv1d:
            return 'its target "Linear" misses Conv1D: use the gptq layout'
        return self.form_of(spec.grid).check(spec)

    def check_experts(self, linears: int) -> str | None:
        """What its form says of them."""
        return self.form.no_experts

    def tensors(self, spec: LinearSpec) -> Table:
        """The tensors of one linear, in its form."""
        return self.form_of(spec.grid).tensors(spec)

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The tensors of one linear, in its form."""
        return self.form_of(weight.grid).encode(weight)

    def decode(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """Exact inverse of `encode`, and any other form that is read.

        Raises QuantkitError naming the tensor whose type or size does not fit the others or the scheme.
        """
        return self._stored(tensors).decode()

    def module(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, values: Tensor | None = None
    ) -> nn.Module | None:
        """A linear that quantizes its input, where the scheme says so."""
        numbers = self._scheme(tensors).activations
        if numbers is None:
            return None
        from quantkit.layouts.compressed_tensors.activations import QuantizedInputLinear

        stored = self._stored(tensors)
        scale = None if numbers.dynamic else stored.number("input_scale")
        if numbers.strategy == "tensor_group":
            scale = stored.number("input_global_scale")
        has_zero = not (numbers.dynamic or numbers.symmetric)
        zero = stored.number("input_zero_point") if has_zero else None
        weight = self.values(tensors) if values is None else values
        if numbers.group_size and weight.shape[1] % numbers.group_size:
            raise stored.broken(
                "weight", f"has rows that groups of {numbers.group_size} inputs do not divide"
            )
        return QuantizedInputLinear(weight, bias, numbers, scale, zero)

    def _stored(self, tensors: Mapping[str, Tensor]) -> StoredWeight:
        from quantkit.layouts.compressed_tensors.stored import StoredWeight

        return StoredWeight(tensors, self._scheme(tensors).weights)

    def _scheme(self, tensors: Mapping[str, Tensor]) -> schemes.Scheme:
        """What a stored configuration says of a linear; of one just encoded, what its form does."""
        if self.scheme:
            return self.scheme
        written = forms.stored_as(tensors).NAME
        form = next((form for form in (self.form, *self.others) if written == form.NAME), None)
        if form is None:
            return schemes.Scheme(None)
        inputs = form.activations(form.common)
        return schemes.Scheme(
            schemes.numbers("weights", form.weights(form.common)) if form.uniform else None,
            schemes.numbers("activations", inputs) if inputs else None,
        )

    def config(self, specs: Sequence[LinearSpec], beside: Sequence[str] = ()) -> dict:
        """`quantization_config`. Linears unlike the rest are targets by their exact names, which clients
        prefer to the class, and by the name of their fusion where all of it is alike: vLLM looks for that.
        """
        default = self.form, self.form.common
        groups: dict[tuple[Form, Hashable], list[str]] = {}
        settings = {name: self._setting(spec) for spec in specs if spec.grid for name in spec.spellings}
        if default in settings.values():
            groups[default] = ["Linear"]
        for name, setting in settings.items():
            if setting != default:
                groups.setdefault(setting, []).append(name)
        for name, members in fusions(specs).items():
            of_members = {settings.get(row.name) for row in members}
            setting = of_members.pop()
            if not of_members and setting not in (default, None):
                groups[setting].append(name)
        kept = [name for spec in specs if spec.grid is None for name in spec.spellings]
        towers = [rf"re:{re.escape(name)}(\.|$)" for name in beside]
        written = {form.NAME for form, _ in groups} or {self.form.NAME}
        return {
            "quant_method": NAME,
            "format": written.pop() if len(written) == 1 else MIXED,
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": schemes.FLOAT8_CACHE if self.cache else None,
            "ignore": ["lm_head", *_outside(specs), *towers, *kept],
            "config_groups": {
                f"group_{index}": {
                    "targets": targets,
                    "weights": form.weights(setting),
                    "input_activations": form.activations(setting),
                    "output_activations": None,
                    "format": form.NAME,
                }
                for index, ((form, setting), targets) in enumerate(groups.items())
            },
        }

    def _setting(self, spec: LinearSpec) -> tuple[Form, Hashable]:
        """The config group that a linear belongs to."""
        form = self.form_of(spec.grid)
        return form, form.setting(spec)


def _outside(specs: Sequence[LinearSpec]) -> list[str]:
    """A pattern for all that lies outside the blocks, such as a head of another name than lm_head; towers
    that are quantized are not part of it."""
    spec = specs[0]
    container = spec.name.removesuffix(f".{spec.block}.{spec.local}")
    if container == spec.name:
        return []
    inside = [rf"(.*\.)?{re.escape(container.rpartition('.')[2])}\.\d+\."]
    inside += [rf"{re.escape(name)}(\.|$)" for name in _towers(specs)]
    return [f"re:(?!{'|'.join(inside)})"]


def _towers(specs: Sequence[LinearSpec]) -> list[str]:
    """The outermost modules of linears beside the blocks, by all their spellings."""
    inside = [name for spec in specs if spec.block is not None for name in spec.spellings]
    above = {part for name in inside for part in _modules(name)}
    names = (name for spec in specs if spec.block is None for name in spec.spellings)
    return list(dict.fromkeys(next(m for m in _modules(name) if m not in above) for name in names))


def _modules(name: str) -> list[str]:
    """`a`, `a.b` and `a.b.c` of `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def detect(config: dict) -> CompressedTensorsLayout | None:
    """The layout that a stored `quantization_config` describes, if it is this one."""
    if config.get("quant_method") != NAME:
        return None
    if (status := config.get("quantization_status", "compressed")) != "compressed":
        raise QuantkitError(
            f"compressed-tensors: quantization_status {status!r}: the weights are not stored compressed",
            hint="save it compressed, as llm-compressor does by default",
        )
    return CompressedTensorsLayout(targets=schemes.parse(config))


CLIENTS = {
    "transformers": [
        *forms.rules("transformers"),
        {"experts": True, "mixed": True},
        {"experts": True, "loads": True, **DECODED},
        {"mixed": True, "loads": True, "note": "not with dequantize=True", "needs": PACKAGE},
        {"loads": True, "note": "with compressed-tensors installed", "needs": PACKAGE},
    ],
    "vLLM": [
        {"experts": True, "mixed": True},
        {
            "experts": True,
            "symmetric": False,
            "loads": False,
            "note": "its CPU build takes symmetric experts",
        },
        *forms.rules("vLLM"),
        {"loads": True},
    ],
}
