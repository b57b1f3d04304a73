"""A checkpoint folder: safetensors files, configuration, tokenizer, manifest and model card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.models.checkpoint import MANIFEST
from quantkit.models.containers import safetensors_folder
from quantkit.quantize.finish import TIMINGS, Summary, manifest, merged
from quantkit.quantize.outputs import Planned, Sizes, model_card

if TYPE_CHECKING:
    from quantkit.layouts import Layout, LinearSpec
    from quantkit.models.checkpoint import Checkpoint
    from quantkit.quantize.job import Job
    from quantkit.quantize.progress import Progress


class FolderOutput:
    """See `outputs.Output`. What is not quantized keeps the bytes it had."""

    needs = frozenset()

    def sizes(self, checkpoint: Checkpoint, specs: Sequence[LinearSpec], layout: Layout) -> Sizes:
        """The source's bytes, with those of quantized linears exchanged."""
        rows = [spec for spec in specs if spec.grid]
        dense = {name for spec in rows for name in checkpoint.stored_as(f"{spec.name}.weight")}
        kept = (info for info in checkpoint.infos.values() if info.name not in dense)
        rest = sum(checkpoint.plain(info).nbytes for info in kept)
        quantized = sum(layout.nbytes(spec) for spec in rows)
        return Sizes(rest + quantized, quantized, sum(spec.weights for spec in rows))

    def planned(self, job: Job) -> list[Planned]:
        """The linears of the blocks."""
        return [
            Planned(
                row.local,
                row.block,
                (row.out_features, row.in_features),
                row.grid.describe() if row.grid else f"16 bit ({row.kept})",
            )
            for row in job.specs
        ]

    def install_rest(self, job: Job, progress: Progress) -> None:
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
        record = {"seconds": summary.seconds, "steps_down": summary.steps_down}
        (place / TIMINGS).write_text(json.dumps(record, indent=2) + "\n")
        (place / "README.md").write_text(model_card.render(job, summary))


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
