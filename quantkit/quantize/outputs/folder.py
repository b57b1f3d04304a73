"""A checkpoint folder: safetensors files, configuration, tokenizer, manifest and model card."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from quantkit import __version__
from quantkit.errors import count, name_all
from quantkit.inspection.names import split
from quantkit.layouts import Layout, LinearSpec
from quantkit.models.files import checksums, hub, safetensors_folder
from quantkit.models.files.checkpoint import MANIFEST, Checkpoint
from quantkit.models.files.reading import Slice
from quantkit.models.files.safetensors_folder import TensorInfo
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate.states import Place
from quantkit.quantize.outputs import Batches, Draft, Material, Planned, Sizes, Summary
from quantkit.quantize.progress import Progress
from quantkit.quantize.solvers import Solver

if TYPE_CHECKING:  # gguf takes a while to import, and few jobs need it
    from quantkit.models.gguf.imatrix import Imatrix

TIMINGS = "quantkit-timings.json"


class Output:
    """A checkpoint folder of staged blocks and the source's other tensors, which keep their bytes.

    needs: statistics of calibration text that the output itself uses. left_out: modules of the source that
    are not written, in bytes.
    """

    needs = frozenset()
    left_out: Mapping[str, int] = MappingProxyType({})

    def sizes(self, checkpoint: Checkpoint, specs: Sequence[LinearSpec], layout: Layout) -> Sizes:
        """Return exact sizes of the output, from shapes: the source with quantized linears."""
        rows = [spec for spec in specs if spec.grid]
        dense = {name for spec in rows for name in checkpoint.stored_as(f"{spec.name}.weight")}
        kept = (info for info in checkpoint.infos.values() if info.name not in dense)
        rest = sum(checkpoint.plain(info).nbytes for info in kept)
        quantized = sum(layout.nbytes(spec) for spec in rows)
        return Sizes(rest + quantized, quantized, sum(spec.weights for spec in rows))

    def parameters(self, skeleton: Skeleton) -> int:
        """Return the number of parameters in the output."""
        return skeleton.parameters

    def planned(self, checkpoint: Checkpoint, specs: Sequence[LinearSpec]) -> list[Planned]:
        """Return the format of every linear of the blocks, by the checkpoint's names."""
        return [
            Planned(
                split(row.name)[1],
                row.block,
                (row.out_features, row.in_features),
                row.grid.describe() if row.grid else f"16 bit ({row.kept})",
            )
            for row in specs
        ]

    def copied(self, material: Material) -> dict[str, int]:
        """Return modules next to the language model, copied byte for byte: name -> bytes."""
        return {one.name: one.nbytes for one in material.beside}

    def install_rest(
        self, material: Material, solver: Solver, batches: Batches, progress: Progress, place: Place
    ) -> None:
        """Install tensors outside the blocks as they will be stored, before the first block runs; hidden
        states wait at `place`. A folder stores them as read."""
        if copied := self.copied(material):
            progress.phase(f"copying byte for byte: {name_all(copied)}")

    def write(self, drafts: Sequence[Draft], imatrix: Imatrix | None, progress: Progress) -> None:
        """Write all but what `describe` adds, with the manifest. Folders are made one at a time; several
        GGUF files in one pass over the source."""
        (draft,) = drafts
        material, place = draft.material, draft.place
        place.mkdir()
        checkpoint = material.checkpoint
        infos = {name: checkpoint.plain(info) for name, info in material.untouched().items()}
        infos = _as_stored(checkpoint, infos | material.staging.tensors())
        safetensors_folder.write_folder(place, infos.values(), material.shard_bytes, checkpoint.data)
        checkpoint.write_companions(place)
        config = dict(checkpoint.raw_config, quantization_config=material.config)
        _write_json(place / "config.json", config)
        for name, content in material.files.items():
            _write_json(place / name, content)
        copied = self.copied(material)
        written = {"files": checksums.of_folder(place, ())}
        _write_json(place / MANIFEST, draft.manifest | written | ({"copied": copied} if copied else {}))

    def describe(self, draft: Draft, summary: Summary) -> None:
        """Add timings, which differ between equal jobs, and the model card, after verification."""
        record = {"seconds": summary.seconds, "steps_down": summary.steps_down}
        (draft.place / TIMINGS).write_text(json.dumps(record, indent=2) + "\n")
        (draft.place / "README.md").write_text(model_card(draft.material, draft.manifest, summary))


def _as_stored(checkpoint: Checkpoint, infos: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors, with the unchanged experts of a layer as the one stored tensor that clients look
    for."""
    layers: dict[str, list[str]] = {}
    for name, info in checkpoint.infos.items():
        if isinstance(info, Slice):
            layers.setdefault(re.sub(r"\.\d+\.(?!.*\.\d+\.).*", "", name), []).append(name)
    found, header = dict(infos), cache(safetensors_folder.read_header)
    for names in layers.values():
        if all(isinstance(infos.get(name), Slice) for name in names):
            for name in names:
                info = found.pop(name)
                if info.source not in found:
                    found[info.source] = header(info.file)[info.source]
    return found


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def model_card(material: Material, manifest: dict, summary: Summary) -> str:
    """Return the model card for the hub, made of card.md.jinja."""
    from jinja2 import StrictUndefined, Template

    local = Path(summary.source).exists() or not hub.is_id(summary.source)
    text = Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8")
    return Template(text, trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined).render(
        source=Path(summary.source).name if local else summary.source,
        name=Path(summary.output).name,
        summary=summary,
        job=manifest["job"],
        method=material.config["quant_method"],
        measured="output" if material.output_errors else "weight",
        version=__version__,
        count=count,
        megabytes=lambda nbytes: f"{nbytes / 1e6:,.1f} MB",
    )
