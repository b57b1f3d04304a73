"""quantkit.layouts.compressed_tensors, as written: against a bit stream of Python integers, and its words."""

import re
from itertools import product

import jobs
import pytest
import torch
from codes import bit_stream, random_weight
from sums import assert_sums

from quantkit import layouts
from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.grids.affine import AffineGrid, AffineParams
from quantkit.grids.grid import QuantizedWeight
from quantkit.layouts import LinearSpec
from quantkit.layouts.compressed_tensors import CompressedTensorsLayout
from quantkit.layouts.compressed_tensors.integers import PackQuantized
from quantkit.quantize import methods

OUT, IN, GROUP = 32, 96, 32
CELLS = list(product((4, 8), (GROUP, IN), (True, False)))


@pytest.mark.parametrize("bits, group_size, symmetric", CELLS)
def test_encode_writes_the_format_and_decode_inverts_it(bits, group_size, symmetric):
    weight = random_weight(AffineGrid(bits, group_size, symmetric), OUT, IN)
    layout = CompressedTensorsLayout(PackQuantized(bits, -1 if group_size == IN else group_size, symmetric))
    tensors = layout.encode(weight)

    expected = {"weight_packed", "weight_scale", "weight_shape", "weight_zero_point"}
    assert set(tensors) == expected - ({"weight_zero_point"} if symmetric else set())
    assert torch.equal(tensors["weight_packed"], bit_stream(weight.codes.tolist(), bits))
    assert tensors["weight_scale"].dtype == torch.float16
    assert torch.equal(tensors["weight_scale"].float(), weight.params.scale)
    assert tensors["weight_shape"].dtype == torch.int64 and tensors["weight_shape"].tolist() == [OUT, IN]
    if not symmetric:
        assert torch.equal(tensors["weight_zero_point"], bit_stream(weight.params.zero.T.tolist(), bits).T)
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    row = LinearSpec("a.b", 0, "b", OUT, IN, weight.grid)
    assert jobs.table(tensors) == layout.tensors(row)

    group = torch.arange(IN) // group_size
    literal = weight.params.scale[:, group] * (weight.codes.float() - weight.params.zero[:, group])
    read_back = detect(**layout.config([row])).at("a.b")
    for reader in (layout, CompressedTensorsLayout(), read_back):
        decoded = reader.decode(tensors)
        assert decoded.grid == weight.grid and decoded.codes.dtype == torch.uint8
        assert torch.equal(decoded.codes, weight.codes)
        assert torch.equal(decoded.params.zero, weight.params.zero)
        assert torch.equal(decoded.values(), literal)
    assert read_back.module(tensors, None, read_back.values(tensors), False) is None


def spec(
    name: str = "model.layers.1.mlp.up_proj", bits: int = 4, group_size: int = GROUP,
    kept: str | None = None, out_features: int = OUT, in_features: int = IN,
):  # fmt: skip
    grid = None if kept else AffineGrid(bits, group_size)
    block, local = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name).groups()
    return LinearSpec(name, int(block), local, out_features, in_features, grid, kept)


def detect(**config):
    return layouts.detect({"quantization_config": config})


def test_check_refuses_what_fills_no_whole_words():
    layout = CompressedTensorsLayout(PackQuantized(4, GROUP))
    assert layout.check(spec()) is None and layout.check(spec(bits=8)) is None
    assert layout.check(spec(bits=3)) is None
    assert layout.check(spec(in_features=80, bits=3)).startswith("in_features 80 is not a multiple of 32")
    assert layout.check(spec(in_features=92)).startswith("in_features 92 is not a multiple of 8")
    assert layout.check(spec(in_features=92, bits=8)) is None
    assert layout.check(spec(out_features=20)) is None
    asymmetric = CompressedTensorsLayout(PackQuantized(4, GROUP, symmetric=False))
    assert asymmetric.check(spec(out_features=20)).startswith("out_features 20 is not a multiple of 8")


def test_config_is_what_clients_read():
    outside = r"re:(?!(.*\.)?layers\.\d+\.)"
    weights = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP,
        "dynamic": False, "observer": "minmax",
    }  # fmt: skip
    assert CompressedTensorsLayout(PackQuantized(4, GROUP)).config([spec()]) == {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ["lm_head", outside],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
                "format": "pack-quantized",
            }
        },
    }
    config = CompressedTensorsLayout(PackQuantized(8, -1, symmetric=False)).config(
        [spec(bits=8, group_size=IN)]
    )
    assert config["config_groups"]["group_0"]["weights"] == weights | {
        "num_bits": 8, "symmetric": False, "strategy": "channel", "group_size": None
    }  # fmt: skip
    pattern = outside.removeprefix("re:")  # clients match from the start of the name
    ignored = ["lm_head", "embed_out", "model.project_in", "model.decoder.project_out"]
    quantized = ["model.layers.0.mlp.up_proj", "layers.10.x", "transformer.model.layers.3.a.b"]
    assert all(re.match(pattern, name) for name in ignored)
    assert not any(re.match(pattern, name) for name in quantized)


def test_overrides_are_config_groups_and_kept_linears_are_ignored():
    attention = [spec(f"model.layers.0.attn.{leaf}_proj", bits=8) for leaf in "qkv"]
    mlp = [
        spec("model.layers.0.mlp.gate_proj", group_size=16),
        spec("model.layers.0.mlp.up_proj"),
        spec("model.layers.0.mlp.down_proj", kept="--exclude x"),
    ]
    config = CompressedTensorsLayout(PackQuantized(4, GROUP)).config(attention + mlp)
    groups = config["config_groups"]
    targets = [group["targets"] for group in groups.values()]
    fused = "model.layers.0.attn.qkv_proj"  # vLLM asks for it; gate_up_proj is not alike and gets no rule
    assert targets == [["Linear"], [row.name for row in attention] + [fused], [mlp[0].name]]
    numbers = [(group["weights"]["num_bits"], group["weights"]["group_size"]) for group in groups.values()]
    assert numbers == [(4, GROUP), (8, GROUP), (4, 16)]
    assert "model.layers.0.mlp.down_proj" in config["ignore"]

    stored = detect(**config)
    assert stored.at(attention[1].name).form == PackQuantized(8, GROUP)
    assert stored.at(mlp[0].name).form.group_size == 16
    assert stored.at(mlp[1].name).form.bits == 4
    only = CompressedTensorsLayout(PackQuantized(4, GROUP)).config(attention)
    assert [group["targets"][0] for group in only["config_groups"].values()] == [attention[0].name]


@pytest.mark.parametrize(
    "options, named",
    [
        ({"act_order": "full"}, "--act-order full"),
        ({"checkpoint_format": "gptq_v2"}, "--checkpoint-format gptq_v2"),
    ],
)
def test_the_method_refuses_what_only_the_gptq_layout_holds(options, named):
    methods.create("gptq", **options).check()
    with pytest.raises(QuantkitError, match=f"compressed-tensors does not hold {named}") as refused:
        methods.create("gptq", layout="compressed-tensors", **options).check()
    assert "--layout gptq" in refused.value.hint


def test_the_method_builds_the_layout_it_was_asked_for():
    method = methods.create("gptq", layout="compressed-tensors", bits=8, group_size=-1, sym=False)
    method.check()
    assert method.layout == CompressedTensorsLayout(PackQuantized(8, -1, symmetric=False))
    assert method.suffix == "gptq-w8channel-asym-ct"
    grid = method.build().make_grid("up_proj", IN, None)
    assert (grid.group_size, grid.symmetric, grid.zero_min) == (IN, False, 0)


def group(**changes) -> dict:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32} | changes.pop(
        "weights", {}
    )
    return {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"} | changes


ROWS = {"num_bits": 8, "strategy": "channel", "group_size": None}
STATIC = {"num_bits": 8, "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"transform_config": {"config_groups": {}}}, "transform_config"),
        ({"config_groups": {"W4A16": ["Linear"]}}, "W4A16"),
        ({"config_groups": {"g": group(format="mxfp6-pack-quantized")}}, "mxfp6-pack-quantized"),
        ({"config_groups": {"g": group(format=None)}, "format": "marlin-24"}, "marlin-24"),
        ({"config_groups": {"g": group(output_activations={"num_bits": 8})}}, "config group 'g'"),
        ({"config_groups": {"g": group(weights={"num_bits": 16})}}, "16 bit int"),
        ({"config_groups": {"g": group(weights={"type": "float", "group_size": 64})}}, "4 bit float"),
        ({"config_groups": {"g": group(weights={"type": []})}}, r"4 bit \[\]"),
        ({"config_groups": {"g": group(weights={"strategy": "tensor_group"})}}, "tensor_group"),
        (
            {"config_groups": {"g": group(input_activations={"strategy": "group", "group_size": 4})}},
            "activations of 8 bit int by group, dynamic False",
        ),
        ({"config_groups": {"g": group(input_activations={"symmetric": False})}}, "asymmetric"),
        ({"config_groups": {"g": group(format="int-quantized")}}, "4 bit int weights by group in int"),
        (
            {"config_groups": {"g": group(format="int-quantized", weights=ROWS | {"symmetric": False})}},
            ": asymmetric 8 bit int weights by channel in int-quantized is not supported",
        ),
        (
            {"config_groups": {"g": group(format="int-quantized", weights=ROWS, input_activations=STATIC)}},
            ": 8 bit int weights by channel with 8 bit int inputs of stored scales in int-quantized is not",
        ),
    ],
)
def test_detect_refuses_what_it_would_misread(changes, named):
    config = {"quant_method": "compressed-tensors", "config_groups": {"g": group()}} | changes
    with pytest.raises(QuantkitError, match=named) as refused:
        detect(**config)
    assert refused.value.exit_code == UNSUPPORTED and refused.value.hint


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"config_groups": {}}, "no config_groups"),
        ({"config_groups": [group()]}, "no config_groups"),
        ({"config_groups": {"g": group(targets="Linear")}}, "targets"),
        ({"config_groups": {"g": group(targets=["re:("])}}, r"'re:\('"),
        ({"config_groups": {"g": group() | {"weights": None}}}, "nothing of its weights"),
        ({"config_groups": {"g": group(weights={"group_size": 0})}}, "group_size of weights is 0"),
        ({"config_groups": {"g": group(weights={"strategy": "block"})}}, "block_structure"),
        ({"quantization_status": "frozen"}, "frozen"),
    ],
)
def test_detect_says_what_is_malformed(changes, named):
    config = {"quant_method": "compressed-tensors", "config_groups": {"g": group()}} | changes
    with pytest.raises(QuantkitError, match=named):
        detect(**config)


def test_targets_match_as_in_the_library():
    """Exact names before patterns before the class; a pattern matches from the start of the name."""
    sizes = {"Linear": 32, "re:.*down": 64, "re:model.*": 16, "a.down": 128, "re:own": 8}
    groups = {target: group(targets=[target], weights={"group_size": size}) for target, size in sizes.items()}
    layout = detect(quant_method="compressed-tensors", config_groups=groups)
    names = {"a.down": 128, "b.down": 64, "model.down": 64, "model.up": 16, "b.up": 32, "own.up": 8}
    assert {name: layout.at(name).form.group_size for name in names} == names
    only = detect(quant_method="compressed-tensors", config_groups={"g": group(targets=["re:.*down"])})
    with pytest.raises(QuantkitError, match=r"a\.up is quantized, but no target"):
        only.at("a.up")


@pytest.mark.parametrize(("inputs", "kind"), [("fp8", "float"), ("int8", "int")])
def test_inputs_of_packed_integers_are_rounded_token_by_token(inputs, kind):
    """W4A8: eight bits, one scale per token, as compressed-tensors computes it."""
    layout = CompressedTensorsLayout(PackQuantized(4, 32, True, inputs))
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(8, 64, generator=generator), torch.randn(3, 64, generator=generator)
    grid = AffineGrid(4, 32)
    params = grid.fit(weight.view(-1, 32))
    codes = grid.round(weight.view(-1, 32), params).view(8, 64)
    solved = QuantizedWeight(grid, codes, AffineParams(params.scale.view(8, 2), params.zero.view(8, 2)))
    tensors = layout.encode(solved)
    most = 448.0 if kind == "float" else 127.5
    scale = x.abs().amax(1, keepdim=True) / most
    rounded = (x / scale).to(torch.float8_e4m3fn).float() if kind == "float" else (x / scale).round()
    wanted = rounded.clamp(-448 if kind == "float" else -128, 448 if kind == "float" else 127) * scale
    computed = layout.module(tensors, None, layout.values(tensors), False)(x)
    assert_sums(computed, wanted @ solved.values().T)
    entry = layout.form.activations()
    assert (entry["num_bits"], entry["type"], entry["strategy"], entry["dynamic"]) == (8, kind, "token", True)
