"""Does fresher data learn better? One tiny GRPO run, three ways of handing rollouts to the trainer, several seeds.

    colocated    a train batch is generated with the newest weights, then trained; nothing overlaps
    train-batch  generation runs ahead, by 2 train batches at most; training starts when a train batch is complete
    mini-batch   training starts when a mini-batch is complete; a RolloutPacer says what to launch, and when

All train the same number of groups of the same mixture in the same number of optimizer steps, and for one seed start
from the same weights, launch the same prompts in the order of their source, and these take the same time. What
differs is how old the groups are when they are trained.

Only time is simulated. Store, sampler, pacer and loader are knit_data's own, and responses are sampled from the model.
The store lies in memory, where time passes by a clock of its own: while the trainer waits for groups, and for
``STEP_SECONDS`` after each optimizer step, the rollout engines go on, and whatever ends is put at its moment. So a run
follows from its seed alone, on whatever machine. How long a response takes is drawn from a long-tailed law of its
source, not from its tokens: else what is trained early would also be what is short. A group is sampled from the
weights that were published when it was launched; weights do not change in flight.

What was fixed, and how: task, sizes, threshold and learning rate by runs of the colocated arm alone, on seeds that the
comparison does not use; of 1e-3, 2e-3 and 4e-3 the learning rate with the best final reward over two of them. The times
make trainer and rollout about equally fast. Nothing was changed after the first whole comparison. The loss is that of
``grpo_text.py``: its importance ratios, clipped, correct for a part of what staleness does, as they do in practice.
``--slots 32`` is as fast and more asynchronous: four times as many groups in flight, each taking four times as long.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
from grpo_run import grpo_loss, logprobs_of
from grpo_text import trajectory
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from sampling import Response, sample
from tiny_rl import LETTERS, LIMITS, PROMPT_WIDTH, Problem, build_model, decode, encode
from torch import nn

import knit_data as kd
from knit_data.store.memory import MemoryBackend

SOURCES = {"symbol": kd.Source(8, seconds=1.0, sigma=0.5), "copy": kd.Source(24, seconds=2.0, sigma=0.8)}
TRAIN_BATCH, MINI_BATCH, GROUP_SIZE = 32, 8, 8  # groups; groups of an optimizer step; trajectories of a group
STEPS = TRAIN_BATCH // MINI_BATCH  # of a train batch
TRAIN_BATCHES = 32
SLOTS = 8  # groups that are generated at the same time, where responses take as long as SOURCES say
STEP_SECONDS = 4.0
LOOK = 1.0  # simulated seconds between two looks of a training loader at what has come
LIMIT = 6  # tokens of a response; a right one has 4 at most
LEARNING_RATE = 2e-3
THRESHOLD = 0.4  # held-out reward
LAST = 5  # published versions that the final reward is the mean of: one has a sampling error of 0.03
EVALUATED = 8  # responses to each held-out prompt

# Two-sided 95 % quantiles of Student's t, by degrees of freedom from 1: torch and numpy have none.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
       2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093)  # fmt: skip

FIGURES = ("final", "area", "staleness", "seconds")  # of every run: see Curve.figures

_names = itertools.count()


@dataclass(frozen=True)
class Arm:
    """``ahead``: train batches that launching may run ahead of the newest weights; None: a RolloutPacer decides."""

    name: str
    color: str
    ahead: int | None


ARMS = (
    Arm("colocated", "#777777", 0),
    Arm("train-batch", "#d98032", 2),
    Arm("mini-batch", "#3b6fb6", None),
)


@dataclass
class Curve:
    """One run. ``rewards``: held-out, of the initial weights and of each published version; ``staleness``: of each
    optimizer step, mean over its groups in train batches; ``trained``: groups of each train batch by source;
    ``launched``: groups in all; ``seconds``: simulated."""

    rewards: list[float] = field(default_factory=list)
    staleness: list[float] = field(default_factory=list)
    trained: list[dict[str, int]] = field(default_factory=list)
    launched: int = 0
    seconds: float = 0.0

    def figures(self) -> dict[str, float]:
        """What the table shows: final reward, area under the curve as the mean of all later rewards, mean staleness,
        simulated seconds of a train batch; and ``steps`` until the threshold, where it was reached."""
        figures = {
            "final": mean(self.rewards[-LAST:]),
            "area": mean(self.rewards[1:]),
            "staleness": mean(self.staleness),
            "seconds": self.seconds / len(self.trained),
        }
        reached = [k * STEPS for k, reward in enumerate(self.rewards) if reward >= THRESHOLD]
        return figures | ({"steps": float(reached[0])} if reached else {})


# -- rollout, in simulated time --------------------------------------------------------------------------------------


@dataclass(order=True)
class Flight:
    """A group between its launch and its put."""

    end: float
    number: int
    launch: kd.Launch = field(compare=False)
    problem: Problem = field(compare=False)
    version: int = field(compare=False)
    responses: list[Response] = field(compare=False, default_factory=list)


class Rollouts:
    """The rollout engines, and the clock of their store: they work while it passes.

    Flights that start under the same weights are sampled together, when the first of them ends or the weights change:
    fewer calls of the model, the same distribution.
    """

    def __init__(self, arm: Arm, seed: int, slots: int) -> None:
        name = f"learning-gap/{next(_names)}"
        self._now, self._running = 0.0, list[Flight]()
        self._fresh: list[Flight] = []  # launched and not yet sampled
        MemoryBackend.named(name, clock=self)
        self.store = kd.TrajectoryStore(f"memory://{name}", reclaim="never")
        self._writer = self.store.writer("rollout")
        self._model = build_model(seed, layers=1).eval()
        self._prompts = {source: random.Random(f"{seed}/{source}") for source in SOURCES}
        self._lengths = {source: np.random.default_rng([seed, i]) for i, source in enumerate(SOURCES)}
        self._pacer = kd.RolloutPacer(self.store, capacity=slots) if arm.ahead is None else None
        self._slots, self._ahead, self.launched = slots, arm.ahead or 0, Counter[str]()

    def now(self) -> float:
        return self._now

    def wait(self, condition: threading.Condition, timeout: float) -> None:
        """Called by the store when the trainer waits for it. The lock is this thread's own, which puts may take again:
        nobody else is there."""
        del condition
        self.work_until(self._now + timeout)

    def work_until(self, then: float) -> None:
        self._launch()
        while self._running and self._running[0].end <= then:
            flight = heapq.heappop(self._running)
            self._now = flight.end
            self._put(flight)
            self._launch()
        self._now = then

    def publish(self, weights: dict[str, torch.Tensor], version: int) -> None:
        self._sample()
        self._model.load_state_dict(weights)
        self.store.publish(version)

    def _launch(self) -> None:
        while len(self._running) < self._slots and (launch := self._next()) is not None:
            source, number = launch.attributes["source"], self.launched.total()
            problem = draw_unseen(source, self._prompts[source])
            took = max(SOURCES[source].draw(self._lengths[source], GROUP_SIZE))  # a group waits for its slowest
            end = self._now + took * self._slots / SLOTS
            flight = Flight(end, number, launch, problem, self.store.policy_version())
            heapq.heappush(self._running, flight)
            self._fresh.append(flight)
            self.launched[source] += 1

    def _next(self) -> kd.Launch | None:
        if self._pacer is not None:
            try:
                return self._pacer.next(timeout=0.0)
            except kd.WaitTimeout:  # it holds back
                return None
        launched = self.launched.total()
        if launched >= (self.store.policy_version() // STEPS + self._ahead + 1) * TRAIN_BATCH:
            return None
        source = min(SOURCES, key=lambda name: (self.launched[name] + 0.5) / SOURCES[name].groups)  # the mix's order
        return kd.Launch({"source": source}, f"group-{launched}")

    def _sample(self) -> None:
        problems = [flight.problem for flight in self._fresh]
        for i, responses in respond(self._model, problems, GROUP_SIZE) if problems else ():
            self._fresh[i].responses = responses
        self._fresh.clear()

    def _put(self, flight: Flight) -> None:
        if not flight.responses:
            self._sample()
        group, problem = flight.launch.group, flight.problem
        self._writer.put_group(
            [
                trajectory(f"{group}/{i}", group, flight.version, problem, response)
                for i, response in enumerate(flight.responses)
            ]
        )
        if self._pacer is not None:
            self._pacer.done(flight.launch)


def _copies() -> list[Problem]:
    answers = ["".join(letters) for letters in itertools.product(LETTERS, repeat=3)]
    return [Problem("copy", f">{answer}=".rjust(PROMPT_WIDTH), answer) for answer in answers]


HELD_OUT = random.Random(0).sample(_copies(), 16)  # a quarter of all copies; none of them is trained


def draw_unseen(source: str, rng: random.Random) -> Problem:
    while (problem := Problem.draw(source, rng)) in HELD_OUT:
        pass
    return problem


# -- training ---------------------------------------------------------------------------------------------------------


def train(arm: Arm, seed: int, train_batches: int, slots: int = SLOTS) -> Curve:
    """One run of an arm."""
    model = build_model(seed, layers=1)
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    rollouts = Rollouts(arm, seed, slots)
    sampler = kd.QuotaSampler(
        kd.TrajectoryStream(rollouts.store),
        train_batch_size=TRAIN_BATCH,
        mini_batch_size=MINI_BATCH,
        group_size=GROUP_SIZE,
        quotas={"source": {name: source.groups for name, source in SOURCES.items()}},
        groups=kd.GroupPolicy(annotate=kd.group_advantages),
    )
    # Padded: these responses have nearly one length, and the model attends to each alone.
    loader = kd.TrajectoryLoader(sampler, 1024, device="cpu", layout="padded", prefetch=0)
    curve = Curve([evaluate(model)])
    with loader:
        for k in range(train_batches):
            minis = list(itertools.islice(loader, STEPS))  # not admitted yet: each is when it is first touched
            if arm.ahead is not None:
                for mini in minis:
                    _ = mini.loss_tokens  # the whole train batch is admitted before its first step
            trained: Counter[str] = Counter()
            for mini in minis:
                curve.staleness.append(mini.stats["staleness/mean"])
                trained += train_step(model, optimizer, mini)
                take_time(rollouts, sampler)
            curve.trained.append({name: n // GROUP_SIZE for name, n in sorted(trained.items())})
            rollouts.publish(model.state_dict(), (k + 1) * STEPS)
            curve.rewards.append(evaluate(model))
    curve.launched, curve.seconds = rollouts.launched.total(), rollouts.now()
    return curve


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, mini: kd.MiniBatch) -> Counter[str]:
    """One optimizer step; what it trained, trajectories by source."""
    trained: Counter[str] = Counter()
    for micro in mini:
        logits = model(**micro.model_inputs()).logits
        loss = grpo_loss(
            logprobs_of(logits, micro["labels"]),
            micro.targets("logprobs"),
            micro.to_tokens("advantage"),
            micro.targets("loss_mask"),
        )
        (loss.sum() / mini.loss_tokens).backward()
        trained.update(info.attributes["source"] for info in micro.infos)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return trained


def take_time(rollouts: Rollouts, sampler: kd.QuotaSampler) -> None:
    """What the step took. Meanwhile a loader's thread reads what has come; this one has none, so it is asked to."""
    for _ in range(int(STEP_SECONDS / LOOK)):
        rollouts.work_until(rollouts.now() + LOOK)
        sampler.tend()


def respond(model: nn.Module, problems: Sequence[Problem], size: int) -> Iterator[tuple[int, list[Response]]]:
    prompts = {"input_ids": torch.tensor([encode(problem.prompt) for problem in problems])}
    limits = [min(LIMIT, LIMITS[problem.source]) for problem in problems]
    return sample(model, prompts, torch.full((len(problems),), PROMPT_WIDTH), limits, size)


def evaluate(model: nn.Module) -> float:
    """Mean reward on the held-out prompts at temperature 1; the same random numbers every time, none of the run's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        groups = respond(model, HELD_OUT, EVALUATED)
        return mean(HELD_OUT[i].reward(decode(response.ids)) for i, group in groups for response in group)


# -- what it came to --------------------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean of two values or more, and half the width of its 95 % confidence interval by Student's t.

    [1, 2, 3]: standard deviation 1, so 2 ± 4.303 / sqrt(3), that is 2 ± 2.484.
    """
    return mean(values), T95[len(values) - 2] * stdev(values) / len(values) ** 0.5


def summary(curves: dict[str, list[Curve]]) -> dict[str, dict[str, tuple[float, float]]]:
    """The ``interval`` of every figure: of each arm, and of the differences between two arms on the same seeds."""
    found = {arm: [curve.figures() for curve in runs] for arm, runs in curves.items()}
    out = {arm: {name: interval([run[name] for run in runs]) for name in FIGURES} for arm, runs in found.items()}
    for a, b in itertools.combinations(found, 2):
        pairs = list(zip(found[a], found[b], strict=True))
        out[f"{b} less {a}"] = {name: interval([y[name] - x[name] for x, y in pairs]) for name in FIGURES}
    return out


def table(curves: dict[str, list[Curve]]) -> str:
    head = ["", "final reward", "area", "staleness", "s a train batch", f"steps to {THRESHOLD:g}"]
    rows = [head]
    for name, figures in summary(curves).items():
        if name not in curves and rows[-1][0] in curves:
            rows.append(["on the same seeds:"])
        digits = zip(figures.values(), (3, 3, 2, 1), strict=True)
        rows.append([name, *(f"{middle:.{n}f} ± {half:.{n}f}" for (middle, half), n in digits)])
        reached = [run["steps"] for run in map(Curve.figures, curves.get(name, ())) if "steps" in run]
        if name in curves:
            rows[-1].append(f"{mean(reached):.0f} ({len(reached)} of {len(curves[name])} runs)" if reached else "never")
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=False)).rstrip() for row in rows)


def plot(curves: dict[str, list[Curve]], path: Path) -> None:
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    colors = {arm.name: arm.color for arm in ARMS}
    for arm, runs in curves.items():
        bands = [interval(rewards) for rewards in zip(*(run.rewards for run in runs), strict=True)]
        steps = [k * STEPS for k in range(len(bands))]
        above.plot(steps, [m for m, _ in bands], color=colors[arm], label=arm)
        low, high = [m - h for m, h in bands], [m + h for m, h in bands]
        above.fill_between(steps, low, high, color=colors[arm], alpha=0.15, linewidth=0)
        stale = [mean(values) for values in zip(*(run.staleness for run in runs), strict=True)]
        below.plot(stale, color=colors[arm], linewidth=0.8)
    above.set(ylabel=f"held-out reward, {len(runs)} seeds", ylim=(0, 1))
    above.legend(loc="lower right")
    below.set(xlabel="optimizer steps", ylabel="staleness,\ntrain batches")
    figure.savefig(path, dpi=80)


def compare(
    seeds: Sequence[int], train_batches: int, slots: int, say: Callable[[str], object]
) -> dict[str, list[Curve]]:
    """All arms on all seeds, seed by seed."""
    curves: dict[str, list[Curve]] = {arm.name: [] for arm in ARMS}
    for seed, arm in itertools.product(seeds, ARMS):
        curves[arm.name].append(train(arm, seed, train_batches, slots))
        said = curves[arm.name][-1].figures()
        say(f"seed {seed}, {arm.name}: final reward {said['final']:.3f}, staleness {said['staleness']:.2f}")
    return curves


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/gap"))
    parser.add_argument("--seeds", type=int, default=5, choices=range(2, len(T95) + 2), metavar=f"2..{len(T95) + 1}")
    parser.add_argument("--slots", type=int, default=SLOTS, help="groups in flight, which take longer in proportion")
    parser.add_argument("--quick", action="store_true", help="two seeds, four train batches: too few to conclude from")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds, train_batches = (2, 4) if arguments.quick else (arguments.seeds, TRAIN_BATCHES)
    began = time.time()
    curves = compare(range(seeds), train_batches, arguments.slots, print)
    arguments.out.mkdir(parents=True, exist_ok=True)
    plot(curves, arguments.out / "learning_gap.png")
    runs = {arm: [asdict(run) | run.figures() for run in runs] for arm, runs in curves.items()}
    numbers = {"slots": arguments.slots, "summary": summary(curves), "runs": runs}
    (arguments.out / "learning_gap.json").write_text(json.dumps(numbers, indent=1))
    print(table(curves))
    print(f"{time.time() - began:.0f} s; {arguments.out / 'learning_gap.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
