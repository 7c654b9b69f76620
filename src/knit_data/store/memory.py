"""Bytes in this process's memory, shared by name; the back end of the tests.

    clock = ManualClock()
    backend = MemoryBackend.named("run-7", clock=clock)     # open_backend("memory://run-7") now shares bytes and clock
    backend.wait(["go"], timeout=1800.0)                    # [False], at once; clock.now() is 1800.0
    backend.faults.append(Fault("create", "segments/*", after=1, error="crash_after"))
    backend.create("segments/0", [b"a"])                    # True
    backend.create("segments/1", [b"b"])                    # made, then raises Crash
    backend.create("segments/2", [b"c"])                    # True

The clock and the faults belong to the name, as the bytes do.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, Protocol

from knit_data.errors import InvalidArgument, KeyMissing, KnitError, ShortRead, UsageError
from knit_data.store.backend import Buffer, Interrupts, Read, check_key, flat

Operation = Literal["create", "read", "put", "get", "delete"]
Failure = Literal["crash_before", "crash_after", "short", "flip"]


class Clock(Protocol):
    """Where time and the waiting for it come from."""

    def now(self) -> float:
        """Monotonic seconds."""
        ...

    def wait(self, condition: threading.Condition, timeout: float) -> None:
        """Waits on a condition whose lock the caller holds, for at most ``timeout`` > 0; may return early."""
        ...


class MonotonicClock:
    """Real time."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, condition: threading.Condition, timeout: float) -> None:
        condition.wait(min(timeout, 1.0))


class ManualClock:
    """Time that passes only when told: by ``advance``, or by a wait, which advances it by its time-out and returns.

    So a test in one thread never sleeps. It is not for a test in which one thread waits for another: the wait is over
    before the other has begun.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._lock = threading.Lock()
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise InvalidArgument(f"a monotonic clock cannot advance by {seconds} seconds")
        with self._lock:
            self._now += seconds

    def wait(self, condition: threading.Condition, timeout: float) -> None:
        del condition  # nobody else makes this time pass
        if not math.isfinite(timeout):
            raise UsageError("a wait without a time-out on a ManualClock: nothing would ever end it")
        self.advance(timeout)


class Crash(BaseException):
    """The process dies here, as far as the code under test can tell: no ``except Exception`` stops it."""


@dataclass(slots=True, eq=False)
class Fault:
    """What goes wrong with the matching calls after the first ``after``, for ``times`` of them; None: for ever.

    Every read of a batch and every key of a delete is a call of its own. ``error``: an exception, raised in place of
    the operation (of a read, a ``KnitError`` is its answer); ``"crash_before"`` or ``"crash_after"`` the operation;
    ``"short"``: a read delivers half and says so; ``"flip"``: a read delivers the lowest bit of its middle byte
    inverted and says nothing. A read of no bytes is never short or flipped.
    """

    op: Operation
    key: str = "*"  # a pattern of fnmatch: * also matches slashes
    after: int = 0
    times: int | None = 1
    error: BaseException | Failure = "crash_before"
    seen: int = field(default=0, init=False)  # matching calls so far

    def __post_init__(self) -> None:
        if self.op not in ("create", "read", "put", "get", "delete"):
            raise InvalidArgument(f"a fault of {self.op!r}: choose create, read, put, get or delete")
        if isinstance(self.error, BaseException):
            return
        if self.error not in ("crash_before", "crash_after", "short", "flip"):
            raise InvalidArgument(f"a fault {self.error!r}: an exception, crash_before, crash_after, short or flip")
        if self.error in ("short", "flip") and self.op != "read":
            raise InvalidArgument(f"only a read can be {self.error!r}, not a {self.op}")

    def strikes(self, op: Operation, key: str) -> bool:
        """Counts the call, if it matches; True if this fault happens to it."""
        if op != self.op or not fnmatchcase(key, self.key):
            return False
        self.seen += 1
        return self.seen > self.after and (self.times is None or self.seen <= self.after + self.times)


class _Space:
    """What all back ends of one name share."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.faults: list[Fault] = []
        self.changed = threading.Condition()  # its lock guards all the rest
        self.values: dict[str, bytes] = {}
        self.folders: set[str] = set()

    def strike(self, op: Operation, key: str) -> BaseException | Failure | None:
        """Counts the call with every fault; the first that happens is the one."""
        errors = [fault.error for fault in list(self.faults) if fault.strikes(op, key)]
        return errors[0] if errors else None

    def store(self, key: str, value: bytes) -> None:
        """As in a file system, a key is never the folder of another."""
        parts = key.split("/")
        above = {"/".join(parts[:i]) for i in range(1, len(parts))}
        if key in self.folders or not above.isdisjoint(self.values):
            raise InvalidArgument(f"{key!r} is a folder of other keys, or lies in an object: a key is never a folder")
        self.folders |= above
        self.values[key] = value
        self.changed.notify_all()


class MemoryBackend:
    """A back end of memory: private, or shared with all others of the same name in this process, for its life.

    ``faults`` is the list of what is to go wrong, shared in the same way; tests append to it and clear it.
    """

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._space = _Space(clock or MonotonicClock())
        self._interrupts = Interrupts()

    @classmethod
    def named(cls, name: str, *, clock: Clock | None = None) -> MemoryBackend:
        """The back end of ``memory://name``; without a name a fresh private one. The first one sets the clock."""
        backend = cls(clock=clock)
        if name:
            with _SPACES_LOCK:
                backend._space = _SPACES.setdefault(check_key(name), backend._space)
        if clock is not None and backend._space.clock is not clock:
            raise InvalidArgument(f"memory://{name} has another clock: give the clock where it is first opened")
        return backend

    @property
    def clock(self) -> Clock:
        return self._space.clock

    @property
    def faults(self) -> list[Fault]:
        return self._space.faults

    def create(self, key: str, parts: Sequence[Buffer]) -> bool:
        check_key(key)
        value = b"".join(flat(parts))
        with self._call("create", key):
            if key in self._space.values:
                return False
            self._space.store(key, value)
            return True

    def read_into(self, reads: Sequence[Read]) -> list[KnitError | None]:
        for read in reads:
            check_key(read.key)
        return [self._read(read) for read in reads]

    def files(self, keys: Sequence[str]) -> AbstractContextManager[None]:
        del keys  # bytes objects, which reads copy from once
        return nullcontext()

    def wait(self, keys: Sequence[str], timeout: float) -> list[bool]:
        for key in keys:
            check_key(key)
        space, clock = self._space, self._space.clock
        with space.changed:
            deadline = clock.now() + timeout
            while True:
                found = [key in space.values for key in keys]
                left = deadline - clock.now()
                if any(found) or left <= 0 or self._interrupts.take():
                    return found
                clock.wait(space.changed, left)

    def interrupt(self) -> None:
        with self._space.changed:
            self._interrupts.send()
            self._space.changed.notify_all()

    def put(self, key: str, value: bytes) -> None:
        check_key(key)
        with self._call("put", key):
            self._space.store(key, bytes(value))

    def get(self, key: str) -> bytes | None:
        check_key(key)
        with self._call("get", key):
            return self._space.values.get(key)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        for key in keys:
            with self._call("delete", key):
                self._space.values.pop(key, None)

    def now(self) -> float:
        return self._space.clock.now()

    def close(self) -> None:
        self.interrupt()

    @contextmanager
    def _call(self, op: Operation, key: str) -> Iterator[Failure | None]:
        """One operation under the lock, with what is to go wrong before or after it."""
        with self._space.changed:
            error = self._space.strike(op, key)
            if isinstance(error, BaseException):
                raise error
            if error == "crash_before":
                raise Crash(f"before {op} of {key!r}")
            yield error
            if error == "crash_after":
                raise Crash(f"after {op} of {key!r}")

    def _read(self, read: Read) -> KnitError | None:
        try:
            with self._call("read", read.key) as error:
                value, wanted = self._space.values.get(read.key), len(read.out)
                if value is None:
                    return KeyMissing(f"{read.key!r} does not exist: never written, or already deleted")
                end = read.start + (wanted // 2 if error == "short" else wanted)
                found = memoryview(value)[read.start : end]
                read.out[: len(found)] = found
                if error == "flip" and found:
                    read.out[len(found) // 2] ^= 1
                if len(found) == wanted:
                    return None
                text = f"{read.key!r}: asked for {wanted:,} bytes at {read.start:,}, found {len(found):,}"
                return ShortRead(text, found=len(found))
        except KnitError as problem:
            return problem


_SPACES: dict[str, _Space] = {}
_SPACES_LOCK = threading.Lock()
