"""When the gradients of a model cross ranks: once a mini-batch, with the encoder's last backward."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_BUCKET = 25 << 20  # bytes reduced at once, as DistributedDataParallel does


class GradSync:
    """Holds back the gradient sync of one module, which is under FSDP2, under DDP, plain, or absent.

    DDP reduces in the backward of its own forward, and an encoder that runs beside that forward is not part of it. So
    all of a mini-batch's backwards run unreduced, and ``reduce`` sums what they left over ranks, once. Gradients that
    were there before, of earlier mini-batches, are set aside meanwhile.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self.module = module
        self.held = False  # gradients are on their ranks until reduce() or release()
        self._before: dict[nn.Parameter, Tensor] = {}

    @property
    def in_step(self) -> bool:
        """Whether every rank must make the same calls: another one's would wait for this one's."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return False
        return self.module is None or bool(_units(self.module))

    def hold(self) -> None:
        """Before a forward of the module."""
        if not isinstance(self.module, DistributedDataParallel):
            return
        self.module.require_backward_grad_sync = False
        if not self.held:
            self.held = True
            for p in self.module.parameters():
                if p.grad is not None:
                    self._before[p], p.grad = p.grad, None

    def last(self, on: bool) -> None:
        """Before a backward of the encoder; ``on``: it is the last one."""
        if self.module is not None:
            for unit in _units(self.module):
                unit.set_requires_gradient_sync(on, recurse=False)

    def release(self) -> None:
        """The next forward of the module syncs as usual. What was held and not reduced is dropped."""
        if self.held and isinstance(self.module, DistributedDataParallel):
            self.module.require_backward_grad_sync = True
            for p in self.module.parameters():
                p.grad = self._before.get(p)
        self.held, self._before = False, {}

    def reduce(self) -> None:
        """Sum over ranks what was held."""
        if not self.held or not isinstance(self.module, DistributedDataParallel):
            return
        group = self.module.process_group
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        there = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=parameters[0].device)
        dist.all_reduce(there, dist.ReduceOp.MAX, group)
        grads = []
        for parameter, anywhere in zip(parameters, there.tolist(), strict=True):
            if anywhere:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                grads.append(parameter.grad)
        for bucket in _buckets(grads):
            flat = torch.cat([g.reshape(-1) for g in bucket])
            dist.all_reduce(flat, dist.ReduceOp.SUM, group)
            for grad, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                grad.copy_(part.view_as(grad))
        for parameter, before in self._before.items():
            parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        self.module.require_backward_grad_sync = True
        self.held, self._before = False, {}


def _units(module: nn.Module) -> list[Any]:
    """Its parts that are under FSDP2. Whoever put them there has imported that; here it would take every rollout worker
    a second."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [part for part in module.modules() if isinstance(part, fsdp.FSDPModule)]


def _buckets(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of one dtype and device, of at most ``_BUCKET`` bytes or one tensor."""
    bucket: list[Tensor] = []
    for grad in grads:
        size = sum(g.nbytes for g in bucket) + grad.nbytes
        if bucket and (size > _BUCKET or (grad.dtype, grad.device) != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket = []
        bucket.append(grad)
    if bucket:
        yield bucket
