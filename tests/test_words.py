"""Plain words: docstrings say what a function returns or does; pages and help use the glossary's words."""

import ast
import re
from pathlib import Path

import pytest
from test_docs import CURRENT, GROUP, ROOT, prose

import quantkit

PACKAGE = Path(quantkit.__file__).parent
OPENINGS = re.compile(r"(What|Who|Whose|Those|Of|Where|Whether|The same|That|Which|As)\b")
OLD = re.compile(
    r"\b(told|meant|beside|behind|alike|bystander|plausible|undescribed|manners|unasked|makes no sense"
    r"|not understood|begins? anew)\b",
    re.IGNORECASE,
)
RAISED = ("QuantkitError", "DamagedError", "Unsupported", "require", "warn", "phase")
GENERATED = re.compile(r"<!-- ([\w-]+) -->.*?<!-- /\1 -->", re.DOTALL)  # tables written by scripts


def test_docstrings_begin_with_what_a_function_returns_or_does_in_plain_words():
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = re.sub(r"`[^`\n]+`", "", ast.get_docstring(node) or "")
                if OPENINGS.match(text) or OLD.search(text):
                    found.append(f"{path.relative_to(PACKAGE)}: {text.splitlines()[0]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", [name for name in CURRENT if name != "CONTRIBUTING.md"])
def test_pages_use_the_words_of_the_field(name):
    text = re.sub(r"`[^`\n]+`", "", GENERATED.sub("", prose(ROOT / name)))
    assert not OLD.findall(text)


@pytest.mark.parametrize("name", [name for name in GROUP.commands if name != "recipes"])
def test_help_uses_the_words_of_the_field(name):
    command = GROUP.commands[name]
    texts = [command.help, *(option.help for option in command.params)]
    assert not [text for text in texts if text and OLD.search(text)]


def test_messages_use_the_words_of_the_field():
    found = []
    for path in PACKAGE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(call, ast.Call)
                and getattr(call.func, "attr", getattr(call.func, "id", "")) in RAISED
            ):
                texts = (part.value for part in ast.walk(call) if isinstance(part, ast.Constant))
                found += [f"{path.relative_to(PACKAGE)}: {text}" for text in texts if OLD.search(str(text))]
    assert not found, "\n".join(found)
