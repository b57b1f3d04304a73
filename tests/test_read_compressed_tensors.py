"""What others store as compressed-tensors: forms that are read only, damaged tensors, quantized inputs."""

import json

import pytest
import torch
from codes import random_weight
from safetensors.torch import load_file, save_file
from sums import assert_sums
from test_layout_compressed_tensors import IN, OUT

from quantkit.errors import QuantkitError
from quantkit.grids.affine import AffineGrid
from quantkit.layouts.compressed_tensors import CompressedTensorsLayout, detect
from quantkit.layouts.compressed_tensors.activations import QuantizedInputLinear, rounded
from quantkit.layouts.compressed_tensors.forms import Numbers
from quantkit.layouts.compressed_tensors.integers import PackQuantized
from quantkit.models.files.open import open_checkpoint
from quantkit.models.skeleton import Skeleton

FLOAT8 = torch.float8_e4m3fn
SYMMETRIC, ASYMMETRIC = (random_weight(AffineGrid(4, 32, told), OUT, IN) for told in (True, False))
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


def layout(
    form: str = "pack-quantized", activations: dict | None = None, **weights
) -> CompressedTensorsLayout:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": form}
    return detect({"quant_method": "compressed-tensors", "config_groups": {"g": group}}).at("a.b")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_scales_of_other_precisions_keep_their_values(dtype):
    tensors = CompressedTensorsLayout().encode(SYMMETRIC)
    tensors["weight_scale"] = (SYMMETRIC.params.scale * 1.01).to(dtype)
    decoded = layout(num_bits=4, strategy="group", group_size=32).decode(tensors)
    assert torch.equal(decoded.params.scale, tensors["weight_scale"].float())


def test_order_of_columns():
    weight = ASYMMETRIC
    tensors = CompressedTensorsLayout(PackQuantized(symmetric=False)).encode(weight)
    reader = layout(num_bits=4, strategy="group", group_size=32, symmetric=False)
    g_idx = torch.arange(IN)[torch.randperm(IN, generator=torch.Generator().manual_seed(0))] // 32
    values = reader.decode(tensors | {"weight_g_idx": g_idx.int()}).values()
    scale, zero = weight.params.scale[:, g_idx], weight.params.zero[:, g_idx]
    assert torch.equal(values, scale * (weight.codes.float() - zero))
    for plain in (torch.full((IN,), -1), torch.arange(IN) // 32):
        decoded = reader.decode(tensors | {"weight_g_idx": plain.int()})
        assert decoded.column_group is None and torch.equal(decoded.values(), weight.values())
    for wrong in (g_idx[1:], g_idx + 1, g_idx - 1):
        with pytest.raises(QuantkitError, match="weight_g_idx"):
            reader.decode(tensors | {"weight_g_idx": wrong.int()})


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_int8(dtype):
    codes = torch.randint(-128, 128, (OUT, IN), generator=torch.Generator().manual_seed(0))
    scale = randn(OUT, 1).abs().to(dtype)
    reader = layout("int-quantized", num_bits=8, strategy="channel")
    values = reader.decode({"weight": codes.to(torch.int8), "weight_scale": scale}).values()
    assert torch.equal(values, codes.float() * scale.float())


@pytest.mark.parametrize(
    "strategy, shape, block", [("channel", (OUT, 1), None), ("tensor", (), None), ("block", (2, 4), [24, 24])]
)
def test_float8(strategy, shape, block):
    weight = (100 * randn(OUT, IN)).clamp(-448, 448).to(FLOAT8)
    scale = randn(*shape, seed=1).abs()
    reader = layout("float-quantized", num_bits=8, type="float", strategy=strategy, block_structure=block)
    decoded = reader.decode({"weight": weight, "weight_scale": scale})
    spread = scale
    if block:
        spread = scale.repeat_interleave(24, 0)[:OUT].repeat_interleave(24, 1)[:, :IN]
    assert torch.equal(decoded.values(), weight.float() * spread)
    assert decoded.grid.describe() == f"float8 e4m3, {'blocks of 24 × 24' if block else f'groups of {IN}'}"


@pytest.mark.parametrize(
    "part, broken, named",
    [
        ("weight_shape", torch.tensor([OUT, IN + 8]), r"weight_packed is I32 \[32, 12\] instead of .*13"),
        ("weight_shape", torch.tensor([1 << 40, 1 << 40]), "weight_packed"),
        ("weight_shape", torch.tensor([OUT, -IN]), "weight_shape is"),
        ("weight_shape", torch.tensor([OUT]), "weight_shape is"),
        ("weight_shape", torch.tensor([32.0, 96.0]), "weight_shape is"),
        ("weight_packed", torch.zeros(OUT, 12), "weight_packed is F32"),
        ("weight_packed", torch.zeros(OUT * 12, dtype=torch.int32), "weight_packed is"),
        ("weight_packed", torch.zeros(OUT, 24, dtype=torch.int32), "weight_packed is"),
        ("weight_scale", torch.ones(OUT, 4), r"weight_scale is .* instead of F16 \[32, 3\]"),
        ("weight_scale", torch.ones(1), "weight_scale"),
        ("weight_scale", torch.ones(OUT, 3, dtype=torch.int32), "weight_scale"),
        ("weight_zero_point", torch.zeros(OUT, 3, dtype=torch.int32), "weight_zero_point"),
        ("weight_zero_point", torch.full((OUT, 3), 8, dtype=torch.int8), "weight_zero_point"),
    ],
)
def test_packed_tensors_are_believed_only_as_far_as_they_agree(part, broken, named):
    reader = layout(num_bits=4, strategy="group", group_size=32, symmetric=False)
    tensors = CompressedTensorsLayout(PackQuantized(symmetric=False)).encode(ASYMMETRIC)
    assert torch.equal(reader.decode(tensors).values(), ASYMMETRIC.values())
    with pytest.raises(QuantkitError, match=named):
        reader.decode(tensors | {part: broken})


def test_plain_tensors_must_be_of_the_kind_the_configuration_says():
    scale = torch.ones(OUT, 1)
    ints = layout("int-quantized", num_bits=8, strategy="channel")
    floats = layout("float-quantized", num_bits=8, type="float", strategy="channel")
    for reader, dtype in (
        (ints, FLOAT8),
        (floats, torch.int8),
        (ints, torch.float16),
        (floats, torch.bfloat16),
    ):
        with pytest.raises(QuantkitError, match="weight is "):
            reader.decode({"weight": torch.zeros(OUT, IN).to(dtype), "weight_scale": scale})


def test_dynamic_tokens_by_hand():
    """A token of [-255, 51] has scale 2: 255 / 127.5. -127.5 rounds to even, 25.5 too."""
    numbers = Numbers(8, "int", True, "token", dynamic=True)
    assert rounded(torch.tensor([[[-255.0, 51.0], [0.0, 0.0]]]), numbers).tolist() == [[[-256, 52], [0, 0]]]
    floats = Numbers(8, "float", True, "token", dynamic=True)
    assert rounded(torch.tensor([[[896.0, 37.0]]]), floats).tolist() == [
        [[896, 36]]
    ]  # 18.5 lies between 18, 20


def test_static_and_grouped_activations_by_hand():
    static = Numbers(8, "int", True, "tensor")
    hidden = torch.tensor([[13.4, 13.6, 100.0, -200.0]])
    assert rounded(hidden, static, torch.tensor([0.5])).tolist() == [[13.5, 13.5, 63.5, -64.0]]
    grouped = Numbers(8, "float", True, "group", 2, dynamic=True)
    assert rounded(torch.tensor([[448.0, 17.0, 44.8, 1.7]]), grouped)[0, :2].tolist() == [448, 16]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_module_multiplies_rounded_inputs(dtype):
    weight, bias = random_weight(AffineGrid(8, IN), OUT, IN), randn(OUT).to(dtype)
    tensors = {"weight": (weight.codes.short() - 128).to(torch.int8), "weight_scale": weight.params.scale}
    reader = layout("int-quantized", TOKEN, num_bits=8, strategy="channel")
    module = reader.module(tensors, bias, weight.values(), False)
    assert isinstance(module, QuantizedInputLinear)
    hidden = randn(2, 5, IN).to(dtype)
    inputs = rounded(hidden, reader.scheme.activations)
    assert inputs.dtype == dtype and not torch.equal(inputs, hidden)
    wanted = torch.nn.functional.linear(inputs, weight.values().to(dtype), bias)
    assert_sums(module(hidden), wanted, 1e-6 if dtype == torch.float32 else 2**-8)
    assert (
        layout("int-quantized", num_bits=8, strategy="channel").module(tensors, bias, weight.values(), False)
        is None
    )
    floats = {"num_bits": 8, "type": "float"}
    static = layout("float-quantized", floats, strategy="channel", **floats)
    tensors |= {"weight": torch.zeros(OUT, IN, dtype=torch.float8_e4m3fn)}
    with pytest.raises(KeyError, match="input_scale"):  # of a checkpoint, its own error: see Checkpoint.parts
        static.module(tensors, bias, weight.values(), False)
    with pytest.raises(QuantkitError, match="input_scale is"):
        static.module(tensors | {"input_scale": torch.ones(2)}, bias, weight.values(), False)
    tensors |= {"weight": torch.zeros(OUT, IN, dtype=torch.int8)}
    with pytest.raises(QuantkitError, match="groups of 64 inputs"):
        grouped = TOKEN | {"strategy": "group", "group_size": 64}
        reader = layout("int-quantized", grouped, num_bits=8, strategy="channel")
        reader.module(tensors, bias, weight.values(), False)


def test_a_checkpoint_computes_with_the_scheme_of_each_linear(tiny_model):
    """int8 with quantized inputs everywhere but in `down_proj`, which is 4 bit and packed."""
    folder = tiny_model("llama")
    stored = load_file(folder / "model.safetensors")
    plain = Skeleton(open_checkpoint(str(folder)), torch.float32, torch.device("cpu"))
    tensors = {}
    for name, tensor in stored.items():
        linear = name.removesuffix(".weight")
        if "_proj" not in name:
            tensors[name] = tensor
        elif "down_proj" in name:
            parts = CompressedTensorsLayout().encode(SYMMETRIC)
            parts["weight_packed"] = torch.zeros(len(tensor), tensor.shape[1] // 8, dtype=torch.int32)
            parts["weight_scale"] = torch.ones(len(tensor), tensor.shape[1] // 32).half()
            parts["weight_shape"] = torch.tensor(tensor.shape)
            tensors |= {f"{linear}.{part}": value for part, value in parts.items()}
        else:
            scale = tensor.abs().amax(1, keepdim=True) / 127
            codes = (tensor / scale).round().to(torch.int8)
            tensors |= {f"{linear}.weight": codes, f"{linear}.weight_scale": scale}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    groups = {
        "w8a8": {
            "targets": ["Linear"], "format": "int-quantized", "input_activations": TOKEN,
            "weights": {"num_bits": 8, "strategy": "channel"},
        },
        "w4": {
            "targets": [r"re:.*\.down_proj$"], "format": "pack-quantized",
            "weights": {"num_bits": 4, "strategy": "group", "group_size": 32},
        },
    }  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))

    checkpoint = open_checkpoint(str(folder))
    skeleton = Skeleton(checkpoint, torch.float32, torch.device("cpu"))
    block = skeleton.load_block(0)
    assert isinstance(block.mlp.up_proj, QuantizedInputLinear)
    assert type(block.mlp.down_proj) is torch.nn.Linear and (block.mlp.down_proj.weight == -8).all()
    assert type(skeleton.load_block(1, decoded=True).mlp.up_proj) is torch.nn.Linear
    assert sorted(skeleton.names.missing()) == [] and len(checkpoint.names) == len(plain.checkpoint.names)
