"""Tiny real models of five families: features put in by attach against the model on its own with pixels."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from makers import loader
from models import FAMILIES, IMAGE, MROPE, Float64, build, config, images, joined, naive, rollouts
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import knit_data as kd
from knit_data.integrations.huggingface import attach, features, image_features, trajectory
from knit_data.integrations.huggingface.models import inner_of

transformers = pytest.importorskip("transformers")


class Encoder:
    """Stands for kd.SharedEncoder: encodes the distinct media once, and keeps the graph."""

    def __init__(self, encode: Any) -> None:
        self.encode, self.cache = encode, {}

    def adapt(self, inputs: Any, token_ids: frozenset[int]) -> None:
        self.inputs, self.token_ids = inputs, token_ids

    def fill(self, media: Sequence[kd.Media]) -> None:
        out = self.encode(joined(media))
        split = [level.split([m.tokens for m in media]) for level in (out if isinstance(out, tuple) else (out,))]
        self.cache = {m.digest: levels for m, levels in zip(media, zip(*split, strict=True), strict=True)}

    def model_inputs(self, micro: kd.MicroBatch) -> dict[str, Any]:
        if not micro.media.n_tokens:
            return {}
        media = micro.media
        cut = [[x[first : first + n] for x in self.cache[media.digests[i]]] for i, first, n in media.pieces]
        return self.inputs(micro, tuple(torch.cat(level) for level in zip(*cut, strict=True)))


def micro_batches(trajectories: Sequence[kd.Trajectory], layout: str, cap: int = 4096) -> list[kd.MicroBatch]:
    """Through a store and a loader."""
    store = kd.TrajectoryStore("memory://")
    with store.writer("w") as writer:
        for member in trajectories:
            writer.put_group([replace(member, group=member.id)])
    store.seal()
    n, out = len(trajectories), []
    with loader(
        store, cap, {"layout": layout}, train_batch_size=n, mini_batch_size=n, group_size=None, follow=False
    ) as made:
        for mini in made:
            out += mini
    return out


def by_trajectory(micro: kd.MicroBatch, logits: Tensor) -> dict[str, Tensor]:
    """Logits [1, T, V] or [B, L, V] -> id: [n, V]."""
    flat, rows = logits.flatten(0, 1), micro.rows
    return {info.id: flat[rows == i][: info.n_tokens] for i, info in enumerate(micro.infos)}


def loss_of(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Summed over one trajectory's response."""
    return (cross_entropy(logits[:-1], ids[1:], reduction="none") * mask[1:]).sum()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: Tensor, expected: Tensor, scale: Tensor | None = None) -> None:
    """Within 1e-12 of the largest: sums of float64 in another order are not equal bit by bit."""
    largest = (expected if scale is None else scale).abs().max()
    assert (found - expected).abs().max() <= 1e-12 * largest


class Case:
    """One family's model in float64 with trajectories and what it says of them on its own."""

    def __init__(self, family: str) -> None:
        self.family, self.media = family, images(family, 3, torch.float64)
        self.trajectories = rollouts(family, self.media)
        with Float64():
            self.model = build(family, torch.float64)
            self.logits, total = {}, torch.zeros((), dtype=torch.float64)
            for t in self.trajectories:
                logits = naive(self.model, t)
                total = total + loss_of(logits, t.tokens["input_ids"], t.tokens["loss_mask"])
                self.logits[t.id] = logits.detach()
            total.backward()
            self.gradients = gradients(self.model)
            self.model.zero_grad()

    @property
    def cap(self) -> int:
        """Room for two or three trajectories."""
        return 3 * max(len(t.tokens["input_ids"]) for t in self.trajectories)

    def encoder(self, model: nn.Module | None = None) -> Encoder:
        model = self.model if model is None else model
        encoder = Encoder(image_features(model))
        attach(model, encoder)
        with Float64():
            encoder.fill(self.media)
        return encoder


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


@pytest.fixture(scope="module")
def qwen() -> Case:
    return Case("qwen3")


def route_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a transformers whose forward takes no features; after that, attach routes get_image_features."""
    monkeypatch.setattr(features, "_NATIVE", "not an argument")


@pytest.fixture(params=["as installed", "routed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "routed":
        route_instead(monkeypatch)
    return request.param


# -- features in, logits and gradients out ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_injected_features_give_the_logits_and_gradients_of_pixels(case, layout, way):
    model = copy.deepcopy(case.model)
    micros = micro_batches(case.trajectories, layout, cap=case.cap)
    with Float64():
        encoder = case.encoder(model)
        assert len(micros) > 1 and max(len(micro.infos) for micro in micros) > 1
        inputs = [{**micro.model_inputs(), **encoder.model_inputs(micro)} for micro in micros]  # all alive at once
        total = torch.zeros((), dtype=torch.float64)
        seen = {}
        for micro, kwargs in zip(micros, inputs, strict=True):
            logits = model(**kwargs).logits
            losses = cross_entropy(logits.flatten(0, 1), micro["labels"].flatten(), reduction="none")
            total = total + (losses * micro.targets("loss_mask").flatten()).sum()
            seen |= by_trajectory(micro, logits)
        total.backward()
    for t in case.trajectories:
        assert_close(seen[t.id], case.logits[t.id])
    found, largest = gradients(model), torch.stack([g.abs().max() for g in case.gradients.values()]).max()
    assert found.keys() == case.gradients.keys()  # the tower's are among them
    for name, gradient in case.gradients.items():
        assert_close(found[name], gradient, scale=largest)


def test_the_oracle_sees_images(case):
    with Float64():
        t = case.trajectories[0]
        other = replace(t, media=[replace(t.media[0], media=images(case.family, 1, torch.float64, seed=9)[0])])
        with torch.no_grad():
            assert (naive(case.model, other) - case.logits[t.id]).abs().max() > 1e-2


def test_three_axes_alone_would_mix_packed_trajectories(qwen):
    """What model_inputs adds, the plain positions that restart, is what keeps trajectories apart."""
    (micro,) = micro_batches(qwen.trajectories, "packed")
    with Float64(), torch.no_grad():
        encoder = qwen.encoder()
        inputs = {**micro.model_inputs(), **encoder.model_inputs(micro)}
        assert inputs["position_ids"].shape == (4, 1, len(micro["input_ids"]))
        inputs["position_ids"] = inputs["position_ids"][1:]
        parts = by_trajectory(micro, qwen.model(**inputs).logits)
    assert max((parts[t.id] - qwen.logits[t.id]).abs().max() for t in qwen.trajectories) > 1e-2


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_sampled_placeholder_moves_no_feature(case, layout):
    """R1-V #180. The model sees a pad id in its place, as the oracle here does; the label stays."""
    members, seen = [], {}
    for t in case.trajectories[:3]:
        ids = t.tokens["input_ids"].clone()
        ids[-3] = IMAGE
        members.append(replace(t, tokens={**t.tokens, "input_ids": ids}))
    with Float64(), torch.no_grad():
        encoder = case.encoder()
    for micro in micro_batches(members, layout):
        assert (micro["labels"] == IMAGE).sum() == len(micro.infos)
        with Float64(), torch.no_grad():
            seen |= by_trajectory(micro, case.model(**micro.model_inputs(), **encoder.model_inputs(micro)).logits)
    for member in members:
        ids = member.tokens["input_ids"].clone()
        ids[-3] = 0
        with Float64(), torch.no_grad():
            assert_close(
                seen[member.id], naive(case.model, replace(member, tokens={**member.tokens, "input_ids": ids}))
            )


def test_text_only_trajectories_need_nothing(case):
    settings = config(case.family)
    processed = {"input_ids": torch.arange(10, 16), "attention_mask": torch.ones(6, dtype=torch.long)}
    members = [trajectory(f"t{i}", "g", 0, processed, [20 + i, 30], model=settings) for i in range(2)]
    assert ("position_ids" in members[0].tokens) == (case.family in MROPE)
    (micro,) = micro_batches(members, "packed")
    with Float64(), torch.no_grad():
        assert case.encoder().model_inputs(micro) == {}
        parts = by_trajectory(micro, case.model(**micro.model_inputs()).logits)
        for member in members:
            assert_close(parts[member.id], naive(case.model, member))


def test_a_whole_checkpointed_model_sees_its_features_again(case, way):
    model = copy.deepcopy(case.model)

    def forward(**inputs: Any) -> Any:
        with Float64():  # entered anew, because during a backward the outer mode is off
            return model(**inputs)

    micros = micro_batches(case.trajectories, "padded", cap=case.cap)[:2]
    with Float64():
        encoder = case.encoder(model)
        found = []
        for run in (partial(checkpoint, forward, use_reentrant=False), forward):
            logits = [run(**micro.model_inputs(), **encoder.model_inputs(micro)).logits for micro in micros]
            sum(part.square().sum() for part in logits).backward()  # the first is run again after the second
            found.append(gradients(model))
            model.zero_grad()
            encoder.fill(case.media)
    for name, gradient in found[1].items():
        assert_close(found[0][name], gradient, scale=torch.stack([g.abs().max() for g in found[1].values()]).max())


# -- sharded and wrapped ----------------------------------------------------------------------------------------------


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_fsdp2_gathers_the_root_for_an_encoding_without_a_forward(case, one_rank, way):
    """bfloat16 for what is sharded: features and markers pass through the casts. No warning of FSDP2 either."""
    model, policy = build(case.family), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    media = images(case.family, 3)
    encoder = Encoder(image_features(model))
    attach(model, encoder)
    layers = inner_of(model).language_model.layers
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    with pytest.raises(kd.InvalidArgument, match=r"2 parts are sharded.*layers\.0.*call fully_shard on it too, last"):
        encoder.fill(media)
    fully_shard(model, mp_policy=policy)
    encoder.fill(media)
    registered = model.__dict__[features._METHOD]
    encoder.fill(media)
    assert model.__dict__[features._METHOD] is registered
    (micro,) = micro_batches(rollouts(case.family, media), "packed")
    logits = model(**micro.model_inputs(), **encoder.model_inputs(micro)).logits
    logits.float().square().sum().backward()
    assert gradients(model).keys() == case.gradients.keys()
    for name, found in by_trajectory(micro, logits.float()).items():
        expected = case.logits[name].float()
        # bfloat16 has 8 bits: a wrong image moves logits by more
        assert (found - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="transformers 4 records hidden states without class names"
)
def test_a_sharded_tower_whose_hidden_states_get_lost_is_named(one_rank):
    model, media = build("llava"), images("llava", 2)
    tower = inner_of(model).vision_tower
    fully_shard(tower)
    fully_shard(model)
    match = r"'model\.vision_tower', found none.* FSDPCLIPVisionModel\. Call fully_shard on the layers"
    with pytest.raises(kd.InvalidArgument, match=match) as raised:
        Encoder(image_features(model)).fill(media)
    assert isinstance(raised.value.__cause__, TypeError)

    model = build("llava")  # as the message says
    for layer in (
        m for name, m in inner_of(model).vision_tower.named_modules() if name.endswith(("layers.0", "layers.1"))
    ):
        fully_shard(layer)
    fully_shard(model)
    encoder = Encoder(image_features(model))
    encoder.fill(media)
    assert len(encoder.cache) == 2


def test_another_error_of_a_sharded_tower_is_its_own(one_rank, monkeypatch):
    model = build("llava")
    fully_shard(inner_of(model).vision_tower)
    fully_shard(model)

    def broken(**tensors: Any) -> None:
        raise TypeError("of its own")

    monkeypatch.setattr(model, "get_image_features", broken)
    with pytest.raises(TypeError, match=r"^of its own$"):
        Encoder(image_features(model)).fill(images("llava", 1))


def test_ddp_is_looked_through(qwen, one_rank):
    wrapped = DistributedDataParallel(build("qwen3"))
    encoder = Encoder(image_features(wrapped))
    attach(wrapped, encoder)
    encoder.fill(images("qwen3", 2))
    assert len(encoder.cache) == 2 and encoder.token_ids == {IMAGE}


# -- attach -----------------------------------------------------------------------------------------------------------


def test_containers_before_any_encoding_are_those_that_are_learnt(case):
    inner = inner_of(case.model)
    case.encoder()
    learnt, expected = features._CONTAINERS[inner], features._Container.expected(inner)
    levels = tuple(torch.zeros(3, 32) for _ in range(1 + (case.family == "qwen3")))
    for a, b in zip(flatten(learnt.fill(levels)), flatten(expected.fill(levels)), strict=True):
        assert a == b


def flatten(container: Any) -> list[Any]:
    if isinstance(container, Tensor):
        return [tuple(container.shape)]
    if hasattr(container, "pooler_output"):
        container = [container.pooler_output, getattr(container, "deepstack_features", None)]
    return [type(container), *(x for part in container for x in flatten(part))] if container is not None else [None]


def test_pixels_still_go_through_an_attached_model(case, monkeypatch):
    route_instead(monkeypatch)
    model = copy.deepcopy(case.model)
    attach(model, Encoder(None))
    routed = inner_of(model).get_image_features
    attach(model, Encoder(None))
    assert inner_of(model).get_image_features is routed
    with Float64(), torch.no_grad():
        t = case.trajectories[0]
        assert torch.equal(naive(model, t), case.logits[t.id])


def test_a_copy_of_an_attached_model_has_its_own_tower(qwen, monkeypatch):
    route_instead(monkeypatch)
    model = copy.deepcopy(qwen.model)
    attach(model, Encoder(None))
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in inner_of(reference).visual.parameters():
            parameter.mul_(0.5)
    with Float64(), torch.no_grad():
        one, two = (image_features(m)(joined(qwen.media))[0] for m in (model, reference))
        assert not torch.equal(one, two)
        assert torch.equal(image_features(qwen.model)(joined(qwen.media))[0], one)


def test_a_marker_that_lost_its_features_is_named(qwen, monkeypatch):
    route_instead(monkeypatch)
    model = copy.deepcopy(qwen.model)
    encoder = qwen.encoder(model)
    (micro,) = micro_batches(qwen.trajectories, "packed")
    inputs = {**micro.model_inputs(), **encoder.model_inputs(micro)}
    assert inputs["pixel_values"].dtype == torch.int64  # mixed precision leaves it alone
    with pytest.raises(kd.UsageError, match=r"copied pixel_values.*use_reentrant=False"):
        model(**{**inputs, "pixel_values": inputs["pixel_values"].clone()})


def test_adapt_is_told_the_placeholder(case):
    assert case.encoder().token_ids == {IMAGE}


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_positions_of_one_axis_are_refused_where_three_are_needed(case, layout):
    plain = [
        replace(t, tokens={name: x for name, x in t.tokens.items() if name != "position_ids"})
        for t in case.trajectories
    ]
    (micro,) = micro_batches(plain, layout)
    encoder = case.encoder()
    if case.family not in MROPE:
        encoder.model_inputs(micro)
        return
    with pytest.raises(kd.UsageError, match=rf"{list(micro['input_ids'].shape)}.*three axes".replace("[", r"\[")):
        encoder.model_inputs(micro)


def test_positions_of_three_axes_are_refused_where_one_is_needed(qwen):
    (micro,) = micro_batches(qwen.trajectories, "packed")
    model = build("llava")
    encoder = Encoder(image_features(model))
    attach(model, encoder)
    with pytest.raises(kd.UsageError, match="one axis"):
        encoder.inputs(micro, (torch.zeros(micro.media.n_tokens, 32),))


@pytest.mark.parametrize("ids", [{9}, {IMAGE, 9}, {-1}])
def test_media_at_other_ids_are_refused(qwen, ids):
    (micro,) = micro_batches(qwen.trajectories, "packed")
    micro = replace(micro, media=replace(micro.media, token_ids=frozenset(ids)))
    with pytest.raises(kd.UsageError, match=rf"\[{min(ids)}.*image_token_id {IMAGE}"):
        qwen.encoder().model_inputs(micro)


def test_features_without_deepstack_are_refused(qwen):
    (micro,) = micro_batches(qwen.trajectories, "packed")
    encoder = qwen.encoder()
    with pytest.raises(kd.UsageError, match=r"takes 2 levels.*returned 1"):
        encoder.inputs(micro, (torch.zeros(micro.media.n_tokens, 32),))


def test_models_without_what_is_needed_are_named(qwen):
    class Flat(nn.Module):
        def get_image_features(self) -> None: ...

    for call in (image_features, lambda model: attach(model, Encoder(None))):
        with pytest.raises(kd.InvalidArgument, match=r"Linear without get_image_features"):
            call(nn.Linear(1, 1))
        with pytest.raises(kd.InvalidArgument, match=r"Flat without model\.get_image_features"):
            call(Flat())
    model = build("qwen2")
    model.config = SimpleNamespace()
    with pytest.raises(kd.InvalidArgument, match="SimpleNamespace has none"):
        attach(model, Encoder(None))


def test_tensors_that_the_tower_does_not_take_are_named(qwen):
    encode, tensors = image_features(qwen.model), joined(qwen.media)
    with pytest.raises(kd.InvalidArgument, match=r"takes \['pixel_values', 'image_grid_thw'\].*'pixels'"):
        encode({**tensors, "pixels": torch.zeros(1)})
    with pytest.raises(kd.InvalidArgument, match=r"needs \['pixel_values'\], found \['image_grid_thw'\]"):
        encode({"image_grid_thw": tensors["image_grid_thw"]})
