"""What the maker of a checkpoint recorded about each of its linears, in the manifest beside the weights."""

from __future__ import annotations

import json
from dataclasses import dataclass

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint


@dataclass(frozen=True)
class LayerErrors:
    """Relative squared error of each quantized linear, by its stored name.

    measure: "output", `|X(W - Ŵ)ᵀ|² / |X Wᵀ|²` on the calibration tokens, or "weight", `|W - Ŵ|² / |W|²`
    where there were none.
    """

    measure: str
    linears: dict[str, float]


def read_layer_errors(checkpoint: Checkpoint) -> LayerErrors | None:
    """From the checkpoint's manifest; None where it has none. Raises QuantkitError if it is no manifest."""
    stored = checkpoint.manifest()
    if stored is None:
        return None
    try:
        rows = [row for row in json.loads(stored)["linears"] if row.get("error") is not None]
        errors = {str(row["name"]): float(row["error"]) for row in rows}
        measured = any(row["rtn_error"] is not None for row in rows)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise QuantkitError(
            f"the quantkit.json of {checkpoint.source} is not a manifest of quantkit: {error!r}",
            hint="it only tells what each linear lost: take it away, or write the checkpoint again",
        ) from error
    return LayerErrors("output" if measured else "weight", errors) if errors else None
