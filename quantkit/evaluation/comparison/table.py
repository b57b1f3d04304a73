"""A comparison of models as a report, or as Markdown for a pull request."""

from quantkit.errors import count
from quantkit.evaluation.comparison.columns import UNITS, columns, footnotes, label_by_source, labels, rows
from quantkit.evaluation.comparison.figures import quality
from quantkit.evaluation.comparison.gates import describe
from quantkit.evaluation.comparison.record import not_run
from quantkit.evaluation.comparison.report import Report, Table


def report(record: dict) -> Report:
    """Return the report for a record of `quantkit eval`."""
    base, *candidates = labels([model["source"] for model in record["models"]])
    others = ", ".join(candidates) if len(candidates) < 3 else f"{len(candidates)} candidates"
    meanings = {header: meaning for header, (meaning, _) in columns(record).items()}
    notes = [(line, "") for line in footnotes(record)]
    notes += [(f"gate {line}", "red" if line.startswith("FAILED") else "") for line in verdicts(record)]
    data = record["data"]
    hashes = {"SHA-256 of the text": data["sha256"], "SHA-256 of the tokenizer": data["tokenizer"]}
    return Report(
        title=f"{base} against {others}" if candidates else base,
        tables=[Table(["model", *meanings], [("", rows(record))], meanings, UNITS)],
        notes=notes,
        figures=[plot] if candidates and (plot := quality(record)).series else [],
        more={"Environment": record["env"] | hashes | (record["tasks"] or {})},
    )


def markdown(record: dict) -> str:
    """Return a record as GitHub-flavoured Markdown: gates, table and conditions."""
    headers = ["model", *columns(record)]
    grid = [f"| {' | '.join(map(_escape, cells))} |" for cells in (headers, *rows(record))]
    grid.insert(1, f"| --- |{' ---: |' * (len(headers) - 1)}")
    gates = [f"- {'❌' if line.startswith('FAILED') else '✅'} {_escape(line)}" for line in verdicts(record)]
    foot = [_escape(line) + "  " for line in footnotes(record)]
    passed = [verdict["pass"] for verdict in record["gates"]]
    failed = f"{passed.count(False)} of {len(passed)} gates failed"
    result = f": {'all gates passed' if all(passed) else failed}" if passed else ""
    if missing := len(not_run(record)):
        result += f"{',' if passed else ':'} the engine did not run {count(missing, 'model')}"
    lines = [f"### quantkit eval{result}", "", *gates, "", *grid, "", *foot]
    return "\n".join(lines) + "\n\n"  # the next step's summary begins its own paragraph


def verdicts(record: dict) -> list[str]:
    """Return a line per gate, such as `FAILED: KL divergence of model is 0.0713, limit ≤ 0.05`."""
    names = label_by_source(record)
    return [
        f"{'passed' if verdict['pass'] else 'FAILED'}: "
        + describe(verdict, names.get(verdict["model"], verdict["model"]))
        for verdict in record["gates"]
    ]


def _escape(text: str) -> str:
    """Return the text with Markdown's and HTML's special characters escaped."""
    for character in "\\`*_{}[]<>#|~&":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
