"""Continue a prompt with one or several models, side by side.

Examples:
  quantkit generate ./model-gptq-w4g128 -p "Once upon a time"
  quantkit generate ./model ./model-nf4 ./model-gptq-w4g128 -p "The sea"     # side by side
  quantkit generate org/chat-model -p "What is a Hessian?" --chat -n 200
  echo "The sea" | quantkit generate ./model -p - --json
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from quantkit.cli import flags, streams
from quantkit.errors import count, printable
from quantkit.evaluation.settings import GenerateSettings
from quantkit.tables import make_console, print_line

COLUMN = 34  # characters below which columns would be too narrow to read
MARKS = ("[", "]")  # around the first token that differs: it must be visible without colour
Continuation = dict[str, Any]  # as JSON, see `generate.continue_prompt`
OPTIONS = ("prompt", "tokens", "chat", "temperature", "top_k", "top_p", "seed")


@flags.command(
    *flags.of("options", GenerateSettings, OPTIONS),
    shared=("dtype", "device", "threads", *flags.OPENING),
    helps=flags.FIRST_REVISION,
)
def command(models: flags.MODELS, **values: Any) -> None:
    settings = flags.options(GenerateSettings, values)
    if settings.prompt == "-":
        settings = replace(settings, prompt=streams.decoded(sys.stdin.read(), "stdin").rstrip("\n"))
    settings.check()
    as_json, quiet = values["as_json"], values["quiet"]
    live = len(models) == 1 and not as_json and sys.stdout.isatty()
    made: list[Any] = []
    with streams.listener(quiet or live) as progress:
        from quantkit.evaluation import generate
        from quantkit.models.files.open import open_checkpoint
        from quantkit.models.machine.device import choose_device

        opened = values["offline"], values["trust_remote_code"]
        checkpoints = [
            open_checkpoint(model, None if position else values["revision"], *opened)
            for position, model in enumerate(models)
        ]
        device = choose_device(values["device"])
        precision = generate.shared_dtype(values["dtype"], checkpoints[0], device)
        comparable = generate.comparable(checkpoints, settings, progress.warn)
        for checkpoint, same in zip(checkpoints, comparable, strict=True):
            progress.phase(f"loading and running {checkpoint.source}")
            first = made[0] if made and same else None
            stream = _printing(settings) if live else None
            made.append(generate.continue_prompt(checkpoint, settings, precision, device, first, stream))
    record = generate.record(settings, precision, device, made)
    streams.present(record, as_json, lambda: _show(settings, made, live))
    if not as_json and not quiet:
        _show_speed(made, precision, device)


def _printing(settings: GenerateSettings) -> Callable[[str], None]:
    """Print the prompt; return a function that prints generated text."""

    def write(text: str) -> None:
        sys.stdout.write(printable(text))
        sys.stdout.flush()

    write("" if settings.chat else settings.prompt)
    return write


def _show(settings: GenerateSettings, made: Sequence[Continuation], streamed: bool) -> None:
    """Print the text of one model; or of several in columns, or one below the other on a narrow terminal."""
    console = make_console()
    if len(made) == 1:
        if not streamed:
            _printing(settings)(made[0]["text"])
        sys.stdout.write("\n")
        return
    console.print(Text.assemble(("prompt  ", "bold"), printable(settings.prompt)), soft_wrap=True)
    if console.width >= COLUMN * len(made):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
        for continuation in made:
            table.add_column(_name(continuation), ratio=1, overflow="fold")
        table.add_row(*map(_marked, made))
        console.print(table)
    else:
        for continuation in made:
            console.print(Text(f"\n{_name(continuation)}", "bold"), soft_wrap=True)
            console.print(_marked(continuation))
        console.print()
    for continuation in made[1:]:
        print_line(console, f"{_name(continuation)}: {_verdict(continuation, made[0])}")


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
    there = f"{parting['probability_there']:.3f} in {_name(first)}"
    return (
        f"{equal} equal, then {parting['token']!r} ({parting['probability']:.3f}) instead of "
        f"{parting['expected']!r} ({here}, {there})"
    )


def _name(made: Continuation) -> str:
    """Return the last part of the model's path or hub id."""
    return Path(made["source"]).name or made["source"]


def _show_speed(made: Sequence[Continuation], dtype: Any, device: Any) -> None:
    """Print seconds and tokens per second on stderr."""
    console = make_console(stderr=True)
    precision = str(dtype).removeprefix("torch.")
    for row in made:
        rate = len(row["ids"]) / max(row["seconds"], 1e-9)
        stopped = "at the end of the text" if row["stop"] == "end" else "by -n"
        print_line(
            console,
            f"{_name(row)}: {len(row['ids'])} tokens in {row['seconds']:.1f} s ({rate:.1f} a second), "
            f"loaded in {row['load_seconds']:.1f} s, {precision} on {device}, stopped {stopped}",
        )
