"""Many ranges of many objects in one call: every back end, everything that can be wrong with some of them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from contracts import HANG, pattern, running
from hypothesis import given, settings
from hypothesis import strategies as st

from knit_data.errors import CorruptData, KeyMissing, ShortRead, Unreachable
from knit_data.infos import Array
from knit_data.store import local
from knit_data.store.backend import Backend
from knit_data.store.local import LocalBackend
from knit_data.store.memory import Fault, MemoryBackend
from knit_data.store.ranges import Ranges, read_verified

Wanted = Sequence[Sequence[tuple[str, int, int]]]  # units of (key, first byte, how many)


@pytest.fixture(params=["memory", "local"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    made: Backend = MemoryBackend() if request.param == "memory" else LocalBackend(tmp_path)
    yield made
    made.close()


def ranges_of(wanted: Wanted, contents: dict[str, bytes], buffers: int = 1) -> Ranges:
    """Each range to a place of its own, buffers in turn; sums as ``contents`` says."""
    keys = sorted({key for unit in wanted for key, _, _ in unit})
    table, units, sums, sizes = [], [0], [], [0] * buffers
    for unit in wanted:
        whole = b""
        for key, start, length in unit:
            out = len(table) % buffers
            table.append((keys.index(key), start, length, out, sizes[out]))
            sizes[out] += length
            whole += contents[key][start : start + length]
        units.append(len(table))
        sums.append(xxhash.xxh3_64_intdigest(whole))
    outs = [np.full(size, 0xEE, np.uint8) for size in sizes]
    numbers = np.array(table, np.int64).reshape(-1, 5), np.array(units), np.array(sums, np.uint64)
    return Ranges(keys, outs, *numbers)


def bytes_of(ranges: Ranges, unit: int) -> bytes:
    rows = ranges.table[ranges.units[unit] : ranges.units[unit + 1]].tolist()
    return b"".join(ranges.outs[out][place : place + length].tobytes() for _, _, length, out, place in rows)


def stored(backend: Backend, count: int, size: int = 1000) -> dict[str, bytes]:
    contents = {f"seg/{n:04d}": pattern(size, n) for n in range(count)}
    for key, content in contents.items():
        assert backend.create(key, [content])
    return contents


# -- everything is there -----------------------------------------------------------------------------------------------


@st.composite
def wishes(draw: st.DrawFn) -> list[list[tuple[str, int, int]]]:
    def one() -> tuple[str, int, int]:
        start = draw(st.integers(0, 500))
        return f"seg/{draw(st.integers(0, 3)):04d}", start, draw(st.integers(0, 500 - start))

    return [[one() for _ in range(draw(st.integers(0, 3)))] for _ in range(draw(st.integers(0, 6)))]


@settings(max_examples=60)
@given(wanted=wishes(), buffers=st.integers(1, 3), cut=st.integers(0, 6))
def test_any_units_arrive_verified(tmp_path_factory: pytest.TempPathFactory, wanted: Any, buffers: int, cut: int):
    for made in (MemoryBackend(), LocalBackend(tmp_path_factory.mktemp("store"))):
        contents = stored(made, 4, 500)
        ranges = ranges_of(wanted, contents, buffers)
        outcome = read_verified(made, ranges)
        assert not outcome.errors and outcome.nbytes == sum(length for unit in wanted for _, _, length in unit)
        for u, unit in enumerate(wanted):
            assert bytes_of(ranges, u) == b"".join(contents[key][a : a + n] for key, a, n in unit)
        # the same in two parts, put together again
        parts = [ranges_of(some, contents, buffers) for some in (wanted[:cut], wanted[cut:])]
        both = Ranges.concat(parts)
        assert not read_verified(made, both).errors
        assert [bytes_of(both, u) for u in range(len(wanted))] == [bytes_of(ranges, u) for u in range(len(wanted))]
        made.close()


def test_more_objects_than_are_open_at_once(backend: Backend) -> None:
    contents = stored(backend, 600)
    wanted = [[(key, 10, 500), (key, 700, 300)] for key in contents]
    ranges = ranges_of(wanted, contents, 2)
    assert not read_verified(backend, ranges).errors
    for u, (key, content) in enumerate(contents.items()):
        assert bytes_of(ranges, u) == content[10:510] + content[700:], key


LOW = """
import os, resource, sys
import numpy as np
from contracts import pattern
from test_ranges import bytes_of, ranges_of, stored
from knit_data.store.local import LocalBackend
from knit_data.store.ranges import read_verified

backend = LocalBackend(sys.argv[1])
contents = stored(backend, 300)
ranges = ranges_of([[(key, 1, 900)] for key in contents], contents)
read_verified(backend, ranges_of([[("seg/0000", 0, 1)]], contents))  # whatever is opened once is open now
open_now = len(os.listdir("/proc/self/fd"))
backend.close()
for more in (100, 5):
    backend = LocalBackend(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + more,) * 2)
    outcome = read_verified(backend, ranges)
    assert not outcome.errors, (more, next(iter(outcome.errors.values())))
    assert all(bytes_of(ranges, u) == contents[key][1:901] for u, key in enumerate(contents))
    ranges.outs[0][...] = 0
    backend.close()
print(len(os.listdir("/proc/self/fd")) < open_now + 1)
"""


def test_where_no_more_files_may_be_opened_all_is_read_nevertheless(tmp_path: Path) -> None:
    path = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    ran = subprocess.run(
        [sys.executable, "-c", LOW, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (ran.returncode, ran.stdout) == (0, "True\n"), ran.stderr


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    backend = LocalBackend(tmp_path)
    contents = stored(backend, 300)
    for _ in range(3):
        assert not read_verified(backend, ranges_of([[(key, 0, 9)] for key in contents], contents)).errors
        assert len(os.listdir("/proc/self/fd")) <= before + local._OPEN_FILES
    backend.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_reads_of_several_threads_do_not_disturb_each_other(backend: Backend) -> None:
    contents = stored(backend, 100)
    barrier = threading.Barrier(4)

    def reads(first: int) -> None:
        names = list(contents)[first : first + 70]
        barrier.wait(HANG)
        for _ in range(5):
            ranges = ranges_of([[(key, first, 800)] for key in names], contents)
            assert not read_verified(backend, ranges).errors
            found = [bytes_of(ranges, u) for u in range(70)]
            assert found == [contents[key][first : first + 800] for key in names]

    with running(*[lambda first=first: reads(first) for first in (0, 10, 20, 30)]):
        pass


# -- something is wrong ------------------------------------------------------------------------------------------------


def test_errors_name_their_unit_and_the_others_arrive(backend: Backend) -> None:
    contents = stored(backend, 3) | {"gone": bytes(100)}
    truth = dict(contents)
    contents["seg/0002"] = truth["seg/0002"] + bytes(50)  # the writer's sums know of more than is there
    wanted = [
        [("seg/0000", 0, 1000)],
        [("seg/0001", 5, 10), ("gone", 0, 7)],
        [("seg/0002", 990, 20)],
        [("seg/0001", 15, 10)],
        [("gone", 5, 5), ("seg/0002", 1020, 5)],
        [("seg/0001", 100, 900), ("seg/0000", 0, 3)],
    ]
    ranges = ranges_of(wanted, contents, 2)
    ranges.sums[3] ^= np.uint64(1)
    errors = read_verified(backend, ranges).errors
    kinds = {u: type(error) for u, error in sorted(errors.items())}
    assert kinds == {1: KeyMissing, 2: ShortRead, 3: CorruptData, 4: KeyMissing}
    assert "gone" in str(errors[1]) and isinstance(errors[2], ShortRead) and errors[2].found == 10
    found = xxhash.xxh3_64_hexdigest(truth["seg/0001"][15:25])
    assert str(errors[3]) == (
        f"seg/0001: bytes (10 at 15) hash to {found}, their checksum is {int(ranges.sums[3]):016x}: damaged after they "
        "were written"
    )
    assert bytes_of(ranges, 0) == truth["seg/0000"]
    assert bytes_of(ranges, 5) == truth["seg/0001"][100:] + truth["seg/0000"][:3]


def test_a_mismatch_lists_every_range_of_its_unit(backend: Backend) -> None:
    contents = stored(backend, 2, 20_000)
    ranges = ranges_of([[("seg/0001", 10_000, 2_000), ("seg/0001", 15_000, 64)], []], contents)
    ranges.sums[...] = 0
    errors = read_verified(backend, ranges).errors
    assert str(errors[0]).startswith("seg/0001: bytes (2,000 at 10,000, 64 at 15,000) hash to ")
    assert str(errors[1]).startswith("nothing: bytes () hash to 2d06800538d394c2, their checksum is 0000000000000000")


def test_every_flipped_bit_is_found_and_charged_to_its_unit() -> None:
    backend = MemoryBackend()
    contents = stored(backend, 1, 64)
    wanted = [[("seg/0000", 8 * u, 8)] for u in range(8)]
    for damaged in range(8):
        backend.faults.append(Fault("read", after=damaged, error="flip"))
        assert list(read_verified(backend, ranges_of(wanted, contents)).errors) == [damaged]
        backend.faults.clear()


def test_storage_that_does_not_answer_is_unreachable_for_its_unit_only() -> None:
    backend = MemoryBackend()
    contents = stored(backend, 3)
    backend.faults.append(Fault("read", "seg/0001", times=None, error=Unreachable("no answer")))
    errors = read_verified(backend, ranges_of([[(key, 0, 5)] for key in contents], contents)).errors
    assert {u: str(error) for u, error in errors.items()} == {1: "no answer"}


# -- between open and read ---------------------------------------------------------------------------------------------


class Between(LocalBackend):
    """Something happens after the files were opened and before they are read."""

    happens: Callable[[], None] = staticmethod(lambda: None)

    @contextmanager
    def files(self, keys: Sequence[str]) -> Iterator[Array]:
        with super().files(keys) as fds:
            self.happens()
            yield fds


@pytest.mark.parametrize("warm", [False, True])
def test_a_file_deleted_after_it_was_opened_is_read_to_its_end(tmp_path: Path, warm: bool) -> None:
    """The next read of it finds nothing."""
    backend = Between(tmp_path)
    contents = stored(backend, 3)
    wanted = [[(key, 0, 1000)] for key in contents]
    if warm:
        read_verified(backend, ranges_of(wanted, contents))
    backend.happens = lambda: (tmp_path / "seg/0001").unlink(missing_ok=True)
    assert not read_verified(backend, ranges_of(wanted, contents)).errors
    errors = read_verified(backend, ranges_of(wanted, contents)).errors
    assert {u: type(error) for u, error in errors.items()} == {1: KeyMissing}
    backend.close()


def test_a_file_cut_short_after_it_was_opened_is_a_short_read(tmp_path: Path) -> None:
    backend = Between(tmp_path)
    contents = stored(backend, 3)
    backend.happens = lambda: os.truncate(tmp_path / "seg/0001", 700)
    ranges = ranges_of([[(key, 0, 600), (key, 600, 400)] for key in contents], contents)
    errors = read_verified(backend, ranges).errors
    assert list(errors) == [1] and isinstance(errors[1], ShortRead) and errors[1].found == 100
    assert bytes_of(ranges, 0) == contents["seg/0000"] and bytes_of(ranges, 2) == contents["seg/0002"]
    backend.close()


@pytest.mark.parametrize("place", ["before it was opened", "after it was opened"])
def test_a_file_replaced_by_a_whole_one_is_met_by_the_second_look(tmp_path: Path, place: str) -> None:
    """As on a file system of several hosts, where an open file may be one that is not there any more."""
    backend = Between(tmp_path)
    contents = stored(backend, 2)
    file = tmp_path / "seg/0001"
    os.truncate(file, 700)

    def restore() -> None:
        beside = tmp_path / "seg/~new"
        beside.write_bytes(contents["seg/0001"])
        beside.replace(file)

    wanted = [[(key, 0, 1000)] for key in contents]
    assert list(read_verified(backend, ranges_of(wanted, contents)).errors) == [1]
    if place == "before it was opened":
        restore()
    else:
        backend.happens = restore
    ranges = ranges_of(wanted, contents)
    assert not read_verified(backend, ranges).errors
    assert bytes_of(ranges, 1) == contents["seg/0001"]
    backend.close()


def test_a_file_that_comes_after_the_look_for_it_is_read(tmp_path: Path) -> None:
    backend = Between(tmp_path)
    contents = stored(backend, 2) | {"late/0": pattern(50)}
    backend.happens = lambda: backend.create("late/0", [contents["late/0"]]) and None
    ranges = ranges_of([[(key, 0, 50)] for key in contents], contents)
    assert not read_verified(backend, ranges).errors
    assert bytes_of(ranges, 0) == contents["late/0"]
    backend.close()


def test_a_stale_descriptor_is_looked_at_again(tmp_path: Path) -> None:
    """ESTALE, EIO: whatever a descriptor says, the ordinary way has the last word."""

    class Broken(LocalBackend):
        @contextmanager
        def files(self, keys: Sequence[str]) -> Iterator[Array]:
            with super().files(keys) as fds:
                fds[1] = os.open("/", os.O_RDONLY)
                try:
                    yield fds
                finally:
                    os.close(int(fds[1]))

    backend = Broken(tmp_path)
    contents = stored(backend, 3)
    ranges = ranges_of([[(key, 3, 500)] for key in contents], contents)
    assert not read_verified(backend, ranges).errors
    assert bytes_of(ranges, 1) == contents["seg/0001"][3:503]
    backend.close()


def test_objects_that_several_parts_name_are_opened_once(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    contents = stored(backend, 3)
    parts = [ranges_of([[(key, 0, 700)], [(key, 300, 50)]], contents) for key in (*contents, "seg/0001", "seg/0000")]
    ranges = Ranges.concat(parts)
    assert sorted(ranges.keys) == sorted(contents) and len(ranges.outs) == 5
    assert not read_verified(backend, ranges).errors
    assert [out.tobytes() for out in ranges.outs] == [
        contents[key][:700] + contents[key][300:350] for key in (*contents, "seg/0001", "seg/0000")
    ]
    backend.close()
