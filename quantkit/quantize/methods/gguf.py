"""gguf: one file for llama.cpp with ggml's types, by error feedback or encoded as llama-quantize does."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, count, name_all, require
from quantkit.layouts.ggml import GgmlLayout
from quantkit.models.files import gguf_shards
from quantkit.models.gguf import file_types, mixtures
from quantkit.models.gguf.mixtures import EMBEDDING, Choice
from quantkit.options import flag_of, option
from quantkit.quantize.methods import BuiltMethod, Method, MethodOptions, Work, _options

if TYPE_CHECKING:
    from quantkit.grids.ggml.block import BlockGrid
    from quantkit.models.files.checkpoint import Checkpoint
    from quantkit.models.gguf.imatrix import Imatrix
    from quantkit.models.gguf.tensors import Target
    from quantkit.models.skeleton import Skeleton
    from quantkit.quantize.methods._override import Override

FLOATS = ("F32", "F16", "BF16")
TYPED = ("type", "tensor_type", "output_tensor_type", "token_embedding_type", "pure")  # options of types


@dataclass(frozen=True)
class Options(MethodOptions):
    act_order: ClassVar[str] = "none"

    type: tuple[str, ...] = option(
        ("Q4_K_M",),
        f"File type: {', '.join(file_types.FILE_TYPES)}. "
        "Repeatable: --solver rtn makes all of them in one pass.",
        short="-t",
        names=file_types.FILE_TYPES,
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
        "the model's loss, less loss on some models, in several times the time.",
        names=_options.SOLVERS,
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
        names=file_types.BLOCKS,
    )
    token_embedding_type: str | None = option(
        None, "Type of the token embedding. (default: as the file type says)", names=file_types.BLOCKS
    )
    pure: bool = option(False, "Use one type for all matrices. Most file types mix several types.")
    strict: bool = option(
        False, "Refuse a tensor that cannot have the requested type, instead of using another type."
    )
    pre_tokenizer: str | None = option(
        None,
        "llama.cpp's name of the pre-tokenizer, the rule that splits text into words. (default: detected)",
    )
    damp: float = _options.shared("damp")
    refine: int = _options.shared("refine")
    transform: str = _options.shared("transform")
    target: str = _options.shared("target")


class Gguf(Method):
    """GGUF: one file that llama.cpp runs, in K-quants (Q4_K_M …), i-quants (IQ2_M …) or floats (F16 …)."""

    Options = Options
    options: Options
    layout = GgmlLayout()
    unused = ("override", "allow_unread")
    work = Work(2.0, search=8.0, sample=1 / 8, outside=True, h200_seconds=26.8)

    @property
    def suffix(self) -> str:
        like = self.options.like
        types = f"like-{Path(like).stem}" if like else self.stored_as
        return f"{types}{self.changed('transform')}.gguf"

    @property
    def stored_as(self) -> str:
        """The file type, which decides every tensor's type."""
        return file_types.parse_file_type(self.options.type[0])

    def check(self) -> None:
        options = self.options
        require(options.type, "no file type is given", "for example --type Q4_K_M", USAGE)
        for name in options.type:
            file_types.parse_file_type(name)
        super().check()
        typed = [name for name in TYPED if getattr(options, name) != getattr(Options(), name)]
        if options.like and typed:
            flags = name_all(map(flag_of, typed))
            raise QuantkitError(f"--like decides all types, not {flags}", f"leave out {flags}", USAGE)
        nearest, awq = options.solver == "rtn", options.transform == "awq"
        what = f"--transform {options.transform} is for --solver gptq: rtn encodes tensors as they come"
        require(not (awq and nearest), what, "leave it out, or choose --solver gptq", USAGE)
        what = f"--imatrix {options.imatrix} is for --solver rtn: {options.solver} gathers more than that"
        require(nearest or options.imatrix == "auto", what, "add --solver rtn, or leave it out", USAGE)

    def record(self) -> dict[str, Any]:
        """Return the options. `--like` is the sha256 of its types: the path of the file decides nothing."""
        like = self.options.like
        types = repr(mixtures.of_file(Path(like))) if like else None
        return super().record() | {"like": types and hashlib.sha256(types.encode()).hexdigest()}

    def each(self, output: Path | None, model: str) -> list[tuple[Gguf, Path | None]]:
        """Return method and output path of every requested file. `output` is a folder unless it ends in
        .gguf; names inside are derived as without `output`."""
        types = list(dict.fromkeys(file_types.parse_file_type(name) for name in self.options.type))
        what = f"-o {output} is one file, {len(types)} are requested"
        require(len(types) < 2 or not output or output.suffix != ".gguf", what, "give a folder", USAGE)
        files = [replace(self, options=replace(self.options, type=(name,))) for name in types]
        return [(file, gguf_shards.destination(output, f"{model}-{file.suffix}")) for file in files]

    def build(self, skeleton: Skeleton | None = None, calibrated: bool = False) -> BuiltMethod:
        """Return the parts of a job. Every tensor's type is chosen here, from names and shapes."""
        from quantkit.grids.ggml import TYPES, named
        from quantkit.models.gguf import configuration, metadata, tensors
        from quantkit.models.skeleton.names import copied_modules
        from quantkit.quantize.outputs.gguf import GgufOutput
        from quantkit.quantize.solvers.rtn import RtnSolver

        what = "gguf cannot be tried in memory"
        require(skeleton is not None, what, "write it with quantkit gguf, then evaluate that file", USAGE)
        options, checkpoint = self.options, skeleton.checkpoint
        targets = tensors.of_checkpoint(checkpoint)
        choices, feedback = self.chosen_types(self.stored_as, targets, skeleton), options.solver != "rtn"
        solved = feedback and any(choice.type in TYPES for choice in choices)
        if feedback:
            _refuse_without_feedback(choices)
        if solved:
            choices = [_whole(*both, checkpoint) for both in zip(choices, targets, strict=True)]
        notes = _fallbacks(choices)
        if self.stored_as == "MXFP4_MOE" and not any(choice.type == "MXFP4" for choice in choices):
            notes.append("MXFP4_MOE stores experts in MXFP4, all else in Q8_0, and this model has no experts")
        shapes = {target.name: target.shape for target in targets}
        tokenizer = metadata.tokenizer(checkpoint, shapes[EMBEDDING][0], options.pre_tokenizer, notes.append)
        weighted = [choice for choice in choices if choice.type in TYPES and named(choice.type).weighted]
        origin = options.imatrix if weighted and not feedback else "none"
        importance = None if origin in ("auto", "none") else _importance(origin, shapes, weighted, notes)
        if not feedback and origin != "auto":
            _check_importance(choices, importance, origin)
        label = mixtures.of_file(Path(options.like))[0] if options.like else self.stored_as
        output = GgufOutput(
            targets=tuple(targets),
            types={choice.name: choice.type for choice in choices},
            metadata=metadata.assemble(checkpoint, targets, label, tokenizer),
            imatrix=importance,
            gathers=origin == "auto",
            origin="gathered by quantkit" if origin == "auto" else origin,
        )
        if left_out := copied_modules(skeleton.model, skeleton.names, checkpoint):
            names = name_all(module.name for module in left_out)
            notes.append(f"not written, because the file holds a language model alone: {names}")
        notes += configuration.notes(checkpoint.text_config)
        linears = output.linears

        def make_grid(name: str, in_features: int, override: Override | None) -> BlockGrid | None:
            if override:
                raise override.refused("use --tensor-type for GGUF files")
            type = output.types.get(linears.get(name))
            return named(type) if solved and type in TYPES else None

        solver = self.solver() if solved else RtnSolver()
        transform = self.transform(solver) if solved else None
        parts = solver, self.layout, make_grid, transform, output, tuple(notes)
        return BuiltMethod(self.name, *parts, outside=True)

    def chosen_types(self, file_type: str, targets: Sequence[Target], skeleton: Skeleton) -> list[Choice]:
        """Return the type of every target. Raises QuantkitError if --strict or --like forbids another one."""
        from quantkit.models.gguf import architectures
        from quantkit.models.gguf.variants import kv_heads

        options, config = self.options, skeleton.checkpoint.text_config
        family = architectures.of_config(config)
        heads = config.num_attention_heads, kv_heads(config)
        model = file_types.Model(family.name, config.num_hidden_layers, *heads, family.experts(config))
        like = mixtures.of_file(Path(options.like))[1] if options.like else {}
        wishes = mixtures.Wishes(
            options.tensor_type, options.output_tensor_type, options.token_embedding_type, options.pure, like
        )
        tensors = [(target.name, target.shape) for target in targets]
        choices = mixtures.choose(file_type, model, tensors, options.imatrix != "none", wishes)
        if file_type in file_types.SCALED and not any(choice.type == file_type for choice in choices):
            why = next(choice.reason for choice in choices if choice.first_choice == file_type)
            what = f"no matrix can have the type {file_type}: {why}"
            raise QuantkitError(what, "choose MXFP4", UNSUPPORTED)
        unfit = [f"{choice.name} ({choice.reason})" for choice in choices if choice.reason]
        hint = "leave out --strict for the next type that fits, or choose one with --tensor-type"
        if like:
            names, hint = {target.name for target in targets}, f"is {options.like} a file of another model?"
            unfit += [f"{name} (not in the model)" for name in like if name not in names]
            unfit += [f"{name} (not in {options.like})" for name in names if name not in like]
        what = f"{count(len(unfit), 'tensor')} cannot have the requested type: {name_all(unfit)}"
        require(not unfit or not (options.strict or like), what, hint, UNSUPPORTED)
        return choices


def _refuse_without_feedback(choices: Sequence[Choice]) -> None:
    """Raise QuantkitError for types that error feedback does not support."""
    refused = [choice for choice in choices if choice.type in file_types.NO_FEEDBACK]
    types, names = ({getattr(choice, field) for choice in refused} for field in ("type", "name"))
    what = f"error feedback does not support {name_all(sorted(types))}: {name_all(sorted(names))}"
    hint = "add --solver rtn, or choose IQ2_XXS, the smallest type with error feedback"
    require(not refused, what, hint, UNSUPPORTED)


def _whole(choice: Choice, target: Target, checkpoint: Checkpoint) -> Choice:
    """Return the stored type for a matrix that the file splits: error feedback needs whole matrices."""
    if target.part is None:
        return choice
    info = checkpoint.infos.get(target.stored[0])
    type = info.dtype if info and info.dtype in FLOATS else "F32"
    if choice.type == type:
        return choice
    cost = mixtures.nbytes(type, target.shape) - mixtures.nbytes(choice.type, target.shape)
    return Choice(choice.name, type, choice.type, "error feedback needs a matrix that lies there whole", cost)


def _importance(
    path: str, shapes: dict[str, tuple[int, ...]], weighted: Sequence[Choice], notes: list[str]
) -> Imatrix:
    """Return the importance matrix at `path`; add a note on `weighted` matrices that it leaves out."""
    from quantkit.models.gguf import imatrix

    matrix = imatrix.of_model(Path(path), shapes)
    inside = [choice.name for choice in weighted if choice.name.startswith("blk.")]  # as llama-imatrix has
    if lacking := [name for name in inside if name not in matrix.sums]:
        names = f"{count(len(lacking), 'tensor')}, whose columns count alike: {name_all(lacking, 3)}"
        notes.append(f"{path} has no importance of {names}")
    return matrix


def _check_importance(choices: Sequence[Choice], imatrix: Imatrix | None, given: str) -> None:
    """Raise QuantkitError for tensors whose types are useless without importance, as llama-quantize does."""
    sums = imatrix.sums if imatrix else {}
    lacking = [choice.name for choice in mixtures.without_importance(choices) if choice.name not in sums]
    what = f"--imatrix {given} leaves {count(len(lacking), 'tensor')} without importance, which types like "
    what += f"{sorted(file_types.NEED_IMPORTANCE)[-1]} need: {name_all(lacking, 3)}"
    require(not lacking, what, "leave out --imatrix: it is gathered from the calibration text", USAGE)


def _fallbacks(choices: Sequence[Choice]) -> list[str]:
    """Return notes on tensors that did not get the file type's choice, with reasons and cost in bytes."""
    equal: dict[tuple, list[Choice]] = {}
    for choice in choices:
        if choice.reason:
            equal.setdefault((choice.type, choice.first_choice, choice.reason), []).append(choice)
    notes = []
    for (given, first_choice, reason), group in equal.items():
        cost = sum(choice.cost_bytes for choice in group)
        names = name_all([choice.name for choice in group], 3)
        notes.append(f"{given} instead of {first_choice}, because {reason} ({cost:+,} bytes): {names}")
    return notes
