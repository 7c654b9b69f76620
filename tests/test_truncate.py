"""Overlong trajectories cut at admission: what is trained are the first tokens, whole media, and exact counts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from makers import loader, memory, trajectory

import knit_data as kd
from knit_data.truncate import truncated


def image(tokens: int, name: float = 0.0) -> kd.Media:
    return kd.Media({"pixel_values": torch.full((tokens, 2), name)}, tokens, patches=tokens * 4)


@given(
    lengths=st.lists(st.integers(2, 40), min_size=2, max_size=6),
    limit=st.integers(2, 30),
    masks=st.sampled_from(["absent", "bool", "float"]),
    layout=st.sampled_from(["packed", "padded"]),
)
def test_the_first_tokens_are_trained_and_the_counts_are_theirs(lengths, limit, masks, layout):
    store, wanted = memory(), {}
    with store.writer("w") as writer:
        for g, n in enumerate(lengths):
            t = trajectory(f"g{g}/0", f"g{g}", n)
            mask = torch.arange(n) % 3 == 1
            if masks != "absent":
                tokens = {**t.tokens, "loss_mask": mask if masks == "bool" else mask * 0.5}
                t = kd.Trajectory(t.id, t.group, 0, tokens, t.values, (), t.attributes)
            writer.put_group([t])
            counted = mask[:limit] if masks != "absent" else torch.arange(min(n, limit)) > 0
            if counted.any():
                wanted[t.id] = (t, int(counted.sum()))
    store.seal()
    policy = kd.GroupPolicy(oversize="truncate", max_tokens=limit)
    size = {"train_batch_size": 1, "mini_batch_size": 1, "group_size": 1, "groups": policy}
    seen = set()
    with loader(store, 64, {"layout": layout}, **size) as run:
        for mini in run:
            for micro in mini:
                (info,) = micro.infos
                t, count = wanted[info.id]
                seen.add(info.id)
                n = min(limit, len(t.tokens["input_ids"]))
                assert info.n_tokens == n and info.loss_tokens == mini.loss_tokens == count
                assert torch.equal(micro["input_ids"].flatten()[:n], t.tokens["input_ids"][:n])
                assert torch.equal(micro["logprobs"].flatten()[:n], t.tokens["logprobs"][:n])
                assert int((micro.targets("loss_mask") != 0).sum()) == count
                assert mini.stats["truncated"] == (len(t.tokens["input_ids"]) > limit)
                assert torch.equal(store.read(info).tokens["input_ids"], t.tokens["input_ids"][:n])
    assert seen == wanted.keys()


def cut(spans: list[list[tuple[int, int]]], n: int, limit: int) -> tuple[int, int, int]:
    """Tokens, patches and media that stay of one trajectory of ``n`` tokens with these media."""
    media = [kd.MediaRef(image(sum(length for _, length in s), float(i)), s) for i, s in enumerate(spans)]
    t = trajectory("a", "a", n, media=media)
    store = memory()
    with store.writer("w") as writer:
        info = writer.put_group([t])[0]
    table = truncated(store, info.table, limit)
    back = store.read(table[0])
    assert all(start + length <= table[0].n_tokens for ref in back.media for start, length in ref.spans)
    return table[0].n_tokens, table[0].patches, len(back.media)


def test_no_medium_is_cut():
    assert cut([[(5, 20)]], 40, 30) == (30, 80, 1)  # it ends before the limit
    assert cut([[(5, 20)]], 40, 25) == (25, 80, 1)  # just there
    assert cut([[(5, 20)]], 40, 24) == (5, 0, 0)
    assert cut([[(2, 3)], [(6, 10)], [(20, 4)]], 40, 15) == (6, 12, 1)
    assert cut([[(4, 3), (20, 3)], [(10, 5)]], 40, 22) == (4, 0, 0)  # two spans of one medium, another between
    assert cut([[(4, 3), (20, 3)], [(10, 5)]], 40, 39) == (39, 44, 2)
    assert cut([[(0, 20)]], 40, 10) == (40, 80, 1)  # nothing would stay: left as it is


def test_what_cannot_be_cut_is_dropped_and_counted():
    store = memory()
    with store.writer("w") as writer:
        writer.put_group([trajectory("a", "a", 40, media=[kd.MediaRef(image(20), [(0, 20)])])])
        writer.put_group([trajectory("b", "b", 40)])
    store.seal()
    policy = kd.GroupPolicy(oversize="truncate", max_tokens=10)
    with loader(store, 64, train_batch_size=1, mini_batch_size=1, group_size=1, groups=policy) as run:
        assert [[i.id for micro in mini for i in micro.infos] for mini in run] == [["b"]]
        assert run.stats["dropped/oversize"] == 1 and run.stats["truncated"] == 1


def test_later_passes_and_a_resume_cut_alike():
    store = memory()
    with store.writer("w") as writer:
        for g in range(4):
            writer.put_group([trajectory(f"g{g}/{i}", f"g{g}", 20 + g + i) for i in range(2)])
    store.seal()
    size = {"train_batch_size": 4, "mini_batch_size": 1, "group_size": 2, "epochs": 2}
    size["groups"] = kd.GroupPolicy(oversize="truncate", max_tokens=21)

    def lengths(run: kd.TrajectoryLoader) -> list[list[int]]:
        return [sorted(i.n_tokens for micro in mini for i in micro.infos) for mini in run]

    with loader(store, 64, **size) as run:
        whole = lengths(run)
    assert max(map(max, whole)) == 21
    with loader(store, 64, **size) as run:
        for mini in run:
            list(mini)
            if mini.epoch == 1:
                break
        state = run.state_dict()
    with loader(store, 64, **size) as run:
        run.load_state_dict(state)
        assert lengths(run) == whole[5:]
