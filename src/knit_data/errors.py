"""Every error that knit_data raises on purpose, on one page.

    KnitError
    ├── InvalidTrajectory   ValueError    a put was refused; nothing was written
    ├── InvalidArgument     ValueError    a constructor or call got values that cannot work together
    ├── InvalidGroup        ValueError    admission met a group that breaks the sampler's terms
    ├── StateError          ValueError    a checkpoint does not belong to this store or sampler
    ├── UsageError          RuntimeError  calls in an order that cannot be served
    ├── WaitTimeout         TimeoutError  the data did not come in time; the text says what is short
    ├── RankError           RuntimeError  another rank failed, disagrees or is gone
    └── StoreError
        ├── KeyMissing                    no such object: never written, or already reclaimed
        ├── ShortRead                     the object ends before the range that was asked for
        ├── Unreachable     OSError       the storage did not answer
        ├── CorruptData                   bytes do not match their checksum, or are not our format
        ├── WriterConflict                another live writer uses this name
        ├── ConsumerConflict              another live trainer reclaims this store
        └── StoreClosed                   the store was sealed or finished; nothing was written

A message says what was asked, what was found and what to do, with the values.
"""

from __future__ import annotations


class KnitError(Exception):
    """Base of all errors of this package."""


class InvalidTrajectory(KnitError, ValueError):
    """A trajectory or group that the writer refuses. Nothing was written."""


class InvalidArgument(KnitError, ValueError):
    """Arguments that cannot work, alone or together."""


class InvalidGroup(KnitError, ValueError):
    """A committed group that breaks the sampler's terms: size, identity, attributes or length."""


class StateError(KnitError, ValueError):
    """A checkpoint of another store, another sampler or another version."""


class UsageError(KnitError, RuntimeError):
    """Calls in an order that cannot be served, such as a second training pass."""


class WaitTimeout(KnitError, TimeoutError):
    """Nothing came in time. The message says what was waited for and what is short."""


class RankError(KnitError, RuntimeError):
    """Another rank failed, disagrees with global rank 0, or is gone."""


class StoreError(KnitError):
    """The store could not serve a request."""


class KeyMissing(StoreError):
    """No object of this name."""


class ShortRead(StoreError):
    """The object ends early. ``found`` bytes, from the start of the range, were read."""

    def __init__(self, message: str, found: int = 0) -> None:
        super().__init__(message)
        self.found = found


class Unreachable(StoreError, OSError):
    """The storage did not answer, or answered with an error of its own."""


class CorruptData(StoreError):
    """Bytes that do not match their checksum, or that are not in this format."""


class WriterConflict(StoreError):
    """Two live writers use one name."""


class ConsumerConflict(StoreError):
    """Two live trainers would reclaim one store."""


class StoreClosed(StoreError):
    """The store takes no more trajectories."""
