"""Files that accompany the student: the manifest quantkit.json, and the model card README.md."""

from __future__ import annotations

import json
from pathlib import Path

from quantkit import __version__
from quantkit.evaluation.comparison.table import markdown
from quantkit.models.files import checksums, hub
from quantkit.models.files.checkpoint import MANIFEST, Checkpoint

NOT_TRAINED = "Not trained: on held-out text training did not bring it closer to the teacher."


def describe(teacher: Checkpoint, place: Path, record: dict, fingerprint: dict) -> None:
    """Write both files. Nothing in them depends on time or place."""
    manifest = {
        "schema": "quantkit.manifest/1",
        "quantkit": __version__,
        "source": {"name": Path(teacher.source).name, "sha256": fingerprint["source_sha256"]},
        "method": "distill",
        "job": fingerprint,
        "linears": [],
        "files": checksums.of_folder(place, ()),
        "distillation": {key: record[key] for key in ("chosen", "trained", "published", "held_out")},
    }
    (place / MANIFEST).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
    (place / "README.md").write_text(card(teacher, record))


def card(teacher: Checkpoint, record: dict) -> str:
    """Return the model card: kept blocks, training text and divergences."""
    local = Path(teacher.source).exists() or not hub.is_id(teacher.source)
    source = Path(teacher.source).name if local else teacher.source
    big, small = record["teacher"], record["student"]
    name, trained = Path(small["output"]).name, record["published"] == "trained"
    blocks = ", ".join(map(str, record["chosen"]["blocks"]))
    table = markdown(record["held_out"]).partition("\n")[2].strip()  # its heading is of quantkit eval
    steps, text = record["trained"]["best"]["step"], record["calibration"]["source"]
    return f"""---
base_model: {source}
library_name: transformers
tags:
- distillation
- quantkit
---

# {name}

A student of {source} with {small["parameters"]:,} of its {big["parameters"]:,} parameters, made by quantkit
{__version__}.

Blocks: {blocks} of {big["blocks"]}, those whose absence changes the predictions most.
{f"Trained for {steps} steps on the teacher's predictions for {text} text." if trained else NOT_TRAINED}

{table}

`quantkit.json` holds every option, the importance of each block, and the hashes of teacher and text.
Measure it yourself: `quantkit eval {source} {name} --text TEXT`.
"""
