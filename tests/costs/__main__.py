"""Where does the tests' processor time go? Runs pytest and prints tables, for docs/testing.md.

    .venv/bin/python -m tests.costs [--keep FILE] [ARGUMENT OF PYTEST ...]

Every Python process writes, as it ends, what it spent until its own code began, in importing each
package, and in all (sitecustomize.py). Processes of pytest write what each test spent (plugin.py).
Of processes that are killed, and of programs that are not Python, /proc is read twice a second. The
sum is compared with what the machine was busy: nothing else may run beside.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

_HERE = Path(__file__).parent
_TICKS = os.sysconf("SC_CLK_TCK")
_IMPORTS = {
    "torch": "torch", "ray": "Ray", "tensorflow": "TensorFlow", "pyarrow": "pyarrow",
    "pytest": "pytest, hypothesis", "hypothesis": "pytest, hypothesis", "shardkit": "shardkit",
}  # fmt: skip
_KINDS = {
    "pytest between tests": r"execnet|bin/pytest|-m pytest|-c import sys;exec\(eval",
    "servers": r"moto|azurite|nginx|tests[./]remote|google\.py",
    "Ray": r"\bray\b|/ray/|gcs_server|raylet",
    "Chromium": r"chrom",
    "workers of conversions": r"shardkit[./]conversion",
    "children of multiprocessing": r"multiprocessing",
    "compilers": r"\bcc1|/ld |g\+\+|gcc|/as ",
    "mkdocs": "mkdocs",
    "the command line": r"shardkit",
}


def _kind(command):
    """What kind of process it is, by its command line."""
    return next((kind for kind, found in _KINDS.items() if re.search(found, command)), "others")


def _busy():
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    return (sum(map(int, fields)) - int(fields[3]) - int(fields[4])) / _TICKS


def _watch(seen, stop):
    """Notes the time of each process of the machine, again and again."""
    while not stop.wait(0.5):
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            used = (int(fields[11]) + int(fields[12])) / _TICKS
            command = command[:300].replace(b"\0", b" ").decode("latin-1")
            seen[f"{folder.name} {fields[19]}"] = command, used


def _by_kind(lines, seen):
    """Seconds of each kind."""
    kinds = Counter()
    known = {line["pid"] for line in lines if "pid" in line}
    for line in lines:
        if "pid" in line:
            kinds["starting interpreters"] += line["start"]
            for name, spent in line["imports"].items():
                kinds[f"importing {_IMPORTS.get(name, 'others')}"] += spent
            rest = line["all"] - line["start"] - sum(line["imports"].values())
            kinds[_kind(line["command"])] += rest
        else:
            setup, call, teardown = (line.get(phase, 0) for phase in ("setup", "call", "teardown"))
            kinds["fixtures"] += setup + teardown
            kinds["properties" if line["property"] else "tests"] += call
            kinds["pytest between tests"] -= setup + call + teardown
    for process, (command, used) in seen.items():
        if int(process.split()[0]) not in known:
            kinds[f"{_kind(command)}: killed, or not Python"] += used
    return kinds


def _print(title, spent, count, whole):
    print(f"\n| {title} | seconds | share |\n|---|---|---|")
    for name, seconds in spent.most_common(count):
        print(f"| {name} | {seconds:.1f} | {seconds / whole:.1%} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path)
    options, arguments = parser.parse_known_args()
    seen = {}
    stop = threading.Event()
    watch = threading.Thread(target=_watch, args=(seen, stop), daemon=True)
    watch.start()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        log.touch()
        paths = [str(_HERE), str(_HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
        own = {"SHARDKIT_COSTS": str(log), "PYTEST_PLUGINS": "tests.costs.plugin"}
        own["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        command = [sys.executable, "-m", "pytest", *arguments]
        time.sleep(1)
        others, began, busy = set(seen), time.monotonic(), _busy()
        code = subprocess.call(command, env={**os.environ, **own})
        seconds, busy = time.monotonic() - began, _busy() - busy
        text = log.read_text()
    stop.set()
    watch.join()
    if options.keep:
        options.keep.write_text(text)
    lines = [json.loads(line) for line in text.splitlines()]
    kinds = _by_kind(lines, {key: value for key, value in seen.items() if key not in others})
    kinds["not found"] = busy - kinds.total()
    print(f"\n{seconds:.0f} s; processor time {busy:.0f} s")
    _print("kind", kinds, 40, busy)
    for what, length in ("file", 1), ("test", 2):
        tests = Counter()
        for line in lines:
            if "test" in line:
                name = "::".join(line["test"].split("[")[0].split("::")[: length * 2 - 1])
                tests[name] += line["own"] + line["children"]
        _print(what, tests, 60, busy)
    return code


if __name__ == "__main__":
    sys.exit(main())
