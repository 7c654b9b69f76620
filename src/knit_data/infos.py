"""What is known of trajectories without reading them: a columnar table, and its rows.

Everything that admission, planning and the loss denominator need is here, so that they touch no payload. The table
stays columnar from file to rank: the same rows as JSON hold the interpreter lock many times longer, which
benchmarks/bench_exchange.py measures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import safetensors.numpy
import xxhash
from numpy.typing import NDArray

from knit_data.errors import CorruptData

Array = NDArray[Any]
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class Field:
    """One payload column: dtype (safetensors code), trailing shape, and whether it has an entry per token."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    per_token: bool = True

    @property
    def row_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class Schema:
    """The columns that every trajectory of a store has. ``loss_mask`` is apart: any trajectory may leave it out."""

    fields: tuple[Field, ...]
    scalars: tuple[tuple[str, str], ...]  # name, dtype: values of shape () live in the table itself

    @property
    def names(self) -> tuple[str, ...]:
        """The order of ``offsets`` and ``checksums``: the payload columns, then loss_mask."""
        return (*(f.name for f in self.fields), "loss_mask")

    def to_json(self) -> dict[str, Any]:
        return {
            "fields": [[f.name, f.dtype, list(f.shape), f.per_token] for f in self.fields],
            "scalars": [list(s) for s in self.scalars],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Schema:
        return cls(
            tuple(Field(name, dtype, tuple(shape), token) for name, dtype, shape, token in data["fields"]),
            tuple((name, dtype) for name, dtype in data["scalars"]),
        )

    def describe(self) -> dict[str, str]:
        per = {f.name: f"{f.dtype} {['n', *f.shape] if f.per_token else list(f.shape)}" for f in self.fields}
        return per | {name: f"{dtype} []" for name, dtype in self.scalars}


class Ragged:
    """Rows of differing length end to end: row i is ``data[ptr[i]:ptr[i + 1]]``."""

    __slots__ = ("data", "ptr")

    def __init__(self, data: Array, ptr: Array) -> None:
        self.data, self.ptr = data, ptr

    @classmethod
    def of_lengths(cls, data: Array, lengths: Array) -> Ragged:
        ptr = np.zeros(len(lengths) + 1, np.int64)
        lengths.cumsum(out=ptr[1:])
        return cls(data[: ptr[-1]], ptr)

    @classmethod
    def of_texts(cls, texts: Sequence[str]) -> Ragged:
        blobs = [text.encode() for text in texts]
        data = np.frombuffer(bytearray(b"".join(blobs)), np.uint8)
        return cls.of_lengths(data, np.fromiter(map(len, blobs), np.int64, len(blobs)))

    def __len__(self) -> int:
        return len(self.ptr) - 1

    @property
    def lengths(self) -> Array:
        out: Array = self.ptr[1:] - self.ptr[:-1]  # np.diff is slow on short ones
        return out

    def row(self, i: int) -> Array:
        return self.data[self.ptr[i] : self.ptr[i + 1]]

    def text(self, i: int) -> str:
        return self.row(i).tobytes().decode()

    def texts(self) -> list[str]:
        return [blob.decode() for blob in self.blobs()]

    def blobs(self) -> list[bytes]:
        """The bytes of each row, of single bytes."""
        blob, ptr = self.data.tobytes(), self.ptr.tolist()
        return [blob[a:b] for a, b in pairwise(ptr)]

    def rows(self, first: int, last: int) -> Ragged:
        ptr = self.ptr[first : last + 1]
        return Ragged(self.data[ptr[0] : ptr[-1]], ptr - ptr[0])

    def take(self, rows: Array) -> Ragged:
        lengths = self.lengths[rows]
        ptr = Ragged.of_lengths(lengths, lengths).ptr
        index = np.arange(ptr[-1]) + np.repeat(self.ptr[rows] - ptr[:-1], lengths)
        return Ragged(self.data[index], ptr)

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        return Ragged.of_lengths(np.concatenate([p.data for p in parts]), np.concatenate([p.lengths for p in parts]))


@dataclass(frozen=True, eq=False)
class Table:
    """Equal-length columns: arrays ``[N, ...]`` and ragged ones."""

    columns: Mapping[str, Array]
    ragged: Mapping[str, Ragged]

    def _take(self, rows: Array) -> dict[str, Any]:
        return {
            "columns": {k: v[rows] for k, v in self.columns.items()},
            "ragged": {k: v.take(rows) for k, v in self.ragged.items()},
        }

    @staticmethod
    def _concat(tables: Sequence[Table]) -> dict[str, Any]:
        first = tables[0]
        return {
            "columns": {k: np.concatenate([t.columns[k] for t in tables]) for k in first.columns},
            "ragged": {k: Ragged.concat([t.ragged[k] for t in tables]) for k in first.ragged},
        }

    def arrays(self, prefix: str) -> dict[str, Array]:
        """Flat named arrays, as they lie in a segment and in a message between ranks."""
        out = {prefix + k: v for k, v in self.columns.items()}
        for k, v in self.ragged.items():
            out[f"{prefix}{k}"] = v.data
            out[f"{prefix}len:{k}"] = v.lengths.astype(np.int32)
        return out

    @staticmethod
    def _split(arrays: Mapping[str, Array], prefix: str) -> dict[str, Any]:
        columns = {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}
        names = [k[4:] for k in columns if k.startswith("len:")]
        ragged = {k: Ragged.of_lengths(columns.pop(k), columns.pop(f"len:{k}")) for k in names}
        return {"columns": columns, "ragged": ragged}


@dataclass(frozen=True, eq=False)
class MediaTable(Table):
    """The distinct media of the segments in question.

    Columns: digest uint8 [U, 32], tokens, patches, writer, segment, checksum. Ragged: kind (text), parts (text: JSON
    list of name, dtype, shape), extents int64 [parts, 2] (byte offset in the segment file, length).
    """

    def __len__(self) -> int:
        return len(self.columns["tokens"])

    def take(self, rows: Array) -> MediaTable:
        return MediaTable(**self._take(rows))

    def distinct(self) -> tuple[Array, Array]:
        """The first row of each content, and for every row which of these it equals: segments hold their own copies."""
        digests = np.ascontiguousarray(self.columns["digest"]).view("V32").reshape(-1)
        _, first, which = np.unique(digests, return_index=True, return_inverse=True)
        return first, which.reshape(-1)

    @staticmethod
    def concat(tables: Sequence[MediaTable]) -> MediaTable:
        if len(tables) == 1:
            return tables[0]
        return MediaTable(**Table._concat(tables))


@dataclass(frozen=True, eq=False)
class InfoTable(Table):
    """Metadata of N trajectories, column by column.

    Columns ``[N]``: writer, segment, item (where it is stored), segment_rows (rows of that segment), group_rows
    (members that put_group wrote together; 0: a lone put), policy_version, mean_policy_version, n_tokens,
    loss_tokens, patches, cut (1: shortened at admission), mask_bytes (0: no stored loss_mask, 1: bool, 4: float32),
    ``value.<name>`` per scalar;
    ``[N, F]``: offsets (of the row's bytes in the segment file, per payload column), checksums (XXH3-64 of them).
    Ragged: id, group, attributes (canonical JSON), spans int64 [S, 4] (medium, start, length,
    the id that stands there; -1: several).
    """

    schema: Schema
    media: MediaTable

    def __len__(self) -> int:
        return len(self.columns["n_tokens"])

    def __getitem__(self, row: int) -> TrajectoryInfo:
        return TrajectoryInfo(self, row)

    def infos(self) -> list[TrajectoryInfo]:
        return [TrajectoryInfo(self, i) for i in range(len(self))]

    def take(self, rows: Array) -> InfoTable:
        """A copy of these rows, in this order; media that none of them uses are left out."""
        parts = self._take(np.asarray(rows, np.int64))
        media = self.media
        if len(media):
            spans = parts["ragged"]["spans"]
            used, spans.data[:, 0] = np.unique(spans.data[:, 0], return_inverse=True)
            media = media.take(used)
        return InfoTable(**parts, schema=self.schema, media=media)

    def rows(self, first: int, last: int) -> InfoTable:
        """Rows ``first`` to ``last - 1`` as views; all media stay."""
        columns = {k: v[first:last] for k, v in self.columns.items()}
        ragged = {k: v.rows(first, last) for k, v in self.ragged.items()}
        return replace(self, columns=columns, ragged=ragged)

    @staticmethod
    def concat(tables: Sequence[InfoTable]) -> InfoTable:
        if len(tables) == 1:
            return tables[0]
        parts = Table._concat(tables)
        media = MediaTable.concat([t.media for t in tables if len(t.media)] or [tables[0].media])
        spans, base = [], 0
        for t in tables:
            data = t.ragged["spans"].data
            spans.append(data + np.array([base, 0, 0, 0]) if base else data)
            base += len(t.media)
        parts["ragged"]["spans"] = Ragged(np.concatenate(spans), parts["ragged"]["spans"].ptr)
        return InfoTable(**parts, schema=tables[0].schema, media=media)

    def with_values(self, values: Mapping[str, Sequence[float]]) -> InfoTable:
        """A copy with float32 columns added: what an annotation computed at admission."""
        added = {f"value.{k}": np.asarray(v, np.float32) for k, v in values.items()}
        return replace(self, columns={**self.columns, **added})

    @property
    def value_names(self) -> list[str]:
        return sorted(k[len("value.") :] for k in self.columns if k.startswith("value."))

    def fingerprints(self) -> list[int]:
        """64 bits per row over everything but its address: equal for two puts of equal content."""
        names = ("policy_version", "mean_policy_version", "n_tokens", "loss_tokens", "patches", "mask_bytes")
        if not len(self):
            return []
        values = sorted(f"value.{name}" for name, _ in self.schema.scalars)
        cells = [self.columns[name] for name in (*names, *values, "checksums")]
        head = [np.ascontiguousarray(c).reshape(len(self), -1).view(np.uint8) for c in cells]
        matrix = np.concatenate(head, axis=1)
        spans, digests, out = self.ragged["spans"], self.media.columns["digest"], []
        texts = zip(self.ragged["group"].blobs(), self.ragged["attributes"].blobs(), strict=True)
        for i, (group, attributes) in enumerate(texts):
            hasher = xxhash.xxh3_64(matrix[i])
            hasher.update(b"|%d|%b|%d|%b" % (len(group), group, len(attributes), attributes))
            if len(row := spans.row(i)):
                hasher.update(row[:, 1:].tobytes())
                hasher.update(digests[row[:, 0]].tobytes())
            out.append(hasher.intdigest())
        return out

    def to_bytes(self, note: str = "") -> bytes:
        """For another rank: plain arrays in safetensors framing, nothing that could run. ``note`` travels along.

        safetensors | note | u64 bytes of the note | XXH3-64 of all before it
        """
        arrays = self.arrays("info.") | self.media.arrays("media.")
        packed = {k: np.ascontiguousarray(v) for k, v in arrays.items()}
        text = note.encode()
        body = safetensors.numpy.save(packed, {"schema": json.dumps(self.schema.to_json())})
        body = b"".join([body, text, len(text).to_bytes(8, "little")])
        return body + xxhash.xxh3_64_digest(body)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], schema: Schema) -> InfoTable:
        return cls(**Table._split(arrays, "info."), schema=schema, media=MediaTable(**Table._split(arrays, "media.")))

    @classmethod
    def from_bytes(cls, data: bytes) -> tuple[InfoTable, str]:
        """The table and its note."""
        body, mark = data[:-8], data[-8:]
        if (found := xxhash.xxh3_64_digest(body)) != mark:
            raise CorruptData(
                f"a table of {len(data)} bytes hashes to {found.hex()}, its end says {mark.hex()}; it was cut or "
                "damaged on its way."
            )
        size, end = int.from_bytes(body[:8], "little"), len(body) - 8
        note = end - int.from_bytes(body[end:], "little")
        try:
            schema = Schema.from_json(json.loads(json.loads(body[8 : 8 + size])["__metadata__"]["schema"]))
            return cls.from_arrays(safetensors.numpy.load(body[:note]), schema), body[note:end].decode()
        except (ValueError, KeyError, TypeError, safetensors.SafetensorError) as e:
            raise CorruptData(f"a table of {len(data)} bytes is not in this format: {e!r}.") from e


class TrajectoryInfo:
    """One row of an ``InfoTable``: what is known of a trajectory before its tensors are read."""

    __slots__ = ("row", "table")

    def __init__(self, table: InfoTable, row: int) -> None:
        self.table, self.row = table, row

    @property
    def id(self) -> str:
        return self.table.ragged["id"].text(self.row)

    @property
    def group(self) -> str:
        return self.table.ragged["group"].text(self.row)

    @property
    def attributes(self) -> Mapping[str, str]:
        return dict(parse_attributes(self.table.ragged["attributes"].text(self.row)))

    @property
    def policy_version(self) -> int:
        return int(self.table.columns["policy_version"][self.row])

    @property
    def mean_policy_version(self) -> float:
        return float(self.table.columns["mean_policy_version"][self.row])

    @property
    def n_tokens(self) -> int:
        return int(self.table.columns["n_tokens"][self.row])

    @property
    def loss_tokens(self) -> int:
        """Non-zero entries of the loss mask."""
        return int(self.table.columns["loss_tokens"][self.row])

    @property
    def patches(self) -> int:
        """Cost of its media in the encoder."""
        return int(self.table.columns["patches"][self.row])

    @property
    def values(self) -> dict[str, float]:
        """Scalar values and annotations, as Python numbers."""
        return {k: self.table.columns[f"value.{k}"][self.row].item() for k in self.table.value_names}

    @property
    def address(self) -> tuple[int, int, int]:
        """Writer number, segment number, row: where it is stored."""
        columns = self.table.columns
        return int(columns["writer"][self.row]), int(columns["segment"][self.row]), int(columns["item"][self.row])

    def __repr__(self) -> str:
        return (
            f"TrajectoryInfo(id={self.id!r}, group={self.group!r}, policy_version={self.policy_version}, "
            f"n_tokens={self.n_tokens}, attributes={dict(self.attributes)})"
        )


@lru_cache(maxsize=4096)
def parse_attributes(text: str) -> Mapping[str, str]:
    data = json.loads(text)
    return data if isinstance(data, dict) else {}


def attributes_json(attributes: Mapping[str, str]) -> str:
    """One spelling for equal attributes."""
    return json.dumps(dict(attributes), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
