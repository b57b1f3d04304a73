"""List versions, devices, memory, disk and optional packages of this machine.

Examples:
  quantkit doctor
  quantkit doctor --json     # to attach to a bug report
"""

from typing import Any

from quantkit.cli import flags, streams
from quantkit.errors import QuantkitError, name_all
from quantkit.tables import make_console, print_line


@flags.command(shared=("quiet", "as_json"), helps={"quiet": "Print problems only."})
def command(**values: Any) -> None:
    from quantkit.inspection import doctor

    record = doctor.examine()
    findings = record["checks"]

    def refuse() -> None:
        broken = [row for subject in ("needed", "machine") for row in findings[subject] if row["ok"] is False]
        if broken:
            named = name_all(f"{row['name']} {row['value']}" for row in broken)
            what, hint = f"this installation is broken: {named}", "; ".join(row["note"] for row in broken)
            raise QuantkitError(what, hint, found=record)

    streams.present(record, values["as_json"], lambda: _show(findings, values["quiet"]), refuse)


def _show(findings: dict[str, list[dict]], quiet: bool) -> None:
    """Print each finding on a line, and mark problems. quiet: print only problems."""
    console = make_console()
    for subject, rows in findings.items():
        rows = [row for row in rows if row["ok"] is False or not quiet]
        if rows:
            console.print(subject, style="bold")
        for row in rows:
            note = f" ({row['note']})" if row["note"] else ""
            mark, style = ("!", "yellow") if row["ok"] is False else (" ", None)
            print_line(console, f"{mark} {row['name']:18s} {row['value']}{note}", style, indent=21)
