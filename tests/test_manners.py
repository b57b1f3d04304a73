"""What all commands have in common, command by command."""

import errno
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from rich.console import Console

from quantkit import cli, errors
from quantkit.cli import commands, running
from quantkit.cli.progress import Lines, Live, Quiet
from quantkit.cli.streams import listener
from quantkit.errors import EXIT_CODES, QuantkitError, printable
from quantkit.tables import make_table, print_facts, print_table, ranges

GROUP = {name: commands.build(name) for name in typer.main.get_command(cli.app).commands}
COMMANDS = {name: command for name, command in GROUP.items() if not hasattr(command, "commands")} | {
    f"{group} {name}": command
    for group, commands in GROUP.items()
    for name, command in getattr(commands, "commands", {}).items()
}
NO_RESULT = {"recipes show", "recipes init", "report"}  # they write or print a file
NO_PROGRESS = {"recipes list", "recipes show", "recipes init", "plan"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_same_manners(quantkit, name):
    short, long = (quantkit(*name.split(), flag) for flag in ("-h", "--help"))
    assert short == long and short.code == 0 and short.err == ""
    assert "\x1b" not in short.out
    assert re.search(rf"Examples:\s+quantkit {name}\b", short.out)
    flags = {flag for option in COMMANDS[name].params for flag in option.opts}
    assert {"--verbose", "-v"} <= flags
    assert "--json" in flags or name in NO_RESULT
    assert {"--quiet", "-q"} <= flags or name in NO_PROGRESS


def test_the_exit_codes_stand_in_help_and_docs(quantkit):
    help_text = " ".join(quantkit("--help").out.split())
    assert running.exit_codes() in help_text
    page = (Path(__file__).parents[1] / "docs" / "jobs.md").read_text()
    rows = dict(re.findall(r"^\| (\d+) \| (.*?) \|$", page, re.MULTILINE))
    assert {int(code): words for code, words in rows.items()} == EXIT_CODES
    named = {value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)}
    assert named | {0} == EXIT_CODES.keys()


# ---- errors


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("eval nowhere --text x --json", 3, "no such folder: nowhere"),
        ("inspect nowhere --json", 3, "no such folder: nowhere"),
        ("gptq model --bits four --json", 2, "invalid value for '--bits': 'four' is not a whole number"),
        ("gtpq --json", 2, "no such command 'gtpq'"),
    ],
)
def test_errors_are_json_where_json_was_asked_for(quantkit, arguments, code, words):
    done = quantkit(*arguments.split())
    error = json.loads(done.out)["error"]
    assert error.keys() == {"message", "hint", "exit_code"}
    assert done.code == error["exit_code"] == code and words in error["message"]
    assert done.err == f"error: {error['message']}\nhint: {error['hint']}\n"


def test_json_after_a_separator_is_no_flag(quantkit):
    assert quantkit("inspect", "--", "--json").out == ""


@pytest.fixture
def fails(monkeypatch, quantkit):
    """`fails(error, ...)`: `quantkit inspect` meets this error."""

    def run(error: BaseException, *arguments):
        def fail(*_, **__):
            raise error

        monkeypatch.setattr("quantkit.inspection.look.open_contents", fail)
        return quantkit("inspect", "x", *arguments)

    return run


def test_verbose_shows_where_an_error_comes_from(fails):
    cause = OSError("the cause")
    error = QuantkitError("it failed", "try again", 4)
    error.__cause__ = cause
    done = fails(error)
    assert (done.code, done.err) == (4, "error: it failed\nhint: try again\n")
    done = fails(error, "-v")
    assert done.code == 4 and done.err.endswith("\nerror: it failed\nhint: try again\n")
    assert done.err.startswith("OSError: the cause\n") and "Traceback (most recent call last)" in done.err


def test_our_own_mistakes_keep_their_traceback(fails):
    done = fails(KeyError("x"), "--json")
    assert done.code == 1 and done.err.startswith("Traceback") and "report" in done.err.splitlines()[-1]
    assert json.loads(done.out)["error"]["message"] == "KeyError: 'x'"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        ),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_memory_that_runs_out_has_its_code(fails, error):
    done = fails(error)
    assert done.code == 5 and "error: memory ran out: " in done.err


def test_an_interrupt_says_so_in_one_line(fails):
    said = "error: interrupted\nhint: begin again with: quantkit inspect x"
    assert fails(KeyboardInterrupt()) == (130, "", f"{said}\n")
    done = fails(KeyboardInterrupt(), "--json")
    assert done.err == f"{said} --json\n" and json.loads(done.out)["error"]["exit_code"] == 130


WAITS = """import sys, time
from quantkit import cli
from quantkit.models.files import headers
def wait(*_):
    print("ready", flush=True)
    time.sleep(60)
headers.open_contents = wait
sys.argv = ["quantkit", "inspect", "x"]
cli.main()"""
JOB = """import sys, time
from quantkit import cli
from quantkit.quantize.staging.folder import Staging
write = Staging.write_block
def wait(self, index, *rest):
    if index == 1:
        print("ready", flush=True)
        time.sleep(3)
    return write(self, index, *rest)
Staging.write_block = wait
cli.main()"""


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGINT, 130, b"error: interrupted\nhint: begin again with: quantkit inspect x\n"),
        (signal.SIGTERM, 143, b"error: terminated\nhint: begin again with: quantkit inspect x\n"),
    ],
)
def test_asked_to_stop_while_it_loads(number, code, said):
    """A real signal, to a real process, which hears SIGINT though these tests may run in the background."""
    hear = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", hear + WAITS], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (code, said)


FORKS = """import os, signal, time
from quantkit.cli import running
for handled in (running.handled([signal.SIGTERM], running._terminate), running.stopping()):
    with handled:
        for _ in range(50):
            if not (process := os.fork()):
                time.sleep(60)
            os.kill(process, signal.SIGTERM)
            print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))"""


def test_processes_that_a_library_forks_are_ended_by_sigterm():
    """At once, before they have started: lm-evaluation-harness does so with its workers."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=50)
    assert done.stdout.split() == [str(-signal.SIGTERM)] * 100, done.stderr


@pytest.mark.parametrize("width", [80, 36, 20])
@pytest.mark.parametrize("collapsed", [False, True])
def test_a_narrow_terminal_cuts_neither_names_nor_numbers(width, collapsed):
    """Names are broken at 12 characters, then the table is wider than the terminal."""
    table = make_table("weights", "size", "model bits", "tokens/s")
    table.collapse_padding = collapsed
    rows = (["Q4_K_M", "103.67 MB", "6.17", "5,090"], ["a" * 24, "91.72 MB", "5.46", "5,417"])
    for row in rows:
        table.add_row(*row)
    print_table(Console(file=(out := io.StringIO()), width=width), table)
    printed = [line.split() for line in out.getvalue().splitlines()[3:] if line.strip()]
    assert printed[0] == "Q4_K_M 103.67 MB 6.17 5,090".split()
    assert (
        "".join(line[0] for line in printed[1:]) == "a" * 24
        and printed[1][1:] == "91.72 MB 5.46 5,417".split()
    )
    assert len(printed) == (2 if width == 80 else 3)


@pytest.mark.nightly
def test_a_job_in_the_background_hears_what_its_shell_lets_it(tiny_model, quantkit, tmp_path):
    """`nohup quantkit ... &` in a script: neither a closed terminal nor Ctrl-C ends it, but `kill` does."""
    model = tiny_model("llama", tokenizer=True)
    options = "-o out --samples 2 --seqlen 16 --group-size 32 --threads 1 --transform none".split()
    command = [sys.executable, "-c", JOB, "gptq", str(model), *options]
    shell = ["sh", "-c", 'nohup "$@" & echo $!; wait $!', "sh", *command]
    process = subprocess.Popen(
        shell,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    job = int(process.stdout.readline())
    assert process.stdout.readline() == "ready\n"
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.kill(job, number)
    _, err = process.communicate(timeout=60)
    *_, error, hint = err.splitlines()
    assert process.returncode == 143
    assert error == "error: terminated; finished blocks are kept in out.partial"
    assert hint.endswith(" --resume") and (tmp_path / "out.partial" / "block-00000.safetensors").exists()
    done = quantkit("gptq", model, *options, "--resume")
    assert done.code == 0, done.err
    assert (tmp_path / "out" / "config.json").exists() and not (tmp_path / "out.partial").exists()


def test_what_strangers_write_cannot_steer_the_terminal(fails):
    assert printable("a\x1b[2Jb\tc\nd\x9b\x00é안") == "a\ufffd[2Jb\tc\nd\ufffd\ufffdé안"
    assert printable("\ud800 \u202eabc") == "\ufffd \ufffdabc"
    assert fails(QuantkitError("a\x1bb", "c\x07d")).err == "error: a\ufffdb\nhint: c\ufffdd\n"


def test_what_strangers_write_is_no_error_of_pages(fails):
    said = fails(QuantkitError(f"rope_type {'x' * 5000!r} is not known", "1, " * 5000)).err.splitlines()
    assert said[0] == f"error: rope_type '{'x' * 59}…{'x' * 19}' is not known"
    assert len(said[1]) == len("hint: ") + 1600 and said[1].count("…") == 1
    path = "/".join(["folder"] * 50)
    assert fails(QuantkitError(f"no such folder: {path}")).err == f"error: no such folder: {path}\n"


def test_long_facts_are_wrapped_on_terminals_alone():
    """Between words, below where they began; a path that is too long stays whole."""
    path = "/a/path/that/has-no-place-to-be-cut/because-it-is-one"
    facts = {"words": "one two three four five six seven", "path": f"in {path}"}
    for width, expected in (
        (30, ["words        one two three", " " * 13 + "four five six", " " * 13 + "seven",
              "path         in", " " * 13 + path]),
        (None, ["words        one two three four five six seven", f"path         in {path}"]),
    ):  # fmt: skip
        out = io.StringIO()
        print_facts(Console(file=out, width=width, force_terminal=width is not None, no_color=True), facts)
        assert [line.rstrip() for line in out.getvalue().splitlines()] == expected


@pytest.mark.parametrize(("width", "lines"), [(120, 1), (80, 3), (61, 10)])
def test_lists_wrap_before_names_and_numbers_break(width, lines):
    """At 61 columns the list has room for one number of two digits per line."""
    table = make_table("linears", "blocks", "shape", "quantized to")
    table.add_row("ffn_down_shexp.weight", ranges(range(0, 28, 2)), "49152 × 576", "Q5_K")
    print_table(Console(file=(out := io.StringIO()), width=width), table, 1)
    _, _, _, first, *rest = [line.rstrip() for line in out.getvalue().splitlines()]
    assert max(map(len, [first, *rest])) <= width and len([line for line in [first, *rest] if line]) == lines
    assert first.split()[0] == "ffn_down_shexp.weight" and first.endswith("49152 × 576           Q5_K")


def test_a_long_name_is_broken_where_nothing_else_can_give():
    table = make_table("linears", "blocks", "shape")
    table.add_row("a" * 40, "0, 11", "64 × 128")
    print_table(Console(file=(out := io.StringIO()), width=40), table, 1)
    rows = [line.rstrip() for line in out.getvalue().splitlines()][3:]
    assert "".join(row.split()[0] for row in rows if row) == "a" * 40
    assert rows[0].endswith("64 × 128") and max(map(len, rows)) <= 40


@pytest.mark.nightly
def test_verbose_lets_the_libraries_speak(fails):
    """They read their levels when they are imported: here, in a process of its own."""
    levels = ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY")
    fails(QuantkitError("it failed"))
    assert {name: os.environ.get(name) for name in levels} == dict(zip(levels, (None, "error"), strict=True))
    fails(QuantkitError("it failed"), "-v")
    assert [os.environ[name] for name in levels] == ["info", "info"]
    script = (
        "import quantkit.models.files.checkpoint, transformers; print(transformers.logging.get_verbosity())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == logging.INFO


# ---- progress


def lines(capsys, silence: float) -> list[str]:
    """What a log hears of a job that hashes for a while, and then waits in a block."""
    progress = Lines(silence)
    progress.phase("hashing the source")
    time.sleep(0.25)
    progress.start(3, 0)
    progress.block(0, replayed=False)
    time.sleep(0.25)
    progress.counting("reading the weights", 2, 9)
    time.sleep(0.25)
    progress.close()
    time.sleep(0.1)
    return capsys.readouterr().err.splitlines()


def test_a_log_hears_that_the_job_is_alive(capsys):
    heard = lines(capsys, 0.1)
    assert heard[0] == "hashing the source"
    for words in (
        "still hashing the source (00:00)",
        "still in block 2/3 (00:00)",
        "still reading the weights: 2 of 9 done (00:00)",
    ):
        assert 1 <= heard.count(words) <= 3, heard
    assert len(lines(capsys, 30)) == 2


def test_a_bar_tells_what_remains_not_what_has_passed(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("quantkit.cli.progress.time.monotonic", lambda: now[0])
    bar = Live()
    for what, done, seconds, expected in (
        ("evaluating a", 0, 0, "left --:--"),
        ("evaluating a", 2, 10, "left 00:20"),
        ("evaluating a", 6, 30, "left 00:00"),
        ("evaluating b", 0, 0, "left --:--"),
        ("evaluating b", 3, 60, "left 01:00"),
    ):
        now[0] += seconds
        bar.counting(what, done, 6)
        (task,) = bar._bar.tasks
        assert (task.description, task.completed, task.fields["left"]) == (what, done, expected)
        assert task.fields["steps"] == f"{done}/6"
    bar.close()


@pytest.mark.parametrize("listener", (Lines, Live))
def test_counts_that_alternate_keep_their_own_time(listener, monkeypatch):
    """The search for bits counts units, and the predictions of each walk between them."""
    now = [100.0]
    monkeypatch.setattr("quantkit.cli.progress.time.monotonic", lambda: now[0])
    progress = listener()
    for what, done, seconds, left in (
        ("units", 4, 0, None),  # an earlier run measured four
        ("units", 6, 20, "00:40"),
        ("predictions", 0, 0, None),
        ("predictions", 5, 10, "00:10"),
        ("predictions", 10, 10, "00:00"),
        ("units", 7, 0, "00:40"),
        ("predictions", 0, 0, None),
    ):
        now[0] += seconds
        progress.counting(what, done, 10)
        if listener is Live:
            assert progress._bar.tasks[0].fields["left"] == f"left {left or '--:--'}"
        else:
            assert progress._doing == f"{what}: {done} of 10 done" + (f", left {left}" if left else "")
    progress.close()


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
def test_a_full_disk_is_no_mistake_of_ours(flags):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "quantkit", "recipes", "list", *flags],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 5
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: the disk is full") and hint.startswith("hint: free some space")


def test_a_disk_that_is_full_elsewhere_leaves_stdout_its_error(fails):
    said = fails(OSError(errno.ENOSPC, "No space left on device", "cache"), "--json")
    record = json.loads(said.out)
    assert record["error"]["exit_code"] == 5 and "the disk is full" in record["error"]["message"]


def test_a_reader_that_goes_away_is_no_failure():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "quantkit", "recipes", "list"], stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize(
    ("tty", "term", "quiet", "kind"),
    [
        (True, "xterm", False, Live),
        (True, "dumb", False, Lines),
        (False, "xterm", False, Lines),
        (True, "xterm", True, Quiet),
    ],
)
def test_the_listener_fits_the_place(monkeypatch, tty, term, quiet, kind):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: tty, raising=False)
    with listener(quiet) as progress:
        assert type(progress) is kind


# ---- completion


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("insp", {"inspect"}),
        ("gptq --solv", {"--solver"}),
        ("gptq --solver ", {"gptq", "yaqa", "rtn"}),
        ("run int", {"int8"}),
        ("recipes init nf", {"nf4"}),
        ("gguf model -t Q4_K", {"Q4_K_S", "Q4_K_M"}),
        ("gptq model --recipe gptq-w3", {"gptq-w3"}),
    ],
)
def test_shells_complete_commands_flags_and_recipes(quantkit, monkeypatch, words, offered):
    line = f"quantkit {words}".split(" ")
    monkeypatch.setenv("_QUANTKIT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(line))
    monkeypatch.setenv("COMP_CWORD", str(len(line) - 1))
    done = quantkit()
    assert set(done.out.split()) == offered and done.err == ""
