"""What scripts share: commands, random models, tables and sections of pages."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "tests/data/demo-llama-6m"
HELDOUT = ROOT / "heldout/heldout.txt"  # text on which nothing was trained or chosen


class Failed(Exception):
    """A command ended with an error; the message is the last line that says why."""


def run(command: list[str], log: Path, threads: int = 1, **environment: str) -> None:
    """Run a command with its output in `log`. Raises Failed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"} | environment
    with log.open("w") as file:  # some tools leave files where they run: next to the log
        done = subprocess.run(command, env=env, cwd=log.parent, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        raise Failed(_reason(log.read_text(errors="replace")) or f"exit code {done.returncode}")


def _reason(output: str) -> str:
    """Return the reason of an error in a log: quantkit's line, or the end of a traceback."""
    lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
    start = r"error: |Error: |[\w.]*(Error|Exception)\b"
    named = [number for number, line in enumerate(lines) if re.match(start, line)]
    return " ".join(lines[named[-1] :] if named else lines[-1:])[:300].replace("|", "\\|")


def run_script(
    python: str, script: Path, request: dict, path: Path, threads: int = 1, pythonpath: str = ""
) -> None:
    """Write `request` to `path` and run `script path` with another environment's python. Raises Failed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(request))
    command = [str(Path(python).absolute()), str(script), str(path)]
    run(command, path.with_suffix(".log"), threads, PYTHONPATH=pythonpath)


def quantkit(*arguments: object) -> str:
    """Run a command of this checkout; return its standard output. Raises CalledProcessError."""
    command = [sys.executable, "-m", "quantkit", *map(str, arguments), "--quiet"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, env=env).stdout


def evaluated(model: str | Path, copies: Iterable[object], text: Path, ctx: int, limit: int | None) -> dict:
    """Return the record of `quantkit eval` of a model and its quantized copies, with KL divergences."""
    more = ["--limit", limit] if limit else []
    asked = ["--text", text, "--ctx", ctx, *more, "--dtype", "float32", "--metrics", "kld,top1", "--json"]
    return json.loads(quantkit("eval", model, *copies, *asked))


def quantkit_logged(arguments: list[str], log: Path) -> None:
    """Run a command of this checkout; its output goes to `log`. Raises Failed."""
    run([sys.executable, "-m", "quantkit", *arguments], log, PYTHONPATH=str(ROOT))


def served(models: list[Path], log: Path, engine: str, python: Path | str, *flags: str) -> dict:
    """Return the record of `quantkit eval --engine` of models, the original first. Raises Failed."""
    command = ["eval", *map(str, models), "--engine", engine, "--python", str(python), "--json", "-q", *flags]
    quantkit_logged(command, log)
    printed = log.read_text()
    return json.loads(printed[printed.index("{") :])


def verified(model: Path, log: Path, engine: str, python: Path | str, *flags: str) -> dict:
    """Return what `quantkit verify --engine` finds of an engine; the log of an earlier run counts.
    Raises Failed if the engine does not run the model."""
    command = ["verify", str(model), "--engine", engine, "--python", str(python), "--json", "-q", *flags]
    if not log.exists() or "{" not in log.read_text():
        try:
            quantkit_logged(command, log)
        except Failed:  # also where the engine computes something else
            if "{" not in log.read_text():
                raise
    printed = log.read_text()
    record = json.JSONDecoder().raw_decode(printed[printed.index("{") :])[0]
    if not record.get("engine"):
        raise Failed(record["error"]["message"])
    return record["engine"]


def table(header: list[str], rows: list[list[str]], left: int | None = None) -> str:
    """Return Markdown. Columns after the first `left` are aligned as numbers; by default none is."""
    left = len(header) if left is None else left
    marks = ["---"] * left + ["---:"] * (len(header) - left)
    return "".join(f"| {' | '.join(row)} |\n" for row in [header, marks, *rows])


def write_section(name: str, text: str, document: Path) -> None:
    """Print a section and put it between its markers in a document, which must have them."""
    print(text, flush=True)
    content = document.read_text()
    markers = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    assert markers.search(content), f"{document} has no markers for {name}"
    document.write_text(markers.sub(lambda match: match[1] + text + match[2], content))


def versions(results: dict) -> str:
    """Return the versions of all packages that the results were computed with."""
    packages: dict[str, set[str]] = {}
    for result in results.values():
        for package, version in result.get("versions", {}).items():
            packages.setdefault(package, set()).add(version)
    return ", ".join(f"{name} {' and '.join(sorted(packages[name]))}" for name in sorted(packages))


def random_model(
    folder: Path, hidden: int, inner: int, layers: int, heads: int, key_values: int = 0, experts: int = 0,
    context: int = 8192, vocabulary: int = 4096, dtype: str = "bfloat16", spread: bool = False,
    active: int = 2, device: str = "cpu", tied: bool = True,
) -> int:  # fmt: skip
    """Write a random Llama, with `experts` a Qwen3-MoE, a block in memory at a time, and the demo model's
    tokenizer; return the bytes of its weights.

    spread: norms of unlike weights, a few of them large, so that inputs differ as a trained model's do.
    active: experts of a token. device: makes the numbers. tied: the head is the embedding.
    """
    import torch
    from safetensors.torch import save_file

    key_values, width = key_values or heads, 64 if experts else hidden // heads
    block = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    rows = (("q", heads), ("k", key_values), ("v", key_values))
    block |= {f"self_attn.{name}_proj": (count * width, hidden) for name, count in rows}
    block["self_attn.o_proj"] = (hidden, heads * width)
    if experts:
        block |= {"self_attn.q_norm": (width,), "self_attn.k_norm": (width,), "mlp.gate": (experts, hidden)}
    for owner in [f"mlp.experts.{expert}" for expert in range(experts)] or ["mlp"]:
        block |= {f"{owner}.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        block[f"{owner}.down_proj"] = (hidden, inner)
    head = {} if tied else {"lm_head": (vocabulary, hidden)}
    parts = [{"model.embed_tokens": (vocabulary, hidden)}, {"model.norm": (hidden,), **head}]
    parts[1:1] = [{f"model.layers.{k}.{name}": shape for name, shape in block.items()} for k in range(layers)]
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": key_values, "head_dim": width, "vocab_size": vocabulary,
        "max_position_embeddings": context, "tie_word_embeddings": tied, "dtype": dtype,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 0,
    }  # fmt: skip
    if experts:
        config |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
        config |= {"num_experts": experts, "num_experts_per_tok": active, "moe_intermediate_size": inner}
        config["norm_topk_prob"] = True
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        places = {}
        for number, shapes in enumerate(parts):
            file, made = f"model-{number:05d}.safetensors", {}
            for name, shape in shapes.items():
                weight = torch.ones(shape)
                if len(shape) > 1:
                    weight = torch.randn(shape, device=device) * 0.02
                elif spread and name.endswith("layernorm"):
                    weight = torch.rand(shape) * 2 + 0.1
                    weight[::97] *= 8
                made[f"{name}.weight"] = weight.to(getattr(torch, dtype)).cpu()
            save_file(made, folder / file, {"format": "pt"})
            places |= dict.fromkeys(made, file)
        (folder / "config.json").write_text(json.dumps(config))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO / name, folder / name)
        metadata = {"total_size": sum(file.stat().st_size for file in folder.glob("*.safetensors"))}
        index.write_text(json.dumps({"metadata": metadata, "weight_map": places}))  # transformers reads both
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def outlier_twin(model: Path, folder: Path, channels: int = 3, factor: int = 32) -> Path:
    """Write a twin of a Llama-like checkpoint of one file, unless it is there: it computes the same, with a
    few channels that are very large.

    The weights of a few channels of every block's norms are multiplied by `factor`, and the columns of the
    linears that read them divided by it (a power of two: nothing is rounded). Large models grow such channels
    by themselves (Dettmers et al. 2022, section 4); this makes a small one that has them.
    """
    if folder.exists():
        return folder
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("layernorm.weight")]:
        block, _, norm = name.removesuffix(".weight").rpartition(".")
        if norm in READERS:
            chosen = torch.randperm(len(tensors[name]), generator=generator)[:channels]
            tensors[name][chosen] *= factor
            for linear in READERS[norm]:
                tensors[f"{block}.{linear}.weight"][:, chosen] /= factor
    save_file(tensors, path, metadata={"format": "pt"})
    return folder
