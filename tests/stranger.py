"""A script that knows a simulation by its trace alone, and works out every figure anew."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np


def stranger(facts: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """All figures again, from the rows of a trace and the facts before them."""
    minis = facts["mini_batches"]
    start, end, tag, source, place = {}, {}, {}, {}, {}
    train_batch, step, begins, busy = {}, {}, {}, 0.0
    published = [(0.0, 0)]
    places: list[int] = []
    for i, row in enumerate(rows):
        event, time, group = row["event"], row["time"], row.get("group")
        if event == "launch":
            source[group] = row["source"]
        elif event == "start":
            response = (group, row["response"])
            start[response], tag[response], place[response] = time, row["version"], i
        elif event == "completion":
            end[group, row["response"]] = time
        elif event == "admission":
            train_batch[group], step[group] = row["train_batch"], row["step"]
        elif event == "step":
            begins[row["index"]] = i
        elif event == "publish":
            published.append((time, row["version"]))
            places.append(i)

    ends = [time for time, version in published if version and version % minis == 0]
    low, high = facts["warmup"], min(len(ends), facts["warmup"] + facts["batches"])
    since, until = ends[low - 1] if low else 0.0, ends[high - 1]
    for row in rows:
        if row["event"] == "step" and since <= row["time"] < until:
            busy += row["ends"] - row["time"]
    busy += facts["publish_seconds"] * sum(since < time <= until for time, _ in published)

    staleness, by_token, gaps, passed = [], [], [], 0
    for response, began in start.items():
        group = response[0]
        k = train_batch.get(group, -1)
        if not low <= k < high:
            continue
        staleness.append(max(0, k * minis - tag[response]) / minis)
        gaps.append(step[group] - tag[response])
        took, area = end[response] - began, 0.0
        for j, (time, version) in enumerate(published):
            until_next = published[j + 1][0] if j + 1 < len(published) else float("inf")
            area += version * max(0.0, min(until_next, end[response]) - max(time, began))
        by_token.append(max(0.0, k - area / took / minis))
        passed += bisect_left(places, begins[step[group]]) - bisect_left(places, place[response])

    sources = [Counter(source[g] for g, k in train_batch.items() if k == b) for b in range(len(ends))]
    off = sum(any(not lo <= n[s] <= hi for s, (lo, hi) in facts["quotas"].items()) for n in sources)
    each = 1 if facts["publish"] == "train_batch" else 1 / minis
    return {
        "staleness": float(np.mean(staleness)),
        "staleness_token_mean": float(np.mean(by_token)),
        "gap": float(np.mean(gaps)),
        "p99": float(np.percentile(staleness, 99)),
        "max": max(staleness),
        "cycle_seconds": (until - since) / (high - low),
        "trainer_idle": 1 - busy / (until - since),
        "violations": off,
        "in the system": passed / len(staleness) * each,
    }
