"""Signs of life among the processes of one job: who died, who hangs, whose error it was.

Every rank writes down each second, in the store by which the ranks found each other, that it lives, what it
waits for and when it last got anywhere, and reads what the others wrote. A rank is lost whose process is gone
or which has said nothing for SILENT seconds; it hangs when for STUCK seconds it waited for nobody and used
neither processor nor disk. A solve of an hour is neither. The first failure that is written down counts, on
all ranks; the first rank that is not to blame tells it, and all end with the same exit code.

A thread does this, for the main one may be inside a collective operation that never returns: it is asked to
stop, and after GRACE seconds the process ends without it. Staged blocks are whole at any moment.
"""

from __future__ import annotations

import _thread
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from quantkit.errors import INTERRUPTED, RUNTIME, TERMINATED
from quantkit.models.machine import processes

BEAT = 0.5  # seconds between two signs of life
SILENT = 20.0
STUCK = 40.0
GRACE = 5.0
POLITE = 1.0  # seconds that a rank is given for an error of its own where another had one first
SOME_CPU = (
    0.5  # seconds of the processor within STUCK by which a rank has got somewhere: this thread takes less
)
STOPS = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}


@dataclass(frozen=True)
class Failure:
    """What ends the job. rank: whose fault it is, None where all were asked to stop. gone: it said nothing
    itself."""

    rank: int | None
    message: str
    hint: str = ""
    exit_code: int = RUNTIME
    gone: bool = False


class Heartbeat:
    """Of one rank of `count`. store: a connection of its own, since others wait inside theirs; from torch.

    say: prints a failure, once, where the main thread no longer can; its second argument says what to do
    where the failure itself does not. kept: what that is, as far as it is known.
    """

    def __init__(self, store: Any, rank: int, count: int, say: Callable[[Failure, str], None]):
        self._store, self.rank, self._count, self._say = store, rank, count, say
        self.failure: Failure | None = None
        self.kept = ""
        self.ending = False  # the main thread is on its way out
        self._spoken = threading.Lock()
        self._stopped = threading.Event()
        self._beats = 0
        self._waiting_since: float | None = None
        self._leaving = False
        self._process = psutil.Process()
        self._signs, self._got_on = self._signs_of_life(), time.monotonic()
        self._seen: dict[int, tuple[int, float]] = {}  # by rank: its last beat, and when that was first read
        self._cpu: dict[int, float] = {}
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._woken, wakes = os.pipe()
        for end in (self._woken, wakes):
            os.set_blocking(end, False)
        self._before = signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        self.beat()

    def start(self) -> None:
        """Watch the others, all of which have begun."""
        self._thread.start()

    # ---- what the main thread says

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Meanwhile others are waited for: that this rank gets nowhere is not its fault."""
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since = None
            self._got_on = time.monotonic()

    def leave(self) -> None:
        """Done, or going for a reason that is known; the others are not to miss this rank."""
        self._leaving = True
        self._stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        signal.set_wakeup_fd(self._before)
        self.beat()

    def blame(self, own: Failure) -> Failure:
        """The failure that counts on all ranks: the first that was written down, which may be this one."""
        if self.failure is None:
            try:
                stored = self._store.compare_set("failure", "", json.dumps(asdict(own)))
                self.failure = Failure(**json.loads(stored))
            except (RuntimeError, ValueError):  # whoever holds the store is gone
                self.failure = own
        return self.failure

    def look_for(self, seconds: float) -> Failure | None:
        """Wait until a failure is known, as long as that."""
        end = time.monotonic() + seconds
        while self.failure is None and time.monotonic() < end and not self._stopped.is_set():
            time.sleep(0.05)
        return self.failure

    def may_speak(self) -> bool:
        """Whether the failure has not been told yet by this process; the caller then tells it."""
        return self._spoken.acquire(blocking=False)

    def is_speaker(self, failure: Failure) -> bool:
        """Whether this rank is the one to tell it: the first of those that are not to blame."""
        return self.rank == (1 if failure.rank == 0 and failure.gone else 0)

    def told(self) -> None:
        """The failure is on the user's screen."""
        try:
            self._store.set("told", "yes")
        except RuntimeError:
            return  # nobody is left to be told

    def wait_told(self, seconds: float) -> bool:
        """Until another rank has told the failure; False where nobody did."""
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                if self._store.check(["told"]):
                    return True
                time.sleep(0.05)
        except RuntimeError:
            return True  # who told it has left with the store
        return False

    def wait_left(self, seconds: float) -> None:
        """Until all others have gone, too: this process may hold the store that they still ask."""
        end = time.monotonic() + seconds
        others = [f"beat/{rank}" for rank in range(self._count) if rank != self.rank]
        try:
            while time.monotonic() < end:
                records = [json.loads(text) for text in self._store.multi_get(others)]
                if all(record["left"] or self._is_gone(record) for record in records):
                    return
                time.sleep(0.05)
        except RuntimeError:
            return  # another one held it

    # ---- what the thread does

    def beat(self) -> None:
        """Write down how this rank is."""
        now = time.monotonic()
        signs = self._signs_of_life()
        if signs[1:] != self._signs[1:] or signs[0] - self._signs[0] > SOME_CPU:
            self._signs, self._got_on = signs, now
        since = self._waiting_since
        self._beats += 1
        record = {
            "beat": self._beats,
            "idle": 0.0 if since else now - self._got_on,
            "waiting": now - since if since else 0.0,
            "left": self._leaving,
            "place": processes.place(),
            "pid": os.getpid(),
        }
        try:
            self._store.set(f"beat/{self.rank}", json.dumps(record))
        except RuntimeError:
            if not self._leaving:
                raise

    def _signs_of_life(self) -> tuple:
        """Seconds of the processor; what was read and written; and what is being waited for by the disk."""
        counters = self._process.io_counters() if hasattr(self._process, "io_counters") else None
        moved = (counters.read_bytes, counters.write_chars) if counters else ()
        asleep = time.monotonic() if self._process.status() == psutil.STATUS_DISK_SLEEP else 0
        return time.process_time(), moved, asleep

    def _watch(self) -> None:
        while not self._stopped.is_set():
            asked = self._asked(BEAT)
            try:
                self.beat()
                found = self._written() or self._judged()
            except RuntimeError:  # the store is gone, and with it who holds it
                found = self._alone()
            if asked and not found:
                found = self._judged_soon() or Failure(None, "", exit_code=asked)
            if found:
                self.failure = found if found.rank is None else self.blame(found)
                self._end(self.failure, bool(asked))
                return

    def _asked(self, seconds: float) -> int:
        """The exit code of a signal that asks to stop, 0 where none has come for so long."""
        if not select.select([self._woken], [], [], seconds)[0]:
            return 0
        numbers = os.read(self._woken, 64)
        return next((code for number, code in STOPS.items() if number in numbers), 0)

    def _judged_soon(self) -> Failure | None:
        """What is wrong with another rank. Whoever started the ranks ends all others when one dies, before
        that is seen here."""
        end = time.monotonic() + 2 * BEAT
        found = None
        while found is None and time.monotonic() < end:
            time.sleep(BEAT / 4)
            try:
                found = self._written() or self._judged()
            except RuntimeError:
                return None
        return found

    def _written(self) -> Failure | None:
        """What another rank has written down."""
        if self._store.check(["failure"]):
            return Failure(**json.loads(self._store.get("failure")))
        return None

    def _judged(self) -> Failure | None:
        """What is wrong with another rank, by what it says of itself."""
        now = time.monotonic()
        others = [rank for rank in range(self._count) if rank != self.rank]
        records = [json.loads(text) for text in self._store.multi_get([f"beat/{rank}" for rank in others])]
        waiting = [now - self._waiting_since if self._waiting_since else 0.0]
        for rank, record in zip(others, records, strict=True):
            if record["left"]:
                continue
            if record["beat"] != self._seen.get(rank, (0, 0.0))[0]:
                self._seen[rank] = record["beat"], now
            if self._is_gone(record):
                return self._missed(rank)
            silent = now - self._seen[rank][1]
            if silent > SILENT and not self._busy(record):
                self._end_process(record)
                return Failure(rank, f"rank {rank} has not been heard of for {silent:.0f} s", gone=True)
            if record["idle"] > STUCK:
                self._end_process(record)
                told = f"rank {rank} hangs: it has done nothing for {record['idle']:.0f} s"
                return Failure(rank, told, gone=True)
            waiting.append(record["waiting"])
        if min(waiting) > STUCK:
            return Failure(None, f"the ranks have been waiting for one another for {min(waiting):.0f} s")
        return None

    def _missed(self, rank: int) -> Failure | None:
        """A rank whose process is gone: it may have said so after its record was read."""
        if json.loads(self._store.get(f"beat/{rank}"))["left"]:
            return None
        return self._written() or Failure(rank, f"rank {rank} died", gone=True)

    @staticmethod
    def _is_near(record: dict[str, Any]) -> bool:
        """Whether its process is seen from here, under the number that it told."""
        return record["place"] == processes.place()

    def _is_gone(self, record: dict[str, Any]) -> bool:
        return self._is_near(record) and not processes.lives(record["pid"])

    def _busy(self, record: dict[str, Any]) -> bool:
        """Whether a process that is seen from here, and says nothing, computes all the same."""
        used = processes.seconds(record["pid"]) if self._is_near(record) else None
        if used is None:
            return False
        before, self._cpu[record["pid"]] = self._cpu.get(record["pid"]), used
        return before is None or used > before

    def _end_process(self, record: dict[str, Any]) -> None:
        if self._is_near(record):
            processes.end(record["pid"])

    def _alone(self) -> Failure:
        keeper = 0 if self.rank else None
        return Failure(keeper, "the process that holds the ranks together died", gone=True)

    def _end(self, failure: Failure, asked: bool) -> None:
        """Let the main thread stop; where it does not, end the process."""
        if failure.rank is not None and not failure.gone and not asked:
            self._stopped.wait(POLITE)
        if not (asked or self.ending or self._stopped.is_set()):
            _thread.interrupt_main()
        if self._stopped.wait(2 * GRACE if self.ending else GRACE):
            return  # the main thread tells it
        if self.is_speaker(failure) and self.may_speak():
            self._say(failure, self.kept)
            self.told()
        os._exit(failure.exit_code)
