"""Ten reports of users of other projects: the input that went wrong there, and the right answer here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from makers import group, loader, read_through, trajectory

import knit_data as kd
from knit_data.planning import plan


def put(groups: Sequence[Sequence[kd.Trajectory]]) -> kd.TrajectoryStore:
    store = kd.TrajectoryStore("memory://")
    with store.writer("w") as writer:
        for members in groups:
            writer.put_group(members)
    store.seal()
    return store


def singles(lengths: Sequence[int]) -> list[list[kd.Trajectory]]:
    return [[trajectory(f"t{i}", f"t{i}", n)] for i, n in enumerate(lengths)]


def whole(content: Sequence[Sequence[kd.Trajectory]], cap: int, **changes):
    """All groups as one mini-batch."""
    sizes = {"train_batch_size": len(content), "mini_batch_size": len(content), "group_size": None}
    return loader(put(content), cap, **{**sizes, **changes})


def test_slime_1838_a_light_rank_gets_no_empty_micro_batch():
    lengths = np.array([1000, 1000, 1000, 1000, 4000, 3900, 3800, 300])
    made = plan(lengths, ranks=2, max_tokens=4096)
    assert made.count == 3 and made.n_padding == 0
    bins = [made.rows_of(rank, j).tolist() for rank in range(2) for j in range(3)]
    assert min(map(len, bins)) == 1
    assert sorted(row for rows in bins for row in rows) == list(range(8))
    assert all(lengths[rows].sum() <= 4096 for rows in bins)


PROMPT, RESPONSE, CAP = 400, 3697, 4096  # one token above the cap


def test_slime_1839_one_trajectory_above_the_cap_is_an_error_that_names_it():
    with whole([group("g", 2, lengths=[PROMPT + RESPONSE, 10])], CAP) as run:
        with pytest.raises(kd.InvalidGroup, match=r"'g/0' of group 'g' has 4097 tokens, the limit is 4096"):
            next(run)
        assert run.stats["bytes_read"] == 0  # before any payload is read


def test_slime_1839_alone_is_a_micro_batch_of_its_own():
    policy = kd.GroupPolicy(oversize="alone")
    groups = [group("g", 2, lengths=[PROMPT + RESPONSE, 10]), group("h", 2, lengths=[20, 30])]
    with whole(groups, CAP, groups=policy) as run:
        sizes = {}
        for mini in run:
            for micro in mini:
                sizes[tuple(sorted(info.id for info in micro.infos))] = len(micro["input_ids"])
    assert sizes.pop(("g/0",)) == 4097
    assert sum(sizes.values()) == 60 and len(sizes) == 1


def test_slime_1839_drop_takes_the_whole_group_and_counts_it():
    policy = kd.GroupPolicy(oversize="drop")
    groups = [group("g", 2, lengths=[PROMPT + RESPONSE, 10]), group("h", 2)]
    with loader(put(groups), CAP, train_batch_size=1, mini_batch_size=1, group_size=2, groups=policy) as run:
        assert [read_through(mini)[2] for mini in run] == [["h/0", "h/1"]]
        assert run.stats["dropped/oversize"] == 1


def test_slime_1839_truncate_keeps_what_fits_and_counts_it():
    policy = kd.GroupPolicy(oversize="truncate")
    groups = [group("g", 2, lengths=[PROMPT + RESPONSE, 10]), group("h", 2, lengths=[20, 30])]
    with whole(groups, CAP, groups=policy) as run:
        mini = next(run)
        lengths = {info.id: info.n_tokens for micro in mini for info in micro.infos}
        assert lengths == {"g/0": 4096, "g/1": 10, "h/0": 20, "h/1": 30}
        assert mini.stats["truncated"] == 1


@pytest.mark.parametrize(
    ("lengths", "aligned", "padding"),
    [
        ([60, 60, 60, 60, 60, 30, 30, 30], 8, 0),  # at least 5 bins of 100 tokens
        ([60, 60, 60, 30], 4, 0),  # at least 3
        ([90, 90, 90, 90, 90], 8, 3),  # at least 5, and no sixth trajectory for the other three
    ],
)
def test_openrlhf_1287_counts_are_aligned_up_and_the_cap_holds(lengths, aligned, padding):
    made = plan(np.array(lengths), ranks=4, max_tokens=100)
    assert made.count * 4 == aligned and made.n_padding == padding
    assert made.tokens.max() <= 100
    assert sorted(made.rows.tolist()) == list(range(len(lengths)))


def test_trl_7328_groups_split_when_ranks_would_starve():
    lengths = np.full(16, 100)  # 2 groups of 8 on 4 ranks
    made = plan(lengths, ranks=4, max_tokens=800)
    work = [sum(len(made.rows_of(rank, j)) for j in range(made.count)) for rank in range(4)]
    assert work == [4, 4, 4, 4]


@pytest.mark.parametrize(("train_batch", "mini_batch"), [(4, 2), (32, 32)])
def test_trl_6024_the_denominator_is_that_of_one_optimizer_step(train_batch, mini_batch):
    groups = [group(f"g{i}", 2) for i in range(train_batch)]
    total = sum(len(t.tokens["input_ids"]) - 1 for members in groups for t in members)
    sizes = {"train_batch_size": train_batch, "mini_batch_size": mini_batch, "group_size": 2}
    with loader(put(groups), 64, **sizes) as run:
        accumulated, denominators = [], []
        for mini in run:
            losses = [micro.targets("loss_mask").double().sum() * 1.0 / mini.loss_tokens for micro in mini]
            accumulated.append(float(sum(losses)))
            denominators.append(mini.loss_tokens)
    assert accumulated == pytest.approx([1.0] * (train_batch // mini_batch), rel=1e-12)
    assert sum(denominators) == total


def test_nemo_rl_648_no_count_has_to_divide_another():
    with whole(singles([2 + i % 40 for i in range(249)]), 64, group_size=1) as run:
        (ids,) = [read_through(mini)[2] for mini in run]
    assert len(set(ids)) == len(ids) == 249


def test_streaming_383_no_read_ahead_is_no_hang():
    with loader(put([group(f"g{i}") for i in range(8)]), options={"prefetch": 0}) as run:
        assert len([read_through(mini) for mini in run]) == 4


def test_nanochat_590_what_never_fits_does_not_clog_the_buffer():
    rows = [*singles([514 + 15 * i for i in range(100)]), [trajectory("fits", "fits", 513)]]
    sizes = {"train_batch_size": 1, "mini_batch_size": 1, "group_size": 1}
    with loader(put(rows), 513, **sizes, groups=kd.GroupPolicy(oversize="drop")) as run:
        for mini in run:
            for micro in mini:
                assert [info.id for info in micro.infos] == ["fits"] and (micro["labels"] != -100).any()
        assert run.stats["dropped/oversize"] == 100 and run.stats["mini_batches"] == 1
    with loader(put(rows), 513, **sizes) as run, pytest.raises(kd.InvalidGroup, match=r"'t0' .* 514 tokens.* 513"):
        next(run)


def test_olmo_core_657_a_part_whose_labels_are_all_ignored_is_finite():
    silent = {"input_ids": torch.randint(1, 97, (38,)), "loss_mask": torch.zeros(38)}
    loud = {"input_ids": torch.randint(1, 97, (38,)), "loss_mask": torch.ones(38).index_fill(0, torch.tensor([0]), 0)}
    groups = [[kd.Trajectory("s", "g", 0, silent), kd.Trajectory("l", "g", 0, loud)]]
    embed = torch.nn.Embedding(97, 97, dtype=torch.float64)
    with whole(groups, 38) as run:
        gradients = {}
        for mini in run:
            assert mini.loss_tokens == 37
            for micro in mini:
                loss = F.cross_entropy(embed(micro["input_ids"]), micro["labels"], reduction="none").sum()
                (loss / mini.loss_tokens).backward()
                gradients[micro.infos[0].id], embed.weight.grad = embed.weight.grad, None
    assert gradients["s"].abs().max() == 0.0
    assert gradients["l"].isfinite().all() and gradients["l"].abs().max() > 0


@pytest.mark.parametrize(("oversize", "kept"), [("drop", [4]), ("alone", [4, 4])])
def test_torchtitan_3855_a_group_is_never_trained_in_part(oversize, kept):
    groups = [group("long", 4, lengths=[5, 9, 7, 12]), group("short", 4, lengths=[5, 6, 7, 8])]
    seen: list[int] = []
    policy = kd.GroupPolicy(oversize=oversize, annotate=lambda infos: {"size": [float(len(infos))] * len(infos)})
    with loader(put(groups), 8, train_batch_size=1, mini_batch_size=1, group_size=4, groups=policy) as run:
        for mini in run:
            micros = list(mini)
            seen.append(sum(len(micro.infos) for micro in micros))
            assert all(micro["size"].tolist() == [4.0] * len(micro.infos) for micro in micros)
        assert seen == kept
        assert run.stats["dropped/oversize"] == (oversize == "drop")
