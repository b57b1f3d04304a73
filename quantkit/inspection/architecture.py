"""What the configuration promises of a model, against the names and shapes that are stored.

By what most families have in common, since a look at headers takes a third of a second and the model that
transformers builds takes five: `--deep` compares with that one (values.py). What is not understood is not
judged, and neither is a stack of blocks beside the language model's: a false alarm is worse than a miss.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.errors import count, name_all
from quantkit.inspection.names import EXPERT, INPUT_EMBEDDINGS, language_stack, parent, split, stack_of
from quantkit.inspection.stored import Weight
from quantkit.models.headers import Contents
from quantkit.models.held import EXPERTS

NUMBERS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
QUERIES, OUTPUTS = "self_attn.q_proj.weight", "self_attn.o_proj.weight"
KEYS_AND_VALUES = ("self_attn.k_proj.weight", "self_attn.v_proj.weight")
MLP = re.compile(r"mlp\.(gate|up|down|gate_up)_proj\.weight$")
NORM = re.compile(r"(input|post_attention)_layernorm\.weight$")
FEW = 0.1  # share of the blocks that may lack a tensor by mistake rather than by design
NOT_IN_THE_FIRST = re.compile(r"^attn_norm\.weight$|router_states_scale$")  # ModernBERT's and Zaya's block 0
# Who has the first in a block, has the second behind the blocks: the blocks' outputs are not normalized
FIRST_NORM = re.compile(
    r"(input_layernorm|post_feedforward_layernorm|attention_norm|ln_1|attn_norm)\.weight$"
)
LAST_NORM = re.compile(r"norm|ln_")
EMBEDDINGS = re.compile(r"emb|wte|tok|shared|vocab|(^|\.)w\.weight$")
NO_TOKENS = re.compile(r"pos|wpe|rotary|rope|norm|patch|embed_out")  # what is called embeddings besides
HEAD = re.compile(r"head|embed_out|output|predictions")
WITH_HEAD = ("ForCausalLM", "LMHeadModel")
MODELS = (*WITH_HEAD, "ForConditionalGeneration", "Model")  # drafts' names end otherwise
MORE_ROWS = re.compile(r"mllama|moshi|molmo")  # families whose embeddings have rows of their own besides


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

    def number(self, key: str) -> int | None:
        """Of the configuration; None where it says nothing, or nonsense."""
        value = self.config.get(key)
        return value if type(value) is int and value > 0 else None

    def matrices(self, *locals_: str) -> list[tuple[int, int]]:
        """Shapes of those of the blocks that have such a name inside them."""
        found = (block[local].shape for block in self.blocks.values() for local in locals_ if local in block)
        return [shape for shape in found if shape is not None and len(shape) == 2]


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
    if model.whole:
        yield from _blocks(model)
    yield from _outside(model)
    yield from _embeddings(model, weights, tokenizer)
    yield from _sizes(model, weights)
    yield from _experts(model)
    yield from _heads(model)


def _blocks(model: Model) -> Iterator[str]:
    """As many blocks as the configuration says, and none that is poorer than nearly all others."""
    held = {block: set(locals_) for block, locals_ in model.blocks.items()}
    depth = model.number("num_hidden_layers") or model.number("n_layer")
    if depth and depth < 10**5:
        absent = [str(block) for block in range(depth) if block not in held]
        if absent:
            yield f"of {count(depth, 'block')}, {len(absent)} without tensors: {name_all(absent)}"
        last = depth + (model.number("num_nextn_predict_layers") or 0)  # these predict further tokens
        if beyond := [str(block) for block in sorted(held) if block >= last]:
            yield f"the configuration says {depth} blocks, there are tensors of block {name_all(beyond)}"
    kinds: dict[tuple[str, ...], set[int]] = {}
    for block in held:
        kinds.setdefault(_kind(model, block, len(held)), set()).add(block)
    all_have = _usual(list(held.values()))
    have = {kind: all_have & _usual([held[block] for block in alike]) for kind, alike in kinds.items()}
    for block, locals_ in sorted(held.items()):
        kind = _kind(model, block, len(held))
        alike, usual = kinds[kind], have[kind]
        lacking = sorted(usual - locals_)
        if block == min(held):
            lacking = [local for local in lacking if not NOT_IN_THE_FIRST.search(local)]
        if lacking and locals_ < usual and len(alike) > 1:  # a block of another kind has tensors of its own
            yield f"block {block} lacks {name_all(lacking)}, which the other blocks have"


def _kind(model: Model, block: int, depth: int) -> tuple[str, ...]:
    """What the configuration calls a block, in its lists of a word for each: `layer_types` and the like."""
    lists = (value for value in model.config.values() if isinstance(value, list) and len(value) == depth)
    words = (value for value in lists if all(isinstance(word, str) for word in value))
    return tuple(value[block] for value in words if block < depth)


def _usual(blocks: Sequence[set[str]]) -> set[str]:
    """What nearly all of them have, one aside."""
    enough = (1 - FEW) * max(1, len(blocks) - 1)
    every = set().union(*blocks)
    return {local for local in every if sum(local in names for names in blocks) >= enough}


def _outside(model: Model) -> Iterator[str]:
    """What lies before and behind the blocks: embeddings, final norm and head."""
    first = any(FIRST_NORM.match(local) for block in model.blocks.values() for local in block)
    if not (model.name.endswith(MODELS) if model.name else first):  # adapters and importances have no norms
        return
    untied = model.config.get("tie_word_embeddings") is False
    headed = any(HEAD.search(name) and "norm" not in name for name in model.outside)
    if not any(EMBEDDINGS.search(name) and not NO_TOKENS.search(name) for name in model.outside):
        if not headed or untied:  # a head that is tied to them provides them
            yield "the input embeddings are absent"
    behind = (name for name in model.outside if name.startswith(parent(model.stack)))
    if first and model.config.get("model_type") != "openai-gpt":  # whose ln_1 is behind the attention
        if not any(LAST_NORM.search(name) and not EMBEDDINGS.search(name) for name in behind):
            yield "the norm behind the last block is absent"
    # without a prefix it was saved without its head, to embed texts, say
    if untied and not headed and parent(model.stack) and model.name.endswith(WITH_HEAD):
        yield "the head is absent (lm_head), and the configuration does not tie it to the embeddings"


def _embeddings(model: Model, weights: Sequence[Weight], tokenizer: dict[str, Any] | None) -> Iterator[str]:
    """A row for every token, a column for every hidden feature."""
    vocabulary = model.number("vocab_size")
    width = model.number("word_embed_proj_dim") or model.number("hidden_size")
    more = MORE_ROWS.match(str(model.config.get("model_type")))
    tokens = tokenizer["tokens"] if tokenizer else None
    for weight in weights:
        name, shape = weight.name, weight.shape
        if name not in model.outside or not name.startswith(parent(model.stack)):
            continue
        if not INPUT_EMBEDDINGS.search(name) or shape is None or len(shape) != 2:
            continue
        if vocabulary and shape[0] != vocabulary and not (more and shape[0] > vocabulary):
            yield f"{name} has {shape[0]} rows, the configuration says {vocabulary} tokens"
        if width and shape[1] != width:
            yield f"{name} has {shape[1]} columns, the configuration says {width}"
        if tokens and tokens > shape[0]:
            yield f"the tokenizer has {tokens} tokens, {name} only {shape[0]} rows"


def _sizes(model: Model, weights: Sequence[Weight]) -> Iterator[str]:
    """Shapes where every family means the same by its numbers; the last norm is as wide as the first."""
    hidden, inner = model.number("hidden_size"), model.number("intermediate_size")
    named = [pair for block in model.blocks.values() for pair in block.items()]
    last = f"{parent(model.stack)}norm.weight"
    named += [("input_layernorm.weight", weight) for weight in weights if weight.name == last]
    for local, weight in named:
        shape = weight.shape
        if shape is None:
            continue
        matrix = len(shape) == 2
        odd = NORM.match(local) and shape != (hidden,) or local == QUERIES and matrix and shape[1] != hidden
        if hidden and odd:
            yield f"{weight.name} is {list(shape)}, but hidden_size is {hidden}"
        if inner and MLP.match(local) and matrix and not {inner, 2 * inner} & {*shape}:
            yield f"{weight.name} is {list(shape)}, but intermediate_size is {inner}"


def _experts(model: Model) -> Iterator[str]:
    """As many experts as the configuration says in every layer that has some one by one."""
    told = {number for key in EXPERTS if (number := model.number(key))}
    found: dict[int, set[int]] = {}
    for block, locals_ in model.blocks.items():
        for local in locals_:
            if match := EXPERT.match(local):
                found.setdefault(block, set()).add(int(match[2]))
    odd = {block: len(experts) for block, experts in found.items() if told and len(experts) not in told}
    if odd:
        block, number = min(odd.items())
        yield f"block {block} has {number} experts, the configuration says {min(told)}"


def _heads(model: Model) -> Iterator[str]:
    """Rows of keys and values are `num_key_value_heads * head_dim`, where all blocks and heads are alike.

    head_dim's default depends on the family, and gates double the rows of queries, so either the rows of
    queries over their heads or the configuration's head_dim may justify what is stored.
    """
    own = {key for key in model.config if "num_key_value_heads" in key or "head_dim" in key}
    kv_heads, heads = model.number("num_key_value_heads"), model.number("num_attention_heads")
    if own - {"num_key_value_heads", "head_dim"} or not kv_heads or not heads:
        return
    told, hidden = model.number("head_dim"), model.number("hidden_size")
    of_outputs = {columns for _, columns in model.matrices(OUTPUTS)}
    if told and len(of_outputs) == 1 and of_outputs != {heads * told}:
        yield f"o_proj has {of_outputs.pop()} columns, but the configuration says {heads} heads of {told}"
        return
    for block in model.blocks.values():
        pair = [block[local].shape for local in (QUERIES, OUTPUTS) if local in block]
        if [len(shape or ()) for shape in pair] == [2, 2] and pair[0][0] not in (pair[1][1], 2 * pair[1][1]):
            yield f"{block[QUERIES].name} has {pair[0][0]} rows, o_proj {pair[1][1]} columns"
    of_queries = {rows for rows, _ in model.matrices(QUERIES)}
    of_keys = {rows for rows, _ in model.matrices(*KEYS_AND_VALUES)}
    if len(of_queries) == len(of_keys) == 1:
        (queries,), (keys,) = of_queries, of_keys
        head_dim = told or (hidden and hidden / heads)
        if keys not in {kv_heads * queries / heads, head_dim and kv_heads * head_dim}:
            yield (
                f"k_proj and v_proj have {keys} rows, but the configuration says {kv_heads} key-value heads "
                f"of {queries / heads:g}"
            )
