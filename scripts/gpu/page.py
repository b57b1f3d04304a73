"""The section of docs/measurements/gpu.md that scripts/gpu_day measured."""

from __future__ import annotations

from common import table, versions

NOTHING = "A rehearsal on the CPU, on tiny models. Its figures say nothing of a GPU.\n"
LEFT_OUT = {"versions", "took", "execution", "checks"}
Rows = dict[str, dict]


def figure(name: str, value: object) -> str:
    """Return a value with three significant digits, bytes in GB, rates of products in TFLOPS."""
    if isinstance(value, list):
        return ", ".join(map(str, value[:6])) or "none"
    if value is None or isinstance(value, (bool, str)):
        return {None: "–", True: "yes", False: "no"}.get(value, str(value)).replace("|", "\\|")[:160]
    if "bytes" in name:
        return f"{value / 1e9:.3g} GB" + ("/s" if name.endswith("per_second") else "")
    return f"{value / 1e12:.3g} TFLOPS" if name.startswith("flops") else f"{value:.3g}"


def flat(row: dict) -> dict[str, str]:
    """Return cells by heading; phases are seconds."""
    cells: dict[str, str] = {}
    for name, value in row.items():
        if name == "phases":
            cells |= {f"{phase} s": figure(phase, seconds) for phase, seconds in value.items()}
        elif name not in LEFT_OUT:
            cells[name.replace("_", " ")] = figure(name, value)
    return cells


def rows_of(rows: Rows) -> str:
    """Return a table of rows with the same figures, a list of rows that differ."""
    cells = {name: found for name, row in rows.items() if (found := flat(row))}
    measured = [found for name, found in cells.items() if not rows[name].keys() & {"error", "skipped"}]
    heads = list(dict.fromkeys(head for found in measured for head in found))
    if len(heads) > 2 * min(map(len, measured), default=0):
        text = ""
        for name, found in cells.items():
            text += f"- {name}: {'; '.join(f'{head}: {cell}' for head, cell in found.items())}\n"
    else:
        lines = []
        for name, found in cells.items():
            why = [f"{state}: {found[state]}" for state in ("error", "skipped") if state in found]
            lines.append([name, *(why or [found.get(head, "–") for head in heads])])
        width = max(len(line) for line in [["row", *heads], *lines])
        head, *lines = [line + [""] * (width - len(line)) for line in [["row", *heads], *lines]]
        text = table(head, lines, left=1)
    return text + (f"\nMeasured with {versions(rows)}.\n" if versions(rows) else "")


def section(results: list[dict]) -> str:
    """Return Markdown of the results of stages, `{}` where one never ran."""
    results = [result for result in results if result]
    device = next((result for result in results if result["stage"] == "device"), {"rows": {}})
    about = device["rows"].get("torch", {})
    if about.get("device", "cpu") == "cpu":
        text = NOTHING if results else "Nothing was measured.\n"
    else:
        memory = f"{about['memory_bytes'] / 1e9:.0f} GB"
        text = f"Measured on one {about['device']} ({memory}) with torch {about['torch']}.\n"
    if not results:
        return text
    states = []
    for result in results:
        seconds, reason = figure("seconds", result.get("seconds")), figure("why", result.get("why", ""))
        states.append([result["stage"], result["state"], seconds, result["summary"], reason])
    text += "\n" + table(["stage", "state", "seconds", "contents", "reason"], states)
    for result in results:
        if result["rows"]:
            text += f"\n### {result['stage'].capitalize()}\n\n{rows_of(result['rows'])}"
    return text
