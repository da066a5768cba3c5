"""One part lists the source, and stores the listing for the other parts.

On file systems with locks, parts that begin together wait for the part that lists the source. If
the listing could not be stored, the parts that have waited list the source themselves, all at once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from shardkit.codecs.media import kind_by_name
from shardkit.conversion.claim import machine
from shardkit.conversion.lock import HELD, LOCK, UNLOCKED, try_lock, unlock
from shardkit.conversion.partials import partial_of
from shardkit.dataset.dataset import Dataset
from shardkit.errors import ShardkitError, warn
from shardkit.sources import listing as listings
from shardkit.sources.inputs import listed
from shardkit.storage import fs
from shardkit.storage.patterns import is_pattern
from shardkit.storage.remote.path import RemotePath
from shardkit.version import __version__

if TYPE_CHECKING:
    from shardkit.conversion.partial import Partial
    from shardkit.conversion.target import Target
    from shardkit.metadata.recipe import Recipe
    from shardkit.sources.base import Source, Stream

_LOCK = f"{LOCK}.listing"  # in OUT.partial, while a part lists
_PAUSE = 0.1  # seconds between two attempts to lock: the file system may be remote
_ENTRIES, _DEPTH = 100, 4  # entries per folder, and folders, that are examined for media


class PartListing:
    """The listing of a part's source, made by this part or loaded from another one."""

    def __init__(self, source: Path, recipe: Recipe, partial: Partial) -> None:
        self._source, self._selection, self._partial = source, recipe.selection, partial
        asked = {**recipe.to_json(), "on_error": None, "shardkit": __version__}
        self._asked = xxhash.xxh3_128_digest(
            json.dumps(asked, sort_keys=True, default=str).encode()
        )
        self._handle: int | None = None
        self._listing: listings.Listing | None = None

    @classmethod
    def of(cls, source: object, recipe: Recipe, target: Target) -> PartListing | None:
        """The listing of a source; None if its kind, or the options, require each part to list."""
        given = listed(source) or []
        chosen = recipe.chooses or recipe.metadata or recipe.label_column
        if len(given) != 1 or isinstance(given[0], Dataset) or chosen:
            return None
        path = fs.source(given[0])
        if isinstance(path, RemotePath) or is_pattern(path):
            return None
        return cls(path, recipe, partial_of(target))

    def find(self, ending: contextlib.ExitStack | None) -> Mapping[str, Source | Stream] | None:
        """Load the listing of another part. If None, list the source and pass it to `take`.

        With `ending`, other parts wait until that is stored, or until `ending` is closed.
        """
        found = self._load()
        remote = isinstance(self._partial.path, RemotePath)
        if found is not None or ending is None or remote or not _has_media(self._source):
            return found
        waited = False
        while True:
            handle = self._try_lock()
            if handle == HELD:
                if not waited:
                    warn("another part lists the source: waiting for its listing")
                waited = True
                time.sleep(_PAUSE)
            elif handle is not None:
                self._handle = handle
                with contextlib.ExitStack() as closing:
                    closing.callback(self._release)
                    found = self._load()
                    if found is None and not waited:
                        ending.push(closing.pop_all())
                return found

    def _load(self) -> dict[str, Source] | None:
        with self._partial.listing() as found:
            if found is None:
                return None
            shown, path = found
            sources = listings.read(
                path, shown, self._asked, self._source, machine(), self._selection
            )
        return None if sources is None or not self._are_of_job(sources) else sources

    def _are_of_job(self, sources: Mapping[str, Source]) -> bool:
        """Whether these are the sources of the unfinished work. This is checked before planning,
        as the listing may come from someone else, and planning takes memory in proportion."""
        job = self._partial.job() or {}
        recipe = job.get("recipe")
        hashes = {name: source.fingerprint() or {} for name, source in sources.items()}
        files, times = ({n: h.get(k) for n, h in hashes.items()} for k in ("files", "times"))
        return isinstance(recipe, dict) and (recipe.get("sources"), job.get("times")) == (
            files,
            times,
        )

    def take(self, sources: Mapping[str, Source | Stream]) -> None:
        """Take the listed sources. If they cannot be stored, let other parts stop waiting."""
        self._listing = listings.listing_of(sources, self._source, machine())
        if self._listing is None:
            self._release()

    def keep(self, partial: Partial) -> None:
        """Store the listing made here, once the work has begun."""
        found, self._listing = self._listing, None
        if found is not None:
            partial.keep_listing(found.size, lambda path: listings.write(found, self._asked, path))
        self._release()

    def _try_lock(self) -> int | None:
        try:
            fs.make_folder(self._partial.path)
            return try_lock(self._partial.path, _LOCK, advice="")
        except ShardkitError:  # reported when the work begins, if the problem persists
            return UNLOCKED

    def _release(self) -> None:
        """Release the lock; if the work has not begun, leave no files behind."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                (self._partial.path / _LOCK).unlink(missing_ok=True)
                self._partial.path.rmdir()
            unlock(handle)


def _has_media(root: Path) -> bool:
    """Whether the first files are media, so that a listing may be stored: not so for text files."""
    folders = [os.fspath(root)]
    for folder in itertools.islice(folders, _DEPTH):
        try:
            with os.scandir(folder) as entries:
                some = [*itertools.islice(entries, _ENTRIES)]
                if any(kind_by_name(entry.name) for entry in some):
                    return True
                folders += [entry.path for entry in some if entry.is_dir()][:1]
        except OSError:
            return False
    return False
