"""Where each token stands in a micro-batch, and the cumulative lengths that follow.

Pure arithmetic on lengths and arrays. Slots are numbered through: packed 0 to T - 1, padded b * L + t.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from knit_data.infos import Array
from knit_data.planning import Layout, Padding


@dataclass(frozen=True)
class Slots:
    """Where each trajectory stands: slot ``starts[i] + t`` is token t of row i. Padded slots are b * L + t."""

    lengths: Array  # [n] tokens
    starts: Array  # [n]
    extents: Array  # [n] slots, padding included
    total: int
    shape: tuple[int, ...]  # (T,) or (B, L)

    @property
    def full(self) -> bool:
        return int(self.lengths.sum()) == self.total


def lay_out(lengths: Array, layout: Layout, padding: Padding) -> Slots:
    """Slots of one micro-batch. Without trajectories: two tokens of padding.

    Packed, ``sequence_to=4, total_to=8``, lengths [5, 3]: extents [8, 4], starts [0, 8], T = 16. Padded: L = 8.
    """
    n, real = len(lengths), lengths if len(lengths) else np.array([2])
    up = -(-real // padding.sequence_to) * padding.sequence_to
    if layout == "padded":
        width = int(up.max())
        up = np.full(len(real), width)
        shape: tuple[int, ...] = (len(real), width)
        total = len(real) * width
    else:
        total = -(-int(up.sum()) // padding.total_to) * padding.total_to
        shape = (total,)
    return Slots(lengths, (np.cumsum(up) - up)[:n], up, total, shape)


def cumulative(slots: Slots, layout: Layout) -> Array:
    """Packed: padded extents, ending at T. Padded: real lengths, [B + 1]."""
    if layout == "padded":
        lengths = slots.lengths if len(slots.lengths) else slots.extents
        return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ends = np.concatenate([[0], np.cumsum(slots.extents)])
    return (ends if ends[-1] == slots.total else np.append(ends, slots.total)).astype(np.int32)


def restarts(positions: Array, rows: Array, n: int) -> bool:
    """Whether positions alone tell trajectories apart: rising by one inside each, and not into the next."""
    if positions.ndim > 2 or positions.size != len(rows):
        return True  # several axes: the caller adds the row that does
    steps, inside = np.diff(positions.reshape(-1)), (rows[:-1] == rows[1:]) & (rows[:-1] < n)
    begins = (rows[:-1] != rows[1:]) & (rows[1:] < n)
    return bool((steps[inside] == 1).all() and not (steps[begins] == 1).any())
