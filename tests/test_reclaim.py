"""Segments go when a durable checkpoint consumed them, or at once, or never; and no run ever misses one."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import group, loader, read_through, trajectory
from places import Sleeper, Watched

import knit_data as kd
from knit_data import reclaim as reclaiming
from knit_data.collate import Collator
from knit_data.errors import Unreachable
from knit_data.store import writer as writing
from knit_data.store.memory import Crash, Fault, ManualClock, MemoryBackend

_numbers = itertools.count()
TICK = reclaiming.BEAT
SIZES = {"train_batch_size": 4, "mini_batch_size": 2, "group_size": 2}


@pytest.fixture(autouse=True)
def no_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A beat from another thread would fall anywhere between the calls of a test that counts them."""
    monkeypatch.setattr(reclaiming, "BEAT", 1e6)


class Job:
    """A store in memory whose waits take no time, and its trainer without a thread; rollouts are put by hand."""

    def __init__(self, reclaim: str = "commit", **changes: Any) -> None:
        self.name, self.reclaim = f"reclaim-{next(_numbers)}", reclaim
        self.clock = ManualClock()
        self.backend = MemoryBackend.named(self.name, clock=self.clock)
        self.sizes = {**SIZES, **changes}

    def open(self, reclaim: str | None = None, **options: Any) -> kd.TrajectoryStore:
        return kd.TrajectoryStore(f"memory://{self.name}", reclaim or self.reclaim, **options)

    def loader(self, reclaim: str | None = None) -> kd.TrajectoryLoader:
        return loader(self.open(reclaim), options={"prefetch": 0}, timeout=1.0, **self.sizes)

    def put(self, *names: str, writer: str = "w0") -> None:
        with self.open().writer(writer) as w:
            for name in names:
                w.put_group(group(name, 2))

    def segments(self, writer: str = "w0") -> list[int]:
        return sorted(
            int(k.split("/")[2][:8]) for k in self.backend._space.values if k.startswith(f"segments/{writer}/")
        )

    def floor(self, writer: int = 0) -> int:
        return int(self.backend._space.values.get(f"registers/floor.{writer}", b"0"))  # no call, no fault


def names(count: int, start: int = 0) -> list[str]:
    return [f"g{i:04d}" for i in range(start, start + count)]


def step(run: kd.TrajectoryLoader) -> list[str]:
    """Train on the next mini-batch; its groups."""
    _, _, ids = read_through(next(run))
    return sorted({name.split("/")[0] for name in ids})


def die(run: kd.TrajectoryLoader) -> None:
    """As a process does: without a word to the store."""
    run._reclaiming._consumer.held = False
    run.close()


# -- the three ways ----------------------------------------------------------------------------------------------------


def test_commit_deletes_what_the_checkpoint_consumed_and_no_more() -> None:
    job = Job()
    job.put(*names(8))
    with job.loader() as run:
        step(run)
        state = run.state_dict()
        step(run)
        step(run)
        assert job.segments() == list(range(8))
        run.commit(json.loads(json.dumps(state)))
        assert (job.segments(), job.floor()) == ([2, 3, 4, 5, 6, 7], 2)
        later = run.state_dict()
        run.commit(later)
        assert (job.segments(), job.floor()) == ([6, 7], 6)
        run.commit(state)  # an older one
        assert (job.segments(), job.floor()) == ([6, 7], 6)
    with job.loader() as rest:
        rest.load_state_dict(later)
        assert step(rest) == names(2, 6)


def test_consumed_deletes_as_it_trains_and_says_what_a_rollback_cannot_have() -> None:
    job = Job("consumed")
    job.put(*names(8))
    with job.loader() as run:
        step(run)
        state = run.state_dict()
        step(run)
        assert job.segments() == [2, 3, 4, 5, 6, 7]
        step(run)  # when this is touched, the second is consumed; without a thread the next call deletes
        assert job.segments() == [2, 3, 4, 5, 6, 7]
    assert (job.segments(), job.floor()) == ([4, 5, 6, 7], 4)  # the third was not followed by another
    with job.loader() as again:
        with pytest.raises(kd.StateError) as raised:
            again.load_state_dict(state)
        assert step(again) == names(2, 4)  # nothing was changed
    assert "this state still needs segment 2 of writer 'w0', and those below 4 are reclaimed" in str(raised.value)
    assert "reclaim='consumed' deleted what was trained after this one" in str(raised.value)
    with job.loader() as fresh:
        assert step(fresh) == names(2, 4)


def test_never_deletes_nothing_and_lets_two_read() -> None:
    job = Job("never")
    job.put(*names(4))
    with job.loader() as one, job.loader() as two:
        for run in (one, two):
            assert step(run) == names(2)
            run.commit(run.state_dict())
    assert (job.segments(), job.floor()) == ([0, 1, 2, 3], 0)
    assert "registers/consumer" not in job.backend._space.values


@pytest.mark.parametrize("reclaim", ["commit", "consumed"])
def test_later_passes_keep_their_segments(reclaim: str) -> None:
    job = Job(reclaim, epochs=2)
    job.put(*names(6))
    with job.loader() as run:
        for _ in range(3):
            step(run)
            run.commit(run.state_dict())
            assert job.segments() == list(range(6))
        step(run)
        run.commit(run.state_dict())
        assert job.segments() == [4, 5]


def test_what_is_left_over_abandoned_or_dropped() -> None:
    job = Job(groups=kd.GroupPolicy(keep=lambda infos: infos[0].group != "g0001"))
    job.put(*names(6))
    with job.loader() as run:
        mini = next(run)
        next(iter(mini))
        mini.abandon()
        run.commit(run.state_dict())
        assert job.segments() == [3, 4, 5]  # g0001 went with the entry of g0000 and g0002
        step(run)
        run.commit(run.state_dict())
        assert job.segments() == [5]
        job.open().seal()
        assert list(run) == []
        run.commit(run.state_dict())
        assert run.stats["left_over"] == 1
    assert job.segments() == [5]


def test_one_unfinished_group_holds_its_segment_and_those_behind_it() -> None:
    job = Job(max_staleness=100)
    with job.open().writer("w0") as w:
        w.put(trajectory("lone/0", "lone"))
        for name in names(4):
            w.put_group(group(name, 2))
    with job.loader() as run:
        step(run)
        run.commit(run.state_dict())
        assert (job.segments(), job.floor()) == ([0, 1, 2, 3, 4], 0)
        with job.open().writer("w1") as w:
            w.put(trajectory("lone/1", "lone"))
        job.put(*names(2, 4))
        step(run)
        step(run)
        run.commit(run.state_dict())
        assert job.segments("w1") == []
    assert 0 not in job.segments()


# -- states ------------------------------------------------------------------------------------------------------------


def test_states_that_cannot_be_committed_are_refused() -> None:
    job, other = Job(), Job()
    job.put(*names(8))
    other.put(*names(8))
    with job.loader() as run, other.loader() as stranger, job.loader("never") as evaluation:
        step(run)
        step(stranger)
        for _ in range(2):
            step(evaluation)
        ahead = evaluation.state_dict()
        with pytest.raises(kd.StateError, match="belongs to store"):
            run.commit(stranger.state_dict())
        with pytest.raises(kd.StateError, match="not a state of this loader"):
            run.commit({"version": 2, "store": run.sampler.stream.store.id})
        with pytest.raises(kd.StateError, match="has consumed what is before"):
            run.commit(ahead)
        assert job.segments() == list(range(8))
        step(run)
        run.commit(run.state_dict())
        late = run.state_dict()
    with pytest.raises(kd.UsageError, match="commit after close"):
        run.commit(late)
    with job.loader() as fresh:
        with pytest.raises(kd.StateError, match=r"loader has consumed what is before.*or load the state first"):
            fresh.commit(late)
        fresh.load_state_dict(late)
        fresh.commit(late)
        assert job.segments() == [4, 5, 6, 7]
        assert step(fresh) == names(2, 4)


def test_a_commit_between_load_and_the_first_mini_batch() -> None:
    job = Job()
    job.put(*names(6))
    with job.loader() as run:
        step(run)
        state = run.state_dict()
        step(run)
        run.load_state_dict(state)
        run.commit(state)
        assert job.segments() == [2, 3, 4, 5]
        assert step(run) == names(2, 2)


def test_a_state_older_than_what_was_committed_is_named() -> None:
    job = Job()
    job.put(*names(6), writer="w0")
    with job.loader() as run:
        step(run)
        old = run.state_dict()
        step(run)
        run.commit(run.state_dict())
        with pytest.raises(kd.StateError, match=r"needs segment 2 of writer 'w0'.*a later checkpoint was committed"):
            run.load_state_dict(old)
        assert step(run) == names(2, 4)  # as if it had not been asked


def test_a_state_that_loses_its_segments_after_it_was_loaded_is_named() -> None:
    job = Job()
    job.put(*names(6))
    with job.loader() as run:
        step(run)
        old = run.state_dict()
        late = job.loader()
        late.load_state_dict(old)
        step(run)
        run.commit(run.state_dict())
    with late, pytest.raises(kd.StateError, match=r"needs segment 2 of writer 'w0'"):
        step(late)


# -- one consumer ------------------------------------------------------------------------------------------------------


def test_a_second_live_trainer_is_refused_unless_it_reclaims_nothing() -> None:
    url = f"memory://live-{next(_numbers)}"
    store = kd.TrajectoryStore(url)
    with store.writer("w0") as writer:
        for name in names(8):
            writer.put_group(group(name, 2))
    with loader(store, **SIZES) as run:  # its thread says that it lives
        step(run)
        with loader(kd.TrajectoryStore(url, reclaim="never"), **SIZES) as reader:
            assert step(reader) == names(2)
        with (
            loader(kd.TrajectoryStore(url), **SIZES) as second,
            pytest.raises(kd.ConsumerConflict, match="another trainer that reclaims lives"),
        ):
            step(second)
        assert step(run) == names(2, 2)
    with loader(kd.TrajectoryStore(url), **SIZES) as third:
        assert step(third) == names(2)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_trainer_that_is_busy_for_long_lives(monkeypatch: pytest.MonkeyPatch, prefetch: int) -> None:
    """In a read that does not end, or without a thread of its own in an optimizer step."""
    monkeypatch.setattr(reclaiming, "BEAT", 0.001)
    job = Job()
    job.put(*names(8))
    going, stuck = threading.Event(), threading.Event()
    backend = Heard(job.backend)
    store = job.open()
    store.backend = backend  # type: ignore[assignment]
    with loader(store, options={"prefetch": prefetch}, timeout=1.0, **job.sizes) as run:
        if prefetch:
            real = Collator.__call__

            def read(self: Collator, *args: Any) -> Any:
                stuck.set()
                assert going.wait(60)
                return real(self, *args)

            monkeypatch.setattr(Collator, "__call__", read)
            mini = next(run)
            assert stuck.wait(60)
        else:
            step(run)
            mini = next(run)
        for _ in range(3):
            backend.beat.clear()
            job.clock.advance(0.5)
            assert backend.beat.wait(60)
        going.set()
        assert read_through(mini)[2]
    assert not [t.name for t in threading.enumerate() if t.name == "knit-reclaiming"]


class Heard(Watched):
    """Says when a consumer gave a sign of life."""

    def __init__(self, inner: MemoryBackend) -> None:
        super().__init__(inner)
        self.beat = threading.Event()

    def put(self, key: str, value: bytes) -> None:
        self.inner.put(key, value)
        if key == "registers/consumer":
            self.beat.set()


def test_an_evaluation_and_a_loader_that_nobody_closed_leave_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def ticking() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "knit-reclaiming"]

    monkeypatch.setattr(reclaiming, "BEAT", TICK)
    job = Job()
    job.put(*names(8))
    with job.loader("never") as evaluation:
        step(evaluation)
        assert not ticking()
    run = job.loader()
    step(run)
    (thread,) = ticking()
    del run
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    assert job.open().consumer()[0] is None


def test_a_trainer_that_was_taken_for_dead_deletes_nothing_and_stops() -> None:
    job = Job()
    job.put(*names(8))
    old, new = job.loader(), job.loader()
    step(old)
    state = old.state_dict()
    step(new)
    for _ in range(2):
        with pytest.raises(kd.ConsumerConflict, match="took over"):
            old.commit(state)
    assert (job.segments(), job.floor()) == (list(range(8)), 0)
    old.close()
    step(new)
    new.commit(new.state_dict())
    assert job.segments() == [4, 5, 6, 7]
    new.close()


def test_a_thread_reclaims_between_its_reads(tmp_path: Path) -> None:
    store = kd.TrajectoryStore(tmp_path / "store")
    with store.writer("w0") as writer:
        for name in names(8):
            writer.put_group(group(name, 2))
    with loader(store, **SIZES) as run:
        step(run)
        run.commit(run.state_dict())
        step(run)
    assert store.floor(0) == 2
    assert sorted(p.name[:8] for p in (tmp_path / "store/segments/w0").iterdir()) == [f"{n:08d}" for n in range(2, 8)]


def test_a_storage_that_fails_does_not_stop_training() -> None:
    job = Job("consumed")
    job.put(*names(8))
    with job.loader() as run:
        step(run)
        step(run)
        job.backend.faults.append(Fault("delete", "segments/*", times=None, error=Unreachable("down")))
        with pytest.warns(UserWarning, match="could not be deleted"):
            step(run)
        assert (job.segments(), job.floor()) == (list(range(8)), 2)
        job.backend.faults.clear()
        job.clock.advance(0.5)
        step(run)
        assert job.segments() == [4, 5, 6, 7]


def test_a_floor_that_was_not_put_is_put_later_without_a_new_commit() -> None:
    """Else a trainer that waits for writers, which wait for room, would wait for ever."""
    job = Job()
    job.put(*names(8))
    with job.loader() as run:
        step(run)
        state = run.state_dict()
        fault = Fault("put", "registers/floor*", times=2, error=Unreachable("down"))
        job.backend.faults.append(fault)
        with pytest.warns(UserWarning, match="could not be deleted"):
            run.commit(state)
        assert (job.floor(), job.segments()) == (0, list(range(8)))
        run._reclaiming.work()
        assert fault.seen == 1  # not so soon
        run.commit(state)  # at once: it is asked for
        assert (fault.seen, job.floor()) == (2, 0)
        job.clock.advance(0.5)
        run._reclaiming.work()
        assert (job.floor(), job.segments()) == (2, [2, 3, 4, 5, 6, 7])


def test_close_leaves_nothing_however_slow_the_storage() -> None:
    job = Job()
    job.put(*names(600))
    with job.loader() as run:
        for _ in range(300):
            step(run)
        run._reclaiming._consumer.store.backend = Slow(job)  # type: ignore[assignment]
        run.commit(run.state_dict())
        assert job.segments() == list(range(512, 600))
    assert (job.floor(), job.segments()) == (600, [])


class Slow(Watched):
    """Each delete takes 0.2 s."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.backend)
        self.clock = job.clock

    def delete(self, keys: list[str]) -> None:
        self.inner.delete(keys)
        self.clock.advance(0.2)


# -- back-pressure -----------------------------------------------------------------------------------------------------


def test_a_blocked_put_goes_on_when_the_trainer_commits() -> None:
    url = f"memory://blocked-{next(_numbers)}"
    store = kd.TrajectoryStore(url, max_bytes=20_000)
    writer = store.writer("w0")
    written = 0
    with contextlib.suppress(kd.WaitTimeout):
        for written in itertools.count():
            writer.put_group(group(f"g{written:04d}", 2), timeout=0.0)
    assert written >= 4
    sleeper, done = Sleeper(store), threading.Event()

    def put() -> None:
        writer.put_group(group("more", 2))
        done.set()

    thread = threading.Thread(target=put, daemon=True)
    thread.start()
    assert sleeper.asleep.wait(30)
    assert not done.is_set()
    with loader(kd.TrajectoryStore(url), options={"prefetch": 0}, **SIZES) as run:
        step(run)
        assert not done.is_set()
        run.commit(run.state_dict())
        assert done.wait(30)
    thread.join()


def test_a_put_that_finds_no_room_says_who_makes_it_and_loses_nothing() -> None:
    job = Job()
    writer = job.open(max_bytes=15_000).writer("w0")
    put = []
    with pytest.raises(kd.WaitTimeout) as raised:
        for name in names(100):
            writer.put_group(group(name, 2), timeout=60.0)
            put.append(name)
    for text in ("of max_bytes=15000 are not reclaimed after 60 s", "put it again", "loader.commit(state)"):
        assert text in str(raised.value)
    with job.loader() as run:
        assert step(run) == put[:2]
        run.commit(run.state_dict())
        writer.put_group(group(names(100)[len(put)], 2), timeout=0.0)


@pytest.mark.parametrize("reclaim", ["commit", "consumed"])
def test_a_slow_trainer_holds_no_more_than_max_bytes_a_writer(reclaim: str) -> None:
    """Rollouts fill all the room there is before each of its steps."""
    job, most = Job(reclaim), 30_000
    writers = [job.open(max_bytes=most).writer(f"w{w}") for w in range(2)]
    fresh, held, waiting = itertools.count(), [], []
    with job.loader() as run:
        for _ in range(20):
            for w, writer in enumerate(writers):
                with contextlib.suppress(kd.WaitTimeout):
                    while True:
                        writer.put_group(group(f"{w}-{next(fresh):05d}", 2, lengths=[8, 8]), timeout=0.0)
            step(run)
            run.commit(run.state_dict())
            values = job.backend._space.values
            held.append(sum(len(v) for k, v in values.items() if k.startswith("segments/")))
            waiting.append(run.sampler.left_over())
    assert next(fresh) > 40 + 2
    assert max(held) <= 2 * most
    one = max(len(v) for k, v in values.items() if k.startswith("segments/"))
    assert max(waiting) <= 2 * most // one + 2
    assert max(held[10:]) <= max(held[:10])  # it does not creep


def test_a_writer_forgets_what_is_long_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_REMEMBERED", 4)
    job = Job("consumed")
    writer = job.open().writer("w0")
    with job.loader() as run:
        for i in range(40):
            for name in names(2, 2 * i):
                writer.put_group(group(name, 2))
            step(run)
            assert len(writer._known) <= 2 * 12
            assert len(writer._sizes) <= 12
        before = job.segments()
        infos = writer.put_group(group(names(80)[-4], 2))  # reclaimed, and still known
        assert [info.group for info in infos] == [names(80)[-4]] * 2
        assert job.segments() == before
        assert writer._held == sum(n for _, n in writer._sizes)


@pytest.mark.parametrize("max_staleness", [None, 100])
def test_a_repeat_that_its_writer_has_forgotten_is_a_duplicate(max_staleness: int | None) -> None:
    job = Job("consumed", max_staleness=max_staleness)
    job.put(*names(4))
    with job.loader() as run:
        assert step(run) == names(2)
        assert step(run) == names(2, 2)
        state = run.state_dict()
    assert job.segments() == []
    job.put(*names(4))  # a restarted worker, which begins at the floor
    job.put(*names(2, 4))
    assert job.segments() == [4, 5, 6, 7, 8, 9]
    with job.loader() as run:
        run.load_state_dict(state)
        assert step(run) == names(2, 4)
        run.commit(run.state_dict())
        assert run.sampler.dropped() == {"duplicate": 8}
    assert job.segments() == []


def test_a_second_writer_of_a_name_is_told_also_when_the_first_ones_segments_are_gone() -> None:
    job = Job("consumed")
    old = job.open().writer("w0")
    old.put_group(group("g0000", 2))
    new = job.open().writer("w0")  # restarted, while the old one lives
    for name in names(3, 1):
        new.put_group(group(name, 2))
    with job.loader() as run:
        step(run)
        step(run)
        run.state_dict()  # the last is consumed
    assert (job.segments(), job.floor()) == ([], 4)
    for _ in range(2):
        with pytest.raises(kd.WriterConflict, match=r"next segment is 1, and those below 4.*give each its own"):
            old.put_group(group("lost", 2))
    assert job.segments() == []
    new.put_group(group("kept", 2))
    assert job.segments() == [4]


@pytest.mark.parametrize("arrived", [True, False])
def test_a_put_that_was_not_confirmed_and_is_reclaimed_is_no_conflict(arrived: bool) -> None:
    job = Job("consumed")
    writer = job.open().writer("w0")
    job.backend.faults.append(Fault("create", "segments/*", error="crash_after" if arrived else Unreachable("down")))
    with pytest.raises((Crash, Unreachable)):
        writer.put_group(group("g0000", 2))
    job.put(*names(1, 1), writer="w1")
    job.put(*names(1, 2), writer="w1")
    with job.loader() as run:
        step(run)
        run.state_dict()
    assert job.floor() == int(arrived)
    writer.put_group(group("g0003", 2))
    assert job.segments() == [int(arrived)]


def test_a_restarted_writer_reads_nothing_that_was_reclaimed() -> None:
    job = Job()
    job.put(*names(6))
    with job.loader() as run:
        step(run)
        step(run)
        run.commit(run.state_dict())
    job.backend.faults.append(fault := Fault("read", "segments/*", after=1000))
    writer = job.open().writer("w0")
    assert (writer._next, [number for number, _ in writer._sizes]) == (6, [4, 5])
    assert fault.seen <= 8


# -- whatever happens --------------------------------------------------------------------------------------------------


class World:
    """Rollouts and a trainer that crash, and what must be true of the store after each thing that they do.

    ``saved``: states that a trainer may come back from, the committed one first, each with how often every group was
    trained by then. None: a start without a state.
    """

    def __init__(self, reclaim: str, epochs: int) -> None:
        self.job, self.epochs = Job(reclaim, epochs=epochs), epochs
        self.written: dict[str, list[str]] = {"w0": [], "w1": []}  # groups by segment
        self.writers = {name: self.job.open().writer(name) for name in self.written}
        self.saved: list[tuple[dict[str, Any] | None, Counter[str]]] = [(None, Counter())]
        self.trained: Counter[str] = Counter()
        self.steps, self.fresh = 0, itertools.count()
        self.run = self.job.loader()
        self.lost = False  # in "consumed" mode: no state can be gone back to

    def put(self, name: str) -> None:
        made = f"g{next(self.fresh):04d}"
        for _ in range(2):
            try:
                self.writers[name].put_group(group(made, 2, lengths=[3, 4]))
                break
            except Crash:
                self.job.backend.faults.clear()
                self.writers[name] = self.job.open().writer(name)
        self.written[name].append(made)

    def ready(self) -> bool:
        k, rest = divmod(self.steps, 2 * self.epochs)
        wanted = 4 * k + (4 if rest >= 2 else 2 * (rest + 1))
        return sum(map(len, self.written.values())) >= wanted

    def step(self) -> None:
        if self.ready():
            self.trained.update(step(self.run))
            self.steps += 1

    def save(self) -> None:
        self.saved.append((self.run.state_dict(), self.trained.copy()))

    def commit(self, which: int) -> None:
        which %= len(self.saved)
        state, _ = self.saved[which]
        if state is not None:
            self.saved = self.saved[which:] if self.job.reclaim == "commit" else self.saved
            self.run.commit(state)
            if self.job.reclaim == "commit":
                self.check_exact()

    def crash(self, which: int) -> None:
        """The trainer dies; the next one comes back from a state that was saved."""
        self.job.backend.faults.clear()
        die(self.run)
        which %= len(self.saved)
        state, self.trained = self.saved[which][0], self.saved[which][1].copy()
        self.saved = self.saved[: which + 1]
        self.steps = sum(self.trained.values()) // 2
        self.run = self.job.loader()
        if state is None:
            self.lost = any(self.job.floor(w) for w in range(2))
            return
        gone = any(self.job.floor(w) > self.needed(w, self.trained) for w in range(2))
        assert not gone or self.job.reclaim == "consumed"
        try:
            self.run.load_state_dict(state)
            assert not gone
        except kd.StateError:
            assert gone
            self.lost = True

    def needed(self, writer: int, trained: Counter[str]) -> int:
        """The first segment that has not met its fate when these were trained so often."""
        written = self.written[f"w{writer}"]
        return next((n for n, name in enumerate(written) if trained[name] < self.epochs), len(written))

    def check(self) -> None:
        """No segment is missing that any run from now on may need."""
        assert max(self.trained.values(), default=0) <= self.epochs
        for w, (name, written) in enumerate(self.written.items()):
            floor, there = self.job.floor(w), self.job.segments(name)
            assert set(range(floor, len(written))) <= set(there)
            if self.job.reclaim == "never":
                assert floor == 0
            elif self.job.reclaim == "commit":
                assert floor <= self.needed(w, self.saved[0][1])
            else:
                assert floor <= self.needed(w, self.trained)

    def check_exact(self) -> None:
        """What was committed takes no space."""
        for w, (name, written) in enumerate(self.written.items()):
            floor = self.job.floor(w)
            assert floor == self.needed(w, self.saved[0][1]) or not written
            assert self.job.segments(name) == list(range(floor, len(written)))

    def finish(self) -> None:
        self.job.backend.faults.clear()
        self.job.open().seal()
        for mini in self.run:
            _, _, ids = read_through(mini)
            self.trained.update({i.split("/")[0] for i in ids})
        self.run.close()
        untrained = [n for written in self.written.values() for n in written if not self.trained[n]]
        assert len(untrained) == sum(map(len, self.written.values())) % 2
        assert set(self.trained.values()) <= {self.epochs}


FAULTS = st.builds(
    Fault,
    st.sampled_from(["put", "delete", "create"]),
    st.sampled_from(["*", "segments/*", "registers/floor*"]),
    st.integers(0, 3),
    error=st.sampled_from(["crash_before", "crash_after"]),
)
DEEDS = st.one_of(
    st.tuples(st.sampled_from(["put", "put", "put", "step", "step"]), st.sampled_from(["w0", "w1"])),
    st.tuples(st.sampled_from(["save", "commit", "crash"]), st.integers(0, 9)),
    st.tuples(st.just("fault"), FAULTS),
)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["commit", "consumed", "never"]), st.integers(1, 2), st.lists(DEEDS, max_size=40))
def test_no_run_misses_a_segment_and_each_group_is_trained_once(
    reclaim: str, epochs: int, deeds: list[tuple[str, Any]]
) -> None:
    world = World(reclaim, epochs)
    for deed, what in deeds:
        try:
            if deed == "fault":
                world.job.backend.faults[:] = [Fault(what.op, what.key, what.after, error=what.error)]
                continue
            if deed == "put":
                world.put(what)
            elif deed == "crash":
                world.crash(what)
            elif deed == "commit":
                world.commit(what)
            else:
                getattr(world, deed)()
        except Crash:
            world.crash(len(world.saved) - 1)
        if world.lost:
            return
        world.check()
    world.finish()


# -- nothing but drops -------------------------------------------------------------------------------------------------


def good(infos: list[kd.TrajectoryInfo]) -> bool:
    return infos[0].group.startswith("g")


class Filtering(Job):
    """A trainer that keeps only groups g..., and a writer with room for about six."""

    def __init__(self, reclaim: str, **changes: Any) -> None:
        super().__init__(reclaim, groups=kd.GroupPolicy(keep=good), **changes)
        self.writer = self.open(max_bytes=20_000).writer("w0")
        self.bad = itertools.count()

    def fill(self, *good_ones: str) -> int:
        """As many of the others as there is room for, and how many that was."""
        for name in good_ones:
            self.writer.put_group(group(name, 2, lengths=[8, 8]), timeout=0.0)
        for done in itertools.count():
            try:
                self.writer.put_group(group(f"bad{next(self.bad):05d}", 2, lengths=[8, 8]), timeout=0.0)
            except kd.WaitTimeout:
                return done
        raise AssertionError

    def loader(self, reclaim: str | None = None) -> kd.TrajectoryLoader:
        return loader(self.open(reclaim), options={"prefetch": 0}, timeout=1e9, **self.sizes)

    def wait(self, run: kd.TrajectoryLoader) -> None:
        """The trainer waits for its next mini-batch, in vain, for two seconds of this clock."""
        for _ in range(20):
            assert run.running()._admit(run._next, 0.1, True) is None


def test_a_writer_full_of_filtered_groups_goes_on_while_the_trainer_waits() -> None:
    job = Filtering("consumed")
    job.fill("g0000", "g0001")
    with job.loader() as run:
        step(run)
        state, total = run.state_dict(), 0
        for _ in range(50):
            total += job.fill()
            job.wait(run)
            assert run.state_dict() == state
        assert total > 200
        job.fill("g0002", "g0003")
        assert step(run) == ["g0002", "g0003"]
        assert run.sampler.dropped()["filtered"] >= total
        run.state_dict()
    assert job.floor() > total


def test_with_commit_drops_stay_until_a_later_mini_batch_is_committed_and_both_sides_say_so() -> None:
    job = Filtering("commit")
    job.fill("g0000", "g0001")
    with job.loader() as run:
        step(run)
        run.commit(run.state_dict())
        job.put("bad-a", "bad-b", writer="w1")
        job.fill()
        job.wait(run)
        assert (job.floor() > 0, job.floor(1)) == (True, 0)
        text = run.sampler.explain()
        assert "since the last mini-batch, which take room (max_bytes) until a later one is committed" in text
        with pytest.raises(kd.WaitTimeout, match=r"Groups that it drops take room too.*'commit' only with a later"):
            job.writer.put_group(group("g0002", 2), timeout=1.0)
        job.put("g0002", "g0003", writer="w1")
        step(run)
        run.commit(run.state_dict())
        job.writer.put_group(group("g0004", 2), timeout=1.0)
        assert (job.segments("w1"), job.floor(1)) == ([], 4)


def test_where_drops_went_the_state_before_them_cannot_be_loaded() -> None:
    job = Filtering("consumed")
    job.fill("g0000", "g0001")
    run = job.loader()
    step(run)
    state = run.state_dict()
    job.wait(run)
    assert job.fill() > 0
    job.wait(run)
    die(run)
    with job.loader() as run, pytest.raises(kd.StateError, match="reclaimed"):
        run.load_state_dict(state)
    with job.loader() as run:  # without a state it starts at what there is
        with job.open().writer("w1") as other:
            for name in ("g0002", "g0003"):
                other.put_group(group(name, 2, lengths=[8, 8]))
        assert step(run) == ["g0002", "g0003"]


def test_nothing_goes_while_a_mini_batch_is_not_consumed() -> None:
    job = Filtering("consumed")
    job.fill("g0000", "g0001")
    with job.loader() as run:
        mini = next(run)
        assert mini.n_groups == 2  # admitted, and not consumed
        job.put("bad-a", writer="w1")
        job.wait(run)
        assert (job.floor(), job.floor(1)) == (0, 0)
        assert list(mini)
        run.state_dict()
        job.wait(run)
        assert job.floor(1) == 1


def test_a_group_that_waits_for_its_mini_batch_keeps_what_lies_behind_it() -> None:
    job = Filtering("consumed")
    job.fill("g0000", "g0001", "g0002")
    with job.loader() as run:
        step(run)
        run.state_dict()
        job.wait(run)
        assert job.floor() == 2
        with job.open().writer("w1") as other:
            other.put_group(group("g0003", 2))
        assert step(run) == ["g0002", "g0003"]


def test_drops_stay_while_the_trainer_has_waited_for_a_moment_only() -> None:
    job = Filtering("consumed")
    job.fill("g0000", "g0001")
    with job.loader() as run:
        step(run)
        run.state_dict()
        job.put("bad-a", writer="w1")
        for _ in range(4):
            assert run.running()._admit(1, 0.1, True) is None
        assert job.floor(1) == 0
        job.wait(run)
        assert job.floor(1) == 1


def test_what_was_just_admitted_does_not_count_as_dropped() -> None:
    job = Filtering("consumed")
    job.fill("g0000", "g0001")
    with job.loader() as run:
        step(run)
        run.state_dict()
        job.wait(run)
        with job.open().writer("w1") as other:
            for name in ("g0002", "g0003"):
                other.put_group(group(name, 2, lengths=[8, 8]))
        job.clock.advance(1.0)
        assert step(run) == ["g0002", "g0003"]  # admitted after a long wait, and its segments are there to be read
