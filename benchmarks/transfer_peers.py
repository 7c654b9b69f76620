"""The loaders that bench_transfer compares, each with its producer in the driver and its consumer in another process.

All put the same groups, all give micro-batches of about eight responses, and ``Reading`` says what is timed.

* ``knit_data``: one put a group, an image once. A mini-batch is admitted and planned inside the time of its first
  micro-batch.
* ``transferqueue``: StreamingDataLoader with SequentialSampler over two storage units of TransferQueue, a
  jagged TensorDict a group. ``transferqueue, client`` is its client path: the same calls without the loader's buffer.
* ``driver``: what a single controller does, as verl's DataProto: tensors padded to the longest allowed, the image's
  pixels with every response (the processor runs for each) in an object array. A batch goes from the rollout's actor to
  the driver (put), is concatenated, cut by rank, put into Ray's object store and unpickled by the rank's actor (get).
  Serialised as DataProto is by default: consolidated and torch.save for tensors, pickle for the rest. One rank and one
  hop; verl makes several. Nothing reads ahead.
* ``dataloader``: torch's DataLoader over a safetensors file a response, with 0 and with 2 workers. It has no batches of
  several micro-batches.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import itertools
import multiprocessing
import os
import shutil
import signal
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader
from transfer_data import BEFORE, LONGEST, MEMBERS, Group, Reading, Workload, groups_of, held_by, size_of

import knit_data as kd

WAIT = 300.0  # seconds for anything of a peer; it has failed then


class Ask(NamedTuple):
    """``mini`` groups make a mini-batch. ``think``: seconds of computing after each micro-batch; ``ahead``: the loader
    may read meanwhile."""

    mini: int = 1
    ahead: bool = False
    think: float = 0.0


THINK = 0.02  # seconds
ASKS = {"8:8": Ask(), "64:8": Ask(8), "8:8 ahead": Ask(ahead=True, think=THINK)}


class Provider(Protocol):
    """``packages`` it needs, ``names`` of the ways in which it can be read. ``started``: seconds that its service and a
    client of it take to be there; imports, and the consumer's process, are not in them."""

    packages: tuple[str, ...]
    names: tuple[str, ...]
    asks: Mapping[str, Ask]
    started: float

    def start(self) -> None: ...
    def begin(self, load: Workload) -> None: ...
    def put(self, index: int, group: Group) -> tuple[float, float]:
        """Seconds of building what it takes, and of putting that."""
        ...

    def read(self, name: str, ask: Ask) -> Reading: ...
    def stored(self) -> int | None: ...
    def folder(self) -> str | None: ...
    def end(self) -> None: ...
    def close(self) -> None: ...


@contextmanager
def at_most(what: str, seconds: float = WAIT) -> Iterator[None]:
    """``TimeoutError`` after so many. Only for the main thread, in which a signal interrupts any wait."""

    def late(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"{what} took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Files:
    """A provider of files: its consumer is a spawned process that lives on between readings."""

    packages: tuple[str, ...] = ()
    asks = ASKS
    started = 0.0

    def __init__(self, root: Path) -> None:
        self._root, self._count = root, itertools.count()

    def start(self) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self._pool.submit(os.getpid).result(WAIT)  # it is there, with its imports

    def begin(self, load: Workload) -> None:
        self._load, self._at = load, self._root / f"{type(self).__name__}-{next(self._count)}"
        self._at.mkdir(parents=True)

    def stored(self) -> int:
        return size_of(str(self._at))

    def folder(self) -> str:
        return str(self._at)

    def end(self) -> None:
        shutil.rmtree(self._at)

    def close(self) -> None:
        self._pool.shutdown()


# -- ours --------------------------------------------------------------------------------------------------------------


def trajectories(name: str, group: Group) -> list[kd.Trajectory]:
    media = []
    if group.pixels is not None:
        image = kd.Media({"pixel_values": group.pixels}, group.tokens, patches=len(group.pixels))
        media = [kd.MediaRef(image, [(BEFORE, group.tokens)])]
    return [
        kd.Trajectory(f"{name}/{i}", name, 0, {"input_ids": ids, "logprobs": logprobs}, media=media)
        for i, (ids, logprobs) in enumerate(zip(group.ids, group.logprobs, strict=True))
    ]


@functools.cache
def cap_of(load: Workload, mini: int) -> int:
    """Tokens of a micro-batch, so that it holds a whole group, or of several about eight responses."""
    lengths = [group.length for group in groups_of(load)]
    if mini == 1:
        return max(lengths)
    most = max(sum(lengths[i : i + mini]) for i in range(0, len(lengths), mini))
    return max(most * 17 // 16 // mini, LONGEST)


def loader_of(url: str, load: Workload, ask: Ask, cap: int, reuse: bool = False) -> kd.TrajectoryLoader:
    sampler = kd.QuotaSampler(kd.TrajectoryStream(kd.TrajectoryStore(url)), load.groups, ask.mini, MEMBERS)
    return kd.TrajectoryLoader(sampler, cap, device="cpu", prefetch=2 if ask.ahead else 0, reuse_buffers=reuse)


def read_ours(url: str, load: Workload, ask: Ask, cap: int, reuse: bool = False, planned: bool = False) -> Reading:
    """``planned``: the mini-batch is admitted before it is asked for."""
    began, out = time.perf_counter(), Reading()
    with loader_of(url, load, ask, cap, reuse) as loader:
        out.prepared = time.perf_counter() - began
        minis = iter(loader)
        passes = _admitted(minis) if planned else itertools.chain.from_iterable(minis)
        while True:
            asked = time.perf_counter()
            if (micro := next(passes, out)) is out:
                return out
            if not isinstance(micro, kd.MicroBatch):
                continue
            images = [image for image in micro.media.new if image is not None]
            pixels = [image.tensors["pixel_values"] for image in images]
            out.micro_batch(asked, [*(micro[name] for name in ("input_ids", "logprobs", "labels")), *pixels])
            if ask.think:
                time.sleep(ask.think)
            out.checked([micro["input_ids"]], pixels, MEMBERS)
            del micro, images, pixels  # no batch outlives the next call: its memory may be used again


def _admitted(minis: Iterator[kd.MiniBatch]) -> Iterator[kd.MicroBatch | None]:
    """The micro-batches; None where a mini-batch has been admitted, none of which is read yet."""
    for mini in minis:
        if mini.n_groups:
            yield None
        yield from mini


class Knit(Files):
    names: tuple[str, ...] = ("knit_data",)

    def begin(self, load: Workload) -> None:
        super().begin(load)
        began = time.perf_counter()
        self._store = kd.TrajectoryStore(self._at)
        self._writer = self._store.writer("rollout-0")
        self.started = time.perf_counter() - began

    def put(self, index: int, group: Group) -> tuple[float, float]:
        began = time.perf_counter()
        built = trajectories(f"{index}", group)
        ready = time.perf_counter()
        self._writer.put_group(built)
        done = time.perf_counter()
        if index == self._load.groups - 1:
            self._store.seal()
        return ready - began, done - ready

    def read(self, _name: str, ask: Ask) -> Reading:
        return self._pool.submit(read_ours, str(self._at), self._load, ask, cap_of(self._load, ask.mini)).result(WAIT)


# -- torch's DataLoader ------------------------------------------------------------------------------------------------


class Responses(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, paths: list[str]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return load_file(self._paths[i])


def end_at_once(_worker: int) -> None:
    """A forked worker that ends undoes all that torch registered when it was imported, for seconds; ours need not."""
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]


def as_it_is(rows: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return rows


def read_files(paths: list[str], ask: Ask, count: int) -> Reading:
    began, out = time.perf_counter(), Reading()
    workers: Any = {"num_workers": count, "worker_init_fn": end_at_once} if count else {"num_workers": 0}
    loader = DataLoader(Responses(paths), MEMBERS, collate_fn=as_it_is, persistent_workers=count > 0, **workers)
    batches = iter(loader)
    out.prepared = time.perf_counter() - began
    while True:
        asked = time.perf_counter()
        if (rows := next(batches, None)) is None:
            return out
        out.micro_batch(asked, [tensor for row in rows for tensor in row.values()])
        if ask.think:
            time.sleep(ask.think)
        out.checked([row["input_ids"] for row in rows], [row["pixel_values"] for row in rows if "pixel_values" in row])


class Loader(Files):
    names = ("dataloader", "dataloader, 2 workers")
    asks: Mapping[str, Ask] = {
        name: ask for name, ask in ASKS.items() if ask.mini == 1
    }  # its batches are micro-batches

    def put(self, index: int, group: Group) -> tuple[float, float]:
        began = time.perf_counter()
        image = {} if group.pixels is None else {"pixel_values": group.pixels}
        rows = [{"input_ids": i, "logprobs": p, **image} for i, p in zip(group.ids, group.logprobs, strict=True)]
        ready = time.perf_counter()
        for i, row in enumerate(rows):
            save_file(row, self._at / f"{index:06d}-{i}.safetensors")
        return ready - began, time.perf_counter() - ready

    def read(self, name: str, ask: Ask) -> Reading:
        paths = sorted(map(str, self._at.iterdir()))
        workers = 2 if ask.ahead or name != self.names[0] else 0
        return self._pool.submit(read_files, paths, ask, workers).result(WAIT)


# -- Ray ---------------------------------------------------------------------------------------------------------------


@functools.cache
def ray_of(memory: int = 3_000_000_000) -> tuple[Any, float]:
    """Ray, running, and the seconds it took. It is told of 16 processors: with fewer than three tq.init waits for
    ever."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns of a change to come
    import ray

    began = time.perf_counter()
    with at_most("ray.init", 120):
        ray.init(
            num_cpus=16,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            namespace="bench",
            object_store_memory=memory,
        )
    return ray, time.perf_counter() - began


class QueueConsumer:
    """Inside an actor."""

    def ready(self) -> float:
        """Seconds of becoming a client."""
        import transfer_queue

        began = time.perf_counter()
        transfer_queue.init()
        return time.perf_counter() - began

    def read(self, partition: str, task: str, fields: list[str], ask: Ask, client: bool) -> Reading:
        import ray
        from transfer_queue import StreamingDataLoader, StreamingDataset

        began, out = time.perf_counter(), Reading()
        controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
        dataset = StreamingDataset(
            config=ray.get(controller.get_config.remote(), timeout=WAIT),
            batch_size=ask.mini * MEMBERS,
            micro_batch_size=MEMBERS,
            data_fields=fields,
            partition_id=partition,
            task_name=task,
            dp_rank=0,
            should_check_consumption_status=True,
        )
        if client:
            batches = self._client(dataset, partition, fields, ask)
        else:  # with more than one worker it gives every response twice
            workers: Any = {"num_workers": 1, "prefetch_factor": 2} if ask.ahead else {"num_workers": 0}
            batches = iter(StreamingDataLoader(dataset, **workers))
        out.prepared = time.perf_counter() - began
        while True:
            asked = time.perf_counter()
            if (found := next(batches, None)) is None:
                return out
            columns = {name: found[0][name].unbind() for name in fields}
            out.micro_batch(asked, [tensor for column in columns.values() for tensor in column])
            if ask.think:
                time.sleep(ask.think)
            out.checked(columns["input_ids"], columns.get("pixel_values", ()))

    @staticmethod
    def _client(dataset: Any, partition: str, fields: list[str], ask: Ask) -> Iterator[Any]:
        from transfer_queue.dataloader.streaming_dataset import chunk_batch_fn, default_fetch_batch_fn

        dataset._create_client()
        client, task = dataset._tq_client, dataset.task_name
        for i in itertools.count():
            if client.check_consumption_status(task, partition):
                return
            size = ask.mini * MEMBERS
            found = default_fetch_batch_fn(client, fields, size, partition, task, dataset.sampling_config, i)
            yield from chunk_batch_fn(*found, MEMBERS)


class Queue:
    packages = ("transfer_queue", "ray", "tensordict", "omegaconf")
    names = ("transferqueue", "transferqueue, client")
    asks = ASKS

    def __init__(self, _root: Path) -> None:
        self._count = itertools.count()

    def start(self) -> None:
        os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")  # read when it is imported, by its actors too
        import transfer_queue
        from omegaconf import OmegaConf

        self._ray, seconds = ray_of()
        self._tq = transfer_queue
        backend = {"SimpleStorage": {"num_data_storage_units": 2}}
        controller = {"sampler": "SequentialSampler", "polling_mode": True}
        began = time.perf_counter()
        with at_most("tq.init", 120):
            made = OmegaConf.create({"controller": controller, "backend": backend}, flags={"allow_objects": True})
            transfer_queue.init(made)
            self._client = transfer_queue.get_client()
        self.started = seconds + time.perf_counter() - began
        self._consumer = self._ray.remote(num_cpus=0.1)(QueueConsumer).remote()
        self.started += self._ray.get(self._consumer.ready.remote(), timeout=WAIT)

    def begin(self, load: Workload) -> None:
        self._partition = f"{load.name}-{next(self._count)}"
        self._fields = ["input_ids", "logprobs"] + ["pixel_values"] * (load.patches is not None)
        self._before = self._held()

    def put(self, _index: int, group: Group) -> tuple[float, float]:
        from tensordict import TensorDict

        began = time.perf_counter()
        columns = {"input_ids": group.ids, "logprobs": group.logprobs}
        if group.pixels is not None:
            columns["pixel_values"] = [group.pixels] * MEMBERS
        jagged = {k: torch.nested.as_nested_tensor(v, layout=torch.jagged) for k, v in columns.items()}
        built = TensorDict(jagged, batch_size=MEMBERS)
        ready = time.perf_counter()
        with at_most("put"):
            self._client.put(built, partition_id=self._partition)
        return ready - began, time.perf_counter() - ready

    def read(self, name: str, ask: Ask) -> Reading:
        work = (self._partition, f"task-{next(self._count)}", self._fields, ask, name != self.names[0])
        found: Reading = self._ray.get(self._consumer.read.remote(*work), timeout=WAIT)
        return found

    def stored(self) -> int:
        return self._held() - self._before

    def folder(self) -> None:
        return None

    def end(self) -> None:
        with at_most("clear_partition"):
            self._client.clear_partition(self._partition)

    def close(self) -> None:
        with at_most("tq.close", 60):
            self._tq.close()
            self._ray.kill(self._consumer)

    @staticmethod
    def _held() -> int:
        return held_by("SimpleStorageUnit")


class Proto:
    """``tensors``: a TensorDict [rows]; ``objects``: object arrays [rows]. Pickled as verl's DataProto."""

    def __init__(self, tensors: Any, objects: dict[str, np.ndarray[Any, Any]]) -> None:
        self.tensors, self.objects = tensors, objects

    def __getstate__(self) -> Any:
        buffer = io.BytesIO()
        torch.save(self.tensors.contiguous().consolidate(), buffer)
        return buffer.getvalue(), self.objects

    def __setstate__(self, state: Any) -> None:
        saved, self.objects = state
        self.tensors = torch.load(io.BytesIO(saved), weights_only=False, map_location="cpu")

    @staticmethod
    def concat(parts: Sequence[Proto]) -> Proto:
        names = parts[0].objects
        objects = {name: np.concatenate([part.objects[name] for part in parts]) for name in names}
        return Proto(torch.cat([part.tensors for part in parts]), objects)

    def rows(self, begin: int, end: int) -> Proto:
        return Proto(self.tensors[begin:end], {name: found[begin:end] for name, found in self.objects.items()})


class Rollout:
    """Inside an actor: what an agent loop returns. It makes the groups itself, as the driver would."""

    def begin(self, load: Workload) -> None:
        self._groups = groups_of(load)

    def generate(self) -> tuple[Proto, float]:
        from tensordict import TensorDict

        group = next(self._groups)
        images = [] if group.pixels is None else [group.pixels.clone() for _ in range(MEMBERS)]
        began = time.perf_counter()
        columns = {
            "input_ids": torch.zeros(MEMBERS, LONGEST, dtype=torch.int64),
            "attention_mask": torch.zeros(MEMBERS, LONGEST, dtype=torch.int64),
            "logprobs": torch.zeros(MEMBERS, LONGEST),
        }
        for i, (ids, logprobs) in enumerate(zip(group.ids, group.logprobs, strict=True)):
            columns["input_ids"][i, : len(ids)] = ids
            columns["attention_mask"][i, : len(ids)] = 1
            columns["logprobs"][i, : len(ids)] = logprobs
        objects = np.array([{"pixel_values": image} for image in images], dtype=object)
        proto = Proto(TensorDict(columns, batch_size=MEMBERS), {"multi_modal_inputs": objects} if images else {})
        return proto, time.perf_counter() - began


class Trainer:
    """Inside an actor, a rank."""

    def ready(self) -> int:
        return os.getpid()

    def update(self, batch: Proto, asked: float, think: float) -> Reading:
        """``asked`` is the driver's clock, which is this one's: both count since the machine started."""
        out = Reading()
        for begin in range(0, len(batch.tensors), MEMBERS):
            micro = batch.rows(begin, begin + MEMBERS)
            images = [one["pixel_values"] for one in micro.objects.get("multi_modal_inputs", ())]
            out.micro_batch(asked, [*micro.tensors.values(), *images])
            if think:
                time.sleep(think)
            mask = micro.tensors["attention_mask"].bool()
            out.checked([micro.tensors["input_ids"][mask]], images)
            asked = time.perf_counter()
        return out


class Driver:
    packages = ("ray", "tensordict")
    names = ("driver",)
    asks: Mapping[str, Ask] = {name: ask for name, ask in ASKS.items() if not ask.ahead}

    def __init__(self, _root: Path) -> None:
        self._batches: list[Proto] = []

    def start(self) -> None:
        self._ray, self.started = ray_of()
        self._rollout = self._ray.remote(num_cpus=0.1)(Rollout).remote()
        self._trainer = self._ray.remote(num_cpus=0.1)(Trainer).remote()
        self._ray.get(self._trainer.ready.remote(), timeout=WAIT)

    def begin(self, load: Workload) -> None:
        self._ray.get(self._rollout.begin.remote(load), timeout=WAIT)

    def put(self, _index: int, _group: Group) -> tuple[float, float]:
        began = time.perf_counter()
        batch, build = self._ray.get(self._rollout.generate.remote(), timeout=WAIT)
        self._batches.append(batch)
        return build, time.perf_counter() - began - build

    def read(self, _name: str, ask: Ask) -> Reading:
        out = Reading()
        for begin in range(0, len(self._batches), ask.mini):
            asked = time.perf_counter()
            batch = Proto.concat(self._batches[begin : begin + ask.mini])
            part = self._ray.put(batch.rows(0, len(batch.tensors)))  # of one rank all
            found = self._ray.get(self._trainer.update.remote(part, asked, ask.think), timeout=WAIT)
            out.seconds += found.seconds
            out.sums += found.sums
        return out

    def stored(self) -> None:
        return None

    def folder(self) -> None:
        return None

    def end(self) -> None:
        self._batches.clear()

    def close(self) -> None:
        for actor in (self._rollout, self._trainer):
            self._ray.kill(actor)


PEERS: dict[str, Any] = {"transferqueue": Queue, "driver": Driver, "dataloader": Loader}


def missing(provider: Any) -> list[str]:
    return [name for name in provider.packages if importlib.util.find_spec(name) is None]


def stop_ray(names: Iterable[str]) -> None:
    if {"transferqueue", "driver"} & set(names):
        ray_of()[0].shutdown()
