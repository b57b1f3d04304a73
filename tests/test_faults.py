"""Calls of a job that fail (ENOSPC, EIO), a folder that turns read-only, a full /tmp, a clock that is set
back, a reader that goes away: one line says why, and what is resumed has the bytes of an undisturbed job.

`scripts/reliability.py faults` lets every call of every method fail in turn; here are some.
"""

import errno
import os
import re
import signal

import failing
import forked
import pytest
import stops
from nights import by_day, nightly

NAME = "nf4"
needs_compiler = pytest.mark.skipif(failing.compiler() is None, reason="there is no C compiler")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return stops.workplace(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def library(forker):
    return forker.library


@pytest.fixture(scope="module")
def server(forker, workplace):
    assert forker.learn(workplace / "reference", stops.command(NAME)) == 0
    return forker


@pytest.fixture(scope="module")
def reference(server, workplace):
    return stops.contents(workplace / "reference" / "out")


@pytest.fixture(scope="module")
def calls(server, library, workplace):
    """Writes and renames of an undisturbed job."""
    folder = workplace / "counted"
    assert server.run(folder, stops.command(NAME), call=call(library, folder)) == 0
    return int((folder / "count").read_text())


def call(library, place, kind="w", number=0, error=0):
    return "failing:begin", [library, str(place), kind, number, error]


def lines(folder) -> tuple[str, str]:
    """error and hint, the last two lines of what was said, and no others of that kind."""
    said = forked.said(folder)
    assert "Traceback" not in said
    found = re.search(r"^error: (.+)\nhint: (.+)\n\Z", said, re.M)
    assert found and said.count("error: ") == 1, said
    return found.groups()


@needs_compiler
@pytest.mark.parametrize("part", by_day(range(6), (2, 5)))
def test_calls_that_fail_one_at_a_time(server, library, workplace, reference, calls, part):
    """Writes and renames, the first to the last, by part; every other is told that the disk is full."""
    folder = workplace / f"failing {part}"
    assert calls > 30
    number = 1 + (calls - 1) * part // 5
    error = errno.EIO if part % 2 else errno.ENOSPC
    code = server.run(folder, stops.command(NAME), call=call(library, folder, "w", number, error))
    if code == 0:  # what was to be removed may stay
        assert stops.contents(folder / "out") == reference
        return
    assert ("full" if error == errno.ENOSPC else "input/output error") in lines(folder)[0]
    assert code == 5 or error == errno.EIO
    there = (folder / "out").exists()
    again = [*stops.again(NAME), "--overwrite"] if there else stops.again(NAME)
    assert server.run(folder, again) == 0, forked.said(folder)
    assert stops.contents(folder / "out") == reference
    assert stops.left(NAME, folder) == []


@needs_compiler
@pytest.mark.parametrize("number", [4, *nightly(1, 9)])
def test_a_model_that_cannot_be_read(server, library, workplace, reference, number):
    folder, model = workplace / f"reading {number}", workplace / "model"
    code = server.run(folder, stops.command(NAME), call=call(library, model, "r", number, errno.EIO))
    assert code != 0 and lines(folder)
    assert not (folder / "out").exists()
    assert server.run(folder, stops.again(NAME)) == 0, forked.said(folder)
    assert stops.contents(folder / "out") == reference


@needs_compiler
@pytest.mark.parametrize(
    "error, number",
    [(errno.EROFS, 12), (errno.EACCES, 40), *nightly((errno.EROFS, 40), (errno.EACCES, 12))],
)
def test_a_folder_that_turns_read_only(server, library, workplace, reference, error, number):
    """From some call on; by the system's answer, for root may write anywhere."""
    folder = workplace / f"read-only {error} {number}"
    assert server.run(folder, stops.command(NAME), call=call(library, folder, "w", -number, error)) in (1, 5)
    said, hint = lines(folder)
    words = "the disk of out.partial has become read-only"
    if error == errno.EACCES:
        words = "out.partial cannot be written any more: permission denied"
    assert said == words and hint.endswith(
        "run the same command with --resume; finished blocks are kept there"
    )
    assert not (folder / "out").exists()
    assert server.run(folder, stops.again(NAME)) == 0, forked.said(folder)
    assert stops.contents(folder / "out") == reference


@needs_compiler
def test_a_full_tmp(server, library, workplace, reference):
    """Nothing of a job lies there."""
    folder, full = workplace / "tmp is full", workplace / "tmp"
    full.mkdir()
    refuses, place = call(library, full, "w", -1, errno.ENOSPC), {"TMPDIR": str(full)}
    assert server.run(folder, stops.command(NAME), call=refuses, environment=place) == 0
    assert stops.contents(folder / "out") == reference


def test_a_clock_that_is_set_back(server, workplace, reference):
    """Staged blocks are of tomorrow, and time goes back while the job runs."""
    folder = workplace / "clock"
    stop = ("os:replace", 4, int(signal.SIGKILL))
    assert server.run(folder, stops.command(NAME), stop=stop) == -signal.SIGKILL
    for path in (folder / "out.partial").iterdir():
        os.utime(path, (2**32, 2**32))
    assert server.run(folder, stops.again(NAME), call=("failing:clock_back", [86_400.0])) == 0
    assert "1 of 2 blocks" in forked.said(folder)
    assert stops.contents(folder / "out") == reference


@pytest.mark.parametrize("closed", [[1], [2], *nightly([1, 2])], ids=["stdout", "stderr", "both"])
def test_a_parent_that_closes_the_pipe(server, workplace, reference, closed):
    """Who listened went away: a job that has still something to say ends as SIGPIPE would end it, and goes on
    when it is told to. No word of it is lost elsewhere."""
    folder = workplace / f"unread {closed}"
    assert server.run(folder, stops.command(NAME), call=("failing:unread", closed)) == 128 + signal.SIGPIPE
    assert "Traceback" not in forked.said(folder) and "error:" not in forked.said(folder)
    assert (folder / "out").exists() == (closed == [1])
    assert server.run(folder, stops.again(NAME)) == 0, forked.said(folder)
    assert stops.contents(folder / "out") == reference
    assert stops.left(NAME, folder) == []
