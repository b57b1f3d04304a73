"""The report: one HTML page with everything in it, in both colour schemes, for any width, without scripts."""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.errors import count
from quantkit.evaluation.comparison.columns import (
    Column,
    columns,
    floor_note,
    label_by_source,
    labels,
    number,
    rows,
)
from quantkit.evaluation.comparison.figures import Figure, figures
from quantkit.evaluation.comparison.gates import in_words
from quantkit.evaluation.comparison.svg import (
    DARK_PALETTE,
    DARK_SCHEME,
    LIGHT_PALETTE,
    PLOT_STYLE,
    draw,
    escape,
)

WORST = 10  # linears of a model that are listed
STYLE = f"""
:root{{color-scheme:light dark}}
:root{LIGHT_PALETTE}
:root{{--good:#0f7b4f;--bad:#b3261e}}
{DARK_SCHEME}{{:root{DARK_PALETTE}:root{{--good:#4fcb8f;--bad:#f2857d}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif;
overflow-wrap:anywhere}}
main{{max-width:76rem;margin:0 auto;padding:1.5rem 1rem 4rem}}
h1{{font-size:1.6rem;line-height:1.25;margin:0 0 .25rem}}
h2{{font-size:1.2rem;margin:2.5rem 0 .5rem}}
p,figcaption,dl{{margin:.5rem 0}}
.lead,figcaption,.meanings{{color:var(--muted);font-size:.9rem}}
.scroll{{overflow-x:auto;border:1px solid var(--faint);border-radius:6px}}
table{{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.85rem;width:100%}}
th,td{{padding:.4rem .42rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--faint)}}
th:first-child,td:first-child{{text-align:left;position:sticky;left:0;background:var(--paper)}}
tbody tr:last-child>*{{border-bottom:0}}
tbody th{{font-weight:500;min-width:9rem;max-width:16rem;white-space:normal}}
tr.floor>*{{color:var(--muted)}}
.figures{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,34rem),1fr));gap:0 1rem}}
figure{{margin:.5rem 0}}
svg.plot{{display:block;max-width:100%;height:auto}}
.narrow{{display:none}}
.pass{{color:var(--good)}}.fail{{color:var(--bad);font-weight:600}}
dl{{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:.15rem 1.25rem}}
dt{{color:var(--muted)}}dd{{margin:0}}
summary{{cursor:pointer}}
@media (max-width:46rem){{
.wide{{display:none}}.narrow{{display:block}}
tbody th{{min-width:7.5rem;max-width:9rem}}
dl{{grid-template-columns:minmax(0,1fr)}}dd{{margin-bottom:.5rem}}
}}
"""


def page(record: dict) -> str:
    """The whole page of a record that fits the schema."""
    base, *candidates = labels([model["source"] for model in record["models"]])
    against = f"{base} against {', '.join(candidates)}" if len(candidates) in (1, 2) else base
    if len(candidates) > 2:
        against = f"{base} against {len(candidates)} candidates"
    drawn = figures(record)
    parts = [
        f"<h1>{escape(against)}</h1>",
        f'<p class="lead">{escape(_lead(record))}</p>',
        _gates(record),
        "<h2>Comparison</h2>",
        _comparison(record),
        f'<div class="figures">{"".join(map(_figure, drawn))}</div>' if drawn else "",
        _layers(record),
        "<h2>Protocol</h2>",
        _facts(_protocol(record)),
        "<h2>Environment</h2>",
        _facts(record["env"].items()),
    ]
    body = "\n".join(filter(None, parts))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(against)} – quantkit</title><style>{STYLE}{PLOT_STYLE}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def _lead(record: dict) -> str:
    data = record["data"]
    return f"{data['tokens']:,} tokens of {data['text']}, predicted in windows of {data['ctx']:,}. " + (
        "The first model is what the others are compared to." if len(record["models"]) > 1 else ""
    )


def _gates(record: dict) -> str:
    """Every verdict; in words, so that colour is not needed."""
    if not record["gates"]:
        return ""
    names = label_by_source(record)
    lines = []
    for verdict in record["gates"]:
        name, value, limit = in_words(verdict)
        mark = '<td class="pass">passed</td>' if verdict["pass"] else '<td class="fail">failed</td>'
        model = names.get(verdict["model"], verdict["model"])
        cells = "".join(f"<td>{escape(text)}</td>" for text in (name, value, limit))
        lines.append(f'<tr><th scope="row">{escape(model)}</th>{mark}{cells}</tr>')
    failed = sum(not verdict["pass"] for verdict in record["gates"])
    title = f"{failed} of {len(record['gates'])} gates failed" if failed else "All gates passed"
    return f"<h2>{title}</h2>" + _table(("model", "gate", "metric", "value", "limit"), lines)


def _comparison(record: dict) -> str:
    shown = columns(record)
    lines = []
    for row in rows(record):
        name, *cells = row.cells
        inside = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        kind, title = ' class="floor"' if row.key is None else "", escape(row.key or "")
        lines.append(f'<tr{kind}><th scope="row" title="{title}">{escape(name)}</th>{inside}</tr>')
    note = floor_note(record)
    return (
        _table(("model", *(column.header for column in shown)), lines)
        + (f'<p class="lead">{escape(note[:1].upper() + note[1:])}.</p>' if note else "")
        + f"<details><summary>What the columns say</summary>{_meanings(shown)}</details>"
    )


def _meanings(shown: Iterable[Column]) -> str:
    return f'<div class="meanings">{_facts((column.header, column.meaning) for column in shown)}</div>'


def _table(headers: Iterable[str], lines: Iterable[str]) -> str:
    head = "".join(f'<th scope="col">{escape(header)}</th>' for header in headers)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="table">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _figure(figure: Figure) -> str:
    """Drawn twice, for screens and for phones: text that is shrunk cannot be read."""
    return (
        f"<section><h2>{escape(figure.title)}</h2><figure>"
        f'<div class="wide">{draw(figure, 590, 380)}</div><div class="narrow">{draw(figure, 350, 330)}</div>'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure></section>"
    )


def _layers(record: dict) -> str:
    """The linears that lost most, of every model that tells."""
    names, parts, silent = label_by_source(record), [], []
    for model in record["models"][1:]:
        name = names[model["source"]]
        if not model["layers"]:
            silent.append(name)
            continue
        errors = {k: v for k, v in model["layers"]["linears"].items() if v is not None}
        worst = sorted(errors, key=errors.get, reverse=True)[:WORST]
        lines = [
            f'<tr><th scope="row">{escape(linear)}</th><td>{escape(number(errors[linear]))}</td></tr>'
            for linear in worst
        ]
        what = f"relative squared error, {model['layers']['measure']}"
        parts.append(
            f"<details><summary>{escape(name)}: largest of {count(len(errors), 'linear')}</summary>"
            f"{_table(('linear', what), lines)}</details>"
        )
    if silent:
        text = f"Not known of {', '.join(silent)}: nothing was recorded with the weights."
        parts.append(f'<p class="lead">{escape(text)}</p>')
    return "<h2>Error by layer</h2>" + "".join(parts) if parts else ""


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


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    inside = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts)
    return f"<dl>{inside}</dl>"
