"""Prepares a search: checks model, engine and texts before weights are loaded."""

import hashlib
import itertools
import json
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit import __version__
from quantkit.auto import allocation
from quantkit.auto.engines import ENGINES, Space
from quantkit.auto.options import AutoOptions, AutoRequest
from quantkit.auto.units import Preset, Unit, nbytes, usual
from quantkit.capacity import source
from quantkit.capacity.job import python_bytes
from quantkit.capacity.question import Question
from quantkit.errors import UNSUPPORTED, USAGE, require
from quantkit.evaluation import windows as windows_of
from quantkit.evaluation.windows import Windows
from quantkit.models import kv_types
from quantkit.models.files import gguf_shards, headers
from quantkit.models.machine.device import free_memory
from quantkit.options import MOST, size_bytes
from quantkit.quantize import job
from quantkit.quantize.calibrate import LOGITS_BYTES, LOGITS_TOKENS
from quantkit.quantize.job import Job
from quantkit.quantize.prepare import finished, linears, recipe
from quantkit.quantize.prepare.memory import LOGITS
from quantkit.quantize.prepare.request import Request
from quantkit.quantize.prepare.shapes import FLOAT32
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging import may_replace
from quantkit.quantize.staging.folder import SENSITIVITIES, Staging
from quantkit.text.calibration import HELD_OUT, MOST_HELD_OUT, hold_out

DEFAULTS = {f"quant.{name}": getattr(AutoOptions, name) for name in ("solver", "target", "head")}
STATISTICS_TOKENS = 32768  # maximum of tokens for Hessians
LEAST_TOKENS = 1000  # measured on fewer tokens, sensitivities and comparisons are chance
MEASURED_IN = "float32"  # rounding hidden states to 16 bit adds divergence, which hides the gain of more bits
KEPT_IN = torch.bfloat16  # type of the usual weights; much finer than the candidates' rounding
# Manifest and model card, whose recipe names many linears, in all and per linear: SmolLM2's 210 take 207 kB.
MANIFEST_BYTES, LINEAR_BYTES = 6144, 1152
RECIPE = "recipe.yaml"  # of each choice, and a copy of --recipe-out, so that --resume knows the file
STREAMS_SHARE = 0.25  # share of the free memory for streams


@dataclass(frozen=True)
class Auto:
    """A prepared search. job: a quantization job, which lists the linears. windows: text to measure results
    on. tokens: ids `[sequences, tokens]` to measure units on. statistics: other ids, for the solver's
    Hessians. held_out: number of calibration sequences used as `windows`. cache: chosen type of the KV cache
    with --gpu; None: the smallest."""

    request: AutoRequest
    space: Space
    job: Job
    units: list[Unit]
    presets: list[Preset]
    windows: Windows
    tokens: Tensor
    statistics: Tensor
    output: Path
    held_out: int
    cache: str | None = None

    @cached_property
    def staging(self) -> Staging:
        """The unfinished search's folder. Hints say how a new search reads its sensitivities."""
        staging = Staging(self.output, self.space.method.name == "gguf", ending="auto")
        table = staging.folder / SENSITIVITIES
        staging.anew += f" --sensitivities {shlex.quote(str(table))}" if table.exists() else ""
        return staging

    @property
    def table(self) -> Path:
        """Return the path of the unfinished search's sensitivities."""
        return self.staging.folder / SENSITIVITIES

    @cached_property
    def searched(self) -> str:
        """Return the hash that the manifest of the result keeps, so that --resume knows the search."""
        decisive = {key: value for key, value in self.fingerprint.items() if key != "quantkit"}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()

    @cached_property
    def is_finished(self) -> bool:
        """Whether --resume finds the output finished. Raises QuantkitError if another job made the output."""
        path, options = gguf_shards.first(self.output), self.request.options
        if not self.request.resume or not path.exists():
            return False
        if self.request.overwrite:  # as for other jobs, a finished output is this command's
            return not self.staging.folder.exists()
        same = (headers.at(str(path), path).manifest or {}).get("searched") == self.searched
        finished.refuse_other(path, [] if same else ["options, model or texts of the search"])
        for more in filter(None, (options.recipe_out, options.sensitivities)):
            hint = f"leave {more} out, or search again with --overwrite"
            require(more.exists(), f"{path} is finished, but {more} was not written", hint, USAGE)
        return True

    def check_output(self) -> None:
        """Raise QuantkitError unless the result, the recipe and the table may be written."""
        if self.is_finished:
            return
        self.staging.check(self.request.resume, self.request.overwrite)
        options, hint = self.request.options, "choose another path"
        for path in filter(None, (options.recipe_out, options.sensitivities)):
            what = f"{path} cannot be written: it is no file in an existing folder"
            require(path.absolute().parent.is_dir() and not path.is_dir(), what, hint, USAGE)
        if recipe := options.recipe_out:
            inside = recipe.resolve().is_relative_to(self.job.checkpoint.folder.resolve())
            require(not inside, f"{recipe} is part of the source", hint, USAGE)
        self.check_recipe()

    def check_recipe(self) -> None:
        """Raise QuantkitError if the recipe would replace a file that this search did not write."""
        recipe, own = self.request.options.recipe_out, self.staging.folder / RECIPE
        if recipe and recipe.exists() and not self.request.overwrite:
            same = own.is_file() and recipe.is_file() and own.read_bytes() == recipe.read_bytes()
            hint = "choose another --recipe-out, or replace it with --overwrite"
            require(same, f"{recipe} exists", hint, USAGE)

    @property
    def weights(self) -> int:
        """Return the number of weights of all units."""
        return sum(unit.weights for unit in self.units)

    @cached_property
    def fixed_bytes(self) -> int:
        """Return the bytes of the output except the units' tensors, manifest and model card."""
        preset = self.presets[0]
        request = self.job_of(self.recipe(preset.values), self.output)
        planned = job.prepare(request, Progress(), dry_run=True)
        source = self.job.checkpoint
        companions = source.disk_bytes - sum(info.nbytes for info in source.infos.values())
        return planned.plan.output_bytes - nbytes(self.units, preset.choice) + max(0, companions)

    @property
    def files_bytes(self) -> int:
        """Return the bytes of the output except the units' tensors, with an estimate of manifest and card."""
        manifest = MANIFEST_BYTES + LINEAR_BYTES * len(self.job.specs)
        return self.fixed_bytes + (0 if self.space.method.name == "gguf" else manifest)

    def recipe(self, values: Mapping[str, Any], description: str = "", searched: str = "") -> str:
        """Return the recipe as YAML. values: of a choice, by dotted keys. searched: hash of the search. The
        recipe also names the solver and excludes held-out calibration sequences."""
        import yaml

        options, typed = self.request.options, dict(self.request.typed)
        changed = {key: getattr(options, key.partition(".")[2]) for key in DEFAULTS}
        changed = {key: value for key, value in changed.items() if value != DEFAULTS[key]}
        if kept := linears.undivided(self.job.specs):
            names = (f"^{re.escape(spec.name)}$" for spec in kept)
            typed["run.exclude"] = (*typed.get("run.exclude", ()), *names)
        if self.held_out:
            changed["calibration.samples"] = len(self.job.calibration.tokens) - self.held_out
        content: dict[str, Any] = {
            "method": self.space.method.name, "description": description, "model": self.request.source,
        }  # fmt: skip
        for key, value in {**typed, **changed, **values}.items():
            section, _, name = key.partition(".")
            content.setdefault(section, {})[name] = list(value) if isinstance(value, tuple) else value
        content["searched"] = searched
        head = "# Made by quantkit auto; repeat it with: quantkit run FILE\n"
        return head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1000)

    def job_of(self, written: str, output: Path) -> Request:
        """Return the request that `quantkit run` would make of the recipe `written`."""
        request, unfinished = self.request, output.with_name(f"{output.name}.partial")
        parsed, typed = recipe.parse("", "the recipe", written), {"output": str(output)}
        return recipe.merge(parsed, (), typed, resume=unfinished.exists(), overwrite=True, **request.opening)

    @cached_property
    def streams(self) -> int:
        """Return the maximum number of streams (see unit_divergence.py) in memory."""
        fit = int(STREAMS_SHARE * free_memory(self.job.skeleton.device) / self._stream_bytes)
        return max(1, min(self.request.options.search_streams, fit))

    @property
    def _stream_bytes(self) -> int:
        skeleton = self.job.skeleton
        return self.tokens.numel() * skeleton.checkpoint.text_config.hidden_size * skeleton.dtype.itemsize

    def needs(self) -> dict[str, int]:
        """Return predicted peaks in bytes: `memory_bytes` on the device, `host_bytes` in host memory and
        `python_bytes` on top of these, `disk_bytes` for temporary files."""
        plan, skeleton = self.job.plan, self.job.skeleton
        loaded = sum(weight.numel() for weight in {module.weight for module in skeleton.rows_away()})
        loaded += sum(unit.weights for unit in self.units if unit.block is None)  # their measured candidates
        vocabulary = skeleton.checkpoint.text_config.vocab_size
        search = min(self.streams, len(self.units)) * self._stream_bytes + loaded * skeleton.dtype.itemsize
        search += LOGITS * min(LOGITS_BYTES, FLOAT32 * LOGITS_TOKENS * vocabulary)
        waiting = KEPT_IN.itemsize * sum(unit.weights for unit in self.units if unit.block is not None)
        budget = min(self.expected_bytes(), self.most_bytes)
        results = 3 if self.request.options.engine == "any" else 2
        made = results * (budget + self.fixed_bytes) + budget
        return {
            "memory_bytes": plan.memory_bytes + search,
            "python_bytes": python_bytes(vocabulary, skeleton.checkpoint.folder.is_file()),
            "host_bytes": plan.host_bytes + (search if plan.execution.device == "cpu" else 0),
            "disk_bytes": max(waiting, made),
        }

    @cached_property
    def caches(self) -> tuple[str, ...]:
        """Return the types of the KV cache that the engine has for this model."""
        config = self.job.checkpoint.text_config
        return tuple(name for name in self.space.caches if kv_types.fits(config, name))

    @cached_property
    def rooms(self) -> list[dict[str, Any]]:
        """Return the bytes that fit the device of --gpu next to the KV cache, for all units: for the whole
        context, then half of it, and each type of the cache. Activations get the share that plan leaves."""
        options, checkpoint, rooms = self.request.options, self.job.checkpoint, []
        whole = options.ctx or min(windows_of.DEFAULT_CONTEXT, checkpoint.context or MOST)
        for ctx, cache in itertools.product((whole, whole // 2), self.caches):
            each = source.cache_bytes(checkpoint.folder, ctx, cache)
            require(each is not None, "the KV cache of this model is unknown", "give --max-size", UNSUPPORTED)
            left = Question(gpu=options.gpu).memory - options.batch * each - self.fixed_bytes
            room = min(left, self.most_bytes)
            rooms.append({"ctx": ctx, "cache": cache, "bytes": room, "bits": max(0, 8 * room / self.weights)})
        return rooms

    def budget_bytes(self) -> int | None:
        """Return the bytes that all units may take; None with --max-kld."""
        options = self.request.options
        if options.gpu is not None:
            rooms = self.rooms[: len(self.caches)]
            return max(room["bytes"] for room in rooms if self.cache in (None, room["cache"]))
        if options.bpw is not None:
            return int(options.bpw * self.weights / 8)
        if options.max_size is not None:
            return size_bytes(options.max_size, "--max-size") - self.files_bytes
        return None

    def expected_bytes(self) -> int:
        """Return the budget; with --max-kld, whose result is not known yet, the bytes of usual candidates."""
        budget = self.budget_bytes()
        usual_bytes = nbytes(self.units, {unit.name: usual(unit) for unit in self.units})
        return usual_bytes if budget is None else budget

    @property
    def most_bytes(self) -> int:
        """Return the bytes of the largest candidates of all units."""
        return sum(max(unit.candidates.values()) for unit in self.units)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return all that a table of sensitivities depends on, as JSON; a saved table must have the same."""
        options = self.request.options
        candidates = [[unit.name, [*unit.candidates]] for unit in self.units]
        run = self.job.request.run
        identity = {
            "quantkit": __version__,
            "source_sha256": self.job.checkpoint.sha256(),
            "engine": options.engine,
            "candidates_sha256": hashlib.sha256(repr(candidates).encode()).hexdigest(),
            "options": {"search_tokens": options.search_tokens} | asdict(self.space.method.options),
            "calibration": self.job.calibration.record(),
            "held_out_sequences": self.held_out,
            "exclude": list(run.exclude),
            "experts": run.experts,
            "dtype": self.job.plan.execution.dtype,
        }
        return json.loads(json.dumps(identity))

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Return all that the result depends on. Only a search with an equal fingerprint resumes."""
        same = ("recipe_out", "search_streams", "sensitivities", "text")  # the text is in `measured_on`
        asked = {name: value for name, value in asdict(self.request.options).items() if name not in same}
        more = {"max_shard_gb": self.job.request.run.max_shard_gb, "measured_on": vars(self.windows.protocol)}
        return self.identity | more | {"options": self.identity["options"] | asked, "execution": {}}


def prepare(request: AutoRequest, progress: Progress, dry_run: bool = False) -> Auto:
    """Open the model and prepare the search. Raises QuantkitError for invalid options."""
    request.options.check()
    space = ENGINES[request.options.engine]
    if not request.options.sym:
        what = f"--no-sym: {request.options.engine} does not read several widths with zero points"
        require(space.zero_points, what, "leave out --no-sym, or use --engine any", UNSUPPORTED)
        space = replace(space, symmetric=False)
    output, one_file = request.destination, space.method.name == "gguf"
    shared = recipe.Recipe(space.method.name, values={"run.dtype": MEASURED_IN} | request.typed)
    listing = recipe.merge(shared, (), {"model": request.source, "output": output}, **request.opening)
    listing = replace(listing, method=space.method, open_groups=not one_file)
    prepared = job.prepare(listing, progress, dry_run=True)
    may_replace.check_source(output, prepared.checkpoint.folder)
    if request.options.gpu and request.options.ctx:
        windows_of.check_context(prepared.checkpoint, request.options.ctx)
    units = space.units(prepared)
    require(units, "no linear is left to choose bits for", "narrow --exclude", USAGE)
    windows, held_out = _windows(request, prepared)
    kept = prepared.calibration.tokens[: len(prepared.calibration.tokens) - held_out]
    tokens, statistics = _apart(kept, request.options.search_tokens)
    _refuse_few(request.options, tokens, windows)
    presets = space.presets(units, prepared)
    auto = Auto(request, space, prepared, units, presets, windows, tokens, statistics, output, held_out)
    if not dry_run:
        auto.check_output()
    if (budget := auto.budget_bytes()) is not None:
        sized = request.options.max_size is not None
        allocation.refuse_too_few(units, budget, auto.files_bytes if sized else None)
    return auto


def _windows(request: AutoRequest, prepared: Job) -> tuple[Windows, int]:
    """Return the windows to measure results on, and the number of held-out calibration sequences."""
    checkpoint, options = prepared.checkpoint, request.options
    if options.text is not None:
        column = prepared.request.calibration.text_column
        return windows_of.load(checkpoint, options.text, options.ctx, limit=options.limit, column=column), 0
    calibrated = prepared.calibration
    _, last_ids = hold_out(calibrated.tokens)
    return windows_of.held_out(checkpoint, last_ids, calibrated.provenance), len(last_ids)


def _apart(tokens: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
    """Return sequences to measure on and others for the solver. Both are spread evenly over the text, because
    sensitivities differ between kinds of text."""
    count, length = tokens.shape
    measured = min(math.ceil(wanted / length), max(1, count // 4))
    chosen = {round((k + 0.5) * count / measured - 0.5) for k in range(measured)}
    rest = [k for k in range(count) if k not in chosen] or list(chosen)
    step = math.ceil(len(rest) * length / STATISTICS_TOKENS)
    return tokens[sorted(chosen)], tokens[rest[::step]]


def _refuse_few(options: AutoOptions, tokens: Tensor, windows: Windows) -> None:
    """Raise QuantkitError if units or results would be measured on fewer than LEAST_TOKENS tokens."""
    length, compared = tokens.shape[1], windows.protocol.tokens
    held_out = math.ceil(LEAST_TOKENS / (length - 1))
    samples = f"give --samples {HELD_OUT * held_out} or more, and a text that is as long"
    if held_out > MOST_HELD_OUT:
        samples = f"give --seqlen {math.ceil(LEAST_TOKENS / MOST_HELD_OUT) + 1} or more"
    too_short = options.search_tokens < LEAST_TOKENS
    hint = f"give --search-tokens {LEAST_TOKENS} or more" if too_short else samples
    what = f"units would be measured on {tokens.numel()} tokens; {LEAST_TOKENS} are needed"
    require(tokens.numel() >= LEAST_TOKENS, what, hint, USAGE)
    hint = "give a longer --text, or a larger --limit" if options.text else f"{samples}; or give a --text"
    what = f"results would be compared on {compared} tokens; {LEAST_TOKENS} are needed"
    require(compared >= LEAST_TOKENS, what, hint, USAGE)
