"""All policies on one scenario, side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from knit_data.errors import InvalidArgument
from knit_data.simulation.run import simulate
from knit_data.simulation.scenario import Scenario

PACED = "constraint-preserving, paced"


def compare(scenario: Scenario, seeds: int = 3, tell: Callable[[str], object] = lambda _: None) -> list[dict[str, Any]]:
    """All policies side by side, means over seeds 0, 1, ...; ``reduction`` is that of mean staleness against the
    first row: train-batch admission with exact quotas, launched in the order of the mix. More such rows: with less
    launched ahead, and with the same slack. ``tell`` gets a line before each run."""
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
        raise InvalidArgument(f"seeds must be an int of at least 1, found {seeds!r}.")
    exact = replace(scenario, slack=0)
    runs = [("train-batch", exact, "train-batch", False)]
    if scenario.launch_ahead > 1:
        runs.append(("train-batch, 1 ahead", replace(exact, launch_ahead=1), "train-batch", False))
    if scenario.slack:
        runs.append((f"train-batch, slack {scenario.slack}", scenario, "train-batch", False))
    runs += [
        ("train-batch, paced", scenario, "train-batch", True),
        ("colocated", scenario, "colocated", False),
        ("unchecked", scenario, "unchecked", False),
        ("constraint-preserving", scenario, "constraint-preserving", False),
        (PACED, scenario, "constraint-preserving", True),
    ]
    rows: list[dict[str, Any]] = []
    for policy, chosen, admission, pacing in runs:
        reports = []
        for seed in range(seeds):
            tell(f"{policy}, seed {seed + 1} of {seeds}")
            reports.append(simulate(chosen, admission, pacing, seed))
        mean = {n: float(np.mean([getattr(r, n) for r in reports])) for n in _MEANS}
        base = rows[0] if rows else mean
        rows.append(
            {
                "policy": policy,
                "scenario": chosen.facts(),
                **mean,
                "reduction": _reduction(mean["staleness"], base["staleness"]),
                "reduction_token_mean": _reduction(mean["staleness_token_mean"], base["staleness_token_mean"]),
                "max": float(np.max([r.max for r in reports])),  # NaN where a run could not go on
                "cycle_ratio": mean["cycle_seconds"] / base["cycle_seconds"],
                "violations": sum(r.violations for r in reports),
                "dead_ends": sum(r.dead_ends for r in reports),
                "dropped": sum(sum(r.dropped.values()) for r in reports),
                "bound": chosen.bound if admission != "colocated" else 0.0,
                "bounds": {"C/B": chosen.bounds[0], "1/M": chosen.bounds[1]},
                "estimate": chosen.estimate(),
                "identity_error": float(np.max([r.identity_error for r in reports])),
            }
        )
    return rows


_MEANS = ("staleness", "staleness_token_mean", "gap", "p99", "cycle_seconds", "trainer_idle")


def _reduction(value: float, base: float) -> float:
    return round(1 - value / base, 12) + 0.0 if base else 0.0  # + 0.0: not -0.0
