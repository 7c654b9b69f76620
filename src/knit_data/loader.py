"""What a trainer iterates over: mini-batches, one per optimizer step, each a few micro-batches."""

from __future__ import annotations

import atexit
import itertools
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from knit_data.batch import MicroBatch
from knit_data.collate import Collator
from knit_data.errors import InvalidArgument, UsageError
from knit_data.exchange import Exchange
from knit_data.ledger import Ledger
from knit_data.planning import Layout, Padding, longest_that_fits
from knit_data.prefetch import Live, Prefetcher
from knit_data.sampler import QuotaSampler
from knit_data.share import REASONS, End, Follow, Lead, Numbers

_NOTHING = Numbers(-1, -1, -1, -1, False, 0, 0, 0)
_SUMMED = ("tokens", "padded_tokens", "micro_batches", "padding_micro_batches", "read_s", "verify_s", "bytes_read")
_SUMMED += ("masked", "admit_wait_s", "read_wait_s", "wait_s")
_COSTS = ("read_s", "verify_s", "bytes_read", "masked", "admit_wait_s", "read_wait_s")
_names = itertools.count()


class MiniBatch:
    """One optimizer step. Lazy: it is admitted when first touched, or earlier by the loader's thread.

    ``loss_tokens``, ``n_trajectories`` and ``n_groups`` count over all data-parallel ranks, each trajectory once, and
    are known before the first forward. If the stream ends while a mini-batch that ``next`` already returned waits for
    data, it is empty: no micro-batches, ``n_trajectories == 0``.
    """

    def __init__(self, loader: TrajectoryLoader, i: int) -> None:
        self._loader, self._i = loader, i
        self._live: Live | None = None
        self._ended = False
        self._taken = 0
        self._started = False
        self._waits = {"admit_wait_s": 0.0, "read_wait_s": 0.0}

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
        """Flat, for any tracker; the same keys always. Seconds and bytes are this rank's, and grow while it is read."""
        live = self._touch()
        stats = dict.fromkeys(_COSTS, 0.0) if live is None else {**live.share.stats, **_costs(live, self._waits)}
        for key in self._loader.stat_names:
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
        live = self._touch(start=True)
        self._started = True
        return self._training(live) if live is not None else iter(())

    def _training(self, live: Live) -> Iterator[MicroBatch]:
        for j in range(live.share.count):
            if self._taken != j:
                return  # abandoned meanwhile
            began = time.perf_counter()
            micro = self._loader._prefetcher().micro(self._i, j)
            self._waits["read_wait_s"] += time.perf_counter() - began
            self._taken = j + 1
            yield micro
            del micro
        self._loader._finished(self)

    def micro_batches(self, fields: Iterable[str] | None = None) -> Iterator[MicroBatch]:
        """An extra pass (reference, critic): the same micro-batches in the same order; consumes nothing."""
        chosen = None if fields is None else frozenset([fields] if isinstance(fields, str) else fields)
        live = self._touch()
        for j in range(live.share.count if live is not None else 0):
            self._loader._must_be_current(self)
            yield self._loader._prefetcher().extra(self._i, j, chosen)

    def abandon(self) -> None:
        """Give the rest of this mini-batch up; it counts as consumed."""
        if self._touch() is not None and not self._done:
            self._taken = -1
            self._started = True
            self._loader._finished(self)

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _done(self) -> bool:
        return self._ended or self._loader._is_finished(self._i)

    @property
    def _half_read(self) -> bool:
        return self._started and not self._done

    def _touch(self, start: bool = False) -> Live | None:
        if self._live is None and not self._ended:
            self._loader._touch(self)
        if start:
            self._loader._check_order(self)
        return self._live

    def _numbers(self) -> Numbers:
        live = self._touch()
        return _NOTHING if live is None else live.share.numbers


class TrajectoryLoader:
    """Iterates over mini-batches; build it with equal arguments on every rank.

    ``max_tokens_per_micro_batch`` is a hard cap on padded tokens. ``mesh`` and ``dp``: the DeviceMesh and the names of
    its data-parallel dimensions; ranks along the others get the same data. ``fields``: columns and values to read
    (None: all). ``prefetch``: micro-batches read ahead; 0 works in the caller's thread. ``on_corrupt``: "raise", or
    "mask" trajectories whose bytes fail their checksum.

    ``next`` returns at once, or within 0.2 s when it must learn whether the stream has ended.
    """

    def __init__(
        self,
        sampler: QuotaSampler,
        max_tokens_per_micro_batch: int,
        mesh: DeviceMesh | None = None,
        dp: Sequence[str] | str | None = None,
        device: str | torch.device = "cuda",
        layout: Layout = "packed",
        fields: Iterable[str] | None = None,
        prefetch: int = 2,
        padding: Padding | None = None,
        on_corrupt: str = "raise",
        reuse_buffers: bool = False,
    ) -> None:
        if not isinstance(sampler, QuotaSampler):
            raise InvalidArgument(f"TrajectoryLoader reads a QuotaSampler, found {type(sampler).__name__}.")
        if layout not in ("packed", "padded"):
            raise InvalidArgument(f"layout must be 'packed' or 'padded', found {layout!r}.")
        if on_corrupt not in ("raise", "mask"):
            raise InvalidArgument(f"on_corrupt must be 'raise' or 'mask', found {on_corrupt!r}.")
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise InvalidArgument(f"prefetch must be an int >= 0, found {prefetch!r}.")
        self.sampler, self.layout, self.prefetch, self.reuse_buffers = sampler, layout, prefetch, reuse_buffers
        self.padding = padding or Padding()
        self.max_tokens = max_tokens_per_micro_batch
        sampler.limit_tokens(longest_that_fits(self.max_tokens, self.padding, layout))
        self.fields = None if fields is None else frozenset([fields] if isinstance(fields, str) else fields)
        self.device = _resolved(device)
        self.on_corrupt = on_corrupt
        self._ledger = sampler.new_ledger()
        self._exchange = Exchange(mesh, dp, self._config())
        self._state: dict[str, Any] | None = None
        self._running: Prefetcher | None = None
        self._closed = False
        self._ended: End | None = None
        self._exhausted = False
        self._rewind()
        self._totals = dict.fromkeys([*_SUMMED, *(f"dropped/{r}" for r in REASONS)], 0.0)
        self._totals |= dict.fromkeys(["mini_batches", "groups", "trajectories", "loss_tokens", "left_over"], 0.0)
        _live_loaders.add(self)

    def _rewind(self) -> None:
        self._next = 0  # what next() hands out
        self._settled = 0  # mini-batches whose consumption is in the ledger
        self._finished_minis: dict[int, MiniBatch] = {}
        self._touched: MiniBatch | None = None
        self._last: MiniBatch | None = None

    # -- iterating --------------------------------------------------------------------------------------------------

    def __iter__(self) -> TrajectoryLoader:
        if self._exhausted:
            raise UsageError(
                "this loader's stream has ended and was iterated to its end; build a new loader, or load_state_dict."
            )
        return self

    def __next__(self) -> MiniBatch:
        if self._exhausted:
            raise StopIteration
        # an earlier mini-batch that was not read through may hold back this one: do not wait for it
        ahead = self._last is not None and not self._last._done
        if not ahead and not self._prefetcher().there(self._next):
            self._end()
            raise StopIteration
        mini = self._last = MiniBatch(self, self._next)
        self._next += 1
        return mini

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Covers the mini-batches iterated to their end; small, JSON-able, equal on all ranks, of any rank count."""
        self._settle(self._next)
        return self._ledger.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was saved: what was trained is not trained again, what was only read ahead is.

        Call it on every rank with the same state. Afterwards publish the restored weights and their version.
        """
        ledger = self.sampler.new_ledger()
        ledger.load(state)
        if self._running is not None:
            self._halt()
            self._exchange.restart()
        self._ledger, self._state = ledger, dict(state)
        self._exhausted, self._ended = False, None
        self._rewind()

    # -- numbers ----------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> dict[str, float]:
        """Running totals of this rank; groups dropped and left over are final once the stream ended or after close."""
        return dict(self._totals)

    @property
    def stat_names(self) -> tuple[str, ...]:
        """The keys of every ``mini.stats``."""
        return _STAT_NAMES

    # -- closing ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the thread and say goodbye to the other ranks. What was read ahead is lost, and trained after a resume."""
        if self._closed:
            return
        self._closed = True
        if self._exchange.rank == 0 and self._running is not None and self._ended is None:
            self._halt()
            self._account(End(self.sampler.left_over(), self.sampler.dropped()))
        self._halt()
        self._exchange.close()

    def __enter__(self) -> TrajectoryLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _prefetcher(self) -> Prefetcher:
        """Starts what works in the background; not before it is needed, so that a state can be loaded first."""
        if self._running is None:
            if self._closed:
                raise UsageError("the loader is closed; build a new one, with load_state_dict to go on.")
            if self._exchange.rank == 0:
                self.sampler.reset(self._state)
                self._ledger = self.sampler.new_ledger()
                self._ledger.load(self.sampler.get_state())
                self._exchange.begin(self._ledger.state())
                admit: Any = Lead(self.sampler, self._exchange, self.max_tokens, self.layout, self.padding)
            else:
                admit = Follow(self._exchange, self._ledger.state())
            collate = Collator(
                self.sampler.stream.store, self.layout, self.padding, self.device, self.fields, self.on_corrupt
            )
            self._running = Prefetcher(admit, collate, self._exchange, self.prefetch, f"knit-loader-{next(_names)}")
            self._reaper = weakref.finalize(self, self._running.close)
        return self._running

    def _halt(self) -> None:
        if self._running is not None:
            self.sampler.stream.stop()
            self._running.close()
            self._reaper.detach()
            self._running = None

    def _touch(self, mini: MiniBatch) -> None:
        self._must_be_fresh(mini)
        before = self._touched
        if before is not None and before._i < mini._i:
            self._check_order(mini)
            self._settle(mini._i)
        began = time.perf_counter()
        found = self._prefetcher().live(mini._i)
        mini._waits["admit_wait_s"] += time.perf_counter() - began
        if isinstance(found, End):
            mini._ended = True
            self._end(found)
            return
        mini._live = found
        if before is None or before._i < mini._i:
            self._touched = mini

    def _check_order(self, mini: MiniBatch) -> None:
        before = self._touched
        if before is not None and before is not mini and before._half_read:
            raise UsageError(
                f"mini-batch {before.index} is half read: {before._taken} of its micro-batches were taken. Iterate it "
                "to its end, or call mini.abandon() to give the rest up, before the next one."
            )

    def _must_be_fresh(self, mini: MiniBatch) -> None:
        if mini._i < self._settled or self._closed:
            raise UsageError("this mini-batch is over: a later one was touched, or the loader was closed.")

    def _must_be_current(self, mini: MiniBatch) -> None:
        if mini._i < self._settled:
            raise UsageError("this mini-batch is over: a later one was touched. Make extra passes before that.")

    def _is_finished(self, i: int) -> bool:
        return i < self._settled or i in self._finished_minis

    def _finished(self, mini: MiniBatch) -> None:
        """The mini-batch was iterated to its end, or given up."""
        if mini._live is None or self._is_finished(mini._i):
            return
        self._finished_minis[mini._i] = mini
        if mini._taken < 0:
            self._prefetcher().drop(mini._i)
        share, stats = mini._live.share, mini.stats
        for key in self._totals:
            self._totals[key] += stats.get(key, 0.0)
        numbers = share.numbers
        counts = (1, numbers.n_groups, numbers.n_trajectories, numbers.loss_tokens)
        for key, n in zip(("mini_batches", "groups", "trajectories", "loss_tokens"), counts, strict=True):
            self._totals[key] += n

    def _settle(self, before: int) -> None:
        """What was iterated to its end is consumed now."""
        while self._settled < before and self._settled in self._finished_minis:
            mini = self._finished_minis.pop(self._settled)
            assert mini._live is not None
            self._ledger.apply(mini._live.share.entry)
            self._settled += 1
            self._prefetcher().forget(mini._i)

    def _end(self, end: End | None = None) -> None:
        self._exhausted = True
        self._settle(self._next)
        if self._ended is None:
            found = end or self._prefetcher().live(self._next)
            if isinstance(found, End):
                self._account(found)

    def _account(self, end: End) -> None:
        self._ended = end
        self._totals["left_over"] = float(end.left_over)
        for reason, groups in end.dropped.items():
            self._totals[f"dropped/{reason}"] = float(groups)

    def _config(self) -> dict[str, Any]:
        sampler = self.sampler
        return {
            **self._ledger.terms,
            "store": sampler.stream.store.id,
            "follow": sampler.stream.follow,
            "max_staleness": repr(sampler.staleness),
            "max_tokens_per_micro_batch": self.max_tokens,
            "layout": self.layout,
            "padding": repr(self.padding),
            "fields": None if self.fields is None else sorted(self.fields),
            "prefetch": self.prefetch,
            "on_corrupt": self.on_corrupt,
        }


def _costs(live: Live, waits: Mapping[str, float]) -> dict[str, float]:
    return {name: live.cost.get(name, 0.0) for name in _COSTS} | dict(waits)


def _resolved(device: str | torch.device) -> torch.device:
    """With its index: the loader's thread would start on device 0."""
    resolved = torch.device(device)
    if resolved.type == "cuda":
        if not torch.cuda.is_available():
            raise InvalidArgument(f"device={str(device)!r}, but this machine has no CUDA device; pass device='cpu'.")
        if resolved.index is None:
            return torch.device("cuda", torch.cuda.current_device())
    return resolved


_STAT_NAMES = (
    *_COSTS,
    "wait_s",
    "tokens",
    "padded_tokens",
    "micro_batches",
    "padding_micro_batches",
    "imbalance",
    "waiting_groups",
    *(f"dropped/{reason}" for reason in REASONS),
    *(f"staleness/{name}" for name in ("mean", "p99", "max", "token_mean", "steps_mean", "steps_p99")),
    "staleness/signed_steps_mean",
    "staleness/gap_mean",
)

_live_loaders: weakref.WeakSet[TrajectoryLoader] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """An unclosed loader never aborts the interpreter."""
    for loader in list(_live_loaders):
        loader.close()
