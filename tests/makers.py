"""Small trajectories and filled stores for tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

import knit_data as kd
from knit_data.infos import InfoTable
from knit_data.store.memory import ManualClock, MemoryBackend
from knit_data.store.segment import encode


def trajectory(name: str, group: str = "g", n: int = 5, **changes: Any) -> kd.Trajectory:
    """``n`` tokens whose ids and logprobs follow from the name, so that a mix-up shows."""
    seed = random.Random(name).randrange(1 << 20)
    generator = torch.Generator().manual_seed(seed)
    fields: dict[str, Any] = {
        "policy_version": 0,
        "tokens": {
            "input_ids": torch.randint(1, 97, (n,), generator=generator),
            "logprobs": torch.randn(n, generator=generator),
        },
        "values": {"reward": float(seed % 7)},
        "attributes": {"source": "math"},
    }
    fields.update(changes)
    return kd.Trajectory(name, group, **fields)


def group(name: str, size: int = 4, source: str = "math", lengths: Sequence[int] | None = None, **changes: Any):
    rng = random.Random(name)
    lengths = lengths or [rng.randint(2, 30) for _ in range(size)]
    changes.setdefault("attributes", {"source": source})
    return [trajectory(f"{name}/{i}", name, n, **changes) for i, n in enumerate(lengths)]


def fill(
    store: kd.TrajectoryStore, count: int, sources: Sequence[str] = ("math", "code"), size: int = 4, **changes: Any
):
    """``count`` groups, sources in turn, over two writers; then sealed."""
    writers = [store.writer("w0"), store.writer("w1")]
    for g in range(count):
        writers[g % 2].put_group(group(f"g{g:04d}", size, sources[g % len(sources)], **changes))
    store.seal()
    return store


def sampler(store: kd.TrajectoryStore, follow: bool = True, **changes: Any) -> kd.QuotaSampler:
    arguments: dict[str, Any] = {"train_batch_size": 8, "mini_batch_size": 2, "group_size": 4}
    arguments.update(changes)
    return kd.QuotaSampler(kd.TrajectoryStream(store, follow=follow), **arguments)


def rows(trajectories: Sequence[kd.Trajectory], writer: int = 0, segment: int = 0, grouped: bool = True) -> InfoTable:
    """The info table that one put makes, without a store."""
    return encode(list(trajectories), writer=writer, segment=segment, grouped=grouped, session="s").table


def completable(counts: Sequence[int], bounds: Sequence[tuple[int, int]], left: int) -> bool:
    """Whether ``left`` more groups can bring every count within its bounds: tries all ways there are."""
    if not counts:
        return left == 0
    low, high = bounds[0]
    return any(
        low <= counts[0] + more <= high and completable(counts[1:], bounds[1:], left - more) for more in range(left + 1)
    )


def loader(store: kd.TrajectoryStore, cap: int = 64, options: dict[str, Any] | None = None, **changes: Any):
    """A loader on the CPU over ``sampler(store, **changes)``; ``options`` are its own."""
    return kd.TrajectoryLoader(sampler(store, **changes), cap, **{"device": "cpu", **(options or {})})


def read_through(mini: kd.MiniBatch) -> tuple[int, int, list[str]]:
    """Iterate a mini-batch to its end: index, epoch and the trajectories of this rank."""
    ids = [info.id for micro in mini for info in micro.infos]
    return mini.index, mini.epoch, sorted(ids)


@dataclass(frozen=True)
class Waiting:
    """A group as admission sees it."""

    key: int
    combination: tuple[str, ...]
    version: int

    @property
    def order(self) -> tuple[int, int]:
        return self.version, self.key


_numbers = count()


def memory(clock: ManualClock | None = None) -> kd.TrajectoryStore:
    """A new store in memory, on real time or on a clock that only waits move."""
    name = f"test-{next(_numbers)}"
    MemoryBackend.named(name, clock=clock)
    return kd.TrajectoryStore(f"memory://{name}")


def groups_of(mini: kd.AdmittedMiniBatch) -> list[str]:
    """The groups' names, by their rows; each stands together."""
    at, out = 0, []
    for n in mini.group_rows:
        names = {info.group for info in mini.infos[at : at + n]}
        assert len(names) == 1
        out += names
        at += n
    assert at == len(mini.infos)
    return out


def members_of(mini: kd.AdmittedMiniBatch) -> list[list[str]]:
    """The ids of the rows, group by group."""
    ids = [info.id for info in mini.infos]
    starts = [sum(mini.group_rows[:i]) for i in range(len(mini.group_rows))]
    return [ids[at : at + n] for at, n in zip(starts, mini.group_rows, strict=True)]


Step = tuple[int, int, int, int, bool, list[list[str]]]  # index, train batch, epoch, position, is_last, members


def rest_of(made: kd.QuotaSampler) -> tuple[list[Step], list[dict[str, Any]]]:
    """Every step until the end, with the state after it."""
    steps, states = [], []
    while True:
        try:
            mini = made.next()
        except StopIteration:
            return steps, states
        place = mini.index, mini.train_batch, mini.epoch, mini.position, mini.is_last
        steps.append((*place, members_of(mini)))
        states.append(made.get_state())
