"""GGUF files of blocks with linear attention: whole jobs, from the wrapper in which Qwen3.5 is published."""

import jobs
import pytest
import torch
import transformers as hf
from families import FURTHER, save_tokenizer
from nights import nightly
from test_gguf_mixtures_of_experts import agrees_with_llama_cpp
from test_wrappers import TOKENS, VISUAL

from quantkit.capacity import formats
from quantkit.capacity import source as sizes
from quantkit.models.files.gguf_file import read_header


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "model"
    torch.manual_seed(0)
    config = hf.Qwen3_5Config(text_config=FURTHER["qwen3_5"][1], vision_config=VISUAL, **TOKENS)
    model = hf.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.05)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return save_tokenizer(folder)


@pytest.mark.parametrize("solver", ["rtn", *nightly("gptq")])
def test_a_quantized_hybrid_computes_in_llama_cpp_what_it_decodes_to(source, tmp_path, solver):
    path = tmp_path / "model.gguf"
    options = {"type": ("Q8_0",), "solver": solver}
    summary = jobs.quantize("gguf", source, path, options, calibration=jobs.calibration(tmp_path))
    assert list(summary.left_out) == ["model.visual"]
    agrees_with_llama_cpp(path)
    _, infos = read_header(path)
    assert {
        infos[f"blk.0.ssm_{part}"].dtype for part in ("conv1d.weight", "a", "dt.bias", "norm.weight")
    } == {"F32"}
    planned = sizes.read(str(source))
    total = formats.weights("Q8_0", planned.parameters).bytes
    assert total == path.stat().st_size - min(info.offset for info in infos.values())
