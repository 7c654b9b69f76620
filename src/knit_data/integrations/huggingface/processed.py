"""Trajectories of what a Hugging Face processor returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from knit_data.errors import InvalidTrajectory
from knit_data.integrations.huggingface.models import GET, flat, inner_of, parts_of, skeleton, takes
from knit_data.placement import place_media
from knit_data.trajectory import Media, MediaRef, Trajectory

# What processors return about the text, and the counts of tiles, which follow from the placeholders.
_TEXT = frozenset({"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "num_patches"})


def trajectory(
    id: str,
    group: str,
    policy_version: int,
    processed: Mapping[str, Any],
    response_ids: Tensor | Sequence[int],
    *,
    model: nn.Module | Any,
    tokens: Mapping[str, Tensor | Sequence[float]] | None = None,
    values: Mapping[str, Tensor | float] | None = None,
    attributes: Mapping[str, str] | None = None,
    media: Sequence[Media] | None = None,
    loss_mask: Tensor | Sequence[float] | None = None,
    mean_policy_version: float | None = None,
) -> Trajectory:
    """A trajectory of a processor's output for one prompt and of the ids that were sampled after it.

    ``processed`` has ``input_ids`` [n] or [1, n] with the placeholders repeated, and whatever pixel tensors
    ``get_image_features`` of ``model`` names; positions where its ``attention_mask`` is 0 are cut. ``model`` is the
    model or its config; from a config, the model is built once without weights. Each image becomes a medium: one per
    row of ``image_grid_thw``, else one per run of placeholders (the tiles of InternVL). ``media`` in the order of the
    prompt replace the pixels. Placeholder ids in the response are text.

    Columns: ``input_ids`` int64; ``loss_mask`` float32, 0 on the prompt, then 1 or the ``loss_mask`` given for the
    response; for models with three axes of positions (Qwen-VL) ``position_ids`` int64 [n, 3], with or without images;
    and ``tokens``, given for all tokens or for the response alone (then 0 on the prompt). Tensors, arrays and lists
    are taken; lists of floats become float32.

    Prompt [1, V, I, I, 2] (V starts an image, I is its placeholder) with a grid (1, 2, 4), 8 patches in 2 tokens, and
    the response [7, 8]: one medium at (2, 2); loss_mask [0, 0, 0, 0, 0, 1, 1]; position_ids 0, 1, then (2, 2, 2) and
    (2, 2, 3), then 4, 5, 6 on all axes.

    Raises ``InvalidTrajectory`` where placeholders and images disagree, before anything is stored.
    """
    who = f"trajectory {id!r}"
    inner: Any = inner_of(model if isinstance(model, nn.Module) else skeleton(model))
    config = inner.config
    for what, mapping in (("processed", processed), ("tokens", tokens or {})):
        if not isinstance(mapping, Mapping):
            raise InvalidTrajectory(f"{who}: {what} must map names to tensors, found {type(mapping).__name__}.")
    tensors = {name: _tensor(f"{who}: {name!r}", value) for name, value in processed.items() if value is not None}
    prompt, response = _prompt(who, tensors), _tensor(f"{who}: response_ids", response_ids)
    if response.ndim != 1 or not len(response) or response.is_floating_point():
        raise InvalidTrajectory(
            f"{who}: response_ids must be [r], r >= 1, integers, found {response.dtype} {list(response.shape)}."
        )
    n, r = len(prompt), len(response)
    known = takes(inner)[0]
    unknown = sorted(tensors.keys() - _TEXT - set(known))
    if unknown and media is None:
        raise InvalidTrajectory(
            f"{who}: processed has {unknown}, which {GET} of {type(inner).__name__} does not take (it takes {known}); "
            "only images are placed here. Leave out what the model does not need."
        )
    pixels = {name: tensor for name, tensor in tensors.items() if name in known}
    if media is None:
        media = _images(who, config, pixels, prompt) if pixels else ()
    ids = torch.cat([prompt, response.to(torch.int64)])
    refs = place_media(ids, media, config.image_token_id, n)
    what = f"{who}: loss_mask"
    mask = torch.ones(r) if loss_mask is None else _tensor(what, loss_mask).float()
    columns = {"input_ids": ids, "loss_mask": _whole_column(what, mask, n, r, alone=True)}
    if hasattr(inner, "get_rope_index"):
        columns["position_ids"] = _positions(who, inner, prompt, r, refs, pixels.get("image_grid_thw"))
    for name, column in (tokens or {}).items():
        if name in columns:
            raise InvalidTrajectory(f"{who}: column {name!r} is made here; leave it out of tokens.")
        what = f"{who}: column {name!r}"
        columns[name] = _whole_column(what, _tensor(what, column), n, r)
    return Trajectory(
        id,
        group,
        policy_version,
        columns,
        values or {},
        refs,
        attributes or {},
        mean_policy_version=mean_policy_version,
    )


def _tensor(what: str, value: Any) -> Tensor:
    """On the host; Python floats as float32, arrays in their dtype."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    try:
        array = np.asarray(value)
        # Copied, because an array may be read-only; and to the host, whatever the default device is.
        made = torch.tensor(array, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidTrajectory(
            f"{what} must be a tensor, an array or a list of numbers, found {type(value).__name__}: {error}"
        ) from error
    return made.float() if made.dtype == torch.float64 and not isinstance(value, np.ndarray) else made


def _prompt(who: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """int64 [n]: the ids that are attended to."""
    ids = tensors.get("input_ids", torch.empty(0))
    mask = tensors.get("attention_mask", torch.ones_like(ids))
    if ids.ndim == 2 and len(ids) == 1:
        ids, mask = ids[0], mask.reshape(-1)
    if ids.ndim != 1 or ids.is_floating_point() or ids.shape != mask.shape or not mask.any():
        raise InvalidTrajectory(
            f"{who}: processed needs input_ids [n] or [1, n] of one prompt, n >= 1, integers, and an attention_mask "
            f"like them, found {ids.dtype} {list(ids.shape)} and {list(mask.shape)}; make one trajectory for each row."
        )
    return ids[mask != 0].to(torch.int64)


def _whole_column(what: str, column: Tensor, n: int, r: int, alone: bool = False) -> Tensor:
    """A column [n + r, …] as it is; one [r, …] for the response with zeros before it."""
    length = len(column) if column.ndim else 0
    if length == r:
        return torch.cat([column.new_zeros(n, *column.shape[1:]), column])
    if length == n + r and not alone:
        return column
    both = "" if alone else f" or {n + r}, those of the prompt before them"
    raise InvalidTrajectory(f"{what} has shape {list(column.shape)}; it needs {r} entries, one per response id{both}.")


def _images(who: str, config: Any, pixels: Mapping[str, Tensor], prompt: Tensor) -> list[Media]:
    """One medium per image of a processor's pixel tensors."""
    values, tower = pixels["pixel_values"], config.vision_config
    if "image_grid_thw" in pixels:
        grids = pixels["image_grid_thw"]
        counts = grids.prod(-1).tolist()
        if sum(counts) != len(values):
            raise InvalidTrajectory(
                f"{who}: image_grid_thw counts {sum(counts)} patches in {len(counts)} images, pixel_values has "
                f"{len(values)}; pass both as the processor made them."
            )
        parts = zip(values.split(counts), grids.split(1), counts, strict=True)
        merged = tower.spatial_merge_size**2
        return [
            Media({"pixel_values": part, "image_grid_thw": grid}, tokens=count // merged, patches=count)
            for part, grid, count in parts
        ]
    if values.ndim != 4 or len(pixels) > 1:
        raise InvalidTrajectory(
            f"{who}: without image_grid_thw, pixel_values [rows, 3, H, W] alone can be cut into images, found "
            f"{ {name: list(tensor.shape) for name, tensor in pixels.items()} }; pass media=[kd.Media(...), ...]."
        )
    per_row = _row_tokens(skeleton(config), tuple(values.shape[1:]))
    runs = _runs(prompt, config.image_token_id)
    rows = [length // per_row for length in runs]
    if [count * per_row for count in rows] != runs or sum(rows) != len(values):
        rows = [1] * len(values)  # placement then says how far they are apart
    sides = tower.patch_size if isinstance(tower.patch_size, list | tuple) else (tower.patch_size, tower.patch_size)
    patches = (values.shape[2] // sides[0]) * (values.shape[3] // sides[1])
    return [
        Media({"pixel_values": part}, tokens=len(part) * per_row, patches=len(part) * patches)
        for part in values.split(rows)
    ]


def _runs(ids: Tensor, token: int) -> list[int]:
    """Lengths of the runs of one id: [5, 7, 7, 5, 7] and 7 give [2, 1]."""
    found, counts = torch.unique_consecutive(ids == token, return_counts=True)
    return [int(count) for count in counts[found]]


def _positions(who: str, inner: Any, prompt: Tensor, r: int, refs: Sequence[MediaRef], grids: Tensor | None) -> Tensor:
    """int64 [n + r, 3]: the model's own positions of the prompt; the response goes on from the largest."""
    token, start = inner.config.image_token_id, inner.config.vision_start_token_id
    if refs:
        alone = [
            len(ref.spans) == 1 and prompt[: ref.spans[0][0]][-1:].tolist() == [start]  # before 0 there is nothing
            for ref in refs
        ]
        if not all(alone):  # one version would misplace such an image without a word, another fail inside
            raise InvalidTrajectory(
                f"{who}: the {len(refs)} media fill {[ref.media.tokens for ref in refs]}, the placeholders stand in "
                f"runs of {_runs(prompt, token)}; each image needs a run of its own after vision_start_token_id "
                f"{start}, media {alone.index(False)} has none. Pass images in the order of the prompt."
            )
        if grids is None and all("image_grid_thw" in ref.media.tensors for ref in refs):
            grids = torch.cat([ref.media.tensors["image_grid_thw"] for ref in refs])
        merged = inner.config.vision_config.spatial_merge_size**2
        fills = [] if grids is None else (grids.prod(-1) // merged).tolist()
        if fills != [ref.media.tokens for ref in refs]:
            raise InvalidTrajectory(
                f"{who}: image_grid_thw counts {fills} tokens, the media fill {[ref.media.tokens for ref in refs]}; "
                "positions follow from the grids, pass processed with image_grid_thw."
            )
        kinds = {"mm_token_type_ids": (prompt == token).int()[None]}  # transformers 5
        known = signature(inner.get_rope_index).parameters
        before, _ = inner.get_rope_index(
            input_ids=prompt[None],
            image_grid_thw=grids,
            attention_mask=torch.ones_like(prompt[None]),
            **{name: value for name, value in kinds.items() if name in known},
        )
        before = before[:, 0].T.to(torch.int64)
    else:
        before = torch.arange(len(prompt))[:, None].expand(-1, 3)
    after = int(before.max()) + 1 + torch.arange(r)
    return torch.cat([before, after[:, None].expand(-1, 3)])


@lru_cache(maxsize=8)  # keys hold skeletons
def _row_tokens(skeleton: nn.Module, shape: tuple[int, ...]) -> int:
    """How many tokens one row of pixel_values fills, by the model's own code."""
    with torch.no_grad():
        returned = getattr(skeleton, GET)(torch.empty(1, *shape, device="meta"))
    return len(flat(parts_of(returned)[0]))
