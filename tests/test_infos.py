"""The columnar table against plain Python lists; its bytes; fingerprints."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import trajectory
from strategies import groups, shapes

import knit_data as kd
from knit_data.errors import CorruptData
from knit_data.infos import InfoTable, Ragged, Schema
from knit_data.store.segment import encode

ROWS = st.lists(st.lists(st.integers(-5, 5), max_size=4), max_size=6)


def ragged(rows: Sequence[Sequence[int]]) -> Ragged:
    flat = [x for row in rows for x in row]
    return Ragged.of_lengths(np.array(flat, np.int64), np.array([len(row) for row in rows], np.int64))


def lists(r: Ragged) -> list[list[int]]:
    return [r.row(i).tolist() for i in range(len(r))]


def table_of(members: Sequence[kd.Trajectory], writer: int = 0, segment: int = 0) -> InfoTable:
    return encode(members, writer=writer, segment=segment, grouped=True).table


def described(table: InfoTable) -> list[dict[str, Any]]:
    """Each row as plain Python, its media by content instead of by number."""
    out = []
    for i, info in enumerate(table.infos()):
        row: dict[str, Any] = {k: (v.dtype.str, v[i].tolist()) for k, v in table.columns.items()}
        row |= {k: table.ragged[k].text(i) for k in ("id", "group", "attributes")}
        row["info"] = (info.id, info.group, dict(info.attributes), info.values, info.address)
        row["spans"] = [(medium(table, u), *span) for u, *span in table.ragged["spans"].row(i).tolist()]
        out.append(row)
    return out


def medium(table: InfoTable, u: int) -> dict[str, Any]:
    cells: dict[str, Any] = {k: v[u].tolist() for k, v in table.media.columns.items()}
    texts = {k: table.media.ragged[k].text(u) for k in ("kind", "parts")}
    return cells | texts | {"extents": table.media.ragged["extents"].row(u).tolist()}


@st.composite
def tables(draw: st.DrawFn, most: int = 3) -> list[InfoTable]:
    shape = draw(shapes())
    names = [f"g{i}" for i in range(draw(st.integers(1, most)))]
    return [
        table_of(draw(groups(name, shape, text=draw(st.booleans()))), writer=i % 2, segment=i)
        for i, name in enumerate(names)
    ]


# -- ragged rows -------------------------------------------------------------------------------------------------------


@given(ROWS, st.data())
def test_ragged_rows_are_taken_like_a_list(rows: list[list[int]], data: st.DataObject) -> None:
    r = ragged(rows)
    assert lists(r) == rows and len(r) == len(rows) and r.lengths.tolist() == [len(row) for row in rows]
    picks = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if rows else []
    assert lists(r.take(np.array(picks, np.int64))) == [rows[i] for i in picks]


@given(st.lists(ROWS, min_size=1, max_size=4))
def test_ragged_rows_are_concatenated_like_lists(parts: list[list[list[int]]]) -> None:
    assert lists(Ragged.concat([ragged(rows) for rows in parts])) == [row for rows in parts for row in rows]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=6))
def test_ragged_texts_come_back(texts: list[str]) -> None:
    r = Ragged.of_texts(texts)
    assert r.texts() == [r.text(i) for i in range(len(texts))] == texts


# -- tables ------------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(tables(), st.data())
def test_rows_are_concatenated_and_taken_like_lists(parts: list[InfoTable], data: st.DataObject) -> None:
    whole = InfoTable.concat(parts)
    rows = [row for part in parts for row in described(part)]
    assert described(whole) == rows and len(whole) == len(rows)
    picks = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6))
    taken = whole.take(np.array(picks, np.int64))
    assert described(taken) == [rows[i] for i in picks]
    assert described(whole) == rows, "take changed what it was taken from"
    used = {u for i in picks for u in whole.ragged["spans"].row(i)[:, 0].tolist()}
    assert len(taken.media) == len(used)
    again = data.draw(st.permutations(range(len(picks))))
    assert described(taken.take(np.array(again, np.int64))) == [rows[picks[i]] for i in again]


@settings(max_examples=50)
@given(tables(), st.text(st.characters(exclude_categories=["Cs"])), st.booleans())
def test_bytes_bring_back_the_table_and_the_note(parts: list[InfoTable], note: str, empty: bool) -> None:
    table = InfoTable.concat(parts)
    table = table.take(np.zeros(0, np.int64)) if empty else table
    back, found = InfoTable.from_bytes(table.to_bytes(note))
    assert (found, back.schema, described(back)) == (note, table.schema, described(table))
    assert len(back.media) == len(table.media)
    assert back.fingerprints() == table.fingerprints()
    assert InfoTable.concat([back, table]).ragged["id"].texts() == table.ragged["id"].texts() * 2


@settings(max_examples=50)
@given(tables(1), st.dictionaries(st.sampled_from(["len:x", "value.y", "é", "id", "media.z"]), st.just(0.5)))
def test_annotations_of_any_name_are_values(parts: list[InfoTable], names: dict[str, float]) -> None:
    names = {name: x for name, x in names.items() if name not in parts[0].value_names}  # admission refuses those
    table = parts[0].with_values({name: [i + x for i in range(len(parts[0]))] for name, x in names.items()})
    back, _ = InfoTable.from_bytes(table.to_bytes())
    for i, info in enumerate(back.infos()):
        assert info.values == parts[0][i].values | {name: i + x for name, x in names.items()}
    assert table.fingerprints() == parts[0].fingerprints()


def test_a_schema_comes_back_from_json() -> None:
    changes: dict[str, Any] = {"values": {"reward": 1.0, "é": torch.zeros(2, 3), "len:x": torch.tensor(3)}}
    schema = table_of([trajectory("a", **changes)]).schema
    assert Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema
    assert schema.scalars == (("len:x", "I64"), ("reward", "F32"))
    assert schema.names == ("input_ids", "logprobs", "é", "loss_mask")


# -- damage ------------------------------------------------------------------------------------------------------------


def test_every_flipped_bit_and_every_cut_of_a_message_is_noticed() -> None:
    data = table_of([trajectory("a")]).to_bytes("a note")
    for at in range(len(data)):
        for bit in (0, 7) if at % 16 else range(8):
            bad = bytearray(data)
            bad[at] ^= 1 << bit
            with pytest.raises(CorruptData, match="hashes to"):
                InfoTable.from_bytes(bytes(bad))
        with pytest.raises(CorruptData):
            InfoTable.from_bytes(data[:at])


@given(st.binary(max_size=200))
def test_bytes_of_another_origin_are_refused(body: bytes) -> None:
    with pytest.raises(CorruptData):
        InfoTable.from_bytes(body)
    with pytest.raises(CorruptData, match="not in this format"):
        InfoTable.from_bytes(body + xxhash.xxh3_64_digest(body))


@pytest.mark.parametrize(
    "meta", [None, {}, {"schema": "{}", "note": ""}, {"schema": "[1]", "note": ""}, {"schema": "{"}]
)
def test_safetensors_of_another_content_are_refused(meta: dict[str, str] | None) -> None:
    body = safetensors.numpy.save({"x": np.zeros(3)}, meta)
    with pytest.raises(CorruptData, match="not in this format"):
        InfoTable.from_bytes(body + xxhash.xxh3_64_digest(body))


# -- fingerprints ------------------------------------------------------------------------------------------------------


def mark(given: kd.Trajectory, writer: int = 0) -> int:
    return table_of([given], writer, 7).fingerprints()[0]


def test_equal_content_has_equal_fingerprints_wherever_it_lies() -> None:
    media = [kd.MediaRef(kd.Media({"p": torch.arange(6)}, 2), [(0, 1), (3, 1)])]
    one, two = trajectory("a", media=media), trajectory("a", media=[dataclasses.replace(media[0])])
    assert mark(one) == mark(two, writer=3)
    alone, among = table_of([one]), table_of([trajectory("z"), trajectory("y", media=media), one])
    assert among.fingerprints()[2] == alone.fingerprints()[0]
    assert len(set(among.fingerprints())) == 3
    assert alone.take(np.zeros(0, np.int64)).fingerprints() == []


def test_any_other_content_has_another_fingerprint() -> None:
    base = trajectory("a", mean_policy_version=0.5, values={"reward": 1.0, "h": torch.zeros(2)})
    pixels = kd.Media({"p": torch.arange(6)}, 2)

    def changed(**fields: Any) -> kd.Trajectory:
        return dataclasses.replace(base, **fields)

    def column(name: str, at: int, by: float) -> kd.Trajectory:
        tokens = {k: v.clone() for k, v in base.tokens.items()}
        tokens[name][at] += by
        return changed(tokens=tokens)

    masks = [torch.tensor([0, *bits]) for bits in ([1, 1, 1, 1], [1, 1, 1, 0], [0, 1, 1, 1])]
    others = [
        base,
        changed(group="h"),
        changed(attributes={"source": "mat"}),
        changed(attributes={"source": "math", "x": "y"}),
        changed(attributes={}),
        changed(policy_version=1, mean_policy_version=1.0),
        changed(mean_policy_version=0.75),
        changed(values={"reward": 2.0, "h": torch.zeros(2)}),
        changed(values={"reward": 1.0, "h": torch.tensor([0.0, 1.0])}),
        column("input_ids", 0, 1),
        column("input_ids", 4, 1),
        column("logprobs", 4, 0.5),
        *[changed(tokens={**base.tokens, "loss_mask": m.bool()}) for m in masks],
        *[changed(tokens={**base.tokens, "loss_mask": m / 2}) for m in masks],
        *[changed(media=[kd.MediaRef(pixels, spans)]) for spans in ([(0, 2)], [(1, 2)], [(0, 1), (1, 1)])],
        changed(media=[kd.MediaRef(dataclasses.replace(pixels, tensors={"p": torch.arange(6) + 1}), [(0, 2)])]),
        changed(media=[kd.MediaRef(dataclasses.replace(pixels, patches=3), [(0, 2)])]),
        changed(media=[kd.MediaRef(pixels, [(0, 2)]), kd.MediaRef(pixels, [(2, 2)])]),
    ]
    assert len({mark(other) for other in others}) == len(others)
