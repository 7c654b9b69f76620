"""Bytes in and out: segments, back ends, and the trajectory store on top of them."""

from knit_data.store.store import Demand, TrajectoryStore
from knit_data.store.writer import StoreWriter

__all__ = ["Demand", "StoreWriter", "TrajectoryStore"]
