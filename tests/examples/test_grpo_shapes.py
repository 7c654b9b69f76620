"""The example with images: its tasks, its rewards, and that training sees what rollout saw."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import knit_data as kd

pytest.importorskip("transformers")
pytest.importorskip("PIL")

EXAMPLES = str(Path(__file__).parents[2] / "examples")
ALIKE = 1e-4  # nats: one forward each in float32, with a cache and packed


@pytest.fixture(scope="module")
def shapes() -> Any:
    sys.path.insert(0, EXAMPLES)
    try:
        import tiny_shapes

        yield tiny_shapes
    finally:
        sys.path.remove(EXAMPLES)


def test_an_image_shows_what_is_asked(shapes: Any) -> None:
    """As many tokens as cells; something in the middle of as many cells as the answer says, and of its color."""
    rng = random.Random(0)
    for source in ("color", "count"):
        for _ in range(30):
            problem = shapes.Problem.draw(source, rng)
            medium = shapes.Prompt.of(problem).media[0]
            pixels = medium.tensors["pixels"].numpy()
            cells = cells_of(pixels, shapes.CELL)
            assert medium.tokens == len(cells) == medium.patches // 4
            middles = [cell[10:18, 10:18].reshape(-1, 3).mean(0) for cell in cells]
            lit = [middle for middle in middles if middle.max() > 60]
            if source == "count":
                assert len(lit) == int(problem.answer)
            else:
                near = {name: np.abs(lit[0] - color).sum() for name, color in shapes.COLORS.items()}
                assert min(near, key=near.__getitem__) == problem.answer


def cells_of(pixels: np.ndarray, side: int) -> list[np.ndarray]:
    height, width = pixels.shape[0] // side, pixels.shape[1] // side
    return [pixels[y * side : (y + 1) * side, x * side : (x + 1) * side] for y in range(height) for x in range(width)]


def test_an_answer_is_worth_what_it_says(shapes: Any) -> None:
    color = shapes.Problem("color", ("color", "?"), "red")
    count = shapes.Problem("count", ("count", "?"), "2")
    sums = shapes.Problem("sum", ("1", "+", "2", "?"), "3")
    assert [color.reward(words) for words in (["red", "."], ["red", "red"], ["blue", "."], ["."], [])] == [
        1,
        0.5,
        0,
        0,
        0,
    ]
    assert [count.reward(words) for words in (["2", "."], ["2", "1"], ["3"])] == [1, 0.5, 0]
    rambling = ["3"] * (1 + shapes.RAMBLE)
    assert sums.reward([*rambling, "."]) == 1 > sums.reward([*rambling, "3"]) > sums.reward(["4", "."]) == 0.2


def test_training_sees_what_rollout_saw(shapes: Any, tmp_path: Path) -> None:
    """Groups of an untrained model, with and without images and with a sampled placeholder, through store and loader:
    each image stored and encoded once, and the log-probabilities that were recorded."""
    from sampling import sample

    rng, size = random.Random(3), 8
    prompts = [shapes.Prompt.of(shapes.Problem.draw(source, rng)) for source in ("color", "sum", "count", "color")]
    model = shapes.build_model(0).eval()
    inputs, positions = shapes.prefill(model, prompts)
    limits = [12] * len(prompts)
    groups: dict[int, list[kd.Trajectory]] = {}
    for slot, responses in sample(model, inputs, positions, limits, size, placeholder=shapes.IMAGE_ID):
        groups[slot] = [
            prompts[slot].trajectory(f"g{slot}/{i}", f"g{slot}", 0, response, model)
            for i, response in enumerate(responses)
        ]
    sampled = [t.tokens["input_ids"][shapes.PROMPT_WIDTH : -1] for t in groups[0] + groups[2] + groups[3]]
    assert any(shapes.IMAGE_ID in ids for ids in sampled)

    store = kd.TrajectoryStore(tmp_path)
    with store.writer("w") as writer:
        for group in groups.values():
            writer.put_group(group)
    store.seal()
    encoder = kd.SharedEncoder(kd.integrations.huggingface.image_features(model), module=model)
    kd.integrations.huggingface.attach(model, encoder)
    sampler = kd.QuotaSampler(kd.TrajectoryStream(store), 4, 4, size)
    seen: set[str] = set()
    with kd.TrajectoryLoader(sampler, 120, device="cpu") as loader:
        mini = next(loader)
        for micro in mini:
            logits = model(**micro.model_inputs(), **encoder.model_inputs(micro)).logits[0]
            logp, mask = logits.detach().log_softmax(-1), micro.targets("loss_mask") != 0
            new = logp.gather(1, micro["labels"].clamp(min=0)[:, None])[:, 0]
            assert torch.allclose(new[mask], micro.targets("logprobs")[mask], rtol=0, atol=ALIKE)
            seen |= {info.id for info in micro.infos}
        encoder.abandon()
        assert mini.stats["micro_batches"] > 1
        assert (mini.stats["encodes"], mini.stats["naive_encodes"]) == (3, 3 * size)
    assert len(seen) == 4 * size
