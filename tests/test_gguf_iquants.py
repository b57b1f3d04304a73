"""Files of i-quants, from a checkpoint to what llama.cpp computes with them."""

import json

import jobs
import pytest
import torch
import transformers as hf
from nights import by_day

from quantkit.errors import QuantkitError
from quantkit.models.files.gguf_file import read_header
from quantkit.models.files.open import open_checkpoint
from quantkit.models.gguf import imatrix
from quantkit.options import RunOptions
from quantkit.quantize import job
from quantkit.quantize.prepare import imatrix_job
from quantkit.quantize.progress import Progress

pytest.importorskip("xllamacpp")
from llama_cpp import Llama  # noqa: E402

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
FILES = {  # file type, solver -> types of its matrices
    ("IQ2_M", "gptq"): {"IQ2_S", "IQ3_S", "Q5_K"},
    ("IQ3_XXS", "rtn"): {"IQ3_XXS", "IQ2_S", "IQ3_S", "Q5_K"},
    ("IQ2_XXS", "rtn"): {"IQ2_XXS", "Q2_K", "Q5_K"},
}


@pytest.fixture
def source(tiny_model):
    return tiny_model("llama", tokenizer=True, tie_word_embeddings=False, **SIZES)


@pytest.mark.parametrize(("name", "solver"), by_day(FILES, [("IQ2_XXS", "rtn")]))
def test_llama_cpp_computes_with_the_weights_that_are_read(source, tmp_path, name, solver):
    path = tmp_path / f"{name}.gguf"
    options = {"type": (name,), "solver": solver}
    jobs.quantize("gguf", source, path, options, calibration=jobs.calibration(tmp_path))
    metadata, infos = read_header(path)
    types = {info.dtype for info in infos.values() if len(info.shape) == 2}
    assert types == FILES[name, solver] | ({"IQ3_S"} if "IQ3_S" in types else {"Q2_K"})  # the embedding's
    if solver == "gptq":
        rows = json.loads(metadata["quantkit.manifest"])["linears"]
        shares = [row["error"] / row["rtn_error"] for row in rows]
        assert max(shares) < 1 and sum(shares) / len(shares) < 0.7  # q and k read almost white inputs
    model = hf.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    tokens = list(range(3, 40))
    original = model(torch.tensor([tokens])).logits[0].detach()
    stored = open_checkpoint(str(path))
    model.load_state_dict({tensor: stored.read(tensor, torch.float32) for tensor in stored.names})
    wanted = model(torch.tensor([tokens])).logits[0].detach()
    with Llama(path) as llama:
        found = torch.from_numpy(llama.logits(tokens))
    missed = (found - wanted).norm() / (original - wanted).norm()
    assert missed < 0.1  # its kernels round activations


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": ("TQ1_0",)}, "error feedback does not support TQ1_0"),
        ({"type": ("Q4_K_M",), "tensor_type": ("attn_v=TQ2_0",)}, "TQ2_0: blk.0.attn_v.weight"),
        ({"type": ("IQ2_XS",), "solver": "rtn", "imatrix": "none"}, "leaves 6 tensors without importance"),
    ],
)
def test_what_cannot_be_made_is_refused(source, tmp_path, options, message):
    with pytest.raises(QuantkitError, match=message):
        jobs.prepare("gguf", source, tmp_path / "a.gguf", options, calibration=jobs.calibration(tmp_path))


def test_an_importance_matrix_that_lacks_tensors_is_refused(source, tmp_path):
    calibration = jobs.calibration(tmp_path)
    path = tmp_path / "imatrix.gguf"
    request = job.Request(str(source), None, calibration, RunOptions(threads=1), output=path)
    imatrix_job.run(imatrix_job.prepare(request, Progress()), Progress())
    whole = imatrix.read(path)
    del whole.sums["blk.0.attn_q.weight"], whole.counts["blk.0.attn_q.weight"]
    imatrix.write(tmp_path / "part.gguf", whole)
    options = {"type": ("IQ2_XXS",), "solver": "rtn", "imatrix": str(tmp_path / "part.gguf")}
    with pytest.raises(QuantkitError, match=r"1 tensor without importance.*attn_q\.weight"):
        jobs.prepare("gguf", source, tmp_path / "a.gguf", options)
