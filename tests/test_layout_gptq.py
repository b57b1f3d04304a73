"""quantkit.layouts.gptq against a bit stream written by Python integers, and the format's own words."""

import re
from functools import partial
from itertools import product

import codes
import jobs
import pytest
import torch
from torch import Tensor

from quantkit import layouts
from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.grids.affine import AffineGrid
from quantkit.grids.grid import QuantizedWeight
from quantkit.layouts import LinearSpec
from quantkit.layouts._packing import pack, unpack
from quantkit.layouts.gptq import GptqLayout

BITS = (2, 3, 4, 5, 6, 7, 8)
OUT, IN, GROUP = 64, 96, 32


def random_weight(layout: GptqLayout, in_features: int = IN) -> QuantizedWeight:
    group_size = in_features if layout.group_size == -1 else layout.group_size
    grid = AffineGrid(layout.bits, group_size, layout.symmetric, layout.zero_min)
    return codes.random_weight(grid, OUT, in_features, layout.desc_act)


def write_stream(columns: list[list[int]], bits: int) -> Tensor:
    """Each list down a column."""
    return codes.bit_stream(columns, bits).T


@pytest.mark.parametrize("bits", BITS)
def test_pack_is_a_little_endian_bit_stream(bits):
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(2**bits, (96, 5), generator=generator, dtype=torch.uint8)
    values[:, 3], values[:, 4] = 2**bits - 1, 0
    words = pack(values, bits)
    assert words.dtype == torch.int32 and words.shape == (3 * bits, 5)
    assert torch.equal(words, write_stream(values.T.tolist(), bits))
    assert torch.equal(unpack(words, bits, 96), values)
    alone = torch.cat([values.new_zeros(1), values[:, 2]])[1:, None]  # a column that begins at an odd byte
    assert torch.equal(pack(alone, bits), words[:, 2:3]) and torch.equal(alone[:, 0], values[:, 2])
    assert torch.equal(unpack(words[:, 2:3].long(), bits, 95), values[:95, 2:3])


def write_planes(rows, widths):
    """Word by word: of 32 codes the lowest bits of all first, then those above."""
    words = []
    for start in range(0, len(rows[0]), 32):
        shift = 0
        for width in widths:
            plane = [[code >> shift & 2**width - 1 for code in row[start : start + 32]] for row in rows]
            words.append(write_stream(plane, width))
            shift += width
    return torch.cat(words)


@pytest.mark.parametrize(
    "bits, symmetric, version, desc_act", list(product(BITS, (True, False), (1, 2, 3), (True, False)))
)
def test_encode_writes_the_format_and_decode_inverts_it(bits, symmetric, version, desc_act):
    layout = GptqLayout(bits, GROUP, symmetric, desc_act, version=version)
    weight = random_weight(layout)
    tensors = layout.encode(weight)

    assert set(tensors) == set(layout.suffixes)
    widths = {5: (4, 1), 6: (4, 2), 7: (4, 2, 1)} | ({3: (2, 1)} if version == 3 else {})
    write = partial(write_planes, widths=widths[bits]) if bits in widths else partial(write_stream, bits=bits)
    assert torch.equal(tensors["qweight"], write(weight.codes.tolist()))
    zeros = weight.params.zero.int().T.tolist()  # [groups][out]
    if version == 1:
        zeros = [[(z - 1) % 2**bits for z in row] for row in zeros]
    assert torch.equal(tensors["qzeros"], write(zeros).T)
    assert tensors["scales"].dtype == torch.float16
    assert torch.equal(tensors["scales"].float(), weight.params.scale.T)
    assert tensors["g_idx"].dtype == torch.int32
    assert torch.equal(tensors["g_idx"].long(), weight.group_of_columns())
    assert all(tensor.is_contiguous() for tensor in tensors.values())

    decoded = layout.decode(tensors)
    assert decoded.grid == weight.grid
    assert torch.equal(decoded.codes, weight.codes) and decoded.codes.dtype == torch.uint8
    assert torch.equal(decoded.params.scale, weight.params.scale)
    assert torch.equal(decoded.params.zero, weight.params.zero)
    assert torch.equal(decoded.group_of_columns(), weight.group_of_columns())
    group = weight.group_of_columns()
    literal = weight.params.scale[:, group] * (weight.codes.float() - weight.params.zero[:, group])
    assert torch.equal(decoded.values(), literal)


@pytest.mark.parametrize("bits", BITS)
def test_size_on_disk_is_the_size_that_is_planned(bits):
    layout = GptqLayout(bits, GROUP)
    weight = random_weight(layout)
    row = LinearSpec("a.b", 0, "b", OUT, IN, weight.grid)
    assert jobs.table(layout.encode(weight)) == layout.tensors(row)
    assert 8 * layout.nbytes(row) == OUT * IN * (bits + (16 + bits) / GROUP) + 32 * IN


def test_version_one_stores_zero_points_less_one():
    weight = random_weight(GptqLayout(4, GROUP))  # symmetric: every zero point is 8
    assert (GptqLayout(4, GROUP, version=1).encode(weight)["qzeros"] == 0x77777777).all()
    assert (GptqLayout(4, GROUP, version=2).encode(weight)["qzeros"] + (1 << 32) == 0x88888888).all()
    assert GptqLayout(4, GROUP, version=1).zero_min == 1
    assert GptqLayout(4, GROUP, version=2).zero_min == 0


@pytest.mark.parametrize("bits, group_size", list(product(BITS, (-1, 16, 48))))
def test_decode_reads_bits_and_groups_off_the_shapes(bits, group_size):
    """A layout told of other bits and groups decodes all the same: checkpoints hold per-linear overrides."""
    weight = random_weight(GptqLayout(bits, group_size))
    tensors = GptqLayout(bits, group_size).encode(weight)
    decoded = GptqLayout(bits=4, group_size=128).decode(tensors)
    assert (decoded.grid.bits, decoded.grid.group_size) == (bits, IN if group_size == -1 else group_size)
    assert torch.equal(decoded.values(), weight.values())


def test_decode_without_g_idx_assumes_groups_in_order():
    layout = GptqLayout(4, GROUP, symmetric=False)
    weight = random_weight(layout)
    tensors = layout.encode(weight)
    del tensors["g_idx"]
    assert torch.equal(layout.decode(tensors).values(), weight.values())


def test_decode_without_g_idx_when_the_last_group_is_short():
    """96 columns in groups of 64, as AutoGPTQ writes them: 64 and 32, not 48 and 48."""
    weight = random_weight(GptqLayout(4, 48, symmetric=False))
    layout = GptqLayout(4, 64, symmetric=False)
    tensors = layout.encode(weight)
    del tensors["g_idx"]
    assert torch.equal(layout.decode(tensors).group_of_columns(), torch.arange(IN) // 64)


def spec(
    out_features: int = OUT, in_features: int = IN, name: str = "a.b", kept: str | None = None,
    bits: int = 4, group_size: int = GROUP,
):  # fmt: skip
    grid = None if kept else AffineGrid(bits, group_size)
    return LinearSpec(name, 0, "b", out_features, in_features, grid, kept)


@pytest.mark.parametrize("bits, multiple", [(2, 16), (3, 32), (4, 8), (8, 4)])
def test_check_refuses_sizes_that_fill_no_whole_words(bits, multiple):
    layout = GptqLayout(bits, -1)
    assert layout.check(spec(3 * multiple, multiple, bits=bits)) is None
    words = f"is not a multiple of {multiple}, so {bits}-bit codes fill no whole words"
    assert layout.check(spec(multiple, multiple + 2, bits=bits)) == f"in_features {multiple + 2} {words}"
    assert layout.check(spec(multiple - 2, multiple, bits=bits)) == f"out_features {multiple - 2} {words}"


def test_config_is_what_clients_read():
    specs = [spec(name="model.layers.0.mlp.up_proj"), spec(name="model.layers.0.mlp.down_proj")]
    config = GptqLayout(4, GROUP, damp_percent=0.02).config(specs)
    quantizer = config.pop("meta")["quantizer"]
    assert len(quantizer) == 1 and re.fullmatch(r"quantkit:\d+\.\d+.*", quantizer[0])
    assert config == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "true_sequential": True,
        "damp_percent": 0.02,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
    }
    other = GptqLayout(3, -1, symmetric=False, desc_act=True, version=2)
    assert other.config(specs) | {
        "bits": 3, "group_size": -1, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"
    } == other.config(specs)  # fmt: skip


def test_legacy_config_file_has_all_keys_and_more():
    layout, specs = GptqLayout(4, 128), [spec()]
    legacy = {"static_groups": False, "model_name_or_path": None, "model_file_base_name": "model"}
    assert layout.files(specs) == {"quantize_config.json": layout.config(specs) | legacy}


def test_kept_linears_are_named_to_every_client():
    """GPTQModel matches `dynamic` rules from the start of the full name. transformers (optimum) knows no
    such rules: it packs the modules whose names end with an entry of `modules_in_block_to_quantize`.
    """
    block = "model.layers.1"
    names = [f"{block}{rest}" for rest in (".mlp.up_proj", "1.mlp.up_proj", ".mlp.up_proj2", "_mlp.up_proj")]
    specs = [spec(name=names[0], kept="--exclude x"), *(spec(name=name) for name in names[1:])]
    config = GptqLayout(4, GROUP).config(specs)
    ((rule, settings),) = config["dynamic"].items()
    assert settings == {}
    assert rule.startswith("-:")
    assert [name for name in names if re.match(rule.removeprefix("-:"), name)] == names[:1]
    packed = sum(config["modules_in_block_to_quantize"], [])
    assert [name for name in names if any(name.endswith(part) for part in packed)] == names[1:]


def test_overrides_are_dynamic_rules_and_fused_names_have_them_too():
    """vLLM asks for the rule of `qkv_proj`, which stands for q, k and v: it gets one where they agree."""
    attention = [spec(name=f"m.0.attn.{leaf}_proj", bits=8, group_size=32) for leaf in "qkv"]
    mlp = [spec(name="m.0.mlp.gate_proj", kept="--exclude x"), spec(name="m.0.mlp.up_proj")]
    rules = GptqLayout(4, GROUP).config(attention + mlp)["dynamic"]
    override = {"bits": 8, "group_size": 32}
    assert rules == {
        rf"+:^m\.0\.attn\.{leaf}_proj$": override for leaf in ("q", "k", "v", "qkv")
    } | {r"-:^m\.0\.mlp\.gate_proj$": {}}  # fmt: skip
    assert "dynamic" not in GptqLayout(4, GROUP).config(mlp[1:])


def detect(**config):
    return layouts.detect({"quantization_config": config})


def test_detect_recognizes_its_own_configurations():
    assert layouts.detect({}) is None
    for layout in (
        GptqLayout(4, 128),
        GptqLayout(3, -1, symmetric=False, version=2),
        GptqLayout(8, 32, desc_act=True),
    ):
        assert detect(**layout.config([spec()])) == layout
    minimal = detect(quant_method="gptq", bits=4, group_size=64)
    assert minimal == GptqLayout(4, 64, symmetric=True, desc_act=False, version=1)


def test_detect_understands_the_newer_name_of_the_format():
    """GPTQModel 7 reads `format` where there is no `checkpoint_format`."""
    assert detect(quant_method="gptq", bits=4, group_size=64, format="gptq_v2").version == 2
    assert detect(quant_method="gptq", bits=6, group_size=64, checkpoint_format="gptq_p").version == 3


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "marlin"},
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "pack_dtype": "int16"},
        {"quant_method": "exl3", "bits": 4},
        {"bits": 4},
    ],
    ids=["marlin", "int16 words", "other method", "no method"],
)
def test_detect_refuses_what_it_would_misread(config):
    with pytest.raises(QuantkitError) as refused:
        detect(**config)
    assert refused.value.exit_code == UNSUPPORTED
    named = config.get("pack_dtype") or config.get("checkpoint_format") or config.get("quant_method") or ""
    assert named in refused.value.message
    assert "gptq" in refused.value.hint


def test_stored_tensors_are_grouped_by_linear():
    names = ["a.b.qweight", "a.b.scales", "a.b.bias", "norm.weight", "c.qzeros", "qweight_like.weight"]
    groups = layouts.group_by_linear(GptqLayout(4, 128), names)
    assert groups == {"a.b": {"qweight": "a.b.qweight", "scales": "a.b.scales"}}
    assert layouts.group_by_linear(None, names) == {}


DYNAMIC = {"+:.*mlp": {"bits": 8}, r".*o_proj$": {"group_size": 32, "desc_act": True}, "-:.*lm_head": {}}


@pytest.mark.parametrize(
    "linear, bits, group_size, says",
    [
        ("self_attn.q_proj", 4, 64, None),
        ("mlp.up_proj", 8, 64, None),
        ("self_attn.o_proj", 4, 32, None),
        ("self_attn.q_proj", 8, 64, "4 bit in groups of 64"),
        ("mlp.up_proj", 4, 64, "8 bit in groups of 64"),
        ("self_attn.o_proj", 4, 64, "4 bit in groups of 32"),
    ],
)
def test_a_configuration_that_contradicts_the_tensors_is_refused(linear, bits, group_size, says):
    weight = random_weight(GptqLayout(bits, group_size), in_features=128)
    tensors = GptqLayout(bits, group_size).encode(weight)
    layout = detect(quant_method="gptq", bits=4, group_size=64, dynamic=DYNAMIC).at(linear)
    if says is None:
        assert torch.equal(layout.decode(tensors).values(), weight.values())
        return
    with pytest.raises(QuantkitError, match=f"says {says}, .* {bits} bit in groups of {group_size}$"):
        layout.decode(tensors)


@pytest.mark.parametrize("dynamic", [["a"], {"+:(": {"bits": 8}}, {"a": {"group_size": "a"}}])
def test_rules_that_are_none_are_refused(dynamic):
    with pytest.raises(QuantkitError, match="dynamic"):
        detect(quant_method="gptq", bits=4, group_size=64, dynamic=dynamic)
