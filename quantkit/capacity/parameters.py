"""A model's tensors, read from file headers, or derived from the config as transformers would store them."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from quantkit.capacity.settings import HEADS, Settings
from quantkit.errors import require
from quantkit.inspection.names import parent, split
from quantkit.models.files.head import EMBEDDING, HEAD
from quantkit.models.files.safetensors_folder import TensorInfo, natural
from quantkit.models.machine.expert_share import EXPERTS, ROUTED

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
CONV1D_FAMILIES = ("gpt2", "openai-gpt")  # linears stored [in, out]
# Masks and frequencies of old checkpoints: not parameters.
BUFFER = re.compile(r"(\.(attn|attention)\.(masked_)?bias|\.inv_freq|position_ids)$")
ROUTER = re.compile(r"(^|\.)(gate|router(\.layer)?|shared_expert_gate)$")
EXPERT = re.compile(r"\.experts(\.|$)|\.block_sparse_moe\.(input|output)_linear\.")  # the latter: Granite's
FUSED = {  # end of the name of a tensor of all experts -> an expert's projections
    **dict.fromkeys(("gate_up_proj", "input_linear", "fc1"), ("gate_proj", "up_proj")),
    **dict.fromkeys(("down_proj", "output_linear", "fc2"), ("down_proj",)),
    "gate_proj": ("gate_proj",),
    "up_proj": ("up_proj",),
}
MOST_EXPERTS = 10_000
# Projections that decide a block's cache and llama.cpp's mixtures, by llama.cpp's names.
PROJECTIONS = re.compile(
    r"(?:^|\.)(?:(?P<attn_q>q_proj)|(?P<attn_k>k_proj)|(?P<attn_v>v_proj)"
    r"|(?P<attn_qkv>qkv_proj|c_attn|query_key_value|Wqkv)"
    r"|(?P<attn_output>o_proj|(?:self_attn|self_attention|attention|attn)\.(?:dense|out_proj|c_proj))"
    r"|(?P<ffn_gate>gate_proj)|(?P<ffn_up>up_proj|gate_up_proj|mlp\.c_fc|dense_h_to_4h|fc1|fc_in)"
    r"|(?P<ffn_down>down_proj|mlp\.c_proj|dense_4h_to_h|fc2|fc_out))$"
)
TABLES = re.compile(r"(^|\.)(wpe|embed_positions|embed_tokens_per_layer)\.weight$")  # only looked up


@dataclass(frozen=True)
class Tensor:
    """A parameter. nbytes: size in a plain checkpoint; stored_nbytes: size of codes and scales, if quantized.

    `from_headers` sets the other fields. block: index of the decoder block, None outside the blocks. local:
    name inside the block. out_features, in_features: of a linear of a block, else 0. conv1d: whether a linear
    is stored as `[in, out]`.
    """

    name: str
    shape: tuple[int, ...]
    nbytes: int
    stored_nbytes: int | None = None
    block: int | None = None
    local: str = ""
    out_features: int = 0
    in_features: int = 0
    conv1d: bool = False

    @property
    def size(self) -> int:
        """Return the number of values."""
        return math.prod(self.shape)

    @property
    def in_file(self) -> int:
        """Return the bytes that the tensor occupies in its file."""
        return self.nbytes if self.stored_nbytes is None else self.stored_nbytes

    @property
    def is_linear(self) -> bool:
        return self.in_features > 0

    @property
    def projection(self) -> str | None:
        """Return llama.cpp's name of the projection, such as `attn_v`, if its rules use it; else None."""
        match = PROJECTIONS.search(self.local.rpartition(".")[0])
        return match and match.lastgroup

    @property
    def is_expert(self) -> bool:
        return self.block is not None and bool(EXPERT.search(f".{self.local}"))


@dataclass(frozen=True, eq=False)
class Parameters:
    """All parameters of a model. stated: the settings that config.json states. exact: whether the parameters
    were read from headers, not derived from config.json."""

    tensors: tuple[Tensor, ...]
    stated: Settings
    exact: bool

    @cached_property
    def settings(self) -> Settings:
        """Return the settings, with missing head sizes filled in from the stored projections."""
        first, widths = self.projections[0], self.key_value_widths(fused=True)
        heads = self.stated.filled(*HEADS) if widths and "attn_output" in first else None
        if type(heads) is not int or heads < 1:
            return self.stated
        head_dim = self.stated.size("head_dim", default=max(1, first["attn_output"].in_features // heads))
        values = {"head_dim": head_dim, "num_attention_heads": heads}
        kv_heads = min(widths) // (2 * head_dim)
        if kv_heads > 0 and ("attn_qkv" in first or self.stated.get("num_key_value_heads") is None):
            values["num_key_value_heads"] = kv_heads
        return replace(self.stated, values={**self.stated.values, **values})

    @cached_property
    def linears(self) -> list[Tensor]:
        """Return the linears of the blocks: the tensors that methods quantize."""
        return [tensor for tensor in self.tensors if tensor.is_linear]

    @cached_property
    def outside(self) -> list[Tensor]:
        """Return the tensors outside the blocks."""
        return [tensor for tensor in self.tensors if tensor.block is None]

    @property
    def language_model(self) -> list[Tensor]:
        """Return the tensors except other modalities and blocks that predict further tokens."""
        stack, *_ = split(next(tensor.name for tensor in self.tensors if tensor.block == 0))
        inside, layers = parent(stack), self.stated.layers
        return [
            tensor
            for tensor in self.tensors
            if (tensor.name.startswith(inside) if tensor.block is None else tensor.block < layers)
            or (tensor.block is None and HEAD.fullmatch(tensor.name))
        ]

    @cached_property
    def is_tied(self) -> bool:
        """Return whether head and embedding are one matrix."""
        return not any(HEAD.fullmatch(tensor.name) for tensor in self.outside)

    @property
    def count(self) -> int:
        """Return the number of parameters."""
        return self.total(lambda tensor: tensor.size)

    @property
    def stored_bytes(self) -> int:
        return self.total(lambda tensor: tensor.in_file)

    @property
    def quantized(self) -> bool:
        """Return True if some tensors are stored as codes and scales."""
        return any(tensor.stored_nbytes is not None for tensor, *_ in self.groups)

    @property
    def active(self) -> int | None:
        """Return the number of parameters used per token, with chosen experts only; None if config.json does
        not say how many experts are chosen."""
        return self.read(lambda tensor: tensor.size, tables=True)

    @cached_property
    def projections(self) -> list[dict[str, Tensor]]:
        """Return, for each block, {llama.cpp's name of the projection: tensor}."""
        blocks: list[dict[str, Tensor]] = [{} for _ in range(self.stated.layers)]
        for tensor in self.linears:
            if tensor.block < len(blocks) and not tensor.is_expert and tensor.projection:
                blocks[tensor.block][tensor.projection] = tensor
        return blocks

    def key_value_widths(self, fused: bool) -> list[int] | None:
        """Return the number of values in a token's key and value together, for each block; None if a block
        has no known projections.

        fused: accept q, k and v in one matrix; rows beyond the output projection's input are k and v.
        """
        widths = []
        for block in self.projections:
            if {"attn_k", "attn_v"} <= block.keys():
                widths.append(block["attn_k"].out_features + block["attn_v"].out_features)
            elif fused and {"attn_qkv", "attn_output"} <= block.keys():
                widths.append(block["attn_qkv"].out_features - block["attn_output"].in_features)
            else:
                return None
        return widths

    def total(self, amount: Callable[[Tensor], int]) -> int:
        """Return the sum of `amount` over all tensors."""
        return sum(count * amount(tensor) for tensor, _, count in self.groups)

    def read(self, amount: Callable[[Tensor], int], tables: bool = False) -> int | None:
        """Return the sum of `amount` over the tensors that a token reads, with the share of experts that is
        chosen; None if this share is unknown.

        Embedding tables count only with `tables`; blocks that predict further tokens do not count.
        """
        sums = dict.fromkeys(("read", "table", "expert", "further"), 0)
        for tensor, role, count in self.groups:
            sums[role] += count * amount(tensor)
        everything = sums["read"] + (sums["table"] if tables else 0)
        if not sums["expert"]:
            return everything
        if self.stated.filled(*ROUTED) is None or self.stated.filled(*EXPERTS) is None:
            return None
        chosen, of = (self.stated.size(*names, most=MOST_EXPERTS) for names in (ROUTED, EXPERTS))
        return everything + sums["expert"] * chosen // of

    @cached_property
    def groups(self) -> list[tuple[Tensor, str, int]]:
        """Return groups of tensors that differ only in name: (first tensor, role, number of tensors).

        Roles: `read` (used by every token), `expert`, `table` (one row per token is used), `further` (blocks
        that predict further tokens). Mixtures have thousands of equal experts.
        """
        tables, layers = [TABLES] if self.is_tied else [TABLES, EMBEDDING], self.stated.layers
        first: dict[tuple, Tensor] = {}
        counts: Counter[tuple] = Counter()
        for tensor in self.tensors:
            if tensor.block is None:
                role = "table" if any(table.search(tensor.name) for table in tables) else "read"
            else:
                role = "further" if tensor.block >= layers else "expert" if tensor.is_expert else "read"
            name = tensor.name if tensor.block is None else None
            key = role, name, tensor.shape, tensor.nbytes, tensor.stored_nbytes, tensor.is_linear
            first.setdefault(key, tensor)
            counts[key] += 1
        return [(tensor, key[0], counts[key]) for key, tensor in first.items()]


def from_headers(infos: Iterable[TensorInfo | Tensor], settings: Settings, exact: bool = True) -> Parameters:
    """Return the parameters. Raises QuantkitError if the stored blocks do not match the configuration's
    number of layers."""
    infos = sorted((i for i in infos if not BUFFER.search(i.name)), key=lambda info: natural(info.name))
    blocks = _find_blocks([info.name for info in infos], settings)
    conv1d = settings.model_type in CONV1D_FAMILIES
    tensors = (part for info in infos for part in _one_by_one(_tensor(info, blocks, conv1d), settings))
    return Parameters(tuple(tensors), settings, exact)


def _tensor(info: TensorInfo | Tensor, blocks: str, conv1d: bool) -> Tensor:
    """Return the tensor with block, local name and sizes. blocks: name of the list of decoder blocks."""
    stored = info.name, info.shape, info.nbytes, getattr(info, "stored_nbytes", None)
    stack, index, local = split(info.name)
    if stack != blocks:
        return Tensor(*stored)
    stored = *stored, index, local
    module, _, leaf = local.rpartition(".")
    plain = len(info.shape) == 2 and leaf == "weight" and "norm" not in module and not ROUTER.search(module)
    if not plain or not all(info.shape):
        return Tensor(*stored)
    out_features, in_features = info.shape[::-1] if conv1d else info.shape
    return Tensor(*stored, out_features, in_features, conv1d)


def _one_by_one(tensor: Tensor, settings: Settings) -> list[Tensor]:
    """Return the linears of a tensor that holds all experts of a block, as a job quantizes them
    (models/skeleton/fused.py); any other tensor unchanged."""
    path = tensor.local.removesuffix(".weight")
    projections = next((names for leaf, names in FUSED.items() if path.endswith(leaf)), ())
    if not projections or len(tensor.shape) != 3 or not tensor.is_expert:
        return [tensor]
    directory, hidden = path.rpartition(".")[0].removesuffix(".experts"), settings.hidden
    count = tensor.shape[0] * len(projections)
    if not 0 < count <= 2 * MOST_EXPERTS or not tensor.size or tensor.size % (count * hidden):
        return [tensor]
    rows, nbytes = tensor.size // count // hidden, tensor.nbytes // count
    stored_nbytes = None if tensor.stored_nbytes is None else tensor.stored_nbytes // count
    linears = []
    for expert, projection in itertools.product(range(tensor.shape[0]), projections):
        local = f"{directory}.experts.{expert}.{projection}.weight"
        name, shape = tensor.name.removesuffix(tensor.local) + local, (rows, hidden)
        shape = shape[::-1] if projection == "down_proj" else shape
        linears.append(Tensor(name, shape, nbytes, stored_nbytes, tensor.block, local, *shape))
    return linears


def _find_blocks(names: Iterable[str], settings: Settings) -> str:
    """Return the name of the list of blocks whose length is the configured number of layers."""
    indices: dict[str, set[int]] = {}
    for stack, index, _ in map(split, names):
        if stack is not None:
            indices.setdefault(stack, set()).add(index)
    expected = set(range(settings.layers))
    further = settings.layers + bool(settings.get("num_nextn_predict_layers"))  # stored after the others
    lists = [blocks for blocks, seen in indices.items() if expected <= seen <= set(range(further))]
    lists = [blocks for blocks in lists if not re.search("vision|visual|audio", blocks)] or lists
    what = f"config.json says {settings.layers} blocks, but {len(lists) or 'no'} stored lists are so long"
    hint = "config.json and weights belong to different models, or the download is incomplete"
    require(len(lists) == 1, what, hint)
    return lists[0]
