"""Which rows share a bin: sizes fall, the answer is the bin of each. Pure functions, packed and padded.

Sizes 90, 60, 50, 40, 30 into bins that hold 100, as many bins as 2 ranks can share::

    >>> pack(np.array([90, 60, 50, 40, 30]), room=100, ranks=2).tolist()  # 90, 60, 50 and 40 + 30
    [0, 1, 2, 3, 3]
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import pairwise
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["pack", "pack_into", "pad", "pad_into", "round_up"]

Ints: TypeAlias = npt.NDArray[np.int64]
Number = TypeVar("Number", int, Ints)


def round_up(value: Number, multiple: int) -> Number:
    return -(-value // multiple) * multiple


def pack(sizes: Ints, room: int, ranks: int) -> Ints:
    """Bins that hold ``room`` in sum, as equal as possible.

    First as many as no packing can go below, each row to the least loaded of them. If that does not fit, as many as
    first-fit-decreasing needs, filled in the same way. If that does not fit either, first-fit-decreasing's own bins:
    then they are nearly full, and equal for that reason.
    """
    bound = max(-(-int(sizes.clip(max=room).sum()) // room), int((2 * sizes > room).sum()))
    bins = round_up(bound, ranks)
    label = _least_loaded(sizes, room, bins)
    if label is None:
        order, starts = _first_fit(sizes, room)
        fewest, bins = bins, round_up(len(starts), ranks)
        label = _least_loaded(sizes, room, bins) if bins > fewest else None
        if label is None:
            label = _fitted(sizes, order, starts, bins)
    return label


def pack_into(sizes: Ints, room: int, bins: int) -> Ints | None:
    """The same into this many bins, or None."""
    label = _least_loaded(sizes, room, bins)
    if label is None:
        order, starts = _first_fit(sizes, room)
        label = _fitted(sizes, order, starts, bins) if len(starts) <= bins else None
    return label


def _fitted(sizes: Ints, order: Ints, starts: list[int], bins: int) -> Ints:
    below: list[int] = np.cumsum(sizes[order]).tolist()
    label = np.empty_like(sizes)
    label[order] = _split(starts, sizes.size, bins, lambda lo, hi: below[hi - 1] - (below[lo - 1] if lo else 0))
    return label


def _least_loaded(sizes: Ints, room: int, bins: int) -> Ints | None:
    """Each row to the least loaded bin; None if that would put two or more rows and over ``room`` into one.

    A heap entry is ``load * bins + bin``, one integer: tuples take three times as long.
    """
    heap = list(range(bins))
    full = (room + 1) * bins
    label = []
    for size in (sizes * bins).tolist():
        entry = heap[0]
        if entry + size >= full and entry >= bins:
            return None
        heapreplace(heap, entry + size)
        label.append(entry)
    return np.array(label, np.int64) % bins


def _first_fit(sizes: Ints, room: int) -> tuple[Ints, list[int]]:
    """First-fit-decreasing: the rows, bin after bin, and where each bin starts.

    Bin after bin takes the longest row left, then again and again the longest that still fits: the same bins as row
    after row into the first that has room, and each step is one bisection. An entry is ``size * n + n - 1 - row``.
    """
    n = sizes.size
    left: list[int] = (sizes * n + np.arange(n)[::-1])[::-1].tolist()  # rising
    order: list[int] = []
    starts: list[int] = []
    while left:
        starts.append(len(order))
        entry = left.pop()
        order.append(entry)
        free = (room + 1) * n - 1 - entry // n * n  # the largest entry that still fits
        at = len(left)
        while at := bisect_right(left, free, 0, at):
            at -= 1
            entry = left.pop(at)
            order.append(entry)
            free -= entry // n * n
    return n - 1 - np.array(order, np.int64) % n, starts


def pad(sizes: Ints, room: int, ranks: int) -> Ints:
    """Bins that hold ``room`` in rows times longest row: runs of the sorted rows, each as long as it can be.

    No packing has fewer: the bin of the longest row gains nothing from a shorter one in place of the second longest.
    For the bins to be equal, the same is done under the smallest limit that gives no more of them.
    """
    label = pad_into(sizes, room, round_up(len(_longest_runs((-sizes).tolist(), room)), ranks))
    assert label is not None
    return label


def pad_into(sizes: Ints, room: int, bins: int) -> Ints | None:
    """The same into this many bins, or None."""
    rising: list[int] = (-sizes).tolist()
    if len(_longest_runs(rising, room)) > bins:
        return None
    limit = 1 + bisect_left(range(1, room), True, key=lambda limit: len(_longest_runs(rising, limit)) <= bins)
    return _split(_longest_runs(rising, limit), sizes.size, bins, lambda lo, hi: (lo - hi) * rising[lo])


def _longest_runs(rising: list[int], limit: int) -> list[int]:
    """Where the runs start, each the longest within the limit, or one row. Takes negative sizes, for the bisection.

    Sizes 9, 5, 4, 4, 4, 3 and limit 12: 9 is alone, two of 5 would fit, three of 4: starts [0, 1, 3].
    """
    starts: list[int] = []
    at = 0
    while at < len(rising):
        rows = limit // -rising[at] or 1
        end = bisect_left(rising, -(limit // (rows + 1)), at)  # up to here runs have this many rows
        starts.extend(range(at, end, rows))
        at = starts[-1] + rows
    return starts


def _split(starts: list[int], end: int, bins: int, cost: Callable[[int, int], int]) -> Ints:
    """Halve the most expensive run of two or more rows until there are ``bins`` runs, or only single rows.

    Four runs out of [0, 1, 4] and 6 rows: [0, 1, 2, 4] if rows 1 to 3 cost the most; the answer is the run of each row,
    [0, 1, 2, 2, 3, 3].
    """
    edges = [*starts, end]
    if len(starts) < bins:
        heap = [(-cost(lo, hi), lo, hi) for lo, hi in pairwise(edges) if hi - lo > 1]
        heapify(heap)
        while heap and len(edges) <= bins:
            _, lo, hi = heappop(heap)
            middle = (lo + hi) // 2
            edges.append(middle)
            for part in ((lo, middle), (middle, hi)):
                if part[1] - part[0] > 1:
                    heappush(heap, (-cost(*part), *part))
        edges.sort()
    return np.repeat(np.arange(len(edges) - 1), np.diff(edges))
