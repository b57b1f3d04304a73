"""Which of transformers' families quantkit takes: every causal LM and every wrapper, as a tiny random model.

    python scripts/families.py [--only REGEX] [--methods nf4 gptq] [--dtype bfloat16]
        [--json FILE] [--seconds 120]

For every model type of transformers' causal-LM and multimodal mappings: shrinks its default configuration,
saves a random model, runs the methods on it, and compares the logits of the source and of each result,
streamed block by block, with those of transformers' own forward on the same weights, and what `eval` finds
with transformers' own log-likelihood. Prints what was taken, refused with the reason, or could not be built,
and the share of the blocks' parameters that was quantized. Models that are an encoder and a decoder are out
of quantkit's scope, and counted apart. One family after another, each in a process of its own: a crash or a
hang costs that family alone. With --json, rows that FILE has already are not made again.

There is no table of architectures: a rule of `SIZES` serves every family that has such a setting. Where the
settings do not fit together then, repairs are tried one after another. `SPECIAL` names what no rule finds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import tempfile
from pathlib import Path

# Of logits. In bfloat16 they differ by a unit in the last place, 0.008 for logits of these models.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
GROUP = 16
TOKENS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX")
    parser.add_argument("--methods", nargs="*", default=["gptq", "awq", "nf4"])
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32", help="that quantkit computes in")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep rows here, and go on from them")
    parser.add_argument("--seconds", type=float, default=120, help="that a family may take")
    args = parser.parse_args()

    import torch

    import quantkit.evaluation.evaluate
    import quantkit.quantize.loop  # noqa: F401  what every process needs is loaded once

    torch.set_num_threads(1)
    rows = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    known = {row["family"] for row in rows}
    for family, kind in families().items():
        if family in known or not args.only.search(family):
            continue
        rows.append({"kind": kind} | isolated(family, args.methods, args.dtype, args.seconds))
        print(line(rows[-1]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))
    print(total(rows))


def isolated(family: str, methods: list[str], dtype: str, seconds: float) -> dict:
    """Return the row of one family, examined in a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=lambda: theirs.send(examined(family, methods, dtype)))
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


def examined(family: str, methods: list[str], dtype: str = "float32") -> dict:
    """Return whether a family could be built and is taken, and the largest differences of logits."""
    import transformers

    from quantkit.errors import QuantkitError

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    row, refusals = {"family": family}, []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        try:
            if encodes(family):
                return row | {"status": "no decoder", "reason": "an encoder and a decoder"}
            model = built(family)
            model.save_pretrained(source)
            save_tokenizer(source)
            model = reference(source, model, dtype)
        except Exception as error:
            return row | {"status": "not built", "reason": said(error)}
        try:
            row["source"] = difference(source, model, dtype)
            row["eval"] = evaluated(source, model, dtype)
            for method in methods:
                try:
                    row[method] = compressed(source, Path(folder) / method, method, model, row, dtype)
                except QuantkitError as error:  # of its layout, say
                    refusals.append(f"{method}: {error.message}")
        except QuantkitError as error:
            return row | {"status": "refused", "reason": error.message}
        except Exception as error:
            return row | {"status": "crashed", "reason": said(error)}
    worst = max(row[what] for what in ("source", "eval", *methods) if what in row)
    if not worst <= TOLERANCE[dtype]:
        return row | {"status": "wrong", "reason": f"logits differ by {worst:.2g}"}
    taken = len(refusals) < len(methods) or not methods
    return row | {"status": "taken" if taken else "refused", "reason": "; ".join(refusals)}


def reference(source: Path, model, dtype: str):
    """Return transformers' model in `dtype`, or `model` in float32 if transformers cannot run it so."""
    import torch

    if dtype == "float32":
        return model
    lower = type(model).from_pretrained(source, dtype=dtype).eval()
    try:
        with torch.no_grad():
            lower(input_ids=ids(), use_cache=False)
    except RuntimeError:
        return model
    return lower


def encodes(family: str) -> bool:
    """Whether a family is an encoder with a decoder. Of those that are registered as causal LMs, too,
    transformers builds the decoder alone."""
    import transformers

    config = transformers.CONFIG_MAPPING[family]()
    text = config.get_text_config(decoder=True)
    composite = families()[family] == "wrapper" or config.sub_configs
    return bool(composite and (config.is_encoder_decoder or text.is_encoder_decoder))


def compressed(source: Path, output: Path, method: str, model, row: dict, dtype: str) -> float:
    """How far the result's streamed logits are from transformers' own with the decoded weights, which `model`
    has then.

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
        str(source), methods.create(method, **options),
        CalibrationOptions(calibration=str(text), samples=4, seqlen=TOKENS), 
        RunOptions(threads=1, allow_unread=True, dtype=dtype), output=output,
    )  # fmt: skip
    prepared = job.prepare(request, Progress())
    skeleton = prepared.skeleton
    inside = sum(parameter.numel() for block in skeleton.blocks for parameter in block.parameters())
    row["share"] = sum(spec.weights for spec in prepared.specs if not spec.kept) / inside
    loop.run([prepared], Progress())
    return difference(output, decoded(output, model), dtype)


def opened(folder: Path, dtype: str = "float32"):
    """Return the checkpoint as quantkit streams it; everything but the blocks is loaded."""
    import torch

    from quantkit.models.files.open import open_checkpoint
    from quantkit.models.skeleton import Skeleton

    skeleton = Skeleton(open_checkpoint(str(folder)), getattr(torch, dtype), torch.device("cpu"))
    skeleton.names.check_complete()
    skeleton.load_rest()
    return skeleton


def decoded(folder: Path, model):
    """Return transformers' `model` with the decoded weights of a quantized checkpoint."""
    import torch

    from quantkit.models.skeleton.fused import fused_layers

    skeleton = opened(folder)
    names, state = skeleton.names, model.state_dict()
    fused = {}  # an expert's tensor by its name -> the part of the parameter of all experts
    for layer in fused_layers(model):
        for parameter, part, outputs in layer.parts():
            for expert, matrix in enumerate(state[f"{layer.path}.{parameter}"]):
                turned = matrix.t() if layer.transposed and matrix.ndim == 2 else matrix
                fused[f"{layer.path}.{expert}.{part}"] = turned[outputs]
    for name in names.shapes:
        if not names.in_tower(name) and (name in names.stored or name in names.joined):
            place = fused[name] if name in fused else state[name]
            shape = place.shape[::-1] if name in names.transposed else place.shape
            values = skeleton.read(name, torch.empty(shape, dtype=torch.float32))
            place.copy_(values.t() if name in names.transposed else values)
    return model


def difference(folder: Path, model, dtype: str) -> float:
    """Return the largest difference between logits streamed through the blocks of `folder` and `model`'s."""
    import torch

    from quantkit.quantize.calibrate import walk

    skeleton = opened(folder, dtype)
    (hidden,) = walk.through(skeleton, [ids()])
    with torch.no_grad():
        want = model(input_ids=ids(), use_cache=False).logits
    return max(
        (skeleton.logits(row) - other).abs().max().item() for row, other in zip(hidden, want, strict=True)
    )


def evaluated(folder: Path, model, dtype: str) -> float:
    """Return the difference between the log-likelihoods per token of `eval` and of `model`."""
    import torch

    from quantkit.evaluation.evaluate import evaluate
    from quantkit.evaluation.windows import Protocol, Windows
    from quantkit.models.files.open import open_checkpoint

    tokens = len(ids()) * (TOKENS - 1)
    protocol = Protocol("random", "", tokens, TOKENS, TOKENS, False, "")
    windows = Windows(ids(), [0] * len(ids()), protocol)
    found = evaluate([open_checkpoint(str(folder))], windows, getattr(torch, dtype), torch.device("cpu"))
    with torch.no_grad():
        logits = model(input_ids=ids(), use_cache=False).logits[:, :-1].flatten(0, 1)
    want = torch.nn.functional.cross_entropy(logits, ids()[:, 1:].flatten())
    return abs(found["models"][0]["metrics"]["nll"]["value"] - want.item())


def ids():
    """Return two sequences without special tokens."""
    import torch

    return torch.randint(8, 256, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def said(error: Exception) -> str:
    """Return an error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def line(row: dict) -> str:
    share = f"{row['share']:.0%}" if "share" in row else ""
    return f"{row['kind']:8} {row['family']:26} {row['status']:10} {share:5} {row['reason']}".rstrip()


def total(rows: list[dict]) -> str:
    """Return how many families were built and taken, by kind, and the refusals with their reasons."""
    lines = [""]
    for kind in sorted({row["kind"] for row in rows}):
        of_kind = [row for row in rows if row["kind"] == kind and row["status"] != "no decoder"]
        made = [row for row in of_kind if row["status"] != "not built"]
        taken = [row for row in made if row["status"] == "taken"]
        lines.append(
            f"{kind}: {len(of_kind)} families, {len(made)} built, {len(taken)} taken, "
            f"{sum(not row['reason'] for row in taken)} of them by every method"
        )
    lines += [line(row) for row in rows if row["status"] not in ("taken", "no decoder", "not built")]
    return "\n".join(lines)


# Tiny random models of all families

VOCABULARY, HEAD = 512, 16
WEIGHTS = 12_000_000  # of a tiny model
SIZES = [  # (what a setting's name matches, its value); the first counts
    (r"\w*vocab(_size\w*)?|num_embeddings|codebook_size", VOCABULARY),
    (r"n_embd|dim|d_model|emb_dim|embedding_size|lru_width|output_proj_dims|hidden_size_per_layer_input", 64),
    (r"num_key_value_heads|num_kv_heads|n_head_kv|linear_num_key_heads|\w+_key_value_heads", 2),
    (r"mamba_n_heads|mamba_num_heads|\w*linear_num_value_heads", 8),
    (r"num_attention_heads|num_heads|n_heads?|\w+_num_heads|\w+_n_heads?|\w+_attention_heads", 4),
    (r"rotary_dim|qk_rope_head_dim", 16),
    (r"head_dim|mamba_d_head|mamba_headdim|kv_channels|head_size|\w+_head_dim|d_head", 16),
    (r"(\w*intermediate_size\w*|ffn_dim|n_inner|d_ff|\w*ffn_hidden_size|mamba_d_ssm)", 128),
    (r"time_step_rank|mamba_dt_rank", 8),
    (r"base_channels", 32),
    (r"\w*(hidden|embed(ding)?|output|input|model|proj|projection|projector|adapter|attn|bottleneck)_?"
     r"(size|dim)|\w*(_rank|low_rank\w*)", 64),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|num_selected_experts|top_k_experts|top_?k|(moe|num)_(top_?)?k", 2),
    (r"n_groups?|num_expert_group|topk_group|mamba_n_groups|first_k_dense_replace|n_shared_experts", 1),
    (r"state_size|mamba_d_state|ssm_state_size", 16),
    (r"attn_layer_period|expert_layer_period", 2),
    (r"attn_layer_offset|expert_layer_offset", 1),
    (r"chunk_size|mamba_chunk_size", 16),
    (r"max_position_embeddings|n_positions|max_seq_len|max_sequence_length", 256),
    (r"sliding_window|attention_window_size|attention_chunk_size", 16),
]  # fmt: skip
DEPTH = r"num_hidden_layers|n_layers?|num_layers|decoder_layers|encoder_layers|depth|num_blocks"
SHARED = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
          "num_kv_shared_layers": 2}  # fmt: skip
SPECIAL = {  # settings that no rule finds, by model type
    "cohere_compass_text": {"rope_parameters": {
        kind: {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [4, 2, 2]}
        for kind in ("full_attention", "sliding_attention")}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "emu3": {"vocabulary_map": {"<|extra_200|>": 3, "<image>": 4}},
    "gemma3n_text": SHARED | {"activation_sparsity_pattern": [0.5, 0.0] * 2, "intermediate_size": 128},
    "gemma4_text": SHARED,
    "gemma4_unified_text": SHARED,
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "granite4_vision": {"deepstack_layer_map": [], "spatial_target_layers": [], "downsample_rate": "1/2"},
    "hunyuan_vl_text": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 16, "qk_head_dim": 32},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
                       "indexer_budget": 8, "indexer_compress_ratio": 4},
    "reformer": {"axial_pos_embds": False},
    "step3p5": {"sliding_window": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2,
              "attention_hidden_size": 128},
}  # fmt: skip
REPAIRS = (  # tried one after another where a configuration does not fit together
    {}, {"num_heads": 8}, {"num_key_value_heads": 4}, {"head_dim": 32}, {"head_dim": 64, "num_heads": 2},
    {"rope_parameters": None}, {"rope_scaling": None}, {"num_attention_heads": 2},
    {"sections": [4, 2, 2]}, {"sections": [2, 1, 1]}, {"fill": True}, {"head_dim": 8}, {"blocks": 4},
    {"blocks": 8}, {"mamba_d_head": 16},
)  # fmt: skip
OTHER_INPUTS = r"pixel_values|image_embed|inputs_embeds|positional argument"  # models that do not run on text


def families() -> dict[str, str]:
    """Model type -> `text` or `wrapper`, which holds a language model beside other things."""
    from transformers.models.auto import modeling_auto as auto

    wrappers = dict.fromkeys(auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, "wrapper")
    return dict.fromkeys(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "text") | wrappers


def built(family: str):
    """Return a random model without default values of parameters.

    Tries one repair after another until the settings fit together; raises what was wrong first.
    """
    import torch
    import transformers

    make = transformers.CONFIG_MAPPING[family]
    kind = "MultimodalLM" if families()[family] == "wrapper" else "CausalLM"
    auto = getattr(transformers, f"AutoModelFor{kind}")
    first, model = None, None
    for repair in REPAIRS:
        torch.manual_seed(0)
        try:
            config = make(**shrunk(make(), repair))
            with torch.device("meta"):
                check_tiny(auto.from_config(config))
            model = auto.from_config(config, dtype=torch.float32).eval()
            with torch.no_grad():
                model(input_ids=torch.arange(TOKENS)[None] + 8, use_cache=False)
            break
        except Exception as error:
            first = first or error
    else:
        if model is None or not re.search(OTHER_INPUTS, str(first)):
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
    """Return settings that make a model of `config`'s kind tiny, with those of sub-configurations."""
    settings = config.to_dict()
    depth = next((settings[key] for key in settings if re.fullmatch(DEPTH, key)), 2)
    kinds = [value for value in settings.values() if isinstance(value, list) and len(value) == depth]
    first = [kind.index(value) for kind in kinds for value in kind if isinstance(value, str)]
    blocks = repair.get("blocks") or min(max([2, *(index + 1 for index in first)]), 8)
    found = {}
    for key, value in settings.items():
        sub = vars(config).get(key)
        if hasattr(sub, "to_dict"):
            found[key] = {"model_type": sub.model_type} | shrunk(sub, repair)
        elif re.fullmatch(DEPTH, key):
            found[key] = min(blocks, value) if isinstance(value, int) else value
        elif isinstance(value, list) and len(value) == depth and depth > 2:
            found[key] = value[:blocks]
        else:
            found |= smaller(key, value, bool(repair.get("fill")))
    if "qk_nope_head_dim" in settings:  # the others follow from it
        found = {key: value for key, value in found.items() if key not in ("head_dim", "qk_head_dim")}
        found["num_key_value_heads"] = 4
    if repair.get("sections") and isinstance(settings.get("rope_parameters"), dict):
        found["rope_parameters"] = settings["rope_parameters"] | {"mrope_section": repair["sections"]}
    return (
        found
        | {key: value for key, value in repair.items() if key in settings}
        | SPECIAL.get(config.model_type, {})
    )


def smaller(key: str, value, filled: bool) -> dict:
    """Return a setting with a value for a tiny model, nothing if the default does."""
    size = next((size for pattern, size in SIZES if re.fullmatch(pattern, key)), None)
    if key == "is_decoder":
        return {key: True}
    if isinstance(value, dict) and (sections := value.get("mrope_section")):
        last = [HEAD // 2 * part // sum(sections) for part in sections[1:]]
        return {key: value | {"mrope_section": [HEAD // 2 - sum(last), *last]}}
    if re.search(r"feature_layers?$|layer_ind|visual_indexes$", key) and isinstance(value, (list, int)):
        return {key: [0] if isinstance(value, list) else min(value, 0)}
    if not isinstance(value, int) or isinstance(value, bool):
        return (
            {key: size}
            if value is None and filled and size and re.search("expert|group|moe|head_dim", key)
            else {}
        )
    if key.endswith(("token_id", "token_index")):
        return {key: value % 8}
    return {key: min(size or value, value)} if value > 0 else {}


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of single bytes."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(["<s>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<s>").save_pretrained(folder)


if __name__ == "__main__":
    main()
