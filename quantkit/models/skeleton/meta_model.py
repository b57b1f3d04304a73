"""The model as transformers builds it on the meta device: shapes and buffers, no weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

import torch
import transformers
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming, rename_source_key
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)
from transformers.pytorch_utils import Conv1D

from quantkit.errors import UNSUPPORTED, QuantkitError, first_line, require
from quantkit.models.files.checkpoint import Checkpoint

BUFFER_BYTES = 4 << 30  # what is computed of a configuration alone: masks and frequencies


def build(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return the model on the meta device, but with real buffers: checkpoints lack rotary frequencies."""
    model = empty(checkpoint.config, checkpoint.source, dtype, checkpoint.trust_remote_code)
    try:
        nbytes = sum(buffer.nbytes for buffer in model.buffers())
        if nbytes > BUFFER_BYTES:
            raise ValueError(f"its buffers take {nbytes / 2**30:,.1f} GiB")
        for module in model.modules():
            if isinstance(getattr(module, "config", None), transformers.PretrainedConfig):
                module.config._is_quantized = True  # Mamba's blocks then call linears they skip otherwise
        for parameter in model.parameters():
            parameter._is_hf_initialized = True  # initialize_weights then fills buffers alone
        for name, buffer in list(model.named_buffers()):
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = torch.empty_like(buffer, device="cpu")
        model.initialize_weights()
        for name, buffer in list(model.named_buffers()):
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = buffer.to(device)
        return model.eval()
    except (MemoryError, QuantkitError):
        raise
    except Exception as error:  # of sizes and kinds that do not go together
        raise _no_model(checkpoint.source, error) from error


def empty(
    config: transformers.PretrainedConfig,
    source: str,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Return the model that `config` describes, on the meta device; a multimodal one includes its towers.

    Raises QuantkitError if it is no language model.
    """
    text = config.get_text_config(decoder=True)
    alone = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and text is config
    wrapped = type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING and not alone
    kind = transformers.AutoModelForMultimodalLM if wrapped else transformers.AutoModelForCausalLM
    try:
        if config.is_encoder_decoder or text.is_encoder_decoder:
            raise ValueError("its language model is an encoder and a decoder")
        with torch.device("meta"):
            own = copy.deepcopy(config)  # transformers writes `dtype` into it
            model = kind.from_config(own, dtype=dtype, trust_remote_code=trust_remote_code)
        roles = {getattr(module, "is_decoder", None) for module in model.modules()} - {None}
        if roles == {False} and not wrapped:  # towers may be encoders
            raise ValueError("it is an encoder, whose tokens see later ones (is_decoder is false)")
        return model
    except (MemoryError, QuantkitError):
        raise
    except Exception as error:  # ValueError of a kind, KeyError of a name, ZeroDivisionError of a size …
        raise _no_model(source, error) from error


def _no_model(source: str, error: Exception) -> QuantkitError:
    why = first_line(error) if isinstance(error, (ValueError, ImportError)) else f"{error!r:.300}"
    return QuantkitError(
        f"{source} is not a causal language model that transformers {transformers.__version__} knows: {why}",
        hint="quantkit compresses decoder-only models (…ForCausalLM), and those that other modalities "
        "are wrapped around",
        exit_code=UNSUPPORTED,
    )


def language_model(model: nn.Module, checkpoint: Checkpoint) -> str:
    """Return the name of the language model inside `model`; "" if it is the whole model."""
    text = checkpoint.text_config
    if text is checkpoint.config:
        return ""
    parts = (name for name, part in submodels(model) if name and type(part.config) is type(text))
    return next(parts, "")


def towers(model: nn.Module, language: str) -> list[str]:
    """Return the names of models outside the language model, such as a vision tower."""
    found: list[str] = []
    for name, _ in submodels(model):
        related = f"{language}.".startswith(f"{name}.") or name.startswith(f"{language}.")
        if name and language and not related and not name.startswith(tuple(f"{one}." for one in found)):
            found.append(name)
    return found


def submodels(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of every model inside, outer ones first."""
    return (found for found in model.named_modules() if isinstance(found[1], transformers.PreTrainedModel))


def resolve_names(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """Map names in the model to stored names by transformers' rules: added or removed prefixes, renamings."""
    renamings = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    state = model.state_dict()
    targets = {
        name: rename_source_key(name, renamings, [], model.base_model_prefix, state)[0] for name in stored
    }
    found = {target: name for name, target in targets.items() if target in state}
    own = (name for name, target in targets.items() if target not in state and name in state)
    return {name: name for name in own} | found  # such a renaming is for another spelling


def joined_names(model: nn.Module, stored: Iterable[str]) -> dict[str, list[str]]:
    """Map names in the model to stored names of the parts that transformers concatenates along dimension 0.

    Weights of linears are excluded: linears are quantized as they are stored.
    """
    renamings = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    state = model.state_dict()
    linears = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    found = {}
    for rule in get_model_conversion_mapping(model):
        if not isinstance(rule, WeightConverter) or len(rule.target_patterns) > 1:
            continue
        (target,) = rule.target_patterns
        if [type(step) for step in rule.operations] != [Concatenate] or rule.operations[0].dim != 0:
            continue
        inside = [name for name in stored if any(name.endswith(part) for part in rule.source_patterns)]
        renamed = {
            rename_source_key(name, renamings, [], model.base_model_prefix, state)[0]: name for name in inside
        }
        for name in state:
            parts = [f"{name.removesuffix(target)}{part}" for part in rule.source_patterns]
            if name.endswith(target) and name not in linears and renamed.keys() >= set(parts):
                found[name] = [renamed[part] for part in parts]
    return found


def find_blocks(model: nn.Module, checkpoint: Checkpoint) -> tuple[str, nn.ModuleList]:
    """Return the list of decoder blocks and its name: the outermost ModuleList in the language model with as
    many modules as the configuration has layers. Raises QuantkitError if there is none."""
    depth = getattr(checkpoint.text_config, "num_hidden_layers", None)
    language = language_model(model, checkpoint)
    inside = model.get_submodule(language).named_modules(prefix=language)
    lists = [(name, module) for name, module in inside if isinstance(module, nn.ModuleList)]
    found = [(name, module) for name, module in lists if len(module) == depth]
    if not found:  # the common name is the encoder's depth of pairs, and counts parts of a block in LongCat
        settings = checkpoint.config.to_dict()
        depths = [settings[key] for key in settings if key.endswith(("decoder_layers", "num_layers"))]
        found = [(name, module) for name, module in lists if len(module) in depths]
    what = f"no list of {depth} decoder blocks found in {type(model).__name__}"
    require(found, what, "quantkit compresses decoder-only models with one stack of blocks", UNSUPPORTED)
    return min(found, key=lambda pair: pair[0].count("."))


def replace_conv1d(model: nn.Module) -> set[str]:
    """Replace GPT-2's Conv1D (`[in, out]`) by nn.Linear. Returns the names of weights to transpose."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, Conv1D)}
    for name, module in found.items():
        owner, _, leaf = name.rpartition(".")
        in_features, out_features = module.weight.shape
        with torch.device("meta"):
            linear = nn.Linear(in_features, out_features, dtype=module.weight.dtype)
        setattr(model.get_submodule(owner), leaf, linear)
    return {f"{name}.weight" for name in found}
