"""Wrappers whose towers are quantized, too, in transformers with the compressed-tensors library itself."""

import subprocess

import cases
import jobs
import pytest
import test_wrappers
import torch
from safetensors.torch import load_file

from quantkit.models.open import open_checkpoint

pytestmark = cases.MARKS

LOAD = """
import sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, CompressedTensorsConfig
config = CompressedTensorsConfig(dequantize=True)
model = AutoModelForImageTextToText.from_pretrained(
    sys.argv[1], dtype=torch.float32, quantization_config=config
)
linears = (pair for pair in model.named_modules() if isinstance(pair[1], torch.nn.Linear))
save_file({name: module.weight.data.clone() for name, module in linears}, sys.argv[2])
"""


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_client_decodes_towers_and_blocks_bit_for_bit(tmp_path, family):
    """What is excluded, and the head, keeps its values."""
    folder, text = test_wrappers.save(tmp_path / family, family), jobs.calibration(tmp_path)
    options = {"group_size": 32, "layout": "compressed-tensors"}
    excluded = r"layers\.1\.|blocks\.1\.|up_proj"
    run = {"towers": True, "exclude": (excluded,), "calibration": text}
    jobs.quantize("gptq", folder, tmp_path / "out", options, **run)
    theirs = tmp_path / "theirs.safetensors"
    command = [cases.PYTHON, "-c", LOAD, tmp_path / "out", theirs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    decoded = load_file(theirs)
    written, rows = open_checkpoint(str(tmp_path / "out")), jobs.manifest(tmp_path / "out")
    towers = [name for name, row in rows.items() if row.get("tower")]
    assert {"grid" in rows[name] for name in towers} == {True, False}
    assert len(rows) == len(decoded.keys() - {"lm_head"})
    for name, row in rows.items():
        values = written.read(f"{name}.weight").float()
        values = values.half().float() if "grid" in row else values
        places = [place for place in decoded if place.endswith(test_wrappers.spelled(name))]
        assert any(torch.equal(values, decoded[place]) for place in places), name
