"""`quantkit serve` of every layout in every engine that is here, asked by the `openai` client.

    scripts/clients-setup.sh vllm && PATH=.venv-vllm/bin:$PATH python scripts/serve_engines.py [ENGINE …]

For each cell the demo model is compressed, served, asked for a completion and a stream, put under load by one
and by several users, and stopped by SIGTERM; nothing may be left running. Writes the section `served` of
docs/serve.md, if all engines are asked for. An engine that is not here is a row that says so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from client_runs import DEMO, ROOT, Failed, quantkit_logged, table, write_section

USERS = (1, 4)
PROMPT, TOKENS = "Once upon a time", 16
CELLS = {  # engine -> commands that compress; "" is the model itself
    "transformers": ["", "int8", "nf4"],
    "llama.cpp": ["gguf -t F16", "gguf -t Q8_0", "gguf -t Q4_K_M"],
    "vllm": ["", "gptq", "awq", "gptq --layout compressed-tensors"],
}
EXTRA = {"vllm": ["--", "--enforce-eager"]}  # compiling a model this small takes minutes and gains nothing
HEADER = ["engine", "command", "healthy after", "greedy equal", "streamed", "tokens/s, 1 user",
          "4 users", "left running"]  # fmt: skip


def checkpoint(command: str, root: Path) -> Path:
    """The demo model, compressed."""
    if not command:
        return DEMO
    name = command.replace(" ", "").replace("--", "-")
    path = root / (f"{name}.gguf" if command.startswith("gguf") else name)
    if not path.exists():
        method, *flags = command.split()
        quantkit_logged([method, str(DEMO), "-o", str(path), *flags], root / f"{name}.log")
    return path


def greedy(path: Path, root: Path) -> str:
    """What quantkit itself generates from it."""
    command = [sys.executable, "-m", "quantkit", "generate", path, "-p", PROMPT, "-n", str(TOKENS)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--json", "-q"], env=env, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise Failed(done.stderr)
    return json.loads(done.stdout)["models"][0]["text"]


def row(engine: str, command: str, root: Path) -> list[str]:
    """One cell, from the start of the server to its end."""
    path = checkpoint(command, root)
    expected = greedy(path, root)
    flags = ["--engine", engine, "--port", "0", "--json", "-q", "--device", "cpu", *EXTRA.get(engine, [])]
    argv = [sys.executable, "-m", "quantkit", "serve", str(path), *flags]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    log = (root / "serve.log").open("w")
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True, env=env, cwd=root)
    try:
        text = ""
        while not text.endswith("\n}\n") and (line := server.stdout.readline()):
            text += line
        told = json.loads(text or "{}")
        if "url" not in told:
            raise Failed((root / "serve.log").read_text())
        found = ask(told, expected)
        children = descendants(server.pid)
        server.terminate()
        code = server.wait(60)
        time.sleep(1)
        left = [pid for pid in children if alive(pid)]
        end = f"{len(left)} of {len(children)}, exit code {code}"
        return [engine, shown(command), f"{told['proof']['started_seconds']:.0f} s", *found, end]
    finally:
        if server.poll() is None:
            server.terminate()
            server.wait(60)


def ask(told: dict, expected: str) -> list[str]:
    """Whether it answers as it should, whole and in a stream, and how fast under load."""
    import openai

    from quantkit.serving.endpoint.load import Settings, measure

    client = openai.OpenAI(base_url=told["url"], api_key="none", max_retries=0)
    options = {"model": told["model"], "prompt": PROMPT, "max_tokens": TOKENS}
    options |= {} if told["engine"] == "transformers" else {"temperature": 0}  # its files say it, see docs
    text = client.completions.create(**options).choices[0].text
    chunks = [c.choices[0].text for c in client.completions.create(**options, stream=True) if c.choices]
    alike = len(os.path.commonprefix([text.split(), expected.split()]))
    streamed = "the same" if "".join(chunks) == text else "another text"
    load = Settings(USERS, requests=8, prompt_words=64, output_tokens=32)
    levels = measure(told["url"], load)["levels"]
    assert not any(level["errors"] for level in levels), levels
    speeds = [f"{level['output_tokens_per_second']:.0f}" for level in levels]
    return [f"{alike} of {len(expected.split())} words", streamed, *speeds]


def descendants(pid: int) -> list[int]:
    """Processes below it."""
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def alive(pid: int) -> bool:
    """Whether it runs, not only waits for its parent to take notice of its end."""
    import psutil

    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def shown(command: str) -> str:
    return f"`{command}`" if command else "not compressed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"of {', '.join(CELLS)}: printed alone")
    parser.add_argument("--keep", type=Path, help="keep checkpoints here, and use what is there")
    parser.add_argument("--no-write", action="store_true", help="leave docs/serve.md alone")
    args = parser.parse_args()
    if unknown := set(args.engines) - set(CELLS):
        parser.error(f"no engine is called {min(unknown)}")
    sys.path.insert(0, str(ROOT))
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        root = (args.keep or Path(temporary)).absolute()
        root.mkdir(parents=True, exist_ok=True)
        for engine in args.engines or CELLS:
            for command in CELLS[engine]:
                try:
                    rows.append(row(engine, command, root))
                except Failed as error:
                    why = str(error).strip().splitlines()[-1][:200]
                    rows.append([engine, shown(command), f"FAIL: {why}", *[""] * (len(HEADER) - 3)])
                print(" | ".join(rows[-1]), flush=True)
    text = table(HEADER, rows)
    if args.no_write or args.engines:
        print(text)
    else:
        write_section("served", text, ROOT / "docs/serve.md")


if __name__ == "__main__":
    main()
