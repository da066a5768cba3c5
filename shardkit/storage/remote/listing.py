"""`ListedStore`: a store with a snapshot of one folder, which takes few requests to list."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue

from shardkit.storage.remote.client import FULL_PAGE, Entry, Info, Page
from shardkit.storage.remote.store import Store

_REQUESTS = 64  # at a time
_DENSE = 8  # names per page, on average, up to which subfolders are listed separately


@dataclass
class _Folder:
    """The contents of a folder, by name: an object and a folder may have the same name."""

    files: dict[str, Info] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)


class ListedStore(Store):
    """A store with a snapshot of the folder `root`, so that a plan is based on one state.

    The first access to a subfolder lists all of them at once, in pages, not one by one. Keys
    outside of `root` are requested as usual. Pickling gives a plain `Store`.
    """

    def __init__(self, store: Store, root: str) -> None:
        super().__init__(store.site, store.options)
        self._clients = store._clients
        self._root = root
        self._folders: dict[str, _Folder] = {}
        self._whole = False  # whether everything below the root is listed

    def find(self, key: str) -> Info | None:
        folder, _, name = key.rpartition("/")
        if key in self._known or not self._is_inside(folder):
            return super().find(key)
        if self._root in self._folders and folder != self._root:
            top = folder[len(self._root) :].lstrip("/").partition("/")[0]
            if top not in self._folders[self._root].folders:
                return None
        if not self._whole and folder not in self._folders:
            return super().find(key)
        return self._folders.get(folder, _Folder()).files.get(name)

    def is_folder(self, key: str) -> bool:
        if not self._is_inside(key):
            return super().is_folder(key)
        above, _, name = key.rpartition("/")
        if key != self._root and above in self._folders:
            return name in self._folders[above].folders
        found = self._folder(key)
        return bool(found.files or found.folders)

    def entries(self, folder: str) -> list[Entry]:
        if not self._is_inside(folder):
            return super().entries(folder)
        found = self._folder(folder)
        folders = [Entry(name, None) for name in sorted(found.folders)]
        return folders + [Entry(name, info) for name, info in sorted(found.files.items())]

    def _is_inside(self, folder: str) -> bool:
        return not self._root or f"{folder}/".startswith(f"{self._root}/")

    def _folder(self, folder: str) -> _Folder:
        if folder == self._root and folder not in self._folders:
            found = self._folders[folder] = _Folder()
            for name, info in self.list_folder(folder):
                if info is None:
                    found.folders.add(name)
                else:
                    found.files[name] = info
        elif folder not in self._folders and not self._whole:
            self._list_all()
        return self._folders.get(folder, _Folder())

    def _list_all(self) -> None:
        folders = {self._root: _Folder()}
        if self._root in self._folders:  # keep empty folders: at most a placeholder is listed
            folders[self._root].folders |= self._folders[self._root].folders
        for page in _side_by_side(self, self._root):
            for key, info in page:
                folder, _, name = key.rpartition("/")
                if key != self._root:  # a placeholder that web consoles create for a folder
                    _add(folders, folder)
                    folders[folder].files[name] = info
        for found in folders.values():
            for name in found.folders & found.files.keys():
                if not found.files[name].size:  # such a placeholder
                    del found.files[name]
        self._folders, self._whole = folders, True


def _side_by_side(store: Store, folder: str) -> Iterator[Page]:
    """Yield all objects in a folder and its subfolders, by concurrent listings, in no order.

    A few objects may come twice.
    """
    waiting, running, over = [folder], 0, threading.Event()
    ended: SimpleQueue[Page | Future[list[str]]] = SimpleQueue()
    with ThreadPoolExecutor(_REQUESTS, "shardkit-request") as pool:
        try:
            while waiting or running:
                while waiting and running < _REQUESTS:
                    listing = pool.submit(_list, store, waiting.pop(), ended.put, over)
                    listing.add_done_callback(ended.put)
                    running += 1
                found = ended.get()
                if isinstance(found, Future):
                    waiting += found.result()
                    running -= 1
                else:
                    yield found
        finally:
            over.set()


def _list(
    store: Store, folder: str, give: Callable[[Page], object], over: threading.Event
) -> list[str]:
    """Give the pages of a recursive listing of a folder.

    If pages are full of objects in few subfolders, these are large: then give the objects in the
    folder itself, and return the subfolders, which are still to be listed.
    """
    start, names = f"{folder}/" if folder else "", set[str]()
    for pages, page in enumerate(store.below(folder), 1):
        if over.is_set():
            break
        names |= {key[len(start) :].partition("/")[0] for key, _ in page}
        nested = "/" in page[-1][0][len(start) :]
        if len(page) == FULL_PAGE and nested and len(names) <= _DENSE * pages:
            entries = [(start + name, info) for name, info in store.list_folder(folder)]
            give([(key, info) for key, info in entries if info is not None])
            return [key for key, info in entries if info is None]
        give(page)
    return []


def _add(folders: dict[str, _Folder], folder: str) -> None:
    """Add a folder, and itself to its parent, up to the root, which exists."""
    if folder not in folders:
        above, _, name = folder.rpartition("/")
        _add(folders, above)
        folders[above].folders.add(name)
        folders[folder] = _Folder()
