"""Objects of a bucket, through fsspec: ``s3://``, ``gs://``, ``az://``; and what can only be read, such as ``https://``.

A request costs tens of milliseconds whatever its size, so reads of one object that lie together become one range, and
all ranges of a call are under way at once:

    reads [0, 100) [100, 300) [200 KiB, 300 KiB) [20 MiB, 40 MiB)    one object, in any order
    asked [0, 300 KiB) [20, 28 MiB) [28, 36 MiB) [36, 40 MiB)        four requests, 200 KiB in vain

Nothing is ever listed, no cache of names is believed, and nothing is pickled. An object store has no folders: that no
key is the folder of another is left to the caller here.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import fsspec
from fsspec.asyn import sync

from knit_data.errors import InvalidArgument, KeyMissing, KnitError, ShortRead, Unreachable
from knit_data.store.backend import Buffer, Interrupts, Read, check_key, flat

_GAP = 256 * 1024  # skipping this much takes as long as a small part of one more request
_LARGEST = 8 << 20  # of one request: longer ranges are faster in parallel
_FIRST_POLL, _POLL_GROWTH, _LAST_POLL = 0.02, 1.5, 1.0  # seconds; every look at every key is a request that is billed
_WAITS = 64  # whose pace is remembered
_CONFLICTS = 8  # tries of a create while others create the same key
# Whose server puts under the condition that there is nothing yet, and how to ask for it. fsspec's other file systems
# look first and then write: of two writers both would win.
_NEW: dict[str, Any] = {"mode": "create"}
_ONLY_NEW = {"s3": _NEW, "s3a": _NEW, "gs": _NEW, "gcs": _NEW}
_ONLY_NEW |= {"az": {"overwrite": False}, "abfs": {"overwrite": False}, "abfss": {"overwrite": False}}
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
_EXISTS, _CONFLICT, _FORBIDDEN, _MISSING, _PAST_END = 412, 409, 403, 404, 416  # HTTP's own numbers


@dataclass(slots=True)
class Request:
    """One range of one object, and which bytes of which reads it serves."""

    key: str
    start: int
    end: int  # start == end: whether there is such an object
    pieces: list[tuple[int, int, int]] = field(default_factory=list)  # index of the read, first byte, byte after last


def coalesce(reads: Sequence[Read], gap: int = _GAP, largest: int = _LARGEST) -> list[Request]:
    """The fewest ranges in order that serve all reads, none longer than ``largest`` bytes, none with a hole of more
    than ``gap`` bytes that nobody asked for. Longer reads are cut."""
    pieces = []
    for i, read in enumerate(reads):
        end = read.start + len(read.out)
        pieces += [(read.key, at, min(at + largest, end), i) for at in range(read.start, end, largest)]
    requests: list[Request] = []
    for key, start, end, i in sorted(pieces):
        last = requests[-1] if requests else None
        if last is None or last.key != key or start - last.end > gap or max(end, last.end) - last.start > largest:
            last = Request(key, start, end)
            requests.append(last)
        last.end = max(last.end, end)
        last.pieces.append((i, start, end))
    by_key = {request.key: request for request in requests}
    for i, read in enumerate(reads):
        if not len(read.out):  # whether there is such an object: any request of it tells
            if read.key not in by_key:
                by_key[read.key] = Request(read.key, 0, 0)
                requests.append(by_key[read.key])
            by_key[read.key].pieces.append((i, 0, 0))
    return requests


@dataclass(frozen=True, slots=True)
class _Opened:
    """A file system of fsspec, as one process has it."""

    process: int
    fs: Any
    root: str
    turn: AbstractContextManager[Any]  # held during a call: only the asynchronous ones are made for several threads
    obstacle: str | None  # to writing


class ObjectBackend:
    """A back end of any fsspec URL; ``storage_options`` are those of its file system.

    Only where the server itself makes an object under the condition that there is none (S3, Google Cloud Storage,
    Azure) can a store be written; elsewhere ``create``, ``put`` and ``delete`` raise ``InvalidArgument``.
    """

    def __init__(self, url: str, **storage_options: Any) -> None:
        self._url, self._options = url.rstrip("/"), storage_options
        self._scheme = url.split(":")[0].lower()
        self._interrupts = Interrupts()
        self._wake = threading.Condition()
        self._steps: dict[tuple[str, ...], float] = {}  # of waits that found nothing, by their keys
        self._opened: _Opened | None = self._open()

    def create(self, key: str, parts: Sequence[Buffer]) -> bool:
        path, body = self._writable(key), b"".join(flat(parts))
        for attempt in range(_CONFLICTS):
            answer = self._ask("pipe_file", path, body, **_ONLY_NEW[self._scheme])
            if not isinstance(answer, Exception):
                return True
            if _status(answer) == _EXISTS:
                return False
            if _status(answer) != _CONFLICT:
                break
            time.sleep(min(_FIRST_POLL * 2**attempt, _LAST_POLL))
        raise self._unreachable(f"create {key} ({len(body):,} bytes)", answer) from answer

    def read_into(self, reads: Sequence[Read]) -> list[KnitError | None]:
        for read in reads:
            check_key(read.key)
        failed: dict[int, KnitError] = {}  # the first failure of each read, in the order of its bytes
        requests = coalesce(reads)
        for request, answer in zip(requests, self._ranges(requests), strict=True):
            for i, start, end in request.pieces:
                if i not in failed and (problem := self._serve(reads[i], start, end, request, answer)) is not None:
                    failed[i] = problem
        return [failed.get(i) for i in range(len(reads))]

    def files(self, keys: Sequence[str]) -> AbstractContextManager[None]:
        del keys  # objects, read by request
        return nullcontext()

    def wait(self, keys: Sequence[str], timeout: float) -> list[bool]:
        looks = [Request(check_key(key), 0, 0) for key in keys]
        deadline, asked = self.now() + timeout, tuple(keys)
        step = self._steps.get(asked, _FIRST_POLL)
        while True:
            found = []
            for key, answer in zip(keys, self._ranges(looks), strict=True):
                found.append(not isinstance(answer, Exception))
                if isinstance(answer, Exception) and _status(answer) != _MISSING:
                    raise self._unreachable(f"look for {key}", answer) from answer
            left = deadline - self.now()
            with self._wake:
                if any(found):
                    self._steps.pop(asked, None)
                    return found
                if left <= 0 or self._interrupts.take():
                    return found
                self._wake.wait(min(step, left))
                step = min(step * _POLL_GROWTH, _LAST_POLL)
                self._steps[asked] = step  # the caller's next wait for the same goes on from there
                if len(self._steps) > _WAITS:
                    del self._steps[next(iter(self._steps))]

    def interrupt(self) -> None:
        with self._wake:
            self._interrupts.send()
            self._wake.notify_all()

    def put(self, key: str, value: bytes) -> None:
        answer = self._ask("pipe_file", self._writable(key), bytes(value))
        if isinstance(answer, Exception):
            raise self._unreachable(f"put {key} ({len(value):,} bytes)", answer) from answer

    def get(self, key: str) -> bytes | None:
        # as a range: asked for the whole, s3fs first asks for the size
        answer = self._ask("cat_file", self._path(key), start=0, end=None)
        if not isinstance(answer, Exception):
            return bytes(answer)
        if _status(answer) in (_MISSING, _PAST_END):
            return None if _status(answer) == _MISSING else b""
        raise self._unreachable(f"get {key}", answer) from answer

    def delete(self, keys: Sequence[str]) -> None:
        for key, answer in zip(keys, self._removed([self._writable(key) for key in keys]), strict=True):
            if isinstance(answer, Exception) and _status(answer) != _MISSING:
                raise self._unreachable(f"delete {key}", answer) from answer

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        self.interrupt()
        self._opened = None  # fsspec closes the connections of a file system that nobody holds

    # -- inside -------------------------------------------------------------------------------------------------------

    def _files(self) -> _Opened:
        """The file system. fsspec's do not survive a fork: each process opens its own, and shares it with nobody."""
        opened = self._opened
        if opened is None or opened.process != os.getpid():
            opened = self._opened = self._open()
        return opened

    def _open(self) -> _Opened:
        if "::" in self._url:
            raise InvalidArgument(f"{self._url!r}: a chain of file systems may answer from a copy; give the last alone")
        try:
            fs, root = fsspec.url_to_fs(self._url, skip_instance_cache=True, **self._options)
        except ImportError as error:
            extra = _EXTRAS.get(self._scheme)
            remedy = f"pip install 'knit_data[{extra}]'" if extra else str(error)
            raise InvalidArgument(f"{self._url!r} needs a package that is not installed: {remedy}") from error
        except (TypeError, ValueError) as error:
            given = ", ".join(sorted(self._options)) or "none"
            raise InvalidArgument(f"{self._url!r} cannot be opened: {error}; storage options given: {given}") from error
        except Exception as error:
            raise self._unreachable("open it", error) from error
        if fs.asynchronous if fs.async_impl else False:
            raise InvalidArgument(f"{self._url!r}: the storage option asynchronous=True does not go with a store")
        turn = nullcontext() if fs.async_impl else threading.Lock()
        return _Opened(os.getpid(), fs, root.rstrip("/"), turn, self._obstacle(fs))

    def _obstacle(self, fs: Any) -> str | None:
        """Why this file system cannot be trusted to make an object only if there is none; None: it can."""
        if self._scheme not in _ONLY_NEW:
            return "a store there can only be read. Write to s3:, gs: or az:, or to a mounted path"
        known = inspect.signature(getattr(fs, "_pipe_file", fs.pipe_file)).parameters
        if not known.keys() >= _ONLY_NEW[self._scheme].keys():  # then it overwrites, and says nothing
            return f"this {type(fs).__name__} is too old for it: pip install -U 'knit_data[{_EXTRAS[self._scheme]}]'"
        return None

    def _path(self, key: str) -> str:
        return f"{self._files().root}/{check_key(key)}"

    def _writable(self, key: str) -> str:
        path, obstacle = self._path(key), self._files().obstacle
        if obstacle:
            raise InvalidArgument(
                f"{self._url}: {key!r} was to be written, and {self._scheme}: is not known to make an object only if "
                f"there is none: {obstacle}"
            )
        return path

    def _ask(self, method: str, *args: Any, **options: Any) -> Any:
        """What the file system returns, or the exception."""
        opened = self._files()
        try:
            with opened.turn:
                return getattr(opened.fs, method)(*args, **options)
        except Exception as error:
            return error

    def _removed(self, paths: Sequence[str]) -> list[Any]:
        """What the file system answers for each, or the exception; all are asked for at once."""
        fs = self._files().fs
        if not fs.async_impl:
            return [self._ask("rm_file", path) for path in paths]

        async def remove() -> list[Any]:  # not fs.rm: some list first, and s3fs's forgets what the server refused
            return await asyncio.gather(*map(fs._rm_file, paths), return_exceptions=True)

        return list(sync(fs.loop, remove))

    def _ranges(self, requests: Sequence[Request]) -> list[Any]:
        """The bytes of each range, clipped at the end of the object, or the exception; all are asked for at once."""
        if not requests:
            return []
        paths = [self._path(request.key) for request in requests]
        starts = [request.start for request in requests]
        ends = [max(request.end, request.start + 1) for request in requests]
        self._ask("invalidate_cache")  # some take the size from a listing
        answers = self._ask("cat_ranges", paths, starts, ends, on_error="return")
        if isinstance(answers, Exception):
            answers = [answers] * len(requests)
        return [b"" if _status(answer) == _PAST_END else answer for answer in answers]

    def _serve(self, read: Read, start: int, end: int, request: Request, answer: Any) -> KnitError | None:
        """Copies these bytes of the object to where the read wants them."""
        what = f"read {read.key} ({len(read.out):,} bytes at {read.start:,})"
        if isinstance(answer, Exception):
            problem: KnitError = self._unreachable(what, answer)
            if _status(answer) == _MISSING:
                problem = KeyMissing(f"{self._url}: {what}: no such object: never written, or already reclaimed")
            problem.__cause__ = answer
            return problem
        if start == end:
            return None
        if len(answer) > request.end - request.start:
            return Unreachable(
                f"{self._url}: could not {what}: asked for {request.end - request.start:,} bytes, the server sent "
                f"{len(answer):,}: it does not serve ranges; use one that does"
            )
        found, at = memoryview(answer)[start - request.start : end - request.start], start - read.start
        read.out[at : at + len(found)] = found
        if len(found) == end - start:
            return None
        return ShortRead(f"{self._url}: {what}: found only {at + len(found):,}", found=at + len(found))

    def _unreachable(self, action: str, error: Exception) -> Unreachable:
        hint = ""
        if _status(error) == _FORBIDDEN:
            hint = "; credentials that may not list the bucket get this for a missing object too (s3:ListBucket)"
        return Unreachable(f"{self._url}: could not {action}: {str(error) or repr(error)}{hint}")


def _status(error: Any) -> int:
    """The answer of the server as a status of HTTP, wherever its library keeps it; 0: not known, or no error."""
    while isinstance(error, BaseException):
        if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
            return _MISSING
        if isinstance(error, FileExistsError):
            return _EXISTS
        if isinstance(error, PermissionError):
            return _FORBIDDEN
        response = getattr(error, "response", None)  # botocore's is a dict
        if isinstance(response, dict):
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        for name in ("status", "status_code", "code"):  # of aiohttp, Azure and Google
            if isinstance(code := getattr(error, name, None), int):
                return code
        error = error.__cause__
    return 0
