"""How the packing ops reach their kernels, and how what these refuse reaches the caller: in words of Python, which are
the same whatever is below.

    pack(rows, cu_seqlens)       the public function: what may be left out is put in
    operator("pack", ...)        records a gradient if one is asked for; goes through torch's dispatcher for graphs,
                                 modes and tensors that are more than one
    _pack(rows, cu, total)       the work: makes the result, calls a kernel; says what is wrong if that refuses
    kernel("pack_rows", ...)     C++, Triton or the reference, by the device
"""

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
_ANYWHERE = "CompositeExplicitAutograd"  # on any device that has no kernel of its own
_LISTS = (list, tuple)
_PLAIN = frozenset[type]({Tensor, torch.nn.Parameter})  # types whose data is what it seems
# a CUDA graph would replay addresses; versions of torch without the tag are told at the launch only
UNSAFE_IN_GRAPHS = tuple(tag for tag in [getattr(torch.Tag, "cudagraph_unsafe", None)] if tag is not None)


def kernel(name: str, schema: str, wrong: Callable[..., str | None], reference: Callable[..., None]) -> None:
    """Defines what back ends implement: C++ on the CPU, Triton on CUDA, the reference where there is neither.

    ``wrong`` says of its arguments why they are refused; it returns nothing, and writes to the first of them.
    """
    torch.library.define(f"knit::{name}", schema, tags=UNSAFE_IN_GRAPHS)
    torch.library.impl(f"knit::{name}", _ANYWHERE, reference)
    on_gpu(name, wrong, reference)
    fake(name, lambda *_: None, wrong)


def operator(
    name: str,
    schema: str,
    work: Callable[..., T],
    made: Callable[..., Any],
    wrong: Callable[..., str | None],
    gradient: tuple[Callable[..., None], Callable[..., Any]] | None = None,
) -> Callable[..., T]:
    """Defines a public op by its ``work``, what is ``made`` where only shapes are known, what is ``wrong`` with its
    arguments, and its ``gradient``: what to remember, and the backward, as for ``torch.library.register_autograd``.

    The function that it returns does the work itself where nothing is to be recorded, and has a node of its own for a
    gradient: torch's dispatcher and its general node cost several times as much as a tiny op.
    """
    torch.library.define(f"knit::{name}", schema, tags=UNSAFE_IN_GRAPHS)
    torch.library.impl(f"knit::{name}", _ANYWHERE, work)
    fake(name, made, wrong)
    dispatched = getattr(torch.ops.knit, name).default
    node = None
    if gradient is not None:
        remember, backward = gradient
        torch.library.register_autograd(f"knit::{name}", backward, setup_context=remember)
        node = _node(name, work, remember, backward)

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return dispatched(*arguments)
        plain, differentiable = _kinds(arguments)
        if not plain or _is_watched(arguments):
            return dispatched(*arguments)
        if not differentiable or not torch.is_grad_enabled():
            return work(*arguments)
        if node is None:
            return dispatched(*arguments)
        lengths = [len(one) if _is_several(one) else -1 for one in arguments]
        flat = [one for a in arguments for one in (a if _is_several(a) else [a])]
        out = node.apply(lengths, *flat)
        return list(out) if isinstance(out, tuple) else out

    return call


def _is_several(argument: Any) -> bool:
    return isinstance(argument, _LISTS) and bool(argument) and isinstance(argument[0], Tensor)


def _node(name: str, work: Callable[..., Any], remember: Callable[..., None], backward: Callable[..., Any]) -> Any:
    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, lengths: list[int], *flat: Any) -> Any:
            """``lengths``: of the lists among the arguments, -1 where it is none."""
            at, arguments = 0, []
            for length in lengths:
                arguments.append(flat[at] if length < 0 else list(flat[at : at + length]))
                at += max(length, 1)
            out = work(*arguments)
            remember(ctx, tuple(arguments), out)
            ctx.lengths, ctx.several = lengths, isinstance(out, list)
            return tuple(out) if ctx.several else out

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
            found = backward(ctx, list(grads) if ctx.several else grads[0])
            out: list[Any] = [None]
            for one, length in zip(found, ctx.lengths, strict=True):
                out += one if length >= 0 else [None if isinstance(one, list) else one]  # an empty list is one argument
            return tuple(out)

    return type(f"knit_{name}", (Node,), {})  # as profilers and grad_fn name it


def on_gpu(name: str, wrong: Callable[..., str | None], reference: Callable[..., None]) -> None:
    """Registers the Triton kernel of that name; where there is no Triton, the reference."""

    def launch(*arguments: Any) -> None:
        tiles = _tiles()
        if tiles is None:
            reference(*arguments)
            return
        must_be_right(name, wrong(*arguments) or _wrong_for_a_launch(_tensors_of(arguments)))
        getattr(tiles, name)(*arguments)

    torch.library.impl(f"knit::{name}", "CUDA", launch)


@functools.cache
def _tiles() -> Any:
    try:
        return importlib.import_module("knit_data.ops.tiles")
    except ImportError as error:
        logging.getLogger("knit_data").warning("the ops run without Triton (%s), much slower on a GPU", error)
        return None


def _tensors_of(arguments: Iterable[Any]) -> list[Tensor]:
    """Those among them, and in lists among them."""
    out = list[Tensor]()
    for one in arguments:
        if isinstance(one, Tensor):
            out.append(one)
        elif _is_several(one):
            out += one
    return out


def _wrong_for_a_launch(tensors: Sequence[Tensor]) -> str | None:
    """A launch is given addresses, which hold for this call, for what lies end to end, and for whole elements."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        return "the kernels take contiguous tensors"
    there = [tensor for tensor in tensors if tensor.is_cuda]
    if any(tensor.data_ptr() % tensor.element_size() for tensor in there):
        return "a tensor begins at an address that is no multiple of its element's size; clone it"
    for device in {tensor.device for tensor in there}:
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                return "a CUDA graph would replay the addresses of this one call; leave it out of the capture"
    return None


def fake(name: str, made: Callable[..., Any], wrong: Callable[..., str | None]) -> None:
    """Registers what operator ``name`` makes where only shapes are known.

    torch calls it too when a real tensor is on the device "meta", whatever the others are on: it then has to refuse, or
    the result would be memory that nobody wrote.
    """

    def kernel(*arguments: Any) -> Any:
        if _PLAIN.issuperset(map(type, _tensors_of(arguments))):
            must_be_right(name.rstrip("_"), wrong(*arguments))
        return made(*arguments)

    torch.library.register_fake(f"knit::{name}", kernel)


def at_least_0(size: Any) -> Any:
    """For fakes: the words for a negative size are the kernel's. Sizes without a value stay as they are."""
    return max(size, 0) if isinstance(size, int) else size


def _kinds(arguments: Iterable[Any]) -> tuple[bool, bool]:
    """Whether the tensors among them are no more than that, and whether one requires a gradient. A plain loop, as it is
    much of what a tiny op costs beside its kernel."""
    plain, differentiable = True, False
    for argument in arguments:
        for one in argument if type(argument) is list else (argument,):
            if type(one) in _PLAIN:
                differentiable = differentiable or one.requires_grad
            elif isinstance(one, Tensor):
                plain = False
    return plain, differentiable


def _is_watched(arguments: Iterable[Any]) -> bool:
    """Whether a mode (selective checkpoints, fake tensors), a transform or a trace wants to see the op."""
    if forward_ad._current_level >= 0:
        if any(forward_ad.unpack_dual(one).tangent is not None for one in _tensors_of(arguments)):
            raise InvalidArgument("the ops have no forward-mode derivative, call backward() or torch.autograd.grad.")
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def contiguous(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors themselves where they are what a kernel takes: numbers end to end, none of them to be negated yet."""
    return [
        tensor
        if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
        else tensor.resolve_conj().resolve_neg().contiguous()
        for tensor in tensors
    ]


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


def must_be_tensors(op: str, *values: object) -> None:
    for one in values:
        if not isinstance(one, Tensor):
            raise InvalidArgument(f"{op}: takes tensors (tables too, of int32 or int64), found {one!r:.80}.")
