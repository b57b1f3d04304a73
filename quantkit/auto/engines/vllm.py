"""vLLM: compressed-tensors in several groups of 4 and 8 bits, for which alone its fast kernels (Marlin,
Machete) are made; what it fuses alike."""

from quantkit.auto.folder import FolderSpace

SPACE = FolderSpace("compressed-tensors", (4, 8))
