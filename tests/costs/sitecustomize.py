"""Each Python process of a measured run imports this first, and writes at its end what it spent."""

import atexit
import json
import os
import sys
import time
from contextlib import suppress
from importlib.machinery import PathFinder


class _Process:
    """Finds packages like Python does, and measures how long each takes without what it imports."""

    def __init__(self):
        self.imports = {}
        self.log = os.open(os.environ["SHARDKIT_COSTS"], os.O_WRONLY | os.O_APPEND)
        self.nested = [0.0]
        with open("/proc/self/cmdline", "rb") as file:
            self.command = file.read(300).replace(b"\0", b" ").decode("latin-1")
        self.start = time.process_time()
        sys.meta_path.insert(0, self)
        atexit.register(self.end)
        os.register_at_fork(after_in_child=self.forked)
        leave = os._exit

        def left(code):
            self.end()
            leave(code)

        os._exit = left

    def forked(self):
        self.start, self.imports, self.nested = 0.0, {}, [0.0]

    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package in sys.stdlib_module_names:
            return None
        spec = PathFinder.find_spec(name, path, target)
        loader = spec and spec.loader
        if not hasattr(loader, "exec_module") or not hasattr(loader, "__dict__"):
            return spec
        run = loader.exec_module

        def measured(module):
            before = time.process_time()
            self.nested.append(0.0)
            try:
                run(module)
            finally:
                spent = time.process_time() - before
                own = spent - self.nested.pop()
                self.imports[package] = self.imports.get(package, 0.0) + own
                self.nested[-1] += spent

        loader.exec_module = measured
        return spec

    def end(self):
        line = {
            "pid": os.getpid(), "command": self.command, "start": self.start,
            "all": time.process_time(), "imports": self.imports,
        }  # fmt: skip
        with suppress(OSError):  # where a test limits the sizes of files
            os.write(self.log, json.dumps(line).encode() + b"\n")


if "SHARDKIT_COSTS" in os.environ:
    _Process()
