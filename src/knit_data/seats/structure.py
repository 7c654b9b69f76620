"""What decides quotas: the structure of their attributes, and the solver that is exact for it.

Attributes that combine freely are decided apart: whatever each of them still needs, groups can be found that serve all
at once. What remains tied together, since not every combination can occur or since combinations have bounds of their
own, is one block:

* partitions that refine one another (one attribute; difficulties that differ by source) form a tree: ``laminar``
* partitions in two such chains form a flow: ``flow``
* three partitions that cross are NP-hard to decide (three-dimensional matching), and refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, pairwise
from typing import Protocol

from knit_data.errors import InvalidArgument
from knit_data.quotas import Combination, Quotas
from knit_data.seats.flow import crossing, windowed
from knit_data.seats.laminar import Forest, Level, Tree

Term = tuple[int, Combination]  # a level and one of its cells


class Part(Protocol):
    """The counts of one block. Keys are numbered."""

    feasible: bool

    def copy(self) -> Part: ...
    def fits(self, key: int) -> bool: ...
    def admit(self, key: int) -> None: ...
    def reserve(self, key: int) -> bool: ...
    def can_release(self, key: int) -> bool: ...
    def release(self, key: int) -> None: ...
    @property
    def short(self) -> int: ...
    def fill(self, total: int) -> list[int]: ...


@dataclass(frozen=True)
class Block:
    """Attributes that are decided together. ``where`` they are in a combination; ``keys`` are their values."""

    where: tuple[int, ...]
    keys: tuple[Combination, ...]
    levels: tuple[Level, ...]
    chains: tuple[tuple[int, ...], ...]  # levels, coarsest first
    cells: int | None  # the level that bounds the combinations themselves, beside two chains
    size: int
    mini: int
    window: int | None

    @property
    def vacuous(self) -> bool:
        return all(level.vacuous(self.size) for level in self.levels)

    @property
    def solver(self) -> str:
        if len(self.chains) > 1 or (self.window is not None and not self.vacuous):
            return "flow with lower bounds"
        return "counting" if len(self.levels) == 1 else "interval propagation"

    def terms(self) -> list[Term]:
        """Every quota that binds a key, in order."""
        out: dict[Term, None] = {}
        for i, level in enumerate(self.levels):
            occurring = {level.of(key) for key in self.keys}
            out.update(dict.fromkeys((i, cell) for cell in level.bounds if cell in occurring))
        return list(out)

    def start(self, counts: Sequence[int] | None = None, kept: Collection[Term] | None = None) -> Part:
        """The counts of a train batch; ``kept``: as if there were these quotas only."""
        counts = counts or [0] * len(self.keys)
        kept = None if kept is None else set(kept)
        levels = [
            level if kept is None else replace(level, bounds={c: b for c, b in level.bounds.items() if (i, c) in kept})
            for i, level in enumerate(self.levels)
        ]
        forests = [Forest(self.keys, [levels[i] for i in chain], self.size) for chain in self.chains]
        if len(forests) > 1:
            free = (0, self.size)
            bounds = {} if self.cells is None else levels[self.cells].bounds
            return crossing(forests[0], forests[1], [bounds.get(key, free) for key in self.keys], counts)
        if self.window is not None and not self.vacuous:
            return windowed(forests[0], self.mini, self.window, counts)
        return Tree(forests[0], counts)

    def blocking(self) -> list[Term]:
        """Of quotas that cannot be met, a few that exclude each other: without any one of them the others can be met.

        Of one partition, the fewest: the greatest minima that do not fit, or all maxima. Else what is left when whole
        partitions and then single quotas, small minima first, are taken out as long as the rest is still impossible.
        """
        terms = self.terms()
        low = {(i, c): self.levels[i].bounds[c][0] for i, c in terms}
        for i in range(len(self.levels)):
            mine = [t for t in terms if t[0] == i]
            taken: list[Term] = []
            for term in sorted(mine, key=lambda t: -low[t]):
                taken.append(term)
                if sum(low[t] for t in taken) > self.size:
                    return [t for t in mine if t in taken]
            if self.exhausts(mine) and sum(self.levels[i].bounds[c][1] for i, c in mine) < self.size:
                return mine
        kept = terms
        for i in range(len(self.levels)):
            kept = self._without(kept, [t for t in kept if t[0] == i])
        for _, _, term in sorted((low[t], -at, t) for at, t in enumerate(kept)):
            kept = self._without(kept, [term])
        return kept

    def exhausts(self, terms: Sequence[Term]) -> bool:
        """Whether every key falls under one of these quotas, all of one partition."""
        return all(any(self.levels[i].of(key) == c for i, c in terms) for key in self.keys)

    def _without(self, terms: list[Term], some: list[Term]) -> list[Term]:
        """``terms`` less ``some``, if they still cannot be met."""
        less = [t for t in terms if t not in some]
        return terms if self.start(kept=less).feasible else less


def blocks_of(quotas: Quotas, size: int, mini: int | None) -> list[Block]:
    """The attributes of these quotas, cut into blocks that can be decided apart."""
    window = quotas.mini_window
    if window is not None and (mini is None or size % mini):
        raise InvalidArgument(
            f"mini_window={window} needs the mini_batch_size, which divides train_batch_size={size}; found {mini}."
        )
    names = quotas.attributes
    bounds: list[dict[Combination, tuple[int, int]]] = [
        {(v,): (b.low, size if b.high is None else b.high) for v, b in values.items()}
        for values in quotas.resolved(size).values()
    ]
    make = partial(_block, names=names, size=size, mini=mini or size, window=window)
    if quotas.support is None:
        return [make((i,), tuple(b), [Level((0,), b)]) for i, b in enumerate(bounds)]
    cells = {c: (b.low, size if b.high is None else b.high) for c, b in quotas.cells(size).items()}
    active = tuple(i for i, b in enumerate(bounds) if not Level((0,), b).vacuous(size))
    every = Level(tuple(range(len(names))), cells, own=True)
    if not every.vacuous(size):
        return [make(every.where, quotas.support, [*(Level((i,), bounds[i]) for i in active), every])]
    out = []
    for where in _free(_seen(quotas.support, active), active) if active else []:
        keys = _seen(quotas.support, where)
        out.append(make(where, keys, [Level((at,), bounds[i]) for at, i in enumerate(where)]))
    return out


def _block(
    where: tuple[int, ...],
    keys: tuple[Combination, ...],
    levels: Sequence[Level],
    *,
    names: Sequence[str],
    size: int,
    mini: int,
    window: int | None,
) -> Block:
    make = partial(Block, where, keys, tuple(levels), size=size, mini=mini, window=window)
    if window is not None and len(levels) > 1:
        raise InvalidArgument(
            f"mini_window={window} needs attributes that combine freely; the support restricts or bounds combinations "
            f"of {_listed([names[i] for i in where])}, and to decide that for every mini-batch is NP-hard. Use "
            "mini_window=None, or allow all combinations with support=None."
        )
    sort = {i: len({level.of(key) for key in keys}) for i, level in enumerate(levels)}
    order = sorted(sort, key=lambda i: sort[i])

    def chain(some: Sequence[int]) -> bool:
        return all(_refines(levels[b], levels[a], keys) for a, b in pairwise(some))

    if chain(order):
        return make(chains=(tuple(order),), cells=None)
    cells = next((i for i in order if levels[i].own), None)
    order = [i for i in order if i != cells]
    for some in _subsets(order[1:]):
        one, two = [i for i in order if i not in some], [i for i in order if i in some]
        if chain(one) and chain(two):
            return make(chains=(tuple(one), tuple(two)), cells=cells)
    crossed = next(
        three
        for three in combinations(order, 3)
        if not any(
            _refines(levels[b], levels[a], keys) or _refines(levels[a], levels[b], keys)
            for a, b in combinations(three, 2)
        )
    )
    raise InvalidArgument(
        f"quotas: {_listed([names[where[levels[i].where[0]]] for i in crossed])} cross, and the support ties them "
        "together; to decide whether the quotas of three such attributes can still be met is NP-hard. Allow all "
        "combinations (support=None, no bounds for single ones), or merge two of them into one attribute."
    )


def _refines(fine: Level, coarse: Level, keys: Sequence[Combination]) -> bool:
    """Whether each cell of ``fine`` lies within one of ``coarse``."""
    return len({(fine.of(k), coarse.of(k)) for k in keys}) == len({fine.of(k) for k in keys})


def _free(keys: Sequence[Combination], names: Sequence[int]) -> list[tuple[int, ...]]:
    """The finest cut of the attributes such that the keys are exactly the product of their parts."""
    out, rest = [], tuple(range(len(names)))

    def size(where: Sequence[int]) -> int:
        return len({tuple(k[i] for i in where) for k in keys})

    while rest:
        for some in _subsets(rest[1:]):
            part, beyond = (rest[0], *some), tuple(i for i in rest[1:] if i not in some)
            if size(part) * size(beyond) == size(rest):
                out.append(tuple(names[i] for i in part))
                rest = beyond
                break
    return out


def _subsets(items: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The smallest first."""
    for n in range(len(items) + 1):
        yield from combinations(items, n)


def _seen(support: Sequence[Combination], where: Sequence[int]) -> tuple[Combination, ...]:
    return tuple(dict.fromkeys(tuple(c[i] for i in where) for c in support))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else names[0]
