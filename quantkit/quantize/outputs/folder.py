"""A checkpoint folder: safetensors files, configuration, tokenizer, manifest and model card."""

from __future__ import annotations

import filecmp
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantkit import __version__
from quantkit.errors import QuantkitError, count, name_all
from quantkit.inspection import clients
from quantkit.inspection.names import split
from quantkit.inspection.record import describe
from quantkit.layouts import Layout, LinearSpec
from quantkit.models.files import card, gguf_shards, safetensors_folder, untrusted
from quantkit.models.files.checkpoint import MANIFEST, Checkpoint
from quantkit.models.files.headers import Contents, open_contents
from quantkit.models.files.reading import Computed, stacked
from quantkit.models.files.safetensors_folder import INDEX, TensorInfo
from quantkit.models.machine.device import machine_of
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.outputs import Draft, Material, MeasureHead, Planned, Sizes, Summary, outside
from quantkit.quantize.progress import Progress
from quantkit.quantize.solvers import Solver
from quantkit.tables import megabytes

TIMINGS = "quantkit-timings.json"
RECIPE_RUN = ("exclude", "override", "experts", "allow_requantize", "max_shard_gb")


class Output:
    """A checkpoint folder with the staged blocks and the source's other tensors, byte for byte. needs:
    statistics of calibration text that the output uses."""

    needs = frozenset()

    def of_job(self, checkpoint: Checkpoint, specs: Sequence[LinearSpec]) -> Output:
        """Return the output of a job with these linears."""
        return self

    def sizes(self, checkpoint: Checkpoint, specs: Sequence[LinearSpec], layout: Layout) -> Sizes:
        """Return the exact sizes of the output, computed from shapes."""
        coded = [spec for spec in specs if spec.grid]
        rest = sum(checkpoint.plain(info).nbytes for info in _copied(checkpoint, specs))
        nbytes = sum(map(layout.nbytes, coded))
        return Sizes(rest + nbytes, nbytes, sum(spec.weights for spec in coded), len(coded))

    def growth(self, checkpoint: Checkpoint, specs: Sequence[LinearSpec]) -> str:
        """Return a sentence on tensors that the source stores in fewer bits than the output; "" if none."""
        pairs = [(info, checkpoint.plain(info)) for info in _copied(checkpoint, specs)]
        grown = [pair for pair in pairs if pair[1].nbytes > pair[0].nbytes]
        if not grown:
            return ""
        sizes, types = [], []
        for side in zip(*grown, strict=True):
            sizes.append(megabytes(sum(info.nbytes for info in side)))
            types.append(name_all(sorted({info.dtype for info in side})))
        names = name_all([info.name.removesuffix(".weight") for info, _ in grown], 3)
        return f"{names}: {types[0]} in the source, {types[1]} in the output ({sizes[0]} → {sizes[1]})"

    def paths(self, material: Material) -> list[Path]:
        """Return the path of the folder."""
        return [material.staging.output]

    def parameters(self, skeleton: Skeleton) -> int:
        """Return the number of parameters in the output."""
        return skeleton.parameters

    def planned(self, specs: Sequence[LinearSpec]) -> list[Planned]:
        """Return every linear of the blocks with its format, by the checkpoint's names."""
        planned = []
        for spec in specs:
            becomes = f"16 bit ({spec.kept})"
            if spec.grid:
                becomes = spec.grid.describe().replace(f"groups of {spec.in_features}", "whole rows")
            _, block, local = split(spec.name)
            planned.append(Planned(local, block, (spec.out_features, spec.in_features), becomes))
        return planned

    def install_rest(
        self, material: Material, solver: Solver, measure_head: MeasureHead, progress: Progress
    ) -> None:
        """Install tensors outside the blocks as the output stores them, before the first block runs. A folder
        stores all but the embedding unchanged."""
        if material.outside:
            progress.phase(f"copying byte for byte: {name_all(material.modules)}")
        for row in (row for row in material.specs if row.embedding):
            outside.install_embedding(row, material, solver, measure_head, progress)

    def write(self, drafts: Sequence[Draft], progress: Progress) -> None:
        """Write the output, except for what `sign` and `describe` add. Folders are written one at a time,
        several GGUF files in one pass over the source."""
        (draft,) = drafts
        material, path = draft.material, draft.material.staging.assembled
        path.mkdir()
        checkpoint = material.checkpoint
        infos = {name: checkpoint.plain(info) for name, info in material.untouched().items()}
        infos = _as_stored(checkpoint, infos | material.staging.tensors())
        infos = stacked(infos, material.layout.stacks(infos))
        safetensors_folder.write_folder(path, infos.values(), material.shard_bytes, checkpoint.data)
        _write_small(material, path)
        material.staging.sum_up()

    def unlike(self, material: Material, made: Contents) -> Iterator[str]:
        """Yield problems of a finished output: files besides tensors that the job writes otherwise."""
        weights = {info.file.name for info in made.infos.values()} | {MANIFEST, TIMINGS, INDEX}
        given = {name for name in made.files.keys() - weights if not (name[0] == "." or name.endswith(".md"))}
        with tempfile.TemporaryDirectory() as folder:
            again = Path(folder)
            _write_small(material, again)
            files = (path for path in untrusted.entries(again) if path.is_file())
            written = {path.relative_to(again).as_posix() for path in files}
            for name in sorted(written | given):
                here = (again if name in written else material.checkpoint.folder) / name
                if not here.is_file():
                    yield f"{name} was added: it is in neither the source nor the job"
                elif name not in made.files:
                    if not name.endswith(".py"):  # copied with --trust-remote-code alone
                        yield f"{name} is absent"
                elif not filecmp.cmp(here, made.path / name, shallow=False):
                    yield f"{name}{_differing(here, made.path / name)} is not as the job writes it"

    def sign(self, draft: Draft, **more: Any) -> None:
        """Write the manifest, `more` and the checksums, which `write` has begun to compute."""
        staging, copied = draft.material.staging, draft.material.modules
        written = {"files": staging.sums.result()} | ({"copied": copied} if copied else {})
        write_json(staging.assembled / MANIFEST, draft.manifest | written | more)

    def describe(self, draft: Draft, summary: Summary) -> None:
        """Add manifest, timings (they vary between equal jobs) and card. Called after verification."""
        path = draft.material.staging.assembled
        self.sign(draft, loss=summary.loss and asdict(summary.loss))
        record = {"seconds": summary.seconds, "steps_down": summary.steps_down}
        record["machine"] = machine_of(draft.material.skeleton.device)
        (path / TIMINGS).write_text(json.dumps(record, indent=2) + "\n")
        card.write(path / card.CARD, *model_card(path, draft, summary))


def _write_small(material: Material, path: Path) -> None:
    """Write configuration, tokenizer and the other files beside the weights."""
    material.checkpoint.write_companions(path)
    config = material.layout.configured(material.checkpoint.raw_config, material.config)
    for name, content in {"config.json": config, **material.files}.items():
        write_json(path / name, content)


def _differing(*paths: Path) -> str:
    """Return the keys that differ in two JSON files, for a message; "" for other files."""
    try:
        one, other = (untrusted.parse_object(untrusted.read(path), path.name) for path in paths)
    except (QuantkitError, ValueError):
        return ""
    return f" ({name_all(sorted(key for key in one | other if one.get(key) != other.get(key)), 3)})"


def _copied(checkpoint: Checkpoint, specs: Sequence[LinearSpec]) -> list[TensorInfo]:
    coded = [spec for spec in specs if spec.grid]
    dense = {name for spec in coded for name in checkpoint.stored_as(f"{spec.name}.weight")}
    return [info for info in checkpoint.infos.values() if info.name not in dense]


def _as_stored(checkpoint: Checkpoint, infos: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors; unchanged experts that the source stacks become its stacked tensor again."""
    layers: dict[str, list[str]] = {}
    for name, info in checkpoint.infos.items():
        if isinstance(info, Computed) and info.whole:
            layers.setdefault(re.sub(r"\.\d+\.(?!.*\.\d+\.).*", "", name), []).append(name)
    tensors = dict(infos)
    for names in layers.values():
        if all(infos.get(name) is checkpoint.infos[name] for name in names):
            for name in names:
                whole = tensors.pop(name).whole
                tensors[whole.name] = whole
    return tensors


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def model_card(path: Path, draft: Draft, summary: Summary) -> tuple[dict[str, Any], str]:
    """Return head and text (from card.md.jinja) of the model card for the hub. path: of the output."""
    from jinja2 import StrictUndefined, Template

    checkpoint, name = draft.material.checkpoint, Path(summary.output).name
    base, loaded_by = card.base_of(summary.source, checkpoint.folder), describe(open_contents(str(path)))
    layout = "gguf" if path.is_file() else draft.material.config["quant_method"]
    template = Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8")
    text = Template(template, trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined).render(
        source=base or Path(summary.source).name,
        name=name,
        files=gguf_shards.of(Path(name)),
        summary=summary,
        job=draft.manifest["job"],
        recipe=recipe_of(draft.manifest),
        load=clients.how_to_load(loaded_by["clients"], name),
        manifest="The metadata" if path.is_file() else f"`{MANIFEST}`",
        version=__version__,
        count=count,
        megabytes=megabytes,
    )
    return card.head(base, layout, checkpoint.folder), text


def recipe_of(manifest: dict) -> str:
    """Return the job as a recipe for `quantkit run`."""
    import yaml

    job, calibration = manifest["job"], manifest["job"]["calibration"]
    left_out = {"like"}  # the hash of a file
    if any("does not divide" in (row.get("kept") or "") for row in manifest["linears"]):
        left_out.add("group_size")  # given, it would refuse the linears that it does not divide
    recipe = {
        "method": manifest["method"],
        "quant": {key: value for key, value in job["options"].items() if key not in left_out},
        "run": {key: job[key] for key in RECIPE_RUN if job.get(key)} | {"dtype": job["execution"]["dtype"]},
    }
    if calibration:
        names = ["samples", "seqlen", "seed"] + ["text_column"] * ("text_column" in calibration)
        text = {} if calibration["source"] == "shipped" else {"calibration": calibration["source"]}
        recipe["calibration"] = text | {key: calibration[key] for key in names}
    return yaml.safe_dump({key: value for key, value in recipe.items() if value}, sort_keys=False)
