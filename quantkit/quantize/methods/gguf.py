"""gguf: one file for llama.cpp with ggml's types, by error feedback or encoded as llama-quantize does."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, count, name_all, require
from quantkit.models.gguf.file_types import (
    BLOCKS,
    FILE_TYPES,
    NEED_IMPORTANCE,
    NO_FEEDBACK,
    SCALED,
    Model,
    parse_file_type,
)
from quantkit.models.gguf.mixtures import (
    EMBEDDING,
    Choice,
    Wishes,
    choose,
    nbytes,
    of_file,
    without_importance,
)
from quantkit.options import flag_of, option
from quantkit.quantize.methods import Method, Work, composing, refuse_override

if TYPE_CHECKING:
    from quantkit.grids.ggml.block import BlockGrid
    from quantkit.models.files.checkpoint import Checkpoint
    from quantkit.models.gguf.imatrix import Imatrix
    from quantkit.models.gguf.tensors import Target
    from quantkit.models.skeleton import Skeleton
    from quantkit.quantize.methods import Override

UNUSED = ("override", "allow_unread")  # options of a run that make no sense here
FLOATS = ("F32", "F16", "BF16")
TYPED = ("type", "tensor_type", "output_tensor_type", "token_embedding_type", "pure")  # options of types
SUMMARY = "GGUF: one file that llama.cpp runs, in K-quants (Q4_K_M …), i-quants (IQ2_M …) or floats (F16 …)."
WORK = Work(1, 10, (0.35e-6, 1.9e-6), (20, 40), sample=1 / 8, outside=True)


@dataclass(frozen=True)
class Options:
    """Flags of `quantkit gguf`."""

    type: tuple[str, ...] = option(
        ("Q4_K_M",),
        f"File type: {', '.join(FILE_TYPES)}. Repeatable: --solver rtn makes all of them in one pass.",
        short="-t",
        names=FILE_TYPES,
    )
    like: str | None = option(
        None,
        "FILE.gguf: give each tensor the type that it has in this file, such as a mixture made by others. "
        "Excludes other options of types. (default: the types of --type)",
    )
    solver: str = option(
        "gptq",
        "rtn: llama-quantize's own encoder, with the importance of --imatrix. gptq: error feedback on "
        "calibration text, half the loss at the same size. yaqa: error feedback that also uses gradients of "
        "the model's loss, the least loss, in several times the time.",
        names=composing.SOLVERS,
    )
    imatrix: str = option(
        "auto",
        "rtn: importance of each input column. auto: measured on the calibration text. none: no importance. "
        "FILE: an importance matrix from llama.cpp or quantkit imatrix.",
    )
    tensor_type: tuple[str, ...] = option(
        (),
        "REGEX=TYPE: use this type for tensors whose GGUF name matches, such as 'ffn_down=Q6_K'. "
        "Repeatable; the first match counts.",
    )
    output_tensor_type: str | None = option(
        None,
        "Type of the output matrix, tied embeddings included. (default: as the file type says)",
        names=BLOCKS,
    )
    token_embedding_type: str | None = option(
        None, "Type of the token embedding. (default: as the file type says)", names=BLOCKS
    )
    pure: bool = option(False, "Use one type for all matrices. Most file types mix several types.")
    strict: bool = option(
        False, "Refuse a tensor that cannot have the requested type, instead of using another type."
    )
    pre_tokenizer: str | None = option(
        None,
        "llama.cpp's name of the pre-tokenizer, the rule that splits text into words. (default: detected)",
    )
    damp: float = composing.shared("damp")
    refine: int = composing.shared("refine")
    transform: str = composing.shared("transform")
    target: str = composing.shared("target")


def suffix(options: Options) -> str:
    """Return the end of the derived output name, such as `Q4_K_M.gguf`."""
    types = f"like-{Path(options.like).stem}" if options.like else stored_as(options)
    return f"{types}{composing.suffix(options, 'transform')}.gguf"


def record(options: Options) -> dict[str, str | None]:
    """Return {"like": sha256 of the types} for `--like`: not the path of the file decides the output."""
    types = repr(of_file(Path(options.like))) if options.like else None
    return {"like": types and hashlib.sha256(types.encode()).hexdigest()}


def stored_as(options: Options) -> str:
    """Return the file type, which decides every tensor's type."""
    return parse_file_type(options.type[0])


def check(options: Options) -> None:
    """Raise QuantkitError if options are invalid for every model."""
    require(options.type, "no file type is given", "for example --type Q4_K_M", USAGE)
    for name in options.type:
        parse_file_type(name)
    composing.check(options)
    typed = [name for name in TYPED if getattr(options, name) != getattr(Options(), name)]
    if options.like and typed:
        flags = name_all(map(flag_of, typed))
        raise QuantkitError(f"--like decides all types, not {flags}", f"leave out {flags}", USAGE)
    nearest, awq = options.solver == "rtn", options.transform == "awq"
    what = f"--transform {options.transform} is for --solver gptq: rtn encodes tensors as they come"
    require(not (awq and nearest), what, "leave it out, or choose --solver gptq", USAGE)
    what = f"--imatrix {options.imatrix} is for --solver rtn: {options.solver} gathers more than that"
    require(nearest or options.imatrix == "auto", what, "add --solver rtn, or leave it out", USAGE)


def each(options: Options, output: Path | None, model: str) -> list[tuple[Options, Path | None]]:
    """Return options and output path of every requested file. `output` is a folder if it exists as one or if
    several files are requested; names inside are derived as without `output`."""
    names = list(dict.fromkeys(parse_file_type(name) for name in options.type))
    what = f"--output {output} is one file, {len(names)} are requested"
    require(len(names) < 2 or not output or output.suffix != ".gguf", what, "give a folder", USAGE)
    inside = output and (len(names) > 1 or output.is_dir())
    single = [dataclasses.replace(options, type=(name,)) for name in names]
    return [(one, output / f"{model}-{suffix(one)}" if inside else output) for one in single]


def build(options: Options, calibrated: bool = False, skeleton: Skeleton | None = None) -> Method:
    """Return the method. Every tensor's type is chosen here, from names and shapes."""
    from quantkit.grids.ggml import TYPES, named
    from quantkit.layouts.ggml import GgmlLayout
    from quantkit.models.gguf import configuration, imatrix, metadata, tensors
    from quantkit.models.skeleton.names import copied_modules
    from quantkit.quantize.outputs.gguf import GgufOutput

    what = "gguf cannot be tried in memory"
    require(skeleton is not None, what, "write it with quantkit gguf, then evaluate that file", USAGE)
    file_type = stored_as(options)
    checkpoint = skeleton.checkpoint
    targets = tensors.of_checkpoint(checkpoint)
    feedback = options.solver != "rtn"
    label = of_file(Path(options.like))[0] if options.like else file_type
    choices = chosen_types(options, file_type, targets, skeleton)
    encoded = any(choice.type in TYPES for choice in choices)
    refused = [choice for choice in choices if feedback and choice.type in NO_FEEDBACK]
    types, names = ({getattr(choice, part) for choice in refused} for part in ("type", "name"))
    what = f"error feedback does not support {name_all(sorted(types))}: {name_all(sorted(names))}"
    hint = "add --solver rtn, or choose IQ2_XXS, the smallest type with error feedback"
    require(not refused, what, hint, UNSUPPORTED)
    if feedback and encoded:
        choices = [_without_feedback(*both, checkpoint) for both in zip(choices, targets, strict=True)]
    notes = _fallbacks(choices)
    shapes = {target.name: target.shape for target in targets}
    tokenizer = metadata.tokenizer(checkpoint, shapes[EMBEDDING][0], options.pre_tokenizer, notes.append)
    weighted = any(choice.type in TYPES and named(choice.type).weighted for choice in choices)
    given = options.imatrix if weighted and not feedback else "none"
    weighed = None if given in ("auto", "none") else imatrix.of_model(Path(given), shapes)
    if not feedback and given != "auto":
        _check_importance(choices, weighed, given)
    measured = [choice for choice in choices if choice.type in TYPES and named(choice.type).weighted]
    inside = [choice.name for choice in measured if choice.name.startswith("blk.")]  # as llama-imatrix has
    if weighed and (lacking := [name for name in inside if name not in weighed.sums]):
        of = f"{count(len(lacking), 'tensor')}, whose columns count alike: {name_all(lacking, 3)}"
        notes.append(f"{given} has no importance of {of}")
    output = GgufOutput(
        targets=tuple(targets),
        chosen={choice.name: choice.type for choice in choices},
        metadata=metadata.assemble(checkpoint, targets, label, tokenizer),
        imatrix=weighed,
        gathers=given == "auto",
        origin="gathered by quantkit" if given == "auto" else given,
        left_out={
            module.name: module.nbytes
            for module in copied_modules(skeleton.model, skeleton.names, checkpoint)
        },
    )
    if output.left_out:
        notes.append(
            f"not written, because the file holds a language model alone: {name_all(list(output.left_out))}"
        )
    notes += configuration.notes(checkpoint.text_config)
    linears = output.linears

    def make_grid(
        name: str, out_features: int, in_features: int, override: Override | None
    ) -> BlockGrid | None:
        refuse_override(override, "use --tensor-type for GGUF files")
        type = output.chosen.get(linears.get(name))
        return named(type) if feedback and type in TYPES else None

    chosen = composing.solver(options if encoded else dataclasses.replace(options, solver="rtn"), "none")
    transform = composing.block_transform(options.transform, chosen) if feedback and encoded else None
    return Method("gguf", chosen, GgmlLayout(), make_grid, transform, output, tuple(notes), outside=True)


def _check_importance(choices: Sequence[Choice], imatrix: Imatrix | None, given: str) -> None:
    """Raise QuantkitError for tensors whose types are useless without importance, as llama-quantize does."""
    known = imatrix.sums if imatrix else {}
    lacking = [choice.name for choice in without_importance(choices) if choice.name not in known]
    if lacking:
        raise QuantkitError(
            f"--imatrix {given} leaves {count(len(lacking), 'tensor')} without importance, which types like "
            f"{sorted(NEED_IMPORTANCE)[-1]} need: {name_all(lacking, 3)}",
            "leave out --imatrix: it is gathered from the calibration text",
            USAGE,
        )


def _without_feedback(choice: Choice, target: Target, checkpoint: Checkpoint) -> Choice:
    """Return the stored type for a matrix that the file splits: error feedback needs whole matrices."""
    if target.part is None:
        return choice
    info = checkpoint.infos.get(target.stored[0])
    type = info.dtype if info and info.dtype in FLOATS else "F32"
    if choice.type == type:
        return choice
    cost = nbytes(type, target.shape) - nbytes(choice.type, target.shape)
    return Choice(choice.name, type, choice.type, "error feedback needs a matrix that lies there whole", cost)


def _fallbacks(choices: Sequence[Choice]) -> list[str]:
    """Return notes on tensors that did not get the file type's choice, with reasons and cost in bytes."""
    equal: dict[tuple, list[Choice]] = {}
    for choice in choices:
        if choice.reason:
            equal.setdefault((choice.type, choice.first_choice, choice.reason), []).append(choice)
    found = []
    for (given, first_choice, reason), group in equal.items():
        cost = sum(choice.cost_bytes for choice in group)
        names = name_all([choice.name for choice in group], 3)
        found.append(f"{given} instead of {first_choice}, because {reason} ({cost:+,} bytes): {names}")
    return found


def chosen_types(
    options: Options, file_type: str, targets: Sequence[Target], skeleton: Skeleton
) -> list[Choice]:
    """Return the type of every target. Raises QuantkitError if --strict or --like forbids a replacement."""
    from quantkit.models.gguf import architectures
    from quantkit.models.gguf.variants import kv_heads

    config = skeleton.checkpoint.text_config
    row = architectures.of_config(config)
    model = Model(
        row.name,
        config.num_hidden_layers,
        config.num_attention_heads,
        kv_heads(config),
        row.experts(config),
    )
    like = of_file(Path(options.like))[1] if options.like else {}
    wishes = Wishes(
        options.tensor_type, options.output_tensor_type, options.token_embedding_type, options.pure, like
    )
    tensors = [(target.name, target.shape) for target in targets]
    choices = choose(file_type, model, tensors, options.imatrix != "none", wishes)
    if file_type in SCALED and not any(choice.type == file_type for choice in choices):
        why = next(choice.reason for choice in choices if choice.first_choice == file_type)
        raise QuantkitError(f"no matrix can have the type {file_type}: {why}", "choose MXFP4", UNSUPPORTED)
    unfit = [f"{choice.name} ({choice.reason})" for choice in choices if choice.reason]
    hint = "leave out --strict for the next type that fits, or choose one with --tensor-type"
    if like:
        names, hint = {target.name for target in targets}, f"is {options.like} a file of another model?"
        unfit += [f"{name} (not in the model)" for name in like if name not in names]
        unfit += [f"{name} (not in {options.like})" for name in names if name not in like]
    what = f"{count(len(unfit), 'tensor')} cannot have the requested type: {name_all(unfit)}"
    require(not unfit or not (options.strict or like), what, hint, UNSUPPORTED)
    return choices
