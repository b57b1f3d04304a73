"""Jobs of every method, moments to stop them at, and what must be true of whoever was stopped.

`tests/test_stops.py` stops each at every moment, `scripts/reliability.py kills` at random times."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path

import families
import forked

SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = ["--calibration", "../text.txt", "--samples", "4", "--seqlen", "16", "--batch-size", "2"]
PLAIN = ["--transform", "none", "--refine", "0"]
METHODS = {
    "gptq": [*TEXT, "--group-size", "64", "--refine", "0"],
    "gptq yaqa": ["--solver", "yaqa", *PLAIN, *TEXT, "--group-size", "64"],
    "awq": [*TEXT, "--group-size", "64", "--candidates", "3"],
    "nf4": [],
    "nf4 gptq": ["--solver", "gptq", "--transform", "none", *TEXT],
    "int8": [],
    "fp8": TEXT,
    "fp4": [*TEXT, *PLAIN],
    "w8a8": TEXT,
    "gguf": ["-t", "Q4_0", *PLAIN, *TEXT],
    "gguf rtn": ["-t", "Q8_0", "--solver", "rtn", "--imatrix", "none"],
    "imatrix": TEXT,
}
STOPS = {  # and the exit codes: while Python starts, SIGTERM simply ends the process
    signal.SIGKILL: (-9,),
    signal.SIGTERM: (143, -15),
    signal.SIGINT: (130,),
}
WORDS = {signal.SIGTERM: "terminated", signal.SIGINT: "interrupted"}
TIMINGS = "quantkit-timings.json"


def workplace(folder: Path) -> Path:
    """A folder with a model and a text; jobs run in folders inside it."""
    families.save_tokenizer(families.save_model(folder / "model", "llama", **SHAPE))
    (folder / "text.txt").write_text("\n".join(families.sentences()))
    return folder


def output(name: str) -> str:
    return "out.gguf" if name.partition(" ")[0] in ("gguf", "imatrix") else "out"


def command(name: str) -> list[str]:
    """Of a method."""
    method = name.partition(" ")[0]
    return [method, "../model", "-o", output(name), *METHODS[name], "--threads", "1"]


def again(name: str) -> list[str]:
    """The command that goes on."""
    return command(name) if name == "imatrix" else [*command(name), "--resume"]


def contents(place: Path) -> dict[str, bytes]:
    """Every file of an output, timings aside."""
    files = [place] if place.is_file() else [path for path in place.iterdir() if path.name != TIMINGS]
    return {path.name: path.read_bytes() for path in files}


def wrong(name: str, folder: Path, number: signal.Signals, code: int, replaces: bool = False) -> str | None:
    """What is wrong with the last words of a job that was sent a signal. replaces: there was an output."""
    log = forked.said(folder)
    if code not in STOPS[number]:
        return f"exit code {code}: {log[-600:]}"
    if code < 0:
        return "a traceback" if "Traceback" in log else None
    lines = log.splitlines()
    said = [line for line in lines if line.startswith(("error: ", "hint: "))]
    if said == lines == ["error: interrupted"] and number == signal.SIGINT:
        return None  # before there was a command to be repeated
    if len(said) != 2 or said != lines[-2:]:
        return f"not one error and one hint at the end: {lines[-6:]}"
    error, hint = said
    if not error.startswith(f"error: {WORDS[number]}"):
        return f"no line that says {WORDS[number]}: {error}"
    if "Traceback" in log or "Exception ignored" in log:
        return f"a traceback: {log[-600:]}"
    if f"{output(name)} finished" in error:
        return None if (folder / output(name)).exists() else f"no output: {said}"
    if (folder / output(name)).exists() and not replaces:
        return f"no word of the output: {said}"
    typed = shlex.split(hint.rpartition(": quantkit ")[2])
    typed = [word for word in typed if word != "--overwrite"]
    kept = (folder / f"{output(name)}.partial").exists()
    if typed != again(name) and (kept or typed != command(name)):
        return f"a hint that cannot be followed: {hint}"
    return None


def left(name: str, folder: Path) -> list[str]:
    """What lies beside a finished output, and should not."""
    expected = {output(name), f"{output(name)}.md", "reached", "count"}  # a GGUF file has a card next to it
    return sorted({path.name for path in folder.iterdir()} - expected)


# ---- moments: (what, the function just before which it is, the n-th call)

LOADING = [
    ("loading", "quantkit.models.skeleton:Skeleton.__init__", 1),
    ("loading", "quantkit.models.skeleton:Skeleton.load_rest", 1),
]
STAGED = [
    ("solving", "quantkit.quantize.solving:Quantizer._record", 3),
    ("staging", "quantkit.quantize.staging.blocks:save_file", 1),
    ("resuming", "quantkit.quantize.staging.folder:Staging.done", 1),
    ("staging", "os:replace", 2),
]
WRITTEN = {
    "out": ("assembling", "quantkit.models.files.safetensors_folder:write_file", 1),
    "out.gguf": ("assembling", "quantkit.quantize.outputs.gguf:GgufOutput.write", 1),
}
ENDING = [
    ("verifying", "quantkit.quantize.outputs.finish:_verify", 1),
    ("renaming", "os:rename", 1),
]


def moments(name: str) -> list[tuple[str, str, int]]:
    """Those of a method, in the order in which its jobs meet them."""
    if name == "imatrix":
        return [
            LOADING[0],
            ("solving", "quantkit.quantize.calibrate.importance:as_imatrix", 1),
            ("writing", "quantkit.models.gguf.imatrix:write", 1),
            ("renaming", "os:replace", 1),
        ]
    if name == "gguf rtn":  # nothing is staged
        return [LOADING[0], WRITTEN["out.gguf"], ("renaming", "os:rename", 1)]
    return [*LOADING, *STAGED, WRITTEN[output(name)], *ENDING]
