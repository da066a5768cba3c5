"""A bucket as tests fill it, read it and compare it."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import shardkit
from shardkit.dataset.find import open_dataset
from shardkit.storage import fs
from tests.conftest import files_of


class Bucket:
    """A bucket of its own in a store, with some files; `through` is the same behind a proxy.

    `options` and `environ` lead through the proxy, if there is one. Tests look past it.
    """

    def __init__(self, store, files=None):
        self.store, self.name = store, store.bucket()
        self.options, self.environ = store.options(), store.environ()
        self.put(files or {})

    def through(self, proxy):
        found = copy.copy(self)
        found.options = self.store.options(proxy.endpoint)
        found.environ = self.store.environ(proxy.endpoint)
        found.proxy = proxy
        return found

    def url(self, key=""):
        return self.store.url(self.name, key)

    @property
    def out(self):
        return self.url("out")

    def path(self, key):
        """Through a connection of its own, as another process has."""
        with fs.using(self.options):
            return fs.source(self.url(key))

    def open(self, key=""):
        with fs.using(self.options):
            return open_dataset(self.url(key))

    def convert(self, source, to="wds", **options):
        """To `out`, in this process."""
        options = {"workers": 0, "shard_size": 12_000, "on_error": "skip", **options}
        return shardkit.convert(source, to, self.out, storage_options=self.options, **options)

    @cached_property
    def _client(self):
        return self.store.open(self.name)

    def put(self, files, below=""):
        """Objects with these bytes, or with those of all files of a folder."""
        every = files_of(files) if isinstance(files, Path) else files

        def put(name):
            self._client.put(f"{below}{name}", every[name], use_multipart=False)

        with ThreadPoolExecutor(8) as threads:
            [*threads.map(put, every)]

    def get(self, key):
        return bytes(self._client.get(key).bytes())

    def listed(self):
        return sorted(meta["path"] for page in self._client.list() for meta in page)

    def objects(self):
        while True:
            try:
                return {key: self.get(key) for key in self.listed()}
            except FileNotFoundError:  # a request of a process that was killed is still at work
                continue

    def delete(self, *keys):
        for key in keys:
            self._client.delete(key)

    def clear(self):
        self.delete(*self.listed())

    def snapshot(self):
        """A bucket with what there is now, for `restore`."""
        return self.store.copy(self.name, self.store.bucket())

    def restore(self, snapshot):
        self.store.copy(snapshot, self.name)


def below(folder, key="out"):
    """The objects that a dataset in a folder should be."""
    return {f"{key}/{name}": data for name, data in files_of(folder).items()}
