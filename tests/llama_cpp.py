"""The real llama.cpp in this process, for tests: logits, token ids and perplexity of a GGUF file.

It is the shared library of the `xllamacpp` wheel, called through ctypes. Load no other llama.cpp beside
it. Tests begin with `pytest.importorskip("xllamacpp")`.
"""

from __future__ import annotations

import ctypes as c
import math
import os
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

os.environ["GGML_NO_BACKTRACE"] = "1"

F32, F16 = 0, 1  # of enum ggml_type
CACHES = {"f32": F32, "f16": F16, "q4_0": 2, "q8_0": 8}
FLASH_AUTO, FLASH_OFF, FLASH_ON = -1, 0, 1


class ModelParams(c.Structure):
    """llama_model_params, passed on as the library returned it."""

    _fields_ = [("_opaque", c.c_uint32 * 128)]


class ContextParams(c.Structure):
    """llama_context_params; what is not named is passed on as the library returned it."""

    _fields_ = [
        ("n_ctx", c.c_uint32),
        ("n_batch", c.c_uint32),
        ("n_ubatch", c.c_uint32),
        ("_n_seq_max_to_type", c.c_uint32 * 7),
        ("rope_scaling_type", c.c_int32),
        ("pooling_type", c.c_int32),
        ("attention_type", c.c_int32),
        ("flash_attn_type", c.c_int32),
        ("_rope", c.c_uint32 * 8),
        ("_callback", c.c_uint32 * 4),
        ("type_k", c.c_int32),
        ("type_v", c.c_int32),
        ("_rest", c.c_uint32 * 100),
    ]


class Batch(c.Structure):
    """llama_batch."""

    _fields_ = [
        ("n_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embd", c.c_void_p),
        ("pos", c.POINTER(c.c_int32)),
        ("n_seq_id", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    ]


SIGNATURES = {  # function -> result, arguments
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [c.c_void_p, c.c_void_p]),
    "llama_model_default_params": (ModelParams, []),
    "llama_context_default_params": (ContextParams, []),
    "llama_model_load_from_file": (c.c_void_p, [c.c_char_p, ModelParams]),
    "llama_model_free": (None, [c.c_void_p]),
    "llama_init_from_model": (c.c_void_p, [c.c_void_p, ContextParams]),
    "llama_free": (None, [c.c_void_p]),
    "llama_set_n_threads": (None, [c.c_void_p, c.c_int32, c.c_int32]),
    "llama_model_get_vocab": (c.c_void_p, [c.c_void_p]),
    "llama_vocab_n_tokens": (c.c_int32, [c.c_void_p]),
    "llama_tokenize": (
        c.c_int32,
        [c.c_void_p, c.c_char_p, c.c_int32, c.POINTER(c.c_int32), c.c_int32, c.c_bool, c.c_bool],
    ),
    "llama_batch_init": (Batch, [c.c_int32, c.c_int32, c.c_int32]),
    "llama_batch_free": (None, [Batch]),
    "llama_decode": (c.c_int32, [c.c_void_p, Batch]),
    "llama_get_logits": (c.POINTER(c.c_float), [c.c_void_p]),
    "llama_get_memory": (c.c_void_p, [c.c_void_p]),
    "llama_memory_clear": (None, [c.c_void_p, c.c_bool]),
}
LOG: list[str] = []  # what the library said since the last model was opened


@c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
def _log(level, text, data):
    LOG.append(text.decode(errors="replace"))


@cache
def library() -> c.CDLL:
    """The shared library with its functions declared."""
    folder = Path(next(iter(find_spec("xllamacpp").submodule_search_locations)))
    shared = c.CDLL(str(next(folder.glob("xllamacpp*.so"))))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(shared, name)
        function.restype, function.argtypes = result, arguments
    shared.llama_backend_init()
    shared.llama_log_set(c.cast(_log, c.c_void_p), None)
    return shared


class Llama:
    """A GGUF file opened by llama.cpp, with a key/value cache of `CACHES`; a context manager.

    Raises RuntimeError with llama.cpp's own words when it refuses the file.
    """

    def __init__(self, path: Path, ctx: int = 512, cache: str = "f32"):
        self._lib = library()
        LOG.clear()
        self._context = None
        self._model = self._lib.llama_model_load_from_file(
            str(path).encode(), self._lib.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError("".join(LOG[-6:]))
        params = self._lib.llama_context_default_params()
        known = params.n_ctx, params.flash_attn_type, params.type_k, params.type_v
        assert known == (512, FLASH_AUTO, F16, F16), "llama_context_params has another shape"
        params.n_ctx = params.n_batch = params.n_ubatch = ctx
        params.type_k = params.type_v = CACHES[cache]
        quantized = cache.startswith("q")  # then it has to be flash attention, which computes in 16 bit
        params.flash_attn_type = FLASH_ON if quantized else FLASH_OFF
        self._context = self._lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("".join(LOG[-6:]))
        self._lib.llama_set_n_threads(self._context, 1, 1)
        self._vocabulary = self._lib.llama_model_get_vocab(self._model)
        self.vocab_size = self._lib.llama_vocab_n_tokens(self._vocabulary)

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *exception) -> None:
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def tokenize(self, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text; `parse_special`: names of special tokens in it become those tokens."""
        data = text.encode()
        ids = (c.c_int32 * (len(data) + 8))()
        count = self._lib.llama_tokenize(
            self._vocabulary, data, len(data), ids, len(ids), add_special, parse_special
        )
        assert count >= 0
        return list(ids[:count])

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """float32 `[tokens, vocabulary]` of one sequence, from its beginning."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        batch = self._lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place], batch.logits[place] = int(token), place, 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        status = self._lib.llama_decode(self._context, batch)
        self._lib.llama_batch_free(batch)
        assert status == 0, "".join(LOG[-6:])
        found = self._lib.llama_get_logits(self._context)
        return np.ctypeslib.as_array(found, (len(ids), self.vocab_size)).copy()

    def perplexity(self, windows: Iterable[Sequence[int]], first: Iterable[int]) -> float:
        """exp of the mean negative log likelihood; window k is scored from position `first[k]` on.

        `quantkit.evaluation.windows.Windows` holds both as `ids` and `first`.
        """
        losses = []
        for ids, start in zip(windows, first, strict=True):
            logits = self.logits(ids)[start:-1].astype(np.float64)
            top = logits.max(-1, keepdims=True)
            total = (top + np.log(np.exp(logits - top).sum(-1, keepdims=True)))[:, 0]
            targets = np.asarray(ids, dtype=np.int64)[start + 1 :]
            losses.append(total - logits[np.arange(len(targets)), targets])
        return math.exp(np.concatenate(losses).mean())
