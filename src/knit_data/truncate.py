"""Cutting overlong trajectories before admission sees them: the policy ``oversize="truncate"``.

Only here does admission touch payload: what a shorter row's loss tokens and checksums are, no metadata can tell. A cut
row looks to everything after it like one that was written shorter.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from knit_data.infos import Array, InfoTable, Ragged
from knit_data.store.head import checksum
from knit_data.store.store import TrajectoryStore


def truncated(store: TrajectoryStore, table: InfoTable, limit: int) -> InfoTable:
    """Rows of more than ``limit`` tokens keep their first ``limit``, or fewer so that no medium is cut.

    Limit 100, an image at positions 90 to 109: 90 tokens stay. A row of which fewer than two tokens would stay is left
    as it is.
    """
    kept = [_kept(table, i, limit) for i in range(len(table))]
    cut = [i for i, n in enumerate(kept) if 2 <= n < table.columns["n_tokens"][i]]
    if not cut:
        return table
    names = ("n_tokens", "loss_tokens", "patches", "checksums", "cut")
    columns = {**table.columns, **{name: table.columns[name].copy() for name in names}}
    for i in cut:
        _cut_row(store, table, columns, i, kept[i])
    spans = table.ragged["spans"]
    inside = [s[s[:, 1] < kept[i]] if i in cut else s for i, s in enumerate(map(spans.row, range(len(table))))]
    shorter = Ragged.of_lengths(np.concatenate(inside), np.array([len(s) for s in inside]))
    return replace(table, columns=columns, ragged={**table.ragged, "spans": shorter})


def _cut_row(store: TrajectoryStore, table: InfoTable, columns: dict[str, Array], i: int, n: int) -> None:
    info, schema, width = table[i], table.schema, int(table.columns["mask_bytes"][i])
    for c, f in enumerate(schema.fields):
        if f.per_token:
            data = store.column(info, f.name, info.n_tokens * f.row_bytes)
            columns["checksums"][i, c] = checksum(data[: n * f.row_bytes])
    columns["loss_tokens"][i] = n - 1
    if width:
        data = store.column(info, "loss_mask", info.n_tokens * width)[: n * width]
        columns["checksums"][i, -1] = checksum(data)
        columns["loss_tokens"][i] = np.count_nonzero(np.frombuffer(data, np.uint8 if width == 1 else np.float32))
    costs = table.media.columns["patches"]
    columns["patches"][i] = sum(int(costs[u]) for u, first, _ in _media(table, i) if first < n)
    columns["n_tokens"][i], columns["cut"][i] = n, 1


def _kept(table: InfoTable, i: int, limit: int) -> int:
    """The largest cut at or below ``limit`` that no medium lies across."""
    n = min(int(table.columns["n_tokens"][i]), limit)
    media = _media(table, i) if n == limit else []
    while across := [first for _, first, last in media if first < n < last]:
        n = min(across)
    return n


def _media(table: InfoTable, i: int) -> list[tuple[int, int, int]]:
    """Per medium of the row: its number, and where its first span begins and its last ends."""
    out: list[tuple[int, int, int]] = []
    missing = 0
    for u, start, length, _ in table.ragged["spans"].row(i).tolist():
        if not missing:
            out.append((u, start, start))
            missing = int(table.media.columns["tokens"][u])
        _, first, last = out[-1]
        out[-1] = u, min(first, start), max(last, start + length)
        missing -= length
    return out
