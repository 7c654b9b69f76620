"""Rows of all policies, against single runs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from knit_data.errors import InvalidArgument
from knit_data.simulation import PRESETS, Scenario, Source, compare, simulate

SHORT = replace(PRESETS["mix3"], batches=4, warmup=1)


def test_rows_are_means_over_seeds_against_the_first() -> None:
    told: list[str] = []
    rows = compare(SHORT, 2, told.append)
    assert [row["policy"] for row in rows] == [
        "train-batch",
        "train-batch, 1 ahead",
        "train-batch, paced",
        "colocated",
        "unchecked",
        "constraint-preserving",
        "constraint-preserving, paced",
    ]
    assert told[:3] == ["train-batch, seed 1 of 2", "train-batch, seed 2 of 2", "train-batch, 1 ahead, seed 1 of 2"]
    assert len(told) == 14
    base = [simulate(SHORT, "train-batch", seed=seed) for seed in range(2)]
    ours = [simulate(SHORT, "constraint-preserving", True, seed) for seed in range(2)]
    first, last = rows[0], rows[-1]
    assert first["staleness"] == pytest.approx((base[0].staleness + base[1].staleness) / 2)
    assert (first["reduction"], first["cycle_ratio"]) == (0.0, 1.0)
    assert last["reduction"] == pytest.approx(1 - sum(r.staleness for r in ours) / sum(r.staleness for r in base))
    assert last["cycle_ratio"] == pytest.approx(sum(r.cycle_seconds for r in ours) / sum(r.cycle_seconds for r in base))
    assert last["max"] == max(r.max for r in ours)
    assert (last["bound"], last["bounds"]) == (32 / 512, {"C/B": 32 / 512, "1/M": 1 / 16})
    assert rows[3]["bound"] == 0.0 and rows[3]["staleness"] == 0.0
    assert all(row["identity_error"] < 1e-9 for row in rows)


def test_slack_is_measured_against_exact_quotas_too() -> None:
    rows = compare(replace(SHORT, slack=3), 1)
    assert [row["policy"] for row in rows[:3]] == ["train-batch", "train-batch, 1 ahead", "train-batch, slack 3"]
    assert rows[0]["staleness"] == simulate(SHORT, "train-batch").staleness
    assert rows[2]["staleness"] == simulate(replace(SHORT, slack=3), "train-batch").staleness


def test_a_run_that_cannot_go_on_is_seen() -> None:
    stuck = Scenario({"a": Source(4, 9.0, keep=0.3), "b": Source(4, 9.0)}, 4, 4, launch_ahead=0, batches=4, warmup=1)
    rows = {row["policy"]: row for row in compare(stuck, 2)}
    assert rows["constraint-preserving"]["dead_ends"] == 2 and math.isnan(rows["constraint-preserving"]["staleness"])
    assert math.isnan(rows["constraint-preserving"]["max"])
    assert rows["constraint-preserving, paced"]["dead_ends"] == rows["colocated"]["dead_ends"] == 0
    assert rows["constraint-preserving, paced"]["staleness"] > 0


@pytest.mark.parametrize("seeds", [0, -1, 1.0, True, "3"])
def test_compare_refuses(seeds: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"seeds must be an int of at least 1, found {seeds!r}"):
        compare(SHORT, seeds)
