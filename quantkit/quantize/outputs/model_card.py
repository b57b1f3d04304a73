"""The README.md that travels with a compressed checkpoint."""

from __future__ import annotations

from pathlib import Path

from quantkit import __version__
from quantkit.errors import count
from quantkit.models.files import hub
from quantkit.quantize.outputs import Material, Summary


def render(material: Material, manifest: dict, summary: Summary) -> str:
    """A model card for the hub: how it was made, what it cost, how to load it."""
    name = Path(summary.output).name
    local = Path(summary.source).exists() or not hub.is_id(summary.source)
    source = Path(summary.source).name if local else summary.source
    measured = "output" if material.output_errors else "weight"
    made = manifest["job"]["calibration"]
    lines = [
        "---",
        f"base_model: {source}",
        "library_name: transformers",
        "tags:",
        f"- {material.config['quant_method']}",
        "- quantkit",
        "---",
        "",
        f"# {name}",
        "",
        f"{source}, compressed by quantkit {__version__}: {count(summary.linears, 'linear')} at "
        f"{summary.bits_per_weight:.2f} bits per weight ({summary.bits_per_weight_model:.2f} over the whole "
        f"model), {summary.source_bytes / 1e6:,.1f} MB to {summary.output_bytes / 1e6:,.1f} MB.",
        "",
        "| option | value |",
        "| --- | --- |",
        *(f"| {key} | {value} |" for key, value in manifest["job"]["options"].items()),
        "",
        f"Mean relative {measured} error of a linear: {summary.error:.3g}"
        + (f" (round to nearest: {summary.rtn_error:.3g})." if summary.rtn_error is not None else "."),
    ]
    if made:
        lines.append(
            f"Calibrated on {made['samples']} sequences of {made['seqlen']} tokens of {made['source']} text "
            f"(sha256 {made['sha256'][:16]}…)."
        )
    if summary.kept:
        lines.append(f"Kept in 16 bit: {count(summary.kept, 'linear')}.")
    if summary.copied:
        copied = (f"`{name}` ({nbytes / 1e6:,.1f} MB)" for name, nbytes in summary.copied.items())
        lines.append(f"Copied byte for byte: {', '.join(copied)}.")
    if summary.fallbacks:
        lines += ["", "Fallbacks:", "", *(f"- `{k}`: {v}" for k, v in summary.fallbacks.items())]
    lines += [
        "",
        "`quantkit.json` holds every option, the error of every linear, and the hashes of source and text.",
        f"Measure it yourself: `quantkit eval {source} {name} --text TEXT`.",
    ]
    return "\n".join(lines) + "\n"
