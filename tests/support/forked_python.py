"""``subprocess.Popen`` for Python programs, forked from a process that has imported PyTorch.

Their imports take five seconds of a core, more than most programs of tests run for. What starts
them need not know: with :func:`forks_python`, commands that begin with this interpreter are forked
from one process, which has imported PyTorch and Megatron and nothing of this project, and all else
is started as ever. A forked program has the pipes, files, folder and variables that it was given,
its own process id, and is a child of the process that called ``Popen``.

Not for tests of what a new interpreter does.
"""

import atexit
import contextlib
import ctypes
import functools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

from tests.support.environment import without_launcher
from tests.support.forked import leave, prepare

ROOT = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None, use_errno=True)
# Options of the interpreter that are understood, or without consequence.
_FLAGS, _FLAGS_OF_A_WORD = {"-P", "-u"}, {"-W"}
# Imported to fork; a program has not imported them.
_OWN = ("tests", "console")


@contextlib.contextmanager
def forks_python() -> Iterator[None]:
    """Fork Python programs inside the block; on a machine with a GPU, start them as ever."""
    if torch.cuda.is_available():
        yield
        return
    fork_server()
    with mock.patch.object(subprocess, "Popen", ForkedPopen):
        yield


# Its search path before anything is imported is that of programs.
_SERVER = """
import sys
path = sys.path[1:]
from tests.support.forked_python import serve
serve(path)
"""
_Popen = subprocess.Popen


class ForkedPopen(_Popen):
    """``subprocess.Popen``; a Python program is forked from a process of these tests."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        command = _understood(args) if executable is None and not rest[2] else None
        if command is None:
            real = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
            return super()._execute_child(*real)
        pipes, session = rest[3:9], rest[14]
        streams = [pipes[0], pipes[3], pipes[5]]
        request = {
            "command": command,
            "environment": dict(os.environ if env is None else env),
            "folder": os.fspath(cwd or os.getcwd()),
            "descriptors": list(pass_fds),
            "parent": os.getpid(),
            "session": bool(session),
            # The only function that this project's programs give.
            "ends_with_parent": preexec_fn is not None,
        }
        streams = [own if given < 0 else given for own, given in enumerate(streams)]
        self.pid = fork_server().fork(request, [*streams, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)
        return None


def _understood(args) -> dict | None:
    """A command line as the interpreter reads it, or None."""
    words = [os.fspath(args)] if isinstance(args, str | os.PathLike) else [*map(os.fspath, args)]
    if words[0] != sys.executable:
        return None
    flags, words = [], words[1:]
    while words and words[0] in _FLAGS | _FLAGS_OF_A_WORD:
        count = 2 if words[0] in _FLAGS_OF_A_WORD else 1
        flags.append(words[0])
        words = words[count:]
    if not words or (words[0].startswith("-") and words[0] not in ("-c", "-m")):
        return None
    kind = words.pop(0) if words[0] in ("-c", "-m") else "script"
    return {"kind": kind, "words": words, "safe_path": "-P" in flags}


class _ForkServer:
    """A process that forks programs, for as long as this one lives."""

    def __init__(self) -> None:
        self._socket, its = socket.socketpair()
        with its:
            self._process = _Popen(
                [sys.executable, "-W", "ignore", "-c", _SERVER, str(its.fileno())],
                env=without_launcher(OMP_NUM_THREADS="1", PYTHONPATH=""),
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
            )

    def fork(self, request: dict, descriptors: list[int]) -> int:
        """Fork a program, which becomes a child of this process; returns its process id."""
        # A program whose parent has ended gets the nearest process that asks for such.
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            text = json.dumps(request).encode()
            socket.send_fds(self._socket, [len(text).to_bytes(8, "little")], descriptors)
            self._socket.sendall(text)
            answer = self._socket.recv(16)
        finally:
            _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0)
        if not answer:
            raise RuntimeError("the process that forks programs has ended")
        return int(answer)


@functools.cache
def fork_server() -> _ForkServer:
    """One for all tests of this process; it ends with this process."""
    return _ForkServer()


def _serve(connection: socket.socket, base_path: list[str]) -> None:
    while True:
        size, descriptors, _, _ = socket.recv_fds(connection, 8, 64)
        if not size:
            return
        text = b""
        while len(text) < int.from_bytes(size, "little"):
            text += connection.recv(int.from_bytes(size, "little") - len(text))
        pid = os.fork()
        if not pid:
            if os.fork():
                os._exit(0)
            leave(_run, connection, json.loads(text), descriptors, base_path)
        os.waitpid(pid, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _run(
    connection: socket.socket, request: dict, descriptors: list[int], base_path: list[str]
) -> None:
    """What a forked process does: becomes what was asked for, and runs the program."""
    while os.getppid() != request["parent"]:
        time.sleep(0.001)
    if request["ends_with_parent"]:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if request["session"]:
        os.setsid()
    connection.sendall(str(os.getpid()).encode())
    connection.close()
    become(request, descriptors, base_path)


def become(request: dict, descriptors: list[int], base_path: list[str]) -> None:
    """Run a program in this process, which is a forked one, as if it had started it.

    Args:
        request: As of :class:`ForkedPopen`.
        descriptors: Open files: its streams, then those of the request.
        base_path: Its search path without the program's own folder.
    """
    _take(descriptors, [0, 1, 2, *request["descriptors"]])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    _open_streams()
    for name in [name for name in sys.modules if name.split(".")[0] in _OWN]:
        del sys.modules[name]
    tempfile.tempdir = None  # depends on a variable
    try:
        _run_program(**request["command"], base_path=base_path)
        threading._shutdown()  # waits for threads, as at the end of the interpreter
    except KeyboardInterrupt:
        traceback.print_exc()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _take(descriptors: list[int], numbers: list[int]) -> None:
    """Give open files the numbers that the program knows them by."""
    free = max([*descriptors, *numbers]) + 1
    for place, descriptor in enumerate(descriptors):
        os.dup2(descriptor, free + place)
        os.close(descriptor)
    for place, number in enumerate(numbers):
        os.dup2(free + place, number)
        os.close(free + place)


def _open_streams() -> None:
    """They behave as the files that they are now."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stdout.reconfigure(write_through=unbuffered, line_buffering=os.isatty(1))
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", errors="backslashreplace", closefd=False)
    sys.stderr.reconfigure(line_buffering=True)


def _run_program(kind: str, words: list[str], safe_path: bool, base_path: list[str]) -> None:
    more = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = (
        "" if kind in ("-c", "-") else os.getcwd() if kind == "-m" else str(Path(words[0]).parent)
    )
    # An interpreter removes what stands twice: .pth files may name a folder of the variable.
    paths = dict.fromkeys(map(os.path.abspath, [*more, *base_path]))
    sys.path[:] = [*([] if safe_path else [first]), *paths]
    if kind in ("-c", "-"):
        sys.argv = [kind, *words[1:]]
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        text = words[0] if kind == "-c" else sys.stdin.read()
        exec(compile(text, "<string>", "exec"), vars(main))
    elif kind == "-m":
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def serve(base_path: list[str]) -> None:
    """What the process does that forks programs, over the socket of its argument."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    prepare()
    with contextlib.suppress(KeyboardInterrupt):
        _serve(connection, base_path)
