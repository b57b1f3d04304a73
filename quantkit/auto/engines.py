"""What each engine loads: the ways in which its units can be stored.

quantkit's formats say what there is (bits of a layout, ggml's types), so what they gain is tried by itself;
an engine says only what its kernels leave of that.
"""

from __future__ import annotations

from quantkit.auto.folder import FolderSpace
from quantkit.auto.gguf import GgufSpace
from quantkit.layouts.compressed_tensors.integers import WIDTHS

Space = FolderSpace | GgufSpace
ENGINES: dict[str, Space] = {
    "any": FolderSpace("gptq", (2, 3, 4, 8), zero_points=True),  # the widths that most clients read
    "llama.cpp": GgufSpace(),
    "transformers": FolderSpace("compressed-tensors", tuple(WIDTHS), (32, 64, 128, 256), fuses=False),
    "vllm": FolderSpace("compressed-tensors", (4, 8)),  # those of its fast kernels, Marlin and Machete
}
