"""knit::read_ranges: one contract for the operator and its reference."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from contracts import HANG, pattern, running
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knit_data.errors import InvalidArgument
from knit_data.ops import extension
from knit_data.ops import read as module
from knit_data.ops.read import read_ranges, read_ranges_reference

OPERATOR = torch.ops.knit.read_ranges.default
CHUNK = 128 << 10  # what the kernel reads at once
UNTOUCHED = 0xEE
KERNELS: dict[str, Callable[..., None]] = {"operator": OPERATOR, "reference": read_ranges_reference}
Ranges = Sequence[tuple[int, int, int, int, int]]  # file, first byte, how many, buffer, first byte there


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Callable[..., None]:
    return KERNELS[request.param]


@dataclass
class Found:
    outs: list[bytes]
    found: list[int]
    sums: list[int]
    nanoseconds: list[int]


def tensors(fds: Sequence[int], ranges: Ranges, units: Sequence[int]) -> list[Tensor]:
    """The operator's arguments after ``outs``."""
    counts = torch.zeros(len(ranges), dtype=torch.int64), torch.zeros(len(units) - 1, dtype=torch.int64)
    table = torch.tensor(ranges, dtype=torch.int64).reshape(-1, 5)
    return [torch.tensor(fds, dtype=torch.int64), table, torch.tensor(units), *counts, torch.full((2,), -1)]


def call(
    kernel: Callable[..., None],
    fds: Sequence[int],
    sizes: Sequence[int],
    ranges: Ranges,
    units: Sequence[int],
    threads: int = 1,
) -> Found:
    outs = [torch.full((size,), UNTOUCHED, dtype=torch.uint8) for size in sizes]
    numbers = tensors(fds, ranges, units)
    kernel(outs, *numbers, threads)
    found, sums, nanoseconds = numbers[3:]
    return Found(
        [out.numpy().tobytes() for out in outs],
        found.tolist(),
        sums.numpy().view(np.uint64).tolist(),
        nanoseconds.tolist(),
    )


def oracle(files: Sequence[bytes], sizes: Sequence[int], ranges: Ranges, units: Sequence[int]) -> Found:
    """Slices; the sum of a unit that did not arrive whole is -1."""
    outs = [bytearray([UNTOUCHED]) * size for size in sizes]
    found, sums = [], []
    for a, b in pairwise(units):
        whole, pieces = True, []
        for source, start, length, out, place in ranges[a:b]:
            came = files[source][start : start + length]
            outs[out][place : place + len(came)] = came
            found.append(len(came))
            pieces.append(came)
            whole = whole and len(came) == length
        sums.append(xxhash.xxh3_64_intdigest(b"".join(pieces)) if whole else -1)
    return Found([bytes(out) for out in outs], found, sums, [])


def same(got: Found, want: Found, ranges: Ranges) -> None:
    """What did not arrive may leave anything in its own place, and no sum."""
    assert got.found == want.found
    assert [sum if expected >= 0 else -1 for sum, expected in zip(got.sums, want.sums, strict=True)] == want.sums
    outs = [bytearray(out) for out in got.outs]
    for (_, _, length, out, place), found in zip(ranges, got.found, strict=True):
        outs[out][place + found : place + length] = want.outs[out][place + found : place + length]
    assert outs == want.outs
    assert min(got.nanoseconds) >= 0


@contextmanager
def opened(contents: Sequence[bytes]) -> Iterator[list[int]]:
    """Descriptors of unnamed files."""
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in contents]
        for file, content in zip(files, contents, strict=True):
            file.write(content)
            file.flush()
        yield [file.fileno() for file in files]


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_the_worked_example(kernel: Callable[..., None]) -> None:
    content, ranges = pattern(200), [(0, 128, 3, 0, 64), (0, 131, 5, 0, 96)]
    with opened([content]) as fds:
        got = call(kernel, fds, [128], ranges, [0, 1, 2])
    assert got.found == [3, 5]
    assert got.sums == [xxhash.xxh3_64_intdigest(content[a:b]) for a, b in ((128, 131), (131, 136))]
    assert got.outs[0][64:67] == content[128:131] and got.outs[0][96:101] == content[131:136]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[bytes], list[int], list[tuple[int, int, int, int, int]], list[int], int]:
    """Ranges of small files, some past their ends, neighbours among them, each to a place of its own."""
    files = [pattern(draw(st.integers(0, 600)), salt) for salt in range(draw(st.integers(1, 3)))]
    sizes, ranges = [0] * draw(st.integers(1, 3)), []
    for _ in range(draw(st.integers(0, 12))):
        source, start = draw(st.integers(0, len(files) - 1)), draw(st.integers(0, 610))
        if ranges and draw(st.booleans()):  # a neighbour of the one before
            source, start = ranges[-1][0], ranges[-1][1] + ranges[-1][2]
        length, out = draw(st.sampled_from([0, 1, 7, 16, 64, 250])), draw(st.integers(0, len(sizes) - 1))
        place = sizes[out] + draw(st.integers(0, 3))
        sizes[out] = place + length
        ranges.append((source, start, length, out, place))
    ranges = draw(st.permutations(ranges)) if draw(st.booleans()) else ranges
    inner = sorted(draw(st.lists(st.integers(0, len(ranges)), max_size=6)))
    return files, sizes, ranges, [0, *inner, len(ranges)], draw(st.integers(1, 8))


@settings(max_examples=150)
@given(case=cases())
def test_any_ranges_equal_slices(case: Any) -> None:
    files, sizes, ranges, units, threads = case
    with opened(files) as fds:
        for kernel in KERNELS.values():
            same(call(kernel, fds, sizes, ranges, units, threads), oracle(files, sizes, ranges, units), ranges)


BIG = pattern(65_521) * 84  # 5.5 MB, of a period that divides no chunk


@pytest.mark.parametrize(("kernel", "threads"), [(OPERATOR, 1), (OPERATOR, 8), (read_ranges_reference, 1)])
@pytest.mark.parametrize(
    "lengths",
    [
        [CHUNK - 1],
        [CHUNK],
        [CHUNK + 1],
        [2 * CHUNK - 1, 1, 2 * CHUNK + 1],
        [CHUNK // 2] * 7,
        [3, CHUNK, 0, 5 * CHUNK + 17, 1],
        [5_000_000],
        [1_500_001, 2_000_000],
        [1000] * 1100,
    ],
    ids=lambda lengths: f"{len(lengths)}x{lengths[0]}",
)
@pytest.mark.parametrize("cut", ["one unit", "a unit each", "pairs"])
def test_chunks_and_threads_change_nothing(kernel: Callable[..., None], lengths: list[int], threads: int, cut: str):
    """Forwards as neighbours, to two buffers in turn, then the same backwards."""
    starts = np.cumsum([5, *lengths])[:-1].tolist()
    ranges = [(0, start, n, i % 2, start) for i, (start, n) in enumerate(zip(starts, lengths, strict=True))]
    n = len(ranges)
    units = {"one unit": [0, n], "a unit each": [*range(n + 1)], "pairs": [*range(0, n, 2), n]}[cut]
    sizes = [sum(lengths) + 9] * 2
    with opened([BIG]) as fds:
        for some in (ranges, ranges[::-1]):
            same(call(kernel, fds, sizes, some, units, threads), oracle([BIG], sizes, some, units), some)


def test_sums_of_all_lengths(kernel: Callable[..., None]) -> None:
    lengths = [*range(301), *(1024 * k + d for k in (1, 2, 4, 8, 255, 256, 257) for d in (-1, 0, 1))]
    ranges = [(0, 3 * i, n, 0, 0) for i, n in enumerate(lengths)]
    places = np.cumsum([0, *lengths]).tolist()
    ranges = [(f, start, n, 0, place) for (f, start, n, _, _), place in zip(ranges, places[:-1], strict=True)]
    with opened([BIG]) as fds:
        got = call(kernel, fds, [places[-1]], ranges, [*range(len(ranges) + 1)])
    assert got.sums == [xxhash.xxh3_64_intdigest(BIG[start : start + n]) for _, start, n, _, _ in ranges]


def test_the_public_function_says_the_same() -> None:
    table, units = np.array([[0, 1, 5, 0, 0], [1, 2, 9, 0, 5]]), np.array([0, 1, 2])
    with opened([pattern(50), pattern(4)]) as fds:
        out = torch.zeros(14, dtype=torch.uint8)
        found, sums, spent = read_ranges([out], np.array(fds), table, units)
    assert found.tolist() == [5, 2] and sums.dtype == np.uint64
    assert int(sums[0]) == xxhash.xxh3_64_intdigest(pattern(50)[1:6])
    assert bytes(out[:7].tolist()) == pattern(50)[1:6] + pattern(4)[2:]
    assert min(spent) >= 0


# -- what fails -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "threads"), [(OPERATOR, 1), (OPERATOR, 4), (read_ranges_reference, 1)])
@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2_000_000])
def test_a_file_that_ends_early_says_how_much_is_there(kernel: Callable[..., None], size: int, threads: int) -> None:
    ranges = [(0, 0, 700_000, 0, 0), (0, 700_000, 100, 0, 700_000), (0, 700_100, 2_000_000, 1, 0), (1, 0, 9, 1, 2**21)]
    files, sizes = [BIG[:size], pattern(9)], [700_100, 2**21 + 9]
    with opened(files) as fds:
        same(
            call(kernel, fds, sizes, ranges, [0, 1, 2, 3, 4], threads),
            oracle(files, sizes, ranges, [0, 1, 2, 3, 4]),
            ranges,
        )


def test_what_cannot_be_read_is_named_by_its_errno_and_disturbs_nobody(kernel: Callable[..., None]) -> None:
    folder, (pipe, other) = os.open("/", os.O_RDONLY), os.pipe()
    writing = os.open(os.devnull, os.O_WRONLY)
    content = pattern(600_000)
    try:
        with opened([content]) as fds:
            everyone = [fds[0], folder, -1, pipe, writing]
            ranges = [(k, 0, 600_000 if k == 0 else 300_000, k, 0) for k in range(5)]
            got = call(kernel, everyone, [600_000] * 5, ranges, [*range(6)], 4)
            assert got.found == [600_000, -errno.EISDIR, -errno.EBADF, -errno.ESPIPE, -errno.EBADF]
            assert got.outs[0] == content and got.sums[0] == xxhash.xxh3_64_intdigest(content)
            nothing = [(k, 0, 0, 0, 0) for k in range(5)]  # no bytes are there wherever one looks
            assert call(kernel, everyone, [0], nothing, [0, 5]).found == [0] * 5
    finally:
        for fd in (folder, pipe, other, writing):
            os.close(fd)


MANY_MAPS = """
import mmap, sys
maps = [mmap.mmap(-1, 4096, prot=(1, 3)[i % 2]) for i in range(200)]  # neighbours of one kind would be one line
print(flush=True)
sys.stdin.read()
"""


def test_short_reads_are_continued(kernel: Callable[..., None]) -> None:
    """The kernel hands out the list of another process's memory a page at a time, however much is asked for."""
    command = [sys.executable, "-S", "-c", MANY_MAPS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        with open(f"/proc/{child.pid}/maps", "rb") as file:
            content = file.read()
            assert len(content) > 8192
            assert os.preadv(file.fileno(), [bytearray(len(content))], 0) < len(content)
            third = len(content) // 3
            ranges = [(0, 0, third, 0, 7), (0, third, 2 * third, 1, 0), (0, 3 * third, 100, 1, 2 * third)]
            sizes = [third + 7, 2 * third + 100]
            got = call(kernel, [file.fileno()], sizes, ranges, [0, 2, 3])
            child.communicate()
    same(got, oracle([content], sizes, ranges, [0, 2, 3]), ranges)


def test_the_reference_continues_reads_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    real, lengths = os.preadv, iter([1, 5, 2, 9, 3] * 100)

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        return real(fd, [views[0][: next(lengths)]], offset)

    monkeypatch.setattr(module.os, "preadv", preadv)
    ranges = [(0, 3, 300, 0, 0), (0, 390, 20, 0, 300)]
    with opened([pattern(400)]) as fds:
        same(
            call(read_ranges_reference, fds, [320], ranges, [0, 1, 2]),
            oracle([pattern(400)], [320], ranges, [0, 1, 2]),
            ranges,
        )


# -- refusals ---------------------------------------------------------------------------------------------------------

TOP = 2**63 - 1


@pytest.mark.parametrize(
    ("ranges", "units", "text"),
    [
        ([(1, 0, 1, 0, 0)], [0, 1], r"range 0 names file 1 of 1 and buffer 0 of 1"),
        ([(-1, 0, 1, 0, 0)], [0, 1], r"range 0 names file -1 of 1 and buffer 0 of 1"),
        ([(0, 0, 1, 1, 0)], [0, 1], r"range 0 names file 0 of 1 and buffer 1 of 1"),
        ([(0, 0, 1, -1, 0)], [0, 1], r"range 0 names file 0 of 1 and buffer -1 of 1"),
        ([(0, 0, 1, 0, 0), (0, -1, 1, 0, 1)], [0, 2], r"range 1 reads 1 bytes at -1 to 1 of a buffer of 8"),
        ([(0, 0, -1, 0, 0)], [0, 1], r"range 0 reads -1 bytes at 0 to 0 of a buffer of 8"),
        ([(0, 0, 5, 0, 4)], [0, 1], r"range 0 reads 5 bytes at 0 to 4 of a buffer of 8"),
        ([(0, 0, 0, 0, 9)], [0, 1], r"range 0 reads 0 bytes at 0 to 9 of a buffer of 8"),
        ([(0, 0, 1, 0, -1)], [0, 1], r"range 0 reads 1 bytes at 0 to -1 of a buffer of 8"),
        ([(0, 0, TOP, 0, 1)], [0, 1], rf"range 0 reads {TOP} bytes at 0 to 1 of a buffer of 8"),
        ([(0, 0, 1, 0, TOP)], [0, 1], rf"range 0 reads 1 bytes at 0 to {TOP} of a buffer of 8"),
        ([(0, 2**62 + 1, 1, 0, 0)], [0, 1], rf"range 0 reads 1 bytes at {2**62 + 1} to 0 of a buffer of 8"),
        ([(0, 0, 1, 0, 0)], [1, 1], r"units must cover all 1 ranges in order, found \[1, 1\]"),
        ([(0, 0, 1, 0, 0)], [0, 0], r"units must cover all 1 ranges in order, found \[0, 0\]"),
        ([(0, 0, 1, 0, 0)], [0, 2, 1], r"units must cover all 1 ranges in order, found \[0, 2, 1\]"),
        ([(0, 0, 1, 0, 0)], [0, -1, 1], r"units must cover all 1 ranges in order, found \[0, -1, 1\]"),
        ([], [0, 1, 0], r"units must cover all 0 ranges in order, found \[0, 1, 0\]"),
    ],
)
def test_bad_numbers_are_refused_before_anything_is_read(ranges: Ranges, units: list[int], text: str) -> None:
    with opened([pattern(100)]) as fds:
        out = torch.full((8,), UNTOUCHED, dtype=torch.uint8)
        files, table = np.array(fds, np.int64), np.array(ranges, np.int64).reshape(-1, 5)
        with pytest.raises(InvalidArgument, match=f"^read_ranges: {text}$"):
            read_ranges([out], files, table, np.array(units, np.int64))
        with pytest.raises(InvalidArgument, match=f"^read_ranges: {text}$"):
            read_ranges_reference([out], *tensors(fds, ranges, units), 1)
        with pytest.raises((RuntimeError, InvalidArgument), match="read_ranges: "):
            OPERATOR([out], *tensors(fds, ranges, units), 1)
    assert set(out.tolist()) == {UNTOUCHED}


@pytest.mark.parametrize("fault", ["dtype", "strides"])
@pytest.mark.parametrize("which", range(7))
def test_bad_tensors_are_refused_by_name(kernel: Callable[..., None], which: int, fault: str) -> None:
    with opened([pattern(100)] * 2) as fds:
        arguments: list[Tensor] = [torch.full((8,), UNTOUCHED, dtype=torch.uint8)]
        arguments += tensors(fds, [(0, 0, 1, 0, 0), (1, 1, 1, 0, 1)], [0, 1, 2])
        good = arguments[which]
        bad = good.to(torch.int32) if fault == "dtype" else good.repeat_interleave(2, 0)[::2]
        arguments[which] = bad
        name = ("each of outs", "files", "ranges", "units", "found", "sums", "nanoseconds")[which]
        with pytest.raises((RuntimeError, InvalidArgument), match=rf"read_ranges: {name} must be a contiguous"):
            kernel([arguments[0]], *arguments[1:], 1)
        assert set(arguments[0].tolist()) == {UNTOUCHED}


def test_tables_that_do_not_fit_together_are_refused() -> None:
    with opened([pattern(100)]) as fds:
        good = tensors(fds, [(0, 0, 1, 0, 0), (0, 1, 1, 0, 1)], [0, 1, 2])
        for which, other in ((1, good[1][:1]), (2, good[2][:2]), (3, good[3][:1]), (4, good[4][:1]), (5, good[5][:1])):
            arguments = [other if i == which else tensor for i, tensor in enumerate(good)]
            for kernel in KERNELS.values():
                with pytest.raises((RuntimeError, InvalidArgument), match="one more than units"):
                    kernel([torch.zeros(8, dtype=torch.uint8)], *arguments, 1)


# -- what it costs ----------------------------------------------------------------------------------------------------

needs_extension = pytest.mark.skipif(extension.missing is not None, reason="the reference makes no such promise")


def calls_of(body: Callable[[], object]) -> int:
    """System calls that read, made by this thread."""
    own = os.open("/proc/thread-self/io", os.O_RDONLY)
    try:

        def count() -> int:
            return int(os.pread(own, 4096, 0).split(b"syscr: ")[1].split()[0])

        before = count()
        body()
        return count() - before - 1  # the look itself
    finally:
        os.close(own)


@needs_extension
@pytest.mark.parametrize(
    ("starts", "length", "calls"),
    [
        (range(0, 5000, 10), 10, 1),  # 500 neighbours
        (range(4990, -1, -10), 10, 1),  # in whatever order
        (range(0, 5130, 10), 10, 2),  # 513: one call fills 512 places
        (range(0, 5000, 11), 10, 455),  # a byte between
        (range(0, 4 * CHUNK, CHUNK // 2), CHUNK // 2, 4),
        ([0, CHUNK], CHUNK, 2),
        ([0], 5 * CHUNK + 1, 6),
        ([0, 0, 0], 10, 3),
        ([0, 10, 20], 0, 0),
    ],
)
def test_neighbours_are_one_system_call(starts: Sequence[int], length: int, calls: int) -> None:
    ranges = [(0, start, length, 0, i * length) for i, start in enumerate(starts)]
    numbers: list[Found] = []
    with opened([BIG]) as fds:
        body = lambda: numbers.append(call(OPERATOR, fds, [len(ranges) * length], ranges, [*range(len(ranges) + 1)]))  # noqa: E731
        assert calls_of(body) == calls
    assert numbers[0].found == [length] * len(ranges)


@needs_extension
def test_another_thread_runs_while_it_reads() -> None:
    """With a switch interval of hours the lock changes hands only where somebody lets go of it."""
    out, ranges = torch.empty(1 << 26, dtype=torch.uint8), [(0, 0, 5_000_000, 0, 5_000_000 * i) for i in range(13)]
    count, stop, before = [0], threading.Event(), sys.getswitchinterval()

    def other() -> None:
        while not stop.is_set():
            count[0] += 1
            time.sleep(0)  # lets go

    progress = 0
    with opened([BIG]) as fds, running(other):
        numbers = tensors(fds, ranges, [*range(14)])
        sys.setswitchinterval(1e4)
        try:
            for _ in range(200):  # the system may not wake the other one at the first
                at = count[0]
                OPERATOR([out], *numbers, 1)
                progress = count[0] - at
                if progress:
                    break
        finally:
            stop.set()
            sys.setswitchinterval(before)
    assert progress


@needs_extension
def test_calls_from_several_threads_do_not_disturb_each_other() -> None:
    ranges = [(0, 7 * i, 60_000, 0, 60_000 * i) for i in range(40)]
    want = [xxhash.xxh3_64_intdigest(BIG[7 * i : 7 * i + 60_000]) for i in range(40)]
    barrier = threading.Barrier(4)

    def reads(fds: list[int]) -> None:
        for _ in range(5):
            barrier.wait(HANG)
            assert call(OPERATOR, fds, [2_400_000], ranges, [*range(41)], 3).sums == want

    with opened([BIG]) as fds, running(*[lambda: reads(fds)] * 4):
        pass


# -- torch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranges", [[], [(0, 4, 2, 1, 0), (0, 0, 3, 0, 3)]], ids=len)
def test_opcheck(ranges: Ranges) -> None:
    with opened([pattern(100)]) as fds:
        outs = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
        torch.library.opcheck(OPERATOR, (outs, *tensors(fds, ranges, [0, len(ranges)]), 1))


WITHOUT = """
import sys
sys.modules["knit_data._C"] = None  # what the import system does for a module that is not there
import os
import numpy as np, torch
from knit_data.errors import InvalidArgument
from knit_data.ops.read import read_ranges
print("imported", file=sys.stderr)
out, units, file = torch.zeros(4, dtype=torch.uint8), np.array([0, 1]), np.array([os.open(sys.argv[1], os.O_RDONLY)])
for _ in range(2):
    found, sums, _ = read_ranges([out], file, np.array([[0, 1, 2, 0, 1]]), units)
print(out.tolist(), found.tolist(), hex(sums[0]))
try:
    read_ranges([out], file, np.array([[0, 0, 5, 0, 0]]), units)
except InvalidArgument as error:
    print(error)
"""


def test_without_the_extension_the_reference_serves_and_says_so_once_at_first_use(tmp_path: Any) -> None:
    (tmp_path / "file").write_bytes(b"abcd")
    command = [sys.executable, "-W", "error", "-c", WITHOUT, str(tmp_path / "file")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    sum = xxhash.xxh3_64_hexdigest(b"bc").lstrip("0")
    refusal = "read_ranges: range 0 reads 5 bytes at 0 to 0 of a buffer of 4"
    assert ran.stdout == f"[0, 98, 99, 0] [2] 0x{sum}\n{refusal}\n"
    before, after = ran.stderr.split("imported\n")
    assert before == ""
    assert after.count("without its C++ extension") == 1 and after.count("\n") == 1
