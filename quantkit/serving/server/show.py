"""The printed output, before a server starts and after its first answer."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

from quantkit.errors import printable
from quantkit.evaluation.comparison.columns import check_line
from quantkit.serving.server.command import KEY_VARIABLE
from quantkit.serving.server.job import Prepared
from quantkit.tables import print_facts, print_line, size


def announce(prepared: Prepared) -> None:
    """Print the engine, its memory and lengths, and its command on stderr."""
    console = Console(stderr=True, highlight=False, markup=False)
    sized, offer = prepared.size, prepared.offer
    cache = "" if sized.cache_bytes is None else f", cache {size(sized.cache_bytes)}"
    facts = {
        "engine": offer.engine + (f" ({offer.reason})" if offer.reason else ""),
        "room": f"{sized.parallel} × {sized.ctx:,} tokens{cache}, weights {size(sized.weight_bytes)}",
    }
    print_facts(console, facts)
    line = f"{'command':12s} {prepared.command.line()}"
    console.print(printable(line), markup=False, soft_wrap=True)  # unwrapped, so that users can copy it
    for note in prepared.command.notes:
        print_line(console, f"note: {note}")


def ready(prepared: Prepared, proof: dict[str, Any], compared: dict[str, Any] | None, staying: bool) -> None:
    """Print the server's first answer and its address on stdout, and what `compare` returned; if `staying`,
    also an example with curl."""
    console = Console(highlight=False, markup=False)
    text = " ".join(proof["text"].split())
    facts = {"compared": check_line(compared)} if compared else {}
    facts |= {
        "healthy": f"after {proof['started_seconds']:.1f} s",
        "answered": f"{proof['prompt']!r} with {text!r} in {proof['seconds']:.1f} s",
        "base URL": prepared.url,
        "model": prepared.command.model,
    }
    print_facts(console, facts)
    if staying:
        path, _, body = prepared.request("Hello!" if prepared.chat else None)
        key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if prepared.settings.api_key else ""
        data = json.dumps(body | {"max_tokens": 64}, ensure_ascii=False).replace("'", "'\\''")
        line = f"curl {prepared.url}{path} -H 'Content-Type: application/json'{key} -d '{data}'"
        console.print(f"\n{line}\n\nCtrl-C stops it.", markup=False, soft_wrap=True)
    sys.stdout.flush()
