"""Micro-batches against a plain reference that lays out one trajectory after another in PyTorch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import rows_of
from makers import fill, group, loader, trajectory
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import knit_data as kd
from knit_data.arena import HostArenas
from knit_data.collate import Collator
from knit_data.store.memory import Fault

Stored = dict[str, kd.Trajectory]


def put(groups: Sequence[Sequence[kd.Trajectory]], **options: Any) -> kd.TrajectoryStore:
    store = kd.TrajectoryStore("memory://", **options)
    with store.writer("w") as writer:
        for members in groups:
            writer.put_group(members)
    store.seal()
    return store


def one_batch(store: kd.TrajectoryStore, n: int, cap: int = 64, options: dict[str, Any] | None = None, **changes: Any):
    """A loader whose train batch and mini-batch are the ``n`` groups of the store."""
    changes = {"train_batch_size": n, "mini_batch_size": n, "group_size": None} | changes
    return loader(store, cap, options, **changes)


# -- the reference -----------------------------------------------------------------------------------------------------


def up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def mask_of(t: kd.Trajectory) -> Tensor:
    stored = t.tokens.get("loss_mask")
    if stored is not None:
        return stored.to(torch.float32)
    return torch.cat([torch.zeros(1), torch.ones(len(t.tokens["input_ids"]) - 1)])


def columns_of(t: kd.Trajectory, padding: kd.Padding) -> dict[str, tuple[Tensor, float]]:
    """Every per-token column of one trajectory with what pads it."""
    ids, mask = t.tokens["input_ids"], mask_of(t)
    labels = torch.full((len(ids),), -100)
    labels[:-1] = torch.where(mask[1:] != 0, ids[1:].to(torch.int64), -100)
    out: dict[str, tuple[Tensor, float]] = {"position_ids": (torch.arange(len(ids)), 0)}
    out |= {name: (column, 0) for name, column in t.tokens.items()}
    return out | {"loss_mask": (mask, 0), "labels": (labels, -100), "input_ids": (ids, padding.token_id)}


def reference(trajectories: Sequence[kd.Trajectory], layout: str, padding: kd.Padding) -> dict[str, Tensor]:
    """Built row by row with nothing but full, cat and stack."""
    lengths = [len(t.tokens["input_ids"]) for t in trajectories]
    wide = [up(n, padding.sequence_to) for n in lengths]
    total = up(sum(wide), padding.total_to)
    if layout == "padded":
        wide = [max(wide)] * len(wide)
        total = sum(wide)
    out: dict[str, Tensor] = {}
    rows = [columns_of(t, padding) for t in trajectories]
    for name in rows[0]:
        parts = []
        for row, extent in zip(rows, wide, strict=True):
            column, fill_with = row[name]
            tail = torch.full((extent - len(column), *column.shape[1:]), fill_with, dtype=column.dtype)
            if name == "position_ids" and layout == "packed" and "position_ids" not in trajectories[0].tokens:
                tail = torch.arange(len(column), extent)
            parts.append(torch.cat([column, tail]))
        if layout == "padded":
            out[name] = torch.stack(parts)
            continue
        rest = total - sum(wide)
        tail = torch.full((rest, *parts[0].shape[1:]), rows[0][name][1], dtype=parts[0].dtype)
        if name == "position_ids" and "position_ids" not in trajectories[0].tokens:
            tail = torch.arange(rest)
        out[name] = torch.cat([*parts, tail])
    if layout == "padded":
        out["cu_seqlens"] = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        real = [[1] * n + [0] * (extent - n) for n, extent in zip(lengths, wide, strict=True)]
        out["attention_mask"] = torch.tensor(real)
    else:
        ends = [0, *torch.tensor(wide).cumsum(0).tolist()]
        out["cu_seqlens"] = torch.tensor(ends if ends[-1] == total else [*ends, total], dtype=torch.int32)
    for name, value in trajectories[0].values.items():
        values = [t.values[name] for t in trajectories]
        kinds = isinstance(value, Tensor) and (value.ndim or value.dtype not in (torch.float16, torch.bfloat16))
        out[name] = torch.stack(values) if kinds else torch.tensor([float(v) for v in values])
    return out


def flat(x: Tensor, like: Tensor) -> Tensor:
    return x.reshape(like.numel(), *x.shape[like.ndim :])


def shifted(micro: kd.MicroBatch, name: str, starts: Sequence[int]) -> Tensor:
    column = flat(micro[name], micro["input_ids"])
    out = torch.zeros_like(column)
    for start, info in zip(starts, micro.infos, strict=True):
        out[start : start + info.n_tokens - 1] = column[start + 1 : start + info.n_tokens]
    return out.view_as(micro[name])


def spread(micro: kd.MicroBatch, name: str, starts: Sequence[int]) -> Tensor:
    value, ids = micro[name], micro["input_ids"]
    out = torch.zeros(ids.numel(), *value.shape[1:], dtype=value.dtype)
    for row, (start, info) in enumerate(zip(starts, micro.infos, strict=True)):
        out[start : start + info.n_tokens] = value[row]
    return out.view(*ids.shape, *value.shape[1:])


def starts_of(micro: kd.MicroBatch) -> list[int]:
    if micro.layout == "padded":
        return [b * micro["input_ids"].shape[1] for b in range(len(micro.infos))]
    return micro["cu_seqlens"][: len(micro.infos)].tolist()


def check(micro: kd.MicroBatch, stored: Stored, padding: kd.Padding, cap: int) -> None:
    members = [stored[info.id] for info in micro.infos]
    want = reference(members, micro.layout, padding)
    assert set(micro) == set(want)
    for name, expected in want.items():
        found = micro[name]
        assert (name, found.dtype, found.shape) == (name, expected.dtype, expected.shape)
        assert torch.equal(found, expected), name
    assert micro["input_ids"].numel() <= cap
    extents = micro["cu_seqlens"].diff().tolist()
    width = micro["input_ids"].shape[-1]
    assert micro.max_seqlen == (max(extents) if micro.layout == "packed" else width)
    starts, tokens = starts_of(micro), {*members[0].tokens, "loss_mask", "position_ids"}
    for name in tokens:
        assert torch.equal(micro.targets(name), shifted(micro, name, starts)), name
        check_rows(micro, name, starts)
    for name in members[0].values:
        assert torch.equal(micro.to_tokens(name), spread(micro, name, starts)), name
    # labels are the targets of input_ids where the mask's targets are not 0
    targets = torch.where(micro.targets("loss_mask") != 0, micro.targets("input_ids").to(torch.int64), -100)
    assert torch.equal(targets, micro["labels"])


def check_rows(micro: kd.MicroBatch, name: str, starts: Sequence[int]) -> None:
    """A row for each trajectory, and back to where its tokens are; bit by bit, so NaN is itself."""
    column, rows = micro[name], micro.unpack(micro[name])
    lengths = [info.n_tokens for info in micro.infos]
    tokens = flat(column, micro["input_ids"])
    wanted = [tokens[start : start + n] for start, n in zip(starts, lengths, strict=True)]
    assert rows.dtype == column.dtype and bits(rows) == bits(torch.nn.utils.rnn.pad_sequence(wanted, batch_first=True))
    back = torch.zeros_like(tokens)
    for start, row in zip(starts, wanted, strict=True):
        back[start : start + len(row)] = row
    assert bits(micro.pack(rows)) == bits(back.view(column.shape))


def bits(x: Tensor) -> tuple[torch.Size, list[bytes]]:
    return x.shape, rows_of(x)


# -- the worked example ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_the_worked_example(layout, dtype):
    tokens = {"input_ids": torch.tensor([5, 6, 7]), "loss_mask": torch.tensor([0, 0, 1], dtype=dtype)}
    store = put([[kd.Trajectory("a", "g", 0, tokens)]])
    with one_batch(store, 1, options={"layout": layout}) as run:
        for mini in run:
            assert mini.loss_tokens == 1
            (micro,) = mini
    assert micro["labels"].flatten().tolist() == [-100, 7, -100]
    assert micro.targets("loss_mask").flatten().tolist() == [0.0, 1.0, 0.0]
    assert micro["loss_mask"].flatten().tolist() == [0.0, 0.0, 1.0] and micro["loss_mask"].dtype == torch.float32
    assert micro["position_ids"].flatten().tolist() == [0, 1, 2]
    assert micro.infos[0].loss_tokens == 1 and micro.is_last and not micro.is_padding


# -- every column, any padding -----------------------------------------------------------------------------------------


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.int8, torch.uint8, torch.bool]
SHAPES: list[tuple[int, ...]] = [(), (1,), (3,), (2, 2), (0,)]
paddings = st.builds(
    kd.Padding, token_id=st.integers(0, 9), total_to=st.sampled_from([1, 3, 8]), sequence_to=st.sampled_from([1, 2, 5])
)


def random_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    size = tuple(shape)
    if dtype == torch.bool:
        return torch.rand(size) < 0.5
    return torch.randn(size).to(dtype) if dtype.is_floating_point else torch.randint(0, 100, size).to(dtype)


def masked(t: kd.Trajectory, kind: str) -> kd.Trajectory:
    """The trajectory with a loss mask: absent, bool, or float."""
    n = len(t.tokens["input_ids"])
    mask = torch.rand(n).masked_fill(torch.rand(n) < 0.5, 0.0)
    mask[0], mask[-1] = 0.0, 0.5
    more = {"absent": {}, "bool": {"loss_mask": mask != 0}, "float": {"loss_mask": mask}}[kind]
    return kd.Trajectory(t.id, t.group, t.policy_version, {**t.tokens, **more}, t.values)


@st.composite
def stores(draw: st.DrawFn) -> list[list[kd.Trajectory]]:
    """Groups of one schema; masks differ between groups, as segments may."""
    torch.manual_seed(draw(st.integers(0, 2**20)))
    columns = draw(st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)), max_size=4))
    values = draw(st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)), max_size=3))
    ids, positions = draw(st.sampled_from([torch.int64, torch.int32, torch.int16])), draw(st.sampled_from([0, 1, 3]))
    groups = []
    sizes = st.lists(st.lists(st.integers(2, 12), min_size=1, max_size=4), min_size=1, max_size=4)
    for g, lengths in enumerate(draw(sizes)):
        members = []
        for i, n in enumerate(lengths):
            tokens = {"input_ids": torch.randint(1, 97, (n,), dtype=ids)}
            if positions:
                tokens["position_ids"] = torch.randint(0, 99, (n,) if positions == 1 else (n, 3))
            tokens |= {f"c{c}": random_tensor((n, *shape), dtype) for c, (dtype, shape) in enumerate(columns)}
            parts: dict[str, Tensor | float] = {f"v{v}": random_tensor(s, dtype) for v, (dtype, s) in enumerate(values)}
            members.append(kd.Trajectory(f"{g}/{i}", str(g), 0, tokens, {**parts, "reward": float(i)}))
        kind = draw(st.sampled_from(["absent", "bool", "float"]))
        groups.append([masked(t, kind) for t in members])
    return groups


@settings(max_examples=60)
@given(
    groups=stores(), layout=st.sampled_from(["packed", "padded"]), padding=paddings, cap=st.sampled_from([15, 24, 64])
)
def test_micro_batches_equal_the_reference(groups, layout, padding, cap):
    stored = {t.id: t for members in groups for t in members}
    policy = kd.GroupPolicy(oversize="drop")
    options = {"layout": layout, "padding": padding, "prefetch": 0}
    seen: list[str] = []
    with loader(
        put(groups), cap, options, train_batch_size=1, mini_batch_size=1, group_size=None, groups=policy
    ) as run:
        for mini in run:
            micros = list(mini)
            for micro in micros:
                check(micro, stored, padding, cap)
                seen += [info.id for info in micro.infos]
            tokens = sum(int(m["loss_mask"].count_nonzero()) for m in micros)
            wanted = [mask_of(stored[i.id]).count_nonzero() for m in micros for i in m.infos]
            assert tokens == mini.loss_tokens == sum(map(int, wanted))
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("sequence_to", [1, 4])
def test_absent_bool_and_float_masks_share_a_micro_batch(layout, sequence_to):
    kinds = ["absent", "bool", "float", "bool", "absent"]
    groups = [[masked(t, kind) for t in group(f"g{g}", 3)] for g, kind in enumerate(kinds)]
    padding = kd.Padding(token_id=3, sequence_to=sequence_to, total_to=16)
    with one_batch(put(groups), 5, 4096, {"layout": layout, "padding": padding}) as run:
        for mini in run:
            (micro,) = mini
            check(micro, {t.id: t for members in groups for t in members}, padding, 4096)


def test_every_dtype_and_shape_at_once():
    columns = {f"c{dtype}{shape}".replace("torch.", ""): (dtype, shape) for dtype in DTYPES for shape in SHAPES}
    values = {f"v{dtype}{shape}".replace("torch.", ""): (dtype, shape) for dtype in DTYPES for shape in SHAPES}
    members = []
    for i, n in enumerate([7, 2, 5]):
        tokens = {"input_ids": torch.randint(1, 97, (n,))}
        tokens |= {name: random_tensor((n, *shape), dtype) for name, (dtype, shape) in columns.items()}
        members.append(kd.Trajectory(str(i), "g", 0, tokens, {k: random_tensor(s, d) for k, (d, s) in values.items()}))
    for layout in ("packed", "padded"):
        for padding in (kd.Padding(), kd.Padding(5, 8, 4)):
            with one_batch(put([members]), 1, options={"layout": layout, "padding": padding}) as run:
                for mini in run:
                    (micro,) = mini
                    check(micro, {t.id: t for t in members}, padding, 64)


def test_packed_padding_in_numbers():
    members = [trajectory("a", "g", 5), trajectory("b", "g", 3)]
    options = {"padding": kd.Padding(token_id=9, total_to=8, sequence_to=4)}
    with one_batch(put([members]), 1, options=options) as run:
        for mini in run:
            (micro,) = mini
    a, b = (next(t for t in members if t.id == info.id).tokens["input_ids"].tolist() for info in micro.infos)
    assert micro["input_ids"].tolist() == [*a, 9, 9, 9, *b, 9, 9, 9, 9, 9]
    assert micro["position_ids"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 0, 1, 2, 3]
    assert micro["cu_seqlens"].tolist() == [0, 8, 12, 16] and micro.max_seqlen == 8 and len(micro.infos) == 2
    inputs = micro.model_inputs()
    assert inputs.keys() == {"input_ids", "position_ids", "use_cache"} and inputs["use_cache"] is False
    assert inputs["input_ids"].shape == inputs["position_ids"].shape == (1, 16)


def test_padded_padding_in_numbers():
    members = [trajectory("a", "g", 5), trajectory("b", "g", 3)]
    options = {"padding": kd.Padding(token_id=9, sequence_to=4), "layout": "padded"}
    with one_batch(put([members]), 1, options=options) as run:
        for mini in run:
            (micro,) = mini
    assert micro["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 0, 0], [0, 1, 2, 0, 0, 0, 0, 0]]
    assert micro["attention_mask"].tolist() == [[1] * 5 + [0] * 3, [1] * 3 + [0] * 5]
    assert micro["cu_seqlens"].tolist() == [0, 5, 8]
    inputs = micro.model_inputs()
    assert inputs.keys() == {"input_ids", "position_ids", "attention_mask", "use_cache"}
    assert inputs["input_ids"] is micro["input_ids"]


def test_stored_positions_of_three_axes_feed_the_model():
    def member(name: str, n: int) -> kd.Trajectory:
        tokens = {"input_ids": torch.arange(1, n + 1), "position_ids": torch.arange(3 * n).view(n, 3)}
        return kd.Trajectory(name, "g", 0, tokens)

    with one_batch(put([[member("a", 4), member("b", 3)]]), 1) as run:
        for mini in run:
            (micro,) = mini
    assert micro["position_ids"].shape == (7, 3)
    found = micro.model_inputs()["position_ids"]
    assert found.shape == (4, 1, 7) and found[0, 0].tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert torch.equal(found[1:, 0], micro["position_ids"].T)
    with one_batch(put([[member("a", 4), member("b", 3)]]), 1, options={"layout": "padded"}) as run:
        for mini in run:
            (micro,) = mini
    assert torch.equal(micro.model_inputs()["position_ids"], micro["position_ids"].permute(2, 0, 1))


def test_names_that_are_not_there_are_named():
    with loader(fill(kd.TrajectoryStore("memory://"), 2)) as run:
        for mini in run:
            for micro in mini:
                with pytest.raises(KeyError, match=r"'rewards' is not in this micro-batch; it has .*'reward'"):
                    micro["rewards"]
                with pytest.raises(kd.InvalidArgument, match=r"targets\('reward'\): not a per-token column"):
                    micro.targets("reward")
                with pytest.raises(kd.InvalidArgument, match=r"to_tokens\('logprobs'\): not a per-trajectory value"):
                    micro.to_tokens("logprobs")


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_gradients_go_through_rows_and_back(layout):
    options = {"layout": layout, "padding": kd.Padding(sequence_to=4, total_to=8)}
    with one_batch(put([group("g", 3, lengths=[5, 2, 3])]), 1, options=options) as run:
        (micro,) = next(iter(run))
    shape, here = micro["input_ids"].shape, micro.rows < 3
    x = torch.randn(*shape, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 5, 2, dtype=torch.float64)
    (micro.unpack(x) * weights).sum().backward()
    assert torch.equal(x.grad, micro.pack(weights)) and not flat(x.grad, micro["input_ids"])[~here].any()
    assert torch.autograd.gradcheck(lambda rows: micro.pack(micro.unpack(micro.pack(rows))), weights.requires_grad_())
    for wrong in (x[None], x.flatten(), x[:1]):
        with pytest.raises(kd.InvalidArgument, match=r"an entry for each of input_ids, found"):
            micro.unpack(wrong)
    for wrong in (weights[:2], weights[:, :4], weights[0, 0], weights.tolist()):
        with pytest.raises(kd.InvalidArgument, match=r"\[3, 5, \*\], as unpack returns it, found"):
            micro.pack(wrong)


def test_rows_are_made_in_a_compiled_function_too():
    with loader(fill(kd.TrajectoryStore("memory://"), 6), options={"prefetch": 0}) as run:
        micros = list(next(iter(run)))
    assert len(micros) > 2
    whole = torch.compile(lambda micro, x: micro.pack(micro.unpack(x) * 2), backend="aot_eager", fullgraph=True)
    for micro in micros:
        x = micro["logprobs"] + 1
        inside = torch.compile(lambda y, micro=micro: micro.unpack(y) + 1, backend="aot_eager", fullgraph=True)
        assert torch.equal(inside(x), micro.unpack(x) + 1)
        assert torch.equal(whole(micro, x), micro.pack(micro.unpack(x)) * 2)


def test_a_pass_without_gradients_leaves_nothing_to_a_later_one():
    with loader(fill(kd.TrajectoryStore("memory://"), 2), options={"prefetch": 0}) as run:
        (micro, *_) = next(iter(run))
    with torch.inference_mode():
        assert micro.pack(micro.unpack(micro["logprobs"])).is_inference()
    with FakeTensorMode(allow_non_fake_inputs=True):
        micro.unpack(micro["logprobs"])
    x = micro["logprobs"].clone().requires_grad_()
    micro.unpack(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


# -- padding micro-batches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_padding_micro_batch(layout):
    """One of a single process: the collator is asked for an empty range of rows."""
    values = {"reward": 1.0, "v": torch.ones(3)}
    members = group("g", 2, lengths=[5, 3], values=values)
    with one_batch(put([members]), 1, options={"layout": layout, "padding": kd.Padding(token_id=9)}) as run:
        for mini in run:
            list(mini)
            micro = empty(run, mini)
    assert micro.is_padding and micro.infos == () and micro.max_seqlen == 2
    shape = (2,) if layout == "packed" else (1, 2)
    assert micro["input_ids"].shape == shape and micro["input_ids"].unique().tolist() == [9]
    assert micro["labels"].unique().tolist() == [-100]
    for name in ("loss_mask", "logprobs"):
        assert not micro[name].any() and not micro.targets(name).any() and micro[name].shape == shape
    assert micro["reward"].shape == (0,) and micro["v"].shape == (0, 3)
    assert not micro.to_tokens("reward").any() and micro.to_tokens("v").shape == (*shape, 3)
    assert micro["cu_seqlens"].tolist() == [0, 2]
    rows = micro.unpack(torch.randn(*shape, 3, requires_grad=True))
    assert rows.shape == (0, 1, 3) and rows.amax(1).shape == (0, 3)
    assert rows.requires_grad  # a rank with nothing to do makes the same graph
    assert torch.equal(micro.pack(rows), torch.zeros(*shape, 3))


def empty(run: kd.TrajectoryLoader, mini: kd.MiniBatch) -> kd.MicroBatch:
    """A padding micro-batch of the same schema."""
    assert mini.live is not None
    share = mini.live.share
    share = replace(share, table=share.table.rows(0, 0), ptr=(0, 0))
    collate = Collator(run.sampler.stream.store, run.layout, run.padding, HostArenas(reuse=False), run.fields)
    return collate(share, 0).micro


# -- fields ------------------------------------------------------------------------------------------------------------


def test_fields_choose_what_is_read():
    always = {"input_ids", "labels", "loss_mask", "position_ids", "cu_seqlens"}
    groups = [group("a"), group("b")]
    for fields, more in [
        ((), set()),
        ("reward", {"reward"}),
        (["logprobs"], {"logprobs"}),
        (None, {"reward", "logprobs"}),
    ]:
        with one_batch(put(groups), 2, 4096, {"fields": fields}) as run:
            for mini in run:
                (micro,) = mini
                assert set(micro) == always | more
                (extra,) = mini.micro_batches(fields=("input_ids",))
                assert set(extra) == always and torch.equal(extra["labels"], micro["labels"])
                (extra,) = mini.micro_batches(fields=("logprobs", "reward"))
                assert set(extra) == always | {"logprobs", "reward"}
            assert run.stats["bytes_read"] >= run.stats["tokens"] * 8


def test_annotations_are_values():
    groups = [group(name, 4, lengths=[3, 4, 5, 6]) for name in ("a", "b")]
    policy = kd.GroupPolicy(annotate=kd.group_advantages)
    with one_batch(put(groups), 2, 4096, groups=policy) as run:
        for mini in run:
            (micro,) = mini
    assert micro["advantage"].dtype == torch.float32
    for members in groups:
        rewards = torch.tensor([float(t.values["reward"]) for t in members], dtype=torch.float64)
        want = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
        at = [[info.id for info in micro.infos].index(t.id) for t in members]
        assert torch.equal(micro["advantage"][at], want.float())
    starts = starts_of(micro)
    assert torch.equal(micro.to_tokens("advantage"), spread(micro, "advantage", starts))


# -- corrupt bytes -----------------------------------------------------------------------------------------------------


def corrupt(store: kd.TrajectoryStore, info: kd.TrajectoryInfo, name: str) -> None:
    """Flip the middle byte of one column of one trajectory, at rest."""
    writer, segment, _ = info.address
    key = store.segment_key(store.claim(writer)["name"], segment)
    at = int(info.table.columns["offsets"][info.row, info.table.schema.names.index(name)])
    raw = bytearray(store.backend.get(key))
    raw[at] ^= 0x10
    store.backend.put(key, bytes(raw))


def committed(**changes: Any) -> tuple[kd.TrajectoryStore, list[kd.TrajectoryInfo], Stored]:
    groups = [group(f"g{g}", 3, values={"reward": 1.0, "v": torch.ones(2)}, **changes) for g in range(3)]
    groups = [[masked(t, kind) for t in g] for g, kind in zip(groups, ["absent", "bool", "float"], strict=True)]
    store = kd.TrajectoryStore("memory://")
    infos = []
    with store.writer("w") as writer:
        for members in groups:
            infos += writer.put_group(members)
    store.seal()
    return store, infos, {t.id: t for members in groups for t in members}


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("column", ["input_ids", "logprobs", "loss_mask", "v"])
def test_corrupt_bytes_name_file_and_trajectory(layout, column):
    store, infos, _ = committed()
    corrupt(store, infos[7], column)
    with one_batch(store, 3, 4096, {"layout": layout}) as run:
        mini = next(run)
        text = rf"segments/w/00000002\.safetensors: .*{column}.*trajectory 'g2/1'.*on_corrupt='mask'"
        with pytest.raises(kd.CorruptData, match=text):
            list(mini)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("sequence_to", [1, 4])
@pytest.mark.parametrize("column", ["input_ids", "logprobs", "loss_mask", "v"])
def test_masked_trajectories_keep_their_length_and_lose_everything_else(layout, sequence_to, column):
    store, infos, stored = committed()
    clean = sum(int(mask_of(t).count_nonzero()) for t in stored.values())
    corrupt(store, infos[4], column)
    corrupt(store, infos[7], column)
    gone = {infos[4].id, infos[7].id}
    padding = kd.Padding(token_id=9, sequence_to=sequence_to)
    with one_batch(store, 3, 4096, {"layout": layout, "on_corrupt": "mask", "padding": padding}) as run:
        for mini in run:
            (micro,) = mini
            assert mini.loss_tokens == clean and mini.n_trajectories == 9
            assert mini.stats["masked"] == 2.0
        assert run.stats["masked"] == 2.0
    assert set(micro.masked) == gone
    want = {}
    for name, t in stored.items():
        if name in gone:
            tokens = {k: torch.zeros_like(v) for k, v in t.tokens.items() if k != "loss_mask"}
            tokens["input_ids"] = torch.full_like(t.tokens["input_ids"], 9)
            tokens["loss_mask"] = torch.zeros(len(tokens["input_ids"]))
            t = kd.Trajectory(name, t.group, 0, tokens, {**t.values, "v": torch.zeros(2)})
        want[name] = t
    expected = reference([want[info.id] for info in micro.infos], layout, padding)
    for name, tensor in expected.items():
        assert torch.equal(micro[name], tensor), name


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("axes", [(), (3,)])
def test_a_masked_trajectory_with_positions_of_its_own_is_still_told_apart(layout, axes):
    def member(name: str, n: int) -> kd.Trajectory:
        positions = torch.arange(n).view(n, *[1] * len(axes)).expand(n, *axes)
        return kd.Trajectory(name, "g", 0, {"input_ids": torch.arange(1, n + 1), "position_ids": positions})

    members = [member("a", 3), member("b", 5), member("c", 4)]
    store = put([members])
    info = next(info for info in kd.TrajectoryStream(store, follow=False) if info.id == "b")
    corrupt(store, info, "input_ids")
    with one_batch(store, 1, options={"layout": layout, "on_corrupt": "mask"}) as run:
        (micro,) = next(run)
        assert micro.masked == ("b",) and not micro["labels"][micro["input_ids"] == 0].gt(0).any()
        for row, info in enumerate(micro.infos):
            start = starts_of(micro)[row]
            found = micro["position_ids"].flatten(0, 0 if layout == "packed" else 1)[start : start + info.n_tokens]
            assert torch.equal(found, member("x", info.n_tokens).tokens["position_ids"])
        assert micro.model_inputs()["position_ids"].numel()  # it would raise if trajectories could not be told apart


def test_a_short_read_masks_only_what_did_not_arrive():
    store, _, stored = committed()
    with one_batch(store, 3, 4096, {"on_corrupt": "mask", "prefetch": 0}) as run:
        mini = next(run)
        assert mini.n_trajectories == 9  # heads are read
        store.backend.faults.append(Fault("read", "segments/w/00000001*", after=4, error="short"))
        (micro,) = mini
    assert micro.masked == ("g1/1",)  # of the group's rows with four reads each, the fifth came short
    for row, info in enumerate(micro.infos):
        if info.id not in micro.masked:
            start = starts_of(micro)[row]
            ids = micro["input_ids"][start : start + info.n_tokens]
            assert torch.equal(ids, stored[info.id].tokens["input_ids"])


def test_a_store_that_does_not_answer_is_raised_even_when_masking():
    store, _, _ = committed()
    with one_batch(store, 3, 4096, {"on_corrupt": "mask", "prefetch": 0}) as run:
        mini = next(run)
        store.backend.faults.append(Fault("read", "segments/*", error=kd.Unreachable("no answer")))
        with pytest.raises(kd.Unreachable, match="no answer"):
            list(mini)


# -- leases ------------------------------------------------------------------------------------------------------------


def pool_of(run: kd.TrajectoryLoader) -> Any:
    return run.running()._collate.arenas.pool


def copies(micro: kd.MicroBatch) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in micro.items()}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_kept_micro_batches_are_never_overwritten(prefetch):
    store = fill(kd.TrajectoryStore("memory://"), 32)
    kept: list[tuple[Mapping[str, Tensor], dict[str, Tensor]]] = []
    with loader(store, 40, {"prefetch": prefetch}) as run:
        for mini in run:
            for j, micro in enumerate(list(mini)):
                now = copies(micro)
                if j % 3 == 0:
                    kept.append((micro, now))
                elif j % 3 == 1:
                    kept.append(({"labels": micro["labels"][1:3]}, {"labels": now["labels"][1:3]}))
    for view, then in kept:
        assert all(torch.equal(view[name], tensor) for name, tensor in then.items())


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_dropped_micro_batches_give_their_arena_back(layout, prefetch):
    store = fill(kd.TrajectoryStore("memory://"), 64, lengths=[20, 21, 22, 23])
    made = []
    with loader(store, 48, {"layout": layout, "prefetch": prefetch}) as run:
        for mini in run:
            for micro in mini:
                assert micro["input_ids"].numel() <= 48
            made.append(pool_of(run).made)
    # at one time: those buffered, one with the consumer, one being built, in one of two sizes
    assert made[-1] <= prefetch + 3, made
    assert prefetch or made[-1] == made[3], made


def test_the_pool_grows_by_what_is_kept():
    store = fill(kd.TrajectoryStore("memory://"), 32, lengths=[20, 21, 22, 23])
    kept = []
    with loader(store, 48) as run:
        for mini in run:
            kept += list(mini)
        assert pool_of(run).made >= len(kept)


def test_tensors_outlive_micro_batch_loader_and_store():
    store = fill(kd.TrajectoryStore("memory://"), 4)
    with loader(store) as run:
        micros = [micro for mini in run for micro in mini]
        ids = [micro["input_ids"].tolist() for micro in micros]
    alone = [micro["input_ids"] for micro in micros]
    gone = weakref.ref(run)
    del run, micros, store
    gc.collect()
    assert gone() is None
    fresh = fill(kd.TrajectoryStore("memory://"), 8)
    with loader(fresh) as other:
        assert len([list(mini) for mini in other]) == 4
    assert [tensor.tolist() for tensor in alone] == ids


# -- a real model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_logits_of_a_transformers_model_equal_each_trajectory_alone(layout, attention):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Qwen2Config(
        vocab_size=97, num_key_value_heads=2, max_position_embeddings=64, attn_implementation=attention, **sizes
    )
    model = transformers.Qwen2ForCausalLM(config).float().eval()
    groups = [group("a", 3, lengths=[9, 4, 13]), group("b", 2, lengths=[2, 7])]
    stored = {t.id: t for members in groups for t in members}
    padding = kd.Padding(token_id=1, total_to=16, sequence_to=4)
    with torch.no_grad(), one_batch(put(groups), 2, 80, {"layout": layout, "padding": padding}) as run:
        for mini in run:
            for micro in mini:
                logits = model(**micro.model_inputs()).logits.view(*micro["labels"].shape, -1).flatten(0, -2)
                for start, info in zip(starts_of(micro), micro.infos, strict=True):
                    alone = model(input_ids=stored[info.id].tokens["input_ids"][None], use_cache=False).logits[0]
                    # float32, another order of summation
                    torch.testing.assert_close(logits[start : start + info.n_tokens], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_positions_of_three_axes_in_a_transformers_model(layout):
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10_000.0}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Qwen2_5_VLTextConfig(
        vocab_size=97, num_key_value_heads=2, max_position_embeddings=64, rope_parameters=rope, **sizes
    )
    model = transformers.Qwen2_5_VLTextModel(config).float().eval()

    def member(name: str, n: int) -> kd.Trajectory:
        tokens = {"input_ids": torch.randint(1, 97, (n,)), "position_ids": torch.randint(0, 30, (n, 3))}
        return kd.Trajectory(name, "g", 0, tokens)

    members = [member("a", 9), member("b", 4), member("c", 13)]
    stored = {t.id: t.tokens for t in members}
    with torch.no_grad(), one_batch(put([members]), 1, 80, {"layout": layout}) as run:
        for mini in run:
            for micro in mini:
                hidden = model(**micro.model_inputs()).last_hidden_state.flatten(0, 1)
                for start, info in zip(starts_of(micro), micro.infos, strict=True):
                    tokens = stored[info.id]
                    positions = tokens["position_ids"].T[:, None]
                    alone = model(input_ids=tokens["input_ids"][None], position_ids=positions, use_cache=False)
                    # float32, another order of summation
                    found = hidden[start : start + info.n_tokens]
                    torch.testing.assert_close(found, alone.last_hidden_state[0], atol=1e-5, rtol=1e-5)


# -- names, positions and narrow ids -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows", "mask_bytes", "masks", "tensors"])
def test_a_column_may_have_any_name_that_is_not_computed(name):
    tokens = {
        "input_ids": torch.tensor([5, 6, 7]),
        name: torch.tensor([1, 2, 3]),
        "loss_mask": torch.tensor([0, 0, 1.0]),
    }
    store = kd.TrajectoryStore("memory://")
    with store.writer("w") as writer:
        writer.put_group([trajectory("a", "a", tokens=tokens)])
    store.seal()
    with one_batch(store, 1, 16) as run:
        (micro,) = next(run)
    assert micro["labels"].tolist() == [-100, 7, -100] and micro[name].tolist() == [1, 2, 3]


def test_packed_positions_that_do_not_tell_trajectories_apart_reach_no_model():
    store = kd.TrajectoryStore("memory://")
    with store.writer("w") as writer:
        for name, start in (("a", 0), ("b", 3)):
            tokens = {"input_ids": torch.tensor([5, 6, 7]), "position_ids": torch.arange(start, start + 3)}
            writer.put_group([trajectory(name, name, tokens=tokens)])
    store.seal()
    with one_batch(store, 2, 16) as run:
        (micro,) = next(run)
        with pytest.raises(kd.InvalidArgument, match="do not restart"):
            micro.model_inputs()
    with one_batch(store, 2, 16, {"layout": "padded"}) as run:
        (micro,) = next(run)
        assert micro.model_inputs()["position_ids"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_narrow_ids_are_widened_for_a_model_and_bound_the_pad_id():
    store = kd.TrajectoryStore("memory://")
    with store.writer("w") as writer:
        writer.put_group([trajectory("a", "a", tokens={"input_ids": torch.tensor([5, 6, 7], dtype=torch.int16)})])
    store.seal()
    with one_batch(store, 1, 16) as run:
        (micro,) = next(run)
    assert micro["input_ids"].dtype == torch.int16 and micro.model_inputs()["input_ids"].dtype == torch.int64
    with one_batch(store, 1, 16, {"padding": kd.Padding(token_id=50_000)}) as run:
        with pytest.raises(kd.InvalidArgument, match=r"token_id=50000.*int16"):
            list(next(run))
