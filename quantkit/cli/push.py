"""Verify a checkpoint and upload it to the hub.

Examples:
  quantkit push ./model-gptq-w4g128 org/model-w4 --private
  quantkit push ./model-Q4_K_M.gguf org/model-GGUF --revision trial

The token comes from huggingface_hub: hf auth login, or the variable HF_TOKEN.
"""

from typing import Any

from quantkit.cli import flags, streams
from quantkit.models.files import hub


@flags.command(shared=("as_json", "quiet"))
def command(
    path: flags.argument("Checkpoint folder or GGUF file that quantkit wrote."),
    repo: flags.argument("Repository of the hub, ORG/NAME. It is created if need be."),
    private: flags.flag("Create a private repository; refuse one that is public.", bool, "--private") = False,
    revision: flags.flag("Branch to write. (default: main)") = None,
    **values: Any,
) -> None:
    hub.check_target(repo)
    with streams.listener(values["quiet"]) as progress:
        from quantkit.inspection import publish

        progress.phase(f"verifying {path}, then sending it to {repo}")
        record = publish.push(path, repo, private, revision, progress.counting)
    streams.present(record, values["as_json"], lambda: print(f"published  {record['url']}"))
