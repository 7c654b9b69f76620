"""Trajectories with images, and a small model that looks at them, for tests."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import knit_data as kd

IMAGE, WIDTH, HIDDEN, VOCABULARY = 90, 6, 8, 91  # the placeholder id; an image's columns; features; ids


def image(name: str, tokens: int | None = None) -> kd.Media:
    """``2 * tokens`` patches of noise that follows from the name; two patches make a feature."""
    rng = random.Random(name)
    tokens = tokens or rng.randint(1, 5)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return kd.Media({"patches": torch.randn(2 * tokens, WIDTH, generator=generator)}, tokens, patches=2 * tokens)


def picture(name: str, group: str, images: Sequence[kd.Media], answer: int = 4, stray: int = 0) -> kd.Trajectory:
    """A prompt with these images, then ``answer`` tokens with a loss, ``stray`` of them placeholders."""
    generator = torch.Generator().manual_seed(random.Random(name).randrange(1 << 30))

    def some(n: int) -> Tensor:
        return torch.randint(1, IMAGE, (n,), generator=generator)

    parts, refs, at = [some(2)], [], 2
    for media in images:
        refs.append(kd.MediaRef(media, [(at, media.tokens)]))
        parts += [torch.full((media.tokens,), IMAGE), some(1)]
        at += media.tokens + 1
    reply = some(answer)
    reply[:stray] = IMAGE
    ids = torch.cat([*parts, reply])
    mask = torch.arange(len(ids)) >= at
    weights = torch.randn(len(ids), generator=generator)
    tokens = {"input_ids": ids, "loss_mask": mask, "weight": weights}
    return kd.Trajectory(name, group, 0, tokens, {"reward": 1.0}, refs)


def fill(store: kd.TrajectoryStore, groups: Mapping[str, Sequence[Sequence[str]]], **changes: int) -> None:
    """Groups by name: of each member the names of its images. Then sealed."""
    with store.writer("w") as writer:
        for group, members in groups.items():
            writer.put_group(
                [
                    picture(f"{group}/{i}", group, [image(name) for name in names], **changes)
                    for i, names in enumerate(members)
                ]
            )
    store.seal()


def damage(folder: Path, name: str) -> None:
    """Flip a byte of every stored copy of this image."""
    needle, hits = image(name).tensors["patches"].numpy().tobytes(), 0
    for file in folder.rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        if (at := data.find(needle)) >= 0:
            data[at + 5] ^= 0x40
            file.chmod(0o644)
            file.write_bytes(data)
            hits += 1
    assert hits


class Looker(nn.Module):
    """A tower of two layers over pairs of patches, with a second level; a backbone that mixes tokens of a trajectory
    causally. Loss terms are weighed by the column ``weight``."""

    def __init__(self, levels: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        generator = torch.random.get_rng_state()
        torch.manual_seed(7)
        self.tower = nn.Sequential(
            nn.Linear(2 * WIDTH, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, HIDDEN * levels)
        )
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.levels, self.calls = levels, 0
        torch.random.set_rng_state(generator)

    def encode(self, tensors: Mapping[str, Tensor]) -> Tensor | tuple[Tensor, ...]:
        self.calls += 1
        out = self.tower(tensors["patches"].to(self.head.weight.dtype).view(-1, 2 * WIDTH))
        return out if self.levels == 1 else out.chunk(self.levels, dim=1)

    def forward(self, micro: kd.MicroBatch, features: Tensor | Sequence[Tensor]) -> Tensor:
        """The micro-batch's summed loss."""
        shape = micro["input_ids"].shape
        x = self.embed(micro["input_ids"].long().reshape(-1))
        for level in [features] if isinstance(features, Tensor) else features:
            if len(level):
                x = x.index_add(0, micro.media.slots, level.to(x.dtype))
        same = micro.rows[:, None] == micro.rows[None, :]
        causal = torch.ones_like(same).tril() & same
        x = torch.tanh(causal.to(x.dtype) @ x)
        logits = self.head(x)
        flat = micro["labels"].reshape(-1)
        lost = nn.functional.cross_entropy(logits, flat, reduction="none", ignore_index=-100)
        return (lost * micro.targets("weight").reshape(-1)).sum() + 0.0 * x.view(*shape, -1).sum()


def naive(model: Looker, micros: Sequence[kd.MicroBatch], media: Mapping[str, kd.Media], denominator: float) -> None:
    """Encode every image anew for each use of it, as loaders without an encoder of their own do."""
    for micro in micros:
        per_use = [
            model.encode(dict(media[micro.media.digests[which]].tensors)) for which, first, _ in micro.media.pieces
            if first == 0
        ]  # fmt: skip
        if not per_use:
            features = [torch.zeros(0, HIDDEN)]
        elif model.levels == 1:
            features = [torch.cat(per_use)]
        else:
            features = [torch.cat(level) for level in zip(*per_use, strict=True)]
        (model(micro, features) / denominator).backward()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def apart(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The largest difference, as a share of the largest gradient; infinite if not the same parameters have one."""
    if found.keys() != wanted.keys():
        return float("inf")
    largest = max(float(g.abs().max()) for g in wanted.values())
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted) / largest
