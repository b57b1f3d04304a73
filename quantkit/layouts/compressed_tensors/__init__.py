"""The compressed-tensors layout, read by vLLM, SGLang and transformers.

A form (`integers.py`, `floats.py`) defines how one linear is stored; all forms have `weight_scale`. This file
handles config groups, their targets and ignored modules. Format: compressed-tensors 0.20
`quantization/quant_config.py`, `compressors`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantkit import layouts
from quantkit.errors import require
from quantkit.layouts import Layout, LinearSpec, Numbers, Statistic, Table, Tensors, damaged
from quantkit.layouts._late import activations, grids, torch
from quantkit.layouts.compressed_tensors import schemes
from quantkit.layouts.compressed_tensors.forms import Form
from quantkit.layouts.compressed_tensors.integers import PackQuantized

NAME = "compressed-tensors"
WIDE = {"BF16": "F32"}


@dataclass(frozen=True)
class CompressedTensorsLayout(Layout):
    """form: how linears are written. cache: also write `k_scale` and `v_scale`, bfloat16 `[1]`, of each
    attention; engines use them to store keys and values as 8-bit floats.

    targets: targets of a stored configuration with their schemes. scheme: that of one linear (see `at`).
    """

    form: Form = PackQuantized()
    targets: schemes.Targets = ()
    scheme: schemes.Scheme | None = None
    cache: bool = False
    marker = "weight_scale"
    outside = frozenset({"head"})
    takes_matrices = True  # vLLM makes linears of routers, which its target "Linear" takes
    suffixes = tuple(dict.fromkeys(part for form in schemes.FORMS.values() for part in form.SUFFIXES))

    @property
    def floats(self) -> tuple[str, ...]:
        return self.form.floats

    @property
    def label(self) -> str:
        return self.form.LABEL

    @property
    def code_part(self) -> str:
        return self.form.CODES[0]

    @property
    def rounds_inputs(self) -> bool:
        """Return whether any stored target, or without a stored configuration the form, quantizes inputs."""
        if self.targets:
            return any(scheme.activations for _, scheme in self.targets)
        return bool(self.form.activations())

    @property
    def needs(self) -> frozenset[Statistic]:
        return self.form.needs | ({Statistic.CACHE} if self.cache else set())

    def at(self, linear: str) -> CompressedTensorsLayout:
        if not self.targets:
            return self
        scheme = schemes.find(self.targets, linear)
        return replace(self, scheme=scheme, form=scheme.form)

    def check(self, spec: LinearSpec) -> str | None:
        if spec.conv1d:
            return 'its target "Linear" misses Conv1D: use the gptq layout'
        return self.form.check(spec)

    def check_experts(self, linears: int) -> str | None:
        return self.form.no_experts

    def tensors(self, spec: LinearSpec) -> Table:
        return self.form.tensors(spec)

    def encode(self, weight: grids.QuantizedWeight) -> dict[str, torch.Tensor]:
        assert weight.column_group is None, "columns reordered across groups are not written"
        return self.form.encode(weight)

    def decode(self, tensors: Tensors) -> grids.QuantizedWeight:
        """Invert `encode` exactly; also decode what llm-compressor's presets write.

        Raises QuantkitError naming the tensor whose type or size does not fit the others or the scheme.
        """
        return self._form(tensors).decode(tensors, self.checked_spec(tensors))

    def checked_spec(self, tensors: Mapping[str, Any]) -> LinearSpec:
        return self._form(tensors).checked_spec(tensors)

    def sizes(self, tensors: Tensors) -> LinearSpec:
        return self._form(tensors).sizes(tensors)

    @property
    def numbers(self) -> Numbers | None:
        """Return bits and group size of packed integers in the scheme; None for other forms."""
        form = self.form if self.scheme else None
        if not isinstance(form, PackQuantized):
            return None
        return form.bits, form.group_size if form.group_size > 0 else None

    def _form(self, tensors: Tensors) -> Form:
        """Return the stored configuration's form; without a configuration, the form that the tensors show."""
        if self.scheme:
            return self.form
        suffix, dtype = self.form.CODES
        fits = set(tensors) <= {*self.form.SUFFIXES} and suffix in tensors
        if fits and layouts.stored_as(tensors[suffix])[0] == dtype:
            return self.form.fitting(tensors)
        raise damaged(tensors, f"{', '.join(tensors)} are of another form than {self.form.NAME}")

    def module(
        self, tensors: Tensors, bias: torch.Tensor | None, values: torch.Tensor, products: bool
    ) -> torch.nn.Module | None:
        entry = None if self.scheme else self._form(tensors).activations()
        numbers = self.scheme.activations if self.scheme else entry and schemes.numbers("activations", entry)
        if numbers is None:
            return None
        scale = None
        if not numbers.dynamic or numbers.strategy == "tensor_group":
            suffix = "input_global_scale" if numbers.is_fp4 else "input_scale"
            scale = tensors[suffix].float()
            if scale.numel() != 1:
                raise damaged(tensors, f"{suffix} is {list(scale.shape)} instead of one number")
            scale = scale.view(1)
        if numbers.group_size and values.shape[1] % numbers.group_size:
            why = f"rows of {values.shape[1]} are not divided by groups of {numbers.group_size} inputs"
            raise damaged(tensors, why)
        return activations.QuantizedInputLinear(values, bias, numbers, scale)

    def config(self, specs: Sequence[LinearSpec], outside: Sequence[str] = ()) -> dict:
        """Return `quantization_config`. A linear with another form than most is a target by its exact name;
        exact names take precedence over the class "Linear". If all members of a fused linear have that form,
        the fused name is also a target, because vLLM looks it up."""
        packed = [spec for spec in specs if spec.grid]
        forms = {name: self.form.of(s) for s in packed for name in s.spellings}
        groups: dict[Form, list[str]] = {self.form: ["Linear"]} if self.form in forms.values() else {}
        heads = {name for spec in packed if spec.head for name in spec.spellings}  # no Linear in engines
        for name, form in forms.items():
            if form != self.form or name in heads:
                groups.setdefault(form, []).append(name)
        for name, members in layouts.fusions(specs).items():
            of_members = {forms.get(spec.name) for spec in members}
            form = of_members.pop()
            if not of_members and form not in (self.form, None):
                groups[form].append(name)
        towers = [rf"re:{re.escape(name)}(\.|$)" for name in outside]
        return {
            "quant_method": NAME,
            "format": self.form.NAME,
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": schemes.FLOAT8_CACHE if self.cache else None,
            "ignore": [*_outside(specs), *towers, *layouts.kept_names(specs)],
            "config_groups": {
                f"group_{index}": {
                    "targets": targets,
                    "weights": form.weights(),
                    "input_activations": form.activations(),
                    "output_activations": None,
                    "format": form.NAME,
                }
                for index, (form, targets) in enumerate(groups.items())
            },
        }


@dataclass(frozen=True)
class Renamed(CompressedTensorsLayout):
    """Base of layouts with other names and float32 scales. renamed: names that differ, by those of the form.
    whole_blocks: sides of a matrix that have no partial blocks."""

    code_part = "weight"
    checked_spec = Layout.checked_spec

    def check(self, spec: LinearSpec) -> str | None:
        block = self.form.block or 1
        partial = [side for side in self.whole_blocks if getattr(spec, side) % block]
        if partial:
            return f"{partial[0]} {getattr(spec, partial[0])} is not a multiple of {block}"
        return "its clients replace nn.Linear, not Conv1D" if spec.conv1d else self.form.check(spec)

    def tensors(self, spec: LinearSpec) -> Table:
        table = self.form.tensors(spec).items()
        return {
            self.renamed.get(name, name): (WIDE.get(dtype, dtype), shape) for name, (dtype, shape) in table
        }

    def encode(self, weight: grids.QuantizedWeight) -> dict[str, torch.Tensor]:
        tensors = {self.renamed.get(name, name): tensor for name, tensor in super().encode(weight).items()}
        table = self.tensors(self.sizes(tensors))
        return {suffix: tensor.view(table[suffix][1]) for suffix, tensor in tensors.items()}

    def translated(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Return the tensors under the names and in the shapes of the form."""
        table = self.form.tensors(self.checked_spec(tensors)).items()
        return {name: tensors[self.renamed.get(name, name)].reshape(shape) for name, (_, shape) in table}

    def decode(self, tensors: Tensors) -> grids.QuantizedWeight:
        return self.form.decode(self.translated(tensors), self.sizes(tensors))

    def module(
        self, tensors: Tensors, bias: torch.Tensor | None, values: torch.Tensor, products: bool
    ) -> torch.nn.Module | None:
        return super().module(self.translated(tensors), bias, values, products)

    def sizes(self, tensors: Mapping[str, Any]) -> LinearSpec:
        return self.form.sizes({self.form.CODES[0]: tensors[self.code_part]})


def _outside(specs: Sequence[LinearSpec]) -> list[str]:
    """Return patterns for modules outside the blocks, such as a head with another name than lm_head."""
    first = specs[0]
    container = first.name.removesuffix(f".{first.block}.{first.local}")
    heads = [name for spec in specs if spec.head for name in spec.spellings]
    patterns = [] if heads else ["lm_head"]
    if container == first.name:
        return patterns
    but = "".join(f"|{re.escape(name)}$" for name in heads)
    return [*patterns, rf"re:(?!(.*\.)?{re.escape(container.rpartition('.')[2])}\.\d+\.{but})"]


def detect(config: dict) -> CompressedTensorsLayout | None:
    """Return the layout that a stored `quantization_config` describes; None if it is another layout's."""
    if config.get("quant_method") != NAME:
        return None
    status = config.get("quantization_status", "compressed")
    what = f"compressed-tensors: quantization_status {status!r}: the weights are not stored compressed"
    require(status == "compressed", what, "save it compressed, as llm-compressor does by default")
    return CompressedTensorsLayout(targets=schemes.parse(config))
