"""Quotas of every structure as plain numbers, and what they mean, by enumeration of all ways to fill a train batch."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import product

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from knit_data.quotas import Bounds, Combination, Quotas
from knit_data.seats import QuotaSeats

Range = tuple[int, int]
Counts = tuple[int, ...]
SEEDED = st.integers(0, 1 << 32).map(random.Random)  # st.randoms would draw every step of a walk
SMALL = settings(suppress_health_check=[HealthCheck.large_base_example, HealthCheck.data_too_large])


@dataclass(frozen=True)
class Spec:
    """Quotas as plain numbers, and what they mean, by enumeration."""

    values: tuple[tuple[tuple[str, Range], ...], ...]  # by attribute
    keys: tuple[Combination, ...]  # that can occur
    size: int
    cells: tuple[tuple[Combination, Range], ...] = ()
    explicit: bool = True  # the support is passed on
    mini: int | None = None
    window: int | None = None

    def quotas(self) -> Quotas:
        bounds = dict(self.cells)
        return Quotas(
            {"abcd"[i]: {v: Bounds(*b) for v, b in values} for i, values in enumerate(self.values)},
            {key: Bounds(*bounds[key]) if key in bounds else None for key in self.keys} if self.explicit else None,
            self.window,
        )

    def seats(self, counts: dict[Combination, int] | None = None) -> QuotaSeats:
        return QuotaSeats(self.quotas(), self.size, counts, self.mini)

    def terms(self) -> dict[tuple[int, Combination], Range]:
        """(attribute, value) or (-1, combination): its bounds."""
        out = {(i, (v,)): b for i, values in enumerate(self.values) for v, b in values}
        return {**out, **{(-1, c): b for c, b in self.cells}}

    def members(self, term: tuple[int, Combination]) -> list[int]:
        i, name = term
        return [at for at, key in enumerate(self.keys) if (key if i < 0 else (key[i],)) == name]

    def of(self, term: tuple[int, Combination], counts: Counts) -> int:
        return sum(counts[at] for at in self.members(term))

    def alive(self, terms: dict[tuple[int, Combination], Range] | None = None) -> set[Counts]:
        """All counts from which a way leads to a train batch that meets every quota, and every window after them."""
        terms = self.terms() if terms is None else terms
        bounds = [(self.members(t), low, high) for t, (low, high) in terms.items()]

        def within(counts: Counts, total: int) -> bool:
            if total == self.size:
                return all(low <= sum(counts[i] for i in some) <= high for some, low, high in bounds)
            if self.window is None or self.mini is None or total % self.mini or not total:
                return True
            j, minis = total // self.mini, self.size // self.mini
            return all(
                j * low - self.window * minis <= sum(counts[i] for i in some) * minis <= j * high + self.window * minis
                for some, low, high in bounds
            )

        layer = {c for c in vectors(len(self.keys), self.size) if within(c, self.size)}
        out = set(layer)
        for total in range(self.size - 1, -1, -1):
            layer = {less for c in layer for less in fewer(c) if within(less, total)}
            out |= layer
        return out


def vectors(width: int, total: int) -> list[Counts]:
    if width == 1:
        return [(total,)]
    return [(n, *rest) for n in range(total + 1) for rest in vectors(width - 1, total - n)]


def fewer(counts: Counts) -> list[Counts]:
    return [(*counts[:i], n - 1, *counts[i + 1 :]) for i, n in enumerate(counts) if n]


def more(counts: Counts, i: int) -> Counts:
    return (*counts[:i], counts[i] + 1, *counts[i + 1 :])


# -- specs of every structure -----------------------------------------------------------------------------------------

FREE = [("a1", "a2", "a3", "a4")], [("a1", "a2"), ("b1", "b2", "b3")], [("a1", "a2"), ("b1", "b2"), ("c1", "c2")]
NESTED = {
    "nested": [("m", "mh"), ("m", "me"), ("c", "ch"), ("c", "ce"), ("w", "w")],
    "deep": [("x", "m", "mh"), ("x", "m", "me"), ("x", "c", "c"), ("y", "w", "wh"), ("y", "w", "we")],
    "equal": [("a", "1"), ("b", "2"), ("c", "3")],
}
CROSSED = {
    "missing": [("m", "h"), ("m", "e"), ("c", "e"), ("c", "x"), ("w", "x")],
    "chain x attribute": [("x", "m", "h"), ("x", "m", "e"), ("x", "c", "h"), ("y", "w", "e"), ("y", "w", "h")],
    "chain x chain": [
        *[("x", "m", "p", "h"), ("x", "c", "p", "e"), ("x", "m", "q", "k")],
        *[("y", "w", "q", "k"), ("y", "w", "p", "h")],
    ],
}
SIZES = st.integers(1, 5)


def bounds_around(draw: st.DrawFn, count: int, size: int, loose: bool) -> Range:
    """Bounds that ``count`` meets; or, ``loose``, perhaps not."""
    if loose:
        low = draw(st.integers(0, max(1, size // 2)))
        return low, draw(st.integers(low, size))
    return draw(st.integers(max(0, count - 1), count)), draw(st.integers(count, min(size, count + 2)))


def spec_over(draw: st.DrawFn, keys: list[Combination], loose: bool = False, cells: bool = False) -> Spec:
    size = draw(SIZES)
    seats = draw(st.lists(st.sampled_from(keys), min_size=size, max_size=size))
    values = tuple(
        tuple(
            (v, bounds_around(draw, sum(key[i] == v for key in seats), size, loose))
            if draw(st.integers(0, 4))
            else (v, (0, size))
            for v in dict.fromkeys(key[i] for key in keys)
        )
        for i in range(len(keys[0]))
    )
    own = [c for c in keys if cells and draw(st.booleans())]
    made = tuple((c, bounds_around(draw, seats.count(c), size, loose)) for c in own)
    return Spec(values, tuple(keys), size, made)


@st.composite
def free_specs(draw: st.DrawFn, loose: bool = False) -> Spec:
    keys = [tuple(c) for c in product(*draw(st.sampled_from(FREE)))]
    return replace(spec_over(draw, keys, loose), explicit=draw(st.booleans()))


@st.composite
def nested_specs(draw: st.DrawFn, loose: bool = False) -> Spec:
    keys = NESTED[draw(st.sampled_from(sorted(NESTED)))]
    return spec_over(draw, draw(st.permutations(keys)), loose, draw(st.booleans()))


@st.composite
def crossed_specs(draw: st.DrawFn, loose: bool = False) -> Spec:
    if draw(st.booleans()):
        keys = CROSSED[draw(st.sampled_from(sorted(CROSSED)))]
    else:
        every = [tuple(c) for c in product(("m", "c", "w"), ("h", "e"))]
        keys = draw(st.lists(st.sampled_from(every), min_size=2, max_size=6, unique=True))
    return spec_over(draw, keys, loose, draw(st.booleans()))


@st.composite
def mixed_specs(draw: st.DrawFn, loose: bool = False) -> Spec:
    """A free attribute beside two that are tied: blocks are found, whatever their order."""
    tied = draw(st.sampled_from([[("m", "h"), ("m", "e"), ("c", "e")], [("m", "mh"), ("m", "me"), ("c", "c")]]))
    keys = [(x, z, y) for x, y in tied for z in ("p", "q")]
    return spec_over(draw, keys, loose)


@st.composite
def window_specs(draw: st.DrawFn, loose: bool = False) -> Spec:
    parts = draw(st.sampled_from(([("a1", "a2", "a3")], [("a1", "a2"), ("b1", "b2")])))
    spec = spec_over(draw, [tuple(c) for c in product(*parts)], loose)
    mini = draw(st.integers(1, 3))
    size = mini * draw(st.integers(1, max(1, 6 // mini)))
    seats = draw(st.lists(st.sampled_from(spec.keys), min_size=size, max_size=size))
    values = tuple(
        tuple((v, bounds_around(draw, sum(key[i] == v for key in seats), size, loose)) for v, _ in values)
        for i, values in enumerate(spec.values)
    )
    return replace(
        spec, values=values, size=size, mini=mini, window=draw(st.integers(0, 2)), explicit=draw(st.booleans())
    )


def any_specs(loose: bool = False) -> st.SearchStrategy[Spec]:
    return st.one_of(
        free_specs(loose), nested_specs(loose), crossed_specs(loose), mixed_specs(loose), window_specs(loose)
    )
