"""ggml's own encoders and decoders, out of the library that the xllamacpp wheel brings."""

import ctypes
import importlib.util
import os
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import torch

FLOATS = ctypes.POINTER(ctypes.c_float)
DECODER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, FLOATS, ctypes.c_int64)


class _Traits(ctypes.Structure):
    """The beginning of struct ggml_type_traits (ggml.h)."""

    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """The shared library; None where the wheel is not installed."""
    os.environ["GGML_NO_BACKTRACE"] = "1"
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None:
        return None
    found = ctypes.CDLL(str(next(Path(spec.origin).parent.glob("xllamacpp*.so"))))
    found.ggml_quantize_chunk.restype = ctypes.c_size_t
    found.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        FLOATS,
        ctypes.c_void_p,
        *[ctypes.c_int64] * 3,
        FLOATS,
    ]
    found.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
    found.ggml_get_type_traits.argtypes = [ctypes.c_int]
    return found


def _number(type_name: str) -> int:
    return gguf.GGMLQuantizationType[type_name].value


def encode(type_name: str, weight: torch.Tensor, importance: torch.Tensor | None = None) -> torch.Tensor:
    """Bytes `[rows, row_bytes]` of `weight [rows, in]`; importance `[in]`."""
    values = np.ascontiguousarray(weight.numpy(), np.float32)
    rows, width = values.shape
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    encoded = np.empty((rows, width // block * size), np.uint8)
    costs = None if importance is None else np.ascontiguousarray(importance.numpy(), np.float32)
    written = library().ggml_quantize_chunk(
        _number(type_name),
        values.ctypes.data_as(FLOATS),
        encoded.ctypes.data,
        0,
        rows,
        width,
        None if costs is None else costs.ctypes.data_as(FLOATS),
    )
    assert written == encoded.nbytes
    return torch.from_numpy(encoded)


def decode(type_name: str, encoded: torch.Tensor, width: int) -> torch.Tensor:
    """Values `[rows, width]` of bytes `[rows, row_bytes]`."""
    traits = library().ggml_get_type_traits(_number(type_name)).contents
    blocks = np.ascontiguousarray(encoded.numpy())
    values = np.empty((len(blocks), width), np.float32)
    DECODER(traits.to_float)(blocks.ctypes.data, values.ctypes.data_as(FLOATS), values.size)
    return torch.from_numpy(values)
