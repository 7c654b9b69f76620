"""Which rank keeps which rows, so that few ranks encode the same image. Pure functions of sizes and of who uses what.

Rows that share a medium are a cluster, and a cluster stays on one rank where the balance of tokens permits. Six rows of
100 tokens on two ranks, rows 0 and 3 with image 0, rows 1 and 4 with image 1, the others without::

    >>> use = MediaUse(np.array([0, 1, 3, 4]), np.array([0, 1, 0, 1]), patches=np.array([256, 256]))
    >>> homes(np.full(6, 100), use, ranks=2, slack=0.02).tolist()
    [0, 1, 0, 0, 1, 1]

Each rank encodes one image, 256 patches, for 300 tokens. Two costs are balanced, tokens and patches, where a medium
counts once on every rank that uses it. To divide a cluster never saves patches; it is done for the sake of tokens only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from knit_data.errors import InvalidArgument

__all__ = ["MediaUse", "bring_together", "homes", "trade"]

Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
_STEPS = (0, -1, 1, -2, 2, -3, 3, -4)  # the rows next by size, which a row asks for their place; others seldom fit


@dataclass(frozen=True, eq=False)
class MediaUse:
    """Row ``rows[k]`` uses medium ``media[k]``, whose cost in the vision tower is ``patches[media[k]]``.

    Pairs may repeat and come in any order; media are distinct by number. Two rows of one image with 256 patches and one
    row of another with 64: ``MediaUse(rows=[0, 1, 2], media=[0, 0, 1], patches=[256, 64])``, as int64 arrays.
    Raises InvalidArgument on lengths that differ, on negative numbers, and on a medium that has no patches.
    """

    rows: Ints  # [K]
    media: Ints  # [K]
    patches: Ints  # [U]

    def __post_init__(self) -> None:
        for name in ("rows", "media", "patches"):
            array = np.asarray(getattr(self, name))
            if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
                raise InvalidArgument(f"MediaUse: {name} is {array.dtype} {list(array.shape)}; give a list of integers")
            if array.size and int(array.min()) < 0:
                at = int(np.argmin(array))
                raise InvalidArgument(f"MediaUse: {name}[{at}] is {array[at]}, at least 0 is needed")
            object.__setattr__(self, name, array.astype(np.int64))
        if self.rows.size != self.media.size:
            raise InvalidArgument(
                f"MediaUse: {self.rows.size} rows and {self.media.size} media; they are pairs, give as many of both"
            )
        if self.media.size and int(self.media.max()) >= self.patches.size:
            raise InvalidArgument(
                f"MediaUse: medium {self.media.max()} is used, patches has {self.patches.size} entries; give one for "
                "each medium"
            )

    def pairs(self) -> tuple[Ints, Ints]:
        """The distinct (medium, row) pairs, by medium, then row."""
        span = int(self.rows.max(initial=0)) + 1
        distinct = np.unique(self.media * span + self.rows)
        return distinct // span, distinct % span

    def on(self, rank: Ints, ranks: int) -> Bools:
        """[U, ranks] whether rank ``r`` uses medium ``u``, for the rank of each row."""
        used = np.zeros((self.patches.size, ranks), np.bool_)
        used[self.media, rank[self.rows]] = True
        return used


def homes(sizes: Ints, use: MediaUse, ranks: int, slack: float) -> Ints:
    """The rank of each row [N]: at most ``1 + slack`` times the mean tokens per rank, as far as rows permit.

    Clusters go to the rank where the larger of the two costs, each over its mean, stays smallest, the heaviest cluster
    first; rows without media then fill the valleys. What is above the limit after that is exchanged for something
    lighter, and if nothing fits, a cluster is divided between two ranks.
    """
    return _Placement(sizes, use, ranks, slack).run()


class _Placement:
    """Clusters on ranks. Of cluster q: ``rows[q]``, ``weight[q]`` in tokens, ``own[q]`` patches of media that no other
    cluster uses, ``cuts[q]`` media that others use too."""

    def __init__(self, sizes: Ints, use: MediaUse, ranks: int, slack: float) -> None:
        self.sizes, self.use, self.ranks = sizes, use, ranks
        total = int(sizes.sum())
        self.limit = max(int(total * (1 + slack)) // ranks, -(-total // ranks))
        media, rows = use.pairs()
        cluster, cut, need = self._clusters(media, rows)

        order = np.argsort(cluster, kind="stable")
        found, starts = np.unique(cluster[order], return_index=True)
        self.rows: list[Ints] = np.split(order, starts[1:])
        n = found.size
        dense = np.searchsorted(found, cluster)
        self.weight = np.bincount(dense, sizes, n).astype(np.int64)
        used, first = np.unique(media, return_index=True)
        whole = ~cut[used]
        self.own = np.bincount(dense[rows[first[whole]]], use.patches[used[whole]], n).astype(np.int64)
        self.plain = np.ones(n, np.bool_)  # without media
        self.plain[dense[rows]] = False

        self.cuts: list[list[int]] = [[] for _ in range(n)]
        shared = cut[media]
        for q, u in np.unique(np.stack((dense[rows[shared]], media[shared]), axis=1), axis=0).tolist():
            self.cuts[q].append(u)
        # how many ranks a medium takes by its weight; what takes all of them has no influence
        self.worth = {u: -(-int(need[u]) // self.limit) for u in np.flatnonzero(cut).tolist()}
        self.worth = {u: k for u, k in self.worth.items() if k < ranks}
        self.need = need
        self.hosts = {u: np.zeros(ranks, np.bool_) for u in np.flatnonzero(cut).tolist()}
        self.bound = np.array([any(u in self.worth for u in cuts) for cuts in self.cuts], np.bool_)
        self.divided = np.zeros(n, np.bool_)

        self.mean = max(total / ranks, 1)
        self.mean_vision = max(int(use.patches[used].sum()) / ranks, 1)
        self.text, self.vision = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
        self.rank = np.zeros(n, np.int64)

    def run(self) -> Ints:
        self._place()
        self._fill()
        self._level()
        home = np.zeros(self.sizes.size, np.int64)
        for rank, rows in zip(self.rank.tolist(), self.rows, strict=True):
            home[rows] = rank
        return home

    def _clusters(self, media: Ints, rows: Ints) -> tuple[Ints, Bools, Ints]:
        """The cluster of each row (one of its rows), whether a medium is in several, and the tokens of its rows.

        Media of few tokens join their rows first. One that would make a cluster heavier than a rank's worth joins
        nothing: a logo on every image, or a group that takes more than one rank.
        """
        count = np.bincount(media, minlength=self.use.patches.size)
        need = np.bincount(media, self.sizes[rows], self.use.patches.size).astype(np.int64)
        ends = np.cumsum(count).tolist()
        flat, load = rows.tolist(), self.sizes.tolist()
        parent = list(range(len(load)))
        cut = np.zeros(count.size, np.bool_)
        for u in np.lexsort((np.arange(need.size), need)).tolist():
            roots = set()
            for row in flat[ends[u] - int(count[u]) : ends[u]]:
                while parent[row] != row:
                    parent[row] = row = parent[parent[row]]
                roots.add(row)
            joint = sum(load[root] for root in roots)
            if joint > self.limit and len(roots) > 1:
                cut[u] = True
            elif roots:
                first = min(roots)
                load[first] = joint
                for root in roots:
                    parent[root] = first
        cluster = np.array(parent, np.int64)
        while (further := cluster[cluster]).tolist() != cluster.tolist():
            cluster = further
        return cluster, cut, need

    def _place(self) -> None:
        """Clusters with media, the heaviest first; those that a heavy medium holds together come one after another."""
        keys = []
        for q in np.flatnonzero(~self.plain).tolist():
            heavy = max(((int(self.need[u]), -u) for u in self.cuts[q] if u in self.worth), default=(0, 0))
            keys.append((-max(heavy[0], int(self.weight[q])), -heavy[1], -int(self.weight[q]), q))
        for *_, q in sorted(keys):
            new = self._new_patches(q)
            text = self.text + self.weight[q]
            cost = np.maximum(text / self.mean, (self.vision + new) / self.mean_vision)
            strange = np.zeros(self.ranks, np.int64)  # patches of media that are on enough ranks already, not on this
            for u in self.cuts[q]:
                if u in self.worth and self.hosts[u].sum() >= self.worth[u]:
                    strange += np.where(self.hosts[u], 0, self.use.patches[u] + 1)
            above = np.maximum(text - self.limit, 0)
            self._put(q, int(np.lexsort((text, cost, strange, above))[0]), new)

    def _fill(self) -> None:
        """Rows without media, longest first, to the rank with the fewest tokens."""
        heap = [(load, rank) for rank, load in enumerate(self.text.tolist())]
        heapify(heap)
        plain = np.flatnonzero(self.plain)
        for q in plain[np.argsort(-self.weight[plain], kind="stable")].tolist():
            load, rank = heap[0]
            heapreplace(heap, (load + int(self.weight[q]), rank))
            self.rank[q] = rank
        for load, rank in heap:
            self.text[rank] = load

    def _new_patches(self, q: int) -> Ints:
        """[ranks] what cluster q would add."""
        new = np.full(self.ranks, self.own[q])
        for u in self.cuts[q]:
            new += np.where(self.hosts[u], 0, self.use.patches[u])
        return new

    def _put(self, q: int, rank: int, new: Ints) -> None:
        self.rank[q] = rank
        self.text[rank] += self.weight[q]
        self.vision[rank] += new[rank]
        for u in self.cuts[q]:
            self.hosts[u][rank] = True

    # -- down to the limit ---------------------------------------------------------------------------------------------

    def _level(self) -> None:
        """The fullest rank gives to the emptiest until none is above the limit, or no row fits between them."""
        for _ in range(8 * self.ranks):  # each step serves a rank; a few times round is enough
            a, b = int(np.argmax(self.text)), int(np.argmin(self.text))
            if self.text[a] <= self.limit:
                return
            free = ~(self.bound | self.divided)
            if not (self._exchange(a, b, free) or self._divide(a, b) or self._exchange(a, b, np.ones_like(free))):
                return

    def _window(self, a: int, b: int) -> tuple[int, int, int]:
        """How many tokens to move from a to b: at least, ideally, at most; b stays within the limit."""
        most = min(int(self.limit - self.text[b]), int(self.text[a] - self.text[b]) - 1)
        return min(int(self.text[a] - self.limit), most), min(int(self.text[a] - self.text[b]) // 2, most), most

    def _exchange(self, a: int, b: int, free: Bools) -> bool:
        """A cluster of a for one of b, or for none, if enough tokens move and patches stay balanced."""
        least, ideal, most = self._window(a, b)
        mine = np.flatnonzero(free & (self.rank == a))
        theirs = np.flatnonzero(free & (self.rank == b))
        moved = self.weight[mine][:, None] - np.append(self.weight[theirs], 0)[None]
        patches = self.own[mine][:, None] - np.append(self.own[theirs], 0)[None]
        allowed = max(int(self.vision[a]), int(self.vision[b]), int(self.mean_vision))
        good = (moved >= max(least, 1)) & (moved <= most)
        good &= (self.vision[a] - patches <= allowed) & (self.vision[b] + patches <= allowed)
        if not good.any():
            return False
        i, k = divmod(int(np.argmin(np.where(good, abs(moved - ideal), np.iinfo(np.int64).max))), theirs.size + 1)
        self.rank[mine[i]] = b
        if k < theirs.size:
            self.rank[theirs[k]] = a
        for rank, sign in ((a, -1), (b, 1)):
            self.text[rank] += sign * moved[i, k]
            self.vision[rank] += sign * patches[i, k]
        return True

    def _divide(self, a: int, b: int) -> bool:
        """Some rows of one cluster to b, of the cheapest that has enough; no cluster is divided twice."""
        least, ideal, _ = self._window(a, b)
        mine = np.flatnonzero(~(self.bound | self.divided | self.plain) & (self.rank == a))
        best: tuple[int, int, list[int]] = (0, -1, [])
        for q in mine[np.lexsort((-self.weight[mine], self.own[mine]))].tolist():
            chosen = _subset(self.sizes[self.rows[q]].tolist(), ideal)
            moved = int(self.sizes[self.rows[q]][chosen].sum())
            if moved > best[0]:
                best = (moved, q, chosen)
            if moved >= least:
                break
        moved, q, chosen = best
        if not moved:
            return False
        self.rows.append(self.rows[q][chosen])
        self.rows[q] = np.delete(self.rows[q], chosen)
        self.weight[q] -= moved
        self.weight = np.append(self.weight, moved)
        self.own = np.append(self.own, self.own[q])
        self.rank = np.append(self.rank, b)
        self.plain, self.bound = np.append(self.plain, False), np.append(self.bound, False)
        self.divided[q] = True
        self.divided = np.append(self.divided, True)
        self.text[a] -= moved
        self.text[b] += moved
        self.vision[b] += self.own[q]
        return True


def _subset(sizes: Sequence[int], most: int) -> list[int]:
    """Places whose sizes sum to at most ``most``, longest first: of 5, 9, 4 and at most 10, [1]."""
    chosen = []
    for at in sorted(range(len(sizes)), key=lambda at: (-sizes[at], at)):
        if sizes[at] <= most:
            chosen.append(at)
            most -= sizes[at]
    return chosen


# -- bins that exist already -------------------------------------------------------------------------------------------


def trade(micro: Ints, sizes: Ints, home: Ints, use: MediaUse, ranks: int, most: Ints, layout: str) -> Ints:
    """The micro-batch ``j * ranks + rank`` of each row, after rows have gone home.

    Each takes the place of a row of about its size that has no reason to stay. ``most`` [bins] is what a bin may come
    to: packed, the sum of its rows, padded, each of them. Micro-batches keep their number of rows.

    Two ranks, rows 0 to 3 in a bin each, rows 0 and 1 with an image and at home on rank 0; the others have none::

        >>> use, sizes = MediaUse(np.array([0, 1]), np.array([0, 0]), np.array([16])), np.array([90, 89, 80, 79])
        >>> trade(np.arange(4), sizes, np.array([0, 0, 1, 1]), use, 2, np.full(4, 90), "packed").tolist()
        [0, 2, 1, 3]
    """
    n = sizes.size
    tied = np.zeros(n, np.bool_)
    tied[use.rows] = True
    at, target = micro.tolist(), np.where(tied, home, -1).tolist()
    length, limit = sizes.tolist(), most.tolist()
    load = np.bincount(micro, sizes, most.size).astype(np.int64).tolist() if layout == "packed" else None
    away: list[list[int]] = [[] for _ in range(ranks)]  # of each rank, rising, size * n + row
    for row in np.argsort(sizes, kind="stable").tolist():
        if at[row] % ranks != target[row]:
            away[at[row] % ranks].append(length[row] * n + row)
    for row in np.flatnonzero(tied)[np.argsort(-sizes[tied], kind="stable")].tolist():
        here, there = at[row] % ranks, target[row]
        if here == there:
            continue
        entry, others = length[row] * n + row, away[there]
        near = bisect_left(others, entry)
        for k in (near + step for step in _STEPS):
            if not 0 <= k < len(others):
                continue
            other = others[k] % n
            more = length[other] - length[row]
            b, c = at[row], at[other]
            if load is None:
                fits = length[other] <= limit[b] and length[row] <= limit[c]
            else:
                fits = (more <= 0 or load[b] + more <= limit[b]) and (more >= 0 or load[c] - more <= limit[c])
            if fits:
                if load is not None:
                    load[b] += more
                    load[c] -= more
                at[row], at[other] = c, b
                del away[here][bisect_left(away[here], entry)]
                moved = others.pop(k)
                if target[other] != here:
                    insort(away[here], moved)
                break
    return np.array(at, np.int64)


def bring_together(micro: Ints, sizes: Ints, use: MediaUse, ranks: int) -> Ints:
    """The micro-batch ``j * ranks + rank`` of each row, after rows of equal size on one rank have changed places.

    Those of a medium are near each other then, and no micro-batch has become larger or smaller.

    Four rows of one size in micro-batches 0, 1, 0, 1 of one rank, rows 0 and 1 with an image::

        >>> use = MediaUse(np.array([0, 1]), np.array([0, 0]), np.array([16]))
        >>> bring_together(np.array([0, 1, 0, 1]), np.full(4, 7), use, ranks=1).tolist()
        [0, 0, 1, 1]
    """
    # the rarest medium of a row says where it belongs: its group's image rather than a logo
    uses = np.bincount(use.media, minlength=use.patches.size)
    first = np.full(sizes.size, np.iinfo(np.int64).max)
    np.minimum.at(first, use.rows, uses[use.media] * use.patches.size + use.media)
    slots = np.lexsort((micro, sizes, micro % ranks))
    rows = np.lexsort((np.arange(sizes.size), first, sizes, micro % ranks))
    out = np.empty_like(micro)
    out[rows] = micro[slots]
    return out
