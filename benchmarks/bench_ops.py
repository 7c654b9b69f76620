"""Packing and segment ops beside what torch offers for the same, and beside a copy of as many bytes.

    python benchmarks/bench_ops.py [--quick] [--json FILE] [--device cuda]

Rows of lognormal length, 2,000 tokens on average, 8,000 at most: 64 of them, or as many as fit ``Size.padded`` bytes
padded. Images: 8 of 1,296 rows of 3,584 bfloat16, gathered to places with text between, put into a tensor that is
there, and their gradients added up in float32: from 8 images, or from 8 occurrences of one.

Every peer gets its indices and masks for nothing, made before the clock starts, and has to come to the same result,
bit by bit. ``copy`` is ``clone`` of what an op returns; for the ops in place ``copy_`` of as many bytes into a tensor
that is there. Samples are calls, in turn; ratios are taken within a turn. On a GPU, events around ``REPEATED`` calls.
Speed counts the bytes read and written once. ``tiny`` ops move a few hundred bytes: what is left is what a call costs;
``recorded`` are the same with a gradient to record, without the backward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from report import Report, interleaved, quantiles
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from knit_data.ops import accumulate_segments_, gather_segments, pack, scatter_segments, scatter_segments_, unpack
from knit_data.ops.pack import pack_rows_reference, unpack_rows_reference
from knit_data.ops.segment import add_segments_reference, copy_segments_reference

try:
    import fbgemm_gpu  # noqa: F401
except (ImportError, OSError):  # OSError: made for another torch
    FBGEMM = False
else:
    FBGEMM = True

REPEATED = 10  # calls between two events
MB = 1_000_000
Calls = dict[str, Callable[[], Any]]
HIDDEN: dict[int, torch.dtype] = {
    1: torch.int64,
    64: torch.bfloat16,
    1_024: torch.bfloat16,
    4_096: torch.bfloat16,
}
SEVERAL = {  # peers that pass over their bytes more than once, or that make a tensor of every row
    "pack": ("mask", "nested", "cat"),
    "unpack": ("pad_sequence", "nested", "masked_scatter"),
    "gather": ("index_copy", "masked_scatter", "cat"),
    "put": ("index_copy", "masked_scatter"),
    "add": ("index_add",),
}


@dataclass(frozen=True)
class Size:
    padded: int  # bytes
    images: int
    turns: int


FULL, QUICK, LARGE = Size(500 * MB, 8, 15), Size(40 * MB, 4, 5), Size(4_000 * MB, 8, 15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="less data, fewer turns")
    parser.add_argument("--json", metavar="FILE", help="append the rows to this file as well")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if not FBGEMM:
        print("not installed: fbgemm_gpu; without it")
    size = QUICK if options.quick else FULL if options.device == "cpu" else LARGE
    bench = Bench(Report("ops", options.json, ("torch", "numpy", "triton", "fbgemm-gpu")), options.device, size)
    for hidden, dtype in HIDDEN.items():
        bench.rows(hidden, dtype)
    bench.images()
    bench.tiny()
    bench.tell()


@dataclass
class Bench:
    report: Report
    device: str
    size: Size
    # milliseconds a turn, by case and provider; and what each moves
    found: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    row: dict[str, int] = field(default_factory=dict)  # bytes a row

    # -- cases ---------------------------------------------------------------------------------------------------------

    def rows(self, hidden: int, dtype: torch.dtype) -> None:
        width = hidden * dtype.itemsize
        draws = np.random.default_rng(0).lognormal(np.log(2_000) - 0.5, 1.0, 64).astype(np.int64)
        lengths = np.clip(draws, 1, 8_000)[: max(4, self.size.padded // (8_000 * width))]
        lengths = sorted(lengths.tolist())  # the last the longest: what is packed is no view of what is padded
        cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        total, longest, shape = sum(lengths), max(lengths), (hidden,) if hidden > 1 else ()
        padded = torch.ones(len(lengths), longest, *shape, dtype=dtype, device=self.device)
        padded[:] = torch.randint(-99, 99, (longest, *shape)).to(padded)
        there = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
        padded.masked_fill_(~there.view(*there.shape, *(1 for _ in shape)).to(self.device), 0)
        index = there.flatten().nonzero()[:, 0].to(self.device)
        mask, offsets = there.to(self.device), cu.to(self.device)
        wide, packed = mask.view(*mask.shape, *(1 for _ in shape)), pack(padded, cu, total)
        bounds = list(zip(cu.tolist(), lengths, strict=False))
        lengths_there = torch.tensor(lengths, device=self.device)

        def reference() -> Tensor:
            out = torch.empty_like(packed)
            pack_rows_reference(out, padded, cu)
            return out

        def nested() -> Tensor:
            narrow = torch.nested.narrow(padded, 1, 0, lengths_there, layout=torch.jagged)
            return narrow.contiguous().values()

        calls: Calls = {
            "knit_data": lambda: pack(padded, cu, total),
            "copy": packed.clone,
            "reference": reference,
            "cat": lambda: torch.cat([padded[i, :n] for i, n in enumerate(lengths)]),
            "mask": lambda: padded[mask],
            "index_select": lambda: padded.flatten(0, 1).index_select(0, index),
            "nested": nested,
        }
        if FBGEMM and shape:
            calls["fbgemm"] = lambda: torch.ops.fbgemm.dense_to_jagged(padded, [offsets], total)[0]
        name = f"64 rows, hidden {hidden:,}" if len(lengths) == 64 else f"{len(lengths)} rows, hidden {hidden:,}"
        self.measure(f"pack, {name}", calls, packed, 2 * packed.nbytes, width)

        def reference_back() -> Tensor:
            out = torch.empty_like(padded)
            unpack_rows_reference(out, packed, cu, 0)
            return out

        def sliced() -> Tensor:
            out = packed.new_zeros(padded.shape)
            for i, (at, n) in enumerate(bounds):
                out[i, :n] = packed[at : at + n]
            return out

        calls = {
            "knit_data": lambda: unpack(packed, cu, longest),
            "copy": padded.clone,
            "reference": reference_back,
            "pad_sequence": lambda: pad_sequence(packed.split(lengths), batch_first=True),  # type: ignore[arg-type]
            "slices": sliced,
            "masked_scatter": lambda: torch.zeros_like(padded).masked_scatter_(wide, packed),
        }
        if dtype.is_floating_point:
            values = partial(torch.nested.nested_tensor_from_jagged, packed, offsets.long())
            calls["nested"] = lambda: values().to_padded_tensor(0.0, (len(lengths), longest, *shape))
        if FBGEMM and shape:
            calls["fbgemm"] = lambda: torch.ops.fbgemm.jagged_to_padded_dense(packed, [offsets], [longest], 0.0)
        self.measure(f"unpack, {name}", calls, padded, packed.nbytes + padded.nbytes, width)

    def images(self) -> None:
        count, rows, hidden, gap = self.size.images, 1_296, 3_584, 100
        source = torch.randint(-99, 99, (count * rows, hidden)).to(torch.bfloat16).to(self.device)
        total, order = count * (rows + gap), torch.randperm(count).tolist()
        table = torch.tensor([(0, image * rows, rows, gap + i * (rows + gap)) for i, image in enumerate(order)])
        moves = [(first, place) for _, first, _, place in table.tolist()]
        of = torch.cat([torch.arange(first, first + rows) for first, _ in moves]).to(self.device)
        to = torch.cat([torch.arange(place, place + rows) for _, place in moves]).to(self.device)
        mask = torch.zeros(total, 1, dtype=torch.bool, device=self.device).index_fill_(0, to, True)
        blank, width, name = source.new_zeros(gap, hidden), 2 * hidden, f"{count} images"
        want = gather_segments(source, table, total)

        def reference() -> Tensor:
            out = torch.empty_like(want)
            copy_segments_reference([out], [source], table, True)
            return out

        def sliced(out: Tensor) -> Tensor:
            for first, place in moves:
                out[place : place + rows] = source[first : first + rows]
            return out

        calls: Calls = {
            "knit_data": lambda: gather_segments(source, table, total),
            "copy": want.clone,
            "reference": reference,
            "slices": lambda: sliced(torch.zeros_like(want)),
            "cat": lambda: torch.cat([x for first, _ in moves for x in (blank, source[first : first + rows])]),
            "index_copy": lambda: torch.zeros_like(want).index_copy_(0, to, source.index_select(0, of)),
            "masked_scatter": lambda: torch.zeros_like(want).masked_scatter_(mask, source.index_select(0, of)),
        }
        self.measure(f"gather, {name}", calls, want, source.nbytes + want.nbytes, width)

        base, other = torch.zeros_like(want), torch.zeros_like(source)

        def reference_put() -> Tensor:
            copy_segments_reference([base], [source], table, False)
            return base

        calls = {
            "knit_data": lambda: scatter_segments_(base, source, table),
            "copy": lambda: other.copy_(source),
            "reference": reference_put,
            "slices": lambda: sliced(base),
            "index_copy": lambda: base.index_copy_(0, to, source.index_select(0, of)),
            "masked_scatter": lambda: base.masked_scatter_(mask, source.index_select(0, of)),
        }
        self.measure(f"put, {name}", calls, want, 2 * source.nbytes, width)

        one = table.clone()
        one[:, 1] = 0
        for name, segments, unique in ((f"{count} images", table, count), (f"1 image {count} times", one, 1)):
            buffer = torch.zeros(unique * rows, hidden, device=self.device)
            moved = want.nbytes * rows // (rows + gap) + 2 * buffer.nbytes
            calls = self.sums(buffer, want, segments, to)
            calls["reference"]()
            self.measure(f"add, {name}", calls, buffer.clone(), moved, width, buffer)  # small integers: sums are exact

    def sums(self, buffer: Tensor, grad: Tensor, segments: Tensor, to: Tensor) -> Calls:
        moves = segments.tolist()
        rows = torch.cat([torch.arange(first, first + n) for _, first, n, _ in moves]).to(self.device)
        moved = 2 * buffer.nbytes + to.numel() * grad.shape[1] * grad.element_size()  # read and written
        half = torch.empty(moved // 2, dtype=torch.uint8, device=self.device)
        other = torch.ones_like(half)

        def sliced() -> None:
            for _, first, n, place in moves:
                buffer[first : first + n] += grad[place : place + n]

        return {
            "knit_data": lambda: accumulate_segments_(buffer, grad, segments),
            "copy": lambda: half[: other.numel()].copy_(other),
            "reference": lambda: add_segments_reference([buffer], [grad], segments),
            "slices": sliced,
            "index_add": lambda: buffer.index_add_(0, rows, grad.index_select(0, to).float()),
        }

    def tiny(self) -> None:
        x, cu, y = torch.randn(4, 6, 3), torch.tensor([0, 3, 3, 8, 9], dtype=torch.int32), torch.randn(9, 3)
        a, b, base = torch.randn(5, 3), torch.randn(4, 3), torch.randn(13, 3)
        table = torch.tensor([[0, 1, 3, 0], [1, 0, 2, 4], [0, 0, 5, 7], [0, 2, 1, 6]])
        x, y, a, b, base = (one.to(self.device) for one in (x, y, a, b, base))
        calls: Calls = {
            "pack": lambda: pack(x, cu, 12),
            "unpack": lambda: unpack(y, cu, 6),
            "gather": lambda: gather_segments([a, b], table, 13),
            "put": lambda: scatter_segments_(base, [a, b], table),
            "add": lambda: accumulate_segments_([a, b], base, table),
        }

        def often(call: Callable[[], Any]) -> None:
            for _ in range(200):
                call()

        def measure(calls: Calls, what: str) -> None:
            times = interleaved({name: partial(often, call) for name, call in calls.items()}, 11, time.thread_time)
            for name, samples in times.items():
                micros = [1e3 * ms / 200 for ms in samples]
                self.found[f"{what} {name}"] = {"knit_data": micros}
                self.report.add(case=f"{what} {name}", provider="knit_data", metric="time", unit="us", samples=micros)

        measure(calls, "tiny")
        x, y, a, base = (one.requires_grad_() for one in (x, y, a, base))
        calls["put"] = lambda: scatter_segments(base, [a, b], table)
        del calls["add"]  # writes in place
        measure(calls, "recorded")

    # -- measuring and telling -----------------------------------------------------------------------------------------

    def measure(self, case: str, calls: Calls, want: Tensor, moved: int, row: int, into: Tensor | None = None) -> None:
        """``want``: what calls return, or write into zeros."""
        for name, call in calls.items():
            if into is not None:
                into.zero_()
            out = call()
            if name != "copy":
                assert torch.equal(out if into is None else into, want), f"{case}: {name} comes to something else"
            del out
        times = interleaved(calls, self.size.turns) if self.device == "cpu" else events(calls, self.size.turns)
        self.found[case], self.bytes[case], self.row[case] = times, moved, row
        for name, samples in times.items():
            speeds = [moved / ms / MB for ms in samples]
            self.report.add(case=case, provider=name, metric="speed", unit="GB/s", samples=speeds)

    def ratios(self, case: str, peers: tuple[str, ...], own: str = "knit_data") -> list[float]:
        """Of the best of these peers, each turn: how often its time is ours, or another's."""
        times = {name: samples for name, samples in self.found[case].items() if name in peers}
        if not times:
            return []
        best = min(times.values(), key=statistics.median)
        return [b / a for a, b in zip(self.found[case][own], best, strict=True)]

    def tell(self) -> None:
        cases = [case for case in self.found if case in self.bytes]
        print(f"\n{self.device}, {torch.get_num_threads()} threads; the share of a copy, then GB/s")
        for case in cases:
            times = {name: statistics.median(samples) for name, samples in self.found[case].items()}
            shown = [f"{name} {self.bytes[case] / ms / MB:.2f}" for name, ms in times.items()]
            print(f"{case:28}{statistics.median(self.ratios(case, ('copy',))):5.2f}  {', '.join(shown)}")
        print("\nit must reach, on a machine that does nothing else")
        for text, samples, least, most in self.goals(cases):
            _, middle, _ = quantiles(samples)
            print(f"{text:86}{middle:8.2f}  {'yes' if least <= middle <= most else 'no'}")

    def goals(self, cases: list[str]) -> list[tuple[str, list[float], float, float]]:
        out, endless, cuda = [], float("inf"), self.device != "cpu"
        for case in cases:
            kind, peers = (
                case.split(",")[0],
                tuple(set(self.found[case]) - {"knit_data", "copy", "reference", "fbgemm"}),
            )
            share = 0.75 if kind == "add" else 0.85 if cuda else 0.8
            without = ("gather",) if cuda else ("add",)
            large = self.bytes[case] >= 200 * MB if cuda else self.row[case] >= 4_000
            if large and kind not in without:
                out.append((f"{case}: share of a copy, at least {share}", self.ratios(case, ("copy",)), share, endless))
            if not cuda:
                text = f"{case}: the best of torch over it, at least 1 (0.95: noise)"
                out.append((text, self.ratios(case, peers), 0.95, endless))
                most = statistics.median(self.ratios(case, SEVERAL[kind], "copy"))
                text = f"{case}: torch in several passes over it, at least 2 (a copy: {most:.2f})"
                out.append((text, self.ratios(case, SEVERAL[kind]), 2.0, endless))
        if not cuda:
            for case in self.found:
                if case.startswith("tiny"):
                    out.append((f"{case}: microseconds, at most 20", self.found[case]["knit_data"], 0.0, 20.0))
        return out


def events(calls: Mapping[str, Callable[[], Any]], turns: int) -> dict[str, list[float]]:
    """Milliseconds of a call on the device; a first turn is not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(REPEATED):
                call()
            end.record()
            end.synchronize()
            if turn:
                times[name].append(begin.elapsed_time(end) / REPEATED)
    return times


if __name__ == "__main__":
    main()
