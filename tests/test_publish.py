"""What is published: nothing that appeared meanwhile is replaced; and the card that goes with it."""

import json
from dataclasses import replace

import jobs
import pytest

from quantkit.errors import QuantkitError
from quantkit.quantize import loop
from quantkit.quantize.outputs import Draft, finish
from quantkit.quantize.outputs.folder import model_card
from quantkit.quantize.progress import Progress


def test_an_output_that_appeared_meanwhile_is_not_replaced(tiny_model, tmp_path, monkeypatch):
    source, output = tiny_model("llama"), tmp_path / "out"
    verify = finish._verify

    def appear(*arguments):
        verify(*arguments)
        output.mkdir()
        (output / "precious.txt").write_text("hours of work")

    with monkeypatch.context() as patch:
        patch.setattr(finish, "_verify", appear)
        with pytest.raises(QuantkitError, match="out appeared while the job ran") as caught:
            jobs.quantize("nf4", source, output)
    assert "--resume" in caught.value.hint
    assert (output / "precious.txt").read_text() == "hours of work"
    output.rename(tmp_path / "elsewhere")
    jobs.quantize("nf4", source, output, resume=True)
    assert (output / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "source, base, command",
    [("org/name", "org/name", "eval org/name out"), ("/models/llama-7b", None, "eval llama-7b out")],
)
def test_the_card_names_the_original_as_the_hub_does(tiny_model, tmp_path, source, base, command):
    prepared = jobs.prepare("nf4", tiny_model("llama"), tmp_path / "out")
    summary = replace(loop.run([prepared], Progress())[0], source=source)
    manifest = json.loads((tmp_path / "out" / "quantkit.json").read_text())
    draft = Draft(prepared.method.output, prepared.material, manifest)
    head, card = model_card(tmp_path / "out", draft, summary)
    assert head.get("base_model") == base and f"\n{base or 'llama-7b'}, compressed by quantkit" in card
    assert f"quantkit {command}" in card
    assert "Mean relative weight error of a linear: " in card


def test_the_card_of_a_calibrated_method_tells_output_errors(tiny_model, tmp_path):
    source = tiny_model("llama", tokenizer=True)
    arguments = {"calibration": jobs.calibration(tmp_path)}
    prepared = jobs.prepare("gptq", source, tmp_path / "out", jobs.GPTQ, **arguments)
    loop.run([prepared], Progress())
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Mean relative output error of a linear: " in card
