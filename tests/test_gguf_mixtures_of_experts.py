"""Mixtures of experts in GGUF files: whole jobs, and what is refused. (F32: test_gguf_architectures.py.)"""

import blocks
import gguf
import gguf_files
import jobs
import numpy as np
import pytest
import torch
import transformers as hf
from families import GROUPED, save_tokenizer
from nights import nightly

from quantkit.capacity import formats as planned
from quantkit.capacity import source as sizes
from quantkit.errors import QuantkitError
from quantkit.layouts.ggml.blocks import decode_rows, encode_rows
from quantkit.models.files.gguf_file import read_header
from quantkit.models.files.open import open_checkpoint
from quantkit.models.gguf import configuration, imatrix
from quantkit.models.gguf.tensors import of_checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.quantize import loop
from quantkit.quantize.calibrate import importance
from quantkit.quantize.outputs import gguf as gguf_output
from quantkit.quantize.progress import Progress
from quantkit.quantize.timings import Timings

pytest.importorskip("xllamacpp")
from llama_cpp import Llama  # noqa: E402

FEW = {**GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ERNIE = {**GROUPED, "moe_intermediate_size": 32, "moe_k": 2, "moe_num_experts": 6, "pad_token_id": 0}
GLM = {**FEW, "n_routed_experts": 6, "partial_rotary_factor": 0.5}
DOTS = {**FEW, "n_routed_experts": 6, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
DOTS |= {"n_shared_experts": 2, "norm_topk_prob": True, "head_dim": 16, "num_key_value_heads": 4}
GRANITE = {**GROUPED, "num_local_experts": 6, "attention_multiplier": 0.2, "embedding_multiplier": 3.0}
GRANITE |= {"residual_multiplier": 0.5, "logits_scaling": 2.0}
LATENT = {**FEW, "num_key_value_heads": 4, "n_routed_experts": 6, "n_shared_experts": 2}
LATENT |= {"kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 24, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
MSCALED = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
MSCALED |= {"mscale": 0.707, "mscale_all_dim": 0.707}
GPT_OSS = {**GROUPED, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 16}
# bounds of yarn behind the first and the last dimension, where rounding them makes no difference
WHOLE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 150, "rope_theta": 4.0}
WHOLE |= {"truncate": False}
LLAMA4 = {**GROUPED, "num_hidden_layers": 5, "num_local_experts": 4, "intermediate_size": 32, "head_dim": 32}
LLAMA4 |= {"intermediate_size_mlp": 96}
STEP = {"rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 8192, "rope_theta": 5e5}
STEP |= {"low_freq_factor": 1.0, "high_freq_factor": 1.0}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
CASES = {  # name -> (configuration class, its arguments)
    "mixtral": (hf.MixtralConfig, {**GROUPED, "num_local_experts": 4}),
    "mixtral of 8": (hf.MixtralConfig, {**GROUPED, "num_local_experts": 8, "tie_word_embeddings": True}),
    "qwen2moe": (
        hf.Qwen2MoeConfig,
        {**FEW, "num_experts": 6, "shared_expert_intermediate_size": 96},
    ),
    "qwen2moe no biases": (
        hf.Qwen2MoeConfig,
        {**FEW, "num_experts": 4, "shared_expert_intermediate_size": 64, "qkv_bias": False},
    ),
    "qwen3moe": (hf.Qwen3MoeConfig, {**FEW, "num_experts": 6, "norm_topk_prob": True, "head_dim": 32}),
    "ernie": (hf.Ernie4_5_MoeConfig, ERNIE),
    "ernie no shared experts": (
        hf.Ernie4_5_MoeConfig,
        ERNIE | {"moe_num_shared_experts": 0, "moe_layer_start_index": 0, "tie_word_embeddings": False},
    ),
    "glm4moe": (hf.Glm4MoeConfig, GLM),
    "glm4moe everything": (
        hf.Glm4MoeConfig,
        GLM
        | {
            "attention_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": False,
            "head_dim": 32,
        },
    ),
    "dots1": (hf.Dots1Config, DOTS),
    "minimax-m2": (
        hf.MiniMaxM2Config,
        {
            **GROUPED,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "rope_parameters": HALF,
        },
    ),
    "olmoe": (
        hf.OlmoeConfig,
        {**GROUPED, "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek-v2 lite": (hf.DeepseekV2Config, LATENT),
    "deepseek-v2": (hf.DeepseekV2Config, LATENT | {"q_lora_rank": 48, "rope_parameters": MSCALED}),
    "deepseek-v3": (
        hf.DeepseekV3Config,
        LATENT | {"q_lora_rank": 48, "n_group": 3, "topk_group": 2, "norm_topk_prob": True},
    ),
    "deepseek-v3 scaled": (
        hf.DeepseekV3Config,
        LATENT
        | {"n_group": 1, "topk_group": 1, "rope_parameters": MSCALED | {"mscale": 1, "mscale_all_dim": 1}},
    ),
    "gpt-oss": (hf.GptOssConfig, GPT_OSS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "gpt-oss scaled": (hf.GptOssConfig, GPT_OSS | {"rope_parameters": WHOLE, "num_hidden_layers": 2}),
    "llama4": (hf.Llama4TextConfig, LLAMA4 | {"interleave_moe_layer_step": 2}),
    "llama4 of 128": (
        hf.Llama4TextConfig,
        LLAMA4 | {"interleave_moe_layer_step": 4, "num_local_experts": 128, "use_qk_norm": False},
    ),
    "llama4 scaled": (
        hf.Llama4TextConfig,
        LLAMA4 | {"num_hidden_layers": 4, "rope_parameters": STEP, "tie_word_embeddings": True},
    ),
    "granitemoe": (hf.GraniteMoeConfig, GRANITE),
    "granitemoe with biases": (
        hf.GraniteMoeConfig,
        GRANITE | {"attention_bias": True, "tie_word_embeddings": True, "num_experts_per_tok": 3},
    ),
}
PLAIN = {"refine": 0, "transform": "none"}


def save(folder, make, arguments, seed=0, **more):
    """A random checkpoint whose experts and routers are far from alike."""
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(make(**arguments | more), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.3 if name.endswith(("gate.weight", "router.weight")) else 0.05)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.2)
    model.save_pretrained(folder)
    return folder


def ids_of(length=40) -> torch.Tensor:
    return torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(1))


def test_a_matrix_of_one_row_is_a_vector(tmp_path):
    """The gate of a shared expert, for which llama.cpp and transformers expect `[hidden]`."""
    folder = save(tmp_path / "model", *CASES["qwen2moe"])
    path = gguf_files.export(folder, tmp_path / "model.gguf")
    shapes = {tensor.name: tensor.shape.tolist() for tensor in gguf.GGUFReader(path).tensors}
    assert shapes["blk.0.ffn_gate_inp_shexp.weight"] == [64]
    assert shapes["blk.0.ffn_gate_inp.weight"] == [64, 6]
    name = "model.layers.0.mlp.shared_expert_gate.weight"
    values = [open_checkpoint(str(one)).read(name) for one in (folder, path)]
    assert values[0].shape == (1, 64) and torch.equal(*values)


def test_a_layer_of_one_expert_is_read_back(tmp_path):
    make, arguments = CASES["qwen3moe"]
    folder = save(tmp_path / "model", make, arguments | {"num_experts": 1, "num_experts_per_tok": 1})
    path = gguf_files.export(folder, tmp_path / "model.gguf")
    opened = [open_checkpoint(str(model)) for model in (folder, path)]
    models = [Skeleton(checkpoint, torch.float32, torch.device("cpu")).checkpoint for checkpoint in opened]
    for name in ("gate_proj", "up_proj", "down_proj"):
        values = [model.read(f"model.layers.0.mlp.experts.0.{name}.weight") for model in models]
        assert values[0].ndim == 2 and torch.equal(*values)


def wide(folder, name):
    """A checkpoint with a tokenizer whose rows K-quants divide."""
    make, arguments = CASES[name]
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
    }
    more = {"moe_intermediate_size": 256, "intermediate_size_mlp": 256, "kv_lora_rank": 256}
    given = sizes | {key: size for key, size in more.items() if key in arguments}
    if name == "llama4":  # not without a block that knows no positions
        given["num_hidden_layers"] = 4
    save(folder, make, arguments | given)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module", params=["qwen2moe", *nightly("mixtral of 8", "qwen3moe")])
def source(request, tmp_path_factory):
    return wide(tmp_path_factory.mktemp("source") / "model", request.param)


def agrees_with_llama_cpp(path):
    """The values of a file exactly; its blocks nearly, for llama.cpp rounds activations to 8 bits then, which
    sends some tokens to other experts."""
    ids = ids_of()
    found = blocks.logits(path, ids)
    floats = gguf_files.export(path, path.with_suffix(".f32.gguf"))
    for file, tolerance in ((path, 0.1), (floats, 1e-5)):
        with Llama(file, 256) as llama:
            theirs = torch.from_numpy(llama.logits(ids[0].tolist()))
        assert (theirs - found).norm() <= tolerance * found.norm()


def experts_of(path) -> dict[str, np.ndarray]:
    """Bytes of every expert's matrix, `[experts, ...]` by tensor."""
    return {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors if "_exps." in tensor.name}


def tensor_bytes(path) -> int:
    """All of a file but its metadata."""
    _, infos = read_header(path)
    return path.stat().st_size - min(info.offset for info in infos.values())


@pytest.mark.parametrize("name", ["Q4_K_M", *nightly("Q8_0")])
def test_encoded_files_compute_in_llama_cpp_what_they_decode_to(source, tmp_path, name):
    path = tmp_path / "model.gguf"
    jobs.quantize("gguf", source, path, {"type": (name,), "solver": "rtn", "imatrix": "none"})
    agrees_with_llama_cpp(path)
    if name in planned.FILE_TYPES:
        for size in (sizes.read(str(source)), sizes.read(str(source / "config.json")), sizes.read(str(path))):
            assert planned.weights(name, size.parameters).bytes == tensor_bytes(path)
    checkpoint, original = open_checkpoint(str(path)), open_checkpoint(str(source))
    for target in of_checkpoint(original):
        if "_exps." not in target.name:
            continue
        kind = checkpoint.infos[target.parameters[0]].dtype
        for model_name, stored in zip(target.parameters, target.stored, strict=True):
            expected = encode_rows(kind, original.read(stored, torch.float32))
            values = decode_rows(kind, expected, target.shape[-1])
            assert torch.equal(checkpoint.read(model_name, torch.float32), values), model_name


@pytest.mark.parametrize(
    "name, solver",
    [("granitemoe", "rtn"), *nightly(("llama4", "rtn"), ("gpt-oss", "gptq"), ("deepseek-v2 lite", "gptq"))],
)
def test_what_lies_otherwise_in_the_file_is_encoded(name, solver, tmp_path):
    """Experts that are stored in one tensor, gate and up in turn; heads that the file has apart."""
    folder, path = wide(tmp_path / "model", name), tmp_path / "model.gguf"
    options = {"type": ("Q4_K_M",), "solver": solver}
    if solver == "rtn":
        jobs.quantize("gguf", folder, path, options | {"imatrix": "none"})
    else:
        calibration = jobs.calibration(tmp_path)
        # with it, no token of this text is routed otherwise by llama.cpp
        options |= PLAIN | {"target": "own"}
        summary = jobs.quantize("gguf", folder, path, options, calibration=calibration)
        assert summary.error < summary.rtn_error
    agrees_with_llama_cpp(path)


def test_heads_of_latent_attention_have_their_own_importance(tmp_path):
    folder, path, given = (
        wide(tmp_path / "model", "deepseek-v2 lite"),
        tmp_path / "m.gguf",
        tmp_path / "i.gguf",
    )
    name = "blk.1.attn_v_b.weight"
    sums = torch.rand(4, 256, generator=torch.Generator().manual_seed(0)) ** 4
    imatrix.write(given, imatrix.Imatrix({name: sums}, {name: torch.ones(4)}, ("text",), 1, 1))
    jobs.quantize("gguf", folder, path, {"type": ("Q4_K_M",), "solver": "rtn", "imatrix": str(given)})
    weight = open_checkpoint(str(folder)).read("model.layers.1.self_attn.kv_b_proj.weight").view(4, 40, 256)
    (found,) = (tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)
    assert found.tensor_type.name == "Q4_K"
    for head, values in enumerate(weight[:, 16:]):
        assert np.array_equal(encode_rows("Q4_K", values, sums[head]).numpy(), found.data[head]), head


def test_an_importance_matrix_counts_per_expert(source, tmp_path):
    """Those that no token reached are encoded as if all columns counted the same."""
    options = jobs.calibration(tmp_path, samples=1, seqlen=32)
    done = jobs.prepare(
        "gguf", source, tmp_path / "model.gguf", {"type": ("Q4_K_M",), "solver": "rtn"}, calibration=options
    )
    loop.run([done], Progress())
    skeleton = Skeleton(open_checkpoint(str(source)), torch.float32, torch.device("cpu"))
    gathered = importance.gather(skeleton, done.batches, Progress(), Timings(), None)
    made = importance.as_imatrix(gathered, done.method.output.linears, done.calibration)
    name = "blk.1.ffn_down_exps.weight"
    assert made.counts[name].sum() == 2 * 32  # of every token two experts
    checkpoint = open_checkpoint(str(source))
    (target,) = (target for target in of_checkpoint(checkpoint) if target.name == name)
    found = experts_of(tmp_path / "model.gguf")[name]
    kind = next(
        t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors if t.name == name
    )
    for expert, stored in enumerate(target.stored):
        weights = made.values()[name][expert]
        assert made.counts[name][expert] or (weights == 1).all()
        encoded = encode_rows(kind, checkpoint.read(stored), weights)
        assert np.array_equal(encoded.numpy(), found[expert]), expert


def test_part_of_the_experts_cannot_be_excluded(source, tmp_path):
    with pytest.raises(QuantkitError) as refused:
        jobs.prepare(
            "gguf",
            source,
            tmp_path / "m.gguf",
            {"solver": "rtn", "imatrix": "none"},
            exclude=(r"experts\.0\.",),
        )
    assert "all experts in one type" in refused.value.message


@pytest.mark.parametrize("source", nightly("qwen3moe"), indirect=True)
def test_it_resumes(source, tmp_path, monkeypatch):
    options = {"type": ("Q4_0",)} | PLAIN
    arguments = {"calibration": jobs.calibration(tmp_path), "sequential": "repeat"}
    jobs.quantize("gguf", source, tmp_path / "whole.gguf", options, **arguments)
    with monkeypatch.context() as patch:
        patch.setattr(gguf_output.GgufOutput, "write", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            jobs.quantize("gguf", source, tmp_path / "again.gguf", options, **arguments)
    jobs.quantize("gguf", source, tmp_path / "again.gguf", options, resume=True, **arguments)
    assert experts_of(tmp_path / "again.gguf").keys() == experts_of(tmp_path / "whole.gguf").keys()
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


REFUSED = {
    "chunks of another size": ("llama4", {"attention_chunk_size": 16}, "attention_chunk_size 16"),
    "positions in all blocks": ("llama4", {"no_rope_layers": [1] * 5}, "no_rope_layers [1, 1, 1, 1, 1]"),
    "too few blocks": ("llama4", {"num_hidden_layers": 3}, "3 blocks"),
    "no norms of queries": ("llama4", {"use_qk_norm": False}, "use_qk_norm False"),
    "other blocks with experts": ("llama4", {"moe_layers": [0]}, "moe_layers [0]"),
    "another bend of the experts": ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit 5.0"),
    "rounded bounds": ("gpt-oss", {"rope_parameters": WHOLE | {"truncate": True}}, "truncate True"),
    "experts of the best groups": (
        "deepseek-v2",
        {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2},
        "topk_method 'group_limited_greedy'",
    ),
    "another epsilon than inside attention": ("deepseek-v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05"),
    "all groups": ("deepseek-v3", {"n_group": 3, "topk_group": 3}, "n_group 3, topk_group 3"),
    "the depth of a smaller model": ("deepseek-v2", {"num_hidden_layers": 27}, "q_lora_rank 48 in 27 blocks"),
    "rotations of another size": (
        "deepseek-v2",
        {"rope_parameters": MSCALED | {"mscale": 1.0}},
        "without mscale equal to mscale_all_dim",
    ),
    "probabilities that add up to 1": ("qwen2moe", {"norm_topk_prob": True}, "norm_topk_prob True"),
    "probabilities that do not": ("qwen3moe", {"norm_topk_prob": False}, "norm_topk_prob False"),
    "dense blocks between": ("qwen3moe", {"mlp_only_layers": [1]}, "mlp_only_layers [1]"),
    "grouped heads": ("olmoe", {"num_key_value_heads": 2}, "2 key/value heads of 4"),
}


def test_a_family_that_llama_cpp_computes_otherwise_is_refused():
    with pytest.raises(QuantkitError) as refused:
        configuration.to_metadata(hf.PhimoeConfig())
    assert "its router as a plain softmax" in refused.value.message


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_would_compute_otherwise_is_refused(name):
    family, changes, why = REFUSED[name]
    make, arguments = CASES[family]
    with pytest.raises(QuantkitError) as refused:
        configuration.to_metadata(make(**arguments | changes))
    assert why in refused.value.message
