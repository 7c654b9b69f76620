"""What is moved, and what all loaders are asked for: groups of responses, a look at memory, how much of it is used.

The groups are those of an agentic run: eight responses a group, lengths log-normal between 200 and 8,000 tokens. With
images, a group's eight responses show the same one of 1,024 to 4,096 patches, float32 as a processor gives them.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import psutil
import torch
from torch import Tensor

MEMBERS = 8
IMAGE, VOCABULARY, BEFORE = 151_655, 150_000, 4  # the placeholder, ids below it, tokens in front of the image
WIDTH = 1_176  # numbers in a patch
LONGEST = 9_100  # tokens: 8,000, or an image's 1,024 and what is beside it
PAGE = 4_096  # bytes
MB = 1e6


@dataclass(frozen=True)
class Workload:
    """``patches``: fewest and most of an image; None: text only. ``tokens``: median, fewest and most of a response."""

    name: str
    groups: int
    patches: tuple[int, int] | None = None
    tokens: tuple[int, int, int] = (1_339, 200, 8_000)
    seed: int = 0

    def __str__(self) -> str:
        image = "" if self.patches is None else ", an image a group"
        return f"{self.name}: {self.groups} groups of {MEMBERS}{image}"


@dataclass(frozen=True, eq=False)
class Group:
    """``ids`` int64 [n] and ``logprobs`` float32 [n] of each response, ``pixels`` float32 [patches, 1176] of them all;
    ``tokens`` placeholders stand for it in every response, one for four patches."""

    ids: list[Tensor]
    logprobs: list[Tensor]
    pixels: Tensor | None = None
    tokens: int = 0

    @property
    def unique(self) -> int:
        """Bytes, the image once."""
        return sum(t.nbytes for t in (*self.ids, *self.logprobs)) + (0 if self.pixels is None else self.pixels.nbytes)

    @property
    def logical(self) -> int:
        """Bytes, the image as often as it is shown."""
        return self.unique + (0 if self.pixels is None else (MEMBERS - 1) * self.pixels.nbytes)

    @property
    def length(self) -> int:
        return sum(map(len, self.ids))


def groups_of(load: Workload) -> Iterator[Group]:
    """The same ones each time. A response that is shorter than its image's placeholders is as long as they need.

    Of 2,048 patches: ids [x, x, x, x, 512 placeholders, 28 or more others].
    """
    rng = np.random.default_rng(load.seed)
    median, fewest, most = load.tokens
    for _ in range(load.groups):
        lengths = np.clip(rng.lognormal(np.log(median), 0.8, MEMBERS), fewest, most).astype(int)
        pixels, tokens = None, 0
        if load.patches is not None:
            patches = int(rng.integers(load.patches[0], load.patches[1] + 1)) // 4 * 4
            pixels, tokens = torch.from_numpy(rng.standard_normal((patches, WIDTH), dtype=np.float32)), patches // 4
            lengths = np.maximum(lengths, tokens + 32)
        ids = [torch.from_numpy(rng.integers(0, VOCABULARY, int(n), dtype=np.int64)) for n in lengths]
        for one in ids:
            one[BEFORE : BEFORE + tokens] = IMAGE
        yield Group(
            ids, [torch.from_numpy(rng.standard_normal(int(n), dtype=np.float32)) for n in lengths], pixels, tokens
        )


def look(tensors: Iterable[Tensor]) -> int:
    """The sum of one byte of each page: memory that was only mapped so far is there afterwards."""
    return sum(int(t.detach().flatten().view(torch.uint8)[::PAGE].sum()) for t in tensors if t.numel())


@dataclass(frozen=True)
class Sums:
    """What a loader delivered, or should have: each response once, each image ``MEMBERS`` times."""

    tokens: int = 0
    ids: int = 0
    pixels: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.tokens + other.tokens, self.ids + other.ids, self.pixels + other.pixels)


@dataclass(frozen=True)
class Totals:
    """Of a workload: what is to be delivered, and bytes with every image counted once and as often as it is shown."""

    sums: Sums
    unique: int
    logical: int


@functools.cache
def totals_of(load: Workload) -> Totals:
    sums, unique, logical = Sums(), 0, 0
    for group in groups_of(load):
        pixels = 0 if group.pixels is None else MEMBERS * look([group.pixels])
        sums += Sums(group.length, sum(int(one.sum()) for one in group.ids), pixels)
        unique, logical = unique + group.unique, logical + group.logical
    return Totals(sums, unique, logical)


@dataclass(eq=False)
class Reading:
    """What a consumer saw: seconds of each micro-batch from asking until every page of its tensors had been looked at,
    and what they held. ``prepared``: seconds until it could ask."""

    prepared: float = 0.0
    seconds: list[float] = field(default_factory=list)
    sums: Sums = field(default_factory=Sums)

    def micro_batch(self, asked: float, tensors: Iterable[Tensor]) -> None:
        look(tensors)
        self.seconds.append(time.perf_counter() - asked)

    def checked(self, ids: Iterable[Tensor], pixels: Iterable[Tensor], shown: int = 1) -> None:
        """Not timed. ``shown``: how many responses each of the images is for."""
        ids = list(ids)
        self.sums += Sums(sum(i.numel() for i in ids), sum(int(i.sum()) for i in ids), shown * look(pixels))


class Usage:
    """The most memory that this process and all below it hold at once while it is open: bytes above what they held
    when it was opened, pages that several share counted once (PSS), the page cache not.

    Looking takes a thread a few milliseconds, 20 times a second: not while something is timed.
    """

    def __enter__(self) -> Usage:
        self._stop = threading.Event()
        self._first = self._look()
        self.all = self.driver = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._note()
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self._note()

    def _note(self) -> None:
        found = self._look()
        self.all = max(self.all, found[0] - self._first[0])
        self.driver = max(self.driver, found[1] - self._first[1])

    @staticmethod
    def _look() -> tuple[int, int]:
        own, total = psutil.Process(), 0
        driver = own.memory_full_info().pss
        for process in own.children(recursive=True):
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue  # it ended
        return total + driver, driver


def held_by(role: str) -> int:
    """Bytes (PSS) of the processes below this one whose command line has ``role`` in it."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            if role in " ".join(process.cmdline()):
                total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def size_of(folder: str) -> int:
    """Bytes of all files in it, as long as they are: a file that is being written has no name yet."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # reclaimed meanwhile
                total += os.path.getsize(os.path.join(where, name))
    return total


def forget(folder: str) -> None:
    """Its files leave the page cache: written out, then given up by posix_fadvise, which needs no root."""
    for where, _, names in os.walk(folder):
        for name in names:
            fd = os.open(os.path.join(where, name), os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
