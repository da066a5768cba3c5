"""`shardkit inspect --html` of a dataset in a store: the same page, from a part of its bytes."""

import numpy as np

import shardkit
from shardkit.inspection.report import READ, html_report
from tests.test_report import check

SAMPLES, SIZE = 400, 40_000  # 16 MB


def test_the_page_of_a_url(tmp_path, bucket):
    rng = np.random.default_rng(5)
    schema = {"x": shardkit.Bytes(), "label": shardkit.Int()}
    out = tmp_path / "d"
    with shardkit.create(out, "wds", schema=schema, shard_size="3MB", classes=["a", "b"]) as made:
        for n in range(SAMPLES):
            made.write({"__key__": f"k{n}", "x": rng.bytes(SIZE), "label": n % 2})
    bucket.put(out)
    page = html_report(bucket.url(), storage_options=bucket.options)
    tags = check(page)
    assert f"Counted in {READ // 8} of {SAMPLES} samples" in tags.text
    assert f"12 of {SAMPLES} samples" in tags.text
    assert "Counted in all samples." in tags.text  # classes, which the manifest has
    assert html_report(bucket.url(), storage_options=bucket.options) == page
