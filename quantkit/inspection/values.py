"""Checks all values, or compares those of two checkpoints. Weights are decoded one at a time."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from quantkit.errors import UNSUPPORTED, QuantkitError, refusal, require
from quantkit.grids.distance import error_up_to_scales
from quantkit.inspection.clients import of_damaged
from quantkit.inspection.stored import OF_CACHE
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.gguf.tokenizer_hash import tokenizer_sha256
from quantkit.models.skeleton import Skeleton

SCHEMA = "quantkit.inspect-diff/2"
STRIPE = 256  # rows of two weights that are compared at a time
Listener = Callable[[str, int, int], None]  # activity, done, total


def check(checkpoint: Checkpoint, record: dict[str, Any], listen: Listener) -> None:
    """Add problems to the record's `integrity`: missing tensors, wrong shapes, weights that cannot be
    decoded, scales and weights that are not finite.

    If transformers cannot build the model, values are not read, and a note says so.
    """
    integrity = record["integrity"]
    try:
        skeleton = Skeleton(checkpoint, torch.float32, torch.device("cpu"))
    except QuantkitError as error:
        integrity["notes"] = [f"values were not read: {error.message}"]
        return
    checkpoint, stored = skeleton.checkpoint, skeleton.names.stored
    weights = {stored[name]: (name, tensor) for name, tensor in skeleton.stored_parameters().items()}
    problems = [f"{name} is absent" for name in skeleton.names.missing()]
    for done, parameter in enumerate(weights.values(), start=1):
        if failed := refusal(partial(skeleton.read, *parameter)):
            problems.append(failed["message"])
        listen("reading the weights", done, len(weights))
    if record["tokenizer"] and (failed := refusal(lambda: checkpoint.tokenizer)):
        problems.append(failed["message"])
    if problems:
        record["clients"] = of_damaged(record["clients"])
    integrity["problems"] += [problem for problem in problems if problem not in integrity["problems"]]
    unused = [name for name in checkpoint.names if name not in weights and not name.endswith(OF_CACHE)]
    integrity.update(deep=True, notes=[f"{name} is no part of the model" for name in unused])


def compare(
    left: Checkpoint,
    right: Checkpoint,
    records: Sequence[dict],
    written: Sequence[Sequence[dict]],
    listen: Listener,
) -> dict[str, Any]:
    """Return the JSON with relative differences `|A - B| / |A|` of all weights in both, the largest first.

    written: rows of the manifests of both. In blocks whose columns a job scaled, matrices are compared up to
    scales of rows and columns, and unequal vectors that were divided by scales are not compared.
    Raises QuantkitError if no weight is in both: these are different models.
    """
    cpu = torch.device("cpu")
    skeletons = [Skeleton(checkpoint, torch.float32, cpu) for checkpoint in (left, right)]
    weights = [made.stored_parameters() for made in skeletons]
    both = [name for name in weights[0] if name in weights[1]]
    reshaped = [name for name in both if weights[0][name].shape != weights[1][name].shape]
    what = f"{left.source} and {right.source} have no weight of the same name and shape"
    hint = "inspect them one by one: these are different models"
    require(len(reshaped) < len(both), what, hint, UNSUPPORTED)
    sides = zip(skeletons, written, strict=True)
    blocks, divided = (set().union(*found) for found in zip(*(_scaled(*side) for side in sides), strict=True))

    def read(name: str) -> list[torch.Tensor]:
        return [made.read(name, weights[k][name]) for k, made in enumerate(skeletons)]

    divided = {name for name in divided.intersection(both) if not torch.equal(*read(name))}
    alike = [name for name in both if name not in reshaped and name not in divided]
    rows = []
    for done, name in enumerate(alike, start=1):
        up_to_scales = weights[0][name].ndim == 2 and name.startswith(tuple(blocks))
        rows.append({"name": skeletons[0].names.stored[name]} | _difference(*read(name), up_to_scales))
        listen("comparing weights", done, len(alike))
    rows.sort(key=lambda row: -row["relative"])
    return {
        "schema": SCHEMA,
        "models": list(records),
        "tokenizers": _tokenizers(left, right),
        "weights": {
            "compared": len(rows),
            "equal": sum(row["largest"] == 0 for row in rows),
            "relative": _relation(sum(row.pop("lost") for row in rows), sum(row.pop("norm") for row in rows)),
            "differences": rows,
            "divided": sorted(skeletons[0].names.stored[name] for name in divided),
            "unlike": [
                {"name": name, "shapes": [list(side[name].shape) for side in weights]} for name in reshaped
            ],
            "only": [[name for name in weights[side] if name not in weights[1 - side]] for side in (0, 1)],
        },
    }


def _scaled(skeleton: Skeleton, written: Sequence[dict]) -> tuple[set[str], set[str]]:
    """Return the prefixes of blocks whose columns a job scaled, and the vectors (norms, biases) that it
    divided by the scales, by their names in the model. written: rows of the job's manifest."""
    prefix = skeleton.names.blocks + "."
    names = {stored.removesuffix(".weight"): name for name, stored in skeleton.names.stored.items()}
    shapes, blocks, divided = skeleton.stored_parameters(), set(), set()
    for row in written:
        scaled, name = row.get("scaled"), names.get(row.get("name"), "")
        into = scaled.get("into") if isinstance(scaled, dict) else None
        if into and name.startswith(prefix):
            block = f"{prefix}{name.removeprefix(prefix).partition('.')[0]}."
            blocks.add(block)
            divided |= {f"{block}{into}.weight", f"{block}{into}.bias"}
    return blocks, {name for name in divided if name in shapes and shapes[name].ndim == 1}


def _difference(left: torch.Tensor, right: torch.Tensor, up_to_scales: bool) -> dict[str, float | None]:
    """Return `lost = |A - B|²`, `norm = |A|²`, the relative difference and the largest difference; the last
    is None where unequal matrices are compared up to scales of rows and columns."""
    lost = norm = largest = 0.0
    pairs = zip(torch.atleast_1d(left).split(STRIPE), torch.atleast_1d(right).split(STRIPE), strict=True)
    for a, b in pairs:
        difference = a - b
        lost += torch.linalg.vector_norm(difference, dtype=torch.float64).item() ** 2
        norm += torch.linalg.vector_norm(a, dtype=torch.float64).item() ** 2
        largest = max(largest, difference.abs().max().item() if difference.numel() else 0.0)
    if up_to_scales and largest:
        lost, largest = norm * error_up_to_scales(left, right), None
    return {"relative": _relation(lost, norm), "largest": largest, "lost": lost, "norm": norm}


def _relation(lost: float, norm: float) -> float:
    return math.sqrt(lost / norm) if norm else float(lost > 0)


def _tokenizers(left: Checkpoint, right: Checkpoint) -> str:
    """Compare the tokenizers; return `equal`, `different`, or why they cannot be compared."""
    try:
        hashes = {tokenizer_sha256(made.tokenizer, made.text_config.vocab_size) for made in (left, right)}
    except QuantkitError as error:
        return error.message
    return "equal" if len(hashes) == 1 else "different"
