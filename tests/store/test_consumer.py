"""Who may delete from a store, and that floors go before files, whatever breaks in between."""

from __future__ import annotations

import errno
import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from makers import trajectory
from places import Watched, moments, timeless, watched

import knit_data as kd
from knit_data.errors import ConsumerConflict, CorruptData, Unreachable
from knit_data.store.catalogue import RESERVE
from knit_data.store.consumer import Consumer
from knit_data.store.memory import Crash, Fault, ManualClock

KEY = "registers/consumer"


def filled(segments: int = 6) -> tuple[kd.TrajectoryStore, ManualClock]:
    """Writers 0 and 1, w0 and w1, with so many segments each."""
    store, clock = timeless()
    for w in range(2):
        with store.writer(f"w{w}") as writer:
            for i in range(segments):
                writer.put(trajectory(f"{w}/{i}"))
    return store, clock


def left(store: kd.TrajectoryStore, writer: int, count: int = 6) -> list[int]:
    there = [store.exists([store.segment_key(f"w{writer}", n)])[0] for n in range(count)]
    return [n for n, yes in enumerate(there) if yes]


def again(store: kd.TrajectoryStore) -> kd.TrajectoryStore:
    return kd.TrajectoryStore(store.url)


class Meanwhile(Watched):
    """While somebody waits, something happens."""

    def __init__(self, store: kd.TrajectoryStore, happens: Callable[[], Any]) -> None:
        super().__init__(store.backend, happens=happens)
        store.backend = self  # type: ignore[assignment]

    def wait(self, keys: list[str], timeout: float) -> list[bool]:
        found = self.inner.wait(keys, timeout)
        self._happen()
        return found


class Slow(Watched):
    """Each delete takes so many seconds."""

    def __init__(self, store: kd.TrajectoryStore, clock: ManualClock, seconds: float) -> None:
        super().__init__(store.backend)
        self.clock, self.seconds = clock, seconds
        store.backend = self  # type: ignore[assignment]

    def delete(self, keys: list[str]) -> None:
        self.calls.append(("delete", (keys,)))
        self.inner.delete(keys)
        self.clock.advance(self.seconds)


class Stalled(Watched):
    """Before a put of this key arrives, something happens, once."""

    def __init__(self, store: kd.TrajectoryStore, key: str, happens: Callable[[], Any]) -> None:
        super().__init__(store.backend, happens=happens)
        self.key = key
        store.backend = self  # type: ignore[assignment]

    def put(self, key: str, value: bytes) -> None:
        if key == self.key:
            self.key = ""
            self._happen()
        self.inner.put(key, value)


# -- who --------------------------------------------------------------------------------------------------------------


def test_the_first_consumer_and_one_after_a_clean_end_wait_for_nothing() -> None:
    store, clock = filled()
    before = clock.now()
    for floor in (2, 3):
        consumer = Consumer(again(store))
        consumer.claim()
        consumer.reclaim({0: floor})
        consumer.release()
        assert left(store, 0) == list(range(floor, 6))
    assert clock.now() == before


def test_one_that_died_is_watched_for_four_seconds_and_finds_out_before_it_deletes() -> None:
    store, clock = filled()
    old, new = Consumer(store), Consumer(again(store))
    old.reclaim({0: 1})
    before = clock.now()
    new.claim()
    assert clock.now() - before == 4.0
    for call in (lambda: old.reclaim({0: 4, 1: 4}), lambda: old.reclaim({0: 4}), old.beat):
        clock.advance(1.0)
        with pytest.raises(ConsumerConflict, match="another trainer that reclaims took over"):
            call()
    assert (store.floor(0), store.floor(1)) == (1, 0)
    assert (left(store, 0), left(store, 1)) == ([1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    old.release()  # it is the other's now
    new.reclaim({0: 2})
    assert left(store, 0) == [2, 3, 4, 5]


def test_a_live_one_refuses_the_newcomer_and_goes_on() -> None:
    store, _ = filled()
    old = Consumer(again(store))
    old.claim()
    Meanwhile(store, old.beat)
    for _ in range(2):
        with pytest.raises(ConsumerConflict, match=r"reclaims lives; one may: close its loader.*reclaim='never'"):
            Consumer(store).reclaim({0: 3})
    assert store.floor(0) == 0
    old.reclaim({0: 2})
    assert left(store, 0) == [2, 3, 4, 5]


def test_one_that_closes_while_it_is_watched_gives_way_at_once() -> None:
    store, clock = filled()
    old, new = Consumer(again(store)), Consumer(store)
    old.reclaim({0: 2})
    Meanwhile(store, old.release)
    before = clock.now()
    new.claim()
    assert clock.now() - before == 0.5
    deletes = watched(store)
    new.reclaim({0: 4})
    assert [keys for name, (keys, *_) in deletes.calls if name == "delete"] == [
        [store.segment_key("w0", 2), store.segment_key("w0", 3)]
    ]


def test_it_speaks_twice_a_second_however_often_it_is_asked() -> None:
    store, clock = filled()
    consumer = Consumer(store)
    consumer.beat()
    assert store.backend.get(KEY) is None  # nothing was claimed
    consumer.claim()
    backend = watched(store)
    for _ in range(100):
        clock.advance(0.125)
        consumer.beat()
    assert sum(name == "put" for name, _ in backend.calls) == 25


def test_a_beat_that_the_storage_does_not_take_is_made_up_for() -> None:
    store, clock = filled()
    consumer = Consumer(store)
    consumer.claim()
    before = store.backend.get(KEY)
    store.backend.faults.append(Fault("put", KEY, error=Unreachable("down")))  # type: ignore[attr-defined]
    clock.advance(1.0)
    consumer.beat()
    assert store.backend.get(KEY) == before
    clock.advance(1.0)
    consumer.beat()
    assert store.backend.get(KEY) != before


@pytest.mark.parametrize("raw", [b"[]", b"{}", b"\xff", b'{"session": "s", "deleted": {"0": -1}}'])
def test_a_damaged_register_is_named(raw: bytes) -> None:
    store, _ = filled()
    store.backend.put(KEY, raw)
    with pytest.raises(CorruptData, match="registers/consumer is damaged"):
        Consumer(store).claim()


# -- how ---------------------------------------------------------------------------------------------------------------


def test_one_delete_a_writer_and_no_floor_is_lowered() -> None:
    store, _ = filled()
    consumer, backend = Consumer(store), watched(store)
    consumer.reclaim({0: 4, 1: 2})
    assert [len(args[0]) for name, args in backend.calls if name == "delete"] == [4, 2]
    backend.calls.clear()
    consumer.reclaim({0: 3, 1: 2})
    assert not backend.calls
    assert (store.floor(0), store.floor(1)) == (4, 2)


def deletes(backend: Watched) -> list[int]:
    return [len(args[0]) for name, args in backend.calls if name == "delete"]


def test_many_segments_go_in_deletes_of_256_and_one_look_at_who_reclaims() -> None:
    store, _ = filled(1)
    consumer, backend = Consumer(store), watched(store)
    assert consumer.reclaim({0: 600})
    assert deletes(backend) == [256, 256, 88]
    assert sum((name, *args[:1]) == ("get", KEY) for name, args in backend.calls) == 2  # to claim, and to say what went


def test_a_slow_storage_is_left_in_time_for_a_beat_and_a_read() -> None:
    store, clock = filled(1)
    consumer, backend = Consumer(store), Slow(store, clock, 0.2)
    calls = list(iter(lambda: consumer.reclaim({0: 1100, 1: 1}), True))
    assert calls == [False] * 2
    assert deletes(backend) == [256, 256, 256, 256, 76, 1]


def test_a_failure_is_tried_again_half_a_second_later_or_when_asked() -> None:
    store, clock = filled()
    consumer = Consumer(store)
    fault = Fault("put", "registers/floor*", times=2, error=Unreachable("down"))
    store.backend.faults.append(fault)  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="could not be deleted"):
        assert not consumer.reclaim({0: 2})
    clock.advance(0.25)
    assert not consumer.reclaim({0: 2})
    assert (fault.seen, left(store, 0)) == (1, list(range(6)))
    clock.advance(0.25)
    assert not consumer.reclaim({0: 2})
    assert fault.seen == 2
    consumer.retry()
    assert consumer.reclaim({0: 2})
    assert (store.floor(0), left(store, 0)) == (2, [2, 3, 4, 5])


def test_a_floor_that_a_stale_consumer_lowers_counts_for_nothing() -> None:
    """It stalls in its put for so long that another takes over, and takes note only afterwards."""
    store, clock = filled()
    old, new = Consumer(store), Consumer(again(store))
    old.claim()
    Stalled(store, "registers/floor.0", lambda: (clock.advance(5.0), new.claim(), new.reclaim({0: 6})))
    assert not old.reclaim({0: 2, 1: 3})  # its turn is long over
    with pytest.raises(ConsumerConflict, match="took over"):
        old.reclaim({0: 2, 1: 3})
    assert store.register("floor.0") == 2
    assert (store.floor(0), store.floor(1), left(store, 1)) == (6, 0, list(range(6)))
    with again(store).writer("w0") as writer:
        assert writer.put(trajectory("new")).address[:2] == (0, 6)
    assert next(iter(kd.TrajectoryStream(again(store)).poll(0.0)))[0].address[:2] == (0, 6)
    new.reclaim({0: 7})
    assert store.register("floor.0") == 7


def test_one_that_was_silent_for_long_looks_before_it_deletes() -> None:
    store, clock = filled()
    old, new = Consumer(store), Consumer(again(store))
    old.claim()
    clock.advance(2.5)
    backend = watched(store)
    assert old.reclaim({0: 1})
    names = [(name, args[0] if name != "delete" else "") for name, args in backend.calls]
    assert names.index(("put", KEY)) < names.index(("put", "registers/floor.0"))
    Stalled(store, "registers/floor.1", lambda: new.claim())
    assert not old.reclaim({1: 3})
    with pytest.raises(ConsumerConflict, match="took over"):
        old.reclaim({1: 3})
    assert left(store, 1) == list(range(6))


def test_a_consumer_that_released_claims_no_more() -> None:
    store, _ = filled()
    consumer = Consumer(store)
    consumer.claim()
    consumer.release()
    assert consumer.reclaim({0: 3})
    consumer.claim()
    consumer.beat()
    assert (store.consumer()[0], store.floor(0), consumer.lives()) == (None, 0, False)


def test_a_crash_anywhere_deletes_nothing_needed_and_the_next_one_leaves_nothing_behind() -> None:
    def crash() -> None:
        raise Crash("here")

    def run(at: int, when: str) -> bool:
        store, clock = filled()
        backend = Watched(store.backend, at, when, crash)
        dying = again(store)
        dying.backend = backend  # type: ignore[assignment]
        consumer = Consumer(dying)
        try:
            consumer.reclaim({0: 2, 1: 1})
            clock.advance(1.0)
            consumer.beat()
            consumer.reclaim({0: 3, 1: 4})
            consumer.release()
        except Crash:
            pass
        for w, most in ((0, 3), (1, 4)):
            floor = store.floor(w)
            assert floor <= most
            assert set(range(floor, 6)) <= set(left(store, w))
        Consumer(again(store)).reclaim({0: 3, 1: 4})
        assert (left(store, 0), left(store, 1)) == ([3, 4, 5], [4, 5])
        return backend.struck

    assert len(list(moments(run))) > 30


@pytest.mark.parametrize(("op", "key"), [("delete", "segments/*"), ("put", "registers/floor*"), ("get", "writers/*")])
def test_where_the_storage_fails_training_goes_on_and_the_next_reclaim_mends_it(op: Any, key: str) -> None:
    store, clock = filled()
    consumer = Consumer(again(store))  # which has read no claims
    store.backend.faults.append(Fault(op, key, after=1, times=2, error=Unreachable("down")))  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="consumed segments could not be deleted.*down.*tries again") as told:
        for _ in range(2):
            assert not consumer.reclaim({0: 3, 1: 3})
            clock.advance(0.5)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert consumer.reclaim({0: 4, 1: 3})
    assert (left(store, 0), left(store, 1)) == ([4, 5], [3, 4, 5])


def test_what_it_deleted_is_in_the_register() -> None:
    store, _ = filled()
    consumer = Consumer(store)
    consumer.reclaim({0: 4, 1: 2})
    consumer.release()
    said = json.loads(store.backend.get(KEY) or b"")
    assert said["session"] is None
    assert said["deleted"] == {"0": 4, "1": 2}


# -- a full disk ------------------------------------------------------------------------------------------------------


class Full(Watched):
    """A disk on which only what was reserved is free; as soon as it is, if another is ``quick`` it is full again."""

    def __init__(self, store: kd.TrajectoryStore, *, quick: bool = False) -> None:
        super().__init__(store.backend)
        self.quick = quick
        store.backend = self  # type: ignore[assignment]

    def put(self, key: str, value: bytes) -> None:
        if self.quick or self.inner.get(RESERVE) is not None:
            raise Unreachable(f"could not put {key}") from OSError(errno.ENOSPC, "No space left on device")
        self.inner.put(key, value)


def test_a_consumer_frees_a_full_disk_from_the_room_that_the_store_keeps_for_it() -> None:
    store, _ = filled()
    reserved = store.backend.get(RESERVE)
    assert reserved is not None and len(reserved) == 64 * 1024
    disk = Full(store)
    consumer = Consumer(store)
    consumer.claim()
    assert disk.inner.get(RESERVE) is None
    assert consumer.reclaim({0: 4}) and left(store, 0) == [4, 5]
    assert len(disk.inner.get(RESERVE)) == 64 * 1024  # for the next time
    consumer.release()
    assert store.consumer() == (None, {0: 4})


def test_where_others_take_that_room_the_claim_says_what_to_do() -> None:
    store, _ = filled()
    Full(store, quick=True)
    with pytest.raises(Unreachable, match=r"could not put registers/consumer.*needs \d+ bytes.*start it again"):
        Consumer(store).claim()
    assert left(store, 0) == [0, 1, 2, 3, 4, 5]


def test_the_room_is_kept_where_the_storage_fails_for_another_reason() -> None:
    store, _ = filled()
    store.backend.faults.append(Fault("put", KEY, error=Unreachable("down")))
    with pytest.raises(Unreachable, match=r"^down$"):
        Consumer(store).claim()
    assert store.backend.get(RESERVE) is not None
