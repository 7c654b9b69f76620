"""The contract on an S3 server and on a bucket in this process, and what only object stores promise."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import fsspec
import pytest
import torch
from buckets import Bucket, needs_s3, s3_server, served_by_bucket
from contracts import HANG, BackendContract, Opened, pattern, read
from fsspec.asyn import AsyncFileSystem
from fsspec.registry import _registry, known_implementations
from hypothesis import given
from hypothesis import strategies as st
from makers import group, loader, read_through

import knit_data as kd
from knit_data.errors import InvalidArgument, KeyMissing, KnitError, ShortRead, Unreachable
from knit_data.store import objects
from knit_data.store.backend import Backend, Read
from knit_data.store.objects import ObjectBackend, coalesce
from knit_data.store.urls import open_backend

KiB = 1024


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    with s3_server() as options:
        yield options


@pytest.fixture
def bucket() -> Iterator[type[Bucket]]:
    with served_by_bucket() as found:
        yield found


def handles_of(url: str, options: dict[str, Any]) -> Iterator[Opened]:
    handles: list[Backend] = []

    def opened() -> Backend:
        handles.append(open_backend(url, **options))
        return handles[-1]

    yield opened
    for handle in handles:
        handle.close()


class TestBucket(BackendContract):
    folders = False

    @pytest.fixture
    def opened(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
        monkeypatch.setattr(objects, "_FIRST_POLL", 0.001)
        with served_by_bucket():
            yield from handles_of("gs://bucket/run", {})


@needs_s3
class TestS3(BackendContract):
    folders, effort = False, 0.05
    test_a_bad_key_is_refused_by_every_call = None  # before anything is asked of the server: see TestBucket

    @pytest.fixture
    def opened(self, s3: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[Opened]:
        yield from handles_of(f"s3://bucket/run-{id(request)}", s3)


# -- reads that lie together -------------------------------------------------------------------------------------------


def reads_of(*ranges: tuple[str, int, int]) -> list[Read]:
    return [Read(key, start, memoryview(bytearray(end - start))) for key, start, end in ranges]


def asked(*ranges: tuple[str, int, int], **limits: int) -> list[tuple[str, int, int]]:
    return [(request.key, request.start, request.end) for request in coalesce(reads_of(*ranges), **limits)]


def test_the_example_of_the_module() -> None:
    MiB = KiB * KiB
    wanted = [(20 * MiB, 40 * MiB), (200 * KiB, 300 * KiB), (100, 300), (0, 100)]
    found = [(0, 300 * KiB), (20 * MiB, 28 * MiB), (28 * MiB, 36 * MiB), (36 * MiB, 40 * MiB)]
    assert asked(*[("k", *r) for r in wanted]) == [("k", *r) for r in found]


def test_only_one_objects_ranges_are_joined_and_holes_are_bounded() -> None:
    assert asked(("a", 0, 10), ("b", 10, 20)) == [("a", 0, 10), ("b", 10, 20)]
    assert asked(("a", 0, 10), ("a", 15, 20), gap=5) == [("a", 0, 20)]
    assert asked(("a", 0, 10), ("a", 16, 20), gap=5) == [("a", 0, 10), ("a", 16, 20)]
    assert asked(("a", 0, 10), ("a", 2, 5), ("a", 4, 12)) == [("a", 0, 12)]
    assert asked(("a", 7, 7), ("a", 90, 95), ("b", 7, 7)) == [("a", 90, 95), ("b", 0, 0)]  # any request tells


RANGES = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 60), st.integers(0, 25)), max_size=12)


@given(RANGES, st.integers(0, 8), st.integers(1, 30))
def test_requests_serve_every_byte_once_within_their_limits(
    wanted: list[tuple[str, int, int]], gap: int, largest: int
) -> None:
    reads = reads_of(*[(key, start, start + length) for key, start, length in wanted])
    requests = coalesce(reads, gap, largest)
    served: list[list[int]] = [[] for _ in reads]
    for request in requests:
        useful = {at for _, start, end in request.pieces for at in range(start, end)}
        holes = "".join(" x"[at in useful] for at in range(request.start, request.end)).split("x")
        assert request.end - request.start <= largest and max(map(len, holes)) <= gap
        assert not useful or (min(useful) == request.start and max(useful) == request.end - 1)
        for i, start, end in request.pieces:
            assert reads[i].key == request.key
            served[i] += range(start, end)
    for r, found in zip(reads, served, strict=True):
        assert found == list(range(r.start, r.start + len(r.out)))
    for one, two in pairwise(requests):  # a request less would break a limit
        joined = one.key == two.key and two.start - one.end <= gap
        first = two.pieces[0]
        assert not joined or max(first[2], one.end) - one.start > largest


@given(RANGES, st.integers(0, 70), st.integers(0, 8), st.integers(1, 30))
def test_any_reads_get_their_bytes_or_hear_how_many_there_are(
    wanted: list[tuple[str, int, int]], size: int, gap: int, largest: int
) -> None:
    body = pattern(size)
    with served_by_bucket() as bucket, pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects.coalesce, "__defaults__", (gap, largest))
        backend = ObjectBackend("gs://b")
        bucket.objects["b/a"] = body
        reads = reads_of(*[(key, start, start + length) for key, start, length in wanted])
        answers = backend.read_into(reads)
    for r, answer in zip(reads, answers, strict=True):
        there = body[r.start : r.start + len(r.out)]
        if r.key == "b":
            assert isinstance(answer, KeyMissing)
        elif len(there) == len(r.out):
            assert answer is None and r.out == there
        else:
            assert isinstance(answer, ShortRead) and answer.found == len(there) and r.out[: len(there)] == there


# -- what is asked of the server ---------------------------------------------------------------------------------------


def wide(name: str, n: int) -> kd.Trajectory:
    columns = {field: torch.arange(n, dtype=torch.float32) for field in ("a", "b", "c")}
    return kd.Trajectory(name, "g", 0, {"input_ids": torch.arange(n), **columns})


@pytest.mark.parametrize(
    ("n", "fields", "spans"),
    [
        (500, None, [(0, 20)]),
        (500, ["input_ids", "a", "c"], [(0, 20)]),  # 4,000 bytes that nobody wants are less than a request
        (80_000, None, [(0, 20)]),
        (80_000, ["input_ids", "a"], [(0, 12)]),  # fields that lie together
        (80_000, ["input_ids", "c"], [(0, 8), (16, 20)]),  # one range a field
    ],
)
def test_a_rank_reads_its_part_of_a_group_with_one_range_a_field_at_most(
    bucket: type[Bucket], n: int, fields: list[str] | None, spans: list[tuple[int, int]]
) -> None:
    """A token takes 8 bytes of input_ids and then 4 of each of a, b and c."""
    store = kd.TrajectoryStore("gs://bucket/run")
    with store.writer("w") as writer:
        writer.put_group([wide("0", n), wide("1", n)])
    store.seal()
    run = {"train_batch_size": 1, "mini_batch_size": 1, "group_size": 2}
    with loader(store, 2 * n, {"fields": fields}, **run) as reading:
        (micro,) = [micro for mini in reading for micro in mini]
    assert torch.equal(micro["input_ids"].flatten(), torch.arange(n).repeat(2))
    table = micro.infos[0].table
    payload = int(table.columns["offsets"][0, table.schema.names.index("input_ids")])
    ranges = [request[2:] for request in bucket.asked if request[1].endswith("/w/00000000.safetensors")]
    beyond_heads = [(start, end) for start, end in [r for r in ranges if r] if start]
    assert beyond_heads == [(payload + 2 * n * a, payload + 2 * n * b) for a, b in spans]


def test_a_create_a_put_a_get_and_a_look_are_one_request_each(bucket: type[Bucket]) -> None:
    backend = open_backend("gs://bucket/run")
    assert bucket.asked == []
    backend.create("k", [b"a", b"b"])
    backend.put("r", b"c")
    backend.get("k")
    backend.wait(["k", "x"], 0)
    backend.delete(["k"])
    k, r, x = (f"bucket/run/{name}" for name in "krx")
    assert bucket.asked == [
        ("create", k),
        ("put", r),
        ("get", k, 0, None),
        ("get", k, 0, 1),
        ("get", x, 0, 1),
        ("delete", k),
    ]


def test_repeated_short_waits_for_the_same_slow_down_until_something_is_there(
    monkeypatch: pytest.MonkeyPatch, bucket: type[Bucket]
) -> None:
    backend, now, slept = ObjectBackend("gs://bucket/run"), [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(backend, "now", lambda: now[0])
    monkeypatch.setattr(backend._wake, "wait", sleep)
    for _ in range(40):
        assert backend.wait(["a", "b"], 0.5) == [False, False]
    assert slept[:3] == [0.02, 0.02 * 1.5, 0.02 * 1.5 * 1.5]
    assert min(slept[-20:]) > 0.4999  # not exactly: the clock adds up what was slept
    backend.wait(["other"], 0.5)
    assert min(slept[-3:]) < 0.2  # at its own pace
    backend.create("b", [b""])
    assert backend.wait(["a", "b"], 0.5) == [False, True]
    backend.delete(["b"])
    slept.clear()
    backend.wait(["a", "b"], 0.5)
    assert slept[0] == 0.02
    for n in range(100):
        backend.wait([f"k{n}"], 0.5)
    assert len(backend._steps) == 64


class Together(AsyncFileSystem):
    """Counts the deletes under way; to delete what is not there is an error."""

    async_impl = True

    def __init__(self, there: list[str], refused: str = "") -> None:
        super().__init__(skip_instance_cache=True)
        self.there, self.refused, self.under_way, self.most = there, refused, 0, 0

    async def _rm_file(self, path: str, **_: Any) -> None:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        if path == self.refused:
            raise PermissionError(path)
        if path not in self.there:
            raise FileNotFoundError(path)
        self.there.remove(path)


def test_deletes_are_under_way_together(bucket: type[Bucket]) -> None:
    paths = [f"bucket/run/{n}" for n in range(256)]
    for refused in ("", paths[7]):
        fs, backend = Together(paths[::2] + paths[7:8], refused), open_backend("gs://bucket/run")
        assert isinstance(backend, ObjectBackend) and backend._opened is not None
        backend._opened = dataclasses.replace(backend._opened, fs=fs)
        with pytest.raises(Unreachable, match="could not delete 7") if refused else nullcontext():
            backend.delete([str(n) for n in range(256)])
        assert (fs.most, fs.there) == (256, [refused] if refused else [])


# -- what goes wrong ---------------------------------------------------------------------------------------------------


class Answer(Exception):
    """As the libraries of Google and Azure, and aiohttp, tell an answer of HTTP."""

    def __init__(self, name: str, status: int) -> None:
        super().__init__(f"the server said {status}")
        setattr(self, name, status)


class Refused(Exception):
    """As botocore does."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the server said {status}")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


def chained(cause: Exception) -> Exception:
    """As s3fs passes on what it has no name for."""
    error = OSError(errno.EIO, str(cause))
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (FileNotFoundError("k"), KeyMissing, "no such object"),
        (IsADirectoryError("k"), KeyMissing, "no such object"),
        (Answer("status", 404), KeyMissing, "no such object"),
        (Answer("status", 416), ShortRead, "found only 0"),
        (Answer("code", 416), ShortRead, "found only 0"),
        (Answer("status_code", 416), ShortRead, "found only 0"),
        (chained(Refused(416)), ShortRead, "found only 0"),
        (Answer("code", 503), Unreachable, "the server said 503"),
        (PermissionError("Access Denied"), Unreachable, "Access Denied.*s3:ListBucket"),
        (chained(Refused(403)), Unreachable, "said 403.*s3:ListBucket"),
        (ConnectionResetError("cable pulled"), Unreachable, "cable pulled"),
        (asyncio.TimeoutError(), Unreachable, "TimeoutError"),
        (Answer("status", 200), Unreachable, "said 200"),
    ],
)
def test_a_failed_read_has_its_reason_and_spoils_no_other(
    bucket: type[Bucket], error: Exception, kind: type[KnitError], text: str
) -> None:
    backend = open_backend("gs://bucket/run")
    for key in ("bad", "good"):
        backend.create(key, [pattern(10)])
    bucket.script["get bucket/run/bad"] = [error]
    out = memoryview(bytearray(9))
    bad, good = backend.read_into([Read("bad", 3, out[:4]), Read("good", 3, out[4:])])
    assert bad is not None and "gs://bucket/run: " in str(bad) and "read bad (4 bytes at 3)" in str(bad)
    with pytest.raises(kind, match=text):
        raise bad
    assert good is None and out[4:] == pattern(10)[3:8]


def test_a_failed_part_of_a_long_read_is_its_answer(bucket: type[Bucket], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects.coalesce, "__defaults__", (0, 4))
    backend = open_backend("gs://bucket/run")
    backend.create("k", [pattern(10)])
    bucket.script["get"] = [None, ConnectionResetError("cable pulled"), None]
    assert isinstance(read(backend, "k", 0, 10), Unreachable)
    assert read(backend, "k", 0, 10) == pattern(10)


def test_a_server_that_sends_more_than_the_range_is_refused(
    bucket: type[Bucket], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend("gs://bucket/run")
    backend.create("k", [pattern(100)])
    monkeypatch.setattr(bucket, "cat_file", lambda self, path, **_: bucket.objects[path])
    monkeypatch.setattr(bucket, "cat_ranges", lambda self, paths, *_, **__: [bucket.objects[p] for p in paths])
    problem = read(backend, "k", 10, 20)
    assert isinstance(problem, Unreachable) and "asked for 20 bytes, the server sent 100" in str(problem)
    assert backend.wait(["k"], 0) == [True] and backend.get("k") == pattern(100)


def test_a_create_is_tried_again_on_conflict_and_known_after_a_lost_answer(
    bucket: type[Bucket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_FIRST_POLL", 0.0)
    backend = open_backend("gs://bucket/run")
    bucket.script["create"] = [Answer("status", 409), chained(Refused(409)), None]
    assert backend.create("k", [b"one"])
    bucket.script["create"] = [Answer("status", 412)]
    assert not backend.create("other", [b"two"])
    bucket.script["create"] = [Answer("status", 409)] * 100
    with pytest.raises(Unreachable, match=r"could not create k2 \(3 bytes\): the server said 409"):
        backend.create("k2", [b"two"])
    bucket.script["create"] = []
    bucket.script["answer"] = [ConnectionResetError("cable pulled")]
    with pytest.raises(Unreachable, match=r"create k3.*cable pulled"):
        backend.create("k3", [b"one"])
    assert not backend.create("k3", [b"one"])


@pytest.mark.parametrize("call", ["create", "put", "get", "delete", "wait"])
def test_a_server_that_does_not_answer_is_unreachable_and_the_next_call_works(bucket: type[Bucket], call: str) -> None:
    backend = open_backend("gs://bucket/run")
    calls: dict[str, Any] = {
        "create": lambda: backend.create("k", [b"x"]),
        "put": lambda: backend.put("k", b"x"),
        "get": lambda: backend.get("k"),
        "delete": lambda: backend.delete(["k"]),
        "wait": lambda: backend.wait(["k"], 0),
    }
    bucket.script["get" if call == "wait" else call] = [OSError(errno.ENETDOWN, os.strerror(errno.ENETDOWN))]
    with pytest.raises(Unreachable, match=r"gs://bucket/run: could not .* k.*Network is down") as caught:
        calls[call]()
    assert isinstance(caught.value.__cause__, OSError)
    calls[call]()


@pytest.mark.parametrize("scheme", ["s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"])
def test_a_create_is_conditional_wherever_it_is_allowed(scheme: str) -> None:
    with served_by_bucket(scheme) as bucket:
        backend = open_backend(f"{scheme}://bucket/run")
        assert backend.create("k", [b"one"]) and not backend.create("k", [b"two"])
        assert [operation for operation, _ in bucket.asked] == ["create", "create"]


@pytest.mark.parametrize("scheme", ["sftp", "webdav", "hdfs"])
def test_elsewhere_a_store_can_only_be_read(scheme: str) -> None:
    with served_by_bucket(), served_by_bucket(scheme) as bucket:
        store = kd.TrajectoryStore("gs://bucket/run")
        with store.writer("w") as writer:
            writer.put_group(group("g"))
        reader = kd.TrajectoryStore(f"{scheme}://bucket/run")
        assert reader.id == store.id
        found = reader.read(next(kd.TrajectoryStream(reader)))
        assert torch.equal(found.tokens["input_ids"], group("g")[0].tokens["input_ids"])
        bucket.asked.clear()
        for write in (
            lambda: reader.backend.create("k", [b"x"]),
            lambda: reader.backend.put("k", b"x"),
            lambda: reader.backend.delete(["k"]),
            lambda: reader.writer("x").put_group(group("h")),
            lambda: kd.TrajectoryStore(f"{scheme}://bucket/other"),
        ):
            with pytest.raises(
                InvalidArgument, match=rf"{scheme}: is not known to make an object only if.*mounted path"
            ):
                write()
        assert not [operation for operation, *_ in bucket.asked if operation != "get"]


def test_a_client_too_old_to_put_conditionally_is_refused_as_a_writer(
    bucket: type[Bucket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """s3fs before 2024.12 takes ``mode="create"``, drops it and overwrites."""
    monkeypatch.setattr(bucket, "pipe_file", lambda self, path, value, **kwargs: None)
    with pytest.raises(InvalidArgument, match=r"Bucket is too old for it: pip install -U 'knit_data\[gcs\]'"):
        open_backend("gs://bucket/run").create("k", [b"x"])


# -- opening -----------------------------------------------------------------------------------------------------------


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme, text in (("s3", r"pip install 'knit_data\[s3\]'"), ("smb", "pip install smbthing")):
        monkeypatch.delitem(_registry, scheme, raising=False)
        absent = {"class": "no_such_package.FileSystem", "err": "pip install smbthing"}
        monkeypatch.setitem(known_implementations, scheme, absent)
        with pytest.raises(InvalidArgument, match=f"{scheme}://bucket/run' needs a package.*{text}"):
            open_backend(f"{scheme}://bucket/run")


def test_storage_options_reach_the_file_system_and_wrong_ones_are_named(
    bucket: type[Bucket], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def init(self: Any, *args: Any, project: str = "", asynchronous: bool = False, **others: Any) -> None:
        if "anonymous" in others:
            raise TypeError("unexpected keyword argument 'anonymous'")
        fsspec.AbstractFileSystem.__init__(self, project=project)
        self.asynchronous = asynchronous
        seen.append({"project": project, **others})

    monkeypatch.setattr(bucket, "__init__", init)
    monkeypatch.setattr(bucket, "async_impl", True)
    store = kd.TrajectoryStore("gs://bucket/run", project="p")
    assert seen == [{"project": "p"}]
    kd.TrajectoryStore(*store.__reduce__()[1][:1], **store.__reduce__()[1][1])
    assert seen == [{"project": "p"}] * 2, "the second was opened for itself"
    with pytest.raises(
        InvalidArgument, match=r"gs://bucket/run.*'anonymous'; storage options given: anonymous, project"
    ):
        open_backend("gs://bucket/run", project="p", anonymous=True)
    with pytest.raises(InvalidArgument, match="asynchronous=True"):
        open_backend("gs://bucket/run", asynchronous=True)


def test_a_chain_of_file_systems_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="chain of file systems"):
        open_backend("simplecache::s3://bucket/run")


# -- on a server -------------------------------------------------------------------------------------------------------


@needs_s3
def test_a_store_on_s3_serves_a_trainer_as_one_in_memory_does(s3: dict[str, Any]) -> None:
    def full_run(store: kd.TrajectoryStore) -> list[tuple[int, int, list[str]]]:
        for name in ("w0", "w1"):
            with store.writer(name) as writer:
                for g in range(4):
                    writer.put_group(group(f"{name}/{g}"))
                    writer.put_group(group(f"{name}/{g}"))  # a repeated put is a no-op
        store.seal()
        with loader(store) as run:
            return [read_through(mini) for mini in run]

    want = full_run(kd.TrajectoryStore("memory://"))
    assert full_run(kd.TrajectoryStore("s3://bucket/trained", **s3)) == want


@needs_s3
def test_what_s3_holds_is_read_over_http_too(s3: dict[str, Any]) -> None:
    backend = open_backend("s3://bucket/web", s3_additional_kwargs={"ACL": "public-read"}, **s3)
    backend.create("k", [pattern(1000)])
    backend.create("empty", [])
    reader = open_backend(f"{s3['endpoint_url']}/bucket/web")
    assert read(reader, "k", 100, 50) == pattern(1000)[100:150] and reader.get("k") == pattern(1000)
    for start, found in ((990, 10), (1000, 0), (2000, 0)):
        problem = read(reader, "k", start, 20)
        assert isinstance(problem, ShortRead) and problem.found == found
    assert isinstance(read(reader, "none", 0, 1), KeyMissing) and reader.get("none") is None
    assert reader.wait(["none", "k", "empty"], 0) == [False, True, True] and reader.get("empty") == b""
    with pytest.raises(InvalidArgument, match="http: is not known to make an object"):
        reader.create("new", [b"x"])


@needs_s3
def test_a_large_object_is_made_in_parts_and_only_once(s3: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    whole = s3fs.S3FileSystem._pipe_file

    async def in_parts(self: Any, path: str, data: bytes, mode: str = "overwrite") -> Any:
        return await whole(self, path, data, chunksize=5 << 20, mode=mode)

    monkeypatch.setattr(s3fs.S3FileSystem, "_pipe_file", in_parts)
    backend = open_backend("s3://bucket/large", **s3)
    body = pattern(1 << 16) * 176  # 11 MiB
    assert backend.create("k", [body]) and not backend.create("k", [body[::-1]])
    out = memoryview(bytearray(len(body)))
    assert backend.read_into([Read("k", 0, out)]) == [None] and out == body


@needs_s3
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # the child does nothing else
def test_a_forked_process_opens_its_own_connections(s3: dict[str, Any]) -> None:
    backend = open_backend("s3://bucket/forked", **s3)
    backend.put("r", b"parent")
    child = os.fork()
    if not child:
        signal.alarm(int(HANG))
        try:
            os._exit(7 if backend.get("r") == b"parent" and backend.create("k", [b"child"]) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert backend.get("k") == b"child"
