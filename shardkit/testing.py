"""The contract of formats, as tests. Subclass `FormatContract`, and pytest runs all of them.

    class TestWds(FormatContract):
        tested = get_format("wds")
        provides = frozenset({"sizes", "spans"})

        def independent_keys(self, path):
            ...  # read with another library

Needs pytest and hypothesis (`pip install "shardkit[testing]"`).
An example is tests/formats/test_wds.py.
"""

import pytest

# Before they are imported: only then do their assertions show values.
pytest.register_assert_rewrite("shardkit.formats.contract", "shardkit.formats.testing_samples")

from shardkit.formats.contract import *  # noqa: E402, F403
from shardkit.formats.contract import __all__  # noqa: E402, F401
