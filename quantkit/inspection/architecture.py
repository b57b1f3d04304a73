"""What the configuration promises of a model, against the names and shapes that are stored.

Families name and shape their tensors in their own ways. What is not understood is not judged, and neither
is a stack of blocks beside the language model's: a false alarm is worse than a miss.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.errors import count, name_all
from quantkit.inspection.names import INPUT_EMBEDDINGS, language_stack, parent, split, stack_of
from quantkit.inspection.stored import Weight
from quantkit.models.headers import Contents

MLP = re.compile(r"mlp\.(gate|up|down|gate_up)_proj\.weight$")
QUERIES, OUTPUTS = "self_attn.q_proj.weight", "self_attn.o_proj.weight"
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
NUMBERS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
KEYS_AND_VALUES = ("self_attn.k_proj.weight", "self_attn.v_proj.weight")
FEW = 0.1  # share of the blocks that may lack a tensor by mistake rather than by design
EXTRA_BLOCKS = "num_nextn_predict_layers"  # behind the last one, to predict further tokens
NOT_IN_THE_FIRST = re.compile(r"^attn_norm\.weight$|router_states_scale$")  # ModernBERT's and Zaya's block 0
# Who has the first in a block, has the second behind the blocks: the blocks' outputs are not normalized
FIRST_NORM = re.compile(
    r"(input_layernorm|post_feedforward_layernorm|attention_norm|ln_1|attn_norm)\.weight$"
)
LAST_NORM = re.compile(r"norm|ln_")
EMBEDDINGS = re.compile(r"emb|wte|tok|shared|vocab|(^|\.)w\.weight$")
NO_TOKENS = re.compile(r"pos|wpe|rotary|rope|norm|patch|embed_out")  # what is called embeddings besides
HEAD = re.compile(r"head|embed_out|output|predictions")
MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Model")  # drafts' names end otherwise
WITH_HEAD = ("ForCausalLM", "LMHeadModel")
MORE_ROWS = re.compile(r"mllama|moshi|molmo")  # families whose embeddings have rows of their own besides
NO_FIRST_NORM = ("openai-gpt",)  # it has a norm of that name behind the attention
UNTIED = frozenset(  # families whose head is stored unless the configuration says that it is tied
    "arcee codegen deepseek_v2 deepseek_v3 exaone4 glm glm4 glm4_moe gpt_neox gpt_oss gptj granite "
    "granitemoe internlm3 llama ministral mistral mixtral nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 "
    "phimoe qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next seed_oss stablelm".split()
)


@dataclass(frozen=True)
class Model:
    """The language model of a checkpoint. stack: `model.layers`. blocks: its weights by block and name
    inside it. outside: names outside all blocks, those of absent shards among them."""

    config: dict[str, Any]
    name: str  # of its class, as config.json has it; "" where it has none
    stack: str
    blocks: dict[int, dict[str, Weight]]
    outside: frozenset[str]
    whole: bool  # whether all shards could be read

    @staticmethod
    def of(contents: Contents, weights: Sequence[Weight]) -> Model | None:
        """None where it is not clear which stack of blocks it is."""
        names = [weight.name for weight in weights]
        stack = language_stack(names)
        if stack is None:
            return None
        blocks: dict[int, dict[str, Weight]] = {}
        for weight in weights:
            block, local = split(weight.name)
            if block is not None and stack_of(weight.name) == stack:
                blocks.setdefault(block, {})[local] = weight
        named = contents.config.get("architectures")
        name = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
        outside = frozenset(each for each in {*names, *contents.absent} if split(each)[0] is None)
        return Model(contents.text_config, name, stack, blocks, outside, not contents.absent)

    def matrices(self) -> Iterator[tuple[str, str, tuple[int, int]]]:
        """Those of the blocks: name inside the block, name and shape."""
        for block in self.blocks.values():
            for local, weight in block.items():
                if weight.shape is not None and len(weight.shape) == 2:
                    yield local, weight.name, weight.shape


def problems(
    contents: Contents, weights: Sequence[Weight], tokenizer: dict[str, Any] | None
) -> Iterator[str]:
    """Blocks, embeddings, final norm and head that are absent; shapes that the configuration contradicts."""
    for key in NUMBERS:
        if isinstance(contents.text_config.get(key), str):
            yield f"{key} of config.json is text: {contents.text_config[key]!r}"
    model = Model.of(contents, weights)
    if model is None:
        return
    yield from _norms(model, weights)
    yield from _blocks(model)
    yield from _outside(model)
    yield from _embeddings(model, weights, tokenizer)
    yield from _sizes(model)
    yield from _heads(model)


def _blocks(model: Model) -> Iterator[str]:
    """As many blocks as the configuration says, and none that is poorer than nearly all others."""
    held = {block: set(locals_) for block, locals_ in model.blocks.items()}
    depth = model.config.get("num_hidden_layers") or model.config.get("n_layer")
    if isinstance(depth, int) and 0 < depth < 10**5 and model.whole:
        absent = [str(block) for block in range(depth) if block not in held]
        if absent:
            yield f"of {count(depth, 'block')}, {len(absent)} without tensors: {name_all(absent)}"
        more = model.config.get(EXTRA_BLOCKS)
        beyond = [str(b) for b in sorted(held) if b >= depth + (more if isinstance(more, int) else 0)]
        if beyond:
            yield f"the configuration says {depth} blocks, there are tensors of block {name_all(beyond)}"
    if not model.whole:
        return
    usual = {local for local in set().union(*held.values()) if _share(local, held) >= 1 - FEW}
    for block, locals_ in sorted(held.items()):
        lacking = sorted(usual - locals_)
        if block == min(held):
            lacking = [local for local in lacking if not NOT_IN_THE_FIRST.search(local)]
        if lacking and locals_ < usual and len(held) > 1:  # a block of another kind has tensors of its own
            yield f"block {block} lacks {name_all(lacking)}, which the other blocks have"


def _share(local: str, held: dict[int, set[str]]) -> float:
    """Of the blocks, one aside, the part that has a tensor of this name."""
    return sum(local in names for names in held.values()) / max(1, len(held) - 1)


def _outside(model: Model) -> Iterator[str]:
    """What lies before and behind the blocks: embeddings, final norm and head."""
    first = any(FIRST_NORM.match(local) for block in model.blocks.values() for local in block)
    if not (model.name.endswith(MODELS) if model.name else first):  # adapters and importances have no norms
        return
    family = str(model.config.get("model_type"))
    tied = model.config.get("tie_word_embeddings", False if family in UNTIED else None)
    headed = any(HEAD.search(name) and "norm" not in name for name in model.outside)
    if not any(EMBEDDINGS.search(name) and not NO_TOKENS.search(name) for name in model.outside):
        if not headed or tied is False:  # a head that is tied to them provides them
            yield "the input embeddings are absent"
    behind = (name for name in model.outside if name.startswith(parent(model.stack)))
    if first and family not in NO_FIRST_NORM:
        if not any(LAST_NORM.search(name) and not EMBEDDINGS.search(name) for name in behind):
            yield "the norm behind the last block is absent"
    # without a prefix it was saved without its head, to embed texts, say
    if tied is False and not headed and parent(model.stack) and model.name.endswith(WITH_HEAD):
        yield "the head is absent (lm_head), and the configuration does not tie it to the embeddings"


def _embeddings(model: Model, weights: Sequence[Weight], tokenizer: dict[str, Any] | None) -> Iterator[str]:
    """A row for every token, a column for every hidden feature."""
    vocabulary = model.config.get("vocab_size")
    width = model.config.get("word_embed_proj_dim", model.config.get("hidden_size"))
    tokens = tokenizer["tokens"] if tokenizer else None
    for weight in weights:
        name, shape = weight.name, weight.shape
        if name not in model.outside or not name.startswith(parent(model.stack)):
            continue
        if not INPUT_EMBEDDINGS.search(name) or shape is None or len(shape) != 2:
            continue
        more = MORE_ROWS.match(str(model.config.get("model_type")))
        if isinstance(vocabulary, int) and shape[0] != vocabulary and not (more and shape[0] > vocabulary):
            yield f"{name} has {shape[0]} rows, the configuration says {vocabulary} tokens"
        if isinstance(width, int) and shape[1] != width:
            yield f"{name} has {shape[1]} columns, the configuration says {width}"
        if tokens and tokens > shape[0]:
            yield f"the tokenizer has {tokens} tokens, {name} only {shape[0]} rows"


def _sizes(model: Model) -> Iterator[str]:
    """Shapes inside the blocks, where every family means the same by its numbers."""
    hidden, intermediate = model.config.get("hidden_size"), model.config.get("intermediate_size")
    for local, name, shape in model.matrices():
        if MLP.match(local) and isinstance(intermediate, int):
            if intermediate not in shape and 2 * intermediate not in shape:
                yield f"{name} is {list(shape)}, but intermediate_size is {intermediate}"
        if local == QUERIES and isinstance(hidden, int) and shape[1] != hidden:
            yield f"{name} is {list(shape)}, but hidden_size is {hidden}"


def _norms(model: Model, weights: Sequence[Weight]) -> Iterator[str]:
    """A value for every hidden feature, in the norms that are called so in all families that have them."""
    hidden = model.config.get("hidden_size")
    last = f"{parent(model.stack)}norm.weight"
    inside = [block[local] for block in model.blocks.values() for local in NORMS if local in block]
    for weight in (*inside, *(weight for weight in weights if weight.name == last)):
        if type(hidden) is int and weight.shape is not None and weight.shape != (hidden,):
            yield f"{weight.name} is {list(weight.shape)}, but hidden_size is {hidden}"


def _heads(model: Model) -> Iterator[str]:
    """Rows of keys and values are `num_key_value_heads * head_dim`, where all blocks and heads are alike.

    head_dim's default depends on the family, and gates double the rows of queries, so either the rows of
    queries over their heads or the configuration's head_dim may justify what is stored.
    """
    config = model.config
    own = [key for key in config if "num_key_value_heads" in key or "head_dim" in key]
    kv_heads, heads = config.get("num_key_value_heads"), config.get("num_attention_heads")
    numbers = (kv_heads, heads)
    if set(own) - {"num_key_value_heads", "head_dim"} or not all(type(n) is int and n > 0 for n in numbers):
        return
    told = config.get("head_dim")
    of_outputs = {shape[1] for local, _, shape in model.matrices() if local == OUTPUTS}
    if isinstance(told, int) and len(of_outputs) == 1 and of_outputs != {heads * told}:
        (columns,) = of_outputs
        yield f"o_proj has {columns} columns, but the configuration says {heads} heads of {told}"
        return
    for block in model.blocks.values():
        pair = [block[local].shape for local in (QUERIES, OUTPUTS) if local in block]
        if len(pair) == 2 and None not in pair and pair[0][0] not in (pair[1][1], 2 * pair[1][1]):
            yield f"{block[QUERIES].name} has {pair[0][0]} rows, o_proj {pair[1][1]} columns"
    of_queries = {shape[0] for local, _, shape in model.matrices() if local == QUERIES}
    of_keys = {shape[0] for local, _, shape in model.matrices() if local in KEYS_AND_VALUES}
    if len(of_queries) != 1 or len(of_keys) != 1:
        return
    (queries,), (keys,) = of_queries, of_keys
    hidden = config.get("hidden_size")
    head_dims = {queries / heads}
    head_dims |= {told} if isinstance(told, int) else {hidden / heads} if isinstance(hidden, int) else set()
    if keys not in {kv_heads * head_dim for head_dim in head_dims}:
        yield (
            f"k_proj and v_proj have {keys} rows, but the configuration says {kv_heads} key-value heads of "
            f"{queries / heads:g}"
        )
