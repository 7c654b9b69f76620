"""Rows to end-to-end tokens and back.

    rows       [[a b c .]      cu_seqlens [0 3 3 5], total 6
                [. . . .]      packed     [a b c d e 0]
                [d e . .]]

``unpack`` is the way back, with a pad value where there are no tokens. Each is the gradient of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knit_data.errors import InvalidArgument
from knit_data.ops.dispatch import UNSAFE_IN_GRAPHS, at_least_0, fake, must_be_right, on_gpu, recorded, run
from knit_data.ops.segment import gather_segments
from knit_data.ops.tables import bits_of, numbers_of, wrong_cu_seqlens, wrong_data, wrong_table

_DEVICE = "CompositeExplicitAutograd"
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
    if cu_seqlens is not None and not isinstance(cu_seqlens, Tensor):
        raise InvalidArgument(f"pack: cu_seqlens must be a tensor of int32 or int64, found {cu_seqlens!r:.80}.")
    if isinstance(rows, Tensor):
        if cu_seqlens is None:
            raise InvalidArgument("pack: rows in one tensor need cu_seqlens, which says how long each of them is.")
        total = _bounds("pack", cu_seqlens)[-1] if total is None else total
        kernel = torch.ops.knit.pack.default if recorded([rows]) else _pack
        out: Tensor = kernel(rows, cu_seqlens, total)
        return out
    if not rows:
        raise InvalidArgument("pack: there are no rows, so nothing says of which dtype and shape the result is.")
    lengths = [row.shape[0] if row.dim() else 0 for row in rows]
    if cu_seqlens is None:
        bounds = [0, *accumulate(lengths)]
        total = bounds[-1] if total is None else total
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
    if length is None:
        bounds = _bounds("unpack", cu_seqlens)
        length = max([0, *(b - a for a, b in pairwise(bounds))])
    kernel = torch.ops.knit.unpack.default if recorded([packed]) else _unpack
    out: Tensor = kernel(packed, cu_seqlens, length, pad)
    return out


def _bounds(op: str, cu_seqlens: Tensor) -> list[int]:
    must_be_right(op, wrong_table("cu_seqlens", cu_seqlens, 1) or (None if cu_seqlens.numel() else _EMPTY))
    bounds: list[int] = cu_seqlens.tolist()
    return bounds


# -- operators ---------------------------------------------------------------------------------------------------------

torch.library.define("knit::pack", "(Tensor rows, Tensor cu_seqlens, SymInt total) -> Tensor", tags=UNSAFE_IN_GRAPHS)
torch.library.define(
    "knit::unpack", "(Tensor packed, Tensor cu_seqlens, SymInt length, float pad) -> Tensor", tags=UNSAFE_IN_GRAPHS
)
torch.library.define("knit::segments_of_rows", "(Tensor cu_seqlens, SymInt[] lengths, SymInt total) -> Tensor")
torch.library.define("knit::pack_rows", "(Tensor(a!) out, Tensor rows, Tensor cu_seqlens) -> ()", tags=UNSAFE_IN_GRAPHS)
torch.library.define(
    "knit::unpack_rows", "(Tensor(a!) out, Tensor packed, Tensor cu_seqlens, int pad) -> ()", tags=UNSAFE_IN_GRAPHS
)


def _segments_of_rows(cu_seqlens: Tensor, lengths: Sequence[int], total: int) -> Tensor:
    """``[B, 4]``: each row from its start to its bounds."""
    bounds = numbers_of("cu_seqlens", cu_seqlens, 1)
    if isinstance(bounds, str):
        raise InvalidArgument(f"pack: {bounds}.")
    must_be_right("pack", wrong_cu_seqlens(bounds, len(lengths), max(lengths), total))
    sizes = np.diff(bounds)
    return torch.from_numpy(np.stack([np.arange(len(sizes)), np.zeros_like(sizes), sizes, bounds[:-1]], 1))


def _pack(rows: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    def work() -> Tensor:
        out = rows.new_empty((total, *rows.shape[2:]))
        torch.ops.knit.pack_rows.default(out, rows.contiguous(), cu_seqlens.contiguous())
        return out

    return run("pack", work, lambda: _wrong(rows, cu_seqlens, total))


def _unpack(packed: Tensor, cu_seqlens: Tensor, length: int, pad: float) -> Tensor:
    bits = bits_of(pad, packed.dtype)

    def work() -> Tensor:
        out = packed.new_empty((cu_seqlens.numel() - 1, length, *packed.shape[1:]))
        torch.ops.knit.unpack_rows.default(out, packed.contiguous(), cu_seqlens.contiguous(), bits)
        return out

    return run("unpack", work, lambda: _wrong_back(packed, cu_seqlens, length))


def _wrong(rows: Tensor, cu_seqlens: Tensor, total: int) -> str | None:
    if rows.dim() < 2 or total < 0:
        return f"rows must be [B, L, *] and total at least 0, found {list(rows.shape)} and {total}"
    bounds = numbers_of("cu_seqlens", cu_seqlens, 1)
    if isinstance(bounds, str):
        return bounds
    return wrong_data(rows=[rows]) or wrong_cu_seqlens(bounds, rows.shape[0], rows.shape[1], total)


def _wrong_back(packed: Tensor, cu_seqlens: Tensor, length: int) -> str | None:
    if packed.dim() < 1 or length < 0:
        return f"packed must be [T, *] and length at least 0, found {list(packed.shape)} and {length}"
    bounds = numbers_of("cu_seqlens", cu_seqlens, 1)
    if isinstance(bounds, str):
        return bounds
    if not len(bounds):
        return _EMPTY
    return wrong_data(packed=[packed]) or wrong_cu_seqlens(bounds, len(bounds) - 1, length, packed.shape[0])


def _wrong_rows(out: Tensor, rows: Tensor, cu_seqlens: Tensor) -> str | None:
    if out.dim() < 1 or out.shape[1:] != rows.shape[2:]:
        return f"out must be [T, *] where rows are [B, L, *], found {list(out.shape)} and {list(rows.shape)}"
    return wrong_data(out=[out], rows=[rows]) or _wrong(rows, cu_seqlens, out.shape[0])


def _wrong_rows_back(out: Tensor, packed: Tensor, cu_seqlens: Tensor, _pad: int) -> str | None:
    if out.dim() < 2 or out.shape[2:] != packed.shape[1:] or out.shape[0] != cu_seqlens.numel() - 1:
        return f"out must be [B, L, *] where packed is [T, *], found {list(out.shape)} and {list(packed.shape)}"
    return wrong_data(out=[out], packed=[packed]) or _wrong_back(packed, cu_seqlens, out.shape[1])


def pack_rows_reference(out: Tensor, rows: Tensor, cu_seqlens: Tensor) -> None:
    """The specification, row by row; also the kernel where there is no other."""
    must_be_right("pack", _wrong_rows(out, rows, cu_seqlens))
    bounds = cu_seqlens.tolist()
    for i, row in enumerate(rows):
        out[bounds[i] : bounds[i + 1]] = row[: bounds[i + 1] - bounds[i]]
    out[bounds[-1] :] = 0


def unpack_rows_reference(out: Tensor, packed: Tensor, cu_seqlens: Tensor, pad: int) -> None:
    """The specification, row by row; ``pad`` are the bits to fill with."""
    must_be_right("unpack", _wrong_rows_back(out, packed, cu_seqlens, pad))
    bounds, width = cu_seqlens.tolist(), out.element_size()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    for i, row in enumerate(out):
        n = bounds[i + 1] - bounds[i]
        row[:n] = packed[bounds[i] : bounds[i + 1]]
        row[n:].view(kind)[...] = pad


_KERNELS: dict[str, Callable[..., object]] = {
    "knit::pack": _pack,
    "knit::unpack": _unpack,
    "knit::segments_of_rows": _segments_of_rows,
    "knit::pack_rows": pack_rows_reference,
    "knit::unpack_rows": unpack_rows_reference,
}
for _name, _kernel in _KERNELS.items():
    torch.library.impl(_name, _DEVICE, _kernel)  # on any device that has no kernel of its own

on_gpu("pack_rows", _wrong_rows, pack_rows_reference)
on_gpu("unpack_rows", _wrong_rows_back, unpack_rows_reference)

fake("pack", lambda rows, _, total: rows.new_empty((at_least_0(total), *rows.shape[2:])), _wrong)
fake(
    "unpack",
    lambda packed, cu, length, _: packed.new_empty((at_least_0(cu.numel() - 1), at_least_0(length), *packed.shape[1:])),
    lambda packed, cu, length, _: _wrong_back(packed, cu, length),
)
torch.library.register_fake(
    "knit::segments_of_rows", lambda cu, lengths, _: torch.empty(len(lengths), 4, dtype=torch.int64, device=cu.device)
)
fake("pack_rows", lambda *_: None, _wrong_rows)
fake("unpack_rows", lambda *_: None, _wrong_rows_back)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(inputs[1])
    ctx.size = inputs[0].shape


def _pack_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (cu_seqlens,) = ctx.saved_tensors
    return torch.ops.knit.unpack.default(grad, cu_seqlens, ctx.size[1], 0.0), None, None


def _unpack_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    (cu_seqlens,) = ctx.saved_tensors
    return torch.ops.knit.pack.default(grad, cu_seqlens, ctx.size[0]), None, None, None


torch.library.register_autograd("knit::pack", _pack_backward, setup_context=_remember)
torch.library.register_autograd("knit::unpack", _unpack_backward, setup_context=_remember)
