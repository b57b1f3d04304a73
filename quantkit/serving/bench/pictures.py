"""Drawings of several panels as files, and a page around one: what `draw(result, figure)` functions need."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from quantkit.errors import USAGE, QuantkitError
from quantkit.evaluation.comparison import drawing

Draw = Callable[[Any, Figure], None]
Show = Callable[[Any, Console], None]
SIZE = (10, 5)  # inches: two panels side by side
COLUMNS = 110  # of the text on a page
STYLE = (
    "body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}"
    "main{max-width:76rem;margin:0 auto;padding:1.5rem 1rem 4rem}h1{font-size:1.6rem}"
    "pre{overflow-x:auto;font-size:.85rem;line-height:1.35}svg.plot{max-width:100%;height:auto}"
)


def save(draw: Draw, result: Any, path: Path) -> None:
    """Write the drawing to NAME.svg, which has both colour schemes, or to NAME.png.

    Raises QuantkitError (exit code 2) for another ending, or where nothing can be written.
    """
    if path.suffix not in (".svg", ".png"):
        hint = f"try {path.with_suffix('.svg')}"
        raise QuantkitError(f"--plot {path}: plots are .svg or .png", hint, USAGE)
    try:
        if path.suffix == ".png":
            with drawing.theme():
                _canvas(draw, result).savefig(path, dpi=2 * drawing.PIXELS, metadata={"Software": None})
        else:
            first, rest = svg(draw, result).split(">", 1)
            style = f"<style>.plot{drawing.LIGHT_PALETTE}{_dark('.plot')}{drawing.PLOT_STYLE}</style>"
            path.write_text(f"{first}>{style}{rest}\n", encoding="utf-8")
    except OSError as error:
        hint = "choose another place, in a folder that exists"
        raise QuantkitError(f"{path} cannot be written: {error.strerror}", hint, USAGE) from error


def svg(draw: Draw, result: Any) -> str:
    """An `<svg>` element for a page that has drawing's palette and PLOT_STYLE."""
    with drawing.theme({"svg.hashsalt": "quantkit"}):
        canvas = _canvas(draw, result)
        canvas.savefig(file := StringIO(), format="svg", metadata=drawing.UNTOLD)
    text = file.getvalue()
    text = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>", "", text[text.index("<svg ") :], flags=re.S)
    text = re.sub(r'font(-size|-family)?: [^;"]*; ', "", text)
    text = re.sub("#[0-9a-f]{6}", lambda colour: drawing.VARIABLES.get(colour[0], colour[0]), text)
    return text.replace("<svg ", '<svg class="plot" role="img" ', 1).strip()


def page(title: str, show: Show, draw: Draw, result: Any) -> str:
    """One HTML page with everything in it: what the terminal shows, and the drawing."""
    console = Console(file=StringIO(), width=COLUMNS, force_terminal=True, color_system=None)
    show(result, console)
    text = "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
    style = f":root{{color-scheme:light dark}}:root{drawing.LIGHT_PALETTE}{_dark(':root')}{STYLE}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)} – quantkit</title><style>{style}{drawing.PLOT_STYLE}</style></head>\n"
        f"<body><main><h1>{html.escape(title)}</h1>\n<pre>{html.escape(text)}</pre>\n"
        f"{svg(draw, result)}\n</main></body></html>\n"
    )


def _canvas(draw: Draw, result: Any) -> Figure:
    canvas = Figure(SIZE, layout="constrained")
    draw(result, canvas)
    return canvas


def _dark(selector: str) -> str:
    return f"{drawing.DARK_SCHEME}{{{selector}{drawing.DARK_PALETTE}}}"
