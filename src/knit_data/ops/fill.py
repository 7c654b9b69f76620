"""What stands beside the columns of a micro-batch, written in one pass over its slots.

    two rows of 3 and 2 tokens in 6 slots, no stored loss mask, ids [5 6 7 8 9 .], pad id 0, packed
    ids        5    6    7    8    9    0
    loss mask  0    1    1    0    1    0
    labels     6    7 -100    9 -100 -100
    rows       0    0    0    1    1    2        2: padding
    positions  0    1    2    0    1    0        the padding is an extent of its own

Padding gets the pad id, and zeros in every other column.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knit_data.errors import InvalidArgument
from knit_data.ops import extension

IGNORE = -100  # the label that cross entropy skips
BLANK = -1  # a row whose content is put out: as padding, but for its rows, positions and attention mask
_IDS: dict[int, Any] = {1: np.dtype(np.uint8), 2: np.dtype(np.int16), 4: np.dtype(np.int32), 8: np.dtype(np.int64)}


class Spec(NamedTuple):
    """Where in the arena, in bytes, each part begins; -1: it is not wanted. All parts have one entry a slot."""

    total: int  # slots
    ids: int
    ids_bytes: int  # 1: uint8, 2: int16, 4: int32, 8: int64
    pad: int  # the pad id
    masks: int  # uint8: stored loss masks of kind bool
    loss: int  # float32
    labels: int  # int64
    rows: int  # int32: which row a slot belongs to, n on padding
    positions: int  # int64
    attention: int  # int64: 1 on tokens
    packed: bool  # positions restart in every extent; else they count tokens and are 0 on padding


def fill_slots_reference(arena: Tensor, rows: Tensor, bounds: Tensor, columns: Tensor, spec: Tensor) -> None:
    """The specification, row by row. Also the kernel where the extension was not built."""
    refusal = _wrong_tensors(arena, rows, bounds, columns, spec) or _wrong_numbers(arena, rows, bounds, columns, spec)
    if refusal is not None:
        raise InvalidArgument(f"fill_slots: {refusal}")
    s, table, edges = Spec(*spec.tolist()), rows.view(-1, 3).tolist(), bounds.tolist()
    memory = arena.numpy()

    def part(at: int, dtype: Any) -> NDArray[Any] | None:
        return None if at < 0 else memory[at : at + s.total * np.dtype(dtype).itemsize].view(dtype)

    ids, loss, labels = part(s.ids, _IDS[s.ids_bytes]), part(s.loss, np.float32), part(s.labels, np.int64)
    owner, masks = part(s.rows, np.int32), part(s.masks, np.uint8)
    assert ids is not None and loss is not None and labels is not None and owner is not None
    owner[...] = len(table)
    blank = np.ones(s.total, bool)
    for i, (start, tokens, mask) in enumerate(table):
        row = slice(start, start + tokens)
        owner[row] = i
        if mask == BLANK:
            continue
        blank[row] = False
        if mask == 0:
            loss[row] = 1.0
        elif mask == 1 and masks is not None:
            loss[row] = masks[row] != 0
        loss[start : start + min(tokens, 1)] = 0.0
    ids[blank] = s.pad
    loss[blank] = 0.0
    for at, size in columns.view(-1, 2).tolist():
        memory[at : at + s.total * size].reshape(s.total, size)[blank] = 0
    labels[...] = IGNORE
    inside = (owner[:-1] == owner[1:]) & ~blank[1:] & (loss[1:] != 0)
    labels[:-1][inside] = ids[1:][inside]
    if (attention := part(s.attention, np.int64)) is not None:
        attention[...] = owner < len(table)
    if (positions := part(s.positions, np.int64)) is not None:
        if s.packed:
            for a, b in pairwise(edges):
                positions[a:b] = np.arange(b - a)
        else:
            positions[...] = 0
            for start, tokens, _ in table:
                positions[start : start + tokens] = np.arange(tokens)


def _wrong_tensors(arena: Tensor, *tables: Tensor) -> str | None:
    """What is wrong with the tensors whatever they hold, or None. The C++ kernel tests the same."""
    if arena.dtype != torch.uint8 or arena.device.type != "cpu" or not arena.is_contiguous():
        return f"arena must be a contiguous uint8 tensor on the CPU, found {arena.dtype} on {arena.device}"
    for table in tables:
        if table.dtype != torch.int64 or table.device.type != "cpu" or not table.is_contiguous():
            return (
                "rows, bounds, columns and spec must be contiguous int64 tensors on the CPU, found "
                f"{table.dtype} on {table.device}"
            )
    rows, bounds, columns, spec = (table.numel() for table in tables)
    if rows % 3 or columns % 2 or not bounds or spec != len(Spec._fields):
        return (
            f"{rows} numbers of rows, {columns} of columns, {bounds} bounds and {spec} of spec: give 3 a row, 2 a "
            f"column, at least one bound and {len(Spec._fields)}"
        )
    return None if arena.data_ptr() % 8 == 0 else "the arena must start at a multiple of 8 bytes"


def _wrong_numbers(arena: Tensor, *tables: Tensor) -> str | None:
    """What is wrong with the numbers, or None. The C++ kernel tests the same."""
    flat, bounds, pairs, spec = (table.flatten().tolist() for table in tables)
    rows, columns = (
        [flat[i : i + 3] for i in range(0, len(flat), 3)],
        [pairs[i : i + 2] for i in range(0, len(pairs), 2)],
    )
    s, size = Spec(*spec), arena.numel()
    if s.ids_bytes not in _IDS or not 0 <= s.total <= size:
        return f"{s.total} slots of ids of {s.ids_bytes} bytes in an arena of {size}"
    if not np.iinfo(_IDS[s.ids_bytes]).min <= s.pad <= np.iinfo(_IDS[s.ids_bytes]).max:
        return f"pad id {s.pad} does not fit ids of {s.ids_bytes} bytes"
    parts = [("ids", s.ids, s.ids_bytes), ("loss", s.loss, 4), ("labels", s.labels, 8), ("rows", s.rows, 4)]
    for name, at, width in (("masks", s.masks, 1), ("positions", s.positions, 8), ("attention", s.attention, 8)):
        parts += [(name, at, width)] if at != -1 else []
    for name, at, width in parts:
        if at < 0 or at % width or at + s.total * width > size:
            return f"{name} at {at}: {s.total} times {width} bytes do not lie aligned in an arena of {size}"
    for c, (at, width) in enumerate(columns):
        if at < 0 or width < 0 or at + s.total * width > size:
            return f"column {c} at {at}: {s.total} times {width} bytes do not lie in an arena of {size}"
    done = 0
    for i, (start, tokens, mask) in enumerate(rows):
        if not (done <= start <= s.total and 0 <= tokens <= s.total - start):
            return f"row {i} has {tokens} tokens from slot {start} on, after {done} of {s.total}"
        if mask not in (0, 4, BLANK) and not (mask == 1 and s.masks >= 0):
            return f"row {i} has a mask of kind {mask}"
        done = start + tokens
    if bounds[0] != 0 or bounds[-1] != s.total:
        return f"bounds must rise from 0 to {s.total}, found {bounds[0]} to {bounds[-1]}"
    for a, b in pairwise(bounds):
        if not 0 <= a <= b <= s.total:
            return f"bounds must rise from 0 to {s.total}, found {a} before {b}"
    return None


def _fallback(*tensors: Tensor) -> None:
    extension.say_that_it_is_missing()
    fill_slots_reference(*tensors)


torch.library.define(
    "knit::fill_slots", "(Tensor(a!) arena, Tensor rows, Tensor bounds, Tensor columns, Tensor spec) -> ()"
)
torch.library.register_fake("knit::fill_slots", lambda *_: None)
if extension.missing is not None:
    torch.library.impl("knit::fill_slots", "CPU", _fallback)
_fill_slots = torch.ops.knit.fill_slots.default


def fill_slots(
    arena: Tensor,
    rows: NDArray[np.int64],
    bounds: NDArray[np.int64],
    columns: NDArray[np.int64],
    spec: Spec | NDArray[np.int64],
) -> None:
    """Writes loss mask, labels, rows, positions and attention mask of a micro-batch, and its padding.

    Args:
        arena: ``[bytes]`` uint8 on the CPU, aligned to 8 bytes; ids, columns and stored masks are there already.
        rows: ``[n, 3]`` int64, ascending: first slot, tokens, and the kind of its stored loss mask: 0 none, 1 bool in
            ``spec.masks``, 4 float32 in ``spec.loss`` itself, ``BLANK``.
        bounds: ``[extents + 1]`` int64: where positions restart, if packed.
        columns: ``[C, 2]`` int64: where each other per-token column begins, and its bytes a token.
        spec: the numbers of a ``Spec``.

    Raises:
        InvalidArgument: before anything is written.
    """
    tables = [torch.from_numpy(table) for table in (rows, bounds, columns, np.asarray(spec, np.int64))]
    try:
        _fill_slots(arena, *tables)
    except RuntimeError as error:
        if isinstance(error, InvalidArgument):
            raise
        refusal = _wrong_tensors(arena, *tables) or _wrong_numbers(arena, *tables)
        if refusal is None:
            raise
        raise InvalidArgument(f"fill_slots: {refusal}") from None
