"""Clients of a `Store`: obstore for buckets and web servers, fsspec for all other schemes."""

from __future__ import annotations

import mmap
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

from shardkit.errors import (
    MissingLibraryError,
    NotFoundError,
    ShardkitError,
    StorageError,
    UnreachableError,
    UsageError,
)
from shardkit.helpers.extras import extra
from shardkit.helpers.pickled_process import PickledProcess, read_message, serve
from shardkit.storage.remote.client import (
    FULL_PAGE,
    MANIFEST,
    Client,
    Entry,
    Info,
    Page,
    PassingError,
    Tag,
    no_object,
    replaced,
    time_for,
)

# https://developmentseed.org/obstore/latest/api/store/
_OBSTORE = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https")
_CLIENT_OPTIONS = {
    "allow_http", "allow_invalid_certificates", "connect_timeout", "default_headers", "http1_only",
    "pool_idle_timeout", "pool_max_idle_per_host", "proxy_url", "proxy_ca_certificate",
    "proxy_excludes", "root_certificate", "read_timeout", "timeout", "user_agent",
}  # fmt: skip
# For connecting, between two reads of a response, and for a whole request.
_TIMEOUTS = {"connect_timeout": "5s", "read_timeout": "20s", "timeout": "120s"}
_SMALL = 1 << 20  # bytes: larger requests get longer timeouts
_ENDPOINTS = (
    "endpoint", "endpoint_url", "base_url", "aws_endpoint", "aws_endpoint_url", "google_base_url",
    "azure_endpoint", "azure_storage_endpoint",
)  # fmt: skip
# File systems whose object takes requests of several threads at once; SFTP and FTP, for example,
# have one connection, on which such requests wait for ever or get the answers of others.
_CONCURRENT = ("hf", "memory", "github", "webdav", "webhdfs")

# What a URL says about a file system of fsspec, which is not a part of the paths in it.
_HOSTS = ("host", "port", "username", "org", "repo", "sha", "share_access", "domain")

_used_in: set[int] = set()  # ids of processes that use obstore: a fork does not copy its threads


def connect(site: str, options: Mapping[str, Any]) -> Client:
    """The client of a site such as `s3://bucket`. Raises UsageError for an unknown scheme."""
    scheme = site.partition("://")[0]
    if scheme not in _OBSTORE:
        return cast("Client", _Fsspec(site, options))
    if _used_in - {os.getpid()}:
        return cast("Client", ForkedClient(site, options))
    _used_in.add(os.getpid())
    return _Obstore(site, options)


def without_caches(site: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for requests that bypass HTTP caches in front of the store."""
    if site.partition("://")[0] not in _OBSTORE:
        return dict(options)
    headers = {**options.get("default_headers", {}), "cache-control": "no-cache"}
    return {**options, "default_headers": headers}


class _Obstore:
    """Client for buckets, and for web servers, which cannot be listed."""

    def __init__(self, site: str, options: Mapping[str, Any]) -> None:
        with extra("remote", f"a URL such as {site}"):
            import obstore
            from obstore import exceptions
            from obstore.store import from_url
        self._site, self._library, self._exceptions = site, obstore, exceptions
        self.lists = not site.startswith("http")
        client = {name: value for name, value in options.items() if name in _CLIENT_OPTIONS}
        config = {name: value for name, value in options.items() if name not in _CLIENT_OPTIONS}
        addresses = _endpoints(site, config).values() if self.lists else [site]
        if any(address.startswith("http://") for address in addresses):
            client.setdefault("allow_http", True)
        make: Any = from_url  # Any: its overloads need the kind of the store to be known statically

        def opened(**timeouts: str) -> Any:
            return make(
                site,
                config=config or None,
                client_options={**_TIMEOUTS, **timeouts, **client},
                # `Store` retries: with one time limit for all attempts, and after a truncated body.
                retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=60)},
            )

        self._opened = opened
        self._answered = False  # whether the store has responded to any request
        self._patient: dict[float, Any] = {}  # stores with longer timeouts, by seconds
        failure = None  # raised outside `except`: the text of obstore's error may contain secrets
        try:
            self._store = opened()
        except exceptions.BaseError as error:
            bad = [name for name in config if name in str(error)]
            failure = _bad_options(site, options, ", ".join(bad) or type(error).__name__)
            failure.expected = "option names as in https://developmentseed.org/obstore"
        if failure is not None:
            raise failure

    @contextmanager
    def _explained(self, key: str, *, writing: bool = False) -> Iterator[None]:
        failure = None
        try:
            yield
        except ValueError as error:  # raised before any request was made
            what = "this is not a valid object name"
            raise UsageError(what, found=f"{self._site}/{key}") from error
        except (self._exceptions.BaseError, OSError) as error:
            ours = isinstance(error, ShardkitError)
            url = f"{self._site}/{key}"
            failure = error if ours else _explain(error, url, writing=writing)
            if not isinstance(failure, PassingError) or failure.error.what != _NO_ANSWER:
                self._answered = True
            elif not self._answered:
                failure = _passing(_NO_ANSWER, url, failure.error.found, UnreachableError)
        else:
            self._answered = True
        if failure is not None:  # outside `except`, as above: tracebacks must not show secrets
            raise failure from failure.__cause__

    def find(self, key: str) -> Info | None:
        try:
            with self._explained(key):
                return _info(self._library.head(self._store, key))
        except NotFoundError as error:
            if error.found is not None:  # the bucket itself does not exist
                raise
            return None
        except StorageError as error:
            # A web server may refuse to show a folder, but not what is in it.
            if self.lists or error.what != _NO_ACCESS or not self._has_manifest(key):
                raise
            return None

    def _has_manifest(self, folder: str) -> bool:
        try:
            self._library.head(self._store, f"{folder}/{MANIFEST}")
        except (self._exceptions.BaseError, OSError):
            return False
        return True

    def read(self, key: str, start: int, stop: int, tag: str | None) -> tuple[bytes, Info | None]:
        options: Any = {"range": (start, stop)}
        if tag is not None and not tag.startswith("W/"):
            options["if_match"] = tag
        with self._explained(key):
            found = self._library.get(self._store, key, options=options)
            if tag is not None and _tag(found.meta) not in (None, tag):
                raise replaced(f"{self._site}/{key}")
            about = _info(found.meta)
            if tuple(found.range) != (start, stop):
                return b"", about  # the wrong length makes `Store` retry the request
            return bytes(found.bytes()), about

    def read_all(self, key: str) -> tuple[bytes, Info]:
        with self._explained(key):
            found = self._library.get(self._store, key)
            return bytes(found.bytes()), _info(found.meta)

    def entries(self, folder: str) -> list[Entry]:
        prefix = f"{folder}/" if folder else None
        with self._explained(folder):
            found = self._library.list_with_delimiter(self._store, prefix)
        entries = [Entry(path.rpartition("/")[2], None) for path in found["common_prefixes"]]
        for meta in found["objects"]:
            if meta["path"] != folder:  # a placeholder "folder/", which web consoles create
                entries.append(Entry(meta["path"].rpartition("/")[2], _info(meta)))
        return entries

    def below(self, folder: str, after: str) -> Iterator[Page]:
        prefix = f"{folder}/" if folder else None
        with self._explained(folder):
            for page in self._library.list(
                self._store, prefix, offset=after or None, chunk_size=FULL_PAGE
            ):
                yield [(meta["path"], _info(meta)) for meta in page]

    # --- writing

    def read_tagged(self, key: str) -> tuple[bytes, Tag]:
        with self._explained(key):
            found = self._library.get(self._store, key)
            return bytes(found.bytes()), Tag(found.meta["e_tag"], found.meta["version"])

    def put(self, key: str, data: bytes | Path, size: int) -> None:
        view: Any = data
        if isinstance(data, Path):  # mapped into memory: it may be larger than the free memory
            with data.open("rb") as file:
                view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        with self._explained(key, writing=True):
            self._library.put(self._with_time_for(size), key, memoryview(view), use_multipart=False)

    def put_if(self, key: str, data: bytes, tag: Tag | None) -> Tag | None:
        endpoints = {} if tag is None else tag._asdict()
        mode: Any = {name: value for name, value in endpoints.items() if value} or "create"
        conflicts = (self._exceptions.AlreadyExistsError, self._exceptions.PreconditionError)
        with self._explained(key, writing=True):
            try:
                made = self._library.put(self._store, key, data, mode=mode)
            except conflicts:
                return None
            except FileNotFoundError as error:
                if tag is None or "NoSuchBucket" in str(error):
                    raise
                return None
            return Tag(made["e_tag"], made["version"])

    def copy(self, old: str, new: str, size: int) -> None:
        with self._explained(old, writing=True):
            self._library.copy(self._with_time_for(size), old, new)

    def delete(self, key: str) -> None:
        try:
            with self._explained(key, writing=True):
                self._library.delete(self._store, key)
        except NotFoundError as error:
            if error.found is not None:
                raise

    def _with_time_for(self, size: int) -> Any:
        """Return the store, with timeouts that are long enough to transfer `size` bytes."""
        if size < _SMALL:
            return self._store
        seconds = time_for(size)
        if seconds not in self._patient:
            limit = f"{seconds:.0f}s"  # read_timeout also runs while the request body is sent
            self._patient[seconds] = self._opened(timeout=limit, read_timeout=limit)
        return self._patient[seconds]


def _endpoints(site: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Addresses of the store that were given, by the names of the options or variables.

    Raises UsageError for one without a scheme, on which obstore panics.
    """
    scheme = site.partition("://")[0]
    endpoints = {name: str(config[name]) for name in _ENDPOINTS if name in config}
    if not endpoints:
        prefix = {"s3": "AWS_", "s3a": "AWS_", "gs": "GOOGLE_"}.get(scheme, "AZURE_")
        names = [name.upper() for name in _ENDPOINTS if name.upper().startswith(prefix)]
        endpoints = {name: os.environ[name] for name in names if os.environ.get(name)}
    for name, address in endpoints.items():
        if not address.startswith(("http://", "https://")):
            raise UsageError(
                f"the address of the store {site} has no scheme",
                expected="https://... or http://...",
                found=name,
                fix=f"prefix it with the scheme: {name}=https://...",
            )
    return endpoints


def _info(meta: Any) -> Info:
    return Info(meta["size"], meta["last_modified"].timestamp(), _tag(meta))


def _tag(meta: Any) -> str | None:
    """Return the ETag, in quotes (Azure's listings omit them), or the version."""
    tag: str | None = meta["e_tag"]
    if tag and not tag.endswith('"'):
        tag = f'"{tag}"'
    return tag or meta["version"]


def _explain(error: Exception, url: str, *, writing: bool = False) -> Exception:
    """Return the error to raise in place of one of obstore's.

    Its text includes the request, possibly with credentials, so only known patterns are extracted.
    """
    text, kind = str(error), type(error).__name__
    found = re.search(r"<Code>(\w+)</Code>", text)
    status = re.search(r"(?:status|code)\W+([45]\d\d)\b", text)
    code, number = found[1] if found else "", status[1] if status else ""
    answer = code or (f"HTTP {number}" if number else None)
    if kind == "PreconditionError":
        return replaced(url)
    if kind == "InvalidPathError":
        name = re.search(r'Path "(.*?)"', text, re.DOTALL)
        answer = name[1] if name else None
    if "RangeNotSupported" in text:
        kind, answer = "RangeNotSupported", "HTTP 200 instead of 206"
    if "without LOCATION" in text:
        kind = "PermanentRedirect"
    way = "writing " if writing else "web " if url.startswith("http") else ""
    signs = f"{way}{kind} {code} {number}"
    for pattern, what, fix in _FAILURES:
        if re.search(pattern, signs):
            if what == _NO_BUCKET:
                return NotFoundError(what, path=url, found=code or None, fix=fix)
            return StorageError(what, path=url, found=answer or kind, fix=fix)
    if kind in _NOT_FOUND or "MissingContentLength" in text:  # a folder on a web server
        return no_object(url)
    what = "the store returned an unexpected response" if answer else _NO_ANSWER
    return _passing(what, url, answer or _reason(text))


_NO_ANSWER = "the store cannot be reached"
_NO_BUCKET = "there is no such bucket"
_NO_ACCESS = "the store refuses access"
_REFUSED = "the store refuses the request"
_NOT_FOUND = ("NotFoundError", "FileNotFoundError")
_ACCESS = (
    "check the credentials: environment variables (AWS_ACCESS_KEY_ID, GOOGLE_..., AZURE_...) or"
    " storage options; skip_signature=true reads public buckets"
)
_WEB_ACCESS = (
    "check the address and the credentials; of folders, only datasets with a manifest can be"
    " opened, as a web server cannot list the contents of a folder"
)
_WRITE_ACCESS = (
    "give credentials that may read, list, write and delete objects here, as environment variables"
    " or storage options"
)
_DENIED = "(PermissionDeniedError|UnauthenticatedError|PermissionError|401|403)"
# Patterns for "[writing |web ]<error class> <store's code> <HTTP status>", with `what` and `fix`.
_FAILURES: list[tuple[str, str, str | None]] = [
    ("NoSuchBucket|ContainerNotFound", _NO_BUCKET, "check its name, and the endpoint"),
    (
        "ExpiredToken|RequestExpired",
        "the credentials have expired",
        "log in again, or give new ones",
    ),
    (f"^writing .*{_DENIED}", "the store does not allow writing here", _WRITE_ACCESS),
    (f"^web .*{_DENIED}", _NO_ACCESS, _WEB_ACCESS),
    (_DENIED, _NO_ACCESS, _ACCESS),
    (
        "PermanentRedirect|Region",
        "the bucket is in another region",
        "give its region: AWS_REGION, or the storage option region=...",
    ),
    (
        "RangeNotSupported",
        "the server cannot send a part of a file (a byte range): it sends whole files only",
        "copy the data to this machine, or serve them with nginx, Apache or"
        " `python -m RangeHTTPServer` (pip install rangehttpserver) instead of"
        " `python -m http.server`",
    ),
    (
        "InvalidPathError",
        "the folder contains an object with an unsupported name",
        "rename the object, without control characters, empty parts, . or .. in its name; or give"
        " a folder that does not contain it",
    ),
    ("NotSupportedError|NotImplementedError| 501", "the store cannot do this", None),
    # All other 4xx, except 408 (timeout) and 429 (too many requests), which are retried.
    (r"^(?!.*(NotFoundError|FileNotFoundError)).* 4(?!08|29)\d\d$", _REFUSED, None),
]


def _passing(
    what: str, url: str, found: str | None, kind: type[StorageError] = StorageError
) -> PassingError:
    fix = "check the address and the network, then run the same command again"
    return PassingError(kind(what, path=url, found=found, fix=fix))


def _bad_options(site: str, options: Mapping[str, Any], found: str) -> UsageError:
    return UsageError(
        f"the store {site} cannot be opened with these options",
        found=found,
        fix="check the storage options: " + (", ".join(sorted(options)) or "none is given"),
    )


# Why a request may have failed, as obstore's text says.
_REASONS = (
    "NotPartial", "scheme is not allowed", "Connection refused", "Connection reset", "timed out",
    "timeout", "dns error", "certificate", "end of file", "connection closed", "IncompleteMessage",
    "error decoding response body", "Broken pipe",
)  # fmt: skip


def _reason(text: str) -> str:
    """Why a request failed, without any details of the request."""
    found = (words for words in _REASONS if words.lower() in text.lower())
    return next(found, "the connection failed")


class _Fsspec:
    """Client for all other schemes that fsspec supports: `hf://`, `memory://`, `sftp://`, ..."""

    lists = True

    def __init__(self, site: str, options: Mapping[str, Any]) -> None:
        scheme = site.partition("://")[0]
        self._site = site
        with extra("remote", f"a URL such as {site}"):
            import fsspec  # type: ignore[import-untyped]
        try:
            kind = fsspec.get_filesystem_class(scheme)
        except ValueError:
            raise UsageError(
                "unknown URL scheme",
                found=f"{scheme}://",
                expected="s3, gs, az, https, hf, or another scheme that fsspec supports",
            ) from None
        except ImportError as error:
            raise _missing(site, error) from error
        try:
            # The host of sftp:// and the repository of github:// are options of the file system.
            named = {n: v for n, v in kind._get_kwargs_from_urls(site + "/").items() if n in _HOSTS}
            self._system = kind(skip_instance_cache=True, **{**named, **options})
        except TypeError as error:  # its text names options, while other errors may show values
            raise _bad_options(site, options, str(error)) from error
        except ImportError as error:
            raise _missing(site, error) from error
        except MemoryError:
            raise
        except Exception as error:  # those of many libraries; many connect here
            raise UnreachableError(
                "the store cannot be opened",
                path=site,
                found=type(error).__name__,
                fix="check the address, the network and the storage options",
            ) from error
        concurrent = scheme in _CONCURRENT or self._system.async_impl
        self._turn: AbstractContextManager[Any]
        self._turn = nullcontext() if concurrent else threading.Lock()

    def _path(self, key: str) -> str:
        path: str = self._system._strip_protocol(f"{self._site}/{key}")
        return path

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        url = f"{self._site}/{key}"
        try:
            with self._turn:
                yield
        except (ShardkitError, MemoryError):
            raise
        except (FileNotFoundError, NotADirectoryError):
            raise no_object(url) from None
        except PermissionError as error:
            raise StorageError(_NO_ACCESS, path=url) from error
        except Exception as error:  # of one of many libraries, such as those for HTTP or SSH
            what = _NO_ANSWER if isinstance(error, OSError) else "the request to the store failed"
            raise _passing(what, url, type(error).__name__) from error

    def _entry(self, about: Mapping[str, Any]) -> Info:
        tag = _first(about, "ETag", "etag", "blob_id", "mtime")
        modified = _first(about, "LastModified", "last_modified", "created")
        return Info(int(about["size"]), _seconds(modified), None if tag is None else str(tag))

    def find(self, key: str) -> Info | None:
        try:
            with self._explained(key):
                about = self._system.info(self._path(key))
        except NotFoundError:
            return None
        return self._entry(about) if about["type"] == "file" else None

    def read(self, key: str, start: int, stop: int, tag: str | None) -> tuple[bytes, Info | None]:
        with self._explained(key):
            data: bytes = self._system.cat_file(self._path(key), start=start, end=stop)
        return data, None

    def read_all(self, key: str) -> tuple[bytes, Info]:
        with self._explained(key):
            data: bytes = self._system.cat_file(self._path(key))
            return data, self._entry(self._system.info(self._path(key)))

    def entries(self, folder: str) -> list[Entry]:
        try:
            with self._explained(folder):
                found = self._system.ls(self._path(folder), detail=True)
        except NotFoundError:
            return []
        entries = []
        for about in found:
            name = about["name"].rstrip("/").rpartition("/")[2]
            if about["name"].strip("/") != self._path(folder).strip("/"):
                info = self._entry(about) if about["type"] == "file" else None
                entries.append(Entry(name, info))
        return entries

    def below(self, folder: str, after: str) -> Iterator[Page]:
        root = self._path("").strip("/")
        with self._explained(folder):
            found = self._system.find(self._path(folder), detail=True)
        page = [
            (name.strip("/").removeprefix(root).lstrip("/"), self._entry(about))
            for name, about in found.items()
        ]
        yield from [page] if page else []


def _missing(site: str, error: ImportError) -> MissingLibraryError:
    """Return the error for a site whose library, which fsspec names, is not installed."""
    return MissingLibraryError(
        f"a URL such as {site} needs a library, which is not installed",
        found=str(error),
        fix="install this library with pip",
    )


def _seconds(time: Any) -> float:
    """Return a time in seconds since 1970; 0 if its form is unknown."""
    with suppress(ValueError):
        time = datetime.fromisoformat(time) if isinstance(time, str) else time
    if isinstance(time, datetime):
        return time.timestamp()
    return float(time) if isinstance(time, int | float) else 0.0


def _first(about: Mapping[str, Any], *names: str) -> Any:
    """Return the first of these values that the file system provides."""
    return next((about[name] for name in names if about.get(name) is not None), None)


class ForkedClient(PickledProcess):
    """A `Client` for a forked process, whose requests a new interpreter makes.

    obstore uses threads, which a fork does not copy: in a worker of torch's DataLoader, for
    example, it would hang.
    """

    def __init__(self, site: str, options: Mapping[str, Any]) -> None:
        self.lists = not site.startswith("http")
        what = "the process that makes the requests has exited"
        super().__init__(__name__, (site, dict(options)), lambda *_: StorageError(what, path=site))

    def __getattr__(self, name: str) -> Any:
        """A method of the other process's client."""
        return partial(self.ask, name)

    def below(self, folder: str, after: str) -> Iterator[Page]:
        pages: list[Page] = self.ask("below", folder, after)
        if pages:  # the whole listing has arrived: give it as a single page
            yield [entry for page in pages for entry in page]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    serve(sys.stdin.buffer, sys.stdout.buffer, connect(*read_message(sys.stdin.buffer)), 32)
