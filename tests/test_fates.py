"""What becomes of every row: repeats, drops, and what is left over."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import fill, group, groups_of, memory, rest_of, sampler, trajectory

import knit_data as kd
from knit_data.errors import InvalidGroup
from knit_data.groups import EXTRAS
from knit_data.store.memory import ManualClock

# -- repeats -----------------------------------------------------------------------------------------------------------


def test_late_repeats_are_dropped_and_counted() -> None:
    store = memory()
    one, two = store.writer("one"), store.writer("two")
    made = sampler(store, group_size=2, max_staleness=9)
    first, second, third = (group(f"g{i}", 2) for i in range(3))
    one.put_group(first)
    one.put_group(second)
    assert groups_of(made.next()) == ["g0", "g1"]
    two.put_group(first[::-1])  # trained already
    two.put(second[0])
    one.put_group(third)
    two.put_group(third)  # waits
    two.put(trajectory("new", "g2"))
    two.put(third[0]) if third[0].id not in two._known else None
    one.put_group(group("g3", 2))
    assert groups_of(made.next()) == ["g2", "g3"]
    assert made.dropped() == {"duplicate": 4, "late": 1, "surplus": 1}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("invalid", ["error", "drop"])
def test_a_repeat_with_other_content(invalid: str, trained: bool) -> None:
    store = memory()
    made = sampler(store, group_size=2, max_staleness=9, groups=kd.GroupPolicy(invalid=invalid))
    store.writer("one").put_group(group("g0", 2))
    if trained:
        store.writer("one").put_group(group("g1", 2))
        made.next()
    store.writer("two").put_group(group("g0", 2, policy_version=1))
    store.writer("two").put_group(group("g2", 2))
    if not trained:
        store.writer("two").put_group(group("g1", 2))
    else:
        store.writer("two").put_group(group("g3", 2))
    if invalid == "error":
        text = (
            "group 'g0' of trajectory 'g0/0' stands in segment 0 of writer 0 and, with other content, in segment 0 of"
        )
        with pytest.raises(InvalidGroup, match=f"{text} writer 1"):
            made.next()
        with pytest.raises(InvalidGroup, match=text):
            made.next()  # what was read is lost to this sampler, so it does not go on
    else:
        made.next()
        assert made.dropped() == {"conflict": 2}


def test_repeats_of_dropped_groups_stay_dropped() -> None:
    store = memory()
    one, two = store.writer("one"), store.writer("two")
    made = sampler(store, group_size=2, max_staleness=9, groups=kd.GroupPolicy(keep=lambda i: i[0].group != "bad"))
    bad = group("bad", 2)
    one.put_group(bad)
    two.put_group(bad)
    two.put(trajectory("more", "bad"))
    for i in range(2):
        one.put_group(group(f"g{i}", 2))
    made.next()
    store.writer("three").put_group(group("bad", 2, policy_version=1))
    for i in range(2, 4):
        one.put_group(group(f"g{i}", 2))
    made.next()
    assert made.dropped() == {"filtered": 1, "late": 5}


def test_without_a_staleness_bound_trained_ids_are_remembered_for_good() -> None:
    store = memory()
    one, two = store.writer("one"), store.writer("two")
    made = sampler(store, group_size=1, train_batch_size=2)
    one.put_group(group("a", 4))
    made.next(), made.next()
    for t in group("a", 4):
        two.put(t)
    two.put_group(group("b", 2))
    assert groups_of(made.next()) == ["b", "b"]
    assert made.dropped() == {"duplicate": 4}


def test_an_error_of_the_users_own_is_raised_again() -> None:
    def keep(infos: Sequence[kd.TrajectoryInfo]) -> bool:
        raise ZeroDivisionError(infos[0].id)

    made = sampler(fill(memory(), 8), groups=kd.GroupPolicy(keep=keep))
    for _ in range(2):
        with pytest.raises(InvalidGroup, match="keep raised ZeroDivisionError for group 'g0000': g0000/0") as caught:
            made.next()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_late_members_of_a_group_that_was_just_dropped() -> None:
    store = memory()
    writer = store.writer("w")
    made = sampler(store, train_batch_size=1, mini_batch_size=1, group_size=2, max_staleness=0)
    writer.put_group(group("g0", 2))
    writer.put_group(group("g1", 2))
    made.next()
    assert made.admit(0.0) is None and made.dropped() == {"stale": 1}
    writer.put(trajectory("new", "g1", policy_version=1))
    assert made.admit(0.0) is None and made.dropped() == {"stale": 1, "late": 1} and made.left_over() == 0


def test_what_is_too_old_to_come_again_is_forgotten() -> None:
    store = memory()
    writer = store.writer("w")
    for g in range(6):
        writer.put_group(group(f"g{g}", 2, policy_version=g))
    store.seal()
    made = sampler(store, train_batch_size=1, mini_batch_size=1, group_size=2, max_staleness=2)
    for _ in range(6):
        made.next()
    ledger = made.ledger_of()
    ledger.load(made.get_state())
    assert sorted(version for _, version, _, _ in ledger.seen.values()) == [4, 5], "the next batch begins at step 6"


# -- what becomes of every group ---------------------------------------------------------------------------------------


@dataclass
class Story:
    """Puts in some order, and the fate that each group must have."""

    puts: list[tuple[int, bool, list[kd.Trajectory]]] = field(default_factory=list)
    fates: dict[str, str] = field(default_factory=dict)
    extras: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, kind: str, source: str, version: int, lone: bool) -> None:
        members = group(name, 2, source, lengths=(3, 4), policy_version=version)
        fate, puts = "fits", [(0, True, members)]
        if kind == "lone":
            puts = [(i, False, [t]) for i, t in enumerate(members)]
        elif kind == "pending":
            fate, puts = "left", [(2, False, members[:1])]
        elif kind == "small":
            fate, puts = "invalid", [(1, True, members[:1])]
        elif kind == "unknown":
            fate, puts = "invalid", [(1, True, group(name, 2, "web"))]
        elif kind == "long":
            fate, puts = "oversize", [(1, True, group(name, 2, source, lengths=(3, 40)))]
        elif kind == "twice":
            puts.append((1, True, members[::-1]))
            self.extras["duplicate"] += 2
        elif kind == "surplus":
            more = group(name, 4, source, lengths=(3, 4, 5, 99), policy_version=version)
            puts = [(1, True, more)]
            self.extras["surplus"] += 2
        elif kind == "other":
            puts.append((1, True, group(name, 2, source, lengths=(3, 5), policy_version=version)))
            self.extras["conflict"] += 2
        if not lone and any(not whole for _, whole, _ in puts):
            fate = "invalid"
            self.extras["late"] += len(puts) - 1
        if fate == "fits" and version < 2:
            fate = "stale"
        self.puts += puts
        self.fates[name] = fate


class Ticking(ManualClock):
    """Time passes whenever somebody looks at it."""

    def now(self) -> float:
        self.advance(0.25)
        return super().now()


KINDS = ["whole", "lone", "pending", "small", "unknown", "long", "twice", "surplus", "other"]


@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.sampled_from(["math", "code"]), st.sampled_from([0, 2, 2, 2])), max_size=16
    ),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([None, 2.0, 5.0]),
    st.randoms(use_true_random=False),
)
def test_every_group_is_trained_dropped_under_a_name_or_left_over(
    kinds: list[tuple[str, str, int]], epochs: int, bounded: bool, timeout: float | None, rng: random.Random
) -> None:
    timeout = timeout if bounded else None  # dropping incomplete groups needs a staleness bound
    story, store = Story(), memory(Ticking())
    for g, (kind, source, version) in enumerate(kinds):
        story.add(f"g{g}", kind, source, version if bounded else 2, bounded)
    rng.shuffle(story.puts)
    hands = [store.writer(f"w{i}") for i in range(3)]
    for writer, whole, members in story.puts:
        _ = hands[writer].put_group(members) if whole else hands[writer].put(members[0])
    store.seal()
    # version 0 is too old from the third train batch on, version 2 hardly later
    made = sampler(
        store,
        train_batch_size=2,
        mini_batch_size=1,
        group_size=2,
        quotas={"source": {"math": 1, "code": (0, 1)} if bounded else {"math": (0, 2), "code": (0, 2)}},
        max_staleness=kd.Staleness(2 * epochs, "optimizer_step") if bounded else None,
        groups=kd.GroupPolicy(
            "wait" if timeout is None else "drop", timeout, invalid="drop", oversize="drop", max_tokens=35
        ),
        epochs=epochs,
    )
    steps, _ = rest_of(made)
    trained = Counter(ids[0].split("/")[0] for *_, groups in steps for ids in groups)
    assert set(trained.values()) <= {epochs}, "each as often as there are passes, nothing twice in one"
    dropped = made.dropped()
    ended = {reason: n for reason, n in dropped.items() if reason not in EXTRAS}
    assert len(trained) + sum(ended.values()) + made.left_over() == len(kinds)
    fates = Counter(story.fates.values())
    for reason in ("invalid", "oversize"):
        assert dropped.get(reason, 0) == fates[reason]
    pending = fates["left"]
    assert dropped.get("incomplete", 0) <= (0 if timeout is None else pending)
    if timeout == 2.0 and len(steps) > 8 * epochs:
        assert dropped.get("incomplete", 0) + dropped.get("stale", 0) >= pending
    assert set(trained) <= {n for n, fate in story.fates.items() if fate in ("fits", "stale")}
    assert {reason: n for reason, n in dropped.items() if reason in EXTRAS} == {
        r: n for r, n in story.extras.items() if n
    }
    for k in range(len(steps)):
        batch = [ids for s in steps if s[1] == k and s[2] == 0 for ids in s[-1]]
        if bounded and len(batch) == 2:
            sources = sorted(kinds[int(ids[0].split("/")[0][1:])][1] for ids in batch)
            assert sources == ["code", "math"]
    assert [s[0] for s in steps] == sorted({s[0] for s in steps})
    assert all(s[0] == s[1] * 2 * epochs + s[2] * 2 + s[3] for s in steps)


def test_staleness_drops_exactly_what_is_too_old_when_its_turn_comes() -> None:
    store = memory()
    writer = store.writer("w")
    for g, version in enumerate([0, 0, 0, 0, 1, 2, 3, 4]):
        writer.put_group(group(f"g{g}", 2, policy_version=version))
    store.seal()
    made = sampler(store, train_batch_size=2, mini_batch_size=1, group_size=2, max_staleness=0)
    steps, _ = rest_of(made)
    # batch 0: a = 0 for all; batch 1 is at step 2: versions 0 and 1 are too old; batch 2 is at step 4
    assert [s[-1][0][0] for s in steps] == ["g0/0", "g1/0", "g5/0", "g6/0", "g7/0"]
    assert made.dropped() == {"stale": 3} and made.left_over() == 0


def test_a_stream_that_ends_inside_a_train_batch() -> None:
    store = fill(memory(), 8 + 5)
    made = sampler(store, epochs=2)
    steps, states = rest_of(made)
    assert [s[0] for s in steps] == [*range(8), 8, 9, 12, 13]
    assert [s[4] for s in steps] == [*[False] * 7, True, *[False] * 4]
    first, second = ([ids[0] for s in steps[a:b] for ids in s[-1]] for a, b in ((8, 10), (10, 12)))
    assert sorted(first) == sorted(second) and len(set(first)) == 4
    assert made.left_over() == 1
    over = sampler(store, epochs=2)
    over.reset(states[-1])
    assert rest_of(over) == ([], []) and over.left_over() == 1
