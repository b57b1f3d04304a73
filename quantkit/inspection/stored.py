"""What headers say of each weight: its shape, how it is stored, and which bytes are codes and which scales.

A quantized linear lies in several tensors (`layouts` has their formats); here they are found by their names,
also where quantkit has no decoder for them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantkit.models.containers.safetensors_folder import TensorInfo
from quantkit.models.headers import Contents

WORD = 32
NF4, FP4 = "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4"
OF_4_BIT = ("weight", "weight.quant_map", "weight.absmax", "weight.nested_absmax", "weight.nested_quant_map")
OF_COMPRESSED = (
    "weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
    "weight_global_scale", "weight_scale_2", "input_scale", "input_global_scale", "input_zero_point",
)  # fmt: skip
PLAIN = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Codes:
    """How a weight is quantized. bits: of one code. group_size: columns that share a scale, None for a row
    or what headers do not tell. problem: sizes that do not fit one another."""

    form: str
    bits: float
    group_size: int | None
    shape: tuple[int, int] | None
    weights: int
    problem: str = ""

    def describe(self) -> str:
        """`4 bit, groups of 128`; the name alone where it says it all."""
        if self.form.isupper() or self.form in ("nf4", "fp4"):  # a ggml type, or bitsandbytes'
            return self.form
        integers = ("gptq", "awq", "mlx", "pack-quantized")
        form = f"{self.bits:g} bit" if self.form in integers else self.form
        return f"{form}, groups of {self.group_size}" if self.group_size else f"{form}, whole rows"


@dataclass(frozen=True)
class Weight:
    """A parameter of the model. name: as a plain checkpoint has it. plain: bytes that are neither codes nor
    scales; scale bytes count zero points, column orders and the like. codes: None where it is not quantized.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    parameters: int
    plain_bytes: int = 0
    code_bytes: int = 0
    scale_bytes: int = 0
    codes: Codes | None = None

    @property
    def nbytes(self) -> int:
        return self.plain_bytes + self.code_bytes + self.scale_bytes

    @property
    def stored(self) -> str:
        """How it is stored, in words."""
        return self.codes.describe() if self.codes else self.dtype


Parts = Mapping[str, TensorInfo]
Reader = Callable[[Parts, Contents], Codes]


def weights_of(contents: Contents) -> list[Weight]:
    """Every parameter, in the order of the file."""
    if contents.container == "gguf":
        return [_of_ggml(info) for info in contents.infos.values()]
    packed, found, taken = _packed(contents.infos), {}, set()
    for linear, (read, code_part, parts) in packed.items():
        codes = read(parts, contents)
        nbytes = sum(info.nbytes for info in parts.values())
        code_bytes = parts[code_part].nbytes
        found[linear] = Weight(
            f"{linear}.weight", parts[code_part].dtype, codes.shape, codes.weights,
            code_bytes=code_bytes, scale_bytes=nbytes - code_bytes, codes=codes,
        )  # fmt: skip
        taken |= {info.name for info in parts.values()}
    plain = [
        Weight(name, info.dtype, info.shape, math.prod(info.shape), plain_bytes=info.nbytes)
        for name, info in contents.infos.items()
        if name not in taken
    ]
    return plain + list(found.values())


def _packed(infos: Mapping[str, TensorInfo]) -> dict[str, tuple[Reader, str, Parts]]:
    """Every quantized linear with the tensors it lies in: how to read them, and which one holds the codes."""
    found: dict[str, tuple[Reader, str, Parts]] = {}
    for marker, (separator, code_part, others, read) in MARKERS.items():
        ending = separator + marker
        for name in infos:
            linear = name.removesuffix(ending)
            if linear == name or linear in found:
                continue
            names = {part: f"{linear}{separator}{part}" for part in (marker, *others)}
            parts = {part: infos[full] for part, full in names.items() if full in infos}
            if code_part in parts:
                found[linear] = (read, code_part, parts)
    return found


def _gptq(parts: Parts, contents: Contents) -> Codes:
    """`qweight [in * bits / 32, out]`, `scales [groups, out]`; AWQ packs along out instead. Other forms that
    have the same names (of AWQ's gemv, Marlin, BitBLAS) are read as if they were these, and not judged."""
    config, qweight, scales = contents.quantization, parts["qweight"].shape, parts.get("scales")
    method = f"{config.get('quant_method')} {config.get('packing_format')}"  # the latter is AutoRound's
    awq = "awq" in method
    version = config.get("version") if awq else config.get("checkpoint_format") or config.get("format")
    form = "awq" if awq else "gptq"
    if scales is None or len(scales.shape) != 2 or len(qweight) != 2 or not all((*scales.shape, *qweight)):
        return Codes(form, _number(config, "bits"), None, None, 0, "its scales are absent or no matrix")
    groups, out_features = scales.shape
    if awq:
        bits, in_features = qweight[1] * WORD / out_features, qweight[0]
        zeros = (groups, qweight[1])
    else:
        stored = parts.get("qzeros")
        columns = stored.shape[1] if stored and len(stored.shape) == 2 else 0
        bits = columns * WORD / out_features or _number(config, "bits")
        in_features = int(qweight[0] * WORD / bits) if bits else 0
        zeros = (groups, columns)
    problems = [
        *(["qzeros"] if "qzeros" in parts and tuple(parts["qzeros"].shape) != zeros else []),
        *(["g_idx"] if "g_idx" in parts and tuple(parts["g_idx"].shape) != (in_features,) else []),
        *([f"qweight ({bits:g} bit)"] if bits not in (2, 3, 4, 8) or (awq and in_features % groups) else []),
        *(["qweight"] if not awq and qweight[1] != out_features else []),
    ]
    if str(version or form).lower() not in ("gemm", "awq", "gptq", "gptq_v2"):
        problems = []
    sizes = ", ".join(f"{part} {list(info.shape)}" for part, info in parts.items())
    return Codes(
        form,
        bits,
        _group_size(in_features, groups, config.get("group_size")),
        (out_features, in_features),
        out_features * in_features,
        f"{' and '.join(problems)} do not fit: {sizes}" if problems else "",
    )


def _int8(parts: Parts, contents: Contents) -> Codes:
    shape, scales = parts["weight"].shape, parts["SCB"].shape
    fits = len(shape) == 2 and scales == shape[:1]
    why = "" if fits else f"SCB {list(scales)} does not fit weight {list(shape)}"
    return Codes("int8", 8, None, tuple(shape) if fits else None, math.prod(shape), why)


def _four_bit(form: str) -> Reader:
    def read(parts: Parts, contents: Contents) -> Codes:
        """The shape stands in a JSON text beside the codes, which a hub's headers do not show."""
        weights = 2 * parts["weight"].nbytes
        state = contents.small_tensor(parts[NF4 if form == "nf4" else FP4].name)
        try:
            told = json.loads(state) if state is not None else {}
            shape = tuple(map(int, told["shape"])) if "shape" in told else None
            block = int(told.get("blocksize", 64))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return Codes(form, 4, None, None, weights, "its quantization state is not understood")
        why = "" if shape is None or math.prod(shape) == weights else f"{weights} codes for {list(shape)}"
        scales = parts.get("weight.absmax")
        held = math.prod(scales.shape) if scales else None
        if state is not None and held not in (None, -(-weights // max(1, block))):
            why = why or f"{held} scales for {weights} codes in blocks of {block}"
        return Codes(form, 4, block, shape, weights, why)

    return read


def _compressed(parts: Parts, contents: Contents) -> Codes:
    """compressed-tensors: packed integers or floats with `weight_scale`, or `weight` itself of 8 bits, which
    of modelopt are two 4-bit floats a byte."""
    scales = parts["weight_scale"].shape if "weight_scale" in parts else ()
    groups = scales[1] if len(scales) == 2 else 1
    packed = parts.get("weight_packed")
    if packed is None:
        shape, dtype = parts["weight"].shape, parts["weight"].dtype
        if dtype == "U8" and len(shape) == 2 and shape[:1] == scales[:1]:
            shape = (shape[0], 2 * shape[1])
            return Codes("nvfp4", 4, _group_size(shape[1], groups), shape, math.prod(shape))
        form = "float8" if dtype.startswith("F8") else "int8"
        fits = len(shape) == 2 and (len(scales) < 2 or scales[0] in (1, shape[0]) or scales[0] < shape[0])
        why = "" if fits else f"weight_scale {list(scales)} does not fit weight {list(shape)}"
        size = _group_size(shape[1], groups) if fits else None
        return Codes(form, 8, size, tuple(shape) if fits else None, math.prod(shape), why)
    if len(packed.shape) != 2 or not scales or scales[0] not in (1, packed.shape[0]):
        return Codes("pack-quantized", 0, None, None, 0, f"weight_scale {list(scales)} does not fit")
    if packed.dtype == "U8":  # two 4-bit floats a byte
        shape = (packed.shape[0], 2 * packed.shape[1])
        form = "nvfp4" if "weight_global_scale" in parts else "mxfp4"
        return Codes(form, 4, _group_size(shape[1], groups), shape, math.prod(shape))
    return _packed_integers(parts, groups, contents)


def _packed_integers(parts: Parts, groups: int, contents: Contents) -> Codes:
    """Of how many bits a linear's codes are, is what its words, its shape and some config group agree on."""
    packed = parts["weight_packed"]
    words, widths = packed.shape[1], _widths(contents.quantization)
    told = contents.small_tensor(parts["weight_shape"].name) if "weight_shape" in parts else None
    if told is not None and len(told) == 16:
        shape = tuple(int.from_bytes(told[at : at + 8], "little") for at in (0, 8))
        fits = [bits for bits in widths if shape[0] == packed.shape[0] and _words(shape[1], bits) == words]
    else:
        columns = {bits: groups * size if size > 0 else words * WORD // bits for bits, size in widths.items()}
        fits = [bits for bits in widths if _words(columns[bits], bits) == words]
        shape = (packed.shape[0], columns[fits[0]]) if fits else tuple(packed.shape)
    if not fits:
        why = f"weight_packed {list(packed.shape)} does not fit weight_shape {list(shape)}"
        return Codes("pack-quantized", 0, None, None, 0, why)
    size = _group_size(shape[1], groups, widths[fits[0]])
    return Codes("pack-quantized", fits[0], size, shape, math.prod(shape))


def _fp8_blocks(parts: Parts, contents: Contents) -> Codes:
    shape = parts["weight"].shape
    block = contents.quantization.get("weight_block_size")
    size = block[1] if isinstance(block, list) and len(block) == 2 else None
    return Codes("float8", 8, size, tuple(shape) if len(shape) == 2 else None, math.prod(shape))


def _mlx(parts: Parts, contents: Contents) -> Codes:
    """`weight [..., out, in * bits / 32]` as words, `scales` and `biases` `[..., out, groups]`; experts stand
    first. Linears may have bits of their own, so they are counted."""
    words, scales = parts["weight"], parts["scales"].shape
    size = _number(contents.quantization, "group_size")
    if (
        words.dtype != "U32"
        or len(scales) < 2
        or words.shape[:-1] != scales[:-1]
        or not (size and scales[-1])
    ):
        return Codes("mlx", 0, None, None, 0, f"scales {list(scales)} do not fit weight {list(words.shape)}")
    shape = (*scales[:-1], scales[-1] * size)
    bits = words.shape[-1] * WORD / shape[-1]
    why = "" if bits in (2, 3, 4, 5, 6, 8) else f"{bits:g} bits a weight by groups of {size}"
    matrix = (shape[0], shape[1]) if len(shape) == 2 else None
    return Codes("mlx", bits, size, matrix, math.prod(shape), why)


def _mxfp4_experts(parts: Parts, contents: Contents) -> Codes:
    return Codes("mxfp4", 4, 32, None, 2 * parts["blocks"].nbytes)


# marker: (what stands before it, the part that holds the codes, further parts, how to read them)
MARKERS: dict[str, tuple[str, str, tuple[str, ...], Reader]] = {
    "qweight": (".", "qweight", ("qzeros", "scales", "g_idx"), _gptq),
    "SCB": (".", "weight", ("weight", "weight_format"), _int8),
    NF4: (".", "weight", OF_4_BIT, _four_bit("nf4")),
    FP4: (".", "weight", OF_4_BIT, _four_bit("fp4")),
    "weight_packed": (".", "weight_packed", OF_COMPRESSED, _compressed),
    "weight_scale": (".", "weight", OF_COMPRESSED, _compressed),
    "weight_scale_inv": (".", "weight", ("weight",), _fp8_blocks),
    "blocks": ("_", "blocks", ("scales",), _mxfp4_experts),
    "scales": (".", "weight", ("weight", "biases"), _mlx),
}


def _of_ggml(info: TensorInfo) -> Weight:
    """A tensor of a GGUF file; codes and scales of its blocks lie side by side."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    count = math.prod(info.shape)
    weight = Weight(info.name, info.dtype, info.shape, count, plain_bytes=info.nbytes)
    if info.dtype in PLAIN or re.match(r"I\d+$", info.dtype):
        return weight
    block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[info.dtype]]
    digits = re.match(r"(?:MX|NV)?[A-Z]*(\d)", info.dtype)
    bits = int(digits[1]) if digits else 8
    codes = Codes(info.dtype, bits, block, info.shape if len(info.shape) == 2 else None, count)
    code_bytes = min(info.nbytes, count * bits // 8)
    return replace(
        weight, plain_bytes=0, code_bytes=code_bytes, scale_bytes=info.nbytes - code_bytes, codes=codes
    )


def _widths(config: Mapping[str, Any]) -> dict[int, int]:
    """Bits that config groups of compressed-tensors name, with the group size of the first that does."""
    groups = config.get("config_groups")
    widths: dict[int, int] = {}
    for group in groups.values() if isinstance(groups, dict) else ():
        told = group.get("weights") if isinstance(group, dict) else None
        if isinstance(told, dict) and 2 <= (bits := _number(told, "num_bits")) <= 8:
            widths.setdefault(bits, _number(told, "group_size"))
    return widths


def _words(count: int, bits: int) -> int:
    """Words of 32 bits that hold `count` codes."""
    return -(-count * bits // WORD)


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else 0


def _group_size(in_features: int, groups: int, told: Any = None) -> int | None:
    """Columns of a group, as the configuration calls it where that fits; None for whole rows."""
    if isinstance(told, int) and 0 < told <= in_features and -(-in_features // told) == groups:
        return told
    return -(-in_features // groups) if groups > 1 else None
