"""`ListedStore`: a store with a snapshot of one folder, which takes few requests to list."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from shardkit.storage.remote.client import FULL_PAGE, Entry, Info, Page
from shardkit.storage.remote.store import Store

_REQUESTS = 64  # at a time
_PAGES = 2  # of a folder at a time: pages that are not consumed yet are in memory
_DENSE = 8  # names per full page, on average, up to which subfolders are listed separately


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
    """All objects in a folder and its subfolders, by concurrent listings, in no order."""
    waiting = deque([_Part(store, folder)])
    running: set[Future[tuple[list[Page], list[_Part]]]] = set()
    with ThreadPoolExecutor(_REQUESTS, "shardkit-request") as pool:
        try:
            while waiting or running:
                while waiting and len(running) < _REQUESTS:
                    running.add(pool.submit(waiting.popleft().some))
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    pages, left = future.result()
                    yield from pages
                    waiting.extend(left)
        finally:
            pool.shutdown(cancel_futures=True)


class _Part:
    """A recursive listing of a folder, which splits itself into several.

    If the subfolders are large, then after a full page it is limited to the subfolder of its last
    key, and each of the following subfolders gets its own listing. If there are very many small
    ones, it continues as a single listing.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self._store, self._pages = store, store.below(folder)
        self._start = f"{folder}/" if folder else ""  # prefix of the keys that it gives
        self._last = ""  # the last key so far
        self._full, self._names = 0, 0  # full pages, and the names in the folder that they had

    def some(self) -> tuple[list[Page], list[_Part]]:
        """Some pages, and the listings that give the rest."""
        pages: list[Page] = []
        for page in self._pages:
            keys, first = [key for key, _ in page], not self._last
            own = page if first else [entry for entry in page if entry[0].startswith(self._start)]
            pages.append(own)
            if len(own) < len(page):
                break
            in_order = keys == sorted(keys) and self._last < keys[0]
            self._last = keys[-1]
            if len(page) == FULL_PAGE and in_order and self._is_dense(keys):
                beside, others = self._divided()
                return [*pages, beside], [self, *others]
            if len(pages) == _PAGES:
                return pages, [self]
        return pages, []

    def _is_dense(self, keys: list[str]) -> bool:
        """Whether the names in the folder have many keys each, and the last one is a folder."""
        own = len(self._start)
        self._full += 1
        self._names += len({key[own:].partition("/")[0] for key in keys})
        return "/" in keys[-1][own:] and self._names <= _DENSE * self._full

    def _divided(self) -> tuple[Page, list[_Part]]:
        """What follows the subfolder of the last key: objects, and listings of subfolders."""
        above = self._start
        self._start = above + self._last[len(above) :].partition("/")[0] + "/"
        self._full, self._names = 0, 0
        entries = self._store.list_folder(above.rstrip("/"))
        keys = [(above + entry.name, entry.info) for entry in entries]
        objects = [(key, info) for key, info in keys if info is not None and key > self._last]
        folders = [key for key, info in keys if info is None and f"{key}/" > self._start]
        return objects, [_Part(self._store, folder) for folder in sorted(folders)]


def _add(folders: dict[str, _Folder], folder: str) -> None:
    """Add a folder, and itself to its parent, up to the root, which exists."""
    if folder not in folders:
        above, _, name = folder.rpartition("/")
        _add(folders, above)
        folders[above].folders.add(name)
        folders[folder] = _Folder()
