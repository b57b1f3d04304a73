"""GGUF files in shards: written as llama.cpp writes them; read, checked, replaced and sent as one file."""

import json
import os
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import families
import gguf
import jobs
import numpy as np
import pytest
import torch
from huggingface_hub.errors import NotASafetensorsRepoError
from nights import nightly

from quantkit.auto.options import AutoOptions, AutoRequest
from quantkit.distillation import request as distilling
from quantkit.errors import QuantkitError
from quantkit.inspection import verify
from quantkit.models.files import checksums, gguf_shards, gguf_writer
from quantkit.models.files.gguf_file import read_header, read_whole_header
from quantkit.models.files.gguf_writer import Entry, in_files, in_shards
from quantkit.models.files.headers import open_contents
from quantkit.models.files.open import check_unchanged, open_checkpoint
from quantkit.quantize import loop
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging import folder as staging
from quantkit.quantize.staging import may_replace

LIMIT = 60_000  # bytes of a shard
OPTIONS = {"type": ("Q8_0",), "solver": "rtn", "imatrix": "none"}
FLAGS = ("-t", "Q8_0", "--solver", "rtn", "--imatrix", "none", "--max-shard-gb", str(LIMIT / 1e9))
SPLIT = ("split.no", "split.count", "split.tensors.count")


def named(stem: str, count: int) -> list[str]:
    return [f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def raw(path: Path) -> dict[str, tuple[str, tuple, bytes]]:
    """Type, shape and bytes of every tensor."""
    found = {}
    for name, info in read_header(path)[1].items():
        values = np.fromfile(info.file, np.uint8, info.nbytes, offset=info.offset)
        found[name] = info.dtype, info.shape, values.tobytes()
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "models--org--tiny" / "snapshots" / "0123"
    families.save_model(folder, "llama", num_hidden_layers=2)
    families.save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def written(source, tmp_path_factory) -> Path:
    """A folder with the same model in one file, `one.gguf`, and in shards, `m-0000?-of-00003.gguf`."""
    folder = tmp_path_factory.mktemp("written")
    jobs.quantize("gguf", source, folder / "one.gguf", OPTIONS)
    summary = jobs.quantize("gguf", source, folder / "m.gguf", OPTIONS, max_shard_gb=LIMIT / 1e9)
    assert summary.output == str(folder / named("m", 3)[0])
    return folder


@pytest.fixture
def made(written, tmp_path) -> Path:
    """A copy of `written`, to change."""
    return Path(shutil.copytree(written, tmp_path / "made"))


# ---- llama-gguf-split, literally: tools/gguf-split/gguf-split.cpp


def key(name: str, form: str, value: int) -> bytes:
    return (
        struct.pack("<Q", len(name)) + name.encode() + struct.pack(f"<I{form}", "_ _H_i".index(form), value)
    )


def build(path: Path, keys: list[bytes], tensors: dict[str, tuple[str, tuple, bytes]]) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys)
    data = b""
    for name, (kind, shape, values) in tensors.items():
        head += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}QIQ", *shape[::-1], gguf.GGMLQuantizationType[kind], len(data))
        data += values + bytes(-len(values) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def keys_of(path: Path) -> dict[str, bytes]:
    places, data = read_whole_header(path).places, path.read_bytes()
    return {name: data[start:stop] for name, (start, stop) in places.items()}


def llama_split(path: Path, prefix: Path, limit: float, empty_first: bool = False) -> list[Path]:
    tensors, size = raw(path), 0
    parts: list[dict] = [{}, {}] if empty_first else [{}]
    for name, tensor in tensors.items():
        padded = len(tensor[2]) + -len(tensor[2]) % 32
        size += padded
        if size > limit:
            parts.append({})
            size = padded
        parts[-1][name] = tensor
    places = []
    for index, part in enumerate(parts):
        kept = keys_of(path) if index == 0 else {}
        kept |= {"split.no": key("split.no", "H", index), "split.count": key("split.count", "H", len(parts))}
        kept |= {"split.tensors.count": key("split.tensors.count", "i", len(tensors))}
        place = prefix.with_name(f"{prefix.name}-{index + 1:05d}-of-{len(parts):05d}.gguf")
        places.append(build(place, list(kept.values()), part))
    return places


def llama_merge(shards: list[Path], out: Path) -> Path:
    kept = keys_of(shards[0]) | {"split.count": key("split.count", "H", 0)}
    return build(out, list(kept.values()), raw(shards[0]))


# ---- written


def test_shards_are_llama_gguf_splits_of_the_single_file(written, tmp_path):
    one, shards = written / "one.gguf", [written / name for name in named("m", 3)]
    assert sorted(path.name for path in written.iterdir()) == [
        *named("m", 3), "m.gguf.md", "one.gguf", "one.gguf.md",
    ]  # fmt: skip
    theirs = llama_split(one, tmp_path / "m", LIMIT)
    assert [path.name for path in theirs] == named("m", 3)
    total = len(raw(one))
    assert total == 21
    for index, (path, their) in enumerate(zip(shards, theirs, strict=True)):
        ours, header = read_whole_header(path), read_whole_header(their)
        assert list(ours.infos) == list(header.infos)
        assert path.read_bytes()[ours.tensors :] == their.read_bytes()[header.tensors :]
        assert [ours.metadata[name] for name in SPLIT] == [index, 3, total]
        reader = gguf.GGUFReader(path)
        assert [reader.fields[name].types[0].name for name in SPLIT] == ["UINT16", "UINT16", "INT32"]
        assert [tensor.name for tensor in reader.tensors] == list(ours.infos)
        assert all(tensor.data.tobytes() == raw(one)[tensor.name][2] for tensor in reader.tensors)
    first, whole = read_whole_header(shards[0]).metadata, read_whole_header(one).metadata
    for metadata in (first, whole):
        metadata["quantkit.manifest"] = json.loads(metadata["quantkit.manifest"])
        limit = metadata["quantkit.manifest"]["job"].pop("max_shard_gb")
        assert limit == (None if metadata is whole else LIMIT / 1e9)
    assert whole.pop(checksums.IN_FILE) != first.pop(checksums.IN_SHARD)
    assert {name: value for name, value in first.items() if name not in SPLIT} == whole
    assert read_whole_header(shards[1]).metadata.keys() == {*SPLIT, checksums.IN_SHARD}


def test_a_shard_has_at_most_the_limit_or_one_tensor(tmp_path):
    entries = [Entry(f"t{n}", "F32", (size,)) for n, size in enumerate((8, 8, 9, 100, 1, 1, 8))]
    names = [[entry.name for entry in shard] for shard in in_shards(entries, 64)]
    assert names == [["t0", "t1"], ["t2"], ["t3"], ["t4", "t5"], ["t6"]]  # 36 bytes are padded to 64, 4 to 32
    assert in_shards(entries, None) == [entries] == in_shards(entries, 10**9)
    assert [[entry.name for entry in shard] for shard in in_shards(entries, 1)] == [[e.name] for e in entries]

    theirs = gguf.GGUFWriter(tmp_path / "x.gguf", "llama", split_max_size=96)
    for n, size in enumerate((8, 16, 24, 32)):
        theirs.add_tensor(f"t{n}", np.full(size, n, np.float32))
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file"):
        getattr(theirs, step)()
    theirs.close()
    entries = [Entry(f"t{n}", "F32", (size,)) for n, size in enumerate((8, 16, 24, 32))]
    shards = in_shards(entries, 96)
    assert [path.name for path in sorted(tmp_path.iterdir())] == named("x", 3) and len(shards) == 3
    with in_files(tmp_path / "y.gguf", {"general.architecture": "llama"}, shards, {}) as write:
        for n, entry in enumerate(entries):
            write(entry.name, [np.full(entry.shape, n, np.float32)])
    for one, other in zip(named("x", 3), named("y", 3), strict=True):
        a, b = (read_whole_header(tmp_path / name) for name in (one, other))
        assert a.metadata == b.metadata and list(a.infos) == list(b.infos)
    assert raw(tmp_path / named("x", 3)[2]) == raw(tmp_path / named("y", 3)[0])


def test_error_feedback_and_several_types_in_one_pass_give_the_same_tensors(source, make, tmp_path):
    text = jobs.calibration(tmp_path).calibration
    flags = ("-t", "Q4_0", "--calibration", text, "--samples", 4, "--seqlen", 32, "--loss-tokens", 0)
    flags += ("--transform", "none", "--refine", 0)
    make("gguf", source, *flags, "-o", "one.gguf")
    first = make("gguf", source, *flags, "-o", "m.gguf", "--max-shard-gb", 3e-5)["output"]
    assert first == named("m", 4)[0] and raw(tmp_path / first) == raw(tmp_path / "one.gguf")
    flags = ("-t", "Q8_0", "-t", "F16", "--solver", "rtn", "--imatrix", "none", "-o", "out")
    planned = make("gguf", source, *flags, "--max-shard-gb", 1e-4, "--dry-run")["jobs"]
    done = make("gguf", source, *flags, "--max-shard-gb", 1e-4)["jobs"]
    there = sorted(f"out/{path.name}" for path in (tmp_path / "out").glob("*-of-*"))
    assert there == sorted(name for row in planned for name in row["files"])
    assert [row["output"] for row in done] == [row["files"][0] for row in planned]
    kinds = [{kind for kind, _, _ in raw(tmp_path / row["output"]).values()} for row in done]
    assert kinds == [{"Q8_0", "F32"}, {"F16", "F32"}]


def test_llama_cpp_computes_the_same_logits(written):
    pytest.importorskip("xllamacpp", reason="llama.cpp is absent: pip install xllamacpp")
    from llama_cpp import Llama

    logits = []
    for name in ("one.gguf", named("m", 3)[0]):
        with Llama(written / name) as llama:
            logits.append(llama.logits(range(1, 20)))
    assert np.array_equal(*logits) and np.isfinite(logits[0]).all()


# ---- read


@pytest.mark.parametrize("given", ["m.gguf", *nightly(named("m", 3)[0], named("m", 3)[2])])
def test_every_command_takes_any_name_of_it(written, given, quantkit, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(families.sentences()))
    answers = []
    for path in (written / "one.gguf", written / given):
        found = []
        for command in (
            ("inspect", path, "--deep"),
            ("verify", path),
            ("plan", path),
            ("eval", path, "--text", text, "--ctx", 16, "--limit", 64),
            ("generate", path, "--prompt", "a", "--tokens", 4, "--temperature", 0),
        ):
            done = quantkit(*command, "--json")
            assert done.code == 0, done.err
            found.append(json.loads(done.out))
        answers.append(found)
    one, several = answers
    assert [row["name"] for row in several[1]["files"]] == named("m", 3)
    assert several[1]["problems"] == [] and several[0]["files"]["count"] == 3
    assert several[0]["files"]["bytes"] == sum((written / name).stat().st_size for name in named("m", 3))
    assert one[0]["tensors"] == several[0]["tensors"] and one[0]["quantization"] == several[0]["quantization"]
    assert one[3]["models"][0]["metrics"] == several[3]["models"][0]["metrics"]
    assert one[4]["models"][0]["ids"] == several[4]["models"][0]["ids"]


def test_shards_of_others_are_a_source_and_an_importance_matrix(written, source, make, quantkit, tmp_path):
    for prefix, empty in (("a", False), ("b", True)):
        shards = llama_split(written / "one.gguf", tmp_path / prefix, LIMIT, empty)
        assert quantkit("gguf", shards[1], "-t", "F16", "--allow-requantize", "-q").code == 0
        assert quantkit("gguf", written / "one.gguf", "-t", "F16", "--allow-requantize", "-q").code == 0
        assert raw(tmp_path / f"{prefix}-F16.gguf") == raw(tmp_path / "one-F16.gguf")
        os.remove("one-F16.gguf")
        found = verify.verify(str(shards[0]), None, lambda *_: None)  # what it split has the sum of the whole
        assert (found["files"], found["problems"]) == ([], []) and len(found["notes"]) >= len(shards)
    checkpoint, one = open_checkpoint(str(shards[2])), open_checkpoint(str(written / "one.gguf"))
    assert checkpoint.folder == shards[0] and checkpoint.disk_bytes == sum(p.stat().st_size for p in shards)
    assert all(torch.equal(checkpoint.read(name), one.read(name)) for name in one.names)
    merged = llama_merge([written / name for name in named("m", 3)], tmp_path / "merged.gguf")
    assert raw(merged) == raw(written / "one.gguf")
    found = verify.verify(str(merged), None, lambda *_: None)
    assert (found["files"], found["problems"]) == ([], [])

    make("imatrix", source, "--samples", 2, "--seqlen", 32, "-o", "i.gguf")
    shards = llama_split(tmp_path / "i.gguf", tmp_path / "i", 600)
    assert len(shards) > 2
    flags = ("-t", "Q4_0", "--solver", "rtn", "--allow-requantize", "--max-shard-gb", 1)
    for name, given in (("x.gguf", "i.gguf"), ("y.gguf", shards[1])):
        assert quantkit("gguf", written / "one.gguf", *flags, "--imatrix", given, "-o", name, "-q").code == 0
    assert raw(tmp_path / "x.gguf") == raw(tmp_path / "y.gguf")


# ---- refused


def test_a_path_with_another_ending_is_a_folder_for_gguf_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("old.gguf").mkdir()
    for typed, name, expected in (
        (None, "m-Q4_0.gguf", "m-Q4_0.gguf"),
        ("a.gguf", "m-Q4_0.gguf", "a.gguf"),
        ("new", "m-Q4_0.gguf", "new/m-Q4_0.gguf"),
        ("old.gguf", "m-Q4_0.gguf", "old.gguf/m-Q4_0.gguf"),
        ("new", "m-awq", "new"),
        (None, "m-awq", "m-awq"),
    ):
        assert gguf_shards.destination(typed and Path(typed), name) == Path(expected)
    auto = AutoRequest(
        source="m", output=Path("new"), options=AutoOptions(bpw=4, engine="llama.cpp"), typed={}
    )
    assert auto.destination == Path("new/m-auto-4bpw.gguf")
    request = {"teacher": "t", "student": "s.gguf", "options": None, "calibration": None, "run": None}
    assert distilling.Request(output=Path("new"), **request).destination == Path("new/s-distilled.gguf")


def test_what_is_wrong_with_shards_is_one_error_that_names_the_file(made, refuse):
    first, second, third = (made / name for name in named("m", 3))

    def error(path: Path = first, code: int = 1) -> str:
        message, hint = refuse(code, "eval", path)
        assert ("--include 'm-*-of-*.gguf'" if code == 3 else "NAME-00001-of-00003.gguf") in hint
        return message

    kept = second.read_bytes()
    second.unlink()
    assert error(code=3) == error(third, 3) == f"{second} is missing, one of 3 shards"
    second.write_bytes(third.read_bytes())
    assert error() == f"{second} has split.no 2 and split.count 3, its name says 1 and 3"
    second.write_bytes(kept)
    alone = Path(shutil.copy(first, made / "renamed.gguf"))
    assert error(alone) == f"{alone} has split.no 0 and split.count 3, its name says 0 and 1"
    for path, name in zip((first, second), named("m", 2), strict=True):
        shutil.copy(path, made / name)
    assert error(made / named("m", 2)[0]) == (
        f"{made / named('m', 2)[0]} has split.no 0 and split.count 3, its name says 0 and 2"
    )
    keys, tensors = keys_of(third), raw(first)
    own = {name: tensors[name] for name in read_whole_header(third).infos}
    build(third, list(keys.values()), own | {"output_norm.weight": tensors["output_norm.weight"]})
    assert error() == f"{third} holds tensors of another shard: output_norm.weight"
    own.popitem()
    build(third, list(keys.values()), own)
    assert error() == f"{first} names 21 tensors, its shards hold 20"
    del keys["split.no"]
    build(third, list(keys.values()), own)
    assert error() == f"{third} has split.no 0 and split.count 3, its name says 2 and 3"
    third.unlink()
    third.symlink_to("nowhere")
    assert error(code=3) == f"{third} is missing, one of 3 shards"
    many = Path(shutil.copy(first, made / "m-00001-of-09999.gguf"))
    assert error(many, 1) == f"{many} has split.no 0 and split.count 3, its name says 0 and 9999"


def test_verify_names_the_damaged_shard(made):
    def states() -> list[str]:
        found = verify.verify(str(made / "m.gguf"), None, lambda *_: None)
        assert [row["name"] for row in found["files"]] == named("m", 3)
        return [row["state"] for row in found["files"]]

    assert states() == ["same"] * 3
    for index, name in enumerate(named("m", 3)):
        data = (made / name).read_bytes()
        (made / name).write_bytes(data[:-40] + bytes([data[-40] ^ 1]) + data[-39:])
        assert states() == ["was changed" if at == index else "same" for at in range(3)]
        (made / name).write_bytes(data)


def test_a_shard_that_changes_while_it_is_read_is_noticed(made):
    checkpoint = open_checkpoint(str(made / "m.gguf"))
    check_unchanged(checkpoint)
    os.utime(made / named("m", 3)[1], ns=(1, 1))
    with pytest.raises(QuantkitError, match=f"{named('m', 3)[1]} changed"):
        check_unchanged(checkpoint)


# ---- replaced


def test_all_shards_are_one_output(made, source, quantkit, refuse, monkeypatch):
    monkeypatch.chdir(made)
    there = ", ".join(f"{name}" for name in named("m", 3))
    job = ("gguf", source, *FLAGS, "-o", "m.gguf")
    assert refuse(2, *job)[0] == f"{there} exist" == refuse(2, *job[:-4], "-o", "m.gguf")[0]
    done = quantkit(*job, "--resume", "-q")
    assert (done.code, done.out) == (0, f"{named('m', 3)[0]} is already finished\n")
    error, _ = refuse(2, *job[:-3], 1e-4, "-o", "m.gguf", "--resume")
    assert "different: --max-shard-gb (6e-05 there, 0.0001 here)" in error
    done = quantkit(*job[:-3], 1e-4, "-o", "m.gguf", "--overwrite", "--dry-run")
    assert "output       m-00001-of-00002.gguf and 1 more\n" in done.out
    assert "replaces     the existing output" in done.out
    before = raw(made / named("m", 3)[0])
    done = quantkit(*job[:-3], 1e-4, "-o", "m.gguf", "--overwrite")
    assert done.code == 0 and "written      m-00001-of-00002.gguf and 1 more\n" in done.out
    assert "llama-server -m m-00001-of-00002.gguf" in done.out
    assert [path.name for path in gguf_shards.existing(made / "m.gguf")] == named("m", 2)
    assert raw(made / named("m", 2)[0]) == before
    card = (made / "m.gguf.md").read_text()
    assert "in files that belong into one folder: m-00001-of-00002.gguf, m-00002-of-00002.gguf.\n" in card
    assert "belong" not in (made / "one.gguf.md").read_text()
    assert quantkit(*job[:-4], "-o", "m.gguf", "--overwrite", "-q").code == 0
    assert gguf_shards.existing(made / "m.gguf") == [made / "m.gguf"] and raw(made / "m.gguf") == before
    assert quantkit(*job, "--overwrite", "-q").code == 0  # and from a single file to shards
    assert [path.name for path in gguf_shards.existing(made / "m.gguf")] == named("m", 3)
    assert not list(made.glob("*.partial"))

    done = quantkit("gguf", named("m", 3)[2], *job[2:], "--allow-requantize", "--overwrite", "-q")
    assert done.code == 2 and "error: m.gguf holds the source\n" in done.err
    name = named("x", 3)[0]
    assert refuse(2, *job[:-1], name)[0] == f"-o {name} is no name for shards"
    assert f"output       x/{source.name}-Q8_0-00001-of-" in quantkit(*job[:-1], "x", "--dry-run").out


def test_shards_of_an_unquantized_model_of_others_are_kept(source, tmp_path):
    jobs.quantize("gguf", source, tmp_path / "f.gguf", OPTIONS | {"type": ("F16",)})
    metadata, _ = read_header(tmp_path / "f.gguf")
    shards = llama_split(tmp_path / "f.gguf", tmp_path / "m", LIMIT)
    may_replace.check(tmp_path / "m.gguf", True, True)  # quantkit's own
    kept = {name: data for name, data in keys_of(shards[0]).items() if name != "quantkit.manifest"}
    own = {name: raw(shards[0])[name] for name in read_whole_header(shards[0]).infos}
    build(shards[0], list(kept.values()), own)
    with pytest.raises(QuantkitError, match="holds an unquantized model that quantkit did not write"):
        may_replace.check(tmp_path / "m.gguf", True, True)
    assert "quantkit.manifest" in metadata


@pytest.mark.nightly
def test_a_job_that_stops_leaves_no_shard_and_goes_on(source, tmp_path, monkeypatch):
    """The first shard, which clients open, is the last to be put into its place."""
    settings = {"calibration": jobs.calibration(tmp_path, 4, 32), "max_shard_gb": 3e-5}
    jobs.quantize("gguf", source, tmp_path / "whole.gguf", {"type": ("Q4_0",)}, **settings)
    place, rename = tmp_path / "m.gguf", os.rename

    def full(shards):
        raise OSError(28, "No space left on device")

    def stopped(old, new):
        if Path(new).name == named("m", 4)[1]:
            raise KeyboardInterrupt
        rename(old, new)

    with monkeypatch.context() as patch, pytest.raises(QuantkitError, match="full"):
        patch.setattr(gguf_writer, "seal", full)
        jobs.quantize("gguf", source, place, {"type": ("Q4_0",)}, **settings)
    assert gguf_shards.existing(place) == []
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(staging.os, "rename", stopped)
        loop.run(
            [jobs.prepare("gguf", source, place, {"type": ("Q4_0",)}, resume=True, **settings)], Progress()
        )
    assert [path.name for path in gguf_shards.existing(place)] == named("m", 4)[2:]
    for path in gguf_shards.existing(place):
        path.unlink()
    loop.run([jobs.prepare("gguf", source, place, {"type": ("Q4_0",)}, resume=True, **settings)], Progress())
    for one, other in zip(named("m", 4), named("whole", 4), strict=True):
        assert (tmp_path / one).read_bytes() == (tmp_path / other).read_bytes()
    assert not (tmp_path / "m.gguf.partial").exists()


def test_distill_refuses_shards(made, source, refuse):
    error, hint = refuse(4, "distill", source, made / "m.gguf")
    assert error == f"distill writes no shards: {made / 'm.gguf'}"
    assert hint.startswith("join them first: llama-gguf-split --merge")


def test_llama_server_gets_the_first_shard_next_to_the_others(written, quantkit, tmp_path):
    for name in named("m", 3):  # as in the hub's cache
        (tmp_path / name).symlink_to(written / name)
    for given in ("m.gguf", named("m", 3)[1]):
        asked = ("serve", given, "--print", "--device", "cpu", "--engine", "llama.cpp", "--offline")
        command = json.loads(quantkit(*asked, "--json").out)
        assert str(tmp_path / named("m", 3)[0]) in command["command"]
        assert " --alias m " in command["command"]


def test_the_hint_about_a_hub_repository_fetches_all_shards(monkeypatch):
    def absent(*arguments, **named):
        raise NotASafetensorsRepoError("none")

    rows = [SimpleNamespace(rfilename=name, size=9) for name in ("config.json", *named("m", 3))]
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: SimpleNamespace(siblings=rows))
    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", absent)
    with pytest.raises(QuantkitError, match="org/x holds no safetensors, but m-00001-of-00003.gguf") as error:
        open_contents("org/x")
    fetch = "hf download org/x --include 'm-*-of-00003.gguf' --local-dir ."
    assert error.value.hint == f"fetch one and inspect it: {fetch}"
