"""Where each token of a micro-batch's trajectories stands, and the cumulative lengths that follow.

Pure arithmetic on lengths. Slots are numbered through: packed 0 to T - 1, padded b * L + t.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from knit_data.infos import Array
from knit_data.planning import Layout, Padding


class Slots(NamedTuple):
    """n rows: token t of row i stands at slot ``starts[i] + t``."""

    starts: Array  # int64 [n]
    shape: tuple[int, ...]  # (T,) or (B, L), B at least 1
    total: int  # T, or B * L
    extents: Array  # int64, where positions restart: begins with 0 and ends with the total
    cu_seqlens: Array
    longest: int  # of the extents, padding included


def lay_out(lengths: Sequence[int], layout: Layout, padding: Padding) -> Slots:
    """Slots of rows of so many tokens; without rows there are two tokens of padding.

    Packed, ``sequence_to=4, total_to=8``, lengths [5, 3]: extents [0, 8, 12, 16], starts [0, 8], T = 16, cu_seqlens as
    the extents. Padded: L = 8, starts [0, 8], extents [0, 8, 16], cu_seqlens [0, 5, 8].
    """
    n, to = len(lengths), padding.sequence_to  # plain lists: of some dozens of rows they are faster than arrays
    up = [-(-length // to) * to for length in lengths or [2]]
    longest = max(up)
    if layout == "padded":
        total = longest * len(up)
        extents = np.arange(0, total + 1, longest)
        ends = np.array([0, *accumulate(lengths or up)])
        return Slots(extents[:n], (len(up), longest), total, extents, ends, longest)
    edges = [0, *accumulate(up)]
    done = edges[-1]
    total = -(-done // padding.total_to) * padding.total_to
    if done < total:
        edges.append(total)  # padding at the end is an extent of its own
    extents = np.array(edges)
    return Slots(extents[:n], (total,), total, extents, extents, max(longest, total - done))


def restarts(positions: Array, rows: Array, n: int) -> bool:
    """Whether positions alone tell trajectories apart: rising by one inside each, and not into the next."""
    if positions.ndim > 2 or positions.size != len(rows):
        return True  # several axes: the caller adds the row that does
    steps, inside = np.diff(positions.reshape(-1)), (rows[:-1] == rows[1:]) & (rows[:-1] < n)
    begins = (rows[:-1] != rows[1:]) & (rows[1:] < n)
    return bool((steps[inside] == 1).all() and not (steps[begins] == 1).any())
