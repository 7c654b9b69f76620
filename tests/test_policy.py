"""The group policy: what it refuses, and what the user's own functions may do."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from makers import group, rows, trajectory

import knit_data as kd
from knit_data.errors import InvalidArgument, InvalidGroup
from knit_data.infos import InfoTable
from knit_data.policy import Annotate, GroupPolicy, Judge

PAIR = rows(group("a", 2))


def annotated(table: InfoTable, annotate: Annotate | None) -> InfoTable:
    return Judge(GroupPolicy(annotate=annotate)).annotated("a", table)


# -- annotations -------------------------------------------------------------------------------------------------------


def rewarded(rewards: Sequence[float]) -> list[kd.TrajectoryInfo]:
    made = [trajectory(f"a/{i}", "a", values={"reward": r}) for i, r in enumerate(rewards)]
    return rows(made).infos()


def test_group_advantages_are_exact() -> None:
    assert kd.group_advantages(rewarded([1, 0, 0, 1]), eps=0.5) == {"advantage": [0.5, -0.5, -0.5, 0.5]}
    assert kd.group_advantages(rewarded([2, 2, 2]), name="a") == {"a": [0.0, 0.0, 0.0]}
    rewards = [0.25, 1.5, -3.0]
    mean = sum(rewards) / 3
    std = (sum((r - mean) ** 2 for r in rewards) / 3) ** 0.5
    found = kd.group_advantages(rewarded(rewards))["advantage"]
    assert found == pytest.approx([(r - mean) / (std + 1e-6) for r in rewards], rel=1e-14)  # float64, another order
    with pytest.raises(InvalidGroup, match=r"'a/0' has no value 'score', it has \['reward'\]"):
        kd.group_advantages(rewarded([1, 0]), reward="score")


def test_annotations_join_the_values() -> None:
    plain = rows(group("a", 4))
    table = annotated(plain, lambda infos: {"advantage": [0.5 * n for n in range(len(infos))], "x": np.ones(4)})
    assert [i.values["advantage"] for i in table.infos()] == [0.0, 0.5, 1.0, 1.5]
    assert table.value_names == ["advantage", "reward", "x"]
    assert annotated(plain, None) is plain and plain.value_names == ["reward"]
    assert table.fingerprints() == plain.fingerprints()


@pytest.mark.parametrize(
    "values",
    [[1.0] * 3, [1.0] * 5, [], 1.0, [[1.0]] * 4, ["x"] * 4, [None, 1.0, 1.0, 1.0]]
    + [[0.0, 0.0, 0.0, bad] for bad in (float("nan"), float("inf"), 1e39)],
)
def test_annotations_that_are_not_one_float_each(values: Any) -> None:
    with pytest.raises(
        InvalidGroup, match=r"annotate gave 'x' = .* for group 'a' of 4 members; it must return one finite"
    ):
        annotated(rows(group("a", 4)), lambda _: {"x": values})


@pytest.mark.parametrize("name", ["reward", "logprobs", "input_ids", "loss_mask", "labels", "cu_seqlens"])
def test_annotations_may_not_hide_a_stored_name(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"annotate adds '{name}', which is a stored value or column"):
        annotated(rows(group("a", 4)), lambda infos: {name: [0.0] * len(infos)})


# -- the policy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("incomplete", "ask"),
        ("oversize", "cut"),
        ("invalid", "skip"),
        ("surplus", "last"),
        ("timeout", 5.0),
        ("surplus", "shortest"),
        ("max_tokens", 1),
        ("max_tokens", 8.0),
        ("max_tokens", True),
        ("keep", "all"),
        ("annotate", {"x": 1.0}),
    ],
)
def test_the_policy_refuses_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"GroupPolicy {name}") as caught:
        GroupPolicy(**{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("timeout", [None, 0, -1.0, float("nan"), float("inf"), True, "5"])
def test_dropping_incomplete_groups_needs_a_time(timeout: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"incomplete='drop' needs a timeout above 0 seconds, found {timeout!r}"):
        GroupPolicy(incomplete="drop", timeout=timeout)
    assert GroupPolicy(incomplete="drop", timeout=5).timeout == 5


# -- functions of the user's -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["keep", "annotate"])
def test_what_a_function_raises_is_told_with_its_group(what: str) -> None:
    def bad(infos: list[kd.TrajectoryInfo]) -> Any:
        return 1 / (len(infos) - 2)

    judge = Judge(GroupPolicy(**{what: bad}))
    with pytest.raises(InvalidGroup, match=f"{what} raised ZeroDivisionError for group 'a': .*division") as caught:
        _ = judge.keeps("a", PAIR) if what == "keep" else judge.annotated("a", PAIR)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_keep_gives_a_bool() -> None:
    assert Judge(GroupPolicy(keep=lambda _: np.bool_(True))).keeps("a", PAIR) is True  # type: ignore[arg-type,return-value]
    for answer in (None, 1, "yes"):
        with pytest.raises(InvalidGroup, match=f"keep gave {answer!r} for group 'a'; it returns True or False"):
            Judge(GroupPolicy(keep=lambda _, answer=answer: answer)).keeps("a", PAIR)  # type: ignore[misc]


def test_another_answer_to_the_same_question_is_told() -> None:
    flips = itertools.cycle([True, False])
    with pytest.raises(InvalidGroup, match="keep is not pure: for group 'a' it gave True, and called again False"):
        Judge(GroupPolicy(keep=lambda _: next(flips))).keeps("a", PAIR)
    counts = itertools.count()
    values: list[float] = []

    def one_list(infos: list[kd.TrajectoryInfo]) -> dict[str, list[float]]:
        values[:] = [float(next(counts))] * len(infos)
        return {"x": values}

    text = r"annotate is not pure: for group 'a' it gave {'x': \[0.0, 0.0\]}, and called again {'x': \[1.0, 1.0\]}"
    with pytest.raises(InvalidGroup, match=text):
        annotated(PAIR, one_list)


def test_functions_are_called_twice_on_the_first_groups_only() -> None:
    calls: list[str] = []

    def keep(infos: list[kd.TrajectoryInfo]) -> bool:
        calls.append(infos[0].group)
        return True

    judge = Judge(GroupPolicy(keep=keep))
    for g in range(20):
        judge.keeps(f"g{g}", rows(group(f"g{g}", 2)))
    assert calls == [f"g{g}" for g in range(16) for _ in range(2)] + [f"g{g}" for g in range(16, 20)]
