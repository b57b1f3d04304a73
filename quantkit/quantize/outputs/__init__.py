"""Outputs of a finished job: a checkpoint folder (`folder.Output`), or one GGUF file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from quantkit.layouts import Layout, LinearSpec
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.safetensors_folder import TensorInfo
from quantkit.models.skeleton import Skeleton
from quantkit.models.skeleton.linears import kept_parameters
from quantkit.models.skeleton.names import CopiedModule, copied_modules
from quantkit.quantize.calibrate.statistics import SiteStatistics
from quantkit.quantize.staging.folder import Staging

# Measures the inputs of the head, in one pass of the calibration text through the unquantized blocks.
MeasureHead = Callable[[], SiteStatistics]


@dataclass(frozen=True)
class Material:
    """The source and its linears, staged in `layout`, that make up an output. shard_bytes: largest size of a
    file; None: no limit."""

    skeleton: Skeleton
    specs: Sequence[LinearSpec]
    layout: Layout
    staging: Staging
    shard_bytes: int | None

    @property
    def checkpoint(self) -> Checkpoint:
        return self.skeleton.checkpoint

    @cached_property
    def outside(self) -> list[CopiedModule]:
        """Modules next to the language model."""
        return copied_modules(self.skeleton.model, self.skeleton.names, self.checkpoint)

    @property
    def modules(self) -> dict[str, int]:
        """Bytes of each of these modules. A folder has copies of them, a GGUF file leaves them out."""
        return {module.name: module.nbytes for module in self.outside}

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
        """Names of unquantized modules that clients might take for quantized linears."""
        names = [name for module in self.outside for name in module.spellings]
        if self.layout.takes_matrices:
            kept = (kept["name"] for kept in kept_parameters(self.skeleton) if len(kept["shape"]) == 2)
            names += [name.removesuffix(".weight") for name in kept if name.endswith(".weight")]
        return names

    def untouched(self, block: int | None = None) -> dict[str, TensorInfo]:
        """Return the source's tensors that are not staged, of all blocks or of one."""
        specs = (spec for spec in self.specs if block in (None, spec.block))
        names = (f"{spec.name}.weight" for spec in specs if spec.grid or self.is_packed(spec))
        staged = {stored for name in names for stored in self.checkpoint.stored_as(name)}
        return {name: info for name, info in self.checkpoint.infos.items() if name not in staged}

    def is_packed(self, spec: LinearSpec) -> bool:
        """Return whether the source stores this linear as packed codes."""
        return self.checkpoint.is_quantized(f"{spec.name}.weight")

    def with_block(self, index: int) -> Checkpoint:
        """Return the checkpoint with block `index` as staged."""
        return self.checkpoint.with_tensors(self.untouched(index) | self.staging.infos(index), self.layout)


@dataclass(frozen=True)
class ExpertTokens:
    """Calibration tokens per expert of a mixture. starved: number of experts with fewer tokens than input
    features. statistics: the value of `--experts`."""

    experts: int
    fewest: int
    median: int
    most: int
    starved: int
    statistics: str


@dataclass(frozen=True)
class Loss:
    """The loss of an output, measured on held-back tokens (`loss.py`).

    kld: mean KL divergence from the original model in nats; stderr: its standard error. top1: share of tokens
    for which both models predict the same token. rtn_kld: KL divergence of the blocks rounded to nearest;
    None if the method rounds to nearest itself. tokens: number of predictions; text: where they come from.
    """

    kld: float
    stderr: float
    top1: float
    rtn_kld: float | None
    tokens: int
    text: str


@dataclass(frozen=True)
class Summary:
    """Report of a finished job. Sizes are bytes of all tensors. matrices: number of quantized matrices, also
    outside the blocks; bits_per_weight refers to these. fallbacks: linear -> reason. kept_parameters: name,
    shape and bytes of matrices that are not linears. left_out: bytes of each module that was not written.
    copied: bytes of each copied module outside the language model. steps_down: changes to the plan that saved
    memory. scaled: by linear, how a transform scaled its columns: `into`, the divided producer, None if there
    is none; `spread`, largest over smallest scale; `loss`, estimated share of the loss that remains; None
    without a transform. activations: how clients quantize activations; None if they do not. loss: on
    held-back tokens; None: not measured."""

    source: str
    output: str
    source_bytes: int
    output_bytes: int
    bits_per_weight: float | None
    bits_per_weight_model: float
    matrices: int
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
    loss: Loss | None


@dataclass(frozen=True)
class Sizes:
    """Bytes of all tensors and of the quantized matrices. weights, matrices: numbers of quantized ones."""

    total: int
    quantized: int
    weights: int
    matrices: int

    @property
    def bits_per_weight(self) -> float | None:
        """Bits per weight of the quantized matrices, scales included; None if there are none."""
        return 8 * self.quantized / self.weights if self.weights else None


class Planned(NamedTuple):
    """A matrix of the output. name: in its block, if it has one. becomes: its format."""

    name: str
    block: int | None
    shape: tuple[int, int]
    becomes: str


class Draft(NamedTuple):
    """An output in progress in its staging folder. output: a folder's or a GGUF file's Output."""

    output: Any
    material: Material
    manifest: dict
