"""One job, converted for four clients: each computes what quantkit decodes."""

import cases
import pytest
from cases import Case

from quantkit.quantize.convert import convert
from quantkit.quantize.progress import SILENT

pytestmark = cases.MARKS

CASES = {
    "gptq": Case(),
    "gptqmodel": Case(loader="gptqmodel", dtype="float16"),
    "awq": Case(loader="awq"),
    "compressed-tensors": Case(loader="dequantized"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, demo_model):
    root = tmp_path_factory.mktemp("converted")
    cases.quantize(Case({"group_size": 32}), demo_model, root / "gptq", **cases.QUICK["gptq"])
    for to in ("awq", "compressed-tensors"):
        convert(str(root / "gptq"), to, root / to, False, SILENT)
    return {name: root / ("gptq" if name == "gptqmodel" else name) for name in CASES}


@pytest.fixture(scope="module")
def client(folders, process, tmp_path_factory):
    loaded_by = process({case.loader for case in CASES.values()})
    return cases.load(CASES, folders, tmp_path_factory.mktemp("loaded"), loaded_by)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_client_computes_what_was_converted(name, folders, client):
    assert client[name]["error"] is None
    cases.inspect_agrees(CASES[name], folders[name], client[name])
    cases.compare(CASES[name], folders[name], client[name])
