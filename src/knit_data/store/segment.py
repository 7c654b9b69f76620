"""The segment file: what one put makes visible, as a safetensors file.

    u64 header length | JSON header | info table | payload columns | media

Any safetensors tool opens it. The info table comes first, so that one read of the head gives all metadata; columns
follow end to end, one tensor per field with the trajectories in order; each distinct medium lies there once. Within
both halves tensors are sorted by falling element size, which keeps every element aligned without gaps.

XXH3-64 guards the head (header and table together), every trajectory's part of every column, and every medium.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xxhash

from knit_data.errors import CorruptData, InvalidTrajectory
from knit_data.infos import Array, Field, InfoTable, MediaTable, Ragged, Schema, attributes_json
from knit_data.store.soundness import check_table, check_tensors, understood
from knit_data.trajectory import DTYPES, Media, Trajectory, placeholder, tensor_bytes, value_tensor

FORMAT = "knit_data.segment.1"
HEAD_GUESS = 64 * 1024  # one read of this size covers the head of most segments
_LARGEST_HEAD = 2**31  # more can only be a misread number
_PREFIX = b'{"__metadata__":{"xxh3":"'
_HASH_AT, _HASH_LEN = 8 + len(_PREFIX), 16
_TORCH = {code: dtype for dtype, code in DTYPES.items()}
_NUMPY: dict[str, Any] = {"U64": np.uint64, "I64": np.int64, "F64": np.float64, "I32": np.int32, "F32": np.float32}
_NUMPY |= {"I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_}
_CODES = {np.dtype(dtype): code for code, dtype in _NUMPY.items()}

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
    fields = [Field(k, DTYPES[v.dtype], tuple(v.shape[1:])) for k, v in trajectory.tokens.items() if k != "loss_mask"]
    scalars = []
    for name, raw in trajectory.values.items():
        value = value_tensor(raw)
        if value.ndim == 0:
            scalars.append((name, DTYPES[value.dtype]))
        else:
            fields.append(Field(name, DTYPES[value.dtype], tuple(value.shape), per_token=False))
    return Schema(tuple(sorted(fields, key=lambda f: f.name)), tuple(sorted(scalars)))


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
    total = sum(len(t.tokens["input_ids"]) for t in trajectories)
    for f in schema.fields:
        raw = [t.tokens[f.name] if f.per_token else value_tensor(t.values[f.name]) for t in trajectories]
        rows = total if f.per_token else len(trajectories)
        columns.append((_column_name(f), f.dtype, [rows, *f.shape], [tensor_bytes(x) for x in raw]))
    if masks is not None:
        code = DTYPES[masks[0].dtype]
        columns.append(("tokens.loss_mask", code, [total], [tensor_bytes(m) for m in masks]))
    table = _table(trajectories, schema, masks, columns, media, refs, grouped)
    for u, medium in enumerate(media):
        for name, tensor in sorted(medium.tensors.items()):
            columns.append((f"medium.{u}.{name}", DTYPES[tensor.dtype], list(tensor.shape), [tensor_bytes(tensor)]))
    head, payload = _assemble(schema, table, columns, f"{writer}/{segment}", session)
    located = decode_head(head, writer=writer, segment=segment)
    return Segment([head, *(p for p in payload if len(p))], located)


def head_size(head: bytes | bytearray | memoryview, where: str) -> int:
    """Bytes of header plus table, from the first bytes of a segment (a prefix of ``HEAD_GUESS`` bytes is enough)."""
    length, meta = _header_length(head, where), 0
    if len(head) < 8 + length:
        return 8 + length  # header longer than the guess: read it first, then ask again
    meta = int(_metadata(head, length, where)["info_bytes"])
    return 8 + length + meta


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
    found, wanted = _head_hash(head), meta["xxh3"]
    if found != wanted:
        raise CorruptData(f"{where}: header and table hash to {found}, the file says {wanted}; restore or remove it.")
    if meta.get("place") != f"{writer}/{segment}":
        raise CorruptData(
            f"{where}: this file was written as segment {meta.get('place')} (writer/number), it was found as "
            f"{writer}/{segment}; somebody moved it. Restore the right one."
        )
    with understood(where):
        return _decoded(head, length, meta, writer, segment)


def _decoded(head: memoryview, length: int, meta: Mapping[str, str], writer: int, segment: int) -> InfoTable:
    """The table of a head whose checksum is right; ``ValueError`` and the like if it cannot be true."""
    start, header = 8 + length, json.loads(bytes(head[8 : 8 + length]))
    del header["__metadata__"]
    kinds = check_tensors(header, int(meta["info_bytes"]), int(meta["bytes"]))
    schema = Schema.from_json(json.loads(meta["schema"]))
    arrays: dict[str, Array] = {}
    bases: dict[str, int] = {}
    for name, (code, shape) in kinds.items():
        begin, end = header[name]["data_offsets"]
        if name.startswith(("info.", "media.")):
            flat = np.frombuffer(head, np.uint8, end - begin, start + begin).view(_NUMPY[code])
            arrays[name] = flat.reshape(shape)
        else:
            bases[name] = start + begin
    table = InfoTable.from_arrays(arrays, schema)
    check_table(table, kinds)
    versions, means = table.columns["policy_version"], table.columns["mean_policy_version"]
    if (versions < 0).any() or not (np.isfinite(means) & (means >= versions.astype(np.float64))).all():
        raise ValueError(
            f"policy versions {versions.tolist()}, means {means.tolist()}: versions are counts, and no mean is below "
            "its version or infinite"
        )
    return _located(table, bases, writer, segment)


def torch_dtype(code: str) -> torch.dtype:
    return _TORCH[code]


def checksum(data: Buffer) -> int:
    return xxhash.xxh3_64_intdigest(data)


def _column_name(f: Field) -> str:
    return f"{'tokens' if f.per_token else 'values'}.{f.name}"


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
    lengths = np.array([len(t.tokens["input_ids"]) for t in trajectories], np.int32)
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
        cells[f"value.{name}"] = np.array([value_tensor(t.values[name]).item() for t in trajectories], _NUMPY[code])
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
) -> tuple[bytes, list[Buffer]]:
    """The head (header and table), and the payload buffers in file order."""
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
    for name, code, shape, buffers in sorted(columns, key=lambda c: (-_TORCH[c[1]].itemsize, c[0])):
        size = sum(len(b) for b in buffers)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [at, at + size]}
        payload += buffers
        at += size
    meta = {"format": FORMAT, "info_bytes": str(info_bytes), "bytes": str(at), "place": place, "session": session}
    meta["schema"] = json.dumps(schema.to_json())
    text = _PREFIX + b"0" * _HASH_LEN + b'",' + json.dumps(meta).encode()[1:] + b","
    text += json.dumps(header, separators=(",", ":")).encode()[1:]
    text = text.ljust(-(-(8 + len(text)) // 64) * 64 - 8)
    head = bytearray(len(text).to_bytes(8, "little") + text + b"".join(infos))
    head[_HASH_AT : _HASH_AT + _HASH_LEN] = _head_hash(memoryview(head)).encode()
    return bytes(head), payload


def _head_hash(head: memoryview) -> str:
    """XXH3-64 of header and table, with the place of the hash itself read as zeros."""
    hasher = xxhash.xxh3_64(head[:_HASH_AT])
    hasher.update(b"0" * _HASH_LEN)
    hasher.update(head[_HASH_AT + _HASH_LEN :])
    return hasher.hexdigest()


def _header_length(head: bytes | bytearray | memoryview, where: str) -> int:
    length = int.from_bytes(head[:8], "little") if len(head) >= 8 else 0
    if bytes(head[8 : 8 + len(_PREFIX)]) != _PREFIX or not 0 < length < _LARGEST_HEAD:
        raise CorruptData(f"{where}: this is not a knit_data segment; remove it, or give its writer another store.")
    return length


def _metadata(head: bytes | bytearray | memoryview, length: int, where: str) -> Mapping[str, str]:
    try:
        meta, _ = json.JSONDecoder().raw_decode(bytes(head[8 : 8 + length]).decode()[len('{"__metadata__":') :])
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


def _located(table: InfoTable, bases: Mapping[str, int], writer: int, segment: int) -> InfoTable:
    """Add what follows from the place: addresses, and byte offsets of every row in every column."""
    n, schema, columns = len(table), table.schema, dict(table.columns)
    lengths = columns["n_tokens"].astype(np.int64)
    starts, items = np.cumsum(lengths) - lengths, np.arange(n)
    offsets = np.full((n, len(schema.fields) + 1), -1, np.int64)
    for c, f in enumerate(schema.fields):
        offsets[:, c] = bases[_column_name(f)] + (starts if f.per_token else items) * f.row_bytes
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
    return replace(table, columns=columns, media=_located_media(table.media, bases, writer, segment))


def _located_media(media: MediaTable, bases: Mapping[str, int], writer: int, segment: int) -> MediaTable:
    if "tokens" not in media.columns:
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


def empty_media() -> MediaTable:
    """The media table of text-only segments, which do not spend header bytes on one."""
    zero = np.zeros(0, np.int64)
    columns: dict[str, Array] = dict.fromkeys(("tokens", "patches", "segment"), zero)
    columns |= {"digest": np.zeros((0, 32), np.uint8), "checksum": zero.astype(np.uint64)}
    columns["writer"] = zero.astype(np.int32)
    ragged = {"kind": Ragged.of_texts([]), "parts": Ragged.of_texts([])}
    ragged["extents"] = Ragged.of_lengths(np.zeros((0, 2), np.int64), zero)
    return MediaTable(columns, ragged)
