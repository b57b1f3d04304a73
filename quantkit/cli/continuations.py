"""Prints continuations: a single one while it is generated, several side by side with first differences."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quantkit.errors import count, printable
from quantkit.evaluation.generate import Continuation
from quantkit.evaluation.settings import GenerateSettings
from quantkit.tables import print_line

COLUMN = 34  # characters below which columns would be too narrow to read
MARKS = ("[", "]")  # around the first token that differs: it must be visible without colour


def stream(settings: GenerateSettings) -> Callable[[str], None]:
    """Print the prompt; return a function that prints generated text."""

    def write(text: str) -> None:
        sys.stdout.write(printable(text))
        sys.stdout.flush()

    write("" if settings.chat else settings.prompt)
    return write


def show(settings: GenerateSettings, made: Sequence[Continuation], streamed: bool = False) -> None:
    """Print the text of one model; or of several in columns, or one below the other on a narrow terminal."""
    console = Console(highlight=False, markup=False)
    if len(made) == 1:
        if not streamed:
            stream(settings)(made[0]["text"])
        sys.stdout.write("\n")
        return
    console.print(Text.assemble(("prompt  ", "bold"), printable(settings.prompt)), soft_wrap=True)
    if console.width >= COLUMN * len(made):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
        for continuation in made:
            table.add_column(name_of(continuation), ratio=1, overflow="fold")
        table.add_row(*map(_marked, made))
        console.print(table)
    else:
        for continuation in made:
            console.print(Text(f"\n{name_of(continuation)}", "bold"), soft_wrap=True)
            console.print(_marked(continuation))
        console.print()
    for continuation in made[1:]:
        print_line(console, f"{name_of(continuation)}: {_verdict(continuation, made[0])}")


def _marked(made: Continuation) -> Text:
    """Return the text, in which the first token that differs from the first model's is marked."""
    if made["parting"] is None:
        return Text(printable(made["text"]))
    start, end = made["parting"]["start"], made["parting"]["end"]
    text = printable(made["text"])
    token = f"{MARKS[0]}{text[start:end] or 'end'}{MARKS[1]}"
    return Text.assemble(text[:start], (token, "bold yellow"), text[end:])


def _verdict(made: Continuation, first: Continuation) -> str:
    parting = made["parting"]
    if not made["compared"]:
        return "not compared: another tokenizer"
    if parting is None:
        return f"the same {count(len(made['ids']), 'token')}"
    equal = count(parting["index"], "token")
    here = f"{parting['probability_of_expected']:.3f} here"
    there = f"{parting['probability_there']:.3f} in {name_of(first)}"
    return (
        f"{equal} equal, then {parting['token']!r} ({parting['probability']:.3f}) instead of "
        f"{parting['expected']!r} ({here}, {there})"
    )


def name_of(made: Continuation) -> str:
    """Return the last part of the model's path or hub id."""
    return Path(made["source"]).name or made["source"]


def show_speed(made: Sequence[Continuation], dtype: Any, device: Any) -> None:
    """Print seconds and tokens per second on stderr."""
    console = Console(stderr=True, highlight=False, markup=False)
    precision = str(dtype).removeprefix("torch.")
    for row in made:
        rate = len(row["ids"]) / max(row["seconds"], 1e-9)
        stopped = "at the end of the text" if row["stop"] == "end" else "by -n"
        print_line(
            console,
            f"{name_of(row)}: {len(row['ids'])} tokens in {row['seconds']:.1f} s ({rate:.1f} a second), "
            f"loaded in {row['load_seconds']:.1f} s, {precision} on {device}, stopped {stopped}",
        )
