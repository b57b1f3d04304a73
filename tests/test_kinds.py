"""Blocks of every kind: mixtures, state-space models, hybrids, several streams, decoders without their
encoder."""

import json

import jobs
import pytest
import torch
from blocks import open_skeleton
from families import KINDS, STREAMS
from nights import by_day, nightly
from sums import assert_sums
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from quantkit.models.files.open import open_checkpoint
from quantkit.models.skeleton import Skeleton, linears
from quantkit.quantize.calibrate import walk
from quantkit.quantize.solving import UNREACHED

MIXTURES = {"glm_moe_dsa", "mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3", "jamba", "qwen3_next"}
KEPT = {  # what is kept as it is, by its name inside a block
    "mixtral": {"block_sparse_moe.gate.weight"},
    "qwen3_moe": {"mlp.gate.weight"},
    "qwen2_moe": {"mlp.gate.weight"},
    "deepseek_v3": {"mlp.gate.weight"},
    "mamba2": {"mixer.conv1d.weight"},
    "jamba": {"mamba.A_log", "mamba.conv1d.weight", "feed_forward.router.weight"},
    "bamba": {"mamba.conv1d.weight"},
    "qwen3_next": {"mlp.gate.weight", "linear_attn.conv1d.weight"},
    "olmo_hybrid": {f"linear_attn.{part}_conv1d.weight" for part in "qkv"},
    "bart": set(),
    "gemma3n": set(),
    "gemma4": set(),
    "glm_moe_dsa": {"mlp.gate.weight"},
}
ALL = [*KINDS, *STREAMS]
IDS = torch.randint(512, (2, 40), generator=torch.Generator().manual_seed(0))


def quantize(method: str, source, folder, options: dict | None = None, **run):
    """Of a few sequences of text."""
    return jobs.quantize(method, source, folder / "out", options, calibration=jobs.calibration(folder), **run)


@pytest.mark.parametrize("kind", ALL)
def test_streamed_logits_equal_the_whole_models(tiny_model, kind):
    folder = tiny_model(kind)
    skeleton = open_skeleton(folder)
    (hidden,) = walk.through(skeleton, [IDS])
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS, use_cache=False).logits
    assert want.std() > 0.02
    for row, expected in zip(hidden, want, strict=True):
        assert (skeleton.logits(row) - expected).abs().max() <= 1e-4


DAY = ("jamba", "qwen3_next", "gemma3n", "bart")


@pytest.mark.parametrize("kind", by_day(ALL, DAY))
def test_linears_are_quantized_and_all_else_keeps_its_bytes(tiny_model, tmp_path, kind):
    source = tiny_model(kind, tokenizer=True)
    summary = quantize("gptq", source, tmp_path, jobs.GPTQ)
    described = json.loads((tmp_path / "out" / "quantkit.json").read_text())
    kept = described.get("kept_parameters", [])
    assert {row["name"].split(".", 3)[3] for row in kept} == KEPT[kind]
    assert ("kept_parameters" in described) == bool(kept) and summary.kept_parameters == kept
    before, after = jobs.tensors(source), jobs.tensors(tmp_path / "out")
    for row in kept:
        assert torch.equal(before[row["name"]], after[row["name"]])
        assert before[row["name"]].nbytes == row["bytes"]
        assert list(before[row["name"]].shape) == row["shape"]
    packed = {row["name"] for row in described["linears"] if "grid" in row}
    for name in before.keys() & after.keys():
        assert torch.equal(before[name], after[name]), name
    assert before.keys() - after.keys() == {f"{name}.weight" for name in packed}
    assert len(packed) == summary.linears and packed
    if kind in MIXTURES:
        rows = jobs.manifest(tmp_path / "out").values()
        check_tokens_per_expert(summary.experts, [row for row in rows if "tokens" in row])
    else:
        assert summary.experts is None


def check_tokens_per_expert(seen, rows: list[dict]) -> None:
    """What is summed up of a mixture's experts is what its manifest says of each."""
    assert {row["name"].split(".")[-3] for row in rows} == {"experts"}
    experts = {row["name"].rpartition(".")[0]: row["tokens"] for row in rows}
    found = sorted(experts.values())
    assert (seen.experts, seen.fewest, seen.median, seen.most) == (
        len(found), found[0], found[len(found) // 2], found[-1],
    )  # fmt: skip
    narrow = {row["name"].rpartition(".")[0] for row in rows if row["tokens"] < row["shape"][1]}
    assert seen.starved == len(narrow)


@pytest.mark.parametrize("sequential", ["suspend", *nightly("repeat")])
def test_batches_of_several_streams_do_not_mix(tiny_model, tmp_path, sequential):
    """Many batches at once inside a block, each with embeddings, keys and values of its own: the job verifies
    that the first batch computes alone what it did among others."""
    source = tiny_model("gemma4", tokenizer=True)
    summary = quantize("gptq", source, tmp_path, jobs.GPTQ, sequential=sequential, batch_size=1)
    assert summary.error < summary.rtn_error


@pytest.mark.parametrize("kind", ["gemma3n", "gemma4"])  # mixtures add up in another order
def test_streams_are_evaluated_in_16_bit(tiny_model, kind):
    """Ids and places of tokens are whole numbers, which bfloat16 does not hold beyond 256."""
    folder = tiny_model(kind)
    skeleton = Skeleton(open_checkpoint(str(folder)), torch.bfloat16, torch.device("cpu"))
    skeleton.load_rest()
    (hidden,) = walk.through(skeleton, [IDS])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        want = model(IDS, use_cache=False).logits
    assert_sums(torch.stack([skeleton.logits(row) for row in hidden]), want, 2**-6)


def test_what_is_kept_is_said_before_and_after(quantkit, tiny_model, tmp_path):
    source = tiny_model("qwen3_next", tokenizer=True)
    jobs.calibration(tmp_path)
    command = ["gptq", str(source), "--group-size", "32", "--calibration", "calibration.txt"]
    command += ["--samples", "6", "--seqlen", "32", "-o", "out", "--transform", "none", "--refine", "0"]
    kept = "linear_attn.conv1d, mlp.gate: 5 tensors, "
    code, said, _ = quantkit(*command, "--dry-run")
    assert code == 0 and f"kept as is   {kept}" in said
    code, said, _ = quantkit(*command, "--dry-run", "--json")
    rows = json.loads(said)["kept_parameters"]
    assert len(rows) == 5 and rows[0].keys() == {"name", "shape", "bytes"}
    code, said, _ = quantkit(*command)
    assert code == 0 and f"kept as is   {kept}" in said
    assert "experts      tokens per expert: fewest " in said
    assert "of 12 below their width" in said


def test_linears_that_no_token_enters_are_rounded_to_nearest(tiny_model, tmp_path):
    source = tiny_model("bart", tokenizer=True)
    summary = quantize("gptq", source, tmp_path, jobs.GPTQ)
    assert {name.split(".")[-2] for name in summary.fallbacks} == {"encoder_attn"}
    assert set(summary.fallbacks.values()) == {UNREACHED} and len(summary.fallbacks) == 8


@pytest.mark.parametrize("sequential", ["suspend", *nightly("repeat")])
def test_a_linear_called_twice_is_solved_for_both_inputs(tiny_model, tmp_path, monkeypatch, sequential):
    """The job verifies that what it wrote computes what it saw."""

    def twice(self, x):
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(self.up_proj(self.down_proj(inner)))

    monkeypatch.setattr(LlamaMLP, "forward", twice)
    source = tiny_model("llama", tokenizer=True)
    summary = quantize("gptq", source, tmp_path, jobs.GPTQ, sequential=sequential)
    assert not summary.fallbacks and summary.error < summary.rtn_error


def test_small_projections_that_no_group_fits_stay_in_16_bit(tiny_model, tmp_path):
    source = tiny_model("jamba", tokenizer=True, mamba_dt_rank=8)
    summary = quantize("gptq", source, tmp_path, jobs.GPTQ)
    rows = [row for row in jobs.manifest(tmp_path / "out").values() if row["name"].endswith("dt_proj")]
    assert [row["kept"] for row in rows] == ["small; 8 columns do not split into groups of 32"] * len(
        rows
    ) and rows
    assert summary.kept >= len(rows)
    assert not linears.kept_parameters(open_skeleton(source))[0]["name"].endswith("dt_proj.weight")
