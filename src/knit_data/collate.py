"""From byte ranges in segments to the tensors of one micro-batch, in one arena.

Every field has its place in the arena, 64-byte aligned; a trajectory's bytes are read straight to where they stay,
and trajectories that lie together in a segment and in the batch are read as one range. Padding, positions, labels
and cumulative lengths are written beside them, so that one copy moves a micro-batch to its device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knit_data.arena import ALIGN, ArenaPool
from knit_data.batch import MicroBatch
from knit_data.errors import CorruptData, InvalidArgument, InvalidTrajectory, KnitError, ShortRead
from knit_data.infos import Array, InfoTable, Schema
from knit_data.layout import Slots, cumulative, labels, lay_out, positions, restarts, spread
from knit_data.media import MediaBatch, MediaReader, Medium, Timing, pieces_of, slots_of
from knit_data.ops import gather_ranges
from knit_data.planning import Layout, Padding
from knit_data.share import Share
from knit_data.store.backend import Read
from knit_data.store.segment import checksum, torch_dtype
from knit_data.store.store import TrajectoryStore

ROWS, MASKS = "\0rows", "\0masks"  # fields of our own; no column can have such a name


@dataclass(eq=False)
class _Place:
    """One field of the arena while it is built."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int = 0
    hidden: bool = False

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class _Draft:
    """An arena being filled, and an array per field."""

    def __init__(self, places: dict[str, _Place], arena: Array, owner: Tensor) -> None:
        self.places, self.arena, self.owner = places, arena, owner
        self.views = {name: _view(arena, place) for name, place in places.items()}


@dataclass(frozen=True, eq=False)
class _Run:
    """Rows from ``first`` on whose bytes of one field lie end to end in a segment, at byte ``at``."""

    name: str
    first: int
    at: int
    places: Array  # where each row's bytes go in the arena
    lengths: Array

    @cached_property
    def nbytes(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def direct(self) -> bool:
        """End to end in the arena too."""
        return bool((self.places[:-1] + self.lengths[:-1] == self.places[1:]).all())


@dataclass(eq=False)
class Collator:
    """Builds micro-batches of one layout on one device. One thread at a time."""

    store: TrajectoryStore
    layout: Layout
    padding: Padding
    device: torch.device
    fields: frozenset[str] | None
    on_corrupt: str = "raise"
    pool: ArenaPool = field(default_factory=ArenaPool)
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        self._reader = MediaReader(self.store, self.on_corrupt, self.timing)

    def __call__(self, share: Share, j: int, fields: frozenset[str] | None = None) -> MicroBatch:
        """Micro-batch j of this share; ``fields`` narrows the loader's own choice for an extra pass."""
        table = share.table.rows(share.ptr[j], share.ptr[j + 1])
        slots = lay_out(table.columns["n_tokens"].astype(np.int64), self.layout, self.padding)
        wanted = self._wanted(table, self.fields if fields is None else fields)
        places = self._places(table, slots, wanted)
        size = 0
        for place in places.values():
            place.at, size = size, -(-(size + place.nbytes) // ALIGN) * ALIGN
        draft = _Draft(places, *self.pool.lease(size))
        new, stand_in = self._reader.read(share, j)
        masked = self._fill(share, table, slots, draft, self._reader.corrupt_rows(share, table))
        pieces, token_ids = pieces_of(share, table, slots.starts, masked)
        at = slots_of(pieces)
        media = self._media(share, j, pieces, token_ids, at, new, stand_in)
        model_ids = self._without_strays(share, table, draft.views, at)
        told_apart = restarts(draft.views["position_ids"], draft.views[ROWS], len(table))
        owner = draft.owner.to(self.device)
        del draft  # its arrays must not outlive this call: the tensors alone hold the lease
        tensors = {n: _tensor(owner, p) for n, p in places.items() if not p.hidden}
        per_token = {f.name for f in table.schema.fields if f.per_token} | {"loss_mask", "position_ids"}
        return MicroBatch(
            tensors,
            tuple(table.infos()),
            self.layout,
            int(np.diff(cumulative(slots, "packed")).max()),
            j + 1 == share.count,
            frozenset(per_token & tensors.keys()),
            _tensor(owner, places[ROWS]),
            tuple(table[i].id for i in masked),
            media,
            told_apart,
            None if model_ids is None else torch.from_numpy(model_ids).to(self.device),
        )

    # -- what and where ---------------------------------------------------------------------------------------------

    def _wanted(self, table: InfoTable, asked: frozenset[str] | None) -> list[str]:
        have = [*table.schema.names, *table.value_names]
        if asked is None:
            return have
        unknown = asked - set(have) - {"labels", "position_ids", "cu_seqlens", "attention_mask"}
        if unknown:
            raise InvalidArgument(f"fields {sorted(unknown)} are not in this store; it has {sorted(have)}.")
        return [name for name in have if name in asked or name in ("input_ids", "loss_mask", "position_ids")]

    def _places(self, table: InfoTable, slots: Slots, wanted: Sequence[str]) -> dict[str, _Place]:
        n = len(table)
        out = [_Place("labels", torch.int64, slots.shape), _Place("loss_mask", torch.float32, slots.shape)]
        out += [_Place("cu_seqlens", torch.int32, (len(cumulative(slots, self.layout)),))]
        out += [_Place(ROWS, torch.int32, (slots.total,), hidden=True)]
        if self.layout == "padded":
            out.append(_Place("attention_mask", torch.int64, slots.shape))
        if "position_ids" not in table.schema.names:
            out.append(_Place("position_ids", torch.int64, slots.shape))
        if (table.columns["mask_bytes"] == 1).any():
            out.append(_Place(MASKS, torch.uint8, (slots.total,), hidden=True))
        for f in table.schema.fields:
            if f.name in wanted:
                lead = slots.shape if f.per_token else (n,)
                out.append(_Place(f.name, torch_dtype(f.dtype), (*lead, *f.shape)))
        for name in table.value_names:
            if name in wanted:
                dtype = torch.from_numpy(table.columns[f"value.{name}"][:0]).dtype
                out.append(_Place(name, dtype, (n,)))
        # wide elements first, only to keep the order stable; every field starts aligned anyway
        return {p.name: p for p in sorted(out, key=lambda p: (p.hidden, -p.dtype.itemsize, p.name))}

    # -- filling ----------------------------------------------------------------------------------------------------

    def _fill(self, share: Share, table: InfoTable, slots: Slots, draft: _Draft, blind: Sequence[int]) -> list[int]:
        """Everything into the arena; the rows that are masked: corrupt ones, and ``blind`` ones, whose media are."""
        views = draft.views
        ids = views["input_ids"]
        if self.padding.token_id > np.iinfo(ids.dtype).max:
            raise InvalidArgument(f"Padding(token_id={self.padding.token_id}) does not fit input_ids of {ids.dtype}.")
        if not slots.full:
            for f in table.schema.fields:
                if f.per_token and f.name in views:
                    views[f.name].view(np.uint8)[...] = 0
            ids.reshape(-1)[...] = self.padding.token_id
        rows = views[ROWS]
        rows[...] = len(table)
        spread(rows, slots, np.arange(len(table)))
        masked = sorted({*self._read(share, table, slots, draft), *blind})
        self.timing.masked += len(masked)
        self._masks(table, slots, views)
        for i in masked:
            self._blank(table.schema, slots, views, i)
        for name in table.value_names:
            if name in views:
                views[name][...] = table.columns[f"value.{name}"]
        labels(views["labels"].reshape(-1), ids.reshape(-1), views["loss_mask"].reshape(-1), rows, len(table))
        views["cu_seqlens"][...] = cumulative(slots, self.layout)
        if "position_ids" not in table.schema.names:
            positions(views["position_ids"].reshape(-1), slots, self.layout)
        if "attention_mask" in views:
            views["attention_mask"].reshape(-1)[...] = rows < len(table)
        return masked

    def _read(self, share: Share, table: InfoTable, slots: Slots, draft: _Draft) -> list[int]:
        """Ranges from the store to their final place, verified. Returns the rows to mask.

        Rows that are neighbours in the file are one read. Where they are neighbours in the arena too it goes straight
        there; else (padding between them) it goes through a scratch arena, and one op moves all its rows.
        """
        keys, runs = self._keys(share, table), list[_Run]()
        for name, column, starts, lengths in self._jobs(table, slots, draft):
            at = table.columns["offsets"][:, column]
            runs += [_Run(name, *run) for run in _neighbours(keys, at, draft.places[name].at + starts, lengths)]
        scratch, owner = self.pool.lease(sum(r.nbytes for r in runs if not r.direct))
        reads, moves, used = [], [], 0
        for run in runs:
            buffer, begin = (draft.arena, int(run.places[0])) if run.direct else (scratch, used)
            reads.append(Read(keys[run.first], run.at, buffer[begin : begin + run.nbytes].data))
            if not run.direct:
                moves.append((used + np.cumsum(run.lengths) - run.lengths, run.places, run.lengths))
                used += run.nbytes
        began = time.perf_counter()
        errors = self.store.backend.read_into(reads)
        if moves:
            gather_ranges(draft.owner, owner, *(torch.from_numpy(np.concatenate(m)) for m in zip(*moves, strict=True)))
        self.timing.read_s += time.perf_counter() - began
        self.timing.bytes_read += sum(r.nbytes for r in runs)
        bad: dict[int, KnitError] = {}
        for error, run in zip(errors, runs, strict=True):
            if error is not None:  # rows before the end of a file that is too short did arrive
                arrived = np.cumsum(run.lengths) <= (error.found if isinstance(error, ShortRead) else -1)
                bad.update(dict.fromkeys((run.first + np.flatnonzero(~arrived)).tolist(), error))
        self._verify(table, runs, draft.arena, bad)
        return self._judge(table, keys, bad)

    def _jobs(self, table: InfoTable, slots: Slots, draft: _Draft) -> list[tuple[str, int, Array, Array]]:
        """Per stored field: its name, its column, and where each row's bytes begin in the field, and how many."""
        names, n, jobs = table.schema.names, len(table), []
        for c, f in enumerate(table.schema.fields):
            if f.name in draft.views:
                rows = (slots.starts, slots.lengths) if f.per_token else (np.arange(n), np.ones(n, np.int64))
                jobs.append((f.name, c, rows[0] * f.row_bytes, rows[1] * f.row_bytes))
        mask_bytes = table.columns["mask_bytes"]
        for width, name in ((1, MASKS), (4, "loss_mask")):
            if (mask_bytes == width).any():
                lengths = np.where(mask_bytes == width, slots.lengths * width, 0)
                jobs.append((name, len(names) - 1, slots.starts * width, lengths))
        return jobs

    def _verify(self, table: InfoTable, runs: Sequence[_Run], arena: Array, bad: dict[int, KnitError]) -> None:
        began = time.perf_counter()
        names, sums = table.schema.names, table.columns["checksums"]
        data = arena.data
        for run in runs:
            column = names.index("loss_mask" if run.name == MASKS else run.name)
            wanted = sums[run.first : run.first + len(run.lengths), column].tolist()
            for i, (place, size, want) in enumerate(
                zip(run.places.tolist(), run.lengths.tolist(), wanted, strict=True)
            ):
                if run.first + i not in bad and checksum(data[place : place + size]) != want:
                    bad[run.first + i] = CorruptData(f"{size} bytes of {names[column]} do not match their checksum")
        self.timing.verify_s += time.perf_counter() - began

    def _judge(self, table: InfoTable, keys: Sequence[str], bad: dict[int, KnitError]) -> list[int]:
        for i, error in bad.items():
            broken = isinstance(error, (CorruptData, ShortRead))
            if self.on_corrupt == "mask" and broken:
                continue
            if not broken:
                raise error
            raise CorruptData(
                f"{self.store.url}: {keys[i]}: {error}; trajectory {table[i].id!r} cannot be trained on. Restore the "
                "file, or pass on_corrupt='mask'."
            )
        return sorted(bad)

    def _keys(self, share: Share, table: InfoTable) -> list[str]:
        cells = zip(table.columns["writer"].tolist(), table.columns["segment"].tolist(), strict=True)
        return [self.store.segment_key(share.names[w], s) for w, s in cells]

    def _media(
        self,
        share: Share,
        j: int,
        pieces: Array,
        token_ids: Array,
        at: Array,
        new: tuple[Medium | None, ...],
        stand_in: Medium | None,
    ) -> MediaBatch:
        expected = frozenset(share.token_ids)
        if not share.stand_ins:
            return MediaBatch(position=j, mini=share, expected=expected)
        if self.padding.token_id in share.token_ids:
            raise InvalidArgument(
                f"Padding(token_id={self.padding.token_id}) is the placeholder of this mini-batch's media: a model "
                "could not tell padding from images. Pass the tokenizer's pad id."
            )
        used, which = np.unique(pieces[:, 0], return_inverse=True)
        digests = tuple(share.table.media.columns["digest"][u].tobytes().hex() for u in used.tolist())
        return MediaBatch(
            digests=digests,
            fresh=new,
            pieces=tuple(zip(which.tolist(), pieces[:, 1].tolist(), pieces[:, 2].tolist(), strict=True)),
            slots=torch.from_numpy(at).to(self.device),
            token_ids=frozenset(token_ids.tolist()),
            patches=share.patches[j],
            rank=share.rank,
            stand_in=stand_in,
            position=j,
            mini=share,
            expected=expected,
        )

    def _without_strays(self, share: Share, table: InfoTable, views: dict[str, Array], at: Array) -> Array | None:
        """The ids for a model that finds images by their placeholders: a pad id in place of those that were sampled.

        None where there are no such. A placeholder before the first token with a loss was not sampled: its image got
        lost.
        """
        if not share.token_ids:
            return None
        ids, rows = views["input_ids"].reshape(-1), views[ROWS]
        stray = np.zeros(len(ids), bool)
        for known in share.token_ids:
            stray |= ids == known
        stray &= rows < len(table)
        stray[at] = False
        if not stray.any():
            return None
        weighed = views["loss_mask"].reshape(-1) != 0
        for i in np.unique(rows[stray]).tolist():
            mine = rows == i
            if weighed[mine].any() and (lost := stray[mine][: int(np.argmax(weighed[mine]))].sum()):
                raise InvalidTrajectory(
                    f"trajectory {table[i].id!r} has {lost} placeholders (ids {sorted(share.token_ids)}) before its "
                    "first loss token that no medium fills: its images were lost between rollout and store. Store them "
                    "as kd.Media, or take the placeholders out."
                )
        out: Array = views["input_ids"].copy()
        out.reshape(-1)[stray] = self.padding.token_id
        return out

    def _masks(self, table: InfoTable, slots: Slots, views: dict[str, Array]) -> None:
        """The loss mask as float32, whichever way it is stored; 0 on padding and corrupt rows."""
        out, kind = views["loss_mask"].reshape(-1), table.columns["mask_bytes"]
        row_kind = np.append(kind, -1)[views[ROWS]]
        if MASKS in views:
            np.copyto(out, views[MASKS] != 0, where=row_kind == 1)
        out[row_kind == 0] = 1.0
        out[row_kind == -1] = 0.0
        out[slots.starts] = 0.0

    def _blank(self, schema: Schema, slots: Slots, views: dict[str, Array], i: int) -> None:
        """A corrupt trajectory: pad ids, zero columns, loss mask 0; its length stays."""
        span = slice(int(slots.starts[i]), int(slots.starts[i] + slots.lengths[i]))
        for f in schema.fields:
            if f.name in views:
                flat = views[f.name].reshape(slots.total if f.per_token else len(views[f.name]), -1)
                flat[span if f.per_token else i] = 0
        views["input_ids"].reshape(-1)[span] = self.padding.token_id
        views["loss_mask"].reshape(-1)[span] = 0


def _view(arena: Array, place: _Place) -> Array:
    kinds: dict[torch.dtype, Any] = {torch.bfloat16: np.int16, torch.bool: np.uint8}
    dtype = kinds.get(place.dtype) or torch.empty(0, dtype=place.dtype).numpy().dtype
    return arena[place.at : place.at + place.nbytes].view(dtype).reshape(place.shape)


def _tensor(owner: Tensor, place: _Place) -> Tensor:
    return owner[place.at : place.at + place.nbytes].view(place.dtype).view(place.shape)


def _neighbours(keys: Sequence[str], at: Array, places: Array, lengths: Array) -> list[tuple[int, int, Array, Array]]:
    """First row, file offset, places and lengths of each run of rows that lie end to end in one file."""
    used = np.flatnonzero(lengths)
    if not len(used):
        return []
    a, b = used[:-1], used[1:]
    joins = (a + 1 == b) & (at[a] + lengths[a] == at[b])
    breaks = [i + 1 for i, near in enumerate(joins.tolist()) if not near or keys[used[i]] != keys[used[i + 1]]]
    edges = pairwise([0, *breaks, len(used)])
    return [(int(used[lo]), int(at[used[lo]]), places[used[lo:hi]], lengths[used[lo:hi]]) for lo, hi in edges]
