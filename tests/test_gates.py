"""Gates: limits as typed, verdicts on records, and what a failing gate prints and writes."""

import json
import sys
from pathlib import Path

import families
import jsonschema
import pytest
import records

import quantkit
from quantkit import cli
from quantkit.errors import GATE, USAGE, QuantkitError
from quantkit.evaluation.comparison import gates

SCHEMA = Path(quantkit.__file__).parent / "evaluation/comparison/eval-3.json"


@pytest.mark.parametrize(
    ("arguments", "metric", "op", "limit"),
    [
        (("2%", None, None), "dppl.relative", "<=", 0.02),
        (("0.5", None, None), "dppl.value", "<=", 0.5),
        (("0", None, None), "dppl.value", "<=", 0.0),
        ((None, "0.05", None), "kld.mean", "<=", 0.05),
        ((None, None, "0.9"), "top1", ">=", 0.9),
        ((None, None, " 90 % "), "top1", ">=", 0.9),
    ],
)
def test_limits_as_typed(arguments, metric, op, limit):
    (gate,) = gates.parse(*arguments)
    assert (gate.metric, gate.op, gate.limit) == (metric, op, pytest.approx(limit))


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (("two", None, None), "--max-ppl-increase"),
        (("-1%", None, None), "--max-ppl-increase"),
        ((None, "nan", None), "--max-kld"),
        ((None, "inf", None), "--max-kld"),
        ((None, "5%", None), "--max-kld"),
        ((None, "", None), "--max-kld"),
        ((None, None, "90"), "--min-top1"),
        ((None, None, "101%"), "--min-top1"),
    ],
)
def test_what_is_no_limit(arguments, flag):
    with pytest.raises(QuantkitError) as error:
        gates.parse(*arguments)
    typed = next(text for text in arguments if text is not None)
    assert error.value.exit_code == USAGE
    assert error.value.message == f"{flag} {typed!r} is not a limit" and flag in error.value.hint


def test_a_gate_needs_something_to_judge():
    limits = gates.parse("2%", "0.05", None)
    gates.check(limits, frozenset({"dppl", "kld"}), 1)
    for chosen, candidates, words in (({"dppl"}, 1, "--max-kld"), ({"dppl", "kld"}, 0, "candidates")):
        with pytest.raises(QuantkitError) as error:
            gates.check(limits, frozenset(chosen), candidates)
        assert error.value.exit_code == USAGE and words in error.value.message and error.value.hint


def test_verdicts_name_model_metric_and_number():
    """A limit that is met exactly is met; what is no number has not passed."""
    models = records.record()["models"]
    models[2]["metrics"]["top1"] = None
    verdicts = gates.judge(gates.parse("2.5%", "0.02", "0.5"), models)
    assert [(row["model"], row["metric"], row["value"], row["pass"]) for row in verdicts] == [
        ("out/four", "dppl.relative", 0.025, True),
        ("out/three", "dppl.relative", 0.1, False),
        ("out/four", "kld.mean", 0.02, True),
        ("out/three", "kld.mean", 0.08, False),
        ("out/four", "top1", 0.9, True),
        ("out/three", "top1", None, False),
    ]
    gates.refuse_failed({"gates": [row for row in verdicts if row["pass"]]})
    with pytest.raises(QuantkitError) as error:
        gates.refuse_failed({"gates": verdicts})
    assert error.value.exit_code == GATE == 7
    assert error.value.message == (
        "3 of 6 gates failed: perplexity increase of out/three is 10 %, limit ≤ 2.5 %; "
        "KL divergence of out/three is 0.08, limit ≤ 0.02; "
        "top-1 agreement of out/three is not a number, limit ≥ 50 %"
    )


@pytest.fixture
def run(tiny_model, tmp_path, monkeypatch, capsys):
    """`run("--max-kld", 0.1)` compares a tiny model with itself as nf4: exit code, stdout, stderr."""
    folder = tiny_model("llama", tokenizer=True, hidden_size=64)
    (text := tmp_path / "text.txt").write_text("\n".join(families.sentences()))

    def run(*arguments):
        words = ["quantkit", "eval", folder, "--as", "nf4", "--text", text, "--ctx", 32, "--limit", 300, "-q"]
        monkeypatch.setattr(sys, "argv", [str(word) for word in (*words, *arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


def test_a_failing_gate_still_writes_everything(run, tmp_path):
    summary = tmp_path / "summary.md"
    summary.write_text("# before\n\n")
    limits = ["--max-kld", "1e-9", "--min-top1", "0", "--summary", summary]
    code, out, err = run(*limits, "--json")
    result = json.loads(out)
    verdicts = {row["metric"]: row for row in result["gates"]}
    assert result["error"]["exit_code"] == 7
    jsonschema.validate(result, json.loads(SCHEMA.read_text()), jsonschema.Draft202012Validator)
    source = result["models"][1]["source"]
    assert [row["pass"] for row in result["gates"]] == [False, True]
    assert verdicts["kld.mean"] == {
        "metric": "kld.mean",
        "op": "<=",
        "limit": 1e-9,
        "model": source,
        "value": result["models"][1]["metrics"]["kld"]["mean"],
        "pass": False,
    }
    value = f"{verdicts['kld.mean']['value']:.4g}"
    assert (code, len(err.splitlines())) == (7, 2)
    assert err.startswith(f"error: 1 of 2 gates failed: KL divergence of {source} is {value}, ")
    written = summary.read_text()
    assert written.startswith("# before\n\n### quantkit eval: 1 of 2 gates failed\n\n")
    assert f"- ❌ FAILED: KL divergence of llama as nf4 is {value}, limit ≤ 1e-09\n" in written
    assert "- ✅ passed: top-1 agreement of llama as nf4 is " in written
    code, out, _ = run(*limits)
    assert code == 7 and "gate FAILED: KL divergence of llama as nf4" in out
    assert summary.read_text().count("### quantkit eval") == 2  # appended


def test_gates_that_pass(run, tmp_path):
    code, out, err = run("--max-ppl-increase", "50%", "--summary", tmp_path / "new.md")
    assert (code, err) == (0, "") and "gate passed: perplexity increase of llama as nf4" in out
    assert (tmp_path / "new.md").read_text().startswith("### quantkit eval: all gates passed\n")


@pytest.mark.parametrize("place", ["nowhere/summary.md", "."])
def test_a_summary_that_cannot_be_written_is_refused_first(run, tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("quantkit.models.files.open.open_checkpoint", None)  # nothing is opened before
    code, out, err = run("--summary", place)
    assert (code, out) == (USAGE, "") and place in err


@pytest.mark.parametrize(
    "name, content",
    [("config.json", b'{"a": 1}'), ("summary.md", b"\xff\xfe"), ("weights", b"a\0b"), ("notes.csv", b"a,b")],
)
def test_a_summary_is_appended_to_markdown_alone(run, tmp_path, monkeypatch, name, content):
    monkeypatch.setattr("quantkit.models.files.open.open_checkpoint", None)  # nothing is opened before
    (tmp_path / name).write_bytes(content)
    code, out, err = run("--summary", tmp_path / name)
    assert (code, out) == (USAGE, "") and f"{name} is not a Markdown file" in err
    assert (tmp_path / name).read_bytes() == content


def test_gates_are_checked_before_the_work(run, monkeypatch):
    monkeypatch.setattr("quantkit.models.files.open.open_checkpoint", None)
    for words in (["--max-kld", "much"], ["--metrics", "ppl", "--max-kld", "1"], ["--metrics", "pll"]):
        code, out, err = run(*words)
        assert (code, out) == (USAGE, "") and err.startswith("error: --m")
