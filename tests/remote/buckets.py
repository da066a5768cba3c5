"""A bucket as tests fill it, read it and compare it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import shardkit
from shardkit import storage
from shardkit.opening import open_dataset
from shardkit.remote.path import RemotePath
from tests.conftest import files_of
from tests.remote.proxy import Proxy
from tests.remote.servers import Google, Store


class Bucket:
    """A bucket of its own in a store, with some files; `through` is the same behind a proxy.

    `options` and `environ` lead through the proxy, if there is one. Tests look past it.
    """

    def __init__(self, store: Store, files: Path | Mapping[str, bytes] | None = None) -> None:
        self.store, self.name = store, store.bucket()
        self.options, self.environ = store.options(), store.environ()
        self.proxy: Proxy
        self.put(files or {})

    def through(self, proxy: Proxy) -> Bucket:
        found = copy.copy(self)
        found.options = self.store.options(proxy.endpoint)
        found.environ = self.store.environ(proxy.endpoint)
        found.proxy = proxy
        return found

    def url(self, key: str = "") -> str:
        return self.store.url(self.name, key)

    @property
    def out(self) -> str:
        return self.url("out")

    def path(self, key: str) -> RemotePath:
        """Through a connection of its own, as another process has."""
        with storage.using(self.options):
            found = storage.source(self.url(key))
        assert isinstance(found, RemotePath)
        return found

    def open(self, key: str = "") -> shardkit.Dataset:
        with storage.using(self.options):
            return open_dataset(self.url(key))

    def convert(self, source: Any, to: str = "wds", **options: Any) -> Any:
        """To `out`, in this process."""
        options = {"workers": 0, "shard_size": 12_000, "on_error": "skip", **options}
        return shardkit.convert(source, to, self.out, storage_options=self.options, **options)

    @cached_property
    def _client(self) -> Any:
        return self.store.open(self.name)

    def put(self, files: Path | Mapping[str, bytes], below: str = "") -> None:
        """Objects with these bytes, or with those of all files of a folder."""
        every = files_of(files) if isinstance(files, Path) else files

        def put(name: str) -> None:
            self._client.put(f"{below}{name}", every[name], use_multipart=False)

        if len(every) < 20:
            [*map(put, every)]
        else:
            with ThreadPoolExecutor(8) as threads:
                [*threads.map(put, every)]

    def get(self, key: str) -> bytes:
        return bytes(self._client.get(key).bytes())

    def listed(self) -> list[str]:
        return sorted(meta["path"] for page in self._client.list() for meta in page)

    def objects(self) -> dict[str, bytes]:
        while True:
            try:
                return {key: self.get(key) for key in self.listed()}
            except FileNotFoundError:  # a request of a process that was killed is still at work
                continue

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._client.delete(key)

    def clear(self) -> None:
        self.delete(*self.listed())

    def snapshot(self) -> str:
        """A bucket with what there is now, for `restore`."""
        assert isinstance(self.store, Google)
        return self.store.copy(self.name, self.store.bucket())

    def restore(self, snapshot: str) -> None:
        assert isinstance(self.store, Google)
        self.store.copy(snapshot, self.name)


def below(folder: Path, key: str = "out") -> dict[str, bytes]:
    """The objects that a dataset in a folder should be."""
    return {f"{key}/{name}": data for name, data in files_of(folder).items()}
