"""w8a8 checkpoints written by quantkit, loaded by transformers with compressed-tensors."""

from dataclasses import replace

import cases
import pytest
import torch
from cases import Case
from nights import by_day

from quantkit.layouts.compressed_tensors import CompressedTensorsLayout

pytestmark = cases.MARKS


def w8a8(loader: str, source: str = "demo", **options) -> Case:
    return Case(options, source, loader=loader, method="w8a8")


CASES = {
    "compressed": w8a8("compressed"),
    "dequantized": w8a8("dequantized"),
    "rtn": w8a8("compressed", solver="rtn", transform="none"),
    "qwen2": w8a8("compressed", "qwen2"),  # biases
    "exclude": replace(w8a8("compressed"), exclude=(r"layers\.0\.",)),
}
DAY = ("dequantized", "exclude")


@pytest.mark.parametrize("name", by_day(CASES, DAY))
def test_client_computes_what_quantkit_wrote(name, folders, client, monkeypatch):
    """The same logits, inputs rounded; plain linears leave inputs alone, and are in the scales' float16."""
    case, theirs = CASES[name], client[name]
    cases.inspect_agrees(case, folders[name], theirs)
    assert theirs["error"] is None
    if case.loader == "dequantized":
        layout = CompressedTensorsLayout
        monkeypatch.setattr(layout, "module", lambda *arguments: None)
        monkeypatch.setattr(layout, "values", lambda own, parts: own.decode(parts).values().half().float())
    cases.compare(replace(case, tolerance=1e-4), folders[name], theirs)


@pytest.mark.parametrize("name", by_day(CASES, DAY))
def test_client_decodes_the_same_weights_bit_for_bit(name, folders, client):
    rounded = {"rounded": torch.Tensor.half} if CASES[name].loader == "dequantized" else {}
    cases.same_weights(folders[name], client[name], **rounded)
