"""The only file that talks between ranks: rank 0's messages, over a TCPStore of its own.

Per mini-batch i and data-parallel rank r, global rank 0 sets one value: a share, the end, or an error. The others
look for theirs every few milliseconds, ever more slowly while they wait, and never faster than 20,000 looks a second
over all ranks. No collective once it is built, no pickle, no long wait inside the store's client, which is a mutex.

    m/<g>/<i>/<r>   message of mini-batch i for data-parallel rank r        read/<g>/<rank>  last i that rank has
    late/<g>/<i>    rank 0 still waits for data: hand i out unseen           want/<g>/<i>     a rank asks for i
    start           g, and digest of the state that rank 0 starts from      bye/<rank>       rank has closed
    hello/<rank>    the same of another rank
    settled/<g>/<i> how many other ranks have consumed mini-batch i         commit/<g>/<n>   what a checkpoint let go of
    error/<g>       what failed on a rank, for those that still read; of rank 0 also a message, for the next admission

g counts the restarts by ``load_state_dict``.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in torch's own __all__
from torch.distributed.device_mesh import DeviceMesh

from knit_data import errors
from knit_data.errors import InvalidArgument, KnitError, RankError

END, ERROR, SHARE = b"E", b"X", b"S"
_LOOKS = 20_000  # per second, over all ranks
_FASTEST, _SLOWEST = 0.001, 0.05
_GOODBYE = 15.0  # seconds that rank 0 waits, when it closes, for those that have not read their last message
_GRACE = 0.5  # seconds that it waits for those that have, so that all may leave in peace


class Exchange:
    """One rank's end. In a job of one process it talks to nobody."""

    def __init__(self, mesh: DeviceMesh | None, dp: Sequence[str] | str | None, config: Mapping[str, Any]) -> None:
        running = dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if running else (0, 1)
        self.dp_rank, self.dp_size = _data_parallel(mesh, dp, self.rank, self.world)
        self.generation, self._heard = 0, 0
        self._published = self._late = -1
        self._failed = False  # the last message was an error
        self._start, self._strangers = "", set[int]()
        self._unread: list[str] = []
        self._pause, self._next_look = _FASTEST, 0.0
        self._server: TCPStore | None = None
        self._caller: TCPStore | None = None  # the calling thread's client; the loader's thread has _server
        self._closed = self._lost = False
        if self.world > 1:
            self._connect(config)

    # -- rank 0 -----------------------------------------------------------------------------------------------------

    def begin(self, state: Mapping[str, Any]) -> None:
        """Every rank says what it starts from; see ``compare``."""
        self._start = f"{self.generation} {hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()}"
        self._strangers = set(range(1, self.world)) if self.rank == 0 else {0}
        if self.world > 1:
            self._set(f"hello/{self.rank}" if self.rank else "start", self._start.encode())

    def publish(self, i: int, messages: Sequence[bytes]) -> None:
        """Message r goes to data-parallel rank r; a single message to all."""
        self._published = i
        if self.world == 1:
            return
        self._tidy()
        for r in range(self.dp_size):
            key = f"m/{self.generation}/{i}/{r}"
            self._set(key, messages[r] if len(messages) > 1 else messages[0])
            self._unread.append(key)

    def publish_error(self, i: int, error: BaseException) -> None:
        _mark_told(error)
        self._failed = True
        self.publish(i, [ERROR + _describe(error)])

    def late(self, i: int) -> None:
        """Rank 0 hands out mini-batch i before it is admitted; the others may too."""
        self._late = i
        if self.world > 1:
            self._set(f"late/{self.generation}/{i}", b"1")

    def was_late(self, i: int) -> bool:
        return self._late == i

    def wanted(self, i: int) -> bool:
        """Whether another rank asked for mini-batch i."""
        return self.rank == 0 and self.world > 1 and self._check(f"want/{self.generation}/{i}")

    def all_settled(self, i: int) -> bool:
        """Whether every other rank has consumed mini-batch i; asked until it is so."""
        key = f"settled/{self.generation}/{i}"
        if self.world > 1 and self._add(key, 0) < self.world - 1:
            return False
        self._delete(key)
        return True

    def floors(self) -> Iterator[dict[int, int]]:
        """What the others sent."""
        while self.world > 1 and self._check(key := f"commit/{self.generation}/{self._heard + 1}"):
            self._heard += 1
            yield dict(json.loads(self._get(key)))
            self._delete(key)

    # -- the others -------------------------------------------------------------------------------------------------

    def receive(self, i: int) -> bytes | None:
        """This rank's message of mini-batch i, or None if it is not there yet; paced, so call it in a loop."""
        now = time.monotonic()
        if now < self._next_look:
            time.sleep(self._next_look - now)
        key = f"m/{self.generation}/{i}/{self.dp_rank}"
        if not self._check(key):
            self._pause = min(self._pause * 1.3, max(_SLOWEST, self.world / _LOOKS))
            self._next_look = time.monotonic() + max(self._pause, self.world / _LOOKS)
            return None
        self._pause, self._next_look = _FASTEST, 0.0
        message = self._get(key)
        self._set(f"read/{self.generation}/{self.rank}", str(i).encode())
        if message[:1] == ERROR:
            raise revived(message[1:])
        return message

    def is_late(self, i: int) -> bool:
        """Whether rank 0 handed i out before it was admitted."""
        return self._check(f"late/{self.generation}/{i}")

    def want(self, numbers: Iterable[int]) -> None:
        """This rank needs these mini-batches although rank 0 may not have come to them. For the calling thread."""
        if self.world > 1 and self.rank:
            with contextlib.suppress(RankError):  # rank 0 gave them and closed since, or the thread will say so
                for i in numbers:
                    self._set(f"want/{self.generation}/{i}", b"1", self._caller)

    def compare(self, training: bool) -> None:
        """Raises if another rank starts from another state; rank 0 hears of all, the others of rank 0.

        Nobody waits: a rank that has not begun is looked at again later. On rank 0 another may be a restart ahead, as
        long as no micro-batch was handed out here (``training``): this rank may load the same state yet.
        """
        for rank in sorted(self._strangers):
            key = f"hello/{rank}" if rank else "start"
            if not self._check(key):
                continue
            theirs = self._get(key).decode()
            if theirs == self._start:
                self._strangers.discard(rank)
                continue
            ahead = int(theirs.split()[0]) - self.generation
            if ahead == 0 or (ahead > 0 and (training or self.rank)):
                raise self._other_start(rank or self.rank, theirs)

    def _other_start(self, rank: int, theirs: str) -> RankError:
        error = RankError(
            f"rank {rank} starts from another state than global rank 0; load the same state_dict on every rank before "
            "the first mini-batch."
        )
        for generation in {int(theirs.split()[0]), self.generation}:
            self._set(f"error/{generation}", _describe(error))
        _mark_told(error)
        return error

    def settle(self, i: int) -> None:
        """This rank has consumed mini-batch i."""
        self._add(f"settled/{self.generation}/{i}", 1)

    def send_floors(self, floors: Mapping[int, int]) -> None:
        """To rank 0: what a durable checkpoint does not need."""
        number = self._add(f"commits/{self.generation}", 1)
        self._set(key := f"commit/{self.generation}/{number}", json.dumps(list(floors.items())).encode())
        self._check(key)  # the answer: it is there before this rank's goodbye, which goes by the other client

    # -- all --------------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        self.generation += 1
        self._published = self._late = -1
        self._heard, self._failed = 0, False

    def report(self, error: BaseException) -> None:
        """Let the other ranks know that this one failed, unless they know it already."""
        if self.world == 1:
            return
        with contextlib.suppress(KnitError):
            if not getattr(error, "_told", False):
                self._set(f"error/{self.generation}", _describe(error, f"rank {self.rank}: " if self.rank else ""))
            if self.rank == 0 and not self._failed:
                self.publish_error(self._published + 1, error)

    def check_peers(self) -> None:
        """Raise what another rank reported.

        That rank 0 is gone is no error here: it may have closed in peace while this rank still reads what it was
        given. The next admission will tell.
        """
        if self.world == 1 or self._lost:
            return
        key, told = f"error/{self.generation}", False
        with contextlib.suppress(RankError):
            told = self._check(key)
        if told:
            raise revived(self._get(key))

    def await_goodbyes(self) -> None:
        """Rank 0 waits for the last words of the others: 0.5 s of those that have read all, else 15 s at most."""
        began, left = time.monotonic(), set() if self.rank or self._closed else set(range(1, self.world))
        with contextlib.suppress(KnitError):
            while left and (waited := time.monotonic() - began) < _GOODBYE:
                for rank in sorted(left):
                    if self._check(f"bye/{rank}", self._caller) or (waited > _GRACE and self._has_read(rank)):
                        left.discard(rank)
                if left:
                    time.sleep(0.005)

    def close(self) -> None:
        """Say goodbye, as the last word; rank 0's store goes."""
        if self.world == 1 or self._closed:
            return
        self._closed = True
        with contextlib.suppress(KnitError):
            if self.rank:
                self._set(f"bye/{self.rank}", b"1", self._caller)
        self._server = self._caller = None

    def _has_read(self, rank: int) -> bool:
        key = f"read/{self.generation}/{rank}"
        read = int(self._get(key, self._caller)) if self._check(key, self._caller) else -1
        return read >= self._published

    def _tidy(self) -> None:
        """Delete what every rank has read."""
        least = self._published - 1
        for rank in range(1, self.world):
            key = f"read/{self.generation}/{rank}"
            least = min(least, int(self._get(key)) if self._check(key) else -1)
        keep = []
        for key in self._unread:
            _, generation, i, _ = key.split("/")
            if int(generation) < self.generation or int(i) <= least:
                self._delete(key)
            else:
                keep.append(key)
        self._unread = keep

    # -- the store --------------------------------------------------------------------------------------------------

    def _connect(self, config: Mapping[str, Any]) -> None:
        """Rank 0 opens a store on a free port and tells its address; nobody goes on before all are connected."""
        text = json.dumps(config, sort_keys=True, default=str)
        patience = datetime.timedelta(seconds=300)
        problem = ""
        if self.rank == 0:
            host = os.environ.get("MASTER_ADDR") or socket.gethostname()
            self._server = TCPStore("0.0.0.0", 0, None, True, patience, wait_for_workers=False)
            self._server.set("config", text)
            self._caller = self._server.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
            _broadcast(json.dumps({"host": host, "name": socket.gethostname(), "port": self._server.port}), 0)
        else:
            card = json.loads(_broadcast("", 0))
            host = "127.0.0.1" if card["name"] == socket.gethostname() else card["host"]
            try:
                self._server = TCPStore(host, card["port"], None, False, patience, wait_for_workers=False)
                self._caller = self._server.clone()  # type: ignore[attr-defined]
                problem = self._difference(json.loads(text), json.loads(self._get("config")))
            except Exception as e:
                problem = (
                    f"rank {self.rank} cannot reach global rank 0 at {host}:{card['port']} ({e}); is the port open "
                    "between these hosts?"
                )
        if (failed := _largest(self.rank if problem else -1)) >= 0:
            self._server = self._caller = None
            raise RankError(_broadcast(problem, failed))

    def _difference(self, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
        differ = [f"{k}: {mine.get(k)!r} here, {v!r} there" for k, v in theirs.items() if v != mine.get(k)]
        text = (
            f"rank {self.rank} and global rank 0 built different loaders ({'; '.join(differ)}); pass the same arguments"
        )
        return f"{text} on every rank." if differ else ""

    def _store(self, client: TCPStore | None = None) -> TCPStore:
        store = client or self._server
        if store is None:
            raise RankError("this loader is closed.")
        return store

    def _set(self, key: str, value: bytes, client: TCPStore | None = None) -> None:
        with self._mapped():
            self._store(client).set(key, value)  # type: ignore[arg-type]  # bytes are taken as they are

    def _get(self, key: str, client: TCPStore | None = None) -> bytes:
        with self._mapped():
            return bytes(self._store(client).get(key))

    def _check(self, key: str, client: TCPStore | None = None) -> bool:
        with self._mapped():
            return bool(self._store(client).check([key]))

    def _add(self, key: str, number: int) -> int:
        with self._mapped():
            return int(self._store().add(key, number))

    def _delete(self, key: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._store().delete_key(key)

    @contextlib.contextmanager
    def _mapped(self) -> Any:
        try:
            yield
        except (dist.DistError, OSError, RuntimeError) as e:
            if isinstance(e, KnitError):
                raise
            self._lost = True
            raise RankError(
                f"rank {self.rank} lost global rank 0, which admits for all ({type(e).__name__}): it died, or closed "
                "its loader first. Look at its log; restart from the last checkpoint."
            ) from e


def revived(text: bytes) -> KnitError:
    """An error of another rank, of the same class and with the same message."""
    data = json.loads(text)
    kind = getattr(errors, data["type"], RankError)
    error = kind(data["message"]) if issubclass(kind, KnitError) else RankError(data["message"])
    _mark_told(error)
    return error


def _mark_told(error: BaseException) -> None:
    error.__dict__["_told"] = True


def _describe(error: BaseException, prefix: str = "") -> bytes:
    known = isinstance(error, KnitError)
    message = str(error) if known else f"{type(error).__name__}: {error}"
    return json.dumps({"type": type(error).__name__ if known else "RankError", "message": prefix + message}).encode()


def _data_parallel(mesh: DeviceMesh | None, dp: Sequence[str] | str | None, rank: int, world: int) -> tuple[int, int]:
    """This rank's place among the data-parallel ranks, and their number."""
    if mesh is None:
        if dp is not None:
            raise InvalidArgument(f"dp={dp!r} names dimensions of a mesh, but mesh is None; pass the DeviceMesh.")
        return rank, world
    if not isinstance(mesh, DeviceMesh):
        raise InvalidArgument(f"mesh must be a DeviceMesh, found {type(mesh).__name__}.")
    names = list(mesh.mesh_dim_names or ())
    wanted = [dp] if isinstance(dp, str) else list(dp) if dp is not None else names
    unknown = [name for name in wanted if name not in names]
    if unknown or (dp is not None and not wanted):
        raise InvalidArgument(f"dp={dp!r}: the mesh has dimensions {names}.")
    if mesh.size() != world:
        raise InvalidArgument(f"the mesh covers {mesh.size()} ranks, the job has {world}; use a mesh over all of them.")
    where = mesh.get_coordinate()
    dims = list(range(mesh.ndim)) if dp is None else [names.index(name) for name in names if name in wanted]
    first = (mesh.mesh == 0).nonzero()[0].tolist()  # where global rank 0 is; every rank looks, so that none waits
    if where is None or any(first[d] for d in dims):
        raise InvalidArgument(
            f"global rank 0 must be the first data-parallel rank of the mesh, it is at {first} of {mesh}; reorder it."
        )
    index, size = 0, 1
    for d in dims:
        index, size = index * mesh.size(d) + where[d], size * mesh.size(d)
    return index, size


def _broadcast(text: str, source: int) -> str:
    """A short text from one rank to all, as a tensor: nothing is unpickled."""
    data = torch.zeros(4096, dtype=torch.uint8)
    raw = bytearray(text.encode()[: len(data)])
    if raw and dist.get_rank() == source:
        data[: len(raw)] = torch.frombuffer(raw, dtype=torch.uint8)
    found = _on_any_backend(data, lambda x: dist.broadcast(x, source))
    return bytes(found.tolist()).rstrip(b"\0").decode(errors="ignore")


def _largest(number: int) -> int:
    """Over all ranks."""
    return int(_on_any_backend(torch.tensor([number]), lambda x: dist.all_reduce(x, dist.ReduceOp.MAX)))


def _on_any_backend(data: torch.Tensor, collective: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    try:
        collective(data)
    except RuntimeError:  # a job without a CPU backend, such as plain nccl
        data = data.to(torch.device("cuda", torch.cuda.current_device()))
        collective(data)
    return data.cpu()
