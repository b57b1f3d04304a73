"""GPTQ checkpoints written by quantkit, loaded by GPTQModel: alone, and through transformers and optimum."""

import cases
import pytest
from cases import Case
from nights import by_day, nightly

from quantkit.evaluation import served
from quantkit.evaluation.engines import Engine
from quantkit.models.files.open import open_checkpoint

pytestmark = cases.MARKS

CASES = {
    "4 bit": Case(),
    "4 bit, gptqmodel": Case(loader="gptqmodel", dtype="float16"),
    "4 bit, gptqmodel, bfloat16": Case(loader="gptqmodel", dtype="bfloat16"),
    "act order": Case({"act_order": "full"}),
    # |q - z| ≤ 2, so that every product is exact in float16
    "2 bit": Case({"bits": 2, "group_size": 64}, tolerance=1e-6),
    "3 bit": Case({"bits": 3}),
    "8 bit": Case({"bits": 8}),
    "5 bit": Case({"bits": 5}),
    "6 bit, asymmetric, gptqmodel": Case({"bits": 6, "sym": False}, loader="gptqmodel", dtype="float16"),
    "7 bit, gptqmodel": Case({"bits": 7}, loader="gptqmodel", dtype="float16"),
    "asymmetric": Case({"sym": False}),
    "asymmetric, gptq_v2, gptqmodel": Case(
        {"sym": False, "checkpoint_format": "gptq_v2"}, loader="gptqmodel", dtype="float16"
    ),  # which refuses asymmetric version 1 unless its own name stands in `meta.quantizer`
    "asymmetric, 3 bit, act order, shards": Case(
        {"sym": False, "bits": 3, "act_order": "full", "group_size": 64}, max_shard_gb=0.0005
    ),
    "channel": Case({"group_size": -1}),
    "shards": Case(max_shard_gb=0.0005),
    "exclude": Case(exclude=(r"layers\.0\.", r"layers\.1\.mlp\.down_proj")),
    # transformers cannot load GPT-2 here whatever the checkpoint: its _init_weights calls normal_ on
    # `c_proj.weight`, which gptqmodel's packed linears only pretend to have
    "gpt2": Case({"group_size": 32}, "gpt2", loader="gptqmodel", dtype="float16"),
    "gpt2, exclude": Case({"group_size": 32}, "gpt2", (r"h\.0\.attn",), loader="gptqmodel", dtype="float16"),
    "override, gptqmodel": Case(override=("down_proj=8,32",), loader="gptqmodel", dtype="float16"),
    "override": Case(override=("down_proj=8,32",)),
    "mixtral": Case({"group_size": 32}, "mixtral", loader="gptqmodel", dtype="float16"),
    "qwen3_moe": Case({"group_size": 32}, "qwen3_moe", loader="gptqmodel", dtype="float16"),
    "qwen2": Case({"group_size": 32}, "qwen2"),
    "head": Case({"group_size": 32, "head": 4}, "qwen2"),
    "head, gptqmodel": Case({"group_size": 32, "head": 4}, "qwen2", loader="gptqmodel", dtype="float16"),
    "head of 8 bit, gptqmodel": Case(
        {"group_size": 32, "head": 8}, "qwen2", loader="gptqmodel", dtype="float16"
    ),
}
DAY = ("4 bit", "asymmetric, 3 bit, act order, shards", "asymmetric, gptq_v2, gptqmodel")
DAY += ("override, gptqmodel", "qwen3_moe", "head, gptqmodel")


@pytest.mark.parametrize("name", by_day(CASES, DAY))
def test_client_computes_what_quantkit_wrote(name, folders, client):
    case, theirs = CASES[name], client[name]
    if name == "head":  # optimum packs the linears of blocks alone, and `inspect` says so
        assert theirs["error"] is None
        assert theirs["packed"] == len(cases.linears(folders[name])) - 1
        return
    cases.inspect_agrees(case, folders[name], theirs)
    if name == "mixtral":  # which it wants under names that only transformers uses
        assert "mlp.experts.0.gate_proj.qweight" in theirs["error"]
        return
    if name == "override":  # optimum packs all linears alike, and `inspect` says so
        assert "did not match" in theirs["error"] or "mismatch" in theirs["error"]
        return
    if name == "5 bit":
        assert "[2,3,4,8] bits" in theirs["error"]
        return
    assert theirs["error"] is None
    linears = cases.linears(folders[name])
    assert theirs["packed"] == sum("grid" in linear for linear in linears)
    assert bool(case.exclude) == any("kept" in linear for linear in linears)
    cases.compare(case, folders[name], theirs)


@pytest.mark.parametrize(("name", "agrees"), nightly(("qwen2", True), ("head", False)))
def test_verify_finds_the_head_that_transformers_fills_with_random_numbers(folders, name, agrees):
    options = ["dtype=float32", 'quantization_config={"backend": "gptq_torch"}']
    engine = Engine.find("transformers", cases.PYTHON, options)
    made = served.check(engine, [open_checkpoint(str(folders[name]))], lambda *progress: None)
    assert made["agrees"] == agrees and (made["difference"] < 1e-5 if agrees else made["difference"] > 0.1)


@pytest.mark.cases("4 bit", "asymmetric, 3 bit, act order, shards")
def test_cases_are_what_they_say(folders):
    """Shards are several files, act order scatters the groups, and the decode is not the source's weight."""
    several = "asymmetric, 3 bit, act order, shards"
    assert len(list(folders[several].glob("model-*.safetensors"))) > 2
    name = "model.layers.1.mlp.down_proj"
    for case, scattered in (("4 bit", False), (several, True)):
        g_idx = open_checkpoint(str(folders[case])).load(f"{name}.g_idx")
        assert (g_idx.diff() < 0).any() == scattered
    zeros = open_checkpoint(str(folders[several])).load(f"{name}.qzeros")
    assert len(zeros.unique()) > 10
