"""What other libraries read from our files."""

from pathlib import Path
from typing import Any

import webdataset
from webdataset import tariterators

_META = ("__url__", "__local_path__")


def by_webdataset(path: Path, *, decode: bool = False) -> list[dict[str, Any]]:
    """The samples of a TAR as webdataset groups (and decodes) them.

    Its stages are called one by one, on a file that is ours to close: its own openers leave files
    to the garbage collector, which our warnings-as-errors would charge to us.
    """
    with path.open("rb") as stream:
        files = tariterators.tar_file_expander([{"url": str(path), "stream": stream}])
        samples = tariterators.group_by_keys(files)
        if decode:
            samples = webdataset.filters.decode()(samples)
        return [{n: v for n, v in sample.items() if n not in _META} for sample in samples]
