"""quantkit and other clients on a CPU: checkpoints of either read by the other, and served.

    scripts/clients-setup.sh vllm && python scripts/clients.py [vllm] [vllm-experts] [vllm-formats]
    scripts/clients-setup.sh legacy && python scripts/clients.py legacy
    scripts/clients-setup.sh clients legacy llmcompressor && python scripts/clients.py others
    scripts/clients-setup.sh vllm && PATH=$PWD/.venv-vllm/bin:$PATH python scripts/clients.py served

Writes sections of docs/measurements/clients.md and docs/serve.md.

vLLM: of linears, of mixtures, of formats that accelerators run, one process per checkpoint. The log
    probabilities of the likeliest prompt tokens are compared with those of quantkit's decode in float32; vLLM
    computes in 16 bit, so a row of the model that was not compressed shows how far apart the two are without
    any compression, and a column how far compression itself moved them.
legacy: AutoGPTQ computes in float32 and reads every bit of the layout, so its logits are expected to be equal
    but for the order of summation; AutoAWQ computes in float16.
others: each tool compresses the demo model in its own environment with its default options. Perplexity on
    heldout/heldout.txt in windows of 256 tokens is measured by its own client, by transformers with the
    decoded weights in float32, and by `quantkit eval`.
served: `quantkit serve` of every layout in every engine that is here, asked by the `openai` client. Each
    checkpoint is served, asked for a completion and a stream, and stopped by SIGTERM; nothing may be left
    running. An engine that is not here is a row that says so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from common import (
    DEMO,
    ROOT,
    Failed,
    first_record,
    load_client,
    quantkit_logged,
    run_script,
    table,
    versions,
    write_section,
)

# Checkpoints: one cell is one model compressed by one `quantkit` command

IDS = [0] + [(7 * i * i + 13 * i + 5) % 4000 + 4 for i in range(31)]
SHAPE = {
    "vocab_size": 4096,  # the demo model's, whose tokenizer the random models borrow
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
MIXTURE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}


@dataclass(frozen=True)
class Cell:
    """command: `quantkit METHOD` and its flags; empty: the model itself. source: a name of `make_model`."""

    command: str
    source: str = "demo"

    @property
    def name(self) -> str:
        return f"{self.command or 'not compressed'}, {self.source}"


def cells(**commands: str) -> list[Cell]:
    """Cells of models by commands, one a line or parted by `|`; `none`: not compressed."""
    return [
        Cell("" if text.strip() == "none" else text.strip(), source)
        for source, texts in commands.items()
        for text in texts.strip().replace("\n", "|").split("|")
    ]


def shown(command: str) -> str:
    return f"`{command}`" if command else "not compressed"


def make_model(source: str, folder: Path) -> Path:
    """The demo model, or a random one with rows of unlike size, so that a wrong order shows.

    qwen2: biases on q, k and v, tied embeddings. opt: biases everywhere, no Llama.
    llama_bias: biases everywhere, embeddings not tied. mixtral, qwen3_moe, qwen2_moe: 8 experts, 2 a token;
    the last with an expert that all tokens share.
    """
    if source == "demo":
        return DEMO
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
            if name.endswith(
                "mlp.gate.weight"
            ):  # else rounding decides between experts that are nearly equal
                parameter.mul_(4)
    model.half().save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / file, folder)
    return folder


def make(cell: Cell, root: Path) -> Path:
    """The cell's folder, compressed unless it is there already. Raises Failed with quantkit's error."""
    model = make_model(cell.source, root / "models" / cell.source)
    if not cell.command:
        return model
    folder = root / cell.name.replace(" ", "_").replace(",", "")
    if not (folder / "config.json").exists():
        shared = ["--samples", "8", "--seqlen", "128", "--threads", "1", "--overwrite", "--quiet"]
        method, *flags = cell.command.split()
        arguments = [method, str(model), "-o", str(folder), *flags, *shared]
        quantkit_logged(arguments, folder.with_suffix(".log"))
    return folder


def own_logits(folder: Path, ids: list[int]):
    """Logits `[tokens, vocabulary]` of quantkit's own decode in float32, activations, keys and values rounded
    as the checkpoint says."""
    import torch

    from quantkit.evaluation.stream import StreamedModel
    from quantkit.models.files.open import open_checkpoint

    model = StreamedModel.open(open_checkpoint(str(folder)), torch.float32, torch.device("cpu"))
    (hidden,) = model.states([torch.tensor([ids])], lambda source, done, total: None)
    return model.skeleton.logits(hidden[0]).float()


# vLLM

NEW_TOKENS, TOP = 12, 5
SIXTEEN_BIT = 1e-2  # nats: mean differences up to here are products in 16 bit, as without compression
SHARE = 0.1  # of what compression changed: up to here they are activations in 8 bit, beyond another model
# The same where all activations are rounded: one that lies between two values turns over by the last place of
# a sum, and turns others over behind it.
ROUNDED = 0.33
LINEARS = cells(
    demo="""
        none | gptq | gptq --group-size 32 | gptq --group-size -1 | gptq --checkpoint-format gptq_v2
        awq | awq --sym | gptq --layout compressed-tensors
        gptq --layout compressed-tensors --group-size -1 | gptq --layout compressed-tensors --no-sym
        gptq --layout compressed-tensors --no-sym --group-size -1 | awq --layout compressed-tensors""",
    qwen2="none | gptq | awq | gptq --layout compressed-tensors",
    opt="none | gptq --group-size 32",
    llama_bias="""
        none | gptq --group-size 64 --head 8 | gptq --group-size 64 --head 4
        gptq --group-size 64 --layout compressed-tensors --head 8
        awq --group-size 64 --layout compressed-tensors --head 4""",
)
EXPERTS = cells(
    mixtral="""
        none | gptq | gptq --group-size 32 | gptq --group-size -1 | gptq --checkpoint-format gptq_v2
        gptq --layout compressed-tensors | gptq --layout compressed-tensors --group-size 64
        gptq --layout compressed-tensors --group-size 32
        gptq --layout compressed-tensors --group-size -1 | gptq --layout compressed-tensors --no-sym
        awq | awq --layout compressed-tensors --sym""",
    qwen3_moe="none | gptq | gptq --layout compressed-tensors",
    qwen2_moe="none | gptq | gptq --layout compressed-tensors",
)
FORMATS = cells(
    demo="""
        none | fp8 | fp8 --solver gptq | fp8 --static | fp8 --block 128 | fp8 --layout deepseek
        fp8 --kv-cache | fp8 --static --kv-cache | w8a8 | fp4 | fp4 --activations | fp4 --format mxfp4
        fp4 --format mxfp4 --activations | fp8 --layout modelopt | fp8 --static --layout modelopt
        fp8 --block 128 --layout modelopt | fp4 --layout modelopt | fp4 --activations --layout modelopt""",
    qwen2="fp8 | fp8 --static | w8a8",
    opt="fp8 | w8a8",
    mixtral="fp8 | fp8 --block 128 | w8a8 | fp4 --format mxfp4",
)


def as_vllm_rounds() -> None:
    """What its CPU build does otherwise than quantkit, which goes by compressed-tensors.

    Steps of activations in int8 are absmax / 127, not absmax / 127.5. Keys and values in fp8 are cut off
    towards zero, not rounded to the nearest.
    """
    import torch

    from quantkit.evaluation import kv_rounding
    from quantkit.layouts.compressed_tensors import activations

    ends = activations._ends

    def symmetric(numbers) -> tuple[float, float]:
        least, most = ends(numbers)
        return (-most, most) if numbers.kind == "int" and numbers.symmetric else (least, most)

    def cut_off(scale: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        states, most = states / scale, torch.finfo(torch.float8_e4m3fn).max
        exponent = torch.frexp(states).exponent.clamp(min=-5)
        step = torch.ldexp(torch.ones_like(states), exponent - 4)
        return (torch.trunc(states / step) * step).clamp(-most, most) * scale

    activations._ends, kv_rounding._fp8_scaled = symmetric, cut_off


def compare(folder: Path, source: Path, result: dict, share: float) -> list[str]:
    """Log probabilities and greedy tokens of the client against quantkit's decode, as table cells."""
    tokens = result["tokens"]
    logits = own_logits(folder, IDS + tokens[:-1])
    expected = logits.log_softmax(-1)
    before = own_logits(source, IDS).log_softmax(-1)
    differences, changes, best = [], [], 0
    for position, likely in enumerate(result["prompt_logprobs"]):
        for token, value in likely.items():
            own = expected[position, int(token)].item()
            differences.append(abs(value - own))
            changes.append(abs(before[position, int(token)].item() - own))
        best += max(likely, key=likely.get) == str(expected[position].argmax().item())
    mean, changed = sum(differences) / len(differences), sum(changes) / len(changes)
    # each token is judged on the client's own continuation so far
    greedy = expected[len(IDS) - 1 :][: len(tokens)]
    equal = sum(int(row.argmax()) == token for row, token in zip(greedy, tokens, strict=True))
    behind = max((row.max() - row[token]).item() for row, token in zip(greedy, tokens, strict=True))
    return [
        "OK" if mean <= max(SIXTEEN_BIT, share * changed) else "FAIL",
        f"{mean:.1e}",
        f"{max(differences):.1e}",
        f"{changed:.1e}",
        f"{best}/{len(IDS) - 1}",
        f"{equal}/{len(tokens)}" + (f" (at most {behind:.1e} behind)" if behind else ""),
    ]


def generate(
    cells: list[Cell], root: Path, args: argparse.Namespace
) -> tuple[dict[str, Path], dict[str, dict]]:
    """Folders and the client's results by cell name; `error` where quantkit or vLLM refused."""
    folders, results, paths, jobs = {}, {}, {}, []
    for cell in cells:
        ending = "as-is.json" if args.as_is else "json"
        dtype = dtype_of(cell)
        path = root / "vllm" / f"{cell.name.replace(' ', '_')}.{dtype}.{ending}"
        try:
            folders[cell.name] = make(cell, root)
        except Failed as error:
            results[cell.name] = {"error": str(error)}
            continue
        paths[cell.name] = path
        if not path.exists():
            jobs.append({"folder": str(folders[cell.name]), "dtype": dtype, "result": str(path)})
    if jobs:
        request = {"ids": IDS, "new_tokens": NEW_TOKENS, "top": TOP, "as_is": args.as_is}
        script = ROOT / "scripts/clients/run_vllm.py"
        run_script(
            args.python or ".venv-vllm/bin/python",
            script,
            request | {"jobs": jobs},
            root / "vllm" / "jobs.json",
        )
    crashed = {"error": "its process ended without a word"}
    for name, path in paths.items():
        results[name] = json.loads(path.read_text()) if path.exists() else crashed
    return folders, results


def dtype_of(cell: Cell) -> str:
    """What vLLM is to compute in. Where activations are rounded, differences in 16 bit turn many of them over
    to the next value, and hide whether they are rounded alike."""
    method = cell.command.partition(" ")[0]
    half = "deepseek" in cell.command or "modelopt" in cell.command  # vLLM takes these in 16 bit alone
    return "float32" if method in ("fp8", "w8a8") and not half else "float16"


def vllm_section(every: list[Cell], args: argparse.Namespace, root: Path) -> str:
    """The table of these cells, and what has to be said of it."""
    cells = [cell for cell in every if args.match in cell.name]
    folders, results = generate(cells, root, args)
    rows, share = [], ROUNDED if any(dtype_of(cell) == "float32" for cell in cells) else SHARE
    for cell in cells:
        line = [shown(cell.command), cell.source]
        result = results[cell.name]
        if "error" in result:
            line += ["FAIL", " ".join(result["error"].split())[:300].replace("|", "\\|"), *[""] * 4]
        else:
            source = make(Cell("", cell.source), root)
            line += compare(folders[cell.name], source, result, share)
        rows.append(line)
        print(" | ".join(line), file=sys.stderr, flush=True)
    header = ["command", "model", "result", "mean difference", "largest", "compression changed"]
    header += ["likeliest equal", "greedy equal"]
    text = (
        f"{table(header, rows)}\nDifferences of log probabilities in nats, over the {TOP} likeliest tokens "
    )
    text += f"of {len(IDS) - 1} positions. OK: a mean difference of at most {SIXTEEN_BIT:g}, or of at most "
    text += f"{share:.0%} of *compression changed*. Measured with {versions(results)}, in float16"
    if any(dtype_of(cell) == "float32" for cell in cells):
        text += " (rows with rounded activations: in float32)"
    text += ".\n"
    ran = [result for result in results.values() if "own_product" in result]
    if not args.as_is and not all(result["own_product"] for result in ran):
        text += "vLLM's int4 product needs AVX-512. This machine has none, so a literal product in torch "
        text += "replaced it. Reading and repacking are vLLM's own.\n"
    if (
        not args.as_is
        and any(cell in EXPERTS for cell in cells)
        and not all(result["tiles"] for result in ran)
    ):
        text += "This machine has no AMX, so vLLM refuses int4 experts. The script removed this check. "
        text += "Reading, repacking and the product are vLLM's own; the product needs only AVX-512.\n"
    return text


# AutoGPTQ and AutoAWQ

CLIENTS = {"gptq": ("autogptq", "float32"), "awq": ("autoawq", "float16")}
LEGACY = cells(
    demo="""
        gptq | gptq --bits 2 --group-size 64 | gptq --bits 3 | gptq --bits 8 | gptq --no-sym
        gptq --no-sym --bits 3 | gptq --act-order full | gptq --act-order full --no-sym --group-size 32
        gptq --group-size -1 | awq | awq --group-size 32 | awq --sym
        awq --sym --group-size 32""",
    qwen2="gptq --group-size 32 | awq",
    llama_bias="gptq",
    opt="gptq --group-size 32 | awq --group-size 32",
)


def read(cells: list[tuple[Cell, Path]], client: str, python: str, root: Path) -> dict:
    """What one client says of its checkpoints, all in one process; `logits` where it could load them."""
    from safetensors.torch import load_file

    loader, dtype = CLIENTS[client]
    jobs = [
        {"name": cell.name, "folder": str(folder), "loader": loader, "dtype": dtype} for cell, folder in cells
    ]
    folder = root / "legacy" / client
    results = load_client(python, jobs, [IDS], "logits", folder)
    if (folder / "logits.safetensors").exists():
        for name, logits in load_file(folder / "logits.safetensors").items():
            results[name]["logits"] = logits
    return results


def compare_logits(folder: Path, result: dict) -> list[str]:
    """The client's logits against quantkit's decode, as table cells."""
    if result["error"] is not None:
        return [f"failed: {result['error']}", "", ""]
    expected, found = own_logits(folder, IDS), result["logits"]
    relative = ((found - expected).norm() / expected.norm()).item()
    largest = (found - expected).abs().max().item()
    equal = (found.argmax(-1) == expected.argmax(-1)).sum().item()
    return [f"{relative:.1e}", f"{largest:.1e}", f"{equal}/{len(IDS)}"]


def legacy_section(args: argparse.Namespace, root: Path) -> str:
    """The table of these cells, and what has to be said of it."""
    python, cells = args.python or ".venv-legacy/bin/python", [c for c in LEGACY if args.match in c.name]
    lines: dict[str, list[str]] = {}
    made: dict[str, list[tuple[Cell, Path]]] = {client: [] for client in CLIENTS}
    results: dict[str, dict] = {}
    for cell in cells:
        client = cell.command.split()[0]
        lines[cell.name] = [CLIENTS[client][0], f"`{cell.command}`", cell.source]
        try:
            made[client].append((cell, make(cell, root)))
        except Failed as error:
            lines[cell.name] += [f"not made: {error}", "", ""]
    for client, checkpoints in made.items():
        if checkpoints:
            found = read(checkpoints, client, python, root)
            for cell, folder in checkpoints:
                lines[cell.name] += compare_logits(folder, found[cell.name])
            results |= found
    for line in lines.values():
        print(" | ".join(line), file=sys.stderr)
    header = ["client", "command", "model", "relative difference", "largest", "likeliest equal"]
    text = f"{table(header, list(lines.values()))}\nDifferences of logits over {len(IDS)} tokens. AutoGPTQ "
    text += f"computed in float32, AutoAWQ in float16. Measured with {versions(results)}.\n"
    text += "AutoGPTQ ties the embeddings to a head that is not in the file. "
    text += "The script restores the stored embeddings.\n"
    return text


# Checkpoints of other tools

HELDOUT = ROOT / "heldout/heldout.txt"
WINDOW = 256
SAMPLES, SEQLEN = 16, 256  # the readers are under test here, not the tools


@dataclass(frozen=True)
class Foreign:
    """One checkpoint of another tool. options: of a job of peers/run.py; dtype: what its client runs in."""

    tool: str
    label: str
    options: dict = field(default_factory=dict)
    loader: str = "transformers"
    dtype: str = "float32"
    quantizes_activations: bool = False


G128 = {"method": "gptq"}
FOREIGN = {
    "gptqmodel-w4": Foreign("gptqmodel", "GPTQ 4 bit g128", G128, "gptqmodel", "float16"),
    "gptqmodel-w3": Foreign("gptqmodel", "GPTQ 3 bit g128", G128 | {"bits": 3}, "gptqmodel", "float16"),
    "gptqmodel-w4-desc-act": Foreign(
        "gptqmodel", "GPTQ 4 bit g128, desc_act", G128 | {"desc_act": True}, "gptqmodel", "float16"
    ),
    "llmcompressor-gptq-sym": Foreign("llmcompressor", "GPTQ W4A16 g128", G128),
    "llmcompressor-gptq-asym": Foreign("llmcompressor", "GPTQ W4A16 g128, asymmetric", G128 | {"sym": False}),
    "llmcompressor-awq": Foreign("llmcompressor", "AWQ W4A16 g128", {"method": "awq", "sym": False}),
    "llmcompressor-w8a8": Foreign(
        "llmcompressor", "W8A8 int8", {"method": "W8A8"}, quantizes_activations=True
    ),
    "llmcompressor-fp8": Foreign(
        "llmcompressor", "FP8 dynamic", {"method": "FP8_DYNAMIC"}, quantizes_activations=True
    ),
    "autoawq-g128": Foreign(
        "autoawq", "AWQ 4 bit g128", {"method": "awq", "sym": False}, "autoawq", "float16"
    ),
    "autoawq-g64": Foreign(
        "autoawq", "AWQ 4 bit g64", {"method": "awq", "sym": False, "group_size": 64}, "autoawq", "float16"
    ),
    "bitsandbytes-int8": Foreign("bitsandbytes", "LLM.int8", {"method": "int8"}, quantizes_activations=True),
    "bitsandbytes-nf4": Foreign("bitsandbytes", "NF4", {"method": "nf4"}),
    "bitsandbytes-nf4-double": Foreign("bitsandbytes", "NF4, double quantization", {"method": "nf4-double"}),
}


def make_foreign(case: Foreign, python: str, tokens: Path, folder: Path) -> None:
    """The tool's checkpoint, in `folder`. Raises Failed."""
    request = {"tool": case.tool, "model": str(DEMO), "tokens": str(tokens), "out": str(folder)}
    run_script(python, ROOT / "scripts/peers/run.py", request | case.options, folder / "made.json")


def measure_foreign(
    case: Foreign, name: str, pythons: dict[str, str], ids: list[list[int]], folder: Path
) -> dict:
    """Perplexity by the tool's own client, and by transformers with the decoded weights in float32.

    Both are kept in `client.json` beside the checkpoint; what could not be loaded is in there, too.
    """
    kept = folder / "client.json"
    if not kept.exists():
        own = {"name": "own", "folder": str(folder), "loader": case.loader, "dtype": case.dtype}
        decoded = own | {"name": "decoded", "loader": "transformers", "dtype": "float32", "dequantize": True}
        results = {}
        for python, job in ((pythons[case.tool], own), (pythons["transformers"], decoded)):
            results |= load_client(python, [job], ids, "nll", folder / "client" / job["name"])
        for result in results.values():
            if result["error"] is None:
                result["ppl"] = math.exp(result["nll"])
        kept.write_text(json.dumps({"name": name, "dtype": case.dtype} | results, indent=2) + "\n")
    return json.loads(kept.read_text())


def own_perplexity(folder: Path) -> float:
    """What `quantkit eval` says of the folder. Raises Failed."""
    arguments = ["eval", str(folder), "--text", str(HELDOUT), "--ctx", str(WINDOW), "--json", "-q"]
    log = folder / "quantkit-eval.log"
    quantkit_logged(arguments, log)
    printed = log.read_text()
    return json.loads(printed[printed.index("{") :])["models"][0]["metrics"]["ppl"]["value"]


def write_inputs(folder: Path) -> tuple[Path, list[list[int]]]:
    """The calibration tokens every tool is given, and the windows every client is measured on."""
    from quantkit.evaluation import windows as windows_of
    from quantkit.models.files.open import open_checkpoint
    from quantkit.options import CalibrationOptions
    from quantkit.text import calibration

    base = open_checkpoint(str(DEMO))
    tokens = folder / "tokens.json"
    rows = calibration.load(base, CalibrationOptions(samples=SAMPLES, seqlen=SEQLEN)).tokens.tolist()
    tokens.write_text(json.dumps(rows))
    return tokens, windows_of.load(base, HELDOUT, WINDOW, None, None).ids.tolist()


def foreign_row(name: str, pythons: dict[str, str], inputs: tuple, root: Path) -> tuple[list[str], dict]:
    """One line of the table, and the client's results; whatever fails is said in the line."""
    tokens, ids = inputs
    case, folder = FOREIGN[name], root / name
    note = ", activations too" if case.quantizes_activations else ""
    line = [case.tool, case.label + note]
    try:
        if not (folder / "config.json").exists():
            make_foreign(case, pythons[case.tool], tokens, folder)
        client = measure_foreign(case, name, pythons, ids, folder)
    except Failed as error:
        return [*line, f"failed: {error}", "–", "–"], {}
    theirs, decoded = (
        f"{part['ppl']:.3f}" if part["error"] is None else f"failed: {part['error']}"
        for part in (client["own"], client["decoded"])
    )
    try:
        ours = f"{own_perplexity(folder):.3f}"
    except Failed as error:
        ours = str(error)
    return [*line, f"{theirs} ({case.dtype})", decoded, ours], client


def others_section(args: argparse.Namespace, root: Path) -> str:
    """The table of other tools' checkpoints, and what has to be said of it."""
    clients, peers = args.python or ".venv-clients/bin/python", ".venv-peers/llmcompressor/bin/python"
    pythons = dict.fromkeys(("transformers", "gptqmodel", "bitsandbytes"), clients)
    pythons |= {"llmcompressor": peers, "autoawq": ".venv-legacy/bin/python"}
    rows, found, inputs = [], {}, write_inputs(root)
    for name in FOREIGN:
        if args.match in name:
            line, client = foreign_row(name, pythons, inputs, root)
            rows.append(line)
            found |= {f"{name} {part}": client[part] for part in ("own", "decoded") if part in client}
            print(" | ".join(line), file=sys.stderr, flush=True)
    header = ["tool", "checkpoint", "its own client", "transformers, decoded, float32", "`quantkit eval`"]
    text = f"Perplexity on {HELDOUT.name}, windows of {WINDOW} tokens.\n\n{table(header, rows)}"
    return text + f"\nMeasured with {versions(found)}.\n"


# Engines that serve

PROMPT, TOKENS = "Once upon a time", 16
SERVED = {  # engine -> commands that compress; "" is the model itself
    "transformers": ["", "int8", "nf4"],
    "llama.cpp": ["gguf -t F16", "gguf -t Q8_0", "gguf -t Q4_K_M"],
    "vllm": ["", "gptq", "awq", "gptq --layout compressed-tensors"],
}
EXTRA = {"vllm": ["--", "--enforce-eager"]}  # compiling a model this small takes minutes and gains nothing
SERVED_HEADER = ["engine", "command", "healthy after", "greedy equal", "streamed", "left running"]


def checkpoint(command: str, root: Path) -> Path:
    """The demo model, compressed."""
    if not command.startswith("gguf"):
        return make(Cell(command), root)
    path = root / f"{command.replace(' ', '').replace('--', '-')}.gguf"
    if not path.exists():
        method, *flags = command.split()
        quantkit_logged([method, str(DEMO), "-o", str(path), *flags], path.with_suffix(".log"))
    return path


def greedy(path: Path, root: Path) -> str:
    """What quantkit itself generates from it."""
    command = [sys.executable, "-m", "quantkit", "generate", path, "-p", PROMPT, "-n", str(TOKENS)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--json", "-q"], env=env, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise Failed(done.stderr)
    return json.loads(done.stdout)["models"][0]["text"]


def served_row(engine: str, command: str, root: Path) -> list[str]:
    """One cell, from the start of the server to its end."""
    import psutil

    path = checkpoint(command, root)
    expected = greedy(path, root)
    flags = ["--engine", engine, "--port", "0", "--json", "-q", "--device", "cpu", *EXTRA.get(engine, [])]
    argv = [sys.executable, "-m", "quantkit", "serve", str(path), *flags]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    log = (root / "serve.log").open("w")
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True, env=env, cwd=root)
    try:
        told = first_record(server)
        if "url" not in told:
            raise Failed((root / "serve.log").read_text())
        found = ask_server(told, expected)
        children = psutil.Process(server.pid).children(recursive=True)
        server.terminate()
        code = server.wait(60)
        time.sleep(1)
        left = [one for one in children if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        end = f"{len(left)} of {len(children)}, exit code {code}"
        return [engine, shown(command), f"{told['proof']['started_seconds']:.0f} s", *found, end]
    finally:
        if server.poll() is None:
            server.terminate()
            server.wait(60)


def ask_server(told: dict, expected: str) -> list[str]:
    """Whether it answers as it should, whole and in a stream."""
    import openai

    client = openai.OpenAI(base_url=told["url"], api_key="none", max_retries=0)
    options = {"model": told["model"], "prompt": PROMPT, "max_tokens": TOKENS}
    options |= {} if told["engine"] == "transformers" else {"temperature": 0}  # its files say it, see docs
    text = client.completions.create(**options).choices[0].text
    chunks = [c.choices[0].text for c in client.completions.create(**options, stream=True) if c.choices]
    alike = len(os.path.commonprefix([text.split(), expected.split()]))
    streamed = "the same" if "".join(chunks) == text else "another text"
    return [f"{alike} of {len(expected.split())} words", streamed]


def served_section(args: argparse.Namespace, root: Path) -> str:
    """The table of engines that serve."""
    rows = []
    for engine, commands in SERVED.items():
        for command in commands if args.match in engine else ():
            try:
                rows.append(served_row(engine, command, root))
            except Failed as error:
                why = str(error).strip().splitlines()[-1][:200]
                rows.append([engine, shown(command), f"FAIL: {why}", *[""] * (len(SERVED_HEADER) - 3)])
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    return table(SERVED_HEADER, rows)


SECTIONS = {
    "vllm": partial(vllm_section, LINEARS),
    "vllm-experts": partial(vllm_section, EXPERTS),
    "vllm-formats": partial(vllm_section, FORMATS),
    "legacy": legacy_section,
    "others": others_section,
    "served": served_section,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default: all")
    add("--python", help="of the client's environment (default: where clients-setup.sh makes it)")
    add("--keep", type=Path, help="keep checkpoints and results here, and use what is there")
    add("--match", default="", help="only rows whose name, of served whose engine, contains this")
    add("--as-is", action="store_true", help="let vLLM refuse what this machine is no match for")
    add("--no-write", action="store_true", help="leave the pages alone")
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"no section is called {min(unknown)}")
    as_vllm_rounds()
    with tempfile.TemporaryDirectory() as temporary:
        root = (args.keep or Path(temporary)).absolute()
        root.mkdir(parents=True, exist_ok=True)
        for name in args.sections or SECTIONS:
            text = SECTIONS[name](args, root)
            if args.no_write or args.match:
                print(text)
            else:
                document = "docs/serve.md" if name == "served" else "docs/measurements/clients.md"
                write_section(name, text, ROOT / document)


if __name__ == "__main__":
    main()
