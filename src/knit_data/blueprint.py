"""Everything about a rank's micro-batches that is known before their bytes are read.

Made once per mini-batch, for all its micro-batches together: where each field begins in its arena, where each row's
bytes lie in the store and where they go. What is left to do for one micro-batch takes slices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from knit_data.frame import MASKS, ROWS, Frame
from knit_data.infos import Array
from knit_data.layout import lay_out
from knit_data.ops.fill import Spec
from knit_data.planning import Layout, Padding
from knit_data.share import Share
from knit_data.store.ranges import Ranges

_NOTHING = np.uint64(xxhash.xxh3_64_intdigest(b""))


@dataclass(frozen=True, eq=False)
class Sheet:
    """One micro-batch, to be read."""

    rows: range  # of the share's table
    at: Mapping[str, int]  # the byte where each field begins
    nbytes: int  # of all fields
    total: int  # slots
    shape: tuple[int, ...]  # (T,) or (B, L)
    starts: Array  # [n] slot of each row's first token
    marks: Array  # int64 [n, 3]: start, tokens and kind of loss mask of each row
    extents: Array  # where positions restart, from 0 to total
    cu_seqlens: Array  # int32
    longest: int
    spec: Array  # int64: of ops.fill.Spec
    padded: Array  # int64 [C, 2]: where columns to be padded begin, and their bytes a token
    keys: Sequence[str]
    table: Array  # as in Ranges, row by row and field by field
    sums: Array
    own_bytes: int  # of the rows' stored fields
    shown_bytes: int  # of their media, once for each trajectory that shows them

    def ranges(self, host: Array) -> Ranges:
        return Ranges(self.keys, [host], self.table, np.arange(len(self.sums) + 1), self.sums)


class Blueprint:
    """For one choice of fields."""

    def __init__(self, share: Share, frame: Frame, layout: Layout, padding: Padding) -> None:
        columns, ptr = share.table.columns, np.asarray(share.ptr, np.int64)
        self._ptr, self._names = share.ptr, frame.names
        lengths, kind = columns["n_tokens"].astype(np.int64), columns["mask_bytes"]
        counts, n = np.diff(ptr), len(lengths)
        which = np.repeat(np.arange(len(counts)), counts)
        self._slots = slots = lay_out(lengths, share.ptr, layout, padding)
        spans = share.table.ragged["spans"]
        placed = np.concatenate([[0], np.cumsum(spans.data[:, 2])])[spans.ptr]  # media slots before each row
        at, self._sizes = frame.place(
            slots.totals, counts, np.diff(slots.cu_seqlens_ptr), placed[ptr[1:]] - placed[ptr[:-1]]
        )
        self._at = at.tolist()
        self._shapes = [
            (total,) if layout == "packed" else (rows, total // rows)
            for rows, total in zip(slots.rows.tolist(), slots.totals.tolist(), strict=True)
        ]
        self._specs = np.array([self._spec(frame, j, layout, padding) for j in range(len(counts))], np.int64)
        self._padded = np.zeros((len(counts), len(frame.padded), 2), np.int64)
        self._padded[:, :, 0] = at[:, [frame.names.index(f.name) for f in frame.padded]]
        self._padded[:, :, 1] = [f.item_bytes for f in frame.padded]
        self._marks = np.stack([slots.starts, lengths, kind], axis=1, dtype=np.int64)

        # the bytes of every row in every stored field; a loss mask lies in one place, or nowhere
        stored = (frame.mask_bytes == 0) | (kind[:, None] == frame.mask_bytes)
        local = np.arange(n) - ptr[which]
        lead = np.where(frame.by_token, slots.starts[:, None], local[:, None])
        sizes = np.where(frame.by_token, lengths[:, None], 1) * frame.row_bytes
        self._table = table = np.zeros((n, len(frame.stored), 5), np.int64)
        table[:, :, 1] = np.where(stored, columns["offsets"][:, frame.columns], 0)
        table[:, :, 2] = np.where(stored, sizes, 0)
        table[:, :, 4] = lead * frame.row_bytes + at[which][:, frame.stored_at]
        self._sums = np.where(stored, columns["checksums"][:, frame.columns], _NOTHING)
        segment, keys = share.segments
        used, inverse = np.unique(which * len(keys) + segment, return_inverse=True)  # pairs of micro-batch and segment
        edges = np.searchsorted(used, np.arange(len(counts) + 1) * len(keys))
        table[:, :, 0] = (inverse.reshape(-1) - edges[which])[:, None]
        named = [keys[k % len(keys)] for k in used.tolist()]
        self._keys = [named[a:b] for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]

        own, shown = table[:, :, 2].sum(axis=1), self._shown_bytes(share)
        own, shown = (np.concatenate([[0], np.cumsum(part)])[ptr] for part in (own, shown))
        self._own, self._shown = np.diff(own).tolist(), np.diff(shown).tolist()

    def _spec(self, frame: Frame, j: int, layout: Layout, padding: Padding) -> Spec:
        at = dict(zip(frame.names, self._at[j], strict=True))
        return Spec(
            int(self._slots.totals[j]),
            at["input_ids"],
            frame["input_ids"].item_bytes,
            padding.token_id,
            at.get(MASKS, -1),
            at["loss_mask"],
            at["labels"],
            at[ROWS],
            at["position_ids"] if frame.own_positions else -1,
            at.get("attention_mask", -1),
            layout == "packed",
        )

    @staticmethod
    def _shown_bytes(share: Share) -> Array:
        """Per row the bytes of its media, each once."""
        spans, sizes, n = share.table.ragged["spans"], share.media_bytes, len(share.table)
        if not len(spans.data):
            return np.zeros(n, np.int64)
        pairs = np.unique(np.repeat(np.arange(n), spans.lengths) * len(sizes) + spans.data[:, 0])
        out: Array = np.bincount(pairs // len(sizes), sizes[pairs % len(sizes)], n).astype(np.int64)
        return out

    def sheet(self, j: int) -> Sheet:
        first, last, slots = self._ptr[j], self._ptr[j + 1], self._slots
        sums = self._sums[first:last].reshape(-1)
        return Sheet(
            range(first, last),
            dict(zip(self._names, self._at[j], strict=True)),
            int(self._sizes[j]),
            int(slots.totals[j]),
            self._shapes[j],
            slots.starts[first:last],
            self._marks[first:last],
            slots.extents[slots.extents_ptr[j] : slots.extents_ptr[j + 1]],
            slots.cu_seqlens[slots.cu_seqlens_ptr[j] : slots.cu_seqlens_ptr[j + 1]],
            int(slots.longest[j]),
            self._specs[j],
            self._padded[j],
            self._keys[j],
            self._table[first:last].reshape(-1, 5),
            sums,
            self._own[j],
            self._shown[j],
        )
