"""GGUF files of tiny models, made from the parts: the tensors and metadata of quantkit, any tokenizer."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from quantkit.models.files.gguf_writer import Entry, writing
from quantkit.models.files.open import open_checkpoint
from quantkit.models.gguf import metadata, tensors
from quantkit.models.gguf.mixtures import stays_float
from quantkit.models.skeleton import Skeleton

NORMAL, CONTROL, UNUSED = 1, 3, 5  # token types


def vocabulary(size: int) -> dict:
    """Keys of the smallest tokenizer that llama.cpp takes: a token a byte, one merge, unused ones."""
    tokens = list(bytes_to_unicode().values())
    tokens += [f"[PAD{id}]" for id in range(len(tokens), size)]
    types = np.full(size, UNUSED, dtype=np.int32)
    types[:256] = NORMAL
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def export(folder: Path, path: Path, type: str = "F32", extra: dict | None = None) -> Path:
    """Write the checkpoint `folder` as a GGUF file; tensors that fit no blocks of `type` stay in float32.

    Quantized types are those that the gguf package encodes itself. `extra` goes into the metadata.
    """
    checkpoint = Skeleton(open_checkpoint(str(folder)), torch.float32, torch.device("cpu")).checkpoint
    targets = tensors.of_checkpoint(checkpoint)
    keys = metadata.assemble(checkpoint, targets, type, vocabulary(checkpoint.config.vocab_size))
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    types = {target.name: type for target in targets}
    for target in targets:
        if stays_float(target.name, target.shape) or target.shape[-1] % block:
            types[target.name] = "F32"
    entries = [Entry(target.name, types[target.name], target.shape) for target in targets]
    with writing(path, keys | (extra or {}), entries) as write:
        for target in targets:
            values = target.to_gguf(target.read(checkpoint, torch.float32)).numpy()
            kind = gguf.GGMLQuantizationType[types[target.name]]
            write(target.name, [np.ascontiguousarray(gguf.quants.quantize(values, kind))])
    return path
