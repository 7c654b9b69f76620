"""The range reader alone, checksums included, beside a copy of the same bytes in memory and a bare ``preadv`` of them.

    python benchmarks/bench_read.py [--quick] [--json FILE]

Files in the page cache. A call reads units that lie end to end in a file, each hashed by itself: into a buffer that is
there ("reused"), or into one that is made for the call ("fresh"). ``memcpy`` is torch's copy into the same buffer, in
one thread and in as many as there are cores; ``preadv`` one call for the whole, in one thread, not verified. Samples
are calls, in turn, each after the processor's caches were filled with something else; ratios are of the same turn.

Buffers begin on a page, like the file: where a copy goes to 8 to 24 bytes further into a page than it comes from, some
processors (AMD's among them) take two to three times as long, and NumPy's own large arrays begin 16 bytes into one.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
import xxhash
from report import Report, quantiles

from knit_data.ops.read import read_ranges

PAGE = 4_096  # bytes
CACHES = 128 << 20  # bytes, more than the processor's caches hold
UNITS = {"1 of 10 MB": (1, 10_000_000), "4 of 10 MB": (4, 10_000_000), "100 of 100 KB": (100, 100_000)}
UNITS |= {"1,000 of 4 KB": (1_000, 4_000)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer calls")
    parser.add_argument("--json", help="append the rows to this file")
    options = parser.parse_args()
    report = Report("read", options.json, ("numpy", "torch", "xxhash"))
    lines = []
    for case, (count, size) in UNITS.items():
        with tempfile.TemporaryDirectory() as folder:
            lines.append(measure(report, case, count, size, folder, 11 if options.quick else 41))
    print("\nGB/s, and the reader over its peer (median and 20th to 80th percentile of the turns)")
    print("\n".join(lines))


def fresh(size: int) -> np.ndarray:
    """Bytes that begin on a page."""
    raw = np.empty(size + PAGE, np.uint8)
    return raw[-raw.ctypes.data % PAGE :][:size]


def measure(report: Report, case: str, count: int, size: int, folder: str, repeats: int) -> str:
    data = np.random.default_rng(0).integers(0, 256, count * size, np.uint8)
    path, total, cores = os.path.join(folder, "units"), count * size, torch.get_num_threads()
    data.tofile(path)
    sums = [xxhash.xxh3_64_intdigest(data[i * size : (i + 1) * size].data) for i in range(count)]
    ranges = np.array([[0, i * size, size, 0, i * size] for i in range(count)], np.int64)
    units, there, source = np.arange(count + 1), fresh(total), torch.from_numpy(data)
    there[:] = 1
    other = np.zeros(CACHES, np.uint8)
    fd = os.open(path, os.O_RDONLY)
    files = np.array([fd], np.int64)

    def reader(out: np.ndarray) -> None:
        found, hashed, _ = read_ranges([torch.from_numpy(out)], files, ranges, units)
        assert (found == size).all() and hashed.tolist() == sums, "not the bytes that were written"

    def pread(out: np.ndarray) -> None:
        assert os.preadv(fd, [out.data], 0) == total

    def copy(threads: int) -> None:
        torch.set_num_threads(threads)
        torch.from_numpy(there).copy_(source)
        torch.set_num_threads(cores)

    calls: dict[str, Callable[[], object]] = {
        "reader, reused": lambda: reader(there),
        "reader, fresh": lambda: reader(fresh(total)),
        "memcpy, 1 thread": lambda: copy(1),
        f"memcpy, {cores} threads": lambda: copy(cores),
        "preadv, reused": lambda: pread(there),
        "preadv, fresh": lambda: pread(fresh(total)),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            other += 1  # nobody finds the bytes in a cache because of who came before
            began = time.perf_counter()
            call()
            if turn:
                times[name].append(1e3 * (time.perf_counter() - began))
    os.close(fd)
    for provider, samples in times.items():
        speeds = [total / 1e6 / ms for ms in samples]
        report.add(case=case, provider=provider, metric="speed", unit="GB/s", samples=speeds)
    shown = [f"{case:14}"]
    for ours, theirs in (
        ("reader, reused", "memcpy, 1 thread"),
        ("reader, reused", f"memcpy, {cores} threads"),
        ("reader, reused", "preadv, reused"),
        ("reader, fresh", "preadv, fresh"),
    ):
        low, middle, high = quantiles([b / a for a, b in zip(times[ours], times[theirs], strict=True)])
        speed = total / 1e6 / quantiles(times[ours])[1]
        shown.append(f"{ours} {speed:.1f}, {middle:.2f} ({low:.2f} to {high:.2f}) of {theirs}")
    return "\n    ".join(shown)


if __name__ == "__main__":
    main()
