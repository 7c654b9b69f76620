"""Every guarantee of `plan` for any input, its count against oracles, and reports from users of other frameworks."""

from __future__ import annotations

import doctest
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knit_data import planning
from knit_data.affinity import MediaUse
from knit_data.errors import InvalidArgument
from knit_data.planning import SLACK, Padding, Plan, longest_that_fits, plan

Layout: TypeAlias = Literal["packed", "padded"]
Problem: TypeAlias = tuple[list[int], int, int, Layout, Padding]  # lengths, ranks, cap, layout, padding
LAYOUTS: tuple[Layout, ...] = ("packed", "padded")
PLAIN = Padding()
no_clock = settings(deadline=None)
layouts = st.sampled_from(LAYOUTS)
paddings = st.builds(Padding, total_to=st.integers(1, 20), sequence_to=st.integers(1, 12))


def up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def down(value: int, multiple: int) -> int:
    return value // multiple * multiple


def padded_tokens(lengths: list[int], layout: Layout, padding: Padding) -> int:
    """What a micro-batch of these trajectories takes, straight from the description of the layouts."""
    rows = [up(n, padding.sequence_to) for n in lengths]
    if layout == "packed":
        return up(sum(rows), padding.total_to)
    return len(rows) * max(rows, default=0)


def lognormal(mu: float, sigma: float, size: int, most: int, seed: int = 0) -> npt.NDArray[np.int64]:
    drawn = np.random.default_rng(seed).lognormal(mu, sigma, size)
    return np.clip(drawn, 2, most).astype(np.int64)


TOOL_USE = (6.426, 0.655)  # mu, sigma of the log of response tokens: multi-turn tool use, median 650, longest 2,700
REASONING = (9.594, 0.948)  # long reasoning, median 19,200, longest 39,500


def check(
    made: Plan,
    n: list[int],
    ranks: int,
    cap: int,
    layout: Layout,
    padding: Padding = PLAIN,
    alone: bool = False,
    media: bool = False,
) -> None:
    """All that `plan` promises, recomputed from the lengths."""
    bins = [[made.rows_of(rank, j).tolist() for rank in range(ranks)] for j in range(made.count)]
    flat = [rows for together in bins for rows in together]

    assert made.ranks == ranks
    assert made.ptr.tolist() == np.cumsum([0] + [len(rows) for rows in flat]).tolist()
    assert made.rows.tolist() == [row for rows in flat for row in rows]
    assert sorted(made.rows.tolist()) == list(range(len(n))), "every row exactly once"
    assert all(rows == sorted(rows) for rows in flat), "ascending inside a bin"

    for b, rows in enumerate(flat):
        tokens = padded_tokens([n[row] for row in rows], layout, padding)
        assert made.tokens[b] == tokens == made.tokens_of(b % ranks, b // ranks)
        assert tokens <= cap or (alone and len(rows) == 1), "no bin above the cap"

    empty = [b for b, rows in enumerate(flat) if not rows]
    assert made.n_padding == len(empty) == max(0, ranks * made.count - len(n)), "empty only where unavoidable"
    assert all(b >= ranks * (made.count - 1) for b in empty), "empty ones last, one a rank"
    assert made.count == 1 or len(empty) < ranks, "no rank without work"

    together = made.tokens.reshape(made.count, ranks)
    assert (together[:-1] >= together[1:]).all(), "the tokens of a rank fall"
    if not media:
        assert (together[:-1].min(axis=1) >= together[1:].max(axis=1)).all(), "similar cost at the same time"


@st.composite
def problems(draw: st.DrawFn, most: int = 60, layouts: st.SearchStrategy[Layout] = layouts) -> Problem:
    """Any lengths, and a cap that holds each of them."""
    n = draw(st.lists(st.one_of(st.integers(1, 200), st.integers(1, 12)), min_size=1, max_size=most))
    layout, padding = draw(layouts), draw(paddings)
    least = padded_tokens([max(n)], layout, padding)
    return n, draw(st.integers(1, 8)), least + draw(st.integers(0, 400)), layout, padding


# -- any input ---------------------------------------------------------------------------------------------------------


@no_clock
@given(problems())
def test_every_guarantee_for_any_input(problem: Problem) -> None:
    n, ranks, cap, layout, padding = problem
    made = plan(np.array(n), ranks=ranks, max_tokens=cap, layout=layout, padding=padding)
    check(made, n, ranks, cap, layout, padding)
    together = made.tokens.reshape(made.count, ranks)
    totals = together.sum(axis=0)
    assert np.ptp(totals) <= np.ptp(together, axis=1).max(), "ranks differ by less than micro-batches do"


@no_clock
@given(problems(), st.integers(0, 300))
def test_alone_only_relaxes_the_cap_for_single_trajectories(problem: Problem, lower: int) -> None:
    n, ranks, cap, layout, padding = problem
    cap = max(cap - lower, padded_tokens([1], layout, padding))
    made = plan(np.array(n), ranks=ranks, max_tokens=cap, layout=layout, padding=padding, alone=True)
    check(made, n, ranks, cap, layout, padding, alone=True)


def bins_of(made: Plan) -> list[list[int]]:
    return sorted(made.rows_of(rank, j).tolist() for j in range(made.count) for rank in range(made.ranks))


@no_clock
@given(problems())
def test_equal_input_gives_an_equal_plan(problem: Problem) -> None:
    n, ranks, cap, layout, padding = problem
    first, second = (
        plan(np.array(n, dtype), ranks=ranks, max_tokens=cap, layout=layout, padding=padding)
        for dtype in (np.int64, np.uint32)
    )
    assert first.rows.tolist() == second.rows.tolist()
    assert first.ptr.tolist() == second.ptr.tolist()
    assert first.tokens.tolist() == second.tokens.tolist()


@no_clock
@given(st.integers(1, 300), paddings, layouts)
def test_longest_that_fits_is_the_longest(cap: int, padding: Padding, layout: Layout) -> None:
    fitting = [n for n in range(1, cap + 1) if padded_tokens([n], layout, padding) <= cap]
    if fitting:
        assert longest_that_fits(cap, padding, layout) == fitting[-1]
    else:
        with pytest.raises(InvalidArgument, match=f"max_tokens={cap} holds no trajectory"):
            longest_that_fits(cap, padding, layout)


# -- how many micro-batches --------------------------------------------------------------------------------------------


def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    """Every way to divide rows into bins."""
    if not rows:
        yield []
        return
    for smaller in partitions(rows[1:]):
        yield [[rows[0]], *smaller]
        for i, rest in enumerate(smaller):
            yield [*smaller[:i], [rows[0], *rest], *smaller[i + 1 :]]


def fewest_bins(n: list[int], cap: int, layout: Layout, padding: Padding) -> int:
    return min(
        len(bins) for bins in partitions(n) if all(padded_tokens(lengths, layout, padding) <= cap for lengths in bins)
    )


def first_fit_decreasing(n: list[int], cap: int, layout: Layout, padding: Padding) -> int:
    bins: list[list[int]] = []
    for length in sorted(n, reverse=True):
        for lengths in bins:
            if padded_tokens([*lengths, length], layout, padding) <= cap:
                lengths.append(length)
                break
        else:
            bins.append([length])
    return len(bins)


@no_clock
@given(problems(most=7))
def test_the_count_is_optimal_when_padded_and_never_above_first_fit_when_packed(
    problem: Problem,
) -> None:
    n, ranks, cap, layout, padding = problem
    made = plan(np.array(n), ranks=ranks, max_tokens=cap, layout=layout, padding=padding)
    best = up(fewest_bins(n, cap, layout, padding), ranks)
    if layout == "padded":
        assert made.count * ranks == best
    else:
        assert best <= made.count * ranks <= up(first_fit_decreasing(n, cap, layout, padding), ranks)


@no_clock
@given(problems(layouts=st.just("packed")))
def test_packed_never_needs_more_than_first_fit_and_is_optimal_at_the_lower_bound(
    problem: Problem,
) -> None:
    n, ranks, cap, _, padding = problem
    made = plan(np.array(n), ranks=ranks, max_tokens=cap, padding=padding)
    room = down(cap, padding.total_to)
    bound = up(-(-sum(up(length, padding.sequence_to) for length in n) // room), ranks)
    assert bound <= made.count * ranks <= up(first_fit_decreasing(n, cap, "packed", padding), ranks)


def test_fewer_micro_batches_than_first_fit_where_equal_filling_finds_them() -> None:
    n = [4, 4, 3, 3, 3, 3]  # first fit: 4 + 4, 3 + 3 + 3, 3
    assert first_fit_decreasing(n, 10, "packed", Padding()) == 3
    made = plan(np.array(n), ranks=1, max_tokens=10)
    assert made.tokens.tolist() == [10, 10]


# -- reports from users of other frameworks ----------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_seven_tokens_times_eight_under_eight(layout: Layout, ranks: int) -> None:
    """verl#7553: balancing gave a micro-batch of 14 tokens under a cap of 8."""
    made = plan(np.array([7] * 8), ranks=ranks, max_tokens=8, layout=layout)
    check(made, [7] * 8, ranks, 8, layout)
    assert made.count == 8 // ranks
    assert made.tokens.tolist() == [7] * 8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trajectory_above_the_cap_is_refused_or_alone(layout: Layout) -> None:
    """OpenRLHF#1280: 21 tokens came out as a valid micro-batch under a cap of 20."""
    with pytest.raises(InvalidArgument, match=r"row 0 has 21 tokens; max_tokens=20 .*at most 20 .*1 of 1 rows"):
        plan(np.array([21]), ranks=1, max_tokens=20, layout=layout)
    with pytest.raises(InvalidArgument, match=r"row 2 has 21 tokens.*2 of 4 rows"):
        plan(np.array([5, 20, 21, 30]), ranks=1, max_tokens=20, layout=layout)

    assert plan(np.array([21]), ranks=1, max_tokens=20, layout=layout, alone=True).tokens.tolist() == [21]
    made = plan(np.array([5, 21, 5, 30]), ranks=1, max_tokens=20, layout=layout, alone=True)
    assert bins_of(made) == [[0, 2], [1], [3]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_would_need_seventeen_and_seven(layout: Layout) -> None:
    """verl#6176: each rank packed its own share, 17 and 7 micro-batches, and the gradient exchange never ended."""
    n = [900] * 17 + [100] * 68  # a share of 17 bins and one of about 7, under 1,000
    made = plan(np.array(n), ranks=2, max_tokens=1000, layout=layout)
    check(made, n, 2, 1000, layout)
    assert made.count == 12


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_count_agreed_upon_by_maximum_leaves_no_light_rank_empty(layout: Layout) -> None:
    """slime#1838: minima 1 and 3, agreed 3, and the light rank had bins of 4, 0 and 0 trajectories."""
    n = [1000, 1000, 1000, 1000, 4000, 3900, 3800, 300]
    made = plan(np.array(n), ranks=2, max_tokens=4096, layout=layout)
    check(made, n, 2, 4096, layout)
    assert (made.count, made.n_padding) == (3, 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("n", "aligned", "n_padding"),
    [([51, 51, 51, 51, 60, 30, 30, 30], 8, 0), ([90, 80, 60, 30], 4, 0), ([90] * 5, 8, 3)],
    ids=["8 samples in 5 bins", "4 samples in 3 bins", "5 samples in 5 bins"],
)
def test_the_count_is_aligned_upwards(n: list[int], aligned: int, n_padding: int, layout: Layout) -> None:
    """OpenRLHF#1287: 5, 3 and 5 bins on 4 ranks were aligned to 4, 4 and 4, over the cap."""
    made = plan(np.array(n), ranks=4, max_tokens=100, layout=layout)
    check(made, n, 4, 100, layout)
    assert (made.count * 4, made.n_padding) == (aligned, n_padding)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cap", [100, 250, 400, 100_000])
def test_two_groups_of_eight_give_four_ranks_work(cap: int, layout: Layout) -> None:
    """trl#7328: whole groups were placed, 8, 8, 0 and 0 rows."""
    n = [100] * 16
    made = plan(np.array(n), ranks=4, max_tokens=cap, layout=layout)
    check(made, n, 4, cap, layout)
    assert made.tokens.reshape(made.count, 4).sum(axis=0).tolist() == [400] * 4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_number_of_trajectories_that_nothing_divides(ranks: int, layout: Layout) -> None:
    """NeMo-RL#648: 249 trajectories are not a multiple of 2."""
    n = lognormal(*TOOL_USE, size=249, most=4096).tolist()
    made = plan(np.array(n), ranks=ranks, max_tokens=8192, layout=layout)
    check(made, n, ranks, 8192, layout)
    assert made.rows.size == 249


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [[5], [3, 9, 4]])
def test_fewer_trajectories_than_ranks(n: list[int], layout: Layout) -> None:
    made = plan(np.array(n), ranks=8, max_tokens=10, layout=layout)
    check(made, n, 8, 10, layout)
    assert (made.count, made.n_padding) == (1, 8 - len(n))
    assert made.tokens.tolist() == sorted(n, reverse=True) + [0] * (8 - len(n))


# -- balance -----------------------------------------------------------------------------------------------------------


def imbalance(made: Plan) -> float:
    """Time that all ranks together spend, over what it would be without waiting: 1 is perfect."""
    tokens = made.tokens.reshape(made.count, made.ranks)
    return float(tokens.max(axis=1).sum() * made.ranks / tokens.sum())


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize(
    ("law", "cap"), [(TOOL_USE, 4096), (TOOL_USE, 16_384), (REASONING, 40_960), (REASONING, 65_536)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_real_lengths_are_balanced_and_dense(law: tuple[float, float], cap: int, layout: Layout, ranks: int) -> None:
    lengths = lognormal(*law, size=2048, most=min(cap, 39_500))
    made = plan(lengths, ranks=ranks, max_tokens=cap, layout=layout)
    check(made, lengths.tolist(), ranks, cap, layout)
    assert imbalance(made) < 1.05
    assert made.tokens.sum() / lengths.sum() < 1.02, "similar lengths share a padded micro-batch"
    if layout == "packed":
        bound = up(-(-int(lengths.sum()) // cap), ranks)
        assert made.count * ranks <= 1.02 * bound + ranks


# -- media -------------------------------------------------------------------------------------------------------------


@st.composite
def uses(draw: st.DrawFn, n: int) -> MediaUse:
    """Any pairs of n rows and a few media, also none, repeated, and a medium that all rows use."""
    media = draw(st.integers(1, 8))
    pairs = draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, media - 1)), max_size=2 * n))
    if draw(st.booleans()):
        pairs += [(row, 0) for row in range(n)]
    if draw(st.booleans()):
        pairs += [(row, media + row // 4) for row in range(n)]  # groups of 4 with an image each
    patches = draw(st.lists(st.sampled_from([0, 1, 16, 4096]), min_size=media + n, max_size=media + n))
    rows, numbers = (np.array(pairs, np.int64).reshape(-1, 2)[:, i] for i in (0, 1))
    return MediaUse(rows, numbers, np.array(patches))


@no_clock
@given(st.data(), problems(), st.integers(0, 300), st.booleans())
def test_every_guarantee_with_any_media(data: st.DataObject, problem: Problem, lower: int, alone: bool) -> None:
    n, ranks, cap, layout, padding = problem
    if alone:
        cap = max(cap - lower, padded_tokens([1], layout, padding))
    media = data.draw(uses(len(n)))
    args: dict[str, Any] = {"ranks": ranks, "max_tokens": cap, "layout": layout, "padding": padding, "alone": alone}
    plain, made, again = (plan(np.array(n), **args, media=use) for use in (None, media, media))
    check(made, n, ranks, cap, layout, padding, alone, media=True)
    assert made.count == plain.count
    assert (made.rows.tolist(), made.ptr.tolist()) == (again.rows.tolist(), again.ptr.tolist())
    new, old = (p.tokens.reshape(-1, ranks) for p in (made, plain))
    assert new.max(axis=1).sum() <= (1 + SLACK) * old.max(axis=1).sum()
    assert new.sum(axis=0).max() <= max((1 + SLACK) * new.sum() / ranks, old.sum(axis=0).max())


# micro-batches of the release before media: lengths, ranks, cap, layout, and the rows, bin after bin
BEFORE: list[tuple[list[int], int, int, Layout, list[list[int]]]] = [
    ([60, 90, 40, 30, 50], 2, 100, "packed", [[1], [2, 3], [4], [0]]),
    ([51, 51, 51, 51, 60, 30, 30, 30], 4, 100, "packed", [[4], [0], [1], [2], [7], [3], [5], [6]]),
    ([9, 5, 4, 4, 4, 3, 7, 2], 2, 14, "padded", [[1, 6], [2, 3, 4], [5, 7], [0]]),
    ([7, 7, 3, 12, 5, 5, 1, 2, 9, 4], 2, 20, "packed", [[2, 3], [0, 4, 7], [1, 5, 6], [8, 9]]),
]


@pytest.mark.parametrize(("n", "ranks", "cap", "layout", "rows"), BEFORE)
@pytest.mark.parametrize("media", [None, MediaUse(np.array([], int), np.array([], int), np.array([4]))])
def test_without_media_nothing_has_changed(
    n: list[int], ranks: int, cap: int, layout: Layout, rows: list[list[int]], media: MediaUse | None
) -> None:
    made = plan(np.array(n), ranks=ranks, max_tokens=cap, layout=layout, media=media)
    assert [made.rows_of(b % ranks, b // ranks).tolist() for b in range(made.tokens.size)] == rows


@no_clock
@given(problems())
def test_media_that_nobody_uses_have_no_influence(problem: Problem) -> None:
    n, ranks, cap, layout, padding = problem
    none = MediaUse(np.array([], np.int64), np.array([], np.int64), np.array([256]))
    plain, made = (
        plan(np.array(n), ranks=ranks, max_tokens=cap, layout=layout, padding=padding, media=media)
        for media in (None, none)
    )
    assert (made.rows.tolist(), made.ptr.tolist()) == (plain.rows.tolist(), plain.ptr.tolist())


def ranks_of(made: Plan, use: MediaUse) -> npt.NDArray[np.bool_]:
    """[U, ranks] which rank uses which medium."""
    rank = np.empty(made.rows.size, np.int64)
    rank[made.rows] = np.repeat(np.arange(made.tokens.size) % made.ranks, np.diff(made.ptr))
    return use.on(rank, made.ranks)


def grouped(groups: int, size: int, patches: int = 256) -> MediaUse:
    return MediaUse(np.arange(groups * size), np.arange(groups * size) // size, np.full(groups, patches))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("groups", "ranks", "cap"), [(4, 2, 100), (8, 8, 400), (32, 4, 300), (6, 3, 4000)])
def test_equal_groups_stay_whole_and_ranks_equal(groups: int, ranks: int, cap: int, layout: Layout) -> None:
    use = grouped(groups, 8)
    made = plan(np.full(groups * 8, 100), ranks=ranks, max_tokens=cap, layout=layout, media=use)
    on = ranks_of(made, use)
    assert on.sum(axis=1).tolist() == [1] * groups
    assert on.sum(axis=0).tolist() == [groups // ranks] * ranks
    assert made.tokens.reshape(-1, ranks).sum(axis=0).tolist() == [groups * 800 // ranks] * ranks


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("groups", "ranks", "each"), [(2, 4, 2), (1, 2, 2), (1, 4, 4), (4, 8, 2), (2, 8, 4)])
def test_more_ranks_than_groups_divide_them_evenly(groups: int, ranks: int, each: int, layout: Layout) -> None:
    use = grouped(groups, 8)
    made = plan(np.full(groups * 8, 100), ranks=ranks, max_tokens=4000, layout=layout, media=use)
    assert ranks_of(made, use).sum(axis=1).tolist() == [each] * groups
    assert set(made.tokens.tolist()) == {groups * 800 // ranks}


def test_a_group_that_has_no_room_on_one_rank_is_divided_between_two() -> None:
    """Three groups on two ranks: each rank has a whole one and half of the third."""
    use = grouped(3, 8)
    made = plan(np.full(24, 100), ranks=2, max_tokens=400, media=use)
    assert sorted(ranks_of(made, use).sum(axis=1).tolist()) == [1, 1, 2]
    assert made.tokens.tolist() == [400] * 6


def test_rows_of_a_group_that_have_equal_length_share_micro_batches() -> None:
    use = grouped(4, 4)
    made = plan(np.full(16, 100), ranks=2, max_tokens=400, media=use)
    assert sorted(made.rows_of(b % 2, b // 2).tolist() for b in range(4)) == np.arange(16).reshape(4, 4).tolist()


def test_real_lengths_keep_every_image_on_one_rank_of_eight() -> None:
    lengths = lognormal(*TOOL_USE, size=2048, most=4096)
    use = grouped(256, 8)
    made = plan(lengths, ranks=8, max_tokens=16_384, media=use)
    plain = plan(lengths, ranks=8, max_tokens=16_384)
    assert ranks_of(plain, use).sum(axis=1).mean() > 5  # 8 (1 - (7/8)^8) = 5.25 by chance
    assert ranks_of(made, use).sum(axis=1).mean() < 1.05
    vision = use.patches @ ranks_of(made, use)
    assert vision.max() * 8 / vision.sum() < 1.15


def test_rows_that_fill_a_micro_batch_each_stay_together_too() -> None:
    lengths = np.repeat(np.arange(1000, 1128), 4) - 1000 + 3000  # cap 3,200: one row a micro-batch
    use = grouped(128, 4)
    shuffled = np.random.default_rng(0).permutation(512)
    made = plan(lengths[shuffled], ranks=4, max_tokens=3200, media=use)
    plain = plan(lengths[shuffled], ranks=4, max_tokens=3200)
    assert made.count == plain.count == 128
    assert ranks_of(made, use).sum() < 0.6 * ranks_of(plain, use).sum()


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_tokens": np.array([], np.int64)}, "n_tokens is empty"),
        ({"n_tokens": np.array([3, 0])}, "n_tokens of row 1 is 0"),
        ({"n_tokens": np.array([3.0])}, "float64"),
        ({"n_tokens": np.array([[3]])}, r"\[1, 1\]"),
        ({"ranks": 0}, "ranks=0"),
        ({"ranks": True}, "ranks=True"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"layout": "dense"}, "layout='dense'"),
        ({"media": MediaUse(np.array([3]), np.array([0]), np.array([1]))}, "row 3 uses a medium; there are 3"),
        ({"padding": Padding(total_to=16, sequence_to=32), "alone": True}, "holds no trajectory"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"n_tokens": np.array([3, 4, 5]), "ranks": 2, "max_tokens": 20}
    with pytest.raises(InvalidArgument, match=message):
        plan(**{**good, **arguments})


@pytest.mark.parametrize("field", ["token_id", "total_to", "sequence_to"])
def test_bad_padding_is_named(field: str) -> None:
    with pytest.raises(InvalidArgument, match=f"Padding.{field}=-1"):
        Padding(**{field: -1})


def test_a_plan_is_read_only_and_knows_its_size() -> None:
    made = plan(np.array([3, 4, 5]), ranks=2, max_tokens=20)
    with pytest.raises(ValueError, match="read-only"):
        made.rows_of(0, 0)[0] = 1
    for rank, j in [(2, 0), (-1, 0), (0, 1), (0, -1)]:
        with pytest.raises(InvalidArgument, match="1 micro-batches on 2 ranks"):
            made.rows_of(rank, j)


def test_the_examples_in_the_docstrings_are_true() -> None:
    result = doctest.testmod(planning)
    assert (result.failed, result.attempted > 0) == (0, True)
