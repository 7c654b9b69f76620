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

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from knit_data.affinity import MediaUse, bring_together, homes, trade
from knit_data.errors import InvalidArgument
from knit_data.packing import pack, pack_into, pad, pad_into, round_up

__all__ = ["MediaUse", "Padding", "Plan", "longest_that_fits", "plan"]

# how much longer the micro-batches may take so that fewer ranks encode an image; an image encoded once more costs more
SLACK = 0.02

Layout: TypeAlias = Literal["packed", "padded"]
Ints: TypeAlias = npt.NDArray[np.int64]


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

    Rows are numbered as in the call to `plan` and ascend inside a bin. The tokens of each rank fall with ``j``, without
    media also from any rank to any other. The bins without a trajectory, ``n_padding`` of them, are all in the last
    micro-batch, each on another rank.
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
    media: MediaUse | None = None,
) -> Plan:
    """Assign every row to one micro-batch of one rank.

    Every row is in exactly one micro-batch. All ranks have ``count`` of them, no more than first-fit-decreasing needs
    (packed), the smallest possible number (padded). None has more than ``max_tokens`` tokens after padding, except that
    a longer trajectory is refused, or has a micro-batch of its own with ``alone``. A micro-batch is empty only when
    there are more of them than trajectories: 5 trajectories of 90 tokens under a cap of 100 on 4 ranks need a second
    round, hence 8 micro-batches, 3 of them empty. Equal input gives an equal plan.

    With ``media``, rows that share an image share a rank where that costs little: the largest of the micro-batches that
    run at the same time, summed over all times, grows by `SLACK` at most, and their number not at all. See `affinity`.
    """
    lengths = _counts("n_tokens", n_tokens, least=1)
    if lengths.size == 0:
        raise InvalidArgument("plan: n_tokens is empty; a mini-batch has at least one trajectory")
    if media is not None and int(media.rows.max(initial=0)) >= lengths.size:
        raise InvalidArgument(f"plan: row {media.rows.max()} uses a medium; there are {lengths.size} trajectories")
    _at_least("ranks", ranks, 1)
    longest = longest_that_fits(max_tokens, padding, layout)
    if not alone and int(lengths.max()) > longest:
        row = int(np.argmax(lengths > longest))
        raise InvalidArgument(
            f"row {row} has {lengths[row]} tokens; max_tokens={max_tokens} with {padding} holds at most {longest} "
            f"({int((lengths > longest).sum())} of {lengths.size} rows are longer). Raise max_tokens, truncate, "
            f"or plan with alone=True"
        )

    job = _Job(round_up(lengths, padding.sequence_to), ranks, _room(max_tokens, padding, layout), layout, padding)
    micro = job.spread()
    if media is not None and media.rows.size:
        micro = bring_together(job.with_affinity(micro, media), job.sizes, media, ranks)
    return job.finish(micro)


@dataclass(frozen=True, eq=False)
class _Job:
    """What is to be planned. ``micro`` below is the bin ``j * ranks + rank`` of each row."""

    sizes: Ints  # [N] tokens, each padded
    ranks: int
    room: int
    layout: Layout
    padding: Padding

    def spread(self) -> Ints:
        """Bins over all rows, then dealt to the ranks."""
        falling = np.argsort(-self.sizes, kind="stable")  # longest first, ties by row
        label = np.empty_like(self.sizes)
        label[falling] = (pack if self.layout == "packed" else pad)(self.sizes[falling], self.room, self.ranks)
        return _deal(self.tokens(label), self.ranks)[label]

    def with_affinity(self, micro: Ints, media: MediaUse) -> Ints:
        """The first that is not too slow.

        Each rank packs the rows that it keeps, filled unevenly or not; rows of the bins at hand trade places; or as it
        was. The bins of rows that are long beside the cap, and padded ones of few rows, leave little to choose.
        """
        if self.ranks == 1:
            return micro
        tokens = self.tokens(micro)
        count = tokens.size // self.ranks
        # ranks filled unevenly need more bins where these are nearly full; below 0 with alone
        spare = max(tokens.size * self.room / int(self.sizes.sum()) - 1, 0.0)
        for slack in (min(SLACK, spare), min(SLACK, spare) / 4):
            home = homes(self.sizes, media, self.ranks, slack)
            kept = self._kept(home, count)
            if kept is not None and self._is_as_good(self.tokens(kept, tokens.size), tokens):
                return kept
        most = self._most(micro, tokens)
        traded = self._sorted(trade(micro, self.sizes, home, media, self.ranks, most, self.layout), count)
        return traded if self._is_as_good(self.tokens(traded, tokens.size), tokens) else micro

    def _kept(self, home: Ints, count: int) -> Ints | None:
        """Each rank's rows in ``count`` bins, the largest first; None if one of them needs more."""
        micro = np.empty_like(self.sizes)
        falling = np.argsort(-self.sizes, kind="stable")
        into = pack_into if self.layout == "packed" else pad_into
        for rank in range(self.ranks):
            rows = falling[home[falling] == rank]
            label = into(self.sizes[rows], self.room, count) if rows.size else rows
            if label is None:
                return None
            micro[rows] = label * self.ranks + rank
        return self._sorted(micro, count)

    def _sorted(self, micro: Ints, count: int) -> Ints:
        """The bins of each rank by falling tokens: no other order has less waiting."""
        order = np.argsort(-self.tokens(micro, count * self.ranks).reshape(count, -1), axis=0, kind="stable")
        place = np.empty_like(order)
        np.put_along_axis(place, order, np.arange(count)[:, None], axis=0)
        return (place * self.ranks + np.arange(self.ranks)).reshape(-1)[micro]

    def _most(self, micro: Ints, tokens: Ints) -> Ints:
        """[bins] what the rows of each bin may come to when they change: padded, the longest; packed, the sum."""
        together = np.repeat(tokens.reshape(-1, self.ranks).max(axis=1), self.ranks)
        most: Ints = np.minimum(together + (SLACK * together).astype(np.int64), self.room)
        if self.layout == "padded":
            most //= np.bincount(micro, minlength=tokens.size).clip(min=1)
        return most

    def _is_as_good(self, tokens: Ints, plain: Ints) -> bool:
        """No more empty bins, all in the last micro-batch; neither all together nor a rank by itself too slow."""
        new, old = (array.reshape(-1, self.ranks) for array in (tokens, plain))
        return bool(
            (new > 0).sum() == (old > 0).sum()
            and (new[:-1] > 0).all()
            and new.max(axis=1).sum() <= (1 + SLACK) * old.max(axis=1).sum()
            and new.sum(axis=0).max() <= max((1 + SLACK) * new.sum() / self.ranks, old.sum(axis=0).max())
        )

    def tokens(self, label: Ints, bins: int = 0) -> Ints:
        """[bins] of each bin, with padding."""
        bins = bins or round_up(int(label.max()) + 1, self.ranks)
        tokens = np.zeros(bins, np.int64)
        if self.layout == "packed":
            np.add.at(tokens, label, self.sizes)
            return round_up(tokens, self.padding.total_to)
        np.maximum.at(tokens, label, self.sizes)
        return tokens * np.bincount(label, minlength=bins)

    def finish(self, micro: Ints) -> Plan:
        tokens = self.tokens(micro)
        rows = np.argsort(micro, kind="stable").astype(np.int64, copy=False)
        ptr = np.zeros(tokens.size + 1, np.int64)
        np.cumsum(np.bincount(micro, minlength=tokens.size), out=ptr[1:])
        for array in (rows, ptr, tokens):
            array.setflags(write=False)
        count, n_padding = tokens.size // self.ranks, max(0, tokens.size - rows.size)
        return Plan(ranks=self.ranks, count=count, rows=rows, ptr=ptr, tokens=tokens, n_padding=n_padding)


# -- which bin runs where and when -------------------------------------------------------------------------------------


def _deal(tokens: Ints, ranks: int) -> Ints:
    """The place ``j * ranks + rank`` of each bin: those of similar cost side by side, the largest first.

    Side by side, the most tokens go to the rank with the fewest so far.
    """
    falling = np.argsort(-tokens, kind="stable")
    place = [0] * tokens.size
    work = list(zip((-tokens[falling]).tolist(), falling.tolist(), strict=True))
    behind = [(0, rank) for rank in range(ranks)]  # what each rank has so far, the least first
    for at in range(0, len(work), ranks):
        together = []
        for (done, rank), (text, which) in zip(behind, work[at : at + ranks], strict=True):
            place[which] = at + rank
            together.append((done - text, rank))
        behind = sorted(together)
    return np.array(place, np.int64)


# -- numbers -----------------------------------------------------------------------------------------------------------


def _room(max_tokens: int, padding: Padding, layout: Layout) -> int:
    """What the rows of a micro-batch may take, before the total is rounded up."""
    _at_least("max_tokens", max_tokens, 1)
    if layout not in ("packed", "padded"):
        raise InvalidArgument(f'layout={layout!r}; it is "packed" or "padded"')
    return max_tokens - max_tokens % padding.total_to if layout == "packed" else max_tokens


def _counts(name: str, values: npt.NDArray[np.integer[Any]], least: int) -> Ints:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgument(f"plan: {name} is {array.dtype} {list(array.shape)}; give integers, one per trajectory")
    if array.size and int(array.min()) < least:
        row = int(np.argmin(array))
        raise InvalidArgument(f"plan: {name} of row {row} is {array[row]}, at least {least} is needed")
    return array.astype(np.int64)
