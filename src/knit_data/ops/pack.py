"""Rows to end-to-end tokens and back.

    rows       [[a b c .]      cu_seqlens [0 3 3 5], total 6
                [. . . .]      packed     [a b c d e 0]
                [d e . .]]

``unpack`` is the way back, with a pad value where there are no tokens. Each is the gradient of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knit_data.errors import InvalidArgument
from knit_data.ops.dispatch import at_least_0, kernel, must_be_right, must_be_tensors, operator, run
from knit_data.ops.segment import gather_segments
from knit_data.ops.tables import bits_of, numbers_of, table_of, wrong_cu_seqlens, wrong_data, wrong_table

_EMPTY = "cu_seqlens is empty; without rows it is [0]"


def pack(rows: Tensor | Sequence[Tensor], cu_seqlens: Tensor | None = None, total: int | None = None) -> Tensor:
    """The tokens of all rows end to end, ``[total, *]``; zeros behind the last.

    Args:
        rows: ``[B, L, *]``, right-padded; or B tensors ``[n, *]`` of one dtype and device.
        cu_seqlens: ``[B + 1]`` int32 or int64 on the CPU, from 0: row i has ``cu_seqlens[i + 1] - cu_seqlens[i]``
            tokens, at most L. May be left out with a sequence of rows, which are taken whole.
        total: at least ``cu_seqlens[-1]``, which is the default. Give it under ``torch.compile``.

    Raises:
        InvalidArgument: before anything is moved.
    """
    if cu_seqlens is not None:
        must_be_tensors("pack", cu_seqlens)
    if isinstance(rows, Tensor):
        if cu_seqlens is None:
            raise InvalidArgument("pack: rows in one tensor need cu_seqlens, which says how long each of them is.")
        return _packed(rows, cu_seqlens, _bounds("pack", cu_seqlens)[-1] if total is None else total)
    must_be_tensors("pack", *rows)
    if not rows:
        raise InvalidArgument("pack: there are no rows, so nothing says of which dtype and shape the result is.")
    lengths = [row.shape[0] if row.dim() else 0 for row in rows]
    if cu_seqlens is None:
        bounds = [0, *accumulate(lengths)]
        total = bounds[-1] if total is None else total
        if total < bounds[-1]:
            raise InvalidArgument(f"pack: rows of {bounds[-1]} tokens do not fit a total of {total}.")
        segments = torch.tensor([(i, 0, b - a, a) for i, (a, b) in enumerate(pairwise(bounds))], device="cpu")
    else:
        if total is None:
            total = _bounds("pack", cu_seqlens)[-1]
        segments = torch.ops.knit.segments_of_rows.default(cu_seqlens, lengths, total)
    packed: Tensor = gather_segments(list(rows), segments, total)
    return packed


def unpack(packed: Tensor, cu_seqlens: Tensor, length: int | None = None, pad: float = 0.0) -> Tensor:
    """The rows of end-to-end tokens, ``[B, length, *]``, right-padded with ``pad``.

    Args:
        packed: ``[T, *]``; tokens behind ``cu_seqlens[-1]`` are left out.
        cu_seqlens: ``[B + 1]`` int32 or int64 on the CPU, from 0 to at most T.
        length: at least the longest row's, which is the default. Give it under ``torch.compile``.
        pad: up to 2**53; rounded to the dtype where that is of floats.

    Raises:
        InvalidArgument: before anything is moved; also where an integer dtype has no such pad value.
    """
    must_be_tensors("unpack", packed, cu_seqlens)
    if length is None:
        bounds = _bounds("unpack", cu_seqlens)
        length = max([0, *(b - a for a, b in pairwise(bounds))])
    return _unpacked(packed, cu_seqlens, length, pad)


def _bounds(op: str, cu_seqlens: Tensor) -> list[int]:
    must_be_right(op, wrong_table("cu_seqlens", cu_seqlens, 1) or (None if cu_seqlens.numel() else _EMPTY))
    bounds: list[int] = cu_seqlens.tolist()
    return bounds


# -- work --------------------------------------------------------------------------------------------------------------


def _segments_of_rows(cu_seqlens: Tensor, lengths: Sequence[int], total: int) -> Tensor:
    """``[B, 4]``: each row from its start to its bounds."""
    bounds = numbers_of("cu_seqlens", cu_seqlens, 1)
    if isinstance(bounds, str):
        raise InvalidArgument(f"pack: {bounds}.")
    must_be_right("pack", wrong_cu_seqlens(bounds, len(lengths), max(lengths), total))
    sizes = np.diff(bounds)
    return table_of(np.arange(len(sizes)), 0, sizes, bounds[:-1])


def _pack(rows: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    def work() -> Tensor:
        out = rows.new_empty((total, *rows.shape[2:]))
        torch.ops.knit.pack_rows.default(out, rows.contiguous(), cu_seqlens.contiguous())
        return out

    return run("pack", work, lambda: _wrong_pack(rows, cu_seqlens, total))


def _unpack(packed: Tensor, cu_seqlens: Tensor, length: int, pad: float) -> Tensor:
    bits = bits_of(pad, packed.dtype)

    def work() -> Tensor:
        out = packed.new_empty((cu_seqlens.numel() - 1, length, *packed.shape[1:]))
        torch.ops.knit.unpack_rows.default(out, packed.contiguous(), cu_seqlens.contiguous(), bits)
        return out

    return run("unpack", work, lambda: _wrong_unpack(packed, cu_seqlens, length))


def _wrong_pack(rows: Tensor, cu_seqlens: Tensor, total: int) -> str | None:
    if rows.dim() < 2 or total < 0:
        return f"rows must be [B, L, *] and total at least 0, found {list(rows.shape)} and {total}"
    bounds = numbers_of("cu_seqlens", cu_seqlens, 1)
    if isinstance(bounds, str):
        return bounds
    return wrong_data(rows=[rows]) or wrong_cu_seqlens(bounds, rows.shape[0], rows.shape[1], total)


def _wrong_unpack(packed: Tensor, cu_seqlens: Tensor, length: int, _pad: float = 0.0) -> str | None:
    if packed.dim() < 1 or length < 0:
        return f"packed must be [T, *] and length at least 0, found {list(packed.shape)} and {length}"
    bounds = numbers_of("cu_seqlens", cu_seqlens, 1)
    if isinstance(bounds, str):
        return bounds
    if not len(bounds):
        return _EMPTY
    return wrong_data(packed=[packed]) or wrong_cu_seqlens(bounds, len(bounds) - 1, length, packed.shape[0])


def _wrong_pack_rows(out: Tensor, rows: Tensor, cu_seqlens: Tensor) -> str | None:
    if out.dim() < 1 or out.shape[1:] != rows.shape[2:]:
        return f"out must be [T, *] where rows are [B, L, *], found {list(out.shape)} and {list(rows.shape)}"
    return wrong_data(out=[out], rows=[rows]) or _wrong_pack(rows, cu_seqlens, out.shape[0])


def _wrong_unpack_rows(out: Tensor, packed: Tensor, cu_seqlens: Tensor, _pad: int) -> str | None:
    if out.dim() < 2 or out.shape[2:] != packed.shape[1:] or out.shape[0] != cu_seqlens.numel() - 1:
        return f"out must be [B, L, *] where packed is [T, *], found {list(out.shape)} and {list(packed.shape)}"
    return wrong_data(out=[out], packed=[packed]) or _wrong_unpack(packed, cu_seqlens, out.shape[1])


def pack_rows_reference(out: Tensor, rows: Tensor, cu_seqlens: Tensor) -> None:
    """The specification, row by row; also the kernel where there is no other."""
    must_be_right("pack", _wrong_pack_rows(out, rows, cu_seqlens))
    bounds = cu_seqlens.tolist()
    for i, row in enumerate(rows):
        out[bounds[i] : bounds[i + 1]] = row[: bounds[i + 1] - bounds[i]]
    out[bounds[-1] :] = 0


def unpack_rows_reference(out: Tensor, packed: Tensor, cu_seqlens: Tensor, pad: int) -> None:
    """The specification, row by row; ``pad`` are the bits to fill with."""
    must_be_right("unpack", _wrong_unpack_rows(out, packed, cu_seqlens, pad))
    bounds, width = cu_seqlens.tolist(), out.element_size()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    for i, row in enumerate(out):
        n = bounds[i + 1] - bounds[i]
        row[:n] = packed[bounds[i] : bounds[i + 1]]
        row[n:].view(kind)[...] = pad


# -- operators ---------------------------------------------------------------------------------------------------------


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(inputs[1])
    ctx.size = inputs[0].shape


def _pack_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (cu_seqlens,) = ctx.saved_tensors
    return _unpacked(grad, cu_seqlens, ctx.size[1], 0.0), None, None


def _unpack_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    (cu_seqlens,) = ctx.saved_tensors
    return _packed(grad, cu_seqlens, ctx.size[0]), None, None, None


kernel("pack_rows", "(Tensor(a!) out, Tensor rows, Tensor cu_seqlens) -> ()", _wrong_pack_rows, pack_rows_reference)
kernel(
    "unpack_rows",
    "(Tensor(a!) out, Tensor packed, Tensor cu_seqlens, int pad) -> ()",
    _wrong_unpack_rows,
    unpack_rows_reference,
)
_packed = operator(
    "pack",
    "(Tensor rows, Tensor cu_seqlens, SymInt total) -> Tensor",
    _pack,
    lambda rows, _, total: rows.new_empty((at_least_0(total), *rows.shape[2:])),
    _wrong_pack,
    (_remember, _pack_backward),
)
_unpacked = operator(
    "unpack",
    "(Tensor packed, Tensor cu_seqlens, SymInt length, float pad) -> Tensor",
    _unpack,
    lambda packed, cu, length, _: packed.new_empty((at_least_0(cu.numel() - 1), at_least_0(length), *packed.shape[1:])),
    _wrong_unpack,
    (_remember, _unpack_backward),
)
torch.library.define("knit::segments_of_rows", "(Tensor cu_seqlens, SymInt[] lengths, SymInt total) -> Tensor")
torch.library.impl("knit::segments_of_rows", "CompositeExplicitAutograd", _segments_of_rows)
torch.library.register_fake(
    "knit::segments_of_rows", lambda cu, lengths, _: torch.empty(len(lengths), 4, dtype=torch.int64, device=cu.device)
)
