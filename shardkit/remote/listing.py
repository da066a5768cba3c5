"""`ListedStore`: a store of which one folder is looked at as a whole, by few requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardkit.remote.store import Entry, Info, Store


@dataclass
class _Folder:
    """What a folder holds, by name: an object and a folder may have the same."""

    files: dict[str, Info] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)


class ListedStore(Store):
    """A store with the folder `root` as it was when it was listed, so that a plan is of one state.

    Whoever looks into a folder below lists them all, in pages: not one by one. What is outside of
    `root` is asked for as ever. A pickle is a plain `Store`.
    """

    def __init__(self, store: Store, root: str) -> None:
        super().__init__(store.site, store.options)
        self._clients = store._clients
        self._root = root
        self._folders: dict[str, _Folder] = {}
        self._whole = False  # whether all below the root is listed

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
            for name, info in self._list(folder):
                if info is None:
                    found.folders.add(name)
                else:
                    found.files[name] = info
        elif folder not in self._folders and not self._whole:
            self._list_all()
        return self._folders.get(folder, _Folder())

    def _list_all(self) -> None:
        folders = {self._root: _Folder()}
        if self._root in self._folders:  # those that are empty have an object at most
            folders[self._root].folders |= self._folders[self._root].folders
        for page in self.below(self._root):
            for key, info in page:
                folder, _, name = key.rpartition("/")
                if key != self._root:  # a mark that consoles make for a folder
                    _add(folders, folder)
                    folders[folder].files[name] = info
        for found in folders.values():
            for name in found.folders & found.files.keys():
                if not found.files[name].size:  # such a mark
                    del found.files[name]
        self._folders, self._whole = folders, True


def _add(folders: dict[str, _Folder], folder: str) -> None:
    """Note a folder in those above it; the root is among them."""
    if folder not in folders:
        above, _, name = folder.rpartition("/")
        _add(folders, above)
        folders[above].folders.add(name)
        folders[folder] = _Folder()
