"""Commands that share one start of an interpreter: a server that has imported all, and forks.

`shardkit` and `python` in a folder for PATH ask the server, which forks for each request and does
the work with the client's arguments, environment, folder and open files. What it does is what the
command does, but for the start, which takes most of its time on little data.
"""

import atexit
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
_IMPORTED = (
    *("numpy", "PIL.Image", "pyarrow", "tokenizers", "torch.utils.data"),
    "torch._dynamo",  # by the first step of an optimizer
    *("shardkit.cli.convert", "shardkit.conversion.run", "shardkit.torch"),
)
# Passes its arguments and open files on, and ends as the fork does.
_CLIENT = """#!{python} -IS
import json, os, socket, sys
if sys.argv[0].endswith("python") and not sys.argv[1].endswith(".py"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    asked = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(asked).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(asked)
    code = server.recv(1)
sys.exit(code[0] if code else "the fork did not end by itself")
"""


@contextmanager
def forking() -> Iterator[Path]:
    """A folder for PATH: the processes of its `shardkit`, and `python` for scripts, are forks."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/socket"
        for name in ("shardkit", "python"):
            file = Path(folder, name)
            file.write_text(_CLIENT.format(python=sys.executable, address=address))
            file.chmod(0o755)
        command = [sys.executable, "-m", "tests.forks", address]
        # As the command itself has it; on processors that are shared, torch's threads only wait.
        environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=environ) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"\n"
            try:
                yield Path(folder)
            finally:
                server.kill()


def assert_may_fork() -> None:
    """No other thread may hold a lock, which a fork would copy for ever.

    jemalloc's own takes care of forks; one that was joined may still be listed for a moment.
    """
    began = time.monotonic()
    while threads := [name for name in _other_threads() if name != "jemalloc_bg_thd"]:
        assert time.monotonic() - began < 60, f"other threads run beside a fork: {threads}"
        time.sleep(0.001)


def _other_threads() -> Iterator[str]:
    """Their names, where Linux tells them."""
    for thread in Path("/proc/self/task").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if thread.name != str(os.getpid()):
                yield (thread / "comm").read_text().strip()


def serve(address: str) -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        print(flush=True)
        while True:
            client, _ = listener.accept()
            head, files, _, _ = socket.recv_fds(client, 8, 3)
            assert_may_fork()
            if not os.fork():
                listener.close()
                _answer(client, int.from_bytes(head, "big"), files)
            for file in files:
                os.close(file)
            client.close()
            try:  # those that have ended, so that their time is counted
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                pass


def _answer(client: socket.socket, size: int, files: list[int]) -> None:
    """In a fork: do what is asked, and end."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    try:
        with client.makefile("rb") as request:
            asked = request.read(size)
        _work(*json.loads(asked))
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120
    client.send(bytes([code & 255]))
    os._exit(code & 255)


def _work(argv: list[str], cwd: str, environ: dict[str, str]) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = argv
    if argv[0].endswith("shardkit"):
        from shardkit.cli import main

        del sys.path[0]
        main()
        return
    sys.argv, file = argv[1:], Path(argv[1]).resolve()
    sys.path[0] = str(file.parent)
    script = sys.modules["__main__"] = ModuleType("__main__")
    script.__file__ = argv[1]
    exec(compile(file.read_text("utf-8"), argv[1], "exec"), vars(script))


if __name__ == "__main__":
    serve(sys.argv[1])
