"""Homes against brute force on tiny cases; hubs, chains, unequal costs; trades and gathering keep what they promise."""

from __future__ import annotations

import doctest
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knit_data import affinity
from knit_data.affinity import MediaUse, bring_together, homes, trade
from knit_data.errors import InvalidArgument

no_clock = settings(deadline=None)


def grouped(groups: int, size: int, patches: Any = 256) -> MediaUse:
    rows = np.arange(groups * size)
    return MediaUse(rows, rows // size, np.broadcast_to(np.asarray(patches), groups).copy())


def with_hub(use: MediaUse, rows: int, patches: int = 16) -> MediaUse:
    """And one medium more, which all rows use."""
    hub = use.patches.size
    media = np.concatenate((use.media, np.full(rows, hub)))
    return MediaUse(np.concatenate((use.rows, np.arange(rows))), media, np.append(use.patches, patches))


def text(sizes: Any, home: Any, ranks: int) -> list[int]:
    return np.bincount(home, sizes, ranks).astype(int).tolist()


def fewest(sizes: list[int], use: MediaUse, ranks: int, most: int) -> int:
    """(medium, rank) pairs of the best placement within ``most`` tokens a rank: tries all."""
    best = 10**9
    for home in itertools.product(range(ranks), repeat=len(sizes)):
        if max(text(sizes, home, ranks)) <= most:
            best = min(best, int(use.on(np.array(home), ranks).sum()))
    return best


@pytest.mark.parametrize(
    ("groups", "size", "ranks"), [(2, 3, 2), (4, 2, 2), (3, 2, 3), (2, 2, 4), (3, 2, 2), (1, 6, 2)]
)
@pytest.mark.parametrize("hub", [False, True])
def test_equal_rows_are_on_as_few_ranks_as_can_be(groups: int, size: int, ranks: int, hub: bool) -> None:
    sizes = [100] * (groups * size)
    use = with_hub(grouped(groups, size), len(sizes)) if hub else grouped(groups, size)
    home = homes(np.array(sizes), use, ranks, slack=0)
    assert text(sizes, home, ranks) == [sum(sizes) // ranks] * ranks
    assert use.on(home, ranks).sum() == fewest(sizes, use, ranks, sum(sizes) // ranks)


@no_clock
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 6), st.integers(1, 8), st.booleans())
def test_no_rank_is_above_the_mean_by_more_than_the_slack_and_a_row(
    sizes: list[int], ranks: int, size: int, hub: bool
) -> None:
    rows = np.arange(len(sizes))
    use = MediaUse(rows, rows // size, np.full(len(sizes), 64))
    use = with_hub(use, len(sizes)) if hub else use
    home = homes(np.array(sizes), use, ranks, slack=0.02)
    assert home.tolist() == homes(np.array(sizes), use, ranks, slack=0.02).tolist()
    assert home.min() >= 0 and home.max() < ranks
    assert max(text(sizes, home, ranks)) <= 1.02 * sum(sizes) / ranks + max(sizes)


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_hub_is_on_every_rank_and_groups_on_one(ranks: int) -> None:
    use = with_hub(grouped(32, 8), 256)
    on = use.on(homes(np.full(256, 100), use, ranks, slack=0.02), ranks)
    assert on.sum(axis=1).tolist() == [1] * 32 + [ranks]
    assert on[:32].sum(axis=0).tolist() == [32 // ranks] * ranks


def test_a_chain_of_images_is_cut_where_few_share_them() -> None:
    """Group g uses images g and g + 1: ranks hold runs of groups, and images at the cuts are encoded twice."""
    rows = np.arange(128)
    use = MediaUse(np.tile(rows, 2), np.concatenate((rows // 8, rows // 8 + 1)), np.full(17, 64))
    home = homes(np.full(128, 100), use, 4, slack=0.02)
    assert text(np.full(128, 100), home, 4) == [3200] * 4
    assert use.on(home, 4).sum() <= 17 + 8
    assert use.on(home, 4).sum(axis=1).max() <= 2


def test_patches_are_balanced_where_tokens_permit() -> None:
    """Eight groups of equal length, images of 4,096 and 256 patches: two large ones on each of two ranks."""
    use = grouped(8, 4, [4096] * 4 + [256] * 4)
    on = use.on(homes(np.full(32, 100), use, 2, slack=0.02), 2)
    assert (use.patches @ on).tolist() == [2 * 4096 + 2 * 256] * 2


def test_rows_without_media_fill_the_valleys() -> None:
    use = MediaUse(np.arange(8), np.zeros(8, np.int64), np.array([256]))  # 8 of 16 rows, one image
    home = homes(np.array([50] * 8 + [100] * 4 + [50] * 8), use, 2, slack=0)
    assert use.on(home, 2).sum() == 1
    assert text([50] * 8 + [100] * 4 + [50] * 8, home, 2) == [600, 600]


@pytest.mark.parametrize("groups", [3, 5, 7, 9])
def test_no_image_is_on_three_ranks_when_two_can_hold_it(groups: int) -> None:
    use = grouped(groups, 30)
    home = homes(np.full(groups * 30, 10), use, 3, slack=0)
    assert use.on(home, 3).sum(axis=1).max() <= 2
    assert text(np.full(groups * 30, 10), home, 3) == [groups * 100] * 3


# -- bins that exist already -------------------------------------------------------------------------------------------


@no_clock
@given(st.data(), st.integers(1, 4), st.integers(1, 5), st.sampled_from(["packed", "padded"]))
def test_trades_keep_the_number_of_rows_and_the_limits(
    data: st.DataObject, ranks: int, count: int, layout: str
) -> None:
    bins = ranks * count
    sizes = np.array(data.draw(st.lists(st.integers(1, 30), min_size=bins, max_size=4 * bins)))
    micro = np.array(data.draw(st.lists(st.integers(0, bins - 1), min_size=sizes.size, max_size=sizes.size)))
    use = MediaUse(np.arange(sizes.size), np.arange(sizes.size) // 3, np.full(sizes.size, 4))
    home = homes(sizes, use, ranks, slack=0.02)
    most = np.zeros(bins, np.int64)
    if layout == "packed":
        np.add.at(most, micro, sizes)
    else:
        np.maximum.at(most, micro, sizes)
    most += data.draw(st.integers(0, 3))
    out = trade(micro, sizes, home, use, ranks, most, layout)
    assert np.bincount(out, minlength=bins).tolist() == np.bincount(micro, minlength=bins).tolist()
    for b in range(bins):
        there = sizes[out == b]
        assert (there.sum() if layout == "packed" else there.max(initial=0)) <= most[b]
    assert (out % ranks == home).sum() >= (micro % ranks == home).sum()


def test_rows_of_similar_length_go_home() -> None:
    sizes = np.repeat(np.arange(100, 164), 4)
    micro = np.arange(256)  # a bin each, on four ranks
    home = np.random.default_rng(0).permutation(256) % 4
    use = MediaUse(np.arange(256), home, np.full(4, 64))
    out = trade(micro, sizes, home, use, 4, sizes + 2, "packed")
    assert (out % 4 == home).mean() > 0.9 > 0.5 > (micro % 4 == home).mean()


@no_clock
@given(st.data(), st.integers(1, 3))
def test_gathering_changes_no_micro_batch_s_sizes(data: st.DataObject, ranks: int) -> None:
    sizes = np.array(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=30)))
    micro = np.array(data.draw(st.lists(st.integers(0, 4 * ranks - 1), min_size=sizes.size, max_size=sizes.size)))
    use = MediaUse(np.arange(sizes.size), np.arange(sizes.size) % 4, np.full(4, 4))
    out = bring_together(micro, sizes, use, ranks)
    assert (out % ranks).tolist() == (micro % ranks).tolist()
    for b in range(4 * ranks):
        assert sorted(sizes[out == b]) == sorted(sizes[micro == b])


@pytest.mark.parametrize(
    ("rows", "media", "patches", "message"),
    [
        ([0, 1], [0], [1], "2 rows and 1 media"),
        ([0], [2], [1, 1], "medium 2 is used, patches has 2"),
        ([0], [-1], [1], r"media\[0\] is -1"),
        ([-3], [0], [1], r"rows\[0\] is -3"),
        ([0], [0], [-2], r"patches\[0\] is -2"),
        ([0], [0], [0.5], "patches is float64"),
        ([[0]], [0], [1], r"rows is int64 \[1, 1\]"),
    ],
)
def test_bad_media_are_named(rows: Any, media: Any, patches: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        MediaUse(np.array(rows), np.array(media), np.array(patches))


def test_the_examples_in_the_docstrings_are_true() -> None:
    result = doctest.testmod(affinity)
    assert (result.failed, result.attempted > 0) == (0, True)
