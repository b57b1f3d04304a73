"""Jobs of every method, stopped while they load, solve, stage, assemble, rename and resume: whoever is asked
to stop says one line and how to go on, and what is resumed ends with the bytes of an undisturbed job.

Each is one chain: stopped at its first moment, resumed and stopped at the next one, and so on. A signal is
sent by the process itself, before a call, so that nothing depends on how fast a machine is.
"""

import itertools
import signal

import forked
import pytest
import stops
from nights import by_day, nightly

SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
CHAINS = {
    (name, shift): list(zip(stops.moments(name), itertools.cycle(SIGNALS[shift:] + SIGNALS[:shift])))
    for shift, name in ((at % 3, name) for at, name in enumerate(stops.METHODS))
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return stops.workplace(tmp_path_factory.mktemp("stops"))


def test_the_chains_are_many_and_of_all_kinds():
    """Every moment by every signal, of one method or another."""
    met = {(moment[0], number) for chain in CHAINS.values() for moment, number in chain}
    wanted = ("loading", "solving", "staging", "assembling", "renaming", "resuming")
    assert met >= set(itertools.product(wanted, SIGNALS))
    assert sum(map(len, CHAINS.values())) >= 80


DAY = [(name, shift) for name, shift in CHAINS if name in ("nf4", "imatrix")]


@pytest.mark.parametrize("name, shift", by_day(CHAINS, DAY))
def test_stopped_at_every_moment(forker, workplace, name, shift):
    reference, folder = workplace / f"{name} whole", workplace / name
    assert forker.learn(reference, stops.command(name)) == 0, forked.said(reference)
    typed = stops.command(name)
    for (what, place, call), number in CHAINS[name, shift]:
        code = forker.run(folder, typed, stop=(place, call, number))
        assert (folder / "reached").exists(), f"never {what}: {(folder / 'log').read_text()}"
        (folder / "reached").unlink()
        assert stops.wrong(name, folder, number, code) is None, what
        assert not (folder / stops.output(name)).exists(), what
        typed = stops.again(name)
    assert forker.run(folder, typed) == 0, forked.said(folder)
    assert stops.contents(folder / stops.output(name)) == stops.contents(reference / stops.output(name))
    assert stops.left(name, folder) == []


@pytest.mark.parametrize(
    "name, place, call, number",
    [
        ("nf4", "os:unlink", 3, signal.SIGKILL),
        ("nf4", "quantkit.cli.job_report:print_summary", 1, signal.SIGTERM),
        ("gguf rtn", "os:rmdir", 1, signal.SIGINT),
        *nightly(("nf4", "os:rmdir", 1, signal.SIGKILL), ("nf4", "os:rmdir", 1, signal.SIGINT)),
    ],
)
def test_stopped_behind_the_end(forker, workplace, tmp_path, name, place, call, number):
    """Once the output is in place, that is what is said; and nothing is in the way of the next job."""
    folder, made = tmp_path / "job", stops.output(name)
    for part in ("model", "text.txt"):
        (tmp_path / part).symlink_to(workplace / part)
    code = forker.run(folder, stops.command(name), stop=(place, call, number), after=("os:rename", 1))
    log = forked.said(folder)
    assert (folder / "reached").exists() and code in stops.STOPS[number], log
    whole = stops.contents(folder / made)
    if number == signal.SIGKILL:
        assert stops.left(name, folder) == [f"{made}.partial"]
    else:
        error, hint = log.splitlines()[-2:]
        assert error == f"error: {stops.WORDS[number]}; {made} finished"
        assert hint == "hint: measure with: quantkit eval"
        assert stops.left(name, folder) == []
        return
    assert forker.run(folder, [*stops.command(name), "--overwrite"]) == 0, forked.said(folder)
    assert stops.contents(folder / made) == whole
    assert stops.left(name, folder) == []


@pytest.mark.nightly
def test_killed_while_what_another_job_left_is_removed(forker, workplace):
    """Whatever is gone by then, the folder is still known for a job's."""
    folder = workplace / "cleared"
    kill = ("os:rename", 1, int(signal.SIGKILL))
    assert forker.run(folder, stops.command("nf4"), stop=kill) == -signal.SIGKILL
    typed = [*stops.command("nf4"), "--overwrite"]
    kill = ("shutil:rmtree", 1, int(signal.SIGKILL))
    assert forker.run(folder, typed, stop=kill) == -signal.SIGKILL
    for call in range(1, 8):
        kill = ("os:unlink", call, int(signal.SIGKILL))
        if forker.run(folder, typed, stop=kill) == 0:
            break
        assert "is not an unfinished job" not in forked.said(folder)
    assert forker.run(folder, typed) == 0, forked.said(folder)
    assert stops.left("nf4", folder) == []
