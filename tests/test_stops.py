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

SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
CHAINS = {
    (name, shift): list(zip(stops.moments(name), itertools.cycle(SIGNALS[shift:] + SIGNALS[:shift])))
    for shift, name in ((at % 3, name) for at, name in enumerate(stops.METHODS))
}


@pytest.fixture(scope="module")
def server():
    with forked.Server() as server:
        yield server


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return stops.workplace(tmp_path_factory.mktemp("stops"))


def test_the_chains_are_many_and_of_all_kinds():
    """Every moment by every signal, of one method or another."""
    met = {(moment[0], number) for chain in CHAINS.values() for moment, number in chain}
    wanted = ("loading", "solving", "staging", "assembling", "renaming", "resuming")
    assert met >= set(itertools.product(wanted, SIGNALS))
    assert sum(map(len, CHAINS.values())) >= 80


@pytest.mark.parametrize("name, shift", CHAINS)
def test_stopped_at_every_moment(server, workplace, name, shift):
    reference, folder = workplace / f"{name} whole", workplace / name
    assert server.learn(reference, stops.command(name)) == 0, (reference / "log").read_text()
    typed = stops.command(name)
    for (what, place, call), number in CHAINS[name, shift]:
        code = server.run(folder, typed, stop=(place, call, number))
        assert (folder / "reached").exists(), f"never {what}: {(folder / 'log').read_text()}"
        (folder / "reached").unlink()
        assert stops.wrong(name, folder, number, code) is None, what
        assert not (folder / stops.output(name)).exists(), what
        typed = stops.again(name)
    assert server.run(folder, typed) == 0, (folder / "log").read_text()
    assert stops.contents(folder / stops.output(name)) == stops.contents(reference / stops.output(name))
    assert stops.left(name, folder) == []


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("name", ["gptq", "gguf"])
@pytest.mark.parametrize("place", ["os:unlink", "os:rmdir", "quantkit.cli.job_report:print_summary"])
def test_stopped_behind_the_end(server, workplace, tmp_path, name, number, place):
    """Once the output is in place, that is what is said; and nothing is in the way of the next job."""
    folder = tmp_path / "job"
    for part in ("model", "text.txt"):
        (tmp_path / part).symlink_to(workplace / part)
    calls = {"os:unlink": 3}.get(place, 1)
    typed = [*stops.command(name), "--samples", "2"]
    code = server.run(folder, typed, stop=(place, calls, number), after=("os:rename", 1))
    assert (folder / "reached").exists() and (folder / stops.output(name)).exists()
    assert code in stops.STOPS[number]
    made = stops.contents(folder / stops.output(name))
    if number != signal.SIGKILL:
        error, hint = (folder / "log").read_text().splitlines()[-2:]
        assert error == f"error: {stops.WORDS[number]}; {stops.output(name)} finished"
        assert hint == "hint: measure with: quantkit eval"
        assert stops.left(name, folder) == []
    assert server.run(folder, [*typed, "--overwrite"]) == 0, (folder / "log").read_text()
    assert stops.contents(folder / stops.output(name)) == made
    assert stops.left(name, folder) == []
