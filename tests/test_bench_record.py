"""What a benchmark derives and tells: statistics, b*, record, table, plots, page, quality."""

import json

import numpy as np
import pytest
import records
from bench_runs import SMALL, checked, measured

from quantkit.evaluation.comparison.figures import Axis, Figure, Point, Series
from quantkit.evaluation.comparison.record import merge, read
from quantkit.evaluation.comparison.report import Outputs, Report, Table
from quantkit.serving.bench.record import fit, record, summary
from quantkit.serving.bench.settings import BenchSettings
from quantkit.serving.bench.show import report

# ---- numbers


def test_a_summary_of_runs():
    found = summary([4.0, 1.0, 2.0, 10.0])
    assert found == {
        "median": 3.0, "p90": pytest.approx(8.2), "min": 1.0, "max": 10.0, "mad": 0.5,
    }  # fmt: skip
    assert summary([7.0])["p90"] == 7.0


def test_a_fit_recovers_the_batch_from_which_sequences_cost_time():
    found = fit([(batch, 0.012 + 0.001 * batch) for batch in (1, 2, 4, 8, 16, 32, 64)])
    assert found == pytest.approx({"floor": 0.012, "slope": 0.001, "optimal_batch": 12.0})


def test_noise_of_a_tenth_moves_the_batch_by_little():
    noise = np.random.default_rng(1).normal(1, 0.1, 7)
    times = [(2**k, (0.012 + 0.001 * 2**k) * noise[k]) for k in range(7)]
    assert fit(times)["optimal_batch"] == pytest.approx(12, rel=0.35)


def test_no_fit_without_three_batches_or_a_cost():
    assert fit([(1, 0.1), (8, 0.2)]) is None
    assert fit([(1, 0.4), (2, 0.2), (4, 0.1)]) is None  # falling times
    assert fit([]) is None


# ---- what is told


SWEEP = BenchSettings(batch="1,2,4,8,16", prompt_tokens="8,16", tokens=5, repeats=2, rounds=2)


@pytest.fixture
def swept() -> dict:
    """Two models; the second twice as fast at first, then half as slow, and noisy."""
    return checked(
        record(
            [
                measured("org/base", SWEEP, lambda batch, number: 0.004 + 0.001 * batch),
                measured(
                    "org/base-nf4", SWEEP, lambda batch, number: (0.002 + 0.0005 * batch) * (1 + number / 2),
                    kernels="bitsandbytes Linear4bit", packed=True,
                ),
            ],
            SWEEP,
        )
    )  # fmt: skip


def test_a_record_has_the_figures_of_its_runs(swept):
    base, other = swept["models"]
    point = base["points"][1]
    assert (point["batch"], point["prompt"]) == (2, 8)
    assert point["prefill"]["median"] == pytest.approx(16 / 0.08)
    assert point["first_token"]["median"] == pytest.approx(0.08)
    assert point["decode"]["median"] == pytest.approx(2 / 0.006)
    assert point["latency"]["p90"] == pytest.approx(0.006)
    assert (point["kv_bytes"], point["peak_bytes"], point["ratio"]) == (200, 5002, 1.0)
    assert other["points"][1]["ratio"] == pytest.approx((2 + 2 / 1.5) / 2)
    assert base["load"]["seconds"] == 0.5
    assert [fitted["optimal_batch"] for fitted in base["fits"]] == pytest.approx([4.0, 4.0])


def test_the_table(swept, capsys):
    report(swept).show()
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert " ".join(lines[1]).startswith("model engine size model bits decode/s ratio")
    assert ["2", "×", "8", "tokens"] in lines
    shown = next(line for line in lines if line[:2] == ["base-nf4", "bitsandbytes"])
    assert shown[2:8] == ["0.00", "MB", "16.00", "333", "1.67×", "20%"]
    assert "b* of base, 8 tokens: 4.00 (a step takes 4.00 ms + 1.00 ms·b)" in out
    assert "noisy: runs of base-nf4 (± 20 %) differ: stop other programs" in out
    assert "2 rounds of 2 runs after 1 to warm up" in out and "bitsandbytes Linear4bit, packed" in out


def test_every_figure_can_be_drawn(swept, tmp_path):
    pytest.importorskip("matplotlib")
    from quantkit.evaluation.comparison import drawing

    found = report(swept).figures
    assert [figure.key for figure in found] == ["batch-8", "batch-16", "size"]
    assert drawing.document(found[0]).count("<title>") == 2 * 5


def test_the_page():
    pytest.importorskip("matplotlib")
    rows = [measured(name, SMALL, lambda batch, number: 0.1) for name in ("a/one", "b/<two>")]
    text = report(record(rows, SMALL)).page()
    assert "3 × 5 tokens" in text and text.count('<svg class="plot"') == 4  # each for phones, too
    assert "<script" not in text and "&lt;two&gt;" in text and "<two>" not in text


def test_one_model_has_its_knee_in_its_plot():
    row = measured("base", SWEEP, lambda batch, number: 0.004 + 0.001 * batch)
    found = report(record([row], SWEEP)).figures
    assert [line.label for line in found[0].lines] == ["b* 4.00"]


def test_a_model_in_two_engines_is_two_names():
    engines = ("llama.cpp", "transformers")
    rows = [measured("m.gguf", SMALL, lambda batch, number: 0.1, engine=name) for name in engines]
    made = checked(record(rows, SMALL))
    assert [model["label"] for model in made["models"]] == [
        "m.gguf (llama.cpp)",
        "m.gguf (transformers)",
    ]


def test_the_same_model_twice_is_two_names():
    rows = [measured("m", SMALL, lambda batch, number: 0.1, engine="transformers") for _ in range(2)]
    assert [model["label"] for model in checked(record(rows, SMALL))["models"]] == ["m", "m #2"]


# ---- quality


def test_quality_is_found_by_source_or_name(tmp_path):
    evaluated = records.record(
        records.model("org/base", 2000),
        records.model("./out/base-nf4", 2000, 0.02),
        records.model("c", 7, 0.3),
    )
    path = tmp_path / "result.json"
    path.write_text(json.dumps(evaluated))
    told = merge([read(path)])
    names = ("org/base", "/tmp/base-nf4/", "c", "other")
    rows = [measured(name, SMALL, lambda batch, number: 0.1) for name in names]
    made = checked(record(rows, SMALL, told))
    assert [model["quality"] and model["quality"]["kld"] for model in made["models"]] == [
        0.0,
        0.02,
        None,
        None,
    ]
    assert made["models"][1]["quality"]["perplexity"] == evaluated["models"][1]["metrics"]["ppl"]["value"]
    assert ("--quality has no model of this name and size: c, other", "dim") in report(made).notes
    (figure,) = [figure for figure in report(made).figures if figure.key == "quality"]
    assert [(series.label, series.points[0].y) for series in figure.series] == [("base-nf4", 0.02)]


def test_a_report_becomes_a_page_and_plots(tmp_path):
    pytest.importorskip("matplotlib")
    series = (Series("<two>", (Point(1, 2), Point(2, 3)), 0, joined=True),)
    figures = [Figure(key, "It", "", Axis("x"), Axis("y"), series) for key in ("first", "second")]
    made = Report(
        "It", [Table(("a", "b"), [("", [["one", "<two>"]])])], {"fact": "x"}, [("note", "")], figures
    )
    for suffix in (".svg", ".png"):
        Outputs(html=tmp_path / "page.html", plot=tmp_path / f"plot{suffix}").write(made)
    text = (tmp_path / "page.html").read_text()
    assert '<td data-label="b">&lt;two&gt;</td>' in text and "note" in text
    assert text.count('<svg class="plot"') == 4
    assert "prefers-color-scheme" in (tmp_path / "plot.svg").read_text()
    assert (tmp_path / "plot-second.png").read_bytes().startswith(b"\x89PNG")
