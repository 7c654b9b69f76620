"""The implementations of the packing and segment ops, so that their contract can be written once.

``interpreter``, the Triton kernels in Python, is there where Triton was imported with ``TRITON_INTERPRET=1``: in a
process of its own, which tests/ops/test_tiles.py starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from knit_data.ops.dispatch import on_gpu
from knit_data.ops.pack import _wrong_pack_rows, _wrong_unpack_rows, pack_rows_reference, unpack_rows_reference
from knit_data.ops.segment import _wrong_copy, _wrong_sum, add_segments_reference, copy_segments_reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
REFERENCES: dict[str, Callable[..., None]] = {
    "pack_rows": pack_rows_reference,
    "unpack_rows": unpack_rows_reference,
    "copy_segments": copy_segments_reference,
    "add_segments": add_segments_reference,
}
WRONG: dict[str, Callable[..., str | None]] = {
    "pack_rows": _wrong_pack_rows,
    "unpack_rows": _wrong_unpack_rows,
    "copy_segments": _wrong_copy,
    "add_segments": _wrong_sum,
}
FLAVOURS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = (
    *(torch.bool, torch.uint8, torch.bfloat16, torch.float16),
    *(torch.float32, torch.int64, torch.float64, torch.complex64),
)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (3,), (8,), (2, 3), (3, 1, 2))
LAYOUTS = ("plain", "transposed", "strided", "shifted", "odd")


@dataclass(frozen=True)
class Implementation:
    """Which kernels lie under the ops, and where tensors have to be for them."""

    name: str
    device: str = "cpu"

    @contextmanager
    def serving(self) -> Iterator[None]:
        """The public functions run on these kernels."""
        kernels = self.kernels()
        with pytest.MonkeyPatch.context() as patching:
            for name, kernel in kernels.items():
                patching.setattr(getattr(torch.ops.knit, name), "default", kernel)
            yield

    def kernels(self) -> dict[str, Callable[..., None]]:
        """As they are registered, checks included."""
        if self.name == "reference":
            return dict(REFERENCES)
        if self.name == "interpreter":
            return interpreted()
        return {name: getattr(torch.ops.knit, name).default for name in REFERENCES}


def interpreted() -> dict[str, Callable[..., None]]:
    """What ``on_gpu`` registers for CUDA, caught on the way."""
    caught: dict[str, Callable[..., None]] = {}
    with patch.object(torch.library, "impl", lambda name, _, kernel: caught.__setitem__(name[6:], kernel)):
        for name, reference in REFERENCES.items():
            on_gpu(name, WRONG[name], reference)
    return caught


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GPU = pytest.param(Implementation("gpu", "cuda"), marks=[pytest.mark.gpu, NO_GPU], id="gpu")
EVERY = [Implementation("interpreter")] if INTERPRETED else [Implementation("extension"), Implementation("reference")]
PARAMS = [*(pytest.param(one, id=one.name) for one in EVERY), *([] if INTERPRETED else [GPU])]


def examples(count: int) -> int:
    """Of hypothesis: fewer where a program takes milliseconds."""
    return 12 if INTERPRETED else count


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype, layout: str, seed: int, bits: bool = True) -> Tensor:
    """Any bits that the dtype may have, NaN and -0.0 among them, or else numbers; in memory as the layout says."""
    random = torch.Generator().manual_seed(seed)
    if bits and dtype != torch.bool:
        raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=random)
        content = raw.view(dtype).view(shape)
    elif dtype == torch.bool or not dtype.is_floating_point:
        content = torch.randint(0, 2, shape, generator=random).to(dtype)
    else:
        content = torch.randn(shape, dtype=torch.float64, generator=random).to(dtype)
    if layout == "transposed":
        return content.permute(*reversed(range(len(shape)))).contiguous().permute(*reversed(range(len(shape))))
    if layout == "strided":
        return content.repeat_interleave(2, -1)[..., ::2]
    if layout == "shifted":
        return torch.cat([content.new_zeros(1), content.flatten()])[1:].view(shape)
    if layout == "odd" and content.numel():  # an address that is a multiple of nothing
        memory = bytearray(content.nbytes + 1)
        out = torch.frombuffer(memory, dtype=dtype, offset=1, count=content.numel()).view(shape)
        return out.copy_(content)
    return content


def rows_of(tensor: Tensor) -> list[bytes]:
    """The bits of each row."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.numel() == 0:
        return [b""] * tensor.shape[0]
    flat = tensor.view(FLAVOURS[tensor.element_size()]).reshape(tensor.shape[0], -1)
    return [row.numpy().tobytes() for row in flat]


def bits_of_value(value: Any, dtype: torch.dtype) -> bytes:
    return torch.tensor([value], dtype=dtype).view(FLAVOURS[dtype.itemsize]).numpy().tobytes()


@contextmanager
def untouched(*tensors: Tensor) -> Iterator[None]:
    """Nobody writes to these."""
    before = [rows_of(tensor) for tensor in tensors]
    yield
    assert [rows_of(tensor) for tensor in tensors] == before
