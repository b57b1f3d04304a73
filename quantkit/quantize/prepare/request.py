"""What a job was asked for, with types and defaults. Nothing is opened yet."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import USAGE, require
from quantkit.models.files import gguf_shards
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.quantize.methods import Method
from quantkit.quantize.methods._override import Override

if TYPE_CHECKING:
    from quantkit.models.files.checkpoint import Checkpoint
    from quantkit.quantize.staging.folder import Staging


@dataclass(frozen=True, kw_only=True)
class JobFlags:
    """Flags of every job: its output, how models are opened, and what may happen to an earlier output."""

    output: Path | None = None
    revision: str | None = None
    offline: bool = False
    trust_remote_code: bool = False
    resume: bool = False
    overwrite: bool = False

    @property
    def opening(self) -> dict[str, Any]:
        """How models are opened, by flag."""
        return {name: getattr(self, name) for name in ("revision", "offline", "trust_remote_code")}


@dataclass(frozen=True)
class Request(JobFlags):
    """A job as the user typed it. method: None for an importance matrix. open_groups: no group size was
    typed, so linears that the model's group size does not divide stay in 16 bit. searched: hash of the
    search that chose the options."""

    source: str
    method: Method | None
    calibration: CalibrationOptions
    run: RunOptions
    open_groups: bool = False
    searched: str = ""

    @property
    def destination(self) -> Path:
        """The output path: as typed, or such as `model-gptq-w4g128`; `mixed` if bits are overridden."""
        if self.output:
            return Path(os.path.expanduser(self.output))  # a recipe may hold a ~
        suffix, bits = self.method.suffix, self.method.options.bits
        if any(Override.parse(text).bits != bits for text in self.run.override):
            suffix = re.sub(r"-w\d+(channel|g\d+)", "-mixed", suffix)
        return Path(f"{gguf_shards.base_name(self.source)}-{suffix}")

    @property
    def staging(self) -> Staging:
        """The staging folder of the output; only rank 0 writes to it."""
        from quantkit.models.machine import distributed
        from quantkit.quantize.staging.folder import Staging

        output, one_file = self.destination, self.method.suffix.endswith(".gguf")
        odd = one_file and gguf_shards.whole(output) != output
        what = f"-o {output} is the name of a GGUF file, but {self.method.name} writes a folder"
        hint = "leave out .gguf, or write a GGUF file with quantkit gguf"
        require(one_file or output.suffix != ".gguf", what, hint, USAGE)
        require(not odd, f"-o {output} is no name for shards", "give one such as model.gguf", USAGE)
        return Staging(output, one_file, follows=distributed.rank() > 0)

    def open(self) -> Checkpoint:
        """Open the source."""
        from quantkit.models.files.open import open_checkpoint

        return open_checkpoint(self.source, **self.opening)

    def each(self) -> list[Request]:
        """Return a request for each output of the command."""
        outputs = self.method.each(self.output, gguf_shards.base_name(self.source))
        return [replace(self, method=method, output=output) for method, output in outputs]
