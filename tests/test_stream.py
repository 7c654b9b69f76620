"""The stream: a node by contract, and a tail that misses nothing and asks little."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from contracts import HANG, Fresh, NodeContract, running
from makers import group, trajectory
from places import Place, Sleeper, Watched, moments, reclaim, timeless, watched

import knit_data as kd
from knit_data.errors import CorruptData, InvalidArgument, KeyMissing, StateError


def filled(store: kd.TrajectoryStore, writers: int = 2, segments: int = 3, seal: bool = False) -> list[str]:
    """Groups of one to three, over writers in turn; the ids in any order that keeps each writer's."""
    handles = [store.writer(f"w{w}") for w in range(writers)]
    ids = []
    for s in range(segments):
        for w, writer in enumerate(handles):
            ids += [info.id for info in writer.put_group(group(f"{w}-{s}", 1 + (w + s) % 3))]
    if seal:
        store.seal()
    return ids


# -- the node contract -------------------------------------------------------------------------------------------------


class TestNode(NodeContract):
    @pytest.fixture(params=["follow-sealed", "snapshot", "snapshot-sealed"])
    def source(self, request: pytest.FixtureRequest, place: Place) -> tuple[kd.TrajectoryStore, bool]:
        store = place.open()
        filled(store, seal=request.param.endswith("sealed"))
        return store, request.param.startswith("follow")

    @pytest.fixture
    def backend(self, source: tuple[kd.TrajectoryStore, bool]) -> Watched:
        return watched(source[0])

    @pytest.fixture
    def fresh(self, source: tuple[kd.TrajectoryStore, bool], backend: Watched) -> Fresh:
        assert source[0].backend is backend
        return lambda: kd.TrajectoryStream(source[0], follow=source[1])

    @pytest.fixture
    def calls(self, backend: Watched) -> Callable[[], int]:
        return lambda: len(backend.calls)

    def describe(self, item: kd.TrajectoryInfo) -> Any:
        return item.id, item.address


@pytest.mark.parametrize(("arguments", "text"), [(("x",), "found str"), ((None, True, ""), "found NoneType")])
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        kd.TrajectoryStream(*arguments)
    for consumer in ("", None):
        with pytest.raises(InvalidArgument, match="consumer"):
            kd.TrajectoryStream(kd.TrajectoryStore("memory://"), consumer=consumer)  # type: ignore[arg-type]


def test_a_state_of_another_store_is_refused(place: Place) -> None:
    filled(place.open())
    stream = kd.TrajectoryStream(place.open(), follow=False)
    next(stream)
    state = stream.state_dict()
    place.renew()
    other = kd.TrajectoryStream(place.open(), follow=False)
    with pytest.raises(StateError, match=rf"store '{state['store']}'.*reads '{other.store.id}'"):
        other.reset(state)
    for bad in ({}, {"store": other.store.id}, *({"store": other.store.id, "writers": w} for w in (3, [3], [[0, 1]]))):
        with pytest.raises(StateError):
            other.reset(bad)


# -- what there is, and what comes -------------------------------------------------------------------------------------


def test_a_snapshot_ends_at_what_was_there_when_reading_began(place: Place) -> None:
    store = place.open()
    ids = filled(store)
    stream = kd.TrajectoryStream(place.open(), follow=False)
    got = [next(stream).id]
    store.writer("w0").put(trajectory("late"))
    store.writer("w9").put(trajectory("later"))
    got += [info.id for info in stream]
    assert sorted(got) == sorted(ids)
    stream.reset()
    assert sorted(info.id for info in stream) == sorted([*ids, "late", "later"])


def test_every_writer_keeps_its_order(place: Place) -> None:
    ids = filled(place.open(), writers=5, segments=40, seal=True)
    for follow in (True, False):
        got = [info.id for info in kd.TrajectoryStream(place.open(), follow=follow)]
        for w in range(5):
            assert [x for x in got if x.startswith(f"{w}-")] == [x for x in ids if x.startswith(f"{w}-")]
        assert len(got) == len(ids)


def test_forty_writers_are_discovered(place: Place) -> None:
    ids = filled(place.open(), writers=40, segments=1)
    stream = kd.TrajectoryStream(place.open())
    assert sorted(next(stream).id for _ in ids) == sorted(ids)
    assert sorted(info.id for info in kd.TrajectoryStream(place.open(), follow=False)) == sorted(ids)


def test_late_writers_and_late_segments_are_waited_for(place: Place) -> None:
    store = place.open()
    stream = kd.TrajectoryStream(store)
    sleeper = Sleeper(store)
    got: list[str] = []

    def produce() -> None:
        other = place.open()
        for i in range(12):
            assert sleeper.asleep.wait(HANG)
            other.writer(f"w{i % 5}").put(trajectory(f"t{i}"))
            while len(got) <= i:
                other.exists(["never"], 0.01)
            sleeper.asleep.clear()
        assert sleeper.asleep.wait(HANG)
        other.seal()

    with running(produce):
        for info in stream:
            got.append(info.id)
    assert got == [f"t{i}" for i in range(12)]
    assert stream.ended and stream.finite


def test_a_store_sealed_at_any_moment_of_reading_is_read_to_its_end(place: Place) -> None:
    def run(at: int, when: str) -> bool:
        place.renew()
        ids = filled(place.open())
        store = place.open()

        def more() -> None:
            ids.append(place.open().writer("new").put(trajectory("new")).id)
            place.open().seal()

        watched(store, at, when, more)
        stream = kd.TrajectoryStream(store)
        got: list[str] = []
        while not stream.ended:  # every poll asks something, so the seal comes
            got += [info.id for table in stream.poll(0.0) for info in table.infos()]
        assert sorted(got) == sorted(ids)
        return at < 30

    assert len(list(moments(run))) == 60


# -- silence -----------------------------------------------------------------------------------------------------------


def test_a_silent_writer_is_looked_at_ever_more_slowly() -> None:
    store, clock = timeless()
    writer = store.writer("w")
    backend = watched(store)
    stream = kd.TrajectoryStream(store)
    key = store.segment_key("w", 0)

    def looks(silence: float, seconds: int) -> list[float]:
        """The times at which the stream looked, within so many seconds after so much more silence."""
        clock.advance(silence)
        times = []
        for _ in range(seconds):
            before = backend.looks(key)
            assert stream.poll(1.0) == []
            times += [clock.now()] * (backend.looks(key) - before)
        return times

    first = looks(0.0, 10)
    assert len(first) > 10
    later = looks(1000.0, 60)
    assert 5 <= len(later) <= 7
    slowest = looks(100_000.0, 150)
    assert len(slowest) == 6 and all(29 <= b - a <= 32 for a, b in itertools.pairwise(slowest))
    writer.put(trajectory("a"))
    asked = clock.now()
    assert [len(t) for t in stream.poll(100.0)] == [1] and clock.now() - asked <= 30.1
    writer.put(trajectory("b"))
    asked = clock.now()
    assert [len(t) for t in stream.poll(100.0)] == [1] and clock.now() - asked <= 0.1


def test_a_silent_writer_hides_no_other() -> None:
    store, clock = timeless()
    store.writer("silent")
    stream = kd.TrajectoryStream(store)
    assert stream.poll(5000.0) == []
    asked = clock.now()
    store.writer("new").put(trajectory("a"))
    assert [len(t) for t in stream.poll(100.0)] == [1] and clock.now() - asked <= 0.1
    store.seal()
    assert stream.poll(100.0) == [] and stream.ended and clock.now() - asked <= 0.2


def test_a_poll_takes_its_time_and_no_more() -> None:
    store, clock = timeless()
    stream = kd.TrajectoryStream(store)
    for timeout in (0.0, 0.01, 3.0, 77.5):
        asked = clock.now()
        assert stream.poll(timeout) == []
        assert timeout <= clock.now() - asked <= timeout + 1e-6


# -- reclaimed segments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("follow", [True, False])
def test_a_fresh_stream_starts_at_the_floor(place: Place, follow: bool) -> None:
    ids = filled(place.open(), writers=1, segments=5, seal=True)
    reclaim(place.open(), "w0", 0, 2)
    stream = kd.TrajectoryStream(place.open(), follow=follow)
    assert [info.id for info in stream] == [x for x in ids if int(x[2]) >= 2]
    assert stream.firsts() == {0: 2}


def test_a_state_below_the_floor_goes_on_at_the_floor(place: Place) -> None:
    ids = filled(place.open(), writers=1, segments=5, seal=True)
    stream = kd.TrajectoryStream(place.open())
    next(stream)
    state = stream.state_dict()
    reclaim(place.open(), "w0", 0, 3)
    again = kd.TrajectoryStream(place.open())
    again.reset(state)
    assert [info.id for info in again] == [x for x in ids if int(x[2]) >= 3]


@pytest.mark.parametrize("mode", ["sealed", "snapshot"])
def test_what_is_reclaimed_at_any_moment_of_reading_is_skipped(place: Place, mode: str) -> None:
    def run(at: int, when: str) -> bool:
        place.renew()
        ids = filled(place.open(), writers=2, segments=6, seal=mode == "sealed")
        store = place.open()
        backend = watched(store, at, when, lambda: reclaim(place.open(), "w0", 0, 4))
        got = [info.id for info in kd.TrajectoryStream(store, follow=mode == "sealed")]
        assert len(set(got)) == len(got)
        assert set(ids) - set(got) <= {x for x in ids if x[0] == "0" and int(x[2]) < 4}
        return backend.struck

    assert len(list(moments(run))) > 20


def test_a_slow_reader_of_an_open_store_gets_over_the_gap() -> None:
    store, _ = timeless()
    writer = store.writer("w")
    writer.put(trajectory("t0"))
    stream = kd.TrajectoryStream(store)
    assert [t[0].id for t in stream.poll(0.0)] == ["t0"]
    for i in range(1, 4):
        writer.put(trajectory(f"t{i}"))
    reclaim(store, "w", 0, 4)
    assert stream.poll(5.0) == []
    writer.put(trajectory("t4"))
    assert [t[0].id for t in stream.poll(5.0)] == ["t4"]
    assert stream.firsts() == {0: 4}


def test_a_segment_that_is_lost_without_being_reclaimed_is_named(place: Place) -> None:
    store = place.open()
    filled(store, writers=1, segments=4, seal=True)
    store.backend.delete([store.segment_key("w0", 2)])
    stream = kd.TrajectoryStream(place.open())
    got = [next(stream).address[1] for _ in range(3)]
    assert got == [0, 1, 1]
    for _ in range(2):
        with pytest.raises(KeyMissing, match=r"segments/w0/00000002\.safetensors is missing.*made 4 segments"):
            next(stream)


def test_an_error_loses_nothing_of_other_writers(place: Place) -> None:
    store = place.open()
    ids = filled(store, writers=3, segments=3, seal=True)
    key = store.segment_key("w1", 1)
    good = store.backend.get(key)
    assert good is not None
    store.backend.put(key, b"?" + good[1:])
    stream = kd.TrajectoryStream(place.open())
    got: list[str] = []
    with pytest.raises(CorruptData, match=key):
        for info in stream:
            got.append(info.id)
    with pytest.raises(CorruptData, match=key):
        for info in stream:
            got.append(info.id)
    store.backend.put(key, good)
    got += [info.id for info in stream]
    assert sorted(got) == sorted(ids)


# -- stopping ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def waiting(place: Place) -> Iterator[tuple[kd.TrajectoryStream, Sleeper]]:
    store = place.open()
    store.writer("w").put(trajectory("a"))
    yield kd.TrajectoryStream(store), Sleeper(store)


def test_stop_ends_a_blocked_next(waiting: tuple[kd.TrajectoryStream, Sleeper]) -> None:
    stream, sleeper = waiting
    got: list[str] = []

    def consume() -> None:
        got.extend(info.id for info in stream)

    with running(consume):
        assert sleeper.asleep.wait(HANG)
        stream.stop()
    assert got == ["a"]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(stream)
    stream.reset()
    assert next(stream).id == "a"


def test_stop_ends_a_blocked_poll_and_later_ones_at_once(waiting: tuple[kd.TrajectoryStream, Sleeper]) -> None:
    stream, sleeper = waiting
    assert [len(table) for table in stream.poll(HANG)] == [1]
    found: list[Any] = []

    def poll() -> None:
        found.append(stream.poll(HANG * 5))

    with running(poll):
        assert sleeper.asleep.wait(HANG)
        stream.stop()
    assert found == [[]]
    assert stream.poll(HANG * 5) == [] and not stream.ended


@pytest.mark.parametrize("segments", [1, 2, 3, 31, 32, 33, 70])
def test_catching_up_takes_few_waits_and_each_segment_once(segments: int) -> None:
    store, _ = timeless()
    with store.writer("w") as writer:
        for i in range(segments):
            writer.put(trajectory(f"{i}"))
    backend = watched(store)
    stream = kd.TrajectoryStream(store, follow=True)
    got: list[str] = []
    while tables := stream.poll(0.0):
        got += [table[0].id for table in tables]
    assert got == [f"{i}" for i in range(segments)]
    waits = sum(name == "wait" for name, _ in backend.calls)
    assert waits <= 8 * (segments // 32 + 2), "twice as many are looked up each time, up to 32"
    looks = [backend.looks(store.segment_key("w", n)) for n in range(2 * segments + 2)]
    assert max(looks) <= 3 and sum(looks) <= 2 * segments + 8
