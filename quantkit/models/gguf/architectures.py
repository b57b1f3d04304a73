"""The architectures that llama.cpp runs and quantkit writes and reads: one row of data each.

A row relates llama.cpp's metadata to fields of transformers' configuration, in both directions, and says
what llama.cpp takes for granted. Sources: the loaders of llama.cpp (src/models) for keys and for what is
computed whatever the file says, transformers' configurations for the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.models.gguf.architecture import GATE, Architecture
from quantkit.models.gguf.dense import DENSE
from quantkit.models.gguf.sparse import SPARSE, UNLIKE

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TABLE = (*DENSE, *SPARSE)


def of_config(config: PretrainedConfig) -> Architecture:
    """The row of a configuration's model_type. Raises QuantkitError (exit code 4) when there is none."""
    for row in TABLE:
        if config.model_type in row.model_types:
            return row
    if otherwise := UNLIKE.get(config.model_type):
        raise QuantkitError(
            f"GGUF of {config.model_type} is not supported: llama.cpp computes {otherwise}",
            hint="only models that it computes as transformers does are written",
            exit_code=UNSUPPORTED,
        )
    known = sorted(kind for row in TABLE for kind in row.model_types)
    raise QuantkitError(
        f"GGUF of {config.model_type} is not supported",
        hint=f"quantkit knows what llama.cpp expects of: {', '.join(known)}",
        exit_code=UNSUPPORTED,
    )


def of_file(metadata: Mapping[str, Any]) -> Architecture:
    """The row that a file's `general.architecture` names. Raises QuantkitError (exit code 4) for another."""
    name = metadata.get("general.architecture")
    experts = metadata.get(f"{name}.expert_count")
    keys = {key.removeprefix(f"{name}."): value for key, value in metadata.items()}
    if row := named(str(name), keys):
        return row
    if experts and named(str(name), {}):
        raise QuantkitError(
            f"the GGUF file holds a mixture of {experts} experts",
            hint=f"quantkit reads mixtures of: {', '.join(row.name for row in TABLE if row.mixture)}",
            exit_code=UNSUPPORTED,
        )
    raise QuantkitError(
        f"GGUF files of {name or 'no architecture'} are not read",
        hint=f"quantkit reads: {', '.join(sorted(row.name for row in TABLE))}",
        exit_code=UNSUPPORTED,
    )


def named(name: str, keys: Mapping[str, Any]) -> Architecture | None:
    """The row of an architecture of llama.cpp, by the keys below its name; None where there is none.

    Of two mixtures with one name, the one whose router computes as the file says; the first if it says
    nothing.
    """
    rows = [row for row in TABLE if row.name == name and row.mixture == bool(keys.get("expert_count"))]
    gate = keys.get(GATE)
    return next((row for row in rows if row.constants.get(GATE) == gate), rows[0] if rows else None)
