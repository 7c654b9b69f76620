"""Tiny real vision-language models with random weights, images for them, and what they say without knit_data.

Nothing is downloaded. ``build(family, dtype)`` and ``images(family, count)`` belong together; ``naive`` is the oracle.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import knit_data as kd

FAMILIES = ("qwen2", "qwen2_5", "qwen3", "llava", "internvl")
MROPE = ("qwen2", "qwen2_5", "qwen3")
VOCABULARY = 64
IMAGE, VIDEO, START, END = 5, 6, 7, 8  # ids; text uses 10 and up
PATCH, SIDE = 4, 16  # pixels; the families without grids take SIDE x SIDE images
ROW_TOKENS = {"llava": 16, "internvl": 4}  # of one SIDE x SIDE image


class Float64(TorchFunctionMode):
    """Everything in float64, for models too: transformers upcasts to float32 by name in norms and rotary embeddings.

    Build the model inside the mode as well, because rotary frequencies are computed then. What a backward runs again
    (checkpoints) must enter the mode itself: it is off during a backward. Read micro-batches outside: the
    float32 columns of an arena are float32.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        return func(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()})


def config(family: str, attention: str = "sdpa") -> Any:
    """Two layers each side, 32 wide."""
    import transformers

    text: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    tower: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "patch_size": PATCH}
    ids: dict[str, Any] = {"image_token_id": IMAGE}
    if family in MROPE:
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
        text |= {
            "rope_parameters": {**rope, "rope_theta": 1e4},
            "rope_scaling": {**rope},
        }  # 5 reads one, 4.57 the other
        tower |= {"depth": 2, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32}
        ids |= {"video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
    else:
        tower |= {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE}
        ids |= {"image_seq_length": ROW_TOKENS[family]}
    if family == "qwen2":
        tower |= {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
        made = transformers.Qwen2VLConfig(text_config=text, vision_config=tower, **ids)
    elif family == "qwen2_5":
        tower |= {"window_size": 16, "fullatt_block_indexes": [1]}
        made = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=tower, **ids)
    elif family == "qwen3":
        text |= {"head_dim": 16}
        text["rope_parameters"]["mrope_interleaved"] = text["rope_scaling"]["mrope_interleaved"] = True
        tower |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
        made = transformers.Qwen3VLConfig(text_config=text, vision_config=tower, **ids)
    elif family == "llava":
        tower = transformers.CLIPVisionConfig(projection_dim=32, **tower)
        made = transformers.LlavaConfig(vision_config=tower, text_config=transformers.LlamaConfig(**text), **ids)
    else:
        tower = transformers.InternVLVisionConfig(**tower)
        made = transformers.InternVLConfig(vision_config=tower, text_config=transformers.Qwen2Config(**text), **ids)
    made._attn_implementation = attention
    return made


def build(family: str, dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> Any:
    """The same weights at every call. For float64, call it and the model under ``Float64()``."""
    import transformers

    with torch.random.fork_rng():
        model = transformers.AutoModelForImageTextToText.from_config(config(family, attention))
        torch.manual_seed(0)  # here, because the initialisation draws other numbers in float64
        with torch.no_grad():  # as it initialises, images would hardly move the logits
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.15 + (parameter.ndim == 1))
    return model.to(dtype).train()


def images(family: str, count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[kd.Media]:
    """Distinct images; those with grids have different sizes in turn, 4, 6 and 9 tokens."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for i in range(count):
        if family in MROPE:
            height, width = ((4, 4), (4, 6), (6, 6))[i % 3]
            pixels = torch.randn(height * width, 3 * 2 * PATCH * PATCH, generator=generator)
            tensors = {"pixel_values": pixels.to(dtype), "image_grid_thw": torch.tensor([[1, height, width]])}
            out.append(kd.Media(tensors, height * width // 4, patches=height * width))
        else:
            pixels = torch.randn(1, 3, SIDE, SIDE, generator=generator).to(dtype)
            out.append(kd.Media({"pixel_values": pixels}, ROW_TOKENS[family], patches=(SIDE // PATCH) ** 2))
    return out


def rollouts(family: str, media: Sequence[kd.Media], per_group: int = 2, seed: int = 1) -> list[kd.Trajectory]:
    """Group i asks about image i, every second one about image i + 1 too; responses of 3 to 8 ids."""
    generator, made, settings = torch.Generator().manual_seed(seed), [], config(family)

    def text(n: int) -> list[int]:
        return torch.randint(10, VOCABULARY, (n,), generator=generator).tolist()

    for i in range(len(media)):
        shown = [media[i], media[(i + 1) % len(media)]][: 1 + i % 2]
        prompt = text(3)
        for medium in shown:
            prompt += [START, *[IMAGE] * medium.tokens, END, *text(2)]
        grids = [medium.tensors["image_grid_thw"] for medium in shown if "image_grid_thw" in medium.tensors]
        processed = {"input_ids": [prompt], **({"image_grid_thw": torch.cat(grids)} if grids else {})}
        for j in range(per_group):
            response = text(int(torch.randint(3, 9, (1,), generator=generator)))
            made.append(
                kd.integrations.huggingface.trajectory(
                    f"g{i}/{j}", f"g{i}", 0, processed, response, model=settings, media=shown
                )
            )
    return made


def joined(media: Sequence[kd.Media]) -> dict[str, Tensor]:
    """What an encoder is called with: each tensor concatenated over the images."""
    return {name: torch.cat([medium.tensors[name] for medium in media]) for name in media[0].tensors}


def naive(model: nn.Module, trajectory: kd.Trajectory) -> Tensor:
    """Logits [n, vocabulary] of one trajectory alone, with pixels, the model working out positions by itself."""
    ids = trajectory.tokens["input_ids"][None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    if trajectory.media:
        inputs |= joined([ref.media for ref in trajectory.media])
    if "mm_token_type_ids" in inspect.signature(type(model).forward).parameters:
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    return model(**inputs).logits[0]
