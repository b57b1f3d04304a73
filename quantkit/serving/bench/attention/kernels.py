"""The attention kernel that ran, read off torch's dispatcher during one forward pass.

`sdpa` is a name for several kernels, and torch picks one by dtype, mask, head size and device; the choice
shows only in the operator that it dispatches to.
"""

from __future__ import annotations

from collections.abc import Collection

from torch.utils._python_dispatch import TorchDispatchMode

# torch's operators of scaled_dot_product_attention, and their usual names.
FUSED = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash, torch's own for CPUs",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "memory-efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cuDNN",
    "aten::_scaled_dot_product_fused_attention_overrideable": "the device's own",
    "aten::scaled_dot_product_attention": "the device's own",  # a backend that does not take it apart
}
PACKAGES = ("flash_attn", "flash_attn_2", "flash_attn_3", "vllm_flash_attn")  # namespaces of their operators
SOFTMAX = {"aten::_softmax", "aten::_safe_softmax"}


class Operators(TorchDispatchMode):
    """`with Operators() as seen:` notes the name of every operator that runs, such as aten::_softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name if hasattr(func, "_schema") else str(func))
        return func(*args, **(kwargs or {}))


def describe(operators: Collection[str]) -> str:
    """Return the attention among a forward's operators, in words.

    Without a fused kernel the scores `softmax(Q Kᵀ) [heads, N, N]` were written out, as by `eager` and the
    `math` fallback of sdpa. A fused kernel goes first, as a router of experts has a softmax of its own.
    """
    fused = [words for name, words in FUSED.items() if name in operators]
    if found := fused + sorted(name for name in operators if name.partition("::")[0] in PACKAGES):
        return ", ".join(dict.fromkeys(found))
    if SOFTMAX.intersection(operators):
        return "scores written out (matmul, softmax, matmul)"
    return "not known: torch's dispatcher showed no attention"
