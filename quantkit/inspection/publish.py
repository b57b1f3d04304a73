"""Upload a verified checkpoint to the hub, with the token of huggingface_hub: `hf auth login` or HF_TOKEN."""

import glob
from pathlib import Path
from shlex import quote
from typing import Any

from quantkit.errors import (
    NOT_FOUND,
    RUNTIME,
    USAGE,
    VERIFICATION,
    QuantkitError,
    first_line,
    refuse_problems,
    require,
)
from quantkit.inspection import clients, look, verify
from quantkit.inspection.values import Listener
from quantkit.models.files import card, hub
from quantkit.models.files.headers import MANIFEST


def push(source: str, repo: str, private: bool, revision: str | None, listen: Listener) -> dict[str, Any]:
    """Verify a folder or GGUF file that quantkit wrote and upload it, without files that came later.

    An interrupted upload continues when it is called again: the hub keeps the parts that it has. Raises
    QuantkitError, before anything is sent, if there is no token, if the checkpoint is damaged, if its card
    names no base model or licence, or if `private` is set and the repository is public.
    """
    from huggingface_hub import HfApi, errors

    hub.check_target(repo)
    verified = verify.verify(source, None, listen)
    refuse_problems(verified, verified["problems"], VERIFICATION)
    require(verified["files"], f"{source} has no checksums", "push what quantkit wrote", USAGE)
    head, text = card.read(readme := card.path_of(Path(source)))
    card.check(head, readme)
    path, api, to = hub.local(source), HfApi(library_name="quantkit"), {"repo_id": repo, "revision": revision}
    how = f"- llama.cpp: `llama-server -hf {repo}`"
    if path.is_dir():
        how = clients.how_to_load(look.at(source)[0]["clients"], repo)
    card.write(readme, head, card.section(text, "load", how))
    try:
        api.create_repo(repo, private=private or None, exist_ok=True)
        public = private and not api.model_info(repo).private
        require(not public, f"{repo} is public", "make it private, or omit --private", USAGE)
        if revision:
            api.create_branch(repo, branch=revision, exist_ok=True)
        if path.is_file():
            for name in (row["name"] for row in verified["files"]):
                api.upload_file(path_or_fileobj=path.with_name(name), path_in_repo=name, **to)
            made = api.upload_file(path_or_fileobj=card.path_of(path), path_in_repo=card.CARD, **to)
        else:
            names = [MANIFEST, card.CARD, *(glob.escape(row["name"]) for row in verified["files"])]
            made = api.upload_folder(folder_path=path, allow_patterns=names, **to)
    except hub.faults() as error:
        unanswered = isinstance(error, errors.HTTPError) and not isinstance(error, errors.HfHubHTTPError)
        why, see = "the hub says", f"see that the token may write to {repo}"
        if unanswered:
            why, see = f"{api.endpoint} does not answer", "check the network"
        what, hint = f"{repo} was not written: {why}: {first_line(error)}", f"{see}; continue with: "
        hint += f"quantkit push {quote(source)} {repo}"
        raise QuantkitError(what, hint, NOT_FOUND if unanswered else RUNTIME) from error
    return {"schema": "quantkit.push/1", "source": source, "repo": repo, "url": made.commit_url}
