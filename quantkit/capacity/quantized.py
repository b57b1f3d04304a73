"""Parameters of a checkpoint that is quantized already: of what shape they were, from headers alone.

inspection/stored.py finds codes and scales; here they become what a plain checkpoint of the model holds,
so that all that is computed of one holds for the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quantkit.capacity import Unsupported
from quantkit.capacity.parameters import DTYPE_BYTES, Tensor
from quantkit.capacity.settings import Settings
from quantkit.errors import UNSUPPORTED, QuantkitError, name_all
from quantkit.inspection.stored import Weight, weights_of
from quantkit.models.files.headers import Contents
from quantkit.models.files.safetensors_folder import TensorInfo

FLOAT8, FLOATS = "F8", ("F", "BF")  # what names of such types begin with


def entries(contents: Contents) -> list[Tensor]:
    """Every parameter, of its own shape.

    Raises QuantkitError (exit code 4) naming what is stored in a way that is not understood.
    """
    settings = Settings.of(contents.config)
    weights = weights_of(contents)
    if odd := [weight.name for weight in weights if not _understood(weight)]:
        raise QuantkitError(
            f"how {contents.source} stores {name_all(odd, 2)} is not understood",
            hint="give the checkpoint it was made from, or --params beside its config.json",
            exit_code=UNSUPPORTED,
        )
    unknown = any(weight.shape is None for weight in weights)
    shapes = _shapes(contents.config) if unknown else {}
    element = DTYPE_BYTES[settings.stored_dtype]
    return [_entry(weight, contents.infos, shapes, element) for weight in weights]


def _understood(weight: Weight) -> bool:
    """Whether it is known how many parameters its bytes are."""
    if weight.codes:
        return bool(weight.parameters) and not weight.codes.problem
    return weight.dtype.startswith(FLOATS) or len(weight.shape or ()) < 2


def _entry(
    weight: Weight, infos: Mapping[str, TensorInfo], shapes: Mapping[str, tuple[int, ...]], element: int
) -> Tensor:
    if not weight.parameters:  # a scale of keys or values
        return Tensor(weight.name, (0,), 0, weight.nbytes)
    coded = weight.codes is not None or weight.dtype.startswith(FLOAT8)
    if not coded:
        return Tensor(weight.name, tuple(weight.shape), weight.nbytes)
    shape = weight.shape or _experts(weight, infos) or shapes.get(weight.name)
    if shape is None or math.prod(shape) != weight.parameters:
        shape = (weight.parameters,)
    return Tensor(weight.name, tuple(shape), element * weight.parameters, weight.nbytes)


def _experts(weight: Weight, infos: Mapping[str, TensorInfo]) -> tuple[int, ...] | None:
    """`[experts, rows, columns]` of MXFP4 experts, whose blocks are `[experts, rows, groups, 16]`."""
    blocks = infos.get(f"{weight.name.removesuffix('.weight')}_blocks")
    if blocks is None or len(blocks.shape) != 4:
        return None
    experts, rows, groups, nbytes = blocks.shape
    return experts, rows, groups * nbytes * 2


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """As transformers builds the model: bitsandbytes keeps shapes in a JSON text that is no header."""
    from quantkit.capacity import meta

    try:
        return meta.shapes(config)
    except Unsupported:
        return {}
