"""knit::gather_segments and its kin: one contract for every implementation, against rows moved and added one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import (
    DTYPES,
    EVERY,
    INTERPRETED,
    LAYOUTS,
    NO_GPU,
    PARAMS,
    SHAPES,
    Implementation,
    examples,
    rows_of,
    tensor_of,
    untouched,
)
from torch import Tensor

from knit_data.errors import InvalidArgument
from knit_data.ops import (
    accumulate_segments,
    accumulate_segments_,
    gather_segments,
    scatter_segments,
    scatter_segments_,
)
from knit_data.ops.tables import SUMS

INTS = (torch.int32, torch.int64)
TOP = 2**63 - 1
Table = list[tuple[int, int, int, int]]


@pytest.fixture(params=PARAMS)
def on(request: pytest.FixtureRequest) -> Iterator[Implementation]:
    one: Implementation = request.param
    with one.serving():
        yield one


def table_of(table: Table, ints: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(table, dtype=ints).view(-1, 4)


def placed_by_hand(base: Sequence[bytes], sources: Sequence[Sequence[bytes]], table: Table) -> list[bytes]:
    out = list(base)
    for source, first, length, place in table:
        for t in range(length):
            out[place + t] = sources[source][first + t]
    return out


def added_by_hand(buffers: Sequence[Tensor], grad: Tensor, table: Table) -> list[Tensor]:
    """A row at a time, in the order of the segments, each addition rounded to the buffer's dtype."""
    out = [buffer.cpu().numpy().copy() for buffer in buffers]
    rows = grad.cpu().to(buffers[0].dtype).numpy()
    for source, first, length, place in table:
        for t in range(length):
            out[source][first + t] = np.add(out[source][first + t], rows[place + t])
    return [torch.from_numpy(one) for one in out]


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[int], Table, int]:
    """Rows of each source, segments in any order with gaps between their places, and the total."""
    rows = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    table, at = [], 0
    for _ in range(draw(st.integers(0, 6))):
        source = draw(st.integers(0, len(rows) - 1))
        first = draw(st.integers(0, rows[source]))
        length = draw(st.integers(0, rows[source] - first))
        at += draw(st.sampled_from([0, 0, 1, 3]))
        table.append((source, first, length, at))
        at += length
    total = at + draw(st.integers(0, 3))
    empty = [(source, first, 0, draw(st.integers(0, total))) for source, first, length, _ in table if not length]
    return rows, draw(st.permutations([one for one in table if one[2]] + empty)), total


@st.composite
def levels(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "shapes": draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3)),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "ints": draw(st.sampled_from(INTS)),
        "seed": draw(st.integers(0, 99)),
    }


# -- copies ------------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(150))
@given(made=tables(), case=levels(), dtype=st.sampled_from(DTYPES))
@pytest.mark.parametrize("one", EVERY, ids=lambda one: one.name)
def test_any_segments_are_moved(one: Implementation, made: Any, case: dict[str, Any], dtype: torch.dtype) -> None:
    moves(one, *made, dtype=dtype, **case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[:4])
def test_segments_of_every_dtype(on: Implementation, dtype: torch.dtype, layout: str) -> None:
    table = [(1, 0, 2, 4), (0, 1, 3, 0), (0, 0, 4, 7), (1, 1, 0, 9), (0, 2, 1, 6)]
    moves(on, [4, 2], table, 12, dtype, [(3,), (8,)], layout, torch.int32, 1)


def moves(
    on: Implementation,
    rows: Sequence[int],
    table: Table,
    total: int,
    dtype: torch.dtype,
    shapes: Sequence[tuple[int, ...]],
    layout: str,
    ints: torch.dtype,
    seed: int,
) -> None:
    segments = table_of(table, ints)
    sources = [
        [tensor_of((n, *shape), dtype, layout, seed + i).to(on.device) for i, n in enumerate(rows)] for shape in shapes
    ]
    bases = [tensor_of((total, *shape), dtype, layout, seed + 9).to(on.device) for shape in shapes]
    with on.serving(), untouched(*bases, *(source for level in sources for source in level)):
        outs = gather_segments(sources, segments, total)
        alone = [gather_segments(level, segments, total) for level in sources]
        copies = [scatter_segments(base, level, segments) for base, level in zip(bases, sources, strict=True)]
    assert isinstance(outs, tuple) and len(outs) == len(shapes)
    for out, one, copy, base, level in zip(outs, alone, copies, bases, sources, strict=True):
        blank = bytes(dtype.itemsize * base.shape[1:].numel())
        rows_there = [rows_of(source) for source in level]
        want = placed_by_hand([blank] * total, rows_there, table)
        assert out.shape == base.shape and out.dtype == dtype and out.is_contiguous()
        assert rows_of(out) == rows_of(one) == want
        want = placed_by_hand(rows_of(base), rows_there, table)
        assert rows_of(copy) == want and copy.is_contiguous()
        with on.serving():
            assert scatter_segments_(base, level, segments) is base
        assert rows_of(base) == want


def test_the_worked_example(on: Implementation) -> None:
    sources = [torch.tensor([10, 11, 12, 13], device=on.device), torch.tensor([14, 15], device=on.device)]
    segments = table_of([(0, 1, 2, 0), (1, 0, 1, 3), (0, 1, 1, 4)])
    assert gather_segments(sources, segments, 5).tolist() == [11, 12, 0, 14, 11]
    assert scatter_segments(torch.full((6,), 9, device=on.device), sources, segments).tolist() == [11, 12, 9, 14, 11, 9]
    grad = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], device=on.device)
    assert [one.tolist() for one in accumulate_segments(grad, segments, [4, 2])] == [[0, 17, 2, 0], [8, 0]]
    assert gather_segments(sources[0], segments[:1], 3).tolist() == [11, 12, 0]  # one source needs no list


# -- sums --------------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(150))
@given(made=tables(), case=levels(), dtype=st.sampled_from(SUMS))
@pytest.mark.parametrize("one", EVERY, ids=lambda one: one.name)
def test_any_segments_are_added_up(one: Implementation, made: Any, case: dict[str, Any], dtype: torch.dtype) -> None:
    adds(one, *made, dtype=dtype, **case)


@pytest.mark.parametrize("dtype", SUMS, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (8,), (2, 1_500)])
def test_sums_of_every_dtype(on: Implementation, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    table = [(0, 0, 5, 7), (0, 2, 1, 6), (0, 1, 3, 0), (1, 0, 2, 4), (1, 3, 0, 9), (1, 1, 3, 12)]
    adds(on, [5, 4], table, 16, dtype, [shape], "plain", torch.int32, 1)


def adds(
    on: Implementation,
    rows: Sequence[int],
    table: Table,
    total: int,
    dtype: torch.dtype,
    shapes: Sequence[tuple[int, ...]],
    layout: str,
    ints: torch.dtype,
    seed: int,
) -> None:
    segments, kind = table_of(table, ints), torch.float64 if dtype == torch.float64 else torch.float32
    grads = [tensor_of((total, *shape), dtype, layout, seed, bits=False).to(on.device) for shape in shapes]
    buffers = [
        [tensor_of((n, *shape), kind, layout, seed + i, bits=False).to(on.device) for i, n in enumerate(rows)]
        for shape in shapes
    ]
    want = [added_by_hand(level, grad, table) for level, grad in zip(buffers, grads, strict=True)]
    blank = [[torch.zeros_like(buffer) for buffer in level] for level in buffers]
    fresh = [added_by_hand(level, grad, table) for level, grad in zip(blank, grads, strict=True)]
    with on.serving(), untouched(*grads):
        sums = accumulate_segments(grads, segments, rows)
        alone = [accumulate_segments(grad, segments, rows) for grad in grads]
        accumulate_segments_(buffers, grads, segments)
    for got, expected in ((sums, fresh), (alone, fresh), (buffers, want)):
        for level, other in zip(got, expected, strict=True):
            assert [one.dtype for one in level] == [kind] * len(rows)
            assert [rows_of(one) for one in level] == [rows_of(one) for one in other]


def test_what_is_not_a_number_or_tiny_is_added_too(on: Implementation) -> None:
    """Subnormal halves are no zeros, and infinities of opposite signs no number."""
    half = torch.tensor([6e-8, -6e-8, 6.1e-5, 65504, float("inf"), float("-inf"), float("nan"), -0.0, 0.0])
    for dtype in SUMS:
        grad = half.to(dtype).to(on.device)
        (got,) = accumulate_segments(torch.stack([grad, grad]), table_of([(0, 0, 1, 1), (0, 0, 1, 0)]), [1])
        want = grad.to(got.dtype)
        assert torch.equal(got[0].isnan(), want.isnan())
        assert torch.equal(got[0].nan_to_num(7), (want + want).nan_to_num(7))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.skipif(INTERPRETED, reason="megabytes take the interpreter seconds")
def test_many_bytes_in_several_threads(on: Implementation, threads: int) -> None:
    """Above what is moved in one piece, and above what goes around the caches; cut where rows overlap."""
    random = np.random.default_rng(threads)
    for hidden, most in ((1, 9_000), (333, 600), (1_111, 1_500)):
        lengths = random.integers(0, most, 9)
        firsts, places = random.integers(0, 100, 9), np.cumsum([5, *(lengths + 3)])
        table = [
            (int(i % 2), *map(int, numbers)) for i, numbers in enumerate(zip(firsts, lengths, places[:-1], strict=True))
        ]
        total, segments = int(places[-1]), table_of(table)
        sources = [torch.randn(most + 100, hidden, dtype=torch.float32, device=on.device) for _ in range(2)]
        grad = torch.randn(total, hidden, device=on.device).bfloat16()
        want, sums = torch.zeros(total, hidden, device=on.device), [torch.zeros_like(source) for source in sources]
        for source, first, length, place in table:
            want[place : place + length] = sources[source][first : first + length]
            sums[source][first : first + length] += grad[place : place + length]
        torch.set_num_threads(threads)
        try:
            got, added = (
                gather_segments(sources, segments, total),
                accumulate_segments(grad, segments, [most + 100] * 2),
            )
            put = scatter_segments(torch.full_like(want, 3.0), sources, segments)
        finally:
            torch.set_num_threads(1)
        assert torch.equal(got, want)
        assert all(map(torch.equal, added, sums))
        covered = gather_segments([torch.ones_like(source) for source in sources], segments, total) == 1
        assert torch.equal(put, torch.where(covered, want, 3.0))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.skipif(INTERPRETED, reason="megabytes take the interpreter seconds")
def test_many_bytes_of_several_levels(on: Implementation, threads: int) -> None:
    """Pieces that end in one result and go on in the next, which lies elsewhere; one level smaller than a piece."""
    segments = table_of([(0, 7, 150, 3), (1, 0, 0, 40), (1, 2, 99, 160)])
    levels = [[torch.randn(200, hidden, device=on.device) for _ in range(2)] for hidden in (1_111, 3, 901, 1, 7, 1_303)]
    torch.set_num_threads(threads)
    try:
        found = gather_segments(levels, segments, 263)
    finally:
        torch.set_num_threads(1)
    for (a, b), out in zip(levels, found, strict=True):
        blank = a.new_zeros(263, a.shape[1])
        blank[3:153], blank[160:259] = a[7:157], b[2:101]
        assert torch.equal(out, blank)


# -- torch -------------------------------------------------------------------------------------------------------------

SEGMENTS = table_of([(0, 1, 3, 0), (1, 0, 2, 4), (0, 0, 5, 7), (0, 2, 1, 6), (1, 3, 0, 9)])


def leaves(on: Implementation, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Sources of 5 and 4 rows, and a base of 13."""
    a, b, base = (torch.randn(n, 3, dtype=dtype, device=on.device, requires_grad=True) for n in (5, 4, 13))
    return a, b, base


def test_gradients_are_exact(on: Implementation) -> None:
    a, b, base = leaves(on)
    if INTERPRETED:  # a program takes milliseconds
        a, b, base = (x[:, :1].detach().requires_grad_() for x in (a, b, base))
    cases: list[tuple[Callable[..., Any], tuple[Tensor, ...]]] = [
        (lambda a, b: gather_segments([a, b], SEGMENTS, 13), (a, b)),
        (lambda base, a, b: scatter_segments(base, [a, b], SEGMENTS), (base, a, b)),
        (lambda base: tuple(accumulate_segments(base, SEGMENTS, [5, 4])), (base,)),
        (lambda a, b: gather_segments([[a, b], [a * b[:1], b * 2]], SEGMENTS, 13), (a, b)),
    ]
    for function, given_ in cases[:3] if INTERPRETED else cases:
        assert torch.autograd.gradcheck(function, given_)
        assert INTERPRETED or torch.autograd.gradgradcheck(function, given_)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_short_floats_are_rounded_once(on: Implementation, dtype: torch.dtype) -> None:
    """24 occurrences of 3 rows: exact on small integers, else within one rounding of the sum in float64.

    The sum is made in float32: its own error, 24 roundings of 2**-24, comes on top of half a unit of the last place.
    """
    segments = table_of([(0, 0, 3, 3 * i) for i in range(24)])
    for exact in (True, False):
        grad = torch.randint(-4, 5, (72, 5)).to(dtype) if exact else torch.randn(72, 5).to(dtype)
        source = torch.zeros(3, 5, dtype=dtype, device=on.device, requires_grad=True)
        gather_segments(source, segments, 72).backward(grad.to(on.device))
        assert source.grad is not None and source.grad.dtype == dtype
        got, want = source.grad.cpu(), grad.double().view(24, 3, 5).sum(0)
        if exact:
            assert torch.equal(got, want.to(dtype))
        else:
            slack = want.abs() * torch.finfo(dtype).eps / 2 + 24 * 2.0**-24 * grad.double().abs().view(24, 3, 5).sum(0)
            assert bool(((got.double() - want).abs() <= slack).all())


def test_nobody_asks_for_gradients_that_do_not_exist(on: Implementation) -> None:
    a, b, base = leaves(on, torch.float32)
    whole = gather_segments([a, b.detach()], SEGMENTS, 13)
    whole.sum().backward()
    assert a.grad is not None and a.grad.tolist() == [[n] * 3 for n in (1, 2, 3, 2, 1)] and b.grad is None
    for call, name in (
        (lambda: scatter_segments_(base, [a, b], SEGMENTS), "scatter_segments"),
        (lambda: accumulate_segments_([a, b], base, SEGMENTS), "accumulate_segments"),
    ):
        with (
            untouched(a, b, base),
            pytest.raises(InvalidArgument, match=f"^{name}_ writes in place and has no gradient; call {name}, or"),
        ):
            call()
    with torch.no_grad():
        scatter_segments_(base, [a, b], SEGMENTS)
        accumulate_segments_([a, b], base, SEGMENTS)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch 2.14's own, of copies that it makes
@pytest.mark.skipif(INTERPRETED, reason="it follows the registered kernels")
def test_opcheck() -> None:
    ops, check = torch.ops.knit, torch.library.opcheck
    a, b, base = (x.detach() for x in leaves(Implementation("extension"), torch.float32))
    for arguments in (
        (ops.scatter_segments_.default, (base.clone(), [a, b], SEGMENTS)),
        (ops.accumulate_segments_.default, ([a.clone(), b.clone()], [base], SEGMENTS)),
        (ops.copy_segments.default, ([base.clone()], [a, b], SEGMENTS, True)),
        (ops.add_segments.default, ([a.clone(), b.clone()], [base], SEGMENTS)),
        (ops.gather_segments.default, ([a, b, a[:, 1:], b[:, 1:]], SEGMENTS[:0].int(), 13, 2)),
    ):
        check(*arguments)
    a, b, base = leaves(Implementation("extension"), torch.float32)
    check(ops.gather_segments.default, ([a, b], SEGMENTS, 13, 1))
    check(ops.scatter_segments.default, (base, [a, b], SEGMENTS))
    check(ops.accumulate_segments.default, ([base], SEGMENTS, [5, 4]))


@pytest.mark.skipif(INTERPRETED, reason="a graph is the same whatever is below")
def test_compiled_whole_with_gradients_and_changing_sizes(on: Implementation) -> None:
    def body(base: Tensor, a: Tensor, b: Tensor, table: Tensor) -> Tensor:
        packed = gather_segments([a.sin(), b], table, base.shape[0])
        sums = accumulate_segments(packed, table, [a.shape[0], b.shape[0]])
        return scatter_segments(base, [sums[0].cos(), b], table) * packed

    torch._dynamo.reset()
    compiled = torch.compile(body, backend="aot_eager", fullgraph=True, dynamic=True)
    for more in (0, 2, 5):
        a, b, base = (torch.randn(n + more, 3 + more, device=on.device, requires_grad=True) for n in (5, 4, 13))
        table = torch.cat([SEGMENTS, SEGMENTS[-1:].expand(more, 4)])
        got, want = (f(base, a, b, table) for f in (compiled, body))
        assert torch.equal(got, want)
        grads = [torch.autograd.grad(out.sum(), (base, a, b)) for out in (got, want)]
        assert all(map(torch.equal, *grads))


@pytest.mark.skipif(INTERPRETED, reason="a graph is the same whatever is below")
def test_in_place_ops_are_compiled_too(on: Implementation) -> None:
    def body(base: Tensor, buffers: list[Tensor], a: Tensor, b: Tensor) -> Tensor:
        scatter_segments_(base, [a, b], SEGMENTS)
        accumulate_segments_(buffers, base * 2, SEGMENTS)
        return base + 1

    torch._dynamo.reset()
    a, b, base = (x.detach() for x in leaves(on, torch.float32))
    results = []
    for function in (body, torch.compile(body, backend="aot_eager", fullgraph=True)):
        there, buffers = base.clone(), [torch.ones_like(a), torch.ones_like(b)]
        results.append([function(there, buffers, a, b), there, *buffers])
    assert all(map(torch.equal, *results))


# -- refusals ----------------------------------------------------------------------------------------------------------

KIND = r"segments must be \[n, 4\] of int32 or int64 on the CPU, found "
BAD: list[tuple[Any, str]] = [
    ([(0, 3, 3, 0)], r"segment 0 moves 3 rows from 3 on of source 0 \(of 5\) to 0 of 13"),
    ([(0, 0, 1, 0), (0, 0, 3, 11)], r"segment 1 moves 3 rows from 0 on of source 0 \(of 5\) to 11 of 13"),
    ([(0, 0, -1, 0)], r"segment 0 moves -1 rows from 0 on of source 0 \(of 5\) to 0 of 13"),
    ([(0, -1, 2, 0)], r"segment 0 moves 2 rows from -1 on of source 0 \(of 5\) to 0 of 13"),
    ([(0, 0, 1, -1)], r"segment 0 moves 1 rows from 0 on of source 0 \(of 5\) to -1 of 13"),
    ([(0, 6, 0, 0)], r"segment 0 moves 0 rows from 6 on of source 0 \(of 5\) to 0 of 13"),
    ([(0, 0, 0, 14)], r"segment 0 moves 0 rows from 0 on of source 0 \(of 5\) to 14 of 13"),
    ([(2, 0, 1, 0)], r"segment 0 moves 1 rows from 0 on of source 2 \(where there are 2 sources\) to 0 of 13"),
    ([(-1, 0, 1, 0)], r"segment 0 moves 1 rows from 0 on of source -1 \(where there are 2 sources\) to 0 of 13"),
    ([(TOP, 0, 0, 0)], rf"segment 0 moves 0 rows from 0 on of source {TOP} \(where there are 2 sources\) to 0 of 13"),
    ([(0, 2**62, 2**62, 0)], rf"segment 0 moves {2**62} rows from {2**62} on of source 0 \(of 5\) to 0 of 13"),
    ([(0, TOP, 1, 0)], rf"segment 0 moves 1 rows from {TOP} on of source 0 \(of 5\) to 0 of 13"),
    ([(0, 1, TOP, 0)], rf"segment 0 moves {TOP} rows from 1 on of source 0 \(of 5\) to 0 of 13"),
    ([(0, 0, 1, TOP)], rf"segment 0 moves 1 rows from 0 on of source 0 \(of 5\) to {TOP} of 13"),
    ([(0, -TOP - 1, 1, 0)], rf"segment 0 moves 1 rows from {-TOP - 1} on of source 0 \(of 5\) to 0 of 13"),
    ([(0, 0, 2, 0), (1, 0, 2, 1)], "segments 0 and 1 overlap from row 1 on"),
    ([(0, 0, 1, 5), (1, 0, 2, 7), (0, 0, 0, 8), (0, 1, 4, 4)], "segments 3 and 0 overlap from row 5 on"),
    ([(0, 0, 1, 3), (1, 0, 1, 3)], "segments 0 and 1 overlap from row 3 on"),
    (torch.ones(1, 4), KIND + r"torch.float32 \[1, 4\] on cpu"),
    (torch.ones(2, 3, dtype=torch.int64), KIND + r"torch.int64 \[2, 3\] on cpu"),
    (torch.ones(4, dtype=torch.int64), KIND + r"torch.int64 \[4\] on cpu"),
    (torch.zeros(0, dtype=torch.int64), KIND + r"torch.int64 \[0\] on cpu"),
    (torch.ones(1, 4, dtype=torch.int16), KIND + r"torch.int16 \[1, 4\] on cpu"),
    (torch.ones(1, 4, dtype=torch.int64, device="meta"), KIND + r"torch.int64 \[1, 4\] on meta"),
]
A, B, BASE = torch.arange(15.0).view(5, 3), torch.arange(12.0).view(4, 3), torch.arange(39.0).view(13, 3)


def table_for(table: Any) -> Tensor:
    return table if isinstance(table, Tensor) else table_of(table)


CALLS: dict[str, Callable[..., Any]] = {
    "gather_segments": lambda a, b, base, table: gather_segments([a, b], table, base.shape[0]),
    "scatter_segments": lambda a, b, base, table: scatter_segments(base, [a, b], table),
    "accumulate_segments": lambda a, b, base, table: accumulate_segments(base, table, [a.shape[0], b.shape[0]]),
    "scatter_segments_": lambda a, b, base, table: scatter_segments_(base, [a, b], table),
    "accumulate_segments_": lambda a, b, base, table: accumulate_segments_([a, b], base, table),
}


@pytest.mark.parametrize(("table", "text"), BAD, ids=lambda value: str(value)[:30])
def test_segments_that_do_not_fit_are_refused_with_their_values(on: Implementation, table: Any, text: str) -> None:
    table = table_for(table)
    for grad in (False, True):
        leaves = [x.clone().to(on.device).requires_grad_(grad) for x in (A, B, BASE)]
        for name, call in CALLS.items():
            if grad and name.endswith("_"):
                continue
            with untouched(*leaves), pytest.raises(InvalidArgument, match=f"^{name.rstrip('_')}: {text}.$"):
                call(*leaves, table)


@pytest.mark.skipif(INTERPRETED, reason="a graph is the same whatever is below")
@pytest.mark.parametrize("name", CALLS)
def test_they_are_refused_in_a_graph_too(name: str) -> None:
    torch._dynamo.reset()
    call = torch.compile(CALLS[name], backend="aot_eager", fullgraph=True, dynamic=True)
    leaves = [x.clone() for x in (A, B, BASE)]
    for table, text in BAD:
        with untouched(*leaves), pytest.raises(InvalidArgument, match=f"^{name.rstrip('_')}: {text}.$"):
            call(*leaves, table_for(table))


@pytest.mark.parametrize(("table", "text"), BAD, ids=lambda value: str(value)[:30])
def test_a_kernel_that_refuses_has_written_nothing(on: Implementation, table: Any, text: str) -> None:
    kernels, (a, b, base) = on.kernels(), (x.to(on.device) for x in (A, B, BASE))
    with untouched(a, b, base):
        for fill in (False, True):
            with pytest.raises((RuntimeError, InvalidArgument), match="segments"):
                kernels["copy_segments"]([base], [a, b], table_for(table), fill)
        with pytest.raises((RuntimeError, InvalidArgument), match="segments"):
            kernels["add_segments"]([a, b], [base], table_for(table))


ONE = table_of([(0, 0, 2, 0)])


def added(buffers: list[Tensor], grads: Any) -> list[Tensor]:
    """Returns them: in a graph, what nobody looks at is not done."""
    accumulate_segments_(buffers, grads, ONE)
    return buffers


MIXED: list[tuple[Callable[..., Any], str]] = [
    (
        lambda a, b, base: gather_segments([a, b.double()], ONE, 13),
        r"gather_segments: sources\[1\] is torch.float64 on",
    ),
    (
        lambda a, b, base: gather_segments([a, b.to("meta")], ONE, 13),
        r"gather_segments: sources\[1\] is torch.float32 on m",
    ),
    (
        lambda a, b, base: gather_segments([a, b[:, :2]], ONE, 13),
        r"gather_segments: source 1 of level 0 has rows \[2\], p",
    ),
    (
        lambda a, b, base: gather_segments([a, b[:, 0]], ONE, 13),
        r"gather_segments: source 1 of level 0 has rows \[\], p",
    ),
    (lambda a, b, base: gather_segments([a, b], ONE, -1), "gather_segments: total must be at least 0, found -1"),
    (
        lambda a, b, base: gather_segments([[a, b], [b, a]], ONE, 13),
        "gather_segments: source 0 has 4 rows in level 1 and 5 in the first",
    ),
    (
        lambda a, b, base: gather_segments([a.to(torch.complex128)], ONE, 13),
        "gather_segments: sources is torch.complex128",
    ),
    (
        lambda a, b, base: gather_segments([a.sum()], ONE, 13),
        "gather_segments: sources must have at least one dimension",
    ),
    (
        lambda a, b, base: scatter_segments(base, [a, b.double()], ONE),
        r"scatter_segments: sources\[1\] is torch.float64 on",
    ),
    (
        lambda a, b, base: scatter_segments(base.double(), [a, b], ONE),
        r"scatter_segments: sources\[0\] is torch.float32 on",
    ),
    (
        lambda a, b, base: scatter_segments(base, [a.to("meta")], ONE),
        "scatter_segments: sources is torch.float32 on meta",
    ),
    (
        lambda a, b, base: scatter_segments(base.to("meta"), [a], ONE),
        r"scatter_segments: sources is torch.float32 on \S+, base",
    ),
    (
        lambda a, b, base: scatter_segments(base.view(13, 3, 1), [a], ONE),
        r"scatter_segments: source 0 of level 0 has rows \[3\], packed are \[3, 1\]",
    ),
    (
        lambda a, b, base: scatter_segments(base[:0], [a[:, :2]], ONE[:0]),
        r"scatter_segments: source 0 of level 0 has rows \[2\], packed are \[3\]",
    ),
    (
        lambda a, b, base: scatter_segments_(base, [a.double()], ONE),
        "scatter_segments: sources is torch.float64 on",
    ),
    (
        lambda a, b, base: added([a, b.double()], base),
        r"accumulate_segments: buffers\[1\] is torch.float64 on \S+, buffers\[0\] is torch.float32 on",
    ),
    (
        lambda a, b, base: added([a.bfloat16()], base.bfloat16()),
        r"accumulate_segments: buffers are torch.bfloat16 on \S+; gradients of torch.bfloat16 on \S+ are summed in",
    ),
    (
        lambda a, b, base: added([a], base.double()),
        r"accumulate_segments: buffers are torch.float32 on \S+; gradients of torch.float64 on \S+ are summed in",
    ),
    (
        lambda a, b, base: added([a], base.to("meta")),
        r"accumulate_segments: buffers are torch.float32 on \S+; gradients of torch.float32 on meta are summed in",
    ),
    (
        lambda a, b, base: accumulate_segments(base.long(), ONE, [5]),
        "accumulate_segments: gradients are torch.int64, they",
    ),
    (
        lambda a, b, base: accumulate_segments(base, ONE, [5, -1]),
        r"accumulate_segments: rows must not be negative, .*-1\]",
    ),
    (
        lambda a, b, base: accumulate_segments([base, base.double()], ONE, [5]),
        r"accumulate_segments: grads\[1\] is torch.float64 on \S+, grads\[0\] is torch.float32 on",
    ),
    (
        lambda a, b, base: accumulate_segments([base, base[1:]], ONE, [5]),
        "accumulate_segments: level 1 has 12 packed rows, the first 13",
    ),
    (
        lambda a, b, base: added([a, b], [base, base, base]),
        "accumulate_segments: 2 sources do not divide into 3 levels",
    ),
]


@pytest.mark.parametrize(("call", "text"), MIXED, ids=[text[:45] for _, text in MIXED])
def test_tensors_that_do_not_go_together_are_refused(on: Implementation, call: Callable[..., Any], text: str) -> None:
    given_ = [x.clone().to(on.device) for x in (A, B, BASE)]
    with untouched(*given_), pytest.raises(InvalidArgument, match=f"^{text}"):
        call(*given_)
    if on.name == "extension":  # the graph is the same for all of them
        torch._dynamo.reset()
        with untouched(*given_), pytest.raises(InvalidArgument, match=f"^{text}"):
            torch.compile(call, backend="aot_eager", fullgraph=True)(*given_)


def test_lists_of_nothing_are_refused() -> None:
    for call, text in (
        (lambda: gather_segments([], ONE, 3), "gather_segments: there are 0 sources for 1 levels"),
        (lambda: gather_segments([[], []], ONE, 3), "gather_segments: there are 0 sources for 2 levels"),
        (
            lambda: gather_segments([[A], [A, B]], ONE, 3),
            r"gather_segments: levels must have the same number of sources, found \[1, 2\]",
        ),
        (lambda: accumulate_segments([], ONE, [3]), "accumulate_segments: 0 sources do not divide into 0 levels"),
        (lambda: accumulate_segments_([A], [], ONE), "accumulate_segments: 1 sources do not divide into 0 levels"),
    ):
        with pytest.raises(InvalidArgument, match=f"^{text}"):
            call()


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@NO_GPU
def test_sums_are_the_same_on_every_run() -> None:
    table = table_of([(0, i % 7, 100 - i % 7, 100 * i) for i in range(64)])
    grad, first = torch.randn(6_400, 1_111, device="cuda").bfloat16(), None
    for _ in range(100):
        (sums,) = accumulate_segments(grad, table, [100])
        first = sums if first is None else first
        assert torch.equal(sums, first)


@pytest.mark.gpu
@NO_GPU
def test_nothing_waits_for_the_device() -> None:
    a, b, base = (x.cuda() for x in (A, B, BASE))

    def work() -> None:
        packed = gather_segments([[a, b], [a, b]], SEGMENTS, 13)[0]
        scatter_segments_(base, [a, b], SEGMENTS)
        accumulate_segments_([a, b], packed, SEGMENTS)

    work()  # compiled before
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert base.is_cuda
