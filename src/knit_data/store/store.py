"""The trajectory store: names, registers and reading, written once on top of any back end.

    format.json                      what this is, and the store's own id
    schema.json                      the columns that all its trajectories have; made by the first put
    writers/<m>.json                 claimed densely by writers; nothing is ever listed
    segments/<name>/<n>.safetensors  numbered densely per writer; immutable; its appearance is the commit
    ends/<m>.json                    how many segments writer m has in all; made by seal
    sealed.json  finished.json       no more data will come; no more data is needed
    registers/...                    policy_version, demand, floor.<m>: small, the last write wins
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from knit_data.errors import CorruptData, InvalidArgument, KeyMissing, KnitError, ShortRead, StoreError
from knit_data.infos import InfoTable, Schema, TrajectoryInfo
from knit_data.store.backend import Backend, Read, open_backend
from knit_data.store.segment import HEAD_GUESS, checksum, decode_head, head_facts, head_size, torch_dtype
from knit_data.trajectory import Media, MediaRef, Trajectory

if TYPE_CHECKING:
    from knit_data.store.writer import StoreWriter

_FORMAT = "knit_data.store.1"
_RECLAIM = ("commit", "consumed", "never")


@dataclass(frozen=True)
class Demand:
    """What the open train batch still needs: groups by combination of quota attributes, and free seats beside."""

    train_batch: int = 0
    deficits: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    free: int = 0


class TrajectoryStore:
    """Where rollout workers put trajectories and trainers read them.

    ``url``: a folder that all hosts see, or ``memory://name`` inside one process. ``fsync``: survive a power cut, not
    only a crash. ``max_bytes``: a writer blocks while this many of its bytes are not reclaimed.

    >>> store = TrajectoryStore("memory://")
    >>> with store.writer("rollout-0") as writer:
    ...     info = writer.put(Trajectory("a", "g", 0, {"input_ids": torch.tensor([5, 6, 7])}))
    >>> store.read(info).tokens["input_ids"]
    tensor([5, 6, 7])
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        reclaim: str = "commit",
        max_bytes: int | None = None,
        fsync: bool = False,
        **storage_options: Any,
    ) -> None:
        if reclaim not in _RECLAIM:
            raise InvalidArgument(f"reclaim must be one of {_RECLAIM}, found {reclaim!r}.")
        if max_bytes is not None and max_bytes < 1:
            raise InvalidArgument(f"max_bytes must be None or at least 1, found {max_bytes}.")
        self.url, self.reclaim, self.max_bytes, self.fsync = os.fspath(url), reclaim, max_bytes, fsync
        self._options = storage_options
        self.backend: Backend = open_backend(self.url, fsync=fsync, **storage_options)
        self.id = self._identify()
        self._schema: Schema | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        options = {"reclaim": self.reclaim, "max_bytes": self.max_bytes, "fsync": self.fsync, **self._options}
        return _reopen, (self.url, options)

    def _identify(self) -> str:
        made = {"format": _FORMAT, "id": uuid.uuid4().hex}
        self.backend.create("format.json", [json.dumps(made).encode()])
        found = self._json("format.json") or {}
        if found.get("format") != _FORMAT:
            raise CorruptData(f"{self.url}: format.json says {found!r}, this version reads {_FORMAT!r}.")
        return str(found["id"])

    # -- rollout side -----------------------------------------------------------------------------------------------

    def writer(self, name: str) -> StoreWriter:
        """A writer of this name, which no other live writer may use. After a crash the same name goes on."""
        from knit_data.store.writer import StoreWriter

        return StoreWriter(self, name)

    def policy_version(self) -> int:
        """Optimizer steps done when the newest weights were published; 0, the initial weights, before the first."""
        raw = self.backend.get("registers/policy_version")
        return int(raw) if raw else 0

    def demand(self) -> Demand:
        """What the open train batch still needs, as last written by the sampler; empty before it starts."""
        data = self._json("registers/demand")
        if data is None:
            return Demand()
        deficits = {tuple(combination): count for combination, count in data["deficits"]}
        return Demand(data["train_batch"], deficits, data["free"])

    def seal(self) -> None:
        """No more trajectories will come: the stream ends after what is committed now. Later puts raise."""
        writers = 0
        while (claim := self.claim(writers)) is not None:
            count = self.count_segments(claim["name"], max(claim["first"], self.floor(writers)))
            self.backend.create(f"ends/{writers}.json", [json.dumps({"count": count}).encode()])
            writers += 1
        self.backend.create("sealed.json", [json.dumps({"writers": writers}).encode()])

    def finished(self) -> bool:
        return self.exists(["finished.json"])[0]

    # -- trainer side -----------------------------------------------------------------------------------------------

    def publish(self, version: int) -> None:
        """Weights of this version can be loaded: call it after the weights themselves are there."""
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise InvalidArgument(f"publish needs the number of optimizer steps done, an int >= 0, found {version!r}.")
        self.backend.put("registers/policy_version", str(version).encode())

    def finish(self) -> None:
        """Nothing more is needed: later puts raise StoreClosed, and blocked ones wake with it."""
        self.backend.create("finished.json", [b"{}"])

    def publish_demand(self, demand: Demand) -> None:
        deficits = [[list(combination), count] for combination, count in demand.deficits.items()]
        data = {"train_batch": demand.train_batch, "deficits": deficits, "free": demand.free}
        self.backend.put("registers/demand", json.dumps(data).encode())

    def read(self, info: TrajectoryInfo, fields: Iterable[str] | None = None) -> Trajectory:
        """One trajectory with its tensors, or only these columns of it; checksums are verified."""
        table, row = info.table, info.row
        names = list(table.schema.names)
        wanted = names if fields is None else list(fields)
        unknown = set(wanted) - set(names) - set(table.value_names)
        if unknown:
            raise InvalidArgument(f"fields {sorted(unknown)} are not in this store; it has {names}.")
        tokens: dict[str, Tensor] = {}
        values: dict[str, Tensor | float] = {k: v for k, v in info.values.items() if fields is None or k in wanted}
        for f in table.schema.fields:
            if f.name in wanted:
                shape = [info.n_tokens, *f.shape] if f.per_token else list(f.shape)
                data = self._column(info, f.name, int(np.prod(shape)) * torch_dtype(f.dtype).itemsize)
                tensor = _tensor(data, f.dtype, shape)
                (tokens if f.per_token else values)[f.name] = tensor
        mask_bytes = int(table.columns["mask_bytes"][row])
        if mask_bytes and "loss_mask" in wanted:
            data = self._column(info, "loss_mask", info.n_tokens * mask_bytes)
            tokens["loss_mask"] = _tensor(data, "BOOL" if mask_bytes == 1 else "F32", [info.n_tokens])
        mean = info.mean_policy_version
        return Trajectory(
            info.id,
            info.group,
            info.policy_version,
            tokens,
            values,
            self._media(info),
            info.attributes,
            None if mean == info.policy_version else mean,
        )

    def close(self) -> None:
        self.backend.close()

    # -- names, for the writer and the stream -----------------------------------------------------------------------

    @property
    def schema(self) -> Schema | None:
        """The columns of this store; None before the first put."""
        if self._schema is None and (data := self._json("schema.json")) is not None:
            self._schema = Schema.from_json(data)
        return self._schema

    def claim(self, writer: int) -> dict[str, Any] | None:
        """Who claimed this writer number: its name and first segment."""
        return self._json(f"writers/{writer}.json")

    def floor(self, writer: int) -> int:
        """The first segment of this writer that was not reclaimed; names below it are never used again."""
        raw = self.backend.get(f"registers/floor.{writer}")
        return int(raw) if raw else 0

    def sealed(self) -> list[int] | None:
        """Segment counts per writer, or None while data may still come."""
        data = self._json("sealed.json")
        return None if data is None else [self._required(f"ends/{m}.json")["count"] for m in range(data["writers"])]

    def exists(self, keys: Sequence[str], timeout: float = 0.0) -> list[bool]:
        return self.backend.wait(keys, timeout)

    @staticmethod
    def segment_key(name: str, number: int) -> str:
        return f"segments/{name}/{number:08d}.safetensors"

    def count_segments(self, name: str, start: int) -> int:
        """The number after the last segment: doubling steps from ``start``, then halving."""
        low, step = start, 1
        while self.exists([self.segment_key(name, low + step - 1)])[0]:
            low, step = low + step, step * 2
        while step > 1:
            step //= 2
            if self.exists([self.segment_key(name, low + step - 1)])[0]:
                low += step
        return low

    def heads(self, segments: Sequence[tuple[int, str, int]]) -> list[tuple[InfoTable, int, str] | KnitError]:
        """Per (writer, name, number): the info table, the file's size and its session, or why there is none."""
        buffers = [bytearray(HEAD_GUESS) for _ in segments]
        keys = [self.segment_key(name, number) for _, name, number in segments]
        errors = self.backend.read_into([Read(k, 0, memoryview(b)) for k, b in zip(keys, buffers, strict=True)])
        out: list[tuple[InfoTable, int, str] | KnitError] = []
        for (writer, _, number), key, buffer, error in zip(segments, keys, buffers, errors, strict=True):
            if error is not None and not isinstance(error, ShortRead):
                out.append(error)
                continue
            try:
                head = memoryview(buffer)[: error.found] if isinstance(error, ShortRead) else memoryview(buffer)
                where = f"{self.url}: {key}"
                for _ in range(2):  # first for a long header, then for a long table
                    if (need := head_size(head, where)) > len(head):
                        head = self._exactly(key, need)
                owned = bytes(head[:need])
                size, session = head_facts(owned, where)
                out.append((decode_head(owned, writer=writer, segment=number, where=where), size, session))
            except StoreError as e:
                out.append(e)
        return out

    def _exactly(self, key: str, size: int, start: int = 0) -> memoryview:
        out = memoryview(bytearray(size))
        (error,) = self.backend.read_into([Read(key, start, out)])
        if error is not None:
            raise error
        return out

    def _name_of(self, writer: int) -> str:
        return str(self._required(f"writers/{writer}.json")["name"])

    def _column(self, info: TrajectoryInfo, name: str, size: int) -> memoryview:
        writer, segment, _ = info.address
        c = info.table.schema.names.index(name)
        key = self.segment_key(self._name_of(writer), segment)
        data = self._exactly(key, size, int(info.table.columns["offsets"][info.row, c]))
        self._verify(data, int(info.table.columns["checksums"][info.row, c]), f"{key}: {name} of {info.id!r}")
        return data

    def _media(self, info: TrajectoryInfo) -> list[MediaRef]:
        media, out = info.table.media, []
        pending: list[tuple[int, int]] = []
        for u, start, length in info.table.ragged["spans"].row(info.row).tolist():
            pending.append((start, length))
            if sum(n for _, n in pending) == media.columns["tokens"][u]:
                out.append(MediaRef(self._medium(info, u), pending))
                pending = []
        return out

    def _medium(self, info: TrajectoryInfo, u: int) -> Media:
        media = info.table.media
        key = self.segment_key(self._name_of(int(media.columns["writer"][u])), int(media.columns["segment"][u]))
        parts = json.loads(media.ragged["parts"].text(u))
        blobs = [self._exactly(key, size, at) for at, size in media.ragged["extents"].row(u).tolist()]
        self._verify(b"".join(blobs), int(media.columns["checksum"][u]), f"{key}: medium {u} of {info.id!r}")
        tensors = {name: _tensor(b, code, shape) for (name, code, shape), b in zip(parts, blobs, strict=True)}
        cells = media.columns
        return Media(tensors, int(cells["tokens"][u]), media.ragged["kind"].text(u), int(cells["patches"][u]))

    @staticmethod
    def _verify(data: bytes | memoryview, wanted: int, what: str) -> None:
        if (found := checksum(data)) != wanted:
            raise CorruptData(
                f"{what}: {len(data)} bytes hash to {found:016x}, the table says {wanted:016x}; the file was damaged "
                "after it was written. Restore it, or drop this trajectory."
            )

    def _json(self, key: str) -> dict[str, Any] | None:
        raw = self.backend.get(key)
        if raw is None:
            return None
        try:
            return dict(json.loads(raw))
        except ValueError as e:
            raise CorruptData(f"{self.url}: {key} is not JSON: {raw[:80]!r}; restore it.") from e

    def _required(self, key: str) -> dict[str, Any]:
        data = self._json(key)
        if data is None:
            raise KeyMissing(f"{self.url}: {key} is missing, though other files refer to it; was the folder cut?")
        return data


def _reopen(url: str, options: dict[str, Any]) -> TrajectoryStore:
    return TrajectoryStore(url, **options)


def _tensor(data: memoryview, code: str, shape: Sequence[int]) -> Tensor:
    dtype = torch_dtype(code)
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if len(data) else torch.empty(shape, dtype=dtype)
