"""Everything about a micro-batch that is known before its bytes are read.

Where each row's bytes lie in the store is worked out once per mini-batch; where they go, and where each field begins
in the arena, when it is a micro-batch's turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from knit_data.frame import MASKS, ROWS, Frame
from knit_data.infos import Array
from knit_data.layout import Slots, lay_out
from knit_data.ops.fill import Spec
from knit_data.planning import Layout, Padding
from knit_data.share import Share
from knit_data.store.ranges import Ranges

_NOTHING = np.uint64(xxhash.xxh3_64_intdigest(b""))


class Sheet(NamedTuple):
    """One micro-batch, to be read. Its arrays belong to the blueprint, which may write the same into them again."""

    rows: range  # of the share's table
    slots: Slots
    counts: Mapping[str, int]  # by Field.lead
    at: Mapping[str, int]  # the byte where each field begins
    nbytes: int  # of all fields
    marks: Array  # int64 [n, 3]: start, tokens and kind of loss mask of each row
    spec: Spec
    padded: Array  # int64 [2 * C]: where each column to be padded begins, and its bytes a token
    keys: Sequence[str]
    table: Array  # as in Ranges, row by row and field by field
    sums: Array
    spans: Sequence[tuple[int, int, int, int, int]]  # see Share

    def ranges(self, host: Array) -> Ranges:
        return Ranges(self.keys, [host], self.table, np.arange(len(self.sums) + 1), self.sums)


class Blueprint:
    """Of a rank's part of a mini-batch, for one choice of fields. One thread at a time."""

    def __init__(self, share: Share, frame: Frame, layout: Layout, padding: Padding) -> None:
        self._share, self._frame, self._layout, self._padding = share, frame, layout, padding
        columns, n = share.table.columns, len(share.table)
        lengths, kind = columns["n_tokens"].astype(np.int64), columns["mask_bytes"]
        self._lengths = lengths.tolist()
        self._marks = np.empty((n, 3), np.int64)
        self._marks[:, 1], self._marks[:, 2] = lengths, kind
        # the bytes of every row in every stored field; a loss mask lies in one place, or nowhere
        stored = (frame.mask_bytes == 0) | (kind[:, None] == frame.mask_bytes)
        self._table = np.zeros((n, len(frame.stored), 5), np.int64)
        self._table[:, :, 1] = columns["offsets"][:, frame.columns] * stored
        self._table[:, :, 2] = np.where(frame.by_token, lengths[:, None], 1) * (frame.item_bytes * stored)
        self._sums = np.where(stored, columns["checksums"][:, frame.columns], _NOTHING)

    def sheet(self, j: int) -> Sheet:
        share, frame = self._share, self._frame
        first, last = share.ptr[j], share.ptr[j + 1]
        n, rows = last - first, range(first, last)
        slots = lay_out(self._lengths[first:last], self._layout, self._padding)
        spans = share.spans(rows) if share.stand_ins else []
        media = sum(length for *_, length, _ in spans)
        counts = {"slots": slots.total, "rows": n, "ends": len(slots.cu_seqlens), "media": media}
        at, nbytes = frame.place(counts)
        marks, table = self._marks[first:last], self._table[first:last]
        marks[:, 0] = slots.starts
        which, keys = share.segments(rows)
        table[:, :, 0] = np.array(which, np.int64)[:, None]
        places = table[:, :, 4]
        np.multiply(slots.starts[:, None], frame.token_bytes, places)
        places += np.array([at[f.name] for f in frame.stored])
        if frame.stores_values:
            places += np.arange(n)[:, None] * frame.value_bytes
        spec = Spec(
            slots.total,
            at["input_ids"],
            frame["input_ids"].item_bytes,
            self._padding.token_id,
            at.get(MASKS, -1),
            at["loss_mask"],
            at["labels"],
            at[ROWS],
            at["position_ids"] if frame.own_positions else -1,
            at.get("attention_mask", -1),
            self._layout == "packed",
        )
        padded = np.array([n for f in frame.padded for n in (at[f.name], f.item_bytes)], np.int64)
        sums = self._sums[first:last].reshape(-1)
        table = table.reshape(-1, 5)
        return Sheet(rows, slots, counts, at, nbytes, marks, spec, padded, keys, table, sums, spans)
