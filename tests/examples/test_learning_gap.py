"""The arms of the comparison differ in staleness and in nothing else; its statistics are right."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # where the examples find each other, too

import learning_gap as gap
import tiny_rl

TRAIN_BATCHES = 2  # only the first has weights that nobody could have waited for
COLOCATED, TRAIN_BATCH, MINI_BATCH = gap.ARMS


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As in the command: sums are then the same everywhere, and so small a model is no faster with more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def seen(one_thread: None) -> dict[str, tuple[gap.Curve, list[list[tuple[str, int, str]]]]]:
    """One short run of each arm, and the (group, version, prompt) of every trajectory that each step trained."""
    out = {}
    step = gap.train_step
    for arm in gap.ARMS:
        steps = list[list[tuple[str, int, str]]]()

        def spy(model: Any, optimizer: Any, mini: Any, steps: Any = steps) -> Any:
            rows = [
                (info.group, info.policy_version, tiny_rl.decode(ids[: tiny_rl.PROMPT_WIDTH]))
                for micro in mini.micro_batches()
                for info, ids in zip(micro.infos, micro["input_ids"].tolist(), strict=True)
            ]
            steps.append(rows)
            return step(model, optimizer, mini)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gap, "train_step", spy)
            out[arm.name] = gap.train(arm, 0, TRAIN_BATCHES), steps
    return out


def test_budgets_and_mixture_are_equal(seen: Any) -> None:
    mixture = {"copy": 24, "symbol": 8}
    for curve, steps in seen.values():
        assert curve.trained == [mixture] * TRAIN_BATCHES
        assert len(steps) == len(curve.staleness) == TRAIN_BATCHES * gap.STEPS
        assert all(len({group for group, *_ in rows}) == gap.MINI_BATCH for rows in steps)
        assert all(len(rows) == gap.MINI_BATCH * gap.GROUP_SIZE for rows in steps)
        groups = {group for rows in steps for group, *_ in rows}
        assert len(groups) == TRAIN_BATCHES * gap.TRAIN_BATCH <= curve.launched
        assert len(curve.rewards) == TRAIN_BATCHES + 1


def test_every_arm_starts_from_the_same_weights(seen: Any) -> None:
    assert len({curve.rewards[0] for curve, _ in seen.values()}) == 1


def test_staleness_follows_from_the_versions(seen: Any) -> None:
    for curve, steps in seen.values():
        for u, (said, rows) in enumerate(zip(curve.staleness, steps, strict=True)):
            versions = [version for _, version, _ in rows]
            assert said == sum(u // gap.STEPS - version / gap.STEPS for version in versions) / len(versions)


def test_each_arm_is_as_stale_as_it_promises(seen: Any) -> None:
    stale = {name: curve.staleness for name, (curve, _) in seen.items()}
    assert set(stale[COLOCATED.name]) == {0.0}
    assert 0 < sum(stale[MINI_BATCH.name]) < sum(stale[TRAIN_BATCH.name])
    assert max(stale[TRAIN_BATCH.name]) <= TRAIN_BATCH.ahead


def test_only_the_colocated_arm_waits_for_every_train_batch(seen: Any) -> None:
    seconds = {name: curve.seconds for name, (curve, _) in seen.items()}
    assert seconds[MINI_BATCH.name] < seconds[TRAIN_BATCH.name] < seconds[COLOCATED.name]


def test_nothing_held_out_is_trained(seen: Any) -> None:
    held_out = {problem.prompt for problem in gap.HELD_OUT}
    trained = {prompt for _, steps in seen.values() for rows in steps for *_, prompt in rows}
    assert len(held_out) == 16 and len(trained) > 30 and not held_out & trained


def test_a_run_follows_from_its_seed(seen: Any) -> None:
    torch.manual_seed(99)
    assert gap.train(MINI_BATCH, 0, TRAIN_BATCHES) == seen[MINI_BATCH.name][0]


# -- the statistics ---------------------------------------------------------------------------------------------------


def test_interval_of_a_worked_example() -> None:
    # mean 5, squared deviations 9 + 1 + 1 + 9 = 20, variance 20 / 3, standard error sqrt(20 / 3 / 4), t(3) = 3.182
    middle, half = gap.interval([2.0, 4.0, 6.0, 8.0])
    assert middle == 5.0
    assert half == pytest.approx(3.182 * math.sqrt(5 / 3), rel=1e-12)  # another order of roundings


def test_the_quantiles_are_students() -> None:
    """By Simpson's rule over the density; the table has three decimals, which move the probability by 1e-4 at most."""
    for df, t in enumerate(gap.T95, start=1):
        scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
        h = t / 2000
        density = [scale * (1 + (i * h) ** 2 / df) ** (-(df + 1) / 2) for i in range(2001)]
        inside = 2 * h / 3 * (density[0] + 4 * sum(density[1:-1:2]) + 2 * sum(density[2:-1:2]) + density[-1])
        assert inside == pytest.approx(0.95, abs=1e-4)


def curve(*rewards: float, stale: float = 0.0) -> gap.Curve:
    return gap.Curve(list(rewards), [stale] * 8, [{}, {}], 64, 80.0)


def test_figures_of_a_worked_example() -> None:
    """0.5 after 8 steps is the first reward above 0.4."""
    found = curve(0.0, 0.25, 0.5, stale=0.5).figures()
    assert found == {"final": 0.25, "area": 0.375, "staleness": 0.5, "seconds": 40.0, "steps": 8.0}
    assert "steps" not in curve(0.0, 0.25, 0.375).figures()


def test_differences_are_taken_seed_by_seed() -> None:
    """Seeds differ by much, arms by 0.25 on each: the difference is sure, though neither mean is."""
    curves = {
        "a": [curve(0.0, 0.0, 0.0), curve(0.5, 0.5, 0.5)],
        "b": [curve(0.25, 0.25, 0.25), curve(0.75, 0.75, 0.75)],
    }
    found = gap.summary(curves)
    assert found["a"]["final"][0] == 0.25 and found["a"]["final"][1] > 2
    assert found["b less a"]["final"] == found["b less a"]["area"] == (0.25, 0.0)


def test_the_command_writes_what_it_prints(
    seen: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def compare(seeds: Any, train_batches: int, slots: int, say: Any) -> Any:
        asked.append((len(seeds), train_batches, slots))
        return {name: [run, run] for name, (run, _) in seen.items()}

    monkeypatch.setattr(gap, "compare", compare)
    monkeypatch.setattr(sys, "argv", ["learning_gap.py", "--out", str(tmp_path), "--quick"])
    assert gap.main() == 0
    assert asked == [(2, 4, 8)]
    numbers = json.loads((tmp_path / "learning_gap.json").read_text())
    assert [run["rewards"] for run in numbers["runs"]["mini-batch"]] == [seen["mini-batch"][0].rewards] * 2
    assert numbers["summary"]["mini-batch less train-batch"]["final"][1] == 0.0
    printed = capsys.readouterr().out
    for name in numbers["summary"]:
        assert f"\n{name} " in printed
    assert (tmp_path / "learning_gap.png").stat().st_size < 80 * 1024
