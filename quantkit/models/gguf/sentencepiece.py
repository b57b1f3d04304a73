"""A SentencePiece model file (`tokenizer.model`): a protocol buffer, ModelProto of sentencepiece_model.proto.

Its types of pieces have the numbers that GGUF's `token_type` uses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from transformers.convert_slow_tokenizer import import_protobuf

from quantkit.errors import UNSUPPORTED, QuantkitError

MODEL_TYPES = {1: "Unigram", 2: "BPE", 3: "word", 4: "character"}


def read(path: Path) -> Any:
    """The ModelProto. Raises QuantkitError unless the file is a whole BPE model."""
    model = import_protobuf().ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise _broken(path, str(error)) from error
    texts = [piece.piece for piece in model.pieces]  # bytes, where they are no UTF-8
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise _broken(path, "it has no pieces, or one without text")
    if (kind := MODEL_TYPES[model.trainer_spec.model_type]) != "BPE":
        raise QuantkitError(
            f"{path} is a SentencePiece {kind} model",
            hint="only BPE tokenizers can be exported",
            exit_code=UNSUPPORTED,
        )
    return model


def _broken(path: Path, why: str) -> QuantkitError:
    return QuantkitError(f"{path} is no SentencePiece model: {why}", "download it again")
