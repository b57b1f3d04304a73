"""`bench attention`: the kernel that ran, allocations counted, refusals, the report."""

import far_device
import numpy as np
import pytest
import torch
from bench_runs import checked
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import eager_attention_forward

from quantkit.errors import QuantkitError, first_line
from quantkit.evaluation.comparison import drawing
from quantkit.models.files.open import open_checkpoint
from quantkit.serving.bench.attention.measure import Operators, allocated, describe, measure, plan
from quantkit.serving.bench.attention.show import report
from quantkit.serving.bench.settings import AttentionSettings

CPU = torch.device("cpu")
LENGTHS = (256, 384, 512, 768)
BATCH = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import families

    sizes = {"num_hidden_layers": 1, "max_position_embeddings": 1024}
    place = families.save_model(tmp_path_factory.mktemp("attention") / "llama", "llama", **sizes)
    families.save_tokenizer(place)
    return place


@pytest.fixture(scope="module")
def checkpoint(folder):
    return open_checkpoint(str(folder), None, True, False)


@pytest.fixture(scope="module")
def result(checkpoint):
    return measured(checkpoint)


def asked(names: str, lengths=(), **more) -> AttentionSettings:
    lengths = ",".join(map(str, lengths)) or None
    made = {"implementations": names, "prompt_tokens": lengths, "tokens": 1, "repeats": 1}
    made |= {"dtype": "float32", "device": "cpu"}
    return AttentionSettings(**made | more)


def measured(checkpoint, lengths=LENGTHS):
    settings = asked("eager,sdpa,no_such_attention", lengths, batch=BATCH, tokens=2, repeats=2)
    return measure(checkpoint, settings)


@pytest.mark.parametrize(
    ("operators", "told"),
    [
        (["aten::bmm", "aten::_softmax"], "scores written out (matmul, softmax, matmul)"),
        (["aten::_softmax", "aten::_scaled_dot_product_efficient_attention"],
         "aten::_scaled_dot_product_efficient_attention"),
        (["flash_attn::_flash_attn_varlen_forward"], "flash_attn::_flash_attn_varlen_forward"),
        (["aten::mm"], "not known: torch's dispatcher showed no attention"),
    ],
)  # fmt: skip
def test_operators_have_names(operators, told):
    assert describe(operators) == told


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        (torch.nn.attention.SDPBackend.FLASH_ATTENTION, "aten::_scaled_dot_product_flash_attention_for_cpu"),
        (
            torch.nn.attention.SDPBackend.MATH,
            "scores written out (matmul, softmax, matmul)",
        ),
    ],
)
def test_the_backend_that_torch_was_told_to_take_is_seen(backend, told):
    query = torch.randn(1, 2, 8, 16)
    with torch.no_grad(), torch.nn.attention.sdpa_kernel(backend), Operators() as seen:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert describe(seen.names) == told


def test_allocations_are_counted_to_the_byte():
    def work():
        made = torch.ones(48 << 20, dtype=torch.uint8)
        torch.ones(16 << 20, dtype=torch.uint8)
        return made[:1].clone()

    assert (64 << 20) <= allocated(CPU, work) <= (64 << 20) + 64


def test_eager_writes_its_scores_out_and_sdpa_does_not(result, checkpoint):
    """In float32 two at a time (a product and its scaled or masked copy), and the mask for all heads."""
    heads = checkpoint.text_config.num_attention_heads
    eager, sdpa = ([row["prefill_bytes"] for row in result["rows"][first::3]] for first in (0, 1))
    fits = [np.polyfit(LENGTHS, found, 2)[0] / (4 * BATCH * heads) for found in (eager, sdpa)]
    assert fits[0] == pytest.approx(2 + 1 / heads, abs=0.6) and abs(fits[1]) < 0.2


def test_rows_say_what_ran_and_why_not(result, folder):
    assert [(row["length"], row["attention"]) for row in result["rows"]] == [
        (length, name) for length in LENGTHS for name in ("eager", "sdpa", "no_such_attention")
    ]
    eager, sdpa, missing = result["rows"][:3]
    assert eager["kernel"] == "scores written out (matmul, softmax, matmul)"
    assert sdpa["kernel"] == "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert len(eager["seconds"]) == len(eager["step_seconds"]) == 2 and not eager["refused"]
    with pytest.raises(ValueError) as reason:
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="no_such_attention")
    words = missing["refused"].removesuffix(" …")  # cut where a first line is a paragraph
    assert (missing["seconds"], missing["prefill_bytes"], missing["kernel"]) == ([], None, "")
    assert len(words) > 80 and first_line(reason.value).startswith(words)


def test_an_implementation_that_fails_at_a_length_is_refused_from_there_on(checkpoint):
    def short(module, query, *arguments, **more):
        if query.shape[2] > 32:
            raise RuntimeError("headdim not supported\nmore lines")
        return eager_attention_forward(module, query, *arguments, **more)

    AttentionInterface.register("short_only", short)
    settings = asked("short_only", (24, 48, 64))
    rows = measure(checkpoint, settings)["rows"]
    assert [row["refused"] for row in rows] == ["", *["headdim not supported"] * 2]
    assert [bool(row["kernel"]) for row in rows] == [True] * 3


def test_eager_is_refused_for_its_scores_only_if_it_is_asked_for(checkpoint, monkeypatch):
    monkeypatch.setattr("quantkit.serving.bench.attention.measure.free_memory", lambda device: 0)
    eager, sdpa = measure(checkpoint, asked("eager,sdpa", (8,)))["rows"]
    assert eager["refused"].startswith("scores of one layer take") and not sdpa["refused"]
    with pytest.raises(QuantkitError, match="no attention ran: no_such_attention: ") as error:
        measure(checkpoint, asked("no_such_attention", (8,)))
    assert "scores of one layer" not in error.value.message


@pytest.mark.parametrize("mistake", [KeyError, TypeError, AttributeError])
def test_a_mistake_is_no_refusal(checkpoint, mistake):
    def wrong(*arguments, **more):
        raise mistake("ours")

    AttentionInterface.register("wrong", wrong)
    with pytest.raises(mistake, match="ours"):
        measure(checkpoint, asked("eager,wrong", (8,)))


def test_lengths_end_where_the_model_does():
    settings = asked("sdpa", tokens=8)
    assert plan(settings, 512) == [256] and plan(settings, 8192) == [256, 512, 1024, 2048, 4096]
    assert plan(settings, None) == plan(settings, 8192) and plan(settings, 40) == [32]
    with pytest.raises(QuantkitError, match="prompts of 505, 600 and 8 new tokens") as error:
        plan(asked("sdpa", (600, 505, 504), tokens=8), 512)
    assert error.value.exit_code == 2 and "504 or less" in error.value.hint


def test_the_record_is_what_its_schema_says(result):
    made = checked(result, "attention/bench-attention-2.json")
    assert made["rows"][2]["refused"] and made["rows"][0]["length"] == 256


def test_without_a_peak_there_are_times(result):
    made = report(result | {"rows": [row | {"prefill_bytes": None} for row in result["rows"]]})
    assert [figure.key for figure in made.figures] == ["time"]
    assert made.tables[0].groups[0][1][0][5] == "–"


def test_plots_show_times_and_memory(result):
    times, memory = report(result).figures
    assert [series.label for series in times.series] == ["eager", "sdpa"]
    assert [point.x for point in times.series[0].points] == list(LENGTHS)
    measured = [row["prefill_bytes"] for row in result["rows"] if row["attention"] == "eager"]
    assert [point.y for point in memory.series[0].points] == measured
    assert drawing.document(times).startswith("<")


def test_it_runs_on_an_accelerator(checkpoint):
    """On the double, whose allocator tells no peak and which takes sdpa as one kernel."""
    with far_device.present():
        settings = asked("eager,sdpa", (8, 16), device="far")
        made = measure(checkpoint, settings)
    assert [row["refused"] for row in made["rows"]] == [""] * 4
    assert (
        made["rows"][0]["kernel"].startswith("scores written out")
        and made["rows"][0]["prefill_bytes"] is None
    )
