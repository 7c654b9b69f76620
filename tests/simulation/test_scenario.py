"""What a scenario refuses, and what it says of itself against drawing and adding up."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knit_data.errors import InvalidArgument
from knit_data.simulation import PRESETS, Scenario, Source, preset

QUANTILES = [(0.01, 38.0), (0.25, 66.0), (0.5, 88.0), (0.75, 117.0), (0.99, 229.0), (1.0, 404.0)]


def scenario(**changed: Any) -> Scenario:
    arguments: dict[str, Any] = {"sources": {"a": Source(6, 10.0), "b": Source(2, 30.0)}, "slots": 8, "mini_batches": 4}
    return Scenario(**{**arguments, **changed})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"groups": 0}, "Source groups must be an int of at least 1, found 0"),
        ({"groups": True}, "found True"),
        ({"groups": 2.0}, "found 2.0"),
        ({"seconds": None}, "Source takes seconds .* or quantiles"),
        ({"quantiles": QUANTILES}, "Source takes seconds .* or quantiles"),
        ({"seconds": 0}, "Source seconds must be a finite number above 0, found 0"),
        ({"seconds": float("inf")}, "found inf"),
        ({"seconds": "9"}, "found '9'"),
        ({"sigma": -0.1}, "Source sigma must be between 0 and 4, found -0.1"),
        ({"sigma": 4.1}, "found 4.1"),
        (
            {"seconds": None, "quantiles": [(0.0, 1.0)]},
            r"rising \(probability, seconds\) pairs, found \[\(0.0, 1.0\)\]",
        ),
        ({"seconds": None, "quantiles": [(0.0, 2.0), (1.0, 1.0)]}, "must be rising"),
        ({"seconds": None, "quantiles": [(0.5, 1.0), (0.5, 2.0)]}, "must be rising"),
        ({"seconds": None, "quantiles": [(0.0, 1.0), (1.0, float("nan"))]}, "must be rising"),
        ({"seconds": None, "quantiles": [(0.0, 1.0, 2.0), (1.0, 2.0, 3.0)]}, "must be rising"),
        ({"seconds": None, "quantiles": [(0.0, 1.0), (1.1, 2.0)]}, r"probabilities in 0..1 .*1\.1"),
        ({"seconds": None, "quantiles": [(0.0, 0.0), (1.0, 2.0)]}, "seconds above 0"),
        ({"keep": 0.0}, "Source keep must be a share that leaves something, found 0.0"),
        ({"keep": 1.5}, "found 1.5"),
        ({"fail": 1.0}, "Source fail must be a share that leaves something, found 1.0"),
        ({"fail": -1}, "found -1"),
    ],
)
def test_a_source_refuses(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        Source(**{"groups": 4, "seconds": 9.0, **arguments})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"sources": {}}, r"Scenario sources must map names to Source, found \{\}"),
        ({"sources": [Source(4, 9.0)]}, "must map names to Source"),
        ({"sources": {"a": 4}}, "found 'a' among them"),
        ({"sources": {1: Source(4, 9.0)}}, "found 1 among them"),
        ({"slots": 0}, "Scenario slots must be an int of at least 1, found 0"),
        ({"mini_batches": True}, "Scenario mini_batches must be an int of at least 1, found True"),
        ({"mini_batches": 3}, "8 groups of a train batch cannot be cut into 3 mini-batches"),
        ({"mini_batches": 16}, "8 groups of a train batch cannot be cut into 16 mini-batches"),
        ({"group_size": 1.0}, "Scenario group_size must be an int of at least 1, found 1.0"),
        ({"batches": 0}, "Scenario batches must be an int of at least 1, found 0"),
        ({"warmup": -1}, "Scenario warmup must be an int of at least 0, found -1"),
        ({"launch_ahead": "2"}, "Scenario launch_ahead must be an int of at least 0, found '2'"),
        ({"slack": -1}, "Scenario slack must be an int of at least 0, found -1"),
        ({"slack": 3}, "leave each source's quota at least 0, found 3 with 2 groups of 'b'"),
        ({"max_staleness": -1}, "Scenario max_staleness must be None or an int >= 0, found -1"),
        ({"rho": 0}, "Scenario rho must be a finite number above 0, found 0"),
        ({"step_seconds": 0.0}, "Scenario step_seconds must be None or above 0, found 0.0"),
        ({"publish_seconds": -1.0}, "Scenario publish_seconds must be at least 0, found -1.0"),
        ({"publish": "epoch"}, "must be 'train_batch' or 'mini_batch', found 'epoch'"),
    ],
)
def test_a_scenario_refuses(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        scenario(**arguments)


def test_presets() -> None:
    assert preset("mix4") is not None and preset("mix4") == PRESETS["mix4"]
    changed = preset("mix4", 32, 8, 3)
    assert (changed.slots, changed.mini_batches, changed.slack, changed.sources) == (32, 8, 3, PRESETS["mix4"].sources)
    assert changed.facts()["quotas"] == {"chat": [17, 23], "code": [17, 23], "math": [13, 19], "agent": [5, 11]}
    bounds = changed.quotas.resolved(changed.groups)["source"]
    assert {n: [b.low, b.high] for n, b in bounds.items()} == changed.facts()["quotas"]
    assert all(s.groups == 64 and s.responses == 512 and s.name == name for name, s in PRESETS.items())
    with pytest.raises(InvalidArgument, match=r"there is no preset 'mixed'; there are homo, mild, mix3, mix4, trainer"):
        preset("mixed")


@given(
    st.one_of(
        st.builds(lambda s, d: Source(1, s, d), st.floats(0.1, 1e3), st.floats(0, 1.5)),
        st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 1e3)), min_size=2, max_size=5).map(
            lambda pairs: Source(
                1,
                quantiles=list(
                    zip(
                        np.linspace(min(p for p, _ in pairs) / 2, 1 - max(p for p, _ in pairs) / 3, len(pairs)),
                        sorted(s for _, s in pairs),
                        strict=True,
                    )
                ),
            )
        ),
    )
)
def test_the_mean_is_that_of_draws(source: Source) -> None:
    drawn = source.draw(np.random.default_rng(0), 4_000)
    assert min(drawn) > 0
    error = np.std(drawn) / np.sqrt(len(drawn))
    assert abs(np.mean(drawn) - source.mean()) <= 5 * error + 1e-9 * source.mean()


def test_sizes_and_bounds() -> None:
    made = scenario(rho=0.5)
    assert (made.groups, made.responses, made.rollout_seconds) == (8, 64, 8 * (6 * 10 + 2 * 30) / 8)
    assert made.train_seconds == 0.5 * 120 / 4 and scenario(step_seconds=3.0).train_seconds == 3.0
    assert made.bounds == (8 / 64, 1 / 4) and made.bound == 8 / 64
    assert scenario(rho=1.0).bound == 1 / 4, "the trainer is the bottleneck"
    assert scenario(publish="mini_batch").bounds == (0.0, 0.0)
    assert made.estimate() == pytest.approx(8 / 64 + 0.5 / 4), "siblings of one length do not wait for each other"
    assert scenario(sources={"a": Source(8, 10.0, 1.0)}).estimate() > 2 * 8 / 64 + 0.9 / 4


def test_facts_are_json() -> None:
    facts = json.loads(json.dumps(scenario(slack=1).facts(), allow_nan=False))
    assert facts["quotas"] == {"a": [5, 7], "b": [1, 3]}
    assert (facts["mini_batches"], facts["groups"], facts["group_size"], facts["slots"]) == (4, 8, 8, 8)
    assert (facts["publish"], facts["train_seconds"]) == ("train_batch", scenario().train_seconds)
    assert replace(scenario(), slack=1).facts().keys() == facts.keys()


def test_what_leaves_nearly_nothing_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="less than 1 in 1000 groups of 's' would be left"):
        Scenario({"s": Source(2, seconds=9.0, keep=0.5, fail=0.9)}, slots=1, mini_batches=1)
