"""Paths that users give: URLs are refused in one way, wherever they come in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit import storage
from shardkit.errors import UsageError
from shardkit.inspection import inspect
from shardkit.performance.bench import bench
from shardkit.performance.doctor import doctor
from shardkit.schema import Text
from shardkit.stream.dataset import StreamingDataset
from shardkit.verification.verify import verify

_DOWN, _UP = (
    "aws s3 sync s3://bucket/folder/x.tar FOLDER",
    "aws s3 sync FOLDER s3://bucket/folder/x.tar",
)
URL = "s3://bucket/folder/x.tar"


def _create(path: Any) -> None:
    shardkit.create(path, "wds", {"text": Text()})


def _stream(path: Any) -> None:
    next(iter(StreamingDataset(path, batch_size=1)))


@pytest.mark.parametrize("as_path", [False, True])  # pathlib leaves one slash of two
@pytest.mark.parametrize(
    ("call", "verb"),
    [
        (shardkit.open, _DOWN),
        (inspect, _DOWN),
        (verify, _DOWN),
        (lambda path: bench([path]), _DOWN),
        (doctor, _DOWN),
        (_stream, _DOWN),
        (lambda path: shardkit.convert(path, "wds", "out"), _DOWN),
        (_create, _UP),
    ],
)
def test_a_url_is_refused_wherever_a_path_goes(
    call: Callable[[Any], Any], verb: str, as_path: bool
) -> None:
    with pytest.raises(UsageError, match="URLs are not supported yet") as error:
        call(Path(URL) if as_path else URL)
    assert error.value.found == URL
    assert verb in str(error.value.fix)


def test_a_url_as_output_or_as_what_to_compare_with_is_refused(
    images: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="URLs are not supported yet") as error:
        shardkit.convert(images, "wds", URL, workers=0)
    assert "aws s3 sync FOLDER s3://" in str(error.value.fix)
    shardkit.convert(images, "wds", tmp_path / "out", workers=0)
    with pytest.raises(UsageError, match="URLs are not supported yet"):
        verify(tmp_path / "out", against=URL)


@pytest.mark.parametrize(
    ("url", "fix"),
    [
        ("hf://datasets/owner/name", "hf download --repo-type dataset"),
        ("https://host/x.tar", "curl -LO https://host/x.tar"),
        ("gs://bucket/x", "gcloud storage cp -r gs://bucket/x"),
        ("file:///tmp/x", "without the scheme: /tmp/x"),
        ("custom+ssh://host/x", "copy the data to this machine first, then give that path"),
    ],
)
def test_the_message_says_how_to_get_the_data(url: str, fix: str) -> None:
    with pytest.raises(UsageError) as error:
        storage.local(url)
    assert error.value.found == url
    assert fix in str(error.value.fix)


def test_names_with_colons_are_no_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a:b", "C:/data", "./s3:/x", "12:30/x"):
        assert storage.local(name) == Path(name)
    (tmp_path / "data:" / "x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert storage.local("data:/x") == Path("data:/x")
