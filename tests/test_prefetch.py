"""How far the loader's thread reads ahead: by number, and by bytes."""

from __future__ import annotations

import os
from typing import Any

import pytest
from makers import fill, loader

import knit_data as kd
from knit_data import prefetch as module
from knit_data.collate import Collator, Prepared

HANG = 120.0  # seconds; reached only by a test that fails


def waiting(run: kd.TrajectoryLoader) -> list[Prepared]:
    return [prepared for live in run.running()._minis.values() for prepared in live.ready.values()]


def most_ahead(run: kd.TrajectoryLoader, depth: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], int]:
    """The numbers that lay ready when one more was begun; the consumer waits each time until ``depth`` of them are, or
    all that are left."""
    ready, real, counts, total = waiting, Collator.__call__, [], 0

    def collate(self: Collator, *args: Any) -> Prepared:
        counts.append(len(ready(run)))
        return real(self, *args)

    monkeypatch.setattr(Collator, "__call__", collate)
    mini = next(run)
    micros = iter(mini)
    while next(micros, None) is not None:
        total += 1
        running = run.running()
        with running._turn:
            left = running._minis[0].share.count - total
            assert running._turn.wait_for(lambda left=left: len(ready(run)) >= min(depth, left), HANG)
    return counts, total


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_so_many_are_read_ahead(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = fill(kd.TrajectoryStore("memory://"), 8)
    with loader(store, 40, {"prefetch": depth}, train_batch_size=8, mini_batch_size=8) as run:
        counts, total = most_ahead(run, depth, monkeypatch)
    assert total > 8 and len(counts) == total
    assert max(counts) == depth - 1  # before the last one: with it, they are ``depth``


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_few_large_ones_are_enough(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is read only while those that wait have fewer bytes than the bound."""
    store = fill(kd.TrajectoryStore("memory://"), 8, lengths=[20] * 4)
    with loader(store, 20, {"prefetch": 4}, train_batch_size=8, mini_batch_size=8) as run:
        with loader(store, 20, {"prefetch": 0}, train_batch_size=8, mini_batch_size=8) as other:
            first = next(other)
            assert first.n_trajectories == 32 and first.live is not None
            nbytes = other.running()._collate(first.live.share, 0).nbytes
        monkeypatch.setattr(module, "_MOST_AHEAD", (kept - 1) * nbytes + 1)
        counts, total = most_ahead(run, kept, monkeypatch)
    assert total == 32 and max(counts) == kept - 1


# -- the thread --------------------------------------------------------------------------------------------------------


def test_a_thread_that_cannot_begin_is_an_error_of_the_consumer(monkeypatch):
    """As where no more threads, or memory for one, are to be had."""

    def refuse() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module, "_work_in_one_thread", refuse)
    with loader(fill(kd.TrajectoryStore("memory://"), 4)) as run, pytest.raises(RuntimeError, match="new thread"):
        list(next(run))


def test_a_fork_is_told_that_the_thread_is_not_there_and_leaves_the_parent_alone(tmp_path):
    store = fill(kd.TrajectoryStore(tmp_path), 12)
    with loader(store) as run:
        list(next(run))
        session, _ = store.consumer()
        child = os.fork()
        if not child:
            code = 1
            try:
                list(run)
            except kd.KnitError as e:
                code = 0 if "forked" in str(e) else 2
            run.close()  # as at its exit
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert session is not None and store.consumer()[0] == session
        assert sum(len(micro.infos) for mini in run for micro in mini) > 0


def test_control_c_without_a_thread_is_no_error_of_every_later_call(monkeypatch):
    store = fill(kd.TrajectoryStore("memory://"), 12)
    with loader(store, options={"prefetch": 0}) as run:
        list(next(run))

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(run.running()._admit, "tend", interrupted)
            patch.setattr(module.Prefetcher, "_choose", lambda *_: None)
            with pytest.raises(KeyboardInterrupt):
                run.running()._step()
        assert sum(len(micro.infos) for mini in run for micro in mini) > 0
