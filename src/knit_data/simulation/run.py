"""A discrete-event simulation of rollout and training, driving the real admission and launching code.

Time jumps from one event to the next: a response ends, an optimizer step ends, weights are published. Runs of one
seed draw the same responses whatever the policy, so that policies are compared on the same work.

The check: every response's staleness in train batches is the number of publishes that it waited through, so that its
mean is E[responses in the system at a publish] / B. One side comes from version tags, the other from times.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from knit_data.admission import Admission, Sizes
from knit_data.demand import Pace, Yields, outlook_of
from knit_data.errors import InvalidArgument
from knit_data.infos import Array
from knit_data.launching import Launching
from knit_data.quotas import Combination, Quotas
from knit_data.simulation.scenario import Scenario
from knit_data.staleness import Staleness

ADMISSIONS = ("colocated", "train-batch", "unchecked", "constraint-preserving")
Event = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Report:
    """What one run came to. Staleness in train batches and ``gap`` in optimizer steps are means over the responses of
    the measured train batches, by the version they started with and by the token mean. ``p99``, ``max``: of staleness.

    ``cycle_seconds``: of a train batch; ``trainer_idle``: share of it. ``violations``: train batches off their quotas.
    ``dead_ends``: 1 if the run could not go on; figures are NaN then. ``bound``: what staleness cannot go below while
    the bottleneck is busy. ``identity_error``: mean staleness by version tags less that by the times of publishes,
    which must be 0. ``trained``: groups by source in the measured train batches; ``dropped``: groups of the whole run
    by reason; ``seconds``: of a trained response, the mean by source. ``trace``: every event with its time.
    """

    policy: str
    staleness: float
    staleness_token_mean: float
    gap: float  # optimizer steps
    p99: float
    max: float
    cycle_seconds: float
    trainer_idle: float
    violations: int
    dead_ends: int
    bound: float
    identity_error: float
    trained: Mapping[str, int]  # groups
    dropped: Mapping[str, int]  # groups of the whole run, by reason
    seconds: Mapping[str, float]  # mean length of a trained response
    trace: Sequence[Event] = ()


def simulate(
    scenario: Scenario, admission: str = "constraint-preserving", pacing: bool = False, seed: int = 0
) -> Report:
    """One run of a policy.

    ``admission``: "colocated" (generate a train batch, then train it), "train-batch" (wait until every quota of a
    train batch is met), "unchecked" (mini-batches in order of age, quotas ignored) or "constraint-preserving" (ours).
    ``pacing``: launch just in time, as ``RolloutPacer`` does, not as early as slots and ``launch_ahead`` allow.

    >>> from knit_data.simulation.scenario import PRESETS
    >>> batch, mini = (simulate(PRESETS["homo"], a) for a in ("train-batch", "constraint-preserving"))
    >>> round(1 - mini.staleness / batch.staleness, 2)
    0.92
    """
    if not isinstance(scenario, Scenario):
        raise InvalidArgument(f"simulate takes a Scenario, found {type(scenario).__name__}.")
    if admission not in ADMISSIONS:
        raise InvalidArgument(f"admission must be one of {ADMISSIONS}, found {admission!r}.")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InvalidArgument(f"seed must be an int of at least 0, found {seed!r}.")
    if not isinstance(pacing, bool):
        raise InvalidArgument(f"pacing must be True or False, found {pacing!r}.")
    if pacing and admission in ("colocated", "unchecked"):
        raise InvalidArgument(f"{admission} admission has no demand that pacing could follow; leave pacing False.")
    run = _Run(scenario, admission, pacing, seed)
    run.go()
    return run.report()


@dataclass(eq=False)
class _Group:
    key: int
    source: str
    combination: Combination
    seconds: list[float]
    launched: float
    version: int = -1
    order: tuple[int, ...] = ()
    starts: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    ended: int = 0
    failed: bool = False
    train_batch: int = -1
    step: int = -1
    places: list[int] = field(default_factory=list)  # in the order of events: each response's start
    exit: int = -1  # and when its mini-batch began


class _Run:
    def __init__(self, scenario: Scenario, admission: str, pacing: bool, seed: int) -> None:
        self.scenario, self.policy = scenario, admission
        self.whole = admission in ("train-batch", "colocated")
        size = scenario.groups if self.whole else scenario.groups // scenario.mini_batches
        quotas = Quotas() if admission == "unchecked" else scenario.quotas
        limit = None if scenario.max_staleness is None else Staleness(scenario.max_staleness)
        self.minis, steps = scenario.mini_batches, scenario.groups // size
        self.unit = self.minis // steps  # optimizer steps that one of admission's stands for
        self.admission: Admission[_Group] = Admission(Sizes(scenario.groups, size), quotas, limit)
        self.launching = Launching() if pacing else None
        self.pace, self.yields = Pace(), Yields()
        self.lengths = [np.random.default_rng([seed, 0, i]) for i in range(len(scenario.sources))]
        self.fates = [np.random.default_rng([seed, 1, i]) for i in range(len(scenario.sources))]
        self.launched = dict.fromkeys(scenario.sources, 0)
        self.lost = dict.fromkeys(scenario.sources, 0)
        self.groups: list[_Group] = []
        self.pending: deque[tuple[_Group, float]] = deque()  # responses of launched groups, without a slot
        self.in_flight: dict[Combination, int] = {}
        self.dropped: dict[str, int] = {}
        self.ready: deque[Sequence[_Group]] = deque()  # admitted mini-batches
        self.free, self.now, self.version, self.step = scenario.slots, 0.0, 0, 0
        self.busy, self.asked, self.dead_ends = False, 0.0, 0
        self.begun: list[float] = []  # of each optimizer step
        self.done: list[float] = []  # of each train batch
        self.publishes: list[tuple[float, int]] = [(0.0, 0)]
        self.published: list[int] = []  # places of those that followed
        self.events: list[tuple[float, int, str, _Group | None, int]] = []
        self.trace: list[Event] = []
        self.count = 0

    # -- events -----------------------------------------------------------------------------------------------------

    def go(self) -> None:
        batches = self.scenario.warmup + self.scenario.batches
        while len(self.done) < batches:
            self._train()
            self._fill()
            if not self.events:
                self.dead_ends = 1
                return
            self.now, _, kind, group, response = heapq.heappop(self.events)
            if group is not None:
                self._end(group, response)
            elif kind == "step":
                self._stepped()
            else:
                self._publish()

    def _at(self, seconds: float, kind: str, group: _Group | None = None, response: int = 0) -> None:
        self.count += 1
        heapq.heappush(self.events, (seconds, self.count, kind, group, response))

    def _note(self, event: str, **facts: Any) -> None:
        self.trace.append({"time": self.now, "event": event, **facts})

    # -- rollout ----------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Give every free slot the next response of a launched group, or of one launched now."""
        while self.free:
            if not self.pending:
                source = self._next_source()
                if source is None:
                    return
                self._launch(source)
            group, seconds = self.pending.popleft()
            self.free -= 1
            group.places.append(len(self.trace))
            response = len(group.starts)
            self._note("start", group=group.key, response=response, version=self.version)
            group.starts.append(self.now)
            group.versions.append(self.version)
            self._at(self.now + seconds, "end", group, response)

    def _next_source(self) -> str | None:
        sources = self.scenario.sources
        if self.launching is not None:
            demand = outlook_of(self.admission, self.pace, not self.busy, self.yields)
            combination = self.launching.next(demand, self.in_flight, self.version // self.unit)
            return combination[0] if combination else None
        lost = sum(self.lost.values())
        ahead = 0 if self.policy == "colocated" else self.scenario.launch_ahead
        if sum(self.launched.values()) - lost >= (ahead + self.version // self.minis + 1) * self.scenario.groups:
            return None
        gone = self.lost if self.policy == "colocated" else {}  # it fills one train batch; others know no losses
        return min(sources, key=lambda name: (self.launched[name] - gone.get(name, 0) + 0.5) / sources[name].groups)

    def _launch(self, name: str) -> None:
        source, at = self.scenario.sources[name], list(self.scenario.sources).index(name)
        seconds = source.draw(self.lengths[at], self.scenario.group_size)
        combination = () if self.policy == "unchecked" else (name,)
        group = _Group(len(self.groups), name, combination, seconds, self.now)
        group.failed = bool((self.fates[at].random(self.scenario.group_size) < source.fail).any())
        self.launched[name] += 1
        self.groups.append(group)
        self.in_flight[combination] = self.in_flight.get(combination, 0) + 1
        self.pending.extend((group, s) for s in seconds)
        self._note("launch", group=group.key, source=name)

    def _end(self, group: _Group, response: int) -> None:
        self.free += 1
        self._note("completion", group=group.key, response=response)
        group.ended += 1
        if group.ended < len(group.seconds):
            return
        self.in_flight[group.combination] -= 1
        if self.launching is not None:
            self.launching.took(group.combination, self.now - group.launched)
        source = self.scenario.sources[group.source]
        kept = self.fates[list(self.scenario.sources).index(group.source)].random() < source.keep
        self.yields.add(group.combination, kept and not group.failed)
        if group.failed or not kept:
            self._drop(group, "incomplete" if group.failed else "filtered")
            return
        group.version = min(group.versions) // self.unit  # in steps of admission
        group.order = (group.version, group.key)
        self.admission.offer(group)

    def _drop(self, group: _Group, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self.lost[group.source] += 1
        self._note("drop", group=group.key, reason=reason)

    # -- training ---------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        if self.busy:
            return
        if not self.ready:
            for group, reason in self.admission.expire():
                self._drop(group, reason)
            chosen = self.admission.choose()
            if chosen is None:
                return
            train_batch = self.admission.progress.train_batch
            self.admission.commit(chosen)
            self.pace.admitted(self.now, self.now - self.asked)
            size = len(chosen) // self.unit
            self.ready.extend(chosen[i : i + size] for i in range(0, len(chosen), size))
            for i, group in enumerate(chosen):
                group.train_batch, group.step = train_batch, self.step + i // size
                self._note("admission", group=group.key, train_batch=train_batch, step=group.step)
        for group in self.ready.popleft():
            group.exit = len(self.trace)
        self.busy = True
        self.begun.append(self.now)
        self._note("step", index=self.step, ends=self.now + self.scenario.train_seconds)
        self._at(self.now + self.scenario.train_seconds, "step")

    def _stepped(self) -> None:
        self.step += 1
        last = self.step % self.minis == 0
        if not last and self.scenario.publish == "train_batch":
            self.busy, self.asked = False, self.now
        elif self.scenario.publish_seconds:
            self._at(self.now + self.scenario.publish_seconds, "publish")
        else:
            self._publish()

    def _publish(self) -> None:
        self.busy, self.asked, self.version = False, self.now, self.step
        self.publishes.append((self.now, self.version))
        self.published.append(len(self.trace))
        self._note("publish", version=self.version)
        if self.step % self.minis == 0:
            self.done.append(self.now)

    # -- what it came to --------------------------------------------------------------------------------------------

    def report(self) -> Report:
        s, first, last = (
            self.scenario,
            self.scenario.warmup,
            min(len(self.done), self.scenario.warmup + self.scenario.batches),
        )
        trained = [g for g in self.groups if first <= g.train_batch < last]
        if self.dead_ends or not trained:
            return replace(self._nothing(), dropped=dict(self.dropped))
        batch = np.array([g.train_batch for g in trained for _ in g.starts])
        version = np.array([v for g in trained for v in g.versions])
        signed = batch * self.minis - version
        excess = np.maximum(signed, 0) / self.minis
        gap = np.array([g.step for g in trained for _ in g.starts]) - version
        began, ended = self.done[first - 1] if first else 0.0, self.done[last - 1]
        idle = (ended - began) - s.train_seconds * self.minis * (last - first)
        idle -= s.publish_seconds * sum(began < t <= ended for t, _ in self.publishes)
        per_publish = 1.0 if s.publish == "train_batch" else 1 / self.minis
        by_source = {n: [g for g in trained if g.source == n] for n in s.sources}
        return Report(
            policy=self._name(),
            staleness=float(excess.mean()),
            staleness_token_mean=float(np.maximum(batch - self._token_means(trained) / self.minis, 0).mean()),
            gap=float(gap.mean()),
            p99=float(np.percentile(excess, 99)),
            max=float(excess.max()),
            cycle_seconds=(ended - began) / (last - first),
            trainer_idle=max(0.0, idle / (ended - began)),
            violations=self._violations(),
            dead_ends=0,
            bound=s.bound,
            identity_error=abs(
                self._in_system(trained) * per_publish
                - float((signed if s.publish == "train_batch" else gap).mean()) / self.minis
            ),
            trained={n: len(found) for n, found in by_source.items()},
            dropped=dict(self.dropped),
            seconds={n: float(np.mean([g.seconds for g in found])) if found else 0.0 for n, found in by_source.items()},
            trace=self.trace,
        )

    def _nothing(self) -> Report:
        nan = math.nan
        return Report(
            policy=self._name(),
            staleness=nan,
            staleness_token_mean=nan,
            gap=nan,
            p99=nan,
            max=nan,
            cycle_seconds=nan,
            trainer_idle=nan,
            violations=self._violations(),
            dead_ends=self.dead_ends,
            bound=self.scenario.bound,
            identity_error=nan,
            trained={},
            dropped={},
            seconds={},
            trace=self.trace,
        )

    def _name(self) -> str:
        return self.policy + (", paced" if self.launching is not None else "")

    def _violations(self) -> int:
        """Train batches off their quotas, counted from what was trained."""
        bounds = self.scenario.quotas.resolved(self.scenario.groups)["source"]
        counts = [dict.fromkeys(self.scenario.sources, 0) for _ in self.done]
        for group in self.groups:
            if 0 <= group.train_batch < len(counts):
                counts[group.train_batch][group.source] += 1
        return sum(any(not bounds[n].low <= c <= (bounds[n].high or 0) for n, c in found.items()) for found in counts)

    def _token_means(self, trained: Sequence[_Group]) -> Array:
        """Mean over a response's life of the version that was published then: its tokens come at a steady rate."""
        times, versions = np.array([t for t, _ in self.publishes]), np.array([float(v) for _, v in self.publishes])
        area = np.concatenate([[0.0], np.cumsum(np.diff(times) * versions[:-1])])  # of version over time, from 0

        def until(t: Array) -> Array:
            at = np.searchsorted(times, t, side="right") - 1
            out: Array = area[at] + (t - times[at]) * versions[at]
            return out

        start = np.array([t for g in trained for t in g.starts])
        seconds = np.array([x for g in trained for x in g.seconds])
        means: Array = (until(start + seconds) - until(start)) / seconds
        return means

    def _in_system(self, trained: Sequence[_Group]) -> float:
        """Responses of these groups that were in the system, summed over publishes, for each response."""
        starts = np.array([place for g in trained for place in g.places])
        exits = np.array([g.exit for g in trained for _ in g.places])
        passed = np.searchsorted(self.published, exits) - np.searchsorted(self.published, starts)
        return float(passed.sum()) / len(starts)
