"""Whole awq jobs: what they write is better than rounding to nearest, says what it is, and can be resumed."""

import json
import math

import jobs
import pytest
import torch
import transformers
from nights import nightly

from quantkit.layouts.awq import AwqLayout
from quantkit.models.files.open import open_checkpoint

SMALL = {"group_size": 32, "candidates": 8}
RUN = {"batch_size": 2, "dtype": "float32"}


@pytest.fixture
def outliers(tiny_model):
    """`outliers("llama")`: a tiny model whose norms give a few channels large values."""

    def make(family: str, **arguments):
        folder = tiny_model(family, tokenizer=True, num_hidden_layers=2, **arguments)

        def spread(name: str, tensor: torch.Tensor) -> None:
            if tensor.ndim == 1 and name.endswith("weight") and tensor.numel() == 64:
                tensor[[3, 40]] = 15

        return jobs.rewrite(folder, spread)

    return make


@torch.no_grad()
def dequantized_logits(source, written=None) -> torch.Tensor:
    """By transformers: the source model with the tensors of `written`, packed ones decoded."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    if written:
        checkpoint = open_checkpoint(str(written))
        for name, parameter in model.named_parameters():
            if name in checkpoint.names:
                parameter.copy_(checkpoint.read(name, torch.float32))
    ids = torch.randint(500, (2, 48), generator=torch.Generator().manual_seed(5))
    return model(ids).logits


def divergence(source, written) -> float:
    base, other = (dequantized_logits(source, folder).double().log_softmax(-1) for folder in (None, written))
    return (base.exp() * (base - other)).sum(-1).mean().item()


@pytest.mark.parametrize("family, solver", [("llama", "rtn"), *nightly(("gemma2", "gptq"))])
def test_it_beats_rounding_to_nearest(outliers, tmp_path, family, solver):
    model, text = outliers(family), jobs.calibration(tmp_path)
    jobs.quantize("awq", model, tmp_path / "awq", SMALL | {"solver": solver}, calibration=text, **RUN)
    plain = {
        "solver": "rtn",
        "group_size": 32,
        "search_scale": False,
        "sym": False,
        "checkpoint_format": "gptq_v2",
    }
    jobs.quantize("gptq", model, tmp_path / "rtn", plain, dtype="float32")
    assert divergence(model, tmp_path / "awq") < 0.85 * divergence(model, tmp_path / "rtn")
    rows = jobs.manifest(tmp_path / "awq").values()
    errors, baselines = (math.fsum(row[key] for row in rows) for key in ("error", "rtn_error"))
    assert errors < 0.85 * baselines and len(rows) == 14
    config = json.loads((tmp_path / "awq" / "config.json").read_text())["quantization_config"]
    assert config == AwqLayout(32).config([])


@pytest.mark.processor
def test_scales_are_folded_into_norms_that_are_written(outliers, tmp_path):
    """Norms are divided by what the columns of a kept linear beside them are multiplied by; each is
    stored in the source's precision, and the divided columns make up for a norm's rounding."""
    model, text = outliers("llama", dtype="bfloat16"), jobs.calibration(tmp_path)
    output = tmp_path / "out"
    jobs.quantize("awq", model, output, SMALL, calibration=text, exclude=("k_proj|gate_proj",), **RUN)
    before, after, rows = jobs.tensors(model), jobs.tensors(output), jobs.manifest(output)
    moved = 0
    for block in (0, 1):
        for norm, kept in (
            ("input_layernorm", "self_attn.k_proj"),
            ("post_attention_layernorm", "mlp.gate_proj"),
        ):
            prefix = f"model.layers.{block}"
            names = f"{prefix}.{norm}.weight", f"{prefix}.{kept}.weight"
            assert rows[f"{prefix}.{kept}"]["kept"] == "--exclude k_proj|gate_proj"
            assert all(after[name].dtype == torch.bfloat16 for name in names)
            scale = before[names[0]].double() / after[names[0]].double()
            moved += not torch.equal(before[names[0]], after[names[0]])
            exact = before[names[1]].double() * scale
            torch.testing.assert_close(after[names[1]].double(), exact, rtol=2**-8, atol=0)
    assert moved >= 3
    for name in before:
        if "norm" not in name and "layers" not in name:
            assert torch.equal(after[name], before[name])
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    kept = [name for name in rows if "kept" in rows[name]]
    assert config["modules_to_not_convert"] == [*kept, "lm_head"] and len(kept) == 4


def test_without_zero_points_all_of_them_are_8(outliers, tmp_path):
    model, text = outliers("llama"), jobs.calibration(tmp_path)
    for zero_point in (True, False):
        output = tmp_path / str(zero_point)
        jobs.quantize("awq", model, output, SMALL | {"sym": not zero_point}, calibration=text, **RUN)
        zeros = [tensor for name, tensor in jobs.tensors(output).items() if name.endswith("qzeros")]
        assert len(zeros) == 14
        eights = [bool((words == 0x88888888 - (1 << 32)).all()) for words in zeros]
        assert all(eights) != zero_point and any(eights) != zero_point
        config = json.loads((output / "config.json").read_text())["quantization_config"]
        assert config["zero_point"] is zero_point


@pytest.mark.processor
@pytest.mark.parametrize(
    "family, unfolded",
    [
        ("opt", ()),
        ("olmo2", ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")),
        *nightly(("starcoder2", ("mlp.c_proj",)), ("falcon", ("mlp.dense_4h_to_h",))),
    ],
)
def test_other_families_are_written_and_verified(outliers, tmp_path, family, unfolded):
    """The job reads its output back and compares; here: what cannot be scaled is told, by name."""
    model, text = outliers(family, dtype="bfloat16"), jobs.calibration(tmp_path, samples=3)
    options = SMALL | {"layout": "compressed-tensors"}  # transformers wants more of awq files of two of them
    summary = jobs.quantize("awq", model, tmp_path / "out", options, calibration=text, **RUN)
    assert summary.error < summary.rtn_error
    rows = jobs.manifest(tmp_path / "out")
    told = {name for name, row in rows.items() if "nothing to fold scales into: kept at 1" in row["notes"]}
    assert told == {name for name in rows if name.endswith(unfolded)} if unfolded else not told


@pytest.mark.nightly
@pytest.mark.processor
def test_a_job_resumed_after_its_first_block_writes_the_same_bytes(outliers, tmp_path):
    model, text = outliers("llama", dtype="bfloat16"), jobs.calibration(tmp_path)
    options = SMALL | {"solver": "gptq"}
    jobs.quantize("awq", model, tmp_path / "whole", options, calibration=text, **RUN)
    with jobs.interrupted(before=1):
        jobs.quantize("awq", model, tmp_path / "out", options, calibration=text, **RUN)
    partial = tmp_path / "out.partial"
    staged = jobs.load_file(partial / "block-00000.safetensors")
    source = jobs.tensors(model)
    norms = {name for name in staged if "norm" in name}
    assert norms and all(not torch.equal(staged[name], source[name]) for name in norms)
    assert not (partial / "block-00001.safetensors").exists()

    jobs.quantize("awq", model, tmp_path / "out", options, calibration=text, resume=True, **RUN)
    whole, resumed = jobs.contents(tmp_path / "whole"), jobs.contents(tmp_path / "out")
    readmes = [files.pop("README.md") for files in (whole, resumed)]
    assert readmes[0].replace(b"whole", b"out") == readmes[1].replace(b"whole", b"out")
    assert whole == resumed
