"""Experts in nf4 and int8: refused where no client reads them, and kept where the rest is to be quantized."""

import json
import re

import families
import jobs
import pytest
import torch
import transformers as hf
from blocks import open_skeleton, streamed
from nights import nightly
from test_experts_fused import FUSED, MIXTURES
from test_skeleton import tokens

from quantkit.errors import UNSUPPORTED
from quantkit.inspection.record import describe
from quantkit.models.files.headers import open_contents

SMALL = {"hidden_size": 64, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    """`tiny_model` knows mixtures that are stored fused, too."""
    monkeypatch.setattr(families, "FAMILIES", families.FAMILIES | MIXTURES)


def test_experts_that_no_client_reads_are_refused(refuse, quantkit, tiny_model, tmp_path):
    tiny_model("mixtral", **SMALL)
    error, hint = refuse(UNSUPPORTED, "int8", "mixtral", "-o", "out")
    first = "model.layers.0.block_sparse_moe.experts.0.w1"
    assert re.match(rf"\d+ linears of experts, {first}", error) and "int8" in error
    assert "--layout compressed-tensors" in hint and "--allow-unread" in hint
    assert not list(tmp_path.glob("out*"))
    (pattern,) = re.findall(r"--exclude '([^']+)'", hint)
    planned = json.loads(quantkit("int8", "mixtral", "--exclude", pattern, "--dry-run", "--json", "-q").out)
    kept = {row["name"] for row in planned["linears"] if row["kept"] == f"--exclude {pattern}"}
    assert len(kept) == int(error.split()[0]) < len(planned["linears"])
    assert quantkit("int8", "mixtral", "--allow-unread", "--dry-run", "-q").code == 0


def test_experts_in_nf4_are_written_with_a_warning(quantkit, tiny_model):
    tiny_model("mixtral", **SMALL)
    done = quantkit("nf4", "mixtral", "--dry-run", "-q")
    assert done.code == 0 and "warning: experts in nf4 are for vLLM on one GPU" in done.err
    tiny_model("llama", **SMALL)
    assert "experts" not in quantkit("nf4", "llama", "--dry-run", "-q").err


@pytest.mark.parametrize(
    ("method", "family", "kind"),
    [
        ("nf4", "mixtral", "Linear4bit"),
        ("int8", "qwen3_moe", "Linear8bitLt"),
        *nightly(("nf4", "gpt_oss", "Linear4bit")),
    ],
)
def test_transformers_loads_the_rest_where_experts_are_kept(tiny_model, tmp_path, method, family, kind):
    """Experts keep their bytes, and the tensors that they were stored in."""
    pytest.importorskip("bitsandbytes")
    folder = tiny_model(family, **SMALL)
    jobs.quantize(method, folder, tmp_path / "out", exclude=(r"\.experts\.\d+",))
    before, after = jobs.tensors(folder), jobs.tensors(tmp_path / "out")
    experts = [name for name in before if ".experts." in name]
    assert experts and all(torch.equal(before[name], after[name]) for name in experts)
    assert {name for name in after if ".experts." in name} == set(experts)
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map="cpu", dtype=torch.float32)
    packed = [module for module in model.modules() if type(module).__name__ == kind]
    assert len(packed) == sum("grid" in row for row in jobs.manifest(tmp_path / "out").values()) == 2 * 4
    told = describe(open_contents(str(tmp_path / "out")))["clients"]
    assert [row["loads"] for row in told if row["client"] == "transformers"] == [True]
    ids = tokens()
    if method == "nf4":  # its kernel for CPUs computes in bfloat16, and routers choose otherwise
        model = model.dequantize().float()
    with torch.no_grad():
        logits = model(ids).logits.float()
    expected = streamed(open_skeleton(tmp_path / "out"), ids)
    bound = 1e-3 if method == "nf4" else 0.03
    assert ((logits - expected).norm() / expected.norm()).item() < bound


def test_a_layer_of_which_something_is_quantized_is_stored_one_by_one(tiny_model, tmp_path):
    folder = tiny_model("gpt_oss", **SMALL)
    excluded = (r"layers\.0.*\.experts\.", r"gate_proj|up_proj")
    jobs.quantize("nf4", folder, tmp_path / "out", exclude=excluded, allow_unread=True)
    written = jobs.tensors(tmp_path / "out")
    assert FUSED["gpt_oss"] in written and "model.layers.1.mlp.experts.3.gate_proj.weight" in written
    assert not [name for name in written if "layers.0.mlp.experts.0" in name]
    assert "model.layers.1.mlp.experts.gate_up_proj" not in written
