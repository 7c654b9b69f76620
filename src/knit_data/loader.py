"""What a trainer iterates over: mini-batches, one per optimizer step, each a few micro-batches."""

from __future__ import annotations

import atexit
import itertools
import os
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from knit_data.collate import Collator
from knit_data.device import arenas_for, resolved
from knit_data.errors import InvalidArgument, StateError, UsageError
from knit_data.exchange import Exchange
from knit_data.groups import REASONS
from knit_data.ledger import Progress
from knit_data.minibatch import MiniBatch, as_fields
from knit_data.planning import Layout, Padding, longest_that_fits
from knit_data.prefetch import Prefetcher
from knit_data.reclaim import Beside, Reclaiming
from knit_data.sampler import QuotaSampler
from knit_data.share import End, Follow, Lead
from knit_data.stream import check_reachable

_SUMMED = (
    *("tokens", "padded_tokens", "micro_batches", "padding_micro_batches", "truncated"),
    *("read_s", "verify_s", "copy_s", "bytes_logical", "bytes_unique", "bytes_read", "masked"),
    *("admit_wait_s", "read_wait_s", "wait_s"),
)
_names = itertools.count()
_UNREAD = 1000  # mini-batches taken and not touched: nobody trains like this, and the list would grow for ever
_CLOSED = "the loader is closed; build a new one, with load_state_dict to go on."


class TrajectoryLoader:
    """Iterates over mini-batches; build it with equal arguments on every rank.

    ``max_tokens_per_micro_batch`` is a hard cap on padded tokens. ``mesh`` and ``dp``: the DeviceMesh and the names of
    its data-parallel dimensions; ranks along the others get the same data. ``fields``: columns and values to read
    (None: all). ``prefetch``: micro-batches read ahead; 0 works in the caller's thread, and then rank 0 admits only
    while it is inside a call. ``padding``: pad token and multiples. ``on_corrupt``: "raise", or "mask" trajectories
    whose bytes fail their checksum (``loss_tokens`` stays as admitted; a damaged head of a segment is raised all the
    same). ``reuse_buffers``: a micro-batch's tensors are overwritten once the next one, of whichever pass, was taken,
    which saves allocations, and on CUDA waits.

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
        if not isinstance(reuse_buffers, bool):
            raise InvalidArgument(f"reuse_buffers must be True or False, found {reuse_buffers!r}.")
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise InvalidArgument(f"prefetch must be an int >= 0, found {prefetch!r}.")
        self.sampler, self.layout, self.prefetch, self.reuse_buffers = sampler, layout, prefetch, reuse_buffers
        if padding is not None and not isinstance(padding, Padding):
            raise InvalidArgument(f"padding must be a kd.Padding, found {padding!r}.")
        self.padding = padding or Padding()
        self.max_tokens = max_tokens_per_micro_batch
        sampler.limit_tokens(longest_that_fits(self.max_tokens, self.padding, layout))
        self.fields = as_fields(fields)
        self.device = resolved(device)
        self.on_corrupt = on_corrupt
        self._ledger = sampler.ledger_of()
        self._exchange = Exchange(mesh, dp, self._config())
        self._reclaiming = Reclaiming(sampler, self._exchange, self._ledger)
        self._state: dict[str, Any] | None = None
        self._running: Prefetcher | None = None
        self._closed, self._process = False, os.getpid()
        self._ended: End | None = None
        self._exhausted = False
        self._era = 0  # one more after every load_state_dict: mini-batches handed out before it are over
        self._rewind()
        self._zero()
        _live_loaders.add(self)

    def _zero(self) -> None:
        self._before = dict(self._ledger.dropped)  # by the runs that the state comes from
        self._totals = dict.fromkeys([*_SUMMED, *(f"dropped/{r}" for r in REASONS)], 0.0)
        self._totals |= dict.fromkeys(["mini_batches", "groups", "trajectories", "loss_tokens", "left_over"], 0.0)

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
        if self._closed:
            raise UsageError(_CLOSED)
        # an earlier mini-batch that was not read through may hold back this one: do not wait for it
        ahead = self._last is not None and not self._last.done
        began = time.perf_counter()
        if not ahead and not self.running().there(self._next):
            self._end()
            raise StopIteration
        unread = self._next - (0 if self._touched is None else self._touched.number + 1)
        if unread >= _UNREAD:
            raise UsageError(
                f"{unread} mini-batches were taken and none of them was read. Iterate over each before taking more: "
                "list(loader) would never end."
            )
        mini = self._last = MiniBatch(self, self._next, self._era)
        mini.waits["admit_wait_s"] += time.perf_counter() - began
        self._next += 1
        return mini

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Covers the mini-batches iterated to their end; small, JSON-able, equal on all ranks, of any rank count.

        It remembers the groups of the staleness window, 40 bytes each; without ``max_staleness`` all of them, 8 bytes
        each.
        """
        self._settle(self._next)
        if self._finished_minis:
            raise UsageError(
                f"state_dict(): a mini-batch before number {min(self._finished_minis)} of this loader was taken and "
                "not iterated to its end, though later ones were; a resume would train those again. Iterate it first, "
                "or call its abandon()."
            )
        return self._ledger.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was saved: what was trained is not trained again, what was only read ahead is.

        Call it on every rank with the same state. Afterwards publish the restored weights and their version. Raises
        StateError, and changes nothing, if segments that it needs were reclaimed.
        """
        ledger = self.sampler.ledger_of(_given(state))
        check_reachable(self.sampler.stream.store, ledger)
        self._halt()
        self._exchange.restart()
        self._ledger, self._state = ledger, dict(state)
        self._reclaiming.restart(ledger)
        self._exhausted, self._ended = False, None
        self._era += 1
        self._rewind()
        self._zero()

    def commit(self, state: Mapping[str, Any]) -> None:
        """This checkpoint is durable: what it consumed may be reclaimed.

        Call it on any rank, or on all, before ``close``, when the weights and this ``state`` can be read again by
        whoever resumes. Segments go soon after, once no rank reads them any more. A state older than one committed
        before changes nothing; with ``reclaim="never"`` none does. Raises StateError for a state of another store, or
        of a mini-batch that this loader has not consumed.
        """
        if self._closed:
            raise UsageError("commit after close: the loader is closed; commit before, or let the next run do it.")
        self._reclaiming.commit(self.sampler.ledger_of(_given(state)), self._consumed())
        if self._running is None or not self.prefetch:
            self._reclaiming.work()  # else the thread does, between its reads

    # -- numbers ----------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> dict[str, float]:
        """Running totals since this loader was built or given a state. Seconds and bytes are this rank's own, extra
        passes included; the rest is of all ranks. Groups dropped and left over are final once the stream ended, on
        global rank 0 also after ``close``."""
        return dict(self._totals)

    # -- closing ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the thread and say goodbye to the other ranks. What was only read ahead is trained after a resume."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._process:
            return  # a fork of the process that it was built in, which goes on
        if self._exchange.rank == 0 and self._running is not None and self._ended is None:
            self.sampler.stream.stop()
            self._running.stop()  # first: until then it admits
            unused = [s.numbers for i, s in self._running.shares().items() if i not in self._finished_minis]
            self._halt()
            ahead = sum(n.n_groups for n in unused if n.epoch == 0)
            self._account(End(self.sampler.left_over() + ahead, self.sampler.dropped(), unseen=False))
        self._halt()
        self._exchange.await_goodbyes()  # the others' last commits come before them
        self._reclaiming.close()
        self._exchange.close()

    def __enter__(self) -> TrajectoryLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------------------------------

    def running(self) -> Prefetcher:
        """Starts what works in the background; not before it is needed, so that a state can be loaded first."""
        if self._running is None:
            if self._closed:
                raise UsageError(_CLOSED)
            if self._exchange.rank == 0:
                self._begin()
                plans = self.max_tokens, self.layout, self.padding
                admit: Any = Lead(self.sampler, self._exchange, *plans, beside=self.prefetch > 0)
            else:
                self._exchange.begin(self._ledger.state())
                admit = Follow(self._exchange)
            work, name = Beside(admit, self._reclaiming), f"knit-loader-{next(_names)}"
            self._running = Prefetcher(work, self._collator(), self._exchange, self.prefetch, name)
            self._reaper = weakref.finalize(self, _let_go, os.getpid(), self._running, self._reclaiming)
        return self._running

    def _collator(self) -> Collator:
        arenas = arenas_for(self.device, self.prefetch, self.reuse_buffers)
        return Collator(self.sampler.stream.store, self.layout, self.padding, arenas, self.fields, self.on_corrupt)

    def _begin(self) -> None:
        try:
            if self._state is None and self.sampler.used:
                raise UsageError(
                    "this sampler has admitted mini-batches already, for another loader or by next(); build a new "
                    "stream and sampler, and go on with load_state_dict(state)."
                )
            self._reclaiming.claim()
            self.sampler.reset(self._state)
            self._ledger = self.sampler.ledger_of(self.sampler.get_state())
            self._exchange.begin(self._ledger.state())
        except BaseException as e:
            self._exchange.report(e)  # the other ranks wait for the beginning
            raise

    def _halt(self) -> None:
        if self._running is not None:
            self.sampler.stream.stop()
            self._running.close()
            self._reaper.detach()
            self._running = None

    def touch(self, mini: MiniBatch) -> None:
        self.must_be_current(mini)
        before = self._touched
        if before is not None and before.number < mini.number:
            self.check_order(mini)
            self._settle(mini.number)
        began = time.perf_counter()
        found = self.running().live(mini.number)
        mini.waits["admit_wait_s"] += time.perf_counter() - began
        if isinstance(found, End):
            mini.ended = True
            self._end(found)
            return
        mini.live = found
        if before is None or before.number < mini.number:
            self._touched = mini

    def check_order(self, mini: MiniBatch) -> None:
        before = self._touched
        if before is not None and before is not mini and before.half_read:
            self.running().raise_failure()  # if it is that which interrupted it
            raise UsageError(
                f"mini-batch {before.index} is half read: {before.taken} of its micro-batches were taken, its end was "
                "not reached (zip stops before it unless the mini-batch stands first). Iterate it to its end, or call "
                "mini.abandon() to give the rest up, before the next one."
            )

    def must_be_current(self, mini: MiniBatch) -> None:
        if mini.era != self._era:
            raise UsageError(
                "this mini-batch is over: load_state_dict was called since; take a new one from the loader."
            )
        if mini.number < self._settled:
            raise UsageError(
                "this mini-batch is over: a later one was touched, or state_dict() counted it as consumed. Make extra "
                "passes before that."
            )

    def is_finished(self, mini: MiniBatch) -> bool:
        return mini.era != self._era or mini.number < self._settled or mini.number in self._finished_minis

    def finished(self, mini: MiniBatch) -> None:
        """The mini-batch was iterated to its end, or given up."""
        if mini.live is None or self.is_finished(mini):
            return
        self._finished_minis[mini.number] = mini
        if mini.taken < 0 and self._running is not None:
            self._running.drop(mini.number)
        share, stats = mini.live.share, mini.stats
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
            assert mini.live is not None
            self._ledger.apply(mini.live.share.entry)
            self._settled += 1
            self._reclaiming.settled(mini.number, self._ledger)
            if self._running is not None:
                self._running.forget(mini.number)

    def _consumed(self) -> Progress:
        """What comes after the mini-batches that were iterated to their end."""
        at, progress = self._settled, self._ledger.progress
        while (mini := self._finished_minis.get(at)) is not None and mini.live is not None:
            at, progress = at + 1, mini.live.share.entry.progress
        return progress

    def _end(self, end: End | None = None) -> None:
        self._exhausted = True
        self._settle(self._next)
        if self._ended is None:
            found = end or self.running().live(self._next)
            if isinstance(found, End):
                self._account(found)

    def _account(self, end: End) -> None:
        self._ended = end
        self._totals["left_over"] = float(end.left_over)
        for reason, groups in end.dropped.items():
            self._totals[f"dropped/{reason}"] = float(groups - self._before.get(reason, 0))

    def _config(self) -> dict[str, Any]:
        sampler = self.sampler
        return {
            **self._ledger.terms,
            "store": sampler.stream.store.id,
            "reclaim": sampler.stream.store.reclaim,
            "follow": sampler.stream.follow,
            "max_staleness": repr(sampler.staleness),
            "max_tokens_per_micro_batch": self.max_tokens,
            "layout": self.layout,
            "padding": repr(self.padding),
            "fields": None if self.fields is None else sorted(self.fields),
            "prefetch": self.prefetch,
            "on_corrupt": self.on_corrupt,
            "reuse_buffers": self.reuse_buffers,
        }


def _let_go(process: int, running: Prefetcher, reclaiming: Reclaiming) -> None:
    if os.getpid() == process:  # the claim on the store is the parent's, and so is the thread
        running.close()
        reclaiming.release()


def _given(state: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise StateError(f"a state is what state_dict() returned, found {type(state).__name__}.")
    return state


_live_loaders: weakref.WeakSet[TrajectoryLoader] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """An unclosed loader never aborts the interpreter."""
    for loader in list(_live_loaders):
        loader.close()
