"""mkdocs hook: adds a reference page for each command, made from its own help, one for the exit codes, and
the notebook as a page.

Usage: named in mkdocs.yml under `hooks`; `mkdocs build` calls `on_files`.
"""

import html
import re
from collections.abc import Sequence
from typing import Any

import notebook
import typer

from quantkit import cli
from quantkit.cli import commands
from quantkit.errors import EXIT_CODES


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the site's files and to the section Reference of its navigation."""
    from mkdocs.structure.files import File

    root = typer.main.get_command(cli.app)
    context = root.context_class(root, info_name="quantkit", **root.context_settings)
    pages, guides = {}, {}
    for page in sorted(files.documentation_pages(), key=lambda page: len(page.src_uri)):
        title = page.content_string.partition("\n")[0]
        guides = {
            name: page.src_uri for name in re.findall(r"quantkit (\w+(?: attention| batching)?)", title)
        } | guides
    for name in root.commands:
        command = commands.build(name)
        place = name.replace(" ", "-")
        pages[place] = f"# quantkit {name}\n\n" + section(command, context, guides.get(name, ""))
    pages["exit-codes"] = exit_codes()
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    files.append(File.generated(config, "notebook.md", content=notebook.markdown(notebook.read())))
    reference = next(row["Reference"] for row in config.nav if "Reference" in row)
    codes = {"Exit codes": f"reference/{[*pages][-1]}.md"}
    reference[:0] = [
        {"Commands": [{name: f"reference/{name.replace(' ', '-')}.md"} for name in root.commands]},
        codes,
    ]
    return files


def section(command: Any, parent: Any, guide: str = "") -> str:
    """Return summary, usage, a table per help panel and examples of a command, then of its subcommands."""
    context = command.context_class(command, parent=parent, info_name=command.name)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    parts = [command.help, f"```\n{usage}\n```"]
    if guide:
        parts.insert(1, f"With samples: [the guide to {command.name}](../{guide}).")
    panels: dict[str, list[Any]] = {"Arguments": [], "Options": []}
    for row in command.get_params(context):
        panels.setdefault(row.rich_help_panel or f"{row.param_type_name.title()}s", []).append(row)
    parts += [f"**{title}**\n\n{table(rows, context)}" for title, rows in panels.items() if rows]
    parts.append(examples(command.epilog or ""))
    for name, below in getattr(command, "commands", {}).items():
        parts.append(f"## {context.command_path} {name}\n\n" + section(below, context))
    return "\n\n".join(part for part in parts if part) + "\n"


def table(parameters: Sequence[Any], context: Any) -> str:
    """Return a table with a row per parameter: names and type, default, help."""
    lines = ["| | default | |", "| --- | --- | --- |"]
    for parameter in parameters:
        names, text = parameter.get_help_record(context)
        text, _, default = text.partition("  [default: ")
        default = default and f"`{default.removesuffix(']')}`"
        text = re.sub(r"([|*_])", r"\\\1", html.escape(text, quote=False))
        lines.append(f"| `{names}` | {default} | {text} |")
    return "\n".join(lines)


def examples(epilog: str) -> str:
    """Return the examples in a command's epilog as a block of code, then the epilog's other lines."""
    lines = [line for line in epilog.splitlines() if line and line not in ("Examples:", "Subcommands:")]
    indented = "\n".join(line.strip() for line in lines if line.startswith(" "))
    block = f"**Examples**\n\n```\n{indented}\n```\n\n" if indented else ""
    return (block + "\n".join(line for line in lines if not line.startswith(" "))).strip()


def exit_codes() -> str:
    """Return the page that lists the exit codes of every command."""
    rows = "\n".join(f"| {code} | {words} |" for code, words in EXIT_CODES.items())
    return f"# Exit codes\n\nA command ends with one of these codes.\n\n| code | |\n| ---: | --- |\n{rows}\n"
