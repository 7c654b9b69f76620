"""From a rollout's put to the tensors of a micro-batch: beside TransferQueue, a single controller, torch's DataLoader.

    python benchmarks/bench_transfer.py [--peers transferqueue,driver,dataloader] [--json FILE] [--quick] [--soak N]

The same groups for all (``transfer_data``), the loaders as their projects mean them to be used (``transfer_peers``);
what is not installed is left out, with a notice. ``make bench-peers`` installs all of it in an environment of its own.

A round runs every loader once over the same data, one after the other: putting all groups, then reading all of them in
each way. Figures are medians over rounds, with the 20th and 80th percentile of the rounds where they say ``±``; ratios
are taken within a round. What is delivered is compared with what was put, after the clock.

* ``put``: a group, with building what the loader takes (``build`` is that alone).
* ``get``: from asking for the next micro-batch until one byte of every page of its tensors was looked at, by a consumer
  in another process that reads nothing ahead. Eight responses a micro-batch; ``8:8`` is a batch of one group, ``64:8``
  of eight in micro-batches of about eight responses. What a loader does for a whole batch is part of its first
  micro-batch: so ``mean`` is what compares 64:8, where some hand seven of eight out of what they hold.
* ``ahead``: the same while the loader reads ahead, where it can, and the consumer is busy (sleeps) for ``THINK`` after
  each micro-batch; what it waits for then.
* ``cold``: ``get`` with 8:8 after the files left the page cache (posix_fadvise; a file system may keep them).
* ``MB/s``: bytes over the time of all gets; an image counts once (unique) or for each response (logical).
* ``first batch``: its service and a client of it, then the loader, then the first micro-batch; no imports.
* ``memory``: growth at its peak while groups are put and read once with 8:8, of all processes together (PSS, no page
  cache) and of the driver; in a round that is not timed.
* ``stored``: bytes that hold the groups, files or memory of storage processes, over unique bytes.

``reads``: images of 10 MB each, warm, 64:8, the mini-batch admitted before the clock starts; checksums are verified.
Beside it, in the same rounds, torch's copy of these bytes from memory into one buffer and ``preadv`` of them from the
same files, into fresh memory and into a buffer that is there; the pages are looked at everywhere.

``soak``: a writer and a reader at once, for so many seconds, the written bytes far more than memory can keep: a store
that reclaims what was consumed stays small; one that does not ends the soak at ``DISK`` bytes.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from report import Report, quantiles
from transfer_data import MB, Group, Reading, Usage, Workload, forget, groups_of, look, size_of, totals_of
from transfer_peers import PEERS, Ask, Knit, cap_of, missing, read_ours, stop_ray, trajectories

import knit_data as kd

DISK = 10_000_000_000  # bytes
PACKAGES = ("torch", "numpy", "safetensors", "TransferQueue", "ray", "tensordict")


@dataclass(frozen=True)
class Size:
    text: Workload
    images: Workload
    units: Workload
    rounds: int
    soak: float


def workload(name: str, groups: int, patches: tuple[int, int] | None = None, most: int = 8_000) -> Workload:
    return Workload(name, groups, patches, (min(1_339, most), 200, most))


IMAGES, UNIT = (1_024, 4_096), (2_128, 2_128)  # patches; a unit is 10.0 MB
FULL = Size(workload("text", 128), workload("images", 24, IMAGES), workload("units", 24, UNIT, 600), 3, 60)
QUICK = Size(workload("text", 24), workload("images", 8, IMAGES), workload("units", 16, UNIT, 600), 1, 5)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--peers", default=",".join(PEERS), help=f"any of {','.join(PEERS)}; '' for none")
    parser.add_argument("--json", metavar="FILE", help="append the rows to this file as well")
    parser.add_argument("--quick", action="store_true", help="less data, one round, no workers of DataLoader")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="of putting and getting at once")
    options = parser.parse_args(arguments)
    wanted = [name for name in options.peers.split(",") if name]
    if unknown := set(wanted) - set(PEERS):
        parser.error(f"no peers {sorted(unknown)}; there are {sorted(PEERS)}")
    size = QUICK if options.quick else FULL
    report = Report("transfer", options.json, PACKAGES)
    run(report, wanted, size, size.soak if options.soak is None else options.soak)


def run(report: Report, wanted: Sequence[str], size: Size, soak_seconds: float) -> None:
    names = []
    for name in wanted:
        if absent := missing(PEERS[name]):
            print(f"not installed: {', '.join(absent)}; without {name}", flush=True)
        else:
            names.append(name)
    found, busy = Found(report), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        providers: dict[str, Any] = {"knit_data": Knit(Path(folder))}
        providers |= {name: PEERS[name](Path(folder)) for name in names}
        try:
            for provider in providers.values():
                provider.start()
            for load in (size.text, size.images):
                measure(found, load, providers, size.rounds)
        finally:
            for provider in providers.values():
                provider.close()
            stop_ray(names)
        say("reads")
        reads(found, size.units, Path(folder), 2 * size.rounds + 1)
        if soak_seconds:
            say("soak")
            soak(found, Path(folder, "soak"), soak_seconds, size.images)
    report.where["load"] = [round(busy, 2), round(os.getloadavg()[0], 2)]  # before and after
    tell(found, size, providers)


# -- figures -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Found:
    """A value a round, by case, provider and metric."""

    report: Report
    values: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)

    def add(self, case: str, provider: str, metric: str, unit: str, value: float) -> None:
        self.values.setdefault((case, provider, metric), []).append(value)
        self.units[metric] = unit

    def get(self, case: str, provider: str, metric: str) -> list[float]:
        return self.values.get((case, provider, metric), [])

    def median(self, case: str, provider: str, metric: str) -> float | None:
        samples = self.get(case, provider, metric)
        return statistics.median(samples) if samples else None

    def times(self, case: str, metric: str, ours: str, theirs: Sequence[str], inverse: bool = False) -> list[float]:
        """How many times better ours is than the better of theirs, round by round; ``inverse``: more is better."""
        columns = [column for name in theirs if (column := self.get(case, name, metric))]
        if not columns:
            return []
        best = min(columns, key=statistics.median) if not inverse else max(columns, key=statistics.median)
        mine = self.get(case, ours, metric)
        return [ratio(a, b) if inverse else ratio(b, a) for a, b in zip(mine, best, strict=True)]

    def write(self) -> None:
        for (case, provider, metric), samples in self.values.items():
            self.report.add(case=case, provider=provider, metric=metric, unit=self.units[metric], samples=samples)


def measure(found: Found, load: Workload, providers: Mapping[str, Any], rounds: int) -> None:
    for name, provider in providers.items():  # not timed
        say(f"{load.name}, memory: {name}")
        with Usage() as usage:
            provider.begin(load)
            for index, group in enumerate(groups_of(load)):
                provider.put(index, group)
            provider.read(provider.names[0], Ask())
        provider.end()
        found.add(load.name, name, "memory", "MB", usage.all / MB)
        found.add(load.name, name, "driver memory", "MB", usage.driver / MB)
    for turn in range(rounds):
        for name in rotated(list(providers), turn):
            say(f"{load.name}, round {turn + 1} of {rounds}: {name}")
            provider = providers[name]
            provider.begin(load)
            put(found, load, name, provider)
            if (stored := provider.stored()) is not None:
                found.add(load.name, name, "stored", "1", stored / totals_of(load).unique)
            for way, (config, ask) in itertools.product(provider.names, provider.asks.items()):
                if ask.ahead and way == "transferqueue, client":
                    continue  # reading ahead is the loader's
                if rounds == 1 and name == "dataloader" and (ask.ahead or way != name):
                    continue  # its workers take seconds to start and to end
                took(found, load, way, config, provider.read(way, ask), provider.started)
            if (folder := provider.folder()) is not None:
                forget(folder)
                cold = provider.read(provider.names[0], Ask())
                took(found, load, provider.names[0], "8:8 cold", cold, provider.started)
            provider.end()


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def rotated(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def put(found: Found, load: Workload, name: str, provider: Any) -> None:
    took = [provider.put(index, group) for index, group in enumerate(groups_of(load))]
    whole = [1e3 * (build + put) for build, put in took]
    for metric, value in {
        "put p50": np.percentile(whole, 50),
        "put p95": np.percentile(whole, 95),
        "build p50": np.percentile([1e3 * build for build, _ in took], 50),
    }.items():
        found.add(load.name, name, metric, "ms", float(value))


def took(found: Found, load: Workload, way: str, config: str, reading: Reading, started: float) -> None:
    total = totals_of(load)
    assert reading.sums == total.sums, f"{way}, {load}, {config}: delivered {reading.sums}, put were {total.sums}"
    times, whole = [1e3 * s for s in reading.seconds], sum(reading.seconds)
    for metric, unit, value in (
        ("p50", "ms", np.percentile(times, 50)),
        ("p95", "ms", np.percentile(times, 95)),
        ("mean", "ms", np.mean(times)),
        ("unique", "MB/s", total.unique / MB / whole),
        ("logical", "MB/s", total.logical / MB / whole),
    ):
        if unit == "ms" or not config.endswith("ahead"):
            found.add(load.name, way, f"{config} {metric}", unit, float(value))
    if config == "8:8":
        found.add(load.name, way, "first batch", "s", started + reading.prepared + reading.seconds[0])


# -- reading at the speed of memory --------------------------------------------------------------------------------


def reads(found: Found, load: Workload, folder: Path, rounds: int) -> None:
    """A first round is not counted."""
    store, sources = kd.TrajectoryStore(folder / load.name), []
    with store.writer("rollout-0") as writer:
        for index, group in enumerate(groups_of(load)):
            writer.put_group(trajectories(f"{index}", group))
            sources.append(flat(group))
    store.seal()
    ranges = [
        (path, path.stat().st_size, len(one)) for path, one in zip(segments(folder / load.name), sources, strict=True)
    ]
    into, threads = torch.empty(max(map(len, sources)), dtype=torch.uint8), torch.get_num_threads()
    ask, total = Ask(8), totals_of(load)

    def ours(reuse: bool) -> float:
        reading = read_ours(store.url, load, ask, cap_of(load, ask.mini), reuse, planned=True)
        assert reading.sums == total.sums, f"delivered {reading.sums}, put were {total.sums}"
        return sum(reading.seconds)

    def copy(count: int) -> float:
        torch.set_num_threads(count)
        try:
            return looked_at(lambda i: into[: len(sources[i])].copy_(sources[i]), len(sources))
        finally:
            torch.set_num_threads(threads)

    def pread(fresh: bool) -> float:
        def one(i: int) -> torch.Tensor:
            path, end, size = ranges[i]
            out = torch.empty(size, dtype=torch.uint8) if fresh else into[:size]
            assert os.preadv(files[i], [out.numpy().data], end - size) == size, path
            return out

        files = [os.open(path, os.O_RDONLY) for path, _, _ in ranges]
        try:
            return looked_at(one, len(files))
        finally:
            for fd in files:
                os.close(fd)

    ways: dict[str, Callable[[], float]] = {
        "knit_data": lambda: ours(False),
        "knit_data, reused buffers": lambda: ours(True),
        "memcpy, 1 thread": lambda: copy(1),
        f"memcpy, {threads} threads": lambda: copy(threads),
        "pread, fresh": lambda: pread(True),
        "pread, reused": lambda: pread(False),
    }
    for turn in range(rounds + 1):
        for name in rotated(list(ways), turn):
            seconds = ways[name]()
            if turn:
                found.add("reads", name, "unique", "MB/s", total.unique / MB / seconds)


def flat(group: Group) -> torch.Tensor:
    """A group's bytes, one after the other."""
    assert group.pixels is not None
    return torch.cat([t.flatten().view(torch.uint8) for t in (*group.ids, *group.logprobs, group.pixels)])


def segments(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"), key=lambda path: int(path.stem))


def looked_at(call: Callable[[int], torch.Tensor], count: int) -> float:
    """Seconds of ``call(0)``, …, each with a look at what it returns."""
    began = time.perf_counter()
    for i in range(count):
        look([call(i)])
    return time.perf_counter() - began


# -- putting and getting at once ---------------------------------------------------------------------------------------


def soak(found: Found, folder: Path, seconds: float, load: Workload) -> None:
    store = kd.TrajectoryStore(folder, reclaim="consumed", max_bytes=DISK * 9 // 10)
    groups = list(itertools.islice(groups_of(load), 8))
    cap, written, most, puts = max(group.length for group in groups), 0, 0, []
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool, store.writer("rollout-0") as writer:
        reading = pool.submit(soak_reader, store.url, cap)
        until = time.perf_counter() + seconds
        try:
            for number in itertools.count():
                group = groups[number % len(groups)]
                assert group.pixels is not None
                group.pixels[0, 0] = number  # another image each time
                began = time.perf_counter()
                if number >= 8 and (began > until or most > DISK or reading.done()):
                    break
                try:
                    writer.put_group(trajectories(f"{number}", group), timeout=10.0)
                except kd.WaitTimeout:
                    break
                puts.append(1e3 * (time.perf_counter() - began))
                written += group.unique
                if number % 16 == 0:
                    most = max(most, size_of(str(folder)))
            took = seconds - max(0.0, until - time.perf_counter())
        finally:
            store.seal()  # or the reader would wait for more
        gets, count = reading.result(300)
    assert count == len(puts) * 8, f"{count} responses read, {len(puts) * 8} put"
    memory = psutil.virtual_memory().total
    for metric, unit, value in (
        ("lasted", "s", took),
        ("written", "GB", written / 1e9),
        ("written over the machine's memory", "1", written / memory),
        ("most on disk", "GB", most / 1e9),
        ("written", "MB/s", written / MB / took),
        *((f"put {when} p{p}", "ms", np.percentile(part, p)) for when, part in halves(puts) for p in (50, 95)),
        *((f"get ahead {when} p{p}", "ms", np.percentile(part, p)) for when, part in halves(gets) for p in (50, 95)),
    ):
        found.add("soak", "knit_data", metric if unit != "MB/s" else "written a second", unit, float(value))


def ratio(a: float, b: float) -> float:
    """Memory may not grow at all."""
    return 1.0 if a == b else a / b if b else float("inf")


def halves(samples: Sequence[float]) -> list[tuple[str, Sequence[float]]]:
    middle = len(samples) // 2
    return [("first half", samples[:middle]), ("second half", samples[middle:])]


def soak_reader(url: str, cap: int) -> tuple[list[float], int]:
    """Milliseconds of each micro-batch but the first, and how many responses came."""
    store = kd.TrajectoryStore(url, reclaim="consumed")
    sampler = kd.QuotaSampler(kd.TrajectoryStream(store), 1, 1, 8)
    times, count = [], 0
    with kd.TrajectoryLoader(sampler, cap, device="cpu", prefetch=2) as loader:
        passes, asked = itertools.chain.from_iterable(loader), time.perf_counter()
        for micro in passes:
            images = [image for image in micro.media.new if image is not None]
            look([*micro.values(), *(image.tensors["pixel_values"] for image in images)])
            times.append(1e3 * (time.perf_counter() - asked))
            count += len(micro.infos)
            del micro, images
            asked = time.perf_counter()
    return times[1:], count


# -- telling -----------------------------------------------------------------------------------------------------------


def tell(found: Found, size: Size, providers: Mapping[str, Any]) -> None:
    found.write()
    where = found.report.where
    print(f"\n{where['machine']}, {torch.get_num_threads()} threads, load {where['load']}, {where['versions']}")
    for load in (size.text, size.images):
        print(f"\n{table(found, load, [name for provider in providers.values() for name in provider.names])}")
    for case, heading in (("reads", "reads: images of 10 MB, warm"), ("soak", "soak: a writer and a reader at once")):
        rows = [(name, metric) for found_case, name, metric in found.values if found_case == case]
        if rows:
            print(f"\n{heading}")
        for name, metric in rows:
            print(f"{name:28}{metric:36}{spread(found.get(case, name, metric)):>24} {found.units[metric]}")
    print("\nit must reach")
    for text, samples, least, most in goals(found):
        value = statistics.median(samples) if samples else None
        reached = "not measured" if value is None else "yes" if least <= value <= most else "no"
        print(f"{text:66}{'' if value is None else spread(samples):>24}  {reached}")


COLUMNS = (
    *("put p50", "put p95", "build p50"),
    *("8:8 p50", "8:8 p95", "64:8 p50", "64:8 p95", "64:8 mean", "8:8 ahead p50", "8:8 ahead p95", "8:8 cold p50"),
    *("8:8 unique", "8:8 logical", "64:8 unique", "first batch", "memory", "driver memory", "stored"),
)


def table(found: Found, load: Workload, names: Sequence[str]) -> str:
    """A column a provider; in brackets how many times better ours is."""
    total = totals_of(load)
    lines = [f"{load}; {total.unique / MB:.0f} MB unique, {total.logical / MB:.0f} MB logical"]
    lines.append(f"{'':26}" + "".join(f"{name:>26}" for name in names))
    for metric in COLUMNS:
        if metric not in found.units:
            continue
        line = f"{metric + ', ' + found.units[metric]:26}"
        for name in names:
            value = found.median(load.name, name, metric)
            more = metric.endswith(("unique", "logical"))
            times = [] if name == "knit_data" else found.times(load.name, metric, "knit_data", [name], more)
            share = f" ({statistics.median(times):.3g}x)" if times and "memory" not in metric else ""
            line += f"{'' if value is None else f'{value:.4g}{share}':>26}"
        lines.append(line)
    return "\n".join(lines)


def spread(samples: Sequence[float]) -> str:
    low, middle, high = quantiles(samples)
    return f"{middle:.3g}" if len(samples) == 1 else f"{middle:.3g} ± {low:.3g}..{high:.3g}"


def goals(found: Found) -> list[tuple[str, list[float], float, float]]:
    """What is to be reached: a sentence, a value a round, and the least and most that it may be."""
    queue = ["transferqueue", "transferqueue, client"]
    anything = float("inf")

    def over(case: str, metric: str, theirs: Sequence[str], inverse: bool = False) -> list[float]:
        return found.times(case, metric, "knit_data", theirs, inverse)

    def share(of: str, which: str) -> list[float]:
        return [
            a / b for a, b in zip(found.get("reads", of, "unique"), found.get("reads", which, "unique"), strict=True)
        ]

    rows = [
        ("images, 8:8 p50: TransferQueue's over ours, at least 40", over("images", "8:8 p50", queue), 40, anything),
        ("images, 8:8 p50: the driver's over ours, at least 200", over("images", "8:8 p50", ["driver"]), 200, anything),
        (
            "images, 8:8 unique bytes/s: ours over TransferQueue's, at least 50",
            over("images", "8:8 unique", queue, True),
            50,
            anything,
        ),
        ("text, 8:8 p50: TransferQueue's over ours, at least 50", over("text", "8:8 p50", queue), 50, anything),
        (
            "reads over memcpy in one thread, at least 0.7",
            share("knit_data, reused buffers", "memcpy, 1 thread"),
            0.7,
            anything,
        ),
        ("reads over pread into fresh memory, at least 0.9", share("knit_data", "pread, fresh"), 0.9, anything),
    ]
    for case in ("text", "images"):
        rows += [
            (f"{case}, put p50: TransferQueue's over ours, at least 3", over(case, "put p50", queue), 3, anything),
            (f"{case}, bytes stored over unique bytes, at most 1.02", found.get(case, "knit_data", "stored"), 0, 1.02),
            (f"{case}, first batch in s, less than 1", found.get(case, "knit_data", "first batch"), 0, 1),
        ]
    return rows


if __name__ == "__main__":
    main()
