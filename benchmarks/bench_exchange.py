"""From an admitted mini-batch of 8,192 trajectories to every rank's share: planning, cutting, sending, receiving.

    python benchmarks/bench_exchange.py [--trajectories 8192] [--rounds 20] [--quick] [--json FILE]

Two processes on this machine, rank 0 and one follower per data-parallel rank that receives in turn, over the same
TCPStore code as in training. The peer is the usual way: the same rows as JSON through the same store.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import tempfile
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from report import Report

import knit_data as kd
from knit_data.exchange import SHARE, Exchange
from knit_data.planning import Padding
from knit_data.share import Lead, Share


class Times(dict[str, list[float]]):
    def note(self, name: str, began: float) -> float:
        now = time.perf_counter()
        self.setdefault(name, []).append((now - began) * 1e3)
        return now


def filled(url: str, groups: int) -> kd.TrajectoryStore:
    store = kd.TrajectoryStore(url)
    lengths = np.random.default_rng(0).lognormal(6.4, 0.65, groups * 8).astype(int).clip(16, 8000)
    with store.writer("rollout-0") as writer:
        for g in range(groups):
            writer.put_group(
                [
                    kd.Trajectory(
                        f"prompt-{g:06d}/response-{i}",
                        f"prompt-{g:06d}",
                        0,
                        {"input_ids": torch.zeros(int(n), dtype=torch.int64), "logprobs": torch.zeros(int(n))},
                        {"reward": float(i)},
                        attributes={"source": ("math", "code", "tools")[g % 3]},
                    )
                    for i, n in enumerate(lengths[g * 8 : g * 8 + 8])
                ]
            )
    store.seal()
    return store


def rank(me: int, folder: str, groups: int, rounds: int, out: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=me, world_size=2)
    store = kd.TrajectoryStore("memory://")
    exchange = Exchange(None, None, {})
    times = Times()
    if me == 0:
        store = filled("memory://", groups)
        sampler = kd.QuotaSampler(kd.TrajectoryStream(store), groups, groups, 8)
        began = time.perf_counter()
        admitted = sampler.admit(0.0)
        times.note("read heads and admit", began)
        lead = Lead(sampler, exchange, 32_768, "packed", Padding())
        for i in range(rounds):
            dist.barrier()
            began = time.perf_counter()
            shares = lead._shares(admitted)
            began = times.note("plan and cut", began)
            messages = [share.to_bytes() for share in shares]
            began = times.note("encode", began)
            exchange.publish(2 * i, messages)
            times.note("send", began)
            dist.barrier()
            began = time.perf_counter()
            rows = [[info.id, info.group, info.n_tokens, info.values, dict(info.attributes), info.address]
                    for info in shares[1].table.infos()]  # fmt: skip
            text = SHARE + json.dumps([rows, shares[1].table.columns["offsets"].tolist()]).encode()
            times.note("encode as JSON (one rank)", began)
            exchange.publish(2 * i + 1, [b"", text])
        times["bytes a rank"] = [float(len(messages[1]))]
        times["bytes a rank as JSON"] = [float(len(text))]
    else:
        for i in range(rounds):
            for number, decode, name in (
                (2 * i, lambda m: Share.from_bytes(m).new_media, ""),
                (2 * i + 1, lambda m: json.loads(m[1:]), " JSON"),
            ):
                dist.barrier()
                began = time.perf_counter()
                while (message := exchange.receive(number)) is None:
                    pass
                began = time.perf_counter()
                busy = time.thread_time()
                decode(message)
                times.setdefault(f"decode{name}, processor time", []).append((time.thread_time() - busy) * 1e3)
                times.note(f"decode{name}", began)
    out.put((me, dict(times)))
    exchange.await_goodbyes()
    exchange.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="1,024 trajectories, 5 rounds")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.trajectories, arguments.rounds = 1024, 5
    report = Report("exchange", arguments.json, ("numpy", "torch"))
    context = mp.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        work = (folder, arguments.trajectories // 8, arguments.rounds, out)
        processes = [context.Process(target=rank, args=(me, *work)) for me in range(2)]
        for process in processes:
            process.start()
        found = dict(out.get() for _ in processes)
        for process in processes:
            process.join()
    for me, times in sorted(found.items()):
        for name, samples in times.items():
            unit = "bytes" if name.startswith("bytes") else "ms"
            provider = "json" if "JSON" in name else "knit_data"
            case = f"{arguments.trajectories} trajectories, 2 ranks, rank {me}"
            report.add(case=case, provider=provider, metric=name, unit=unit, samples=samples)


if __name__ == "__main__":
    main()
