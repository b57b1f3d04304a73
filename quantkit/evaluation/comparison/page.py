"""The report: one HTML page with everything in it. How it looks is in page.html, and frame.html around it."""

from __future__ import annotations

from pathlib import Path

from quantkit.errors import count
from quantkit.evaluation.comparison.columns import columns, floor_note, label_by_source, labels, number, rows
from quantkit.evaluation.comparison.figures import figures
from quantkit.evaluation.comparison.gates import in_words

WORST = 10  # linears of a model that are listed


def page(record: dict) -> str:
    """The whole page of a record that fits the schema."""
    base, *candidates = labels([model["source"] for model in record["models"]])
    others = ", ".join(candidates) if len(candidates) < 3 else f"{len(candidates)} candidates"
    names = label_by_source(record)
    models = [(names[model["source"]], model["layers"]) for model in record["models"][1:]]
    return render(
        Path(__file__).with_name("page.html"),
        title=f"{base} against {others}" if candidates else base,
        record=record,
        data=record["data"],
        verdicts=[(names.get(v["model"], v["model"]), v["pass"], in_words(v)) for v in record["gates"]],
        failed=sum(not verdict["pass"] for verdict in record["gates"]),
        columns=columns(record),
        rows=rows(record),
        note=floor_note(record),
        figures=figures(record),
        layers=[(name, layers["measure"], *_worst(layers)) for name, layers in models if layers],
        silent=[name for name, layers in models if not layers],
        protocol=_protocol(record),
    )


def render(template: Path, **values: object) -> str:
    """A page from a template that extends frame.html; strangers' text is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    from quantkit.evaluation.comparison import drawing  # matplotlib takes a second to import

    def shown(value: object) -> object:
        """Strangers' text without control characters."""
        return drawing.shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=shown,
    )
    environment.filters["zip"] = zip
    return environment.get_template(template.name).render(drawing=drawing, **values)


def _worst(layers: dict) -> tuple[str, list[tuple[str, str]]]:
    """Of how many linears the error is known, and those that lost most."""
    errors = {name: error for name, error in layers["linears"].items() if error is not None}
    worst = sorted(errors, key=errors.get, reverse=True)[:WORST]
    return count(len(errors), "linear"), [(name, number(errors[name])) for name in worst]


def _protocol(record: dict) -> list[tuple[str, str]]:
    data, floor = record["data"], record["noise_floor"]
    facts = [
        ("text", f"{data['text']}, sha256 {data['sha256']}"),
        ("tokens scored", f"{data['tokens']:,}"),
        ("context", f"{data['ctx']:,} tokens, windows {data['stride']:,} apart"),
        ("BOS", "in every window" if data["bos"] else "none"),
        ("tokenizer", data["tokenizer"]),
        ("precision", data["dtype"]),
    ]
    if floor:
        facts.append(("noise floor", f"{floor['dtype']}, first {floor['tokens']:,} tokens"))
    if tasks := record["tasks"]:
        limit = "all" if tasks["limit"] is None else f"the first {tasks['limit']:,}"
        facts.append(("tasks", f"lm-evaluation-harness {tasks['lm_eval']}, {limit} examples"))
    return [*facts, *(("model", model["source"]) for model in record["models"])]
