"""Fixtures of the clients' tests: each module's CASES, written by quantkit and loaded by the client."""

from contextlib import ExitStack
from functools import cache

import cases
import pytest


@pytest.fixture(scope="module")
def wanted(request):
    """Case name -> case, of those that the tests of this run need."""
    return cases.selected(request.module, request.session.items)


@pytest.fixture(scope="module")
def folders(wanted, short_demo, tmp_path_factory):
    """Case name -> folder."""
    return cases.make(wanted, tmp_path_factory.mktemp("written"), short_demo)


@pytest.fixture(scope="session")
def process():
    """`process(loaders)` loads cases with these; GPTQModel's changes mixtures that others load after it."""
    with ExitStack() as stack:
        start = cache(lambda patched: stack.enter_context(cases.Client()))
        yield lambda loaders: start(not loaders.isdisjoint({"gptqmodel", "gptq", "awq"}))


@pytest.fixture(scope="module")
def client(wanted, folders, process, tmp_path_factory):
    """Case name -> what the client computed."""
    loaded_by = process({case.loader for case in wanted.values()})
    return cases.load(wanted, folders, tmp_path_factory.mktemp("client"), loaded_by)
