"""What a stranger's file costs at most: nothing is read without end, parsed into gigabytes, or believed."""

import json
import os
import struct
import tracemalloc

import pytest

from quantkit.errors import QuantkitError
from quantkit.models.files import safetensors_folder, untrusted
from quantkit.models.files.safetensors_folder import natural, read_header
from quantkit.options import CalibrationOptions
from quantkit.quantize.prepare import recipe
from quantkit.text import sources


def header(path, text: bytes):
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    return path


def test_pipes_and_devices_are_not_read(tmp_path):
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    for place in (str(pipe), "/dev/zero"):
        with pytest.raises(QuantkitError, match=f"^{place} is not a plain file$"):
            recipe.read(place)
    os.rename(pipe, tmp_path / "pipe.txt")
    options = CalibrationOptions(calibration=str(tmp_path / "pipe.txt"))
    with pytest.raises(QuantkitError, match="is not a plain file"):
        list(sources.open_source(options, True, 8).documents)


def test_large_files_are_not_read_whole(tmp_path):
    large = tmp_path / "recipe.yaml"
    with open(large, "wb") as file:
        file.truncate(6 << 30)
    with pytest.raises(QuantkitError, match="larger than 1 MiB: not read"):
        recipe.read(str(large))
    os.rename(large, tmp_path / "config.json")
    with pytest.raises(QuantkitError, match="larger than 64 MiB: not read"):
        safetensors_folder.read_json(tmp_path / "config.json")


@pytest.mark.parametrize("bomb", [b"[" + b"[]," * 5_000_000 + b"1]", b"[" * 100_000, b'{"a":' * 100_000])
def test_json_that_would_fill_the_memory_is_refused(tmp_path, bomb):
    tracemalloc.start()
    with pytest.raises(QuantkitError, match="is not a safetensors header"):
        read_header(header(tmp_path / "model.safetensors", bomb))
    (tmp_path / "config.json").write_bytes(bomb)
    with pytest.raises(QuantkitError, match="is not JSON"):
        safetensors_folder.read_json(tmp_path / "config.json")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(bomb) + (1 << 20)


def test_what_a_model_needs_is_no_bomb():
    entry = {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}
    assert len(untrusted.parse(json.dumps({f"t{k}": entry for k in range(1000)}).encode())) == 1000


def test_shapes_have_as_many_dimensions_as_tensors(tmp_path):
    entry = {"dtype": "F32", "shape": [1] * 200_000, "data_offsets": [0, 4]}
    with pytest.raises(QuantkitError, match="200000 dimensions"):
        read_header(header(tmp_path / "model.safetensors", json.dumps({"a": entry}).encode()))


def test_any_name_can_be_sorted():
    names = ["a.10.w", "a.2.w", "a.02.w", "a.²", "a." + "9" * 5000, "a.٣", "a"]
    assert sorted(names, key=natural)[0] == "a" and sorted(names, key=natural)[-1] == "a.²"
    assert natural("a.2.w") < natural("a.10.w") < natural("a." + "9" * 5000)
