"""Regenerate the tables of loss in the pages, each from a protocol of its own.

    python scripts/results.py PART [MODEL ...] [--text TEXT] [--ctx 256] [--limit N] [--write]

methods: every method at default options; then the same for a twin with outlier channels.
gguf: error feedback against llama-quantize in the same bytes, as decoded and as llama.cpp computes, whose
    kernels round activations; `--i-quants`: the types of 2 and 3 bits.
experts: a mixture by `--experts` choice, by ever fewer calibration tokens, and as GGUF files.
auto: what `quantkit auto` finds, against uniform presets of the same bytes and against llama-quantize.
distill: compressed students before and after 128 sequences of their teacher.

MODEL is the bundled demo model unless given, TEXT is text on which nothing was trained or chosen. `--keep
FOLDER` keeps all outputs, and an interrupted run goes on from there. Exit code 1 where a table does not show
the claims in scripts/loss. gguf and experts need the xllamacpp package.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from common import DEMO, HELDOUT, ROOT
from loss import auto, distill, experts, gguf, methods

PARTS = {  # name -> function, defaults of its flags
    "methods": (methods.run, {}),
    "gguf": (gguf.run, {"limit": 10240}),
    "experts": (experts.run, {"models": [str(ROOT / "tests/data/demo-moe-8m")]}),
    "auto": (auto.run, {"limit": 10240, "samples": 128}),
    "distill": (distill.run, {"limit": 40960, "samples": 128}),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("part", choices=PARTS)
    add("models", nargs="*", metavar="MODEL")
    add("--text", type=Path, default=HELDOUT, help="to measure on")
    add("--ctx", type=int, default=256)
    add("--limit", type=int, help="tokens of the text")
    add("--samples", type=int, help="sequences of calibration or training text")
    add("--only", default="", help="rows that contain this, or one engine of auto")
    add("--keep", type=Path, help="folder for outputs")
    add("--write", action="store_true", help="put the tables where they belong")
    add("--i-quants", action="store_true", help="of gguf: the types of 2 and 3 bits")
    add("--search-tokens", type=int, default=4096, help="of auto")
    args = parser.parse_args()
    run, defaults = PARTS[args.part]
    for name, value in ({"models": [str(DEMO)]} | defaults).items():
        setattr(args, name, getattr(args, name) or value)
    args.models = [str(Path(model).absolute()) for model in args.models]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        missed = run(args, folder)
    if missed:
        sys.exit(f"error: not as claimed: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
