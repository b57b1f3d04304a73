"""Fixtures of the clients' tests: each module's CASES, written by quantkit and loaded by the client."""

import cases
import pytest


@pytest.fixture(scope="module")
def folders(request, short_demo, tmp_path_factory):
    """Case name -> folder."""
    return cases.make(request.module.CASES, tmp_path_factory.mktemp("written"), short_demo)


@pytest.fixture(scope="module")
def client(request, folders, tmp_path_factory):
    """Case name -> what the client computed."""
    return cases.load(request.module.CASES, folders, tmp_path_factory.mktemp("client"))
