"""From rows as they arrive to complete groups, or to a named reason why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from knit_data.errors import InvalidArgument, InvalidGroup
from knit_data.infos import InfoTable, TrajectoryInfo, parse_attributes
from knit_data.quotas import Combination
from knit_data.trajectory import PER_TOKEN, RESERVED

# Reasons that end a group; counted in groups.
ENDS = ("stale", "abandoned", "invalid", "oversize", "filtered", "no_loss_tokens")
# Reasons of rows beside a whole group: the same again, the same id with other content, members too many, members of
# a group that is trained or dropped already; counted in trajectories.
EXTRAS = ("duplicate", "conflict", "surplus", "late")
REASONS = ENDS + EXTRAS  # statistics have all of them, always

Keep = Callable[[list[TrajectoryInfo]], bool]
Annotate = Callable[[list[TrajectoryInfo]], Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class GroupPolicy:
    """What to do with groups that are not plainly fine.

    ``invalid`` (wrong size, an id with two contents, a missing or unquoted attribute) and ``oversize`` (a member
    above ``max_tokens``): "error" raises on every rank, "drop" drops the whole group and counts it; oversize "alone"
    keeps it, each long trajectory in a micro-batch of its own; "truncate" keeps the first ``max_tokens`` tokens, fewer
    where a medium would be cut. ``surplus``: of more than ``group_size`` members the
    "first" are kept, or "error". ``keep(infos) -> bool`` filters complete groups, ``annotate(infos) -> {name: [one
    float per member]}`` adds values at admission; both must be pure, a resume calls them again.
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
            "incomplete": ("wait",),
            "invalid": ("error", "drop"),
            "surplus": ("first", "error"),
            "oversize": ("error", "drop", "alone", "truncate"),
        }
        for name, choices in allowed.items():
            if getattr(self, name) not in choices:
                raise InvalidArgument(f"GroupPolicy {name}={getattr(self, name)!r}: this version has {choices}.")
        if self.timeout is not None:
            raise InvalidArgument(f"GroupPolicy timeout={self.timeout!r} needs incomplete='drop'; leave it None.")
        limit = self.max_tokens
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 2):
            raise InvalidArgument(f"GroupPolicy max_tokens must be None or an int of at least 2, found {limit!r}.")
        for name in ("keep", "annotate"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise InvalidArgument(f"GroupPolicy {name} must be None or a callable, found {getattr(self, name)!r}.")


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


@dataclass(frozen=True, eq=False)
class Group:
    """A complete group: the members' rows, and what admission needs of them."""

    name: str
    table: InfoTable
    combination: Combination
    version: int  # of its oldest member
    mark: int  # fingerprint of its content

    @property
    def key(self) -> int:
        return name_key(self.name)

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Oldest version first; ties by place, which no arrival order can change."""
        return self.version, *_by_place(self.table[0])


@dataclass(frozen=True, eq=False)
class Dropped:
    """Rows that will not be trained, and why. ``name``: the group that ends with them. None: these are extra rows of
    a group that has, or had, a life of its own (EXTRAS)."""

    reason: str
    table: InfoTable
    name: str | None = None

    @property
    def count(self) -> int:
        """A reason that ends groups counts groups, a reason of EXTRAS counts trajectories."""
        return len(self.table) if self.name is None else 1


@dataclass(frozen=True)
class Terms:
    """What a group must be, from the sampler's arguments."""

    group_size: int | None
    attributes: tuple[str, ...]
    known: Callable[[Combination], bool]
    policy: GroupPolicy
    whole_only: bool  # without a staleness bound, only groups that put_group wrote can be told from repeats


@dataclass(eq=False)
class Assembler:
    """Collects rows into groups. Deterministic: outcomes follow from the rows and their order alone."""

    terms: Terms
    max_tokens: int | None = None
    _open: dict[str, list[InfoTable]] = field(default_factory=dict)
    _dead: dict[str, str] = field(default_factory=dict)  # groups dropped while incomplete, with the reason

    @property
    def incomplete(self) -> Mapping[str, Sequence[InfoTable]]:
        return self._open

    def offer(self, table: InfoTable) -> list[Group | Dropped]:
        """Rows of one put, all or what is left of them. Raises InvalidGroup where the policy says "error"."""
        if self.terms.group_size == 1:
            return [out for i in range(len(table)) for out in self._complete(table[i].id, table.take(np.array([i])))]
        name = table[0].group
        if name in self._dead:
            return [Dropped("late", table)]
        if table.columns["group_rows"][0]:
            return self._whole(name, table)
        if self.terms.group_size is None or self.terms.whole_only:
            return self._invalid(name, table, _not_whole(table, self.terms.group_size))
        return self._join(name, table)

    def _whole(self, name: str, table: InfoTable) -> list[Group | Dropped]:
        policy, found = self.terms.policy, len(table)
        size = self.terms.group_size or found
        if found < size:
            text = f"{_who(table)} has {found} members, group_size is {size}; write whole groups, or change group_size."
            out = self._invalid(name, table, text)
        elif found > size:
            _check_surplus(policy, table[size], size)
            out = self._complete(name, table.take(np.arange(size)))
            out.append(Dropped("surplus", table.take(np.arange(size, found))))
        else:
            out = self._complete(name, table)
        if name in self._open:  # lone rows came before the group was written as a whole
            lone = InfoTable.concat(self._open.pop(name))
            out += extras(out[0], lone, policy) if isinstance(out[0], Group) else [Dropped("late", lone)]
        return out

    def _join(self, name: str, row: InfoTable) -> list[Group | Dropped]:
        """One lone row: wait for its siblings."""
        members = self._open.setdefault(name, [])
        for other in members:
            if other[0].id != row[0].id:
                continue
            if other.fingerprints() == row.fingerprints():
                return [Dropped("duplicate", row)]
            return self._abandon(name, row, _two_contents(other, row))
        if (limit := self.max_tokens) is not None and row[0].n_tokens > limit and self._oversize_acts():
            return self._abandon(name, row, _too_long(row, 0, limit), reason="oversize")
        members.append(row)
        if len(members) < (self.terms.group_size or 0):
            return []
        del self._open[name]
        return self._complete(name, InfoTable.concat(sorted(members, key=lambda t: _by_place(t[0]))))

    def _complete(self, name: str, table: InfoTable) -> list[Group | Dropped]:
        limit, lengths = self.max_tokens, table.columns["n_tokens"]
        if limit is not None and int(lengths.max()) > limit and self._oversize_acts():
            text = _too_long(table, int(lengths.argmax()), limit)
            return self._invalid(name, table, text, reason="oversize", policy=self.terms.policy.oversize)
        texts = set(table.ragged["attributes"].texts())
        if len(texts) > 1:
            return self._invalid(
                name, table, f"group {name!r} mixes attributes {sorted(texts)}; members of a group have the same."
            )
        attributes = parse_attributes(texts.pop())
        missing = [a for a in self.terms.attributes if a not in attributes]
        combination = tuple(attributes.get(a, "") for a in self.terms.attributes)
        if missing or not self.terms.known(combination):
            found = "has no" if missing else f"has {combination[0]!r} as"
            what = missing[0] if missing else self.terms.attributes[0]
            return self._invalid(
                name,
                table,
                f"{_who(table)} {found} attribute {what!r}, which the quotas count; its "
                f"attributes are {dict(attributes)}. Set it at put, add a quota for it, or drop with invalid='drop'.",
            )
        if not table.columns["loss_tokens"].any():
            return [Dropped("no_loss_tokens", table, name)]
        if self.terms.policy.keep is not None and not self._kept(name, table):
            return [Dropped("filtered", table, name)]
        version = int(table.columns["policy_version"].min())
        return [Group(name, table, combination, version, group_mark(table))]

    def _kept(self, name: str, table: InfoTable) -> bool:
        found = self.terms.policy.keep(table.infos()) if self.terms.policy.keep is not None else True
        if not isinstance(found, bool | np.bool_):
            raise InvalidGroup(f"keep gave {found!r} for group {name!r}; it returns True or False.")
        return bool(found)

    def _oversize_acts(self) -> bool:
        return self.terms.policy.oversize != "alone"

    def _abandon(self, name: str, row: InfoTable, text: str, reason: str = "invalid") -> list[Group | Dropped]:
        """An incomplete group that cannot become valid: it leaves whole, members still to come included."""
        policy = self.terms.policy.oversize if reason == "oversize" else None
        table = InfoTable.concat([*self._open.pop(name), row])
        out = self._invalid(name, table, text, reason=reason, policy=policy)
        self._dead[name] = reason
        return out

    def _invalid(
        self, name: str, table: InfoTable, text: str, reason: str = "invalid", policy: str | None = None
    ) -> list[Group | Dropped]:
        if (policy or self.terms.policy.invalid) == "error":
            raise InvalidGroup(text)
        return [Dropped(reason, table, name)]


def annotated(group: Group, annotate: Annotate | None) -> InfoTable:
    """The group's rows with the annotation's values added."""
    if annotate is None:
        return group.table
    added = annotate(group.table.infos())
    if not isinstance(added, Mapping):
        raise InvalidGroup(f"annotate gave {added!r} for group {group.name!r}; it returns {{name: [one float each]}}.")
    taken = {*group.table.schema.names, *group.table.value_names, *RESERVED, *PER_TOKEN}
    for name, values in added.items():
        if name in taken:
            raise InvalidArgument(f"annotate adds {name!r}, which is a stored value or column; choose another name.")
        if not _one_float_each(values, len(group.table)):
            raise InvalidGroup(
                f"annotate gave {name!r} = {values!r} for group {group.name!r} of {len(group.table)} members; it must "
                "return one finite float (float32) per member."
            )
    return group.table.with_values(added)


def extras(group: Group, rows: InfoTable, policy: GroupPolicy) -> list[Group | Dropped]:
    """What becomes of lone rows of a group that is complete without them."""
    known = dict(zip(group.table.ragged["id"].texts(), group.table.fingerprints(), strict=True))
    found: dict[str, list[int]] = {}
    for i, (name, mark) in enumerate(zip(rows.ragged["id"].texts(), rows.fingerprints(), strict=True)):
        reason = "surplus" if name not in known else "duplicate" if known[name] == mark else "conflict"
        if reason == "conflict" and policy.invalid == "error":
            first = next(row for row in range(len(group.table)) if group.table[row].id == name)
            raise InvalidGroup(_two_contents(group.table.take(np.array([first])), rows.take(np.array([i]))))
        if reason == "surplus":
            _check_surplus(policy, rows[i], len(known))
        found.setdefault(reason, []).append(i)
    return [Dropped(reason, rows.take(np.array(at))) for reason, at in found.items()]


def name_key(name: str) -> int:
    """A group's name in 8 bytes, for remembering it."""
    return xxhash.xxh3_64_intdigest(name.encode())


def conflict(name: str, table: InfoTable, writer: int, segment: int) -> str:
    """What to say of a group that came before with other content."""
    return (
        f"group {name!r} of trajectory {table[0].id!r} stands in segment {segment} of writer {writer} and, with other "
        f"content, in {_place(table)}; ids are unique in a store. Give regenerated groups new ids."
    )


def group_mark(table: InfoTable) -> int:
    """64 bits over the members' ids and content, in whatever order they stand."""
    marks = sorted(zip(table.ragged["id"].texts(), table.fingerprints(), strict=True))
    return xxhash.xxh3_64_intdigest(repr(marks).encode())


def _check_surplus(policy: GroupPolicy, info: TrajectoryInfo, size: int) -> None:
    if policy.surplus == "error":
        raise InvalidGroup(
            f"trajectory {info.id!r} is a member too many of group {info.group!r}: group_size is {size}. Write that "
            "many, change group_size, or choose GroupPolicy(surplus='first')."
        )


def _one_float_each(values: Sequence[float], count: int) -> bool:
    try:
        with np.errstate(over="ignore"):  # beyond float32 is infinite, which is not finite
            cells = np.asarray(values, np.float32)
    except (TypeError, ValueError):
        return False
    return cells.shape == (count,) and bool(np.isfinite(cells).all())


def _by_place(info: TrajectoryInfo) -> tuple[int, int, int]:
    writer, segment, item = info.address
    return segment, writer, item


def _who(table: InfoTable) -> str:
    return f"group {table[0].group!r} of trajectory {table[0].id!r}"


def _not_whole(table: InfoTable, size: int | None) -> str:
    text = f"{_who(table)} was not written by one put_group"
    if size is None:
        return text + ", and group_size=None takes what put_group wrote. Use put_group."
    return (
        text + ", and without max_staleness repeats of lone puts cannot be recognised. Use put_group, or set "
        f"max_staleness (group_size is {size})."
    )


def _place(table: InfoTable) -> str:
    writer, segment, _ = table[0].address
    return f"segment {segment} of writer {writer}"


def _two_contents(first: InfoTable, second: InfoTable) -> str:
    return (
        f"trajectory {first[0].id!r} stands in {_place(first)} and, with other content, in {_place(second)}; ids are "
        "unique in a store. Give regenerated trajectories new ids."
    )


def _too_long(table: InfoTable, row: int, limit: int) -> str:
    info = table[row]
    return (
        f"trajectory {info.id!r} of group {info.group!r} has {info.n_tokens} tokens, the limit is {limit}. Raise "
        "max_tokens_per_micro_batch, or choose GroupPolicy(oversize=) 'drop', 'alone' or 'truncate'."
    )
