"""The code blocks of docs/remote.md, run against servers of this machine."""

import shutil

import pytest

import shardkit
from tests.remote.buckets import Bucket
from tests.remote.servers import Azure
from tests.test_docs import REMOTE, ROOT, run_blocks


@pytest.mark.docs
def test_code_blocks_run(s3, google, web, request, tmp_path):
    """The page's example addresses stand for those of the servers."""
    data = tmp_path / "data"
    data.mkdir()
    shardkit.convert(ROOT / "sample_data/images", "wds", data / "photos")
    for kind in ("images", "text"):
        shutil.copytree(ROOT / "sample_data" / kind, data / kind)
    shutil.copytree(data, web.root / "docs")
    text, environ = REMOTE.read_text("utf-8"), {**s3.environ(), **google.environ()}
    text = text.replace("s3://datasets", Bucket(s3, data).url())
    text = text.replace("gs://datasets", Bucket(google, data).url())
    text = text.replace("https://storage.example.org", s3.endpoint)
    text = text.replace("https://data.example.org", f"{web.endpoint}/docs")
    if Azure.missing():
        text = text.replace("shardkit inspect az://datasets/photos\n", "")
    else:
        azure = request.getfixturevalue("azure")
        text = text.replace("az://datasets", Bucket(azure, data).url())
        environ |= azure.environ()
    folder = tmp_path / "pages"
    folder.mkdir()
    run_blocks(text, folder, **environ)


def test_options_have_the_names_of_the_page():
    from obstore.store import AzureStore, GCSStore, S3Store

    cases = [
        (S3Store, "access_key_id secret_access_key session_token region endpoint skip_signature"),
        (GCSStore, "bearer_token skip_signature"),
        (AzureStore, "account_name account_key sas_token skip_signature"),
    ]
    page = REMOTE.read_text("utf-8")
    for store, names in cases:
        given = {name: "true" if name == "skip_signature" else "eHh4" for name in names.split()}
        for name in given:
            assert f"`{name}`" in page
        store("bucket", config={**given})
