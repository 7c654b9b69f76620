"""Reusable host memory under the tensors of micro-batches.

On the CPU a micro-batch's tensors lease their arena: it comes back when the last of them dies, so a batch that the
user keeps is never overwritten, and the pool grows by what is kept.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

from knit_data.infos import Array

ALIGN = 64
_KEEP = 8  # free arenas that are held for reuse; more come back when a user lets many batches go at once


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
