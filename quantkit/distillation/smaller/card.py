"""What travels with the student: quantkit.json, how it came to be, and README.md, a model card."""

from __future__ import annotations

import json
from pathlib import Path

from quantkit import __version__
from quantkit.models.files import checksums, hub
from quantkit.models.files.checkpoint import MANIFEST, Checkpoint
from quantkit.tables import megabytes


def describe(teacher: Checkpoint, place: Path, record: dict, fingerprint: dict) -> None:
    """Write both into the folder. Nothing in them depends on time or place."""
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
    """The model card: what was left out, what it was trained on, what that gave."""
    local = Path(teacher.source).exists() or not hub.is_id(teacher.source)
    source = Path(teacher.source).name if local else teacher.source
    big, small, made = record["teacher"], record["student"], record["calibration"]
    name, published = Path(small["output"]).name, record["published"]
    blocks = ", ".join(map(str, record["chosen"]["blocks"]))
    rows = record["held_out"]["models"][1:]
    lines = [
        "---",
        f"base_model: {source}",
        "library_name: transformers",
        "tags:",
        "- distillation",
        "- quantkit",
        "---",
        "",
        f"# {name}",
        "",
        f"A student of {source} with {small['parameters']:,} of its {big['parameters']:,} parameters "
        f"({megabytes(small['bytes'])} of {megabytes(big['bytes'])}), made by quantkit {__version__}.",
        "",
        f"Blocks: {blocks} of {big['blocks']}, those whose absence changes the predictions most.",
    ]
    if small["width"]:
        lines.append(f"MLP channels: {small['width']} of {big['width']} in each, those that carry most.")
    steps = record["trained"]["best"]["step"]
    lines += [
        f"Trained for {steps} steps on the teacher's predictions for {made['source']} text."
        if published == "trained"
        else "Not trained: on held-out text training did not bring it closer to the teacher.",
        "",
        "| held-out text | perplexity | KL divergence from the teacher |",
        "| --- | ---: | ---: |",
        *(
            f"| {how} | {row['metrics']['ppl']['value']:.3f} | {row['metrics']['kld']['mean']:.5f} |"
            for how, row in zip(("as cut", "trained"), rows, strict=True)
        ),
        "",
        "`quantkit.json` holds every option, what each block was worth, and the hashes of teacher and text.",
        f"Measure it yourself: `quantkit eval {source} {name} --text TEXT`.",
    ]
    return "\n".join(lines) + "\n"
