"""A random Llama of any shape with the demo model's tokenizer: what the benchmarks run on."""

from __future__ import annotations

import shutil
from pathlib import Path

DEMO = Path(__file__).parent.parent / "tests/data/demo-llama-6m"


def make(
    folder: Path, hidden: int, intermediate: int, layers: int, heads: int, context: int, dtype: str,
    vocabulary: int = 4096, spread: bool = False,
) -> int:  # fmt: skip
    """Save the checkpoint in `folder`; returns the bytes of its weights.

    spread: norms of unlike weights, a few of them large, so that inputs differ as a trained model's do.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        vocab_size=vocabulary,
        max_position_embeddings=context,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    if spread:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("layernorm.weight"):
                    parameter.copy_(torch.rand(parameter.shape) * 2 + 0.1)
                    parameter[::97] *= 8
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
