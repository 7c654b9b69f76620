"""What ``grpo_shapes.py`` trains: questions about drawn shapes and sums in text, and a tiny vision-language model."""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from PIL import Image, ImageDraw
from sampling import Response
from torch import Tensor

import knit_data as kd

COLORS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230)}
WHITE = (240, 240, 240)
DIGITS = ("0", "1", "2", "3", "4")
IMAGE, START, END_OF_IMAGE, VIDEO = "<image>", "<start>", "<end>", "<video>"
VOCAB = (".", "_", *COLORS, *DIGITS, "count", "color", "+", "?", IMAGE, START, END_OF_IMAGE, VIDEO)
IMAGE_ID = VOCAB.index(IMAGE)
PROMPT_WIDTH = 8  # prompts are justified to one width: sampling then needs no padding and no attention mask
LIMITS = {"color": 2, "count": 2, "sum": 64}  # tokens of the longest response; an untrained policy often gets there
RAMBLE = 16  # so many tokens after the answer of a sum cost nothing but time
PATCH, MERGE = 14, 2  # a token sees 28 x 28 pixels
CELL = PATCH * MERGE
# The class that needs no torchvision: transformers 5 calls it …Pil, 4 has it under the plain name.
PROCESSOR = getattr(transformers, "Qwen2VLImageProcessorPil", None) or transformers.Qwen2VLImageProcessor
processor = PROCESSOR(
    patch_size=PATCH,
    merge_size=MERGE,
    temporal_patch_size=2,
    min_pixels=CELL**2,
    max_pixels=4 * CELL**2,
    image_mean=[0.0] * 3,  # a dark background is close to zero, so that what differs between images stands out
    image_std=[0.5] * 3,
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt: which color the shapes of an image have, how many they are, or what two digits add up to."""

    source: str
    question: tuple[str, ...]
    answer: str
    image: npt.NDArray[np.uint8] | None = None  # [H, W, 3], as drawn

    @classmethod
    def draw(cls, source: str, rng: random.Random) -> Problem:
        if source == "sum":
            a, b = rng.randrange(3), rng.randrange(3)
            return cls(source, (str(a), "+", str(b), "?"), str(a + b))
        if source == "color":
            color, (rows, columns) = rng.choice(list(COLORS)), rng.choice([(1, 2), (2, 1), (2, 2)])
            image = drawing(rows, columns, rng.randint(1, rows * columns), COLORS[color], rng)
            return cls(source, ("color", "?"), color, image)
        count = rng.randint(1, 4)
        return cls(source, ("count", "?"), str(count), drawing(2, 2, count, WHITE, rng))

    def reward(self, response: Sequence[str]) -> float:
        """1 for the right word, less for each word too many. A wrong sum that is a number has 0.2; a wrong color has
        nothing, because a policy that is paid for any color settles on one before it has learnt to look.

        >>> Problem("color", ("color", "?"), "red").reward(["red", "blue", "."])
        0.5
        """
        said = list(response[: response.index(".")] if "." in response else response)
        surplus = max(0, len(said) - 1)
        right = said[:1] == [self.answer]
        if self.source == "sum":
            credit = 1.0 if right else 0.2 if said and said[0] in DIGITS else 0.0
            return credit * (1 - max(0, surplus - RAMBLE) / LIMITS["sum"])
        return right / (1 + surplus)


def drawing(
    rows: int, columns: int, count: int, color: tuple[int, int, int], rng: random.Random
) -> npt.NDArray[np.uint8]:
    """Circles, squares and triangles in ``count`` cells of a grid, in some size that the processor will round."""
    height, width = rows * CELL + rng.randint(-3, 3), columns * CELL + rng.randint(-3, 3)
    image = Image.new("RGB", (width, height), (rng.randint(0, 15),) * 3)
    pen = ImageDraw.Draw(image)
    for cell in rng.sample(range(rows * columns), count):
        x, y = (cell % columns + 0.5) * width / columns, (cell // columns + 0.5) * height / rows
        r, shape = rng.uniform(7, 11), rng.choice(["circle", "square", "triangle"])
        if shape == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=color)
        elif shape == "square":
            pen.rectangle((x - r, y - r, x + r, y + r), fill=color)
        else:
            pen.polygon([(x - r, y + r), (x + r, y + r), (x, y - r)], fill=color)
    return np.asarray(image)


@dataclass(frozen=True, eq=False)
class Prompt:
    """A problem as a processor of text and images returns it, and its image as it is stored."""

    problem: Problem
    processed: dict[str, Tensor]  # input_ids [1, PROMPT_WIDTH]; with an image pixel_values and image_grid_thw
    media: tuple[kd.Media, ...]

    @classmethod
    def of(cls, problem: Problem) -> Prompt:
        shown: dict[str, Tensor] = {}
        media: tuple[kd.Media, ...] = ()
        words = list(problem.question)
        if problem.image is not None:
            shown = dict(processor(images=[problem.image], input_data_format="channels_last", return_tensors="pt"))
            tokens = len(shown["pixel_values"]) // MERGE**2
            words = [START, *[IMAGE] * tokens, END_OF_IMAGE, *words]
            media = (kd.Media.from_pixels(problem.image, tokens, processor),)
        words = ["_"] * (PROMPT_WIDTH - len(words)) + words
        return cls(problem, {"input_ids": torch.tensor([[VOCAB.index(word) for word in words]]), **shown}, media)

    def trajectory(self, id: str, group: str, version: int, response: Response, model: Any) -> kd.Trajectory:
        """One response, rewarded. The responses of a group share the image: it is stored once."""
        return kd.integrations.huggingface.trajectory(
            id,
            group,
            version,
            self.processed,
            response.ids,
            model=model,
            tokens={"logprobs": torch.tensor(response.logprobs)},
            values={"reward": self.problem.reward([VOCAB[i] for i in response.ids])},
            attributes={"source": self.problem.source},
            media=self.media,
        )


def logical_bytes(prompt: Prompt, group: Sequence[kd.Trajectory]) -> int:
    """What the group is as the model takes it: every trajectory with its columns and float32 pixels of its own."""
    own = sum(tensor.nbytes for name, tensor in prompt.processed.items() if name != "input_ids")
    return sum(own + sum(column.nbytes for column in trajectory.tokens.values()) for trajectory in group)


def prefill(model: Any, prompts: Sequence[Prompt]) -> tuple[dict[str, Tensor], Tensor]:
    """What the model takes for these P prompts, each image once, and the positions of the first sampled tokens [P]."""
    inputs = {"input_ids": torch.cat([prompt.processed["input_ids"] for prompt in prompts])}
    for name in ("pixel_values", "image_grid_thw"):
        if shown := [prompt.processed[name] for prompt in prompts if name in prompt.processed]:
            inputs[name] = torch.cat(shown)
    kinds = {"mm_token_type_ids": (inputs["input_ids"] == IMAGE_ID).int()}  # transformers 5
    known = inspect.signature(model.model.get_rope_index).parameters
    positions, _ = model.model.get_rope_index(
        input_ids=inputs["input_ids"],
        image_grid_thw=inputs.get("image_grid_thw"),
        attention_mask=torch.ones_like(inputs["input_ids"]),
        **{name: value for name, value in kinds.items() if name in known},
    )
    return {**inputs, "position_ids": positions}, positions.amax((0, 2)) + 1


def build_model(seed: int) -> Any:
    """A Qwen2.5-VL of 326,000 parameters, randomly initialised: the same on every process that has the same seed."""
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}  # of the 8 frequencies of a head
    text = {
        "vocab_size": len(VOCAB),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,  # about 1/sqrt(hidden_size): a small model learns slowly from the usual 0.02
        "rope_parameters": {**rope, "rope_theta": 1e4},
        "rope_scaling": {**rope},  # the name in transformers 4
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    tower = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 64,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "window_size": 4 * CELL,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.1,
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=IMAGE_ID,
        video_token_id=VOCAB.index(VIDEO),
        vision_start_token_id=VOCAB.index(START),
        vision_end_token_id=VOCAB.index(END_OF_IMAGE),
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)
