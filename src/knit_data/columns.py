"""Where the bytes of a rank's rows lie in the store, and where each micro-batch wants them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xxhash

from knit_data.frame import Frame
from knit_data.infos import Array
from knit_data.layout import Slots
from knit_data.share import Share
from knit_data.store.ranges import Ranges

_NOTHING = np.uint64(xxhash.xxh3_64_intdigest(b""))


class StoredColumns:
    """The stored fields of all rows of one mini-batch; made once for its micro-batches."""

    def __init__(self, share: Share, frame: Frame) -> None:
        columns, self._share, self._frame = share.table.columns, share, frame
        n, self.count = len(share.table), len(frame.stored)
        lengths, kind = columns["n_tokens"].astype(np.int64)[:, None], columns["mask_bytes"][:, None]
        sizes = np.where(frame.by_token, lengths, 1) * frame.row_bytes
        stored = (frame.mask_bytes == 0) | (kind == frame.mask_bytes)  # a loss mask lies in one place, or nowhere
        self._segments, self._keys = share.segments
        self._table = np.zeros((n, self.count, 5), np.int64)
        self._table[:, :, 1] = np.where(stored, columns["offsets"][:, frame.columns], 0)
        self._table[:, :, 2] = np.where(stored, sizes, 0)
        self._sums = np.where(stored, columns["checksums"][:, frame.columns], _NOTHING)

    def ranges(self, j: int, slots: Slots, at: Mapping[str, int], host: Array) -> Ranges:
        """Of micro-batch j, row by row and field by field: one unit each."""
        first, last = self._share.ptr[j], self._share.ptr[j + 1]
        used, which = np.unique(self._segments[first:last], return_inverse=True)
        begins, frame = np.array([at[f.name] for f in self._frame.stored], np.int64), self._frame
        table = self._table[first:last].copy()
        table[:, :, 0] = which.reshape(-1, 1)
        rows = np.arange(last - first)
        table[:, :, 4] = np.where(frame.by_token, slots.starts[:, None], rows[:, None]) * frame.row_bytes + begins
        sums = self._sums[first:last].reshape(-1)
        keys = [self._keys[k] for k in used.tolist()]
        return Ranges(keys, [host], table.reshape(-1, 5), np.arange(len(sums) + 1), sums)
