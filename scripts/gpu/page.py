"""The section of docs/measurements/gpu.md that scripts/gpu_day measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from common import table, versions

NOTHING = "**quantkit has not run on a real GPU yet.** Every number in these pages was measured on CPUs.\n"
Rows = dict[str, dict]


def figure(value: float | None, unit: float = 1.0) -> str:
    return "–" if value is None else f"{value / unit:.3g}"


def why(row: dict) -> str | None:
    """Return what stands for the figures of a row without any."""
    text = row.get("error") or row.get("skipped")
    return text and f"{'error' if 'error' in row else 'skipped'}: {text}".replace("|", "\\|")[:160]


def shown(header: list[str], rows: Rows, cells: Callable[[dict], list[str]]) -> str:
    """Return a table: a name, and its figures or why there are none in the first column of figures."""
    made = [[name, reason] if (reason := why(row)) else [name, *cells(row)] for name, row in rows.items()]
    width = max(map(len, [header, *made]))
    (header,), made = ([row + [""] * (width - len(row)) for row in part] for part in ([header], made))
    return table(header, made, left=1)


def device(rows: Rows) -> str:
    """Return a list of what the device does in a second."""
    parts = []
    if "launch_seconds" in (rates := rows.get("rates", {})):
        parts.append(f"a launch takes {figure(rates['launch_seconds'], 1e-6)} µs")
        parts += [
            f"{figure(rates[key], 1e12)} TFLOPS {name}"
            for key, name in (
                ("flops_float32", "in float32"),
                ("flops_bfloat16", "in bfloat16"),
                ("flops_bfloat16_into_float32", "of bfloat16 into float32"),
            )
            if key in rates
        ]
        parts.append(f"{figure(rates['copy_bytes_per_second'], 1e9)} GB/s from memory to memory")
        parts.append(f"{figure(rates['to_device_bytes_per_second'], 1e9)} GB/s from the host")
    for name, row in rows.items():
        if name.startswith("factor ") and "seconds" in row:
            parts.append(f"a Cholesky factor of {name.split()[1]} columns {figure(row['seconds'], 1e-3)} ms")
    return f"Measured rates: {', '.join(parts)}.\n" if parts else ""


def methods(rows: Rows) -> str:
    header = ["method", "bytes", "KL, CPU", "KL, device"]

    def cells(row: dict) -> list[str]:
        alike = "the same" if row["same_bytes"] else "nearly" if not row["other_weights"] else "other"
        return [alike, figure(row["kl_cpu"]), figure(row["kl_device"])]

    return shown(header, rows, cells)


PHASES = ("forward", "hessian", "transform", "solve", "pack", "write", "verify")


def jobs(rows: Rows) -> str:
    def cells(row: dict) -> list[str]:
        parts = [figure(row["phases"].get(phase)) for phase in PHASES]
        memory = f"{figure(row['peak_bytes'], 1e9)} of {figure(row['planned_bytes'], 1e9)}"
        return [figure(row["seconds"]), *parts, memory]

    return shown(["job", "seconds", *PHASES, "GB of planned"], rows, cells)


def sweep(rows: Rows) -> str:
    def cells(row: dict) -> list[str]:
        times = [figure(row[f"seconds_refine_{refine}"], 1e-3) for refine in (0, 2)]
        return [
            *times,
            figure(row.get("launches_per_column")),
            f"{row['same_codes']:.2%}",
            figure(row["loss_ratio"]),
        ]

    header = [
        "way, rows x columns",
        "sweep ms",
        "with refinement ms",
        "launches a column",
        "same codes",
        "loss",
    ]
    return shown(header, rows, cells)


def tests(rows: Rows) -> str:
    def cells(row: dict) -> list[str]:
        failed = ", ".join(row["failed"][:6]) or "none"
        return [
            str(row["passed"]),
            str(row["left_out"]),
            f"{len(row['failed'])}: {failed}".replace("|", "\\|"),
        ]

    return shown(["file", "passed", "skipped", "failed"], rows, cells)


def vllm(rows: Rows) -> str:
    keys = ("verdict", "mean", "largest", "compression", "likeliest_equal")
    header = ["checkpoint", "result", "mean difference", "largest", "compression changed", "likeliest equal"]
    return shown(header, rows, lambda row: [str(row[key]) for key in keys]) + measured_with(rows)


def measured_with(rows: Rows) -> str:
    return f"\nMeasured with {versions(rows)}.\n" if versions(rows) else ""


def peers(rows: Rows) -> str:
    def cells(row: dict) -> list[str]:
        parts = [figure(row["phases"].get(phase)) for phase in ("load", "quantize", "save")]
        return [*parts, figure(row["device_bytes"], 1e9)]

    header = ["tool", "load s", "quantize s", "save s", "GB of the device"]
    return shown(header, rows, cells) + measured_with(rows)


def bench(rows: Rows) -> str:
    return "".join(f"- {line}\n" for line in bench_lines(rows))


def bench_lines(rows: Rows) -> Iterator[str]:
    for name, row in rows.items():
        if reason := why(row):
            yield f"{name}: {reason}"
    for one in rows.get("attention", {}).get("measured", []):
        took = f"{figure(one['seconds'], 1e-3)} ms" if "seconds" in one else f"refused: {one['refused'][:80]}"
        yield f"attention, {one['attention']}, {one['length']} tokens: {took}, {one['kernel']}"
    for name, rate in rows.get("batching", {}).get("tokens_per_second", {}).items():
        yield f"batching, {name}: {figure(rate)} tokens/s"
    for one in rows.get("specdec", {}).get("drafts", []):
        best = one["measured"] or {}
        yield f"specdec, {one['draft'].rpartition('/')[2]}: {figure(best.get('speedup'))} times as fast"
    for name, one in rows.get("decode", {}).get("models", {}).items():
        rates = ", ".join(f"batch {n}: {figure(rate)}" for n, rate in one["tokens_per_second"].items())
        yield f"decoding, {name}: tokens/s at {rates}"


def ranks(rows: Rows) -> str:
    def cells(row: dict) -> list[str]:
        phases = [figure(row["phases"].get(phase)) for phase in PHASES]
        return [figure(sum(row["phases"].values())), *phases, figure(row["loss"])]

    return shown(["processes", "seconds", *PHASES, "loss"], rows, cells)


TABLES = {
    "device": device, "methods": methods, "blocks": jobs, "sweep": sweep, "tests": tests,
    "large": jobs, "vllm": vllm, "peers": peers, "bench": bench, "ranks": ranks,
}  # fmt: skip


def section(results: list[dict]) -> str:
    """Return Markdown of the results of stages, `{}` where one never ran."""
    results = [result for result in results if result]
    found = {result["stage"]: result for result in results}
    about = found.get("device", {}).get("rows", {}).get("torch", {})
    if about.get("device", "cpu") == "cpu":
        text = NOTHING + ("\nA rehearsal on the CPU, on tiny models:\n" if results else "")
    else:
        memory = f"{about['memory_bytes'] / 1e9:.0f} GB"
        text = f"Measured on one {about['device']} ({memory}) with torch {about['torch']}.\n"
    if not results:
        return text
    states = []
    for one in results:
        reason = one.get("why", "").replace("|", "\\|")
        states.append([one["stage"], one["state"], figure(one.get("seconds")), one["summary"], reason])
    text += "\n" + table(["stage", "state", "seconds", "contents", "reason"], states)
    for one in results:
        if one["rows"]:
            text += f"\n### {one['stage'].capitalize()}\n\n{TABLES[one['stage']](one['rows'])}"
    return text
