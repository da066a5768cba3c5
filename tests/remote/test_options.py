"""Storage options: given as arguments alone, they reach all that reads, and are told to nobody."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit import storage
from shardkit.cli.bench import _network
from shardkit.errors import UsageError
from shardkit.inspection import inspect
from shardkit.performance.contender import MEASURES
from shardkit.stream.loader import Loader
from shardkit.testing import make_image
from tests.remote.conftest import Through
from tests.remote.servers import S3, Nginx
from tests.remote.test_reading import upload
from tests.test_cli import run as command_line

SECRET = "testsecret"  # of tests.remote.servers


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of images with some shards."""
    root = tmp_path_factory.mktemp("local") / "photos"
    schema = {"image": shardkit.Image(), "label": shardkit.Int()}
    with shardkit.create(root, "wds", schema, shard_samples=10) as out:
        for n in range(40):
            out.write({"__key__": f"k{n}", "image": make_image(n), "label": n % 3})
    return root


@pytest.fixture(scope="module")
def bucket(s3: S3, local: Path) -> str:
    return upload(s3, local.parent)


def run(s3: S3, cwd: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A command without anything of the store in its environment."""
    given = [f"--storage-option={name}={value}" for name, value in s3.options().items()]
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.chdir(cwd)
        return command_line(*command, *given, check=None)


def test_a_conversion_passes_them_to_its_workers_and_writes_them_nowhere(
    s3: S3, bucket: str, local: Path, tmp_path: Path
) -> None:
    url = s3.url(bucket, "photos")
    command = ("convert", url, "--to", "arrow", "-o", "out", "--shard-samples", "5", "--json")
    planned = run(s3, tmp_path, *command, "--plan")
    # Images are decoded, so that there are more tasks than one for the workers.
    done = run(s3, tmp_path, *command, "--workers", "2", "--resize", "16")
    for each in (planned, done):
        assert each.returncode == 0, each.stderr
        assert SECRET not in each.stdout + each.stderr
    assert len(shardkit.open(tmp_path / "out")) == 40
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "manifest.json" for path in written)
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]


def test_samples_are_shown_and_written(s3: S3, bucket: str, local: Path, tmp_path: Path) -> None:
    url = s3.url(bucket, "photos")
    shown = run(s3, tmp_path, "head", url, "-n", "2", "--json")
    assert [json.loads(line)["key"] for line in shown.stdout.splitlines()] == ["k0", "k1"]
    for name in ("k7", "7"):
        wrote = run(s3, tmp_path, "cat", url, name, "--field", "image", "-o", f"{name}.jpg")
        assert wrote.returncode == 0, wrote.stderr
        assert (tmp_path / f"{name}.jpg").read_bytes() == make_image(7)
    missed = run(s3, tmp_path, "cat", url, "k99")
    assert "similar keys: 'k9'" in missed.stderr
    assert SECRET not in missed.stdout + missed.stderr


def test_an_unfinished_conversion_has_none_either(s3: S3, bucket: str, tmp_path: Path) -> None:
    url = s3.url(bucket, "photos")
    (tmp_path / "stop.py").write_text("def stop(sample):\n    raise ValueError('no')\n")
    command = ("convert", url, "--to", "arrow", "-o", "out", "--transform", "stop:stop")
    failed = run(s3, tmp_path, *command, "--json", "--max-errors", "5", "--on-error", "skip")
    assert failed.returncode != 0
    assert SECRET not in failed.stdout + failed.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "job.json" for path in written)
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "{url}", "--full", "--json"),
        ("verify", "{url}", "--decode", "--against", "{local}", "--json"),
        ("verify", "{local}", "--against", "{url}", "--json"),
        ("doctor", "{url}", "--seconds", "0.1", "--batch-size", "8", "--json"),
    ],
    ids=lambda command: command[0],
)
def test_commands_take_them(
    command: tuple[str, ...], s3: S3, bucket: str, local: Path, tmp_path: Path
) -> None:
    url = s3.url(bucket, "photos")
    done = run(s3, tmp_path, *(word.format(url=url, local=local) for word in command))
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert json.loads(done.stdout)


def test_bench_takes_them(s3: S3, bucket: str, tmp_path: Path) -> None:
    """Each dataset is measured by a process of its own."""
    url = s3.url(bucket, "photos")
    command = ("bench", url, "--rounds", "1", "--threads", "1", "--batch-size", "8", "--cold")
    done = run(s3, tmp_path, *command, "--json")
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout + done.stderr
    report = json.loads(done.stdout)
    (contender,) = report["contenders"]
    assert contender["path"] == url
    assert (contender["downloads"], contender["cache_limit"]) == (contender["bytes"], 1 << 30)
    assert {r["measure"]: r["error"] for r in report["runs"]} == dict.fromkeys(MEASURES)
    assert report["skipped"] == {"photos, cold": "data at a URL are not in the page cache"}


def test_bench_measures_work_apart_from_downloads(s3: S3, bucket: str, through: Through) -> None:
    """Each sample comes once for `read` and `decode` together, and once for `load`, of any rounds;
    where the cache has no room for them, bench says what it measures."""
    proxy, url = through(s3), s3.url(bucket, "photos")
    given = [f"--storage-option={n}={v}" for n, v in s3.options(proxy.endpoint).items()]
    command = ("bench", url, "--rounds", "3", "--threads", "1", "--batch-size", "8", *given)
    words = " ".join(command_line(*command).stdout.split())
    assert "first runs download about" in words
    assert "the others read from the cache" in words
    shards = [e.target for e in proxy.log() if e.method == "GET" and e.target.endswith(".tar")]
    assert 4 <= len(shards) <= 2 * len(set(shards))
    assert "include the network" in _network(5000, 4000)


def test_functions_take_them(s3: S3, bucket: str, tmp_path: Path) -> None:
    url, options = s3.url(bucket, "photos"), s3.options()
    assert len(shardkit.open(url, storage_options=options)) == 40
    assert inspect(url, storage_options=options)["samples"] == 40
    assert shardkit.verify(url, url, storage_options=options).sound
    made = shardkit.convert(url, "lmdb", tmp_path / "out", storage_options=options)
    assert made.samples == 40


def test_a_wrong_one_is_named_and_no_value_is(s3: S3, bucket: str, tmp_path: Path) -> None:
    url = s3.url(bucket, "photos")
    cases: list[tuple[str, str]] = [
        ("=hunter2", "expected KEY=VALUE"),
        ("hunter2", "expected KEY=VALUE"),
        ("secret_key=hunter2", "found: secret_key"),
    ]
    for given, words in cases:
        failed = run(s3, tmp_path, "inspect", url, "--storage-option", given)
        assert failed.returncode == 2
        assert words in failed.stderr
        assert "hunter2" not in failed.stdout + failed.stderr
    bad: Any = "key=hunter2"
    with pytest.raises(UsageError, match="must be a dict") as caught:
        shardkit.open(url, storage_options=bad)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://bucket/a", "gs://bucket/a", "az://container/a"])
def test_an_endpoint_without_a_scheme_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="has no scheme") as caught:
        shardkit.open(url, storage_options={"endpoint": "127.0.0.1:9000"})
    assert caught.value.found == "endpoint"
    names = {"s3": "AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL", "az": "AZURE_STORAGE_ENDPOINT"}
    for name in names.values():
        monkeypatch.setenv(name, "storage.example.org")
    with pytest.raises(UsageError, match="has no scheme") as caught:
        shardkit.open(url)
    assert caught.value.found == names[url.partition(":")[0]]


def test_a_password_in_a_url_is_refused() -> None:
    with pytest.raises(UsageError, match="a URL with a password") as caught:
        storage.source("sftp://user:hunter2@example.org/data")
    assert "hunter2" not in str(caught.value)


def test_options_without_a_url_are_refused(local: Path, tmp_path: Path) -> None:
    options = {"secret_access_key": SECRET}
    calls: list[Any] = [
        lambda: shardkit.open(local, storage_options=options),
        lambda: shardkit.verify(local, storage_options=options),
        lambda: shardkit.convert(local, "arrow", tmp_path / "out", storage_options=options),
        lambda: Loader(local, batch_size=4, storage_options=options),
        lambda: Loader(shardkit.open(local), batch_size=4, storage_options=options),
        lambda: inspect(local, storage_options=options),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="storage options are for URLs") as caught:
            call()
        assert caught.value.found == "secret_access_key"


def test_a_dataset_on_a_web_server(web: Nginx, local: Path, tmp_path: Path) -> None:
    """All that reads it; a web server has no listings."""
    shutil.copytree(local, web.root / "options" / "photos")
    url = f"{web.endpoint}/options/photos"
    for each in (url, f"{url}/shard-000001.tar"):
        assert inspect(each)["incomplete"] is None
        report = shardkit.verify(each)
        assert report.sound
        assert report.notes == ["a web server has no listings: extra shards cannot be detected"]
    assert shardkit.verify(url, local, decode=True).samples == 40
    assert shardkit.convert(url, "arrow", tmp_path / "out").samples == 40


def test_shards_that_others_made_convert(s3: S3, local: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for shard in local.glob("*.tar"):
        (tmp_path / "in" / shard.name).write_bytes(shard.read_bytes())
    url = s3.url(upload(s3, tmp_path), "in")
    made = shardkit.convert(url, "arrow", tmp_path / "out", storage_options=s3.options())
    assert made.samples == 40
