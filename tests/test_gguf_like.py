"""`quantkit gguf --like FILE`: the types of another file, tensor by tensor.

`data/llama_quantize.gguf` is what llama-quantize made of zeros with `--tensor-type` (scripts/ggml.py like).
"""

import json
import shutil
from pathlib import Path

import jobs
import numpy as np
import pytest

from quantkit.models.files.gguf_file import read_header, tensor_bytes
from quantkit.models.files.gguf_writer import Entry, writing
from quantkit.quantize import loop

LIKE = Path(__file__).parent / "data" / "llama_quantize.gguf"
PLAIN = ["--transform", "none", "--refine", "0"]
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}


@pytest.fixture
def model(tiny_model) -> Path:
    return tiny_model("llama", tokenizer=True, tie_word_embeddings=True, **SIZES)


@pytest.fixture
def text(tmp_path) -> list:
    return ["--calibration", jobs.calibration(tmp_path).calibration, "--samples", "6", "--seqlen", "32"]


def tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Type, shape and bytes of every tensor."""
    return {name: (info.dtype, info.shape, info.nbytes) for name, info in read_header(path)[1].items()}


def changed(path: Path, types: dict[str, str | None], **shapes: tuple[int, ...]) -> Path:
    """A file of zeros like LIKE, with other types and shapes; a type of None leaves a tensor out."""
    entries = []
    for name, (kind, shape, _) in (tensors(LIKE) | {n: ("F32", (256,), 0) for n in types}).items():
        known = tensors(LIKE).get(name, (kind, shape))
        kind, shape = types.get(name, known[0]), shapes.get(name.split(".")[-2], known[1])
        entries += [Entry(name, kind, shape)] if kind else []
    with writing(path, {"general.file_type": "no number"}, entries) as write:
        for entry in entries:
            write(entry.name, [np.zeros(tensor_bytes(entry.type, entry.shape), np.uint8)])
    return path


def test_every_type_and_size_is_llama_quantize_s_with_less_loss(model, text, make, tmp_path):
    pytest.importorskip("xllamacpp", reason="llama.cpp is absent: pip install xllamacpp")
    from llama_cpp import Llama

    planned = make("gguf", model, "--like", LIKE, *text, "--dry-run")
    assert planned["output"] == "llama-like-llama_quantize.gguf"
    assert planned["plan"]["output_bytes"] == sum(nbytes for *_, nbytes in tensors(LIKE).values())
    made = make("gguf", model, "--like", LIKE, *text)
    out = tmp_path / made["output"]
    assert tensors(out) == tensors(LIKE)
    assert len({kind for kind, *_ in tensors(out).values()}) == 8
    metadata, _ = read_header(out)
    assert metadata["general.file_type"] == read_header(LIKE)[0]["general.file_type"]
    for row in json.loads(metadata["quantkit.manifest"])["linears"]:
        assert "grid" not in row or row["error"] < 0.9 * row["rtn_error"], row["name"]
    with Llama(out) as llama:
        assert np.isfinite(llama.logits(range(1, 20))).all()


@pytest.mark.nightly
def test_a_recipe_and_another_path_give_the_same_bytes_and_resume(
    model, text, make, refuse, tmp_path, monkeypatch
):
    recipe = {"method": "gguf", "model": str(model), "quant": {"like": str(LIKE)}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    make("run", "recipe.yaml", *text, "-o", "whole.gguf")
    moved = shutil.copy(LIKE, tmp_path / "moved.gguf")
    job = jobs.prepare(
        "gguf", model, tmp_path / "q.gguf", {"like": str(LIKE)}, calibration=jobs.calibration(tmp_path)
    )
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("quantkit.quantize.staging.folder.Staging.assemble", stop)
        loop.run([job], jobs.Listener())
    other = changed(tmp_path / "other.gguf", {"blk.0.attn_k.weight": "Q4_K"})
    error, _ = refuse(2, "gguf", model, "--like", other, *text, "-o", "q.gguf", "--resume", "--threads", "1")
    assert "different: --like (" in error and str(tmp_path / "other") not in error
    for _ in range(2):  # the second finds it finished
        make("gguf", model, "--like", moved, *text, "-o", "q.gguf", "--resume", "--threads", "1")
    files = [(tmp_path / name).read_bytes() for name in ("q.gguf", "whole.gguf")]
    assert read_header(tmp_path / "q.gguf")[1].keys() == tensors(LIKE).keys()
    assert files[0][-tensor_sum(LIKE) :] == files[1][-tensor_sum(LIKE) :]


def tensor_sum(path: Path) -> int:
    return sum(nbytes for *_, nbytes in tensors(path).values())


def stop(*_) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("types", "shapes", "words"),
    [
        (
            {"output.weight": "Q6_K", "blk.1.ffn_up.weight": None},
            {"ffn_gate": (256, 512), "attn_norm": (128,)},
            ["2 tensors cannot have", "output.weight (not in the model)", "blk.1.ffn_up.weight (not in odd"],
        ),
        ({"blk.0.attn_norm.weight": "Q8_0"}, {}, ["1 tensor cannot", "attn_norm.weight (1 columns are no"]),
        (
            {"blk.0.attn_k.weight": "IQ1_S", "blk.1.attn_k.weight": "IQ1_M"},
            {},
            ["reads but does not write: blk.0.attn_k.weight (IQ1_S), blk.1.attn_k.weight (IQ1_M)"],
        ),
        ({"blk.0.attn_k.weight": "TQ1_0"}, {}, ["does not support TQ1_0: blk.0.attn_k.weight"]),
        ({"blk.0.attn_k.weight": "NVFP4", "blk.0.attn_k.scale": "F32"}, {"attn_k": (1, 256)}, []),
    ],
)
def test_tensors_that_cannot_have_their_type_are_all_named(model, quantkit, tmp_path, types, shapes, words):
    odd = changed(tmp_path / "odd.gguf", types, **shapes)
    done = quantkit("gguf", model, "--like", odd.name, "--samples", "2", "--dry-run")
    assert done.code == (4 if words else 0) and all(word in done.err for word in words), done.err


def test_rows_that_no_block_divides_are_named(tiny_model, quantkit, tmp_path):
    model = tiny_model("llama", tokenizer=True, tie_word_embeddings=True, **SIZES | {"intermediate_size": 96})
    done = quantkit("gguf", model, "--like", LIKE, "--dry-run")
    assert (
        done.code == 4 and "2 tensors cannot have the requested type: blk.0.ffn_down.weight (96" in done.err
    )


def test_blocks_run_with_kept_linears_as_the_file_has_them(tiny_model, text, make, tmp_path):
    """The source has 32 bits. Without this, the verification would fail."""
    model = tiny_model("llama", tokenizer=True, **SIZES)
    make(
        "gguf", model, "--exclude", "q_proj", "--tensor-type", "attn_k=BF16", *text, *PLAIN, "-o", "out.gguf"
    )
    found = tensors(tmp_path / "out.gguf")
    assert [found[f"blk.1.attn_{name}.weight"][0] for name in "qkv"] == ["F16", "BF16", "Q6_K"]


def test_other_options_of_types_are_refused(model, refuse):
    words = ["gguf", model, "--like", LIKE, "-t", "Q8_0", "--output-tensor-type", "Q6_K"]
    error, hint = refuse(2, *words)
    assert error == "--like decides all types, not --type, --output-tensor-type"
    assert hint == "leave out --type, --output-tensor-type"
    assert refuse(3, "gguf", model, "--like", "absent.gguf")[0].startswith("absent.gguf cannot be read")
