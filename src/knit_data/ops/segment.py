"""Segments of several sources to their places in one tensor, and what is found there back to the sources.

    sources    [A B C D], [E F]
    segments   [[0, 1, 2, 0], [1, 0, 1, 3], [0, 1, 1, 4]]     see tables.py
    gathered   [B C 0 E B]
    gradients  [p q r s t] at these places: to A 0, B p + t, C q, D 0; E s, F 0

One call serves several levels, each with sources and a packed tensor of its own, and the same segments. A sum is made
row by row in the order of the segments, so it comes out the same, bit by bit, on every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from knit_data.errors import InvalidArgument
from knit_data.ops.dispatch import at_least_0, contiguous, kernel, must_be_right, must_be_tensors, operator, run
from knit_data.ops.tables import SUMS, numbers_of, wrong_data, wrong_levels, wrong_memory, wrong_segments, wrong_views

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
        complex64: of a row that is used more than once summed in float32 (float64 for float64) and rounded once.

    Raises:
        InvalidArgument: before anything is moved.
    """
    flat, levels = _flat("gather_segments", sources, segments)
    outs = _gathered(flat, segments, total, levels or 1)
    return tuple(outs) if levels else outs[0]


def scatter_segments(base: Tensor, sources: Tensor | Tensors, segments: Tensor) -> Tensor:
    """A copy of ``base`` ``[T, *]`` with segments of the sources, of its dtype, in their places.

    Base rows [a b c], sources ([d e]), segments [[0, 1, 1, 2]]: [a b e]. See ``gather_segments``, also for what raises.
    """
    must_be_tensors("scatter_segments", base)
    flat, _ = _flat("scatter_segments", sources, segments)
    return _scattered(base, flat, segments)


def scatter_segments_(base: Tensor, sources: Tensor | Tensors, segments: Tensor) -> Tensor:
    """Writes the segments into ``base`` and returns it. Not differentiable: see ``scatter_segments``. The sources share
    no memory with it; that is refused, but for a compiled graph, which works on copies."""
    must_be_tensors("scatter_segments", base)
    flat, _ = _flat("scatter_segments", sources, segments)
    _no_gradient("scatter_segments_", [base, *flat], "scatter_segments")
    _write(base, flat, segments)
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
    levels, _ = _flat("accumulate_segments", grads, segments)
    if not isinstance(rows, Sequence):
        raise InvalidArgument(f"accumulate_segments: rows must be a list of ints, one a source, found {rows!r:.80}.")
    flat = _accumulated(levels, segments, list(rows))
    each = [flat[k * len(rows) : (k + 1) * len(rows)] for k in range(len(levels))]
    return each[0] if isinstance(grads, Tensor) else tuple(each)


def accumulate_segments_(
    buffers: Tensor | Tensors | Sequence[Tensors], grads: Tensor | Tensors, segments: Tensor
) -> None:
    """Adds to buffers that are there: ``buffers`` as the sources of ``gather_segments``, float64 for float64 gradients,
    else float32. They share no memory with each other."""
    flat, _ = _flat("accumulate_segments", buffers, segments)
    levels, _ = _flat("accumulate_segments", grads, segments)
    _no_gradient("accumulate_segments_", [*flat, *levels], "accumulate_segments")
    _add(flat, levels, segments)


def _flat(op: str, sources: Tensor | Tensors | Sequence[Tensors], segments: Tensor) -> tuple[list[Tensor], int]:
    """The sources of all levels one after the other, and how many levels there are; 0: they came without."""
    levels = 0
    if isinstance(sources, Tensor):
        flat = [sources]
    elif not sources or not isinstance(sources[0], list | tuple):
        flat = list(sources)  # type: ignore[arg-type]
    else:
        if len({len(level) for level in sources}) != 1:
            found = [len(level) for level in sources]
            raise InvalidArgument(f"{op}: levels must have the same number of sources, found {found}.")
        flat, levels = [source for level in sources for source in level], len(sources)
    must_be_tensors(op, segments, *flat)
    return flat, levels


def _no_gradient(op: str, tensors: Tensors, other: str) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise InvalidArgument(f"{op} writes in place and has no gradient; call {other}, or it under torch.no_grad().")


# -- work --------------------------------------------------------------------------------------------------------------


def _gather(sources: list[Tensor], segments: Tensor, total: int, levels: int) -> list[Tensor]:
    must_be_right("gather_segments", _wrong_count(sources, levels))

    def work() -> list[Tensor]:
        outs = _empty(sources, total, levels)
        torch.ops.knit.copy_segments.default(outs, contiguous(sources), segments.contiguous(), True)
        return outs

    return run("gather_segments", work, lambda: _wrong_gather(sources, segments, total, levels))


def _scatter_(base: Tensor, sources: list[Tensor], segments: Tensor) -> None:
    def work() -> None:
        (out,) = contiguous([base])
        if out is not base:
            must_be_right("scatter_segments", wrong_views([base]))
        torch.ops.knit.copy_segments.default([out], contiguous(sources), segments.contiguous(), False)
        _written([out], [base])

    run("scatter_segments", work, lambda: _wrong_put(base, sources, segments))


def _scatter(base: Tensor, sources: list[Tensor], segments: Tensor) -> Tensor:
    def work() -> Tensor:
        out = base.clone(memory_format=torch.contiguous_format)
        torch.ops.knit.copy_segments.default([out], contiguous(sources), segments.contiguous(), False)
        return out

    return run("scatter_segments", work, lambda: _wrong_scatter(base, sources, segments))


def _accumulate(grads: list[Tensor], segments: Tensor, rows: list[int]) -> list[Tensor]:
    must_be_right("accumulate_segments", _wrong_rows(rows))
    out = _buffers(grads, rows)
    _accumulate_(out, grads, segments)
    return out


def _accumulate_(buffers: list[Tensor], grads: list[Tensor], segments: Tensor) -> None:
    def work() -> None:
        outs = contiguous(buffers)
        if any(out is not buffer for out, buffer in zip(outs, buffers, strict=True)):
            must_be_right("accumulate_segments", wrong_views(buffers))
        torch.ops.knit.add_segments.default(outs, contiguous(grads), segments.contiguous())
        _written(outs, buffers)

    run("accumulate_segments", work, lambda: _wrong_sum(buffers, grads, segments))


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


def _wrong_count(sources: Tensors, levels: int) -> str | None:
    fits = levels >= 1 and sources and len(sources) % levels == 0
    return None if fits else f"there are {len(sources)} sources for {levels} levels"


def _wrong_rows(rows: Sequence[int]) -> str | None:
    return None if min(rows, default=0) >= 0 else f"rows must not be negative, found {list(rows)}"


def _wrong_places(packed: Sequence[Sequence[int]], sources: Tensors, segments: Tensor) -> str | None:
    """``packed``: the shapes, one a level."""
    if (wrong := wrong_levels(packed, [source.shape for source in sources])) is not None:
        return wrong
    table = numbers_of("segments", segments, 4)
    if isinstance(table, str):
        return table
    rows = [source.shape[0] for source in sources[: len(sources) // len(packed)]]
    return wrong_segments(table, rows, packed[0][0])


def _wrong_gather(sources: Tensors, segments: Tensor, total: int, levels: int) -> str | None:
    if total < 0:
        return f"total must be at least 0, found {total}"
    if (wrong := _wrong_count(sources, levels) or wrong_data(sources=sources)) is not None:
        return wrong
    first = sources[:: len(sources) // levels]
    return _wrong_places([(total, *source.shape[1:]) for source in first], sources, segments)


def _wrong_copy(packed: Tensors, sources: Tensors, segments: Tensor, fill: bool) -> str | None:
    wrong = wrong_data(base=packed, sources=sources) or _wrong_places([one.shape for one in packed], sources, segments)
    return wrong or (None if fill else wrong_memory(packed, sources))


def _wrong_scatter(base: Tensor, sources: Tensors, segments: Tensor) -> str | None:
    return _wrong_copy([base], sources, segments, True)  # into a copy


def _wrong_put(base: Tensor, sources: Tensors, segments: Tensor) -> str | None:
    return _wrong_copy([base], sources, segments, False)


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
    return wrong or _wrong_places([one.shape for one in grads], buffers, segments) or wrong_memory(buffers, grads)


# -- references --------------------------------------------------------------------------------------------------------


def copy_segments_reference(outs: list[Tensor], sources: list[Tensor], segments: Tensor, fill: bool) -> None:
    """The specification, segment by segment; also the kernel where there is no other."""
    must_be_right("segments", _wrong_copy(outs, sources, segments, fill))
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


# -- operators ---------------------------------------------------------------------------------------------------------


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
    if len(rows) == 1 and (back := _back(segments)) is not None:
        return _gathered(grads, back, rows[0], len(grads))
    if dtype.is_complex:
        pairs = [torch.view_as_real(grad.resolve_conj()) for grad in grads]
        return [torch.view_as_complex(one) for one in _summed(pairs, segments, rows, dtype.to_real())]
    return [one.to(dtype) for one in _accumulated(grads, segments, rows)]


def _back(segments: Tensor) -> Tensor | None:
    """The way back, of segments of one source that have each row at most once: then nothing is added up. None: they may
    have one more often, or their numbers are not known."""
    if torch.compiler.is_compiling() or type(segments) is not Tensor or segments.is_meta:
        return None
    table = segments.numpy()
    table = table[table[:, 2] > 0]
    order = np.argsort(table[:, 1], kind="stable")
    first, ends = table[order, 1], table[order, 1] + table[order, 2]
    return None if (ends[:-1] > first[1:]).any() else torch.from_numpy(table[:, [0, 3, 2, 1]])


def _remember_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    base, sources, segments = inputs
    ctx.save_for_backward(segments)
    ctx.rows, ctx.dtype = [source.shape[0] for source in sources], base.dtype
    ctx.wanted = base.requires_grad, any(source.requires_grad for source in sources)


def _scatter_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, list[Tensor | None], None]:
    (segments,) = ctx.saved_tensors
    blank = [grad.new_zeros((n, *grad.shape[1:])) for n in ctx.rows] if ctx.wanted[0] else []
    outside = _scattered(grad, blank, segments) if ctx.wanted[0] else None
    inside = _summed([grad], segments, ctx.rows, ctx.dtype) if ctx.wanted[1] else [None] * len(ctx.rows)
    return outside, [*inside], None


def _remember_sum(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    del output
    grads, segments, _ = inputs
    ctx.save_for_backward(segments)
    ctx.total, ctx.dtype, ctx.levels = grads[0].shape[0], grads[0].dtype, len(grads)


def _sum_backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor], None, None]:
    (segments,) = ctx.saved_tensors
    outs = _gathered(list(grads), segments, ctx.total, ctx.levels)
    return [out.to(ctx.dtype) for out in outs], None, None


kernel(
    "copy_segments",
    "(Tensor(a!)[] outs, Tensor[] sources, Tensor segments, bool fill) -> ()",
    _wrong_copy,
    copy_segments_reference,
)
kernel(
    "add_segments",
    "(Tensor(a!)[] buffers, Tensor[] grads, Tensor segments) -> ()",
    _wrong_sum,
    add_segments_reference,
)
_gathered = operator(
    "gather_segments",
    "(Tensor[] sources, Tensor segments, SymInt total, int levels) -> Tensor[]",
    _gather,
    lambda sources, _, total, levels: _empty(sources, at_least_0(total), levels),
    _wrong_gather,
    (_remember_gather, _gather_backward),
)
_scattered = operator(
    "scatter_segments",
    "(Tensor base, Tensor[] sources, Tensor segments) -> Tensor",
    _scatter,
    lambda base, *_: torch.empty_like(base, memory_format=torch.contiguous_format),
    _wrong_scatter,
    (_remember_scatter, _scatter_backward),
)
_accumulated = operator(
    "accumulate_segments",
    "(Tensor[] grads, Tensor segments, SymInt[] rows) -> Tensor[]",
    _accumulate,
    lambda grads, _, rows: _buffers(grads, [at_least_0(n) for n in rows]),
    lambda grads, segments, rows: _wrong_rows(rows) or _wrong_sum(_buffers(grads, rows), grads, segments),
    (_remember_sum, _sum_backward),
)
_write = operator(
    "scatter_segments_",
    "(Tensor(a!) base, Tensor[] sources, Tensor segments) -> ()",
    _scatter_,
    lambda *_: None,
    _wrong_put,
)
_add = operator(
    "accumulate_segments_",
    "(Tensor(a!)[] buffers, Tensor[] grads, Tensor segments) -> ()",
    _accumulate_,
    lambda *_: None,
    _wrong_sum,
)
