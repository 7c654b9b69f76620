"""Quotas over one train batch: the words that say them. ``seats`` decides what they still allow.

>>> quotas = Quotas({"source": {"math": 0.5, "code": (1, 2), "web": at_least(1)}})
>>> [f"{v} {b}" for v, b in quotas.resolved(8)["source"].items()]
['math exactly 4 (0.5 of 8)', 'code 1 to 2', 'web at least 1']
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from knit_data.errors import InvalidArgument

Combination = tuple[str, ...]

_TOLERANCE = Fraction(1, 10**9)  # shares such as 0.3333333333 three times are meant to sum to 1


@dataclass(frozen=True)
class Bounds:
    """At least ``low``, at most ``high`` groups of a train batch; ``None``: as many as the batch has."""

    low: int
    high: int | None
    note: str = field(default="", compare=False)  # the shares they come from: "0.25 of 64"

    def __str__(self) -> str:
        if self.high is None:
            text = f"at least {self.low}"
        elif self.low == self.high:
            text = f"exactly {self.low}"
        else:
            text = f"{self.low} to {self.high}" if self.low else f"at most {self.high}"
        return f"{text} ({self.note})" if self.note else text


@dataclass(frozen=True)
class Wanted:
    """Bounds as they were asked for: an int counts groups, a float is a share of the train batch."""

    low: float
    high: float | None

    @property
    def share(self) -> Fraction | None:
        """Of a plain share such as 0.25, as it was written."""
        return _fraction(self.low) if isinstance(self.low, float) and self.low == self.high else None

    def resolve(self, what: str, size: int) -> Bounds:
        """Counts, for a train batch of ``size`` groups. Shares are rounded to the nearest count, halves up."""
        low = _count(what, self.low, size)
        high = None if self.high is None else _count(what, self.high, size)
        _ordered(what, low, high)
        return Bounds(low, high, self.note(size))

    def note(self, size: int) -> str:
        ends = [self.low, self.high] if self.low else [self.high]
        said = list(dict.fromkeys(n for n in ends if n is not None))
        return f"{' to '.join(map(str, said))} of {size}" if any(isinstance(n, float) for n in said) else ""


def at_least(amount: float) -> Wanted:
    """A quota of ``amount`` groups or more: a count, or a share of the train batch such as 0.25."""
    return Wanted(_amount("at_least", amount), None)


def at_most(amount: float) -> Wanted:
    """A quota of ``amount`` groups or fewer: a count, or a share of the train batch such as 0.25."""
    return Wanted(0, _amount("at_most", amount))


class Quotas:
    """How many groups of each train batch carry which values of their attributes.

    ``Quotas({"source": {"math": 32, "code": (12, 20), "web": at_least(8)}, "level": {"easy": 0.75, "hard": 0.25}})``

    Bounds: ``n`` exactly, ``(low, high)`` with None for no upper bound, ``at_least(n)``, ``at_most(n)``. An int counts
    groups; a float above 0 and up to 1.0 is a share of the train batch, rounded once to the nearest count, halves up:
    0.25 of 64 groups is 16. So 1 is one group, 1.0 the whole batch. An attribute of plain shares that sum to 1 is
    rounded by largest remainder: 0.5, 0.25 and 0.25 of 10 groups are 5, 3 and 2. A share that rounds to no group at
    all is refused, be it an upper or a lower bound.

    ``support``: which combinations of values can occur, in the order of the mapping. None: all. It matters: if hard
    code does not exist, ``support=[("math", "easy"), ("math", "hard"), ("code", "easy")]``, then 16 hard groups need
    16 seats of math. ``{("math", "hard"): (2, 4), ("math", "easy"): None}`` also bounds single combinations.

    ``mini_window``: None, only the whole train batch counts; or ``w`` groups that each value may be ahead of or behind
    an even pace: after j of M mini-batches between ``j * low / M - w`` and ``j * high / M + w``. With w=2, 32 exactly
    and M=4, there are 6 to 10 after the first mini-batch. 0 stratifies: every mini-batch has its 8.
    """

    def __init__(
        self,
        mapping: Mapping[str, Mapping[str, Any]] | None = None,
        support: Iterable[Combination] | Mapping[Combination, Any] | None = None,
        mini_window: int | None = None,
    ) -> None:
        self._wanted = _read_mapping({} if mapping is None else mapping)
        self._support = None if support is None else self._read_support(support)
        if mini_window is not None and (
            isinstance(mini_window, bool) or not isinstance(mini_window, int) or mini_window < 0
        ):
            raise InvalidArgument(f"mini_window must be None or a count of groups, an int >= 0, found {mini_window!r}.")
        self._mini_window = mini_window

    def __repr__(self) -> str:
        return f"Quotas({self._wanted!r}, support={self._support!r}, mini_window={self._mini_window!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Quotas) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # it holds mappings

    @property
    def attributes(self) -> tuple[str, ...]:
        return tuple(self._wanted)

    @property
    def support(self) -> tuple[Combination, ...] | None:
        """The combinations that can occur, in the order given; None: all."""
        return None if self._support is None else tuple(self._support)

    @property
    def mini_window(self) -> int | None:
        return self._mini_window

    def resolved(self, train_batch_size: int) -> dict[str, dict[str, Bounds]]:
        """Counts by attribute and value, for a train batch of this many groups."""
        _positive(train_batch_size)
        out = {}
        for attribute, values in self._wanted.items():
            shares = [wanted.share for wanted in values.values()]
            whole = [s for s in shares if s is not None]
            if len(whole) == len(shares) and abs(sum(whole, Fraction(-1))) <= _TOLERANCE:
                counts = apportion(train_batch_size, whole)
                out[attribute] = {
                    v: Bounds(n, n, w.note(train_batch_size)) for (v, w), n in zip(values.items(), counts, strict=True)
                }
                for (value, wanted), n in zip(values.items(), counts, strict=True):
                    if n == 0:
                        raise _no_group(_name(attribute, value), wanted.low, train_batch_size)
            else:
                out[attribute] = {v: w.resolve(_name(attribute, v), train_batch_size) for v, w in values.items()}
        return out

    def cells(self, train_batch_size: int) -> dict[Combination, Bounds]:
        """Counts by combination, for those that ``support`` bounds."""
        _positive(train_batch_size)
        return {
            c: wanted.resolve(f"support[{c!r}]", train_batch_size)
            for c, wanted in (self._support or {}).items()
            if wanted is not None
        }

    def to_json(self, train_batch_size: int) -> dict[str, Any]:
        """The same for equal terms, however they were written: {"attributes": [["source", {"math": "exactly 4"}]]}.
        Attributes stand in their order, which is that of the values in a combination."""
        out: dict[str, Any] = {
            "attributes": [
                [attribute, {value: str(replace(bound, note="")) for value, bound in values.items()}]
                for attribute, values in self.resolved(train_batch_size).items()
            ]
        }
        if self._support is not None:
            cells = self.cells(train_batch_size)
            out["support"] = [
                [list(c), str(replace(cells[c], note="")) if c in cells else None] for c in sorted(self._support)
            ]
        if self._mini_window is not None:
            out["mini_window"] = self._mini_window
        return out

    def _read_support(
        self, support: Iterable[Combination] | Mapping[Combination, Any]
    ) -> dict[Combination, Wanted | None]:
        if isinstance(support, str) or not isinstance(support, Iterable):
            raise InvalidArgument(f"support must list the combinations that can occur as tuples, found {support!r}.")
        names, out = self.attributes, dict[Combination, Wanted | None]()
        for c in support:
            if not isinstance(c, tuple) or len(c) != len(names) or not all(isinstance(value, str) for value in c):
                raise InvalidArgument(
                    f"support lists {c!r}: give a tuple with one value for each attribute, ({', '.join(names)})."
                )
            for attribute, value in zip(names, c, strict=True):
                if value not in self._wanted[attribute]:
                    raise InvalidArgument(
                        f"support lists {c!r}, but quotas[{attribute!r}] has no value {value!r}; it has "
                        f"{', '.join(self._wanted[attribute])}."
                    )
            if c in out:
                raise InvalidArgument(f"support lists {c!r} twice.")
            bound = support[c] if isinstance(support, Mapping) else None
            out[c] = None if bound is None else _wanted(f"support[{c!r}]", bound)
        for i, (attribute, values) in enumerate(self._wanted.items()):
            for value, wanted in values.items():
                if wanted.low and not any(c[i] == value for c in out):
                    raise InvalidArgument(
                        f"{_name(attribute, value)} asks for groups, but no combination in support has {value!r}; add "
                        "one or drop the quota."
                    )
        if not out:
            raise InvalidArgument("support lists no combination, so no group could be admitted; None stands for all.")
        return out


def apportion(total: int, weights: Sequence[Fraction | int]) -> list[int]:
    """``total`` split in proportion, by largest remainder; the first of equals gets more. 10 by 2, 1, 1: 5, 3, 2."""
    scale = math.lcm(*(w.denominator for w in weights))
    parts = [int(w * scale) for w in weights]  # whole numbers compare much faster than fractions
    whole = sum(parts) or 1
    out = [total * part // whole for part in parts]
    rest = total - sum(out)
    for i in sorted(range(len(out)), key=lambda i: -(total * parts[i] % whole))[:rest]:
        out[i] += 1
    return out


def _read_mapping(mapping: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Wanted]]:
    if not isinstance(mapping, Mapping):
        raise InvalidArgument(f"quotas must map an attribute to {{value: bounds}}, found {mapping!r}.")
    if any(not isinstance(values, Mapping) for values in mapping.values()):
        raise InvalidArgument(
            f"quotas must map an attribute to {{value: bounds}}, found {dict(mapping)!r}; if these are values, name "
            'their attribute: {"source": {...}}.'
        )
    for attribute, values in mapping.items():
        if not values:
            raise InvalidArgument(f"quotas[{attribute!r}] must map values to bounds, found {values!r}.")
        for name in (attribute, *values):
            if not isinstance(name, str):
                raise InvalidArgument(f"quotas name attributes and values as strings, found {name!r}.")
    return {a: {v: _wanted(_name(a, v), bound) for v, bound in values.items()} for a, values in mapping.items()}


def _name(attribute: str, value: str) -> str:
    return f"quotas[{attribute!r}][{value!r}]"


def _wanted(what: str, bound: Any) -> Wanted:
    if isinstance(bound, Wanted | Bounds):
        low, high = bound.low, bound.high
    elif isinstance(bound, tuple) and len(bound) == 2:
        low, high = bound
    elif isinstance(bound, tuple | list):
        raise InvalidArgument(f"{what} = {bound!r}: give a count of groups, a share, or a range, a (low, high) tuple.")
    else:
        low, high = bound, bound
    said = f"{what} = {bound!r}"
    low, high = _amount(said, low), None if high is None else _amount(said, high)
    if high is not None and isinstance(low, float) == isinstance(high, float):  # else known with the train batch only
        _ordered(said, low, high)
    return Wanted(low, high)


def _amount(what: str, n: Any) -> float:
    if isinstance(n, int) and not isinstance(n, bool) and n >= 0:
        return n
    if isinstance(n, float) and 0 < n <= 1:
        return n
    raise InvalidArgument(
        f"{what}: give a count of groups (an int >= 0) or a share of the train batch (a float above 0, up to 1.0), not "
        f"{n!r}; ranges are (low, high) tuples, kd.at_least(n) and kd.at_most(n)."
    )


def _positive(size: object) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InvalidArgument(f"train_batch_size must be an int of at least 1, found {size!r}.")


def _ordered(what: str, low: float, high: float | None) -> None:
    if high is not None and low > high:
        raise InvalidArgument(f"{what}: the lower bound {low} is above the upper bound {high}.")


def _fraction(share: float) -> Fraction:
    return Fraction(repr(float(share)))  # as written: 0.15 of 10 is a half


def _count(what: str, amount: float, size: int) -> int:
    if isinstance(amount, int):
        return amount
    count = int(_fraction(amount) * size + Fraction(1, 2))
    if count == 0:
        raise _no_group(what, amount, size)
    return count


def _no_group(what: str, share: float, size: int) -> InvalidArgument:
    return InvalidArgument(
        f"{what}: a share of {share} rounds to 0 groups of train_batch_size={size}; give a larger share, a count of "
        "groups, or a larger train_batch_size."
    )
