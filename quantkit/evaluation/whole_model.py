"""Loads a checkpoint of any layout as a whole model, which `generate` and training need."""

from __future__ import annotations

import math

import torch
from torch import nn

from quantkit.errors import RESOURCES, require
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.machine.device import free_memory
from quantkit.models.skeleton import Skeleton
from quantkit.tables import size


def load_model(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, tokens: int) -> nn.Module:
    """Load the whole model, for a context of `tokens` tokens. Weights are decoded; layouts that quantize
    activations keep their own modules.

    Raises QuantkitError (exit code 5) if the model needs more memory than is free.
    """
    skeleton = Skeleton(checkpoint, dtype, device)
    skeleton.names.check_complete()
    need, free = _memory(skeleton, tokens), free_memory(device)
    needs = f"needs about {size(need)} of memory in {str(dtype).removeprefix('torch.')}"
    what = f"{checkpoint.source} as a whole model {needs}, {size(free)} are free"
    hint = "use --dtype bfloat16 or another --device; quantkit eval compares models of any size"
    require(need <= free, what, hint, RESOURCES)
    skeleton.load_rest()
    skeleton.streams = False
    container = skeleton.model.get_submodule(skeleton.names.blocks)
    for index in range(len(skeleton.blocks)):
        container[index] = skeleton.load_block(index)
    return skeleton.model


def _memory(skeleton: Skeleton, tokens: int) -> int:
    """Return the bytes of all decoded weights, of the KV cache for `tokens` tokens, and of temporary tensors
    while the largest weight is decoded."""
    names = skeleton.names
    sizes = [math.prod(shape) for name, shape in names.shapes.items() if not names.in_tower(name)]
    config = skeleton.checkpoint.text_config
    heads = getattr(config, "num_attention_heads", 1) or 1
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    cache = 2 * len(skeleton.blocks) * kv_heads * width * tokens
    return (sum(sizes) + cache) * skeleton.dtype.itemsize + 3 * 4 * max(sizes)
