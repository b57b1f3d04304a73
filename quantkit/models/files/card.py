"""Model cards: what the card of the original declares, and the head of the card of a model made from it.

https://huggingface.co/docs/hub/model-cards#model-card-metadata
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from quantkit.errors import QuantkitError
from quantkit.models.files import hub, untrusted
from quantkit.models.files.atomic import replacing

CARD = "README.md"
CARD_BYTES = 1 << 20
INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")
LONGEST, MOST = 200, 100  # characters of a value, values of a list
HEAD = re.compile(r"\A---\r?\n(.*?)^---\r?$\n?", re.DOTALL | re.MULTILINE)


def path_of(output: Path) -> Path:
    """Return the path of a model's card: inside its folder, or next to its GGUF file."""
    return output.with_name(f"{output.name}.md") if output.suffix == ".gguf" else output / CARD


def read(path: Path) -> tuple[dict[str, Any], str]:
    """Return head and text of a card; an empty head if there is none, or if it is not YAML."""
    import yaml

    try:
        text = untrusted.read(path, CARD_BYTES).decode("utf-8")
    except (OSError, ValueError, QuantkitError):
        return {}, ""
    match = HEAD.match(text)
    try:
        head = yaml.safe_load(match[1]) if match else {}
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}, text
    return (head if isinstance(head, dict) else {}), text[match.end() :] if match else text


def write(path: Path, head: dict[str, Any], text: str) -> None:
    """Write a card."""
    import yaml

    named = yaml.safe_dump(head, sort_keys=False, allow_unicode=True, width=LONGEST)
    with replacing(path) as new:
        new.write_text(f"---\n{named}---\n{text}", encoding="utf-8")


def inherited(folder: Path) -> dict[str, str | list[str]]:
    """Return licence, languages and task that the card in a model's folder declares."""
    head = read(folder / CARD)[0]
    return {key: head[key] for key in INHERITED if _is_text(head.get(key))}


def _is_text(value: Any) -> bool:
    if isinstance(value, list):
        return 0 < len(value) <= MOST and all(isinstance(one, str) and _is_text(one) for one in value)
    return isinstance(value, str) and 0 < len(value) <= LONGEST and value.isprintable()


def base_of(source: str, folder: Path) -> str | None:
    """Return the hub id of a source, also of a snapshot in the hub's cache; None if it is not known."""
    if cached := re.fullmatch(r"models--([\w.-]+?)--([\w.-]+)", folder.resolve().parent.parent.name):
        return f"{cached[1]}/{cached[2]}"
    return source if hub.is_id(source) and not Path(source).exists() else None


def section(text: str, name: str, content: str) -> str:
    """Return a card's text with the content between `<!-- NAME -->` and `<!-- /NAME -->`, else at its end."""
    marks = f"<!-- {name} -->", f"<!-- /{name} -->"
    block = f"{marks[0]}\n{content.strip()}\n{marks[1]}"
    found = re.compile(f"{marks[0]}.*?{marks[1]}", re.DOTALL)
    if found.search(text):
        return found.sub(lambda _: block, text, count=1)
    return f"{text.rstrip()}\n\n{block}\n"
