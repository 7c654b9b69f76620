"""Whether the head of a segment can be true: its checksum says that it is as it was written, not who wrote it.

Of a segment of two trajectories with 3 and 4 tokens, ``tokens.input_ids`` has to be an I64 of shape [7], 56 bytes that
begin where the tensor before it ends. Whoever reads by this table then stays inside the file and inside each tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from knit_data.errors import CorruptData
from knit_data.infos import ITEM_BYTES, Field, InfoTable, MediaTable, Ragged

_ITEM_BYTES = {**ITEM_BYTES, "U64": 8}  # no column is U64, but the checksums are
_CELLS = {"policy_version": "i8", "mean_policy_version": "f8", "n_tokens": "i4", "loss_tokens": "i4", "patches": "i4"}
_CELLS |= {"mask_bytes": "i1", "group_rows": "i4"}
_MEDIA_CELLS = {"tokens": "i8", "patches": "i8", "checksum": "u8"}
_MASKS = {0: None, 1: "BOOL", 4: "F32"}

Kinds = Mapping[str, tuple[str, list[int]]]  # dtype and shape of each tensor in the file


@contextmanager
def understood(where: str) -> Iterator[None]:
    """Whatever our reading of a head that cannot be true comes to is ``CorruptData``."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as e:
        raise CorruptData(f"{where}: its head contradicts itself ({e}); restore the file or remove it.") from e


def check_tensors(header: Mapping[str, Any], info_bytes: int, total: int) -> Kinds:
    """Dtype and shape of each tensor; ``ValueError`` unless they fill ``total`` bytes end to end, table first."""
    at, kinds = 0, {}
    for name, spec in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        (begin, end), code, shape = spec["data_offsets"], spec["dtype"], spec["shape"]
        if not all(type(n) is int and n >= 0 for n in (begin, end, *shape)):
            raise ValueError(f"{name} has shape {shape} and lies at {begin} to {end}")
        size = _ITEM_BYTES[code] * math.prod(shape)
        if begin != at or end - begin != size:
            raise ValueError(f"{name} lies at {begin} to {end}, {size} bytes from {at} belong there")
        if name.startswith(("info.", "media.")) != (end <= info_bytes) and size:
            raise ValueError(f"{name} lies at {begin} to {end}, the table ends at {info_bytes}")
        at, kinds[name] = end, (code, shape)
    if at != total:
        raise ValueError(f"the tensors take {at} bytes, the file should have {total}")
    return kinds


def check_table(table: InfoTable, kinds: Kinds) -> None:
    """``ValueError`` unless the rows agree with each other, with the schema and with the tensors."""
    n, cells = len(table), table.columns
    _check_cells(table, n, _CELLS, ("id", "group", "attributes", "spans"))
    for name, (at_least, at_most) in {
        "n_tokens": (1, None),
        "loss_tokens": (0, cells["n_tokens"]),
        "patches": (0, None),
    }.items():
        if (cells[name] < at_least).any() or (at_most is not None and (cells[name] > at_most).any()):
            raise ValueError(f"{name} are {cells[name].tolist()}")
    names, scalars = table.schema.names, {f"value.{name}" for name, _ in table.schema.scalars}
    if not n or len(set(names)) != len(names) or cells["checksums"].shape != (n, len(names)):
        raise ValueError(f"{n} rows of columns {list(names)} with checksums {cells['checksums'].shape}")
    if cells.keys() != {*_CELLS, "checksums", *scalars} or any(cells[name].shape != (n,) for name in scalars):
        raise ValueError(f"the table has {sorted(cells)}")
    masks, members = set(cells["mask_bytes"].tolist()), set(cells["group_rows"].tolist())
    if len(masks) != 1 or not masks <= _MASKS.keys() or len(members) != 1 or not members <= {0, n}:
        raise ValueError(f"{n} rows of mask_bytes {masks} and group_rows {members}")
    mask = _MASKS[masks.pop()]
    fields = [*table.schema.fields, *([Field("loss_mask", mask, ())] if mask else [])]
    wanted = {}
    for f in fields:
        rows = int(cells["n_tokens"].sum(dtype=np.int64)) if f.per_token else n
        wanted[f"{'tokens' if f.per_token else 'values'}.{f.name}"] = (f.dtype, [rows, *f.shape])
    for text in set(table.ragged["attributes"].texts()):
        if not all(isinstance(value, str) for value in json.loads(text).values()):
            raise ValueError(f"attributes {text}")
    _check_media(table, wanted)
    found = {name: kind for name, kind in kinds.items() if not name.startswith(("info.", "media."))}
    if found != wanted:
        name = min(name for name in found.keys() | wanted if found.get(name) != wanted.get(name))
        raise ValueError(f"{name} is {found.get(name, 'absent')}, the table says {wanted.get(name, 'absent')}")


def _check_media(table: InfoTable, wanted: dict[str, tuple[str, list[int]]]) -> None:
    """Adds the tensors of the media to ``wanted``."""
    media, spans = table.media, table.ragged["spans"]
    count = len(media) if media.columns else 0
    if count:
        _check_cells(media, count, _MEDIA_CELLS, ("kind", "parts"))
        if media.columns["digest"].shape != (count, 32) or media.columns["digest"].dtype != np.uint8:
            raise ValueError(f"digests of shape {media.columns['digest'].shape}")
        if (media.columns["tokens"] < 1).any() or (media.columns["patches"] < 0).any():
            raise ValueError(f"media of {media.columns['tokens'].tolist()} tokens")
        for u, text in enumerate(media.ragged["parts"].texts()):
            wanted |= {f"medium.{u}.{name}": (code, shape) for name, code, shape in json.loads(text)}
    u, start, length = spans.data.reshape(-1, 4)[:, :3].T
    ends = np.repeat(table.columns["n_tokens"].astype(np.int64), spans.lengths)
    if ((u < 0) | (u >= count) | (start < 0) | (length < 1) | (start > ends) | (length > ends - start)).any():
        raise ValueError(f"spans {spans.data.tolist()} among {count} media")


def _check_cells(table: InfoTable | MediaTable, n: int, cells: Mapping[str, str], ragged: tuple[str, ...]) -> None:
    """``n`` rows in each column and each ragged one, texts in UTF-8."""
    for name, kind in cells.items():
        if table.columns[name].dtype != kind or table.columns[name].shape != (n,):
            raise ValueError(f"{name} is {table.columns[name].dtype} {table.columns[name].shape}, not {kind} ({n},)")
    if table.ragged.keys() != set(ragged):
        raise ValueError(f"the table has {sorted(table.ragged)}")
    for name in ragged:
        found: Ragged = table.ragged[name]
        if len(found) != n or (found.lengths < 0).any() or len(found.data) != found.ptr[-1]:
            raise ValueError(f"{name} has {len(found.data)} entries in {len(found)} rows of lengths {found.lengths}")
        if name == "spans":
            if found.data.dtype != np.int64 or found.data.ndim != 2:
                raise ValueError(f"spans are {found.data.dtype} {found.data.shape}")
        elif found.data.dtype != np.uint8 or found.data.ndim != 1:
            raise ValueError(f"{name} is {found.data.dtype} {found.data.shape}")
        else:
            found.texts()
