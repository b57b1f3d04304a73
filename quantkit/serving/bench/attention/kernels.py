"""Which attention ran: asked of torch's dispatcher during one forward pass, not of the configuration.

`sdpa` is a name for several kernels, and torch picks one by dtype, mask, head size and device; the choice
shows only in the operator that it dispatches to.
"""

from __future__ import annotations

from collections.abc import Collection

from torch.utils._python_dispatch import TorchDispatchMode

# torch's operators behind scaled_dot_product_attention, and what people call them.
FUSED = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash, torch's own for CPUs",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "memory-efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cuDNN",
    "aten::_scaled_dot_product_fused_attention_overrideable": "the device's own",
    "aten::scaled_dot_product_attention": "the device's own",  # a backend that does not take it apart
}
PACKAGES = ("flash_attn", "flash_attn_2", "flash_attn_3", "vllm_flash_attn")  # namespaces of their operators
SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")


class Operators(TorchDispatchMode):
    """`with Operators() as seen:` notes the name of every operator that runs, such as aten::_softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name if hasattr(func, "_schema") else str(func))
        return func(*args, **(kwargs or {}))


def describe(operators: Collection[str], implementation: str = "") -> str:
    """The attention among a forward's operators, in words; implementation: what transformers calls it.

    Where no fused kernel is found, the scores `softmax(Q Kᵀ) [heads, N, N]` were written out: that is
    `eager`, and the `math` fallback of sdpa. A router of experts has a softmax,
    too, so a fused kernel goes first.
    """
    fused = [words for name, words in FUSED.items() if name in operators]
    own = sorted(name for name in operators if name.partition("::")[0] in PACKAGES)
    if fused or own:
        return ", ".join(dict.fromkeys(fused + own))
    if any(name in operators for name in SOFTMAX):
        math = "torch's math fallback: " if implementation == "sdpa" else ""
        return f"{math}scores written out (matmul, softmax, matmul)"
    return "not known: torch's dispatcher showed no attention"
