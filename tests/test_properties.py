"""What strangers write, by hypothesis: whatever the bytes or values are, a reader gives a result or raises
QuantkitError in words of bounded length. `tests/test_fuzz.py` changes files that are valid; here none is."""

import json
import struct
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit.errors import QuantkitError
from quantkit.evaluation.comparison.record import read as read_result
from quantkit.models.files.safetensors_folder import read_header
from quantkit.models.gguf import imatrix
from quantkit.quantize.prepare import recipe

bounded = settings(
    max_examples=60,
    deadline=None,  # others may be at work on this machine, too
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
ATOMS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
NUMBERS = st.integers(-(2**63), 2**64) | st.integers(0, 64)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I8", "F8_E4M3", "F4", ""]) | VALUES,
        "shape": st.lists(NUMBERS, max_size=4) | VALUES,
        "data_offsets": st.lists(NUMBERS, min_size=2, max_size=2) | VALUES,
    }
)
HEADERS = st.dictionaries(st.text(max_size=12), ENTRIES | VALUES, max_size=4)


def reads(read, name: str, data: bytes) -> bool:
    """Whether it can be read; if not, the error is one for people."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        try:
            read(path)
        except QuantkitError as error:
            assert 0 < len(error.message) < 4000
            return False
    return True


def header(told: int, text: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<Q", told) + text + body


@bounded
@given(st.binary(max_size=300))
def test_safetensors_of_any_bytes(data):
    reads(read_header, "model.safetensors", data)


@bounded
@given(HEADERS, st.integers(0, 64))
def test_safetensors_with_any_header(entries, size):
    text = json.dumps(entries).encode()
    reads(read_header, "model.safetensors", header(len(text), text, bytes(size)))


@bounded
@given(st.lists(st.integers(1, 5), max_size=3), st.sampled_from(["F32", "F16", "I8"]), st.integers(-3, 3))
def test_safetensors_that_are_right_but_for_their_end(shape, dtype, more):
    """Only what ends where its tensors end is read."""
    size = {"F32": 4, "F16": 2, "I8": 1}[dtype]
    for extent in shape:
        size *= extent
    text = json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    data = header(len(text), text, bytes(max(0, size + more)))
    assert reads(read_header, "model.safetensors", data) == (len(data) == 8 + len(text) + size)


@bounded
@given(st.binary(max_size=200) | st.binary(max_size=100).map(lambda data: b"GGUF" + data))
def test_an_importance_matrix_of_any_bytes(data):
    reads(lambda path: imatrix.read(path).values(), "imatrix", data)


@bounded
@given(st.text(max_size=200) | VALUES.map(lambda value: json.dumps({"method": "gptq", "quant": value})))
def test_a_recipe_of_any_text(text):
    reads(lambda path: recipe.load(str(path)), "mine.yaml", text.encode("utf-8", "surrogatepass"))


@bounded
@given(VALUES | st.dictionaries(st.sampled_from(["schema", "models", "windows", "protocol"]), VALUES))
def test_a_result_of_any_values(value):
    assert not reads(read_result, "result.json", json.dumps(value).encode())
