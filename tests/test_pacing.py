"""The launcher against the real sampler, on a clock that only the test moves."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from makers import Waiting, group, memory, sampler

import knit_data as kd
from knit_data.admission import Admission, Sizes
from knit_data.demand import Outlook, Pace, outlook_of
from knit_data.launching import Launching
from knit_data.store.memory import Fault, ManualClock, MemoryBackend
from knit_data.store.store import InFlight

A, B = ("math",), ("code",)


def outlook(**changes: Any) -> Outlook:
    """Train batch 0 of 4 mini-batches of 2 groups; the trainer computes and needs nothing at once."""
    facts: dict[str, Any] = {
        "attributes": ("source",),
        "seats": {A: 4, B: 4},
        "mix": {A: 4, B: 4},
        "minis": 4,
        "steps": 4,
        "steps_left": 4,
        "pace": 10.0,
        "starving": False,
    }
    return Outlook(**{**facts, **changes})


def sources(launches: list[kd.Launch | None]) -> Counter[str]:
    return Counter(launch.attributes["source"] for launch in launches if launch is not None)


def test_what_the_open_train_batch_needs_is_launched_and_no_more_without_a_reason() -> None:
    store = memory(ManualClock())
    store.publish_demand(outlook())
    pacer = kd.RolloutPacer(store)
    launches = [pacer.next(0.0) for _ in range(8)]
    assert sources(launches) == {"math": 4, "code": 4} and pacer.in_flight == 8
    assert len({launch.group for launch in launches if launch}) == 8
    for launch in launches:
        assert launch is not None
        pacer.done(launch)
    assert pacer.in_flight == 0
    with pytest.raises(kd.WaitTimeout, match=r"nothing was launched for 2 s: the trainer has enough for train batch 0"):
        pacer.next(2.0)
    store.publish_demand(outlook(waiting={A: 4, B: 4}, steps_left=1, starving=True))
    assert pacer.next(0.0) is not None, "nothing is held back while the trainer starves"


def test_a_done_group_counts_until_the_trainer_has_seen_it() -> None:
    clock = ManualClock()
    store = memory(clock)
    store.publish_demand(outlook(seats={A: 1}, mix={A: 8}))
    pacer = kd.RolloutPacer(store)
    launch = pacer.next(0.0)
    assert launch is not None
    pacer.done(launch)
    for changed in ({}, {"pace": 11.0}, {"steps_left": 3}):  # it looked at other things
        store.publish_demand(outlook(seats={A: 1}, mix={A: 8}, **changed))
        with pytest.raises(kd.WaitTimeout):
            pacer.next(0.0)
    store.publish_demand(outlook(seats={A: 1}, mix={A: 8}, recent=(launch.group,)))  # dropped, or it would wait
    assert pacer.next(0.0) is not None


def test_a_group_that_was_seen_before_it_was_done_does_not_count_twice() -> None:
    store = memory(ManualClock())
    made = sampler(store, train_batch_size=4, mini_batch_size=4, quotas={"source": {"math": 4}}, max_staleness=0)
    assert made.admit(0.0) is None
    pacer, writer = kd.RolloutPacer(store, capacity=2), store.writer("w")
    for _ in range(2):
        launches = [pacer.next(0.0), pacer.next(0.0)]
        for launch in launches:
            assert launch is not None
            writer.put_group(group(launch.group))
        admitted = made.admit(1.0) or made.admit(1.0)  # reads them
        for launch in launches:
            assert launch is not None
            pacer.done(launch)
    assert admitted is not None


def test_each_done_group_is_seen_for_itself() -> None:
    store = memory(ManualClock())
    store.publish_demand(outlook(seats={A: 2}, mix={A: 8}))
    pacer = kd.RolloutPacer(store)
    for launch in [pacer.next(0.0), pacer.next(0.0)]:
        assert launch is not None
        pacer.done(launch)
    store.publish_demand(outlook(seats={A: 2}, mix={A: 8}, recent=("elsewhere", launch.group)))
    assert pacer.next(0.0) is not None
    with pytest.raises(kd.WaitTimeout):
        pacer.next(0.0)


def test_a_launch_that_comes_to_nothing_is_replaced() -> None:
    """Nothing that the trainer publishes changes by it."""
    clock = ManualClock()
    store = memory(clock)
    store.publish_demand(outlook(seats={A: 1}, mix={A: 1}, starving=True, limit=0))
    pacer = kd.RolloutPacer(store)
    launch = pacer.next(0.0)
    assert launch is not None
    pacer.done(launch)
    assert pacer.next(10.0) is not None and clock.now() < 4


def test_a_launcher_that_ends_or_dies_has_nothing_in_flight() -> None:
    clock = ManualClock()
    store = memory(clock)
    store.publish_demand(outlook(seats={A: 2}, mix={A: 2}))
    with kd.RolloutPacer(store, share=(0, 2)) as first:
        launch = first.next(0.0)
        assert launch is not None and len(store.in_flight() or ()) == 1
    assert store.in_flight() == []
    first.done(launch)  # a thread that comes late
    with pytest.raises(kd.UsageError, match="the pacer is closed"):
        first.next(0.0)
    dead = kd.RolloutPacer(store, share=(0, 2))
    assert dead.next(0.0) is not None and dead.next(0.0) is not None
    second = kd.RolloutPacer(store, share=(1, 2))
    with pytest.raises(kd.WaitTimeout):
        second.next(500.0)
    assert second.next(200.0) is not None, "ten minutes of silence"


def test_a_waiting_launcher_says_that_it_lives() -> None:
    store = memory(ManualClock())
    store.publish_demand(outlook(seats={A: 1}, mix={A: 1}))
    pacers = [kd.RolloutPacer(store, share=(i, 2)) for i in range(2)]
    assert pacers[0].next(0.0) is not None
    for _ in range(20):
        for pacer in pacers:
            with pytest.raises(kd.WaitTimeout):
                pacer.next(50.0)


def test_attributes_that_combine_never_stall() -> None:
    """The pairs that a plan makes may change; what it needs is launched whatever the mix paired."""
    quotas = {"source": {"a": 3, "b": 2, "c": 3}, "level": {"x": 5, "y": 1, "z": 2}}
    for seed in range(8):
        made: Admission[Waiting] = Admission(Sizes(8, 2), kd.Quotas(quotas), kd.Staleness(2))
        launching, pace, rng, number = Launching(), Pace(), random.Random(seed), count()
        while made.progress.train_batch < 3:
            chosen = made.choose()
            if chosen is not None:
                made.commit(chosen)
                continue
            seen = outlook_of(made, pace, starving=True)
            wanted = launching.next(seen, {}, made.progress.train_batch * 4)
            assert wanted is not None, seed
            if rng.random() < 0.7:  # else another launcher's group, of any kind that the quotas know
                pair = wanted
            else:
                pair = rng.choice("abc"), rng.choice("xyz")
            made.offer(Waiting(next(number), pair, made.progress.train_batch * 4))


def test_before_the_trainer_and_after_the_end() -> None:
    store = memory(ManualClock())
    pacer = kd.RolloutPacer(store)
    with pytest.raises(kd.WaitTimeout, match="the trainer has not started"):
        pacer.next(3.0)
    store.publish_demand(outlook())
    assert pacer.next() is not None
    store.finish()
    assert pacer.next() is None and pacer.next() is None
    sealed = memory(ManualClock())
    sealed.publish_demand(outlook())
    launcher = kd.RolloutPacer(sealed)
    sealed.seal()
    assert launcher.next() is None


def test_capacity_bounds_what_is_in_flight() -> None:
    store = memory(ManualClock())
    store.publish_demand(outlook())
    pacer = kd.RolloutPacer(store, capacity=2)
    first = pacer.next(0.0)
    assert first is not None and pacer.next(0.0) is not None
    with pytest.raises(kd.WaitTimeout, match="2 groups are in flight, capacity is 2; done was not called"):
        pacer.next(1.0)
    pacer.done(first)
    assert pacer.next(0.0) is not None


def test_launchers_count_each_other() -> None:
    store = memory(ManualClock())
    store.publish_demand(outlook())
    pacers = [kd.RolloutPacer(store, share=(i, 2)) for i in range(2)]
    launches = [pacers[i % 2].next(0.0) for i in range(8)]
    assert sources(launches) == {"math": 4, "code": 4}
    for pacer in pacers:
        with pytest.raises(kd.WaitTimeout):
            pacer.next(0.0)
    flights = store.in_flight()
    assert flights is not None and {x.group for x in flights} == {launch.group for launch in launches if launch}
    assert all(x.version == 0 for x in flights)
    kd.RolloutPacer(store, share=(1, 2))  # after a crash: what it had launched is forgotten
    assert len(store.in_flight() or ()) == 4


def test_the_version_is_that_of_the_launch() -> None:
    store = memory(ManualClock())
    store.publish_demand(outlook())
    pacer = kd.RolloutPacer(store)
    store.publish(3)
    launch = pacer.next(0.0)
    store.publish(7)
    assert launch is not None
    assert store.in_flight() == [InFlight(launch.group, {"source": launch.attributes["source"]}, 3)]


def test_what_is_refused() -> None:
    store = memory(ManualClock())
    for capacity in (0, -1, 2.0, True, None):
        with pytest.raises(kd.InvalidArgument, match=f"capacity must be an int of at least 1, found {capacity}"):
            kd.RolloutPacer(store, capacity=capacity)  # type: ignore[arg-type]
    for share in ((2, 2), (-1, 1), (0, 0), (0,), 3):
        with pytest.raises(kd.InvalidArgument, match="launcher i of n"):
            kd.RolloutPacer(store, share=share)  # type: ignore[arg-type]
    with pytest.raises(kd.InvalidArgument, match="RolloutPacer needs a TrajectoryStore, found str"):
        kd.RolloutPacer("out")  # type: ignore[arg-type]
    store.publish_demand(outlook())
    pacer = kd.RolloutPacer(store)
    for timeout in (-1, float("nan"), None, "1"):
        with pytest.raises(kd.InvalidArgument, match="timeout must be at least 0 seconds"):
            pacer.next(timeout)  # type: ignore[arg-type]
    launch = pacer.next(0.0)
    assert launch is not None
    pacer.done(launch)
    for wrong in (launch, kd.Launch({}, "elsewhere")):
        with pytest.raises(kd.UsageError, match="is not in flight here; call done once"):
            pacer.done(wrong)


def test_a_store_that_disappears_is_named_and_the_pacer_can_go_on() -> None:
    name = "pacing-gone"
    backend = MemoryBackend.named(name, clock=ManualClock())
    store = kd.TrajectoryStore(f"memory://{name}")
    store.publish_demand(outlook())
    pacer = kd.RolloutPacer(store)
    backend.faults.append(Fault("get", "registers/demand", error=kd.Unreachable("the store is gone")))
    with pytest.raises(kd.Unreachable, match="the store is gone"):
        pacer.next(1.0)
    assert pacer.next(0.0) is not None
    store.backend.put("registers/demand", b'{"train_batch": 0}')
    with pytest.raises(kd.CorruptData, match="registers/demand"):
        pacer.next(0.0)


def test_a_register_that_cannot_be_written_loses_no_launch() -> None:
    name = "pacing-faults"
    backend = MemoryBackend.named(name, clock=ManualClock())
    store = kd.TrajectoryStore(f"memory://{name}")
    store.publish_demand(outlook())
    pacer = kd.RolloutPacer(store, capacity=1)
    gone = kd.Unreachable("the store is gone")
    backend.faults.append(Fault("put", "registers/inflight.0", error=gone))
    with pytest.raises(kd.Unreachable):
        pacer.next(0.0)
    assert pacer.in_flight == 0
    launch = pacer.next(0.0)
    assert launch is not None
    backend.faults.append(Fault("put", "registers/inflight.0", error=gone))
    with pytest.raises(kd.Unreachable):
        pacer.done(launch)
    pacer.done(launch)
    assert pacer.in_flight == 0 and store.in_flight() == []


def test_too_many_launchers_are_refused() -> None:
    store = memory(ManualClock())
    with pytest.raises(kd.InvalidArgument, match="launcher i of n"):
        kd.RolloutPacer(store, share=(0, 10**6))
    store.backend.put("registers/launchers", b"99999")
    with pytest.raises(kd.CorruptData, match="99999, at most 1024"):
        store.in_flight()


# -- a whole run, on simulated seconds --------------------------------------------------------------------------------


@dataclass
class Run:
    """Groups take ``seconds`` by source; an optimizer step takes ``step``; weights go out after a train batch."""

    seconds: Mapping[str, float]
    step: float
    batches: int
    arguments: Mapping[str, Any]
    keep: Callable[[str], bool] = lambda name: True
    launched: Counter[str] = field(default_factory=Counter)
    trained: list[Counter[str]] = field(default_factory=list)
    stale: list[float] = field(default_factory=list)
    idle: float = 0.0

    def go(self, pacer_of: Callable[[kd.TrajectoryStore], kd.RolloutPacer]) -> kd.QuotaSampler:
        clock = ManualClock()
        store = memory(clock)
        made, pacer, writer = sampler(store, **self.arguments), pacer_of(store), store.writer("w")
        coming: list[tuple[float, int, kd.Launch, int]] = []
        busy, version, last = 0.0, 0, clock.now()
        while len(self.trained) <= self.batches:
            made.tend()
            if busy <= clock.now():
                if version != store.policy_version():
                    store.publish(version)
                admitted = made.admit(0.0)
                if admitted is not None:
                    mini = admitted.mini
                    if mini.position == 0:
                        self.trained.append(Counter())
                    steps = made.sizes.clock.steps
                    self.stale += [max(0, mini.train_batch * steps - i.policy_version) / steps for i in mini.infos]
                    self.trained[-1].update(i.attributes["source"] for i in mini.infos)
                    self.idle += clock.now() - last
                    busy = last = clock.now() + self.step
                    if mini.is_last:
                        version = mini.index + 1
            try:
                while (launch := pacer.next(0.0)) is not None:
                    source = launch.attributes["source"]
                    self.launched[source] += 1
                    wanted = clock.now() + self.seconds[source]
                    heapq.heappush(coming, (wanted, sum(self.launched.values()), launch, store.policy_version()))
            except kd.WaitTimeout:
                pass
            ahead = [t for t in (busy, coming[0][0] if coming else 0.0) if t > clock.now()]
            assert ahead, f"nothing moves any more: {made.explain()}"
            clock.advance(max(0.0, min(min(ahead) - clock.now(), 0.11)))
            while coming and coming[0][0] <= clock.now():
                _, _, launch, born = heapq.heappop(coming)
                writer.put_group(group(launch.group, 2, launch.attributes["source"], policy_version=born))
                pacer.done(launch)
        return made


ARGUMENTS = {"train_batch_size": 8, "mini_batch_size": 2, "group_size": 2}


def test_a_trainer_bound_run_gets_what_it_needs_just_in_time() -> None:
    run = Run({"math": 3.0, "code": 5.0}, 4.0, 8, {**ARGUMENTS, "quotas": {"source": {"math": 4, "code": 4}}})
    run.go(lambda store: kd.RolloutPacer(store, capacity=8))
    assert all(batch == {"math": 8, "code": 8} for batch in run.trained[: run.batches])
    waste = sum(run.launched.values()) - 8 * run.batches
    assert 0 <= waste <= 16, "at most a train batch ahead"
    settled = run.stale[len(run.stale) // 4 :]
    assert sum(settled) / len(settled) < 0.6, "a pool that is full to the limit would be 2 train batches old"
    assert run.idle < 0.1 * run.batches * 4 * run.step


def test_neither_a_long_source_nor_a_short_one_starves() -> None:
    quotas = {"source": {"math": 2, "code": 6}}  # math takes 200 times as long
    run = Run({"math": 200.0, "code": 1.0}, 2.0, 4, {**ARGUMENTS, "quotas": quotas, "max_staleness": 2})
    run.go(lambda store: kd.RolloutPacer(store, capacity=16))
    assert all(batch == {"math": 4, "code": 12} for batch in run.trained[: run.batches])
    assert run.launched["code"] <= 6 * (run.batches + 3)


def test_what_a_filter_takes_is_launched_again() -> None:
    odd = kd.GroupPolicy(keep=lambda infos: int(infos[0].group.rsplit("-", 1)[1]) % 2 == 0)
    quotas = {"source": {"math": 4, "code": 4}}
    run = Run({"math": 3.0, "code": 3.0}, 2.0, 4, {**ARGUMENTS, "quotas": quotas, "groups": odd})
    made = run.go(lambda store: kd.RolloutPacer(store, capacity=8))
    assert all(batch == {"math": 8, "code": 8} for batch in run.trained[: run.batches])
    assert made.dropped()["filtered"] >= 30


def test_passes_and_crossing_attributes_go_through_the_register() -> None:
    store = memory(ManualClock())
    made = sampler(store, quotas={"source": {"math": 4, "code": 4}, "level": {"hard": 2, "easy": 6}}, epochs=2)
    pacer = kd.RolloutPacer(store)
    made.admit(0.0)
    launches = [pacer.next(0.0) for _ in range(8)]
    wanted = Counter((x.attributes["source"], x.attributes["level"]) for x in launches if x)
    assert sum(n for (_, level), n in wanted.items() if level == "hard") == 2
    assert sum(n for (source, _), n in wanted.items() if source == "math") == 4
    seen = store.outlook()
    assert seen is not None and (seen.minis, seen.steps, seen.attributes) == (4, 8, ("source", "level"))
    assert seen.limit is None and seen.starving
