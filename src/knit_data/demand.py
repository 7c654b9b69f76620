"""What the trainer tells launchers: what the open train batch still needs, and what else decides when to launch it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any, TypeVar

from knit_data.admission import Admission, Candidate
from knit_data.quotas import Combination

C = TypeVar("C", bound=Candidate)
D = TypeVar("D", bound="Demand")
Counts = Mapping[Combination, int]
Amounts = Mapping[Combination, float]

_AMPLE = 0.02  # share of time that a trainer may wait and still be what limits the run
_MEMORY = 0.95  # of how much it waited, a step
_STEPS = 17  # that a pace is the median of
_RECENT = 64  # groups that are named, and that a yield is estimated from


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r} where a count belongs")
    return value


def _real(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} where a number belongs")
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} where true or false belongs")
    return value


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{value!r} where names belong")
    return tuple(value)


_READ: Mapping[str, Any] = {  # a field's value from JSON, by the field's type
    "int": _whole,
    "bool": _flag,
    "float | None": lambda value: None if value is None else _real(value),
    "int | None": lambda value: None if value is None else _whole(value),
    "tuple[str, ...]": _names,
    "Counts": lambda value: {_names(combination): _whole(n) for combination, n in value},
    "Amounts": lambda value: {_names(combination): _real(n) for combination, n in value},
}


@dataclass(frozen=True)
class Demand:
    """What the open train batch still needs: groups by combination of quota attributes, and free seats beside."""

    train_batch: int = 0
    deficits: Counts = field(default_factory=dict)
    free: int = 0

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: [[list(c), n] for c, n in v.items()] if isinstance(v, Mapping) else v for k, v in data.items()}

    @classmethod
    def from_json(cls: type[D], data: Mapping[str, Any]) -> D:
        """Raises KeyError, TypeError or ValueError where it is not what ``to_json`` made."""
        return cls(**{f.name: _READ[str(f.type)](data[f.name]) for f in fields(cls)})


@dataclass(frozen=True)
class Outlook(Demand):
    """A demand with what a launcher must know beside.

    ``attributes``: what combinations give values of. ``seats``: one way to fill all seats left; ``mix``: a whole
    train batch. ``waiting``: complete groups without a seat. ``surplus``: groups trained beyond their share of the mix
    so far. ``yields``: share of complete groups that were not dropped, where it is below 1. ``minis``, ``steps``:
    mini-batches of a pass and optimizer steps of a train batch; ``steps_left``: those not yet begun. ``pace``: seconds
    a step takes when nothing is waited for; None: not known yet. ``starving``: the trainer waits for groups.
    ``closing``: the last step before this train batch still runs, so that what starts now starts with weights that
    are about to be old. ``limit``: optimizer steps that a group may be older than its train batch's start; None: no
    bound. ``recent``: names of the groups that came last, dropped ones included.
    """

    attributes: tuple[str, ...] = ()
    seats: Counts = field(default_factory=dict)
    mix: Counts = field(default_factory=dict)
    waiting: Counts = field(default_factory=dict)
    surplus: Amounts = field(default_factory=dict)
    yields: Amounts = field(default_factory=dict)
    minis: int = 1
    steps: int = 1
    steps_left: int = 1
    pace: float | None = None
    starving: bool = True
    closing: bool = False
    limit: int | None = None
    recent: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outlook:
        made = super().from_json(data)
        tables = (made.deficits, made.seats, made.mix, made.waiting, made.surplus, made.yields)
        if any(len(c) != len(made.attributes) for table in tables for c in table) or min(made.minis, made.steps) < 1:
            raise ValueError(f"{data!r:.200} where an outlook belongs")
        return made


def outlook_of(admission: Admission[C], pace: Pace, starving: bool, yields: Yields | None = None) -> Outlook:
    """The demand of the open train batch, for launchers.

    While the last step of a train batch runs, the next one is open already, but what is launched for it now will be
    older than its weights. So a trainer that need not wait for groups is not said to need them yet.
    """
    sizes, p, rule = admission.sizes, admission.progress, admission.staleness
    steps, deficits = sizes.clock.steps, admission.deficits()
    closing = not starving and p.train_batch > 0 and p.epoch == p.position == 0
    early = closing and pace.ample
    return Outlook(
        p.train_batch,
        deficits,
        admission.seats.left - sum(deficits.values()),
        admission.quotas.attributes,
        {} if early else admission.plan(),
        admission.mix,
        admission.waiting_by_combination(),
        admission.surplus(),
        yields.shares() if yields else {},
        sizes.minis,
        steps,
        0 if early else steps * (p.train_batch + 1) - sizes.index(p),
        pace.seconds,
        starving,
        closing,
        None if rule is None else rule.steps(sizes.clock),
        tuple(yields.recent) if yields else (),
    )


class Pace:
    """How fast the trainer goes, from the times of admissions. ``seconds``: of an optimizer step, the median of recent
    ones that no group was waited for (a read-ahead may make two of them stand close); None: not known yet. ``ample``:
    hardly any time was waited lately, training is what limits the run."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._last: float | None = None
        self._waited = self._passed = 0.0  # lately

    @property
    def ample(self) -> bool:
        return self.seconds is not None and self._waited <= _AMPLE * self._passed

    def admitted(self, now: float, waited: float) -> None:
        """A mini-batch was admitted after the trainer had waited so many seconds for its groups."""
        if self._last is not None:
            took = now - self._last
            self._waited, self._passed = _MEMORY * self._waited + waited, _MEMORY * self._passed + took
            if not waited:
                self._steps.append(took)
                self.seconds = median(self._steps)
        self._last = now


class Yields:
    """Which groups came last, and by combination the share that was not dropped for what it is."""

    def __init__(self) -> None:
        self.recent: deque[str] = deque(maxlen=_RECENT)
        self._fates: dict[Combination, deque[bool]] = {}

    def add(self, combination: Combination, kept: bool, name: str | None = None) -> None:
        if name is not None:
            self.recent.append(name)
        self._fates.setdefault(combination, deque(maxlen=_RECENT)).append(kept)

    def shares(self) -> dict[Combination, float]:
        """Where some were dropped lately; never 0, so that launching goes on."""
        return {c: (1 + sum(f)) / (1 + len(f)) for c, f in self._fates.items() if not all(f)}
