"""What a share says of media: which are new where, and how often they are encoded."""

from __future__ import annotations

import torch
from makers import loader, rows, trajectory

import knit_data as kd
from knit_data.infos import InfoTable
from knit_data.planning import plan
from knit_data.share import _encodes, _new_patches, media_use


def picture(name: int, tokens: int = 2, patches: int = 8) -> kd.Media:
    return kd.Media({"pixel_values": torch.full((tokens, 2), name)}, tokens, patches=patches)


def shows(name: str, *pictures: kd.Media) -> kd.Trajectory:
    """Each picture at the next two places, of ten."""
    return trajectory(name, n=10, media=[kd.MediaRef(p, [(2 * i, 2)]) for i, p in enumerate(pictures)])


def table() -> InfoTable:
    """Two segments that both hold picture 1; b shows it twice."""
    one, two, three = picture(1, patches=16), picture(2, patches=4), picture(3, patches=64)
    parts = [[shows("a", two, one), shows("b", one, one)], [shows("c", one, three), shows("d")]]
    return InfoTable.concat([rows(part, segment=i) for i, part in enumerate(parts)])


def test_media_of_equal_digest_are_one_wherever_they_are_stored() -> None:
    found = table()
    use = media_use(found)
    assert len(found.media) == 4 and use.patches.size == 3
    assert use.rows.tolist() == [0, 0, 1, 1, 2, 2]
    assert use.patches[use.media].tolist() == [4, 16, 16, 16, 16, 64]
    assert len(set(use.media.tolist())) == 3


def test_each_medium_is_new_once_on_a_rank_in_the_order_of_first_use() -> None:
    found = table()
    use = media_use(found)
    one = plan(found.columns["n_tokens"], ranks=1, max_tokens=20)
    met: set[int] = set()
    want = []
    for j in range(one.count):
        new = []
        for row in one.rows_of(0, j).tolist():
            for u in use.media[use.rows == row].tolist():
                if u not in met:
                    met.add(u)
                    new.append(int(use.patches[u]))
        want.append((tuple(new),))
    assert _new_patches(use, one) == tuple(want)
    assert sorted(cost for (new,) in want for cost in new) == [4, 16, 64]

    four = plan(found.columns["n_tokens"], ranks=4, max_tokens=10)  # a row each: rank r has row r
    assert _new_patches(use, four) == (((4, 16), (16,), (16, 64), ()),)


def test_encodes_are_counted_over_ranks_and_trajectories() -> None:
    found = table()
    use = media_use(found)
    four = plan(found.columns["n_tokens"], ranks=4, max_tokens=10)
    assert _encodes(found, use, four) == {
        "encodes": 5.0,  # 2, 1, 2 and 0
        "naive_encodes": 6.0,
        "distinct_media": 3.0,
        "ranks_per_medium": 5 / 3,
        "vision_imbalance": 80 * 4 / 116,
    }
    one = plan(found.columns["n_tokens"], ranks=1, max_tokens=20)
    assert _encodes(found, use, one)["encodes"] == 3.0


def test_a_medium_in_two_spans_is_shown_once() -> None:
    split = trajectory("s", n=10, media=[kd.MediaRef(picture(1), [(1, 1), (5, 1)])])
    found = rows([split])
    made = plan(found.columns["n_tokens"], ranks=1, max_tokens=10)
    assert _encodes(found, media_use(found), made)["naive_encodes"] == 1.0


def test_without_media() -> None:
    found = rows([shows("a"), shows("b")])
    use, made = media_use(found), plan(found.columns["n_tokens"], ranks=2, max_tokens=10)
    assert use.rows.size == use.patches.size == 0
    assert _new_patches(use, made) == (((), ()),)
    assert _encodes(found, use, made) == {
        "encodes": 0.0,
        "naive_encodes": 0.0,
        "distinct_media": 0.0,
        "ranks_per_medium": 0.0,
        "vision_imbalance": 1.0,
    }


def test_the_statistics_of_a_mini_batch_have_the_counts() -> None:
    store = kd.TrajectoryStore("memory://")
    with store.writer("w") as writer:
        writer.put_group([trajectory(f"g/{i}", "g", n=8) for i in range(2)])
    store.seal()
    with loader(store, train_batch_size=1, mini_batch_size=1, group_size=2) as run:
        for mini in run:
            list(mini)
            stats = mini.stats
            assert (stats["encodes"], stats["ranks_per_medium"], stats["vision_imbalance"]) == (0.0, 0.0, 1.0)
