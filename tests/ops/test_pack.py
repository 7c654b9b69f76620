"""knit::pack and knit::unpack: one contract for every implementation, against rows moved one by one in Python."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

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
    bits_of_value,
    examples,
    rows_of,
    tensor_of,
    untouched,
)
from torch import Tensor

from knit_data.errors import InvalidArgument
from knit_data.ops import pack, unpack

INTS = (torch.int32, torch.int64)
TOP = 2**63 - 1
PADS: dict[torch.dtype, Sequence[Any]] = {
    torch.bool: (False, True),
    torch.uint8: (0, 255),
    torch.int64: (0, -100, 2**53),
    torch.complex64: (0.0, -2.5),
}
REALS = (0.0, -0.0, -100.0, 1.0, float("nan"), float("-inf"))


@pytest.fixture(params=PARAMS)
def on(request: pytest.FixtureRequest) -> Iterator[Implementation]:
    one: Implementation = request.param
    with one.serving():
        yield one


def packed_by_hand(rows: Sequence[Sequence[bytes]], lengths: Sequence[int], total: int, blank: bytes) -> list[bytes]:
    out = [row for one, n in zip(rows, lengths, strict=True) for row in one[:n]]
    return out + [blank] * (total - len(out))


def unpacked_by_hand(packed: Sequence[bytes], bounds: Sequence[int], length: int, pad: bytes) -> list[bytes]:
    return [packed[a + t] if a + t < b else pad for a, b in pairwise(bounds) for t in range(length)]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    lengths = draw(st.lists(st.one_of(st.just(0), st.integers(0, 9)), max_size=5))
    dtype = draw(st.sampled_from(DTYPES))
    return {
        "lengths": lengths,
        "length": max(lengths, default=0) + draw(st.integers(0, 3)),
        "total": sum(lengths) + draw(st.integers(0, 4)),
        "dtype": dtype,
        "shape": draw(st.sampled_from(SHAPES)),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "ints": draw(st.sampled_from(INTS)),
        "pad": draw(st.sampled_from(PADS.get(dtype, REALS))),
        "seed": draw(st.integers(0, 99)),
    }


@settings(max_examples=examples(150))
@given(case=cases())
@pytest.mark.parametrize("one", EVERY, ids=lambda one: one.name)
def test_any_rows_are_packed_and_unpacked(one: Implementation, case: dict[str, Any]) -> None:
    moves(one, **case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[:4])
def test_rows_of_every_dtype(on: Implementation, dtype: torch.dtype, layout: str) -> None:
    pad = PADS.get(dtype, REALS)[-1]
    moves(on, [3, 0, 5, 1], 6, 11, dtype, (3,), layout, torch.int32, pad, 1)


def moves(
    on: Implementation,
    lengths: Sequence[int],
    length: int,
    total: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    layout: str,
    ints: torch.dtype,
    pad: Any,
    seed: int,
) -> None:
    bounds = [0, *accumulate(lengths)]
    cu = torch.tensor(bounds, dtype=ints)
    padded = tensor_of((len(lengths), length, *shape), dtype, layout, seed).to(on.device)
    packed = tensor_of((total, *shape), dtype, layout, seed + 1).to(on.device)
    width = dtype.itemsize * torch.Size(shape).numel()
    with on.serving(), untouched(padded.flatten(0, 1), packed):
        got = pack(padded, cu, total)
        listed = pack([row[:n] for row, n in zip(padded, lengths, strict=True)], None, total) if lengths else None
        back = unpack(packed, cu, length, pad)
    want = packed_by_hand([rows_of(row) for row in padded], lengths, total, bytes(width))
    assert got.shape == (total, *shape) and got.dtype == dtype and got.is_contiguous()
    assert rows_of(got) == want and (listed is None or rows_of(listed) == want)
    fill = bits_of_value(pad, dtype) * torch.Size(shape).numel()
    assert back.shape == (len(lengths), length, *shape) and back.dtype == dtype and back.is_contiguous()
    assert rows_of(back.flatten(0, 1)) == unpacked_by_hand(rows_of(packed), bounds, length, fill)


def test_the_worked_example(on: Implementation) -> None:
    cu = torch.tensor([0, 3, 3, 5])
    rows = torch.tensor([[1, 2, 3, -1], [-1, -1, -1, -1], [4, 5, -1, -1]], device=on.device)
    packed = pack(rows, cu, 6)
    assert packed.tolist() == [1, 2, 3, 4, 5, 0]
    assert unpack(packed, cu, 4, -1).tolist() == rows.tolist()
    assert pack([rows[0, :3], rows[1, :0], rows[2, :2]]).tolist() == pack(rows, cu).tolist() == [1, 2, 3, 4, 5]
    assert pack(list(rows), cu, 6).tolist() == packed.tolist()  # rows may hold more than is taken
    assert unpack(packed, cu).shape == (3, 3)  # as long as the longest


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.skipif(INTERPRETED, reason="megabytes take the interpreter seconds")
def test_many_bytes_in_several_threads(on: Implementation, threads: int) -> None:
    """Above what is moved in one piece, and above what goes around the caches; odd ends everywhere."""
    random = torch.Generator().manual_seed(threads)
    for hidden, most in ((1, 3_000), (333, 700), (1_111, 1_500)):
        lengths = torch.randint(0, most, (9,), generator=random).tolist()
        cu, length = torch.tensor([0, *accumulate(lengths)]), max(lengths) + 5
        padded = torch.randint(-9, 9, (9, length, hidden), dtype=torch.int16, generator=random).to(on.device)
        mask = torch.arange(length)[None] < torch.tensor(lengths)[:, None]
        torch.set_num_threads(threads)
        try:
            packed, back = pack(padded, cu), unpack(pack(padded, cu), cu, length, -77)
        finally:
            torch.set_num_threads(1)
        assert torch.equal(packed, padded[mask.to(on.device)])
        assert torch.equal(back, padded.masked_fill(~mask[..., None].to(on.device), -77))


# -- torch -------------------------------------------------------------------------------------------------------------


def doubles(*shape: int, on: Implementation) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, device=on.device, requires_grad=True)


def test_gradients_are_exact(on: Implementation) -> None:
    cu, rows, packed = torch.tensor([0, 2, 2, 5]), doubles(3, 4, 2, on=on), doubles(6, 2, on=on)
    for function, given_ in (
        (lambda x: pack(x, cu, 6), rows),
        (lambda x: unpack(x, cu, 4, 1.5), packed),
        (lambda x: pack([x[0, :2], x[1, :0], x[2, :3]], None, 6), rows),
    ):
        assert torch.autograd.gradcheck(function, given_)
        assert INTERPRETED or torch.autograd.gradgradcheck(function, given_)  # the same kernels, many times


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch 2.14's own, of copies that it makes
@pytest.mark.skipif(INTERPRETED, reason="it follows the registered kernels")
def test_opcheck() -> None:
    ops, cu = torch.ops.knit, torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    rows, packed = torch.randn(3, 4, 2), torch.randn(6, 2)
    torch.library.opcheck(ops.pack_rows.default, (torch.zeros(6, 2), rows, cu))
    torch.library.opcheck(ops.unpack_rows.default, (torch.zeros(3, 4, 2), packed, cu, 7))
    torch.library.opcheck(ops.pack.default, (rows.requires_grad_(), cu, 6))
    torch.library.opcheck(ops.unpack.default, (packed.requires_grad_(), cu, 4, -1.5))


@pytest.mark.skipif(INTERPRETED, reason="a graph is the same whatever is below")
def test_a_list_of_rows_is_compiled_too() -> None:
    torch._dynamo.reset()
    rows, cu = [torch.randn(3, 2), torch.randn(2, 2)], torch.tensor([0, 3, 4])
    for arguments in ((rows,), (rows, None, 7), (rows, cu, 4), (rows, cu, 6)):
        assert torch.equal(torch.compile(pack, backend="aot_eager", fullgraph=True)(*arguments), pack(*arguments))


@pytest.mark.skipif(INTERPRETED, reason="a graph is the same whatever is below")
def test_compiled_whole_with_gradients_and_changing_sizes(on: Implementation) -> None:
    def body(rows: Tensor, cu: Tensor, total: int) -> Tensor:
        return unpack(pack(rows, cu, total).sin(), cu, rows.shape[1], 2.0).cos()

    torch._dynamo.reset()
    compiled = torch.compile(body, backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths, hidden in (([2, 0, 3], 2), ([5, 4], 3), ([1, 6, 2, 2], 7)):
        cu = torch.tensor([0, *accumulate(lengths)])
        rows = torch.randn(len(lengths), max(lengths) + 1, hidden, device=on.device, requires_grad=True)
        got, want = (f(rows, cu, sum(lengths) + 2) for f in (compiled, body))
        assert torch.equal(got, want)
        assert torch.equal(*(torch.autograd.grad(out.sum(), rows)[0] for out in (got, want)))


# -- refusals ----------------------------------------------------------------------------------------------------------

ROWS, PACKED = torch.arange(24.0).view(3, 4, 2), torch.arange(12.0).view(6, 2)
TABLE = r"cu_seqlens must be \[n\] of int32 or int64 on the CPU, found "
BAD: list[tuple[Any, str]] = [
    ([0, 2, 1, 5], "row 1 of cu_seqlens has -1 tokens, there may be 0 to 4"),
    ([0, 2, 2, 7], "cu_seqlens goes from 0 to 7, it must go from 0 to at most the total of 6"),
    ([1, 2, 2, 5], "cu_seqlens goes from 1 to 5, it must go from 0 to at most the total of 6"),
    ([-1, 2, 2, 5], "cu_seqlens goes from -1 to 5, it must go from 0 to at most the total of 6"),
    ([0, 5, 5, 5], "row 0 of cu_seqlens has 5 tokens, there may be 0 to 4"),
    ([0, 2**62, 3, 5], f"row 0 of cu_seqlens has {2**62} tokens, there may be 0 to 4"),
    ([0, TOP, -9, 5], f"row 0 of cu_seqlens has {TOP} tokens, there may be 0 to 4"),
    ([0, 2, 2, TOP], f"cu_seqlens goes from 0 to {TOP}, it must go from 0 to at most the total of 6"),
    ([0.0, 2.0, 2.0, 5.0], TABLE + r"torch.float32 \[4\] on cpu"),
    ([[0], [2], [2], [5]], TABLE + r"torch.int64 \[4, 1\] on cpu"),
    (torch.empty(4, dtype=torch.int64, device="meta"), TABLE + r"torch.int64 \[4\] on meta"),
]
BOUNDS_ONLY: list[tuple[Any, str]] = [
    ([0, 2, 5], "cu_seqlens has 3 entries for 3 rows, it needs 4"),
    ([0, 2, 2, 5, 5], "cu_seqlens has 5 entries for 3 rows, it needs 4"),
    (torch.zeros(0, dtype=torch.int64), "cu_seqlens has 0 entries for 3 rows, it needs 4"),
]
CU = torch.tensor([0, 2, 2, 5])
SIZES: list[tuple[Callable[[Tensor, Tensor], Tensor], str]] = [
    (lambda rows, _: pack(rows, CU, -1), r"pack: rows must be \[B, L, \*\] and total at least 0, found .* and -1"),
    (lambda _, x: unpack(x, CU, -2), r"unpack: packed must be \[T, \*\] and length at least 0, .* and -2"),
    (lambda _, x: unpack(x, CU, 2), "unpack: row 2 of cu_seqlens has 3 tokens, there may be 0 to 2"),
    (lambda _, x: pack(x[:, 0], CU, 6), r"pack: rows must be \[B, L, \*\] and .*, found \[6\] and 6"),
    (lambda _, x: unpack(x, CU[:0], 2), r"unpack: cu_seqlens is empty; without rows it is \[0\]"),
    (lambda rows, _: pack(rows.to(torch.complex128), CU, 6), "pack: rows is torch.complex128; views"),
    (lambda _, x: unpack(x.to(torch.complex128), CU, 4), "unpack: packed is torch.complex128; views"),
    (lambda _, x: unpack(x.long(), CU, 4, 0.5), "unpack: pad=0.5 is not a value of torch.int64"),
    (lambda _, x: unpack(x.byte(), CU, 4, 256), "unpack: pad=256.* is not a value of torch.uint8"),
    (lambda _, x: unpack(x.byte(), CU, 4, -1), "unpack: pad=-1.* is not a value of torch.uint8"),
    (lambda _, x: unpack(x.bool(), CU, 4, 2), "unpack: pad=2.* is not a value of torch.bool"),
    (lambda _, x: unpack(x.long(), CU, 4, float("nan")), "unpack: pad=nan is not a value of torch.int64"),
]


@pytest.mark.parametrize(("cu", "text"), [*BAD, *BOUNDS_ONLY], ids=lambda value: str(value)[:25])
@pytest.mark.parametrize("grad", [False, True])
def test_bounds_that_do_not_fit_are_refused_with_their_values(
    on: Implementation, cu: Any, text: str, grad: bool
) -> None:
    cu, few = torch.as_tensor(cu), "entries" in text
    rows, packed = (x.clone().to(on.device).requires_grad_(grad) for x in (ROWS, PACKED))
    with pytest.raises(InvalidArgument, match=f"^pack: {text}.$"):
        pack(rows, cu, 6)
    if not few:
        with pytest.raises(InvalidArgument, match=f"^unpack: {text}.$"):
            unpack(packed, cu, 4)


@pytest.mark.skipif(INTERPRETED, reason="a graph is the same whatever is below")
def test_they_are_refused_in_a_graph_too() -> None:
    torch._dynamo.reset()
    there = torch.compile(lambda rows, cu: pack(rows, cu, 6), backend="aot_eager", fullgraph=True, dynamic=True)
    back = torch.compile(lambda packed, cu: unpack(packed, cu, 4), backend="aot_eager", fullgraph=True, dynamic=True)
    rows, packed = ROWS.clone(), PACKED.clone()
    for cu, text in [*BAD, *BOUNDS_ONLY]:
        with pytest.raises(InvalidArgument, match=f"^pack: {text}.$"):
            there(rows, torch.as_tensor(cu))
        if "entries" not in text:
            with pytest.raises(InvalidArgument, match=f"^unpack: {text}.$"):
                back(packed, torch.as_tensor(cu))


@pytest.mark.parametrize(("call", "text"), SIZES, ids=[text[:25] for _, text in SIZES])
def test_sizes_and_values_that_cannot_be_are_refused(
    on: Implementation, call: Callable[[Tensor, Tensor], Tensor], text: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"^{text}"):
        call(ROWS.to(on.device), PACKED.to(on.device))
    if on.name == "extension":  # the graph is the same for all of them
        torch._dynamo.reset()
        with pytest.raises(InvalidArgument, match=f"^{text}"):
            torch.compile(call, backend="aot_eager", fullgraph=True)(ROWS, PACKED)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: pack(ROWS), "rows in one tensor need cu_seqlens, which says how long"),
        (lambda: pack([]), "there are no rows, so nothing says"),
        (lambda: pack(ROWS, torch.zeros(0, dtype=torch.int64)), r"cu_seqlens is empty; without rows it is \[0\]"),
        (lambda: pack(ROWS, torch.zeros(4, 2)), TABLE),
        (lambda: pack(list(ROWS), torch.tensor([1, 2, 2, 5])), "cu_seqlens goes from 1 to 5"),
        (lambda: pack(list(ROWS), torch.tensor([0, 3, 2, 5])), "row 1 of cu_seqlens has -1 tokens"),
        (lambda: pack(list(ROWS), torch.tensor([0, 5])), "cu_seqlens has 2 entries for 3 rows, it needs 4"),
        (lambda: pack(list(ROWS), torch.tensor([0, 2, 2, 5]), 4), "cu_seqlens goes from 0 to 5, .* total of 4"),
        (lambda: unpack(PACKED, torch.zeros(4)), TABLE),
        (lambda: unpack(PACKED, torch.tensor([0, -1])), "row 0 of cu_seqlens has -1 tokens"),
    ],
)
def test_what_is_left_out_must_be_known(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=f"pack: {text}"):
        call()


def test_rows_that_do_not_go_together_are_refused(on: Implementation) -> None:
    rows = [torch.ones(2, 3, device=on.device), torch.ones(2, 3, device=on.device)]
    for other, text in (
        (rows[1].double(), r"sources\[1\] is torch.float64 on \S+, sources\[0\] is torch.float32 on "),
        (rows[1].to("meta"), r"sources\[1\] is torch.float32 on meta, sources\[0\] is torch.float32 on "),
        (rows[1][:, :2], r"source 1 of level 0 has rows \[2\], packed are \[3\]"),
        (rows[1].sum(), r"sources\[1\] must have at least one dimension, found a scalar"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            pack([rows[0], other])


@pytest.mark.parametrize("cu", [cu for cu, _ in BAD], ids=lambda value: str(value)[:25])
def test_a_kernel_that_refuses_has_written_nothing(on: Implementation, cu: Any) -> None:
    cu, kernels = torch.as_tensor(cu), on.kernels()
    rows, packed = ROWS.to(on.device), PACKED.to(on.device)
    with untouched(rows, packed):
        for name, out, *arguments in (("pack_rows", packed, rows, cu), ("unpack_rows", rows, packed, cu, 1)):
            with pytest.raises((RuntimeError, InvalidArgument), match="pack"):
                kernels[name](out, *arguments)


def test_kernels_refuse_an_output_of_another_shape_or_dtype(on: Implementation) -> None:
    kernels, rows, packed = on.kernels(), ROWS.to(on.device), PACKED.to(on.device)
    for out in (packed.double(), packed[:, :1].contiguous(), packed.sum(), packed.view(6, 2, 1), packed.to("meta")):
        with pytest.raises((RuntimeError, InvalidArgument), match="pack"):
            kernels["pack_rows"](out, rows, CU)
    for out in (rows.double(), rows[:2].clone(), rows[:, :, :1].contiguous(), rows.view(3, 4, 2, 1), rows.to("meta")):
        with pytest.raises((RuntimeError, InvalidArgument), match="pack"):
            kernels["unpack_rows"](out, packed, CU, 0)


# -- without the extension, and on a GPU -------------------------------------------------------------------------------

WITHOUT = """
import sys
sys.modules["knit_data._C"] = None  # what the import system does for a module that is not there
import torch
from knit_data.errors import InvalidArgument
from knit_data.ops import gather_segments, accumulate_segments, pack, unpack
cu, rows = torch.tensor([0, 1, 3]), torch.tensor([[1.0, 9.0], [2.0, 3.0]], requires_grad=True)
packed = pack(rows, cu, 4)
packed.sum().backward()
print(packed.tolist(), unpack(packed.detach(), cu, 2, -1).tolist(), rows.grad.tolist())
table = torch.tensor([[0, 1, 2, 0], [0, 0, 2, 2]])
print(gather_segments(packed, table, 5).tolist(), accumulate_segments(packed.detach(), table, [4])[0].tolist())
for bad in (lambda: pack(rows, cu, 2), lambda: gather_segments(packed, table + 1, 5)):
    try:
        bad()
    except InvalidArgument as error:
        print(error)
"""


@pytest.mark.skipif(INTERPRETED, reason="it has nothing to do with Triton")
def test_without_the_extension_the_references_serve() -> None:
    ran = subprocess.run([sys.executable, "-W", "error", "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "[1.0, 2.0, 3.0, 0.0] [[1.0, -1.0], [2.0, 3.0]] [[1.0, 0.0], [1.0, 1.0]]",
        "[2.0, 3.0, 1.0, 2.0, 0.0] [3.0, 1.0, 2.0, 0.0]",
        "pack: cu_seqlens goes from 0 to 3, it must go from 0 to at most the total of 2.",
        "gather_segments: segment 0 moves 3 rows from 2 on of source 1 (where there are 1 sources) to 1 of 5.",
    ]


@pytest.mark.gpu
@NO_GPU
def test_nothing_waits_for_the_device() -> None:
    rows, cu = torch.randn(3, 4, 2, device="cuda"), torch.tensor([0, 2, 2, 5])
    pack(rows, cu, 6), unpack(rows.flatten(0, 1), cu, 4)  # compiled before
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed = pack(rows, cu, 6)
        unpack(packed, cu, 4, -1.0)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert packed.device == rows.device
