"""Benchmarks made up for tests: what workers would tell of checkpoints that nobody ran."""

import json
from pathlib import Path

import jsonschema

from quantkit.serving import bench
from quantkit.serving.bench.measure import Measured
from quantkit.serving.bench.settings import Point, Settings
from quantkit.serving.bench.subjects import Subject

SMALL = Settings(batch="1,3", prompt_tokens="5", tokens=4, repeats=2, warmup=1, rounds=1, dtype="float32")
FACTS = {
    "version": "5",
    "kernels": "torch Linear",
    "packed": False,
    "note": "",
    "dtype": "float32",
    "attention": "sdpa",
    "weight_bytes": 4000,
    "seconds": 0.5,
    "peak_bytes": 9000,
    "how": "resident, above the interpreter",
}
RATES = {"bandwidth": 1e6, "flops": 4e6}


class Known(Subject):
    """A subject without files."""

    active, read_share = 1000, 1.0


def subject(source: str, weight_bytes: int = 2000) -> Known:
    """Of 1000 parameters."""
    return Known(source, Path(source), "safetensors", None, weight_bytes, 2500, 16.0, 1000, 512, 64)


def run(point: Point, tokens: int, prefill: float, step: float) -> dict:
    """A run whose prefill and steps all took so many seconds."""
    return {
        "prefill_tokens": point.batch * point.prompt,
        "prefill_seconds": prefill,
        "decode_tokens": point.batch * (tokens - 1),
        "decode_seconds": step * (tokens - 1),
        "step_seconds": [step] * (tokens - 1),
        "kv_bytes": 100 * point.batch,
        "peak_bytes": 5000 + point.batch,
    }


def measured(source: str, settings: Settings, step, engine: str = "transformers", **facts) -> Measured:
    """A checkpoint that ran; step(batch, round) in seconds."""
    row = Measured(subject(source), engine)
    row.loaded, row.load_seconds, row.rates = FACTS | facts, [0.4, 0.6], [RATES]
    for point in settings.points:
        row.runs[point] = [
            run(point, settings.tokens, 0.01 * point.prompt, step(point.batch, number))
            for number in range(settings.rounds)
            for _ in range(settings.repeats)
        ]
    return row


def checked(made: dict) -> dict:
    """A record, which must fit its schema as it would be printed."""
    schema = json.loads(Path(bench.__file__).with_name("bench-2.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(json.dumps(made, allow_nan=False)), schema)
    return made
