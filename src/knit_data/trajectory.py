"""Words of the rollout side: a trajectory, its media, and the checks that a put makes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from numbers import Real
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from knit_data.errors import InvalidTrajectory
from knit_data.pixels import prepare

# Names that micro-batches compute; a column of the same name would be shadowed.
RESERVED = frozenset({"labels", "cu_seqlens", "attention_mask"})
# Names that mean something per token, so that no value may have them.
PER_TOKEN = frozenset({"input_ids", "loss_mask", "position_ids"})
# What safetensors can hold and a collator can pad.
DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_MOST_PATCHES = 2**31 - 1  # of one trajectory: the table counts in int32
_SURELY_FLOAT32 = 3e38  # a smaller number is finite as float32, too


@dataclass(frozen=True, eq=False)
class Media:
    """One image, video or sound as its encoder takes it. Two media with equal content have equal digests.

    ``tensors`` are the encoder's inputs, ``tokens`` the positions it fills in a trajectory, ``patches`` its cost in
    the tower (``None``: as many as tokens).
    """

    tensors: Mapping[str, Tensor]
    tokens: int
    kind: str = "image"
    patches: int | None = None

    @classmethod
    def from_pixels(cls, pixels: Tensor | npt.NDArray[np.uint8], tokens: int, processor: Any) -> Media:
        """An image stored as it is after the resize, in uint8; the model's tensors are made of it where it is encoded.

        ``pixels``: uint8 [H, W, 3], the original image, not yet resized. ``tokens``: the placeholders of this one
        image; where a prompt has several, count them by image: ``image_grid_thw.prod(-1) // merge_size**2`` is [6, 9]
        for grids (1, 4, 6) and (1, 6, 6) that merge 2. ``processor``: the Hugging Face image processor, or the
        processor that has one; it is asked to resize (and tile), and what it would do then is noted beside the bytes.
        Or a mapping with image_mean, image_std, rescale_factor and, for patches as in Qwen2-VL, patch_size, merge_size
        and temporal_patch_size; the pixels are then resized already.

        ``encode`` of a ``kd.SharedEncoder`` gets ``pixel_values`` of it, float32 as from the processor, and for patches
        ``image_grid_thw``, int64 [1, 3]; both concatenated over images. A 1008 x 1008 image of Qwen2.5-VL is 5184
        patches and 1296 tokens: 3.0 MB, where the processor's own output has 24.4 MB.

        Raises ``InvalidTrajectory`` for other pixels, for pixels that the processor refuses and for tokens that the
        patches do not fill, ``InvalidArgument`` for a processor whose output such bytes could not give.

        >>> clip = {"image_mean": 0.5, "image_std": 0.5, "rescale_factor": 1 / 255, "patch_size": 14}
        >>> image = Media.from_pixels(torch.zeros(28, 42, 3, dtype=torch.uint8), 6, clip)
        >>> list(image.tensors["pixels"].shape), image.tokens, image.patches
        ([1, 28, 42, 3], 6, 6)
        """
        tensors, patches = prepare(pixels, tokens, processor)
        return cls(tensors, tokens, "image", patches)

    @property
    def cost(self) -> int:
        return self.tokens if self.patches is None else self.patches

    @cached_property
    def digest(self) -> str:
        """BLAKE3-256 over kind, counts and, per tensor, name, dtype, shape and bytes; 64 hex digits.

        Shape and dtype are part of it: keys that leave them out have served wrong images elsewhere. It is
        cryptographic because a wrong hit would train on the wrong image without a sound.
        """
        parts = sorted(self.tensors.items())
        described = [[name, DTYPES[tensor.dtype], list(tensor.shape)] for name, tensor in parts]
        hasher = blake3.blake3(json.dumps([self.kind, self.tokens, self.cost, described]).encode())
        for _, tensor in parts:
            hasher.update(tensor_bytes(tensor))
        return hasher.hexdigest()


@dataclass(frozen=True, eq=False)
class MediaRef:
    """Where one medium's features go: ``(start, length)`` in this trajectory, lengths summing to ``media.tokens``."""

    media: Media
    spans: Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One response with its prompt.

    ``tokens`` maps names to ``[n, ...]`` tensors, n >= 2; ``input_ids`` is needed. Entry t of every column belongs
    to token t: ``logprobs[t]`` is the log-probability of ``input_ids[t]`` given what precedes it, and
    ``loss_mask[t]`` (bool or finite float >= 0) weighs the prediction of ``input_ids[t]``, so ``loss_mask[0]`` is 0.
    Without a ``loss_mask`` all tokens but the first count. ``values`` are per trajectory and have one shape in the
    whole store; Python floats become float32. ``policy_version`` is the version at which generation *started*.

    >>> t = Trajectory("q7/0", "q7", 3, {"input_ids": torch.tensor([5, 6, 7])}, {"reward": 1.0})
    >>> check_group([t])
    """

    id: str
    group: str
    policy_version: int
    tokens: Mapping[str, Tensor]
    values: Mapping[str, Tensor | float] = field(default_factory=dict)
    media: Sequence[MediaRef] = ()
    attributes: Mapping[str, str] = field(default_factory=dict)
    mean_policy_version: float | None = None


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The elements in row-major order as bytes; no copy for a contiguous CPU tensor."""
    dense = tensor.detach().cpu().resolve_neg()
    array = (dense.view(torch.int16) if dense.dtype == torch.bfloat16 else dense).numpy()  # which has no bfloat16
    return np.ascontiguousarray(array).data.cast("B") if array.size else memoryview(b"")


def value_tensor(value: Tensor | float) -> Tensor:
    """A per-trajectory value as stored: Python numbers and half-precision scalars as float32."""
    if not isinstance(value, Tensor):
        huge = isinstance(value, int) and abs(value) > 10**300  # more than a float holds
        return torch.tensor(math.inf if huge else float(value), dtype=torch.float32)
    if value.ndim == 0 and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value


def placeholder(t: Trajectory, start: int, length: int) -> int:
    """The token id that fills a span; -1 if there are several."""
    ids = t.tokens["input_ids"][start : start + length]
    return int(ids[0]) if bool((ids == ids[0]).all()) else -1


def check_group(trajectories: Sequence[Trajectory]) -> None:
    """Raise ``InvalidTrajectory`` for the first trajectory that could not be trained on as it stands."""
    if not trajectories:
        raise InvalidTrajectory("a put needs at least one trajectory, found none; skip empty groups before the put.")
    looked_at = set[int]()  # media of this group, which its members share: their tensors are read once
    for trajectory in trajectories:
        if not isinstance(trajectory, Trajectory):
            raise InvalidTrajectory(f"a put takes kd.Trajectory objects, found {type(trajectory).__name__}.")
        _check(trajectory, looked_at)
    first, ids = trajectories[0], set()
    for other in trajectories:
        name = f"trajectory {other.id!r}"
        if other.id in ids:
            raise InvalidTrajectory(f"{name} stands twice in group {other.group!r}; ids are unique in a store.")
        ids.add(other.id)
        if other.group != first.group:
            raise InvalidTrajectory(
                f"{name} belongs to group {other.group!r}, the first of this put to {first.group!r}; "
                "put one group at a time."
            )
        if dict(other.attributes) != dict(first.attributes):
            raise InvalidTrajectory(
                f"{name} has attributes {dict(other.attributes)}, others of group {other.group!r} have "
                f"{dict(first.attributes)}; quotas count groups, so attributes are the same for all members."
            )


def check_name(what: str, text: object) -> None:
    """Names and ids: 1 to 255 bytes of printable text without spaces at the ends."""
    if not isinstance(text, str):
        raise InvalidTrajectory(f"{what} must be a string, found {type(text).__name__} {text!r}.")
    if bad := _flaw(text):
        raise InvalidTrajectory(f"{what} {text[:80]!r} {bad}; use 1 to 255 bytes of printable text.")


@lru_cache(maxsize=1024)  # the same few names of columns, values and attributes come with every trajectory
def _flaw(text: str) -> str:
    """What is wrong with a name; empty if nothing is."""
    if not text or len(text.encode("utf-8", "surrogatepass")) > 255:
        return "is longer than 255 bytes" if text else "is empty"
    return "" if text.isprintable() and text == text.strip() else "has control characters or outer spaces"


def _check(t: Trajectory, looked_at: set[int]) -> None:
    check_name("trajectory id", t.id)
    check_name(f"group of trajectory {t.id!r}", t.group)
    who = f"trajectory {t.id!r}"
    for what, mapping in (("tokens", t.tokens), ("values", t.values), ("attributes", t.attributes)):
        if not isinstance(mapping, Mapping):
            raise InvalidTrajectory(f"{who}: {what} must map names, found {type(mapping).__name__}.")
    if isinstance(t.policy_version, bool) or not isinstance(t.policy_version, int) or not 0 <= t.policy_version < 2**62:
        raise InvalidTrajectory(
            f"{who}: policy_version must be an int >= 0, found {t.policy_version!r}; "
            "use the version that travelled with the weights when generation started."
        )
    mean = t.mean_policy_version
    if mean is not None and not (isinstance(mean, Real) and math.isfinite(mean) and mean >= t.policy_version):
        raise InvalidTrajectory(
            f"{who}: mean_policy_version must be a finite number >= policy_version {t.policy_version}, found {mean!r}."
        )
    for key, value in t.attributes.items():
        check_name(f"{who}: attribute name", key)
        check_name(f"{who}: attribute {key!r}", value)
    n = _check_tokens(t, who)
    for name, raw in t.values.items():
        check_name(f"{who}: value name", name)
        if name in RESERVED or name in PER_TOKEN or name in t.tokens:
            raise InvalidTrajectory(f"{who}: the value name {name!r} is taken by a column; rename it.")
        if not isinstance(raw, Tensor | Real):
            raise InvalidTrajectory(f"{who}: value {name!r} must be a tensor or a number, found {type(raw).__name__}.")
        if isinstance(raw, Tensor) or not abs(raw) < _SURELY_FLOAT32:
            _check_tensor(f"{who}: value {name!r}", value_tensor(raw))
    _check_media(t, who, n, looked_at)


def _check_tokens(t: Trajectory, who: str) -> int:
    ids = t.tokens.get("input_ids")
    if ids is None:
        raise InvalidTrajectory(f"{who}: tokens need 'input_ids', found {list(t.tokens)}.")
    if not isinstance(ids, Tensor) or ids.is_meta or ids.ndim != 1 or ids.dtype not in INTEGERS or len(ids) < 2:
        found = f"{ids.dtype} {list(ids.shape)} on {ids.device}" if isinstance(ids, Tensor) else type(ids).__name__
        raise InvalidTrajectory(f"{who}: input_ids must be integers of shape [n], n >= 2, found {found}.")
    n = ids.shape[0]
    if (least := int(ids.min())) < 0:
        raise InvalidTrajectory(
            f"{who}: input_ids must not be negative, found {least}; tokens without a loss have loss_mask 0, "
            "ids stay what they are."
        )
    for name, column in t.tokens.items():
        check_name(f"{who}: column name", name)
        what = f"{who}: column {name!r}"
        if name in RESERVED:
            raise InvalidTrajectory(f"{what}: the name is computed by micro-batches; rename it.")
        _check_tensor(what, column)
        if column.ndim == 0 or column.shape[0] != n:
            raise InvalidTrajectory(
                f"{what} has shape {list(column.shape)}, input_ids has {n} tokens; entry t of a column is for token t, "
                "fill with 0 where there is nothing."
            )
    positions = t.tokens.get("position_ids")
    if positions is not None and (positions.dtype not in INTEGERS or tuple(positions.shape) not in ((n,), (n, 3))):
        raise InvalidTrajectory(
            f"{who}: position_ids must be integers of shape [{n}] or [{n}, 3], found {positions.dtype} "
            f"{list(positions.shape)}."
        )
    mask = t.tokens.get("loss_mask")
    if mask is not None:
        if mask.ndim != 1 or not (mask.dtype == torch.bool or mask.is_floating_point()):
            raise InvalidTrajectory(
                f"{who}: loss_mask must be bool or float of shape [{n}], found {mask.dtype} {list(mask.shape)}."
            )
        _check_tensor(f"{who}: loss_mask as float32", mask.float())
        if mask[0] != 0 or (mask < 0).any():
            raise InvalidTrajectory(
                f"{who}: loss_mask[0] must be 0 and no entry negative, found loss_mask[0] = {mask[0].item()}, "
                f"smallest {mask.min().item()}; loss_mask[t] weighs predicting input_ids[t], and nothing precedes "
                "the first token."
            )
    return n


def _check_tensor(what: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise InvalidTrajectory(f"{what} must be a tensor, found {type(tensor).__name__}.")
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else str(tensor.layout)
        raise InvalidTrajectory(
            f"{what} has dtype {tensor.dtype} and layout {kind}; dense tensors of {sorted(DTYPES.values())} "
            "can be stored."
        )
    if tensor.is_floating_point() and not is_finite(tensor):
        bad = int((~torch.isfinite(tensor)).sum())
        raise InvalidTrajectory(
            f"{what} holds {bad} NaN or infinite of {tensor.numel()} entries; one would poison every gradient. "
            "Write 0 where loss_mask is 0, and drop trajectories whose rewards failed."
        )


def is_finite(tensor: Tensor) -> bool:
    """Whether no entry of a floating-point tensor is NaN or infinite.

    One such entry makes any sum NaN or infinite, so that a finite sum answers in one pass and without a
    tensor of its own. The sum of finite entries can overflow, too: 3e38 + 3e38; then each is looked at.
    """
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return math.isfinite(tensor.detach().sum(dtype=wide)) or bool(torch.isfinite(tensor).all())


def check_medium(what: str, medium: object) -> Media:
    """A medium with counts that can be added up; its tensors are looked at by a put."""
    if not isinstance(medium, Media):
        raise InvalidTrajectory(f"{what} must be a kd.Media, found {type(medium).__name__}.")
    counts = (medium.tokens, medium.cost)
    if not all(type(x) is int for x in counts) or medium.tokens < 1 or medium.cost < 0:
        raise InvalidTrajectory(
            f"{what} needs int tokens >= 1 and int patches >= 0 or None, found tokens {medium.tokens!r}, patches "
            f"{medium.patches!r}; count tokens after the processor, and give int(count)."
        )
    if not isinstance(medium.tensors, Mapping) or not medium.tensors:
        found = "an empty one" if isinstance(medium.tensors, Mapping) else type(medium.tensors).__name__
        raise InvalidTrajectory(f"{what} needs a mapping of names to tensors, what its encoder takes, found {found}.")
    return medium


def _check_media(t: Trajectory, who: str, n: int, looked_at: set[int]) -> None:
    taken: list[tuple[int, int]] = []
    if not isinstance(t.media, Sequence):
        raise InvalidTrajectory(
            f"{who}: media must be a sequence of kd.MediaRef, found {type(t.media).__name__}; without images it is ()."
        )
    for i, ref in enumerate(t.media):
        what = f"{who}: media {i}"
        if not isinstance(ref, MediaRef):
            raise InvalidTrajectory(f"{what} must be kd.MediaRef(kd.Media(...), spans), found {type(ref).__name__}.")
        if id(media := ref.media) not in looked_at:
            _check_content(what, media)
            looked_at.add(id(media))
        if not _are_pairs(ref.spans):
            raise InvalidTrajectory(f"{what}: spans must be a list of (start, length), two ints, found {ref.spans!r}.")
        lengths = sum(length for _, length in ref.spans)
        if lengths != media.tokens:
            raise InvalidTrajectory(
                f"{what}: spans {list(ref.spans)} cover {lengths} positions, the medium fills {media.tokens}; "
                "count placeholders after the processor, not before."
            )
        for start, length in ref.spans:
            if length < 1 or start < 0 or start + length > n:
                raise InvalidTrajectory(
                    f"{what}: span ({start}, {length}) lies outside the {n} tokens; cut media with their placeholders."
                )
            taken.append((start, length))
    if (cost := sum(ref.media.cost for ref in t.media)) > _MOST_PATCHES:
        raise InvalidTrajectory(f"{who}: its media cost {cost} patches, at most {_MOST_PATCHES} can be counted.")
    taken.sort()
    for (start, length), (following, _) in pairwise(taken):
        if start + length > following:
            raise InvalidTrajectory(f"{who}: media spans overlap at position {following}; a position has one feature.")
    _check_placeholders(t, who, taken)


def _check_content(what: str, medium: object) -> None:
    media = check_medium(what, medium)
    check_name(f"{what}: kind", media.kind)
    for name, tensor in media.tensors.items():
        check_name(f"{what}: tensor name", name)
        _check_tensor(f"{what}: tensor {name!r}", tensor)
        if tensor.ndim == 0:
            raise InvalidTrajectory(
                f"{what}: tensor {name!r} has shape []; media are concatenated along the first dimension, give it "
                "one: [1]."
            )


def _are_pairs(spans: object) -> bool:
    return isinstance(spans, Sequence) and all(
        isinstance(span, Sequence) and len(span) == 2 and all(type(x) is int for x in span) for span in spans
    )


def _check_placeholders(t: Trajectory, who: str, taken: Sequence[tuple[int, int]]) -> None:
    """A placeholder of the prompt that no span covers is an image that was lost on the way.

    The prompt is what precedes the first token with a loss. A placeholder after it was sampled: any token can be.
    """
    if not taken:
        return
    mask = t.tokens.get("loss_mask")
    first = 1 if mask is None else 1 + int((mask[1:] != 0).byte().argmax())
    if mask is not None and not mask[first]:
        return
    prompt, free = t.tokens["input_ids"][:first].cpu(), torch.ones(first, dtype=torch.bool)
    for start, length in taken:
        free[start : start + length] = False
    for known in {placeholder(t, *span) for span in taken}:
        lost = int((free & (prompt == known)).sum())
        if lost:
            raise InvalidTrajectory(
                f"{who}: {lost} of the prompt's placeholders (id {known}) are in no span; the media fill "
                f"{sum(length for _, length in taken)} positions. Give every image with its placeholders, or take "
                "the placeholders of a lost one out."
            )
