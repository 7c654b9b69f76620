"""How the packing ops reach their kernels, and how what these refuse reaches the caller: in words of Python, which are
the same whatever is below."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from knit_data.errors import InvalidArgument

T = TypeVar("T")
# a CUDA graph would replay addresses; versions of torch without the tag are told at the launch only
UNSAFE_IN_GRAPHS = tuple(tag for tag in [getattr(torch.Tag, "cudagraph_unsafe", None)] if tag is not None)


def on_gpu(name: str, wrong: Callable[..., str | None], reference: Callable[..., None]) -> None:
    """Registers the Triton kernel of that name; where there is no Triton, the reference."""

    def kernel(*arguments: Any) -> None:
        tiles = _tiles()
        if tiles is None:
            reference(*arguments)
            return
        must_be_right(name, wrong(*arguments) or _wrong_for_a_launch(_tensors_of(arguments)))
        getattr(tiles, name)(*arguments)

    torch.library.impl(f"knit::{name}", "CUDA", kernel)


@functools.cache
def _tiles() -> Any:
    try:
        return importlib.import_module("knit_data.ops.tiles")
    except ImportError as error:
        logging.getLogger("knit_data").warning("the ops run without Triton (%s), much slower on a GPU", error)
        return None


def _tensors_of(arguments: Iterable[Any]) -> list[Tensor]:
    flat = [one for a in arguments for one in (a if isinstance(a, list | tuple) else [a])]
    return [one for one in flat if isinstance(one, Tensor)]


def _wrong_for_a_launch(tensors: Sequence[Tensor]) -> str | None:
    """A launch is given addresses, which hold for this call and for what lies end to end."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        return "the kernels take contiguous tensors"
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph would replay the addresses of this one call; leave it out of the capture"
    return None


def fake(name: str, made: Callable[..., Any], wrong: Callable[..., str | None]) -> None:
    """Registers what operator ``name`` makes where only shapes are known.

    torch calls it too when a real tensor is on the device "meta", whatever the others are on: it then has to refuse, or
    the result would be memory that nobody wrote.
    """

    def kernel(*arguments: Any) -> Any:
        if all(type(one) is Tensor for one in _tensors_of(arguments)):
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
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(one).tangent is not None for one in tensors):
        raise InvalidArgument("the ops have no forward-mode derivative; use the backward: autograd.grad, or vjp.")
    if torch._C._functorch.peek_interpreter_stack() is not None:  # vmap, whose tensors look like any other
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
