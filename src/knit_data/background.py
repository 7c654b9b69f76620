"""Threads for small work that nobody waits for, beside the one that reads ahead (``prefetch``)."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
    Once closed, or while the interpreter leaves, ``give`` calls it itself.
    """

    def __init__(self, call: Callable[[T], None], name: str) -> None:
        self._call, self._pool = call, ThreadPoolExecutor(1, name)
        self._newest: deque[T] = deque(maxlen=1)
        self._error: Exception | None = None

    def give(self, value: T) -> None:
        error, self._error = self._error, None
        self._newest.append(value)
        try:
            self._pool.submit(self._work)
        except RuntimeError:  # there are no threads any more
            self._call(self._newest.pop())
        if error is not None:
            raise error

    def close(self) -> None:
        """Returns when nothing given is left to do; idempotent, from any thread."""
        with suppress(RuntimeError):  # its own thread may be the one that collects what held it
            self._pool.shutdown()

    def _work(self) -> None:
        try:
            while self._newest:
                self._call(self._newest.pop())
        except Exception as e:
            self._error = e
