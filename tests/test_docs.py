"""The pages: links lead somewhere, commands and flags exist, each command has a page, the README is short."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from quantkit import __version__, cli
from quantkit.cli import commands
from quantkit.errors import EXIT_CODES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
CURRENT = [name for name in NAMES if name != "CHANGELOG.md"]  # which tells of what has been, too
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FOLDERS = r"quantkit|scripts|tests|recipes|templates|docs|calibration|heldout|\.ci"
PATH = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./*-]*[\w*]")
TEXTS = ("", ".sh", ".py", ".c", ".md", ".ipynb", ".yaml", ".yml")
# Flags of other programs, and of scripts.
OTHERS = {
    "--repo-type", "--max-model-len", "--max-num-seqs", "--gpu-memory-utilization",
    "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint",
    "--ctx-size", "--speculative-config", "--model-draft",
    "--continuous-batching", "--cb-max-memory-percent", "--cb-num-blocks", "--decode-concurrency",
}  # fmt: skip
GROUP = typer.main.get_command(cli.app)
GROUP.commands = {name: commands.build(name) for name in GROUP.commands}


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    return [link for link in LINK.findall(CODE.sub("", prose(page))) if "://" not in link]


def in_blocks(page: Path) -> list[list[str]]:
    """Arguments of every quantkit command in blocks of code."""
    blocks = "\n".join(FENCE.findall(page.read_text()))
    return [words(line) for line in re.findall(r"^(?:\$ )?quantkit (.*)$", blocks, re.MULTILINE)]


def in_text(page: Path) -> list[list[str]]:
    """The same in the text, where `quantkit gptq --bits 3` is said, and `…` stands for anything."""
    return [words(code[9:]) for code in CODE.findall(prose(page)) if code.startswith("quantkit ")]


def words(text: str) -> list[str]:
    """Those of a shell command up to a redirection, a pipe or a comment."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|<>;&")
    lexer.whitespace_split, found = True, []
    for word in lexer:
        if set(word) <= set("|<>;&"):
            break
        found.append(word)
    return [word for word in found if word != "…"]


def resolve(arguments: list[str]) -> tuple[Any, Any, list[str]]:
    """The command that arguments begin with, a context to parse in, and its own arguments."""
    command, rest = GROUP, arguments
    context = GROUP.context_class(GROUP, **GROUP.context_settings)  # help's own names are handed down
    if " ".join(rest[:2]) in commands.PARTS:
        rest = [" ".join(rest[:2]), *rest[2:]]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        command, rest = command.commands[rest[0]], rest[1:]
        context = command.context_class(command, parent=context, info_name=command.name)
    return command, context, rest


def flags_of(command: Any) -> set[str]:
    """All of a command and of those below it."""
    found = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    return found.union(*(flags_of(below) for below in getattr(command, "commands", {}).values()))


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_a_file_and_a_heading_in_it(name):
    page = ROOT / name
    for link in links(page):
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("name", NAMES)
def test_commands_can_be_typed(name):
    """Command, flags and their values; in the text, where models are often left out, command and flags."""
    for arguments in in_blocks(ROOT / name):
        command, context, rest = resolve(arguments)
        command.parse_args(context, rest)
    for arguments in in_text(ROOT / name):
        command, context, rest = resolve(arguments)
        command.make_parser(context).parse_args([word for word in rest if word != "--help"])


@pytest.mark.parametrize("name", CURRENT)
def test_flags_exist(name):
    """`--flag` in the text is a flag of some command."""
    known = flags_of(GROUP) | OTHERS | {"--help"}
    codes = [code for code in CODE.findall(prose(ROOT / name)) if code.startswith("-")]
    flags = {flag for code in codes for flag in re.findall(r"(?<!\S)--[a-z][\w-]*", code)}
    assert not flags - known


def test_paths_that_are_named_exist():
    """Paths of the repository in pages, scripts, recipes, templates and what runs in CI."""
    places = [ROOT / name for name in (*CURRENT, "action.yml", "compose.yaml", "Dockerfile", "mkdocs.yml")]
    for folder in (".ci", "scripts", "recipes", "templates", "docs"):
        places += (path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix in TEXTS)
    absent = [
        f"{place.relative_to(ROOT)}: {path}"
        for place in places
        for path in PATH.findall(place.read_text(encoding="utf-8"))
        if not any(ROOT.glob(path))
    ]
    assert not absent


@pytest.mark.parametrize("command", ["recipes list", "recipes show gptq-w3"])
def test_a_sample_is_what_is_printed(command, quantkit, monkeypatch):
    """Of commands that read no model."""
    monkeypatch.setenv("COLUMNS", "100")
    text = (ROOT / "docs" / "run-and-recipes.md").read_text()
    sample = re.search(rf"^```\n\$ quantkit {command}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]
    printed = "\n".join(line.rstrip() for line in quantkit(*command.split()).out.splitlines())
    assert printed.strip("\n") == sample.strip("\n")


def test_every_command_has_a_page_and_a_line_in_the_readme():
    titles = " ".join(page.read_text().partition("\n")[0] for page in PAGES if page.parent.name == "docs")
    row = r"^\| \[(\w+)\]\(docs/[\w-]+\.md(?:#\w+)?\) \| `quantkit (\w+)\b"
    table = re.findall(row, (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {link for link, _ in table} == set(commands.names())
    assert all(link == named for link, named in table)
    assert all(re.search(rf"quantkit {name}\b", titles) for name in commands.names())


def test_every_page_is_linked_from_the_readme():
    linked = {link.partition("#")[0] for link in links(ROOT / "README.md")}
    tables = {f"docs/{link.partition('#')[0]}" for link in links(ROOT / "docs/measurements.md")}
    linked |= {name for name in tables if name.startswith("docs/measurements/")}
    assert set(NAMES) - {"README.md", "docs/index.md"} <= linked


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built without a warning: every page is in the navigation, and every anchor exists."""
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", folder]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    return folder


def test_the_site_has_a_reference_page_for_every_command(site):
    assert (site / "howto" / "vllm" / "index.html").exists()
    assert "bits per weight in model-w4" in (site / "notebook" / "index.html").read_text()
    for name in (*commands.names(), "json"):
        assert (site / "reference" / name / "index.html").exists()
    codes = (site / "reference" / "exit-codes" / "index.html").read_text()
    assert all(f">{code}</td>\n<td>{words}</td>" in codes for code, words in EXIT_CODES.items())


@pytest.mark.parametrize("name", ["gptq", "eval", "recipes"])
def test_a_reference_page_shows_every_flag_of_the_help(site, name):
    """Of `--help-all` and of subcommands, inside code of the page's tables."""
    page = (site / "reference" / name / "index.html").read_text()
    shown = re.findall(r"<td><code>([^<]*)</code></td>", page)
    flags = {flag for names in shown for flag in re.findall(r"(?<!\S)--?[a-z][\w-]*", names)}
    assert flags == {flag for flag in flags_of(GROUP.commands[name]) if flag[0] == "-"} | {"-h", "--help"}


def test_every_json_schema_is_on_one_page():
    code = [path.read_text() for path in (ROOT / "quantkit").rglob("*") if path.suffix in (".py", ".json")]
    schemas = {schema for text in code for schema in re.findall(r'"(quantkit\.[a-z_-]+/\d+)"', text)}
    pages = [page.read_text() for page in (ROOT / "docs" / "reference").glob("json*.md")]
    described = re.findall(r"^## `(quantkit\.\S+)`$", "\n".join(pages), re.MULTILINE)
    assert sorted(described) == sorted(schemas)


def test_the_gate_of_the_page_is_this_version():
    gate = (ROOT / "docs" / "howto" / "ci-gate.md").read_text()
    assert set(re.findall(r"\bv(\d+\.\d+\.\d+)\b", gate)) == {__version__}
    assert f"\n## {__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_tree_of_the_readme_is_the_package():
    text = (ROOT / "README.md").read_text()
    tree = re.search(r"^quantkit/.*\n((?:  .*\n)+)", text, re.MULTILINE)[1]
    shown = {line.split()[0].rstrip("/") for line in tree.splitlines()}
    found = (path for path in (ROOT / "quantkit").iterdir() if path.suffix in ("", ".py"))
    there = {path.name for path in found if not path.name.startswith("_")}
    assert shown == there
