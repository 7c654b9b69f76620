"""The contract on each back end, and what only one of them promises."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import math
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from contracts import HANG, BackendContract, Opened, pattern, read, running

from knit_data.errors import InvalidArgument, KeyMissing, ShortRead, StoreError, Unreachable, UsageError
from knit_data.store import local
from knit_data.store.backend import Backend, Read
from knit_data.store.files import OpenFiles
from knit_data.store.local import LocalBackend
from knit_data.store.memory import Crash, Fault, ManualClock, MemoryBackend, MonotonicClock
from knit_data.store.urls import open_backend

real_open, real_link, real_writev = os.open, os.link, os.writev


def choose(way: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a create write its bytes to a named or to an unnamed file."""
    if way == "named":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
        return
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY))
    except (OSError, AttributeError) as error:
        pytest.skip(f"no unnamed files in {folder}: {error}")

    def named(*_: object) -> str:
        raise AssertionError("a named file, where an unnamed one would do")

    monkeypatch.setattr(LocalBackend, "_link_named", named)


def refuse_unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS does."""

    def opened(path: str, flags: int, mode: int = 0o777, **options: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)
        return real_open(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", opened)


def refuse_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container without /proc does."""

    def link(source: str, target: str, **options: Any) -> None:
        if source.startswith("/proc/"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        real_link(source, target, **options)

    monkeypatch.setattr(os, "link", link)


class TestContract(BackendContract):
    @pytest.fixture(
        params=["local", "local-fsync", "local-no-O_TMPFILE", "local-refused-O_TMPFILE", "local-no-proc", "memory"]
    )
    def opened(
        self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Opened]:
        kind: str = request.param
        if kind == "local-no-O_TMPFILE":
            monkeypatch.delattr(os, "O_TMPFILE")
        elif kind == "local-refused-O_TMPFILE":
            refuse_unnamed(monkeypatch)
        elif kind == "local-no-proc":
            refuse_proc(monkeypatch)
        url = f"memory://{tmp_path.name}-{id(request)}" if kind == "memory" else str(tmp_path / "deep" / "store")
        handles: list[Backend] = []

        def opened() -> Backend:
            handles.append(open_backend(url, fsync=kind == "local-fsync"))
            return handles[-1]

        yield opened
        for handle in handles:
            handle.close()
        assert not [path for path in tmp_path.rglob("*") if path.name.startswith("~")], "a temporary file is left"


# -- URLs --------------------------------------------------------------------------------------------------------------


def test_urls_choose_the_back_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    open_backend(tmp_path / "a b").put("k", b"1")
    for url in (
        f"{tmp_path}/a b",
        "a b",
        "./a b",
        "~/a b",
        f"file://{tmp_path}/a%20b",
        f"FILE://localhost{tmp_path}/a%20b",
    ):
        backend = open_backend(url)
        assert isinstance(backend, LocalBackend)
        assert backend.get("k") == b"1", url
    assert isinstance(open_backend("memory://urls"), MemoryBackend)


def test_opening_writes_nothing(tmp_path: Path) -> None:
    backend = open_backend(tmp_path / "none")
    assert backend.wait(["k"], 0) == [False] and backend.get("k") is None
    backend.delete(["k"])
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("url", ["redis://host:1", "ray:name", "http:x", "C:/x"])
def test_an_unknown_scheme_is_named(url: str) -> None:
    with pytest.raises(InvalidArgument, match="no back end for '" + url.split(":")[0].lower() + ":'.*memory://name"):
        open_backend(url)


@pytest.mark.parametrize("url", ["", "file://relative/x", "file:x", "file:///x?y", "memory:x", "memory://a b"])
def test_a_malformed_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument):
        open_backend(url)


def test_unknown_storage_options_are_named(tmp_path: Path) -> None:
    for url in (str(tmp_path), "memory://x"):
        with pytest.raises(InvalidArgument, match="anon, key"):
            open_backend(url, key=1, anon=True)


# -- local files -------------------------------------------------------------------------------------------------------

RACER = """
import json, sys
from knit_data.store.urls import open_backend
root, me, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
backend = open_backend(root)
backend.put(f"ready/{me}", b"")
while backend.wait(["go"], 60) != [True]:
    pass
print(json.dumps([n for n in range(count) if backend.create(f"race/{n}", [bytes([me]) * 30000] * 3)]))
"""


def test_racing_processes_share_the_names_without_mixing_bytes(tmp_path: Path) -> None:
    backend, count = LocalBackend(tmp_path), 200
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER, str(tmp_path), str(me), str(count)], stdout=subprocess.PIPE)
        for me in (1, 2)
    ]
    try:
        for me in (1, 2):
            assert backend.wait([f"ready/{me}"], HANG) == [True]
        backend.put("go", b"")
        won = [json.loads(racer.communicate(timeout=HANG)[0]) for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()
            assert racer.stdout is not None
            racer.stdout.close()
    assert sorted(won[0] + won[1]) == list(range(count))
    for me, names in enumerate(won, start=1):
        for n in names:
            assert backend.get(f"race/{n}") == bytes([me]) * 90_000


DOOMED = """
import os, sys
from knit_data.store.urls import open_backend
if sys.argv[2] == "named":
    del os.O_TMPFILE
writev = os.writev
def half(fd, views):
    written = writev(fd, views[: len(views) // 2])
    print("half", flush=True)
    sys.stdin.read()  # never ends: the test kills this process here
    return written
os.writev = half
open_backend(sys.argv[1]).create("segments/w/0", [b"x" * 1_000_000] * 8)
"""


@pytest.mark.parametrize("way", ["named", "unnamed"])
def test_a_writer_killed_half_way_leaves_no_key_and_hinders_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    choose(way, tmp_path, monkeypatch)
    doomed = subprocess.Popen(
        [sys.executable, "-c", DOOMED, str(tmp_path), way], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert doomed.stdin is not None and doomed.stdout is not None
    try:
        assert doomed.stdout.readline() == b"half\n"
    finally:
        doomed.kill()
        doomed.wait()
        doomed.stdin.close()
        doomed.stdout.close()
    backend = LocalBackend(tmp_path)
    assert backend.wait(["segments/w/0"], 0) == [False]
    assert isinstance(read(backend, "segments/w/0", 0, 1), KeyMissing)
    left = [name for name in os.listdir(tmp_path / "segments/w") if not name.startswith("~")]
    assert left == []
    assert (os.listdir(tmp_path / "segments/w") == []) == (way == "unnamed")
    assert backend.create("segments/w/0", [b"second"])
    assert backend.get("segments/w/0") == b"second"


@pytest.mark.parametrize("way", ["named", "unnamed"])
def test_a_full_disk_leaves_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    choose(way, tmp_path, monkeypatch)
    backend = LocalBackend(tmp_path)
    backend.put("register", b"old")
    calls = itertools.count()

    def writev(fd: int, views: Sequence[memoryview]) -> int:
        if next(calls) % 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_writev(fd, [views[0][:1]])

    monkeypatch.setattr(os, "writev", writev)
    with pytest.raises(Unreachable, match=r"create .*k \(8 bytes\).*No space left") as caught:
        backend.create("k", [b"too ", b"much"])
    assert isinstance(caught.value.__cause__, OSError) and isinstance(caught.value, StoreError)
    with pytest.raises(Unreachable, match="No space left"):
        backend.put("register", b"newer")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["register"]
    assert backend.get("register") == b"old"
    assert backend.create("k", [b"fits"])


def test_short_writes_and_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_preadv = os.preadv
    sizes = itertools.cycle([1, 2, 3, 5, 7, 11])
    body = pattern(1000)

    def writev(fd: int, views: Sequence[memoryview]) -> int:
        return real_writev(fd, [memoryview(b"".join(views))[: next(sizes)]])

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        return real_preadv(fd, [views[0][: next(sizes)]], offset)

    monkeypatch.setattr(os, "writev", writev)
    monkeypatch.setattr(os, "preadv", preadv)
    backend = LocalBackend(tmp_path)
    assert backend.create("k", [body[:3], body[3:10], b"", body[10:11], body[11:]])
    assert read(backend, "k", 10, 900) == body[10:910]
    problem = read(backend, "k", 900, 200)
    assert isinstance(problem, ShortRead) and problem.found == 100


def test_a_failing_disk_is_unreachable_for_that_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_preadv = os.preadv

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if offset == 7:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real_preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    backend = LocalBackend(tmp_path)
    backend.create("bad", [pattern(10)])
    backend.create("good", [pattern(10)])
    out = memoryview(bytearray(3))
    answers = backend.read_into([Read("bad", 0, out[:1]), Read("bad", 7, out[1:2]), Read("good", 0, out[2:])])
    assert answers[0] is None and answers[2] is None
    assert isinstance(answers[1], Unreachable) and "at 7" in str(answers[1]) and "bad" in str(answers[1])


def test_a_file_system_without_hard_links_is_refused_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(source: str, target: str, **_: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), source, None, target)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(Unreachable, match="no hard links"):
        LocalBackend(tmp_path).create("k", [b"x"])
    assert os.listdir(tmp_path) == []


def test_a_lost_reply_to_the_link_is_still_a_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS: the server links, the reply is lost, the repeated request finds the name taken, by us."""
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)

    def link(source: str, target: str, **_: Any) -> None:
        real_link(source, target)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), source, None, target)

    monkeypatch.setattr(os, "link", link)
    assert LocalBackend(tmp_path).create("k", [b"x"])
    assert os.listdir(tmp_path) == ["k"]


@pytest.mark.parametrize("way", ["named", "unnamed"])
def test_other_users_may_read_as_far_as_the_umask_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    choose(way, tmp_path, monkeypatch)
    old = os.umask(0o027)
    try:
        LocalBackend(tmp_path).create("a/k", [b"x"])
        LocalBackend(tmp_path).put("a/r", b"x")
    finally:
        os.umask(old)
    assert [stat.S_IMODE((tmp_path / key).stat().st_mode) for key in ("a", "a/k", "a/r")] == [0o750, 0o640, 0o640]


@pytest.mark.parametrize("existed", [False, True])
def test_fsync_reaches_the_file_and_every_folder_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existed: bool
) -> None:
    """Also where another process has made all of it, and may not have come to sync it."""
    synced: list[int] = []
    real_fsync = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        real_fsync(fd)

    if existed:
        LocalBackend(tmp_path / "new/store").create("a/b/k", [b"x"])
    monkeypatch.setattr(os, "fsync", fsync)
    backend = LocalBackend(tmp_path / "new/store", fsync=True)
    assert backend.create("a/b/k", [b"x"]) is not existed
    inodes = {name: (tmp_path / name).stat().st_ino for name in ("new", "new/store", "new/store/a", "new/store/a/b")}
    inodes["k"] = (tmp_path / "new/store/a/b/k").stat().st_ino
    assert set(inodes.values()) <= set(synced)
    assert (tmp_path.stat().st_ino in synced) is not existed
    synced.clear()
    backend.put("a/b/r", b"x")
    assert synced == [(tmp_path / "new/store/a/b/r").stat().st_ino, inodes["new/store/a/b"]]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")
def test_open_files_are_few_and_closed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_OPEN_FILES", 5)
    backend = LocalBackend(tmp_path)
    for n in range(40):
        backend.create(f"k{n}", [pattern(100, n)])

    def count() -> int:
        return sum(
            os.path.realpath(f"/proc/self/fd/{fd}").startswith(f"{tmp_path}/") for fd in os.listdir("/proc/self/fd")
        )

    def reads() -> None:
        for i in range(400):
            assert read(backend, f"k{i * 7 % 40}", 0, 100) == pattern(100, i * 7 % 40)

    with running(reads, reads, reads):
        pass
    assert count() == 5
    LocalBackend(tmp_path).delete([f"k{n}" for n in range(40)])
    assert isinstance(read(backend, "k0", 0, 1), KeyMissing)
    assert count() == 0  # what others deleted is given up, so that its space is
    backend.create("last", [b"x"])
    assert read(backend, "last", 0, 1) == b"x"
    assert count() == 1
    backend.close()
    assert count() == 0


def test_a_file_deleted_during_its_read_is_read_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, other = LocalBackend(tmp_path), LocalBackend(tmp_path)
    backend.create("k", [b"ab"])
    real_preadv = os.preadv

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        backend.delete(["k"])
        other.delete(["k"])
        return real_preadv(fd, [views[0][:1]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert read(backend, "k", 0, 2) == b"ab"
    assert isinstance(read(backend, "k", 0, 2), KeyMissing)


def test_a_file_given_up_is_closed_by_its_last_user(tmp_path: Path) -> None:
    (tmp_path / "k").write_bytes(b"x")
    files = OpenFiles(1)
    with files.use(str(tmp_path / "k")) as fd:
        with files.use(str(tmp_path / "k")) as same:
            files.forget(str(tmp_path / "k"))
        assert same == fd and os.pread(fd, 1, 0) == b"x"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_interrupt_wakes_a_sleeper_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            sleeping.set()  # under the lock: interrupt gets it only when this sleeps
            return super().wait(timeout)

    monkeypatch.setattr(local, "_FIRST_POLL", HANG * 5)
    monkeypatch.setattr(local, "_LAST_POLL", HANG * 5)
    backend, sleeping = LocalBackend(tmp_path), threading.Event()
    backend._wake = Watched()

    def wait() -> None:
        assert backend.wait(["never"], HANG * 5) == [False]

    with running(wait):
        assert sleeping.wait(HANG)
        backend.interrupt()


def test_a_key_made_between_look_and_sleep_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_exists = local.exists
    looks: list[str] = []

    def exists(path: str) -> bool:
        found = real_exists(path)
        looks.append(path)
        if len(looks) == 1:
            LocalBackend(tmp_path).create("k", [b"x"])
        return found

    monkeypatch.setattr(local, "exists", exists)
    assert LocalBackend(tmp_path).wait(["k"], HANG) == [True]
    assert len(looks) == 2


def test_every_look_opens_the_folders_from_the_root_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or NFS would answer from memory that the file is not there."""
    backend = LocalBackend(tmp_path / "s")
    backend.create("a/b/x", [b""])
    backend.put("c/r", b"")
    seen: list[str] = []

    def opened(path: str, flags: int, mode: int = 0o777, **options: Any) -> int:
        seen.append(os.path.relpath(path, tmp_path))
        return real_open(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", opened)
    backend.wait(["a/b/1", "a/b/2", "c/1"], 0)
    assert seen == ["s", "s/a", "s/a/b", "s/c", "s/a/b/1", "s/a/b/2", "s/c/1"]
    seen.clear()
    backend.get("c/r")
    assert seen == ["s", "s/c", "s/c/r"]
    seen.clear()
    read(backend, "a/b/3", 0, 1)
    assert seen[0] == seen[-1] == "s/a/b/3" and seen[-4:-1] == ["s", "s/a", "s/a/b"]


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_is_shared_by_name_and_private_without_one() -> None:
    one, two = open_backend("memory://shared-by-name"), MemoryBackend.named("shared-by-name")
    one.put("k", b"1")
    assert two.get("k") == b"1"
    for other in ("memory://", "memory://", "memory://shared-by-name/deeper"):
        fresh = open_backend(other)
        assert fresh.get("k") is None
        fresh.put("k", b"2")
    assert two.get("k") == b"1"


def test_clock_and_faults_belong_to_the_name() -> None:
    clock = ManualClock(5.0)
    one = MemoryBackend.named("clock-and-faults", clock=clock)
    two = MemoryBackend.named("clock-and-faults")
    assert two.clock is one.clock is clock and two.faults is one.faults
    assert MemoryBackend.named("clock-and-faults", clock=clock).now() == 5.0
    with pytest.raises(InvalidArgument, match="clock-and-faults has another clock"):
        MemoryBackend.named("clock-and-faults", clock=ManualClock())
    assert isinstance(MemoryBackend().clock, MonotonicClock)


def test_on_a_manual_clock_a_wait_takes_its_timeout_and_no_time() -> None:
    clock = ManualClock()
    backend = MemoryBackend(clock=clock)
    assert backend.wait(["k"], 1800.0) == [False]
    assert backend.now() == clock.now() == 1800.0
    clock.advance(0.5)
    assert backend.wait(["k"], 0) == [False]
    backend.interrupt()
    assert backend.wait(["k"], 7.0) == [False]  # interrupted: before any time has passed
    backend.create("k", [])
    assert backend.wait(["k"], 7.0) == [True]
    assert backend.now() == 1800.5
    with pytest.raises(InvalidArgument):
        clock.advance(-1.0)
    with pytest.raises(UsageError):
        backend.wait(["never"], math.inf)


def test_a_create_during_the_start_of_a_wait_wakes_it() -> None:
    """The creator is started after the look; it gets the lock only when the wait sleeps."""

    class Watched(MonotonicClock):
        woken: list[bool]

        def wait(self, condition: threading.Condition, timeout: float) -> None:
            creator.start()
            self.woken.append(condition.wait(timeout))

    clock = Watched()
    clock.woken = []
    backend = MemoryBackend(clock=clock)
    creator = threading.Thread(target=lambda: backend.create("k", [b"x"]))
    assert backend.wait(["k"], HANG) == [True]
    creator.join(HANG)
    assert clock.woken == [True]


def test_crash_before_and_after() -> None:
    backend = MemoryBackend()
    backend.faults[:] = [
        Fault("create", "seg/*", after=1, times=2, error="crash_after"),
        Fault("put", "floor/*"),
        Fault("put", "policy", error="crash_after"),
    ]
    assert backend.create("seg/0", [b"0"]) and backend.create("other", [])
    for n in (1, 2):
        with pytest.raises(Crash, match=f"after create of 'seg/{n}'"):
            backend.create(f"seg/{n}", [b"x"])
    assert backend.create("seg/3", [b"3"])
    assert backend.wait([f"seg/{n}" for n in range(4)], 0) == [True] * 4
    with pytest.raises(Crash, match="before put of 'floor/w'"):
        backend.put("floor/w", b"1")
    with pytest.raises(Crash):
        backend.put("policy", b"1")
    assert backend.get("floor/w") is None and backend.get("policy") == b"1"
    backend.put("floor/w", b"2")
    assert backend.get("floor/w") == b"2"
    assert not issubclass(Crash, Exception)


def test_a_crash_may_part_the_keys_of_one_delete() -> None:
    backend = MemoryBackend()
    for key in "abc":
        backend.create(key, [])
    backend.faults.append(Fault("delete", "b"))
    with pytest.raises(Crash):
        backend.delete(["a", "b", "c"])
    assert backend.wait(["a", "b", "c"], 0) == [False, True, True]


def test_faults_of_reads() -> None:
    backend = MemoryBackend()
    body = pattern(100)
    backend.create("k", [body])
    out = memoryview(bytearray(100))
    backend.faults[:] = [
        Fault("read", "k", after=0, error="short"),
        Fault("read", "k", after=1, error="flip"),
        Fault("read", "k", after=2, error=Unreachable("cable pulled")),
        Fault("read", "none", times=None, error="crash_after"),
    ]
    short, flipped, pulled, fine = backend.read_into([Read("k", 0, out)] + [Read("k", 0, memoryview(bytearray(9)))] * 3)
    assert isinstance(short, ShortRead) and short.found == 50 and out[:50] == body[:50] and not any(out[50:])
    assert flipped is None and fine is None
    assert isinstance(pulled, Unreachable) and "cable" in str(pulled)
    backend.faults[:] = [Fault("read", error="flip", times=None)]
    changed = read(backend, "k", 0, 100)
    assert isinstance(changed, bytes)
    assert [a ^ b for a, b in zip(changed, body, strict=True) if a != b] == [1]
    assert read(backend, "k", 0, 0) == b""
    assert backend.get("k") == body  # the store itself is whole
    backend.faults[:] = [Fault("read", "none", times=None, error="crash_after")]
    for _ in range(3):
        with pytest.raises(Crash):
            read(backend, "none", 0, 1)


def test_an_exception_is_raised_instead_of_the_operation() -> None:
    backend = MemoryBackend()
    backend.faults[:] = [
        Fault("create", error=Unreachable("full")),
        Fault("get", times=None, error=OSError("torn cable")),
    ]
    with pytest.raises(Unreachable, match="full"):
        backend.create("k", [])
    assert backend.create("k", [])
    for _ in range(2):
        with pytest.raises(OSError, match="torn cable"):
            backend.get("k")
    backend.faults.clear()
    assert backend.get("k") == b""


def test_calls_are_counted_exactly_in_many_threads() -> None:
    backend = MemoryBackend()
    fault = Fault("create", "hit/*", after=100, times=57, error=Unreachable("now"))
    backend.faults.append(fault)
    failed: list[int] = []

    def create(first: int) -> None:
        for n in range(first, 400, 8):
            backend.create(f"miss/{n}", [])
            try:
                backend.create(f"hit/{n}", [])
            except Unreachable:
                failed.append(n)

    with running(*[lambda first=first: create(first) for first in range(8)]):
        pass
    assert len(failed) == 57 and fault.seen == 400
    assert backend.wait([f"hit/{n}" for n in range(400)], 0).count(False) == 57


@pytest.mark.parametrize(
    ("op", "error"), [("rename", "crash_before"), ("read", "burn"), ("put", "flip"), ("get", "short")]
)
def test_a_fault_that_cannot_be_is_refused(op: Any, error: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"{op}|{error}"):
        Fault(op, error=error)


def test_a_store_that_nobody_closed_leaves_no_file_open(tmp_path: Path) -> None:
    def use() -> None:
        backend = LocalBackend(tmp_path)
        for i in range(5):
            backend.create(f"k{i}", [b"x"])
            assert read(backend, f"k{i}", 0, 1) == b"x"
        assert len(os.listdir("/proc/self/fd")) >= before + 5

    before = len(os.listdir("/proc/self/fd"))
    use()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pipe_in_the_place_of_an_object_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "k")
    backend = LocalBackend(tmp_path)
    error = read(backend, "k", 0, 1)
    assert isinstance(error, Unreachable) and "not a regular file" in str(error)
    backend.close()


FULL = """
import os, resource, sys
from knit_data.store.backend import Read
from knit_data.store.local import LocalBackend

backend, folder = LocalBackend(sys.argv[1], fsync=sys.argv[2] == "synced"), sys.argv[1]
keys = [f"seg/{i}" for i in range(40)]
for key in keys:
    backend.create(key, [key.encode()])
backend.put("registers/a", b"1")
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60,) * 2)
calls = {
    "put": lambda: backend.put("registers/a", b"2"),
    "get": lambda: backend.get("registers/a") == b"2",
    "create": lambda: backend.create("new/b", [b"3"]),
    "wait": lambda: backend.wait(["new/b", "new/c"], 0.0) == [True, False],
}
for name, call in calls.items():
    for key in keys:
        assert backend.read_into([Read(key, 0, memoryview(bytearray(len(key))))]) == [None]
    kept = []
    while True:
        try:
            kept.append(os.open(folder, os.O_RDONLY))
        except OSError:
            break
    assert call() in (None, True), name
    for fd in kept:
        os.close(fd)
print(backend.get("new/b"))
"""


@pytest.mark.parametrize("way", ["synced", "plain"])
def test_files_that_are_only_kept_open_make_way_for_whatever_needs_a_descriptor(tmp_path: Path, way: str) -> None:
    ran = subprocess.run([sys.executable, "-c", FULL, str(tmp_path), way], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "b'3'\n"), ran.stderr
