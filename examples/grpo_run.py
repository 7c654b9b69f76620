"""What every GRPO example needs besides its tasks and its training loop: files, processes, weights and a live line."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import grpo_report
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy

import knit_data as kd

WORKERS, RANKS = 2, 2
AT_ONCE = 8  # groups that a worker samples together
CLIP = (0.3, 3.0)  # wide upwards: what is trained is a train batch or two old, and a rare good answer should count
KEEP_WEIGHTS = 4  # files; a worker that just read the version finds its weights


@dataclass(frozen=True)
class Run:
    """Where one run keeps its files, how long it is, and what it promises of each train batch."""

    out: Path
    seed: int
    train_batches: int
    plan: grpo_report.Plan

    @property
    def store(self) -> Path:
        return self.out / "store"

    def weights(self, version: int) -> Path:
        return self.out / "weights" / f"{version}.safetensors"

    def log(self, name: str) -> Callable[..., None]:
        """Appends one JSON line a call: what the report is made from."""
        file = (self.out / "events" / f"{name}.jsonl").open("a", buffering=1)
        return lambda **event: print(json.dumps(event), file=file)


# -- rollout ---------------------------------------------------------------------------------------------------------


def take(pacer: kd.RolloutPacer, most: int) -> list[kd.Launch]:
    """What to sample together: the first is waited for, others join as far as they are wanted now."""
    launches: list[kd.Launch] = []
    try:
        while len(launches) < most and (launch := pacer.next(timeout=0.0 if launches else 120.0)) is not None:
            launches.append(launch)
    except kd.WaitTimeout:
        if not launches:
            raise
    return launches


def load_newest(model: nn.Module, store: kd.TrajectoryStore, run: Run) -> int:
    """The version is read before the file that it names: a trajectory never claims newer weights than it had."""
    while True:
        version = store.policy_version()
        try:
            model.load_state_dict(load_file(run.weights(version)))
            return version
        except FileNotFoundError:  # replaced meanwhile: there is a newer version
            continue


# -- training --------------------------------------------------------------------------------------------------------


def join(rank: int, run: Run) -> DeviceMesh:
    """The process group of the ranks, on gloo, and its mesh."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{run.out}/rendezvous", rank=rank, world_size=RANKS)
    return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))


def logprobs_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Of each label under the model, in the labels' shape; 0 where the label is -100."""
    return -cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)


def grpo_loss(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The clipped policy-gradient loss of each token."""
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - CLIP[0], 1 + CLIP[1])
    return -torch.minimum(ratio * advantages, clipped * advantages) * mask


def largest_difference(new: Tensor, old: Tensor, mask: Tensor) -> float:
    """Of the log-probabilities that count: before the first update, how far training is from rollout."""
    return float(((new.detach() - old) * (mask != 0)).abs().max())


def rows_of(micro: kd.MicroBatch) -> list[tuple[str, str, str, int, float]]:
    """What the report wants to know of each trained trajectory."""
    return [
        (info.id, info.group, info.attributes["source"], info.policy_version, float(reward))
        for info, reward in zip(micro.infos, micro["reward"], strict=True)
    ]


def publish_weights(model: nn.Module, version: int, run: Run) -> None:
    """Collective. The file appears whole under its version's name; old ones go."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        save_weights(state, version, run)
        versions = sorted(int(path.stem) for path in run.weights(version).parent.glob("*.safetensors"))
        for old in versions[:-KEEP_WEIGHTS]:
            run.weights(old).unlink()


def save_weights(state: Mapping[str, Tensor], version: int, run: Run) -> None:
    path = run.weights(version)
    save_file(dict(state), path.with_suffix(".partial"))
    os.replace(path.with_suffix(".partial"), path)


class Progress:
    """One live line: where the run stands, and what it waits for. Without a terminal: a line now and then."""

    def __init__(self, sampler: kd.QuotaSampler, run: Run, silent: bool) -> None:
        self.sampler, self.run, self.silent = sampler, run, silent
        self.state, self.reward, self.batch, self.height = "starting", 0.0, -1, 1
        self.idle_since: float | None = time.time()
        self.live, self.said = sys.stdout.isatty(), time.time()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def step(self, mini: kd.MiniBatch) -> None:
        self.idle_since = None
        steps = self.run.plan.steps
        self.state = f"train batch {mini.train_batch + 1}/{self.run.train_batches} step {mini.position + 1}/{steps}"
        self.state += f"  reward {self.reward:.2f}" if self.reward else ""
        if not self.live and mini.train_batch != self.batch:
            self._say(self._text())
        self.batch = mini.train_batch

    def stepped(self, rewards: list[float]) -> None:
        mean = sum(rewards) / max(1, len(rewards))
        self.reward = mean if not self.reward else 0.8 * self.reward + 0.2 * mean
        self.idle_since = time.time()

    def _text(self) -> str:
        since = self.idle_since
        if since is None:
            return f"{self.state}  training"
        seconds = time.time() - since
        return self.state if seconds < 0.3 else f"{self.state}  waiting {seconds:.0f} s: {self.sampler.explain()}"

    def _watch(self) -> None:
        while not self.over.wait(0.2):
            if self.live:
                self._say(self._text())
            elif self.idle_since is not None and time.time() - max(self.said, self.idle_since) > 5:
                self._say(self._text())

    def _say(self, text: str) -> None:
        if self.silent:
            return
        if self.live:
            lines = textwrap.wrap(text, shutil.get_terminal_size().columns - 1) or [""]
            up = f"\x1b[{self.height - 1}A" if self.height > 1 else ""
            print(f"\r{up}\x1b[J" + "\n".join(lines), end="", flush=True)
            self.height = len(lines)
        else:
            print(text, flush=True)
        self.said = time.time()

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()
        if self.live:
            self._say("")


# -- the whole run ---------------------------------------------------------------------------------------------------

Part = Callable[[int, Run], None]  # of one process, given its number among its like


def main(
    about: str,
    plan: grpo_report.Plan,
    build_model: Callable[[int], nn.Module],
    rollout: Part,
    train: Part,
    out: Path,
    train_batches: int,
) -> int:
    """Run an example to its end, print its table, draw its timeline. 1 if a promise was broken, else 0."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--out", type=Path, default=out, help="replaces an earlier run's files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-batches", type=int, default=train_batches)
    arguments = parser.parse_args()
    run = Run(arguments.out.resolve(), arguments.seed, arguments.train_batches, plan)
    for name in ("store", "weights", "events"):
        shutil.rmtree(run.out / name, ignore_errors=True)
    (run.out / "rendezvous").unlink(missing_ok=True)
    for name in ("weights", "events"):
        (run.out / name).mkdir(parents=True)
    torch.set_num_threads(1)
    model = build_model(run.seed)
    save_weights(model.state_dict(), 0, run)

    began = time.time()
    failure = supervise(run, rollout, train, preload=["torch.distributed.fsdp", type(model).__module__, "knit_data"])
    if failure:
        print(f"FAILED: {failure}")
        return 1
    report = grpo_report.Report.of(run.out, plan)
    report.timeline(run.out / "timeline.png")
    print(report.table())
    print(f"{time.time() - began:.0f} s; {run.out / 'timeline.png'}")
    problems = report.problems(run.train_batches)
    for problem in problems:
        print(f"FAILED: {problem}")
    return 1 if problems else 0


def supervise(run: Run, rollout: Part, train: Part, preload: list[str]) -> str | None:
    """Run all processes to their end, ``preload`` being imported once. The first that fails ends the others, and is
    named."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload)
    ranks: list[BaseProcess] = [context.Process(target=train, args=(i, run), name=f"rank {i}") for i in range(RANKS)]
    workers: list[BaseProcess] = [
        context.Process(target=rollout, args=(i, run), name=f"rollout-{i}") for i in range(WORKERS)
    ]
    processes = [*ranks, *workers]
    try:
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            multiprocessing.connection.wait([process.sentinel for process in processes if process.is_alive()])
            for process in processes:
                if process.exitcode:
                    return f"{process.name} ended with exit code {process.exitcode}"
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
        for process in processes:
            if process.pid is not None:
                process.join(10)
    return None
