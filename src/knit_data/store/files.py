"""Files open for reading, and looking for them on file systems that remember what was not there."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)  # ESTALE: deleted on another host while open here
FULL = (errno.EMFILE, errno.ENFILE)  # no more descriptors, in this process or on this host
_LOOKS = 16  # one in so many reads looks for files that were deleted


@dataclass(slots=True, eq=False)
class _File:
    fd: int
    users: int = 1
    kept: bool = True


class OpenFiles:
    """Files open for reading, the least recently used closed first; one in use is closed by its last user.

    A deleted file would keep its space while it is open: it is closed when asked for, when another is opened and it is
    the least recently used, and after some of the reads.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reads = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _File] = OrderedDict()

    @contextmanager
    def use(self, path: str) -> Iterator[int]:
        file = self._take(path)
        try:
            yield file.fd
        finally:
            self._release([file])

    @contextmanager
    def use_all(self, paths: Iterable[str]) -> Iterator[list[int]]:
        """-1 for one that cannot be opened."""
        files = list[_File]()
        try:
            fds = []
            for path in paths:
                try:
                    files.append(self._take(path))
                    fds.append(files[-1].fd)
                except OSError:
                    fds.append(-1)
            yield fds
        finally:
            self._release(files)
            self._reads += 1
            if self._reads % _LOOKS == 0:
                self._let_go()

    def _let_go(self) -> None:
        """Files that were deleted, perhaps by another process, keep their space no longer."""
        with self._lock:
            for path in [path for path, file in self._kept.items() if _deleted(file.fd)]:
                self._drop(path)

    def forget(self, path: str) -> None:
        with self._lock:
            self._drop(path)

    def close(self) -> None:
        """Closes what nobody uses, and the rest after use."""
        with self._lock:
            for path in list(self._kept):
                self._drop(path)

    def __del__(self) -> None:
        """Of a store that nobody closed."""
        for file in self._kept.values():
            os.close(file.fd)

    def _release(self, files: Iterable[_File]) -> None:
        with self._lock:
            for file in files:
                file.users -= 1
                if not file.users and not file.kept:
                    os.close(file.fd)

    def _take(self, path: str) -> _File:
        with self._lock:
            file = self._kept.get(path)
            if file is not None and not _deleted(file.fd):
                self._kept.move_to_end(path)
                file.users += 1
                return file
            while self._kept and _deleted(next(iter(self._kept.values())).fd):
                self._drop(next(iter(self._kept)))
        try:
            fd = open_fresh(path)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self.close()  # those that nobody uses right now
            fd = open_fresh(path)
        file = _File(fd)
        with self._lock:
            self._drop(path)  # another thread opened it too
            self._kept[path] = file
            while len(self._kept) > self._limit:
                self._drop(next(iter(self._kept)))
        return file

    def _drop(self, path: str) -> None:
        file = self._kept.pop(path, None)
        if file is not None:
            file.kept = False
            if not file.users:
                os.close(file.fd)


def open_file(path: str) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would have it wait for a writer
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise FileNotFoundError(errno.ENOENT, "a folder, not an object", path)
    raise OSError(errno.EINVAL, "not a regular file", path)


def open_fresh(path: str) -> int:
    """Opens a file that another host may have made since it was last looked for."""
    try:
        return open_file(path)
    except FileNotFoundError:
        refresh(folders_of("/", [path]))
        return open_file(path)


def exists(path: str) -> bool:
    try:
        os.close(open_file(path))  # unlike stat, open asks the server of a network file system
    except OSError as error:
        if error.errno in GONE:
            return False
        raise
    return True


def _deleted(fd: int) -> bool:
    try:
        return os.fstat(fd).st_nlink == 0
    except OSError:
        return True


def folders_of(root: str, paths: Sequence[str]) -> list[str]:
    """The folders of these files, from the root down, each after the one it lies in."""
    found = {root}
    for path in paths:
        folder = os.path.dirname(path)
        while folder not in found:
            found.add(folder)
            folder = os.path.dirname(folder)
    return sorted(found)


def refresh(folders: Sequence[str]) -> None:
    """Opens the folders, so that a network file system forgets which names it did not find there."""
    for folder in folders:
        with suppress(OSError):  # what is wrong with it the look itself will say
            os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
