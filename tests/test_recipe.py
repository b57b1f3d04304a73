"""Recipes: what may stand in one, what wins over what, and how they say no."""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest
import yaml

from quantkit.errors import QuantkitError
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.quantize import methods
from quantkit.quantize.methods.gptq import Options
from quantkit.quantize.prepare import recipe
from quantkit.quantize.prepare.recipe import Recipe

OPTIONS = [f"quant.{field.name}" for field in dataclasses.fields(Options)]
OPTIONS += [f"calibration.{field.name}" for field in dataclasses.fields(CalibrationOptions)]
OPTIONS += [f"run.{field.name}" for field in dataclasses.fields(RunOptions)]


@pytest.fixture
def load(monkeypatch, tmp_path):
    """Loads `mine.yaml` with this text under its line `method: gptq`."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, method: str | None = None) -> Recipe:
        Path("mine.yaml").write_text(f"method: gptq\n{text}\n")
        return recipe.load("mine.yaml", method)

    return write


def refusal(action, *arguments) -> tuple[str, str]:
    with pytest.raises(QuantkitError) as caught:
        action(*arguments)
    assert caught.value.exit_code == 2
    return caught.value.message, caught.value.hint


def settle(*settings: str):
    """What `--set` alone makes of the defaults."""
    return recipe.merge(Recipe("gptq"), settings, {"model": "m"})


# ---- what is said


def test_a_recipe_says_only_what_it_says(load):
    text = "description: Mine.\nmodel: org/name\nquant:\n  bits: 3\n  damp: 1\nrun:\n  exclude: [a, b]\n"
    made = load(text + "calibration:")
    values = {"model": "org/name", "quant.bits": 3, "quant.damp": 1.0, "run.exclude": ("a", "b")}
    assert made == Recipe("gptq", "mine.yaml", "Mine.", values)
    assert type(made.values["quant.damp"]) is float


@pytest.mark.parametrize(
    "text", ["0.02", "2e-2", "2E-2", "20.e-3", "+.02e0", pytest.param(".02", id="point")]
)
def test_numbers_as_people_write_them(load, text):
    assert load(f"quant: {{damp: {text}}}").values == {"quant.damp": 0.02}
    assert settle(f"quant.damp={text}").method.options == Options(damp=0.02)


@pytest.mark.parametrize("name", recipe.shipped())
def test_shipped_recipes_fit_their_methods(name):
    made = recipe.load(name)
    method = recipe.merge(made, (), {"model": "m"}).method
    assert isinstance(method, methods.load(made.method))
    method.check()
    assert len(made.description) > 20
    given = {key.removeprefix("quant."): value for key, value in made.values.items() if "quant." in key}
    assert dataclasses.asdict(method.options) == dataclasses.asdict(method.Options()) | given


@pytest.mark.parametrize("method", methods.available())
def test_the_template_means_the_defaults(tmp_path, method):
    path = tmp_path / "mine.yaml"
    path.write_text(text := recipe.template(method))
    made = recipe.load(str(path), method)
    kinds = recipe.sections(method)
    assert list(made.values) == [
        f"{name}.{field.name}" for name, kind in kinds.items() for field in dataclasses.fields(kind)
    ]
    request = recipe.merge(made, (), {"model": "m"})
    assert (request.source, request.output) == ("m", None)
    chosen = (request.method.options, request.calibration, request.run)
    assert chosen == tuple(kind() for kind in kinds.values())
    comments = " ".join(re.findall(r"^  # (.*)$", text, re.MULTILINE))
    for kind in kinds.values():
        assert all(" ".join(f.metadata["help"].split()) in comments for f in dataclasses.fields(kind))
    places = re.sub(r"^# (model|output):", r"\1:", text, flags=re.MULTILINE)
    path.write_text(places)  # the two lines that are comments are meant to be used
    assert recipe.merge(recipe.load(str(path)), (), {}).source == "MODEL"


# ---- what wins


def test_precedence_of_every_mix_of_layers():
    """Each key independently: flag over `--set` over recipe over default."""
    values = {  # key -> (default, recipe, --set, flag)
        "quant.bits": (4, 8, 3, 2),
        "quant.sym": (True, False, True, False),
        "quant.damp": (0.05, 0.02, 0.03, 0.04),
        "calibration.seqlen": (None, 16, 32, 64),
        "calibration.samples": (128, 1, 2, 3),
        "run.exclude": ((), ("r",), ("s", "t"), ("f",)),
        "run.dtype": ("auto", "float32", "bfloat16", "float16"),
        "output": (None, "recipe", "set", "flag"),
        "model": ("m", "recipe", "set", "flag"),
    }
    for layers in itertools.product((False, True), repeat=3):
        top = max((number + 1 for number, used in enumerate(layers) if used), default=0)
        in_recipe, in_set, in_flags = layers
        made = {key: row[1] for key, row in values.items()} if in_recipe else {}
        settings = [f"{key}={yaml_flow(row[2])}" for key, row in values.items()] if in_set else []
        typed = {key.rpartition(".")[2]: row[3] for key, row in values.items()} if in_flags else {}
        request = recipe.merge(Recipe("gptq", values=made), settings, typed if top else {"model": "m"})
        want = {key: row[top] for key, row in values.items()}
        assert request.source == want["model"]
        assert request.output == (Path(want["output"]) if want["output"] else None)
        sections = {"quant": request.method.options, "calibration": request.calibration, "run": request.run}
        said = {k: getattr(sections[k.split(".")[0]], k.split(".")[1]) for k in want if "." in k}
        assert said == {key: value for key, value in want.items() if "." in key}
        assert request.calibration.seed == 0 and request.run.max_shard_gb is None  # nobody's business


def yaml_flow(value) -> str:
    text = yaml.safe_dump(value, default_flow_style=True)
    return text.removesuffix("\n").removesuffix("...").strip()


def test_the_shipped_text_has_a_name():
    """The one in manifests. It replaces the text of a recipe."""
    other = Recipe("gptq", values={"calibration.calibration": "a.txt"})
    assert recipe.merge(other, (), {"model": "m"}).calibration.calibration == "a.txt"
    shipped = recipe.merge(other, (), {"model": "m", "calibration": "shipped"})
    assert shipped.calibration == CalibrationOptions()


def test_no_model_at_all():
    error, hint = refusal(recipe.merge, Recipe("gptq", "mine.yaml"), (), {})
    assert error == "mine.yaml has no model" and "quantkit run mine.yaml MODEL" in hint


def test_settings_may_leave_out_the_section_and_write_dashes():
    method = settle("bits=3", "group-size=64", "quant.act-order=full").method
    assert method.options == Options(3, 64, True, "full")
    assert settle("bits=3", "quant.bits=2").method.options == Options(bits=2)  # the last one
    assert settle("calibration=a=b.txt").calibration == CalibrationOptions("a=b.txt")
    assert settle("run.exclude=[]", "seqlen=null").run == RunOptions()


# ---- how they say no


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("quant.bits", "4.5", ["4.5", "a whole number", "quantkit auto MODEL --bpw 4.5"]),
        ("quant.bits", "true", ["True"]),
        ("quant.bits", "", ["None", "a whole number"]),
        ("quant.sym", "1", ["1", "true or false"]),
        ("quant.damp", "high", ["high", "a number"]),
        ("calibration.samples", "'9'", ["'9'", "a whole number"]),
        ("calibration.seqlen", "true", ["True"]),
        ("calibration.calibration", "5", ["5", "not text"]),
        ("run.exclude", "q_proj", ["q_proj", "a list of text"]),
        ("run.exclude", "[1]", ["1"]),
        ("quant.act_order", "sideways", ["sideways", "none", "group", "full"]),
        ("quant.layout", "magic", ["magic", "gptq", "compressed-tensors"]),
        ("quant.checkpoint_format", "3", ["3"]),
        ("run.dtype", "float8", ["float8", "bfloat16"]),
    ],
)
def test_values_of_the_wrong_kind(load, key, value, words):
    section, name = key.split(".")
    error, hint = refusal(load, f"{section}:\n  {name}: {value}")
    assert error.startswith(f"mine.yaml: {key} is ")
    assert all(word in f"{error} {hint}" for word in words)
    error, hint = refusal(settle, f"{key}={value}")
    assert error.startswith(f"--set: {key} is ")
    assert all(word in f"{error} {hint}" for word in words)


@pytest.mark.parametrize(
    ("text", "unknown", "near"),
    [
        ("quant:\n  groupsize: 64", "quant.groupsize", "quant.group_size"),
        ("quant:\n  group-size: 64", "quant.group-size", "quant.group_size"),
        ("quant:\n  bits: 3\nrun:\n  samples: 3", "run.samples", "calibration.samples"),
        ("bits: 3", "bits", "quant.bits"),
        ("modle: x", "modle", "model"),
        ("qaunt:\n  bits: 3", "qaunt", "quant"),
        ("4: x", "4", None),
        ("quant:\n  bitz: 3\n  zzz: 1", "quant.bitz, quant.zzz", "quant.bits"),
        ("quant: {bitz: 3}\nrun: {thread: 1}", "quant.bitz, run.thread",
         "quant.bits, run.threads"),
    ],
)  # fmt: skip
def test_unknown_keys_are_answered_with_the_nearest(load, text, unknown, near):
    error, hint = refusal(load, text)
    assert error == f"mine.yaml has unknown keys: {unknown}"
    said, _, valid = hint.rpartition("valid keys: ")
    assert said == (f"did you mean {near}? " if near else "")
    concerned = {key.split(".")[0] for key in unknown.split(", ")}
    everything = ["method", "description", "searched", "model", "output", *OPTIONS]
    own = [key for key in everything if key.split(".")[0] in concerned]
    assert valid.split(", ") == (own if "." in unknown else everything)


@pytest.mark.parametrize(
    ("setting", "near"),
    [
        ("quant.bitz=3", "quant.bits"),
        ("bitz=3", "quant.bits"),
        ("run.bits=3", "quant.bits"),
        ("zzz=3", None),
        ("method=rtn", None),
    ],
)
def test_unknown_settings_are_answered_with_the_nearest(setting, near):
    error, hint = refusal(settle, setting)
    key = setting.split("=")[0]
    assert error == f"--set has unknown keys: {key}"
    said, _, valid = hint.rpartition("valid keys: ")
    assert said == (f"did you mean {near}? " if near else "")
    section = key.split(".")[0] if key.startswith(("quant.", "run.")) else ""
    own = [option for option in OPTIONS if option.startswith(f"{section}.")]
    assert valid.split(", ") == (own or ["model", "output", *OPTIONS])


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("quant.bits", "has no value"),
        ("quant.bits=[", "--set quant.bits=[ is not YAML: line 1: expected"),
        ("run.exclude={a: 1}", "run.exclude is {'a': 1}"),
    ],
)
def test_settings_that_are_none(setting, words):
    assert words in refusal(settle, setting)[0]


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (None, 3, ["no recipe mine.yaml ", *recipe.shipped()]),
        (b"method: rtn", 2, ["mine.yaml is a recipe for rtn quantkit run mine.yaml MODEL"]),
        (b"quant: {bits: 4}", 2, ["has no method"]),
        (b"", 2, ["has no method"]),
        (b"- gptq", 2, ["has no method"]),
        (b"method: gptq\nquant: [", 2, ["mine.yaml", "not YAML", "line 2"]),
        (b"method: gptq\nmodel: \x07", 2, ["mine.yaml", "not YAML"]),
        (b"method: gptq # \xff", 2, ["mine.yaml", "not YAML"]),
        (b"method: gptq\nquant: 4", 2, ["mine.yaml", "quant is 4", "not a section"]),
        (b"method: gptq\nquant: {bits: 4}\nquant: {}", 2, ["second quant", "line 3"]),
        (b"method: gptq\nquant:\n  bits: 4\n  bits: 3", 2, ["second bits", "line 4"]),
        (b"method: gptq\ndescription: 3", 2, ["description is 3"]),
    ],
)
def test_recipes_that_are_none(monkeypatch, tmp_path, content, code, words):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("mine.yaml").write_bytes(content)
    with pytest.raises(QuantkitError) as caught:
        recipe.load("mine.yaml", "gptq")
    assert caught.value.exit_code == code
    assert all(word in f"{caught.value.message} {caught.value.hint}" for word in words)


def test_a_method_that_does_not_exist(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("method: gptqq")
    error, hint = refusal(recipe.load, "mine.yaml")
    assert error == "mine.yaml: no method 'gptqq'" and "gptq" in hint
