"""What every script of this folder shares: a job read from JSON, its quantization phase measured.

Each script runs in the environment of the tool it drives, `python run_TOOL.py JOB.json`, and leaves
`JOB.result.json`. Only the standard library is imported here.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """One quantization. tokens: a JSON file of token id rows, the same block for every tool."""

    model: str
    tokens: str
    out: str
    method: str
    bits: int = 4
    group_size: int = 128
    sym: bool = True
    desc_act: bool = False
    mse: float = 0.0  # GPTQModel's range search
    gptaq: bool = False  # GPTQModel's asymmetric calibration
    iterations: int = 200  # AutoRound's
    options: dict = field(default_factory=dict)  # quantkit's, by the names of its method's Options
    libraries: str = ""  # a prebuilt llama.cpp's folder
    threads: int = 1
    calibration: str | None = None  # the text the tokens were cut from, for quantkit; None: the shipped one

    @property
    def dtype(self) -> str:
        """That of the weights, in which every tool is to compute: some take 16 bit unasked."""
        config = json.loads((Path(self.model) / "config.json").read_text())
        return config.get("dtype") or config["torch_dtype"]

    def rows(self) -> list[list[int]]:
        """Calibration sequences."""
        return json.loads(Path(self.tokens).read_text())


def start() -> Job:
    """The job named on the command line; what it says of threads holds for everything imported later."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("job", type=Path, metavar="JOB.json")
    job = Job(**json.loads(parser.parse_args().job.read_text()))
    os.environ["OMP_NUM_THREADS"] = str(job.threads)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # a first forward otherwise compiles for many seconds
    return job


def cpu_seconds() -> float:
    """User and system time of this process and of the children it waited for."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in usage)


class Clock:
    """Wall and CPU seconds of named phases, for the result file."""

    def __init__(self) -> None:
        self.phases: dict[str, dict[str, float]] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), cpu_seconds()
        yield
        self.phases[phase] = {"wall": time.perf_counter() - wall, "cpu": cpu_seconds() - cpu}

    def finish(self, *packages: str, **others: str) -> None:
        """Write the result file: phases, the process's peak resident memory, versions.

        others: versions that no package's metadata tells.
        """
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        versions = {package: metadata.version(package) for package in packages} | others
        result = {"phases": self.phases, "peak_bytes": peak, "versions": versions}
        Path(sys.argv[1]).with_suffix(".result.json").write_text(json.dumps(result, indent=2) + "\n")
