"""Reads a model without loading weights: config.json and the headers of the weight files.

Codes and scales of quantized checkpoints and GGUF files, which inspection/stored.py finds, become the tensors
that a plain checkpoint of the model would have, so that the same computations apply.
"""

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.capacity import Unsupported, kv_cache, parameters
from quantkit.capacity.parameters import CONV1D_FAMILIES, DTYPE_BYTES, MOST_EXPERTS, Parameters, Tensor
from quantkit.capacity.settings import Settings
from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, count, name_all, require
from quantkit.inspection.stored import Weight, weights_of
from quantkit.layouts import quantization_of
from quantkit.models import kv_types
from quantkit.models.files import safetensors_folder, untrusted
from quantkit.models.files.headers import Contents, open_contents
from quantkit.models.files.safetensors_folder import TensorInfo
from quantkit.models.machine.expert_share import EXPERTS

QUANTIZED = "the model is quantized already: all rows but `as stored` are those of its original in 16 bit"
AS_IF_PACKED = (
    "sizes as if every parameter were packed: embeddings that stay in 16 bit come on top (GGUF file types: "
    "at the bits per weight of a Llama's file)"
)
MOST_MODULES = 300_000  # layers times experts; more mean a damaged config.json
FEWEST = 1000  # parameters; with fewer, the user forgot the unit
NUMBER = r"(\d{1,16}(?:\.\d{0,16})?(?:E\+?\d{1,2})?)\s*([KMBT]?)"
GGUF = "the GGUF header"  # as the basis of a source
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
FLOAT8, FLOATS = "F8", ("F", "BF")  # prefixes of type names
NAMES = {  # part of a GGUF name -> usual name in checkpoints; the first match counts
    r"^token_embd\.": "model.embed_tokens.",
    r"^position_embd\.": "model.embed_positions.",
    r"^output\.": "lm_head.",
    r"\.attn_([qkv])\.": r".self_attn.\1_proj.",
    r"\.attn_qkv\.": ".self_attn.qkv_proj.",
    r"\.attn_output\.": ".self_attn.o_proj.",
    r"\.ffn_(gate|up|down)_exps\.": r".mlp.experts.\1_proj.",
    r"\.ffn_(gate|up|down)\.(\d+)\.": r".mlp.experts.\2.\1_proj.",  # in old files one by one
    r"\.ffn_gate_inp\.": ".mlp.gate.",
    r"\.ffn_(gate|up|down)\.": r".mlp.\1_proj.",
}
FACTORS = re.compile(r"rope_(freqs|factors_\w+)\.weight")  # factors of rotary frequencies, not parameters


@dataclass(frozen=True)
class Source:
    """A model, or only the numbers of its parameters. basis: where the parameters come from, in words.

    name, parameters: None if only `count` is known. layout: such as `gptq` or `fp8`; None if no weights are
    quantized. count: (parameters, parameters used per token).
    """

    name: str | None
    parameters: Parameters | None
    basis: str
    notes: tuple[str, ...] = ()
    layout: str | None = None
    count: tuple[int, int] | None = None

    @property
    def settings(self) -> Settings | None:
        return self.parameters and self.parameters.settings


def read(source: str, revision: str | None = None, offline: bool = False) -> Source:
    """Read a local folder, a GGUF file, a config.json, or a hub id (only headers are downloaded). Raises
    QuantkitError for other sources, and if there are no headers and the family is unknown."""
    path = Path(source).expanduser()
    if path.suffix == ".json" and path.is_file():
        return _of_config(source, safetensors_folder.read_json(path))
    contents = open_contents(source, revision, offline, strict=True, bare=True)
    if not contents.infos and contents.container != "gguf":
        return _of_config(source, contents.config)
    return _of_headers(contents)


def cache_bytes(path: Path, tokens: int, dtype: str) -> int | None:
    """Return the bytes of the KV cache of one sequence, from a checkpoint's headers; None if unknown. dtype:
    type of the cache's values, by `kv_types`."""
    try:
        source = read(str(path))
        caches = kv_cache.layer_caches(source.settings, source.parameters)
    except (QuantkitError, Unsupported):
        return None
    return kv_cache.sequence_bytes(caches, tokens, kv_types.TYPES[dtype].nbytes)


def _of_headers(contents: Contents) -> Source:
    contents = replace(contents, infos=contents.head.settle(contents.infos))
    settings, quantization = Settings.of(contents.config), contents.quantization
    entries: Iterable[TensorInfo | Tensor] = contents.infos.values()
    old = {"load_in_8bit", "load_in_4bit"} & quantization.keys()  # bitsandbytes without a quant_method
    layout = str(quantization.get("quant_method") or ("bitsandbytes" if old else "unnamed"))
    basis = "safetensors headers"
    gguf = contents.container == "gguf"
    if gguf:
        latent = "kv_lora_rank" in contents.config  # no tensor has the width of its cache
        settings = Settings(contents.config, contents.config if latent else None)
        entries, basis, layout = of_gguf(contents, settings), GGUF, "gguf"
    elif quantization:
        entries = of_quantized(contents)
    else:
        untrusted.refuse_codes(contents.infos.values())
    stored = parameters.from_headers(entries, settings)
    if not stored.linears:
        hint = "give a language model in safetensors or GGUF"
        raise QuantkitError(f"no tensor of {contents.source} is the weight of a linear", hint, UNSUPPORTED)
    if not stored.quantized:
        return Source(contents.source, stored, basis)
    return Source(contents.source, stored, basis, (QUANTIZED,), layout)


def of_quantized(contents: Contents) -> list[Tensor]:
    """Return every parameter of a quantized checkpoint, with its original shape. Raises QuantkitError (exit
    code 4), with names, if tensors are stored in an unknown way."""
    weights = weights_of(contents)
    odd = [weight.name for weight in weights if not _understood(weight)]
    what = f"{contents.source} stores {name_all(odd, 2)} in an unknown way"
    require(not odd, what, "plan the original checkpoint, or give only --params", UNSUPPORTED)
    shapes: dict[str, tuple[int, ...]] = {}
    if any(weight.shape is None for weight in weights):  # bitsandbytes stores no shapes in headers
        from quantkit.capacity import meta

        with suppress(Unsupported):
            shapes = meta.shapes(contents.config)
    element = DTYPE_BYTES[Settings.of(contents.config).stored_dtype]
    return [_entry(weight, shapes, element) for weight in weights]


def _understood(weight: Weight) -> bool:
    """Return whether the number of parameters of a stored weight is known."""
    if weight.codes:
        return bool(weight.parameters) and not weight.codes.problem
    return weight.dtype.startswith(FLOATS) or len(weight.shape or ()) < 2


def _entry(weight: Weight, shapes: Mapping[str, tuple[int, ...]], element: int) -> Tensor:
    """Return the original parameter. shapes: where headers have none. element: bytes of a value."""
    if not weight.parameters:  # a scale of keys or values
        return Tensor(weight.name, (0,), 0, weight.nbytes)
    if not weight.codes and not weight.dtype.startswith(FLOAT8):
        return Tensor(weight.name, tuple(weight.shape), weight.nbytes)
    shape = weight.shape or shapes.get(weight.name)
    if shape is None or math.prod(shape) != weight.parameters:
        shape = (weight.parameters,)
    return Tensor(weight.name, tuple(shape), element * weight.parameters, weight.nbytes)


def of_gguf(contents: Contents, settings: Settings) -> list[Tensor]:
    """Return every parameter of a GGUF file under the usual names of checkpoints. nbytes of quantized ones is
    that of 16 bit. Raises QuantkitError (exit code 4) for a file without a language model."""
    whole = f"{contents.metadata.get('general.architecture')}.block_count" in contents.metadata
    hint = "give the GGUF file of a model, not of an importance matrix or a vocabulary"
    require(whole, f"{contents.path} holds no language model", hint, UNSUPPORTED)
    weights = (weight for weight in weights_of(contents) if not FACTORS.fullmatch(weight.name))
    return [_entry(_renamed(weight, settings), {}, 2) for weight in weights]


def _renamed(weight: Weight, settings: Settings) -> Weight:
    name, shape = weight.name, weight.shape
    for pattern, usual in NAMES.items():
        name, matches = re.subn(pattern, usual, name)
        if matches:
            break
    if settings.model_type in CONV1D_FAMILIES and name.startswith("blk.") and len(shape) == 2:
        shape = shape[::-1]  # transformers stores these [in, out]
    return replace(weight, name=name, shape=shape)


def _of_config(name: str, config: Mapping[str, Any]) -> Source:
    notes = ()
    if quantization_of(config):
        notes = ("the model is quantized already: all sizes are those of its original",)
    if config.get("vision_config") or config.get("audio_config"):
        notes += ("only the language model is counted, not other modalities",)
    return Source(name, from_config(config), "config.json", notes)


def from_config(config: Mapping[str, Any]) -> Parameters:
    """Build the model with transformers; return its parameters. Raises QuantkitError (4)."""
    settings = Settings.of(config)
    experts = settings.size(*EXPERTS, most=MOST_EXPERTS) if settings.get(*EXPERTS) else 1
    what = f"config.json describes {settings.layers} layers of {experts} experts"
    few = not settings.hidden or settings.layers * experts <= MOST_MODULES
    require(few, what, "download it again")
    from quantkit.capacity import meta  # takes seconds to import

    try:
        shapes = meta.shapes(config)
    except Unsupported as error:
        what = f"parameters of {settings.model_type} cannot be computed from config.json alone: {error}"
        hint = "give a folder or hub id with safetensors, or only --params 70B or 671B-A37B"
        raise QuantkitError(what, hint, UNSUPPORTED) from error
    element = DTYPE_BYTES[settings.stored_dtype]
    entries = [Tensor(name, shape, element * math.prod(shape)) for name, shape in shapes.items()]
    return parameters.from_headers(entries, settings, exact=False)


def parse_count(text: str) -> tuple[int, int]:
    """Parse --params into (parameters, parameters used per token): `175B`, `350M`, `1.5e9`, `671B-A37B`.
    Raises QuantkitError for other texts."""
    numbers = [re.fullmatch(NUMBER, number.strip().replace(",", "")) for number in text.upper().split("-A")]
    counts = [round(float(match[1]) * UNITS[match[2]]) for match in numbers if match]
    if not len(counts) == len(numbers) <= 2 or not 0 < counts[-1] <= counts[0] < 10**15:
        hint = "for example 175B, 350M or 30B-A3B"
        raise QuantkitError(f"--params {text!r} is no number of parameters", hint, USAGE)
    if counts[0] < FEWEST:
        hint = f"add the unit: --params {text.strip()}B for billions, or {text.strip()}M"
        raise QuantkitError(f"--params {text} is no more than {count(counts[0], 'parameter')}", hint, USAGE)
    return counts[0], counts[-1]
