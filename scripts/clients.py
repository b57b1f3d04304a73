"""quantkit's checkpoints in other clients on a CPU, compared with quantkit's own decode.

    scripts/clients-setup.sh vllm && python scripts/clients.py [vllm] [vllm-experts] [vllm-formats]
    scripts/clients-setup.sh legacy && python scripts/clients.py legacy

Writes sections of docs/clients.md. vLLM: of linears, of mixtures, of formats that accelerators run, one
process per checkpoint. The log probabilities of the likeliest prompt tokens are compared with those of
quantkit's decode in float32; vLLM computes in 16 bit, so a row of the model that was not compressed shows how
far apart the two are without any compression, and a column how far compression itself moved them. legacy:
AutoGPTQ computes in float32 and reads every bit of the layout, so its logits are expected to be equal but for
the order of summation; AutoAWQ computes in float16.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from client_runs import (
    DEMO,
    ROOT,
    Failed,
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
        awq | awq --no-zero-point | gptq --layout compressed-tensors
        gptq --layout compressed-tensors --group-size -1 | gptq --layout compressed-tensors --no-sym
        gptq --layout compressed-tensors --no-sym --group-size -1 | awq --layout compressed-tensors""",
    qwen2="none | gptq | awq | gptq --layout compressed-tensors",
    opt="none | gptq --group-size 32",
)
EXPERTS = cells(
    mixtral="""
        none | gptq | gptq --group-size 32 | gptq --group-size -1 | gptq --checkpoint-format gptq_v2
        gptq --layout compressed-tensors | gptq --layout compressed-tensors --group-size 64
        gptq --layout compressed-tensors --group-size 32
        gptq --layout compressed-tensors --group-size -1 | gptq --layout compressed-tensors --no-sym
        awq | awq --layout compressed-tensors --no-zero-point""",
    qwen3_moe="none | gptq | gptq --layout compressed-tensors",
    qwen2_moe="none | gptq | gptq --layout compressed-tensors",
)
FORMATS = cells(
    demo="""
        none | fp8 | fp8 --solver gptq | fp8 --static | fp8 --block 128 | fp8 --layout deepseek
        fp8 --kv-cache | fp8 --static --kv-cache | w8a8 | fp4 | fp4 --activations | fp4 --format mxfp4
        fp4 --format mxfp4 --activations""",
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
        dtype = args.dtype or dtype_of(cell)
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
    return "float32" if method in ("fp8", "w8a8") and "deepseek" not in cell.command else "float16"


def vllm_section(cells: list[Cell], root: Path, args: argparse.Namespace) -> str:
    """The table of these cells, and what has to be said of it."""
    folders, results = generate(cells, root, args)
    rows, share = [], ROUNDED if any(dtype_of(cell) == "float32" for cell in cells) else SHARE
    for cell in cells:
        line = [f"`{cell.command}`" if cell.command else "not compressed", cell.source]
        result = results[cell.name]
        if "error" in result:
            line += ["FAIL", " ".join(result["error"].split())[:300].replace("|", "\\|"), *[""] * 4]
        else:
            source = make(Cell("", cell.source), root)
            line += compare(folders[cell.name], source, result, share)
        rows.append(line)
        print(" | ".join(line), file=sys.stderr, flush=True)
    header = ["command", "model", "", "mean difference", "largest", "compression changed"]
    header += ["likeliest equal", "greedy equal"]
    text = (
        f"{table(header, rows)}\nDifferences of log probabilities in nats, over the {TOP} likeliest tokens "
    )
    text += f"of {len(IDS) - 1} positions; OK: a mean up to {SIXTEEN_BIT:g}, or to {share:.0%} of what "
    text += f"compression changed. Measured with {versions(results)}, {args.dtype or 'float16'}"
    if not args.dtype and any(dtype_of(cell) == "float32" for cell in cells):
        text += ", where activations are rounded float32"
    text += ".\n"
    ran = [result for result in results.values() if "own_product" in result]
    if not args.as_is and not all(result["own_product"] for result in ran):
        text += "This machine has no AVX-512, for which alone vLLM builds its int4 product: a literal one in "
        text += "torch stood in for it. Reading and repacking are vLLM's own.\n"
    if (
        not args.as_is
        and any(cell in EXPERTS for cell in cells)
        and not all(result["tiles"] for result in ran)
    ):
        text += (
            "This machine has no AMX, without which vLLM refuses int4 experts: it was told to take them all "
        )
        text += "the same. Reading, repacking and the product, which needs AVX-512 alone, are vLLM's own.\n"
    return text


# AutoGPTQ and AutoAWQ

CLIENTS = {"gptq": ("autogptq", "float32"), "awq": ("autoawq", "float16")}
LEGACY = cells(
    demo="""
        gptq | gptq --bits 2 --group-size 64 | gptq --bits 3 | gptq --bits 8 | gptq --no-sym
        gptq --no-sym --bits 3 | gptq --act-order full | gptq --act-order full --no-sym --group-size 32
        gptq --group-size -1 | awq | awq --group-size 32 | awq --no-zero-point
        awq --no-zero-point --group-size 32""",
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


def legacy_section(cells: list[Cell], root: Path, args: argparse.Namespace) -> str:
    """The table of these cells, and what has to be said of it."""
    python = args.python or ".venv-legacy/bin/python"
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
    text = f"{table(header, list(lines.values()))}\nDifferences of logits over {len(IDS)} tokens; AutoGPTQ "
    text += f"in float32, AutoAWQ in float16. Measured with {versions(results)}.\n"
    text += "AutoGPTQ ties embeddings to a head that no file holds: the script puts the stored ones back.\n"
    return text


SECTIONS = {
    "vllm": (vllm_section, LINEARS),
    "vllm-experts": (vllm_section, EXPERTS),
    "vllm-formats": (vllm_section, FORMATS),
    "legacy": (legacy_section, LEGACY),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default: all")
    add("--python", help="of the client's environment (default: where clients-setup.sh makes it)")
    add("--dtype", help="of vLLM; default: float32 where activations are rounded, else float16")
    add("--keep", type=Path, help="keep checkpoints and results here, and use what is there")
    add("--match", default="", help="only cells whose name contains this")
    add("--as-is", action="store_true", help="let vLLM refuse what this machine is no match for")
    add("--no-write", action="store_true", help="leave docs/clients.md alone")
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"no section is called {min(unknown)}")
    as_vllm_rounds()
    with tempfile.TemporaryDirectory() as temporary:
        root = (args.keep or Path(temporary)).absolute()
        for name in args.sections or SECTIONS:
            section, every = SECTIONS[name]
            text = section([cell for cell in every if args.match in cell.name], root, args)
            if args.no_write:
                print(text)
            else:
                write_section(name, text)


if __name__ == "__main__":
    main()
