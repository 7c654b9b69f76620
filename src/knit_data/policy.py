"""What the user decides about groups: the policy, and the calls of their own functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from knit_data.errors import InvalidArgument, InvalidGroup
from knit_data.infos import InfoTable, TrajectoryInfo
from knit_data.trajectory import PER_TOKEN, RESERVED

_CHECKED = 16  # groups for which a function of the user's is called twice

Keep = Callable[[list[TrajectoryInfo]], bool]
Annotate = Callable[[list[TrajectoryInfo]], Mapping[str, Sequence[float]]]
T = TypeVar("T")


@dataclass(frozen=True)
class GroupPolicy:
    """What to do with groups that are not plainly fine.

    ``incomplete``: a group of lone puts may "wait" for its members until the staleness bound excludes it, or "drop"
    whole and counted ``timeout`` seconds after its newest member was read; a resume starts these seconds anew.

    ``invalid`` (wrong size, an id with two contents, a missing or unquoted attribute) and ``oversize`` (a member
    above ``max_tokens``): "error" raises on every rank, "drop" drops the whole group and counts it; oversize "alone"
    keeps it, each long trajectory in a micro-batch of its own; "truncate" keeps the first ``max_tokens`` tokens, fewer
    where a medium would be cut.

    ``surplus``: of more than ``group_size`` members the "first" are kept, the others counted, or "error". First are,
    of ``put_group``, those that stand first in the list; of lone puts, those that were read first when the group
    became complete. These are the fast ones: over-sampling with lone puts favours short responses. Choose yourself,
    and write the chosen with ``put_group``, to avoid that.

    ``keep(infos) -> bool`` filters complete groups when they come, ``annotate(infos) -> {name: [one float per
    member]}`` adds values at admission, which later passes keep. Both must be pure: a resume calls them again, except
    ``keep`` for groups that it accepted before. Each is called twice on the first 16 groups, to see that it is.
    """

    incomplete: str = "wait"
    timeout: float | None = None
    invalid: str = "error"
    surplus: str = "first"
    keep: Keep | None = None
    annotate: Annotate | None = None
    max_tokens: int | None = None
    oversize: str = "error"

    def __post_init__(self) -> None:
        allowed = {
            "incomplete": ("wait", "drop"),
            "invalid": ("error", "drop"),
            "surplus": ("first", "error"),
            "oversize": ("error", "drop", "alone", "truncate"),
        }
        for name, choices in allowed.items():
            if getattr(self, name) not in choices:
                raise InvalidArgument(f"GroupPolicy {name}={getattr(self, name)!r}: choose one of {choices}.")
        if self.incomplete == "wait" and self.timeout is not None:
            raise InvalidArgument(f"GroupPolicy timeout={self.timeout!r} needs incomplete='drop'; leave it None.")
        if self.incomplete == "drop" and not _seconds(self.timeout):
            raise InvalidArgument(
                f"GroupPolicy incomplete='drop' needs a timeout above 0 seconds, found {self.timeout!r}."
            )
        limit = self.max_tokens
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 2):
            raise InvalidArgument(f"GroupPolicy max_tokens must be None or an int of at least 2, found {limit!r}.")
        for name in ("keep", "annotate"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise InvalidArgument(f"GroupPolicy {name} must be None or a callable, found {getattr(self, name)!r}.")


def _seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def group_advantages(
    infos: Sequence[TrajectoryInfo], reward: str = "reward", name: str = "advantage", eps: float = 1e-6
) -> dict[str, list[float]]:
    """GRPO's group-relative advantage, for ``GroupPolicy(annotate=)``: (r - mean) / (population std + eps).

    Rewards [1, 0, 0, 1]: mean 0.5, std 0.5, advantages [1, -1, -1, 1] (to 2e-6).
    """
    missing = [i.id for i in infos if reward not in i.values]
    if missing:
        raise InvalidGroup(f"trajectory {missing[0]!r} has no value {reward!r}, it has {sorted(infos[0].values)}.")
    rewards = np.array([i.values[reward] for i in infos], np.float64)
    return {name: ((rewards - rewards.mean()) / (rewards.std() + eps)).tolist()}


class Judge:
    """Calls the user's ``keep`` and ``annotate``; what goes wrong in them is told with the group's name."""

    def __init__(self, policy: GroupPolicy) -> None:
        self._keep, self._annotate = policy.keep, policy.annotate
        self._called: dict[str, int] = {}

    def keeps(self, name: str, table: InfoTable) -> bool:
        return self._keep is None or self._answer("keep", self._keep, name, table, _yes_or_no)

    def annotated(self, name: str, table: InfoTable) -> InfoTable:
        """The group's rows with the annotation's values added."""
        if self._annotate is None:
            return table
        return table.with_values(self._answer("annotate", self._annotate, name, table, _floats))

    def _answer(
        self,
        what: str,
        function: Callable[[list[TrajectoryInfo]], Any],
        name: str,
        table: InfoTable,
        read: Callable[[str, InfoTable, Any], T],
    ) -> T:
        self._called[what] = self._called.get(what, 0) + 1
        answers = []
        for _ in range(2 if self._called[what] <= _CHECKED else 1):
            try:
                given = function(table.infos())
            except Exception as e:
                raise InvalidGroup(f"{what} raised {type(e).__name__} for group {name!r}: {e}") from e
            answers.append(read(name, table, given))
        if answers[0] != answers[-1]:
            raise InvalidGroup(
                f"{what} is not pure: for group {name!r} it gave {answers[0]!r}, and called again {answers[-1]!r}. A "
                "resume calls it again; let the answer follow from the infos alone."
            )
        return answers[0]


def _yes_or_no(name: str, _: InfoTable, given: Any) -> bool:
    if not isinstance(given, bool | np.bool_):
        raise InvalidGroup(f"keep gave {given!r} for group {name!r}; it returns True or False.")
    return bool(given)


def _floats(name: str, table: InfoTable, given: Any) -> dict[str, list[float]]:
    if not isinstance(given, Mapping):
        raise InvalidGroup(f"annotate gave {given!r} for group {name!r}; it returns {{name: [one float each]}}.")
    taken = {*table.schema.names, *table.value_names, *RESERVED, *PER_TOKEN}
    out = {}
    for key, values in given.items():
        if key in taken:
            raise InvalidArgument(f"annotate adds {key!r}, which is a stored value or column; choose another name.")
        cells = _one_float_each(values, len(table))
        if cells is None:
            raise InvalidGroup(
                f"annotate gave {key!r} = {values!r} for group {name!r} of {len(table)} members; it must return one "
                "finite float (float32) per member."
            )
        out[key] = cells
    return out


def _one_float_each(values: Any, count: int) -> list[float] | None:
    try:
        with np.errstate(over="ignore"):  # beyond float32 is infinite, which is not finite
            cells = np.asarray(values, np.float32)
    except (TypeError, ValueError):
        return None
    return cells.tolist() if cells.shape == (count,) and np.isfinite(cells).all() else None
