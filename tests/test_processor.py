"""models/machine/processor.py: what the processor says, and what torch sees."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit.errors import QuantkitError
from quantkit.models.machine import device, processor
from quantkit.models.machine.device import bfloat16_linears, narrow_products
from quantkit.quantize.calibrate import capture

CASCADE_LAKE = "flags\t\t: fpu avx avx2 avx512f avx512bw avx512_vnni"
SAPPHIRE_RAPIDS = f"{CASCADE_LAKE} avx_vnni avx512_bf16 amx_bf16 amx_tile amx_int8"
ALDER_LAKE = "flags\t\t: fpu avx avx2 avx_vnni"
SKYLAKE = "flags\t\t: fpu avx avx2 avx512f avx512bw"
NEITHER, INT8, BOTH, BFLOAT16 = (False, False), (False, True), (True, True), (True, False)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Nobody answers for the processor."""
    monkeypatch.setenv(processor.ANSWER, "")


@pytest.fixture
def of(monkeypatch, tmp_path):
    """`of(line, name=value, ...)`: (bfloat16, int8 products) of a processor in an environment."""

    def ask(line: str, **environment: str) -> tuple[bool, bool]:
        path = tmp_path / f"cpuinfo{len(list(tmp_path.iterdir()))}"
        path.write_text(f"processor\t: 0\n{line}\nbugs\t\t: bf16\n\nprocessor\t: 1\n")
        with monkeypatch.context() as changed:
            changed.setattr(processor, "CPUINFO", path)
            for name, value in environment.items():
                changed.setenv(name, value)
            return processor.has_bfloat16(), processor.has_int8_products()

    return ask


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (SAPPHIRE_RAPIDS, BOTH),
        (CASCADE_LAKE, INT8),
        (ALDER_LAKE, NEITHER),
        (SKYLAKE, NEITHER),
        ("Features\t: fp asimd sve i8mm bf16", BFLOAT16),
        ("Features\t: fp asimd", NEITHER),
        ("model name\t: something else", NEITHER),
    ],
)
def test_what_a_processor_computes_by_itself(of, line, expected):
    assert of(line) == expected


def test_bfloat16_can_be_asked_for_and_exact_sums_cannot(of):
    assert of(SKYLAKE, QUANTKIT_PROCESSOR="capable") == BFLOAT16
    assert of(SAPPHIRE_RAPIDS, QUANTKIT_PROCESSOR="capable") == BOTH
    assert of(SAPPHIRE_RAPIDS, QUANTKIT_PROCESSOR="poor") == NEITHER
    with pytest.raises(QuantkitError, match="QUANTKIT_PROCESSOR is 'rich'") as refused:
        of(SKYLAKE, QUANTKIT_PROCESSOR="rich")
    assert refused.value.exit_code == 2 and refused.value.hint == "it may be poor or capable"


def test_without_a_list_nothing_is_assumed(monkeypatch, tmp_path):
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "absent")
    assert not processor.has_bfloat16() and not processor.has_int8_products()


@pytest.mark.skipif(not processor.CPUINFO.exists(), reason="not Linux: nothing is known")
def test_torch_sees_the_same_processor():
    able = torch.cpu.get_capabilities()
    bfloat16 = (
        able.get("avx512_bf16", False) or able.get("architecture") != "x86_64" and able.get("bf16", False)
    )
    assert processor.has_bfloat16() == bfloat16
    assert processor.has_int8_products() == able.get("avx512_vnni", False)


@pytest.mark.parametrize(("answer", "said"), [("poor", "False False\n"), ("capable", "True False\n")])
def test_other_processes_follow_and_need_no_torch(answer, said):
    script = (
        "import sys; from quantkit.models.machine import processor as p; "
        "print(p.has_bfloat16(), 'torch' in sys.modules)"
    )
    environment = os.environ | {processor.ANSWER: answer}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout == said, done.stderr


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("answer", ["capable", "poor"])
def test_only_sums_of_bfloat16_inputs_use_bfloat16_units(monkeypatch, answer, dtype):
    monkeypatch.setenv(processor.ANSWER, answer)
    precision, seen = torch.get_float32_matmul_precision, []
    before = precision()
    monkeypatch.setattr(capture.Hessian, "add", lambda self, rows: seen.append(precision()))
    sums = capture.SiteSums(8, torch.device("cpu"))
    sums.add(torch.ones(4, 8, dtype=dtype))
    narrow = answer == "capable" and dtype == torch.bfloat16
    assert seen == ["medium" if narrow else before] and precision() == before
    with pytest.raises(ZeroDivisionError), narrow_products(torch.ones(1, dtype=dtype)):
        raise ZeroDivisionError
    assert precision() == before


class Products(TorchDispatchMode):
    """Records the dtypes of matrix products."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if "mm" in function.name():
            self.dtypes.add(arguments[-1].dtype)
        return function(*arguments, **options or {})


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("answer", "dtype", "computed"),
    [("poor", "bfloat16", "float32"), ("capable", "bfloat16", "bfloat16"), ("poor", "float16", "float16")],
)
def test_a_processor_without_bfloat16_rounds_outputs_of_linears(monkeypatch, answer, dtype, computed, biased):
    """To the value nearest to the exact sum, or its neighbour where float32 sums differ."""
    dtype, computed = getattr(torch, dtype), getattr(torch, computed)
    monkeypatch.setenv(processor.ANSWER, answer)
    monkeypatch.setattr(device, "WIDENED", 7)  # of 16 rows
    module = nn.Linear(48, 16, bias=biased, dtype=dtype)
    inputs = torch.randn(4, 10, 48, generator=torch.Generator().manual_seed(3)).to(dtype)
    bias = module.bias.double() if biased else None
    exact = nn.functional.linear(inputs.double(), module.weight.double(), bias)
    terms = nn.functional.linear(inputs.double().abs(), module.weight.double().abs())
    with torch.no_grad(), Products() as products, bfloat16_linears(dtype, torch.device("cpu")):
        outputs = module(inputs)
    assert products.dtypes == {computed} and outputs.dtype == dtype
    if computed == torch.float32:
        assert ((outputs.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6 * terms).all()
