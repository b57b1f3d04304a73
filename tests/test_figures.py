"""Plots: the data they show, and the drawings, read between their ticks as people do."""

import itertools
import re
import xml.etree.ElementTree as ElementTree

import pytest
import records
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from quantkit.evaluation.comparison import drawing, figures, table


def test_figures_hold_the_records_numbers():
    (quality,) = table.report(records.record()).figures
    points = {series.label: (series.points[0].x, series.points[0].y) for series in quality.series}
    assert points == {"four": (4_000_000, 0.02), "three": (3_000_000, 0.08)}
    assert quality.front == ((3_000_000, 0.08), (4_000_000, 0.02))
    assert [(line.axis, line.value) for line in quality.lines] == [("x", 16_000_000), ("y", 0.0002)]


def test_what_has_no_place_on_a_logarithmic_axis_is_said():
    record = records.record(
        records.model("base", 9), records.model("copy", 9, 0.0), records.model("c", 5, 0.1)
    )
    quality = figures.quality(record)
    assert [series.label for series in quality.series] == [
        "c"
    ] and "Not drawn: copy (0.00000)" in quality.caption


def test_without_divergences_the_perplexity_is_drawn():
    record = records.record()
    for model in record["models"]:
        del model["metrics"]["kld"], model["metrics"]["top1"]
    record["pareto"]["loss"] = "metrics.ppl.value"
    quality = figures.quality(record)
    assert [series.points[0].y for series in quality.series] == [20.0, 20.5, 22.0]
    assert quality.series[1].points[0].high == 20.55  # of the paired difference, not of the perplexity
    assert not quality.y.log and "perplexity" in drawing.svg(quality, 500, 300)


def test_one_model_alone_has_no_figures():
    alone = records.record(records.model("base", 9))
    assert table.report(alone).figures == []
    assert "<svg" not in table.report(alone | {"noise_floor": None}).page()


def test_error_bars_are_told():
    record = records.record()
    assert figures.quality(record).described().endswith("Bars: one standard error.")
    record["pareto"]["loss"] = "metrics.ppl.value"
    assert "Bars: one standard error of the difference" in figures.quality(record).described()
    for model in record["models"]:
        model["metrics"]["dppl"] = None
    assert "Bars" not in figures.quality(record).described()


@pytest.mark.parametrize(("width", "height"), [(350, 330), (590, 380), (900, 550)])
def test_all_names_are_in_the_legend_above_the_plot(width, height):
    quality = figures.quality(records.many())
    with drawing.theme():
        canvas = drawing.draw(quality, width, height, titled=False)
        canvas.draw_without_rendering()
        (axes,), (legend,) = canvas.axes, canvas.legends
        assert [text.get_text() for text in axes.texts] == [line.label for line in quality.lines]
        assert [text.get_text() for text in legend.get_texts()] == [
            drawing.shortened(series.label) for series in quality.series
        ]
        box, plot = legend.get_window_extent(), axes.bbox
        assert box.y0 > plot.y1 and box.x1 <= canvas.bbox.x1 and plot.height > 0.6 * height


@pytest.mark.parametrize("width", [370, 900])
def test_labels_of_ticks_do_not_touch_nor_names_their_lines(width):
    """Sizes such as `125 MB` and prompts up to 131,072 tokens, on a phone and on a screen."""
    point = (figures.Point(98e6, 0.7), figures.Point(270e6, 0.02))
    lines = (figures.Line("base", "x", 269e6), figures.Line("noise floor", "y", 0.03))
    loss, lengths = figures.Axis("", log=True), tuple(2**k for k in range(7, 18))
    sizes = figures.Figure(
        "k", "t", "c", figures.Axis("", "bytes"), loss, (figures.Series("a", point, 0, False),), lines
    )
    prompts = figures.Figure(
        "k", "t", "c", figures.Axis("", "whole", True, lengths), loss,
        (figures.Series("a", tuple(figures.Point(x, x) for x in lengths), 0, True),),
    )  # fmt: skip
    for figure in (sizes, prompts):
        with drawing.theme():
            canvas = drawing.draw(figure, width, 340, titled=False)
            canvas.draw_without_rendering()
        (axes,) = canvas.axes
        low, high = axes.get_xlim()
        ticks = [label for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high]
        boxes = [label.get_window_extent() for label in ticks]
        assert len(boxes) >= 3 and all(a.x1 + 3 < b.x0 for a, b in itertools.pairwise(boxes))
        for text, line in zip(axes.texts, axes.lines, strict=False):
            box, (x, y) = text.get_window_extent(), line.get_window_extent().min
            assert box.x1 < x if text.get_rotation() else box.y0 > y


def test_an_svg_is_xml_with_every_note_and_both_schemes():
    record = records.record(records.model("base", 9), records.model(records.NASTY, 5, 0.1))
    for figure in table.report(record).figures:
        root = ElementTree.fromstring(drawing.document(figure))
        titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
        assert titles == [drawing.shown(p.note) for series in figure.series for p in series.points]
        assert "prefers-color-scheme: dark" in drawing.document(figure)


@pytest.mark.parametrize(
    ("low", "high", "log", "kind", "expected"),
    [
        (0, 10, False, "number", "0 2 4 6 8 10"),
        (0, 3, False, "whole", "0 1 2 3"),
        (0, 79, False, "whole", "0 10 20 30 40 50 60 70 80"),
        (3e9, 16e9, False, "bytes", "4 GB|6 GB|8 GB|10 GB|12 GB|14 GB|16 GB"),
        (1e-4, 1, True, "number", "0.0001 0.001 0.01 0.1 1"),
        (0.01, 0.2, True, "number", "0.01 0.02 0.05 0.1 0.2"),
        (0.0020, 0.0034, True, "number", "0.002 0.0022 0.0024 0.0026 0.0028 0.003 0.0032 0.0034"),
        (1, 131072, True, "whole", "1 10 100 1000 10000 100000"),
        (5, 5, False, "number", "4.8 4.9 5 5.1 5.2"),
    ],
)
def test_ticks_are_round(low, high, log, kind, expected):
    points = tuple(figures.Point(value, 1) for value in (low, high))
    axis, series = figures.Axis("", kind, log), (figures.Series("a", points, 0, True),)
    with drawing.theme():
        canvas = drawing.draw(figures.Figure("k", "t", "c", axis, figures.Axis(""), series), 720, 440, False)
    (axes,) = canvas.axes
    low, high = axes.get_xlim()
    texts = [tick.get_text() for tick in axes.get_xticklabels() if low <= tick.get_position()[0] <= high]
    assert texts == re.split(r"\||(?<!\d) | (?=\d)", expected)


@pytest.mark.nightly
def test_png_plots(tmp_path):
    many = records.many()
    record = many | {"models": [*many["models"], records.model(records.NASTY, 8_000_000, 0.001)]}
    for figure in table.report(record).figures:
        drawing.png(figure, path := tmp_path / f"{figure.key}.png")
        pixels = imread(path)
        assert pixels.shape[0] >= 880 and pixels.shape[1] == 1440
        for series in figure.series:
            near = abs(pixels[:, :, :3] - to_rgb(drawing.SERIES[series.colour % 8])).max(2) < 0.01
            assert near.sum() > 20
