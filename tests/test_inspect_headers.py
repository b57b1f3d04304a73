"""What single headers and configurations tell: forms of codes, positions, parts, clients."""

import random
from pathlib import Path

import pytest

from quantkit import layouts
from quantkit.inspection import clients, integrity, names, record
from quantkit.inspection.stored import weights_of
from quantkit.layouts.bitsandbytes import STATE as NF4
from quantkit.models.files.headers import Contents
from quantkit.models.files.safetensors_folder import TensorInfo

# ---- codes, as other tools write them, too


def stored(**tensors: tuple[str, list[int]]) -> dict[str, TensorInfo]:
    """Headers of one linear, `x`."""
    return {
        f"x.{part.replace('__', '.')}": TensorInfo(
            f"x.{part.replace('__', '.')}", dtype, tuple(shape), Path("f"), 0, 8
        )
        for part, (dtype, shape) in tensors.items()
    }


def weight_of(infos: dict[str, TensorInfo], config: dict | None = None):
    config = {"quantization_config": config} if config else {}
    (weight,) = weights_of(Contents("x", "safetensors", {}, config, infos, lambda name: None))
    return weight


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": -1}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def grouped(form: str, **weights) -> dict:
    """A configuration of compressed-tensors."""
    group = {"targets": ["Linear"], "format": form, "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"a": group}}


PACKED = grouped("pack-quantized", num_bits=4, group_size=32)
NVFP4 = grouped("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
QWEIGHT = stored(qweight=("I32", [16, 64]), scales=("F16", [1, 64]), qzeros=("I32", [1, 8]))


@pytest.mark.parametrize(
    ("infos", "config", "told"),
    [
        (
            stored(qweight=("I32", [12, 64]), scales=("F16", [4, 64]), qzeros=("I32", [4, 6])),
            {"quant_method": "gptq", "bits": 3, "group_size": 32},
            ("3 bit, groups of 32", (64, 128)),
        ),
        (
            stored(qweight=("I32", [128, 8]), qzeros=("I32", [1, 8]), scales=("F16", [1, 64])),
            AWQ,
            ("4 bit, whole rows", (64, 128)),
        ),
        (  # without weight_shape's values, as a hub's headers are
            stored(weight_packed=("I32", [64, 16]), weight_scale=("F16", [64, 4]), weight_shape=("I64", [2])),
            PACKED,
            ("4 bit, groups of 32", (64, 128)),
        ),
        (
            stored(weight_packed=("U8", [64, 64]), weight_scale=("F8_E4M3", [64, 8]),
                   weight_global_scale=("F32", [1])),
            NVFP4,
            ("nvfp4, groups of 16", (64, 128)),
        ),
        (
            stored(weight_packed=("U8", [64, 64]), weight_scale=("U8", [64, 4])),
            grouped("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32),
            ("mxfp4, groups of 32", (64, 128)),
        ),
        (
            stored(weight=("F8_E4M3", [64, 128]), weight_scale=("U8", [64, 4])),
            grouped("mxfp8-quantized", num_bits=8, type="float", group_size=32),
            ("mxfp8, groups of 32", (64, 128)),
        ),
        (
            stored(weight=("F8_E4M3", [64, 128]), weight_scale=("F32", [64, 1])),
            grouped("float-quantized", num_bits=8, type="float", strategy="channel"),
            ("float8, whole rows", (64, 128)),
        ),
        (
            stored(weight=("F8_E4M3", [128, 256]), weight_scale_inv=("F32", [1, 2])),
            FP8,
            ("float8, groups of 128", (128, 256)),
        ),
        (stored(weight=("I8", [64, 128]), SCB=("F32", [64])), INT8, ("int8, whole rows", (64, 128))),
        (  # modelopt's
            stored(weight=("U8", [64, 64]), weight_scale=("F8_E4M3", [64, 8]), weight_scale_2=("F32", [])),
            {"quant_method": "modelopt"},
            ("nvfp4, groups of 16", (64, 128)),
        ),
    ],
)  # fmt: skip
def test_forms_of_codes(infos, config, told):
    weight = weight_of(infos, config)
    rows, columns = weight.shape
    assert (weight.stored, weight.shape, weight.parameters) == (*told, rows * columns)
    assert weight.codes.problem == ""


@pytest.mark.parametrize(
    ("infos", "config", "words"),
    [
        (stored(qweight=("I32", [16, 64])), GPTQ, "scales is absent"),
        (stored(qweight=("I32", [16, 64]), scales=("F16", [0, 64])), GPTQ, "do not fit"),
        (QWEIGHT | stored(qzeros=("I32", [2, 8])), GPTQ, "qzeros"),
        (QWEIGHT | stored(g_idx=("I32", [127])), GPTQ, "g_idx is I32 [127] instead of I32 [128]"),
        (QWEIGHT, GPTQ | {"bits": 8}, "quantization_config says 8 bit in groups of 128, the tensors have 4"),
        (stored(weight=("I8", [64, 128]), SCB=("F32", [63])), INT8, "SCB is F32 [63] instead of F32 [64]"),
        (stored(weight_packed=("I32", [64, 16]), weight_scale=("F16", [63, 4]), weight_shape=("I64", [2])),
         PACKED, "weight_scale"),
        (stored(weight_packed=("I32", [64, 17]), weight_scale=("F16", [64, 4]), weight_shape=("I64", [2])),
         PACKED, "weight_scale"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_told(infos, config, words):
    assert words in weight_of(infos, config).codes.problem


@pytest.mark.parametrize(
    "config",
    [{"quant_method": "awq", "version": "gemv"}, {"quant_method": "gptq", "checkpoint_format": "marlin"}],
)
def test_forms_that_are_not_understood_are_not_judged(config):
    infos = stored(qweight=("I32", [64, 16]), qzeros=("I32", [64, 1]), scales=("F16", [64, 8]))
    contents = Contents("x", "safetensors", {}, {"quantization_config": config}, infos, lambda name: None)
    found = record.describe(contents)
    assert not found["integrity"]["problems"] and found["quantization"]["linears"] == 0


def test_headers_of_any_size_are_survived():
    """Names, types and shapes come from strangers: whatever they say, a sentence comes out."""
    source = random.Random(0)
    parts = ["qweight", "qzeros", "scales", "g_idx", "weight", "SCB", "weight_packed", "weight_scale",
             "weight_shape", "weight_scale_inv", "weight.absmax", NF4]  # fmt: skip
    for _ in range(2000):
        infos = {}
        for part in source.sample(parts, source.randint(1, 6)):
            shape = tuple(source.choice((0, 1, 3, 64, 2**62)) for _ in range(source.randint(0, 3)))
            infos[f"x.{part}"] = TensorInfo(
                f"x.{part}", source.choice(("I32", "F16", "U8")), shape, Path("f"), 0, 64
            )
        method = source.choice(("gptq", "awq", "compressed-tensors"))
        groups = {"a": source.choice(({}, None, {"weights": {"num_bits": source.choice((0, 4, "x", 99))}}))}
        config = {"quant_method": method, "bits": source.choice((0, 4, None)), "config_groups": groups}
        contents = Contents("x", "safetensors", {}, {"quantization_config": config}, infos, lambda name: None)
        weights = weights_of(contents)
        assert sum(weight.nbytes for weight in weights) == 64 * len(infos)
        assert all(isinstance(words, str) for words in integrity.damage(contents, weights, None))


# ---- the model


def problems_of(names: list[str], config: dict) -> list[str]:
    """Of two blocks of `64 x 64` matrices, and whatever else is named."""
    shapes = {name: (64,) if "norm" in name else (64, 64) for name in names}
    infos = {name: TensorInfo(name, "F32", shape, Path("f"), 0, 4) for name, shape in shapes.items()}
    config = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 64} | config
    contents = Contents("x", "safetensors", {}, config, infos, lambda name: None)
    return list(integrity.model_problems(contents, weights_of(contents), None))


LOCALS = ("input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight")
BLOCKS = [f"model.layers.{block}.{local}" for block in (0, 1) for local in LOCALS]
ENDS = ["model.embed_tokens.weight", "model.norm.weight"]
VISION = [f"vision.layers.{block}.self_attn.q_proj.weight" for block in range(5)]
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("names", "config", "told"),
    [
        (BLOCKS + ENDS, {}, ()),
        (VISION + BLOCKS + ENDS, {"num_attention_heads": 4, "num_key_value_heads": 4}, ()),
        (BLOCKS + ENDS + ["model.layers.2.eh_proj.weight"], {}, ["the configuration says 2 blocks"]),
        (BLOCKS + ENDS + ["model.layers.2.eh_proj.weight"], {"num_nextn_predict_layers": 1}, ()),
    ],
)  # fmt: skip
def test_what_is_absent_of_a_model(names, config, told):
    problems = problems_of(names, config)
    assert len(problems) == len(told) and all(map(str.startswith, problems, told)), problems


@pytest.mark.parametrize("junk", [None, "x", [], ["x"], {}, {"x": 1}, -1, 0, 1.5, True, 2**70])
def test_configurations_of_any_kind_are_survived(junk):
    """Whatever a value is, a sentence comes out, or none."""
    sound = LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 4, "quantization_config": {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"x": {"bits": 8}}}}  # fmt: skip
    keys = [*sound, "hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size", "head_dim",
            "tie_word_embeddings", "word_embed_proj_dim", "num_nextn_predict_layers", "text_config",
            "eos_token_id", "rope_scaling", "max_position_embeddings", "sliding_window"]  # fmt: skip
    infos = dict(QWEIGHT)
    infos |= {name: TensorInfo(name, "F32", (64, 64), Path("f"), 0, 4) for name in BLOCKS + ENDS}
    inner = [("quantization_config", key) for key in ("bits", "group_size", "dynamic", "checkpoint_format",
             "config_groups", "quant_method", "version", "packing_format")]  # fmt: skip
    for key in [*((key,) for key in keys), *inner]:
        changed = {key[-1]: junk} if len(key) == 1 else {key[0]: sound[key[0]] | {key[1]: junk}}
        contents = Contents("x", "safetensors", {}, sound | changed, infos, lambda name: None)
        problems = record.describe(contents)["integrity"]["problems"]
        assert all(isinstance(words, str) for words in problems)


# ---- positions


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"max_position_embeddings": 4096, "rope_theta": 1e4}, "4096 tokens, rope of base 10000"),
        (
            {"max_position_embeddings": 16384, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            "16384 tokens, scaled: yarn × 4",
        ),
        (
            {"max_position_embeddings": 8192, "sliding_window": 512,
             "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
            "8192 tokens, rope of base 1e+06, attention over 512",
        ),
        ({"n_positions": 1024}, "1024 tokens"),
        ({}, ""),
    ],
)  # fmt: skip
def test_positions(config, words):
    contents = Contents("x", "safetensors", {}, config, {}, lambda name: None)
    assert record.describe(contents)["positions"]["text"] == words


# ---- clients


FACTS = {"layout": {"gptq"}, "model_type": {"llama"}, "form": {"gptq"}, "bits": {4}, "group_size": {128},
         "symmetric": {True}, "desc_act": {False}, "version": {"gptq"}, "g_idx": {True},
         "activations": {False}, "mixed": {False}, "kept": {False}, "experts": {False}}  # fmt: skip
CT = {"layout": {"compressed-tensors"}, "form": {"pack-quantized"}, "g_idx": set()}


LOADS = [
    ({}, "transformers GPTQModel vLLM AutoGPTQ"),
    ({"head": {True}}, "GPTQModel"),
    ({"bits": {6}, "version": {"gptq_p"}}, "GPTQModel"),
    ({"bits": {4, 8}, "mixed": {True}}, "GPTQModel"),
    ({"symmetric": {False}}, "transformers AutoGPTQ"),
    ({"symmetric": {False}, "version": {"gptq_v2"}}, "transformers GPTQModel"),
    ({"desc_act": {True}}, "transformers GPTQModel AutoGPTQ"),
    ({"group_size": {96}}, "transformers vLLM AutoGPTQ"),
    ({"g_idx": {False}}, "GPTQModel vLLM AutoGPTQ"),
    ({"model_type": {"gpt2"}}, "GPTQModel vLLM AutoGPTQ"),
    ({"layout": {"awq"}, "symmetric": {False}}, "transformers GPTQModel vLLM AutoAWQ mlx-lm"),
    ({"layout": {"awq"}, "model_type": {"bloom"}}, "GPTQModel vLLM AutoAWQ mlx-lm"),
    ({"layout": {"bitsandbytes"}, "form": {"nf4"}}, "transformers"),
    (CT, "transformers vLLM"),
    (CT | {"mixed": {True}}, "transformers vLLM"),
    (CT | {"mixed": {True}, "symmetric": {False}}, "vLLM"),
    (CT | {"form": {"int8"}, "bits": {8}}, "transformers"),
    (CT | {"form": {"int8"}, "activations": {True}, "bits": {8}}, "transformers vLLM"),
    (CT | {"form": {"float8"}, "activations": {True}, "bits": {8}}, "transformers"),  # in blocks
    (CT | {"form": {"float8"}, "group_size": {-1}, "static": {True}}, "transformers"),
    (CT | {"form": {"float8"}, "group_size": {-1}, "cache": {True}}, "transformers vLLM"),
    (CT | {"form": {"float8"}, "group_size": {-1}, "experts": {True}}, "transformers"),
    ({"layout": {"fp8"}, "form": {"float8"}, "activations": {True}, "bits": {8}}, "transformers"),
    ({"layout": {"none"}, "form": set(), "bits": set()}, "transformers vLLM mlx-lm"),
    ({"layout": {"gguf"}, "form": {"Q8_0", "F32"}}, "transformers llama.cpp"),
    ({"layout": {"gguf"}, "form": {"IQ2_XXS", "F32"}}, "llama.cpp"),
    ({"layout": {"gguf"}, "form": {"Q4_K"}, "rope_scaled": {True}}, "llama.cpp"),
    ({"layout": {"gguf"}, "form": {"Q4_K"}, "model_type": {"gptneox"}}, "llama.cpp"),
    ({"group_size": {16}}, "transformers GPTQModel AutoGPTQ"),
    ({"kept": {True}}, "transformers GPTQModel vLLM"),
    ({"experts": {True}, "model_type": {"mixtral"}}, "vLLM"),
    ({"experts": {True}, "version": {"gptq_v2"}}, "GPTQModel"),
    ({"experts": {True}, "group_size": {-1}}, "GPTQModel"),
    ({"experts": {True}, "bits": {4, 8}, "mixed": {True}}, "GPTQModel"),
    ({"experts": {True}, "layout": {"awq"}}, "vLLM"),
    ({"experts": {True}, "layout": {"awq"}, "group_size": {32}}, ""),
    ({"experts": {True}, "layout": {"awq"}, "mixed": {True}}, ""),
    ({"experts": {True}, "layout": {"bitsandbytes"}, "form": {"int8"}, "bits": {8}}, ""),
    (CT | {"experts": {True}}, "transformers vLLM"),
    (CT | {"experts": {True}, "group_size": {32}}, "transformers"),
    (CT | {"experts": {True}, "symmetric": {False}}, ""),
    (CT | {"experts": {True}, "mixed": {True}}, ""),
    (CT | {"experts": {True}, "form": {"int8"}, "activations": {True}, "bits": {8}}, "transformers"),
    ({"layout": {"awq"}, "group_size": {-1}}, "transformers"),
    ({"layout": {"mlx"}, "form": {"mlx"}}, "mlx-lm"),
    ({"layout": {"modelopt"}, "form": {"float8"}, "group_size": {-1}, "static": {False}}, "vLLM"),
    (CT | {"form": {"nvfp4"}}, "transformers"),
    ({"layout": {"modelopt"}, "form": {"nvfp4"}}, ""),
    (CT | {"form": {"nvfp4"}, "experts": {True}}, ""),
    (CT | {"form": {"mxfp8"}, "experts": {True}}, ""),
    ({"layout": {"gguf"}, "form": {"NVFP4"}, "model_type": {"llama"}}, "llama.cpp"),
    (CT | {"bits": {8}}, "transformers"),
    (CT | {"activations": {True}}, "transformers"),
    ({"layout": {"gguf"}, "form": {"Q4_K"}, "biases": {True}}, "llama.cpp"),
    ({"layout": {"gguf"}, "form": {"Q4_K"}, "experts": {True}}, "llama.cpp"),
    ({"layout": {"gguf"}, "form": {"Q4_K"}, "model_type": {"mamba"}}, ""),
]


@pytest.mark.parametrize(("facts", "loads"), LOADS)
def test_clients_known_to_load(facts, loads):
    """As FORMATS and docs/clients.md have it."""
    rows = clients.known(FACTS | facts)
    assert {row["client"] for row in rows if row["loads"]} == set(loads.split())
    assert all(row["note"] for row in rows if row["loads"] is False)


def test_every_rule_of_the_clients_decides_one_of_these():
    """So each cell that is claimed is asserted above, and by the clients themselves in tests/clients."""
    table = clients.table()
    decided = [clients.rule_of(client, FACTS | facts) for facts, _ in LOADS for client in table["clients"]]
    assert table["rules"].keys() == {module.NAME for module in layouts.modules()}
    for layout, by_client in table["rules"].items():
        for client, rules in by_client.items():
            assert client in table["clients"]
            for rule in rules:
                assert any(rule is one for one in decided), (layout, client, rule)


def test_parts_of_the_families():
    told = {
        "transformer.h.0.attn.c_attn.weight": "attention", "transformer.wpe.weight": "embeddings",
        "transformer.h.3.ln_1.weight": "norms",
        "gpt_neox.layers.0.attention.query_key_value.weight": "attention",
        "embed_out.weight": "head", "gpt_neox.embed_in.weight": "embeddings", "lm_head.weight": "head",
        "transformer.word_embeddings_layernorm.weight": "norms",
        "model.layers.0.self_attn.q_norm.weight": "norms",
        "model.decoder.layers.0.fc1.weight": "mlp", "transformer.h.0.mlp.dense_h_to_4h.weight": "mlp",
        "blk.0.attn_norm.weight": "norms", "blk.0.ffn_up.weight": "mlp", "output.weight": "head",
        "output_norm.weight": "norms", "token_embd.weight": "embeddings", "rope_freqs.weight": "other",
        "model.layers.0.block_sparse_moe.experts.3.w1.weight": "mlp",
    }  # fmt: skip
    assert {name: names.part_of(name) for name in told} == told
