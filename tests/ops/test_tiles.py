"""The Triton kernels where there is no GPU: run by the interpreter, and compiled for the GPUs that matter.

Each takes a process of its own: Triton decides when it is imported which of the two it does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import INTERPRETED

from knit_data.ops.tables import sums_of

pytest.importorskip("triton")
HERE = Path(__file__).parent
here_only = pytest.mark.skipif(INTERPRETED, reason="the other process does that")


def ran(*arguments: str, **environment: str) -> str:
    """What a process of its own printed, warnings being errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=HERE.parents[1],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@here_only
def test_the_contract_holds_in_the_interpreter() -> None:
    files = [str(HERE / name) for name in ("test_pack.py", "test_segment_ops.py")]
    found = ran("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", "interpreter", TRITON_INTERPRET="1")
    assert int(found.splitlines()[-1].split(" passed")[0]) > 100


COMPILE = """
import re
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from knit_data.ops import tiles

TARGETS = {f"sm_{n}": GPUTarget("cuda", n, 32) for n in (80, 90, 100)} | {"gfx942": GPUTarget("hip", "gfx942", 64)}
COPY = dict(tiles="*i64", pad="i64", WORD="constexpr", ALIGN="constexpr", BLOCK="constexpr")
SUM = dict(tiles="*i64", occurrences="*i64", FROM="constexpr", TO="constexpr", ALIGN="constexpr", BLOCK="constexpr")


def moved(target, kernel, signature, constants):
    "The widest of what is read and of what is written, in bits."
    source = ASTSource(kernel, signature, constants, {(0,): [["tt.divisibility", 16]]})
    asm = triton.compile(source, target=target, options=tiles._OPTIONS).asm
    if target.backend == "hip":
        assert asm["hsaco"]
        found = re.findall(r"(?:global|buffer)_(load|store)_(dwordx4|dwordx2|dword|u?short|u?byte)", asm["amdgcn"])
        bits = {"dwordx4": 128, "dwordx2": 64, "dword": 32}
        found = [(which, bits.get(kind, 16 if "short" in kind else 8)) for which, kind in found]
    else:
        assert asm["cubin"]
        found = re.findall(r"(ld|st)\\.global(?:\\.v(\\d))?\\.[bfsu](\\d+)", asm["ptx"])
        found = [({"ld": "load", "st": "store"}[which], int(count or 1) * int(bits)) for which, count, bits in found]
    return [max((bits for one, bits in found if one == which), default=0) for which in ("load", "store")]


for name, target in TARGETS.items():
    for word, align in ((4, 16), (2, 2)):
        constants = dict(WORD=tiles._WORDS[word], ALIGN=align, BLOCK=tiles.TILE // word)
        print(name, "copy", word, align, *moved(target, tiles.copy_tiles, COPY, constants))
    for kind, to in ((tl.bfloat16, tl.float32), (tl.float32, tl.float32)):
        constants = dict(FROM=kind, TO=to, ALIGN=8, BLOCK=tiles.SUM_TILE)
        print(name, "sum", kind, to, *moved(target, tiles.sum_tiles, SUM, constants))
"""


@here_only
def test_they_compile_for_every_target_and_move_16_bytes_at_once(tmp_path: Path) -> None:
    """Where everything lies at multiples of 16 bytes; some GPUs move 32. A list of tiles is read 8 bytes at a time."""
    printed = ran("-c", COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    lines = [line.split() for line in printed.splitlines()]
    assert len(lines) == 4 * 4
    for target, what, *kinds, read, written in lines:
        widest = (int(read), int(written))
        if what == "sum" or kinds == ["4", "16"]:
            assert min(widest) >= 128, (target, what, kinds, widest)
        else:  # words of 2 bytes at any multiple of 2
            assert widest[0] <= 64 and widest[1] == 16, (target, what, kinds, widest)


# -- tables ------------------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(sizes=st.lists(st.integers(0, 40), max_size=8), tile=st.integers(1, 16))
def test_ranges_are_cut_into_tiles(sizes: list[int], tile: int) -> None:
    from knit_data.ops.tiles import cut

    which, offset = cut(np.array(sizes, np.int64), tile)
    want = [(i, at) for i, size in enumerate(sizes) for at in range(0, size, tile)]
    assert list(zip(which.tolist(), offset.tolist(), strict=True)) == want


@settings(max_examples=200)
@given(
    table=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(0, 5), st.integers(0, 99)), max_size=8)
)
def test_rows_are_cut_where_segments_begin_or_end(table: list[tuple[int, int, int, int]]) -> None:
    """Every row's occurrences, in the order of the segments; no piece is empty, none could have been longer."""
    want: dict[tuple[int, int], list[int]] = {}
    for source, first, length, place in table:
        for t in range(length):
            want.setdefault((source, first + t), []).append(place + t)
    sums = sums_of(np.array(table, np.int64).reshape(-1, 4))
    got = {(s.source, s.first + t): [place + t for place in s.places] for s in sums for t in range(s.length)}
    assert got == want and sum(s.length for s in sums) == len(want) and all(s.length for s in sums)
    edges = {(source, at) for source, first, length, _ in table if length for at in (first, first + length)}
    assert all((s.source, s.first) in edges and (s.source, s.first + s.length) in edges for s in sums)
    inside = {(s.source, s.first + t) for s in sums for t in range(1, s.length)}
    assert not inside & edges
