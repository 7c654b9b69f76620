"""Helpers for training frameworks; each is imported at its first use."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = ("fsdp", "huggingface")


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_NAMES)}")


def __dir__() -> list[str]:
    return sorted(_NAMES)
