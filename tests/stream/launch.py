"""Ranks as torchrun starts them, but forked by one process: to import torch takes each seconds.

`python -m tests.stream.launch MODULE JOBS FOLDER`: JOBS is JSON, of each job the number of ranks
and what MODULE's `main` is called with in each of them, whose result is written into the folder.
The next job begins when all of them are done. What is slow to import may be imported before that by
its `prepare`.
"""

import datetime
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from tests.forks import assert_may_fork

ROOT = Path(__file__).parents[2]
SECONDS = 240  # in which a rank has long ended: one that hangs ends by itself, and is named


def launch(module, jobs):
    """Run jobs in a process of their own: of each what its ranks return."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "tests.stream.launch", module, json.dumps(jobs, default=str), folder]
        run = subprocess.run(
            [sys.executable, *words],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, cwd=ROOT,
            capture_output=True, text=True, timeout=SECONDS + 40, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        return [
            [json.loads(Path(folder, f"{job}-{rank}").read_text()) for rank in range(world)]
            for job, (world, *_) in enumerate(jobs)
        ]


def _rank(main, rank, world, port, arguments, file):
    import torch.distributed as dist

    place = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in place.items()})
    signal.alarm(SECONDS)
    code = 1
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
        file.write_text(json.dumps(main(*arguments)))
        dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)  # at the end of the interpreter gloo may wait for models that are still there


def main(module, jobs, folder):
    import torch.distributed as dist

    made = importlib.import_module(module)
    getattr(made, "prepare", lambda: None)()
    for job, (world, *arguments) in enumerate(json.loads(jobs)):
        children, (receive, send) = [], os.pipe()
        for rank in range(world):
            assert_may_fork()
            child = os.fork()
            if not child:
                os.close(send)  # so that it does not wait for a launcher that has ended
                port, file = int(os.read(receive, 8)), Path(folder, f"{job}-{rank}")
                _rank(made.main, rank, world, port, arguments, file)
            children.append(child)
        # Not before: its thread may hold a lock of libc, which a fork would copy for ever.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(send, f"{store.port:8}".encode() * world)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert codes == [0] * world, f"{module}, {arguments}: {codes}"
        del store  # and its thread


if __name__ == "__main__":
    main(*sys.argv[1:])
