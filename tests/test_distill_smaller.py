"""A smaller student: what is chosen, cut and trained is what is got by hand with transformers' own model."""

import json
import math
from dataclasses import replace
from pathlib import Path

import families
import far_device
import jobs
import pytest
import torch
import transformers
from torch.nn.functional import kl_div, log_softmax, softmax

from quantkit.cli import distill_report
from quantkit.distillation.job import Request, is_done
from quantkit.distillation.options import SmallerOptions as Options
from quantkit.distillation.smaller import blocks, cut, job, learner
from quantkit.errors import QuantkitError
from quantkit.models.files.open import open_checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.text.calibration import hold_out

DEPTH = 3
FEW = {"steps": 2}


@pytest.fixture
def distill(tmp_path):
    """`distill(model, blocks=2, steps=4)`: the record; `into` names the folder it is made in."""

    def make(
        teacher: Path, into: str = "made", listener=None, resume: bool = False, seed: int = 0, **options
    ):
        (tmp_path / into).mkdir(exist_ok=True)
        text = jobs.calibration(tmp_path, samples=10, seqlen=16)
        request = Request(
            str(teacher),
            None,
            Options(**FEW | options),
            CalibrationOptions(calibration=text.calibration, samples=10, seqlen=16, seed=seed),
            RunOptions(threads=1, dtype="float32", batch_size=2),
            output=tmp_path / into / "student",
            resume=resume,
        )
        listener = listener or jobs.Listener()
        made = job.prepare(request, listener).run(listener)
        return made | {"folder": tmp_path / into / "student", "warnings": getattr(listener, "warnings", [])}

    return make


def opened(folder: Path, device: str = "cpu") -> Skeleton:
    skeleton = Skeleton(open_checkpoint(str(folder)), torch.float32, torch.device(device))
    skeleton.load_rest()
    return skeleton


def theirs(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def some_ids(count: int = 2, length: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(families.VOCABULARY, (count, length), generator=generator)


def without(model: transformers.PreTrainedModel, left_out: set[int]) -> torch.Tensor:
    """Logits of a Llama some of whose blocks are taken away by hand."""
    model.model.layers = torch.nn.ModuleList(
        layer for index, layer in enumerate(model.model.layers) if index not in left_out
    )
    model.config.num_hidden_layers = len(model.model.layers)
    with torch.no_grad():
        return model(some_ids(), use_cache=False).logits


# ---- what is chosen


def test_the_worth_of_a_block_is_the_divergence_without_it(tiny_model):
    folder = tiny_model("llama")
    skeleton = opened(folder)
    kept, rounds = blocks.choose(skeleton, list(some_ids().split(1)), 1)
    expected = log_softmax(without(theirs(folder), set()), -1).double()
    gone: set[int] = set()
    for found in rounds:
        assert set(found) == set(range(DEPTH)) - gone
        for index, value in found.items():
            other = log_softmax(without(theirs(folder), gone | {index}), -1).double()
            reference = (expected.exp() * (expected - other)).sum(-1).mean().item()
            assert value == pytest.approx(reference, rel=1e-4)
        gone.add(min(found, key=found.get))
    assert kept == tuple(set(range(DEPTH)) - gone) and len(rounds) == 2


def test_many_blocks_go_in_few_rounds(tiny_model):
    skeleton = opened(tiny_model("llama", num_hidden_layers=12, hidden_size=16, intermediate_size=16))
    kept, rounds = blocks.choose(skeleton, [some_ids(1, 4)], 2)
    assert [len(found) for found in rounds] == [12, 10, 8, 6, 4] and len(kept) == 2


def test_what_went_is_told_in_order():
    rounds = [{"0": 0.9, "1": 0.2, "2": 0.1, "3": 0.8}, {"0": 1.1, "1": 0.4, "3": 0.9}]
    told = distill_report.left_out({"blocks": [0, 3], "rounds": rounds}, 4)
    assert told == "block 2 (KL divergence without it 0.100), then 1 (0.400)"
    told = distill_report.left_out({"blocks": [0, 3], "rounds": rounds[:1]}, 4)
    assert told == "block 2 (KL divergence without it 0.100), then 1 (0.200)"


# ---- what is cut


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "gemma3", "qwen3_moe"])
def test_a_student_of_fewer_blocks_has_their_tensors(family, tiny_model, distill):
    """Under the teacher's names and numbers in a row; lists by layer are cut in step."""
    teacher = tiny_model(family, tokenizer=True)
    made = distill(teacher, blocks=2, lr=1e-30)
    kept, before, after = made["chosen"]["blocks"], jobs.tensors(teacher), jobs.tensors(made["folder"])
    prefix = next(name for name in before if ".0." in name).partition("0.")[0]
    numbers = {f"{prefix}{index}.": f"{prefix}{k}." for k, index in enumerate(kept)}
    expected = {}
    for name, tensor in before.items():
        if not name.startswith(prefix):
            expected[name] = tensor
        for old, new in numbers.items():
            if name.startswith(old):
                expected[name.replace(old, new, 1)] = tensor
    assert after.keys() == expected.keys()
    assert all(torch.equal(after[name], expected[name]) for name in expected)
    types = json.loads((teacher / "config.json").read_text()).get("layer_types")
    if types:
        stored = json.loads((made["folder"] / "config.json").read_text())["layer_types"]
        assert stored == [types[index] for index in kept]
    model = theirs(made["folder"])
    assert model.num_parameters() == made["student"]["parameters"]
    assert made["student"]["bytes"] == sum(tensor.nbytes for tensor in after.values())


def test_a_list_as_long_as_the_model_is_deep_may_be_of_something_else():
    config = transformers.Mamba2Config(**families.KINDS["mamba2"][1])
    assert len(config.time_step_limit) == config.num_hidden_layers and not cut.per_layer(config)
    assert cut.per_layer(transformers.Gemma3TextConfig(**families.FAMILIES["gemma3"][1])) == ["layer_types"]


def test_what_depends_on_the_number_of_a_block_is_refused(tiny_model, distill, monkeypatch):
    """GPT-2 that divides scores by the block's number."""
    teacher = tiny_model("gpt2", tokenizer=True, scale_attn_by_inverse_layer_idx=True, num_hidden_layers=2)
    monkeypatch.setattr(blocks, "choose", lambda *_: ((1,), []))
    with pytest.raises(QuantkitError, match="differs by .* from the teacher without these blocks") as found:
        distill(teacher, blocks=1)
    assert found.value.exit_code == 4


# ---- what is trained


def test_the_loss_is_that_of_hinton():
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 2, 5, 7, generator=generator)
    here, there = torch.randn(2, 2, 5, 3, generator=generator)
    T = 2.0
    both = log_softmax(student / T, -1).flatten(0, 1), softmax(teacher / T, -1).flatten(0, 1)
    expected = T**2 * kl_div(*both, reduction="batchmean")
    expected += 0.25 * ((here - there).norm(dim=-1) / there.norm(dim=-1)).square().mean()
    options = Options(blocks=1, temperature=T, hidden_weight=0.25)
    torch.testing.assert_close(learner.loss((student, here), (teacher, there), options), expected)


def test_a_step_is_as_many_sequences_however_many_fit_the_memory():
    options = Options(blocks=1, epochs=3)
    assert learner.Schedule.of(options, 100, 256, 4096, None) == learner.Schedule(36, 8, 8, 4)
    assert learner.Schedule.of(options, 100, 512, 128256, 6) == learner.Schedule(48, 6, 1, 5)
    assert learner.Schedule.of(options, 100, 64, 128256, 6) == learner.Schedule(48, 6, 6, 5)
    assert learner.Schedule.of(Options(blocks=1, steps=7), 4, 16, 512, None) == learner.Schedule(7, 4, 4, 1)


def test_one_sequence_in_eight_is_held_out_and_no_more_than_enough():
    for count, held in ((2, 1), (24, 3), (1000, 32)):
        trained, held_out = hold_out(torch.arange(count)[:, None])
        assert len(held_out) == held and sorted(
            [*trained.flatten().tolist(), *held_out.flatten().tolist()]
        ) == list(range(count))


def test_training_brings_the_student_closer_and_gptq_takes_it(tiny_model, distill, tmp_path, quantkit):
    teacher = tiny_model("llama", tokenizer=True, dtype="bfloat16")
    made = distill(teacher, blocks=2, steps=30, lr=3e-3)
    cut, trained = (row["metrics"]["kld"]["mean"] for row in made["held_out"]["models"][1:])
    assert made["published"] == "trained" and trained < 0.97 * cut and not made["warnings"]
    assert trained == pytest.approx(
        made["trained"]["best"]["kld"], rel=0.05
    )  # but for bfloat16, and the last token
    model, ids = theirs(made["folder"]), some_ids()
    with torch.no_grad():
        ours = opened(made["folder"])
        hidden = ours.embed(ids)
        for index in range(2):
            ours.load_block(index)
            hidden = ours.run_block(index, hidden)
        torch.testing.assert_close(ours.logits(hidden[0]), model(ids).logits[0])
    assert {tensor.dtype for tensor in jobs.tensors(made["folder"]).values()} == {torch.bfloat16}
    quantized = jobs.quantize(
        "gptq",
        made["folder"],
        tmp_path / "quantized",
        {"group_size": 32},
        calibration=jobs.calibration(tmp_path),
    )
    assert quantized.linears == 2 * 7
    inspected = json.loads(quantkit("inspect", made["folder"], "--json").out)
    assert inspected["provenance"]["method"] == "distill" and not inspected["integrity"]["problems"]


def test_a_student_that_training_made_worse_is_not_published(tiny_model, distill):
    teacher = tiny_model("llama", tokenizer=True)
    made = distill(teacher, blocks=2, lr=0.9, steps=1)
    assert made["published"] == "cut" and "training did not help" in made["warnings"][0]
    kept, before, after = made["chosen"]["blocks"], jobs.tensors(teacher), jobs.tensors(made["folder"])
    name = "mlp.up_proj.weight"
    for k, index in enumerate(kept):
        assert torch.equal(after[f"model.layers.{k}.{name}"], before[f"model.layers.{index}.{name}"])
    assert "training did not bring it closer" in (made["folder"] / "README.md").read_text()


def test_a_student_whose_training_diverged_is_published_as_cut(tiny_model, distill, monkeypatch):
    monkeypatch.setattr(learner.Learner, "divergence", lambda self: math.nan)
    made = distill(tiny_model("llama", tokenizer=True), blocks=2, steps=4)
    assert made["published"] == "cut" and "diverged" in made["warnings"][0]
    assert made["trained"]["curve"] == [{"step": 1, "kld": None}]
    cut, kept = (row["metrics"]["kld"] for row in made["held_out"]["models"][1:])
    assert cut == kept


def test_a_step_in_parts_is_the_step_as_a_whole(tiny_model, distill, monkeypatch):
    """Sequences that do not fit one forward pass add up, to what they would have done together."""
    teacher = tiny_model("llama", tokenizer=True, num_hidden_layers=2)
    once = distill(teacher, "once", blocks=1, steps=3)
    monkeypatch.setattr(learner, "LOGITS_BYTES", 1)
    parts = distill(teacher, "parts", blocks=1, steps=3)
    assert (once["schedule"]["together"], parts["schedule"]["together"]) == (2, 1)
    ours, others = jobs.tensors(once["folder"]), jobs.tensors(parts["folder"])
    before = jobs.tensors(teacher)["model.embed_tokens.weight"]
    moved = (ours["model.embed_tokens.weight"] - before).norm()
    apart = sum((ours[name] - others[name]).norm() for name in ours)
    assert apart < 0.01 * moved


class Killed(Exception):
    pass


class Kill(jobs.Listener):
    """Ends the job at the first sign of `what` having come so far."""

    def __init__(self, what: str, done: int):
        super().__init__()
        self.at = what, done

    def counting(self, what: str, done: int, total: int) -> None:
        if what.startswith(self.at[0]) and done == self.at[1]:
            raise Killed


def test_an_interrupted_job_goes_on_to_the_same_bytes(tiny_model, distill):
    teacher = tiny_model("llama", tokenizer=True, tie_word_embeddings=True)
    options = {"blocks": 2, "steps": 14}
    distill(teacher, "whole", **options)
    for at, resume in ((("training", 5), False), (("training", 11), True)):
        with pytest.raises(Killed):
            distill(teacher, "broken", Kill(*at), resume=resume, **options)
    with pytest.raises(QuantkitError, match="holds another job; different: --steps"):
        distill(teacher, "broken", resume=True, **options | {"steps": 15})
    made = distill(teacher, "broken", resume=True, **options)
    asked = Request(
        str(teacher),
        None,
        Options(**options),
        CalibrationOptions(),
        RunOptions(),
        made["folder"],
        resume=True,
    )
    assert is_done(asked) and not is_done(replace(asked, options=Options(**options | {"steps": 15})))
    there = made["folder"].parent
    assert [path.name for path in there.iterdir()] == ["student"]
    assert jobs.contents(made["folder"]) == jobs.contents(there.parent / "whole" / "student")
    assert [row["step"] for row in made["trained"]["curve"]] == [2, 4, 6, 8, 10, 12, 14]


# ---- what is refused


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"blocks": 3}, "--blocks 3: the teacher has 3"),
        ("llama", {"blocks": 4}, "--blocks 4: the teacher has 3"),
        ("llama", {"blocks": 2, "lr": math.inf}, "--lr inf is invalid"),
        ("glm_moe_dsa", {"blocks": 2}, "its blocks pass more than hidden states"),
        ("bart", {"blocks": 1}, "num_hidden_layers in its configuration is not"),
        ("jamba", {"blocks": 2}, "its configuration then makes another model"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(
    family, options, message, tiny_model, distill, tmp_path
):
    with pytest.raises(QuantkitError, match=message) as found:
        distill(tiny_model(family, tokenizer=True), **options)
    assert found.value.hint and found.value.exit_code in (2, 4)
    assert not list((tmp_path / "made").iterdir())


def test_a_quantized_teacher_is_refused(tiny_model, distill, tmp_path):
    jobs.quantize("nf4", tiny_model("llama", tokenizer=True), tmp_path / "coded")
    with pytest.raises(QuantkitError, match="it is quantized"):
        distill(tmp_path / "coded", blocks=2)


# ---- elsewhere


def test_an_accelerator_chooses_cuts_and_teaches_alike(tiny_model, tmp_path):
    folder, batches = tiny_model("llama"), [some_ids()]

    def made(device: str):
        skeleton = opened(folder, device)
        kept, rounds = blocks.choose(skeleton, batches, 2)
        final = blocks.without_others(skeleton, batches[0], kept)
        cut.write(skeleton, skeleton.checkpoint, kept, tmp_path / device, 10**9)
        cut.prove(skeleton, tmp_path / device, batches[0], final, "it")
        told = learner.gather(skeleton, batches[0], 0, tmp_path / f"{device}.bin")
        return kept, rounds, [part.cpu() for part in told.predictions(torch.tensor([1, 0]))]

    kept, rounds, predictions = made("cpu")
    with far_device.present():
        there = made("far")
    assert there[0] == kept and there[1] == [pytest.approx(found, rel=1e-4) for found in rounds]
    torch.testing.assert_close(there[2], predictions)
    ours, others = jobs.tensors(tmp_path / "cpu"), jobs.tensors(tmp_path / "far")
    assert ours.keys() == others.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], others[name])
    with torch.no_grad():
        logits = theirs(folder)(some_ids().flip(0)).logits
    torch.testing.assert_close(predictions[0], logits)
