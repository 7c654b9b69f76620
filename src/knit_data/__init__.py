"""knit_data: the loader between rollout and training in LLM reinforcement learning."""

from __future__ import annotations

from knit_data import integrations, ops
from knit_data.admission import AdmittedMiniBatch
from knit_data.batch import MicroBatch
from knit_data.demand import Demand
from knit_data.encoder import SharedEncoder
from knit_data.errors import (
    ConsumerConflict,
    CorruptData,
    InvalidArgument,
    InvalidGroup,
    InvalidTrajectory,
    KeyMissing,
    KnitError,
    RankError,
    ShortRead,
    StateError,
    StoreClosed,
    StoreError,
    Unreachable,
    UsageError,
    WaitTimeout,
    WriterConflict,
)
from knit_data.infos import InfoTable, TrajectoryInfo
from knit_data.loader import TrajectoryLoader
from knit_data.media import MediaBatch, Medium
from knit_data.minibatch import MiniBatch
from knit_data.pacing import Launch, RolloutPacer
from knit_data.placement import place_media
from knit_data.planning import Padding
from knit_data.policy import GroupPolicy, group_advantages
from knit_data.quotas import Quotas, at_least, at_most
from knit_data.sampler import QuotaSampler
from knit_data.simulation import Report, Scenario, Source, simulate
from knit_data.staleness import Staleness
from knit_data.store import StoreWriter, TrajectoryStore
from knit_data.stream import TrajectoryStream
from knit_data.trajectory import Media, MediaRef, Trajectory

__version__ = "0.1.0"

__all__ = [
    "AdmittedMiniBatch",
    "ConsumerConflict",
    "CorruptData",
    "Demand",
    "GroupPolicy",
    "InfoTable",
    "InvalidArgument",
    "InvalidGroup",
    "InvalidTrajectory",
    "KeyMissing",
    "KnitError",
    "Launch",
    "Media",
    "MediaBatch",
    "MediaRef",
    "Medium",
    "MicroBatch",
    "MiniBatch",
    "Padding",
    "QuotaSampler",
    "Quotas",
    "RankError",
    "Report",
    "RolloutPacer",
    "Scenario",
    "SharedEncoder",
    "ShortRead",
    "Source",
    "Staleness",
    "StateError",
    "StoreClosed",
    "StoreError",
    "StoreWriter",
    "Trajectory",
    "TrajectoryInfo",
    "TrajectoryLoader",
    "TrajectoryStore",
    "TrajectoryStream",
    "Unreachable",
    "UsageError",
    "WaitTimeout",
    "WriterConflict",
    "at_least",
    "at_most",
    "group_advantages",
    "integrations",
    "ops",
    "place_media",
    "simulate",
]
