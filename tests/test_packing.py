"""Packing into a given number of bins; everything else is tested through `plan`."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knit_data import packing
from knit_data.packing import pack, pack_into, pad, pad_into


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=20), st.integers(1, 6), st.integers(0, 20), st.booleans())
def test_a_given_number_of_bins_is_kept_or_refused(sizes: list[int], bins: int, more: int, padded: bool) -> None:
    falling, room = np.array(sorted(sizes, reverse=True)), max(sizes) + more
    label = (pad_into if padded else pack_into)(falling, room, bins)
    if label is None:
        assert bins < int((pad if padded else pack)(falling, room, 1).max()) + 1 or not padded
    else:
        assert sorted(set(label.tolist())) == list(range(min(bins, len(sizes))))
        for b in range(bins):
            there = falling[label == b]
            assert (there.size * there.max(initial=0) if padded else there.sum()) <= room


@pytest.mark.parametrize("into", [pack_into, pad_into])
def test_what_does_not_fit_is_refused(into) -> None:  # type: ignore[no-untyped-def]
    assert into(np.array([60, 60, 60]), 100, 2) is None
    assert into(np.array([60, 60, 60]), 100, 3).tolist() == [0, 1, 2]


def test_the_examples_in_the_docstrings_are_true() -> None:
    result = doctest.testmod(packing)
    assert (result.failed, result.attempted > 0) == (0, True)
