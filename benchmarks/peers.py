"""What others do, written plainly: the baselines of the benchmarks."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar


def first_fit_decreasing(lengths: Sequence[int], cap: int, ranks: int) -> list[list[int]]:
    """Each row, longest first, into the first bin with room. Empty bins fill the last micro-batch up."""
    bins: list[list[int]] = []
    loads: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        for b, load in enumerate(loads):
            if load + lengths[row] <= cap:
                bins[b].append(row)
                loads[b] += lengths[row]
                break
        else:
            bins.append([row])
            loads.append(lengths[row])
    return bins + [[] for _ in range(-len(bins) % ranks)]


def least_loaded(lengths: Sequence[int], cap: int, ranks: int) -> list[list[int]]:
    """Each row, longest first, into the least loaded bin; once more with ``ranks`` more bins until the cap holds."""
    falling = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    count = -(-sum(lengths) // cap)
    count += -count % ranks
    while True:
        heap = [(0, b) for b in range(count)]
        bins: list[list[int]] = [[] for _ in range(count)]
        for row in falling:
            load, b = heap[0]
            bins[b].append(row)
            heapq.heapreplace(heap, (load + lengths[row], b))
        if max(heap)[0] <= cap:
            return bins
        count += ranks


def arrival_order(lengths: Sequence[int], cap: int, ranks: int) -> list[list[int]]:
    """The next row into the last bin, or into a new one: a loader that streams."""
    bins: list[list[int]] = [[]]
    load = 0
    for row, length in enumerate(lengths):
        if load + length > cap:
            bins.append([])
            load = 0
        bins[-1].append(row)
        load += length
    return bins + [[] for _ in range(-len(bins) % ranks)]


class Waiting(Protocol):
    """A complete group that waits for a seat."""

    @property
    def order(self) -> tuple[int, ...]: ...
    @property
    def combination(self) -> tuple[str, ...]: ...


W = TypeVar("W", bound=Waiting)


def sort_and_scan(
    waiting: Sequence[W], count: int, fits: Callable[[Sequence[tuple[str, ...]]], bool]
) -> list[W] | None:
    """For every seat: sort all that wait, take the oldest that still fits. ``fits``: whether these combinations,
    together, leave every quota of the train batch within reach."""
    chosen: list[W] = []
    taken: list[tuple[str, ...]] = []
    while len(chosen) < count:
        rest = sorted((group for group in waiting if group not in chosen), key=lambda group: group.order)
        found = next((group for group in rest if fits([*taken, group.combination])), None)
        if found is None:
            return None
        chosen.append(found)
        taken.append(found.combination)
    return chosen
