"""The commands that are handed over to: flags of each engine, refusals, keys, ports. Nothing is started."""

import shlex
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError
from quantkit.serving.engines import llama_server, llamacpp
from quantkit.serving.server import command as commands
from quantkit.serving.server.command import SERVERS, ServerCommand
from quantkit.serving.server.settings import ServeSettings, free_port
from quantkit.serving.server.sizing import ServerSize


@pytest.fixture(autouse=True)
def no_programs(monkeypatch):
    """Whatever is on this machine's PATH: engines of this Python alone."""
    monkeypatch.setattr(commands.shutil, "which", lambda name: None)


def command(engine: str, model="/models/m", on_cpu=True, parallel=4, **settings) -> ServerCommand:
    size = ServerSize(1024, parallel, 3 << 29, 3000, 10**6, 10**10, on_cpu)
    return SERVERS[engine][0](model, "m", ServeSettings(port=8123, **settings), size)


def flags(made: ServerCommand) -> dict[str, str]:
    """Flag -> what follows it."""
    return {a: b for a, b in zip(made.argv, (*made.argv[1:], ""), strict=True) if a.startswith("--")}


def test_llamacpp_reserves_all_sequences(monkeypatch):
    made = command("llama.cpp", "/models/m.gguf", kv_dtype="q8_0", device="cpu")
    assert made.argv[:3] == (sys.executable, "-m", "quantkit.serving.engines.llama_server")
    assert flags(made) == {
        "--model": "/models/m.gguf", "--alias": "m", "--host": "127.0.0.1", "--port": "8123",
        "--ctx-size": "4096", "--parallel": "4", "--cache-type-k": "q8_0", "--cache-type-v": "q8_0",
        "--n-gpu-layers": "0",
    }  # fmt: skip
    monkeypatch.setattr(commands.shutil, "which", lambda name: f"/bin/{name}")
    own = command("llama.cpp", "/models/m.gguf", kv_dtype="q8_0", device="cpu")
    assert own.argv[0] == "/bin/llama-server" and own.argv[1:] == made.argv[3:]


def test_the_wheels_server_takes_what_llama_server_takes(monkeypatch, tmp_path):
    xllamacpp = pytest.importorskip("xllamacpp")
    (tmp_path / "m.gguf").touch()
    made = command("llama.cpp", str(tmp_path / "m.gguf"), kv_dtype="q8_0", device="cpu", host="::1")
    started = []

    def start(params):
        started.append(params)
        return SimpleNamespace(listening_address="")

    monkeypatch.setattr(xllamacpp, "Server", start)
    monkeypatch.setattr(llama_server.signal, "signal", lambda *arguments: None)
    monkeypatch.setattr(llama_server.signal, "pause", lambda: None)
    monkeypatch.setenv("LLAMA_API_KEY", "secret")
    assert CliRunner().invoke(llama_server.app, made.argv[3:]).exit_code == 0
    (found,) = started
    assert (found.model.path, found.model_alias) == (str(tmp_path / "m.gguf"), {"m"})
    assert (found.hostnames, found.port, found.api_keys) == (["::1"], 8123, ["secret"])
    assert (found.n_ctx, found.n_parallel, found.n_gpu_layers) == (4096, 4, 0)
    q8_0 = xllamacpp.ggml_type.GGML_TYPE_Q8_0
    assert (found.cache_type_k, found.cache_type_v) == (q8_0, q8_0)
    refused = CliRunner().invoke(llama_server.app, [*made.argv[3:], "--cache-type-k", "q9"])
    assert refused.exit_code == 1 and len(started) == 1
    refused = CliRunner().invoke(llama_server.app, [*made.argv[3:], "--rope", "1"])
    assert refused.exit_code == 2 and "No such option: --rope" in refused.output


def test_mlx_names_the_model_by_its_folder():
    made = command("mlx", extra=("--kv-bits", "8"))
    assert made.argv[1:3] == ("-m", "mlx_lm.server") and made.model == "/models/m"
    told = flags(made)
    assert (told["--model"], told["--host"], told["--port"]) == ("/models/m", "127.0.0.1", "8123")
    assert (told["--decode-concurrency"], told["--kv-bits"]) == ("4", "8")


def test_transformers_batches_continuously():
    made = command("transformers", dtype="float32", device="cpu")
    assert made.argv[made.argv.index("serve") + 1] == "/models/m" == made.model
    assert "--continuous-batching" in made.argv and any("first request" in note for note in made.notes)
    told = flags(made)
    assert (told["--cb-num-blocks"], told["--dtype"], told["--device"]) == ("12", "float32", "cpu")
    assert flags(command("transformers", on_cpu=False))["--cb-max-memory-percent"] == "0.9"
    alone = command("transformers", parallel=1)
    assert "--continuous-batching" not in alone.argv and alone.notes == ()


def test_vllm_on_a_cpu_and_on_a_gpu(monkeypatch, tmp_path):
    made = command("vllm", kv_dtype="fp8", trust_remote_code=True)
    assert (
        made.argv[:3] == (sys.executable, "-m", commands.VLLM) and made.env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    )
    told = flags(made)
    assert (told["--model"], told["--served-model-name"]) == ("/models/m", "m")
    assert (told["--max-model-len"], told["--max-num-seqs"], told["--kv-cache-dtype"]) == ("1024", "4", "fp8")
    assert "--trust-remote-code" in told and "--gpu-memory-utilization" not in told
    made = command("vllm", on_cpu=False, device="cuda:1", memory_fraction=0.5)
    assert flags(made)["--gpu-memory-utilization"] == "0.5"
    assert made.env["CUDA_VISIBLE_DEVICES"] == "1" and "VLLM_CPU_KVCACHE_SPACE" not in made.env
    monkeypatch.setattr(commands.shutil, "which", lambda name: str(tmp_path / name))
    assert command("vllm").argv[:3] == (str(tmp_path / "vllm"), "serve", "/models/m")
    (tmp_path / "python").touch()
    assert command("vllm").argv[0] == str(tmp_path / "python")


@pytest.mark.parametrize(
    ("engine", "settings", "said"),
    [
        ("transformers", {"api_key": "k"}, "takes no API key"),
        ("mlx", {"api_key": "k"}, "mlx_lm.server takes no API key"),
        ("mlx", {"dtype": "float32"}, "computes in the type of the model"),
        ("transformers", {"kv_dtype": "fp8"}, "in the precision of the model"),
        ("transformers", {"model": "/models/a@b"}, "takes what follows @"),
        ("llama.cpp", {"kv_dtype": "fp8"}, "--kv-dtype fp8: llama.cpp has no such cache"),
        ("llama.cpp", {"dtype": "float16"}, "computes in the types of the file"),
        ("vllm", {"kv_dtype": "q4_0"}, "--kv-dtype q4_0: vLLM has no such cache"),
    ],
)
def test_what_an_engine_has_no_flag_for(engine, settings, said):
    with pytest.raises(QuantkitError) as refused:
        command(engine, **settings)
    assert said in refused.value.message and refused.value.exit_code == UNSUPPORTED and refused.value.hint


def test_a_cache_that_llama_cpp_does_not_have_is_refused_in_one_wording():
    """By `serve`, and by `chat` and `bench`, which run it in their process."""
    for refused in (
        lambda: command("llama.cpp", kv_dtype="int8"),
        lambda: llamacpp.parameters(Path("m.gguf"), 32, 1, kv_dtype="int8"),
    ):
        with pytest.raises(QuantkitError) as caught:
            refused()
        assert caught.value.record()["error"] == {
            "message": "--kv-dtype int8: llama.cpp has no such cache",
            "hint": "choose one of float32, bfloat16, float16, q8_0, q4_0",
            "exit_code": UNSUPPORTED,
        }


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp"])
def test_the_key_is_in_the_environment_alone(engine):
    made = command(engine, "/models/it's m.gguf", api_key="hush")
    assert "hush" not in made.line() + repr(made) + "".join(made.argv)
    assert "hush" in made.environment().values() and '="$QUANTKIT_API_KEY" ' in made.line()
    words = shlex.split(made.line())
    assert tuple(words[-len(made.argv) :]) == made.argv


def test_further_arguments_come_last():
    assert command("vllm", extra=("--enforce-eager", "-x")).argv[-2:] == ("--enforce-eager", "-x")


def test_ports():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(QuantkitError) as refused:
            free_port("127.0.0.1", port)
        assert (
            refused.value.exit_code == USAGE
            and f"--host 127.0.0.1 --port {port} cannot be used: Address already" in refused.value.message
        )
        assert free_port("127.0.0.1", 0) not in (0, port)
    assert free_port("127.0.0.1", port) == port
    with pytest.raises(QuantkitError, match="192.0.2.1 --port 0 cannot be used: Cannot assign"):
        free_port("192.0.2.1", 0)
    with pytest.raises(QuantkitError, match="--host ü.. --port 0 cannot be used: "):
        free_port("ü..", 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000},
        {"parallel": 0},
        {"memory_fraction": 0.0},
        {"start_timeout": 0.0},
        {"api_key": " "},
        {"api_key": "a\nb"},
    ],
)
def test_settings_that_make_no_sense(wrong):
    with pytest.raises(QuantkitError) as refused:
        ServeSettings(**wrong).check()
    assert refused.value.exit_code == USAGE


def test_an_address_for_all_is_none_to_connect_to():
    assert ServeSettings(host="0.0.0.0").reached_at == "127.0.0.1"
    assert ServeSettings(host="::").reached_at == "[::1]"
