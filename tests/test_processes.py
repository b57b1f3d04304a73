"""Whose process a number means, and what is done to one that another rank tells of."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from quantkit.models.machine import heartbeat, processes
from quantkit.models.machine.heartbeat import Heartbeat

ASLEEP = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]


class Store(dict):
    """What torch's store is to a heartbeat."""

    set = dict.__setitem__
    get = dict.__getitem__

    def check(self, names):
        return all(name in self for name in names)

    def multi_get(self, names):
        return [self[name] for name in names]


@pytest.fixture
def asleep():
    """A process that does nothing."""
    with subprocess.Popen(ASLEEP, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture
def watched(asleep, monkeypatch):
    """`watched(place)`: the heartbeat of rank 0, whose rank 1 is silent and told that it is `asleep`."""
    monkeypatch.setattr(heartbeat, "SILENT", 0.0)

    def made(place: str) -> Heartbeat:
        own = Heartbeat(Store(), 0, 2, lambda failure, kept: None)
        other = json.loads(own._store["beat/0"]) | {"place": place, "pid": asleep.pid, "beat": 7}
        own._store["beat/1"] = json.dumps(other)
        own._judged()  # a silence begins
        time.sleep(0.01)
        return own

    before = signal.set_wakeup_fd(-1)
    yield made
    signal.set_wakeup_fd(before)


def test_a_process_is_there_until_it_has_ended(asleep):
    assert processes.lives(asleep.pid) and processes.seconds(asleep.pid) >= 0
    processes.end(asleep.pid)
    os.waitid(os.P_PID, asleep.pid, os.WEXITED | os.WNOWAIT)
    assert not processes.lives(asleep.pid), "nobody has asked yet how it ended"
    asleep.wait()
    assert not processes.lives(asleep.pid) and processes.seconds(asleep.pid) is None
    processes.end(asleep.pid)  # which is no error


def test_machines_and_containers_of_one_name_are_told_apart(tmp_path, monkeypatch):
    def place(boot: str, namespace: str) -> str:
        (tmp_path / "boot").write_text(f"{boot}\n")
        (tmp_path / "pid").unlink(missing_ok=True)
        (tmp_path / "pid").symlink_to(namespace)
        monkeypatch.setattr(processes, "BOOT", tmp_path / "boot")
        monkeypatch.setattr(processes, "NAMESPACE", tmp_path / "pid")
        processes.place.cache_clear()
        return processes.place()

    found = [place("a", "pid:[1]"), place("b", "pid:[1]"), place("a", "pid:[2]"), place("a", "pid:[1]")]
    assert len(set(found)) == 3 and found[0] == found[3]
    (tmp_path / "boot").unlink()
    processes.place.cache_clear()
    assert found[0].startswith(processes.place()), "elsewhere the name has to do"
    processes.place.cache_clear()


def test_a_silent_rank_is_ended_where_it_is(asleep, watched):
    own = watched(processes.place())
    own._judged()  # it may have computed until then
    time.sleep(0.01)
    failure = own._judged()
    assert failure.rank == 1 and "has not been heard of" in failure.message
    assert asleep.wait(60) == -signal.SIGKILL


def test_nothing_here_is_ended_for_a_rank_of_another_place(asleep, watched):
    """Its number may be anybody's here; a machine of the same name is another one."""
    own = watched(f"{processes.place()} another")
    failure = own._judged()
    assert failure.rank == 1 and failure.gone and asleep.poll() is None
    assert not own._is_gone({"place": "elsewhere", "pid": 2**22 + 1})
