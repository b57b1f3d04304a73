"""The parts of `quantkit auto`: allocation, units, streams, curve, budgets."""

import ctypes
import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import jobs
import pytest
import scipy.optimize
import torch
from transformers import AutoModelForCausalLM

from quantkit.auto import allocation, cost, results, unit_divergence
from quantkit.auto.engines import ENGINES, solved_outside
from quantkit.auto.job import prepare
from quantkit.auto.options import AutoOptions, AutoRequest
from quantkit.auto.sensitivities import Sensitivities
from quantkit.auto.solving import Solving
from quantkit.auto.units import (
    Unit,
    bits_per_weight,
    measured,
    nbytes,
    unit_losses,
    usual,
)  # fmt: skip
from quantkit.cli.progress import Lines
from quantkit.errors import QuantkitError
from quantkit.models.files.open import open_checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.options import size_bytes

pytestmark = pytest.mark.usefixtures("few_tokens")
CPU = torch.device("cpu")


def toy(seed: int, units: int = 5, candidates: int = 4) -> tuple[list[Unit], dict]:
    """Random units; sizes and losses fall apart, some candidates are dominated."""
    draw = random.Random(seed)
    found, losses = [], {}
    for number in range(units):
        sizes = sorted(draw.sample(range(8, 200, 2), candidates))
        row = {str(k): size for k, size in enumerate(sizes)}
        found.append(Unit(f"u{number}", 0, (), 100, row))
        losses |= {(f"u{number}", name): draw.random() / size for name, size in row.items()}
    return found, losses


def every(units: list[Unit]):
    for names in itertools.product(*(unit.candidates for unit in units)):
        yield dict(zip([unit.name for unit in units], names, strict=True))


def lost(losses: dict, choice: dict) -> float:
    return sum(losses[item] for item in choice.items())


@pytest.mark.parametrize("seed", range(4))
def test_the_allocation_is_the_best_of_all(seed):
    units, losses = toy(seed)
    smallest = sum(min(unit.candidates.values()) for unit in units)
    for budget in (smallest, smallest + 37, smallest + 150):
        found = allocation.within_bytes(units, losses, budget)
        fitting = [choice for choice in every(units) if nbytes(units, choice) <= budget]
        assert nbytes(units, found) <= budget
        assert lost(losses, found) == pytest.approx(min(lost(losses, one) for one in fitting), rel=1e-5)


def test_what_the_solver_prints_does_not_reach_standard_output(monkeypatch, capfd):
    """HiGHS prints some lines with C's printf, and JSON follows on standard output."""
    real, printf = scipy.optimize.milp, ctypes.CDLL(None).printf
    monkeypatch.setattr(
        scipy.optimize, "milp", lambda *args, **how: (printf(b"a remark\n"), real(*args, **how))[1]
    )
    units, losses = toy(0)
    allocation.within_bytes(units, losses, 150 + sum(min(unit.candidates.values()) for unit in units))
    print("{}")
    assert capfd.readouterr() == ("{}\n", "")


def test_the_smallest_within_a_loss_is_the_smallest_of_all():
    units, losses = toy(7)
    bound = 0.5 * sum(losses[unit.name, [*unit.candidates][0]] for unit in units)
    found = allocation.within_loss(units, losses, bound)
    fitting = [choice for choice in every(units) if lost(losses, choice) <= bound]
    assert lost(losses, found) <= bound
    assert nbytes(units, found) == min(nbytes(units, one) for one in fitting)


def test_what_cannot_be_is_said_with_what_can():
    units, losses = toy(0)
    with pytest.raises(QuantkitError, match=r"0\.05 bits per weight is too small; the smallest"):
        allocation.within_bytes(units, losses, 3)
    with pytest.raises(QuantkitError, match="--max-kld 1e-09 is too small"):
        allocation.within_loss(units, losses, 1e-9)


def row_of(nearest: dict, solved: dict, mean: float) -> dict:
    return {
        "errors": {"nearest": nearest, "solved": solved},
        "divergence": {"mean": mean, "stderr": 0.0},
    }


def test_losses_are_proportional_to_errors():
    row = {"a": 10, "b": 15, "c": 20, "d": 40}
    unit = Unit("u", 0, (), 80, row)
    assert measured(unit) == "a" and usual(unit) == "c"
    nearest, solved = {"a": 0.8, "b": 0.4, "c": 0.1, "d": 0.02}, {"a": 0.4, "c": 0.05}
    found = unit_losses(unit, row_of(nearest, solved, 0.9))  # a factor of 2
    assert found == pytest.approx({"a": 0.8, "c": 0.1, "b": 0.4, "d": 0.02})  # rounding's errors, halved
    outside = unit_losses(replace(unit, block=None), row_of(nearest, solved, 0.1))  # of c, from the original
    assert outside == pytest.approx(found)


def test_usual_candidates_add_up_to_what_was_measured_of_them():
    row = {"a": 20, "b": 30, "c": 40}
    units = [Unit(name, 0, (), 80, row) for name in "uv"]
    errors = {"a": 0.4, "b": 0.1, "c": 0.02}
    rows = dict.fromkeys("uv", row_of(errors, errors, 0.6))
    table = Sensitivities({}, 64, 1.0, {"mean": 0.3, "stderr": 0.0}, rows)
    found = table.losses(units)
    assert usual(units[0]) == "b" and found["u", "b"] + found["v", "b"] == pytest.approx(0.3)
    assert found["u", "a"] / found["u", "b"] == pytest.approx(4)


def test_the_smallest_is_measured_and_the_usual_is_larger():
    row = {str(bits): bits * 10 for bits in (2, 2.5, 3, 3.5, 4, 5, 8)}
    unit = Unit("u", 0, (), 80, row)
    assert usual(unit) == "3" and measured(unit) == "2"
    assert measured(replace(unit, block=None)) == "3"
    assert usual(replace(unit, candidates={"2": 20, "2.5": 25})) == "2"


@pytest.mark.parametrize(
    "engine, names",
    [
        ("vllm", ["mlp.down_proj", "mlp.gate_up_proj", "self_attn.o_proj", "self_attn.qkv_proj"]),
        ("any", ["mlp.down_proj", "mlp.gate_up_proj", "self_attn.o_proj", "self_attn.qkv_proj"]),
        (
            "transformers",
            ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]
            + [f"self_attn.{leaf}_proj" for leaf in ("k", "o", "q", "v")],
        ),
    ],
)
def test_what_an_engine_fuses_is_one_unit(tiny_model, tmp_path, engine, names):
    source = tiny_model("llama", tokenizer=True, hidden_size=128, intermediate_size=128)
    space = ENGINES[engine]
    prepared = prepared_for(space, source, tmp_path)
    units = space.units(prepared)
    assert sorted({unit.name.split(".", 3)[3] for unit in units}) == names
    for unit in units:
        assert [*unit.candidates.values()] == sorted(unit.candidates.values())
    for unit in units[1:3]:
        choice = {one.name: [*one.candidates][0] for one in units} | {unit.name: [*unit.candidates][-1]}
        made = jobs.job.prepare(
            jobs.job.Request(
                str(source), **options_of(space.values(units, choice)), output=tmp_path / "made",
                calibration=jobs.calibration(tmp_path),
            ),
            jobs.Progress(),
            dry_run=True,
        )  # fmt: skip
        grids = {row.name: f"{row.grid.bits},{row.grid.group_size}" for row in made.specs}
        assert grids == {row.name: choice[one.name] for one in units for row in one.specs}
        sizes = made.method.output.sizes(made.checkpoint, made.specs, made.method.layout)
        assert sizes.bits_per_weight == pytest.approx(bits_per_weight(units, choice))


def prepared_for(space, source, tmp_path, **options):
    """The engine's job, as the search asks it for linears."""
    return jobs.job.prepare(
        jobs.job.Request(
            str(source), space.method, jobs.calibration(tmp_path), jobs.RunOptions(threads=1),
            output=tmp_path / f"out{'.gguf' * (space.method.name == 'gguf')}",
        ),
        jobs.Progress(),
        dry_run=True,
    )  # fmt: skip


@pytest.mark.parametrize("tied, head", [(False, "--head 8 quantizes the head; "), (True, "")])
def test_embeddings_that_take_most_of_the_budget_are_named(tiny_model, tmp_path, tied, head):
    source = tiny_model("llama", tokenizer=True, tie_word_embeddings=tied)
    typed = {"calibration.samples": 8, "calibration.seqlen": 32, "run.threads": 1}

    def said(**options) -> tuple[int, str | None]:
        found = prepare(
            AutoRequest(str(source), AutoOptions(**options), typed), jobs.Progress(), dry_run=True
        )
        return cost.outside_bytes(found), cost.note(found)

    table, weights = 4 * 512 * 64, 3 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128)
    nbytes, line = said(bpw=4.0)
    assert nbytes == table * (1 if tied else 2)
    assert line == (
        f"embedding and head stay as they are and take {nbytes / 1e6:.2f} MB, more than the "
        f"{weights / 2e6:.2f} MB of all linears that are searched: {head}--engine llama.cpp searches both; "
        "quantkit gptq --layout mlx --embedding 8 quantizes the embedding for mlx-lm"
    )
    assert said(bpw=5.0, engine="llama.cpp") == (0, None)
    assert said(max_kld=0.1)[1] and said(max_size="1MB")[1] is None
    if not tied:
        assert said(bpw=4.0, head=8)[0] == table


@pytest.mark.parametrize(
    "options, most",
    [
        ({"bpw": 4.0}, 7),
        ({"bpw": 4.0, "engine": "vllm"}, 5),
        ({"max_size": "1GB"}, 7),
        ({"max_kld": 0.1}, 13),
        ({"gpu": "h100-80g"}, 8),
    ],
)
def test_the_steps_of_a_search_are_counted(options, most, capsys):
    auto = SimpleNamespace(request=SimpleNamespace(options=AutoOptions(**options)))
    progress = Lines()
    search = results.Search(auto, {}, progress)
    progress.step(1, cost.most_steps(auto))
    for _ in range(most):
        progress.phase("loading")
        search._next_step()
    progress.phase("loading")
    progress.close()
    heard = capsys.readouterr().err.splitlines()
    assert heard == [
        *(f"step {number} of {most}: loading" for number in range(1, most + 1)),
        f"step {most + 1} of {most + 1}: loading",
    ]


def test_the_uniform_model_scales_predictions_and_is_not_made_twice(monkeypatch):
    units, losses = toy(1)
    choice = allocation.within_bytes(units, losses, 400)
    other = {unit.name: [*unit.candidates][-1] for unit in units}
    presets = [results.Preset("best", choice, {}), results.Preset("too large", other, {})]
    options = SimpleNamespace(options=AutoOptions(bpw=4.0))
    search = results.Search(SimpleNamespace(request=options, units=units, presets=presets), losses, None)

    def make(auto, preset, folder, predicted):
        record = {"predicted_kld": predicted, "kld": 3 * predicted, "disk_bytes": 1}
        return results.Made(preset, None, "", record)

    monkeypatch.setattr(search, "_make", make)
    uniform = search.uniform(400)
    assert uniform.preset.name == "best" and uniform.record["predicted_kld"] == lost(losses, choice)
    assert search._predicted(other) == pytest.approx(3 * lost(losses, other))
    assert search.within_bytes(400, uniform) is uniform
    assert search.uniform(nbytes(units, {unit.name: [*unit.candidates][0] for unit in units}) - 1) is None


def options_of(values: dict) -> dict:
    """Method and run options of a recipe's values."""
    from quantkit.quantize import methods

    quant = {key.removeprefix("quant."): value for key, value in values.items() if key.startswith("quant.")}
    run = jobs.RunOptions(threads=1, override=values.get("run.override", ()))
    return {"method": methods.create("gptq", **quant), "run": run}


def test_experts_of_a_layer_are_one_unit_and_llama_cpp_has_one_for_each_projection(tiny_model, tmp_path):
    source = tiny_model("qwen3_moe", tokenizer=True, norm_topk_prob=True)
    space = ENGINES["vllm"]
    units = space.units(prepared_for(space, source, tmp_path))
    experts = [unit for unit in units if unit.name.endswith("experts")]
    assert experts and all(len({row.local.split(".")[-1] for row in unit.specs}) == 3 for unit in experts)
    choice = {unit.name: [*unit.candidates][unit is experts[0]] for unit in units}
    (pattern,) = space.values(units, choice)["run.override"]
    assert r"layers\.0\.mlp\.experts\.\d+\.(" in pattern
    space = ENGINES["llama.cpp"]
    names = {unit.name: len(unit.specs) for unit in space.units(prepared_for(space, source, tmp_path))}
    count = len(experts[0].specs) // 3
    assert {names[f"blk.0.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")} == {count}
    assert names["token_embd.weight"] == 0


@pytest.mark.parametrize(("family", "scaled"), [("olmo2", False), ("llama", True)])
def test_llama_cpp_has_types_with_separate_scales_only_where_it_applies_them(
    tiny_model, tmp_path, family, scaled
):
    """Else the file would have another type than the one that was searched, or no search began at all."""
    space = ENGINES["llama.cpp"]
    job = prepared_for(space, tiny_model(family, tokenizer=True), tmp_path)
    units = space.units(job)
    offered = {unit.name for unit in units if "NVFP4" in unit.candidates}
    assert offered == {unit.name for unit in units if scaled and unit.block is not None}
    presets = [preset.name for preset in space.presets(units, job)]
    assert ("NVFP4" in presets) == scaled and "Q4_K_M" in presets


class Noisy:
    """Candidates that are a unit's own weights and noise."""

    def __init__(self, skeleton, outside=None):
        self.skeleton, self.embedding = skeleton, outside

    def values(self, unit: Unit, candidate: str, weight: torch.Tensor) -> torch.Tensor:
        draw = torch.Generator().manual_seed(hash((unit.block, unit.candidates[candidate])) % 2**31)
        return weight + unit.candidates[candidate] / 100 * torch.randn(weight.shape, generator=draw)

    def usual(self, index: int, entering):
        """Every linear, with noise of its own."""
        names = [f"self_attn.{leaf}_proj" for leaf in "qkvo"] + ["mlp.gate_proj", "mlp.up_proj"]
        return {name: self.noisy(self.skeleton.part(index, name).weight, index) for name in names}

    @staticmethod
    def noisy(weight: torch.Tensor, index: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(index)
        return weight + 0.05 * torch.randn(weight.shape, generator=draw)

    def measured(self, unit: Unit, entering):
        own = {row.local: self.skeleton.part(unit.block, row.local).weight for row in unit.specs}
        return {name: self.values(unit, measured(unit), weight) for name, weight in own.items()}


@pytest.mark.parametrize("room", [3, 64])
def test_streams_have_the_divergence_of_the_whole_model(tiny_model, tmp_path, room):
    """However many walks they take."""
    source = tiny_model("llama", tokenizer=True, num_hidden_layers=3)
    space = ENGINES["vllm"]
    row = {"small": 1, "large": 9}
    units = [
        Unit(unit.name, unit.block, unit.specs, 8, row)
        for unit in space.units(prepared_for(space, source, tmp_path))
    ]
    skeleton = Skeleton(open_checkpoint(str(source)), torch.float32, CPU)
    skeleton.load_rest()
    ids = torch.randint(60, (4, 12), generator=torch.Generator().manual_seed(3))
    noisy, steps = Noisy(skeleton), []
    with torch.no_grad():
        *_, (of_usual, found) = unit_divergence.measure(
            skeleton, units, ids.split(2), ids.split(2), noisy, room, lambda: steps.append(1)
        )
    _, *steps = steps  # the first one is before the first block
    assert sum(steps) == unit_divergence.steps(units, 3) == len(units) // 3 * (3 + 2 + 1)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()

    def predictions() -> torch.Tensor:
        with torch.no_grad():
            return model(ids).logits.log_softmax(-1)

    def divergence(expected: torch.Tensor) -> float:
        return (expected.exp() * (expected - predictions())).sum(-1).mean().item()

    originals, original = {}, predictions()
    for name, module in model.named_modules():
        _, _, place = name.partition("model.layers.")
        index, _, leaf = place.partition(".")
        if leaf.endswith("_proj"):
            originals[module] = module.weight.data
            if not leaf.endswith("down_proj"):
                module.weight.data = noisy.noisy(module.weight.data, int(index))
    assert of_usual["mean"] == pytest.approx(divergence(original), rel=1e-3) and of_usual["mean"] > 0
    replaced = predictions()
    assert len(found) == len(units)
    for unit in units[::3]:
        own = {}
        for linear in unit.specs:
            module = model.get_submodule(linear.name)
            own[module] = module.weight.data
            module.weight.data = noisy.values(unit, measured(unit), originals[module])
        naive = divergence(replaced)
        for module, weight in own.items():
            module.weight.data = weight
        mean, stderr = found[unit.name]["mean"], found[unit.name]["stderr"]
        assert mean == pytest.approx(naive, rel=1e-3, abs=1e-7) and naive > 0 and stderr > 0


def test_candidates_are_solved_behind_the_transform_of_the_job(tiny_model, tmp_path):
    """A job stores the same, but for the scales that it moved into the norm; and the block is put back."""
    folder = tiny_model("llama", tokenizer=True, num_hidden_layers=1, hidden_size=64, intermediate_size=128)

    def spread(name: str, tensor: torch.Tensor) -> None:
        """A few channels that norms make large, and linears small."""
        if "input_layernorm" in name:
            tensor[[3, 40]] *= 32
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensor[:, [3, 40]] /= 32

    source = jobs.rewrite(folder, spread)
    space = ENGINES["transformers"]
    prepared = prepared_for(space, source, tmp_path)
    units = space.units(prepared)
    unit = next(one for one in units if one.name.endswith("q_proj"))
    stored = usual(unit)
    skeleton = prepared.skeleton
    skeleton.load_rest()
    skeleton.load_block(0)
    before = {name: part.clone() for name, part in skeleton.blocks[0].named_parameters()}
    solving = Solving(SimpleNamespace(job=prepared, space=space, units=units), (), tmp_path)
    entering = [skeleton.embed(ids) for ids in prepared.batches]
    with torch.no_grad():
        found = solving.usual(0, entering)["self_attn.q_proj"]
        assert solving.measured(unit, entering).keys() == {"self_attn.q_proj"}
    assert solving.errors[unit.name]["solved"].keys() == {measured(unit), stored}
    for name, part in skeleton.blocks[0].named_parameters():
        assert torch.equal(part, before[name]), name
    bits, group_size = map(int, stored.split(","))
    made = tmp_path / "made"
    jobs.quantize(
        "gptq", source, made, {"bits": bits, "group_size": group_size, "layout": space.layout},
        calibration=jobs.calibration(tmp_path),
    )  # fmt: skip
    made, name = open_checkpoint(str(made)), "model.layers.0.self_attn.q_proj.weight"
    norm = "model.layers.0.input_layernorm.weight"
    ours = found.float() * before["input_layernorm.weight"].float()
    theirs = made.read(name).float() * made.read(norm).float()
    assert not torch.equal(made.read(norm), before["input_layernorm.weight"]), "nothing was scaled"
    close = torch.isclose(ours, theirs, rtol=1e-2, atol=1e-4 * theirs.abs().max().item())
    assert close.float().mean() > 0.99


def test_an_embedding_is_replaced_where_it_is_read_and_where_it_predicts(tiny_model, tmp_path):
    """Tied, as llama.cpp's files hold it."""
    source = tiny_model("llama", tokenizer=True, tie_word_embeddings=True, hidden_size=64)
    space = ENGINES["llama.cpp"]
    prepared = prepared_for(space, source, tmp_path)
    skeleton = prepared.skeleton
    skeleton.load_rest()
    unit = next(one for one in space.units(prepared) if one.name == "token_embd.weight")
    ids = prepared.calibration.tokens
    with torch.no_grad():
        errors, embedding, head = solved_outside(prepared, list(ids.split(2)), unit, "Q4_0")
    assert 0 < errors["solved"]["Q4_0"] <= errors["nearest"]["Q4_0"] < errors["nearest"]["Q8_0"] * 1e4
    (weight,) = embedding.values()
    assert head == embedding and not torch.equal(weight, skeleton.model.get_input_embeddings().weight)
    hidden = skeleton.embed(ids[:1], embedding)
    assert torch.equal(hidden[0], weight[ids[0]])
    norm = skeleton.model.get_decoder().norm(hidden[0])
    assert torch.allclose(skeleton.logits(hidden[0], head), norm @ weight.T, atol=1e-5)
    assert not torch.allclose(skeleton.logits(hidden[0]), norm @ weight.T, atol=1e-5)


@pytest.mark.parametrize(
    "text, size",
    [
        ("4GB", 4 * 10**9),
        ("3.5GiB", 3.5 * 2**30),
        ("700 mb", 7 * 10**8),
        ("4g", 4 * 10**9),
        ("12B", 12),
        (".5Gi", 2**29),
    ],
)
def test_sizes_are_read(text, size):
    assert size_bytes(text, "--max-size") == size


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "no budget is given"),
        ({"bpw": 3.0, "max_kld": 0.1}, "^--bpw and --max-kld are 2 budgets$"),
        ({"bpw": -1.0}, "--bpw -1 is invalid"),
        ({"max_size": "many"}, "--max-size 'many' is not a size"),
        ({"max_size": "4"}, "--max-size 4 has no unit"),
    ],
)
def test_a_budget_is_one_and_makes_sense(options, message):
    with pytest.raises(QuantkitError, match=message):
        AutoOptions(**options).check()


@pytest.mark.parametrize("engine", ["vllm", "transformers", "llama.cpp"])
def test_engines_that_do_not_read_zero_points_say_so(engine):
    request = AutoRequest("nowhere", AutoOptions(bpw=4, engine=engine, sym=False), {})
    with pytest.raises(QuantkitError, match=f"--no-sym: {engine} does not read"):
        prepare(request, jobs.Progress())
    assert replace(ENGINES["any"], symmetric=False).method.options.sym is False


def test_a_prediction_that_was_too_low_ends_with_the_best_result():
    """The smallest possible prediction is 0.009, its measured divergence 0.0108: above --max-kld 0.01."""
    units = [Unit(name, 0, (), 80, {"4": 40, "8": 80}) for name in "abc"]
    search, warned = results.Search.__new__(results.Search), []
    options = SimpleNamespace(max_kld=0.01)
    search._auto = SimpleNamespace(units=units, request=SimpleNamespace(options=options))
    search._progress = SimpleNamespace(warn=warned.append)
    search._losses = {
        (unit.name, bits): loss for unit in units for bits, loss in (("4", 0.005), ("8", 0.003))
    }

    def made(choice):
        predicted = sum(search._losses[item] for item in choice.items())
        record = {"predicted_kld": predicted, "kld": 1.2 * predicted, "chosen_bytes": 1}
        return results.Made(SimpleNamespace(choice=choice), None, "", record)

    search._made = made
    (only,) = search.within_divergence()
    assert only.preset.choice == dict.fromkeys("abc", "8")
    assert warned == ["no result stays within a divergence of 0.01; the closest is kept"]
