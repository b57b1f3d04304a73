"""A prebuilt llama.cpp through ctypes: what its command-line tools are made of, without compiling them."""

from __future__ import annotations

import ctypes as c
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np

os.environ.setdefault("GGML_NO_BACKTRACE", "1")
FLOATS = c.POINTER(c.c_float)
LOG = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
VERSION = "v0.5.0"  # whose structures are written down here
MAX_BUFFER_BYTES = 8 << 30  # the default of a field near the end: says whether the fields are where we think


class ImatrixEntry(c.Structure):
    _fields_ = [("name", c.c_char_p), ("data", FLOATS), ("size", c.c_size_t)]


class TensorOverride(c.Structure):
    _fields_ = [("pattern", c.c_char_p), ("type", c.c_int)]


class Parameters(c.Structure):
    """`llama_model_quantize_params` of llama.cpp `VERSION`."""

    _fields_ = [
        ("threads", c.c_int32),
        ("file_type", c.c_int),
        ("output_tensor_type", c.c_int),
        ("token_embedding_type", c.c_int),
        ("allow_requantize", c.c_bool),
        ("quantize_output_tensor", c.c_bool),
        ("only_copy", c.c_bool),
        ("pure", c.c_bool),
        ("keep_split", c.c_bool),
        ("dry_run", c.c_bool),
        ("imatrix", c.POINTER(ImatrixEntry)),
        ("kv_overrides", c.c_void_p),
        ("tensor_overrides", c.POINTER(TensorOverride)),
        ("prune_layers", c.c_void_p),
        ("max_buffer_bytes", c.c_size_t),
    ]


class Library:
    """`folder` holds `libggml-base.so`, `libggml.*.so` and `libllama.*.so`."""

    def __init__(self, folder: Path):
        for pattern in ("libggml-base.so", "libggml.*so", "libllama.*so"):
            (path,) = folder.glob(pattern)
            self.llama = c.CDLL(str(path), mode=c.RTLD_GLOBAL)
        self.log: list[str] = []
        self._listener = LOG(lambda level, text, data: self.log.append(text.decode(errors="replace")))
        self.llama.llama_log_set(self._listener, None)
        self.llama.llama_model_quantize_default_params.restype = Parameters
        self.llama.llama_model_quantize.argtypes = [c.c_char_p, c.c_char_p, c.POINTER(Parameters)]
        self.llama.llama_model_quantize.restype = c.c_uint32

    def quantize(
        self, source: Path, target: Path, file_type: int, imatrix: Mapping[str, np.ndarray] = {},
        tensor_type: Sequence[str] = (), output_tensor_type: str | None = None,
        token_embedding_type: str | None = None, pure: bool = False,
    ) -> bool:  # fmt: skip
        """Quantize a GGUF file with one thread, as the tool with these options; whether it did.

        `log` says why not.
        """
        self.log.clear()
        parameters = self.llama.llama_model_quantize_default_params()
        if parameters.max_buffer_bytes != MAX_BUFFER_BYTES or not parameters.quantize_output_tensor:
            raise SystemExit(
                f"llama_model_quantize_params of this llama.cpp has other fields than {VERSION}'s"
            )
        parameters.threads, parameters.file_type, parameters.pure = 1, file_type, pure
        if output_tensor_type:
            parameters.output_tensor_type = _number(output_tensor_type)
        if token_embedding_type:
            parameters.token_embedding_type = _number(token_embedding_type)
        kept = {name: np.ascontiguousarray(values, np.float32) for name, values in imatrix.items()}
        if imatrix:
            entries = [
                ImatrixEntry(name.encode(), values.ctypes.data_as(FLOATS), values.size)
                for name, values in kept.items()
            ]
            parameters.imatrix = (ImatrixEntry * (len(entries) + 1))(*entries)
        if tensor_type:
            wishes = [text.rpartition("=") for text in tensor_type]
            rows = [TensorOverride(pattern.encode(), _number(type)) for pattern, _, type in wishes]
            parameters.tensor_overrides = (TensorOverride * (len(rows) + 1))(*rows)
        done = self.llama.llama_model_quantize(str(source).encode(), str(target).encode(), parameters)
        return done == 0


def _number(type: str) -> int:
    return gguf.GGMLQuantizationType[type.upper()].value
