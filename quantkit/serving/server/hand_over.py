"""From a checkpoint to the command of an engine's server, and from there to one that has answered."""

from __future__ import annotations

import importlib
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import psutil

from quantkit.capacity import source as sources
from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.inspection import record
from quantkit.models.files import hub
from quantkit.models.files.headers import Contents, open_contents
from quantkit.quantize.progress import Progress
from quantkit.serving.endpoint.client import Address, Endpoint, RequestFailed
from quantkit.serving.engines.choose import Offer, choose
from quantkit.serving.server import sizing
from quantkit.serving.server.command import Command
from quantkit.serving.server.process import Engine
from quantkit.serving.server.settings import Settings, free_port

SCHEMA = "quantkit.serve/1"
MODULES = {"vllm": "vllm", "llama.cpp": "llamacpp", "transformers": "transformers"}  # engine -> its file here
PROMPT, QUESTION, TOKENS = "Once upon a time", "Say hello.", 16
ASK_SECONDS, PROOF_SECONDS = (
    0.25,
    300.0,
)  # between two looks at its health; of the first answer, kernels built


@dataclass(frozen=True)
class Prepared:
    """All that is known before anything is started. chat: whether the model has a chat template."""

    source: str
    offer: Offer
    command: Command
    settings: Settings
    room: sizing.Room
    chat: bool
    warnings: tuple[str, ...]

    @property
    def url(self) -> str:
        """The base URL as clients of the API take it, from this machine."""
        return Address("http", self.settings.reached_at, self.settings.port, "/v1").url

    def record(self, proof: dict[str, Any] | None = None) -> dict[str, Any]:
        """The versioned JSON; the key is not in it."""
        return {
            "schema": SCHEMA,
            "source": self.source,
            "engine": self.offer.engine,
            "tried": self.offer.usable,
            "command": self.command.line(),
            "argv": list(self.command.argv),
            "env": dict(self.command.env),
            "url": self.url,
            "model": self.command.model,
            "api_key": self.settings.api_key is not None,
            "room": self.room.record(),
            "notes": list(self.command.notes),
            "warnings": list(self.warnings),
            "proof": proof,
        }


def prepare(
    model: str,
    settings: Settings,
    revision: str | None = None,
    offline: bool = False,
    listen: Progress | None = None,
    fetch: bool = True,
) -> Prepared:
    """Choose an engine and its flags for a folder, a GGUF file or a hub id, which is fetched; without
    `fetch` the engine is told the id, if no revision is asked for.

    Raises QuantkitError for whatever can be known to go wrong: a damaged checkpoint, an engine that is not
    there or cannot load it, a port in use, memory that does not suffice, an option the engine does not have.
    """
    listen = listen or Progress()
    settings.check()
    settings = replace(settings, port=free_port(settings.host, settings.port))
    contents = open_contents(model, revision, offline)
    told = record.describe(contents)
    if problems := told["integrity"]["problems"]:
        hint = "the checkpoint is incomplete or damaged: see quantkit inspect"
        raise QuantkitError(problems[0], hint)
    if told["tokenizer"] is None:
        hint = "put the tokenizer's files beside the weights: a server takes text"
        raise QuantkitError(f"{model} has no tokenizer", hint, UNSUPPORTED)
    offer = choose(told, settings.engine, device=settings.device)
    engine = importlib.import_module(f"quantkit.serving.server.{MODULES[offer.engine]}")
    listen.phase("looking at the memory")
    room = _room(model, contents, settings, revision, offline, engine, offer)
    place, name = _place(model, contents, revision, offline, listen, fetch)
    command = engine.command(place, name, settings, room)
    if offline:
        command = replace(command, env={"HF_HUB_OFFLINE": "1", **command.env})
    chat = told["tokenizer"]["chat_template"] is not None
    return Prepared(model, offer, command, settings, room, chat, tuple(_warnings(settings, offer, room)))


def _place(
    model: str, contents: Contents, revision: str | None, offline: bool, listen: Progress, fetch: bool
) -> tuple[str, str]:
    """Where the engine finds it, and what requests call it."""
    found = hub.local(model)
    if found is not None:
        path = found.resolve()
        return str(path), path.stem if path.is_file() else path.name
    if contents.path is None and revision is None and not fetch:
        return model, model
    listen.phase(f"fetching {model}")
    return str(hub.resolve(model, revision, offline)), model


def _warnings(settings: Settings, offer: Offer, room: sizing.Room) -> Iterator[str]:
    if settings.open and settings.api_key is None:
        yield f"{settings.host} is open to other machines, and no --api-key guards it"
    if offer.usable is None:
        yield f"{offer.engine}: {offer.reason}"
    yield from room.notes


def _room(
    model: str,
    contents: Contents,
    settings: Settings,
    revision: str | None,
    offline: bool,
    engine: Any,
    offer: Offer,
) -> sizing.Room:
    """What the plan leaves; where it knows nothing of the model, as was asked or is usual, which is said."""
    memory = _memory(settings, offer)
    nbytes = sum(info.nbytes for info in contents.infos.values())
    try:
        source = sources.read(model, revision, offline)
    except QuantkitError as error:
        ctx, slots = settings.ctx or sizing.USUAL, settings.parallel or engine.PARALLEL
        notes = (f"whether it fits is not known: {error.message}",)
        return sizing.Room(ctx, slots, None, ctx * slots, nbytes, memory, notes)
    return sizing.fit(source, nbytes, settings, memory, engine.PARALLEL, engine.RESERVES)


def _memory(settings: Settings, offer: Offer) -> sizing.Memory:
    """Of the device that the engine will take, as far as torch sees it; of the CPU without asking it."""
    if settings.device == "cpu":
        free = psutil.virtual_memory().available
        return sizing.Memory("cpu", int(free * settings.memory_fraction))
    from quantkit.models.machine import device

    if offer.engine == "vllm" and settings.device == "auto" and shutil.which("nvidia-smi"):
        found = next(device.accelerators(), None)  # None: vLLM's own torch may see what ours does not
        return sizing.Memory("cuda", found and int(found[3] * settings.memory_fraction))
    place = device.choose_device(settings.device)
    if not device.is_accelerator(place):
        return sizing.Memory("cpu", int(device.host_memory() * settings.memory_fraction))
    rows = list(device.accelerators())
    return sizing.Memory(place.type, int(rows[place.index or 0][3] * settings.memory_fraction))


@contextmanager
def serving(
    prepared: Prepared, listen: Progress | None = None, output: BinaryIO | None = None
) -> Iterator[tuple[Engine, dict[str, Any]]]:
    """The engine, once it is healthy and has answered, and the proof of that; ended on the way out.

    output: where its own words go. Raises QuantkitError, with its last lines, where it dies or is silent.
    """
    listen = listen or Progress()
    engine = Engine(prepared.command, output)
    try:
        seconds = _wait(prepared, engine, listen)
        listen.phase("asking for a completion")
        yield engine, {"started_seconds": seconds} | _prove(prepared, engine)
    finally:
        engine.stop()


def _endpoint(prepared: Prepared, timeout: float) -> Endpoint:
    return Endpoint(Address.of(prepared.url), prepared.settings.api_key, timeout)


def _wait(prepared: Prepared, engine: Engine, listen: Progress) -> float:
    """Seconds until it was healthy."""
    began, limit = time.monotonic(), prepared.settings.start_seconds
    endpoint = _endpoint(prepared, min(5.0, limit))
    listen.phase(f"waiting for {prepared.offer.engine} to be healthy")
    while (waited := time.monotonic() - began) < limit:
        code = engine.wait(ASK_SECONDS)
        if code is not None:
            raise QuantkitError(
                f"{prepared.offer.engine} {_ended(code)} while starting{engine.told()}", _hint(engine)
            )
        if endpoint.healthy():
            return waited
    raise QuantkitError(
        f"{prepared.offer.engine} was not healthy within {limit:g} s{engine.told()}",
        hint="a large model may need more: --start-timeout",
    )


def _prove(prepared: Prepared, engine: Engine) -> dict[str, Any]:
    """One completion, as the engine samples by default: transformers keeps to what its first request asks."""
    body: dict[str, Any] = {"model": prepared.command.model, "max_tokens": TOKENS}
    if prepared.chat:
        path, body["messages"] = "/chat/completions", [{"role": "user", "content": QUESTION}]
    else:
        path, body["prompt"] = "/completions", PROMPT
    began = time.monotonic()
    try:
        answer = _endpoint(prepared, PROOF_SECONDS).post(path, body)
        choice = answer["choices"][0]
        message = choice.get("message") or {}
        text = choice.get("text") or message.get("content") or message.get("reasoning_content") or ""
    except RequestFailed as error:
        code = engine.wait(0.5)
        state = "" if code is None else f", and {_ended(code)}"
        message = f"{prepared.offer.engine} is healthy, but answers no request{state}: {error.message}"
        raise QuantkitError(message + engine.told(), _hint(engine)) from error
    except (LookupError, TypeError, AttributeError) as error:
        raise QuantkitError(f"{prepared.offer.engine} answers with no completion{engine.told()}") from error
    return {
        "api": path,
        "prompt": QUESTION if prepared.chat else PROMPT,
        "text": str(text),
        "usage": answer.get("usage"),
        "seconds": time.monotonic() - began,
    }


def ended(prepared: Prepared, engine: Engine, code: int) -> QuantkitError:
    """What to say of an engine that ended without being asked."""
    return QuantkitError(f"{prepared.offer.engine} {_ended(code)}{engine.told()}", _hint(engine))


def _ended(code: int) -> str:
    return f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _hint(engine: Engine) -> str:
    """What its last words call for."""
    said = "\n".join(engine.last).lower()
    if "address already in use" in said:
        return "another program took the port meanwhile: --port 0 takes a free one"
    if "out of memory" in said or "failed to allocate" in said:
        return "a shorter --ctx, a smaller --parallel, or a smaller model: see quantkit plan"
    return "run the command by itself: quantkit serve … --print"
