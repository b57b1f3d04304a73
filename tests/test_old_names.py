"""Old spellings of flags, commands and recipe keys work, and warn."""

import pytest

from quantkit.cli import commands
from quantkit.quantize.prepare import old_names


@pytest.mark.parametrize(
    "typed, new, warned",
    [
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
    *moved, flag = new.split()
    flags = {name: flags_of(name) for name in (command, " ".join(moved) or command)}
    assert old not in flags[command]
    assert not flag.startswith("--") or flag in flags[" ".join(moved) or command]


def flags_of(name):
    return {flag for row in commands.build(name).params for flag in (*row.opts, *row.secondary_opts)}


def test_the_command_line_takes_old_spellings(quantkit, tmp_path):
    done = quantkit("distill", "missing", "--blocks", "2", "--text", tmp_path, "-q")
    assert done.code == 3 and done.err.splitlines()[:2] == [
        "warning: distill --blocks is now a command of its own: use quantkit shrink",
        "warning: --text is now --calibration",
    ]
