"""What to launch next, and when to hold back: just in time, combination by combination.

Launching early makes data stale only across a publish. So a group is launched one lead ahead of its turn: when the
trainer will have used up what is there of its combination by the time it is complete. Two rules keep the run alive:
what the open train batch still needs is never held back, and while the trainer starves nothing is, except what would
be too stale at its turn. Each combination is judged by itself, so that a fast one's surplus never takes a slow one's
place. Published work: AReaL's launch gate (arXiv 2505.24298) bounds the whole; here each part is bounded.

Pure: observations in, decisions out.

>>> from dataclasses import replace
>>> launching = Launching()
>>> demand = Outlook(seats={("a",): 2}, mix={("a",): 4}, minis=4, steps=4, steps_left=2, pace=10.0, starving=False)
>>> launching.next(demand, {("a",): 1})               # the open train batch needs 2, 1 is there
('a',)
>>> launching.took(("a",), 15.0)
>>> launching.next(demand, {("a",): 2})               # needed in 2 steps, 20 s; complete in 15 s: too early
>>> launching.next(replace(demand, steps_left=1), {("a",): 2})
('a',)
"""

from __future__ import annotations

import math
from collections import deque

from knit_data.demand import Counts, Outlook
from knit_data.quotas import Combination

_RECENT = 64  # durations that a lead is estimated from
_SPREAD = 0.75  # standard deviations that a lead lies above the mean: holding back costs under 1 % of throughput
# How much the lead counts in the order of launches: all of it would favour slow combinations at the cost of fast ones.
# But while a train batch closes, what takes long goes first: whatever starts will wait through one publish, and long
# responses are the fewest that keep the slots busy; unless they are so long that they would wait through two.
_URGENCY, _LONG_FIRST = 0.5, 2.0
_FAR = 2  # train batches ahead at most, where no staleness bound says otherwise


class Launching:
    """Decides what to launch; learns how long groups take."""

    def __init__(self) -> None:
        self._seconds: dict[Combination, deque[float]] = {}
        self._taken: dict[Combination, tuple[float, float]] = {}  # their mean and deviation

    def took(self, combination: Combination, seconds: float) -> None:
        """A group was complete so many seconds after its launch."""
        recent = self._seconds.setdefault(combination, deque(maxlen=_RECENT))
        recent.append(seconds)
        mean = sum(recent) / len(recent)
        self._taken[combination] = mean, math.sqrt(sum((s - mean) ** 2 for s in recent) / len(recent))

    def next(self, demand: Outlook, in_flight: Counts, version: int = 0) -> Combination | None:
        """The combination to launch a group of, or None: hold back. ``in_flight``: launched and not complete;
        ``version``: the policy version that a group launched now would start with."""
        best: tuple[float, Combination] | None = None
        for combination in {**demand.mix, **demand.seats}:
            needed, whole = demand.seats.get(combination, 0), demand.mix.get(combination, 0)
            coming = in_flight.get(combination, 0) * demand.yields.get(combination, 1.0)
            coming += demand.waiting.get(combination, 0)
            spare = coming - needed
            if spare >= 0 and (not whole or self._too_early(demand, spare / whole, version)):
                continue
            # past surplus makes it less urgent, or more; it fills no seat
            turn = self._turn(demand, coming + demand.surplus.get(combination, 0.0), needed, whole)
            mean, spread = self._lead(combination, demand)
            if spare >= 0 and not demand.starving and turn >= mean + spread:
                continue
            weight = _URGENCY if not demand.closing else _LONG_FIRST if mean < demand.steps else 0.0
            urgency = turn - weight * mean
            if best is None or urgency < best[0]:
                best = urgency, combination
        return best[1] if best else None

    @staticmethod
    def _too_early(demand: Outlook, batches: float, version: int) -> bool:
        """Whether it would be too stale at its turn, so many train batches after the open one's end."""
        turn = (demand.train_batch + 1 + int(batches)) * demand.steps
        return turn - version > (_FAR * demand.steps if demand.limit is None else demand.limit)

    @staticmethod
    def _turn(demand: Outlook, there: float, needed: int, whole: int) -> float:
        """Steps until one more than ``there`` is needed."""
        if there < 0:
            return demand.minis * there / max(1, whole)
        if there < needed:
            left = sum(demand.seats.values()) / max(1, sum(demand.mix.values()))  # share of the train batch
            return left * demand.minis * there / needed
        batches, part = divmod((there - needed) / whole, 1.0)
        return demand.steps_left + batches * demand.steps + part * demand.minis

    def _lead(self, combination: Combination, demand: Outlook) -> tuple[float, float]:
        """Steps from launch to completion: the recent mean, and how much more to be safe. Before anything is known:
        a whole train batch."""
        taken = self._taken.get(combination)
        if taken is None or not demand.pace:
            return float(demand.steps), 0.0
        mean, deviation = taken
        return mean / demand.pace, _SPREAD * deviation / demand.pace
