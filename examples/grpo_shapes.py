"""GRPO on a tiny, randomly initialised Qwen2.5-VL that looks at drawn shapes, beside sums in text: ``make demo``.

    rollout-0, rollout-1                                 rank 0, rank 1 (FSDP2, gloo)
      draw an image; the processor resizes it              for mini in loader: one optimizer step
      encode it once, sample 8 responses to it               encode each distinct image once
      put the group: the image is stored once, as uint8      forward and backward by micro-batch, then one
            │                                                backward through the tower: encoder.backward()
            │                                              after each train batch: weights, then publish
            └────────── TrajectoryStore (a folder): groups one way, versions and demand the other ──────────┘

    color   [start][image]×2…4[end] color ?   →  red     the shapes of an image have one color
    count   [start][image]×4[end] count ?     →  3       each token sees 28 × 28 pixels: a shape, or nothing
    sum     1 + 2 ?                           →  3       no image; the responses are the long ones

Everything that is needed to use knit_data with images in a real run is in ``rollout`` and ``train``. Tasks, images and
model are in ``tiny_shapes.py``, the sampler in ``sampling.py``, processes and weights in ``grpo_run.py``, the table,
the figure and the checks in ``grpo_report.py``. ``grpo_text.py`` is the same without images.
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
from sampling import sample
from tiny_shapes import IMAGE_ID, LIMITS, Problem, Prompt, build_model, logical_bytes, prefill
from torch import nn
from torch.distributed.fsdp import fully_shard

import knit_data as kd

PLAN = Plan(
    group_size=8,
    train_batch=72,
    mini_batch=12,
    quotas={"color": 24, "count": (24, 36), "sum": (12, 24)},
    max_staleness=2,
)
LEARNING_RATE = 1.5e-3
MEDIA_STATS = ("encodes", "naive_encodes", "distinct_media")


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
            start = time.time()
            prompts = [Prompt.of(Problem.draw(launch.attributes["source"], rng)) for launch in launches]
            inputs, positions = prefill(model, prompts)
            limits = [LIMITS[prompt.problem.source] for prompt in prompts]
            for slot, responses in sample(model, inputs, positions, limits, PLAN.group_size, placeholder=IMAGE_ID):
                prompt, launch, name = prompts[slot], launches[slot], launches[slot].group
                group = [prompt.trajectory(f"{name}/{i}", name, version, r, model) for i, r in enumerate(responses)]
                try:
                    writer.put_group(group)
                except kd.StoreClosed:
                    return
                pacer.done(launch)
                log(group=name, source=prompt.problem.source, version=version, slot=slot, start=start, end=time.time(),
                    logical_bytes=logical_bytes(prompt, group))  # fmt: skip


# -- training --------------------------------------------------------------------------------------------------------


def train(rank: int, run: Run) -> None:
    mesh = grpo_run.join(rank, run)
    model = build_model(run.seed)
    for part in (*model.model.language_model.layers, model.model.visual, model):
        fully_shard(part, mesh=mesh)
    kd.integrations.fsdp.sum_gradients(model)
    encoder = kd.SharedEncoder(kd.integrations.huggingface.image_features(model), module=model, mode="recompute")
    kd.integrations.huggingface.attach(model, encoder)
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
                logits = model(**micro.model_inputs(), **encoder.model_inputs(micro)).logits
                new = logprobs_of(logits.view(*micro["labels"].shape, -1), micro["labels"])
                old, mask = micro.targets("logprobs"), micro.targets("loss_mask")
                loss = grpo_loss(new, old, micro.to_tokens("advantage"), mask)
                (loss.sum() / denominator).backward()
                trained += grpo_run.rows_of(micro)
                apart = max(apart, largest_difference(new, old, mask))
            encoder.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            log(kind="step", index=mini.index, train_batch=mini.train_batch, position=mini.position, asked=asked,
                admitted=admitted, ended=time.time(), trained=trained, apart=apart,
                media={name: mini.stats[name] for name in MEDIA_STATS})  # fmt: skip
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
    sys.exit(grpo_run.main(__doc__, PLAN, build_model, rollout, train, Path("out/demo"), train_batches=10))
