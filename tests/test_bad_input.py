"""Mixtures and wrappers that are damaged: one line, the offender's name, a hint, and nothing written."""

import json
import math

import families
import jobs
import pytest
import test_wrappers
import torch
from nights import by_day, nightly

WIDE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
EXPERT = "model.layers.1.block_sparse_moe.experts.2"
ROUTER = "model.layers.1.block_sparse_moe.gate.weight"
CALIBRATED = ("--calibration", "text.txt", "--samples", 2, "--seqlen", 32)
COMMANDS = {
    "gptq": ("gptq", "model", "--group-size", 32, *CALIBRATED, "-o", "out"),
    "nf4": ("nf4", "model", "-o", "out"),
    "gguf": ("gguf", "model", "-t", "Q8_0", "-o", "out.gguf"),
    "eval": ("eval", "model", "--text", "text.txt", "--limit", 512),
}


@pytest.fixture
def refuse(quantkit):
    """`refuse(code, ...)` must fail with an error and a hint, a line each; before them, warnings alone."""

    def run(code: int, *arguments) -> tuple[str, str]:
        done = quantkit(*arguments, "-q")
        *warnings, error, hint = done.err.splitlines()
        assert (done.code, done.out) == (code, ""), done.err
        assert error.startswith("error: ") and hint.startswith("hint: "), done.err
        assert all(line.startswith("warning: ") for line in warnings)
        return error.removeprefix("error: "), hint.removeprefix("hint: ")

    return run


@pytest.fixture
def place(tmp_path):
    (tmp_path / "text.txt").write_text(test_wrappers.TEXT)
    return tmp_path / "model"


def lose(place) -> None:
    with jobs.edited(place) as tensors:
        del tensors[f"{EXPERT}.w3.weight"]


def spoil(place) -> None:
    with jobs.edited(place) as tensors:
        tensors[f"{EXPERT}.w1.weight"][3, 5] = math.nan


def round_router(place) -> None:
    with jobs.edited(place) as tensors:
        tensors[ROUTER] = (tensors[ROUTER] * 100).to(torch.int8)


DAMAGE = {  # what is done to a mixture; exit code and what the error says
    "an expert is absent": (
        lose,
        1,
        ("lacks 1 tensor", ".experts.2.w3.weight"),
    ),
    "more experts are configured": (
        lambda place: jobs.configure(place, num_local_experts=8),
        1,
        ("lacks ", ".experts.4.w1.weight"),
    ),
    "fewer experts are configured": (
        lambda place: jobs.configure(place, num_local_experts=2),
        1,
        ("gate.weight is [4, 64], the configuration says [2, 64]",),
    ),
    "NaN in one expert": (spoil, 1, (f"{EXPERT}.w1.weight holds NaN",)),
    "a router that is quantized": (
        round_router,
        4,
        ("weights are stored as codes", ROUTER),
    ),
}


@pytest.mark.parametrize("command", by_day(COMMANDS, ["gptq", "gguf"]))
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_mixture_is_refused_in_one_line(refuse, place, damage, command):
    families.save_tokenizer(families.save_model(place, "mixtral", **WIDE))
    make, code, words = DAMAGE[damage]
    make(place)
    before = sorted(place.parent.rglob("*"))
    error, hint = refuse(code, *COMMANDS[command])
    assert all(word in error for word in words), error
    assert len(hint) > 20 and sorted(place.parent.rglob("*")) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrapper_without_its_language_model_is_refused(refuse, place, command):
    test_wrappers.save(place, "gemma3")
    with jobs.edited(place) as tensors:
        for name in [name for name in tensors if name.startswith("language_model.")]:
            del tensors[name]
    before = sorted(place.parent.rglob("*"))
    error, _ = refuse(1, *COMMANDS[command])
    assert "lacks 41 tensors of the model: model.language_model." in error
    assert sorted(place.parent.rglob("*")) == before


@pytest.mark.parametrize("method", ["fp8", "int8", *nightly("gptq", "nf4")])
def test_codes_that_no_configuration_speaks_of_are_refused(refuse, quantkit, tmp_path, method, place):
    """Read as they lie, e4m3 and int8 would be weights of another size."""
    families.save_tokenizer(families.save_model(tmp_path / "plain", "llama", **WIDE))
    options = {"gptq": ["--group-size", 32, "--solver", "rtn"], "fp8": ["--solver", "rtn"]}.get(method, [])
    assert quantkit(method, "plain", *options, "-o", "model", "-q").code == 0
    config = json.loads((place / "config.json").read_text())
    del config["quantization_config"]
    (place / "config.json").write_text(json.dumps(config))
    for command in (*COMMANDS.values(), ("plan", "model")):
        error, hint = refuse(4, *command)
        assert error.startswith("weights are stored as codes: model.layers.0.mlp.down_proj.")
        assert hint.startswith("config.json has no quantization_config")


@pytest.mark.parametrize("command", ["eval", *nightly("gptq")])
def test_a_router_of_another_shape_among_packed_linears_is_refused(refuse, quantkit, place, command):
    families.save_tokenizer(families.save_model(place.parent / "plain", "mixtral", **WIDE))
    rounded = ("gptq", "plain", "--group-size", 32, "--solver", "rtn", "-o", "model", "-q")
    assert quantkit(*rounded).code == 0
    with jobs.edited(place) as tensors:
        like = f"{EXPERT}.w1."
        for name in [name for name in tensors if name.startswith(like)]:
            tensors[name.replace(like, ROUTER.removesuffix("weight"))] = tensors[name].clone()
        del tensors[ROUTER]
    allowed = ("--allow-requantize",) if command == "gptq" else ()
    error, _ = refuse(4 if command == "gptq" else 1, *COMMANDS[command], *allowed)
    assert ROUTER.removesuffix(".weight") in error
    assert ("are quantized" if command == "gptq" else "is [64, 64], the configuration says [4, 64]") in error
