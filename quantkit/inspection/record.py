"""The report of `quantkit inspect` on one checkpoint, as JSON (`quantkit.inspect/2`)."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from quantkit import layouts
from quantkit.errors import QuantkitError
from quantkit.inspection import clients, integrity
from quantkit.inspection.names import CONTEXT, is_linear, language_stack, of_experts, part_of, split, starred
from quantkit.inspection.stored import Weight, tokenizer_of, weights_of
from quantkit.models.files.headers import Contents
from quantkit.models.files.safetensors_folder import natural

SCHEMA = "quantkit.inspect/2"
STATE = re.compile(r"\.(conv1d|conv|short_conv|A_log|dt_bias|time_decay)\b")  # convolutions, state spaces
TOWERS = ("vision_config", "audio_config")
EXPERT = re.compile(r"\.experts\.\d+\.|_exps\.")  # the latter: in GGUF files


def describe(contents: Contents) -> dict[str, Any]:
    """Return the JSON of `quantkit inspect` for a checkpoint. Values are not read; see `values.check`."""
    weights = weights_of(contents)
    tokens = tokenizer_of(contents)
    config = contents.text_config
    positions = _positions(config)
    language = language_stack([weight.name for weight in weights])
    total = sum(weight.nbytes for weight in weights)
    head = contents.head
    again = f"{head.module}.weight" if head.kind == "copy" else None
    count = sum(weight.parameters for weight in weights if weight.name != again)
    damage = integrity.damage(contents, weights, tokens)
    loaded_by = clients.known(_facts(contents, weights) | {"rope_scaled": {bool(positions["scaled"])}})
    if head.kind == "unlike" and head.packed:
        loaded_by = clients.of_damaged(loaded_by, "config.json ties its packed head to the embedding")
    return {
        "schema": SCHEMA,
        "source": contents.source,
        "container": contents.container,
        "files": {"count": len(contents.files), "bytes": sum(contents.files.values())},
        "model": {
            "model_type": contents.family,
            "blocks": config.get("num_hidden_layers") or config.get("n_layer"),
            "hidden_size": config.get("hidden_size") or config.get("n_embd"),
            "vocab_size": config.get("vocab_size"),
            "parameters": count,
            "bytes": total,
            "bits_per_weight": 8 * total / count if count else None,
            "tied": head.tied,
        },
        "quantization": _quantization(contents, weights, language),
        "parts": _parts(weights),
        "tensors": _tensors(weights, language),
        "positions": positions,
        "tokenizer": tokens,
        "provenance": _provenance(contents),
        "clients": clients.of_damaged(loaded_by) if damage else loaded_by,
        "integrity": {
            "deep": False,
            "tensors": len(contents.infos),
            "problems": damage,
            "warnings": integrity.warnings(contents),
        },
    }


def _positions(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return {context: maximum tokens, scaled: kind of rope scaling or None, text: both in words}."""
    stored = config.get("rope_parameters") or config.get("rope_scaling")
    rope = stored if isinstance(stored, dict) else {}
    nested = rope.get("full_attention")  # kinds of layers may have their own
    rope = nested if isinstance(nested, dict) else rope
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    scaled = None if kind == "default" else kind
    context = _positive(next((config[key] for key in CONTEXT if config.get(key)), None))
    theta = _positive(rope.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base"))
    factor = _positive(rope.get("factor"))
    window = _positive(config.get("sliding_window")) if config.get("use_sliding_window", True) else None
    words = [f"{context} tokens"] if context else []
    words += [f"rope of base {theta:g}"] if theta else []
    words += [f"scaled: {kind}" + (f" × {factor:g}" if factor else "")] if scaled else []
    words += [f"attention over {window}"] if window else []
    return {"context": context, "scaled": scaled, "text": ", ".join(words)}


def _positive(value: Any) -> int | float | None:
    """Return the value if it is a positive number, else None."""
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if numeric and 0 < value < 1e18 else None


def _layout(contents: Contents) -> str | None:
    if contents.container == "gguf":
        return "gguf"
    return str(contents.quantization.get("quant_method") or "unnamed") if contents.quantization else None


def _quantization(
    contents: Contents, weights: Sequence[Weight], language: str | None
) -> dict[str, Any] | None:
    """Return the JSON of a checkpoint's quantization; None if it is not quantized."""
    coded = [weight for weight in weights if weight.codes]
    layout = _layout(contents)
    if not coded and (layout is None or layout == "gguf"):
        return None
    nbytes = sum(weight.code_bytes + weight.scale_bytes for weight in coded)
    count = sum(weight.parameters for weight in coded)
    kept = [weight for weight in weights if is_linear(weight.name, weight.shape) and not weight.codes]
    reasons = {str(row.get("name")): str(row["kept"]) for row in written(contents) if row.get("kept")}
    return {
        "layout": layout,
        "method": (contents.manifest or {}).get("method"),
        "file_type": _file_type(contents),
        "linears": len(coded),
        "stored": dict(Counter(weight.stored for weight in coded).most_common()),
        "bits": sorted({weight.codes.bits for weight in coded}),
        "group_sizes": sorted({weight.codes.group_size or -1 for weight in coded}),
        "symmetric": _symmetric(contents),
        "desc_act": bool(contents.quantization.get("desc_act", False)),
        "activations": activations(contents.quantization),
        "bits_per_weight": 8 * nbytes / count if count else None,
        "kept": _tensors(kept, language, reasons),
    }


def _file_type(contents: Contents) -> str | None:
    """Return the file type that a GGUF file names, such as `Q4_K_M`; None if it names none."""
    code = contents.metadata.get("general.file_type")
    if code is None:
        return None
    from gguf import LlamaFileType

    names = {str(kind.value): kind.name.removeprefix("MOSTLY_") for kind in LlamaFileType}
    return names.get(str(code), f"file type {code}")  # the code may be of any type


def _groups(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the config groups of compressed-tensors; [] for other layouts."""
    groups = config.get("config_groups")
    return [g for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []


def _symmetric(contents: Contents) -> bool | None:
    config = contents.quantization
    if "sym" in config:
        return bool(config["sym"])
    if "zero_point" in config:
        return not config["zero_point"]
    entries = [group["weights"] for group in _groups(config) if isinstance(group.get("weights"), dict)]
    return all(weights.get("symmetric", True) for weights in entries) if entries else None


def activations(config: Mapping[str, Any]) -> str | None:
    """Describe how clients quantize inputs of linears and the KV cache at run time; None if they do not."""
    cached = "keys and values float8, by stored scales" if config.get("kv_cache_scheme") else None
    return "; ".join(filter(None, (_inputs(config), cached))) or None


def _inputs(config: Mapping[str, Any]) -> str | None:
    """Describe how clients quantize inputs of linears; None if they do not."""
    if config.get("load_in_8bit"):
        threshold = _positive(config.get("llm_int8_threshold", 6.0))
        return f"int8, columns that reach {threshold:g} in 16 bit" if threshold else "int8"
    with suppress(QuantkitError):
        form = getattr(layouts.detect({"quantization_config": config}), "form", None)
        if form and (entry := form.activations()):
            return _scaled(entry)
    for group in _groups(config):
        if isinstance(entry := group.get("input_activations"), dict):
            return _scaled(entry)
    return str(config["activation_scheme"]) if config.get("activation_scheme") else None


def _scaled(entry: Mapping[str, Any]) -> str:
    """Describe a config group's activations: their type, and which values share a scale."""
    kind = f"{entry.get('type', 'int')}{entry.get('num_bits', 8)}"
    if entry.get("strategy") == "token":
        return f"{kind}, each token by itself"
    if entry.get("strategy") == "tensor" and entry.get("dynamic") is False:
        return f"{kind}, by stored scales"
    size = entry.get("group_size")
    return f"{kind}, groups of {size}" if isinstance(size, int) and size > 0 else kind


def _facts(contents: Contents, weights: Sequence[Weight]) -> dict[str, set]:
    """Return the checkpoint's properties that the rules of clients.yaml test: {key: values}."""
    coded = [weight.codes for weight in weights if weight.codes]
    config = contents.quantization
    infos = contents.infos
    gguf = contents.container == "gguf"
    forms = {info.dtype for info in infos.values()} if gguf else {codes.form for codes in coded}
    linears = [name.removesuffix(".qweight") for name in infos if name.endswith(".qweight")]
    return {
        "layout": {_layout(contents) or "none"},
        "model_type": {str(contents.family)},
        "form": forms,
        "bits": {codes.bits for codes in coded},
        "group_size": {codes.group_size or -1 for codes in coded},
        "symmetric": {_symmetric(contents)},
        "desc_act": {bool(config.get("desc_act", False))},
        "version": {str(config.get("checkpoint_format") or config.get("format") or "gptq")},
        "g_idx": {f"{linear}.g_idx" in infos for linear in linears},
        "activations": {_inputs(config) is not None},
        "static": {any(name.endswith(".input_scale") for name in infos)},
        "cache": {bool(config.get("kv_cache_scheme"))},
        "biases": {any(name.endswith(".bias") for name in infos)},
        "experts": {any(EXPERT.search(weight.name) and (weight.codes or gguf) for weight in weights)},
        "head": {any(weight.codes and part_of(weight.name) == "head" for weight in weights)},
        "hybrid": {not gguf and any(STATE.search(weight.name) for weight in weights)},
        "towers": {any(isinstance(contents.config.get(key), dict) for key in TOWERS)},
        "mixed": {len({(codes.form, codes.bits, codes.group_size) for codes in coded}) > 1},
        "kept": {
            any(is_linear(weight.name, weight.shape) and not weight.codes for weight in weights)
            and bool(coded)
        },
    }


def _parts(weights: Sequence[Weight]) -> list[dict[str, Any]]:
    """Return a row with parameters and bytes for each part of the model, from embedding to head."""
    order = ("embeddings", "attention", "mlp", "norms", "head", "other")
    rows = {part: Counter() for part in order}
    for weight in weights:
        counted = {"parameters": weight.parameters, "bytes": weight.nbytes}
        coded = {"code_bytes": weight.code_bytes, "scale_bytes": weight.scale_bytes}
        rows[part_of(weight.name)].update(counted | coded)
    return [{"part": part} | row for part, row in rows.items() if row["bytes"]]


def _tensors(
    weights: Sequence[Weight], language: str | None, reasons: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Return a row for each kind of tensor over blocks and experts: name, blocks, shape, storage. language:
    the language model's stack of blocks; None if that is unclear. reasons: {linear: why it was not
    quantized}. Names outside the language model begin with their stack, as in `visual.blocks.*.attn.qkv`."""
    rows: dict[tuple, dict[str, Any]] = {}
    for weight in sorted(weights, key=lambda weight: _place(weight, language)):
        stack, block, local = split(weight.name)
        if language is not None and stack != language:
            local, block = starred(weight.name)
        local = of_experts(local)
        why = {} if reasons is None else {"why": reasons.get(weight.name.removesuffix(".weight"))}
        shape = list(weight.shape) if weight.shape is not None else None
        row = {"name": local, "blocks": [], "shape": shape, "stored": weight.stored, **why}
        key = local, block is None, str(shape), weight.stored, *why.values()
        row = rows.setdefault(key, row | {"count": 0, "bytes": 0})
        if block is not None and block not in row["blocks"][-1:]:
            row["blocks"].append(block)
        row["count"] += 1
        row["bytes"] += weight.nbytes
    names = dict.fromkeys(row["name"] for row in rows.values())
    order = {name: index for index, name in enumerate(names)}
    return sorted(rows.values(), key=lambda row: order[row["name"]])


def _place(weight: Weight, language: str | None) -> tuple:
    """Return a sort key: embeddings, the language model's blocks, what follows them, other stacks."""
    stack, block, local = split(weight.name)
    outside = -1 if part_of(weight.name) == "embeddings" else math.inf
    other = block is not None and language is not None and stack != language
    return other, outside if block is None else block, natural(local)


def written(contents: Contents) -> list[dict[str, Any]]:
    """Return the rows of quantkit's manifest, one for each linear; [] without a manifest."""
    rows = (contents.manifest or {}).get("linears")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _provenance(contents: Contents) -> dict[str, Any] | None:
    """Return which tool made the checkpoint and how, from quantkit's manifest or traces of other tools."""
    manifest = contents.manifest
    if manifest:
        job = manifest.get("job") if isinstance(manifest.get("job"), dict) else {}
        rows = [row for row in written(contents) if not row.get("tower")]  # their inputs are unknown
        errors = [row["error"] for row in rows if isinstance(row.get("error"), (int, float))]
        return {
            "tool": f"quantkit {manifest.get('quantkit')}",
            "method": manifest.get("method"),
            "source": manifest.get("source"),
            "options": job.get("options"),
            "calibration": job.get("calibration"),
            "error": sum(errors) / len(errors) if errors else None,
            **({"distilled": taught} if isinstance(taught := manifest.get("distilled"), dict) else {}),
        }
    meta = contents.quantization.get("meta")
    named = meta.get("quantizer") if isinstance(meta, dict) else None
    tool = ", ".join(map(str, named)) if isinstance(named, list) else named
    tool = tool or contents.metadata.get("general.quantized_by")
    return {"tool": str(tool)} if tool else None
