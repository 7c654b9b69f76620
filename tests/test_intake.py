"""Rows on their way to the admission: by name, in time, and as the user's functions decide."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import fill, group, groups_of, memory, rest_of, sampler, trajectory

import knit_data as kd
from knit_data.errors import CorruptData, StateError
from knit_data.flights import Flights
from knit_data.groups import EXTRAS, Dropped
from knit_data.intake import Intake
from knit_data.sampler import Admitted
from knit_data.store.head import decode_head
from knit_data.store.memory import ManualClock
from knit_data.store.segment import encode
from knit_data.store.store import InFlight

SMALL: dict[str, Any] = {"train_batch_size": 1, "mini_batch_size": 1, "group_size": 2}

# -- incomplete groups -------------------------------------------------------------------------------------------------


def dropping(seconds: float = 10.0, **changes: Any) -> kd.GroupPolicy:
    return kd.GroupPolicy(incomplete="drop", timeout=seconds, **changes)


def soon(made: kd.QuotaSampler) -> Admitted | None:
    """A mini-batch with what was just put, also by a writer that was silent for a while."""
    return made.admit(1.0) or made.admit(0.0)


def test_an_incomplete_group_leaves_by_the_clock_and_its_members_are_late() -> None:
    clock = ManualClock()
    store = memory(clock)
    writer = store.writer("w")
    made = sampler(store, **SMALL, max_staleness=9, groups=dropping())
    a, b = group("a", 2), group("b", 2)
    writer.put(a[0])
    assert made.admit(0.0) is None
    clock.advance(9.9)
    writer.put(b[0])
    assert made.admit(0.0) is None and made.dropped() == {} and made.left_over() == 2
    clock.advance(0.1)
    assert made.admit(0.0) is None and made.dropped() == {"incomplete": 1} and made.left_over() == 1
    writer.put(a[1])
    writer.put(b[1])
    admitted = soon(made)
    assert admitted is not None and groups_of(admitted.mini) == ["b"]
    assert admitted.entry.dropped == {"incomplete": 1, "late": 1}
    writer.put(trajectory("a/2", "a"))
    assert soon(made) is None and made.dropped() == {"incomplete": 1, "late": 2} and made.left_over() == 0


def test_members_that_are_there_are_read_before_their_group_is_dropped() -> None:
    clock = ManualClock()
    store = memory(clock)
    writer = store.writer("w")
    made = sampler(store, **SMALL, max_staleness=9, groups=dropping())
    a = group("a", 2)
    writer.put(a[0])
    assert made.admit(0.0) is None
    writer.put(a[1])
    clock.advance(1000.0)  # the trainer was busy
    admitted = made.admit(0.0)
    assert admitted is not None and groups_of(admitted.mini) == ["a"]


def test_a_resume_starts_the_time_anew() -> None:
    clock = ManualClock()
    store = memory(clock)
    writer = store.writer("w")
    made = sampler(store, **SMALL, max_staleness=9, groups=dropping())
    for g in range(3):
        writer.put(group(f"g{g}", 2)[0])
    writer.put_group(group("whole", 2))
    made.next()
    clock.advance(1000.0)
    resumed = sampler(store, **SMALL, max_staleness=9, groups=dropping())
    resumed.reset(made.get_state())
    assert resumed.admit(0.0) is None and resumed.dropped() == {} and resumed.left_over() == 3
    assert made.admit(0.0) is None and made.dropped() == {"incomplete": 3} and made.left_over() == 0


@pytest.mark.parametrize("policy", [kd.GroupPolicy(), dropping(1e6)])
def test_an_incomplete_group_that_got_too_old_does_not_pin_its_writer(policy: kd.GroupPolicy) -> None:
    store = memory(ManualClock())
    writer, late = store.writer("w"), store.writer("late")
    made = sampler(store, **SMALL, max_staleness=1, groups=policy)
    lost = group("lost", 2)
    writer.put(lost[0])
    for g in range(2):
        writer.put_group(group(f"g{g}", 2, policy_version=g))
        made.next()
        assert made.dropped() == {} and made.left_over() == 1 and made.get_state()["writers"][0][1] == 0
    writer.put_group(group("g2", 2, policy_version=2))
    made.next()  # at train batch 2, version 0 has a = 2
    assert made.dropped() == {"stale": 1} and made.left_over() == 0
    assert made.get_state()["writers"][0][1] == 4
    late.put(lost[1])
    assert made.admit(0.0) is None and made.dropped() == {"stale": 1, "late": 1} and made.left_over() == 0


def test_an_incomplete_group_of_an_abandoned_timeline() -> None:
    store = memory(ManualClock())
    store.writer("w").put(group("a", 2, policy_version=1)[0])
    for abandoned, expected in (("accept", {}), ("drop", {"abandoned": 1})):
        made = sampler(store, **SMALL, max_staleness=kd.Staleness(1, abandoned=abandoned))
        assert made.admit(0.0) is None and made.dropped() == expected


def test_nothing_is_kept_of_groups_that_ended_long_ago() -> None:
    store = memory(ManualClock())
    writer = store.writer("w")
    policy = kd.GroupPolicy(oversize="drop", max_tokens=8)
    made = sampler(store, **SMALL, max_staleness=0, groups=policy)
    for g in range(50):
        writer.put(trajectory(f"long{g}", f"long{g}", 9, policy_version=g))
        writer.put_group(group(f"g{g}", 2, lengths=(3, 4), policy_version=g))
        made.next()
    assert made.dropped() == {"oversize": 50}
    assert not made._intake._ended and not made._intake._drops and not made._intake.assembler.incomplete
    assert len(made._required().seen) <= 2 and not made._intake.gone


def test_labs_molt_109_seven_finished_siblings_wait_or_leave_by_name() -> None:
    """They reach neither keep nor annotate as if they were a group."""
    sizes: list[int] = []

    def keep(infos: Sequence[kd.TrajectoryInfo]) -> bool:
        sizes.append(len(infos))
        return True

    def annotate(infos: Sequence[kd.TrajectoryInfo]) -> dict[str, list[float]]:
        sizes.append(len(infos))
        return kd.group_advantages(infos)

    for policy, dropped in (
        (kd.GroupPolicy(keep=keep, annotate=annotate), {}),
        (dropping(60.0, keep=keep, annotate=annotate), {"incomplete": 1}),
    ):
        clock = ManualClock()
        store = memory(clock)
        writer = store.writer("w")
        members = group("eight", 8)
        for t in members[:7]:
            writer.put(t)
        writer.put_group(group("other", 8))
        made = sampler(store, **{**SMALL, "group_size": 8}, max_staleness=9, groups=policy)
        assert groups_of(made.next()) == ["other"]
        clock.advance(60.0)
        assert made.admit(0.0) is None and made.dropped() == dropped
        writer.put(members[7])
        admitted = soon(made)
        assert (admitted is None) == bool(dropped) and made.dropped() == (dropped and dropped | {"late": 1})
    assert set(sizes) == {8}


# -- every row has one fate --------------------------------------------------------------------------------------------

KINDS = ["whole", "lone", "pending", "slow", "small", "long", "twice", "more", "other"]


def puts_of(name: str, kind: str, source: str, version: int) -> list[tuple[bool, list[kd.Trajectory]]]:
    members = group(name, 2, source, lengths=(3, 4), policy_version=version)
    if kind in ("lone", "slow"):
        return [(False, [t]) for t in members]
    if kind == "pending":
        return [(False, members[:1])]
    if kind == "small":
        return [(True, members[:1])]
    if kind == "long":
        return [(False, [trajectory(f"{name}/x", name, 40, policy_version=version)]), (False, members[:1])]
    if kind == "twice":
        return [(True, members), (True, members[::-1])]
    if kind == "more":
        return [(False, [t]) for t in group(name, 4, source, lengths=(3,) * 4, policy_version=version)]
    if kind == "other":
        return [(True, members), (True, group(name, 2, source, lengths=(3, 5), policy_version=version))]
    return [(True, members)]


@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.sampled_from(["math", "code"]), st.sampled_from([0, 1, 3])), max_size=16
    ),
    st.integers(1, 2),
    st.sampled_from([None, 3.0]),
    st.randoms(use_true_random=False),
)
def test_every_row_of_a_living_store_has_one_fate(
    kinds: list[tuple[str, str, int]], epochs: int, timeout: float | None, rng: random.Random
) -> None:
    """Puts, admissions and time in any order."""
    clock = ManualClock()
    store = memory(clock)
    puts = [put for g, (kind, *rest) in enumerate(kinds) for put in puts_of(f"g{g}", kind, *rest)]
    rng.shuffle(puts)
    fates: Counter[tuple[int, int, int]] = Counter()
    ended: dict[str, list[tuple[str, int]]] = {}  # by group: the reason, and the train batch that was open
    policy: dict[str, Any] = {} if timeout is None else {"incomplete": "drop", "timeout": timeout}
    made = sampler(
        store,
        train_batch_size=2,
        mini_batch_size=1,
        group_size=2,
        quotas={"source": {"math": (0, 1), "code": (1, 2)}},
        max_staleness=1,
        groups=kd.GroupPolicy(invalid="drop", oversize="drop", max_tokens=35, **policy),
        epochs=epochs,
    )
    drop = Intake._drop

    def recorded(self: Intake, dropped: Dropped) -> None:
        fates.update(info.address for info in dropped.table.infos())
        if dropped.name is not None:
            ended.setdefault(dropped.name, []).append((dropped.reason, self.admission.progress.train_batch))
        drop(self, dropped)

    def admit(timeout: float = 0.0) -> bool:
        admitted = made.admit(timeout)
        if admitted is not None and admitted.mini.epoch == 0:
            fates.update(info.address for info in admitted.mini.infos)
            for name in groups_of(admitted.mini):
                ended.setdefault(name, []).append(("trained", admitted.mini.train_batch))
        return admitted is not None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Intake, "_drop", recorded)
        hands = [store.writer(f"w{i}") for i in range(3)]
        for whole, members in puts:
            writer = rng.choice([h for h in hands if not any(t.id in h._known for t in members)])
            _ = writer.put_group(members) if whole else writer.put(members[0])
            clock.advance(rng.choice([0.0, 0.0, 2.0]))
            if rng.random() < 0.4:
                admit()
        store.seal()
        with pytest.raises(StopIteration):
            while True:
                admit(1.0)
    left = [g.table for g in made._admission.waiting.values()]
    left += [t for g in made._intake.assembler.incomplete.values() for t in g.members]
    fates.update(info.address for table in left for info in table.infos())
    assert set(fates.values()) <= {1} and len(fates) == sum(len(members) for _, members in puts)
    names = set(ended) | {table[0].group for table in left}
    assert names == {f"g{g}" for g in range(len(kinds))}
    for fates_of in ended.values():
        for (_, before), (reason, after) in pairwise(fates_of):
            # nobody remembers for longer than a staleness window, after which nothing of it can be trained any more
            assert after > before + 1 and reason != "trained"
    counted = Counter(reason for fates_of in ended.values() for reason, _ in fates_of if reason != "trained")
    assert timeout is not None or not counted["incomplete"]
    assert {r: n for r, n in made.dropped().items() if r not in EXTRAS} == counted


# -- keep and annotate -------------------------------------------------------------------------------------------------


def waiting_store(count: int = 12) -> kd.TrajectoryStore:
    """Much math, of which each train batch takes one group; code is rare."""
    return fill(memory(), count, ("math", "math", "code"), 2)


QUOTAS = {"source": {"math": 1, "code": 1}}


@pytest.mark.parametrize("staleness", [None, 9])
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_resume_does_not_ask_keep_again(epochs: int, staleness: int | None) -> None:
    def forbidden(infos: Sequence[kd.TrajectoryInfo]) -> bool:
        pytest.fail(f"keep was asked for {infos[0].group}")

    store = waiting_store()
    arguments = {
        **{"train_batch_size": 2, "mini_batch_size": 1, "group_size": 2, "quotas": QUOTAS},
        **{"epochs": epochs, "max_staleness": staleness},
    }
    made = sampler(store, **arguments, groups=kd.GroupPolicy(keep=lambda infos: infos[0].group != "g0004"))
    steps, states = rest_of(made)
    assert len(steps) == 9 * epochs and made.dropped() == {"filtered": 1}
    for i, state in enumerate(states):
        resumed = sampler(store, **arguments, groups=kd.GroupPolicy(keep=forbidden))
        resumed.reset(json.loads(json.dumps(state)))
        assert rest_of(resumed) == (steps[i + 1 :], states[i + 1 :])
        assert (resumed.dropped(), resumed.left_over()) == (made.dropped(), made.left_over())


def test_accepted_groups_are_asked_about_once_and_new_ones_after_a_resume() -> None:
    store = memory(ManualClock())
    writer = store.writer("w")
    arguments = {"train_batch_size": 2, "mini_batch_size": 1, "group_size": 2, "quotas": QUOTAS, "max_staleness": 9}
    asked: list[str] = []

    def keep(infos: Sequence[kd.TrajectoryInfo]) -> bool:
        asked.append(infos[0].group)
        return infos[0].group != "no"

    made = sampler(store, **arguments, groups=kd.GroupPolicy(keep=keep))
    for name in ("m0", "m1", "no", "m2"):
        writer.put_group(group(name, 2))
    entry = made.admit(0.0).entry  # type: ignore[union-attr]
    assert asked == ["m0", "m0", "m1", "m1", "no", "no", "m2", "m2"] and len(entry.accepted) == 2
    state = made.get_state()
    writer.put_group(group("m3", 2))
    writer.put_group(group("c", 2, "code"))
    asked.clear()
    resumed = sampler(store, **arguments, groups=kd.GroupPolicy(keep=keep))
    resumed.reset(state)
    assert groups_of(resumed.next()) == ["c"] and set(asked) == {"m3", "c"}
    assert len(resumed._required().accepted) == 3, "m1, m2 and m3 wait"


def test_without_keep_nothing_is_recorded() -> None:
    made = sampler(waiting_store(), train_batch_size=2, mini_batch_size=1, group_size=2, quotas=QUOTAS)
    assert not made.admit(0.0).entry.accepted  # type: ignore[union-attr]
    assert made.get_state()["accepted"] == ""
    with pytest.raises(StateError):
        made.reset(made.get_state() | {"version": 1})


def test_later_passes_keep_what_annotate_gave_in_the_first() -> None:
    calls: list[str] = []

    def annotate(infos: Sequence[kd.TrajectoryInfo]) -> dict[str, list[float]]:
        calls.append(infos[0].group)
        return {"x": [float(i.id[-1]) for i in infos]}

    store = fill(memory(), 2, size=4)  # rows of one put are groups of their own
    arguments = {"train_batch_size": 4, "group_size": 1, "epochs": 3, "groups": kd.GroupPolicy(annotate=annotate)}
    made = sampler(store, **arguments)
    for index in range(12):
        assert all(i.values["x"] == float(i.id[-1]) for i in made.next().infos)
        assert len(made._annotated) == (0 if index % 6 == 5 else min(4, 2 * (index % 6 + 1)))
        assert len(calls) == 2 * min(4, 2 * (index % 6 + 1)) + (index >= 6) * 8
    made = sampler(store, **arguments)
    for _ in range(4):
        made.next()
    calls.clear()
    resumed = sampler(store, **arguments)
    resumed.reset(made.get_state())
    for _ in range(2):
        assert all(i.values["x"] == float(i.id[-1]) for i in resumed.next().infos)
    assert len(calls) == 8, "a resume asks for all four once more"


# -- what is in flight -------------------------------------------------------------------------------------------------


def test_what_launchers_say() -> None:
    store = memory(ManualClock())
    assert store.in_flight() is None
    a, b = InFlight("a", {"source": "math"}, 3), InFlight("b", {}, 0)
    store.publish_in_flight((1, 2), [a])
    assert store.in_flight() == [a], "launcher 0 has not said anything yet"
    store.publish_in_flight((0, 2), [b, a])
    assert store.in_flight() == [b, a, a]
    store.publish_in_flight((0, 1), [])
    assert store.in_flight() == [], "what launchers of before said does not count"
    for share in ((1, 1), (-1, 1), (0, 0), (True, 2), (0, 1.0)):
        with pytest.raises(kd.InvalidArgument, match="needs launcher i of n"):
            store.publish_in_flight(share, [])  # type: ignore[arg-type]
    store.backend.put("registers/inflight.0", b'{"launches": [["a", {}, -1]]}')
    with pytest.raises(CorruptData, match=r"inflight\.0 is damaged"):
        store.in_flight()


def test_the_number_of_launchers_is_written_when_it_changes() -> None:
    store = memory(ManualClock())
    store.publish_in_flight((0, 2), [])
    store.backend.put("registers/launchers", b"5")
    store.publish_in_flight((0, 2), [])
    assert store.register("launchers") == 5
    store.publish_in_flight((0, 3), [])
    assert store.register("launchers") == 3


def test_launchers_are_looked_at_every_now_and_then() -> None:
    clock = ManualClock()
    store = memory(clock)
    flights = Flights(store)
    a, b = InFlight("a", {}, 0), InFlight("b", {}, 0)
    store.publish_in_flight((0, 1), [a, b])
    assert not flights.look() and flights.launches == [a, b]
    store.publish_in_flight((0, 1), [b])
    assert not flights.look() and flights.launches == [a, b], "too soon"
    clock.advance(0.06)
    assert flights.look() and flights.launches == [b]
    clock.advance(0.06)
    assert not flights.look()


def test_a_group_whose_rows_were_read_is_not_in_flight() -> None:
    store = memory(ManualClock())
    writer = store.writer("w")
    made = sampler(store, **SMALL, quotas={"source": {"math": (0, 1), "code": (0, 1)}}, max_staleness=9)
    for name in ("trained", "waits"):
        writer.put_group(group(name, 2))
    made.next()
    writer.put(group("begun", 2)[0])
    made._intake.take(made.stream.poll(0.0), 0.0)
    names = ["trained", "waits", "begun", "new"]
    launches = [InFlight(name, {"source": "math"}, 0) for name in names]
    launches += [InFlight("x", {"source": "web"}, 0), InFlight("y", {}, 0)]
    found = made._intake.unfinished(launches)
    assert [(x.group, c) for x, c in found] == [("begun", ("math",)), ("new", ("math",))]


# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "mean"), [(-1, None), (-1, 3.0), (3, 2.5), (3, math.nan), (3, math.inf), (0, -math.inf)]
)
def test_a_segment_whose_versions_make_no_sense_is_damaged(version: int, mean: float | None) -> None:
    """A writer refuses them at put; here somebody made the file."""
    members = [trajectory("a"), trajectory("b", policy_version=version, mean_policy_version=mean)]
    head = encode(members, writer=2, segment=4, grouped=True).parts[0]
    text = r"segment 4 of writer 2: .*policy versions .*, means .*: versions are counts"
    with pytest.raises(CorruptData, match=text):
        decode_head(head, writer=2, segment=4)
    store = memory()
    with pytest.raises(kd.InvalidTrajectory, match="policy_version"):
        store.writer("w").put(trajectory("b", policy_version=version, mean_policy_version=mean))


def test_rllm_622_the_version_is_that_of_the_start() -> None:
    """Weights changed while a trajectory was made: it is as old as its first token, and the mean stands beside."""
    store = memory()
    store.writer("w").put_group(group("g0", 2, policy_version=0))
    store.writer("w").put_group(group("g1", 2, policy_version=0, mean_policy_version=0.75))
    store.seal()
    made = kd.TrajectoryLoader(sampler(store, **SMALL, max_staleness=1), 64, device="cpu")
    with made as run:
        stats = []
        for mini in run:
            list(mini)
            stats.append((mini.stats["staleness/max"], mini.stats["staleness/token_mean"]))
    assert stats == [(0.0, 0.0), (1.0, 0.25)]
    strict = sampler(store, **SMALL, max_staleness=0)
    strict.next()
    with pytest.raises(StopIteration):
        strict.next()
    assert strict.dropped() == {"stale": 1}, "a mean within the bound does not save it"
