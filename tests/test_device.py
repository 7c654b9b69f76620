"""Pinned arenas, on a model of CUDA that does things as late as it may; and on a GPU, where there is one."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from cuda_model import Buffer, Device, Stream
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import group, loader

import knit_data as kd
from knit_data import device as module
from knit_data.arena import Delivery
from knit_data.device import DeviceArenas


class Race(Exception):
    """A kernel saw other bytes than it was meant to."""


class Trainer:
    """A loader's thread and a consumer, step by step in any order: every kernel looks whether its bytes are right."""

    def __init__(self, rng: random.Random, depth: int, reuse: bool, elsewhere: bool, skip: str | None = None) -> None:
        self.rng, self.depth, self.reuse = rng, depth, reuse
        self.device = Device(rng)
        self.device.skip = skip
        self.arenas = DeviceArenas(torch.device("cuda"), depth, reuse)
        self.home = self.device.current
        self.reads_on = self.device.stream("elsewhere") if elsewhere else self.home
        self.device.slow = set(rng.sample(self.device.streams, rng.randint(0, len(self.device.streams))))
        self.ready: deque[tuple[Delivery, int]] = deque()
        self.kept: list[tuple[Any, int]] = []
        self.number, self.largest = 0, rng.choice([100, 5_000])

    def run(self, steps: int) -> None:
        actions = [self.produce, self.produce, self.take, self.take, self.extra, self.look_again, self.scratch]
        actions += [self.drop, self.abandon, self.pump, self.pump]
        for _ in range(steps):
            self.rng.choice(actions)()
        if self.rng.random() < 0.7:
            self.ready.clear()
        self.arenas.close()
        for _ in range(3):
            self.scratch()
        self.device.drain()

    # -- the loader's thread

    def produce(self) -> None:
        if len(self.ready) < self.depth:
            self.ready.append(self.sent())

    def sent(self) -> tuple[Delivery, int]:
        nbytes, value = self.rng.randint(1, self.largest), self.value()
        stage = self.arenas.stage(nbytes)
        stage.host[:nbytes] = value
        return stage.send(nbytes), value

    def value(self) -> int:
        self.number += 1
        return self.number % 255 + 1

    # -- the consumer

    def take(self) -> None:
        if not self.ready and not self.depth:
            self.ready.append(self.sent())
        if self.ready:
            self.receive(*self.ready.popleft())

    def extra(self) -> None:
        """Of another pass, before those that are ready."""
        self.receive(*self.sent())

    def receive(self, delivery: Delivery, value: int) -> None:
        with self.device.on(self.reads_on):
            delivery.receive()
        if self.reuse:
            self.kept.clear()  # valid until the next one is taken
        self.kept.append((delivery.data, value))
        self.look(*self.kept[-1])

    def look_again(self) -> None:
        if self.kept:
            self.look(*self.rng.choice(self.kept))

    def look(self, data: Any, value: int) -> None:
        self.expect(self.reads_on, data, value)

    def drop(self) -> None:
        if self.kept:
            self.kept.pop(self.rng.randrange(len(self.kept)))

    def abandon(self) -> None:
        """A pass is given up: what is ready is never taken."""
        if self.rng.random() < 0.5:
            self.ready.clear()

    def scratch(self) -> None:
        """The consumer's own tensor, in memory that was given back."""
        data, value = self.device.empty(self.rng.randint(1, self.largest)), self.value()
        memory = data.block.memory
        self.device.launch(self.home, lambda: memory.fill(value))
        self.expect(self.home, data, value)
        if self.rng.random() < 0.5:
            self.pump()

    def expect(self, stream: Stream, data: Buffer, value: int) -> None:
        memory, size = data.block.memory, data.size

        def kernel() -> None:
            if not np.all(memory[:size] == value):
                raise Race(f"expected {value}, found {sorted(set(memory[:size].tolist()))}")

        self.device.launch(stream, kernel)

    def pump(self) -> None:
        self.device.pump(self.rng.randint(1, 8))


@pytest.fixture(autouse=True)
def _on_the_model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module's torch is that of the model which was made last."""
    if "gpu" not in request.keywords:
        real = Device.__init__

        def made(device: Device, rng: random.Random) -> None:
            real(device, rng)
            monkeypatch.setattr(module, "torch", device.torch())

        monkeypatch.setattr(Device, "__init__", made)


@settings(max_examples=100)
@given(rng=st.randoms(use_true_random=False), depth=st.integers(0, 3), reuse=st.booleans(), elsewhere=st.booleans())
def test_every_kernel_sees_its_own_bytes(rng: random.Random, depth: int, reuse: bool, elsewhere: bool) -> None:
    Trainer(rng, depth, reuse, elsewhere).run(50)


# Every wait that device.py makes, and what goes wrong without it.
WAITS = {
    "settle: event.synchronize": "the host writes into an arena that is still being copied from",
    "buffer: copies.wait_stream": "the copy overtakes a kernel that reads what the block held before",
    "buffer: copies.wait_event": "the same for a buffer that was lent before",
    "buffer: consumer.wait_event": "a buffer that was too small is used while it is still read elsewhere",
    "receive: consumer.wait_event": "the consumer reads before the copy arrived",
    "receive: elsewhere.wait_event": "so it does on another stream",
    "receive: buffer.record_stream": "memory is used again on its own stream while it is read on another",
    "__del__: consumer.wait_event": "memory that was given up is used again before its copy arrived",
    "close: consumer.wait_event": "the buffers of a closed loader are used while they are still read elsewhere",
}


def raced(skip: str | None, seed: int) -> bool:
    rng = random.Random(seed)
    trainer = Trainer(rng, rng.randint(0, 3), rng.random() < 0.5, rng.random() < 0.5, skip)
    try:
        trainer.run(50)
    except Race:
        return True
    return False


@pytest.mark.parametrize("skip", WAITS)
def test_the_model_sees_what_happens_without_a_wait(skip: str) -> None:
    assert any(raced(skip, seed) for seed in range(1000)), WAITS[skip]


def test_no_other_wait_is_made() -> None:
    made: set[str] = set()
    for seed in range(200):
        rng = random.Random(seed)
        trainer = Trainer(rng, rng.randint(0, 3), rng.random() < 0.5, rng.random() < 0.5)
        trainer.run(50)
        made |= trainer.device.waited
    assert made == set(WAITS)


@pytest.mark.parametrize("reuse", [False, True])
def test_device_memory_stays_bounded(reuse: bool) -> None:
    """One batch with the consumer at a time, sizes of one class: blocks go round."""
    trainer = Trainer(random.Random(0), 2, reuse, False)
    trainer.device.slow, trainer.largest = set(), 100
    counts = []
    for _ in range(500):
        trainer.produce()
        trainer.produce()
        trainer.kept.clear()
        trainer.take()
        trainer.pump()
        counts.append(trainer.device.allocated)
    assert counts[-1] == counts[50] <= 5
    trainer.arenas.close()
    trainer.device.drain()


# -- on a GPU ---------------------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def epochs(groups: int, options: dict[str, Any], **changes: Any) -> kd.TrajectoryLoader:
    """Over groups of very different lengths."""
    lengths = [random.Random(g).choice([3, 40, 400, 4_000]) for g in range(groups)]
    store = kd.TrajectoryStore("memory://")
    with store.writer("w") as writer:
        for g, n in enumerate(lengths):
            writer.put_group(group(f"g{g}", 4, lengths=[n + i for i in range(4)]))
    store.seal()
    return loader(store, 20_000, {"device": "cuda", **options}, **changes)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
@pytest.mark.parametrize("side", [False, True], ids=["own stream", "side stream"])
def test_a_slow_consumer_reads_its_own_batches(prefetch: int, side: bool) -> None:
    """The sums are taken long after the loader went on, and compared with those of a loader on the CPU."""
    want = {}
    with epochs(64, {"device": "cpu"}) as run:
        for mini in run:
            for micro in mini:
                want[micro.infos[0].id] = int(micro["input_ids"].sum())
    found: list[tuple[str, torch.Tensor]] = []
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    with epochs(64, {"prefetch": prefetch}) as run, torch.cuda.stream(stream):
        for mini in run:
            for micro in mini:
                torch.cuda._sleep(20_000_000)
                found.append((micro.infos[0].id, micro["input_ids"].sum()))
                del micro
    torch.cuda.synchronize()
    assert {name: int(total) for name, total in found} == want


@pytest.mark.gpu
@needs_gpu
def test_pinned_memory_is_allocated_at_the_begin_only() -> None:
    """Lengths vary all the time: a pinned allocation stalls every launch of the process."""
    counts = []
    with epochs(64, {}, epochs=40) as run:
        for mini in run:
            for _ in mini:
                counts.append(torch.cuda.host_memory_stats()["num_host_alloc"])
    assert counts[-1] == counts[len(counts) // 4]


@pytest.mark.gpu
@needs_gpu
def test_device_memory_does_not_grow_with_epochs_and_loaders() -> None:
    reserved = []
    for _ in range(6):
        with epochs(32, {}, epochs=4) as run:
            for mini in run:
                for micro in mini:
                    torch.cuda._sleep(1_000_000)
                    micro["labels"].sum()
                    del micro
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[1:] == reserved[1:2] * 5
