"""The encoder on two ranks: equal calls everywhere, gradients those of one process, under FSDP2, DDP and neither."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pictures import Looker, apart, damage, fill, gradients, image, naive
from spawn import Ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

import knit_data as kd

EXACT = 1e-12  # of the largest gradient: float64, other order of additions

GROUPS = {
    "mixed": {f"g{i}": [[f"i{i}"]] * 3 + [[f"i{i}", "logo"], []] for i in range(4)},
    "few": {"g0": [["a"], [], []], "g1": [[], []], "g2": [[], [], []]},  # a rank without images
    "text": {"g0": [[], []], "g1": [[]]},
}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def media_of(name: str) -> dict[str, kd.Media]:
    names = {name for members in GROUPS[name].values() for one in members for name in one}
    return {(m := image(n)).digest: m for n in names}


def loader_of(folder: str, name: str, cap: int, **changes: Any) -> kd.TrajectoryLoader:
    store = kd.TrajectoryStore(f"{folder}/{name}")
    groups = len(GROUPS[name])
    sampler = kd.QuotaSampler(kd.TrajectoryStream(store), groups, groups, None, epochs=changes.pop("epochs", 1))
    return kd.TrajectoryLoader(sampler, cap, device="cpu", **changes)


def alone(folder: str, name: str, cap: int) -> dict[str, torch.Tensor]:
    """Encoding every time in one process: what every way of running must come to."""
    model = Looker().double()
    with loader_of(folder, name, cap) as loader:
        mini = next(loader)
        naive(model, list(mini), media_of(name), mini.loss_tokens)
    return gradients(model)


def prepared(how: str) -> tuple[Any, Any, Any]:
    """The model to run, what encodes, and what the encoder may hold back."""
    model = Looker().double()
    if how == "plain":
        return model, model.encode, None
    if how == "ddp":
        wrapped = DistributedDataParallel(model)
        return wrapped, model.encode, wrapped
    for part in (model.tower, model.head, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    register_fsdp_forward_method(model, "encode")
    kd.integrations.fsdp.sum_gradients(model)
    return model, model.encode, model


def summed(model: torch.nn.Module, how: str) -> dict[str, Any]:
    out = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            grad = p.grad.full_tensor() if isinstance(model, FSDPModule) else p.grad.clone()
            if how == "plain":
                dist.all_reduce(grad)
            out[name.removeprefix("module.")] = grad.numpy()
    return out


def train(rank: int, world: int, folder: str, how: str, mode: str, name: str, cap: int, max_patches: int) -> Any:
    model, encode, module = prepared(how)
    calls = 0

    def counted(tensors: Any) -> Any:
        nonlocal calls
        calls += 1
        return encode(tensors)

    encoder = kd.SharedEncoder(counted, module=module, mode=mode, max_patches=max_patches)
    with loader_of(folder, name, cap, on_corrupt="mask") as loader:
        mini = next(loader)
        images = 0
        for micro in mini:
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(micro.is_last)
            images += len(micro.media.new)
            (model(micro, encoder(micro)) / mini.loss_tokens).backward()
        encoder.backward()
    return summed(model, how), calls, images


def tensors(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(grad) for name, grad in found.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("stores")
    for name, groups in GROUPS.items():
        fill(kd.TrajectoryStore(path / name), groups)
    return str(path)


CASES = [
    ("plain", "recompute", "mixed", 30, 4),
    ("fsdp", "recompute", "mixed", 30, 4),
    ("fsdp", "retain", "mixed", 30, 4),
    ("fsdp", "recompute", "mixed", 200, 1000),
    ("fsdp", "recompute", "few", 20, 4),
    ("fsdp", "retain", "few", 200, 4),
    ("fsdp", "recompute", "text", 20, 4),
    ("ddp", "recompute", "mixed", 30, 4),
    ("ddp", "retain", "few", 20, 1),
    ("ddp", "recompute", "text", 20, 4),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_gradients_are_those_of_one_process_and_calls_are_equal(two: Ranks, folder: str, case: Sequence[Any]):
    """DeepSpeed #7170, torchtitan #4777: ranks without images hang, or their gradients are missing."""
    (found, calls, images), (_, others, there) = two.run(train, folder, *case)
    assert calls == others
    assert apart(tensors(found), alone(folder, case[2], case[3])) < EXACT
    assert (calls == 0) == (case[2] == "text")
    if case[2] == "few":
        assert 0 in (images, there)  # one rank has none and encodes all the same


def test_a_corrupt_image_on_one_rank_keeps_nobody_waiting(two: Ranks, folder: str, tmp_path: Path):
    """Two ranks with the same bad file: its users are masked, calls stay equal, gradients finite."""
    shutil.copytree(Path(folder) / "mixed", tmp_path / "mixed")
    damage(tmp_path / "mixed", "i1")
    (found, calls, _), (_, others, _) = two.run(train, str(tmp_path), "fsdp", "recompute", "mixed", 30, 4)
    assert calls == others and all(np.isfinite(grad).all() for grad in found.values())
    whole = alone(folder, "mixed", 30)
    assert found.keys() == whole.keys() and apart(tensors(found), whole) > 1e-3  # without those four trajectories


def frozen(rank: int, world: int, folder: str, how: str) -> Any:
    model, encode, module = prepared(how)
    calls = []

    def counted(tensors: Any) -> Any:
        calls[-1] += 1
        return encode(tensors)

    encoder = kd.SharedEncoder(counted, module=module, mode="frozen")
    with loader_of(folder, "mixed", 30, epochs=2) as loader:
        for mini in loader:
            calls.append(0)
            for micro in mini:
                if isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(micro.is_last)
                (model(micro, encoder(micro)) / max(1, mini.loss_tokens)).backward()
            encoder.backward()
    found = {name: grad for name, grad in summed(model, how).items() if not name.startswith("tower")}
    tower = [p.grad is None for name, p in model.named_parameters() if "tower" in name]
    return found, calls[:2], all(tower)


@pytest.mark.parametrize("how", ["plain", "fsdp"])
def test_frozen_on_two_ranks(two: Ranks, folder: str, how: str):
    (found, calls, untouched), (_, others, _) = two.run(frozen, folder, how)
    wanted = {n: 2 * g for n, g in alone(folder, "mixed", 30).items() if not n.startswith("tower")}
    assert apart(tensors(found), wanted) < EXACT and untouched
    if how == "fsdp":
        assert calls == others and calls[1] > 0  # in step: a sharded tower is encoded again in the next mini-batch


def accumulate(rank: int, world: int, folder: str, gathered: bool) -> Any:
    """Two mini-batches into one gradient under DDP; then one that is given up."""
    torch.manual_seed(0)
    model = Looker().double()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=gathered)
    encoder = kd.SharedEncoder(model.encode, module=wrapped)
    with loader_of(folder, "mixed", 30, epochs=3) as loader:
        for _, mini in zip(range(2), loader, strict=False):
            for micro in mini:
                (wrapped(micro, encoder(micro)) / mini.loss_tokens).backward()
            encoder.backward()
        kept = summed(wrapped, "ddp")
        for micro in next(loader):
            wrapped(micro, encoder(micro)).backward()
        encoder.abandon()
        given_up = summed(wrapped, "ddp")
    return kept, all(np.array_equal(kept[name], given_up[name]) for name in kept), wrapped.require_backward_grad_sync


@pytest.mark.parametrize("gathered", [False, True])
def test_ddp_adds_mini_batches_up_and_forgets_what_is_abandoned(two: Ranks, folder: str, gathered: bool, monkeypatch):
    (found, same, released), (others, _, _) = two.run(accumulate, folder, gathered)
    wanted = {name: 2 * grad for name, grad in alone(folder, "mixed", 30).items()}
    assert apart(tensors(found), wanted) < EXACT and apart(tensors(others), wanted) < EXACT
    assert same and released


def buckets(rank: int, world: int, folder: str) -> Any:
    from knit_data import grad_sync

    before, grad_sync._BUCKET = grad_sync._BUCKET, 200  # most tensors are larger
    try:
        return train(rank, world, folder, "ddp", "recompute", "mixed", 30, 4)[0]
    finally:
        grad_sync._BUCKET = before


def test_ddp_reduces_in_buckets(two: Ranks, folder: str):
    found, _ = two.run(buckets, folder)
    assert apart(tensors(found), alone(folder, "mixed", 30)) < EXACT


def text_without_backward(rank: int, world: int, folder: str) -> Any:
    model = Looker()
    wrapped = DistributedDataParallel(model)
    encoder = kd.SharedEncoder(model.encode, module=wrapped)
    with loader_of(folder, "text", 20, epochs=2) as loader:
        for micro in next(loader):
            wrapped(micro, encoder(micro)).backward()
        try:
            for micro in next(loader):
                encoder(micro)
        except kd.UsageError as e:
            return str(e)
    return ""


def test_under_ddp_a_mini_batch_of_text_needs_the_backward_too(two: Ranks, folder: str):
    assert all("not the other ranks" in text for text in two.run(text_without_backward, folder))


def frozen_sums(rank: int, world: int, folder: str) -> Any:
    model = Looker().double()
    model.tower.requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    kd.integrations.fsdp.sum_gradients(wrapped)
    encoder = kd.SharedEncoder(model.encode, module=wrapped, mode="frozen")
    with loader_of(folder, "mixed", 30) as loader:
        mini = next(loader)
        for micro in mini:
            wrapped.require_backward_grad_sync = micro.is_last
            (wrapped(micro, encoder(micro)) / mini.loss_tokens).backward()
        encoder.backward()
    return summed(wrapped, "ddp")


def test_frozen_under_ddp_with_summed_gradients(two: Ranks, folder: str):
    found, _ = two.run(frozen_sums, folder)
    wanted = {name: grad for name, grad in alone(folder, "mixed", 30).items() if not name.startswith("tower")}
    assert apart(tensors(found), wanted) < EXACT


@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_the_smallest_image_may_be_corrupt_or_all_of_them(two: Ranks, tmp_path: Path, how: str):
    groups = {"g0": [[], ["g", "h"], []], "g1": [[]]}
    fill(kd.TrajectoryStore(tmp_path / "one" / "mixed"), {**groups, "g2": [[]], "g3": [["h"]]})
    smallest = min("gh", key=lambda name: image(name).tokens)
    damage(tmp_path / "one" / "mixed", smallest)
    (_, calls, _), (_, others, _) = two.run(train, str(tmp_path / "one"), how, "recompute", "mixed", 200, 1000)
    assert calls == others > 0
    fill(kd.TrajectoryStore(tmp_path / "all" / "mixed"), {f"g{i}": [["i0"], []] for i in range(4)})
    damage(tmp_path / "all" / "mixed", "i0")
    (found, calls, _), (_, others, _) = two.run(train, str(tmp_path / "all"), how, "retain", "mixed", 200, 1000)
    assert calls == others == 0 and not any(name.startswith("tower") for name in found)
