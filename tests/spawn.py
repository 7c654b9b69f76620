"""Ranks as processes on this machine: gloo, meeting in a file. They stay up between tests; starting them is slow."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE = 40  # seconds for one job; a hang fails the test instead of the whole run


class Ranks:
    """``world`` processes that run one job after another."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._folder = tempfile.TemporaryDirectory()
        context = mp.get_context("spawn")
        self._pipes, self.processes = [], []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, self._folder.name, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)

    def run(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``work(rank, world, *args)`` returned, by rank; an exception comes back as {"error", "message"}, a rank
        that died as {"error": "died"}."""
        for pipe in self._pipes:
            pipe.send((work, args))
        out = []
        for pipe in self._pipes:
            if not pipe.poll(PATIENCE):
                self.close()
                raise AssertionError(f"a rank hangs in {work.__name__}{args}")
            try:
                out.append(pipe.recv())
            except EOFError:
                out.append({"error": "died"})
        return out

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def _serve(rank: int, world: int, folder: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    while True:
        work, args = pipe.recv()
        try:
            pipe.send(work(rank, world, *args))
        except Exception as e:
            traceback.print_exc()
            pipe.send({"error": type(e).__name__, "message": str(e)})
