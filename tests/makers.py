"""Small trajectories and filled stores for tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

import knit_data as kd


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
