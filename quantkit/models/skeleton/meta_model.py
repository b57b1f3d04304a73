"""The model as transformers builds it on the meta device: shapes and buffers, no weights."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import transformers
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from quantkit.errors import UNSUPPORTED, QuantkitError, first_line, require
from quantkit.models.files.checkpoint import Checkpoint

BUFFER_BYTES = 4 << 30  # limit of buffers, which depend on the configuration alone: masks, frequencies


def build(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return the model on the meta device, but with real buffers: checkpoints lack rotary frequencies."""
    model = empty(checkpoint.config, checkpoint.source, dtype, checkpoint.trust_remote_code)
    with _explained(checkpoint.source):
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
    alone = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and text is config
    wrapped = type(config) in transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING and not alone
    kind = transformers.AutoModelForMultimodalLM if wrapped else transformers.AutoModelForCausalLM
    with _explained(source):
        if config.is_encoder_decoder or text.is_encoder_decoder:
            raise ValueError("its language model is an encoder and a decoder")
        with torch.device("meta"):
            copied = copy.deepcopy(config)  # transformers writes `dtype` into it
            model = kind.from_config(copied, dtype=dtype, trust_remote_code=trust_remote_code)
        roles = {getattr(module, "is_decoder", None) for module in model.modules()} - {None}
        if roles == {False} and not wrapped:  # towers may be encoders
            raise ValueError("it is an encoder, whose tokens see later ones (is_decoder is false)")
    return model


@contextmanager
def _explained(source: str) -> Iterator[None]:
    """Turn errors of building a model into QuantkitError: sizes that do not go together raise many types."""
    try:
        yield
    except (MemoryError, QuantkitError):
        raise
    except Exception as error:
        why = first_line(error) if isinstance(error, (ValueError, ImportError)) else f"{error!r:.300}"
        library = f"transformers {transformers.__version__}"
        raise QuantkitError(
            f"{source} is not a causal language model that {library} knows: {why}",
            hint="quantkit compresses decoder-only models (…ForCausalLM), and those that other modalities "
            "are wrapped around",
            exit_code=UNSUPPORTED,
        ) from error


def language_model(model: nn.Module, checkpoint: Checkpoint) -> str:
    """Return the name of the language model inside `model`; "" if it is the whole model."""
    text = checkpoint.text_config
    if text is checkpoint.config:
        return ""
    names = (name for name, inner in submodels(model) if name and type(inner.config) is type(text))
    return next(names, "")


def towers(model: nn.Module, language: str) -> list[str]:
    """Return the names of models outside the language model, such as a vision tower."""
    names: list[str] = []
    for name, _ in submodels(model) if language else ():
        related = f"{language}.".startswith(f"{name}.") or name.startswith(f"{language}.")
        if name and not related and not name.startswith(tuple(f"{tower}." for tower in names)):
            names.append(name)
    return names


def submodels(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of every model inside, outer ones first."""
    return (pair for pair in model.named_modules() if isinstance(pair[1], transformers.PreTrainedModel))


def resolve_names(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """Map names in the model to stored names by transformers' rules: added or removed prefixes, renamings."""
    state, targets = model.state_dict(), _renamed(model, stored)
    renamed = {target: name for name, target in targets.items() if target in state}
    kept = (name for name, target in targets.items() if target not in state and name in state)
    return {name: name for name in kept} | renamed  # kept: the renaming is for another spelling


def _renamed(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """Return the name that transformers gives to each stored name, whether the model has it or not."""
    rules, state = get_model_conversion_mapping(model), model.state_dict()
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    prefix = model.base_model_prefix
    return {name: rename_source_key(name, renamings, [], prefix, state)[0] for name in stored}


def joined_names(model: nn.Module, stored: Iterable[str]) -> dict[str, list[str]]:
    """Map names in the model to stored names of the parts that transformers concatenates along dimension 0.

    Weights of linears are excluded: linears are quantized as they are stored.
    """
    linears = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    others = [name for name in model.state_dict() if name not in linears]
    joined = {}
    for rule in get_model_conversion_mapping(model):
        if not isinstance(rule, WeightConverter) or len(rule.target_patterns) > 1:
            continue
        (target,), endings = rule.target_patterns, tuple(rule.source_patterns)
        if [type(step) for step in rule.operations] != [Concatenate] or rule.operations[0].dim != 0:
            continue
        renamed = _renamed(model, (name for name in stored if name.endswith(endings)))
        renamed = {name: original for original, name in renamed.items()}
        for name in others:
            parts = [f"{name.removesuffix(target)}{ending}" for ending in endings]
            if name.endswith(target) and renamed.keys() >= set(parts):
                joined[name] = [renamed[part] for part in parts]
    return joined


def find_blocks(model: nn.Module, checkpoint: Checkpoint) -> tuple[str, nn.ModuleList]:
    """Return the list of decoder blocks and its name: the outermost ModuleList in the language model with as
    many modules as the configuration has layers. Raises QuantkitError if there is none."""
    depth = getattr(checkpoint.text_config, "num_hidden_layers", None)
    language = language_model(model, checkpoint)
    inside = model.get_submodule(language).named_modules(prefix=language)
    lists = [(name, module) for name, module in inside if isinstance(module, nn.ModuleList)]
    stacks = [(name, module) for name, module in lists if module and len(module) == depth]
    if not stacks:  # num_hidden_layers is the encoder's depth in pairs, and counts parts of blocks in LongCat
        settings = checkpoint.config.to_dict()
        depths = [settings[key] for key in settings if key.endswith(("decoder_layers", "num_layers"))]
        stacks = [(name, module) for name, module in lists if len(module) in depths]
    what = f"no list of {depth} decoder blocks found in {type(model).__name__}"
    require(stacks, what, "quantkit compresses decoder-only models with one stack of blocks", UNSUPPORTED)
    return min(stacks, key=lambda pair: pair[0].count("."))


def replace_conv1d(model: nn.Module) -> set[str]:
    """Replace GPT-2's Conv1D (`[in, out]`) by nn.Linear. Returns the names of weights to transpose."""
    modules = {name: module for name, module in model.named_modules() if isinstance(module, Conv1D)}
    for name, module in modules.items():
        in_features, out_features = module.weight.shape
        with torch.device("meta"):
            linear = nn.Linear(in_features, out_features, dtype=module.weight.dtype)
        model.set_submodule(name, linear)
    return {f"{name}.weight" for name in modules}
