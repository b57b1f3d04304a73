"""Calibration datasets of the hub: streamed, never downloaded whole; offline, what the caches hold."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.errors import NOT_FOUND, UNSUPPORTED, USAGE, QuantkitError, first_line, name_all
from quantkit.models.files import hub
from quantkit.text.chat import column_of

ALIASES = {
    "wikitext2": "Salesforce/wikitext@wikitext-2-raw-v1:train:text",
    "c4": "allenai/c4@en:train:text",
}
ID = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<config>[^@:]+))?(?::(?P<split>[\w.-]+)(?::(?P<column>.+))?)?"
)
LINES = ("Salesforce/wikitext",)  # a row is a line of an article, not a document: rows stay together
IN_PART = {"allenai/c4": "en/*.00000-of-*"}  # files enough to calibrate on; the whole is hundreds of GB


@dataclass(frozen=True)
class Dataset:
    """`org/name[@config][:split[:column]]`, None where the text says nothing; once a split was opened, all it
    takes to open it again. revision: the commit."""

    repo: str
    config: str | None
    split: str
    column: str | None
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}@{self.config}:{self.split}:{self.column}"


def parse(text: str) -> Dataset | None:
    """The dataset `text` names, by alias or hub id; None if it has not the form of one."""
    match = ID.fullmatch(ALIASES.get(text, text))
    if match is None:
        return None
    return Dataset(match["repo"], match["config"], match["split"] or "train", match["column"])


def open_rows(
    wanted: Dataset, default_column: str, column: str, revision: str | None, seed: int, offline: bool
) -> tuple[Dataset, Iterator[tuple[str, Any]]]:
    """The dataset as it was found, and its rows as (place, value of the column), fetched as they are taken.

    Files come in seeded order, rows in the file's. `column` counts where the id names none; it may
    give way to a column of conversations where it is `default_column`. Raises QuantkitError for what
    the hub or the dataset does not have, also while rows are taken.
    """
    import datasets
    import huggingface_hub

    for library in (datasets, huggingface_hub):
        library.logging.set_verbosity_error()  # their warnings speak of caches and cards, to their authors
    offline = offline or datasets.config.HF_HUB_OFFLINE
    with _explained(wanted.repo):
        if offline:
            builder, commit = _cached(wanted, revision)
        else:  # given the commit, datasets asks neither for it again nor the dataset viewer, another host
            commit = hub.dataset_revision(wanted.repo, revision)
            builder = _builder(wanted, wanted.repo, commit)
        splits = builder.as_streaming_dataset()
        if wanted.split not in splits:
            raise QuantkitError(
                f"dataset {wanted.repo} has no split {wanted.split!r} (it has: {name_all(splits)})",
                hint=f"name one: {wanted.repo}:SPLIT",
                exit_code=USAGE,
            )
        stream = splits[wanted.split]
        names = stream.column_names or list(next(iter(stream.take(1)), {}))
    found = column_of(names, wanted.column or column, default_column)
    if found is None:
        raise QuantkitError(
            f"dataset {wanted.repo} has no column {wanted.column or column!r} (it has: {name_all(names)})",
            hint=f"name one: {wanted.repo}:{wanted.split}:COLUMN",
            exit_code=USAGE,
        )
    opened = replace(wanted, config=builder.config.name, column=found, revision=commit)
    return opened, _rows(stream, opened, seed)


def _rows(stream: Any, dataset: Dataset, seed: int) -> Iterator[tuple[str, Any]]:
    """Rows file by file. The order is made here: that of datasets' own shuffle changes with its version."""
    files = list(range(stream.num_shards))
    random.Random(seed).shuffle(files)
    number = 0
    for file in files:
        with _explained(dataset.repo):
            for row in stream.shard(stream.num_shards, file):
                number += 1
                yield f"{dataset.repo}:{dataset.split}, row {number} read", row.get(dataset.column)


def _cached(wanted: Dataset, revision: str | None) -> tuple[Any, str]:
    """From files fetched with `hf download`, else from what `datasets.load_dataset` prepared. No request."""
    import datasets
    from datasets.packaged_modules.cache.cache import Cache
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # A part of the files will do, so completeness is asked of the card alone.
        folder = snapshot_download(
            wanted.repo,
            repo_type="dataset",
            revision=revision,
            local_files_only=True,
            allow_patterns=["README.md"],
        )
        return _builder(wanted, folder, None), Path(folder).name
    except (LocalEntryNotFoundError, FileNotFoundError, datasets.exceptions.DatasetsError) as error:
        absent = error
    name = wanted.repo.partition("/")[2]
    try:
        builder = Cache(
            dataset_name=name, repo_id=wanted.repo, config_name=wanted.config, version="auto", hash="auto"
        )
        if revision in (None, builder.hash):
            return builder, builder.hash
    except ValueError:  # not there either
        pass
    part = f" --include README.md --include '{IN_PART[wanted.repo]}'" if wanted.repo in IN_PART else ""
    raise QuantkitError(
        f"dataset {wanted.repo} is not in the local cache",
        hint=f"fetch it once with a connection: hf download {wanted.repo} --repo-type dataset{part}",
        exit_code=NOT_FOUND,
    ) from absent


def _builder(wanted: Dataset, place: str, commit: str | None) -> Any:
    """What reads the dataset at `place`: its hub id or a folder. Data files only; no script is ever run."""
    import datasets

    try:
        return datasets.load_dataset_builder(place, wanted.config, revision=commit)
    except ValueError as error:
        names = datasets.get_dataset_config_names(place, revision=commit)
        if wanted.config in names:
            raise
        which = f"no config {wanted.config!r}" if wanted.config else "several configs"
        raise QuantkitError(
            f"dataset {wanted.repo} has {which} (it has: {name_all(names)})",
            hint=f"name one: {wanted.repo}@CONFIG:{wanted.split}",
            exit_code=USAGE,
        ) from error


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    import pyarrow
    from datasets.exceptions import DatasetGenerationError

    with hub.explained(repo, kind="dataset"):
        try:
            yield
        # RuntimeError is how datasets refuses a repository that needs its own script.
        except (RuntimeError, DatasetGenerationError, pyarrow.ArrowInvalid) as error:
            raise QuantkitError(
                f"dataset {repo} cannot be read: {first_line(error)}",
                hint="choose one that consists of data files (parquet, JSON, CSV or text)",
                exit_code=UNSUPPORTED,
            ) from error
