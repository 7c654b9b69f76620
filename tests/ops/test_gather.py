"""knit::gather_ranges: one contract for the public function, the operator behind it and the reference."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from knit_data.errors import InvalidArgument
from knit_data.ops import gather, gather_ranges
from knit_data.ops.gather import gather_ranges_reference

OPERATOR = torch.ops.knit.gather_ranges.default
BIG = 2**63 - 1
Ranges = list[tuple[int, int, int]]  # (src_start, out_start, length)
Copy = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]

# The operator is the extension's kernel where it was built, and refuses in its own class.
KERNELS = {"public": gather_ranges, "operator": OPERATOR, "reference": gather_ranges_reference}


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Copy:
    return KERNELS[request.param]


def refused(kernel: Copy) -> type[Exception] | tuple[type[Exception], ...]:
    return (RuntimeError, InvalidArgument) if kernel is OPERATOR else InvalidArgument


def index(ranges: Ranges) -> tuple[Tensor, Tensor, Tensor]:
    table = torch.tensor(ranges, dtype=torch.int64).reshape(-1, 3)
    return table[:, 0].contiguous(), table[:, 1].contiguous(), table[:, 2].contiguous()


def buffers(out_bytes: int, src_bytes: int) -> tuple[Tensor, Tensor]:
    src = torch.arange(src_bytes).remainder(200).to(torch.uint8)
    return torch.full((out_bytes,), 255, dtype=torch.uint8), src  # 255 never occurs in src


def oracle(out: list[int], src: list[int], ranges: Ranges) -> list[int] | None:
    """Byte by byte, in Python's unbounded integers; None where the call must be refused."""
    result, written = list(out), set()
    for src_start, out_start, length in ranges:
        if length < 0 or not (0 <= src_start <= len(src) and 0 <= out_start <= len(out)):
            return None
        if src_start + length > len(src) or out_start + length > len(out):
            return None
        for k in range(length):
            if out_start + k in written:
                return None
            written.add(out_start + k)
            result[out_start + k] = src[src_start + k]
    return result


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ranges",
    [
        [],
        [(0, 0, 0)],
        [(10, 8, 0)],  # both ends exactly: an empty range may stand there
        [(0, 0, 1)],
        [(9, 7, 1)],
        [(2, 0, 8)],
        [(4, 0, 2), (0, 3, 3)],
        [(0, 6, 2), (2, 0, 2), (4, 3, 2)],  # unsorted destinations
        [(0, 0, 4), (0, 4, 4)],  # one source twice
        [(1, 1, 3), (0, 2, 0), (5, 4, 4)],  # an empty range inside another
    ],
    ids=str,
)
def test_copies_the_ranges_and_nothing_else(kernel: Copy, ranges: Ranges) -> None:
    out, src = buffers(8, 10)
    want = oracle(out.tolist(), src.tolist(), ranges)
    assert want is not None
    kernel(out, src, *index(ranges))
    assert out.tolist() == want
    assert torch.equal(src, buffers(8, 10)[1])


def test_empty_buffers(kernel: Copy) -> None:
    out, src = buffers(0, 0)
    kernel(out, src, *index([]))
    kernel(out, src, *index([(0, 0, 0), (0, 0, 0)]))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("lengths", [[5_000_001], [1, 3_000_000, 0, 17, 2_000_000], [4096] * 1000], ids=len)
def test_large_copies_are_cut_between_threads_at_any_byte(kernel: Copy, threads: int, lengths: list[int]) -> None:
    out, src = buffers(5_000_100, 5_000_100)
    want, ranges, place = out.clone(), [], 3
    for k, length in enumerate(lengths):
        ranges.append((7 * k % 50, place, length))
        want[place : place + length] = src[7 * k % 50 : 7 * k % 50 + length]
        place += length
    ranges.reverse()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        kernel(out, src, *index(ranges))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, want)


def test_disjoint_views_of_one_buffer(kernel: Copy) -> None:
    arena = torch.arange(10, dtype=torch.uint8)
    kernel(arena[6:], arena[:6], *index([(1, 0, 3)]))
    assert arena.tolist() == [0, 1, 2, 3, 4, 5, 1, 2, 3, 9]


@st.composite
def valid_ranges(draw: st.DrawFn) -> tuple[int, int, Ranges]:
    src_bytes = draw(st.integers(0, 40))
    ranges, place = [], 0
    for _ in range(draw(st.integers(0, 8))):
        src_start = draw(st.integers(0, src_bytes))
        length = draw(st.integers(0, src_bytes - src_start))
        place += draw(st.integers(0, 3))
        ranges.append((src_start, place, length))
        place += length
    return place + draw(st.integers(0, 3)), src_bytes, draw(st.permutations(ranges))


@given(case=valid_ranges())
def test_valid_ranges_equal_the_byte_loop(case: tuple[int, int, Ranges]) -> None:
    out_bytes, src_bytes, ranges = case
    for kernel in KERNELS.values():
        out, src = buffers(out_bytes, src_bytes)
        want = oracle(out.tolist(), src.tolist(), ranges)
        assert want is not None
        kernel(out, src, *index(ranges))
        assert out.tolist() == want


numbers = st.one_of(st.integers(-2, 14), st.integers(-(2**63), BIG))


@given(ranges=st.lists(st.tuples(numbers, numbers, numbers), max_size=4))
@example(ranges=[(1, 0, BIG)])
@example(ranges=[(BIG, BIG, BIG)])
@example(ranges=[(-(2**63), 0, -(2**63))])
@example(ranges=[(0, 4, 4), (0, 0, 5)])
def test_any_ranges_are_copied_exactly_or_refused_untouched(ranges: Ranges) -> None:
    for kernel in KERNELS.values():
        out, src = buffers(8, 10)
        want = oracle(out.tolist(), src.tolist(), ranges)
        if want is None:
            with pytest.raises(refused(kernel)):
                kernel(out, src, *index(ranges))
            want = [255] * 8
        else:
            kernel(out, src, *index(ranges))
        assert out.tolist() == want


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranges", "text"),
    [
        ([(0, 0, 1), (0, 1, -1)], r"range 1 reads -1 bytes at 0 of src, which has 10"),
        ([(-1, 0, 1)], r"range 0 reads 1 bytes at -1 of src"),
        ([(0, -3, 1)], r"range 0 writes 1 bytes at -3 of out"),
        ([(0, 0, 1), (8, 1, 3)], r"range 1 reads 3 bytes at 8 of src, which has 10"),
        ([(0, 0, 1), (0, 1, 8)], r"range 1 writes 8 bytes at 1 of out, which has 8"),
        ([(11, 0, 0)], r"range 0 reads 0 bytes at 11 of src"),
        ([(1, 0, BIG)], rf"range 0 reads {BIG} bytes at 1 of src"),
        ([(BIG, 0, BIG)], rf"range 0 reads {BIG} bytes at {BIG} of src"),
        ([(0, BIG, 1)], rf"range 0 writes 1 bytes at {BIG} of out"),
        ([(0, 0, 3), (0, 2, 2)], r"ranges 0 and 1 overlap in out: 3 bytes at 0 and 2 bytes at 2"),
        ([(0, 5, 2), (0, 0, 1), (0, 4, 2)], r"ranges 2 and 0 overlap in out: 2 bytes at 4 and 2 bytes at 5"),
        ([(0, 3, 2), (0, 3, 2)], r"ranges 0 and 1 overlap in out"),
    ],
)
def test_bad_ranges_are_refused_with_their_values(kernel: Copy, ranges: Ranges, text: str) -> None:
    out, src = buffers(8, 10)
    with pytest.raises(refused(kernel), match=rf"gather_ranges: {text}"):
        kernel(out, src, *index(ranges))
    assert out.tolist() == [255] * 8


@pytest.mark.parametrize("argument", range(5))
@pytest.mark.parametrize("fault", ["dtype", "two dimensions", "not contiguous"])
def test_bad_tensors_are_refused_by_name(kernel: Copy, argument: int, fault: str) -> None:
    arguments = [*buffers(8, 8), *index([(0, 0, 1), (0, 1, 1)])]
    good = arguments[argument]
    if fault == "dtype":
        arguments[argument] = good.to(torch.int32)
    elif fault == "two dimensions":
        arguments[argument] = good.reshape(-1, 2)
    else:
        arguments[argument] = good.repeat_interleave(2)[::2]
    name = ("out", "src", "src_start", "out_start", "length")[argument]
    with pytest.raises(refused(kernel), match=rf"gather_ranges: {name} must be a contiguous 1-D"):
        kernel(*arguments)
    assert arguments[0].unique().tolist() == [255]


def test_index_tensors_of_different_lengths_are_refused(kernel: Copy) -> None:
    src_start, out_start, length = index([(0, 0, 1), (0, 1, 1)])
    for ranges in ((src_start[:1], out_start, length), (src_start, out_start[:1], length)):
        with pytest.raises(refused(kernel), match="one entry per range"):
            kernel(*buffers(8, 8), *ranges)


def test_out_in_the_memory_of_an_input_is_refused(kernel: Copy) -> None:
    arena = torch.arange(64, dtype=torch.uint8)
    with pytest.raises(refused(kernel), match=r"gather_ranges: out and src share memory"):
        kernel(arena[:33], arena[32:], *index([(0, 0, 1)]))
    zeros = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(refused(kernel), match=r"gather_ranges: out .*share"):
        kernel(zeros.view(torch.uint8), arena, zeros, zeros.clone(), zeros.clone())
    assert torch.equal(arena, torch.arange(64, dtype=torch.uint8))


def test_the_public_function_refuses_what_is_no_tensor() -> None:
    out, src = buffers(8, 8)
    with pytest.raises(InvalidArgument, match="length must be a tensor, not list"):
        gather_ranges(out, src, *index([(0, 0, 1)])[:2], [1])  # type: ignore[arg-type]  # what is tested


# -- torch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranges", [[], [(4, 0, 2), (0, 3, 3)]], ids=len)
def test_opcheck(ranges: Ranges) -> None:
    torch.library.opcheck(OPERATOR, (*buffers(8, 10), *index(ranges)))


def test_compiles_without_a_graph_break() -> None:
    def step(out: Tensor, src: Tensor, src_start: Tensor, out_start: Tensor, length: Tensor) -> Tensor:
        gather_ranges(out, src, src_start, out_start, length)
        return out + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    out, src = buffers(8, 10)
    assert compiled(out, src, *index([(4, 0, 2), (0, 3, 3)])).tolist() == [5, 6, 0, 1, 2, 3, 0, 0]
    assert out.tolist() == [4, 5, 255, 0, 1, 2, 255, 255]


def test_the_fake_kernel_refuses_bad_tensors() -> None:
    with torch.device("meta"):
        out, src = torch.empty(8, dtype=torch.uint8), torch.empty(8, dtype=torch.int8)
        ranges = [torch.empty(2, dtype=torch.int64) for _ in range(3)]
    with pytest.raises(InvalidArgument, match="src must be"):
        gather_ranges(out, src, *ranges)


# -- with and without the extension -----------------------------------------------------------------------------------


def test_the_extension_serves() -> None:
    if gather.extension_error is not None:
        pytest.skip(f"built without the extension: {gather.extension_error}")
    out, src = buffers(8, 8)
    with pytest.raises(RuntimeError, match="reads 9 bytes"):  # the reference would raise a ValueError
        OPERATOR(out, src, *index([(0, 0, 9)]))


WITHOUT = """
import sys
sys.modules["knit_data._C"] = None  # what the import system does for a module that is not there
import torch
from knit_data.errors import InvalidArgument
from knit_data.ops import gather_ranges
out, src = torch.zeros(4, dtype=torch.uint8), torch.arange(4, dtype=torch.uint8)
ranges = torch.tensor([2]), torch.tensor([0]), torch.tensor([2])
print("imported", file=sys.stderr)
for _ in range(2):
    gather_ranges(out, src, *ranges)
torch.library.opcheck(torch.ops.knit.gather_ranges.default, (out, src, *ranges))
try:
    gather_ranges(out, src, *ranges[:2], torch.tensor([3]))
except InvalidArgument as error:
    print(out.tolist(), error)
"""


def test_without_the_extension_the_reference_serves_and_says_so_once_at_first_use() -> None:
    ran = subprocess.run([sys.executable, "-W", "error", "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "[2, 3, 0, 0] gather_ranges: range 0 reads 3 bytes at 2 of src, which has 4\n"
    before, after = ran.stderr.split("imported\n")
    assert before == ""
    assert after.count("without its C++ extension") == 1 and after.count("\n") == 1
