"""Models with towers of other modalities, and with heads that transformers does not build."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers as hf
from blocks import open_skeleton, streamed
from families import GROUPED, save_tokenizer
from nights import by_day, nightly
from safetensors.torch import load_file, save_file

from quantkit.errors import UNSUPPORTED
from quantkit.inspection.record import describe
from quantkit.models.files.headers import open_contents
from quantkit.models.skeleton.names import CopiedModule, copied_modules

HEADS = {**GROUPED, "head_dim": 16}
VISION = {  # as deep as the language model
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
VISUAL = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
}
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3]}
TOKENS = {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502}
WRAPPERS = {  # name -> (configuration class, its arguments)
    "gemma3": (
        hf.Gemma3Config,
        {
            "text_config": {
                **HEADS,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
            "image_token_index": 500,
        },
    ),
    "llava": (
        hf.LlavaConfig,
        {
            "text_config": {**GROUPED, "model_type": "llama"},
            "vision_config": {**VISION, "model_type": "clip_vision_model"},
            "image_token_index": 500,
        },
    ),
    "qwen2_5_vl": (
        hf.Qwen2_5_VLConfig,
        {"text_config": {**GROUPED, "rope_parameters": ROPE}, "vision_config": VISUAL, **TOKENS},
    ),
    "qwen3_vl": (
        hf.Qwen3VLConfig,
        {
            "text_config": {**HEADS, "rope_parameters": ROPE},
            "vision_config": {**VISUAL, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            **TOKENS,
        },
    ),
    "idefics3": (  # asks for the model's device, which is not that of its towers
        hf.Idefics3Config,
        {
            "text_config": {**GROUPED, "model_type": "llama"},
            "vision_config": VISION,
            "image_token_id": 500,
            "scale_factor": 2,
        },
    ),
}
LLAVA = (
    "language_model.model.layers.",
    {name: (name, f"model.{name}") for name in ("multi_modal_projector", "vision_tower")},
)
IDEFICS = {f"model.{name}": (f"model.{name}", name) for name in ("connector", "vision_model")}
TOWER = {  # root of the blocks; what lies beside, and is called
    "gemma3": LLAVA,
    "llava": LLAVA,
    "qwen2_5_vl": ("model.layers.", {"visual": ("visual", "model.visual")}),
    "qwen3_vl": ("model.language_model.layers.", {"model.visual": ("model.visual", "visual")}),
    "idefics3": ("model.text_model.layers.", IDEFICS),
}
TEXT = " ".join(f"the {k} foxes of {k * k} ran {k % 7} miles" for k in range(400))


def save(folder: Path, family: str, dtype: str = "float32") -> Path:
    """A random wrapper with a tokenizer."""
    make, arguments = WRAPPERS[family]
    torch.manual_seed(0)
    model = hf.AutoModelForImageTextToText.from_config(make(**arguments), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.05)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return save_tokenizer(folder)


def add_heads(folder: Path) -> set[str]:
    """Prediction heads of two spellings, one of them like a further block; their names."""
    tensors = load_file(folder / "model.safetensors")
    blocks = next(name for name in tensors if ".layers.0." in name and "vision" not in name).split("0.")[0]
    like = [name for name in tensors if name.startswith(f"{blocks}2.")]
    heads = {name.replace(f"{blocks}2.", f"{blocks}3."): tensors[name].flip(0) for name in like}
    heads |= {"mtp.fc.weight": torch.randn(64, 128), "mtp.layers.0.mlp.up_proj.weight": torch.randn(128, 64)}
    save_file(tensors | heads, folder / "model.safetensors", metadata={"format": "pt"})
    return set(heads)


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("family", by_day(WRAPPERS, ["gemma3", "llava", "qwen2_5_vl"]))
def test_streamed_logits_are_the_wrappers_own(tmp_path, family):
    folder = save(tmp_path / family, family)
    ids = torch.randint(1, 480, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = hf.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(streamed(open_skeleton(folder), ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", WRAPPERS)
def test_what_lies_beside_the_language_model_is_found_and_not_loaded(tmp_path, family):
    skeleton = open_skeleton(save(tmp_path / family, family))
    blocks, known = TOWER[family]
    assert skeleton.names.stored_of(0, "mlp.down_proj.weight").startswith(f"{blocks}0.")
    found = copied_modules(skeleton.model, skeleton.names, skeleton.checkpoint)
    assert {module.name: module.spellings for module in found} == known
    tensors = all_tensors(tmp_path / family)
    assert [module.nbytes for module in found] == [
        sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith(f"{module.name}."))
        for module in found
    ]
    held = skeleton.stored_parameters()
    inside = [name for name in held if skeleton.names.in_tower(name)]
    assert inside and all(held[name].is_meta for name in inside)


@pytest.mark.parametrize("family", ["gemma3", *nightly("qwen2_5_vl")])
@pytest.mark.parametrize(
    ("command", "key"),
    [
        (("gptq", "--group-size", "32", "--transform", "none", "--refine", "0"), "dynamic"),
        *nightly(
            (("nf4",), "llm_int8_skip_modules"),
            (("awq", "--group-size", "32"), "modules_to_not_convert"),
            (("gptq", "--group-size", "32", "--layout", "compressed-tensors"), "ignore"),
            (("int8",), "llm_int8_skip_modules"),
        ),
    ],
)
def test_towers_keep_their_bytes_and_the_configuration_spares_them(quantkit, tmp_path, family, command, key):
    folder = save(tmp_path / family, family)
    (tmp_path / "text.txt").write_text(TEXT)
    calibrated = ("--calibration", "text.txt", "--samples", 4, "--seqlen", 64)
    extra = calibrated if command[0] in ("gptq", "awq") else ()
    done = quantkit(command[0], folder, *command[1:], *extra, "-o", "out")
    assert done.code == 0, done.err
    blocks, known = TOWER[family]
    before, after = all_tensors(folder), all_tensors(tmp_path / "out")
    kept = [name for name in before if not name.startswith(blocks)]
    assert all(torch.equal(before[name], after[name]) for name in kept)
    packed = re.escape(f"{blocks}0.mlp.up_proj.")
    assert any(re.match(packed, name) for name in after.keys() - before.keys())
    made, source = (json.loads((at / "config.json").read_text()) for at in (tmp_path / "out", folder))
    quantization = made.pop("quantization_config")
    assert made == source and "vision_config" in made
    patterns = list(quantization[key])
    for name in (name for names in known.values() for name in names):
        assert any(name in pattern.replace("\\", "") for pattern in patterns)
    assert not any("mlp" in pattern for pattern in patterns)
    assert list(json.loads((tmp_path / "out" / "quantkit.json").read_text())["copied"]) == list(known)
    assert f"copying byte for byte: {', '.join(known)}" in done.err
    evaluated = quantkit("eval", folder, "out", "--text", "text.txt", "--json", "-q")
    assert evaluated.code == 0, evaluated.err


@pytest.mark.parametrize("wrapped", [True, *nightly(False)])
def test_prediction_heads_keep_their_bytes(quantkit, tmp_path, tiny_model, wrapped):
    folder = save(tmp_path / "wrapper", "gemma3") if wrapped else tiny_model("llama", tokenizer=True)
    heads = add_heads(folder)
    done = quantkit("nf4", folder, "-o", "out")
    assert done.code == 0, done.err
    further = "language_model.model.layers.3" if wrapped else "model.layers.3"
    assert further in done.err and "mtp" in done.err
    before, after = all_tensors(folder), all_tensors(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) for name in heads)
    skipped = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    spared = [name for names in TOWER["gemma3"][1].values() for name in names] if wrapped else []
    assert sorted(skipped["llm_int8_skip_modules"]) == sorted([*spared, further, "mtp", "lm_head"])
    assert "`mtp` (0.07 MB)" in (tmp_path / "out" / "README.md").read_text()


def test_a_model_of_text_alone_has_nothing_beside(tiny_model):
    for family in ("gpt2", "llama", "gemma3"):
        skeleton = open_skeleton(tiny_model(family))
        assert copied_modules(skeleton.model, skeleton.names, skeleton.checkpoint) == []


def test_a_stale_buffer_is_no_module(tiny_model):
    folder = tiny_model("llama")
    tensors = load_file(folder / "model.safetensors")
    stale = {"model.rotary_emb.inv_freq": torch.ones(8), "model.layers.0.attn.weight": torch.ones(2, 2)}
    value_head = {"v_head.summary.weight": torch.ones(1, 64)}
    save_file(tensors | stale | value_head, folder / "model.safetensors", metadata={"format": "pt"})
    skeleton = open_skeleton(folder)
    found = copied_modules(skeleton.model, skeleton.names, skeleton.checkpoint)
    assert found == [CopiedModule("v_head", ("v_head",), 256)]


def test_generate_speaks_through_the_language_model(quantkit, tmp_path):
    folder = save(tmp_path / "gemma3", "gemma3")
    done = quantkit("generate", folder, "-p", "the foxes", "-n", 4, "--json", "-q")
    assert done.code == 0, done.err
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    model = hf.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer("the foxes", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    (made,) = json.loads(done.out)["models"]
    assert made["ids"] == expected.tolist()


@pytest.mark.parametrize("kind", [hf.CLIPConfig, hf.ViTConfig])
def test_a_model_without_a_language_model_is_refused(quantkit, tmp_path, tiny_model, kind):
    folder = tiny_model("llama")
    kind(num_hidden_layers=1).save_pretrained(folder)
    done = quantkit("nf4", folder, "-o", "out")
    assert done.code == UNSUPPORTED and not (tmp_path / "out").exists()
    assert (
        "is not a causal language model" in done.err and "hint: " in done.err and "Traceback" not in done.err
    )


def test_names_of_towers_match_nothing_of_the_language_model(tmp_path):
    """Clients take them for beginnings: `model` would spare all of it."""
    folder = save(tmp_path / "gemma3", "gemma3")
    tensors = load_file(folder / "model.safetensors")
    further = {"model.audio.weight": torch.ones(2, 2), "mlp.fc.weight": torch.ones(2, 2)}
    save_file(tensors | further, folder / "model.safetensors", metadata={"format": "pt"})
    skeleton = open_skeleton(folder)
    found = copied_modules(skeleton.model, skeleton.names, skeleton.checkpoint)
    assert {module.name: module.spellings for module in found} == {
        **TOWER["gemma3"][1],
        "mlp": ("mlp",),
        "model.audio": ("model.audio", "audio"),
    }


def test_bits_of_the_whole_model_count_the_towers(quantkit, tmp_path):
    folder = save(tmp_path / "gemma3", "gemma3")
    (tmp_path / "text.txt").write_text(TEXT)
    done = quantkit("eval", folder, "--text", "text.txt", "--json", "-q")
    assert done.code == 0, done.err
    (measured,) = json.loads(done.out)["models"]
    assert measured["size"]["bits_per_weight"] == 32


@pytest.mark.parametrize("family", ["gemma3", *nightly("qwen2_5_vl", "qwen3_vl")])
def test_transformers_loads_nf4_of_the_language_model_alone(quantkit, tmp_path, family):
    pytest.importorskip("bitsandbytes")
    folder = save(tmp_path / family, family)
    assert quantkit("nf4", folder, "-o", "out").code == 0
    model = hf.AutoModelForImageTextToText.from_pretrained(tmp_path / "out", device_map="cpu")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    packed = {name for name, module in linears.items() if type(module).__name__ == "Linear4bit"}
    assert packed == {name for name in linears if ".language_model.layers." in name}
    ids = torch.randint(1, 480, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids).logits.float()
    torch.testing.assert_close(logits, streamed(open_skeleton(tmp_path / "out"), ids), atol=0.1, rtol=0)


def test_inspect_tells_blocks_of_towers_from_the_language_models(tmp_path):
    """Both have blocks 0 to 2 with a self_attn.q_proj."""
    folder = save(tmp_path / "llava", "llava")
    record = describe(open_contents(str(folder)))
    rows, tensors = record["tensors"], all_tensors(folder)
    named = {row["name"]: row for row in rows if "q_proj.weight" in row["name"]}
    assert {name: (row["blocks"], row["shape"], row["count"]) for name, row in named.items()} == {
        "self_attn.q_proj.weight": ([0, 1, 2], [64, 64], 3),
        "vision_tower.encoder.layers.*.self_attn.q_proj.weight": ([0, 1, 2], [32, 32], 3),
    }
    towers = [place for place, row in enumerate(rows) if "vision_tower" in row["name"] and row["blocks"]]
    assert min(towers) > max(k for k, row in enumerate(rows) if row["name"].startswith("mlp."))
    assert sum(row["bytes"] for row in rows) == sum(tensor.nbytes for tensor in tensors.values())
    assert not record["model"]["tied"]


def test_a_dry_run_lists_what_is_copied_with_its_bytes(quantkit, tmp_path):
    folder = save(tmp_path / "gemma3", "gemma3")
    heads, tensors = add_heads(folder), all_tensors(folder)
    planned = quantkit("nf4", folder, "--dry-run", "--json", "-q")
    further, known = "language_model.model.layers.3", TOWER["gemma3"][1]
    assert json.loads(planned.out)["copied"] == {
        name: sum(tensor.nbytes for key, tensor in tensors.items() if key.startswith(f"{name}."))
        for name in (further, "mtp", *known)
    }
    assert {name.partition(".")[0] for name in heads} == {"language_model", "mtp"}
    (line,) = [line for line in quantkit("nf4", folder, "--dry-run").out.splitlines() if "copied" in line]
    assert line == (
        "copied       language_model.model.layers.3 (0.15 MB), mtp (65.54 kB), multi_modal_projector "
        "(8.32 kB), vision_tower (0.21 MB): byte for byte"
    )
