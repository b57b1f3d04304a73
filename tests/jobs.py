"""Whole jobs in this process: from options to a written folder, verified by the job itself."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import families
import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.errors import QuantkitError
from quantkit.models.files.reading import DTYPES
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.quantize import job, loop, methods
from quantkit.quantize.outputs import Summary
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging.folder import Staging

GPTQ = {"group_size": 32, "transform": "none", "refine": 0}  # the shortest way of error feedback


class Listener(Progress):
    """Keeps what a user would be warned of."""

    def __init__(self):
        self.warnings = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def table(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each, as `Layout.tensors` promises them."""
    types = {dtype: name for name, dtype in DTYPES.items()}
    return {part: (types[tensor.dtype], tuple(tensor.shape)) for part, tensor in tensors.items()}


def prepare(
    method: str, source: Path, output: Path, options: dict | None = None, progress: Progress | None = None,
    calibration: CalibrationOptions | None = None, resume: bool = False, loss_tokens: int | None = 0, **run,
) -> job.Job:  # fmt: skip
    request = job.Request(
        str(source),
        methods.create(method, **options or {}),
        calibration or CalibrationOptions(),
        RunOptions(threads=1, loss_tokens=loss_tokens, **run),
        output=output,
        resume=resume,
    )
    return job.prepare(request, progress or Progress())


def quantize(method: str, source: Path, output: Path, options: dict | None = None, **arguments) -> Summary:
    """`quantize("gptq", model, folder, {"bits": 8}, exclude=("v_proj",))`."""
    return loop.run([prepare(method, source, output, options, **arguments)], Progress())[0]


def calibration(folder: Path, samples: int = 6, seqlen: int = 32) -> CalibrationOptions:
    """A few sequences of generated text, written to `folder`."""
    text = folder / "calibration.txt"
    text.write_text("\n".join(families.sentences()))
    return CalibrationOptions(calibration=str(text), samples=samples, seqlen=seqlen)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def rewrite(folder: Path, change) -> Path:
    """Let `change(name, tensor)` alter the tensors of a model in place, or give new ones."""
    found = tensors(folder)
    for name, tensor in found.items():
        new = change(name, tensor)
        found[name] = tensor if new is None else new
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def error_of(function, *arguments, **options) -> QuantkitError:
    """What the call raises, with a way out."""
    with pytest.raises(QuantkitError) as caught:
        function(*arguments, **options)
    assert caught.value.hint
    return caught.value


@contextmanager
def edited(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of a model, which are stored again as the block leaves them."""
    stored = tensors(folder)
    yield stored
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, **changes) -> None:
    """Set keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@contextmanager
def interrupted(before: int) -> Iterator[None]:
    """The job inside ends where it would stage the block of this index."""
    write = Staging.write_block

    def stop(self, index, *rest):
        if index == before:
            raise KeyboardInterrupt
        write(self, index, *rest)

    with mock.patch.object(Staging, "write_block", stop), pytest.raises(KeyboardInterrupt):
        yield


def spread(folder: Path, channels: Sequence[int] = (3, 40), factor: int = 32) -> Path:
    """A few channels behind the norms so many times as large, the columns that read them as much smaller."""
    readers = tuple(f"{leaf}_proj.weight" for leaf in ("q", "k", "v", "gate", "up"))

    def change(name: str, tensor: torch.Tensor) -> None:
        if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
            tensor[[*channels]] *= factor
        elif name.endswith(readers):
            tensor[:, [*channels]] /= factor

    return rewrite(folder, change)


def manifest(folder: Path) -> dict:
    """What is recorded about each linear, by name."""
    return {row["name"]: row for row in json.loads((folder / "quantkit.json").read_text())["linears"]}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, the timings aside."""
    files = (path for path in folder.rglob("*") if path.is_file() and "timings" not in path.name)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
