"""What lies between the ops and their kernels: versions, derivatives that there are not, and doors to a launch."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from kernels import Implementation, interpreted, rows_of, tensor_of
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from knit_data import ops
from knit_data.errors import InvalidArgument
from knit_data.ops.dispatch import _tiles, on_gpu
from knit_data.ops.tables import MOVED

SEGMENTS = torch.tensor([[0, 0, 2, 1]])
CU = torch.tensor([0, 2, 3])


def scattered(base: Tensor) -> None:
    ops.scatter_segments_(base, torch.ones(2, 3), SEGMENTS)


def accumulated(buffer: Tensor) -> None:
    ops.accumulate_segments_(buffer, torch.ones(4, 3), SEGMENTS)


def through_the_operator(base: Tensor) -> None:
    torch.ops.knit.scatter_segments_.default(base, [torch.ones(2, 3)], SEGMENTS)


def into_columns(base: Tensor) -> None:
    ops.scatter_segments_(base.t()[:, :3], torch.ones(2, 3), SEGMENTS)


@pytest.mark.parametrize("write", [scattered, accumulated, through_the_operator, into_columns])
def test_a_backward_notices_what_was_written_in_place(write: Callable[[Tensor], None]) -> None:
    base, weight = torch.ones(4, 4 if write is into_columns else 3), torch.ones((), requires_grad=True)
    loss = (weight * base).sum()
    write(base)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensors_are_written_to() -> None:
    with torch.inference_mode():
        base = torch.zeros(4, 3)
        assert ops.scatter_segments_(base, torch.ones(2, 3), SEGMENTS).sum() == 6


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, in what it imports for jvp
def test_a_forward_derivative_is_refused_rather_than_lost() -> None:
    rows = torch.randn(2, 2, 3)
    with pytest.raises(InvalidArgument, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: ops.pack(x, CU, 3), (rows,), (rows,))


def test_complex_sources_get_the_gradients_of_slices() -> None:
    source = torch.randn(4, 3, dtype=torch.complex64, requires_grad=True)
    segments = torch.tensor([[0, 1, 2, 0], [0, 2, 2, 2]])
    weights = torch.randn(4, 3, dtype=torch.complex64)

    def gradient(gathered: Tensor) -> Tensor:
        return torch.autograd.grad((gathered * weights).abs().square().sum(), source)[0]

    wanted = gradient(torch.cat([source[1:3], source[2:4]]))
    assert torch.equal(gradient(ops.gather_segments(source, segments, 4)), wanted)
    base = torch.zeros(4, 3, dtype=torch.complex64)
    assert torch.equal(gradient(ops.scatter_segments(base, source, segments)), wanted)


X, TWO = torch.zeros(6, 4), torch.tensor([[0, 0, 2, 0], [1, 0, 2, 2]])


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.accumulate_segments_([X, X], torch.ones(4, 4), TWO),
        lambda: ops.accumulate_segments_([X[:3], X[2:5]], torch.ones(4, 4), TWO),
        lambda: ops.accumulate_segments_([X[:2], X[4:]], X[3:5], TWO[:, :4] * torch.tensor([1, 1, 0, 1])),
        lambda: ops.accumulate_segments_([X[:, 1:3], X[:, 1:3]], torch.ones(4, 2), TWO),
        lambda: ops.scatter_segments_(X, X[:2], SEGMENTS),
        lambda: ops.scatter_segments_(X[1:], X[:2], SEGMENTS),
        lambda: ops.scatter_segments_(X[:1].expand(6, 4), torch.ones(2, 4), SEGMENTS),
        lambda: ops.scatter_segments_(X.flatten().unfold(0, 3, 1), torch.ones(2, 3), SEGMENTS),
        lambda: ops.accumulate_segments_([X[:, :2], X[:, 1:3]], torch.ones(4, 2), TWO),
        lambda: ops.accumulate_segments_([[X], [X[:, 2:]]], [torch.ones(4, 4), torch.ones(4, 2)], SEGMENTS),
        lambda: ops.accumulate_segments_([X[:4][:2], X[:4].t()[1:3]], torch.ones(4, 4), TWO),
        lambda: ops.accumulate_segments_(X.as_strided((4, 3), (1, 1)), torch.ones(4, 3), SEGMENTS),
        lambda: ops.accumulate_segments_([X[:, 3:], X[1:, 3:]], torch.ones(6, 1), TWO),
    ],
)
def test_memory_that_is_written_and_given_twice_is_refused(call: Callable[[], object]) -> None:
    for kernels in (contextlib.nullcontext(), Implementation("reference").serving()):
        with kernels, pytest.raises(InvalidArgument, match=r"shares? memory"):
            call()
    assert not X.any()


def test_selective_checkpoints_see_the_public_ops() -> None:
    """Were they to see the kernels, which write to a result made before, saving those would leave it unwritten."""
    a, seen = torch.ones(4, 3, requires_grad=True), list[object]()

    def policy(_ctx: object, op: object, *_: object, **__: object) -> CheckpointPolicy:
        seen.append(op)
        return CheckpointPolicy.MUST_SAVE

    def body(a: Tensor) -> Tensor:
        return ops.accumulate_segments(ops.gather_segments(a * 2, SEGMENTS, 4), SEGMENTS, [3])[0].cos()

    contexts = partial(create_selective_checkpoint_contexts, policy)
    checkpoint(body, a, use_reentrant=False, context_fn=contexts).sum().backward()
    assert torch.ops.knit.gather_segments.default in seen and torch.ops.knit.accumulate_segments.default in seen
    assert torch.equal(a.grad, torch.autograd.grad(body(a).sum(), a)[0])


@pytest.mark.filterwarnings("ignore")  # torch's own, of jit.trace
def test_a_trace_has_the_ops() -> None:
    traced = torch.jit.trace(lambda a: ops.gather_segments(a, SEGMENTS, 4) + 1, torch.ones(3, 2), check_trace=False)
    assert torch.equal(traced(torch.full((3, 2), 5.0)), torch.tensor([[1.0], [6.0], [6.0], [1.0]]).expand(4, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_used_once_get_their_gradient_as_it_is(dtype: torch.dtype) -> None:
    source = torch.randn(5, 3, dtype=dtype, requires_grad=True)
    grad = torch.randn(6, 3, dtype=dtype)
    grad[0] = -0.0
    (found,) = torch.autograd.grad(
        ops.gather_segments(source, torch.tensor([[0, 3, 2, 0], [0, 0, 1, 4]]), 6), source, grad
    )
    assert rows_of(found) == rows_of(torch.stack([grad[4], 0 * grad[0].abs(), 0 * grad[0].abs(), grad[0], grad[1]]))


@pytest.mark.parametrize(("base", "source", "copies"), [(True, False, 1), (False, True, 1), (True, True, 2)])
def test_only_what_needs_a_gradient_gets_one(
    monkeypatch: pytest.MonkeyPatch, base: bool, source: bool, copies: int
) -> None:
    out = ops.scatter_segments(
        torch.randn(6, 3).requires_grad_(base), torch.randn(4, 3).requires_grad_(source), SEGMENTS
    )
    assert out.grad_fn is not None and out.grad_fn.name() == "knit_scatter_segmentsBackward"
    packet, calls = torch.ops.knit.copy_segments, list[object]()
    real = packet.default
    monkeypatch.setattr(packet, "default", lambda *arguments: (calls.append(arguments), real(*arguments))[1])
    out.sum().backward()
    assert len(calls) == copies


def test_columns_apart_and_sources_that_are_the_same_are_fine() -> None:
    x, ones = torch.zeros(4, 6), torch.ones(2, 3)
    ops.accumulate_segments_([x[:, :3], x[:, 3:]], torch.ones(4, 3), TWO)
    assert x.tolist() == [[1.0] * 6] * 2 + [[0.0] * 6] * 2
    assert torch.equal(ops.scatter_segments_(x[:, :3], [ones, ones], TWO), torch.ones(4, 3))


META = torch.zeros(3, 4, device="meta")


@pytest.mark.parametrize("made", [lambda x: x, torch.nn.Parameter])
@pytest.mark.parametrize(
    "call",
    [
        lambda meta: ops.scatter_segments(X, [meta], SEGMENTS),
        lambda meta: ops.scatter_segments_(X, [meta.detach()], SEGMENTS),
        lambda meta: ops.gather_segments([X, meta], TWO, 4),
        lambda meta: ops.pack([X, meta]),
        lambda meta: ops.accumulate_segments_([X], meta.detach(), SEGMENTS),
    ],
)
def test_a_tensor_without_memory_beside_others_is_refused(
    call: Callable[[Tensor], object], made: Callable[[Tensor], Tensor]
) -> None:
    with pytest.raises(InvalidArgument, match=r"bring them to one dtype and device|summed in torch.float32 there"):
        call(made(META))


def test_tensors_without_memory_alone_give_their_shapes() -> None:
    sums = ops.accumulate_segments(META, TWO * torch.tensor([1, 1, 0, 1]), [3, 2])
    assert [one.shape for one in sums] == [(3, 4), (2, 4)]
    assert ops.gather_segments([META, META], TWO, 5).shape == (5, 4)


def test_dtypes_that_no_kernel_knows_are_refused_alike() -> None:
    scales = torch.ones(3).to(torch.float8_e8m0fnu)
    for kernels in (contextlib.nullcontext(), Implementation("reference").serving()):
        with kernels, pytest.raises(InvalidArgument, match=r"float8_e8m0fnu; views of it as numbers"):
            ops.pack([scales])
    assert torch.equal(ops.pack([scales.view(torch.uint8)]), scales.view(torch.uint8))


@pytest.mark.parametrize("dtype", sorted(MOVED - {torch.complex32}, key=str), ids=str)  # that one torch warns of
def test_every_dtype_that_is_promised_is_moved(dtype: torch.dtype) -> None:
    x = tensor_of((5, 3), dtype, "plain", 1)
    assert rows_of(ops.unpack(ops.pack(x[None], torch.tensor([0, 5]), 5), torch.tensor([0, 5]), 5)) == rows_of(x[None])
    assert rows_of(ops.gather_segments(x, SEGMENTS, 3)[1:]) == rows_of(x[:2])


def test_nothing_put_into_a_base_has_its_gradient() -> None:
    base = torch.ones(6, 4, requires_grad=True)
    ops.scatter_segments(base, [], torch.zeros(0, 4, dtype=torch.int64)).sum().backward()
    assert base.grad is not None and base.grad.eq(1).all()


def test_gradients_are_those_of_the_dispatcher() -> None:
    """Past it they have a node of their own, made from the same functions."""

    def found(pack: Callable[..., Tensor], scatter: Callable[..., Tensor], gather: Callable[..., Sequence[Tensor]]):
        x = [torch.arange(float(n * 3)).view(*shape, 3).requires_grad_() for n, *shape in ((4, 2, 2), (2, 2), (3, 3))]
        there = scatter(pack(x[0], CU, 4), [x[1], x[2]], torch.tensor([[0, 1, 1, 0], [1, 0, 2, 1]]))
        _, again = gather([x[1], x[2], x[1] * 2, x[2] * 3], torch.tensor([[0, 0, 2, 0], [1, 1, 2, 2]]), 5, 2)
        loss = there.square().sum() + again.pow(3).sum()  # the first level is not used
        first = torch.autograd.grad(loss, x, create_graph=True)
        return [*first, *torch.autograd.grad([one.square().sum() for one in first], x, allow_unused=True)]

    def gather(sources: list[Tensor], segments: Tensor, total: int, levels: int) -> Sequence[Tensor]:
        count = len(sources) // levels
        return ops.gather_segments([sources[k * count : (k + 1) * count] for k in range(levels)], segments, total)

    knit = torch.ops.knit
    want = found(knit.pack.default, knit.scatter_segments.default, knit.gather_segments.default)
    assert all(map(torch.equal, found(ops.pack, ops.scatter_segments, gather), want)) and len(want) == 6


def test_half_precision_sums_do_not_depend_on_how_the_thread_treats_tiny_numbers() -> None:
    tiny = torch.tensor([[2.0**-24, 2.0**-15, 1023 * 2.0**-24, -(2.0**-14), float("inf")]], dtype=torch.float16)
    before = ops.accumulate_segments(tiny, torch.tensor([[0, 0, 1, 0]]), [1])[0]
    assert torch.equal(before, tiny.float())
    if torch.set_flush_denormal(True):
        try:
            after = ops.accumulate_segments(tiny, torch.tensor([[0, 0, 1, 0]]), [1])[0]
        finally:
            torch.set_flush_denormal(False)
        assert torch.equal(after, before)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("cu", "total", "words"),
    [([0, 2, 3], None, None), ([1, 2, 3], 3, "goes from 1 to 3"), ([0, 2], 3, "has 2 entries for 2 rows")],
)
def test_a_list_of_rows_is_packed_alike_in_a_graph(
    compiled: bool, cu: list[int], total: int | None, words: str | None
) -> None:
    def packed(a: Tensor, b: Tensor, cu: Tensor) -> Tensor:
        return ops.pack([a, b], cu, 3 if compiled and total is None else total)

    run = torch.compile(packed, backend="aot_eager", fullgraph=True) if compiled else packed
    a, b = torch.randn(3, 2), torch.randn(2, 2)
    if words is None:
        assert torch.equal(run(a, b, torch.tensor(cu)), torch.cat([a[:2], b[:1]]))
    else:
        with pytest.raises(InvalidArgument, match=words):
            run(a, b, torch.tensor(cu))


@pytest.mark.skipif(_tiles() is None, reason="needs Triton")
def test_a_launch_takes_what_lies_end_to_end_only() -> None:
    out, rows = torch.zeros(3, 4), torch.ones(2, 2, 2)
    with pytest.raises(InvalidArgument, match="the kernels take contiguous tensors"):
        interpreted()["pack_rows"](out[:, :2], rows, CU)
    assert not out.any()


def test_without_triton_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[str]()
    monkeypatch.setattr("knit_data.ops.dispatch._tiles", lambda: None)
    monkeypatch.setattr(torch.library, "impl", lambda _name, _key, kernel: kernel(1, 2))
    on_gpu("pack_rows", lambda *_: "never asked", lambda *arguments: called.append(str(arguments)))
    assert called == ["(1, 2)"]


@pytest.mark.parametrize(
    "call", [lambda t: ops.gather_segments(torch.ones(2, 3), t, 4), lambda t: ops.pack(torch.ones(2, 2), t)]
)
def test_a_table_that_is_no_tensor_is_refused(call: Callable[[object], Tensor]) -> None:
    with pytest.raises(InvalidArgument, match="takes tensors"):
        call([[0, 0, 1, 0]])


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, in what inductor imports
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler on the CPU")
def test_torchs_own_compiler_takes_them_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients of a graph by inductor, which fuses what lies between the ops; small integers are exact."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def body(rows: Tensor, a: Tensor, b: Tensor) -> Tensor:
        packed = ops.pack(rows * 2, CU, 4) + 1
        there = ops.scatter_segments(packed * rows.sum(), [a - b.sum(), b], torch.tensor([[0, 1, 1, 0], [1, 0, 2, 1]]))
        again = ops.gather_segments([a * a, there], torch.tensor([[0, 0, 2, 0], [1, 1, 2, 2]]), 5)
        return (ops.unpack(there, CU, 3) * 3).sum() + again.square().sum()

    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)  # it never ends the threads of its own
    found = []
    for run in (torch.compile(body, fullgraph=True), body):
        x = [torch.arange(float(n * 3)).view(*shape, 3).requires_grad_() for n, *shape in ((4, 2, 2), (2, 2), (3, 3))]
        loss = run(*x)
        found.append([loss, *torch.autograd.grad(loss, x)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
