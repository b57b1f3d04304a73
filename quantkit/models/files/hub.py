"""Turn a path or a hub id that the user typed into a local folder."""

import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from quantkit.errors import NOT_FOUND, USAGE, QuantkitError, first_line, require
from quantkit.models.files import gguf_shards, untrusted
from quantkit.models.files.safetensors_folder import INDEX, SINGLE, read_index


def is_id(source: str) -> bool:
    """Return whether the text has the form of a hub id, `OWNER/NAME`."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None and not source.startswith((".", "/"))


def faults() -> tuple[type[Exception], ...]:
    """Return the classes of errors by which huggingface_hub reports a request that failed."""
    from huggingface_hub import errors

    # HTTPError: the HTTP library's own base class. OIDCError: of newer versions
    return OSError, ValueError, errors.HTTPError, getattr(errors, "OIDCError", errors.HTTPError)


def check_target(repo: str, offline: bool = False) -> None:
    """Raise QuantkitError unless a repository may have this name, the hub may be reached, and there is a
    token to write to it. offline: as --offline says."""
    from huggingface_hub import constants, errors, get_token, utils

    try:
        utils.validate_repo_id(repo if is_id(repo) else "")
    except errors.HFValidationError as error:
        raise QuantkitError(f"{repo} is not the name of a repository", "write ORG/NAME", USAGE) from error
    hint = "leave out --offline" if offline else "unset HF_HUB_OFFLINE"
    require(not (offline or constants.HF_HUB_OFFLINE), f"{repo} cannot be written offline", hint, NOT_FOUND)
    try:
        token = get_token()
    except faults() as error:
        what, hint = f"no token for the hub: {first_line(error)}", "type hf auth login, or set HF_TOKEN"
        if "HF_OIDC_RESOURCE" in os.environ:
            hint = "unset HF_OIDC_RESOURCE, or run in the CI job that the hub trusts"
        raise QuantkitError(
            what, hint, NOT_FOUND if isinstance(error, errors.HTTPError) else USAGE
        ) from error
    require(token, "there is no token for the hub", "type hf auth login, or set HF_TOKEN", USAGE)


def resolve(source: str, revision: str | None = None, offline: bool = False) -> Path:
    """Return the local folder or GGUF file `source`; for a hub id, the folder of a downloaded snapshot.

    Small files are downloaded first, then the weights that the index names, or the single weight file, and
    named chat templates. Other copies of the weights, such as `consolidated.safetensors` or those in
    subfolders, are not downloaded. The token comes from the environment (`HF_TOKEN` or `hf auth login`),
    never from an argument. Raises QuantkitError (exit code 3) if `source` does not exist or the hub cannot be
    reached.
    """
    if path := local(source, revision):
        return path
    from huggingface_hub import snapshot_download

    fetch = partial(snapshot_download, source, local_files_only=offline)
    with explained(source, revision, offline):
        small = list(untrusted.FETCHED)
        folder = Path(fetch(revision=revision, allow_patterns=small, ignore_patterns=["*/*"]))
        untrusted.refuse_folder(folder)  # before gigabytes are fetched
        index = folder / INDEX
        weights = sorted(set(read_index(index).values())) if index.is_file() else []
        wanted = [*map(glob.escape, weights or [SINGLE]), untrusted.NAMED_TEMPLATES]
        fetch(revision=folder.name, allow_patterns=wanted)  # the folder's name is the commit
        untrusted.refuse_folder(folder)
        return folder


def local(source: str, revision: str | None = None) -> Path | None:
    """Return the path (of shards the first), or None for a hub id. Raises QuantkitError for other texts, and
    for a path with a revision."""
    path = gguf_shards.first(Path(source).expanduser())
    what = f"--revision {revision} is for repositories of the hub, {source} is on this machine"
    require(revision is None or not path.exists(), what, "leave it out", USAGE)
    if path.is_dir():
        untrusted.refuse_folder(path)
        return path
    if path.is_file():
        with open(path, "rb") as file:
            is_gguf = file.read(4) == b"GGUF" or path.suffix == ".gguf"
        if is_gguf:
            return path
    what = f"{source} is a file"
    require(not path.exists(), what, "give the folder that holds config.json, or a GGUF file", NOT_FOUND)
    require(not source.endswith(".gguf"), f"no such file: {source}", "check the path", NOT_FOUND)
    hint = "give a local checkpoint folder, or a hub id of the form OWNER/NAME"
    require(is_id(source), f"no such folder: {source}", hint, NOT_FOUND)
    return None


@contextmanager
def explained(
    repo: str, revision: str | None = None, offline: bool = False, kind: str = "model"
) -> Iterator[None]:
    """Turn huggingface_hub's errors about a repository into QuantkitError (exit code 3) with a hint."""
    from huggingface_hub import errors as hub

    of_dataset = ("dataset ", "file", " --repo-type dataset")
    noun, local, option = of_dataset if kind == "dataset" else ("", "folder", "")
    try:
        yield
    except hub.GatedRepoError as error:
        hint = "accept its terms on the hub and set HF_TOKEN"
        raise QuantkitError(f"{repo} is gated", hint, NOT_FOUND) from error
    except (hub.RepositoryNotFoundError, hub.RevisionNotFoundError) as error:
        where = f"{repo} at revision {revision}" if revision else repo
        hint = "check the spelling; for a private repository set HF_TOKEN"
        raise QuantkitError(f"the hub has no {noun}{where}, or it is private", hint, NOT_FOUND) from error
    except faults() as error:
        why = "is not in the local cache" if offline else "could not be fetched"
        what = f"{repo} is not a local {local} and {why}: {first_line(error)}"
        hint = f"give a local {local}, or fetch it once with a connection: hf download {repo}{option}"
        raise QuantkitError(what, hint, NOT_FOUND) from error
