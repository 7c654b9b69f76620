"""The media of one micro-batch: each distinct one read once per rank and mini-batch, and where its features go.

Media stay on the host, each in memory of its own: the encoder moves what it needs when it needs it, and may need it
once more for its backward. Recently used ones are kept by content, so that a later pass or mini-batch reads nothing.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import torch
import xxhash
from torch import Tensor

from knit_data.arena import ALIGN, ArenaPool, capacity
from knit_data.errors import CorruptData, KnitError, ShortRead
from knit_data.infos import Array, InfoTable
from knit_data.recent import Recent
from knit_data.share import Share
from knit_data.store.backend import Read
from knit_data.store.segment import torch_dtype
from knit_data.store.store import TrajectoryStore

CACHE_BYTES = 1 << 30  # host memory for media that later mini-batches may use again


@dataclass(eq=False)
class Timing:
    """What collating cost, in seconds and bytes, summed up by the loader."""

    read_s: float = 0.0
    verify_s: float = 0.0
    bytes_read: int = 0
    masked: int = 0


@dataclass(frozen=True, eq=False)
class Medium:
    """One distinct medium with its tensors, on the host."""

    digest: str
    tensors: Mapping[str, Tensor]
    tokens: int
    patches: int
    kind: str
    held: int  # bytes of host memory that go with it


@dataclass(frozen=True, eq=False)
class MediaBatch:
    """``micro.media``: what a micro-batch uses, what of it is new here, and where features go.

    Two images of 2 and 3 features, in a packed micro-batch with placeholders at 1-2 (the first), 7-9 (the second) and
    13-14 (the first again): ``digests`` names two, ``n_tokens`` is 7, ``pieces`` are (0, 0, 2), (1, 0, 3), (0, 0, 2)
    and ``slots`` [1, 2, 7, 8, 9, 13, 14]. So ``embeddings.view(-1, d)[micro.media.slots] = encoder(micro)``.

    An encoder runs for ``new`` only; ``None`` stands for a medium whose bytes are corrupt, all users of which are
    masked. ``patches`` has, for every rank, the cost of each medium that is new there in this micro-batch: ranks which
    must make the same number of calls find it out from there.
    """

    digests: tuple[str, ...] = ()
    fresh: tuple[Medium | None, ...] = ()  # see new
    pieces: tuple[tuple[int, int, int], ...] = ()  # which of digests, its first feature, how many; in token order
    slots: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # [n_tokens] among B * L or T
    token_ids: frozenset[int] = frozenset()  # what stands at these slots; -1: several ids in one span
    patches: tuple[tuple[int, ...], ...] = ()  # [ranks]
    rank: int = 0  # which of them is this one
    stand_in: Medium | None = None  # to encode where others have new media and this rank has none; None: nobody has
    position: int = 0  # which micro-batch of its mini-batch
    mini: object = None  # the mini-batch, by identity
    visit: object = None  # the pass over it, by identity
    expected: frozenset[int] = frozenset()  # placeholder ids of the whole mini-batch
    marks: set[str] = field(default_factory=set)  # what was taken: "inputs" of the model, "features" or new media

    def __len__(self) -> int:
        return len(self.digests)

    @property
    def new(self) -> tuple[Medium | None, ...]:
        """What this rank meets here for the first time in its pass over the mini-batch; None: corrupt."""
        self.marks.add("features")
        return self.fresh

    @property
    def forgotten(self) -> bool:
        """The model got placeholders, and nobody asked for what belongs there."""
        return bool(self.pieces) and self.marks == {"inputs"}

    @cached_property
    def n_tokens(self) -> int:
        """Rows of this micro-batch's features."""
        return sum(n for _, _, n in self.pieces)


class MediaReader:
    """Reads the media of micro-batches. One thread at a time."""

    def __init__(self, store: TrajectoryStore, on_corrupt: str, timing: Timing) -> None:
        self._store, self._on_corrupt, self._timing = store, on_corrupt, timing
        self._pool = ArenaPool()
        self._kept = Recent[Medium](lambda medium: medium.held)
        self._bad = WeakKeyDictionary[Share, dict[int, KnitError]]()

    def read(self, share: Share, j: int) -> tuple[tuple[Medium | None, ...], Medium | None]:
        """What is new in micro-batch j, and the stand-in if this rank needs it there."""
        new = self._media(share, share.new_media[j])
        if len(share.patches[j]) == 1 or not any(share.patches[j]) or any(m is not None for m in new):
            return new, None
        for u in share.stand_ins:
            if (stand_in := self._media(share, [u])[0]) is not None:
                return new, stand_in
        if len(share.stand_ins) < share.stats["distinct_media"]:
            raise CorruptData(
                f"{self._store.url}: all media that this rank could encode to keep step with the others are corrupt, "
                f"the mini-batch's {len(share.stand_ins)} smallest too: {next(iter(self._bad[share].values()))}. "
                "Restore the files."
            )
        return new, None  # no rank has any that is whole: none encodes

    def corrupt_rows(self, share: Share, table: InfoTable) -> list[int]:
        """Rows of the micro-batch read last that use a medium which was found corrupt in this mini-batch."""
        bad = self._bad.get(share)
        if not bad:
            return []
        spans = table.ragged["spans"]
        return [i for i in range(len(table)) if any(u in bad for u in share.same[spans.row(i)[:, 0]].tolist())]

    # -- inside -----------------------------------------------------------------------------------------------------

    def _media(self, share: Share, rows: Sequence[int]) -> tuple[Medium | None, ...]:
        media, bad = share.table.media, self._bad.get(share, {})
        digests = [media.columns["digest"][u].tobytes().hex() for u in rows]
        found = self._kept.found(digests)
        absent = [(u, d) for u, d in zip(rows, digests, strict=True) if d not in found and u not in bad]
        for medium in self._fetch(share, absent):
            found[medium.digest] = medium
            self._kept.put(medium.digest, medium, CACHE_BYTES)
        return tuple(found.get(d) for d in digests)

    def _fetch(self, share: Share, wanted: Sequence[tuple[int, str]]) -> list[Medium]:
        """One read for all; what is corrupt is noted, or raised."""
        media, reads, made = share.table.media, [], []
        for u, digest in wanted:
            extents = media.ragged["extents"].row(u)
            sizes = extents[:, 1]
            begins = np.concatenate([[0], np.cumsum(-(-sizes // ALIGN) * ALIGN)]).tolist()
            arena, owner = self._pool.lease(begins[-1])
            writer, segment = int(media.columns["writer"][u]), int(media.columns["segment"][u])
            key = self._store.segment_key(share.names[writer], segment)
            parts = [arena[b : b + n] for b, n in zip(begins, sizes.tolist(), strict=False)]
            jobs = [Read(key, at, part.data) for at, part in zip(extents[:, 0].tolist(), parts, strict=True)]
            made.append((u, digest, key, owner, begins, parts, len(jobs)))
            reads += jobs
        began = time.perf_counter()
        errors = iter(self._store.backend.read_into(reads))
        self._timing.read_s += time.perf_counter() - began
        self._timing.bytes_read += sum(len(r.out) for r in reads)
        began, out = time.perf_counter(), []
        for u, digest, key, owner, begins, parts, count in made:
            answers = list(itertools.islice(errors, count))  # all of this medium's, whichever failed
            error = next((e for e in answers if e is not None), None)
            error = error or _verified(parts, int(media.columns["checksum"][u]))
            if error is None:
                out.append(_medium(share, u, digest, owner, begins))
            else:
                self._judge(share, u, key, error)
        self._timing.verify_s += time.perf_counter() - began
        return out

    def _judge(self, share: Share, u: int, key: str, error: KnitError) -> None:
        if not isinstance(error, CorruptData | ShortRead):
            raise error
        if self._on_corrupt != "mask":
            raise CorruptData(
                f"{self._store.url}: {key}: medium {u} of this mini-batch: {error}; the trajectories that use it "
                "cannot be trained on. Restore the file, or pass on_corrupt='mask'."
            )
        self._bad.setdefault(share, {})[u] = error


def pieces_of(share: Share, table: InfoTable, starts: Array, masked: Sequence[int]) -> tuple[Array, Array]:
    """Where features go, masked rows left out: ``[S, 4]`` (row of ``share.table.media``, first feature, how many, first
    slot) in token order, and the placeholder id of each.

    A medium of 5 features with spans (3, 2) and (9, 3): pieces (u, 0, 2, 3) and (u, 2, 3, 9).
    """
    spans = table.ragged["spans"]
    rows = np.repeat(np.arange(len(table)), spans.lengths)
    data = spans.data[~np.isin(rows, masked)] if len(masked) else spans.data
    rows = rows[~np.isin(rows, masked)] if len(masked) else rows
    tokens = share.table.media.columns["tokens"]
    first = np.zeros(len(data), np.int64)
    if (data[:, 2] != tokens[data[:, 0]]).any():  # some medium has several spans
        done = 0
        for k, (u, _, length, _) in enumerate(data.tolist()):
            first[k] = done
            done = (done + length) % int(tokens[u])
    slots = starts[rows] + data[:, 1]
    out = np.stack([share.same[data[:, 0]], first, data[:, 2], slots], axis=1)
    order = np.argsort(slots, kind="stable")
    return out[order], data[order, 3]


def slots_of(pieces: Array) -> Array:
    """Each slot of these pieces: (u, 0, 2, 7), (u, 2, 1, 20) -> [7, 8, 20]."""
    lengths = pieces[:, 2]
    ends = np.cumsum(lengths)
    out: Array = np.arange(int(ends[-1])) if len(ends) else np.zeros(0, np.int64)
    out += np.repeat(pieces[:, 3] - (ends - lengths), lengths)
    return out


def _medium(share: Share, u: int, digest: str, owner: Tensor, begins: Sequence[int]) -> Medium:
    media, tensors = share.table.media, {}
    for begin, (name, code, shape) in zip(begins, json.loads(media.ragged["parts"].text(u)), strict=False):
        dtype = torch_dtype(code)
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        tensors[name] = owner[begin : begin + size].view(dtype).view(shape)
    cells = media.columns
    kind, held = media.ragged["kind"].text(u), capacity(begins[-1])
    return Medium(digest, tensors, int(cells["tokens"][u]), int(cells["patches"][u]), kind, held)


def _verified(parts: Sequence[Array], wanted: int) -> KnitError | None:
    hasher = xxhash.xxh3_64()
    for part in parts:
        hasher.update(part.data)
    if hasher.intdigest() == wanted:
        return None
    return CorruptData(f"{sum(map(len, parts))} bytes do not match their checksum")
