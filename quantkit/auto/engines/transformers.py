"""transformers with compressed-tensors: any width, and every linear by itself, for it fuses none of them."""

from quantkit.auto.folder import FolderSpace
from quantkit.layouts.compressed_tensors.integers import WIDTHS

SPACE = FolderSpace("compressed-tensors", tuple(WIDTHS), (32, 64, 128, 256), fuses=False)
