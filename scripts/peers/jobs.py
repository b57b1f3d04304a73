"""Jobs of other tools: their environments, the tokens that all are given, and one run of peers/run.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from common import ROOT, run_script

ENVIRONMENTS = {  # tool -> folder that clients-setup.sh makes
    "autoround": ".venv-peers/autoround",
    "bitsandbytes": ".venv-clients",
    "gptqmodel": ".venv-clients",
    "llmcompressor": ".venv-peers/llmcompressor",
    "mlx": ".venv-mlx",
    "transformers": ".venv-clients",
    "vllm": ".venv-vllm",
}


def python_of(tool: str, root: Path = ROOT) -> Path:
    """Return the interpreter of a tool: this one for quantkit and llama.cpp."""
    return root / ENVIRONMENTS[tool] / "bin/python" if tool in ENVIRONMENTS else Path(sys.executable)


def setup_of(tool: str) -> str:
    """Return the name of the tool's environment in clients-setup.sh."""
    return Path(ENVIRONMENTS[tool]).name.removeprefix(".venv-")


def write_tokens(model: Path, path: Path, samples: int | None = None, seqlen: int | None = None) -> list:
    """Write calibration tokens of the shipped text, cut as quantkit cuts them; return the rows.

    samples, seqlen: quantkit's defaults unless given.
    """
    from quantkit.models.files.open import open_checkpoint
    from quantkit.options import CalibrationOptions
    from quantkit.text import calibration

    sizes = {"samples": samples, "seqlen": seqlen}
    options = CalibrationOptions(**{name: size for name, size in sizes.items() if size})
    rows = calibration.load(open_checkpoint(str(model)), options).tokens.tolist()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows))
    return rows


def run_job(
    tool: str, model: Path, tokens: Path, out: Path, python: Path | None = None, threads: int = 1, **options
) -> dict:
    """Quantize in a process of the tool's environment, unless a result is there.

    Returns phases, peak memory and versions. options: fields of `Job` in peers/run.py. Raises Failed.
    """
    request = {"tool": tool, "model": str(model), "tokens": str(tokens), "out": str(out), "threads": threads}
    path = out.with_name(f"{out.name}.json")
    result = path.with_suffix(".result.json")
    if not result.exists():
        pythonpath = "" if tool in ENVIRONMENTS else str(ROOT)
        python = python or python_of(tool)
        run_script(str(python), ROOT / "scripts/peers/run.py", request | options, path, threads, pythonpath)
    return json.loads(result.read_text())
