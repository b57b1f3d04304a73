"""In which architectures does llama.cpp multiply matrices with the scales that lie beside NVFP4's blocks?

    python scripts/gguf_scales.py

Needs xllamacpp. A tiny model of every architecture goes into a file twice, in float32: as it is, and with
every matrix that may have a scale divided by powers of two, which lie beside it. Where all are multiplied,
logits are the same to the bit. Matrices with a bias stay as they are: llama.cpp scales behind it. What comes
out is `SCALING` in quantkit/models/gguf/mixtures.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import families
import gguf_files
import test_gguf_architectures as dense
import test_gguf_mixtures_of_experts as sparse
from llama_cpp import Llama

from quantkit.models.files.gguf_writer import Entry, GgufWriter
from quantkit.models.gguf import metadata, tensors
from quantkit.models.gguf.mixtures import SCALES, scale_of
from quantkit.models.open import open_checkpoint
from quantkit.models.skeleton import Skeleton


def export(folder: Path, path: Path, scaled: bool) -> str:
    """Write the file; the name of its architecture."""
    checkpoint = Skeleton(open_checkpoint(str(folder)), torch.float32, torch.device("cpu")).checkpoint
    targets = tensors.of_checkpoint(checkpoint)
    keys = metadata.assemble(checkpoint, targets, "F32", gguf_files.vocabulary(checkpoint.config.vocab_size))
    names = {target.name for target in targets}
    entries, beside = [], {}
    for target in targets:
        entries.append(Entry(target.name, "F32", target.shape))
        if scaled and SCALES.match(target.name) and f"{target.name[:-6]}bias" not in names:
            name, shape = beside[target.name] = scale_of(target.name, "NVFP4", target.shape)
            entries.append(Entry(name, "F32", shape))
    with GgufWriter(path, keys, entries) as writer:
        for target in targets:
            values = target.to_gguf(target.read(checkpoint, torch.float32)).numpy()
            name, shape = beside.get(target.name, ("", (1,)))
            scales = 4.0 * 2.0 ** (np.arange(shape[0], dtype=np.float32) % 3)
            if name:
                values = values / scales.reshape(-1, *[1] * (values.ndim - 1))
            writer.write(target.name, [np.ascontiguousarray(values, np.float32)])
            if name:
                writer.write(name, [scales.astype(np.float32)])
    return str(keys["general.architecture"])


def main() -> None:
    """A line for every tiny model."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    made = {
        name: lambda to, case=case: families.save_model(to, case[0], **case[1])
        for name, case in dense.CASES.items()
    }
    made |= {name: lambda to, case=case: sparse.save(to, *case) for name, case in sparse.CASES.items()}
    ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    for name, make in made.items():
        with tempfile.TemporaryDirectory() as folder:
            model, found = make(Path(folder) / "model"), []
            for scaled in (False, True):
                path = Path(folder) / f"{scaled}.gguf"
                architecture = export(model, path, scaled)
                with Llama(path, 256) as llama:
                    found.append(llama.logits(ids))
        difference = np.abs(found[0] - found[1]).max()
        told = "scales" if difference == 0 else f"leaves scales out: {difference:.1e}"
        print(f"{architecture:12} {name:30} {told}")


if __name__ == "__main__":
    main()
