"""The most recently used values within a number of bytes, against a list that is searched."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from knit_data.recent import Recent

steps = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 12)), max_size=30)


@given(steps, st.integers(0, 15))
def test_the_least_recently_used_go_first(todo, limit):
    kept, oracle = Recent[int](lambda n: n), list[tuple[str, int]]()
    for key, n in todo:
        if n % 3 == 0:  # look
            assert kept.found([key]) == dict(pair for pair in oracle if pair[0] == key)
            oracle.sort(key=lambda pair: pair[0] == key)  # stable: what was used last stands last
        else:
            kept.put(key, n, limit)
            oracle = [pair for pair in oracle if pair[0] != key] + [(key, n)] * (n <= limit)
            while sum(size for _, size in oracle) > limit:
                oracle.pop(0)
        assert kept.nbytes == sum(size for _, size in oracle) <= limit and len(kept) == len(oracle)
    assert kept.found("abcd") == dict(oracle)
    kept.clear()
    assert kept.nbytes == len(kept) == 0
