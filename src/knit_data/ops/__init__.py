"""Data movement as ``torch.library`` operators in the namespace ``knit``.

One op family a file: its schema, reference, fake and public function. The C++ twin has the file's name in csrc/.
"""

from __future__ import annotations

from knit_data.ops.fill import fill_slots
from knit_data.ops.read import read_ranges

__all__ = ["fill_slots", "read_ranges"]
