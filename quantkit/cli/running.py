"""Errors, exit codes and interrupts of all commands."""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from quantkit.cli import ranks, streams
from quantkit.errors import (
    EXIT_CODES,
    INTERRUPTED,
    RESOURCES,
    TERMINATED,
    USAGE,
    QuantkitError,
    did_you_mean,
    first_line,
    full_disk,
    memory_ran_out,
    nearest,
    printable,
)

if TYPE_CHECKING:
    from quantkit.quantize.staging.folder import Staging

REPORT = "this is a bug: please report it with the lines above and the output of `quantkit doctor`"
UsageError = typer.BadParameter.__base__  # click's class, or its copy in newer Typers
CLOSED_PIPE = 141  # exit code of a program ended by SIGPIPE
STOPS = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: TERMINATED,
}  # signals that stop a job, and their exit codes
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}  # by pydantic's error
SIMILAR = 0.75  # least similarity of a name and its misspelling


def decoded(value: Any) -> Any:
    """Return an option's value, lists as tuples, with text decoded as UTF-8 in any locale; existing paths
    stay unchanged. A shell leaves the ~ of `--output=~/x` to the program."""
    if isinstance(value, (list, tuple)):
        return tuple(map(decoded, value))
    if isinstance(value, Path):
        return Path(os.path.expanduser(value))
    if not isinstance(value, str) or value.isascii() or os.path.lexists(value):
        return value
    return streams.decoded(value, repr(value))


def exit_codes() -> str:
    """Return one line that lists all exit codes, for the help."""
    return "Exit codes: " + ", ".join(f"{code} {words}" for code, words in EXIT_CODES.items()) + "."


def run(app: typer.Typer) -> NoReturn:
    """Run the command line and exit; every error is printed as `error:` and `hint:` on stderr."""
    streams.prepare()
    state = SimpleNamespace(verbose=False)
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # quantkit prints the error of failed retries
    try:  # standalone, Typer would print the parser's errors its own way
        with handled([signal.SIGTERM], _terminate):
            code = app(prog_name="quantkit", standalone_mode=False, obj=state)
        sys.stdout.flush()
    except _Terminated:
        _fail(QuantkitError(EXIT_CODES[TERMINATED], f"begin again with: {ranks.typed()}", TERMINATED))
    except QuantkitError as error:
        _fail(error, error if state.verbose else None)
    except UsageError as error:
        if not error.format_message():  # no arguments: the help was printed
            sys.exit(error.exit_code)
        _fail(_parser_error(error))
    except (BrokenPipeError, SystemExit) as error:
        # the reader of stdout ended, which is no error; Rich exits after a BrokenPipeError
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        _give_up_unread()
        ranks.end(CLOSED_PIPE)
        sys.exit(CLOSED_PIPE)
    except Exception as error:
        failed = _unexpected(error)
        _fail(failed, error if state.verbose or failed.hint == REPORT else None)
    if code == INTERRUPTED:  # Typer turns KeyboardInterrupt into this code
        _fail(QuantkitError("interrupted", f"begin again with: {ranks.typed()}", INTERRUPTED))
    ranks.end(code or 0)
    sys.exit(code)


class _Terminated(SystemExit):
    """Raised by SIGTERM in commands without a handler of their own; no handler of interrupts catches it."""


def _terminate(number: int, frame: Any) -> NoReturn:
    raise _Terminated(TERMINATED)


@functools.cache
def _release_forks() -> None:
    """Let SIGTERM end forked processes, in spite of a handler of this module: multiprocessing stops its
    workers with SIGTERM. The signal is blocked while a process starts, because Python drops earlier
    signals."""

    def reset() -> None:
        if getattr(signal.getsignal(signal.SIGTERM), "__module__", "") == __name__:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        mask(signal.SIG_UNBLOCK)

    def mask(how: int) -> None:
        signal.pthread_sigmask(how, {signal.SIGTERM})

    block, unblock = functools.partial(mask, signal.SIG_BLOCK), functools.partial(mask, signal.SIG_UNBLOCK)
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=reset)


@contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle signals during the context. Ignored signals stay ignored: shells make background jobs ignore
    SIGINT."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        _release_forks()
    before = {number: signal.getsignal(number) for number in numbers}
    handled = [number for number, old in before.items() if old not in (signal.SIG_IGN, None)]
    for number in handled:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])


@contextmanager
def stopping() -> Iterator[list[int]]:
    """Turn SIGINT and SIGTERM into KeyboardInterrupt; yield a list that collects their exit codes. Callers
    check the list, because torch turns some KeyboardInterrupts into other exceptions."""
    codes: list[int] = []

    def stop(number: int, frame: Any) -> None:
        codes.append(STOPS[signal.Signals(number)])
        raise KeyboardInterrupt

    with handled(STOPS, stop):
        yield codes


@contextmanager
def resumable(stages: Sequence[Staging], kept: Callable[[], str] | None = None) -> Iterator[None]:
    """Turn an interrupt into an error whose hint is the command that continues.

    stages: staging of each output. kept: returns words for the folders' content; None: finished blocks.
    """
    folders = [stage.folder for stage in stages]
    words = kept or (lambda: "finished blocks are")
    with stopping() as codes:
        try:
            yield
        except BaseException as error:
            if not codes and isinstance(error, KeyboardInterrupt):
                codes.append(INTERRUPTED)
            if not codes:
                if ranks.process_count() > 1 and isinstance(error, QuantkitError) and not error.hint:
                    again = f"continue, with any number of processes, with: {ranks.typed('--resume')}"
                    error.hint = f"{words()} kept in {folders[0]}; {again}"
                raise
            from quantkit.models.files import gguf_shards

            word = EXIT_CODES[codes[0]]
            finished = [gguf_shards.first(stage.output) for stage in stages if stage.finished()]
            if len(finished) == len(folders):
                message = f"{word}; {' and '.join(map(str, finished))} finished"
                raise QuantkitError(message, "measure with: quantkit eval", codes[0]) from error
            existing = [path for path in folders if path.exists()]
            what = f"{word}; {words()} kept in {existing[0]}" if existing else word
            begun = len(existing) == len(folders) and not any(stage.there() for stage in stages)
            if begun and kept is None:
                what = f"{word}; no block is finished yet"
            more = ["--resume"] if existing or finished else []
            hint = f"{'continue' if more else 'begin again'} with: {ranks.typed(*more)}"
            raise QuantkitError(what, hint, codes[0]) from error


def _give_up_unread() -> None:
    """Redirect to /dev/null the streams that cannot be flushed, so that Python exits with our exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # the reader went away, or the disk is full
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _fail(error: QuantkitError, traced: Exception | None = None) -> NoReturn:
    """Print the traceback of `traced`, if given, then the error, and exit."""
    if traced is not None:
        traceback.print_exception(traced)
    ranks.fail(error, print_error)
    print_error(error)
    _give_up_unread()
    sys.exit(error.exit_code)


def print_error(error: QuantkitError) -> None:
    """Print `error:` and `hint:` on stderr, and with `--json` the record on stdout."""
    typed = takewhile(lambda argument: argument != "--", sys.argv[1:])
    if "--json" in typed:  # look in argv, since parsing may have failed
        with suppress(OSError):  # a full disk
            print(json.dumps(error.record(), indent=2))
    word = "error:"
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        word = typer.style(word, fg="red", bold=True)
    print(f"{word} {printable(error.message)}", file=sys.stderr)
    if error.hint:
        print(f"hint: {printable(error.hint)}", file=sys.stderr)


def _unexpected(error: Exception) -> QuantkitError:
    """Return the QuantkitError for another exception: no memory, a full disk, a file, or a bug."""
    if memory_ran_out(error):
        hint = "close other programs, or choose options that need less memory"
        return QuantkitError(f"memory ran out: {first_line(error)}", hint, RESOURCES)
    if full := full_disk(error):
        hint = f"{full[1]}, or write elsewhere"
        return QuantkitError(f"the disk {full[0]}: {first_line(error)}", hint, RESOURCES)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        hint = "check the path and its permissions"
        return QuantkitError(f"{os.fsdecode(error.filename)}: {error.strerror}", hint)
    return QuantkitError(f"{type(error).__name__}: {first_line(error)}", REPORT)


def _is_close(name: str, typed: str) -> bool:
    """Return whether the typed word is probably a misspelling of the name."""
    name, typed = name.strip("-"), typed.strip("-")
    close = difflib.SequenceMatcher(None, name, typed).ratio() >= SIMILAR
    return close or name.startswith(typed) or typed.startswith(name)


def _parser_error(error: Any) -> QuantkitError:
    offered = getattr(error, "possibilities", None)
    for wrong in getattr(error.__cause__, "errors", list)()[:1]:  # of pydantic
        if kind := KINDS.get(wrong["type"].partition("_")[0]):
            error.message = f"{wrong['input']!r} is not {kind}"
    near = [name for name in offered or () if _is_close(name, getattr(error, "option_name", name))]
    if choice := re.search(r"'(.*?)' is not one of (.*)", error.message):
        near = nearest(choice[1], re.findall(r"'(.*?)'", choice[2]))
    words = (error.message if offered else error.format_message()).replace("Value error, ", "").split()
    message = " ".join(words).rstrip(".")  # on one line
    command = error.ctx.command_path if error.ctx else "quantkit"
    from quantkit.options import mean_bits

    typed = re.search(r"--bits[= ](\S+)", " ".join(sys.argv)) if "'--bits'" in message else None
    hint = (typed and mean_bits(typed[1])) or f"{did_you_mean(near)}see {command} --help"
    extra = re.search(r"unexpected extra argument\S* \((.+)\)", message)
    if extra and any("--output" in option.opts for option in error.ctx.command.params):
        hint = f"the output is an option: -o {extra[1]}; {hint}"
    return QuantkitError(message[:1].lower() + message[1:], hint, USAGE)
