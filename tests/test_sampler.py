"""The sampler on a store in memory: what is admitted, the node contract, waiting, and going on from a state."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from makers import fill, group, groups_of, memory, rest_of, sampler, trajectory
from torchdata.nodes import Loader

import knit_data as kd
from knit_data.demand import Demand
from knit_data.errors import InvalidArgument, StateError, UsageError, WaitTimeout
from knit_data.store.memory import ManualClock
from knit_data.store.store import InFlight

HANG = 120.0  # seconds; reached only by a test that fails


# -- exact batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("writers", [2, 4])
def test_train_batches_are_exact(grouped: bool, writers: int) -> None:
    store = memory()
    hands = [store.writer(f"w{i}") for i in range(writers)]
    for g in range(30):
        members = group(f"g{g:02}", 2, ("math", "math", "code")[g % 3])
        for i, t in enumerate(members):
            if not grouped:
                hands[(g + i) % writers].put(t)
        if grouped:
            hands[g % writers].put_group(members)
    store.seal()
    quotas = {"source": {"math": (3, 4), "code": (2, 3)}}
    made = sampler(store, train_batch_size=6, mini_batch_size=3, group_size=2, quotas=quotas, max_staleness=99)
    batches: dict[int, list[str]] = {}
    for index in range(10):
        mini = made.next()
        assert (mini.index, mini.train_batch, mini.position) == (index, index // 2, index % 2)
        assert mini.is_last == (index % 2 == 1) and mini.n_groups == 3 and len(mini.infos) == 6
        batches.setdefault(mini.train_batch, []).extend(groups_of(mini))
    with pytest.raises(StopIteration):
        made.next()
    with pytest.raises(StopIteration):
        made.next()
    for names in batches.values():
        code = sum(int(n[1:]) % 3 == 2 for n in names)
        assert len(names) == 6 and 2 <= code <= 3
    assert sorted(n for names in batches.values() for n in names) == [f"g{g:02}" for g in range(30)]
    assert made.left_over() == 0 and made.dropped() == {}


def test_what_put_group_wrote_is_a_group_of_any_size() -> None:
    store = memory()
    writer = store.writer("w")
    for g, size in enumerate((1, 3, 2, 5)):
        writer.put_group(group(f"g{g}", size))
    store.seal()
    made = sampler(store, train_batch_size=4, group_size=None)
    assert [made.next().group_rows, made.next().group_rows] == [(1, 3), (2, 5)]


def test_annotations_come_with_every_pass_and_after_a_resume() -> None:
    store = fill(memory(), 8)
    arguments = {"epochs": 2, "groups": kd.GroupPolicy(annotate=kd.group_advantages)}
    made = sampler(store, **arguments)
    for _ in range(5):
        mini = made.next()
        assert all("advantage" in info.values for info in mini.infos)
    again = sampler(store, **arguments)
    again.reset(made.get_state())
    for mini in (made.next(), again.next()):
        members = mini.infos[:4]
        expected = kd.group_advantages(members)["advantage"]
        assert [i.values["advantage"] for i in members] == torch.tensor(expected).tolist()


# -- the node contract -------------------------------------------------------------------------------------------------


def test_constructing_reads_nothing_and_state_comes_before_the_first_item() -> None:
    store = memory()
    made = sampler(store)
    assert made.deficits() == {} and made.free_seats() == 8 and made.left_over() == 0
    assert made.explain() == "the sampler has not started: it starts with the first mini-batch."
    state = made.state_dict()
    fill(store, 8)
    other = sampler(store)
    other.reset(json.loads(json.dumps(state)))
    assert other.next().index == 0


def test_a_torchdata_loader_resumes_and_iterates_again() -> None:
    store = fill(memory(), 16)
    whole = [groups_of(mini) for mini in Loader(sampler(store))]
    assert len(whole) == 8
    loader = Loader(sampler(store))
    steps = iter(loader)
    begun = [groups_of(next(steps)) for _ in range(3)]
    state = json.loads(json.dumps(loader.state_dict()))
    second = [groups_of(mini) for mini in loader]
    assert begun + second == whole, "a second iter goes on; nothing is trained again"
    assert list(loader) == []
    resumed = Loader(sampler(store))
    resumed.load_state_dict(state)
    assert [groups_of(mini) for mini in resumed] == whole[3:]


def test_states_are_fresh_and_resets_from_which_nothing_was_read_open_nothing() -> None:
    store = fill(memory(), 8)
    made = sampler(store)
    made.reset()
    made.reset()
    first = made.next()
    state = made.get_state()
    kept = json.dumps(state)
    made.next()
    assert json.dumps(state) == kept != json.dumps(made.get_state())
    made.reset(json.loads(kept))
    made.reset(json.loads(kept))
    assert first.index == 0 and made.next().index == 1


def test_only_rank_0_admits(monkeypatch: pytest.MonkeyPatch) -> None:
    made = sampler(fill(memory(), 8))
    monkeypatch.setattr(dist, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    with pytest.raises(UsageError, match="rank 3 asked the sampler for a mini-batch; only global rank 0 admits"):
        made.next()
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    assert made.next().index == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"group_size": 0}, "group_size must be at least 1, found 0"),
        ({"group_size": True}, "group_size must be an int or None, found True"),
        ({"group_size": 2.0}, "group_size must be an int or None, found 2.0"),
        ({"seed": "x"}, "seed must be an int, found 'x'"),
        ({"timeout": 0}, "timeout must be above 0 seconds, found 0"),
        ({"timeout": float("nan")}, "timeout must be above 0 seconds, found nan"),
        ({"epochs": 0}, "epochs must be an int of at least 1"),
        ({"quotas": {"source": {"math": 9}}}, "quotas need at least 9 groups .math exactly 9., train_batch_size is 8"),
        ({"quotas": {"source": {"math": 7}}}, "quotas allow at most 7 groups"),
        ({"quotas": [1]}, "quotas must map"),
        ({"max_staleness": -1}, "max_staleness must be an int >= 0"),
        ({"groups": {"invalid": "drop"}}, "groups must be a GroupPolicy"),
    ],
)
def test_arguments_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        sampler(memory(), **arguments)


def test_the_loaders_limit_is_the_samplers_unless_a_smaller_one_was_asked_for() -> None:
    store = memory()
    store.writer("w").put_group(group("long", 2, lengths=(5, 9)))
    for g in range(2):
        store.writer("w").put_group(group(f"g{g}", 2, lengths=(5, 8)))
    store.seal()
    made = sampler(store, group_size=2, groups=kd.GroupPolicy(oversize="drop"))
    made.limit_tokens(8)
    assert groups_of(made.next()) == ["g0", "g1"] and made.dropped() == {"oversize": 1}
    made = sampler(store, group_size=2, groups=kd.GroupPolicy(max_tokens=9, oversize="alone"))
    made.limit_tokens(8)
    assert groups_of(made.next()) == ["long", "g0"]
    with pytest.raises(InvalidArgument, match=r"max_tokens=9. does not fit a micro-batch: its cap takes 8 tokens"):
        sampler(store, groups=kd.GroupPolicy(max_tokens=9)).limit_tokens(8)


def test_the_sampler_reads_a_stream_only() -> None:
    with pytest.raises(InvalidArgument, match="reads a TrajectoryStream, found list"):
        kd.QuotaSampler([], 8, 2, 4)  # type: ignore[arg-type]


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_a_time_out_says_what_is_short_and_can_be_waited_out() -> None:
    clock = ManualClock()
    store = memory(clock)
    writer = store.writer("w")
    quotas = {"source": {"math": 4, "code": 4}}
    made = sampler(store, quotas=quotas, group_size=2, max_staleness=0, timeout=60.0)
    for g in range(5):
        writer.put_group(group(f"m{g}", 2))
    writer.put(group("c", 2, "code")[0])
    assert [made.next().index, made.next().index] == [0, 1]
    begun = clock.now()
    text = (
        r"no mini-batch could be admitted for 60 s: train batch 0, mini-batch 3 of 4 waits for 2 groups that fit, "
        r"short of 4 code: code \(exactly 4: 0 in, 0 complete, 1 incomplete\); math \(exactly 4: 4 in, 1 complete, "
        r"0 incomplete, no seat left\); 0 free of 4 seats left; decided by \w+\. Are the rollout workers alive"
    )
    with pytest.raises(WaitTimeout, match=text):
        made.next()
    assert 60 <= clock.now() - begun < 61
    with pytest.raises(WaitTimeout, match="short of 4 code"):
        made.next()
    for g in range(2):
        writer.put_group(group(f"c{g}", 2, "code"))
    assert groups_of(made.next()) == ["c0", "c1"]


def test_the_time_out_starts_anew_with_every_mini_batch_and_runs_only_when_needed() -> None:
    clock = ManualClock()
    store = memory(clock)
    writer = store.writer("w")
    made = sampler(store, timeout=60.0, group_size=1)
    for g in range(4):
        assert made.admit(0.0) is None
        clock.advance(50.0)
        writer.put_group(group(f"a{g}", 2))
        admitted = made.admit(0.0)
        assert admitted is not None and admitted.mini.index == g
    for _ in range(3):
        assert made.admit(1.0, needed=False) is None
        clock.advance(100.0)
    assert made.admit(0.0) is None
    clock.advance(61.0)
    with pytest.raises(WaitTimeout):
        made.admit(0.0)


def test_the_pace_is_learned_from_reading_ahead() -> None:
    """Groups come just in time: looked for too early, and there when the trainer needs them."""
    clock = ManualClock()
    store = memory(clock)
    writer = store.writer("w")
    made = sampler(store, group_size=1)
    for g in range(4):
        assert made.admit(0.0, needed=False) is None
        writer.put_group(group(f"a{g}", 2))
        clock.advance(0.5)
        assert made.admit(0.0, needed=False) is not None
        clock.advance(9.5)
    seen = store.outlook()
    assert seen is not None and seen.pace == 10.0 and not seen.starving
    assert made.admit(0.0) is None
    seen = store.outlook()
    assert seen is not None and seen.starving, "now it waits"


def test_surplus_counts_from_a_resume_on() -> None:
    store = memory()
    writer = store.writer("w")
    arguments = {"quotas": {"source": {"math": 4, "code": 4}}, "group_size": 1}
    made = sampler(store, **arguments)
    writer.put_group(group("m", 4))
    for _ in range(2):
        made.next()
    state = made.get_state()
    again = sampler(store, **arguments)
    again.reset(state)
    writer.put_group(group("c", 4, "code"))
    for _ in range(2):
        again.next()
    seen = store.outlook()
    assert seen is not None and seen.surplus == {}, "exact quotas leave none"


def test_a_member_that_is_there_is_looked_for_before_its_group_is_given_up() -> None:
    """Its writer was silent for an hour, and would be looked at again much later than the time-out."""
    clock = ManualClock()
    store = memory(clock)
    one, other = store.writer("one"), store.writer("other")
    other.put_group(group("first", 2))
    policy = kd.GroupPolicy(incomplete="drop", timeout=10.0)
    made = sampler(store, group_size=2, max_staleness=1, groups=policy, timeout=1e5)
    assert made.admit(0.0) is None
    clock.advance(3600.0)
    assert made.admit(0.0) is None  # the other writer is looked at again in 36 s
    halves = group("late", 2)
    one.put(halves[0])
    clock.advance(40.0)
    assert made.admit(0.0) is None
    other.put(halves[1])
    clock.advance(11.0)
    assert made.admit(0.0) is not None and made.dropped() == {}


def test_an_interrupt_in_a_users_function_loses_nothing_silently() -> None:
    store = memory()
    writer = store.writer("w")
    for g in range(4):
        writer.put_group(group(f"g{g}", 4))

    def keep(infos: list[kd.TrajectoryInfo]) -> bool:
        if infos[0].group == "g2":
            raise KeyboardInterrupt
        return True

    made = sampler(store, groups=kd.GroupPolicy(keep=keep))
    with pytest.raises(KeyboardInterrupt):
        made.next()
    with pytest.raises(kd.UsageError, match="was interrupted while it read"):
        made.next()


def test_incomplete_groups_are_of_lone_puts() -> None:
    policy = kd.GroupPolicy(incomplete="drop", timeout=10.0)
    with pytest.raises(InvalidArgument, match="need max_staleness"):
        sampler(memory(), groups=policy)
    sampler(memory(), groups=policy, max_staleness=2)


def test_demand_follows() -> None:
    clock = ManualClock()
    store = memory(clock)
    writer = store.writer("w")
    made = sampler(store, quotas={"source": {"math": 3, "code": (2, 5)}}, train_batch_size=6, group_size=1)
    assert store.demand() == Demand(0, {}, 0)
    assert made.admit(0.0) is None
    assert store.demand() == Demand(0, {("math",): 3, ("code",): 2}, 1)
    assert (made.deficits(), made.free_seats()) == ({("math",): 3, ("code",): 2}, 1)
    for i, (source, deficits, free) in enumerate(
        [
            ("math", {("math",): 1, ("code",): 2}, 1),
            ("code", {("math",): 1}, 1),
            ("math", {}, 0),
        ]
    ):
        writer.put_group(group(f"{i}a", 2, source) if i < 2 else group(f"{i}a", 1, source))
        if i == 2:
            writer.put_group(group("last", 1, "code"))
        made.next()
        expected = Demand(0, deficits, free) if i < 2 else Demand(1, {("math",): 3, ("code",): 2}, 1)
        assert store.demand() == expected
        assert (made.deficits(), made.free_seats()) == (expected.deficits, expected.free)


def test_the_consumer_may_start_before_any_producer() -> None:
    store = memory()
    got: list[list[list[str]]] = []
    thread = threading.Thread(target=lambda: got.extend(s[-1] for s in rest_of(sampler(store))[0]), name="consumer")
    thread.start()
    fill(store, 8)
    thread.join(HANG)
    assert not thread.is_alive()
    assert sorted(ids[0] for groups in got for ids in groups) == [f"g{i:04}/0" for i in range(8)]


# -- going on from a state ---------------------------------------------------------------------------------------------


def busy_store(seed: int, lone: bool) -> kd.TrajectoryStore:
    """Four writers; pending and repeated groups, members too many, and much that is dropped."""
    rng, store = random.Random(seed), memory()
    hands = [store.writer(f"w{i}") for i in range(4)]
    puts: list[tuple[kd.Trajectory, ...]] = []
    for g in range(26):
        made = group(f"g{g:02}", 2, ("math", "code")[g % 2], policy_version=rng.randrange(6))
        kind = rng.choice(["whole", "whole", "lone", "more", "twice", "pending", "long", "small", "unknown"])
        if kind in ("lone", "pending") and not lone:
            kind = "whole"
        if kind in ("more", "twice"):
            puts.append((*made, trajectory(f"g{g:02}/x", f"g{g:02}", attributes=made[0].attributes)))
            puts += [puts[-1]] * (kind == "twice")
        elif kind in ("lone", "pending"):
            puts += [(t,) for t in made[: 2 if kind == "lone" else 1]]
        elif kind == "small":
            puts.append((made[0],))
        elif kind == "long":
            puts.append(tuple(group(f"g{g:02}", 2, lengths=(3, 40))))
        elif kind == "unknown":
            puts.append(tuple(group(f"g{g:02}", 2, "web")))
        else:
            puts.append(tuple(made))
    rng.shuffle(puts)
    for i, put in enumerate(puts):
        hand = hands[i % 4] if puts.count(put) == 1 else next(h for h in hands if put[0].id not in h._known)
        if len(put) == 1 and lone:
            hand.put(put[0])
        else:
            hand.put_group(put)
    store.seal()
    return store


POLICY = kd.GroupPolicy(invalid="drop", oversize="drop", max_tokens=35)


@pytest.mark.parametrize("staleness", [None, 1])
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_resume_after_every_mini_batch_goes_on_alike(seed: int, epochs: int, staleness: int | None) -> None:
    store = busy_store(seed, lone=staleness is not None)
    arguments = {
        "train_batch_size": 4,
        "group_size": 2,
        "quotas": {"source": {"math": (1, 3), "code": kd.at_least(1)}},
        "max_staleness": staleness,
        "groups": POLICY,
        "epochs": epochs,
        "seed": seed,
    }
    made = sampler(store, **arguments)
    steps, states = rest_of(made)
    assert len(steps) >= 2 * epochs and made.dropped()
    for i, state in enumerate(states):
        resumed = sampler(store, **arguments)
        resumed.reset(json.loads(json.dumps(state)))
        # equal states after every step make a resume of a resume the same as this one
        assert rest_of(resumed) == (steps[i + 1 :], states[i + 1 :])
        assert (resumed.left_over(), resumed.dropped()) == (made.left_over(), made.dropped())


def test_a_state_of_another_sampler_is_refused() -> None:
    store = fill(memory(), 8)
    made = sampler(store)
    made.next()
    state = made.get_state()
    with pytest.raises(StateError, match="mini_batch_size=2, this sampler has 4"):
        sampler(store, mini_batch_size=4).reset(state)
    with pytest.raises(StateError, match="this state belongs to store"):
        sampler(fill(memory(), 8)).reset(state)
    with pytest.raises(StateError, match="until the train batch is over"):
        sampler(store, quotas={"source": {"math": 4, "code": 4}}).reset(state)
    assert made.next().index == 1


# -- reclaimed segments ------------------------------------------------------------------------------------------------


def test_a_store_whose_first_segments_are_gone() -> None:
    store = fill(memory(), 16)  # eight segments of each writer
    before = sampler(store)
    before.next()
    for writer, first in (("w0", 5), ("w1", 2)):
        store.backend.delete([store.segment_key(writer, n) for n in range(first)])
        store.backend.put(f"registers/floor.{writer[1]}", str(first).encode())
    made = sampler(store)
    with pytest.raises(StateError, match="needs segment 1 of writer 'w0', and those below 5 are reclaimed"):
        made.reset(before.get_state())
    made.reset()
    steps, states = rest_of(made)
    names = [ids[0].split("/")[0] for s in steps for ids in s[-1]]
    there = [f"g{2 * n:04}" for n in range(5, 8)] + [f"g{2 * n + 1:04}" for n in range(2, 8)]
    assert len(names) == 8 and set(names) < set(there) and made.left_over() == 1
    (left,) = set(there) - set(names)
    cursors = {writer: at for writer, at, _ in states[-1]["writers"]}
    assert cursors == {w: int(left[1:]) // 2 if w == int(left[1:]) % 2 else 8 for w in range(2)}
    resumed = sampler(store)
    resumed.reset(states[0])
    assert rest_of(resumed) == (steps[1:], states[1:])


def test_annotations_have_the_same_names_for_every_group():
    def sometimes(infos: list[kd.TrajectoryInfo]) -> dict[str, list[float]]:
        return {"bonus": [0.0] * len(infos)} if infos[0].group.endswith("1") else {}

    made = sampler(fill(memory(), 8), groups=kd.GroupPolicy(annotate=sometimes))
    with pytest.raises(kd.InvalidGroup, match="the same names for every group"):
        made.next()


def test_a_state_of_another_quota_attribute_is_refused():
    store = fill(memory(), 8)
    state = None
    made = sampler(store, quotas={"source": {"math": 4, "code": 4}})
    made.next()
    state = made.get_state()
    with pytest.raises(kd.StateError, match="quotas"):
        sampler(store, quotas={"domain": {"math": 4, "code": 4}}).reset(state)


# -- keeping seats for what is in flight -------------------------------------------------------------------------------

PAIRS: dict[str, Any] = {
    **{"train_batch_size": 2, "mini_batch_size": 2, "group_size": 2},
    "quotas": {"source": {"math": 1, "code": 1}},
}
SLOW = InFlight("slow", {"source": "code"}, 0)


@pytest.mark.parametrize("strategy", ["drop", "wait"])
def test_a_slow_group_is_waited_for_in_the_last_train_batch_that_may_take_it(strategy: str) -> None:
    """S = 1, bound 1: version 0 may be trained at train batch 1, not at 2."""
    clock = ManualClock()
    store = memory(clock)
    fast, slow = store.writer("fast"), store.writer("slow")
    store.publish_in_flight((0, 1), [SLOW])
    made = sampler(store, **PAIRS, max_staleness=kd.Staleness(1, strategy=strategy))
    for k in range(2):
        fast.put_group(group(f"m{k}", 2, "math", policy_version=k))
        fast.put_group(group(f"c{k}", 2, "code", policy_version=k))
    batches = [groups_of(made.next())]
    assert batches == [["m0", "c0"]], "version 0 has another chance"
    for _ in range(3):
        clock.advance(1.0)
        if (admitted := made.admit(0.0)) is not None:
            batches.append(groups_of(admitted.mini))
    assert (len(batches) == 1) == (strategy == "wait")
    assert ("seats are kept for 1 code in flight" in made.explain()) == (strategy == "wait")
    slow.put_group(group("slow", 2, "code"))
    store.publish_in_flight((0, 1), [])
    fast.put_group(group("m2", 2, "math", policy_version=2))
    fast.put_group(group("c2", 2, "code", policy_version=2))
    store.seal()
    batches += [[ids[0].split("/")[0] for ids in s[-1]] for s in rest_of(made)[0]]
    if strategy == "drop":
        assert batches == [["m0", "c0"], ["m1", "c1"], ["m2", "c2"]] and made.dropped() == {"stale": 1}
    else:
        assert batches == [["m0", "c0"], ["slow", "m1"], ["c1", "m2"]] and made.dropped() == {}
    assert all(sorted(n[0] in "cs" for n in names) == [False, True] for names in batches), "exact quotas"


def test_what_has_landed_is_looked_for_before_its_seat_is_given_away() -> None:
    """Its writer was silent for long, so that the stream alone would look at it much later."""
    clock = ManualClock()
    store = memory(clock)
    fast, slow = store.writer("fast"), store.writer("slow")
    slow.put_group(group("first", 2, "code"))
    store.publish_in_flight((0, 1), [SLOW])
    made = sampler(store, **PAIRS, max_staleness=kd.Staleness(1, strategy="wait"))
    fast.put_group(group("m0", 2, "math"))
    made.next()
    fast.put_group(group("c1", 2, "code", policy_version=1))
    fast.put_group(group("m1", 2, "math", policy_version=1))
    for seconds in (500.0, 5.0, 0.1):  # its launcher is not taken for dead yet
        clock.advance(seconds)
        assert made.admit(0.0) is None
    slow.put_group(group("slow", 2, "code"))
    store.publish_in_flight((0, 1), [])
    clock.advance(0.1)
    admitted = made.admit(0.0)
    assert admitted is not None and groups_of(admitted.mini) == ["slow", "m1"]


@pytest.mark.parametrize(
    "launch",
    [
        InFlight("m0", {"source": "math"}, 0),  # trained, though its launcher does not know yet
        InFlight("x", {"source": "web"}, 0),  # no quota counts it
        InFlight("x", {"source": "code"}, 1),  # has another chance
        InFlight("x", {"source": "tool"}, 0),  # no seat is left for it
    ],
)
def test_what_no_seat_is_kept_for(launch: InFlight) -> None:
    store = memory(ManualClock())
    writer = store.writer("w")
    store.publish_in_flight((0, 1), [launch])
    quotas = {"source": {"math": 1, "code": 1, "tool": 0}}
    made = sampler(store, **PAIRS | {"quotas": quotas}, max_staleness=kd.Staleness(1, strategy="wait"))
    for k in range(2):
        writer.put_group(group(f"m{k}", 2, "math", policy_version=k))
        writer.put_group(group(f"c{k}", 2, "code", policy_version=k))
    assert [groups_of(made.next()) for _ in range(2)] == [["m0", "c0"], ["m1", "c1"]]


def test_at_the_end_of_the_stream_nothing_is_waited_for() -> None:
    store = fill(memory(ManualClock()), 4, size=2)
    store.publish_in_flight((0, 1), [SLOW])
    made = sampler(store, **PAIRS, max_staleness=kd.Staleness(0, strategy="wait"))
    steps, _ = rest_of(made)
    assert len(steps) == 1 and made.dropped() == {"stale": 2}
    assert made.explain() == "the stream has ended: 0 groups are left over."


def test_waiting_for_what_never_lands_says_so() -> None:
    store = memory(ManualClock())
    writer = store.writer("w")
    store.publish_in_flight((0, 1), [SLOW])
    made = sampler(store, **PAIRS, max_staleness=kd.Staleness(0, strategy="wait"), timeout=60.0)
    for source in ("math", "code"):
        writer.put_group(group(source, 2, source))
    with pytest.raises(
        WaitTimeout, match=r"code \(exactly 1: 0 in, 1 complete, 0 incomplete, 1 in flight\).*seats are"
    ):
        made.next()
    store.publish_in_flight((0, 1), [])  # its launcher gave it up
    assert groups_of(made.next()) == ["math", "code"]


def test_without_a_launcher_wait_warns_once() -> None:
    store = memory(ManualClock())
    writer = store.writer("w")
    made = sampler(store, **PAIRS, max_staleness=kd.Staleness(1, strategy="wait"))
    for k in range(3):
        writer.put_group(group(f"m{k}", 2, "math", policy_version=k))
        writer.put_group(group(f"c{k}", 2, "code", policy_version=k))
    made.next()
    assert "'wait' keeps no seats: it needs a RolloutPacer" in made.explain()
    with pytest.warns(
        UserWarning, match="needs a RolloutPacer to know what is in flight; without it nothing is waited"
    ):
        made.next()
    made.next()  # -W error: a second warning would raise


def test_explain_through_a_run() -> None:
    clock = ManualClock()
    store = memory(clock)
    writer = store.writer("w")
    policy = kd.GroupPolicy(keep=lambda infos: infos[0].group != "no")
    made = sampler(store, **PAIRS, epochs=2, max_staleness=0, groups=policy)
    writer.put_group(group("no", 2, "code"))
    writer.put_group(group("m0", 2, "math"))
    writer.put(group("half", 2, "code")[0])
    store.publish_in_flight((0, 1), [InFlight(n, {"source": "code"}, 0) for n in ("half", "far", "no")])
    assert made.admit(0.0) is None
    assert made.explain() == (
        "train batch 0, mini-batch 1 of 1 waits for 2 groups that fit, short of 1 code: code (exactly 1: 0 in, "
        "0 complete, 1 incomplete, 1 in flight, 1 dropped as filtered); math (exactly 1: 0 in, 1 complete, "
        "0 incomplete, 0 in flight); 0 free of 2 seats left; dropped 1 filtered, 1 since the last "
        "mini-batch, which take room (max_bytes) until a later one is committed; decided by counting."
    )
    writer.put_group(group("c0", 2, "code"))
    made.next()
    assert made.explain() == "train batch 0, pass 2: trains groups that are there already."
    made.next()
    assert "1 filtered)" not in made.explain() and "dropped 1 filtered" in made.explain()
    writer.put_group(group("left", 2, "math", policy_version=2))
    store.seal()
    with pytest.raises(StopIteration):
        made.next()
    assert made.explain() == "the stream has ended: 1 groups are left over."
