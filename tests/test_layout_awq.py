"""quantkit.layouts.awq against words put together nibble by nibble, and the format's own words."""

import jobs
import pytest
import torch
from codes import random_weight, signed

from quantkit import layouts
from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.grids.affine import AffineGrid
from quantkit.layouts import LinearSpec
from quantkit.layouts.awq import AwqLayout

OUT, IN, GROUP = 24, 96, 32
COLUMN_OF_NIBBLE = [0, 2, 4, 6, 1, 3, 5, 7]
WEIGHT = random_weight(AffineGrid(4, GROUP, False), OUT, IN)


def write_words(rows: list[list[int]]) -> torch.Tensor:
    """Each row `[out]` as int32 words: nibble n of word c is column 8 c + COLUMN_OF_NIBBLE[n]."""
    words = [
        [
            sum(int(row[8 * c + column]) << (4 * n) for n, column in enumerate(COLUMN_OF_NIBBLE))
            for c in range(len(row) // 8)
        ]
        for row in rows
    ]
    return signed(words)


@pytest.mark.parametrize("group_size", (GROUP, IN))
@pytest.mark.parametrize("zero_point", (True, False))
def test_encode_writes_the_format_and_decode_inverts_it(group_size, zero_point):
    weight = random_weight(AffineGrid(4, group_size, not zero_point), OUT, IN)
    layout = AwqLayout(-1 if group_size == IN else group_size, zero_point)
    tensors = layout.encode(weight)

    assert list(tensors) == list(layout.suffixes)
    assert torch.equal(tensors["qweight"], write_words(weight.codes.T.tolist()))
    assert torch.equal(tensors["qzeros"], write_words(weight.params.zero.T.tolist()))
    assert tensors["scales"].dtype == torch.float16
    assert torch.equal(tensors["scales"].float(), weight.params.scale.T)
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    row = LinearSpec("a.b", 0, "b", OUT, IN, weight.grid)
    assert jobs.table(tensors) == layout.tensors(row)

    decoded = layout.decode(tensors)
    assert decoded.grid == weight.grid and decoded.codes.dtype == torch.uint8
    assert torch.equal(decoded.codes, weight.codes)
    assert torch.equal(decoded.params.zero, weight.params.zero)
    group = torch.arange(IN) // group_size
    literal = weight.params.scale[:, group] * (weight.codes.float() - weight.params.zero[:, group])
    assert torch.equal(decoded.values(), literal)


def spec(
    out_features: int = OUT, bits: int = 4, group_size: int = GROUP, symmetric: bool = False,
    kept: str | None = None, name: str = "a.b",
):  # fmt: skip
    grid = None if kept else AffineGrid(bits, group_size, symmetric)
    return LinearSpec(name, 0, "b", out_features, IN, grid, kept)


def test_check_refuses_what_one_configuration_cannot_say():
    layout = AwqLayout(GROUP)
    assert layout.check(spec()) is None
    assert "4 bit, not 8" in layout.check(spec(bits=8))
    assert f"one group size for all linears, {GROUP}, not 16" in layout.check(spec(group_size=16))
    assert "out_features 20 is not a multiple of 8" in layout.check(spec(20))
    assert "zero_point" in layout.check(spec(symmetric=True))
    assert AwqLayout(-1, zero_point=False).check(spec(group_size=IN, symmetric=True)) is None
    assert layout.check(spec(group_size=IN)) and AwqLayout(-1).check(spec())


def test_config_is_what_clients_read():
    assert AwqLayout(GROUP).config([spec()]) == {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None,
    }  # fmt: skip
    config = AwqLayout(-1, zero_point=False).config([spec(), spec(kept="--exclude x", name="a.c")])
    assert config["modules_to_not_convert"] == ["a.c", "lm_head"]
    assert (config["group_size"], config["zero_point"]) == (-1, False)


def detect(**config):
    return layouts.detect({"quantization_config": {"quant_method": "awq", **config}})


def test_detect_recognizes_its_own_and_others_configurations():
    for layout in (AwqLayout(128), AwqLayout(-1, zero_point=False)):
        assert detect(**layout.config([spec()])) == layout
    assert detect(bits=4, group_size=64, version="GEMM", zero_point=True) == AwqLayout(64)
    assert detect(w_bit=4, q_group_size=64) == AwqLayout(64)


@pytest.mark.parametrize(
    "config", [{"version": "gemv"}, {"version": "marlin"}, {"format": "llm-awq"}, {"bits": 3}, {"bits": None}]
)
def test_detect_refuses_what_it_would_misread(config):
    with pytest.raises(QuantkitError, match=f"{next(iter(config.values()))}") as refused:
        detect(**{"bits": 4, "group_size": 64} | config)
    assert refused.value.exit_code == UNSUPPORTED and "gemm" in refused.value.hint
    with pytest.raises(QuantkitError, match="no group_size"):
        detect(bits=4)


@pytest.mark.parametrize(
    "part, broken",
    [
        ("qweight", torch.zeros(IN, 4, dtype=torch.int32)),
        ("qweight", torch.zeros(IN + 1, 3, dtype=torch.int32)),
        ("qweight", torch.zeros(IN, 3)),
        ("qweight", torch.zeros(0, 3, dtype=torch.int32)),
        ("qzeros", torch.zeros(4, 3, dtype=torch.int32)),
        ("qzeros", torch.zeros(3, dtype=torch.int32)),
        ("scales", torch.ones(3, 8)),
        ("scales", torch.ones(3, OUT, dtype=torch.int32)),
    ],
)
def test_decode_believes_no_sizes_that_do_not_agree(part, broken):
    tensors = AwqLayout(GROUP).encode(WEIGHT) | {part: broken}
    with pytest.raises(QuantkitError, match="instead of|do not fit"):
        AwqLayout(GROUP).decode(tensors)


def test_families_with_scaled_activations_are_refused():
    """transformers puts a module with `scales` there, which no file of ours holds: it computes NaN."""
    layout = AwqLayout(32)
    assert layout.check_model("llama") is None
    assert "use --layout compressed-tensors" in layout.check_model("gpt_neox")


@pytest.mark.parametrize("stored, said", [(GROUP, 16), (GROUP, -1), (IN, GROUP)])
def test_a_configuration_that_contradicts_the_tensors_is_refused(stored, said):
    tensors = AwqLayout(stored).encode(random_weight(AffineGrid(4, stored, False), OUT, IN))
    with pytest.raises(QuantkitError, match="says 4 bit in .*, the tensors have 4 bit in "):
        AwqLayout(said).decode(tensors)
