"""Trajectories of one schema, with everything that a table and a segment can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

import knit_data as kd
from knit_data.trajectory import DTYPES

NAMES = st.sampled_from(
    ["a", "é", "len:a", "value.a", "info.id", "media.tokens", "问题/7", "a b", '"', "tokens.a", "|"]
)
TRAILING = st.sampled_from([(), (3,), (2, 2), (1,), (0,), (7,)])


@dataclass(frozen=True)
class Shape:
    """What all trajectories of a store share."""

    columns: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    values: dict[str, tuple[torch.dtype, tuple[int, ...]]]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    names = draw(st.lists(NAMES, max_size=4, unique=True))
    kinds = [(draw(st.sampled_from(list(DTYPES))), draw(TRAILING)) for _ in names]
    cut = draw(st.integers(0, len(names)))
    return Shape(dict(zip(names[:cut], kinds[:cut], strict=True)), dict(zip(names[cut:], kinds[cut:], strict=True)))


def tensor(draw: st.DrawFn, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Entries that every dtype can hold; the place matters."""
    count = int(np.prod(shape, dtype=np.int64))
    start, step = draw(st.integers(0, 90)), draw(st.integers(1, 7))
    return ((torch.arange(count) * step + start) % 97).to(dtype).reshape(tuple(shape))


@st.composite
def media(draw: st.DrawFn) -> kd.Media:
    parts = draw(st.dictionaries(NAMES, st.tuples(st.sampled_from(list(DTYPES)), TRAILING), min_size=1, max_size=2))
    tensors = {name: tensor(draw, dtype, shape or (1,)) for name, (dtype, shape) in parts.items()}
    return kd.Media(tensors, draw(st.integers(1, 4)), draw(NAMES), draw(st.none() | st.integers(0, 9)))


@st.composite
def references(draw: st.DrawFn, n: int, pool: Sequence[kd.Media]) -> list[kd.MediaRef]:
    """Media of the pool, their placeholders in one to three spans each, as long as there is room."""
    out, at = [], draw(st.integers(0, 2))
    for medium in draw(st.lists(st.sampled_from(pool), max_size=3)) if pool else []:
        spans, left = [], medium.tokens
        while left:
            length = draw(st.integers(1, left))
            spans.append((at, length))
            at, left = at + length + draw(st.integers(0, 1)), left - length
        if at > n:
            break
        out.append(kd.MediaRef(medium, draw(st.permutations(spans))))
    return out


@st.composite
def groups(draw: st.DrawFn, name: str = "g", shape: Shape | None = None, text: bool = False) -> list[kd.Trajectory]:
    shape = shape or draw(shapes())
    pool = [] if text else draw(st.lists(media(), max_size=3))
    attributes = draw(st.dictionaries(NAMES, NAMES, max_size=2))
    out = []
    for i in range(draw(st.integers(1, 4))):
        n, version = draw(st.integers(2, 20)), draw(st.integers(0, 2**40))
        tokens = {"input_ids": torch.arange(n) + draw(st.integers(0, 1000))}
        tokens |= {k: tensor(draw, dtype, (n, *rest)) for k, (dtype, rest) in shape.columns.items()}
        kind = draw(st.sampled_from(["none", "bool", "float"]))
        if kind != "none":
            bits = torch.tensor([False, *draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1))])
            tokens["loss_mask"] = bits if kind == "bool" else bits.double() * 0.5
        values: dict[str, Any] = {k: tensor(draw, dtype, rest) for k, (dtype, rest) in shape.values.items()}
        mean = draw(st.none() | st.integers(0, 3).map(lambda k, v=version: v + k / 2))
        refs = draw(references(n, pool))
        out.append(kd.Trajectory(f"{name}/é{i}", name, version, tokens, values, refs, attributes, mean))
    return out


def same_trajectory(found: kd.Trajectory, given: kd.Trajectory) -> None:
    """Bit by bit; a stored mask may have become float32, or have been made for a neighbour's sake."""
    assert (found.id, found.group, found.policy_version) == (given.id, given.group, given.policy_version)
    assert found.attributes == given.attributes
    assert (found.mean_policy_version or found.policy_version) == (given.mean_policy_version or given.policy_version)
    assert found.tokens.keys() - {"loss_mask"} == given.tokens.keys() - {"loss_mask"}
    for name, column in given.tokens.items():
        if name != "loss_mask":
            same_tensor(found.tokens[name], column)
    mask = given.tokens.get("loss_mask")
    if mask is None:
        mask = torch.arange(len(given.tokens["input_ids"])) > 0
    stored = found.tokens.get("loss_mask", mask)
    assert stored.dtype in (torch.bool, torch.float32) or stored is mask
    assert torch.equal(stored.float(), mask.float())
    assert found.values.keys() == given.values.keys()
    for name, value in given.values.items():
        back = found.values[name]
        assert isinstance(value, Tensor)
        if value.ndim:
            assert isinstance(back, Tensor)
            same_tensor(back, value)
        else:
            assert back == value.item()
    assert len(found.media) == len(given.media)
    for back_ref, ref in zip(found.media, given.media, strict=True):
        assert list(back_ref.spans) == list(ref.spans)
        assert (back_ref.media.digest, back_ref.media.kind) == (ref.media.digest, ref.media.kind)
        assert (back_ref.media.tokens, back_ref.media.cost) == (ref.media.tokens, ref.media.cost)
        for name, part in ref.media.tensors.items():
            same_tensor(back_ref.media.tensors[name], part)


def same_tensor(found: Tensor, given: Tensor) -> None:
    assert found.dtype == given.dtype and found.shape == given.shape
    assert found.data_ptr() % found.element_size() == 0
    assert torch.equal(found, given)
