"""Page and plot of measurements that draw on a canvas and print themselves: attention and batching."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from quantkit.evaluation.comparison.files import Outputs, writing

WIDTH, HEIGHT = 1000, 400  # pixels
COLUMNS = 120  # of what is printed on a page


@dataclass(frozen=True)
class Panels:
    """title: of the page. draw(canvas) fills an empty figure of matplotlib; show(console) prints."""

    title: str
    draw: Callable[[Any], None]
    show: Callable[[Console], None]

    def write(self, outputs: Outputs) -> None:
        """Write what is wanted. Raises QuantkitError where that is not possible."""
        if not (outputs.html or outputs.plot):
            return
        from matplotlib.figure import Figure

        from quantkit.evaluation.comparison import drawing  # matplotlib takes a second to import
        from quantkit.evaluation.comparison.page import render

        with drawing.theme({"svg.hashsalt": self.title}):
            canvas = Figure((WIDTH / drawing.PIXELS, HEIGHT / drawing.PIXELS), layout="constrained")
            self.draw(canvas)
            element = drawing.element(canvas, self.title)
            if outputs.plot and outputs.plot.suffix == ".png":
                with writing(outputs.plot):
                    canvas.savefig(outputs.plot, dpi=2 * drawing.PIXELS, metadata={"Software": None})
        if outputs.plot and outputs.plot.suffix == ".svg":
            with writing(outputs.plot):
                outputs.plot.write_text(drawing.standalone(element), encoding="utf-8")
        if outputs.html:
            file = StringIO()
            self.show(Console(file=file, width=COLUMNS, highlight=False, markup=False, no_color=True))
            template = Path(__file__).with_name("panels.html")
            text = render(template, title=self.title, printed=file.getvalue().splitlines(), drawn=element)
            with writing(outputs.html):
                outputs.html.write_text(text, encoding="utf-8")
