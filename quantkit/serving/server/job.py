"""Prepares an engine's command for a checkpoint, and compares the engine with quantkit's decode."""

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.capacity import source as sources
from quantkit.errors import UNSUPPORTED, QuantkitError, refuse_problems, require
from quantkit.inspection import record
from quantkit.models.files import gguf_shards, hub
from quantkit.models.files.headers import open_contents
from quantkit.quantize.progress import SILENT, Progress
from quantkit.serving.engines.choose import Offer, choose
from quantkit.serving.server import sizing
from quantkit.serving.server.command import SERVERS, ServerCommand
from quantkit.serving.server.settings import ServeSettings, free_port

SCHEMA = "quantkit.serve/1"
PROMPT, QUESTION = "Once upon a time", "Say hello."


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
    starts: bool = True,
) -> Prepared:
    """Choose an engine and its arguments for a folder, a GGUF file or a hub id. A hub id is downloaded first,
    unless `revision` is None and no server will be started (`starts`). Then its port may be in use.

    Raises QuantkitError for a damaged checkpoint, an engine that is missing or cannot load it, a port in use,
    too little memory, an option that the engine does not have, and a chat template that does not end.
    """
    from quantkit.models.machine.device import choose_device, free_memory, is_accelerator

    settings.check()
    if starts or not settings.port:
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
    device = choose_device(settings.device)
    usable = int(free_memory(device) * settings.memory_fraction)
    size = sizing.fit(source, weight_bytes, settings, usable, not is_accelerator(device), *defaults, warnings)
    path, name = model, model
    if local := hub.local(model, revision):
        local = local.resolve() if local.is_dir() else local.absolute()  # shards lie next to a link
        path, name = str(local), gguf_shards.whole(local).stem if local.is_file() else local.name
    elif starts or revision or contents.path is not None:
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
    if not chat:
        warnings.append("the model has no chat template: use /v1/completions, not /v1/chat/completions")
    return Prepared(model, offer, command, settings, size, chat, tuple(warnings))


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
