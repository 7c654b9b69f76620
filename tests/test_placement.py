"""Where media go in a prompt, against an oracle position by position, and what cannot be placed."""

from __future__ import annotations

import doctest
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import knit_data as kd
from knit_data import placement
from knit_data.errors import InvalidTrajectory

PLACE = 9


def image(tokens: Any = 2) -> kd.Media:
    return kd.Media({"pixels": torch.zeros(2, 3)}, tokens)


def spans_of(ids: Sequence[int] | Tensor, tokens: Sequence[int], **changes: Any) -> list[list[tuple[int, int]]]:
    refs = kd.place_media(ids, [image(n) for n in tokens], PLACE, **changes)
    return [list(ref.spans) for ref in refs]


def oracle(ids: Sequence[int], tokens: Sequence[int], prompt: int) -> list[list[tuple[int, int]]] | None:
    """Position by position: the owner of each placeholder, then the runs of each owner."""
    owners = [i for i, n in enumerate(tokens) for _ in range(n)]
    places = [t for t, token in enumerate(ids) if token == PLACE and t < prompt]
    if len(owners) != len(places):
        return None
    spans: list[list[tuple[int, int]]] = [[] for _ in tokens]
    for owner, t in zip(owners, places, strict=True):
        if spans[owner] and sum(spans[owner][-1]) == t:
            start, length = spans[owner][-1]
            spans[owner][-1] = (start, length + 1)
        else:
            spans[owner].append((t, 1))
    return spans


@given(st.data())
def test_media_are_placed_as_position_by_position(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.sampled_from([PLACE, PLACE, 1]), min_size=1, max_size=14))
    prompt = data.draw(st.none() | st.integers(0, len(ids)))
    end = len(ids) if prompt is None else prompt
    left, tokens = ids[:end].count(PLACE), []
    while left:
        tokens.append(data.draw(st.integers(1, left)))
        left -= tokens[-1]
    if data.draw(st.integers(0, 3)) == 0:
        tokens.append(data.draw(st.integers(1, 3)))
    wanted = oracle(ids, tokens, end)
    given = data.draw(st.sampled_from([ids, tuple(ids), torch.tensor(ids), torch.tensor(ids, dtype=torch.int32)]))
    if wanted is None:
        with pytest.raises(InvalidTrajectory, match="placeholders"):
            spans_of(given, tokens, prompt_tokens=prompt)
    else:
        assert spans_of(given, tokens, prompt_tokens=prompt) == wanted


@given(st.lists(st.integers(1, 3), max_size=4), st.lists(st.sampled_from([PLACE, 1]), max_size=3))
@example([1, 2], [PLACE])
def test_what_is_placed_can_be_put(tokens: list[int], sampled: list[int]) -> None:
    prompt = [1, *(t for n in tokens for t in [PLACE] * n), 2]
    media = [image(n) for n in tokens]
    refs = kd.place_media([*prompt, *sampled], media, PLACE, len(prompt))
    assert [ref.media for ref in refs] == media
    store = kd.TrajectoryStore("memory://")
    given = kd.Trajectory("t", "g", 0, {"input_ids": torch.tensor([*prompt, *sampled])}, media=refs)
    back = store.read(store.writer("w").put(given))
    assert [list(ref.spans) for ref in back.media] == [list(ref.spans) for ref in refs]


def test_one_image_may_stand_twice_and_share_a_run() -> None:
    same = image(2)
    refs = kd.place_media([1, PLACE, PLACE, PLACE, PLACE], [same, same], PLACE)
    assert [(ref.media, ref.spans) for ref in refs] == [(same, [(1, 2)]), (same, [(3, 2)])]


def test_a_video_takes_the_runs_between_its_separators() -> None:
    assert spans_of([1, PLACE, PLACE, 3, PLACE, PLACE, 3, PLACE], [4, 1]) == [[(1, 2), (4, 2)], [(7, 1)]]


def test_no_media_and_no_placeholders_are_fine() -> None:
    assert kd.place_media([1, 2], [], PLACE) == []
    assert kd.place_media([1, PLACE], [], PLACE, prompt_tokens=1) == []


def test_ids_narrower_than_the_placeholder_do_not_wrap() -> None:
    narrow = torch.tensor([44, 44, 1], dtype=torch.uint8)  # 300 as uint8 is 44
    with pytest.raises(InvalidTrajectory, match="0 placeholders 300 in the first 3 ids"):
        kd.place_media(narrow, [image(2)], 300)
    assert kd.place_media(narrow, [image(2)], 44)[0].spans == [(0, 2)]


def test_media_may_come_from_a_generator_and_numbers_from_tensors() -> None:
    media = [image(1), image(2)]
    n = torch.tensor(4)
    refs = kd.place_media([PLACE, 1, PLACE, PLACE, PLACE], (m for m in media), torch.tensor(PLACE), n)
    assert [(ref.media, ref.spans) for ref in refs] == [(media[0], [(0, 1)]), (media[1], [(2, 2)])]


UNPLACED: dict[str, tuple[Any, Sequence[Any], dict[str, Any], Sequence[str]]] = {
    "one sampled": (
        [1, PLACE, PLACE, 2, PLACE],
        [image(2)],
        {},
        ["3 placeholders 9", "first 5 ids", "1 media fill 2: [2]", "1 more than", "Give prompt_tokens"],
    ),
    "one more in the prompt": (
        [1, PLACE, PLACE, PLACE, 2],
        [image(2)],
        {"prompt_tokens": 4},
        ["3 placeholders 9", "first 4 ids", "1 more than", "Name all media"],
    ),
    "too few": (
        torch.full((9214,), PLACE),
        [image(4930), image(4931)],
        {},
        ["9214 placeholders", "the 2 media fill 9861: [4930, 4931]", "647 fewer than", "Do not cut ids"],
    ),
    "media but no placeholder": ([1, 2], [image(2)], {}, ["0 placeholders", "fill 2", "2 fewer"]),
    "placeholders but no media": ([1, PLACE], [], {}, ["1 placeholders", "the 0 media fill 0: []", "1 more"]),
    "cut inside": ([1, PLACE, PLACE], [image(2)], {"prompt_tokens": 2}, ["1 placeholders", "first 2 ids", "1 fewer"]),
    "prompt longer than the ids": ([1, PLACE], [image(1)], {"prompt_tokens": 3}, ["prompt_tokens", "0..2", "found 3"]),
    "negative prompt": ([1, PLACE], [image(1)], {"prompt_tokens": -1}, ["prompt_tokens", "0..2", "found -1"]),
    "float ids": (torch.ones(3), [image(1)], {}, ["integers of shape [n]", "torch.float32 [3]"]),
    "ids in two dimensions": ([[1, PLACE]], [image(1)], {}, ["integers of shape [n]", "[1, 2]"]),
    "ids None": (None, [image(1)], {}, ["integers of shape [n]", "found NoneType"]),
    "ids as text": ("abc", [image(1)], {}, ["integers of shape [n]", "found str"]),
    "ids with a hole": ([1, None], [image(1)], {}, ["integers of shape [n]", "found list"]),
    "ids that nobody can read": (torch.ones(2, dtype=torch.int64, device="meta"), [], {}, ["found Tensor", "meta"]),
    "a float prompt": ([1, PLACE], [image(1)], {"prompt_tokens": 1.5}, ["prompt_tokens must be an int", "found 1.5"]),
    "no token id": ([1, PLACE], [image(1)], {"token_id": None}, ["token_id must be an int", "found None", "config"]),
    "a token id as text": ([1, PLACE], [image(1)], {"token_id": "9"}, ["token_id must be an int", "found '9'"]),
    "no media": ([1, PLACE], None, {}, ["found NoneType", "without images it is []"]),
    "one medium alone": ([1, PLACE], image(1), {}, ["found Media", "with one [medium]"]),
    "float tokens": ([1, PLACE], [image(1.0)], {}, ["media 0", "int tokens >= 1", "found tokens 1.0"]),
    "tokens as text": ([1, PLACE], [image("1")], {}, ["media 0", "int tokens >= 1", "found tokens '1'"]),
    "a dict": ([1, PLACE], [image(1), {}], {}, ["media 1", "kd.Media", "found dict"]),
    "no tokens": ([1, PLACE], [image(0)], {}, ["media 0", "int tokens >= 1", "found tokens 0"]),
}


@pytest.mark.parametrize("name", UNPLACED)
def test_media_that_cannot_be_placed_are_refused(name: str) -> None:
    ids, media, changes, texts = UNPLACED[name]
    with pytest.raises(InvalidTrajectory) as raised:
        kd.place_media(ids, media, **{"token_id": PLACE, **changes})
    for text in texts:
        assert text in str(raised.value)


def test_the_worked_examples_hold() -> None:
    assert doctest.testmod(placement).failed == 0
