"""Many byte ranges of one buffer, copied to their places in another in one call.

    src        = a b c d e f        range 0: 2 bytes from src[4] to out[0]
    src_start  = [4, 0]             range 1: 3 bytes from src[0] to out[3]
    out_start  = [0, 3]
    length     = [2, 3]
    out before = . . . . . .
    out after  = e f . a b c        bytes that no range names keep their value

One call for 512 rows costs what one row costs in Python, because no range becomes a tensor or an object.
"""

from __future__ import annotations

import functools
import importlib
import logging

import numpy as np
import torch
from torch import Tensor

from knit_data.errors import InvalidArgument

extension_error: str | None = None  # why the C++ kernels are missing; None when they serve
try:
    importlib.import_module("knit_data._C")
except ImportError as error:
    extension_error = str(error)


# -- what every kernel refuses ----------------------------------------------------------------------------------------


def _wrong_tensors(out: Tensor, src: Tensor, src_start: Tensor, out_start: Tensor, length: Tensor) -> str | None:
    """What is wrong with the tensors whatever they hold, or None."""
    expected = (
        ("out", out, torch.uint8),
        ("src", src, torch.uint8),
        ("src_start", src_start, torch.int64),
        ("out_start", out_start, torch.int64),
        ("length", length, torch.int64),
    )
    for name, tensor, dtype in expected:
        if not isinstance(tensor, Tensor):
            return f"{name} must be a tensor, not {type(tensor).__name__}"
        if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
            found = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype}"
            return f"{name} must be a contiguous 1-D {dtype} tensor, but has {found}"
    entries = (src_start.shape[0], out_start.shape[0], length.shape[0])
    if entries[0] != entries[2] or entries[1] != entries[2]:
        return f"src_start, out_start and length must have one entry per range, but have {entries}"
    return None


def _wrong_ranges(out: Tensor, src: Tensor, src_start: Tensor, out_start: Tensor, length: Tensor) -> str | None:
    """What is wrong with the places and values, or None. The tensors themselves are right."""
    others = (("src", src), ("src_start", src_start), ("out_start", out_start), ("length", length))
    for name, tensor in (("out", out), *others):
        if tensor.device.type != "cpu":
            return f"{name} must be on the CPU, but is on {tensor.device}"
    for name, tensor in others:
        if _share_memory(out, tensor):
            return f"out and {name} share memory; give out a buffer of its own"
    count = length.numpy()
    for verb, name, start, size in (
        ("reads", "src", src_start.numpy(), src.numel()),
        ("writes", "out", out_start.numpy(), out.numel()),
    ):
        # `count > size - start` cannot overflow where 0 <= start <= size; `start + count > size` could.
        outside = (start < 0) | (count < 0) | (start > size) | (count > size - start)
        if outside.any():
            i = int(outside.argmax())
            return f"range {i} {verb} {count[i]} bytes at {start[i]} of {name}, which has {size}"
    start = out_start.numpy()
    order = np.flatnonzero(count)
    order = order[np.argsort(start[order], kind="stable")]
    overlap = (start + count)[order[:-1]] > start[order[1:]]
    if overlap.any():
        k = int(overlap.argmax())
        i, j = order[k], order[k + 1]
        return f"ranges {i} and {j} overlap in out: {count[i]} bytes at {start[i]} and {count[j]} bytes at {start[j]}"
    return None


def _share_memory(a: Tensor, b: Tensor) -> bool:
    a_start, a_end = a.data_ptr(), a.data_ptr() + a.numel() * a.element_size()
    b_start, b_end = b.data_ptr(), b.data_ptr() + b.numel() * b.element_size()
    return a_start < a_end and b_start < b_end and a_start < b_end and b_start < a_end


def _refusal(out: Tensor, src: Tensor, src_start: Tensor, out_start: Tensor, length: Tensor) -> str | None:
    ranges = (src_start, out_start, length)
    wrong = _wrong_tensors(out, src, *ranges) or _wrong_ranges(out, src, *ranges)
    return None if wrong is None else f"gather_ranges: {wrong}"


# -- the operator -----------------------------------------------------------------------------------------------------


def gather_ranges_reference(out: Tensor, src: Tensor, src_start: Tensor, out_start: Tensor, length: Tensor) -> None:
    """The specification: one slice assignment a range. Also the kernel where the extension was not built."""
    refusal = _refusal(out, src, src_start, out_start, length)
    if refusal is not None:
        raise InvalidArgument(refusal)
    target, source = out.numpy(), src.numpy()
    for begin, place, count in zip(src_start.tolist(), out_start.tolist(), length.tolist(), strict=True):
        target[place : place + count] = source[begin : begin + count]


@functools.cache
def _say_that_the_extension_is_missing() -> None:
    # The log, not warnings.warn: a pure-Python build may be what was asked for, and `-W error` must not break it.
    logging.getLogger("knit_data").warning(
        "knit_data runs without its C++ extension (%s): gather_ranges is slower and holds the interpreter lock. "
        "Install a C++ compiler and reinstall with --no-build-isolation and without KNIT_NO_EXT.",
        extension_error,
    )


def _fallback(out: Tensor, src: Tensor, src_start: Tensor, out_start: Tensor, length: Tensor) -> None:
    _say_that_the_extension_is_missing()
    gather_ranges_reference(out, src, src_start, out_start, length)


def _fake(out: Tensor, src: Tensor, src_start: Tensor, out_start: Tensor, length: Tensor) -> None:
    wrong = _wrong_tensors(out, src, src_start, out_start, length)
    if wrong is not None:
        raise InvalidArgument(f"gather_ranges: {wrong}")


torch.library.define(
    "knit::gather_ranges",
    "(Tensor(a!) out, Tensor src, Tensor src_start, Tensor out_start, Tensor length) -> ()",
)
torch.library.register_fake("knit::gather_ranges", _fake)
if extension_error is not None:
    torch.library.impl("knit::gather_ranges", "CPU", _fallback)
_gather_ranges = torch.ops.knit.gather_ranges.default


def gather_ranges(out: Tensor, src: Tensor, src_start: Tensor, out_start: Tensor, length: Tensor) -> None:
    """Copies ``length[i]`` bytes from ``src[src_start[i]]`` to ``out[out_start[i]]``, for every range ``i``.

    Args:
        out: ``[bytes]`` uint8 on the CPU, contiguous, in memory of its own. Bytes outside the ranges are kept.
        src: ``[bytes]`` uint8 on the CPU, contiguous.
        src_start, out_start, length: ``[ranges]`` int64 on the CPU. Any order; a length may be 0; source ranges may
            overlap, destinations may not.

    Raises:
        InvalidArgument: before anything is written. (Inside ``torch.compile`` a bad range is found at run time and
            leaves the compiled function as the kernel's own error, a RuntimeError with the extension.)

    The interpreter lock is released, and more than 1 MB is shared out between torch's threads by bytes.
    """
    try:
        _gather_ranges(out, src, src_start, out_start, length)
    except RuntimeError:
        # The kernel's guard spoke. The same checks in Python say it in our class, the same words on every back end.
        refusal = _refusal(out, src, src_start, out_start, length)
        if refusal is None:
            raise
        raise InvalidArgument(refusal) from None
