"""Images as uint8: stored and moved as they are after the resize, and finished on the device.

An image processor resizes, rescales, normalises, repeats a still image in time and cuts it into patches. Only the
resize needs the processor; the rest is arithmetic that makes the bytes eight times as many (float32, two frames). So
the resized bytes travel, with a recipe of what is left to do, and ``finish`` does that where the tower runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from knit_data.errors import InvalidArgument, InvalidTrajectory

NAMES = frozenset({"pixels", "recipe"})  # the tensors of an image that waits to be finished
_ALWAYS = ("image_mean", "image_std", "rescale_factor")
_PATCHES = ("patch_size", "merge_size", "temporal_patch_size")
# What processors return besides pixel_values; anything more is an input of the model that a recipe could not rebuild.
_OUTPUTS = frozenset({"pixel_values", "image_grid_thw", "num_patches", "num_crops"})
_INSTEAD = "Store its own output: kd.Media(dict(image_processor(image, return_tensors='pt')), tokens)."


@dataclass(frozen=True)
class Recipe:
    """What is left to do to resized pixels: ``(x * rescale - mean) / std`` by channel, then the layout.

    Layout "patches" is that of Qwen2-VL and its successors: h*w rows of ``3 * temporal * patch * patch`` floats, the
    ``merge * merge`` patches of one token together. Layout "images" is [tiles, 3, H, W]; there ``patch`` only prices
    the image, and is 0 where it is not known. Other values raise ``InvalidArgument``.

    >>> r = Recipe("patches", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255, patch=14, merge=2, temporal=2)
    >>> r.patches((28, 56, 3))  # 2 x 4 patches, which fill 2 tokens
    8
    """

    layout: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale: float
    patch: int = 0
    merge: int = 1
    temporal: int = 1

    def __post_init__(self) -> None:
        sizes = (self.patch, self.merge, self.temporal)
        least = {"images": (0, 1, 1), "patches": (1, 1, 1)}.get(self.layout)
        if least is None or not all(type(size) is int and size >= low for size, low in zip(sizes, least, strict=True)):
            raise InvalidArgument(
                "a recipe's layout must be 'images' or 'patches', and its patch (for images 0 if unknown), merge and "
                f"temporal ints >= 1, found {self.layout!r} and {sizes}."
            )
        triples = all(isinstance(x, tuple) and len(x) == 3 for x in (self.mean, self.std))
        numbers = (*self.mean, *self.std, self.rescale) if triples else (math.nan,)
        if not all(isinstance(x, Real) and math.isfinite(x) for x in numbers) or min(numbers[3:]) <= 0:
            raise InvalidArgument(
                "image_mean and image_std of a recipe must be three finite numbers each, image_std and rescale_factor "
                f"> 0, found {self.mean}, {self.std} and {self.rescale}."
            )

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether pixels of this shape are [H, W, 3] of whole tokens, or for images [tiles, H, W, 3]; not empty."""
        cut = self.layout == "patches"
        unit = self.patch * self.merge if cut else 1  # the side of a token's square
        whole = len(shape) == (3 if cut else 4) and shape[-1] == 3 and all(shape)
        return whole and not any(side % unit for side in shape[-3:-1])

    def patches(self, shape: tuple[int, ...]) -> int | None:
        """How many patches the tower sees of pixels of this ``(…, H, W, 3)`` shape."""
        if not self.patch:
            return None
        tiles = shape[0] if len(shape) == 4 else 1
        return tiles * (shape[-3] // self.patch) * (shape[-2] // self.patch)

    def packed(self) -> Tensor:
        """uint8 [k]: JSON with sorted keys. As a tensor it is part of digests, segments and checksums."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")

    @classmethod
    def unpacked(cls, packed: Tensor) -> Recipe:
        """The recipe in a host tensor; of a device tensor it would have to wait for the device."""
        if packed.device.type != "cpu":
            raise InvalidArgument(f"a recipe is read on the host, found it on {packed.device}; move pixels alone.")
        try:
            read = json.loads(bytes(packed.tolist()))
            fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in read.items()}
            recipe = cls(**fields)
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidArgument(
                "tensors named 'pixels' and 'recipe' are those of kd.Media.from_pixels, found a recipe of "
                f"{packed.dtype} {list(packed.shape)} that does not read as one ({error}); name your own otherwise."
            ) from error
        return recipe


def prepare(
    pixels: Tensor | npt.NDArray[np.uint8], tokens: int, processor: Any
) -> tuple[dict[str, Tensor], int | None]:
    """``{"pixels", "recipe"}`` of one image, and its patches; see ``Media.from_pixels``.

    ``pixels`` come back as uint8 [H, W, 3] for patches, [tiles, H, W, 3] for images, in memory of their own.
    """
    image = _image(pixels)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise InvalidTrajectory(f"tokens must be an int >= 1, the positions that the image fills, found {tokens!r}.")
    if isinstance(processor, Mapping):
        recipe = _recipe(
            processor,
            "the mapping",
            "The pixels of a mapping are resized already; give the image processor itself to have it resize.",
        )
        resized = torch.from_numpy(image if recipe.layout == "patches" else image[None])
    else:
        recipe, resized = _process(image, processor)
    height, width = resized.shape[-3:-1]
    if recipe.layout == "patches":
        unit = recipe.patch * recipe.merge
        if not recipe.fits(tuple(resized.shape)):
            raise InvalidTrajectory(
                f"pixels of {height} x {width} are not multiples of patch_size * merge_size = {unit}; a mapping takes "
                "pixels that are resized already, the image processor itself would resize them."
            )
        if tokens != (fills := (height // unit) * (width // unit)):
            raise InvalidTrajectory(
                f"tokens is {tokens}, an image resized to {height} x {width} fills {fills}, one for each {unit} x "
                f"{unit} pixels; count placeholders after the processor, the same processor as here, of this image "
                "alone."
            )
    if (patches := recipe.patches(tuple(resized.shape))) == 0:
        raise InvalidTrajectory(
            f"an image of {height} x {width} has no patch of {recipe.patch} x {recipe.patch}; resize it to what the "
            "tower takes, and give the patch_size of that tower."
        )
    return {"pixels": resized, "recipe": recipe.packed()}, patches


def finish(tensors: Mapping[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    """The tensors that the model takes, on ``device``: bytes are copied, floats are made there.

    There is no explicit synchronisation; from pageable memory, a copy may still hold the host while it is staged.

    Of ``{"pixels", "recipe"}``: ``pixel_values`` in float32, and for patches ``image_grid_thw`` (int64 [1, 3]).
    Other tensors come back as they are. Raises ``InvalidArgument`` for a recipe that cannot be followed, and for
    pixels that it is not for. The arithmetic is that of the processors on NumPy and PIL, bit by bit: the
    product in float64, then float32. Processors on torchvision scale mean and std instead of the image; they differ
    by less than 1e-6, for CLIP's mean and std by 2.4e-7.

    >>> r = Recipe("images", (0.5, 0.5, 0.5), (0.25, 0.5, 1.0), 1 / 255)
    >>> white = torch.full((1, 1, 1, 3), 255, dtype=torch.uint8)
    >>> finish({"pixels": white, "recipe": r.packed()}, "cpu")["pixel_values"].flatten().tolist()
    [2.0, 1.0, 0.5]
    """
    if tensors.keys() != NAMES:
        return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
    recipe = Recipe.unpacked(tensors["recipe"])
    pixels = tensors["pixels"]
    if pixels.dtype != torch.uint8 or not recipe.fits(tuple(pixels.shape)):
        raise InvalidArgument(
            "pixels must be uint8 and not empty, [tiles, H, W, 3] for images, [H, W, 3] in multiples of patch * merge "
            f"for patches, found {pixels.dtype} {list(pixels.shape)} for {recipe}; make both by kd.Media.from_pixels."
        )
    pixels = pixels.to(device, non_blocking=True)
    # Made on the host, the default device of a caller's torch.device being perhaps another. As tensors, because CUDA
    # would turn a division by a number into a product with its reciprocal, which rounds twice.
    constants = torch.tensor([recipe.mean, recipe.std], dtype=torch.float32, device="cpu")
    mean, std = constants.to(device, non_blocking=True).unbind()
    floats = (pixels.double() * recipe.rescale).float().sub_(mean).div_(std)
    if recipe.layout == "images":
        return {"pixel_values": floats.movedim(-1, 1).contiguous()}
    grid = torch.tensor([[1, *(side // recipe.patch for side in pixels.shape[:2])]], device="cpu")
    return {"pixel_values": _cut(floats, recipe), "image_grid_thw": grid.to(device, non_blocking=True)}


def _cut(image: Tensor, recipe: Recipe) -> Tensor:
    """[H, W, 3] -> [h*w, 3*temporal*patch*patch]; all frames of a still image are that image."""
    p, m, frames = recipe.patch, recipe.merge, recipe.temporal
    h, w = image.shape[0] // p, image.shape[1] // p
    split = image.reshape(h // m, m, p, w // m, m, p, 3).permute(0, 3, 1, 4, 6, 2, 5)
    return split.unsqueeze(5).expand(*split.shape[:5], frames, p, p).reshape(h * w, 3 * frames * p * p)


def _resized(values: Any, grid: Any, recipe: Recipe) -> Tensor | None:
    """The pixels in a processor's output, [tiles, H, W, 3] or [H, W, 3]; None where they are not to be found."""
    if not isinstance(values, Tensor):
        return None
    if grid is None:
        return values.movedim(1, -1) if values.ndim == 4 and values.shape[1] == 3 else None
    if not isinstance(grid, Tensor) or grid.shape != (1, 3) or grid.is_floating_point() or int(grid.min()) < 1:
        return None
    _, h, w = grid[0].tolist()
    return _joined(values, (h, w), recipe)


def _joined(values: Tensor, grid: tuple[int, int], recipe: Recipe) -> Tensor | None:
    """The inverse of ``_cut``, or None where the frames differ or the numbers do not fit."""
    p, m, frames = recipe.patch, recipe.merge, recipe.temporal
    h, w = grid
    if h % m or w % m or tuple(values.shape) != (h * w, 3 * frames * p * p):
        return None
    split = values.reshape(h // m, w // m, m, m, 3, frames, p, p)
    if not torch.equal(split, split[:, :, :, :, :, :1].expand_as(split)):
        return None
    return split[:, :, :, :, :, 0].permute(0, 2, 5, 1, 3, 6, 4).reshape(h * p, w * p, 3)


def _image(pixels: Tensor | npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A copy of its own, row-major on the host: callers reuse the buffers of their frames."""
    image: Any = pixels.cpu().numpy() if isinstance(pixels, Tensor) and pixels.dtype == torch.uint8 else pixels
    if not (isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.shape[2:] == (3,) and image.size):
        found = f"{image.dtype} {list(image.shape)}" if hasattr(image, "shape") else type(image).__name__
        raise InvalidTrajectory(
            f"pixels must be uint8 [H, W, 3] and not empty, found {found}; give one RGB image, channels last, before "
            "it is rescaled: numpy.asarray(image.convert('RGB')) of a PIL image."
        )
    return np.array(image, order="C")


def _recipe(settings: Mapping[str, Any], who: str, remedy: str) -> Recipe:
    """A recipe of settings named as in preprocessor_config.json; errors say whose they are and what to do."""
    cut = any(name in settings for name in _PATCHES[1:])
    missing = [name for name in (*_ALWAYS, *(_PATCHES if cut else ())) if name not in settings]
    unknown = [str(name) for name in settings if name not in (*_ALWAYS, *_PATCHES)]
    if missing or unknown:
        raise InvalidArgument(
            f"{who} needs {list(_ALWAYS)}, and {list(_PATCHES)} for patches as in Qwen2-VL; missing are {missing}, "
            f"unknown {unknown}. {remedy}"
        )
    mean, std, (rescale, *_) = (_channels(f"{name} of {who}", settings[name]) for name in _ALWAYS)
    sizes = [settings[name] for name in _PATCHES if name in settings]
    if not all(type(size) is int and size >= 1 for size in sizes):
        raise InvalidArgument(f"{list(_PATCHES[: len(sizes)])} of {who} must be ints >= 1, found {sizes}.")
    return Recipe("patches" if cut else "images", mean, std, rescale, *sizes)


def _channels(name: str, value: Any) -> tuple[float, float, float]:
    try:
        red, green, blue = np.broadcast_to(np.asarray(value, np.float64), (3,)).tolist()
    except (TypeError, ValueError):
        red = green = blue = math.nan
    if not math.isfinite(red + green + blue):
        raise InvalidArgument(f"{name} must be one finite number, or three for red, green and blue, found {value!r}.")
    return red, green, blue


def _process(image: npt.NDArray[np.uint8], processor: Any) -> tuple[Recipe, Tensor]:
    """Have a Hugging Face image processor resize (and tile) alone, and undo its layout."""
    worker = getattr(processor, "image_processor", processor)
    who, takes = type(worker).__name__, list(getattr(worker, "model_input_names", None) or ())
    if not callable(worker) or "pixel_values" not in takes:
        raise InvalidArgument(
            "processor must be a Hugging Face image processor, a processor that has one, or a mapping of "
            f"{list(_ALWAYS)}; found {who}, whose outputs are {takes}. Videos and sounds take "
            "kd.Media(tensors, tokens, kind)."
        )
    if getattr(worker, "do_pad", None):
        raise InvalidArgument(
            f"{who} pads (do_pad=True), before or after it normalises, which a recipe cannot know. {_INSTEAD}"
        )
    try:
        # The format is said, because a processor takes 3 rows for 3 channels.
        found = worker(
            images=[image], do_rescale=False, do_normalize=False, input_data_format="channels_last", return_tensors="pt"
        )
    except Exception as error:  # whatever the libraries below it raise
        raise InvalidTrajectory(
            f"{who} refused an image of shape {list(image.shape)}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Mapping):
        raise InvalidArgument(
            f"{who} returned {type(found).__name__}; an image processor returns a mapping with pixel_values. {_INSTEAD}"
        )
    values, grid = found.get("pixel_values"), found.get("image_grid_thw")
    if extra := sorted(set(found) - _OUTPUTS):
        raise InvalidArgument(f"{who} also returns {extra}, which a recipe cannot rebuild. {_INSTEAD}")
    recipe = _recipe(_settings(processor, worker, cut=grid is not None), who, _INSTEAD)
    resized = _resized(values, grid, recipe)
    if resized is None or not resized.numel():
        shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        counts = grid.tolist() if isinstance(grid, Tensor) else f"{grid} ({type(grid).__name__})"
        raise InvalidArgument(
            f"{who} returns pixel_values {shape} and image_grid_thw {counts}, which are "
            f"neither [tiles, 3, H, W] nor still patches for {recipe}. {_INSTEAD}"
        )
    pixels = resized.contiguous().to(torch.uint8)
    if not torch.equal(pixels.to(resized.dtype), resized):
        raise InvalidArgument(
            f"{who} with do_rescale=False and do_normalize=False returns values from {resized.min().item()} to "
            f"{resized.max().item()} that are not integers of 0..255. {_INSTEAD}"
        )
    return recipe, pixels


def _settings(processor: Any, worker: Any, *, cut: bool) -> dict[str, Any]:
    """What the processor would do beyond the resize, under the names of preprocessor_config.json."""
    normalise, rescale = getattr(worker, "do_normalize", True), getattr(worker, "do_rescale", True)
    settings = {
        "image_mean": getattr(worker, "image_mean", None) if normalise else 0.0,
        "image_std": getattr(worker, "image_std", None) if normalise else 1.0,
        "rescale_factor": getattr(worker, "rescale_factor", None) if rescale else 1.0,
    }
    if cut:
        return {**settings, **{name: getattr(worker, name) for name in _PATCHES if hasattr(worker, name)}}
    # Processors know the patch of their tower; image processors such as CLIP's do not.
    patch = getattr(processor, "patch_size", None)
    return {**settings, "patch_size": patch} if isinstance(patch, int) else settings
