"""Check a checkpoint for damage, and measure the error of every linear again.

Examples:
  quantkit verify ./model-gptq-w4g128                     # files, values, codes
  quantkit verify ./model-gptq-w4g128 --base ./model      # and every linear's error, measured again
  quantkit verify ./model-gptq-w4g128 --engine vllm       # and what the engine computes
  quantkit verify ./model-gptq-w4g128 --base ./model --reproduce 2   # and two blocks, solved again
  quantkit verify ./model-Q4_K_M.gguf --json
"""

import statistics
from functools import partial
from typing import Any

from quantkit.cli import flags, streams
from quantkit.errors import count, name_all
from quantkit.evaluation.comparison.columns import check_line
from quantkit.evaluation.settings import EvalSettings
from quantkit.inspection.show import provenance
from quantkit.tables import make_console, print_facts, print_line

MOST_SHOWN = 8  # problems after the first
SOUND = "No damage found. Checksums detect corruption, not tampering."
UNSUMMED = "No damage found in the values. There are no checksums to compare the files with."
AUDITED = {  # by verdict
    "identical": "No damage found. The blocks solved again are identical.",
    "equivalent": "No damage found. The blocks solved again on this other machine are as good.",
}


@flags.command(
    *flags.of("options", EvalSettings, ("engine", "python", "engine_option")),
    shared=("threads", "trust_remote_code", "as_json", "quiet"),
)
def command(
    path: flags.argument("Checkpoint folder or GGUF file."),
    base: flags.flag(
        "Original model: measure the error of every linear again and compare with the manifest.",
        metavar="MODEL",
    ) = None,
    reproduce: flags.flag(
        "Audit: solve K random blocks, or all, again from --base with the settings of the manifest, and "
        "compare their codes.",
        metavar="K|all",
    ) = None,
    calibration: flags.flag(
        "With --reproduce: the calibration text of the job. (default: as the manifest says)", metavar="TEXT"
    ) = None,
    seed: flags.flag(
        "With --reproduce: seed that chooses the blocks. (default: a new one, printed)", int | None
    ) = None,
    **values: Any,
) -> None:
    asked, trusted = flags.options(EvalSettings, values), values["trust_remote_code"]
    asked.check()
    with streams.listener(values["quiet"]) as progress:
        from quantkit.evaluation import served

        record = served.verify(path, base, asked, progress, trusted, reproduce, seed, calibration)
    streams.present(record, values["as_json"], partial(_show, record), partial(served.refuse, record, base))


def _show(record: dict[str, Any]) -> None:
    console = make_console()
    facts = {"checkpoint": record["source"], "made by": provenance(record["made"])}
    same = sum(row["state"] == "same" for row in record["files"])
    if record["files"]:
        facts["files"] = f"{same} of {len(record['files'])} as written (sha256)"
    if record["linears"]:
        agree = [row for row in record["linears"] if row["agrees"]]
        worst = max(record["linears"], key=lambda row: row["error"])
        facts["errors"] = (
            f"{len(agree)} of {count(len(record['linears']), 'linear')} as far from the source as the "
            f"manifest says; farthest {worst['name']}, {worst['error']:.3g}"
        )
    if made := record["engine"]:
        facts["engine"] = check_line(made)
    done = record.get("reproduction")
    if done and done["blocks"]:
        facts["again"] = _again(done)
    print_facts(console, facts)
    for note in record["notes"]:
        print_line(console, f"note: {note}")
    others = record["problems"][1:]  # the first is the error
    for problem in others[:MOST_SHOWN]:
        print_line(console, f"wrong: {problem}", "yellow")
    if len(others) > MOST_SHOWN:
        print_line(console, f"wrong: {len(others) - MOST_SHOWN} more, which --json lists", "yellow")
    if not record["problems"] and (not made or made["agrees"]):
        print_line(console, AUDITED[done["verdict"]] if done else SOUND if record["files"] else UNSUMMED)


def _again(done: dict[str, Any]) -> str:
    """Return what came of the blocks that were solved again."""
    rows, blocks = done["linears"], [str(index + 1) for index in done["blocks"]]
    same = [row for row in rows if row["identical"]]
    named = f"{'block' if len(blocks) == 1 else 'blocks'} {name_all(blocks)}; seed {done['seed']}"
    said = f"{len(blocks)} of {count(done['of_blocks'], 'block')} ({named}): "
    said += f"{len(same)} of {count(len(rows), 'linear')} bit for bit"
    if len(same) == len(rows):
        return said
    different, codes = (sum(row[key] for row in rows) for key in ("different", "codes"))
    excess = statistics.median(row["excess"] for row in rows)
    return f"{said}; {different:,} of {codes:,} codes differ, median excess of loss {excess:+.1%}"
