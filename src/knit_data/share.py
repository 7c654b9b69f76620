"""One rank's part of a mini-batch: made on global rank 0 from the plan, received by everyone else.

A share is all that a rank needs to read and lay out its micro-batches: its rows with their byte ranges, where each
micro-batch begins, and the counts over all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from knit_data.affinity import MediaUse
from knit_data.background import Latest
from knit_data.exchange import END, SHARE, Exchange
from knit_data.groups import REASONS
from knit_data.infos import InfoTable, MediaTable
from knit_data.ledger import Entry
from knit_data.planning import Layout, Padding, Plan, plan
from knit_data.sampler import Admitted, QuotaSampler
from knit_data.staleness import statistics
from knit_data.store.catalogue import Catalogue

_STAND_INS = 4
_NO_MEDIA = MediaUse(*(np.zeros(0, np.int64) for _ in range(3)))
_NO_ENCODES = {
    **dict.fromkeys(("encodes", "naive_encodes", "distinct_media", "ranks_per_medium"), 0.0),
    "vision_imbalance": 1.0,
}


@dataclass(frozen=True)
class Numbers:
    """Of one mini-batch, over all data-parallel ranks."""

    index: int
    train_batch: int
    epoch: int
    position: int
    is_last: bool
    loss_tokens: int
    n_trajectories: int
    n_groups: int


@dataclass(frozen=True, eq=False)
class Share:
    """``table[ptr[j]:ptr[j + 1]]`` are the rows of this rank's micro-batch j."""

    numbers: Numbers
    rank: int  # among the data-parallel ones
    table: InfoTable
    ptr: tuple[int, ...]
    patches: tuple[tuple[tuple[int, ...], ...], ...]  # [count][ranks]: of each medium that is new there, in order
    token_ids: tuple[int, ...]  # placeholders of the media of this mini-batch and those before it
    stand_ins: tuple[
        int, ...
    ]  # rows of table.media: the mini-batch's smallest, for ranks that have none when others do
    names: Mapping[int, str]  # writer number -> folder name
    stats: Mapping[str, float]
    entry: Entry
    finite: bool  # the end of the stream was known: whether there is more needs no waiting

    @property
    def count(self) -> int:
        return len(self.ptr) - 1

    @cached_property
    def same(self) -> list[int]:
        """Per row of ``table.media`` the first that has the same content: segments each hold their own copy."""
        first = dict[bytes, int]()
        digests = self.table.media.columns["digest"].tobytes()
        cells = [digests[at : at + 32] for at in range(0, len(digests), 32)]
        return [first.setdefault(digest, u) for u, digest in enumerate(cells)]

    @cached_property
    def new_media(self) -> tuple[tuple[int, ...], ...]:
        """Per micro-batch the media that this rank meets there first, one row of ``table.media`` each, in order."""
        spans, same = self.table.ragged["spans"], self.same
        if not len(spans.data):
            return ((),) * self.count
        used, ends = [same[u] for u in spans.data[:, 0].tolist()], spans.ptr[np.asarray(self.ptr)].tolist()
        out, met = [], set[int]()
        for begin, end in pairwise(ends):
            new = [u for u in dict.fromkeys(used[begin:end]) if u not in met]
            met.update(new)
            out.append(tuple(new))
        return tuple(out)

    @cached_property
    def _segments(self) -> tuple[list[int], list[str]]:
        """Per row which segment holds it, and the segments' keys."""
        columns, number = self.table.columns, dict[tuple[int, int], int]()
        places = zip(columns["writer"].tolist(), columns["segment"].tolist(), strict=True)
        which = [number.setdefault(place, len(number)) for place in places]
        return which, [Catalogue.segment_key(self.names[w], s) for w, s in number]

    def segments(self, rows: range) -> tuple[list[int], list[str]]:
        """The same of these rows and the segments that hold them."""
        which, keys = self._segments
        mine = which[rows.start : rows.stop]
        number = {segment: k for k, segment in enumerate(dict.fromkeys(mine))}
        return [number[segment] for segment in mine], [keys[segment] for segment in number]

    def spans(self, rows: range) -> list[tuple[int, int, int, int, int]]:
        """Of these rows, counted from 0: row, medium, start, length, and the id that stands there."""
        spans = self.table.ragged["spans"]
        ptr = spans.ptr[rows.start : rows.stop + 1].tolist()
        data = iter(spans.data[ptr[0] : ptr[-1]].tolist())
        return [(row, *next(data)) for row, (a, b) in enumerate(pairwise(ptr)) for _ in range(a, b)]

    @cached_property
    def mask_kinds(self) -> frozenset[int]:
        """Bytes a token of the loss masks that are stored; 0: some trajectory has none."""
        return frozenset(self.table.columns["mask_bytes"].tolist())

    @cached_property
    def media_bytes(self) -> list[int]:
        """Stored bytes per row of ``table.media``."""
        extents = self.table.media.ragged["extents"]
        sizes = extents.data[:, 1].tolist()
        return [sum(sizes[a:b]) for a, b in pairwise(extents.ptr.tolist())]

    def to_bytes(self) -> bytes:
        note = {
            "numbers": asdict(self.numbers),
            "rank": self.rank,
            "ptr": self.ptr,
            "patches": self.patches,
            "token_ids": self.token_ids,
            "stand_ins": self.stand_ins,
            "names": list(self.names.items()),
            "stats": dict(self.stats),
            "finite": self.finite,
        }
        return SHARE + self.table.to_bytes(f"{json.dumps(note)}\n{self.entry.text}")

    @classmethod
    def from_bytes(cls, data: bytes) -> Share:
        table, text = InfoTable.from_bytes(data[1:])
        note, entry = map(json.loads, text.split("\n"))
        return cls(
            Numbers(**note["numbers"]),
            note["rank"],
            table,
            tuple(note["ptr"]),
            tuple(tuple(map(tuple, row)) for row in note["patches"]),
            tuple(note["token_ids"]),
            tuple(note["stand_ins"]),
            dict(note["names"]),
            note["stats"],
            Entry.from_json(entry),
            note["finite"],
        )


@dataclass(frozen=True)
class End:
    """No mini-batch any more; what became of the groups that were not trained. ``dropped`` is by reason, see groups."""

    left_over: int
    dropped: Mapping[str, int]
    unseen: bool  # next() had handed this mini-batch out before the end was known: on every rank it is empty


class Lead:
    """Global rank 0: admits, plans, and gives every rank its share."""

    def __init__(
        self,
        sampler: QuotaSampler,
        exchange: Exchange,
        max_tokens: int,
        layout: Layout,
        padding: Padding,
        beside: bool = False,
    ) -> None:
        self.sampler, self.exchange = sampler, exchange
        self.max_tokens, self.layout, self.padding = max_tokens, layout, padding
        self._names: dict[int, str] = {}
        self._token_ids = set[int]()  # of all media so far
        # where a thread reads ahead, no mini-batch waits until launchers are told; elsewhere there are no threads
        self._demands = Latest(sampler.write_demand, "knit-demand") if beside else None
        sampler.hand_over = self._demands.give if self._demands else None

    def __call__(self, i: int, timeout: float, needed: bool) -> Share | End | None:
        """Mini-batch i, or None if it cannot be admitted within ``timeout`` seconds. An error reaches all ranks."""
        try:
            admitted = self.sampler.admit(timeout, needed)
            if admitted is None:
                return None
            shares = self._shares(admitted)
        except StopIteration:
            self._tell()
            end = End(self.sampler.left_over(), self.sampler.dropped(), self.exchange.was_late(i))
            self.exchange.publish(i, [END + json.dumps(asdict(end)).encode()])
            return end
        except BaseException as e:
            self.exchange.publish_error(i, e)
            raise
        self.exchange.publish(i, [s.to_bytes() for s in shares] if self.exchange.world > 1 else [])
        return shares[self.exchange.dp_rank]

    def tend(self) -> None:
        """Between admissions, so that launchers know what has come."""
        self.sampler.tend()

    def close(self) -> None:
        self._tell()
        self.sampler.hand_over = None

    def _tell(self) -> None:
        """The last demand is written."""
        if self._demands is not None:
            self._demands.close()

    def _shares(self, admitted: Admitted) -> list[Share]:
        mini = admitted.mini
        columns = mini.table.columns
        # ascending place, so that rows which lie together are read together
        order = np.lexsort((columns["item"], columns["segment"], columns["writer"]))
        as_they_stand = not len(mini.table.media) and bool((order == np.arange(len(order))).all())
        table = mini.table if as_they_stand else mini.table.take(order)
        columns, ranks, use = table.columns, self.exchange.dp_size, media_use(table)
        made = plan(
            columns["n_tokens"],
            ranks=ranks,
            max_tokens=self.max_tokens,
            layout=self.layout,
            padding=self.padding,
            alone=self.sampler.policy.oversize == "alone",
            media=use,
        )
        loss_tokens = int(columns["loss_tokens"].sum())
        numbers = Numbers(
            mini.index,
            mini.train_batch,
            mini.epoch,
            mini.position,
            mini.is_last,
            loss_tokens,
            len(table),
            mini.n_groups,
        )
        clock = self.sampler.sizes.clock
        stats = statistics(
            columns["policy_version"],
            columns["mean_policy_version"],
            index=mini.index,
            train_batch=mini.train_batch,
            clock=clock,
        )
        stats = {**stats, **_counts(table, made), **_encodes(table, use, made), **_dropped(admitted.entry.dropped)}
        stats["waiting_groups"] = float(self.sampler.left_over())
        names, patches = self._names_of(table), _new_patches(use, made)
        self._token_ids.update(table.ragged["spans"].data[:, 3].tolist())
        token_ids = tuple(sorted(self._token_ids - {-1}))
        shares = []
        for rank in range(ranks):
            rows = [made.rows_of(rank, j) for j in range(made.count)]
            mine, stand_ins = _with_stand_ins(table.take(np.concatenate(rows)), table.media)
            shares.append(
                Share(
                    numbers,
                    rank,
                    mine,
                    tuple(accumulate(map(len, rows), initial=0)),
                    patches,
                    token_ids,
                    stand_ins,
                    names,
                    stats,
                    admitted.entry,
                    admitted.finite,
                )
            )
        return shares

    def _names_of(self, table: InfoTable) -> dict[int, str]:
        for writer in set(table.columns["writer"].tolist()) - self._names.keys():
            claim = self.sampler.stream.store.claim(writer)
            self._names[writer] = claim["name"] if claim else str(writer)
        return dict(self._names)


class Follow:
    """Every other rank: receives its share."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def tend(self) -> None:
        """Rank 0 does."""

    def close(self) -> None:
        """Nothing is held."""

    def __call__(self, i: int, _timeout: float, _needed: bool) -> Share | End | None:
        message = self.exchange.receive(i)
        if message is None:
            return None
        if message[:1] == END:
            return End(**json.loads(message[1:]))
        return Share.from_bytes(message)


def _counts(table: InfoTable, made: Plan) -> dict[str, float]:
    """Tokens, padding, and how evenly they lie: 1.0 is a perfect balance over ranks at every micro-batch."""
    tokens = made.tokens.reshape(made.count, made.ranks)
    real, padded = int(table.columns["n_tokens"].sum()), int(tokens.sum())
    return {
        "tokens": float(real),
        "padded_tokens": float(padded),
        "micro_batches": float(made.count),
        "padding_micro_batches": float(made.n_padding),
        "truncated": float(table.columns["cut"].sum()),
        "imbalance": float(tokens.max(axis=1).sum() * made.ranks / max(padded, 1)),
    }


def _dropped(counts: Mapping[str, int]) -> dict[str, float]:
    return {f"dropped/{reason}": float(counts.get(reason, 0)) for reason in REASONS}


def _with_stand_ins(mine: InfoTable, media: MediaTable) -> tuple[InfoTable, tuple[int, ...]]:
    """The rank's rows with the smallest of all ``media`` beside its own, and where those stand.

    Several, because one may turn out to be corrupt.
    """
    if not len(media):
        return mine, ()
    distinct, _ = media.distinct()
    smallest = distinct[np.argsort(media.columns["patches"][distinct], kind="stable")[:_STAND_INS]]
    more = media.take(smallest)
    both = MediaTable.concat([mine.media, more]) if len(mine.media) else more
    return replace(mine, media=both), tuple(range(len(both) - len(more), len(both)))


def media_use(table: InfoTable) -> MediaUse:
    """Which row uses which medium, span by span; media of equal digest are one, wherever they are stored."""
    if not len(table.media):
        return _NO_MEDIA
    first, number = table.media.distinct()
    spans = table.ragged["spans"]
    rows = np.repeat(np.arange(len(table)), spans.lengths)
    return MediaUse(rows, number[spans.data[:, 0]], table.media.columns["patches"][first])


def _encodes(table: InfoTable, use: MediaUse, made: Plan) -> dict[str, float]:
    """How often media are encoded, once per rank that uses them, and how often they would be trajectory by trajectory.

    A trajectory that shows an image twice counts twice there: its spans are together twice as long as the medium.
    """
    if not use.rows.size:
        return _NO_ENCODES
    rank = np.empty(len(table), np.int64)
    rank[made.rows] = np.repeat(np.arange(made.tokens.size) % made.ranks, np.diff(made.ptr))
    on = use.on(rank, made.ranks)
    vision = use.patches @ on
    encodes, distinct = int(on.sum()), int(on.any(axis=1).sum())
    spans = table.ragged["spans"].data
    pair = use.media * len(table) + use.rows
    _, first, inverse = np.unique(pair, return_index=True, return_inverse=True)
    shown = np.bincount(inverse.reshape(-1), spans[:, 2], first.size)
    whole = table.media.columns["tokens"][spans[first, 0]]
    return {
        "encodes": float(encodes),
        "naive_encodes": float(np.ceil(shown / whole).sum()),
        "distinct_media": float(distinct),
        "ranks_per_medium": encodes / distinct,
        "vision_imbalance": float(vision.max() * made.ranks / vision.sum()) if vision.sum() else 1.0,
    }


def _new_patches(use: MediaUse, made: Plan) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Per micro-batch and rank, the cost of each medium that this rank has not met before, by first use."""
    if not use.rows.size:
        return (((),) * made.ranks,) * made.count
    place, bins = np.empty_like(made.rows), np.empty_like(made.rows)
    place[made.rows] = np.arange(made.rows.size)
    bins[made.rows] = np.repeat(np.arange(made.tokens.size), np.diff(made.ptr))
    order = np.argsort(place[use.rows], kind="stable")  # by micro-batch, row and span
    media, where = use.media[order], bins[use.rows[order]]
    _, first = np.unique(media * made.ranks + where % made.ranks, return_index=True)
    first.sort()
    new: list[list[int]] = [[] for _ in range(made.tokens.size)]
    for b, cost in zip(where[first].tolist(), use.patches[media[first]].tolist(), strict=True):
        new[b].append(cost)
    return tuple(tuple(map(tuple, new[at : at + made.ranks])) for at in range(0, len(new), made.ranks))
