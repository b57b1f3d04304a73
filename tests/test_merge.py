"""Result files of quantkit eval: read back, checked, put together, or refused naming what is wrong."""

import json
from functools import reduce
from operator import getitem

import pytest
import records

from quantkit.errors import NOT_FOUND, UNSUPPORTED, USAGE, QuantkitError
from quantkit.evaluation.comparison import columns
from quantkit.evaluation.comparison.record import merge, read
from quantkit.evaluation.comparison.table import markdown


@pytest.fixture
def save(tmp_path):
    def save(record):
        path = tmp_path / "result.json"
        path.write_text(record if isinstance(record, str) else json.dumps(record))
        return path

    return save


def refused(code: int, call, *arguments) -> str:
    with pytest.raises(QuantkitError) as error:
        call(*arguments)
    assert error.value.exit_code == code and error.value.hint
    return error.value.message


def test_a_result_is_read_as_it_was_written(save):
    record = records.record()
    name, found = read(save(record))
    assert found == record and name.endswith("result.json")
    assert merge([(name, found)]) == record


PPL = "metrics", "ppl", "value"


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        ((1, "size"), {}, "$.models[1].size"),
        ((1, *PPL), "20<b>", "$.models[1].metrics.ppl.value"),
        ((0, "size", "weight_bytes"), -1, "$.models[0].size.weight_bytes"),
        ((slice(None),), [], "$.models"),
        ((0, "onload"), "x", "$.models[0]"),
        ((0, *PPL), 1e31, "$.models[0].metrics.ppl.value"),
        ((0, "source"), "x" * 5000, "$.models[0].source"),
    ],
)
def test_a_file_that_is_no_result_is_refused_with_the_place(save, path, value, place):
    record = records.record()
    *outer, key = path
    reduce(getitem, outer, record["models"])[key] = value
    message = refused(USAGE, read, save(record))
    assert "result.json is not a result of quantkit eval" in message and f"({place}: " in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1, 2]", "not a result"),
        ('{"schema": "quantkit.eval/3", "data": NaN}', "not JSON"),
        ('{"schema": "quantkit.eval/3", "data": ' + "9" * 5000 + "}", "not JSON"),
    ],
)
def test_malformed_files(save, content, words):
    assert words in refused(USAGE, read, save(content))


@pytest.mark.parametrize("content", ["[1, 2]", "{}", '{"schema": "quantkit.bench/3"}', '{"schema": [7]}'])
def test_another_json_file_is_called_no_result(save, content):
    with pytest.raises(QuantkitError) as caught:
        read(path := save(content))
    assert caught.value.record()["error"] == {
        "message": f"{path} is not a result of quantkit eval",
        "hint": "quantkit eval … --json > FILE makes one",
        "exit_code": USAGE,
    }


def test_files_that_are_absent_binary_or_of_another_version(save, tmp_path):
    assert "nowhere.json" in refused(NOT_FOUND, read, tmp_path / "nowhere.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe{}")
    assert "not JSON" in refused(USAGE, read, tmp_path / "binary.json")
    old = save(records.record() | {"schema": "quantkit.eval/1"})
    assert "is quantkit.eval/1, this quantkit reads quantkit.eval/3" in refused(UNSUPPORTED, read, old)


def test_two_results_become_one():
    """The front is drawn anew: what was best of one file may be beaten by another's."""
    base = records.model("org/base", 16_000_000)
    weak, strong = records.model("weak", 4_000_000, 0.5), records.model("strong", 3_000_000, 0.1)
    one, two = records.record(base, weak), records.record(base, strong)
    gate = {"metric": "top1", "op": ">=", "limit": 0.5, "model": "weak", "value": 0.9, "pass": True}
    one["gates"] = [gate]
    one["error"] = {"message": "1 of 1 gates failed", "hint": "", "exit_code": 7}
    declined = {"weak": {"message": "no kernel", "hint": "", "exit_code": 4}}
    two["engine_declined"] = declined
    two["env"] = {"quantkit": "9.9", "torch": "2.12", "gpu": "H200"}
    two["data"]["text"] = "the same text under another name"
    assert one["pareto"]["models"] == ["weak", "org/base"]
    found = merge([("a", one), ("b", two), ("a again", one)])
    assert [model["source"] for model in found["models"]] == ["org/base", "weak", "strong"]
    assert found["engine_declined"] == declined and "weak was not measured in the engine" in markdown(found)
    assert found["pareto"]["models"] == ["strong", "org/base"] and "error" not in found
    assert found["gates"] == [gate] and found["noise_floor"] == one["noise_floor"]
    assert found["env"] == one["env"]


def test_neither_order_nor_a_second_result_of_a_model_changes_figures():
    """The second result of `weak` goes with its gate; a file without divergences hides no column."""
    base, gate = (
        records.model("org/base", 16_000_000),
        {"metric": "kld", "op": "<=", "limit": 0.3, "pass": True},
    )
    gate |= {"model": "weak", "value": 0.1}
    one = records.record(base, records.model("weak", 4_000_000, 0.1), gates=[gate])
    again = records.record(base, records.model("weak", 4_000_000, 0.5))
    again["gates"] = [gate | {"value": 0.5, "pass": False}]
    assert merge([("a", one), ("b", again)])["gates"] == [gate]
    stricter = [gate | {"limit": 0.05, "pass": False}]  # of the result that is shown
    assert merge([("a", one), ("b", one | {"gates": stricter})])["gates"] == [gate, *stricter]
    bare = records.record(base, records.model("other", 3_000_000, 0.2, dppl=0.1))
    for model in bare["models"]:
        del model["metrics"]["kld"], model["metrics"]["top1"]
    bare["noise_floor"] = None
    for order in ([("a", one), ("b", bare)], [("b", bare), ("a", one)]):
        found = merge(order)
        assert found["pareto"]["loss"] == "metrics.ppl.value" and found["noise_floor"] == one["noise_floor"]
        assert found["pareto"]["models"] == ["other", "org/base"]
        assert {"KL divergence", "top-1"} <= {*columns.columns(found)}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("ctx", 512, "ctx 256 and 512"),
        ("stride", 64, "stride 128 and 64"),
        ("bos", True, "bos False and True"),
        ("dtype", "bfloat16", "dtype float32 and bfloat16"),
        ("tokens", 4001, "tokens 4000 and 4001"),
        ("sha256", "ffff" * 16, "sha256 0123456789ab… and ffffffffffff…"),
        ("tokenizer", "0" * 64, "tokenizer fedcba987654… and 000000000000…"),
    ],
)
def test_unlike_protocols_are_refused_naming_the_difference(key, value, words):
    other = records.record(**{key: value})
    message = refused(UNSUPPORTED, merge, [("a.json", records.record()), ("b.json", other)])
    assert message == f"a.json and b.json were measured differently: {words}"


def test_another_text_is_named_and_its_loss_is_not():
    one, two = records.record(), records.record(text="other.txt", sha256="f" * 64)
    two["models"][0]["metrics"]["nll"]["value"] += 1
    message = refused(UNSUPPORTED, merge, [("a", one), ("b", two)])
    words = "text book.txt and other.txt, sha256 0123456789ab… and ffffffffffff…"
    assert message == f"a and b were measured differently: {words}"


def test_unlike_first_models_are_refused_and_the_first_result_of_a_model_counts():
    one, two = records.record(), records.record()
    two["models"][1]["metrics"]["kld"]["mean"] *= 1.01
    assert merge([("a", one), ("b", two)]) == one
    two["models"][0]["metrics"]["nll"]["value"] += 1e-2
    message = refused(UNSUPPORTED, merge, [("a", one), ("b", two)])
    assert message == "a and b were measured differently: nll 3.0 and 3.01"


def test_unlike_tasks_are_refused():
    one, two = records.record(), records.record()
    one["tasks"] = {"limit": 100, "lm_eval": "0.4.13"}
    assert "tasks {'limit': 10… and None" in refused(UNSUPPORTED, merge, [("one", one), ("two", two)])
