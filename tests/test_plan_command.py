"""`quantkit plan` from the outside: what it prints where, how fast, and what it fetches."""

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from families import save_model
from nights import by_day, nightly
from published import CONFIGS, PARAMETERS, gated
from stand_in_hub import SHA, TOKEN, Elsewhere, Repo, StandInHub
from transformers import AutoModelForCausalLM

GIB = 1 << 30
REPOSITORY = Path(__file__).parents[1]


@pytest.fixture
def quantkit(quantkit):
    """`quantkit(...)` runs `quantkit plan ...`: exit code, stdout, stderr."""
    return partial(quantkit, "plan")


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
    assert found["schema"] == "quantkit.capacity/2"
    assert found["parameters"] == {
        "count": PARAMETERS["Llama-2-13b"],
        "active": PARAMETERS["Llama-2-13b"],
        "exact": False,
        "basis": "config.json",
        "stored_bytes": None,
        "quantized": False,
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
    found = record("Llama-2-13b", "--gpu", "a100-40g", "--format", "int8")
    assert found["method"] == "int8" and found["roofline"]["bytes_per_weight"] == 1
    assert found["roofline"]["optimal_batch"] == pytest.approx(100.3, abs=0.05)
    int8 = found["weights"]["int8"]
    assert (
        found["requests_that_fit"]
        == int8["requests_that_fit"]
        == (int(36 * GIB) - int8["bytes"]) // (3.125 * GIB)
    )
    assert int8["read_bytes"] == int8["bytes"] - 2 * 32000 * 5120  # of the embedding one row is read
    assert int8["tokens_per_second"] == pytest.approx(1555e9 / (int8["read_bytes"] + 3.125 * GIB))


def test_fits_is_weights_and_the_caches_of_all_sequences(record):
    """Llama 2 7B in bf16 takes 13.48 GB, a sequence of 4,096 tokens 2 GiB; 0.9 of the memory is used."""
    weights = 2 * PARAMETERS["Llama-2-7b"]
    for spare, requests in ((1000, 1), (-1000, 0)):
        vram = (weights + 2 * GIB + spare) / 0.9 / GIB
        found = record("Llama-2-7b", "--vram", vram)["weights"]["bf16"]
        assert (found["fits"], found["requests_that_fit"]) == (requests == 1, requests)
    found = [record("Llama-2-7b", "--vram", 24, "--batch", n)["weights"]["bf16"] for n in (4, 5)]
    assert [(row["fits"], row["requests_that_fit"]) for row in found] == [(True, 4), (False, 4)]


def test_best_batch_goes_by_the_bits_of_the_blocks_linears_in_every_format(record):
    """Whatever embeddings add to a file: nf4 has fewer bits there than Q5_K_M, though not in its file."""
    found = record("Llama-3-8B", "--gpu", "rtx-3090")["weights"]
    nf4, q5 = found["nf4"], found["Q5_K_M"]
    assert nf4["bits_per_weight"] == pytest.approx(q5["bits_per_weight"], abs=0.03)
    assert 8 * nf4["bytes_per_weight"] == pytest.approx(4.127, abs=1e-3)
    assert 8 * q5["bytes_per_weight"] == pytest.approx(5.65, abs=0.02)
    for row in (nf4, q5, found["bf16"]):
        assert row["optimal_batch"] == pytest.approx(71e12 * row["bytes_per_weight"] / (2 * 936e9))


def test_devices_together_are_an_upper_bound(record):
    one = record("Llama-2-70b", "--gpu", "a100-80g")
    four = record("Llama-2-70b", "--gpu", "a100-80g", "--gpus", 4)
    assert four["device"]["name"] == "4 × a100-80g" and four["device"]["count"] == 4
    assert four["device"]["memory_bytes"] == 4 * one["device"]["memory_bytes"]
    assert not one["weights"]["bf16"]["fits"] and four["weights"]["bf16"]["fits"]
    int8 = one["weights"]["int8"], four["weights"]["int8"]
    assert int8[1]["tokens_per_second"] == pytest.approx(4 * int8[0]["tokens_per_second"])
    assert int8[1]["optimal_batch"] == int8[0]["optimal_batch"]
    assert four["job"] == one["job"]  # one of them quantizes
    assert "upper bound" in four["notes"][-1] and not one["notes"]


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
    assert found["notes"] == ["16,000 tokens are more than the model's 8,192"]


def test_parameters_without_a_model(record):
    found = record(None, "--params", "175B", "--vram", 400, "--bandwidth", 3350, "--tflops", 989)
    assert found["weights"]["bf16"]["bytes"] == 350e9 and found["weights"]["int8"]["bytes"] == 175e9
    assert found["kv_cache"]["bytes_per_sequence"] is None and found["requests_that_fit"] is None
    assert found["weights"]["bf16"]["fits"] and found["job"] == {} and found["model"] is None
    assert found["roofline"]["optimal_batch"] == pytest.approx(989e12 / 3350e9)
    assert record(None, "--params", "70B")["weights"]["bf16"]["bytes"] == 140e9
    dense, sparse = (
        record(None, "--params", text, "--gpu", "h200")["weights"]["int8"] for text in ("30B", "30B-A3B")
    )
    assert sparse["bytes"] == dense["bytes"]
    assert sparse["tokens_per_second"] == pytest.approx(10 * dense["tokens_per_second"])


UNUSUAL = {  # as their config.json have it
    "deepseek_v3": gated("deepseek_v3", 7168, 18432, 61, 128, 128, 129280, n_routed_experts=256)
    | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "first_k_dense_replace": 3, "num_experts_per_tok": 8},
    "gpt_oss": gated("gpt_oss", 2880, 2880, 36, 64, 8, 201088, num_local_experts=128)
    | {"head_dim": 64, "sliding_window": 128, "quantization_config": {"quant_method": "mxfp4"}},
    "llama4": {
        "model_type": "llama4",
        "text_config": gated("llama4_text", 5120, 8192, 48, 40, 8, 202048, num_local_experts=16)
        | {"head_dim": 128, "no_rope_layers": []},
    },
    "qwen3_next": gated("qwen3_next", 2048, 5120, 48, 16, 2, 151936, num_experts=512, head_dim=256),
}
CACHES = {  # of 32,768 tokens, in 16 bit
    "deepseek_v3": 61 * 576 * 32768 * 2,
    "gpt_oss": 18 * 1024 * (128 + 32768) * 2,
    "llama4": (36 * 8192 + 12 * 32768) * 2048 * 2,
    "qwen3_next": 12 * 1024 * 32768 * 2 + 36 * ((2 * 16 + 32) * 128 * 4 * 2 + 32 * 128 * 128 * 4),
}
COUNTS = {  # all and active: DeepSeek V3, gpt-oss 120B, Llama 4 Scout, Qwen3 Next 80B-A3B
    "deepseek_v3": (671_026_404_352, 37_552_282_624),
    "gpt_oss": (116_829_156_672, 5_711_982_912),
    "llama4": (107_769_861_120, 17_172_894_720),
    "qwen3_next": (79_674_391_296, 3_874_929_408),
}


@pytest.mark.parametrize("family", by_day(UNUSUAL, ["llama4"]))
def test_unusual_families_by_their_configuration(record, quantkit, tmp_path, family):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(UNUSUAL[family]))
    found = record(path, "--ctx", "32k", "--gpu", "h200", "--gpus", 8)
    assert (found["parameters"]["count"], found["parameters"]["active"]) == COUNTS[family]
    assert found["kv_cache"]["bytes_per_sequence"] == CACHES[family]
    if family == "deepseek_v3":
        assert found["architecture"]["kv_heads"] is None and "128 heads (MLA)" in quantkit(path)[1]
    elif family == "gpt_oss":
        assert "layers       18 sliding (128 tokens), 18 full" in quantkit(path)[1]


def test_parameters_beside_a_model_are_refused(quantkit, demo_model):
    code, _, err = quantkit(demo_model, "--params", "7B")
    assert code == 2 and "give either a model or --params" in err


def test_numbers_as_people_write_them(record):
    assert record(None, "--params", "1.5e9")["parameters"]["count"] == 1_500_000_000
    for text, tokens in (("32k", 32768), ("1M", 1 << 20), ("8192", 8192), ("16,384", 16384)):
        assert record("Llama-3-8B", "--ctx", text)["kv_cache"]["tokens"] == tokens


def test_a_cache_of_4_bits_has_scales(record):
    """Groups of 64 with a scale and a shift, 16 bit each: 4.5 bits."""
    bf16, int4 = (record("Llama-3-8B", "--kv-dtype", kind)["kv_cache"]["bytes"] for kind in ("bf16", "int4"))
    assert int4 / bf16 == 4.5 / 16


def test_a_folder_is_exact(record, tiny_model):
    folder = tiny_model("llama", name="tiny", hidden_size=128, intermediate_size=256)
    found = record(folder, "--batch", 3, "--kv-dtype", "fp8")
    assert found["parameters"]["exact"] and found["parameters"]["basis"] == "safetensors headers"
    assert found["kv_cache"]["dtype"] == "fp8" and found["kv_cache"]["tokens"] == 256
    assert found["kv_cache"]["bytes"] == 3 * found["kv_cache"]["bytes_per_sequence"] == 3 * 3 * 2 * 64 * 256
    for job in (row for name, row in found["job"].items() if row["peak_memory_bytes"]):
        assert job["disk_bytes"] > 0 and job["seconds"] > 0 and job["seconds_factor"] == 2 and job["basis"]
    plain, both = (found["weights"][name] for name in ("fp4", "fp4a4"))
    assert (plain["bytes"], plain["computes"], both["computes"]) == (both["bytes"] - 84, "16 bit", "fp4")
    rows, groups = (found["weights"][name] for name in ("fp8", "mxfp8"))
    assert groups["bytes"] > rows["bytes"] and groups["computes"] == rows["computes"]
    assert found["job"].keys() == {"awq", "fp4", "fp8", "gguf", "gptq", "int8", "nf4", "w8a8"}


@pytest.mark.parametrize("family", ["phi3", "mixtral"])
def test_what_is_not_known_is_said_and_the_rest_answered(record, quantkit, tmp_path, family):
    folder = save_model(tmp_path / family, family)
    if family == "phi3":
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "strange"}))
    found = record(folder)
    if family == "phi3":
        assert (
            found["kv_cache"]["bytes_per_sequence"] is None
            and "not known" in found["kv_cache"]["unsupported"]
        )
        assert "KV cache     unsupported: strange is not known" in quantkit(folder)[1]
        assert found["architecture"]["attention"] is None and found["architecture"]["kv_heads"] is None
    else:
        assert found["job"]["int8"]["output_bytes"] == found["weights"]["int8"]["bytes"]
        assert found["parameters"]["active"] < found["parameters"]["count"]
    assert found["weights"]["bf16"]["bytes"] == 2 * found["parameters"]["count"]


# ---- for people


def test_what_people_read(quantkit, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["Llama-2-13b"]))
    code, out, err = quantkit(path, "--gpu", "RTX 3090")
    assert (code, err) == (0, "") and "\x1b" not in out
    assert "parameters   13.02 billion (estimate from config.json)" in out
    assert "KV cache     3.36 GB per sequence of 4,096 tokens (bfloat16)" in out
    assert re.search(r"^ bf16 +26\.03 GB +16\.00 +no +0 +– +76", out, re.M)
    assert re.search(r"^ int8 +13\.35 GB +8\.21 +yes +2 +≤ 57 +38", out, re.M)
    assert re.search(r"^ gptq +\S+ GB +\S+ GB +unknown", out, re.M)
    assert re.search("^ to make it  peak memory  ", out, re.M)  # columns as close as those of the weights
    assert "to make it: on rtx-3090 in bfloat16" in out
    tables = [line for line in out.splitlines() if line.startswith(" ")]
    assert max(map(len, tables)) <= 80 and not any("…" in line for line in tables)
    assert "add --gpu NAME" not in out and "add --gpu NAME" in quantkit(path)[1]


OPT_175B = {
    "model_type": "opt", "hidden_size": 12288, "ffn_dim": 49152, "num_hidden_layers": 96, "vocab_size": 50272,
    "num_attention_heads": 96, "max_position_embeddings": 2048, "word_embed_proj_dim": 12288,
}  # fmt: skip


def test_large_models_stay_in_80_columns(quantkit, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(OPT_175B))
    for arguments in ([path], [path, "--gpu", "rtx-pro-6000"], [path, "--gpu", "h200", "--gpus", 16]):
        code, out, _ = quantkit(*arguments)
        tables = [line for line in out.splitlines() if line.startswith(" ")]
        assert code == 0 and max(map(len, tables)) <= 80 and "…" not in out
    assert re.search(r"^ bf16 +349\.21 GB +16\.00 ", out, re.M)
    assert re.search(r"^ gptq .* about \S+ days", quantkit(path, "--threads", "2")[1], re.M)


def test_small_models_show_their_size(quantkit, demo_model):
    out = quantkit(demo_model, "--gpu", "m3-max")[1]
    assert re.search(r"^ bf16 +11\.54 MB +16\.00", out, re.M)
    assert "time unknown on this device: no such job was measured on it" in out and "time within" not in out
    quiet = quantkit(demo_model, "--gpu", "m3-max", "-q")
    assert quiet[0] == 0 and "time unknown" not in quiet[1] and quiet[1] == out[: len(quiet[1])]


@pytest.mark.parametrize(
    "code, arguments, words",
    [
        (2, [], "give either a model or --params"),
        (2, ["--params", "7B", "--gpus", "2"], "--gpus needs a device"),
        (2, ["--params", "7B", "--gpu", "l4", "--gpus", "0"], "--gpus 0 is invalid"),
        (2, ["--params", "7B", "--ctx", "32x"], "--ctx 32x is invalid"),
        (4, ["--params", "7B", "--format", "stored"], "no headers were read"),
        (2, ["--params", "many"], "no number of parameters"),
        (2, ["--params", "7B", "--gpu", "a100"], "did you mean a100-40g or a100-80g?"),
        (2, ["--params", "7B", "--kv-dtype", "bf17"], "did you mean bf16"),
        (2, ["--params", "7B", "--format", "Q4_K_L"], "did you mean q4_k_"),
        (2, ["--params", "7B", "--ctx", "0"], "--ctx 0 is invalid"),
        (2, ["--params", "7B", "--batch", "-1"], "--batch -1 is invalid"),
        (3, ["nowhere"], "no such folder: nowhere"),
        (3, ["1.5b-a3m"], "quantkit plan --params 1.5b-a3m"),
        (3, ["."], "holds no config.json"),
        (2, [".", "--revision", "v1"], "--revision v1 is for repositories of the hub, . is on this machine"),
        (3, ["org/name", "--offline"], "is not in the local cache"),
    ],
)
def test_refusals(quantkit, code, arguments, words):
    found, out, err = quantkit(*arguments)
    assert (found, out) == (code, "") and words in err
    assert re.fullmatch(r"error: \S.*\nhint: \S.*\n", err)


def test_one_format_is_shown_alone(quantkit, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Llama-2-13b"]))
    code, out, _ = quantkit(tmp_path / "config.json", "--format", "iq2_xxs")
    assert code == 0 and "IQ2_XXS" in out and "Q4_K_M" not in out and "as stored" not in out


def test_a_format_that_cannot_hold_the_model_is_refused(quantkit, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["gpt2"]))
    code, _, err = quantkit(path, "--format", "awq")
    assert code == 4 and "awq cannot store this model" in err and "Conv1D" in err
    assert quantkit("file.gguf")[0] == 3


# ---- promises


def test_a_damaged_header_is_named(quantkit, tiny_model):
    folder = tiny_model("llama", name="tiny")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    code, _, err = quantkit(folder)
    assert code == 1 and "truncated or not safetensors" in err


@pytest.fixture(scope="module")
def hub_server():
    with StandInHub() as server:
        yield server


@pytest.fixture(scope="module")
def online(hub_server, tmp_path_factory):
    """`online("org/name", ...)`: the command in another process, which takes the stand-in for the hub."""
    with Elsewhere(tmp_path_factory.mktemp("home"), hub_server.url, TOKEN) as process:
        yield lambda *arguments: SimpleNamespace(**process.ask(do="run", arguments=["plan", *arguments]))


@pytest.mark.parametrize("sharded", [True, *nightly(False)])
def test_of_a_hub_id_only_headers_are_fetched(hub_server, online, record, tmp_path, sharded):
    folder = save_model(tmp_path / "m", "llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=2)
    if sharded:
        model = AutoModelForCausalLM.from_pretrained(folder)
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="4MB")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    name = f"org/name-{sharded}"
    hub_server.repos[f"models/{name}"] = Repo({SHA: files}, state="private")
    hub_server.forget()
    answer = online(name, "--json")
    assert (answer.code, answer.err) == (0, "")
    found, local = json.loads(answer.out), record(folder)
    assert found["parameters"]["exact"] and found["model"] == name
    assert found["weights"] == local["weights"] and found["kv_cache"] == local["kv_cache"]
    weights = hub_server.fetched(".safetensors")
    sent = sum(hub_server.sent[name] for name in weights)
    assert 0 < sent < sum(len(files[name]) for name in weights) / 4
    assert hub_server.fetched() <= {*weights, "config.json", "model.safetensors.index.json"}
    offline = online(name, "--offline")
    if sharded:  # the index is in the cache, its shards are not
        assert offline.code == 3 and "shards named in" in offline.err
    else:
        assert "(estimate from config.json)" in offline.out


def test_other_answers_of_the_hub(hub_server, online):
    config = json.dumps(CONFIGS["gpt2"]).encode()
    hub_server.add("models/org/old", {"config.json": config, "pytorch_model.bin": b"pickle"})
    hub_server.add("models/org/odd", {"config.json": config, "model.safetensors": b"\xff" * 64})
    hub_server.add("models/org/none", {"README.md": b"no model"})
    found = json.loads(online("org/old", "--json").out)["parameters"]
    assert (found["count"], found["exact"], found["basis"]) == (PARAMETERS["gpt2"], False, "config.json")
    assert "pytorch_model.bin" not in hub_server.fetched()
    broken = online("org/odd")
    assert broken.code == 1 and "error: org/odd holds no safetensors" in broken.err
    for name, words in (("other", "the hub has no org/other"), ("none", "org/none holds no config.json")):
        missing = online(f"org/{name}")
        assert missing.code == 3 and words in missing.err
