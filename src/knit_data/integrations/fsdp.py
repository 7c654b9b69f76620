"""FSDP2."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from knit_data.errors import InvalidArgument


def sum_gradients(model: nn.Module) -> None:
    """Make every FSDP2 unit of ``model`` sum gradients over ranks instead of averaging them.

    The loss is divided by ``mini.loss_tokens``, which counts over all ranks, so the sum is the gradient of the whole
    mini-batch. ``set_gradient_divide_factor(1.0)`` alone fails on gloo; forced sum reduction works there as well.
    Call it after ``fully_shard``.
    """
    units = [m for m in model.modules() if isinstance(m, FSDPModule)]
    if not units:
        raise InvalidArgument(
            f"sum_gradients needs a model that fully_shard was applied to, found a plain {type(model).__name__}; call "
            "it after fully_shard(model)."
        )
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
