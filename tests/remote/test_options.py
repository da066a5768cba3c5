"""Storage options: given as arguments alone, they reach all that reads, and are told to nobody."""

import json
import os

import pytest

import shardkit
from shardkit.errors import UsageError
from shardkit.inspection.inspect import inspect
from shardkit.performance.contender import MEASURES
from shardkit.stream.loader import Loader
from shardkit.testing import make_image
from tests.remote.buckets import Bucket
from tests.test_cli import run as command_line

SECRET = "testtoken"  # of tests.remote.servers


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A dataset of images with some shards."""
    root = tmp_path_factory.mktemp("local") / "photos"
    schema = {"image": shardkit.Image(), "label": shardkit.Int()}
    with shardkit.create(root, "wds", schema, shard_samples=10) as out:
        for n in range(40):
            out.write({"__key__": f"k{n}", "image": make_image(n), "label": n % 3})
    return root


@pytest.fixture(scope="module")
def data(google, local):
    return Bucket(google, local.parent)


def run(bucket, cwd, *command, check=0):
    """A command without anything of the store in its environment, which tells no secret."""
    given = [f"--storage-option={name}={value}" for name, value in bucket.options.items()]
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("GOOGLE_")]:
            patch.delenv(name)
        patch.chdir(cwd)
        done = command_line(*command, *given, check=check)
    assert SECRET not in done.stdout + done.stderr
    return done


def test_a_conversion_passes_them_to_its_workers_and_writes_them_nowhere(data, tmp_path):
    """Nor one that does not end."""
    command = ("convert", data.url("photos"), "--to", "arrow", "--json")
    some = (*command, "-o", "out", "--shard-samples", "5")
    run(data, tmp_path, *some, "--plan")
    # Images are decoded, so that there are more tasks than one for the workers.
    run(data, tmp_path, *some, "--workers", "2", "--resize", "16")
    assert len(shardkit.open(tmp_path / "out")) == 40
    (tmp_path / "stop.py").write_text("def stop(sample):\n    raise ValueError('no')\n")
    more = ("--transform", "stop:stop", "--max-errors", "5", "--on-error", "skip")
    command = (*command, "-o", "part", "--workers", "0", *more)
    assert run(data, tmp_path, *command, check=None).returncode != 0
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"manifest.json", "job.json"} <= {path.name for path in written}
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]


def test_a_conversion_to_a_url_prints_it_and_json(bucket, local, tmp_path):
    words = ("convert", str(local), "--to", "arrow", "-o", bucket.out, "--workers", "0")
    assert bucket.out in run(bucket, tmp_path, *words, "--plan").stdout
    assert json.loads(run(bucket, tmp_path, *words, "--plan", "--json").stdout)["out"] == bucket.out
    assert bucket.listed() == []
    done = json.loads(run(bucket, tmp_path, *words, "--json").stdout)
    assert (done["out"], done["samples"]) == (bucket.out, 40)
    assert bucket.out in run(bucket, tmp_path, *words).stdout  # which is there already
    assert len(bucket.open("out")) == 40
    assert not any(SECRET.encode() in data for data in bucket.objects().values())


def test_samples_are_shown_and_written(data, tmp_path):
    url = data.url("photos")
    shown = run(data, tmp_path, "head", url, "-n", "2", "--json")
    assert [json.loads(line)["key"] for line in shown.stdout.splitlines()] == ["k0", "k1"]
    for name in ("k7", "7"):
        run(data, tmp_path, "cat", url, name, "--field", "image", "-o", f"{name}.jpg")
        assert (tmp_path / f"{name}.jpg").read_bytes() == make_image(7)
    missed = run(data, tmp_path, "cat", url, "k99", check=None)
    assert "similar keys: 'k9'" in missed.stderr


def test_commands_take_them(data, local, tmp_path):
    url, here = data.url("photos"), str(local)
    for command in (
        ("inspect", url, "--full"),
        ("verify", url, "--decode", "--against", here),
        ("verify", here, "--against", url),
        ("doctor", url, "--seconds", "0.1", "--batch-size", "8"),
    ):
        assert json.loads(run(data, tmp_path, *command, "--json").stdout)


def test_bench_takes_them_and_measures_work_apart_from_downloads(seen, tmp_path):
    """Each sample comes once for `read`, `decode` and `load` each, of any rounds."""
    url = seen.url("photos")
    command = ("bench", url, "--rounds", "2", "--threads", "1", "--batch-size", "8")
    report = json.loads(run(seen, tmp_path, *command, "--json").stdout)
    (contender,) = report["contenders"]
    assert contender["path"] == url
    assert {r["measure"]: r["error"] for r in report["runs"]} == dict.fromkeys(MEASURES)
    shards = [e.target for e in seen.proxy.log() if e.method == "GET" and e.target[-4:] == ".tar"]
    assert 4 <= len(shards) <= 3 * len(set(shards))


def test_a_wrong_one_is_named_and_no_value_is(data, tmp_path):
    url = data.url("photos")
    for given, words in (
        ("=hunter2", "expected KEY=VALUE"),
        ("hunter2", "expected KEY=VALUE"),
        ("secret_key=hunter2", "found: secret_key"),
    ):
        failed = run(data, tmp_path, "inspect", url, "--storage-option", given, check=2)
        assert words in failed.stderr
        assert "hunter2" not in failed.stdout + failed.stderr
    bad = "key=hunter2"
    for where, options, message in (
        (url, bad, "must be a dict"),
        ("sftp://user:hunter2@example.org/data", None, "a URL with a password"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            shardkit.open(where, storage_options=options)
        assert "hunter2" not in str(caught.value)


def test_an_endpoint_without_a_scheme_is_refused(monkeypatch):
    names = {"s3": "AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL", "az": "AZURE_STORAGE_ENDPOINT"}
    for scheme, name in names.items():
        monkeypatch.setenv(name, "storage.example.org")
        for options, found in (({"endpoint": "127.0.0.1:9000"}, "endpoint"), (None, name)):
            with pytest.raises(UsageError, match="has no scheme") as caught:
                shardkit.open(f"{scheme}://bucket/a", storage_options=options)
            assert caught.value.found == found


def test_options_without_a_url_are_refused(local, tmp_path):
    given = {"storage_options": {"secret_access_key": SECRET}}
    calls = [
        lambda: shardkit.open(local, **given),
        lambda: shardkit.verify(local, **given),
        lambda: shardkit.convert(local, "arrow", tmp_path / "out", **given),
        lambda: Loader(local, batch_size=4, **given),
        lambda: Loader(shardkit.open(local), batch_size=4, **given),
        lambda: inspect(local, **given),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="storage options are for URLs") as caught:
            call()
        assert caught.value.found == "secret_access_key"
