"""Which of transformers' causal-LM families quantkit takes: every one as a tiny random model.

    python scripts/families.py [--only NAME …] [--methods nf4 gptq] [--json FILE] [--seconds 120]

For every model type of transformers' causal-LM mapping: shrinks its default configuration, saves a random
model, runs the methods on it, and compares the logits of the source and of each result, streamed block by
block, with those of transformers' own forward on the same weights. Prints what was taken, refused with the
reason, or could not be built, and the share of the blocks' parameters that was quantized. Each family runs in
a process of its own: a crash or a hang costs that family alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import tempfile
from pathlib import Path

TOLERANCE = 1e-4
VOCABULARY, TOKENS, GROUP = 512, 24, 16
WEIGHTS = 12_000_000  # of a tiny model
SIZES = [  # (what a setting's name matches, its value); the first counts
    (r"\w*vocab(_size\w*)?", VOCABULARY),
    (r"(n_embd|dim|d_model|hidden_size|embed_dim|embedding_size|lru_width)", 64),
    (r"(\w+_proj_dim|attention_hidden_size)", 64),
    (r"(num_key_value_heads|num_kv_heads|n_head_kv|linear_num_key_heads|\w+_key_value_heads)", 2),
    (r"(mamba_n_heads|mamba_num_heads|\w*linear_num_value_heads)", 8),
    (r"(num_attention_heads|num_heads|n_heads?|\w+_num_heads|\w+_n_heads?|\w+_attention_heads)", 4),
    (r"(rotary_dim|qk_rope_head_dim)", 8),
    (r"(head_dim|mamba_d_head|kv_channels|head_size|\w+_head_dim)", 16),
    (r"(\w*intermediate_size\w*|ffn_dim|n_inner|d_ff|\w*ffn_hidden_size|ffn_intermediate_size)", 128),
    (r"(time_step_rank|mamba_dt_rank)", 8),
    (r"(\w*_rank|\w*low_rank\w*|hidden_size_per_layer_input)", 64),
    (r"(num_(local_|routed_)?experts|n_routed_experts|moe_num_experts)", 4),
    (r"(num_experts_per_tok(en)?|num_selected_experts|top_?k|(moe|num)_(top_?)?k)", 2),
    (r"(n_group|topk_group|n_groups|mamba_n_groups|first_k_dense_replace|n_shared_experts)", 1),
    (r"(mamba_d_ssm|mamba_intermediate_size)", 128),
    (r"num_kv_shared_layers", 0),
    (r"(state_size|mamba_d_state|ssm_state_size)", 16),
    (r"(attn_layer_period|expert_layer_period)", 2),
    (r"(attn_layer_offset|expert_layer_offset)", 1),
    (r"(chunk_size|mamba_chunk_size)", 16),
    (r"(max_position_embeddings|n_positions|max_seq_len|max_sequence_length)", 256),
    (r"(sliding_window|attention_window_size|attention_chunk_size)", 16),
]  # fmt: skip
DEPTH = r"(num_hidden_layers|n_layers?|num_layers|decoder_layers|encoder_layers)"
REPAIRS = (  # tried one after another where a configuration does not fit together
    {}, {"num_heads": 8}, {"num_key_value_heads": 4}, {"head_dim": 32}, {"head_dim": 64, "num_heads": 2},
    {"rope_parameters": None}, {"rope_scaling": None}, {"num_attention_heads": 2},
    {"fill": True}, {"head_dim": 8}, {"qk_rope_head_dim": 16}, {"mamba_d_head": 16},
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these model types alone")
    parser.add_argument("--methods", nargs="+", default=["nf4", "gptq"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parser.add_argument("--seconds", type=float, default=60, help="that a family may take")
    args = parser.parse_args()

    import torch
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    torch.set_num_threads(1)
    unknown = set(args.only or ()) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if unknown:
        parser.error(f"no causal-LM family of transformers: {', '.join(sorted(unknown))}")
    rows = []
    for family in args.only or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        rows.append(isolated(family, args.methods, args.seconds))
        print(line(rows[-1]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))
    print(total(rows))


def isolated(family: str, methods: list[str], seconds: float) -> dict:
    """The row of one family, from a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=lambda: theirs.send(examined(family, methods)))
    child.start()
    theirs.close()
    row = {"family": family, "status": "crashed", "reason": f"took longer than {seconds:.0f} s"}
    try:
        if ours.poll(seconds):
            row = ours.recv()
    except EOFError:
        child.join()
        row["reason"] = f"its process ended with {child.exitcode}"
    child.kill()
    child.join()
    return row


def examined(family: str, methods: list[str]) -> dict:
    """What becomes of a family: built or not, taken or refused, and how exact."""
    import transformers

    from quantkit.errors import QuantkitError

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    row = {"family": family}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        try:
            model = built(family)
            model.save_pretrained(source)
            save_tokenizer(source)
        except Exception as error:
            return row | {"status": "not built", "reason": said(error)}
        try:
            row["source"] = difference(source, model)
            for method in methods:
                row[method] = compressed(source, Path(folder) / method, method, row)
        except QuantkitError as error:
            return row | {"status": "refused", "reason": error.message}
        except Exception as error:
            return row | {"status": "crashed", "reason": said(error)}
    worst = max(row[what] for what in ("source", *methods))
    if not worst <= TOLERANCE:
        return row | {"status": "wrong", "reason": f"logits differ by {worst:.2g}"}
    return row | {"status": "taken", "reason": ""}


def families() -> dict[str, str]:
    """Model type -> `text` or `wrapper`, which holds a language model beside other things."""
    from transformers.models.auto import modeling_auto as auto

    wrappers = dict.fromkeys(auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, "wrapper")
    return dict.fromkeys(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "text") | wrappers


def built(family: str):
    """A random model whose parameters have no value they would have by default.

    Tries one repair after another until the settings fit together; raises what was wrong first.
    """
    import torch
    import transformers

    make = transformers.CONFIG_MAPPING[family]
    kind = "MultimodalLM" if families()[family] == "wrapper" else "CausalLM"
    auto = getattr(transformers, f"AutoModelFor{kind}")
    first = None
    for repair in REPAIRS:
        torch.manual_seed(0)
        try:
            config = make(**shrunk(make(), repair))
            with torch.device("meta"):
                check_tiny(auto.from_config(config))
            model = auto.from_config(config, dtype=torch.float32).eval()
            with torch.no_grad():
                model(torch.arange(TOKENS)[None] + 8, use_cache=False)
            break
        except Exception as error:
            first = first or error
    else:
        raise first
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.05)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def check_tiny(model) -> None:
    """Raise ValueError for a model that its settings did not shrink."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    if weights > WEIGHTS:
        largest = max(model.named_parameters(), key=lambda pair: pair[1].numel())
        raise ValueError(f"{weights} weights are too many: {largest[0]} is {list(largest[1].shape)}")


def shrunk(config, repair: dict) -> dict:
    """Settings that make a model of `config`'s kind tiny, those of sub-configurations included."""
    settings = config.to_dict()
    depth = next((settings[key] for key in settings if re.fullmatch(DEPTH, key)), 2)
    kinds = [value for value in settings.values() if isinstance(value, list) and len(value) == depth]
    first = [kind.index(value) for kind in kinds for value in kind if isinstance(value, str)]
    blocks = min(max([2, *(index + 1 for index in first)]), 8)
    filled = repair.get("fill")
    found = {}
    for key, value in settings.items():
        sub = vars(config).get(key)
        size = next((size for pattern, size in SIZES if re.fullmatch(pattern, key)), None)
        if re.fullmatch(DEPTH, key):
            found[key] = blocks
        elif key == "is_decoder":
            found[key] = True
        elif hasattr(sub, "to_dict"):
            found[key] = {"model_type": sub.model_type} | shrunk(sub, repair)
        elif isinstance(value, list) and len(value) == depth and depth > 2:
            found[key] = value[:blocks]
        elif key.endswith(("token_id", "token_index")) and isinstance(value, int):
            found[key] = value % 8
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            found[key] = min(size or value, value)
        elif value is None and filled and size and re.search("expert|group|moe", key):
            found[key] = size
    return found | {key: value for key, value in repair.items() if key in settings}


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of single bytes."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(["<s>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<s>").save_pretrained(folder)


def compressed(source: Path, output: Path, method: str, row: dict) -> float:
    """How far the result's streamed logits are from transformers' own with the decoded weights.

    Notes in `row` the share of the blocks' parameters that was quantized.
    """
    from quantkit.options import CalibrationOptions, RunOptions
    from quantkit.quantize import job, loop, methods
    from quantkit.quantize.progress import Progress

    text = output.parent / "text"
    text.write_text(
        "\n".join(f"{k * k} sheep, {k} dogs and the letter {chr(65 + k % 26)}." for k in range(99))
    )
    options = {"group_size": GROUP} if method in ("gptq", "awq") else {}
    request = job.Request(
        str(source), method, methods.load(method).Options(**options),
        CalibrationOptions(calibration=str(text), samples=4, seqlen=TOKENS), RunOptions(threads=1), output,
    )  # fmt: skip
    prepared = job.prepare(request, Progress())
    skeleton = prepared.skeleton
    inside = sum(parameter.numel() for block in skeleton.blocks for parameter in block.parameters())
    row["share"] = sum(spec.weights for spec in prepared.specs if not spec.kept) / inside
    loop.run(prepared, Progress())
    conv1d = {f"{spec.name}.weight" for spec in prepared.specs if spec.conv1d}
    return difference(output, decoded(output, source, conv1d))


def decoded(folder: Path, source: Path, conv1d: set[str]):
    """transformers' model of `source`, with the weights that a quantized checkpoint holds. conv1d: names of
    those that are stored `[in, out]`."""
    import torch
    import transformers
    from safetensors.torch import save_file

    from quantkit.models.open import open_checkpoint

    checkpoint, dense = open_checkpoint(str(folder)), folder.parent / f"{folder.name}-dense"
    dense.mkdir()
    (dense / "config.json").write_text((source / "config.json").read_text())
    tensors = {}
    for name in open_checkpoint(str(source)).names:
        tensor = checkpoint.read(name, torch.float32)
        turned = name in conv1d and checkpoint.is_quantized(name)
        tensors[name] = (tensor.t() if turned else tensor).contiguous()
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()


def difference(folder: Path, model) -> float:
    """The largest difference of logits: streamed through the blocks of `folder`, and `model`'s own."""
    import torch

    from quantkit.models.open import open_checkpoint
    from quantkit.models.skeleton import Skeleton
    from quantkit.quantize import walk

    skeleton = Skeleton(open_checkpoint(str(folder)), torch.float32, torch.device("cpu"))
    skeleton.names.check_complete()
    skeleton.load_rest()
    ids = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    (hidden,) = walk.through(skeleton, [ids])
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
    return max(
        (skeleton.logits(row) - other).abs().max().item() for row, other in zip(hidden, want, strict=True)
    )


def said(error: Exception) -> str:
    """`KeyError: 'x'`, on one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def line(row: dict) -> str:
    share = f"{row['share']:.0%}" if "share" in row else ""
    return f"{row['family']:28} {row['status']:10} {share:5} {row['reason']}".rstrip()


def total(rows: list[dict]) -> str:
    """How many of those that could be built are taken."""
    made = [row for row in rows if row["status"] != "not built"]
    taken = [row for row in made if row["status"] == "taken"]
    return f"\n{len(taken)} of {len(made)} taken; {len(rows) - len(made)} of {len(rows)} could not be built"


if __name__ == "__main__":
    main()
