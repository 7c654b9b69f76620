"""Threads that work beside: when they end, and what of what they are given is done."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

import pytest

from knit_data.background import Latest, Ticker

HANG = 120.0  # seconds; reached only by a test that fails


class Bell:
    """Rings so many times."""

    def __init__(self, times: int) -> None:
        self.left, self.rung = times, threading.Event()
        self.ticker = Ticker(self.ring, 0.001, "knit-bell")  # last: it may ring at once

    def ring(self) -> bool:
        self.left -= 1
        self.rung.set()
        return self.left > 0


def test_a_ticker_ends_when_it_is_told_to_when_its_object_goes_and_on_stop() -> None:
    def ringing() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "knit-bell"]

    told = Bell(3)
    for thread in ringing():
        thread.join(60)
    assert (told.left, ringing()) == (0, [])
    stopped = Bell(1 << 30)
    assert stopped.rung.wait(60)
    stopped.ticker.stop()
    assert not ringing()
    gone = Bell(1 << 30)
    (thread,) = ringing()
    del gone
    thread.join(60)
    assert not thread.is_alive()


class Slow:
    """Takes note of what it is called with, and holds each call until it is let go."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.latest = Latest(self.call, "knit-slow")

    def call(self, value: int) -> None:
        self.calls.append(value)
        self.begun.release()
        assert self.go.acquire(timeout=HANG)
        if value < 0:
            raise ValueError(value)


def test_the_newest_wins_and_close_waits_for_it() -> None:
    slow = Slow()
    slow.latest.give(0)
    assert slow.begun.acquire(timeout=HANG)
    for value in (1, 2, 3):
        slow.latest.give(value)
    assert slow.calls == [0]
    slow.go.release(2)
    slow.latest.close()
    assert slow.calls == [0, 3]
    assert not [t for t in threading.enumerate() if t.name.startswith("knit-slow")]
    slow.go.release()
    slow.latest.give(4)
    slow.latest.close()
    assert slow.calls == [0, 3, 4], "once closed it is called at once"


def test_an_error_is_raised_by_the_next_one_given_once_and_stops_nothing() -> None:
    slow, failed = Slow(), threading.Event()

    class Noted(deque[BaseException]):
        def append(self, error: BaseException) -> None:
            super().append(error)
            failed.set()

    slow.latest._errors = Noted(maxlen=1)
    slow.go.release(3)
    slow.latest.give(-1)
    assert failed.wait(HANG)
    with pytest.raises(ValueError, match="-1"):
        slow.latest.give(1)
    slow.latest.give(2)
    slow.latest.close()
    assert slow.calls[0] == -1 and slow.calls[-1] == 2


def test_what_was_given_is_done_before_the_interpreter_leaves_and_after_its_threads_are_gone() -> None:
    code = (
        "import atexit\nfrom knit_data.background import Latest\n"
        "latest = Latest(lambda value: print(value, flush=True), 'knit-last')\n"
        "atexit.register(lambda: (latest.give('last'), latest.close()))\nlatest.give('first')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=HANG,
        env={"PYTHONPATH": str(Path(__file__).parents[1] / "src")},
    )
    assert (done.returncode, done.stdout.splitlines()[-1], done.stderr) == (0, "last", "")  # the newest, at least


def test_a_close_from_a_finalizer_in_the_middle_of_a_give_waits_for_nothing() -> None:
    """As when the garbage collector meets a forgotten loader there."""
    slow = Slow()

    class Turns:
        def __init__(self, inner: object) -> None:
            self.inner = inner

        def put(self, value: bool) -> None:
            if value:
                slow.latest._thread, thread = None, slow.latest._thread
                slow.latest.close()
                slow.latest._thread = thread
            self.inner.put(value)  # type: ignore[attr-defined]

    inner = slow.latest._turns
    slow.go.release(2)
    slow.latest.give(0)
    assert slow.begun.acquire(timeout=HANG)
    slow.latest._turns = Turns(inner)  # type: ignore[assignment]
    slow.latest.give(1)
    slow.latest.close()
    assert slow.calls == [0, 1]
