"""Outputs: what a finished job publishes. A checkpoint folder, or one GGUF file; a file for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from quantkit.layouts import Layout, LinearSpec
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.safetensors_folder import TensorInfo
from quantkit.models.skeleton import Skeleton, towers
from quantkit.models.skeleton.towers import Beside
from quantkit.quantize.calibrate.states import Place
from quantkit.quantize.prepare.linears import kept_parameters
from quantkit.quantize.progress import Progress
from quantkit.quantize.solvers import Solver
from quantkit.quantize.staging.folder import Staging

Batches = Sequence[Tensor]  # token ids, `[batch, tokens]` each


@dataclass(frozen=True)
class Material:
    """What an output is made of: the source, and the linears of it that lie staged in `layout`.

    shard_bytes: size of a file, where there are several. output_errors: whether errors of linears are those
    of their outputs on calibration text.
    """

    skeleton: Skeleton
    specs: Sequence[LinearSpec]
    layout: Layout
    staging: Staging
    shard_bytes: int
    output_errors: bool

    @property
    def checkpoint(self) -> Checkpoint:
        return self.skeleton.checkpoint

    @cached_property
    def beside(self) -> list[Beside]:
        """What lies beside the language model."""
        return towers.beside(self.skeleton.model, self.skeleton.names, self.checkpoint)

    @property
    def config(self) -> dict:
        """`quantization_config` of config.json."""
        return self.layout.config(self.specs, self._spared)

    @property
    def files(self) -> dict[str, dict]:
        """Further JSON files that the layout's clients look for."""
        return self.layout.files(self.specs, self._spared)

    @property
    def _spared(self) -> list[str]:
        """Modules of which nothing is quantized, and which clients may take for linears that are."""
        names = [name for module in self.beside for name in module.spellings]
        if self.layout.takes_matrices:
            kept = (row for row in kept_parameters(self.skeleton) if len(row.shape) == 2)
            names += [row.name.removesuffix(".weight") for row in kept if row.name.endswith(".weight")]
        return names

    def untouched(self, block: int | None = None) -> dict[str, TensorInfo]:
        """The source's tensors without weights that are staged, quantized or packed before; of one block
        alone, if given."""
        rows = (row for row in self.specs if block in (None, row.block))
        names = (f"{row.name}.weight" for row in rows if row.grid or self.is_packed(row))
        staged = {stored for name in names for stored in self.checkpoint.stored_as(name)}
        return {name: info for name, info in self.checkpoint.infos.items() if name not in staged}

    def is_packed(self, row: LinearSpec) -> bool:
        """Whether the source holds this linear as packed codes."""
        return self.checkpoint.is_quantized(f"{row.name}.weight")

    def with_block(self, index: int) -> Checkpoint:
        """The checkpoint as it is once block `index` is staged: readable like any other."""
        return self.checkpoint.with_tensors(self.untouched(index) | self.staging.infos(index), self.layout)


@dataclass(frozen=True)
class ExpertTokens:
    """How many calibration tokens were routed to each expert of a mixture. starved: experts with fewer than
    a linear of theirs has input features; statistics: how `--experts` made theirs."""

    experts: int
    fewest: int
    median: int
    most: int
    starved: int
    statistics: str


@dataclass(frozen=True)
class Summary:
    """What a finished job reports. Sizes in bytes; fallbacks: linear -> reason. kept_parameters: name, shape
    and bytes of what is no linear. left_out: modules that were not written, in bytes. copied: bytes of
    modules beside the language model, by name. steps_down: what it
    did to get along with less memory than planned. scaled: what a transform did to columns of a linear:
    `into`, what was divided, None where nothing can be; `spread`, the largest scale over the smallest;
    `loss`, what is left of the loss, as estimated; None without a transform. activations: how clients
    quantize them as the model runs; None where they do not."""

    source: str
    output: str
    source_bytes: int
    output_bytes: int
    bits_per_weight: float
    bits_per_weight_model: float
    linears: int
    kept: int
    error: float | None
    rtn_error: float | None
    fallbacks: dict[str, str]
    notes: dict[str, list[str]]
    kept_parameters: list[dict]
    left_out: dict[str, int]
    copied: dict[str, int]
    experts: ExpertTokens | None
    outlier_columns: dict[str, int]
    scaled: dict[str, dict] | None
    seconds: dict[str, float]
    steps_down: list[str]
    activations: str | None


class Output(Protocol):
    """How staged blocks and what no solver touched become something to publish.

    needs: statistics of calibration text that it works from itself. left_out: what of the source it does not
    hold, in bytes.
    """

    needs: frozenset[str]
    left_out: Mapping[str, int]

    def sizes(self, checkpoint: Checkpoint, specs: Sequence[LinearSpec], layout: Layout) -> Sizes:
        """What will be written, exact from shapes."""

    def parameters(self, skeleton: Skeleton) -> int:
        """How many it holds."""

    def planned(self, checkpoint: Checkpoint, specs: Sequence[LinearSpec]) -> list[Planned]:
        """What becomes of every matrix."""

    def copied(self, material: Material) -> dict[str, int]:
        """Modules beside the language model that are copied byte for byte: name -> bytes."""

    def install_rest(
        self, material: Material, solver: Solver, batches: Batches, progress: Progress, place: Place
    ) -> None:
        """Let what lies outside the blocks compute as it will be stored, before the first block runs; states
        that this takes wait at `place`."""

    def write(self, material: Material, place: Path, manifest: dict) -> None:
        """Write it all at `place`, where nothing is yet; the manifest says how it came to be."""

    def describe(self, material: Material, place: Path, manifest: dict, summary: Summary) -> None:
        """Add what people read beside the tensors, once those have been verified."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of all tensors, and of the quantized linears among them, which have so many weights."""

    total: int
    quantized: int
    weights: int

    @property
    def bits_per_weight(self) -> float:
        """Of the quantized linears."""
        return 8 * self.quantized / self.weights


class Planned(NamedTuple):
    """A matrix of the output: its name inside its block (or its own, outside), and what it becomes."""

    name: str
    block: int | None
    shape: tuple[int, int]
    becomes: str
