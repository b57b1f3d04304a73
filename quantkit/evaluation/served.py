"""Compares an engine's probabilities with those of quantkit's decode of the same checkpoint."""

from collections.abc import Sequence

import torch

from quantkit.errors import DAMAGED, USAGE, VERIFICATION, QuantkitError, refuse_problems, require
from quantkit.evaluation import audit, evaluate, windows
from quantkit.evaluation.comparison.columns import number
from quantkit.evaluation.engines import Engine
from quantkit.evaluation.settings import EvalSettings
from quantkit.evaluation.stream import Listener, StreamedModel
from quantkit.inspection import verify as verification
from quantkit.layouts import Layout
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import open_checkpoint
from quantkit.quantize.progress import Progress

TOKENS = 256  # of the sequence that `check` compares
FEWER, FEWEST = 64, 16  # with llama.cpp: it gives the probabilities of one token at a time, as text
PROBABILITIES = FEWER << 16  # that it gives in about a minute
LEAST = 1e-4  # nats per token: divergences up to here are products in 16 bit, whatever the noise
FACTOR = 10  # times the noise: kernels round at other places. Measured: 0.7 to 2, int4 in vLLM 6, K-quants 8
ROUNDED = 3  # the same where clients round inputs. Measured: 0.8 to 1.2, with sums that overflow 8.8
OTHERWISE = (
    "no file was changed: the original model or the calibration text is another than the job's, or the "
    "checkpoint was not made as its manifest says"
)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def verify(
    source: str, base: str | None, asked: EvalSettings, progress: Progress, trust_remote_code: bool = False,
    reproduce: str | int | None = None, seed: int | None = None, calibration: str | None = None,
) -> dict:  # fmt: skip
    """Verify a checkpoint with `inspection.verify`, run an undamaged one in the requested engine, and solve
    blocks again. Return JSON. reproduce: number of blocks, or `all`. seed, calibration: see `audit.add`."""
    what = "--calibration and --seed are for --reproduce"
    require(reproduce or (calibration, seed) == (None, None), what, "add --reproduce 2", USAGE)
    blocks = audit.wanted(reproduce, base)
    engine = Engine.find(asked.engine, asked.python, asked.engine_option)
    record = verification.verify(source, base, progress.counting, trust_remote_code) | {"engine": None}
    if engine and not record["problems"]:
        paths = [source, base] if base else [source]
        opened = [open_checkpoint(path, trust_remote_code=trust_remote_code) for path in paths]
        record["engine"] = check(engine, opened, progress.evaluating)
    if reproduce is not None:
        audit.add(record, base, blocks, seed, calibration, trust_remote_code, progress)
    return record


def check(engine: Engine, checkpoints: Sequence[Checkpoint], listen: Listener) -> dict:
    """Compare an engine with quantkit's decode on one sequence of the held-out text; return JSON.

    `difference` is the mean KL divergence in nats per token, `bound` the largest that counts as rounding:
    FACTOR or ROUNDED times the noise, and at least LEAST. The noise is the divergence of quantkit's decode
    from itself in the engine's dtype (`arithmetic`) or, if larger, of the engine from quantkit's decode of
    the original model, the second of the checkpoints (`original`; None if the engine reads no such files,
    as llama.cpp reads no folders). Raises Declined if the engine does not run one.
    """
    first, *others = checkpoints
    run = [first, *(each for each in others if engine.reads(each))]
    (facts, arithmetic, tokens), *others = (_difference(engine, each, listen) for each in run)
    difference, original = facts["difference"]["mean"], others[0][0]["difference"]["mean"] if others else None
    factor = ROUNDED if (checkpoints[0].layout or Layout).rounds_inputs else FACTOR
    bound = max(LEAST, factor * max(arithmetic, original or 0.0))
    noise = {"tokens": tokens, "arithmetic": arithmetic, "original": original}
    made = facts | noise | {"difference": difference, "bound": bound, "agrees": difference <= bound}
    return {key: None if value != value else value for key, value in made.items()}  # JSON has no NaN


def refuse(record: dict, base: str | None = None) -> None:
    """Raise QuantkitError (exit code 6), with the record, if there are problems or the engine disagrees.
    base: the original model, if the checkpoint was compared with it."""
    files = record["files"] if base else []
    whole = files and all(file["state"] == "same" for file in files)
    refuse_problems(record, record["problems"], VERIFICATION, OTHERWISE if whole else DAMAGED)
    made = record["engine"]
    if made and not made["agrees"]:
        apart = f"KL divergence {number(made['difference'])} nats per token from quantkit's decode"
        what = f"{made['name']} does not compute what {record['source']} holds: {apart}, "
        hint = (
            "a coarse kernel adds a little: quantkit eval --engine compares it with the loss of compression; "
            "a fault adds much: quantkit inspect lists the engines that load the file"
        )
        raise QuantkitError(f"{what}rounding explains {number(made['bound'])}", hint, VERIFICATION, record)


def length(engine: str, vocabulary: int) -> int:
    """Return the tokens of the sequence that `check` compares."""
    return min(FEWER, max(FEWEST, PROBABILITIES // vocabulary)) if engine == "llama.cpp" else TOKENS


def _difference(engine: Engine, checkpoint: Checkpoint, listen: Listener) -> tuple[dict, float, int]:
    """Return an engine's difference from quantkit's decode, the divergence of that decode from itself in the
    engine's dtype (in float16 if it is float32 and inputs are rounded), and the number of tokens."""
    tokens, chosen = length(engine.name, checkpoint.text_config.vocab_size), frozenset({"kld"})
    ctx = min(tokens, checkpoint.context or tokens)
    text = windows.load(checkpoint, None, ctx, limit=ctx)
    model = StreamedModel.open(checkpoint, torch.float32, torch.device("cpu"))
    decoded = evaluate.run(model, text, listen)
    scores, facts = evaluate.in_engine(engine, decoded, text, None, chosen, listen)
    dtype = DTYPES.get(facts["dtype"], torch.bfloat16)
    if dtype == torch.float32 and (checkpoint.layout or Layout).rounds_inputs:
        dtype = torch.float16  # a sum in another order rounds some inputs otherwise, and then many
    floor = evaluate.measure_floor(decoded, scores, text, chosen, listen, dtype)
    return facts, floor["metrics"]["kld"]["mean"], text.protocol.tokens
