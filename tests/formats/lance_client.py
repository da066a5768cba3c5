"""pylance in a process of its own: in that of the tests every fork would be warned about."""

from __future__ import annotations

import json
import sys
from functools import cache
from typing import Any

from shardkit.helpers.json_process import JsonProcess


@cache
def _process() -> JsonProcess:
    return JsonProcess([sys.executable, "-m", "tests.formats.lance_client"], timeout=60)


def lance(code: str, **names: Any) -> Any:
    """What `answer` is after a piece of code, which has `lance`, `pa` and these names."""
    _process().send([code, names])
    found = _process().receive()
    if "error" in found:
        raise RuntimeError(found["error"])
    return found["answer"]


if __name__ == "__main__":
    import traceback

    import lance as library
    import pyarrow as pa

    for line in sys.stdin:
        code, names = json.loads(line)
        names = {**names, "lance": library, "pa": pa}
        try:
            exec(code, names)
            print(json.dumps({"answer": names.get("answer")}), flush=True)
        except Exception:
            print(json.dumps({"error": traceback.format_exc()}), flush=True)
