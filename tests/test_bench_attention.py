"""`--attn`: the fit of memory, which kernel ran, allocations counted, refusals, what is shown."""

import importlib.resources
import json
import re
from dataclasses import asdict

import far_device
import jsonschema
import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import eager_attention_forward

from quantkit.errors import QuantkitError, first_line
from quantkit.evaluation.comparison import drawing
from quantkit.models.files.open import open_checkpoint
from quantkit.serving.bench.attention.fit import fit
from quantkit.serving.bench.attention.kernels import Operators, describe
from quantkit.serving.bench.attention.measure import Row, allocations, measure
from quantkit.serving.bench.attention.settings import Settings
from quantkit.serving.bench.attention.show import report, verdict

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


def measured(checkpoint, lengths=LENGTHS):
    settings = Settings(("eager", "sdpa", "no_such_attention"), lengths, batch=BATCH, steps=2, repeats=2)
    return measure(checkpoint, settings, torch.float32, CPU)


def test_a_parabola_is_found_as_it_is():
    lengths = (10, 20, 40, 80, 160)
    found = fit([(n, 500 + 30 * n + 24 * n**2) for n in lengths], heads=3, bytes_per_value=4, batch=2)
    assert (found["a"], found["b"], found["c"]) == pytest.approx((500, 30, 24), rel=1e-6)
    assert found["scores"] == 3 * 4 * 2 and found["matrices"] == pytest.approx(1) and found["quadratic"]
    assert found["error"] < 1e-6


def test_noise_is_numpys_standard_error_and_a_line_is_no_parabola():
    lengths = np.array([32, 64, 128, 256, 504])
    nbytes = 1e6 + 9_000 * lengths + np.array([3e4, -5e4, 2e4, 4e4, -1e4])
    found = fit(list(zip(lengths, nbytes, strict=True)), heads=4, bytes_per_value=2)
    coefficients, covariance = np.polyfit(lengths, nbytes, 2, cov=True)
    assert (found["c"], found["error"]) == pytest.approx((coefficients[0], covariance[0, 0] ** 0.5), rel=1e-4)
    assert found["told"] and not found["quadratic"] and "does not grow with N²" in verdict(found)


def test_prompts_too_short_to_tell_are_said_to_be():
    """As measured: up to 256 tokens something else is the peak, and the parabola bends the wrong way."""
    found = fit([(32, 770_000), (64, 1_300_000), (128, 2_450_000), (256, 4_450_000)], 4, 2)
    assert found["c"] < 0 and not found["told"] and "is not told by prompts this short" in verdict(found)


def test_three_lengths_are_too_few():
    assert fit([(1, 1), (2, 4), (3, 9), (3, 9)], heads=1, bytes_per_value=2) is None


@pytest.mark.parametrize(
    ("operators", "told"),
    [
        (["aten::bmm", "aten::_softmax"], "scores written out (matmul, softmax, matmul)"),
        (["aten::_scaled_dot_product_flash_attention_for_cpu"], "flash, torch's own for CPUs"),
        (["aten::_softmax", "aten::_scaled_dot_product_efficient_attention"], "memory-efficient"),
        (["aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_cudnn_attention"],
         "flash, cuDNN"),
        (["flash_attn::_flash_attn_varlen_forward"], "flash_attn::_flash_attn_varlen_forward"),
        (["aten::mm"], "not known: torch's dispatcher showed no attention"),
    ],
)  # fmt: skip
def test_operators_have_names(operators, told):
    assert describe(operators) == told


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        (torch.nn.attention.SDPBackend.FLASH_ATTENTION, "flash, torch's own for CPUs"),
        (
            torch.nn.attention.SDPBackend.MATH,
            "torch's math fallback: scores written out (matmul, softmax, matmul)",
        ),
    ],
)
def test_the_backend_that_torch_was_told_to_take_is_seen(backend, told):
    query = torch.randn(1, 2, 8, 16)
    with torch.no_grad(), torch.nn.attention.sdpa_kernel(backend), Operators() as seen:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert describe(seen.names, "sdpa") == told


def test_allocations_are_counted_to_the_byte():
    def work():
        made = torch.ones(48 << 20, dtype=torch.uint8)
        torch.ones(16 << 20, dtype=torch.uint8)
        return made[:1].clone()

    made, kept, most = allocations(CPU, work)
    assert made.item() == 1 and 0 < kept <= 64 and (64 << 20) <= most <= (64 << 20) + 64


def test_two_measurements_count_alike(result, checkpoint):
    again = measured(checkpoint, LENGTHS[:1])
    counts = [
        [(row["prefill_bytes"], row["decode_bytes"]) for row in made["rows"][:2]] for made in (result, again)
    ]
    assert counts[0] == counts[1] and None not in counts[0][0]


def test_decoding_holds_the_cache_of_the_prompt(result, checkpoint):
    sizes = checkpoint.text_config
    values = 2 * sizes.num_key_value_heads * sizes.head_dim * sizes.num_hidden_layers
    for row in result["rows"][:2]:
        assert row["decode_bytes"] > 4 * BATCH * values * row["length"]


def test_eager_writes_its_scores_out_and_sdpa_does_not(result):
    """In float32 two at a time (a product and its scaled or masked copy), and the mask for all heads."""
    eager, sdpa = result["fits"]["eager"], result["fits"]["sdpa"]
    assert eager["scores"] == 4 * BATCH * result["heads"]
    assert eager["matrices"] == pytest.approx(2 + 1 / result["heads"], abs=0.6)
    assert eager["quadratic"] and not sdpa["quadratic"] and abs(sdpa["matrices"]) < 0.2


def test_rows_say_what_ran_and_why_not(result, folder):
    assert [(row["length"], row["attention"]) for row in result["rows"]] == [
        (length, name) for length in LENGTHS for name in result["settings"]["implementations"]
    ]
    eager, sdpa, missing = result["rows"][:3]
    assert eager["kernel"] == "scores written out (matmul, softmax, matmul)"
    assert sdpa["kernel"] == "flash, torch's own for CPUs"
    assert len(eager["seconds"]) == len(eager["step_seconds"]) == 2 and not eager["refused"]
    with pytest.raises(ValueError) as reason:
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="no_such_attention")
    words = missing["refused"].removesuffix(" …")  # cut where a first line is a paragraph
    assert missing == asdict(Row("no_such_attention", 256, refused=missing["refused"]))
    assert len(words) > 80 and first_line(reason.value).startswith(words)


def test_an_implementation_that_fails_at_a_length_is_refused_from_there_on(checkpoint):
    def short(module, query, *arguments, **more):
        if query.shape[2] > 32:
            raise RuntimeError("headdim not supported\nmore lines")
        return eager_attention_forward(module, query, *arguments, **more)

    AttentionInterface.register("short_only", short)
    settings = Settings(("short_only",), (24, 48, 64), steps=1, repeats=1)
    rows = measure(checkpoint, settings, torch.float32, CPU)["rows"]
    assert [row["refused"] for row in rows] == ["", *["headdim not supported"] * 2]
    assert [bool(row["kernel"]) for row in rows] == [True] * 3


@pytest.mark.parametrize("mistake", [KeyError, TypeError, AttributeError])
def test_a_mistake_is_no_refusal(checkpoint, mistake):
    def wrong(*arguments, **more):
        raise mistake("ours")

    AttentionInterface.register("wrong", wrong)
    with pytest.raises(mistake, match="ours"):
        measure(checkpoint, Settings(("eager", "wrong"), (8,), steps=1), torch.float32, CPU)


def test_what_would_take_too_long_is_not_begun(checkpoint):
    settings = Settings(("sdpa",), (16, 1000), steps=1, repeats=1, limit=1e-6)
    with pytest.raises(QuantkitError, match="no attention ran: sdpa: would take up to") as error:
        measure(checkpoint, settings, torch.float32, CPU)
    assert error.value.exit_code == 4


@pytest.mark.parametrize(
    ("context", "steps", "planned"),
    [(512, 8, [32, 64, 128, 256, 504]), (8192, 8, [512, 1024, 2048, 4096]),
     (None, 8, [256, 512, 1024, 2048, 4088]), (4, 8, [1]), (40, 8, [4, 8, 16, 32])],
)  # fmt: skip
def test_lengths_end_where_the_model_does(context, steps, planned):
    assert Settings(steps=steps).plan(context) == planned


def test_lengths_beyond_the_context_are_for_those_who_ask():
    with pytest.raises(QuantkitError, match="prompts of 505, 600 and 8 decoded tokens") as error:
        Settings(lengths=(600, 505, 504)).plan(512)
    assert error.value.exit_code == 2 and "504 or less, or add --beyond" in error.value.hint
    assert Settings(lengths=(600, 8, 8), beyond=True).plan(512) == [8, 600]
    assert Settings(lengths=(100_000,)).plan(None) == [100_000]


@pytest.mark.parametrize("values", [{"implementations": ()}, {"steps": 0}, {"batch": 0}, {"lengths": (0,)}])
def test_settings_that_make_no_sense_are_refused(values):
    with pytest.raises(QuantkitError) as error:
        Settings(**values).check()
    assert error.value.exit_code == 2


def test_the_record_is_what_its_schema_says(result):
    place = importlib.resources.files("quantkit").joinpath("serving/bench/attention/bench-attention-1.json")
    schema = json.loads(place.read_text(encoding="utf-8"))
    made = json.loads(json.dumps(result, allow_nan=False))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(made, schema)
    assert made["rows"][2]["refused"] and made["rows"][0]["length"] == 256


def test_what_is_shown_fits_a_narrow_terminal(result, capsys):
    report(result).show(Console(width=80, force_terminal=True, color_system=None))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert re.search(r"no_such_attention +256 +refused", shown)  # on one line
    assert "eager ran: scores written out" in shown and "no_such_attention refused: " in shown
    assert "768 tokens, weights and all: eager" in shown


def test_without_a_peak_there_is_no_fit_but_times(result, capsys):
    rows = [row | {"prefill_bytes": None, "decode_bytes": None} for row in result["rows"]]
    blind = result | {"rows": rows, "fits": {}, "memory": "not told by this device"}
    made = report(blind)
    made.show(Console(width=80))
    assert "not told by this device" in (shown := capsys.readouterr().out) and "score matrices" not in shown
    assert [figure.key for figure in made.figures] == ["time"]


def test_plots_show_times_and_memory(result):
    times, memory = report(result).figures
    assert [series.label for series in times.series] == ["eager", "sdpa"]
    assert [point.x for point in times.series[0].points] == list(LENGTHS)
    measured = [row["prefill_bytes"] for row in result["rows"] if row["attention"] == "eager"]
    dots, curve = memory.series[:2]
    assert [point.y for point in dots.points] == measured and curve.bare
    assert drawing.document(memory).count("<title>") == 2 * len(LENGTHS)


def test_it_runs_on_an_accelerator(checkpoint):
    """On the double, whose allocator tells no peak and which takes sdpa as one kernel."""
    with far_device.present():
        settings = Settings(("eager", "sdpa"), (8, 16), steps=1, repeats=1)
        made = measure(checkpoint, settings, torch.float32, far_device.FAR)
    assert [row["refused"] for row in made["rows"]] == [""] * 4
    assert (
        made["rows"][0]["kernel"].startswith("scores written out")
        and made["rows"][0]["prefill_bytes"] is None
    )
    assert made["memory"] == "not told by this device"
