"""quantkit.models.gguf.imatrix: files, and what llama-quantize makes of them."""

import gguf
import numpy as np
import pytest
import torch

from quantkit.errors import QuantkitError
from quantkit.models.gguf import imatrix
from quantkit.models.gguf.imatrix import Imatrix

NAMES = ("blk.0.attn_q.weight", "blk.0.ffn_down.weight", "output.weight")


@pytest.fixture
def made() -> Imatrix:
    generator = torch.Generator().manual_seed(0)
    sums = {name: torch.rand(5 + k, generator=generator) * 1000 for k, name in enumerate(NAMES)}
    counts = dict.fromkeys(NAMES, torch.tensor([321.0]))
    return Imatrix(sums, counts, ("book.txt", "code.txt"), chunk_count=7, chunk_size=512)


def equal(a: Imatrix, b: Imatrix) -> bool:
    tensors = all(
        list(x) == list(y) and all(torch.equal(x[name], y[name]) for name in x)
        for x, y in ((a.sums, b.sums), (a.counts, b.counts))
    )
    said = [(one.datasets, one.chunk_count, one.chunk_size) for one in (a, b)]
    return tensors and said[0] == said[1]


# ---- GGUF


def test_what_is_written_is_read(made, tmp_path):
    imatrix.write(tmp_path / "a.gguf", made)
    found = imatrix.read(tmp_path / "a.gguf")
    assert equal(found, made)
    imatrix.write(tmp_path / "b.gguf", found)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "b.gguf"]


def test_another_reader_finds_what_llama_quantize_looks_for(made, tmp_path):
    imatrix.write(tmp_path / "a.gguf", made)
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    keys = "general.type", "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
    assert [reader.fields[key].contents() for key in keys] == ["imatrix", ["book.txt", "code.txt"], 7, 512]
    assert [reader.fields[key].types[-1].name for key in keys] == ["STRING", "STRING", "UINT32", "UINT32"]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert list(tensors) == [f"{name}.{part}" for name in NAMES for part in ("in_sum2", "counts")]
    assert {tensor.tensor_type.name for tensor in tensors.values()} == {"F32"}
    for name in NAMES:
        assert np.array_equal(tensors[f"{name}.in_sum2"].data, made.sums[name].numpy())
        assert tensors[f"{name}.counts"].data.tolist() == [321.0]


def test_values_are_those_of_llama_quantize(made, tmp_path):
    """Its loader divides in float32, rounds counts to whole ones, and takes 1 where there are none."""
    sums = {"a": torch.tensor([1.0, 2.0, 10.0]), "b": torch.tensor([5.0]), "c": torch.ones(2, 3)}
    counts = {"a": torch.tensor([3.0]), "b": torch.tensor([0.0]), "c": torch.tensor([0.0, 4.0])}
    imatrix.write(tmp_path / "a.gguf", Imatrix(sums, counts))
    values = imatrix.read(tmp_path / "a.gguf").values()
    assert values["a"].numpy().tolist() == (np.float32([1, 2, 10]) / np.float32(3)).tolist()
    assert values["b"].tolist() == [1.0]
    assert values["c"].tolist() == [[1.0] * 3, [0.25] * 3]
    counts = {"a": torch.tensor([2.5]), "b": torch.tensor([0.4]), "c": torch.tensor([0.5, 3.6])}
    imatrix.write(tmp_path / "b.gguf", Imatrix(sums, counts))
    values = imatrix.read(tmp_path / "b.gguf").values()
    assert values["a"].numpy().tolist() == (np.float32([1, 2, 10]) / np.float32(3)).tolist()
    assert (values["b"].tolist(), values["c"].tolist()) == ([1.0], [[1.0] * 3, [0.25] * 3])


def test_what_the_output_says_of_it(made):
    assert made.metadata("book.gguf") == {
        "quantize.imatrix.file": "book.gguf",
        "quantize.imatrix.dataset": "book.txt",
        "quantize.imatrix.entries_count": 3,
        "quantize.imatrix.chunks_count": 7,
    }
    assert list(Imatrix({}, {}).metadata("x")) == ["quantize.imatrix.file", "quantize.imatrix.entries_count"]


# ---- broken ones


@pytest.mark.parametrize("data", [b"", b"\1\0\0\0\1\0\0\0a\1\0\0\0\1\0\0\0\0\0\x80?"])
def test_the_older_kind_is_refused(tmp_path, data):
    path = tmp_path / "imatrix.dat"
    path.write_bytes(data)
    with pytest.raises(QuantkitError, match="not an importance matrix in GGUF") as refused:
        imatrix.read(path)
    assert refused.value.exit_code == 2 and f"llama-imatrix --in-file {path}" in refused.value.hint


def gguf_of(path, tensors: dict[str, np.ndarray], **metadata) -> None:
    """A GGUF file as the `gguf` package writes it. A value of None leaves the key out."""
    writer = gguf.GGUFWriter(path, None)
    said = {"datasets": ["x"], "chunk_count": 1, "chunk_size": 2} | metadata
    add = {list: writer.add_array, int: writer.add_uint32, str: writer.add_string, float: writer.add_float32}
    for key, value in said.items():
        if value is not None:
            add[type(value)](f"imatrix.{key}", value)
    for name, values in tensors.items():
        writer.add_tensor(name, np.asarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


GOOD = {"a.in_sum2": np.float32([[1, 2], [3, 4]]), "a.counts": np.float32([[1], [2]])}


@pytest.mark.parametrize(
    ("tensors", "metadata", "words"),
    [
        ({"a.counts": np.float32([1])}, {}, "no tensor ends in .in_sum2"),
        (GOOD | {"b.in_sum2": np.float32([1])}, {}, "half of it is missing: b.counts"),
        (GOOD | {"b.counts": np.float32([1])}, {}, "half of it is missing: b.counts"),
        (GOOD, {"datasets": None}, "missing: imatrix.datasets"),
        (GOOD, {"chunk_count": None, "chunk_size": None}, "missing: imatrix.chunk_count, imatrix.chunk_size"),
        (GOOD, {"chunk_size": "2"}, "no whole numbers"),
        (GOOD | {"a.in_sum2": np.float16([1, 2])}, {}, "a.in_sum2 is F16, not F32"),
        (GOOD | {"a.in_sum2": np.float32([1, 2, 3])}, {}, "a has 3 sums and 2 counts"),
        (GOOD | {"a.in_sum2": np.float32([1, np.nan])}, {}, "a has values that are no sums"),
        (GOOD | {"a.counts": np.float32([1, np.inf])}, {}, "a has values that are no sums"),
    ],
)
def test_gguf_files_that_are_none(tmp_path, tensors, metadata, words):
    path = tmp_path / "imatrix.gguf"
    gguf_of(path, GOOD)
    assert imatrix.read(path).values()["a"].tolist() == [[1, 2], [1.5, 2]]
    gguf_of(path, tensors, **metadata)
    with pytest.raises(QuantkitError) as refused:
        imatrix.read(path)
    assert words in refused.value.message and str(path) in refused.value.message


def test_a_model_is_no_importance_matrix(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(QuantkitError, match="it is a model, of architecture llama"):
        imatrix.read(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(QuantkitError, match="cannot be read: No such file") as refused:
        imatrix.read(tmp_path / "none.gguf")
    assert refused.value.exit_code == 3


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.0.attn_q_norm.weight", "blk.9.attn_q.weight"])
def test_importance_of_what_is_no_matrix_of_the_model_is_refused(name, made, tmp_path):
    shapes = {"output_norm.weight": (5,), "blk.0.attn_q_norm.weight": (2, 5)}
    shapes |= {matrix: (3, len(sums)) for matrix, sums in made.sums.items()}
    imatrix.write(tmp_path / "a.gguf", made)
    assert equal(imatrix.of_model(tmp_path / "a.gguf", shapes), made)
    sums, counts = ({**entries, name: entries[NAMES[0]]} for entries in (made.sums, made.counts))
    imatrix.write(tmp_path / "b.gguf", Imatrix(sums, counts))
    with pytest.raises(QuantkitError, match=rf"of another model: {name} \(5\)"):
        imatrix.of_model(tmp_path / "b.gguf", shapes)
