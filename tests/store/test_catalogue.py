"""Small files that somebody damaged, moved or removed: named as such, never a raw error, never data by mistake."""

from __future__ import annotations

import shutil

import pytest
from makers import fill, group, sampler

import knit_data as kd


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"name": 3, "first": 0}', '{"name": "../x", "first": 0}', "[" * 100_000, "{"]
)
def test_damaged_claims(tmp_path, text):
    fill(kd.TrajectoryStore(tmp_path), 4)
    (tmp_path / "writers" / "0.json").write_text(text)
    with pytest.raises(kd.CorruptData, match=r"writers/0\.json"):
        sampler(kd.TrajectoryStore(tmp_path)).next()


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("sealed.json", "{}"),
        ("sealed.json", '{"writers": -1}'),
        ("ends/0.json", '{"count": -2}'),
        ("ends/1.json", '{"count": "3"}'),
        ("schema.json", "{}"),
        ("schema.json", '{"fields": [3], "scalars": []}'),
    ],
)
def test_other_damaged_files(tmp_path, key, text):
    fill(kd.TrajectoryStore(tmp_path), 4)
    (tmp_path / key).write_text(text)
    store = kd.TrajectoryStore(tmp_path)
    with pytest.raises(kd.CorruptData):
        store.sealed()
        assert store.schema is None


@pytest.mark.parametrize("text", ["x", "-1", "1.5"])
def test_damaged_registers(tmp_path, text):
    store = kd.TrajectoryStore(tmp_path)
    store.publish(1)
    (tmp_path / "registers" / "policy_version").write_text(text)
    with pytest.raises(kd.CorruptData, match="policy_version"):
        store.policy_version()
    (tmp_path / "registers" / "demand").write_text(text)
    with pytest.raises(kd.CorruptData, match="demand"):
        store.demand()


def test_a_store_without_its_format_is_not_a_new_one(tmp_path):
    fill(kd.TrajectoryStore(tmp_path), 2)
    (tmp_path / "format.json").unlink()
    with pytest.raises(kd.CorruptData, match=r"format\.json is missing"):
        kd.TrajectoryStore(tmp_path)


def test_a_segment_in_another_ones_place_is_noticed(tmp_path):
    fill(kd.TrajectoryStore(tmp_path), 4)
    folder = tmp_path / "segments"
    shutil.copy(folder / "w1" / "00000001.safetensors", folder / "w0" / "00000000.safetensors")
    with pytest.raises(kd.CorruptData, match=r"written as segment 1/1 .* found as 0/0"):
        sampler(kd.TrajectoryStore(tmp_path)).next()


def test_a_writer_whose_folder_is_gone_writes_nothing(tmp_path):
    store = kd.TrajectoryStore(tmp_path / "run")
    with store.writer("w") as writer:
        writer.put_group(group("a"))
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(kd.StoreError, match="the claim of writer 'w' is gone"):
            writer.put_group(group("b"))
    assert not (tmp_path / "run" / "segments").exists()


@pytest.mark.parametrize("timeout", [None, "x", float("nan"), -1])
def test_put_timeouts_are_seconds(timeout):
    with kd.TrajectoryStore("memory://").writer("w") as writer, pytest.raises(kd.InvalidArgument, match="timeout"):
        writer.put_group(group("a"), timeout=timeout)


@pytest.mark.parametrize("what", [None, 3, group("a")[0]])
def test_a_group_is_several_trajectories(what):
    with kd.TrajectoryStore("memory://").writer("w") as writer, pytest.raises(kd.InvalidTrajectory, match="put_group"):
        writer.put_group(what)
