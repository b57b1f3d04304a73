"""What there is to read of a model without loading it: config.json, and the headers of its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit import hub
from quantkit.capacity import parameters
from quantkit.capacity.parameters import Parameters
from quantkit.capacity.settings import Settings
from quantkit.containers import safetensors_folder
from quantkit.containers.safetensors_folder import INDEX, SINGLE, TensorInfo
from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError
from quantkit.hub_headers import Repository

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Source:
    """A model's configuration and tensors. basis: what the tensors were read from, or computed from."""

    name: str
    settings: Settings
    parameters: Parameters
    basis: str
    notes: tuple[str, ...] = ()


def read(source: str, revision: str | None = None, offline: bool = False) -> Source:
    """A local folder, the path of a config.json, or a hub id, of which only headers are fetched.

    Raises QuantkitError for what is none of these, and for a family that is not known where no headers are.
    """
    path = Path(source).expanduser()
    if path.is_file() and hub.is_gguf(path):
        raise QuantkitError(
            f"{source} is packed already", "plan the checkpoint it was made from", UNSUPPORTED
        )
    if path.suffix == ".json" and path.is_file():
        return _understand(source, safetensors_folder.read_config(path), None)
    folder = hub.local(source)
    if folder is None and not offline:
        repository = Repository.open(source, revision)
        config, found = safetensors_folder.read_config(repository.fetch("config.json")), repository.tensors()
        return _understand(source, config, None if found is None else list(found.values()))
    folder = folder or hub.resolve(source, revision, offline)
    config = safetensors_folder.read_config(folder / "config.json")
    stored = any((folder / name).is_file() for name in (SINGLE, INDEX))
    infos = list(safetensors_folder.read_folder(folder).values()) if stored else None
    return _understand(source, config, infos)


def _understand(name: str, config: Mapping[str, Any], infos: list[TensorInfo] | None) -> Source:
    settings = Settings.of(config)
    if config.get("quantization_config"):
        stored = f", stored in {sum(info.nbytes for info in infos) / 1e9:,.2f} GB" if infos else ""
        note = f"it is quantized already{stored}: all sizes are those of its original"
        return Source(name, settings, parameters.from_config(settings), "config.json", (note,))
    if infos is None:
        return Source(name, settings, parameters.from_config(settings), "config.json")
    return Source(name, settings, parameters.from_headers(infos, settings), "safetensors headers")


def parse_count(text: str) -> int:
    """`175B`, `350M` or a plain number of parameters. Raises QuantkitError for anything else."""
    match = re.fullmatch(
        r"(\d+(?:\.\d+)?)\s*([KMBT]?)", text.strip().replace(",", "").replace("_", "").upper()
    )
    count = round(float(match[1]) * UNITS[match[2]]) if match else 0
    if not 0 < count < 10**15:
        raise QuantkitError(
            f"--params {text!r} is no number of parameters", "for example 175B or 350M", USAGE
        )
    return count
