"""What every back end and every torchdata node has to keep, written once.

A test module inherits ``BackendContract`` and supplies the fixture ``opened``: a function that opens one more back end
object on the same bytes each time it is called. Waits that must succeed have a time-out that only a hang can reach.

Or it inherits ``NodeContract`` and supplies ``fresh``, a function that makes one more node over the same finite data,
and ``calls``, which counts what nodes have asked of their store so far.
"""

from __future__ import annotations

import copy
import gc
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest
from torchdata.nodes import BaseNode, Loader, Prefetcher

from knit_data.errors import InvalidArgument, KeyMissing, KnitError, ShortRead
from knit_data.store.backend import Backend, Buffer, Read

Opened = Callable[[], Backend]
Fresh = Callable[[], BaseNode[Any]]
HANG = 120.0  # seconds; reached only by a test that fails

BAD_KEYS = [
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/../b",
    "a/./b",
    "a b",
    "a\n",
    "a\\b",
    "~a",
    "a:b",
    "a*",
    "a\0b",
    "é",
    "数据/0",
    "a/" + "b" * 256,
    "/".join(["abc"] * 300),
]
ODD_KEYS = ["a", "...", ".hidden", "-", "0/1/2/3/4/5/6/7/8/9", "A-b_c.d", "x" * 255, "/".join(["y" * 99] * 10)]


def read(backend: Backend, key: str, start: int, length: int) -> bytes | KnitError:
    """These bytes of the object, or what went wrong."""
    out = bytearray(length)
    (problem,) = backend.read_into([Read(key, start, memoryview(out))])
    return problem or bytes(out)


def pattern(length: int, salt: int = 0) -> bytes:
    """Bytes of which every short range tells its offset."""
    return bytes((i * 131 + i // 251 + salt) % 256 for i in range(length))


@contextmanager
def running(*targets: Callable[[], None]) -> Iterator[None]:
    """Runs the targets, each in a thread, beside the body; what one of them raises fails the test."""
    raised: list[BaseException] = []

    def guarded(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:  # reported below, in the thread of the test
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(HANG)
    if raised:
        raise raised[0]
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"


class BackendContract:
    """Inherit, and supply the fixture ``opened``."""

    folders = True  # keys and folders share their names, and a clash is refused
    effort = 1.0  # part of the repetitions that search for a race: less where every call goes to a server

    @pytest.fixture
    def opened(self) -> Iterator[Opened]:
        raise NotImplementedError("the test module supplies it")

    @pytest.fixture
    def backend(self, opened: Opened) -> Backend:
        return opened()

    # -- create --------------------------------------------------------------------------------------------------------

    def test_created_bytes_are_read_through_every_handle(self, opened: Opened) -> None:
        assert opened().create("a/b/c", [b"hello ", b"world"])
        assert read(opened(), "a/b/c", 0, 11) == b"hello world"

    def test_a_second_create_changes_nothing(self, opened: Opened) -> None:
        first, second = opened(), opened()
        assert first.create("k", [b"one"])
        assert not first.create("k", [b"other"])
        assert not second.create("k", [b""])
        assert first.get("k") == second.get("k") == b"one"

    def test_of_eight_racing_threads_one_wins_and_bytes_never_mix(self, opened: Opened) -> None:
        handles, rounds = [opened() for _ in range(8)], round(6 * self.effort) or 1
        bodies = [bytes([i]) * (200_000 + i) for i in range(8)]
        barrier = threading.Barrier(8)
        won: list[tuple[int, int]] = []

        def race(i: int) -> None:
            for n in range(rounds):
                barrier.wait(HANG)
                half = len(bodies[i]) // 2
                if handles[i].create(f"race/{n}", [bodies[i][:half], bodies[i][half:]]):
                    won.append((n, i))

        with running(*[lambda i=i: race(i) for i in range(8)]):
            pass
        assert sorted(n for n, _ in won) == list(range(rounds))
        for n, winner in won:
            assert handles[0].get(f"race/{n}") == bodies[winner]

    def test_a_reader_never_meets_a_part_of_an_object(self, opened: Opened) -> None:
        writer, reader, count = opened(), opened(), round(24 * self.effort)
        body = pattern(65_536) * 16
        pieces = [body[i : i + 65_536] for i in range(0, len(body), 65_536)]

        def create() -> None:
            for n in range(count):
                assert writer.create(f"seg/{n}", pieces)

        with running(create):
            out = bytearray(len(body))
            for n in range(count):
                problem: KnitError | None = KeyMissing("not asked yet")
                while isinstance(problem, KeyMissing):
                    problem = reader.read_into([Read(f"seg/{n}", 0, memoryview(out))])[0]
                assert problem is None
                assert out == body

    @pytest.mark.parametrize(
        "sizes",
        [[], [0], [0, 0, 0], [1], [0, 5, 0, 0, 7, 0], [1] * 1024, [1] * 1025, [3, 0, 1] * 1500, [2_000_003, 1, 70_000]],
        ids=lambda sizes: f"{len(sizes)}-parts-{sum(sizes)}-bytes",
    )
    def test_parts_of_any_number_and_size_lie_end_to_end(self, backend: Backend, sizes: list[int]) -> None:
        body = pattern(sum(sizes))
        parts: list[Buffer] = []
        start = 0
        for i, size in enumerate(sizes):
            piece = body[start : start + size]
            kinds: tuple[Buffer, ...] = (piece, bytearray(piece), memoryview(piece))
            parts.append(kinds[i % 3])
            start += size
        assert backend.create("parts", parts)
        assert backend.get("parts") == body

    def test_parts_of_other_formats_are_taken_as_bytes(self, backend: Backend) -> None:
        words = memoryview(bytearray(pattern(48))).cast("q")
        assert backend.create("words", [words, words.cast("B").cast("i", (3, 4))])
        assert backend.get("words") == pattern(48) * 2
        with pytest.raises(InvalidArgument, match="not contiguous"):
            backend.create("strided", [words[::2]])
        assert backend.get("strided") is None

    def test_a_caller_may_reuse_its_buffer_after_create(self, backend: Backend) -> None:
        buffer = bytearray(b"first")
        backend.create("k", [buffer])
        buffer[:] = b"later"
        assert backend.get("k") == b"first"

    def test_a_key_is_never_the_folder_of_another(self, backend: Backend) -> None:
        backend.create("writers/0", [b"x"])
        for key in ("writers/0/end", "writers/0/deep/end", "writers"):
            if self.folders:
                with pytest.raises(InvalidArgument, match="folder"):
                    backend.create(key, [b"y"])
                with pytest.raises(InvalidArgument, match="folder"):
                    backend.put(key, b"y")
            assert backend.get(key) is None
            assert backend.wait([key], 0) == [False]
            assert isinstance(read(backend, key, 0, 1), KeyMissing)
        backend.delete(["writers", "writers/0/end"])
        assert backend.get("writers/0") == b"x"

    # -- read ----------------------------------------------------------------------------------------------------------

    def test_scattered_reads_land_in_place_with_their_errors_between_them(self, backend: Backend) -> None:
        body = pattern(300_000)
        backend.create("m/1", [body])
        backend.create("m/2", [body[::-1]])
        arena = memoryview(bytearray(b"\xee" * 5000))
        answers = backend.read_into(
            [
                Read("m/1", 5, arena[0:1000]),
                Read("nope", 0, arena[1000:1010]),
                Read("m/2", 17, arena[1100:1200]),
                Read("m/1", 299_990, arena[2000:2020]),
                Read("m/1", 400_000, arena[2100:2110]),
                Read("m/1", 150_000, arena[3000:5000]),
            ]
        )
        assert [type(answer) for answer in answers] == [
            type(None),
            KeyMissing,
            type(None),
            ShortRead,
            ShortRead,
            type(None),
        ]
        assert arena[:1000] == body[5:1005]
        assert arena[1100:1200] == body[::-1][17:117]
        assert arena[3000:] == body[150_000:152_000]
        untouched = (slice(1010, 1100), slice(1200, 2000), slice(2020, 2100), slice(2110, 3000))
        assert all(set(arena[gap]) == {0xEE} for gap in untouched)
        assert "nope" in str(answers[1])
        assert "m/1" in str(answers[3]) and "299,990" in str(answers[3])

    @pytest.mark.parametrize(
        ("start", "length", "found"), [(0, 11, 10), (9, 2, 1), (10, 1, 0), (11, 5, 0), (3, 9999, 7)]
    )
    def test_a_short_read_says_how_much_is_valid(self, backend: Backend, start: int, length: int, found: int) -> None:
        body = pattern(10)
        backend.create("ten", [body])
        out = bytearray(length)
        (problem,) = backend.read_into([Read("ten", start, memoryview(out))])
        assert isinstance(problem, ShortRead)
        assert problem.found == found
        assert out[:found] == body[start : start + found]

    def test_a_read_of_no_bytes_asks_whether_the_key_exists(self, backend: Backend) -> None:
        backend.create("empty", [])
        backend.create("full", [b"abc"])
        for key, start in (("empty", 0), ("full", 0), ("full", 3), ("full", 99)):
            assert read(backend, key, start, 0) == b""
        assert isinstance(read(backend, "none", 0, 0), KeyMissing)
        assert backend.read_into([]) == []

    def test_reads_of_many_threads_do_not_disturb_each_other(self, opened: Opened) -> None:
        backend, count = opened(), round(150 * self.effort)  # more than a back end keeps open
        for n in range(count):
            backend.create(f"many/{n}", [pattern(2000, n)])

        def reads(first: int) -> None:
            for i in range(3 * count):
                n = (first + i * 7) % count
                assert read(backend, f"many/{n}", n, 900) == pattern(2000, n)[n : n + 900]

        with running(*[lambda first=first: reads(first) for first in (0, 0, 50, 100)]):
            pass

    def test_a_read_that_cannot_be_is_refused_when_it_is_made(self) -> None:
        for out in (memoryview(b"ro"), memoryview(bytearray(8)).cast("q"), memoryview(bytearray(8))[::2]):
            with pytest.raises(InvalidArgument, match="writable, contiguous"):
                Read("k", 0, out)
        for start in (-1, 2**63):
            with pytest.raises(InvalidArgument, match=str(start)):
                Read("k", start, memoryview(bytearray(1)))

    # -- wait ----------------------------------------------------------------------------------------------------------

    def test_a_look_tells_which_exist(self, backend: Backend) -> None:
        backend.create("b", [b""])
        backend.put("c", b"")
        for timeout in (HANG, 0.0, -1.0):
            assert backend.wait(["a", "b", "c", "b"], timeout) == [False, True, True, True]
        assert backend.wait(["a", "d/e"], 0) == [False, False]
        assert backend.wait([], 0) == []

    def test_a_wait_lasts_to_its_timeout_by_the_back_ends_clock(self, backend: Backend) -> None:
        start = backend.now()
        assert backend.wait(["never", "a/never"], 0.15) == [False, False]
        assert backend.now() - start >= 0.15

    def test_a_wait_ends_when_any_of_its_keys_appears(self, opened: Opened) -> None:
        """Tails many objects in step with their writer: one lost wake-up would hang it."""
        writer, reader, count = opened(), opened(), round(200 * self.effort)

        def create() -> None:
            for n in range(count):
                assert writer.create(f"new/{n}", [b"x"])
                assert self.wait_for(writer, [f"seen/{n}"]) == [True]

        with running(create):
            for n in range(count):
                assert self.wait_for(reader, ["never", f"new/{n}", "folder/never"]) == [False, True, False]
                reader.put(f"seen/{n}", b"")

    def test_interrupt_ends_a_wait_in_progress_or_the_next_one(self, opened: Opened) -> None:
        """The waiting threads are somewhere around the start of their wait; all have to come back."""
        backend = opened()
        ready = [threading.Event() for _ in range(4)]

        def wait(i: int) -> None:
            ready[i].set()
            start = backend.now()
            assert backend.wait(["never"], HANG * 5) == [False]
            assert backend.now() - start < HANG

        with running(*[lambda i=i: wait(i) for i in range(4)]):
            assert all(event.wait(HANG) for event in ready)
            backend.interrupt()

    def test_a_thread_hears_of_earlier_interrupts_once_and_of_its_own_back_ends_only(self, opened: Opened) -> None:
        backend, other = opened(), opened()
        backend.interrupt()
        backend.interrupt()
        assert backend.wait(["never"], 0) == [False]  # a look does not count as having heard
        for _ in range(3):
            start = backend.now()
            assert backend.wait(["never"], HANG * 5) == [False]
            assert backend.now() - start < HANG
            backend.interrupt()
        assert backend.wait(["never"], HANG * 5) == [False]
        for one in (backend, other):
            start = one.now()
            assert one.wait(["never"], 0.05) == [False]
            assert one.now() - start >= 0.05

    def test_close_ends_waits_and_keeps_what_was_stored(self, opened: Opened) -> None:
        backend = opened()
        backend.create("k", [b"v"])
        assert read(backend, "k", 0, 1) == b"v"
        ready = threading.Event()

        def wait() -> None:
            ready.set()
            assert backend.wait(["never"], HANG * 5) == [False]

        with running(wait):
            assert ready.wait(HANG)
            backend.close()
        backend.close()
        assert read(opened(), "k", 0, 1) == b"v"

    # -- registers, delete ---------------------------------------------------------------------------------------------

    def test_the_last_value_of_a_register_wins(self, opened: Opened) -> None:
        one, two = opened(), opened()
        assert one.get("policy") is None
        for backend, value in ((one, b"1"), (two, b"22"), (one, b""), (two, b"333")):
            backend.put("policy", value)
            assert one.get("policy") == two.get("policy") == value
            assert read(one, "policy", 0, len(value)) == value

    def test_registers_are_never_torn(self, opened: Opened) -> None:
        values = [bytes([i]) * length for i, length in enumerate((1, 100, 5_000, 70_000))]
        left = [len(values)]
        opened().put("register", values[0])
        lock = threading.Lock()

        def write(value: bytes) -> None:
            backend = opened()
            for _ in range(round(100 * self.effort)):
                backend.put("register", value)
            with lock:
                left[0] -= 1

        def look() -> None:
            backend = opened()
            while left[0]:
                assert backend.get("register") in values

        with running(look, look, *[lambda value=value: write(value) for value in values]):
            pass

    def test_delete_is_idempotent_and_seen_by_every_handle(self, opened: Opened) -> None:
        one, two = opened(), opened()
        for key in ("d/1", "d/2", "d/3"):
            one.create(key, [b"x"])
        one.put("d/r", b"x")
        assert read(one, "d/1", 0, 1) == read(two, "d/1", 0, 1) == b"x"
        one.delete(["d/1", "none", "no/folder", "d/r", "d/1"])
        two.delete(["d/1", "d/2"])
        one.delete([])
        for backend in (one, two):
            assert backend.wait(["d/1", "d/2", "d/3", "d/r"], 0) == [False, False, True, False]
            for key in ("d/1", "d/2", "d/r"):
                assert isinstance(read(backend, key, 0, 1), KeyMissing)
                assert backend.get(key) is None

    # -- keys, the rest ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("key", BAD_KEYS, ids=range(len(BAD_KEYS)))
    def test_a_bad_key_is_refused_by_every_call(self, backend: Backend, key: str) -> None:
        calls: Sequence[Callable[[], object]] = [
            lambda: backend.create(key, [b"x"]),
            lambda: backend.read_into(
                [Read("fine", 0, memoryview(bytearray(1))), Read(key, 0, memoryview(bytearray(1)))]
            ),
            lambda: backend.wait(["fine", key], HANG),
            lambda: backend.put(key, b"x"),
            lambda: backend.get(key),
            lambda: backend.delete(["fine", key]),
        ]
        backend.create("fine", [b"x"])
        for call in calls:
            with pytest.raises(InvalidArgument, match="is not a key"):
                call()
        assert backend.get("fine") == b"x"

    @pytest.mark.parametrize("key", ODD_KEYS, ids=range(len(ODD_KEYS)))
    def test_every_good_key_works(self, backend: Backend, key: str) -> None:
        assert backend.create(key, [b"value"])
        assert backend.wait([key], HANG) == [True]
        assert read(backend, key, 1, 3) == b"alu"
        backend.put(key, b"x")
        assert backend.get(key) == b"x"
        backend.delete([key])
        assert backend.get(key) is None

    def test_its_clock_does_not_go_back(self, backend: Backend) -> None:
        first = backend.now()
        assert backend.now() >= first

    @staticmethod
    def wait_for(backend: Backend, keys: Sequence[str]) -> list[bool]:
        """A wait may end early without a reason: waits until one of the keys exists."""
        deadline = backend.now() + HANG
        found = backend.wait(keys, HANG)
        while not any(found) and backend.now() < deadline:
            found = backend.wait(keys, deadline - backend.now())
        return found


class NodeContract:
    """Inherit, and supply the fixtures ``fresh`` and ``calls``."""

    restarts = True  # a reset without a state starts over; else it goes on

    @pytest.fixture
    def fresh(self) -> Fresh:
        raise NotImplementedError("the test module supplies it")

    @pytest.fixture
    def calls(self) -> Callable[[], int]:
        raise NotImplementedError("the test module supplies it")

    def describe(self, item: Any) -> Any:
        """An item as something that compares equal to itself read again."""
        return item

    def take(self, source: Any, most: int = 1000) -> list[Any]:
        return [self.describe(item) for item in islice(source, most)]

    def test_construction_asks_nothing_of_the_store(self, fresh: Fresh, calls: Callable[[], int]) -> None:
        before = calls()
        node = fresh()
        assert calls() == before
        next(node)
        assert calls() > before

    def test_the_end_is_reached_and_stays(self, fresh: Fresh) -> None:
        node = fresh()
        items = self.take(node)
        assert 2 < len(items) < 1000
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(node)
        assert self.take(fresh()) == items

    def test_a_reset_from_which_nothing_was_read_changes_nothing(self, fresh: Fresh) -> None:
        items = self.take(fresh())
        node = fresh()
        for _ in range(3):
            node.reset()
        assert self.take(node) == items
        node = fresh()
        state = node.state_dict()
        assert self.take(node) == items
        for _ in range(2):
            node.reset(copy.deepcopy(state))
        assert self.take(node) == items

    def test_every_state_is_fresh_and_json(self, fresh: Fresh) -> None:
        node = fresh()
        states, texts = [node.state_dict()], []
        for _ in node:
            states.append(node.state_dict())
            texts.append(json.dumps(states[-1]))
        assert json.dumps(states[0]) not in texts
        assert [json.dumps(state) for state in states[1:]] == texts, "a later item changed an earlier state"
        assert node.state_dict() == states[-1]

    def test_a_resume_at_every_position_gives_the_rest(self, fresh: Fresh) -> None:
        items, node = self.take(fresh()), fresh()
        states = [node.state_dict(), *(node.state_dict() for _ in node)]
        for k, state in enumerate(states):
            again = fresh()
            again.reset(json.loads(json.dumps(state)))
            assert json.dumps(again.state_dict()) == json.dumps(state)
            assert self.take(again) == items[k:]
            with pytest.raises(StopIteration):
                next(again)

    def test_a_resume_of_a_resume_gives_the_rest(self, fresh: Fresh) -> None:
        items, got, state = self.take(fresh()), [], None
        while len(got) < len(items):
            node = fresh()
            node.reset(state)
            got += self.take(node, 2)
            state = json.loads(json.dumps(node.state_dict()))
        assert got == items

    def test_a_used_node_is_reset_to_a_state(self, fresh: Fresh) -> None:
        items, node = self.take(fresh()), fresh()
        next(node)
        state = node.state_dict()
        self.take(node)
        node.reset(state)
        assert self.take(node) == items[1:]

    def test_a_second_epoch_is_whole_or_goes_on(self, fresh: Fresh) -> None:
        items, node = self.take(fresh()), fresh()
        state = (next(node), node.state_dict())[1]
        resumed = fresh()
        resumed.reset(state)
        assert self.take(resumed) == items[1:]
        resumed.reset()
        assert self.take(resumed) == (items if self.restarts else [])
        node.reset()
        assert self.take(node) == (items if self.restarts else items[1:])

    @pytest.fixture
    def collected_here(self) -> Iterator[None]:
        """torchdata's prefetcher joins its thread when it is collected, which fails if that thread collects it."""
        gc.disable()
        yield
        gc.collect()
        gc.enable()

    @pytest.mark.usefixtures("collected_here")
    @pytest.mark.parametrize("ahead", [0, 1, 4])
    def test_it_composes_with_loader_and_prefetcher(self, fresh: Fresh, ahead: int) -> None:
        def loader() -> Loader[Any]:
            return Loader(Prefetcher(fresh(), ahead) if ahead else fresh())

        items = self.take(fresh())
        assert self.take(loader()) == items
        for k in range(len(items)):
            first, rest = loader(), loader()
            it = iter(first)
            assert self.take(it, k) == items[:k]
            rest.load_state_dict(json.loads(json.dumps(first.state_dict())))
            assert self.take(rest) == items[k:]
