"""`quantkit imatrix` of mixtures of experts: every expert counts its own tokens, as llama.cpp does."""

import shutil

import gguf
import jobs
import pytest
import torch
import transformers as hf
from families import save_tokenizer
from nights import nightly
from safetensors.torch import save_file
from sums import assert_sums
from test_gguf_mixtures_of_experts import CASES, save

from quantkit.options import RunOptions
from quantkit.quantize import job
from quantkit.quantize.prepare import imatrix_job
from quantkit.quantize.progress import Progress

EXPERTS, UNREACHED = 6, (4, 5)  # in block 1


@pytest.fixture(scope="module", params=["mixtral", *nightly("qwen3moe")])
def source(request, tmp_path_factory):
    """A mixture of six experts, two of which the second block's router never chooses."""
    make, arguments = CASES[request.param]
    count = "num_local_experts" if "num_local_experts" in arguments else "num_experts"
    folder = tmp_path_factory.mktemp("source") / "model"
    save(folder, make, arguments | {count: EXPERTS, "num_hidden_layers": 2})
    signs = torch.tensor([1.0, -1.0, 1.5, -1.5, 0.0, 0.0])

    def one_sided(name, tensor):
        return torch.outer(signs, tensor[0]) if ".1." in name and name.endswith("gate.weight") else None

    jobs.rewrite(folder, one_sided)
    return save_tokenizer(folder)


def reference(folder, sequences) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Σx² `[experts, in]` and tokens `[experts]` by GGUF name, token by token."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    entering: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
    for seen, layer in zip(entering, model.model.layers, strict=True):
        layer.mlp.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0][0]))
    with torch.no_grad():
        for ids in sequences:
            model(ids[None])
    sums, counts = {}, {}
    for index, layer in enumerate(model.model.layers):
        hidden, router, experts = torch.cat(entering[index]), layer.mlp.gate, layer.mlp.experts
        inner = experts.down_proj.shape[-1]
        x2, h2 = torch.zeros(EXPERTS, hidden.shape[1]), torch.zeros(EXPERTS, inner)
        tokens = torch.zeros(EXPERTS)
        for x in hidden:
            for expert in (router.weight @ x).topk(2).indices.tolist():
                gate, up = (experts.gate_up_proj[expert] @ x).chunk(2)
                x2[expert] += x.square()
                h2[expert] += (torch.nn.functional.silu(gate) * up).detach().square()
                tokens[expert] += 1
        for kind, found in (("gate", x2), ("up", x2), ("down", h2)):
            sums[f"blk.{index}.ffn_{kind}_exps.weight"] = found
            counts[f"blk.{index}.ffn_{kind}_exps.weight"] = tokens
    return sums, counts


def gathered(source, path, calibration):
    """The job, and its file by tensor."""
    options = RunOptions(threads=1, dtype="float32")
    request = job.Request(str(source), None, calibration, options, output=path)
    prepared = imatrix_job.prepare(request, Progress())
    imatrix_job.run(prepared, Progress())
    return prepared, {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def test_experts_that_are_stored_in_one_tensor_count_one_by_one(source, tmp_path):
    calibration = jobs.calibration(tmp_path, samples=1, seqlen=24)
    _, expected = gathered(source, tmp_path / "apart.gguf", calibration)
    fused = shutil.copytree(source, tmp_path / "fused")
    model = hf.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    save_file(model.state_dict(), fused / "model.safetensors", metadata={"format": "pt"})
    _, found = gathered(fused, tmp_path / "fused.gguf", calibration)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert_sums(torch.tensor(tensor.data), torch.tensor(expected[name].data))


def test_every_expert_counts_its_own_tokens_and_the_file_is_read_back(source, tmp_path):
    calibration = jobs.calibration(tmp_path, samples=2, seqlen=24)
    path = tmp_path / "m.imatrix.gguf"
    prepared, written = gathered(source, path, calibration)
    sums, counts = reference(source, torch.cat(prepared.batches))
    assert counts["blk.1.ffn_up_exps.weight"].tolist()[4:] == [0, 0]
    for name in sums:
        assert written[f"{name}.counts"].shape.tolist() == [1, EXPERTS]  # as llama-imatrix has it
        assert torch.equal(torch.tensor(written[f"{name}.counts"].data[:, 0]), counts[name])
        found = torch.tensor(written[f"{name}.in_sum2"].data)
        torch.testing.assert_close(found, sums[name], rtol=1e-4, atol=1e-6)
    assert written["blk.0.attn_q.weight.counts"].data.tolist() == [2 * 24]

    made = {}
    for origin in ("auto", str(path)):
        file = tmp_path / f"{len(made)}.gguf"
        encoder = {"type": ("Q4_0",), "solver": "rtn", "imatrix": origin}
        jobs.quantize("gguf", source, file, encoder, calibration=calibration, dtype="float32")
        made[origin] = {tensor.name: tensor.data.tobytes() for tensor in gguf.GGUFReader(file).tensors}
    assert made["auto"] == made[str(path)]
