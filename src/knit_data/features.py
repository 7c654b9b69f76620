"""The features of a mini-batch's media: rows of encoder calls, gathered for a micro-batch, and their gradients.

A gathered row remembers where it came from. In the backward its gradient is added there, in float32, in the order in
which the micro-batches' backwards run: reproducible, and independent of how a bfloat16 sum would round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from knit_data import ops
from knit_data.errors import UsageError
from knit_data.media import Medium
from knit_data.surroundings import Surroundings, Weights

Levels: TypeAlias = tuple[Tensor, ...]


@dataclass(eq=False)
class Call:
    """One run of an encoder over a few media; without gradients if it only kept step with other ranks."""

    media: Sequence[Medium]
    rows: Levels  # contiguous, detached
    graph: Levels  # as they came, where the graph is kept
    surroundings: Surroundings
    weights: Weights
    training: tuple[bool, ...]
    grads: list[Tensor | None]  # per level, float32 (float64 if the features are); None: no row was used

    def buffer(self, level: int) -> Tensor:
        """What this level's gradients are added up in."""
        rows, buffer = self.rows[level], self.grads[level]
        if buffer is None:
            kind = torch.float64 if rows.dtype == torch.float64 else torch.float32
            buffer = self.grads[level] = torch.zeros(rows.shape, dtype=kind, device=rows.device)
        return buffer

    def gradient(self, level: int, like: Tensor) -> Tensor:
        buffer = self.grads[level]
        return torch.zeros_like(like) if buffer is None else buffer.to(like.dtype)


@dataclass(frozen=True, eq=False)
class Features:
    """Of one medium: per level ``[tokens, d]``, from row ``first`` of a call's output or kept from earlier."""

    levels: Levels
    call: Call | None = None
    first: int = 0

    @property
    def nbytes(self) -> int:
        return sum(level.nbytes for level in self.levels)

    def copy(self) -> Features:
        """Without the call, which holds what was encoded beside it."""
        return Features(tuple(level.clone() for level in self.levels))


@dataclass(eq=False)
class Visit:
    """What was encoded in one pass over a mini-batch; over once its gradients have been used."""

    found: dict[str, Features] = field(default_factory=dict)  # by digest
    done: set[int] = field(default_factory=set)  # micro-batches whose new media are encoded
    over: bool = False


Piece: TypeAlias = tuple[Features, int, int]  # which, its first row, how many


@dataclass(frozen=True, eq=False)
class Gathering:
    """Pieces end to end: where their rows lie in outputs of calls, or in features kept from earlier."""

    sources: Sequence[Call | Features]
    segments: Tensor  # as the ops take them
    total: int

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> Gathering:
        sources, numbers, rows, total = list[Call | Features](), dict[int, int](), [], 0
        for features, first, n in pieces:
            source = features.call or features
            number = numbers.setdefault(id(source), len(numbers))
            if number == len(sources):
                sources.append(source)
            rows.append((number, first + (features.first if features.call else 0), n, total))
            total += n
        return cls(sources, torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 4), total)

    def run(self) -> Levels:
        """``[total, d]`` of each level, in one launch for those of one dtype."""
        of = [source.rows if isinstance(source, Call) else source.levels for source in self.sources]
        out: list[Tensor | None] = [None] * len(of[0])
        for levels in _alike(of[0]):
            found = ops.gather_segments([[one[level] for one in of] for level in levels], self.segments, self.total)
            for level, tensor in zip(levels, found, strict=True):
                out[level] = tensor
        return tuple(tensor for tensor in out if tensor is not None)

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Each row's gradient to its call, levels that have any."""
        there = {level: grad for level, grad in enumerate(grads) if grad is not None}
        calls = [source for source in self.sources if isinstance(source, Call)]
        assert len(calls) == len(self.sources)  # only a frozen encoder keeps features without their call
        for levels in _alike(there):
            buffers = [[call.buffer(level) for call in calls] for level in levels]
            ops.accumulate_segments_(buffers, [there[level] for level in levels], self.segments)


def _alike(levels: Sequence[Tensor] | Mapping[int, Tensor]) -> list[list[int]]:
    """Levels of one dtype together."""
    out: dict[torch.dtype, list[int]] = {}
    for level, tensor in levels.items() if isinstance(levels, Mapping) else enumerate(levels):
        out.setdefault(tensor.dtype, []).append(level)
    return list(out.values())


def gather(pieces: Sequence[Piece]) -> Levels:
    """The pieces end to end, ``[n, d]`` of each level."""
    return Gathering.of(pieces).run()


def gather_with_gradient(pieces: Sequence[Piece], visit: Visit, device: torch.device) -> Levels:
    """The same, with a backward that adds each row's gradient to its call."""
    anchor = torch.zeros((), device=device, requires_grad=True)  # the features themselves need no gradient
    out: Levels = _Gather.apply(anchor, Gathering.of(pieces), visit)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, gathering: Gathering, visit: Visit) -> Levels:
        ctx.gathering, ctx.visit = gathering, visit
        ctx.set_materialize_grads(False)  # a level that the model does not use costs nothing
        return gathering.run()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        if ctx.visit.over:
            raise UsageError(
                "a loss.backward() ran after encoder.backward() or abandon(): its gradient would not reach the "
                "encoder. Call encoder.backward() once, after the last micro-batch's."
            )
        ctx.gathering.add(grads)
        return None, None, None
