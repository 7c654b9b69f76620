"""Where media go in a prompt: its placeholders, in order."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from knit_data.errors import InvalidTrajectory
from knit_data.trajectory import INTEGERS, Media, MediaRef, check_medium


def place_media(
    input_ids: Tensor | Sequence[int], media: Iterable[Media], token_id: int, prompt_tokens: int | None = None
) -> list[MediaRef]:
    """Where media go in ``input_ids`` [n]: the placeholders ``token_id``, taken in order, ``media.tokens`` by each.

    ``media`` stand in the order of the prompt; one object may stand there twice. A medium may take several runs of
    placeholders, and a run may hold several media. Ids from ``prompt_tokens`` on never count (None: all do), because
    a policy can sample the placeholder. Raises ``InvalidTrajectory`` unless there are as many placeholders as the
    media fill.

    >>> one, two = (Media({"x": torch.zeros(1)}, tokens) for tokens in (1, 3))
    >>> refs = place_media([9, 9, 9, 4, 9, 5, 9], [one, two], token_id=9, prompt_tokens=5)
    >>> [ref.spans for ref in refs]  # the last 9 was sampled
    [[(0, 1)], [(1, 2), (4, 1)]]
    """
    ids = _ids(input_ids)
    token = _int("token_id", token_id, "the id that stands where features go, a config's image_token_id")
    n = len(ids) if prompt_tokens is None else _int("prompt_tokens", prompt_tokens, "how many ids are the prompt's")
    if not 0 <= n <= len(ids):
        raise InvalidTrajectory(f"prompt_tokens must lie in 0..{len(ids)}, the ids there are, found {prompt_tokens}.")
    if not isinstance(media, Iterable):
        raise InvalidTrajectory(
            f"media must be the kd.Media of the prompt in its order, found {type(media).__name__}; without images it "
            "is [], with one [medium]."
        )
    placed = [check_medium(f"media {i}", medium) for i, medium in enumerate(media)]
    places, fills = (ids[:n] == token).nonzero().flatten(), [medium.tokens for medium in placed]
    if (excess := len(places) - sum(fills)) != 0:
        sampled = "give prompt_tokens, so that sampled ids do not count" if prompt_tokens is None else "name all media"
        raise InvalidTrajectory(
            f"{len(places)} placeholders {token} in the first {n} ids, the {len(fills)} media fill {sum(fills)}: "
            f"{fills}; {abs(excess)} {'more' if excess > 0 else 'fewer'} than they fill. "
            + (
                f"{sampled.capitalize()}."
                if excess > 0
                else "Do not cut ids inside an image, and drop media with them."
            )
            + " Count tokens after the processor that made these ids."
        )
    refs = []
    for medium, mine in zip(placed, places.split(fills), strict=True):
        runs = mine.tensor_split(((mine.diff() != 1).nonzero().flatten() + 1).tolist())
        refs.append(MediaRef(medium, [(int(run[0]), len(run)) for run in runs]))
    return refs


def _ids(given: object) -> Tensor:
    """int64 [n] on the host: in a narrower dtype, a placeholder would be compared after a wrap, 300 as 44."""
    try:
        ids = torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidTrajectory(
            f"input_ids must be integers of shape [n], found {type(given).__name__} that makes no tensor: {error}"
        ) from error
    if ids.ndim != 1 or ids.dtype not in INTEGERS:
        raise InvalidTrajectory(f"input_ids must be integers of shape [n], found {ids.dtype} {list(ids.shape)}.")
    return ids.to(torch.int64)


def _int(name: str, value: int, meaning: str) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise InvalidTrajectory(f"{name} must be an int, {meaning}, found {value!r}.") from error
