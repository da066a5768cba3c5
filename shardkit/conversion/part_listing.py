"""One part lists the source, and stores that for the others.

Parts that begin together wait for the one that lists, where the file system has locks. Whoever has
waited in vain lists as well, beside the others: for a source that no listing can be stored of.
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

from shardkit import storage
from shardkit.codecs.media import kind_by_name
from shardkit.conversion.claim import machine
from shardkit.conversion.lock import HELD, LOCK, UNLOCKED, try_lock, unlock
from shardkit.conversion.partial import partial_of
from shardkit.dataset import Dataset
from shardkit.errors import ShardkitError, warn
from shardkit.patterns import is_pattern
from shardkit.remote.path import RemotePath
from shardkit.sources import listing as listings
from shardkit.sources.given import listed
from shardkit.version import __version__

if TYPE_CHECKING:
    from shardkit.conversion.partial import Partial
    from shardkit.conversion.target import Target
    from shardkit.recipe import Recipe
    from shardkit.sources.base import Source, Stream

_LOCK = f"{LOCK}.listing"  # in OUT.partial, while a part lists
_PAUSE = 0.1  # between two looks: the file system may be far away
_ENTRIES, _DEPTH = 100, 4  # of a folder, and folders, that tell what kind of files there are


class PartListing:
    """What a part has listed of its source, or loads of what another one has."""

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
        """None for a source, or for options, with which each part lists by itself."""
        given = listed(source) or []
        chosen = recipe.chooses or recipe.metadata or recipe.label_column
        if len(given) != 1 or isinstance(given[0], Dataset) or chosen:
            return None
        path = storage.source(given[0])
        if isinstance(path, RemotePath) or is_pattern(path):
            return None
        return cls(path, recipe, partial_of(target))

    def find(self, ending: contextlib.ExitStack | None) -> Mapping[str, Source | Stream] | None:
        """What another part has listed. If it is None, this part is to list and to `take` that.

        With `ending` others wait until it is stored, or until then.
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
                    warn("another part lists the source: this one waits for what that finds")
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
        """Whether this is what the unfinished work is made of: before it is planned, which takes
        as much memory as there are bytes, a stranger may say."""
        job = self._partial.job() or {}
        recipe = job.get("recipe")
        hashes = {name: source.fingerprint() or {} for name, source in sources.items()}
        files, times = ({n: h.get(k) for n, h in hashes.items()} for k in ("files", "times"))
        return isinstance(recipe, dict) and (recipe.get("sources"), job.get("times")) == (
            files,
            times,
        )

    def take(self, sources: Mapping[str, Source | Stream]) -> None:
        """These were listed: others need not wait where that cannot be stored."""
        self._listing = listings.listing_of(sources, self._source, machine())
        if self._listing is None:
            self._release()

    def keep(self, partial: Partial) -> None:
        """Store what was listed here, once the work has begun."""
        found, self._listing = self._listing, None
        if found is not None:
            partial.keep_listing(found.size, lambda path: listings.write(found, self._asked, path))
        self._release()

    def _try_lock(self) -> int | None:
        try:
            storage.make_folder(self._partial.path)
            return try_lock(self._partial.path, _LOCK, advice="")
        except ShardkitError:  # which is named when the work begins, if that is needed at all
            return UNLOCKED

    def _release(self) -> None:
        """Leave nothing behind, where the work has not begun."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                (self._partial.path / _LOCK).unlink(missing_ok=True)
                self._partial.path.rmdir()
            unlock(handle)


def _has_media(root: Path) -> bool:
    """Whether the first files say that a listing may be stored: those of text, say, do not."""
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
