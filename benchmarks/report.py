"""Rows that every benchmark prints, and on request writes to a file: one JSON object a line, with quantiles, versions,
machine and commit.

    rows = Report("planning", json_path)
    rows.add(case="tool, cap 16384", provider="knit_data", metric="time", unit="ms", samples=[4.1, 4.0, 4.4])

Peers are measured in turn within one run (`interleaved`), so that a busy machine slows all of them down.
"""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentile; linear between samples."""
    ordered = sorted(samples)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return at(0.2), at(0.5), at(0.8)


def versions(*packages: str) -> dict[str, str]:
    """Of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> str:
    """Processor and number of cores that this process may use."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return f"{model}, {cores} cores"


def commit() -> str | None:
    """Short hash of this checkout, ``+`` when files differ from it; None outside a checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, check=True, capture_output=True, text=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


class Report:
    """Prints rows to be read and, given a path, appends them as JSON to that file."""

    def __init__(self, benchmark: str, path: str | None = None, packages: Sequence[str] = ("numpy",)) -> None:
        self.benchmark = benchmark
        self.path = path
        self.where = {"versions": versions(*packages), "machine": machine(), "commit": commit()}
        packed = ", ".join(f"{name} {version}" for name, version in self.where["versions"].items())
        print(f"{benchmark}, {self.where['commit']}, on {self.where['machine']}; {packed}", flush=True)

    def add(self, *, case: str, provider: str, metric: str, unit: str, samples: Sequence[float]) -> None:
        p20, p50, p80 = (float(f"{value:.6g}") for value in quantiles(samples))
        row = {"benchmark": self.benchmark, "case": case, "provider": provider, "metric": metric, "unit": unit}
        spread = f"({p20:.4g} to {p80:.4g})" if p20 < p80 else ""
        print(f"{case:52} {provider:22} {metric:28} {p50:>10.4g} {unit:6} {spread}".rstrip(), flush=True)
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps({**row, "p20": p20, "p50": p50, "p80": p80, **self.where}) + "\n")


def interleaved(
    providers: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Milliseconds of each call, one of each provider a turn; a first turn is not counted. The order changes from turn
    to turn, since what ran before leaves its mark on caches and free memory.

    ``clock=time.thread_time`` counts this thread's processor time only: for pure computation on a shared machine.
    """
    times: dict[str, list[float]] = {name: [] for name in providers}
    for turn in range(repeats + 1):
        for name, call in random.Random(turn).sample(sorted(providers.items()), len(providers)):
            start = clock()
            call()
            if turn:
                times[name].append(1e3 * (clock() - start))
    return times
