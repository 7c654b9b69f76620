"""GRPO on a tiny, randomly initialised language model, with rollouts and training side by side: ``make demo``.

    rollout-0, rollout-1                                 rank 0, rank 1 (FSDP2, gloo)
      pacer.next(): what to sample, not too early          for mini in loader: one optimizer step
      put each group when its longest response ends        after each train batch: weights, then publish
            └────────── TrajectoryStore (a folder): groups one way, versions and demand the other ──────────┘

Everything that is needed to use knit_data in a real run is in ``rollout`` and ``train``; the tasks, the model and the
sampler are in ``tiny_rl.py``, the table, the figure and the checks in ``grpo_report.py``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import grpo_report
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tiny_rl import PROMPT_WIDTH, Problem, Response, build_model, encode, sample
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import knit_data as kd

GROUP_SIZE, TRAIN_BATCH, MINI_BATCH = 8, 96, 12  # trajectories a group; groups a train batch; groups an optimizer step
QUOTAS: dict[str, int | tuple[int, int]] = {
    "symbol": 36,
    "copy": (24, 36),
    "add": (24, 36),
}  # groups of each train batch: exactly, or from … to
MAX_STALENESS = 2  # train batches
WORKERS, RANKS = 2, 2
AT_ONCE = 8  # groups that a worker samples together
LEARNING_RATE = 2e-3
CLIP = (0.3, 3.0)  # wide upwards: what is trained is a train batch or two old, and a rare good answer should count
KEEP_WEIGHTS = 4  # files; a worker that just read the version finds its weights


@dataclass(frozen=True)
class Run:
    """Where one run keeps its files, and how long it is."""

    out: Path
    seed: int
    train_batches: int

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


def rollout(worker: int, run: Run) -> None:
    """Sample what the pacer asks for from the newest weights; put each group when its longest response has ended."""
    torch.set_num_threads(1)
    store, log = kd.TrajectoryStore(run.store, reclaim="never"), run.log(f"rollout-{worker}")
    pacer = kd.RolloutPacer(store, capacity=AT_ONCE, share=(worker, WORKERS))
    model, version = build_model(run.seed).eval(), -1
    rng = random.Random(f"{run.seed}/{worker}")
    torch.manual_seed(run.seed * WORKERS + worker)
    with store.writer(f"rollout-{worker}") as writer:
        while launches := take(pacer, AT_ONCE):
            if store.policy_version() != version:
                version = load_newest(model, store, run)
            problems = [Problem.draw(launch.attributes["source"], rng) for launch in launches]
            start = time.time()
            for slot, responses in sample(model, problems, GROUP_SIZE):
                problem, launch, name = problems[slot], launches[slot], launches[slot].group
                rewards = [problem.reward(response.text) for response in responses]
                try:
                    writer.put_group(
                        [
                            trajectory(f"{name}/{i}", name, version, problem, response, reward)
                            for i, (response, reward) in enumerate(zip(responses, rewards, strict=True))
                        ]
                    )
                except kd.StoreClosed:
                    return
                pacer.done(launch)
                tokens = max(len(response.ids) for response in responses)
                log(group=name, source=problem.source, version=version, slot=slot, start=start, end=time.time(),
                    tokens=tokens, reward=sum(rewards) / GROUP_SIZE)  # fmt: skip


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


def trajectory(id: str, group: str, version: int, problem: Problem, response: Response, reward: float) -> kd.Trajectory:
    prompt = encode(problem.prompt)
    return kd.Trajectory(
        id,
        group,
        version,
        tokens={
            "input_ids": torch.tensor(prompt + response.ids),
            "loss_mask": torch.tensor([False] * PROMPT_WIDTH + [True] * len(response.ids)),
            "logprobs": torch.tensor([0.0] * PROMPT_WIDTH + response.logprobs),
        },
        values={"reward": reward},
        attributes={"source": problem.source},
    )


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


def train(rank: int, run: Run) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{run.out}/rendezvous", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    model = build_model(run.seed)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    kd.integrations.fsdp.sum_gradients(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))

    store, log = kd.TrajectoryStore(run.store, reclaim="never"), run.log(f"rank-{rank}")
    sampler = kd.QuotaSampler(
        kd.TrajectoryStream(store),
        train_batch_size=TRAIN_BATCH,
        mini_batch_size=MINI_BATCH,
        group_size=GROUP_SIZE,
        quotas={"source": QUOTAS},
        max_staleness=MAX_STALENESS,
        groups=kd.GroupPolicy(annotate=kd.group_advantages),
        timeout=120.0,
    )
    loader = kd.TrajectoryLoader(sampler, max_tokens_per_micro_batch=1024, mesh=mesh, device="cpu")
    progress = Progress(sampler, run, silent=rank > 0)
    with loader, progress:
        asked = time.time()
        for mini in loader:
            denominator = mini.loss_tokens  # the first touch waits for admission
            admitted, trained = time.time(), []
            progress.step(mini)
            for micro in mini:
                model.set_requires_gradient_sync(micro.is_last)
                logits = model(**micro.model_inputs()).logits.view(*micro["labels"].shape, -1)
                loss = grpo_loss(
                    logits,
                    micro["labels"],
                    micro.targets("logprobs"),
                    micro.to_tokens("advantage"),
                    micro.targets("loss_mask"),
                )
                (loss.sum() / denominator).backward()
                trained += [
                    (info.id, info.group, info.attributes["source"], info.policy_version, float(reward))
                    for info, reward in zip(micro.infos, micro["reward"], strict=True)
                ]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            log(kind="step", index=mini.index, train_batch=mini.train_batch, position=mini.position, asked=asked,
                admitted=admitted, ended=time.time(), trained=trained)  # fmt: skip
            progress.stepped([reward for *_, reward in trained])
            if mini.is_last:
                publish_weights(model, mini.index + 1, run)
                if rank == 0:
                    store.publish(mini.index + 1)
                    log(kind="publish", version=mini.index + 1, time=time.time())
                if mini.train_batch + 1 == run.train_batches:
                    break
            asked = time.time()
        if rank == 0:
            store.finish()
    log(kind="loader", stats=loader.stats)
    dist.barrier()
    dist.destroy_process_group()


def grpo_loss(logits: Tensor, labels: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The clipped policy-gradient loss of each token."""
    new = -cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - CLIP[0], 1 + CLIP[1])
    return -torch.minimum(ratio * advantages, clipped * advantages) * mask


def publish_weights(model: nn.Module, version: int, run: Run) -> None:
    """Collective. The file appears whole under its version's name; old ones go."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        save_weights(state, version, run)
        versions = sorted(int(path.stem) for path in run.weights(version).parent.glob("*.safetensors"))
        for old in versions[:-KEEP_WEIGHTS]:
            run.weights(old).unlink()


def save_weights(state: dict[str, Any], version: int, run: Run) -> None:
    path = run.weights(version)
    save_file(state, path.with_suffix(".partial"))
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
        steps = TRAIN_BATCH // MINI_BATCH
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="replaces an earlier run's files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-batches", type=int, default=12)
    arguments = parser.parse_args()
    run = Run(arguments.out.resolve(), arguments.seed, arguments.train_batches)
    for name in ("store", "weights", "events"):
        shutil.rmtree(run.out / name, ignore_errors=True)
    (run.out / "rendezvous").unlink(missing_ok=True)
    for name in ("weights", "events"):
        (run.out / name).mkdir(parents=True)
    torch.set_num_threads(1)
    save_weights(build_model(run.seed).state_dict(), 0, run)

    began = time.time()
    failure = supervise(run)
    if failure:
        print(f"FAILED: {failure}")
        return 1
    report = grpo_report.Report.of(run.out, QUOTAS, TRAIN_BATCH, MINI_BATCH, GROUP_SIZE, MAX_STALENESS)
    report.timeline(run.out / "timeline.png")
    print(report.table())
    print(f"{time.time() - began:.0f} s; {run.out / 'timeline.png'}")
    problems = report.problems(run.train_batches)
    for problem in problems:
        print(f"FAILED: {problem}")
    return 1 if problems else 0


def supervise(run: Run) -> str | None:
    """Run all processes to their end. The first that fails ends the others, and is named."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "transformers.models.llama.modeling_llama", "knit_data"])
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


if __name__ == "__main__":
    sys.exit(main())
