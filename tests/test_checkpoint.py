"""Checkpoints on disk and on the hub: what is read, what is written, what is turned away and how."""

import inspect
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from jobs import error_of
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from stand_in_hub import SHA, TOKEN, environment

from quantkit.errors import NOT_FOUND, RUNTIME, UNSUPPORTED, USAGE, QuantkitError
from quantkit.models.files import hub
from quantkit.models.files.headers import open_contents
from quantkit.models.files.open import open_checkpoint
from quantkit.models.files.safetensors_folder import (
    INDEX,
    SINGLE,
    read_folder,
    read_header,
    write_folder,
)

OLDER = "f" * 40
TENSORS = {  # every size of element, a scalar, an empty tensor, and names whose order is not alphabetical
    "layers.10.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "layers.2.weight": torch.arange(10, dtype=torch.bfloat16).view(5, 2),
    "layers.2.bias": torch.arange(5, dtype=torch.float16),
    "layers.2.qweight": torch.arange(-3, 3, dtype=torch.int32).view(2, 3),
    "layers.2.mask": torch.tensor([True, False, True]),
    "layers.2.codes": torch.arange(7, dtype=torch.uint8),
    "layers.2.small": torch.arange(3, dtype=torch.float32).to(torch.float8_e4m3fn),
    "step": torch.tensor(2**40, dtype=torch.int64),
    "empty": torch.zeros(0, 4, dtype=torch.float16),
}


def store(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def store_raw(path: Path, header: bytes | dict, body: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file of any header, true or not."""
    header = json.dumps(header).encode() if isinstance(header, dict) else header
    size = len(header) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + header + body)
    return path


def store_sharded(folder: Path, shards: dict[str, dict], weight_map: dict | None = None) -> Path:
    """Shards and their index, put together by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in shards.items():
        store(folder / name, tensors)
    true_map = {key: name for name, tensors in shards.items() for key in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map or true_map}))
    return folder


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def stored_bytes(info) -> bytes:
    with open(info.file, "rb") as file:
        file.seek(info.offset)
        return file.read(info.nbytes)


# Reading


def test_headers_say_what_the_library_says(tmp_path):
    path = store(tmp_path / SINGLE, TENSORS)
    infos = read_header(path)
    assert infos.keys() == TENSORS.keys()
    with safe_open(path, framework="pt") as library:
        for name, info in infos.items():
            part = library.get_slice(name)
            assert (info.name, info.dtype, list(info.shape)) == (name, part.get_dtype(), part.get_shape())
            assert info.file == path
            assert stored_bytes(info) == raw_bytes(TENSORS[name])


def test_a_checkpoint_reads_values_names_and_context(tiny_model):
    folder = tiny_model("gpt2", dtype="bfloat16")
    checkpoint = open_checkpoint(str(folder))
    stored = load_file(folder / SINGLE)
    assert sorted(checkpoint.names) == sorted(stored)
    name = "transformer.h.1.mlp.c_fc.weight"
    assert checkpoint.read(name).dtype == torch.bfloat16
    assert torch.equal(checkpoint.read(name), stored[name])
    assert torch.equal(checkpoint.read(name, torch.float32), stored[name].float())
    assert not checkpoint.is_quantized(name)
    assert checkpoint.context == 256
    assert [path.name for path in checkpoint.companions()] == ["generation_config.json"]


def test_the_hash_is_of_configuration_and_weights(tiny_model, tmp_path):
    folder = tiny_model("llama")
    first = open_checkpoint(str(folder)).sha256()
    (folder / "README.md").write_text("not part of the model")
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert open_checkpoint(str(copy)).sha256() == first
    data = bytearray((copy / SINGLE).read_bytes())
    data[-1] ^= 1
    (copy / SINGLE).write_bytes(data)
    assert open_checkpoint(str(copy)).sha256() != first


# Writing


@pytest.mark.parametrize("shard_bytes", [10**9, 50, 16, 1])
def test_written_folders_hold_the_same_bytes(tmp_path, shard_bytes):
    source = store_sharded(
        tmp_path / "source",
        {
            "a.safetensors": {name: TENSORS[name] for name in list(TENSORS)[::2]},
            "b.safetensors": {name: TENSORS[name] for name in list(TENSORS)[1::2]},
        },
    )
    infos = list(read_folder(source).values())
    outputs = []
    for number in range(2):  # the second time from tensors in another order
        folder = tmp_path / f"out{number}"
        folder.mkdir()
        random.Random(number).shuffle(infos)
        write_folder(folder, infos, shard_bytes)
        outputs.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert outputs[0] == outputs[1]

    written = read_folder(folder)
    assert {name: (i.dtype, i.shape) for name, i in written.items()} == {
        info.name: (info.dtype, info.shape) for info in infos
    }
    assert all(stored_bytes(written[name]) == raw_bytes(tensor) for name, tensor in TENSORS.items())
    loaded = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = load_file(path)  # the library's own, stricter reader
        sizes = [tensor.nbytes for tensor in part.values()]
        assert sum(sizes) <= shard_bytes or len(sizes) == 1
        for name in part:
            assert written[name].offset % part[name].element_size() == 0
        loaded |= part
    assert all(
        loaded[name].dtype == tensor.dtype and raw_bytes(loaded[name]) == raw_bytes(tensor)
        for name, tensor in TENSORS.items()
    )
    if shard_bytes > 1000:
        assert list(outputs[0]) == [SINGLE]
    else:
        index = json.loads((folder / INDEX).read_text())
        assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in TENSORS.values())}
        assert index["weight_map"] == {name: info.file.name for name, info in written.items()}
        assert len(set(index["weight_map"].values())) == len(outputs[0]) - 1 > 1


def test_shards_follow_the_order_of_the_blocks(tmp_path):
    names = [f"layers.{number}.weight" for number in range(12)]
    source = store(tmp_path / "source.safetensors", {name: torch.zeros(4) for name in names})
    write_folder(tmp_path, read_header(source).values(), 48)
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert index == {name: f"model-{k // 3 + 1:05d}-of-00004.safetensors" for k, name in enumerate(names)}


# Files that are broken, or lie

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN = {
    "empty file": b"",
    "seven bytes": b"\x10\0\0\0\0\0\0",
    "garbage": bytes(range(1, 200)),
    "not JSON": (b"{]", b""),
    "not UTF-8": (b'{"\xff\xfe": 1}', b""),
    "deep nesting": (b"[" * 200_000, b""),
    "a list": (b"[]", b""),
    "entry is no object": ({"a": 5}, b""),
    "entry without offsets": ({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8),
    "dtype is a list": ({"a": {**F32, "dtype": ["F32"]}}, b"\0" * 8),
    "header longer than the file": (json.dumps({"a": F32}).encode(), b"\0" * 8, 10**6),
    "header of 2^63 bytes": (json.dumps({"a": F32}).encode(), b"\0" * 8, 2**63),
    "header shorter than it is": (json.dumps({"a": F32}).encode(), b"\0" * 8, 20),
    "tensors cut off": ({"a": F32}, b"\0" * 7),
    "bytes left over": ({"a": F32}, b"\0" * 9),
    "negative offset": ({"a": {**F32, "data_offsets": [-8, 0]}}, b"\0" * 8),
    "offset beyond the file": ({"a": {**F32, "data_offsets": [10**15, 10**15 + 8]}}, b"\0" * 8),
    "reversed offsets": ({"a": {**F32, "dtype": "F6_E2M3", "data_offsets": [8, 0]}}, b"\0" * 8),
    "offsets that are no integers": ({"a": {**F32, "data_offsets": [0.0, 8.0]}}, b"\0" * 8),
    "negative size": ({"a": {**F32, "shape": [-1, -2]}}, b"\0" * 8),
    "size that is no integer": ({"a": {**F32, "shape": [2.5]}}, b"\0" * 8),
    "shape too large for its bytes": ({"a": {**F32, "shape": [3]}}, b"\0" * 8),
    "hole before a tensor": ({"a": {**F32, "data_offsets": [4, 12]}}, b"\0" * 12),
    "overlapping tensors": ({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, b"\0" * 12),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_broken_files_are_refused_by_name(tmp_path, content):
    path = tmp_path / SINGLE
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        store_raw(path, *content)
    with pytest.raises(SafetensorError), safe_open(path, framework="pt"):
        pass  # the library refuses it as well
    error = error_of(read_folder, tmp_path)
    assert str(path) in error.message and "truncated or not safetensors" in error.message
    assert error.exit_code == RUNTIME and error.hint


def test_a_git_lfs_pointer_is_called_one(tmp_path):
    (tmp_path / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    error = error_of(read_folder, tmp_path)
    assert error.message == f"{tmp_path / SINGLE} is a Git LFS pointer, not the file it stands for"
    assert "git lfs pull" in error.hint and "hf download" in error.hint
    (tmp_path / SINGLE).write_bytes(b"")
    assert error_of(read_folder, tmp_path).message.endswith("not safetensors: it is empty")


def test_what_is_wrong_with_single_shards_can_be_taken_instead_of_raised(tmp_path):
    """In `errors`; the tensors of the other shards are returned all the same."""
    store_sharded(tmp_path, ONE, TRUE_MAP | {"z": "c.safetensors", "w": "a.safetensors"})
    (tmp_path / "b.safetensors").write_bytes(b"")
    errors = []
    assert list(read_folder(tmp_path, errors)) == ["x"]
    assert [error.message.removeprefix(str(tmp_path)) for error in errors] == [
        f"1 of 3 shards named in {tmp_path / INDEX} are absent: c.safetensors",
        "/b.safetensors is truncated or not safetensors: it is empty",
        f"/{INDEX} places tensors in shards that do not hold them: w",
    ]


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    """transformers and the index may take different ones."""
    store_sharded(tmp_path, ONE | {"b.safetensors": {"x": torch.ones(2), "y": torch.zeros(2)}}, TRUE_MAP)
    message = error_of(read_folder, tmp_path).message
    assert message == f"{tmp_path / 'b.safetensors'} holds tensors of another shard: x"


@pytest.mark.parametrize("part", [0.2, 0.9, 0.999])
def test_a_truncated_checkpoint_is_refused_before_loading(tiny_model, part):
    folder = tiny_model("llama")
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[: int(len(data) * part)])
    assert f"the file has {int(len(data) * part)}" in error_of(open_checkpoint, str(folder)).message


ONE = {"a.safetensors": {"x": torch.zeros(2)}, "b.safetensors": {"y": torch.zeros(2)}}
TRUE_MAP = {"x": "a.safetensors", "y": "b.safetensors"}


@pytest.mark.parametrize(
    ("change", "words", "code"),
    [
        ({"y": "c.safetensors"}, "1 of 2 shards named in .* are absent: c.safetensors", NOT_FOUND),
        ({"y": "../secret.safetensors"}, r"cannot lie in its folder: \.\./secret", UNSUPPORTED),
        ({"y": "/etc/passwd"}, "cannot lie in its folder: /etc/passwd", UNSUPPORTED),
        ({"y": "sub/b.safetensors"}, "cannot lie in its folder: sub/b", UNSUPPORTED),
        ({"y": ".."}, r"cannot lie in its folder: \.\.", UNSUPPORTED),
        ({"y": "a.safetensors"}, "in shards that do not hold them: y$", RUNTIME),
        ({"z": "a.safetensors"}, "in shards that do not hold them: z$", RUNTIME),
        (
            {"x": "b.safetensors", "y": "a.safetensors"},
            "in shards that do not hold them: x, y$",
            RUNTIME,
        ),
        ({"y": 5}, "is not a safetensors index", RUNTIME),
        ({"y": ["b.safetensors"]}, "is not a safetensors index", RUNTIME),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path, change, words, code):
    store(tmp_path / "secret.safetensors", {"y": torch.zeros(2)})
    folder = store_sharded(tmp_path / "model", ONE, TRUE_MAP | change)
    with pytest.raises(QuantkitError, match=words) as caught:
        read_folder(folder)
    assert caught.value.exit_code == code
    assert str(folder / INDEX) in caught.value.message


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": ["a"]}', "[" * 10**5]
)
def test_an_index_that_is_none_is_refused(tmp_path, text):
    folder = store_sharded(tmp_path, ONE)
    (folder / INDEX).write_text(text)
    assert error_of(read_folder, folder).message.startswith(f"{folder / INDEX} is not a safetensors index")


def test_pickles_are_refused_with_the_way_out(tiny_model):
    folder = tiny_model("llama")
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    error = error_of(open_checkpoint, str(folder))
    assert error.exit_code == UNSUPPORTED
    assert "pytorch_model.bin" in error.message and "save_pretrained" in error.hint


def test_a_folder_without_weights_is_refused(tiny_model):
    folder = tiny_model("llama")
    (folder / SINGLE).unlink()
    error = error_of(open_checkpoint, str(folder))
    assert (error.exit_code, error.message) == (NOT_FOUND, f"{folder} holds no {SINGLE} and no {INDEX}")


@pytest.mark.parametrize("config", [True, False])
def test_an_adapter_is_refused_with_its_base(tiny_model, config):
    folder = tiny_model("llama")
    (folder / SINGLE).rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    if not config:
        (folder / "config.json").unlink()
    for read in (open_checkpoint, open_contents):
        error = error_of(read, str(folder))
        assert error.message == f"{folder} is an adapter (LoRA) of org/base, not a model"
        assert error.exit_code == UNSUPPORTED and "merge_and_unload" in error.hint


@pytest.mark.parametrize(
    ("text", "words", "code"),
    [
        (None, "holds no config.json", NOT_FOUND),
        ("\ufeff{}", "is not JSON: it begins with a byte order mark: save it as UTF-8 without one", RUNTIME),
        ("{", "is not JSON", RUNTIME),
        ("[" * 10**5, "is not JSON", RUNTIME),
        ("[1]", "is not a JSON object", RUNTIME),
        ("{}", "transformers .* cannot read", UNSUPPORTED),
        ('{"model_type": "llamma"}', "transformers .* cannot read .*llamma", UNSUPPORTED),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "alien"}}', "'alien'", UNSUPPORTED),
        ('{"model_type": "llama", "quantization_config": "alien"}', "'alien'", UNSUPPORTED),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}', "bits", RUNTIME),
        ('{"model_type": "llama", "quantization": {"group_size": 64, "bits": 7}}', "7 bits", RUNTIME),
    ],
)
def test_configurations_that_do_not_serve(tiny_model, text, words, code):
    folder = tiny_model("llama")
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    with pytest.raises(QuantkitError, match=words) as caught:
        open_checkpoint(str(folder))
    assert caught.value.exit_code == code and caught.value.hint


def test_a_checkpoint_without_tokenizer_says_so(tiny_model):
    checkpoint = open_checkpoint(str(tiny_model("llama")))
    error = error_of(lambda: checkpoint.tokenizer)
    assert error.exit_code == NOT_FOUND and "tokenizer.json" in error.hint
    assert open_checkpoint(str(tiny_model("llama", tokenizer=True))).tokenizer.vocab_size == 512


# The hub


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("no/such/folder", "no such folder: no/such/folder"),
        ("./org/name", "no such folder: ./org/name"),
        ("name", "no such folder: name"),
        ("/org/name", "no such folder: /org/name"),
        ("org/na..me", "org/na..me"),
        ("org/name.git", "org/name.git"),
        ("org/-name", "org/-name"),
        ("org/näme", "org/näme"),
    ],
)
def test_sources_that_are_neither_folder_nor_hub_id(source, words):
    error = error_of(hub.resolve, source)
    assert words in error.message
    assert error.exit_code == NOT_FOUND and error.hint


def test_a_file_is_no_checkpoint(tiny_model):
    path = tiny_model("llama") / "config.json"
    error = error_of(hub.resolve, str(path))
    assert (error.exit_code, error.message) == (NOT_FOUND, f"{path} is a file")


def test_no_token_is_taken_from_an_argument():
    for function in (hub.resolve, open_checkpoint):
        assert "token" not in inspect.signature(function).parameters


@pytest.fixture
def cache(tmp_path, tiny_model, monkeypatch):
    """A hub cache as huggingface_hub lays it out: main of org/name, and an older revision tagged v1."""
    repository = tmp_path / "hub" / "models--org--name"
    for sha, ref, blocks in ((SHA, "main", 3), (OLDER, "v1", 2)):
        shutil.copytree(
            tiny_model("llama", name=ref, num_hidden_layers=blocks), repository / "snapshots" / sha
        )
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(sha)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return repository


@pytest.mark.parametrize(("revision", "blocks"), [(None, 3), ("main", 3), ("v1", 2), (OLDER, 2)])
def test_the_hub_cache_opens_offline(cache, revision, blocks):
    checkpoint = open_checkpoint("org/name", revision=revision, offline=True)
    assert checkpoint.folder.parent == cache / "snapshots"
    assert checkpoint.config.num_hidden_layers == blocks
    assert len([name for name in checkpoint.names if "up_proj" in name]) == blocks


def test_what_comes_from_the_hub_passes_the_same_door(cache, monkeypatch):
    monkeypatch.setattr("quantkit.models.files.untrusted.LARGE_BYTES", 100)
    error = error_of(open_checkpoint, "org/name", offline=True)
    assert error.exit_code == UNSUPPORTED and error.message.endswith("is larger than 0 MiB: not read")


def test_a_folder_has_no_revisions(cache):
    [folder, *_] = (cache / "snapshots").iterdir()
    error = error_of(open_checkpoint, str(folder), revision="v1")
    assert error.exit_code == USAGE and "--revision v1 is for repositories of the hub" in error.message


@pytest.mark.parametrize(("source", "revision"), [("org/other", None), ("org/name", "v2")])
def test_what_is_not_in_the_cache_cannot_be_opened_offline(cache, source, revision):
    error = error_of(open_checkpoint, source, revision=revision, offline=True)
    assert error.exit_code == NOT_FOUND
    assert f"{source} is not a local folder and is not in the local cache" in error.message
    assert f"hf download {source}" in error.hint


RESOLVE = """
import json, sys
from quantkit.models.files import hub
from quantkit.models.files.headers import open_contents
from quantkit.errors import QuantkitError
for line in sys.stdin:
    try:
        print(json.dumps({"folder": str(hub.resolve(**json.loads(line)))}))
    except QuantkitError as error:
        print(json.dumps({"message": error.message, "hint": error.hint, "code": error.exit_code}))
"""


def resolve_elsewhere(home: Path, endpoint: str, requests: list[dict], token: str = "") -> list[dict]:
    """`hub.resolve` of every request in one new process: huggingface_hub reads its variables at import."""
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE],
        input="".join(json.dumps(request) + "\n" for request in requests),
        env=environment(home, endpoint, token),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def stand_in(tiny_model, hub_server):
    folder = tiny_model("llama", tokenizer=True)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files |= {"pytorch_model.bin": b"pickle", "LICENSE": b"MIT", "training_args.bin": b"pickle"}
    for state in ("private", "gated", "broken", "portal", "cut"):
        hub_server.add(f"models/org/{state}", files, state)
    hub_server.add("models/org/name", files)
    return hub_server


def test_a_hub_id_is_fetched_once_and_then_opens_offline(stand_in, tmp_path):
    files = stand_in.repos["models/org/name"].revisions[SHA]
    (online,) = resolve_elsewhere(tmp_path, stand_in.url, [{"source": "org/name"}])
    folder = Path(online["folder"])
    assert folder.name == SHA
    wanted = {name: data for name, data in files.items() if ".bin" not in name}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == wanted
    assert not any(".bin" in path for _, path, _ in stand_in.seen)

    stand_in.seen.clear()
    offline = resolve_elsewhere(tmp_path, stand_in.url, [{"source": "org/name", "offline": True}])
    assert offline == [online] and not stand_in.seen  # not one request
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.tokenizer.vocab_size == 512 and checkpoint.config.num_hidden_layers == 3


def test_the_token_comes_from_the_environment(stand_in, tmp_path):
    request = {"source": "org/private"}
    (refused,) = resolve_elsewhere(tmp_path / "a", stand_in.url, [request])
    assert refused["code"] == NOT_FOUND and "HF_TOKEN" in refused["hint"]
    assert {token for _, _, token in stand_in.seen} == {None}
    (fetched,) = resolve_elsewhere(tmp_path / "b", stand_in.url, [request], token=TOKEN)
    assert Path(fetched["folder"], "config.json").is_file()


def test_what_the_hub_refuses_is_an_error_with_a_way_out(stand_in, tmp_path):
    requests = [
        {"source": "org/gated"},
        {"source": "org/absent"},
        {"source": "org/name", "revision": "v9"},
        {"source": "org/broken"},
    ]
    gated, absent, revision, broken = resolve_elsewhere(tmp_path, stand_in.url, requests)
    assert gated["message"] == "org/gated is gated" and "accept its terms" in gated["hint"]
    assert absent["message"] == "the hub has no org/absent, or it is private"
    assert revision["message"] == "the hub has no org/name at revision v9, or it is private"
    assert broken["message"].startswith("org/broken is not a local folder and could not be fetched: ")
    assert {answer["code"] for answer in (gated, absent, revision, broken)} == {NOT_FOUND}


def test_a_connection_that_fails_halfway_is_an_error(stand_in, tmp_path):
    names = "org/cut", "org/portal"
    errors = resolve_elsewhere(tmp_path, stand_in.url, [{"source": name} for name in names])
    for name, error in zip(names, errors, strict=True):
        assert error["message"].startswith(f"{name} is not a local folder and could not be fetched: ")
        assert error["code"] == NOT_FOUND and error["hint"]


def test_a_hub_that_cannot_be_reached_is_an_error(tmp_path):
    (error,) = resolve_elsewhere(tmp_path, "http://127.0.0.1:9", [{"source": "org/name"}])
    assert error["message"].startswith("org/name is not a local folder and could not be fetched: ")
    assert error["code"] == NOT_FOUND and "hf download org/name" in error["hint"]
