"""Threads for small work that nobody waits for, beside the one that reads ahead (``prefetch``)."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Ticker:
    """Calls a method every so many seconds from a thread of its own: until it returns False, its object is gone, or
    ``stop``, after which the thread has ended."""

    def __init__(self, method: Callable[[], bool], seconds: float, name: str) -> None:
        self._over = threading.Event()
        work = (weakref.WeakMethod(method), self._over, seconds)
        self._thread = threading.Thread(target=_tick, args=work, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=30.0)


def _tick(method: weakref.WeakMethod[Callable[[], bool]], over: threading.Event, seconds: float) -> None:
    while not over.wait(seconds):
        call = method()
        if call is None or not call():
            return
        del call  # while it waits it keeps nothing alive


class Latest(Generic[T]):
    """Calls a function with the newest of the values it is given, in a thread of its own.

    Given 1, 2 and 3 while it is called with 0: one more call, with 3. What it raises is raised by the next ``give``.
    Once closed, or where no thread can be had, ``give`` calls it itself.
    """

    def __init__(self, call: Callable[[T], None], name: str) -> None:
        self._call, self._name = call, name
        self._newest, self._errors = deque[T](maxlen=1), deque[BaseException](maxlen=1)
        self._turns = SimpleQueue[bool]()  # its put may be interrupted by a collected loader's close, which puts too
        self._thread: threading.Thread | None = None
        self._over = False

    def give(self, value: T) -> None:
        if self._thread is None and not self._over:
            work = (self._turns, self._newest, self._call, self._errors)
            thread = threading.Thread(target=_work, args=work, name=self._name, daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError:
                self._over = True
        if self._over:
            self._call(value)
            return
        self._newest.append(value)
        self._turns.put(True)
        if self._errors:
            raise self._errors.pop()

    def close(self) -> None:
        """Returns when nothing given is left to do, after 30 s at most; idempotent, from any thread."""
        self._over = True
        self._turns.put(False)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=30.0)


def _work(turns: SimpleQueue[bool], newest: deque[T], call: Callable[[T], None], errors: deque[BaseException]) -> None:
    going = True
    while going:
        going = turns.get()
        while newest:
            try:
                call(newest.pop())
            except BaseException as e:
                errors.append(e)
