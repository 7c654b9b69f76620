"""The media of one micro-batch: each distinct one read once per rank and mini-batch, and where its features go.

Media stay on the host, each in memory of its own: the encoder moves what it needs when it needs it, and may need it
once more for its backward. Recently used ones are kept by content, so that a later pass or mini-batch reads nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, reduce
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from knit_data.arena import ALIGN, ArenaPool, capacity
from knit_data.blueprint import Sheet
from knit_data.errors import CorruptData, InvalidArgument, KnitError, ShortRead
from knit_data.infos import Array
from knit_data.ops import pack, scatter_segments
from knit_data.ops.dispatch import must_be_tensors
from knit_data.pixels import finish
from knit_data.recent import Recent
from knit_data.share import Share
from knit_data.store.head import torch_dtype
from knit_data.store.ranges import Outcome, Ranges, read_verified
from knit_data.store.store import TrajectoryStore

CACHE_BYTES = 1 << 27  # host memory for media that may be used again; what goes leaves its place to the next ones


@dataclass(frozen=True, eq=False)
class Medium:
    """One distinct medium with its tensors, on the host."""

    digest: str
    tensors: Mapping[str, Tensor]
    tokens: int
    patches: int
    kind: str
    held: int  # bytes of host memory that go with it


_NO_SLOTS = torch.zeros(0, dtype=torch.int64, device="cpu")  # never written to
_NO_SEGMENTS = torch.zeros(0, 4, dtype=torch.int64, device="cpu")


@dataclass(frozen=True, eq=False)
class MediaBatch:
    """``micro.media``: what a micro-batch uses, what of it is new here, and where features go.

    Two images of 2 and 3 features, in a packed micro-batch with placeholders at 1-2 (the first), 7-9 (the second) and
    13-14 (the first again): ``digests`` names two, ``n_tokens`` is 7, ``pieces`` are (0, 0, 2), (1, 0, 3), (0, 0, 2),
    ``segments`` [0, 0, 2, 1], [0, 2, 3, 7], [0, 5, 2, 13], ``slots`` [1, 2, 7, 8, 9, 13, 14]. A backbone's input is
    ``micro.media.put(embeddings, encoder(micro))``.

    An encoder runs for ``new`` only; ``None`` stands for a medium whose bytes are corrupt, all users of which are
    masked. ``patches`` has, for every rank, the cost of each medium that is new there in this micro-batch: ranks which
    must make the same number of calls find it out from there.
    """

    digests: tuple[str, ...] = ()
    fresh: tuple[Medium | None, ...] = ()  # see new
    pieces: tuple[tuple[int, int, int], ...] = ()  # which of digests, its first feature, how many; in token order
    slots: Tensor = _NO_SLOTS  # [n_tokens] among B * L or T
    segments: Tensor = _NO_SEGMENTS  # the same as kd.ops take it, on the host: [pieces, 4]
    total: int = 0  # slots of the micro-batch: B * L or T
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

    def enter(self, visit: object) -> None:
        """Which pass it is handed out in. A micro-batch is handed out once, so nobody has seen it before."""
        object.__setattr__(self, "visit", visit)

    @property
    def new(self) -> tuple[Medium | None, ...]:
        """What this rank meets here for the first time in its pass over the mini-batch; None: corrupt."""
        self.marks.add("features")
        return self.fresh

    @property
    def forgotten(self) -> bool:
        """The model got placeholders, and nobody asked for what belongs there."""
        return bool(self.pieces) and self.marks == {"inputs"}

    def put(self, embeddings: Tensor, features: Tensor | Sequence[Tensor], level: int | None = None) -> Tensor:
        """A copy of ``embeddings``, ``[..., d]`` of all slots of the micro-batch, with features ``[n_tokens, d]`` in
        their places and in its dtype; both get gradients.

        Of several levels (deepstack) ``level`` says which of them. Without media ``features`` are what the encoder
        returns then, whatever that is. By hand it is ``kd.ops.scatter_segments(embeddings.view(-1, d), features,
        micro.media.segments)``.
        """
        levels: Sequence[Any] = features if isinstance(features, list | tuple) else [features]
        must_be_tensors("put", embeddings, *levels)
        if embeddings.ndim < 2 or math.prod(embeddings.shape[:-1]) != self.total:
            raise InvalidArgument(
                f"put: needs embeddings of the micro-batch's {self.total} slots, [T, d] or [B, L, d], found "
                f"{[*embeddings.shape]}."
            )
        if level is None and len(levels) > 1:
            raise InvalidArgument(f"put: features have {len(levels)} levels; say which of them with level=.")
        wanted, at = (self.n_tokens, embeddings.shape[-1]), level or 0
        if at >= len(levels) or levels[at].shape != wanted:
            if not self.pieces:  # [0, 1] before any medium was encoded
                return embeddings.clone()
            raise InvalidArgument(
                f"put: needs features {[*wanted]} of level {at} for embeddings {[*embeddings.shape]}, found levels of "
                f"{[[*one.shape] for one in levels]}."
            )
        flat: Tensor = scatter_segments(embeddings.flatten(0, -2), levels[at].to(embeddings.dtype), self.segments)
        return flat.view(embeddings.shape)

    @cached_property
    def n_tokens(self) -> int:
        """Rows of this micro-batch's features."""
        return sum(n for _, _, n in self.pieces)


Taken = tuple[tuple["Medium | None", ...], "Medium | None"]
Pieces = list[tuple[int, int, int, int]]


@dataclass(eq=False)
class MediaPlan:
    """Media to read, one unit of ranges each, and those that need no reading."""

    digests: Sequence[str]  # of all that was asked for
    found: dict[str, Medium]  # what needs no reading; later what came, too
    rows: list[int] = field(default_factory=list)  # of share.table.media: what is to be read
    made: list[Medium] = field(default_factory=list)  # one for each: its memory is there, its bytes are to come
    keys: list[str] = field(default_factory=list)
    outs: list[Array] = field(default_factory=list)
    table: list[tuple[int, int, int, int]] = field(default_factory=list)  # medium, first byte, how many, where they go
    units: list[int] = field(default_factory=lambda: [0])  # where in it each medium begins, and the end
    sums: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """To be read."""
        return sum(size for _, _, size, _ in self.table)

    def ranges(self) -> Ranges:
        table = [(k, start, size, k, at) for k, start, size, at in self.table]
        units, sums = np.array(self.units), np.array(self.sums, np.uint64)
        return Ranges(self.keys, self.outs, np.array(table, np.int64).reshape(-1, 5), units, sums)


class MediaReader:
    """What a rank reads of its media: names the ranges, and takes what came. One thread at a time."""

    def __init__(self, store: TrajectoryStore, on_corrupt: str, pinned: bool) -> None:
        self._store, self._on_corrupt, self._pinned = store, on_corrupt, pinned
        self._pool = ArenaPool()
        self._kept = Recent[Medium](lambda medium: medium.held)
        self._bad = WeakKeyDictionary[Share, dict[int, KnitError]]()
        self._more = list[Outcome]()

    def plan(self, share: Share, j: int) -> MediaPlan:
        """The reads that micro-batch j needs: what is new in it and not kept, or a stand-in."""
        rows = share.new_media[j]
        if not rows and self._keeps_step(share, j):
            rows = share.stand_ins[:1]
        return self._plan(share, rows)

    def take(self, share: Share, j: int, plan: MediaPlan, errors: Mapping[int, KnitError]) -> Taken:
        """What is new in micro-batch j, after the plan was read, and the stand-in if this rank needs it there."""
        self._settle(share, plan, errors)
        new = tuple(plan.found.get(digest) for digest in plan.digests) if share.new_media[j] else ()
        if not self._keeps_step(share, j) or any(m is not None for m in new):
            return new, None
        for u in share.stand_ins:
            if (stand_in := self._read_one(share, u)) is not None:
                return new, stand_in
        if len(share.stand_ins) < share.stats["distinct_media"]:
            raise CorruptData(
                f"{self._store.url}: all media that this rank could encode to keep step with the others are corrupt, "
                f"the mini-batch's {len(share.stand_ins)} smallest too: {next(iter(self._bad[share].values()))}. "
                "Restore the files."
            )
        return new, None  # no rank has any that is whole: none encodes

    def more(self) -> list[Outcome]:
        """Of reads that ``take`` made beyond its plan, since this was asked last."""
        out, self._more = self._more, []
        return out

    def corrupt_rows(self, share: Share, sheet: Sheet) -> list[int]:
        """Which rows of a micro-batch, counted from 0, use a medium that was found corrupt in it or before."""
        bad = self._bad.get(share)
        return sorted({row for row, u, *_ in sheet.spans if share.same[u] in bad}) if bad else []

    # -- inside -----------------------------------------------------------------------------------------------------

    def _keeps_step(self, share: Share, j: int) -> bool:
        """Whether some rank of several encodes in micro-batch j."""
        return len(share.patches[j]) > 1 and any(map(bool, share.patches[j]))

    def _plan(self, share: Share, rows: Sequence[int]) -> MediaPlan:
        media, bad = share.table.media, self._bad.get(share, {})
        digests = [media.columns["digest"][u].tobytes().hex() for u in rows]
        plan = MediaPlan(digests, self._kept.found(digests))
        for u, digest in zip(rows, digests, strict=True):
            if digest not in plan.found and u not in bad:
                self._add(plan, share, u, digest)
        return plan

    def _add(self, plan: MediaPlan, share: Share, u: int, digest: str) -> None:
        media, cells, number = share.table.media, share.table.media.columns, len(plan.rows)
        end, places = 0, list[int]()
        for start, size in media.ragged["extents"].row(u).tolist():
            plan.table.append((number, start, size, end))
            places.append(end)
            end += -(-size // ALIGN) * ALIGN
        host, owner = self._lease(end)
        tensors = {}
        for at, (name, dtype, shape, items) in zip(places, _parts(media.ragged["parts"].row(u).tobytes()), strict=True):
            tensors[name] = owner[at : at + items * dtype.itemsize].view(dtype).view(shape)
        kind, tokens, patches = media.ragged["kind"].text(u), int(cells["tokens"][u]), int(cells["patches"][u])
        plan.rows.append(u)
        plan.made.append(Medium(digest, tensors, tokens, patches, kind, capacity(end)))
        plan.keys.append(self._store.segment_key(share.names[int(cells["writer"][u])], int(cells["segment"][u])))
        plan.outs.append(host)
        plan.units.append(len(plan.table))
        plan.sums.append(cells["checksum"][u])

    def _lease(self, nbytes: int) -> tuple[Array, Tensor]:
        if not self._pinned:
            return self._pool.lease(nbytes)
        # torch's own pinned memory: it knows by events when copies that the encoder queued have read it
        owner = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return owner.numpy(), owner

    def _settle(self, share: Share, plan: MediaPlan, errors: Mapping[int, KnitError]) -> None:
        """Keeps what came; what is corrupt is noted, or raised."""
        for n, (u, medium) in enumerate(zip(plan.rows, plan.made, strict=True)):
            if n in errors:
                self._judge(share, u, errors[n])
                continue
            plan.found[medium.digest] = medium
            self._kept.put(medium.digest, medium, CACHE_BYTES)

    def _read_one(self, share: Share, u: int) -> Medium | None:
        plan = self._plan(share, [u])
        (digest,) = plan.digests
        if plan.rows:
            outcome = read_verified(self._store.backend, plan.ranges())
            self._more.append(outcome)
            self._settle(share, plan, outcome.errors)
        return plan.found.get(digest)

    def _judge(self, share: Share, u: int, error: KnitError) -> None:
        if not isinstance(error, CorruptData | ShortRead):
            raise error
        if self._on_corrupt != "mask":
            raise CorruptData(
                f"{self._store.url}: medium {u} of this mini-batch: {error}; the trajectories that use it cannot be "
                "trained on. Restore the file, or pass on_corrupt='mask'."
            )
        self._bad.setdefault(share, {})[u] = error


def pieces_of(share: Share, sheet: Sheet, masked: Sequence[int]) -> tuple[Pieces, frozenset[int]]:
    """Where features go, masked rows left out, in token order: (row of ``share.table.media``, first feature, how many,
    first slot); and the placeholder ids there.

    A medium of 5 features with spans (3, 2) and (9, 3): pieces (u, 0, 2, 3) and (u, 2, 3, 9).
    """
    out, ids, done = Pieces(), set[int](), 0
    if not sheet.spans:
        return out, frozenset()
    starts, same, tokens = sheet.slots.starts.tolist(), share.same, share.table.media.columns["tokens"]
    for row, u, start, length, token in sheet.spans:
        if row in masked:
            continue
        out.append((same[u], done, length, starts[row] + start))
        done = (done + length) % int(tokens[u])  # a medium's spans follow each other, not always in token order
        ids.add(token)
    return sorted(out, key=itemgetter(3)), frozenset(ids)


def inputs_of(media: Sequence[Medium], device: torch.device) -> dict[str, Tensor]:
    """What ``encode`` gets: images of uint8 pixels finished, each tensor concatenated over media on dim 0."""
    finished = [finish(m.tensors, device) for m in media]
    names = finished[0].keys()
    for m, tensors in zip(media, finished, strict=True):
        if tensors.keys() != names:
            raise InvalidArgument(
                f"media of one micro-batch have different tensors: {sorted(names)} ({media[0].kind}) and "
                f"{sorted(tensors)} ({m.kind}); an encoder takes one kind, so train on them in runs of their own."
            )
    try:
        return {name: pack(_promoted([tensors[name] for tensors in finished])) for name in names}
    except InvalidArgument as e:
        found = [{name: f"{x.dtype} {list(x.shape)}" for name, x in tensors.items()} for tensors in finished]
        raise InvalidArgument(
            f"media {[m.digest[:12] for m in media]} cannot be concatenated on dim 0, they are {found}. Store tensors "
            f"that differ in dim 0 only, of a dtype that can be moved ({e})"
        ) from e


def _promoted(tensors: Sequence[Tensor]) -> list[Tensor]:
    """In the dtype that holds all of them."""
    kind = reduce(torch.promote_types, (x.dtype for x in tensors))
    return [x.to(kind) for x in tensors]


@lru_cache(maxsize=1024)
def _parts(text: bytes) -> list[tuple[str, torch.dtype, tuple[int, ...], int]]:
    """Name, dtype, shape and items of each tensor of a medium, as a media table tells them."""
    return [(name, torch_dtype(code), tuple(shape), math.prod(shape)) for name, code, shape in json.loads(text)]
