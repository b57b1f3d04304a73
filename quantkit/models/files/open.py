"""Open what the user typed, a folder, a GGUF file or a hub id, as a `Checkpoint`."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import transformers
from huggingface_hub.errors import StrictDataclassError

from quantkit import layouts
from quantkit.errors import UNSUPPORTED, QuantkitError, first_line, name_all, require
from quantkit.models.files import head, headers, hub, reading, untrusted
from quantkit.models.files.checkpoint import Checkpoint, State
from quantkit.models.files.safetensors_folder import CONFIG, INDEX

ATTENTION = (None, "eager", "sdpa")  # implementations in transformers itself
EXPERTS = (None, "eager", "batched_mm", "grouped_mm")


def open_checkpoint(
    source: str, revision: str | None = None, offline: bool = False, trust_remote_code: bool = False
) -> Checkpoint:
    """Open a local folder, GGUF file or hub id. Raises QuantkitError if quantkit cannot use it."""
    folder = hub.resolve(source, revision, offline)
    seen = _states(untrusted.entries(folder))
    contents = headers.at(source, folder, strict=True)
    if contents.container == "gguf":
        from quantkit.models.gguf.checkpoint import of_contents  # `gguf` takes a while to import

        return replace(of_contents(contents), seen=seen)
    raw, infos = contents.config, contents.infos
    untrusted.refuse_config(raw, len(infos))
    if layouts.quantization_of(raw).get("quant_method") == "mxfp4":  # decoded when read
        raw = {key: value for key, value in raw.items() if key != "quantization_config"}
        infos = reading.of_mxfp4(infos)
    layout = layouts.detect(raw)
    config = _build_config(folder, trust_remote_code)
    tied = head.decide(infos, lambda: bool(getattr(config, "tie_word_embeddings", False)))
    if tied.kind == "unlike":
        raw = _untied(raw, config)
    infos = tied.settle(infos, _embedding(config, tied.module) if tied.kind == "alone" else "")
    if layout is not None:
        infos = layout.unstacked(infos)
    else:
        untrusted.refuse_codes(infos.values())
    checkpoint = Checkpoint(
        source=source,
        folder=folder,
        raw_config=raw,
        config=config,
        infos=infos,
        layout=layout,
        trust_remote_code=trust_remote_code,
        notes=(tied.note,) if tied.note else (),
        packed=layouts.group_by_linear(layout, infos),
    )
    files = {
        folder / CONFIG,
        folder / INDEX,
        *checkpoint.companions(),
        *(info.file for info in infos.values()),
    }
    return replace(checkpoint, seen={path: seen[path] for path in files & seen.keys()})


def _build_config(folder: Path, trust_remote_code: bool) -> transformers.PretrainedConfig:
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # ValueError, KeyError, OSError, errors of validation
        what = f"transformers {transformers.__version__} cannot read {folder / CONFIG}: {first_line(error)}"
        hint = (
            "an unknown model_type needs a newer transformers, or --trust-remote-code if you trust the code "
        )
        hint = untrusted.AGAIN if isinstance(error, StrictDataclassError) else f"{hint}in its folder"
        raise QuantkitError(what, hint, UNSUPPORTED) from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the skeleton is the plain model; layouts decode
    for inner in _parts(config):
        _choose_code(inner)
    return config


def _untied(raw: dict, config: transformers.PretrainedConfig) -> dict:
    """Return config.json without tied embeddings; the same in `config`, in place."""
    for inner in _parts(config):
        inner.tie_word_embeddings = False
    inner = raw.get("text_config")
    inner = {"text_config": inner | {"tie_word_embeddings": False}} if isinstance(inner, dict) else {}
    return raw | inner | {"tie_word_embeddings": False}


def _embedding(config: transformers.PretrainedConfig, module: str) -> str:
    """Return transformers' name of the embedding to which the head `module` is tied; the head's own name if
    transformers does not know any."""
    text = config.get_text_config(decoder=True) is config
    alone, wrapped = transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING
    kind = (alone if text else wrapped).get(type(config), None)
    ties = getattr(kind, "_tied_weights_keys", None) or {}
    return ties.get(f"{module}.weight", f"{module}.weight").removesuffix(".weight")


def _parts(config: transformers.PretrainedConfig) -> Iterator[transformers.PretrainedConfig]:
    """Yield a configuration and those inside it."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, transformers.PretrainedConfig):
            yield from _parts(value)


def _choose_code(config: transformers.PretrainedConfig) -> None:
    """Replace a configuration's attention and expert kernels by transformers' default, unless they are
    transformers' own: other names may make transformers download and run code. Also switch off the return of
    attention weights and hidden states."""
    if config._attn_implementation not in ATTENTION:
        config._attn_implementation = None
    if config._experts_implementation not in EXPERTS:
        config._experts_implementation = None
    config.output_attentions = config.output_hidden_states = False


def _states(paths: Iterable[Path]) -> dict[Path, State]:
    """Return device, inode, size and modification time of each path that is a file."""
    stats = ((path, path.stat()) for path in paths if path.is_file())
    return {path: (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in stats}


def check_unchanged(checkpoint: Checkpoint) -> None:
    """Raise QuantkitError naming the files that changed since the checkpoint was opened: a job reads them for
    hours, and a mixture of two models would be useless."""
    now = _states(checkpoint.seen)
    changed = [
        f"{path.name} {'changed' if path in now else 'gone'}"
        for path, state in sorted(checkpoint.seen.items())
        if now.get(path) != state
    ]
    what = f"{checkpoint.source} was changed while it was read: {name_all(changed)}"
    require(not changed, what, "restore it and continue with --resume, or start again with --overwrite")


@contextmanager
def watched(checkpoint: Checkpoint) -> Iterator[None]:
    """Run `check_unchanged` at the end, also after an error, because a changed file may be its cause."""
    try:
        yield
    except Exception:
        check_unchanged(checkpoint)
        raise
    check_unchanged(checkpoint)
