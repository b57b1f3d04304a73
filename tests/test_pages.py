"""Every page in a browser: each kind, as wide as a phone, a tablet and a desk, in both colour schemes."""

import html
import json
import re
import shutil
import subprocess

import pytest
import records
from bench_runs import measured
from nights import nightly

from quantkit.evaluation.comparison import drawing, table
from quantkit.serving.bench import show
from quantkit.serving.bench.attention import show as attention
from quantkit.serving.bench.batching import show as batching
from quantkit.serving.bench.batching import trace as traces
from quantkit.serving.bench.record import record
from quantkit.serving.bench.settings import BenchSettings

PHONE, TABLET, DESK = 400, 800, 1100
MARGIN = 32  # of a page, left and right together
COLOURS = {
    "light": ("rgb(255, 255, 255)", "rgb(27, 31, 36)"),
    "dark": ("rgb(20, 24, 29)", "rgb(230, 233, 236)"),
}
LOOK = """
function look(frame) {
  const view = frame.contentWindow, page = view.document
  const of = (node, part) => view.getComputedStyle(node, part)
  const box = page.querySelector(".scroll"), first = page.querySelector("tbody tr:not(.group) th")
  const cells = [...page.querySelectorAll("td")].filter(cell => cell.getClientRects().length)
  const plots = [...page.querySelectorAll("svg.plot")].filter(plot => plot.getClientRects().length)
  const room = box.getBoundingClientRect(), wide = box.scrollWidth - box.clientWidth, edge = box.clientLeft
  box.scrollLeft = 1e6
  return {
    inner: view.innerWidth, page: page.documentElement.scrollWidth, hidden: wide, scrolled: box.scrollLeft,
    cue: [of(box).overflowX, of(box).backgroundAttachment, of(box).backgroundImage],
    sticky: first.getBoundingClientRect().left - room.left - edge,
    end: [...page.querySelectorAll("thead th")].at(-1).getBoundingClientRect().right - room.right,
    right: Math.max(...cells.map(cell => cell.getBoundingClientRect().right)),
    labels: cells.map(cell => of(cell, "::before").content), values: cells.map(cell => cell.textContent),
    plots: plots.map(plot => plot.getBoundingClientRect().width),
    colours: [of(page.body).backgroundColor, of(page.body).color],
    dots: plots.flatMap(plot => [...plot.querySelectorAll('use[style*="fill: #"]')]).map(dot => of(dot).fill),
  }
}
addEventListener("load", () => {
  document.body.dataset.found = JSON.stringify([...document.querySelectorAll("iframe")].map(look))
})
"""


def compared() -> str:
    """The page of quantkit eval: many models, and a name that fits nowhere."""
    made = records.many()
    made["models"][1]["source"] = "a/" + "x" * 200
    made["pareto"]["models"] = [model["source"] for model in made["models"]]
    return table.report(made).page()


def benched() -> str:
    settings = BenchSettings(batch="1,2,4", prompt_tokens="8", tokens=5, repeats=2, rounds=1)
    quality = {"reference": "base", "text": "book.txt", "tokens": 100, "ctx": 8, "models": []}
    names = ("org/base", "out/Llama-3.2-1B-Instruct-gptq-w4g128", "c.gguf")
    rows = [measured(name, settings, lambda batch, number: 0.004 + 0.001 * batch) for name in names]
    made = record(rows, settings)
    for model in made["models"]:
        model["quality"] = {"kld": 0.01234, "perplexity": 12.34}
    return show.report(made | {"quality": quality}).page()


def attended() -> str:
    rows = [
        {"attention": name, "length": length, "kernel": f"aten::{name}", "seconds": [0.001 * length],
         "step_seconds": [0.01], "prefill_bytes": 1000 * length, "refused": ""}
        for length in (64, 128)
        for name in ("eager", "sdpa")
    ]  # fmt: skip
    settings = {"batch": [1], "repeats": 1}
    told = {"model": "base", "settings": settings, "context": 512, "dtype": "float32", "device": "cpu"}
    return attention.report(told | {"weights": "torch Linear", "weight_bytes": 4000, "rows": rows}).page()


def batched() -> str:
    requests = [{"arrival": 0.5 * n, "first": n + 1.0, "done": n + 2.5} for n in range(4)]
    served = tuple(traces.Served(**request, tokens=(1, 2)) for request in requests)
    steps = (traces.BatchStep(4.0, 16, 12, 4, 1, 20, 32),)
    figures = traces.figures(traces.Replay(served, steps))
    outcomes = [
        {"strategy": name, "figures": figures, "tokens_per_second": [figures["tokens_per_second"]] * 2,
         "ratio": 1.0, "requests": requests, "refused": ""}
        for name in ("static", "continuous")
    ]  # fmt: skip
    trace = [{"arrival": request["arrival"], "prompt": 8, "output": 2} for request in requests]
    told = {"model": "base", "settings": {"batch": [4], "repeats": 2, "rate": 8.0}, "trace": trace}
    conditions = {"dtype": "float32", "device": "cpu", "attention": "sdpa", "weights": "torch Linear"}
    return batching.report(told | conditions | {"outcomes": outcomes}).page()


PAGES = {"eval": compared, "bench": benched, "attention": attended, "batching": batched}


def test_a_page_announces_error_bars_only_where_runs_differ():
    assert "Bars" not in attended() and "Bars" not in benched() and "Bars" in compared()
    assert ">–</td>" in attended() and "one run after a warm-up" in attended()


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
@pytest.mark.parametrize("scheme", ["light", *nightly("dark")])
def test_in_a_browser(tmp_path, scheme):
    """Nothing sticks out; hidden columns have a shadow and the model's name stays; plots fill the page; on a
    phone every row is a card, whose cells say what they are."""
    frames = [(kind, width, make()) for kind, make in PAGES.items() for width in (PHONE, TABLET, DESK)]
    path = tmp_path / "frames.html"  # no window is as narrow as a phone: a frame is
    path.write_text(
        "<style>:root{color-scheme:light dark}</style>"
        + "".join(
            f'<iframe width="{width}" height="3000" style="border:0" srcdoc="{html.escape(page)}"></iframe>'
            for _, width, page in frames
        )
        + f"<script>{LOOK}</script>"
    )
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()]
    command += ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    found = re.search('data-found="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    palette = [tuple(bytes.fromhex(colour[1:])) for colour in (drawing.PAPER, *drawing.SERIES)]
    for (kind, width, page), seen in zip(frames, json.loads(html.unescape(found[1])), strict=True):
        where = (kind, width, seen)
        assert seen["inner"] == width and seen["page"] <= width, where
        assert len(seen["plots"]) == page.count("<svg") / 2 > 0, where
        assert seen["plots"] == pytest.approx([width - MARGIN] * len(seen["plots"])), where
        assert tuple(seen["colours"]) == COLOURS[scheme], where
        assert set(seen["dots"]) <= {f"rgb{rgb}" for rgb in palette}, where
        if width == PHONE:
            assert seen["hidden"] == 0 and seen["right"] <= width - MARGIN / 2, where
            assert all(label not in ("none", '""') for label in seen["labels"]), where
            assert not {"", "–"} & set(seen["values"]), where
            continue
        assert seen["hidden"] > 0 or seen["right"] <= width, where
        assert seen["cue"][:2] == ["auto", "local, scroll"] and seen["cue"][2].count("gradient") == 2, where
        assert seen["scrolled"] == seen["hidden"] and abs(seen["sticky"]) < 1, where
        assert seen["end"] <= 0, where  # all the way to the right, the last column is inside
        assert seen["hidden"] > 0 or (kind, width) != ("bench", TABLET), where
