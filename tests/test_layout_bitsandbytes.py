"""quantkit.layouts.bitsandbytes against the tensors that bitsandbytes' own modules write."""

import json

import pytest
import torch

from quantkit import layouts
from quantkit.errors import RUNTIME, UNSUPPORTED, QuantkitError
from quantkit.grids.grid import QuantizedWeight
from quantkit.grids.int8 import Int8Grid
from quantkit.grids.nf4 import Nf4Grid
from quantkit.layouts import LinearSpec
from quantkit.layouts.bitsandbytes import STATE, Int8Layout, Nf4Layout
from quantkit.quantize.solvers import rtn

OUT, IN = 24, 128
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = {
    "int8": (Int8Layout(), Int8Grid(IN)),
    "nf4": (Nf4Layout(), Nf4Grid()),
    "nf4 single": (Nf4Layout(False), Nf4Grid(False)),
}


def randn(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype) / 20


def quantized(kind: str, out_features: int = OUT) -> QuantizedWeight:
    return rtn.quantize(randn(out_features, IN), LAYOUTS[kind][1])


def spec(kind: str, out_features: int = OUT, name: str = "a.b", kept: str | None = None) -> LinearSpec:
    return LinearSpec(name, 0, "b", out_features, IN, None if kept else LAYOUTS[kind][1], kept)


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape, name
        assert torch.equal(ours[name], tensor), name
        assert ours[name].is_contiguous()


# ---- what is written


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_writes_what_linear8bitlt_saves(bnb, dtype):
    weight = randn(OUT, IN, dtype=dtype)
    weight[3] = 0
    layer = bnb.nn.Linear8bitLt(IN, OUT, bias=False, has_fp16_weights=False)
    layer.load_state_dict({"weight": weight.half()})
    same(Int8Layout().encode(rtn.quantize(weight.float(), Int8Grid(IN))), layer.to("cpu").state_dict())


@pytest.mark.parametrize("kind", ["nf4", "nf4 single"])
def test_nf4_writes_what_linear4bit_saves(bnb, kind):
    """All of it byte by byte but double-quantized scales: there bitsandbytes does not take the nearest."""
    nested = kind == "nf4"
    layer = bnb.nn.Linear4bit(IN, OUT, bias=False, compress_statistics=nested, quant_type="nf4")
    layer.load_state_dict({"weight": randn(OUT, IN).half().float()})
    theirs = layer.half().to("cpu").state_dict()
    ours = LAYOUTS[kind][0].encode(rtn.quantize(randn(OUT, IN).half().float(), LAYOUTS[kind][1]))
    states = [json.loads(bytes(tensors.pop(STATE).tolist())) for tensors in (ours, theirs)]
    assert list(states[0]) == list(states[1])
    offsets = [state.pop("nested_offset", 0) for state in states]
    assert states[0] == states[1] and offsets[0] == pytest.approx(offsets[1], rel=1e-6)
    assert bool(offsets[0]) == nested
    if nested:
        for name, most in {"weight": 0.1, "weight.absmax": 0.3}.items():
            a, b = ours.pop(name), theirs.pop(name)
            assert a.dtype == b.dtype == torch.uint8 and a.shape == b.shape
            assert (a != b).float().mean() < most
        nested_absmax = [tensors.pop("weight.nested_absmax") for tensors in (ours, theirs)]
        torch.testing.assert_close(*nested_absmax, rtol=1e-6, atol=0)
    same(ours, theirs)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("out_features", (OUT, 130))  # 260 blocks: the second nested block is short
def test_decode_inverts_encode(kind, out_features):
    layout, weight = LAYOUTS[kind][0], quantized(kind, out_features)
    tensors = layout.encode(weight)
    assert set(tensors) <= set(layout.suffixes) and layout.marker in tensors
    decoded = layout.decode(tensors)
    assert decoded.grid == weight.grid and decoded.codes.dtype == torch.uint8
    assert torch.equal(decoded.codes, weight.codes)
    for name, part in vars(weight.params).items():
        assert torch.equal(getattr(decoded.params, name), part), name
    assert torch.equal(decoded.values(), weight.values())
    assert torch.equal(layout.values(tensors), weight.values())
    same(layout.encode(decoded), tensors)
    if kind == "nf4":
        assert tensors["weight.nested_absmax"].numel() == (1 if out_features == OUT else 2)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("out_features", (OUT, 130))
def test_the_plan_knows_the_bytes(kind, out_features):
    """Exactly, but for the decimals of the offset in the JSON."""
    layout = LAYOUTS[kind][0]
    written = sum(tensor.nbytes for tensor in layout.encode(quantized(kind, out_features)).values())
    planned = layout.nbytes(spec(kind, out_features))
    assert abs(planned - written) <= (12 if kind == "nf4" else 0)
    assert layout.check(spec(kind)) is None


# ---- what is refused


def refused(kind: str, code: int, match: str, **changes) -> None:
    tensors = LAYOUTS[kind][0].encode(quantized(kind))
    tensors |= {name.replace("_dot_", "."): change for name, change in changes.items()}
    with pytest.raises(QuantkitError, match=match) as error:
        LAYOUTS[kind][0].decode(tensors)
    assert error.value.exit_code == code and error.value.hint


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": torch.zeros(OUT, IN)},
        {"weight": torch.zeros(OUT * IN, dtype=torch.int8)},
        {"SCB": torch.ones(OUT + 1)},
        {"SCB": torch.ones(OUT, 1)},
    ],
)
def test_int8_believes_no_sizes_that_do_not_agree(changes):
    refused("int8", RUNTIME, "instead of|do not fit", **changes)


def test_int8_of_gpus_past_is_refused():
    refused("int8", UNSUPPORTED, "int8 weight of .* is not supported", weight_format=torch.tensor(2).byte())


def test_int8_is_read_without_a_weight_format():
    tensors = Int8Layout().encode(quantized("int8"))
    del tensors["weight_format"]
    assert torch.equal(Int8Layout().decode(tensors).values(), quantized("int8").values())


@pytest.mark.parametrize("kind", ["nf4", "nf4 single"])
@pytest.mark.parametrize(
    "changes",
    [
        {"weight": torch.zeros(OUT * IN // 2 - 1, 1, dtype=torch.uint8)},
        {"weight": torch.zeros(OUT * IN // 2, 1)},
        {"weight_dot_absmax": torch.zeros(OUT * IN // 64 + 1, dtype=torch.uint8)},
    ],
)
def test_nf4_believes_no_sizes_that_do_not_agree(kind, changes):
    refused(kind, RUNTIME, "instead of", **changes)


def test_nf4_refuses_a_nested_block_too_many():
    refused("nf4", RUNTIME, "instead of", weight_dot_nested_absmax=torch.ones(2))


@pytest.mark.parametrize("table", ["quant_map", "nested_quant_map"])
def test_nf4_refuses_other_tables(table):
    known = Nf4Layout().encode(quantized("nf4"))[f"weight.{table}"]
    changed = known.clone()
    changed[3] += 1e-4
    refused("nf4", UNSUPPORTED, "code table", **{f"weight_dot_{table}": changed})
    refused("nf4", RUNTIME, "instead of", **{f"weight_dot_{table}": known[:-1]})


GOOD = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [OUT, IN], "nested_offset": 0.1}


@pytest.mark.parametrize(
    "text, code, match",
    [
        (b"", RUNTIME, "quant_state.* is not supported"),
        (json.dumps(GOOD).encode()[:-9], RUNTIME, "is not supported"),
        (b"\xff\xfe" + json.dumps(GOOD).encode(), RUNTIME, "is not supported"),
        (b"[]", RUNTIME, "is not supported"),
        (json.dumps({**GOOD, "shape": [OUT]}).encode(), RUNTIME, "is not supported"),
        (json.dumps({**GOOD, "shape": "no"}).encode(), RUNTIME, "is not supported"),
        (json.dumps({**GOOD, "nested_offset": None}).encode(), RUNTIME, "is not supported"),
        (json.dumps({k: GOOD[k] for k in GOOD if k != "blocksize"}).encode(), RUNTIME, "is not supported"),
        (json.dumps({**GOOD, "blocksize": 128}).encode(), UNSUPPORTED, "blocks of 128 in rows of 128"),
        (json.dumps({**GOOD, "nested_blocksize": 128}).encode(), UNSUPPORTED, "blocks of 64"),
        (json.dumps({**GOOD, "shape": [64, 48]}).encode(), UNSUPPORTED, "in rows of 48"),
    ],
)  # fmt: skip
def test_nf4_refuses_a_state_it_cannot_rely_on(text, code, match):
    state = torch.tensor(list(text), dtype=torch.uint8)
    tensors = Nf4Layout().encode(quantized("nf4")) | {STATE: state}
    with pytest.raises(QuantkitError, match=match) as error:
        Nf4Layout().decode(tensors)
    assert error.value.exit_code == code


# ---- configurations


def detect(config: dict):
    return layouts.detect({"quantization_config": config})


def test_configurations_are_recognized():
    for layout in (Int8Layout(), Int8Layout(0.0), Int8Layout(7.5), Nf4Layout(), Nf4Layout(False)):
        kind = "int8" if isinstance(layout, Int8Layout) else "nf4"
        config = layout.config([spec(kind)])
        assert detect(config) == layout and config["llm_int8_skip_modules"] is None
        assert config.pop("quant_method") == "bitsandbytes"  # early transformers left it out
        assert detect(config) == layout
    assert detect({"load_in_8bit": True}) == Int8Layout(6.0)
    assert detect({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}) == Nf4Layout(False)
    other = {"quant_method": "gptq", "bits": 4, "group_size": 32, "load_in_8bit": False}
    assert type(detect(other)).__name__ == "GptqLayout"


def test_configurations_are_what_transformers_writes():
    """transformers' own defaults, and the names of those kept beside the head."""
    from transformers import BitsAndBytesConfig

    theirs = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=7.5).to_dict()
    ours = Int8Layout(7.5).config([spec("int8")])
    assert ours == {name: theirs[name] for name in ours}
    theirs = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ).to_dict()
    ours = Nf4Layout().config([spec("nf4"), spec("nf4", name="a.c", kept="--exclude c")])
    assert ours.pop("llm_int8_skip_modules") == ["a.c", "lm_head"]
    assert ours == {name: theirs[name] for name in ours}


@pytest.mark.parametrize("kind", ["fp4", None])
def test_other_four_bit_types_are_refused(kind):
    with pytest.raises(QuantkitError, match=f"4-bit type {kind!r}") as error:
        detect({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind})
    assert error.value.exit_code == UNSUPPORTED


def test_experts_in_nf4_have_a_gate():
    assert Nf4Layout().check_experts(3) is None
    assert "vLLM takes those of gate, up and down" in Nf4Layout().check_experts(2)


@pytest.mark.parametrize(
    ("stored", "computes"),
    [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32"), (None, "float32")],
)
def test_clients_multiply_in_the_models_own_type(stored, computes):
    layout = Nf4Layout()
    for key in ("dtype", "torch_dtype"):
        config = layout.configured({key: stored, "hidden_size": 64}, layout.config([], []))
        assert config["quantization_config"]["bnb_4bit_compute_dtype"] == computes
        assert config["hidden_size"] == 64
