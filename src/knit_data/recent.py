"""The most recently used values, within a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

V = TypeVar("V")


class Recent(Generic[V]):
    """Values by key; the least recently used go first. One thread at a time.

    A limit of 10 bytes and values of 6, 4 and 5 bytes, put in this order: the first two stay, then the last two.
    """

    def __init__(self, size: Callable[[V], int]) -> None:
        self._size = size
        self._values = OrderedDict[str, V]()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        self._values.clear()
        self.nbytes = 0

    def found(self, keys: Iterable[str]) -> dict[str, V]:
        """Those of these that are there; they count as used."""
        found = {key: self._values[key] for key in keys if key in self._values}
        for key in found:
            self._values.move_to_end(key)
        return found

    def put(self, key: str, value: V, limit: int) -> None:
        """Keep it, unless it alone is larger than ``limit`` bytes."""
        if key in self._values:
            self.nbytes -= self._size(self._values.pop(key))
        if self._size(value) <= limit:
            self._values[key] = value
            self.nbytes += self._size(value)
        while self._values and self.nbytes > limit:
            self.nbytes -= self._size(self._values.popitem(last=False)[1])
