"""Bytes in and out: segments, back ends, and the trajectory store on top of them."""

from knit_data.store.store import TrajectoryStore
from knit_data.store.writer import StoreWriter

__all__ = ["StoreWriter", "TrajectoryStore"]
