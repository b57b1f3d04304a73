"""Bytes of weights: against the plans of real jobs, llama-quantize's tensors, and published sizes."""

import json
import math

import pytest
import transformers as hf
from families import FAMILIES, GATED, GROUPED
from nights import by_day
from published import CONFIGS

from quantkit.capacity import Unsupported, formats, gguf_tensors, source
from quantkit.models.gguf import architectures, mixtures, tensors
from quantkit.models.gguf.file_types import Model
from quantkit.models.gguf.variants import kv_heads

GIB = 1 << 30
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


def of_config(name: str, format: str) -> formats.Weights:
    return formats.weights(format, source.from_config(CONFIGS[name]))


# ---- published sizes


def test_octocoder():
    """Published as measured peaks of a generation: 29.0, 15.2 and 9.5 GiB (the last with 32-bit scales).

    Weights are most of that. With 4 bit a linear is decoded to 16 bit before it multiplies.
    """
    assert of_config("octocoder", "bf16").bytes / GIB == pytest.approx(29.03, rel=0.01)
    assert of_config("octocoder", "int8").bytes / GIB == pytest.approx(15.22, rel=0.04)
    nested = of_config("octocoder", "nf4").bytes
    linears = source.from_config(CONFIGS["octocoder"]).linears
    plain = nested + sum(tensor.size for tensor in linears) * (32 - 8 - 1 / 8) / 64 / 8
    decoded = 2 * max(tensor.size for tensor in linears)
    assert (plain + decoded) / GIB == pytest.approx(9.54, rel=0.08)
    assert nested / GIB == pytest.approx(8.0, rel=0.01)


@pytest.mark.parametrize(
    "params, file_type, gigabytes",
    [
        ("8.03B", "Q4_K_M", 4.92),
        ("8.03B", "Q8_0", 8.54),
        ("70.55B", "Q4_K_M", 42.52),
        ("6.74B", "Q4_K_M", 4.08),
    ],
)
def test_parameters_alone_in_gguf(params, file_type, gigabytes):
    """Published files of Llama 3 8B and 70B and of Llama 2 7B: mixtures take more than their base type."""
    found = formats.by_count(file_type, *source.parse_count(params))
    assert found.bytes / 1e9 == pytest.approx(gigabytes, rel=0.012)
    bits = [formats.typical_bits(kind, 70 * 10**9) for kind in ("Q4_K_M", "Q4_K_S", "Q4_0")]
    assert bits == [4.82, 4.57, 4.55]


def test_typical_bits_are_those_of_a_llama_3_8b(monkeypatch):
    """The tensors are listed once for all file types."""
    llama, listed, of_dense = source.from_config(CONFIGS["Llama-3-8B"]), [], gguf_tensors._of_dense
    monkeypatch.setattr(gguf_tensors, "_of_dense", lambda *model: listed.append(model) or of_dense(*model))
    for name in formats.FILE_TYPES:
        bits = formats.weights(name, llama).bits_per_weight
        assert formats.typical_bits(name, llama.count) == round(bits, 2)
    assert len(listed) == 1


# ---- GGUF

ROWS = {
    "llama3": (
        hf.LlamaConfig,
        {
            **GROUPED,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "tied": (hf.LlamaConfig, {**GROUPED, "tie_word_embeddings": True}),
    "odd": (hf.LlamaConfig, {**GATED, "hidden_size": 96, "intermediate_size": 200, "num_attention_heads": 3}),
    "deep": (hf.LlamaConfig, {**GATED, "num_hidden_layers": 80, "num_key_value_heads": 1}),
}
CASES = {name: row for name, row in FAMILIES.items() if name != "opt"} | ROWS


DAY = ("llama", "gpt2", "phi3", "gemma3", "bloom", "falcon", *ROWS)


@pytest.mark.parametrize("name", by_day(CASES, DAY))
def test_gguf_tensors_are_those_of_the_exporter(name):
    make, arguments = CASES[name]
    wide = {key: value for key, value in WIDE.items() if key in arguments and name not in ROWS}
    if "layer_types" in arguments:
        wide["num_hidden_layers"] = len(arguments["layer_types"])
    config = make(**arguments | wide)
    targets = tensors.of_config(config)
    row = architectures.of_config(config)
    model = Model(row.name, config.num_hidden_layers, config.num_attention_heads, kv_heads(config))
    found = source.from_config(json.loads(config.to_json_string()))
    for file_type in ("Q8_0", "Q6_K", "Q4_K_M", "Q3_K_M", "Q2_K", "IQ4_XS", "IQ3_XXS", "NVFP4"):
        choices = mixtures.choose(file_type, model, [(target.name, target.shape) for target in targets], True)
        scales = [4 if c.type == "NVFP4" else 0 for c in choices]  # one float32 beside each matrix
        sizes = [mixtures.nbytes(c.type, t.shape) for c, t in zip(choices, targets, strict=True)]
        blocks = zip(sizes, targets, choices, strict=True)
        packed = sum(size for size, t, c in blocks if c.type != "F32" and t.name.startswith("blk."))
        total = sum(-(-size // 32) * 32 for size in (*sizes, *scales))
        tables = [
            -(-size // 32) * 32
            for size, t in zip(sizes, targets, strict=True)
            if t.name == "position_embd.weight"
            or (t.name == "token_embd.weight" and any(t.name == "output.weight" for t in targets))
        ]
        weights = sum(
            math.prod(t.shape)
            for t, c in zip(targets, choices, strict=True)
            if c.type != "F32" and t.name.startswith("blk.")
        )
        packed += sum(scales)
        bits, stream_bits = 8 * total / found.count, 8 * packed / weights
        expected = formats.Weights(total, packed, total - sum(tables), bits, stream_bits)
        assert formats.weights(file_type, found) == expected


def test_llama_2_7b_in_gguf():
    """TheBloke's files: 4,081,004,224 bytes as Q4_K_M and 7,161,089,728 as Q8_0, metadata included."""
    assert of_config("Llama-2-7b", "Q4_K_M").bytes == pytest.approx(4_081_004_224, rel=2e-4)
    assert of_config("Llama-2-7b", "Q8_0").bytes == pytest.approx(7_161_089_728, rel=2e-4)


def test_mixtral_8x7b_in_gguf():
    """Every expert has three matrices of 4096 x 14336 in 32 blocks; a token reads two of eight."""
    found = of_config("Mixtral-8x7B", "Q8_0")
    experts = 32 * 8 * 3 * 4096 * 14336 * 34 // 32
    embedding = 32000 * 4096 * 34 // 32
    attention = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024) * 34 // 32
    floats = 32 * (8 * 4096 + 2 * 4096) * 4 + 4096 * 4
    assert found.bytes == experts + attention + 2 * embedding + floats
    assert found.read_bytes == found.bytes - embedding - experts * 6 // 8


# ---- refused


def test_what_a_format_cannot_hold_is_said():
    gpt2 = source.from_config(CONFIGS["gpt2"])
    assert formats.weights("gptq", gpt2).bytes
    refused = r"awq's clients replace nn.Linear alone, and this is a Conv1D: use gptq \(48 linears\)"
    with pytest.raises(Unsupported, match=refused):
        formats.weights("awq", gpt2)
    narrow = source.from_config(CONFIGS["Llama-2-7b"] | {"intermediate_size": 11000})
    with pytest.raises(Unsupported, match=r"11000 columns do not split into groups of 64 \(32 linears\)"):
        formats.weights("mlx", narrow)
    assert formats.weights("int8", narrow).bytes
