"""Original parameters of a quantized checkpoint or a GGUF file, from headers alone.

inspection/stored.py finds codes and scales. This file turns them into the tensors that a plain checkpoint of
the model would have, so that the same computations apply.
"""

import math
import re
from collections.abc import Mapping
from contextlib import suppress

from quantkit.capacity import Unsupported
from quantkit.capacity.parameters import CONV1D_FAMILIES, DTYPE_BYTES, Tensor
from quantkit.capacity.settings import Settings
from quantkit.errors import UNSUPPORTED, name_all, require
from quantkit.inspection.stored import Weight, weights_of
from quantkit.models.files.headers import Contents

FLOAT8, FLOATS = "F8", ("F", "BF")  # prefixes of type names
NAMES = {  # part of a GGUF name -> usual name in checkpoints; the first match counts
    r"^token_embd\.": "model.embed_tokens.",
    r"^position_embd\.": "model.embed_positions.",
    r"^output\.": "lm_head.",
    r"\.attn_([qkv])\.": r".self_attn.\1_proj.",
    r"\.attn_qkv\.": ".self_attn.qkv_proj.",
    r"\.attn_output\.": ".self_attn.o_proj.",
    r"\.ffn_(gate|up|down)_exps\.": r".mlp.experts.\1_proj.",
    r"\.ffn_(gate|up|down)\.(\d+)\.": r".mlp.experts.\2.\1_proj.",  # in old files one by one
    r"\.ffn_gate_inp\.": ".mlp.gate.",
    r"\.ffn_(gate|up|down)\.": r".mlp.\1_proj.",
}
FACTORS = re.compile(r"rope_(freqs|factors_\w+)\.weight")  # factors of rotary frequencies, not parameters


def entries(contents: Contents) -> list[Tensor]:
    """Return every parameter of a quantized checkpoint, with its original shape. Raises QuantkitError (exit
    code 4), with names, if tensors are stored in an unknown way."""
    settings = Settings.of(contents.config)
    weights = weights_of(contents)
    odd = [weight.name for weight in weights if not _understood(weight)]
    what = f"{contents.source} stores {name_all(odd, 2)} in an unknown way"
    require(not odd, what, "plan the original checkpoint, or give only --params", UNSUPPORTED)
    shapes: dict[str, tuple[int, ...]] = {}
    if any(weight.shape is None for weight in weights):  # bitsandbytes stores no shapes in headers
        from quantkit.capacity import meta

        with suppress(Unsupported):
            shapes = meta.shapes(contents.config)
    element = DTYPE_BYTES[settings.stored_dtype]
    return [_entry(weight, shapes, element) for weight in weights]


def _understood(weight: Weight) -> bool:
    """Return whether the number of parameters of a stored weight is known."""
    if weight.codes:
        return bool(weight.parameters) and not weight.codes.problem
    return weight.dtype.startswith(FLOATS) or len(weight.shape or ()) < 2


def _entry(weight: Weight, shapes: Mapping[str, tuple[int, ...]], element: int) -> Tensor:
    """Return the original parameter. shapes: where headers have none. element: bytes of a value."""
    if not weight.parameters:  # a scale of keys or values
        return Tensor(weight.name, (0,), 0, weight.nbytes)
    if not weight.codes and not weight.dtype.startswith(FLOAT8):
        return Tensor(weight.name, tuple(weight.shape), weight.nbytes)
    shape = weight.shape or shapes.get(weight.name)
    if shape is None or math.prod(shape) != weight.parameters:
        shape = (weight.parameters,)
    return Tensor(weight.name, tuple(shape), element * weight.parameters, weight.nbytes)


def of_gguf(contents: Contents, settings: Settings) -> list[Tensor]:
    """Return every parameter of a GGUF file under the usual names of checkpoints. nbytes of quantized ones is
    that of 16 bit. Raises QuantkitError (exit code 4) for a file without a language model."""
    whole = f"{contents.metadata.get('general.architecture')}.block_count" in contents.metadata
    hint = "give the GGUF file of a model, not of an importance matrix or a vocabulary"
    require(whole, f"{contents.path} holds no language model", hint, UNSUPPORTED)
    weights = (weight for weight in weights_of(contents) if not FACTORS.fullmatch(weight.name))
    return [_of_ggml(weight, settings) for weight in weights]


def _of_ggml(weight: Weight, settings: Settings) -> Tensor:
    name, shape = weight.name, weight.shape
    for pattern, usual in NAMES.items():
        name, matches = re.subn(pattern, usual, name)
        if matches:
            break
    if settings.model_type in CONV1D_FAMILIES and name.startswith("blk.") and len(shape) == 2:
        shape = shape[::-1]  # transformers stores these [in, out]
    if not weight.codes:
        return Tensor(name, shape, weight.nbytes)
    return Tensor(name, shape, 2 * weight.parameters, weight.nbytes)
