"""All about a checkpoint that can be read without its tensors: headers and small files of a folder, a hub
repository or a GGUF file. Nothing here imports torch."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from quantkit.errors import NOT_FOUND, UNSUPPORTED, QuantkitError, first_line, name_all, require
from quantkit.layouts import modelopt, quantization_of
from quantkit.models.files import gguf_shards, head, hub, safetensors_folder, untrusted
from quantkit.models.files.safetensors_folder import CONFIG, INDEX, SINGLE, TensorInfo, read_json
from quantkit.models.files.untrusted import SMALL_BYTES

MANIFEST = "quantkit.json"
ADAPTER = "adapter_config.json"  # PEFT's
LOSS = "quantkit.loss"  # the manifest's `loss` in a GGUF file, which is measured after the file is written
TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")  # a folder without these has no tokenizer
COMPANIONS = (  # small files that clients need; copied to the output unchanged
    *TOKENIZERS,
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "*.jinja",
    untrusted.NAMED_TEMPLATES,
    "chat_template.json",
    "*processor_config.json",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)
# The keys of a manifest that are read again.
MANIFEST_SCHEMA = json.loads(Path(__file__).with_name("manifest.schema.json").read_text(encoding="utf-8"))
HUB_FILES = (  # fetched from a repository besides headers; not tokenizer.json, which can be tens of megabytes
    CONFIG, "generation_config.json", "tokenizer_config.json", "chat_template.jinja",
    INDEX, MANIFEST, modelopt.FILE,
)  # fmt: skip
HUB_SECONDS = 30.0  # timeout of a request


@dataclass(frozen=True)
class Contents:
    """All that is known about a checkpoint before a weight is read.

    files: size in bytes of every file, by name. config: the contents of config.json, or the same derived from
    a GGUF file's metadata. infos: headers of the tensors, by name. fetch: returns the local path of a file by
    name; None if unavailable. problems: messages about what is wrong. path: of the folder or GGUF file.
    """

    source: str
    container: str  # "safetensors" or "gguf"
    files: dict[str, int]
    config: dict[str, Any]
    infos: dict[str, TensorInfo]
    fetch: Callable[[str], Path | None]
    path: Path | None = None  # None for a repository on the hub
    metadata: dict[str, Any] = field(default_factory=dict)  # a GGUF file's
    problems: list[str] = field(default_factory=list)

    @property
    def quantization(self) -> dict[str, Any]:
        """Return `quantization_config` of config.json; {} if there is none."""
        return quantization_of(self.config)

    @property
    def text_config(self) -> dict[str, Any]:
        """Return the configuration of the language model: all of `config`, or a part of it."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config

    @property
    def family(self) -> str | None:
        """Return the language model's `model_type`; for a GGUF file, llama.cpp's name of the architecture."""
        if self.container == "gguf":
            return self.metadata.get("general.architecture", "unknown")
        return self.text_config.get("model_type")

    @cached_property
    def head(self) -> head.Head:
        """Return what the model's head is."""
        return head.decide(self.infos, partial(_ties, self.config), self.path is not None)

    @cached_property
    def manifest(self) -> dict[str, Any] | None:
        """Return the manifest that quantkit wrote; None if there is none."""
        stored = self.metadata.get("quantkit.manifest")
        if stored is None:
            return self.json(MANIFEST)
        manifest = self._parsed(MANIFEST, str(stored).encode(errors="replace"))
        if manifest and (loss := str(self.metadata.get(LOSS, "")).strip()):
            manifest["loss"] = self._parsed(LOSS, loss.encode(errors="replace"))
        return manifest

    @cached_property
    def absent(self) -> frozenset[str]:
        """Return the tensors in the index that no shard holds, because a shard is missing or broken."""
        mapped = (self.index or {}).get("weight_map")
        return frozenset(mapped) - frozenset(self.infos) if isinstance(mapped, dict) else frozenset()

    @cached_property
    def index(self) -> dict[str, Any] | None:
        """Return the parsed index of shards; None for a single file."""
        return self.json(INDEX)

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a small file; None if it is absent, unavailable or too large."""
        if self.files.get(name, 0) > SMALL_BYTES:
            self.problems.append(f"{name} is larger than {SMALL_BYTES >> 20} MiB: not read")
            return None
        path = self.fetch(name) if name in self.files else None
        return None if path is None else path.read_bytes()

    def json(self, name: str) -> dict[str, Any] | None:
        """Return a parsed JSON file of the checkpoint; None if it is absent or invalid."""
        data = self.read(name)
        return None if data is None else self._parsed(name, data)

    def _parsed(self, name: str, data: bytes) -> dict[str, Any] | None:
        """Return a parsed JSON object; for any other text None, and a problem is added."""
        try:
            return untrusted.parse_object(data, name)
        except QuantkitError as error:
            self.problems.append(error.message)
            return None


def _ties(config: dict[str, Any]) -> bool:
    """Return whether a configuration ties head and embedding, by default as transformers does."""
    key, family = "tie_word_embeddings", config.get("model_type")
    if key in config:
        return bool(config[key])
    from transformers import CONFIG_MAPPING  # takes a while to import, and few files leave it open

    return family in CONFIG_MAPPING and bool(getattr(CONFIG_MAPPING[family], key, False))


def open_contents(
    source: str, revision: str | None = None, offline: bool = False, strict: bool = False, bare: bool = False
) -> Contents:
    """Return the contents of a folder, a GGUF file or a hub id; only headers and small files are downloaded.

    Raises QuantkitError if the source does not exist or no header can be read; with `strict`, for any
    problem. bare: a config.json without weights is accepted.
    """
    path = hub.local(source, revision)
    if path is None and not offline:
        return _of_repository(source, revision, strict, bare)
    return at(source, path or hub.resolve(source, revision, offline), strict, bare)


def at(source: str, path: Path, strict: bool = False, bare: bool = False) -> Contents:
    """Return the contents of a folder or a GGUF file."""
    if not path.is_file():
        return _of_folder(source, path, strict, bare)
    from quantkit.models.files.gguf_file import read_header  # `gguf` takes a while to import
    from quantkit.models.gguf.architectures import config_of, refuse_other

    metadata, infos = read_header(path)
    refuse_other(source, metadata)
    files = {shard.name: shard.stat().st_size for shard in gguf_shards.of(path)}
    config = config_of(metadata, infos)
    return Contents(source, "gguf", files, config, infos, lambda name: None, path, metadata)


# ---- folders


def _refuse_adapter(source: str, files: Mapping[str, int], folder: Path | None = None) -> None:
    """Raise QuantkitError (exit code 4) for a PEFT adapter without a model's weights."""
    if ADAPTER not in files or any(name in files for name in (SINGLE, INDEX)):
        return
    base = read_json(folder / ADAPTER).get("base_model_name_or_path") if folder else None
    what = f"{source} is an adapter (LoRA) of {base or 'another model'}, not a model"
    hint = "merge both: PeftModel.from_pretrained(BASE, ADAPTER).merge_and_unload().save_pretrained(NEW)"
    raise QuantkitError(what, hint, UNSUPPORTED)


def _of_folder(source: str, folder: Path, strict: bool, bare: bool) -> Contents:
    paths = sorted(path for path in untrusted.entries(folder) if path.is_file())
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    _refuse_adapter(source, files, folder)
    contents = Contents(source, "safetensors", files, {}, {}, folder.joinpath, folder)
    errors: list[QuantkitError] = []
    config = read_json(folder / CONFIG) if strict or CONFIG not in files else contents.json(CONFIG) or {}
    stored = not bare or any(name in files for name in (SINGLE, INDEX))
    infos = safetensors_folder.read_folder(folder, None if strict else errors) if stored else {}
    if errors and not infos:
        raise errors[0]
    contents.problems.extend(error.message for error in errors)
    return replace(contents, config=modelopt.completed(config, contents.json), infos=infos)


# ---- the hub


def _of_repository(repo: str, revision: str | None, strict: bool, bare: bool) -> Contents:
    from huggingface_hub import HfApi, hf_hub_download

    with hub.explained(repo, revision):
        model = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=HUB_SECONDS)
    sizes = {file.rfilename: file.size for file in model.siblings or () if file.size is not None}
    templates = untrusted.NAMED_TEMPLATES
    files = {name: sizes[name] for name in sizes if "/" not in name or fnmatch(name, templates)}
    _refuse_adapter(repo, files)
    require(CONFIG in files, f"{repo} holds no {CONFIG}", "give the id of a language model", NOT_FOUND)

    def fetch(name: str) -> Path | None:
        """Fetch a small file through the cache, where `--offline` finds it again."""
        with hub.explained(repo, revision):
            return Path(hf_hub_download(repo, name, revision=revision)) if name in HUB_FILES else None

    infos = _hub_tensors(repo, revision, files)
    if infos is None and not bare:
        others = sorted(name for name in files if name.endswith((".gguf", ".bin", ".pt", ".pth")))
        named = f", but {name_all(others, 3)}" if others else ""
        gguf = next((name for name in others if name.endswith(".gguf")), None)
        hint = "choose a repository that does"
        if gguf:
            shards = gguf_shards.NAME.sub(r"--include '\1-*-of-\3.gguf'", gguf)
            hint = f"fetch one and inspect it: hf download {repo} {shards} --local-dir ."
        raise QuantkitError(f"{repo} holds no safetensors{named}", hint, UNSUPPORTED)
    contents = Contents(repo, "safetensors", files, {}, infos or {}, fetch)
    config = read_json(fetch(CONFIG)) if strict else contents.json(CONFIG) or {}
    return replace(contents, config=modelopt.completed(config, contents.json))


def _hub_tensors(repo: str, revision: str | None, files: dict[str, int]) -> dict[str, TensorInfo] | None:
    """Return all tensors from their headers; None without safetensors. files: size in bytes, by name.

    Raises QuantkitError if a header is invalid or does not match the size of its file.
    """
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    with hub.explained(repo, revision):
        try:
            headers = get_safetensors_metadata(repo, revision=revision).files_metadata
        except NotASafetensorsRepoError:
            return None
        except (SafetensorsParsingError, AttributeError, TypeError) as error:
            what = f"{repo} holds no safetensors: {first_line(error)}"
            raise QuantkitError(what, "tell its owner") from error
    infos: dict[str, TensorInfo] = {}
    for name, file in headers.items():
        header = {key: vars(entry) for key, entry in file.tensors.items()}
        tensors = safetensors_folder.check_header(Path(name), header)
        size, end = files.get(name), sum(info.nbytes for info in tensors.values())  # there are no holes
        if size is not None and size < end + 8:
            raise QuantkitError(f"{name} of {repo} has {size:,} bytes, its tensors {end:,}", "tell its owner")
        infos |= tensors
    return infos
