"""Prepares an engine's command for a checkpoint, and runs its server after a first answer."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from quantkit.capacity import source as sources
from quantkit.errors import UNSUPPORTED, QuantkitError, first_line, refuse_problems, require
from quantkit.inspection import record
from quantkit.models.files import gguf_shards, hub, untrusted
from quantkit.models.files.headers import open_contents
from quantkit.quantize.progress import SILENT, Progress
from quantkit.serving.engines.choose import Offer, choose
from quantkit.serving.server import sizing
from quantkit.serving.server.command import SERVERS, ServerCommand
from quantkit.serving.server.process import EngineProcess
from quantkit.serving.server.settings import ServeSettings, free_port

SCHEMA = "quantkit.serve/1"
PROMPT, QUESTION, TOKENS = "Once upon a time", "Say hello.", 16
ASK_SECONDS = 0.25  # seconds between two health checks
PROOF_SECONDS = 300.0  # timeout of the first answer, which may have to build kernels
MOST_BYTES = 1 << 22  # maximum of an answer; the rest is not read
SHOWN_CHARACTERS = 300  # characters of a server's message that are shown


@dataclass(frozen=True)
class Prepared:
    """A server that can be started. source: the model as named by the user. offer: the chosen engine. size:
    lengths and memory. chat: whether the model has a chat template."""

    source: str
    offer: Offer
    command: ServerCommand
    settings: ServeSettings
    size: sizing.ServerSize
    chat: bool
    warnings: tuple[str, ...]

    @property
    def url(self) -> str:
        """Return the base URL of the API for clients on this machine."""
        return f"http://{self.settings.reached_at}:{self.settings.port}/v1"

    def request(self, text: str | None = None) -> tuple[str, str, dict[str, Any]]:
        """Return (path, text, body) of a chat request; of a completion if there is no chat template."""
        text = text or (QUESTION if self.chat else PROMPT)
        body = {"messages": [{"role": "user", "content": text}]} if self.chat else {"prompt": text}
        path = "/chat/completions" if self.chat else "/completions"
        return path, text, {"model": self.command.model, **body}

    def record(
        self, proof: dict[str, Any] | None = None, compared: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the `quantkit.serve/1` JSON, without the API key. proof: the first answer, see `serving`.
        compared: result of `compare`."""
        return {
            "schema": SCHEMA,
            "source": self.source,
            "engine": self.offer.engine,
            "tried": self.offer.usable,
            "command": self.command.line(),
            "argv": self.command.argv,
            "env": self.command.env,
            "url": self.url,
            "model": self.command.model,
            "api_key": self.settings.api_key is not None,
            "room": asdict(self.size),
            "notes": self.command.notes,
            "warnings": self.warnings,
            "compared": compared,
            "proof": proof,
        }


def prepare(
    model: str,
    settings: ServeSettings,
    revision: str | None = None,
    offline: bool = False,
    listen: Progress = SILENT,
    fetch: bool = True,
) -> Prepared:
    """Choose an engine and its arguments for a folder, a GGUF file or a hub id. A hub id is downloaded first,
    unless `fetch` is False and `revision` is None.

    Raises QuantkitError for a damaged checkpoint, an engine that is missing or cannot load it, a port in use,
    too little memory, an option that the engine does not have, and a chat template that does not end.
    """
    settings.check()
    settings = replace(settings, port=free_port(settings.host, settings.port))
    contents = open_contents(model, revision, offline)
    described = record.describe(contents)
    refuse_problems({}, described["integrity"]["problems"])
    hint = "put the tokenizer's files next to the weights: a server takes text"
    require(described["tokenizer"] is not None, f"{model} has no tokenizer", hint, UNSUPPORTED)
    offer = choose(described, settings.engine, device=settings.device)
    make, *defaults = SERVERS[offer.engine]
    listen.phase("checking the memory")
    source, warnings = None, []
    try:
        source = sources.read(model, revision, offline)
    except QuantkitError as error:
        warnings.append(f"the memory is not checked: {error.message}")
    weight_bytes = sum(info.nbytes for info in contents.infos.values())
    size = sizing.fit(source, weight_bytes, settings, *_memory(settings), *defaults, warnings)
    path, name = model, model
    if local := hub.local(model):
        local = local.resolve() if local.is_dir() else local.absolute()  # shards lie next to a link
        path, name = str(local), gguf_shards.whole(local).stem if local.is_file() else local.name
    elif fetch or revision or contents.path is not None:
        listen.phase(f"fetching {model}")
        path = str(hub.resolve(model, revision, offline))
    if offer.engine == "llama.cpp" and Path(path).is_file():
        from quantkit.serving.engines import llamacpp

        listen.phase("rendering the chat template")
        llamacpp.check_templates(Path(path), QUESTION)
    command = make(path, name, settings, size)
    if offline:
        command = replace(command, env={"HF_HUB_OFFLINE": "1", **command.env})
    if offer.usable is None:
        warnings.append(f"{offer.engine}: {offer.reason}")
    if not settings.is_local and settings.api_key is None:
        warnings.append(f"{settings.host} is open to other machines without --api-key")
    chat = described["tokenizer"]["chat_template_sha256"] is not None
    return Prepared(model, offer, command, settings, size, chat, tuple(warnings))


def _memory(settings: ServeSettings) -> tuple[int, bool]:
    """Return the bytes of the device's free memory that the engine may use, and whether it is the CPU."""
    from quantkit.models.machine import device

    chosen = device.choose_device(settings.device)
    return int(device.free_memory(chosen) * settings.memory_fraction), not device.is_accelerator(chosen)


def compare(
    prepared: Prepared, revision: str | None, offline: bool, listen: Progress
) -> dict[str, Any] | None:
    """Compare the engine's probabilities with quantkit's decode on one sequence; return JSON, as
    `verify --engine` does, None for llama-server. Raises QuantkitError (exit code 6) if rounding does not
    explain the difference."""
    from quantkit.evaluation import engines, served
    from quantkit.models.files.open import open_checkpoint

    name, settings, program = prepared.offer.engine, prepared.settings, prepared.command.argv[0]
    if name == "llama.cpp" and program != sys.executable:
        listen.warn(f"not compared: --engine llama.cpp of quantkit verify runs xllamacpp, not {program}")
        return None
    python = Path(program).with_name("python")  # of the environment that has the server
    options = [] if settings.dtype == "auto" else [f"dtype={settings.dtype}"]
    engine = engines.Engine.find(name, str(python) if python.exists() else None, options)
    checkpoint = open_checkpoint(prepared.source, revision, offline, settings.trust_remote_code)
    compared = served.check(engine, [checkpoint], listen.evaluating)
    served.refuse({"source": prepared.source, "problems": [], "engine": compared})
    return compared


@contextmanager
def serving(
    prepared: Prepared, listen: Progress = SILENT, output: BinaryIO | None = None
) -> Iterator[tuple[EngineProcess, dict[str, Any]]]:
    """Start the server; yield the engine and its first answer as JSON; stop the engine on exit.

    output: receives what the engine prints. Raises QuantkitError, with the engine's last lines, if it ends or
    does not answer.
    """
    engine = EngineProcess(prepared.command, output)
    try:
        listen.phase(f"waiting for {prepared.offer.engine} to be healthy")
        seconds = _wait(prepared, engine)
        listen.phase("asking for a completion")
        yield engine, {"started_seconds": seconds} | _prove(prepared, engine)
    finally:
        engine.stop()


def _wait(prepared: Prepared, engine: EngineProcess) -> float:
    """Wait until the engine is healthy; return the seconds waited. Raises QuantkitError if it ends."""
    began, limit = time.monotonic(), prepared.settings.start_timeout
    health = prepared.url.removesuffix("/v1") + "/health"
    while (waited := time.monotonic() - began) < limit:
        code = engine.wait(ASK_SECONDS)
        if code is not None:
            raise ended(prepared, engine, code, " while starting")
        with suppress(QuantkitError):  # it does not listen yet
            request(health, min(5.0, limit))
            return waited
    error = engine.failure(f"{prepared.offer.engine} was not healthy within {limit:g} s")
    error.hint = "a large model may need more: --start-timeout"
    raise error


def _prove(prepared: Prepared, engine: EngineProcess) -> dict[str, Any]:
    """Request a first answer with default sampling, which transformers keeps; return it as JSON."""
    path, prompt, body = prepared.request()
    name, began = prepared.offer.engine, time.monotonic()
    body |= {"max_tokens": TOKENS}
    try:
        data = request(prepared.url + path, PROOF_SECONDS, body, prepared.settings.api_key)
    except QuantkitError as error:
        raise engine.failure(f"{name} is healthy, but answers no request: {error.message}") from error
    seconds = time.monotonic() - began
    try:
        answer = untrusted.parse(data)
        choice, usage = answer["choices"][0], answer.get("usage")
        message = choice.get("message") or {}
        text = choice.get("text") or message.get("content") or message.get("reasoning_content") or ""
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise engine.failure(f"{name} answers with no completion") from error
    return {"api": path, "prompt": prompt, "text": str(text), "usage": usage, "seconds": seconds}


def request(url: str, timeout: float, body: Mapping[str, Any] | None = None, key: str | None = None) -> bytes:
    """Return the answer to a POST of `body` as JSON, or to a GET. Redirects and proxies are not followed.

    timeout: seconds without a byte. key: API key. Raises QuantkitError, without the key.
    """
    address = urlsplit(url)
    connection = HTTPConnection(address.netloc, timeout=timeout)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        connection.request("POST" if body else "GET", address.path, body and json.dumps(body), headers)
        response = connection.getresponse()
        answer = response.read(MOST_BYTES)
    except (OSError, HTTPException) as error:
        raise QuantkitError(f"{url} cannot be reached: {first_line(error)}") from error
    finally:
        connection.close()
    if response.status != 200:
        text = answer.decode("utf-8", "replace").replace(key or "\0", "…").strip()
        shown = textwrap.shorten(text, SHOWN_CHARACTERS, placeholder=" …")
        raise QuantkitError(f"the server answers {response.status} {response.reason}: {shown}")
    return answer


def ended(prepared: Prepared, engine: EngineProcess, code: int, when: str = "") -> QuantkitError:
    """Return the error for an engine that ended by itself, with exit code `code`."""
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    return engine.failure(f"{prepared.offer.engine} ended {how}{when}")
