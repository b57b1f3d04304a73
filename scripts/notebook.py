"""Run the cells of docs/tutorial.ipynb on the bundled model; --write stores what they print.

Usage: python scripts/notebook.py [--write]
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import DEMO, ROOT

NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"
MODEL = "Qwen/Qwen3-0.6B"  # the model that the cells name


def read() -> dict[str, Any]:
    """The notebook's JSON."""
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def run(cells: list[dict[str, Any]], model: str) -> list[list[dict[str, Any]]]:
    """Run code cells in one namespace, with `model` in place of the named one: the outputs of each.

    As Jupyter does, what a cell prints is one output, and the value of its last expression another.
    """
    names: dict[str, Any] = {"__name__": "notebook"}
    return [_run(cell, number, model, names) for number, cell in enumerate(cells, 1)]


def _run(cell: dict[str, Any], number: int, model: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    source = "".join(cell["source"]).replace(MODEL, model)
    body = ast.parse(source).body
    last = ast.Expression(body.pop().value) if body and isinstance(body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(ast.Module(body, []), f"cell {number}", "exec"), names)
        value = last and eval(compile(last, f"cell {number}", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(text)})
    if value is not None:
        data = {"text/plain": _lines(repr(value).strip())}
        if hasattr(value, "_repr_markdown_"):
            data = {"text/markdown": _lines(value._repr_markdown_()), "text/plain": _lines(str(value))}
        outputs.append(
            {"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"}
        )
    return outputs


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def markdown(notebook: dict[str, Any]) -> str:
    """The notebook as a page: text, code, and the stored outputs."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            plain = "".join(output.get("text", data.get("text/plain", ())))
            parts.append("".join(data.get("text/markdown", ())) or f"```\n{plain.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="store the outputs in the notebook")
    asked = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    notebook = read()
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path(DEMO.name).symlink_to(DEMO)
        outputs = run(code, DEMO.name)
    for number, (cell, found) in enumerate(zip(code, outputs, strict=True), 1):
        cell |= {"execution_count": number, "outputs": found}
    print(markdown(notebook))
    if asked.write:
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
