"""The names of a store, and how they are found without listing anything.

format.json                      what this is, and the store's own id
schema.json                      the columns that all its trajectories have; made by the first put
writers/<m>.json                 claimed densely by writers
segments/<name>/<n>.safetensors  numbered densely per writer; immutable; its appearance is the commit
sealing.json                     no put counts any more unless seal counts it
ends/<m>.json                    how many segments writer m has in all
sealed.json  finished.json       no more data will come; no more data is needed
registers/...                    policy_version, demand, floor.<m>, consumer, launchers, inflight.<i>, reserve: small,
                                 the last write wins
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from knit_data.errors import CorruptData, KeyMissing, KnitError, ShortRead, StoreError
from knit_data.infos import InfoTable, Schema
from knit_data.store.backend import Backend, Read
from knit_data.store.head import HEAD_GUESS, decode_head, head_facts, head_size
from knit_data.store.urls import open_backend

CONSUMER, RESERVE = "registers/consumer", "registers/reserve"
_ROOM = 64 << 10  # bytes; a register takes a block or two
_FORMAT = "knit_data.store.1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} where a count belongs")
    return value


def check_writer(name: object) -> str:
    """A writer's name is a folder's."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        raise ValueError(f"{name!r} where a writer's name belongs")
    return name


class Catalogue:
    """Names and heads, for the store, its writers and the stream."""

    def __init__(self, url: str | os.PathLike[str], *, fsync: bool, **storage_options: Any) -> None:
        self.url = os.fspath(url)
        self.backend: Backend = open_backend(self.url, fsync=fsync, **storage_options)
        self.id = self._identify()
        self._schema: Schema | None = None
        self._claims: dict[int, dict[str, Any]] = {}  # as read: a claim never changes

    def _identify(self) -> str:
        made = {"format": _FORMAT, "id": uuid.uuid4().hex}

        def missing() -> bool:
            return self.backend.get("format.json") is None

        if missing():
            # asked again: another may have made the store in between
            if any(self.exists(["schema.json", "writers/0.json"])) and missing():
                raise CorruptData(f"{self.url}: format.json is missing, though there is a store; restore it.")
            self.reserve()
            self.backend.create("format.json", [json.dumps(made).encode()])
        found = self._json("format.json") or {}
        if found.get("format") != _FORMAT or not isinstance(found.get("id"), str):
            raise CorruptData(
                f"{self.url}: format.json says {found!r}, this version reads {_FORMAT!r}; use the version that wrote "
                "it, or another folder."
            )
        return str(found["id"])

    def reserve(self) -> bool:
        """Room for the registers of a consumer that finds the disk full: it must say who it is before it may delete.
        False: there is none."""
        try:
            if not any(self.exists([RESERVE])):
                self.backend.put(RESERVE, os.urandom(_ROOM))  # zeros a file system may keep in no room at all
        except StoreError:
            return False
        return True

    @property
    def schema(self) -> Schema | None:
        """The columns of this store; None before the first put."""
        if self._schema is None and (data := self._json("schema.json")) is not None:
            with self.understood("schema.json"):
                self._schema = Schema.from_json(data)
        return self._schema

    def settle(self, schema: Schema) -> Schema:
        """The columns of this store: these, if no put was earlier."""
        if self.schema is None:
            self.backend.create("schema.json", [json.dumps(schema.to_json()).encode()])
        assert self.schema is not None
        return self.schema

    def claim(self, writer: int) -> dict[str, Any] | None:
        """Who claimed this writer number: its name and first segment."""
        key = f"writers/{writer}.json"
        if writer not in self._claims and (data := self._json(key)) is not None:
            with self.understood(key):
                self._claims[writer] = {"name": check_writer(data["name"]), "first": check_count(data["first"])}
        return self._claims.get(writer)

    def floor(self, writer: int) -> int:
        """The first segment of this writer that was not reclaimed; names below it are never used again.

        With register floor.0 at 2, set late by a consumer that was taken for dead, and 6 deleted by the next one: 6.
        """
        return max(self.register(f"floor.{writer}"), self.consumer()[1].get(writer, 0))

    def consumer(self) -> tuple[str | None, dict[int, int]]:
        """Who reclaims (None: nobody, or it closed), and per writer the segment below which all are deleted."""
        raw = self.backend.get(CONSUMER)
        if raw is None:
            return None, {}
        with self.understood(CONSUMER):
            data = json.loads(raw)
            return data["session"], {int(writer): check_count(n) for writer, n in data["deleted"].items()}

    def register(self, name: str) -> int:
        """A number that anyone may overwrite; 0 before that."""
        raw = self.backend.get(f"registers/{name}")
        with self.understood(f"registers/{name}"):
            return check_count(int(raw)) if raw else 0

    def seal(self) -> None:
        """No more trajectories will come: the stream ends after what is committed now. Later puts raise."""
        self.backend.create("sealing.json", [b"{}"])
        writers = 0
        while (claim := self.claim(writers)) is not None:
            count = self.count_segments(writers, claim)
            self.backend.create(f"ends/{writers}.json", [json.dumps({"count": count}).encode()])
            writers += 1
        self.backend.create("sealed.json", [json.dumps({"writers": writers}).encode()])

    def sealed(self) -> list[int] | None:
        """Segment counts per writer, or None while data may still come."""
        data = self._json("sealed.json")
        if data is None:
            return None
        with self.understood("sealed.json or an end beside it"):
            writers = check_count(data["writers"])
            return [check_count(self._required(f"ends/{m}.json")["count"]) for m in range(writers)]

    def exists(self, keys: Sequence[str], timeout: float = 0.0) -> list[bool]:
        return self.backend.wait(keys, timeout)

    @staticmethod
    def segment_key(name: str, number: int) -> str:
        return f"segments/{name}/{number:08d}.safetensors"

    def count_segments(self, writer: int, claim: Mapping[str, Any]) -> int:
        """The number after a writer's last segment: doubling steps from its floor, then halving."""
        name, floor = claim["name"], max(claim["first"], self.floor(writer))
        low, step = floor, 1
        while self.exists([self.segment_key(name, low + step - 1)])[0]:
            low, step = low + step, step * 2
        while step > 1:
            step //= 2
            if self.exists([self.segment_key(name, low + step - 1)])[0]:
                low += step
        # what was reclaimed while this counted looks as if it had never been
        return low if self.floor(writer) <= floor else self.count_segments(writer, claim)

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
                        head = self._long_head(key, need)
                owned = bytes(head[:need])
                table = decode_head(owned, writer=writer, segment=number, where=where)
                out.append((table, *head_facts(owned, where)))
            except StoreError as e:
                out.append(e)
        return out

    def _long_head(self, key: str, size: int) -> memoryview:
        try:
            self.exactly(key, 1, size - 1)  # a size that was misread must not take memory
            return self.exactly(key, size)
        except ShortRead as e:
            raise CorruptData(
                f"{self.url}: {key}: its head should take {size:,} bytes, and the file ends before that; it was cut "
                "short, or is none of ours. Restore it or remove it."
            ) from e

    def exactly(self, key: str, size: int, start: int = 0) -> memoryview:
        out = memoryview(bytearray(size))
        (error,) = self.backend.read_into([Read(key, start, out)])
        if error is not None:
            raise error
        return out

    def _json(self, key: str) -> dict[str, Any] | None:
        raw = self.backend.get(key)
        if raw is None:
            return None
        try:
            return dict(json.loads(raw))
        except (ValueError, TypeError, RecursionError) as e:
            raise CorruptData(f"{self.url}: {key} is not a JSON object: {raw[:80]!r}; restore it.") from e

    @contextmanager
    def understood(self, key: str) -> Iterator[None]:
        """What a damaged small file makes of our reading it is CorruptData."""
        try:
            yield
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise CorruptData(f"{self.url}: {key} is damaged ({e!r}); restore it.") from e

    def _required(self, key: str) -> dict[str, Any]:
        data = self._json(key)
        if data is None:
            raise KeyMissing(f"{self.url}: {key} is missing, though other files refer to it; was the folder cut?")
        return data
