"""`quantkit serve` end to end: llama.cpp's server and `transformers serve`, asked by the `openai` client.

One start of each. What they answer is what transformers computes here.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import gguf_files
import openai
import psutil
import pytest
import torch
import transformers
from nights import nightly

from quantkit import cli
from quantkit.quantize.progress import SILENT
from quantkit.serving.server import job
from quantkit.serving.server.process import TOKENS as FIRST_TOKENS
from quantkit.serving.server.process import serving
from quantkit.serving.server.settings import ServeSettings
from quantkit.text import template_worker

PROMPT, TOKENS = "Once upon a time", 6
NO_TEMPLATE = "warning: the model has no chat template: use /v1/completions, not /v1/chat/completions\n"
SECONDS = 120  # after which a test that waits for a server gives up


@pytest.fixture(scope="module")
def expected(demo_model) -> str:
    """The likeliest continuation, by transformers in this process."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model)
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt")
    made = model.generate(**ids, max_new_tokens=TOKENS, do_sample=False)
    return tokenizer.decode(made[0, ids["input_ids"].shape[1] :])


@pytest.fixture(scope="module")
def gguf(demo_model, tmp_path_factory) -> Path:
    """The demo model in 16 bit, for llama.cpp, by the command itself."""
    path = tmp_path_factory.mktemp("gguf") / "demo.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["quantkit", "gguf", str(demo_model), "-t", "F16", "-o", str(path), "-q"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert not ended.value.code
    return path


@contextmanager
def command_line(*arguments):
    """`quantkit serve …` as a user starts it, until it has printed its record: the process, and that."""
    command = [sys.executable, "-m", "quantkit", "serve", *arguments]
    env = os.environ | {"QUANTKIT_API_KEY": "hush", "PATH": os.path.dirname(sys.executable)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=env, preexec_fn=_heed_sigint, **pipes)
    timer = threading.Timer(SECONDS, process.kill)
    timer.start()
    try:
        text = ""
        while not text.endswith("\n}\n") and (line := process.stdout.readline()):
            text += line
        if not text:
            pytest.fail(process.stderr.read())
        yield process, json.loads(text)
    finally:
        timer.cancel()
        if process.poll() is None:
            process.terminate()
        process.communicate()


def _heed_sigint() -> None:
    """As in the foreground: a shell has its background jobs ignore it, and tests may run in one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def asked(client: openai.OpenAI, model: str, **options):
    return client.completions.create(model=model, prompt=PROMPT, max_tokens=TOKENS, **options)


def test_llamacpp_from_the_start_to_ctrl_c(gguf, expected):
    """All in one test, for one start: tests of a file may run in several processes."""
    pytest.importorskip("xllamacpp")
    flags = ["--port", "0", "--json", "-q", "--parallel", "2", "--ctx", "128", "--device", "cpu"]
    with command_line(gguf, *flags) as (process, told):
        (engine,) = psutil.Process(process.pid).children()
        assert engine.cmdline() == told["argv"]
        check_record(told)
        check_answers(told["url"], expected)
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
        assert not engine.is_running() and process.stdout.read() + process.stderr.read() == NO_TEMPLATE


def test_what_a_server_would_compute_is_compared(gguf, monkeypatch):
    """As with `--check`, before anything starts."""
    pytest.importorskip("xllamacpp")
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    prepared = job.prepare(str(gguf), ServeSettings(port=0, device="cpu"))
    told = job.compare(prepared, None, True, SILENT)
    assert told["agrees"] and told["tokens"] == 63


@pytest.mark.nightly
def test_llamacpp_is_compared_before_it_serves(gguf):
    pytest.importorskip("xllamacpp")
    with command_line(gguf, "--check", "--port", "0", "--json", "-q", "--device", "cpu") as (process, told):
        assert told["compared"]["agrees"] and told["compared"]["tokens"] == 63 and told["proof"]["text"]
        assert process.wait(SECONDS) == 0


def check_record(told: dict) -> None:
    assert (told["schema"], told["engine"], told["tried"]) == ("quantkit.serve/1", "llama.cpp", True)
    assert told["proof"]["usage"]["completion_tokens"] == FIRST_TOKENS and told["proof"]["text"]
    assert (told["room"]["ctx"], told["room"]["parallel"]) == (128, 2)
    assert "hush" not in json.dumps(told) and told["api_key"]


def check_answers(url: str, expected: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="hush", max_retries=0)
    assert [row.id for row in client.models.list()] == ["demo"]
    assert asked(client, "demo", temperature=0).choices[0].text == expected
    chunks = [chunk.choices[0].text for chunk in asked(client, "demo", temperature=0, stream=True)]
    assert "".join(chunks) == expected and len([chunk for chunk in chunks if chunk]) == TOKENS
    with pytest.raises(openai.AuthenticationError):
        asked(openai.OpenAI(base_url=url, api_key="wrong", max_retries=0), "demo")


@pytest.mark.nightly
def test_transformers_serves(demo_model, expected, monkeypatch):
    """Its proof was its first request, which samples as the model's own files say: by the likeliest token."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # several that wait for each other spin where cores are shared
    settings = ServeSettings(
        engine="transformers", port=0, dtype="float32", device="cpu", start_timeout=SECONDS
    )
    prepared = job.prepare(str(demo_model), settings)
    assert "--continuous-batching" in prepared.command.argv
    with serving(prepared) as (_, proof):
        assert proof["text"].startswith(expected)
        client = openai.OpenAI(base_url=prepared.url, api_key="none", max_retries=0)
        assert asked(client, prepared.command.model).choices[0].text == expected
        streams = [asked(client, prepared.command.model, stream=True) for _ in range(3)]
        texts = ["".join(chunk.choices[0].text for chunk in stream) for stream in streams]
        assert texts == [expected] * 3


def test_the_command_is_printed_and_nothing_is_started(quantkit, demo_model):
    asked = ("serve", demo_model, "--print", "--device", "cpu", "--port", "0", "--ctx", "256", "--offline")
    done = quantkit(*asked)
    words = shlex.split(done.out)
    told = quantkit(*asked, "--json", "-q")
    assert told.err == NO_TEMPLATE
    told = json.loads(told.out)
    port = words.index("--port") + 1
    assert told["proof"] is None and "HF_HUB_OFFLINE=1" in words and words.count(str(demo_model)) == 1
    assert told["env"].items() >= {"HF_HUB_OFFLINE": "1"}.items()
    assert told["argv"][-1] == words[-1] and words[port] != "0" and done.out.count("\n") == 1
    assert told["room"]["ctx"] == 256
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        printed = quantkit("serve", demo_model, "--print", "--device", "cpu", "--port", port, "--offline")
    assert printed.code == 0 and port in shlex.split(printed.out)


def test_what_is_refused_before_anything_starts(refuse, demo_model, tiny_model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        error, hint = refuse(2, "serve", demo_model, "--port", taken.getsockname()[1])
    assert "Address already in use" in error and "--port" in hint
    error, hint = refuse(4, "serve", demo_model, "--engine", "llama.cpp", "--port", 0)
    assert "llama.cpp cannot serve" in error and "it reads GGUF files" in error and "transformers can" in hint
    error, _ = refuse(4, "serve", tiny_model("llama"), "--port", 0)
    assert "has no tokenizer" in error
    broken = Path(shutil.copytree(demo_model, "broken"))
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:-1000])
    error, hint = refuse(1, "serve", "broken", "--port", 0)
    assert "quantkit inspect" in hint or "again" in hint
    error, _ = refuse(5, "serve", demo_model, "--port", 0, "--device", "cpu", "--ctx", "1000m")
    assert "do not fit" in error


RUNAWAYS = {
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}": "it calls itself without end",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "it does not end",
    "{{ raise_exception('not you') }}": "a question does not fit the chat template: not you",
}


@pytest.mark.parametrize("key", ["tokenizer.chat_template", *nightly("tokenizer.chat_template.tool_use")])
@pytest.mark.parametrize("template", RUNAWAYS)
def test_a_template_that_runs_away_is_not_served(tiny_model, tmp_path, refuse, monkeypatch, key, template):
    """llama.cpp's server would run it in its own process, without limits."""
    pytest.importorskip("xllamacpp")
    monkeypatch.setattr(template_worker, "SECONDS", 3.0)
    path = gguf_files.export(tiny_model("llama"), tmp_path / "m.gguf", extra={key: template})
    error, hint = refuse(2 if "not you" in template else 4, "serve", path, "--port", 0, "--device", "cpu")
    assert error.startswith(f"{path} cannot be served: ") and error.endswith(RUNAWAYS[template])
    assert "quantkit chat" in hint
