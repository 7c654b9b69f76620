"""The ops on a GPU: Triton kernels over a table of tiles, which the host makes from the segments.

A tile is some KB that lie together at both ends, so one kernel moves every dtype and shape, and one launch all
segments of all sources and levels: no search, no program without work, and nothing waits for the device. A sum's tile
has its occurrences beside it, in the order in which they are added: no atomics, and the same bits on every run.

    two segments of 30,000 and 10,000 bytes      tiles of 16,384, 13,616 and 10,000
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from knit_data.ops.tables import Ints, numbers_of, sums_of

TILE = 16_384  # bytes that a program moves at a time
SUM_TILE = 2_048  # elements of a sum that a program keeps in registers
PROGRAMS = 4_096  # enough for any GPU: what needs more tiles has larger ones, so that its table stays small
_WORDS: dict[int, Any] = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # there is no product; left open, some versions of Triton warn
_SUMMED: dict[torch.dtype, Any] = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit(do_not_specialize=["pad"])
def copy_tiles(tiles, pad, WORD: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row of ``tiles``: the addresses to write and to read (0: the pad), and how many words. ``ALIGN``: of all
    addresses and sizes, in bytes."""
    row = tiles + 3 * tl.program_id(0).to(tl.int64)
    origin = tl.load(row + 1)
    target = tl.multiple_of(tl.load(row).to(tl.pointer_type(WORD)), ALIGN)
    source = tl.multiple_of(origin.to(tl.pointer_type(WORD)), ALIGN)
    words = tl.multiple_of(tl.load(row + 2), ALIGN // (WORD.primitive_bitwidth // 8))
    there = tl.where(origin == 0, 0, words)
    for begin in range(0, words, BLOCK):
        lanes = begin + tl.arange(0, BLOCK)
        value = tl.load(source + lanes, mask=lanes < there, other=pad)
        tl.store(target + lanes, value, mask=lanes < words)


@triton.jit
def sum_tiles(tiles, occurrences, FROM: tl.constexpr, TO: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row of ``tiles``: address of the sum, elements, offset in each occurrence, first and last of these; a row of
    ``occurrences``: the address of what is added. ``ALIGN``: of all addresses and sizes, in elements."""
    row = tiles + 5 * tl.program_id(0).to(tl.int64)
    target = tl.multiple_of(tl.load(row).to(tl.pointer_type(TO)), ALIGN * (TO.primitive_bitwidth // 8))
    size, offset = tl.multiple_of(tl.load(row + 1), ALIGN), tl.multiple_of(tl.load(row + 2), ALIGN)
    first, last = tl.load(row + 3), tl.load(row + 4)
    for begin in range(0, size, BLOCK):
        lanes = begin + tl.arange(0, BLOCK)
        inside = lanes < size
        total = tl.load(target + lanes, mask=inside, other=0.0)
        for i in range(first, last):
            at = tl.load(occurrences + i).to(tl.pointer_type(FROM))
            source = tl.multiple_of(at, ALIGN * (FROM.primitive_bitwidth // 8)) + offset
            total += tl.load(source + lanes, mask=inside, other=0.0).to(TO)
        tl.store(target + lanes, total, mask=inside)


# -- launchers ---------------------------------------------------------------------------------------------------------


def pack_rows(out: Tensor, rows: Tensor, cu_seqlens: Tensor) -> None:
    bounds, token = _checked(numbers_of("cu_seqlens", cu_seqlens, 1)), _row_bytes(rows, 2)
    starts = rows.data_ptr() + np.arange(len(bounds) - 1) * rows.shape[1] * token
    to = out.data_ptr() + bounds * token
    size = np.append(np.diff(bounds), out.shape[0] - bounds[-1]) * token
    _copy(out, to, np.append(starts, 0), size, 0)


def unpack_rows(out: Tensor, packed: Tensor, cu_seqlens: Tensor, pad: int) -> None:
    bounds, token = _checked(numbers_of("cu_seqlens", cu_seqlens, 1)), _row_bytes(out, 2)
    lengths, rows = np.diff(bounds) * token, out.data_ptr() + np.arange(len(bounds) - 1) * out.shape[1] * token
    origin = np.concatenate([packed.data_ptr() + bounds[:-1] * token, np.zeros(len(lengths), np.int64)])
    size = np.concatenate([lengths, out.shape[1] * token - lengths])
    _copy(out, np.concatenate([rows, rows + lengths]), origin, size, pad)


def copy_segments(outs: Sequence[Tensor], sources: Sequence[Tensor], segments: Tensor, fill: bool) -> None:
    table, count = _checked(numbers_of("segments", segments, 4)), len(sources) // len(outs)
    table = table[np.argsort(table[:, 3], kind="stable")]
    source, first, length, place = table.T
    to, origin, size = [], [], []
    for k, out in enumerate(outs):
        row, base = _row_bytes(out, 1), out.data_ptr()
        bases = np.array([tensor.data_ptr() for tensor in sources[k * count : (k + 1) * count]], np.int64)
        to.append(base + place * row)
        origin.append(bases[source] + first * row)
        size.append(length * row)
        if fill:
            ends = np.concatenate([[0], np.maximum.accumulate(place + length)]) * row  # an empty segment may lie inside
            to.append(base + ends)
            origin.append(np.zeros(len(ends), np.int64))
            size.append(np.maximum(np.append(place * row, out.shape[0] * row) - ends, 0))
    _copy(outs[0], np.concatenate(to), np.concatenate(origin), np.concatenate(size), 0)


def add_segments(buffers: Sequence[Tensor], grads: Sequence[Tensor], segments: Tensor) -> None:
    count, sums = len(buffers) // len(grads), sums_of(_checked(numbers_of("segments", segments, 4)))
    if not sums or not buffers:
        return
    rows, occurrences, done = [], [], 0
    for k, grad in enumerate(grads):
        width, at, item = grad.shape[1:].numel(), grad.data_ptr(), grad.element_size()
        for s in sums:
            buffer = buffers[k * count + s.source]
            to = buffer.data_ptr() + s.first * width * buffer.element_size()
            occurrences.append(at + np.asarray(s.places) * (width * item))
            rows.append((to, s.length * width, done, done := done + len(s.places)))
    to, size, begin, end = np.array(rows, np.int64).T
    tile = _tile(size, SUM_TILE)
    which, offset = cut(size, tile)
    tiles = np.stack([to[which], np.minimum(size[which] - offset, tile), offset, begin[which], end[which]], 1)
    if not len(tiles):
        return
    tiles[:, 0] += offset * buffers[0].element_size()
    addresses = np.concatenate(occurrences)
    kinds = _SUMMED[grads[0].dtype], _SUMMED[buffers[0].dtype]
    together = int(np.bitwise_or.reduce(addresses)) // grads[0].element_size()
    together |= int(np.bitwise_or.reduce(tiles[:, 0])) // buffers[0].element_size()
    together |= int(np.bitwise_or.reduce(tiles[:, 1]))
    device = grads[0].device
    with _on(device):
        sum_tiles[(len(tiles),)](
            _there(tiles, device),
            _there(addresses, device),
            *kinds,
            ALIGN=_align(together, 8),
            BLOCK=SUM_TILE,
            **_OPTIONS,
        )


def _copy(out: Tensor, to: Ints, origin: Ints, size: Ints, pad: int) -> None:
    """Ranges of bytes, by their addresses; from 0: filled with ``pad``, the bits of one element."""
    tile = _tile(size, TILE)
    which, offset = cut(size, tile)
    if not len(which):
        return
    origin = np.where(origin[which] == 0, 0, origin[which] + offset)
    tiles = np.stack([to[which] + offset, origin, np.minimum(size[which] - offset, tile)], 1)
    align = _align(int(np.bitwise_or.reduce(tiles, axis=None)), 16)
    item = out.element_size()
    word = max(min(align, 4), item)
    for _ in range((word // item).bit_length() - 1):  # two elements of 2 bytes in a word of 4
        pad, item = (pad & ((1 << 8 * item) - 1)) * (1 + (1 << 8 * item)), 2 * item
    pad &= (1 << 8 * word) - 1
    pad -= (pad >> (8 * word - 1)) << (8 * word)  # signed
    tiles[:, 2] //= word
    with _on(out.device):
        copy_tiles[(len(tiles),)](
            _there(tiles, out.device), pad, WORD=_WORDS[word], ALIGN=max(align, word), BLOCK=TILE // word, **_OPTIONS
        )


def _tile(size: Ints, least: int) -> int:
    """A multiple of ``least``, up to 16 of them: 1 GB by 16,384 bytes are tiles of 16 times that."""
    return least * int(min(max(size.sum() // (PROGRAMS * least), 1), 16))


def cut(size: Ints, tile: int) -> tuple[Ints, Ints]:
    """Of each tile, which range it is of and where it begins there: sizes 5, 0, 2 by 4 -> [0, 0, 2], [0, 4, 0]."""
    counts = -(-size // tile)
    which = np.repeat(np.arange(len(size)), counts)
    return which, (np.arange(len(which)) - (np.cumsum(counts) - counts)[which]) * tile


def _align(together: int, most: int) -> int:
    """The largest power of two, up to ``most``, that divides all the numbers whose bits these are."""
    return min(together & -together, most) if together else most


def _row_bytes(tensor: Tensor, leading: int) -> int:
    return tensor.shape[leading:].numel() * tensor.element_size()


def _checked(numbers: Ints | str) -> Ints:
    assert not isinstance(numbers, str)  # the op was told what is wrong before
    return numbers


def _there(table: Ints, device: torch.device) -> Tensor:
    host = torch.from_numpy(np.ascontiguousarray(table))
    if device.type == "cuda":  # from pageable memory the copy would wait for the stream
        host = torch.empty(host.shape, dtype=host.dtype, device="cpu", pin_memory=True).copy_(host)
    return host.to(device, non_blocking=True)


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else torch.no_grad()  # the latter in the interpreter
