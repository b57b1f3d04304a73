"""A repository of the hub of which nothing is fetched but headers of weights and small files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import NOT_FOUND, QuantkitError, first_line
from quantkit.models.files import hub, safetensors_folder
from quantkit.models.files.safetensors_folder import TensorInfo

SECONDS = 30.0  # for the hub to answer in


@dataclass(frozen=True)
class Repository:
    """A model, as it is now. files: bytes of every file of its top folder, by name."""

    repo: str
    revision: str | None
    files: dict[str, int]

    @staticmethod
    def open(repo: str, revision: str | None = None) -> Repository:
        """Ask the hub. Raises QuantkitError (exit code 3) as `hub.resolve` does, or without a config.json."""
        from huggingface_hub import HfApi

        with hub.explained(repo, revision):
            found = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=SECONDS)
        sizes = {file.rfilename: file.size for file in found.siblings or ()}
        files = {name: size for name, size in sizes.items() if size is not None and "/" not in name}
        if "config.json" not in files:
            raise QuantkitError(f"{repo} holds no config.json", "give the id of a language model", NOT_FOUND)
        return Repository(repo, revision, files)

    def fetch(self, name: str) -> Path:
        """A small file, through the cache, where `--offline` finds it again."""
        from huggingface_hub import hf_hub_download

        with hub.explained(self.repo, self.revision):
            return Path(hf_hub_download(self.repo, name, revision=self.revision))

    def tensors(self) -> dict[str, TensorInfo] | None:
        """All tensors, from the headers; None where there are no safetensors.

        Raises QuantkitError for headers that are none, or do not fill their files.
        """
        from huggingface_hub import get_safetensors_metadata
        from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

        with hub.explained(self.repo, self.revision):
            try:
                found = get_safetensors_metadata(self.repo, revision=self.revision).files_metadata
            except NotASafetensorsRepoError:
                return None
            except (SafetensorsParsingError, AttributeError, TypeError) as error:
                raise QuantkitError(
                    f"{self.repo} holds no safetensors: {first_line(error)}", "tell its owner"
                ) from error
        infos: dict[str, TensorInfo] = {}
        for name, held in found.items():
            infos |= _infos(name, held.tensors, self.files.get(name))
        return infos


def _infos(name: str, tensors: dict[str, Any], file_bytes: int | None) -> dict[str, TensorInfo]:
    """The tensors of a file of which only the header came; it must fill the file as one read here does."""
    header = {
        key: {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": entry.data_offsets}
        for key, entry in tensors.items()
    }
    infos = safetensors_folder.check_header(Path(name), header)
    if file_bytes is None:
        return infos
    base = max(8, file_bytes - max((info.offset + info.nbytes for info in infos.values()), default=0))
    return safetensors_folder.check_header(Path(name), header, file_bytes, base)
