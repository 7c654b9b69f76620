"""What the packing ops share: tables of segments, and the byte ranges that they come to on a device.

A table has a row (source, first, length, place) for each segment: rows ``first`` to ``first + length - 1`` of source
number ``source`` are rows ``place`` to ``place + length - 1`` of what is packed. Both ends are contiguous, so whatever
the dtype a segment is one range of bytes here and one there::

    segments = [[0, 2, 3, 0],     rows 2, 3, 4 of the first source, to rows 0, 1, 2
                [1, 0, 1, 4]]     row 0 of the second, to row 4; row 3 belongs to nobody

Tables are int32 or int64, on the CPU: what is to be done is known there, and no op waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from knit_data.errors import InvalidArgument

Ints = NDArray[np.int64]
MOVED = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32),
        *(torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex32, torch.complex64),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    }
)  # what the stable interface of torch knows, of 1, 2, 4 and 8 bytes
_SHARED = "two of the tensors, one of them written to, share memory"
SUMS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # dtypes that can be accumulated


def table_of(source: ArrayLike, first: ArrayLike, length: Sequence[int] | Ints, place: ArrayLike) -> Tensor:
    """A table from its columns; but for the length they may be one number, the same in every row.

    >>> table_of(0, [2, 0], [3, 1], [0, 4]).tolist()
    [[0, 2, 3, 0], [0, 0, 1, 4]]
    """
    table = np.empty((len(length), 4), np.int64)
    table[:, 0], table[:, 1], table[:, 2], table[:, 3] = source, first, length, place
    return torch.from_numpy(table)


def numbers_of(name: str, table: Tensor, columns: int) -> Ints | str:
    """Of an index tensor, ``[n, columns]`` or for one column ``[n]``; what is wrong with it otherwise."""
    wrong = wrong_table(name, table, columns)
    out: Ints | str = table.detach().numpy().astype(np.int64) if wrong is None else wrong
    return out


def wrong_table(name: str, table: Tensor, columns: int) -> str | None:
    shape = "[n]" if columns == 1 else f"[n, {columns}]"
    fits = table.dim() == 1 if columns == 1 else table.dim() == 2 and table.shape[1] == columns
    if table.device.type != "cpu" or table.dtype not in (torch.int32, torch.int64) or not fits:
        return (
            f"{name} must be {shape} of int32 or int64 on the CPU, found {table.dtype} {list(table.shape)} on "
            f"{table.device}"
        )
    return None


def wrong_cu_seqlens(bounds: Ints, rows: int, length: int, total: int) -> str | None:
    """Why these cannot be the bounds of ``rows`` rows of at most ``length`` tokens in ``total``, or None."""
    if len(bounds) != rows + 1:
        return f"cu_seqlens has {len(bounds)} entries for {rows} rows, it needs {rows + 1}"
    if bounds[0] != 0 or bounds[-1] > total:
        return f"cu_seqlens goes from {bounds[0]} to {bounds[-1]}, it must go from 0 to at most the total of {total}"
    lengths = np.diff(bounds)
    if (bad := np.flatnonzero((lengths < 0) | (lengths > length))).size:
        return f"row {bad[0]} of cu_seqlens has {lengths[bad[0]]} tokens, there may be 0 to {length}"
    return None


def wrong_segments(table: Ints, rows: Sequence[int], total: int) -> str | None:
    """Why these segments do not fit sources of so many rows and ``total`` packed ones, or None."""
    source, first, length, place = table.T
    known = (source >= 0) & (source < len(rows))
    room = np.asarray([*rows, -1], np.int64)[np.where(known, source, len(rows))]
    good = known & (first >= 0) & (length >= 0) & (length <= room - first) & (place >= 0) & (length <= total - place)
    if (bad := np.flatnonzero(~good)).size:
        i = int(bad[0])
        of = f"of {rows[source[i]]}" if known[i] else f"where there are {len(rows)} sources"
        return (
            f"segment {i} moves {length[i]} rows from {first[i]} on of source {source[i]} ({of}) to {place[i]} of "
            f"{total}"
        )
    order = np.flatnonzero(length > 0)
    order = order[np.argsort(place[order], kind="stable")]
    ends = place[order] + length[order]
    if (bad := np.flatnonzero(ends[:-1] > place[order][1:])).size:
        a, b = order[bad[0]], order[bad[0] + 1]
        return f"segments {a} and {b} overlap from row {place[b]} on"
    return None


def wrong_data(**groups: Sequence[Tensor]) -> str | None:
    """Why these tensors cannot go together: dtype and device are one."""
    named = [
        (name if len(tensors) == 1 else f"{name}[{i}]", tensor)
        for name, tensors in groups.items()
        for i, tensor in enumerate(tensors)
    ]
    for name, tensor in named:
        if tensor.dim() < 1:
            return f"{name} must have at least one dimension, found a scalar"
        other, like = named[0]
        if (tensor.dtype, tensor.device) != (like.dtype, like.device):
            return (
                f"{name} is {tensor.dtype} on {tensor.device}, {other} is {like.dtype} on {like.device}; bring them to "
                "one dtype and device"
            )
        if tensor.layout != torch.strided:
            return f"{name} is {tensor.layout}, it must be dense: to_dense()"
        if tensor.dtype not in MOVED:
            return f"{name} is {tensor.dtype}; views of it as numbers of 1, 2, 4 or 8 bytes can be moved"
    return None


def wrong_levels(packed: Sequence[Sequence[int]], sources: Sequence[Sequence[int]]) -> str | None:
    """Why sources of these shapes are not the same number for each packed tensor, of equal rows, or None."""
    if not packed or len(sources) % len(packed):
        return f"{len(sources)} sources do not divide into {len(packed)} levels"
    count = len(sources) // len(packed)
    for k, one in enumerate(packed):
        if one[0] != packed[0][0]:
            return f"level {k} has {one[0]} packed rows, the first {packed[0][0]}"
        for s, source in enumerate(sources[k * count : (k + 1) * count]):
            if [*source[1:]] != [*one[1:]]:
                hint = "; a padded [B, L, *] goes in as its flatten(0, 1)" if len(one) > len(source) else ""
                return f"source {s} of level {k} has rows {[*source[1:]]}, packed are {[*one[1:]]}{hint}"
            if source[0] != sources[s][0]:
                return f"source {s} has {source[0]} rows in level {k} and {sources[s][0]} in the first"
    return None


def wrong_memory(written: Sequence[Tensor], read: Sequence[Tensor]) -> str | None:
    """Why these do not go into one kernel: two share memory, and one of them is written; or None. Views that are not
    contiguous reach no kernel: see ``wrong_views``."""
    extents = [
        (one.data_ptr(), one.data_ptr() + one.nbytes, tensors is written)
        for tensors in (written, read)
        for one in tensors
        if one.nbytes and one.is_contiguous() and not one.is_meta
    ]
    reached = reached_by_writes = 0
    for begin, end, writes in sorted(extents):
        if begin < (reached if writes else reached_by_writes):
            return _SHARED
        reached = max(reached, end)
        if writes:
            reached_by_writes = max(reached_by_writes, end)
    return None


def wrong_views(written: Sequence[Tensor]) -> str | None:
    """Why what is computed in copies of these cannot go back into them one after the other, or None.

    Columns ``x[:, :2]`` and ``x[:, 2:]`` are apart; ``x[:, :3]`` and ``x[:, 2:]`` share one.
    """
    for one in written:
        reach = 0  # of the dimensions with smaller strides, in elements
        for stride, n in sorted((stride, n) for stride, n in zip(one.stride(), one.shape, strict=True) if n > 1):
            if stride <= reach and one.numel():
                return f"a tensor {[*one.shape]} of strides {[*one.stride()]} shares memory with itself; clone it"
            reach += stride * (n - 1)
    there = [one for one in written if one.numel()]
    for i, one in enumerate(there):
        for other in there[:i]:
            if not _apart(one, other):
                return _SHARED
    return None


def _apart(one: Tensor, other: Tensor) -> bool:
    """Whether their memory is: all of it, or, of rows equally far from each other, each row's."""
    (begin, size), (start, length) = _reach(one, 0), _reach(other, 0)
    if begin + size <= start or start + length <= begin:
        return True
    pitch = one.stride(0) * one.element_size()
    if one.dim() < 2 or pitch != other.stride(0) * other.element_size():
        return False
    (begin, size), (start, length) = _reach(one, 1), _reach(other, 1)
    offset = (start - begin) % pitch
    return size <= offset and offset + length <= pitch


def _reach(tensor: Tensor, leading: int) -> tuple[int, int]:
    """Where the memory of its first row begins, leading dimensions aside, and how many bytes it reaches."""
    dims = zip(tensor.stride()[leading:], tensor.shape[leading:], strict=True)
    return tensor.data_ptr(), (1 + sum(stride * (n - 1) for stride, n in dims)) * tensor.element_size()


class Sum(NamedTuple):
    """Rows of a source that the same segments cover, and where in what is packed these have them, in their order."""

    source: int
    first: int
    length: int
    places: list[int]


def sums_of(table: Ints) -> list[Sum]:
    """The rows of every source, cut where a segment begins or ends.

    Segments (0, 0, 3, 5) and (0, 2, 2, 0): rows 0 and 1 have place 5, row 2 places 7 and 0, row 3 place 1.
    """
    out = list[Sum]()
    for source in np.unique(table[table[:, 2] > 0, 0]).tolist():
        mine = table[(table[:, 0] == source) & (table[:, 2] > 0)]
        _, first, length, place = mine.T
        edges = np.unique(np.concatenate([first, first + length]))
        if len(edges) == 2:  # all the same rows
            out.append(Sum(source, int(edges[0]), int(edges[1] - edges[0]), place.tolist()))
            continue
        lo, hi = np.searchsorted(edges, first), np.searchsorted(edges, first + length)
        over: list[list[int]] = [[] for _ in edges]
        for a, b, f, p in zip(lo.tolist(), hi.tolist(), first.tolist(), place.tolist(), strict=True):
            for k in range(a, b):
                over[k].append(p - f)
        for k, places in enumerate(over):
            if places:
                at = int(edges[k])
                out.append(Sum(source, at, int(edges[k + 1]) - at, [p + at for p in places]))
    return out


def bits_of(pad: float, dtype: torch.dtype) -> int:
    """The bits of a pad value, as a signed number of 64."""
    if pad == 0 and str(pad) != "-0.0":
        return 0
    value = torch.tensor(pad, dtype=torch.float64, device="cpu").to(dtype)
    if not dtype.is_floating_point and not dtype.is_complex and float(value) != pad:
        raise InvalidArgument(f"unpack: pad={pad!r} is not a value of {dtype}.")
    kind = _BITS.get(value.element_size())
    return 0 if kind is None else int(value.view(kind).item())  # a wider dtype the op refuses


_BITS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
