"""Files under one folder: a local disk, or a file system that several hosts mount.

An object has no name before it is complete: it is written to an unnamed file and then linked, which fails if the name
is taken (a rename would overwrite). Where the file system or /proc refuses that, to a file named ``~…``, which is no
key; a process killed in the middle of such a write leaves that file behind, and nothing else.

On NFS a failed lookup is remembered for up to a minute, unless the folder is found to have changed when it is opened:
so every look opens the folders first, 5 us each.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import ParamSpec, TypeVar

import numpy as np

from knit_data.errors import InvalidArgument, KeyMissing, KnitError, ShortRead, Unreachable
from knit_data.infos import Array
from knit_data.store.backend import Buffer, Interrupts, Read, check_key, flat
from knit_data.store.files import FULL, GONE, OpenFiles, exists, folders_of, open_file, refresh

_LIMIT = os.sysconf("SC_OPEN_MAX")  # of this process's descriptors; -1: none
_AT_ONCE = min(256, _LIMIT // 4) if _LIMIT > 0 else 256  # files one read may hold; the rest it reads one by one
_OPEN_FILES = 64  # kept open between reads; far below the usual limit of 1,024 a process
_FIRST_POLL, _POLL_GROWTH, _LAST_POLL = 0.002, 1.5, 0.05  # seconds; at the slowest 64 writers cost 1 % of a core
_IOV_MAX = max(os.sysconf("SC_IOV_MAX"), 16)  # -1: no limit known; POSIX promises 16
P = ParamSpec("P")
T = TypeVar("T")

_REMEDIES = {
    errno.ENOSPC: "free space, then repeat it",
    errno.EDQUOT: "free space or raise the quota, then repeat it",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f), then repeat it",
    errno.EACCES: "give this user the right to it",
    errno.EPERM: "give this user the right to it",
    errno.EROFS: "mount it writable",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "too many files are open on this host",
    errno.ENOTDIR: "a file stands where a folder should be: move it away",
    errno.EISDIR: "a folder stands where a file should be: move it away",
    errno.ENAMETOOLONG: "choose a shorter folder",
}


class LocalBackend:
    """A back end of files. ``fsync=True``: what was created or put also survives a power cut.

    A file that another process deletes is missing here from then on, even if it is still open. Deletes are not synced:
    a power cut may bring a deleted object back.
    """

    def __init__(self, root: str | os.PathLike[str], fsync: bool = False) -> None:
        self._root = os.path.abspath(root)
        self._fsync = fsync
        self._synced: set[str] = set()  # folders whose names this back end has made durable
        self._files = OpenFiles(_OPEN_FILES)
        self._interrupts = Interrupts()
        self._wake = threading.Condition()

    def create(self, key: str, parts: Sequence[Buffer]) -> bool:
        path, views = self._path(key), flat(parts)
        folder = os.path.dirname(path)
        with _storage(f"create {path} ({sum(map(len, views)):,} bytes); nothing of it is visible"):
            self._with_room(self._prepare, folder)
            made = not self._taken(path)
            if made:
                linked = self._link_unnamed(path, views)
                made = self._with_room(self._link_named, path, views) if linked is None else linked
        if self._fsync:
            with _storage(f"sync {path}, which is visible; create it again"), suppress(FileNotFoundError):
                if not made:  # perhaps made, and not yet synced, by a process that is gone; perhaps deleted since
                    self._with_room(_sync, path)
                self._with_room(_sync, folder)
        return made

    def read_into(self, reads: Sequence[Read]) -> list[KnitError | None]:
        paths = [self._path(read.key) for read in reads]
        answers: list[KnitError | None] = []
        for path, run in itertools.groupby(zip(paths, reads, strict=True), key=lambda pair: pair[0]):
            batch, done = [read for _, read in run], len(answers)
            try:
                with self._files.use(path) as fd:
                    for read in batch:
                        answers.append(_fill(fd, path, read))
            except OSError as error:
                if error.errno in GONE:
                    self._files.forget(path)
                answers.extend(_failure(path, read, error) for read in batch[len(answers) - done :])
        return answers

    @contextmanager
    def files(self, keys: Sequence[str]) -> Iterator[Array]:
        with self._files.use_all(map(self._path, keys[:_AT_ONCE])) as fds:
            yield np.array(fds + [-1] * (len(keys) - len(fds)), np.int64)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bool]:
        paths = [self._path(key) for key in keys]
        folders = folders_of(self._root, paths)
        deadline, step = self.now() + timeout, _FIRST_POLL
        while True:
            with _storage(f"look for {len(paths)} keys in {self._root}"):
                refresh(folders)
                found = [self._with_room(exists, path) for path in paths]
            left = deadline - self.now()
            if any(found) or left <= 0:
                return found
            with self._wake:
                if self._interrupts.take():
                    return found
                self._wake.wait(min(step, left))
            step = min(step * _POLL_GROWTH, _LAST_POLL)

    def interrupt(self) -> None:
        with self._wake:
            self._interrupts.send()
            self._wake.notify_all()

    def put(self, key: str, value: bytes) -> None:
        path = self._path(key)
        with _storage(f"put {path} ({len(value):,} bytes); the old value stands"):
            self._taken(path)
            self._with_room(self._prepare, os.path.dirname(path))
            temporary = self._with_room(self._write_named, path, flat([value]))
            try:
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
            if self._fsync:
                self._with_room(_sync, os.path.dirname(path))

    def get(self, key: str) -> bytes | None:
        path, tries = self._path(key), 4
        with _storage(f"get {path}"):
            while True:
                refresh(folders_of(self._root, [path]))
                tries -= 1
                try:
                    return self._with_room(_read_all, path)
                except OSError as error:
                    if error.errno == errno.ESTALE and tries:
                        continue  # replaced on another host between open and read
                    if error.errno in GONE:
                        return None
                    raise

    def delete(self, keys: Sequence[str]) -> None:
        for path in [self._path(key) for key in keys]:
            self._files.forget(path)
            with _storage(f"delete {path}"), suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                os.unlink(path)

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        self.interrupt()
        self._files.close()

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _with_room(self, do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Does it; where no descriptor is left, once more without the files that were only kept open."""
        try:
            return do(*args, **kwargs)
        except OSError as error:
            if error.errno not in FULL:
                raise
        self._files.close()
        return do(*args, **kwargs)

    def _taken(self, path: str) -> bool:
        """Whether the name is in use, by an object; as a folder it is an error."""
        with suppress(FileNotFoundError, NotADirectoryError):
            if stat.S_ISDIR(os.lstat(path).st_mode):
                raise InvalidArgument(f"{path} is a folder of other keys: a key is never the folder of another")
            return True
        return False

    def _prepare(self, folder: str) -> None:
        """Makes the folder. Under fsync its name, and those above it up to the root's, are synced, once a back end."""
        if os.path.isdir(folder) and (folder in self._synced or not self._fsync):
            return
        top = os.path.dirname(self._root)
        while not os.path.isdir(top):
            top = os.path.dirname(top)
        try:
            os.makedirs(folder, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise InvalidArgument(f"{folder} cannot be a folder: it, or one above it, is an object") from error
        if self._fsync:
            above = folder
            while above != top:
                above = os.path.dirname(above)
                _sync(above)
            self._synced.add(folder)

    def _link_unnamed(self, path: str, views: Sequence[memoryview]) -> bool | None:
        """As ``create``. None: not here; if the reason is another one, the other way will meet it again and say so."""
        try:
            fd = os.open(os.path.dirname(path), os.O_TMPFILE | os.O_WRONLY, 0o666)
        except (OSError, AttributeError):  # macOS has no O_TMPFILE
            return None
        try:
            _write(fd, views, self._fsync)
            # Without src_dir_fd Python calls link(), which does not follow the symbolic link of /proc.
            try:
                os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=0, follow_symlinks=True)
            except FileExistsError:
                return False
            except OSError:  # /proc is not there, or not to be used
                return None
            return True
        finally:
            os.close(fd)

    def _link_named(self, path: str, views: Sequence[memoryview]) -> bool:
        temporary = self._write_named(path, views)
        try:
            os.link(temporary, path)
            return True
        except FileExistsError:
            return os.stat(temporary).st_nlink == 2  # on NFS a reply that was lost makes our own success look so
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise Unreachable(f"{path}: this file system has no hard links; use its object URL instead") from error
            raise
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)

    def _write_named(self, path: str, views: Sequence[memoryview]) -> str:
        """A new, complete and closed file beside ``path``, under a name that is no key."""
        temporary = os.path.join(os.path.dirname(path), f"~{secrets.token_hex(8)}")
        fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            try:
                _write(fd, views, self._fsync)
            finally:
                os.close(fd)  # before it gets its name: then NFS has the bytes, and has said so
        except BaseException:
            os.unlink(temporary)
            raise
        return temporary


def _fill(fd: int, path: str, read: Read) -> KnitError | None:
    done, wanted = 0, len(read.out)
    while done < wanted:
        got = os.preadv(fd, [read.out[done:]], read.start + done)
        if not got:
            return ShortRead(
                f"{path}: asked for {wanted:,} bytes at {read.start:,}, found only {done:,}: cut short; restore it",
                found=done,
            )
        done += got
    return None


def _read_all(path: str) -> bytes:
    fd, pieces = open_file(path), []
    try:
        while piece := os.read(fd, 1 << 20):
            pieces.append(piece)
    finally:
        os.close(fd)
    return b"".join(pieces)


def _write(fd: int, views: Sequence[memoryview], fsync: bool) -> None:
    left, first = list(views), 0
    while first < len(left):
        written = os.writev(fd, left[first : first + _IOV_MAX])
        while first < len(left) and written >= len(left[first]):
            written -= len(left[first])
            first += 1
        if written:
            left[first] = left[first][written:]
    if fsync:
        os.fsync(fd)


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _failure(path: str, read: Read, error: OSError) -> KnitError:
    what = f"{path}: asked for {len(read.out):,} bytes at {read.start:,}"
    problem: KnitError = Unreachable(f"{what}, found {error.strerror or error}; {_remedy(error)}.")
    if error.errno in GONE:
        problem = KeyMissing(
            f"{what}, but there is no such object: never written, or already reclaimed. Was it deleted by hand, or is "
            "the folder another one?"
        )
    problem.__cause__ = error
    return problem


def _remedy(error: OSError) -> str:
    return _REMEDIES.get(error.errno or 0, "is the disk, or the mount, in order? Then repeat it")


@contextmanager
def _storage(action: str) -> Iterator[None]:
    """Names what was being done when the operating system refused."""
    try:
        yield
    except KnitError:
        raise
    except OSError as error:
        raise Unreachable(f"could not {action}: {error.strerror or error}; {_remedy(error)}.") from error
