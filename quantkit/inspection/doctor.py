"""Examines this machine: versions, devices, memory, disk, the hub, and optional packages.

Every check is fast. If a check fails, the table says so; there is no error.
"""

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from quantkit import __version__
from quantkit.errors import EXIT_CODES, QuantkitError, count, first_line
from quantkit.models.files import hub
from quantkit.models.machine import processor
from quantkit.tables import megabytes

SCHEMA = "quantkit.doctor/1"
HUB_SECONDS = 3.0
OPTIONAL = {  # package -> what it enables
    "accelerate": "transformers loads quantized checkpoints",
    "bitsandbytes": "transformers loads int8 and nf4 checkpoints",
    "optimum": "with gptqmodel: transformers loads gptq checkpoints",
    "gptqmodel": "transformers loads awq checkpoints, and gptq ones with optimum",
    "compressed-tensors": "transformers loads compressed-tensors checkpoints",
    "vllm": "serves gptq, awq and compressed-tensors checkpoints",
    "xllamacpp": "llama.cpp in Python: runs GGUF files",
    "fastapi": "with uvicorn and openai: transformers serves checkpoints",
    "lm-eval": "quantkit eval --tasks",
    "sentencepiece": "tokenizers that come as tokenizer.model alone",
}


Finding = dict[str, Any]  # name, value, ok (None: neither good nor bad), note: reason or purpose


def examine() -> dict[str, Any]:
    """Run all checks; return the versioned JSON, with the findings by subject in the order of the report."""
    checks = {
        "program": (_program,),
        "needed": (_requirements,),
        "machine": (_machine, _memory, _disks),
        "hub": (_hub,),
        "optional": (_optional,),
    }
    return {
        "schema": SCHEMA,
        "quantkit": __version__,
        "checks": {
            subject: [finding for check in group for finding in _softly(check)]
            for subject, group in checks.items()
        },
        "exit_codes": {str(code): words for code, words in EXIT_CODES.items()},
    }


def _finding(name: str, value: str, ok: bool | None = None, note: str = "") -> Finding:
    return {"name": name, "value": value, "ok": ok, "note": note}


def _softly(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except QuantkitError:  # an invalid setting of the user
        raise
    except Exception as error:  # report any defect of this machine
        yield _finding(check.__name__.strip("_"), "unknown", False, f"{type(error).__name__}: {error}")


def _program() -> Iterator[Finding]:
    yield _finding("quantkit", __version__, None, str(Path(__file__).parents[1]))
    yield _finding("python", platform.python_version(), None, sys.executable)
    yield _finding("system", f"{platform.system()} {platform.release()}", None, platform.machine())


def _requirements() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    try:
        requirements = metadata.requires("quantkit") or ()
    except metadata.PackageNotFoundError:
        yield _finding("packages", "not looked at", None, "quantkit runs from a source tree, not installed")
        return
    for text in sorted(requirements, key=str.lower):
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = _version(requirement.name)
        fits = installed is not None and requirement.specifier.contains(installed, prereleases=True)
        note = "" if fits else f"quantkit needs {requirement.name}{requirement.specifier}"
        yield _finding(requirement.name, installed or "not installed", fits, note)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> Iterator[Finding]:
    import torch

    from quantkit.models.machine import device

    note = "computes in bfloat16" if processor.has_bfloat16() else "no bfloat16: --dtype auto is float32"
    cores, threads = count(psutil.cpu_count(), "core"), count(torch.get_num_threads(), "thread")
    yield _finding("cpu", f"{cores}, {threads}", None, note)
    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
        yield _finding("cuda", "none", None, f"torch {torch.__version__} is built for {built}")
    for device_name, name, free, total in device.accelerators():
        yield _finding(device_name, _free(free, total), True, f"{name}: --device {device_name}")


def _memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    yield _finding("memory", _free(memory.available, memory.total))


def _free(free: float, total: float) -> str:
    return f"{megabytes(free)} of {megabytes(total)} free"


def _disks() -> Iterator[Finding]:
    from huggingface_hub import constants

    for name, folder in (("disk here", Path.cwd()), ("hub cache", Path(constants.HF_HUB_CACHE))):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        usage, writable = shutil.disk_usage(existing), os.access(existing, os.W_OK)
        note = str(folder) if writable else f"{folder} cannot be written"
        yield _finding(name, _free(usage.free, usage.total), writable, note)


def _hub() -> Iterator[Finding]:
    """Check whether the hub answers and whether there is a token for gated models; do not show it."""
    from huggingface_hub import constants, get_session, get_token

    try:
        token, why = get_token(), "gated models need one"
    except hub.faults() as error:
        token, why = None, first_line(error)
    yield _finding("hub token", "found" if token else "none", None, "" if token else why)
    if constants.HF_HUB_OFFLINE:
        yield _finding("hub", "not contacted", None, "HF_HUB_OFFLINE is set: only what is in the cache")
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except hub.faults() as error:
        why = f"{constants.ENDPOINT}: {first_line(error)}; --offline does without"
        yield _finding("hub", "does not answer", False, why)
    else:
        yield _finding("hub", "answers", True, constants.ENDPOINT)


def _optional() -> Iterator[Finding]:
    for package, enables in OPTIONAL.items():
        yield _finding(package, _version(package) or "not installed", None, enables)
