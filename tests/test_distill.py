"""Compressed students: what is trained, that codes stay, that nothing becomes worse, that bytes repeat."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import families
import jobs
import pytest
import torch
from nights import nightly
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quantkit.cli import distill as command
from quantkit.distillation import blocks, job
from quantkit.distillation.options import DistillOptions
from quantkit.distillation.request import Request
from quantkit.distillation.student import Student, vectors
from quantkit.distillation.training import Shares
from quantkit.errors import QuantkitError
from quantkit.grids import ggml
from quantkit.grids.affine import AffineGrid
from quantkit.grids.float8 import Float8Grid
from quantkit.grids.fp4 import NvFp4Grid
from quantkit.grids.grid import QuantizedWeight, group
from quantkit.grids.int8 import Int8Grid
from quantkit.grids.nf4 import Nf4Grid
from quantkit.layouts.awq import AwqLayout
from quantkit.layouts.bitsandbytes import STATE, Int8Layout, Nf4Layout
from quantkit.layouts.compressed_tensors import CompressedTensorsLayout
from quantkit.layouts.compressed_tensors.integers import PackQuantized
from quantkit.layouts.ggml import GgmlLayout
from quantkit.layouts.gptq import GptqLayout
from quantkit.models.files import card, checksums, gguf_file, gguf_writer
from quantkit.models.files.open import open_checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.quantize.staging.folder import Staging
from quantkit.text.calibration import hold_out

CPU = torch.device("cpu")
TEMPLATE = "additional_chat_templates/tool_use.jinja"
TRAINED = tuple(name for name in ggml.TYPES if name != "MXFP4")  # whose scales are powers of two
GRIDS = {
    "affine": AffineGrid(3, 32),
    "affine, zeros": AffineGrid(4, 32, symmetric=False),
    "nf4": Nf4Grid(double_quant=False),
    "nf4, nested": Nf4Grid(),
    "int8": Int8Grid(256),
    "fp8": Float8Grid(256),
    "nvfp4": NvFp4Grid(),
} | {name: ggml.named(name) for name in TRAINED}


def quantized(grid, out_features: int = 96, in_features: int = 256) -> QuantizedWeight:
    """A random weight, rounded; 96 * 256 / 64 absmax are a block of 256 and half of one."""
    weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(1))
    params = grid.fit_matrix(weight)
    groups = in_features // grid.group_size
    if isinstance(grid, ggml.BlockGrid):
        codes, params = grid.quantize(weight)
        return QuantizedWeight(grid, codes, params)
    rows = [
        grid.round(weight[:, g * grid.group_size : (g + 1) * grid.group_size], part)
        for g, part in ((g, group(params, g)) for g in range(groups))
    ]
    return QuantizedWeight(grid, torch.cat(rows, 1), params)


# ---- what is trained of a linear


@pytest.mark.parametrize("name", GRIDS)
def test_gradients_of_floats_are_those_of_finite_differences(name):
    """Values are linear in each float, so a difference over a wide step is exact but for rounding."""
    weight = quantized(GRIDS[name])
    wanted = torch.randn(weight.codes.shape, generator=torch.Generator().manual_seed(2)).double()
    floats = {key: value.clone().requires_grad_() for key, value in weight.floats().items()}
    traced = weight.with_floats(floats).values()
    assert torch.equal(traced.detach(), weight.values())
    (traced.double() * wanted).sum().backward()
    for key, value in floats.items():
        for place in (0, value.numel() // 2, value.numel() - 1):
            ends = []
            for sign in (1, -1):
                moved = {k: v.detach().clone().contiguous() for k, v in floats.items()}
                moved[key].view(-1)[place] += sign * 0.5
                ends.append((weight.with_floats(moved).values().double() * wanted).sum().item())
            assert value.grad.flatten()[place].item() == pytest.approx(ends[0] - ends[1], rel=1e-4, abs=1e-3)


def test_columns_in_another_order_are_traced_in_theirs():
    grid, groups = AffineGrid(4, 32), torch.arange(80) // 32  # the last group is half a one
    order = torch.randperm(80, generator=torch.Generator().manual_seed(0))
    params = AffineGrid(4, 32).fit_matrix(torch.randn(16, 96))
    weight = QuantizedWeight(grid, torch.randint(16, (16, 80), dtype=torch.uint8), params, groups[order])
    scale = params.scale.clone().requires_grad_()
    weight.with_floats({"scale": scale}).values().sum().backward()
    wanted = torch.zeros_like(params.scale).index_add_(
        1, groups[order], weight.codes - params.zero[:, groups[order]]
    )
    assert torch.equal(scale.grad, wanted)


LAYOUTS = {
    "gptq": (GptqLayout(3, 32), "affine"),
    "awq": (AwqLayout(32), "affine, zeros"),
    "compressed-tensors": (CompressedTensorsLayout(PackQuantized(4, 32, False)), "affine, zeros"),
    "int8": (Int8Layout(), "int8"),
    "nf4": (Nf4Layout(False), "nf4"),
    "nf4, nested": (Nf4Layout(), "nf4, nested"),
} | {name: (GgmlLayout(), name) for name in TRAINED}


@pytest.mark.parametrize("name", LAYOUTS)
def test_other_floats_leave_codes_names_and_sizes(name):
    layout, grid = LAYOUTS[name]
    weight = quantized(GRIDS[grid])
    stored = layout.encode(weight)
    same = layout.with_floats(stored, layout.decode(stored).floats())
    assert all(torch.equal(same[part], stored[part]) for part in stored)
    floats = {key: value * 1.25 for key, value in weight.floats().items()}
    found = layout.with_floats(stored, floats)
    assert list(found) == list(stored)
    for part, tensor in stored.items():
        assert (found[part].dtype, found[part].shape) == (tensor.dtype, tensor.shape)
        assert part in layout.floats or torch.equal(found[part], tensor)
    again = layout.decode(found)
    assert torch.equal(again.codes, weight.codes)
    kept = weight.grid.storable(floats)
    assert kept.keys() == again.floats().keys()
    for key, value in again.floats().items():
        assert torch.allclose(value, kept[key], rtol=1e-8 if key == "offset" else 0, atol=0)
        assert not torch.equal(value, weight.floats()[key])


@pytest.mark.parametrize(
    "offset, others", [(0.5, [1 / 3, 7.0]), (1e-5, [1 / 3]), (0.0123, [1 / 3, -2e-9, 12345.678])]
)
def test_an_offset_takes_no_more_room_than_the_old_one(offset, others):
    """In float32 exactly where the old one had as many digits as floats have, else as nearly as may be."""
    layout = Nf4Layout()
    weight = quantized(Nf4Grid())
    params = replace(weight.params, offset=torch.full_like(weight.params.offset, offset))
    stored = layout.encode(replace(weight, params=params))
    for other in others:
        told = layout.with_floats(stored, layout.decode(stored).floats() | {"offset": torch.tensor([other])})
        assert len(told[STATE]) == len(stored[STATE])
        state = json.loads(bytes(told[STATE].tolist()))
        assert state["nested_offset"] == pytest.approx(other, rel=1e-7 if offset == 0.0123 else 0.5)
        assert list(state) == list(json.loads(bytes(stored[STATE].tolist())))


def test_norms_and_biases_are_trained_and_nothing_else_of_one_dimension(tiny_model):
    model = Skeleton(open_checkpoint(str(tiny_model("mamba2"))), torch.float32, CPU)
    assert vectors(model.blocks[0]) == ["norm.weight", "mixer.conv1d.bias", "mixer.norm.weight"]
    model = Skeleton(open_checkpoint(str(tiny_model("qwen2"))), torch.float32, CPU)
    assert sorted(vectors(model.blocks[0])) == [
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        *(f"self_attn.{name}_proj.bias" for name in "kqv"),
    ]


def test_steps_are_shares_of_a_size():
    start = {"scale": torch.tensor([1e-3, 0.0, -4.0]), "norm": torch.tensor([3.0, 0.0, 4.0, 0.0])}
    descent = Shares(start, {"scale"}, lr=0.1, steps=1)
    sum(value.sum() for value in descent.values().values()).backward()
    descent.step()  # Adam's first step is the rate itself, against the gradient; an eighth of it, rising
    rate = 0.1 / 8
    found = {name: value.detach() for name, value in descent.values().items()}
    assert torch.allclose(found["scale"], start["scale"] - rate * start["scale"].abs(), rtol=1e-5)
    assert torch.allclose(found["norm"], start["norm"] - rate * 2.5, rtol=1e-5)


# ---- jobs


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """`teacher`, `student` (3 bit, rounded), and a text."""
    folder = tmp_path_factory.mktemp("distill")
    families.save_tokenizer(families.save_model(folder / "teacher", "llama", num_hidden_layers=2))
    (folder / "teacher" / TEMPLATE).parent.mkdir()
    (folder / "teacher" / TEMPLATE).write_text("{{ messages }}")
    (folder / "text.txt").write_text("\n".join(families.sentences(200, seed=1)))
    options = {"bits": 3, "group_size": 32, "solver": "rtn"}
    jobs.quantize("gptq", folder / "teacher", folder / "student", options)
    return folder


def request(workplace: Path, output: Path, student: str = "student", **options) -> Request:
    text = CalibrationOptions(calibration=str(workplace / "text.txt"), samples=28, seqlen=32)
    chosen = DistillOptions(**{"epochs": 2, "block_epochs": 1, "lr": 0.01, "block_lr": 0.01} | options)
    folders = str(workplace / "teacher"), str(workplace / student)
    return Request(*folders, chosen, text, RunOptions(threads=1, batch_size=7), output=output)


def distill(asked: Request, progress=None) -> dict:
    progress = progress or jobs.Listener()
    return job.prepare(asked, progress).run(progress)


@pytest.fixture(scope="module")
def reference(workplace) -> dict:
    return distill(request(workplace, workplace / "reference"))


def dense(folder: Path) -> torch.nn.Module:
    """The whole model as transformers has it, every weight decoded."""
    checkpoint = open_checkpoint(str(folder))
    model = AutoModelForCausalLM.from_config(checkpoint.config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(checkpoint.read(name).float())
    return model.eval()


def test_the_divergence_that_decides_is_that_of_the_whole_models(workplace, reference):
    checked = job.prepare(request(workplace, workplace / "unused"), jobs.Listener())
    ids = torch.cat(checked.training.held_out)
    assert reference["sequences"] == {"train": 28, "held_out": 3} and ids.shape == (3, 32)
    with torch.no_grad():
        teacher, *students = (
            torch.log_softmax(dense(workplace / name)(ids).logits, -1)
            for name in ("teacher", "student", "reference")
        )
    before, after = ((teacher.exp() * (teacher - found)).sum(-1).mean().item() for found in students)
    assert reference["before"] == pytest.approx(before, rel=1e-4)
    assert reference["after"] == pytest.approx(after, rel=1e-4)
    assert after < 0.98 * before
    assert all(stage["kept"] for stage in reference["stages"])


def test_only_floats_have_changed(workplace, reference):
    before, after = (load_file(workplace / name / "model.safetensors") for name in ("student", "reference"))
    assert list(before) == list(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    floats = {name for name in before if name.endswith((".scales", "norm.weight"))}
    assert changed == floats and len(floats) == 14 + 5
    for name in ("config.json", "quantize_config.json", "tokenizer.json", TEMPLATE):
        assert (workplace / "student" / name).read_bytes() == (workplace / "reference" / name).read_bytes()
    sizes = [(workplace / name / "model.safetensors").stat().st_size for name in ("student", "reference")]
    assert sizes[0] == sizes[1]
    manifest = json.loads((workplace / "reference" / "quantkit.json").read_text())
    assert manifest["distilled"]["after"] == reference["after"]
    linears = json.loads((workplace / "student" / "quantkit.json").read_text())["linears"]
    assert all(row.pop("weight_error") > 0 for row in linears)  # that of other floats
    assert manifest["linears"] == linears
    card = (workplace / "reference" / "README.md").read_text()
    assert "\n# reference\n" in card and "## Distilled" in card and "makes student, with this" in card
    assert "from_pretrained('reference')" in card and "from_pretrained('student')" not in card
    assert "`quantkit eval teacher reference --text TEXT --card reference`" in card
    assert card.count("--card") == card.count("<!-- eval -->") == 1
    assert card.endswith("`quantkit eval teacher student reference --text TEXT`.\n")


def test_the_same_job_has_the_same_bytes_with_codes_read_again(workplace, reference, tmp_path):
    """Two runs; the other one reads every block's codes from the disk whenever it runs it."""
    checked = job.prepare(request(workplace, tmp_path / "reference"), jobs.Listener())
    assert checked.memory["hold"]
    replace(checked, memory=checked.memory | {"hold": False}).run(jobs.Listener())
    assert jobs.contents(tmp_path / "reference") == jobs.contents(workplace / "reference")


class Killed(BaseException):
    """Nobody catches it: what is on the disk is what a kill leaves."""


@pytest.mark.parametrize(
    "steps", [15, *nightly(6)]
)  # of 4 in each of two blocks, then of 4 in each of two epochs
def test_an_interrupted_job_goes_on_to_the_same_bytes(workplace, reference, tmp_path, monkeypatch, steps):
    asked, step, taken = request(workplace, tmp_path / "reference"), Shares.step, []

    def counted(self) -> None:
        taken.append(self)
        if len(taken) == steps:
            raise Killed
        step(self)

    monkeypatch.setattr(Shares, "step", counted)
    with pytest.raises(Killed):
        distill(asked)
    monkeypatch.setattr(Shares, "step", step)
    assert not (tmp_path / "reference").exists()
    staged = Staging(tmp_path / "reference")
    assert [staged.is_done(index) for index in range(2)] == [steps > 4, steps > 8]
    assert bool(staged.rest()) == (steps > 12)
    distill(replace(asked, resume=True))
    assert jobs.contents(tmp_path / "reference") == jobs.contents(workplace / "reference")


@pytest.mark.parametrize("options", [{"block_lr": 5.0, "epochs": 0}, *nightly({"block_lr": 5.0, "lr": 5.0})])
def test_what_is_worse_is_not_kept(workplace, tmp_path, options):
    listener = jobs.Listener()
    record = distill(request(workplace, tmp_path / "out", **options), listener)
    assert not record["improved"] and record["after"] == record["before"]
    assert not any(stage["kept"] for stage in record["stages"])
    assert [len(stage["epochs"]) for stage in record["stages"] if "epochs" in stage] in ([], [1])
    assert any("holds the student as it was" in warning for warning in listener.warnings)
    found, wanted = (folder / "model.safetensors" for folder in (tmp_path / "out", workplace / "student"))
    assert found.read_bytes() == wanted.read_bytes()
    assert not json.loads((tmp_path / "out/quantkit.json").read_text())["distilled"]["stages"][0]["kept"]


@pytest.mark.parametrize(
    "method, lr", [("Q4_0", 0.01), *nightly(("nf4", 0.01), ("int8", 5e-4), ("awq", 0.005))]
)
def test_students_of_every_layout(workplace, tmp_path, method, lr):
    """Codes stay, the divergence falls."""
    teacher = workplace / "teacher"
    name, options = (method, {}) if method != "Q4_0" else ("gguf", {"type": ("Q4_0",)})
    options |= {"group_size": 32} if name == "awq" else {"solver": "rtn"} if name == "gguf" else {}
    options |= {"imatrix": "none"} if name == "gguf" else {}
    output = tmp_path / ("made.gguf" if name == "gguf" else "made")
    text = CalibrationOptions(calibration=str(workplace / "text.txt"), samples=4, seqlen=32)
    jobs.quantize(name, teacher, output, options, calibration=text)
    out = tmp_path / f"out{output.suffix}"
    record = distill(replace(request(workplace, out, lr=lr, block_lr=lr), student=str(output)))
    assert record["improved"] and record["after"] < record["before"]
    before, after = (Student(open_checkpoint(str(path)), torch.float32, CPU) for path in (output, out))
    changed = 0
    for index in range(2):
        with before.block(index) as old, after.block(index) as new:
            assert len(old.weights) == 7
            for local, weight in old.weights.items():
                assert torch.equal(weight.codes, new.weights[local].codes)
            changed += sum(not torch.equal(old.floats[key], new.floats[key]) for key in old.floats)
    assert changed >= 7


def test_a_gguf_file_keeps_its_metadata_and_its_other_tensors(workplace, tmp_path):
    made, out = tmp_path / "made.gguf", tmp_path / "out.gguf"
    options = {"type": ("Q4_0",), "solver": "rtn", "imatrix": "none"}
    jobs.quantize("gguf", workplace / "teacher", made, options)
    distill(replace(request(workplace, out, epochs=0), student=str(made)))
    (metadata, infos), (others, found) = (gguf_file.read_header(path) for path in (made, out))
    manifest = json.loads(others.pop("quantkit.manifest"))
    assert manifest.pop("distilled")["stages"][0]["kept"]
    assert manifest == json.loads(metadata.pop("quantkit.manifest"))
    sums = [gguf_writer.sum_of(path, gguf_file.read_whole_header(path)) for path in (made, out)]
    assert [metadata.pop(checksums.IN_FILE), others.pop(checksums.IN_FILE)] == sums and sums[0] != sums[1]
    assert metadata == others and list(infos) == list(found)
    assert card.read(card.path_of(made))[0] == card.read(card.path_of(out))[0]
    text = card.read(card.path_of(out))[1]
    assert text.startswith("\n# out.gguf\n") and "\n## Distilled\n" in text
    assert made.read_bytes()[-infos["token_embd.weight"].nbytes :]  # tensors lie at other places
    for name, info in infos.items():
        assert (info.dtype, info.shape, info.nbytes) == (
            found[name].dtype,
            found[name].shape,
            found[name].nbytes,
        )
        left, right = (
            path.read_bytes()[one.offset : one.offset + one.nbytes]
            for path, one in ((made, info), (out, found[name]))
        )
        assert (left == right) == (name in ("token_embd.weight", "output.weight", "output_norm.weight"))


def test_a_text_is_added_where_a_gguf_file_has_none(tmp_path):
    old, new = tmp_path / "old.gguf", tmp_path / "new.gguf"
    entry = gguf_writer.Entry("a", "F32", (2, 8))
    with gguf_writer.writing(old, {"general.architecture": "llama", "list": [1, 2]}, [entry]) as write:
        write("a", [torch.arange(16.0).numpy()])
    moved = gguf_writer.with_text(old, new, "told", "x" * 100)
    (metadata, infos), (before, places) = gguf_file.read_header(new), gguf_file.read_header(old)
    assert metadata == before | {"told": "x" * 100}
    assert infos["a"].offset == places["a"].offset + moved
    assert new.read_bytes()[infos["a"].offset :] == old.read_bytes()[places["a"].offset :]


def test_without_training_block_by_block_a_student_runs_once(workplace, tmp_path, monkeypatch):
    runs, passes, outputs, walk = [], [], Student.outputs, blocks.walk

    def counted(self, block, *given):
        runs.append(block.index)
        return outputs(self, block, *given)

    def walked(*given):
        final = walk(*given)
        passes.append(list(runs))
        return final

    monkeypatch.setattr(Student, "outputs", counted)
    monkeypatch.setattr(blocks, "walk", walked)
    distill(request(workplace, tmp_path / "out", epochs=1, block_epochs=0))
    (indices,) = passes
    assert indices == list(range(len(indices))) and len(indices) > 1


@pytest.mark.parametrize("family", ["mixtral", *nightly("gpt2", "gemma3n")])
def test_families_whose_blocks_are_otherwise(tmp_path, family, workplace):
    """Transposed weights and biases, experts, several streams: all floats move."""
    layers = {"num_hidden_layers": 1} if family != "gemma3n" else {}
    teacher = families.save_tokenizer(families.save_model(tmp_path / family, family, **layers))
    jobs.quantize("gptq", teacher, tmp_path / "made", {"bits": 3, "group_size": 32, "solver": "rtn"})
    asked = request(workplace, tmp_path / "out", epochs=1, block_epochs=0)
    record = distill(replace(asked, teacher=str(teacher), student=str(tmp_path / "made")))
    assert record["improved"]
    before, after = (jobs.tensors(tmp_path / name) for name in ("made", "out"))
    scales = [name for name in before if name.endswith(".scales")]
    assert sum(not torch.equal(before[name], after[name]) for name in scales) >= 0.9 * len(scales)


# ---- the command


def test_the_command_says_what_it_did(workplace, quantkit, tmp_path, capsys):
    small = ["--calibration", workplace / "text.txt", "--samples", 8, "--seqlen", 32, "--epochs", 1]
    asked = ["distill", workplace / "teacher", workplace / "student", *small]
    plan = json.loads(quantkit(*asked, "--dry-run", "--json", "-q").out)
    assert plan["schema"] == "quantkit.distill/1" and plan["memory"]["hold"]
    assert plan["output"] == "student-distilled" and not (tmp_path / "student-distilled").exists()
    done = quantkit(*asked, "--eval", workplace / "text.txt", "--json", "-q")
    record = json.loads(done.out)
    assert (done.code, done.err) == (0, "")
    assert record.items() >= {k: plan[k] for k in ("trained", "options", "execution")}.items()
    measured = [model["metrics"]["kld"] for model in record["eval"]["models"]]
    assert measured[0] is None and measured[2]["mean"] < measured[1]["mean"]
    assert plan["refused"] is None and "refused" not in record
    again = json.loads(quantkit(*asked, "--dry-run", "--json", "-q").out)
    printed = quantkit(*asked, "--dry-run", "-q").out
    assert re.search(r"memory +about \S+ MB on the CPU, \S+ MB of it Python and tokenizer; end", printed)
    assert again["refused"]["message"] == "student-distilled exists"
    assert "is already finished" in quantkit(*asked, "--resume").out
    other = "student-distilled is the finished output of another job; different: "
    for changed, words in {
        ("--seed", 1): "--seed (0 there, 1 here)",
        ("--epochs", 2): "--epochs (1 there, 2 here)\n",
    }.items():
        done = quantkit(*asked, *changed, "--resume")
        assert done.code == 2 and f"error: {other}" in done.err and words in done.err
    shutil.copytree(workplace / "student", tmp_path / "other")
    done = quantkit("distill", workplace / "teacher", "other", *small, "-o", "student-distilled", "--resume")
    assert done.code == 2 and f"error: {other}student name (student there, other here)\n" in done.err
    told = quantkit("inspect", "student-distilled").out.replace("\n", " ")
    assert f"distilled (held-out KL divergence {record['before']:.5f} → {record['after']:.5f})" in told
    capsys.readouterr()
    record.pop("eval")
    command.show(record, open_checkpoint(str(workplace / "teacher")))
    out = capsys.readouterr().out
    assert "block by block" in out and "end to end" in out and "quantkit eval" in out


def test_refusals(workplace, refuse, tiny_model):
    teacher, student = workplace / "teacher", workplace / "student"
    error, hint = refuse(2, "distill", teacher, teacher)
    assert "is teacher and student" in error
    error, hint = refuse(4, "distill", student, teacher)
    assert "is not quantized" in error and hint.endswith(f"comes first: quantkit distill {teacher} {student}")
    plain = tiny_model("llama", name="a plain one", tokenizer=True)
    error, hint = refuse(4, "distill", teacher, plain)
    assert "is not quantized" in error and hint == f"compress it first: quantkit gptq '{plain}'"
    cut = tiny_model("llama", name="cut", tokenizer=True, num_hidden_layers=2)
    content = json.loads((cut / "tokenizer.json").read_text())
    content["model"]["merges"].pop()
    (cut / "tokenizer.json").write_text(json.dumps(content))
    assert refuse(4, "distill", cut, student)[0].endswith("not their ids, merges or the way to cut a text")
    error, _ = refuse(4, "distill", tiny_model("llama", name="deep", tokenizer=True), student)
    assert "differ: model.layers.2." in error
    wide = tiny_model("llama", name="wide", tokenizer=True, num_hidden_layers=2, intermediate_size=192)
    error, _ = refuse(4, "distill", wide, student)
    assert "differ: model.layers.0.mlp.gate_proj.weight" in error
    few = tiny_model("llama", name="few", tokenizer=True, num_hidden_layers=2, vocab_size=500)
    error, _ = refuse(4, "distill", few, student)
    assert "predicts 500 tokens" in error
    error, hint = refuse(2, "distill", teacher, student, "--epochs", 0, "--block-epochs", 0)
    assert "leave nothing to do" in error
    for flag, value in (("--lr", 0), ("--temperature", -1), ("--epochs", -1)):
        assert refuse(2, "distill", teacher, student, flag, value)[0].startswith(f"{flag} {value} is invalid")
    small = ["--calibration", workplace / "text.txt", "--seqlen", 32]
    with pytest.raises(QuantkitError, match="one sequence of text is not enough"):
        hold_out(torch.zeros(1, 32, dtype=torch.int64))
    assert "holds the student" in refuse(2, "distill", teacher, student, *small, "-o", student)[0]
    assert refuse(2, "distill", teacher)[0] == "missing argument 'student'"


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"linears": 5}, "$.linears: 5 is not of type 'array'"),
        ({"source": "x"}, "$.source: 'x' is not of type 'object', 'null'"),
        ({"source": {"sha256": 5}}, "$.source.sha256: 5 is not of type 'string', 'null'"),
        ({"job": {"execution": 5}}, "$.job.execution: 5 is not of type 'object', 'null'"),
    ],
)
def test_a_manifest_of_odd_types_is_a_line(workplace, refuse, tmp_path, changed, said):
    shutil.copytree(workplace / "student", tmp_path / "odd")
    path = tmp_path / "odd/quantkit.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    small = ["--calibration", workplace / "text.txt", "--samples", 4, "--seqlen", 32]
    assert said in refuse(4, "distill", workplace / "teacher", tmp_path / "odd", *small)[0]


def test_resuming_beside_a_manifest_of_odd_types_is_a_line(workplace, refuse, tmp_path):
    shutil.copytree(workplace / "student", tmp_path / "out")
    path = tmp_path / "out/quantkit.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"distilled": "x"}))
    asked = [workplace / "teacher", workplace / "student", "-o", tmp_path / "out", "--resume"]
    assert "$.distilled: 'x' is not of type 'object'" in refuse(4, "distill", *asked)[0]


def test_another_model_of_the_same_shape_is_no_teacher(workplace, quantkit, tiny_model):
    other = tiny_model("llama", name="other", tokenizer=True, num_hidden_layers=2, seed=7)
    small = ["--calibration", workplace / "text.txt", "--samples", 4, "--seqlen", 32, "-q"]
    done = quantkit("distill", other, workplace / "student", *small)
    assert done.code == 4
    assert "nothing in common" in done.err
    assert not Path("student-distilled.partial").exists()


def test_what_quantkit_only_reads_is_refused(workplace, refuse, tmp_path):
    """Scales in bfloat16, as other tools write them."""
    shutil.copytree(workplace / "student", tmp_path / "foreign")
    jobs.rewrite(tmp_path / "foreign", lambda name, t: t.bfloat16() if name.endswith(".scales") else None)
    small = ["--calibration", workplace / "text.txt", "--samples", 4, "--seqlen", 32]
    error, _ = refuse(4, "distill", workplace / "teacher", tmp_path / "foreign", *small)
    assert "scales is stored as torch.bfloat16" in error
