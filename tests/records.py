"""Comparison records made up for tests: what `quantkit eval --json` would print of models that nobody ran."""

from quantkit.evaluation.comparison.record import pareto


def estimate(value: float, stderr: float = 0.1) -> dict:
    return {"value": value, "stderr": stderr}


def model(source: str, nbytes: int, kld: float | None = None, dppl: float = 0.5, top1: float = 0.9) -> dict:
    """A candidate; the base where `kld` is None."""
    base = kld is None
    return {
        "source": source,
        "size": {
            "disk_bytes": nbytes + 1000,
            "weight_bytes": nbytes,
            "bits_per_weight": nbytes / 1e6,
            "bits_per_quantized_weight": None if base else 4.25,
        },
        "metrics": {
            "nll": estimate(3.0),
            "ppl": estimate(20.0 + (0 if base else dppl), 1.0),
            "dppl": None
            if base
            else {"value": dppl, "stderr": 0.05, "relative": dppl / 20, "relative_stderr": 0.0025},
            "kld": None
            if base
            else {
                "mean": kld,
                "stderr": kld / 10,
                "median": kld / 2,
                "p99": kld * 5,
                "max": kld * 20,
            },
            "top1": None if base else top1,
        },
        "tasks": None,
    }


def record(*models: dict, gates: list[dict] | None = None, **data) -> dict:
    """A whole record; without models, of a base and two candidates."""
    models = models or (
        model("org/base", 16_000_000),
        model("out/four", 4_000_000, 0.02),
        model("out/three", 3_000_000, 0.08, dppl=2.0, top1=0.8),
    )
    floor = model("org/base", 1, 0.0002, dppl=0.01, top1=0.99)["metrics"]
    return {
        "schema": "quantkit.eval/3",
        "data": {
            "text": "book.txt",
            "sha256": "0123456789abcdef" * 4,
            "tokens": 4000,
            "ctx": 256,
            "stride": 128,
            "bos": False,
            "tokenizer": "fedcba9876543210" * 4,
            "dtype": "float32",
        }
        | data,
        "models": list(models),
        "noise_floor": {"dtype": "bfloat16", "tokens": 1000, "metrics": floor},
        "tasks": None,
        "pareto": pareto(models),
        "gates": gates or [],
        "env": {"quantkit": "9.9", "torch": "2.13.0", "device": "cpu"},
    }


NASTY = "evil/<script>alert(1)</script>\"'&amp;\u0007\ud800 ]]> --> $x_1$"
METHODS = {  # of the README's results: several lie on top of one another
    "gptq 8 bit": (6_990_000, 0.00004),
    "rtn 8 bit": (6_990_000, 0.00009),
    "gptq 4 bit": (4_610_000, 0.01087),
    "rtn 4 bit": (4_610_000, 0.02644),
    "gptq 3 bit": (4_020_000, 0.04528),
    "gptq 2 bit": (3_420_000, 0.29480),
    "nf4": (4_590_000, 0.01974),
    "nf4 gptq": (4_590_000, 0.00807),
    "awq 4 bit": (4_560_000, 0.01721),
    "awq gptq 4 bit": (4_560_000, 0.00987),
    "a model whose name is longer than anybody would want it to be": (4_400_000, 0.0123),
}


def many() -> dict:
    """The base and all of METHODS."""
    candidates = [model(name, *figures) for name, figures in METHODS.items()]
    return record(model("base", 11_540_000), *candidates)
