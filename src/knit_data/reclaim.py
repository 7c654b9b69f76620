"""When segments go: once nobody needs them any more.

Rank 0 of a loader deletes. A segment is safe to go when every rank has consumed all its rows and no later pass, and no
resume from the loader's own state, reads it again; ``reclaim="commit"`` also waits until a durable checkpoint says so.
All of it happens in the loader's thread, between its reads, so that none of them meets a segment that has just gone;
only that rank 0 lives is said by a thread of its own, however long a read or an optimizer step takes.

Writer 0 with rows (segment, item) (0, 0) (0, 1) (1, 0) (2, 0), all but (1, 0) consumed: floor 1. Segment 2 stays,
because names are dense and one number says what is gone.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Mapping

from knit_data.background import Ticker
from knit_data.errors import ConsumerConflict, RankError, StateError
from knit_data.exchange import Exchange
from knit_data.ledger import Ledger, Progress
from knit_data.prefetch import Admit
from knit_data.sampler import QuotaSampler
from knit_data.share import End, Share
from knit_data.store.consumer import BEAT, Consumer

Floors = Mapping[int, int]  # writer -> its first segment that is still needed
_PAUSE = 0.5  # seconds that the trainer waits in vain before dropped groups go, and between two such times


class Reclaiming:
    """One rank's part in it; with ``reclaim="never"`` it does nothing.

    ``settled`` and ``commit`` only take note, from the training thread; ``work`` does the rest, from the loader's.
    """

    def __init__(self, sampler: QuotaSampler, exchange: Exchange, ledger: Ledger) -> None:
        self._sampler, store = sampler, sampler.stream.store
        self._clock = store.backend
        self._exchange, self._on, self._eager = exchange, store.reclaim != "never", store.reclaim == "consumed"
        self._leads = exchange.rank == 0
        self._consumer = Consumer(store)
        self._ticker: Ticker | None = None
        self.restart(ledger)

    def restart(self, ledger: Ledger) -> None:
        """Nothing is read, and the run stands there. What was noted before belongs to another timeline."""
        self._settled: deque[tuple[int, Floors]] = deque()  # here, and perhaps not yet on all ranks
        self._commits: deque[Floors] = deque()
        self._consumed = -1  # the newest mini-batch that all ranks have consumed
        self._short: int | None = None  # the mini-batch that the trainer waits for
        self._spare_at = math.inf
        self._safe: Floors = ledger.floors()
        self._durable: dict[int, int] = {}
        self._done: Floors = {}  # all below is gone

    def claim(self) -> None:
        """Rank 0, before it reads: raises ConsumerConflict if another trainer consumes this store."""
        if self._on:
            self._consumer.claim()
            self._tick()

    def settled(self, number: int, ledger: Ledger) -> None:
        """This rank has consumed mini-batch ``number`` of its loader, and all before it."""
        if self._on:
            self._settled.append((number, ledger.floors() if self._leads else {}))

    def short(self, number: int | None) -> None:
        """The trainer waits for mini-batch ``number``, and there is none; None: it does not wait."""
        if self._short != number:
            self._short, self._spare_at = number, self._clock.now() + _PAUSE

    def commit(self, ledger: Ledger, consumed: Progress) -> None:
        """A durable checkpoint stands there. Raises StateError if that is after what was ``consumed``."""
        if _order(ledger.progress) > _order(consumed):
            raise StateError(
                f"commit: the state stands at {ledger.progress}, this loader has consumed what is before {consumed}; "
                "commit what its state_dict() returned, or load the state first."
            )
        if self._on:
            self._commits.append(ledger.floors())

    def work(self) -> None:
        """What there is to do. Raises ConsumerConflict on rank 0 if another trainer took over."""
        if not self._on:
            return
        if self._leads:
            self._lead()
        else:
            with contextlib.suppress(RankError):  # rank 0 has closed: nobody deletes any more
                while self._settled:
                    self._exchange.settle(self._settled.popleft()[0])
                while self._commits:
                    self._exchange.send_floors(self._commits.popleft())

    def close(self) -> None:
        """The last work, all of it; the next consumer need not wait."""
        if self._consumer.held or not self._leads:
            self._consumer.retry()
            with contextlib.suppress(ConsumerConflict):
                self.work()
                while self._leads and self._floors() != self._done and not self._consumer.rests:
                    self.work()
        self.release()

    def release(self) -> None:
        if self._ticker is not None:
            self._ticker.stop()
        self._consumer.release()

    def _lead(self) -> None:
        self._consumer.beat()
        self._commits.extend(self._exchange.floors())
        if self._commits:
            self._consumer.retry()  # the same state once more is a wish to try again
        while self._commits:
            for writer, floor in self._commits.popleft().items():
                self._durable[writer] = max(floor, self._durable.get(writer, 0))
        while self._settled and self._exchange.all_settled(self._settled[0][0]):
            self._consumed, self._safe = self._settled.popleft()
        if self._only_drops:
            self._safe, self._spare_at = self._sampler.spare(), self._clock.now() + _PAUSE
        floors = self._floors()
        if floors != self._done and self._consumer.reclaim(floors):
            self._done = floors
        self._tick()

    @property
    def _only_drops(self) -> bool:
        """The trainer has consumed all there was, and what comes may be groups that it drops: with "consumed" their
        segments go before its next mini-batch comes, so that writers find room for better ones."""
        return self._eager and self._short == self._consumed + 1 and self._clock.now() >= self._spare_at

    def _tick(self) -> None:
        if self._ticker is None and self._consumer.held:
            self._ticker = Ticker(self._consumer.lives, BEAT, "knit-reclaiming")

    def _floors(self) -> Floors:
        safe, due = self._safe, self._safe if self._eager else self._durable
        return {writer: min(floor, safe.get(writer, 0)) for writer, floor in due.items()}


class Beside:
    """Admission, with the reclaiming's work after each of its calls."""

    def __init__(self, admit: Admit, reclaiming: Reclaiming) -> None:
        self._admit, self._reclaiming = admit, reclaiming

    def __call__(self, i: int, timeout: float, needed: bool) -> Share | End | None:
        result = self._admit(i, timeout, needed)
        self._reclaiming.short(i if result is None and needed else None)
        self._reclaiming.work()
        return result

    def tend(self) -> None:
        self._admit.tend()
        self._reclaiming.work()

    def close(self) -> None:
        self._admit.close()


def _order(p: Progress) -> tuple[int, int, int]:
    return p.train_batch, p.epoch, p.position
