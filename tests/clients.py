"""Libraries that read our files, each in a process of its own.

They are those of tests/clients.txt, which pin others than shardkit does, or are large: README's
test command puts them into a folder of the environment that only these processes look into.
"""

import json
import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(sys.prefix, "clients")
# Imports torchvision, whose compiled part is for a torch with CUDA: the rest works without.
TORCHVISION = """
import sys, torch
try:
    import torchvision
except RuntimeError:
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def run(library: str, script: str, *arguments: object, seconds: int = 240) -> Any:
    """What `script` prints, as JSON, on its last line. It finds `arguments` in sys.argv.

    Where `library`, a module's name, is not installed there or here, the test is skipped.
    """
    if PathFinder.find_spec(library.partition(".")[0], [str(FOLDER), *sys.path]) is None:
        pytest.skip(f"{library} is not in {FOLDER}: see README's test command")
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    env = {**os.environ, **quiet, "PYTHONPATH": str(FOLDER)}
    words = [sys.executable, "-c", script, *map(str, arguments)]
    told = {"capture_output": True, "text": True, "timeout": seconds}
    done = subprocess.run(words, env=env, check=False, **told)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
