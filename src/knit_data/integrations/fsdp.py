"""FSDP2, and DDP."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from knit_data.errors import InvalidArgument


def sum_gradients(model: nn.Module) -> None:
    """Make every FSDP2 unit of ``model``, or DDP, sum gradients over ranks instead of averaging them.

    The loss is divided by ``mini.loss_tokens``, which counts over all ranks, so the sum is the gradient of the whole
    mini-batch. ``set_gradient_divide_factor(1.0)`` alone fails on gloo; forced sum reduction works there as well.
    Call it after ``fully_shard``, or once after wrapping in DDP, which gets a communication hook.
    """
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(
            model.process_group, lambda group, bucket: _sum(group, bucket)
        )  # DDP reads annotations
        return
    units = [m for m in model.modules() if isinstance(m, FSDPModule)]
    if not units:
        raise InvalidArgument(
            f"sum_gradients needs a model that fully_shard was applied to, found a plain {type(model).__name__}; call "
            "it after fully_shard(model), or on the model in DDP."
        )
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _sum(group: dist.ProcessGroup, bucket: Any) -> Future[Tensor]:
    reduced = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert reduced is not None
    first: Future[Tensor] = reduced.get_future().then(lambda done: done.value()[0])
    return first
