"""From byte ranges in segments to the tensors of one micro-batch, in one arena.

Every field has its place in the arena, 64-byte aligned. One call reads all ranges straight to where they stay, in the
arena or in a medium's own memory, and verifies them; another writes what stands beside them: positions, labels, masks
and padding. Then one copy moves a micro-batch to its device. Nothing here loops over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from knit_data.arena import ALIGN, Arenas, Delivery
from knit_data.batch import MicroBatch
from knit_data.blueprint import Blueprint, Sheet
from knit_data.errors import CorruptData, InvalidArgument, InvalidTrajectory, KnitError, ShortRead
from knit_data.frame import MASKS, MODEL, ROWS, SLOTS, Field, Frame, part
from knit_data.infos import Array
from knit_data.layout import restarts
from knit_data.media import MediaBatch, MediaPlan, MediaReader, Pieces, Taken, pieces_of
from knit_data.ops.fill import BLANK, fill_slots
from knit_data.ops.tables import table_of
from knit_data.planning import Layout, Padding
from knit_data.share import Share
from knit_data.store.ranges import Outcome, Ranges, read_verified
from knit_data.store.store import TrajectoryStore
from knit_data.tracing import span


@dataclass(eq=False)
class Timing:
    """What collating cost, in seconds and bytes, summed up by the loader.

    ``bytes_logical``: were every trajectory to carry its own media. ``bytes_unique``: each medium once per rank and
    mini-batch. ``bytes_read``: from the store, without what was still in memory.
    """

    read_s: float = 0.0
    verify_s: float = 0.0
    copy_s: float = 0.0
    bytes_logical: int = 0
    bytes_unique: int = 0
    bytes_read: int = 0
    masked: int = 0

    def counts(self) -> dict[str, float]:
        return dict(vars(self))


@dataclass(frozen=True, eq=False)
class Prepared:
    """A micro-batch, and what the consumer's thread has to do when it takes it."""

    micro: MicroBatch
    delivery: Delivery
    nbytes: int  # that wait for the consumer with it


@dataclass(eq=False)
class Collator:
    """Builds micro-batches of one layout on one device. One thread at a time."""

    store: TrajectoryStore
    layout: Layout
    padding: Padding
    arenas: Arenas
    fields: frozenset[str] | None
    on_corrupt: str = "raise"
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        self._reader = MediaReader(self.store, self.on_corrupt, self.arenas.pinned)
        self._frames: dict[object, Frame] = {}
        self._share: Share | None = None
        self._blueprints: dict[frozenset[str] | None, tuple[Frame, Blueprint]] = {}  # of this share

    def __call__(self, share: Share, j: int, fields: frozenset[str] | None = None) -> Prepared:
        """Micro-batch j of this share; ``fields`` narrows the loader's own choice for an extra pass."""
        frame, blueprint = self._plan(share, self.fields if fields is None else fields)
        sheet = blueprint.sheet(j)
        stage = self.arenas.stage(sheet.nbytes)
        host, at = stage.host, sheet.at
        with span("knit/read"):
            taken, masked = self._read(share, j, frame, sheet, host)
        with span("knit/fill"):
            self._fill(share, frame, sheet, host, masked)
            pieces, token_ids = pieces_of(share, sheet, masked)
            where, filled = part(host, frame[SLOTS], at, sheet.counts["media"]), 0
            for _, _, n, slot in pieces:
                where[filled : filled + n] = np.arange(slot, slot + n)
                filled += n
            strays = self._without_strays(share, frame, sheet, host, pieces)
            told_apart = self._told_apart(frame, sheet, host)
        with span("knit/copy"):
            copied = self.arenas.copy_s
            model_bytes = sheet.slots.total * frame["input_ids"].item_bytes if strays else 0
            delivery = stage.send(at[MODEL] + -(-model_bytes // ALIGN) * ALIGN)  # whole elements of every type
            self.timing.copy_s += self.arenas.copy_s - copied
        del host, stage, where  # the tensors alone hold the lease
        counts = {**sheet.counts, "media": filled}
        typed = {dtype: delivery.data.view(dtype) for dtype in frame.dtypes}

        def tensor(f: Field) -> Tensor:
            begin = at[f.name] // f.dtype.itemsize
            flat = typed[f.dtype][begin : begin + counts[f.lead] * f.items]
            lead = sheet.slots.shape if f.lead == "slots" and f.name != ROWS else (counts[f.lead],)
            return flat if len(lead) == 1 and not f.shape else flat.view(*lead, *f.shape)

        lengths = sheet.marks[:, 1].copy()  # the blueprint's own, which the next sheet may write to
        micro = MicroBatch(
            tensors={f.name: tensor(f) for f in frame.visible},
            table=share.table,
            begin=sheet.rows.start,
            layout=self.layout,
            max_seqlen=sheet.slots.longest,
            is_last=j + 1 == share.count,
            columns=frame.per_token,
            rows=tensor(frame[ROWS]),
            starts=sheet.slots.starts,
            lengths=lengths,
            longest=int(lengths.max(initial=1)),
            masked=tuple(share.table[sheet.rows[i]].id for i in masked),
            media=self._media(share, j, sheet, pieces, token_ids, tensor(frame[SLOTS]), taken),
            restarts=told_apart,
            model_ids=tensor(frame[MODEL]) if strays else None,
        )
        return Prepared(micro, delivery, sheet.nbytes + sum(medium.held for medium in taken[0] if medium is not None))

    def _plan(self, share: Share, asked: frozenset[str] | None) -> tuple[Frame, Blueprint]:
        if self._share is not share:
            self._share, self._blueprints = share, {}
        if asked not in self._blueprints:
            frame = self._frame(share, asked)
            self._blueprints[asked] = frame, Blueprint(share, frame, self.layout, self.padding)
        return self._blueprints[asked]

    def _frame(self, share: Share, asked: frozenset[str] | None) -> Frame:
        table, masks, models = share.table, share.mask_kinds, bool(share.token_ids)
        key = table.schema, tuple(table.value_names), masks, asked, models
        if (frame := self._frames.get(key)) is None:
            frame = Frame.of(table, self.layout, masks, asked, models)
            ids = np.iinfo(frame["input_ids"].kind)
            if self.padding.token_id > ids.max:
                raise InvalidArgument(
                    f"Padding(token_id={self.padding.token_id}) does not fit input_ids of {ids.dtype}."
                )
            self._frames[key] = frame
        return frame

    # -- reading ----------------------------------------------------------------------------------------------------

    def _read(self, share: Share, j: int, frame: Frame, sheet: Sheet, host: Array) -> tuple[Taken, list[int]]:
        """Everything that micro-batch j needs and that is not in memory; its media, and the rows to mask."""
        columns, plan, n = sheet.ranges(host), self._reader.plan(share, j), len(sheet.sums)
        outcome = read_verified(self.store.backend, Ranges.concat([columns, plan.ranges()]) if plan.rows else columns)
        bad = set[int]()
        for unit, error in outcome.errors.items():
            if unit < n:
                row, column = divmod(unit, len(frame.stored))
                self._judge(share.table[sheet.rows[row]].id, frame.stored[column], error)
                bad.add(row)
        taken = self._reader.take(share, j, plan, {u - n: e for u, e in outcome.errors.items() if u >= n})
        self._count(share, j, sheet, plan, [outcome, *self._reader.more()])
        masked = sorted({*bad, *self._reader.corrupt_rows(share, sheet)})
        self.timing.masked += len(masked)
        return taken, masked

    def _judge(self, name: str, f: Field, error: KnitError) -> None:
        """Returns where the row can be masked."""
        if not isinstance(error, (CorruptData, ShortRead)):
            raise error
        if self.on_corrupt != "mask":
            column = "loss_mask" if f.name == MASKS else f.name
            raise CorruptData(
                f"{self.store.url}: {error}; they are {column} of trajectory {name!r}, which cannot be trained on. "
                "Restore the file, or pass on_corrupt='mask'."
            )

    def _count(self, share: Share, j: int, sheet: Sheet, plan: MediaPlan, outcomes: Sequence[Outcome]) -> None:
        timing, new = self.timing, share.new_media[j]
        timing.read_s += sum(outcome.read_s for outcome in outcomes)
        timing.verify_s += sum(outcome.verify_s for outcome in outcomes)
        timing.bytes_read += sum(outcome.nbytes for outcome in outcomes)
        own = outcomes[0].nbytes - plan.nbytes
        shown = {(row, u) for row, u, *_ in sheet.spans}  # a trajectory that shows an image twice has it once
        timing.bytes_logical += own + sum(share.media_bytes[u] for _, u in shown)
        timing.bytes_unique += own + sum(share.media_bytes[u] for u in new)

    # -- filling ----------------------------------------------------------------------------------------------------

    def _fill(self, share: Share, frame: Frame, sheet: Sheet, host: Array, masked: Sequence[int]) -> None:
        n, at, marks = len(sheet.rows), sheet.at, sheet.marks
        if masked:
            marks = marks.copy()
            marks[masked, 2] = BLANK
        fill_slots(torch.from_numpy(host), marks, sheet.slots.extents, sheet.padded, sheet.spec)
        part(host, frame["cu_seqlens"], at, sheet.counts["ends"])[...] = sheet.slots.cu_seqlens
        if masked and not frame.own_positions:  # zeros would look as if none of these tokens had one before it
            positions = frame["position_ids"]
            for start, tokens, _ in sheet.marks[masked].tolist():
                begin = at["position_ids"] + start * positions.item_bytes
                row = host[begin : begin + tokens * positions.item_bytes].view(positions.kind).reshape(tokens, -1)
                row[...] = np.arange(tokens)[:, None]
        for f in frame.values:
            view = host[at[f.name] : at[f.name] + n * f.item_bytes]
            if f.column is None:
                view.view(f.kind)[...] = share.table.columns[f"value.{f.name}"][sheet.rows.start : sheet.rows.stop]
            elif masked:
                view.reshape(n, -1)[masked] = 0

    def _told_apart(self, frame: Frame, sheet: Sheet, host: Array) -> bool:
        positions = frame["position_ids"]
        if frame.own_positions or positions.shape:
            return True  # ours restart; to several axes the micro-batch adds the row that does
        stored, rows = (part(host, f, sheet.at, sheet.slots.total) for f in (positions, frame[ROWS]))
        return restarts(stored, rows, len(sheet.rows))

    def _media(
        self, share: Share, j: int, sheet: Sheet, pieces: Pieces, token_ids: frozenset[int], at: Tensor, taken: Taken
    ) -> MediaBatch:
        expected, total = frozenset(share.token_ids), sheet.slots.total
        if not share.stand_ins:
            return MediaBatch(total=total, position=j, mini=share, expected=expected)
        if self.padding.token_id in share.token_ids:
            raise InvalidArgument(
                f"Padding(token_id={self.padding.token_id}) is the placeholder of this mini-batch's media: a model "
                "could not tell padding from images. Pass the tokenizer's pad id."
            )
        digests = share.table.media.columns["digest"]
        lengths, slots = [n for _, _, n, _ in pieces], [slot for *_, slot in pieces]
        which = {u: k for k, u in enumerate(sorted({u for u, *_ in pieces}))}
        return MediaBatch(
            digests=tuple(digests[u].tobytes().hex() for u in which),
            fresh=taken[0],
            pieces=tuple((which[u], first, n) for u, first, n, _ in pieces),
            slots=at.view(torch.int64),
            total=total,
            segments=table_of(0, np.cumsum(lengths) - lengths, lengths, slots),
            token_ids=token_ids,
            patches=share.patches[j],
            rank=share.rank,
            stand_in=taken[1],
            position=j,
            mini=share,
            expected=expected,
        )

    def _without_strays(self, share: Share, frame: Frame, sheet: Sheet, host: Array, pieces: Pieces) -> bool:
        """Writes the ids for a model that finds images by their placeholders: a pad id in place of those that were
        sampled. False: there are none.

        A placeholder before the first token with a loss was not sampled: its image got lost.
        """
        if not share.token_ids:
            return False
        at, total, n = sheet.at, sheet.slots.total, len(sheet.rows)
        ids, rows = part(host, frame["input_ids"], at, total), part(host, frame[ROWS], at, total)
        stray = ids == share.token_ids[0]
        for known in share.token_ids[1:]:
            stray |= ids == known
        for _, _, length, slot in pieces:
            stray[slot : slot + length] = False
        if not stray.any() or not (stray := stray & (rows < n)).any():
            return False
        weighed = part(host, frame["loss_mask"], at, total) != 0
        for i in np.unique(rows[stray]).tolist():
            mine = rows == i
            if weighed[mine].any() and (lost := stray[mine][: int(np.argmax(weighed[mine]))].sum()):
                raise InvalidTrajectory(
                    f"trajectory {share.table[sheet.rows[i]].id!r} has {lost} placeholders (ids "
                    f"{sorted(share.token_ids)}) before its first loss token that no medium fills: its images were "
                    "lost between rollout and store. Store them as kd.Media, or take the placeholders out."
                )
        out = part(host, frame[MODEL], at, total)
        out[...] = ids
        out[stray] = self.padding.token_id
        return True
