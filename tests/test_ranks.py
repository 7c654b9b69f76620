"""Two and more ranks: equal counts, equal states, the errors of one on all, and exact gradients under FSDP2."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from makers import fill, group, loader, read_through, trajectory
from spawn import Ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import knit_data as kd
from knit_data import exchange


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def three():
    ranks = Ranks(3)
    yield ranks
    ranks.close()


def ok(results: list[Any]) -> list[Any]:
    """What the ranks returned; an exception in one of them fails the test."""
    failed = [r for r in results if isinstance(r, dict) and "error" in r]
    assert not failed, failed
    return results


def told(call: Callable[[], Any]) -> list[str] | None:
    """Class and text of the error that a call raises."""
    try:
        call()
    except kd.KnitError as e:
        return [type(e).__name__, str(e)]
    return None


# -- the same on all ranks ---------------------------------------------------------------------------------------------


def steps(_rank: int, _world: int, url: str, stop: int | None = None, state: str | None = None, **options: Any) -> Any:
    """Per mini-batch: its numbers, this rank's trajectories and the state after it; until ``stop`` of them."""
    changes = options.pop("changes", {})
    cap = options.pop("cap", 64)
    out = []
    with loader(kd.TrajectoryStore(url), cap, options, **changes) as run:
        if state is not None:
            run.load_state_dict(json.loads(state))
        for mini in run:
            index, _, ids = read_through(mini)
            numbers = [mini.train_batch, mini.epoch, mini.is_last, mini.loss_tokens, mini.n_trajectories, mini.n_groups]
            own = ("read_s", "verify_s", "copy_s", "bytes_logical", "bytes_unique", "bytes_read", "masked", "wait_s")
            own = (*own, "admit_wait_s", "read_wait_s")
            stats = {k: v for k, v in mini.stats.items() if k not in own}
            out.append({"ids": ids, "same": [index, *numbers, stats], "state": json.dumps(run.state_dict())})
            if len(out) == stop:
                break
    return out


def with_options(rank: int, world: int, url: str, options: dict[str, Any]) -> Any:
    return steps(rank, world, url, **options)


def merged(ranks: list[Any]) -> list[list[str]]:
    """The mini-batches of all ranks; numbers and states must agree, and no trajectory may be on two of them."""
    out = []
    for parts in zip(*ok(ranks), strict=True):
        ids = [name for part in parts for name in part["ids"]]
        assert len(ids) == len(set(ids)) == parts[0]["same"][5]
        assert all(part["same"] == parts[0]["same"] for part in parts)
        assert all(part["state"] == parts[0]["state"] for part in parts)
        out.append(sorted(ids))
    return out


@pytest.mark.parametrize("options", [{"prefetch": 0}, {"prefetch": 2}, {"prefetch": 2, "changes": {"epochs": 2}}])
def test_ranks_share_every_mini_batch(tmp_path, two, options):
    store = fill(kd.TrajectoryStore(tmp_path), 24)
    want = merged([steps(0, 1, str(tmp_path), **options)])
    assert merged(two.run(with_options, str(tmp_path), options)) == want
    assert len(want) == 12 * options.get("changes", {}).get("epochs", 1)
    assert store.demand().train_batch == 3


def test_a_run_goes_on_with_other_numbers_of_ranks(tmp_path, two, three):
    url = str(tmp_path)
    fill(kd.TrajectoryStore(tmp_path), 24)
    whole = steps(0, 1, url)
    first = two.run(with_options, url, {"stop": 3})
    second = steps(0, 1, url, stop=5, state=first[0][-1]["state"])
    third = three.run(with_options, url, {"state": second[-1]["state"]})
    assert merged(first) + merged([second]) + merged(third) == merged([whole])
    states = [step["state"] for part in (first[0], second, third[0]) for step in part]
    assert states == [step["state"] for step in whole]  # of no rank count


def rewound(_rank: int, _world: int, url: str) -> Any:
    with loader(kd.TrajectoryStore(url)) as run:
        states = [run.state_dict()]
        first = []
        for mini in run:
            first.append(read_through(mini))
            states.append(run.state_dict())
            if len(first) == 4:
                break
        run.load_state_dict(states[1])
        return first, [read_through(mini) for mini in run]


def test_all_ranks_rewind_a_running_loader(tmp_path, two):
    fill(kd.TrajectoryStore(tmp_path), 16)
    for first, again in ok(two.run(rewound, str(tmp_path))):
        assert again[:3] == first[1:] and len(again) == 7


def too_early(rank: int, _world: int, url: str) -> Any:
    store = kd.TrajectoryStore(url)
    with loader(store) as run:
        mini = next(run)
        dist.barrier()
        if rank == 0:
            store.seal()
        assert list(mini) == [] and mini.n_trajectories == 0
        return next(run, None)


def test_a_mini_batch_handed_out_before_the_end_is_empty_on_all_ranks(tmp_path, three):
    assert three.run(too_early, str(tmp_path)) == [None, None, None]


def only_one_looks_ahead(rank: int, _world: int, url: str) -> Any:
    """Rank 1 touches the second mini-batch while rank 0 is in a collective with the first."""
    with loader(kd.TrajectoryStore(url)) as run:
        first, second = next(run), next(run)
        first.index  # noqa: B018  # the touch is the test
        ahead = second.index if rank == 1 else None
        dist.barrier()
        return ahead, [read_through(mini)[0] for mini in (first, second)]


def test_one_rank_that_looks_ahead_is_served_while_rank_0_waits_for_it(tmp_path, two):
    fill(kd.TrajectoryStore(tmp_path), 8)
    assert two.run(only_one_looks_ahead, str(tmp_path)) == [(None, [0, 1]), (1, [0, 1])]


def padding_of(_rank: int, _world: int, url: str) -> Any:
    changes = {"train_batch_size": 1, "mini_batch_size": 1, "group_size": 1}
    with loader(kd.TrajectoryStore(url), **changes) as run:
        return [
            [(len(m.infos), m.is_padding, m["input_ids"].tolist(), m.is_last) for m in mini]
            + [mini.n_trajectories, mini.stats["padding_micro_batches"], mini.stats["micro_batches"]]
            for mini in run
        ]


def test_fewer_trajectories_than_ranks(tmp_path, three):
    kd.TrajectoryStore(tmp_path).writer("w").put(trajectory("a", n=4))
    kd.TrajectoryStore(tmp_path).seal()
    ranks = ok(three.run(padding_of, str(tmp_path)))
    padding = (0, True, [0, 0], True)
    assert sorted(r[0][0] for r in ranks)[:2] == [padding, padding]
    assert [r[0][1:] for r in ranks] == [[1, 2.0, 1.0]] * 3


# -- meshes ------------------------------------------------------------------------------------------------------------


def on_mesh(rank: int, world: int, url: str, shape: tuple[int, ...], dp: Any) -> Any:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    return steps(rank, world, url, mesh=mesh, dp=dp)


def reclaiming(rank: int, _world: int, url: str) -> Any:
    """Rank 1 commits; rank 0, which deletes, does not hear of it otherwise. Both close before rank 0 does."""
    run = loader(kd.TrajectoryStore(url), train_batch_size=4, epochs=2)
    got, states = [], []
    for mini in run:
        got.append(read_through(mini)[2])
        states.append(run.state_dict())
        if len(got) == 6:
            break
    if rank == 1:
        run.commit(states[3])
        run.close()
    dist.barrier()
    run.close()
    return [got, states[3]]


def test_a_commit_from_any_rank_reaches_the_one_that_deletes(tmp_path, two):
    store = fill(kd.TrajectoryStore(tmp_path / "store"), 8)
    (_, state), (_, same) = ok(two.run(reclaiming, store.url))
    assert state == same
    floors = {writer: at for writer, at, _ in state["writers"]}
    assert floors == {0: 2, 1: 2} == {w: store.floor(w) for w in range(2)}
    for w in range(2):
        assert len(list((tmp_path / f"store/segments/w{w}").iterdir())) == 2
    options = {"state": json.dumps(state), "changes": {"train_batch_size": 4, "epochs": 2}}
    results = ok(two.run(with_options, store.url, options))
    assert [len(r) for r in results] == [4, 4]  # two passes over the second train batch


def training(rank: int, _world: int, url: str) -> Any:
    """The loop of the README, on rank 0 a little faster; what follows the last commit is the loader's end."""
    store = kd.TrajectoryStore(url)
    with loader(store, train_batch_size=4) as run:
        for number, mini in enumerate(run):
            read_through(mini)
            while rank and number == 3 and not store.exists(["registers/there"], 1.0)[0]:
                pass
            if mini.is_last:
                state = run.state_dict()
                run.commit(state)
        if rank == 0:
            store.backend.put("registers/there", b"")
    return state


def test_the_last_commit_counts(tmp_path, two):
    store = fill(kd.TrajectoryStore(tmp_path / "store"), 8)
    state, same = ok(two.run(training, store.url))
    assert state == same
    assert [store.floor(w) for w in range(2)] == [4, 4]
    assert not any(list((tmp_path / f"store/segments/w{w}").iterdir()) for w in range(2))


def consuming(rank: int, _world: int, url: str, ahead: int) -> Any:
    """Rank 1 is in its second pass over the first mini-batch until rank 0 has trained on so many."""
    out, floors = [], [-1]
    store = kd.TrajectoryStore(url, reclaim="consumed")
    run = loader(store, options={"prefetch": 0})
    for mini in run:
        out.append(read_through(mini)[2])
        if rank == 0 and len(out) == ahead:
            floors = [store.floor(w) for w in range(2)]
            store.backend.put("registers/there", b"")
        while rank and len(out) == 1 and not store.exists(["registers/there"], 1.0)[0]:
            pass
        again = [info.id for micro in mini.micro_batches() for info in micro.infos]
        assert sorted(again) == out[-1]
    if rank:
        run.close()
    dist.barrier()
    run.close()
    return [out, floors]


def test_what_one_rank_still_reads_is_not_deleted(tmp_path, two):
    store = fill(kd.TrajectoryStore(tmp_path / "store"), 24)
    (first, floors), (second, _) = ok(two.run(consuming, store.url, 6))
    assert floors == [0, 0]
    assert len({name for ids in (*first, *second) for name in ids}) == 96
    assert [store.floor(w) for w in range(2)] == [12, 12]


@pytest.mark.parametrize(
    ("shape", "dp", "parts"), [((2, 1), "dp", 2), ((1, 2), "dp", 1), ((1, 2), ["tp"], 2), ((1, 2), None, 2)]
)
def test_ranks_outside_the_data_parallel_dimensions_are_replicas(tmp_path, two, shape, dp, parts):
    fill(kd.TrajectoryStore(tmp_path), 8)
    want = merged([steps(0, 1, str(tmp_path))])
    ranks = ok(two.run(on_mesh, str(tmp_path), shape, dp))
    if parts == 1:
        assert ranks[0] == ranks[1]
        assert [step["ids"] for step in ranks[0]] == want
    else:
        assert merged(ranks) == want


def bad_meshes(_rank: int, world: int, url: str) -> Any:
    store = kd.TrajectoryStore(url)
    good = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    cases = [
        {"mesh": good, "dp": "tp"},
        {"mesh": good, "dp": []},
        {"mesh": DeviceMesh("cpu", [1, 0, 2], mesh_dim_names=("dp",)), "dp": "dp"},
        {"mesh": DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)), "dp": "dp"},
        {"mesh": 3},
    ]
    return [told(lambda options=options: loader(store, options=options)) for options in cases]


def test_meshes_that_do_not_fit_are_refused_on_all_ranks(tmp_path, three):
    fill(kd.TrajectoryStore(tmp_path), 2)
    for errors in ok(three.run(bad_meshes, str(tmp_path))):
        texts = [
            "mesh has dimensions ['dp']",
            "mesh has dimensions",
            "global rank 0 must be the first",
            "covers 2 ranks",
        ]
        for error, text in zip(errors, [*texts, "must be a DeviceMesh, found int"], strict=True):
            assert error[0] == "InvalidArgument" and text in error[1]


# -- errors reach everyone ---------------------------------------------------------------------------------------------


def failing(_rank: int, _world: int, url: str, changes: dict[str, Any], prefetch: int) -> Any:
    with loader(kd.TrajectoryStore(url), options={"prefetch": prefetch}, **changes) as run:
        return [told(lambda: [list(mini) for mini in run]) for _ in range(2)]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("changes", [{"quotas": {"source": {"math": 8}}}, {"group_size": 5}])
def test_an_admission_error_is_raised_on_every_rank_with_the_same_message(tmp_path, three, changes, prefetch):
    fill(kd.TrajectoryStore(tmp_path), 8)
    ranks = ok(three.run(failing, str(tmp_path), changes, prefetch))
    assert ranks[0][0][0] == "InvalidGroup" and "group 'g000" in ranks[0][0][1]
    assert all(error == ranks[0][0] for rank in ranks for error in rank)


def foreign_state(rank: int, _world: int, url: str) -> Any:
    """Rank 0 cannot start: a segment of the open train batch is gone."""
    store = kd.TrajectoryStore(url)
    with loader(store, epochs=2) as run:
        read_through(next(run))
        state = run.state_dict()
    dist.barrier()
    if rank == 0:
        store.backend.delete([store.segment_key("w0", 0)])
    dist.barrier()
    with loader(store, epochs=2) as run:
        run.load_state_dict(state)
        return told(lambda: next(run))


def test_a_start_that_fails_on_rank_0_is_raised_everywhere(tmp_path, two):
    fill(kd.TrajectoryStore(tmp_path), 8)
    first, second = ok(two.run(foreign_state, str(tmp_path)))
    assert first[0] == "KeyMissing" and first == second


def reading_until_told(_rank: int, _world: int, url: str) -> Any:
    with loader(kd.TrajectoryStore(url)) as run:
        mini = next(run)
        error = told(lambda: list(mini))
        dist.barrier()
        return error or told(lambda: [list(mini) for mini in run]), error is not None


@pytest.mark.parametrize("row", [0, 1, 2, 3])
def test_a_corrupt_read_on_one_rank_reaches_the_others(tmp_path, two, row):
    store = kd.TrajectoryStore(tmp_path)
    infos = store.writer("w").put_group(group("bad"))
    offset = int(infos[row].table.columns["offsets"][row, 0])
    fill(store, 24)
    with open(tmp_path / store.segment_key("w", 0), "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    ranks = ok(two.run(reading_until_told, str(tmp_path)))
    assert any(here for _, here in ranks)
    for error, _ in ranks:
        assert error[0] == "CorruptData" and f"trajectory 'bad/{row}'" in error[1]


def disagreeing(rank: int, _world: int, url: str, mine: dict[str, Any], theirs: dict[str, Any]) -> Any:
    options = mine if rank == 0 else theirs
    run: list[kd.TrajectoryLoader] = []
    error = told(lambda: run.append(loader(kd.TrajectoryStore(url), options=options)))
    if run:
        error = error or told(lambda: [list(mini) for mini in run[0]])
        run[0].close()
    return error


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        ({"layout": "padded"}, "layout: 'padded' here, 'packed' there"),
        ({"fields": ["reward"]}, "fields: ['reward'] here, None there"),
        ({"padding": kd.Padding(token_id=7)}, "token_id=7"),
    ],
)
def test_ranks_with_other_arguments_are_told_what_differs(tmp_path, two, theirs, text):
    fill(kd.TrajectoryStore(tmp_path), 8)
    for error in ok(two.run(disagreeing, str(tmp_path), {}, theirs)):
        assert error[0] == "RankError" and text in error[1] and "rank 1 and global rank 0" in error[1]


def other_state(rank: int, _world: int, url: str, who: int) -> Any:
    store = kd.TrajectoryStore(url)
    with loader(store) as run:
        read_through(next(run))
        state = run.state_dict()
    with loader(store) as run:
        if rank == who:
            run.load_state_dict(state)
        return told(lambda: [list(mini) for mini in run])


@pytest.mark.parametrize("who", [0, 1])
def test_ranks_with_other_states_are_told(tmp_path, two, who):
    fill(kd.TrajectoryStore(tmp_path), 24)
    for error in ok(two.run(other_state, str(tmp_path), who)):
        assert error[0] == "RankError" and "rank 1 starts from another state than global rank 0" in error[1]


def loading_after_a_start(rank: int, _world: int, url: str) -> Any:
    with loader(kd.TrajectoryStore(url)) as run:
        read_through(next(run))
        state = run.state_dict()
    with loader(kd.TrajectoryStore(url)) as run:
        if rank == 0:
            next(run)  # starts this rank's thread
        run.load_state_dict(state)
        return [read_through(mini)[0] for mini in run]


def test_a_state_loaded_after_one_rank_has_started_reaches_all(tmp_path, two):
    fill(kd.TrajectoryStore(tmp_path), 24)
    assert two.run(loading_after_a_start, str(tmp_path)) == [list(range(1, 12))] * 2


def asking(rank: int, world: int) -> list[bool]:
    end = exchange.Exchange(None, None, {})
    if rank == 1:
        end.want(range(4))
    dist.barrier()
    if rank == 2:
        end.want(range(2))
    dist.barrier()
    out = [end.wanted(i) for i in range(5)]
    dist.barrier()
    end.close()
    return out


def test_what_several_ranks_ask_for_adds_up(three):
    assert three.run(asking)[0] == [True, True, True, True, False]


# -- closing, and dying ------------------------------------------------------------------------------------------------


def closing(rank: int, _world: int, url: str, first: int, prefetch: int) -> Any:
    exchange._GOODBYE = 0.2  # what rank 0 waits for one that is busy; 5 s would only make this slower
    run = loader(kd.TrajectoryStore(url), 40, options={"prefetch": prefetch})
    mini = next(run)
    micros = iter(mini)
    got = [len(next(micros).infos)]
    dist.barrier()
    if rank == first:
        run.close()
    dist.barrier()
    if rank != first:
        got += [len(micro.infos) for micro in micros]
    error = None if rank == first else told(lambda: [list(mini) for mini in run])
    run.close()
    return got, error


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("first", [0, 1])
def test_close_in_any_order_also_while_a_peer_still_reads(tmp_path, two, first, prefetch):
    fill(kd.TrajectoryStore(tmp_path), 24)
    ranks = ok(two.run(closing, str(tmp_path), first, prefetch))
    whole = steps(0, 1, str(tmp_path), 1)[0]["same"][5]
    got, error = ranks[1 - first]
    assert len(got) > 1 and sum(got) < whole  # its own part to the end
    if first == 0:
        assert error[0] == "RankError" and "lost global rank 0" in error[1]
    else:
        assert error is None  # rank 0 needs nobody


def dying(rank: int, _world: int, url: str, who: int) -> Any:
    exchange._GOODBYE = 0.2
    run = loader(kd.TrajectoryStore(url))
    next(run).index  # noqa: B018  # the touch is the test
    dist.barrier()
    if rank == who:
        os.kill(os.getpid(), signal.SIGKILL)
    error = told(lambda: [read_through(mini) for mini in run])
    run.close()
    return error


@pytest.mark.parametrize("who", [0, 1])
def test_the_death_of_a_rank_hangs_nobody(tmp_path, who):
    fill(kd.TrajectoryStore(tmp_path), 24)
    ranks = Ranks(2)
    try:
        results = ranks.run(dying, str(tmp_path), who)
    finally:
        ranks.close()
    assert results[who] == {"error": "died"}
    if who == 0:
        assert results[1][0] == "RankError" and "lost global rank 0" in results[1][1]
    else:
        assert results[0] is None  # rank 0 needs nobody


# -- gradients ---------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A causal model without any float32 inside: packed rows mix within their trajectory only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(97, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 97)

    def forward(self, micro: kd.MicroBatch) -> torch.Tensor:
        hidden = self.embed(micro["input_ids"])
        same = micro.rows.view(1, -1) == micro.rows.view(-1, 1)
        causal = same & (torch.arange(len(same)).view(1, -1) <= torch.arange(len(same)).view(-1, 1))
        weights = causal.double() / causal.double().sum(1, keepdim=True)
        flat = hidden.view(-1, 16)
        out = torch.tanh(self.mix(weights @ flat)) + flat
        return self.head(out)


def loss_of(logits: torch.Tensor, micro: kd.MicroBatch) -> torch.Tensor:
    labels = micro["labels"]
    nll = F.cross_entropy(logits, labels.flatten(), reduction="none").view(labels.shape)
    weight = micro.to_tokens("advantage").double() * micro.targets("loss_mask").double()
    return (nll * weight * (1 + micro.targets("logprobs").double())).sum()


def gradients(_rank: int, world: int, url: str, layout: str, cap: int, changes: dict[str, Any] | None = None) -> Any:
    model = Net().double()
    if world > 1:
        fully_shard(model.mix)
        fully_shard(model)
        kd.integrations.fsdp.sum_gradients(model)
    changes = {"groups": kd.GroupPolicy(annotate=kd.group_advantages), **(changes or {})}
    out, seen = [], []
    with loader(kd.TrajectoryStore(url), cap, {"layout": layout}, **changes) as run:
        for mini in run:
            for micro in mini:
                if world > 1:
                    model.set_requires_gradient_sync(micro.is_last)
                (loss_of(model(micro), micro) / mini.loss_tokens).backward()
                seen.append([micro.is_padding, bool((micro["labels"] != -100).any()), mini.loss_tokens])
            grads = [p.grad.full_tensor() if world > 1 else p.grad for p in model.parameters()]
            out.append(torch.cat([g.flatten() for g in grads]).tolist())
            for p in model.parameters():
                p.grad = None
    return out, seen


def check_gradients(ranks: Ranks, url: Path, layout: str, cap: int, changes: dict[str, Any] | None = None) -> Any:
    want = torch.tensor(gradients(0, 1, str(url), "packed", 4096, changes)[0], dtype=torch.float64)
    results = ok(ranks.run(gradients, str(url), layout, cap, changes))
    got = torch.tensor([result[0] for result in results], dtype=torch.float64)
    assert got.isfinite().all() and want.abs().max() > 0
    assert all(torch.equal(one, got[0]) for one in got)
    # sums in another order: 1e-12 of the largest gradient
    assert (got[0] - want).abs().max() <= 1e-12 * want.abs().max()
    return [result[1] for result in results]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_gradients_depend_on_neither_ranks_nor_caps_nor_layout(tmp_path, two, layout):
    fill(kd.TrajectoryStore(tmp_path), 8)
    for cap in (31, 64, 500):
        check_gradients(two, tmp_path, layout, cap)


ONE = {"train_batch_size": 1, "mini_batch_size": 1}


def weighted(infos: list[kd.TrajectoryInfo]) -> dict[str, list[float]]:
    """Advantages that do not vanish in a group of one."""
    return {"advantage": [1.0 + i for i in range(len(infos))]}


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_rank_with_nothing_but_padding_adds_nothing(tmp_path, two, layout):
    store = kd.TrajectoryStore(tmp_path)
    store.writer("w").put(trajectory("a", n=9))
    store.seal()
    changes = {**ONE, "group_size": 1, "groups": kd.GroupPolicy(annotate=weighted)}
    seen = check_gradients(two, tmp_path, layout, 64, changes)
    assert sorted(seen) == [[[False, True, 8]], [[True, False, 8]]]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_rank_whose_labels_are_all_ignored_adds_nothing(tmp_path, two, layout):
    """OLMo-core#657: the loss was NaN on every rank."""
    masks = [torch.zeros(38), torch.ones(38).index_fill(0, torch.tensor([0]), 0.0)]
    members = []
    for i, mask in enumerate(masks):
        plain = trajectory(f"g/{i}", "g", 38)
        members.append(trajectory(f"g/{i}", "g", 38, tokens={**plain.tokens, "loss_mask": mask}))
    store = kd.TrajectoryStore(tmp_path)
    store.writer("w").put_group(members)
    store.seal()
    changes = {**ONE, "group_size": 2, "groups": kd.GroupPolicy(annotate=weighted)}
    seen = check_gradients(two, tmp_path, layout, 38, changes)
    assert sorted(seen) == [[[False, False, 37]], [[False, True, 37]]]
