"""Without --group-size: 128, or the largest of 64 and 32 that divides. What none divides stays in 16 bit."""

import json
from pathlib import Path

import jobs
import pytest

import quantkit
from quantkit.auto import job as search
from quantkit.auto.options import AutoOptions, AutoRequest
from quantkit.errors import USAGE, QuantkitError
from quantkit.evaluation.stream import Trial
from quantkit.models.files.open import open_checkpoint
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.quantize import job, methods

SMOL = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 1, "num_attention_heads": 9,
    "num_key_value_heads": 3,
}  # fmt: skip
ODD = {**SMOL, "intermediate_size": 1528}
PLAIN = {"solver": "rtn", "transform": "none", "search_scale": False}
DOWN = "model.layers.0.mlp.down_proj"
SAID = "groups of 64: 128 does not divide the 576 columns of model.layers.0.self_attn.q_proj"
KEPT = "kept in 16 bit, as 32 does not divide 1528 columns: model.layers.0.mlp.down_proj"


@pytest.fixture
def model(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda sizes, **more: tiny_model("llama", name="tiny", tokenizer=True, **sizes, **more)


def prepared(source: Path, listener=None, options=PLAIN, **run) -> job.Job:
    """Without --output, so that the name is derived."""
    return jobs.prepare("gptq", source, None, options, listener, **run)


def sizes(found: job.Job) -> dict[str, int | None]:
    return {row.name: row.grid and row.grid.group_size for row in found.specs}


@pytest.mark.parametrize(
    "linears, size",
    [
        ([], 128),
        ([(128, 1), (768, 1)], 128),
        ([(576, 1), (1536, 1)], 64),
        ([(96, 1), (256, 1)], 32),
        ([(128, 1), (1000, 1)], 128),  # no size divides 1000
        ([(192, 1), (7, 1)], 64),
        ([(7, 1)], 128),
        ([(128, 20), (160, 1)], 128),  # a small share, as the step sizes of a state-space model have
        ([(128, 20), (704, 1), (704, 1)], 64),  # experts, small one by one
    ],
)
def test_the_largest_size_that_divides_every_width_that_can_be_divided(linears, size):
    assert methods.create("gptq").with_groups(linears).options.group_size == size


def test_a_model_of_width_576_gets_groups_of_64_and_one_line_says_so(model):
    source, listener = model(SMOL), jobs.Listener()
    found = prepared(source, listener)
    assert set(sizes(found).values()) == {64} and listener.warnings == [SAID]
    assert found.staging.output == Path("tiny-rtn-w4g64-none")
    assert found.fingerprint["options"]["group_size"] == 64
    typed = prepared(source, options=PLAIN | {"group_size": 64})
    assert found.fingerprint == typed.fingerprint and typed.method.notes == ()
    asked = job.Request(str(source), methods.create("awq"), CalibrationOptions(), RunOptions())
    assert job.linears.settled(asked).destination == Path("tiny-awq-w4g64")


def test_a_linear_that_32_does_not_divide_stays_in_16_bit_and_is_named(model):
    listener = jobs.Listener()
    found = prepared(model(ODD), listener)
    assert listener.warnings == [SAID, KEPT]
    assert [name for name, size in sizes(found).items() if size is None] == [DOWN]
    assert {size for name, size in sizes(found).items() if name != DOWN} == {64}


def test_an_explicit_size_that_does_not_fit_is_an_error(model):
    source = model(ODD)
    for size, columns in ((128, 576), (64, 1528)):
        with pytest.raises(
            QuantkitError, match=f"{columns} columns do not split into groups of {size}: "
        ) as error:
            prepared(source, options=PLAIN | {"group_size": size})
        assert error.value.exit_code == USAGE
    with pytest.raises(QuantkitError, match="^1528 columns do not split into groups of 64: .*down_proj$"):
        prepared(source, override=("down_proj=8",))  # named by the user


def test_linears_that_are_excluded_or_have_their_own_size_do_not_count(model):
    source = model({**SMOL, "intermediate_size": 1504})  # only 32 divides it
    assert set(sizes(prepared(source)).values()) == {32}
    assert set(sizes(prepared(source, exclude=("down_proj",))).values()) == {64, None}
    found = sizes(prepared(source, override=("down_proj=8,32",)))
    assert found.pop(DOWN) == 32 and set(found.values()) == {64}


def test_head_and_embedding_count(model):
    source = model({**SMOL, "intermediate_size": 1024}, tie_word_embeddings=False)
    found = prepared(
        source, options=PLAIN | {"layout": "mlx", "head": 8, "embedding": 4}, exclude=("layers",)
    )
    assert {row.grid.group_size for row in found.specs if row.grid} == {64}


def test_a_model_without_a_linear_to_split_is_refused(model):
    source = model({**SMOL, "hidden_size": 60, "intermediate_size": 100, "num_attention_heads": 6})
    with pytest.raises(QuantkitError, match="no linear can be quantized: 32 does not divide 60 columns"):
        prepared(source)


def test_what_is_written_records_the_size_and_resume_finds_it(model, monkeypatch):
    source = model(ODD)
    with pytest.warns(UserWarning) as warned:
        made = quantkit.quantize("gptq", source, threads=1, **PLAIN)
    assert [str(one.message) for one in warned] == [SAID, KEPT]
    assert made.output == Path("tiny-rtn-w4g64-none")
    manifest = json.loads((made.output / "quantkit.json").read_text())
    assert manifest["job"]["options"]["group_size"] == 64 and manifest["notes"] == [SAID, KEPT]
    assert jobs.manifest(made.output)[DOWN]["kept"] == "32 does not divide 1528 columns"
    again = quantkit.quantize("gptq", source, threads=1, resume=True, **PLAIN)
    assert again.outputs == [made.output] and again.summaries == made.summaries


def test_a_trial_of_eval_has_the_size_in_its_name(model):
    checkpoint = open_checkpoint(str(model(ODD)))
    found = Trial.prepare("gptq,solver=rtn,transform=none", checkpoint)
    assert found.name == "gptq,solver=rtn,transform=none,group_size=64 (1 linear in 16 bit)"
    assert {row.grid.group_size for row in found.specs if row.grid} == {64}


def test_a_search_keeps_the_linear_and_its_recipe_leaves_it_out(model, few_tokens):
    typed = {"calibration.samples": 8, "calibration.seqlen": 32, "run.threads": 1}
    listener = jobs.Listener()
    found = search.prepare(AutoRequest(str(model(ODD)), AutoOptions(bpw=4.5), typed), listener, dry_run=True)
    assert listener.warnings[0] == KEPT
    assert {row.name for unit in found.units for row in unit.specs} == sizes(found.job).keys() - {DOWN}
    request = found.job_of(found.recipe(found.presets[0].values, ""), Path("out"))
    assert request.run.exclude == (r"^model\.layers\.0\.mlp\.down_proj$",)
    made = job.prepare(request, jobs.Listener(), dry_run=True)
    size = request.method.options.group_size
    assert sizes(made)[DOWN] is None and set(sizes(made).values()) == {None, size}
