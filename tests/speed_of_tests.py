"""The speed that tests take for this machine's: that of one core with AMX, in bfloat16."""

import json
from dataclasses import asdict
from pathlib import Path

from quantkit.capacity import speed

SPEED = speed.Speed(
    product=2.5e-12, float32=1.5e-11, moment=1.1e-11, value=1.2e-9, column=7e-5, weight=1.2e-7, byte=8e-11
)


def variables(folder: Path) -> dict[str, str]:
    """Variables for a process that finds SPEED in a new cache folder."""
    kept = folder / "cache" / "quantkit" / "speed.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps({speed.key(dtype): asdict(SPEED) for dtype in ("bfloat16", "float32")}))
    return {"XDG_CACHE_HOME": str(folder / "cache")}
