"""Prints the record of a checkpoint, or the differences of two."""

from typing import Any

from rich.console import Console

from quantkit.errors import count, name_all, printable
from quantkit.tables import make_table, print_facts, print_line, print_table, ranges, size

LOADS = {True: "yes", False: "no", None: "not tried"}
TENSOR_ROWS = 500  # maximum of printed rows; a model has a few dozen kinds of tensors
MOST_DIFFERENT = 10  # weights of two checkpoints that are printed


def print_record(record: dict[str, Any]) -> None:
    """Print facts, then bytes by part, tensors and clients."""
    console = Console(highlight=False, markup=False)
    print_facts(console, _facts(record))
    for warning in record["integrity"]["warnings"]:
        print_line(console, f"warning: {warning}", "yellow")
    _print_parts(console, record)
    _print_tensors(console, record["tensors"])
    _print_clients(console, record["clients"])
    _print_integrity(console, record["integrity"])


def _facts(record: dict[str, Any]) -> dict[str, str]:
    model, files, quantization = record["model"], record["files"], record["quantization"]
    shape = [f"{model['blocks']} blocks"] if model["blocks"] else []
    shape += [f"hidden size {model['hidden_size']}"] if model["hidden_size"] else []
    shape += [count(model["parameters"], "parameter")] + ["tied embeddings"] * model["tied"]
    return {
        "checkpoint": record["source"],
        "model": ", ".join([str(model["model_type"]), *shape]),
        "weights": f"{size(model['bytes'])} of {record['container']}, "
        f"{model['bits_per_weight'] or 0:.2f} bits per weight over the whole model "
        f"({count(files['count'], 'file')} of {size(files['bytes'])} in all)",
        "quantized": _quantized(quantization),
        "kept": _kept(quantization),
        "activations": quantization["activations"] if quantization and quantization["activations"] else "",
        "context": record["positions"]["text"],
        "tokenizer": _tokenizer(record["tokenizer"]),
        "made by": provenance(record["provenance"]),
    }


def _quantized(quantization: dict[str, Any] | None) -> str:
    if quantization is None:
        return "no"
    if not quantization["linears"]:
        return f"{quantization['layout']}, in a form that is not supported here"
    kinds = "; ".join(
        stored if len(quantization["stored"]) == 1 else f"{number} of {stored}"
        for stored, number in quantization["stored"].items()
    )
    details = [str(quantization["file_type"])] if quantization["file_type"] else []
    details += [f"method {quantization['method']}"] if quantization["method"] else []
    details += [f"layout {quantization['layout']}"] if quantization["layout"] not in (None, "gguf") else []
    details += {True: ["symmetric"], False: ["with zero points"]}.get(quantization["symmetric"], [])
    details += ["columns reordered"] if quantization["desc_act"] else []
    word = "matrix" if quantization["layout"] == "gguf" else "linear"  # embeddings among them
    bits = quantization["bits_per_weight"]  # None where the codes are not supported
    kinds += "" if bits is None else f", {bits:.2f} bits per weight"
    return f"{count(quantization['linears'], word)}: {kinds} ({', '.join(details)})"


def _kept(quantization: dict[str, Any] | None) -> str:
    """Return a text that lists linears of blocks that are not quantized, by dtype and reason."""
    groups: dict[tuple, list[str]] = {}
    for row in quantization["kept"] if quantization else ():
        key = ranges(row["blocks"]), row["stored"], row["why"]
        groups.setdefault(key, []).append(row["name"].removesuffix(".weight"))
    return "; ".join(
        f"{', '.join(names)} of block {blocks} in {stored}" + (f" ({why})" if why else "")
        for (blocks, stored, why), names in groups.items()
    )


def _tokenizer(tokenizer: dict[str, Any] | None) -> str:
    if tokenizer is None:
        return "none"
    parts = [tokenizer["kind"]] + ([f"{tokenizer['tokens']} tokens"] if tokenizer["tokens"] else [])
    template = tokenizer["chat_template_sha256"]
    parts.append(f"chat template {template[:12]}" if template else "no chat template")
    return ", ".join(parts)


def provenance(origin: dict[str, Any] | None) -> str:
    if origin is None:
        return ""
    parts = [origin["tool"]]
    source, calibration = origin.get("source"), origin.get("calibration")
    if isinstance(source, dict):
        parts.append(f"from {source.get('name')} (sha256 {str(source.get('sha256'))[:12]})")
    if isinstance(calibration, dict):
        parts.append(
            f"on {calibration.get('samples')} × {calibration.get('seqlen')} tokens of {text_of(calibration)}"
        )
    if origin.get("error") is not None:
        parts.append(f"mean relative error {origin['error']:#.2g}")
    if taught := origin.get("distilled"):
        ends = [taught.get(key) for key in ("before", "after")]
        losses = " → ".join(f"{end:.5f}" if isinstance(end, float) else "?" for end in ends)
        parts.append(f"distilled (held-out KL divergence {losses})")
    return ", ".join(parts)


def text_of(calibration: dict[str, Any]) -> str:
    """Return the name of a calibration text in a sentence."""
    source = calibration.get("source")
    return "shipped text" if source == "shipped" else str(source)


def _print_parts(console: Console, record: dict[str, Any]) -> None:
    total = record["model"]["bytes"] or 1
    rows = make_table("part", "parameters", "bytes", "share", "codes", "scales")
    for part in record["parts"]:
        coded = part["code_bytes"] + part["scale_bytes"]
        rows.add_row(
            part["part"],
            f"{part['parameters']:,}",
            size(part["bytes"]),
            f"{100 * part['bytes'] / total:.1f} %",
            size(part["code_bytes"]) if coded else "–",
            size(part["scale_bytes"]) if coded else "–",
        )
    print_table(console, rows)


def _print_tensors(console: Console, tensors: list[dict[str, Any]]) -> None:
    rows = make_table("tensors", "blocks", "shape", "stored as", "bytes")
    for row in tensors[:TENSOR_ROWS]:
        shape = "?" if row["shape"] is None else " × ".join(map(str, row["shape"])) or "1"
        name = row["name"].removesuffix(".weight")
        stored = row["stored"].replace(", groups of ", " g")
        rows.add_row(printable(name), ranges(row["blocks"]), shape, printable(stored), size(row["bytes"]))
    print_table(console, rows, 1)
    if len(tensors) > TENSOR_ROWS:
        console.print(f"and {count(len(tensors) - TENSOR_ROWS, 'row')} more: --json has all")


def _print_clients(console: Console, clients: list[dict[str, Any]]) -> None:
    rows = make_table("client", "tried with", "loads it")
    for row in clients:
        verdict = LOADS[row["loads"]]
        rows.add_row(row["client"], row["version"], f"{verdict}: {row['note']}" if row["note"] else verdict)
    print_table(console, rows, 1, 2)


def _print_integrity(console: Console, integrity: dict[str, Any]) -> None:
    looked = f"headers of {count(integrity['tensors'], 'tensor')}, configuration and sizes"
    looked += " and every value" if integrity["deep"] else " (values: --deep)"
    wrong = count(len(integrity["problems"]), "problem") if integrity["problems"] else "nothing is wrong"
    print_facts(console, {"checked": f"{looked}: {wrong}"})
    for words in (*integrity["problems"], *integrity.get("notes", ())):
        print_line(console, f"  {words}")


def print_comparison(record: dict[str, Any]) -> None:
    """Print the facts in which two checkpoints differ, and the weights that differ most."""
    console = Console(highlight=False, markup=False)
    sides = [_facts(model) for model in record["models"]]
    rows = make_table("", "A", "B")
    for name in sides[0]:
        values = [side[name] or "–" for side in sides]
        if values[0] != values[1]:
            rows.add_row(name, *map(printable, values))
    if rows.row_count:
        print_table(console, rows, 1, 2)
    weights = record["weights"]
    _print_differences(console, weights)
    left = weights["divided"] or weights["unlike"] or any(weights["only"])
    if record["tokenizers"] != "equal":
        print_facts(console, {"tokenizers": record["tokenizers"]})
    elif weights["compared"] == weights["equal"] and not left:
        print_facts(console, {"A and B": "equal in tokenizer and every weight"})


def _print_differences(console: Console, weights: dict[str, Any]) -> None:
    unequal = [row for row in weights["differences"] if row["largest"] != 0]
    if unequal:
        rows = make_table("largest differences", "|A − B| / |A|", "largest |A − B|")
        for row in unequal[:MOST_DIFFERENT]:
            largest = "up to scales" if row["largest"] is None else f"{row['largest']:.3g}"
            rows.add_row(row["name"].removesuffix(".weight"), f"{row['relative']:.5f}", largest)
        print_table(console, rows)
    facts = {
        "weights": f"{weights['compared']} compared, {weights['equal']} equal",
        "|A − B|/|A|": f"{weights['relative']:.5f} over all of them",
    }
    if divided := weights["divided"]:
        facts["not compared"] = f"{count(len(divided), 'vector')} divided by scales: {name_all(divided, 2)}"
    for side, names in zip("AB", weights["only"], strict=True):
        if names:
            facts[f"only in {side}"] = name_all(names)
    for row in weights["unlike"]:
        facts[row["name"]] = f"{row['shapes'][0]} in A, {row['shapes'][1]} in B"
    print_facts(console, facts)
