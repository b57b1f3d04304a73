"""What is said of a server before it starts, and once it has answered."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

from quantkit.errors import printable
from quantkit.serving.server.command import KEY_VARIABLE
from quantkit.serving.server.hand_over import Prepared
from quantkit.tables import print_facts, print_line, size


def announce(prepared: Prepared) -> None:
    """The engine, its room and its command, on stderr, which the engine will write to, too."""
    console = Console(stderr=True, highlight=False, markup=False)
    room = prepared.room
    cache = "" if room.cache_bytes is None else f", cache {size(room.cache_bytes)}"
    facts = {
        "engine": prepared.offer.engine + (f" ({prepared.offer.reason})" if prepared.offer.reason else ""),
        "room": f"{room.parallel} × {room.ctx:,} tokens{cache}, weights {size(room.weight_bytes)}",
    }
    print_facts(console, facts)
    line = f"{'command':12s} {prepared.command.line()}"
    console.print(printable(line), markup=False, soft_wrap=True)  # in one piece, to be copied
    for note in prepared.command.notes:
        print_line(console, f"note: {note}")


def ready(prepared: Prepared, proof: dict[str, Any], staying: bool) -> None:
    """The proof, the address and an example, on stdout."""
    console = Console(highlight=False, markup=False)
    text = " ".join(proof["text"].split())
    facts = {
        "healthy": f"after {proof['started_seconds']:.1f} s",
        "answered": f"{proof['prompt']!r} with {text!r} in {proof['seconds']:.1f} s",
        "base URL": prepared.url,
        "model": prepared.command.model,
    }
    print_facts(console, facts)
    if staying:
        console.print(f"\n{example(prepared)}\n", markup=False, soft_wrap=True)
        console.print("Ctrl-C stops it.", markup=False)
    sys.stdout.flush()


def example(prepared: Prepared) -> str:
    """A request with curl, which can be pasted."""
    body: dict[str, Any] = {"model": prepared.command.model}
    if prepared.chat:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": "Hello!"}]
    else:
        path, body["prompt"] = "completions", "Once upon a time"
    body["max_tokens"] = 64
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if prepared.settings.api_key else ""
    data = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    return f"curl {prepared.url}/{path} -H 'Content-Type: application/json'{key} -d '{data}'"
