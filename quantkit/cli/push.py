"""Verify a checkpoint and upload it to the hub.

Examples:
  quantkit push ./model-gptq-w4g128 org/model-w4 --private
  quantkit push ./model-Q4_K_M.gguf org/model-GGUF --revision trial

The token comes from huggingface_hub: hf auth login, or the variable HF_TOKEN.
"""

from typing import Annotated, Any

import typer

from quantkit.cli import flags, streams
from quantkit.models.files import hub


@flags.command(shared=("as_json", "quiet"))
def command(
    path: Annotated[str, typer.Argument(help="Checkpoint folder or GGUF file that quantkit wrote.")],
    repo: Annotated[str, typer.Argument(help="Repository of the hub, ORG/NAME. It is created if need be.")],
    private: Annotated[
        bool, typer.Option("--private", help="Create a private repository; refuse one that is public.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to write. (default: main)")] = None,
    **values: Any,
) -> None:
    hub.check_target(repo)
    with streams.listener(values["quiet"]) as progress:
        with streams.uncollected():  # after the first line of progress: torch takes seconds
            from quantkit.inspection import publish
        progress.phase(f"verifying {path}, then sending it to {repo}")
        record = publish.push(path, repo, private, revision, progress.counting)
    streams.present(record, values["as_json"], lambda: print(f"published  {record['url']}"))
