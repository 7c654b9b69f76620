"""Byte ranges of open files, read to their places in memory and hashed, in one call.

    files   = [7]                              one open file
    ranges  = [[0, 128, 3, 0, 64],             3 bytes at 128 of file 0, to byte 64 of buffer 0
               [0, 131, 5, 0, 96]]             the next 5 bytes, to byte 96
    units   = [0, 1, 2]                        each range is hashed by itself
    found   = [3, 5]                           both arrived
    sums    = [xxh3(3 bytes), xxh3(5 bytes)]

Ranges that are neighbours in a file are one system call, wherever their bytes go; large ones are shared out between
threads, each of which hashes what it read while its cache still holds it. The interpreter lock is released.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from knit_data.errors import InvalidArgument
from knit_data.ops import extension

_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_RANKS = os.environ.get("LOCAL_WORLD_SIZE", "1")  # torchrun says how many share this host
THREADS = max(1, min(8, _CORES // max(1, int(_RANKS) if _RANKS.isdecimal() else 1)))
_LARGEST_START = 2**62


def _refusal(
    outs: Sequence[Tensor],
    files: Tensor,
    ranges: Tensor,
    units: Tensor,
    found: Tensor,
    sums: Tensor,
    nanoseconds: Tensor,
) -> str | None:
    """What is wrong with the arguments, or None. The C++ kernel tests the same."""
    named = (("files", files), ("ranges", ranges), ("units", units), ("found", found), ("sums", sums))
    checked = [("each of outs", out, torch.uint8) for out in outs]
    checked += [(name, tensor, torch.int64) for name, tensor in (*named, ("nanoseconds", nanoseconds))]
    for name, tensor, dtype in checked:
        if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
            return f"{name} must be a contiguous {dtype} tensor on the CPU, found {tensor.dtype} on {tensor.device}"
    n, count = found.numel(), sums.numel()
    if ranges.numel() != 5 * n or units.numel() != count + 1 or nanoseconds.numel() != 2:
        return (
            f"{ranges.numel()} numbers for {n} ranges, {units.numel()} bounds for {count} units, "
            f"{nanoseconds.numel()} sums of time: give 5 a range, one more than units, and 2"
        )
    sizes = [out.numel() for out in outs]
    for i, (source, start, length, out, place) in enumerate(ranges.view(-1, 5).tolist()):
        if not (0 <= source < files.numel() and 0 <= out < len(outs)):
            return f"range {i} names file {source} of {files.numel()} and buffer {out} of {len(outs)}"
        if not (0 <= start <= _LARGEST_START and 0 <= length and 0 <= place and place + length <= sizes[out]):
            return f"range {i} reads {length} bytes at {start} to {place} of a buffer of {sizes[out]}"
    bounds = units.tolist()
    if bounds[0] != 0 or bounds[-1] != n or bounds != sorted(bounds):
        return f"units must cover all {n} ranges in order, found {bounds[:8]}"
    return None


def read_ranges_reference(
    outs: Sequence[Tensor],
    files: Tensor,
    ranges: Tensor,
    units: Tensor,
    found: Tensor,
    sums: Tensor,
    nanoseconds: Tensor,
    threads: int,
) -> None:
    """The specification, one range after the other. Also the kernel where the extension was not built."""
    del threads
    refusal = _refusal(outs, files, ranges, units, found, sums, nanoseconds)
    if refusal is not None:
        raise InvalidArgument(f"read_ranges: {refusal}")
    fds, rows, bounds = files.tolist(), ranges.view(-1, 5).tolist(), units.tolist()
    for u in range(sums.numel()):
        hasher = xxhash.xxh3_64()
        for i in range(bounds[u], bounds[u + 1]):
            source, start, length, out, place = rows[i]
            target = outs[out].numpy()[place : place + length].data if length else memoryview(bytearray())
            found[i] = _fill(fds[source], target, start)
            hasher.update(target)
        sums[u] = int(np.uint64(hasher.intdigest()).astype(np.int64))
    nanoseconds.zero_()


def _fill(fd: int, target: memoryview, start: int) -> int:
    done = 0
    while done < len(target):
        try:
            got = os.preadv(fd, [target[done:]], start + done)
        except OverflowError:
            return -errno.EBADF
        except OSError as error:
            return -(error.errno or errno.EIO)
        if not got:
            break
        done += got
    return done


def _fallback(*arguments: Any) -> None:
    extension.say_that_it_is_missing()
    read_ranges_reference(*arguments)


torch.library.define(
    "knit::read_ranges",
    "(Tensor(a!)[] outs, Tensor files, Tensor ranges, Tensor units, Tensor(b!) found, Tensor(c!) sums, "
    "Tensor(d!) nanoseconds, int threads) -> ()",
)
torch.library.register_fake("knit::read_ranges", lambda *_: None)
if extension.missing is not None:
    torch.library.impl("knit::read_ranges", "CPU", _fallback)
_read_ranges = torch.ops.knit.read_ranges.default


def read_ranges(
    outs: Sequence[Tensor],
    files: NDArray[np.int64],
    ranges: NDArray[np.int64],
    units: NDArray[np.int64],
    threads: int = THREADS,
) -> tuple[NDArray[np.int64], NDArray[np.uint64], tuple[float, float]]:
    """Reads R ranges into ``outs`` and hashes them by units.

    Args:
        outs: buffers, ``[bytes]`` uint8 on the CPU, contiguous.
        files: ``[K]`` int64, descriptors of files that are open for reading.
        ranges: ``[R, 5]`` int64: which file, first byte, how many, which buffer, first byte there. Destinations do not
            overlap.
        units: ``[U + 1]`` int64, from 0 to R: the bytes of ranges ``units[u]`` to ``units[u + 1] - 1``, end to end, are
            hashed together.
        threads: at most so many, the caller's included; one for every MB.

    Returns:
        found ``[R]`` int64: how many bytes, from its start, are there: fewer than asked where the file ends early;
        negative: the errno of what failed. sums ``[U]`` uint64: XXH3-64 of each unit, of no use where a range of it
        did not arrive. Seconds of all threads spent on reading and on hashing.

    Raises:
        InvalidArgument: before anything is read.
    """
    if not len(units):
        raise InvalidArgument("read_ranges: units must begin with 0 and end with the number of ranges, found none")
    found, sums, spent = np.empty(len(ranges), np.int64), np.zeros(len(units) - 1, np.int64), np.zeros(2, np.int64)
    tensors = [torch.from_numpy(array) for array in (files, ranges, units, found, sums, spent)]
    try:
        _read_ranges(list(outs), *tensors, threads)
    except RuntimeError:
        # The kernel's guard spoke. The same checks in Python say it in our class, the same words on every back end.
        refusal = _refusal(outs, *tensors)
        if refusal is None:
            raise
        raise InvalidArgument(f"read_ranges: {refusal}") from None
    return found, sums.view(np.uint64), (float(spent[0]) / 1e9, float(spent[1]) / 1e9)
