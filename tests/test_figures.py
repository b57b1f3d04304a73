"""Plots: the data they show, and the drawings, read between their ticks as people do."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
import records

from quantkit.evaluation.comparison import figures, frame, page, png, svg


def test_figures_hold_the_records_numbers():
    quality, position, layers = figures.figures(records.record())
    points = {series.label: (series.points[0].x, series.points[0].y) for series in quality.series}
    assert points == {"four": (4_000_000, 0.02), "three": (3_000_000, 0.08)}
    assert quality.front == ((3_000_000, 0.08), (4_000_000, 0.02))
    assert [(line.axis, line.value) for line in quality.lines] == [("x", 16_000_000), ("y", 0.0002)]
    four = next(series for series in position.series if series.label == "four")
    assert [point.y for point in four.points] == [0.04, 0.02, 0.01]
    assert [point.x for point in four.points] == pytest.approx([1, 2, 28**0.5])  # 4 to 7: in the middle
    assert layers.key == "layers-output"
    assert [point.x for point in layers.series[0].points] == [0, 1, 2]
    assert [point.y for point in layers.series[0].points] == pytest.approx([0.002, 0.004, 0.006])


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
    assert not quality.y.log and "perplexity" in svg.draw(quality, 500, 300)


def test_one_model_alone_has_no_figures():
    alone = records.record(records.model("base", 9))
    assert figures.figures(alone) == []
    assert "<svg" not in page.page(alone | {"noise_floor": None})


@pytest.mark.parametrize(("width", "height"), [(590, 380), (350, 330), (900, 550)])
def test_dots_stand_where_the_ticks_say(width, height):
    """Read the drawing as a person does: between the ticks of both axes."""
    quality = figures.quality(records.many())
    root = ElementTree.fromstring(svg.draw(quality, width, height))
    space = "{http://www.w3.org/2000/svg}"
    texts = [(float(t.get("x")), float(t.get("y")), t.text) for t in root.iter(f"{space}text")]
    rows = {float(text): y - 4 for _, y, text in texts if re.fullmatch(r"[\d.e-]+", text)}
    columns = {float(text.removesuffix(" MB")): x for x, _, text in texts if re.fullmatch(r"[\d.]+ MB", text)}
    assert len(rows) > 2 and len(columns) > 2
    inside = dict(list(columns.items())[:-1])  # the last may have been moved to stay in the picture
    (mb, left), (more, right) = list(inside.items())[0], list(inside.items())[-1]
    (low, bottom), (high, top) = min(rows.items()), max(rows.items())
    dots = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter(f"{space}circle")]
    dots = [(x, y) for x, y in dots if y > frame.Frame(quality, width, height).top]  # not the legend's
    assert len(dots) == len(records.METHODS)
    for (x, y), (size, kld) in zip(dots, records.METHODS.values(), strict=True):
        assert mb + (x - left) / (right - left) * (more - mb) == pytest.approx(size / 1e6, abs=0.03)
        assert low * (high / low) ** ((y - bottom) / (top - bottom)) == pytest.approx(kld, rel=0.05)


@pytest.mark.parametrize("width", [350, 590, 900])
def test_names_cover_neither_each_other_nor_dots(width):
    quality = figures.quality(records.many())
    drawn = frame.Frame(quality, width, 380)
    names, listed = drawn.dot_names, [series.label for row in drawn.legend for _, series in row]
    assert len(names) >= 5  # of 11
    assert sorted([*listed, *(name.text for name in names)]) == sorted(s.label for s in quality.series)
    boxes = [name.box for name in names]
    for index, box in enumerate(boxes):
        assert (
            0 <= box.left and box.right <= drawn.right and drawn.top <= box.top and box.bottom <= drawn.bottom
        )
        assert not any(box.overlaps(other) for other in boxes[index + 1 :])
        for series in quality.series:
            x, y = drawn.at(series.points[0].x, series.points[0].y)
            assert not (box.left < x < box.right and box.top < y < box.bottom)
        for line in quality.lines:
            x, y = drawn.at(line.value, line.value)
            assert not (box.left < x < box.right if line.axis == "x" else box.top < y < box.bottom)


@pytest.mark.parametrize(
    ("low", "high", "log", "kind", "expected"),
    [
        (0, 10, False, "number", "0 2.5 5 7.5 10"),
        (19.4, 20.6, False, "number", "19 19.5 20 20.5 21"),
        (0, 3, False, "whole", "0 1 2 3"),
        (0, 79, False, "whole", "0 20 40 60 80"),
        (3e9, 16e9, False, "bytes", "5 GB|10 GB|15 GB"),
        (1e-4, 1, True, "number", "0.0001 0.001 0.01 0.1 1"),
        (0.01, 0.2, True, "number", "0.01 0.02 0.05 0.1 0.2"),
        (0.0020, 0.0034, True, "number", "0.002 0.0025 0.003 0.0035"),
        (1, 131072, True, "whole", "1 10 100 1000 10000 100000"),
        (5, 5, False, "number", "4.8 5 5.2"),
    ],
)
def test_ticks_are_round(low, high, log, kind, expected):
    points = tuple(figures.Point(value, value) for value in (low, high))
    axis = figures.Axis("", kind, log)
    series = (figures.Series("a", points, 0, True),)
    scale, _ = frame.scales(figures.Figure("k", "t", "c", axis, figures.Axis(""), series))
    assert [scale.write(tick) for tick in scale.ticks(5)] == re.split(r"\||(?<!\d) | (?=\d)", expected)


def test_png_plots(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    many = records.many()
    record = many | {"models": [*many["models"], records.model(records.NASTY, 8_000_000, 0.001)]}
    for figure in figures.figures(record):
        png.write(figure, path := tmp_path / f"{figure.key}.png")
        pixels = imread(path)
        assert pixels.shape[:2] == (880, 1440)
        colours = [to_rgb(svg.LIGHT[series.colour % 8]) for series in figure.series]
        for colour in colours:
            near = abs(pixels[:, :, :3] - colour).max(2) < 0.01
            assert near.sum() > 20
