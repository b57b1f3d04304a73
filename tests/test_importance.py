"""quantize.importance against hooks in transformers' own forward pass, and the command `quantkit imatrix`."""

import json
from pathlib import Path

import families
import gguf_files
import pytest
import torch
import transformers
from nights import by_day
from safetensors.torch import load_file, save_file
from sums import assert_sums
from transformers.pytorch_utils import Conv1D

from quantkit.models.files import gguf_writer
from quantkit.models.files.open import open_checkpoint
from quantkit.models.gguf import imatrix
from quantkit.models.skeleton import Skeleton
from quantkit.options import CalibrationOptions
from quantkit.quantize import calibrate
from quantkit.quantize.calibrate import importance
from quantkit.quantize.prepare import plan
from quantkit.quantize.progress import Progress
from quantkit.quantize.timings import Timings
from quantkit.text import calibration

CPU = torch.device("cpu")
LLAMA = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GPT2 = {
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(families.VOCABULARY, shape, generator=torch.Generator().manual_seed(shape[0]))


def literal(folder: Path, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """float64 means of squares of what enters every linear but the head, by transformers alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sums: dict[str, torch.Tensor] = {}

    def hook(name: str):
        def add(module: torch.nn.Module, args: tuple) -> None:
            rows = args[0].double().flatten(0, -2)
            sums[name] = sums.get(name, 0) + rows.square().sum(0)

        return add

    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)) and module is not model.get_output_embeddings():
            module.register_forward_pre_hook(hook(name))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    tokens = sum(batch.numel() for batch in batches)
    return {name: total / tokens for name, total in sums.items()}


FAMILIES = ["llama", "mistral", "gemma2", "phi3", "gpt2", "bloom", "falcon", "gpt_neox", "olmo2"]


@pytest.mark.parametrize("family", by_day(FAMILIES, ["gemma2", "phi3", "gpt2"]))
def test_means_are_those_of_a_literal_forward(tiny_model, family):
    folder = tiny_model(family)
    batches = [ids(3, 40), ids(2, 40), ids(1, 7)]
    skeleton = Skeleton(open_checkpoint(str(folder)), torch.float32, CPU)
    found = importance.gather(skeleton, batches, Progress(), Timings(), None)
    expected = literal(folder, batches)
    assert found.keys() == expected.keys()
    for name, (sums, tokens) in found.items():
        assert tokens == 207
        mean = sums / 207
        assert mean.dtype == torch.float32 and mean.shape == expected[name].shape
        assert ((mean - expected[name]).abs() <= 1e-6 * expected[name]).all(), name
    assert all(parameter.is_meta for block in skeleton.blocks for parameter in block.parameters())


def test_one_block_is_in_memory_at_a_time(tiny_model):
    skeleton = Skeleton(open_checkpoint(str(tiny_model("llama"))), torch.float32, CPU)
    loaded = []

    class Watch(Progress):
        def block(self, index: int, replayed: bool) -> None:
            loaded.append([not all(p.is_meta for p in block.parameters()) for block in skeleton.blocks])

    importance.gather(skeleton, [ids(1, 16)], Watch(), Timings(), None)
    assert loaded == [[block == index for block in range(3)] for index in range(3)]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_gguf_file_of_the_model_has_the_same(tiny_model, tmp_path, family):
    folder = tiny_model(family)
    path = gguf_files.export(folder, tmp_path / "model.gguf")
    skeletons = (Skeleton(open_checkpoint(str(source)), torch.float32, CPU) for source in (folder, path))
    silent = Progress(), Timings(), None
    here, there = (importance.gather(skeleton, [ids(2, 24)], *silent) for skeleton in skeletons)
    assert_sums(*({name: sums for name, (sums, _) in found.items()} for found in (here, there)))


def test_the_heads_inputs_are_measured_on_every_nth_batch(tiny_model, monkeypatch):
    monkeypatch.setattr(calibrate, "HEAD_ENOUGH", 1)
    folder, batches = tiny_model("llama"), [ids(2, 40), ids(3, 40), ids(1, 40)]
    skeleton = Skeleton(open_checkpoint(str(folder)), torch.float32, CPU)
    skeleton.load_rest()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    columns = model.config.hidden_size
    assert 240 // columns == 3  # so one of the three batches is enough
    found = importance.of_head(skeleton, batches)
    with torch.no_grad():
        rows = model.model(batches[0]).last_hidden_state.double().flatten(0, 1)
    assert found.tokens == 80
    assert_sums(found.hessian, (2 * rows.T @ rows / 80).float(), 1e-5)


# ---- the command


@pytest.fixture
def small(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(families.sentences()))
    return "--calibration text.txt --samples 5 --seqlen 32 --batch-size 2 --threads 1".split()


@pytest.mark.parametrize(
    ("family", "blocks", "names"), [("llama", "model.layers", LLAMA), ("gpt2", "transformer.h", GPT2)]
)
def test_the_file_has_llama_cpps_names_and_the_means(quantkit, tiny_model, small, family, blocks, names):
    tiny_model(family, name="tiny", tokenizer=True)
    code, out, err = quantkit("imatrix", "tiny", *small, "--json", "-q")
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert record["schema"] == "quantkit.imatrix/1" and record["output"] == "tiny.imatrix.gguf"
    assert record["matrices"] == 3 * len(names)
    found = imatrix.read(Path("tiny.imatrix.gguf"))
    assert (found.datasets, found.chunk_count, found.chunk_size) == (("text.txt",), 5, 32)
    assert {counts.tolist()[0] for counts in found.counts.values()} == {160.0}
    checkpoint = open_checkpoint("tiny")
    options = CalibrationOptions(calibration="text.txt", samples=5, seqlen=32)
    batches = calibration.load(checkpoint, options).tokens.split(2)
    skeleton = Skeleton(checkpoint, torch.float32, CPU)
    expected = importance.gather(skeleton, batches, Progress(), Timings(), None)
    values = found.values()
    assert {f"blk.{k}.{theirs}.weight" for k in range(3) for theirs in names.values()} == values.keys()
    for k in range(3):
        for ours, theirs in names.items():
            assert_sums(values[f"blk.{k}.{theirs}.weight"], expected[f"{blocks}.{k}.{ours}"][0] / 160)


def test_the_same_bytes_twice_and_what_is_printed(quantkit, tiny_model, small, tmp_path):
    tiny_model("llama", name="tiny", tokenizer=True)
    code, out, err = quantkit("imatrix", "tiny", *small)
    assert code == 0 and out.startswith("matrices     21\n") and out.endswith("wrote tiny.imatrix.gguf\n")
    assert "5 sequences of 32 tokens, text.txt" in out
    assert "block 3/3 left 00:00" in err and "error" not in err
    quantkit("imatrix", "tiny", *small, "-o", "deeper/other.gguf", "-q")
    first, second = tmp_path / "tiny.imatrix.gguf", tmp_path / "deeper" / "other.gguf"
    assert first.read_bytes() == second.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("deeper", "text.txt", "tiny", "tiny.imatrix.gguf")
    ]


def test_a_dry_run_writes_nothing(quantkit, tiny_model, small, tmp_path):
    tiny_model("llama", name="tiny", tokenizer=True)
    code, out, _ = quantkit("imatrix", "tiny", *small, "--dry-run")
    assert code == 0 and out.startswith("output       tiny.imatrix.gguf\n") and "seconds" not in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt", "tiny"]


def test_what_exists_stays_unless_overwritten(quantkit, refuse, tiny_model, small, tmp_path):
    tiny_model("llama", name="tiny", tokenizer=True)
    path = tmp_path / "out.gguf"
    path.write_bytes(b"GGUF precious")
    assert "--overwrite" in refuse(2, "imatrix", "tiny", *small, "-o", path)[1]
    planned = quantkit("imatrix", "tiny", *small, "-o", path, "--dry-run")
    assert planned.code == 0 and planned.out.startswith(f"refused      {path} exists: choose another -o")
    assert path.read_bytes() == b"GGUF precious"
    assert quantkit("imatrix", "tiny", *small, "-o", path, "-q", "--overwrite")[0] == 0
    assert len(imatrix.read(path).sums) == 21
    weights = (tmp_path / "tiny" / "model.safetensors").read_bytes()
    error, _ = refuse(2, "imatrix", "tiny", *small, "-o", "tiny/model.safetensors", "--overwrite")
    assert "holds the source" in error
    assert (tmp_path / "tiny" / "model.safetensors").read_bytes() == weights
    for output, said in (("tiny", "holds the source"), ("text.txt/out.gguf", "cannot be a new file")):
        assert said in refuse(2, "imatrix", "tiny", *small, "-o", output)[0]


def test_the_card_of_a_replaced_model_goes_unless_it_is_of_others(quantkit, tiny_model, small, tmp_path):
    tiny_model("llama", name="tiny", tokenizer=True)
    asked = ("gguf", "tiny", "-t", "Q8_0", "--solver", "rtn", "--imatrix", "none", "-o", "out.gguf", "-q")
    assert quantkit(*asked).code == 0 and (tmp_path / "out.gguf.md").is_file()
    assert quantkit("imatrix", "tiny", *small, "-o", "out.gguf", "-q", "--overwrite").code == 0
    assert not (tmp_path / "out.gguf.md").exists()
    (tmp_path / "out.gguf.md").write_text("precious")
    assert quantkit("imatrix", "tiny", *small, "-o", "out.gguf", "-q", "--overwrite").code == 0
    assert (tmp_path / "out.gguf.md").read_text() == "precious"


def test_models_that_have_none(quantkit, refuse, tiny_model, small, tmp_path):
    tiny_model("llama", name="tiny", tokenizer=True, hidden_size=128)
    quantkit("gptq", "tiny", *small, "--solver", "rtn", "--group-size", 32, "-o", "packed", "-q")
    assert "packed is quantized already" in refuse(4, "imatrix", "packed", *small)[0]
    tiny_model("opt", tokenizer=True)
    assert "opt" in refuse(4, "imatrix", "opt", *small)[0]
    assert not list(tmp_path.glob("*.gguf"))


def test_activations_that_overflow_are_named(refuse, tiny_model, small, tmp_path):
    model = tiny_model("llama", name="tiny", tokenizer=True)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 2e5
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    error, _ = refuse(1, "imatrix", "tiny", *small, "--dtype", "float16")
    assert "entering model.layers.1.mlp.down_proj are not finite in float16" in error
    assert not list(tmp_path.glob("*.gguf*"))


def test_resources_that_are_short(refuse, tiny_model, small, tmp_path, monkeypatch):
    tiny_model("llama", name="tiny", tokenizer=True)
    with monkeypatch.context() as patch:
        patch.setattr(plan, "free_memory", lambda device: 1000)
        assert "of memory" in refuse(5, "imatrix", "tiny", *small)[0]

    def full(chunk):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_writer, "memoryview", full, raising=False)
    error, hint = refuse(5, "imatrix", "tiny", *small)
    assert "is full" in error and "run the same command again" in hint and "--resume" not in hint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt", "tiny"]


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_a_matrix_is_no_model_for_other_commands(quantkit, tiny_model, small, command):
    model = tiny_model("llama", tokenizer=True)
    assert quantkit("imatrix", model, "-o", "sums.gguf", *small, "-q")[0] == 0
    code, _, error = quantkit(command, "sums.gguf")
    assert code == 4 and "sums.gguf is an importance matrix, not a model" in error
