"""How the packing ops reach their kernels, and how what these refuse reaches the caller: in words of Python, which are
the same whatever is below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from knit_data.errors import InvalidArgument

T = TypeVar("T")


def on_gpu(name: str, wrong: Callable[..., str | None], reference: Callable[..., None]) -> None:
    """Registers the Triton kernel of that name; where there is no Triton, the reference."""

    def kernel(*arguments: Any) -> None:
        try:
            from knit_data.ops import tiles
        except ImportError:
            reference(*arguments)
            return
        must_be_right(name, wrong(*arguments))
        getattr(tiles, name)(*arguments)

    torch.library.impl(f"knit::{name}", "CUDA", kernel)


def fake(name: str, made: Callable[..., Any], wrong: Callable[..., str | None]) -> None:
    """Registers what operator ``name`` makes where only shapes are known.

    torch calls it too when a real tensor is on the device "meta", whatever the others are on: it then has to refuse, or
    the result would be memory that nobody wrote.
    """

    def kernel(*arguments: Any) -> Any:
        tensors = [one for a in arguments for one in (a if isinstance(a, (list, tuple)) else [a])]
        if all(type(one) is Tensor for one in tensors if isinstance(one, Tensor)):
            must_be_right(name.rstrip("_"), wrong(*arguments))
        return made(*arguments)

    torch.library.register_fake(f"knit::{name}", kernel)


def at_least_0(size: Any) -> Any:
    """For fakes: the words for a negative size are the kernel's. Sizes without a value stay as they are."""
    return max(size, 0) if isinstance(size, int) else size


def recorded(tensors: Sequence[Tensor]) -> bool:
    """Whether an operator on these has to go through torch's dispatcher: there is a gradient to record, or a graph, or
    a tensor that is more than one. Else its kernel can be called itself, which saves most of a tiny call's time."""
    if torch.compiler.is_compiling() or any(type(tensor) is not Tensor for tensor in tensors):
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def run(op: str, work: Callable[[], T], refusal: Callable[[], str | None]) -> T:
    """Does ``work``; where a kernel refuses, in the words of ``refusal``, which are the same on every back end."""
    try:
        return work()
    except (RuntimeError, InvalidArgument):
        if (wrong := refusal()) is None:
            raise
    raise InvalidArgument(f"{op}: {wrong}.")


def must_be_right(op: str, wrong: str | None) -> None:
    if wrong is not None:
        raise InvalidArgument(f"{op}: {wrong}.")
