"""A GGUF file as `plan` sees it: its tensors, with the names that most checkpoints have for them."""

from __future__ import annotations

import math
import re

from quantkit.capacity.parameters import CONV1D_FAMILIES, Tensor
from quantkit.capacity.settings import Settings
from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.models.files.headers import Contents
from quantkit.models.files.safetensors_folder import TensorInfo

FLOATS = ("F32", "F16", "BF16")
NAMES = {  # part of a GGUF name -> what most checkpoints call it; the first that matches counts
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
FACTORS = re.compile(r"rope_(freqs|factors_\w+)\.weight")  # divisors of rotary frequencies: no parameters
HALF = 2  # bytes of a weight in 16 bit


def entries(contents: Contents, settings: Settings) -> list[Tensor]:
    """A parameter each; quantized ones as of their original in 16 bit.

    Raises QuantkitError (exit code 4) for a file that is no language model's.
    """
    if f"{contents.metadata.get('general.architecture')}.block_count" not in contents.metadata:
        raise QuantkitError(
            f"{contents.path} is no language model",
            hint="give the GGUF file of a model, not of an importance matrix or a vocabulary",
            exit_code=UNSUPPORTED,
        )
    infos = contents.infos.values()
    return [_entry(info, settings) for info in infos if not FACTORS.fullmatch(info.name)]


def _entry(info: TensorInfo, settings: Settings) -> Tensor:
    name, shape = info.name, info.shape
    for pattern, usual in NAMES.items():
        name, found = re.subn(pattern, usual, name)
        if found:
            break
    if settings.model_type in CONV1D_FAMILIES and name.startswith("blk.") and len(shape) == 2:
        shape = shape[::-1]  # transformers stores these [in, out]
    if info.dtype in FLOATS:
        return Tensor(name, shape, info.nbytes)
    return Tensor(name, shape, HALF * math.prod(shape), info.nbytes)
