"""Compare the bytes that two checkouts write: every method and layout, on the demo model.

    git worktree add ../before v0.2
    python scripts/same_bytes.py ../before .

Prints every file that differs, and exits with 1 if one does. Seconds and model cards are not compared.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import DEMO
from gguf import GGUFReader

UNPROMISED = {"quantkit-timings.json", "README.md"}
GONE = {"options", "exact"}  # rows of manifests that come and go with options of a version
SMALL = "--samples 8 --seqlen 128"
# Old spellings of flags stay as long as a checkout that knows nothing else may be compared.
CALIBRATED = {
    "gptq": """
        --bits 4 | --bits 2 | --bits 3 --act-order full | --bits 8 --act-order none
        --no-search-scale --refine 0 | --no-sym --checkpoint-format gptq_v2 | --group-size -1
        --group-size 32 --sequential repeat
        --solver rtn | --override down_proj=8,64 --exclude layers.0.mlp | --layout compressed-tensors
        --layout compressed-tensors --no-sym --bits 8 | --dtype float32 --max-shard-gb 0.001
        --layout compressed-tensors --override o_proj=8 --solver rtn""",
    "awq": """
        --group-size 128 | --layout compressed-tensors | --solver gptq --no-search-scale
        --layout compressed-tensors --sym --group-size 64 | --group-size -1""",
    "nf4": "--double-quant | --no-double-quant | --solver gptq | --solver gptq --act-order none --refine 0",
    "fp8": "--static --kv-cache | --block 128 --solver rtn | --layout deepseek --solver rtn",
    "w8a8": "--transform none",
    "fp4": "--activations --refine 0 | --format mxfp4 --solver rtn",
    "int8": "--threshold 6 | --threshold 0 --exclude down_proj",
    "gguf": """
        -t Q4_K_M | -t Q3_K_M | -t Q4_0 --refine 0 | -t Q5_0 | -t IQ4_NL | -t Q6_K --pure
        -t Q2_K -t Q3_K_S -t Q5_K_M -t IQ4_XS -t Q8_0 --solver rtn
        -t Q4_K_S --solver rtn --imatrix none | -t Q4_K_M --solver rtn | -t BF16 | -t F16 | -t F32
        -t Q4_K_M --tensor-type ffn_down=Q6_K --output-tensor-type Q8_0""",
}
RUN = """import json, sys, traceback
from quantkit.cli import main
for argv in json.load(sys.stdin):
    sys.argv = ["quantkit", *argv]
    try:
        main()
    except SystemExit as done:
        if done.code:
            print("exit", done.code, *argv, file=sys.stderr)
"""


def commands(only: str) -> dict[str, list[str]]:
    """Return the command of every folder."""
    found = {}
    for method, lines in CALIBRATED.items():
        for options in (part.strip() for line in lines.splitlines() for part in line.split("|")):
            if options and only in f"{method} {options}":
                place = f"{method} {options}".replace(" ", "_").replace("/", "")
                small = "" if method in ("nf4", "int8") and "gptq" not in options else SMALL
                output = "out.gguf" if method == "gguf" and options.count("-t ") == 1 else "out"
                argv = [method, str(DEMO), "-q", *options.split(), *small.split()]
                found[place] = [*argv, "-o", f"{place}/{output}"]
    return found


def content(path: Path) -> bytes:
    """Return the compared bytes of a file: of a GGUF file's manifest all but GONE."""
    if path.suffix != ".gguf":
        return path.read_bytes()
    reader = GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    manifest = json.loads(
        metadata["quantkit.manifest"], object_hook=lambda row: {k: v for k, v in row.items() if k not in GONE}
    )
    tensors = [(tensor.name, tensor.tensor_type.name, tensor.shape.tolist()) for tensor in reader.tensors]
    data = b"".join(tensor.data.tobytes() for tensor in reader.tensors)
    return repr((metadata | {"quantkit.manifest": manifest}, tensors)).encode() + data


def hashes(checkout: Path, wanted: dict[str, list[str]]) -> dict[str, str]:
    """Return the hash of every file that a checkout writes."""
    with tempfile.TemporaryDirectory() as folder:
        for place in wanted:
            (Path(folder) / place).mkdir()
        subprocess.run(
            [sys.executable, "-c", RUN],
            input=json.dumps(list(wanted.values())),
            text=True,
            check=True,
            cwd=folder,
            env={"PYTHONPATH": str(checkout.resolve()), "PATH": "/usr/bin:/bin", "HOME": folder},
            stdout=subprocess.DEVNULL,
        )
        files = [path for path in Path(folder).rglob("*") if path.is_file() and ".cache" not in path.parts]
        return {
            str(path.relative_to(folder)): hashlib.sha256(content(path)).hexdigest()
            for path in sorted(files)
            if path.name not in UNPROMISED
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--only", default="", help="commands that contain this text, such as 'awq'")
    parser.add_argument(
        "--known", type=Path, help="keep the hashes of `before` here, and take them from here"
    )
    arguments = parser.parse_args()
    wanted = commands(arguments.only)
    known = json.loads(arguments.known.read_text()) if arguments.known and arguments.known.exists() else {}
    if not set(wanted) <= {name.partition("/")[0] for name in known}:
        known = hashes(arguments.before, wanted)
        if arguments.known:
            arguments.known.write_text(json.dumps(known, indent=1))
    before = {name: value for name, value in known.items() if name.partition("/")[0] in wanted}
    after = hashes(arguments.after, wanted)
    unlike = sorted(name for name in before | after if before.get(name) != after.get(name))
    print(f"{len(wanted)} commands, {len(before)} files before, {len(after)} after, {len(unlike)} unlike")
    print(*unlike, sep="\n")
    sys.exit(bool(unlike))


if __name__ == "__main__":
    main()
