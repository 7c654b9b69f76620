"""The segment file: what one put makes visible, as a safetensors file.

    u64 header length | JSON header | info table | payload columns | media

Any safetensors tool opens it. The info table comes first, so that one read of the head gives all metadata; columns
follow end to end, one tensor per field with the trajectories in order; each distinct medium lies there once. Within
both halves tensors are sorted by falling element size, which keeps every element aligned without gaps.

XXH3-64 guards the head (header and table together), every trajectory's part of every column, and every medium.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import xxhash

from knit_data.errors import InvalidTrajectory
from knit_data.infos import Array, Field, InfoTable, MediaTable, Ragged, Schema, attributes_json
from knit_data.store.head import (
    FORMAT,
    HASH_AT,
    HASH_LEN,
    NUMPY,
    PREFIX,
    Bases,
    checksum,
    column_name,
    head_hash,
    located,
    torch_dtype,
)
from knit_data.trajectory import DTYPES, Media, Trajectory, placeholder, tensor_bytes, value_tensor

_CODES = {np.dtype(dtype): code for code, dtype in NUMPY.items()}

Buffer = bytes | memoryview
Span = tuple[int, int, int, int]  # medium, start, length, placeholder id


@dataclass(frozen=True, eq=False)
class Segment:
    """An encoded segment: the bytes to create it from, and the table that readers will see."""

    parts: Sequence[Buffer]
    table: InfoTable

    @property
    def nbytes(self) -> int:
        return sum(len(p) for p in self.parts)


def schema_of(trajectory: Trajectory) -> Schema:
    """The columns of one trajectory; a store takes only trajectories of one schema."""
    fields = [_field(k, v.dtype, v.shape[1:], True) for k, v in trajectory.tokens.items() if k != "loss_mask"]
    scalars = []
    for name, raw in trajectory.values.items():
        if not isinstance(raw, torch.Tensor):
            scalars.append((name, "F32"))
        elif raw.ndim == 0:
            scalars.append((name, DTYPES[value_tensor(raw).dtype]))
        else:
            fields.append(_field(name, raw.dtype, raw.shape, False))
    return Schema(tuple(sorted(fields, key=lambda f: f.name)), tuple(sorted(scalars)))


@lru_cache(maxsize=256)  # the same for every trajectory, and so compared by identity
def _field(name: str, dtype: torch.dtype, shape: torch.Size, per_token: bool) -> Field:
    return Field(name, DTYPES[dtype], tuple(shape), per_token)


def check_schema(trajectory: Trajectory, schema: Schema, where: str) -> None:
    found = schema_of(trajectory)
    if found == schema:
        return
    mine, theirs = found.describe(), schema.describe()
    differ = [
        f"{name}: {mine.get(name, 'absent')} instead of {theirs.get(name, 'absent')}"
        for name in sorted(mine.keys() | theirs.keys())
        if mine.get(name) != theirs.get(name)
    ]
    raise InvalidTrajectory(
        f"trajectory {trajectory.id!r} does not have the columns of {where}: {'; '.join(differ)}. All trajectories of "
        "a store have the same fields, dtypes and trailing shapes; fill what is missing, or use another store."
    )


def encode(
    trajectories: Sequence[Trajectory], *, writer: int, segment: int, grouped: bool, session: str = ""
) -> Segment:
    """Lay out checked trajectories of one schema. Payload tensors are referenced, not copied.

    ``session`` names the writer instance, which so recognises its own segment after a lost reply.
    """
    schema = schema_of(trajectories[0])
    masks = _masks(trajectories)
    media, refs = _distinct_media(trajectories)
    columns: list[tuple[str, str, list[int], list[Buffer]]] = []  # name, dtype, shape, one buffer per trajectory
    total = sum(t.tokens["input_ids"].shape[0] for t in trajectories)
    for f in schema.fields:
        raw = [t.tokens[f.name] if f.per_token else value_tensor(t.values[f.name]) for t in trajectories]
        rows = total if f.per_token else len(trajectories)
        columns.append((column_name(f), f.dtype, [rows, *f.shape], [tensor_bytes(x) for x in raw]))
    if masks is not None:
        columns.append(("tokens.loss_mask", DTYPES[masks[0].dtype], [total], [tensor_bytes(m) for m in masks]))
    table = _table(trajectories, schema, masks, columns, media, refs, grouped)
    for u, medium in enumerate(media):
        for name, tensor in sorted(medium.tensors.items()):
            columns.append((f"medium.{u}.{name}", DTYPES[tensor.dtype], list(tensor.shape), [tensor_bytes(tensor)]))
    head, payload, bases = _assemble(schema, table, columns, f"{writer}/{segment}", session)
    return Segment([head, *(p for p in payload if len(p))], located(table, bases, writer, segment))


def _masks(trajectories: Sequence[Trajectory]) -> list[torch.Tensor] | None:
    """Stored loss masks, bool or float32; None when no trajectory brings one."""
    given = [t.tokens.get("loss_mask") for t in trajectories]
    if all(m is None for m in given):
        return None
    out = []
    for t, mask in zip(trajectories, given, strict=True):
        if mask is None:
            mask = torch.ones(len(t.tokens["input_ids"]), dtype=torch.bool)
            mask[0] = False
        out.append(mask.cpu())
    if any(m.dtype != torch.bool for m in out):
        out = [m.float() for m in out]
    return out


def _distinct_media(trajectories: Sequence[Trajectory]) -> tuple[list[Media], list[list[Span]]]:
    """Media once each, and per trajectory its spans."""
    index: dict[str, int] = {}
    media: list[Media] = []
    refs: list[list[Span]] = []
    for t in trajectories:
        row: list[Span] = []
        for ref in t.media:
            u = index.setdefault(ref.media.digest, len(media))
            if u == len(media):
                media.append(ref.media)
            row += [(u, start, length, placeholder(t, start, length)) for start, length in ref.spans]
        refs.append(row)
    return media, refs


def _table(
    trajectories: Sequence[Trajectory],
    schema: Schema,
    masks: list[torch.Tensor] | None,
    columns: Sequence[tuple[str, str, list[int], list[Buffer]]],
    media: Sequence[Media],
    refs: Sequence[Sequence[Span]],
    grouped: bool,
) -> InfoTable:
    n = len(trajectories)
    lengths = np.array([t.tokens["input_ids"].shape[0] for t in trajectories], np.int32)
    loss = lengths - 1 if masks is None else np.array([int((m != 0).sum()) for m in masks], np.int32)
    sums = np.zeros((n, len(schema.fields) + 1), np.uint64)
    for c, (*_, buffers) in enumerate(columns):
        sums[:, c] = [checksum(b) for b in buffers]
    cells: dict[str, Array] = {
        "policy_version": np.array([t.policy_version for t in trajectories], np.int64),
        "mean_policy_version": np.array(
            [t.policy_version if t.mean_policy_version is None else t.mean_policy_version for t in trajectories],
            np.float64,
        ),
        "n_tokens": lengths,
        "loss_tokens": loss,
        "patches": np.array([sum(ref.media.cost for ref in t.media) for t in trajectories], np.int32),
        "mask_bytes": np.full(n, 0 if masks is None else masks[0].element_size(), np.int8),
        "group_rows": np.full(n, n if grouped else 0, np.int32),
        "checksums": sums,
    }
    for name, code in schema.scalars:
        cells[f"value.{name}"] = np.array([_number(t.values[name]) for t in trajectories], NUMPY[code])
    attributes = attributes_json(trajectories[0].attributes)
    flat = np.array([span for row in refs for span in row], np.int64).reshape(-1, 4)
    ragged = {
        "id": Ragged.of_texts([t.id for t in trajectories]),
        "group": Ragged.of_texts([t.group for t in trajectories]),
        "attributes": Ragged.of_texts([attributes] * n),
        "spans": Ragged.of_lengths(flat, np.array([len(row) for row in refs])),
    }
    described = [json.dumps([[k, DTYPES[v.dtype], list(v.shape)] for k, v in sorted(m.tensors.items())]) for m in media]
    media_cells: dict[str, Array] = {
        "digest": np.array([list(bytes.fromhex(m.digest)) for m in media], np.uint8).reshape(-1, 32),
        "tokens": np.array([m.tokens for m in media], np.int64),
        "patches": np.array([m.cost for m in media], np.int64),
        "checksum": np.array([_medium_hash(m) for m in media], np.uint64),
    }
    media_ragged = {"kind": Ragged.of_texts([m.kind for m in media]), "parts": Ragged.of_texts(described)}
    return InfoTable(cells, ragged, schema, MediaTable(media_cells, media_ragged))


def _number(value: torch.Tensor | float) -> float:
    return value_tensor(value).item() if isinstance(value, torch.Tensor) else float(value)


def _medium_hash(medium: Media) -> int:
    hasher = xxhash.xxh3_64()
    for _, tensor in sorted(medium.tensors.items()):
        hasher.update(tensor_bytes(tensor))
    return hasher.intdigest()


def _assemble(
    schema: Schema,
    table: InfoTable,
    columns: Sequence[tuple[str, str, list[int], list[Buffer]]],
    place: str,
    session: str,
) -> tuple[bytes, list[Buffer], Bases]:
    """The head (header and table), the payload buffers in file order, and where each column begins in the file."""
    arrays = table.arrays("info.")
    if len(table.media):
        arrays |= table.media.arrays("media.")
    # info.id goes last among the bytes and is filled up to 64, so that the payload starts aligned
    order = sorted(arrays, key=lambda k: (-arrays[k].dtype.itemsize, k == "info.id", k))
    header: dict[str, Any] = {}
    at, infos = 0, []
    for name in order:
        data = np.ascontiguousarray(arrays[name]).tobytes()
        shape = list(arrays[name].shape)
        if name == "info.id":
            data = data.ljust(-(-(at + len(data)) // 64) * 64 - at, b"\0")
            shape = [len(data)]
        header[name] = {"dtype": _CODES[arrays[name].dtype], "shape": shape, "data_offsets": [at, at + len(data)]}
        infos.append(data)
        at += len(data)
    info_bytes, payload = at, []
    for name, code, shape, buffers in sorted(columns, key=lambda c: (-torch_dtype(c[1]).itemsize, c[0])):
        size = sum(len(b) for b in buffers)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [at, at + size]}
        payload += buffers
        at += size
    meta = {"format": FORMAT, "info_bytes": str(info_bytes), "bytes": str(at), "place": place, "session": session}
    meta["schema"] = _schema_text(schema)
    text = PREFIX + b"0" * HASH_LEN + b'",' + json.dumps(meta).encode()[1:] + b","
    text += json.dumps(header, separators=(",", ":")).encode()[1:]
    text = text.ljust(-(-(8 + len(text)) // 64) * 64 - 8)
    head = bytearray(len(text).to_bytes(8, "little") + text + b"".join(infos))
    head[HASH_AT : HASH_AT + HASH_LEN] = head_hash(memoryview(head)).encode()
    start = 8 + len(text)
    return bytes(head), payload, {name: start + header[name]["data_offsets"][0] for name, *_ in columns}


@lru_cache(maxsize=16)
def _schema_text(schema: Schema) -> str:
    return json.dumps(schema.to_json())
