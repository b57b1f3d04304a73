"""quantkit.quantize.transforms.rotation: weights turn, what the model computes does not."""

import dataclasses
import json
from functools import reduce

import jobs
import numpy as np
import pytest
import torch
import transformers as hf

from quantkit.errors import QuantkitError
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import open_checkpoint
from quantkit.models.files.reading import Rewritten
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import walk
from quantkit.quantize.progress import Progress
from quantkit.quantize.transforms import rotation
from quantkit.quantize.transforms.rotation.orthogonal import random

IDS = torch.randint(500, (1, 12), generator=torch.Generator().manual_seed(3))
CPU = torch.device("cpu")
HIDDEN, VOCABULARY = 64, 512
FAMILIES = {  # (whether the residual stream turns, blocks whose values do, whether the head is untied)
    "qwen3": (True, 3, False),  # norms on q and k
    "phi3": (True, 3, False),  # fused q, k, v
    "gpt2": (False, 3, False),  # LayerNorms, weights the other way round
    "gpt_neox": (False, 3, False),  # q, k, v head by head
    "qwen3_moe": (True, 3, False),
    "deepseek_v3": (True, 3, False),  # latent attention, a shared expert
    "bamba": (True, 1, False),  # state-space blocks, and one of attention
    "qwen3_next": (True, 0, False),  # a gate looks at every channel of attention's outputs
    "gemma2": (False, 3, False),  # norms behind attention and MLP
    "olmo2": (False, 3, False),  # linears read the stream itself
    "bloom": (False, 3, False),  # a norm behind the embedding
}


def rotated(folder, asked: str = "rotate", prove: bool = False) -> rotation.Rotated:
    skeleton = Skeleton(open_checkpoint(str(folder)), torch.float32, CPU)
    return rotation.rotate(skeleton, asked, Progress(), prove)


def exact(checkpoint: Checkpoint) -> Checkpoint:
    """Without rounding."""
    infos = {name: dataclasses.replace(info, exact=True) for name, info in rewritten(checkpoint).items()}
    return dataclasses.replace(checkpoint, infos=checkpoint.infos | infos)


def rewritten(checkpoint: Checkpoint) -> dict[str, Rewritten]:
    return {name: info for name, info in checkpoint.infos.items() if isinstance(info, Rewritten)}


def logits(checkpoint: Checkpoint) -> torch.Tensor:
    skeleton = Skeleton(checkpoint, torch.float32, CPU)
    skeleton.names.check_complete()
    skeleton.load_rest()
    (hidden,) = walk.through(skeleton, [IDS])
    return skeleton.logits(hidden[0])


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("width", [1, 2, 12, 28, 36, 37, 96, 256, 300])
def test_a_matrix_is_orthogonal_and_as_flat_as_can_be(width):
    turns = random(width, seed=1)
    eye = torch.eye(width)
    dense = turns.signs[:, None] * reduce(torch.kron, turns.factors, torch.ones(1, 1))
    assert torch.allclose(turns.turn(eye), dense, atol=1e-6)
    assert torch.allclose(dense.double() @ dense.double().T, eye.double(), atol=1e-5)
    assert turns.is_hadamard == (width != 37)
    if turns.is_hadamard:
        assert torch.allclose(dense.abs(), torch.tensor(width**-0.5), atol=1e-6)
    rows = torch.randn(3, 2, width)
    assert torch.allclose(turns.turn(rows), rows @ dense, atol=1e-5)

    assert torch.equal(random(width, seed=1).signs, turns.signs)
    assert width < 12 or not torch.equal(random(width, seed=2).signs, turns.signs)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_compute_the_same(tiny_model, family):
    folder = tiny_model(family)
    residual, values, untied = FAMILIES[family]
    if not residual:
        with pytest.raises(QuantkitError, match="cannot be rotated"):
            rotated(folder)
    found = rotated(folder, "rotate" if residual else "rotate-v")
    assert found.record == {
        "residual": HIDDEN if residual else None,
        "values": values,
        "seed": 0,
        "untied_bytes": 4 * HIDDEN * VOCABULARY * untied,
    }
    before = open_checkpoint(str(folder))
    assert relative(logits(exact(found.checkpoint)), logits(before)) < 1e-5
    turned = {name for name in before.infos if name in rewritten(found.checkpoint)}
    for name in turned:
        assert not torch.equal(found.checkpoint.load(name), before.load(name)), name
    assert len(turned) > (20 if residual else 3)


def test_transformers_computes_the_same_from_the_tensors(tiny_model):
    folder = tiny_model("llama", tie_word_embeddings=True)
    found = rotated(folder).checkpoint
    model = hf.LlamaForCausalLM(found.config)
    model.load_state_dict({name: found.load(name) for name in found.infos})
    whole = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        assert relative(model(IDS).logits, whole(IDS).logits) < 1e-5
    assert found.raw_config["tie_word_embeddings"] is False
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert all(torch.equal(found.load(n), torch.ones(HIDDEN)) for n in found.infos if "norm" in n)


def test_values_alone_need_no_head_of_their_own(tiny_model):
    folder = tiny_model("llama", tie_word_embeddings=True)
    found, before = rotated(folder, "rotate-v").checkpoint, open_checkpoint(str(folder))
    assert found.infos.keys() == before.infos.keys() and found.raw_config == before.raw_config
    assert {name.split(".")[-2] for name in rewritten(found)} == {"v_proj", "o_proj"}
    v, o = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "vo")
    turns = random(16, seed=0).turn(torch.eye(16))
    wanted = torch.cat([turns.T @ head for head in before.load(v).split(16)])
    assert torch.allclose(found.load(v), wanted, atol=1e-6)
    wanted = torch.cat([head @ turns for head in before.load(o).split(16, 1)], 1)
    assert torch.allclose(found.load(o), wanted, atol=1e-6)
    assert relative(logits(exact(found)), logits(before)) < 1e-5


def test_a_norm_with_another_reader_is_seen_by_the_proof(tiny_model, monkeypatch):
    """Whatever was overlooked block by block: the whole model's logits decide."""
    folder = tiny_model("llama")
    turn_all = rotation.edits.of_stream

    def forgetful(edits, *arguments):
        turn_all(edits, *arguments)
        for name in [name for name in edits if "up_proj" in name]:
            del edits[name]

    monkeypatch.setattr(rotation.edits, "turned_stream", lambda *arguments: True)
    monkeypatch.setattr(rotation.edits, "of_stream", forgetful)
    with pytest.raises(QuantkitError, match="the model computes otherwise when it is rotated"):
        rotated(folder, prove=True)


def test_what_cannot_be_rotated_is_refused(tiny_model, tmp_path):
    with pytest.raises(QuantkitError, match="blocks pass more than hidden states"):
        rotated(tiny_model("gemma3n"))
    with pytest.raises(QuantkitError, match="no linear reads attention's values as they are"):
        rotated(tiny_model("mamba2"), "rotate-v")
    folder = tiny_model("llama")
    jobs.quantize("gptq", folder, tmp_path / "out", {"group_size": 32, "solver": "rtn"})
    with pytest.raises(QuantkitError, match="is quantized already"):
        rotated(tmp_path / "out")


def test_a_job_writes_what_was_rotated(tiny_model, tmp_path):
    folder = tiny_model("llama", tokenizer=True, dtype="bfloat16", tie_word_embeddings=True)
    options = {"bits": 8, "group_size": 32, "solver": "rtn", "transform": "rotate"}
    listener = jobs.Listener()
    job = jobs.prepare("gptq", folder, tmp_path / "out", options, listener, exclude=("o_proj",))
    (warning,) = listener.warnings
    assert warning.startswith("embedding and head are no longer one tensor, because the final norm's weight")
    head = 2 * HIDDEN * VOCABULARY
    assert job.plan.source_bytes == sum(info.nbytes for info in open_checkpoint(str(folder)).infos.values())
    summary = jobs.loop.run(job, Progress())
    stored, read = jobs.tensors(tmp_path / "out"), rotated(folder).checkpoint
    assert summary.output_bytes == sum(tensor.nbytes for tensor in stored.values())
    for name in ("lm_head.weight", "model.norm.weight", "model.layers.1.self_attn.o_proj.weight"):
        assert torch.equal(stored[name], read.load(name)) and stored[name].dtype == torch.bfloat16
    assert stored["lm_head.weight"].nbytes == head
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    record = json.loads((tmp_path / "out/quantkit.json").read_text())["job"]["rotation"]
    assert record == {"residual": HIDDEN, "values": 3, "seed": 0, "untied_bytes": head}
    written = logits(open_checkpoint(str(tmp_path / "out")))
    assert relative(written, logits(open_checkpoint(str(folder)))) < 0.02


def test_scales_are_folded_into_the_norms_that_rotation_left(tiny_model, tmp_path):
    folder = tiny_model("llama", tokenizer=True)
    options = {"group_size": 32, "solver": "gptq", "transform": "rotate+awq"}
    jobs.quantize("gptq", folder, tmp_path / "out", options, calibration=jobs.calibration(tmp_path))
    stored = jobs.tensors(tmp_path / "out")
    assert torch.equal(stored["model.norm.weight"], torch.ones(HIDDEN))
    scaled = [name for name in stored if "layernorm" in name and stored[name].ne(1).any()]
    assert scaled
    written = logits(open_checkpoint(str(tmp_path / "out")))
    assert relative(written, logits(open_checkpoint(str(folder)))) < 0.3


def test_llama_cpp_computes_the_same(tiny_model, tmp_path):
    pytest.importorskip("xllamacpp")
    from llama_cpp import Llama

    folder = tiny_model("llama", tokenizer=True, tie_word_embeddings=True)
    options = {"type": ("F32",), "solver": "rtn", "transform": "rotate"}
    jobs.quantize("gguf", folder, tmp_path / "out.gguf", options)
    whole = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = whole(IDS).logits[0].numpy()
    with Llama(tmp_path / "out.gguf") as model:
        found = model.logits(IDS[0].tolist())
    assert np.abs(found - wanted).max() < 2e-3 * np.abs(wanted).max()
