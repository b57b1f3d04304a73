"""The subcommands of `quantkit bench`, from their flags to what is printed and written."""

import json

import pytest

pytest.importorskip("quantkit.serving.bench.attention")
pytest.importorskip("quantkit.serving.bench.batching")

SMALL = ("--repeats", "1", "--dtype", "float32", "--threads", "1", "-q")


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama", num_hidden_layers=1)


def test_attention(quantkit, model, tmp_path):
    files = ("--html", tmp_path / "page.html", "--plot", tmp_path / "plot.svg")
    asked = ("--implementations", "eager,sdpa", "--prompt-tokens", "8,16", "-n", "2", *SMALL)
    done = quantkit("bench", "attention", model, *asked, *files, "--json")
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
    error, _ = refuse(2, "bench", "attention", model, "--prompt-tokens", "300", *SMALL[:-1])
    assert "longer than the model's context of 256" in error


def test_batching(quantkit, model):
    asked = ("--policies", "static", "--requests", "3", "--batch", "2", "--prompt-tokens", "9", "-n", "4")
    done = quantkit("bench", "batching", model, *asked, *SMALL, "--json")
    assert done.code == 0, done.err
    made = json.loads(done.out)
    assert made["schema"] == "quantkit.bench-batching/2" and made["settings"]["batch"] == [2]
    assert [len(outcome["requests"]) for outcome in made["outcomes"]] == [3]
    assert (len(made["trace"]), made["settings"]["rate"]) == (3, 8.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["attention", "MODEL", "--batch", "1,2"], "--batch"),
        (["attention", "MODEL", "--quality", "result.json"], "no such option: --quality"),
        (["attention", "MODEL", "MODEL"], "unexpected extra argument"),
        (["batching", "MODEL", "--policies", "eager"], "unknown policy 'eager'"),
        (["batching", "MODEL", "--rate", "0"], "--rate 0 is invalid"),
    ],
)
def test_bad_input_is_refused(refuse, model, arguments, said):
    arguments = [model if argument == "MODEL" else argument for argument in arguments]
    assert said in refuse(2, "bench", *arguments)[0]


def test_a_folder_may_have_the_name_of_a_subcommand(refuse):
    assert refuse(3, "bench", "./attention")[0].startswith("no such folder")
