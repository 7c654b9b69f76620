"""What can be asked for on the command line: ``python -m knit_data --help``."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TextIO

from knit_data.errors import InvalidArgument
from knit_data.simulation import PACED, PRESETS, Scenario, compare, preset, simulate
from knit_data.simulation.plot import plot, plottable

OURS = "constraint-preserving"
COLUMNS = {  # of the table: heading over the row's entry
    "policy": ("policy", ""),
    "staleness": ("staleness", ".4f"),
    "token mean": ("staleness_token_mean", ".4f"),
    "reduction": ("reduction", ".1%"),
    "token-mean reduction": ("reduction_token_mean", ".1%"),
    "p99": ("p99", ".2f"),
    "max": ("max", ".2f"),
    "cycle ratio": ("cycle_ratio", ".3f"),
    "trainer idle": ("trainer_idle", ".1%"),
    "violations": ("violations", "d"),
    "dead ends": ("dead_ends", "d"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")  # one line: without the usage


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 2 for arguments that cannot be served, 130 when interrupted."""
    parser = _Parser("python -m knit_data", description="knit_data on the command line.", allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    _add_simulate(commands)
    try:
        try:
            options = parser.parse_args(argv)
            options.run(options)
        finally:
            if sys.stdout is not None:  # it may have been closed
                sys.stdout.flush()
    except (InvalidArgument, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
            return 0
        print(f"{parser.prog} {options.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


# -- simulate ----------------------------------------------------------------------------------------------------------


def _add_simulate(commands: argparse._SubParsersAction[_Parser]) -> None:
    text = "Simulate one scenario under all admission policies, side by side."
    parser = commands.add_parser("simulate", help=text, description=text, allow_abbrev=False)
    parser.add_argument("--preset", default="mild", metavar="NAME", help=f"{', '.join(PRESETS)} (default: mild)")
    parser.add_argument("--slots", type=int, metavar="C", help="responses generated at the same time")
    parser.add_argument("--mini-batches", type=int, metavar="M", help="optimizer steps of a train batch")
    parser.add_argument("--slack", type=int, default=0, metavar="G", help="groups that a quota may be off (default: 0)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs to average over (default: 3)")
    parser.add_argument("--json", metavar="FILE", help="write the rows; -: to stdout, and the table to stderr")
    parser.add_argument("--trace", metavar="FILE", help="write every event of a baseline and a paced run as JSON lines")
    parser.add_argument("--plot", metavar="FILE", help="draw staleness by policy and a time line, as .png, .pdf, .svg")
    parser.set_defaults(run=_simulate)


def _simulate(options: argparse.Namespace) -> None:
    scenario = preset(options.preset, options.slots, options.mini_batches, options.slack)
    if options.plot:
        plottable(options.plot)
    for path in (options.json, options.trace, options.plot):
        if path and path != "-":
            open(path, "a").close()  # before the work: raises OSError where it cannot be written
    rows = compare(scenario, options.seeds, _progress if sys.stderr.isatty() else lambda _: None)
    if sys.stderr.isatty():
        _progress("")
    print(_text(scenario, options.seeds, rows), file=sys.stderr if options.json == "-" else sys.stdout)
    if options.json == "-":
        _write_json(rows, sys.stdout)
    elif options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            _write_json(rows, file)
    if options.trace:
        with open(options.trace, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in _trace(scenario))
    if options.plot:
        plot(scenario, rows, options.plot)


def _progress(text: str) -> None:
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _write_json(rows: Sequence[dict[str, Any]], file: TextIO) -> None:
    """NaN, of runs that could not go on, as null."""
    plain = [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()} for row in rows]
    print(json.dumps(plain, indent=1, allow_nan=False), file=file)


def _trace(scenario: Scenario) -> Iterator[dict[str, Any]]:
    """The events of both runs, each after a row of facts. The baseline knows no slack, as in the table."""
    exact = replace(scenario, slack=0)
    for chosen, report in ((exact, simulate(exact, "train-batch")), (scenario, simulate(scenario, OURS, pacing=True))):
        yield {"time": 0.0, "event": "run", "policy": report.policy, "seed": 0, **chosen.facts()}
        yield from report.trace


def _text(s: Scenario, seeds: int, rows: Sequence[dict[str, Any]]) -> str:
    """The table, the bounds, and how far the paced policy is from them."""
    runs = f"mean of {seeds} runs" if seeds > 1 else "one run"
    lines = [
        f"{s.name}: train batches of {s.groups} groups of {s.group_size} responses in {s.mini_batches} mini-batches,",
        f"{s.slots} slots, slack {s.slack}; {s.batches} train batches after {s.warmup} others, {runs}.",
        "",
    ]
    table = [list(COLUMNS)]
    for row in rows:
        table.append([format(row[key], form) for key, form in COLUMNS.values()])
    widths = [max(len(cells[i]) for cells in table) for i in range(len(COLUMNS))]
    for cells in table:
        name, *numbers = zip(cells, widths, strict=True)
        lines.append("  ".join([name[0].ljust(name[1]), *(cell.rjust(width) for cell, width in numbers)]))
    by_slots, by_minis = s.bounds
    trainer = s.train_seconds * s.mini_batches >= s.rollout_seconds
    lines += [
        "",
        "Staleness, p99 and max are in train batches. Reductions of mean staleness are against the first row: "
        "train-batch",
        "admission with exact quotas, launched in the order of the mix, as early as slots and launch_ahead="
        f"{s.launch_ahead} allow.",
        "Token mean: by the mean version over a response's life, not the one it started with. The cycle is the time of",
        "a train batch. Violations: train batches off their quotas; dead ends: runs that could not go on. Colocated:",
        "rollout and training in turn; unchecked: mini-batches by age, no quotas; paced: launched just in time.",
        f"Bounds: C/B = {by_slots:.4f} while no slot is idle, 1/M = {by_minis:.4f} while the trainer never is; the "
        f"{'trainer is' if trainer else 'slots are'} the bottleneck.",
        f"Estimate for whole groups launched in a steady order: {s.estimate():.4f}.",
        _distance(s, next(row for row in rows if row["policy"] == PACED)),
    ]
    return "\n".join(lines)


def _distance(s: Scenario, row: dict[str, Any]) -> str:
    value, estimate = row["staleness"], s.estimate()
    if not math.isfinite(value):
        return f"{PACED}: could not go on."
    parts = [f"{value / bound:.2f} times {name}" for name, bound in zip(("C/B", "1/M"), s.bounds, strict=True) if bound]
    side = "above" if value > estimate else "below"
    parts.append(f"{abs(value / estimate - 1):.0%} {side} the estimate")
    return f"{PACED}: {value:.4f}, that is {', '.join(parts)}."


if __name__ == "__main__":
    sys.exit(main())
