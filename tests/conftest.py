"""What every test gets: the same seeds, and a look at the threads that it leaves behind."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from places import Place, place_of

# Tests contain no clocks: a slow machine must not fail a property.
# On CI the examples are the same every time, so that a change is judged by what it changed.
settings.register_profile("knit", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("knit")

torch.set_num_threads(1)  # the tensors here are tiny, and threads that wait for each other take minutes

JOIN_SECONDS = 10  # for a thread that is on its way out; one that is not fails the test all the same


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = []
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon or thread.name.startswith("knit-"):
            thread.join(JOIN_SECONDS)
            if thread.is_alive():
                left.append(thread.name)
    if left:
        pytest.fail(f"the test left threads alive: {sorted(left)}; close what it opened")


@pytest.fixture(params=["memory", "local"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Where a test's stores are: once in memory, once in a folder."""
    found = place_of(request.param, tmp_path)
    yield found
    found.close()
