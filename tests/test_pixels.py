"""Pixels that travel as uint8 and are finished later: what the real image processors give, bit by bit."""

from __future__ import annotations

import doctest
import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import trajectory
from torch import Tensor

import knit_data as kd
from knit_data import pixels as pixels_module
from knit_data.pixels import Recipe, finish

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
IMAGES: dict[str, Any] = {**CLIP, "rescale_factor": 1 / 255}
PATCHES: dict[str, Any] = {**IMAGES, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}


def image_processor(name: str, **parameters: Any) -> Any:
    """The class that needs no torchvision: transformers 5 calls it …Pil, 4 has it under the plain name."""
    pil = int(transformers.__version__.split(".")[0]) >= 5
    return getattr(transformers, f"{name}Pil" if pil else name)(**parameters)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)


def own_output(processor: Any, image: np.ndarray) -> dict[str, Tensor]:
    found = processor(images=[image], return_tensors="pt", input_data_format="channels_last")
    # Floats of the same value, where transformers 4 leaves bytes that are neither rescaled nor normalised as they are.
    wanted = {"pixel_values": found["pixel_values"].float()}
    return {**wanted, **{name: found[name] for name in ("image_grid_thw",) if name in found}}


def size_of(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


# -- the real processors -----------------------------------------------------------------------------------------------

QWEN = {
    "Qwen2-VL and Qwen2.5-VL": {"patch_size": 14, **CLIP},
    "Qwen3-VL": {"patch_size": 16, **HALF},
    "small": {"patch_size": 14, "min_pixels": 28 * 28, "max_pixels": 4 * 28 * 28},
    "one frame, no merge": {"patch_size": 16, "temporal_patch_size": 1, "merge_size": 1},
    "neither rescaled nor normalised": {"do_rescale": False, "do_normalize": False},
    "rescaled alone": {"do_normalize": False, "rescale_factor": 1 / 127.5},
}
SHAPES = [(40, 90), (56, 56), (300, 170), (3, 50), (1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("family", QWEN)
def test_patches_are_those_of_the_processor(family: str, shape: tuple[int, int]) -> None:
    processor = image_processor("Qwen2VLImageProcessor", **QWEN[family])
    image = noise(*shape, 3)
    wanted = own_output(processor, image)
    _, h, w = wanted["image_grid_thw"][0].tolist()
    media = kd.Media.from_pixels(torch.from_numpy(image), h * w // processor.merge_size**2, processor)
    assert media.tensors["pixels"].shape == (h * processor.patch_size, w * processor.patch_size, 3)
    assert (media.kind, media.patches, media.tensors["pixels"].dtype) == ("image", h * w, torch.uint8)
    found = finish(media.tensors, "cpu")
    assert found.keys() == wanted.keys()
    for name in found:
        assert found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name])


WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "LLaVA": ("CLIPImageProcessor", {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}),
    "InternVL": ("GotOcr2ImageProcessor", {"size": {"height": 48, "width": 48}, "crop_to_patches": True}),
    "one tile": ("GotOcr2ImageProcessor", {"size": {"height": 48, "width": 32}}),
    "SigLIP": ("SiglipImageProcessor", {"size": {"height": 32, "width": 32}}),
    "Gemma 3": ("Gemma3ImageProcessor", {"size": {"height": 32, "width": 32}}),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("family", WHOLE)
def test_images_and_tiles_are_those_of_the_processor(family: str, shape: tuple[int, int]) -> None:
    name, parameters = WHOLE[family]
    processor, image = image_processor(name, **parameters), noise(*shape, 3)
    wanted = own_output(processor, image)["pixel_values"]
    media = kd.Media.from_pixels(image, 7, processor)
    assert media.tensors["pixels"].shape == (len(wanted), *wanted.shape[2:], 3)
    assert (media.tokens, media.patches) == (7, None)
    found = finish(media.tensors, "cpu")
    assert found.keys() == {"pixel_values"}
    assert found["pixel_values"].is_contiguous() and torch.equal(found["pixel_values"], wanted)


def test_internvl_cuts_tiles_and_adds_a_thumbnail() -> None:
    name, parameters = WHOLE["InternVL"]
    processor = SimpleNamespace(image_processor=image_processor(name, **parameters), patch_size=16)
    media = kd.Media.from_pixels(noise(40, 90, 3), 1, processor)
    assert media.tensors["pixels"].shape == (3, 48, 48, 3) and media.patches == 3 * 9


def test_a_whole_processor_lends_its_image_processor_and_its_patch_size() -> None:
    from tokenizers import Tokenizer, models

    name, parameters = WHOLE["LLaVA"]
    worker = image_processor(name, **parameters)
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    processor = transformers.LlavaProcessor(worker, words, patch_size=14, vision_feature_select_strategy="default")
    media, image = kd.Media.from_pixels(noise(40, 90, 3), 16, processor), noise(40, 90, 3)
    assert media.patches == media.cost == 16
    assert torch.equal(finish(media.tensors, "cpu")["pixel_values"], own_output(worker, image)["pixel_values"])


@pytest.mark.parametrize("parameters", [CLIP, HALF], ids=["CLIP", "half"])
def test_processors_on_torchvision_are_met_within_a_millionth(parameters: dict[str, Any]) -> None:
    # Not exact: they compute (x - mean * 255) / (std * 255), written out here because torchvision is no dependency.
    image = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    mean, std = (torch.tensor(parameters[name]) * (1.0 / (1 / 255)) for name in ("image_mean", "image_std"))
    fused = torch.from_numpy(image).float().sub(mean).div(std).permute(2, 0, 1)[None]
    media = kd.Media.from_pixels(image, 1, {**parameters, "rescale_factor": 1 / 255})
    found = finish(media.tensors, "cpu")["pixel_values"]
    assert (found - fused).abs().max() < 1e-6


# -- a mapping, against NumPy ------------------------------------------------------------------------------------------


def reference(image: np.ndarray, recipe: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """One row per patch, written index by index: token by token, in a token the merge square, in a row C, T, y, x."""
    p, m, frames = (recipe[name] for name in ("patch_size", "merge_size", "temporal_patch_size"))
    mean, std = (np.array(recipe[name], np.float32) for name in ("image_mean", "image_std"))
    floats = ((image.astype(np.float64) * recipe["rescale_factor"]).astype(np.float32) - mean) / std
    h, w = image.shape[0] // p, image.shape[1] // p
    rows = []
    for token_y in range(0, h, m):
        for token_x in range(0, w, m):
            for y in range(token_y, token_y + m):
                for x in range(token_x, token_x + m):
                    patch = floats[y * p : (y + 1) * p, x * p : (x + 1) * p]
                    rows.append(np.concatenate([patch[..., c].ravel() for c in range(3) for _ in range(frames)]))
    return np.stack(rows), np.array([[1, h, w]])


_numbers = st.floats(0.05, 2.0)


@settings(max_examples=60)
@given(
    tokens=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    patch=st.integers(1, 5),
    merge=st.integers(1, 3),
    frames=st.integers(1, 3),
    mean=st.tuples(_numbers, _numbers, _numbers),
    std=st.tuples(_numbers, _numbers, _numbers),
    rescale=st.sampled_from([1 / 255, 1 / 127.5, 0.00392156862745098, 0.0039, 1.0]) | _numbers,
    seed=st.integers(0, 99),
)
def test_a_mapping_gives_what_numpy_gives(
    tokens: tuple[int, int], patch: int, merge: int, frames: int, mean: Any, std: Any, rescale: float, seed: int
) -> None:
    shape = (tokens[0] * merge * patch, tokens[1] * merge * patch, 3)
    image = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    recipe = {"image_mean": mean, "image_std": std, "rescale_factor": rescale}
    cut = {"patch_size": patch, "merge_size": merge, "temporal_patch_size": frames}
    media = kd.Media.from_pixels(image, tokens[0] * tokens[1], {**recipe, **cut})
    assert media.cost == tokens[0] * tokens[1] * merge * merge
    found, (values, grid) = finish(media.tensors, "cpu"), reference(image, {**recipe, **cut})
    assert torch.equal(found["pixel_values"], torch.from_numpy(values))
    assert torch.equal(found["image_grid_thw"], torch.from_numpy(grid)) and found["image_grid_thw"].dtype == torch.int64

    whole = kd.Media.from_pixels(image, 5, recipe)
    one = reference(image, {**recipe, "patch_size": 1, "merge_size": 1, "temporal_patch_size": 1})[0]
    wanted = torch.from_numpy(one).reshape(*shape).permute(2, 0, 1)[None]
    assert torch.equal(finish(whole.tensors, "cpu")["pixel_values"], wanted)


def test_one_number_is_for_all_channels_and_a_patch_size_prices_an_image() -> None:
    image = noise(28, 45, 3)
    media = [
        kd.Media.from_pixels(image, 6, {"image_mean": mean, "image_std": std, "rescale_factor": 1, "patch_size": 14})
        for mean, std in [(0.5, 2), ([0.5] * 3, np.float32([2, 2, 2])), (torch.tensor(0.5), (2, 2.0, 2))]
    ]
    assert len({m.digest for m in media}) == 1 and media[0].patches == 2 * 3


# -- bytes and digests -------------------------------------------------------------------------------------------------


def test_patches_take_an_eighth_and_images_a_quarter_of_the_bytes() -> None:
    qwen = image_processor("Qwen2VLImageProcessor")
    media = kd.Media.from_pixels(noise(280, 280, 3), 100, qwen)
    floats = own_output(qwen, noise(280, 280, 3))["pixel_values"].numel() * 4
    assert media.tensors["pixels"].numel() * 8 == floats
    assert floats // 8 < size_of(dict(media.tensors)) <= floats // 8 + 512

    clip = image_processor("CLIPImageProcessor")
    media = kd.Media.from_pixels(noise(40, 90, 3), 100, clip)
    floats = own_output(clip, noise(40, 90, 3))["pixel_values"].numel() * 4
    assert floats // 4 < size_of(dict(media.tensors)) <= floats // 4 + 512


def test_the_recipe_is_canonical_json() -> None:
    packed = kd.Media.from_pixels(noise(28, 28, 3), 1, {**PATCHES, **HALF}).tensors["recipe"]
    # Written out: other bytes would be another digest for an image that is stored already.
    assert bytes(packed.tolist()) == (
        b'{"layout":"patches","mean":[0.5,0.5,0.5],"merge":2,"patch":14,"rescale":0.00392156862745098,'
        b'"std":[0.5,0.5,0.5],"temporal":2}'
    )
    recipe = Recipe("patches", (0.5,) * 3, (0.5,) * 3, 1 / 255, 14, 2, 2)
    assert Recipe.unpacked(packed) == recipe and torch.equal(recipe.packed(), packed)


def test_a_digest_covers_pixels_and_recipe() -> None:
    image, other = noise(56, 56, 3), noise(56, 56, 3)
    other[0, 0, 0] ^= 1
    recipes = [
        PATCHES,
        {**PATCHES, **HALF},
        {**PATCHES, "rescale_factor": 1 / 256},
        {**PATCHES, "temporal_patch_size": 1},
    ]
    media = [kd.Media.from_pixels(image, 4, recipe) for recipe in recipes]
    media += [kd.Media.from_pixels(other, 4, PATCHES), kd.Media.from_pixels(image, 4, IMAGES)]
    assert len({m.digest for m in media}) == len(media)
    assert kd.Media.from_pixels(image.copy(), 4, dict(reversed(PATCHES.items()))).digest == media[0].digest


def test_an_image_goes_through_a_store_and_is_finished_as_before() -> None:
    media = kd.Media.from_pixels(noise(28, 56, 3), 2, PATCHES)
    store = kd.TrajectoryStore("memory://")
    back = store.read(store.writer("w").put(trajectory("t", media=[kd.MediaRef(media, [(1, 2)])]))).media[0].media
    assert (back.digest, back.patches) == (media.digest, 8)
    wanted = finish(media.tensors, "cpu")
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in finish(back.tensors, "cpu").items())


@pytest.mark.parametrize("make", [lambda x: x, torch.from_numpy], ids=["array", "tensor"])
def test_the_caller_may_use_its_buffer_again(make: Any) -> None:
    buffer = noise(28, 28, 3)
    given = buffer.copy()
    media = kd.Media.from_pixels(make(buffer), 1, PATCHES)
    buffer[:] = 0
    assert np.array_equal(media.tensors["pixels"].numpy(), given)


def test_views_and_read_only_arrays_are_taken() -> None:
    image = noise(28, 28, 3)
    frozen = image.copy()
    frozen.flags.writeable = False
    flipped = np.ascontiguousarray(image[:, ::-1, ::-1])[:, ::-1, ::-1]
    strided = torch.from_numpy(image).permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for same in (frozen, flipped, strided):
        media = kd.Media.from_pixels(same, 1, PATCHES)
        assert media.digest == kd.Media.from_pixels(image, 1, PATCHES).digest


# -- finish ------------------------------------------------------------------------------------------------------------


def test_other_tensors_are_moved_as_they_are() -> None:
    tensors = {"pixels": torch.zeros(2, 3), "grid": torch.tensor([1, 2])}
    found = finish(tensors, "cpu")
    assert found.keys() == tensors.keys() and all(found[name] is tensors[name] for name in found)
    assert {tensor.device.type for tensor in finish(tensors, "meta").values()} == {"meta"}
    more = {**kd.Media.from_pixels(noise(28, 28, 3), 1, PATCHES).tensors, "depth": torch.zeros(2)}
    assert finish(more, "cpu") == more


def test_results_are_on_the_device_and_the_recipe_is_read_on_the_host() -> None:
    media = kd.Media.from_pixels(noise(28, 56, 3), 2, PATCHES)
    # "meta" can be read by nobody: the shapes must come from the host, where a GPU would have to be waited for.
    found = finish(media.tensors, "meta")
    assert {name: (t.device.type, t.dtype, tuple(t.shape)) for name, t in found.items()} == {
        "pixel_values": ("meta", torch.float32, (8, 3 * 2 * 14 * 14)),
        "image_grid_thw": ("meta", torch.int64, (1, 3)),
    }
    moved = {name: tensor.to("meta") for name, tensor in media.tensors.items()}
    with pytest.raises(kd.InvalidArgument, match="read on the host, found it on meta; move pixels alone"):
        finish(moved, "meta")


def test_default_dtype_and_device_of_the_trainer_change_nothing() -> None:
    def finished() -> dict[str, Tensor]:
        return finish(kd.Media.from_pixels(noise(28, 56, 3), 2, PATCHES).tensors, "cpu")

    wanted, before = finished(), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = finished()
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    "recipe",
    [
        torch.zeros(3),
        torch.zeros(0, dtype=torch.uint8),
        torch.zeros(2, 2, dtype=torch.uint8),
        torch.tensor(list(b"5"), dtype=torch.uint8),
        torch.tensor(list(b"{}"), dtype=torch.uint8),
        torch.tensor(list(b'{"a":[1]}'), dtype=torch.uint8),
        torch.tensor([255, 254], dtype=torch.uint8),
    ],
    ids=str,
)
def test_tensors_of_these_names_that_are_something_else_are_refused(recipe: Tensor) -> None:
    with pytest.raises(kd.InvalidArgument, match=r"found a recipe of torch\.\w+ \[.*name your own otherwise"):
        finish({"pixels": torch.zeros(2, 2, 3), "recipe": recipe}, "cpu")


CUT = Recipe("patches", (0.5,) * 3, (0.5,) * 3, 1 / 255, 14, 2, 2)
TILES = Recipe("images", (0.5,) * 3, (0.5,) * 3, 1 / 255)
BAD_RECIPES: dict[str, tuple[Recipe, dict[str, Any], str]] = {
    "a layout of its own": (TILES, {"layout": "rows"}, "found 'rows' and (0, 1, 1)"),
    "no layout": (TILES, {"layout": None}, "found None and (0, 1, 1)"),
    "patches of nothing": (CUT, {"patch": 0}, "found 'patches' and (0, 2, 2)"),
    "a negative patch": (TILES, {"patch": -1}, "found 'images' and (-1, 1, 1)"),
    "no merge": (CUT, {"merge": 0}, "found 'patches' and (14, 0, 2)"),
    "no frame": (CUT, {"temporal": 0}, "found 'patches' and (14, 2, 0)"),
    "a float patch": (CUT, {"patch": 14.0}, "found 'patches' and (14.0, 2, 2)"),
    "a bool merge": (CUT, {"merge": True}, "found 'patches' and (14, True, 2)"),
    "std of 0": (TILES, {"std": (0.5, 0, 0.5)}, "> 0, found (0.5, 0.5, 0.5), (0.5, 0, 0.5) and"),
    "std is nan": (TILES, {"std": (0.5, 0.5, float("nan"))}, "finite numbers each"),
    "mean is infinite": (TILES, {"mean": (float("inf"), 0.5, 0.5)}, "finite numbers each"),
    "mean is one number": (TILES, {"mean": 0.5}, "three finite numbers each"),
    "mean is text": (TILES, {"mean": ("a", "b", "c")}, "three finite numbers each"),
    "two means": (TILES, {"mean": (0.5, 0.5)}, "three finite numbers each"),
    "rescale of 0": (TILES, {"rescale": 0.0}, "rescale_factor > 0, found"),
    "rescale is None": (TILES, {"rescale": None}, "and None."),
}


@pytest.mark.parametrize("name", BAD_RECIPES)
def test_recipes_that_cannot_be_followed_are_refused_where_they_are_made_and_read(name: str) -> None:
    recipe, changes, text = BAD_RECIPES[name]
    with pytest.raises(kd.InvalidArgument) as raised:
        replace(recipe, **changes)
    assert text in str(raised.value)
    # Written by hand, or by another version.
    packed = torch.tensor(list(json.dumps({**asdict(recipe), **changes}).encode()), dtype=torch.uint8)
    with pytest.raises(kd.InvalidArgument, match=r"found a recipe of .*does not read as one"):
        finish({"pixels": torch.zeros(1, 28, 28, 3, dtype=torch.uint8), "recipe": packed}, "cpu")


BAD_FITS: dict[str, tuple[Recipe, Any]] = {
    "float pixels": (TILES, torch.zeros(1, 4, 4, 3)),
    "one image without tiles": (TILES, noise(4, 4, 3)),
    "channels first": (TILES, noise(1, 3, 4, 4)),
    "no tiles": (TILES, noise(0, 4, 4, 3)),
    "tiles without rows": (TILES, noise(1, 0, 4, 3)),
    "tiles where one image is cut": (CUT, noise(1, 28, 28, 3)),
    "gray": (CUT, noise(28, 28, 1)),
    "flat": (CUT, noise(28)),
    "half a token": (CUT, noise(28, 42, 3)),
    "no columns": (CUT, noise(28, 0, 3)),
}


@pytest.mark.parametrize("name", BAD_FITS)
def test_pixels_that_a_recipe_is_not_for_are_refused(name: str) -> None:
    recipe, pixels = BAD_FITS[name]
    given = torch.as_tensor(pixels)
    with pytest.raises(kd.InvalidArgument) as raised:
        finish({"pixels": given, "recipe": recipe.packed()}, "meta")
    assert f"found {given.dtype} {list(given.shape)} for {recipe}" in str(raised.value)


# -- what is refused ---------------------------------------------------------------------------------------------------

BAD_PIXELS: dict[str, tuple[Any, str]] = {
    "float": (torch.rand(28, 28, 3), "torch.float32 [28, 28, 3]"),
    "float array": (np.zeros((28, 28, 3)), "float64 [28, 28, 3]"),
    "signed": (np.zeros((28, 28, 3), np.int8), "int8 [28, 28, 3]"),
    "bfloat16": (torch.zeros(28, 28, 3, dtype=torch.bfloat16), "torch.bfloat16 [28, 28, 3]"),
    "channels first": (noise(3, 28, 28), "uint8 [3, 28, 28]"),
    "gray": (noise(28, 28), "uint8 [28, 28]"),
    "one channel": (noise(28, 28, 1), "uint8 [28, 28, 1]"),
    "RGBA": (torch.from_numpy(noise(28, 28, 4)), "uint8 [28, 28, 4]"),
    "a batch": (noise(1, 28, 28, 3), "uint8 [1, 28, 28, 3]"),
    "no rows": (noise(0, 28, 3), "uint8 [0, 28, 3]"),
    "no columns": (torch.zeros(28, 0, 3, dtype=torch.uint8), "uint8 [28, 0, 3]"),
    "a list": ([[[0, 0, 0]]], "found list"),
    "None": (None, "found NoneType"),
}


@pytest.mark.parametrize("name", BAD_PIXELS)
def test_other_pixels_are_refused(name: str) -> None:
    bad, found = BAD_PIXELS[name]
    with pytest.raises(kd.InvalidTrajectory) as raised:
        kd.Media.from_pixels(bad, 1, PATCHES)
    assert "uint8 [H, W, 3]" in str(raised.value) and found in str(raised.value)
    assert "convert('RGB')" in str(raised.value)


@pytest.mark.parametrize("shape", [(28, 42), (42, 28), (27, 28), (14, 14), (1, 1)], ids=str)
def test_sizes_that_do_not_fill_tokens_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(kd.InvalidTrajectory, match=f"{shape[0]} x {shape[1]} are not multiples .* = 28; .*resized"):
        kd.Media.from_pixels(noise(*shape, 3), 1, PATCHES)


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_tokens_that_the_patches_do_not_fill_are_refused(tokens: int) -> None:
    match = f"tokens is {tokens}, an image resized to 28 x 56 fills 2, one for each 28 x 28 pixels; count"
    with pytest.raises(kd.InvalidTrajectory, match=match):
        kd.Media.from_pixels(noise(28, 56, 3), tokens, PATCHES)
    small = image_processor("Qwen2VLImageProcessor", min_pixels=28 * 28, max_pixels=2 * 28 * 28)
    with pytest.raises(kd.InvalidTrajectory, match=match):
        kd.Media.from_pixels(noise(60, 120, 3), tokens, small)


@pytest.mark.parametrize("tokens", [0, -1, True, 2.0, None])
def test_tokens_are_a_positive_int(tokens: Any) -> None:
    with pytest.raises(kd.InvalidTrajectory, match=f"int >= 1, .*found {tokens}"):
        kd.Media.from_pixels(noise(28, 28, 3), tokens, IMAGES)


BAD_MAPPINGS: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({}, "missing are ['image_mean', 'image_std', 'rescale_factor'], unknown []"),
    "no std": ({"image_mean": 0.5, "rescale_factor": 1}, "missing are ['image_std'], unknown []"),
    "half of the patch keys": ({**IMAGES, "merge_size": 2}, "missing are ['patch_size', 'temporal_patch_size']"),
    "a resize": ({**PATCHES, "size": {}, "do_resize": True}, "missing are [], unknown ['size', 'do_resize']"),
    "two means": ({**IMAGES, "image_mean": [0.5, 0.5]}, "must be one finite number, or three"),
    "mean is text": ({**IMAGES, "image_mean": "half"}, "found 'half'"),
    "mean is None": ({**IMAGES, "image_mean": None}, "must be one finite number, or three"),
    "std is nan": ({**IMAGES, "image_std": [0.5, float("nan"), 0.5]}, "found [0.5, nan, 0.5]"),
    "std is zero": (
        {**IMAGES, "image_std": [0.5, 0.0, 0.5]},
        "> 0, found (0.48145466, 0.4578275, 0.40821073), (0.5, 0.0, 0.5) and",
    ),
    "rescale is infinite": (
        {**IMAGES, "rescale_factor": float("inf")},
        "rescale_factor of the mapping must be one finite",
    ),
    "rescale is negative": ({**IMAGES, "rescale_factor": -1}, "rescale_factor > 0, found"),
    "patch is zero": ({**IMAGES, "patch_size": 0}, "['patch_size'] of the mapping must be ints >= 1, found [0]"),
    "merge is bool": ({**PATCHES, "merge_size": True}, "must be ints >= 1, found [14, True, 2]"),
    "patch is a mapping": ({**PATCHES, "patch_size": {"height": 14}}, "found [{'height': 14}, 2, 2]"),
}


@pytest.mark.parametrize("name", BAD_MAPPINGS)
def test_other_mappings_are_refused(name: str) -> None:
    mapping, text = BAD_MAPPINGS[name]
    with pytest.raises(kd.InvalidArgument) as raised:
        kd.Media.from_pixels(noise(28, 28, 3), 1, mapping)
    assert text in str(raised.value)


class Fake:
    """A processor that returns what it is told; what no real one without torchvision does, or does any more."""

    model_input_names: Any = ("pixel_values",)
    image_mean, image_std, rescale_factor = 0.5, 0.5, 1 / 255

    def __init__(self, found: Any = None, **attributes: Any) -> None:
        self.found = found
        vars(self).update(attributes)

    def __call__(self, images: Any, **options: Any) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def tiles(value: float, *shape: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.full(shape or (1, 3, 4, 4), value)}


def grid(*thw: int, rows: int = 4, width: int = 3 * 2 * 2) -> dict[str, Tensor]:
    """Patches of 2 x 2 pixels in one frame."""
    return {"pixel_values": torch.ones(rows, width), "image_grid_thw": torch.tensor([thw])}


SIZES = {"patch_size": 2, "merge_size": 2, "temporal_patch_size": 1}
BAD_PROCESSORS: dict[str, tuple[Any, str]] = {
    "None": (None, "found NoneType, whose outputs are []"),
    "a function": (len, "found builtin_function_or_method"),
    "a name": ("Qwen/Qwen2-VL", "found str"),
    "a tokenizer": (Fake(model_input_names=["input_ids"]), "whose outputs are ['input_ids']"),
    "a video processor": (
        Fake(model_input_names=["pixel_values_videos", "video_grid_thw"]),
        "found Fake, whose outputs are ['pixel_values_videos', 'video_grid_thw']. Videos and sounds take kd.Media(",
    ),
    "a processor without images": (SimpleNamespace(image_processor=None), "found NoneType"),
    "padding": (Fake(tiles(1), do_pad=True), "Fake pads (do_pad=True)"),
    "another input": (
        Fake({**tiles(1), "image_sizes": 0}),
        "['image_sizes'], which a recipe cannot rebuild. Store its own",
    ),
    "values of its own": (Fake(tiles(0.5)), "values from 0.5 to 0.5 that are not integers"),
    "values above 255": (Fake(tiles(256.0)), "values from 256.0 to 256.0"),
    "values below 0": (Fake(tiles(-1.0)), "values from -1.0 to -1.0"),
    "nan": (Fake(tiles(float("nan"))), "values from nan to nan"),
    "returns None": (Fake(None), "Fake returned NoneType; an image processor returns a mapping"),
    "returns a list": (Fake([torch.ones(1, 3, 4, 4)]), "Fake returned list; an image processor returns a mapping"),
    "no tiles": (Fake(tiles(1, 0, 3, 4, 4)), "returns pixel_values [0, 3, 4, 4]"),
    "tiles without rows": (Fake(tiles(1, 1, 3, 0, 4)), "returns pixel_values [1, 3, 0, 4]"),
    "a grid in a list": (
        Fake({**grid(1, 2, 2), "image_grid_thw": [[1, 2, 2]]}, **SIZES),
        "image_grid_thw [[1, 2, 2]] (list), which",
    ),
    "a grid in an array": (
        Fake({**grid(1, 2, 2), "image_grid_thw": np.array([[1, 2, 2]])}, **SIZES),
        "image_grid_thw [[1 2 2]] (ndarray), which",
    ),
    "a grid of floats": (
        Fake({**grid(1, 2, 2), "image_grid_thw": torch.tensor([[1.0, 2.0, 2.0]])}, **SIZES),
        "image_grid_thw [[1.0, 2.0, 2.0]]",
    ),
    "a grid below 0": (Fake(grid(1, -2, -2), **SIZES), "image_grid_thw [[1, -2, -2]]"),
    "a grid of nothing": (Fake(grid(1, 0, 0, rows=0), **SIZES), "image_grid_thw [[1, 0, 0]]"),
    "a list of tensors": (Fake({"pixel_values": [torch.ones(3, 4, 4)]}), "returns pixel_values list"),
    "nothing": (Fake({}), "returns pixel_values NoneType"),
    "gray tiles": (Fake(tiles(1, 1, 1, 4, 4)), "returns pixel_values [1, 1, 4, 4]"),
    "tiles of tiles": (Fake(tiles(1, 1, 2, 3, 4, 4)), "returns pixel_values [1, 2, 3, 4, 4]"),
    "no mean": (Fake(tiles(1), image_mean=None), "image_mean of Fake must be one finite number, or three"),
    "no patch size": (Fake(grid(1, 2, 2), merge_size=2), "'temporal_patch_size'], unknown []. Store its own"),
    "two images": (Fake({**grid(1, 2, 2), "image_grid_thw": torch.ones(2, 3)}, **SIZES), "[[1.0, 1.0, 1.0], [1.0"),
    "two moments": (Fake(grid(2, 2, 2, rows=8), **SIZES), "image_grid_thw [[2, 2, 2]]"),
    "too many rows": (Fake(grid(1, 2, 2, rows=8), **SIZES), "returns pixel_values [8, 12] and image_grid_thw [[1, 2"),
    "half a merge": (Fake(grid(1, 1, 4), **SIZES), "image_grid_thw [[1, 1, 4]]"),
    "frames that differ": (
        Fake(
            {**grid(1, 2, 2), "pixel_values": torch.arange(96.0).reshape(4, 24)}, **{**SIZES, "temporal_patch_size": 2}
        ),
        "neither [tiles, 3, H, W] nor still patches",
    ),
}


@pytest.mark.parametrize("name", BAD_PROCESSORS)
def test_other_processors_are_refused(name: str) -> None:
    processor, text = BAD_PROCESSORS[name]
    with pytest.raises(kd.InvalidArgument) as raised:
        kd.Media.from_pixels(noise(4, 4, 3), 1, processor)
    assert text in str(raised.value)


def test_what_the_fakes_break_is_all_that_is_wrong_with_them() -> None:
    assert kd.Media.from_pixels(noise(4, 4, 3), 1, Fake(tiles(1.0))).tensors["pixels"].shape == (1, 4, 4, 3)
    assert kd.Media.from_pixels(noise(4, 4, 3), 1, Fake(grid(1, 2, 2), **SIZES)).patches == 4


def test_real_processors_that_need_more_than_pixels_are_refused() -> None:
    with pytest.raises(kd.InvalidArgument, match=r"LlavaNextImageProcessor\w* pads"):
        kd.Media.from_pixels(noise(40, 90, 3), 1, image_processor("LlavaNextImageProcessor"))
    with pytest.raises(kd.InvalidArgument, match=r"also returns .*'image_sizes'"):
        kd.Media.from_pixels(noise(40, 90, 3), 1, image_processor("LlavaNextImageProcessor", do_pad=False))


def test_what_an_image_processor_refuses_is_said_in_its_words() -> None:
    with pytest.raises(kd.InvalidTrajectory, match=r"Qwen2VL\w+ refused an image of shape \[2, 402, 3\]: .*ratio"):
        kd.Media.from_pixels(noise(2, 402, 3), 1, image_processor("Qwen2VLImageProcessor"))


@pytest.mark.parametrize("error", [RuntimeError("no kernel"), KeyError("size"), ZeroDivisionError("0 / 0")], ids=repr)
def test_whatever_a_processor_raises_is_chained(error: Exception) -> None:
    with pytest.raises(kd.InvalidTrajectory) as raised:
        kd.Media.from_pixels(noise(4, 4, 3), 1, Fake(error))
    assert f"Fake refused an image of shape [4, 4, 3]: {type(error).__name__}: {error}" in str(raised.value)
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    "processor", [{**IMAGES, "patch_size": 14}, SimpleNamespace(patch_size=14)], ids=["map", "own"]
)
def test_an_image_smaller_than_a_patch_is_refused(processor: Any) -> None:
    if isinstance(processor, SimpleNamespace):
        processor.image_processor = Fake(tiles(1.0, 1, 3, 20, 13))
    with pytest.raises(kd.InvalidTrajectory, match="image of 20 x 13 has no patch of 14 x 14; resize it"):
        kd.Media.from_pixels(noise(20, 13, 3), 1, processor)


def test_the_worked_examples_hold() -> None:
    assert doctest.testmod(pixels_module).failed == 0
