"""A conversation on a terminal or through pipes: reads lines, prints answers, handles Ctrl-C."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rich.console import Console

from quantkit.cli import streams
from quantkit.errors import QuantkitError, printable
from quantkit.serving.chat import commands
from quantkit.serving.chat.session import Answer, ChatSession
from quantkit.tables import megabytes, print_line, size

PROMPT, MORE = "> ", "… "
STOPS = {"length": ", stopped by -n", "interrupted": ", interrupted"}  # other stops have a note or need none


class Terminal:
    """Input and output of a conversation. typed: whether stdin is a terminal."""

    def __init__(self, as_json: bool = False, quiet: bool = False):
        self.as_json, self.quiet = as_json, quiet
        self.typed = sys.stdin.isatty()
        self.console = Console(stderr=True, highlight=False, markup=False)
        self._edits = self.typed and sys.stdout.isatty() and not as_json
        if self._edits:
            with suppress(ImportError):  # Windows has no readline: its console edits lines
                import readline  # noqa: F401  (input() edits lines with it)

    def read(self, more: bool = False) -> str:
        """Return the next line. more: a message continues. Raises EOFError at the end."""
        prompt = MORE if more else PROMPT
        while True:
            try:
                if self._edits:
                    return streams.decoded(input(prompt), "stdin")
                if self.typed:
                    print(prompt, end="", file=sys.stderr, flush=True)
                if not (line := sys.stdin.readline()):
                    raise EOFError
                return streams.decoded(line.rstrip("\n"), "stdin")
            except KeyboardInterrupt:
                if not self.typed:
                    raise
                self.tell("\nCtrl-D or /exit leaves")

    def write(self, text: str) -> None:
        """Print a part of an answer."""
        if not self.as_json:
            sys.stdout.write(printable(text))
            sys.stdout.flush()

    def tell(self, text: str) -> None:
        """Print a text that is not part of an answer, on stderr."""
        for line in () if self.quiet else text.split("\n"):
            self.console.print(printable(line), style="dim", markup=False, soft_wrap=True)

    def finish(self, session: ChatSession, line: str, made: Answer) -> None:
        """End an answer: print its notes and its cost, or with --json its record."""
        if self.as_json:
            print(json.dumps(session.record(line, made), ensure_ascii=False), flush=True)
        self.write("\n")
        for note in made.notes:
            print_line(self.console, f"note: {note}", "yellow")
        for line in () if self.quiet else cost(session, made):
            print_line(self.console, line, "dim", indent=9)


def run(session: ChatSession, terminal: Terminal) -> None:
    """Answer messages until the user leaves. Raises the first QuantkitError if stdin is not a terminal."""
    for line in introduction(session, terminal.typed) if not terminal.quiet else ():
        print_line(terminal.console, line, "dim")
    for line in commands.messages(terminal.read):
        try:
            if not take(session, terminal, line):
                return
        except QuantkitError as error:
            if not terminal.typed:
                raise
            print_line(terminal.console, f"error: {error.message}", "red")
            if error.hint:
                print_line(terminal.console, f"hint: {error.hint}")
    if terminal.typed:
        terminal.tell("")  # Ctrl-D leaves the prompt's line open


def take(session: ChatSession, terminal: Terminal, line: str) -> bool:
    """Answer a message or run a command; return False if the user leaves."""
    name = line.strip()
    if name in ("/exit", "/quit"):
        return False
    if name == "/retry":
        _turn(session, terminal, line, session.again)
    elif commands.is_command(line):
        terminal.tell(commands.obey(line, session))
    elif name or session.conversation.raw:
        line = line.removeprefix("/") if line.startswith("//") else line
        _turn(session, terminal, line, lambda stream: session.say(line, stream))
    return True


def _turn(
    session: ChatSession, terminal: Terminal, line: str, answer: Callable[[Callable[[str], None]], Answer]
) -> None:
    """Print an answer. On a terminal, the first SIGINT stops it and the second discards it."""
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: Any) -> None:
        session.stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if terminal.typed and before not in (signal.SIG_IGN, None):  # unless SIGINT is ignored
        signal.signal(signal.SIGINT, stop)
    try:
        made = answer(terminal.write)
    except KeyboardInterrupt:
        if not terminal.typed:
            raise
        terminal.tell("\nthe answer was dropped")
    else:
        terminal.finish(session, line, made)
    finally:
        signal.signal(signal.SIGINT, before)


def introduction(session: ChatSession, typed: bool) -> list[str]:
    """Return the lines to print first: about the model, its sampling and, if `typed`, commands."""
    facts, sampling = session.engine.model, session.sampling
    chosen = "the likeliest token"
    if sampling.temperature:
        cuts = [f"temperature {sampling.temperature:g}"]
        cuts += [f"top-k {sampling.top_k}"] if sampling.top_k else []
        cuts += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
        chosen = f"{', '.join(cuts)}, seed {sampling.seed}"
    return [
        f"{facts.source}: {facts.engine}, {facts.kernels}, {facts.dtype} on {facts.device}, "
        f"{facts.context:,} tokens of context; {chosen}",
        *(f"note: {note}" for note in facts.notes),
        *(["/help lists commands; Ctrl-C stops an answer, Ctrl-D leaves"] if typed else []),
    ]


def cost(session: ChatSession, made: Answer) -> list[str]:
    """Return two lines with tokens, speed and memory of an answer."""
    rate = f" {made.decode_rate:,.1f}/s" if made.decode_rate is not None else ""
    context = session.engine.model.context
    memory = session.memory(made)
    cache = "?" if memory["kv_cache"] is None else size(memory["kv_cache"])
    return [
        f"tokens   {made.prefilled_tokens:,} prefilled {made.prefill_rate:,.1f}/s "
        f"({made.cached_tokens:,} cached), {made.generated_tokens:,} generated{rate}, "
        f"{made.used:,} of {context:,}{STOPS.get(made.stop, '')}",
        f"memory   weights {megabytes(memory['weights'])}, KV cache {cache}, "
        f"process {megabytes(memory['process'])}",
    ]
