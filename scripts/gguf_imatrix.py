"""Read importance matrices with quantkit and with llama-quantize's own loader, and compare.

    python scripts/gguf_imatrix.py LIBRARIES [FILE ...]

LIBRARIES as in `gguf_mixtures.py`. Without FILEs, random ones of both kinds are made. What must be equal:
sums, counts, datasets, chunks, and the values that llama-quantize derives from them.
"""

from __future__ import annotations

import argparse
import struct
import tempfile
from pathlib import Path

import numpy as np
import torch
from llamacpp_library import Library

from quantkit.models.gguf import imatrix

SIZES = {
    f"blk.{block}.{name}.weight": 64 << k for block in range(12) for k, name in enumerate(("a", "b", "c"))
}


def make(folder: Path) -> list[Path]:
    """A file as quantkit writes it, and a legacy one."""
    generator = torch.Generator().manual_seed(0)
    sums = {name: torch.rand(size, generator=generator) * 1e4 for name, size in SIZES.items()}
    counts = {name: torch.tensor([float(k)]) for k, name in enumerate(SIZES)}  # one of them without tokens
    imatrix.write(folder / "new.gguf", imatrix.Imatrix(sums, counts, ("one.txt", "two.txt"), 35, 512))
    with open(folder / "old.dat", "wb") as file:
        file.write(struct.pack("<i", len(sums)))
        for name, values in sums.items():
            file.write(struct.pack(f"<i{len(name)}sii", len(name), name.encode(), 3, len(values)))
            file.write(values.numpy().tobytes())
        file.write(struct.pack("<ii7s", 35, 7, b"one.txt"))
    return [folder / "new.gguf", folder / "old.dat"]


def differences(library: Library, path: Path) -> list[str]:
    """Names of what the two readers do not agree on."""
    ours, theirs = imatrix.read(path), library.load_imatrix(path)
    values = ours.values()
    said = ("datasets", "chunk_count", "chunk_size")
    found = [key for key in said if getattr(ours, key) != getattr(theirs, key)]
    found += sorted(ours.sums.keys() ^ theirs.entries.keys())
    for name in ours.sums.keys() & theirs.entries.keys():
        sums, counts = theirs.entries[name]
        with np.errstate(divide="ignore"):
            means = sums.reshape(len(counts), -1) / counts[:, None].astype(np.float32)
        means = np.where(counts[:, None] > 0, means, np.float32(1))
        pairs = (sums, ours.sums[name]), (counts, ours.counts[name]), (means, values[name])
        if not all(np.array_equal(a.ravel(), b.numpy().ravel()) for a, b in pairs):
            found.append(name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("libraries", type=Path)
    parser.add_argument("files", type=Path, nargs="*")
    arguments = parser.parse_args()
    library = Library(arguments.libraries)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for path in arguments.files or make(Path(folder)):
            found = differences(library, path)
            failed |= bool(found)
            print(f"{path.name}: {len(imatrix.read(path).sums)} matrices,", ", ".join(found) or "the same")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
