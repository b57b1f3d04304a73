"""What LLM.int8 is for: outlier channels ruin plain int8, and the split computes them apart."""

import json
import shutil
from pathlib import Path

import jobs
import pytest
import torch
import transformers
from safetensors.torch import load_file

from quantkit.evaluation import evaluate
from quantkit.evaluation import windows as windows_of
from quantkit.grids.int8 import Int8Linear
from quantkit.models.files.open import open_checkpoint
from quantkit.options import CalibrationOptions
from quantkit.quantize import loop
from quantkit.quantize.progress import Progress

HELDOUT = Path(__file__).parents[1] / "heldout" / "heldout.txt"
CHANNELS = [17, 90, 201]
FACTOR = 64  # a power of two: nothing is rounded


@pytest.fixture(scope="module")
def twin(tmp_path_factory, demo_model) -> Path:
    """The demo model with a few large channels behind its norms, which the linears read divided."""
    folder = tmp_path_factory.mktemp("twin") / "twin"
    shutil.copytree(demo_model, folder)
    return jobs.spread(folder, CHANNELS, FACTOR)


@pytest.fixture(scope="module")
def written(twin) -> Path:
    """The twin in int8, calibrated so that outliers are counted."""
    output = twin.parent / "int8"
    text = CalibrationOptions(calibration=str(HELDOUT), samples=3, seqlen=64)
    jobs.quantize("int8", twin, output, calibration=text, dtype="float32", batch_size=2)
    return output


@torch.no_grad()
def test_the_twin_computes_what_the_demo_model_computes(twin, demo_model):
    ids = torch.arange(100, 164)[None]
    original, changed = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
        for folder in (demo_model, twin)
    )
    torch.testing.assert_close(changed, original, rtol=1e-5, atol=1e-5)
    assert jobs.tensors(twin)["model.layers.2.input_layernorm.weight"][CHANNELS].abs().min() > 6


def test_the_split_keeps_what_plain_int8_loses(twin, written):
    """The codes do not depend on the threshold: only config.json tells the two apart."""
    plain = twin.parent / "plain"
    shutil.copytree(written, plain)
    config = json.loads((plain / "config.json").read_text())
    assert config["quantization_config"]["llm_int8_threshold"] == 6
    config["quantization_config"]["llm_int8_threshold"] = 0.0
    (plain / "config.json").write_text(json.dumps(config))

    checkpoints = [open_checkpoint(str(folder)) for folder in (twin, plain, written)]
    windows = windows_of.load(checkpoints[0], HELDOUT, ctx=128, stride=None, limit=512)
    found = evaluate.evaluate(checkpoints, windows, torch.float32, torch.device("cpu"))
    plain, split = (model["metrics"]["kld"]["mean"] for model in found["models"][1:])
    assert plain > 5 * split and 0 < split < 0.02


@torch.no_grad()
def test_the_manifest_counts_outlier_columns(twin, written):
    """Against a model of transformers whose linears are int8, on the same sequences of tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32)
    packed = load_file(written / "model.safetensors")
    linears = {n.removesuffix(".SCB") for n in packed if n.endswith(".SCB")}
    peaks = {}

    def record(name: str):
        def look(module, args):
            peak = args[0].abs().amax((0, 1))
            peaks[name] = torch.maximum(peaks.get(name, peak), peak)

        return look

    for name in linears:
        parts = packed[f"{name}.weight"], packed[f"{name}.SCB"]
        linear = Int8Linear(*parts, None, 6.0)
        linear.register_forward_pre_hook(record(name))
        model.set_submodule(name, linear)
    text = CalibrationOptions(calibration=str(HELDOUT), samples=3, seqlen=64)
    job = jobs.prepare("int8", twin, twin.parent / "dry", calibration=text, batch_size=2, dtype="float32")
    for ids in torch.cat(job.batches):
        model(ids[None])

    found = {name: row["outlier_columns"] for name, row in jobs.manifest(written).items()}
    assert found == {name: int((peaks[name] >= 6).sum()) for name in linears}
    assert len(found) == 42 and set(found.values()) > {0, 3}
    assert found["model.layers.2.self_attn.q_proj"] >= 3


def test_codes_do_not_depend_on_calibration_or_threshold(twin, written):
    for threshold in (0.0, 6.0):
        output = twin.parent / f"free-{threshold:g}"
        job = jobs.prepare("int8", twin, output, {"threshold": threshold}, dtype="float32")
        assert not job.method.needs
        loop.run([job], Progress())
        assert (output / "model.safetensors").read_bytes() == (written / "model.safetensors").read_bytes()
        config = json.loads((output / "config.json").read_text())["quantization_config"]
        assert config["llm_int8_threshold"] == threshold
        assert "outlier_columns" not in jobs.manifest(output)["model.layers.0.self_attn.q_proj"]


def test_a_threshold_of_zero_counts_none(tiny_model, tmp_path):
    model = tiny_model("llama", tokenizer=True)
    jobs.rewrite(model, lambda name, tensor: tensor * 100 if "norm" in name else None)
    text = jobs.calibration(tmp_path)
    for threshold in (0.0, 6.0):
        output = tmp_path / f"{threshold:g}"
        jobs.quantize("int8", model, output, {"threshold": threshold}, calibration=text)
        rows = jobs.manifest(output)
        assert rows["model.layers.1.self_attn.q_proj"]["outlier_columns"] == (64 if threshold else 0)
        assert any(row["outlier_columns"] for row in rows.values()) == bool(threshold)
