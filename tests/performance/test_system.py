"""What processes and a GPU use: real processes, and stand-ins for what a machine may lack."""

import mmap
import subprocess
import sys
import time

import pytest

from shardkit.helpers.processors import processors
from shardkit.performance.machine import System, Usage, memory
from shardkit.performance.report import Report
from shardkit.torch import Monitor

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells what is shared")


class Clock:
    """Stands still, but for those who say that time goes by."""

    now = 0.0

    def __call__(self):
        return self.now


class Tree:
    """Processes that use a processor and a half and read 10 bytes a second."""

    def __init__(self, clock, takes=0.0):
        self.clock, self.takes, self.readings = clock, takes, 0

    def read(self):
        self.readings += 1
        now = self.clock.now
        self.clock.now += self.takes
        return 1.5 * now, int(10 * now), 1000 + self.readings


def system_of(clock, **options):
    system = System(Usage, clock)
    system._tree = Tree(clock, **options)
    return system


def child(code):
    """A process that says a line when it has run the code, and then waits to be told to end."""
    code += "\nprint(flush=True)\ninput()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-IS", "-c", code], **pipes)
    assert process.stdout.readline()
    return process


BURN = "import time\nwhile time.process_time() < 0.15: pass"


def test_processors_are_counted_of_this_process_and_its_children_also_when_they_have_ended():
    system = System(Usage)
    system.begin()
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    with child(BURN) as running:
        used = system.used(last=True).cpu
        assert used >= 0.2  # such clocks tick a hundred times a second
        running.communicate(b"\n")
    assert system.used(last=True).cpu >= 0
    with child(BURN) as ended:
        ended.communicate(b"\n")
    assert system.used(last=True).cpu >= 0.1


@LINUX
def test_memory_that_processes_share_is_counted_once(tmp_path):
    size = 64_000_000
    path = tmp_path / "shared"
    path.write_bytes(bytes(size))
    code = f"""
import mmap
file = open({str(path)!r}, "rb")
mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
sum(mapped[::4096])
"""
    system = System(Usage)
    system.begin()
    before = system.used(last=True).memory
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        sum(mapped[::4096])
        with child(code) as one, child(code) as other:
            grown = system.used(last=True).memory - before
            one.communicate(b"\n")
            other.communicate(b"\n")
    assert size - 5_000_000 < grown < 2 * size


def test_a_process_that_ends_while_it_is_looked_at_is_passed_over(monkeypatch):
    import psutil

    class Gone(psutil.Process):
        def cpu_times(self):
            raise psutil.NoSuchProcess(self.pid)

        def children(self, recursive=False):  # servers that other tests have started
            return []

    system = System(Usage)
    monkeypatch.setattr(system._tree, "_process", Gone())
    system.begin()
    assert system.used(last=True).cpu == 0


def test_without_psutil_nothing_is_known_and_the_report_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    system = System(Usage)
    system.begin()
    usage = system.used(last=True)
    assert usage.cpu is usage.disk is usage.memory is None
    assert memory() is None
    assert "pip install 'shardkit[monitor]'" in str(Report(usage=usage))
    monkeypatch.undo()
    assert "pip" not in str(Report(usage=usage))


def test_what_is_used_is_counted_from_the_beginning_to_each_call():
    clock = Clock()
    system = system_of(clock)
    clock.now = 100  # of another loop, which is not counted
    system.begin()
    for seconds, most in ((2, 1002), (1, 1003)):
        clock.now += seconds
        found = Usage(seconds=seconds, cpu=1.5 * seconds, disk=10 * seconds, memory=most)
        assert system.used() == found


def test_readings_are_so_seldom_that_they_take_no_time_to_speak_of():
    clock = Clock()
    system = system_of(clock, takes=0.01)
    system.begin()
    seen = Usage()
    while clock.now < 100:
        clock.now += 0.1
        seen += system.used()
    readings = system._tree.readings
    assert readings * 0.01 / clock.now < 0.003
    seen += system.used(last=True)
    assert system._tree.readings == readings + 1
    assert seen.seconds == pytest.approx(clock.now, abs=0.02)
    assert seen.to_dict()["cpu"] == pytest.approx(1.5)


def test_an_epoch_that_begins_a_moment_after_a_reading_is_counted_from_the_next_one_on():
    clock = Clock()
    system = system_of(clock, takes=0.01)
    system.begin()
    clock.now += 1
    assert system.used(last=True).seconds == pytest.approx(1.01)
    system.begin()
    clock.now += 1
    assert system.used() == Usage()
    assert system.used(last=True) == Usage()
    assert system._tree.readings == 2
    system.begin()
    clock.now += 10
    assert system.used() == Usage()
    clock.now += 10
    assert system.used().seconds == pytest.approx(10.01)


def test_usages_add_up():
    one = Usage(seconds=1, cpu=0.5, disk=10, memory=7, gpu=0.2, gpu_seen=1, gpu_memory=3)
    other = Usage(seconds=3, cpu=1.5, disk=30, memory=5, gpu=0.8, gpu_seen=1, gpu_memory=4)
    found = {"cpu": 0.5, "cpu_share": 0.5 / processors(), "memory": 7, "disk": 10}
    assert (one + other).to_dict() == {**found, "gpu": 0.5, "gpu_memory": 4}
    assert one + Usage() == one
    assert set(Usage().to_dict().values()) == {None}


@pytest.mark.parametrize("told", [True, False])
def test_a_gpu_is_read_by_torch(monkeypatch, told):
    def utilization():
        if not told:
            raise ModuleNotFoundError("nvidia-ml-py")
        return 30

    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (3_000, 8_000))
    monkeypatch.setattr("torch.cuda.utilization", utilization)
    monitor = Monitor([1, 2])
    assert len(list(monitor)) == 2
    found = monitor.report().to_dict()
    assert (found["gpu"], found["gpu_memory"]) == (0.3 if told else None, 5_000)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    assert monitor._gpu() == Usage()
