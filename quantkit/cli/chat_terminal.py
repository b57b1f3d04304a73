"""A conversation on a terminal or through pipes: reads messages and commands, prints answers."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.cli import running, streams
from quantkit.errors import USAGE, QuantkitError, printable, require
from quantkit.serving.chat.session import Answer, ChatSession, Stream
from quantkit.tables import make_console, megabytes, print_line, size

PROMPT, MORE = "> ", "… "
BLOCK = '"""'
HELP = f"""/reset         start again; the system message stays
/system TEXT   set the system message; without TEXT remove it
/retry         give the last answer again, with the next seed
/save FILE     add the conversation to FILE, as --calibration reads it
/help          this
/exit, /quit   leave, as Ctrl-D does
{BLOCK}            begins and ends a message of several lines
//…            a message that begins with a slash
Ctrl-C         stops the answer; the text so far stays"""
STOPS = {"length": ", stopped by -n", "interrupted": ", interrupted"}  # other stops have a note or need none


class Terminal:
    """Input and output of a conversation. typed: whether stdin is a terminal."""

    def __init__(self, session: ChatSession, as_json: bool = False, quiet: bool = False):
        self.session, self.as_json, self.quiet = session, as_json, quiet
        self.typed = sys.stdin.isatty()
        self.console = make_console(stderr=True)
        self._edits = self.typed and sys.stdout.isatty() and not as_json
        if self._edits:
            with suppress(ImportError):  # some builds of Python have no readline
                import readline  # noqa: F401  (input() edits lines with it)

    def run(self) -> None:
        """Answer messages until the user leaves. Raises the first QuantkitError if stdin is no terminal."""
        self.tell("\n".join(self._introduction()))
        for line in self.messages():
            try:
                if not self.take(line):
                    return
            except QuantkitError as error:
                if not self.typed:
                    raise
                print_line(self.console, f"error: {error.message}", "red")
                if error.hint:
                    print_line(self.console, f"hint: {error.hint}")
        if self.typed:
            self.tell("")  # Ctrl-D leaves the prompt's line open

    def messages(self) -> Iterator[str]:
        """Yield messages and commands: single lines, or the lines between two lines of three quotes."""
        lines: list[str] = []  # lines of an open message
        while True:
            try:
                line = self.read(MORE if lines else PROMPT)
            except EOFError:
                break
            if not lines and not line.lstrip().startswith(BLOCK):
                yield line
                continue
            lines.append(line if lines else line.lstrip()[len(BLOCK) :])
            if lines[-1].rstrip().endswith(BLOCK):
                lines[-1] = lines[-1].rstrip()[: -len(BLOCK)]
                yield "\n".join(lines).strip("\n")
                lines = []
        if lines:
            yield "\n".join(lines).strip("\n")

    def read(self, prompt: str) -> str:
        """Return the next line. Raises EOFError at the end."""
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

    def take(self, line: str) -> bool:
        """Answer a message or run a command; return False if the user leaves."""
        session, (command, _, rest) = self.session, line.strip().partition(" ")
        if not line.startswith("/") or line.startswith("//"):
            text = line.removeprefix("/") if line.startswith("//") else line
            if command or session.raw:
                self._answer(text, partial(session.say, text))
        elif command in ("/exit", "/quit"):
            return False
        elif command == "/retry":
            self._answer(line, session.again)
        else:
            self.tell(self._obey(command, rest.strip()))
        return True

    def _obey(self, command: str, rest: str) -> str:
        """Run a command that needs no answer of the model; return the reply to the user.

        Raises QuantkitError for an unknown or incomplete command.
        """
        match command:
            case "/reset":
                self.session.messages.clear()
                return "started again"
            case "/system":
                raw = self.session.raw
                require(not raw, "raw text has no system message", "start without --raw", USAGE)
                self.session.system = rest
                return "the system message is set" if rest else "the system message is removed"
            case "/save":
                require(rest, "/save needs a file", "for example /save talk.jsonl", USAGE)
                self.session.save(Path(rest))
                return f"saved to {rest}"
            case "/help":
                return HELP
        raise QuantkitError(f"unknown command {command}", "/help lists all commands", USAGE)

    def _answer(self, line: str, generate: Callable[[Stream], Answer]) -> None:
        """Print an answer. On a terminal, the first SIGINT stops it and the second discards it."""

        def stop(number: int, frame: Any) -> None:
            self.session.stopped = True
            signal.signal(signal.SIGINT, signal.default_int_handler)

        try:
            with running.handled([signal.SIGINT] if self.typed else [], stop):
                answer = generate(self.write)
        except KeyboardInterrupt:
            if not self.typed:
                raise
            return self.tell("\nthe answer was dropped")
        record = self.session.record(line, answer)
        if self.as_json:
            print(json.dumps(record, ensure_ascii=False), flush=True)
        self.write("\n")
        for note in answer.notes:
            print_line(self.console, f"note: {note}", "yellow")
        for line in () if self.quiet else _cost(record):
            print_line(self.console, line, "dim", indent=9)

    def write(self, text: str) -> None:
        """Print a part of an answer."""
        if not self.as_json:
            sys.stdout.write(printable(text))
            sys.stdout.flush()

    def tell(self, text: str) -> None:
        """Print a text that is not part of an answer, on stderr."""
        for line in () if self.quiet else text.split("\n"):
            print_line(self.console, line, "dim")

    def _introduction(self) -> list[str]:
        """Return the lines to print first: about the model, its sampling and, on a terminal, commands."""
        engine, sampling = self.session.engine, self.session.sampling
        facts = engine.facts
        chosen = "the likeliest token"
        if sampling.temperature:
            cuts = [f"temperature {sampling.temperature:g}"]
            cuts += [f"top-k {sampling.top_k}"] if sampling.top_k else []
            cuts += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
            chosen = f"{', '.join(cuts)}, seed {sampling.seed}"
        return [
            f"{engine.source}: {engine.name}, {facts.kernels}, {facts.dtype} on {facts.device}, "
            f"{engine.context:,} tokens of context; {chosen}",
            *([f"note: {facts.note}"] if facts.note else []),
            *(["/help lists commands; Ctrl-C stops an answer, Ctrl-D leaves"] if self.typed else []),
        ]


def _cost(record: dict[str, Any]) -> list[str]:
    """Return two lines with tokens, speed and memory of an answer."""
    tokens, rates, memory = record["tokens"], record["tokens_per_second"], record["memory_bytes"]
    decode = "" if rates["decode"] is None else f" {rates['decode']:,.1f}/s"
    cache = "?" if memory["kv_cache"] is None else size(memory["kv_cache"])
    return [
        f"tokens   {tokens['prefilled']:,} prefilled {rates['prefill']:,.1f}/s "
        f"({tokens['cached']:,} cached), {tokens['generated']:,} generated{decode}, "
        f"{tokens['prompt'] + tokens['generated']:,} of {record['model']['context']:,}"
        f"{STOPS.get(record['stop'], '')}",
        f"memory   weights {megabytes(memory['weights'])}, KV cache {cache}, "
        f"process {megabytes(memory['process'])}",
    ]
