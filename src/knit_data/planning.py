"""Which trajectory goes to which rank and which micro-batch. Pure functions of token counts.

The whole mini-batch is packed at once and the micro-batches are then dealt to the ranks, so that all ranks get the same
number of them by construction and nothing has to be agreed upon (the idea is slime's). Five trajectories under a cap of
100 tokens, on two ranks::

    >>> made = plan(np.array([60, 90, 40, 30, 50]), ranks=2, max_tokens=100)
    >>> made.count, made.ranks, made.tokens.tolist()                     # 270 tokens: 3 micro-batches, 4 on two ranks
    (2, 2, [90, 70, 50, 60])
    >>> [[made.rows_of(rank, j).tolist() for j in range(made.count)] for rank in range(made.ranks)]
    [[[1], [4]], [[2, 3], [0]]]

Ranks wait for each other at every micro-batch. Those that run at the same time therefore cost about the same, 90 beside
70 and 50 beside 60, and the rank that is behind in tokens gets the larger one: 90 + 50 and 70 + 60.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from itertools import pairwise
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from knit_data.errors import InvalidArgument

__all__ = ["Padding", "Plan", "longest_that_fits", "plan"]

Layout: TypeAlias = Literal["packed", "padded"]
Ints: TypeAlias = npt.NDArray[np.int64]
Number = TypeVar("Number", int, Ints)


def _at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgument(f"{name}={value!r}; it is an integer, at least {least}")


@dataclass(frozen=True)
class Padding:
    """How micro-batches are filled up. ``Padding(total_to=8, sequence_to=4)`` on lengths 5 and 3:

    packed, the starts are multiples of 4 and the total of 8: 5 -> 8, 3 -> 4, 12 -> 16 tokens. Padded, rows have a
    multiple of 4: [2, 8], 16 tokens; ``total_to`` means nothing there.
    """

    token_id: int = 0
    total_to: int = 1  # packed: T is a multiple of this
    sequence_to: int = 1  # packed: trajectories start on multiples of this; padded: L is one

    def __post_init__(self) -> None:
        _at_least("Padding.token_id", self.token_id, 0)
        _at_least("Padding.total_to", self.total_to, 1)
        _at_least("Padding.sequence_to", self.sequence_to, 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """A mini-batch, assigned: micro-batch ``j`` of rank ``r`` is bin ``j * ranks + r``.

    Rows are numbered as in the call to `plan` and ascend inside a bin. Tokens fall with ``j``: the bins without a
    trajectory, ``n_padding`` of them, are all in the last micro-batch, each on another rank.
    """

    ranks: int
    count: int  # micro-batches of each rank
    rows: Ints  # [N] rows, bin after bin
    ptr: Ints  # [count * ranks + 1] bin b is rows[ptr[b]:ptr[b + 1]]
    tokens: Ints  # [count * ranks] with padding; 0 where there is no trajectory
    n_padding: int  # bins without a trajectory: max(0, count * ranks - N)

    def rows_of(self, rank: int, j: int) -> Ints:
        """The rows of one micro-batch, ascending; a view."""
        b = self._bin(rank, j)
        return self.rows[self.ptr[b] : self.ptr[b + 1]]

    def tokens_of(self, rank: int, j: int) -> int:
        """The tokens of one micro-batch, padding included: T when packed, B * L when padded."""
        return int(self.tokens[self._bin(rank, j)])

    def _bin(self, rank: int, j: int) -> int:
        if not (0 <= rank < self.ranks and 0 <= j < self.count):
            raise InvalidArgument(
                f"micro-batch {j} of rank {rank}: this plan has {self.count} micro-batches on {self.ranks} ranks"
            )
        return j * self.ranks + rank


def longest_that_fits(max_tokens: int, padding: Padding, layout: Layout) -> int:
    """The longest trajectory that fits into a micro-batch of its own.

    A cap of 100 with ``Padding(total_to=16, sequence_to=10)``: packed, T is at most 96, of which 90 can be a padded
    trajectory: 90. Padded, L is at most 100: 100.
    """
    room = _room(max_tokens, padding, layout)
    longest = room - room % padding.sequence_to
    if longest == 0:
        raise InvalidArgument(
            f"max_tokens={max_tokens} holds no trajectory: padded to {padding.sequence_to} tokens each and "
            f"{padding.total_to} in all, one takes more. Raise max_tokens or lower the padding"
        )
    return longest


def plan(
    n_tokens: npt.NDArray[np.integer[Any]],  # [N]
    *,
    ranks: int,
    max_tokens: int,
    layout: Layout = "packed",
    padding: Padding = Padding(),
    alone: bool = False,
    patches: npt.NDArray[np.integer[Any]] | None = None,  # [N]
) -> Plan:
    """Assign every row to one micro-batch of one rank.

    Every row is in exactly one micro-batch. All ranks have ``count`` of them, no more than first-fit-decreasing needs
    (packed), the smallest possible number (padded). None has more than ``max_tokens`` tokens after padding, except that
    a longer trajectory is refused, or has a micro-batch of its own with ``alone``. A micro-batch is empty only when
    there are more of them than trajectories: 5 trajectories of 90 tokens under a cap of 100 on 4 ranks need a second
    round, hence 8 micro-batches, 3 of them empty. Equal input gives an equal plan.

    ``patches``, a trajectory's cost in the vision tower, has no influence on which trajectories share a micro-batch. Of
    the micro-batches that run at the same time, the one with the most patches goes to the rank with the fewest so far.
    """
    lengths = _counts("n_tokens", n_tokens, least=1)
    vision = np.zeros_like(lengths) if patches is None else _counts("patches", patches, least=0)
    if lengths.size == 0:
        raise InvalidArgument("plan: n_tokens is empty; a mini-batch has at least one trajectory")
    if vision.shape != lengths.shape:
        raise InvalidArgument(f"plan: {vision.size} patches for {lengths.size} trajectories; give one per row")
    _at_least("ranks", ranks, 1)
    longest = longest_that_fits(max_tokens, padding, layout)
    if not alone and int(lengths.max()) > longest:
        row = int(np.argmax(lengths > longest))
        raise InvalidArgument(
            f"row {row} has {lengths[row]} tokens; max_tokens={max_tokens} with {padding} holds at most {longest} "
            f"({int((lengths > longest).sum())} of {lengths.size} rows are longer). Raise max_tokens, truncate, "
            f"or plan with alone=True"
        )

    sizes = _round_up(lengths, padding.sequence_to)
    falling = np.argsort(-sizes, kind="stable")  # longest first, ties by row
    label = np.empty_like(sizes)  # the bin of each row
    label[falling] = (_pack if layout == "packed" else _pad)(sizes[falling], _room(max_tokens, padding, layout), ranks)

    bins = _round_up(int(label.max()) + 1, ranks)
    tokens = np.zeros(bins, np.int64)
    if layout == "packed":
        np.add.at(tokens, label, sizes)
        tokens = _round_up(tokens, padding.total_to)
    else:
        np.maximum.at(tokens, label, sizes)
        tokens *= np.bincount(label, minlength=bins)
    bin_patches = np.zeros(bins, np.int64)
    np.add.at(bin_patches, label, vision)

    place = _deal(tokens, bin_patches, ranks)
    placed = np.empty_like(tokens)
    placed[place] = tokens
    micro = place[label]
    rows = np.argsort(micro, kind="stable").astype(np.int64, copy=False)
    ptr = np.zeros(bins + 1, np.int64)
    np.cumsum(np.bincount(micro, minlength=bins), out=ptr[1:])
    for array in (rows, ptr, placed):
        array.setflags(write=False)
    return Plan(
        ranks=ranks, count=bins // ranks, rows=rows, ptr=ptr, tokens=placed, n_padding=max(0, bins - lengths.size)
    )


# -- which rows share a bin: sizes fall, the answer is the bin of each -------------------------------------------------


def _pack(sizes: Ints, room: int, ranks: int) -> Ints:
    """Bins that hold ``room`` in sum, as equal as possible.

    First as many as no packing can go below, each row to the least loaded of them. If that does not fit, as many as
    first-fit-decreasing needs, filled in the same way. If that does not fit either, first-fit-decreasing's own bins:
    then they are nearly full, and equal for that reason.
    """
    bound = max(-(-int(sizes.clip(max=room).sum()) // room), int((2 * sizes > room).sum()))
    bins = _round_up(bound, ranks)
    label = _least_loaded(sizes, room, bins)
    if label is None:
        order, starts = _first_fit(sizes, room)
        fewest, bins = bins, _round_up(len(starts), ranks)
        label = _least_loaded(sizes, room, bins) if bins > fewest else None
        if label is None:
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


def _pad(sizes: Ints, room: int, ranks: int) -> Ints:
    """Bins that hold ``room`` in rows times longest row: runs of the sorted rows, each as long as it can be.

    No packing has fewer: the bin of the longest row gains nothing from a shorter one in place of the second longest.
    For the bins to be equal, the same is done under the smallest limit that gives no more of them.
    """
    rising: list[int] = (-sizes).tolist()
    bins = _round_up(len(_longest_runs(rising, room)), ranks)
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


# -- which bin runs where and when -------------------------------------------------------------------------------------


def _deal(tokens: Ints, patches: Ints, ranks: int) -> Ints:
    """The place ``j * ranks + rank`` of each bin: those of similar cost side by side, the largest first.

    Side by side, most patches go to the rank with the fewest so far; equal, the most tokens to that with the fewest.
    """
    falling = np.lexsort((-patches, -tokens))
    place = [0] * tokens.size
    work = list(zip((-patches[falling]).tolist(), (-tokens[falling]).tolist(), falling.tolist(), strict=True))
    behind = [(0, 0, rank) for rank in range(ranks)]  # what each rank has so far, the least first
    for at in range(0, len(work), ranks):
        together = []
        for (seen, done, rank), (vision, text, which) in zip(behind, sorted(work[at : at + ranks]), strict=True):
            place[which] = at + rank
            together.append((seen - vision, done - text, rank))
        behind = sorted(together)
    return np.array(place, np.int64)


# -- numbers -----------------------------------------------------------------------------------------------------------


def _room(max_tokens: int, padding: Padding, layout: Layout) -> int:
    """What the rows of a micro-batch may take, before the total is rounded up."""
    _at_least("max_tokens", max_tokens, 1)
    if layout not in ("packed", "padded"):
        raise InvalidArgument(f'layout={layout!r}; it is "packed" or "padded"')
    return max_tokens - max_tokens % padding.total_to if layout == "packed" else max_tokens


def _round_up(value: Number, multiple: int) -> Number:
    return -(-value // multiple) * multiple


def _counts(name: str, values: npt.NDArray[np.integer[Any]], least: int) -> Ints:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgument(f"plan: {name} is {array.dtype} {list(array.shape)}; give integers, one per trajectory")
    if array.size and int(array.min()) < least:
        row = int(np.argmin(array))
        raise InvalidArgument(f"plan: {name} of row {row} is {array[row]}, at least {least} is needed")
    return array.astype(np.int64)
