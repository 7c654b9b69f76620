"""Pinned arenas and one copy stream: how micro-batches get to a CUDA device while it computes.

A micro-batch is put together in one of ``depth + 1`` pinned arenas that live as long as the loader, and moved by one
copy. The rules, each against a fault that was seen elsewhere:

* Before the host writes into an arena again, it waits for the event of the copy that read it: a stream orders what the
  device does, not what the host does.
* The destination is allocated on the consumer's stream, so that it is freed and reused there like any tensor; hence the
  copy stream waits for the consumer's, whose queued kernels may still read what the block held before.
* The consumer's stream waits for the event of the micro-batch that it takes, and not for the copy stream, which may
  have later ones queued.
* What is given up while its copy is under way is freed on the consumer's stream only after that copy.

With ``reuse`` the destinations are kept too, and lent from one hand-out to the next: the copy then waits only for what
the consumer had queued when it gave that buffer back.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from knit_data.arena import Arenas, Delivery, HostArenas, Stage, capacity
from knit_data.errors import InvalidArgument
from knit_data.infos import Array


def resolved(device: str | torch.device) -> torch.device:
    """With its index: the loader's thread would start on device 0."""
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as e:
        raise InvalidArgument(f"device={device!r} is no device: {str(e).splitlines()[0]}") from e
    if resolved.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"device={str(device)!r}: supported are 'cpu' and 'cuda'.")
    if resolved.type == "cuda":
        if not torch.cuda.is_available():
            raise InvalidArgument(f"device={str(device)!r}, but this machine has no CUDA device; pass device='cpu'.")
        if resolved.index is None:
            return torch.device("cuda", torch.cuda.current_device())
    return resolved


def arenas_for(device: torch.device, depth: int, reuse: bool) -> Arenas:
    """Call it in the consumer's thread."""
    return DeviceArenas(device, depth, reuse) if device.type == "cuda" else HostArenas(reuse)


class DeviceArenas:
    """For one CUDA device. Build it in the consumer's thread, whose current stream it takes for the consumer's."""

    pinned = True

    def __init__(self, device: torch.device, depth: int, reuse: bool) -> None:
        self.device, self.reuse, self.copy_s = device, reuse, 0.0
        self.consumer = torch.cuda.current_stream(device)
        self.copies = torch.cuda.Stream(device)
        self._slots = deque(_Slot() for _ in range(depth + 1))
        self.free: deque[tuple[Tensor, torch.cuda.Event]] = deque()  # buffers that came back, and since when
        self.latest: tuple[Tensor, torch.cuda.Stream] | None = None  # what the consumer took last, if it is reused

    def stage(self, nbytes: int) -> Stage:
        slot = self._slots[0]
        self._slots.rotate(-1)
        self.copy_s += slot.settle()
        slot.fit(nbytes)
        return _DeviceStage(self, slot)

    def buffer(self, nbytes: int) -> Tensor:
        """Memory of the device that the copy stream may write to."""
        if self.reuse:
            for _ in range(len(self.free)):
                data, given_back = self.free.popleft()
                if data.numel() >= nbytes:
                    self.copies.wait_event(given_back)
                    return data
                self.consumer.wait_event(given_back)  # too small: back to the device, when nobody reads it any more
            nbytes = capacity(nbytes)
        with torch.cuda.device(self.device), torch.cuda.stream(self.consumer):
            data = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.copies.wait_stream(self.consumer)
        return data

    def give_back(self) -> None:
        """What the consumer took last is free once the stream that it was taken on gets here."""
        if self.latest is not None:
            data, stream = self.latest
            given_back = torch.cuda.Event()
            given_back.record(stream)
            self.free.append((data, given_back))
            self.latest = None

    def close(self) -> None:
        """Nothing is freed before the copy to it arrived and everyone has read it."""
        for slot in self._slots:
            self.copy_s += slot.settle()
        self.give_back()
        for _, given_back in self.free:
            self.consumer.wait_event(given_back)
        self.free.clear()


class _Slot:
    """A pinned arena, and the copy that last read it."""

    def __init__(self) -> None:
        self.pinned = torch.empty(0, dtype=torch.uint8)
        self.copy: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def settle(self) -> float:
        """Waits until the host may write again; the seconds that the copy took."""
        if self.copy is None:
            return 0.0
        began, done = self.copy
        self.copy = None
        done.synchronize()
        return float(began.elapsed_time(done)) / 1e3

    def fit(self, nbytes: int) -> None:
        if self.pinned.numel() < nbytes:
            self.pinned = torch.empty(capacity(nbytes), dtype=torch.uint8, pin_memory=True)


class _DeviceStage:
    def __init__(self, arenas: DeviceArenas, slot: _Slot) -> None:
        self._arenas, self._slot = arenas, slot
        self.host: Array = slot.pinned.numpy()

    def send(self, nbytes: int) -> Delivery:
        arenas, slot = self._arenas, self._slot
        data = arenas.buffer(nbytes)
        began, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(arenas.device), torch.cuda.stream(arenas.copies):
            began.record(arenas.copies)
            data[:nbytes].copy_(slot.pinned[:nbytes], non_blocking=True)
            done.record(arenas.copies)
        slot.copy = began, done
        return _DeviceDelivery(arenas, data, nbytes, done)


class _DeviceDelivery:
    def __init__(self, arenas: DeviceArenas, buffer: Tensor, nbytes: int, done: torch.cuda.Event) -> None:
        self._arenas, self._buffer, self._done = arenas, buffer, done
        self.data, self._taken = buffer[:nbytes], False

    def receive(self) -> None:
        self._taken, arenas = True, self._arenas
        current = torch.cuda.current_stream(arenas.device)
        current.wait_event(self._done)
        if arenas.reuse:
            arenas.give_back()
            arenas.latest = self._buffer, current
        elif current != arenas.consumer:
            self._buffer.record_stream(current)  # freed on the stream it was made on, though used on another

    def __del__(self) -> None:
        if not self._taken:
            self._arenas.consumer.wait_event(self._done)
