"""quantkit and other clients on a CPU: checkpoints of either read by the other.

    scripts/clients-setup.sh vllm && python scripts/clients.py [vllm] [vllm-experts] [vllm-formats]
    scripts/clients-setup.sh clients llmcompressor && python scripts/clients.py others

Writes sections of docs/measurements/clients.md.

vLLM: of linears, of mixtures, of formats that accelerators run, one process per checkpoint. The log
    probabilities of the likeliest prompt tokens are compared with those of quantkit's decode in float32. vLLM
    computes in 16 bit: the row of the original shows how far apart the two are without compression, and a
    column how far compression itself moved them.
others: each tool compresses the demo model in its own environment with its default options. Perplexity on
    heldout/heldout.txt in windows of 256 tokens is measured by its own client, by transformers with the
    decoded weights in float32, and by `quantkit eval`.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

from common import ROOT, write_section
from interop import foreign, in_vllm

SECTIONS = {
    "vllm": partial(in_vllm.section, in_vllm.LINEARS),
    "vllm-experts": partial(in_vllm.section, in_vllm.EXPERTS),
    "vllm-formats": partial(in_vllm.section, in_vllm.FORMATS),
    "others": foreign.section,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default: all")
    add("--python", help="of the client's environment (default: where clients-setup.sh makes it)")
    add("--keep", type=Path, help="keep checkpoints and results here, and use those that exist")
    add("--match", default="", help="only rows whose name contains this; the page stays as it is")
    add("--no-write", action="store_true", help="leave the page as it is")
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"no section is called {min(unknown)}")
    in_vllm.as_vllm_rounds()
    with tempfile.TemporaryDirectory() as temporary:
        root = (args.keep or Path(temporary)).absolute()
        root.mkdir(parents=True, exist_ok=True)
        for name in args.sections or SECTIONS:
            text = SECTIONS[name](args, root)
            if args.no_write or args.match:
                print(text)
            else:
                write_section(name, text, ROOT / "docs/measurements/clients.md")


if __name__ == "__main__":
    main()
