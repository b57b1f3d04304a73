"""Old spellings of flags, commands and recipe keys work, and warn."""

import pytest

from quantkit.cli import commands
from quantkit.quantize.prepare import old_names


@pytest.mark.parametrize(
    "typed, new, warned",
    [
        (
            "bench M --attn eager,sdpa --prompt 8",
            "bench attention M --implementations eager,sdpa --prompt-tokens 8",
            [
                "bench --attn is now a command of its own: use quantkit bench attention",
                "--prompt is now --prompt-tokens",
            ],
        ),
        (
            "bench M --batching=static",
            "bench batching M --policies=static",
            ["bench --batching is now a command of its own: use quantkit bench batching"],
        ),
        (
            "bench --prompt 9 --url http://x --remote",
            "bench server --prompt-words 9 http://x --allow-remote",
            [
                "bench --url is now a command of its own: use quantkit bench server",
                "--prompt is now --prompt-words",
                "--remote is now --allow-remote",
            ],
        ),
        ("plan M --method nf4", "plan M --format nf4", ["--method is now --format"]),
        ("specdec T D --text a", "specdec T D --prompt-text a", ["--text is now --prompt-text"]),
        ("distill T S --text=a.txt", "distill T S --calibration=a.txt", ["--text is now --calibration"]),
        (
            "distill T --blocks 2 --text a.txt",
            "shrink T --blocks 2 --calibration a.txt",
            [
                "distill --blocks is now a command of its own: use quantkit shrink",
                "--text is now --calibration",
            ],
        ),
    ],
)
def test_old_spellings_become_new_ones_with_a_warning(typed, new, warned, capsys):
    command, *arguments = typed.split()
    command, arguments = old_names.renewed(command, arguments)
    assert " ".join([command, *arguments]) == new
    assert capsys.readouterr().err == "".join(f"warning: {text}\n" for text in warned)


def test_what_follows_two_dashes_and_new_spellings_stay(capsys):
    assert old_names.renewed("distill", ["T", "--", "--text"]) == ("distill", ["T", "--", "--text"])
    assert old_names.renewed("eval", ["--text", "x"]) == ("eval", ["--text", "x"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "command, old, new", [(c, *row) for c in old_names.OLD for row in old_names.OLD[c].items()]
)
def test_only_new_spellings_are_in_the_help(command, old, new):
    moved, _, flag = new.rpartition(" ")
    assert old not in flags_of(command)
    assert not flag or flag in flags_of(moved or command)


def flags_of(name):
    return {flag for row in commands.build(name).params for flag in (*row.opts, *row.secondary_opts)}


def test_the_command_line_takes_old_spellings(quantkit, tmp_path):
    done = quantkit("distill", "missing", "--blocks", "2", "--text", tmp_path, "-q")
    assert done.code == 3 and done.err.splitlines()[:2] == [
        "warning: distill --blocks is now a command of its own: use quantkit shrink",
        "warning: --text is now --calibration",
    ]
