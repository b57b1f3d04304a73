"""What the tests of all clients share: checkpoints to make, one client process to load them, the comparison.

The tests run where QUANTKIT_CLIENTS_PYTHON names a python with gptqmodel, optimum, compressed-tensors and
transformers. Everything is quantized here, loaded there in one process (load.py), and compared with
quantkit's own decode.
"""

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor

from quantkit.inspection.record import describe
from quantkit.models.files.headers import open_contents
from quantkit.models.files.open import open_checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.quantize import job, loop, methods
from quantkit.quantize.progress import Progress

PYTHON = os.environ.get("QUANTKIT_CLIENTS_PYTHON")
MARKS = [
    pytest.mark.clients,
    pytest.mark.skipif(not PYTHON, reason="QUANTKIT_CLIENTS_PYTHON names no python with the clients"),
]

VOCABULARY = 4096  # the demo model's, whose tokenizer the tiny models borrow
IDS = [0] + [(7 * i * i + 13 * i + 5) % 4000 + 4 for i in range(31)]
PROMPT, NEW_TOKENS = 8, 12
# GPTQModel forms scale * (q - z) in float16, whatever the model computes in: 2^-11 a weight. In float16 the
# activations are rounded as well. bfloat16 is compared with quantkit's own bfloat16 forward, see below.
TOLERANCE = {"float32": 1e-3, "float16": 5e-3}
SHAPE = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "max_position_embeddings": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
}
GROUPED = {**SHAPE, "intermediate_size": 160, "num_key_value_heads": 2}
TINY = {  # name -> configuration, precision
    "gpt2": (hf.GPT2Config(**SHAPE), torch.float32),
    "qwen2": (hf.Qwen2Config(**GROUPED, tie_word_embeddings=False), torch.float16),
    "qwen2 tied": (hf.Qwen2Config(**GROUPED, tie_word_embeddings=True), torch.bfloat16),
    "opt": (hf.OPTConfig(**SHAPE, ffn_dim=160, word_embed_proj_dim=64, pad_token_id=1), torch.float16),
    "mixtral": (hf.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2), torch.float16),
    "qwen3_moe": (
        hf.Qwen3MoeConfig(
            **GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, head_dim=16
        ),
        torch.float16,
    ),
    "gpt_neox": (hf.GPTNeoXConfig(**SHAPE, intermediate_size=160), torch.float16),
}


# What most checkpoints do without: it changes codes, not how they are laid out. The first of each method has
# the defaults.
PLAIN = {"transform": "none", "refine": 0}
QUICK = {
    "gptq": PLAIN,
    "fp4": PLAIN | {"search_scale": False},
    "fp8": PLAIN,
    "w8a8": PLAIN,
    "awq": {"candidates": 3, "search_scale": False},
}


@dataclass(frozen=True)
class Case:
    """One checkpoint and how the client loads it. source: `demo`, or a tiny random model."""

    options: dict = field(default_factory=dict)
    source: str = "demo"
    exclude: tuple[str, ...] = ()
    override: tuple[str, ...] = ()
    max_shard_gb: float = 5.0
    loader: str = "gptq"
    dtype: str = "float32"
    tolerance: float | None = None
    method: str = "gptq"


def save_tiny(folder: Path, source: str, demo_model: Path) -> None:
    """A random model with biases that matter and rows of unlike size, so that a wrong order shows."""
    torch.manual_seed(0)
    config, dtype = TINY[source]
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.08).mul_(torch.exp(0.5 * torch.randn(len(parameter), 1)))
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    model.to(dtype).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / file, folder)


def quantize(case: Case, source: Path, output: Path, **quick: Any) -> None:
    """With `quantkit METHOD`; the case's own options count more."""
    request = job.Request(
        source=str(source),
        method=methods.create(case.method, **quick | case.options),
        calibration=CalibrationOptions(samples=4, seqlen=64),
        run=RunOptions(
            exclude=case.exclude,
            override=case.override,
            threads=1,
            dtype="float32",
            max_shard_gb=case.max_shard_gb,
        ),
        output=output,
    )
    loop.run([job.prepare(request, Progress())], Progress())


def make(cases: dict[str, Case], root: Path, demo_model: Path) -> dict[str, Path]:
    """The folder of each case's checkpoint; cases that differ in the loader only share one."""
    sources = {"demo": demo_model}
    made: dict[str, Path] = {}
    folders, methods_seen = {}, set()
    for name, case in cases.items():
        if case.source not in sources:
            sources[case.source] = root / case.source.replace(" ", "-")
            save_tiny(sources[case.source], case.source, demo_model)
        key = repr((case.method, case.options, case.source, case.exclude, case.override, case.max_shard_gb))
        if key not in made:
            made[key] = root / f"quantized-{len(made)}"
            seen = case.method in methods_seen
            quantize(case, sources[case.source], made[key], **QUICK.get(case.method, {}) if seen else {})
            methods_seen.add(case.method)
        folders[name] = made[key]
    return folders


def selected(module: ModuleType, items: list[pytest.Item]) -> dict[str, Case]:
    """The cases of a module that the selected tests name: as their parameter, or in a mark."""
    names = set()
    for item in items:
        if item.module is module:
            names.update(name for mark in item.iter_markers("cases") for name in mark.args)
            if hasattr(item, "callspec"):
                names.add(item.callspec.params.get("name"))
    return {name: case for name, case in module.CASES.items() if name in names}


CLIENT = {"gptqmodel": "GPTQModel"} | dict.fromkeys(
    ("mlx", "packed"), "mlx-lm"
)  # by loader; all others are ways of transformers
# `inspect` tells how it loads by default, or in its note which other way is meant.
OTHERWISE = {"dequantized": "dequantize=True"}


def inspect_agrees(case: Case, folder: Path, theirs: dict) -> None:
    """What `quantkit inspect` says of this client is what happened."""
    name = CLIENT.get(case.loader, "transformers")
    (row,) = (row for row in describe(open_contents(str(folder)))["clients"] if row["client"] == name)
    asked = OTHERWISE.get(case.loader)
    if row["loads"] is not True and asked and asked in row["note"]:
        row["loads"] = True
    assert row["loads"] == (theirs["error"] is None), (row, theirs["error"])


class Client:
    """load.py in the client's python: it imports everything once, for the cases of several modules."""

    def __enter__(self) -> Self:
        self.log = tempfile.TemporaryFile("w+")
        command = [PYTHON, str(Path(__file__).with_name("load.py"))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
        self.process = subprocess.Popen(command, text=True, **pipes)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()
        self.log.close()

    def answer(self, path: Path) -> None:
        """Return when the results of a JOBS.json lie beside it."""
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        if not self.process.stdout.readline():
            self.log.seek(0)
            raise AssertionError(self.log.read()[-3000:])


def load(cases: dict[str, Case], folders: dict[str, Path], root: Path, client: Client) -> dict[str, dict]:
    """What the client says of each case: logits, greedy tokens, packed linears, or the error."""
    path = root / "jobs.json"
    jobs = [
        {"name": name, "folder": str(folders[name]), "loader": case.loader, "dtype": case.dtype}
        for name, case in cases.items()
    ]
    request = {"ids": IDS, "prompt": PROMPT, "new_tokens": NEW_TOKENS, "jobs": jobs}
    path.write_text(json.dumps(request))
    client.answer(path)
    results = json.loads(path.with_name("results.json").read_text())
    for name, logits in load_file(path.with_name("logits.safetensors")).items():
        results[name]["logits"] = logits
    return results


class Own:
    """quantkit's own decode of a folder, streamed block by block through the skeleton."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32):
        self.skeleton = Skeleton(open_checkpoint(str(folder)), dtype, torch.device("cpu"))
        self.skeleton.load_rest()
        for index in range(len(self.skeleton.blocks)):
            self.skeleton.load_block(index)

    def logits(self, ids: list[int]) -> torch.Tensor:
        hidden = self.skeleton.embed(torch.tensor([ids]))
        for index in range(len(self.skeleton.blocks)):
            hidden = self.skeleton.run_block(index, hidden)
        return self.skeleton.logits(hidden[0]).float()


def linears(folder: Path) -> list[dict]:
    """What the manifest says of each linear."""
    return json.loads((folder / "quantkit.json").read_text())["linears"]


def same_weights(folder: Path, theirs: dict, rounded: Callable[[Tensor], Tensor] = lambda values: values):
    """Of each linear the client decodes quantkit's values, bit for bit. rounded: packed ones, as it does."""
    checkpoint, compared = open_checkpoint(str(folder)), 0
    for linear in linears(folder):
        if ".experts." in linear["name"]:  # which transformers fuses while it loads
            continue
        values = checkpoint.read(f"{linear['name']}.weight")
        values = (rounded(values) if "grid" in linear else values).float()
        own = hashlib.sha256(values.numpy().tobytes()).hexdigest()
        assert theirs["weights"][linear["name"]] == own, linear["name"]
        compared += 1
    assert compared


def compare(case: Case, folder: Path, theirs: dict) -> None:
    """The client's logits and greedy tokens are those of quantkit's own decode."""
    own = Own(folder)
    expected = own.logits(IDS)
    assert theirs["logits"].shape == expected.shape
    error = (theirs["logits"] - expected).norm() / expected.norm()
    if case.dtype == "bfloat16":  # a forward in bfloat16 has an error of its own, about 5e-3 here
        rounded = Own(folder, torch.bfloat16).logits(IDS)
        assert error <= 2 * (rounded - expected).norm() / expected.norm() <= 2e-2
        return
    assert error <= (case.tolerance or TOLERANCE[case.dtype]), f"{error:.2e}"
    tokens = theirs["tokens"]
    assert tokens[:PROMPT] == IDS[:PROMPT] and len(tokens) == PROMPT + NEW_TOKENS
    ours = own.logits(tokens[:-1])[PROMPT - 1 :]
    behind = ours.amax(1) - ours.gather(1, torch.tensor(tokens[PROMPT:])[:, None])[:, 0]
    # the same greedy tokens; only between logits as close as the two forwards may another win
    assert (behind <= 2 * (theirs["logits"] - expected).abs().max()).all()
    assert (behind == 0).sum() >= NEW_TOKENS - 1
