"""Texts that are transformers' own, and the places where models part."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import blocks
import families
import jobs
import pytest
import torch
import transformers
from nights import nightly

from quantkit.evaluation import generate, sampling
from quantkit.evaluation.settings import GenerateSettings
from quantkit.models.files.open import open_checkpoint

CPU = torch.device("cpu")
PROMPT = "Badeku kobu ridoma"


def made(folder, first=None, dtype=torch.float32, **settings) -> generate.Continuation:
    checkpoint = open_checkpoint(str(folder))
    return generate.continue_prompt(
        checkpoint, GenerateSettings(prompt=PROMPT, **settings), dtype, CPU, first
    )


def theirs(folder, tokens: int, text: str = PROMPT, **options) -> list[int]:
    """Ids that transformers generates from the same folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(text, return_tensors="pt")
    options = {"do_sample": False} | options
    out = model.generate(**inputs, max_new_tokens=tokens, pad_token_id=0, **options)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "gpt2", "bloom", *nightly("falcon", "gpt_neox", "opt")]
)
def test_the_text_is_transformers_own(tiny_model, family):
    folder = tiny_model(family, tokenizer="bos")
    found = made(folder, tokens=24)
    assert found["ids"] == theirs(folder, 24)
    assert found["text"] == transformers.AutoTokenizer.from_pretrained(folder).decode(
        found["ids"], skip_special_tokens=True
    )


def test_probabilities_are_those_of_a_forward_pass(tiny_model):
    """Without a cache, all at once."""
    folder = tiny_model("llama", tokenizer="bos")
    found = made(folder, tokens=12)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = transformers.AutoTokenizer.from_pretrained(folder)(PROMPT)["input_ids"]
    assert found["prompt_tokens"] == len(prompt)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + found["ids"]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.softmax(-1).gather(1, torch.tensor(found["ids"])[:, None])[:, 0]
    assert torch.allclose(torch.tensor(found["probabilities"]), expected, rtol=1e-4)


def test_of_packed_weights_it_is_that_of_the_decoded_ones(tiny_model, tmp_path):
    source = tiny_model("llama", tokenizer="bos")
    jobs.quantize("gptq", source, tmp_path / "packed", {"solver": "rtn", "group_size": 32, "bits": 3})
    packed = open_checkpoint(str(tmp_path / "packed"))
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    state = model.state_dict()
    state.update({name: packed.read(name, torch.float32) for name in packed.names})
    model.load_state_dict(state)
    model.save_pretrained(tmp_path / "decoded")
    families.save_tokenizer(tmp_path / "decoded", bos=True)
    ids = made(tmp_path / "packed", tokens=24)["ids"]
    assert ids == theirs(tmp_path / "decoded", 24) != theirs(source, 24)


def test_int8_rounds_its_activations(tiny_model, tmp_path):
    """Every forward of the block that runs is the layout's own: equal to the loop's, token by token."""
    source = tiny_model("llama", tokenizer="bos")
    jobs.quantize("int8", source, tmp_path / "int8")
    checkpoint = open_checkpoint(str(tmp_path / "int8"))
    found = made(tmp_path / "int8", tokens=8)
    ids = torch.tensor([checkpoint.tokenizer(PROMPT)["input_ids"]])
    expected = blocks.logits(tmp_path / "int8", ids)[-1].softmax(-1)
    assert found["ids"][0] == expected.argmax() and found["probabilities"][0] == pytest.approx(
        expected.max().item(), rel=1e-4
    )


def test_texts_end_where_the_checkpoint_says(tiny_model):
    folder = tiny_model("llama", tokenizer="bos")
    ids = theirs(folder, 24)
    end = next(token for token in ids if token != ids[0])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 1]}))
    found = made(folder, tokens=24)
    assert found["ids"] == ids[: ids.index(end) + 1] and found["stop"] == "end"
    assert made(folder, tokens=ids.index(end))["stop"] == "length"


def test_sampling_is_seeded_and_bare(tiny_model):
    """The distribution as it is: a generation_config.json that asks for top-k 1 changes nothing."""
    folder = tiny_model("llama", tokenizer="bos")
    first = made(folder, tokens=16, temperature=1.0, seed=3)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": 1}))
    assert made(folder, tokens=16, temperature=1.0, seed=3)["ids"] == first["ids"]
    assert made(folder, tokens=16, temperature=1.0, seed=4)["ids"] != first["ids"]
    assert made(folder, tokens=16, temperature=1e-4)["ids"] == made(folder, tokens=16)["ids"]


def test_top_k_and_top_p_leave_the_likeliest(tiny_model):
    checkpoint = open_checkpoint(str(tiny_model("llama", tokenizer="bos")))

    def ids(**settings):
        asked = GenerateSettings(12, prompt=PROMPT, **settings)
        return generate.continue_prompt(checkpoint, asked, torch.float32, torch.device("cpu"))["ids"]

    greedy = ids()
    assert ids(temperature=5.0) != greedy
    assert ids(temperature=5.0, top_k=1) == ids(temperature=5.0, top_p=1e-6) == greedy


def test_the_parting_is_the_first_token_that_differs(tiny_model):
    """Against probabilities of both models, computed at once."""
    folder, other = tiny_model("llama", tokenizer="bos"), tiny_model("llama", name="other", tokenizer="bos")
    state = jobs.tensors(other)
    state["model.layers.1.mlp.down_proj.weight"] += 0.02 * torch.randn(
        64, 128, generator=torch.manual_seed(0)
    )
    jobs.rewrite(other, lambda name, tensor: state[name])
    first = made(folder, tokens=32)
    found = made(other, first, tokens=32)
    parting = found["parting"]
    assert parting and 0 < parting["index"] < 32, "choose other noise"
    assert found["ids"][: parting["index"]] == first["ids"][: parting["index"]]
    assert found["ids"][parting["index"]] != first["ids"][parting["index"]]
    prompt = transformers.AutoTokenizer.from_pretrained(folder)(PROMPT)["input_ids"]
    rows, equal = [], torch.tensor([prompt + first["ids"][: parting["index"]]])
    for path in (folder, other):
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            rows.append(model(equal).logits[0, -1].softmax(-1))
    mine, theirs_ = found["ids"][parting["index"]], first["ids"][parting["index"]]
    expected = rows[1][mine], rows[1][theirs_], rows[0][theirs_]
    told = parting["probability"], parting["probability_of_expected"], parting["probability_there"]
    assert torch.allclose(torch.tensor(told), torch.stack(expected), rtol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert (parting["token"], parting["expected"]) == (tokenizer.decode([mine]), tokenizer.decode([theirs_]))
    before = tokenizer.decode(found["ids"][: parting["index"]], skip_special_tokens=True)
    assert found["text"][: parting["start"]] == before.rstrip("\ufffd")
    assert made(folder, first, tokens=32)["parting"] is None


def test_characters_of_several_tokens_are_marked_whole(demo_model):
    """Hangul takes up to three tokens: what is marked is the first text that differs, never half of it."""
    tokenizer = open_checkpoint(str(demo_model)).tokenizer

    def continuation(text: str) -> generate.Continuation:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return {"ids": ids, "text": text, "probabilities": [0.5] * len(ids)}

    first, other = continuation("ab \uc0db c"), continuation("ab \uc0dc c")
    parting = generate.parting(tokenizer, other, first, [0.5] * len(first["ids"]))
    assert other["text"][parting["start"] : parting["end"]] == "\uc0dc"


def test_memory_is_counted_before_it_is_used(tiny_model, monkeypatch, refuse):
    folder = tiny_model("llama", tokenizer="bos")
    parameters = sum(tensor.numel() for tensor in jobs.tensors(folder).values())
    monkeypatch.setattr(sampling, "free_memory", lambda device: 4 * parameters)
    error, hint = refuse(5, "generate", folder, "-p", "x")
    assert "of memory in float32" in error and "quantkit eval" in hint
    monkeypatch.setattr(sampling, "free_memory", lambda device: 10 * parameters)
    made(folder, tokens=4)


# ---- the command


def test_one_model_prints_prompt_and_text(tiny_model, quantkit):
    folder = tiny_model("llama", tokenizer="bos")
    done = quantkit("generate", folder, "-p", PROMPT, "-n", 8, "-q")
    assert done == (0, PROMPT + made(folder, tokens=8)["text"] + "\n", "")
    done = quantkit("generate", folder, "-p", PROMPT, "-n", 8)
    assert "8 tokens in" in done.err and "float32 on cpu, stopped by -n" in done.err


def test_several_models_side_by_side_or_below_one_another(tiny_model, quantkit, tmp_path, monkeypatch):
    folder = tiny_model("llama", tokenizer="bos")
    jobs.quantize("gptq", folder, tmp_path / "packed", {"solver": "rtn", "group_size": 32, "bits": 2})
    record = json.loads(quantkit("generate", folder, "packed", "-p", PROMPT, "-n", 12, "--json", "-q").out)
    first, other = record["models"]
    assert (first["parting"], first["compared"], other["compared"]) == (None, False, True)
    assert record["schema"] == "quantkit.generate/1" and record["settings"]["dtype"] == "float32"
    assert math.isclose(other["probabilities"][other["parting"]["index"]], other["parting"]["probability"])
    for columns, stacked in ((60, True), (100, False)):
        monkeypatch.setenv("COLUMNS", str(columns))
        done = quantkit("generate", folder, "packed", "-p", PROMPT, "-n", 12, "-q")
        verdict = done.out.splitlines()[-1]
        equal = other["parting"]["index"]
        assert verdict.startswith(f"packed: {equal} token{'s' * (equal != 1)} equal, then ")
        assert f"({other['parting']['probability']:.3f})" in verdict
        assert ("\npacked\n" in done.out) == stacked
        assert "[" in done.out and "\x1b" not in done.out


def test_the_chat_template_is_applied(tiny_model, quantkit, refuse):
    folder = tiny_model("llama", tokenizer="bos")
    error, hint = refuse(2, "generate", folder, "-p", "x", "--chat")
    assert "no chat template" in error and "chat_template.jinja" in hint
    template = "<s>{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template + "{% if add_generation_prompt %}a:{% endif %}")
    done = quantkit("generate", folder, "-p", "Kobu", "--chat", "-n", 8, "-q")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("<s>user: Kobu\na:", add_special_tokens=False)["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=ids >= 0, max_new_tokens=8, do_sample=False, pad_token_id=0)
    expected = tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True)
    assert done == (0, expected + "\n", "")


def test_a_text_cannot_steer_the_terminal(tiny_model, quantkit, monkeypatch):
    """Models write escape sequences, too: in training data they stand everywhere."""
    written = "a\x1b[31mb\nc\x9b\x07\td"
    monkeypatch.setattr(transformers.PreTrainedTokenizerBase, "decode", lambda *_, **__: written)
    done = quantkit("generate", tiny_model("llama", tokenizer="bos"), "-p", "x", "-n", 1, "-q")
    assert done.out == "xa\ufffd[31mb\nc\ufffd\ufffd\td\n"


@pytest.mark.nightly
@pytest.mark.parametrize("stdin", [True, *nightly(False)])
def test_a_prompt_is_utf8_in_any_locale(tiny_model, stdin):
    folder, root = tiny_model("llama", tokenizer="bos"), Path(__file__).parents[1]
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(root)}

    def run(prompt: bytes) -> subprocess.CompletedProcess:
        given = b"-" if stdin else prompt
        command = [sys.executable, *"-m quantkit generate -n 1 --json -q".split(), folder, "-p", given]
        return subprocess.run(command, input=prompt, capture_output=True, env=os.environ | plain)

    done = run("The séa".encode())
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["settings"]["prompt"] == "The séa"
    done = run(b"The s\xe9a")
    assert done.returncode == 2 and b"is neither in the locale's encoding nor UTF-8" in done.stderr
    assert b"hint: the locale is C (ascii): " in done.stderr


def test_another_tokenizer_is_said_and_not_compared(tiny_model, demo_model, quantkit):
    folder = tiny_model("llama", tokenizer="bos")
    done = quantkit("generate", folder, demo_model, "-p", PROMPT, "-n", 4, "-q")
    assert done.code == 0 and "another tokenizer: its text is not compared" in done.err
    assert done.out.endswith("demo-llama-6m: not compared: another tokenizer\n")
    done = quantkit(
        "generate", demo_model, folder, "-p", PROMPT, "-n", 4, "-q"
    )  # whose vocabulary is smaller
    assert done.code == 0 and done.out.endswith("llama: not compared: another tokenizer\n")


def test_more_than_the_context_is_refused(tiny_model, refuse):
    folder = tiny_model("llama", tokenizer="bos", max_position_embeddings=16)
    asked = "generate", folder, "-p"
    error, hint = refuse(2, *asked, "Kobu", "-n", 100_000)
    prompt = int(error.removeprefix(f"{folder} was made for 16 tokens; prompt and -n make ")) - 100_000
    assert prompt > 1 and hint == f"choose at most -n {16 - prompt}"
    assert refuse(2, *asked, "Kobu " * 16, "-n", 1)[1] == "give a shorter prompt"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("-p x -n 0", "-n 0 is invalid"),
        ("-p x --temperature -1", "--temperature -1"),
        ("-p x --temperature inf", "--temperature inf"),
        ("-p x --temperature nan", "--temperature nan"),
        ("-p x --temperature 1 --top-k -1", "--top-k -1"),
        ("-p x --temperature 1 --top-p 0", "--top-p 0"),
        ("-p x --top-k 5", "are for sampling"),
    ],
)
def test_settings_that_make_no_sense(refuse, tiny_model, arguments, words):
    assert words in refuse(2, "generate", tiny_model("llama", tokenizer="bos"), *arguments.split())[0]
