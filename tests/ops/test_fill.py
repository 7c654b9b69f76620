"""knit::fill_slots: the operator against its reference, and the reference against rows laid out one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knit_data.errors import InvalidArgument
from knit_data.ops.fill import BLANK, IGNORE, Spec, fill_slots, fill_slots_reference

OPERATOR = torch.ops.knit.fill_slots.default
KERNELS: dict[str, Callable[..., None]] = {"operator": OPERATOR, "reference": fill_slots_reference}
IDS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
NOISE = 0xA5  # what an arena of unspecified content may hold
GAP = 24  # bytes after every part that nobody may touch


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Callable[..., None]:
    return KERNELS[request.param]


@dataclass
class Case:
    """One micro-batch before it is filled: what is stored, and where everything goes."""

    arena: np.ndarray[Any, Any]
    rows: list[tuple[int, int, int]]
    bounds: list[int]
    columns: list[tuple[int, int]]
    spec: Spec

    def part(self, name: str, arena: np.ndarray[Any, Any] | None = None) -> np.ndarray[Any, Any]:
        kinds = {"ids": IDS[self.spec.ids_bytes], "loss": np.float32, "rows": np.int32, "masks": np.uint8}
        dtype = np.dtype(kinds.get(name, np.int64))
        at = getattr(self.spec, name)
        return (self.arena if arena is None else arena)[at : at + self.spec.total * dtype.itemsize].view(dtype)

    def run(self, kernel: Callable[..., None]) -> np.ndarray[Any, Any]:
        arena = aligned(self.arena)
        kernel(torch.from_numpy(arena), *self.tensors())
        return arena

    def tensors(self) -> list[Tensor]:
        tables = [torch.tensor(table, dtype=torch.int64) for table in (self.rows, self.bounds, self.columns)]
        return [*tables, torch.tensor(self.spec, dtype=torch.int64)]


def aligned(content: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    raw = np.empty(len(content) + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    raw[skip : skip + len(content)] = content
    return raw[skip : skip + len(content)]


def case(
    extents: Sequence[int],
    rows: Sequence[tuple[int, int]],
    *,
    tail: int = 0,
    ids_bytes: int = 8,
    pad: int = 0,
    sizes: Sequence[int] = (),
    packed: bool = True,
    positions: bool = True,
    attention: bool = False,
    masks: bool = True,
    seed: int = 0,
) -> Case:
    """Rows of (tokens, kind of mask), each at the begin of its extent; stored bytes at random."""
    total = sum(extents) + tail
    starts = np.cumsum([0, *extents]).tolist()
    bounds = starts if not tail else [*starts, total]
    parts = {"ids": ids_bytes, "masks": masks, "loss": 4, "labels": 8, "rows": 4}
    parts |= {"positions": 8 * positions, "attention": 8 * attention}
    at, size, columns = dict[str, int](), 0, []

    def place(width: int) -> int:
        nonlocal size
        begin, size = size, -(-(size + total * width + GAP) // 8) * 8
        return begin

    for name, width in parts.items():
        at[name] = place(int(width)) if width else -1
    for width in sizes:
        columns.append((place(width), width))
    table = [(start, tokens, kind) for start, (tokens, kind) in zip(starts, rows, strict=False)]
    spec = Spec(total=total, ids_bytes=ids_bytes, pad=pad, packed=packed, **at)
    made = Case(np.full(size, NOISE, np.uint8), table, bounds, columns, spec)
    random = np.random.default_rng(seed)
    for start, tokens, kind in table:
        row = slice(start, start + tokens)
        made.part("ids")[row] = random.integers(0, 100, tokens)
        if kind == 1:
            made.part("masks")[row] = random.choice([0, 1], tokens)
        if kind == 4:
            made.part("loss")[row] = random.choice([0.0, 0.5, -2.0], tokens)
        for begin, width in columns:
            made.arena[begin + start * width : begin + (start + tokens) * width] = random.integers(
                1, 99, tokens * width
            )
    return made


def oracle(given: Case) -> np.ndarray[Any, Any]:
    """Slot by slot, in plain Python."""
    arena, spec, n = given.arena.copy(), given.spec, len(given.rows)
    owner = [next((i for i, (s, t, _) in enumerate(given.rows) if s <= slot < s + t), n) for slot in range(spec.total)]
    loss = []
    for slot, i in enumerate(owner):
        start, _, kind = given.rows[i] if i < n else (0, 0, BLANK)
        stored = {BLANK: lambda _: 0.0, 0: lambda _: 1.0, 1: lambda k: given.part("masks")[k] != 0}
        value = stored.get(kind, lambda k: given.part("loss")[k])(slot)
        loss.append(0.0 if slot == start else float(value))
    blank = [i == n or given.rows[i][2] == BLANK for i in owner]
    for slot, i in enumerate(owner):
        given.part("rows", arena)[slot] = i
        given.part("loss", arena)[slot] = loss[slot]
        if blank[slot]:
            given.part("ids", arena)[slot] = spec.pad
            for at, size in given.columns:
                arena[at + slot * size : at + (slot + 1) * size] = 0
        if spec.attention >= 0:
            given.part("attention", arena)[slot] = i < n
        if spec.positions >= 0:
            first = max(b for b in given.bounds if b <= slot) if spec.packed else given.rows[i][0] if i < n else slot
            given.part("positions", arena)[slot] = slot - first
    for slot, i in enumerate(owner):
        next_is_mine = slot + 1 < spec.total and owner[slot + 1] == i and i < n and loss[slot + 1] != 0
        given.part("labels", arena)[slot] = given.part("ids", arena)[slot + 1] if next_is_mine else IGNORE
    return arena


def same(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], given: Case) -> None:
    names = ["ids", "loss", "labels", "rows", *(n for n in ("positions", "attention") if getattr(given.spec, n) >= 0)]
    for name in names:
        assert given.part(name, got).tolist() == given.part(name, want).tolist(), name
    assert np.array_equal(got, want)  # the columns, and nothing beside them


# -- values -----------------------------------------------------------------------------------------------------------


def test_the_worked_example(kernel: Callable[..., None]) -> None:
    given = case([3, 2], [(3, 0), (2, 0)], tail=1)
    given.part("ids")[:5] = [5, 6, 7, 8, 9]
    arena = given.run(kernel)
    found = {name: given.part(name, arena).tolist() for name in ("ids", "loss", "labels", "rows", "positions")}
    assert found == {
        "ids": [5, 6, 7, 8, 9, 0],
        "loss": [0, 1, 1, 0, 1, 0],
        "labels": [6, 7, -100, 9, -100, -100],
        "rows": [0, 0, 0, 1, 1, 2],
        "positions": [0, 1, 2, 0, 1, 0],
    }


@st.composite
def cases(draw: st.DrawFn) -> Case:
    packed, masks = draw(st.booleans()), draw(st.booleans())
    rows = draw(
        st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0, 4, BLANK, *([1] if masks else [])])), max_size=6)
    )
    extents = [tokens + draw(st.integers(0, 4)) for tokens, _ in rows] or [draw(st.integers(0, 3))]
    tail = draw(st.integers(0, 5))
    if not packed:
        extents, tail = [max(extents)] * len(extents), 0
    return case(
        extents,
        rows,
        tail=tail,
        ids_bytes=draw(st.sampled_from([1, 2, 4, 8])),
        pad=draw(st.integers(0, 120)),
        sizes=draw(st.lists(st.sampled_from([0, 1, 2, 6, 24]), max_size=3)),
        packed=packed,
        positions=draw(st.booleans()),
        attention=draw(st.booleans()),
        masks=masks,
        seed=draw(st.integers(0, 999)),
    )


@settings(max_examples=150)
@given(given=cases())
def test_any_micro_batch_equals_the_plain_loop(given: Case) -> None:
    want = oracle(given)
    for kernel in KERNELS.values():
        same(given.run(kernel), want, given)


@pytest.mark.parametrize("ids_bytes", IDS)
def test_ids_of_every_width_keep_their_largest_value(kernel: Callable[..., None], ids_bytes: int) -> None:
    most = int(np.iinfo(IDS[ids_bytes]).max)
    given = case([4], [(3, 0)], ids_bytes=ids_bytes, pad=most)
    given.part("ids")[:3] = [most, most - 1, most]
    arena = given.run(kernel)
    assert given.part("labels", arena).tolist() == [most - 1, most, IGNORE, IGNORE]
    assert given.part("ids", arena).tolist() == [most, most - 1, most, most]


def test_many_rows(kernel: Callable[..., None]) -> None:
    """As large as a micro-batch gets, where an index of 16 bits would not do."""
    random = np.random.default_rng(1)
    rows = [(int(n), int(kind)) for n, kind in zip(random.integers(1, 400, 400), random.choice([0, 1, 4, -1], 400))]  # noqa: B905
    given = case([n + 3 for n, _ in rows], rows, tail=77, sizes=[2, 8], attention=True)
    assert given.spec.total > 1 << 16
    same(given.run(kernel), given.run(fill_slots_reference if kernel is OPERATOR else OPERATOR), given)


# -- refusals ---------------------------------------------------------------------------------------------------------

TOP = 2**63 - 1


def example() -> Case:
    return case([4, 4], [(3, 1), (4, 0)], sizes=[2], attention=True)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ids_bytes": 3}, r"8 slots of ids of 3 bytes in an arena of \d+"),
        ({"ids_bytes": 0}, r"8 slots of ids of 0 bytes in an arena of \d+"),
        ({"total": -1}, r"-1 slots of ids of 8 bytes in an arena of \d+"),
        ({"total": TOP}, rf"{TOP} slots of ids of 8 bytes in an arena of \d+"),
        ({"total": 100}, r"ids at \d+: 100 times 8 bytes do not lie aligned in an arena of \d+"),
        *[
            ({name: at}, rf"{name} at {at}: 8 times {size} bytes do not lie aligned in an arena of \d+")
            for name, size in (("ids", 8), ("loss", 4), ("labels", 8), ("rows", 4), ("positions", 8), ("attention", 8))
            for at in (-8, 2, 1 << 20, TOP - 7)
        ],
        ({"masks": -2}, r"masks at -2: 8 times 1 bytes do not lie aligned in an arena of \d+"),
        ({"masks": TOP}, rf"masks at {TOP}: 8 times 1 bytes do not lie aligned in an arena of \d+"),
        ({"loss": -1}, r"loss at -1: "),
        ({"masks": -1}, r"row 0 has a mask of kind 1"),
    ],
)
def test_a_bad_spec_is_refused_with_its_values(change: dict[str, int], text: str) -> None:
    given = example()
    given.spec = given.spec._replace(**change)
    refused(given, text)


@pytest.mark.parametrize(
    ("table", "value", "text"),
    [
        ("rows", [(0, 3, 0), (2, 4, 0)], r"row 1 has 4 tokens from slot 2 on, after 3 of 8"),
        ("rows", [(0, -1, 0)], r"row 0 has -1 tokens from slot 0 on, after 0 of 8"),
        ("rows", [(-1, 1, 0)], r"row 0 has 1 tokens from slot -1 on, after 0 of 8"),
        ("rows", [(0, 9, 0)], r"row 0 has 9 tokens from slot 0 on, after 0 of 8"),
        ("rows", [(8, TOP, 0)], rf"row 0 has {TOP} tokens from slot 8 on, after 0 of 8"),
        ("rows", [(TOP, 1, 0)], rf"row 0 has 1 tokens from slot {TOP} on, after 0 of 8"),
        ("rows", [(0, 1, 2)], r"row 0 has a mask of kind 2"),
        ("rows", [(0, 1, 0), (1, 1, -2)], r"row 1 has a mask of kind -2"),
        ("bounds", [0, 9], r"bounds must rise from 0 to 8, found 0 to 9"),
        ("bounds", [0, 5, 4, 8], r"bounds must rise from 0 to 8, found 5 before 4"),
        ("bounds", [-1, 8], r"bounds must rise from 0 to 8, found -1 to 8"),
        ("columns", [(0, -1)], r"column 0 at 0: 8 times -1 bytes do not lie in an arena of \d+"),
        ("columns", [(0, 1), (-1, 1)], r"column 1 at -1: 8 times 1 bytes do not lie in an arena of \d+"),
        ("columns", [(0, 1 << 40)], rf"column 0 at 0: 8 times {1 << 40} bytes do not lie in an arena of \d+"),
        ("columns", [(TOP, TOP)], rf"column 0 at {TOP}: 8 times {TOP} bytes do not lie in an arena of \d+"),
    ],
)
def test_bad_tables_are_refused_with_their_values(table: str, value: Any, text: str) -> None:
    given = example()
    setattr(given, table, value)
    refused(given, text)


def refused(given: Case, text: str) -> None:
    """By all three, in the same words where the words are ours, and nothing was written."""
    rows, columns = (np.array(t, np.int64).reshape(-1, k) for t, k in ((given.rows, 3), (given.columns, 2)))
    arena = aligned(given.arena)
    with pytest.raises(InvalidArgument, match=f"^fill_slots: {text}"):
        fill_slots(torch.from_numpy(arena), rows, np.array(given.bounds, np.int64), columns, given.spec)
    with pytest.raises(InvalidArgument, match=f"^fill_slots: {text}"):
        fill_slots_reference(torch.from_numpy(arena), *given.tensors())
    with pytest.raises((RuntimeError, InvalidArgument), match=f"fill_slots: {text}"):
        OPERATOR(torch.from_numpy(arena), *given.tensors())
    assert np.array_equal(arena, given.arena)


@pytest.mark.parametrize("rows", [[], [(3, 1), (4, 0)]], ids=len)
def test_opcheck(rows: list[tuple[int, int]]) -> None:
    given = case([4, 4], rows, sizes=[2])
    torch.library.opcheck(OPERATOR, (torch.from_numpy(aligned(given.arena)), *given.tensors()))
