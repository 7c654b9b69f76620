"""GRPO on a tiny, randomly initialised language model, with rollouts and training side by side: ``make demo-text``.

    rollout-0, rollout-1                                 rank 0, rank 1 (FSDP2, gloo)
      pacer.next(): what to sample, not too early          for mini in loader: one optimizer step
      put each group when its longest response ends        after each train batch: weights, then publish
            └────────── TrajectoryStore (a folder): groups one way, versions and demand the other ──────────┘

Everything that is needed to use knit_data in a real run is in ``rollout`` and ``train``. The tasks and the model are in
``tiny_rl.py``, the sampler in ``sampling.py``, processes and weights in ``grpo_run.py``, the table, the figure and the
checks in ``grpo_report.py``. The same with images: ``grpo_shapes.py``.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import grpo_run
import torch
import torch.distributed as dist
from grpo_report import Plan
from grpo_run import AT_ONCE, WORKERS, Run, grpo_loss, largest_difference, load_newest, logprobs_of
from sampling import Response, sample
from tiny_rl import LIMITS, PROMPT_WIDTH, Problem, build_model, decode, encode
from torch import nn
from torch.distributed.fsdp import fully_shard

import knit_data as kd

PLAN = Plan(
    group_size=8,
    train_batch=96,
    mini_batch=12,
    quotas={"symbol": 36, "copy": (24, 36), "add": (24, 36)},
    max_staleness=2,
)
LEARNING_RATE = 2e-3


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
        while launches := grpo_run.take(pacer, AT_ONCE):
            if store.policy_version() != version:
                version = load_newest(model, store, run)
            problems = [Problem.draw(launch.attributes["source"], rng) for launch in launches]
            start = time.time()
            prompts = {"input_ids": torch.tensor([encode(problem.prompt) for problem in problems])}
            positions = torch.full((len(problems),), PROMPT_WIDTH)
            limits = [LIMITS[problem.source] for problem in problems]
            for slot, responses in sample(model, prompts, positions, limits, PLAN.group_size):
                problem, launch, name = problems[slot], launches[slot], launches[slot].group
                group = [trajectory(f"{name}/{i}", name, version, problem, r) for i, r in enumerate(responses)]
                try:
                    writer.put_group(group)
                except kd.StoreClosed:
                    return
                pacer.done(launch)
                log(group=name, source=problem.source, version=version, slot=slot, start=start, end=time.time())


def trajectory(id: str, group: str, version: int, problem: Problem, response: Response) -> kd.Trajectory:
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
        values={"reward": problem.reward(decode(response.ids))},
        attributes={"source": problem.source},
    )


# -- training --------------------------------------------------------------------------------------------------------


def train(rank: int, run: Run) -> None:
    mesh = grpo_run.join(rank, run)
    model = build_model(run.seed)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    kd.integrations.fsdp.sum_gradients(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))

    store, log = kd.TrajectoryStore(run.store, reclaim="never"), run.log(f"rank-{rank}")
    sampler = kd.QuotaSampler(
        kd.TrajectoryStream(store),
        train_batch_size=PLAN.train_batch,
        mini_batch_size=PLAN.mini_batch,
        group_size=PLAN.group_size,
        quotas={"source": PLAN.quotas},
        max_staleness=PLAN.max_staleness,
        groups=kd.GroupPolicy(annotate=kd.group_advantages),
        timeout=120.0,
    )
    loader = kd.TrajectoryLoader(sampler, max_tokens_per_micro_batch=1024, mesh=mesh, device="cpu")
    progress = grpo_run.Progress(sampler, run, silent=rank > 0)
    with loader, progress:
        asked = time.time()
        for mini in loader:
            denominator = mini.loss_tokens  # the first touch waits for admission
            admitted, trained, apart = time.time(), [], 0.0
            progress.step(mini)
            for micro in mini:
                model.set_requires_gradient_sync(micro.is_last)
                logits = model(**micro.model_inputs()).logits.view(*micro["labels"].shape, -1)
                new, old, mask = (
                    logprobs_of(logits, micro["labels"]),
                    micro.targets("logprobs"),
                    micro.targets("loss_mask"),
                )
                loss = grpo_loss(new, old, micro.to_tokens("advantage"), mask)
                (loss.sum() / denominator).backward()
                trained += grpo_run.rows_of(micro)
                apart = max(apart, largest_difference(new, old, mask))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            log(kind="step", index=mini.index, train_batch=mini.train_batch, position=mini.position, asked=asked,
                admitted=admitted, ended=time.time(), trained=trained, apart=apart)  # fmt: skip
            progress.stepped([reward for *_, reward in trained])
            if mini.is_last:
                grpo_run.publish_weights(model, mini.index + 1, run)
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


if __name__ == "__main__":
    sys.exit(grpo_run.main(__doc__, PLAN, build_model, rollout, train, Path("out/text"), train_batches=12))
