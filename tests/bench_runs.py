"""Benchmarks made up for tests: what workers would tell of checkpoints that nobody ran."""

import json
from pathlib import Path

import jsonschema

from quantkit.serving import bench
from quantkit.serving.bench.measure import ModelRuns, Subject
from quantkit.serving.bench.settings import BenchSettings, Workload

SMALL = BenchSettings(
    batch="1,3", prompt_tokens="5", tokens=4, repeats=2, warmup=1, rounds=1, dtype="float32"
)
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


def subject(source: str, weight_bytes: int = 2000) -> Subject:
    """Of 1000 parameters."""
    size = {"disk_bytes": 2500, "weight_bytes": weight_bytes, "bits_per_weight": 16.0}
    return Subject(source, Path(source), size, 1000, 512, 64)


def run(work: Workload, tokens: int, prefill: float, step: float) -> dict:
    """A run whose prefill and steps all took so many seconds."""
    return {
        "prefill_seconds": prefill,
        "decode_tokens": work.batch * (tokens - 1),
        "decode_seconds": step * (tokens - 1),
        "step_seconds": [step] * (tokens - 1),
        "kv_bytes": 100 * work.batch,
        "peak_bytes": 5000 + work.batch,
    }


def measured(source: str, settings: BenchSettings, step, engine: str = "transformers", **facts) -> ModelRuns:
    """A checkpoint that ran; step(batch, round) in seconds."""
    row = ModelRuns(subject(source), engine)
    row.loaded = [FACTS | facts | {"seconds": seconds} for seconds in (0.4, 0.6)]
    for work in settings.workloads:
        row.runs[work] = [
            run(work, settings.tokens, 0.01 * work.prompt, step(work.batch, number))
            for number in range(settings.rounds)
            for _ in range(settings.repeats)
        ]
    return row


def checked(made: dict, schema: str = "bench-3.json") -> dict:
    """A record, which must fit its schema as it would be printed."""
    schema = json.loads((Path(bench.__file__).parent / schema).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(json.dumps(made, allow_nan=False)), schema)
    return made
