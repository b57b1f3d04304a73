"""What headers say of each weight: its shape, how it is stored, and which bytes are codes and which scales.

A quantized linear lies in several tensors; the layouts (HEADERS of each) tell which belong together and what
their sizes mean, also where quantkit has no decoder for them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from quantkit import layouts
from quantkit.layouts import _foreign, ggml
from quantkit.layouts._headers import Codes, Headers, Mark
from quantkit.models.files.headers import Contents
from quantkit.models.files.safetensors_folder import TensorInfo


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


def all_headers() -> list[Headers]:
    """Of every layout, and of what only others write."""
    return [module.HEADERS for module in (*layouts.modules(), _foreign)]


def weights_of(contents: Contents) -> list[Weight]:
    """Every parameter, in the order of the file."""
    if contents.container == "gguf":
        owners = {name: ggml.scaled_by(name, contents.infos) for name in contents.infos}
        beside = Counter()
        for name, owner in owners.items():
            beside[owner] += contents.infos[name].nbytes
        infos = (info for name, info in contents.infos.items() if owners[name] is None)
        return [_of_ggml(info, beside[info.name]) for info in infos]
    found, taken = {}, set()
    for linear, (mark, parts) in packed(contents).items():
        codes = mark.read(parts, contents)
        nbytes, coded = sum(info.nbytes for info in parts.values()), parts[mark.codes]
        found[linear] = Weight(
            f"{linear}.weight", coded.dtype, codes.shape, codes.weights,
            code_bytes=coded.nbytes, scale_bytes=nbytes - coded.nbytes, codes=codes,
        )  # fmt: skip
        taken |= {info.name for info in parts.values()}
    of_cache = tuple(ending for headers in all_headers() for ending in headers.of_cache)
    plain = [
        _of_cache(info)
        if name.endswith(of_cache)
        else Weight(name, info.dtype, info.shape, math.prod(info.shape), plain_bytes=info.nbytes)
        for name, info in contents.infos.items()
        if name not in taken
    ]
    return plain + list(found.values())


def _of_cache(info: TensorInfo) -> Weight:
    """A scale of keys or values, which is no parameter."""
    return Weight(info.name, info.dtype, info.shape, 0, scale_bytes=info.nbytes)


def packed(contents: Contents) -> dict[str, tuple[Mark, Parts]]:
    """Every quantized linear: how it is found, and the tensors it lies in."""
    found: dict[str, tuple[Mark, Parts]] = {}
    marks = [
        mark for headers in all_headers() for mark in headers.marks if mark.claims(contents.quantization)
    ]
    for mark in marks:
        ending = mark.separator + mark.marker
        for name in contents.infos:
            linear = name.removesuffix(ending)
            if linear == name or linear in found:
                continue
            names = {part: f"{linear}{mark.separator}{part}" for part in (mark.marker, *mark.others)}
            parts = {part: contents.infos[full] for part, full in names.items() if full in contents.infos}
            if mark.codes in parts:
                found[linear] = (mark, parts)
    return found


def _of_ggml(info: TensorInfo, beside: int) -> Weight:
    """A tensor of a GGUF file; codes and scales of its blocks lie side by side. beside: bytes of scales in
    tensors of their own."""
    weight = Weight(info.name, info.dtype, info.shape, math.prod(info.shape), plain_bytes=info.nbytes)
    codes = ggml.codes_of(info)
    if codes is None:
        return weight
    code_bytes = min(info.nbytes, int(codes.weights * codes.bits) // 8)
    return replace(
        weight,
        plain_bytes=0,
        code_bytes=code_bytes,
        scale_bytes=info.nbytes - code_bytes + beside,
        codes=codes,
    )
