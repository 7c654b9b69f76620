"""The background thread: admits late, reads ahead.

What it does next, in this order:

1. the micro-batch that the consumer is blocked on;
2. admit a mini-batch that this or another rank asked for;
3. read micro-batches in plan order while fewer than ``depth`` are buffered;
4. admit the next mini-batch once every admitted one has been handed out: as late, hence as fresh, as possible, and
   its first read still hides behind the last micro-batch's computation.

With ``depth=0`` there is no thread: the consumer takes the same steps itself when it needs something.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

import torch

from knit_data.batch import MicroBatch
from knit_data.collate import Collator, Prepared
from knit_data.errors import InvalidArgument, UsageError
from knit_data.exchange import Exchange
from knit_data.share import End, Share
from knit_data.tracing import span


class Admit(Protocol):
    """Mini-batch i, within so many seconds; whether it is waited for."""

    def __call__(self, i: int, timeout: float, needed: bool, /) -> Share | End | None: ...
    def tend(self) -> None: ...
    def close(self) -> None: ...


_SLICE = 0.05  # seconds one admission attempt may wait for data
_IDLE = 0.02  # seconds between looks for what other ranks want
_TEND = 0.1  # seconds between looks for what has come, when there is nothing to do
_MOST_AHEAD = 1 << 30  # bytes of micro-batches read ahead after which the next one waits, whatever the depth
_PATIENCE = 0.2  # seconds that next() waits to learn whether the stream has ended


@dataclass(eq=False)
class Live:
    """A mini-batch between admission and its end."""

    share: Share
    ready: dict[int, Prepared] = field(default_factory=dict)
    read: int = 0  # micro-batches read, or being read, for the training pass
    handed: int = 0
    dropped: bool = False
    cost: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class _Need:
    """What the consumer is blocked on: a micro-batch of the training pass, or of an extra one with its fields."""

    mini: int
    micro: int
    extra: bool = False
    fields: frozenset[str] | None = None
    result: Prepared | None = None
    error: InvalidArgument | None = None  # of an extra pass alone: fields that are not there


class Prefetcher:
    """Runs ``admit`` and ``collate`` ahead of one consumer."""

    def __init__(self, admit: Admit, collate: Collator, exchange: Exchange, depth: int, name: str) -> None:
        self._admit, self._collate, self._exchange, self._depth = admit, collate, exchange, depth
        self._turn = threading.Condition()
        self._minis: dict[int, Live] = {}
        self._admitted = 0
        self._asked = -1
        self._late = -1  # the newest mini-batch handed out before its admission
        self._patience: float | None = None
        self._end: End | None = None
        self._need: _Need | None = None
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None
        self._stop = False
        self._thread: threading.Thread | None = None
        if depth:
            torch.get_num_threads()  # the caller's own number is fixed from now on
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    # -- consumer ---------------------------------------------------------------------------------------------------

    def live(self, i: int) -> Live | End:
        """Mini-batch i once it is admitted."""
        self._ask(i)
        self._until(lambda: i in self._minis or (self._end is not None and i >= self._admitted))
        return self._minis[i] if i in self._minis else self._ended()

    def there(self, i: int) -> bool:
        """False: the stream ended before i. True: it is there, or may still come; waits 0.2 s to tell."""
        self._ask(i)
        self._until(lambda: i < self._admitted or self._late >= i or self._end is not None)
        if i < self._admitted or self._late >= i:
            return True
        return i == self._admitted and self._ended().unseen

    def micro(self, i: int, j: int) -> MicroBatch:
        """Micro-batch j of the training pass; call in order."""
        live = self._minis[i]
        if j not in live.ready:
            self._fetch(_Need(i, j))
        with self._turn:
            live.handed = j + 1
            self._turn.notify_all()
            prepared = live.ready.pop(j)  # last: an interrupt before it loses nothing, one after it has it read again
        prepared.delivery.receive()
        return prepared.micro

    def extra(self, i: int, j: int, fields: frozenset[str] | None) -> MicroBatch:
        """Micro-batch j of another pass, read again."""
        need = _Need(i, j, True, fields)
        self._fetch(need)
        assert need.result is not None
        need.result.delivery.receive()
        return need.result.micro

    def drop(self, i: int) -> None:
        """Mini-batch i is over: nothing of it is read any more."""
        with self._turn:
            live = self._minis[i]
            live.read = live.handed = live.share.count
            live.dropped = True
            live.ready.clear()
            self._turn.notify_all()

    def forget(self, i: int) -> None:
        with self._turn:
            self._minis.pop(i, None)

    def shares(self) -> dict[int, Share]:
        """Of the mini-batches that are admitted and not forgotten."""
        with self._turn:
            return {i: live.share for i, live in self._minis.items()}

    def raise_failure(self) -> None:
        """Raise what went wrong, the same error every time."""
        if self._error is not None:
            raise self._error.with_traceback(self._trace)  # a bare raise would lengthen its traceback every time

    def stop(self) -> None:
        """Ends the thread; idempotent, from any thread."""
        with self._turn:
            self._stop = True
            self._turn.notify_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=30.0)

    def close(self) -> None:
        """Stops, and lets go of what was read."""
        self.stop()
        self._admit.close()
        self._minis.clear()
        if self._thread is None or not self._thread.is_alive():  # else it hangs in a read, and still has the arenas
            self._collate.arenas.close()

    def _ask(self, i: int) -> None:
        with self._turn:
            if i < self._admitted or self._end is not None:
                return
            fresh = range(self._asked + 1, i + 1)
            self._asked = max(self._asked, i)
            self._turn.notify_all()
        self._exchange.want(fresh)

    def _ended(self) -> End:
        assert self._end is not None
        return self._end

    def _fetch(self, need: _Need) -> None:
        with self._turn:
            self._need = need
            self._turn.notify_all()
        try:
            self._until(lambda: self._served(need))
        finally:
            with self._turn:
                self._need = None
        if need.error is not None:
            raise need.error

    def _served(self, need: _Need) -> bool:
        if need.extra:
            return need.result is not None or need.error is not None
        return need.micro in self._minis[need.mini].ready

    def _until(self, true: Callable[[], bool]) -> None:
        """Wait for the thread, or work oneself, until it is true; raises what went wrong there."""
        with self._turn:
            if self._holds(true):
                return
        with span("knit/wait"):
            while True:
                with self._turn:
                    if self._holds(true):
                        return
                    if self._thread is not None:
                        self._turn.wait(1.0)
                        continue
                self._step()

    def _holds(self, true: Callable[[], bool]) -> bool:
        if true():
            return True
        self.raise_failure()
        if self._stop:
            raise UsageError("the loader is closed; build a new one, with load_state_dict to go on.")
        if self._thread is not None and not self._thread.is_alive():
            raise UsageError("the loader's thread is gone: was this process forked? Build stores and loaders after it.")
        return False

    # -- thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            _work_in_one_thread()
        except BaseException as e:  # no thread, or memory for one, is to be had
            self._fail(e)
        while not self._stop and self._error is None:
            self._step()

    def _step(self) -> None:
        """Do the most urgent thing; without one, wait a little."""
        job: _Need | int | None = None
        try:
            with self._turn:  # the consumer may be forgetting a mini-batch
                training = any(m.handed for m in self._minis.values())
            self._exchange.compare(training)
            wanted = self._exchange.wanted(self._admitted)
            with self._turn:
                job = self._choose(wanted)
                if job is None and not self._stop:
                    self._turn.wait(_IDLE if self._exchange.world > 1 else _TEND)
            if job is None:
                self._admit.tend()
            if isinstance(job, _Need):
                self._read(job)
            elif job is not None:
                self._try_admit(job, wanted)
        except BaseException as e:
            if self._thread is None and not isinstance(e, Exception):
                raise  # Ctrl-C in the caller's own work: a read is made again, and the sampler says what became of it
            self._fail(e)

    def _fail(self, e: BaseException) -> None:
        self._exchange.report(e)
        with self._turn:
            self._error, self._trace = e, e.__traceback__
            self._turn.notify_all()

    def _choose(self, wanted: bool) -> _Need | int | None:
        need = self._need
        if need is not None and not self._served(need):
            if not need.extra:
                live = self._minis[need.mini]
                live.read = max(live.read, need.micro + 1)
            return need
        going = self._end is None
        if going and (wanted or self._asked >= self._admitted):
            return self._admitted
        waiting = [prepared.nbytes for live in self._minis.values() for prepared in live.ready.values()]
        if len(waiting) < self._depth and sum(waiting) < _MOST_AHEAD:
            for i, live in self._minis.items():
                if live.read < live.share.count:
                    live.read += 1
                    return _Need(i, live.read - 1)
        if going and self._depth and all(m.handed >= m.share.count for m in self._minis.values()):
            return self._admitted
        return None

    def _read(self, need: _Need) -> None:
        self._exchange.check_peers()
        live = self._minis.get(need.mini)
        if live is None:
            return
        before = self._collate.timing.counts()
        try:
            prepared = self._collate(live.share, need.micro, need.fields)
        except InvalidArgument as e:
            if not need.extra:
                raise
            with self._turn:
                need.error = e
            return
        with self._turn:
            for name, total in self._collate.timing.counts().items():
                live.cost[name] = live.cost.get(name, 0.0) + (total - before[name])
            if need.extra:
                need.result = prepared
            elif not live.dropped:
                live.ready[need.micro] = prepared
            self._turn.notify_all()
        del prepared  # this frame must not keep the last batch's lease alive

    def _try_admit(self, i: int, wanted: bool) -> None:
        self._exchange.check_peers()
        needed = wanted or self._asked >= i
        with span("knit/admit"):
            result = self._admit(i, _SLICE, needed)
        with self._turn:
            if isinstance(result, Share):
                self._minis[i] = Live(result)
                self._admitted, self._patience = i + 1, None
            elif result is not None:
                self._end = result
            self._turn.notify_all()
        if result is None and needed and self._late < i and self._is_late(i):
            with self._turn:
                self._late = i
                self._turn.notify_all()

    def _is_late(self, i: int) -> bool:
        """Rank 0 decides for all that next() need not wait for i any longer."""
        exchange = self._exchange
        if exchange.rank:
            return exchange.is_late(i)
        now = time.monotonic()
        if self._patience is None:
            self._patience = now + _PATIENCE
        if now < self._patience:
            return False
        exchange.late(i)
        return True


def _work_in_one_thread() -> None:
    """Else intra-op threads of this thread's copies fight the trainer's.

    torch keeps the last number set for all threads still to come: a trainer's would run on one core. So it is put
    back, from a thread of its own.
    """
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    restore = threading.Thread(target=torch.set_num_threads, args=(count,))
    restore.start()
    restore.join()
