"""Which fields a micro-batch has, and where in its arena each begins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from knit_data.arena import ALIGN
from knit_data.errors import InvalidArgument
from knit_data.infos import Array, InfoTable
from knit_data.planning import Layout
from knit_data.store.head import torch_dtype

ROWS, SLOTS, MODEL, MASKS = "\0rows", "\0slots", "\0model", "\0masks"  # of our own; no column can have such a name
_BESIDE = {"labels", "position_ids", "cu_seqlens", "attention_mask"}  # always there, stored or not


@dataclass(frozen=True, eq=False)
class Field:
    """``[lead, *shape]``: one entry per slot, per row, per bound of ``cu_seqlens``, or per slot of media."""

    name: str
    dtype: torch.dtype
    lead: Literal["slots", "rows", "ends", "media"]
    shape: tuple[int, ...] = ()
    column: int | None = None  # which stored column its bytes come from
    mask_bytes: int = 0  # of rows with a stored loss mask of this width only

    @cached_property
    def kind(self) -> np.dtype[Any]:
        """What NumPy takes it for: it has no bfloat16, and bool could hold other bytes than 0 and 1."""
        raw: dict[torch.dtype, np.dtype[Any]] = {torch.bfloat16: np.dtype(np.int16), torch.bool: np.dtype(np.uint8)}
        return raw[self.dtype] if self.dtype in raw else torch.empty(0, dtype=self.dtype).numpy().dtype

    @cached_property
    def items(self) -> int:
        """In an entry."""
        return math.prod(self.shape)

    @cached_property
    def item_bytes(self) -> int:
        return self.dtype.itemsize * self.items


class Frame:
    """The fields of micro-batches of one schema, in the order of the arena.

    First what the consumer sees, wide elements first; then rows and media slots; then the ids for the model, which are
    seldom needed; then what stays on the host.
    """

    def __init__(self, fields: Sequence[Field]) -> None:
        self._fields = {f.name: f for f in fields}
        self._sizes = [(f.name, f.lead, f.item_bytes) for f in fields]
        self.dtypes = {f.dtype for f in fields}
        self.visible = [f for f in fields if not f.name.startswith("\0")]
        self.stored = [f for f in fields if f.column is not None]
        self.values = [f for f in fields if f.lead == "rows"]
        own = (ROWS, SLOTS, MODEL, MASKS, "input_ids", "loss_mask")
        self.padded = [f for f in self.stored if f.lead == "slots" and f.name not in own]
        self.own_positions = self["position_ids"].column is None
        computed = {"labels", "attention_mask"}
        self.per_token = frozenset(f.name for f in self.visible if f.lead == "slots" and f.name not in computed)
        # of the stored fields, as arrays
        self.columns = np.array([f.column for f in self.stored], np.int64)
        self.by_token = np.array([f.lead == "slots" for f in self.stored])
        self.item_bytes = np.array([f.item_bytes for f in self.stored], np.int64)
        self.token_bytes, self.value_bytes = self.item_bytes * self.by_token, self.item_bytes * ~self.by_token
        self.stores_values = not self.by_token.all()
        self.mask_bytes = np.array([f.mask_bytes for f in self.stored], np.int64)

    def __getitem__(self, name: str) -> Field:
        return self._fields[name]

    @classmethod
    def of(
        cls, table: InfoTable, layout: Layout, masks: frozenset[int], asked: frozenset[str] | None, models: bool
    ) -> Frame:
        """``masks``: the widths of stored loss masks; ``asked``: the columns and values that are wanted, None: all;
        ``models``: there may be placeholders to hide from a model."""
        schema, names = table.schema, _wanted(table, asked)
        out = [Field("labels", torch.int64, "slots"), Field("cu_seqlens", torch.int32, "ends")]
        if layout == "padded":
            out.append(Field("attention_mask", torch.int64, "slots"))
        if "position_ids" not in schema.names:
            out.append(Field("position_ids", torch.int64, "slots"))
        mask = len(schema.fields)
        if 4 in masks:
            out.append(Field("loss_mask", torch.float32, "slots", column=mask, mask_bytes=4))
        else:
            out.append(Field("loss_mask", torch.float32, "slots"))
        for c, f in enumerate(schema.fields):
            if f.name in names:
                out.append(Field(f.name, torch_dtype(f.dtype), "slots" if f.per_token else "rows", f.shape, c))
        for name in table.value_names:
            if name in names:
                out.append(Field(name, torch.from_numpy(table.columns[f"value.{name}"][:0]).dtype, "rows"))
        # every field starts aligned; wide elements first only to keep the order stable
        out.sort(key=lambda f: (-f.dtype.itemsize, f.name))
        out += [Field(ROWS, torch.int32, "slots"), Field(SLOTS, torch.int64, "media")]
        ids = next(f.dtype for f in out if f.name == "input_ids")
        out.append(Field(MODEL, ids, "slots", () if models else (0,)))
        if 1 in masks:
            out.append(Field(MASKS, torch.uint8, "slots", column=mask, mask_bytes=1))
        return cls(out)

    def place(self, counts: Mapping[str, int]) -> tuple[dict[str, int], int]:
        """The byte where each field begins, and the bytes of all; ``counts`` by lead: slots, rows, ends and media.

        Of labels (int64, slots) and cu_seqlens (int32, ends), with 5 slots and 3 ends: 0 and 64, 128 in all.
        """
        at, end = dict[str, int](), 0
        for name, lead, size in self._sizes:
            at[name] = end
            end += -(-counts[lead] * size // ALIGN) * ALIGN
        return at, end


def part(host: Array, f: Field, at: Mapping[str, int], count: int) -> Array:
    """A field without trailing dimensions, as an array."""
    begin = at[f.name]
    return host[begin : begin + count * f.kind.itemsize].view(f.kind)


def _wanted(table: InfoTable, asked: frozenset[str] | None) -> set[str]:
    have = {*table.schema.names, *table.value_names}
    if asked is None:
        return have
    if unknown := asked - have - _BESIDE:
        raise InvalidArgument(f"fields {sorted(unknown)} are not in this store; it has {sorted(have)}.")
    return {*asked, "input_ids", "loss_mask", "position_ids"} & have
