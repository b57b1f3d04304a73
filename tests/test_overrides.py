"""--override: which linears it reaches, what it refuses, and what is then on disk."""

import re

import jobs
import pytest
import torch

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError
from quantkit.grids.affine import AffineGrid
from quantkit.models.files.open import open_checkpoint
from quantkit.quantize.solvers import rtn

RTN = {"solver": "rtn", "group_size": 32, "search_scale": False}
PLAIN = (4, 32)


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama", num_hidden_layers=2)


def grids(model, tmp_path, *overrides: str, exclude=(), method="gptq", options=RTN) -> dict:
    """Bits and group size of every linear that is resolved, None for one in 16 bit."""
    job = jobs.prepare(method, model, tmp_path / "out", options, override=overrides, exclude=exclude)
    return {row.name: (row.grid.bits, row.grid.group_size) if row.grid else None for row in job.specs}


def refused(code: int, model, tmp_path, *overrides: str, **arguments) -> tuple[str, str]:
    with pytest.raises(QuantkitError) as error:
        grids(model, tmp_path, *overrides, **arguments)
    assert error.value.exit_code == code
    return str(error.value), error.value.hint


# ---- which linears


def test_the_first_match_counts_and_exclude_counts_more(model, tmp_path):
    overrides = (r"layers\.0\..*v_proj=8", "v_proj|o_proj=3,16", "proj$=2,-1")
    found = grids(model, tmp_path, *overrides, exclude=("up_proj",))
    in_features = {"down_proj": 128}
    for name, grid in found.items():
        leaf = name.rpartition(".")[2]
        expected = {"v_proj": (3, 16), "o_proj": (3, 16), "up_proj": None}.get(
            leaf, (2, in_features.get(leaf, 64))
        )
        assert grid == ((8, 32) if "layers.0" in name and leaf == "v_proj" else expected), name
    assert len(found) == 14


def test_a_pattern_may_hold_an_equals_sign_and_without_a_group_size_it_is_the_methods(model, tmp_path):
    found = grids(model, tmp_path, "(?=.*q_proj)=8")
    assert {name for name, grid in found.items() if grid == (8, 32)} == {
        f"model.layers.{k}.self_attn.q_proj" for k in (0, 1)
    }
    assert set(found.values()) == {(8, 32), PLAIN}


# ---- what is refused


@pytest.mark.parametrize("text", ["q_proj", "q_proj=", "=8", "q_proj=8,", "q_proj=b", "q_proj=8,x", "q=-4"])
def test_what_is_no_override_is_refused(model, tmp_path, text):
    message, hint = refused(USAGE, model, tmp_path, text)
    assert repr(text) in message and "REGEX=bits" in message and "--override 'layers" in hint


def test_a_pattern_that_is_no_expression_is_refused(model, tmp_path):
    message, _ = refused(USAGE, model, tmp_path, "(q_proj=8")
    assert message.startswith("--override '(q_proj' is not a regular expression")


@pytest.mark.parametrize(
    "text, match",
    [
        ("q_proj=9", "--override q_proj=9: no such width"),
        ("q_proj=0", "--override q_proj=0: no such width"),
        ("q_proj=4,4", "--override q_proj=4,4 is invalid"),
        ("q_proj=4,-2", "--override q_proj=4,-2 is invalid"),
        ("q_proj=4,0", "--override q_proj=4,0 is invalid"),
        ("q_proj=4,48", "^64 columns do not split into groups of 48: self_attn.q_proj in 2 blocks$"),
    ],
)
def test_grids_that_cannot_be_are_refused(model, tmp_path, text, match):
    message, _ = refused(USAGE, model, tmp_path, text)
    assert re.match(match, message), message


def test_patterns_that_match_nothing_are_all_named(model, tmp_path):
    message, hint = refused(USAGE, model, tmp_path, "q_prj=8", "v_proj=8", "x=4,16", exclude=("nothing",))
    assert message == "no linear matches --exclude nothing, --override q_prj=8, --override x=4,16"
    assert "model.layers.0.self_attn.q_proj" in hint


@pytest.mark.parametrize(
    "method, options, reason",
    [
        ("nf4", {}, "--override q_proj=8: nf4 has one width"),
        ("int8", {}, "--override q_proj=8: int8 has one width"),
        ("awq", {"group_size": 32}, "cannot hold 2 linears: awq holds 4 bit, not 8: .*q_proj in 2 blocks"),
    ],
)
def test_layouts_of_one_width_say_so(model, tmp_path, method, options, reason):
    message, hint = refused(UNSUPPORTED, model, tmp_path, "q_proj=8", method=method, options=options)
    assert re.search(reason, message) and "--exclude" in hint


def test_awq_holds_one_group_size(model, tmp_path):
    message, _ = refused(
        UNSUPPORTED, model, tmp_path, "q_proj=4,16", method="awq", options={"group_size": 32}
    )
    assert "one group size for all linears, 32, not 16" in message


# ---- what is written


@pytest.mark.parametrize("layout", ("gptq", "compressed-tensors"))
def test_every_linear_decodes_to_its_own_grid(model, tmp_path, layout):
    other = (3, 16) if layout == "gptq" else (8, 16)
    overrides = (r"layers\.0\.mlp\.down_proj=8,-1", f"v_proj={other[0]},{other[1]}")
    jobs.quantize("gptq", model, tmp_path / "out", RTN | {"layout": layout}, override=overrides)
    source, written = jobs.tensors(model), open_checkpoint(str(tmp_path / "out"))
    for name in grids(model, tmp_path / "dry"):
        expected = {"v_proj": other}.get(name.rpartition(".")[2], PLAIN)
        expected = (8, 128) if name == "model.layers.0.mlp.down_proj" else expected
        row = jobs.manifest(tmp_path / "out")[name]
        assert (row["grid"]["bits"], row["grid"]["group_size"]) == expected
        weight = source[f"{name}.weight"]
        nearest = rtn.quantize(weight, AffineGrid(*expected, search=False, signed=True))
        found = written.layout.at(name).decode(written.parts(f"{name}.weight"))
        assert (found.grid.bits, found.grid.group_size) == expected, name
        assert torch.equal(found.codes, nearest.codes)
        assert torch.equal(written.read(f"{name}.weight", torch.float32), nearest.values())


def test_fused_linears_that_differ_are_told_and_others_are_not(model, tmp_path):
    def warned(name: str, *overrides: str) -> str:
        listener = jobs.Listener()
        jobs.prepare("gptq", model, tmp_path / name, RTN, listener, override=overrides)
        return " ".join(listener.warnings)

    told = warned("a", r"layers\.0\..*v_proj=8", r"layers\.1\.mlp\.up_proj=4,16")
    assert "model.layers.0.self_attn.qkv_proj" in told and "model.layers.1.mlp.gate_up_proj" in told
    assert "layers.1.self_attn" not in told and "layers.0.mlp" not in told
    assert not warned("b", "(q|k|v)_proj=8", "o_proj=8", "(gate|up)_proj=8,16")
    assert not warned("c")
