"""Which of transformers' families quantkit takes: every causal LM and every wrapper, as a tiny random model.

    python scripts/families.py [--only REGEX] [--kind text] [--methods nf4 gptq] [--dtype bfloat16]
        [--json FILE] [--seconds 120]

For every model type of transformers' causal-LM and multimodal mappings: shrinks its default configuration,
saves a random model, runs the methods on it, and compares the logits of the source and of each result,
streamed block by block, with those of transformers' own forward on the same weights, and what `eval` finds
with transformers' own log-likelihood. Prints what was taken, refused with the reason, or could not be built,
and the share of the blocks' parameters that was quantized. Models that are an encoder and a decoder are out
of quantkit's scope, and counted apart. One family after another, each in a process of its own: a crash or a
hang costs that family alone. With --json, rows that FILE has already are not made again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import tempfile
from pathlib import Path

from tiny_models import TOKENS, built, families, save_tokenizer

# Of logits. In bfloat16 they differ by a unit in the last place, 0.008 for logits of these models.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
GROUP = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX")
    parser.add_argument("--kind", choices=("text", "wrapper"), help="causal LMs, or what holds one, alone")
    parser.add_argument("--methods", nargs="*", default=["gptq", "awq", "nf4"])
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32", help="that quantkit computes in")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows there, and go on from there"
    )
    parser.add_argument("--seconds", type=float, default=120, help="that a family may take")
    args = parser.parse_args()

    import torch

    import quantkit.evaluation.evaluate
    import quantkit.quantize.loop  # noqa: F401  what every process needs is loaded once

    torch.set_num_threads(1)
    rows = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    known = {row["family"] for row in rows}
    for family, kind in families().items():
        if family in known or not args.only.search(family) or args.kind not in (None, kind):
            continue
        rows.append({"kind": kind} | isolated(family, args.methods, args.dtype, args.seconds))
        print(line(rows[-1]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))
    print(total(rows))


def isolated(family: str, methods: list[str], dtype: str, seconds: float) -> dict:
    """The row of one family, from a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=lambda: theirs.send(examined(family, methods, dtype)))
    child.start()
    theirs.close()
    row = {"family": family, "status": "crashed", "reason": f"took longer than {seconds:.0f} s"}
    try:
        if ours.poll(seconds):
            row = ours.recv()
    except EOFError:
        child.join()
        row["reason"] = f"its process ended with {child.exitcode}"
    child.kill()
    child.join()
    return row


def examined(family: str, methods: list[str], dtype: str = "float32") -> dict:
    """What becomes of a family: built or not, taken or refused, and how exact."""
    import transformers

    from quantkit.errors import QuantkitError

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    row, refusals = {"family": family}, []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        try:
            if encodes(family):
                return row | {"status": "no decoder", "reason": "an encoder and a decoder"}
            model = built(family)
            model.save_pretrained(source)
            save_tokenizer(source)
            model = reference(source, model, dtype)
        except Exception as error:
            return row | {"status": "not built", "reason": said(error)}
        try:
            row["source"] = difference(source, model, dtype)
            row["eval"] = evaluated(source, model, dtype)
            for method in methods:
                try:
                    row[method] = compressed(source, Path(folder) / method, method, model, row, dtype)
                except QuantkitError as error:  # of its layout, say
                    refusals.append(f"{method}: {error.message}")
        except QuantkitError as error:
            return row | {"status": "refused", "reason": error.message}
        except Exception as error:
            return row | {"status": "crashed", "reason": said(error)}
    worst = max(row[what] for what in ("source", "eval", *methods) if what in row)
    if not worst <= TOLERANCE[dtype]:
        return row | {"status": "wrong", "reason": f"logits differ by {worst:.2g}"}
    taken = len(refusals) < len(methods) or not methods
    return row | {"status": "taken" if taken else "refused", "reason": "; ".join(refusals)}


def reference(source: Path, model, dtype: str):
    """transformers' own model in `dtype`; `model`, in float32, where transformers cannot run it so."""
    import torch

    if dtype == "float32":
        return model
    lower = type(model).from_pretrained(source, dtype=dtype).eval()
    try:
        with torch.no_grad():
            lower(input_ids=ids(), use_cache=False)
    except RuntimeError:
        return model
    return lower


def encodes(family: str) -> bool:
    """Whether a family is an encoder with a decoder. Of those that are registered as causal LMs, too,
    transformers builds the decoder alone."""
    import transformers

    config = transformers.CONFIG_MAPPING[family]()
    text = config.get_text_config(decoder=True)
    composite = families()[family] == "wrapper" or config.sub_configs
    return bool(composite and (config.is_encoder_decoder or text.is_encoder_decoder))


def compressed(source: Path, output: Path, method: str, model, row: dict, dtype: str) -> float:
    """How far the result's streamed logits are from transformers' own with the decoded weights, which `model`
    has then.

    Notes in `row` the share of the blocks' parameters that was quantized.
    """
    from quantkit.options import CalibrationOptions, RunOptions
    from quantkit.quantize import job, loop, methods
    from quantkit.quantize.progress import Progress

    text = output.parent / "text"
    text.write_text(
        "\n".join(f"{k * k} sheep, {k} dogs and the letter {chr(65 + k % 26)}." for k in range(99))
    )
    options = {"group_size": GROUP} if method in ("gptq", "awq") else {}
    request = job.Request(
        str(source), method, methods.load(method).Options(**options),
        CalibrationOptions(calibration=str(text), samples=4, seqlen=TOKENS), 
        RunOptions(threads=1, allow_unread=True, dtype=dtype), output,
    )  # fmt: skip
    prepared = job.prepare(request, Progress())
    skeleton = prepared.skeleton
    inside = sum(parameter.numel() for block in skeleton.blocks for parameter in block.parameters())
    row["share"] = sum(spec.weights for spec in prepared.specs if not spec.kept) / inside
    loop.run(prepared, Progress())
    return difference(output, decoded(output, model), dtype)


def opened(folder: Path, dtype: str = "float32"):
    """The checkpoint as quantkit streams it, all but the blocks loaded."""
    import torch

    from quantkit.models.files.open import open_checkpoint
    from quantkit.models.skeleton import Skeleton

    skeleton = Skeleton(open_checkpoint(str(folder)), getattr(torch, dtype), torch.device("cpu"))
    skeleton.names.check_complete()
    skeleton.load_rest()
    return skeleton


def decoded(folder: Path, model):
    """transformers' `model` with the weights that a quantized checkpoint holds."""
    import torch

    from quantkit.models.skeleton.experts import fused_layers

    skeleton = opened(folder)
    names, state = skeleton.names, model.state_dict()
    fused = {}  # an expert's tensor by its name -> the part of the parameter of all experts
    for layer in fused_layers(model):
        for parameter, part, outputs in layer.parts():
            for expert, matrix in enumerate(state[f"{layer.place}.{parameter}"]):
                turned = matrix.t() if layer.form.transposed and matrix.ndim == 2 else matrix
                fused[f"{layer.place}.{expert}.{part}"] = turned[outputs]
    for name in names.shapes:
        if not names.in_tower(name) and (name in names.stored or name in names.joined):
            place = fused[name] if name in fused else state[name]
            shape = place.shape[::-1] if name in names.transposed else place.shape
            values = skeleton.read(name, torch.empty(shape, dtype=torch.float32))
            place.copy_(values.t() if name in names.transposed else values)
    return model


def difference(folder: Path, model, dtype: str) -> float:
    """The largest difference of logits: streamed through the blocks of `folder`, and `model`'s own."""
    import torch

    from quantkit.quantize.calibrate import walk

    skeleton = opened(folder, dtype)
    (hidden,) = walk.through(skeleton, [ids()])
    with torch.no_grad():
        want = model(input_ids=ids(), use_cache=False).logits
    return max(
        (skeleton.logits(row) - other).abs().max().item() for row, other in zip(hidden, want, strict=True)
    )


def evaluated(folder: Path, model, dtype: str) -> float:
    """How far the log-likelihood per token that `eval` finds is from `model`'s own."""
    import torch

    from quantkit.evaluation.evaluate import evaluate
    from quantkit.evaluation.windows import Protocol, Windows
    from quantkit.models.files.open import open_checkpoint

    tokens = len(ids()) * (TOKENS - 1)
    protocol = Protocol("random", "", tokens, TOKENS, TOKENS, False, "")
    windows = Windows(ids(), [0] * len(ids()), protocol)
    found = evaluate([open_checkpoint(str(folder))], windows, getattr(torch, dtype), torch.device("cpu"))
    with torch.no_grad():
        logits = model(input_ids=ids(), use_cache=False).logits[:, :-1].flatten(0, 1)
    want = torch.nn.functional.cross_entropy(logits, ids()[:, 1:].flatten())
    return abs(found.results[0].metrics.nll.value - want.item())


def ids():
    """Two sequences, none of whose tokens has a meaning of its own."""
    import torch

    return torch.randint(8, 256, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def said(error: Exception) -> str:
    """`KeyError: 'x'`, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def line(row: dict) -> str:
    share = f"{row['share']:.0%}" if "share" in row else ""
    return f"{row['kind']:8} {row['family']:26} {row['status']:10} {share:5} {row['reason']}".rstrip()


def total(rows: list[dict]) -> str:
    """How many of those that could be built are taken, by kind; what was refused, with the reasons."""
    told = [""]
    for kind in sorted({row["kind"] for row in rows}):
        of_kind = [row for row in rows if row["kind"] == kind and row["status"] != "no decoder"]
        made = [row for row in of_kind if row["status"] != "not built"]
        taken = [row for row in made if row["status"] == "taken"]
        told.append(
            f"{kind}: {len(of_kind)} families, {len(made)} built, {len(taken)} taken, "
            f"{sum(not row['reason'] for row in taken)} of them by every method"
        )
    told += [line(row) for row in rows if row["status"] not in ("taken", "no decoder", "not built")]
    return "\n".join(told)


if __name__ == "__main__":
    main()
