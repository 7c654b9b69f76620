"""Puts: whole or not at all, once however often repeated, through crashes, lost replies and rivals."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import HANG, running
from makers import group, trajectory
from places import Place, Sleeper, Watched, moments, reclaim, rows, timeless, watched

import knit_data as kd
from knit_data.errors import (
    CorruptData,
    InvalidArgument,
    InvalidTrajectory,
    StoreClosed,
    Unreachable,
    WaitTimeout,
    WriterConflict,
)
from knit_data.store.memory import Crash

G1, G2 = group("one", 3), group("two", 2)


def fail(error: BaseException) -> Callable[[], None]:
    def happens() -> None:
        raise error

    return happens


def insist(put: Callable[[], Any]) -> Any:
    """As a worker does that does not know whether its put arrived."""
    try:
        return put()
    except Unreachable:
        return put()


def segments(store: kd.TrajectoryStore, name: str = "w") -> list[bool]:
    return store.exists([store.segment_key(name, n) for n in range(8)])


# -- visibility and repeats --------------------------------------------------------------------------------------------


def test_a_group_appears_as_a_whole(place: Place) -> None:
    def run(at: int, when: str) -> bool:
        place.renew()
        store = place.open()
        seen: list[list[str]] = []
        backend = watched(store, at, when, lambda: seen.append(place.ids()))
        store.writer("w").put_group(G1)
        assert all(ids in ([], ["one/0", "one/1", "one/2"]) for ids in seen)
        return backend.struck

    assert len(list(moments(run))) > 8


def test_infos_say_what_was_put(place: Place) -> None:
    store = place.open()
    with store.writer("w") as writer:
        infos = writer.put_group(G1)
        alone = writer.put(trajectory("alone", "solo", 9, policy_version=4, mean_policy_version=4.5))
    assert [i.id for i in infos] == [t.id for t in G1]
    assert [i.address for i in (*infos, alone)] == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0)]
    assert [int(i.table.columns["group_rows"][i.row]) for i in (*infos, alone)] == [3, 3, 3, 0]
    assert (alone.group, alone.policy_version, alone.mean_policy_version, alone.n_tokens) == ("solo", 4, 4.5, 9)
    assert (alone.loss_tokens, alone.patches, alone.attributes) == (8, 0, {"source": "math"})
    assert alone.values == trajectory("alone").values
    assert "alone" in repr(alone) and "solo" in repr(alone)
    assert rows(list(kd.TrajectoryStream(store, follow=False))) == rows([*infos, alone])


def test_a_repeated_put_is_a_no_op_with_equal_infos(place: Place) -> None:
    writer = place.open().writer("w")
    first, alone = rows(writer.put_group(G1)), rows([writer.put(trajectory("a"))])
    for again in (writer, place.open().writer("w")):
        assert rows(again.put_group(G1)) == first
        assert rows(again.put_group(G1[::-1])) == first[::-1]
        assert rows([again.put(trajectory("a"))]) == alone
    assert segments(place.open()) == [True, True] + [False] * 6
    writer.put_group(G2)
    assert place.ids() == ["one/0", "one/1", "one/2", "a", "two/0", "two/1"]


def test_other_content_under_a_known_id_is_refused(place: Place) -> None:
    place.open().writer("w").put_group(G1)
    changed = [
        dataclasses.replace(G1[1], policy_version=1),
        dataclasses.replace(G1[1], values={"reward": 99.0}),
        dataclasses.replace(G1[1], tokens={k: v + 1 for k, v in G1[1].tokens.items()}),
        dataclasses.replace(G1[1], tokens={**G1[1].tokens, "loss_mask": torch.zeros(len(G1[1].tokens["input_ids"]))}),
    ]
    for writer in (place.open().writer("w"), place.open().writer("w")):
        for other in changed:
            with pytest.raises(
                InvalidTrajectory, match=r"'one/[01]'.*other content in segments/w/00000000\.safetensors"
            ):
                writer.put_group([dataclasses.replace(G1[0]), other, G1[2]])
        with pytest.raises(InvalidTrajectory, match=r"'one/0'.*other content"):
            writer.put_group([dataclasses.replace(t, group="other") for t in G1])
    assert place.ids() == ["one/0", "one/1", "one/2"]


def test_a_put_that_is_partly_known_is_refused(place: Place) -> None:
    place.open().writer("w").put_group(G1)
    for writer in (place.open().writer("w"), place.open().writer("w")):
        with pytest.raises(
            InvalidTrajectory, match="'one/0' was already written in segment 0, 'one/9' of the same put"
        ):
            writer.put_group([G1[0], trajectory("one/9", "one")])
    assert place.ids() == ["one/0", "one/1", "one/2"]


def test_a_repeat_after_reclaiming_is_still_a_no_op(place: Place) -> None:
    store = place.open()
    writer = store.writer("w")
    first = rows(writer.put_group(G1))
    reclaim(store, "w", 0, 1)
    assert rows(writer.put_group(G1)) == first
    assert segments(store) == [False] * 8


# -- crashes and lost replies ------------------------------------------------------------------------------------------


def test_a_crash_anywhere_in_a_put_is_mended_by_a_restart_and_a_repeat(place: Place) -> None:
    def run(at: int, when: str) -> bool:
        place.renew()
        store = place.open()
        backend = watched(store, at, when, fail(Crash("here")))
        try:
            with store.writer("w") as writer:
                writer.put_group(G1)
                writer.put_group(G2)
        except Crash:
            pass
        with place.open().writer("w") as writer:
            infos = [*writer.put_group(G1), *writer.put_group(G2), writer.put(trajectory("more"))]
        assert rows(list(kd.TrajectoryStream(place.open(), follow=False))) == rows(infos)
        assert [i.address[:2] for i in infos] == [(0, 0)] * 3 + [(0, 1)] * 2 + [(0, 2)]
        return backend.struck

    assert len(list(moments(run))) > 20


def test_a_lost_reply_is_mended_by_a_repeat_in_the_same_process(place: Place) -> None:
    def run(at: int, when: str) -> bool:
        place.renew()
        store = place.open()
        backend = watched(store, at, when, fail(Unreachable("the reply was lost")))
        writer = insist(lambda: store.writer("w"))
        infos = [*insist(lambda: writer.put_group(G1)), *insist(lambda: writer.put_group(G2))]
        infos.append(insist(lambda: writer.put(trajectory("more"))))
        assert rows(list(kd.TrajectoryStream(place.open(), follow=False))) == rows(infos)
        assert [i.address[:2] for i in infos] == [(0, 0)] * 3 + [(0, 1)] * 2 + [(0, 2)]
        return backend.struck

    assert len(list(moments(run))) > 20


def test_a_put_that_was_given_up_does_not_harm_the_next(place: Place) -> None:
    def run(at: int, when: str) -> bool:
        place.renew()
        store = place.open()
        writer = store.writer("w")
        backend = watched(store, at, when, fail(Unreachable("no answer")))
        try:
            writer.put_group(G1)
        except Unreachable:
            pass
        second = insist(lambda: writer.put_group(G2))
        ids = place.ids()
        assert ids[-2:] == ["two/0", "two/1"] and ids[:-2] in ([], ["one/0", "one/1", "one/2"])
        assert second[0].address[1] == (1 if len(ids) > 2 else 0)
        return backend.struck

    assert len(list(moments(run))) > 6


class Retrying(Watched):
    """A back end that tries again by itself after a lost reply, and then finds its own object."""

    def create(self, key: str, parts: Any) -> bool:
        made = self.__getattr__("create")(key, parts)
        return made and not key.startswith("segments/")


@pytest.mark.parametrize("seals", [False, True])
def test_a_create_that_meets_its_own_object_has_succeeded(place: Place, seals: bool) -> None:
    promised = set()

    def run(at: int, when: str) -> bool:
        place.renew()
        store = place.open()
        writer = store.writer("w")
        sealer = place.open()
        backend = Retrying(store.backend, at, when, sealer.seal if seals else lambda: None)
        store.backend = backend  # type: ignore[assignment]
        try:
            kept = [info.id for info in writer.put_group(G1)]
        except StoreClosed:
            kept = []
        assert place.ids() == kept
        promised.add(len(kept))
        return backend.struck

    assert len(list(moments(run))) > 6
    assert promised == ({0, 3} if seals else {3})


def test_a_create_that_meets_its_own_reclaimed_object_is_made_again(place: Place) -> None:
    store = place.open()
    writer = store.writer("w")
    writer.put(trajectory("settles", "s"))
    backend = Retrying(store.backend, 2, "after", lambda: reclaim(place.open(), "w", 0, 2))
    store.backend = backend  # type: ignore[assignment]
    assert writer.put_group(G1)[0].address == (0, 2, 0)
    assert place.ids() == ["one/0", "one/1", "one/2"]


def test_a_name_that_was_reclaimed_before_its_reply_is_not_used_again(place: Place) -> None:
    store = place.open()
    writer = store.writer("w")
    writer.put(trajectory("settles", "s"))

    def lose() -> None:
        reclaim(place.open(), "w", 0, 2)
        raise Unreachable("the trainer was faster than the reply")

    backend = watched(store, 2, "after", lose)
    with pytest.raises(Unreachable):
        writer.put_group(G1)
    assert backend.calls[2][0] == "create"
    assert writer.put_group(G2)[0].address == (0, 2, 0)
    assert place.ids() == ["two/0", "two/1"]


def test_a_restart_at_any_moment_of_reclaiming_uses_no_name_twice(place: Place) -> None:
    def run(at: int, when: str) -> bool:
        place.renew()
        writer = place.open().writer("w")
        for i in range(5):
            writer.put(trajectory(f"t{i}"))
        store = place.open()
        backend = watched(store, at, when, lambda: reclaim(place.open(), "w", 0, 5))
        again = store.writer("w")
        assert again.put(trajectory("new")).address == (0, 5, 0)
        return backend.struck

    assert len(list(moments(run))) > 8


def test_a_restart_begins_at_the_floor(place: Place) -> None:
    store = place.open()
    writer = store.writer("w")
    for i in range(5):
        writer.put(trajectory(f"t{i}"))
    reclaim(store, "w", 0, 3)
    assert place.open().writer("w").put(trajectory("t3")).address == (0, 3, 0)
    reclaim(store, "w", 0, 5)
    assert place.open().writer("w").put(trajectory("t5")).address == (0, 5, 0)


def test_a_damaged_segment_stops_a_restart(place: Place) -> None:
    store = place.open()
    store.writer("w").put(trajectory("a"))
    store.backend.put(store.segment_key("w", 0), b"damaged")
    with pytest.raises(CorruptData, match="segments/w/00000000"):
        place.open().writer("w")


# -- several writers ---------------------------------------------------------------------------------------------------


def test_two_live_writers_of_one_name_are_told(place: Place) -> None:
    old, new = place.open().writer("w"), place.open().writer("w")
    kept = [i.id for i in old.put_group(G1)]
    for _ in range(2):
        with pytest.raises(WriterConflict, match=r"'w': segment 0 was written by another process.*each its own"):
            new.put_group(G2)
    kept += [old.put(trajectory("a")).id]
    newer = place.open().writer("w")
    kept += [i.id for i in newer.put_group(G2)]
    for _ in range(2):
        with pytest.raises(WriterConflict, match="segment 2"):
            old.put(trajectory("b"))
    kept += [newer.put(trajectory("b")).id]
    assert place.ids() == kept


def test_of_many_writers_of_one_name_nothing_is_lost_or_overwritten(place: Place) -> None:
    kept: list[str] = []
    barrier = threading.Barrier(4)

    def put(w: int) -> None:
        writer = place.open().writer("w")
        barrier.wait(HANG)
        for i in range(20):
            try:
                kept.append(writer.put(trajectory(f"{w}/{i}")).id)
            except WriterConflict:
                writer = place.open().writer("w")

    with running(*[lambda w=w: put(w) for w in range(4)]):
        pass
    assert sorted(place.ids()) == sorted(kept) and len(set(kept)) == len(kept) >= 20


def test_threads_share_one_writer(place: Place) -> None:
    writer = place.open().writer("w")

    def put(w: int) -> None:
        for i in range(10):
            writer.put_group(group(f"{w}/{i}", 2))
            writer.put_group(group(f"{w}/{i}", 2))

    with running(*[lambda w=w: put(w) for w in range(4)]):
        pass
    assert sorted(place.ids()) == sorted(f"{w}/{i}/{m}" for w in range(4) for i in range(10) for m in range(2))
    assert place.open().count_segments(0, {"name": "w", "first": 0}) == 40


def test_threads_claim_dense_numbers(place: Place) -> None:
    barrier = threading.Barrier(4)
    found: list[int] = []

    def claim(w: int) -> None:
        store = place.open()
        barrier.wait(HANG)
        for i in range(8):
            found.append(store.writer(f"w{w}-{i}").put(trajectory(f"{w}/{i}")).address[0])

    with running(*[lambda w=w: claim(w) for w in range(4)]):
        pass
    assert sorted(found) == list(range(32))
    assert len(place.ids()) == 32


CLAIMER = """
import json, sys
import torch, knit_data as kd
url, me = sys.argv[1:]
store = kd.TrajectoryStore(url)
store.backend.put(f"ready/{me}", b"")
while store.exists(["go"], 60.0) != [True]:
    pass
out = []
for i in range(6):
    writer = store.writer(f"w{me}-{i}")
    out.append(writer.put(kd.Trajectory(f"{me}/{i}", "g", 0, {"input_ids": torch.arange(3)})).address)
print(json.dumps(out))
"""


def test_processes_claim_dense_numbers(tmp_path: Path) -> None:
    store = kd.TrajectoryStore(str(tmp_path / "store"))
    claimers = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", CLAIMER, store.url, str(me)], stdout=subprocess.PIPE)
        for me in range(2)
    ]
    try:
        for me in range(2):
            while store.exists([f"ready/{me}"], 1.0) != [True]:
                assert claimers[me].poll() is None
        store.backend.create("go", [b""])
        found = [json.loads(claimer.communicate(timeout=HANG)[0]) for claimer in claimers]
    finally:
        for claimer in claimers:
            claimer.kill()
            claimer.wait()
            assert claimer.stdout is not None
            claimer.stdout.close()
    assert sorted(found[0] + found[1]) == [[w, 0, 0] for w in range(12)]
    assert len(list(kd.TrajectoryStream(store, follow=False))) == 12


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "-a", "_", "é", "a\n", "a..b", "x" * 101, None, 3, b"w"])
def test_a_name_unfit_for_a_folder_is_refused(name: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"writer name.*1 to 100"):
        kd.TrajectoryStore("memory://").writer(name)


@pytest.mark.parametrize("name", ["a", "0", "rollout-3", "host_7.gpu-1", "x" * 100])
def test_every_fit_name_works(place: Place, name: str) -> None:
    place.open().writer(name).put(trajectory("a"))
    assert place.ids() == ["a"]


# -- room --------------------------------------------------------------------------------------------------------------


def sized(store: kd.TrajectoryStore, name: str = "probe") -> int:
    return len(store.backend.get(store.segment_key(name, 0)) or b"")


def one_segment() -> int:
    store = kd.TrajectoryStore("memory://")
    store.writer("probe").put(trajectory("t0"))
    return sized(store)


def test_a_put_waits_for_room_and_says_so() -> None:
    store, clock = timeless()
    store.max_bytes = 2 * one_segment() + 10
    writer = store.writer("w")
    writer.put(trajectory("t0"))
    writer.put(trajectory("t1"))
    assert clock.now() == 0.0
    with pytest.raises(WaitTimeout) as raised:
        writer.put(trajectory("t2"), timeout=90.0)
    assert 90.0 <= clock.now() < 91.0
    held = 2 * one_segment()
    for text in (f"writer 'w': {held} of max_bytes={held + 10}", "after 90 s", "'g' needs", "raise max_bytes"):
        assert text in str(raised.value)
    assert segments(store) == [True, True] + [False] * 6
    assert rows([writer.put(trajectory("t0"))]) and segments(store)[2] is False, "a repeat needs no room"
    reclaim(store, "w", 0, 1)
    assert writer.put(trajectory("t2")).address == (0, 2, 0)
    with pytest.raises(WaitTimeout):
        writer.put(trajectory("t3"), timeout=0.0)
    reclaim(store, "w", 0, 3)
    for i in (3, 4):
        assert writer.put(trajectory(f"t{i}"), timeout=0.0).address == (0, i, 0)


def test_a_restarted_writer_knows_what_it_holds() -> None:
    store, _ = timeless()
    store.max_bytes = 2 * one_segment() + 10
    for i in range(2):
        store.writer("w").put(trajectory(f"t{i}"))
    with pytest.raises(WaitTimeout):
        store.writer("w").put(trajectory("t2"))
    store.writer("other").put(trajectory("t2"))
    reclaim(store, "w", 0, 2)
    assert store.writer("w").put(trajectory("t3")).address == (0, 2, 0)


def test_a_group_that_can_never_have_room_is_refused_and_settles_nothing() -> None:
    store, clock = timeless()
    store.max_bytes = one_segment() - 1
    with pytest.raises(InvalidTrajectory, match=rf"'g' of trajectory 't0' takes {one_segment()} bytes.*raise it"):
        store.writer("w").put(trajectory("t0"))
    assert store.schema is None and segments(store) == [False] * 8 and clock.now() == 0.0


@pytest.mark.parametrize("what", ["finish", "seal", "room"])
def test_a_blocked_put_wakes(place: Place, what: str) -> None:
    store = place.open(max_bytes=one_segment() + 10)
    writer = store.writer("w")
    writer.put(trajectory("t0"))
    sleeper = Sleeper(store)

    def put() -> None:
        if what == "room":
            assert writer.put(trajectory("t1"), timeout=HANG * 5).address == (0, 1, 0)
            return
        with pytest.raises(StoreClosed, match="finished by the trainer" if what == "finish" else "sealed"):
            writer.put(trajectory("t1"), timeout=HANG * 5)

    with running(put):
        assert sleeper.asleep.wait(HANG)
        other = place.open()
        if what == "room":
            reclaim(other, "w", 0, 1)
        else:
            getattr(other, what)()
    if what != "room":
        with pytest.raises(StoreClosed):
            writer.put(trajectory("t2"))
        assert place.ids() == ["t0"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("method", ["_remember", "_confirm"])
def test_a_put_that_was_interrupted_and_repeated_is_there_once(method: str, when: str) -> None:
    """Ctrl-C before or after a step that follows when the segment is made."""
    store = kd.TrajectoryStore("memory://")
    with store.writer("w") as writer:
        writer.put_group(group("a", 2))
        real = getattr(writer, method)

        def interrupted(*arguments: Any) -> None:
            setattr(writer, method, real)
            if when == "after":
                real(*arguments)
            raise KeyboardInterrupt

        setattr(writer, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.put_group(group("b", 2))
        again = writer.put_group(group("b", 2))
        writer.put_group(group("c", 2))
        assert [info.address[1] for info in again] == [1, 1]
        assert writer._held == sum(size for _, size in writer._sizes) and len(writer._sizes) == 3
    store.seal()
    assert [info.group for info in kd.TrajectoryStream(store, follow=False)] == list("aabbcc")


def test_a_store_reads_each_claim_once_however_many_writers_it_opens() -> None:
    store, _ = timeless()
    backend = watched(store)
    writers = [store.writer(f"w{i}") for i in range(40)]
    assert [w._number for w in writers] == list(range(40))
    looks = [key for name, (key, *_) in backend.calls if name == "get" and str(key).startswith("writers/")]
    assert len(looks) == 2 * 40  # before it is claimed, and after
    assert store.writer("w7")._number == 7
