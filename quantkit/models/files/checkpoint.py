"""A checkpoint on disk: configuration, tokenizer, and tensors read one at a time, whatever their layout.

`Checkpoint.read("model.layers.0.mlp.up_proj.weight", ...)` also decodes packed codes, so evaluation and
inspection need not distinguish quantized and original models.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
import transformers

from quantkit import layouts
from quantkit.errors import NOT_FOUND, UNSUPPORTED, QuantkitError, first_line
from quantkit.models.files import checksums, reading, safetensors_folder, tokenizing, untrusted
from quantkit.models.files.headers import COMPANIONS, MANIFEST, TOKENIZERS
from quantkit.models.files.safetensors_folder import CONFIG, TensorInfo

if "TRANSFORMERS_VERBOSITY" not in os.environ:  # the library's warnings are for developers
    transformers.logging.set_verbosity_error()
State = tuple[int, int, int, int]  # a file's device, inode, bytes and modification time (ns)


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint folder: headers are read and checked, but no tensor is loaded.

    infos: file and offset (TensorInfo) by tensor name. config: the model's configuration without
    quantization. layout: decodes quantized linears; None for a plain checkpoint. notes: remarks on the
    files, which a job prints. packed: names of the stored tensors of each packed linear, by suffix. seen:
    state of each file, recorded before reading. A head tied to the embedding has no tensor (see `head.py`).
    """

    source: str
    folder: Path
    raw_config: dict
    config: transformers.PretrainedConfig
    infos: dict[str, TensorInfo]
    layout: layouts.Layout | None
    trust_remote_code: bool = False
    notes: tuple[str, ...] = ()
    packed: dict[str, dict[str, str]] = field(default_factory=dict, repr=False)
    seen: Mapping[Path, State] = field(default_factory=dict, repr=False)

    def with_tensors(self, infos: dict[str, TensorInfo], layout: layouts.Layout) -> Checkpoint:
        """Return the same model with other tensors, such as a staged block before the output exists."""
        packed = layouts.group_by_linear(layout, infos)
        return replace(self, infos=infos, layout=layout, packed=packed)

    def with_changed(self, infos: dict[str, TensorInfo]) -> Checkpoint:
        """Return the same model with some tensors replaced by the unpacked tensors `infos`."""
        packed = {name: parts for name, parts in self.packed.items() if f"{name}.weight" not in infos}
        return replace(self, infos=self.infos | infos, packed=packed)

    @cached_property
    def names(self) -> list[str]:
        """Return the names of all tensors as in a plain checkpoint: `X.weight` for packed `X.*`."""
        parts = {name for parts in self.packed.values() for name in parts.values()}
        plain = [name for name in self.infos if name not in parts]
        return plain + [f"{linear}.weight" for linear in self.packed]

    @property
    def name(self) -> str:
        """Return the model's name: the last part of its source."""
        is_local = Path(self.source).exists()
        return self.folder.resolve().name if is_local else self.source.rpartition("/")[2]

    @property
    def quantized(self) -> bool:
        """Return whether some weights are stored as codes."""
        return self.layout is not None

    @property
    def stored_bytes(self) -> int:
        """Return the stored bytes of all tensors."""
        return sum(info.nbytes for info in self.infos.values())

    @property
    def disk_bytes(self) -> int:
        """Return the bytes of all files of the checkpoint."""
        return sum(path.stat().st_size for path in untrusted.entries(self.folder) if path.is_file())

    def manifest(self) -> str | None:
        """Return the manifest that quantkit wrote; None if another tool made the checkpoint."""
        path = self.folder / MANIFEST
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None

    def coded_bytes(self) -> dict[str, int]:
        """Return the stored bytes of each quantized weight, scales included: {`X.weight`: bytes}."""
        return {
            f"{linear}.weight": sum(self.infos[stored].nbytes for stored in parts.values())
            for linear, parts in self.packed.items()
        }

    def is_quantized(self, name: str) -> bool:
        """Return whether `name` (`X.weight`) is stored as packed codes."""
        return name.removesuffix(".weight") in self.packed

    def plain_dtype(self, name: str) -> str | None:
        """Return the stored type of `name`, such as `BF16`; None if it is packed."""
        return None if self.is_quantized(name) else self.infos[name].dtype

    def stored_as(self, name: str) -> list[str]:
        """Return the names of the stored tensors that make up `name`: itself, or a packed linear's parts."""
        packed = self.packed.get(name.removesuffix(".weight"))
        return list(packed.values()) if packed else [name]

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return one tensor's values; a packed linear's weight is decoded to `[out, in]`."""
        if self.is_quantized(name):
            parts = self.parts(name)
            with layouts.naming_errors(parts.linear, parts):
                values = self.layout.at(parts.linear).values(parts)
            return values if dtype is None else values.to(dtype)
        return self.load(name, dtype)

    def parts(self, name: str) -> PackedLinear:
        """Return the stored tensors of a packed linear (`X.weight`), by suffix."""
        linear = name.removesuffix(".weight")
        names = self.packed[linear]
        return PackedLinear(linear, {suffix: self.load(stored) for suffix, stored in names.items()})

    def stores_rows(self, name: str) -> bool:
        """Return whether `load` can return some rows of a tensor: neither packed nor computed."""
        return not self.is_quantized(name) and type(self.infos[name]) is TensorInfo

    def load(self, name: str, dtype: torch.dtype | None = None, rows: slice | None = None) -> torch.Tensor:
        """Return one stored or computed tensor, in `dtype` if given. rows: only these; see `stores_rows`."""
        info = self.infos[name]
        try:
            return self._values(info, dtype, rows).contiguous()
        except OSError as error:
            what = f"{name} could not be read from {info.file}: {error}"
            raise QuantkitError(what, "download the file again") from error

    def _values(self, info: TensorInfo, dtype: torch.dtype | None, rows: slice | None) -> torch.Tensor:
        values = reading.read(info) if rows is None else reading.tensor(info, (rows,))
        return values.to(dtype or values.dtype)

    def plain(self, info: TensorInfo) -> TensorInfo:
        """Return name, dtype, shape and bytes that a tensor will have in a plain safetensors file."""
        return info

    def data(self, info: TensorInfo) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the tensor that `plain` describes, piece by piece."""
        if isinstance(info, reading.Computed):
            return iter([reading.read(info).contiguous().view(-1).view(torch.uint8).numpy().data])
        return safetensors_folder.raw(info)

    def check_ids(self, ids: Iterable[int]) -> None:
        """Raise QuantkitError if a token of a text has no row in the embedding; the message names it."""
        rows, largest = getattr(self.text_config, "vocab_size", None), max(ids, default=0)
        if rows and largest >= rows:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            what = f"the text holds {token!r}, id {largest}: the embedding of {self.source} has {rows} rows"
            hint = "remove it from the text, or add its row: model.resize_token_embeddings(len(tokenizer))"
            raise QuantkitError(what, hint, UNSUPPORTED)

    @cached_property
    def tokenizer(self) -> transformers.PreTrainedTokenizerBase:
        """Return the checkpoint's tokenizer. Raises QuantkitError if there is none, or it does not load."""
        return load_tokenizer(self.source, self.folder, self.trust_remote_code)

    @property
    def text_config(self) -> transformers.PretrainedConfig:
        """Return the configuration of the language model: a part of `config` in multimodal models."""
        return self.config.get_text_config(decoder=True)

    @property
    def context(self) -> int | None:
        """Return the model's maximum context length in tokens; None without a limit."""
        length = getattr(self.text_config, "max_position_embeddings", None)
        return length if length and length > 0 else None  # -1 in XLNet

    def companions(self) -> list[Path]:
        """Return the files that clients expect next to weights: tokenizer, generation config, chat template,
        licence."""
        patterns = (*COMPANIONS, "*.py") if self.trust_remote_code else COMPANIONS
        paths = {path for pattern in patterns for path in self.folder.glob(pattern) if path.is_file()}
        return sorted(path for path in paths if path.suffix != ".safetensors")

    def write_companions(self, target: Path) -> None:
        """Copy the companions into the folder `target`."""
        self.copy(self.companions(), target)

    def copy(self, paths: Iterable[Path], target: Path) -> None:
        """Copy files of the checkpoint into the folder `target`; named chat templates into a subfolder."""
        for path in paths:
            copied = target / path.relative_to(self.folder)
            copied.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copied)

    def sha256(self) -> str:
        """Return one hash of config.json and of all weight files with their names."""
        digest = hashlib.sha256((self.folder / CONFIG).read_bytes())
        for path in sorted({info.file for info in self.infos.values()}):
            digest.update(path.name.encode())
            checksums.add(digest, path)
        return digest.hexdigest()


def load_tokenizer(
    source: str, folder: Path, trust_remote_code: bool = False
) -> transformers.PreTrainedTokenizerBase:
    """Return the tokenizer in a folder. Raises QuantkitError if there is none, or it does not load."""
    untrusted.refuse_tokenizer_file(folder / "tokenizer.json")
    try:
        with tokenizing.explained():
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
        if not isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
            raise TypeError(f"{type(tokenizer).__name__} is no tokenizer of a single model")
    except Exception as error:  # the library raises many types here
        error = error.__cause__ or error
        why = first_line(error) if has_tokenizer(folder) else "there are no files of one"
        raise QuantkitError(
            f"{source} has no tokenizer that loads: {why}",
            hint="copy tokenizer.json and tokenizer_config.json of the original model into its folder; a "
            "tokenizer.model alone needs pip install sentencepiece",
            exit_code=NOT_FOUND,
        ) from error
    untrusted.refuse_growth(tokenizer)
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has files of a tokenizer, whether or not they load."""
    return any(path for pattern in TOKENIZERS for path in folder.glob(pattern))


class PackedLinear(dict[str, torch.Tensor]):
    """Stored tensors, by suffix, of the packed linear that the checkpoint calls `linear`. Raises
    QuantkitError if an absent one is read."""

    def __init__(self, linear: str, parts: dict[str, torch.Tensor]):
        super().__init__(parts)
        self.linear = linear

    def __missing__(self, suffix: str) -> torch.Tensor:
        what = f"{self.linear} is quantized, but {self.linear}.{suffix} is absent"
        raise QuantkitError(what, "download it again")
