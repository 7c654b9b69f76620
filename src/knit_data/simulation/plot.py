"""Two pictures of a scenario: staleness by policy beside its bounds, and what a paced run has in the system."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from knit_data.errors import InvalidArgument
from knit_data.simulation.compare import PACED
from knit_data.simulation.run import simulate
from knit_data.simulation.scenario import Scenario

_SPAN = 4  # train batches in the time line


def plottable(path: str) -> None:
    """Raises InvalidArgument where matplotlib is missing or does not know the file's kind."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise InvalidArgument("--plot needs matplotlib: pip install matplotlib.") from None
    kinds = FigureCanvasAgg.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in kinds:
        raise InvalidArgument(f"--plot {path}: name it .png, .pdf or .svg.")


def plot(scenario: Scenario, rows: Sequence[dict[str, Any]], path: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1)
    figure.suptitle(
        f"{scenario.name}: {scenario.slots} slots, {scenario.mini_batches} mini-batches, {scenario.responses} "
        "responses a train batch"
    )
    names = [row["policy"] for row in rows][::-1]
    values = [row["staleness"] for row in rows][::-1]
    bars = above.barh(names, values, color=["tab:green" if name == PACED else "tab:gray" for name in names])
    above.bar_label(bars, fmt="%.3f", padding=3)
    for name, bound, style in zip(("C/B", "1/M"), scenario.bounds, ("--", ":"), strict=True):
        above.axvline(bound, color="tab:red", linestyle=style, label=f"{name} = {bound:.3f}")
    above.set(title="Staleness by policy", xlabel="mean staleness, train batches")
    above.margins(x=0.1)
    above.legend(loc="lower right")

    times, counts, publishes = _in_system(simulate(scenario, pacing=True).trace, scenario)
    below.step(times, counts, where="post", color="tab:blue", linewidth=0.8, label="responses in the system")
    for i, time in enumerate(publishes):
        below.axvline(time, color="tab:red", linewidth=0.8, label="" if i else "publish")
    below.axhline(scenario.slots, color="tab:gray", linestyle="--", label=f"{scenario.slots} slots")
    below.set(title=f"Responses started and not yet in training, {PACED}", xlabel="time, seconds", ylabel="responses")
    below.set_xlim(times[0], times[-1])
    below.set_ylim(0, 1.2 * max(*counts, scenario.slots))
    below.legend(loc="upper center", ncols=3)
    figure.savefig(path, dpi=120)


def _in_system(trace: Sequence[dict[str, Any]], s: Scenario) -> tuple[list[float], list[int], list[float]]:
    """Responses that were started and not yet in a training step, over time, from the last warm-up train batch's end
    on for a few train batches; and the publishes among them."""
    started: dict[int, int] = {}
    steps: dict[int, list[int]] = {}
    times, counts, publishes = [0.0], [0], [0.0]
    for row in trace:
        event, change = row["event"], 0
        if event == "start":
            started[row["group"]] = started.get(row["group"], 0) + 1
            change = 1
        elif event == "admission":
            steps.setdefault(row["step"], []).append(row["group"])
        elif event == "step":
            change = -sum(started[group] for group in steps.pop(row["index"]))
        elif event == "drop":
            change = -started[row["group"]]
        elif event == "publish":
            publishes.append(row["time"])
        if change:
            times.append(row["time"])
            counts.append(counts[-1] + change)
    each = 1 if s.publish == "train_batch" else s.mini_batches
    first = publishes[min(s.warmup * each, len(publishes) - 1)]
    last = publishes[min((s.warmup + _SPAN) * each, len(publishes) - 1)]
    inside = [i for i, time in enumerate(times) if first <= time <= last] or [0]
    return [times[i] for i in inside], [counts[i] for i in inside], [t for t in publishes if first <= t <= last]
