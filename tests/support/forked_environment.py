"""A virtual environment whose Python programs are forked from a process that has imported PyTorch.

The commands of README.md and docs/ are some fifty processes, whose imports take most of their time.
Every interpreter of the environment asks a server at its start, hands it its streams, and waits for
the end of the program that the server has forked; those that import nothing large run as ever.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.forked import leave, prepare
from tests.support.forked_python import become

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("transformers.models.deepseek_v3.modeling_deepseek_v3", "safetensors.torch")

# Imported by every interpreter of the environment, when its search path is complete.
_CLIENT = """
import json, os, socket, sys

SERVER = {server!r}
FLAGS = {{"-u", "-P"}}


def hand_over():
    flags, words = [], sys.orig_argv[1:]
    while words and words[0] in FLAGS:
        flags.append(words.pop(0))
    kind = words.pop(0) if words and words[0] in ("-m", "-") else "script"
    scripts = os.path.join({folder!r}, "scripts", ""), os.path.join({folder!r}, ".venv", "bin", "")
    named = os.path.abspath(words[0]) if words else ""
    if not (
        (kind == "-" and not words)
        or (kind == "-m" and words[0] in ("torch.distributed.run", "checkpoint_conversion"))
        or (kind == "script" and named.startswith(scripts))
    ):
        return
    request = {{
        "command": {{"kind": kind, "words": words, "safe_path": "-P" in flags}},
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "descriptors": [],
        "path": sys.path,
    }}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(SERVER)
        text = json.dumps(request).encode()
        socket.send_fds(server, [len(text).to_bytes(8, "little")], [0, 1, 2])
        server.sendall(text)
        code = server.recv(16)
    os._exit(int(code or b"1"))


hand_over()
"""


@contextlib.contextmanager
def forks_programs(environment: Path) -> Iterator[None]:
    (site,) = environment.glob("lib/python*/site-packages")
    # The path of a socket is short.
    address = f"/tmp/forked-{os.getpid()}.socket"
    client = _CLIENT.format(server=address, folder=str(environment.parent))
    (site / "handed_over.py").write_text(client)
    python = str(environment / "bin" / "python")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(64)
    server = subprocess.Popen(
        [python, "-W", "ignore", "-c", _SERVER, str(listening.fileno())],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
        pass_fds=[listening.fileno()],
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
    )
    # Behind all others, whose folders it passes on.
    (site / "zz_handed_over.pth").write_text("import handed_over\n")
    try:
        yield
    finally:
        server.terminate()
        server.wait()
        listening.close()
        os.unlink(address)


_SERVER = """
import sys
from tests.support.forked_environment import serve
serve(int(sys.argv[1]))
"""


def serve(listening: int) -> None:
    """What the server does: forks the programs that it is asked for."""
    prepare(*MODULES)
    with socket.socket(fileno=listening) as server:
        while True:
            readable, _, _ = select.select([server], [], [], 1.0)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not readable:
                continue
            connection, _ = server.accept()
            if not os.fork():
                leave(_watch, connection)
            connection.close()


def _watch(connection: socket.socket) -> None:
    """Run a program in a process of its own, and say how it ended, to whom it must not outlive."""
    size, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
    text = b""
    while len(text) < int.from_bytes(size, "little"):
        text += connection.recv(1 << 16)
    request = json.loads(text)
    pid = os.fork()
    if not pid:
        connection.close()
        leave(become, request, descriptors, request["path"])
    for descriptor in descriptors:
        os.close(descriptor)
    ended, watched = 0, [connection]
    while not ended:
        if select.select(watched, [], [], 0.02)[0]:
            os.kill(pid, signal.SIGTERM)
            watched = []
        ended, status = os.waitpid(pid, os.WNOHANG)
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(OSError):
        connection.sendall(str(code if code >= 0 else 128 - code).encode())
