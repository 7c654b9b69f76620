"""What befalls a store from outside: forged and replaced segments, full, forbidden and read-only disks.

Each ends in a ``KnitError`` that names the file, never in a crash or in wrong bytes, and what was committed before
stays readable.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contracts import HANG
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import fill, group, loader, trajectory

import knit_data as kd
from knit_data.errors import CorruptData, KeyMissing, KnitError, ShortRead, StoreError, Unreachable
from knit_data.store.head import HASH_AT, HASH_LEN, head_hash
from knit_data.store.segment import encode

KEY = "segments/w/00000000.safetensors"
Header = dict[str, Any]
BATCH = {"train_batch_size": 1, "mini_batch_size": 1}


def small() -> list[kd.Trajectory]:
    """Two trajectories of 3 and 4 tokens: a column of each kind, a mask, and a medium in two spans."""
    pixels = kd.Media({"pixels": torch.arange(5, dtype=torch.uint8), "grid": torch.tensor([1, 2])}, 2, patches=3)
    out = []
    for i in range(2):
        tokens = {"input_ids": torch.arange(3 + i), "loss_mask": torch.tensor([False, True, True, True][: 3 + i])}
        values = {"reward": float(i), "h": torch.tensor([1, 2, 3], dtype=torch.int8)}
        refs = [kd.MediaRef(pixels, [(0, 1), (2, 1)])]
        out.append(kd.Trajectory(f"t{i}", "g", i, tokens, values, refs, {"source": "vqa"}))
    return out


WHOLE = b"".join(encode(small(), writer=0, segment=0, grouped=True).parts)


def stored(data: bytes) -> kd.TrajectoryStore:
    store = kd.TrajectoryStore("memory://")
    store.writer("w")
    store.backend.create(KEY, [data])
    return store


def everything(store: kd.TrajectoryStore) -> list[kd.Trajectory]:
    return [store.read(info) for info in kd.TrajectoryStream(store, follow=False)]


# -- heads whose checksum is right and whose content is not ------------------------------------------------------------


def forged(change: Callable[[Header, dict[str, Any], dict[str, np.ndarray]], Any]) -> bytes:
    """The small segment after ``change(header, its metadata, the arrays of its table)``, with the checksum of that."""
    length = int.from_bytes(WHOLE[:8], "little")
    header = json.loads(WHOLE[8 : 8 + length])
    meta, start = header.pop("__metadata__"), 8 + length
    body = bytearray(WHOLE[start:])
    kinds = {"U64": "u8", "I64": "i8", "F64": "f8", "I32": "i4", "F32": "f4", "I8": "i1", "U8": "u1"}
    cells = {}
    for name, spec in header.items():
        if name.startswith(("info.", "media.")):
            begin, end = spec["data_offsets"]
            cells[name] = np.frombuffer(
                body, kinds[spec["dtype"]], (end - begin) // int(kinds[spec["dtype"]][1]), begin
            )
    change(header, meta, cells)
    cells.clear()
    meta = {"xxh3": "0" * HASH_LEN, **{name: text for name, text in meta.items() if name != "xxh3"}}
    text = json.dumps({"__metadata__": meta, **header}, separators=(",", ":")).encode()
    text = text.ljust(-(-(8 + len(text)) // 64) * 64 - 8)
    data = bytearray(len(text).to_bytes(8, "little") + text + body)
    table = meta["info_bytes"]
    size = 8 + len(text) + (int(table) if table.isdecimal() and len(table) < 20 else 0)
    data[HASH_AT : HASH_AT + HASH_LEN] = head_hash(memoryview(data)[:size]).encode()
    return bytes(data)


def put(where: str, key: str, value: Any) -> Callable[..., Any]:
    return lambda header, meta, cells: header[where].__setitem__(key, value)


def cell(name: str, at: int, value: int) -> Callable[..., Any]:
    return lambda header, meta, cells: cells[name].__setitem__(at, value)


def remove_folder(file: Path) -> None:
    shutil.rmtree(file.parent)


def moved(name: str, begin: int, end: int) -> Callable[..., Any]:
    def change(header: Header, meta: Any, cells: Any) -> None:
        first, last = header[name]["data_offsets"]
        header[name]["data_offsets"] = [first + begin, last + end]

    return change


def said(name: str, value: Any) -> Callable[..., Any]:
    return lambda header, meta, cells: meta.__setitem__(name, value)


def test_the_forger_leaves_a_segment_whole_that_it_does_not_change() -> None:
    found = everything(stored(forged(lambda *_: None)))
    assert torch.equal(found[1].tokens["input_ids"], torch.arange(4)) and len(found) == 2


@pytest.mark.parametrize(
    "change",
    [
        moved("tokens.input_ids", -8, -8),  # over another
        moved("tokens.input_ids", 0, 8),
        moved("tokens.input_ids", 56, -56),  # backwards
        moved("tokens.input_ids", 1 << 40, 1 << 40),  # out of the file
        moved("tokens.input_ids", -(1 << 20), -(1 << 20)),
        moved("info.n_tokens", 1 << 20, 1 << 20),  # out of the table
        put("tokens.input_ids", "data_offsets", None),
        put("tokens.input_ids", "data_offsets", ["0", "56"]),
        put("tokens.input_ids", "data_offsets", [0.0, 56.0]),
        put("tokens.input_ids", "data_offsets", [0]),
        put("tokens.input_ids", "shape", [7, 1]),
        put("tokens.input_ids", "shape", [-1, -7]),
        put("tokens.input_ids", "shape", [1 << 70]),
        put("tokens.input_ids", "dtype", "F64"),
        put("tokens.input_ids", "dtype", "I128"),
        put("tokens.loss_mask", "dtype", "U8"),
        put("medium.0.pixels", "dtype", "I8"),
        put("info.n_tokens", "dtype", "F32"),
        put("info.checksums", "shape", [6]),
        lambda header, meta, cells: header.pop("info.n_tokens"),
        lambda header, meta, cells: header.pop("values.h"),
        lambda header, meta, cells: header.__setitem__("values.x", header.pop("values.h")),
        lambda header, meta, cells: header.__setitem__("info.x", header.pop("info.patches")),
        lambda header, meta, cells: header.__setitem__("values.h", 3),
        said("bytes", str(len(WHOLE))),
        said("bytes", "-1"),
        said("bytes", "9" * 5000),
        said("info_bytes", "0"),
        said("info_bytes", "9" * 5000),
        said("info_bytes", "²"),
        said("info_bytes", str(1 << 40)),
        said("info_bytes", str((1 << 31) - 1)),
        said("session", None),
        said("schema", "{"),
        said("schema", "[]"),
        said("schema", "[" * 100_000),
        said("schema", json.dumps({"fields": [["input_ids", "I64", [2], True]], "scalars": []})),
        said("schema", json.dumps({"fields": [["input_ids", "I64", [], False]], "scalars": []})),
        said("schema", json.dumps({"fields": [["input_ids", "I64", [], True]] * 2, "scalars": [["reward", "F64"]]})),
        cell("info.n_tokens", 0, 4),
        cell("info.n_tokens", 0, -3),
        cell("info.n_tokens", 0, 2**31 - 1),
        cell("info.loss_tokens", 0, 9),
        cell("info.mask_bytes", 0, 4),
        cell("info.mask_bytes", 1, 0),
        cell("info.group_rows", 0, 1),
        cell("info.len:id", 0, 200),
        cell("info.len:id", 0, -1),
        cell("info.len:spans", 0, 9),
        cell("info.id", 0, 0xFF),
        cell("info.attributes", 0, ord("x")),
        cell("info.spans", 0, 1),  # a medium that is not there
        cell("info.spans", 0, -1),
        cell("info.spans", 1, 3),  # a span that leaves its trajectory
        cell("info.spans", 2, 0),
        cell("info.spans", 2, 2**62),
        cell("media.tokens", 0, 0),
        cell("media.parts", 3, 0xFF),
        cell("media.len:kind", 0, 2**31 - 1),
    ],
)
def test_a_head_that_cannot_be_true_is_refused(change: Callable[..., Any]) -> None:
    store = stored(forged(change))
    with pytest.raises(CorruptData, match=KEY):
        everything(store)
    with pytest.raises(CorruptData, match=KEY), loader(store, 64, group_size=2, **BATCH) as run:
        next(run)


@settings(max_examples=150)
@given(st.data())
def test_no_forged_number_leads_out_of_the_file_or_to_another_error(data: st.DataObject) -> None:
    def change(header: Header, meta: Any, cells: dict[str, np.ndarray]) -> None:
        if data.draw(st.booleans()):
            values = cells[data.draw(st.sampled_from(sorted(cells)))].view(np.uint8)
            values[data.draw(st.integers(0, len(values) - 1))] = data.draw(st.integers(0, 255))
            return
        spec = header[data.draw(st.sampled_from(sorted(header)))]
        numbers = spec[data.draw(st.sampled_from(["shape", "data_offsets"]))]
        wild = st.integers(-3, 20) | st.sampled_from([2**31, 2**40, 2**63, 2**64, -(2**63)])
        numbers[data.draw(st.integers(0, len(numbers) - 1))] = data.draw(wild)

    try:
        everything(stored(forged(change)))  # another reward, or another text: nothing that could be told
    except KnitError as error:
        assert KEY in str(error)


@pytest.mark.parametrize("length", [2**40, 2**64 - 1, 2**31 - 1, 10**6, 0])
@pytest.mark.parametrize("place", ["memory://", "folder"])
def test_a_header_length_beyond_the_file_takes_no_memory(tmp_path: Path, length: int, place: str) -> None:
    store = kd.TrajectoryStore(place if place != "folder" else tmp_path)
    store.writer("w")
    store.backend.create(KEY, [length.to_bytes(8, "little") + WHOLE[8:]])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limits[1]))
        with pytest.raises(CorruptData, match=KEY):
            everything(store)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


# -- damage through the loader -----------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.data(), st.sampled_from(["raise", "mask"]))
def test_a_loader_gives_exact_data_or_says_which_is_none(data: st.DataObject, on_corrupt: str) -> None:
    """Any byte changed, or any end cut off, of any segment."""
    store = fill(kd.TrajectoryStore("memory://"), 3, size=2)
    key = store.segment_key("w0", data.draw(st.integers(0, 1)))
    whole = store.backend.get(key)
    assert whole is not None
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole[:at]) if data.draw(st.booleans()) else bytearray(whole)
    if at < len(damaged):
        damaged[at] ^= data.draw(st.integers(1, 255))
    store.backend.put(key, bytes(damaged))
    want = {t.id: t for g in range(3) for t in group(f"g{g:04d}", 2)}
    try:
        with loader(store, 64, {"on_corrupt": on_corrupt}, group_size=2, **BATCH) as run:
            for micro in (micro for mini in run for micro in mini):
                for row, info in enumerate(micro.infos):
                    ids = micro["input_ids"][micro.rows == row]
                    same = torch.equal(ids, want[info.id].tokens["input_ids"])
                    assert same if info.id not in micro.masked else not ids.any()
                    logprobs = micro["logprobs"][micro.rows == row]
                    assert info.id in micro.masked or torch.equal(logprobs, want[info.id].tokens["logprobs"])
    except KnitError as error:
        assert key in str(error)
    else:
        assert on_corrupt == "mask", "the damage went unnoticed"


def admitted(folder: Path) -> tuple[kd.TrajectoryStore, Any]:
    """A store of one sealed group, and a loader that has admitted it and has read no payload."""
    store = kd.TrajectoryStore(folder)
    with store.writer("w") as writer:
        writer.put_group(group("g", lengths=[20_000, 30_000]))
    store.seal()
    return store, loader(store, 60_000, {"prefetch": 0}, group_size=2, **BATCH)


def cut(file: Path) -> None:
    os.truncate(file, 20_000)


def replace(file: Path) -> None:
    parts = encode(group("g", lengths=[30_000, 20_000]), writer=0, segment=0, grouped=True).parts
    (file.parent / "new").write_bytes(b"".join(parts))
    os.replace(file.parent / "new", file)


@pytest.mark.parametrize(
    ("befall", "kind"),
    [
        (os.unlink, KeyMissing),
        (cut, CorruptData),
        (replace, CorruptData),
        (remove_folder, KeyMissing),
    ],
    ids=["deleted", "cut", "replaced", "folder-deleted"],
)
def test_what_befalls_a_segment_between_admission_and_read_is_named(
    tmp_path: Path, befall: Callable[[Path], Any], kind: type[KnitError]
) -> None:
    """In a process of its own: with mapped files the cut would be a SIGBUS."""
    child = os.fork()
    if not child:
        signal.alarm(int(HANG))
        code = 2
        try:
            store, run = admitted(tmp_path)
            infos = list(kd.TrajectoryStream(store, follow=False))
            store.read(infos[0])  # the file is open from here on
            with run:
                mini = next(run)
                befall(tmp_path / KEY)
                try:
                    list(mini)
                except kind as error:
                    code = 0 if KEY in str(error) else 3
                try:
                    store.read(infos[1])
                    code = 4
                except (kind, ShortRead) as error:
                    code = code if KEY in str(error) else 5
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- disks that refuse -------------------------------------------------------------------------------------------------


@contextmanager
def small_files(folder: Path) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def over_quota(folder: Path) -> Iterator[None]:
    def writev(fd: int, views: Any) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "writev", writev)
        yield


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """The tmpfs of ``disk`` has a megabyte."""
    with open(folder / "ballast", "wb", buffering=0) as ballast, pytest.raises(OSError, match="No space"):
        while True:
            ballast.write(bytes(4096))
    yield
    (folder / "ballast").unlink()


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    yield
    subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)


@contextmanager
def other_user(folder: Path) -> Iterator[None]:
    """Root may write anywhere."""
    os.chmod(folder, 0o755)
    uid = os.geteuid()
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(uid)


@contextmanager
def file_in_the_way(folder: Path) -> Iterator[None]:
    os.rename(folder / "run/segments/w", folder / "aside")
    (folder / "run/segments/w").touch()
    yield
    (folder / "run/segments/w").unlink()
    os.rename(folder / "aside", folder / "run/segments/w")


@contextmanager
def folder_in_the_way(folder: Path) -> Iterator[None]:
    (folder / "run/segments/w/00000001.safetensors").mkdir()
    yield
    (folder / "run/segments/w/00000001.safetensors").rmdir()


@pytest.fixture
def disk() -> Iterator[Path]:
    """A file system of one megabyte; else the test is skipped."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"a file system cannot be mounted here: {error}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize(
    ("trouble", "text"),
    [
        (small_files, "File too large"),
        (over_quota, "quota exceeded"),
        (full, "No space left"),
        (read_only, "Read-only file system"),
        pytest.param(
            other_user, "Permission denied", marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
        ),
        (file_in_the_way, "cannot be a folder"),
        (folder_in_the_way, "is a folder of other keys"),
    ],
)
def test_a_put_that_the_disk_refuses_leaves_the_store_as_it_was(
    disk: Path, trouble: Callable[[Path], Any], text: str
) -> None:
    store = kd.TrajectoryStore(disk / "run")
    large = trajectory("large", n=10_000)
    with store.writer("w") as writer:
        first = writer.put(trajectory("first"))
        with trouble(disk):
            with pytest.raises((StoreError, kd.InvalidArgument), match=rf"(?s)segments/w.*{text}"):
                writer.put(large)
            if trouble is not file_in_the_way:
                assert torch.equal(store.read(first).tokens["input_ids"], trajectory("first").tokens["input_ids"])
        again = writer.put(large)
    assert [info.id for info in kd.TrajectoryStream(store, follow=False)] == ["first", "large"]
    assert torch.equal(kd.TrajectoryStore(disk / "run").read(again).tokens["logprobs"], large.tokens["logprobs"])
    assert sorted(os.listdir(disk / "run/segments/w")) == ["00000000.safetensors", "00000001.safetensors"]


def test_a_store_cannot_be_made_where_a_file_is_and_the_file_stays(tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(b"mine")
    with pytest.raises((Unreachable, kd.InvalidArgument), match=f"{tmp_path}/run"):
        kd.TrajectoryStore(tmp_path / "run").writer("w").put(trajectory("a"))
    assert (tmp_path / "run").read_bytes() == b"mine"
