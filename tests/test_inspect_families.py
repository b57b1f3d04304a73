"""`quantkit inspect` finds nothing wrong with what is whole: every family, plain and quantized."""

import gguf_files
import jobs
import pytest
from families import FAMILIES, KINDS, STREAMS
from nights import by_day

from quantkit.inspection.record import describe
from quantkit.models.files.headers import open_contents

GEMMA = dict.fromkeys(("gemma2", "gemma3"), {"query_pre_attn_scalar": 16})  # as llama.cpp computes it


def problems(path) -> list[str]:
    return describe(open_contents(str(path)))["integrity"]["problems"]


DAY = ("gpt2", "mixtral", "gemma3n")


@pytest.mark.parametrize("family", by_day(FAMILIES | KINDS | STREAMS, DAY))
def test_a_whole_checkpoint_has_no_problem(tiny_model, tmp_path, family):
    source = tiny_model(family, tokenizer=True, **GEMMA.get(family, {}))
    assert problems(source) == []
    for method, options in (("gptq", {"solver": "rtn", "group_size": 32}), ("nf4", {})):
        jobs.quantize(method, source, tmp_path / method, options)
        assert problems(tmp_path / method) == []
    if family in FAMILIES.keys() - {"opt"}:  # which llama.cpp does not know
        assert problems(gguf_files.export(source, tmp_path / "model.gguf", "Q8_0")) == []


def test_experts_share_a_row(tiny_model):
    rows = describe(open_contents(str(tiny_model("mixtral"))))["tensors"]
    named = [row for row in rows if "experts" in row["name"]]
    assert [(row["name"], row["blocks"], row["count"]) for row in named] == [
        (f"block_sparse_moe.experts.*.w{k}.weight", [0, 1, 2], 12) for k in (1, 2, 3)
    ]
