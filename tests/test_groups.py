"""From rows as they arrive to complete groups, or to a named reason why not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from makers import group, rows, trajectory

import knit_data as kd
from knit_data.errors import InvalidGroup
from knit_data.groups import Assembler, Dropped, Group, Terms, extras, group_mark
from knit_data.infos import InfoTable
from knit_data.policy import GroupPolicy

Outcome = Group | Dropped
KNOWN = {("math",), ("code",)}


def assembler(
    size: int | None = 2, *, whole_only: bool = False, max_tokens: int | None = None, **policy: Any
) -> Assembler:
    terms = Terms(size, ("source",), KNOWN.__contains__, GroupPolicy(**policy), whole_only)
    return Assembler(terms, max_tokens)


def lone(name: str, writer: int = 0, segment: int = 0, *, of: str = "g", **changes: Any) -> InfoTable:
    return rows([trajectory(name, of, **changes)], writer, segment, grouped=False)


def offered(made: Assembler, tables: Sequence[InfoTable]) -> list[Outcome]:
    return [outcome for table in tables for outcome in made.offer(table)]


def names(table: InfoTable) -> list[str]:
    return table.ragged["id"].texts()


def dropped(outcomes: Sequence[Outcome]) -> list[tuple[str, list[str], str | None]]:
    """Reason, rows and group of everything, when nothing may have become a group."""
    assert all(isinstance(o, Dropped) for o in outcomes)
    return [(o.reason, names(o.table), o.name) for o in outcomes if isinstance(o, Dropped)]


# -- completing --------------------------------------------------------------------------------------------------------


def test_every_order_of_lone_and_group_puts_completes_the_same_groups() -> None:
    tables = [
        lone("a/0", 0, 0, of="a", policy_version=3),
        lone("a/1", 1, 0, of="a", policy_version=2),
        rows(group("b", 2), 1, 1),
        lone("c/0", 1, 2, of="c"),
        lone("c/1", 0, 1, of="c"),
        lone("d/0", 2, 0, of="d"),
    ]
    expected = {
        "a": (["a/0", "a/1"], 2, (2, 0, 0, 0)),
        "b": (["b/0", "b/1"], 0, (0, 1, 1, 0)),
        "c": (["c/1", "c/0"], 0, (0, 1, 0, 0)),
    }
    marks: set[tuple[int, ...]] = set()
    for order in permutations(tables):
        made = assembler()
        found = {g.name: g for g in offered(made, order) if isinstance(g, Group)}
        assert {n: (names(g.table), g.version, g.order) for n, g in found.items()} == expected
        assert list(made.incomplete) == ["d"]
        marks.add(tuple(found[n].mark for n in "abc"))
    assert len(marks) == 1


def test_the_mark_knows_members_by_content_not_by_place() -> None:
    members = group("a", 3)
    mark = group_mark(rows(members))
    assert mark == group_mark(rows(members[::-1], 4, 7)) == group_mark(rows(members, grouped=False))
    assert mark != group_mark(rows(members[:2]))
    assert mark != group_mark(rows([*members[:2], trajectory("a/2", "a", 9)]))
    assert mark != group_mark(rows(group("a", 3, policy_version=1)))
    assert mark != group_mark(rows(group("a", 3, values={"reward": 0.25})))


def test_what_put_group_wrote_is_a_group_when_no_size_is_given() -> None:
    made = assembler(None)
    outcomes = offered(made, [rows(group(f"g{n}", n)) for n in (1, 2, 5)])
    assert [(g.name, len(g.table)) for g in outcomes if isinstance(g, Group)] == [("g1", 1), ("g2", 2), ("g5", 5)]
    with pytest.raises(InvalidGroup, match="'x' of trajectory 'x/0' was not written by one put_group, and group_size="):
        made.offer(lone("x/0", of="x"))


def test_size_one_takes_rows_by_id() -> None:
    made = assembler(1)
    outcomes = offered(made, [rows(group("a", 3)), lone("b/0", of="a")])
    assert [(g.name, names(g.table)) for g in outcomes if isinstance(g, Group)] == [
        (n, [n]) for n in ("a/0", "a/1", "a/2", "b/0")
    ]


def test_lone_rows_need_a_staleness_bound_when_groups_have_several() -> None:
    with pytest.raises(InvalidGroup, match=r"without max_staleness repeats .* set max_staleness .group_size is 2"):
        assembler(whole_only=True).offer(lone("a/0"))
    assert dropped(assembler(whole_only=True, invalid="drop").offer(lone("a/0"))) == [("invalid", ["a/0"], "g")]
    (found,) = assembler(1, whole_only=True).offer(lone("a/0"))
    assert isinstance(found, Group)


def test_what_is_left_of_a_group_put_is_still_a_group() -> None:
    """After a resume, members that were too many have had their fate."""
    (found,) = assembler(whole_only=True).offer(rows(group("a", 4)).take(np.arange(2)))
    assert isinstance(found, Group) and names(found.table) == ["a/0", "a/1"]


# -- identity and size -------------------------------------------------------------------------------------------------


def test_the_same_row_again_is_a_duplicate() -> None:
    made = assembler()
    first, again, last = lone("a/0"), lone("a/0", 1, 5), lone("a/1")
    outcomes = offered(made, [first, again, last])
    assert dropped(outcomes[:1]) == [("duplicate", ["a/0"], None)] and outcomes[0].table is again
    assert isinstance(outcomes[1], Group) and names(outcomes[1].table) == ["a/0", "a/1"]


def test_the_same_id_with_other_content_is_named_with_both_places() -> None:
    made = assembler(3)
    made.offer(lone("a/0", 2, 3))
    with pytest.raises(
        InvalidGroup, match="'a/0' stands in segment 3 of writer 2 and, with other content, in segment 7"
    ):
        made.offer(lone("a/0", 1, 7, n=9))
    made = assembler(3, invalid="drop")
    outcomes = offered(made, [lone("a/1"), lone("a/0", 2, 3), lone("a/0", 1, 7, n=9), lone("a/2")])
    assert dropped(outcomes) == [("invalid", ["a/1", "a/0", "a/0"], "g")]
    assert [names(t) for t in made.incomplete["g"].members] == [["a/2"]], "who remembers names turns it away"


@pytest.mark.parametrize("found", [1, 3])
def test_a_group_too_small(found: int) -> None:
    table = rows(group("a", found))
    with pytest.raises(InvalidGroup, match=f"group 'a' of trajectory 'a/0' has {found} members, group_size is 4"):
        assembler(4).offer(table)
    assert dropped(assembler(4, invalid="drop").offer(table)) == [("invalid", names(table), "a")]


def test_members_too_many() -> None:
    table = rows(group("a", 5))
    kept, rest = assembler().offer(table)
    assert isinstance(kept, Group) and names(kept.table) == ["a/0", "a/1"]
    assert dropped([rest]) == [("surplus", ["a/2", "a/3", "a/4"], None)] and rest.count == 3  # type: ignore[union-attr]
    for invalid in ("error", "drop"):
        with pytest.raises(InvalidGroup, match="'a/2' is a member too many of group 'a': group_size is 2"):
            assembler(surplus="error", invalid=invalid).offer(table)


def test_lone_rows_of_a_group_that_then_comes_whole() -> None:
    whole = group("g", 2)
    made = assembler(3, invalid="drop")
    early = [lone("g/0"), lone("x")]
    kept, *rest = offered(made, [*early, rows([*whole, trajectory("y", "g")], 1)])
    assert isinstance(kept, Group) and names(kept.table) == ["g/0", "g/1", "y"]
    assert dropped(rest) == [("conflict", ["g/0"], None), ("surplus", ["x"], None)]
    assert not made.incomplete


def test_extra_rows_of_a_complete_group() -> None:
    (whole,) = assembler().offer(rows(group("g", 2), 3, 4))
    assert isinstance(whole, Group)
    same, other, new = rows(group("g", 2)[1:]), lone("g/1", 5, 6, n=31), lone("new")
    assert dropped(extras(whole, InfoTable.concat([same, new]), GroupPolicy())) == [
        ("duplicate", ["g/1"], None),
        ("surplus", ["new"], None),
    ]
    with pytest.raises(InvalidGroup, match=r"'g/1' stands in segment 4 of writer 3 and, .* in segment 6 of writer 5"):
        extras(whole, other, GroupPolicy())
    assert dropped(extras(whole, other, GroupPolicy(invalid="drop"))) == [("conflict", ["g/1"], None)]
    with pytest.raises(InvalidGroup, match="'new' is a member too many"):
        extras(whole, new, GroupPolicy(surplus="error"))


@pytest.mark.parametrize("order", [*permutations(range(4))])
def test_of_lone_puts_those_that_were_read_first_are_kept(order: tuple[int, ...]) -> None:
    """Whatever their place: over-sampling with lone puts favours what is fast."""
    tables = [lone(f"a/{i}", i, 9 - i) for i in range(4)]
    made = assembler(3)
    (found,) = offered(made, [tables[i] for i in order[:3]])
    assert isinstance(found, Group)
    assert names(found.table) == [f"a/{i}" for i in sorted(order[:3], reverse=True)], "in order of their place"
    assert dropped(extras(found, tables[order[3]], GroupPolicy())) == [("surplus", [f"a/{order[3]}"], None)]


# -- what never completes ----------------------------------------------------------------------------------------------


def never(version: int) -> str | None:
    return None


def test_a_group_leaves_when_its_newest_member_is_old() -> None:
    made = assembler(3, incomplete="drop", timeout=10.0)
    made.offer(lone("a/0", of="a"), 0.0)
    made.offer(lone("b/0", of="b"), 4.0)
    made.offer(lone("a/1", of="a"), 9.0)
    made.offer(lone("a/0", 1, of="a"), 12.0)  # the same again is no news
    assert made.expire(13.9, never) == []
    assert dropped(made.expire(14.0, never)) == [("incomplete", ["b/0"], "b")]
    assert made.expire(18.9, never) == [] and list(made.incomplete) == ["a"]
    assert dropped(made.expire(19.0, never)) == [("incomplete", ["a/0", "a/1"], "a")] and not made.incomplete


def test_groups_that_wait_do_so_whatever_time_it_is() -> None:
    made = assembler(3)
    made.offer(lone("a/0", of="a"), 0.0)
    assert made.expire(1e9, never) == [] and list(made.incomplete) == ["a"]


@pytest.mark.parametrize("policy", [{}, {"incomplete": "drop", "timeout": 5.0}])
def test_a_member_of_an_excluded_version_ends_its_group_however_new_the_others_are(policy: dict[str, Any]) -> None:
    made = assembler(3, **policy)
    made.offer(lone("a/0", of="a", policy_version=5), 0.0)
    made.offer(lone("b/0", of="b", policy_version=5), 0.0)
    excluded = {3: "stale", 9: "abandoned"}.get
    assert made.expire(0.0, excluded) == []
    made.offer(lone("a/1", of="a", policy_version=3), 0.0)
    made.offer(lone("c/0", of="c", policy_version=9), 0.0)
    assert dropped(made.expire(0.0, excluded)) == [("stale", ["a/0", "a/1"], "a"), ("abandoned", ["c/0"], "c")]
    assert list(made.incomplete) == ["b"]


# -- attributes --------------------------------------------------------------------------------------------------------


def test_mixed_attributes_among_lone_rows() -> None:
    tables = [lone("a/0"), lone("a/1", attributes={"source": "code"})]
    with pytest.raises(InvalidGroup, match="group 'g' mixes attributes"):
        offered(assembler(), tables)
    assert dropped(offered(assembler(invalid="drop"), tables)) == [("invalid", ["a/0", "a/1"], "g")]


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({}, "has no attribute 'source', which the quotas count; its attributes are {}"),
        ({"kind": "x"}, "has no attribute 'source', which the quotas count; its attributes are {'kind': 'x'}"),
        ({"source": "web"}, "has 'web' as attribute 'source', which no quota names"),
    ],
)
def test_attributes_that_no_quota_counts(attributes: dict[str, str], text: str) -> None:
    table = rows(group("a", 2, attributes=attributes))
    with pytest.raises(InvalidGroup) as caught:
        assembler().offer(table)
    assert f"group 'a' of trajectory 'a/0' {text}" in str(caught.value)
    assert dropped(assembler(invalid="drop").offer(table)) == [("invalid", ["a/0", "a/1"], "a")]


def test_every_counted_attribute_is_told_when_one_has_no_quota() -> None:
    terms = Terms(1, ("source", "level"), {("math", "hard")}.__contains__, GroupPolicy(), False)
    with pytest.raises(InvalidGroup, match="has 'math' as attribute 'source' and 'mild' as attribute 'level', which"):
        Assembler(terms).offer(rows(group("a", 1, attributes={"source": "math", "level": "mild"})))


# -- length and worth --------------------------------------------------------------------------------------------------


def test_an_incomplete_group_with_a_long_member_leaves_whole() -> None:
    tables = [lone(f"a/{i}", n=n) for i, n in enumerate((5, 9, 7, 12))]
    made = assembler(4, max_tokens=8, oversize="drop")
    assert dropped(offered(made, tables[:2])) == [("oversize", ["a/0", "a/1"], "g")] and not made.incomplete
    made = assembler(4, max_tokens=8, oversize="drop")
    assert dropped(offered(made, tables[::-1]))[0] == ("oversize", ["a/3"], "g"), "the first row is enough"
    with pytest.raises(InvalidGroup, match=r"'a/1' of group 'g' has 9 tokens, the limit is 8. Raise"):
        offered(assembler(4, max_tokens=8), tables)


def test_a_whole_group_with_a_long_member() -> None:
    table = rows(group("a", lengths=(5, 9, 7, 12)))
    assert dropped(assembler(4, max_tokens=8, oversize="drop").offer(table)) == [("oversize", names(table), "a")]
    with pytest.raises(InvalidGroup, match="'a/3' of group 'a' has 12 tokens, the limit is 8"):
        assembler(4, max_tokens=8).offer(table)
    for limit, policy in ((8, "alone"), (12, "drop"), (None, "drop")):
        (kept,) = assembler(4, max_tokens=limit, oversize=policy).offer(table)
        assert isinstance(kept, Group)


def test_a_member_too_many_may_be_too_long() -> None:
    kept, rest = assembler(2, max_tokens=8).offer(rows(group("a", lengths=(5, 7, 12))))
    assert isinstance(kept, Group) and dropped([rest]) == [("surplus", ["a/2"], None)]


def test_a_group_without_a_loss_token_is_dropped_by_name() -> None:
    def masked(name: str, mask: list[bool]) -> kd.Trajectory:
        tokens = {"input_ids": torch.tensor([5, 6, 7]), "logprobs": torch.zeros(3), "loss_mask": torch.tensor(mask)}
        return trajectory(name, "a", tokens=tokens)

    empty = [masked("a/0", [False, False, False]), masked("a/1", [False, False, False])]
    assert dropped(assembler().offer(rows(empty))) == [("no_loss_tokens", ["a/0", "a/1"], "a")]
    (kept,) = assembler().offer(rows([empty[0], masked("a/1", [False, False, True])]))
    assert isinstance(kept, Group)
