"""The GPTQ layout, read by GPTQModel, transformers, vLLM, SGLang and AutoGPTQ.

Per linear, `W[o, i] = scales[g_idx[i], o] * (q[i, o] - z[g_idx[i], o])`:
`qweight` int32 `[in * bits / 32, out]`, a little-endian bit stream down the in dimension;
`qzeros` int32 `[groups, out * bits / 32]`, the same stream along out, with z - 1 in `checkpoint_format`
"gptq" and z in "gptq_v2"; `scales` float16 `[groups, out]`; `g_idx` int32 `[in]`.
Codes of 5, 6 and 7 bits are split into planes of 4, 2 and 1 bits. For every 32 codes, the words of one plane
follow those of another. `checkpoint_format` "gptq_p", which only GPTQModel reads, holds z and also splits
codes of 3 bits.
Format: AutoGPTQ `qlinear_cuda_old.pack`, GPTQModel 7.6 `BaseQuantLinear.pack_original` and
`utils/planar_packing.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quantkit import __version__
from quantkit.errors import RUNTIME, UNSUPPORTED, QuantkitError, compiled, require
from quantkit.layouts import Layout, LinearSpec, Numbers, Table, Tensors, Width, fusions, spec_of_shape
from quantkit.layouts._late import affine, grids, torch
from quantkit.layouts._packing import WORD, column_groups, no_whole_words, pack_planes, unpack_planes, words

NAME = "gptq"
PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}  # bits of each plane, from the lowest
SPLIT = (5, 6, 7)  # widths that are split in every checkpoint_format
FORMATS = {1: "gptq", 2: "gptq_v2", 3: "gptq_p"}  # checkpoint_format by version
Rule = tuple[re.Pattern, dict[str, Any]]  # the pattern of a linear's name, and its bits and group size


@dataclass(frozen=True)
class GptqLayout(Layout):
    """bits, group_size, symmetric, desc_act and damp_percent: entries of the configuration; linears with
    other bits or groups get a rule there.

    rules: `(pattern, bits and group size)` of single linears in a stored configuration; None for a new
    layout. version: key of `FORMATS`; 1 loads in every client, 2 is needed for zero points of 0, 3 for 5 to 7
    bits.
    """

    bits: int
    group_size: int
    symmetric: bool = True
    desc_act: bool = False
    damp_percent: float = 0.05
    version: int = 1
    rules: tuple[Rule, ...] | None = field(default=None, compare=False)
    marker = code_part = "qweight"
    outside = frozenset({"head"})
    label = NAME
    suffixes = ("qweight", "qzeros", "scales", "g_idx")
    floats = ("scales",)
    optional = ("g_idx",)

    @property
    def zero_min(self) -> int:
        """Smallest zero point: version 1 stores z - 1, and GPTQModel mishandles the -1 of z = 0."""
        return 1 if self.version == 1 else 0

    def planes(self, bits: int) -> tuple[int, ...]:
        """Return the bits of each plane into which codes of `bits` bits are split."""
        return PLANES[bits] if bits in SPLIT or (bits == 3 and self.version == 3) else (bits,)

    def at(self, linear: str) -> GptqLayout:
        matching = (rule for pattern, rule in self.rules or () if pattern.match(linear))
        return replace(self, **next(matching, {}))

    def check(self, spec: LinearSpec) -> str | None:
        multiple = WORD if len(self.planes(spec.grid.bits)) > 1 else None  # each plane fills whole words
        return no_whole_words(spec, "in_features", "out_features", multiple=multiple)

    def tensors(self, spec: LinearSpec) -> Table:
        bits, groups = spec.grid.bits, -(-spec.in_features // spec.grid.group_size)
        return {
            "qweight": ("I32", (words(spec.in_features, bits), spec.out_features)),
            "qzeros": ("I32", (groups, words(spec.out_features, bits))),
            "scales": ("F16", (groups, spec.out_features)),
            "g_idx": ("I32", (spec.in_features,)),
        }

    def encode(self, weight: grids.QuantizedWeight) -> dict[str, torch.Tensor]:
        planes = self.planes(weight.grid.bits)
        zero = weight.params.zero.to(torch.int32).t()  # [groups, out]
        stored_zero = (zero - 1) & weight.grid.max_code if self.version == 1 else zero
        return {
            "qweight": pack_planes(weight.codes.t(), planes),
            "qzeros": pack_planes(stored_zero.t(), planes).t().contiguous(),
            "scales": weight.params.scale.t().half().contiguous(),
            "g_idx": weight.group_of_columns().to(torch.int32),
        }

    def sizes(self, tensors: Mapping[str, Any]) -> LinearSpec:
        """Return shape, bits and group size of a linear from its tensors' shapes, whatever the rules say."""
        groups, out_features = tensors["scales"].shape
        bits = tensors["qzeros"].shape[1] * WORD // out_features if "qzeros" in tensors else self.bits
        rows, columns = tensors["qweight"].shape
        in_features, size = rows * WORD // bits, self.group_size
        if columns != out_features or bits not in range(2, 9):
            raise ValueError
        if size < 1 or -(-in_features // size) != groups:
            size = -(-in_features // groups)
        return spec_of_shape(out_features, in_features, Width(bits, min(size, in_features)))

    @property
    def numbers(self) -> Numbers | None:
        return (self.bits, max(0, self.group_size) or None) if self.rules is not None else None

    def decode(self, tensors: Tensors) -> grids.QuantizedWeight:
        """Invert `encode` exactly. Without `g_idx`, groups are consecutive columns."""
        spec = self.checked_spec(tensors)
        bits, planes = spec.grid.bits, self.planes(spec.grid.bits)
        qweight, scales = tensors["qweight"], tensors["scales"]
        group = column_groups(tensors, "g_idx", tensors.get("g_idx"), spec, qweight.device)
        zero = unpack_planes(tensors["qzeros"].t(), planes, spec.out_features).t().int()
        if self.version == 1:
            zero = (zero + 1) & (2**bits - 1)
        grid = affine.AffineGrid(bits, spec.grid.group_size, self.symmetric, self.zero_min)
        codes = unpack_planes(qweight, planes, spec.in_features).t().contiguous()
        params = affine.AffineParams(scales.t().float(), zero.t().float())
        return grids.QuantizedWeight(grid, codes, params, group)

    def config(self, specs: Sequence[LinearSpec], outside: Sequence[str] = ()) -> dict:
        """Return `quantization_config`. A linear that differs from the defaults gets a `dynamic` rule for
        GPTQModel and vLLM. optimum ignores these rules: it packs the linears whose names end with an entry of
        `modules_in_block_to_quantize`."""
        config = {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group_size,
            "desc_act": self.desc_act,
            "sym": self.symmetric,
            "lm_head": any(spec.head for spec in specs),
            "true_sequential": True,
            "damp_percent": self.damp_percent,
            "checkpoint_format": FORMATS[self.version],
            "pack_dtype": "int32",
            "meta": {"quantizer": [f"quantkit:{__version__}"]},
        }
        rules = {name: rule for spec in specs if (rule := self._rule(spec)) for name in spec.spellings}
        for name, members in fusions(specs).items():  # vLLM looks up rules by fused names
            if members[0].name in rules and all(
                self._rule(spec) == self._rule(members[0]) for spec in members
            ):
                rules[name] = rules[members[0].name]
        dynamic = {f"{sign}:^{re.escape(name)}$": rule for name, (sign, rule) in rules.items()}
        dynamic |= {rf"-:^{re.escape(name)}(\.|$)": {} for name in outside}
        if dynamic:
            config["dynamic"] = dynamic
        if outside or any(spec.grid is None for spec in specs):
            packed = [name for spec in specs if spec.grid for name in spec.spellings]
            config["modules_in_block_to_quantize"] = [packed]
        return config

    def _rule(self, spec: LinearSpec) -> tuple[str, dict] | None:
        """Return the sign and values of a linear's `dynamic` rule; None if the defaults apply."""
        if spec.grid is None:
            return "-", {}
        whole = spec.grid.group_size == spec.in_features and self.group_size == -1
        group_size = -1 if whole else spec.grid.group_size
        if (spec.grid.bits, group_size) == (self.bits, self.group_size):
            return None
        return "+", {"bits": spec.grid.bits, "group_size": group_size}

    def files(self, specs: Sequence[LinearSpec], outside: Sequence[str] = ()) -> dict[str, dict]:
        """Return `quantize_config.json`, which AutoGPTQ requires."""
        legacy = {"static_groups": False, "model_name_or_path": None, "model_file_base_name": "model"}
        return {"quantize_config.json": self.config(specs, outside) | legacy}


def detect(config: dict) -> GptqLayout | None:
    """Return the gptq layout that a stored `quantization_config` describes; None for other layouts."""
    if config.get("quant_method") != "gptq":
        return None
    form = config.get("checkpoint_format") or config.get("format") or "gptq"
    words = config.get("pack_dtype", "int32")
    what = f"gptq checkpoint_format {form!r} in {words} words is not supported"
    hint = f"quantkit reads {', '.join(FORMATS.values())} in int32 words"
    require(form in FORMATS.values() and words == "int32", what, hint, UNSUPPORTED)
    lacking = [key for key in ("bits", "group_size") if not isinstance(config.get(key), int)]
    again = "download config.json again"
    require(not lacking, f"quantization_config says no {' and no '.join(lacking)}", again)
    require(config["group_size"], "quantization_config says groups of 0", again)
    return GptqLayout(
        bits=config["bits"],
        group_size=config["group_size"],
        symmetric=config.get("sym", True),
        desc_act=config.get("desc_act", False),
        version=next(version for version, name in FORMATS.items() if name == form),
        rules=stored_rules(config),
    )


def stored_rules(config: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Parse GPTQModel's `dynamic`: `{"+:pattern": {"bits": …, "group_size": …}}`; no sign means plus.

    Raises QuantkitError if it has another form.
    """
    stored = config.get("dynamic") or {}
    if not isinstance(stored, dict):
        raise QuantkitError("quantization_config's dynamic is not supported", "download config.json again")
    rules = []
    for pattern, values in stored.items():
        values = values if isinstance(values, dict) else {}
        numbers = {key: value for key, value in values.items() if key in ("bits", "group_size")}
        whole, again = pattern.removeprefix("+:").removeprefix("-:"), "download config.json again"
        what = f"quantization_config's dynamic: {pattern!r} has no whole numbers"
        require(all(type(number) is int for number in numbers.values()), what, again)
        regex = compiled(whole, f"quantization_config's dynamic: {pattern!r}", again, RUNTIME)
        if not pattern.startswith("-:"):
            rules.append((regex, numbers))
    return tuple(rules)
