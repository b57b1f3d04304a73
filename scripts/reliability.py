"""The table of docs/reliability.md, from the logs of scripts/nightly.

    python scripts/reliability.py LOGS [--write]

Exit code 1 if a part found anything wrong. Rows of parts that were not run stay as they are.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

from client_runs import ROOT, write_section

DOCUMENT = ROOT / "docs/reliability.md"
HEAD = "| part | what was tried | wrong | minutes |\n| --- | --- | ---: | ---: |\n"


def kills(rows: list[dict]) -> tuple[str, int]:
    """Stops by signal and by what the job was at."""
    stops, at = Counter(), Counter()
    for row in rows:
        stops.update(row["stops"])
        at.update(row["at"])
    told = ", ".join(f"{number} {name}" for name, number in stops.most_common())
    when = ", ".join(f"{number} {name}" for name, number in at.most_common())
    wrong = sum(row["wrong"] for row in rows)
    return f"{sum(stops.values())} stops of {len(rows)} kinds of jobs ({told}), while {when}", wrong


def faults(rows: list[dict]) -> tuple[str, int]:
    """Calls that failed, and how jobs ended."""
    codes: Counter = Counter()
    for row in rows:
        codes.update(row["codes"])
    told = ", ".join(f"{number} with exit code {code}" for code, number in sorted(codes.items()))
    wrong = sum(row["wrong"] for row in rows)
    return f"{sum(codes.values())} failing writes and reads of {len(rows)} kinds of jobs ({told})", wrong


def row(log: Path) -> str:
    """A part's row."""
    text = log.read_text(errors="replace")
    code, seconds = map(int, log.with_suffix(".end").read_text().split())
    found = [json.loads(line) for line in text.splitlines() if line.startswith('{"method"')]
    if log.stem in ("kills", "faults") and found:
        told, wrong = {"kills": kills, "faults": faults}[log.stem](found)
    else:
        told, wrong = text.strip().splitlines()[-1].replace("|", "\\|"), code
    return f"| {log.stem} | {told} | {wrong} | {seconds / 60:.0f} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    before = {found[1]: found[0] for found in re.finditer(r"\| (\w+) \|.*\n", DOCUMENT.read_text())}
    ended = sorted(args.logs.glob("*.end"))
    rows = before | {path.stem: row(path.with_suffix(".log")) for path in ended}
    rows.pop("part", None)
    text = HEAD + "".join(rows.values())
    if args.write:
        write_section("nightly", text, DOCUMENT)
    else:
        print(text)
    sys.exit(any(int(path.read_text().split()[0]) for path in ended))


if __name__ == "__main__":
    main()
