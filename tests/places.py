"""Stores in memory and in a folder, opened again and again; and a back end that something happens to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import knit_data as kd
from knit_data.store.backend import Backend
from knit_data.store.memory import ManualClock, MemoryBackend

_NUMBERS = itertools.count()


class Watched:
    """A back end whose calls are listed, and which calls ``happens`` before or after call number ``at``."""

    def __init__(
        self, inner: Backend, at: int | None = None, when: str = "before", happens: Callable[[], Any] | None = None
    ) -> None:
        self.inner, self.at, self.when, self.happens = inner, at, when, happens
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self.inner, name)
        if name not in ("create", "read_into", "wait", "put", "get", "delete"):
            return inner

        def call(*args: Any) -> Any:
            mine = len(self.calls)
            self.calls.append((name, args))
            if mine == self.at and self.when == "before":
                self._happen()
            result = inner(*args)
            if mine == self.at and self.when == "after":
                self._happen()
            return result

        return call

    @property
    def struck(self) -> bool:
        return self.at is not None and len(self.calls) > self.at

    def _happen(self) -> None:
        assert self.happens is not None
        self.happens()

    def looks(self, key: str) -> int:
        """How many waits looked for this key."""
        return sum(name == "wait" and key in args[0] for name, args in self.calls)


def watched(store: kd.TrajectoryStore, *args: Any) -> Watched:
    """Put a ``Watched`` between a store and its back end."""
    backend = Watched(store.backend, *args)
    store.backend = backend  # type: ignore[assignment]
    return backend


def moments(run: Callable[[int, str], bool]) -> Iterator[tuple[int, str]]:
    """Call ``run`` with every call number before and after which something can happen, until it reports that the
    number was not reached."""
    for when in ("before", "after"):
        for at in itertools.count():
            if not run(at, when):
                break
            yield at, when


class Place:
    """Where the stores of one test are; ``open`` is another handle on the same store."""

    def __init__(self, fresh: Callable[[], str]) -> None:
        self._fresh = fresh
        self._opened: list[kd.TrajectoryStore] = []
        self.renew()

    def renew(self) -> None:
        """From now on an empty store."""
        self.url = self._fresh()

    def open(self, **options: Any) -> kd.TrajectoryStore:
        self._opened.append(kd.TrajectoryStore(self.url, **options))
        return self._opened[-1]

    def ids(self, **options: Any) -> list[str]:
        """What a fresh stream gives."""
        return [info.id for info in kd.TrajectoryStream(self.open(), follow=False, **options)]

    def close(self) -> None:
        for store in self._opened:
            store.close()


def place_of(kind: str, folder: Path) -> Place:
    """A place in memory or, if ``kind`` is "local", in files under the folder."""

    def fresh() -> str:
        name = f"{folder.name}-{next(_NUMBERS)}"
        return f"memory://{name}" if kind == "memory" else str(folder / name)

    return Place(fresh)


def timeless() -> tuple[kd.TrajectoryStore, ManualClock]:
    """A store in memory whose waits take no time."""
    clock, name = ManualClock(), f"timeless-{next(_NUMBERS)}"
    MemoryBackend.named(name, clock=clock)
    return kd.TrajectoryStore(f"memory://{name}"), clock


def reclaim(store: kd.TrajectoryStore, name: str, writer: int, below: int) -> None:
    """As a trainer does: the floor first, then the files."""
    store.backend.put(f"registers/floor.{writer}", str(below).encode())
    store.backend.delete([store.segment_key(name, n) for n in range(below)])


def rows(infos: Sequence[kd.TrajectoryInfo]) -> list[dict[str, Any]]:
    """Everything that infos say, comparable."""
    return [{k: v[i.row].tolist() for k, v in i.table.columns.items()} | {"id": i.id, "group": i.group} for i in infos]
