"""Let atheris look for bytes that make a parser raise anything but QuantkitError, or take too long.

    python -m venv VENV; VENV/bin/pip install atheris     (no dependency; quantkit must be importable there)
    VENV/bin/python scripts/fuzz_atheris.py {header,imatrix,gguf,recipe,result} -runs=500000 CORPUS

What follows the kind goes to libFuzzer. It ends at the first finding, with the bytes in a file `crash-...`;
without one its last line says how many inputs were tried.
"""

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

KINDS = ("header", "imatrix", "gguf", "recipe", "result")
LONGEST = 4000  # characters of a message
LIMITS = ["-timeout=10", "-rss_limit_mb=2000", "-max_len=4096", "-print_final_stats=1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    asked, rest = parser.parse_known_args()
    kind = asked.kind
    import atheris  # in an environment of its own

    with atheris.instrument_imports(include=["quantkit", "gguf", "yaml"]):
        from quantkit.errors import QuantkitError
        from quantkit.evaluation.comparison import merge
        from quantkit.models.files import gguf_file, safetensors_folder
        from quantkit.models.gguf import imatrix
        from quantkit.quantize.prepare import recipe

    readers = {
        "header": ("model.safetensors", safetensors_folder.read_header),
        "imatrix": ("imatrix", imatrix.read),
        "gguf": ("model.gguf", gguf_file.read_header),
        "recipe": ("mine.yaml", lambda path: recipe.load(str(path))),
        "result": ("result.json", merge.read),
    }
    name, read = readers[kind]
    memory = Path("/dev/shm")
    place = (memory if memory.is_dir() else Path("/tmp")) / f"quantkit-atheris-{os.getpid()}-{name}"

    def one(data: bytes) -> None:
        if kind == "header":  # as a rule the length is right, else nothing gets any further
            found = atheris.FuzzedDataProvider(data)
            told, text = found.ConsumeIntInRange(0, 9), found.ConsumeBytes(len(data))
            data = (len(text) if told else 2**40).to_bytes(8, "little") + text
        place.write_bytes(data)
        try:
            read(place)
        except QuantkitError as error:
            assert len(error.message) < LONGEST, json.dumps(error.message)[:200]

    atheris.Setup([sys.argv[0], *rest, *LIMITS], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
