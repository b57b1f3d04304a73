"""Tasks: likelihoods of continuations against transformers, and the harness with our model and its own."""

import gc
import json
import random
import re
from pathlib import Path

import families
import pytest
import torch
import transformers
from nights import nightly
from torch.nn.functional import log_softmax

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError
from quantkit.evaluation import tasks
from quantkit.evaluation.stream import StreamedModel
from quantkit.evaluation.tasks import Tasks, score
from quantkit.models.files.open import open_checkpoint

REPOSITORY = Path(__file__).parents[1]


def silent(source: str, done: int, total: int) -> None:
    pass


def streamed(folder: Path) -> StreamedModel:
    return StreamedModel.open(open_checkpoint(str(folder)), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("family", ["llama", "bloom", *nightly("gpt2")])
def test_continuations_are_scored_as_by_the_whole_model(tiny_model, monkeypatch, family):
    """One request at a time, unpadded, by transformers; rounds and batches here hold a few of them."""
    monkeypatch.setattr(score, "ROUND_TOKENS", 300)
    monkeypatch.setattr(score, "BATCH_TOKENS", 100)
    folder, longest, rng = tiny_model(family), 40, random.Random(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    requests, expected = [], []
    for _ in range(30):
        context = [rng.randrange(512) for _ in range(rng.randint(1, 60))]
        count = rng.randint(1, 5)
        with torch.no_grad():
            if rng.random() < 0.5:  # what the model would say itself
                ids = context[-30:]
                for _ in range(count):
                    ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
                context, continuation = ids[:-count], ids[-count:]
            else:
                continuation = [rng.randrange(512) for _ in range(count)]
            ids = (context + continuation)[-(longest + 1) :]
            logs = log_softmax(model(torch.tensor([ids[:-1]])).logits[0].double(), -1)[-count:]
        requests.append((context, continuation))
        hits = [int(row.argmax()) == token for row, token in zip(logs, continuation, strict=True)]
        expected.append((sum(logs[k, t].item() for k, t in enumerate(continuation)), all(hits)))
    found = score.score(streamed(folder), requests, longest, silent)
    assert [one.log_prob for one in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert [one.greedy for one in found] == [greedy for _, greedy in expected]
    assert 10 < sum(one.greedy for one in found) < 25


@pytest.mark.nightly
def test_memory_does_not_grow_with_the_number_of_requests(tiny_model, monkeypatch):
    """Bytes of all tensors alive while blocks pass by. Each length of text has masks of its own; the longest
    are scored first, either time."""
    monkeypatch.setattr(score, "ROUND_TOKENS", 2048)
    monkeypatch.setattr(score, "BATCH_TOKENS", 256)
    monkeypatch.setattr(score, "LENGTH_STEP", 1)
    model, peaks, tokens = streamed(tiny_model("gemma2")), [], []

    def listen(source: str, done: int, total: int) -> None:
        if done != 1:
            return
        found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
        peaks[-1] = max(peaks[-1], sum(storages.values()))

    for count in (40, 160):
        requests = [(list(range(1, 200 - k)), [5]) for k in range(count)]
        tokens.append(sum(len(context) for context, _ in requests))
        peaks.append(0)
        found = score.score(model, requests, 256, listen)
        assert len(found) == count
    assert tokens[1] > 2.5 * tokens[0] and peaks[1] < 1.05 * peaks[0], (tokens, peaks)


def test_a_continuation_longer_than_the_context_keeps_its_end(tiny_model):
    folder = tiny_model("llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    continuation = list(range(100, 120))
    (found,) = score.score(streamed(folder), [([1, 2], continuation)], 8, silent)
    with torch.no_grad():
        logs = log_softmax(model(torch.tensor([continuation[-9:-1]])).logits[0].double(), -1)
    expected = sum(logs[k, token].item() for k, token in enumerate(continuation[-8:]))
    assert found.log_prob == pytest.approx(expected, abs=1e-4)


def test_the_shipped_passages_end_in_a_word_that_they_had_before():
    """As in LAMBADA the word follows from the passage, hardly from its last words."""
    heldout = " ".join((REPOSITORY / "heldout" / "heldout.txt").read_text(encoding="utf-8").split())
    shipped = [row["text"] for row in tasks.passages()]
    assert len(shipped) > 100 and all(passage in heldout for passage in shipped)
    assert len(set(shipped)) == len(shipped)
    for passage in shipped:
        before, word = passage.rsplit(" ", 1)
        assert re.search(rf"\b{word}\b", before) and len(before.split()) >= 100
        assert word not in before.split()[-4:]


def refused(code: int, *arguments) -> tuple[str, str]:
    with pytest.raises(QuantkitError) as error:
        Tasks.prepare(*arguments)
    assert error.value.exit_code == code
    return error.value.message, error.value.hint


def test_without_the_harness_tasks_are_refused(monkeypatch):
    monkeypatch.setattr(tasks, "find_spec", lambda name: None)
    message, hint = refused(UNSUPPORTED, "cloze", None)
    assert "lm-evaluation-harness" in message and "pip install lm-eval" in hint


@pytest.fixture
def harness():
    return pytest.importorskip("lm_eval")


def test_what_is_no_task(harness, monkeypatch, tmp_path):
    """The harness's own tasks are thousands of files to read: one stands for them."""
    from lm_eval.tasks import TaskManager

    (tmp_path / "one.yaml").write_text("task: hellaswag\ndataset_path: nowhere\n")
    little = TaskManager(include_defaults=False, include_path=tmp_path)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda include_defaults: little)
    message, hint = refused(USAGE, "cloze,hellaswagg", None)
    assert "no task is called 'hellaswagg'" in message and "hellaswag" in hint
    assert "--task-limit 0" in refused(USAGE, "cloze", 0)[0]


def documents(**config) -> dict:
    """A task on three short texts, as a configuration of the harness."""
    from datasets import Dataset

    texts = [{"text": text} for text in ("A map is a true thing.", "The bell rang. " * 40, "It was flat")]
    shared = {"custom_dataset": lambda **_: {"test": Dataset.from_list(texts)}, "test_split": "test"}
    return shared | {"doc_to_text": "", "doc_to_target": "{{text}}"} | config


def prepared(monkeypatch, *configs: dict, limit: int | None = None) -> Tasks:
    """As if these were tasks of the harness."""
    from lm_eval.tasks import TaskManager

    load = TaskManager.load
    monkeypatch.setattr(TaskManager, "load", lambda manager, names: load(manager, list(configs)))
    return Tasks.prepare("cloze", limit)


def test_the_harness_finds_what_its_own_model_finds(harness, demo_model, monkeypatch):
    """Our streamed model and the harness's transformers model, on the same tasks: words, and whole texts."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    rolling = documents(
        task="rolling", output_type="loglikelihood_rolling", metric_list=[{"metric": "word_perplexity"}]
    )
    ours = prepared(monkeypatch, tasks.cloze(), rolling, limit=8).measure(streamed(demo_model), silent)
    theirs = simple_evaluate(
        "hf",
        model_args=f"pretrained={demo_model},dtype=float32",
        tasks=["cloze"],  # prepared() has it mean both
        limit=8,
        bootstrap_iters=0,
        log_samples=False,
        device="cpu",
        task_manager=TaskManager(include_defaults=False),
    )["results"]
    assert ours["cloze"]["acc"]["value"] == theirs["cloze"]["acc,none"]
    assert ours["cloze"]["perplexity"]["value"] == pytest.approx(theirs["cloze"]["perplexity,none"], rel=1e-4)
    words = ours["rolling"]["word_perplexity"]["value"]
    assert words == pytest.approx(theirs["rolling"]["word_perplexity,none"], rel=1e-4)
    assert ours["cloze"]["acc"]["stderr"] is not None and ours["rolling"].keys() == {"word_perplexity"}


def test_tasks_that_write_text_are_refused(harness, monkeypatch):
    writing = documents(task="poem", output_type="generate_until", metric_list=[{"metric": "exact_match"}])
    with pytest.raises(QuantkitError) as error:
        prepared(monkeypatch, writing)
    assert error.value.exit_code == UNSUPPORTED and "poem" in error.value.message


def test_the_command_puts_tasks_beside_the_rest(harness, quantkit, tiny_model, tmp_path):
    folder = tiny_model("llama", tokenizer=True, hidden_size=64)
    (text := tmp_path / "text.txt").write_text("\n".join(families.sentences()))
    words = ["eval", folder, "--as", "nf4", "--text", text, "--ctx", 32, "--limit", 200, "--json"]
    words += ["--tasks", "cloze", "--task-limit", 3]
    code, out, err = quantkit(*words)
    assert not code
    record = json.loads(out)  # nothing of the harness's own on stdout
    assert record["tasks"]["limit"] == 3
    for model in record["models"]:
        assert model["tasks"]["cloze"].keys() == {"acc", "perplexity"}
    lines = [f"evaluated {folder}", f"evaluated {folder}, tasks", f"evaluated {folder} in bfloat16"]
    lines += [f"evaluated {folder} as nf4", f"evaluated {folder} as nf4, tasks"]
    assert err.splitlines() == lines
