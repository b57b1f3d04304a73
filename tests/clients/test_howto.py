"""The lines of Python in the how-to guides, run as they stand, each by a python with its client."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "howto"
PYTHONS = {  # page -> the python that runs its lines
    "transformers": os.environ.get("QUANTKIT_CLIENTS_PYTHON"),
    "gptqmodel": os.environ.get("QUANTKIT_CLIENTS_PYTHON"),
    "mlx": os.environ.get("QUANTKIT_MLX_PYTHON"),
    "vllm": os.environ.get("QUANTKIT_VLLM_PYTHON"),
    "llamacpp": sys.executable if find_spec("xllamacpp") else None,
}
ROUNDED = ["--solver", "rtn"]  # how the files are made does not matter here
QUICK = {"nf4": [], "gptq": ROUNDED, "gguf": [*ROUNDED, "--imatrix", "none"]}
SAME = 5  # tokens that are surely equal: clients compute in 16 bit


@pytest.mark.nightly
@pytest.mark.clients
@pytest.mark.parametrize("page", PYTHONS)
def test_the_lines_of_the_page_print_what_generate_does(page, demo_model, quantkit, tmp_path):
    if not PYTHONS[page]:
        pytest.skip(
            f"no python with the client of {page}.md: set QUANTKIT_CLIENTS_PYTHON, …_MLX_… or …_VLLM_…"
        )
    text = (PAGES / f"{page}.md").read_text()
    (lines,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    typed = shlex.split(re.search(r"^quantkit (.*? -o \S+)$", text, re.MULTILINE)[1])
    shutil.copytree(demo_model, tmp_path / "org" / "name")
    assert quantkit(*typed, *QUICK[typed[0]], "-q").code == 0
    assert typed[-1] in lines
    made = quantkit("generate", typed[-1], "--prompt", "The sea", "--tokens", SAME, "-q").out
    expected = re.search(r"The sea(.*)", made)[1].strip()
    assert len(expected) > 5
    left_out = {"PYTHONPATH", *(["TORCHDYNAMO_DISABLE"] if page == "vllm" else [])}  # vLLM compiles
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [PYTHONS[page], "-c", lines], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert expected in done.stdout
