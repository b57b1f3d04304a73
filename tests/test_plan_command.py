"""`quantkit plan` from the outside: what it prints where, how fast, and what it fetches."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from families import save_model
from published import CONFIGS, PARAMETERS
from safetensors.torch import load_file, save_file
from stand_in_hub import SHA, TOKEN, Repo, environment

GIB = 1 << 30
REPOSITORY = Path(__file__).parents[1]


@pytest.fixture
def quantkit(monkeypatch, capsys, tmp_path):
    """`quantkit("plan", ...)`: exit code, stdout, stderr."""
    from quantkit import cli

    monkeypatch.chdir(tmp_path)

    def run(*arguments) -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["quantkit", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def record(quantkit, tmp_path):
    """`record("Llama-2-13b", ...)`: the JSON for a published configuration, or for a path."""

    def run(model, *arguments) -> dict:
        if model in CONFIGS:
            path = tmp_path / f"{model}.json"
            path.write_text(json.dumps(CONFIGS[model]))
            model = path
        code, out, err = quantkit(*([model] if model else []), *arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return run


def test_a_textbook_answer(record):
    found = record("Llama-2-13b", "--gpu", "a100-40g", "--ctx", 4096)
    assert found["schema"] == "quantkit.capacity/1"
    assert found["parameters"] == {
        "count": PARAMETERS["Llama-2-13b"],
        "active": PARAMETERS["Llama-2-13b"],
        "exact": False,
        "basis": "config.json",
        "stored_bytes": None,
    }
    cache = found["kv_cache"]
    assert cache["bytes_per_sequence"] == cache["bytes"] == 3.125 * GIB
    assert cache["bytes_per_token"] == 3.125 * GIB / 4096 and cache["values_per_sequence"] == 3.125 * GIB / 2
    assert cache["attention_scores_bytes"] == 40 * 2 * 4096**2
    assert cache["what_if"] == {
        "mha": {"kv_heads": 40, "bytes_per_sequence": 3.125 * GIB},
        "gqa": {"kv_heads": 8, "bytes_per_sequence": 0.625 * GIB},
        "mqa": {"kv_heads": 1, "bytes_per_sequence": 3.125 * GIB / 40},
    }
    assert found["weights"]["bf16"]["bytes"] == 2 * PARAMETERS["Llama-2-13b"]
    usable = int(0.9 * 40 * GIB)
    assert found["device"]["usable_bytes"] == usable
    assert found["requests_that_fit"] == (usable - 2 * PARAMETERS["Llama-2-13b"]) // (3.125 * GIB) == 3
    assert found["roofline"]["optimal_batch"] == pytest.approx(200.6, abs=0.1)
    assert found["weights"]["int8"]["optimal_batch"] == pytest.approx(100.3, abs=0.05)


def test_the_figures_of_another_format(record):
    found = record("Llama-2-13b", "--gpu", "a100-40g", "--method", "int8")
    assert found["method"] == "int8" and found["roofline"]["bytes_per_weight"] == 1
    assert found["roofline"]["optimal_batch"] == pytest.approx(100.3, abs=0.05)
    int8 = found["weights"]["int8"]
    assert (
        found["requests_that_fit"]
        == int8["requests_that_fit"]
        == (int(36 * GIB) - int8["bytes"]) // (3.125 * GIB)
    )
    assert int8["tokens_per_second"] == pytest.approx(1555e9 / (int8["bytes"] + 3.125 * GIB))


def test_pages_against_reserving_the_whole_context(record):
    found = record("Llama-3-8B", "--ctx", 1000)["kv_cache"]
    token = found["bytes_per_token"]
    assert token == 2 * 32 * 8 * 128 * 2
    assert found["paged"]["16"] == {
        "bytes_per_sequence": 1008 * token, "wasted_bytes": 8 * token, "most_wasted_bytes": 15 * token
    }  # fmt: skip
    assert found["paged"]["32"]["wasted_bytes"] == 24 * token
    assert found["reserved"] == {
        "tokens": 8192, "bytes_per_sequence": 8192 * token, "wasted_bytes": 7192 * token
    }  # fmt: skip


def test_octocoder(record):
    found = record("octocoder", "--ctx", 16000)
    assert found["kv_cache"]["bytes_per_sequence"] == 327_680_000
    assert found["kv_cache"]["what_if"]["mha"]["bytes_per_sequence"] == 2 * 7_864_320_000
    assert found["notes"] == ["16,000 tokens are more than the 8,192 it was made for"]


def test_parameters_without_a_model(record):
    found = record(None, "--params", "175B", "--vram", 400, "--bandwidth", 3350, "--tflops", 989)
    assert found["weights"]["bf16"]["bytes"] == 350e9 and found["weights"]["int8"]["bytes"] == 175e9
    assert found["kv_cache"]["bytes_per_sequence"] is None and found["requests_that_fit"] is None
    assert found["weights"]["bf16"]["fits"] and found["job"] == {} and found["model"] is None
    assert found["roofline"]["optimal_batch"] == pytest.approx(989e12 / 3350e9)
    assert record(None, "--params", "70B")["weights"]["bf16"]["bytes"] == 140e9


def test_a_folder_is_exact(record, tiny_model):
    folder = tiny_model("llama", name="tiny", hidden_size=128, intermediate_size=256)
    found = record(folder, "--batch", 3, "--kv-dtype", "fp8")
    assert found["parameters"]["exact"] and found["parameters"]["basis"] == "safetensors headers"
    assert found["kv_cache"]["dtype"] == "fp8" and found["kv_cache"]["tokens"] == 256
    assert found["kv_cache"]["bytes"] == 3 * found["kv_cache"]["bytes_per_sequence"] == 3 * 3 * 2 * 64 * 256
    for job in (row for name, row in found["job"].items() if row["peak_memory_bytes"]):
        assert job["disk_bytes"] > 0 and len(job["seconds"]) == 2 and job["basis"]
    assert found["job"].keys() == {"awq", "gguf", "gptq", "int8", "nf4"}


@pytest.mark.parametrize("family", ["gemma4", "mixtral"])
def test_what_is_not_known_is_said_and_the_rest_answered(record, quantkit, tmp_path, family):
    folder = save_model(tmp_path / family, family)
    found = record(folder)
    if family == "gemma4":
        assert (
            found["kv_cache"]["bytes_per_sequence"] is None
            and "not known" in found["kv_cache"]["unsupported"]
        )
        assert "KV cache     unsupported: gemma4_text is not known" in quantkit(folder)[1]
    else:
        assert found["job"]["int8"] == {
            "peak_memory_bytes": None,
            "disk_bytes": None,
            "seconds": None,
            "reason": "mixtures of experts are not compressed yet",
        }
        assert found["parameters"]["active"] < found["parameters"]["count"]
    assert found["weights"]["bf16"]["bytes"] == 2 * found["parameters"]["count"]


def test_the_original_of_a_quantized_checkpoint_is_planned(record, tiny_model):
    folder = tiny_model("llama", name="tiny")
    whole = record(folder)
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq"}})
    )
    found = record(folder)
    assert not found["parameters"]["exact"] and "quantized already" in found["notes"][0]
    assert found["weights"]["gptq"] == whole["weights"]["gptq"]


# ---- for people


def test_what_people_read(quantkit, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["Llama-2-13b"]))
    code, out, err = quantkit(path, "--gpu", "RTX 3090")
    assert (code, err) == (0, "") and "\x1b" not in out
    assert "parameters   13.02 billion (estimate from config.json)" in out
    assert "KV cache     3.125 GiB per sequence of 4,096 tokens (bfloat16)" in out
    assert re.search(r"^ bf16 +26\.03 GB +24\.24 +16\.00 +no +0 +– +76", out, re.M)
    assert re.search(r"^ int8 +13\.35 GB +12\.44 +8\.21 +yes +2 +≤ 56 +38", out, re.M)
    assert re.search(r"^ gptq +\S+ GiB +\S+ GB +\S+ min to \S+ h +rtx-3090, bfloat16", out, re.M)
    tables = [line for line in out.splitlines() if line.startswith(" ")]
    assert max(map(len, tables)) <= 80 and not any("…" in line for line in tables)
    assert "add --gpu NAME" not in out and "add --gpu NAME" in quantkit(path)[1]


def test_no_colour_and_no_codes_in_pipes(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["Mistral-7B"]))
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "quantkit", "plan", path, "--gpu", "l4"]
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    assert "32 sliding" in out and "\x1b" not in out


@pytest.mark.parametrize(
    "code, arguments, words",
    [
        (2, [], "give a model or --params"),
        (2, ["model", "--params", "7B"], "--params stands for a model"),
        (2, ["--params", "many"], "no number of parameters"),
        (2, ["--params", "7B", "--gpu", "a100"], "did you mean a100-40g or a100-80g?"),
        (2, ["--params", "7B", "--kv-dtype", "bf17"], "did you mean bf16"),
        (2, ["--params", "7B", "--method", "Q4_K_L"], "did you mean q4_k_"),
        (2, ["--params", "7B", "--ctx", "0"], "--ctx 0 makes no sense"),
        (2, ["--params", "7B", "--batch", "-1"], "--batch -1 makes no sense"),
        (3, ["nowhere"], "no such folder: nowhere"),
        (3, ["."], "holds no config.json"),
        (3, ["org/name", "--offline"], "is not in the local cache"),
    ],
)
def test_refusals(quantkit, code, arguments, words):
    found, out, err = quantkit(*arguments)
    assert (found, out) == (code, "") and words in err
    assert re.fullmatch(r"error: \S.*\nhint: \S.*\n", err)


def test_a_format_that_cannot_hold_the_model_is_refused(quantkit, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["gpt2"]))
    code, _, err = quantkit(path, "--method", "awq")
    assert code == 4 and "awq cannot hold this model" in err and "Conv1D" in err
    assert quantkit("file.gguf")[0] == 3


def test_gguf_files_are_refused(quantkit, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    code, _, err = quantkit(path)
    assert code == 4 and "plan the checkpoint it was made from" in err


# ---- promises


def test_neither_torch_nor_transformers_is_imported(demo_model):
    """Nor what else takes long: the answer comes within a second of CPU time."""
    code = (
        "import sys, time; sys.argv = ['quantkit', 'plan', sys.argv[1], '--gpu', 'l4']\n"
        "from quantkit import cli\n"
        "try: cli.main()\n"
        "except SystemExit as end: assert not end.code\n"
        "slow = {'torch', 'transformers', 'numpy', 'gguf', 'datasets', 'safetensors', 'huggingface_hub'}\n"
        "print(slow & sys.modules.keys(), time.process_time(), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, str(demo_model)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    imported, _, seconds = done.stderr.strip().rpartition(" ")
    assert imported == "set()" and float(seconds) < 2  # 0.5 on an idle machine


def test_a_damaged_header_is_named(quantkit, tiny_model):
    folder = tiny_model("llama", name="tiny")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    code, _, err = quantkit(folder)
    assert code == 1 and "truncated or not safetensors" in err


@pytest.fixture
def online(hub_server, tmp_path):
    """`online("org/name", ...)`: a process of its own that takes the stand-in for the hub."""
    home = tmp_path / "home"
    home.mkdir()

    def run(*arguments) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "quantkit", "plan", *arguments]
        variables = environment(home, hub_server.url, TOKEN)
        return subprocess.run(command, capture_output=True, text=True, env=variables, cwd=home)

    return run


@pytest.mark.parametrize("sharded", [False, True])
def test_of_a_hub_id_only_headers_are_fetched(hub_server, online, record, tmp_path, sharded):
    folder = save_model(tmp_path / "m", "llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=2)
    if sharded:
        split(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub_server.repos["models/org/name"] = Repo({SHA: files}, state="private")
    answer = online("org/name", "--json")
    assert (answer.returncode, answer.stderr) == (0, "")
    found, local = json.loads(answer.stdout), record(folder)
    assert found["parameters"]["exact"] and found["model"] == "org/name"
    assert found["weights"] == local["weights"] and found["kv_cache"] == local["kv_cache"]
    weights = [name for name in hub_server.sent if name.endswith(".safetensors")]
    sent = sum(hub_server.sent[name] for name in weights)
    assert 0 < sent < sum(len(files[name]) for name in weights) / 4
    assert hub_server.fetched() <= {*weights, "config.json", "model.safetensors.index.json"}
    offline = online("org/name", "--offline")
    if sharded:  # the index is in the cache, its shards are not
        assert offline.returncode == 3 and "shards named in" in offline.stderr
    else:
        assert "(estimate from config.json)" in offline.stdout


def test_other_answers_of_the_hub(hub_server, online):
    config = json.dumps(CONFIGS["gpt2"]).encode()
    hub_server.add("models/org/old", {"config.json": config, "pytorch_model.bin": b"pickle"})
    hub_server.add("models/org/odd", {"config.json": config, "model.safetensors": b"\xff" * 64})
    hub_server.add("models/org/none", {"README.md": b"no model"})
    found = json.loads(online("org/old", "--json").stdout)["parameters"]
    assert (found["count"], found["exact"], found["basis"]) == (PARAMETERS["gpt2"], False, "config.json")
    assert "pytorch_model.bin" not in hub_server.fetched()
    broken = online("org/odd")
    assert broken.returncode == 1 and "error: org/odd holds no safetensors" in broken.stderr
    for name, words in (("other", "the hub has no org/other"), ("none", "org/none holds no config.json")):
        missing = online(f"org/{name}")
        assert missing.returncode == 3 and words in missing.stderr


def split(folder: Path) -> None:
    """Cut the one weight file of a checkpoint in two, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {f"model-0000{k + 1}-of-00002.safetensors": names[k::2] for k in range(2)}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / shard)
    places = {name: shard for shard, members in shards.items() for name in members}
    index = json.dumps({"metadata": {}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index)
