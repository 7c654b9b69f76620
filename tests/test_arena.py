"""Arenas on the CPU: nothing that somebody may still look at is written over, and their number stays small."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import fill, loader
from torch import Tensor

import knit_data as kd
from knit_data.arena import ALIGN, ArenaPool, Delivery, HostArenas, capacity

# -- the pool ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "size"), [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192), (3_000_000, 4_194_304), (1 << 22, 1 << 22)]
)
def test_an_arena_has_the_next_power_of_two(nbytes: int, size: int) -> None:
    assert capacity(nbytes) == size


def test_a_lease_is_aligned_and_ends_with_its_last_view() -> None:
    pool = ArenaPool()
    array, owner = pool.lease(5000)
    assert array.ctypes.data % ALIGN == 0 and len(array) == 8192 and owner.shape == (5000,)
    address = array.ctypes.data
    view = owner[100:200].view(torch.int32)
    del array, owner
    other, _other_owner = pool.lease(5000)
    assert other.ctypes.data != address and pool.made == 2  # the view holds it
    del view
    again, _owner = pool.lease(8192)
    assert again.ctypes.data == address and pool.made == 2


def test_the_smallest_free_arena_that_is_large_enough_is_taken() -> None:
    pool = ArenaPool()
    leases = [pool.lease(n) for n in (20_000, 5_000, 10_000)]
    addresses = [array.ctypes.data for array, _ in leases]
    leases.clear()
    taken = [pool.lease(n) for n in (6_000, 6_000, 6_000, 6_000)]
    assert [array.ctypes.data for array, _ in taken[:3]] == [addresses[1], addresses[2], addresses[0]]
    assert pool.made == 4


def test_free_arenas_are_given_up_beyond_a_few() -> None:
    pool = ArenaPool()
    leases = [pool.lease(100) for _ in range(30)]
    leases.clear()
    held = [pool.lease(100) for _ in range(30)]
    assert pool.made == 30 + 30 - 8 and len(held) == 30


# -- deliveries -------------------------------------------------------------------------------------------------------


class Consumer:
    """Steps of a loader and its consumer in any order; every batch that may be looked at is looked at after each."""

    def __init__(self, rng: random.Random, reuse: bool) -> None:
        self.rng, self.arenas, self.reuse, self.number = rng, HostArenas(reuse), reuse, 0
        self.ready: deque[tuple[Delivery, int]] = deque()
        self.valid: list[tuple[Tensor, int]] = []
        self.objects: list[Any] = []  # whatever is kept although it is not valid any more

    def step(self) -> None:
        self.rng.choice([self.produce, self.take, self.take, self.extra, self.abandon, self.drop])()
        for delivery, value in self.ready:
            assert bool((delivery.data == value).all())
        for data, value in self.valid:
            assert bool((data == value).all())

    def produce(self) -> None:
        if len(self.ready) < 3:
            self.ready.append(self.sent())

    def sent(self) -> tuple[Delivery, int]:
        self.number += 1
        nbytes, value = self.rng.choice([10, 3_000, 6_000]), self.number % 255 + 1
        stage = self.arenas.stage(nbytes)
        stage.host[...] = value  # all of it: what the next one does to this memory must not be seen
        return stage.send(nbytes), value

    def take(self) -> None:
        if self.ready:
            self.receive(*self.ready.popleft())

    def extra(self) -> None:
        self.receive(*self.sent())

    def receive(self, delivery: Delivery, value: int) -> None:
        delivery.receive()
        if self.reuse:
            self.objects += self.valid
            self.valid.clear()
        self.valid.append((delivery.data[1:], value))

    def abandon(self) -> None:
        if self.rng.random() < 0.3:
            self.ready.clear()

    def drop(self) -> None:
        if self.valid and not self.reuse:
            self.valid.pop(self.rng.randrange(len(self.valid)))


@settings(max_examples=60)
@given(rng=st.randoms(use_true_random=False), reuse=st.booleans())
def test_what_may_be_looked_at_stays(rng: random.Random, reuse: bool) -> None:
    consumer = Consumer(rng, reuse)
    for _ in range(60):
        consumer.step()


@pytest.mark.parametrize("seed", range(3))
def test_reused_arenas_are_few_whatever_is_kept(seed: int) -> None:
    consumer = Consumer(random.Random(seed), reuse=True)
    for _ in range(1500):
        consumer.step()
    assert len(consumer.objects) > 400
    # three ready, one with the consumer, one being filled, in two sizes
    assert consumer.arenas.pool.made <= 10


def test_a_batch_is_not_written_over_before_the_next_was_taken() -> None:
    arenas = HostArenas(reuse=True)

    def sent(value: int) -> Delivery:
        stage = arenas.stage(100)
        stage.host[:100] = value
        return stage.send(100)

    first = sent(1)
    first.receive()
    data = first.data
    del first  # the loader keeps nothing of it
    ahead = [sent(2), sent(3)]
    assert data.unique().tolist() == [1]
    ahead.pop(0).receive()
    assert data.unique().tolist() == [1]  # free, and not yet used
    sent(4)
    assert data.unique().tolist() == [4]


# -- through a loader -------------------------------------------------------------------------------------------------


def tensors_of(micro: kd.MicroBatch) -> dict[str, Tensor]:
    return {**micro, "rows": micro.rows, "slots": micro.media.slots}


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_reused_buffers_bring_the_same_batches(prefetch: int, layout: str) -> None:
    """Extra passes in the middle of the training pass, some mini-batches given up half way."""
    kept: list[kd.MicroBatch] = []
    store = fill(kd.TrajectoryStore("memory://", reclaim="never"), 48)
    runs = [
        loader(store, 40, {"prefetch": prefetch, "layout": layout, "reuse_buffers": reuse}) for reuse in (False, True)
    ]
    with runs[0] as plain, runs[1] as reusing:
        for one, two in zip(plain, reusing, strict=True):
            again = one.micro_batches("logprobs"), two.micro_batches("logprobs")
            for j, (a, b) in enumerate(zip(one, two, strict=True)):
                want, found = tensors_of(a), tensors_of(b)
                assert found.keys() == want.keys()
                assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
                kept.append(b)
                if j == 1 and one.index % 3 == 0:
                    want, found = map(tensors_of, map(next, again))
                    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
                if j == 1 and one.index % 3 == 1:
                    one.abandon()
                    two.abandon()
                    break
        made = reusing.running()._collate.arenas.pool.made
    assert len(kept) > 20 and made <= 2 * (prefetch + 2)


def test_reused_arenas_stay_few_over_500_mini_batches() -> None:
    """Counted instead of resident memory, which an allocator rounds. The consumer keeps every micro-batch."""
    store = fill(kd.TrajectoryStore("memory://", reclaim="never"), 500, size=2)
    made, kept = [], []
    with loader(store, 200, {"reuse_buffers": True}, train_batch_size=1, mini_batch_size=1, group_size=2) as run:
        for mini in run:
            kept += list(mini)
            made.append(run.running()._collate.arenas.pool.made)
    # buffered, with the consumer, being built; in one of two sizes
    assert len(kept) >= 500 and made[-1] <= 2 * (2 + 2)
