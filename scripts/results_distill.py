"""Regenerate the table of docs/distill.md: what compressed students learn from their teacher.

    python scripts/results_distill.py [MODEL] [--text TEXT] [--ctx 256] [--limit 40960] [--work DIR] [--write]

MODEL (the bundled demo model unless given) is compressed at default options, each student distilled on 128
sequences of 256 tokens of the shipped text, and both are measured against MODEL on TEXT, which neither has
seen. What lies in DIR is not made again, so the script can be stopped and started. Fails if a student
became larger, or not as much better as STUDENTS says. Smaller students: results_distill_smaller.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from client_runs import ROOT, quantkit, write_section

DOCUMENT = ROOT / "docs" / "distill.md"
TEXT = ["--samples", "128", "--seqlen", "256"]


@dataclass(frozen=True)
class Student:
    """command: that makes it; suffix: of a file; share: of its KL divergence that may be left, at most."""

    command: tuple[str, ...]
    suffix: str = ""
    share: float = 1.0
    options: tuple[str, ...] = field(default=())


STUDENTS = {
    "gptq 4 bit": Student(("gptq",), share=0.96),
    "gptq 3 bit": Student(("gptq", "--bits", "3"), share=0.91),
    "gptq 2 bit": Student(("gptq", "--bits", "2"), share=0.75),
    "nf4": Student(("nf4",), share=1.0),
    "Q4_K_M": Student(("gguf", "-t", "Q4_K_M"), ".gguf", share=1.0),
    "Q3_K_M": Student(("gguf", "-t", "Q3_K_M"), ".gguf", share=0.985),
}


def distill(model: str, folder: Path, name: str, student: Student) -> tuple[Path, Path, dict]:
    """The student, what it became, and the record of that."""
    stem = name.replace(" ", "-")
    made, out = folder / f"{stem}{student.suffix}", folder / f"{stem}-distilled{student.suffix}"
    record = folder / f"{stem}.json"
    if not made.exists():
        quantkit(*student.command, model, "-o", str(made), "--overwrite")
    if not out.exists() or not record.exists():
        resume = "--resume" if Path(f"{out}.partial").exists() else "--overwrite"
        asked = [model, str(made), "-o", str(out), *TEXT, *student.options, resume]
        began = time.monotonic()
        found = json.loads(quantkit("distill", *asked, "--json"))
        record.write_text(json.dumps(found | {"minutes": (time.monotonic() - began) / 60}))
        print(f"{name} done", file=sys.stderr)
    return made, out, json.loads(record.read_text())


def measure(model: str, files: list[Path], args: argparse.Namespace) -> list[dict]:
    """What `quantkit eval` says of every file."""
    limits = ["--text", str(args.text), "--ctx", str(args.ctx), "--limit", str(args.limit)]
    told = quantkit("eval", model, *map(str, files), *limits, "--metrics", "kld", "--json")
    return json.loads(told)["models"][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(ROOT / "tests/data/demo-llama-6m"))
    parser.add_argument("--text", type=Path, default=ROOT / "tests/data/heldout.txt")
    parser.add_argument("--ctx", type=int, default=256)
    parser.add_argument("--limit", type=int, default=40960)
    parser.add_argument("--work", type=Path, help="keep what is made there")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.name}")
    args = parser.parse_args()
    lines = [
        "| student | size | KL divergence | distilled | | held out, by blocks, then end to end |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    failures = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name, student in STUDENTS.items():
            made, out, record = distill(args.model, folder, name, student)
            before, after = measure(args.model, [made, out], args)
            size, grown = (model["size"]["weight_bytes"] for model in (before, after))
            kld, left = (model["metrics"]["kld"]["mean"] for model in (before, after))
            stages = " → ".join(
                f"{stage['after' if stage['kept'] else 'before']:.5f}" for stage in record["stages"]
            )
            lines.append(
                f"| {name} | {size / 1e6:.2f} MB | {kld:.5f} | {left:.5f} | {left / kld - 1:+.1%} "
                f"| {record['before']:.5f} → {stages} |"
            )
            if grown != size or not left <= student.share * kld:
                failures.append(f"{name}: {left:.5f} of {kld:.5f}, {grown} bytes of {size}")
    text = "\n".join(lines) + "\n"
    write_section("distilled", text, DOCUMENT) if args.write else print(text)
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
