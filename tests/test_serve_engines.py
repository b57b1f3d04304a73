"""Which engine is chosen: by the clients' table and by what is installed, neither of which imports one."""

import pytest
from gguf_files import export

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError
from quantkit.inspection import record
from quantkit.models.files.headers import open_contents
from quantkit.serving.engines import choose


def a_record(layout: str | None, **rows) -> dict:
    """As `inspect` tells it. rows: loads, and needs or option, of a client by its name in letters."""
    names = {"vllm": "vLLM", "llamacpp": "llama.cpp", "transformers": "transformers", "mlx": "mlx-lm"}
    clients = [
        {"client": name, "version": "0, CPU" if key == "vllm" else "1", "note": "", "needs": [], "option": ""}
        | ({"loads": False, "note": f"{name} says no"} | rows.get(key, {}))
        for key, name in names.items()
    ]
    return {
        "source": "m",
        "container": "safetensors",
        "quantization": layout and {"layout": layout},
        "clients": clients,
    }


@pytest.fixture
def here(monkeypatch):
    """`here("xllamacpp", programs=["vllm"])`: what this machine has, besides transformers."""

    def have(*packages: str, programs=()) -> None:
        there = {"transformers", "fastapi", "uvicorn", "openai", *packages}
        monkeypatch.setattr(choose, "installed", there.__contains__)
        monkeypatch.setattr(choose.shutil, "which", lambda name: f"/bin/{name}" if name in programs else None)

    return have


YES = {"loads": True}


@pytest.mark.parametrize(
    ("packages", "programs", "rows", "taken"),
    [
        ((), (), {"transformers": YES}, "transformers"),
        (("vllm",), (), {"vllm": YES, "transformers": YES}, "vllm"),
        ((), ("vllm",), {"vllm": YES, "transformers": YES}, "vllm"),
        (("xllamacpp",), (), {"llamacpp": YES, "transformers": YES}, "llama.cpp"),
        ((), ("llama-server",), {"llamacpp": YES}, "llama.cpp"),
        (("vllm",), (), {"vllm": {"loads": None}, "transformers": YES}, "transformers"),
        (("vllm",), (), {"vllm": {"loads": None}}, "vllm"),
        ((), ("mlx_lm.server",), {"mlx": YES}, "mlx"),
        (("mlx_lm",), (), {"mlx": YES, "transformers": YES}, "transformers"),
    ],
)
def test_the_first_that_loads_it_and_is_here(here, packages, programs, rows, taken):
    here(*packages, programs=programs)
    assert choose.choose(a_record("gptq", **rows)).engine == taken


def test_llama_bench_is_no_server(here):
    here(programs=["llama-bench"])
    told = a_record("gguf", llamacpp=YES)
    with pytest.raises(QuantkitError) as refused:
        choose.choose(told)
    assert refused.value.exit_code == UNSUPPORTED and "pip install xllamacpp" in refused.value.hint


def test_what_a_layout_needs_beside_the_engine(here, monkeypatch):
    here()
    told = a_record("gptq", transformers=YES | {"needs": ["optimum", "gptqmodel"]}, vllm=YES)
    with pytest.raises(QuantkitError) as refused:
        choose.choose(told, "transformers")
    assert "it needs optimum, gptqmodel" in refused.value.message
    assert refused.value.hint == "pip install optimum gptqmodel"
    monkeypatch.setattr(choose, "installed", {"transformers", "optimum", "gptqmodel"}.__contains__)
    with pytest.raises(QuantkitError, match=r"it needs fastapi, uvicorn, openai$"):
        choose.choose(told, "transformers")
    here()
    with pytest.raises(QuantkitError) as refused:
        choose.choose(told)
    assert refused.value.message == "no installed engine can serve m (gptq)"
    assert "with vllm: pip install vllm" in refused.value.hint
    assert "with transformers: pip install optimum gptqmodel" in refused.value.hint
    here("optimum", "gptqmodel")
    assert choose.choose(told).engine == "transformers"


def test_what_a_program_alone_can_ask_for_is_not_served(here):
    here("gptqmodel")
    told = a_record("awq", transformers=YES | {"option": "dequantize=True"})
    assert [offer.usable for offer in choose.offers(told)] == [False] * 4


def test_gguf_files_are_llamacpps_to_serve(here, make, tiny_model, tmp_path):
    """transformers decodes some of them in a program; its server has no way to say so."""
    path = export(tiny_model("llama"), tmp_path / "a.gguf")
    told = record.describe(open_contents(str(path)))
    here("xllamacpp")
    assert [offer.engine for offer in choose.offers(told) if offer.usable] == ["llama.cpp"]


def test_the_table_of_a_cpu_says_nothing_of_a_gpu(here):
    here("vllm", programs=["nvidia-smi"])
    told = a_record("bitsandbytes")
    assert [offer.usable for offer in choose.offers(told, device="cpu")] == [False] * 4
    first = choose.offers(told)[0]
    assert first.usable is None and first.reason == "on a CPU vLLM does not: vLLM says no"


def test_an_engine_by_name(here):
    here("xllamacpp")
    told = a_record(None, transformers=YES)
    with pytest.raises(QuantkitError) as refused:
        choose.choose(told, "llama.cpp")
    assert refused.value.message == "llama.cpp cannot serve m (safetensors): llama.cpp says no"
    assert refused.value.hint == "transformers can: leave out --engine, or name it"
    with pytest.raises(QuantkitError) as refused:
        choose.choose(told, "llamacp")
    assert refused.value.exit_code == USAGE and "did you mean llama.cpp?" in refused.value.hint


def test_of_real_headers(here, demo_model, make, tmp_path):
    here("xllamacpp", "accelerate", "bitsandbytes")
    made = tmp_path / "nf4"
    make("nf4", demo_model, "-o", made)
    for source, engine in ((demo_model, "transformers"), (made, "transformers")):
        assert choose.choose(record.describe(open_contents(str(source)))).engine == engine
    here()
    with pytest.raises(QuantkitError, match="no installed engine can serve"):
        choose.choose(record.describe(open_contents(str(made))))
