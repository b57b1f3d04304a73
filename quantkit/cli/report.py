"""Turn results of eval into one HTML page.

Examples:
  quantkit report result.json -o report.html     # of quantkit eval … --json > result.json
  quantkit report monday.json tuesday.json -o report.html --png     # same text, same first model
"""

from pathlib import Path
from typing import Any

from quantkit.cli import flags
from quantkit.errors import USAGE, QuantkitError
from quantkit.quantize.staging import may_replace


@flags.command(shared=("overwrite", "quiet"), helps={"overwrite": "Replace an existing page and its plots."})
def command(
    results: flags.argument(
        "Results of quantkit eval --json: same text, same first model. Of two results for one model, the "
        "first counts.",
        list[Path],
    ),
    output: flags.flag("HTML page to write.", Path, "--output", "-o") = Path("report.html"),
    png: flags.flag("Write the plots next to the page.", bool, "--png") = False,
    **values: Any,
) -> None:
    from quantkit.evaluation.comparison.record import MAKE, merge, read
    from quantkit.evaluation.comparison.report import Outputs
    from quantkit.evaluation.comparison.table import report

    for path in results:
        if path.suffix in (".png", ".svg", ".html"):
            hint = f"{MAKE}; -o names the page and its plots"
            raise QuantkitError(f"{path} is not a result of quantkit eval", hint, USAGE)
    outputs = Outputs(html=output, plot=output.with_suffix(".png") if png else None)
    outputs.check()
    if not values["overwrite"]:
        may_replace.check_new(list(filter(None, (outputs.html, outputs.plot))))
    comparison = report(merge([read(path) for path in results]))
    outputs.write(comparison, quiet=values["quiet"])
