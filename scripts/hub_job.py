# /// script
# requires-python = ">=3.11"
# dependencies = ["quantkit @ git+https://github.com/OWNER/quantkit@v0.3.0"]
#
# [tool.hf-jobs]
# flavor = "a10g-small"
# timeout = "2h"
# secrets = ["HF_TOKEN"]
# ///
"""Quantize a model on a rented GPU of the hub, and push the result (docs/push.md).

hf jobs uv run scripts/hub_job.py Qwen/Qwen3-0.6B me/Qwen3-0.6B-w4 --bits 4
"""

import argparse
import subprocess
import sys

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="hub id of the original model")
parser.add_argument("repo", help="repository that gets the result")
known, options = parser.parse_known_args()
command = [sys.executable, "-m", "quantkit", "gptq", known.model, "-o", "quantized", *options]
sys.exit(subprocess.run([*command, "--push", known.repo]).returncode)
