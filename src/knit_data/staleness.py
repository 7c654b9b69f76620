"""Architectural staleness: how much older training data is than colocated execution would make it.

Trained at step u = kS + ..., generated with version v (optimizer steps done): the gap is u - v, colocated execution
would have u - kS, the excess a = kS - v is what the architecture adds; a / S counts it in train batches. Negative a
(weights published inside a batch) counts as 0 in limits and statistics.

>>> clock = Clock(steps=4)                       # S = 4 optimizer steps a train batch
>>> clock.excess(train_batch=3, version=4)       # 12 - 4 steps, two train batches old
8
>>> Staleness(2).admits(8, clock), Staleness(1).admits(8, clock)
(True, False)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from knit_data.errors import InvalidArgument
from knit_data.infos import Array


@dataclass(frozen=True)
class Clock:
    """How train batches count in optimizer steps: S = epochs x mini-batches."""

    steps: int

    def excess(self, *, train_batch: int, version: int) -> int:
        """a = kS - v in optimizer steps, signed."""
        return train_batch * self.steps - version


@dataclass(frozen=True)
class Staleness:
    """The bound on architectural staleness a = kS - v, inclusive, tested once, at admission: how many train batches or
    optimizer steps before its train batch k began the weights of a group's oldest member were published.

    ``unit``: "train_batch" or "optimizer_step". ``strategy``: "drop" what is too old, or also "wait": keep seats for
    groups in flight that this train batch is the last to take. It needs a ``RolloutPacer``, which says what is in
    flight; a seat is kept until its launch is done, or its launcher is closed, starts again or has said nothing for ten
    minutes. ``abandoned``: what to do with a version above the trainer's step, which only a timeline that a resume
    abandoned can have made: "accept" it as a = 0, or "drop" its group.
    """

    limit: int
    unit: str = "train_batch"
    strategy: str = "drop"
    abandoned: str = "accept"

    def __post_init__(self) -> None:
        if isinstance(self.limit, bool) or not isinstance(self.limit, int) or self.limit < 0:
            raise InvalidArgument(f"max_staleness must be an int >= 0 or None for no bound, found {self.limit!r}.")
        if self.unit not in ("train_batch", "optimizer_step"):
            raise InvalidArgument(f"staleness unit must be 'train_batch' or 'optimizer_step', found {self.unit!r}.")
        if self.strategy not in ("drop", "wait"):
            raise InvalidArgument(f"staleness strategy must be 'drop' or 'wait', found {self.strategy!r}.")
        if self.abandoned not in ("accept", "drop"):
            raise InvalidArgument(f"abandoned must be 'accept' or 'drop', found {self.abandoned!r}.")

    def steps(self, clock: Clock) -> int:
        return self.limit * (clock.steps if self.unit == "train_batch" else 1)

    def admits(self, excess: int, clock: Clock) -> bool:
        return excess <= self.steps(clock)

    def excludes(self, version: int, clock: Clock, *, train_batch: int, step: int) -> str | None:
        """Why an incomplete group with a member of this version can never be admitted: steps only grow."""
        if not self.admits(clock.excess(train_batch=train_batch, version=version), clock):
            return "stale"
        return "abandoned" if self.abandoned == "drop" and version > step else None

    def last_chance(self, version: int, clock: Clock, *, train_batch: int) -> bool:
        """Whether this train batch may take the version and the next one may not."""
        now, then = (clock.excess(train_batch=k, version=version) for k in (train_batch, train_batch + 1))
        return self.admits(now, clock) and not self.admits(then, clock)


def statistics(versions: Array, means: Array, *, index: int, train_batch: int, clock: Clock) -> Mapping[str, float]:
    """Of one mini-batch: mean, 99th percentile and maximum of max(a, 0) / S, the same by token-mean version, the mean
    gap in optimizer steps, and the mean of signed a in optimizer steps, which the identity uses."""
    n, steps, start = len(versions), clock.steps, train_batch * clock.steps
    excess = np.maximum(start - versions, 0)
    excess.sort()
    by_token = np.maximum(start - means, 0)
    mean, total = int(excess.sum()) / n, int(versions.sum())
    return {
        "staleness/mean": mean / steps,
        "staleness/p99": _p99(excess, steps),
        "staleness/max": int(excess[-1]) / steps,
        "staleness/token_mean": float(by_token.sum()) / n / steps,
        "staleness/steps_mean": mean,
        "staleness/steps_p99": _p99(excess, 1),
        "staleness/signed_steps_mean": (n * start - total) / n,
        "staleness/gap_mean": (n * index - total) / n,
    }


def _p99(ordered: Array, unit: int) -> float:
    """As np.percentile(ordered / unit, 99), which takes as long as a whole small mini-batch otherwise takes: linear
    between the neighbours of place 0.99 (n - 1), from the nearer one. Of [0, 1, 2]: place 1.98, hence 2 - 1 * 0.02."""
    place = 0.99 * (len(ordered) - 1)
    low, share = int(place), place - int(place)
    a, b = int(ordered[low]) / unit, int(ordered[min(low + 1, len(ordered) - 1)]) / unit
    return b - (b - a) * (1 - share) if share >= 0.5 else a + (b - a) * share
