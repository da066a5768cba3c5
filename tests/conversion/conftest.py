"""What many tests of conversions take. Some modules have a `source` of their own."""

import pytest

import shardkit
from tests.codecs import tokenizer_zoo
from tests.conftest import files_of, write_images


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory):
    """A tokenizer that ends documents by token 0, and has no padding."""
    return tokenizer_zoo.write_json(tmp_path_factory.mktemp("gpt2"), "gpt2")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def source(tmp_path):
    return write_images(tmp_path / "in", classes=2, each=8, kilobytes=2)


@pytest.fixture
def whole(source, tmp_path):
    """What one run makes of the source, in shards of 8 kB."""
    shardkit.convert(source, "wds", tmp_path / "whole", shard_size="8kB", workers=0)
    return files_of(tmp_path / "whole")


def raised(error, words, call, /, *args, **options):
    """The error of a call, which is of this class and has these words."""
    with pytest.raises(error, match=words) as caught:
        call(*args, **options)
    return caught.value
