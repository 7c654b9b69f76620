"""What one forward and backward takes: a mapping of names to tensors, and what belongs to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knit_data import ops
from knit_data.errors import InvalidArgument
from knit_data.infos import Array, InfoTable, TrajectoryInfo
from knit_data.media import MediaBatch
from knit_data.ops.tables import table_of


@dataclass(frozen=True, eq=False)
class MicroBatch(Mapping[str, Tensor]):
    """Trajectories of one rank, packed ``[T, ...]`` or padded ``[B, L, ...]``.

    Always there: ``input_ids``; ``labels`` (int64, ``labels[t] = input_ids[t + 1]`` inside a trajectory; -100 at its
    last token, on padding, and where ``targets("loss_mask")`` is 0); ``position_ids``; ``loss_mask`` (float32);
    ``cu_seqlens`` (int32, as attention takes them: packed, bounds that include what ``Padding`` adds, at the end as a
    sequence of its own; padded, of the tokens that are there); ``attention_mask`` (int64, padded only). Then every
    column, and every value ``[n, *shape]`` in the order of ``infos``.

    ids [5, 6, 7] with loss mask [0, 0, 1]: labels [-100, 7, -100], ``targets("loss_mask")`` [0, 1, 0].
    """

    tensors: Mapping[str, Tensor]
    table: InfoTable
    begin: int  # of its rows there
    layout: str
    max_seqlen: int
    is_last: bool  # of its pass over the mini-batch
    columns: frozenset[str]  # names with an entry per token
    rows: Tensor  # int32, per slot: which of infos it belongs to; len(infos) on padding
    starts: Array  # int64 [n], on the host: the slot of each trajectory's first token
    lengths: Array  # int64 [n], on the host: its tokens
    longest: int  # of these, at least 1
    masked: tuple[str, ...] = ()  # ids whose data was corrupt and is masked out
    media: MediaBatch = field(default_factory=MediaBatch)
    restarts: bool = True  # position_ids rise by one inside each trajectory and only there
    model_ids: Tensor | None = None  # input_ids without placeholders that were sampled; None: there are none

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise KeyError(f"{name!r} is not in this micro-batch; it has {sorted(self.tensors)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @cached_property
    def infos(self) -> tuple[TrajectoryInfo, ...]:
        """What is known of its trajectories, in the order of their values."""
        return tuple(TrajectoryInfo(self.table, i) for i in range(self.begin, self.begin + len(self.starts)))

    @property
    def is_padding(self) -> bool:
        """Holds no trajectory: two tokens that keep this rank in step with the others."""
        return not len(self.starts)

    def targets(self, name: str) -> Tensor:
        """A column moved to the position whose logits predict it, which is the labels' alignment.

        ``targets(x)[t] = x[t + 1]`` inside a trajectory, 0 at its last token and on padding.
        """
        if name not in self.columns:
            raise InvalidArgument(f"targets({name!r}): not a per-token column; those are {sorted(self.columns)}.")
        column = self.tensors[name]
        flat = column if self.layout == "packed" else column.flatten(0, 1)
        inside = (self.rows[:-1] == self.rows[1:]) & (self.rows[:-1] < len(self.starts))
        out = torch.zeros_like(flat)
        shape = [-1, *[1] * (flat.ndim - 1)]
        out[:-1] = torch.where(inside.view(shape), flat[1:], torch.zeros((), dtype=flat.dtype, device=flat.device))
        return out.view(column.shape)

    def to_tokens(self, name: str) -> Tensor:
        """A per-trajectory value on its tokens: ``[T, *shape]`` or ``[B, L, *shape]``, 0 on padding."""
        if name in self.columns or name not in self.tensors or name in ("labels", "cu_seqlens", "attention_mask"):
            known = sorted(set(self.tensors) - self.columns - {"labels", "cu_seqlens", "attention_mask"})
            raise InvalidArgument(f"to_tokens({name!r}): not a per-trajectory value; those are {known}.")
        value = self.tensors[name]
        filled = torch.cat([value, value.new_zeros(1, *value.shape[1:])])
        return filled.index_select(0, self.rows).view(*self.tensors["input_ids"].shape, *value.shape[1:])

    def unpack(self, tokens: Tensor) -> Tensor:
        """A per-token tensor with a row for each trajectory, in the order of ``infos``, zeros behind its tokens.

        ``[T, *]`` or ``[B, L, *]`` -> ``[n, tokens of the longest, *]``, with gradients, and on every run the same
        bits; ``[0, 1, *]`` of a padding micro-batch. For what is done along a sequence, in either layout: log-ratios
        [a b c d e] of trajectories of 2 and 3 tokens are [[a b 0] [c d e]], so ``.sum(1)`` is one number each.
        """
        shape = self.tensors["input_ids"].shape
        if not isinstance(tokens, Tensor) or tokens.shape[: len(shape)] != shape:
            found = [*tokens.shape] if isinstance(tokens, Tensor) else f"{tokens!r:.80}"
            raise InvalidArgument(
                f"unpack: needs a tensor {[*shape]} + [*], an entry for each of input_ids, found {found}; of what a "
                "packed Hugging Face model returns, [1, T, *], pass x[0]."
            )
        n, longest = len(self.starts), self.longest
        segments = table_of(0, self.starts, self.lengths, np.arange(n) * longest)
        flat: Tensor = ops.gather_segments(tokens.flatten(0, len(shape) - 1), segments, n * longest)
        return flat.view(n, longest, *flat.shape[1:])

    def pack(self, rows: Tensor) -> Tensor:
        """The way back: ``[n, tokens of the longest, *]`` -> ``[T, *]`` or ``[B, L, *]``, zeros on padding."""
        n, longest = len(self.starts), self.longest
        if not isinstance(rows, Tensor) or rows.shape[:2] != (n, longest):
            found = [*rows.shape] if isinstance(rows, Tensor) else f"{rows!r:.80}"
            raise InvalidArgument(f"pack: needs a tensor [{n}, {longest}, *], as unpack returns it, found {found}.")
        shape = self.tensors["input_ids"].shape
        segments = table_of(0, np.arange(n) * longest, self.lengths, self.starts)
        flat: Tensor = ops.gather_segments(rows.flatten(0, 1), segments, shape.numel())
        return flat.view(*shape, *flat.shape[1:])

    def prompts_have(self, token_ids: Iterable[int]) -> Tensor:
        """Whether any of these ids stands before the first token with a loss of a trajectory: bool, on the device."""
        ids, rows = self.tensors["input_ids"].reshape(-1), self.rows.long()
        slots, n = torch.arange(len(ids), device=ids.device), len(self.starts)
        weighed = torch.where(self.tensors["loss_mask"].reshape(-1) != 0, slots, len(ids))
        first = torch.full((n + 1,), len(ids), device=ids.device).scatter_reduce(0, rows, weighed, "amin")[rows]
        prompt = (slots < first) & (first < len(ids)) & (rows < n)
        found = torch.zeros((), dtype=torch.bool, device=ids.device)
        for known in token_ids:
            found = found | ((ids.long() == known) & prompt).any()
        return found

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments for a Hugging Face model.

        Packed, a batch dimension of 1 is added and ``position_ids`` that restart keep trajectories apart (there is no
        attention mask). Positions of three axes lead with them, ``[3, B, L]``; packed, the plain ones that restart
        come first, ``[4, 1, T]``. No labels: the model would shift them again. A sampled placeholder, which no medium
        fills, is the pad id here: a model that looks for placeholders would put features in the wrong place. (Which ids
        are placeholders is known from the first mini-batch with media on.)
        """
        self.media.marks.add("inputs")
        ids, positions = self.tensors["input_ids"], self.tensors["position_ids"]
        ids = ids if self.model_ids is None else self.model_ids
        if positions.ndim > ids.ndim:
            positions = positions.movedim(-1, 0)
            if self.layout == "packed":
                positions = torch.cat([self._restarting(positions.dtype)[None], positions])
        if ids.dtype not in (torch.int32, torch.int64):
            ids = ids.long()  # embeddings take no narrower ones
        if self.layout == "packed" and not self.restarts:
            raise InvalidArgument(
                "model_inputs(): the stored position_ids do not restart at each packed trajectory, or do not rise by "
                "one inside it, and nothing else keeps trajectories apart. Store positions that do, leave them out, "
                "or use layout='padded'."
            )
        if self.layout == "padded":
            inputs = {"input_ids": ids, "attention_mask": self.tensors["attention_mask"], "position_ids": positions}
            return {**inputs, "use_cache": False}
        return {"input_ids": ids[None], "position_ids": positions.unsqueeze(-2), "use_cache": False}

    def _restarting(self, dtype: torch.dtype) -> Tensor:
        """0, 1, 2, … in every packed extent."""
        ends, total = self.tensors["cu_seqlens"], len(self.tensors["input_ids"])
        begin = ends[:-1].repeat_interleave(ends.diff(), output_size=total)  # its size is known: no wait for the device
        return torch.arange(total, dtype=dtype, device=ends.device) - begin
