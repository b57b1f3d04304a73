"""The loss that ends every job: KL divergence from the original on tokens kept out of the calibration."""

import json
from types import SimpleNamespace

import families
import jobs
import pytest
import torch
import transformers
from nights import nightly
from safetensors.torch import load_file, save_file

from quantkit.grids.ggml import named
from quantkit.layouts import Statistic
from quantkit.layouts.ggml import GgmlLayout
from quantkit.models.files import headers
from quantkit.models.files.open import open_checkpoint
from quantkit.options import CalibrationOptions
from quantkit.quantize import loop
from quantkit.quantize.calibrate import original
from quantkit.quantize.outputs import Loss, finish, loss
from quantkit.quantize.progress import Progress
from quantkit.text import calibration

PLAIN = {"group_size": 32, "transform": "none", "refine": 0}
SHORT = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}


class Counts(Progress):
    """Keeps the steps that have an end."""

    def __init__(self):
        self.counts = []

    def counting(self, what, done, total):
        self.counts.append((what, done, total))


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama", tokenizer=True, **SHORT)


def log_probs(folder, tokens):
    """By transformers, of a checkpoint that quantkit decodes."""
    checkpoint = open_checkpoint(str(folder))
    model = transformers.AutoModelForCausalLM.from_config(checkpoint.config, dtype=torch.float32).eval()
    state = {name: checkpoint.read(name).float() for name in checkpoint.names}
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        return torch.log_softmax(model(tokens).logits, -1).flatten(0, 1).double()


def literal(expected, found):
    kld = (expected.exp() * (expected - found)).sum(-1)
    same = (expected.argmax(-1) == found.argmax(-1)).double().mean()
    return kld.mean().item(), (kld.std() / len(kld) ** 0.5).item(), same.item()


@pytest.mark.parametrize("bits", [2, *nightly(4)])
def test_the_loss_is_that_of_the_models_that_transformers_runs(model, tmp_path, bits):
    arguments = {"calibration": jobs.calibration(tmp_path, 6, 32), "dtype": "float32", "loss_tokens": 200}
    job = jobs.prepare("gptq", model, tmp_path / "out", {**PLAIN, "bits": bits}, **arguments)
    tokens, progress = job.held_back.tokens, Counts()
    found = loop.run([job], progress)[0].loss
    assert progress.counts == [(what, done, 2) for what in (finish.LOSS, finish.VERIFY) for done in (0, 1)]
    rounded = jobs.quantize(
        "gptq",
        model,
        tmp_path / "rtn",
        {"bits": bits, "group_size": 32, "transform": "none", "solver": "rtn"},
    )
    expected = log_probs(model, tokens)
    kld, stderr, top1 = literal(expected, log_probs(rounded.output, tokens))
    assert found.rtn_kld == pytest.approx(kld, rel=6e-3)  # three digits
    kld, stderr, top1 = literal(expected, log_probs(tmp_path / "out", tokens))
    assert (found.kld, found.stderr) == pytest.approx((kld, stderr), rel=6e-3)
    assert found.top1 == pytest.approx(top1, rel=6e-3)
    assert (found.tokens, found.text) == (tokens.numel(), "calibration.txt")
    assert tokens.shape == (200 // 32, 32)
    manifest = json.loads((tmp_path / "out" / "quantkit.json").read_text())
    assert Loss(**manifest["loss"]) == found
    assert f"{found.kld:.3g}" in (tmp_path / "out" / "README.md").read_text()


def test_a_model_with_few_positions_predicts_every_sequence_alone(tiny_model, tmp_path):
    model = tiny_model("gpt2", tokenizer=True, num_hidden_layers=1, max_position_embeddings=40)
    found = jobs.quantize("nf4", model, tmp_path / "out", loss_tokens=128).loss
    assert found.tokens == 120 and found.kld > 0


def test_tokens_are_held_back_from_the_text_behind_the_calibration(model, tmp_path):
    options = jobs.calibration(tmp_path, 6, 32)
    checkpoint = open_checkpoint(str(model))
    plain = calibration.load(checkpoint, options)
    found = calibration.load(checkpoint, options, held_back=64)
    more = calibration.load(checkpoint, CalibrationOptions(options.calibration, samples=8, seqlen=32))
    assert plain.held_back is None
    assert found.provenance == plain.provenance and torch.equal(found.tokens, plain.tokens)
    assert torch.equal(torch.cat([found.tokens, found.held_back.tokens]), more.tokens)


def test_a_text_that_is_used_up_is_replaced_by_the_shipped_one(model, tmp_path):
    job = jobs.prepare(
        "gptq",
        model,
        tmp_path / "out",
        PLAIN,
        calibration=jobs.calibration(tmp_path, 999, 32),
        loss_tokens=64,
    )
    assert job.held_back.text == "shipped held-out"
    assert job.held_back.tokens.numel() == 64


@pytest.mark.parametrize(
    "rows, file, words",
    [
        (512, None, None),
        (512, "", ""),
        (512, "{", "has no tokenizer that loads: "),
        (64, None, "the tokenizer has more tokens than the model"),
    ],
)
def test_data_free_jobs_measure_it_with_a_tokenizer_of_the_model(
    tiny_model, quantkit, tmp_path, rows, file, words
):
    model = tiny_model("llama", tokenizer=file != "", vocab_size=rows, **SHORT)
    if file:
        (model / "tokenizer.json").write_text(file)
    done = quantkit("nf4", model, "-o", tmp_path / "out", "-q")
    lines = [line for line in done.err.splitlines() if line.startswith("warning: the loss is not measured: ")]
    assert done.code == 0 and len(lines) == bool(words) and (not words or words in lines[0])
    loss = next(line for line in done.out.splitlines() if line.startswith("loss "))
    measured = "256 held-back tokens" in loss and "round to nearest" not in loss
    assert measured if words is None else loss == "loss         not measured"


def test_a_gguf_file_holds_it_in_its_metadata(model, tmp_path):
    pytest.importorskip("gguf")
    options = {"type": ("Q8_0",), "solver": "rtn"}
    found = jobs.quantize("gguf", model, tmp_path / "out.gguf", options, loss_tokens=64).loss
    contents = headers.open_contents(str(tmp_path / "out.gguf"))
    assert Loss(**contents.manifest["loss"]) == found and 0 < found.kld < 1e-3


@pytest.fixture
def wide(tiny_model):
    """A model whose columns hold whole blocks of K types."""
    return tiny_model("llama", tokenizer=True, hidden_size=256, intermediate_size=256, num_hidden_layers=1)


@pytest.fixture
def calibrated(tmp_path):
    jobs.calibration(tmp_path)
    return ("--calibration", "calibration.txt", "--samples", 4, "--seqlen", 64)


def test_several_files_are_measured_on_the_same_tokens(make, wide, calibrated):
    """Though only one of them calibrates."""
    exact, coded = make("gguf", wide, "-t", "BF16", "-t", "Q4_K_M", "--solver", "rtn", *calibrated)["jobs"]
    assert exact["loss"]["tokens"] == coded["loss"]["tokens"]
    assert exact["loss"]["kld"] < coded["loss"]["kld"]


def test_a_float_file_beside_coded_ones_is_no_part_of_the_loop(make, wide, calibrated):
    exact, coded = make("gguf", wide, "-t", "BF16", "-t", "Q8_0", *calibrated)["jobs"]
    assert exact["loss"]["rtn_kld"] is None and coded["loss"]["rtn_kld"] > 0


@pytest.mark.nightly
def test_round_to_nearest_has_the_embedding_of_the_output(make, wide, calibrated):
    coarse = ("--token-embedding-type", "Q2_K", "--output-tensor-type", "Q2_K")
    found = make("gguf", wide, "-t", "Q8_0", *coarse, *calibrated)["loss"]
    assert found["rtn_kld"] > found["kld"], "error feedback makes up for the embedding"
    plain = make("gguf", wide, "-t", "Q8_0", "-o", "plain.gguf", *calibrated)["loss"]
    assert plain["rtn_kld"] < 0.1 * found["rtn_kld"]


def test_a_short_sequence_does_no_harm(make, demo_model):
    """With a prior of H but none of the drift, weights moved too far, and the KL divergence was 11."""
    found = make("gptq", demo_model, "--samples", 1, "--seqlen", 16, "--transform", "none")["loss"]
    assert found["kld"] < 2 * found["rtn_kld"]


def test_a_name_of_many_bytes_fits_into_the_metadata(make, wide, calibrated, tmp_path):
    name = "가" * 75 + ".txt"
    (tmp_path / "calibration.txt").rename(tmp_path / name)
    said = make("gguf", wide, "-t", "Q8_0", "-o", "out.gguf", "--calibration", name, *calibrated[2:])["loss"]
    assert said["text"] == name
    assert headers.open_contents(str(tmp_path / "out.gguf")).manifest["loss"] == said


def test_predictions_that_overflow_have_no_loss(quantkit, wide):
    scale = {"model.norm.weight": 4e4, "lm_head.weight": 20}
    jobs.rewrite(wide, lambda name, tensor: (tensor * scale.get(name, 1)).half())
    options = ("--solver", "rtn", "--dtype", "float16", "--imatrix", "none", "--json")
    done = quantkit("gguf", wide, "-t", "Q8_0", *options)
    assert done.code == 0 and json.loads(done.out)["loss"] is None
    assert "predictions are not finite in float16; try --dtype float32" in done.err


def test_rows_that_are_only_held_back_change_nothing_else(talker, tmp_path):
    rows = [{"text": sentence} for sentence in families.sentences(count=40)]
    rows += [{"messages": [{"role": "user"}]}]  # a row that cannot be read
    rows += [{"messages": [{"role": "user", "content": "Hello"}]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    checkpoint, read = open_checkpoint(str(talker())), 0
    for seed in range(20):
        options = CalibrationOptions(str(tmp_path / "rows.jsonl"), samples=1, seqlen=16, seed=seed)
        plain = calibration.load(checkpoint, options)
        found = calibration.load(checkpoint, options, held_back=4000)
        assert found.provenance == plain.provenance
        read += found.held_back is not None
    assert read > 10


def post_norm(tmp_path):
    """A model whose projections end in norms, with a massive first token, in bfloat16, as Gemma 3. The norms
    undo that the projections' outputs are small beside the hidden states."""
    folder = families.save_model(
        tmp_path / "gemma2", "gemma2", tie_word_embeddings=False, num_hidden_layers=2
    )
    families.save_tokenizer(folder, bos=True)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor *= 0.05
    embedding = tensors["model.embed_tokens.weight"]
    embedding[0, 3] = 1e4 * embedding.abs().max()
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("faulty", [True, *nightly(False)])
def test_writers_of_hidden_states_that_are_none_are_seen(tmp_path, monkeypatch, faulty):
    if faulty:  # as quantkit 0.3 found them in Gemma 3
        writers = ["self_attn.o_proj", "mlp.down_proj"]
        monkeypatch.setattr(original, "find_writers", lambda *arguments: writers)
    listener = jobs.Listener()
    job = jobs.prepare(
        "gptq", post_norm(tmp_path), tmp_path / "out", {**PLAIN, "bits": 4}, progress=listener,
        calibration=jobs.calibration(tmp_path, 32, 64), dtype="bfloat16", loss_tokens=None,
    )  # fmt: skip
    found = loop.run([job], listener)[0].loss
    said = [text for text in listener.warnings if "loses more than round to nearest" in text]
    assert (found.kld > found.rtn_kld) == faulty
    assert bool(said) == faulty and all("--target own" in text for text in said)


def test_what_a_user_is_warned_of():
    def warning(kld, rtn_kld, **options):
        found = Loss(kld, 0.01, 0.5, rtn_kld, 512, "shipped")
        return loss.warning(found, SimpleNamespace(**options), "bfloat16")

    feedback = {"target": "original", "transform": "auto", "solver": "gptq"}
    assert warning(0.105, 0.1) is None and warning(0.009, 0.001) is None, "16-bit arithmetic alone"
    assert "0.125 against 0.1;" in warning(0.125, 0.1, **feedback)
    found = warning(3.41, 0.96, **feedback)
    assert "3.41 against 0.96; try --target own or --transform none or --solver rtn" in found
    assert "try --solver rtn" in warning(3.41, 0.96, **feedback | {"target": "own", "transform": "none"})
    assert "predicts little like the original" in warning(1.2, 1.5) and warning(0.99, None) is None


@pytest.mark.parametrize("type, expected", [("Q4_K", True), ("IQ2_XXS", False)])
def test_types_that_need_importance_have_no_baseline(type, expected):
    specs = [SimpleNamespace(grid=named(type), block=0, embedding=False)]
    method = SimpleNamespace(needs={Statistic.HESSIAN}, layout=GgmlLayout())
    assert (
        loss._has_baseline(SimpleNamespace(specs=specs, method=method), SimpleNamespace(depth=1)) is expected
    )
