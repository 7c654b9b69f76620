"""The encoder: one encode per image, exact gradients, every mode and order of calls."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import memory
from pictures import HIDDEN, IMAGE, Looker, apart, fill, gradients, image, naive, picture

import knit_data as kd
from knit_data.encoder import chunks

EXACT = 1e-12  # of the largest gradient: float64, other order of additions
GROUPS = {f"g{i}": [[f"i{i}"]] * 3 + [[f"i{i}", "logo"]] for i in range(4)}


def minis(
    groups: Any = None, cap: int = 40, batch: int = 4, layout: str = "packed", **changes: Any
) -> Iterator[kd.MiniBatch]:
    store = memory()
    groups = GROUPS if groups is None else groups
    options = {name: changes.pop(name) for name in ("answer", "stray") if name in changes}
    fill(store, groups, **options)
    stream = kd.TrajectoryStream(store)
    sampler = kd.QuotaSampler(stream, len(groups), min(batch, len(groups)), None, epochs=changes.pop("epochs", 1))
    return kd.TrajectoryLoader(sampler, cap, device="cpu", layout=layout, **changes)


def media_of(groups: Any) -> dict[str, kd.Media]:
    return {(m := image(name)).digest: m for members in groups.values() for names in members for name in names}


def trained(model: Looker, encoder: kd.SharedEncoder, mini: kd.MiniBatch) -> list[kd.MicroBatch]:
    micros = []
    for micro in mini:
        (model(micro, encoder(micro)) / mini.loss_tokens).backward()
        micros.append(micro)
    encoder.backward()
    return micros


@pytest.mark.parametrize("mode", ["retain", "recompute"])
@pytest.mark.parametrize(("layout", "cap"), [("packed", 26), ("packed", 60), ("padded", 60), ("packed", 1000)])
@pytest.mark.parametrize(("levels", "max_patches"), [(1, 1), (3, 9), (1, 1000)])
def test_gradients_are_those_of_encoding_every_time(mode, levels, layout, cap, max_patches):
    model = Looker(levels).double()
    encoder = kd.SharedEncoder(model.encode, mode=mode, max_patches=max_patches)
    with minis(cap=cap, layout=layout) as loader:
        mini = next(loader)
        micros = trained(model, encoder, mini)
        assert cap < 1000 or len(micros) == 1
        found, calls = gradients(model), model.calls
        model.zero_grad()
        naive(model, micros, media_of(GROUPS), mini.loss_tokens)
        assert apart(found, gradients(model)) < EXACT
    least = sum(len(chunks(costs, max_patches)) for costs in [m.media.patches[0] for m in micros])
    assert calls == least * (2 if mode == "recompute" else 1)
    assert sum(len(m.media.new) for m in micros) == 5


names = st.sampled_from(["a", "b", "c", "d"])


@settings(max_examples=25)
@given(
    members=st.lists(st.lists(names, max_size=3), min_size=1, max_size=6),
    cap=st.integers(26, 90),
    max_patches=st.integers(1, 20),
    mode=st.sampled_from(["retain", "recompute"]),
    layout=st.sampled_from(["packed", "padded"]),
)
def test_any_use_of_images_gives_the_same_gradients(members, cap, max_patches, mode, layout):
    """An image in one micro-batch only, in several, twice in one trajectory; trajectories without any."""
    groups = {"g": members}
    model = Looker().double()
    encoder = kd.SharedEncoder(model.encode, mode=mode, max_patches=max_patches)
    with minis(groups, cap, layout=layout) as loader:
        mini = next(loader)
        micros = trained(model, encoder, mini)
        found = gradients(model)
        model.zero_grad()
        naive(model, micros, media_of(groups), mini.loss_tokens)
        assert any(members) or model.calls == 0
        assert apart(found, gradients(model)) < EXACT


def test_chunks_are_the_longest_runs_within_the_limit():
    assert chunks([], 8) == []
    assert chunks([5, 4, 9, 1], 8) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert chunks([5, 4, 9, 1], 10) == [(0, 2), (2, 4)]
    assert chunks([0, 0, 0], 1) == [(0, 3)]


# -- frozen ------------------------------------------------------------------------------------------------------------


def test_frozen_the_backbone_gets_a_frozen_towers_gradients():
    model = Looker().double()
    encoder = kd.SharedEncoder(model.encode, mode="frozen")
    with minis() as loader:
        mini = next(loader)
        micros = trained(model, encoder, mini)
        found = gradients(model)
        assert not any(name.startswith("tower") for name in found)
        model.zero_grad()
        model.tower.requires_grad_(False)
        naive(model, micros, media_of(GROUPS), mini.loss_tokens)
    assert apart(found, gradients(model)) < EXACT


def test_frozen_features_serve_extra_passes_and_later_mini_batches_until_the_weights_change():
    model = Looker()
    encoder = kd.SharedEncoder(model.encode, mode="frozen", max_patches=1)
    with minis(epochs=3, batch=4) as loader:
        for mini in loader:
            if not mini.n_trajectories:
                continue
            before = model.calls
            if mini.index == 2:
                with torch.no_grad():
                    model.tower[0].weight += 1
            with torch.no_grad():
                extra = [encoder(micro) for micro in mini.micro_batches(fields=("input_ids",))]
            features = [encoder(micro) for micro in mini]
            encoder.backward()
            assert model.calls - before == {0: 5, 1: 0, 2: 5}[mini.index]
            assert all(torch.equal(a, b) for a, b in zip(extra, features, strict=True))


def test_frozen_features_are_bounded_in_bytes():
    model = Looker()
    encoder = kd.SharedEncoder(model.encode, mode="frozen", max_patches=1)
    encoder.cache_bytes = 4 * HIDDEN * (image("i2").tokens + image("i3").tokens)
    groups = {f"g{i}": [[f"i{i}"]] * 2 for i in range(4)}
    with minis(groups, batch=1, epochs=2) as loader:
        calls = []
        for mini in loader:
            for micro in mini:
                encoder(micro)
            calls.append(model.calls)
    made = [b - a for a, b in zip([0, *calls], calls, strict=False)]
    assert made[:4] == [1, 1, 1, 1] and sum(made[4:8]) >= 2  # i0 and i1 had gone
    assert encoder._kept.nbytes <= encoder.cache_bytes


# -- passes and the order of calls -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["retain", "recompute"])
def test_an_extra_pass_encodes_for_itself(mode):
    model = Looker().double()
    encoder = kd.SharedEncoder(model.encode, mode=mode)
    with minis() as loader:
        mini = next(loader)
        with torch.no_grad():
            extra = [encoder(micro) for micro in mini.micro_batches()]
        calls = model.calls
        micros = trained(model, encoder, mini)
        assert model.calls == calls * (3 if mode == "recompute" else 2)
        assert not extra[0].requires_grad
        found = gradients(model)
        model.zero_grad()
        naive(model, micros, media_of(GROUPS), mini.loss_tokens)
        assert apart(found, gradients(model)) < EXACT
        with torch.no_grad():
            model.tower[0].weight.zero_()
            later = [encoder(micro) for micro in mini.micro_batches()]  # after the step: encoded anew
        assert not torch.equal(later[0], extra[0])


@pytest.mark.parametrize("mode", ["retain", "recompute"])
def test_an_extra_pass_in_eval_mode_leaves_no_features_to_the_training_pass(mode):
    torch.manual_seed(3)
    model = Looker(dropout=0.5).double()
    encoder = kd.SharedEncoder(model.encode, mode=mode)
    with minis() as loader, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mini = next(loader)
        model.eval()
        with torch.no_grad():
            calm = [encoder(micro) for micro in mini.micro_batches()]
        model.train()
        wild = [encoder(micro) for micro in mini]
        assert not torch.equal(calm[0], wild[0])
        encoder.abandon()


@pytest.mark.parametrize("mode", ["retain", "recompute", "frozen"])
def test_other_weights_in_an_extra_pass_do_not_reach_the_training_pass(mode):
    """The reference's weights are loaded for a pass, the policy's again for training."""
    model, reference = Looker().double(), Looker().double()
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(0.5)
    policy = {name: p.clone() for name, p in model.state_dict().items()}
    encoder = kd.SharedEncoder(model.encode, mode=mode)
    with minis() as loader:
        mini = next(loader)
        model.load_state_dict(reference.state_dict())
        with torch.no_grad():
            for micro in mini.micro_batches():
                encoder(micro)
        model.load_state_dict(policy)
        micros = trained(model, encoder, mini)
        found = gradients(model)
        model.zero_grad()
        model.tower.requires_grad_(mode != "frozen")
        naive(model, micros, media_of(GROUPS), mini.loss_tokens)
        assert apart(found, gradients(model)) < EXACT


def test_passes_side_by_side_each_have_their_own_features():
    model = Looker()
    encoder = kd.SharedEncoder(model.encode)
    with minis() as loader:
        mini = next(loader)
        for micro, old in zip(mini, mini.micro_batches(), strict=False):
            with torch.no_grad():
                before = encoder(old)
            features = encoder(micro)
            assert torch.equal(before, features) and features.requires_grad and not before.requires_grad
            features.sum().backward()
        encoder.backward()


@pytest.mark.parametrize("mode", ["retain", "recompute"])
@pytest.mark.parametrize("change", ["step", "eval"])
def test_a_backward_through_a_changed_tower_is_refused(mode, change):
    model = Looker(dropout=0.1)
    encoder = kd.SharedEncoder(model.encode, mode=mode)
    with minis() as loader, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for micro in next(loader):
            model(micro, encoder(micro)).backward()
        if change == "step":
            torch.optim.SGD(model.tower.parameters(), lr=0.0).zero_grad()
            with torch.no_grad():
                model.tower[0].weight.add_(1.0)
        else:
            model.eval()
        with pytest.raises(kd.UsageError, match=r"changed between its forward and encoder.backward\(\)"):
            encoder.backward()
        encoder.abandon()


def test_a_backward_that_failed_goes_on_where_it_stopped():
    model = Looker().double()
    full = []

    def encode(tensors: Any) -> Any:
        if torch.is_grad_enabled() and full:
            raise RuntimeError(full.pop())
        return model.encode(tensors)

    encoder = kd.SharedEncoder(encode, max_patches=4)
    with minis() as loader:
        mini = next(loader)
        micros = []
        for micro in mini:
            (model(micro, encoder(micro)) / mini.loss_tokens).backward()
            micros.append(micro)
        full.append("out of memory")
        with pytest.raises(RuntimeError, match="out of memory"):
            encoder.backward()
        with torch.inference_mode():  # needs none of the caller's modes
            encoder.backward()
        found = gradients(model)
        model.zero_grad()
        naive(model, micros, media_of(GROUPS), mini.loss_tokens)
        assert apart(found, gradients(model)) < EXACT


def test_an_encode_that_failed_is_repeated():
    model = Looker()
    full = ["out of memory"]

    def encode(tensors: Any) -> Any:
        if full:
            raise RuntimeError(full.pop())
        return model.encode(tensors)

    encoder = kd.SharedEncoder(encode, mode="frozen")
    with minis(epochs=2) as loader:
        first = next(loader)
        micros = iter(first)
        micro = next(micros)
        with pytest.raises(RuntimeError, match="out of memory"):
            encoder(micro)
        encoder(micro)
        for rest in micros:
            encoder(rest)
        with torch.no_grad():
            model.tower[0].weight += 1  # seen although the first run of encode failed
        before = model.calls
        for micro in next(loader):
            encoder(micro)
        assert model.calls > before


@pytest.mark.parametrize("change", ["data", "autocast", "eval", "buffer", "assign"])
def test_what_a_frozen_encoder_keeps_depends_on_more_than_the_image(change):
    model = Looker()
    model.tower.insert(1, torch.nn.BatchNorm1d(12).eval())
    model.eval()
    encoder = kd.SharedEncoder(model.encode, mode="frozen")
    with minis(epochs=3) as loader, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = []
        for mini, state in zip(loader, range(3), strict=False):
            if state == 2:
                if change == "data":
                    model.tower[0].weight.data.add_(1.0)
                    encoder.forget()
                elif change == "eval":
                    model.tower.train()
                elif change == "buffer":
                    model.tower[1].running_mean += 1
                elif change == "assign":
                    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
            before = model.calls
            with torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast" and state == 2):
                dtypes = {encoder(micro).dtype for micro in mini if micro.media.n_tokens}
            seen.append(model.calls - before)
        assert seen[0] > 0 and seen[1] == 0 and seen[2] > 0
        assert (torch.bfloat16 in dtypes) == (change == "autocast")


def test_an_encoder_that_is_forgotten_in_one_mini_batch_is_missed():
    model = Looker()
    encoder = kd.SharedEncoder(model.encode)
    with minis(batch=2) as loader:
        trained(model, encoder, next(loader))
        list(next(loader))
        with pytest.raises(kd.UsageError, match="since the last call there was none"):
            encoder.backward()


def test_another_kind_of_features_is_refused():
    widths = iter([3, 4])
    encoder = kd.SharedEncoder(lambda tensors: torch.zeros(len(tensors["patches"]) // 2, next(widths)), max_patches=1)
    with minis() as loader, pytest.raises(kd.InvalidArgument, match=r"width \[4\], before it was \[3\]"):
        for micro in next(loader):
            encoder(micro)
    with pytest.raises(kd.InvalidArgument, match="takes a micro-batch"):
        encoder(3)


@pytest.mark.parametrize("mode", ["retain", "recompute"])
def test_forgetting_backward_raises_and_abandon_helps(mode):
    model = Looker()
    encoder = kd.SharedEncoder(model.encode, mode=mode)
    with minis(batch=2) as loader:
        for micro in next(loader):
            model(micro, encoder(micro)).backward()
        second = next(loader)
        first_micro = next(iter(second))
        with pytest.raises(kd.UsageError, match=r"encoder.backward\(\) was not called after the last mini-batch"):
            encoder(first_micro)
        encoder.abandon()
        encoder(first_micro)


def test_backward_twice_before_anything_or_without_gradients_raises():
    model = Looker()
    encoder = kd.SharedEncoder(model.encode)
    with pytest.raises(kd.UsageError, match="since the last call there was none"):
        encoder.backward()
    with minis(batch=2) as loader:
        trained(model, encoder, next(loader))
        with pytest.raises(kd.UsageError, match="once per mini-batch"):
            encoder.backward()
        with torch.no_grad():
            for micro in next(loader):
                encoder(micro)
        with pytest.raises(kd.UsageError, match="under no_grad"):
            encoder.backward()


def test_a_loss_backward_after_the_encoders_raises():
    model = Looker()
    encoder = kd.SharedEncoder(model.encode)
    with minis() as loader:
        losses = [model(micro, encoder(micro)) for micro in next(loader)]
        for loss in losses[:-1]:
            loss.backward()
        encoder.backward()
        with pytest.raises(kd.UsageError, match="would not reach the encoder"):
            losses[-1].backward()


def test_a_backward_in_the_middle_of_a_pass_is_named():
    model = Looker()
    encoder = kd.SharedEncoder(model.encode)
    with minis(cap=30) as loader:
        micros = iter(next(loader))
        micro = next(micros)
        model(micro, encoder(micro)).backward()
        encoder.backward()
        with pytest.raises(kd.UsageError, match="before the last micro-batch of this pass"):
            encoder(next(micros))


def test_the_empty_mini_batch_at_the_end_of_a_stream_needs_no_guard():
    model = Looker()
    encoder = kd.SharedEncoder(model.encode)
    with minis(batch=4) as loader:
        ends = []
        for mini in (next(loader), next(loader)):
            for micro in mini:
                model(micro, encoder(micro)).backward()
            encoder.backward()
            ends.append(mini.n_trajectories)
        assert ends == [16, 0]
        with pytest.raises(kd.UsageError):
            encoder.backward()


def test_a_skipped_micro_batch_is_named():
    model = Looker()
    encoder = kd.SharedEncoder(model.encode)
    with minis({"g": [["a"]] * 6}, cap=26) as loader:
        first, second, *_ = list(next(loader))
        assert first.media.new and not second.media.new
        with pytest.raises(kd.UsageError, match="micro-batch 1 uses 1 media that an earlier one was to encode"):
            encoder(second)


def test_a_mini_batch_of_text_never_touches_the_tower():
    model = Looker()
    encoder = kd.SharedEncoder(model.encode)
    with minis({"g": [[], []], "h": [[]]}) as loader:
        trained(model, encoder, next(loader))
    assert model.calls == 0 and model.tower[0].weight.grad is None and model.head.weight.grad is not None


def test_a_micro_batch_of_text_beside_others():
    """miles #2406: one without images in a mini-batch with images."""
    groups = {"g": [["a"], [], [], []]}
    model = Looker().double()
    encoder = kd.SharedEncoder(model.encode)
    with minis(groups, cap=14) as loader:
        mini = next(loader)
        micros = trained(model, encoder, mini)
        shapes = [tuple(encoder(micro).shape) for micro in mini.micro_batches()]
        assert (0, HIDDEN) in shapes or (0, 0) in shapes
        found = gradients(model)
        model.zero_grad()
        naive(model, micros, media_of(groups), mini.loss_tokens)
        assert apart(found, gradients(model)) < EXACT


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_gradients_add_up_in_float32_under_bfloat16_features():
    """256 uses of one image: adding in bfloat16 is off by percents, this by one rounding."""
    weight = torch.nn.Parameter(torch.randn(2, HIDDEN, dtype=torch.float64))

    def encode(tensors: Any) -> torch.Tensor:
        return (tensors["patches"][:1, :2].double() @ weight).bfloat16()

    groups = {"g": [["x"]] * 256}
    scales = torch.randn(256, HIDDEN).bfloat16()
    encoder = kd.SharedEncoder(encode)
    store = memory()
    one = kd.Media({"patches": image("x").tensors["patches"]}, 1)
    with store.writer("w") as writer:
        ids = torch.tensor([1, 90, 2, 3])
        rows = [
            kd.Trajectory(f"{i:03d}", "g", 0, {"input_ids": ids}, media=[kd.MediaRef(one, [(1, 1)])])
            for i in range(len(groups["g"]))
        ]
        writer.put_group(rows)
    store.seal()
    sampler = kd.QuotaSampler(kd.TrajectoryStream(store), 1, 1, None)
    with kd.TrajectoryLoader(sampler, 64, device="cpu") as loader:
        at = 0
        for micro in next(loader):
            features = encoder(micro)
            assert features.dtype == torch.bfloat16
            (features * scales[at : at + len(features)]).sum().backward()
            at += len(features)
        (call,) = encoder._calls
        assert call.grads[0] is not None and call.grads[0].dtype == torch.float32
        exact = scales.double().sum(0)
        assert (call.grads[0][0] - exact).abs().max() < 1e-5 * scales.double().abs().sum(0).max()
        encoder.backward()
    wanted = exact.bfloat16().double() * one.tensors["patches"][:1, :2].double().T  # one rounding, at the cast
    assert torch.allclose(weight.grad, wanted, rtol=1e-2, atol=1e-6)


def test_dropout_is_told_and_recompute_draws_the_same_mask():
    found = {}
    for mode in ("retain", "recompute"):
        torch.manual_seed(5)
        model = Looker(dropout=0.5).double()
        encoder = kd.SharedEncoder(model.encode, mode=mode, max_patches=4)
        with minis() as loader, pytest.warns(UserWarning, match="share one mask"):
            mini = next(loader)
            trained(model, encoder, mini)
        found[mode] = gradients(model)
        state = torch.rand(3)
        assert torch.equal(found.setdefault("after", state), state)  # the recomputation disturbs no other draw
    assert all(torch.equal(found["retain"][name], g) for name, g in found["recompute"].items())


def test_batch_norm_in_training_mode_is_told():
    model = Looker()
    model.tower.insert(1, torch.nn.BatchNorm1d(12))
    encoder = kd.SharedEncoder(model.encode)
    with minis() as loader, pytest.warns(UserWarning, match="BatchNorm1d in training mode"):
        trained(model, encoder, next(loader))


@pytest.mark.parametrize("inside", [True, False])
def test_recompute_runs_under_the_same_autocast_and_its_cache_hides_no_gradient(inside):
    found = {}
    for mode in ("retain", "recompute"):
        model = Looker()
        encoder = kd.SharedEncoder(model.encode, mode=mode)
        with minis() as loader:
            mini = next(loader)
            with torch.autocast("cpu", torch.bfloat16):
                for micro in mini:
                    features = encoder(micro)
                    assert features.dtype == torch.bfloat16
                    model(micro, features).backward()
                if inside:  # its weight cache is full of casts without gradients
                    encoder.backward()
            if not inside:
                encoder.backward()
        found[mode] = gradients(model)
    assert found["retain"].keys() == found["recompute"].keys()
    for name, gradient in found["retain"].items():
        assert torch.equal(gradient, found["recompute"][name])


def test_inference_mode_in_an_extra_pass_does_not_spoil_the_training_pass():
    model = Looker()
    encoder = kd.SharedEncoder(model.encode, mode="retain")
    with minis() as loader:
        mini = next(loader)
        with torch.inference_mode():
            for micro in mini.micro_batches():
                encoder(micro)
        trained(model, encoder, mini)
    assert model.tower[0].weight.grad is not None


# -- wrong answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (torch.zeros(2, 3), "gave 2 rows for 1 media, which fill 3 placeholders"),
        (torch.zeros(4, 3), "gave 4 rows for 1 media"),
        (torch.zeros(3), r"found \['torch.float32 \[3\]'\]"),
        (torch.zeros(3, 2, dtype=torch.int64), "torch.int64"),
        ((), r"found \[\]"),
        ((torch.zeros(3, 2), torch.zeros(2, 2)), "gave 2 rows"),
        ({"a": 1}, "found"),
        (None, "found"),
    ],
)
def test_what_encode_returns_is_checked_before_the_model_runs(returned: Any, text: str):
    store = memory()
    with store.writer("w") as writer:
        writer.put(picture("a", "a", [image("a", 3)]))
    store.seal()
    sampler = kd.QuotaSampler(kd.TrajectoryStream(store), 1, 1, 1)
    with kd.TrajectoryLoader(sampler, 64, device="cpu") as loader:
        encoder = kd.SharedEncoder(lambda tensors: returned)
        for micro in next(loader):
            with pytest.raises(kd.InvalidArgument, match=text):
                encoder(micro)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"encode": 3}, "callable"),
        ({"module": 3}, "nn.Module"),
        ({"mode": "keep"}, "'keep'"),
        ({"max_patches": 0}, "max_patches"),
        ({"max_patches": True}, "max_patches"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], text: str):
    with pytest.raises(kd.InvalidArgument, match=text):
        kd.SharedEncoder(**{"encode": lambda tensors: tensors, **arguments})


def test_model_inputs_need_an_attached_model():
    encoder = kd.SharedEncoder(lambda tensors: tensors["patches"])
    with minis() as loader:
        for micro in next(loader):
            with pytest.raises(kd.UsageError, match="attach"):
                encoder.model_inputs(micro)


def test_images_lost_before_the_store_are_found_by_the_models_own_placeholder():
    """agent-lightning #560: no medium in the whole mini-batch, its placeholders still in the prompts."""
    whole = picture("a", "a", [image("a", 3)], stray=2)
    sampled = picture("b", "b", [], stray=2)  # a placeholder of the response is the policy's own
    for trajectory, lost in ((whole, True), (sampled, False)):
        store = memory()
        with store.writer("w") as writer:
            writer.put(kd.Trajectory("a", "a", 0, trajectory.tokens, trajectory.values))
        store.seal()
        encoder = kd.SharedEncoder(lambda tensors: tensors["patches"])
        encoder.adapt(lambda micro, levels: {"features": levels}, frozenset({IMAGE}))
        sampler = kd.QuotaSampler(kd.TrajectoryStream(store), 1, 1, 1)
        with kd.TrajectoryLoader(sampler, 64, device="cpu") as loader:
            (micro,) = next(loader)
            if lost:
                with pytest.raises(kd.InvalidTrajectory, match=r"ids \[90\].* images were lost"):
                    encoder.model_inputs(micro)
            else:
                assert encoder.model_inputs(micro) == {}
                encoder.backward()


def test_media_of_two_kinds_in_one_call_are_named():
    store = memory()
    other = kd.Media({"frames": torch.zeros(2, 3)}, 1, kind="video")
    with store.writer("w") as writer:
        ids = torch.tensor([1, 90, 2, 91, 3])
        media = [kd.MediaRef(image("a", 1), [(1, 1)]), kd.MediaRef(other, [(3, 1)])]
        writer.put(kd.Trajectory("a", "a", 0, {"input_ids": ids}, media=media))
    store.seal()
    sampler = kd.QuotaSampler(kd.TrajectoryStream(store), 1, 1, 1)
    encoder = kd.SharedEncoder(lambda tensors: torch.zeros(2, 3))
    with kd.TrajectoryLoader(sampler, 64, device="cpu") as loader:
        for micro in next(loader):
            with pytest.raises(kd.InvalidArgument, match=r"\(image\) and .*frames.* \(video\)"):
                encoder(micro)


# -- memory ------------------------------------------------------------------------------------------------------------


class Live(torch.utils._python_dispatch.TorchDispatchMode):
    """The most bytes of tensors that were alive at once, of those made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.seen:
                    self.seen.add(key)
                    self.now += size
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._gone, key, size)
        return out

    def _gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def peak(mode: str, images: int) -> tuple[int, int]:
    """Most bytes alive in forward and backward of ``images`` images, and those of their features and gradients."""
    tower = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(8)])

    def encode(tensors: Any) -> torch.Tensor:
        return tower(tensors["patches"]).view(-1, 4, 64).mean(1)

    store = memory()
    with store.writer("w") as writer:
        ids = torch.tensor([1, *[90] * 64, 2])
        for i in range(images):
            media = kd.Media({"patches": torch.randn(256, 64)}, 64, patches=256)
            writer.put(kd.Trajectory(f"{i}", f"{i}", 0, {"input_ids": ids}, media=[kd.MediaRef(media, [(1, 64)])]))
    store.seal()
    sampler = kd.QuotaSampler(kd.TrajectoryStream(store), images, images, 1)
    encoder = kd.SharedEncoder(encode, mode=mode, max_patches=256)
    with kd.TrajectoryLoader(sampler, 70, device="cpu") as loader:
        mini = next(loader)
        assert mini.n_trajectories == images
        with Live() as live:
            for micro in mini:
                encoder(micro).pow(2).sum().backward()
            encoder.backward()
        del micro, mini
    return live.most, images * 64 * 64 * 4 * 2


def test_recompute_needs_one_chunk_beyond_features_and_gradients():
    few, many = peak("recompute", 2), peak("recompute", 8)
    spent = (many[0] - few[0]) - (many[1] - few[1])  # what six more images cost beyond their features and gradients
    assert spent <= 0.05 * (many[1] - few[1])
    kept = peak("retain", 8)[0] - peak("retain", 2)[0]
    assert kept > 6 * 8 * 256 * 64 * 4  # with the graph: every layer of every image, so the measure can fail
    gc.collect()
