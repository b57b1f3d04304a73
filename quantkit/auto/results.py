"""Makes outputs and measures them on held-out text."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quantkit.auto import allocation, cost
from quantkit.auto.job import RECIPE, Auto, prepare
from quantkit.auto.units import Choice, Preset, bits_per_weight, nbytes
from quantkit.errors import USAGE, QuantkitError
from quantkit.evaluation import evaluate
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import open_checkpoint
from quantkit.options import size_bytes
from quantkit.quantize import job, loop
from quantkit.quantize.prepare import finished
from quantkit.quantize.progress import SILENT, Progress
from quantkit.tables import megabytes

SEARCHED, UNIFORM, GGUF = "searched", "uniform", "gguf"  # folders of results
METRICS = frozenset({"ppl", "dppl", "kld", "top1"})
SIZES_TRIED = 6  # limit of results with --max-size; several are needed where small files weigh much
CLOSE = 0.9  # a result above this share of --max-kld is good enough


@dataclass(frozen=True)
class Made:
    """A measured output. written: its recipe. record: its JSON, with predicted_kld (sum of the units'
    losses), kld (measured on held-out text), output_bytes (all tensors) and disk_bytes (all files)."""

    preset: Preset
    path: Path
    written: str
    record: dict[str, Any]

    @property
    def kld(self) -> float:
        return self.record["kld"]


class Search:
    """Makes and measures outputs. losses: {(unit, candidate): added divergence}."""

    def __init__(self, auto: Auto, losses: allocation.Losses, progress: Progress):
        self._auto, self._losses, self._progress = auto, losses, progress
        self._prepared = auto  # the Auto whose source is hashed
        self._steps, self._most_steps = 1, cost.most_steps(auto)  # the first step measured sensitivities
        self._scale = 1.0  # of predictions
        size = auto.request.options.max_size
        self._limit = math.inf if size is None else size_bytes(size, "--max-size")

    def _next_step(self) -> None:
        self._steps += 1
        self._progress.step(self._steps, max(self._steps, self._most_steps))

    def with_cache(self) -> tuple[Auto, list[dict[str, Any]]]:
        """Choose the type of the KV cache with the least divergence of weights and cache together. Return the
        search with this type, and the `rooms` that hold the smallest weights, each with both divergences."""
        auto, losses = self._auto, self._losses
        models = self._evaluated([auto.job.checkpoint], auto.caches)
        measured = {model["kv"]["dtype"]: model["metrics"]["kld"]["mean"] for model in models[1:]}
        rooms = []
        smallest = sum(min(unit.candidates.values()) for unit in auto.units)
        for room in auto.rooms:
            if room["bytes"] >= smallest:
                predicted = self._predicted(allocation.within_bytes(auto.units, losses, room["bytes"]))
                rooms.append(room | {"predicted_kld": predicted, "cache_kld": measured[room["cache"]]})
        whole = [room for room in rooms if room["ctx"] == auto.rooms[0]["ctx"]]
        best = min(whole, key=lambda room: room["predicted_kld"] + room["cache_kld"])
        self._auto = replace(auto, cache=best["cache"])
        return self._auto, rooms

    def uniform(self, budget: int) -> Made | None:
        """Make the best preset within `budget` bytes; return None if all presets, or their files, are larger.

        Later predictions are multiplied by the preset's measured / predicted divergence, because the results
        are measured on other text than the units.
        """
        auto = self._auto
        fit = [preset for preset in auto.presets if nbytes(auto.units, preset.choice) <= budget]
        for preset in sorted(fit, key=lambda preset: (self._predicted(preset.choice), preset.name)):
            made = self._make(auto, preset, UNIFORM, self._predicted(preset.choice))
            if made.record["disk_bytes"] <= self._limit:
                self._scale = made.kld / max(made.record["predicted_kld"], 1e-30)
                return made
        return None

    def within_bytes(self, budget: int, uniform: Made | None) -> Made:
        """Make the best choice within `budget` bytes, and smaller ones while files exceed --max-size. Return
        `uniform` if the best choice is the same."""
        for attempt in range(SIZES_TRIED):
            choice = allocation.within_bytes(self._auto.units, self._losses, budget)
            if uniform and choice == uniform.preset.choice:
                return uniform
            made = self._made(choice)
            taken = made.record["disk_bytes"]
            if taken <= self._limit:
                return made
            budget -= (taken - self._limit) << attempt  # the recipe's size changes with the choice
        raise QuantkitError(f"the files take {megabytes(taken)} or more", "raise --max-size", USAGE)

    def within_divergence(self) -> list[Made]:
        """Make choices until the measured divergence is within --max-kld; return all, the best last. After
        each result, the bound for the predicted divergence is corrected by the error of the prediction."""
        most = bound = self._auto.request.options.max_kld
        tried: list[Made] = []
        least = allocation.least_loss(self._auto.units, self._losses)
        for _ in range(cost.CHOICES_TRIED):
            choice = allocation.within_loss(self._auto.units, self._losses, bound)
            if tried and choice == tried[-1].preset.choice:
                break
            tried.append(made := self._made(choice))
            if CLOSE * most <= made.kld <= most:
                break
            margin = 0.5 * (1 + CLOSE)
            bound = made.record["predicted_kld"] * most * margin / max(made.kld, 1e-30)
            bound = max(bound, least * (1 + 1e-9), 1e-30)
        if fit := [made for made in tried if made.kld <= most]:
            best = min(fit, key=lambda made: made.record["chosen_bytes"])
        else:
            self._progress.warn(f"no result stays within a divergence of {most:g}; the closest is kept")
            best = min(tried, key=lambda made: made.kld)
        if best is not tried[-1]:  # made again: the folder holds one result at a time
            tried.append(self._made(best.preset.choice))
        return tried

    def gguf(self, kept: Made) -> Made | None:
        """Make the largest of llama.cpp's presets within --max-size, else within the bytes of `kept`; return
        None if llama.cpp has no such file."""
        options = self._auto.request.options
        most = options.max_size or f"{kept.record['disk_bytes']}B"
        others = {"bpw": None, "max_kld": None, "gpu": None, "head": 0, "sym": True}
        options = replace(options, **others, max_size=most, engine="llama.cpp")
        request = replace(
            self._auto.request, options=options, output=self._auto.staging.folder / "preset.gguf"
        )
        try:
            auto = prepare(request, SILENT, dry_run=True)
            budget = auto.budget_bytes()
            fit = [preset for preset in auto.presets if nbytes(auto.units, preset.choice) <= budget]
            largest = max(fit, key=lambda preset: nbytes(auto.units, preset.choice), default=None)
            return largest and self._make(auto, largest, GGUF)
        except QuantkitError as error:  # llama.cpp does not read every model
            self._progress.warn(f"not compared with a GGUF file: {error.message}")
            return None

    def _predicted(self, choice: Choice) -> float:
        return self._scale * sum(self._losses[item] for item in choice.items())

    def _made(self, choice: Choice) -> Made:
        auto = self._auto
        preset = Preset(SEARCHED, choice, auto.space.values(auto.units, choice))
        return self._make(auto, preset, SEARCHED, self._predicted(choice))

    def _make(self, auto: Auto, preset: Preset, folder: str, predicted: float | None = None) -> Made:
        """Make a choice's output, unless it is finished, and compare it with the original in float32."""
        progress = self._progress
        bits = bits_per_weight(auto.units, preset.choice)
        described = f"{auto.request.source} at {bits:.3f} bits per weight for {auto.request.options.engine}"
        written = auto.recipe(preset.values, description=described, searched=self._prepared.searched)
        path = self._auto.staging.folder / folder / auto.output.name
        self._next_step()
        own = path.parent / RECIPE
        if not (own.exists() and own.read_text(encoding="utf-8") == written):  # of another choice
            shutil.rmtree(path.parent, ignore_errors=True)
            path.parent.mkdir()
            own.write_text(written, encoding="utf-8")
        request = auto.job_of(written, path)
        if not (auto.request.resume and finished.unlike(request) == []):
            progress.phase(f"making {preset.name}")
            loop.run([job.prepare(request, SILENT)], progress)  # `prepare` has warned of the model
        source = auto.job.checkpoint
        models = [source, open_checkpoint(str(path), trust_remote_code=source.trust_remote_code)]
        *_, measured = self._evaluated(models, (self._auto.cache,) if self._auto.cache else ())
        metrics, size = measured["metrics"], measured["size"]
        record = {
            "name": preset.name,
            "bits_per_weight": bits,
            "chosen_bytes": nbytes(auto.units, preset.choice),
            "bits_per_weight_model": size["bits_per_weight"],
            "output_bytes": size["weight_bytes"],
            "disk_bytes": size["disk_bytes"],
            "predicted_kld": predicted,
            "kld": metrics["kld"]["mean"],
            "kld_stderr": metrics["kld"]["stderr"],
            "ppl": metrics["ppl"]["value"],
        }
        return Made(preset, path, written, record)

    def _evaluated(self, models: Sequence[Checkpoint], caches: Sequence[str]) -> list[dict[str, Any]]:
        """Measure models in float32, also with types of the KV cache."""
        self._next_step()
        self._progress.phase("measuring on held-out text")
        device, listen = self._auto.job.skeleton.device, self._progress.evaluating
        asked = {"chosen": METRICS, "kv_dtypes": caches}
        measured = evaluate.evaluate(models, self._auto.windows, torch.float32, device, listen, **asked)
        return measured["models"]
