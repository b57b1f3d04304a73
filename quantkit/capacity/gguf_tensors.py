"""Names and shapes of the tensors of a model's GGUF files, as quantkit's exporter writes them.

Those of a dense model follow from its parameters. Experts are joined and split by the exporter: its own list,
from a model built of shapes alone, takes seconds.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

from quantkit.capacity import Unsupported
from quantkit.capacity.parameters import Parameters, Tensor
from quantkit.capacity.settings import Settings
from quantkit.models.files.head import EMBEDDING, HEAD
from quantkit.models.gguf import architectures, mixtures
from quantkit.models.gguf.architectures import Architecture

Named = Sequence[tuple[str, tuple[int, ...]]]  # name and shape of every tensor, in the file's order
POSITIONS = re.compile(r"(.*\.)?(wpe|embed_positions)\.weight")


@lru_cache(maxsize=1)
def of_model(parameters: Parameters) -> tuple[Architecture, Named] | Unsupported:
    """Return llama.cpp's architecture of a model and the tensors of its GGUF files, or the reason why there
    are none: both once for all file types."""
    settings = parameters.settings
    family = next((row for row in architectures.TABLE if settings.model_type in row.model_types), None)
    if family is None:
        return Unsupported(f"{settings.model_type} has no GGUF architecture that quantkit knows")
    if not (family.mixture or "ssm.state_size" in family.fields):
        return family, _of_dense(family, parameters)
    from quantkit.capacity import meta

    try:
        return family, meta.gguf_tensors(settings.config or settings.values)
    except Unsupported as error:
        return error


def _of_dense(family: Architecture, parameters: Parameters) -> Named:
    named = _factors(parameters.settings)
    for tensor in parameters.language_model:
        shape = (tensor.out_features, tensor.in_features) if tensor.is_linear else tensor.shape
        named.append((_name(tensor), shape))
    if family.head == "never":
        named = [(name, shape) for name, shape in named if name != mixtures.OUTPUT]
    if family.head == "always" and parameters.is_tied:
        embedding = next(shape for name, shape in named if name == mixtures.EMBEDDING)
        named.append((mixtures.OUTPUT, embedding))
    return sorted(named, key=lambda pair: mixtures.order(pair[0]))


def _name(tensor: Tensor) -> str:
    """Return a GGUF name for which llama-quantize's rules choose the type of the tensor's true GGUF name."""
    module, _, leaf = tensor.name.rpartition(".")
    if tensor.block is None:
        for pattern, name in ((EMBEDDING, "token_embd"), (POSITIONS, "position_embd"), (HEAD, "output")):
            if pattern.fullmatch(f"{module}.weight"):
                return f"{name}.{leaf}"
        return f"{module.rpartition('.')[2]}_norm.{leaf}"
    return f"blk.{tensor.block}.{tensor.projection or tensor.local.removesuffix(f'.{leaf}')}.{leaf}"


def _factors(settings: Settings) -> list[tuple[str, tuple[int, ...]]]:
    """Return the tensors with factors for rotary frequencies."""
    rope = settings.get("rope_scaling", "rope_parameters", default={})
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    if kind == "llama3":
        return [("rope_freqs.weight", (settings.head_dim // 2,))]
    if kind in ("longrope", "su"):
        length = len(rope.get("long_factor") or ())
        return [(f"rope_factors_{name}.weight", (length,)) for name in ("long", "short")]
    return []
