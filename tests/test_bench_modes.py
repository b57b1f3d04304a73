"""The other modes of `quantkit bench`, from their flags to what is printed and written."""

import json

import pytest

pytest.importorskip("quantkit.serving.bench.attention")
pytest.importorskip("quantkit.serving.bench.batching")
pytest.importorskip("quantkit.serving.endpoint")

SMALL = ("--repeats", "1", "--dtype", "float32", "--threads", "1", "-q")


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama", num_hidden_layers=1)


def test_attention(quantkit, model, tmp_path):
    files = ("--html", tmp_path / "page.html", "--plot", tmp_path / "plot.svg")
    asked = ("--attn", "eager,sdpa", "--prompt", "8,16", "-n", "2", *SMALL)
    done = quantkit("bench", model, *asked, *files, "--json")
    assert done.code == 0, done.err
    made = json.loads(done.out)
    assert made["schema"] == "quantkit.bench-attention/2"
    assert (made["settings"]["prompt"], made["settings"]["tokens"]) == ([8, 16], 2)
    assert [(row["attention"], row["length"]) for row in made["rows"]] == [
        (name, length) for length in (8, 16) for name in ("eager", "sdpa")
    ]
    text = (tmp_path / "page.html").read_text()
    assert "eager ran: " in text and '<svg class="plot"' in text
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_attention_ends_where_the_context_does(refuse, model):
    error, _ = refuse(2, "bench", model, "--attn", "sdpa", "--prompt", "300", *SMALL[:-1])
    assert "longer than the model's context of 256" in error


def test_batching(quantkit, model):
    asked = ("--batching", "static", "--requests", "3", "--batch", "2", "--prompt", "9", "-n", "4")
    done = quantkit("bench", model, *asked, *SMALL, "--json")
    assert done.code == 0, done.err
    made = json.loads(done.out)
    assert made["schema"] == "quantkit.bench-batching/2" and made["settings"]["batch"] == [2]
    assert [len(outcome["requests"]) for outcome in made["outcomes"]] == [3]
    assert (len(made["trace"]), made["settings"]["rate"]) == (3, 8.0)


def test_an_endpoint_elsewhere_needs_remote(refuse):
    error, hint = refuse(2, "bench", "--url", "http://example.com")
    assert "another machine" in error and "--remote" in hint


def test_several_models_have_no_one_attention(refuse, model):
    assert refuse(2, "bench", model, model, "--attn", "sdpa")[0] == "give one model"
