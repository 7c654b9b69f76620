"""Trajectories of what real processors return, against the positions and checks of the models themselves."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from models import END, IMAGE, MROPE, PATCH, ROW_TOKENS, SIDE, START, build, config, images, naive
from torch import Tensor
from torch.nn.functional import cross_entropy

import knit_data as kd
from knit_data.integrations.huggingface import attach, image_features, models, trajectory

transformers = pytest.importorskip("transformers")

SIZES = ((16, 24), (24, 24), (30, 17))  # height and width in pixels
RESPONSE = [40, IMAGE, 41, START, IMAGE, 42]  # a policy can sample placeholders


def processor(name: str, **settings: Any) -> Any:
    """An image processor that needs no torchvision: 5 has those under a name of their own."""
    kind = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
    return kind(**settings)


def pictures(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in SIZES[:count]]


def process(family: str, count: int, padding: int = 0) -> dict[str, Any]:
    """What a processor returns for ``count`` images in one prompt: real pixels, and the text that belongs to them."""
    if family in MROPE:
        made = processor(
            "Qwen2VLImageProcessor",
            patch_size=PATCH,
            merge_size=2,
            temporal_patch_size=2,
            min_pixels=64,
            max_pixels=1024,
        )
        out = dict(made(images=pictures(count), return_tensors="pt"))
        fills = (out["image_grid_thw"].prod(-1) // 4).tolist()
    elif family == "llava":
        size = {"height": SIDE, "width": SIDE}
        made = processor("CLIPImageProcessor", size={"shortest_edge": SIDE}, crop_size=size)
        out = dict(made(images=pictures(count), return_tensors="pt"))
        fills = [ROW_TOKENS[family]] * count
    else:
        size = {"height": SIDE, "width": SIDE}
        made = processor("GotOcr2ImageProcessor", size=size, crop_to_patches=True, max_patches=4)
        out = dict(made(images=pictures(count), return_tensors="pt"))
        fills = [ROW_TOKENS[family] * int(tiles) for tiles in out["num_patches"]]
    ids = [10, 11, 12]
    for i, tokens in enumerate(fills):
        ids += [START, *[IMAGE] * tokens, END, 20 + i]
    out["input_ids"] = torch.tensor([[0] * padding + ids])
    out["attention_mask"] = (torch.arange(padding + len(ids)) >= padding).long()[None]
    return out


def make(family: str, processed: dict[str, Any], response: Sequence[int] = RESPONSE, **changes: Any) -> kd.Trajectory:
    return trajectory("g/0", "g", 3, processed, response, **{"model": config(family), **changes})


@pytest.mark.parametrize("family", ["qwen2", "qwen2_5", "qwen3", "llava", "internvl"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_trajectory_says_what_the_model_makes_of_the_processors_output(family, count):
    processed = process(family, count)
    t = make(family, processed, response=[40, 41, 42], attributes={"source": "vqa"}, values={"reward": 1.0})
    assert (t.id, t.group, t.policy_version, t.values) == ("g/0", "g", 3, {"reward": 1.0})
    n = processed["input_ids"].shape[1]
    assert t.tokens["input_ids"].tolist() == [*processed["input_ids"][0].tolist(), 40, 41, 42]
    assert t.tokens["loss_mask"].tolist() == [0.0] * n + [1.0] * 3
    for name in {"pixel_values", "image_grid_thw"} & processed.keys():
        assert torch.equal(torch.cat([ref.media.tensors[name] for ref in t.media]), processed[name])
    assert len(t.media) == count and len({ref.media.digest for ref in t.media}) == count
    for ref in t.media:
        ((start, length),) = ref.spans
        assert t.tokens["input_ids"][start - 1 : start + length + 1].tolist() == [START, *[IMAGE] * length, END]
    patches = processed["pixel_values"].shape[0] * (1 if family in MROPE else (SIDE // PATCH) ** 2)
    assert sum(ref.media.cost for ref in t.media) == patches
    model = build(family)
    with torch.no_grad():
        alone = naive(model, t)  # the model counts placeholders against features, and finds positions by itself
        if family in MROPE:
            position_ids = t.tokens["position_ids"].T[:, None]
            assert position_ids.dtype == torch.int64
            # With these positions and those of its own: the same arithmetic, so equal bit by bit.
            given = {name: processed[name] for name in ("pixel_values", "image_grid_thw")}
            ids = t.tokens["input_ids"][None]
            mask = torch.ones_like(ids)
            again = model(input_ids=ids, attention_mask=mask, position_ids=position_ids, use_cache=False, **given)
            assert torch.equal(again.logits[0], alone)
            plain = torch.arange(ids.shape[1]).expand(3, 1, -1)
            other = model(input_ids=ids, attention_mask=mask, position_ids=plain, use_cache=False, **given)
            assert not torch.equal(other.logits[0], alone)
    with kd.TrajectoryStore("memory://").writer("w") as writer:
        assert writer.put(t).n_tokens == n + 3


def test_the_docstrings_example():
    grid = torch.tensor([[1, 2, 4]])
    processed = {"input_ids": [[1, START, IMAGE, IMAGE, 2]], "pixel_values": torch.zeros(8, 96), "image_grid_thw": grid}
    t = make("qwen2_5", processed, response=[7, 8])
    assert [ref.spans for ref in t.media] == [[(2, 2)]] and t.media[0].media.cost == 8
    assert t.tokens["loss_mask"].tolist() == [0, 0, 0, 0, 0, 1, 1]
    rows = [(0, 0, 0), (1, 1, 1), (2, 2, 2), (2, 2, 3), (4, 4, 4), (5, 5, 5), (6, 6, 6)]
    assert t.tokens["position_ids"].tolist() == [list(row) for row in rows]


@pytest.mark.parametrize("family", ["qwen3", "llava"])
def test_sampled_placeholders_are_text(family):
    processed = process(family, 2)
    sampled, plain = make(family, processed), make(family, processed, response=[40] * len(RESPONSE))
    assert [ref.spans for ref in sampled.media] == [ref.spans for ref in plain.media]
    if family in MROPE:
        assert torch.equal(sampled.tokens["position_ids"], plain.tokens["position_ids"])


@pytest.mark.parametrize("family", ["qwen2", "llava"])
def test_left_padding_is_cut(family):
    a, b = make(family, process(family, 1)), make(family, process(family, 1, padding=3))
    assert all(torch.equal(a.tokens[name], b.tokens[name]) for name in a.tokens)
    assert [ref.spans for ref in a.media] == [ref.spans for ref in b.media]


def test_a_whole_processor_with_its_tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<pad>", "<unk>", "what", "is", "this", "<image>", "?"]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", additional_special_tokens=["<image>"]
    )
    crop = {"height": SIDE, "width": SIDE}
    whole = transformers.LlavaProcessor(
        image_processor=processor("CLIPImageProcessor", size={"shortest_edge": SIDE}, crop_size=crop),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    processed = whole(text="what is <image> this ?", images=pictures(1), return_tensors="pt")
    t = make("llava", processed)
    assert [ref.spans for ref in t.media] == [[(2, 16)]]
    assert t.tokens["input_ids"].tolist() == [2, 3, *[IMAGE] * 16, 4, 6, *RESPONSE]


def test_model_and_config_give_the_same():
    processed = process("qwen2_5", 2)
    a, b = make("qwen2_5", processed), make("qwen2_5", processed, model=build("qwen2_5"))
    assert all(torch.equal(a.tokens[name], b.tokens[name]) for name in a.tokens)


def test_columns_of_the_response_or_of_everything():
    processed = {"input_ids": [10, 11]}
    t = make(
        "llava",
        processed,
        response=[12, 13, 14],
        loss_mask=torch.tensor([True, False, True]),
        tokens={"logprobs": torch.tensor([-1.0, -2.0, -3.0]), "entropy": torch.arange(5.0), "top": torch.ones(3, 2)},
    )
    assert t.tokens["loss_mask"].tolist() == [0, 0, 1, 0, 1] and t.tokens["loss_mask"].dtype == torch.float32
    assert t.tokens["logprobs"].tolist() == [0, 0, -1, -2, -3]
    assert t.tokens["entropy"].tolist() == [0, 1, 2, 3, 4]
    assert t.tokens["top"].tolist() == [[0, 0], [0, 0], [1, 1], [1, 1], [1, 1]]
    for tokens, text in (
        ({"logprobs": torch.zeros(4)}, r"'logprobs' has shape \[4\]; it needs 3 entries.* or 5"),
        ({"loss_mask": torch.zeros(3)}, r"'loss_mask' is made here"),
    ):
        with pytest.raises(kd.InvalidTrajectory, match=text):
            make("llava", processed, response=[12, 13, 14], tokens=tokens)
    with pytest.raises(kd.InvalidTrajectory, match=r"loss_mask has shape \[5\]; it needs 3 entries"):
        make("llava", processed, response=[12, 13, 14], loss_mask=torch.ones(5))


def test_lists_and_arrays_are_columns_too():
    frozen = np.arange(5.0)
    frozen.flags.writeable = False
    given = {"logprobs": [-0.5, -1.0], "entropy": frozen, "kind": (3, 4), "parts": [torch.tensor(0.5)] * 2}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as trainers do; 1 / 3 would be another number
    try:
        t = make("llava", {"input_ids": [10, 11, 12]}, response=(13, 14), tokens=given, loss_mask=[1 / 3, 0])
    finally:
        torch.set_default_dtype(before)
    wanted = {
        "logprobs": torch.tensor([0, 0, 0, -0.5, -1.0]),
        "entropy": torch.arange(5.0, dtype=torch.float64),
        "kind": torch.tensor([0, 0, 0, 3, 4]),
        "parts": torch.tensor([0, 0, 0, 0.5, 0.5]),
        "loss_mask": torch.tensor([0, 0, 0, 1 / 3, 0]),
    }
    for name, column in wanted.items():
        assert t.tokens[name].dtype == column.dtype and torch.equal(t.tokens[name], column), name


@pytest.mark.parametrize("bad", [None, "ab", {}, [0.0, None], [[1.0], [1.0, 2.0]], ["a", "b"], (x for x in (1, 2))])
def test_what_is_no_tensor_is_refused_by_name(bad):
    for changes, text in (
        ({"tokens": {"logprobs": bad}}, "column 'logprobs'"),
        ({"response": bad}, "response_ids"),
        ({"loss_mask": bad}, "loss_mask"),
        ({"processed": {"input_ids": [10], "pixel_values": bad}}, "'pixel_values'"),
    ):
        if bad is None and text in ("loss_mask", "'pixel_values'"):  # there it is the default
            continue
        with pytest.raises(kd.InvalidTrajectory, match=rf"{text} must be a tensor, an array or a list .*found \w+"):
            make("llava", **{"processed": {"input_ids": [10, 11]}, "response": [12, 13], **changes})


@pytest.mark.parametrize("name", ["processed", "tokens"])
def test_what_maps_no_names_is_refused(name):
    with pytest.raises(kd.InvalidTrajectory, match=f"{name} must map names to tensors, found list"):
        make("llava", **{"processed": {"input_ids": [10, 11]}, name: [1, 2]})


def test_media_that_cannot_be_placed_are_refused():
    processed = {"input_ids": [10, *[IMAGE] * 2, 11]}
    medium = kd.Media({"pixels": torch.zeros(1)}, 2)
    for media, text in ((medium, r"found Media; .*one \[medium\]"), ([{}], "media 0 must be a kd.Media, found dict")):
        with pytest.raises(kd.InvalidTrajectory, match=text):
            make("llava", processed, media=media)
    assert make("llava", processed, media=(m for m in [medium])).media[0].spans == [(1, 2)]


def test_few_models_of_configs_are_kept(monkeypatch):
    monkeypatch.setattr(models, "_SKELETONS", {})
    monkeypatch.setattr(models, "_MOST_SKELETONS", 2)
    settings = [config("llava") for _ in range(3)]
    made = [models.skeleton(one) for one in settings]
    assert list(models._SKELETONS) == [id(one) for one in settings[1:]]
    assert models.skeleton(settings[2]) is made[2] and models.skeleton(settings[0]) is not made[0]


def test_ready_media_replace_the_pixels():
    processed = process("qwen3", 2)
    plain = make("qwen3", processed)
    own = [
        kd.Media({"pixels": torch.full((2,), i)}, ref.media.tokens, patches=ref.media.cost)
        for i, ref in enumerate(plain.media)
    ]
    t = make("qwen3", processed, media=own)
    assert [ref.media for ref in t.media] == own
    assert [ref.spans for ref in t.media] == [ref.spans for ref in plain.media]
    assert torch.equal(t.tokens["position_ids"], plain.tokens["position_ids"])
    del processed["image_grid_thw"], processed["pixel_values"]
    with_grids = make("qwen3", processed, media=[ref.media for ref in plain.media])
    assert torch.equal(with_grids.tokens["position_ids"], plain.tokens["position_ids"])
    with pytest.raises(kd.InvalidTrajectory, match=r"image_grid_thw counts \[\] tokens, the media fill \[6, 9\]"):
        make("qwen3", processed, media=own)


# -- what cannot be placed --------------------------------------------------------------------------------------------


def changed(processed: dict[str, Any], ids: Tensor) -> dict[str, Any]:
    return {**processed, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("family", ["qwen2_5", "llava", "internvl"])
@pytest.mark.parametrize("more", [1, -1])
def test_placeholders_that_are_too_many_or_too_few(family, more):
    processed = process(family, 1)
    ids = processed["input_ids"][0]
    at = int((ids == IMAGE).nonzero()[0])
    ids = (
        torch.cat([ids[:at], ids.new_full((more,), IMAGE), ids[at:]])
        if more > 0
        else torch.cat([ids[:at], ids[at + 1 :]])
    )
    fill = int((processed["input_ids"] == IMAGE).sum())
    with pytest.raises(kd.InvalidTrajectory, match=rf"{fill + more} placeholders {IMAGE} .*fill {fill}\b"):
        make(family, changed(processed, ids))


def test_images_in_another_order_than_their_placeholders():
    processed = process("qwen2", 2)
    one, two = processed["image_grid_thw"].prod(-1).tolist()
    processed["pixel_values"] = torch.cat(processed["pixel_values"].split([one, two])[::-1])
    processed["image_grid_thw"] = processed["image_grid_thw"].flip(0)
    with pytest.raises(kd.InvalidTrajectory, match=r"2 media fill \[9, 6\], .*runs of \[6, 9\]"):
        make("qwen2", processed)


def test_an_image_without_its_start_token():
    """One version of transformers would give it the positions of text, and say nothing."""
    processed = process("qwen2", 1)
    ids = processed["input_ids"][0]
    with pytest.raises(kd.InvalidTrajectory, match=rf"after vision_start_token_id {START}, media 0 has none"):
        make("qwen2", changed(processed, torch.where(ids == START, 9, ids)))
    with pytest.raises(kd.InvalidTrajectory, match="media 0 has none"):
        make("qwen2", changed(processed, ids[int((ids == IMAGE).nonzero()[0]) :]))


def test_placeholders_without_images():
    ids = process("llava", 1)["input_ids"]
    with pytest.raises(kd.InvalidTrajectory, match=r"16 placeholders 5 .*the 0 media fill 0"):
        make("llava", {"input_ids": ids})


def test_grids_that_do_not_count_the_patches():
    processed = process("qwen2", 1)
    processed["pixel_values"] = processed["pixel_values"][1:]
    with pytest.raises(kd.InvalidTrajectory, match=r"counts 24 patches in 1 images, pixel_values has 23"):
        make("qwen2", processed)


@pytest.mark.parametrize(
    ("processed", "text"),
    [
        ({"input_ids": [1.0, 2.0]}, r"integers.*found torch\.float32 \[2\]"),
        ({"input_ids": torch.zeros(2, 3)}, r"of one prompt.*found torch\.float32 \[2, 3\]"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, r"n >= 1"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, r"found torch\.int64 \[2\] and \[1\]"),
        ({}, r"needs input_ids"),
        ({"input_ids": [1, 2], "pixel_values_videos": torch.zeros(1)}, r"\['pixel_values_videos'\].*only images"),
        ({"input_ids": [1, 2], "pixel_values": torch.zeros(1, 2, 3, 16, 16)}, r"\[1, 2, 3, 16, 16\].*pass media="),
    ],
)
def test_outputs_that_are_not_of_one_prompt_with_images(processed, text):
    with pytest.raises(kd.InvalidTrajectory, match=text):
        make("llava", processed)


@pytest.mark.parametrize("response", [[], [[1, 2]], [1.5]])
def test_responses_that_are_not_ids(response):
    with pytest.raises(kd.InvalidTrajectory, match=r"response_ids must be \[r\], r >= 1"):
        make("llava", {"input_ids": [1, 2]}, response=response)


def test_without_transformers_a_config_cannot_be_read(monkeypatch):
    settings = config("llava")  # one that no model was built of yet
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(kd.InvalidArgument, match=r"pip install 'knit_data\[hf\]'"):
        trajectory("g/0", "g", 0, {"input_ids": [1, 2]}, [3], model=settings)


def test_adjacent_images_of_one_row_stay_placed():
    """A run of placeholders is one medium: two images without a token between them are stored together."""
    medium = images("llava", 2)
    ids = torch.tensor([10, *[IMAGE] * 32, 11])
    t = make("llava", {"input_ids": ids, "pixel_values": torch.cat([m.tensors["pixel_values"] for m in medium])})
    assert [(ref.media.tokens, ref.spans) for ref in t.media] == [(32, [(1, 32)])]


def trained(family: str, members: Sequence[kd.Trajectory]) -> tuple[dict[str, Tensor], float, float]:
    """Gradients of one step, the loss, and the bytes that were read."""
    store = kd.TrajectoryStore("memory://")
    with store.writer("w") as writer:
        writer.put_group(members)
    store.seal()
    model = build(family)
    encoder = kd.SharedEncoder(image_features(model))
    attach(model, encoder)
    sampler = kd.QuotaSampler(kd.TrajectoryStream(store), 1, 1, None)
    with kd.TrajectoryLoader(sampler, 4096, device="cpu") as loader:
        mini = next(loader)
        total = 0.0
        for micro in mini:
            logits = model(**micro.model_inputs(), **encoder.model_inputs(micro)).logits
            loss = cross_entropy(logits.flatten(0, 1), micro["labels"], ignore_index=-100)
            loss.backward()
            total += float(loss.detach())
        encoder.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, total, mini.stats["bytes_read"]


@pytest.mark.parametrize("family", ["qwen2_5", "llava", "internvl"])
def test_uint8_pixels_train_like_the_processors_floats(family):
    """Bit by bit the same step, for an eighth of the bytes (a quarter where still images are not repeated in time)."""
    processed = process(family, 1)
    float_tokens = make(family, processed)
    if family in MROPE:
        shape = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}
        made = processor("Qwen2VLImageProcessor", **shape, min_pixels=64, max_pixels=1024)
    elif family == "llava":
        crop = {"height": SIDE, "width": SIDE}
        made = processor("CLIPImageProcessor", size={"shortest_edge": SIDE}, crop_size=crop)
    else:
        size = {"height": SIDE, "width": SIDE}
        made = processor("GotOcr2ImageProcessor", size=size, crop_to_patches=True, max_patches=4)
    pixels = kd.Media.from_pixels(pictures(1)[0], float_tokens.media[0].media.tokens, made)
    found = [
        trained(family, [replace(make(family, processed, media=media), id=f"g/{i}") for i in range(3)])
        for media in (None, [pixels])
    ]
    (floats, loss, many), (bytes_, same, few) = found
    assert loss == same and floats.keys() == bytes_.keys()
    assert all(torch.equal(floats[name], bytes_[name]) for name in floats)
    heavy = sum(t.nbytes for t in float_tokens.media[0].media.tensors.values())
    light = sum(t.nbytes for t in pixels.tensors.values())
    assert many - few == heavy - light
    assert pixels.tensors["pixels"].nbytes * (8 if family in MROPE else 4) == processed["pixel_values"].nbytes
