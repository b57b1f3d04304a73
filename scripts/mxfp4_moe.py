"""gpt-oss in its own MXFP4 through whole commands, its bytes kept; and MXFP4_MOE against llama-quantize.

    python scripts/mxfp4_moe.py LIBRARIES

LIBRARIES is the folder of a prebuilt llama.cpp, as gguf_mixtures.py takes it. A tiny random gpt-oss with
experts in MXFP4, as it is published, is compressed by `quantkit fp4 --format mxfp4` and `quantkit gguf -t
MXFP4_MOE`, both by rounding: experts must have the codes and scales they had. Then llama.cpp's own
`llama_model_quantize` makes MXFP4_MOE of the file in 32 bit, and every tensor must have its type and bytes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import families  # noqa: E402
import llamacpp_library  # noqa: E402
import test_mxfp4  # noqa: E402

from quantkit.models.gguf import file_types  # noqa: E402


def quantkit(*words: object) -> None:
    """Run a command."""
    command = [sys.executable, "-m", "quantkit", *map(str, words), "--threads", "1", "--quiet", "--overwrite"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)


def as_encoders_leave_them(folder: Path) -> dict[str, torch.Tensor]:
    """Groups whose largest value is 4 or 6, and no -0, which ggml and rounding write as 0."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        low, high = (torch.where(part == 8, 0, part) for part in (tensors[name] & 15, tensors[name] >> 4))
        tensors[name] = low | high << 4
        tensors[name][..., 0] |= 6
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


def experts(tensors: dict[str, torch.Tensor], block: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Codes `[experts, out, in]` and scales `[experts, out, in / 32]` by kind; gate and up lie in turn."""
    found = {}
    for kind, name, rows in (
        ("gate", "gate_up_proj", slice(0, None, 2)),
        ("up", "gate_up_proj", slice(1, None, 2)),
        ("down", "down_proj", slice(None)),
    ):
        place = f"model.layers.{block}.mlp.experts.{name}"
        blocks, scales = (tensors[f"{place}_{part}"][:, rows] for part in ("blocks", "scales"))
        found[kind] = torch.stack((blocks & 15, blocks >> 4), -1).flatten(2), scales
    return found


def kept_in_folder(before: dict[str, torch.Tensor], folder: Path) -> int:
    """Experts whose bytes are those they had; raises AssertionError for others."""
    tensors, equal = load_file(folder / "model.safetensors"), 0
    for block in (0, 1):
        for kind, (codes, scales) in experts(before, block).items():
            for number in range(len(codes)):
                (name,) = {key.rpartition(".")[0] for key in tensors
                           if f"layers.{block}." in key and f".{number}.{kind}_proj" in key}  # fmt: skip
                packed = tensors[f"{name}.weight_packed"]
                stored = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
                assert torch.equal(stored, codes[number]), name
                assert torch.equal(tensors[f"{name}.weight_scale"], scales[number]), name
                equal += 1
    return equal


def kept_in_file(before: dict[str, torch.Tensor], path: Path) -> int:
    """The same of a GGUF file."""
    written, equal = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}, 0
    for block in (0, 1):
        for kind, (codes, scales) in experts(before, block).items():
            halves = codes.unflatten(2, (-1, 32))
            wanted = torch.cat((scales[..., None], halves[..., :16] | halves[..., 16:] << 4), -1).flatten(2)
            tensor = written[f"blk.{block}.ffn_{kind}_exps.weight"]
            assert tensor.tensor_type.name == "MXFP4", tensor.tensor_type
            assert np.array_equal(tensor.data.reshape(wanted.shape), wanted.numpy()), tensor.name
            equal += len(codes)
    return equal


def compare(library: llamacpp_library.Library, model: Path, folder: Path) -> str:
    """MXFP4_MOE of llama.cpp and of quantkit, of the same weights."""
    whole, theirs, ours = (folder / f"{name}.gguf" for name in ("f32", "theirs", "ours"))
    allowed = ["--allow-requantize"]
    quantkit("gguf", model, "-t", "F32", "-o", whole, *allowed)
    quantkit("gguf", model, "-t", "MXFP4_MOE", "--solver", "rtn", "-o", ours, *allowed)
    if not library.quantize(whole, theirs, file_types.number("MXFP4_MOE")):
        raise SystemExit("".join(library.log[-3:]))
    found, expected = ({one.name: one for one in gguf.GGUFReader(path).tensors} for path in (ours, theirs))
    assert found.keys() == expected.keys()
    differing = [
        f"{name} ({found[name].tensor_type.name}, theirs {tensor.tensor_type.name})"
        for name, tensor in expected.items()
        if found[name].tensor_type != tensor.tensor_type or not np.array_equal(found[name].data, tensor.data)
    ]
    types = Counter(tensor.tensor_type.name for tensor in expected.values())
    return f"{len(expected)} tensors ({dict(types)}), {len(differing)} differ: {differing[:5]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("libraries", type=Path, metavar="LIBRARIES")
    library = llamacpp_library.Library(parser.parse_args().libraries)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        coded, _ = test_mxfp4.checkpoints(folder)
        before = as_encoders_leave_them(families.save_tokenizer(coded))
        rounded = ["--solver", "rtn", "--allow-requantize"]
        quantkit("fp4", coded, "--format", "mxfp4", "-o", folder / "fp4", *rounded)
        print(
            f"fp4 --format mxfp4: {kept_in_folder(before, folder / 'fp4')} matrices of experts as they were"
        )
        quantkit("gguf", coded, "-t", "MXFP4_MOE", "-o", folder / "moe.gguf", *rounded)
        print(
            f"gguf -t MXFP4_MOE: {kept_in_file(before, folder / 'moe.gguf')} matrices of experts as they were"
        )
        print(f"gpt-oss by llama.cpp and by quantkit: {compare(library, coded, folder)}")
        model = families.save_tokenizer(families.save_model(folder / "mixtral", "mixtral"))
        print(f"Mixtral by llama.cpp and by quantkit: {compare(library, model, folder)}")


if __name__ == "__main__":
    main()
