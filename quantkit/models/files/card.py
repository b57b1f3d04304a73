"""Model cards: the head of a README.md (https://huggingface.co/docs/hub/model-cards) and its text."""

import os
import re
from pathlib import Path
from typing import Any

from quantkit.errors import USAGE, QuantkitError, require
from quantkit.models.files import gguf_shards, hub, untrusted
from quantkit.models.files.atomic import replacing

CARD, CARD_BYTES = "README.md", 1 << 20
INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")
NEEDED = {"base_model": "ORG/NAME", "license": "apache-2.0"}  # required to publish; with an example
HEAD = re.compile(r"\A---\r?\n(.*?)^---\r?$\n?", re.DOTALL | re.MULTILINE)


def path_of(output: Path) -> Path:
    """Return the path of a model's card: inside its folder, or next to its GGUF file."""
    one_file = output.suffix == ".gguf" or not output.is_dir()  # a job's file may not exist yet
    return output.with_name(f"{gguf_shards.whole(output).name}.md") if one_file else output / CARD


def read(path: Path) -> tuple[dict[str, Any], str]:
    """Return head and text of a card; an empty head if there is none, or if it is not YAML."""
    import yaml

    try:
        text = untrusted.read(path, CARD_BYTES).decode("utf-8")
        match = HEAD.match(text)
        head = yaml.safe_load(match[1]) if match else {}
    except (OSError, ValueError, RecursionError, QuantkitError, yaml.YAMLError):
        return {}, ""
    return (head if isinstance(head, dict) else {}), text[match.end() if match else 0 :]


def write(path: Path, head: dict[str, Any], text: str) -> None:
    """Write a card."""
    import yaml

    with replacing(path) as new:
        named = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
        new.write_text(f"---\n{named}---\n{text}", encoding="utf-8")


def write_own(path: Path, head: dict[str, Any], text: str) -> None:
    """Write a card, unless a card that quantkit did not write is there."""
    if is_free(path):
        write(path, head, text)


def is_free(path: Path) -> bool:
    """Return whether no card is at `path`, or one that quantkit wrote."""
    return not os.path.lexists(path) or read(path)[0].get("quantized_by") == "quantkit"


def head(base: str | None, layout: str, folder: Path) -> dict[str, Any]:
    """Return the head of a quantized model's card. folder: of the source."""
    head = {"base_model": base, "base_model_relation": "quantized"} if base else {}
    library = layout if layout in ("gguf", "mlx") else "transformers"
    head |= {"library_name": library, "pipeline_tag": "text-generation"}
    return head | inherited(folder) | {"quantized_by": "quantkit", "tags": ["quantkit", layout]}


def check(head: dict[str, Any], path: Path, hint: str = "") -> None:
    """Raise QuantkitError unless a card's head names base model and licence. path: of the card."""
    missing = {key: f"`{key}: {example}`" for key, example in NEEDED.items() if not head.get(key)}
    add = f"{hint}write {' and '.join(missing.values())} into its head, between the lines of ---"
    require(not missing, f"{path} names no {' and no '.join(missing)}", add, USAGE)


def inherited(folder: Path) -> dict[str, str | list[str]]:
    """Return licence, languages and task that the card in a model's folder declares."""
    head = read(folder / CARD)[0]
    return {key: head[key] for key in INHERITED if _is_text(head.get(key))}


def _is_text(value: Any) -> bool:
    if isinstance(value, list):
        return 0 < len(value) <= 100 and all(isinstance(item, str) and _is_text(item) for item in value)
    return isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable()


def base_of(source: str, folder: Path) -> str | None:
    """Return the hub id of a source, also of a snapshot in the hub's cache; None if it is not known."""
    if cached := re.fullmatch(r"models--([\w.-]+?)--([\w.-]+)", folder.resolve().parent.parent.name):
        return f"{cached[1]}/{cached[2]}"
    return source if hub.is_id(source) and not Path(source).exists() else None


def renamed(text: str, old: str, new: str) -> str:
    """Return the text of a card for a model `new` that was made from the model `old`, as its recipe was."""
    text = text.replace(f"\n# {old}\n", f"\n# {new}\n").replace("makes the same model,", f"makes {old},")
    return text.replace(f" {old} --text TEXT --card {old}`", f" {new} --text TEXT --card {new}`")


def section(text: str, name: str, content: str) -> str:
    """Return a card's text with the content between `<!-- NAME -->` and `<!-- /NAME -->`, else at its end."""
    block = f"<!-- {name} -->\n{content.strip()}\n<!-- /{name} -->"
    replaced, number = re.subn(f"<!-- {name} -->.*?<!-- /{name} -->", lambda _: block, text, flags=re.DOTALL)
    return replaced if number else f"{text.rstrip()}\n\n{block}\n"
