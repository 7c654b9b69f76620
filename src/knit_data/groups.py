"""From rows as they arrive to complete groups, or to a named reason why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from knit_data.errors import InvalidGroup
from knit_data.infos import InfoTable, TrajectoryInfo, parse_attributes
from knit_data.policy import GroupPolicy
from knit_data.quotas import Combination

# Reasons that end a group; counted in groups.
ENDS = ("stale", "abandoned", "incomplete", "invalid", "oversize", "filtered", "no_loss_tokens")
# Reasons of rows beside a whole group: the same again, the same id with other content, members too many, members of
# a group that is trained or dropped already; counted in trajectories.
EXTRAS = ("duplicate", "conflict", "surplus", "late")
REASONS = ENDS + EXTRAS  # statistics have all of them, always


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


def combination_of(attributes: Mapping[str, str], names: Sequence[str]) -> Combination:
    """The values of the attributes that quotas count; a missing one is empty."""
    return tuple(attributes.get(name, "") for name in names)


@dataclass(frozen=True)
class Terms:
    """What a group must be, from the sampler's arguments."""

    group_size: int | None
    attributes: tuple[str, ...]
    known: Callable[[Combination], bool]
    policy: GroupPolicy
    whole_only: bool  # without a staleness bound, only groups that put_group wrote can be told from repeats


@dataclass(eq=False)
class Pending:
    """A group of lone puts that is not complete."""

    members: list[InfoTable]
    version: int  # of its oldest member
    since: float  # when its newest member was read


@dataclass(eq=False)
class Assembler:
    """Collects rows into groups. Outcomes follow from the rows, their order and the times that it is told."""

    terms: Terms
    max_tokens: int | None = None
    _open: dict[str, Pending] = field(default_factory=dict)

    @property
    def incomplete(self) -> Mapping[str, Pending]:
        return self._open

    def offer(self, table: InfoTable, now: float = 0.0) -> list[Group | Dropped]:
        """Rows of one put, all or what is left of them. Raises InvalidGroup where the policy says "error"."""
        if self.terms.group_size == 1:
            return [out for i in range(len(table)) for out in self._complete(table[i].id, table.take(np.array([i])))]
        name = table[0].group
        if table.columns["group_rows"][0]:
            return self._whole(name, table)
        if self.terms.group_size is None or self.terms.whole_only:
            return self._invalid(name, table, _not_whole(table, self.terms.group_size))
        return self._join(name, table, now)

    def late(self, now: float) -> bool:
        """Whether a group has waited too long for its members."""
        timeout = self.terms.policy.timeout
        return timeout is not None and any(now - group.since >= timeout for group in self._open.values())

    def expire(self, now: float, excluded: Callable[[int], str | None]) -> list[Dropped]:
        """Incomplete groups that leave: those of an ``excluded`` version could never be admitted, and would hold their
        writers' cursors for ever; others waited for their members for too long."""
        timeout, out = self.terms.policy.timeout, []
        for name, group in list(self._open.items()):
            reason = excluded(group.version)
            if reason is None and timeout is not None and now - group.since >= timeout:
                reason = "incomplete"
            if reason is not None:
                out.append(Dropped(reason, InfoTable.concat(self._open.pop(name).members), name))
        return out

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
            lone = InfoTable.concat(self._open.pop(name).members)
            out += extras(out[0], lone, policy) if isinstance(out[0], Group) else [Dropped("late", lone)]
        return out

    def _join(self, name: str, row: InfoTable, now: float) -> list[Group | Dropped]:
        """One lone row: wait for its siblings."""
        group, version = self._open.get(name), row[0].policy_version
        for other in group.members if group else ():
            if other[0].id != row[0].id:
                continue
            if other.fingerprints() == row.fingerprints():
                return [Dropped("duplicate", row)]
            return self._abandon(name, row, _two_contents(other, row))
        if (limit := self.max_tokens) is not None and row[0].n_tokens > limit and self._oversize_acts():
            return self._abandon(name, row, _too_long(row, 0, limit), reason="oversize")
        if group is None:
            group = self._open[name] = Pending([row], version, now)  # never without a member: others may be asking
        else:
            group.members.append(row)
            group.version, group.since = min(group.version, version), now
        if len(group.members) < (self.terms.group_size or 0):
            return []
        del self._open[name]
        return self._complete(name, InfoTable.concat(sorted(group.members, key=lambda t: _by_place(t[0]))))

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
        combination = combination_of(attributes, self.terms.attributes)
        if missing or not self.terms.known(combination):
            return self._invalid(name, table, _uncounted(table, missing, self.terms.attributes, combination))
        if not table.columns["loss_tokens"].any():
            return [Dropped("no_loss_tokens", table, name)]
        version = int(table.columns["policy_version"].min())
        return [Group(name, table, combination, version, group_mark(table))]

    def _oversize_acts(self) -> bool:
        return self.terms.policy.oversize != "alone"

    def _abandon(self, name: str, row: InfoTable, text: str, reason: str = "invalid") -> list[Group | Dropped]:
        """An incomplete group that cannot become valid: it leaves whole."""
        policy = self.terms.policy.oversize if reason == "oversize" else None
        group = self._open.pop(name, None)
        table = InfoTable.concat([*(group.members if group else ()), row])
        return self._invalid(name, table, text, reason=reason, policy=policy)

    def _invalid(
        self, name: str, table: InfoTable, text: str, reason: str = "invalid", policy: str | None = None
    ) -> list[Group | Dropped]:
        if (policy or self.terms.policy.invalid) == "error":
            raise InvalidGroup(text)
        return [Dropped(reason, table, name)]


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


def _by_place(info: TrajectoryInfo) -> tuple[int, int, int]:
    writer, segment, item = info.address
    return segment, writer, item


def _who(table: InfoTable) -> str:
    return f"group {table[0].group!r} of trajectory {table[0].id!r}"


def _uncounted(table: InfoTable, missing: Sequence[str], names: Sequence[str], found: Combination) -> str:
    if missing:
        what = f"has no attribute {missing[0]!r}"
    else:
        what = "has " + " and ".join(
            f"{value!r} as attribute {name!r}" for name, value in zip(names, found, strict=True)
        )
    why = "which the quotas count" if missing else "which no quota names or no supported combination has"
    return (
        f"{_who(table)} {what}, {why}; its attributes are {dict(table[0].attributes)}. Set it at put, add it to the "
        "quotas or their support, or drop such groups with invalid='drop'."
    )


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
