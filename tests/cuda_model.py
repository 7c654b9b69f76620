"""What a CUDA device promises, and nothing more: so that a race shows without a GPU.

A stream does its work in order; between streams only events count; the host waits for nothing unless it says so. So
whatever is queued here is done later, in any order that this allows, the least convenient one included. Memory that is
freed is handed to the next allocation on the same stream at once, while work that uses it may still be queued.

    device = Device(random.Random(0))
    monkeypatch.setattr(module, "torch", device.torch())      # the module now runs on this device
    device.launch(stream, lambda: ...)                        # a kernel
    device.pump(3)                                            # up to three pieces of work get done
    device.skip = "receive: consumer.wait_event"              # a fault: this wait is left out from now on
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

Memory = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(eq=False)
class Work:
    run: Callable[[], object]
    stream: Stream
    after: list[Work] = field(default_factory=list)  # of other streams
    done: bool = False


@dataclass(eq=False)
class Stream:
    device: Device
    name: str
    queue: deque[Work] = field(default_factory=deque)

    def wait_event(self, event: Event) -> None:
        if event.work is not None and self.device.waits(f"{self.name}.wait_event"):
            self.device.queue(self, lambda: None, [event.work])

    def wait_stream(self, other: Stream) -> None:
        if self.device.waits(f"{self.name}.wait_stream"):
            self.device.queue(self, lambda: None, [self.device.queue(other, lambda: None)])


@dataclass(eq=False)
class Event:
    device: Device
    work: Work | None = None

    def record(self, stream: Stream) -> None:
        self.work = self.device.queue(stream, lambda: None)

    def synchronize(self) -> None:
        if self.work is not None and self.device.waits("event.synchronize"):
            self.device.finish(self.work)

    def elapsed_time(self, other: Event) -> float:
        assert self.device.skip is not None or (self.work and self.work.done and other.work and other.work.done)
        return 1.0


@dataclass(eq=False)
class Block:
    """Device memory: freed when the last buffer in it dies, to the stream that it was allocated on."""

    device: Device
    memory: Memory
    home: Stream
    users: list[Stream] = field(default_factory=list)  # record_stream

    def __del__(self) -> None:
        ends = [self.device.queue(stream, lambda: None) for stream in self.users]
        self.device.freed.append((self.home, self.memory, ends))


@dataclass(eq=False)
class Buffer:
    """The part of a tensor that moving bytes needs."""

    block: Block
    size: int

    def numel(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> Buffer:
        assert part.start is None and part.step is None and part.stop <= self.size
        return Buffer(self.block, part.stop)

    def copy_(self, pinned: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking and pinned.numel() == self.size
        to, source = self.block.memory, pinned.numpy()
        self.block.device.launch(self.block.device.current, lambda: np.copyto(to[: len(source)], source))

    def record_stream(self, stream: Stream) -> None:
        if self.block.device.waits("buffer.record_stream"):
            self.block.users.append(stream)


class Device:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.skip: str | None = None
        self.waited: set[str] = set()  # "function: stream.method" of every wait so far
        self.freed: list[tuple[Stream, Memory, list[Work]]] = []
        self.current = Stream(self, "consumer")
        self.streams = [self.current]
        self.slow: set[Stream] = set()  # what is queued here waits until somebody needs it
        self.allocated = 0

    # -- what the module sees ----------------------------------------------------------------------------------------

    def torch(self) -> SimpleNamespace:
        cuda = SimpleNamespace(
            Stream=lambda device=None: self.stream("copies"),
            Event=lambda enable_timing=False: Event(self),
            current_stream=lambda device=None: self.current,
            stream=self.on,
            device=lambda device: nullcontext(),
        )
        return SimpleNamespace(empty=self._empty, uint8=torch.uint8, cuda=cuda)

    def stream(self, name: str) -> Stream:
        self.streams.append(Stream(self, name))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _empty(self, nbytes: int, dtype: torch.dtype, device: object = None, pin_memory: bool = False) -> Any:
        return torch.empty(nbytes, dtype=dtype) if pin_memory or device is None else self.empty(nbytes)

    def empty(self, nbytes: int) -> Buffer:
        """The block freed last on the current stream that is large enough."""
        for place in reversed(range(len(self.freed))):
            home, memory, ends = self.freed[place]
            if home is self.current and len(memory) >= nbytes and all(end.done for end in ends):
                del self.freed[place]
                return Buffer(Block(self, memory, home), nbytes)
        self.allocated += 1
        return Buffer(Block(self, np.zeros(-(-nbytes // 512) * 512, np.uint8), self.current), nbytes)

    # -- work --------------------------------------------------------------------------------------------------------

    def queue(self, stream: Stream, run: Callable[[], object], after: list[Work] | None = None) -> Work:
        stream.queue.append(Work(run, stream, after or []))
        return stream.queue[-1]

    def launch(self, stream: Stream, run: Callable[[], object]) -> Work:
        return self.queue(stream, run)

    def waits(self, what: str) -> bool:
        """Whether this wait, of the function that asks for it, is made."""
        name = f"{sys._getframe(2).f_code.co_name}: {what}"
        self.waited.add(name)
        return name != self.skip

    def pump(self, count: int) -> None:
        """Does up to so many pieces of work, of the streams that are not slow."""
        for _ in range(count):
            ready = [
                s for s in self.streams if s not in self.slow and s.queue and all(w.done for w in s.queue[0].after)
            ]
            if not ready:
                return
            self._do(self.rng.choice(ready))

    def finish(self, work: Work) -> None:
        """Does what this piece of work needs, and no more."""
        while not work.done:
            for earlier in work.stream.queue[0].after:
                self.finish(earlier)
            self._do(work.stream)

    def drain(self) -> None:
        for stream in self.streams:
            if stream.queue:
                self.finish(stream.queue[-1])

    def _do(self, stream: Stream) -> None:
        work = stream.queue.popleft()
        work.run()
        work.done = True
