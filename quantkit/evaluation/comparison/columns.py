"""The columns of a comparison's table on a terminal, in Markdown and on the HTML page."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quantkit.evaluation.comparison.gates import look_up
from quantkit.tables import MODEL_BITS, megabytes

Columns = Mapping[str, tuple[str, Callable[[dict], str]]]  # header: meaning, and cell of a record
NOTHING = "–"
LOSS_NAMES = {"metrics.kld.mean": "KL divergence", "metrics.ppl.value": "perplexity"}
UNREADABLE = 1e4  # larger values are written with an exponent


def number(value: float | None) -> str:
    """Return a divergence with five decimals, or with an exponent if it is below 1e-4."""
    if value is None:
        return NOTHING
    return f"{value:.5f}" if value == 0 or abs(value) >= 1e-4 else f"{value:.2e}"


def estimate(record: dict | None, sign: str = "") -> str:
    """Return value and standard error, as `52.186 ± 1.114` or `6.92e+04 ± 4.3e+05`."""
    if not record or record["value"] is None:
        return NOTHING
    value, stderr = record["value"], record["stderr"]
    large = max(abs(value), stderr or 0.0) >= UNREADABLE
    error = NOTHING if stderr is None else f"{stderr:{'.2g' if large else '.3f'}}"
    return f"{value:{sign}{'.3g' if large else '.3f'}} ± {error}"


def at(path: str, write: Callable[[Any], str]) -> Callable[[dict], str]:
    """Return a function from a record to the text of its value at `path`; a dash if there is none."""

    def cell(record: dict) -> str:
        value = look_up(record, path)
        return NOTHING if value is None else write(value)

    return cell


COLUMNS: Columns = {  # the most important first: narrow terminals cut a table in two
    "kv bits": (
        "bits per value of a quantized key/value cache, scales included",
        at("kv.bytes_per_value", lambda nbytes: f"{8 * nbytes:.2f}"),
    ),
    "size": ("bytes of all tensors", at("size.weight_bytes", megabytes)),
    MODEL_BITS: ("per weight over the whole model", at("size.bits_per_weight", "{:.2f}".format)),
    "bits/weight": ("of quantized matrices", at("size.bits_per_quantized_weight", "{:.2f}".format)),
    "perplexity": ("± standard error", at("metrics.ppl", estimate)),
    "Δ perplexity": (
        "from the first model, ± standard error of paired tokens",
        at("metrics.dppl", lambda increase: estimate(increase, "+")),
    ),
    "KL divergence": ("mean over tokens, from the first model, in nats", at("metrics.kld.mean", number)),
    "top-1": (
        "tokens with the same most likely next token as the first model",
        at("metrics.top1", lambda share: f"{100 * share:.2f} %"),
    ),
    "from decode": (
        "KL divergence of an engine from quantkit's decode of the same model, in nats",
        at("engine.difference.mean", number),
    ),
}
DISTRIBUTION: Columns = {
    "KL median": ("of the tokens' KL divergences", at("metrics.kld.median", number)),
    "KL 99 %": ("99th percentile of the tokens' KL divergences", at("metrics.kld.p99", number)),
    "KL max": ("of the tokens' KL divergences", at("metrics.kld.max", number)),
}
# A column appears only if this was measured, in the noise floor's row too. The others have no noise floor.
NEEDS = {"kv bits": "kv", "Δ perplexity": "dppl", "top-1": "top1", "from decode": "engine"}
NEEDS |= dict.fromkeys(("KL divergence", *DISTRIBUTION), "kld")
UNITS = dict.fromkeys(("KL divergence", "from decode", *DISTRIBUTION), "nats/token")
UNITS |= {"kv bits": "bits/value", MODEL_BITS: "bits/weight"}


def columns(record: dict) -> Columns:
    """Return the columns for the measured figures, without the column of names."""
    models, pareto = record["models"], record["pareto"]
    compared = len(models) > 1
    measured = {None, *(key for model in models for key in model["metrics"] if compared)}
    measured |= {key for key in ("kv", "engine") if any(model.get(key) for model in models)}
    on_front = (
        f"on the Pareto front: no other model is as small with as low a {LOSS_NAMES[pareto['loss']]}",
        lambda model: "yes" if model["source"] in pareto["models"] else "",
    )
    shown = COLUMNS | ({"front": on_front} if compared else {}) | DISTRIBUTION
    shown = {name: column for name, column in shown.items() if NEEDS.get(name) in measured}
    return shown | {
        f"{task} {metric}": ("of lm-evaluation-harness, ± standard error", _task(task, metric))
        for model in models
        for task, metrics in (model["tasks"] or {}).items()
        for metric in metrics
    }


def _task(task: str, metric: str) -> Callable[[dict], str]:
    return lambda model: estimate((model["tasks"] or {}).get(task, {}).get(metric))


def rows(record: dict) -> list[list[str]]:
    """Return the cells of each model's row and of the noise floor's; the first cell is the name."""
    models, shown = record["models"], columns(record)
    named = labels([model["source"] for model in models])
    table = [
        [label, *(cell(model) for _, cell in shown.values())]
        for model, label in zip(models, named, strict=True)
    ]
    if floor := record["noise_floor"]:
        measured = floor["metrics"]
        cells = [cell(floor) if NEEDS.get(name) in measured else "" for name, (_, cell) in shown.items()]
        table.append(["(noise floor)", *cells])
    return table


def labels(sources: Sequence[str]) -> list[str]:
    """Return a name for each path: its shortest unique end, such as `b/model`. Equal paths get numbers."""
    parts = [[part for part in source.split("/") if part not in ("", ".")] or [source] for source in sources]
    named = []
    for position, (source, path) in enumerate(zip(sources, parts, strict=True)):
        others = [other for k, other in enumerate(parts) if sources[k] != source]
        ends = (path[-depth:] for depth in range(1, len(path) + 1))
        end = next((end for end in ends if all(other[-len(end) :] != end for other in others)), [source])
        again = sources[:position].count(source)
        named.append("/".join(end) + (f" #{again + 1}" if again else ""))
    return named


def label_by_source(record: dict) -> dict[str, str]:
    """Return {source: label} of all models; equal sources have the label of the first."""
    sources = [model["source"] for model in record["models"]]
    return dict(reversed(list(zip(sources, labels(sources), strict=True))))


def footnotes(record: dict) -> list[str]:
    """Return the lines below a table: the protocol, the noise floor, and what each engine said."""
    models, floor, declined = record["models"], record["noise_floor"], record.get("engine_declined") or {}
    names, data = labels([model["source"] for model in models]), record["data"]
    notes = [
        f"{data['text']} (sha256 {data['sha256'][:12]}), {data['tokens']} tokens scored, context "
        f"{data['ctx']}, stride {data['stride']}, BOS {'in every window' if data['bos'] else 'none'}, "
        f"{data['dtype']}"
    ]
    if floor:
        against = f"{names[0]} against itself in {floor['dtype']}"
        notes.append(f"noise floor: {against}, first {floor['tokens']} tokens")
    served = [
        (name, model["engine"]) for name, model in zip(names, models, strict=True) if model.get("engine")
    ]
    notes += [f"{name}: {engine_line(engine)}" for name, engine in served]
    shown, said = label_by_source(record), "was not measured in the engine"
    return notes + [f"{shown.get(name, name)} {said}: {error['message']}" for name, error in declined.items()]


def engine_line(engine: dict) -> str:
    """Return an engine's name and version, and what it said of its kernels and precision."""
    said = [f"{engine['name']} {engine['version']}", engine["kernels"], engine["dtype"]]
    return ", ".join(filter(None, said))


def check_line(engine: dict) -> str:
    """Return what `served.check` found, in words."""
    return (
        f"{engine_line(engine)}: KL divergence {number(engine['difference'])} from quantkit's decode, on "
        f"{engine['tokens']} tokens; rounding explains up to {number(engine['bound'])}"
    )
