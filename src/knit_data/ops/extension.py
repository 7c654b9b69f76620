"""The C++ kernels, if they were built. Importing this registers them with torch's dispatcher."""

from __future__ import annotations

import functools
import importlib
import logging

missing: str | None = None  # why there are none; None when they serve
try:
    importlib.import_module("knit_data._C")
except ImportError as error:
    missing = str(error)


@functools.cache
def say_that_it_is_missing() -> None:
    """Once a process, in the log: a pure-Python build may be what was asked for, and ``-W error`` must not break it."""
    logging.getLogger("knit_data").warning(
        "knit_data runs without its C++ extension (%s): reading is slower and holds the interpreter lock. "
        "Install a C++ compiler and reinstall with --no-build-isolation and without KNIT_NO_EXT.",
        missing,
    )
