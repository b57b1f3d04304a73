"""Quantized key/value caches as quantkit measures them, against the engines that have them.

    python scripts/kv_cache.py [MODEL] [--text TEXT] [--limit 4096]
    python scripts/kv_cache.py [MODEL] --transformers     (where optimum-quanto and hqq are installed)

The first runs llama.cpp (the xllamacpp wheel) on the F32 file of MODEL, a Llama: KL divergence of a q8_0 and
a q4_0 cache from an f32 one, beside that of `quantkit eval --kv-dtype`. Two more columns add to quantkit what
is no part of the cache: queries rounded to 8 bit, as ggml's attention on a CPU does beside such a cache, and
heads in the order of the file, whose blocks of 32 hold other channels; the last column is the divergence from
llama.cpp that is left then. The second runs transformers' own QuantizedCache token by token.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from client_runs import DEMO, ROOT, table
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, QuantizedCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from quantkit.evaluation import windows as windows_of
from quantkit.evaluation.stream import StreamedModel
from quantkit.evaluation.windows import Windows
from quantkit.grids import kv_cache
from quantkit.models.open import open_checkpoint

sys.path.insert(0, str(ROOT / "tests"))
CPU = torch.device("cpu")
CONTEXT = 256
TYPES = ("q8_0", "q4_0")
BACKENDS = {"int4": ("quanto", 4, 0), "int8": ("hqq", 8, 1)}  # of transformers: backend, bits, axis


def ours(model: str, windows: Windows, kv_dtype: str | None) -> list[Tensor]:
    """Log-probabilities `[ctx, vocabulary]` of every window, as `quantkit eval` streams them."""
    streamed = StreamedModel.open(open_checkpoint(model), torch.float32, CPU, None, kv_dtype)
    states = streamed.states([ids[None] for ids in windows.ids], lambda *_: None)
    return [streamed.log_probs(hidden[0]) for hidden in states]


def divergence(expected: list[Tensor], found: list[Tensor]) -> float:
    """Mean over all tokens, in nats."""
    pairs = zip(expected, found, strict=True)
    return torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in pairs]).mean().item()


@contextmanager
def as_llamacpp(reordered: bool) -> Iterator[None]:
    """Queries are rounded to q8_0. reordered: keys as in a GGUF file, rotary pairs side by side."""
    rounded = kv_cache._ggml

    def order(x: Tensor) -> Tensor:
        return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) if reordered else x

    def back(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if reordered else x

    def keys_and_values(name: str, values: bool, x: Tensor) -> Tensor:
        return rounded(name, True, x) if values else back(rounded(name, False, order(x)))

    def attention(module, query, key, value, *args, **kwargs):
        query = back(rounded("Q8_0", False, order(query)))
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("sdpa", attention)
    try:
        with mock.patch.object(kv_cache, "_ggml", keys_and_values):
            yield
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)


def against_llamacpp(model: str, windows: Windows) -> str:
    """Markdown."""
    from llama_cpp import LOG, Llama

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        command = [sys.executable, "-m", "quantkit", "gguf", model, "-t", "F32", "-o", str(file), "--quiet"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

        def theirs(cache: str) -> list[Tensor]:
            with Llama(file, ctx=CONTEXT, cache=cache) as llama:
                print(*(line.strip() for line in LOG if "n_rot_" in line), sep="\n", file=sys.stderr)
                return [torch.from_numpy(llama.logits(ids.tolist())).log_softmax(-1) for ids in windows.ids]

        base, own = theirs("f32"), ours(model, windows, None)
        for name in TYPES:
            computed = theirs(name)
            cells = [
                f"{divergence(base, computed):.3g}",
                f"{divergence(own, ours(model, windows, name)):.3g}",
            ]
            for reordered in (False, True):
                with as_llamacpp(reordered):
                    found = ours(model, windows, name)
                cells.append(f"{divergence(own, found):.3g}")
            rows.append([name, *cells, f"{divergence(computed, found):.2g}"])
    head = ["", "llama.cpp", "quantkit", "queries rounded", "and the file's order", "from llama.cpp then"]
    return table(head, rows)


def token_by_token(model: str, windows: Windows, kv_dtype: str) -> list[Tensor]:
    """Log-probabilities of transformers with its quantized cache, which begins with one token."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    backend, bits, axis = BACKENDS[kv_dtype]
    found = []
    for ids in windows.ids:
        cache = QuantizedCache(backend, loaded.config, nbits=bits, axis_key=axis, axis_value=axis)
        with torch.no_grad():
            logits = [loaded(token.view(1, 1), past_key_values=cache).logits[0] for token in ids]
        found.append(torch.cat(logits).log_softmax(-1))
    return found


def against_transformers(model: str, windows: Windows) -> str:
    """Markdown."""
    from optimum.quanto.library.extensions.extension import get_extension

    def unpack(packed: Tensor, bits: int) -> Tensor:
        return torch.cat([packed & 15, packed >> 4])

    get_extension("quanto_cpp")._lib = SimpleNamespace(unpack=unpack)  # which it compiles otherwise
    own, rows = ours(model, windows, None), []
    for name in BACKENDS:
        computed, found = token_by_token(model, windows, name), ours(model, windows, name)
        largest = max((p - q).abs().max().item() for p, q in zip(computed, found, strict=True))
        cells = [f"{divergence(own, computed):.4g}", f"{divergence(own, found):.4g}"]
        rows.append([name, *cells, f"{divergence(computed, found):.2g}", f"{largest:.2g}"])
    return table(["", "transformers", "quantkit", "between them", "largest difference"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=str(DEMO))
    parser.add_argument("--text", type=Path, default=ROOT / "tests/data/heldout.txt")
    parser.add_argument("--limit", type=int, default=4096)
    parser.add_argument("--transformers", action="store_true", help="against its QuantizedCache instead")
    args = parser.parse_args()
    torch.set_num_threads(1)
    windows = windows_of.load(open_checkpoint(args.model), args.text, CONTEXT, None, args.limit)
    print((against_transformers if args.transformers else against_llamacpp)(args.model, windows))


if __name__ == "__main__":
    main()
