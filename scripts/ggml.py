"""Compare quantkit with llama.cpp's own code, and record what llama.cpp does for the tests.

    python scripts/ggml.py mixtures LIBRARIES [--write tests/data/gguf_mixtures.json]
    python scripts/ggml.py like LIBRARIES
    python scripts/ggml.py digests [--write]
    python scripts/ggml.py speed [--types Q4_K ...]

mixtures: the ggml types that llama-quantize chooses. LIBRARIES is the folder of a prebuilt llama.cpp that
    exports `llama_model_quantize`, such as `bins/linux-x64` of the npm package `@node-llama-cpp/linux-x64`
    (`npm pack` fetches it). Tiny models of many shapes go through `llama_model_quantize` as every file type,
    with and without an importance matrix and with its options; every tensor's type in the file it writes must
    be the one that `quantkit.models.gguf.mixtures` chooses.
like: writes tests/data/llama_quantize.gguf, a file of zeros that llama-quantize made with `--tensor-type`.
digests: the bytes that ggml's own encoder makes of the weights of tests/test_iquants.py. ggml takes up to a
    minute for the tables of some types, so the tests compare with what this wrote. Needs the xllamacpp
    package.
speed: millions of weights per second that ggml's own encoder takes on one thread, and quantkit's search as a
    ratio to ggml's rate, the best of three turns. Needs the xllamacpp package.
"""

from __future__ import annotations

import argparse
import ctypes as c
import itertools
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np

from quantkit.models.gguf import mixtures
from quantkit.models.gguf.file_types import FILE_TYPES, Model, number

os.environ.setdefault("GGML_NO_BACKTRACE", "1")
FLOATS = c.POINTER(c.c_float)
LOG = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
VERSION = "v0.5.0"  # whose structures are written down here
MAX_BUFFER_BYTES = 8 << 30  # the default of a field near the end: says whether the fields are where we think


class ImatrixEntry(c.Structure):
    _fields_ = [("name", c.c_char_p), ("data", FLOATS), ("size", c.c_size_t)]


class TensorOverride(c.Structure):
    _fields_ = [("pattern", c.c_char_p), ("type", c.c_int)]


class Parameters(c.Structure):
    """`llama_model_quantize_params` of llama.cpp `VERSION`."""

    _fields_ = [
        ("threads", c.c_int32),
        ("file_type", c.c_int),
        ("output_tensor_type", c.c_int),
        ("token_embedding_type", c.c_int),
        ("allow_requantize", c.c_bool),
        ("quantize_output_tensor", c.c_bool),
        ("only_copy", c.c_bool),
        ("pure", c.c_bool),
        ("keep_split", c.c_bool),
        ("dry_run", c.c_bool),
        ("imatrix", c.POINTER(ImatrixEntry)),
        ("kv_overrides", c.c_void_p),
        ("tensor_overrides", c.POINTER(TensorOverride)),
        ("prune_layers", c.c_void_p),
        ("max_buffer_bytes", c.c_size_t),
    ]


class Library:
    """`folder` holds `libggml-base.so`, `libggml.*.so` and `libllama.*.so`."""

    def __init__(self, folder: Path):
        for pattern in ("libggml-base.so", "libggml.*so", "libllama.*so"):
            (path,) = folder.glob(pattern)
            self.llama = c.CDLL(str(path), mode=c.RTLD_GLOBAL)
        self.log: list[str] = []
        self._listener = LOG(lambda level, text, data: self.log.append(text.decode(errors="replace")))
        self.llama.llama_log_set(self._listener, None)
        self.llama.llama_model_quantize_default_params.restype = Parameters
        self.llama.llama_model_quantize.argtypes = [c.c_char_p, c.c_char_p, c.POINTER(Parameters)]
        self.llama.llama_model_quantize.restype = c.c_uint32

    def quantize(
        self, source: Path, target: Path, file_type: int, imatrix: Mapping[str, np.ndarray] = {},
        tensor_type: Sequence[str] = (), output_tensor_type: str | None = None,
        token_embedding_type: str | None = None, pure: bool = False,
    ) -> bool:  # fmt: skip
        """Quantize a GGUF file with one thread, as the tool with these options; whether it did.

        `log` says why not.
        """
        self.log.clear()
        parameters = self.llama.llama_model_quantize_default_params()
        if parameters.max_buffer_bytes != MAX_BUFFER_BYTES or not parameters.quantize_output_tensor:
            raise SystemExit(
                f"llama_model_quantize_params of this llama.cpp has other fields than {VERSION}'s"
            )
        parameters.threads, parameters.file_type, parameters.pure = 1, file_type, pure
        if output_tensor_type:
            parameters.output_tensor_type = _number(output_tensor_type)
        if token_embedding_type:
            parameters.token_embedding_type = _number(token_embedding_type)
        kept = {name: np.ascontiguousarray(values, np.float32) for name, values in imatrix.items()}
        if imatrix:
            entries = [
                ImatrixEntry(name.encode(), values.ctypes.data_as(FLOATS), values.size)
                for name, values in kept.items()
            ]
            parameters.imatrix = (ImatrixEntry * (len(entries) + 1))(*entries)
        if tensor_type:
            wishes = [text.rpartition("=") for text in tensor_type]
            rows = [TensorOverride(pattern.encode(), _number(type)) for pattern, _, type in wishes]
            parameters.tensor_overrides = (TensorOverride * (len(rows) + 1))(*rows)
        done = self.llama.llama_model_quantize(str(source).encode(), str(target).encode(), parameters)
        return done == 0


def _number(type: str) -> int:
    return gguf.GGMLQuantizationType[type.upper()].value


LIKE = Path(__file__).parents[1] / "tests" / "data" / "llama_quantize.gguf"

# mixtures


def _named(names: str, shape: list[int]) -> dict[str, list[int]]:
    return {f"{name}.weight": shape for name in names.split()}


LLAMA = _named("attn_q attn_k attn_v attn_output ffn_gate ffn_up", [2, 256]) | _named("ffn_down", [2, 512])
FUSED = _named("attn_qkv attn_output ffn_up", [2, 256]) | _named("ffn_down", [2, 512])
VECTORS = {"attn_norm.weight": [256], "attn_q_norm.weight": [2, 256]}
VECTORS |= {"ffn_up.bias": [512], "ffn_down.bias": [2, 256]}
TIED = _named("token_embd", [2, 256])
UNTIED = TIED | _named("output", [2, 256])
EXPERTS = {name: shape for name, shape in LLAMA.items() if not name.startswith("ffn")}
EXPERTS |= _named("ffn_gate_inp", [8, 256]) | _named("ffn_gate_exps ffn_up_exps ffn_down_exps", [8, 2, 256])


def _wide(tensors: dict, columns: int) -> dict:
    """The same with other columns: `ffn_down` keeps twice as many."""
    return {
        name: [*shape[:-1], shape[-1] * columns // 256] if len(shape) > 1 else shape
        for name, shape in tensors.items()
    }


def _model(model: Model, head: dict, block: dict) -> dict:
    return {"model": list(model), "globals": head, "block": block}


SHAPES = {
    "llama of 2": _model(Model("llama", 2, 4, 4), UNTIED | {"rope_freqs.weight": [32]}, VECTORS | LLAMA),
    "llama of 3, tied": _model(Model("llama", 3, 4, 4), TIED, LLAMA),
    "llama of 8, four heads share": _model(Model("llama", 8, 4, 1), TIED, LLAMA),
    "llama of 17": _model(Model("llama", 17, 4, 2), UNTIED, LLAMA),
    "llama of 32": _model(Model("llama", 32, 8, 2), UNTIED, LLAMA),
    "llama of 40": _model(Model("llama", 40, 4, 4), TIED, LLAMA),
    "llama of 80, eight heads share": _model(Model("llama", 80, 8, 1), UNTIED, LLAMA),
    "llama of 80, two heads share": _model(Model("llama", 80, 4, 2), UNTIED, LLAMA),
    "llama of 8, 8 experts": _model(Model("llama", 8, 4, 1, 8), UNTIED, EXPERTS),
    "llama of 9, 4 experts": _model(Model("llama", 9, 4, 2, 4), UNTIED, EXPERTS),
    "llama of 16, an FFN matrix per expert": _model(
        Model("llama", 16, 4, 4, 2),
        UNTIED,
        {n: s for n, s in LLAMA.items() if "ffn" not in n}
        | {f"ffn_down.{k}.weight": [2, 256] for k in range(2)},
    ),
    "falcon of 32": _model(Model("falcon", 32, 4, 1), UNTIED, FUSED),
    "falcon of 9, tied": _model(Model("falcon", 9, 4, 4), TIED, FUSED),
    "gpt2 of 12": _model(Model("gpt2", 12, 4, 4), TIED | {"position_embd.weight": [4, 256]}, VECTORS | FUSED),
    "phi3 of 32": _model(Model("phi3", 32, 4, 1), UNTIED, FUSED),
    "96 columns": _model(Model("llama", 10, 4, 4), _wide(UNTIED, 96), _wide(LLAMA, 96)),
    "96 columns, tied": _model(Model("llama", 10, 4, 4), _wide(TIED, 96), _wide(LLAMA, 96)),
    "128 columns, 256 on the way down": _model(
        Model("falcon", 10, 4, 1), _wide(TIED, 128), _wide(FUSED, 128)
    ),
    "48 columns in the blocks": _model(Model("llama", 8, 4, 4), UNTIED, _wide(LLAMA, 48)),
    "rows of one": _model(
        Model("llama", 2, 4, 4), UNTIED, LLAMA | {"attn_k.weight": [1, 256], "attn_v.weight": [2, 1, 256]}
    ),
}
ARCHITECTURES = """
    llama qwen2 qwen3 gemma2 gemma3 phi3 gpt2 gptneox bloom falcon starcoder starcoder2 olmo2 granite stablelm
    command-r
""".split()
SHAPES |= {  # what llama.cpp takes for a 70B
    f"{name} of 80, {heads} heads": _model(Model(name, 80, heads, 2), TIED, {"attn_v.weight": [2, 256]})
    for name in ARCHITECTURES
    for heads in (2, 4)
}
WISHES = [  # options of llama-quantize, tried on one model, untied and tied
    {"pure": True},
    {"output_tensor_type": "Q4_0"},
    {"token_embedding_type": "Q5_K"},
    {"output_tensor_type": "F16", "token_embedding_type": "Q8_0"},
    {"tensor_type": [r"blk\.[0-2]\.attn_v=Q8_0", "attn_v=Q3_K", "ffn_(up|gate)=iq4_nl"]},
    {"tensor_type": ["ffn_down=Q4_1"], "pure": True},
    {"tensor_type": [r"blk\.(0|5)\.ffn_down=BF16", "token_embd=Q2_K"], "output_tensor_type": "Q5_1"},
]
WISHED_ON = ("llama of 17", "llama of 40", "96 columns")


def tensors(shape: dict) -> list[tuple[str, list[int]]]:
    """Name and shape of every tensor of a model, in llama-quantize's order."""
    named = sorted(shape["globals"].items())
    for block in range(shape["model"][1]):
        named += [(f"blk.{block}.{name}", size) for name, size in sorted(shape["block"].items())]
    return named


def write(path: Path, shape: dict) -> None:
    """A GGUF file of zeros with all that `llama_model_quantize` asks for."""
    model = Model(*shape["model"])
    writer = gguf.GGUFWriter(path, model.architecture)
    writer.add_block_count(model.blocks)
    writer.add_context_length(64)
    writer.add_embedding_length(64 * model.heads)
    writer.add_feed_forward_length(512)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)
    writer.add_rope_dimension_count(64)
    writer.add_vocab_size(32)
    writer.add_parallel_residual(True)
    writer.add_sliding_window(32)
    writer.add_logit_scale(1.0)
    if model.experts:
        writer.add_expert_count(model.experts)
        writer.add_expert_used_count(2)
    for name, size in tensors(shape):
        writer.add_tensor(name, np.zeros(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def types(path: Path) -> dict[str, str]:
    """Type of every tensor of a GGUF file."""
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def ours(shape: dict, file_type: str, has_imatrix: bool, wishes: dict) -> dict[str, mixtures.Choice]:
    wishes = wishes | {"tensor_type": tuple(wishes.get("tensor_type", ()))}
    choices = mixtures.choose(
        file_type, Model(*shape["model"]), tensors(shape), has_imatrix, mixtures.Wishes(**wishes)
    )
    return {choice.name: choice for choice in choices}


def compact(found: dict[str, str]) -> dict[str, str]:
    """Types by tensor: `*` is the commonest; the others under their names, block by block, runs counted."""
    kinds: dict[str, list[str]] = {}
    for name, type in found.items():
        parts = name.split(".", 2)
        kinds.setdefault(parts[2] if parts[0] == "blk" else name, []).append(type)
    every = list(found.values())
    commonest = max(sorted(set(every)), key=every.count)
    runs = {
        kind: " ".join(
            f"{type}*{count}" if (count := len(list(run))) > 1 else type
            for type, run in itertools.groupby(row)
        )
        for kind, row in kinds.items()
        if set(row) != {commonest}
    }
    return {"*": commonest} | runs


def compare(library: Library, folder: Path) -> tuple[dict, list[str], int]:
    """The answers by model and job, what differs, and how many tensors were compared."""
    answers, differences, compared = {}, [], 0
    source, target = folder / "source.gguf", folder / "target.gguf"
    for title, shape in SHAPES.items():
        write(source, shape)
        wished = WISHES if title in WISHED_ON else []
        file_types = FILE_TYPES if len(shape["block"]) > 1 else ("Q3_K_S", "Q4_K_M", "Q6_K")
        jobs = [(name, imatrix, {}) for name in file_types for imatrix in (False, True)]
        jobs += [(name, False, wishes) for name in ("Q4_K_M", "Q2_K", "Q8_0") for wishes in wished]
        rows = []
        for file_type, imatrix, wishes in jobs:
            data = {name: np.ones(_weighed(size)) for name, size in tensors(shape)} if imatrix else {}
            done = library.quantize(source, target, number(file_type), data, **wishes)
            expected = types(target) if done else None
            chosen = ours(shape, file_type, imatrix, wishes)
            if expected is None:  # it has nothing to stand in for blocks of 32, or for what a user wishes
                reasons = "no tensor type fallback|validation failed|requires an imatrix"
                assert re.search(reasons, library.log[-1]), library.log[-1]
                stands_in = any(choice.first_choice for choice in chosen.values())
                needy = not imatrix and mixtures.without_importance(list(chosen.values()))
                wrong = [] if stands_in or needy else ["refused, but not by us"]
            else:
                assert list(chosen) == list(expected), "llama-quantize's order"
                compared += len(expected)
                wrong = [
                    f"{n} {t}, ours {chosen[n].type}" for n, t in expected.items() if t != chosen[n].type
                ]
            differences += [f"{title}, {file_type}, {imatrix=}, {wishes}: {text}" for text in wrong]
            row = [file_type, imatrix, wishes, expected and compact(expected)]
            if not (imatrix and row[3] == rows[-1][3]):  # the same as without
                rows.append(row)
        answers[title] = shape | {"answers": rows}
    return answers, differences, compared


def _weighed(size: list[int]) -> int:
    """How many columns an importance matrix weighs in a tensor, those of each expert by themselves."""
    return size[-1] * (size[0] if len(size) == 3 else 1)


def _lines(row: dict) -> str:
    """One answer a line."""
    head = ", ".join(f"{json.dumps(key)}: {json.dumps(row[key])}" for key in ("model", "globals", "block"))
    return f'{{{head}, "answers": [\n' + ",\n".join(map(json.dumps, row["answers"])) + "]}"


def of_mixtures(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        answers, differences, compared = compare(Library(args.libraries), Path(folder))
    print(*differences, sep="\n")
    print(f"{compared} tensors compared, {len(differences)} differ")
    if differences:
        raise SystemExit(1)
    if args.write:
        body = ",\n".join(f"{json.dumps(title)}: {_lines(row)}" for title, row in answers.items())
        args.write.write_text("{\n" + body + "\n}\n")


def of_like(args: argparse.Namespace) -> None:
    block = _named("attn_q attn_output ffn_gate ffn_up ffn_down", [256, 256])
    block |= _named("attn_k attn_v", [128, 256]) | {"attn_norm.weight": [256], "ffn_norm.weight": [256]}
    head = {"token_embd.weight": [512, 256], "output_norm.weight": [256]}
    wishes = [r"blk\.1\.ffn_down=Q6_K", "attn_v=Q5_K", "ffn_up=Q3_K", "attn_k=IQ4_XS", r"0\.attn_q=BF16"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source.gguf"
        write(source, _model(Model("llama", 2, 4, 2), head, block))
        wished = {"tensor_type": wishes, "token_embedding_type": "Q5_1"}
        assert Library(args.libraries).quantize(source, LIKE, number("Q4_K_M"), **wished)
    print(json.dumps(compact(types(LIKE))))


def of_digests(args: argparse.Namespace) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import ggml_library
    from test_iquants import CASES, DIGESTS, costs, digest, rows, whole_sub_blocks

    from quantkit.layouts.ggml.blocks import encode_rows

    found, differing = {}, []
    for name, kind in CASES:
        weight = whole_sub_blocks(rows()) if name == "IQ3_S" else rows()
        wanted = ggml_library.encode(name, weight, costs(kind))
        found[f"{name} {kind}"] = digest(wanted)
        if digest(encode_rows(name, weight, costs(kind))) != digest(wanted):
            differing.append(f"{name} {kind}")
    print(f"{len(found)} compared, {len(differing)} differ:", *differing)
    if args.write:
        DIGESTS.write_text(json.dumps(found, indent=1) + "\n")
    raise SystemExit(bool(differing))


def of_speed(args: argparse.Namespace) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import ggml_library
    import torch
    from common import table

    from quantkit.layouts.ggml.blocks import encode_rows
    from quantkit.models.machine.memory import keep_freed_pages

    keep_freed_pages()  # as a job that needs no calibration does
    torch.set_num_threads(1)
    generator, rows = torch.Generator().manual_seed(0), []
    weight = torch.randn(args.rows, 4096, generator=generator) * 0.02
    importance = torch.rand(4096, generator=generator) ** 4 + 1e-3
    for name, costs in itertools.product(args.types, (None, importance)):
        least, made = {ggml_library.encode: math.inf, encode_rows: math.inf}, {}
        for _ in range(4):  # the first turn fills caches; turns alternate, so a busy minute meets both
            for encode in least:
                start = time.perf_counter()
                made[encode] = encode(name, weight, costs)
                least[encode] = min(least[encode], time.perf_counter() - start)
        ggml, ours = least.values()
        row = [name, "no" if costs is None else "yes", f"{weight.numel() / ggml / 1e6:.1f}"]
        rows.append([*row, f"{ggml / ours:.2f}", "yes" if torch.equal(*made.values()) else "NO"])
    print(table(["type", "importance", "ggml, M weights/s", "quantkit / ggml", "bytes equal"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(required=True, metavar="PART")
    part = parts.add_parser("mixtures")
    part.set_defaults(run=of_mixtures)
    part.add_argument("libraries", type=Path)
    part.add_argument("--write", type=Path, help="record the answers here, if all agree")
    part = parts.add_parser("like")
    part.set_defaults(run=of_like)
    part.add_argument("libraries", type=Path)
    part = parts.add_parser("digests")
    part.set_defaults(run=of_digests)
    part.add_argument("--write", action="store_true", help="record the digests where the tests read them")
    part = parts.add_parser("speed")
    part.set_defaults(run=of_speed)
    part.add_argument("--types", nargs="+", default=["Q4_K", "Q6_K", "Q4_0", "Q5_0", "Q8_0"])
    part.add_argument("--rows", type=int, default=1024, help="of 4096 weights")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
