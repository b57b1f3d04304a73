"""Loads whole models of any layout, and samples from them with transformers' `generate`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from quantkit.errors import RESOURCES, UNSUPPORTED, QuantkitError, first_line, require
from quantkit.evaluation.settings import Sampling
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
    need, free = _model_bytes(skeleton, tokens), free_memory(device)
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


def _model_bytes(skeleton: Skeleton, tokens: int) -> int:
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


def generation_config(sampling: Sampling, ends: list[int]) -> transformers.GenerationConfig:
    """Return the configuration for transformers' `generate`. ends: token ids that end a text."""
    sampled = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    return transformers.GenerationConfig(
        max_new_tokens=sampling.tokens,
        do_sample=sampling.temperature > 0,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        use_cache=True,
        **(sampled if sampling.temperature else {}),
    )


def generate(
    model: nn.Module,
    prompt: Tensor,
    sampling: Sampling,
    ends: list[int],
    config: Mapping[str, Any] | None = None,
    **given: Any,
) -> Any:
    """Continue a prompt, int64 `[1, tokens]`, with transformers' `generate`; restore torch's random state.
    ends: token ids that end a text. config: further settings. given: further arguments of `generate`."""
    settings = generation_config(sampling, ends)
    settings.update(**(config or {}))
    device = prompt.device
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch.no_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", FutureWarning)  # 5.24 renames an argument that 5.20 needs
        torch.manual_seed(sampling.seed % 2**64)
        mask = torch.ones_like(prompt)
        return model.generate(prompt, attention_mask=mask, generation_config=settings, **given)


def stored_config(checkpoint: Checkpoint) -> transformers.GenerationConfig | None:
    """Return the checkpoint's generation_config.json, or None. Raises QuantkitError if it is invalid."""
    path = checkpoint.folder / "generation_config.json"
    if not path.is_file():
        return None
    try:
        config = transformers.GenerationConfig.from_pretrained(checkpoint.folder)
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        if not all(end is None or (type(end) is int and end >= 0) for end in ends):
            raise ValueError(f"eos_token_id is {config.eos_token_id!r}")
    except Exception as error:  # not JSON, not an object, or invalid values
        hint = "download it again, or take it away: nothing needs it"
        raise QuantkitError(f"{path} is not supported: {first_line(error)}", hint, UNSUPPORTED) from error
    return config


def ends_of_text(checkpoint: Checkpoint) -> list[int]:
    """Return the token ids that end a text: from generation_config.json, else config.json, else the
    tokenizer."""
    stored = stored_config(checkpoint)
    configured = getattr(checkpoint.text_config, "eos_token_id", None)
    candidates = (stored and stored.eos_token_id, configured, checkpoint.tokenizer.eos_token_id)
    ends = next((value for value in candidates if value is not None), [])
    ends = list(ends) if isinstance(ends, (list, tuple)) else [ends]
    return [end for end in ends if type(end) is int]


def beginning(checkpoint: Checkpoint, hint: str) -> int:
    """Return the id of the token that begins a text, else that ends one. Raises QuantkitError without one."""
    tokenizer = checkpoint.tokenizer
    marks = (tokenizer.bos_token_id, tokenizer.eos_token_id, checkpoint.text_config.bos_token_id)
    first = next((mark for mark in marks if mark is not None), None)
    require(first is not None, f"{checkpoint.source} has no token that begins a text", hint, UNSUPPORTED)
    checkpoint.check_ids([first])
    return first
