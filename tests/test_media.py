"""Media of micro-batches: read once, placed right, masked with all their users, missed when they got lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import memory
from pictures import IMAGE, Looker, damage, fill, image, picture

import knit_data as kd
from knit_data.media import MediaReader

GROUPS = {f"g{i}": [[f"i{i}"], [f"i{i}", "logo"], [f"i{i}"], []] for i in range(3)}


def loader_of(store: kd.TrajectoryStore, batch: int, cap: int = 40, **changes: Any) -> kd.TrajectoryLoader:
    epochs = changes.pop("epochs", 1)
    sampler = kd.QuotaSampler(
        kd.TrajectoryStream(store), batch, batch, None, epochs=epochs, groups=changes.pop("groups", None)
    )
    return kd.TrajectoryLoader(sampler, cap, device="cpu", **changes)


def stored(groups: Any = None, **changes: int) -> kd.TrajectoryStore:
    store = memory()
    fill(store, GROUPS if groups is None else groups, **changes)
    return store


@settings(max_examples=30)
@given(
    members=st.lists(st.lists(st.sampled_from("abcd"), max_size=3), min_size=1, max_size=5),
    layout=st.sampled_from(["packed", "padded"]),
    multiple=st.integers(1, 4),
)
def test_features_belong_where_the_placeholders_are(members, layout, multiple):
    """Slots, in the order of tokens, are exactly the placeholders, and each has its own medium's next feature."""
    with loader_of(stored({"g": members}), 1, 90, layout=layout, padding=kd.Padding(0, multiple, multiple)) as loader:
        for micro in next(loader):
            media = micro.media
            ids = micro["input_ids"].reshape(-1)
            assert media.slots.tolist() == (ids == IMAGE).nonzero()[:, 0].tolist()
            sources = [at + i for _, at, n, _ in media.segments.tolist() for i in range(n)]
            places = [at + i for _, _, n, at in media.segments.tolist() for i in range(n)]
            assert sources == list(range(media.n_tokens)) and places == media.slots.tolist()
            assert media.n_tokens == len(media.slots) and media.token_ids == ({IMAGE} if len(media.slots) else set())
            wanted = []
            for info in micro.infos:
                for name in members[int(info.id.split("/")[1])]:
                    digest = image(name).digest
                    wanted += [(digest, i) for i in range(image(name).tokens)]
            found = [(media.digests[which], first + i) for which, first, n in media.pieces for i in range(n)]
            assert found == wanted and set(media.digests) == {digest for digest, _ in wanted}


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_features_are_put_into_embeddings(layout):
    groups = {"t": [[], []], "g": [["a", "b"], ["b"]], "h": [[]]}
    with loader_of(stored(groups), 3, 40, layout=layout, padding=kd.Padding(0, 4, 4)) as loader:
        micros = list(next(loader))
    for micro in micros:
        media, shape = micro.media, micro["input_ids"].shape
        for kind in (torch.float32, torch.bfloat16):
            embeddings = torch.randn(*shape, 3, dtype=kind, requires_grad=True)
            features = torch.randn(media.n_tokens, 3, requires_grad=True)
            put, want = media.put(embeddings, features), embeddings.detach().clone()
            want.view(-1, 3)[media.slots] = features.detach().to(kind)
            assert torch.equal(put, want)
            put.float().square().sum().backward()
            assert torch.equal(features.grad, 2 * features.detach().to(kind).float())  # none of none, too
            want.view(-1, 3)[media.slots] = 0
            assert torch.equal(embeddings.grad, 2 * want)
        levels = (features.new_zeros(media.n_tokens, 9), features)
        assert torch.equal(media.put(embeddings[None], levels, level=1)[0], put)  # of a model of a batch of one
    micro = next(micro for micro in micros if len(micro.media))
    media, embeddings = micro.media, torch.ones(*micro["input_ids"].shape, 3)
    features = torch.ones(media.n_tokens, 3)
    for found, level, text in (
        (features[1:], None, r"needs features \[\d+, 3\] of level 0 for embeddings \[.*\], found levels of \[\[\d+, 3"),
        (features[:, :2], None, r"needs features \[\d+, 3\]"),
        ((features, features), None, r"features have 2 levels; say which of them with level="),
        ((features, features), 2, r"needs features \[\d+, 3\] of level 2"),
        (features, 1, r"needs features \[\d+, 3\] of level 1"),
    ):
        with pytest.raises(kd.InvalidArgument, match=f"put: {text}"):
            media.put(embeddings, found, level)
    for wrong in (embeddings[..., :1, :], embeddings.flatten(), embeddings[..., :1, :0]):
        with pytest.raises(kd.InvalidArgument, match=r"put: needs embeddings of the micro-batch's \d+ slots"):
            media.put(wrong, features)
    for wrong in ((None, features), (embeddings, None), (embeddings, [None])):
        with pytest.raises(kd.InvalidArgument, match=r"put: takes tensors .*, found None"):
            media.put(*wrong)


def test_before_any_image_embeddings_stay_as_they_are():
    encoder = kd.SharedEncoder(lambda tensors: tensors["patches"][::2])
    with loader_of(stored({"t": [[], []]}), 1, 40) as loader:
        (micro,) = next(loader)
    embeddings = torch.randn(*micro["input_ids"].shape, 3)
    for level in (None, 2):  # how many there are is not known yet
        put = micro.media.put(embeddings, encoder(micro), level)
        assert torch.equal(put, embeddings) and put is not embeddings


def test_a_medium_of_several_spans_in_any_order():
    store = memory()
    media = kd.Media({"patches": torch.zeros(10, 6)}, 5)
    ids = torch.tensor([1, IMAGE, IMAGE, 2, IMAGE, IMAGE, IMAGE, 3])
    with store.writer("w") as writer:
        writer.put_group([kd.Trajectory("a", "a", 0, {"input_ids": ids}, media=[kd.MediaRef(media, [(4, 3), (1, 2)])])])
    store.seal()
    with loader_of(store, 1) as loader:
        (micro,) = next(loader)
    assert micro.media.pieces == ((0, 3, 2), (0, 0, 3)) and micro.media.slots.tolist() == [1, 2, 4, 5, 6]


def test_each_medium_is_new_once_and_read_once_also_over_passes_and_mini_batches():
    with loader_of(stored(), 3, epochs=2) as loader:
        reads = []
        for mini in loader:
            if not mini.n_trajectories:
                continue
            extra = [m for micro in mini.micro_batches(fields=("input_ids",)) for m in micro.media.new]
            new = [m for micro in mini for m in micro.media.new]
            assert sorted(m.digest for m in new) == sorted({m.digest for m in new}) == sorted(m.digest for m in extra)
            assert len(new) == 4
            reads.append(mini.stats["bytes_read"])
            for m in new:
                (name,) = [name for name in ("i0", "i1", "i2", "logo") if image(name).digest == m.digest]
                assert torch.equal(m.tensors["patches"], image(name).tensors["patches"])
    pixels = sum(image(name).tensors["patches"].nbytes for name in ("i0", "i1", "i2", "logo"))
    assert reads[0] - reads[1] == pixels  # the same columns, and no medium a second time


def test_the_cache_of_media_is_bounded(monkeypatch):
    monkeypatch.setattr("knit_data.media.CACHE_BYTES", 2 * 4096)
    made: list[MediaReader] = []
    real = MediaReader.__init__
    monkeypatch.setattr(MediaReader, "__init__", lambda self, *a: (made.append(self), real(self, *a))[1])
    with loader_of(stored(), 3) as loader:
        micros = list(next(loader))
        assert sum(len(m.media.new) for m in micros) == 4
    (reader,) = made
    assert reader._kept.nbytes == 2 * 4096
    assert len(reader._kept) == 2  # an arena has 4,096 bytes at least


def test_equal_media_of_different_segments_are_one():
    store = stored({"a": [["x"]], "b": [["x"]]})
    with loader_of(store, 2) as loader:
        (micro,) = next(loader)
    assert len(micro.media) == 1 and len(micro.media.new) == 1 and len(micro.media.pieces) == 2


def test_keys_tell_shapes_kinds_and_counts_apart():
    """sglang #25462, dynamo #8341: equal bytes of another shape; LMCache #4783: a hash cut short."""
    flat = torch.arange(12.0)
    media = [
        kd.Media({"p": flat.view(3, 4)}, 2),
        kd.Media({"p": flat.view(4, 3)}, 2),
        kd.Media({"p": flat.view(4, 3)}, 3),
        kd.Media({"q": flat.view(4, 3)}, 3),
        kd.Media({"p": flat.view(4, 3)}, 3, kind="video"),
        kd.Media({"p": flat.view(4, 3)}, 3, patches=7),
        kd.Media({"p": flat.view(4, 3).view(torch.int32)}, 3),
    ]
    assert len({m.digest for m in media}) == len(media)
    assert all(len(bytes.fromhex(m.digest)) == 32 for m in media)
    store = memory()
    with store.writer("w") as writer:
        for i, m in enumerate(media):
            ids = torch.tensor([1, *[IMAGE] * m.tokens, 2])
            writer.put_group(
                [kd.Trajectory(f"{i}", f"{i}", 0, {"input_ids": ids}, media=[kd.MediaRef(m, [(1, m.tokens)])])]
            )
    store.seal()
    with loader_of(store, len(media), 64) as loader:
        found = {m.digest for micro in next(loader) for m in micro.media.new}
    assert found == {m.digest for m in media}


# -- placeholders that are none, and images that got lost --------------------------------------------------------------


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_sampled_placeholder_reaches_the_labels_and_not_the_model(layout):
    """R1-V #180: the policy sampled the placeholder. Spans decide; the model sees a pad id there."""
    store = stored({"g": [["a"], ["a", "b"]]}, stray=2)
    with loader_of(store, 1, 90, layout=layout, padding=kd.Padding(token_id=0)) as loader:
        (micro,) = next(loader)
    given = micro.model_inputs()["input_ids"].reshape(-1)
    assert (given == IMAGE).nonzero()[:, 0].tolist() == micro.media.slots.tolist()
    kept = micro["input_ids"].reshape(-1)
    assert int((kept == IMAGE).sum()) == len(micro.media.slots) + 4
    assert int((micro["labels"] == IMAGE).sum()) == 4
    assert torch.equal(given[kept != IMAGE], kept[kept != IMAGE]) and int((given != kept).sum()) == 4


def test_a_trajectory_whose_images_got_lost_is_found_beside_others(tmp_path):
    """agent-lightning #560: the loss would still fall."""
    store = memory()
    with store.writer("w") as writer:
        whole = picture("whole", "g", [image("a")])
        writer.put_group([whole, kd.Trajectory("blind", "g", 0, whole.tokens, whole.values)])
    store.seal()
    with loader_of(store, 1) as loader, pytest.raises(kd.InvalidTrajectory, match=r"'blind' has .* images were lost"):
        list(next(loader))


def test_a_writer_refuses_a_prompt_with_placeholders_beyond_its_spans():
    """verl #3469: always one more. EasyR1 #175: several images that disagree."""
    whole = picture("a", "a", [image("x"), image("y")])
    one_less = kd.Trajectory("a", "a", 0, whole.tokens, whole.values, whole.media[:1])
    lost = image("y").tokens
    with memory().writer("w") as writer:
        with pytest.raises(
            kd.InvalidTrajectory, match=rf"{lost} of the prompt's placeholders \(id 90\) are in no span"
        ):
            writer.put(one_less)
        ids = whole.tokens["input_ids"].clone()
        ids[whole.media[0].spans[0][0] - 1] = IMAGE
        more = kd.Trajectory("a", "a", 0, {**whole.tokens, "input_ids": ids}, whole.values, whole.media)
        with pytest.raises(kd.InvalidTrajectory, match="1 of the prompt's placeholders"):
            writer.put(more)
        nothing = {**whole.tokens, "input_ids": ids, "loss_mask": torch.zeros(len(ids), dtype=torch.bool)}
        writer.put(kd.Trajectory("a", "a", 0, nothing, whole.values, whole.media))  # no prompt to speak of


def test_padding_that_looks_like_an_image_is_refused():
    with loader_of(stored(), 3, padding=kd.Padding(token_id=IMAGE)) as loader:
        with pytest.raises(kd.InvalidArgument, match=r"Padding\(token_id=90\) is the placeholder"):
            list(next(loader))


def test_images_that_the_model_never_gets_are_found_at_the_next_micro_batch():
    with loader_of(stored(), 3, cap=26) as loader:
        micros = iter(next(loader))
        while not len((micro := next(micros)).media):
            micro.model_inputs()
        micro.model_inputs()
        with pytest.raises(kd.UsageError, match="trained without the images"):
            next(micros)


def test_truncation_leaves_out_the_image_with_its_placeholders():
    """trl #5904, #5881: the cut goes through an image; its pixels stay, or its placeholders do."""
    store = memory()
    big = image("big", 8)
    with store.writer("w") as writer:
        whole = picture("a", "a", [image("small", 3), big], answer=3)
        mask = torch.zeros(len(whole.tokens["input_ids"]))
        mask[5] = mask[-1] = 1.0  # a first answer after the small image
        writer.put_group(
            [kd.Trajectory("a", "a", 0, {**whole.tokens, "loss_mask": mask}, {"reward": 1.0}, whole.media)]
        )
    store.seal()
    sampler = kd.QuotaSampler(
        kd.TrajectoryStream(store), 1, 1, None, groups=kd.GroupPolicy(oversize="truncate", max_tokens=12)
    )
    with kd.TrajectoryLoader(sampler, 12, device="cpu") as loader:
        mini = next(loader)
        (micro,) = mini
        assert mini.stats["truncated"] == 1
        assert micro.media.digests == (image("small", 3).digest,) and len(micro.media.new) == 1
        assert micro.media.slots.tolist() == [2, 3, 4] and len(micro["input_ids"]) < 12
        assert big.digest not in micro.media.digests


# -- corrupt media -----------------------------------------------------------------------------------------------------


def damaged(folder: Path, name: str, groups: Any = None) -> kd.TrajectoryStore:
    """A store in which a byte of every copy of this image is flipped."""
    store = kd.TrajectoryStore(folder / "store")
    fill(store, GROUPS if groups is None else groups)
    damage(folder / "store", name)
    return store


def test_a_corrupt_image_is_raised_with_its_file(tmp_path):
    text = r"medium \d+ of this mini-batch: segments/\S+\.safetensors: bytes"
    with loader_of(damaged(tmp_path, "i1"), 3) as loader, pytest.raises(kd.CorruptData, match=text):
        list(next(loader))


@pytest.mark.parametrize("cap", [26, 200])
@pytest.mark.parametrize("mode", ["retain", "recompute"])
def test_every_user_of_a_corrupt_image_is_masked(tmp_path, cap, mode):
    model = Looker().double()
    encoder = kd.SharedEncoder(model.encode, mode=mode)
    with loader_of(damaged(tmp_path, "i1"), 3, cap, on_corrupt="mask") as loader:
        mini = next(loader)
        masked = []
        for micro in mini:
            masked += micro.masked
            model(micro, encoder(micro)).backward()
            bad = image("i1").digest
            assert bad not in micro.media.digests and all(m is None or m.digest != bad for m in micro.media.new)
            for i, info in enumerate(micro.infos):
                if info.id in micro.masked:
                    assert (
                        not micro["loss_mask"][micro.rows == i].any()
                        and (micro["input_ids"][micro.rows == i] == 0).all()
                    )
        encoder.backward()
        assert sorted(masked) == ["g1/0", "g1/1", "g1/2"] and mini.stats["masked"] == 3
        assert mini.n_trajectories == 12
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_a_mini_batch_of_corrupt_images_alone_is_masked_whole(tmp_path):
    """One rank keeps step with nobody: it needs no image in place of them."""
    groups = {"g": [["a"], ["a"]]}
    model = Looker()
    encoder = kd.SharedEncoder(model.encode)
    with loader_of(damaged(tmp_path, "a", groups), 1, on_corrupt="mask") as loader:
        for micro in next(loader):
            assert len(micro.masked) == 2 and encoder(micro).shape[0] == 0
            model(micro, encoder(micro)).backward()
        encoder.backward()
    assert model.calls == 0


def test_a_file_cut_short_masks_no_neighbour(tmp_path):
    """Each medium has two tensors, so that a failed read must not be taken for the next medium's."""
    store = kd.TrajectoryStore(tmp_path / "store")
    with store.writer("w") as writer:
        for i in range(3):
            media = kd.Media({"a": torch.full((2, 6), float(i)), "z": torch.full((40, 6), i, dtype=torch.uint8)}, 1)
            ids = torch.tensor([1, IMAGE, 2, 3])
            writer.put_group(
                [kd.Trajectory(f"t{i}", f"t{i}", 0, {"input_ids": ids}, media=[kd.MediaRef(media, [(1, 1)])])]
            )
    store.seal()
    file = min((tmp_path / "store").rglob("*.safetensors"))
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-300])
    with loader_of(store, 3, on_corrupt="mask") as loader:
        (micro,) = next(loader)
    assert micro.masked == ("t0",) and len(micro.media.new) == 3 and len(micro.media.pieces) == 2


def test_a_sampled_placeholder_is_treated_alike_beside_images_and_later_without():
    groups = {"a": [["x"], []], "b": [[], []]}
    with loader_of(stored(groups, stray=1), 2) as loader:
        for micro in next(loader):
            assert int((micro.model_inputs()["input_ids"] == IMAGE).sum()) == micro.media.n_tokens
            micro.media.new  # noqa: B018  # looked at
    store = stored(groups, stray=1)
    sampler = kd.QuotaSampler(kd.TrajectoryStream(store), 2, 1, None)
    with kd.TrajectoryLoader(sampler, 200, device="cpu") as loader:
        kinds = []
        for mini in (next(loader), next(loader)):
            for micro in mini:
                kinds.append(bool(len(micro.media)))
                assert int((micro.model_inputs()["input_ids"] == IMAGE).sum()) == micro.media.n_tokens
                micro.media.new  # noqa: B018  # looked at
    assert kinds == [True, False]


@pytest.mark.parametrize("cap", [200, 25])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_bytes_are_counted_as_carried_as_distinct_and_as_read(prefetch, cap):
    """An image that three trajectories show, one of them twice; the next mini-batch shows it again."""
    groups = {"a": [["x", "y"], ["x"], ["x", "x"]], "b": [["x"], []]}
    x, y = (image(name).tensors["patches"].nbytes for name in "xy")
    with loader_of(stored(groups), 1, cap, prefetch=prefetch) as run:
        for mini in run:
            tokens = sum(info.n_tokens for micro in mini for info in micro.infos)
            own = tokens * (8 + 1 + 4)  # input_ids, loss_mask, weight; rewards are in the table
            found = [mini.stats[f"bytes_{kind}"] - own for kind in ("logical", "unique", "read")]
            assert found == ([3 * x + y, x + y, x + y] if mini.index == 0 else [x, x, 0])
            assert min(mini.stats[name] for name in ("read_s", "verify_s", "copy_s")) >= 0
            assert mini.stats["read_s"] > 0 and mini.stats["verify_s"] > 0


def test_a_micro_batch_hands_out_its_own_new_media_only():
    """Whoever moves media to a device moves those of one micro-batch at a time."""
    groups = {"a": [["i0", "i1"], ["i2"], ["i1", "i3"], ["i0"]]}
    with loader_of(stored(groups), 1, 18) as run:
        micros = list(next(run))
    assert len(micros) > 2
    seen = set()
    for micro in micros:
        new = [medium.digest for medium in micro.media.new]
        assert sorted(new) == sorted(set(micro.media.digests) - seen)
        seen |= set(new)
    assert seen == {image(f"i{i}").digest for i in range(4)}
