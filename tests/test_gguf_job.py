"""`quantkit gguf`: whole files, from a checkpoint to what llama.cpp computes with them."""

import errno
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import jobs
import numpy as np
import pytest
import torch
import transformers as hf
from nights import by_day, nightly
from typer.testing import CliRunner

from quantkit import cli
from quantkit.errors import QuantkitError
from quantkit.evaluation import evaluate, windows
from quantkit.grids.ggml import named
from quantkit.layouts import Statistic
from quantkit.layouts.ggml import GgmlLayout
from quantkit.layouts.ggml.blocks import decode_rows
from quantkit.models.files import gguf_writer
from quantkit.models.files.gguf_file import read_header
from quantkit.models.files.open import open_checkpoint
from quantkit.models.gguf import imatrix
from quantkit.models.gguf.file_types import FILE_TYPES
from quantkit.models.gguf.tensors import of_checkpoint
from quantkit.options import RunOptions
from quantkit.quantize import job, loop
from quantkit.quantize.calibrate.statistics import SiteStatistics
from quantkit.quantize.outputs.outside import solved_rows
from quantkit.quantize.prepare import imatrix_job
from quantkit.quantize.progress import Progress
from quantkit.quantize.solvers.gptq import GptqSolver

pytest.importorskip("xllamacpp")
import ggml_library  # noqa: E402
from llama_cpp import Llama  # noqa: E402

HELDOUT = Path(__file__).parents[1] / "heldout" / "heldout.txt"
CTX = 256
TOKENS = 1024
PLAIN = ("F32", "F16", "BF16")
PLAIN_Q8 = {"type": ("Q8_0",), "transform": "none", "target": "own", "refine": 0}
OTHERS = ("IQ2", "IQ3")  # see test_gguf_iquants
OTHERS += ("Q3_K_S", "Q3_K_L", "Q4_K_S", "Q5_K_S", "MXFP4_MOE")  # blocks of the rest, mixed in other ways
EXPORTED = [name for name in FILE_TYPES if not name.startswith(OTHERS)]
BY_DAY = ["F32", "BF16", "Q4_0", "Q8_0", "Q2_K", "Q4_K_M", "IQ4_XS", "NVFP4"]  # the others: of the same kinds


def raw(path: Path) -> dict[str, np.ndarray]:
    """Every tensor's bytes, by GGUF name."""
    _, infos = read_header(path)
    return {
        name: np.fromfile(path, np.uint8, info.nbytes, offset=info.offset) for name, info in infos.items()
    }


@pytest.fixture(scope="module")
def exported(short_demo, tmp_path_factory) -> Path:
    """A file of each type that is tested by day, `TYPE.gguf`, all made in one pass."""
    return export(short_demo, tmp_path_factory.mktemp("exported"), BY_DAY)


@pytest.fixture(scope="module")
def exported_at_night(short_demo, tmp_path_factory) -> Path:
    """A file of each other type, and the one of floats."""
    names = ["F32", *(name for name in EXPORTED if name not in BY_DAY)]
    return export(short_demo, tmp_path_factory.mktemp("exported-at-night"), names)


def export(source: Path, folder: Path, names: list[str]) -> Path:
    options = {"solver": "rtn", "imatrix": "none"}
    prepared = [
        jobs.prepare("gguf", source, folder / f"{name}.gguf", options | {"type": (name,)}) for name in names
    ]
    loop.run(prepared, Progress())
    return folder


@pytest.fixture(scope="module")
def text(short_demo) -> windows.Windows:
    return windows.load(open_checkpoint(str(short_demo)), HELDOUT, CTX, None, TOKENS)


DAY = ("Q4_K_M", "IQ4_XS", "NVFP4")


@pytest.mark.parametrize("name", by_day(EXPORTED, DAY))
def test_llama_cpp_has_the_perplexity_that_eval_measures(request, text, name):
    path = request.getfixturevalue("exported" if name in BY_DAY else "exported_at_night") / f"{name}.gguf"
    checkpoint = open_checkpoint(str(path))
    found = evaluate.evaluate([checkpoint], text, torch.float32, torch.device("cpu"))
    with Llama(path) as llama:
        theirs = llama.perplexity(text.ids.tolist(), text.first)
    assert theirs == pytest.approx(found["models"][0]["metrics"]["ppl"]["value"], rel=0.005)


@pytest.mark.parametrize("folder", ["exported", *nightly("exported_at_night")])
def test_every_tensor_has_the_bytes_of_ggml_s_own_encoder(request, folder):
    """llama-quantize starts from a file of floats; so does this, from the one of the same pass."""
    folder = request.getfixturevalue(folder)
    floats = raw(folder / "F32.gguf")
    paths = sorted(folder.glob("*.gguf"))
    assert len(paths) > 5
    for path in paths:
        name, (_, infos), bytes_of = path.stem, read_header(path), raw(path)
        for tensor, info in infos.items():
            if tensor.endswith(".scale"):  # of NVFP4's blocks
                continue
            values = floats[tensor].view(np.float32).reshape(info.shape)
            if info.dtype == "NVFP4":
                values = values / bytes_of[f"{tensor.removesuffix('.weight')}.scale"].view(np.float32)
            if info.dtype == "F32":
                expected = values
            elif info.dtype in PLAIN:
                expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType[info.dtype])
            else:
                expected = ggml_library.encode(info.dtype, torch.from_numpy(values))
            assert bytes_of[tensor].tobytes() == np.asarray(expected).tobytes(), (name, tensor)


def test_a_file_is_the_same_alone_and_among_others(exported, short_demo, tmp_path):
    options = {"solver": "rtn", "imatrix": "none", "type": ("Q4_K_M",)}
    jobs.quantize("gguf", short_demo, tmp_path / "alone.gguf", options)
    assert (tmp_path / "alone.gguf").read_bytes() == (exported / "Q4_K_M.gguf").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"alone.gguf", "alone.gguf.md"}


def test_types_that_know_no_importance_gather_none(short_demo, tmp_path):
    """Nor do files beside one that does have it in their metadata."""

    def prepared(name: str, kind: str = "") -> job.Job:
        options = {"solver": "rtn", "type": (kind or name,)}
        text = jobs.calibration(tmp_path)
        return jobs.prepare("gguf", short_demo, tmp_path / f"{name}.gguf", options, calibration=text)

    several = [prepared("Q8_0"), prepared("Q4_0")]
    assert [one.method.output.gathers for one in several] == [False, True]
    loop.run(several, Progress())
    loop.run([prepared("alone", "Q8_0")], Progress())
    assert (tmp_path / "alone.gguf").read_bytes() == (tmp_path / "Q8_0.gguf").read_bytes()
    told = ["quantize.imatrix.entries_count" in read_header(one.staging.output)[0] for one in several]
    assert told == [False, True]


@pytest.mark.processor
def test_importance_gathered_and_read_are_one(short_demo, tmp_path):
    calibration = jobs.calibration(tmp_path)
    auto, file = tmp_path / "auto.gguf", tmp_path / "file.gguf"
    jobs.quantize("gguf", short_demo, auto, {"solver": "rtn", "type": ("Q3_K_S",)}, calibration=calibration)
    request = job.Request(
        str(short_demo), None, calibration, RunOptions(threads=1), output=tmp_path / "imatrix.gguf"
    )
    imatrix_job.run(imatrix_job.prepare(request, Progress()), Progress())
    options = {"solver": "rtn", "type": ("Q3_K_S",), "imatrix": str(tmp_path / "imatrix.gguf")}
    jobs.quantize("gguf", short_demo, file, options)
    several = [
        jobs.prepare("gguf", short_demo, tmp_path / f"{name}.gguf", options | {"type": (name,)})
        for name in ("Q8_0", "Q3_K_S")  # the first needs no importance
    ]
    loop.run(several, Progress())
    found = [raw(path) for path in (auto, file, tmp_path / "Q3_K_S.gguf")]
    one, *others = [{name: values.tobytes() for name, values in each.items()} for each in found]
    assert all(other == one for other in others)
    metadata, infos = read_header(file)
    assert metadata["quantize.imatrix.entries_count"] == 14
    means = imatrix.read(tmp_path / "imatrix.gguf").values()
    whole = imatrix.read(tmp_path / "imatrix.gguf")
    sums = {key: value for key, value in whole.sums.items() if key != "blk.1.ffn_up.weight"}
    imatrix.write(tmp_path / "part.gguf", replace(whole, sums=sums))
    options["imatrix"] = str(tmp_path / "part.gguf")
    (note,) = jobs.prepare("gguf", short_demo, tmp_path / "part-out.gguf", options).method.notes
    assert note.endswith(
        "part.gguf has no importance of 1 tensor, whose columns count alike: blk.1.ffn_up.weight"
    )
    _, floats = read_header(file)
    name = "blk.1.ffn_down.weight"
    target = next(target for target in of_checkpoint(open_checkpoint(str(short_demo))) if target.name == name)
    values = target.to_gguf(target.read(open_checkpoint(str(short_demo)), torch.float32))
    expected = ggml_library.encode(infos[name].dtype, values, means[name])
    assert raw(file)[name].tobytes() == np.asarray(expected).tobytes()


def test_a_type_for_experts_says_that_a_model_has_none(short_demo, tmp_path):
    options = {"type": ("MXFP4_MOE",), "solver": "rtn", "imatrix": "none"}
    dense, mixed = (
        jobs.prepare("gguf", model, tmp_path / "out.gguf", options).method.notes
        for model in (short_demo, Path(__file__).parent / "data" / "demo-moe-8m")
    )
    assert len(dense) == 1 and "no experts" in dense[0] and not mixed


@pytest.mark.parametrize("name", ["Q4_K_M", *nightly("F32", "IQ4_XS")])
def test_transformers_decodes_the_file_to_the_same_weights(exported, name):
    model = hf.AutoModelForCausalLM.from_pretrained(
        exported, gguf_file=f"{name}.gguf", dtype=torch.float32
    ).state_dict()
    ours = open_checkpoint(str(exported / f"{name}.gguf"))
    for tensor in ours.names:
        torch.testing.assert_close(ours.read(tensor, torch.float32), model[tensor], rtol=0, atol=0)


@pytest.mark.processor
def test_a_killed_job_goes_on_to_the_same_bytes(tiny_model, tmp_path):
    model = tiny_model("llama", tokenizer=True, hidden_size=64, intermediate_size=64, num_hidden_layers=2)
    whole, out = tmp_path / "whole.gguf", tmp_path / "q4.gguf"
    arguments = {"options": PLAIN_Q8 | {"type": ("Q4_0",)}, "calibration": jobs.calibration(tmp_path)}
    jobs.quantize("gguf", model, whole, **arguments)
    with jobs.interrupted(before=1):
        jobs.quantize("gguf", model, out, **arguments)
    assert not out.exists()
    loop.run([jobs.prepare("gguf", model, out, resume=True, **arguments)], Progress())
    assert out.read_bytes() == whole.read_bytes()


def test_kept_linears_are_in_16_bit(short_demo, tmp_path):
    out = tmp_path / "out.gguf"
    options = {"solver": "rtn", "imatrix": "none"}
    summary = jobs.quantize("gguf", short_demo, out, options, exclude=(r"layers\.0\.mlp",))
    _, infos = read_header(out)
    kept = {name for name, info in infos.items() if info.dtype == "BF16"}
    assert kept == {f"blk.0.ffn_{part}.weight" for part in ("gate", "up", "down")}
    assert (summary.kept, summary.linears) == (3, 11)


def test_what_fits_no_block_falls_back_aloud_or_not_at_all(tiny_model, tmp_path):
    model = tiny_model("llama", tokenizer=True, hidden_size=64, intermediate_size=96, num_attention_heads=4)
    options = {"solver": "rtn", "imatrix": "none", "type": ("Q4_K_S",)}
    progress = jobs.Listener()
    jobs.prepare("gguf", model, tmp_path / "out.gguf", options, progress=progress)
    assert any(
        text.startswith("Q5_0 instead of Q4_K, because 96 columns are no multiple of 256")
        for text in progress.warnings
    )
    with pytest.raises(QuantkitError, match=r"\d+ tensors? cannot have the requested type") as caught:
        jobs.prepare("gguf", model, tmp_path / "out.gguf", options | {"strict": True})
    assert caught.value.exit_code == 4 and "--strict" in caught.value.hint
    assert not (tmp_path / "out.gguf").exists()


def test_a_disk_that_fills_leaves_nothing(short_demo, tmp_path, monkeypatch):
    def full(chunk):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(gguf_writer, "memoryview", full, raising=False)
    out = tmp_path / "out.gguf"
    with pytest.raises(QuantkitError, match="is full") as caught:
        jobs.quantize("gguf", short_demo, out, {"solver": "rtn", "imatrix": "none"})
    assert caught.value.exit_code == 5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": ("Q4_K_X",)}, "no file type 'Q4_K_X'"),
        ({"imatrix": "file.dat"}, "--imatrix file.dat is for --solver rtn"),
        ({"tensor_type": ("nothing=Q8_0",)}, "matches no tensor"),
        ({"solver": "rtn", "imatrix": "absent.dat"}, "absent.dat cannot be read"),
    ],
)
def test_options_that_make_no_sense_are_refused(short_demo, tmp_path, options, message):
    with pytest.raises(QuantkitError, match=message):
        jobs.prepare("gguf", short_demo, tmp_path / "out.gguf", options)


def test_not_a_number_is_refused_by_name(short_demo, tmp_path):
    model = Path(shutil.copytree(short_demo, tmp_path / "model"))
    name = "model.layers.1.mlp.up_proj.weight"
    jobs.rewrite(
        model, lambda n, tensor: tensor.index_fill(0, torch.tensor([3]), float("nan")) if n == name else None
    )
    with pytest.raises(QuantkitError, match=f"{name} holds NaN"):
        jobs.quantize("gguf", model, tmp_path / "out.gguf", {"solver": "rtn", "imatrix": "none"})
    assert not (tmp_path / "out.gguf").exists()


def out_of_range(model: Path, large: float) -> Path:
    """A model with one weight above the range of a type, and queries below that of float16."""

    def change(name: str, tensor: torch.Tensor) -> None:
        if name == "model.layers.1.mlp.up_proj.weight":
            tensor[3, 5] = large
        if name == "model.layers.0.self_attn.q_proj.weight":
            tensor *= 2.0**-30

    return jobs.rewrite(model, change)


def test_weights_beyond_float16_are_refused_or_told(short_demo, tmp_path):
    model = out_of_range(Path(shutil.copytree(short_demo, tmp_path / "model")), 1e5)
    options, out = {"type": ("F16",), "solver": "rtn", "imatrix": "none"}, tmp_path / "out.gguf"
    with pytest.raises(QuantkitError, match=r"blk\.1\.ffn_up\.weight: .* 9.98e[+]04 .* for F16") as caught:
        jobs.quantize("gguf", model, out, options)
    assert caught.value.exit_code == 4 and not list(tmp_path.glob("out*"))
    wide = re.search("'(.*)'", caught.value.hint)[1]
    assert wide == r"blk\.1\.ffn_up\.weight=BF16"
    progress = jobs.Listener()
    loop.run([jobs.prepare("gguf", model, out, options | {"tensor_type": (wide,)})], progress)
    weight = open_checkpoint(str(model)).read("model.layers.0.self_attn.q_proj.weight", torch.float32)
    lost = int(((weight.half() == 0) & (weight != 0)).sum())
    told = f"blk.0.attn_q.weight: {lost:,} weights became 0, too small for F16"
    assert progress.warnings == [told] and lost > weight.numel() / 2


@pytest.mark.parametrize(
    "solver, what", [("rtn", r"blk\.1\.ffn_up\.weight"), ("gptq", "layers.1.mlp.up_proj")]
)
def test_weights_beyond_the_scales_of_a_type_are_refused(short_demo, tmp_path, solver, what):
    model = out_of_range(Path(shutil.copytree(short_demo, tmp_path / "model")), 1e8)
    options = {"type": ("Q8_0",), "solver": solver, "imatrix": "none"} if solver == "rtn" else PLAIN_Q8
    with pytest.raises(QuantkitError, match=rf"{what}.* up to 1e[+]08(:| are) too large for Q8_0"):
        jobs.quantize("gguf", model, tmp_path / "out.gguf", options, calibration=jobs.calibration(tmp_path))
    assert not (tmp_path / "out.gguf").exists()


def test_groups_that_become_zeros_are_told(short_demo, tmp_path):
    """NVFP4: queries share the divisor of keys and values, far above them."""
    model = out_of_range(Path(shutil.copytree(short_demo, tmp_path / "model")), 0.0)
    summary = jobs.quantize("fp4", model, tmp_path / "out", {"solver": "rtn"})
    name = "model.layers.0.self_attn.q_proj"
    values = open_checkpoint(str(tmp_path / "out")).read(f"{name}.weight")
    assert not values.any()
    groups = f"{values.numel() // 16:,} groups of weights became 0, too small for nvfp4, groups of 16"
    assert summary.notes == {name: [groups]}


def test_a_file_of_floats_is_as_good_a_source(exported, tmp_path):
    options = {"solver": "rtn", "imatrix": "none", "type": ("Q4_K_M",)}
    jobs.quantize("gguf", exported / "BF16.gguf", tmp_path / "out.gguf", options)
    assert {k: v.tobytes() for k, v in raw(tmp_path / "out.gguf").items()} == {
        k: v.tobytes() for k, v in raw(exported / "Q4_K_M.gguf").items()
    }
    with Llama(exported / "Q4_K_M.gguf") as first, Llama(tmp_path / "out.gguf") as second:
        assert first.tokenize("Two words, 안녕.") == second.tokenize("Two words, 안녕.")


def test_an_output_that_is_a_folder_gets_the_file(short_demo, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "notes.txt").write_text("precious")
    words = ["gguf", str(short_demo), "-t", "F16", "-o", str(folder), "--overwrite", "--quiet"]
    assert CliRunner().invoke(cli.app, words).exit_code == 0
    made = ["demo-llama-6m-F16.gguf", "demo-llama-6m-F16.gguf.md", "notes.txt"]
    assert sorted(path.name for path in folder.iterdir()) == made
    words[words.index(str(folder))] = f"{tmp_path}/new/"  # the same for a folder that does not exist
    assert CliRunner().invoke(cli.app, words).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == made[:2]
    result = CliRunner().invoke(
        cli.app, ["gguf", str(short_demo), "-t", "F16", "-t", "Q8_0", "-o", "one.gguf"]
    )
    assert (
        isinstance(result.exception, QuantkitError)
        and "one file, 2 are requested" in result.exception.message
    )


def test_a_plan_of_several_types_ends_in_what_all_take(short_demo, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = f"gguf {short_demo} -t Q4_0 -t Q8_0 --solver rtn --imatrix none --dry-run".split()
    told = CliRunner().invoke(cli.app, words).stdout
    record = json.loads(CliRunner().invoke(cli.app, [*words, "--json"]).stdout)
    assert record["schema"] == "quantkit.jobs/1"
    sizes = [row["plan"]["output_bytes"] for row in record["jobs"]]
    disk = sum(row["plan"]["disk_bytes"] for row in record["jobs"])
    assert f"in all       2 files, {sum(sizes) / 1e6:.2f} MB" in told
    assert told.count("memory  ") == 1 and f"{disk / 1e6:.2f} MB while it runs" in told
    assert [f"→ {size / 1e6:.2f} MB" in told for size in sizes] == [True, True]


@pytest.mark.parametrize("type, refine", (("Q4_K", 2), ("Q6_K", 0), ("Q8_0", 0)))
@pytest.mark.parametrize("tied, damp", ((True, 1.0), (False, 0.01)))
def test_a_head_of_six_bits_is_not_refined(type, refine, tied, damp):
    """The parts of the head are solved one by one; a tied head with the damping of the embedding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 256, generator=generator) * torch.rand(256, generator=generator)
    weight = torch.randn(10, 256, generator=generator)
    hessian = 2 * x.t() @ x
    statistics = SiteStatistics({Statistic.HESSIAN: hessian}, len(x))
    skeleton, block = SimpleNamespace(device="cpu"), SimpleNamespace(weights=4 * 256, embedding=False)
    material = SimpleNamespace(skeleton=skeleton, specs=[block])
    found, _ = solved_rows(weight, named(type), GgmlLayout(), material, GptqSolver(), statistics, tied)
    own = GptqSolver(damp=damp, refine=refine)
    parts = [own.solve([part], [named(type)], hessian)[0].weight.values() for part in weight.split(4)]
    assert torch.equal(decode_rows(type, found["ggml"], 256), torch.cat(parts))
