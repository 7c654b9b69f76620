"""Quotas that cross: a flow with lower bounds, kept as a witness that every one of them can still be met.

Groups flow from the train batch through their source to their difficulty: an edge for every quota, with its bounds,
and an edge for every combination, which carries its groups, admitted or still to come. An integral flow of as many
groups as the batch has is one way to fill it: the witness. What is admitted is a lower bound of its combination's
edge. So a group fits if the witness holds one more of its combination than is admitted, or if one unit can be led
round a cycle of the residual network to make it so. Mostly the first is true, and a test costs nothing.

    math exactly 2, code exactly 2, hard exactly 2, easy exactly 2, and no hard code: the witness can only hold
    2 math/hard and 2 code/easy. math/easy never fits, though math, easy and the seats all have room.

A window over mini-batches is a flow too: each mini-batch hands its groups to the values, a value's groups flow on
from mini-batch to mini-batch, and the edge after the j-th carries, and bounds, what there is by then.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from knit_data.quotas import apportion
from knit_data.seats.laminar import Forest, Tree


class Network:
    """A circulation: edges with bounds, and a flow that is the same into and out of every node."""

    def __init__(self, nodes: int) -> None:
        self.tail: list[int] = []
        self.head: list[int] = []
        self.low: list[int] = []
        self.high: list[int] = []
        self.flow: list[int] = []
        self.at: list[list[tuple[int, int, int]]] = [[] for _ in range(nodes)]  # edge, direction, the node beyond

    def add(self, tail: int, head: int, low: int, high: int, flow: int = 0) -> int:
        edge = len(self.tail)
        self.tail.append(tail)
        self.head.append(head)
        self.low.append(low)
        self.high.append(high)
        self.flow.append(flow)
        self.at[tail].append((edge, 1, head))
        self.at[head].append((edge, -1, tail))
        return edge

    def copy(self) -> Network:
        twin = object.__new__(Network)
        twin.tail, twin.head, twin.at = self.tail, self.head, self.at  # what never changes is shared
        twin.low, twin.high, twin.flow = self.low[:], self.high[:], self.flow[:]
        return twin

    def turn(self, edge: int, by: int) -> int:
        """Lead up to ``by`` units (down, if negative) through an edge, along one residual cycle; how many it was."""
        way = 1 if by > 0 else -1
        start, goal = (self.head[edge], self.tail[edge]) if way > 0 else (self.tail[edge], self.head[edge])
        low, high, flow = self.low, self.high, self.flow
        came: dict[int, tuple[int, int, int]] = {start: (-1, 0, -1)}
        queue = [start]
        for node in queue:
            if node == goal:
                break
            for e, direction, beyond in self.at[node]:
                if beyond not in came and e != edge and (flow[e] < high[e] if direction > 0 else flow[e] > low[e]):
                    came[beyond] = e, direction, node
                    queue.append(beyond)
        if goal not in came:
            return 0
        path, node = [(edge, way)], goal
        while node != start:
            e, direction, node = came[node]
            path.append((e, direction))
        much = min(abs(by), *(high[e] - flow[e] if d > 0 else flow[e] - low[e] for e, d in path[1:]))
        for e, d in path:
            flow[e] += d * much
        return much

    def settle(self) -> bool:
        """Raise every edge to its lower bound. False: no flow within the bounds exists."""
        for edge, low in enumerate(self.low):
            if low > self.high[edge]:
                return False
            while self.flow[edge] < low:
                if not self.turn(edge, low - self.flow[edge]):
                    return False
        return True


class Flow:
    """The counts of crossing or windowed quotas, with a witness. Keys are numbered.

    ``entries[t][key]`` is the edge that carries the groups of a key which are admitted in period t, of ``span`` groups:
    one period of the whole train batch, or its mini-batches. ``minima`` are the keys' own, where nothing else has any.
    """

    def __init__(
        self,
        network: Network,
        entries: list[list[int]],
        span: int,
        total: int,
        counts: Sequence[int],
        weights: Sequence[float],
        minima: Sequence[int] | None = None,
    ) -> None:
        self.net, self.entries, self.span, self.total = network, entries, span, total
        self.weights, self.minima = weights, minima
        self.base = network.low[:]  # without what is admitted
        self.counts = list(counts)
        self.before = self.admitted = sum(counts)
        self.first = max(-(-self.before // span) - 1, 0)  # all periods up to here are one: they are over or open
        self.inside = [0] * len(network.low)  # admitted, by edge
        for edge, n in zip(entries[0], counts, strict=True):
            self.inside[edge] = n
            network.low[edge] = max(network.low[edge], n)
        self.feasible = network.settle()

    def copy(self) -> Flow:
        twin = object.__new__(Flow)
        twin.__dict__.update(self.__dict__, net=self.net.copy(), counts=self.counts[:], inside=self.inside[:])
        return twin

    @property
    def left(self) -> int:
        return self.net.high[self.total] - self.admitted

    def _entry(self, key: int, position: int) -> int:
        return self.entries[max(position // self.span - self.first, 0)][key]

    def fits(self, key: int) -> bool:
        """Whether one more group of this key leaves a way to fill the batch; the witness then holds it."""
        return self._holds(self._entry(key, self.admitted))

    def _holds(self, edge: int) -> bool:
        net = self.net
        if net.flow[edge] > self.inside[edge]:
            return True
        return net.flow[edge] < net.high[edge] and net.turn(edge, 1) == 1

    def admit(self, key: int) -> None:
        self._move(key, self._entry(key, self.admitted), 1)

    def reserve(self, key: int) -> bool:
        """Admit it, in a window in the latest period that has room: only ``admit`` goes from period to period."""
        if self.minima is None:
            fits = self.fits(key)
            if fits:
                self.admit(key)
            return fits
        now = self._entry(key, self.admitted)
        for period in reversed(self.entries):
            if self._holds(period[key]):
                self._keep(period[key], 1)
                return True
            if period[key] == now:
                break
        return False

    def release(self, key: int) -> None:
        self._move(key, self._entry(key, self.admitted - 1), -1)

    def can_release(self, key: int) -> bool:
        """In a window, only what was admitted last: its mini-batch decides what may follow."""
        if self.minima is None:
            return self.counts[key] > 0
        return self.admitted > self.before and self.inside[self._entry(key, self.admitted - 1)] > 0

    def _move(self, key: int, edge: int, by: int) -> None:
        self._keep(edge, by)
        self.counts[key] += by
        self.admitted += by

    def _keep(self, edge: int, by: int) -> None:
        self.inside[edge] += by
        self.net.low[edge] = max(self.base[edge], self.inside[edge])

    # -- what is short ----------------------------------------------------------------------------------------------

    @property
    def short(self) -> int:
        return sum(self.demand())

    def demand(self) -> list[int]:
        """Few groups, by key, that close all minima and are part of a way to fill all seats.

        The least flow closes them with the fewest, but ignores the seats beyond: it may pair a row and a column that
        both are needed elsewhere to fill the batch. So as much of it as can be held is held, and what else that way
        to fill the batch has is thinned. Nothing can be left out of the result; in rare cases another one is smaller.
        """
        if self.minima is not None:
            return [max(0, low - n) for low, n in zip(self.minima, self.counts, strict=True)]
        least = self._lean(self.net)
        keys = range(len(least))
        tries = [self._thinned(least, keys)]
        if sum(tries[0]) > sum(least):
            tries.append(self._thinned(least, keys[::-1]))  # what is held first decides
        return min(tries, key=sum)

    def _thinned(self, least: Sequence[int], order: Sequence[int]) -> list[int]:
        held = self.copy()
        for key in order:
            for _ in range(least[key]):
                if not held.fits(key):
                    break
                held.admit(key)
        thin = held.net
        for key, edge in enumerate(self.entries[0]):
            thin.high[edge] = thin.flow[edge]
            thin.low[edge] = max(self.base[edge], self.counts[key])
        return self._lean(thin)

    def _lean(self, net: Network) -> list[int]:
        """What the least flow within these bounds holds beyond the groups that are admitted."""
        net = net.copy()
        net.low[self.total] = 0
        while net.turn(self.total, -net.flow[self.total]):
            pass
        return [net.flow[edge] - n for edge, n in zip(self.entries[0], self.counts, strict=True)]

    def fill(self, total: int) -> list[int]:
        """``total`` groups by key, at least ``short``: what minima need, then part of a way to fill all seats."""
        need = self.demand()
        if sum(need) == total:
            return need
        beyond = [n - d for n, d in zip(self._completion(need), need, strict=True)]
        return [d + n for d, n in zip(need, apportion(total - sum(need), beyond), strict=True)]

    def _completion(self, need: list[int]) -> list[int]:
        """All seats left, by key: seat by seat to the key that is furthest behind its part, if it fits."""
        free, weight = self.left - sum(need), sum(self.weights) or 1.0
        part = [n + free * w / weight for n, w in zip(need, self.weights, strict=True)]
        twin, given = self.copy(), [0] * len(need)
        if self.minima is None:
            given = need[:]
            for key, n in enumerate(need):
                for _ in range(n):
                    fits = twin.fits(key)
                    assert fits, "what minima need is part of a way to fill the batch"
                    twin.admit(key)

        def behind(key: int) -> tuple[float, int]:
            return -part[key] / (2 * given[key] + 1), key

        able: list[tuple[float, int]] = []
        while twin.left:
            if not able:
                able = sorted(map(behind, range(len(need))))
            key = able[0][1]
            if not twin.fits(key):
                heapq.heappop(able)  # until the mini-batch is over: what fits only gets less
                continue
            twin.admit(key)
            given[key] += 1
            if twin.admitted % self.span == 0:
                able = []
            else:
                heapq.heapreplace(able, behind(key))
        return given


def crossing(one: Forest, two: Forest, cells: Sequence[tuple[int, int]], counts: Sequence[int]) -> Flow:
    """Two trees of quotas over the same keys; ``cells`` bounds each key itself."""
    size, shift = one.high[0], len(one.parent)
    net = Network(shift + len(two.parent))
    for node, up in enumerate(one.parent[1:], 1):
        net.add(up, node, one.low[node], one.high[node])
    for node, up in enumerate(two.parent[1:], 1):
        net.add(shift + node, shift + up, two.low[node], two.high[node])
    entries = [
        net.add(a, shift + b, low, min(high, size)) for a, b, (low, high) in zip(one.leaf, two.leaf, cells, strict=True)
    ]
    total = net.add(shift, 0, size, size)
    weights = [a * b for a, b in zip(_weights(one, counts), _weights(two, counts), strict=True)]
    return Flow(net, [entries], size, total, counts, weights)


def windowed(forest: Forest, mini: int, window: int, counts: Sequence[int]) -> Flow:
    """One partition, whose counts stay within ``window`` groups of an even pace after every mini-batch."""
    size, values = forest.high[0], len(forest.leaf)
    minis, over = size // mini, max(-(-sum(counts) // mini), 1)
    bounds = [(forest.low[node], forest.high[node]) for node in forest.leaf]
    periods = range(over, minis + 1)  # the first stands for all until then
    ceilings = [[(j * high + window * minis) // minis for _, high in bounds] for j in periods]
    ceilings[-1] = [high for _, high in bounds]
    paced = _paced(forest, counts, periods, mini, ceilings)
    net = Network(2 + len(periods) * (values + 1))
    entries: list[list[int]] = []
    for t, j in enumerate(periods):
        node, begun = 2 + t * (values + 1), paced[t - 1] if t else [0] * values
        amount = mini * (over if t == 0 else 1)
        net.add(0, node, amount, amount, sum(paced[t]) - sum(begun))
        entries.append([net.add(node, node + 1 + v, 0, size, paced[t][v] - begun[v]) for v in range(values)])
        for v, (low, _) in enumerate(bounds):
            least = low if j == minis else max(-((window * minis - j * low) // minis), 0)
            onward = 1 if j == minis else node + 1 + v + values + 1
            net.add(node + 1 + v, onward, least, ceilings[t][v], paced[t][v])
    total = net.add(1, 0, size, size, sum(paced[-1]))
    return Flow(net, entries, mini, total, counts, _weights(forest, counts), [low for low, _ in bounds])


def _paced(
    forest: Forest, counts: Sequence[int], periods: Sequence[int], mini: int, ceilings: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Groups by period and key that are in until then, close to an even pace: from here few steps lead to a witness."""
    tree, minis = Tree(forest, counts), periods[-1]
    if not tree.feasible:
        return [[0] * len(counts) for _ in periods]
    left = tree.fill(forest.high[0] - sum(counts))
    goal = [n + more for n, more in zip(counts, left, strict=True)]
    now, out = [min(n, most) for n, most in zip(counts, ceilings[0], strict=True)], []
    for j, most in zip(periods, ceilings, strict=True):
        budget = mini * j - sum(now)
        order = sorted(range(len(now)), key=lambda v: -(goal[v] * j % minis))  # largest remainder first
        for even in ([g * j // minis for g in goal], [-(-g * j // minis) for g in goal], most):
            for v in order:
                more = max(0, min(even[v] - now[v], most[v] - now[v], budget))
                now[v] += more
                budget -= more
        out.append(now[:])
    return out


def _weights(forest: Forest, counts: Sequence[int]) -> list[float]:
    """Each key's part of what is free: its nodes' room beyond their minima, each among its siblings."""
    filled = forest.filled(counts)
    room = [max(forest.high[n] - max(forest.low[n], filled[n]), 0) for n in range(len(filled))]
    part = [1.0] * len(filled)
    for node, below in enumerate(forest.children()):
        whole = sum(room[child] for child in below)
        for child in below:
            part[child] = part[node] * (room[child] / whole if whole else 1 / len(below))
    return [part[node] for node in forest.leaf]
