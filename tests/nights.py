"""Cases that scripts/nightly runs and scripts/test leaves out."""

from collections.abc import Iterable
from typing import Any

import pytest


def nightly(*cases: Any) -> list:
    """The same cases, marked: slow ones, and repetitions of what another case shows."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.nightly)
        for case in cases
    ]


def by_day(cases: Iterable[Any], day: Iterable[Any]) -> list:
    """All cases, of which those that are not in `day` are marked."""
    kept = list(day)
    return [case if case in kept else nightly(case)[0] for case in cases]
