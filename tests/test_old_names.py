"""Old spellings of flags, commands and recipe keys work, and warn."""

import pytest

from quantkit.cli import commands
from quantkit.errors import QuantkitError
from quantkit.quantize.prepare import old_names, recipe


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
        ("gptq M --no-mse", "gptq M --no-search-scale", ["--no-mse is now --no-search-scale"]),
        ("fp4 M --search", "fp4 M --search-scale", ["--search is now --search-scale"]),
        ("gguf M --pre gpt-2", "gguf M --pre-tokenizer gpt-2", ["--pre is now --pre-tokenizer"]),
        (
            "awq M --n-grid=4 --no-zero-point --clip",
            "awq M --candidates=4 --sym --search-scale",
            [
                "--clip is now --search-scale",
                "--n-grid is now --candidates",
                "--no-zero-point is now --sym",
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


@pytest.mark.parametrize("key", ["zero_point", "quant.zero_point", "quant.zero-point"])
def test_settings_take_old_keys(key, capsys):
    base = recipe.Recipe("awq", values={"model": "m"})
    chosen = recipe.merge(base, [f"{key}=false", "n_grid=7", "clip=false"], {}).options
    assert (chosen.sym, chosen.candidates, chosen.search_scale) == (True, 7, False)
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.endswith("is now quant.sym, and means the opposite")
    assert second == "warning: n_grid is now quant.candidates"
    assert third == "warning: clip is now quant.search_scale"


def test_recipes_take_old_keys(tmp_path, capsys):
    found = recipe.parse("old", tmp_path, "method: gptq\nquant: {mse: false, bits: 3}\n")
    assert found.values == {"quant.search_scale": False, "quant.bits": 3}
    assert capsys.readouterr().err == "warning: quant.mse is now quant.search_scale\n"
    trial = recipe.options("fp4", ["search=false"], "--as fp4")
    assert trial.search_scale is False
    assert capsys.readouterr().err == "warning: search is now quant.search_scale\n"


def test_an_old_key_with_a_wrong_value_is_refused(tmp_path):
    with pytest.raises(QuantkitError, match="quant.sym is 3, not bool"):
        recipe.parse("old", tmp_path, "method: awq\nquant: {zero_point: 3}\n")
