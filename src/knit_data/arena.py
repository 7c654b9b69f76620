"""The memory under the tensors of micro-batches, on a host: filled in one place, used in another.

On the CPU a micro-batch's tensors lease their arena: it comes back when the last of them dies, so a batch that the
user keeps is never overwritten, and the pool grows by what is kept. With ``reuse`` the lease ends when the consumer
takes the next one. ``device.py`` is the same for CUDA.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from knit_data.infos import Array

ALIGN = 64
_KEEP = 8  # free arenas that are held for reuse; more come back when a user lets many batches go at once


class Delivery(Protocol):
    """The bytes of a micro-batch on its device."""

    data: Tensor  # uint8

    def receive(self) -> None:
        """The consumer takes them, in its own thread; not calling it gives them up."""
        ...


class Stage(Protocol):
    """Host memory to fill."""

    host: Array  # uint8, 64-byte aligned, of unspecified content

    def send(self, nbytes: int) -> Delivery:
        """The first ``nbytes`` go to the device. ``host`` is not to be touched any more."""
        ...


class Arenas(Protocol):
    """Where micro-batches are put together. One thread at a time."""

    copy_s: float  # seconds of copying to the device, as far as they are known
    pinned: bool  # what is copied to the device from elsewhere should be in pinned memory, too

    def stage(self, nbytes: int) -> Stage: ...
    def close(self) -> None: ...


def capacity(nbytes: int) -> int:
    """The size of the arena that is made for so many bytes: 3,000,000 take 4,194,304."""
    return 1 << max(12, (nbytes - 1).bit_length())


class ArenaPool:
    """Byte arenas, 64-byte aligned, of power-of-two sizes so that batches of varying length reuse them."""

    def __init__(self) -> None:
        self._free: deque[Array] = deque(maxlen=_KEEP)  # appended by finalizers in any thread: no lock to hold
        self.made = 0

    def lease(self, nbytes: int) -> tuple[Array, Tensor]:
        """``nbytes`` of unspecified content, as an array to fill and as the uint8 tensor that owns the lease.

        The arena is reused once the tensor and all its views are gone; drop the array before handing them out.
        """
        arena = self._pick(nbytes)
        if arena is None:
            size = capacity(nbytes)
            raw = np.empty(size + ALIGN, np.uint8)
            skip = -raw.ctypes.data % ALIGN
            arena = raw[skip : skip + size]
            self.made += 1
        view = arena[:nbytes]
        weakref.finalize(view, self._free.append, arena).atexit = False
        return arena, torch.from_numpy(view)

    def _pick(self, nbytes: int) -> Array | None:
        """The smallest free arena that is large enough; only the loader's thread takes."""
        free = [self._free.popleft() for _ in range(len(self._free))]
        best = min((a for a in free if len(a) >= nbytes), key=len, default=None)
        self._free.extend(a for a in free if a is not best)
        return best


class HostArenas:
    """For the CPU: what was filled is what is used."""

    copy_s, pinned = 0.0, False

    def __init__(self, reuse: bool) -> None:
        self.pool, self.reuse = ArenaPool(), reuse
        self.latest: Tensor | None = None  # the lease of what the consumer took last, if they are reused

    def stage(self, nbytes: int) -> Stage:
        return _HostStage(self, nbytes)

    def close(self) -> None:
        """Nothing is under way."""


class _HostStage:
    def __init__(self, arenas: HostArenas, nbytes: int) -> None:
        self._arenas = arenas
        self.host, self._owner = arenas.pool.lease(nbytes)

    def send(self, nbytes: int) -> Delivery:
        # a second view of the memory, without the lease, if the lease is to end before its tensors do
        data = torch.from_numpy(self.host) if self._arenas.reuse else self._owner
        return _HostDelivery(self._arenas, data[:nbytes], self._owner)


class _HostDelivery:
    def __init__(self, arenas: HostArenas, data: Tensor, owner: Tensor) -> None:
        self.data, self._arenas, self._owner = data, arenas, owner

    def receive(self) -> None:
        if self._arenas.reuse:
            self._arenas.latest = self._owner
