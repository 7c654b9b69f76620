"""Many byte ranges of a store's objects, read to where they stay and verified, in one call."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash

from knit_data.errors import CorruptData, KnitError
from knit_data.infos import Array
from knit_data.ops.read import read_ranges
from knit_data.store.backend import Backend, Read


@dataclass(frozen=True, eq=False)
class Ranges:
    """R ranges of K objects, for B buffers, in U units with a checksum each.

    Two trajectories of 3 and 5 tokens in one segment, int64, to one arena: keys ["segments/w/0…"], table
    [[0, 4096, 24, 0, 0], [0, 4120, 40, 0, 24]], units [0, 1, 2], sums [two numbers].
    """

    keys: Sequence[str]
    outs: Sequence[Array]  # uint8, contiguous, writable
    table: Array  # int64 [R, 5]: object, first byte, how many, buffer, first byte there
    units: Array  # int64 [U + 1]: unit u is ranges units[u] to units[u + 1] - 1, hashed end to end
    sums: Array  # uint64 [U]: XXH3-64

    @staticmethod
    def concat(parts: Sequence[Ranges]) -> Ranges:
        """Buffers are numbered through; an object that several parts name is one."""
        tables, units, outs, done = [], [np.zeros(1, np.int64)], list[Array](), 0
        numbers = dict[str, int]()  # of objects, each once
        for part in parts:
            which = [numbers.setdefault(key, len(numbers)) for key in part.keys]
            table = part.table.copy()
            table[:, 3] += len(outs)
            if which != list(range(len(which))):
                table[:, 0] = np.array(which)[table[:, 0]]
            tables.append(table)
            units.append(part.units[1:] + done)
            outs += part.outs
            done += len(table)
        sums = np.concatenate([part.sums for part in parts])
        return Ranges(list(numbers), outs, np.concatenate(tables), np.concatenate(units), sums)


@dataclass(eq=False)
class Outcome:
    """What a read brought. Units without an error are complete and verified."""

    errors: dict[int, KnitError] = field(default_factory=dict)  # by unit
    read_s: float = 0.0  # of the caller's time
    verify_s: float = 0.0
    nbytes: int = 0


def read_verified(backend: Backend, ranges: Ranges) -> Outcome:
    """Reads every range to its place. What fails is named per unit; nothing is raised for it.

    ``CorruptData`` where a unit's bytes do not have its checksum; else what ``Backend.read_into`` says.
    """
    outcome, began = Outcome(nbytes=int(ranges.table[:, 2].sum())), time.perf_counter()
    with backend.files(ranges.keys) as files:
        if files is not None:
            outs = [torch.from_numpy(out) for out in ranges.outs]
            found, sums, spent = read_ranges(outs, files, ranges.table, ranges.units)
            share = spent[1] / (sum(spent) or 1.0)
    if files is None:
        sums, share = _through(backend, ranges, outcome)
    elif (short := found != ranges.table[:, 2]).any():
        # The ordinary way, which says what is wrong, or meets a file that was replaced. Now that those files are given
        # back: it may need their descriptors.
        sums = _again(backend, ranges, np.flatnonzero(short).tolist(), sums, outcome)
    if (wrong := sums != ranges.sums).any():
        for u in np.flatnonzero(wrong).tolist():
            outcome.errors.setdefault(u, _mismatch(ranges, u, int(sums[u])))
    spent_s = time.perf_counter() - began
    outcome.verify_s = spent_s * share
    outcome.read_s = spent_s - outcome.verify_s
    return outcome


def _through(backend: Backend, ranges: Ranges, outcome: Outcome) -> tuple[Array, float]:
    """Of objects that are not files: one batch of reads, then the sums. Also the share of the time for the latter."""
    began = time.perf_counter()
    _fill(backend, ranges, range(len(ranges.table)), outcome)
    read = time.perf_counter()
    sums = np.array([_sum(ranges, u) for u in range(len(ranges.sums))], np.uint64)
    done = time.perf_counter()
    return sums, (done - read) / max(done - began, 1e-9)


def _again(backend: Backend, ranges: Ranges, wanted: Sequence[int], sums: Array, outcome: Outcome) -> Array:
    _fill(backend, ranges, wanted, outcome)
    out: Array = sums.copy()
    for u in np.unique(np.searchsorted(ranges.units, wanted, "right") - 1).tolist():
        out[u] = _sum(ranges, u)
    return out


def _fill(backend: Backend, ranges: Ranges, wanted: Iterable[int], outcome: Outcome) -> None:
    numbers, reads = [], []
    for i in wanted:
        key, start, length, out, place = ranges.table[i].tolist()
        if length:
            numbers.append(i)
            reads.append(Read(ranges.keys[key], start, ranges.outs[out][place : place + length].data))
    for i, error in zip(numbers, backend.read_into(reads), strict=True):
        if error is not None:
            outcome.errors.setdefault(int(np.searchsorted(ranges.units, i, "right")) - 1, error)


def _sum(ranges: Ranges, u: int) -> int:
    hasher = xxhash.xxh3_64()
    for _, _, length, out, place in ranges.table[ranges.units[u] : ranges.units[u + 1]].tolist():
        hasher.update(ranges.outs[out][place : place + length].data)
    return hasher.intdigest()


def _mismatch(ranges: Ranges, u: int, found: int) -> CorruptData:
    rows = ranges.table[ranges.units[u] : ranges.units[u + 1]]
    key = ranges.keys[int(rows[0, 0])] if len(rows) else "nothing"
    places = ", ".join(f"{length:,} at {start:,}" for _, start, length, *_ in rows.tolist())
    return CorruptData(
        f"{key}: bytes ({places}) hash to {found:016x}, their checksum is {int(ranges.sums[u]):016x}: damaged after "
        "they were written"
    )
