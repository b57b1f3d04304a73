"""Values that no one expects, in the small files of a checkpoint: each a line, and nothing built of them."""

import functools
import json
import struct
import tracemalloc

import pytest
import torch

from quantkit import api
from quantkit.errors import UNSUPPORTED, USAGE, VERIFICATION, QuantkitError
from quantkit.evaluation.sampling import ends_of_text, stored_config
from quantkit.inspection import record, show
from quantkit.models.files import gguf_file, safetensors_folder, untrusted
from quantkit.models.files.gguf_writer import Entry, writing
from quantkit.models.files.headers import open_contents
from quantkit.models.files.open import open_checkpoint
from quantkit.models.files.untrusted import LARGE_BYTES
from quantkit.models.gguf import architectures
from quantkit.models.skeleton import Skeleton
from quantkit.options import RunOptions
from quantkit.quantize.prepare import recipe
from quantkit.quantize.progress import SILENT
from quantkit.text.chat import ChatTemplate, Conversation


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    "values, said",
    [
        ({"num_labels": 10**9}, "config.json says num_labels 1,000,000,000, and 30 tensors are stored"),
        ({"num_hidden_layers": 10_000}, "num_hidden_layers 10,000, and 30 tensors are stored"),
        ({"num_hidden_layers": -1}, "num_hidden_layers -1"),
        ({"num_hidden_layers": 0}, "no list of 0 decoder blocks found"),
        ({"text_config": {"n_layer": 513}}, "n_layer 513"),
        ({"vocab_size": 2**50}, "vocab_size 1,125,899,906,842,624"),
        ({"hidden_size": -64}, "negative dimension -64"),
        ({"num_key_value_heads": 0}, "ZeroDivisionError"),
        ({"hidden_act": "nope"}, "KeyError.'nope'"),
        ({"rope_parameters": {"rope_type": "xx", "rope_theta": 1.0}}, "KeyError.'xx'"),
        ({"rms_norm_eps": "x"}, "cannot read .*config.json: Validation error for field 'rms_norm_eps': "),
        ({"model_type": []}, "cannot read .*config.json: "),
    ],
)
def test_a_configuration_that_cannot_be(tiny_model, values, said):
    folder = tiny_model("llama")
    change(folder / "config.json", **values)
    with pytest.raises(QuantkitError, match=said) as raised:
        Skeleton(open_checkpoint(str(folder)), torch.float32, torch.device("cpu"))
    assert raised.value.exit_code == UNSUPPORTED


def test_counts_that_headers_bear_out_are_believed():
    untrusted.refuse_config({"num_hidden_layers": 2000, "num_labels": 40_000}, tensors=24_000)
    untrusted.refuse_config({"num_hidden_layers": 126, "max_position_embeddings": 10_485_760})
    with pytest.raises(QuantkitError):
        untrusted.refuse_config({"num_hidden_layers": 2000}, tensors=1999)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", '{"eos_token_id": "x"}', '{"eos_token_id": -3}', '{"cache_implementation": 7}']
)
def test_a_generation_config_of_odd_values_is_named(tiny_model, text):
    folder = tiny_model("llama", tokenizer=True)
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(QuantkitError, match=r"generation_config.json is not supported: \S"):
        stored_config(open_checkpoint(str(folder)))


@pytest.mark.parametrize("stored, ends", [([], []), ([7, 8], [7, 8]), (7, [7]), (None, [2])])
def test_ends_of_a_text(tiny_model, stored, ends):
    folder = tiny_model("llama", tokenizer=True)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stored}))
    assert ends_of_text(open_checkpoint(str(folder))) == ends


@pytest.mark.parametrize(
    "name, said",
    [
        ("a" * 300, "cannot lie in its folder"),
        ("a\0b", "cannot lie in its folder"),
        ("../x", "cannot lie in its folder"),
        ("\ud800", "is not a safetensors index"),
    ],
)
def test_names_of_shards_that_cannot_be(tiny_model, name, said):
    folder = tiny_model("llama")
    (folder / safetensors_folder.INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(QuantkitError, match=said) as raised:
        safetensors_folder.read_folder(folder)
    assert len(raised.value.message) < 1000


@pytest.mark.parametrize("number", ["²", "٣", "9" * 20, "9" * 5000, "0" * 5000, "\ud800", "-1", ""])
def test_numbers_of_blocks_that_are_none(tiny_model, number):
    """Whatever a name says instead of a number, headers are described, or refused in a line."""
    folder = tiny_model("llama")
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header = {name.replace("layers.1", f"layers.{number}"): entry for name, entry in header.items()}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    if len(number) > 1000:
        with pytest.raises(QuantkitError, match="a name of 5,0.. characters"):
            open_contents(str(folder))
        return
    problems = record.describe(open_contents(str(folder)))["integrity"]["problems"]
    assert any("block" in problem for problem in problems)


def test_depth_of_json_is_limited():
    inside = b"[" * (untrusted.DEEP - 1) + b"]" * (untrusted.DEEP - 1)
    assert untrusted.parse(inside) is not None
    for deep in (b"[" * 200 + b"]" * 200, b'{"a":' * 200 + b"1" + b"}" * 200, b"[" * 5000):
        with pytest.raises(ValueError, match="nested too deeply"):
            untrusted.parse(deep)


@pytest.mark.parametrize(
    "counts, words", [((1 << 20, 0), "1,048,576 tensors"), ((0, 1 << 20), "1,048,576 keys")]
)
def test_entries_of_a_gguf_file_are_counted_first(tmp_path, counts, words):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + bytes(64))
    with pytest.raises(QuantkitError, match=f"it says {words}, at most 65,536 are read"):
        gguf_file.read_header(tmp_path / "x.gguf")


def test_tensors_of_a_safetensors_header_are_counted_before_it_is_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_folder, "MAX_TENSORS", 10)
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}

    def read(count: int):
        text = json.dumps({f"t{number}": entry for number in range(count)}).encode()
        (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
        return safetensors_folder.read_header(tmp_path / "x.safetensors")

    assert len(read(10)) == 10
    with pytest.raises(QuantkitError, match="more than 120 values"):
        read(20)


def test_a_long_safetensors_header_is_not_read(tmp_path):
    length = safetensors_folder.MAX_HEADER_BYTES + 1
    with open(tmp_path / "x.safetensors", "wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(8 + length)
    tracemalloc.start()
    try:
        with pytest.raises(QuantkitError, match="33,554,433 bytes, at most 33,554,432 are read"):
            safetensors_folder.read_header(tmp_path / "x.safetensors")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_line_feed_in_a_name_does_not_split_the_error(tiny_model, quantkit):
    folder = tiny_model("llama")
    index = {"weight_map": {"a": "x\nhint: run this"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    done = quantkit("inspect", folder)
    assert done.code == 3 and [line[:6] for line in done.err.splitlines()] == ["error:", "hint: "]


@pytest.mark.parametrize("kind, size", [(0, 1), (8, 8)])
def test_arrays_of_a_gguf_file_are_counted_first(tmp_path, kind, size):
    count = gguf_file.MAX_ITEMS + 1
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a"
    with open(tmp_path / "x.gguf", "wb") as file:
        file.write(start + struct.pack("<IIQ", 9, kind, count))
        file.truncate(file.tell() + count * size)
    tracemalloc.start()
    try:
        with pytest.raises(QuantkitError, match="its arrays have 4,194,305 items"):
            gguf_file.read_header(tmp_path / "x.gguf")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "merges.txt"])
def test_small_files_that_are_large_are_not_read(tiny_model, name):
    folder = tiny_model("llama", tokenizer=True)
    with open(folder / name, "ab") as file:
        file.truncate(LARGE_BYTES + 1)  # of holes
    with pytest.raises(QuantkitError, match=f"{name} is larger than 256 MiB: not read"):
        open_checkpoint(str(folder))


def test_thousands_of_kinds_of_tensors_are_counted(tiny_model, capsys):
    folder, header = tiny_model("llama"), {}
    for number in range(700):
        span = [4 * number, 4 * number + 4]
        header[f"part{number}.a.weight"] = {"dtype": "F16", "shape": [1, 2], "data_offsets": span}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(2800))
    show.print_record(record.describe(open_contents(str(folder))))
    out = capsys.readouterr().out
    told = [line for line in out.splitlines() if "part" in line and ".a" in line]
    assert len(told) == show.TENSOR_ROWS and "and 200 rows more: --json has all" in out


@pytest.mark.parametrize(
    "value",
    [
        "2001-99-99",
        "!!int x",
        "!!float x",
        "!!timestamp x",
        "!!binary =",
        "[" * 5000,
        "{a: " * 500,
        "&a [*a]",
    ],
)
def test_a_recipe_of_odd_scalars_is_a_line(tmp_path, value):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"method: gptq\nquant:\n  bits: {value}\n")
    with pytest.raises(QuantkitError, match="recipe.yaml") as raised:
        recipe.load(str(path))
    assert "\n" not in raised.value.message


@pytest.mark.parametrize("message", ["x" * 100_000, "a b " * 30_000, f"{'n' * 5000} and {'m' * 5000}"])
def test_errors_are_cut_wherever_they_go(message):
    error = QuantkitError(message, message)
    assert max(map(len, (error.message, error.hint, str(error)))) <= 1600
    assert error.record()["error"]["message"] == error.message


def test_a_template_of_lone_surrogates_is_a_line(tiny_model):
    tokenizer = open_checkpoint(str(tiny_model("llama", tokenizer=True))).tokenizer
    with pytest.raises(QuantkitError, match="^row 1 does not fit the chat template: "):
        ChatTemplate(tokenizer, "{{ \ud800 }}").render(
            Conversation([{"role": "user", "content": "x"}], "row 1")
        )


def test_a_template_named_outside_the_folder_is_not_written_there(make, quantkit, tiny_model):
    folder = tiny_model("llama", tokenizer=True)
    change(folder / "tokenizer_config.json", chat_template=[{"name": "../../x", "template": "y"}])
    make("nf4", folder, "-o", "out")
    make("gguf", folder, "-t", "Q8_0", "--solver", "rtn", "-o", "out.gguf")
    done = quantkit("nf4", "out.gguf", "--allow-requantize", "-o", "again", "-q")
    assert done.code == 1 and "a chat template is named '../../x'\n" in done.err
    assert not [*folder.parent.parent.glob("x*"), *folder.parent.glob("x*")]


@pytest.mark.parametrize("odd", ["x", 0, 1.5, -1, [1, 2]])
@pytest.mark.parametrize("arch", [arch for arch in architectures.TABLE if arch.restore])
def test_a_gguf_file_of_odd_values_is_described(arch, odd, tmp_path):
    keys = (*arch.fields, "rope.dimension_count", "attention.key_length_mla")
    metadata = {f"{arch.name}.{key}": odd for key in keys} | {"general.architecture": arch.name}
    metadata |= {f"{arch.name}.{key}": value for key, value in arch.constants.items()}
    metadata |= {f"{arch.name}.expert_count": 4} if arch.mixture else {}
    path = tmp_path / "odd.gguf"
    with writing(path, metadata, [Entry("x", "F32", (1,))]) as write:
        write("x", [bytes(4)])
    assert open_contents(str(path)).config["model_type"] == arch.model_types[0]


def test_a_gguf_file_type_that_is_a_list_is_shown(tmp_path):
    path = tmp_path / "odd.gguf"
    keys = {"general.architecture": "llama", "llama.block_count": 1, "general.file_type": [1, 2]}
    with writing(path, keys, [Entry("blk.0.ffn_up.weight", "Q8_0", (32, 32))]) as write:
        write("blk.0.ffn_up.weight", [bytes(34 * 32)])
    assert record.describe(open_contents(str(path)))["quantization"]["file_type"] == "file type [1, 2]"


def test_a_job_in_a_manifest_that_does_not_run_is_refused(tiny_model, tmp_path, quantkit):
    """Options of a manifest are not typed. A job of a machine with more threads runs."""
    model, path = tiny_model("llama", tokenizer=True), tmp_path / "out/quantkit.json"
    options = {"samples": 4, "seqlen": 32, "group_size": 32, "loss_tokens": 0, "threads": 8}
    api.quantize("gptq", model, output=tmp_path / "out", progress=SILENT, **options)
    audit, honest = ("verify", "out", "--base", model, "--reproduce", 1), json.loads(path.read_text())
    assert honest["job"]["execution"]["threads"] == 8
    assert quantkit(*audit, "--calibration", "shipped").code == 0
    no_job = "the manifest of out records no job that could run again"
    for keys, value, code, said in (
        (
            ["execution", "threads"],
            10**9,
            VERIFICATION,
            "quantkit.json: $.job.execution.threads: 1000000000 is",
        ),
        (
            ["execution", "batch_size"],
            "8",
            VERIFICATION,
            "quantkit.json: $.job.execution.batch_size: '8' is not",
        ),
        (["execution"], None, UNSUPPORTED, no_job),
        (["calibration"], None, VERIFICATION, "the tokens of shipped are not those that the manifest names"),
        (["options", "solver"], "magic", UNSUPPORTED, f"{no_job}: --solver magic: no such solver"),
        (["options", "bits"], "four", UNSUPPORTED, f"{no_job}: quantkit.json: quant.bits is 'four', not"),
        (["override"], ["(=4"], UNSUPPORTED, f"{no_job}: --override '(' is not a regular expression"),
    ):
        *above, key = keys
        changed = json.loads(json.dumps(honest))
        functools.reduce(dict.__getitem__, above, changed["job"])[key] = value
        path.write_text(json.dumps(changed))
        done = quantkit(*audit, "-q")
        error = done.err.splitlines()[0].removeprefix("error: ")
        assert done.code == code and error.startswith(said), done.err


def test_threads_that_no_machine_starts_are_refused():
    with pytest.raises(QuantkitError, match="--threads 1000000000 is invalid") as refused:
        RunOptions(threads=10**9).check()
    assert refused.value.exit_code == USAGE
