"""What a put refuses, and that it then writes nothing; what it takes; the content key of media."""

from __future__ import annotations

import dataclasses
import doctest
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from makers import group, trajectory
from torch import Tensor

import knit_data as kd
from knit_data import trajectory as trajectory_module
from knit_data.errors import InvalidTrajectory
from knit_data.trajectory import DTYPES, check_group, is_finite

IDS = torch.tensor([5, 6, 7, 8])
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def columns(**changes: Tensor | Any) -> dict[str, Any]:
    return {"tokens": {"input_ids": IDS, **changes}}


def image(tokens: int = 2, **changes: Any) -> kd.Media:
    return kd.Media(**{"tensors": {"pixels": torch.zeros(2, 3)}, "tokens": tokens, **changes})


def refs(*spans: Any, **changes: Any) -> dict[str, Any]:
    return {**columns(), "media": [kd.MediaRef(image(**changes), spans)]}


def refused(members: Sequence[Any], *texts: str, store: kd.TrajectoryStore | None = None) -> None:
    """The put raises with all these texts and leaves no byte behind."""
    store = store or kd.TrajectoryStore("memory://")
    writer = store.writer("w")
    keys = ["schema.json", store.segment_key("w", 0), store.segment_key("w", 1)]
    before = store.exists(keys)
    with pytest.raises(InvalidTrajectory) as raised:
        writer.put_group(members)
    for text in texts:
        assert text in str(raised.value)
    assert store.exists(keys) == before


# -- one trajectory ----------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], Sequence[str]]] = {
    "other length": (columns(logprobs=torch.zeros(3)), ["'logprobs'", "[3]", "4 tokens", "fill with 0"]),
    "0-d column": (columns(logprobs=torch.tensor(1.0)), ["'logprobs'", "[]", "4 tokens"]),
    "no input_ids, names of two types": ({"tokens": {"ids": IDS, 3: IDS}}, ["input_ids", "['ids', 3]"]),
    "no input_ids": ({"tokens": {"ids": IDS}}, ["input_ids", "['ids']"]),
    "one token": ({"tokens": {"input_ids": torch.tensor([5])}}, ["n >= 2", "[1]"]),
    "no token": ({"tokens": {"input_ids": torch.zeros(0, dtype=torch.int64)}}, ["n >= 2", "[0]"]),
    "ids in two dimensions": ({"tokens": {"input_ids": torch.zeros(1, 4, dtype=torch.int64)}}, ["[n]", "[1, 4]"]),
    "float ids": ({"tokens": {"input_ids": torch.zeros(4)}}, ["integers", "float32"]),
    "bool ids": ({"tokens": {"input_ids": torch.zeros(4, dtype=torch.bool)}}, ["integers", "torch.bool"]),
    "list of ids": ({"tokens": {"input_ids": [5, 6, 7]}}, ["integers", "list"]),
    "list as column": (columns(logprobs=[0.0] * 4), ["'logprobs'", "must be a tensor", "list"]),
    "tokens not a mapping": ({"tokens": [IDS]}, ["tokens must map names", "list"]),
    "values not a mapping": ({"values": [1.0]}, ["values must map names", "list"]),
    "attributes not a mapping": ({"attributes": "math"}, ["attributes must map names", "str"]),
    "first token has loss": (columns(loss_mask=torch.ones(4)), ["loss_mask[0]", "1.0", "nothing precedes"]),
    "first token has bool loss": (columns(loss_mask=torch.ones(4).bool()), ["loss_mask[0]", "True"]),
    "negative mask": (columns(loss_mask=torch.tensor([0.0, 1, -0.5, 1])), ["no entry negative", "-0.5"]),
    "integer mask": (columns(loss_mask=torch.tensor([0, 1, 1, 1])), ["bool or float", "torch.int64", "[4]"]),
    "mask in two dimensions": (columns(loss_mask=torch.zeros(4, 2)), ["of shape [4]", "[4, 2]"]),
    "mask too short": (columns(loss_mask=torch.zeros(3)), ["'loss_mask'", "[3]", "4 tokens"]),
    "mask too large for float32": (
        columns(loss_mask=torch.tensor([0.0, 1e300, 1, 1], dtype=torch.float64)),
        ["loss_mask as float32", "1 NaN or infinite of 4"],
    ),
    "positions in float": (columns(position_ids=torch.zeros(4)), ["position_ids", "torch.float32"]),
    "positions in two axes": (columns(position_ids=torch.zeros(4, 2).long()), ["[4] or [4, 3]", "[4, 2]"]),
    "labels": (columns(labels=IDS), ["'labels'", "rename"]),
    "cu_seqlens": (columns(cu_seqlens=IDS), ["'cu_seqlens'", "rename"]),
    "attention_mask": (columns(attention_mask=IDS), ["'attention_mask'", "rename"]),
    "value named labels": ({"values": {"labels": 1.0}}, ["'labels'", "rename"]),
    "value named as a column": ({"values": {"logprobs": 1.0}}, ["'logprobs'", "taken by a column"]),
    "value named loss_mask": ({"values": {"loss_mask": 1.0}}, ["'loss_mask'", "taken by a column"]),
    "value named position_ids": ({"values": {"position_ids": torch.zeros(3)}}, ["'position_ids'", "taken"]),
    "value is text": ({"values": {"reward": "1.0"}}, ["'reward'", "tensor or a number", "str"]),
    "value is None": ({"values": {"reward": None}}, ["'reward'", "tensor or a number", "NoneType"]),
    "value is nan": ({"values": {"reward": math.nan}}, ["'reward'", "1 NaN or infinite of 1", "drop"]),
    "value is infinite": ({"values": {"reward": -math.inf}}, ["'reward'", "NaN or infinite"]),
    "value beyond float32": ({"values": {"reward": 1e300}}, ["'reward'", "NaN or infinite"]),
    "value tensor holds nan": ({"values": {"h": torch.tensor([0.0, math.nan])}}, ["'h'", "1 NaN or infinite of 2"]),
    "empty value name": ({"values": {"": 1.0}}, ["value name ''", "is empty"]),
    "column name with NUL": (columns(**{"a\0": IDS}), ["column name", "control characters"]),
    "column name not text": ({"tokens": {"input_ids": IDS, 3: IDS}}, ["column name", "int 3"]),
    "sparse": (columns(x=torch.eye(4).to_sparse()), ["'x'", "torch.sparse_coo", "dense"]),
    "complex": (columns(x=torch.zeros(4, dtype=torch.complex64)), ["'x'", "torch.complex64"]),
    "fp8": (columns(x=torch.zeros(4).to(torch.float8_e4m3fn)), ["'x'", "torch.float8_e4m3fn"]),
    "uint16": (columns(x=torch.zeros(4, dtype=torch.uint16)), ["'x'", "torch.uint16"]),
    "meta": (columns(x=torch.zeros(4, device="meta")), ["'x'", "meta"]),
    "complex value": ({"values": {"h": torch.zeros(2, dtype=torch.complex64)}}, ["'h'", "torch.complex64"]),
    "negative version": ({"policy_version": -1}, ["policy_version", "-1"]),
    "bool version": ({"policy_version": True}, ["policy_version", "True"]),
    "float version": ({"policy_version": 1.0}, ["policy_version", "1.0"]),
    "text version": ({"policy_version": "3"}, ["policy_version", "'3'"]),
    "no version": ({"policy_version": None}, ["policy_version", "None"]),
    "huge version": ({"policy_version": 2**62}, ["policy_version", str(2**62)]),
    "mean below start": ({"policy_version": 4, "mean_policy_version": 3.5}, ["mean_policy_version", ">= ", "4", "3.5"]),
    "mean nan": ({"mean_policy_version": math.nan}, ["mean_policy_version", "nan"]),
    "mean infinite": ({"mean_policy_version": math.inf}, ["mean_policy_version", "inf"]),
    "mean text": ({"mean_policy_version": "3"}, ["mean_policy_version", "'3'"]),
    "attribute is a number": ({"attributes": {"level": 3}}, ["attribute 'level'", "int 3"]),
    "attribute is empty": ({"attributes": {"level": ""}}, ["attribute 'level'", "is empty"]),
    "attribute name is a number": ({"attributes": {3: "x"}}, ["attribute name", "int 3"]),
    "span past the end": (refs((3, 2)), ["media 0", "(3, 2)", "4 tokens"]),
    "span before the start": (refs((-1, 2)), ["media 0", "(-1, 2)"]),
    "span of nothing": (refs((1, 2), (3, 0)), ["media 0", "(3, 0)"]),
    "overlapping spans": (refs((0, 2), (1, 1), tokens=3), ["overlap at position 1"]),
    "spans shorter than the medium": (refs((1, 2), tokens=3), ["cover 2", "fills 3"]),
    "spans longer than the medium": (refs((1, 3)), ["cover 3", "fills 2"]),
    "no spans": (refs(), ["cover 0", "fills 2"]),
    "a span of floats": (refs((1.0, 2)), ["two ints", "(1.0, 2)"]),
    "a span of three": (refs((1, 2, 3)), ["two ints"]),
    "spans of ints": (refs(3, 2), ["spans must be a list of (start, length)", "(3, 2)"]),
    "a span of text": (refs("12"), ["spans must be", "'12'"]),
    "spans None": ({**columns(), "media": [kd.MediaRef(image(), None)]}, ["media 0", "spans must be", "found None"]),
    "one span alone": ({**columns(), "media": [kd.MediaRef(image(), 3)]}, ["spans must be", "found 3"]),
    "media None": ({**columns(), "media": None}, ["sequence of kd.MediaRef", "NoneType", "without images it is ()"]),
    "media one reference": ({**columns(), "media": kd.MediaRef(image(), [(0, 2)])}, ["sequence", "found MediaRef"]),
    "a reference to no medium": (
        {**columns(), "media": [kd.MediaRef(torch.zeros(2), [(0, 2)])]},
        ["media 0", "kd.Media", "found Tensor"],
    ),
    "no medium tokens": (refs(tokens=0), ["tokens >= 1", "tokens 0"]),
    "float medium tokens": (refs((0, 2), tokens=2.0), ["int tokens", "2.0"]),
    "medium tokens as text": (refs((0, 2), tokens="2"), ["int tokens", "'2'", "int(count)"]),
    "medium tokens None": (refs((0, 2), tokens=None), ["int tokens", "tokens None"]),
    "bool medium tokens": (refs((0, 1), tokens=True), ["int tokens", "tokens True"]),
    "no medium tensors": (refs((0, 2), tensors={}), ["media 0", "mapping of names to tensors", "an empty one"]),
    "medium tensors in a list": (refs((0, 2), tensors=[IDS]), ["media 0", "mapping of names to tensors", "found list"]),
    "medium tensors None": (refs((0, 2), tensors=None), ["mapping of names to tensors", "found NoneType"]),
    "a medium tensor is a list": (refs((0, 2), tensors={"p": [1]}), ["media 0", "'p'", "must be a tensor", "list"]),
    "a 0-d medium tensor": (
        refs((0, 2), tensors={"p": torch.tensor(1.0)}),
        ["media 0", "shape []", "first dim"],
    ),
    "float patches": (refs((0, 2), patches=2.0), ["int patches >= 0", "patches 2.0"]),
    "negative patches": (refs((0, 2), patches=-1), ["patches >= 0", "patches -1"]),
    "patches beyond int32": (refs((0, 2), patches=2**31), [str(2**31), "patches"]),
    "nan pixels": (refs((0, 2), tensors={"p": torch.tensor([math.nan])}), ["media 0", "'p'", "NaN"]),
    "sparse pixels": (refs((0, 2), tensors={"p": torch.eye(2).to_sparse()}), ["media 0", "'p'", "sparse"]),
    "empty medium kind": (refs((0, 2), kind=""), ["media 0", "kind", "is empty"]),
    "a medium without spans": ({**columns(), "media": [image()]}, ["media 0", "kd.MediaRef", "found Media"]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_trajectory_that_cannot_be_trained_on_is_refused_by_name(name: str) -> None:
    changes, texts = BAD[name]
    refused([trajectory("good", "g"), trajectory("the-bad-one", "g", **changes)], "'the-bad-one'", *texts)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_every_float_dtype_is_looked_through(dtype: torch.dtype, bad: float) -> None:
    column = torch.zeros(4, 2, dtype=dtype)
    column[2, 1] = bad
    refused([trajectory("t", **columns(x=column))], "'t'", "'x'", "1 NaN or infinite of 8")


@given(st.lists(st.sampled_from([0.0, 1.0, -3e38, 3e38, 6e4, math.nan, math.inf, -math.inf]), max_size=6))
def test_a_sum_tells_what_isfinite_tells(entries: list[float]) -> None:
    for dtype in FLOATS:
        column = torch.tensor(entries, dtype=torch.float64).to(dtype)
        assert is_finite(column) == bool(torch.isfinite(column).all())


def test_each_medium_of_a_group_is_looked_at() -> None:
    good, bad = image(), image(tensors={"p": torch.tensor([math.nan])})
    members = [trajectory(str(i), **columns(), media=[kd.MediaRef(m, [(0, 2)])]) for i, m in enumerate([good, good])]
    check_group(members)
    worse = [*members, trajectory("2", **columns(), media=[kd.MediaRef(bad, [(0, 2)])])]
    refused(worse, "'2'", "media 0", "'p'", "NaN")


def test_two_overlapping_media_are_refused() -> None:
    media = [kd.MediaRef(image(), [(0, 2)]), kd.MediaRef(image(kind="video"), [(1, 2)])]
    refused([trajectory("t", **columns(), media=media)], "'t'", "overlap at position 1")


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("", "is empty"),
        ("a\nb", "control characters"),
        ("a\0b", "control characters"),
        ("\x7f", "control characters"),
        ("\udc80", "control characters"),
        (" a", "outer spaces"),
        ("x" * 256, "longer than 255 bytes"),
        ("é" * 128, "longer than 255 bytes"),
        (7, "must be a string, found int 7"),
        (None, "must be a string, found NoneType None"),
        (b"a", "must be a string, found bytes"),
    ],
)
def test_an_id_unfit_as_a_name_is_refused(bad: Any, why: str) -> None:
    refused([dataclasses.replace(trajectory("x"), id=bad)], "trajectory id", why)
    refused([trajectory("x", group=bad)], "group of trajectory 'x'", why)


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "a b", "问题/7#3", "'\"\\", "info.id", "len:id", "value.x"])
def test_every_printable_name_is_taken_and_comes_back(name: str) -> None:
    store = kd.TrajectoryStore("memory://")
    given = (
        kd.Trajectory(name, name, 1, {"input_ids": IDS, name + "t": IDS.float()}, {name: 2.5}, attributes={name: name})
        if len(name) < 200
        else kd.Trajectory(name, name, 1, {"input_ids": IDS}, {name: 2.5}, attributes={name: name})
    )
    back = store.read(store.writer("w").put(given))
    assert (back.id, back.group, back.attributes, back.values) == (name, name, {name: name}, {name: 2.5})
    assert back.tokens.keys() == given.tokens.keys()


# -- a group -----------------------------------------------------------------------------------------------------------


def test_a_group_is_one_group() -> None:
    refused([], "at least one trajectory", "found none")
    refused(["x"], "kd.Trajectory", "found str")
    refused([trajectory("a", "g"), trajectory("b", "h")], "'b'", "'h'", "'g'", "one group at a time")
    refused([trajectory("a"), trajectory("b"), trajectory("a")], "'a'", "twice", "'g'")
    other = trajectory("b", attributes={"source": "code"})
    refused([trajectory("a"), other], "'b'", "{'source': 'code'}", "{'source': 'math'}")
    refused([trajectory("a"), trajectory("b", attributes={})], "'b'", "{}", "same for all members")


DIFFERENT: dict[str, tuple[dict[str, Any], Sequence[str]]] = {
    "column dtype": (columns(logprobs=torch.zeros(4).half()), ["logprobs: F16 ['n'] instead of F32 ['n']"]),
    "id dtype": (
        {"tokens": {"input_ids": IDS.int(), "logprobs": torch.zeros(4)}},
        ["input_ids: I32 ['n'] instead of I64 ['n']"],
    ),
    "trailing shape": (columns(logprobs=torch.zeros(4, 2)), ["logprobs: F32 ['n', 2] instead of F32 ['n']"]),
    "missing column": (columns(), ["logprobs: absent instead of F32 ['n']"]),
    "further column": (
        columns(logprobs=torch.zeros(4), entropy=torch.zeros(4)),
        ["entropy: F32 ['n'] instead of absent"],
    ),
    "value dtype": ({"values": {"reward": torch.tensor(1)}}, ["reward: I64 [] instead of F32 []"]),
    "value shape": ({"values": {"reward": torch.zeros(1)}}, ["reward: F32 [1] instead of F32 []"]),
    "missing value": ({"values": {}}, ["reward: absent instead of F32 []"]),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_one_field_has_one_dtype_and_shape_in_a_group_and_in_a_store(name: str) -> None:
    changes, texts = DIFFERENT[name]
    refused(
        [trajectory("a"), trajectory("b", **changes)], "'b'", "'a' of the same group", "fill what is missing", *texts
    )
    store = kd.TrajectoryStore("memory://")
    store.writer("first").put(trajectory("a"))
    refused([trajectory("b", **changes)], "'b'", "this store", "another store", *texts, store=store)


# -- what is taken -----------------------------------------------------------------------------------------------------


def round_trip(given: kd.Trajectory) -> kd.Trajectory:
    store = kd.TrajectoryStore("memory://")
    return store.read(store.writer("w").put(given))


def test_a_tensor_may_need_a_gradient_and_be_of_any_stride() -> None:
    grad = torch.arange(4.0, requires_grad=True)
    mask = torch.tensor([0.0, 1, 2, 3], requires_grad=True)
    wide = torch.arange(24.0).reshape(3, 8)
    tokens = {
        "input_ids": torch.arange(16)[::4],
        "loss_mask": mask * 1,
        "grad": grad * 2,
        "strided": wide[:, ::2].T,
        "repeated": torch.tensor([3.0]).expand(4),
        "negated": torch.tensor([1 + 2j] * 4).conj().imag,
    }
    back = round_trip(
        trajectory("t", tokens=tokens, values={"reward": grad.sum(), "one": torch.tensor([1j]).conj().imag})
    )
    assert back.tokens.keys() == tokens.keys()
    for name, tensor in tokens.items():
        assert torch.equal(back.tokens[name], tensor.detach()), name
        assert not back.tokens[name].requires_grad
    assert back.values["reward"] == 6.0
    one = back.values["one"]
    assert isinstance(one, Tensor) and torch.equal(one, torch.tensor([-1.0]))


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (3, 3.0),
        (True, 1.0),
        (0.1, np.float32(0.1).item()),
        (np.float64(0.1), np.float32(0.1).item()),
        (np.float32(0.1), np.float32(0.1).item()),
        (np.int64(7), 7.0),
        (torch.tensor(0.1, dtype=torch.bfloat16), 0.10009765625),
        (torch.tensor(0.1, dtype=torch.float16), 0.0999755859375),
        (torch.tensor(0.1, dtype=torch.float64), 0.1),
        (torch.tensor(2**62 + 1), 2**62 + 1),
        (torch.tensor(-3, dtype=torch.int16), -3),
        (torch.tensor(-3, dtype=torch.int8), -3),
        (torch.tensor(200, dtype=torch.uint8), 200),
        (torch.tensor(True), True),
    ],
)
def test_scalar_values_come_back_as_numbers(value: Any, stored: float) -> None:
    back = round_trip(trajectory("t", values={"reward": value})).values["reward"]
    assert back == stored and type(back) is type(stored)


@pytest.mark.parametrize(
    "number", [3, 0.5, True, np.float64(0.5), torch.tensor(0.5).half(), torch.tensor(0.5).bfloat16()]
)
def test_numbers_and_half_precision_scalars_become_float32(number: Any) -> None:
    store = kd.TrajectoryStore("memory://")
    info = store.writer("w").put(trajectory("t", values={"reward": number}))
    assert info.table.columns["value.reward"].dtype == np.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_by_bit(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 100, (4, 3), dtype=torch.int64).to(dtype)
    values = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    back = round_trip(trajectory("t", tokens={"input_ids": IDS, "x": bits}, values={"h": values}))
    h = back.values["h"]
    assert isinstance(h, Tensor)
    assert back.tokens["x"].dtype == h.dtype == dtype
    assert torch.equal(back.tokens["x"], bits) and torch.equal(h, values)


def test_without_a_mask_all_tokens_but_the_first_count() -> None:
    writer = kd.TrajectoryStore("memory://").writer("w")
    assert writer.put(trajectory("a", "a")).loss_tokens == 4
    assert writer.put(trajectory("b", "b", **_masked(torch.tensor([0.0, 0, 0.5, 2])))).loss_tokens == 2
    infos = writer.put_group([trajectory("c", "c"), trajectory("d", "c", **_masked(torch.tensor([0, 0, 1, 0]).bool()))])
    assert [info.loss_tokens for info in infos] == [4, 1]


def _masked(mask: Tensor) -> dict[str, Any]:
    return columns(loss_mask=mask, logprobs=torch.zeros(4))


def test_a_put_keeps_what_was_there_before_a_refusal() -> None:
    store = kd.TrajectoryStore("memory://")
    writer = store.writer("w")
    writer.put_group(group("g", 2))
    with pytest.raises(InvalidTrajectory):
        writer.put_group([*group("h", 2), trajectory("h/0", "h")])
    assert [i.address for i in writer.put_group(group("h", 2))] == [(0, 1, 0), (0, 1, 1)]


# -- media digests -----------------------------------------------------------------------------------------------------


def test_equal_content_has_equal_digests() -> None:
    pixels = torch.arange(24).reshape(4, 6)
    same = [
        kd.Media({"a": pixels, "b": pixels.float()}, 4),
        kd.Media({"b": pixels.float(), "a": pixels.clone()}, 4, "image", 4),
        kd.Media({"a": pixels.T.contiguous().T, "b": pixels.float()}, 4),
    ]
    assert len({m.digest for m in same}) == 1
    assert len(bytes.fromhex(same[0].digest)) == 32


def test_different_content_has_different_digests() -> None:
    zeros = torch.zeros(6, dtype=torch.uint8)
    media = [kd.Media({"a": zeros.reshape(shape)}, 1) for shape in [(6,), (2, 3), (3, 2), (1, 6), (6, 1), (1, 2, 3)]]
    media += [kd.Media({"a": torch.zeros(6, dtype=dtype)}, 1) for dtype in DTYPES if dtype != torch.uint8]
    media += [kd.Media({"a": torch.zeros(n, dtype=torch.uint8)}, 1) for n in (0, 5, 7, 48, 24, 12)]
    media += [kd.Media({"b": zeros}, 1), kd.Media({"a": zeros}, 2), kd.Media({"a": zeros}, 1, "video")]
    media += [kd.Media({"a": zeros}, 1, patches=2), kd.Media({"a": zeros[:3], "b": zeros[3:]}, 1)]
    media += [kd.Media({"a": zeros[:2], "b": zeros[2:]}, 1), kd.Media({"a": zeros, "b": zeros[:0]}, 1)]
    assert len({m.digest for m in media}) == len(media)


def test_names_cannot_shift_the_borders_of_what_is_hashed() -> None:
    x = torch.tensor([1, 2], dtype=torch.uint8)
    assert kd.Media({"3|n": x}, 1, "a", 2).digest != kd.Media({"n": x}, 2, "a|1", 3).digest
    assert kd.Media({'n", "U8': x}, 1).digest != kd.Media({"n": x}, 1).digest


_contents = st.builds(
    lambda kind, tokens, patches, parts: (kind, tokens, patches, parts),
    st.sampled_from(["image", "video", "a|1"]),
    st.integers(1, 3),
    st.integers(0, 3),
    st.dictionaries(st.sampled_from(["a", "b", "3|a"]), st.lists(st.integers(0, 1), max_size=3), min_size=1),
)


@given(_contents, _contents)
def test_digests_are_equal_exactly_for_equal_content(one: Any, two: Any) -> None:
    def digest(content: Any) -> str:
        kind, tokens, patches, parts = content
        tensors = {name: torch.tensor(bits, dtype=torch.uint8) for name, bits in parts.items()}
        return kd.Media(tensors, tokens, kind, patches).digest

    assert (digest(one) == digest(two)) == (one == two)


def test_the_worked_examples_hold() -> None:
    assert doctest.testmod(trajectory_module).failed == 0


def test_numbers_beyond_float_and_tensors_without_content_are_refused() -> None:
    refused([trajectory("t", **columns(), values={"reward": 10**400})], "'t'", "'reward'", "NaN or infinite")
    refused([trajectory("t", tokens={"input_ids": torch.zeros(3, dtype=torch.int64, device="meta")})], "'t'", "meta")
