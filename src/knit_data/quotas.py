"""Quotas over one train batch, and the counting test that keeps them reachable.

State: seats left r, groups admitted per value c_s, bounds l_s <= count <= u_s. After any admission the batch can
still be completed iff c_s <= u_s for all s and

    sum max(0, l_s - c_s)  <=  r  <=  sum (u_s - c_s)

that is, the seats that minima reserve fit into those left, and the maxima leave room for all of them. The test is
exact for one partition, and by induction never runs into a dead end, whatever arrives. Checking maxima alone does:
a fast source fills the seats that another's minimum needs.

>>> seats = QuotaSeats(Quotas({"source": {"math": 2, "code": (1, 2)}}), 4)
>>> [seats.admissible(("math",)), seats.admissible(("code",))]
[True, True]
>>> seats.admit(("math",)); seats.admit(("math",))
>>> seats.admissible(("math",)), seats.deficits(), seats.free()
(False, {('code',): 1}, 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from knit_data.errors import InvalidArgument

Combination = tuple[str, ...]


@dataclass(frozen=True)
class Bounds:
    """At least ``low``, at most ``high`` groups of a train batch; ``None``: as many as the batch has."""

    low: int
    high: int | None

    def __str__(self) -> str:
        if self.high is None:
            return f"at least {self.low}"
        if self.low == self.high:
            return f"exactly {self.low}"
        return f"{self.low} to {self.high}" if self.low else f"at most {self.high}"


def at_least(count: int) -> Bounds:
    """A quota of ``count`` groups or more."""
    return Bounds(_count("at_least", count), None)


def at_most(count: int) -> Bounds:
    """A quota of ``count`` groups or fewer."""
    return Bounds(0, _count("at_most", count))


def _count(what: str, count: int) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise InvalidArgument(f"{what} takes a count of groups, an int >= 0, found {count!r}.")
    return count


@dataclass(frozen=True)
class Quotas:
    """``{"source": {"math": 32, "code": (12, 20), "vqa": at_least(8)}}``: groups of a train batch by attribute."""

    mapping: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    support: Any = None
    mini_window: int | None = None

    def __post_init__(self) -> None:
        for name in ("support", "mini_window"):
            if getattr(self, name) is not None:
                raise InvalidArgument(f"Quotas {name}={getattr(self, name)!r}: this version takes None only.")
        if not isinstance(self.mapping, Mapping):
            raise InvalidArgument(f"quotas must map an attribute to {{value: bounds}}, found {self.mapping!r}.")
        if any(not isinstance(values, Mapping) for values in self.mapping.values()):
            raise InvalidArgument(
                f"quotas must map an attribute to {{value: bounds}}, found {dict(self.mapping)!r}; if these are "
                'values, name their attribute: {"source": {...}}.'
            )
        if len(self.mapping) > 1:
            raise InvalidArgument(
                f"quotas name {len(self.mapping)} attributes ({', '.join(self.mapping)}); this version takes one. "
                "Combine them into one attribute, such as 'math/hard'."
            )
        for attribute, values in self.mapping.items():
            if not values:
                raise InvalidArgument(f"quotas[{attribute!r}] must map values to bounds, found {values!r}.")
            for name in (attribute, *values):
                if not isinstance(name, str):
                    raise InvalidArgument(f"quotas name attributes and values as strings, found {name!r}.")
        self.bounds()

    @property
    def attributes(self) -> tuple[str, ...]:
        return tuple(self.mapping)

    def bounds(self) -> dict[Combination, Bounds]:
        return {
            (value,): _bounds(f"quotas[{attribute!r}][{value!r}]", bound)
            for attribute, values in self.mapping.items()
            for value, bound in values.items()
        }


def _bounds(what: str, bound: Any) -> Bounds:
    if isinstance(bound, Bounds):
        return bound
    low, high = bound if isinstance(bound, tuple) and len(bound) == 2 else (bound, bound)
    whole = [n for n in (low, high) if n is not None]
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in whole) or not whole or low is None:
        raise InvalidArgument(
            f"{what} = {bound!r}: give a count of groups, a (low, high) range, kd.at_least(n) or kd.at_most(n); "
            "this version has no shares."
        )
    if high is not None and low > high:
        raise InvalidArgument(f"{what} = {bound!r}: the lower bound {low} is above the upper bound {high}.")
    return Bounds(low, high)


class QuotaSeats:
    """The seats of one train batch: which combinations may still be admitted, and what is short."""

    def __init__(self, quotas: Quotas, train_batch_size: int, counts: Mapping[Combination, int] | None = None) -> None:
        self.attributes = quotas.attributes
        self.bounds = quotas.bounds()
        self.size = train_batch_size
        low, high = 0, 0
        for bound in self.bounds.values():
            low += bound.low
            high += train_batch_size if bound.high is None else bound.high
        listing = ", ".join(f"{'/'.join(c)} {b}" for c, b in self.bounds.items())
        if self.bounds and low > train_batch_size:
            raise InvalidArgument(
                f"quotas need at least {low} groups ({listing}), train_batch_size is {train_batch_size}; lower one of "
                "them or raise train_batch_size."
            )
        if self.bounds and high < train_batch_size:
            raise InvalidArgument(
                f"quotas allow at most {high} groups ({listing}), train_batch_size is {train_batch_size}: a batch "
                "could never fill. Raise a bound or lower train_batch_size."
            )
        self._high = {c: train_batch_size if b.high is None else b.high for c, b in self.bounds.items()}
        self.counts: dict[Combination, int] = dict.fromkeys(self.bounds, 0)
        self.left = train_batch_size
        for combination, count in (counts or {}).items():
            self.counts[combination] = self.counts.get(combination, 0) + count
            self.left -= count

    def copy(self) -> QuotaSeats:
        twin = object.__new__(QuotaSeats)
        twin.__dict__.update(self.__dict__, counts=dict(self.counts))
        return twin

    def knows(self, combination: Combination) -> bool:
        return not self.bounds or combination in self.bounds

    def admissible(self, combination: Combination) -> bool:
        """Whether every quota can still be met after admitting one more group of this combination."""
        if self.left == 0:
            return False
        if not self.bounds:
            return True
        count = self.counts[combination]
        return count < self._high[combination] and (count < self.bounds[combination].low or self.free() > 0)

    def admit(self, combination: Combination) -> None:
        self.counts[combination] = self.counts.get(combination, 0) + 1
        self.left -= 1

    def release(self, combination: Combination) -> None:
        """Undo an admit."""
        self.counts[combination] -= 1
        self.left += 1

    @property
    def greedy(self) -> bool:
        """Whether the oldest that fits never leaves too little room for enough others."""
        return True

    def completion(self) -> dict[Combination, int]:
        """One way to fill all seats left."""
        if not self.bounds:
            return {(): self.left}
        out = {c: max(0, b.low - self.counts[c]) for c, b in self.bounds.items()}
        room = {c: max(0, self._high[c] - max(self.counts[c], b.low)) for c, b in self.bounds.items()}
        middle = {c: out[c] + room[c] / 2 for c in out}
        for _ in range(self.left - sum(out.values())):
            c = min((c for c in out if room[c]), key=lambda c: (out[c] + 1) / max(middle[c], 1e-9))
            out[c] += 1
            room[c] -= 1
        return out

    def deficits(self) -> dict[Combination, int]:
        """Groups that minima still reserve."""
        short = {c: b.low - self.counts[c] for c, b in self.bounds.items()}
        return {c: n for c, n in short.items() if n > 0}

    def free(self) -> int:
        """Seats that no minimum reserves."""
        return self.left - sum(self.deficits().values())
