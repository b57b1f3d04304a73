"""What a smaller student gains: the table of docs/distill-smaller.md, on a book that nobody was trained on.

    python scripts/results_distill_smaller.py --text frankenstein.txt --more train.txt.xz

All are trained for as many steps: three passes over the shipped text, or one over --samples sequences of
other text. Each row is a job of `quantkit distill` as a person would run it; `last` drops the last blocks
instead of the least missed. --more: other text to train on, of which the head is taken; UTF-8 or .xz, NUL
parts documents.
"""

from __future__ import annotations

import argparse
import lzma
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from quantkit.distillation.job import Request
from quantkit.distillation.options import SmallerOptions as Options
from quantkit.distillation.smaller import blocks, job
from quantkit.evaluation import windows
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.quantize.progress import Progress
from quantkit.text.calibration import MOST_HELD_OUT

MODEL = Path(__file__).parents[1] / "tests" / "data" / "demo-llama-6m"
SEQLEN = 256
TOKENS = 40960  # of the text to measure on, as in the README
BYTES_PER_TOKEN = 4  # more than enough text for the sequences that are asked for

LOSSES = {  # beside the default, what each part of it is worth
    "the divergence alone, temperature 1": {"temperature": 1.0, "hidden_weight": 0.0},
    "the divergence alone, temperature 2": {"hidden_weight": 0.0},
    "temperature 1": {"temperature": 1.0},
    "with the text's next token": {"lm_weight": 0.3},
}


class Told(Progress):
    """Warnings and stages, on stderr."""

    def phase(self, text: str) -> None:
        print(f"  {text}", file=sys.stderr)

    warn = phase


def head(path: Path, samples: int, folder: Path) -> str:
    """A text file with the head of another, enough for so many sequences."""
    opened = lzma.open(path) if path.suffix == ".xz" else open(path, "rb")
    with opened as file:
        text = file.read(samples * SEQLEN * BYTES_PER_TOKEN).decode(errors="ignore")
    place = folder / f"{path.name.partition('.')[0]}-{samples}.txt"
    place.write_text(text.replace("\0", "\n\n"))
    return str(place)


def rows(
    more: Path | None, samples: int, folder: Path
) -> dict[str, tuple[Options, CalibrationOptions, bool]]:
    """Name -> options, text, and whether the last blocks go instead of the least missed."""
    shipped = CalibrationOptions(samples=10_000, seqlen=SEQLEN)
    found = {
        "4 blocks": (Options(blocks=4), shipped, False),
        "4 blocks, the last dropped": (Options(blocks=4), shipped, True),
        "5 blocks": (Options(blocks=5), shipped, False),
        "half the width": (Options(width="50%"), shipped, False),
        "4 blocks, text of its own": (
            Options(blocks=4, self_text=True, epochs=1),
            CalibrationOptions(samples=samples, seqlen=SEQLEN),
            False,
        ),
    }
    for name, change in LOSSES.items():
        found[f"loss: {name}"] = Options(blocks=4, **change), shipped, False
    if more:
        enough = samples + MOST_HELD_OUT  # which are held out
        text = CalibrationOptions(calibration=head(more, enough, folder), samples=enough, seqlen=SEQLEN)
        found["4 blocks, more text"] = Options(blocks=4, epochs=1), text, False
    return found


def main() -> None:
    """Print a line of Markdown for each student as cut and as trained."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="to measure on")
    parser.add_argument("--more", type=Path, help="to train on, beside the shipped text")
    parser.add_argument("--samples", type=int, default=840, help="sequences of more text, and of its own")
    parser.add_argument("--only", help="rows whose name has this in it")
    args = parser.parse_args()
    print("| student | parameters | size | perplexity | KL divergence | top-1 | seconds |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        for name, (options, text, last) in rows(args.more, args.samples, Path(folder)).items():
            if args.only and args.only not in name:
                continue
            request = Request(
                str(MODEL),
                None,
                options,
                text,
                RunOptions(dtype="float32"),
                Path(folder) / name.replace(" ", "-"),
            )
            keep = tuple(range(options.blocks or 6))
            naive = patch.object(blocks, "choose", lambda *_, keep=keep: (keep, []))
            with naive if last else nullcontext():
                prepared = job.prepare(request, Told())
                text = windows.load(prepared.source, args.text, SEQLEN, None, TOKENS)
                made = replace(prepared, evaluated=text).run(Told())
            show(name, made)


def show(name: str, made: dict) -> None:
    """The rows of one student."""
    chosen = " ".join(map(str, made["chosen"]["blocks"]))
    print(
        f"<!-- {name}: blocks {chosen}, published {made['published']}, curve {made['trained']['curve']} -->"
    )
    seconds = sum(made["seconds"].values())
    for model, how in zip(made["eval"]["models"][1:], ("as cut", "trained"), strict=True):
        found = model["metrics"]
        cells = [
            f"{name}, {how}",
            f"{made['student']['parameters']:,}",
            f"{model['size']['weight_bytes'] / 1e6:.2f} MB",
            f"{found['ppl']['value']:.2f}",
            f"{found['kld']['mean']:.4f}",
            f"{100 * found['top1']:.1f} %",
            f"{seconds:.0f}" if how == "trained" else "",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
