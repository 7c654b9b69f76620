"""Where each token of a rank's trajectories stands in its micro-batch, and the cumulative lengths that follow.

Pure arithmetic on lengths, for all micro-batches of a mini-batch at once. Slots are numbered through: packed 0 to
T - 1, padded b * L + t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from knit_data.infos import Array
from knit_data.planning import Layout, Padding


@dataclass(frozen=True, eq=False)
class Slots:
    """N rows in J micro-batches: token t of row i stands at slot ``starts[i] + t`` of its own."""

    lengths: Array  # [N] tokens
    starts: Array  # [N]
    rows: Array  # [J] of the padded layout: B, at least 1
    totals: Array  # [J]: T, or B * L
    extents: Array  # where positions restart, micro-batch by micro-batch; each begins with 0 and ends with its total
    extents_ptr: Array  # [J + 1]
    cu_seqlens: Array  # int32, micro-batch by micro-batch
    cu_seqlens_ptr: Array  # [J + 1]
    longest: Array  # [J] the longest extent, padding included


def lay_out(lengths: Array, ptr: Sequence[int], layout: Layout, padding: Padding) -> Slots:
    """Slots of micro-batches with rows ``ptr[j]`` to ``ptr[j + 1] - 1``; one without rows gets two tokens of padding.

    Packed, ``sequence_to=4, total_to=8``, lengths [5, 3] in one micro-batch: extents 8 and 4, starts [0, 8], T = 16,
    cu_seqlens [0, 8, 12, 16]. Padded: L = 8, starts [0, 8], cu_seqlens [0, 5, 8].
    """
    bounds = np.asarray(ptr, np.int64)
    counts, real = np.diff(bounds), np.ones(len(lengths), bool)
    if (empty := counts == 0).any():
        real = np.insert(real, bounds[:-1][empty], False)
        lengths = np.insert(lengths, bounds[:-1][empty], 2)
        counts = np.maximum(counts, 1)
    edges = np.concatenate([[0], np.cumsum(counts)])
    first, last, which = edges[:-1], edges[1:] - 1, np.repeat(np.arange(len(counts)), counts)
    up = -(-lengths // padding.sequence_to) * padding.sequence_to
    if layout == "padded":
        width = np.maximum.reduceat(up, first)
        up, totals = width[which], width * counts
    else:
        totals = -(-np.add.reduceat(up, first) // padding.total_to) * padding.total_to
    ends = np.cumsum(up)
    begins = ends - up
    starts = begins - begins[first][which]
    done = starts[last] + up[last]
    beyond = done < totals  # padding at the end is an extent of its own
    extents_ptr = np.concatenate([[0], np.cumsum(counts + 1 + beyond)])
    extents = np.zeros(extents_ptr[-1], np.int64)
    extents[extents_ptr[which] + np.arange(len(up)) - first[which]] = starts
    extents[extents_ptr[:-1] + counts] = done
    extents[extents_ptr[1:] - 1] = totals
    cu_seqlens, cu_seqlens_ptr = extents, extents_ptr
    if layout == "padded":
        sizes = np.where(real, lengths, up)
        sums = np.cumsum(sizes)
        cu_seqlens_ptr = edges + np.arange(len(edges))
        cu_seqlens = np.zeros(cu_seqlens_ptr[-1], np.int64)
        cu_seqlens[np.arange(len(up)) + which + 1] = sums - (sums - sizes)[first][which]
    return Slots(
        lengths[real],
        starts[real],
        counts,
        totals,
        extents,
        extents_ptr,
        cu_seqlens.astype(np.int32),
        cu_seqlens_ptr,
        np.maximum(np.maximum.reduceat(up, first), totals - done),
    )


def restarts(positions: Array, rows: Array, n: int) -> bool:
    """Whether positions alone tell trajectories apart: rising by one inside each, and not into the next."""
    if positions.ndim > 2 or positions.size != len(rows):
        return True  # several axes: the caller adds the row that does
    steps, inside = np.diff(positions.reshape(-1)), (rows[:-1] == rows[1:]) & (rows[:-1] < n)
    begins = (rows[:-1] != rows[1:]) & (rows[1:] < n)
    return bool((steps[inside] == 1).all() and not (steps[begins] == 1).any())
