"""Two and more ranks: equal counts, equal states, the errors of one on all, and exact gradients under FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from makers import fill, sampler
from spawn import Ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

import knit_data as kd


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def collect(rank: int, world: int, url: str, **options: Any) -> dict[str, Any]:
    """Every mini-batch's groups and this rank's trajectories."""
    store = kd.TrajectoryStore(url)
    minis = []
    with kd.TrajectoryLoader(sampler(store), 64, device="cpu", **options) as loader:
        for mini in loader:
            ids, micros, tokens = [], 0, 0
            for micro in mini:
                ids += [i.id for i in micro.infos]
                tokens += int((micro.targets("loss_mask") != 0).sum())
                micros += 1
            minis.append([mini.index, micros, sorted(ids), mini.loss_tokens, tokens, mini.n_trajectories])
        return {"minis": minis, "state": loader.state_dict(), "stats": loader.stats}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_ranks_share_every_mini_batch(tmp_path, two, prefetch):
    store = fill(kd.TrajectoryStore(tmp_path), 24)
    a, b = two.run(collect_with, str(tmp_path), prefetch)
    assert [m[:2] for m in a["minis"]] == [m[:2] for m in b["minis"]] and len(a["minis"]) == 12
    assert a["state"] == b["state"]
    for left, right in zip(a["minis"], b["minis"], strict=True):
        assert len(left[2]) + len(right[2]) == left[5] == 8 and not set(left[2]) & set(right[2])
        assert left[3] == right[3] == left[4] + right[4]
    assert store.demand().train_batch == 3


def collect_with(rank: int, world: int, url: str, prefetch: int) -> dict[str, Any]:
    return collect(rank, world, url, prefetch=prefetch)


# -- gradients -----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A causal model without any float32 inside: packed rows mix within their trajectory only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(97, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 97)

    def forward(self, micro: kd.MicroBatch) -> torch.Tensor:
        hidden = self.embed(micro["input_ids"])
        same = micro.rows.view(1, -1) == micro.rows.view(-1, 1)
        causal = same & (torch.arange(len(same)).view(1, -1) <= torch.arange(len(same)).view(-1, 1))
        weights = causal.double() / causal.double().sum(1, keepdim=True)
        flat = hidden.view(-1, 16)
        out = torch.tanh(self.mix(weights @ flat)) + flat
        return self.head(out).view(*micro["labels"].shape, -1)


def loss_of(logits: torch.Tensor, micro: kd.MicroBatch) -> torch.Tensor:
    labels = micro["labels"]
    nll = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    weight = micro.to_tokens("advantage").double() * micro.targets("loss_mask").double()
    return (nll * weight * (1 + micro.targets("logprobs").double())).sum()


def gradients(rank: int, world: int, url: str, layout: str, cap: int, state: bool = False) -> list[list[float]]:
    model = Net().double()
    if world > 1:
        fully_shard(model.mix)
        fully_shard(model)
        kd.integrations.fsdp.sum_gradients(model)
    groups = kd.GroupPolicy(annotate=kd.group_advantages)
    out = []
    with kd.TrajectoryLoader(
        sampler(kd.TrajectoryStore(url), groups=groups), cap, device="cpu", layout=layout
    ) as loader:
        for mini in loader:
            for micro in mini:
                if world > 1:
                    model.set_requires_gradient_sync(micro.is_last)
                (loss_of(model(micro), micro) / mini.loss_tokens).backward()
            grads = [p.grad.full_tensor() if world > 1 else p.grad for p in model.parameters()]
            out.append(torch.cat([g.flatten() for g in grads]).tolist())
            for p in model.parameters():
                p.grad = None
    return out


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_gradients_depend_on_neither_ranks_nor_caps_nor_layout(tmp_path, two, layout):
    fill(kd.TrajectoryStore(tmp_path), 8)
    want = torch.tensor(gradients(0, 1, str(tmp_path), "packed", 4096), dtype=torch.float64)
    for cap in (31, 64, 500):
        got = torch.tensor(two.run(gradients, str(tmp_path), layout, cap), dtype=torch.float64)
        assert torch.equal(got[0], got[1])
        # sums in another order: 1e-12 of the largest gradient
        assert (got[0] - want).abs().max() <= 1e-12 * want.abs().max()
