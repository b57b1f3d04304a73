"""`quantkit bench`: what checkpoints cost to run; attention, batching, and endpoints under load."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from quantkit.cli import flags
from quantkit.errors import USAGE, QuantkitError

EPILOG = """Examples:

  quantkit bench ./model ./model-nf4 ./model-Q4_K_M.gguf

  quantkit bench ./model ./model-nf4 --batch 1,4,16 --prompt 128,512 --tokens 64

  quantkit bench ./model ./model-nf4 --quality result.json     (of quantkit eval … --json > result.json)

  quantkit bench ./model --batch 1,2,4,8,16,32 --plot roofline.svg     (the roofline over it)

  quantkit bench ./model.gguf --engine llama.cpp,transformers --json

  quantkit bench ./model --attn eager,sdpa --prompt 256,1024,4096     (time and memory of attention)

  quantkit bench ./model --batching static,dynamic,continuous --requests 64 --rate 4

  quantkit bench --url http://127.0.0.1:8000     (a server under load, this machine's)"""
RUN, ENGINE, OTHERS = "What is run", "Engine", "Other questions"
PLAIN, ATTN, BATCHING, URL = "", "attn", "batching", "url"  # the questions
LOADED = {PLAIN: "", ATTN: "", BATCHING: ""}


@dataclass(frozen=True)
class Flag:
    """fields: of each question that heeds the flag, the field of its Settings; "" where it has none."""

    kind: Any
    fields: Mapping[str, str]
    panel: str | None = None
    help: str = ""
    metavar: str | None = None
    short: tuple[str, ...] = ()

    def parameter(self, name: str) -> Any:
        """As Typer reads it; None stands for the default of the Settings."""
        if not self.help:  # a flag of several commands, which describes itself
            return flags.parameter(name, self.kind, False if self.kind.__origin__ is bool else None)
        names = (flag(name), *self.short) if self.short or self.kind is bool else ()
        kind, default = (bool, False) if self.kind is bool else (self.kind | None, None)
        option = typer.Option(*names, help=self.help, metavar=self.metavar, rich_help_panel=self.panel)
        return flags.parameter(name, Annotated[kind, option], default)


FLAGS = {
    "batch": Flag(
        str, {PLAIN: "batches", ATTN: "batch", BATCHING: "size"}, RUN,
        "Sequences at once, such as 1,4,16. (default: 1, of --batching: 8)", "LIST",
    ),
    "prompt": Flag(
        str, {PLAIN: "prompts", ATTN: "lengths", URL: "prompt_tokens"}, RUN,
        "Prompt tokens of each, such as 128,512. (default: 128)", "LIST",
    ),
    "tokens": Flag(
        int, {PLAIN: "tokens", ATTN: "steps", URL: "output_tokens"}, RUN,
        "New tokens of each sequence. (default: 64, of --attn: 8)", short=("-n",),
    ),
    "repeats": Flag(
        int, dict.fromkeys(LOADED, "repeats"), RUN, "Measured runs in a round. (default: 3)"
    ),
    "rounds": Flag(
        int, {PLAIN: "rounds"}, RUN, "Times that every model has its turn, in a new process. (default: 2)"
    ),
    "warmup": Flag(int, {PLAIN: "warmup"}, RUN, "Runs before those, not measured. (default: 1)"),
    "seed": Flag(int, dict.fromkeys((*LOADED, URL), "seed"), RUN, "Of the prompts. (default: 0)"),
    "engine": Flag(
        str, {PLAIN: ""}, ENGINE,
        "auto, transformers, llama.cpp or vllm, or several. auto: llama.cpp for GGUF files where it is "
        "installed, else transformers. (default: auto)", "LIST",
    ),
    "decoded": Flag(
        bool, {PLAIN: "decoded"}, ENGINE,
        "In transformers, compute with decoded weights, not with the layout's own kernels.",
    ),
    "threads": Flag(
        int, LOADED | {PLAIN: "threads"}, ENGINE,
        "Of the CPU, for every engine. (default: OMP_NUM_THREADS, else the cores)", "N",
    ),
    "dtype": Flag(
        Literal["auto", "float32", "bfloat16", "float16"], LOADED | {PLAIN: "dtype"}, ENGINE,
        "Precision in transformers and vLLM. (default: auto, each checkpoint's own where the hardware has "
        "it)",
    ),
    "device": Flag(str, LOADED | {PLAIN: "device"}, ENGINE,
        "cpu, cuda, cuda:N or mps. (default: auto, cuda where there is one)"),
    "quality": Flag(
        list[Path], {PLAIN: ""}, None,
        "Of quantkit eval --json: KL divergence and perplexity beside the speed. Repeatable.", "FILE",
    ),
    "attn": Flag(
        str, {ATTN: "implementations"}, OTHERS,
        "Time and memory of one model's attention at growing prompts, instead: eager, sdpa, "
        "flash_attention_2 …", "LIST",
    ),
    "beyond": Flag(
        bool, {ATTN: "beyond"}, OTHERS,
        "Let prompts of --attn be longer than the model was made for: their speed is real.",
    ),
    "batching": Flag(
        str, {BATCHING: "strategies"}, OTHERS,
        "One model serving a trace of requests, instead: static, dynamic, continuous.", "LIST",
    ),
    "trace": Flag(
        Path, {BATCHING: ""}, OTHERS,
        "The trace: JSON lines of arrival, prompt_tokens, output_tokens. (default: random)", "FILE",
    ),
    "lengths": Flag(
        tuple[str, str], {BATCHING: ""}, OTHERS,
        "Token counts to draw: fixed:N, uniform:A-B, geometric:MEAN or lognormal:MEDIAN,SIGMA. "
        "(default: uniform:16-128 geometric:32)", "PROMPT OUTPUT",
    ),
    "url": Flag(str, {URL: ""}, OTHERS, "An OpenAI endpoint under load, instead."),
    "concurrency": Flag(
        str, {URL: "concurrency"}, OTHERS, "Users of --url, level by level. (default: 1,2,4,8,16,32)", "LIST"
    ),
    "requests": Flag(
        int, {BATCHING: "", URL: "requests"}, OTHERS,
        "Of the trace (default: 32), or of each level of --url (default: 4 a user).",
    ),
    "rate": Flag(
        float, {BATCHING: "", URL: "rates"}, OTHERS,
        "Requests a second on average. (default: 8 in a trace; --url: as fast as the users can)",
    ),
    "served_model": Flag(str, {URL: "model"}, OTHERS, "Which model of --url.", "NAME"),
    "api_key": Flag(str, {URL: "api_key"}, OTHERS, "Of --url."),
    "remote": Flag(bool, {URL: "remote"}, OTHERS, "Let --url be another machine than this one."),
    "html": Flag(flags.HTML, LOADED),
    "plot": Flag(flags.PLOT, LOADED),
    "revision": Flag(flags.FIRST_REVISION, LOADED),
    "offline": Flag(flags.OFFLINE, LOADED),
    "trust_remote_code": Flag(flags.TRUST_REMOTE_CODE, LOADED | {PLAIN: "trust_remote_code"}),
    "as_json": Flag(flags.AS_JSON, LOADED | {URL: ""}),
    "quiet": Flag(flags.QUIET, LOADED | {URL: ""}),
}  # fmt: skip
MODELS = Annotated[
    list[str] | None,
    typer.Argument(help="Folders, GGUF files or hub ids; the first is what the others are compared to."),
]


def flag(name: str) -> str:
    """`--served-model`."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Asked:
    """A question, the models it is asked of, and the flags that were typed."""

    question: str
    models: Sequence[str]
    typed: Mapping[str, Any]

    def refuse_others(self) -> None:
        """Raise QuantkitError for a flag that would be ignored, and for models too many or too few."""
        for name in self.typed:
            heeded = FLAGS[name].fields
            if self.question not in heeded:
                others = " and ".join(flag(other) for other in sorted(set(heeded) - {PLAIN}))
                if self.question:
                    mine = flag(self.question)
                    raise QuantkitError(f"{flag(name)} is not for {mine}", f"leave it out of {mine}", USAGE)
                raise QuantkitError(
                    f"{flag(name)} is for {others}", f"add one, or leave out {flag(name)}", USAGE
                )
        if self.question == URL and self.models:
            raise QuantkitError("--url measures what is served there", "leave out the models", USAGE)
        if self.question != URL and not self.models:
            raise QuantkitError("give a model", "for example: quantkit bench ./model ./model-nf4", USAGE)
        if self.question in (ATTN, BATCHING) and len(self.models) > 1:
            raise QuantkitError("give one model", "this question is asked of one at a time", USAGE)

    def settings(self, kind: type) -> Any:
        """The question's Settings, checked; what was not typed is their default."""
        hints, values = get_type_hints(kind), {}
        for name, value in self.typed.items():
            if field := FLAGS[name].fields[self.question]:
                values[field] = _as(hints[field], flag(name), value)
        made = kind(**values)
        made.check()
        return made

    def some(self, *names: str) -> dict[str, Any]:
        """Those of the flags that were typed."""
        return {name: self.typed[name] for name in names if name in self.typed}

    def opened(self) -> tuple[Any, Any, Any]:
        """The checkpoint, precision and device."""
        import torch

        from quantkit.evaluation.generate import shared_dtype
        from quantkit.models.files.open import open_checkpoint
        from quantkit.models.machine.device import choose_device

        if threads := self.typed.get("threads"):
            torch.set_num_threads(threads)
        where = self.some("revision", "offline", "trust_remote_code")
        checkpoint = open_checkpoint(self.models[0], **where)
        device = choose_device(self.typed.get("device", "auto"))
        return checkpoint, shared_dtype(self.typed.get("dtype", "auto"), checkpoint, device), device


def _as(kind: Any, name: str, value: Any) -> Any:
    """What was typed, as the field of a Settings takes it. Raises QuantkitError for what is no list."""
    from quantkit.serving.bench.settings import parse_list

    if kind == tuple[str, ...]:
        return tuple(filter(None, (part.strip() for part in value.split(","))))
    if kind == tuple[float, ...]:
        return (value,)
    if not isinstance(value, str) or kind not in (int, tuple[int, ...]):
        return value
    numbers = parse_list(name, value)
    if kind == tuple[int, ...]:
        return numbers
    if len(numbers) > 1:
        raise QuantkitError(f"{name} {value}: one number here", f"choose {name} {numbers[0]}", USAGE)
    return numbers[0]


def _invoke(context: typer.Context, **values: Any) -> None:
    """The function behind `quantkit bench`."""
    from quantkit.cli.progress import listener
    from quantkit.evaluation.comparison.files import Outputs

    typed = flags.typed(context, values)
    models = typed.pop("models", ())
    questions = [name for name in (ATTN, BATCHING, URL) if name in typed]
    if len(questions) > 1:
        hint = "one question at a time"
        raise QuantkitError("--attn, --batching and --url exclude each other", hint, USAGE)
    asked = Asked(questions[0] if questions else PLAIN, models, typed)
    asked.refuse_others()
    outputs, quiet = Outputs(values["html"], values["plot"]), values["quiet"]
    outputs.check()
    with listener(quiet) as progress:
        result, report = ANSWERS[asked.question](asked, progress)
    if not values["as_json"]:
        report.show()
    if asked.question == PLAIN:
        from quantkit.serving.bench import measure

        measure.refuse_empty(result)  # with --json the record goes with the error
    if values["as_json"]:
        print(json.dumps(result, indent=2, allow_nan=False))
    outputs.write(report.figures, report.page)


def _checkpoints(asked: Asked, progress: Any) -> tuple[dict, Any]:
    """What checkpoints cost to run, side by side."""
    from quantkit.serving.bench import measure, record, show
    from quantkit.serving.bench.settings import Settings

    settings = asked.settings(Settings)
    evaluated = record.read_quality(asked.typed.get("quality", ()))
    where = asked.some("revision", "offline")
    rows = measure.rows(asked.models, asked.typed.get("engine", "auto"), settings, **where)
    measure.measure(rows, settings, progress)
    result = record.record(rows, settings, evaluated)
    return result, show.report(result, asked.typed.get("quiet", False))


def _attention(asked: Asked, progress: Any) -> tuple[dict, Any]:
    """Time and memory of each implementation at growing lengths."""
    from quantkit.cli.progress import uncollected

    with uncollected():
        from quantkit.serving.bench.attention import measure, settings, show

    wanted = asked.settings(settings.Settings)
    checkpoint, dtype, device = asked.opened()
    result = measure.measure(checkpoint, wanted, dtype, device, progress)
    return result, show.report(result)


def _batching(asked: Asked, progress: Any) -> tuple[dict, Any]:
    """One trace of requests, batched in several ways."""
    from quantkit.cli.progress import uncollected

    with uncollected():
        from quantkit.serving.bench.batching import measure, show, trace

    settings = asked.settings(measure.Settings)
    checkpoint, dtype, device = asked.opened()
    if "trace" in asked.typed:
        work = trace.read(asked.typed["trace"], checkpoint.context)
    else:
        drawn = dict(zip(("prompts", "outputs"), asked.typed.get("lengths", ()), strict=False))
        drawn |= asked.some("requests", "rate")
        work = trace.sample(**drawn, context=checkpoint.context, seed=settings.seed)
    result = measure.measure(checkpoint, work, settings, dtype, device, progress)
    return result, show.report(result)


def _endpoint(asked: Asked, progress: Any) -> tuple[dict, Any]:
    """An OpenAI endpoint under load."""
    from quantkit.serving.endpoint import load, show

    result = load.measure(asked.typed["url"], asked.settings(load.Settings), progress)
    return result, show.report(result)


ANSWERS = {PLAIN: _checkpoints, ATTN: _attention, BATCHING: _batching, URL: _endpoint}
command = flags.sign(
    _invoke,
    [flags.parameter("models", MODELS, None), *(row.parameter(name) for name, row in FLAGS.items())],
)
