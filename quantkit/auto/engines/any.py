"""No engine in particular: the gptq layout in the widths that most clients read, fused linears alike."""

from quantkit.auto.folder import FolderSpace

SPACE = FolderSpace("gptq", (2, 3, 4, 8), zero_points=True)
