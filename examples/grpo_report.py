"""The end of a GRPO example: what its logs and its store say, as a table, a figure and a list of broken promises."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import knit_data as kd
from knit_data.admission import Admission, Sizes

PALETTE = ("#4c9f70", "#3b6fb6", "#d98032")
CONSISTENT = 1e-4  # nats; what rollout and training compute of the same tokens differs by float32 rounding
LEARNS = 4  # train batches, after which a reward that did not rise is a failure
Bound = int | tuple[int, int]


@dataclass(frozen=True)
class Plan:
    """What a run asks for: groups of each source in each train batch, exactly or from … to, and how old they may be."""

    group_size: int  # trajectories
    train_batch: int  # groups
    mini_batch: int  # groups an optimizer step
    quotas: Mapping[str, Bound]
    max_staleness: int  # train batches

    @property
    def steps(self) -> int:
        """Optimizer steps of a train batch."""
        return self.train_batch // self.mini_batch


@dataclass(frozen=True)
class Trained:
    """One group, as the ranks trained it."""

    source: str
    train_batch: int
    index: int
    version: int
    members: int
    reward: float


@dataclass(frozen=True, eq=False)
class Replayed:
    """A group as admission sees it."""

    key: int  # by its completion
    combination: tuple[str, ...]
    version: int

    @property
    def order(self) -> tuple[int, int]:
        return self.version, self.key


@dataclass(frozen=True)
class Report:
    plan: Plan
    put: dict[str, dict[str, Any]]  # group -> the worker's event
    stored: dict[str, int]  # group -> members, as a reader of the store finds them
    trained: dict[str, list[Trained]]  # group -> once for every optimizer step that trained it
    minis: list[dict[str, Any]]  # rank 0's events, one an optimizer step
    apart: float  # largest difference of log-probabilities between training and rollout before the first update
    publishes: list[dict[str, Any]]
    stats: list[dict[str, float]]  # loader.stats of each rank
    bytes_stored: int

    @classmethod
    def of(cls, out: Path, plan: Plan) -> Report:
        ranks = [list(events(path)) for path in sorted((out / "events").glob("rank-*.jsonl"))]
        put = {e["group"]: e for path in sorted((out / "events").glob("rollout-*.jsonl")) for e in events(path)}
        members: dict[tuple[str, int], list[Any]] = {}
        where: dict[int, int] = {}
        for event in (e for rank in ranks for e in rank if e["kind"] == "step"):
            where[event["index"]] = event["train_batch"]
            for row in event["trained"]:
                members.setdefault((row[1], event["index"]), []).append(row)
        trained: dict[str, list[Trained]] = {}
        for (group, index), rows in members.items():
            names, version, reward = (
                {row[0] for row in rows},
                min(row[3] for row in rows),
                mean([row[4] for row in rows]),
            )
            count = len(names) if len(names) == len(rows) else -len(rows)  # negative: a member came twice
            once = Trained(rows[0][2], where[index], index, version, count, reward)
            trained.setdefault(group, []).append(once)
        store = kd.TrajectoryStore(out / "store", reclaim="never")
        return cls(
            plan=plan,
            put=put,
            stored=dict(Counter(info.group for info in kd.TrajectoryStream(store, follow=False, consumer="report"))),
            trained=trained,
            minis=[e for e in ranks[0] if e["kind"] == "step"],
            apart=max(e["apart"] for rank in ranks for e in rank if e["kind"] == "step" and e["index"] == 0),
            publishes=[e for e in ranks[0] if e["kind"] == "publish"],
            stats=[e["stats"] for rank in ranks for e in rank if e["kind"] == "loader"],
            bytes_stored=sum(path.stat().st_size for path in (out / "store" / "segments").rglob("*.safetensors")),
        )

    # -- the numbers ----------------------------------------------------------------------------------------------

    def of_batch(self, k: int) -> list[Trained]:
        return [t for times in self.trained.values() for t in times if t.train_batch == k]

    def excess(self, group: Trained) -> int:
        """Architectural staleness in optimizer steps: the version at the start of the train batch less the group's."""
        return max(0, group.train_batch * self.plan.steps - group.version)

    def dropped(self) -> dict[str, int]:
        """Groups that the sampler let go, by the name it gave the reason."""
        return {k.removeprefix("dropped/"): int(n) for k, n in self.stats[0].items() if k.startswith("dropped/") and n}

    def left_over(self) -> int:
        return int(self.stats[0]["left_over"])

    def waited(self, k: int) -> float:
        return float(sum(e["admitted"] - e["asked"] for e in self.minis if e["train_batch"] == k))

    def count(self) -> int:
        return 1 + max(int(e["train_batch"]) for e in self.minis)

    def reward(self, k: int, source: str | None = None) -> float:
        """Mean of train batch k, of one source or of all."""
        return mean([t.reward for t in self.of_batch(k) if source in (None, t.source)])

    def total(self, name: str) -> float:
        """Over all mini-batches, of what ``mini.stats`` counts over all ranks."""
        return float(sum(e["media"][name] for e in self.minis if "media" in e))

    def unseen(self) -> int:
        """Stored groups that the sampler never saw: they came after its last look."""
        return len(self.stored) - len(self.trained) - sum(self.dropped().values()) - self.left_over()

    # -- the promises ---------------------------------------------------------------------------------------------

    def problems(self, train_batches: int) -> list[str]:
        """What the run broke of: exact quotas, every group at most once, no group lost without a name."""
        out = []
        for k in range(train_batches):
            groups = self.of_batch(k)
            found = Counter(group.source for group in groups)
            if len(groups) != self.plan.train_batch:
                out.append(f"train batch {k} has {len(groups)} groups, not {self.plan.train_batch}")
            for source, bound in self.plan.quotas.items():
                low, high = (bound, bound) if isinstance(bound, int) else bound
                if not low <= found[source] <= high:
                    out.append(f"train batch {k} has {found[source]} groups of {source}, its quota is {show(bound)}")
            old = sum(self.excess(group) > self.plan.max_staleness * self.plan.steps for group in groups)
            if old:
                out.append(f"train batch {k} has {old} groups older than {self.plan.max_staleness} train batches")
        for group, times in self.trained.items():
            if len(times) > 1:
                out.append(f"group {group} was trained at the steps {sorted(t.index for t in times)}")
            if times[0].members != self.plan.group_size:
                out.append(
                    f"group {group} was trained with {abs(times[0].members)} members, not {self.plan.group_size}"
                )
            if group not in self.stored:
                out.append(f"group {group} was trained, but the store does not have it")
        if self.apart > CONSISTENT:
            out.append(f"training and rollout differ by {self.apart:.1e} in log-probabilities of the same weights")
        if train_batches >= LEARNS and self.reward(train_batches - 1) <= self.reward(0):
            out.append(f"the reward went from {self.reward(0):.3f} to {self.reward(train_batches - 1):.3f}")
        if self.total("naive_encodes") and self.total("encodes") >= self.total("naive_encodes"):
            out.append(f"{self.total('encodes'):.0f} encodes, as many as one for each trajectory")
        lost = sorted(set(self.put) - set(self.stored))
        if lost:
            out.append(f"{len(lost)} groups were put, but the store does not have them: {lost[:5]}")
        # Only what came after the last admission, which follows the last but one, may have been overlooked.
        last = sorted(e["admitted"] for e in self.minis)[-2:][0]
        late = sum(group not in self.put or self.put[group]["end"] >= last for group in self.stored)
        if not 0 <= self.unseen() <= late:
            out.append(
                f"{len(self.stored)} groups are stored, {len(self.trained)} were trained, {self.dropped()} dropped and "
                f"{self.left_over()} left over: {self.unseen()} have no name, and {late} came after the last admission"
            )
        return out

    # -- beside train-batch admission -------------------------------------------------------------------------------

    def replay(self) -> list[list[float]]:
        """Staleness of each train batch's groups, had training waited for whole train batches: the same rollouts at
        their recorded times, the measured times of steps and publishes, versions as they would have been published.
        They were launched for our trainer, late; a launcher of its own would have made it older."""
        sizes = Sizes(self.plan.train_batch, self.plan.train_batch)
        admission: Admission[Replayed] = Admission(sizes, kd.Quotas({"source": self.plan.quotas}), None)
        coming = sorted(self.put.items(), key=lambda item: item[1]["end"], reverse=True)
        took = [e["ended"] - e["admitted"] for e in self.minis]
        publishing = [
            p["time"] - e["ended"]
            for p, e in zip(self.publishes, self.minis[self.plan.steps - 1 :: self.plan.steps], strict=False)
        ]
        now, publishes, out = 0.0, list[float](), list[list[float]]()
        while True:
            while (chosen := admission.choose()) is None or (coming and coming[-1][1]["end"] <= now):
                if not coming:
                    return out
                _, event = coming.pop()
                now = max(now, event["end"])
                version = sum(t <= event["start"] for t in publishes)
                admission.offer(Replayed(-len(coming), (event["source"],), version))
            admission.commit(chosen)
            batch = len(out)
            out.append([float(batch - group.version) for group in chosen])
            now += (
                sum(took[batch * self.plan.steps : (batch + 1) * self.plan.steps]) + publishing[batch % len(publishing)]
            )
            publishes.append(now)

    # -- to look at -----------------------------------------------------------------------------------------------

    def table(self) -> str:
        sources = list(self.plan.quotas)
        head = ["train batch", *(f"{s} ({show(self.plan.quotas[s])})" for s in sources)]
        head += ["stale: batches", "p99", "steps", "p99", "waited s", "reward"]
        batches = [(str(k), self.of_batch(k), self.waited(k)) for k in range(self.count())]
        everything = [t for times in self.trained.values() for t in times]
        batches.append(("all", everything, sum(waited for *_, waited in batches)))
        rows = [head]
        for name, groups, waited in batches:
            found = [str(sum(group.source == source for group in groups)) for source in sources]
            reward = mean([group.reward for group in groups])
            rows.append([name, *found, *self._staleness(groups), f"{waited:.1f}", f"{reward:.3f}"])
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        lines.insert(1, "-" * len(lines[0]))
        lines.insert(-1, lines[1])
        names = {**self.dropped(), "left over": self.left_over(), "after the last look": self.unseen()}
        fates = ", ".join(f"{n} {name}" for name, n in names.items() if n)
        replayed = self.replay()
        same = [self.excess(group) / self.plan.steps for group in everything if group.train_batch < len(replayed)]
        old, new = mean([a for batch in replayed for a in batch]), mean(same)
        lines += [
            f"train-batch admission of the same rollouts at the same times, replayed: {old:.2f} train batches stale "
            f"over its {len(replayed)} train batches; here {new:.2f} over the same"
            + (f", {1 - new / old:.0%} less" if old else ""),
            f"groups: {len(self.stored)} stored = {len(self.trained)} trained" + (f" + {fates}" if fates else ""),
            "reward, first and last train batch: "
            + ", ".join(f"{s} {self.reward(0, s):.2f} -> {self.reward(self.count() - 1, s):.2f}" for s in sources),
            f"log-probabilities of training against rollout before the first update: {self.apart:.1e} apart at most",
            *self._media(),
            f"bytes: {self._stored()}; {int(sum(s['bytes_read'] for s in self.stats)):,} read by all ranks",
            f"ranks waited {' and '.join(format(s['wait_s'], '.1f') for s in self.stats)} s in the loader",
        ]
        return "\n".join(lines)

    def _media(self) -> list[str]:
        """What encoding each image once saved; nothing to say without images."""
        encodes, naive, distinct = (self.total(name) for name in ("encodes", "naive_encodes", "distinct_media"))
        if not naive:
            return []
        return [
            f"images: {encodes:.0f} encodes against {naive:.0f} naive ones, {naive / encodes:.1f} times as many; "
            f"{encodes / distinct:.2f} ranks per image"
        ]

    def _stored(self) -> str:
        """What lies on disk, and against what it would be if each trajectory had the pixels that its model takes."""
        logical = sum(e.get("logical_bytes", 0) for e in self.put.values())
        ratio = f" for {logical:,} of columns and float32 pixels ({logical / self.bytes_stored:.0f} times as many)"
        return f"{self.bytes_stored:,} stored" + (ratio if logical else "")

    def _staleness(self, groups: list[Trained]) -> list[str]:
        values = sorted(self.excess(group) for group in groups)
        middle, p99 = mean(values), values[math.ceil(0.99 * len(values)) - 1] if values else 0
        return [f"{middle / self.plan.steps:.2f}", f"{p99 / self.plan.steps:.2f}", f"{middle:.1f}", str(p99)]

    def timeline(self, path: Path) -> None:
        """Rollouts of each worker, admissions, optimizer steps and weight publishes on one axis of time; the reward."""
        start = min(e["start"] for e in self.put.values())
        figure, (top, bottom) = plt.subplots(
            2, 1, figsize=(15, 8), sharex=True, height_ratios=(4, 1), layout="constrained"
        )
        workers = sorted({group.split("-")[0] for group in self.put})
        slots = 1 + max(e["slot"] for e in self.put.values())
        lanes, at = [], 0.0
        for worker in workers:
            for source, color in zip(self.plan.quotas, PALETTE, strict=True):
                mine = [e for g, e in self.put.items() if g.split("-")[0] == worker and e["source"] == source]
                for slot in range(slots):
                    bars = [(e["start"] - start, e["end"] - e["start"]) for e in mine if e["slot"] == slot]
                    label = source if worker == workers[0] and slot == 0 else None
                    top.broken_barh(bars, (at + slot / slots * 4, 3.2 / slots), color=color, label=label)
            lanes.append((at + 2, f"rollout-{worker}"))
            at += 5
        for e in self.minis:
            shade = "#555577" if e["train_batch"] % 2 else "#9999bb"
            top.plot([e["admitted"] - start] * 2, [at, at + 0.8], color=shade, linewidth=1)
            top.broken_barh([(e["admitted"] - start, e["ended"] - e["admitted"])], (at + 1.5, 0.8), color=shade)
            if e["admitted"] - e["asked"] > 0.05:
                top.broken_barh([(e["asked"] - start, e["admitted"] - e["asked"])], (at + 1.5, 0.8), color="#f2c6c6")
        lanes += [(at + 0.4, "admissions"), (at + 1.9, "mini-batches\n(waits in red)"), (at + 3.4, "publishes")]
        for e in self.publishes:
            top.axvline(e["time"] - start, color="black", linewidth=0.5, alpha=0.4)
            top.text(e["time"] - start, at + 3.4, f"v{e['version']}", ha="right", va="center", fontsize=8)
        top.set_yticks([y for y, _ in lanes], [name for _, name in lanes])
        top.set_ylim(at + 4.2, -0.5)
        figure.legend(*top.get_legend_handles_labels(), loc="outside upper center", ncols=3,
                      title="rollouts: a group takes until its longest response ends")  # fmt: skip
        ends = [max(e["ended"] for e in self.minis if e["train_batch"] == k) - start for k in range(self.count())]
        for source, color in zip(self.plan.quotas, PALETTE, strict=True):
            rewards = [self.reward(k, source) for k in range(self.count())]
            bottom.plot(ends, rewards, "o-", color=color, label=source)
        rewards = [self.reward(k) for k in range(self.count())]
        bottom.plot(ends, rewards, "o-", color="black", linewidth=2, label="all")
        bottom.set(xlabel="seconds", ylabel="mean reward", ylim=(0, 1))
        bottom.legend(loc="upper left", ncols=4)
        figure.savefig(path, dpi=110)
        plt.close(figure)


def events(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        yield json.loads(line)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def show(bound: Bound) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound[0]}-{bound[1]}"
