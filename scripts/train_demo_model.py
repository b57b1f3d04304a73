"""Train the demo model, a small Llama with its own byte-level BPE tokenizer, from any text.

    python scripts/train_demo_model.py TEXT... -o OUT [--steps N | --epochs X]

The defaults are demo-llama-6m: tied embeddings, grouped-query attention, 5.8 M parameters. With
--experts it is a mixture, a small Qwen3-MoE; `--experts 8 --intermediate-size 256 --layers 4` is
demo-moe-8m. Matrices, and each expert's, are trained by Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/:
momentum orthogonalised by Newton-Schulz), embeddings and norms by AdamW. The same text, options
and seed give the same weights on one machine with the same number of threads.
"""

import argparse
import json
import math
import os
import re
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from quantkit.errors import QuantkitError
from quantkit.models.machine import processor
from quantkit.models.machine.device import choose_device

END = "<|endoftext|>"  # comes before every document; also the bos, eos and padding token

# Long documents are encoded in pieces, as an encoding takes about 100 bytes per token. The cuts,
# after a visible character and before a space or line break, are where no token of the GPT-2
# regex reaches across, so the pieces have the same tokens as the whole.
PIECE = re.compile(r".{32768}.*?\S(?=[ \n])|.+", re.DOTALL)


class UserError(Exception):
    """What was asked cannot be done; the message is one line that says why."""


def read_documents(paths: list[Path]) -> list[str]:
    """Return the documents of UTF-8 files, split at NUL or END, without blank ones."""
    documents: list[str] = []
    for path in paths:
        try:
            text = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {path}: {error}") from error
        documents += [part for part in re.split(f"\0|{re.escape(END)}", text) if part.strip()]
    if not documents:
        raise UserError("too little text: the files are blank")
    return documents


def train_tokenizer(documents: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the GPT-2 regex; END is token 0, then the 256 bytes, then the merges."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator((piece for text in documents for piece in PIECE.findall(text)), trainer)
    if (size := bpe.get_vocab_size()) != vocab_size:
        raise UserError(f"too little text: it yields {size} of the --vocab-size of {vocab_size}")
    marks = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **marks)


def tokenize(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> Tensor:
    """All documents as one stream of int32 ids [tokens], an eos token before each."""
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no eos token to put between documents")
    encode = tokenizer.backend_tokenizer.encode
    stream = array("i")
    for document in documents:
        stream.append(tokenizer.eos_token_id)
        for piece in PIECE.findall(document):
            stream.extend(encode(piece, add_special_tokens=False).ids)
    return torch.frombuffer(stream, dtype=torch.int32)


def windows(stream: Tensor, seqlen: int) -> Tensor:
    """The stream [tokens] as a view [windows, seqlen + 1] that predicts each token once."""
    if len(stream) <= seqlen:
        raise UserError(f"too little text: {len(stream)} tokens in a part, --seqlen is {seqlen}")
    return stream.unfold(0, seqlen + 1, seqlen)


def build_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A randomly initialised float32 Llama or Qwen3-MoE of the shape asked for."""
    end = tokenizer.eos_token_id
    kind, more = LlamaConfig, {}
    if args.experts:
        kind = Qwen3MoeConfig
        more = dict(
            moe_intermediate_size=args.intermediate_size,
            head_dim=args.hidden_size // args.heads,
            num_experts=args.experts,
            num_experts_per_tok=args.experts_per_token,
            norm_topk_prob=True,
            output_router_logits=True,  # so that a forward returns the loss that keeps experts in balance
        )
    config = kind(
        **more,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        vocab_size=len(tokenizer),
        max_position_embeddings=args.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    model = AutoModelForCausalLM.from_config(config)
    # The padding token is also END, which must learn as an input; training has no padding.
    model.get_input_embeddings().padding_idx = None
    return model


def taken_apart(stacked: Tensor, name: str) -> list[Tensor]:
    """The matrices of all experts [experts, out, in] as views; gate and up are two of them."""
    return [part for expert in stacked for part in expert.chunk(2 if name.endswith("gate_up_proj") else 1)]


def build_optimizers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the (tied) embedding, routers and norms."""
    blocks = dict(model.model.layers.named_parameters())
    matrices = {name: p for name, p in blocks.items() if p.ndim == 2 and not name.endswith("mlp.gate.weight")}
    stacked = {name: p for name, p in blocks.items() if p.ndim == 3}
    chosen = {id(p) for p in (*matrices.values(), *stacked.values())}
    apart = {name: [*map(torch.nn.Parameter, taken_apart(p.data, name))] for name, p in stacked.items()}
    muon = torch.optim.Muon(
        [*matrices.values(), *(part for parts in apart.values() for part in parts)],
        lr=0.02, momentum=0.95, weight_decay=0.0,
    )  # fmt: skip

    def share_gradients(*_: object) -> None:
        for name, parts in apart.items():
            for part, gradient in zip(parts, taken_apart(stacked[name].grad, name), strict=True):
                part.grad = gradient
            stacked[name].grad = None  # the next backward starts anew

    muon.register_step_pre_hook(share_gradients)
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [muon, torch.optim.AdamW(rest, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)]


def schedule(steps: int) -> Callable[[int], float]:
    """Share of the peak rate at a 0-based step: warm-up, constant, linear to 0 from half-way."""
    warmup = max(1, min(100, steps // 10))  # or a short run would never reach the peak
    return lambda step: min(1.0, (step + 1) / warmup, 2 * (1 - step / steps))


def batches(data: Tensor, batch_size: int, steps: int, seed: int) -> Iterator[Tensor]:
    """`steps` batches [batch_size, seqlen + 1]; each epoch is a fresh permutation of `data`."""
    generator = torch.Generator().manual_seed(seed)
    epochs = math.ceil(steps * batch_size / len(data))
    order = torch.cat([torch.randperm(len(data), generator=generator) for _ in range(epochs)])
    for chosen in order[: steps * batch_size].split(batch_size):
        yield data[chosen]


def next_token_loss(model: PreTrainedModel, batch: Tensor, balance: float = 0.0) -> Tensor:
    """Mean cross-entropy in nats per token, in float32, of windows [batch, seqlen + 1]; with `balance`
    times the loss of Switch Transformers (arXiv 2101.03961, equation 4) where the model is a mixture."""
    ids = batch.to(model.device, torch.int64)
    out = model(input_ids=ids[:, :-1], use_cache=False)  # logits [batch, seqlen, vocabulary]
    loss = cross_entropy(out.logits.float().flatten(0, 1), ids[:, 1:].flatten())
    return loss + balance * out.aux_loss if balance else loss


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies in bfloat16 itself: emulated, it would only cost accuracy."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and processor.has_bfloat16()


def train(model: PreTrainedModel, data: Tensor, batch_size: int, steps: int, seed: int) -> None:
    """Train the model in place on windows [windows, seqlen + 1]; progress goes to stderr."""
    optimizers = build_optimizers(model)
    schedulers = [LambdaLR(optimizer, schedule(steps)) for optimizer in optimizers]
    bfloat16 = torch.autocast(model.device.type, torch.bfloat16, has_bfloat16(model.device))
    start = time.perf_counter()
    for step, batch in enumerate(batches(data, batch_size, steps, seed), start=1):
        with bfloat16:
            loss = next_token_loss(model, batch, getattr(model, "router_aux_loss_coef", 0.0))
        loss.backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if step % max(1, steps // 100) == 0 or step in (1, steps):
            seconds_per_step = (time.perf_counter() - start) / step
            speed = batch_size * (data.shape[1] - 1) / seconds_per_step
            eta = timedelta(seconds=round(seconds_per_step * (steps - step)))
            line = f"step {step}/{steps}  loss {loss:.3f}  {speed:,.0f} tokens/s  ETA {eta}"
            print(line, file=sys.stderr)


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, data: Tensor, batch_size: int) -> float:
    """Mean loss in nats per token over windows [windows, seqlen + 1]."""
    sums = [next_token_loss(model, part).item() * len(part) for part in data.split(batch_size)]
    return sum(sums) / len(data)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the bfloat16 model folder beside `out`, then rename it: whole or not at all."""
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as beside:
        folder = Path(beside, out.name)
        model.config.output_router_logits = False
        model.bfloat16().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folder.rename(out)


def check(args: argparse.Namespace) -> None:
    """Refuse, before any work, what could only fail later."""
    folder, tokenizer = args.out.parent, args.tokenizer
    problems = {
        f"{args.out} exists; choose another OUT or remove it": os.path.lexists(args.out),
        f"{folder} is no folder to write in": not (folder.is_dir() and os.access(folder, os.W_OK)),
        f"{tokenizer} holds no tokenizer.json": tokenizer and not Path(tokenizer, "tokenizer.json").is_file(),
        "--hidden-size must be an even multiple of --heads": args.hidden_size % (2 * args.heads),
        "--heads must be a multiple of --kv-heads": args.heads % args.kv_heads,
        "--experts must be at least --experts-per-token": args.experts
        and args.experts < args.experts_per_token,
        "--context must be at least --seqlen": args.context < args.seqlen,
        "--vocab-size must be at least 257, for 256 bytes and END": args.vocab_size < 257,
        "--held-out must lie between 0 and 1": not 0 < args.held_out < 1,
        "--epochs must be above 0": not 0 < args.epochs < math.inf,
    }
    if found := [problem for problem, holds in problems.items() if holds]:
        raise UserError("; ".join(found))


def run(args: argparse.Namespace) -> dict[str, float]:
    """Train and write args.out, unless something is wrong; returns what to report."""
    check(args)
    device = choose_device(args.device)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for the next line, on CUDA
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(args.seed)

    documents = read_documents(args.text)
    if args.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    else:
        tokenizer = train_tokenizer(documents, args.vocab_size)
    stream = tokenize(tokenizer, documents)
    boundary = round(len(stream) * (1 - args.held_out))
    data, held_out = (windows(part, args.seqlen) for part in (stream[:boundary], stream[boundary:]))
    steps = args.steps or math.ceil(args.epochs * len(data) / args.batch_size)

    model = build_model(args, tokenizer).to(device)
    start = time.perf_counter()
    train(model, data, args.batch_size, steps, args.seed)
    seconds = time.perf_counter() - start
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()  # so that what is saved is measured
    loss = held_out_loss(model, held_out, args.batch_size)
    if not math.isfinite(loss):
        raise UserError(f"training diverged, to a held-out loss of {loss}; nothing is saved")
    save(model, tokenizer, args.out)
    return {
        "parameters": model.num_parameters(),
        "tokens": steps * args.batch_size * args.seqlen,
        "steps": steps,
        "seconds": round(seconds, 1),
        "held_out_loss": loss,
        "held_out_perplexity": math.exp(loss),
    }


def positive(text: str) -> int:
    """An argparse type: a whole number from 1."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def parse_arguments() -> argparse.Namespace:
    """The command line; the defaults are the shape and recipe of demo-llama-6m."""
    about, style = __doc__.split("\n")[0], argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=style)
    add = parser.add_argument
    add("text", nargs="+", type=Path, help="in UTF-8; NUL parts documents")
    add("-o", "--out", type=Path, required=True, help="model folder to make")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=positive, help="batches to train on; replaces --epochs")
    length.add_argument("--epochs", type=float, default=1.0, help="passes over the text")
    add("--tokenizer", type=Path, help="model folder whose tokenizer to use, not a new one")
    add("--vocab-size", type=positive, default=4096, help="of a new tokenizer")
    add("--hidden-size", type=positive, default=256, help="width of the residual stream")
    add("--intermediate-size", type=positive, default=768, help="width of the MLPs")
    add("--experts", type=positive, help="per block, a mixture; --intermediate-size is one expert's")
    add("--experts-per-token", type=positive, default=2, help="that the router chooses")
    add("--layers", type=positive, default=6, help="decoder blocks")
    add("--heads", type=positive, default=4, help="query heads")
    add("--kv-heads", type=positive, default=2, help="key and value heads")
    add("--context", type=positive, default=512, help="positions the model is declared for")
    add("--seqlen", type=positive, default=256, help="tokens per training sequence")
    add("--batch-size", type=positive, default=16, help="sequences per step")
    add("--seed", type=int, default=0, help="of the initial weights and the order of the text")
    add("--device", default="auto", help="as torch names it; auto: the GPU if there is one")
    add("--held-out", type=float, default=0.01, help="last fraction of the text, not trained on")
    return parser.parse_args()


def main() -> int:
    """Exit code 0 with one JSON line on stdout, or 2 with one line on stderr."""
    try:
        print(json.dumps(run(parse_arguments())))
    except (UserError, QuantkitError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
