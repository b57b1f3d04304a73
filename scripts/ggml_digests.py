"""Record what ggml's own encoder makes of the weights of tests/test_iquants.py, and compare quantkit's bytes.

    python scripts/ggml_digests.py [--write]

ggml takes up to a minute for the tables of some types, so the tests compare with what this wrote. Needs the
xllamacpp package.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import ggml_library  # noqa: E402
from test_iquants import CASES, DIGESTS, costs, digest, rows, whole_sub_blocks  # noqa: E402

from quantkit.layouts.ggml.blocks import encode_rows  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="record the digests where the tests read them")
    args = parser.parse_args()
    found, differing = {}, []
    for name, kind in CASES:
        weight = whole_sub_blocks(rows()) if name == "IQ3_S" else rows()
        wanted = ggml_library.encode(name, weight, costs(kind))
        found[f"{name} {kind}"] = digest(wanted)
        if digest(encode_rows(name, weight, costs(kind))) != digest(wanted):
            differing.append(f"{name} {kind}")
    print(f"{len(found)} compared, {len(differing)} differ:", *differing)
    if args.write:
        DIGESTS.write_text(json.dumps(found, indent=1) + "\n")
    raise SystemExit(bool(differing))


if __name__ == "__main__":
    main()
