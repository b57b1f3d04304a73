"""fp8 checkpoints written by quantkit, loaded by transformers: with compressed-tensors, and by itself."""

from dataclasses import replace

import cases
import pytest
import torch
from cases import Case
from nights import by_day
from sums import assert_sums

from quantkit.evaluation.stream import StreamedModel
from quantkit.layouts.compressed_tensors import CompressedTensorsLayout
from quantkit.layouts.fp8 import Fp8Layout
from quantkit.models.files.open import open_checkpoint

pytestmark = cases.MARKS
DECODED = ("dequantized", "fp8")  # loaders that make plain linears in bfloat16, and leave inputs alone


def fp8(loader: str, source: str = "demo", **options) -> Case:
    return Case(options, source, loader=loader, method="fp8")


CASES = {
    "rows, compressed": fp8("compressed"),
    "rows, dequantized": fp8("dequantized"),
    "rows, gptq": fp8("compressed", solver="gptq"),
    "blocks, compressed": fp8("compressed", block=128),
    "blocks, dequantized": fp8("dequantized", block=128),
    "static, compressed": fp8("compressed", static=True),
    "qwen2": fp8("compressed", "qwen2"),  # biases
    "qwen2 tied": fp8("compressed", "qwen2 tied"),
    "mixtral": fp8("dequantized", "mixtral"),
    "cache": fp8("compressed", kv_cache=True),
    "mx, compressed": replace(fp8("compressed", format="mxfp8"), dtype="bfloat16"),
    "mx, dequantized": fp8("dequantized", format="mxfp8", solver="gptq"),
    "deepseek": fp8("fp8", layout="deepseek"),
    "deepseek, exclude": replace(fp8("fp8", layout="deepseek"), exclude=(r"layers\.0\.",)),
}
DAY = ("rows, compressed", "blocks, compressed", "static, compressed", "cache")
DAY += ("mx, compressed", "deepseek")
COMPARED = [name for name in CASES if name not in ("cache", "mx, compressed")]


@pytest.mark.parametrize("name", by_day(COMPARED, DAY))
def test_client_computes_what_quantkit_wrote(name, folders, client, monkeypatch):
    """The same logits; with inputs rounded to e4m3, but where the client gives that up."""
    case, theirs = CASES[name], client[name]
    cases.inspect_agrees(case, folders[name], theirs)
    assert theirs["error"] is None
    if case.loader in DECODED:
        for layout in (CompressedTensorsLayout, Fp8Layout):
            monkeypatch.setattr(layout, "module", lambda *arguments: None)
            monkeypatch.setattr(layout, "values", lambda own, parts: bfloat16(own.decode(parts).values()))
    cases.compare(replace(case, tolerance=1e-4), folders[name], theirs)


@pytest.mark.cases("mx, compressed")
def test_client_computes_mxfp8_as_quantkit_does(folders, client):
    """In bfloat16, the only precision in which it rounds inputs."""
    own = cases.Own(folders["mx, compressed"], torch.bfloat16).logits(cases.IDS)
    theirs = client["mx, compressed"]
    cases.inspect_agrees(CASES["mx, compressed"], folders["mx, compressed"], theirs)
    assert_sums(theirs["logits"], own, 2**-6)


@pytest.mark.parametrize("name", by_day(CASES, DAY))
def test_client_decodes_the_same_weights_bit_for_bit(name, folders, client):
    rounded = {"rounded": bfloat16} if CASES[name].loader in DECODED else {}
    cases.same_weights(folders[name], client[name], **rounded)


@pytest.mark.cases("cache")
def test_client_quantizes_keys_and_values_as_eval_does(folders, client):
    ids = torch.tensor([cases.IDS])
    model = StreamedModel.open(open_checkpoint(str(folders["cache"])), torch.float32, torch.device("cpu"))
    hidden = next(iter(model.states([ids], lambda *progress: None)))
    assert_sums(model.skeleton.logits(hidden[0]).float(), client["cache"]["logits"], 1e-5)
    assert (model.kv["dtype"], model.kv["layers"]) == ("fp8", 2)


def bfloat16(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()
