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
    r"\b(told|meant|beside|behind|alike|bystander|plausible|undescribed|manners)\b", re.IGNORECASE
)
GENERATED = re.compile(r"<!-- ([\w-]+) -->.*?<!-- /\1 -->", re.DOTALL)  # tables written by scripts


def test_docstrings_begin_with_what_a_function_returns_or_does():
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                if OPENINGS.match(ast.get_docstring(node) or ""):
                    found.append(f"{path.relative_to(PACKAGE)}: {ast.get_docstring(node).splitlines()[0]}")
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
