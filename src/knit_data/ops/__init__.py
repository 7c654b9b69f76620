"""Data movement as ``torch.library`` operators in the namespace ``knit``.

One op family a file: its schema, reference, fake and public function. The C++ twin has the file's name in csrc/.

    tables      tables of segments, and what is wrong with them
    dispatch    how the next two reach their kernels
    pack        rows to end-to-end tokens, and back
    segment     segments of several sources to their places, and gradients back
    tiles       these two on a GPU
    read, fill  for the collator alone: bytes of files to memory, and what stands beside them
"""

from __future__ import annotations

from knit_data.ops.pack import pack, unpack
from knit_data.ops.segment import (
    accumulate_segments,
    accumulate_segments_,
    gather_segments,
    scatter_segments,
    scatter_segments_,
)

__all__ = [
    "accumulate_segments",
    "accumulate_segments_",
    "gather_segments",
    "pack",
    "scatter_segments",
    "scatter_segments_",
    "unpack",
]
