"""The GGUF container: what is written is what the gguf package reads, and nothing untrue is believed."""

import errno
import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from quantkit.errors import QuantkitError
from quantkit.models.files import gguf_file
from quantkit.models.files.gguf_file import read_header
from quantkit.models.files.gguf_writer import Entry, writing

METADATA = {
    "general.architecture": "llama",
    "count": 5,
    "below": -3,
    "wide": 1 << 40,
    "ratio": 0.1,
    "yes": True,
    "text": "naïve 안녕",
    "numbers": [1, 2, 3],
    "ratios": [0.5, -2.0],
    "flags": [True, False],
    "texts": ["a", "", "안"],
    "types": np.array([1, -2], dtype=np.int32),
    "bytes": np.arange(3, dtype=np.uint8),
}
ENTRIES = [Entry("a.weight", "F32", (3, 5)), Entry("b.weight", "Q4_0", (2, 64)), Entry("c.bias", "F32", (7,))]
BYTES = [np.arange(15, dtype=np.float32), np.arange(72, dtype=np.uint8), np.ones(7, dtype=np.float32)]


def write(path: Path, metadata=METADATA, entries=ENTRIES, tensors=BYTES) -> Path:
    with writing(path, metadata, entries) as write:
        for entry, tensor in zip(entries, tensors, strict=True):
            write(entry.name, [tensor])
    return path


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "model.gguf")


def test_the_gguf_package_reads_what_was_written(file):
    reader = gguf.GGUFReader(file)
    found = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert found == METADATA | {"ratio": np.float32(0.1), "types": [1, -2], "bytes": [0, 1, 2]}
    kinds = {key: [kind.name for kind in field.types] for key, field in reader.fields.items()}
    assert kinds["count"] == ["UINT32"] and kinds["below"] == ["INT32"] and kinds["wide"] == ["UINT64"]
    assert kinds["ratio"] == ["FLOAT32"] and kinds["yes"] == ["BOOL"] and kinds["text"] == ["STRING"]
    assert kinds["numbers"] == ["ARRAY", "UINT32"] and kinds["ratios"] == ["ARRAY", "FLOAT32"]
    assert kinds["types"] == ["ARRAY", "INT32"] and kinds["bytes"] == ["ARRAY", "UINT8"]
    for tensor, entry, values in zip(reader.tensors, ENTRIES, BYTES, strict=True):
        assert (tensor.name, tensor.tensor_type.name) == (entry.name, entry.type)
        assert tuple(tensor.shape[::-1]) == entry.shape
        assert tensor.data_offset % 32 == 0
        assert tensor.data.tobytes() == values.tobytes()


def test_the_header_read_back_is_the_one_written(file):
    metadata, infos = read_header(file)
    expected = {
        key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in METADATA.items()
    }
    assert metadata == expected | {"ratio": float(np.float32(0.1))}
    assert list(infos) == [entry.name for entry in ENTRIES]
    for entry, values in zip(ENTRIES, BYTES, strict=True):
        info = infos[entry.name]
        assert (info.dtype, info.shape, info.nbytes) == (entry.type, entry.shape, values.nbytes)
        with open(file, "rb") as stream:
            stream.seek(info.offset)
            assert stream.read(info.nbytes) == values.tobytes()


def test_no_more_is_mapped_than_a_header_takes(file, monkeypatch):
    """A file may be larger than the address space that `ulimit -v` leaves."""
    wanted, header, mapped = read_header(file), gguf_file.read_whole_header(file).end, []
    monkeypatch.setattr(gguf_file, "MAX_METADATA_BYTES", header)
    real = gguf_file.mmap.mmap

    def recorded(number: int, length: int, **how):
        mapped.append(length)
        return real(number, length, **how)

    monkeypatch.setattr(gguf_file.mmap, "mmap", recorded)
    assert str(read_header(file)) == str(wanted) and file.stat().st_size > header
    assert gguf_file.read_whole_header(file).end == header and set(mapped) == {header}


def test_the_same_arguments_make_the_same_bytes_however_they_are_cut(tmp_path, file):
    with writing(tmp_path / "again.gguf", METADATA, ENTRIES) as write:
        for entry, tensor in zip(ENTRIES, BYTES, strict=True):
            data = tensor.tobytes()
            write(entry.name, (data[start : start + 5] for start in range(0, len(data), 5)))
    assert (tmp_path / "again.gguf").read_bytes() == file.read_bytes()


def test_files_that_gguf_s_own_writer_made_are_read(tmp_path):
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("x", np.arange(6, dtype=np.float16).reshape(2, 3))
    writer.add_tensor("y", np.arange(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata, infos = read_header(path)
    assert metadata["general.architecture"] == "llama" and metadata["tokenizer.ggml.tokens"] == ["a", "b"]
    assert (infos["x"].dtype, infos["x"].shape) == ("F16", (2, 3))
    for name, kind, values in (("x", "<f2", range(6)), ("y", "<f4", range(4))):
        found = np.fromfile(path, kind, len(values), offset=infos[name].offset)
        assert found.tolist() == list(values)


def test_bytes_that_are_no_text_survive(tmp_path):
    token = b"\xff\xfe".decode("utf-8", "surrogateescape")
    path = write(tmp_path / "odd.gguf", {"tokens": ["ok", token]}, [], [])
    assert read_header(path)[0] == {"tokens": ["ok", token]}


@pytest.mark.parametrize("chunks", [[b"1" * 59], [b"1" * 59, b"22"], []])
def test_a_tensor_of_another_size_is_an_error_and_leaves_nothing(tmp_path, chunks):
    with pytest.raises(AssertionError, match="bytes of 60"):
        with writing(tmp_path / "model.gguf", {}, ENTRIES) as write:
            write("a.weight", chunks)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tensor_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(AssertionError, match="b.weight was not written"):
        with writing(tmp_path / "model.gguf", {}, ENTRIES) as write:
            write("a.weight", [BYTES[0]])
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_former_file(tmp_path, file):
    before = file.read_bytes()

    def full():
        yield BYTES[0]
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        with writing(file, {}, ENTRIES) as write:
            write("a.weight", full())
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_whole_blocks_only():
    assert gguf_file.tensor_bytes("Q4_K", (3, 512)) == 3 * 2 * 144
    with pytest.raises(ValueError, match="300 columns are no whole blocks of 256"):
        gguf_file.tensor_bytes("Q4_K", (3, 300))


def header(pairs: bytes = b"", tensors: bytes = b"", counts=(0, 0), magic=b"GGUF", version=3) -> bytes:
    return magic + struct.pack("<IQQ", version, *counts) + pairs + tensors


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name=b"x", shape=(4,), code=0, offset=0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, code, offset)


HUGE = (1 << 64) - 1
BROKEN = {
    "empty": (b"", "truncated or not GGUF: it is empty"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer, not the file"),
    "not gguf": (b"PK\3\4" + bytes(100), "does not begin with GGUF"),
    "big-endian": (header(version=3 << 24), "is big-endian"),
    "version 1": (header(version=1), "has GGUF version 1"),
    "pairs without end": (header(counts=(0, HUGE)), "at most 65,536 are read"),
    "tensors without end": (header(counts=(HUGE, 0)), "at most 65,536 are read"),
    "endless key": (header(struct.pack("<Q", HUGE), counts=(0, 1)), "is longer than"),
    "endless array": (header(text(b"k") + struct.pack("<IIQ", 9, 4, HUGE), counts=(0, 1)), "is longer than"),
    "endless strings": (
        header(text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 40), counts=(0, 1)),
        "cannot hold",
    ),
    "unknown value": (header(text(b"k") + struct.pack("<I", 77), counts=(0, 1)), "value type 77"),
    "nested array": (header(text(b"k") + struct.pack("<IIQ", 9, 9, 1), counts=(0, 1)), "value type 9"),
    "key twice": (header(2 * (text(b"k") + struct.pack("<II", 4, 1)), counts=(0, 2)), "k comes twice"),
    "no dimensions": (header(tensors=tensor(shape=()), counts=(1, 0)), "0 dimensions"),
    "many dimensions": (header(tensors=text(b"x") + struct.pack("<I", 1 << 31), counts=(1, 0)), "dimensions"),
    "empty tensor": (header(tensors=tensor(shape=(4, 0)), counts=(1, 0)), "x is empty"),
    "unknown type": (header(tensors=tensor(code=999), counts=(1, 0)), "type 999"),
    "part of a block": (header(tensors=tensor(shape=(33,), code=2), counts=(1, 0)), "whole blocks of 32"),
    "beyond the end": (header(tensors=tensor(shape=(1 << 62, 1 << 62)), counts=(1, 0)), "x ends at byte"),
    "offset beyond": (header(tensors=tensor(offset=1 << 62), counts=(1, 0)), "x ends at byte"),
    "misaligned": (header(tensors=tensor(offset=8), counts=(1, 0)), "where it cannot"),
    "over another": (
        header(tensors=tensor() + tensor(b"y"), counts=(2, 0)) + bytes(96),
        "y begins at byte",
    ),
    "tensor twice": (
        header(tensors=tensor() + tensor(offset=32), counts=(2, 0)) + bytes(200),
        "the tensor x comes twice",
    ),
    "alignment": (
        header(text(b"general.alignment") + struct.pack("<II", 4, 24), tensor(), counts=(1, 1)),
        "alignment is 24",
    ),
    "a part of a model": (
        header(text(b"split.count") + struct.pack("<IH", 2, 3), counts=(0, 1)),
        "split.count 3, its name",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_headers_that_lie_are_refused(tmp_path, case):
    content, why = BROKEN[case]
    (tmp_path / "broken.gguf").write_bytes(content)
    with pytest.raises(QuantkitError) as error:
        read_header(tmp_path / "broken.gguf")
    assert why in error.value.message and "broken.gguf" in error.value.message
    assert error.value.hint


def test_a_truncation_is_noticed_wherever_it_is(tmp_path, file):
    content = file.read_bytes()
    end = max(info.offset + info.nbytes for info in read_header(file)[1].values())
    for length in [*range(0, end, 5), end - 1]:
        (tmp_path / "cut.gguf").write_bytes(content[:length])
        with pytest.raises(QuantkitError):
            read_header(tmp_path / "cut.gguf")


def test_damage_is_an_error_of_ours_or_harmless(tmp_path, file):
    """Whatever byte of the header changes, no exception of another kind comes out."""
    content, source = bytearray(file.read_bytes()), random.Random(0)
    end = min(info.offset for info in read_header(file)[1].values())
    for _ in range(500):
        damaged = bytearray(content)
        for _ in range(source.randint(1, 3)):
            damaged[source.randrange(end)] = source.randrange(256)
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        try:
            _, infos = read_header(tmp_path / "damaged.gguf")
        except QuantkitError:
            continue
        assert all(info.offset + info.nbytes <= len(content) for info in infos.values())
