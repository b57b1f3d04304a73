"""The record of a comparison against its schema, and the tables made of it."""

import copy
import importlib.resources
import json
import random
import re

import jsonschema
import pytest
import records

from quantkit.evaluation.comparison import columns, report, table
from quantkit.evaluation.comparison.record import pareto


@pytest.fixture(scope="module")
def validator():
    schema = json.loads(
        importlib.resources.files("quantkit").joinpath("evaluation/comparison/eval-3.json").read_text()
    )
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


# ---- the schema


def test_every_level_of_the_schema_is_described_and_closed(validator):
    """A field that is added without the schema is noticed."""

    def objects(schema):
        if isinstance(schema, dict):
            if "properties" in schema:
                yield schema
            for inner in schema.values():
                yield from objects(inner)

    found = list(objects(validator.schema))
    assert len(found) > 10 and all(schema["additionalProperties"] is False for schema in found)


def test_a_made_up_record_fits_and_a_changed_one_does_not(validator):
    """What the other tests use is what eval prints; without any one of its keys it is not."""
    whole = records.record(gates=[verdict("out/four", True)])
    validator.validate(whole)

    def places(value, path=()):
        if isinstance(value, dict):
            for key, inner in value.items():
                yield (*path, key)
                yield from places(inner, (*path, key))
        if isinstance(value, list):
            for index, inner in enumerate(value):
                yield from places(inner, (*path, index))

    free = {("env",)}
    optional = {"dppl", "kld", "top1"}  # --metrics leaves them out
    for path in places(whole):
        broken = copy.deepcopy(whole)
        inside = broken
        for key in path[:-1]:
            inside = inside[key]
        del inside[path[-1]]
        assert validator.is_valid(broken) == (path[:-1] in free or path[-1] in optional), path
        inside[path[-1]] = object()
        assert not validator.is_valid(broken)


# ---- the front


def test_the_front_is_what_nothing_beats():
    """Against every pair, on random sizes and losses with ties."""
    rng = random.Random(0)
    for _ in range(50):
        models = [records.model("base", 9)]
        models += [
            records.model(f"m{k}", rng.randint(1, 8), rng.randint(0, 5) / 10)
            for k in range(rng.randint(0, 8))
        ]
        points = {
            m["source"]: (
                m["size"]["weight_bytes"],
                m["metrics"]["kld"]["mean"] if m["metrics"]["kld"] else 0,
            )
            for m in models
        }
        beaten = {
            one
            for one, (size, loss) in points.items()
            for other, (less, lost) in points.items()
            if less <= size and lost <= loss and (less < size or lost < loss)
        }
        front = pareto(models)
        if len(models) == 1:
            assert front["loss"] == "metrics.ppl.value"
        assert set(front["models"]) == points.keys() - beaten
        sizes = [points[source][0] for source in front["models"]]
        assert sizes == sorted(sizes)


def test_the_front_without_divergences():
    models = records.record()["models"]
    for model in models:
        del model["metrics"]["kld"]
    models[2]["metrics"]["ppl"]["value"] = None  # not a number: on no front
    assert pareto(models) == {
        "size": "size.weight_bytes",
        "loss": "metrics.ppl.value",
        "models": ["out/four", "org/base"],
    }


# ---- names and cells


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (["a/model", "b/model", "b/other"], ["a/model", "b/model", "other"]),
        (["x/a/m", "a/m"], ["x/a/m", "a/m"]),
        (["/a/m", "a/m"], ["/a/m", "a/m"]),
        (["./m/", "m2"], ["m", "m2"]),
        (["m", "m"], ["m", "m #2"]),
        ([".", ".."], [".", ".."]),
    ],
)
def test_labels_tell_models_apart(sources, expected):
    assert columns.labels(sources) == expected


def verdict(source: str, passed: bool) -> dict:
    values = {"metric": "kld.mean", "op": "<=", "limit": 0.05, "value": 0.02 if passed else 0.08}
    return values | {"model": source, "pass": passed}


def test_tables_in_a_pipe_are_as_wide_as_a_terminal(monkeypatch, capsys):
    """80 columns without one, with the names of the models in each table; lines of text do not wrap."""
    monkeypatch.delenv("COLUMNS", raising=False)
    table.report(records.record()).show()
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, [line for line in lines if line.startswith(" ")])) <= 80
    assert len([line for line in lines if line.split()[:1] == ["four"]]) == 3
    assert any("stride 128, BOS" in line for line in lines)


def test_a_wide_table_has_every_column(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    table.report(records.record(gates=[verdict("out/four", True), verdict("out/three", False)])).show()
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    header, _, base, four, three, floor, protocol, note, *gates = lines
    assert re.split(r"\s{2,}", header.strip()) == (
        "model|size|model bits|bits/weight|perplexity|Δ perplexity|KL divergence|top-1|front|"
        "KL median|KL 99 %|KL max"
    ).split("|")
    cells = [re.split(r"\s{2,}", line.strip()) for line in (base, four, three, floor)]
    assert cells[0] == ["base", "16.00 MB", "16.00", "–", "20.000 ± 1.000", *"–––", "yes", *"–––"]
    assert cells[1][:6] == ["four", "4.00 MB", "4.00", "4.25", "20.500 ± 1.000", "+0.500 ± 0.050"]
    assert cells[1][6:] == ["0.02000", "90.00 %", "yes", "0.01000", "0.10000", "0.40000"]
    assert cells[3] == [
        "(noise floor)",
        "+0.010 ± 0.050",
        "0.00020",
        "99.00 %",
        "0.00010",
        "0.00100",
        "0.00400",
    ]
    assert protocol.startswith("book.txt (sha256 0123456789ab), 4000 tokens scored, context 256, stride 128")
    assert note == "noise floor: base against itself in bfloat16, first 1000 tokens"
    assert gates == [
        "gate passed: KL divergence of four is 0.02, limit ≤ 0.05",
        "gate FAILED: KL divergence of three is 0.08, limit ≤ 0.05",
    ]


def test_tasks_have_columns():
    record = records.record()
    record["models"][1]["tasks"] = {"cloze": {"acc": records.estimate(0.5, 0.05)}}
    record["models"][2]["tasks"] = {"cloze": {"perplexity": {"value": 9.0, "stderr": None}}}
    headers = list(columns.columns(record))
    assert headers[-3:] == ["KL max", "cloze acc", "cloze perplexity"]
    cells = [row[-2:] for row in columns.rows(record)]
    assert cells == [["–", "–"], ["0.500 ± 0.050", "–"], ["–", "9.000 ± –"], ["", ""]]


def test_small_divergences_are_not_printed_as_zero():
    assert [columns.number(v) for v in (0.0, 1e-4, 9.9e-5, -3e-8, 2.5, None)] == [
        "0.00000",
        "0.00010",
        "9.90e-05",
        "-3.00e-08",
        "2.50000",
        "–",
    ]


@pytest.mark.parametrize("width", [30, 79, 80, 120, 200])
def test_a_narrow_terminal_gets_several_tables(width):
    """Every column once, in order, the model in each; as many to a table as fit."""
    record = records.record()
    headers = ["model", *columns.columns(record)]
    found = columns.rows(record)
    parts = report.split(headers, found, width)
    assert [index for part in parts for index in part[1:]] == list(range(1, len(headers)))
    assert all(part[0] == 0 and len(part) > 1 for part in parts)
    widths = [
        max(len(cells[index]) for cells in (headers, *found)) + report.GAP for index in range(len(headers))
    ]
    for part, after in zip(parts, parts[1:] + [[0]], strict=True):
        assert sum(widths[index] for index in part) - 1 <= width or len(part) == 2
        if len(after) > 1:
            assert sum(widths[index] for index in (*part, after[1])) - 1 > width


def test_names_are_text_in_markdown_and_on_a_terminal(capsys):
    nasty = "a|b*c_d`<script>[x](y)[red]z"
    record = records.record(records.model("base", 9), records.model(nasty, 5, 0.1))
    lines = table.markdown(record).splitlines()
    row = next(line for line in lines if "script" in line)
    cells = re.split(r"(?<!\\)\|", row)[1:-1]
    assert len(cells) == 12
    assert re.sub(r"\\(.)", r"\1", cells[0].strip()) == nasty
    assert not re.search(r"(?<!\\)[*_`<>\[\]|]", cells[0])
    table.report(record).show()
    assert nasty in capsys.readouterr().out


def test_markdown_is_a_table_of_github():
    lines = table.markdown(records.record(gates=[verdict("out/three", False)])).split("\n")
    assert lines[0] == "### quantkit eval: 1 of 1 gates failed"
    assert lines[2:4] == ["- ❌ FAILED: KL divergence of three is 0.08, limit ≤ 0.05", ""]
    rows = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1 and len(rows) == 2 + 4
    assert lines[-3].startswith("noise floor") and lines[-2:] == ["", ""]
