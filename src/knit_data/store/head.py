"""The head of a segment file, header and info table: found, verified, and checked against itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import xxhash

from knit_data.errors import CorruptData
from knit_data.infos import Array, Field, InfoTable, MediaTable, Ragged, Schema
from knit_data.store.soundness import check_table, check_tensors, understood
from knit_data.trajectory import DTYPES

FORMAT = "knit_data.segment.1"
HEAD_GUESS = 64 * 1024  # one read of this size covers the head of most segments
PREFIX = b'{"__metadata__":{"xxh3":"'
HASH_AT, HASH_LEN = 8 + len(PREFIX), 16
_LARGEST_HEAD = 2**31  # more can only be a misread number
_TORCH = {code: dtype for dtype, code in DTYPES.items()}
NUMPY: dict[str, Any] = {"U64": np.uint64, "I64": np.int64, "F64": np.float64, "I32": np.int32, "F32": np.float32}
NUMPY |= {"I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_}

Bases = Mapping[str, int]  # column -> offset of its first byte in the file


def head_size(head: bytes | bytearray | memoryview, where: str) -> int:
    """Bytes of header plus table, from the first bytes of a segment (a prefix of ``HEAD_GUESS`` bytes is enough)."""
    length = _header_length(head, where)
    if len(head) < 8 + length:
        return 8 + length  # header longer than the guess: read it first, then ask again
    return 8 + length + int(_metadata(head, length, where)["info_bytes"])


def head_facts(head: bytes | bytearray | memoryview, where: str) -> tuple[int, str]:
    """Size of the whole file in bytes, and the session that wrote it."""
    length = _header_length(head, where)
    meta = _metadata(head, length, where)
    return 8 + length + int(meta["bytes"]), meta["session"]


def decode_head(head: bytes | bytearray | memoryview, *, writer: int, segment: int, where: str = "") -> InfoTable:
    """The info table of a segment from its first ``head_size`` bytes; verifies the checksum of both."""
    where = where or f"segment {segment} of writer {writer}"
    length = _header_length(head, where)
    meta = _metadata(head, length, where)
    start, info_bytes = 8 + length, int(meta["info_bytes"])
    if len(head) < start + info_bytes:
        raise CorruptData(f"{where}: the head needs {start + info_bytes} bytes, found {len(head)}; was it cut short?")
    head = memoryview(head)[: start + info_bytes]
    found, wanted = head_hash(head), meta["xxh3"]
    if found != wanted:
        raise CorruptData(f"{where}: header and table hash to {found}, the file says {wanted}; restore or remove it.")
    if meta.get("place") != f"{writer}/{segment}":
        raise CorruptData(
            f"{where}: this file was written as segment {meta.get('place')} (writer/number), it was found as "
            f"{writer}/{segment}; somebody moved it. Restore the right one."
        )
    with understood(where):
        return _decoded(head, start, meta, writer, segment)


def _decoded(head: memoryview, start: int, meta: Mapping[str, str], writer: int, segment: int) -> InfoTable:
    """The table of a head whose checksum is right; ``ValueError`` and the like if it cannot be true."""
    header = {name: spec for name, spec in _header(bytes(head[8:start])).items() if name != "__metadata__"}
    kinds = check_tensors(header, int(meta["info_bytes"]), int(meta["bytes"]))
    schema = _schema_in(meta["schema"])
    arrays: dict[str, Array] = {}
    bases: dict[str, int] = {}
    for name, (code, shape) in kinds.items():
        at = start + header[name]["data_offsets"][0]
        if name.startswith(("info.", "media.")):
            arrays[name] = np.ndarray(shape, NUMPY[code], head, at)
        else:
            bases[name] = at
    table = InfoTable.from_arrays(arrays, schema)
    check_table(table, kinds)
    versions, means = table.columns["policy_version"], table.columns["mean_policy_version"]
    if (versions < 0).any() or not (np.isfinite(means) & (means >= versions.astype(np.float64))).all():
        raise ValueError(
            f"policy versions {versions.tolist()}, means {means.tolist()}: versions are counts, and no mean is below "
            "its version or infinite"
        )
    return located(table, bases, writer, segment)


def torch_dtype(code: str) -> torch.dtype:
    return _TORCH[code]


def checksum(data: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)


def column_name(f: Field) -> str:
    return f"{'tokens' if f.per_token else 'values'}.{f.name}"


@lru_cache(maxsize=16)  # all segments of a store say the same
def _schema_in(text: str) -> Schema:
    return Schema.from_json(json.loads(text))


def head_hash(head: memoryview) -> str:
    """XXH3-64 of header and table, with the place of the hash itself read as zeros."""
    hasher = xxhash.xxh3_64(head[:HASH_AT])
    hasher.update(b"0" * HASH_LEN)
    hasher.update(head[HASH_AT + HASH_LEN :])
    return hasher.hexdigest()


def _header_length(head: bytes | bytearray | memoryview, where: str) -> int:
    length = int.from_bytes(head[:8], "little") if len(head) >= 8 else 0
    if bytes(head[8 : 8 + len(PREFIX)]) != PREFIX or not 0 < length < _LARGEST_HEAD:
        raise CorruptData(f"{where}: this is not a knit_data segment; remove it, or give its writer another store.")
    return length


@lru_cache(maxsize=4)  # of a head that was just read its size, its table and its facts are asked for
def _header(text: bytes) -> Mapping[str, Any]:
    return dict(json.loads(text))


def _metadata(head: bytes | bytearray | memoryview, length: int, where: str) -> Mapping[str, str]:
    try:
        meta: Mapping[str, str] = _header(bytes(head[8 : 8 + length]))["__metadata__"]
        if meta["format"] == FORMAT:
            texts = {name: meta[name] for name in ("info_bytes", "bytes", "place", "session", "schema", "xxh3")}
            if all(isinstance(text, str) for text in texts.values()) and _size(meta["info_bytes"]) < _LARGEST_HEAD:
                _size(meta["bytes"])
                return texts
            raise ValueError(f"{texts!r:.200}")
        found = meta["format"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CorruptData(f"{where}: the segment header cannot be read ({e}); restore or remove it.") from e
    raise CorruptData(f"{where}: format {found!r}, this version reads {FORMAT!r}; use the version that wrote it.")


def _size(text: str) -> int:
    if not 0 < len(text) < 16 or not text.isascii() or not text.isdigit():
        raise ValueError(f"{text:.40} where a size belongs")
    return int(text)


def located(table: InfoTable, bases: Bases, writer: int, segment: int) -> InfoTable:
    """Add what follows from the place: addresses, and byte offsets of every row in every column."""
    n, schema, columns = len(table), table.schema, dict(table.columns)
    lengths = columns["n_tokens"].astype(np.int64)
    starts, items = np.cumsum(lengths) - lengths, np.arange(n)
    offsets = np.full((n, len(schema.fields) + 1), -1, np.int64)
    for c, f in enumerate(schema.fields):
        offsets[:, c] = bases[column_name(f)] + (starts if f.per_token else items) * f.row_bytes
    if "tokens.loss_mask" in bases:
        offsets[:, -1] = bases["tokens.loss_mask"] + starts * int(columns["mask_bytes"][0])
    columns |= {
        "writer": np.full(n, writer, np.int32),
        "segment": np.full(n, segment, np.int64),
        "item": np.arange(n, dtype=np.int32),
        "segment_rows": np.full(n, n, np.int32),
        "cut": np.zeros(n, np.int8),
        "offsets": offsets,
    }
    return replace(table, columns=columns, media=_place_media(table.media, bases, writer, segment))


def _place_media(media: MediaTable, bases: Bases, writer: int, segment: int) -> MediaTable:
    if not len(media.columns.get("tokens", ())):
        return empty_media()
    n, extents, counts = len(media), [], []
    for u, text in enumerate(media.ragged["parts"].texts()):
        parts = json.loads(text)
        for name, code, shape in parts:
            size = _TORCH[code].itemsize * int(np.prod(shape, dtype=np.int64))
            extents.append((bases[f"medium.{u}.{name}"], size))
        counts.append(len(parts))
    columns = dict(media.columns) | {"writer": np.full(n, writer, np.int32), "segment": np.full(n, segment, np.int64)}
    ragged = dict(media.ragged)
    ragged["extents"] = Ragged.of_lengths(np.array(extents, np.int64).reshape(-1, 2), np.array(counts))
    return MediaTable(columns, ragged)


@lru_cache(maxsize=1)
def empty_media() -> MediaTable:
    """The media table of text-only segments, which do not spend header bytes on one."""
    zero = np.zeros(0, np.int64)
    columns: dict[str, Array] = dict.fromkeys(("tokens", "patches", "segment"), zero)
    columns |= {"digest": np.zeros((0, 32), np.uint8), "checksum": zero.astype(np.uint64)}
    columns["writer"] = zero.astype(np.int32)
    ragged = {"kind": Ragged.of_texts([]), "parts": Ragged.of_texts([])}
    ragged["extents"] = Ragged.of_lengths(np.zeros((0, 2), np.int64), zero)
    return MediaTable(columns, ragged)
