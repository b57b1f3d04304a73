"""Prints plans and results of jobs, as tables or JSON."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote

from rich.console import Console

from quantkit.capacity.job import python_bytes, seconds
from quantkit.capacity.show import duration
from quantkit.errors import count, name_all
from quantkit.evaluation.comparison.table import report
from quantkit.evaluation.runs import Result
from quantkit.inspection import clients, look, show
from quantkit.inspection.names import of_experts, starred
from quantkit.models.files import gguf_shards
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.quantize.job import Job
from quantkit.quantize.outputs import ExpertTokens, Loss, Summary
from quantkit.quantize.prepare.plan import JobPlan
from quantkit.tables import (
    make_console,
    make_table,
    megabytes,
    print_facts,
    print_line,
    print_refused,
    print_table,
    ranges,
    size,
)

STATES = {"device": "", "host": ", hidden states in host memory", "disk": ", hidden states in a file"}


def plan_record(job: Job) -> dict:
    """Return the JSON of `--dry-run`: the plan, with the grid of every linear."""
    return {
        "schema": "quantkit.plan/2",
        "source": job.request.source,
        "output": str(job.staging.output),
        "files": list(map(str, job.method.output.paths(job.material))),
        "refused": job.refused,
        "method": job.method.name,
        "options": asdict(job.request.method.options),
        "calibration": job.calibration.record() if job.calibration else None,
        "plan": asdict(job.plan),
        "expected_seconds": seconds(job),
        "matrices": [matrix._asdict() for matrix in job.method.output.planned(job.specs)],
        "linears": [
            {
                "name": spec.name,
                "shape": [spec.out_features, spec.in_features],
                "grid": asdict(spec.grid) if spec.grid else None,
                "kept": spec.kept,
            }
            for spec in job.specs
        ],
        "kept_parameters": job.kept_parameters,
        "copied": job.copied,
    }


def _whole(paths: Sequence[Path]) -> str:
    """Return the path of an output, such as `model-00001-of-00003.gguf and 2 more`."""
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{paths[0]}{more}"


def print_plans(jobs: Sequence[Job]) -> None:
    """Print the plan of each output, then memory, disk space and settings of the whole run."""
    console, plans = make_console(), [job.plan for job in jobs]
    for job in jobs:
        print_refused(console, refused := job.refused)
        _print_linears(console, job)
        linears = len([spec for spec in job.specs if not spec.kept])
        facts = {"output": _whole(job.method.output.paths(job.material)), **_sizes(job.plan, linears)}
        if not refused and gguf_shards.existing(job.staging.output):
            facts["replaces"] = "the existing output"
        print_facts(console, facts)
    facts = {"kept as is": _kept(jobs[0].kept_parameters), "copied": _copied(jobs[0].copied)}
    if len(jobs) > 1:
        facts["in all"] = f"{len(jobs)} files, {megabytes(sum(plan.output_bytes for plan in plans))}"
    execution, made = plans[0].execution, jobs[0].calibration
    memory, host = (max(getattr(plan, what) for plan in plans) for what in ("memory_bytes", "host_bytes"))
    where = f"about {memory_of(jobs[0].checkpoint, execution.device, memory)}"
    if execution.device != "cpu":
        where += f", {megabytes(host)} on the host"
    ranks = plans[0].ranks
    if ranks > 1:
        where += f", for each of {ranks} processes"
    facts |= {
        "memory": where,
        "disk": f"{megabytes(sum(plan.disk_bytes for plan in plans))} while it runs",
        "computes": computes(asdict(execution), made is not None),
        "calibration": calibration(made and made.record(), jobs[0].request.calibration.calibration),
    }
    if len(jobs) == 1 and (expected := seconds(jobs[0])):
        facts["time"] = f"about {duration(expected)}, by a benchmark of this machine"
    print_facts(console, facts)


def _sizes(sized: JobPlan | Summary, linears: int) -> dict[str, str]:
    """Return the sizes of source and output, and the bits per weight of the output."""
    before, after = sized.source_bytes, sized.output_bytes
    large, small = max(before, after), min(before, after)
    ratio = f"{large / small:.2f}× {'larger' if after > before else 'smaller'}"
    unchanged = large < 1.005 * small
    sizes = f"{megabytes(before)} → {megabytes(after)} ({'as large' if unchanged else ratio})"
    bits = f"{sized.bits_per_weight_model:.2f} over the whole model"
    if sized.bits_per_weight is not None:
        word = count(linears, "linear") if sized.matrices == linears else f"{sized.matrices} matrices"
        bits = f"{sized.bits_per_weight:.2f} in {word.replace(' ', ' quantized ')}, {bits}"
    return {"size": sizes, "bits/weight": bits}


def _print_linears(console: Console, job: Job) -> None:
    """Print the linears; identical linears of several blocks or experts share a row."""
    table = make_table("linears", "blocks", "shape", "quantized to")
    equal: dict[tuple, set[int]] = {}
    for matrix in job.method.output.planned(job.specs):
        name, block = starred(matrix.name) if matrix.block is None else (matrix.name, matrix.block)
        blocks = equal.setdefault((of_experts(name), matrix.shape, matrix.becomes), set())
        blocks |= set() if block is None else {block}
    order = list(dict.fromkeys(name for name, *_ in equal))
    for (name, shape, becomes), blocks in sorted(
        equal.items(), key=lambda item: (order.index(item[0][0]), *item[0][1:])
    ):
        table.add_row(name, ranges(sorted(blocks)), " × ".join(map(str, shape)), becomes)
    print_table(console, table, 1)


def _kept(records: Sequence[dict]) -> str:
    """Return a text such as `linear_attn.conv1d, mlp.gate: 6 tensors, 0.30 MB`, with names inside blocks."""
    names = (re.split(r"\.\d+\.", record["name"], maxsplit=1)[-1] for record in records)
    kinds = list(dict.fromkeys(name.removesuffix(".weight") for name in names))
    nbytes = sum(record["bytes"] for record in records)
    return f"{name_all(kinds)}: {count(len(records), 'tensor')}, {size(nbytes)}" if records else ""


def _copied(modules: Mapping[str, int]) -> str:
    """Return a text such as `mtp (0.10 MB), visual (0.30 MB): byte for byte`."""
    entries = [f"{name} ({size(nbytes)})" for name, nbytes in modules.items()]
    return f"{name_all(entries)}: byte for byte" if entries else ""


def _reached(seen: ExpertTokens) -> str:
    """Return `tokens per expert: fewest 3, median 111, most 900; 5 of 64 below their width` or the like."""
    how = {"shrink": " (mixed with tokens of their layer)", "routed": " (--experts routed: not mixed)"}
    return (
        f"tokens per expert: fewest {seen.fewest}, median {seen.median}, most {seen.most}; "
        f"{seen.starved} of {seen.experts} below their width"
        + (how.get(seen.statistics, "") if seen.starved else "")
    )


def _scaled(linears: Mapping[str, dict]) -> str:
    """Return a text such as `30 linears, columns by up to 38×; 18 linears unchanged: …`."""
    spreads = [scaling["spread"] for scaling in linears.values() if scaling["into"]]
    parts = [f"{count(len(spreads), 'linear')}, columns by up to {max(spreads):.1f}×"] if spreads else []
    if left := len(linears) - len(spreads):
        parts.append(f"{count(left, 'linear')} unchanged: no layer before absorbs scales")
    return "; ".join(parts) or "no linear: columns are alike, or scaling does not reduce the error"


def _loss(loss: Loss | None) -> str:
    """Return a phrase such as `KL divergence 0.105 ± 0.007 (round to nearest: 0.718), same top token 82%`."""
    if loss is None:
        return "not measured"
    nearest = "" if loss.rtn_kld is None else f" (round to nearest: {loss.rtn_kld:#.3g})"
    return (
        f"KL divergence {loss.kld:#.3g} ± {loss.stderr:.1g}{nearest}, same top token {loss.top1:.0%}; "
        f"{loss.tokens} held-back tokens ({loss.text})"
    )


def total(stages: dict[str, float]) -> str:
    """Return total and single stages, such as `15.5 (forward 10.1, solve 5.4)`."""
    parts = ", ".join(f"{stage} {value:.1f}" for stage, value in stages.items() if value >= 0.05)
    return f"{sum(stages.values()):.1f}" + (f" ({parts})" if parts else "")


def computes(how: dict, calibrated: bool) -> str:
    """Return a phrase such as `in bfloat16 on 1 thread, batches of 8, hidden states in host memory`."""
    words = f"in {how['dtype']} on {count(how['threads'], 'thread')}"
    if calibrated:
        words += f", batches of {how['batch_size']}" + STATES[how.get("states", "device")]
        words += ", one forward pass per site" if how.get("sequential") == "repeat" else ""
    return words


def calibration(made: dict | None, asked: str | None = None) -> str:
    """Return a phrase that describes a calibration set. asked: the text that was given."""
    if made is None:
        return f"none needed: {asked} is not read" if asked else "none needed"
    return f"{made['samples']} sequences of {made['seqlen']} tokens, {show.text_of(made)}"


def print_result(result: Result) -> None:
    """Print the results of a command, or that its outputs were finished before `--resume`."""
    for summary in result.summaries:
        print_summary(summary, result.evaluation if summary is result.summaries[-1] else None)
    for output in () if result.summaries else result.outputs:
        print(f"{output} is already finished")


def print_summary(summary: Summary, evaluation: dict | None) -> None:
    """Print sizes, bits per weight, error, seconds, fallbacks and the next command."""
    console = make_console()
    against_rtn = summary.rtn_error is not None
    measured = "output error of a linear" if against_rtn else "squared error of a linear's weights"
    against = f" (round to nearest: {summary.rtn_error:#.2g})" if against_rtn else ""
    facts = {"written": _whole(gguf_shards.of(Path(summary.output))), **_sizes(summary, summary.linears)}
    facts["loss"] = _loss(summary.loss)
    if summary.error is not None:
        facts["error"] = f"{summary.error:#.2g} mean relative {measured}{against}"
    if summary.activations:
        facts["activations"] = f"rounded at run time: {summary.activations}; not included in the error"
    facts["seconds"] = total(summary.seconds)
    if summary.fallbacks:
        facts["fallbacks"] = f"{count(len(summary.fallbacks), 'linear')} rounded to nearest"
    if summary.scaled is not None:
        facts["scaled"] = _scaled(summary.scaled)
    if summary.kept:
        facts["kept 16 bit"] = count(summary.kept, "linear")
    facts["kept as is"] = _kept(summary.kept_parameters)
    if summary.left_out:
        names, nbytes = name_all(list(summary.left_out)), megabytes(sum(summary.left_out.values()))
        facts["left out"] = f"{names} ({nbytes}): create the mmproj file with llama.cpp's converter"
    facts["copied"] = _copied(summary.copied)
    if summary.experts:
        facts["experts"] = _reached(summary.experts)
    print_facts(console, facts)
    if summary.outlier_columns:
        _print_outliers(console, summary.outlier_columns)
    for linear, reason in summary.fallbacks.items():
        print_line(console, f"  {linear}: {reason}", indent=4)
    for note in summary.steps_down:
        print_line(console, f"note: {note}")
    record, _ = look.at(summary.output)
    for index, (_, line, packages) in enumerate(clients.load_lines(record["clients"], summary.output)):
        after = f"  (pip install {packages})" if packages else ""
        console.print(f"{'or' if index else 'load':12s} {line}{after}", soft_wrap=True)
    if evaluation:
        return report(evaluation).show()
    command = "eval" if record["tokenizer"] else "inspect"  # eval reads text
    models = f"{quote(summary.source)} {quote(summary.output)}"
    console.print(f"\nnext: quantkit {command} {models}", soft_wrap=True)


def memory_of(source: Checkpoint, device: str, peak: int) -> str:
    """Return the text of a job's peak memory, with Python and tokenizer on a CPU. peak: bytes above these."""
    if device != "cpu":
        return f"{megabytes(peak)} on {device}"
    python = python_bytes(source.text_config.vocab_size, source.folder.is_file())
    return f"{megabytes(peak + python)} on the CPU, {megabytes(python)} of it Python and tokenizer"


def print_imatrix(record: dict, source: Checkpoint) -> None:
    """Print the record of `quantkit imatrix`: the result, or the plan if it has no `seconds`."""
    console, done, how = make_console(), record.get("seconds"), record["execution"]
    print_refused(console, record.get("refused"))
    facts = {} if done else {"output": record["output"]}
    facts |= {
        "matrices": str(record["matrices"]),
        "calibration": calibration(record["calibration"]),
        "computes": computes(how, True),
        "memory": f"about {memory_of(source, how['device'], record['memory_bytes'])}",
    }
    if done:
        facts["seconds"] = total(done)
    print_facts(console, facts)


def _print_outliers(console: Console, counts: dict[str, int]) -> None:
    """Print the number of outlier input columns of every linear, block by block."""
    table = make_table("linear", "outlier columns, by block")
    kinds: dict[str, list[int]] = {}
    for name, number in counts.items():
        _, _, local = re.split(r"\.(\d+)\.", name, maxsplit=1)
        kinds.setdefault(local, []).append(number)
    for local, numbers in kinds.items():
        table.add_row(local, " ".join(map(str, numbers)))
    print_table(console, table, 1)
