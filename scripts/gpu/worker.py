"""One stage of scripts/gpu_day: worker.py STAGE REQUEST.json. The result has its rows as they come."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

from gpu.run import Run, Skipped  # noqa: E402


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage")
    parser.add_argument("request", type=Path)
    args = parser.parse_args(given)
    request = json.loads(args.request.read_text())
    folders = {name: Path(request.pop(name)) for name in ("work", "results", "environments")}
    run = Run(args.stage, **request, **folders)
    run.result = json.loads(run.path.read_text())
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # quantkit may not be installed
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": ":".join(paths)}
    os.environ.setdefault("QUANTKIT_DEVICE", "far" if run.rehearse else run.device)
    from gpu import on_device, others, proofs  # reads QUANTKIT_DEVICE as it is imported

    (stage,) = (getattr(room, args.stage) for room in (on_device, proofs, others) if args.stage in vars(room))
    try:
        stage(run)
    except Skipped as why:
        run.result["why"] = str(why)
    run.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
