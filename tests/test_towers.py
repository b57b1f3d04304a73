"""`--towers`: linears of towers and projectors rounded to nearest, and what clients make of them."""

import json
import math
import re

import jobs
import pytest
import test_wrappers
import torch
import transformers as hf
from safetensors.torch import load_file
from test_wrappers import TEXT, all_tensors, spelled

from quantkit.errors import USAGE
from quantkit.models.open import open_checkpoint
from quantkit.quantize.prepare import towers

GROUP = 32
CALIBRATED = ("--calibration", "text.txt", "--samples", 2, "--seqlen", 32)
TOWERS = {"llava": ("vision_tower.", "multi_modal_projector."), "qwen2_5_vl": ("visual.",)}
ASYMMETRIC, SYMMETRIC = ("--group-size", GROUP, "--no-sym"), ("--group-size", GROUP)


@pytest.fixture
def save(tmp_path, monkeypatch):
    """A wrapper whose tower has rows of 64 and 128; calibration text beside it."""
    wide = {"hidden_size": 64, "intermediate_size": 128}
    for family in TOWERS:
        make, arguments = test_wrappers.WRAPPERS[family]
        vision = arguments["vision_config"] | wide
        monkeypatch.setitem(test_wrappers.WRAPPERS, family, (make, arguments | {"vision_config": vision}))
    (tmp_path / "text.txt").write_text(TEXT)
    return lambda family, dtype="float32": test_wrappers.save(tmp_path / family, family, dtype)


def tower_rows(folder) -> dict[str, dict]:
    return {name: row for name, row in jobs.manifest(folder).items() if row.get("tower")}


def affine(weight: torch.Tensor, symmetric: bool) -> torch.Tensor:
    """4 bit, groups of GROUP over their full range, one by one; scales in float16."""
    found = torch.empty_like(weight)
    for row in range(len(weight)):
        for start in range(0, weight.shape[1], GROUP):
            group = weight[row, start : start + GROUP]
            low, high = group.min().clamp(max=0), group.max().clamp(min=0)
            scale = (2 * torch.maximum(-low, high) if symmetric else high - low) / 15
            zero = 8 if symmetric else (-low / scale).round().clamp(0, 15)
            codes = ((group / scale.half().float()).round() + zero).clamp(0, 15)
            found[row, start : start + GROUP] = (codes - zero) * scale.half().float()
    return found


def int8(weight: torch.Tensor) -> torch.Tensor:
    """Rows over their largest, as bitsandbytes rounds what it is given in float16."""
    weight = weight.half().float()
    largest = weight.abs().amax(1, keepdim=True)
    return (weight * (127 / largest)).round() * largest / 127


@pytest.mark.parametrize(
    ("family", "command", "reference"),
    [
        ("llava", ("gptq", *SYMMETRIC, "--no-mse"), lambda weight: affine(weight, True)),
        (
            "qwen2_5_vl",
            ("gptq", *ASYMMETRIC, "--no-mse", "--layout", "compressed-tensors"),
            lambda weight: affine(weight, False),
        ),
        ("qwen2_5_vl", ("awq", *SYMMETRIC), lambda weight: affine(weight, False)),
        ("llava", ("int8",), int8),
    ],
)
def test_every_linear_of_a_tower_is_rounded_to_nearest(quantkit, tmp_path, save, family, command, reference):
    folder = save(family)
    extra = CALIBRATED if command[0] in ("gptq", "awq") else ()
    done = quantkit(command[0], folder, *command[1:], *extra, "--towers", "-o", "out", "-q")
    assert done.code == 0, done.err
    rows, source = tower_rows(tmp_path / "out"), all_tensors(folder)
    matrices = {
        name.removesuffix(".weight")
        for name, tensor in source.items()
        if name.startswith(TOWERS[family]) and tensor.ndim == 2 and "embedding" not in name
    }
    assert rows.keys() == matrices and all("grid" in row for row in rows.values())
    written = open_checkpoint(str(tmp_path / "out"))
    for name in matrices:
        expected = reference(source[f"{name}.weight"])
        torch.testing.assert_close(written.read(f"{name}.weight"), expected, rtol=0, atol=1e-6)
        lost = (expected - source[f"{name}.weight"]).square().sum() / source[f"{name}.weight"].square().sum()
        assert rows[name]["error"] == pytest.approx(lost.item(), rel=1e-3)
    after = all_tensors(tmp_path / "out")
    kept = [name for name in source if name.startswith(TOWERS[family]) and name in after]
    assert all(torch.equal(source[name], after[name]) for name in kept if f"{name[:-7]}" not in matrices)


def test_towers_in_nf4_are_bitsandbytes_own(quantkit, tmp_path, save):
    bitsandbytes = pytest.importorskip("bitsandbytes").functional
    folder = save("qwen2_5_vl")
    assert quantkit("nf4", folder, "--towers", "--no-double-quant", "-o", "out").code == 0
    source, written = all_tensors(folder), open_checkpoint(str(tmp_path / "out"))
    rows = tower_rows(tmp_path / "out")
    assert len(rows) == 3 * 5 + 2
    for name in rows:
        weight = source[f"{name}.weight"]
        packed, state = bitsandbytes.quantize_4bit(weight, quant_type="nf4")
        assert torch.equal(written.read(f"{name}.weight"), bitsandbytes.dequantize_4bit(packed, state))


@pytest.mark.parametrize(
    ("family", "method", "kind"),
    [
        ("llava", "nf4", "Linear4bit"),
        ("qwen2_5_vl", "nf4", "Linear4bit"),
        ("qwen2_5_vl", "int8", "Linear8bitLt"),
    ],
)
def test_transformers_loads_towers_and_all(quantkit, tmp_path, save, family, method, kind):
    """The tower's own forward, with bitsandbytes' modules inside, against the decoded weights."""
    bitsandbytes = pytest.importorskip("bitsandbytes").functional
    folder = save(family)
    assert quantkit(method, folder, "--towers", "--exclude", r"mlp\.fc2|merger", "-o", "out").code == 0
    load = hf.AutoModelForImageTextToText.from_pretrained
    model, source = load(tmp_path / "out", device_map="cpu"), load(folder, dtype=torch.float32)
    written, rows = open_checkpoint(str(tmp_path / "out")), jobs.manifest(tmp_path / "out")
    places = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    packed = {name for name, module in places.items() if type(module).__name__ == kind}
    quantized = [name for name, row in rows.items() if "grid" in row]
    assert len(packed) == len(quantized) < len(rows) == len(places) - 1
    for name in quantized:
        place = next(place for place in packed if place.endswith(spelled(name)))
        module, own = places[place], written.read(f"{name}.weight")
        if method == "nf4":
            theirs = bitsandbytes.dequantize_4bit(module.weight.data, module.weight.quant_state)
        else:
            theirs = module.weight.data.float() * module.weight.SCB[:, None] / 127
        torch.testing.assert_close(theirs.float(), own, rtol=0, atol=2e-4)
        source.get_submodule(place).weight.data = own
    assert close(vision(model, family), vision(source, family)) < (0.02 if method == "nf4" else 0.05)


def vision(model: torch.nn.Module, family: str) -> torch.Tensor:
    """What the tower makes of an image of noise."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        if family == "llava":
            return model.model.vision_tower(torch.randn(1, 3, 28, 28, generator=generator)).last_hidden_state
        patches = torch.randn(4, 3 * 2 * 14 * 14, generator=generator)
        return model.model.visual(patches, grid_thw=torch.tensor([[1, 2, 2]])).last_hidden_state


def close(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected).norm() / expected.norm()).item()


def test_what_cannot_be_is_kept_and_said(quantkit, tmp_path, save):
    """A width that no group divides, an excluded projector, and one linear in other bits."""
    folder = save("llava")
    excluded = r"projector.*2$|vision_tower.*layers\.2\."
    options = ("--group-size", 128, "--override", r"vision_tower.*fc2=4,128", "--override", ".*=8,64")
    options += (*CALIBRATED, "--towers", "--exclude", excluded)
    planned = quantkit("gptq", folder, *options, "--dry-run", "--json", "-q")
    assert planned.code == 0, planned.err
    plan = json.loads(planned.out)
    done = quantkit("gptq", folder, *options, "-o", "out", "--json", "-q")
    assert done.code == 0, done.err
    summary, rows = json.loads(done.out), tower_rows(tmp_path / "out")
    assert summary["output_bytes"] == plan["plan"]["output_bytes"]
    assert summary["output_bytes"] == sum(
        t.nbytes for t in load_file(tmp_path / "out/model.safetensors").values()
    )
    kept = {name: row["kept"] for name, row in rows.items() if "kept" in row}
    assert kept["multi_modal_projector.linear_2"] == f"--exclude {excluded}"
    assert summary["towers"] == len(rows) - len(kept) and summary["copied"] == plan["copied"]
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["modules_in_block_to_quantize"][0][-2] == "vision_tower.encoder.layers.1.mlp.fc2"
    for name in kept:
        assert config["dynamic"][f"-:^{re.escape(name)}$"] == {}


def test_a_width_that_groups_do_not_divide_stays(quantkit, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    folder = test_wrappers.save(tmp_path / "gemma3", "gemma3")  # its tower has rows of 32
    done = quantkit("nf4", folder, "--towers", "-o", "out", "-q")
    assert done.code == 0, done.err
    rows = tower_rows(tmp_path / "out")
    kept = {name.rpartition("layers.0.")[2]: row["kept"] for name, row in rows.items() if "kept" in row}
    assert kept["self_attn.q_proj"] == kept["mlp.fc1"] == "group size 64 does not divide 32"
    assert kept["vision_tower.head.attention.out_proj"] == "read by its module"
    assert "grid" in rows["vision_tower.encoder.layers.0.mlp.fc2"]
    looked = quantkit("inspect", "out")
    assert looked.code == 0 and "nothing is wrong" in looked.out
    assert "(group size 64 does not divide 32)" in looked.out
    table = quantkit("nf4", folder, "--towers", "--dry-run", "-q").out
    assert "copied       multi_modal_projector (8.32 kB), vision_tower (" in table


def test_a_model_without_towers_is_refused(refuse, tmp_path, tiny_model):
    error, hint = refuse(USAGE, "nf4", tiny_model("llama"), "--towers", "-o", "out")
    assert "no towers" in error and "leave out --towers" in hint and not list(tmp_path.glob("out*"))


def test_nan_in_a_tower_is_named(refuse, tmp_path, save):
    def spoil(name, tensor):
        if name == "vision_tower.encoder.layers.1.mlp.fc1.weight":
            tensor[3, 5] = math.nan

    folder = jobs.rewrite(save("llava"), spoil)
    error, _ = refuse(1, "nf4", folder, "--towers", "-o", "out")
    assert error.startswith("vision_tower.encoder.layers.1.mlp.fc1.weight holds NaN")
    assert not (tmp_path / "out").exists()


def test_an_interrupted_tower_is_resumed_to_the_same_bytes(quantkit, tmp_path, save, monkeypatch):
    monkeypatch.setattr(towers, "PART", 20_000)  # a few linears
    folder = save("llava")
    assert quantkit("nf4", folder, "--towers", "-o", "whole").code == 0
    made, before = towers._made, []

    def interrupted(job, row, *rest):
        before.append(row.name)
        if len(before) == 9:
            raise KeyboardInterrupt
        return made(job, row, *rest)

    monkeypatch.setattr(towers, "_made", interrupted)
    assert quantkit("nf4", folder, "--towers", "-o", "out").code == 130
    resumed = quantkit("nf4", folder, "--towers", "-o", "out", "--resume")
    assert resumed.code == 0, resumed.err
    assert 0 < before.index(before[9]) <= 8 and len(before) < 9 + 20  # those staged are not made again
    first, second = (jobs.contents(tmp_path / name) for name in ("out", "whole"))
    assert first.pop("README.md") and second.pop("README.md") and first == second


def test_a_packed_tower_is_quantized_again_on_demand(quantkit, tmp_path, save):
    folder = save("llava")
    assert quantkit("nf4", folder, "--towers", "-o", "first").code == 0
    again = ("gptq", "first", *SYMMETRIC, "--solver", "rtn", "--allow-requantize", "-o", "second", "-q")
    assert "linears outside the blocks are quantized" in quantkit(*again).err
    done = quantkit(*again, "--towers", "--exclude", "projector")
    assert done.code == 0, done.err
    first, second = (open_checkpoint(str(tmp_path / name)) for name in ("first", "second"))
    name = "multi_modal_projector.linear_1.weight"
    assert torch.equal(second.load(name), first.read(name))
    assert all("quant_state" not in stored for stored in second.infos)


def test_eval_runs_the_language_model_and_counts_the_tower(quantkit, make, tmp_path, save):
    folder = save("qwen2_5_vl", "bfloat16")
    for name, extra in (("plain", ()), ("all", ("--towers",))):
        assert quantkit("nf4", folder, *extra, "-o", name, "-q").code == 0
    scored = make("eval", folder, "plain", "all", "--text", "text.txt", "--limit", 512)["models"]
    assert scored[1]["metrics"] == scored[2]["metrics"]
    assert scored[2]["size"]["bits_per_weight"] < scored[1]["size"]["bits_per_weight"] - 1
