"""Segments of several sources to their places in one tensor, and what is found there back to the sources.

    sources    [A B C D], [E F]
    segments   [[0, 1, 2, 0], [1, 0, 1, 3], [0, 1, 1, 4]]     see tables.py
    gathered   [B C 0 E B]
    gradients  [p q r s t] at these places: to A 0, B p + t, C q, D 0; E s, F 0

One call serves several levels, each with sources and a packed tensor of its own, and the same segments. A sum is made
row by row in the order of the segments, so it comes out the same, bit by bit, on every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from knit_data.errors import InvalidArgument
from knit_data.ops.dispatch import UNSAFE_IN_GRAPHS, at_least_0, fake, must_be_right, on_gpu, recorded, run
from knit_data.ops.tables import SUMS, numbers_of, wrong_data, wrong_levels, wrong_segments

_DEVICE = "CompositeExplicitAutograd"
Tensors: TypeAlias = Sequence[Tensor]


def gather_segments(sources: Tensor | Tensors | Sequence[Tensors], segments: Tensor, total: int) -> Any:
    """Segments at their places in a new tensor ``[total, *]``; zeros where there are none.

    Args:
        sources: a tensor ``[rows, *]`` or several, of one dtype, device and trailing shape; or for each of several
            levels as many, of equal rows, where trailing shapes may differ between levels.
        segments: ``[S, 4]`` int32 or int64 on the CPU: source, first row, length, place. Places do not overlap.
        total: rows of the result.

    Returns:
        A tensor, or a tuple of them, one a level. It has gradients for float64, float32, bfloat16, float16 and
        complex64: summed in float32 (float64 for float64) and rounded once.

    Raises:
        InvalidArgument: before anything is moved.
    """
    _must_be_a_table("gather_segments", segments)
    flat, levels = _flat(sources)
    kernel = torch.ops.knit.gather_segments.default if recorded(flat) else _gather
    outs: list[Tensor] = kernel(flat, segments, total, levels or 1)
    return tuple(outs) if levels else outs[0]


def scatter_segments(base: Tensor, sources: Tensor | Tensors, segments: Tensor) -> Tensor:
    """A copy of ``base`` ``[T, *]`` with segments of the sources, of its dtype, in their places.

    Base rows [a b c], sources ([d e]), segments [[0, 1, 1, 2]]: [a b e]. See ``gather_segments``, also for what raises.
    """
    _must_be_a_table("scatter_segments", segments)
    flat, _ = _flat(sources)
    kernel = torch.ops.knit.scatter_segments.default if recorded([base, *flat]) else _scatter
    out: Tensor = kernel(base, flat, segments)
    return out


def scatter_segments_(base: Tensor, sources: Tensor | Tensors, segments: Tensor) -> Tensor:
    """Writes the segments into ``base`` and returns it. Not differentiable: see ``scatter_segments``. The sources share
    no memory with it."""
    _must_be_a_table("scatter_segments", segments)
    flat = _flat(sources)[0]
    _no_gradient("scatter_segments_", [base, *flat], "scatter_segments")
    kernel = torch.ops.knit.scatter_segments_.default if recorded([base, *flat]) else _scatter_
    kernel(base, flat, segments)
    return base


def accumulate_segments(grads: Tensor | Tensors, segments: Tensor, rows: Sequence[int]) -> Any:
    """What ``gather_segments`` makes of gradients: for each source a new ``[rows, *]``, the sum of what is at its
    segments' places.

    Args:
        grads: ``[T, *]`` float64, float32, bfloat16 or float16; or one a level.
        segments: as in ``gather_segments``.
        rows: of each source.

    Returns:
        A list of tensors, one a source; or a tuple of such, one a level. float64 for float64, else float32.
    """
    _must_be_a_table("accumulate_segments", segments)
    levels = [grads] if isinstance(grads, Tensor) else list(grads)
    kernel = torch.ops.knit.accumulate_segments.default if recorded(levels) else _accumulate
    flat = kernel(levels, segments, list(rows))
    each = [flat[k * len(rows) : (k + 1) * len(rows)] for k in range(len(levels))]
    return each[0] if isinstance(grads, Tensor) else tuple(each)


def accumulate_segments_(
    buffers: Tensor | Tensors | Sequence[Tensors], grads: Tensor | Tensors, segments: Tensor
) -> None:
    """Adds to buffers that are there: ``buffers`` as the sources of ``gather_segments``, float64 for float64 gradients,
    else float32. They share no memory with each other."""
    _must_be_a_table("accumulate_segments", segments)
    flat, _ = _flat(buffers)
    levels = [grads] if isinstance(grads, Tensor) else list(grads)
    _no_gradient("accumulate_segments_", [*flat, *levels], "accumulate_segments")
    kernel = torch.ops.knit.accumulate_segments_.default if recorded([*flat, *levels]) else _accumulate_
    kernel(flat, levels, segments)


def _must_be_a_table(op: str, segments: Tensor) -> None:
    if not isinstance(segments, Tensor):
        raise InvalidArgument(f"{op}: segments must be a tensor [n, 4] of int32 or int64, found {segments!r:.80}.")


def _flat(sources: Tensor | Tensors | Sequence[Tensors]) -> tuple[list[Tensor], int]:
    """The sources of all levels one after the other, and how many levels there are; 0: they came without."""
    if isinstance(sources, Tensor):
        return [sources], 0
    if not sources or isinstance(sources[0], Tensor):
        return list(sources), 0  # type: ignore[arg-type]
    if len({len(level) for level in sources}) != 1:
        raise InvalidArgument(
            f"levels must have the same number of sources, found {[len(level) for level in sources]}."
        )
    return [source for level in sources for source in level], len(sources)


def _no_gradient(op: str, tensors: Tensors, other: str) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise InvalidArgument(f"{op} writes in place and has no gradient; call {other}, or it under torch.no_grad().")


# -- operators ---------------------------------------------------------------------------------------------------------

for _name, _schema in {
    "gather_segments": "(Tensor[] sources, Tensor segments, SymInt total, int levels) -> Tensor[]",
    "scatter_segments": "(Tensor base, Tensor[] sources, Tensor segments) -> Tensor",
    "scatter_segments_": "(Tensor(a!) base, Tensor[] sources, Tensor segments) -> ()",
    "accumulate_segments": "(Tensor[] grads, Tensor segments, SymInt[] rows) -> Tensor[]",
    "accumulate_segments_": "(Tensor(a!)[] buffers, Tensor[] grads, Tensor segments) -> ()",
    "copy_segments": "(Tensor(a!)[] outs, Tensor[] sources, Tensor segments, bool fill) -> ()",
    "add_segments": "(Tensor(a!)[] buffers, Tensor[] grads, Tensor segments) -> ()",
}.items():
    torch.library.define(f"knit::{_name}", _schema, tags=UNSAFE_IN_GRAPHS)


def _gather(sources: list[Tensor], segments: Tensor, total: int, levels: int) -> list[Tensor]:
    fits = levels >= 1 and sources and len(sources) % levels == 0
    must_be_right("gather_segments", None if fits else f"there are {len(sources)} sources for {levels} levels")

    def work() -> list[Tensor]:
        outs = _empty(sources, total, levels)
        torch.ops.knit.copy_segments.default(outs, _contiguous(sources), segments.contiguous(), True)
        return outs

    return run("gather_segments", work, lambda: _wrong_gather(sources, segments, total, levels))


def _scatter_(base: Tensor, sources: list[Tensor], segments: Tensor) -> None:
    def work() -> None:
        (out,) = _contiguous([base])
        torch.ops.knit.copy_segments.default([out], _contiguous(sources), segments.contiguous(), False)
        _written([out], [base])

    run("scatter_segments", work, lambda: _wrong(base, sources, segments))


def _scatter(base: Tensor, sources: list[Tensor], segments: Tensor) -> Tensor:
    def work() -> Tensor:
        out = base.clone(memory_format=torch.contiguous_format)
        torch.ops.knit.copy_segments.default([out], _contiguous(sources), segments.contiguous(), False)
        return out

    return run("scatter_segments", work, lambda: _wrong(base, sources, segments))


def _accumulate(grads: list[Tensor], segments: Tensor, rows: list[int]) -> list[Tensor]:
    must_be_right("accumulate_segments", _wrong_rows(rows))
    out = _buffers(grads, rows)
    _accumulate_(out, grads, segments)
    return out


def _accumulate_(buffers: list[Tensor], grads: list[Tensor], segments: Tensor) -> None:
    def work() -> None:
        outs = _contiguous(buffers)
        torch.ops.knit.add_segments.default(outs, _contiguous(grads), segments.contiguous())
        _written(outs, buffers)

    must_be_right("accumulate_segments", _wrong_twice(buffers))
    run("accumulate_segments", work, lambda: _wrong_sum(buffers, grads, segments))


def _contiguous(tensors: Tensors) -> list[Tensor]:
    """The tensors themselves where they are what a kernel takes: numbers end to end, none of them to be negated yet."""
    return [
        tensor
        if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
        else tensor.resolve_conj().resolve_neg().contiguous()
        for tensor in tensors
    ]


def _written(outs: Tensors, tensors: Tensors) -> None:
    """What was written to ``outs`` belongs to ``tensors``, which autograd has to hear of."""
    for out, tensor in zip(outs, tensors, strict=True):
        if out is not tensor:
            tensor.copy_(out)
    torch.autograd.graph.increment_version(tensors)


def _empty(sources: Tensors, total: int, levels: int) -> list[Tensor]:
    count = len(sources) // levels
    return [sources[k * count].new_empty((total, *sources[k * count].shape[1:])) for k in range(levels)]


def _buffers(grads: Tensors, rows: Sequence[int]) -> list[Tensor]:
    kinds = [torch.float64 if grad.dtype == torch.float64 else torch.float32 for grad in grads]
    return [g.new_zeros((n, *g.shape[1:]), dtype=kind) for g, kind in zip(grads, kinds, strict=True) for n in rows]


# -- what is wrong -----------------------------------------------------------------------------------------------------


def _wrong_rows(rows: Sequence[int]) -> str | None:
    return None if min(rows, default=0) >= 0 else f"rows must not be negative, found {list(rows)}"


def _wrong_twice(buffers: Tensors) -> str | None:
    places = [buffer.data_ptr() for buffer in buffers if buffer.numel()]
    return None if len(set(places)) == len(places) else "two of the buffers are the same memory"


def _wrong(packed: Tensor | Tensors, sources: Tensors, segments: Tensor, _fill: bool = False) -> str | None:
    packed = [packed] if isinstance(packed, Tensor) else packed
    return wrong_data(base=packed, sources=sources) or _wrong_places(packed, sources, segments)


def _wrong_places(packed: Tensors, sources: Tensors, segments: Tensor) -> str | None:
    if (wrong := wrong_levels(packed, sources)) is not None:
        return wrong
    table = numbers_of("segments", segments, 4)
    if isinstance(table, str):
        return table
    rows = [source.shape[0] for source in sources[: len(sources) // len(packed)]]
    return wrong_segments(table, rows, packed[0].shape[0])


def _wrong_gather(sources: Tensors, segments: Tensor, total: int, levels: int) -> str | None:
    if total < 0:
        return f"total must be at least 0, found {total}"
    if (wrong := wrong_data(sources=sources)) is not None:
        return wrong
    return _wrong_places(_empty([s[:0] for s in sources], total, levels), sources, segments)


def _wrong_sum(buffers: Tensors, grads: Tensors, segments: Tensor) -> str | None:
    wrong = wrong_data(grads=grads) or wrong_data(buffers=buffers)
    if wrong is None and grads and grads[0].dtype not in SUMS:
        wrong = f"gradients are {grads[0].dtype}, they must be one of {[str(dtype) for dtype in SUMS]}"
    if wrong is None and grads and buffers:
        kind = torch.float64 if grads[0].dtype == torch.float64 else torch.float32
        if buffers[0].dtype != kind or buffers[0].device != grads[0].device:
            wrong = (
                f"buffers are {buffers[0].dtype} on {buffers[0].device}; gradients of {grads[0].dtype} on "
                f"{grads[0].device} are summed in {kind} there"
            )
    return wrong or _wrong_places(grads, buffers, segments)


# -- references --------------------------------------------------------------------------------------------------------


def copy_segments_reference(outs: list[Tensor], sources: list[Tensor], segments: Tensor, fill: bool) -> None:
    """The specification, segment by segment; also the kernel where there is no other."""
    must_be_right("segments", _wrong(outs, sources, segments))
    count = len(sources) // len(outs)
    for k, out in enumerate(outs):
        if fill:
            out.zero_()
        for source, first, length, place in segments.tolist():
            out[place : place + length] = sources[k * count + source][first : first + length]


def add_segments_reference(buffers: list[Tensor], grads: list[Tensor], segments: Tensor) -> None:
    """The specification, segment by segment."""
    must_be_right("accumulate_segments", _wrong_sum(buffers, grads, segments))
    count = len(buffers) // len(grads)
    for k, grad in enumerate(grads):
        for source, first, length, place in segments.tolist():
            buffer = buffers[k * count + source]
            buffer[first : first + length] += grad[place : place + length].to(buffer.dtype)


_KERNELS: dict[str, Callable[..., object]] = {
    "knit::gather_segments": _gather,
    "knit::scatter_segments_": _scatter_,
    "knit::scatter_segments": _scatter,
    "knit::accumulate_segments": _accumulate,
    "knit::accumulate_segments_": _accumulate_,
    "knit::copy_segments": copy_segments_reference,
    "knit::add_segments": add_segments_reference,
}
for _name, _kernel in _KERNELS.items():
    torch.library.impl(_name, _DEVICE, _kernel)  # on any device that has no kernel of its own


on_gpu("copy_segments", _wrong, copy_segments_reference)
on_gpu("add_segments", _wrong_sum, add_segments_reference)


# -- fake and autograd -------------------------------------------------------------------------------------------------

fake("gather_segments", lambda sources, _, total, levels: _empty(sources, at_least_0(total), levels), _wrong_gather)
fake("scatter_segments", lambda base, *_: torch.empty_like(base, memory_format=torch.contiguous_format), _wrong)
fake(
    "accumulate_segments",
    lambda grads, _, rows: _buffers(grads, [at_least_0(n) for n in rows]),
    lambda grads, segments, rows: _wrong_rows(rows) or _wrong_sum(_buffers(grads, rows), grads, segments),
)
fake("scatter_segments_", lambda *_: None, _wrong)
fake("accumulate_segments_", lambda *_: None, _wrong_sum)
fake("copy_segments", lambda *_: None, _wrong)
fake("add_segments", lambda *_: None, _wrong_sum)


def _remember_gather(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    del output
    sources, segments, _, levels = inputs
    ctx.save_for_backward(segments)
    ctx.rows = [source.shape[0] for source in sources[: len(sources) // levels]]
    ctx.dtype = sources[0].dtype


def _gather_backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor], None, None, None]:
    (segments,) = ctx.saved_tensors
    return _summed(list(grads), segments, ctx.rows, ctx.dtype), None, None, None


def _summed(grads: list[Tensor], segments: Tensor, rows: list[int], dtype: torch.dtype) -> list[Tensor]:
    """Gradients of sources of this dtype; complex numbers are pairs."""
    if dtype.is_complex:
        pairs = [torch.view_as_real(grad.resolve_conj()) for grad in grads]
        return [torch.view_as_complex(one) for one in _summed(pairs, segments, rows, dtype.to_real())]
    return [one.to(dtype) for one in torch.ops.knit.accumulate_segments.default(grads, segments, rows)]


def _remember_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    _, sources, segments = inputs
    ctx.save_for_backward(segments)
    ctx.rows, ctx.dtype = [source.shape[0] for source in sources], sources[0].dtype


def _scatter_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, list[Tensor], None]:
    (segments,) = ctx.saved_tensors
    blank = [grad.new_zeros((n, *grad.shape[1:])) for n in ctx.rows]
    outside = torch.ops.knit.scatter_segments.default(grad, blank, segments)
    return outside, _summed([grad], segments, ctx.rows, ctx.dtype), None


def _remember_sum(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    del output
    grads, segments, _ = inputs
    ctx.save_for_backward(segments)
    ctx.total, ctx.dtype, ctx.levels = grads[0].shape[0], grads[0].dtype, len(grads)


def _sum_backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor], None, None]:
    (segments,) = ctx.saved_tensors
    outs = torch.ops.knit.gather_segments.default(list(grads), segments, ctx.total, ctx.levels)
    return [out.to(ctx.dtype) for out in outs], None, None


torch.library.register_autograd("knit::gather_segments", _gather_backward, setup_context=_remember_gather)
torch.library.register_autograd("knit::scatter_segments", _scatter_backward, setup_context=_remember_scatter)
torch.library.register_autograd("knit::accumulate_segments", _sum_backward, setup_context=_remember_sum)
