"""Convert a checkpoint of integers to another layout. Codes and scales stay, so no weight changes.

GGUF files hold them as Q4_0 and Q8_0, which have groups of 32 and a float16 scale: `d * (code - 8)`, and
`d * (code - 128)` (ggml-common.h).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit import __version__
from quantkit.errors import (
    UNSUPPORTED,
    VERIFICATION,
    QuantkitError,
    count,
    name_all,
    one_of,
    refuse_problems,
    require,
)
from quantkit.grids.affine import AffineGrid
from quantkit.grids.biased import BiasedGrid, BiasedParams
from quantkit.grids.ggml import named
from quantkit.grids.ggml.block import BlockParams
from quantkit.grids.grid import Grid, QuantizedWeight
from quantkit.inspection import clients, verify
from quantkit.inspection.record import describe
from quantkit.layouts import Layout, LinearSpec, quantization_of
from quantkit.layouts.awq import AwqLayout
from quantkit.layouts.compressed_tensors import CompressedTensorsLayout
from quantkit.layouts.compressed_tensors.integers import PackQuantized
from quantkit.layouts.ggml import GgmlLayout
from quantkit.layouts.gptq import SPLIT, GptqLayout
from quantkit.layouts.mlx import MlxLayout
from quantkit.models.files import card, untrusted
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.gguf_shards import base_name, destination
from quantkit.models.files.headers import open_contents
from quantkit.models.files.open import open_checkpoint, watched
from quantkit.models.gguf.checkpoint import GgmlTensor
from quantkit.models.gguf.file_types import number
from quantkit.models.skeleton import Skeleton
from quantkit.models.skeleton.linears import linears
from quantkit.options import SHARD_GB
from quantkit.quantize.methods import gguf
from quantkit.quantize.outputs import Draft, Material
from quantkit.quantize.outputs.folder import Output
from quantkit.quantize.outputs.gguf import GgufOutput
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging import may_replace
from quantkit.quantize.staging.folder import Staging, disk_errors

FROM = ("gptq", "awq", "compressed-tensors")
FILES = {"q4_0": "Q4_0", "q8_0": "Q8_0"}  # --to -> type of a GGUF file
TO = (*FROM, "mlx", *FILES)
UNCHANGED = (None, "gptq", "gptq_p", "pack-quantized")  # formats of a layout that convert itself writes
ANEW = "quantize the original model for this layout"
HEAD = "a head, which its clients read in 16 bit"
READ, PACKED, WRITTEN = "reading the linears", "packing the linears", "checking the linears that were written"


def convert(source: str, to: str, output: Path | None, overwrite: bool, progress: Progress) -> dict[str, Any]:
    """Write the checkpoint `source` in the layout `to`, as a folder or a GGUF file, and return a record.

    Codes and scales are packed anew, all other tensors are copied. The output is read back: every weight must
    be the source's, bit for bit. MLX's kernels round products to float16, so for `mlx` scales, offsets and
    codes are compared instead. Linears that an interrupted conversion has packed are kept. Raises
    QuantkitError naming every linear that the layout cannot hold exactly.
    """
    to = one_of(to.lower(), TO, f"--to {to}: no such layout")
    output = destination(output, f"{base_name(source)}-{f'{FILES[to]}.gguf' if to in FILES else to}")
    checkpoint = open_checkpoint(source)
    config = quantization_of(checkpoint.raw_config)
    stored, form = config.get("quant_method"), config.get("checkpoint_format") or config.get("format")
    kind = "a GGUF file" if checkpoint.folder.is_file() else f"in the layout {stored}"
    what, hint = f"{source} is {kind}", f"convert reads folders in the layouts {', '.join(FROM)}"
    if not checkpoint.quantized:
        what, hint = f"{source} is not quantized", f"compress it first: quantkit gptq {source}"
    require(stored in FROM and checkpoint.folder.is_dir(), what, hint, UNSUPPORTED)
    what = f"{source} also rounds the inputs of linears, which convert does not keep"
    require(not checkpoint.layout.rounds_inputs, what, ANEW, UNSUPPORTED)
    what = f"{source} is in the layout {to} already"
    require(stored != to or form not in UNCHANGED, what, f"choose another of {', '.join(TO)}", UNSUPPORTED)
    staging = Staging(output, one_file=to in FILES)
    may_replace.check_source(output, checkpoint.folder)
    staging.check(True, overwrite)
    refuse_problems({}, verify.verify(source, None, progress.counting)["problems"], VERIFICATION)
    with disk_errors(staging.folder, "run the same command again"), watched(checkpoint):
        identity = {"quantkit": __version__, "source_sha256": checkpoint.sha256(), "to": to, "execution": {}}
        try:
            with staging.opened(identity, resume=not overwrite, lasting=False):
                material = _material(checkpoint, to, staging, progress)
                written = _file_of(to, material, progress) if staging.one_file else Output()
                stored_manifest = untrusted.parse((checkpoint.manifest() or "{}").encode())
                manifest = {"schema": "quantkit.manifest/1"} | stored_manifest | {"converted": {"to": to}}
                if to == "mlx":  # decodes to float16: the recorded errors are those of other values
                    rows = manifest.get("linears", ())
                    manifest["linears"] = [{k: row[k] for k in row if k not in verify.ERRORS} for row in rows]
                draft = Draft(written, material, manifest)
                with staging.assemble() as path:
                    written.write([draft], progress)
                _compare(material, written, open_checkpoint(str(path)), progress)
                if not staging.one_file:
                    written.sign(draft)
                _describe(material, to, path)
                staging.publish()
        except QuantkitError as error:
            if error.exit_code == UNSUPPORTED:
                staging.discard()  # it would be refused again
            raise
    return {
        "schema": "quantkit.convert/1",
        "source": source,
        "output": str(output),
        "from": stored,
        "to": to,
        "linears": len([spec for spec in material.specs if spec.grid]),
        "source_bytes": checkpoint.stored_bytes,
        "output_bytes": open_checkpoint(str(output)).stored_bytes,
    }


def _material(checkpoint: Checkpoint, to: str, staging: Staging, progress: Progress) -> Material:
    """Return the source's linears with the grids that the new layout stores. Raises QuantkitError for
    linears that do not fit."""
    skeleton = Skeleton(checkpoint, torch.float32, torch.device("cpu"))
    skeleton.names.check_complete()
    packed = set(checkpoint.packed)
    if packed - {spec.name for spec in linears(skeleton)} and not checkpoint.text_config.tie_word_embeddings:
        skeleton.add_head()
    specs, grids, zeros = linears(skeleton), {}, set()  # zeros: zero points that are not in the middle
    ordered = False  # whether columns of a linear are in another order
    outside = packed - {spec.name for spec in specs}
    refused = {name: "no linear of a block and no head" for name in outside}
    for done, spec in enumerate(coded := [spec for spec in specs if spec.name in packed]):
        progress.counting(READ, done, len(coded))
        weight = _weight(checkpoint, spec)
        if not isinstance(weight.grid, AffineGrid):
            refused[spec.name] = "no integers with zero points"
        elif weight.column_group is not None and to != "gptq":
            refused[spec.name] = "columns in another order"
        else:
            grids[spec.name], zero = weight.grid, weight.params.zero
            ordered |= weight.column_group is not None
            zeros |= set(zero.unique().tolist()) - {1 << weight.grid.bits - 1}
    grids = {name: replace(grid, symmetric=not zeros) for name, grid in grids.items()}
    kept = None if staging.one_file else "16 bit"  # a GGUF file has the type of each tensor
    specs = [replace(r, grid=grids.get(r.name), kept=None if r.name in grids else kept) for r in specs]
    layout = _layout(to, [spec for spec in specs if spec.grid], 0 in zeros, ordered) if grids else None
    for index, spec in enumerate(spec for spec in specs if spec.grid):
        progress.counting(PACKED, index, len(grids))
        if staging.is_done(index):
            continue
        weight = _weight(checkpoint, spec)
        bare = spec.head and "head" not in layout.outside
        if reason := HEAD if bare else layout.check(replace(spec, grid=_grid(to, spec.grid))):
            refused[spec.name] = reason.partition(": ")[0]  # then comes advice about a job's options
            continue
        parts = _encoded(layout.of_job([spec]).at(spec.name), to, weight)
        if _same(weight, layout.of_job([spec]).at(spec.name).decode(parts)):
            staging.save(index, {f"{spec.name}.{part}": t.contiguous() for part, t in parts.items()}, [])
        else:
            refused[spec.name] = "its groups, scales or offsets do not fit"
    if refused:
        reasons = dict.fromkeys(refused[name] for name in sorted(refused))
        named = {why: name_all(sorted(n for n in refused if refused[n] == why)) for why in reasons}
        why = "; ".join(f"{reason}: {names}" for reason, names in named.items())
        message = f"{to} cannot hold {count(len(refused), 'linear')} of {checkpoint.source} exactly: {why}"
        raise QuantkitError(message, ANEW, UNSUPPORTED)
    specs = [replace(spec, grid=spec.grid and _grid(to, spec.grid)) for spec in specs]
    shard_bytes = None if staging.one_file else int(SHARD_GB * 1e9)
    return Material(skeleton, specs, layout.of_job(specs), staging, shard_bytes)


def _grid(to: str, grid: AffineGrid) -> Grid:
    """Return the grid that stores the same codes: MLX's with scales of the same type, or a ggml type."""
    if to in FILES:
        return named("Q8_0" if grid.bits > 4 else FILES[to])
    return BiasedGrid(grid.bits, grid.group_size, "float16") if to == "mlx" else grid


def _layout(to: str, specs: Sequence[LinearSpec], has_zero: bool, ordered: bool) -> Layout:
    """Return the layout with the bits and the group size of most linears. has_zero: a zero point is 0."""
    whole = all(spec.grid.group_size == spec.in_features for spec in specs)
    sizes = Counter((spec.grid.bits, -1 if whole else spec.grid.group_size) for spec in specs)
    (bits, size), symmetric = sizes.most_common(1)[0][0], specs[0].grid.symmetric
    if to == "gptq":
        version = 3 if bits in SPLIT else 2 if has_zero else 1
        return GptqLayout(bits, size, symmetric, desc_act=ordered, version=version)
    if to == "awq":
        return AwqLayout(size, not symmetric)
    if to == "mlx":
        return MlxLayout(bits, size)
    if to in FILES:
        return GgmlLayout()
    return CompressedTensorsLayout(PackQuantized(bits, size, symmetric))


def _weight(checkpoint: Checkpoint, spec: LinearSpec) -> QuantizedWeight:
    """Return a linear as stored, with the symmetry that the new layout has for all."""
    weight = checkpoint.layout.at(spec.name).decode(checkpoint.parts(f"{spec.name}.weight"))
    return replace(weight, grid=spec.grid) if isinstance(spec.grid, AffineGrid) else weight


def _encoded(layout: Layout, to: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    scale, zero, size = weight.params.scale, weight.params.zero, weight.grid.group_size
    grid = _grid(to, weight.grid)
    if to in FILES:  # where groups, zero points or scales do not fit, the values become others
        codes = weight.codes - zero.repeat_interleave(size, 1) + grid.offset
        d = scale.repeat_interleave(size, 1)[:, :: grid.group_size].half().float()
        codes = codes.clamp(0, 2 * grid.offset - 1).to(torch.uint8)
        weight = QuantizedWeight(grid, codes, BlockParams(d))
    if to == "mlx":
        params = BiasedParams(scale.half(), (-scale * zero).half())
        weight = QuantizedWeight(grid, weight.codes, params)
    return layout.encode(weight)


def _same(weight: QuantizedWeight, other: QuantizedWeight) -> bool:
    """Return whether two weights are equal, before kernels round products."""
    if not isinstance(other.params, BiasedParams):
        return torch.equal(weight.values(), other.values())
    scale, offset = other.params.scale.float(), other.params.bias.float()
    same = torch.equal(scale, weight.params.scale) and torch.equal(offset, -scale * weight.params.zero)
    return same and torch.equal(weight.codes, other.codes)


def _file_of(to: str, material: Material, progress: Progress) -> GgufOutput:
    """Return a GGUF file's output: staged linears keep their types, and other matrices the type that they
    have. Raises QuantkitError naming linears that llama.cpp stores in parts, and experts of several types."""
    options = gguf.Options(type=("F16",), solver="rtn", imatrix="none")
    method, checkpoint = gguf.Gguf(options).build(material.skeleton), material.checkpoint
    for note in method.notes:
        progress.warn(note)
    output, types = method.output, dict(method.output.types)
    packed = {f"{spec.name}.weight": spec.grid.name for spec in material.specs if spec.grid}
    for target in output.targets:
        kinds = {packed.get(name) or checkpoint.plain_dtype(name) for name in target.stored}
        if types[target.name] == "F16":  # a matrix
            what = f"llama.cpp stores {name_all(target.stored, 3)} in another way: as {target.name}"
            whole = len(kinds) == 1 and not (target.part and kinds.intersection(packed.values()))
            require(whole, what, ANEW, UNSUPPORTED)
            (types[target.name],) = kinds
    metadata = output.metadata | {"general.file_type": number(FILES[to])}
    return replace(output, types=types, metadata=metadata)


def _describe(material: Material, to: str, path: Path) -> None:
    """Write the model card: how to load the output, and base, licence, recipe and results of the source."""
    output, source = material.staging.output, material.checkpoint
    old, text = card.read(source.folder / card.CARD)
    base = old.get("base_model") or card.base_of(source.source, source.folder)
    head = card.head(base, "gguf" if path.is_file() else to, source.folder)
    ours = old.get("quantized_by") == "quantkit"
    head |= {key: old[key] for key in ("model-index",) if ours and key in old}
    rest = "".join(text.partition("## Load it")[1:]) if ours else "## Load it\n"
    rest = card.renamed(rest, source.name, output.name)
    equal = "codes and scales" if to == "mlx" else "weights"
    what = f"{source.name}, converted to {to} by quantkit {__version__}: all {equal} are equal."
    load = clients.how_to_load(describe(open_contents(str(path)))["clients"], output.name)
    text = card.section(f"\n# {output.name}\n\n{what}\n\n{rest}", "load", load)
    card.write_own(card.path_of(output) if path.is_file() else path / card.CARD, head, text)


def _compare(material: Material, output: Output, written: Checkpoint, progress: Progress) -> None:
    """Raise QuantkitError (exit code 6) unless the linears read back are the source's."""
    tensors = [info for info in written.infos.values() if isinstance(info, GgmlTensor)]
    pieces = (piece for tensor in tensors for piece in tensor.pieces or (tensor,))
    parameters = {piece.target.name: piece.target.parameters for piece in pieces}
    targets = [target for target in getattr(output, "targets", ()) if target.name in parameters]
    names = {a: b for t in targets for a, b in zip(t.stored, parameters[t.name], strict=False)}
    packed = [spec for spec in material.specs if spec.grid]
    for done, spec in enumerate(packed):
        progress.counting(WRITTEN, done, len(packed))
        name, weight = f"{spec.name}.weight", _weight(material.checkpoint, spec)
        if names:  # a GGUF file: its tensors by their names in the source
            values = written.read(names[name], torch.float32)
            same = torch.equal(values.t() if spec.conv1d else values, weight.values())
        else:
            same = _same(weight, written.layout.at(spec.name).decode(written.parts(name)))
        message = f"{spec.name} reads back as other values"
        require(same, message, "the disk or memory may be faulty: add --overwrite", VERIFICATION)
