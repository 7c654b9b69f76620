"""The store as rollout workers and trainers see it: registers, the end, and what they open."""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import running
from makers import group, trajectory
from places import Place, moments, reclaim, watched

import knit_data as kd
from knit_data.demand import Demand
from knit_data.errors import CorruptData, InvalidArgument, InvalidTrajectory, KeyMissing, StoreClosed
from knit_data.store.memory import Crash

# -- opening -----------------------------------------------------------------------------------------------------------


def test_two_handles_are_one_store(place: Place) -> None:
    one, two = place.open(), place.open()
    assert one.id == two.id
    info = one.writer("w").put(trajectory("a"))
    assert torch.equal(two.read(info).tokens["logprobs"], trajectory("a").tokens["logprobs"])
    first = one.id
    place.renew()
    assert place.open().id != first


@pytest.mark.parametrize(
    "found", [b"{}", b"", b"[1]", b"3", b"null", b'"x"', b'{"format": "knit_data.store.2", "id": "x"}', b"\xff", b"{"]
)
def test_a_folder_of_another_kind_or_version_is_refused(place: Place, found: bytes) -> None:
    backend = place.open().backend
    backend.delete(["format.json"])
    backend.create("format.json", [found])
    with pytest.raises(CorruptData, match=r"format\.json"):
        place.open()
    assert backend.get("format.json") == found


def test_a_store_without_its_id_is_refused(place: Place) -> None:
    backend = place.open().backend
    backend.delete(["format.json"])
    backend.create("format.json", [b'{"format": "knit_data.store.1"}'])
    with pytest.raises(CorruptData, match=r"format\.json"):
        place.open()


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ({"reclaim": "always"}, "reclaim.*'commit', 'consumed', 'never'.*'always'"),
        ({"max_bytes": 0}, "max_bytes.*0"),
        ({"max_bytes": -5}, "max_bytes.*-5"),
        ({"max_bytes": 1.5}, r"max_bytes.*1\.5"),
        ({"max_bytes": True}, "max_bytes.*True"),
        ({"max_bytes": "1G"}, "max_bytes.*'1G'"),
        ({"anonymous": True}, "storage options.*anonymous"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], texts: str) -> None:
    with pytest.raises(InvalidArgument, match=texts):
        kd.TrajectoryStore("memory://", **arguments)


def _put_elsewhere(store: kd.TrajectoryStore) -> None:
    store.writer("child").put_group(group("child", 2), timeout=5.0)


def test_a_store_travels_to_a_spawned_process(tmp_path: Path) -> None:
    store = kd.TrajectoryStore(str(tmp_path / "s"), reclaim="never", max_bytes=10**6, fsync=True)
    process = multiprocessing.get_context("spawn").Process(target=_put_elsewhere, args=(store,))
    process.start()
    process.join()
    assert process.exitcode == 0
    process.close()
    assert [info.id for info in kd.TrajectoryStream(store, follow=False)] == ["child/0", "child/1"]
    copy = pickle.loads(pickle.dumps(store))
    assert (copy.url, copy.id, copy.reclaim, copy.max_bytes, copy.fsync) == (
        store.url,
        store.id,
        "never",
        10**6,
        True,
    )


# -- registers ---------------------------------------------------------------------------------------------------------


def test_the_published_version_is_seen_everywhere(place: Place) -> None:
    one, two = place.open(), place.open()
    assert one.policy_version() == two.policy_version() == 0
    for version in (0, 1, 7, 5, 2**40):
        one.publish(version)
        assert one.policy_version() == two.policy_version() == version
    for bad in (-1, 1.0, "3", None, True):
        with pytest.raises(InvalidArgument, match=f"int >= 0, found {bad!r}"):
            one.publish(bad)  # type: ignore[arg-type]
    assert two.policy_version() == 2**40


def test_the_demand_is_seen_everywhere(place: Place) -> None:
    one, two = place.open(), place.open()
    assert two.demand() == Demand()
    demand = Demand(3, {("math", "hard"): 4, ("é", ""): 1, (): 2}, 7)
    one.publish_demand(demand)
    assert two.demand() == demand
    one.publish_demand(Demand(4))
    assert two.demand() == Demand(4)


@pytest.mark.parametrize("key", ["schema.json", "writers/0.json", "registers/demand"])
def test_a_damaged_small_file_is_named(place: Place, key: str) -> None:
    store = place.open()
    store.writer("w").put(trajectory("a"))
    store.backend.put(key, b"[1, 2")
    with pytest.raises(CorruptData, match=f"{key} is not a JSON object"):
        fresh = place.open()
        fresh.demand()
        fresh.writer("w").put(trajectory("b"))


# -- the end -----------------------------------------------------------------------------------------------------------


def test_after_seal_and_after_finish_nothing_is_put(place: Place) -> None:
    for end in ("seal", "finish"):
        place.renew()
        store = place.open()
        writer = store.writer("w")
        writer.put_group(group("g", 2))
        assert not store.finished()
        getattr(place.open(), end)()
        assert store.finished() == (end == "finish")
        for put in (lambda w=writer: w.put(trajectory("late")), lambda w=writer: w.put_group(group("g", 2))):
            with pytest.raises(StoreClosed, match="writer 'w' wrote nothing"):
                put()
        if end == "seal":
            with pytest.raises(StoreClosed, match="'other' cannot be opened"):
                place.open().writer("other")
        getattr(store, end)()
        assert place.ids() == ["g/0", "g/1"]


def test_a_sealed_store_counts_every_writer(place: Place) -> None:
    store = place.open()
    assert store.sealed() is None
    for w, count in enumerate([0, 1, 5, 8, 17]):
        writer = store.writer(f"w{w}")
        for i in range(count):
            writer.put(trajectory(f"{w}/{i}"))
    store.seal()
    assert place.open().sealed() == [0, 1, 5, 8, 17]
    assert len(place.ids()) == 31


def test_an_empty_store_is_sealed(place: Place) -> None:
    place.open().seal()
    assert list(kd.TrajectoryStream(place.open())) == [] and place.open().sealed() == []


def outcome(writer: kd.store.StoreWriter, name: str) -> list[str]:
    """The ids that this put promised."""
    try:
        return [info.id for info in writer.put_group(group(name, 2))]
    except StoreClosed:
        return []


def test_a_seal_at_any_moment_of_a_put_counts_it_or_refuses_it(place: Place) -> None:
    promised: set[int] = set()

    def run(at: int, when: str) -> bool:
        place.renew()
        store = place.open()
        writer = store.writer("w")
        first = outcome(writer, "first")
        backend = watched(store, at, when, place.open().seal)
        second = outcome(writer, "second")
        place.open().seal()
        assert [info.id for info in kd.TrajectoryStream(place.open())] == first + second
        assert place.ids() == first + second
        promised.add(len(second))
        return backend.struck

    assert len(list(moments(run))) == 8
    assert promised == {0, 2}


def test_a_put_at_any_moment_of_a_seal_counts_or_is_refused(place: Place) -> None:
    promised: set[int] = set()

    def run(at: int, when: str) -> bool:
        place.renew()
        sealer = place.open()
        old = place.open().writer("old")
        expected = outcome(old, "first")

        def puts() -> None:
            nonlocal expected
            expected += outcome(old, "second")
            try:
                expected += outcome(place.open().writer("new"), "third")
            except StoreClosed:
                pass

        backend = watched(sealer, at, when, puts)
        sealer.seal()
        assert sorted(info.id for info in kd.TrajectoryStream(place.open())) == sorted(expected)
        assert sorted(place.ids()) == sorted(expected)
        promised.add(len(expected))
        return backend.struck

    assert len(list(moments(run))) > 8
    assert promised == {2, 6}


def test_a_writer_that_claims_while_the_store_is_sealed_ends_there(place: Place) -> None:
    def run(at: int, when: str) -> bool:
        place.renew()
        store, expected = place.open(), outcome(place.open().writer("old"), "first")
        backend = watched(store, at, when, place.open().seal)
        try:
            expected += outcome(store.writer("new"), "second")
        except StoreClosed:
            pass
        place.open().seal()
        assert [info.id for info in kd.TrajectoryStream(place.open())] == expected
        assert place.ids() == expected
        return backend.struck

    assert len(list(moments(run))) > 8


def test_a_crashed_seal_is_repeated(place: Place) -> None:
    def run(at: int, when: str) -> bool:
        place.renew()
        for w in ("a", "b"):
            outcome(place.open().writer(w), w)
        store = place.open()
        backend = watched(store, at, when, crash)
        try:
            store.seal()
        except Crash:
            place.open().seal()
        assert [info.id for info in kd.TrajectoryStream(place.open())] == ["a/0", "a/1", "b/0", "b/1"]
        assert place.open().sealed() == [1, 1]
        return backend.struck

    assert len(list(moments(run))) > 8


def test_what_is_reclaimed_while_the_store_is_sealed_still_counts(place: Place) -> None:
    def run(at: int, when: str) -> bool:
        place.renew()
        writer = place.open().writer("w")
        for i in range(6):
            writer.put(trajectory(f"t{i}"))
        store = place.open()
        backend = watched(store, at, when, lambda: reclaim(place.open(), "w", 0, 4))
        store.seal()
        assert place.open().sealed() == [6]
        return backend.struck

    assert len(list(moments(run))) > 8


def crash() -> None:
    raise Crash("here")


def test_threads_that_put_while_the_store_is_sealed_lose_nothing(place: Place) -> None:
    kept: list[list[str]] = [[] for _ in range(4)]

    def put(w: int) -> None:
        writer = place.open().writer(f"w{w}")
        for i in range(200):
            found = outcome(writer, f"{w}/{i}")
            kept[w] += found
            if not found:
                return
        place.open().seal()

    def seal() -> None:
        store = place.open()
        while not kept[0]:
            store.exists([store.segment_key("w0", 0)], 1.0)
        store.seal()

    with running(seal, *[lambda w=w: put_or_closed(put, w) for w in range(4)]):
        pass
    assert sorted(info.id for info in kd.TrajectoryStream(place.open())) == sorted(x for ids in kept for x in ids)


def put_or_closed(put: Any, w: int) -> None:
    try:
        put(w)
    except StoreClosed:
        pass


# -- reading -----------------------------------------------------------------------------------------------------------


def test_a_read_is_verified_and_names_the_file(place: Place) -> None:
    store = place.open()
    info = store.writer("w").put(trajectory("a"))
    key = store.segment_key("w", 0)
    data = bytearray(store.backend.get(key) or b"")
    data[int(info.table.columns["offsets"][0, 1])] ^= 1
    store.backend.put(key, bytes(data))
    with pytest.raises(CorruptData, match=f"{key}: logprobs of 'a'.*damaged"):
        store.read(info)
    assert torch.equal(store.read(info, ["input_ids"]).tokens["input_ids"], trajectory("a").tokens["input_ids"])
    store.backend.delete([key])
    with pytest.raises(KeyMissing):
        store.read(info)


def test_unknown_fields_are_named(place: Place) -> None:
    store = place.open()
    info = store.writer("w").put(trajectory("a"))
    with pytest.raises(InvalidArgument, match=r"\['nope'\].*'input_ids', 'logprobs', 'loss_mask', 'reward'"):
        store.read(info, ["nope", "reward"])


# -- one schema --------------------------------------------------------------------------------------------------------


def test_one_schema_holds_for_all_writers(place: Place) -> None:
    first, second = place.open().writer("a"), place.open().writer("b")
    first.put(trajectory("a"))
    with pytest.raises(InvalidTrajectory, match="'b' does not have the columns of this store: reward: absent"):
        second.put(trajectory("b", values={}))
    second.put(trajectory("b"))
    assert place.ids() == ["a", "b"]


def test_of_two_first_puts_one_settles_the_schema(place: Place) -> None:
    settled = set()

    def put(store: kd.TrajectoryStore, name: str, values: dict[str, float]) -> list[str]:
        try:
            return [store.writer(name).put(trajectory(name, values=values)).id]
        except InvalidTrajectory as e:
            assert f"{name!r} does not have the columns of this store: reward" in str(e)
            return []

    def run(at: int, when: str) -> bool:
        place.renew()
        kept: list[str] = []
        backend = watched(store := place.open(), at, when, lambda: kept.extend(put(place.open(), "other", {})))
        kept += put(store, "one", {"reward": 1.0})
        assert len(kept) == 1 and place.ids() == kept
        settled.add(kept[0])
        return backend.struck

    assert len(list(moments(run))) > 8
    assert settled == {"one", "other"}
