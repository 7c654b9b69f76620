"""Hugging Face vision-language models: the tower as an encoder, features in place of pixels, trajectories.

Checked with Qwen2-VL, Qwen2.5-VL, Qwen3-VL, LLaVA and InternVL on transformers 4.57 and 5; other models work where
``get_image_features`` and ``image_token_id`` mean the same.
"""

from __future__ import annotations

from knit_data.integrations.huggingface.features import attach, image_features
from knit_data.integrations.huggingface.processed import trajectory

__all__ = ["attach", "image_features", "trajectory"]
