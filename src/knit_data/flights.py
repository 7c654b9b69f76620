"""What launchers say is in flight, as long as they live."""

from __future__ import annotations

import math

from knit_data.store.store import InFlight, TrajectoryStore

_LOOK = 0.05  # seconds between two looks
_DEAD = 600.0  # seconds of silence after which a launcher is taken for dead; a waiting one speaks once a minute


class Flights:
    """Looked up every 0.05 s at most, if it need not be at once. What a launcher had in flight is forgotten when it
    has said nothing for ten minutes: it died, and seats that are kept for its groups would stay empty."""

    def __init__(self, store: TrajectoryStore) -> None:
        self._store, self._at = store, -math.inf
        self._heard: dict[int, tuple[int, float]] = {}  # by launcher: what beat, and when it was first seen
        self.launches: list[InFlight] | None = None  # None: no launcher ever said

    def look(self, at_once: bool = False) -> bool:
        """Whether something has landed since the look before."""
        now = self._store.backend.now()
        if now - self._at < _LOOK and not at_once:
            return False
        before = {launch.group for launch in self.launches or ()}
        self._at, reports = now, self._store.launchers()
        self.launches = None if reports is None else []
        for i, (beat, launches) in enumerate(reports or ()):
            if self._heard.get(i, (None, 0.0))[0] != beat:
                self._heard[i] = beat, now
            if self.launches is not None and now - self._heard[i][1] < _DEAD:
                self.launches += launches
        return not before <= {launch.group for launch in self.launches or ()}
