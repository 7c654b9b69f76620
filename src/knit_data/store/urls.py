"""From a URL to the back end that serves it."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote, urlsplit

from fsspec import available_protocols

from knit_data.errors import InvalidArgument
from knit_data.store.backend import Backend
from knit_data.store.local import LocalBackend
from knit_data.store.memory import MemoryBackend
from knit_data.store.objects import ObjectBackend

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


def open_backend(url: str | os.PathLike[str], *, fsync: bool = False, **storage_options: object) -> Backend:
    """The back end of a URL: a path or ``file://`` is local files, ``memory://name`` this process's memory, and any
    other is fsspec's, such as ``s3://bucket/run-7``.

    ``fsync=True`` makes local files survive a power cut; others have no use for it. ``storage_options`` are those of
    fsspec's file system, such as ``endpoint_url=`` for S3; files and memory take none.
    """
    text = os.fspath(url)
    found = _SCHEME.match(text)
    scheme = found[1].lower() if found else ""
    if scheme not in ("", "file", "memory"):
        if scheme not in available_protocols() or "://" not in text:
            raise InvalidArgument(
                f"no back end for {scheme + ':'!r}, in {text!r}: a path, file:///path, memory://name, s3://bucket/name "
                "or another URL of fsspec (a relative path with a colon in its first part: ./…)"
            )
        return ObjectBackend(text, **storage_options)
    if not text:
        raise InvalidArgument("a store needs a folder or URL, got an empty one")
    if storage_options:
        raise InvalidArgument(f"{text!r} takes no storage options, got {', '.join(sorted(storage_options))}")
    if scheme == "memory":
        if not text.lower().startswith("memory://"):
            raise InvalidArgument(f"{text!r} is not of the form memory://name")
        return MemoryBackend.named(text[len("memory://") :])
    return LocalBackend(_file_path(text) if scheme else os.path.expanduser(text), fsync=fsync)


def _file_path(url: str) -> str:
    split = urlsplit(url)
    if split.netloc not in ("", "localhost") or not split.path.startswith("/") or split.query or split.fragment:
        raise InvalidArgument(f"{url!r} is not of the form file:///absolute/path")
    return unquote(split.path)
