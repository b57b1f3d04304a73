"""GGUF files of multimodal checkpoints: the language model as llama.cpp runs it; towers are left out."""

import json

import blocks
import jobs
import numpy as np
import pytest
import torch
import transformers as hf
from nights import nightly
from safetensors.torch import load_file
from sums import assert_sums
from test_wrappers import TOWER, save

from quantkit.capacity import formats
from quantkit.capacity import source as sizes
from quantkit.cli.job_report import print_summary
from quantkit.models.files.gguf_file import read_header

pytest.importorskip("xllamacpp")
from llama_cpp import Llama  # noqa: E402

IDS = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(1))
TOLERANCE = {"gemma3": 2e-3, "llava": 1e-5}  # llama.cpp has GELU in a table of float16


def wrapper(folder, family):
    """Gemma 3 with the scale that llama.cpp takes for granted."""
    save(folder, family)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["query_pre_attn_scalar"] = 16
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("family", TOLERANCE)
def test_llama_cpp_computes_the_language_model(tmp_path, capsys, family):
    folder, path = wrapper(tmp_path / family, family), tmp_path / "model.gguf"
    summary = jobs.quantize("gguf", folder, path, {"type": ("F32",), "solver": "rtn", "imatrix": "none"})
    model = hf.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = model(IDS).logits[0]
    with Llama(path, 256) as llama:
        assert np.abs(llama.logits(IDS[0].tolist()) - expected.numpy()).max() <= TOLERANCE[family]
    assert_sums(blocks.logits(path, IDS), expected, 1e-5)
    stored = load_file(folder / "model.safetensors")
    _, beside = TOWER[family]
    assert summary.left_out == {
        name: sum(tensor.nbytes for key, tensor in stored.items() if key.startswith(f"{name}."))
        for name in beside
    }
    assert summary.bits_per_weight_model == 32
    print_summary(summary, None)
    said = " ".join(capsys.readouterr().out.split())
    assert "left out multi_modal_projector, vision_tower (" in said and "mmproj file" in said


@pytest.mark.parametrize("solver", ["rtn", *nightly("gptq")])
def test_error_feedback_and_importance_know_the_wrappers_names(tmp_path, solver):
    folder = wrapper(tmp_path / "gemma3", "gemma3")
    path, progress = tmp_path / f"{solver}.gguf", jobs.Listener()
    options = {"type": ("Q4_K_M",), "solver": solver}
    arguments = {"calibration": jobs.calibration(tmp_path), "progress": progress}
    jobs.prepare("gguf", folder, path, options, **arguments)
    assert any("a language model alone: multi_modal_projector, vision_tower" in w for w in progress.warnings)
    summary = jobs.quantize("gguf", folder, path, options, calibration=arguments["calibration"])
    assert summary.linears == 3 * 7
    found = sizes.read(str(folder))
    planned = formats.weights("Q4_K_M", found.parameters).bytes
    _, infos = read_header(path)
    assert planned == path.stat().st_size - min(info.offset for info in infos.values())
    found = blocks.logits(path, IDS)
    with Llama(path, 256) as llama:
        theirs = torch.from_numpy(llama.logits(IDS[0].tolist()))
    assert (theirs - found).norm() <= 0.05 * found.norm()
