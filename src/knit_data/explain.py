"""Why the trainer waits, in one sentence. Pure: counts in, text out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from knit_data.admission import Admission, C
from knit_data.quotas import Combination
from knit_data.seats import Line


@dataclass(frozen=True)
class Around:
    """What is known beside the admission; groups by combination of quota attributes."""

    incomplete: Mapping[Combination, int] = field(default_factory=dict)
    in_flight: Mapping[Combination, int] | None = None  # launched, and nothing of it was read; None: nobody says
    held: Mapping[Combination, int] = field(default_factory=dict)  # in flight, and seats are kept for them
    gone: Mapping[tuple[Combination, str], int] = field(default_factory=dict)  # dropped from the open train batch
    dropped: Mapping[str, int] = field(default_factory=dict)  # in the whole run, by reason
    left_over: int = 0
    ended: bool = False
    kept: int = 0  # of what was dropped, groups whose segments stay until a state is committed
    unpaced: bool = False  # seats should be kept for what is in flight, and nobody says what is


def explain(admission: Admission[C], around: Around) -> str:
    """What the open mini-batch needs, what is there, and first of all what is short."""
    p, sizes = admission.progress, admission.sizes
    if around.ended:
        return f"the stream has ended: {around.left_over} groups are left over."
    if p.epoch:
        return f"train batch {p.train_batch}, pass {p.epoch + 1}: trains groups that are there already."
    seats = admission.seats.fresh()  # asking the live ones moves them
    waiting = Counter(group.combination for group in list(admission.waiting.values()))  # a thread may be admitting
    lines = sorted(seats.lines(), key=lambda line: _missing(line, waiting) <= 0)
    short = [f"{n} {line.label}" for line in lines if (n := _missing(line, waiting)) > 0]
    lacking = sizes.mini_batch - sum(n for c, n in waiting.items() if seats.admissible(c))
    if not short and len(admission.quotas.attributes) > 1:  # every quota has enough by itself, but not together
        short = [f"{n - waiting[c]} {'/'.join(c)}" for c, n in seats.completion().items() if n > waiting[c]]
    if not short and lacking > 0:
        short = [f"{lacking} more"]
    parts = [
        f"{line.label} ({line.bounds}: {line.taken} in, {_there(line.counts, waiting, around)}"
        f"{'' if line.left else ', no seat left'})"
        for line in lines
    ]
    text = (
        f"train batch {p.train_batch}, mini-batch {p.position + 1} of {sizes.minis} waits for {sizes.mini_batch} "
        f"groups that fit{', short of ' if short else ''}{', '.join(short)}: "
        f"{'; '.join(parts) or _there(lambda _: True, waiting, around)}; {seats.free()} free of {seats.left} seats left"
    )
    if around.held:
        held = ", ".join(f"{n} {'/'.join(c)}".rstrip() for c, n in sorted(around.held.items()))
        text += f"; seats are kept for {held} in flight, which the next train batch would find too old"
    if around.unpaced:
        text += "; nothing says what is in flight, so that 'wait' keeps no seats: it needs a RolloutPacer"
    if around.dropped:
        text += "; dropped " + ", ".join(f"{n} {reason}" for reason, n in sorted(around.dropped.items()))
    if around.kept:
        text += f", {around.kept} since the last mini-batch, which take room (max_bytes) until a later one is committed"
    return f"{text}; decided by {seats.solver}."


def _missing(line: Line, waiting: Mapping[Combination, int]) -> int:
    """Groups that its minimum still lacks, when all that wait are admitted."""
    return line.bounds.low - line.taken - sum(n for c, n in waiting.items() if line.counts(c))


def _there(counts: Callable[[Combination], bool], waiting: Mapping[Combination, int], around: Around) -> str:
    """Groups on their way to a seat, and those of this train batch that will not get one."""
    cells = [(waiting, "complete"), (around.incomplete, "incomplete")]
    if around.in_flight is not None:
        cells.append((around.in_flight, "in flight"))
    out = [f"{sum(n for c, n in groups.items() if counts(c))} {what}" for groups, what in cells]
    gone: Counter[str] = Counter()
    for (combination, reason), n in around.gone.items():
        if counts(combination):
            gone[reason] += n
    return ", ".join([*out, *(f"{n} dropped as {reason}" for reason, n in sorted(gone.items()))])
