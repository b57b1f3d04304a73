"""Checkpoints that clients are tried with: models, and `quantkit` commands that compress them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from common import DEMO, ROOT, quantkit_logged

SHAPE = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
# The random models borrow the demo model's tokenizer
SHAPE |= {"vocab_size": 4096, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
STORED = {"demo": DEMO, "smollm2": ROOT / ".models/SmolLM2-135M-Instruct"}  # by scripts/real_models.py
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}


@dataclass(frozen=True)
class Cell:
    """command: `quantkit METHOD` and its flags; empty: the original. source: a name of `make_model`.
    option: of the engine that loads it, empty without one."""

    command: str
    source: str = "demo"
    option: str = ""

    @property
    def label(self) -> str:
        return self.command or "not compressed"

    @property
    def name(self) -> str:
        return f"{self.label}, {self.source}"


def cells(**commands: str) -> list[Cell]:
    """Return cells of models by commands `COMMAND @ OPTION`, separated by lines or `|`; `none`: not
    compressed."""
    return [
        Cell("" if command.strip() == "none" else command.strip(), source, option.strip())
        for source, texts in commands.items()
        for command, _, option in (t.partition("@") for t in texts.strip().replace("\n", "|").split("|"))
    ]


def make_model(source: str, folder: Path) -> Path:
    """Return a model of STORED, or a random one whose rows differ in size, so that a wrong order shows.

    qwen2: biases on q, k and v, tied embeddings. opt: biases everywhere, no Llama.
    llama_bias: biases everywhere, embeddings not tied. mixtral, qwen3_moe, qwen2_moe: 8 experts, 2 a token;
    qwen2_moe with an expert that all tokens share.
    """
    if source in STORED:
        return STORED[source]
    if (folder / "config.json").exists():
        return folder
    import torch
    import transformers

    shapes = {"num_key_value_heads": 2, "intermediate_size": 512, "initializer_range": 0.08}
    config = {
        "qwen2": lambda: transformers.Qwen2Config(tie_word_embeddings=True, **SHAPE, **shapes),
        "llama_bias": lambda: transformers.LlamaConfig(
            attention_bias=True, mlp_bias=True, tie_word_embeddings=False, **SHAPE, **shapes
        ),
        "opt": lambda: transformers.OPTConfig(ffn_dim=512, init_std=0.08, word_embed_proj_dim=256, **SHAPE),
        "mixtral": lambda: transformers.MixtralConfig(**SHAPE, **shapes),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**MIXTURE, head_dim=64, **SHAPE, **shapes),
        "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
            shared_expert_intermediate_size=256, **MIXTURE, **SHAPE, **shapes
        ),
    }[source]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name and "lm_head" not in name:
                parameter.mul_(torch.exp(0.5 * torch.randn(*parameter.shape[:-1], 1)))
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            if name.endswith("mlp.gate.weight"):  # else rounding decides between nearly equal experts
                parameter.mul_(4)
    model.half().save_pretrained(folder)
    path = folder / "config.json"
    names = {"rope_theta": 10000.0, "num_experts": 8}  # mlx-lm wants them, transformers 5 writes others
    path.write_text(json.dumps(names | json.loads(path.read_text())))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / file, folder)
    return folder


def make(cell: Cell, root: Path) -> Path:
    """Return the cell's folder, compressed unless it exists. Raises Failed with quantkit's error."""
    model = make_model(cell.source, root / "models" / cell.source)
    if not cell.command:
        return model
    method, *flags = cell.command.split()
    folder = root / (cell.name.replace(" ", "_").replace(",", "") + ".gguf" * (method == "gguf"))
    if not folder.exists():
        shared = ["--samples", "8", "--seqlen", "128", "--threads", "1", "--overwrite", "--quiet"]
        arguments = [method, str(model), "-o", str(folder), *flags, *shared]
        quantkit_logged(arguments, folder.with_suffix(".log"))
    return folder
