import functools
import gc

import pytest

from tests.stream.data import write_photos


@pytest.fixture(scope="session")
def every(tmp_path_factory):
    """The same samples in the same shards, in any format."""
    root = tmp_path_factory.mktemp("every")
    return functools.cache(lambda format: write_photos(root / format, format))


@pytest.fixture
def photos(every):
    return every("wds")


@pytest.fixture
def few_objects():
    """What other tests left is no garbage of ours: to look through it takes longer than a test."""
    gc.freeze()
    yield
    gc.unfreeze()
