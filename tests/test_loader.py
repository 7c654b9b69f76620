"""The loader in one process: lazy, never waiting for itself, exact after a resume, and gone when it is closed."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import fill, group, loader, read_through, sampler, trajectory

import knit_data as kd
from knit_data.store.memory import Crash, Fault, ManualClock, MemoryBackend

SOURCE = str(Path(kd.__file__).parents[1])
DEPTHS = pytest.mark.parametrize("prefetch", [0, 1, 2, 5])


def filled(count: int = 24, **changes: Any) -> kd.TrajectoryStore:
    return fill(kd.TrajectoryStore("memory://"), count, **changes)


def full_run(store: kd.TrajectoryStore, **changes: Any) -> list[tuple[int, int, list[str]]]:
    with loader(store, **changes) as run:
        return [read_through(mini) for mini in run]


# -- laziness ----------------------------------------------------------------------------------------------------------


@DEPTHS
def test_every_group_is_trained_once_in_order(prefetch):
    store = filled(24)
    with loader(store, options={"prefetch": prefetch}) as run:
        minis = [read_through(mini) for mini in run]
        stats = run.stats
    assert [index for index, _, _ in minis] == list(range(12))
    trained = [name for _, _, ids in minis for name in ids]
    assert sorted(trained) == sorted(f"g{g:04d}/{i}" for g in range(24) for i in range(4))
    assert (stats["groups"], stats["trajectories"], stats["mini_batches"], stats["left_over"]) == (24, 96, 12, 0)
    assert run.stats == stats


@DEPTHS
def test_several_mini_batches_taken_before_the_first_is_read(prefetch):
    want = full_run(filled(8))
    with loader(filled(8), options={"prefetch": prefetch}) as run:
        minis = [next(run) for _ in range(4)]
        assert [read_through(mini) for mini in minis] == want


@DEPTHS
def test_a_mini_batch_may_be_read_before_an_earlier_one(prefetch):
    want = full_run(filled(8))
    with loader(filled(8), options={"prefetch": prefetch}) as run:
        first, second = next(run), next(run)
        assert read_through(second) == want[1]
        with pytest.raises(kd.UsageError, match=r"before number 1 .* abandon"):
            run.state_dict()  # a resume would train it again
        assert read_through(first) == want[0]
        assert run.state_dict()["progress"][2] == 2
        assert [read_through(mini) for mini in run] == want[2:]


@DEPTHS
def test_a_whole_step_as_a_list(prefetch):
    with loader(filled(8), options={"prefetch": prefetch}) as run:
        for mini in run:
            micros = list(mini)
            assert [m.is_last for m in micros] == [False] * (len(micros) - 1) + [True]
            assert sum(len(m.infos) for m in micros) == mini.n_trajectories == 8
            assert sum(int(m["loss_mask"].count_nonzero()) for m in micros) == mini.loss_tokens


@DEPTHS
def test_break_and_go_on(prefetch):
    want = full_run(filled(8))
    with loader(filled(8), options={"prefetch": prefetch}) as run:
        got = []
        for mini in run:
            got.append(read_through(mini))
            break
        got += [read_through(mini) for mini in run]
    assert got == want


@DEPTHS
def test_touching_the_next_while_one_is_half_read_is_refused_and_abandon_is_named(prefetch):
    want = full_run(filled(8))
    with loader(filled(8), options={"prefetch": prefetch}) as run:
        half = next(run)
        next(iter(half))
        later = next(run)
        with pytest.raises(kd.UsageError, match=r"mini-batch 0 is half read.*mini\.abandon\(\)"):
            later.loss_tokens  # noqa: B018  # the touch is the test
        half.abandon()
        assert [read_through(mini) for mini in chain([later], run)] == want[1:]
        assert run.stats["mini_batches"] == 4  # given up counts as consumed


@DEPTHS
def test_an_abandoned_mini_batch_ends_its_pass_and_counts_in_the_state(prefetch):
    store = filled(8)
    want = full_run(store)
    with loader(store, options={"prefetch": prefetch}) as run:
        mini = next(run)
        micros = iter(mini)
        next(micros)
        mini.abandon()
        mini.abandon()
        assert list(micros) == []
        state = run.state_dict()
    with loader(store) as rest:
        rest.load_state_dict(state)
        assert [read_through(mini) for mini in rest] == want[1:]


def test_the_training_pass_is_there_once():
    with loader(filled(8)) as run:
        mini = next(run)
        list(mini)
        for _ in range(2):
            with pytest.raises(kd.UsageError, match=r"mini-batch 0 was iterated before.*micro_batches"):
                iter(mini)
        assert len([list(mini) for mini in run]) == 3


@DEPTHS
def test_extra_passes_before_during_and_after_the_training_pass(prefetch):
    with loader(filled(8), options={"prefetch": prefetch}) as run:
        for mini in run:
            before = [m["input_ids"].tolist() for m in mini.micro_batches(fields=("input_ids",))]
            during, training = [], []
            for micro in mini:
                training.append(micro["input_ids"].tolist())
                extra = list(mini.micro_batches(fields="reward"))
                during.append([len(m["reward"]) for m in extra])
                assert [m.is_last for m in extra] == [False] * (len(extra) - 1) + [True]
            after = [m["input_ids"].tolist() for m in mini.micro_batches()]
            assert before == training == after
            assert all(sizes == during[0] and sum(sizes) == 8 for sizes in during)
    with pytest.raises(kd.UsageError, match="over: a later one was touched"):
        list(mini.micro_batches())


def test_an_extra_pass_after_moving_on_is_refused():
    with loader(filled(8)) as run:
        first = next(run)
        list(first)
        pending = iter(first.micro_batches())
        next(pending)
        second = next(run)
        assert second.index == 1
        for late in (pending, iter(first.micro_batches())):
            with pytest.raises(kd.UsageError, match="over: a later one was touched"):
                next(late)
        assert (first.index, first.n_trajectories) == (0, 8)  # its numbers stay


def test_an_extra_pass_for_unknown_fields_harms_nothing_else():
    want = full_run(filled(8))
    with loader(filled(8)) as run:
        first = next(run)
        with pytest.raises(kd.InvalidArgument, match=r"\['rewards'\] are not in this store.*'reward'"):
            list(first.micro_batches(fields=["rewards"]))
        assert [read_through(mini) for mini in chain([first], run)] == want


def test_next_returns_before_there_is_data_and_the_first_touch_waits_for_it():
    store = kd.TrajectoryStore("memory://")
    handed_out = threading.Event()

    def produce() -> None:
        handed_out.wait()
        fill(store, 8)

    producer = threading.Thread(target=produce)
    producer.start()
    with loader(store) as run:
        mini = next(run)
        handed_out.set()
        assert mini.n_groups == 2 and mini.loss_tokens >= 1
        assert len([read_through(m) for m in chain([mini], run)]) == 4
    producer.join()


def test_a_list_of_the_loader_is_refused_in_place_of_never_ending():
    with loader(filled(8)) as run, pytest.raises(kd.UsageError, match=r"1000 mini-batches.*list\(loader\)"):
        list(run)


# -- nothing waits for itself ------------------------------------------------------------------------------------------


class OnPolicy:
    """Rollouts of one train batch after each published version; train batch = mini-batch = 2 groups, staleness 0."""

    def __init__(self) -> None:
        self.store, self.version = kd.TrajectoryStore("memory://"), 0
        self.writer = self.store.writer("w")
        self.roll_out()

    def roll_out(self) -> None:
        for g in range(2):
            self.writer.put_group(group(f"v{self.version}/{g}", policy_version=self.version))

    def optimizer_step(self) -> None:
        self.version += 1
        self.store.publish(self.version)
        self.roll_out()

    def loader(self, prefetch: int) -> kd.TrajectoryLoader:
        sizes = {"train_batch_size": 2, "mini_batch_size": 2, "max_staleness": 0}
        return loader(self.store, options={"prefetch": prefetch}, **sizes)


def groups_of(ids: list[str]) -> list[str]:
    return sorted({name.rsplit("/", 1)[0] for name in ids})


@DEPTHS
@pytest.mark.parametrize("client", ["next too early", "whole step at once"])
def test_on_policy_data_and_an_impatient_client_do_not_deadlock(prefetch, client):
    job = OnPolicy()
    got, states = [], []
    with job.loader(prefetch) as run:
        following = next(run)
        for _ in range(4):
            mini = following
            if client == "next too early":
                following = next(run)
                _, _, ids = read_through(mini)
            else:
                ids = [info.id for micro in list(mini) for info in micro.infos]
                following = next(run)
            got.append(groups_of(ids))
            job.optimizer_step()
            states.append(json.dumps(run.state_dict()))
    want = [[f"v{v}/0", f"v{v}/1"] for v in range(4)]
    assert got == want
    job.store.seal()
    for v, state in enumerate(states):
        with job.loader(prefetch) as resumed:
            resumed.load_state_dict(json.loads(state))
            # published weights are those of the last step, so nothing older than v + 1 fits
            assert groups_of(read_through(next(resumed))[2]) == [f"v{v + 1}/0", f"v{v + 1}/1"]


# -- the end of the stream ---------------------------------------------------------------------------------------------


@DEPTHS
def test_what_does_not_fill_a_mini_batch_is_left_over(prefetch):
    with loader(filled(7), options={"prefetch": prefetch}) as run:
        minis = list(map(read_through, run))
        assert len(minis) == 3 and run.stats["left_over"] == 1
        assert [m[0] for m in minis] == [0, 1, 2]


@DEPTHS
def test_an_exhausted_loader_says_so_when_iterated_again(prefetch):
    with loader(filled(8), options={"prefetch": prefetch}) as run:
        for mini in run:
            list(mini)
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(run)
            with pytest.raises(kd.UsageError, match="stream has ended and was iterated to its end"):
                iter(run)
        run.load_state_dict(run.sampler.ledger_of().state())
        assert len([list(mini) for mini in run]) == 4


@DEPTHS
@pytest.mark.parametrize("count", [0, 1])
def test_a_sealed_store_without_a_whole_mini_batch_yields_none(prefetch, count):
    with loader(filled(count), options={"prefetch": prefetch}) as run:
        assert list(run) == []
        assert run.stats["left_over"] == count


@DEPTHS
def test_a_mini_batch_handed_out_before_the_end_was_known_is_empty(prefetch):
    store = kd.TrajectoryStore("memory://")
    with loader(store, options={"prefetch": prefetch}) as run:
        mini = next(run)
        store.seal()
        assert list(mini) == [] and list(mini.micro_batches()) == []
        assert (mini.n_trajectories, mini.n_groups, mini.is_last) == (0, 0, False)
        with loader(filled(8)) as other:
            assert mini.stats.keys() == next(other).stats.keys()
        with pytest.raises(StopIteration):
            next(run)
        assert run.stats["mini_batches"] == 0


@DEPTHS
def test_one_taken_too_early_at_the_end_is_empty(prefetch):
    with loader(filled(2), options={"prefetch": prefetch}) as run:
        last, beyond = next(run), next(run)
        assert len(read_through(last)[2]) == 8
        assert list(beyond) == [] and beyond.n_trajectories == 0
        assert list(run.state_dict()["progress"]) == [0, 0, 1, None]


def test_a_stream_that_does_not_follow_ends_without_a_seal():
    store = kd.TrajectoryStore("memory://")
    writer = store.writer("w")
    for g in range(4):
        writer.put_group(group(f"g{g}"))
    with loader(store, follow=False) as run:
        assert len([list(mini) for mini in run]) == 2


# -- closing -----------------------------------------------------------------------------------------------------------


@DEPTHS
def test_close_at_any_moment_and_twice(prefetch):
    store = filled(8)
    options = {"prefetch": prefetch}
    unused = loader(store, options=options)
    unused.close()
    unused.close()
    with pytest.raises(kd.UsageError, match="closed"):
        next(unused)
    inside = loader(store, options=options)
    mini = next(inside)
    micros = iter(mini)
    next(micros)
    later = next(inside)
    inside.close()
    inside.close()
    for call in (lambda: next(micros), lambda: later.index, lambda: next(inside)):
        with pytest.raises(kd.UsageError, match="closed"):
            call()
    assert mini.index == 0
    assert inside.state_dict()["progress"][:3] == [0, 0, 0]


def test_a_state_can_be_taken_after_close():
    store = filled(8)
    want = full_run(store)
    with loader(store) as run:
        list(next(run))
    with loader(store) as rest:
        rest.load_state_dict(run.state_dict())
        assert [read_through(mini) for mini in rest] == want[1:]


@DEPTHS
def test_stats_after_an_early_close_add_up(prefetch):
    with loader(filled(24), options={"prefetch": prefetch}) as run:
        for _ in range(5):
            list(next(run))
    stats = run.stats
    dropped = sum(n for key, n in stats.items() if key.startswith("dropped/"))
    assert stats["groups"] == 10 and stats["groups"] + stats["left_over"] + dropped == 24


def test_close_from_another_thread_ends_a_wait():
    run = loader(kd.TrajectoryStore("memory://"))
    mini = next(run)
    closer = threading.Thread(target=run.close)
    closer.start()
    with pytest.raises(kd.UsageError, match="closed"):
        mini.loss_tokens  # noqa: B018  # the touch is the test
    closer.join()


def test_no_thread_after_a_break_an_exception_or_the_last_reference():
    def threads() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("knit-loader")]

    with loader(filled(8)) as run:
        for mini in run:
            for _ in mini:
                break
            break
        assert len(threads()) == 1
    assert threads() == []
    with pytest.raises(ZeroDivisionError), loader(filled(8)) as run:
        for mini in run:
            for _ in mini:
                raise ZeroDivisionError
    assert threads() == []
    run = loader(filled(8))
    list(next(run))
    del run
    gc.collect()
    assert threads() == []


def python(code: str, *, wait_for: str | None = None, send: int | None = None) -> tuple[int, str, str]:
    """Exit code, output and errors of a process of its own; the signal is sent once it printed ``wait_for``."""
    head = "import signal, sys, threading\nimport knit_data as kd\nfrom makers import *\n"
    path = os.pathsep.join([SOURCE, str(Path(__file__).parent)])
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", head + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    seen = ""
    if wait_for is not None:
        assert process.stdout is not None
        while wait_for not in seen and (line := process.stdout.readline()):
            seen += line
    if send is not None:
        process.send_signal(send)
    out, err = process.communicate(timeout=240)
    return process.returncode, seen + out, err


BLOCKED = """
run = loader(kd.TrajectoryStore("memory://"), options={"prefetch": %d})
mini = next(run)
print("ready", flush=True)
"""


@pytest.mark.parametrize("prefetch", [0, 2])
def test_ctrl_c_while_waiting_for_data(prefetch):
    start, ready, _ = (BLOCKED % prefetch).rsplit("\n", 2)
    code = f"signal.signal(signal.SIGINT, signal.default_int_handler)\n{start}\n" + (
        f"try:\n    {ready}\n    mini.loss_tokens\nexcept KeyboardInterrupt:\n    run.close()\n"
        "print('left', [t.name for t in threading.enumerate() if t.name.startswith('knit')])\n"
    )
    assert python(code, wait_for="ready", send=signal.SIGINT) == (0, "ready\nleft []\n", "")


def test_sigterm_with_and_without_a_handler():
    code = BLOCKED % 2 + "mini.loss_tokens\n"
    assert python(code, wait_for="ready", send=signal.SIGTERM) == (-signal.SIGTERM, "ready\n", "")
    code = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + code
    assert python(code, wait_for="ready", send=signal.SIGTERM) == (0, "ready\n", "")


def test_the_interpreter_may_leave_with_loaders_open():
    code = (
        "runs = [loader(fill(kd.TrajectoryStore('memory://'), 8), options={'prefetch': p}) for p in (0, 2)]\n"
        "kept = [list(next(run)) for run in runs]\n" + BLOCKED % 2
    )
    assert python(code) == (0, "ready\n", "")


# -- errors ------------------------------------------------------------------------------------------------------------


def invalid(infos: list[kd.TrajectoryInfo]) -> bool:
    raise ZeroDivisionError(f"cannot judge {infos[0].group}")


@DEPTHS
@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (
            {"group_size": 3, "groups": kd.GroupPolicy(surplus="error")},
            kd.InvalidGroup,
            "a member too many of group .g0000.: group_size is 3",
        ),
        (
            {"groups": kd.GroupPolicy(keep=invalid)},
            kd.InvalidGroup,
            "keep raised ZeroDiv.* cannot judge g0000",
        ),
        (
            {"groups": kd.GroupPolicy(annotate=invalid)},
            kd.InvalidGroup,
            "annotate raised ZeroDiv.* group .g0000.",
        ),
        (
            {"groups": kd.GroupPolicy(annotate=lambda _: {"a": [0.0]})},
            kd.InvalidGroup,
            "one finite float .float32. per member",
        ),
        (
            {"groups": kd.GroupPolicy(annotate=lambda _: {"reward": [0.0] * 4})},
            kd.InvalidArgument,
            "choose another name",
        ),
        ({"quotas": {"source": {"math": 8}}}, kd.InvalidGroup, "has 'code' as attribute 'source'"),
    ],
)
def test_what_fails_at_admission_is_raised_in_the_consumer_every_time(prefetch, changes, error, text):
    with loader(filled(8), options={"prefetch": prefetch}, **changes) as run:
        for _ in range(3):
            with pytest.raises(error, match=text):
                next(run)
        assert run.state_dict()["progress"][:3] == [0, 0, 0]


@DEPTHS
def test_a_corrupt_read_is_raised_by_every_call_that_needs_more(prefetch):
    store = filled(8)
    store.backend.faults.append(Fault("read", "segments/*", after=8, times=None, error="flip"))  # 8 heads are sound
    with loader(store, options={"prefetch": prefetch}) as run:
        mini = next(run)
        micros = iter(mini)
        for _ in range(3):
            with pytest.raises(kd.CorruptData, match=r"segments/w\d/\d+\.safetensors: .* checksum .* of trajectory 'g"):
                next(micros)
        later = next(run)
        with pytest.raises(kd.CorruptData):
            later.loss_tokens  # noqa: B018  # the touch is the test
        assert run.state_dict()["progress"][:3] == [0, 0, 0]


def test_a_wait_for_data_that_does_not_come_ends_with_what_is_short():
    MemoryBackend.named("timeout", clock=ManualClock())
    store = kd.TrajectoryStore("memory://timeout")
    store.writer("w").put_group(group("g0"))
    with loader(store, timeout=30.0) as run:
        mini: kd.MiniBatch | None = None  # handed out before its admission, where that takes 0.2 s
        for _ in range(2):
            with pytest.raises(kd.WaitTimeout, match=r"30 s: train batch 0, mini-batch 1 of 4 .* 1 complete"):
                mini = mini or next(run)
                assert mini.n_groups


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layout": "flat"}, "layout must be 'packed' or 'padded', found 'flat'"),
        ({"on_corrupt": "skip"}, "on_corrupt must be 'raise' or 'mask', found 'skip'"),
        ({"prefetch": -1}, "prefetch must be an int >= 0, found -1"),
        ({"prefetch": True}, "prefetch must be an int >= 0, found True"),
        ({"padding": 8}, r"padding must be a kd\.Padding, found 8"),
        ({"device": "gpu"}, "device='gpu' is no device"),
        ({"dp": "dp"}, "mesh is None"),
        ({"padding": kd.Padding(total_to=128)}, "max_tokens=64 holds no trajectory"),
    ],
)
def test_bad_arguments_are_refused_by_name(options, text):
    with pytest.raises(kd.InvalidArgument, match=text):
        loader(filled(2), options=options)


def test_more_bad_arguments():
    with pytest.raises(kd.InvalidArgument, match="reads a QuotaSampler, found list"):
        kd.TrajectoryLoader([], 64)
    for cap in (0, -1, 2.5, True):
        with pytest.raises(kd.InvalidArgument, match="max_tokens"):
            loader(filled(2), cap=cap)
    with pytest.raises(kd.InvalidArgument, match=r"max_tokens=65.*takes 64"):
        loader(filled(2), groups=kd.GroupPolicy(max_tokens=65))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda_is_refused_by_name():
    with pytest.raises(
        kd.InvalidArgument, match=r"device='cuda', but this machine has no CUDA device; pass device='cpu'"
    ):
        kd.TrajectoryLoader(sampler(filled(2)), 64)


def test_unknown_fields_are_refused_by_name():
    with loader(filled(8), options={"fields": ["input_ids", "rewards"]}) as run:
        mini = next(run)
        for _ in range(2):
            with pytest.raises(kd.InvalidArgument, match=r"\['rewards'\] are not in this store"):
                list(mini.micro_batches())
        with pytest.raises(kd.InvalidArgument, match=r"\['rewards'\] are not in this store"):
            list(mini)


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_stats_have_the_same_keys_always_and_totals_add_up(layout):
    keep = kd.GroupPolicy(keep=lambda infos: infos[0].group != "g0003")
    with loader(filled(24), options={"layout": layout}, groups=keep) as run:
        start = run.stats
        keys, minis = None, []
        for mini in run:
            before = mini.stats
            list(mini)
            after = mini.stats
            keys = keys or after.keys()
            assert before.keys() == after.keys() == keys
            assert all(isinstance(v, float) for v in after.values())
            minis.append(after)
        end = run.stats
    assert start.keys() == end.keys() and set(start.values()) == {0.0}
    for key in start.keys() & keys:
        if not key.startswith("dropped/"):
            assert end[key] == pytest.approx(sum(m[key] for m in minis))
    assert end["dropped/filtered"] == sum(m["dropped/filtered"] for m in minis) == 1
    assert (end["groups"], end["left_over"]) == (22, 1)  # 24 = 22 + 1 filtered + 1 left over
    assert all(m["padded_tokens"] >= m["tokens"] > 0 for m in minis)
    assert end["bytes_read"] == end["tokens"] * (8 + 4)  # input_ids and logprobs; rewards are in the table
    assert minis[0]["imbalance"] == 1.0  # one rank


def test_the_trainer_s_threads_keep_their_number():
    before = torch.get_num_threads()
    with loader(filled(8)) as run:
        list(next(run))
        found: list[int] = []
        young = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        young.start()
        young.join()
        assert [torch.get_num_threads(), *found] == [before, before]


# -- exactly once ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs() -> dict[int, Any]:
    """By epochs: a store and what an uninterrupted run over it trains."""
    out = {}
    for epochs in (1, 2):
        store = filled(22)  # the last train batch is cut off
        out[epochs] = store, full_run(store, epochs=epochs)
    return out


@settings(max_examples=15)
@given(
    epochs=st.sampled_from([1, 2]),
    stops=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    prefetch=st.sampled_from([0, 2, 5]),
)
def test_resumes_of_resumes_equal_the_uninterrupted_run(runs, epochs, stops, prefetch):
    store, want = runs[epochs]
    got: list[Any] = []
    state = None
    for stop in [*stops, None]:
        with loader(store, options={"prefetch": prefetch}, epochs=epochs) as run:
            if state is not None:
                run.load_state_dict(json.loads(state))
            for mini in run if stop is None else (next(run, None) for _ in range(stop)):
                if mini is not None:
                    got.append(read_through(mini))
                    state = json.dumps(run.state_dict())
            if mini_follows := (next(run, None) if stop is not None and len(got) < len(want) else None):
                next(iter(mini_follows))  # half read: it is trained again
            state = json.dumps(run.state_dict())
    assert got == want


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_running_loader_takes_a_state(runs, epochs, prefetch):
    store, want = runs[epochs]
    with loader(store, options={"prefetch": prefetch}, epochs=epochs) as run:
        got, states = [], [run.state_dict()]
        for mini in run:
            got.append(read_through(mini))
            states.append(run.state_dict())
            if len(got) == 5:
                break
        half, waiting = next(run), next(run)
        micros = iter(half)
        next(micros)
        for back in (5, 2, 0):
            run.load_state_dict(json.loads(json.dumps(states[back])))
            for old in (lambda: next(micros), lambda: waiting.index):
                with pytest.raises(kd.UsageError, match="load_state_dict was called since"):
                    old()
            half.abandon()  # of no effect
            assert run.state_dict() == states[back]
            assert [read_through(mini) for mini in run] == want[back:]


def test_states_are_small_and_json(runs):
    store, _ = runs[1]
    with loader(store) as run:
        sizes = []
        for mini in run:
            list(mini)
            state = run.state_dict()
            assert json.loads(json.dumps(state)) == state
            assert run.state_dict() == state and run.state_dict() is not state
            sizes.append(len(json.dumps(state)))
    assert max(sizes) < 2000


@pytest.mark.parametrize("error", [Crash("the host died"), kd.Unreachable("no answer")])
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_crash_at_every_read_in_turn(error, epochs):
    store = filled(6)
    faults, count = store.backend.faults, Fault("read", after=10**9)
    faults.append(count)
    want = full_run(store, epochs=epochs)
    for at in range(count.seen):
        faults[:] = [Fault("read", after=at, error=error)]
        got, state = [], None
        run = loader(store, epochs=epochs)
        with pytest.raises(type(error)):
            for mini in run:
                got.append(read_through(mini))
                state = run.state_dict()
            raise error  # struck the read-ahead of nothing, or was not reached
        run.close()
        faults.clear()
        with loader(store, epochs=epochs) as rest:
            if state is not None:
                rest.load_state_dict(json.loads(json.dumps(state)))
            assert got + [read_through(mini) for mini in rest] == want


@pytest.mark.parametrize("operation", ["get", "put"])
def test_a_crash_at_every_register_in_turn(operation):
    store = filled(6)
    faults, count = store.backend.faults, Fault(operation, after=10**9)
    faults.append(count)
    want = full_run(store)
    for at in range(count.seen):
        faults[:] = [Fault(operation, after=at, error="crash_before")]
        got, run = [], loader(store)
        with pytest.raises(Crash):
            for mini in run:
                got.append(read_through(mini))
            raise Crash("not reached")
        state = run.state_dict()
        faults.clear()
        run.close()
        with loader(store) as rest:
            rest.load_state_dict(state)
            assert got + [read_through(mini) for mini in rest] == want


def test_a_writer_that_crashes_is_repeated_and_trained_once():
    store = kd.TrajectoryStore("memory://")
    for at, how in enumerate(["crash_before", "crash_after"]):
        store.backend.faults[:] = [Fault("create", "segments/*", error=how)]
        with pytest.raises(Crash):
            store.writer("w").put_group(group(f"g{at}"))
        store.writer("w").put_group(group(f"g{at}"))  # the worker starts again and repeats
    store.seal()
    assert [groups_of(ids) for _, _, ids in full_run(store)] == [["g0", "g1"]]


def test_states_that_do_not_belong_are_refused():
    store = filled(8)
    with loader(store) as run:
        list(next(run))
        state = run.state_dict()
    cases: list[tuple[kd.TrajectoryStore, dict[str, Any], str]] = [
        (filled(8), {}, f"belongs to store {store.id}"),
        (store, {"train_batch_size": 4}, "train_batch_size=8, this sampler has 4"),
        (store, {"mini_batch_size": 4}, "mini_batch_size=2, this sampler has 4"),
        (store, {"group_size": None}, "group_size=4, this sampler has None"),
        (store, {"epochs": 2}, "epochs=1, this sampler has 2"),
        (store, {"seed": 1}, "seed=0, this sampler has 1"),
        (store, {"quotas": {"source": {"math": 4, "code": 4}}}, "until the train batch is over"),
    ]
    for other, changes, text in cases:
        with loader(other, **changes) as run, pytest.raises(kd.StateError, match=text):
            run.load_state_dict(state)
    for bad in ({}, {"version": 99}, {**state, "writers": 3}, {**state, "version": 0}):
        with loader(store) as run:
            with pytest.raises(kd.StateError):
                run.load_state_dict(bad)
            assert run.state_dict() == run.sampler.ledger_of().state()


def test_a_loader_goes_on_after_a_state_was_refused():
    with loader(filled(8)) as run:
        done = read_through(next(run))
        with pytest.raises(kd.StateError):
            run.load_state_dict({"version": 99})
        assert [done[0], *(read_through(mini)[0] for mini in run)] == [0, 1, 2, 3]


def test_an_empty_loss_mask_leaves_by_name():
    store = kd.TrajectoryStore("memory://")
    with store.writer("w") as writer:
        writer.put_group([trajectory(f"a/{i}", "a", tokens=masked_out()) for i in range(4)])
        for g in range(2):
            writer.put_group([trajectory(f"{g}/{i}", str(g), tokens=masked_out(1)) for i in range(4)])
    store.seal()
    with loader(store) as run:
        (ids,) = [read_through(mini)[2] for mini in run]
    assert groups_of(ids) == ["0", "1"] and run.stats["dropped/no_loss_tokens"] == 1


def masked_out(last: int = 0) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.tensor([5, 6, 7]),
        "logprobs": torch.zeros(3),
        "loss_mask": torch.tensor([0.0, 0.0, last]),
    }


@DEPTHS
def test_an_interrupted_hand_out_is_repeated_in_order(prefetch, monkeypatch):
    with loader(fill(kd.TrajectoryStore("memory://"), 8), 32, options={"prefetch": prefetch}) as run:
        with loader(fill(kd.TrajectoryStore("memory://"), 8), 32) as straight:
            want = [[i.id for i in micro.infos] for micro in next(straight)]
        mini = next(run)
        mini.loss_tokens  # noqa: B018  # admitted
        passing, seen = iter(mini), []
        take = type(run.running()).micro
        raised = set()

        def interrupted(self, i, j):
            out = take(self, i, j)
            if j not in raised:  # after the answer, before the caller has it
                raised.add(j)
                raise KeyboardInterrupt
            return out

        monkeypatch.setattr(type(run.running()), "micro", interrupted)
        while True:
            try:
                seen.append([i.id for i in next(passing).infos])
            except KeyboardInterrupt:
                continue
            except StopIteration:
                break
    assert seen == want and len(raised) == len(want) > 1


def test_a_second_loader_needs_a_sampler_of_its_own():
    made = sampler(fill(kd.TrajectoryStore("memory://"), 8))
    with kd.TrajectoryLoader(made, 64, device="cpu") as run:
        list(next(run))
        state = run.state_dict()
    with kd.TrajectoryLoader(made, 64, device="cpu") as again:
        with pytest.raises(kd.UsageError, match="admitted mini-batches already"):
            next(again)
    with kd.TrajectoryLoader(made, 64, device="cpu") as again:
        again.load_state_dict(state)
        assert [read_through(mini)[0] for mini in again] == [1, 2, 3]


def test_the_stats_of_a_resumed_loader_are_its_own():
    store = fill(kd.TrajectoryStore("memory://"), 8)
    groups = kd.GroupPolicy(keep=lambda infos: not infos[0].group.endswith("3"))
    size = {"train_batch_size": 2, "groups": groups}
    with loader(store, **size) as run:
        list(next(run))
        state = run.state_dict()
        assert state["dropped"] == {"filtered": 1}
    with loader(store, **size) as run:
        run.load_state_dict(state)
        for mini in run:
            list(mini)
        assert run.stats["dropped/filtered"] == 0 and run.stats["groups"] == 4


@pytest.mark.parametrize("state", [None, 3, "state", []])
def test_what_is_no_state_is_refused_by_both_of_its_doors(state):
    with loader(fill(kd.TrajectoryStore("memory://"), 4)) as run:
        for door in (run.load_state_dict, run.commit):
            with pytest.raises(kd.StateError, match="what state_dict"):
                door(state)


@pytest.mark.parametrize("options", [{"device": "meta"}, {"device": "mps"}, {"reuse_buffers": "yes"}])
def test_devices_and_switches_that_are_none_are_refused(options):
    with pytest.raises(kd.InvalidArgument, match=r"supported are|True or False"):
        loader(kd.TrajectoryStore("memory://"), options=options)


def test_a_demand_that_cannot_be_written_does_not_stop_training():
    store = fill(kd.TrajectoryStore("memory://", reclaim="never"), 4)
    store.backend.faults.append(Fault("put", "registers/demand", times=None, error=kd.Unreachable("read-only")))
    with loader(store, options={"prefetch": 0}) as run, pytest.warns(UserWarning, match="demand could not be written"):
        assert sum(len(micro.infos) for mini in run for micro in mini) > 0


def test_without_threads_launchers_are_told_before_a_mini_batch_is_handed_out():
    store, steps = fill(kd.TrajectoryStore("memory://"), 24), 0
    with loader(store, options={"prefetch": 0}) as run:
        for mini in run:
            steps += len(list(mini)) > 0
            assert store.demand().train_batch == steps // run.sampler.sizes.clock.steps
    assert steps > 4


def test_no_mini_batch_waits_for_its_demand_and_the_last_one_is_written(monkeypatch):
    store = fill(kd.TrajectoryStore("memory://"), 24)
    go, real = threading.Event(), store.publish_demand

    def held(demand: Any) -> None:
        assert go.wait(60)
        real(demand)

    monkeypatch.setattr(store, "publish_demand", held)
    with loader(store, options={"prefetch": 2}) as run:
        assert min(len(list(next(run))) for _ in range(3)) > 0
        assert store.outlook() is None, "three are trained, and nothing was written yet"
        go.set()
        for mini in run:
            list(mini)
        assert store.demand().train_batch == 3, "the end of the loop comes after the last demand"
    store = fill(kd.TrajectoryStore("memory://"), 24)
    with loader(store, options={"prefetch": 2}) as run:
        assert min(len(list(next(run))) for _ in range(4)) > 0
    assert store.demand().train_batch == 1, "and so does close"
