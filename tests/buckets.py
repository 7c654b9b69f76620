"""Places that keep objects: an S3 server in a process of its own, and a file system of fsspec in this one."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
from fsspec import AbstractFileSystem
from fsspec.registry import _registry, known_implementations

MISSING = [name for name in ("moto", "flask", "s3fs") if importlib.util.find_spec(name) is None]
needs_s3 = pytest.mark.skipif(bool(MISSING), reason=f"an S3 server and its client need {', '.join(MISSING)}")


@contextmanager
def s3_server() -> Iterator[dict[str, Any]]:
    """Runs moto, with an empty bucket named ``bucket``; yields the storage options that reach it."""
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    drain: threading.Thread | None = None
    try:
        said = ""
        while (found := re.search(r"Running on (http://127\.0\.0\.1:\d+)", said)) is None:
            line = server.stderr.readline()
            assert line, f"moto ended with {server.wait()}: {said}"
            said += line
        # it writes a line a request, and would stop where nobody reads them
        drain = threading.Thread(target=server.stderr.read, daemon=True)
        drain.start()

        import s3fs
        from aiobotocore.session import get_session

        # one session for all: it reads the description of S3, which takes longer than most tests, once
        options = {"endpoint_url": found[1], "key": "test", "secret": "test", "session": get_session()}

        s3fs.S3FileSystem(**options, skip_instance_cache=True).mkdir("bucket")
        yield options
    finally:
        server.kill()
        server.wait()
        if drain is not None:
            drain.join()
        server.stderr.close()


class Bucket(AbstractFileSystem):
    """A bucket in this process, shared by all instances: ranges are clipped, and every request is noted.

    ``script`` maps an operation, or an operation and a path, to what it raises next, first to last; None: nothing.
    Operations are create, put, get, delete, and answer, which is that of a create or put that was done.
    """

    protocol = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "sftp", "webdav", "hdfs")
    root_marker = ""
    objects: ClassVar[dict[str, bytes]] = {}
    asked: ClassVar[list[tuple[Any, ...]]] = []
    script: ClassVar[dict[str, list[Exception | None]]] = {}
    lock: ClassVar[threading.RLock] = threading.RLock()

    def _request(self, *what: Any) -> None:
        self.asked.append(what)
        self._strike(*what)

    def _strike(self, operation: str, path: str, *_: Any) -> None:
        for name in (operation, f"{operation} {path}"):
            errors = self.script.get(name, [])
            if errors and (error := errors.pop(0)) is not None:
                raise error

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", overwrite: bool = True) -> None:
        with self.lock:
            only_new = mode == "create" or not overwrite
            self._request("create" if only_new else "put", path)
            if path in self.objects and only_new:
                raise FileExistsError(path)
            self.objects[path] = bytes(value)
            self._strike("answer", path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        with self.lock:
            self._request("get", path, start, end)
            if path not in self.objects:
                raise FileNotFoundError(path)
            return self.objects[path][start:end]

    def rm_file(self, path: str) -> None:
        with self.lock:
            self._request("delete", path)
            if self.objects.pop(path, None) is None:
                raise FileNotFoundError(path)


@contextmanager
def served_by_bucket(scheme: str = "gs") -> Iterator[type[Bucket]]:
    """URLs of this scheme are served by ``Bucket``, which starts empty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_registry, scheme, Bucket)
        patch.setitem(known_implementations, scheme, {})  # some are known only where their package is installed
        for state in (Bucket.objects, Bucket.asked, Bucket.script):
            state.clear()
        yield Bucket
