"""The features of a mini-batch's media: rows of encoder calls, gathered for a micro-batch, and their gradients.

A gathered row remembers where it came from. In the backward its gradient is added there, in float32, in the order in
which the micro-batches' backwards run: reproducible, and independent of how a bfloat16 sum would round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from knit_data.errors import UsageError
from knit_data.media import Medium
from knit_data.surroundings import Surroundings, Weights

Levels: TypeAlias = tuple[Tensor, ...]


@dataclass(eq=False)
class Call:
    """One run of an encoder over a few media; without gradients if it only kept step with other ranks."""

    media: Sequence[Medium]
    out: Levels  # detached where the graph is not kept
    surroundings: Surroundings
    weights: Weights
    training: tuple[bool, ...]
    grads: list[Tensor | None]  # per level, float32 (float64 if the features are); None: no row was used

    def add(self, level: int, first: int, grad: Tensor) -> None:
        out, buffer = self.out[level], self.grads[level]
        if buffer is None:
            kind = torch.float64 if out.dtype == torch.float64 else torch.float32
            buffer = self.grads[level] = torch.zeros(out.shape, dtype=kind, device=out.device)
        buffer[first : first + len(grad)] += grad

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


def gather(level: int, pieces: Sequence[Piece]) -> Tensor:
    """The pieces end to end, ``[n, d]``."""
    return torch.cat([f.levels[level][first : first + n] for f, first, n in pieces])


def gather_with_gradient(level: int, pieces: Sequence[Piece], visit: Visit, device: torch.device) -> Tensor:
    """The same, with a backward that adds each row's gradient to its call."""
    anchor = torch.zeros((), device=device, requires_grad=True)  # the features themselves need no gradient
    out: Tensor = _Gather.apply(anchor, level, pieces, visit)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, level: int, pieces: Sequence[Piece], visit: Visit) -> Tensor:
        ctx.level, ctx.pieces, ctx.visit = level, pieces, visit
        return gather(level, pieces)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        if ctx.visit.over:
            raise UsageError(
                "a loss.backward() ran after encoder.backward() or abandon(): its gradient would not reach the "
                "encoder. Call encoder.backward() once, after the last micro-batch's."
            )
        for (features, first, _), part in zip(ctx.pieces, grad.split([n for *_, n in ctx.pieces]), strict=True):
            if features.call is not None:
                features.call.add(ctx.level, features.first + first, part)
        return None, None, None, None
