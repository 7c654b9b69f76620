"""One optimizer step, as the trainer sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import ClassVar, Protocol

from knit_data.batch import MicroBatch
from knit_data.errors import InvalidArgument, UsageError
from knit_data.groups import REASONS
from knit_data.media import MediaBatch
from knit_data.prefetch import Live, Prefetcher
from knit_data.share import Numbers

_NOTHING = Numbers(-1, -1, -1, -1, False, 0, 0, 0)
_COSTS = (
    *("read_s", "verify_s", "copy_s", "bytes_logical", "bytes_unique", "bytes_read", "masked"),
    *("admit_wait_s", "read_wait_s"),
)
STATS = (
    *_COSTS,
    "wait_s",
    "tokens",
    "padded_tokens",
    "micro_batches",
    "padding_micro_batches",
    "truncated",
    "imbalance",
    *("encodes", "naive_encodes", "distinct_media", "ranks_per_medium", "vision_imbalance"),
    "waiting_groups",
    *(f"dropped/{reason}" for reason in REASONS),
    *(f"staleness/{name}" for name in ("mean", "p99", "max", "token_mean", "steps_mean", "steps_p99")),
    "staleness/signed_steps_mean",
    "staleness/gap_mean",
)


class Owner(Protocol):
    """The loader, as far as its mini-batches need it."""

    def running(self) -> Prefetcher: ...
    def touch(self, mini: MiniBatch) -> None: ...
    def check_order(self, mini: MiniBatch) -> None: ...
    def must_be_current(self, mini: MiniBatch) -> None: ...
    def is_finished(self, mini: MiniBatch) -> bool: ...
    def finished(self, mini: MiniBatch) -> None: ...


class MiniBatch:
    """One optimizer step. Lazy: it is admitted when first touched, or earlier by the loader's thread.

    ``loss_tokens``, ``n_trajectories`` and ``n_groups`` count over all data-parallel ranks, each trajectory once, and
    are known before the first forward. If the stream ends while a mini-batch that ``next`` already returned waits for
    data, it is empty: no micro-batches, ``n_trajectories == 0``.
    """

    empty: ClassVar[int] = 0  # training passes without micro-batches so far, because a stream had ended

    def __init__(self, owner: Owner, number: int, era: int) -> None:
        self._owner, self.number, self.era = owner, number, era
        self.live: Live | None = None
        self.ended = False
        self.taken = 0
        self._started = False
        self._latest: MediaBatch | None = None
        self.waits = {"admit_wait_s": 0.0, "read_wait_s": 0.0}

    # -- numbers ----------------------------------------------------------------------------------------------------

    @property
    def index(self) -> int:
        """The optimizer step u = kS + eM + j."""
        return self._numbers().index

    @property
    def train_batch(self) -> int:
        return self._numbers().train_batch

    @property
    def epoch(self) -> int:
        return self._numbers().epoch

    @property
    def position(self) -> int:
        return self._numbers().position

    @property
    def is_last(self) -> bool:
        """The last step of its train batch: publish weights after it."""
        return self._numbers().is_last

    @property
    def loss_tokens(self) -> int:
        """Non-zero loss mask entries over all ranks, at least 1: what the summed loss is divided by."""
        return self._numbers().loss_tokens

    @property
    def n_trajectories(self) -> int:
        return self._numbers().n_trajectories

    @property
    def n_groups(self) -> int:
        return self._numbers().n_groups

    @property
    def stats(self) -> dict[str, float]:
        """Flat, for any tracker; the same keys always. Of all ranks, but for seconds and bytes: these are this rank's
        own, and grow while it is read.

        * ``wait_s`` = ``admit_wait_s`` (for its admission) + ``read_wait_s``: what the trainer waited. ``read_s``,
          ``verify_s``, ``copy_s``: spent on it, mostly beside computation.
        * ``bytes_logical``: had every trajectory its own media. ``bytes_unique``: each medium once per rank.
          ``bytes_read``: from the store, without what was still in memory.
        * ``tokens``, ``padded_tokens``, ``truncated`` trajectories, ``micro_batches`` of each rank,
          ``padding_micro_batches``: those without a trajectory. ``imbalance``: tokens of the slowest rank over the
          mean, summed over micro-batches; 1.0 is perfect. ``masked``: trajectories whose bytes were corrupt.
        * ``encodes`` of media beside ``naive_encodes`` (one for each trajectory that shows one), ``distinct_media``,
          ``ranks_per_medium`` (mean), ``vision_imbalance``: as ``imbalance``, in patches.
        * ``waiting_groups``: left when it was admitted, complete or not. ``dropped/<reason>``: since the one before.
        * ``staleness/``: ``mean``, ``p99``, ``max`` in train batches, ``token_mean`` by each trajectory's mean version;
          ``steps_mean``, ``steps_p99`` in optimizer steps, never below 0; ``signed_steps_mean`` may be;
          ``gap_mean``: optimizer steps between its own and the versions it was generated with.
        """
        live = self._touch()
        stats = dict.fromkeys(_COSTS, 0.0) if live is None else {**live.share.stats, **_costs(live, self.waits)}
        for key in STATS:
            stats.setdefault(key, 0.0)
        stats["wait_s"] = stats["admit_wait_s"] + stats["read_wait_s"]
        return stats

    # -- passes -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[MicroBatch]:
        """The training pass, once; the mini-batch is consumed at its end."""
        if self._started:
            raise UsageError(
                f"mini-batch {self.index} was iterated before; its training pass is there once. Extra passes: "
                "mini.micro_batches(fields=...), before or after."
            )
        self._touch(start=True)
        self._started = True
        MiniBatch.empty += self.live is None
        return _Pass(self._take)

    def micro_batches(self, fields: Iterable[str] | None = None) -> Iterator[MicroBatch]:
        """An extra pass (reference, critic): the same micro-batches in the same order; consumes nothing."""
        chosen = as_fields(fields)
        return _Pass(lambda j: self._again(j, chosen))

    def abandon(self) -> None:
        """Give the rest of this mini-batch up; it counts as consumed."""
        if self._touch() is not None and not self.done:
            self.taken = -1
            self._started = True
            self._owner.finished(self)

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return self.ended or self._owner.is_finished(self)

    @property
    def half_read(self) -> bool:
        return self._started and not self.done

    def _touch(self, start: bool = False) -> Live | None:
        if self.live is None and not self.ended:
            self._owner.touch(self)
        if start:
            self._owner.check_order(self)
        return self.live

    def _take(self, j: int) -> MicroBatch | None:
        live = self.live
        if live is None or self.taken != j:  # the stream ended, or it was abandoned
            return None
        self._check_used()
        if j == live.share.count:
            self._owner.finished(self)
            return None
        self._owner.must_be_current(self)
        began = time.perf_counter()
        micro = self._owner.running().micro(self.number, j)
        self.waits["read_wait_s"] += time.perf_counter() - began
        self.taken, self._latest = j + 1, micro.media
        return micro

    def _check_used(self) -> None:
        """Images that reach no encoder would go unnoticed: the loss falls without them too."""
        before, self._latest = self._latest, None
        if before is not None and before.forgotten:
            raise UsageError(
                f"micro-batch {before.position} of mini-batch {self.index} has {len(before)} media for "
                f"{before.n_tokens} placeholders. Its micro.model_inputs() were taken, and no features: the model "
                "would be trained without the images. Pass **encoder.model_inputs(micro) too, or encoder(micro)'s "
                "rows; where a model is to see none, say so by looking at micro.media.new."
            )

    def _again(self, j: int, fields: frozenset[str] | None) -> MicroBatch | None:
        live = self._touch()
        if live is None or j == live.share.count:
            return None
        self._owner.must_be_current(self)
        began = time.perf_counter()
        micro = self._owner.running().extra(self.number, j, fields)
        self.waits["read_wait_s"] += time.perf_counter() - began
        return micro

    def _numbers(self) -> Numbers:
        live = self._touch()
        return _NOTHING if live is None else live.share.numbers


class _Pass(Iterator[MicroBatch]):
    """Micro-batches in order. Not a generator: that would end at its first error, and a caller who goes on would miss
    the rest without a word."""

    def __init__(self, take: Callable[[int], MicroBatch | None]) -> None:
        self._take, self._at = take, 0

    def __next__(self) -> MicroBatch:
        micro = self._take(self._at)
        if micro is None:
            raise StopIteration
        self._at += 1
        micro.media.enter(self)
        return micro


def as_fields(fields: Iterable[str] | None) -> frozenset[str] | None:
    """Names of columns and values; a single name is one of them."""
    if fields is None or isinstance(fields, str):
        return None if fields is None else frozenset([fields])
    names = list(fields) if isinstance(fields, Iterable) else [None]
    if not all(isinstance(name, str) for name in names):
        raise InvalidArgument(f"fields must be names of columns and values, found {fields!r}.")
    return frozenset(map(str, names))


def _costs(live: Live, waits: Mapping[str, float]) -> dict[str, float]:
    return {name: live.cost.get(name, 0.0) for name in _COSTS} | dict(waits)
