"""How the examples sample: one prefill for each prompt, then all its responses side by side on a KV cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache

END = 0  # the id that ends a response, and pads


@dataclass(frozen=True, slots=True)
class Response:
    ids: list[int]
    logprobs: list[float]  # of each id, under the distribution that it was drawn from


@torch.no_grad()
def sample(
    model: nn.Module,
    prompts: Mapping[str, Tensor],
    next_positions: Tensor,
    limits: Sequence[int],
    size: int,
    placeholder: int | None = None,
) -> Iterator[tuple[int, list[Response]]]:
    """``size`` responses to each of P prompts at temperature 1, as many tokens as ``limits`` has for the prompt.

    ``prompts`` are the model's keyword arguments for the prompts, ``input_ids`` [P, W] and perhaps images;
    ``next_positions`` int64 [P] those of the first sampled tokens. Yields (index of the prompt, its responses) at the
    moment when the longest of them has ended: a group waits for its tail, and its rows then leave the batch.
    """
    cache = DynamicCache()
    cached = {("cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"): cache}
    most = torch.tensor(limits)
    ids = torch.zeros(len(limits), size, max(limits), dtype=torch.long)
    logprobs = torch.zeros(ids.shape)
    lengths = torch.zeros(len(limits), size, dtype=torch.long)
    ended = torch.zeros(len(limits), size, dtype=torch.bool)
    running = torch.arange(len(limits))
    logits = model(**prompts, use_cache=True, **cached).logits[:, -1].repeat_interleave(size, 0)
    cache.batch_repeat_interleave(size)
    for step in range(max(limits)):
        logp = logits.float().log_softmax(-1)
        drawn = torch.multinomial(logp.exp(), 1)
        ids[running, :, step] = drawn.view(-1, size)
        logprobs[running, :, step] = logp.gather(1, drawn).view(-1, size)
        lengths[running] += ~ended[running]
        ended[running] |= (drawn.view(-1, size) == END) | (step + 1 >= most[running])[:, None]
        over = ended[running].all(1)
        if over.any():
            for i in running[over].tolist():
                yield i, [_response(ids[i, j], logprobs[i, j], n) for j, n in enumerate(lengths[i].tolist())]
            kept = (~over).repeat_interleave(size).nonzero()[:, 0]
            cache.batch_select_indices(kept)
            drawn, running = drawn[kept], running[~over]
        if not len(running):
            return
        if placeholder is not None:  # a sampled one has no image: the trainer's micro.model_inputs() does the same
            drawn = drawn.masked_fill(drawn == placeholder, END)
        positions = (next_positions[running] + step).repeat_interleave(size)[:, None]
        logits = model(input_ids=drawn, position_ids=positions, use_cache=True, **cached).logits[:, -1]


def _response(ids: Tensor, logprobs: Tensor, length: int) -> Response:
    return Response(ids[:length].tolist(), logprobs[:length].tolist())
