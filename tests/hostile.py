"""Valid small files of every kind that quantkit reads from strangers, and changes to them that know their
structure. One number makes one input: `TARGETS[kind].run(samples, place, number)` reads it, and nothing but
QuantkitError may come out. `tests/test_fuzz.py` tries a few, `scripts/reliability.py fuzz` as many as there
is time for. Most have `deep=False`: the input is parsed, but not printed or computed with.
"""

import copy
import json
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import families

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
SHAPE |= {"num_key_value_heads": 1, "head_dim": 32}
JOBS = {  # name of a sample -> the command that makes it of `plain`
    "gptq": "gptq plain --solver rtn --group-size 32",
    "awq": "awq plain --samples 2 --seqlen 16 --group-size 32 --calibration text.txt",
    "nf4": "nf4 plain",
    "int8": "int8 plain",
    "compressed": "gptq plain --solver rtn --group-size 32 --layout compressed-tensors",
    "fp8": "fp8 plain --solver rtn",
    "file.gguf": "gguf plain -t Q8_0 --solver rtn",
    "imatrix.gguf": "imatrix plain --samples 2 --seqlen 16 --calibration text.txt",
}
FOLDERS = ("gptq", "awq", "nf4", "int8", "compressed", "fp8")


def prepare(place: Path, quantkit: Callable[..., int]) -> Path:
    """Write the samples. quantkit: runs a command in `place`, and returns its exit code."""
    families.save_tokenizer(families.save_model(place / "plain", "llama", **SHAPE), bos=True)
    (place / "text.txt").write_text("\n".join(families.sentences()))
    for name, command in JOBS.items():
        assert quantkit(*command.split(), "-o", name, "-q") == 0, name
    command = "eval plain nf4 --text text.txt --ctx 32 --limit 128 --json -q"
    assert quantkit(*command.split()) == 0
    return place


# ---- values that no one expects

ODD = [
    None, True, False, 0, -1, 1, 2, 3, 7, 255, 2**31, 2**63, 2**64, 10**30, -(2**40), 1e308, 0.5, -0.0,
    "", "x", "²", "٣", "\ud800", "\u202e", "[/red]", "\x1b[2J", "\0", "../../x", "/proc/self/mem",
    "/dev/zero", "9" * 5000, "a" * 70_000, "null", "1.5", "(.*)*x", "org/kernel", [], {}, [[]], [0], [None],
    ["x"], [-1], [2**40], {"": None}, {"x": {}}, float("nan"), float("inf"),
]  # fmt: skip


def odd(source: random.Random) -> Any:
    """Any of them, now and then deep."""
    value = copy.deepcopy(source.choice(ODD))
    if source.random() < 0.03:
        for _ in range(source.choice((10, 100))):
            value = [value] if source.random() < 0.9 else {"a": value}
    return value


def nodes(tree: Any, limit: int = 3000) -> list[tuple[Any, Any]]:
    """Places in a JSON value: (container, key)."""
    found, left = [], [tree]
    while left and len(found) < limit:
        node = left.pop()
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        for key in keys[:200]:
            found.append((node, key))
            if isinstance(node[key], (dict, list)):
                left.append(node[key])
    return found


def change(tree: Any, source: random.Random, top: str | None = None) -> Any:
    """One to three changes to a JSON value, in place where it can be. top: the part to be changed mostly."""
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        part = tree[top] if top and isinstance(tree.get(top), (dict, list)) and tree[top] else tree
        places = nodes(part if source.random() < 0.9 else tree)
        if not places or source.random() < 0.01:
            return odd(source)
        node, key = source.choice(places[:40] if source.random() < 0.5 else places)
        kind = source.random()
        if kind < 0.55:
            node[key] = odd(source)
        elif kind < 0.65:
            node[key] = nudged(node[key], source)
        elif kind < 0.75:
            del node[key]
        elif kind < 0.85:
            other, its = source.choice(places)
            if (isinstance(other, dict) and its in other) or (isinstance(other, list) and its < len(other)):
                node[key] = copy.deepcopy(other[its])
        elif isinstance(node, dict):
            name = odd(source)
            node[name if isinstance(name, str) else f"{key}{name}"[:100_000]] = node.pop(key)
        else:
            node.insert(key, odd(source))
    return tree


def nudged(value: Any, source: random.Random) -> Any:
    """A value not far from what was there."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return source.choice((value + 1, value - 1, -value, value * 2, value // 2, str(value), value * 10**9))
    if isinstance(value, str):
        return source.choice((value[:-1], value + "0", value.upper(), value * 3, [value], f" {value}"))
    if isinstance(value, list):
        return source.choice((value * 2, value[:-1], value[::-1], dict.fromkeys(map(str, value), 0)))
    return source.choice(([value], {}, None))


def written(tree: Any) -> bytes:
    """As JSON, with Python's own NaN and lone surrogates where they are."""
    try:
        return json.dumps(tree).encode()
    except (RecursionError, ValueError):
        return b"[" * 3000


def spoilt(data: bytes, source: random.Random, head: int | None = None) -> bytes:
    """One to four changes of bytes, most of them in the first `head`."""
    changed = bytearray(data)
    for _ in range(source.choice((1, 1, 2, 4))):
        if not changed:
            break
        at = source.randrange(
            min(len(changed), head or len(changed)) if source.random() < 0.9 else len(changed)
        )
        kind = source.random()
        if kind < 0.35:
            changed[at] ^= 1 << source.randrange(8)
        elif kind < 0.55:
            changed[at : at + 1] = bytes([source.choice((0, 1, 127, 128, 255, 91, 123, 34))])
        elif kind < 0.75:
            number = source.choice((0, 1, 2**16, 2**31 - 1, 2**32 - 1, 2**40, 2**63, 2**64 - 1))
            changed[at : at + 8] = struct.pack("<Q", number)
        elif kind < 0.85:
            del changed[at : at + source.choice((1, 4, 8, 100))]
        elif kind < 0.95:
            other = source.randrange(len(changed))
            changed[at:at] = changed[other : other + source.choice((1, 8, 64))]
        else:
            del changed[at:]
    return bytes(changed)


def json_file(path: Path, source: random.Random, top: str | None = None) -> None:
    """Change a JSON file, as a rule by its values."""
    data = path.read_bytes()
    if source.random() < 0.1:
        path.write_bytes(spoilt(data, source))
    else:
        path.write_bytes(written(change(json.loads(data), source, top)))


def header(path: Path, source: random.Random) -> None:
    """Change a safetensors file, as a rule by the values of its header; its length follows."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if source.random() < 0.25:
        path.write_bytes(spoilt(data, source, 8 + length))
        return
    text = written(change(json.loads(data[8 : 8 + length]), source))
    told = len(text) if source.random() < 0.9 else source.choice((0, 1, len(text) - 1, 2**40, 2**63))
    path.write_bytes(told.to_bytes(8, "little") + text + data[8 + length :])


# ---- what reads them


def _folder(name: str, samples: Path, place: Path) -> Path:
    return Path(shutil.copytree(samples / name, place / "model"))


def _opened(path: Path, deep: bool) -> None:
    """Everything that looks at a checkpoint and, if it opens, what computes with it first. Not deep: that it
    opens."""
    from quantkit.models.files.open import open_checkpoint

    if not deep:
        open_checkpoint(str(path), offline=True)
        return
    import torch

    from quantkit.inspection import record, show, values
    from quantkit.models.files.headers import open_contents
    from quantkit.models.skeleton import Skeleton

    made = record.describe(open_contents(str(path), offline=True))
    show.print_record(made)
    checkpoint = open_checkpoint(str(path), offline=True)
    skeleton = Skeleton(checkpoint, torch.float32, torch.device("cpu"))
    skeleton.names.check_complete()
    for name in list(checkpoint.packed)[:2]:
        checkpoint.read(f"{name}.weight")
    values.check(checkpoint, made, lambda *told: None)


def _planned(path: Path) -> None:
    from quantkit.capacity import forecast, show, source

    question = forecast.Question(gpu="rtx-3090", samples=8, seqlen=128)
    show.show(forecast.of_source(source.read(str(path), None, True), question), False)


def headers(samples: Path, place: Path, source: random.Random, deep: bool) -> None:
    """safetensors headers."""
    folder = _folder(source.choice(("plain", *FOLDERS)), samples, place)
    header(folder / "model.safetensors", source)
    _opened(folder, deep)


def tensors(samples: Path, place: Path, source: random.Random, deep: bool) -> None:
    """Whole headers, of tensors of other types and shapes than their layout has; zeros or noise."""
    folder = _folder(source.choice(("plain", *FOLDERS)), samples, place)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    stored = json.loads(data[8 : 8 + length])
    changed, body = {}, b""
    names = sorted(stored.keys() - {"__metadata__"})
    chosen = set(source.sample(names, source.choice((1, 1, 2, 5))))
    for name in names:
        entry = stored[name]
        start, end = entry["data_offsets"]
        values = data[8 + length + start : 8 + length + end]
        if name in chosen:
            entry, values = _otherwise(entry, source)
        if name in chosen and source.random() < 0.15:
            continue  # left out
        place_of = [len(body), len(body) + len(values)]
        changed[name] = {"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": place_of}
        body += values
    text = json.dumps(changed).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    _opened(folder, deep)


def _otherwise(entry: dict, source: random.Random) -> tuple[dict, bytes]:
    """Another tensor in the place of one."""
    shape = entry["shape"]
    shapes = ([], [1], [0], shape[::-1], [*shape, 1], shape[1:], [2 * n for n in shape], [1, *shape], [3, 5])
    shape = source.choice((shape, shape, *shapes))
    sizes = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}
    sizes |= dict.fromkeys(("U8", "I8", "BOOL", "F8_E4M3"), 1)
    dtype = source.choice((*sizes, entry["dtype"]))
    size = sizes.get(dtype, 1)
    count = size
    for n in shape:
        count *= n
    return {"dtype": dtype, "shape": shape}, source.choice((bytes(count), source.randbytes(count)))


def index(samples: Path, place: Path, source: random.Random, deep: bool) -> None:
    """Indexes of shards."""
    from quantkit.models.files.safetensors_folder import INDEX, read_folder, read_header

    folder = _folder("plain", samples, place)
    shard = folder / "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(shard)
    mapped = {name: shard.name for name in read_header(shard)}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": mapped}))
    json_file(folder / INDEX, source, "weight_map")
    read_folder(folder)
    _opened(folder, deep)


def config(samples: Path, place: Path, source: random.Random, deep: bool) -> None:
    """config.json."""
    folder = _folder("plain", samples, place)
    json_file(folder / "config.json", source)
    if source.random() < 0.3 and deep:
        _planned(folder)
    else:
        _opened(folder, deep)


def quantization(samples: Path, place: Path, source: random.Random, deep: bool) -> None:
    """quantization_config of config.json."""
    folder = _folder(source.choice(FOLDERS), samples, place)
    json_file(folder / "config.json", source, "quantization_config")
    if source.random() < 0.2 and deep:
        _planned(folder)
    else:
        _opened(folder, deep)


def tokenizer(samples: Path, place: Path, source: random.Random, deep: bool) -> None:
    """tokenizer.json and tokenizer_config.json, read, used, and turned into a GGUF file's metadata."""
    from quantkit.inspection import record
    from quantkit.models.files.headers import open_contents
    from quantkit.models.files.open import open_checkpoint
    from quantkit.models.files.tokenizing import encode
    from quantkit.models.gguf import metadata
    from quantkit.models.gguf.tokenizer_hash import tokenizer_sha256

    folder = _folder("plain", samples, place)
    name = source.choice(
        ("tokenizer.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    )
    json_file(folder / name, source)
    if source.random() < 0.3:
        record.describe(open_contents(str(folder), offline=True))
    checkpoint = open_checkpoint(str(folder), offline=True)
    encode(checkpoint.tokenizer, "Ba da.\n" * 20)
    if source.random() < 0.3:
        tokenizer_sha256(checkpoint.tokenizer, 512)
    if source.random() < 0.3:
        metadata.tokenizer(checkpoint, 512, None, lambda said: None)


def gguf(samples: Path, place: Path, source: random.Random, deep: bool) -> None:
    """GGUF models."""
    data = (samples / "file.gguf").read_bytes()
    path = place / "model.gguf"
    path.write_bytes(spoilt(data, source, source.choice((64, 2000, 16_000))))
    _opened(path, deep)


def imatrix(samples: Path, place: Path, source: random.Random, deep: bool) -> None:
    """Importance matrices, of both kinds."""
    from quantkit.models.gguf import imatrix

    path = place / "imatrix"
    if source.random() < 0.5:
        data = (samples / "imatrix.gguf").read_bytes()
    else:  # name, calls, values, by three; calls and a text at the end
        data = struct.pack("<i", 2)
        for name in (b"blk.0.ffn_up.weight", b"blk.0.ffn_down.weight"):
            data += struct.pack("<i", len(name)) + name + struct.pack("<ii4f", 1, 4, 1, 2, 3, 4)
        data += struct.pack("<ii", 1, 4) + b"text"
    path.write_bytes(spoilt(data, source, 600))
    imatrix.read(path).values()


RECIPE = """method: gptq
description: "four bits"
model: plain
quant:
  bits: 4
  group_size: 32
  sym: true
calibration:
  samples: 8
  seqlen: 64
run:
  exclude: [lm_head, "o_proj$"]
  override: ["down_proj:bits=8"]
"""
SCALARS = (
    "2001-99-99",
    "!!int x",
    "!!float x",
    "!!binary =",
    "!!python/object/apply:os.system [x]",
    "*a",
    "&a [*a]",
    "<<: *a",
    "0o9",
    "1e999",
    ".nan",
    "? [a]",
    "{a: 1, a: 2}",
    "!!set {a}",
    "!!timestamp x",
    "|",
    ">-",
    "---",
    "[" * 3000,
    "{a: " * 2000,
    "2001-01-01T25:61:61Z",
    "!!omap [a]",
    "!!pairs [a]",
    "0x",
    "1:99:99",
    "\ufeff",
)


def recipe(samples: Path, place: Path, source: random.Random, deep: bool) -> None:
    """Recipes."""
    from quantkit.quantize.prepare import recipe

    lines = RECIPE.splitlines()
    for _ in range(source.choice((1, 1, 2, 3))):
        at = source.randrange(len(lines))
        key = lines[at].partition(":")[0]
        value = source.choice(SCALARS) if source.random() < 0.5 else written(odd(source)).decode()
        lines[at] = f"{key}: {value}" if source.random() < 0.8 else value
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    (place / "recipe.yaml").write_bytes(spoilt(text, source) if source.random() < 0.3 else text)
    loaded = recipe.load(str(place / "recipe.yaml"))
    recipe.merge(loaded, (), {"model": "plain"})


def calibration(samples: Path, place: Path, source: random.Random, deep: bool) -> None:
    """Calibration files: text, JSON lines, parquet."""
    import pyarrow
    from pyarrow import parquet

    from quantkit.models.files.open import open_checkpoint
    from quantkit.options import CalibrationOptions
    from quantkit.text import calibration

    kind = source.choice(("txt", "jsonl", "parquet"))
    path = place / f"text.{kind}"
    talk = [{"role": "user", "content": "Ba"}, {"role": "assistant", "content": "da"}]
    rows = [
        {"text": "Ba da. " * 30},
        {"messages": talk},
        {"conversations": [{"from": "human", "value": "x"}]},
    ]
    if kind == "jsonl":
        changed = [change(copy.deepcopy(row), source) if source.random() < 0.5 else row for row in rows]
        path.write_bytes(b"\n".join(map(written, changed)))
    elif kind == "parquet":
        column = source.choice(
            ([["a" * 300] * 3], [[talk, talk, []]], [[None, "x", "²"]], [[1, 2, 3]], [[b"x"] * 3])
        )
        table = pyarrow.table(column, [source.choice(("text", "messages", "²"))])
        parquet.write_table(table, path)
        path.write_bytes(spoilt(path.read_bytes(), source))
    else:
        path.write_bytes(spoilt("\n".join(families.sentences(20)).encode(), source))
    checkpoint = open_checkpoint(str(samples / "plain"), offline=True)
    calibration.load(checkpoint, CalibrationOptions(str(path), samples=2, seqlen=8), offline=True)


PIECES = (
    "{{ messages }}",
    "{{ m.content }}",
    "{% for m in messages %}",
    "{% endfor %}",
    "{{ 1/0 }}",
    "{{ x.y.z }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ raise_exception('no') }}",
    "{{ range(10**9)|list }}",
    "{{ 'a'*10**9 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ messages[0].content|tojson }}",
    "{% generation %}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{{ strftime_now('%Y') }}",
    "{{ \ud800 }}",
    "{{",
    "%}",
    "{{ 'x'|wordwrap(0) }}",
    "{{ '%s'|format }}",
    "{{ messages|map('x')|list }}",
    "{% set ns = namespace() %}",
    "{{ ns.x }}",
    "{{ cycler()|join }}",
    "{{ lipsum(n=9) }}",
    "{{ 2**99999 }}",
    "{{ bos_token }}",
    "\x00",
)


def template(samples: Path, place: Path, source: random.Random, deep: bool) -> None:
    """Chat templates."""
    from quantkit.models.files.open import open_checkpoint
    from quantkit.text.chat import ChatTemplate, Conversation

    if source.random() < 0.5:
        text = "".join(source.choice(PIECES) for _ in range(source.randint(1, 5)))
    else:
        text = spoilt(b"{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", source).decode(
            "utf-8", "surrogateescape"
        )
    tokenizer = open_checkpoint(str(samples / "plain"), offline=True).tokenizer
    ChatTemplate(tokenizer, text).render(Conversation([{"role": "user", "content": "Ba"}], "row 1"), True)


def result(samples: Path, place: Path, source: random.Random, deep: bool) -> None:
    """Result JSON, and the page and table of it."""
    from quantkit.evaluation.comparison import table
    from quantkit.evaluation.comparison.record import merge, read

    path = Path(shutil.copy(samples / "result.json", place / "result.json"))
    json_file(path, source, "models" if source.random() < 0.7 else None)
    made = merge([read(path)])
    table.markdown(made)
    if deep:
        table.report(made).page()


def manifest(samples: Path, place: Path, source: random.Random, deep: bool) -> None:
    """quantkit.json."""
    folder = _folder("gptq", samples, place)
    json_file(folder / "quantkit.json", source)
    _opened(folder, deep)


@dataclass(frozen=True)
class Target:
    """What reads one kind of input. often: how many of a hundred inputs of all kinds are of this."""

    read: Callable[[Path, Path, random.Random, bool], None]
    often: int

    def run(self, samples: Path, place: Path, number: int, deep: bool = True) -> None:
        """Make input `number` in the empty folder `place`, and read it. Raises what reading it raises."""
        self.read(samples, place, random.Random(f"{self.read.__name__} {number}"), deep)


TARGETS = {
    read.__name__: Target(read, often)
    for read, often in [
        (headers, 8), (tensors, 8), (index, 6), (config, 14), (quantization, 12), (tokenizer, 12), (gguf, 10),
        (imatrix, 6), (recipe, 6), (calibration, 6), (template, 4), (result, 5), (manifest, 5),
    ]
}  # fmt: skip
