"""A downloaded checkpoint is not believed: it names no code to run, and no file outside its folder."""

import json
import shutil

import jobs
import pytest
import test_wrappers
import torch
from nights import nightly
from transformers.integrations import hub_kernels

from quantkit.errors import QuantkitError
from quantkit.models.files.open import open_checkpoint
from quantkit.models.skeleton.meta_model import empty
from quantkit.serving.engines import transformers as engine
from quantkit.serving.settings import LocalOptions

KERNEL = "some-org/some-kernel"


def edit(folder, change) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("value", [KERNEL, {"": KERNEL}, "flash_attention_2", "paged|sdpa"])
@pytest.mark.parametrize("key", ["attn_implementation", "experts_implementation"])
def test_a_configuration_names_no_kernels(tiny_model, key, value):
    folder = tiny_model("mixtral")
    plain = empty(open_checkpoint(str(folder)).config, "plain").config
    edit(folder, lambda config: config.update({key: value}))
    found = empty(open_checkpoint(str(folder)).config, "changed").config
    for name in ("_attn_implementation", "_experts_implementation"):
        assert getattr(found, name) == getattr(plain, name) in ("sdpa", "eager", "grouped_mm", "batched_mm")


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("layout", ["nf4", *nightly("int8")])
def test_nor_where_transformers_loads_packed_weights(make, tiny_model, tmp_path, monkeypatch, layout, key):
    pytest.importorskip("bitsandbytes")
    folder, asked = tmp_path / "packed", []
    make(layout, tiny_model("llama", num_hidden_layers=1), "-o", folder)

    def load(checkpoint):
        return engine.load(checkpoint, LocalOptions("float32"), 8)[1]

    plain = load(open_checkpoint(str(folder)))
    for name in ("get_kernel", "load_and_register_attn_kernel"):
        monkeypatch.setattr(hub_kernels, name, lambda *args, **_: asked.append(args))
    edit(folder, lambda config: config.update({key: KERNEL}))
    found = load(open_checkpoint(str(folder)))
    assert asked == []
    assert (found.kernels, found.packed, found.note) == (plain.kernels, plain.packed, plain.note)
    assert found.attention == plain.attention == "sdpa"


def test_nor_does_that_of_a_part(tmp_path):
    folder = test_wrappers.save(tmp_path / "model", next(iter(test_wrappers.WRAPPERS)))
    edit(folder, lambda config: config["text_config"].update(attn_implementation=KERNEL))
    assert open_checkpoint(str(folder)).text_config._attn_implementation in (None, "sdpa", "eager")


def test_outputs_that_nobody_asked_for_are_not_made(tiny_model, quantkit):
    folder = tiny_model("llama", tokenizer=True)
    (folder.parent / "text.txt").write_text(test_wrappers.TEXT)
    edit(folder, lambda config: config.update(output_attentions=True, output_hidden_states=True))
    done = quantkit("eval", folder, "--text", "text.txt", "--limit", 64, "--ctx", 32, "--json", "-q")
    assert done.code == 0, done.err


@pytest.mark.parametrize("name", ["LICENSE", "x.safetensors", "additional_chat_templates/tool.jinja"])
def test_links_out_of_the_folder_are_refused(tiny_model, tmp_path, name):
    folder = tiny_model("llama", tokenizer=True)
    secret = tmp_path / "secret"
    secret.write_text("root:x:0:0")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(secret)
    with pytest.raises(QuantkitError, match=f"links that lead out of it: {name}"):
        open_checkpoint(str(folder))


def test_links_inside_the_folder_and_to_the_cache_are_followed(tiny_model, tmp_path):
    """As the hub's cache has them: snapshots/COMMIT/NAME leads to blobs/HASH."""
    folder = tiny_model("llama", tokenizer=True)
    (folder / "NOTICE").write_text("as it is")
    (folder / "LICENSE").symlink_to("NOTICE")
    open_checkpoint(str(folder))
    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / "0123"
    (cache / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for place, path in enumerate(sorted(folder.iterdir())):
        (cache / "blobs" / str(place)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{place}")
    found = open_checkpoint(str(snapshot))
    assert torch.equal(
        found.read("model.norm.weight", torch.float32), jobs.tensors(folder)["model.norm.weight"].float()
    )


def test_a_link_of_a_folder_inside_a_snapshot_leads_to_the_cache(tiny_model, tmp_path):
    """Some repositories hold several models; a user may name the folder of one."""
    folder, cache = tiny_model("llama", tokenizer=True), tmp_path / "models--org--name"
    inside = cache / "snapshots" / "0123" / "model"
    inside.mkdir(parents=True)
    shutil.copytree(folder, cache / "blobs")
    for path in folder.iterdir():
        (inside / path.name).symlink_to(f"../../../blobs/{path.name}")
    assert open_checkpoint(str(inside)).names


def test_a_tokenizer_of_several_models_is_refused(tiny_model):
    folder = tiny_model("llama", tokenizer=True)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "RagTokenizer"}))
    with pytest.raises(QuantkitError, match="RagTokenizer is no tokenizer of a single model"):
        _ = open_checkpoint(str(folder)).tokenizer


def test_a_token_is_routed_to_no_more_experts_than_there_are(tiny_model):
    folder = tiny_model("mixtral")
    edit(folder, lambda config: config.update(num_experts_per_tok=100))
    with pytest.raises(QuantkitError, match="num_experts_per_tok 100 of 4 experts"):
        open_checkpoint(str(folder))
