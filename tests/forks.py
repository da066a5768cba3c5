"""Commands that share one start of an interpreter: a server that has imported all, and forks.

`bin/shardkit` in a folder of its own asks the server, which forks for each request and does the
work with the client's arguments, environment, folder and open files. What it does is what the
command does, but for the start, which takes most of its time on little data.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Passes its arguments and open files on, and ends as the fork does.
_CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    asked = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(asked).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(asked)
    code = server.recv(1)
sys.exit(code[0] if code else "the fork did not end by itself")
"""
_SERVER = """
import atexit, json, os, signal, socket, sys, traceback
import numpy, PIL.Image, torch, torch.utils.data  # what most need, besides:
import shardkit.cli.convert, shardkit.conversion.run, shardkit.formats, shardkit.torch
from shardkit.cli import main

def work(argv, cwd, environ):
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = argv
    if argv[0].endswith("shardkit"):
        sys.path.remove("")
        main()
    else:  # `python FILE`
        sys.argv = argv[1:]
        with open(argv[1]) as file:
            exec(compile(file.read(), argv[1], "exec"), {"__name__": "__main__"})

def answer(client, files):
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)
    size = int.from_bytes(head, "big")
    asked = b""
    while len(asked) < size:
        asked += client.recv(size - len(asked))
    try:
        work(*json.loads(asked))
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

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen(64)
    print(flush=True)
    while True:
        client, _ = listener.accept()
        head, files, _, _ = socket.recv_fds(client, 8, 3)
        if not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            answer(client, files)
        for file in files:
            os.close(file)
        client.close()
"""


@contextmanager
def forking() -> Iterator[Path]:
    """A folder for PATH with a `shardkit` and a `python` whose processes are forks."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/socket"
        for name in ("shardkit", "forked-python"):
            file = Path(folder, name)
            file.write_text(_CLIENT.format(python=sys.executable, address=address))
            file.chmod(0o755)
        server = subprocess.Popen(
            [sys.executable, "-c", _SERVER, address], stdout=subprocess.PIPE, env=os.environ
        )
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"\n"
            yield Path(folder)
        finally:
            server.kill()
            server.communicate()
