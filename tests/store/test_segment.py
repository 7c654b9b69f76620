"""One segment file: any safetensors tool opens it, everything comes back, and no damage goes unnoticed."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import trajectory
from strategies import groups, same_tensor, same_trajectory

import knit_data as kd
from knit_data.errors import CorruptData, KnitError, ShortRead
from knit_data.infos import Table
from knit_data.store.head import HEAD_GUESS, decode_head, head_size
from knit_data.store.segment import encode

KEY = "segments/w/00000000.safetensors"


def written(members: Sequence[kd.Trajectory]) -> bytes:
    return b"".join(encode(members, writer=0, segment=0, grouped=True).parts)


def stored(data: bytes) -> kd.TrajectoryStore:
    """A store that holds these bytes as the only segment."""
    store = kd.TrajectoryStore("memory://")
    store.writer("w")
    store.backend.create(KEY, [data])
    return store


def everything(store: kd.TrajectoryStore) -> list[kd.Trajectory]:
    return [store.read(info) for info in kd.TrajectoryStream(store, follow=False)]


def small() -> list[kd.Trajectory]:
    """A group in which every kind of byte occurs: padding, masks, values of both kinds, media in two spans."""
    pixels = kd.Media({"pixels": torch.arange(5, dtype=torch.uint8), "grid": torch.tensor([1, 2])}, 2, patches=3)
    out = []
    for i in range(2):
        tokens = {"input_ids": torch.arange(3 + i), "loss_mask": torch.tensor([0.0, 1, 0.5, 1][: 3 + i])}
        values = {"reward": float(i), "h": torch.tensor([1, 2, 3], dtype=torch.int8)}
        refs = [kd.MediaRef(pixels, [(0, 1), (2, 1)])]
        out.append(kd.Trajectory(f"t{i}", "g", i, tokens, values, refs, {"source": "vqa"}))
    return out


# -- what is written ---------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(groups())
def test_every_trajectory_comes_back_bit_by_bit(members: list[kd.Trajectory]) -> None:
    store = kd.TrajectoryStore("memory://")
    with store.writer("w") as writer:
        infos = writer.put_group(members)
    streamed = list(kd.TrajectoryStream(store, follow=False))
    assert [i.address for i in streamed] == [i.address for i in infos] == [(0, 0, i) for i in range(len(members))]
    for info, other, member in zip(infos, streamed, members, strict=True):
        same_trajectory(store.read(info), member)
        same_trajectory(store.read(other), member)
        masks = [m.tokens.get("loss_mask") for m in members]
        mask = member.tokens.get("loss_mask", torch.arange(info.n_tokens) > 0)
        assert info.n_tokens == len(member.tokens["input_ids"])
        assert info.loss_tokens == int((mask.float() != 0).sum())
        assert info.patches == sum(ref.media.cost for ref in member.media)
        assert ("loss_mask" in store.read(info).tokens) == any(m is not None for m in masks)


def _cells(table: Table) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    parts = {f"{k}.{x}": getattr(v, x) for k, v in table.ragged.items() for x in ("data", "ptr")}
    return {k: (v.dtype.str, v.shape, v.tobytes()) for k, v in {**table.columns, **parts}.items()}


@settings(max_examples=50)
@given(groups())
def test_the_writer_knows_what_readers_will_find(members: list[kd.Trajectory]) -> None:
    segment = encode(members, writer=3, segment=7, grouped=True)
    found = decode_head(bytes(segment.parts[0]), writer=3, segment=7)
    assert _cells(segment.table) == _cells(found) and _cells(segment.table.media) == _cells(found.media)
    assert segment.table.schema == found.schema


@settings(max_examples=50)
@given(groups())
def test_any_safetensors_tool_opens_a_segment(members: list[kd.Trajectory]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "segment.safetensors"
        file.write_bytes(written(members))
        found = safetensors.torch.load_file(file)
    for name, column in members[0].tokens.items():
        if name != "loss_mask":
            assert torch.equal(found[f"tokens.{name}"], torch.cat([m.tokens[name] for m in members])), name
            assert found[f"tokens.{name}"].dtype == column.dtype
    for name, value in members[0].values.items():
        assert isinstance(value, torch.Tensor)
        rows = [torch.as_tensor(m.values[name]) for m in members]
        if value.ndim:
            assert torch.equal(found[f"values.{name}"], torch.stack(rows)), name
        elif value.dtype not in (torch.float16, torch.bfloat16):
            assert torch.equal(found[f"info.value.{name}"], torch.stack(rows)), name
    assert found["info.n_tokens"].tolist() == [len(m.tokens["input_ids"]) for m in members]
    distinct = {ref.media.digest: ref.media for m in members for ref in m.media}
    for u, medium in enumerate(distinct.values()):
        assert bytes(found["media.digest"][u].tolist()).hex() == medium.digest
        for name, part in medium.tensors.items():
            assert torch.equal(found[f"medium.{u}.{name}"], part)
    assert not [name for name in found if name.startswith(f"medium.{len(distinct)}.")]


@settings(max_examples=50)
@given(groups())
def test_every_tensor_is_aligned_and_no_byte_lies_between(members: list[kd.Trajectory]) -> None:
    data = written(members)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    meta = header.pop("__metadata__")
    start, at = 8 + length, 0
    assert start % 64 == 0 and (start + int(meta["info_bytes"])) % 64 == 0
    sizes = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}
    for spec in sorted(header.values(), key=lambda spec: spec["data_offsets"]):
        begin, end = spec["data_offsets"]
        size = sizes.get(spec["dtype"], 1)
        assert begin == at and (start + begin) % size == 0 and end - begin == size * math.prod(spec["shape"])
        at = end
    assert start + at == len(data) == start + int(meta["bytes"])


def test_a_medium_is_stored_once_however_often_it_is_used() -> None:
    pixels = torch.arange(30_000)

    def member(i: int) -> kd.Trajectory:
        refs = [kd.MediaRef(kd.Media({"p": pixels.clone()}, 2), [(2 * k, 2)]) for k in range(2)]
        return trajectory(f"t{i}", media=refs)

    data = written([member(i) for i in range(5)])
    assert 240_000 < len(data) < 250_000
    found = everything(stored(data))
    assert [len(t.media) for t in found] == [2] * 5
    assert all(torch.equal(ref.media.tensors["p"], pixels) for t in found for ref in t.media)


def test_a_group_of_usual_size_costs_less_than_two_percent() -> None:
    members = []
    for i in range(8):
        n = 1760
        tokens = {"input_ids": torch.arange(n), "logprobs": torch.zeros(n), "loss_mask": torch.arange(n) > 200}
        members.append(kd.Trajectory(f"q/{i}", "q", 3, tokens, {"reward": 1.0}, attributes={"source": "math"}))
    payload = 8 * 1760 * (8 + 4 + 1)
    assert len(written(members)) < payload * 1.02


def test_heads_beyond_the_first_read_come_back() -> None:
    many = [trajectory(f"t{i:04d}", n=2 + i % 3) for i in range(2000)]
    parts = {f"part-{k:04d}": torch.tensor([k]) for k in range(1500)}
    images = [trajectory("t", media=[kd.MediaRef(kd.Media(parts, 1), [(0, 1)])])]
    for members, long_header in ((many, False), (images, True)):
        data = written(members)
        assert head_size(data, "") > HEAD_GUESS
        assert (int.from_bytes(data[:8], "little") > HEAD_GUESS) == long_header
        found = everything(stored(data))
        assert len(found) == len(members)
        for back, member in zip(found[::97], members[::97], strict=True):
            same_trajectory(
                back, kd.Trajectory(**vars(member) | {"values": {"reward": torch.tensor(member.values["reward"])}})
            )


def test_fields_choose_what_is_read() -> None:
    store = stored(written(small()))
    info = list(kd.TrajectoryStream(store, follow=False))[1]
    assert store.read(info, ()).tokens == {} and store.read(info, ()).values == {}
    some = store.read(info, ["h", "loss_mask"])
    assert list(some.tokens) == ["loss_mask"] and list(some.values) == ["h"]
    assert store.read(info, ["reward"]).values == {"reward": 1.0}
    with pytest.raises(kd.KnitError, match=r"\['other'\].*'input_ids', 'loss_mask', 'reward'"):
        store.read(info, ["other", "h"])


# -- damage ------------------------------------------------------------------------------------------------------------


def detected(data: bytes | bytearray, *kinds: type[KnitError]) -> None:
    with pytest.raises(kinds or CorruptData):
        everything(stored(bytes(data)))


def test_every_flipped_bit_of_a_small_file_is_noticed() -> None:
    data = written(small())
    assert len(everything(stored(data))) == 2
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1 << at % 8
        detected(bad, CorruptData, ShortRead)


@settings(max_examples=50)
@given(groups(), st.data())
def test_a_flipped_bit_is_noticed_wherever_it_is(members: list[kd.Trajectory], data: st.DataObject) -> None:
    bad = bytearray(written(members))
    bad[data.draw(st.integers(0, len(bad) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    detected(bad, CorruptData, ShortRead)


@given(st.data())
def test_rewritten_ranges_are_noticed(data: st.DataObject) -> None:
    whole = written(small())
    at = data.draw(st.integers(0, len(whole) - 1))
    noise = data.draw(st.binary(min_size=1, max_size=40))
    bad = (whole[:at] + noise + whole[at + len(noise) :])[: len(whole)]
    if bad != whole:
        detected(bad, CorruptData, ShortRead)


def test_every_truncation_is_noticed() -> None:
    data = written(small())
    for length in range(len(data)):
        detected(data[:length], CorruptData, ShortRead)


def test_a_damaged_payload_is_named() -> None:
    data = written(small())
    store = stored(data)
    first, second = kd.TrajectoryStream(store, follow=False)
    column = int(second.table.columns["offsets"][1, second.table.schema.names.index("input_ids")])
    medium = int(second.table.media.ragged["extents"].row(0)[0, 0])
    for at, field, text in ((column, "input_ids", "input_ids of 't1'"), (medium, "h", "medium 0 of 't1'")):
        bad = bytearray(data)
        bad[at] ^= 1
        store = stored(bytes(bad))
        with pytest.raises(CorruptData, match=f"{KEY}: {text}.*damaged after it was written"):
            store.read(second, [field])
        if field == "input_ids":
            same_tensor(store.read(first, [field]).tokens[field], small()[0].tokens[field])


@pytest.mark.parametrize("found", [b"", b"x", b"not a segment, but long enough to be one" * 9, bytes(5000)])
def test_files_of_another_kind_are_refused(found: bytes) -> None:
    with pytest.raises(CorruptData, match="not a knit_data segment"):
        everything(stored(found))
    with pytest.raises(CorruptData, match="not a knit_data segment"):
        everything(stored(safetensors.torch.save({"a": torch.zeros(30_000)})))


def test_a_segment_of_another_version_is_refused() -> None:
    data = written(small()).replace(b"knit_data.segment.1", b"knit_data.segment.2")
    with pytest.raises(CorruptData, match=r"format 'knit_data.segment.2', this version reads 'knit_data.segment.1'"):
        everything(stored(data))
