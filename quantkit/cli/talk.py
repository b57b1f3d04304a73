"""A conversation on a terminal, or from a pipe: what is read, what is printed, what Ctrl-C does."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from quantkit.cli import streams
from quantkit.errors import QuantkitError, count, printable
from quantkit.serving.chat import commands
from quantkit.serving.chat.session import Answer, Session
from quantkit.tables import megabytes, print_line, size

PROMPT, MORE = "> ", "… "
STOPS = {"length": ", stopped by -n", "interrupted": ", interrupted"}  # the others are said, or usual


class Terminal:
    """Where a conversation is read from and printed to. A person types where stdin is a terminal."""

    def __init__(self, as_json: bool = False, quiet: bool = False):
        self.as_json, self.quiet = as_json, quiet
        self.typed = sys.stdin.isatty()
        self.console = Console(stderr=True, highlight=False, markup=False)
        if self.typed and sys.stdout.isatty():
            try:
                import readline  # noqa: F401  (input() edits lines with it)
            except ImportError:  # there is none on Windows, which edits by itself
                pass

    def read(self, more: bool = False) -> str:
        """The next line. Raises EOFError at the end."""
        while True:
            try:
                return streams.decoded(self._line(MORE if more else PROMPT), "stdin")
            except KeyboardInterrupt:
                if not self.typed:
                    raise
                self.tell("\nCtrl-D or /exit leaves")

    def _line(self, prompt: str) -> str:
        if self.typed and sys.stdout.isatty() and not self.as_json:
            return input(prompt)
        if self.typed:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def write(self, text: str) -> None:
        """A part of an answer, as it comes."""
        if not self.as_json:
            sys.stdout.write(printable(text))
            sys.stdout.flush()

    def tell(self, text: str) -> None:
        """What is no answer."""
        if not self.quiet:
            for line in text.split("\n"):
                self.console.print(printable(line), style="dim", markup=False, soft_wrap=True)

    def fail(self, error: QuantkitError) -> None:
        """An error that a person can go on after; anything else has to stop."""
        if not self.typed:
            raise error
        print_line(self.console, f"error: {error.message}", "red")
        if error.hint:
            print_line(self.console, f"hint: {error.hint}")

    def finish(self, session: Session, said: str, made: Answer) -> None:
        """The answer is complete."""
        if self.as_json:
            print(json.dumps(session.record(said, made), ensure_ascii=False), flush=True)
        else:
            sys.stdout.write("\n")
            sys.stdout.flush()
        for note in made.notes:
            print_line(self.console, f"note: {note}", "yellow")
        if not self.quiet:
            for line in cost(session, made):
                print_line(self.console, line, "dim", indent=9)


def run(session: Session, terminal: Terminal) -> None:
    """Talk until the user leaves."""
    for line in introduction(session, terminal.typed) if not terminal.quiet else ():
        print_line(terminal.console, line, "dim")
    for said in commands.messages(terminal.read):
        try:
            if not take(session, terminal, said):
                return
        except QuantkitError as error:
            terminal.fail(error)
    if terminal.typed:
        terminal.tell("")  # Ctrl-D leaves the prompt's line open


def take(session: Session, terminal: Terminal, said: str) -> bool:
    """Answer or obey; False where the user leaves."""
    if commands.is_command(said):
        try:
            terminal.tell(commands.obey(said, session))
        except commands.Leave:
            return False
        except commands.Again:
            _turn(session, terminal, said, session.again)
        return True
    if not said.strip() and not session.conversation.raw:
        return True
    said = said.removeprefix("/") if said.startswith("//") else said
    _turn(session, terminal, said, lambda stream: session.say(said, stream))
    return True


def _turn(
    session: Session, terminal: Terminal, said: str, answer: Callable[[Callable[[str], None]], Answer]
) -> None:
    stops = Stops(session.stop)
    try:
        with stops.listening(terminal.typed):
            made = answer(terminal.write)
    except BaseException:
        if stops.asked < 2:  # libraries turn some interrupts into other exceptions
            raise
        terminal.tell("\nthe answer was dropped")
    else:
        terminal.finish(session, said, made)


class Stops:
    """What SIGINT does while an answer is given: the first asks it to stop, the second interrupts."""

    def __init__(self, stop: Callable[[], None]):
        self._stop = stop
        self.asked = 0

    def __call__(self, number: int, frame: Any) -> None:
        """The handler."""
        self.asked += 1
        self._stop()
        if self.asked > 1:
            raise KeyboardInterrupt

    @contextmanager
    def listening(self, typed: bool) -> Iterator[None]:
        """Where a person types, and nobody wants SIGINT to be ignored."""
        before = signal.getsignal(signal.SIGINT)
        if not typed or before in (signal.SIG_IGN, None):
            yield
            return
        signal.signal(signal.SIGINT, self)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def introduction(session: Session, typed: bool) -> list[str]:
    """What runs, and how it chooses."""
    facts, sampling = session.engine.facts, session.sampling
    chosen = "the likeliest token, always"
    if sampling.temperature:
        cuts = [f"temperature {sampling.temperature:g}"]
        cuts += [f"top-k {sampling.top_k}"] if sampling.top_k else []
        cuts += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
        chosen = f"{', '.join(cuts)}, seed {sampling.seed}"
    return [
        f"{facts.source}: {facts.engine}, {facts.kernels}, {facts.dtype} on {facts.device}, "
        f"{facts.context:,} tokens of context; {chosen}",
        *(f"note: {note}" for note in facts.notes),
        *([f"{count(len(held), 'message')} loaded"] if (held := session.conversation.messages) else []),
        *(["/help lists commands; Ctrl-C stops an answer, Ctrl-D leaves"] if typed else []),
    ]


def cost(session: Session, made: Answer) -> list[str]:
    """Tokens, speed and memory of a turn, in two lines."""
    rate = f" {made.decode_rate:,.1f}/s" if made.decode_rate is not None else ""
    context = session.engine.facts.context
    memory = session.memory(made)
    cache = "?" if memory["kv_cache"] is None else size(memory["kv_cache"])
    return [
        f"tokens   {made.prefilled_tokens:,} prefilled {made.prefill_rate:,.1f}/s "
        f"({made.cached_tokens:,} cached), {made.generated_tokens:,} generated{rate}, "
        f"{made.used:,} of {context:,}{STOPS.get(made.stop, '')}",
        f"memory   weights {megabytes(memory['weights'])}, KV cache {cache}, "
        f"process {megabytes(memory['process'])}",
    ]
