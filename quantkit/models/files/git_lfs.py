"""Pointers of Git LFS: the lines of text that lie in place of a large file where git alone fetched it.

Format: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
"""

from __future__ import annotations

from pathlib import Path

from quantkit.errors import QuantkitError

POINTER = b"version https://git-lfs"


def is_pointer(head: bytes) -> bool:
    """Whether a file that begins like this is a pointer."""
    return head.startswith(POINTER)


def refuse_pointer(path: Path) -> None:
    """Raise QuantkitError for a pointer: the commonest broken download, and no damage of the file itself."""
    with open(path, "rb") as file:
        if not is_pointer(file.read(len(POINTER))):
            return
    raise QuantkitError(
        f"{path} is a Git LFS pointer, not the file it stands for",
        hint="fetch the file itself: git lfs pull in its folder, or hf download OWNER/NAME",
    )
