"""Experts in MXFP4, as gpt-oss is published: read as the values they stand for."""

import json

import gguf
import gguf_files
import jobs
import numpy as np
import pytest
import torch
import transformers as hf
from families import GROUPED
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quantkit.errors import QuantkitError
from quantkit.grids.fp4 import MxFp4Grid
from quantkit.grids.fp4 import decode_mxfp4 as decode
from quantkit.layouts.compressed_tensors.floats import MxFp4Packed
from quantkit.layouts.ggml.blocks import encode_rows
from quantkit.models.files.open import open_checkpoint
from quantkit.models.gguf import tensors as gguf_tensors
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.solvers import rtn

# as wide inside as outside: only the orientation tells a transposed matrix
SMALL = {**GROUPED, "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 16, "intermediate_size": 64}


PARTS = "blocks", "scales"


def packed(out: int, generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Any codes, and scales around 2^-5."""
    blocks = torch.randint(0, 256, (3, out, 2, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(120, 125, (3, out, 2), dtype=torch.uint8, generator=generator)


def checkpoints(folder):
    """The same tiny gpt-oss twice: experts in MXFP4, and as transformers decodes them."""
    torch.manual_seed(0)
    config = hf.GptOssConfig(**SMALL | {"num_hidden_layers": 2})
    hf.GptOssForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "plain")
    tensors, generator = load_file(folder / "plain/model.safetensors"), torch.Generator().manual_seed(1)
    coded = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = packed(tensors[name].shape[2], generator)
        del coded[name]
        coded |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    save_file(tensors, folder / "plain/model.safetensors", {"format": "pt"})
    (folder / "coded").mkdir()
    save_file(coded, folder / "coded/model.safetensors", {"format": "pt"})
    said = json.loads((folder / "plain/config.json").read_text())
    said["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "coded/config.json").write_text(json.dumps(said))
    return folder / "coded", folder / "plain"


def test_values_are_those_of_ggmls_blocks():
    """ggml keeps the scale first, and the first half of a block in the low bits."""
    blocks, scales = packed(5, torch.Generator().manual_seed(0))
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).numpy()
    theirs = np.concatenate((scales.numpy()[..., None], codes[..., :16] | codes[..., 16:] << 4), -1)
    expected = gguf.quants.dequantize(theirs.reshape(15, -1), gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(decode(blocks, scales).float().numpy().reshape(15, -1), expected)


def test_every_tensor_is_what_transformers_decodes(tmp_path):
    coded, plain = checkpoints(tmp_path)
    found, expected = open_checkpoint(str(coded)), open_checkpoint(str(plain))
    assert sorted(found.names) == sorted(expected.names) and found.layout is None
    assert "quantization_config" not in found.raw_config
    for name in expected.names:
        assert torch.equal(found.read(name), expected.read(name)), name
    files = [gguf_files.export(folder, tmp_path / f"{folder.name}.gguf", "BF16") for folder in (coded, plain)]
    tensors = [{tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors} for path in files]
    assert all(np.array_equal(tensors[0][name], data) for name, data in tensors[1].items())


def test_experts_that_are_not_quantized_are_written_decoded(tmp_path):
    outputs = []
    for source in checkpoints(tmp_path):
        outputs.append(tmp_path / f"{source.name}-nf4")
        jobs.quantize("nf4", source, outputs[-1], {"solver": "rtn"}, exclude=("experts",))
    coded, plain = map(jobs.tensors, outputs)
    assert coded.keys() == plain.keys() and all(torch.equal(coded[name], plain[name]) for name in plain)


def test_blocks_without_their_scales_are_refused(tmp_path):
    coded, _ = checkpoints(tmp_path)
    tensors = load_file(coded / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    del tensors[f"{name}_scales"]
    save_file(tensors, coded / "model.safetensors", {"format": "pt"})
    with pytest.raises(QuantkitError) as refused:
        open_checkpoint(str(coded))
    assert f"{name}_blocks is U8 [3, 64, 2, 16]" in refused.value.message
    assert "absent" in refused.value.message


def test_experts_that_are_written_again_keep_their_bytes(tmp_path):
    """Groups whose largest value is 4 or 6, as encoders leave them; -0 has no bytes of its own in ggml."""
    coded, _ = checkpoints(tmp_path)
    tensors = load_file(coded / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        blocks = tensors[name]
        low, high = (torch.where(part == 8, 0, part) for part in (blocks & 15, blocks >> 4))
        tensors[name] = low | high << 4
        tensors[name][..., 0] |= 6
    save_file(tensors, coded / "model.safetensors", {"format": "pt"})
    checkpoint = Skeleton(open_checkpoint(str(coded)), torch.float32, torch.device("cpu")).checkpoint
    written = {target.name: target for target in gguf_tensors.of_checkpoint(checkpoint)}

    def of(name: str, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales, and codes in order."""
        blocks, scales = (tensors[f"model.layers.1.mlp.experts.{name}_{part}"][:, rows] for part in PARTS)
        return scales, torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)

    for kind, (scales, codes) in {
        "gate": of("gate_up_proj", slice(0, None, 2)),
        "up": of("gate_up_proj", slice(1, None, 2)),
        "down": of("down_proj", slice(None)),
    }.items():
        target = written[f"blk.1.ffn_{kind}_exps.weight"]
        values = target.to_gguf(target.read(checkpoint, torch.float32))
        wanted = torch.cat((scales[..., None], codes[..., :16] | codes[..., 16:] << 4), -1).flatten(2)
        assert torch.equal(torch.stack([encode_rows("MXFP4", matrix) for matrix in values]), wanted), kind
        for matrix, scale, code in zip(values, scales, codes, strict=True):
            weight = rtn.quantize(matrix, MxFp4Grid())
            assert torch.equal(weight.values(), matrix) and torch.equal(weight.codes, code.flatten(1))
            stored = MxFp4Packed().encode(weight)
            assert torch.equal(stored["weight_scale"], scale)
