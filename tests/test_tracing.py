"""What a trace of torch.profiler shows of the loader."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from makers import fill, loader
from torch.profiler import ProfilerActivity, profile

import knit_data as kd
from knit_data.tracing import span

OURS = {"knit/wait", "knit/admit", "knit/read", "knit/fill", "knit/copy"}


def counts(trace: profile) -> dict[str, int]:
    return {event.key: event.count for event in trace.key_averages() if event.key.startswith("knit/")}


def test_without_a_profiler_a_span_is_nothing() -> None:
    assert isinstance(span("knit/read"), nullcontext)


def test_a_run_in_one_thread_shows_every_part_of_its_work() -> None:
    store = fill(kd.TrajectoryStore("memory://"), 16)
    with profile(activities=[ProfilerActivity.CPU]) as trace, loader(store, 60, {"prefetch": 0}) as run:
        micros = sum(len(list(mini)) for mini in run)
    found = counts(trace)
    assert set(found) == OURS
    assert found["knit/read"] == found["knit/fill"] == found["knit/copy"] == micros
    assert found["knit/wait"] >= micros  # one each: nothing is there before it is asked for
    assert found["knit/admit"] >= 8


def test_the_consumer_shows_no_wait_for_what_is_there() -> None:
    store = fill(kd.TrajectoryStore("memory://"), 2)
    with loader(store, 4096, {"prefetch": 2}, train_batch_size=2) as run:
        mini = next(run)
        running = run.running()
        assert mini.n_groups == 2
        with running._turn:
            assert running._turn.wait_for(lambda: running._minis[0].ready, 120.0)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            micro = next(iter(mini))
    assert not counts(trace) and len(micro.infos) == 8


def test_the_loaders_thread_shows_its_work_where_all_threads_are_profiled() -> None:
    config_of = getattr(torch._C._profiler, "_ExperimentalConfig", None)
    try:
        config = config_of(profile_all_threads=True) if config_of else None
    except TypeError:
        config = None
    if config is None:
        pytest.skip("this torch profiles the caller's thread only")
    store = fill(kd.TrajectoryStore("memory://"), 16)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as trace:
        with loader(store, 60, {"prefetch": 2}) as run:
            micros = sum(len(list(mini)) for mini in run)
    assert counts(trace)["knit/read"] == micros
