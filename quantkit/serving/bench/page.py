"""The page of a benchmark: one file with everything in it. How it looks is in page.html."""

from __future__ import annotations

from pathlib import Path

from quantkit.serving.bench.columns import best_batches, columns, failures, noise, protocol, rows
from quantkit.serving.bench.figures import figures


def page(record: dict) -> str:
    """The whole page of a record."""
    from quantkit.evaluation.comparison.page import render  # matplotlib takes a second to import

    names = [model["label"] for model in record["models"]]
    return render(
        Path(__file__).with_name("page.html"),
        title=f"What {', '.join(names) if len(names) < 4 else f'{len(names)} models'} cost to run",
        record=record,
        columns=columns(record),
        parts=list(rows(record)),
        failures=failures(record),
        noise=noise(record),
        batches=best_batches(record),
        figures=figures(record),
        protocol=protocol(record),
    )
