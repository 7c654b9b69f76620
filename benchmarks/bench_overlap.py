"""Whether the loader hides behind computation: the consumer's waits, what the loader's thread costs a step, and how
long it keeps others from the interpreter lock.

    python benchmarks/bench_overlap.py [--quick] [--json FILE]

A store in files, in the page cache; ``prefetch=2``. A step computes for a multiple of the time that one micro-batch
takes to prepare: "2:1" is preparation to computation. It computes with torch on one core, or in a loop of Python, which
never lets go of the lock unasked; or it sleeps, as a host does while a GPU computes. The peer has the same
micro-batches in memory. Samples are whole runs, in turn; a run's first mini-batch is not counted.

    exposed     share of the time that the consumer waited for its next micro-batch; "inside mini-batches" leaves out
                each first one, whose mini-batch is admitted as late as possible
    slowdown    how much longer than the peer's the whole took
    late        by how much a thread that sleeps for 1 ms at a time woke too late
    resident    memory of this process, growing or not, over many mini-batches
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from report import Report

import knit_data as kd

GROUP, TOKENS, IMAGE_BYTES = 8, 2048, 1 << 20
GROUPS_OF_A_MICRO, MICROS_OF_A_MINI = 8, 4
RATIOS = {"2:1": 0.5, "1:1": 1.0, "1:2": 2.0, "1:4": 4.0}  # computation by preparation


def filled(folder: str, groups: int, tokens: int = TOKENS, image: int = IMAGE_BYTES) -> str:
    """Groups of 8 with three columns beside the ids, and an image that all members show."""
    url, rng = os.path.join(folder, f"store-{groups}-{tokens}"), np.random.default_rng(0)
    store = kd.TrajectoryStore(url)
    with store.writer("rollout-0") as writer:
        for g in range(groups):
            media = kd.Media({"pixels": torch.from_numpy(rng.standard_normal(image // 4, np.float32))}, 4)
            members = []
            for i in range(GROUP):
                ids = torch.from_numpy(rng.integers(10, 1000, tokens))
                ids[1:5] = 1
                columns = {name: torch.rand(tokens) for name in ("logprobs", "reference", "advantages")}
                refs = [kd.MediaRef(media, [(1, 4)])]
                members.append(
                    kd.Trajectory(f"{g}/{i}", str(g), 0, {"input_ids": ids, **columns}, {"reward": 1.0}, refs)
                )
            writer.put_group(members)
    store.seal()
    store.close()
    return url


def loader_over(
    url: str, prefetch: int = 2, tokens: int = TOKENS, batch: int = GROUPS_OF_A_MICRO * MICROS_OF_A_MINI
) -> kd.TrajectoryLoader:
    sampler = kd.QuotaSampler(kd.TrajectoryStream(kd.TrajectoryStore(url)), batch, batch, GROUP)
    cap = GROUPS_OF_A_MICRO * GROUP * tokens
    return kd.TrajectoryLoader(sampler, cap, device="cpu", prefetch=prefetch)


@dataclass
class Steps:
    """Seconds of each step, and those of its wait for the micro-batch. The first mini-batch is not counted."""

    waits: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(self.whole[MICROS_OF_A_MINI:])

    def exposed(self, first: bool) -> float:
        """Share of the time: of all waits, or without those for the first of a mini-batch, which is admitted then."""
        waits = self.waits[MICROS_OF_A_MINI:]
        return sum(wait for j, wait in enumerate(waits) if first or j % MICROS_OF_A_MINI) / self.seconds


def run(micros: Iterable[kd.MicroBatch], compute: Callable[[], None]) -> Steps:
    steps, iterator = Steps(), iter(micros)
    began = time.perf_counter()
    while (micro := next(iterator, None)) is not None:
        came = time.perf_counter()
        compute()
        del micro
        ended = time.perf_counter()
        steps.waits.append(came - began)
        steps.whole.append(ended - began)
        began = ended
    return steps


def micros_of(loader: kd.TrajectoryLoader) -> Iterator[kd.MicroBatch]:
    for mini in loader:
        yield from mini


def computations() -> dict[str, Callable[[float], Callable[[], None]]]:
    """For each kind: a computation that takes about so many seconds when nothing else runs."""
    a, out = torch.rand(192, 192), torch.empty(192, 192)

    def matmul() -> None:
        torch.mm(a, a, out=out)

    def python() -> None:
        for _ in range(2_000):
            pass

    def repeated(once: Callable[[], None]) -> Callable[[float], Callable[[], None]]:
        samples = []
        for _ in range(400):
            began = time.perf_counter()
            once()
            samples.append(time.perf_counter() - began)
        each = float(np.median(samples))

        def of(seconds: float) -> Callable[[], None]:
            count = max(1, round(seconds / each))

            def compute() -> None:
                for _ in range(count):
                    once()

            return compute

        return of

    return {
        "torch on one core": repeated(matmul),
        "sleep": lambda seconds: lambda: time.sleep(seconds),
        "Python": repeated(python),
    }


@contextmanager
def lateness(samples: list[float]) -> Iterator[None]:
    """Milliseconds by which sleeps of 1 ms, in a thread of their own, were too long."""
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            began = time.perf_counter()
            time.sleep(0.001)
            samples.append(1e3 * (time.perf_counter() - began) - 1.0)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def resident() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def overlap(report: Report, url: str, repeats: int) -> None:
    with loader_over(url, prefetch=0) as loader:
        alone = run(micros_of(loader), lambda: None)
    with loader_over(url) as loader:
        loaded = list(micros_of(loader))
    preparation = float(np.mean(alone.waits[MICROS_OF_A_MINI:]))  # admission of its mini-batch included
    case = f"{loaded[0]['input_ids'].numel()} tokens and {GROUPS_OF_A_MICRO} images a micro-batch"
    samples = [1e3 * wait for wait in alone.waits[MICROS_OF_A_MINI:]]
    report.add(case=case, provider="knit_data", metric="preparation", unit="ms", samples=samples)
    shares: dict[tuple[str, str, str], list[float]] = {}
    late: dict[tuple[str, str], list[float]] = {}
    kinds = computations()
    for _ in range(repeats):
        for kind, of in kinds.items():
            for ratio, times in RATIOS.items():
                compute = of(times * preparation)
                with lateness(late.setdefault((kind, "in memory"), [])):
                    peer = run(loaded, compute)
                with loader_over(url) as loader, lateness(late.setdefault((kind, "knit_data"), [])):
                    ours = run(micros_of(loader), compute)
                for metric, share in (
                    ("exposed", ours.exposed(True)),
                    ("exposed inside mini-batches", ours.exposed(False)),
                    ("slowdown", ours.seconds / peer.seconds - 1),
                ):
                    shares.setdefault((kind, ratio, metric), []).append(100 * share)
    for (kind, ratio, metric), samples in shares.items():
        case = f"{kind}, preparation to computation {ratio}"
        report.add(case=case, provider="knit_data", metric=metric, unit="%", samples=samples)
    for (kind, provider), samples in late.items():
        for metric, percent in (("late p50", 50), ("late p99", 99), ("late max", 100)):
            value = [float(np.percentile(samples, percent))]
            report.add(case=kind, provider=provider, metric=metric, unit="ms", samples=value)


def memory(report: Report, folder: str, mini_batches: int) -> None:
    """Many small mini-batches; resident memory in each quarter of the run."""
    url, found = filled(folder, mini_batches, 32, 4096), list[float]()
    with loader_over(url, tokens=32, batch=1) as loader:
        for mini in loader:
            for _ in mini:
                pass
            found.append(resident())
    for quarter, samples in enumerate(np.array_split(found, 4)):
        case = f"{mini_batches} mini-batches, quarter {quarter + 1}"
        report.add(case=case, provider="knit_data", metric="resident", unit="MB", samples=samples.tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one repeat, and fewer mini-batches")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the loader's thread has the other core
    report = Report("overlap", arguments.json, ("numpy", "torch"))
    with tempfile.TemporaryDirectory() as folder:
        overlap(report, filled(folder, 128 if arguments.quick else 384), 1 if arguments.quick else 10)
        memory(report, folder, 200 if arguments.quick else 2000)


if __name__ == "__main__":
    main()
