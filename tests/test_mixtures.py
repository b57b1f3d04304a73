"""quantkit.models.gguf.mixtures: every tensor gets the type that llama-quantize gives it.

`data/gguf_mixtures.json` holds what `llama_model_quantize` of llama.cpp v0.5.0 did, written by
`scripts/ggml.py mixtures`: `[file type, importance matrix?, options, types]`; `*` is the type of all tensors
that are not named; null: it gave up.
"""

import json
from pathlib import Path

import gguf
import pytest

from quantkit.errors import QuantkitError
from quantkit.models.gguf.file_types import BLOCKS, FILE_TYPES, Model, parse_file_type
from quantkit.models.gguf.mixtures import (
    Choice,
    Wishes,
    choose,
    nbytes,
    scale_of,
    stays_float,
    without_importance,
)

ANSWERS = json.loads((Path(__file__).parent / "data" / "gguf_mixtures.json").read_text())
SMALL = Model("llama", 2, 4, 4)


def tensors(shape: dict) -> list[tuple[str, list[int]]]:
    """Those of a recorded model, in llama-quantize's order."""
    blocks = range(shape["model"][1])
    inside = [(f"blk.{k}.{name}", size) for k in blocks for name, size in sorted(shape["block"].items())]
    return sorted(shape["globals"].items()) + inside


def expand(types: dict[str, str], names: list[str]) -> dict[str, str]:
    """Type by tensor: `Q6_K*2 Q4_K` is that of three blocks."""
    runs = [(kind, *run.split("*")) for kind, row in types.items() for run in row.split()]
    rows = {kind: [] for kind in types}
    for kind, type, *count in runs:
        rows[kind] += [type] * int(*count or [1])
    found = {}
    for name in names:
        kind = name.split(".", 2)[2] if name.startswith("blk.") else name
        found[name] = rows[kind].pop(0) if kind in rows else types["*"]
    assert all(not row for kind, row in rows.items() if kind != "*")
    return found


@pytest.mark.parametrize("title", ANSWERS)
def test_the_types_are_llama_quantizes(title):
    shape = ANSWERS[title]
    named = tensors(shape)
    for file_type, has_imatrix, options, types in shape["answers"]:
        wishes = Wishes(**options | {"tensor_type": tuple(options.get("tensor_type", ()))})
        choices = choose(file_type, Model(*shape["model"]), named, has_imatrix, wishes)
        if types is None:
            assert any(choice.first_choice for choice in choices) or without_importance(choices)
        else:
            expected = expand(types, [name for name, _ in named])
            assert {choice.name: choice.type for choice in choices} == expected, (file_type, has_imatrix)


def test_the_answers_cover_every_file_type():
    asked = {row[0] for shape in ANSWERS.values() for row in shape["answers"]}
    assert asked == set(FILE_TYPES) - {"MXFP4", "NVFP4", "MXFP4_MOE"}  # of quantkit alone
    assert any(row[1] for shape in ANSWERS.values() for row in shape["answers"])


def test_block_sizes_are_the_formats():
    assert BLOCKS == {name: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] for name in BLOCKS}
    assert nbytes("Q4_K", [3, 512]) == 3 * 2 * 144


# ---- fallbacks


@pytest.mark.parametrize(
    ("file_type", "columns", "type", "wanted", "cost"),
    [
        ("Q2_K", 96, "Q4_0", "Q2_K", 64 * 96 * (4.5 - 2.625) / 8),
        ("Q6_K", 96, "Q8_0", "Q6_K", 64 * 96 * (8.5 - 6.5625) / 8),
        ("IQ4_XS", 96, "IQ4_NL", "IQ4_XS", 64 * 96 * (4.5 - 4.25) / 8),
        ("Q4_K", 48, "F16", "Q4_K", 64 * 48 * (16 - 4.5) / 8),
        ("IQ4_NL", 48, "F16", "IQ4_NL", 64 * 48 * (16 - 4.5) / 8),
    ],
)
def test_a_fallback_says_why_and_what_it_costs(file_type, columns, type, wanted, cost):
    named = [("blk.0.attn_q.weight", [64, columns])]
    (choice,) = choose(parse_file_type(file_type), SMALL, named)
    block = BLOCKS[wanted][0]
    reason = f"{columns} columns are no multiple of {block}"
    assert choice == Choice("blk.0.attn_q.weight", type, wanted, reason, cost)


def test_the_output_falls_back_from_q6_k():
    (choice,) = choose("Q4_K_M", SMALL, [("output.weight", [2, 96])])
    assert (choice.type, choice.first_choice) == ("Q8_0", "Q6_K")


def test_what_stays_float():
    shapes = {
        "token_embd.weight": [4, 4],
        "position_embd.weight": [4, 4],
        "output_norm.weight": [4],
        "blk.0.attn_q_norm.weight": [4, 4],
        "blk.0.ffn_gate_inp.weight": [4, 4],
        "blk.0.ffn_up.bias": [4, 4],
        "blk.0.ffn_up.weight": [4, 4],
        "blk.0.attn_k.weight": [1, 4],
        "blk.0.ffn_up_exps.weight": [2, 1, 4],
    }
    kept = {name for name, shape in shapes.items() if stays_float(name, shape)}
    quantized = {"token_embd.weight", "blk.0.ffn_up.weight", "blk.0.ffn_up_exps.weight"}
    assert kept == shapes.keys() - quantized


# ---- wishes

TIED = [("token_embd.weight", [2, 256]), ("blk.0.attn_v.weight", [2, 256]), ("blk.0.ffn_norm.weight", [256])]


def types(file_type: str, **wishes) -> list[str]:
    return [choice.type for choice in choose(file_type, SMALL, TIED, wishes=Wishes(**wishes))]


def test_wishes_that_llama_quantize_takes_no_notice_of():
    assert types("F16") == ["F16", "F16", "F32"]
    assert types("F16", tensor_type=("attn_v=Q8_0",)) == ["F16", "Q8_0", "F32"]
    assert types("F16", output_tensor_type="Q8_0") == ["Q8_0", "F16", "F32"]
    assert types("Q4_0", output_tensor_type="Q8_0", pure=True) == ["Q8_0", "Q4_0", "F32"]


def test_the_first_match_counts():
    assert types("Q4_K_M", tensor_type=("attn=Q8_0", "v=Q2_K", "embd=q5_1")) == ["Q5_1", "Q8_0", "F32"]
    assert types("Q4_K_M", tensor_type=("(?=blk)=Q8_0",)) == ["Q6_K", "Q8_0", "F32"]  # the last = divides


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"tensor_type": ("attn_v",)}, ["'attn_v' is not REGEX=TYPE", "blk"]),
        ({"tensor_type": ("=Q4_K",)}, ["is not REGEX=TYPE"]),
        ({"tensor_type": ("attn_v=",)}, ["is not REGEX=TYPE"]),
        ({"tensor_type": ("(=Q4_K",)}, ["'(=Q4_K' is not a regular expression"]),
        ({"tensor_type": ("attn_v=Q9_K",)}, ["'attn_v=Q9_K'", "no type 'Q9_K'", "Q6_K"]),
        ({"tensor_type": ("attn_v=Q4_K_M",)}, ["no type 'Q4_K_M'", "did you mean Q4_K?"]),
        (
            {"tensor_type": ("q_proj=Q4_K", "attn=Q4_K", "lm_head=Q4_K")},
            ["q_proj=Q4_K, lm_head=Q4_K", "blk.0.attn_v.weight"],
        ),
        ({"tensor_type": ("ffn_norm=Q8_0",)}, ["matches no tensor that is quantized: ffn_norm=Q8_0"]),
        ({"output_tensor_type": "Q7"}, ["--output-tensor-type: no type 'Q7'"]),
        ({"token_embedding_type": "Q7"}, ["--token-embedding-type: no type 'Q7'"]),
    ],
)
def test_wishes_that_cannot_be(wishes, words):
    with pytest.raises(QuantkitError) as refused:
        types("Q4_K_M", **wishes)
    said = f"{refused.value.message}; {refused.value.hint}"
    assert refused.value.exit_code == 2 and all(word in said for word in words), said


def test_file_types_by_name():
    assert [parse_file_type(text) for text in ("q4_k", "Q3_K", "Q5_K", "Q2_K", "iq4_xs", "bf16")] == [
        *("Q4_K_M", "Q3_K_M", "Q5_K_M", "Q2_K", "IQ4_XS", "BF16")
    ]
    with pytest.raises(QuantkitError, match="no file type 'Q4_K_L'") as refused:
        parse_file_type("Q4_K_L")
    assert "did you mean Q4_K_" in refused.value.hint and refused.value.exit_code == 2


# ---- NVFP4, whose matrices have a scale beside them


def test_nvfp4_only_where_llama_cpp_scales():
    """As llama.cpp answers."""
    named = [
        ("token_embd.weight", [64, 256]),
        ("blk.0.attn_q.weight", [64, 256]),
        ("blk.0.attn_k.weight", [64, 256]),
        ("blk.0.attn_k.bias", [64]),
        ("blk.0.attn_kv_b.weight", [64, 256]),
        ("blk.0.ffn_down_exps.weight", [4, 64, 256]),
        ("blk.0.ffn_up.weight", [64, 96]),
    ]
    found = {choice.name: choice for choice in choose("NVFP4", Model("llama", 1, 4, 4), named)}
    types = ["Q6_K", "NVFP4", "Q8_0", "F32", "Q8_0", "NVFP4", "Q8_0"]
    assert [choice.type for choice in found.values()] == types
    assert "bias" in found["blk.0.attn_k.weight"].reason
    assert "no scale" in found["blk.0.attn_kv_b.weight"].reason
    assert scale_of("blk.0.ffn_down_exps.weight", "NVFP4", [4, 64, 256]) == (
        "blk.0.ffn_down_exps.scale",
        (4,),
    )
    assert scale_of("blk.0.attn_q.weight", "NVFP4", [64, 256]) == ("blk.0.attn_q.scale", (1,))
    assert scale_of("blk.0.attn_q.weight", "MXFP4", [64, 256]) is None
    other = choose("NVFP4", Model("gemma3", 1, 4, 4), named[1:2])
    assert other[0].type == "Q8_0" and "gemma3" in other[0].reason


def test_mxfp4_moe_is_for_experts():
    named = [("blk.0.attn_q.weight", [64, 256]), ("blk.0.ffn_up_exps.weight", [4, 64, 256])]
    assert [choice.type for choice in choose("MXFP4_MOE", SMALL, named)] == ["Q8_0", "MXFP4"]
