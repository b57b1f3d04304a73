"""Convert a model's tensors to llama.cpp's names, order of rows and shifted norms, and back.

transformers' model gives the parameters; the `gguf` package's name map gives llama.cpp's names. Weights keep
their orientation `W [out, in]`. Only rows are reordered, as values or encoded (`uint8 [out, bytes]`).
"""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import gguf
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from quantkit.errors import UNSUPPORTED, name_all, require
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.gguf import architectures, mixtures, rope
from quantkit.models.gguf.architectures import Architecture
from quantkit.models.gguf.variants import kv_heads
from quantkit.models.skeleton import meta_model
from quantkit.models.skeleton.experts import Experts, take_apart
from quantkit.models.skeleton.loading import checked
from quantkit.models.skeleton.names import refuse_absent

STACKED = re.compile(r"(.+)\.norms\.\d+(\.weight)")  # the file stacks the norms of all heads
BUFFERS = re.compile(  # buffers in older checkpoints, which transformers computes today
    r"rotary_emb\.inv_freq|\.attn\.(masked_)?bias|\.attention\.(masked_)?bias|self_attention\.(masked_)?bias"
)
KINDS = gguf.MODEL_TENSOR.FFN_GATE_EXP, gguf.MODEL_TENSOR.FFN_UP_EXP, gguf.MODEL_TENSOR.FFN_DOWN_EXP
BALANCE = re.compile(r"(?:\.gate(?=\.moe_statics))?(\.moe_statics|\.gate|\.mlp)\.e_score_correction_bias$")


@dataclass(frozen=True)
class Part:
    """A part of a parameter of `shape`, stored as its own tensor; `of` returns the part as a view."""

    shape: tuple[int, ...]
    of: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Target:
    """One tensor of a GGUF file.

    parameters: the model's names of its parameters: one, several that are stacked (a norm per head, a linear
    per expert), or none if computed. stored: the same parameters by the checkpoint's names. shape:
    `[out, in]`, or `[experts, out, in]`. index: row k of the file is row `index[k]` of the model; None: equal
    order. shift: number that is added to the model's values in the file. decay: the file holds -exp(value).
    conv1d: the checkpoint holds `[in, out]`; single: `[out, 1, in]`. values: of a computed tensor. part:
    which part of its parameter it holds; None: all.
    """

    name: str
    parameters: tuple[str, ...]
    shape: tuple[int, ...]
    index: Tensor | None = None
    shift: float = 0.0
    conv1d: bool = False
    decay: bool = False
    single: bool = False
    values: Tensor | None = None
    stored: tuple[str, ...] = ()
    part: Part | None = None

    @property
    def changed(self) -> bool:
        """Return whether the file's values differ from the model's."""
        return self.decay or self.shift != 0

    @property
    def stacked(self) -> bool:
        """Return whether the tensor stacks parameters: matrices of experts, or norms of heads."""
        return self.part is None and (len(self.shape) == 3 or len(self.parameters) > 1)

    @property
    def parts(self) -> list[Self]:
        """Return the parameters of a stacked tensor; for another tensor itself."""
        if not self.stacked:
            return [self]
        pairs = zip(self.parameters, self.stored or self.parameters, strict=True)
        return [replace(self, parameters=(p,), stored=(s,), shape=self.shape[1:]) for p, s in pairs]

    def read(self, checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values `[out, in]` from the checkpoint, in the model's order of rows.

        Raises QuantkitError if they have another shape or are not finite.
        """
        if self.values is not None:
            return self.values if dtype is None else self.values.to(dtype)
        parts = [checkpoint.read(name, dtype) for name in self.stored]
        tensor = torch.stack(parts) if self.stacked else parts[0]
        if self.conv1d and not checkpoint.is_quantized(self.stored[0]):
            tensor = tensor.t().contiguous()
        if self.single and tensor.ndim == 3:
            tensor = tensor.squeeze(1)
        tensor = checked(tensor, self.part.shape if self.part else self.shape, self.stored[0])
        return self.part.of(tensor).contiguous() if self.part else tensor

    def to_gguf(self, tensor: Tensor) -> Tensor:
        """Convert the model's values, or encoded rows, to the file's."""
        if self.decay:
            return -tensor.float().exp()
        if self.shift:
            return tensor.float() + self.shift
        return tensor if self.index is None else tensor.index_select(0, self.index.to(tensor.device))

    def to_hf(self, tensor: Tensor) -> Tensor:
        """Convert the file's values, or encoded rows, to the model's."""
        if self.decay:
            return (-tensor.float()).log()
        if self.shift:
            return tensor.float() - self.shift
        if self.index is None:
            return tensor
        return tensor.index_select(0, torch.argsort(self.index).to(tensor.device))


def of_config(config: PretrainedConfig, source: str = "the model") -> list[Target]:
    """Return every tensor of this model's GGUF file in llama-quantize's order (`mixtures.order`).

    Raises QuantkitError (exit code 4) naming parameters that llama.cpp has no tensor for.
    """
    return _targets(architectures.of_config(config), _model(config, source), config)


def of_checkpoint(checkpoint: Checkpoint) -> list[Target]:
    """Return every tensor of the GGUF file of a checkpoint's language model, with its stored names.

    Raises QuantkitError as `of_config` does, and for tensors that are absent or unknown to the model.
    """
    config, arch = checkpoint.config, architectures.of_config(checkpoint.text_config)
    model = _model(config, checkpoint.source)
    stored = meta_model.resolve_names(model, checkpoint.names)
    _refuse_unknown(checkpoint, model, set(stored.values()))
    for pair in model.all_tied_weights_keys.items():
        for name, twin in (pair, pair[::-1]):
            if name not in stored and twin in stored:
                stored[name] = stored[twin]
    targets = _of_language_model(arch, model, checkpoint, config)
    refuse_absent([name for target in targets for name in target.parameters if name not in stored])
    return [replace(target, stored=tuple(map(stored.get, target.parameters))) for target in targets]


def _of_language_model(
    arch: Architecture, model: nn.Module, checkpoint: Checkpoint, config: PretrainedConfig
) -> list[Target]:
    """Return targets with the parameter names of `model`: the language model, or a wrapper around it."""
    language = meta_model.language_model(model, checkpoint)
    if not language:
        return _targets(arch, model, config)
    text = copy.deepcopy(checkpoint.text_config)
    text.tie_word_embeddings = config.tie_word_embeddings
    inner = _model(text, checkpoint.source)
    prefix, head = inner.base_model_prefix + ".", _name_of(inner, inner.get_output_embeddings())
    outer = {f"{head}.weight": f"{_name_of(model, model.get_output_embeddings())}.weight"}

    def renamed(name: str) -> str:
        return outer.get(name, f"{language}.{name.removeprefix(prefix)}")

    targets = _targets(arch, inner, text)
    return [replace(target, parameters=tuple(map(renamed, target.parameters))) for target in targets]


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _model(config: PretrainedConfig, source: str) -> nn.Module:
    """Return the model on the meta device, with one linear per expert and projection."""
    model = meta_model.empty(config, source)
    take_apart(model)
    return model


def _refuse_unknown(checkpoint: Checkpoint, model: nn.Module, resolved: set[str]) -> None:
    ignored = (BUFFERS, *(model._keys_to_ignore_on_load_unexpected or ()))
    unknown = [
        name
        for name in checkpoint.names
        if name not in resolved and not any(re.search(pattern, name) for pattern in ignored)
    ]
    what = f"{checkpoint.source} holds tensors that {type(model).__name__} does not have: {name_all(unknown)}"
    hint = "a GGUF file holds all tensors of a model: config.json may belong to another model"
    require(not unknown, what, hint, UNSUPPORTED)


def _targets(arch: Architecture, model: nn.Module, config: PretrainedConfig) -> list[Target]:
    conv1d = meta_model.replace_conv1d(model)
    tied = {} if arch.head == "always" else model.all_tied_weights_keys
    # state_dict also has the buffers that a checkpoint holds, such as those that balance experts
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items() if name not in tied}
    experts = _experts(model)
    stacked = set(experts.values())
    stacks: dict[str, list[str]] = {}
    for name in shapes:
        stacks.setdefault(experts.get(name) or STACKED.sub(r"\1\2", name), []).append(name)
    targets: dict[str, Target] = {}
    lost = []
    model_arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch.name)
    names = gguf.get_tensor_name_map(model_arch, config.num_hidden_layers)
    for stack, parameters in stacks.items():
        name = stack if stack in stacked else _named(names, f"{model.base_model_prefix}.", stack)
        if name is None or name in targets or (name == mixtures.OUTPUT and arch.head == "never"):
            lost += parameters
            continue
        shape = shapes[parameters[0]]
        single = len(shape) == 3 and shape[1] == 1
        shape = shape[::2] if single else shape
        shape = (len(parameters), *shape) if parameters != [stack] else shape
        leaf = name.split(".")[-2]
        if arch.latent and leaf == "attn_kv_b":
            for half, view in _latent(config).items():
                half = name.replace(leaf, half)
                viewed = tuple(view(torch.empty(shape, device="meta")).shape)
                targets[half] = Target(half, tuple(parameters), viewed, part=Part(shape, view))
            continue
        targets[name] = Target(
            name,
            tuple(parameters),
            shape,
            index=ORDERS[arch.rows[leaf]](shape[0], config) if leaf in arch.rows else None,
            shift=arch.norm_shift if name.endswith("norm.weight") and leaf != "ssm_norm" else 0.0,
            conv1d=stack in conv1d,
            decay=name.endswith(".ssm_a"),
            single=single,
        )
    if lost:
        raise arch.inexpressible(f"tensors such as {name_all(lost)}")
    for name, values in rope.factors(arch, config).items():
        targets[name] = Target(name, (), tuple(values.shape), values=values.float())
    return sorted(targets.values(), key=lambda target: mixtures.order(target.name))


def _experts(model: nn.Module) -> dict[str, str]:
    """Return llama.cpp's name of a layer's stacked experts, by the name of each expert's weight or bias."""
    stacks = {}
    for path, layer in model.named_modules():
        if isinstance(layer, Experts):
            block = re.search(r"\.(\d+)\.", path)[1]
            kinds = dict(zip((layer.gate, layer.up, layer.down), KINDS, strict=True))
            for name, _ in layer.named_parameters():
                if name.split(".")[0].isdigit():
                    _, projection, leaf = name.split(".")
                    stack = gguf.TENSOR_NAMES[kinds[projection]].format(bid=block)
                    stacks[f"{path}.{name}"] = f"{stack}.{leaf}"
    return stacks


def _named(names: gguf.TensorNameMap, prefix: str, name: str) -> str | None:
    """Return llama.cpp's name of a model's parameter, by the name map of the `gguf` package."""
    if name == "lm_head.weight":  # absent from the map of families whose head is always tied
        return mixtures.OUTPUT
    name = BALANCE.sub(r"\1.e_score_correction.bias", name).replace(".dt_bias", ".dt_proj.bias")
    spellings = (name, name.removeprefix(prefix), name.replace(".router.", ".router.layer."))
    mapped = (names.get_name(spelling, (".weight", ".bias")) for spelling in spellings)
    name = next(filter(None, mapped), None)
    if not name or name.endswith(("weight", "bias", "ssm_a")):
        return name
    return f"{name}.weight"  # a parameter without a module of its own


def _rotary(rows: int, heads: int) -> Tensor:
    """Return the order of rows that makes rotated pairs (0, d/2), (1, d/2 + 1), … neighbours."""
    return torch.arange(rows).view(heads, 2, rows // heads // 2).transpose(1, 2).reshape(-1)


def _grouped(rows: int, config: PretrainedConfig) -> Tensor:
    """Return the order of rows that turns q, k, v of each group into all q, all k, all v."""
    groups = kv_heads(config)
    queries = config.num_attention_heads // groups
    index = torch.arange(rows).view(groups, queries + 2, -1)
    parts = index[:, :queries], index[:, queries], index[:, queries + 1]
    return torch.cat([part.reshape(-1) for part in parts])


ORDERS: dict[str, Callable[[int, PretrainedConfig], Tensor]] = {
    "rotary_q": lambda rows, config: _rotary(rows, config.num_attention_heads),
    "rotary_kv": lambda rows, config: _rotary(rows, kv_heads(config)),
    "grouped": _grouped,
}


def _latent(config: PretrainedConfig) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return functions that cut the rows for keys or values out of a weight, for all heads: keys
    `[heads, in, out]`, transposed because queries are multiplied with them, and values `[heads, out, in]`."""
    heads, size = config.num_attention_heads, config.qk_nope_head_dim
    return {
        "attn_k_b": lambda weight: weight.unflatten(0, (heads, -1))[:, :size].transpose(1, 2),
        "attn_v_b": lambda weight: weight.unflatten(0, (heads, -1))[:, size:],
    }
