"""What there is to read of a model without loading it: config.json, and the headers of its weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.capacity import kv_cache, parameters
from quantkit.capacity.attention import Unsupported, layer_caches
from quantkit.capacity.parameters import DTYPE_BYTES, MOST_EXPERTS, Parameters, Tensor
from quantkit.capacity.settings import Settings
from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, count
from quantkit.layouts import quantization_of
from quantkit.models import kv_types
from quantkit.models.files import safetensors_folder, untrusted
from quantkit.models.files.headers import Contents, open_contents
from quantkit.models.files.safetensors_folder import TensorInfo
from quantkit.models.machine.expert_share import EXPERTS

QUANTIZED = "it is quantized already: all but `as stored` is computed as if of its original in 16 bit"
AS_IF_PACKED = (
    "sizes as if every parameter were packed: embeddings that stay in 16 bit come on top (GGUF file types: "
    "at the bits per weight of a Llama's file)"
)
MOST_MODULES = 300_000  # layers times experts; above this config.json is damaged
MIXTURE = re.compile(r"expert|moe")  # in keys of a model whose tokens meet a part of it
FEWEST = 1000  # parameters; fewer lack their unit
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Count:
    """A number of parameters. active: of them those that a token meets, None where that is not known."""

    total: int
    active: int | None


@dataclass(frozen=True)
class Source:
    """What is known of a model. basis: what its tensors were read from, or computed from.

    parameters: its tensors; None where a user said no more than their `count`. name, settings: None where
    there is no model but that count. layout: how it is stored where it is quantized, such as `gptq` or `fp8`.
    """

    name: str | None
    settings: Settings | None
    parameters: Parameters | None
    basis: str
    notes: tuple[str, ...] = ()
    layout: str | None = None
    count: Count | None = None

    @property
    def quantized(self) -> bool:
        """Whether its files hold codes."""
        return self.parameters is not None and self.parameters.quantized


def read(
    source: str, revision: str | None = None, offline: bool = False, count: Count | None = None
) -> Source:
    """A local folder, a GGUF file, the path of a config.json, or a hub id, of which only headers are fetched.

    count: what a user says of it where no headers do. Raises QuantkitError for what is none of these, for
    a family that is not known where neither is there, and where both are.
    """
    path = Path(source).expanduser()
    if path.suffix == ".json" and path.is_file():
        return _of_config(source, safetensors_folder.read_json(path), count)
    contents = open_contents(source, revision, offline, strict=True, bare=True)
    if not contents.infos and contents.container != "gguf":
        return _of_config(source, contents.config, count)
    if count is not None:
        raise QuantkitError(
            f"the headers of {source} say how many parameters it has", "leave out --params", USAGE
        )
    return _of_headers(contents)


def cache_bytes(path: Path, tokens: int, dtype: str) -> int | None:
    """Return the bytes of keys and values of one text, by a checkpoint's headers; None where its cache is not
    known. dtype: of a value, by `kv_types`."""
    try:
        found = read(str(path))
        caches = layer_caches(found.settings, found.parameters)
    except (QuantkitError, Unsupported):
        return None
    return kv_cache.sequence_bytes(caches, tokens, kv_types.TYPES[dtype].nbytes)


def of_count(count: Count) -> Source:
    """So many parameters, and nothing known about where they are; those that count a token meets."""
    dense = count if count.active else replace(count, active=count.total)
    return Source(None, None, None, "--params", (AS_IF_PACKED,), count=dense)


def _of_headers(contents: Contents) -> Source:
    settings, told = Settings.of(contents.config), contents.quantization
    entries: Iterable[TensorInfo | Tensor] = contents.infos.values()
    basis, layout = "safetensors headers", _layout(told)
    gguf = contents.container == "gguf"
    if gguf or told:
        from quantkit.capacity import quantized  # what plain checkpoints do not need
    if gguf:
        latent = "kv_lora_rank" in contents.config  # no tensor is as wide as what it keeps of a token
        settings = Settings(contents.config, contents.config if latent else None)
        entries, basis, layout = quantized.of_gguf(contents, settings), "the GGUF header", "gguf"
    elif not told:
        untrusted.refuse_codes(contents.infos.values())
    else:
        entries = quantized.entries(contents)
    found, settings = parameters.from_headers(entries, settings)
    if not (found.linears or found.fused_experts):
        hint = "give a language model in safetensors or GGUF"
        raise QuantkitError(f"no tensor of {contents.source} is the weight of a linear", hint, UNSUPPORTED)
    if not found.quantized:
        return Source(contents.source, settings, found, basis)
    return Source(contents.source, settings, found, basis, (QUANTIZED,), layout)


def _layout(told: Mapping[str, Any]) -> str:
    """How a quantization_config calls what it describes; bitsandbytes' oldest do not say."""
    unnamed = "bitsandbytes" if {"load_in_8bit", "load_in_4bit"} & told.keys() else "unnamed"
    return str(told.get("quant_method") or unnamed)


def _of_config(name: str, config: Mapping[str, Any], count: Count | None) -> Source:
    notes = ("it is quantized already: all sizes are those of its original",)
    notes = notes if quantization_of(config) else ()
    if count is None:
        if config.get("vision_config") or config.get("audio_config"):
            notes += ("of its parts only the language model is counted",)
        return Source(name, *from_config(config), "config.json", notes)
    try:
        settings, _ = from_config(config)
    except QuantkitError:  # then only what the file says is known
        settings = Settings.of(config)
    if count.active is None:
        told = {**settings.defaults, **settings.values}
        dense = not any(value for key, value in told.items() if MIXTURE.search(key))
        count = replace(count, active=count.total if dense else None)
    if count.active is None:
        notes += (f"for tokens/s say how many parameters are active: --params {_example(count)}",)
    return Source(name, settings, None, "--params", (AS_IF_PACKED, *notes), count=count)


def from_config(config: Mapping[str, Any]) -> tuple[Settings, Parameters]:
    """A model as transformers builds it. Raises QuantkitError (exit code 4) if it cannot."""
    settings = Settings.of(config)
    experts = settings.size(*EXPERTS, most=MOST_EXPERTS) if settings.get(*EXPERTS) else 1
    if settings.hidden and settings.layers * experts > MOST_MODULES:
        raise QuantkitError(
            f"config.json describes {settings.layers} layers of {experts} experts", "download it again"
        )
    from quantkit.capacity import meta  # it takes seconds to import

    try:
        shapes = meta.shapes(config)
    except Unsupported as error:
        raise QuantkitError(
            f"parameters of {settings.model_type} cannot be computed from config.json alone: {error}",
            hint="give a folder or hub id with safetensors, whose headers say it exactly, or say how many "
            "beside it: --params 70B or 671B-A37B",
            exit_code=UNSUPPORTED,
        ) from error
    element = DTYPE_BYTES[settings.stored_dtype]
    entries = [Tensor(name, shape, element * math.prod(shape)) for name, shape in shapes.items()]
    found, settings = parameters.from_headers(entries, settings, exact=False)
    return settings, found


def _example(count: Count) -> str:
    return f"{count.total / 1e9:g}B-A{max(1, round(count.total / 2e10))}B"


def parse_count(text: str) -> Count:
    """Parameters as users write them: `175B`, `350M`, `1.5e9`, a plain number; `671B-A37B` with those active.

    Raises QuantkitError for anything else.
    """
    total, dash, active = text.upper().partition("-A")
    counts = _number(total), _number(active) if dash else None
    if not counts[0] or (dash and not (counts[1] and counts[1] <= counts[0])):
        raise QuantkitError(
            f"--params {text!r} is no number of parameters", "for example 175B, 350M or 30B-A3B", USAGE
        )
    if counts[0] < FEWEST:
        hint = f"say the unit: --params {text.strip()}B for billions, or {text.strip()}M"
        raise QuantkitError(f"--params {text} is no more than {count(counts[0], 'parameter')}", hint, USAGE)
    return Count(*counts)


def _number(text: str) -> int | None:
    """None for what is no number from 1 to 10^15."""
    text = text.strip().replace(",", "").replace("_", "")
    match = re.fullmatch(r"(\d{1,16}(?:\.\d{0,16})?(?:E\+?\d{1,2})?)\s*([KMBT]?)", text)
    number = round(float(match[1]) * UNITS[match[2]]) if match else 0
    return number if 0 < number < 10**15 else None
