"""A twin of a Llama-like checkpoint that computes the same, with a few channels that are very large.

    python scripts/outlier_twin.py MODEL OUT

The weights of a few channels of every block's norms are multiplied by 32, and the columns of the linears
that read them divided by it (a power of two: nothing is rounded). Large models grow such channels by
themselves (Dettmers et al. 2022, section 4); this makes a small one that has them.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

CHANNELS = 3
FACTOR = 32
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def make(model: Path, folder: Path) -> Path:
    """Write the twin of a single-file checkpoint into `folder`, unless it is there."""
    if folder.exists():
        return folder
    shutil.copytree(model, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("layernorm.weight")]:
        block, _, norm = name.removesuffix(".weight").rpartition(".")
        if norm in READERS:
            channels = torch.randperm(len(tensors[name]), generator=generator)[:CHANNELS]
            tensors[name][channels] *= FACTOR
            for linear in READERS[norm]:
                tensors[f"{block}.{linear}.weight"][:, channels] /= FACTOR
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    print(make(arguments.model, arguments.out))
