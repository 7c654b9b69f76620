"""What is simulated: sources of prompts, rollout slots, a trainer; and presets that others can quote.

A slot generates one response at a time. A group is complete with its slowest response. The trainer takes the same
time for every optimizer step. Decoding speed does not depend on load; rewards and weight transfer take no time,
unless ``publish_seconds`` says so.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from knit_data.errors import InvalidArgument
from knit_data.quotas import Quotas

_SCARCE = 1e-3  # share of groups that must be left after filters and failures
_CUT = 8.0  # a lognormal response takes at most so many times the mean


@dataclass(frozen=True)
class Source:
    """Prompts of one kind: ``groups`` of a train batch, and how long a response takes.

    ``seconds``: the mean of a lognormal law whose logarithm has deviation ``sigma``, cut at 8 times the mean; or
    ``quantiles``: measured (probability, seconds) pairs in rising order, straight lines between them, as
    those of a run's lengths over tokens per second. ``keep``: share of complete groups that a filter keeps. ``fail``:
    share of responses that never come, so that their group is dropped.

    >>> Source(32, seconds=15.0).mean()
    15.0
    >>> Source(32, quantiles=[(0.0, 1.0), (0.5, 2.0), (1.0, 9.0)]).mean()
    3.5
    """

    groups: int
    seconds: float | None = None
    sigma: float = 0.0
    quantiles: Sequence[tuple[float, float]] | None = None
    keep: float = 1.0
    fail: float = 0.0

    def __post_init__(self) -> None:
        if not _count(self.groups) or self.groups < 1:
            raise InvalidArgument(f"Source groups must be an int of at least 1, found {self.groups!r}.")
        if (self.seconds is None) == (self.quantiles is None):
            raise InvalidArgument("Source takes seconds (with sigma) or quantiles: give one of them.")
        if self.seconds is not None and not (_number(self.seconds) and self.seconds > 0):
            raise InvalidArgument(f"Source seconds must be a finite number above 0, found {self.seconds!r}.")
        if not (_number(self.sigma) and 0 <= self.sigma <= 4):
            raise InvalidArgument(f"Source sigma must be between 0 and 4, found {self.sigma!r}.")
        if self.quantiles is not None:
            said = f"Source quantiles must be rising (probability, seconds) pairs, found {self.quantiles!r}."
            try:
                pairs = [(at, seconds) for at, seconds in self.quantiles]
            except (TypeError, ValueError):
                raise InvalidArgument(said) from None
            if len(pairs) < 2 or not all(_number(x) for pair in pairs for x in pair):
                raise InvalidArgument(said)
            if not all(a[0] < b[0] and a[1] <= b[1] for a, b in itertools.pairwise(pairs)):
                raise InvalidArgument(said)
            if pairs[0][0] < 0 or pairs[-1][0] > 1 or pairs[0][1] <= 0:
                raise InvalidArgument(f"Source quantiles: probabilities in 0..1 and seconds above 0, found {pairs}.")
            object.__setattr__(self, "quantiles", tuple(pairs))
        for name, low, high in (("keep", 0.0, 1.0), ("fail", 0.0, 1.0)):
            value = getattr(self, name)
            if not (_number(value) and low <= value <= high) or value == (low if name == "keep" else high):
                raise InvalidArgument(f"Source {name} must be a share that leaves something, found {value!r}.")

    def draw(self, rng: np.random.Generator, count: int) -> list[float]:
        """Seconds of ``count`` responses."""
        if self.quantiles is not None:
            at, seconds = np.array(self.quantiles).T
            drawn = np.interp(rng.random(count), at, seconds)
        else:
            assert self.seconds is not None
            drawn = np.minimum(rng.lognormal(self._mu(), self.sigma, count), _CUT * self.seconds)
        return [float(s) for s in drawn]

    def mean(self) -> float:
        """Seconds of a response."""
        if self.quantiles is not None:
            at, seconds = np.array(self.quantiles).T
            return float(np.trapezoid(seconds, at) + at[0] * seconds[0] + (1 - at[-1]) * seconds[-1])
        assert self.seconds is not None
        if not self.sigma:
            return float(self.seconds)
        below = NormalDist().cdf  # E[min(X, cut)]
        z = (math.log(_CUT * self.seconds) - self._mu()) / self.sigma
        return self.seconds * (below(z - self.sigma) + _CUT * (1 - below(z)))

    def _mu(self) -> float:
        assert self.seconds is not None
        return math.log(self.seconds) - self.sigma**2 / 2


@dataclass(frozen=True)
class Scenario:
    """A run to simulate.

    ``slots``: responses generated at the same time. ``mini_batches``: optimizer steps of a train batch, M. ``rho``:
    seconds that the trainer needs for a train batch over those that the slots need: above 1 the trainer is the
    bottleneck; ``step_seconds`` instead sets the seconds of an optimizer step. ``slack``: groups that each source's
    quota may be off, both ways; 0: exact quotas. ``launch_ahead``: train batches that unpaced launching may be ahead
    (AReaL's gate). ``publish``: weights go out after each "train_batch" or "mini_batch". ``max_staleness``: in train
    batches; None: no bound. ``batches`` are measured, after ``warmup`` others.
    """

    sources: Mapping[str, Source]
    slots: int
    mini_batches: int
    group_size: int = 8
    rho: float = 0.9
    step_seconds: float | None = None
    slack: int = 0
    launch_ahead: int = 2
    publish: str = "train_batch"
    publish_seconds: float = 0.0
    max_staleness: int | None = None
    batches: int = 45
    warmup: int = 10
    name: str = "run"
    quotas: Quotas = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.sources, Mapping) or not self.sources:
            raise InvalidArgument(f"Scenario sources must map names to Source, found {self.sources!r}.")
        wrong = [n for n, s in self.sources.items() if not isinstance(n, str) or not isinstance(s, Source)]
        if wrong:
            raise InvalidArgument(f"Scenario sources must map names to Source, found {wrong[0]!r} among them.")
        object.__setattr__(self, "sources", dict(self.sources))
        for name in ("slots", "mini_batches", "group_size", "batches"):
            if not _count(getattr(self, name)) or getattr(self, name) < 1:
                raise InvalidArgument(f"Scenario {name} must be an int of at least 1, found {getattr(self, name)!r}.")
        for name in ("slack", "launch_ahead", "warmup"):
            if not _count(getattr(self, name)):
                raise InvalidArgument(f"Scenario {name} must be an int of at least 0, found {getattr(self, name)!r}.")
        if not isinstance(self.name, str):
            raise InvalidArgument(f"Scenario name must be a string, found {self.name!r}.")
        if self.max_staleness is not None and not _count(self.max_staleness):
            raise InvalidArgument(f"Scenario max_staleness must be None or an int >= 0, found {self.max_staleness!r}.")
        if not (_number(self.rho) and self.rho > 0):
            raise InvalidArgument(f"Scenario rho must be a finite number above 0, found {self.rho!r}.")
        if self.step_seconds is not None and not (_number(self.step_seconds) and self.step_seconds > 0):
            raise InvalidArgument(f"Scenario step_seconds must be None or above 0, found {self.step_seconds!r}.")
        if not (_number(self.publish_seconds) and self.publish_seconds >= 0):
            raise InvalidArgument(f"Scenario publish_seconds must be at least 0, found {self.publish_seconds!r}.")
        if self.publish not in ("train_batch", "mini_batch"):
            raise InvalidArgument(f"Scenario publish must be 'train_batch' or 'mini_batch', found {self.publish!r}.")
        scarce = [n for n, x in self.sources.items() if x.keep * (1 - x.fail) ** self.group_size < _SCARCE]
        if scarce:
            raise InvalidArgument(
                f"Scenario: less than 1 in {1 / _SCARCE:.0f} groups of {scarce[0]!r} would be left by keep and fail, "
                f"with {self.group_size} responses each; no run would end. Raise keep or lower fail."
            )
        if self.groups % self.mini_batches:
            raise InvalidArgument(
                f"{self.groups} groups of a train batch cannot be cut into {self.mini_batches} mini-batches of the "
                "same size; change mini_batches or a source's groups."
            )
        g, least = self.slack, min(self.sources, key=lambda n: self.sources[n].groups)
        if g > self.sources[least].groups:
            found = f"found {g} with {self.sources[least].groups} groups of {least!r}"
            raise InvalidArgument(f"Scenario slack must leave each source's quota at least 0, {found}.")
        bounds = {n: (s.groups - g, s.groups + g) if g else s.groups for n, s in self.sources.items()}
        object.__setattr__(self, "quotas", Quotas({"source": bounds}))

    @property
    def groups(self) -> int:
        """Of a train batch."""
        return sum(source.groups for source in self.sources.values())

    @property
    def responses(self) -> int:
        """Of a train batch, B."""
        return self.groups * self.group_size

    @property
    def rollout_seconds(self) -> float:
        """That busy slots take for a train batch of the mix."""
        return sum(s.groups * self.group_size * s.mean() for s in self.sources.values()) / self.slots

    @property
    def train_seconds(self) -> float:
        """Of one optimizer step."""
        return self.step_seconds or self.rho * self.rollout_seconds / self.mini_batches

    @property
    def bounds(self) -> tuple[float, float]:
        """What mean staleness in train batches cannot go below: C / B while no slot is idle, 1 / M while the trainer
        never is. Both for publishing by train batch; when every mini-batch is published, 0."""
        if self.publish == "mini_batch":
            return 0.0, 0.0
        return min(1.0, self.slots / self.responses), 1 / self.mini_batches

    @property
    def bound(self) -> float:
        """The one that belongs to the bottleneck."""
        trainer_bound = self.train_seconds * self.mini_batches >= self.rollout_seconds
        return self.bounds[1] if trainer_bound else self.bounds[0]

    def facts(self) -> dict[str, Any]:
        """What a reader of a trace must know, ready for JSON."""
        chosen = vars(self) | {"groups": self.groups, "train_seconds": self.train_seconds}
        chosen["quotas"] = {n: [s.groups - self.slack, s.groups + self.slack] for n, s in self.sources.items()}
        return {k: v for k, v in chosen.items() if k not in ("sources", "rho", "step_seconds")}

    def estimate(self) -> float:
        """Where whole groups launched in a steady order end up: gamma C / B + rho / M, gamma being the slots' worth
        of finished siblings that wait for their slowest. Not a bound: slow sources first, or late launches, go
        below."""
        rng = np.random.default_rng(0)
        work = waits = 0.0
        for source in self.sources.values():
            drawn = np.array(source.draw(rng, 4096 * self.group_size)).reshape(4096, self.group_size)
            waits += source.groups * self.group_size * float(drawn.max(1).mean())
            work += source.groups * self.group_size * source.mean()
        busy = min(1.0, self.train_seconds * self.mini_batches / self.rollout_seconds)
        return waits / work * self.slots / self.responses + busy / self.mini_batches


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _count(value: object) -> bool:
    return _number(value) and isinstance(value, int) and value >= 0


def _laws(*laws: tuple[str, int, float, float]) -> dict[str, Source]:
    return {name: Source(groups, seconds, sigma) for name, groups, seconds, sigma in laws}


_MILD = _laws(("a", 20, 20, 0.3), ("b", 20, 30, 0.37), ("c", 16, 40, 0.43), ("d", 8, 60, 0.5))
_MIX3 = _laws(("fast", 32, 15, 0.5), ("medium", 20, 45, 0.8), ("slow", 12, 120, 1.0))
_MIX4 = _laws(("chat", 20, 12, 0.5), ("code", 20, 40, 0.7), ("math", 16, 60, 0.9), ("agent", 8, 150, 1.0))

PRESETS: Mapping[str, Scenario] = {
    s.name: s
    for s in (
        Scenario(_laws(("only", 64, 30, 0.3)), slots=8, mini_batches=16, name="homo"),
        Scenario(_MILD, slots=16, mini_batches=16, name="mild"),
        Scenario(_MIX3, slots=32, mini_batches=16, name="mix3"),
        Scenario(_MIX4, slots=64, mini_batches=16, name="mix4"),
        Scenario(_MILD, slots=64, mini_batches=8, rho=1.3, name="trainer-bound-mild"),
        Scenario(_MIX4, slots=64, mini_batches=8, rho=1.3, name="trainer-bound-mix4"),
    )
}


def preset(name: str, slots: int | None = None, mini_batches: int | None = None, slack: int = 0) -> Scenario:
    """A preset, with other numbers where given."""
    if name not in PRESETS:
        raise InvalidArgument(f"there is no preset {name!r}; there are {', '.join(PRESETS)}.")
    base = PRESETS[name]
    return replace(
        base,
        slots=base.slots if slots is None else slots,
        mini_batches=base.mini_batches if mini_batches is None else mini_batches,
        slack=slack,
    )
