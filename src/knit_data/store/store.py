"""The trajectory store: what rollout workers and trainers hold, written once on top of any back end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from knit_data.demand import Demand, Outlook
from knit_data.errors import CorruptData, InvalidArgument
from knit_data.infos import TrajectoryInfo
from knit_data.store.catalogue import Catalogue, check_count
from knit_data.store.head import checksum, torch_dtype
from knit_data.store.writer import StoreWriter
from knit_data.trajectory import Media, MediaRef, Trajectory

D = TypeVar("D", bound=Demand)

_LAUNCHERS = 1024
_RECLAIM = ("commit", "consumed", "never")


@dataclass(frozen=True)
class InFlight:
    """A group that was launched and is not finished; where groups have one member, ``group`` is its id."""

    group: str
    attributes: Mapping[str, str]
    version: int  # of the weights that it was launched with


class TrajectoryStore(Catalogue):
    """Where rollout workers put trajectories and trainers read them.

    ``url``: a folder that all hosts see, a bucket such as ``s3://bucket/run``, or ``memory://name`` inside one process;
    ``storage_options`` are those of the bucket's fsspec file system. ``fsync``: survive a power cut, not only a crash.
    ``max_bytes``: a writer blocks while this many of its bytes are not reclaimed.

    ``reclaim`` says when the trainer that opened it deletes what its ``TrajectoryLoader`` consumed; to writers it is
    nothing. "commit": when a checkpoint that covers it was given to ``loader.commit``, so that a resume from that one,
    or from a later one, finds all it needs. "consumed": at once; it saves space, and is at most once across a rollback:
    what was trained after the checkpoint is gone, and loading that state raises StateError. "never": not at all, and
    any number of readers may share the store; in the other modes a second live trainer raises ConsumerConflict.

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
        if not isinstance(url, str | os.PathLike) or "\0" in os.fspath(url):
            raise InvalidArgument(f"a store needs a folder or URL, found {url!r}.")
        if reclaim not in _RECLAIM:
            raise InvalidArgument(f"reclaim must be one of {_RECLAIM}, found {reclaim!r}.")
        if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1):
            raise InvalidArgument(f"max_bytes must be None or an int of at least 1, found {max_bytes!r}.")
        super().__init__(url, fsync=fsync, **storage_options)
        self.reclaim, self.max_bytes, self.fsync, self._options = reclaim, max_bytes, fsync, storage_options
        self._launchers: int | None = None  # as last written here
        self._beat = time.time_ns()  # of what it publishes in flight; no two sessions begin with the same

    def __reduce__(self) -> tuple[Any, ...]:
        options = {"reclaim": self.reclaim, "max_bytes": self.max_bytes, "fsync": self.fsync, **self._options}
        return _reopen, (self.url, options)

    # -- rollout side -----------------------------------------------------------------------------------------------

    def writer(self, name: str) -> StoreWriter:
        """A writer of this name, which no other live writer may use. After a crash the same name goes on."""
        return StoreWriter(self, name, self.max_bytes)

    def policy_version(self) -> int:
        """Optimizer steps done when the newest weights were published; 0, the initial weights, before the first."""
        return self.register("policy_version")

    def demand(self) -> Demand:
        """What the open train batch still needs, as last written by the sampler; empty before it starts."""
        return self._demand(Demand) or Demand()

    def outlook(self) -> Outlook | None:
        """The same with what launchers must know; None before the sampler starts."""
        return self._demand(Outlook)

    def _demand(self, kind: type[D]) -> D | None:
        data = self._json("registers/demand")
        if data is None:
            return None
        with self.understood("registers/demand"):
            return kind.from_json(data)

    def finished(self) -> bool:
        return self.exists(["finished.json"])[0]

    def publish_in_flight(self, share: tuple[int, int], launches: Sequence[InFlight]) -> None:
        """All that launcher i of n has in flight; ``share`` is (i, n). Call it after the rows of what is done are
        there, so that every group is seen in flight or in its rows."""
        index, count = share if isinstance(share, tuple) and len(share) == 2 else (None, None)
        if not (type(index) is int and type(count) is int and 0 <= index < count <= _LAUNCHERS):
            raise InvalidArgument(f"publish_in_flight needs launcher i of n as (i, n), 0 <= i < n, found {share!r}.")
        self._beat += 1
        data = {"beat": self._beat, "launches": [[x.group, dict(x.attributes), x.version] for x in launches]}
        self.backend.put(f"registers/inflight.{index}", json.dumps(data).encode())
        if self._launchers != count:
            self.backend.put("registers/launchers", str(count).encode())
            self._launchers = count

    # -- trainer side -----------------------------------------------------------------------------------------------

    def publish(self, version: int) -> None:
        """Weights of this version can be loaded: call it after the weights themselves are there."""
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise InvalidArgument(f"publish needs the number of optimizer steps done, an int >= 0, found {version!r}.")
        self.backend.put("registers/policy_version", str(version).encode())

    def finish(self) -> None:
        """Nothing more is needed: later puts raise StoreClosed, and blocked ones wake with it."""
        self.backend.create("finished.json", [b"{}"])

    def in_flight(self) -> list[InFlight] | None:
        """What all launchers have in flight; None: no launcher ever said."""
        reports = self.launchers()
        return None if reports is None else [launch for _, launches in reports for launch in launches]

    def launchers(self) -> list[tuple[int, list[InFlight]]] | None:
        """For each launcher a number that changes whenever it speaks, and what it has in flight."""
        count = self.register("launchers")
        if not count:
            return None
        if count > _LAUNCHERS:
            raise CorruptData(f"{self.url}: registers/launchers says {count}, at most {_LAUNCHERS} are served.")
        out = []
        for key in (f"registers/inflight.{i}" for i in range(count)):
            data = self._json(key) or {"beat": 0, "launches": []}
            with self.understood(key):
                launches = []
                for group, attributes, version in data["launches"]:
                    named = {str(name): str(value) for name, value in attributes.items()}
                    launches.append(InFlight(str(group), named, check_count(version)))
                out.append((check_count(data["beat"]), launches))
        return out

    def publish_demand(self, demand: Outlook) -> None:
        self.backend.put("registers/demand", json.dumps(demand.to_json()).encode())

    def read(self, info: TrajectoryInfo, fields: Iterable[str] | None = None) -> Trajectory:
        """One trajectory with its tensors, or only these columns of it; checksums are verified."""
        table, row = info.table, info.row
        names = list(table.schema.names)
        wanted = names if fields is None else list(fields)
        unknown = set(wanted) - set(names) - set(table.value_names)
        if unknown:
            found = [*names, *table.value_names]
            raise InvalidArgument(f"fields {sorted(unknown)} are not in this store; it has {found}.")
        tokens: dict[str, Tensor] = {}
        values: dict[str, Tensor | float] = {k: v for k, v in info.values.items() if fields is None or k in wanted}
        for f in table.schema.fields:
            if f.name in wanted:
                shape = [info.n_tokens, *f.shape] if f.per_token else list(f.shape)
                data = self.column(info, f.name, int(np.prod(shape)) * torch_dtype(f.dtype).itemsize)
                tensor = _tensor(data, f.dtype, shape)
                (tokens if f.per_token else values)[f.name] = tensor
        mask_bytes = int(table.columns["mask_bytes"][row])
        if mask_bytes and "loss_mask" in wanted:
            data = self.column(info, "loss_mask", info.n_tokens * mask_bytes)
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
        """Gives up open files and connections; nothing that was stored is touched. Not to be used afterwards."""
        self.backend.close()

    def _name_of(self, writer: int) -> str:
        return str(self._required(f"writers/{writer}.json")["name"])

    def column(self, info: TrajectoryInfo, name: str, size: int) -> memoryview:
        """The first ``size`` bytes of a trajectory's column, which must be all of them; verified."""
        writer, segment, _ = info.address
        c = info.table.schema.names.index(name)
        key = self.segment_key(self._name_of(writer), segment)
        data = self.exactly(key, size, int(info.table.columns["offsets"][info.row, c]))
        self._verify(data, int(info.table.columns["checksums"][info.row, c]), f"{key}: {name} of {info.id!r}")
        return data

    def _media(self, info: TrajectoryInfo) -> list[MediaRef]:
        media, out = info.table.media, []
        pending: list[tuple[int, int]] = []
        for u, start, length, _ in info.table.ragged["spans"].row(info.row).tolist():
            pending.append((start, length))
            if sum(n for _, n in pending) == media.columns["tokens"][u]:
                out.append(MediaRef(self._medium(info, u), pending))
                pending = []
        return out

    def _medium(self, info: TrajectoryInfo, u: int) -> Media:
        media = info.table.media
        key = self.segment_key(self._name_of(int(media.columns["writer"][u])), int(media.columns["segment"][u]))
        parts = json.loads(media.ragged["parts"].text(u))
        blobs = [self.exactly(key, size, at) for at, size in media.ragged["extents"].row(u).tolist()]
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


def _reopen(url: str, options: dict[str, Any]) -> TrajectoryStore:
    return TrajectoryStore(url, **options)


def _tensor(data: memoryview, code: str, shape: Sequence[int]) -> Tensor:
    dtype = torch_dtype(code)
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if len(data) else torch.empty(shape, dtype=dtype)
