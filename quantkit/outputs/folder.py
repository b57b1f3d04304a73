"""A checkpoint folder: safetensors files, configuration, tokenizer, manifest and model card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit import model_card
from quantkit.containers import safetensors_folder
from quantkit.finish import MANIFEST, TIMINGS, Summary, manifest, merged

if TYPE_CHECKING:
    from quantkit.checkpoint import Checkpoint
    from quantkit.job import Job
    from quantkit.skeleton import Skeleton
    from quantkit.spec import LinearSpec


class FolderOutput:
    """See `outputs.Output`. What is not quantized keeps the bytes it had."""

    def rest_bytes(self, checkpoint: Checkpoint, specs: Sequence[LinearSpec]) -> int:
        """The source's bytes, less those of the linears that are quantized."""
        dense = {name for spec in specs if spec.grid for name in checkpoint.stored_as(f"{spec.name}.weight")}
        return sum(
            checkpoint.plain(info).nbytes for info in checkpoint.infos.values() if info.name not in dense
        )

    def install_rest(self, skeleton: Skeleton) -> None:
        """It is stored as it was read."""

    def write(self, job: Job, place: Path, records: Sequence[dict]) -> None:
        """The folder without what `describe` adds."""
        place.mkdir()
        shard_bytes = int(job.request.run.max_shard_gb * 1e9)
        safetensors_folder.write_folder(place, merged(job).values(), shard_bytes, job.checkpoint.data)
        job.checkpoint.write_companions(place)
        config = dict(job.checkpoint.raw_config, quantization_config=job.method.layout.config(job.specs))
        _write_json(place / "config.json", config)
        for name, content in job.method.layout.files(job.specs).items():
            _write_json(place / name, content)
        _write_json(place / MANIFEST, manifest(job, records))

    def describe(self, job: Job, place: Path, summary: Summary) -> None:
        """Timings, which are outside the promise of equal bytes, and the model card."""
        (place / TIMINGS).write_text(json.dumps({"seconds": summary.seconds}, indent=2) + "\n")
        (place / "README.md").write_text(model_card.render(job, summary))


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
