"""Planning a mini-batch of 8,192 trajectories: time, number of micro-batches, waiting.

    python benchmarks/bench_planning.py [--quick] [--json FILE]

``time`` is processor time of the thread: the interpreter lock is held for that long. ``count`` is the number of
micro-batches over its lower bound, total tokens / cap rounded up to a multiple of the ranks. ``imbalance`` is what all
ranks spend, waiting included, over the total: the sum over micro-batches of the largest of its ranks, times ranks, over
the tokens. Both are 1 at best. Peers' bins are dealt to the ranks in their order.

With images, groups of 8 share one of 256, 1,024 or 4,096 patches. ``ranks per image`` is on how many ranks an image is
encoded, ``vision imbalance`` the most patches of a rank, each image once, over the mean. Compared are the plan with
media, the one without, and rows to ranks at random, equally many each and then packed without regard to the count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import peers
from report import Report, interleaved

from knit_data.affinity import MediaUse
from knit_data.packing import pack
from knit_data.planning import Layout, plan

# mu and sigma of the log of response tokens, and the longest; fitted to public agent and reasoning traces
LENGTHS = {"tool use": (6.426, 0.655, 4_096), "reasoning": (9.594, 0.948, 39_500)}
CAPS = {"tool use": (4_096, 16_384, 32_768), "reasoning": (40_960, 65_536, 131_072)}
PEERS = {
    "first fit decreasing": peers.first_fit_decreasing,
    "least loaded": peers.least_loaded,
    "arrival order": peers.arrival_order,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="1,024 trajectories, few repeats")
    parser.add_argument("--json", metavar="FILE", help="append the rows to this file as well")
    options = parser.parse_args()

    size, repeats = (1_024, 3) if options.quick else (8_192, 11)
    report = Report("planning", options.json)
    for law, (mu, sigma, longest) in LENGTHS.items():
        drawn = np.random.default_rng(0).lognormal(mu, sigma, size)
        lengths = np.clip(drawn, 2, longest).astype(np.int64)
        for cap in CAPS[law]:
            for ranks in (8, 64):
                measure(report, f"{size} {law}, cap {cap}, {ranks} ranks", lengths, cap, ranks, repeats)
            for ranks in (2, 8, 32):
                case = f"{size} {law}, an image per 8, cap {cap}, {ranks} ranks"
                measure_images(report, case, lengths, cap, ranks, repeats)


def measure(
    report: Report, case: str, lengths: np.ndarray[tuple[int], np.dtype[np.int64]], cap: int, ranks: int, repeats: int
) -> None:
    plain: list[int] = lengths.tolist()

    def ours(layout: Layout) -> list[int]:
        return plan(lengths, ranks=ranks, max_tokens=cap, layout=layout).tokens.tolist()  # type: ignore[no-any-return]

    def theirs(name: str) -> list[int]:
        return [sum(plain[row] for row in rows) for rows in PEERS[name](plain, cap, ranks)]

    providers: dict[str, Callable[[], list[int]]] = {
        "knit_data": lambda: ours("packed"),
        "knit_data, padded": lambda: ours("padded"),
        **{name: (lambda name=name: theirs(name)) for name in PEERS},  # type: ignore[misc]
    }
    bound = -(-sum(plain) // cap)
    bound += -bound % ranks
    for provider, samples in interleaved(providers, repeats, clock=time.thread_time).items():
        tokens = np.array(providers[provider]())
        assert tokens.max() <= cap
        together = tokens.reshape(-1, ranks)
        report.add(case=case, provider=provider, metric="time", unit="ms", samples=samples)
        report.add(case=case, provider=provider, metric="count", unit="1", samples=[tokens.size / bound])
        imbalance = together.max(axis=1).sum() * ranks / tokens.sum()
        report.add(case=case, provider=provider, metric="imbalance", unit="1", samples=[float(imbalance)])


Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


def measure_images(report: Report, case: str, lengths: Ints, cap: int, ranks: int, repeats: int) -> None:
    """Each provider gives the rank of every row and the tokens [count, ranks]."""
    rows = np.arange(lengths.size)
    patches = np.random.default_rng(1).choice([256, 1_024, 4_096], lengths.size // 8)
    use = MediaUse(rows, rows // 8, patches)
    shuffled = np.random.default_rng(2).permutation(lengths.size) % ranks

    def planned(media: MediaUse | None) -> tuple[Ints, Ints]:
        made = plan(lengths, ranks=ranks, max_tokens=cap, media=media)
        rank = np.empty(lengths.size, np.int64)
        rank[made.rows] = np.repeat(np.arange(made.tokens.size) % ranks, np.diff(made.ptr))
        return rank, made.tokens.reshape(-1, ranks)

    def at_random() -> tuple[Ints, Ints]:
        bins = []
        for rank in range(ranks):
            falling = -np.sort(-lengths[shuffled == rank])
            bins.append(-np.sort(-np.bincount(pack(falling, cap, 1), falling).astype(np.int64)))
        tokens = np.zeros((max(map(len, bins)), ranks), np.int64)
        for rank, mine in enumerate(bins):
            tokens[: mine.size, rank] = mine
        return shuffled, tokens

    providers: dict[str, Callable[[], tuple[Ints, Ints]]] = {
        "knit_data, media": lambda: planned(use),
        "knit_data, without": lambda: planned(None),
        "at random": at_random,
    }
    for provider, samples in interleaved(providers, repeats, clock=time.thread_time).items():
        rank, tokens = providers[provider]()
        on = use.on(rank, ranks)
        vision = use.patches @ on
        values = {
            "ranks per image": on.sum(axis=1).mean(),
            "imbalance": tokens.max(axis=1).sum() * ranks / tokens.sum(),
            "vision imbalance": vision.max() * ranks / vision.sum(),
        }
        report.add(case=case, provider=provider, metric="time", unit="ms", samples=samples)
        for metric, value in values.items():
            report.add(case=case, provider=provider, metric=metric, unit="1", samples=[float(value)])


if __name__ == "__main__":
    main()
