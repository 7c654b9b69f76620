"""Real models: gradients of tower and backbone, encoded once, against naive accumulation. One process and FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import FAMILIES, Float64, build, images, naive, rollouts
from spawn import Ranks
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import cross_entropy

import knit_data as kd

pytest.importorskip("transformers")

EXACT = 1e-12  # of the largest gradient: float64, other order of additions


def loss_of(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    losses = cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=-100)
    return (losses * weight.flatten().double()).sum()


def expected(family: str) -> dict[str, Tensor]:
    """Every trajectory by itself with its own pixels: naive accumulation."""
    trajectories = rollouts(family, images(family, 3, torch.float64), per_group=3)
    tokens = sum(int((t.tokens["loss_mask"] != 0).sum()) for t in trajectories)
    with Float64():
        model = build(family, torch.float64)
        for t in trajectories:
            ids, mask = t.tokens["input_ids"], t.tokens["loss_mask"]
            (loss_of(naive(model, t)[:-1], ids[1:], mask[1:]) / tokens).backward()
    return gradients(model)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    out = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            out[name] = p.grad.full_tensor() if isinstance(model, FSDPModule) else p.grad
    return out


def is_tower(name: str) -> bool:
    return any(part in name for part in ("visual", "vision_tower", "multi_modal_projector"))


def off(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Of tower and backbone the largest difference, as a share of the largest gradient."""
    out = {}
    for part in (True, False):
        names = [n for n in wanted if is_tower(n) == part]
        assert names and [n for n in found if is_tower(n) == part] == names
        largest = max(float(wanted[n].abs().max()) for n in names)
        out["tower" if part else "backbone"] = max(float((found[n] - wanted[n]).abs().max()) for n in names) / largest
    return out


@pytest.fixture(scope="module", params=FAMILIES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str, dict[str, Tensor]]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    store = kd.TrajectoryStore(folder)
    trajectories = rollouts(request.param, images(request.param, 3, torch.float64), per_group=3)
    with store.writer("w") as writer:
        for at in range(0, len(trajectories), 3):
            writer.put_group(trajectories[at : at + 3])
    store.seal()
    return request.param, str(folder), expected(request.param)


def train(rank: int, world: int, family: str, folder: str, mode: str, layout: str, cap: int, chunk: int) -> Any:
    with Float64():
        model = build(family, torch.float64)
    if world > 1:
        inner = model.model
        tower = inner.visual if hasattr(inner, "visual") else inner.vision_tower
        blocks = [block for m in tower.modules() if isinstance(m, torch.nn.ModuleList) for block in m]
        # transformers 5 finds what LLaVA's tower should return by the name of its class, which sharding changes
        whole = [] if family == "llava" else [tower]
        for part in (*inner.language_model.layers, *blocks, *whole, model):
            fully_shard(part)
        kd.integrations.fsdp.sum_gradients(model)
    encode = kd.integrations.huggingface.image_features(model)
    encoder = kd.SharedEncoder(encode, module=model, mode=mode, max_patches=chunk)
    kd.integrations.huggingface.attach(model, encoder)
    sampler = kd.QuotaSampler(kd.TrajectoryStream(kd.TrajectoryStore(folder)), 3, 3, None)
    with kd.TrajectoryLoader(sampler, cap, device="cpu", layout=layout) as loader:
        mini = next(loader)
        for micro in mini:
            if world > 1:
                model.set_requires_gradient_sync(micro.is_last)
            with Float64():
                logits = model(**micro.model_inputs(), **encoder.model_inputs(micro)).logits
                (loss_of(logits, micro["labels"], micro.targets("loss_mask")) / mini.loss_tokens).backward()
        with Float64():
            encoder.backward()
        stats = mini.stats
    return {name: g.numpy() for name, g in gradients(model).items()}, stats


SPLITS = [("packed", 60, 20), ("packed", 1000, 10_000), ("padded", 120, 20)]


@pytest.mark.parametrize("mode", ["retain", "recompute"])
@pytest.mark.parametrize("split", SPLITS, ids=lambda s: "-".join(map(str, s)))
def test_in_one_process(case: Any, mode: str, split: Any) -> None:
    family, folder, wanted = case
    found, stats = train(0, 1, family, folder, mode, *split)
    assert max(off(tensors(found), wanted).values()) < EXACT
    assert stats["encodes"] == 3 < stats["naive_encodes"]


def test_frozen(case: Any) -> None:
    family, folder, wanted = case
    found, _ = train(0, 1, family, folder, "frozen", "packed", 60, 20)
    assert not any(map(is_tower, found))
    tower = {n: torch.ones(1) for n in wanted if is_tower(n)}  # left out of the comparison
    backbone = {n: g for n, g in wanted.items() if not is_tower(n)}
    assert off({**tower, **tensors(found)}, {**tower, **backbone})["backbone"] < EXACT


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("mode", ["retain", "recompute"])
def test_under_fsdp2_on_two_ranks(case: Any, two: Ranks, mode: str) -> None:
    family, folder, wanted = case
    (found, _), _ = two.run(train, family, folder, mode, "packed", 60, 20)
    assert max(off(tensors(found), wanted).values()) < EXACT


def tensors(found: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(g) for name, g in found.items()}
