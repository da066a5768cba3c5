"""Writes what each test spent: in its fixtures, in itself, and in processes that it waited for."""

import json
import os
import resource
import time

import pytest

_phases = {}


def _children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    began, own, children = time.monotonic(), time.process_time(), _children()
    _phases.clear()
    result = yield
    line = {
        "test": item.nodeid, "own": time.process_time() - own, "children": _children() - children,
        "wall": time.monotonic() - began,
        "property": hasattr(getattr(item, "obj", None), "hypothesis"), **_phases,
    }  # fmt: skip
    file = os.open(os.environ["SHARDKIT_COSTS"], os.O_WRONLY | os.O_APPEND)
    os.write(file, json.dumps(line).encode() + b"\n")
    os.close(file)
    return result


def _phase(name):
    @pytest.hookimpl(wrapper=True)
    def measured(item):
        before = time.process_time()
        try:
            return (yield)
        finally:
            _phases[name] = time.process_time() - before

    return measured


pytest_runtest_setup = _phase("setup")
pytest_runtest_call = _phase("call")
pytest_runtest_teardown = _phase("teardown")
