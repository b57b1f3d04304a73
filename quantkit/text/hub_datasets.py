"""Calibration datasets of the hub: streamed, not downloaded whole; read from the cache if offline."""

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.errors import NOT_FOUND, UNSUPPORTED, USAGE, QuantkitError, first_line, name_all, require
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


@dataclass(frozen=True)
class Dataset:
    """A dataset's split, as typed: `org/name[@config][:split[:column]]`. Parts not typed are None until
    `open_rows` fills them in. revision: the commit."""

    repo: str
    config: str | None
    split: str
    column: str | None
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}@{self.config}:{self.split}:{self.column}"


def parse(text: str) -> Dataset | None:
    """Parse an alias or hub id of a dataset; None if the text does not have this form."""
    match = ID.fullmatch(ALIASES.get(text, text))
    return match and Dataset(match["repo"], match["config"], match["split"] or "train", match["column"])


def open_rows(
    parsed: Dataset, column: str, revision: str | None, seed: int | None, offline: bool
) -> tuple[Dataset, Iterator[tuple[str, Any]]]:
    """Open a dataset; return it with all parts filled in, and an iterator over its rows: (where, values by
    column). Rows are downloaded while they are read.

    column: used if `parsed` names none. seed: order of the files; None: as listed. Raises
    QuantkitError for a missing repository, split or column, also while rows are read.
    """
    import datasets
    import huggingface_hub

    for library in (datasets, huggingface_hub):
        library.logging.set_verbosity_error()  # their warnings are not for users
    offline = offline or datasets.config.HF_HUB_OFFLINE
    with _explained(parsed.repo):
        if offline:
            folder = _cached(parsed.repo, revision)
            commit = folder.name
            builder = datasets.load_dataset_builder(str(folder), parsed.config)
        else:  # with a commit, datasets sends no requests to the dataset viewer, another host
            with hub.explained(parsed.repo, revision, kind="dataset"):
                api = huggingface_hub.HfApi()
                api.auth_check(parsed.repo, repo_type="dataset")  # dataset_info also works for gated ones
                commit = api.dataset_info(parsed.repo, revision=revision, timeout=30).sha
            builder = datasets.load_dataset_builder(parsed.repo, parsed.config, revision=commit)
        stream = builder.as_streaming_dataset(parsed.split)
        names = stream.column_names or list(next(iter(stream.take(1)), {}))
    requested = parsed.column or column
    column = column_of(names, requested)
    what = f"dataset {parsed.repo} has no column {requested!r} (it has: {name_all(names)})"
    require(column is not None, what, f"name one: {parsed.repo}:{parsed.split}:COLUMN", USAGE)
    opened = replace(parsed, config=builder.config.name, column=column, revision=commit)
    return opened, _rows(stream, opened, seed)


def _rows(stream: Any, dataset: Dataset, seed: int | None) -> Iterator[tuple[str, Any]]:
    """Yield (where, values by column) of all rows, file by file in an order given by the seed. The order of
    datasets' own shuffle depends on its version."""
    files = list(range(stream.num_shards))
    if seed is not None:
        random.Random(seed).shuffle(files)
    number = 0
    for file in files:
        with _explained(dataset.repo):
            for row in stream.shard(stream.num_shards, file):
                number += 1
                yield f"{dataset.repo}:{dataset.split}, row {number} read", {dataset.column: None} | row


def _cached(repo: str, revision: str | None) -> Path:
    """Return the cache's folder of a dataset that `hf download` has downloaded, at least in part."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        card = ["README.md"]  # the data files may be there only in part
        options = {"repo_type": "dataset", "local_files_only": True, "allow_patterns": card}
        return Path(snapshot_download(repo, revision=revision, **options))
    except (LocalEntryNotFoundError, FileNotFoundError) as error:
        hint = f"fetch it once with a connection: hf download {repo} --repo-type dataset"
        raise QuantkitError(f"dataset {repo} is not in the local cache", hint, NOT_FOUND) from error


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    import pyarrow
    from datasets.exceptions import DatasetGenerationError

    with hub.explained(repo, kind="dataset"):
        try:
            yield
        # RuntimeError is how datasets refuses a repository that needs its own script.
        except (RuntimeError, DatasetGenerationError, pyarrow.ArrowInvalid) as error:
            what = f"dataset {repo} cannot be read: {first_line(error)}"
            hint = "choose one that consists of data files (parquet, JSON, CSV or text)"
            raise QuantkitError(what, hint, UNSUPPORTED) from error
        except ValueError as error:  # datasets names the configs and splits that there are
            hint = f"name config, split and column: {repo}@CONFIG:SPLIT:COLUMN"
            raise QuantkitError(f"dataset {repo}: {first_line(error)}", hint, USAGE) from error
