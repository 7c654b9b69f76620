"""What the store asks of the place that holds its bytes: one small protocol, one back end a file.

    backend = open_backend("/shared/run-7")                 # or file:///shared/run-7, memory://run-7
    backend.create("segments/w0/0.safetensors", [header, columns])           # True: made here; False: it existed
    backend.wait(["segments/w0/1.safetensors", "writers/1"], timeout=1.0)    # [False, True]
    backend.read_into([Read("segments/w0/0.safetensors", 128, arena[0:4096])])    # [None]: 4,096 bytes, in place

A key is relative, slash-separated, of ``A-Z a-z 0-9 . _ -``. Objects and registers share one name space, and a key is
never the folder of another: with ``writers/0`` there is no ``writers/0/end``. An object never changes, and the name of
a deleted one is not used again.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from knit_data.errors import InvalidArgument, KnitError
from knit_data.infos import Array

Buffer = bytes | bytearray | memoryview

_KEY = re.compile(r"[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*")
_KEY_BYTES = 1024  # the limit of S3 object names
_PART_BYTES = 255  # NAME_MAX of every usual file system
_LARGEST_START = 2**62  # what fits a file offset with room to spare; more can only be a misread number


@dataclass(frozen=True, slots=True)
class Read:
    """``len(out)`` bytes of an object, from ``start``, into ``out``. A read of no bytes asks whether the key exists."""

    key: str
    start: int
    out: memoryview  # [n] of format "B", contiguous, writable

    def __post_init__(self) -> None:
        out = self.out
        if not 0 <= self.start <= _LARGEST_START:
            raise InvalidArgument(f"a read of {self.key!r} starts at {self.start}: give an offset from 0 to 2**62")
        if out.readonly or out.format != "B" or out.ndim != 1 or not out.c_contiguous:
            raise InvalidArgument(
                f"a read of {self.key!r} needs a writable, contiguous memoryview of bytes, not format {out.format!r}, "
                f"{out.ndim} dimensions, readonly={out.readonly}: use memoryview(buffer).cast('B')"
            )


class Backend(Protocol):
    """Bytes by name. Every method may be called from any thread; open one after a fork, not before.

    All methods raise ``InvalidArgument`` for a malformed key, and ``Unreachable`` when the storage fails.
    """

    def create(self, key: str, parts: Sequence[Buffer]) -> bool:
        """Makes an object of the parts, end to end. True: this call made it; False: it existed and is unchanged.

        All or nothing: the object is complete from the moment it is visible, and a call that is killed leaves all of it
        or nothing. Readable by everyone once True is returned. After ``Unreachable`` call again: where only the answer
        was lost, the second call says False.
        """
        ...

    def read_into(self, reads: Sequence[Read]) -> list[KnitError | None]:
        """Fills the memory of each read, exactly. One answer per read, None or what went wrong; nothing is raised.

        ``KeyMissing``; ``ShortRead``, whose first ``found`` bytes of ``out`` are valid; ``Unreachable``. Of any other
        failed read the contents of ``out`` are undefined.
        """
        ...

    def files(self, keys: Sequence[str]) -> AbstractContextManager[Array | None]:
        """Descriptors of these objects, open for reading while inside, where objects are files: int64 [keys].

        -1: this one cannot be opened; ``read_into`` says why. None: objects are no files here.
        """
        ...

    def wait(self, keys: Sequence[str], timeout: float) -> list[bool]:
        """Which keys exist now. Returns as soon as any does, at the timeout, or after ``interrupt``.

        ``timeout <= 0`` looks once. A key made while the call is under way is never overlooked. It may return early
        without a reason, so call it in a loop; it sleeps for at most one second at a time.
        """
        ...

    def interrupt(self) -> None:
        """Makes waits return: in every thread the one in progress, or else its next one that would have to sleep.

        So a thread that tests a flag and then waits cannot miss ``flag = True; backend.interrupt()``, wherever it is
        between the two. Only waits of this back end object are affected. Safe in a signal handler.
        """
        ...

    def put(self, key: str, value: bytes) -> None:
        """Sets a small register. The last writer wins; a reader sees one value or the other, never a mix."""
        ...

    def get(self, key: str) -> bytes | None:
        """The whole register, or object; None if there is none."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Removes what is there of these; what is not there is no error."""
        ...

    def now(self) -> float:
        """Seconds of the monotonic clock that time-outs are measured with."""
        ...

    def close(self) -> None:
        """Ends waits and gives up files and connections. What was stored stays. Not to be used afterwards."""
        ...


class Interrupts:
    """Who has still to hear of an interrupt. Each thread hears of any number of earlier ones once.

    The back end calls both methods under the lock that its waits sleep on, so that none is missed.
    """

    def __init__(self) -> None:
        self._sent = 0
        self._heard = threading.local()

    def send(self) -> None:
        self._sent += 1

    def take(self) -> bool:
        """True if this thread has not yet heard of the latest."""
        if getattr(self._heard, "count", 0) == self._sent:
            return False
        self._heard.count = self._sent
        return True


@functools.lru_cache(maxsize=4096)
def check_key(key: str) -> str:
    """The key itself, if it is well formed."""
    if not isinstance(key, str) or not _KEY.fullmatch(key) or len(key) > _KEY_BYTES:
        raise InvalidArgument(
            f"{key!r} is not a key: relative, slash-separated parts of A-Z a-z 0-9 . _ -, at most {_KEY_BYTES} long"
        )
    for part in key.split("/"):
        if part in (".", "..") or len(part) > _PART_BYTES:
            raise InvalidArgument(
                f"{key!r} is not a key: the part {part!r} is a relative step, or longer than {_PART_BYTES}"
            )
    return key


def flat(parts: Sequence[Buffer]) -> list[memoryview]:
    """The parts as views of plain bytes, the empty ones left out."""
    views = [memoryview(part) for part in parts]
    for view in views:
        if not view.c_contiguous:
            raise InvalidArgument(f"a part of shape {view.shape} and strides {view.strides} is not contiguous: copy it")
    return [view.cast("B") for view in views if view.nbytes]
