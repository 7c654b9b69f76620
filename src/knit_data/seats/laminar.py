"""Quotas that nest: a tree of counts, and interval propagation that keeps all of them reachable.

A node of the tree is a set of combinations: the train batch, a source, a difficulty within that source. With c groups
in, a node takes between ``need`` and ``room`` more:

    need = max(low - c, sum of its children's needs)        room = min(high - c, sum of its children's rooms)

Every quota can still be met iff need <= room at every node; the train batch is a node whose bounds are its size. An
admission changes the nodes above it only, so a test costs the depth of the tree. With one level this is the counting
test: the seats that minima reserve fit into those left, and the maxima leave room for all of them. The test is exact,
and by induction never runs into a dead end, whatever arrives. Checking maxima alone does: a fast source fills the
seats that another's minimum needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from knit_data.quotas import Combination, apportion


@dataclass(frozen=True)
class Level:
    """A partition of the combinations by their values at ``where``, and the least and most groups of each cell."""

    where: tuple[int, ...]
    bounds: dict[Combination, tuple[int, int]]
    own: bool = False  # bounds of the combinations themselves

    def of(self, key: Combination) -> Combination:
        return tuple(key[i] for i in self.where)

    def vacuous(self, size: int) -> bool:
        return all(low == 0 and high >= size for low, high in self.bounds.values())


class Forest:
    """Nested partitions as a tree, coarsest first. Node 0 is the train batch; a parent comes before its children."""

    def __init__(self, keys: Sequence[Combination], chain: Sequence[Level], size: int) -> None:
        self.parent, self.low, self.high = [-1], [size], [size]
        self.leaf: list[int] = []  # the node of each key
        nodes: dict[tuple[int, Combination], int] = {}
        for key in keys:
            node = 0
            for depth, level in enumerate(chain):
                name = depth, level.of(key)
                if name not in nodes:
                    nodes[name] = len(self.parent)
                    low, high = level.bounds.get(name[1], (0, size))
                    self.parent.append(node)
                    self.low.append(low)
                    self.high.append(min(high, size))
                node = nodes[name]
            self.leaf.append(node)

    def children(self) -> list[list[int]]:
        out: list[list[int]] = [[] for _ in self.parent]
        for node, up in enumerate(self.parent[1:], 1):
            out[up].append(node)
        return out

    def filled(self, counts: Sequence[int]) -> list[int]:
        """Groups in each node, for counts by key."""
        out = [0] * len(self.parent)
        for node, n in zip(self.leaf, counts, strict=True):
            out[node] += n
        for node in range(len(out) - 1, 0, -1):
            out[self.parent[node]] += out[node]
        return out


class Tree:
    """The counts of nested quotas. Keys are numbered."""

    def __init__(self, forest: Forest, counts: Sequence[int]) -> None:
        self.forest = forest
        n = len(forest.parent)
        leaves = set(forest.leaf)
        self.count = forest.filled(counts)
        self.need, self.room = [0] * n, [0] * n
        self.needs = [0] * n  # of the children together
        self.rooms = [forest.high[0] if node in leaves else 0 for node in range(n)]
        self.feasible = True
        for node in range(n - 1, -1, -1):
            self.need[node] = max(forest.low[node] - self.count[node], self.needs[node])
            self.room[node] = min(forest.high[node] - self.count[node], self.rooms[node])
            self.feasible = self.feasible and self.need[node] <= self.room[node]
            if node:
                self.needs[forest.parent[node]] += self.need[node]
                self.rooms[forest.parent[node]] += self.room[node]

    def copy(self) -> Tree:
        twin = object.__new__(Tree)
        twin.forest, twin.feasible = self.forest, self.feasible
        twin.count, twin.need, twin.room = self.count[:], self.need[:], self.room[:]
        twin.needs, twin.rooms = self.needs[:], self.rooms[:]
        return twin

    def fits(self, key: int) -> bool:
        """Whether one more group of this key leaves every node a number of groups it can still get."""
        forest = self.forest
        node = forest.leaf[key]
        needs, rooms = self.needs[node], self.rooms[node]
        while True:
            after = self.count[node] + 1
            need, room = forest.low[node] - after, forest.high[node] - after
            if needs > need:
                need = needs
            if rooms < room:
                room = rooms
            if need > room:
                return False
            up = forest.parent[node]
            if up < 0:
                return True
            needs = self.needs[up] - self.need[node] + need
            rooms = self.rooms[up] - self.room[node] + room
            node = up

    def admit(self, key: int) -> None:
        self._move(key, 1)

    def reserve(self, key: int) -> bool:
        if not self.fits(key):
            return False
        self.admit(key)
        return True

    def can_release(self, key: int) -> bool:
        return self.count[self.forest.leaf[key]] > 0

    def release(self, key: int) -> None:
        self._move(key, -1)

    def _move(self, key: int, by: int) -> None:
        forest = self.forest
        node = forest.leaf[key]
        while node >= 0:
            self.count[node] += by
            need = max(forest.low[node] - self.count[node], self.needs[node])
            room = min(forest.high[node] - self.count[node], self.rooms[node])
            up = forest.parent[node]
            if up >= 0:
                self.needs[up] += need - self.need[node]
                self.rooms[up] += room - self.room[node]
            self.need[node], self.room[node] = need, room
            node = up

    @property
    def short(self) -> int:
        """Groups without which a minimum stays open."""
        return self.needs[0]

    def fill(self, total: int) -> list[int]:
        """``total`` groups by key, at least ``short`` and no more than seats are left: what minima need, the rest in
        proportion to the room that each node has beyond. It is part of a way to fill all seats."""
        amount = [total, *[0] * (len(self.count) - 1)]
        for node, below in enumerate(self.forest.children()):
            rest = amount[node] - self.needs[node]
            room = [min(self.room[child] - self.need[child], rest) for child in below]
            for child, more in zip(below, apportion(rest, room), strict=True):
                amount[child] = self.need[child] + more
        return [amount[node] for node in self.forest.leaf]
